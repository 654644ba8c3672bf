//! `meta`: manager and metadata service.

#![forbid(unsafe_code)]

use clap::Parser;
use meta::args::Cli;
use std::process::ExitCode;

fn main() -> anyhow::Result<ExitCode> {
    let cli = Cli::parse();
    rpc::telemetry::init();
    meta::run(cli.command)
}

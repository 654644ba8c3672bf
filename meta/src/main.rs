//! `meta`: manager and metadata service.

#![forbid(unsafe_code)]

use clap::Parser;
use meta::args::{Cli, Command};
use std::process::ExitCode;

#[tokio::main]
async fn main() -> anyhow::Result<ExitCode> {
    let cli = Cli::parse();
    rpc::telemetry::init();
    match cli.command {
        Command::Serve(args) => meta::serve::serve(args).await.map(|()| ExitCode::SUCCESS),
        Command::Fsck(args) => meta::fsck(&args).await,
    }
}

//! The `scan-agent` binary.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;

fn main() -> anyhow::Result<ExitCode> {
    let args = scan_agent::args::Args::parse();
    rpc::privacy::close_process()?;
    Ok(scan_agent::args::run(args))
}

//! The `scan-agent` binary.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    scan_agent::args::run(scan_agent::args::Args::parse())
}

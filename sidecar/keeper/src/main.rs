//! The `lampyris-keeper` binary.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    keeper::args::run(&keeper::args::Args::parse())
}

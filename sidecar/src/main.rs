//! The `lampyris-mount` binary.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use sidecar::args::{self, Args, Command};

fn main() -> anyhow::Result<ExitCode> {
    match Args::parse().command {
        Command::Probe { private_dir } => Ok(args::probe(&private_dir)),
        Command::Serve(serve) => {
            rpc::telemetry::init();
            rpc::privacy::close_process()?;
            sidecar::memory::use_one_heap();
            serve.check().map_err(anyhow::Error::msg)?;
            // Never dropped: that would end tasks, and so answer requests with EIO that a successor can answer.
            let runtime = std::mem::ManuallyDrop::new(sidecar::run::runtime()?);
            runtime.block_on(async {
                sidecar::run::serve(&serve, rpc::shutdown::on_signal()?).await
            })?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

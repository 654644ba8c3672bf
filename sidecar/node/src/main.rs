//! The `lampyris-node` binary.
#![forbid(unsafe_code)]

use clap::Parser;
use node::args::{Args, Command};

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> anyhow::Result<()> {
    let Command::Serve(serve) = Args::parse().command;
    rpc::telemetry::init();
    serve.check().map_err(anyhow::Error::msg)?;
    tracing::info!(?serve, "starting");
    let stop = rpc::shutdown::on_signal()?;
    node::serve::run(serve, stop).await
}

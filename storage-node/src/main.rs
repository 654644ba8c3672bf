//! The storage server's process.

use clap::Parser as _;

fn main() -> anyhow::Result<()> {
    storage_node::server::run(storage_node::args::Args::parse())
}

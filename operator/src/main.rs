//! The Lampyris operator.
#![forbid(unsafe_code)]

fn main() -> anyhow::Result<()> {
    operator::args::Args::parse_and_run()
}

//! Metadata service and manager: who serves which chain, and what the files are called.
//!
//! Owns the transactional store and everything in it; never sees a byte of a file. [`txn`] is the
//! seam to the store, [`schema`] (with `SCHEMA.md`) every key and value, [`op`] the namespace as
//! functions of a transaction (rules M1–M8), [`service`] runs them once each, [`manager`] decides
//! about chains (rules T1, T2) by the `chain` crate's table, [`collect`] removes what was removed, [`chunks`] asks the
//! storage servers,
//! [`mod@fsck`] checks the shape. Begin at [`op`] or [`manager`]; [`serve`] ties them together.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod args;
pub mod chunks;
pub mod collect;
pub mod fsck;
pub mod manager;
pub mod op;
pub mod schema;
pub mod serve;
pub mod service;
pub mod txn;

use anyhow::Context;
use std::process::ExitCode;
use std::time::Duration;

/// How long the store may take to close at the end.
const CLOSE_PATIENCE: Duration = Duration::from_secs(5);

/// Runs a command to its end, and closes the store behind it.
///
/// # Errors
/// What kept the command from being carried out.
pub fn run(command: args::Command) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let result = runtime.block_on(async {
        match command {
            args::Command::Serve(args) => serve::serve(args).await.map(|()| ExitCode::SUCCESS),
            args::Command::Fsck(args) => fsck(&args).await,
        }
    });
    // Tasks hold the store: they end first.
    drop(runtime);
    anyhow::ensure!(txn::embedded::wait_closed(CLOSE_PATIENCE), "the store did not close");
    result
}

/// Runs `meta fsck`: findings to the log, exit code 1 if there is a problem.
///
/// # Errors
/// The store cannot be read.
async fn fsck(args: &args::FsckArgs) -> anyhow::Result<ExitCode> {
    let shown = args.data.display();
    anyhow::ensure!(args.data.join("CURRENT").is_file(), "--data {shown}: no store is there");
    let store = txn::embedded::Embedded::open(&args.data)
        .with_context(|| format!("--data {shown}: open the store"))?;
    let found = fsck::check(&store).await?;
    found.problems.iter().for_each(|problem| tracing::error!(problem, "found a problem"));
    let (inodes, names, orphans) = (found.inodes, found.names, found.orphans);
    tracing::info!(inodes, names, orphans, problems = found.problems.len(), "checked");
    Ok(if found.problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

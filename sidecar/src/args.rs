//! Flags of `lampyris-mount`, checked before anything starts.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::run::READY_FILE;

/// Serves the datasets of one pod as files and by shared-memory rings.
///
/// Runs unprivileged beside the application. The node plugin mounts, and hands the FUSE descriptors
/// over on node.sock in the private directory. Restarting this process costs the application a pause,
/// never an error.
#[derive(Debug, Parser)]
#[command(version)]
pub struct Args {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The two uses of the binary.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve until SIGTERM.
    Serve(Serve),
    /// Exit 0 once every volume of the pod is served; for the startup probe.
    Probe {
        /// Directory shared with the node plugin only.
        #[arg(long, default_value = "/run/lampyris/private")]
        private_dir: PathBuf,
    },
}

/// Flags of `serve`.
#[derive(Debug, clap::Args)]
pub struct Serve {
    /// Directory shared with the node plugin only: node.sock, mount-admin.sock, the readiness file.
    #[arg(long, default_value = "/run/lampyris/private")]
    pub private_dir: PathBuf,
    /// Directory shared with the application: ring.sock.
    #[arg(long, default_value = "/run/lampyris/app")]
    pub app_dir: PathBuf,
    /// Threads per mount that read FUSE requests [default: one per core, 2 to 8].
    #[arg(long, value_parser = clap::value_parser!(u8).range(1..=64))]
    pub fuse_threads: Option<u8>,
}

impl Serve {
    /// Checks what clap cannot.
    ///
    /// # Errors
    /// Names the flag and what to do.
    pub fn check(&self) -> Result<(), String> {
        directory("--private-dir", &self.private_dir)?;
        directory("--app-dir", &self.app_dir)
    }
}

fn directory(flag: &str, path: &Path) -> Result<(), String> {
    if path.is_dir() {
        return Ok(());
    }
    Err(format!("{flag} {}: no such directory; mount an emptyDir there", path.display()))
}

/// Whether the sidecar of a private directory serves every volume.
#[must_use]
pub fn probe(private_dir: &Path) -> ExitCode {
    if private_dir.join(READY_FILE).exists() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

//! Flags of `lampyris-node`, checked before anything starts.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Parser, Subcommand};

/// Mounts datasets into pods of this node and hands the mounts to their sidecars.
///
/// Serves CSI's node service for inline volumes of driver csi.lampyris.dev, registers itself with
/// kubelet and installs the seccomp profile of storage pods. Runs as root and privileged; needs
/// the kubelet directory with bidirectional mount propagation, and the keeper beside it.
#[derive(Debug, Parser)]
#[command(version)]
pub struct Args {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The uses of the binary.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve until SIGTERM.
    Serve(Serve),
}

/// Flags of `serve`.
#[derive(Debug, Clone, clap::Args)]
pub struct Serve {
    /// Name of this node in Kubernetes.
    #[arg(long, env = "NODE_NAME")]
    pub node_name: String,
    /// Kubelet's directory, under the same path as on the host.
    #[arg(long, default_value = "/var/lib/kubelet")]
    pub kubelet_dir: PathBuf,
    /// Address of the admin endpoint: /healthz /readyz /metrics /state.
    #[arg(long, default_value = "0.0.0.0:9810")]
    pub admin: SocketAddr,
    /// Serve without an API server, refusing every new volume: for conformance tests.
    #[arg(long, hide = true)]
    pub offline: bool,
}

impl Serve {
    /// Checks what clap cannot.
    ///
    /// # Errors
    /// Names the flag and what to do.
    pub fn check(&self) -> Result<(), String> {
        if self.node_name.is_empty() || self.node_name.len() > 253 {
            return Err("--node-name must be the node's name, 1 to 253 characters".to_owned());
        }
        let dir = &self.kubelet_dir;
        if !dir.is_absolute() || !dir.is_dir() {
            return Err(format!(
                "--kubelet-dir {}: no such directory; mount the host's kubelet directory there",
                dir.display()
            ));
        }
        Ok(())
    }

    /// Directory of the driver's sockets.
    #[must_use]
    pub fn plugin_dir(&self) -> PathBuf {
        self.kubelet_dir.join("plugins").join(crate::csi::DRIVER_NAME)
    }

    /// The keeper's socket.
    #[must_use]
    pub fn keeper(&self) -> PathBuf {
        self.plugin_dir().join("keeper.sock")
    }
}

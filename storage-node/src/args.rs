//! What the command line says, checked before anything is opened.

use std::path::PathBuf;

use clap::{Parser, Subcommand, ValueEnum};

use crate::engine::IoMode;

/// Keeps replicas of chunks on the disks of one node, and serves them.
///
/// Every chunk lives on a chain of targets on different nodes. This server registers with the
/// manager, which tells it the targets to hold and grants the lease under which it may answer.
#[derive(Debug, Parser)]
#[command(name = "storage-node", version)]
pub struct Args {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve until SIGTERM.
    Serve(Serve),
    /// Check every record and page of a disk that no server has open; exits with 1 if one is bad.
    Verify {
        /// The directory that was given to `serve`.
        #[arg(long)]
        data: PathBuf,
    },
}

/// How to serve.
#[derive(Clone, Debug, clap::Args)]
pub struct Serve {
    /// Name of the cluster. A disk of another cluster is refused.
    #[arg(long, value_parser = rpc::flags::cluster)]
    pub cluster: String,
    /// Number of this node in the cluster, from 10001 up, never used again.
    #[arg(long, value_parser = clap::value_parser!(u32).range(10_001..))]
    pub node_id: u32,
    /// A directory that is one disk; give one for each disk, always in the same order.
    #[arg(long, required = true)]
    pub data: Vec<PathBuf>,
    /// Where the manager answers, `host:port`.
    #[arg(long, value_parser = rpc::flags::host_port)]
    pub manager: String,
    /// Where to answer clients and other servers.
    #[arg(long, default_value = "0.0.0.0:9100")]
    pub listen: std::net::SocketAddr,
    /// Where others reach `--listen`, `host:port`; port 0 stands for the port that was bound.
    #[arg(long, value_parser = rpc::flags::host_port)]
    pub advertise: String,
    /// Where to answer /healthz, /readyz, /metrics and /state.
    #[arg(long, default_value = "0.0.0.0:9101")]
    pub admin: std::net::SocketAddr,
    /// How to do block IO.
    #[arg(long, value_enum, default_value_t = Io::Auto)]
    pub io: Io,
}

/// How to do block IO.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Io {
    /// `io_uring` where the kernel allows it, else threads.
    Auto,
    /// `io_uring`, or do not start.
    Uring,
    /// A few threads.
    Threads,
}

impl From<Io> for IoMode {
    fn from(io: Io) -> Self {
        match io {
            Io::Auto => Self::Auto,
            Io::Uring => Self::Uring,
            Io::Threads => Self::Threads,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(extra: &[&str]) -> Result<Args, clap::Error> {
        let base = ["storage-node", "serve", "--cluster", "c", "--node-id", "10001"];
        Args::try_parse_from(base.iter().chain(extra))
    }

    fn refusal(cluster: &str, node_id: &str) -> String {
        let named = ["storage-node", "serve", "--cluster", cluster, "--node-id", node_id];
        let rest = ["--data", "/d", "--manager", "m:9000", "--advertise", "1.2.3.4:9100"];
        let parsed = Args::try_parse_from(named.iter().chain(&rest));
        parsed.err().map(|error| error.to_string()).unwrap_or_default()
    }

    #[test]
    fn names_and_numbers_that_no_cluster_gives_are_refused() {
        let longest = "a".repeat(63);
        for (cluster, node_id) in [("train-2", "10001"), (&longest, "4294967295")] {
            assert_eq!(refusal(cluster, node_id), "");
        }
        for cluster in ["", "Train", "a b", "a/b", "zürich", &"a".repeat(64)] {
            let text = refusal(cluster, "10001");
            assert!(text.contains("--cluster") && text.contains("1 to 63"), "{cluster}: {text}");
        }
        for node_id in ["0", "1", "10000", "4294967296", "x"] {
            let text = refusal("train", node_id);
            assert!(text.contains("--node-id") && text.contains(node_id), "{node_id}: {text}");
        }
    }

    #[test]
    fn flags_are_refused_with_their_name() {
        let whole = ["--data", "/d", "--manager", "m:9000", "--advertise", "1.2.3.4:9100"];
        assert!(parse(&whole).is_ok());
        let bad = parse(&["--data", "/d", "--manager", "m", "--advertise", "1.2.3.4:9100"]);
        let text = bad.unwrap_err().to_string();
        assert!(text.contains("--manager") && text.contains("HOST:PORT"), "{text}");
        let missing = parse(&["--manager", "m:1", "--advertise", "1.2.3.4:9100"]);
        assert!(missing.unwrap_err().to_string().contains("--data"));
    }
}

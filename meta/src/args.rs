//! The command line.

use clap::{Args, Parser, Subcommand};
use std::path::PathBuf;

/// Manager and metadata service of a Lampyris cluster.
///
/// The manager grants leases to storage servers and decides who serves each chain; the metadata
/// service keeps directories, files and their layouts. Both are roles of one process over one
/// transactional store in --data.
#[derive(Debug, Parser)]
#[command(name = "meta", version)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve both roles until SIGTERM.
    Serve(ServeArgs),
    /// Check the namespace in --data, which no process may have open. Exits 1 if it finds a
    /// problem.
    Fsck(FsckArgs),
}

/// Flags of `meta serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Name of the cluster. Storage servers of another one are refused, and so is a store.
    #[arg(long, value_parser = rpc::flags::cluster)]
    pub cluster: String,
    /// Directory of the store, made if absent. Losing it loses the file system.
    #[arg(long, value_name = "DIR")]
    pub data: PathBuf,
    /// Address for clients and storage servers.
    #[arg(long, value_name = "HOST:PORT", default_value = "0.0.0.0:9000", value_parser = rpc::flags::host_port)]
    pub listen: String,
    /// Address of /healthz, /readyz, /metrics, /state, PUT /v1/table and GET /v1/status.
    #[arg(long, value_name = "HOST:PORT", default_value = "0.0.0.0:9001", value_parser = rpc::flags::host_port)]
    pub admin: String,
    /// How long the bytes of a removed file stay, for those who have it open for reading.
    #[arg(long, value_name = "SECONDS", default_value_t = crate::collect::GRACE.as_secs())]
    pub grace_seconds: u64,
}

/// Flags of `meta fsck`.
#[derive(Debug, Args)]
pub struct FsckArgs {
    /// Directory of the store.
    #[arg(long, value_name = "DIR")]
    pub data: PathBuf,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(arguments: &[&str]) -> String {
        let all = ["meta"].iter().chain(arguments);
        Cli::try_parse_from(all).unwrap_err().to_string()
    }

    #[test]
    fn a_wrong_flag_is_named_with_the_fix() {
        let serve = ["serve", "--cluster", "train", "--data", "/d"];
        let with = |more: &[&'static str]| error(&[&serve[..], more].concat());
        assert!(with(&["--listen", "9000"]).contains("use HOST:PORT, for example 10.0.0.1:9000"));
        assert!(with(&["--admin", "host:99999"]).contains("--admin"));
        assert!(error(&["serve", "--cluster", "Train", "--data", "/d"]).contains("StorageCluster"));
        assert!(error(&["serve", "--cluster", "train"]).contains("--data"));
    }

    #[test]
    fn the_ports_have_defaults() {
        let cli = Cli::parse_from(["meta", "serve", "--cluster", "train", "--data", "/d"]);
        let Command::Serve(args) = cli.command else { panic!("serve") };
        assert_eq!((&*args.listen, &*args.admin), ("0.0.0.0:9000", "0.0.0.0:9001"));
    }
}

//! The command line: what each subcommand needs, checked before anything starts.

use std::io::ErrorKind;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};
use source::{Credentials, Failure, Reason, SourceConfig};

use crate::{digest_command, inspect, load, make_data, serve};

/// Scans Vortex datasets for a training loop in the same pod, and looks at them for the operator.
#[derive(Debug, Parser)]
#[command(version)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Answer scans on APP_DIR/scan.sock until SIGTERM (the native sidecar lampyris-scan).
    Serve(Serve),
    /// Describe a dataset: files, rows, bytes, columns, digests; one JSON object.
    Inspect(Inspect),
    /// Copy every file of an S3 dataset into a storage cluster and compare checksums.
    Load(Load),
    /// Make a deterministic data set, or write an existing Vortex file again, with its digests.
    MakeData(MakeData),
    /// Print the canonical row digest (DIGEST.md) of Vortex files below a path.
    Digest(Digest),
}

#[derive(Debug, ClapArgs)]
struct Serve {
    /// Directory shared with the node plugin and the mount sidecar only.
    #[arg(long, default_value = "/run/lampyris/private")]
    private_dir: PathBuf,
    /// Directory shared with the application.
    #[arg(long, default_value = "/run/lampyris/app")]
    app_dir: PathBuf,
    /// A dataset outside Kubernetes: NAME=PATH of a directory or file. May be repeated.
    #[arg(long, value_name = "NAME=PATH", value_parser = parse_local)]
    dataset: Vec<(String, PathBuf)>,
    /// How long scans may go on after SIGTERM; less than the 30 s after which Kubernetes kills the pod. A second
    /// SIGTERM ends them at once.
    #[arg(long, value_name = "SECONDS", default_value_t = 20)]
    drain_seconds: u64,
}

#[derive(Debug, ClapArgs)]
struct SourceArgs {
    /// File with the configuration as JSON, as the operator writes it.
    #[arg(long, conflicts_with = "config_json", required_unless_present = "config_json")]
    config: Option<PathBuf>,
    /// The same JSON as an argument; never put secrets here.
    #[arg(long)]
    config_json: Option<String>,
    /// A mounted Secret: files accessKeyId, secretAccessKey and optionally sessionToken.
    #[arg(long)]
    credentials_dir: Option<PathBuf>,
}

#[derive(Debug, ClapArgs)]
struct Inspect {
    #[command(flatten)]
    source: SourceArgs,
    /// Where the result is written besides standard output.
    #[arg(long, default_value = "/dev/termination-log")]
    result: PathBuf,
}

#[derive(Debug, ClapArgs)]
struct Load {
    /// JSON {"from": SOURCE, "to": {"manager", "path"}, "parallelism"}.
    #[command(flatten)]
    source: SourceArgs,
    /// Where progress is shown at GET /state.
    #[arg(long, default_value = "0.0.0.0:9820")]
    admin: String,
    /// Where the result is written besides standard output.
    #[arg(long, default_value = "/dev/termination-log")]
    result: PathBuf,
}

#[derive(Debug, ClapArgs)]
struct MakeData {
    /// What to make.
    #[arg(long, value_enum, default_value_t = Kind::Synthetic)]
    kind: Kind,
    /// Size of the rows before encoding, all files together (synthetic).
    #[arg(long, default_value_t = 64 << 20)]
    bytes: u64,
    /// Number of files (synthetic).
    #[arg(long, default_value_t = 1)]
    files: u32,
    /// Another seed makes other rows.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The Vortex file to write again (rewrite).
    #[arg(long, required_if_eq("kind", "rewrite"))]
    from: Option<PathBuf>,
    /// Directory that the files and digests.json go to.
    #[arg(long)]
    out: PathBuf,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Kind {
    Synthetic,
    Rewrite,
}

#[derive(Debug, ClapArgs)]
struct Digest {
    /// A directory or a file.
    path: PathBuf,
    /// Columns in the order they are digested; all by default.
    #[arg(long, value_delimiter = ',')]
    columns: Option<Vec<String>>,
    /// Only rows for which this holds.
    #[arg(long)]
    r#where: Option<String>,
}

/// Runs the subcommand; a failure is printed once, with its causes.
pub fn run(args: Args) -> ExitCode {
    rpc::telemetry::init();
    let runtime =
        match tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => {
                tracing::error!(%error, "start the runtime");
                return ExitCode::FAILURE;
            }
        };
    let outcome = dispatch(args.command, &runtime);
    runtime.shutdown_background();
    match outcome {
        Ok(code) => code,
        Err(error) => {
            tracing::error!(error = format!("{error:#}"), "scan-agent ends");
            ExitCode::FAILURE
        }
    }
}

fn dispatch(command: Command, runtime: &tokio::runtime::Runtime) -> anyhow::Result<ExitCode> {
    let io = runtime.handle();
    match command {
        Command::Serve(args) => {
            let config = serve::Config {
                private_dir: existing(args.private_dir, "--private-dir")?,
                app_dir: existing(args.app_dir, "--app-dir")?,
                local: args.dataset,
                drain: Duration::from_secs(args.drain_seconds),
            };
            runtime.block_on(serve::run(config)).map(|()| ExitCode::SUCCESS)
        }
        Command::Inspect(args) => {
            let (text, keys) = (args.source.text()?, args.source.keys());
            runtime.block_on(inspect::run(text, keys, &args.result))
        }
        Command::Load(args) => {
            let (text, keys) = (args.source.text()?, args.source.keys());
            runtime.block_on(load::run(&text, keys, &args.admin, &args.result))
        }
        Command::MakeData(args) => match (args.kind, args.from) {
            (Kind::Rewrite, Some(from)) => make_data::rewrite(&from, &args.out, io),
            _ => make_data::synthetic(args.bytes, args.files, args.seed, &args.out),
        }
        .map(|()| ExitCode::SUCCESS),
        Command::Digest(args) => {
            digest_command::run(&args.path, args.columns, args.r#where.as_deref(), io)
        }
    }
}

impl SourceArgs {
    fn text(&self) -> anyhow::Result<String> {
        match (&self.config, &self.config_json) {
            (Some(path), _) => std::fs::read_to_string(path)
                .with_context(|| format!("read --config {}", path.display())),
            (None, Some(text)) => Ok(text.clone()),
            (None, None) => anyhow::bail!("give --config or --config-json"),
        }
    }

    /// A Secret without its keys is a failure for the result, not a crash: the user can mend it.
    fn keys(&self) -> Result<Option<Credentials>, Failure> {
        let Some(dir) = &self.credentials_dir else {
            return Ok(None);
        };
        let bad = |message: String| Failure::new(Reason::InvalidCredentials, message);
        let read = |name: &str| match std::fs::read_to_string(dir.join(name)) {
            Ok(text) => Ok(Some(text.trim_end_matches('\n').to_owned())),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(bad(format!("read {name} of the dataset's Secret: {error}"))),
        };
        let need = |name: &str| {
            read(name)?.ok_or_else(|| bad(format!("the Secret of the dataset has no {name}")))
        };
        Ok(Some(Credentials {
            access_key_id: need("accessKeyId")?,
            secret_access_key: need("secretAccessKey")?,
            session_token: read("sessionToken")?,
        }))
    }
}

/// The source of `text` with the credentials of a mounted Secret.
pub(crate) fn with_keys(mut config: SourceConfig, keys: Option<Credentials>) -> SourceConfig {
    if let (SourceConfig::S3(s3), Some(keys)) = (&mut config, keys) {
        s3.credentials = Some(keys);
    }
    config
}

fn existing(dir: PathBuf, flag: &str) -> anyhow::Result<PathBuf> {
    anyhow::ensure!(dir.is_dir(), "{flag} {} is not a directory", dir.display());
    Ok(dir)
}

fn parse_local(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once('=') {
        Some((name, path)) if !name.is_empty() && !path.is_empty() => {
            Ok((name.to_owned(), PathBuf::from(path)))
        }
        _ => Err("must be NAME=PATH".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn only_a_missing_session_token_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let credentials_dir = Some(dir.path().to_owned());
        let args = SourceArgs { config: None, config_json: None, credentials_dir };
        let said = || args.keys().unwrap_err().message;
        assert_eq!(said(), "the Secret of the dataset has no accessKeyId");
        std::fs::write(dir.path().join("accessKeyId"), "id\n").unwrap();
        std::fs::write(dir.path().join("secretAccessKey"), "secret").unwrap();
        let keys = args.keys().unwrap().unwrap();
        assert_eq!((keys.access_key_id.as_str(), keys.session_token), ("id", None));
        // There, but not to be read.
        std::fs::create_dir(dir.path().join("sessionToken")).unwrap();
        assert!(said().starts_with("read sessionToken of the dataset's Secret: "), "{}", said());
    }

    #[test]
    fn a_dataset_flag_without_a_path_is_refused() {
        assert!(Args::try_parse_from(["scan-agent", "serve", "--dataset", "flights"]).is_err());
        assert!(Args::try_parse_from(["scan-agent", "inspect"]).is_err());
        let rewrite = ["scan-agent", "make-data", "--kind", "rewrite", "--out", "/tmp/x"];
        assert!(Args::try_parse_from(rewrite).is_err());
    }
}

//! `scan-agent load`: every file of a dataset copied into the store, once, and compared.
//!
//! A file is streamed in pieces under a name that no scan takes for data, flushed, read back from
//! the replicas and compared by sha256, and only then given its name. A load that is started again
//! copies again; it never leaves half a file under a real name, and what it could not finish it
//! removes, if it is given the time.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;
use client::{Attributes, Client, ClientOptions, Code, InodeId};
use futures::StreamExt;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use rpc::admin::Admin;
use rpc::shutdown::stopped;
use serde::Deserialize;
use sha2::{Digest, Sha256};
use source::{ClusterConfig, Credentials, Failure, Object, Reason, Source, SourceConfig};
use tokio::net::TcpListener;
use tokio::sync::watch;

/// Bytes in flight for one file; with the parallelism it bounds the memory.
const PIECE: u64 = 4 << 20;
/// Files at once, if the DatasetLoad does not say.
const DEFAULT_PARALLELISM: usize = 4;
/// Most files at once.
const MAX_PARALLELISM: usize = 32;
/// Failures listed in the result.
const MAX_FAILURES: usize = 10;
/// Removing what is unfinished may take this long: less than the 5 s that the Job's pod has after SIGTERM.
const SWEEP: Duration = Duration::from_secs(3);

/// What to copy where, as the operator renders it.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Config {
    from: SourceConfig,
    to: SourceConfig,
    #[serde(default)]
    parallelism: Option<usize>,
}

/// How far a load is.
#[derive(Debug)]
struct Progress {
    started: Instant,
    phase: watch::Sender<Phase>,
    files_done: Counter,
    files_total: Gauge,
    bytes_done: Counter,
    bytes_total: Gauge,
    failed: Family<FailureLabels, Counter>,
    failures: Mutex<Vec<(String, Failure)>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Listing,
    Copying,
    Ended,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FailureLabels {
    reason: String,
}

impl Progress {
    fn new() -> Self {
        Self {
            started: Instant::now(),
            phase: watch::Sender::new(Phase::Listing),
            files_done: Counter::default(),
            files_total: Gauge::default(),
            bytes_done: Counter::default(),
            bytes_total: Gauge::default(),
            failed: Family::default(),
            failures: Mutex::default(),
        }
    }

    /// Registers everything under `lampyris_load_`.
    fn register(&self, registry: &mut Registry) {
        let registry = registry.sub_registry_with_prefix("lampyris_load");
        registry.register("copied_files", "Files copied and compared", self.files_done.clone());
        registry.register("copied_bytes", "Bytes copied", self.bytes_done.clone());
        registry.register("dataset_files", "Files to copy in all", self.files_total.clone());
        registry.register("dataset_bytes", "Bytes to copy in all", self.bytes_total.clone());
        registry.register("failures", "Files that could not be copied", self.failed.clone());
    }

    fn ready(&self) -> Result<(), String> {
        match *self.phase.borrow() {
            Phase::Listing => Err("waiting for the list of files".to_owned()),
            Phase::Copying => Ok(()),
            Phase::Ended => Err("the load has ended".to_owned()),
        }
    }

    fn begin(&self, objects: &[Object]) {
        let whole = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
        self.files_total.set(whole(objects.len() as u64));
        self.bytes_total.set(whole(objects.iter().map(|object| object.size).sum()));
        self.phase.send_replace(Phase::Copying);
    }

    fn fail(&self, object: &Object, failure: Failure) {
        tracing::warn!(path = object.path, %failure, "copy failed");
        let labels = FailureLabels { reason: failure.reason.to_string() };
        self.failed.get_or_create(&labels).inc();
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        failures.push((object.path.clone(), failure));
    }

    fn to_json(&self) -> serde_json::Value {
        let done = self.bytes_done.get();
        let total = u64::try_from(self.bytes_total.get()).unwrap_or(0);
        let elapsed_ms = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        serde_json::json!({
            "filesDone": self.files_done.get(),
            "filesTotal": self.files_total.get(),
            "bytesDone": done,
            "bytesTotal": total,
            "percent": (done * 100).checked_div(total).unwrap_or(0),
            "rateBytesPerSecond": done.saturating_mul(1000) / elapsed_ms.max(1),
        })
    }
}

/// Why a load ended without every file.
enum End {
    Failed(Failure),
    /// It was asked to end; another try goes on.
    Interrupted,
}

impl From<Failure> for End {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

/// Copies and writes the result; the exit code says whether every file is there and equal.
pub async fn run(
    config: &str,
    keys: Result<Option<Credentials>, Failure>,
    admin: &str,
    result: &Path,
) -> anyhow::Result<ExitCode> {
    let progress = Arc::new(Progress::new());
    let stop = rpc::shutdown::on_signal().context("install signal handlers")?;
    let listener =
        TcpListener::bind(admin).await.with_context(|| format!("bind --admin {admin}"))?;
    let admin_task = tokio::spawn(rpc::admin::serve(listener, shown(&progress), stop.clone()));
    let outcome = match keys {
        Ok(keys) => load(config, keys, &progress, stop).await,
        Err(failure) => Err(failure.into()),
    };
    progress.phase.send_replace(Phase::Ended);
    admin_task.abort();
    let text = match &outcome {
        Ok(sha256) => serde_json::json!({"ok": {
            "files": progress.files_done.get(),
            "bytes": progress.bytes_done.get(),
            "sha256": sha256,
        }}),
        Err(End::Failed(failure)) => error_json(failure, &progress),
        Err(End::Interrupted) => {
            let (done, all) = (progress.files_done.get(), progress.files_total.get());
            crate::inspect::interrupted(&format!("{done} of {all} files were copied"))
        }
    };
    crate::inspect::write_result(&text, result)?;
    Ok(if outcome.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The load's own endpoint.
fn shown(progress: &Arc<Progress>) -> Arc<Admin> {
    let mut registry = Registry::default();
    progress.register(&mut registry);
    let (of_ready, of_state) = (Arc::clone(progress), Arc::clone(progress));
    let state = move || serde_json::json!({ "progress": of_state.to_json() });
    Arc::new(Admin::new(registry, move || of_ready.ready(), state))
}

fn error_json(failure: &Failure, progress: &Progress) -> serde_json::Value {
    let failures = progress.failures.lock().unwrap_or_else(PoisonError::into_inner);
    let list: Vec<_> = failures
        .iter()
        .take(MAX_FAILURES)
        .map(|(path, failure)| serde_json::json!({"path": path, "reason": failure.reason}))
        .collect();
    serde_json::json!({"error": {
        "reason": failure.reason,
        "message": failure.message,
        "failures": list,
    }})
}

async fn load(
    config: &str,
    keys: Option<Credentials>,
    progress: &Progress,
    stop: watch::Receiver<bool>,
) -> Result<String, End> {
    let bad = |message: String| Failure::new(Reason::StoreUnavailable, message);
    let config: Config =
        serde_json::from_str(config).map_err(|e| bad(format!("parse --config: {e}")))?;
    config.from.validate().map_err(Failure::from)?;
    config.to.validate().map_err(Failure::from)?;
    let SourceConfig::Cluster(target) = config.to else {
        return Err(bad("a load goes into a cluster, not to S3".into()).into());
    };
    let source = source::open(&crate::args::with_keys(config.from, keys))?;
    let parallelism = config.parallelism.unwrap_or(DEFAULT_PARALLELISM).clamp(1, MAX_PARALLELISM);
    copy_until(stop, source.as_ref(), &target, parallelism, progress).await
}

/// Copies every object of `source` below the target's path, unless `stop` comes first; in no case
/// is anything unfinished left there that could be removed.
async fn copy_until(
    mut stop: watch::Receiver<bool>,
    source: &dyn Source,
    target: &ClusterConfig,
    parallelism: usize,
    progress: &Progress,
) -> Result<String, End> {
    let client = Client::new(ClientOptions::new(&target.manager));
    let root = target.path.trim_end_matches('/');
    let copy = Copy { source, client: &client, root, progress, unfinished: Mutex::default() };
    let copied = tokio::select! {
        copied = copy.all(parallelism) => copied.map_err(End::Failed),
        () = stopped(&mut stop) => Err(End::Interrupted),
    };
    if copied.is_err() && tokio::time::timeout(SWEEP, copy.sweep()).await.is_err() {
        tracing::warn!("unfinished files are left to the next try");
    }
    copied
}

/// What copying needs.
struct Copy<'a> {
    source: &'a dyn Source,
    client: &'a Client,
    root: &'a str,
    progress: &'a Progress,
    /// Paths that are made and do not have their name yet.
    unfinished: Mutex<BTreeSet<String>>,
}

impl Copy<'_> {
    /// Every object; the digest is over the sorted lines `path NUL sha256`.
    async fn all(&self, parallelism: usize) -> Result<String, Failure> {
        let objects = self.source.list().await?;
        self.progress.begin(&objects);
        let wrap = |error| store_failure("make directory", self.root, &error);
        self.client.mkdir_all(self.root).await.map_err(wrap)?;
        let copies = objects.iter().map(|object| async move { (object, self.file(object).await) });
        let mut done = futures::stream::iter(copies).buffer_unordered(parallelism);
        let mut lines = Vec::with_capacity(objects.len());
        let mut first_failure = None;
        while let Some((object, outcome)) = done.next().await {
            match outcome {
                Ok(sha256) => {
                    self.progress.files_done.inc();
                    lines.push(format!("{}\0{sha256}\n", object.path));
                }
                Err(failure) => {
                    first_failure.get_or_insert_with(|| failure.clone());
                    self.progress.fail(object, failure);
                }
            }
        }
        match first_failure {
            Some(failure) => Err(failure),
            None => {
                lines.sort_unstable();
                Ok(hex::encode(Sha256::digest(lines.concat())))
            }
        }
    }

    /// Removes what is unfinished. One that was given its name in the meantime is whole and not there.
    async fn sweep(&self) {
        let unfinished = std::mem::take(&mut *self.unfinished());
        for path in unfinished {
            match self.client.remove_path(&path).await {
                Err(error) if error.code != Code::NotFound => {
                    tracing::warn!(path, %error, "an unfinished file is left to the next try");
                }
                _ => {}
            }
        }
    }

    fn unfinished(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.unfinished.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn file(&self, object: &Object) -> Result<String, Failure> {
        let (directory, name) = object.path.rsplit_once('/').unwrap_or(("", &object.path));
        let directory = format!("{}/{directory}", self.root);
        let wrap = |verb: &'static str| {
            move |error: client::Error| store_failure(verb, &object.path, &error)
        };
        let parent = self.client.mkdir_all(&directory).await.map_err(wrap("make directory of"))?;
        let loading = format!(".{name}.loading");
        let path = format!("{directory}/{loading}");
        match self.client.remove_path(&path).await {
            Err(error) if error.code != Code::NotFound => return Err(wrap("remove old")(error)),
            _ => {}
        }
        self.unfinished().insert(path.clone());
        let made: Attributes = self.client.create_path(&path).await.map_err(wrap("create"))?;
        let written = self.write(object, made.inode).await;
        self.client.release(made.inode).await;
        let written = written?;
        let stored = self.read_back(object, made.inode).await?;
        if stored != written {
            let message = format!("{} reads back with another checksum", object.path);
            return Err(Failure::new(Reason::CorruptFile, message));
        }
        let identity = self.client.options().identity;
        let (from, to) = ((parent, loading.as_bytes()), (parent, name.as_bytes()));
        self.client.rename(identity, from, to, false).await.map_err(wrap("rename"))?;
        self.unfinished().remove(&path);
        Ok(written)
    }

    async fn write(&self, object: &Object, inode: InodeId) -> Result<String, Failure> {
        let mut hash = Sha256::new();
        let mut at = 0;
        while at < object.size {
            let end = object.size.min(at + PIECE);
            let bytes = self.source.read(object, at..end).await?;
            hash.update(&bytes);
            let wrap = |error| store_failure("write", &object.path, &error);
            self.client.write_at(inode, at, bytes).await.map_err(wrap)?;
            self.progress.bytes_done.inc_by(end - at);
            at = end;
        }
        let wrap = |error| store_failure("flush", &object.path, &error);
        self.client.flush(inode).await.map_err(wrap)?;
        Ok(hex::encode(hash.finalize()))
    }

    async fn read_back(&self, object: &Object, inode: InodeId) -> Result<String, Failure> {
        let mut hash = Sha256::new();
        let mut at = 0;
        while at < object.size {
            let end = object.size.min(at + PIECE);
            let wrap = |error| store_failure("read back", &object.path, &error);
            let bytes = self.client.read_at(inode, at, end - at).await.map_err(wrap)?;
            if bytes.len() as u64 != end - at {
                let message = format!("{} reads back short", object.path);
                return Err(Failure::new(Reason::TruncatedFile, message));
            }
            hash.update(&bytes);
            at = end;
        }
        Ok(hex::encode(hash.finalize()))
    }
}

fn store_failure(verb: &str, path: &str, error: &client::Error) -> Failure {
    Failure::new(Reason::StoreUnavailable, format!("{verb} {path}: {error}"))
}

//! `scan-agent load`: every file of a dataset copied into the store, once, and compared.
//!
//! A file is streamed in pieces under a name that readers do not take for data, flushed, read
//! back from the replicas and compared by sha256, and only then given its name. A load that is
//! started again copies again; it never leaves half a file under a real name.

use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use anyhow::Context;
use client::{Attributes, Client, ClientOptions, Code, InodeId};
use futures::StreamExt;
use prometheus_client::registry::Registry;
use rpc::admin::Admin;
use serde::Deserialize;
use sha2::{Digest, Sha256};
use source::{ClusterConfig, Credentials, Failure, Object, Reason, Source, SourceConfig};
use tokio::net::TcpListener;

/// Bytes in flight for one file; with the parallelism it bounds the memory.
const PIECE: u64 = 4 << 20;
/// Files at once, if the DatasetLoad does not say.
const DEFAULT_PARALLELISM: usize = 4;
/// Most files at once.
const MAX_PARALLELISM: usize = 32;
/// Failures listed in the result.
const MAX_FAILURES: usize = 10;

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
    files_done: AtomicU64,
    files_total: AtomicU64,
    bytes_done: AtomicU64,
    bytes_total: AtomicU64,
    failures: Mutex<Vec<(String, Failure)>>,
}

impl Progress {
    fn new() -> Self {
        Self {
            started: Instant::now(),
            files_done: AtomicU64::new(0),
            files_total: AtomicU64::new(0),
            bytes_done: AtomicU64::new(0),
            bytes_total: AtomicU64::new(0),
            failures: Mutex::default(),
        }
    }

    fn to_json(&self) -> serde_json::Value {
        let (done, total) = (get(&self.bytes_done), get(&self.bytes_total));
        let elapsed_ms = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        serde_json::json!({
            "filesDone": get(&self.files_done),
            "filesTotal": get(&self.files_total),
            "bytesDone": done,
            "bytesTotal": total,
            "percent": (done * 100).checked_div(total).unwrap_or(0),
            "rateBytesPerSecond": done.saturating_mul(1000) / elapsed_ms.max(1),
        })
    }
}

fn get(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
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
    let shown = Arc::clone(&progress);
    let state = move || serde_json::json!({ "progress": shown.to_json() });
    let admin = Arc::new(Admin::new(Registry::default(), || Ok(()), state));
    let admin_task = tokio::spawn(rpc::admin::serve(listener, admin, stop));
    let outcome = match keys {
        Ok(keys) => load(config, keys, &progress).await,
        Err(failure) => Err(failure),
    };
    admin_task.abort();
    let text = match &outcome {
        Ok(sha256) => serde_json::json!({"ok": {
            "files": get(&progress.files_done),
            "bytes": get(&progress.bytes_done),
            "sha256": sha256,
        }}),
        Err(failure) => error_json(failure, &progress),
    };
    crate::inspect::write_result(&text, result)?;
    Ok(if outcome.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
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
) -> Result<String, Failure> {
    let bad = |message: String| Failure::new(Reason::StoreUnavailable, message);
    let config: Config =
        serde_json::from_str(config).map_err(|e| bad(format!("parse --config: {e}")))?;
    config.from.validate()?;
    config.to.validate()?;
    let SourceConfig::Cluster(target) = config.to else {
        return Err(bad("a load goes into a cluster, not to S3".into()));
    };
    let source = source::open(&crate::args::with_keys(config.from, keys))?;
    let parallelism = config.parallelism.unwrap_or(DEFAULT_PARALLELISM).clamp(1, MAX_PARALLELISM);
    copy_all(source.as_ref(), &target, parallelism, progress).await
}

/// Copies every object of `source` below the target's path; the digest is over the sorted lines
/// `path NUL sha256`.
async fn copy_all(
    source: &dyn Source,
    target: &ClusterConfig,
    parallelism: usize,
    progress: &Progress,
) -> Result<String, Failure> {
    let objects = source.list().await?;
    progress.files_total.store(objects.len() as u64, Ordering::Relaxed);
    let total = objects.iter().map(|object| object.size).sum();
    progress.bytes_total.store(total, Ordering::Relaxed);
    let client = Client::new(ClientOptions::new(&target.manager));
    let root = target.path.trim_end_matches('/');
    client.mkdir_all(root).await.map_err(|e| store_failure("make directory", root, &e))?;
    let copies = objects.iter().map(|object| {
        let copy = Copy { source, client: &client, root, progress };
        async move { (object, copy.file(object).await) }
    });
    let mut done = futures::stream::iter(copies).buffer_unordered(parallelism);
    let mut lines = Vec::with_capacity(objects.len());
    let mut first_failure = None;
    while let Some((object, outcome)) = done.next().await {
        match outcome {
            Ok(sha256) => {
                progress.files_done.fetch_add(1, Ordering::Relaxed);
                lines.push(format!("{}\0{sha256}\n", object.path));
            }
            Err(failure) => {
                tracing::warn!(path = object.path, %failure, "copy failed");
                first_failure.get_or_insert_with(|| failure.clone());
                let mut failures = progress.failures.lock().unwrap_or_else(PoisonError::into_inner);
                failures.push((object.path.clone(), failure));
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

/// What copying one file needs.
struct Copy<'a> {
    source: &'a dyn Source,
    client: &'a Client,
    root: &'a str,
    progress: &'a Progress,
}

impl Copy<'_> {
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
            self.progress.bytes_done.fetch_add(end - at, Ordering::Relaxed);
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

//! `scan-agent serve`: a native sidecar that answers on `scan.sock`.

pub mod dataset;
mod layout;
mod metrics;
mod node;
pub mod protocol;
mod session;
mod slab;

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::Context;
use prometheus_client::registry::Registry;
use rpc::admin::Admin;
use source::DirSource;
use tokio::net::UnixListener;
use tokio::runtime::Handle;
use tokio::sync::watch;

use dataset::Datasets;
use metrics::Metrics;
use session::Shared;

/// Scans at once; each holds its ring and a thread.
const MAX_SESSIONS: usize = 64;
/// How often a dataset that fails is looked at again: healing must show within thirty seconds.
const PROBE_EVERY: Duration = Duration::from_secs(10);

/// What `serve` needs to know.
#[derive(Debug, Clone)]
pub struct Config {
    /// Directory of `node.sock` and `scan-admin.sock`.
    pub private_dir: PathBuf,
    /// Directory of `scan.sock`.
    pub app_dir: PathBuf,
    /// Datasets besides those of the node plugin: a name and a directory or file.
    pub local: Vec<(String, PathBuf)>,
}

/// Serves until SIGTERM.
pub async fn run(config: Config) -> anyhow::Result<()> {
    source::install_crypto_provider();
    let stop = rpc::shutdown::on_signal().context("install signal handlers")?;
    let (datasets, changes) = Datasets::new();
    for (name, path) in &config.local {
        datasets.put_source(name, Arc::new(DirSource::new(path)));
    }
    let metrics = Metrics::default();
    let (complete, completed) = watch::channel(!config.local.is_empty());
    let admin = admin(&datasets, &metrics, completed);
    let shared =
        Arc::new(Shared { datasets: Arc::clone(&datasets), io: Handle::current(), metrics });
    let listener = bind(&config.app_dir.join("scan.sock"))?;
    let admin_path = config.private_dir.join("scan-admin.sock");
    let admin_task = tokio::spawn({
        let stop = stop.clone();
        async move { rpc::admin::serve_unix(&admin_path, admin, stop).await }
    });
    let node_path = config.private_dir.join("node.sock");
    let node_task = tokio::spawn({
        let (datasets, stop) = (Arc::clone(&datasets), stop.clone());
        async move { node::run(&node_path, &datasets, changes, &complete, stop).await }
    });
    let probe_task = tokio::spawn(probe(Arc::clone(&shared), stop.clone()));
    accept(&listener, &shared, stop).await;
    node_task.await.context("node plugin task")?;
    probe_task.await.context("probe task")?;
    admin_task.await.context("admin task")?.context("serve admin socket")
}

fn admin(
    datasets: &Arc<Datasets>,
    metrics: &Metrics,
    completed: watch::Receiver<bool>,
) -> Arc<Admin> {
    let mut registry = Registry::default();
    metrics.register(&mut registry);
    let ready = move || match *completed.borrow() {
        true => Ok(()),
        false => Err("waiting for the node plugin to name the volumes".to_owned()),
    };
    let (datasets, metrics) = (Arc::clone(datasets), metrics.clone());
    let state = move || {
        let all = datasets.all();
        let entry = |d: &Arc<dataset::Dataset>| {
            serde_json::json!({
                "name": d.name, "volume": d.volume, "mountPath": d.mount_path,
                "source": d.source.describe(), "failure": d.failure(),
            })
        };
        serde_json::json!({
            "datasets": all.iter().map(entry).collect::<Vec<_>>(),
            "sessions": metrics.sessions.get(),
            "rows": metrics.rows.get(),
            "fetchedBytes": metrics.fetched.get(),
        })
    };
    Arc::new(Admin::new(registry, ready, state))
}

/// Binds the socket for every user of the pod; the directory is the pod's own.
fn bind(path: &Path) -> anyhow::Result<UnixListener> {
    if path.exists() {
        std::fs::remove_file(path).with_context(|| format!("remove old {}", path.display()))?;
    }
    let listener = UnixListener::bind(path).with_context(|| format!("bind {}", path.display()))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666))
        .with_context(|| format!("open {} to the pod", path.display()))?;
    Ok(listener)
}

/// A thread for each client; those that run at the end are cut when the process ends.
async fn accept(listener: &UnixListener, shared: &Arc<Shared>, mut stop: watch::Receiver<bool>) {
    let running = Arc::new(AtomicUsize::new(0));
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = stop.changed() => return,
        };
        let stream = accepted.and_then(|(stream, _)| stream.into_std());
        let stream = stream.and_then(|stream| stream.set_nonblocking(false).map(|()| stream));
        let stream = match stream {
            Ok(stream) => stream,
            Err(error) => {
                tracing::warn!(%error, "cannot take a client");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let Some(slot) = Slot::take(&running, shared) else {
            session::refuse(&stream, MAX_SESSIONS);
            continue;
        };
        let session = thread::Builder::new().name("scan".into()).spawn(move || {
            session::serve(&slot.shared, &stream);
        });
        if let Err(error) = session {
            tracing::warn!(%error, "cannot start a thread for a client");
        }
    }
}

/// One of [`MAX_SESSIONS`]; given back however its session ends, even by a panic.
struct Slot {
    running: Arc<AtomicUsize>,
    shared: Arc<Shared>,
}

impl Slot {
    fn take(running: &Arc<AtomicUsize>, shared: &Arc<Shared>) -> Option<Self> {
        let is_free = |count: usize| (count < MAX_SESSIONS).then_some(count + 1);
        running.fetch_update(Ordering::Relaxed, Ordering::Relaxed, is_free).ok()?;
        shared.metrics.sessions.inc();
        Some(Self { running: Arc::clone(running), shared: Arc::clone(shared) })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.shared.metrics.sessions.dec();
        self.running.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Looks at new datasets once and at failing ones until they are well.
async fn probe(shared: Arc<Shared>, mut stop: watch::Receiver<bool>) {
    let mut seen = std::collections::BTreeSet::new();
    let mut ticks = tokio::time::interval(Duration::from_secs(1));
    let mut tick: u64 = 0;
    loop {
        tokio::select! {
            _ = ticks.tick() => tick += 1,
            _ = stop.changed() => return,
        }
        for dataset in shared.datasets.all() {
            let is_due = tick.is_multiple_of(PROBE_EVERY.as_secs()) && dataset.failure().is_some();
            if seen.insert(Arc::as_ptr(&dataset) as usize) || is_due {
                let shared = Arc::clone(&shared);
                let probing = tokio::task::spawn_blocking(move || {
                    shared.datasets.probe(&dataset, &shared.io);
                });
                if let Err(error) = probing.await {
                    tracing::warn!(%error, "probe ended early");
                }
            }
        }
    }
}

/// What `fuzz_request` of the protocol is called from outside.
pub use protocol::fuzz_request;

#[cfg(test)]
mod tests;

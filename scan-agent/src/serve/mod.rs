//! `scan-agent serve`: a native sidecar that answers on `scan.sock`.

pub mod dataset;
mod layout;
mod metrics;
mod node;
pub mod protocol;
mod session;
mod slab;

use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::Context;
use prometheus_client::registry::Registry;
use rpc::admin::Admin;
use rpc::shutdown::stopped;
use source::DirSource;
use tokio::net::UnixListener;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use dataset::Datasets;
use metrics::Metrics;
use protocol::ErrorReply;
use session::Shared;

/// Scans at once; each holds its ring and a thread.
const MAX_SESSIONS: u32 = 64;
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
    /// How long scans may go on after the first SIGTERM.
    pub drain: Duration,
}

/// Serves until SIGTERM, and then the scans that run; a second SIGTERM ends those too.
pub async fn run(config: Config) -> anyhow::Result<()> {
    source::install_crypto_provider();
    let (stop, mut hurry) = rpc::shutdown::on_signals().context("install signal handlers")?;
    let (ended, end) = watch::channel(false);
    let (datasets, changes) = Datasets::new();
    for (name, path) in &config.local {
        datasets.put_source(name, Arc::new(DirSource::new(path)));
    }
    let metrics = Metrics::default();
    let (complete, completed) = watch::channel(!config.local.is_empty());
    let admin = admin(&datasets, &metrics, completed, stop.clone());
    let io = Handle::current();
    let shared = Arc::new(Shared { datasets: Arc::clone(&datasets), io, metrics, stop });
    let listener = bind(&config.app_dir.join("scan.sock"))?;
    let admin_path = config.private_dir.join("scan-admin.sock");
    let admin_task = tokio::spawn({
        let end = end.clone();
        async move { rpc::admin::serve_unix(&admin_path, admin, end).await }
    });
    let node_path = config.private_dir.join("node.sock");
    let node_task = tokio::spawn({
        let datasets = Arc::clone(&datasets);
        async move { node::run(&node_path, &datasets, changes, &complete, end).await }
    });
    let probe_task = tokio::spawn(probe(Arc::clone(&shared)));
    let limit = async {
        tokio::select! {
            () = tokio::time::sleep(config.drain) => {}
            () = stopped(&mut hurry) => {}
        }
    };
    accept(&listener, &shared, limit).await;
    ended.send_replace(true);
    node_task.await.context("node plugin task")?;
    probe_task.await.context("probe task")?;
    admin_task.await.context("admin task")?.context("serve admin socket")
}

fn admin(
    datasets: &Arc<Datasets>,
    metrics: &Metrics,
    completed: watch::Receiver<bool>,
    stop: watch::Receiver<bool>,
) -> Arc<Admin> {
    let mut registry = Registry::default();
    metrics.register(&mut registry);
    let ready = move || match (*stop.borrow(), *completed.borrow()) {
        (true, _) => Err("draining".to_owned()),
        (false, true) => Ok(()),
        (false, false) => Err("waiting for the node plugin to name the volumes".to_owned()),
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

/// A thread for each client until `stop`. Then nobody is taken, and those that are there may go on until `limit`;
/// what runs then is cut when the process ends.
async fn accept(listener: &UnixListener, shared: &Arc<Shared>, limit: impl Future<Output = ()>) {
    let slots = Arc::new(Semaphore::new(MAX_SESSIONS as usize));
    let mut stop = shared.stop.clone();
    loop {
        tokio::select! {
            stream = next_client(listener) => start_session(stream, &slots, shared),
            () = stopped(&mut stop) => break,
        }
    }
    let running = || MAX_SESSIONS as usize - slots.available_permits();
    tracing::info!(running = running(), "draining");
    let all_ended = slots.acquire_many(MAX_SESSIONS);
    tokio::pin!(all_ended, limit);
    loop {
        tokio::select! {
            _ = &mut all_ended => return,
            () = &mut limit => {
                tracing::warn!(running = running(), "scans are cut");
                return;
            }
            stream = next_client(listener) => session::refuse(&stream, ErrorReply::stopping()),
        }
    }
}

async fn next_client(listener: &UnixListener) -> UnixStream {
    loop {
        let stream = listener.accept().await.and_then(|(stream, _)| stream.into_std());
        match stream.and_then(|stream| stream.set_nonblocking(false).map(|()| stream)) {
            Ok(stream) => return stream,
            Err(error) => {
                tracing::warn!(%error, "cannot take a client");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

fn start_session(stream: UnixStream, slots: &Arc<Semaphore>, shared: &Arc<Shared>) {
    let Some(slot) = Slot::take(slots, shared) else {
        return session::refuse(&stream, ErrorReply::busy(MAX_SESSIONS));
    };
    let session = thread::Builder::new().name("scan".into()).spawn(move || {
        session::serve(&slot.shared, &stream);
    });
    if let Err(error) = session {
        tracing::warn!(%error, "cannot start a thread for a client");
    }
}

/// One of [`MAX_SESSIONS`]; given back however its session ends, even by a panic.
struct Slot {
    _permit: OwnedSemaphorePermit,
    shared: Arc<Shared>,
}

impl Slot {
    fn take(slots: &Arc<Semaphore>, shared: &Arc<Shared>) -> Option<Self> {
        let permit = Arc::clone(slots).try_acquire_owned().ok()?;
        shared.metrics.sessions.inc();
        Some(Self { _permit: permit, shared: Arc::clone(shared) })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.shared.metrics.sessions.dec();
    }
}

/// Looks at new datasets once and at failing ones until they are well.
async fn probe(shared: Arc<Shared>) {
    let mut stop = shared.stop.clone();
    let mut ticks = tokio::time::interval(Duration::from_secs(1));
    let mut tick: u64 = 0;
    loop {
        tokio::select! {
            _ = ticks.tick() => tick += 1,
            () = stopped(&mut stop) => return,
        }
        for dataset in shared.datasets.due(tick.is_multiple_of(PROBE_EVERY.as_secs())) {
            let shared = Arc::clone(&shared);
            let probing = tokio::task::spawn_blocking(move || {
                shared.datasets.probe(&dataset, &shared.io);
            });
            // A look that takes long must not keep the process from its end.
            let probed = tokio::select! {
                probed = probing => probed,
                () = stopped(&mut stop) => return,
            };
            if let Err(error) = probed {
                tracing::warn!(%error, "probe ended early");
            }
        }
    }
}

/// What `fuzz_request` of the protocol is called from outside.
pub use protocol::fuzz_request;

#[cfg(test)]
mod tests;

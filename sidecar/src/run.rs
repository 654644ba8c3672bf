//! The life of the mount sidecar: attach, serve every volume, stay attached, stop in peace.
//!
//! A volume is served from the moment its descriptor arrives until the process ends; losing the node
//! plugin changes nothing for it. While a source cannot be opened its volume is not served and the pod
//! does not start: the reason goes to the node plugin, which posts it, and the attempt is repeated.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use keeper::handover::{Credentials, FromNode, FromSidecar, Kept, Role, Volume};
use keeper::wire::WireError;
use prometheus_client::registry::Registry;
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::AbortHandle;

use crate::attach::Attachment;
use crate::fuse::{self, Mounted, Options};
use crate::metrics::{Figures, Metrics};
use crate::report::{Refusal, Reporter};
use crate::resume::{Exchange, ResumeError};
use crate::vfs::FileSystem;
use crate::volume::{credentials, init_message, recorded, same_files};

/// Name of the file in the private directory that says every volume is served.
pub const READY_FILE: &str = "mount-ready";
/// Between two attempts to reach the node plugin.
const ATTACH_INTERVAL: Duration = Duration::from_millis(200);
/// Between two attempts to open a source: heals within the 30 s promised for bucket and object.
const OPEN_INTERVAL: Duration = Duration::from_secs(5);
/// Messages for the node plugin that may wait while it is away.
const OUTBOX: usize = 256;
/// At the end, requests in flight and write buffers get this long: less than the pod's grace period of 30 s.
const DRAIN: Duration = Duration::from_secs(20);

/// A file system that was opened for a volume.
#[derive(Debug, Clone)]
pub struct Opened {
    /// What answers.
    pub files: Arc<dyn FileSystem>,
    /// Whether names and contents never change below the mount.
    pub immutable: bool,
}

/// Opens file systems for volumes: the real one from sources and clusters, in tests one over a
/// directory.
#[async_trait::async_trait]
pub trait Opener: Send + Sync + 'static {
    /// Opens the file system of a volume; later troubles go to `report`.
    async fn open(&self, volume: &Volume, report: &Reporter) -> Result<Opened, Refusal>;
    /// Takes fresh credentials for a volume opened before.
    fn credentials(&self, fresh: &Credentials);
}

/// Where the sidecar lives.
#[derive(Debug, Clone)]
pub struct Places {
    /// Directory shared with the node plugin only.
    pub private_dir: PathBuf,
    /// Threads per mount that read requests.
    pub threads: usize,
}

/// One volume of the pod.
#[derive(Debug)]
struct Served {
    config: Volume,
    report: Reporter,
    exchange: Option<Exchange>,
    /// Whether the exchange outlives the node plugin.
    kept: watch::Sender<bool>,
    mounted: Option<Mounted>,
    opened: Option<Opened>,
    /// What opens the volume and begins to serve it.
    task: AbortHandle,
}

/// What the sidecar knows; shared with its admin endpoint.
pub struct Sidecar {
    places: Places,
    opener: Box<dyn Opener>,
    volumes: Mutex<BTreeMap<String, Served>>,
    /// Whether the node plugin has named the last volume.
    complete: watch::Sender<bool>,
    fresh: Notify,
    outbox: mpsc::Sender<FromSidecar>,
}

impl std::fmt::Debug for Sidecar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sidecar").field("places", &self.places).finish_non_exhaustive()
    }
}

impl Sidecar {
    /// A sidecar without volumes yet, and the messages it will have for the node plugin.
    #[must_use]
    pub fn new(
        places: Places,
        opener: Box<dyn Opener>,
    ) -> (Arc<Self>, mpsc::Receiver<FromSidecar>) {
        let (outbox, messages) = mpsc::channel(OUTBOX);
        let sidecar = Self {
            places,
            opener,
            volumes: Mutex::default(),
            complete: watch::Sender::new(false),
            fresh: Notify::new(),
            outbox,
        };
        (Arc::new(sidecar), messages)
    }

    /// Serves until `stop`; [`drain`](Self::drain) comes afterwards.
    pub async fn run(
        self: &Arc<Self>,
        mut messages: mpsc::Receiver<FromSidecar>,
        mut stop: watch::Receiver<bool>,
    ) {
        self.forget_readiness();
        while !*stop.borrow() {
            tokio::select! {
                _ = stop.wait_for(|stop| *stop) => break,
                () = self.converse(&mut messages) => {}
            }
            tokio::select! {
                _ = stop.wait_for(|stop| *stop) => break,
                () = tokio::time::sleep(ATTACH_INTERVAL) => {}
            }
        }
    }

    /// One conversation with the node plugin, until it ends.
    async fn converse(self: &Arc<Self>, messages: &mut mpsc::Receiver<FromSidecar>) {
        let mut attachment = match Attachment::connect(&self.places.private_dir, Role::Mount) {
            Ok(attachment) => attachment,
            Err(error) => return tracing::debug!(%error, "node plugin not reachable yet"),
        };
        tracing::info!("attached to the node plugin");
        // What waits is said after what `known` says: until then this process may be taken for another one.
        let mut complete = false;
        loop {
            let outcome = tokio::select! {
                received = attachment.receive() => match received {
                    Ok(Some((message, descriptors))) => {
                        complete |= matches!(&message, FromNode::Volume(volume) if volume.last);
                        self.take(&attachment, message, descriptors)
                    }
                    Ok(None) => return tracing::info!("node plugin ended the conversation"),
                    Err(error) => Err(error),
                },
                Some(message) = messages.recv(), if complete => self.say(&attachment, &message),
            };
            if let Err(error) = outcome {
                return tracing::warn!(%error, "conversation with the node plugin failed");
            }
        }
    }

    fn say(&self, attachment: &Attachment, message: &FromSidecar) -> Result<(), WireError> {
        attachment.send(message)?;
        if let FromSidecar::Init(init) = message
            && !init.confirm
        {
            // This node plugin says no more about it: on its way is all that can be known.
            self.set_kept(&init.volume);
        }
        Ok(())
    }

    fn take(
        self: &Arc<Self>,
        attachment: &Attachment,
        message: FromNode,
        descriptors: Vec<OwnedFd>,
    ) -> Result<(), WireError> {
        match message {
            FromNode::Credentials(fresh) => self.refresh(&fresh),
            FromNode::Kept(Kept { volume }) => self.set_kept(&volume),
            FromNode::Volume(volume) => {
                let last = volume.last;
                match self.known(&volume) {
                    Some(said) => {
                        self.adopt(&volume);
                        said.iter().try_for_each(|message| self.say(attachment, message))?;
                    }
                    None => self.start(*volume, descriptors),
                }
                if last {
                    self.complete.send_replace(true);
                }
                self.update_readiness();
            }
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Served>> {
        self.volumes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was said before about a mount that is known: a restarted node plugin wants to hear it. The exchange of one that
    /// is served tells it that this is no successor, see `Desk` there.
    fn known(&self, volume: &Volume) -> Option<Vec<FromSidecar>> {
        let mut volumes = self.lock();
        let served = volumes.get_mut(&volume.name)?;
        if served.config.mount_id != volume.mount_id {
            return None;
        }
        served.config.unkept = volume.unkept;
        // A successor that does not serve yet has nothing to say of an exchange that it found kept.
        let says = volume.unkept || served.mounted.is_some() || !*served.kept.borrow();
        let exchange = served.exchange.as_ref().filter(|_| says);
        let init = exchange.map(|said| init_message(&served.config, said));
        Some(init.into_iter().chain(served.report.again()).collect())
    }

    /// Begins to open and serve a volume that is new, or mounted anew: then its earlier connection has ended, and whoever
    /// had files open there has lost them.
    fn start(self: &Arc<Self>, volume: Volume, descriptors: Vec<OwnedFd>) {
        let Some(device) = descriptors.into_iter().next() else {
            return tracing::error!(volume = volume.name, "volume came without its descriptor");
        };
        let mut volumes = self.lock();
        let (report, opened) = match volumes.remove(&volume.name) {
            // What it has in its buffers is of the same files.
            Some(earlier) if same_files(&earlier.config, &volume) => {
                earlier.task.abort();
                (earlier.report.anew(), earlier.opened)
            }
            earlier => {
                earlier.inspect(|earlier| earlier.task.abort());
                (Reporter::new(&volume.name, self.outbox.clone()), None)
            }
        };
        let (name, config) = (volume.name.clone(), volume.clone());
        // What cannot be read is refused when it is to be used.
        let exchange = recorded(&volume).ok().flatten();
        let kept = watch::Sender::new(exchange.is_some() && !volume.unkept);
        let serving = Arc::clone(self).serve_or_refuse(volume, device, report.clone());
        let task = tokio::spawn(serving).abort_handle();
        let served = Served { config, report, exchange, kept, mounted: None, opened, task };
        volumes.insert(name, served);
    }

    async fn serve_or_refuse(self: Arc<Self>, volume: Volume, device: OwnedFd, report: Reporter) {
        let name = volume.name.clone();
        match self.serve(volume, device, &report).await {
            Ok(()) => self.update_readiness(),
            Err(error) => {
                tracing::error!(volume = name, %error, "volume cannot be served");
                let reason = "StoreUnavailable".to_owned();
                report.refuse(&Refusal { reason, message: error.to_string() });
            }
        }
    }

    async fn serve(
        self: &Arc<Self>,
        volume: Volume,
        device: OwnedFd,
        report: &Reporter,
    ) -> Result<(), ResumeError> {
        let name = &volume.name;
        let before = self.lock().get(name).and_then(|served| served.opened.clone());
        let opened = match before {
            Some(opened) => opened,
            None => self.open(name, report).await,
        };
        let options = Options { immutable: opened.immutable, threads: self.places.threads };
        let files = Arc::clone(&opened.files);
        self.update(name, |served| served.opened = Some(opened));
        let recorded = recorded(&volume)?;
        let (resumed, runtime) = (recorded.is_some(), tokio::runtime::Handle::current());
        let negotiated = tokio::task::spawn_blocking(move || {
            fuse::negotiate(files, device, recorded.as_ref(), options, &runtime)
        })
        .await
        .map_err(|error| ResumeError::Io("negotiate", std::io::Error::other(error)))??;
        // Kept before the kernel hears it: see the module `resume`.
        if !resumed || volume.unkept {
            self.record(name, &negotiated.exchange).await;
        }
        let mounted = negotiated.serve()?;
        tracing::info!(volume = name, resumed, "volume served");
        self.update(name, |served| served.mounted = Some(mounted));
        report.serve();
        Ok(())
    }

    fn update(&self, name: &str, change: impl FnOnce(&mut Served)) {
        if let Some(served) = self.lock().get_mut(name) {
            change(served);
        }
    }

    fn set_kept(&self, name: &str) {
        self.update(name, |served| {
            served.kept.send_replace(true);
        });
    }

    /// Waits until the exchange outlives the node plugin. Should the conversation end meanwhile, the next one begins with
    /// saying it again.
    async fn record(&self, name: &str, exchange: &Exchange) {
        let told = self.lock().get_mut(name).map(|served| {
            served.exchange = Some(exchange.clone());
            (served.kept.subscribe(), init_message(&served.config, exchange))
        });
        let Some((mut kept, message)) = told else { return };
        // Both fail only at the end of the process, or of this task.
        if self.outbox.send(message).await.is_ok() {
            let _ = kept.wait_for(|kept| *kept).await;
        }
    }

    /// Opens the file system of a volume, however long it takes.
    async fn open(&self, name: &str, report: &Reporter) -> Opened {
        loop {
            let fresh = self.fresh.notified();
            let config = self.config(name);
            let refusal = match config {
                Some(volume) => match self.opener.open(&volume, report).await {
                    Ok(opened) => return opened,
                    Err(refusal) => refusal,
                },
                None => {
                    Refusal { reason: "StoreUnavailable".into(), message: "no such volume".into() }
                }
            };
            tracing::warn!(volume = name, refusal.reason, refusal.message, "open the source");
            report.refuse(&refusal);
            // The next try comes with fresh credentials or after a while.
            let _ = tokio::time::timeout(OPEN_INTERVAL, fresh).await;
        }
    }

    fn config(&self, name: &str) -> Option<Volume> {
        let volumes = self.lock();
        volumes.get(name).map(|served| served.config.clone())
    }

    /// Takes the credentials of a volume that is known: its Secret may have changed while no node plugin was there to
    /// say so.
    fn adopt(&self, volume: &Volume) {
        let now = credentials(volume);
        let before = self.config(&volume.name).and_then(|known| credentials(&known));
        if let Some(fresh) = now.filter(|now| before.as_ref() != Some(now)) {
            self.refresh(&fresh);
        }
    }

    fn refresh(&self, fresh: &Credentials) {
        let mut volumes = self.lock();
        let Some(served) = volumes.get_mut(&fresh.volume) else { return };
        if let Some(s3) = served.config.source.get_mut("s3").and_then(|s3| s3.as_object_mut()) {
            s3.insert(
                "credentials".to_owned(),
                serde_json::json!({
                    "accessKeyId": fresh.access_key_id,
                    "secretAccessKey": fresh.secret_access_key,
                    "sessionToken": fresh.session_token,
                }),
            );
        }
        drop(volumes);
        tracing::info!(volume = fresh.volume, "fresh credentials");
        self.opener.credentials(fresh);
        self.fresh.notify_waiters();
    }

    /// Whether every volume of the pod is served.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        let volumes = self.lock();
        *self.complete.borrow() && volumes.values().all(|served| served.mounted.is_some())
    }

    /// An earlier process was ready; this one is not yet.
    fn forget_readiness(&self) {
        match std::fs::remove_file(self.places.private_dir.join(READY_FILE)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                tracing::error!(%error, "remove the readiness file of an earlier process");
            }
            _ => {}
        }
    }

    fn update_readiness(&self) {
        if self.is_ready() {
            let path = self.places.private_dir.join(READY_FILE);
            if let Err(error) = std::fs::write(&path, b"") {
                tracing::error!(%error, path = %path.display(), "write the readiness file");
            }
        }
    }

    /// Requests being answered and requests taken so far, over all volumes.
    #[must_use]
    pub fn load(&self) -> (usize, usize) {
        let volumes = self.lock();
        let mounts = volumes.values().filter_map(|served| served.mounted.as_ref());
        mounts.fold((0, 0), |(now, all), mount| (now + mount.in_flight(), all + mount.served()))
    }

    /// Of each volume, bytes that were taken and are not in the store yet.
    #[must_use]
    pub fn unsaved_bytes(&self) -> Vec<(String, usize)> {
        let volumes = self.lock();
        let opened = volumes.iter().filter_map(|(name, s)| Some((name, s.opened.as_ref()?)));
        opened.map(|(name, opened)| (name.clone(), opened.files.unsaved_bytes())).collect()
    }

    /// What a human wants to know.
    #[must_use]
    pub fn state(&self) -> serde_json::Value {
        let volumes = self.lock();
        let volumes: Vec<_> = volumes
            .iter()
            .map(|(name, served)| {
                serde_json::json!({
                    "name": name,
                    "dataset": format!("{}/{}", served.config.namespace, served.config.dataset),
                    "served": served.mounted.is_some(),
                    "generation": served.config.generation,
                    "status": served.report.again().map(|status| serde_json::to_value(status).ok()),
                })
            })
            .collect();
        serde_json::json!({"complete": *self.complete.borrow(), "volumes": volumes})
    }

    /// Takes no more requests, lets those that were taken end, and writes back what they left in buffers.
    pub async fn drain(&self) {
        let deadline = tokio::time::Instant::now() + DRAIN;
        for served in self.lock().values() {
            served.mounted.iter().for_each(Mounted::close);
        }
        while self.load().0 > 0 && tokio::time::Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        tracing::info!(left = self.load().0, "requests in flight have ended");
        let saved = tokio::time::timeout_at(deadline, self.flush_all()).await;
        if saved.is_err() {
            tracing::error!("not everything could be written back in time");
        }
    }

    async fn flush_all(&self) {
        let files: Vec<_> = {
            let volumes = self.lock();
            let served = volumes.iter();
            served
                .filter_map(|(name, s)| Some((name.clone(), Arc::clone(&s.opened.as_ref()?.files))))
                .collect()
        };
        let flushes = files.iter().map(|(volume, files)| async move {
            if let Err(error) = files.flush_all().await {
                tracing::error!(volume, ?error, "write back before the end");
            }
        });
        futures::future::join_all(flushes).await;
    }
}

/// A runtime whose size does not grow with the machine: one sidecar is among many on a node.
///
/// # Errors
/// The kernel gives no threads.
pub fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    let threads = fuse::reader_threads();
    tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build()
}

/// Everything that is shown of a sidecar. The node plugin passes on only what it knows the form of.
fn registry(metrics: &Metrics, figures: Figures) -> Registry {
    let mut registry = Registry::with_prefix("lampyris_mount");
    metrics.register(&mut registry);
    registry.register_collector(Box::new(figures));
    registry
}

/// Runs `lampyris-mount serve` until `stop`.
///
/// # Errors
/// A socket that cannot be made.
pub async fn serve(args: &crate::args::Serve, stop: watch::Receiver<bool>) -> std::io::Result<()> {
    let mounts = Arc::new(crate::ring_server::Mounts::default());
    let ring_path = args.app_dir.join("ring.sock");
    let ring = crate::ring_server::RingServer::bind(&ring_path, Arc::clone(&mounts))?;
    let threads = args.fuse_threads.map_or_else(fuse::reader_threads, usize::from);
    let places = Places { private_dir: args.private_dir.clone(), threads };
    let unsaved = args.private_dir.join("unsaved");
    let metrics = Metrics::default();
    let opener = Box::new(crate::open::Sources::new(mounts, unsaved, metrics.clone()));
    let (sidecar, messages) = Sidecar::new(places, opener);
    let figures = Figures { sidecar: Arc::clone(&sidecar), ring_connections: ring.connections() };
    let registry = registry(&metrics, figures);
    let (ready, state) = (Arc::clone(&sidecar), Arc::clone(&sidecar));
    let ready = move || match ready.is_ready() {
        true => Ok(()),
        false => Err("not every volume is served".to_owned()),
    };
    let admin = Arc::new(rpc::admin::Admin::new(registry, ready, move || state.state()));
    let (path, until) = (args.private_dir.join("mount-admin.sock"), stop.clone());
    tokio::spawn(async move {
        if let Err(error) = rpc::admin::serve_unix(&path, admin, until).await {
            tracing::error!(%error, path = %path.display(), "serve the admin socket");
        }
    });
    let ring = tokio::spawn(ring.run(stop.clone()));
    sidecar.run(messages, stop).await;
    // What came by the ring is written back with the rest.
    if let Err(error) = ring.await {
        tracing::error!(%error, "the ring's server ended badly");
    }
    sidecar.drain().await;
    Ok(())
}

#[cfg(test)]
mod tests;

//! The node plugin: what it holds, and how it publishes, hands over, recovers and cleans up.
//!
//! A volume exists while three things do: the mount, its device here, and its entry with the keeper.
//! Either process may restart alone: the keeper's entries bring this one back, and [`Plugin::tend`]
//! gives a new keeper its entries again.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures::stream::{self, Stream, StreamExt};
use keeper::client::{Client, ClientError};
use keeper::handover::{FromNode, Init, Role, SOCKET, Status, Volume};
use tokio::sync::{broadcast, mpsc};

use crate::cluster::{Cluster, ClusterError, Notice};
use crate::events::{self, Allowance};
use crate::exposition::Families;
use crate::handover;
use crate::metrics::{self, Socket};
use crate::mount::{self, MountError};
use crate::publish::{self, Denied, Record};
use crate::socket;
use crate::told::Told;
use crate::volume::{self, Options, Pod, VolumeError};

/// Sidecars asked at once: their answers are in memory together.
const ASKED_AT_ONCE: usize = 32;
/// Between two attempts to keep an opening exchange.
const KEEP_INTERVAL: Duration = Duration::from_millis(500);

/// Why a volume could not be published or removed.
#[derive(Debug, thiserror::Error)]
pub enum PluginError {
    /// The request cannot be served as it stands.
    #[error(transparent)]
    Volume(#[from] VolumeError),
    /// The pod may not have the Dataset.
    #[error(transparent)]
    Denied(#[from] Denied),
    /// The API server could not help.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// A privileged call failed.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// The keeper could not help.
    #[error(transparent)]
    Keeper(#[from] ClientError),
    /// The pod's socket could not be made.
    #[error("bind the hand-over socket in {}", .0.display())]
    Bind(PathBuf, #[source] io::Error),
}

struct Entry {
    record: Record,
    device: OwnedFd,
    /// Whether a mount sidecar came and has not said yet that it serves.
    unheard: bool,
    /// Whether that one is another than the one before, as far as is known.
    taken_over: bool,
    told: Told,
}

impl Entry {
    fn new(record: Record, device: OwnedFd) -> Self {
        Self { record, device, unheard: false, taken_over: false, told: Told::default() }
    }

    fn dataset(&self) -> String {
        format!("{}/{}", self.record.volume.namespace, self.record.volume.dataset)
    }
}

struct Hub {
    pod: Pod,
    pushes: broadcast::Sender<FromNode>,
    /// Wakes who tells the pod's owner what there is to tell.
    wake: mpsc::Sender<()>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Hub {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[derive(Default)]
struct State {
    volumes: BTreeMap<String, Entry>,
    hubs: BTreeMap<String, Hub>,
}

/// The node plugin.
pub struct Plugin {
    /// Name of the node.
    pub node_name: String,
    /// Kubelet's directory.
    pub kubelet_dir: PathBuf,
    keeper: Client,
    cluster: Arc<dyn Cluster>,
    state: Mutex<State>,
    /// One publish or unpublish at a time touches mounts.
    mounting: tokio::sync::Mutex<()>,
    /// One entry at a time is on its way to the keeper: an older one must not arrive after a newer one.
    keeping: Arc<tokio::sync::Mutex<()>>,
    /// One round of questions to the sidecars at a time: what they answer takes memory, and anybody may ask for it.
    asking: tokio::sync::Mutex<()>,
    /// For tasks that call back.
    me: Weak<Self>,
}

impl std::fmt::Debug for Plugin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Plugin").field("node_name", &self.node_name).finish_non_exhaustive()
    }
}

impl Plugin {
    /// A plugin that holds nothing yet.
    #[must_use]
    pub fn new(
        node_name: String,
        kubelet_dir: PathBuf,
        keeper: PathBuf,
        cluster: Arc<dyn Cluster>,
    ) -> Arc<Self> {
        Arc::new_cyclic(|me| Self {
            node_name,
            kubelet_dir,
            keeper: Client::new(keeper),
            cluster,
            state: Mutex::default(),
            mounting: tokio::sync::Mutex::default(),
            keeping: Arc::default(),
            asking: tokio::sync::Mutex::default(),
            me: Weak::clone(me),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Publishes a volume; the second time only its credentials are refreshed.
    ///
    /// # Errors
    /// See [`PluginError`]; kubelet shows it on the pod and repeats the call.
    pub async fn publish(&self, options: Options) -> Result<(), PluginError> {
        let key = options.key();
        if !self.refresh(&key, &options)? {
            let spec = self.cluster.dataset(&options.namespace, &options.dataset).await?;
            let record = publish::plan(&options, &spec)?;
            let _mounting = self.mounting.lock().await;
            self.mount(&key, record).await?;
        }
        self.keep(&key).await?;
        self.bind(&options.pod)
    }

    /// Takes the credentials of a volume that is published; false when it is not.
    fn refresh(&self, key: &str, options: &Options) -> Result<bool, PluginError> {
        let mounted = mount::find(&options.target)?.is_some();
        let mut state = self.state();
        let Some(entry) = state.volumes.get_mut(key).filter(|_| mounted) else { return Ok(false) };
        let Some(credentials) = &options.credentials else { return Ok(true) };
        if publish::set_credentials(&mut entry.record.volume.source, credentials) {
            let fresh = FromNode::Credentials(keeper::handover::Credentials {
                volume: options.name.clone(),
                access_key_id: credentials.access_key_id.clone(),
                secret_access_key: credentials.secret_access_key.clone(),
                session_token: credentials.session_token.clone(),
            });
            tracing::info!(pod = options.pod.name, volume = options.name, "fresh credentials");
            if let Some(hub) = state.hubs.get(&options.pod.uid) {
                // No sidecar listens: it gets them with the volume when it comes.
                let _ = hub.pushes.send(fresh);
            }
        }
        Ok(true)
    }

    async fn mount(&self, key: &str, mut record: Record) -> Result<(), PluginError> {
        if self.state().volumes.contains_key(key) && mount::find(&record.target)?.is_some() {
            return Ok(());
        }
        if mount::find(&record.target)?.is_some() {
            tracing::warn!(key, "a mount whose device is lost is replaced");
            mount::unmount(&record.target).await?;
        }
        let device = mount::mount(&record.target, record.volume.read_only)?;
        tracing::info!(key, pod = record.pod.name, dataset = record.volume.dataset, "mounted");
        record.volume.mount_id = fresh_mount_id();
        self.state().volumes.insert(key.to_owned(), Entry::new(record, device));
        Ok(())
    }

    /// Gives the keeper what it has to keep of a volume.
    async fn keep(&self, key: &str) -> Result<(), PluginError> {
        let turn = Arc::clone(&self.keeping).lock_owned().await;
        let (meta, device) = {
            let state = self.state();
            let Some(entry) = state.volumes.get(key) else { return Ok(()) };
            let device = entry.device.try_clone().map_err(ClientError::from);
            (serde_json::to_value(&entry.record), device?)
        };
        let meta = meta.map_err(|error| ClientError::from(io::Error::other(error)))?;
        let (keeper, key) = (self.keeper.clone(), key.to_owned());
        blocking(move || {
            // The turn ends with the call, also when nobody waits for it any more.
            let _turn = turn;
            keeper.put(&key, meta, &[device.as_fd()])
        })
        .await
    }

    /// The keeper has the opening exchange of a volume; false if the volume is gone.
    fn set_kept(&self, key: &str) -> bool {
        let mut state = self.state();
        let Some(entry) = state.volumes.get_mut(key) else { return false };
        entry.record.volume.unkept = false;
        true
    }

    /// Serves the pod's hand-over socket.
    fn bind(&self, pod: &Pod) -> Result<(), PluginError> {
        let dir = volume::private_dir(&self.kubelet_dir, &pod.uid);
        let failed = |error| PluginError::Bind(dir.clone(), error);
        let mut state = self.state();
        let there = std::fs::symlink_metadata(dir.join(SOCKET)).is_ok();
        if there && state.hubs.contains_key(&pod.uid) {
            return Ok(());
        }
        socket::make_empty_dir(&dir).map_err(failed)?;
        let listener = socket::bind(&dir, SOCKET).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let listener = tokio::net::UnixListener::from_std(listener).map_err(failed)?;
        let (pushes, _) = broadcast::channel(handover::PUSHES);
        // What a pod may say in Events goes on where it was, when it has removed its socket.
        let wake = match state.hubs.get(&pod.uid) {
            Some(hub) => hub.wake.clone(),
            None => self.show_events(pod),
        };
        let (plugin, pod) = (Weak::clone(&self.me), pod.clone());
        let desk = Desk { pod: pod.clone(), plugin, wake: wake.clone() };
        let task = tokio::spawn(handover::serve(listener, Arc::new(desk), pushes.clone()));
        state.hubs.insert(pod.uid.clone(), Hub { pod, pushes, wake, task });
        Ok(())
    }

    /// Begins to tell a pod's owner what there is to tell.
    fn show_events(&self, pod: &Pod) -> mpsc::Sender<()> {
        let (wake, wakes) = mpsc::channel(1);
        let (plugin, uid) = (Weak::clone(&self.me), pod.uid.clone());
        let next = move || plugin.upgrade()?.next_notice(&uid);
        let (cluster, pod) = (Arc::clone(&self.cluster), pod.clone());
        tokio::spawn(events::show(cluster, pod, Allowance::default(), wakes, next));
        wake
    }

    /// What has waited longest to be told of a pod's volumes; it counts as told then.
    fn next_notice(&self, uid: &str) -> Option<Notice> {
        let start = volume::key(uid, "");
        let mut state = self.state();
        let of_pod = state.volumes.iter_mut().filter(|(key, _)| key.starts_with(&start));
        let waiting = of_pod.filter_map(|(_, entry)| Some((entry.told.waits()?, entry)));
        let (_, entry) = waiting.min_by_key(|(since, _)| *since)?;
        let dataset = entry.dataset();
        entry.told.next(&dataset)
    }

    /// Removes a volume. It is no error if it is not there; it never hangs.
    ///
    /// # Errors
    /// See [`PluginError`].
    pub async fn unpublish(
        &self,
        target: &Path,
        key: Option<(String, String)>,
    ) -> Result<(), PluginError> {
        let Some((uid, name)) = key else {
            tracing::info!(target = %target.display(), "not a volume of ours");
            return Ok(());
        };
        let _mounting = self.mounting.lock().await;
        let forced = mount::unmount(target).await?;
        let key = volume::key(&uid, &name);
        {
            let mut state = self.state();
            state.volumes.remove(&key);
            if !state.volumes.keys().any(|key| key.starts_with(&format!("{uid}/"))) {
                state.hubs.remove(&uid);
            }
        }
        tracing::info!(key, forced, "unmounted");
        let keeper = self.keeper.clone();
        let dropped = blocking(move || keeper.drop_entry(&key)).await;
        if let Err(error) = dropped {
            // Tending drops it later; the pod must not wait for that.
            tracing::warn!(%error, "the keeper still has the descriptor");
        }
        Ok(())
    }

    /// Takes up what an earlier process left: at the start, before kubelet can call.
    ///
    /// # Errors
    /// The keeper is not there: without it a restart would end every mount.
    pub async fn recover(&self) -> Result<(), PluginError> {
        let keeper = self.keeper.clone();
        for key in blocking(move || keeper.list()).await? {
            let (keeper, wanted) = (self.keeper.clone(), key.clone());
            let (meta, devices) = blocking(move || keeper.get(&wanted)).await?;
            let record = serde_json::from_value::<Record>(meta)
                .inspect_err(|error| tracing::error!(%error, key, "read what was kept of a volume"))
                .ok();
            let device = devices.into_iter().next();
            match (record, device) {
                (Some(mut record), Some(device)) if mount::find(&record.target)?.is_some() => {
                    let pod = record.pod.clone();
                    record.volume.unkept = record.volume.recorded_init.is_none();
                    self.state().volumes.insert(key, Entry::new(record, device));
                    if let Err(error) = self.bind(&pod) {
                        tracing::warn!(%error, pod = pod.name, "take a pod up again");
                    }
                }
                _ => {
                    tracing::info!(key, "the mount of a kept descriptor is gone");
                    let keeper = self.keeper.clone();
                    blocking(move || keeper.drop_entry(&key)).await?;
                }
            }
        }
        self.clean().await
    }

    /// Ends mounts of ours that nobody can serve any more: the device is lost.
    async fn clean(&self) -> Result<(), PluginError> {
        for point in mount::below(&self.kubelet_dir.join("pods"))? {
            let known = self.state().volumes.values().any(|entry| entry.record.target == point);
            if !known {
                tracing::warn!(target = %point.display(), "a mount without its device is removed");
                if let Err(error) = mount::unmount(&point).await {
                    tracing::error!(%error, "remove a mount without its device");
                }
            }
        }
        Ok(())
    }

    /// Every half minute: the keeper has all entries and no others, and pods that are gone leave
    /// nothing behind.
    ///
    /// # Errors
    /// See [`PluginError`].
    pub async fn tend(&self) -> Result<(), PluginError> {
        let keeper = self.keeper.clone();
        let kept = blocking(move || keeper.list()).await?;
        let _mounting = self.mounting.lock().await;
        let volumes: Vec<_> = {
            let state = self.state();
            let volumes = state.volumes.iter();
            volumes.map(|(key, entry)| (key.clone(), entry.record.clone())).collect()
        };
        for (key, record) in &volumes {
            if !self.kubelet_dir.join("pods").join(&record.pod.uid).is_dir() {
                tracing::warn!(key, "pod is gone without an unpublish");
                mount::unmount(&record.target).await?;
                let mut state = self.state();
                state.volumes.remove(key);
                state.hubs.remove(&record.pod.uid);
            } else if !kept.contains(key) {
                tracing::warn!(key, "the keeper gets a descriptor again");
                self.keep(key).await?;
            }
        }
        for key in kept {
            if !self.state().volumes.contains_key(&key) {
                let keeper = self.keeper.clone();
                blocking(move || keeper.drop_entry(&key)).await?;
            }
        }
        Ok(())
    }

    /// Metrics of every sidecar on the node, with the labels of its pod.
    pub async fn sidecar_metrics(&self) -> String {
        let _turn = self.asking.lock().await;
        let mut families = Families::default();
        let mut answers = std::pin::pin!(self.ask_sidecars(metrics::scrape));
        while let Some((pod, socket, said)) = answers.next().await {
            let left_out = said.map_or(0, |text| families.add(&text, &pod, socket));
            if left_out > 0 {
                let (pod, container) = (pod.name, socket.container);
                tracing::debug!(pod, container, left_out, "lines that are no metrics of ours");
            }
        }
        families.render()
    }

    /// What every sidecar on the node says about itself: by pod, in its namespace, and container. A JSON document.
    pub async fn sidecar_states(&self) -> String {
        let _turn = self.asking.lock().await;
        let mut states = metrics::States::default();
        let mut answers = std::pin::pin!(self.ask_sidecars(metrics::state));
        while let Some((pod, socket, state)) = answers.next().await {
            let name = format!("{}/{}", pod.namespace, pod.name);
            states.entry(name).or_default().insert(socket.container, state);
        }
        metrics::document(&self.node_name, &states)
    }

    /// Asks all sidecars side by side: a slow one holds up nobody else.
    fn ask_sidecars<T, Fut>(
        &self,
        ask: impl Fn(PathBuf, &'static Socket) -> Fut,
    ) -> impl Stream<Item = (Pod, &'static Socket, T)>
    where
        Fut: Future<Output = T>,
    {
        let mut wanted = Vec::new();
        for hub in self.state().hubs.values() {
            wanted.extend(metrics::SOCKETS.iter().map(|socket| (hub.pod.clone(), socket)));
        }
        let asked = stream::iter(wanted).map(move |(pod, socket)| {
            let answer = ask(volume::private_dir(&self.kubelet_dir, &pod.uid), socket);
            async move { (pod, socket, answer.await) }
        });
        asked.buffer_unordered(ASKED_AT_ONCE)
    }

    /// Number of published volumes and of pods with a socket.
    #[must_use]
    pub fn counts(&self) -> (usize, usize) {
        let state = self.state();
        (state.volumes.len(), state.hubs.len())
    }

    /// What a human wants to know.
    #[must_use]
    pub fn describe(&self) -> serde_json::Value {
        let state = self.state();
        let volumes = state.volumes.iter().map(|(key, entry)| {
            serde_json::json!({
                "key": key,
                "pod": format!("{}/{}", entry.record.pod.namespace, entry.record.pod.name),
                "dataset": entry.dataset(),
                "readOnly": entry.record.volume.read_only,
                "generation": entry.record.volume.generation,
                "negotiated": entry.record.volume.recorded_init.is_some(),
                "trouble": entry.told.trouble(),
            })
        });
        serde_json::json!({
            "node": self.node_name,
            "volumes": volumes.collect::<Vec<_>>(),
            "sidecars": crate::serve::SIDECARS,
        })
    }
}

/// Runs a call that blocks, on a thread for such calls.
async fn blocking<T, F>(call: F) -> Result<T, PluginError>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T, ClientError> + Send + 'static,
{
    match tokio::task::spawn_blocking(call).await {
        Ok(result) => Ok(result?),
        Err(error) => Err(ClientError::from(io::Error::other(error)).into()),
    }
}

/// A number that no earlier mount of a volume has.
fn fresh_mount_id() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// Keeps an opening exchange for as long as it takes; false when its volume is gone.
async fn keep_exchange(plugin: Weak<Plugin>, key: String) -> bool {
    loop {
        let Some(plugin) = plugin.upgrade() else { return false };
        match plugin.keep(&key).await {
            Ok(()) => return plugin.set_kept(&key),
            Err(error) => tracing::warn!(%error, key, "keep the opening exchange of a mount"),
        }
        if !plugin.state().volumes.contains_key(&key) {
            return false;
        }
        drop(plugin);
        tokio::time::sleep(KEEP_INTERVAL).await;
    }
}

/// One pod's end of the hand-over.
struct Desk {
    pod: Pod,
    plugin: Weak<Plugin>,
    wake: mpsc::Sender<()>,
}

impl Desk {
    fn key(&self, volume: &str) -> String {
        volume::key(&self.pod.uid, volume)
    }

    /// Takes the exchange down; false if there is no such volume.
    fn record(&self, init: Init) -> bool {
        let Some(plugin) = self.plugin.upgrade() else { return false };
        let mut state = plugin.state();
        let Some(entry) = state.volumes.get_mut(&self.key(&init.volume)) else { return false };
        // Only the first exchange counts: the kernel heard no other.
        if entry.record.volume.recorded_init.is_none() {
            entry.record.volume.recorded_init = Some(init.request);
            entry.record.volume.recorded_reply = Some(init.reply);
        }
        // Nobody but who serves the mount already has anything to say of an exchange that is kept: it came again, because
        // this plugin is another one, or was too fast for it.
        entry.taken_over &= entry.record.volume.unkept;
        true
    }
}

impl handover::Pod for Desk {
    fn volumes(&self, role: Role) -> io::Result<Vec<(Volume, Option<OwnedFd>)>> {
        let Some(plugin) = self.plugin.upgrade() else { return Ok(Vec::new()) };
        let mut state = plugin.state();
        let start = self.key("");
        let mut volumes = Vec::new();
        for (_, entry) in state.volumes.iter_mut().filter(|(key, _)| key.starts_with(&start)) {
            entry.told.attach(role);
            let device = match role {
                Role::Scan => None,
                Role::Mount => {
                    entry.record.volume.generation += 1;
                    entry.unheard = true;
                    entry.taken_over = entry.record.volume.recorded_init.is_some();
                    Some(entry.device.try_clone()?)
                }
            };
            volumes.push((entry.record.volume.clone(), device));
        }
        tracing::info!(pod = self.pod.name, ?role, volumes = volumes.len(), "handed over");
        Ok(volumes)
    }

    fn negotiated(&self, init: Init) -> impl Future<Output = bool> + Send + 'static {
        let (plugin, key) = (Weak::clone(&self.plugin), self.key(&init.volume));
        let recorded = self.record(init);
        // A task of its own: it is kept whatever becomes of this sidecar meanwhile.
        let keeping = tokio::spawn(async move { recorded && keep_exchange(plugin, key).await });
        async move { keeping.await.unwrap_or(false) }
    }

    fn changed(&self, role: Role, status: Status) {
        let Some(plugin) = self.plugin.upgrade() else { return };
        let mut state = plugin.state();
        let Some(entry) = state.volumes.get_mut(&self.key(&status.volume)) else { return };
        if status.ok && role == Role::Mount && std::mem::take(&mut entry.unheard) {
            if std::mem::take(&mut entry.taken_over) {
                entry.told.take_over();
            }
            raise_read_ahead(&entry.record.target);
        }
        entry.told.hear(role, &status);
        drop(state);
        // Where it is full he is awake and looks again.
        let _ = self.wake.try_send(());
    }
}

fn raise_read_ahead(target: &Path) {
    let raised =
        mount::find(target).map(|found| found.map(|mount| mount::raise_read_ahead(&mount)));
    if let Ok(Some(Err(error))) = raised {
        tracing::info!(%error, "read-ahead stays at the kernel's default");
    }
}

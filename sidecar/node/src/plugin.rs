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

use futures::stream::{self, StreamExt};
use keeper::client::{Client, ClientError};
use keeper::handover::{FromNode, Init, Role, SOCKET, Status, Volume};
use tokio::sync::{broadcast, mpsc};

use crate::cluster::{Cluster, ClusterError, Notice};
use crate::handover;
use crate::metrics::Families;
use crate::mount::{self, MountError};
use crate::publish::{self, Denied, Record};
use crate::socket;
use crate::volume::{self, Options, Pod, VolumeError};

/// Notices of one pod that may wait for the API server; a pod that has more to say than this has said enough.
const NOTICES: usize = 64;
/// Sidecars asked at once for their state.
const STATES_AT_ONCE: usize = 32;
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
    /// Whether a later sidecar took the mount over and has not said yet how it does.
    taken_over: bool,
    told: Told,
}

impl Entry {
    fn new(record: Record, device: OwnedFd) -> Self {
        Self { record, device, taken_over: false, told: Told::default() }
    }
}

/// The last reason that was told of each part that serves a volume; empty while it does well.
#[derive(Debug, Default)]
struct Told {
    mount: String,
    scan: String,
}

impl Told {
    fn of(&mut self, role: Role) -> &mut String {
        match role {
            Role::Mount => &mut self.mount,
            Role::Scan => &mut self.scan,
        }
    }
}

/// What a pod's owner calls the part that a sidecar is.
const fn part(role: Role) -> &'static str {
    match role {
        Role::Mount => "mount",
        Role::Scan => "scan agent",
    }
}

struct Hub {
    pod: Pod,
    pushes: broadcast::Sender<FromNode>,
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
        let (notices, queue) = mpsc::channel(NOTICES);
        tokio::spawn(show(Arc::clone(&self.cluster), pod.clone(), queue));
        let desk = Desk { pod: pod.clone(), plugin: Weak::clone(&self.me), notices };
        let task = tokio::spawn(handover::serve(listener, Arc::new(desk), pushes.clone()));
        state.hubs.insert(pod.uid.clone(), Hub { pod: pod.clone(), pushes, task });
        Ok(())
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
        let pods: Vec<Pod> = self.state().hubs.values().map(|hub| hub.pod.clone()).collect();
        let mut families = Families::default();
        for pod in pods {
            let dir = volume::private_dir(&self.kubelet_dir, &pod.uid);
            for (name, container) in crate::metrics::SOCKETS {
                if let Some(text) = crate::metrics::scrape(&dir, name).await {
                    families.add(&text, &pod, container);
                }
            }
        }
        families.render()
    }

    /// What every sidecar on the node says about itself: by namespace, pod and container, all asked side by side.
    pub async fn sidecar_states(&self) -> serde_json::Value {
        let pods: Vec<Pod> = self.state().hubs.values().map(|hub| hub.pod.clone()).collect();
        let mut asked = Vec::new();
        for pod in pods {
            let dir = volume::private_dir(&self.kubelet_dir, &pod.uid);
            for (socket, container) in crate::metrics::SOCKETS {
                let (name, dir) = (format!("{}/{}", pod.namespace, pod.name), dir.clone());
                asked.push(
                    async move { (name, container, crate::metrics::state(&dir, socket).await) },
                );
            }
        }
        let said: Vec<_> = stream::iter(asked).buffer_unordered(STATES_AT_ONCE).collect().await;
        let mut states = BTreeMap::<String, BTreeMap<&str, serde_json::Value>>::new();
        for (name, container, state) in said {
            states.entry(name).or_default().insert(container, state);
        }
        serde_json::json!({"node": self.node_name, "pods": states})
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
                "dataset": format!("{}/{}", entry.record.volume.namespace, entry.record.volume.dataset),
                "readOnly": entry.record.volume.read_only,
                "generation": entry.record.volume.generation,
                "negotiated": entry.record.volume.recorded_init.is_some(),
                "trouble": {"mount": entry.told.mount, "scan": entry.told.scan},
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

/// Shows a pod's notices one after the other, so that they appear in the order of what happened.
async fn show(cluster: Arc<dyn Cluster>, pod: Pod, mut notices: mpsc::Receiver<Notice>) {
    while let Some(notice) = notices.recv().await {
        cluster.notify(&pod, notice).await;
    }
}

/// One pod's end of the hand-over.
struct Desk {
    pod: Pod,
    plugin: Weak<Plugin>,
    notices: mpsc::Sender<Notice>,
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
            let device = match role {
                Role::Scan => None,
                Role::Mount => {
                    entry.record.volume.generation += 1;
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
        let mut notices = Vec::new();
        {
            let mut state = plugin.state();
            let Some(entry) = state.volumes.get_mut(&self.key(&status.volume)) else { return };
            let dataset =
                format!("{}/{}", entry.record.volume.namespace, entry.record.volume.dataset);
            if status.ok && role == Role::Mount && std::mem::take(&mut entry.taken_over) {
                notices.push(Notice {
                    warning: false,
                    reason: "MountRecovered".to_owned(),
                    note: format!("a new sidecar serves Dataset {dataset}; open files go on"),
                });
            }
            notices.extend(notice(&mut entry.told, role, &status, &dataset));
            if status.ok && role == Role::Mount {
                raise_read_ahead(&entry.record.target);
            }
        }
        for notice in notices {
            if let Err(error) = self.notices.try_send(notice) {
                tracing::warn!(%error, pod = self.pod.name, "too many notices wait for the API server");
            }
        }
    }
}

fn raise_read_ahead(target: &Path) {
    let raised =
        mount::find(target).map(|found| found.map(|mount| mount::raise_read_ahead(&mount)));
    if let Ok(Some(Err(error))) = raised {
        tracing::info!(%error, "read-ahead stays at the kernel's default");
    }
}

/// What the pod's owner is told about a change of one part, if anything; `told` is what he was told last.
fn notice(told: &mut Told, role: Role, status: &Status, dataset: &str) -> Option<Notice> {
    let (told, part) = (told.of(role), part(role));
    if status.ok {
        let before = std::mem::take(told);
        return (!before.is_empty()).then(|| Notice {
            warning: false,
            reason: "Recovered".to_owned(),
            note: format!("Dataset {dataset}, {part}: works again after {before}"),
        });
    }
    let reason: String = status.reason.as_deref().unwrap_or("StoreUnavailable").into();
    let plain = reason.len() <= 64 && reason.chars().all(|c| c.is_ascii_alphanumeric());
    if !plain || *told == reason {
        return None;
    }
    told.clone_from(&reason);
    let message: String = status.message.as_deref().unwrap_or_default().chars().take(600).collect();
    let note = format!("Dataset {dataset}, {part}: {message}; {}", publish::fix(&reason));
    Some(Notice { warning: true, reason, note })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(reason: Option<&str>) -> Status {
        Status {
            volume: "v".into(),
            ok: reason.is_none(),
            reason: reason.map(str::to_owned),
            message: Some("403 from the server".into()),
        }
    }

    #[test]
    fn each_change_is_told_once_and_with_its_fix() {
        let mut told = Told::default();
        let mut notice = |reason| notice(&mut told, Role::Mount, &status(reason), "n/d");
        assert_eq!(notice(None), None);
        let first = notice(Some("InvalidCredentials")).unwrap();
        assert!(first.warning);
        assert_eq!(
            first.note,
            "Dataset n/d, mount: 403 from the server; correct the keys in the Secret that the Dataset names"
        );
        assert_eq!(notice(Some("InvalidCredentials")), None);
        assert!(notice(Some("AccessDenied")).is_some());
        let last = notice(None).unwrap();
        assert_eq!((last.warning, last.reason.as_str()), (false, "Recovered"));
        assert_eq!(notice(None), None);
    }

    #[test]
    fn a_made_up_reason_is_not_shown() {
        let told = &mut Told::default();
        assert_eq!(notice(told, Role::Scan, &status(Some("Send money!")), "n/d"), None);
        assert_eq!(notice(told, Role::Scan, &status(None), "n/d"), None);
    }
}

//! The same with the real node plugin, which runs in the test's own process: what it and the keeper may lose.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::Arc;
use std::time::Duration;

use keeper::client::Client;
use keeper::handover::{Credentials, Volume};
use node::cluster::{Cluster, ClusterError, DatasetSpec, Notice};
use node::plugin::Plugin;
use node::volume::{self, Options, Pod};
use rustix::mount::UnmountFlags;
use sidecar::report::{Refusal, Reporter};
use sidecar::run::{Opened, Opener, Places, READY_FILE, Sidecar};

use super::{child, local_fs, wait_for};

const UID: &str = "uid-1";
const DATA: &str = "lampyris-0";

/// Opens the directory beside the mount, whatever the volume names.
struct Local(PathBuf);

#[async_trait::async_trait]
impl Opener for Local {
    async fn open(&self, _: &Volume, _: &Reporter) -> Result<Opened, Refusal> {
        let files = local_fs::LocalFs { dir: self.0.clone(), delay: Duration::ZERO };
        Ok(Opened { files: Arc::new(files), immutable: false })
    }

    fn credentials(&self, _: &Credentials) {}
}

/// The role of a mount sidecar.
pub(crate) fn serve(place: &Path) {
    let private_dir = volume::private_dir(place, UID);
    let (_stop, stopped) = tokio::sync::watch::channel(false);
    let opener = Box::new(Local(place.join("files")));
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        let (sidecar, messages) = Sidecar::new(Places { private_dir, threads: 2 }, opener);
        sidecar.run(messages, stopped).await;
    });
}

/// The role of an application.
pub(crate) fn read_hello(place: &Path) {
    assert_eq!(fs::read_to_string(target(place).join("hello")).unwrap(), "world");
}

fn target(place: &Path) -> PathBuf {
    place.join("pods").join(UID).join("volumes/kubernetes.io~csi/lampyris-0/mount")
}

/// A cluster with one Dataset.
struct Twin;

#[async_trait::async_trait]
impl Cluster for Twin {
    async fn dataset(&self, _: &str, _: &str) -> Result<DatasetSpec, ClusterError> {
        let source = serde_json::json!({"cluster": {"ref": {"name": "train"}, "path": "/d"}});
        let spec = serde_json::json!({"format": "Files", "source": source});
        Ok(serde_json::from_value(spec).unwrap())
    }

    async fn notify(&self, _: &Pod, _: Notice) {}
}

/// A node: a directory for kubelet's, keepers, and children to be ended.
struct Node {
    place: tempfile::TempDir,
    runtime: tokio::runtime::Runtime,
    sidecar: Option<Child>,
}

impl Node {
    fn set() -> Self {
        let place = tempfile::tempdir().unwrap();
        fs::create_dir(place.path().join("files")).unwrap();
        fs::write(place.path().join("files/hello"), "world").unwrap();
        let runtime = tokio::runtime::Runtime::new().unwrap();
        Self { place, runtime, sidecar: None }
    }

    fn keeper(&self, name: &str) -> PathBuf {
        let socket = self.place.path().join(name);
        let uid = rustix::process::getuid().as_raw();
        let keeper = keeper::server::Server::bind(&socket, uid).unwrap();
        std::thread::spawn(move || keeper.run());
        socket
    }

    /// A node plugin that has taken up what it found.
    fn plugin(&self, keeper: &Path) -> Arc<Plugin> {
        let dir = self.place.path().to_owned();
        let plugin = Plugin::new("node-1".into(), dir, keeper.to_owned(), Arc::new(Twin));
        self.runtime.block_on(plugin.recover()).unwrap();
        plugin
    }

    fn publish(&self, plugin: &Plugin) {
        let options = Options {
            pod: Pod { namespace: "team".into(), name: "p".into(), uid: UID.into() },
            name: DATA.into(),
            target: target(self.place.path()),
            mount_path: None,
            dataset: "d".into(),
            namespace: "team".into(),
            read_only: true,
            uid: 0,
            gid: 0,
            credentials: None,
        };
        self.runtime.block_on(plugin.publish(options)).unwrap();
    }

    fn is_mounted(&self) -> bool {
        node::mount::find(&target(self.place.path())).unwrap().is_some()
    }

    fn ready_file(&self) -> PathBuf {
        volume::private_dir(self.place.path(), UID).join(READY_FILE)
    }

    fn start_sidecar(&mut self) {
        self.sidecar = Some(child(self.place.path(), "sidecar"));
    }

    fn kill_sidecar(&mut self) {
        let mut sidecar = self.sidecar.take().unwrap();
        sidecar.kill().unwrap();
        sidecar.wait().unwrap();
        if self.ready_file().exists() {
            fs::remove_file(self.ready_file()).unwrap();
        }
    }

    /// Reads a file of the mount, from another process: it waits as long as nobody answers.
    fn read(&self) {
        let mut reader = child(self.place.path(), "hello");
        let mut ended = None;
        wait_for("an application that reads", || {
            ended = reader.try_wait().unwrap();
            ended.is_some()
        });
        assert!(ended.unwrap().success(), "the application reads what is there");
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if self.is_mounted() {
            let flags = UnmountFlags::FORCE | UnmountFlags::DETACH;
            rustix::mount::unmount(target(self.place.path()), flags).unwrap();
        }
        if self.sidecar.is_some() {
            self.kill_sidecar();
        }
    }
}

#[test]
fn a_mount_outlives_plugin_and_sidecar_that_die_before_its_exchange_is_kept() {
    let mut node = Node::set();
    let socket = node.keeper("keeper.sock");
    let plugin = node.plugin(&socket);
    node.publish(&plugin);
    let away = socket.with_extension("away");
    fs::rename(&socket, &away).unwrap();
    node.start_sidecar();
    wait_for("the exchange", || plugin.describe().to_string().contains("\"negotiated\":true"));
    node.kill_sidecar();
    drop(plugin);

    fs::rename(&away, &socket).unwrap();
    let plugin = node.plugin(&socket);
    assert_eq!(plugin.counts(), (1, 1));
    node.start_sidecar();
    wait_for("a sidecar that is ready", || node.ready_file().exists());
    node.read();
    assert!(plugin.describe().to_string().contains("\"negotiated\":true"));

    // From here on both may die at any moment.
    node.kill_sidecar();
    drop(plugin);
    let plugin = node.plugin(&socket);
    node.start_sidecar();
    wait_for("a sidecar that is ready", || node.ready_file().exists());
    node.read();
    assert!(plugin.describe().to_string().contains("\"negotiated\":true"));
}

#[test]
fn a_mount_made_anew_is_served_by_the_sidecar_that_served_the_earlier_one() {
    let mut node = Node::set();
    let socket = node.keeper("keeper.sock");
    let plugin = node.plugin(&socket);
    node.publish(&plugin);
    node.start_sidecar();
    node.read();

    // The keeper is replaced and the node plugin dies before it has given the new one its entries: the device is lost to
    // both, so the mount ends, and kubelet, which repeats its call, gets another.
    drop(plugin);
    let replaced = node.keeper("replaced.sock");
    let plugin = node.plugin(&replaced);
    assert!(!node.is_mounted(), "nobody could serve it once the sidecar is gone");
    node.publish(&plugin);
    assert!(node.is_mounted());
    node.read();
    assert_eq!(node.sidecar.as_mut().unwrap().try_wait().unwrap(), None, "it is still the same");
    let kept = || Client::new(replaced.clone()).get("uid-1/lampyris-0").unwrap().0;
    assert!(kept()["volume"]["recordedInit"].is_string());

    // And the exchange that was recorded is that of the new mount.
    node.kill_sidecar();
    node.start_sidecar();
    wait_for("a sidecar that is ready", || node.ready_file().exists());
    node.read();
}

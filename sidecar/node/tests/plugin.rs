//! The node plugin with a real keeper and real mounts, a map for a cluster, and the test as sidecar.
//!
//! Needs root and /dev/fuse.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crds::DatasetSpec;
use keeper::client::Client;
use keeper::handover::{FromNode, FromSidecar, Hello, Init, Kept, Role, Status, Volume};
use keeper::server::{Answer, Request};
use keeper::wire::{Connection, WireError};
use node::cluster::{Cluster, ClusterError, Notice};
use node::csi::{MountVolume, NodePublish, VolumeCapability};
use node::plugin::Plugin;
use node::volume::{self, Credentials, Options, Pod};
use node::{mount, serve};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::registry::Registry;
use rpc::admin::Admin;
use rustix::mount::UnmountFlags;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tonic::Code;

/// A cluster with one Dataset that remembers what was shown.
#[derive(Default)]
struct Twin {
    shown: Mutex<Vec<Notice>>,
}

#[async_trait::async_trait]
impl Cluster for Twin {
    async fn dataset(&self, namespace: &str, name: &str) -> Result<DatasetSpec, ClusterError> {
        if (namespace, name) != ("team", "d") {
            return Err(ClusterError::NoDataset(format!("{namespace}/{name}")));
        }
        let spec = json!({
            "format": "Files",
            "source": {"s3": {"uri": "s3://b/p", "secretRef": {"name": "keys"}}},
        });
        Ok(serde_json::from_value(spec).unwrap())
    }

    async fn notify(&self, pod: &Pod, notice: Notice) {
        assert_eq!(pod.name, "p");
        self.shown.lock().unwrap().push(notice);
    }
}

impl Twin {
    fn reasons(&self) -> Vec<String> {
        self.shown.lock().unwrap().iter().map(|notice| notice.reason.clone()).collect()
    }

    /// Reason and note up to the message, of everything shown so far.
    fn told(&self) -> Vec<(String, String)> {
        let shown = self.shown.lock().unwrap();
        let of = |notice: &Notice| {
            let part = notice.note.split(':').next().unwrap().to_owned();
            (notice.reason.clone(), part)
        };
        shown.iter().map(of).collect()
    }
}

/// A kubelet directory with a keeper.
struct Stage {
    kubelet: tempfile::TempDir,
    cluster: Arc<Twin>,
}

impl Stage {
    fn set() -> Self {
        let kubelet = tempfile::tempdir().unwrap();
        let keeper = keeper::server::Server::bind(&kubelet.path().join("keeper.sock"), 0).unwrap();
        std::thread::spawn(move || keeper.run());
        Self { kubelet, cluster: Arc::default() }
    }

    fn plugin(&self) -> Arc<Plugin> {
        let cluster = Arc::clone(&self.cluster) as Arc<dyn Cluster>;
        let dir = self.kubelet.path().to_owned();
        Plugin::new("node-1".into(), dir, self.kubelet.path().join("keeper.sock"), cluster)
    }

    fn options(&self, key: &str) -> Options {
        let target =
            self.kubelet.path().join("pods/uid-1/volumes/kubernetes.io~csi/lampyris-0/mount");
        Options {
            pod: Pod { namespace: "team".into(), name: "p".into(), uid: "uid-1".into() },
            name: "lampyris-0".into(),
            target,
            mount_path: None,
            dataset: "d".into(),
            namespace: "team".into(),
            read_only: true,
            uid: 0,
            gid: 0,
            credentials: Some(Credentials {
                access_key_id: key.into(),
                secret_access_key: "s".into(),
                session_token: None,
            }),
        }
    }

    /// Attaches as a mount sidecar and takes the one volume.
    fn attach(&self) -> (Connection, Volume, usize) {
        self.attach_as(Role::Mount)
    }

    fn attach_as(&self, role: Role) -> (Connection, Volume, usize) {
        let dir = volume::private_dir(self.kubelet.path(), "uid-1");
        let stream = UnixStream::connect(dir.join("node.sock")).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let mut connection = Connection::new(stream);
        let hello = FromSidecar::Hello(Hello { version: 1, role });
        connection.send(&hello, &[]).unwrap();
        let (message, devices) = connection.receive::<FromNode>().unwrap().unwrap();
        let FromNode::Volume(volume) = message else { panic!("{message:?}") };
        (connection, *volume, devices.len())
    }
}

/// A failing test must not hang on what it leaves mounted.
impl Drop for Stage {
    fn drop(&mut self) {
        for point in mount::below(self.kubelet.path()).unwrap() {
            let flags = UnmountFlags::FORCE | UnmountFlags::DETACH;
            rustix::mount::unmount(&point, flags).unwrap();
        }
    }
}

fn status(reason: Option<&str>) -> FromSidecar {
    FromSidecar::Status(Status {
        volume: "lampyris-0".into(),
        ok: reason.is_none(),
        reason: reason.map(str::to_owned),
        message: None,
    })
}

#[allow(clippy::unnecessary_wraps, reason = "as unpublish takes it")]
fn key() -> Option<(String, String)> {
    Some(("uid-1".to_owned(), "lampyris-0".to_owned()))
}

fn init() -> FromSidecar {
    let (request, reply) = ("cmVx".to_owned(), "cmVw".to_owned());
    FromSidecar::Init(Init { volume: "lampyris-0".into(), request, reply, confirm: true })
}

async fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(Instant::now() < deadline, "timed out waiting for {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn kept_init(kubelet: &Path) -> Option<String> {
    let keeper = Client::new(kubelet.join("keeper.sock"));
    let (meta, _) = keeper.get("uid-1/lampyris-0").ok()?;
    Some(meta["volume"]["recordedInit"].as_str()?.to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_lives_from_publish_over_restarts_to_unpublish() {
    let stage = Stage::set();
    let plugin = stage.plugin();
    plugin.recover().await.unwrap();
    plugin.publish(stage.options("old")).await.unwrap();
    plugin.publish(stage.options("old")).await.unwrap();
    let target = stage.options("old").target;
    assert_eq!(
        mount::below(stage.kubelet.path()).unwrap(),
        std::slice::from_ref(&target),
        "mounted once"
    );

    let (mut sidecar, volume, devices) = stage.attach();
    assert_eq!((devices, volume.generation, volume.last), (1, 1, true));
    assert_eq!(volume.source["s3"]["credentials"]["accessKeyId"], "old");
    assert_eq!(volume.recorded_init, None);
    sidecar.send(&init(), &[]).unwrap();
    sidecar.send(&status(Some("InvalidCredentials")), &[]).unwrap();
    wait_for("the event", || stage.cluster.reasons() == ["InvalidCredentials"]).await;
    let (kept, _) = sidecar.receive::<FromNode>().unwrap().unwrap();
    assert_eq!(kept, FromNode::Kept(Kept { volume: "lampyris-0".into() }));
    assert_eq!(kept_init(stage.kubelet.path()).as_deref(), Some("cmVx"));

    plugin.publish(stage.options("new")).await.unwrap();
    let (push, _) = sidecar.receive::<FromNode>().unwrap().unwrap();
    let FromNode::Credentials(fresh) = push else { panic!("{push:?}") };
    assert_eq!(fresh.access_key_id, "new");
    sidecar.send(&status(None), &[]).unwrap();
    wait_for("recovery", || stage.cluster.reasons().last().unwrap() == "Recovered").await;

    // A second plugin, after the first one's death, takes up the mount. The sidecar is the same and says what it said.
    drop(plugin);
    let plugin = stage.plugin();
    plugin.recover().await.unwrap();
    assert_eq!(plugin.counts(), (1, 1));
    let (sidecar, volume, devices) = stage.attach();
    assert_eq!((devices, volume.recorded_init.as_deref()), (1, Some("cmVx")));
    assert_eq!(volume.recorded_reply.as_deref(), Some("cmVw"));
    assert_eq!(volume.source["s3"]["credentials"]["accessKeyId"], "new");
    sidecar.send(&init(), &[]).unwrap();
    sidecar.send(&status(None), &[]).unwrap();
    // Whatever came before this is told before it.
    sidecar.send(&status(Some("AccessDenied")), &[]).unwrap();
    wait_for("the event", || stage.cluster.reasons().last().unwrap() == "AccessDenied").await;
    sidecar.send(&status(None), &[]).unwrap();
    wait_for("recovery", || stage.cluster.reasons().last().unwrap() == "Recovered").await;

    // Another sidecar has nothing to say of the exchange; it is told once that it came.
    let (sidecar, volume, devices) = stage.attach();
    assert_eq!((devices, volume.recorded_init.as_deref()), (1, Some("cmVx")));
    for _ in 0..2 {
        sidecar.send(&status(None), &[]).unwrap();
    }
    wait_for("take-over", || stage.cluster.reasons().last().unwrap() == "MountRecovered").await;
    sidecar.send(&status(Some("AccessDenied")), &[]).unwrap();
    let all = [
        "InvalidCredentials",
        "Recovered",
        "AccessDenied",
        "Recovered",
        "MountRecovered",
        "AccessDenied",
    ];
    wait_for("the last word", || stage.cluster.reasons().len() >= all.len()).await;
    assert_eq!(stage.cluster.reasons(), all);

    plugin.unpublish(&target, key()).await.unwrap();
    plugin.unpublish(&target, key()).await.unwrap();
    assert!(!target.exists());
    assert_eq!(plugin.counts(), (0, 0));
    let keeper = Client::new(stage.kubelet.path().join("keeper.sock"));
    assert!(keeper.list().unwrap().is_empty());
}

/// Each of the two sidecars of a pod may fail and recover without the other.
#[tokio::test(flavor = "multi_thread")]
async fn trouble_and_recovery_are_told_of_the_part_that_had_it() {
    let parts =
        [(Role::Mount, "Dataset team/d, mount"), (Role::Scan, "Dataset team/d, scan agent")];
    for (first, other) in [(0, 1), (1, 0)] {
        let stage = Stage::set();
        let plugin = stage.plugin();
        plugin.publish(stage.options("k")).await.unwrap();
        let sidecars = parts.map(|(role, _)| stage.attach_as(role).0);
        let mut expected: Vec<(&str, &str)> = Vec::new();
        let steps = [
            (first, None, None),
            (first, Some("InvalidCredentials"), Some("InvalidCredentials")),
            // It works, as it did before; nothing that was broken is whole again.
            (other, None, None),
            (other, Some("InvalidCredentials"), Some("InvalidCredentials")),
            (first, Some("InvalidCredentials"), None),
            (first, None, Some("Recovered")),
            (other, Some("AccessDenied"), Some("AccessDenied")),
            (first, None, None),
            (other, None, Some("Recovered")),
        ];
        for (part, says, shown) in steps {
            sidecars[part].send(&status(says), &[]).unwrap();
            expected.extend(shown.map(|reason| (reason, parts[part].1)));
            if shown.is_some() {
                let same = |told: &[(String, String)]| {
                    told.iter().map(|(reason, part)| (&**reason, &**part)).eq(expected.clone())
                };
                let cluster = &stage.cluster;
                wait_for(&format!("{expected:?}"), || cluster.told().len() >= expected.len()).await;
                let told = stage.cluster.told();
                assert!(same(&told), "{told:?}, expected {expected:?}");
            }
        }
        plugin.unpublish(&stage.options("k").target, key()).await.unwrap();
    }
}

/// A scan agent that comes anew may find everything well and has no trouble of its own to take back.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_scan_agent_said_ends_with_it_and_its_recovery_is_told_by_the_next_one() {
    let stage = Stage::set();
    let plugin = stage.plugin();
    plugin.publish(stage.options("k")).await.unwrap();
    let trouble = || plugin.describe()["volumes"][0]["trouble"].clone();
    let (first, ..) = stage.attach_as(Role::Scan);
    first.send(&status(Some("CorruptFile")), &[]).unwrap();
    wait_for("the event", || stage.cluster.reasons() == ["CorruptFile"]).await;
    assert_eq!(trouble(), json!({"mount": "", "scan": "CorruptFile"}));
    drop(first);
    let (second, ..) = stage.attach_as(Role::Scan);
    assert_eq!(trouble(), json!({"mount": "", "scan": ""}));
    second.send(&status(None), &[]).unwrap();
    wait_for("recovery", || stage.cluster.reasons() == ["CorruptFile", "Recovered"]).await;
    plugin.unpublish(&stage.options("k").target, key()).await.unwrap();
}

/// A container in the place of our sidecar may say what it likes, as fast as it likes; each Event is an object that the
/// API server has to keep.
#[tokio::test(flavor = "multi_thread")]
async fn a_pod_causes_few_events_however_much_its_sidecar_says() {
    let stage = Stage::set();
    let plugin = stage.plugin();
    plugin.publish(stage.options("k")).await.unwrap();
    let trouble = || plugin.describe()["volumes"][0]["trouble"]["mount"].clone();
    for last in ["CorruptFile", "TlsFailed"] {
        let (sidecar, ..) = stage.attach();
        for round in 0..1000 {
            let reason = if round % 2 == 0 { "AccessDenied" } else { "BucketNotFound" };
            sidecar.send(&status(Some(reason)), &[]).unwrap();
        }
        sidecar.send(&status(Some(last)), &[]).unwrap();
        wait_for("the last word", || trouble() == last).await;
        // It does not help to come again, nor to take the socket away, so that another one is made.
        let private = volume::private_dir(stage.kubelet.path(), "uid-1");
        std::fs::remove_file(private.join("node.sock")).unwrap();
        plugin.publish(stage.options("k")).await.unwrap();
    }
    // Those that were too many would come now; that none does is no condition to wait for.
    tokio::time::sleep(Duration::from_millis(300)).await;
    let shown = stage.cluster.reasons().len();
    assert!((1..=12).contains(&shown), "{shown} events");
    plugin.unpublish(&stage.options("k").target, key()).await.unwrap();
}

/// As kubelet asks for the volume of [`Stage::options`].
fn request(stage: &Stage) -> NodePublish {
    let options = stage.options("k");
    let context = [
        ("csi.storage.k8s.io/ephemeral", "true"),
        ("csi.storage.k8s.io/pod.name", &*options.pod.name),
        ("csi.storage.k8s.io/pod.namespace", &*options.pod.namespace),
        ("csi.storage.k8s.io/pod.uid", &*options.pod.uid),
        ("dataset", &*options.dataset),
    ];
    let mount = MountVolume { volume_mount_group: String::new() };
    let keys = [("accessKeyId", "k"), ("secretAccessKey", "s")];
    NodePublish {
        volume_id: "csi-1".into(),
        target_path: options.target.display().to_string(),
        volume_capability: Some(VolumeCapability { block: None, mount: Some(mount) }),
        readonly: true,
        secrets: keys.map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
        volume_context: context.map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
    }
}

/// After most codes kubelet takes a volume for not mounted, and never asks to unmount it.
#[tokio::test(flavor = "multi_thread")]
async fn a_publish_that_fails_once_the_volume_is_mounted_leaves_open_whether_it_is() {
    let stage = Stage::set();
    let plugin = stage.plugin();
    let good = request(&stage);
    let bad = NodePublish { volume_context: [].into(), ..good.clone() };
    let code = |published: Result<(), tonic::Status>| published.map_err(|status| status.code());
    let mounts = || mount::below(stage.kubelet.path()).unwrap().len();
    let refused = serve::publish(&plugin, &bad).await;
    assert_eq!((code(refused), mounts()), (Err(Code::InvalidArgument), 0));

    // What the hand-over socket cannot take the place of.
    let in_the_way = volume::private_dir(stage.kubelet.path(), "uid-1").join("node.sock");
    std::fs::create_dir_all(&in_the_way).unwrap();
    let failed = serve::publish(&plugin, &good).await.unwrap_err();
    assert!(failed.message().contains("hand-over socket"), "{failed}");
    assert_eq!((failed.code(), mounts()), (Code::Unavailable, 1));
    let refused = serve::publish(&plugin, &bad).await;
    assert_eq!((code(refused), mounts()), (Err(Code::Unavailable), 1));

    std::fs::remove_dir(&in_the_way).unwrap();
    serve::publish(&plugin, &good).await.unwrap();
    assert_eq!(plugin.counts(), (1, 1));
    plugin.unpublish(&stage.options("k").target, key()).await.unwrap();
    assert_eq!(mounts(), 0);
}

/// Else the two could die with the exchange and the mount with them: nobody can ask the kernel for it again.
#[tokio::test(flavor = "multi_thread")]
async fn a_sidecar_hears_that_its_exchange_is_kept_only_when_the_keeper_has_it() {
    let stage = Stage::set();
    let plugin = stage.plugin();
    plugin.publish(stage.options("k")).await.unwrap();
    let socket = stage.kubelet.path().join("keeper.sock");
    let away = socket.with_extension("away");
    std::fs::rename(&socket, &away).unwrap();
    let (mut first, volume, _) = stage.attach();
    assert!(volume.unkept);
    first.send(&init(), &[]).unwrap();
    wait_for("the exchange", || plugin.describe().to_string().contains("\"negotiated\":true"))
        .await;
    // So does one that finds the exchange of another, while the keeper is away.
    let (mut second, volume, _) = stage.attach();
    assert_eq!((volume.unkept, volume.recorded_init.as_deref()), (true, Some("cmVx")));
    second.send(&init(), &[]).unwrap();
    for sidecar in [&first, &second] {
        sidecar.stream().set_nonblocking(true).unwrap();
    }
    let nothing = first.receive::<FromNode>();
    assert!(nothing.as_ref().is_err_and(WireError::is_would_block), "{nothing:?}");
    std::fs::rename(&away, &socket).unwrap();
    for sidecar in [&mut first, &mut second] {
        sidecar.stream().set_nonblocking(false).unwrap();
        let (kept, _) = sidecar.receive::<FromNode>().unwrap().unwrap();
        assert_eq!(kept, FromNode::Kept(Kept { volume: "lampyris-0".into() }));
        assert_eq!(kept_init(stage.kubelet.path()).as_deref(), Some("cmVx"));
    }
    let (_third, volume, _) = stage.attach();
    assert!(!volume.unkept);
    plugin.unpublish(&stage.options("k").target, key()).await.unwrap();
}

/// A put that is slow on its way must not undo what a later one kept.
#[tokio::test(flavor = "multi_thread")]
async fn the_keeper_is_left_with_the_newest_of_a_volume() {
    let stage = Stage { kubelet: tempfile::tempdir().unwrap(), cluster: Arc::default() };
    let keeper = UnixListener::bind(stage.kubelet.path().join("keeper.sock")).unwrap();
    let (puts, mut arrived) = tokio::sync::mpsc::channel(8);
    std::thread::spawn(move || {
        for stream in keeper.incoming() {
            let mut connection = Connection::new(stream.unwrap());
            if let Some((Request::Put { meta, .. }, _)) = connection.receive().unwrap()
                && puts.blocking_send((connection, meta)).is_err()
            {
                return;
            }
        }
    });
    let mut kept = Vec::new();
    let mut answer = |(connection, meta): (Connection, serde_json::Value)| {
        connection.send(&Answer::Ok(true), &[]).unwrap();
        kept.push(meta["volume"]["recordedInit"].as_str().map(str::to_owned));
    };
    let plugin = stage.plugin();
    let publish = |secret: &str| {
        let (plugin, options) = (Arc::clone(&plugin), stage.options(secret));
        tokio::spawn(async move { plugin.publish(options).await })
    };
    let first = publish("old");
    answer(arrived.recv().await.unwrap());
    first.await.unwrap().unwrap();

    let second = publish("new");
    let slow = arrived.recv().await.unwrap();
    let (mut sidecar, ..) = stage.attach();
    sidecar.send(&init(), &[]).unwrap();
    // What overtakes it, if anything does, is kept first.
    if let Ok(fast) = tokio::time::timeout(Duration::from_millis(300), arrived.recv()).await {
        answer(fast.unwrap());
    }
    answer(slow);
    second.await.unwrap().unwrap();
    if let Ok(last) = tokio::time::timeout(Duration::from_secs(5), arrived.recv()).await {
        answer(last.unwrap());
    }
    assert_eq!(kept, [None, None, Some("cmVx".to_owned())]);
    let (told, _) = sidecar.receive::<FromNode>().unwrap().unwrap();
    assert_eq!(told, FromNode::Kept(Kept { volume: "lampyris-0".into() }));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mount_that_nobody_can_serve_any_more_is_cleaned_up() {
    let stage = Stage::set();
    let target = stage.options("k").target;
    let device = mount::mount(&target, true).unwrap();
    drop(device);
    stage.plugin().recover().await.unwrap();
    assert_eq!(mount::find(&target).unwrap(), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_may_not_have_the_dataset_gets_no_mount() {
    let stage = Stage::set();
    let plugin = stage.plugin();
    let mut options = stage.options("k");
    options.credentials = None;
    let denied = plugin.publish(options.clone()).await.unwrap_err();
    assert!(denied.to_string().contains("nodePublishSecretRef"), "{denied}");
    options.dataset = "missing".into();
    let denied = plugin.publish(options.clone()).await.unwrap_err();
    assert!(denied.to_string().contains("does not exist"), "{denied}");
    assert_eq!(mount::find(&options.target).unwrap(), None);
    assert_eq!(plugin.counts(), (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_of_the_sidecars_are_shown_with_the_labels_of_their_pods() {
    let stage = Stage::set();
    let plugin = stage.plugin();
    plugin.publish(stage.options("k")).await.unwrap();
    let (_stop, stopped) = tokio::sync::watch::channel(false);
    // A sidecar's admin socket, as the sidecar serves it.
    let reads = Counter::<u64>::default();
    reads.inc_by(7);
    let mut registry = Registry::with_prefix("lampyris_mount");
    registry.register("reads", "Reads", reads);
    let sidecar = Arc::new(Admin::new(registry, || Ok(()), || json!({})));
    let socket = volume::private_dir(stage.kubelet.path(), "uid-1").join("mount-admin.sock");
    let serving = socket.clone();
    let until = stopped.clone();
    tokio::spawn(async move { rpc::admin::serve_unix(&serving, sidecar, until).await });
    wait_for("the sidecar", || UnixStream::connect(&socket).is_ok()).await;

    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (registered, recovered) = (Arc::new(true.into()), Arc::new(true.into()));
    let admin = serve::admin(&plugin, &registered, &recovered);
    tokio::spawn(rpc::admin::serve(listener, admin, stopped));
    // The other sidecar of the pod is another program.
    let hostile =
        "# TYPE lampyris_scan_rows nonsense\nlampyris_scan_rows 1\ny{\nlampyris_node_pods 7\n";
    let dir = volume::private_dir(stage.kubelet.path(), "uid-1");
    let listener = UnixListener::bind(dir.join("scan-admin.sock")).unwrap();
    std::thread::spawn(move || {
        let (mut peer, _) = listener.accept().unwrap();
        assert_ne!(peer.read(&mut [0; 4096]).unwrap(), 0);
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", hostile.len());
        peer.write_all((head + hostile).as_bytes()).unwrap();
    });
    let answer = get(address, "/metrics").await;
    assert!(["nonsense", "\ny{", "pods 7"].iter().all(|said| !answer.contains(said)), "{answer}");
    let of_sidecar = "lampyris_mount_reads_total{namespace=\"team\",pod=\"p\",\
                      container=\"lampyris-mount\"} 7";
    for expected in [of_sidecar, "lampyris_node_volumes 1", "lampyris_node_pods 1"] {
        assert_eq!(answer.lines().filter(|line| *line == expected).count(), 1, "{answer}");
    }
    assert!(answer.trim_end().ends_with("# EOF"), "{answer}");
    assert!(get(address, "/readyz").await.starts_with("HTTP/1.1 200"));
    plugin.unpublish(&stage.options("k").target, key()).await.unwrap();
}

/// A sidecar may be another program: whatever it answers, the others are shown, and within a moment.
#[tokio::test(flavor = "multi_thread")]
async fn states_of_the_sidecars_are_shown_whatever_one_of_them_answers() {
    let stage = Stage::set();
    let plugin = stage.plugin();
    plugin.publish(stage.options("k")).await.unwrap();
    let (_stop, stopped) = tokio::sync::watch::channel(false);
    let dir = volume::private_dir(stage.kubelet.path(), "uid-1");
    let sidecar =
        Arc::new(Admin::new(Registry::default(), || Ok(()), || json!({"complete": true})));
    let (scan, until) = (dir.join("scan-admin.sock"), stopped.clone());
    tokio::spawn({
        let scan = scan.clone();
        async move { rpc::admin::serve_unix(&scan, sidecar, until).await }
    });
    wait_for("the scan agent", || UnixStream::connect(&scan).is_ok()).await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (registered, recovered) = (Arc::new(true.into()), Arc::new(true.into()));
    let admin = serve::admin(&plugin, &registered, &recovered);
    tokio::spawn(rpc::admin::serve(listener, admin, stopped));

    let plain =
        |body: String| format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    let deep = "[".repeat(10_000);
    let nested = format!("{}{}", "[".repeat(100), "]".repeat(100));
    let long = format!("\"{}\"", "x".repeat(node::metrics::MAX_STATE_BYTES));
    let endless = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n".to_owned();
    let answers = [
        (Some(plain("{\"complete\":false}".into())), json!({"complete": false})),
        (Some(plain("hello".into())), json!({"error": "no JSON"})),
        (Some(plain(deep)), json!({"error": "no JSON"})),
        // It would be too deep for who parses it with the others.
        (Some(plain(nested)), json!({"error": "JSON that is nested too deep"})),
        (Some(plain(long)), json!({"error": "an answer too long or cut off"})),
        (Some("SSH-2.0-x\r\n".to_owned()), json!({"error": "no HTTP"})),
        (Some("HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n".into()), json!({"error": "refused"})),
        (Some(endless), json!({"error": "no answer in time"})),
        (None, json!({"error": "no answer in time"})),
    ];
    let mount = dir.join("mount-admin.sock");
    for (answer, shown) in answers {
        let _ = std::fs::remove_file(&mount);
        let listener = UnixListener::bind(&mount).unwrap();
        let speaking = std::thread::spawn(move || {
            let (mut peer, _) = listener.accept().unwrap();
            // Whoever answers before he is asked speaks no HTTP.
            assert_ne!(peer.read(&mut [0; 4096]).unwrap(), 0);
            if let Some(answer) = answer {
                // It fails where the plugin has read enough.
                let _ = peer.write_all(answer.as_bytes());
            }
            // Until the plugin ends the connection.
            let _ = std::io::copy(&mut peer, &mut std::io::sink());
        });
        let started = Instant::now();
        let said = get(address, "/state/sidecars").await;
        assert!(started.elapsed() < Duration::from_secs(5), "{shown}");
        let body: serde_json::Value =
            serde_json::from_str(said.split_once("\r\n\r\n").unwrap().1).unwrap();
        let pod = &body["pods"]["team/p"];
        assert_eq!(pod["lampyris-mount"], shown, "{body}");
        assert_eq!(pod["lampyris-scan"], json!({"complete": true}), "{body}");
        wait_for("the connection's end", || speaking.is_finished()).await;
    }
    plugin.unpublish(&stage.options("k").target, key()).await.unwrap();
}

/// The answer to one HTTP request.
async fn get(address: std::net::SocketAddr, path: &str) -> String {
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: n\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

#[tokio::test(flavor = "multi_thread")]
async fn a_keeper_that_lost_everything_gets_it_again() {
    let stage = Stage::set();
    let plugin = stage.plugin();
    plugin.publish(stage.options("k")).await.unwrap();
    let keeper = Client::new(stage.kubelet.path().join("keeper.sock"));
    keeper.drop_entry("uid-1/lampyris-0").unwrap();
    plugin.tend().await.unwrap();
    assert_eq!(keeper.list().unwrap(), ["uid-1/lampyris-0"]);
    // Then the pod disappears without an unpublish.
    let target = stage.options("k").target;
    mount::unmount(&target).await.unwrap();
    std::fs::remove_dir_all(stage.kubelet.path().join("pods")).unwrap();
    plugin.tend().await.unwrap();
    plugin.tend().await.unwrap();
    assert_eq!(plugin.counts(), (0, 0));
    assert!(keeper.list().unwrap().is_empty());
}

use super::*;
use crate::dataset_fs::{DatasetFs, DatasetOptions, SharedDatasetFs};
use crate::metrics::Metered;
use keeper::wire::Connection;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;

/// Opens nothing, and remembers the credentials that it was given.
#[derive(Default)]
struct Refusing(Arc<Mutex<Vec<String>>>);

#[async_trait::async_trait]
impl Opener for Refusing {
    async fn open(&self, _volume: &Volume, _report: &Reporter) -> Result<Opened, Refusal> {
        Err(Refusal { reason: "InvalidCredentials".into(), message: "list".into() })
    }

    fn credentials(&self, fresh: &Credentials) {
        self.0.lock().unwrap().push(fresh.secret_access_key.clone());
    }
}

fn volume(secret: &str) -> Volume {
    let source = serde_json::json!({"s3": {"uri": "s3://b/p", "endpoint": "https://s3",
        "credentials": {"accessKeyId": "a", "secretAccessKey": secret}}});
    let volume = serde_json::json!({"name": "v", "dataset": "d", "namespace": "n", "readOnly": true,
        "format": "Files", "source": source, "generation": 1, "last": true});
    serde_json::from_value(volume).unwrap()
}

#[tokio::test]
async fn a_secret_that_changed_while_the_node_plugin_was_away_is_taken_when_it_is_back() {
    let given = Arc::new(Mutex::new(Vec::new()));
    let places = Places { private_dir: "/nonexistent".into(), threads: 1 };
    let (sidecar, _messages) = Sidecar::new(places, Box::new(Refusing(Arc::clone(&given))));
    sidecar.start(volume("old"), vec![device()]);
    sidecar.adopt(&volume("old"));
    assert_eq!(*given.lock().unwrap(), Vec::<String>::new());
    sidecar.adopt(&volume("new"));
    sidecar.adopt(&volume("new"));
    assert_eq!(*given.lock().unwrap(), ["new"]);
    let next = sidecar.config("v").unwrap();
    assert_eq!(next.source["s3"]["credentials"]["secretAccessKey"], "new");
}

fn device() -> OwnedFd {
    std::fs::File::open("/dev/null").unwrap().into()
}

fn is_init(message: &FromSidecar) -> bool {
    matches!(message, FromSidecar::Init(_))
}

/// The node plugin takes it for the one that served before.
#[tokio::test]
async fn a_successor_says_nothing_of_an_exchange_that_it_found_kept() {
    let places = Places { private_dir: "/nonexistent".into(), threads: 1 };
    let (sidecar, _messages) = Sidecar::new(places, Box::new(Refusing::default()));
    let mut found = volume("k");
    (found.recorded_init, found.recorded_reply) = (Some("cmVx".into()), Some("cmVw".into()));
    sidecar.start(found.clone(), vec![device()]);
    assert!(!sidecar.known(&found).unwrap().iter().any(is_init));
    // Not kept any more: then nobody else can say it.
    found.unkept = true;
    assert!(sidecar.known(&found).unwrap().iter().any(is_init));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_waited_for_the_node_plugin_is_said_after_the_volumes_have_come() {
    let dir = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(dir.path().join("node.sock")).unwrap();
    let places = Places { private_dir: dir.path().to_owned(), threads: 1 };
    let (sidecar, messages) = Sidecar::new(places, Box::new(Refusing::default()));
    let waits =
        keeper::handover::Status { volume: "other".into(), ok: true, reason: None, message: None };
    sidecar.outbox.try_send(FromSidecar::Status(waits.clone())).unwrap();
    let (stop, stopped) = watch::channel(false);
    let running = tokio::spawn(async move { sidecar.run(messages, stopped).await });
    let (stream, _) = listener.accept().unwrap();
    stream.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    let mut node = Connection::new(stream);
    let (hello, _) = node.receive::<FromSidecar>().unwrap().unwrap();
    assert!(matches!(hello, FromSidecar::Hello(_)), "{hello:?}");
    let early = node.receive::<FromSidecar>();
    assert!(early.as_ref().is_err_and(WireError::is_would_block), "{early:?}");
    let device = device();
    node.send(&FromNode::Volume(Box::new(volume("k"))), &[device.as_fd()]).unwrap();
    node.stream().set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let (said, _) = node.receive::<FromSidecar>().unwrap().unwrap();
    assert_eq!(said, FromSidecar::Status(waits));
    stop.send_replace(true);
    running.await.unwrap();
}

/// It has a list of them, by which no pod can say that they are something else.
#[tokio::test]
async fn the_node_plugin_knows_what_is_shown_and_passes_it_on() {
    let source = source::MemSource::new("f", &b"bytes"[..]);
    let files = DatasetFs::start(Arc::new(source), DatasetOptions::default(), Arc::new(|_| {}));
    let metrics = Metrics::default();
    let files = Metered::new(Arc::new(SharedDatasetFs(files)), "v \"quoted\\", &metrics);
    assert!(files.lookup(crate::vfs::ROOT, b"missing").await.is_err());
    let places = Places { private_dir: "/nonexistent".into(), threads: 1 };
    let (sidecar, _messages) = Sidecar::new(places, Box::new(Refusing::default()));
    let registry = registry(&metrics, Figures { sidecar, ring_connections: Arc::default() });
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
    let mut shown = 0;
    for line in text.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let family = line.split(' ').next().unwrap();
        assert!(node::exposition::is_ours(family), "{family} is missing there");
        shown += 1;
    }
    assert_eq!(shown, 8, "{text}");
    let pod = node::volume::Pod { namespace: "n".into(), name: "p".into(), uid: "u".into() };
    let mut families = node::exposition::Families::default();
    assert_eq!(families.add(&text, &pod, &node::metrics::SOCKETS[0]), 0, "{text}");
    let passed_on = families.render();
    let samples = |text: &str| text.lines().filter(|line| !line.starts_with('#')).count();
    assert_eq!(samples(&passed_on), samples(&text), "{passed_on}");
}

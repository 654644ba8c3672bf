use super::*;

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

#[test]
fn a_record_that_cannot_be_read_is_not_taken_for_a_new_mount() {
    let mut volume = volume("s");
    assert!(recorded(&volume).unwrap().is_none());
    (volume.recorded_init, volume.recorded_reply) = (Some("cmVx".into()), Some("cmVw".into()));
    let read = recorded(&volume).unwrap().unwrap();
    assert_eq!((&*read.request, &*read.reply), (&b"req"[..], &b"rep"[..]));
    volume.recorded_reply = Some("?".into());
    let refused = recorded(&volume).unwrap_err();
    assert!(refused.to_string().contains("recorded INIT"), "{refused}");
}

#[tokio::test]
async fn a_secret_that_changed_while_the_node_plugin_was_away_is_taken_when_it_is_back() {
    let given = Arc::new(Mutex::new(Vec::new()));
    let places = Places { private_dir: "/nonexistent".into(), threads: 1 };
    let (sidecar, _messages) = Sidecar::new(places, Box::new(Refusing(Arc::clone(&given))));
    let device = std::fs::File::open("/dev/null").unwrap();
    sidecar.start(volume("old"), vec![device.into()]);
    sidecar.adopt(&volume("old"));
    assert_eq!(*given.lock().unwrap(), Vec::<String>::new());
    sidecar.adopt(&volume("new"));
    sidecar.adopt(&volume("new"));
    assert_eq!(*given.lock().unwrap(), ["new"]);
    let next = sidecar.config("v").unwrap();
    assert_eq!(next.source["s3"]["credentials"]["secretAccessKey"], "new");
}

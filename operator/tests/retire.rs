//! `operator retire` as a process: what it does while the operator still leads, and when it is
//! asked to stop.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// A signal has been answered, and a Lease taken, within this, whatever else the machine does.
const PATIENCE: Duration = Duration::from_secs(20);
const FINALIZER: &str = "lampyris.dev/dataset";

/// A process that believes in the API server at `listener`.
struct Retire {
    child: Child,
    folder: PathBuf,
}

impl Retire {
    fn start(name: &str, listener: &TcpListener) -> Self {
        let folder =
            std::env::temp_dir().join(format!("lampyris-retire-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let config = folder.join("config");
        let server = format!("http://{}", listener.local_addr().unwrap());
        let text = format!(
            r#"{{"apiVersion": "v1", "kind": "Config", "current-context": "c",
                "clusters": [{{"name": "c", "cluster": {{"server": "{server}"}}}}],
                "users": [{{"name": "u", "user": {{}}}}],
                "contexts": [{{"name": "c", "context": {{"cluster": "c", "user": "u"}}}}]}}"#
        );
        std::fs::write(&config, text).unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_operator"))
            .args(["retire", "--system-namespace=s", "--deployment=d"])
            .env("KUBECONFIG", &config)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Self { child, folder }
    }

    /// Waits for its end; its status and all that it said.
    fn end(mut self, what: &str) -> (ExitStatus, String) {
        let begin = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            if begin.elapsed() > PATIENCE {
                self.child.kill().unwrap();
                panic!("it goes on {PATIENCE:?} after {what}");
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        let mut said = String::new();
        self.child.stdout.take().unwrap().read_to_string(&mut said).unwrap();
        self.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        std::fs::remove_dir_all(&self.folder).unwrap();
        (status, said)
    }
}

#[test]
fn a_retire_that_is_told_to_stop_ends_at_once_and_says_what_is_left() {
    // An API server that takes the request and never answers.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let retire = Retire::start("stopped", &listener);
    // It works from here on.
    let (mut request, _) = listener.accept().unwrap();
    assert!(request.read(&mut [0; 16]).unwrap() > 0);
    let pid = retire.child.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    let (status, said) = retire.end("SIGTERM");
    assert_eq!(status.signal(), None, "it handles the signal itself");
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(said.contains("asked to stop before every Dataset was released"), "{said}");
    assert!(said.contains(FINALIZER), "{said}");
}

/// An API server with a Dataset in use and an operator that was told to end, but leads on for a
/// while: until then it puts the finalizer back whenever it is gone.
struct Cluster {
    version: u64,
    /// Who has the Lease.
    holder: String,
    /// Looks at the Lease until the operator gives it back.
    looks: u32,
    /// Writes of the operator that arrive after it has given back the Lease.
    late: u32,
    finalizers: Value,
}

impl Cluster {
    fn metadata(&self, name: &str, namespace: &str) -> Value {
        json!({"name": name, "namespace": namespace, "resourceVersion": self.version.to_string()})
    }

    fn lease(&self) -> Value {
        json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
            "metadata": self.metadata("lampyris-operator", "s"),
            "spec": {"holderIdentity": self.holder, "leaseDurationSeconds": 15}})
    }

    fn dataset(&self) -> Value {
        let mut metadata = self.metadata("flights", "team");
        metadata["finalizers"] = self.finalizers.clone();
        json!({"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata", "metadata": metadata})
    }

    fn answer(&mut self, method: &str, path: &str, body: &Value) -> Value {
        let path = path.split('?').next().unwrap();
        let (_, last) = path.rsplit_once('/').unwrap();
        self.version += 1;
        match (method, last) {
            ("PATCH", "scale") => json!({"apiVersion": "autoscaling/v1", "kind": "Scale",
                "metadata": self.metadata("d", "s"), "spec": {"replicas": 0}}),
            // Its pods are about to end: they are not counted any more.
            ("GET", "d") => json!({"apiVersion": "apps/v1", "kind": "Deployment",
                "metadata": self.metadata("d", "s"), "status": {}}),
            ("GET", "lampyris-operator") => {
                self.looks = self.looks.saturating_sub(1);
                if self.looks == 0 && self.holder == "operator-a" {
                    self.holder.clear();
                }
                self.lease()
            }
            ("PUT", "lampyris-operator") => {
                self.holder = body["spec"]["holderIdentity"].as_str().unwrap().to_owned();
                self.lease()
            }
            ("GET", "datasets") => json!({"apiVersion": "meta.k8s.io/v1",
                "kind": "PartialObjectMetadataList", "metadata": {}, "items": [self.dataset()]}),
            ("GET", "flights") => self.dataset(),
            ("PATCH", "flights") => {
                self.finalizers = body["metadata"]["finalizers"].clone();
                let answer = self.dataset();
                let leads = self.holder == "operator-a";
                if leads || self.late > 0 {
                    self.late -= u32::from(!leads);
                    self.finalizers = json!([FINALIZER]);
                }
                answer
            }
            other => panic!("{other:?}: {path}"),
        }
    }
}

/// Answers the requests of one connection.
fn serve(stream: TcpStream, cluster: &Mutex<Cluster>) -> std::io::Result<()> {
    let (mut reader, mut writer) = (BufReader::new(stream.try_clone()?), stream);
    loop {
        let (mut head, mut length) = (Vec::new(), 0);
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line)? == 0 {
                return Ok(());
            }
            let line = line.trim_end().to_ascii_lowercase();
            if let Some(value) = line.strip_prefix("content-length:") {
                length = value.trim().parse().unwrap();
            }
            if line.is_empty() {
                break;
            }
            head.push(line);
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body)?;
        let mut words = head[0].split(' ');
        let (method, path) = (words.next().unwrap().to_uppercase(), words.next().unwrap());
        let body = serde_json::from_slice(&body).unwrap_or_default();
        let answer = cluster.lock().unwrap().answer(&method, path, &body).to_string();
        let length = answer.len();
        let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: ";
        writer.write_all(format!("{head}{length}\r\n\r\n{answer}").as_bytes())?;
    }
}

#[test]
fn nothing_is_released_before_the_operator_has_handed_on_its_lease() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let cluster = Arc::new(Mutex::new(Cluster {
        version: 1,
        holder: "operator-a".to_owned(),
        looks: 2,
        late: 1,
        finalizers: json!([FINALIZER]),
    }));
    let retire = Retire::start("waits", &listener);
    let served = Arc::clone(&cluster);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let served = Arc::clone(&served);
            std::thread::spawn(move || serve(stream.unwrap(), &served));
        }
    });
    let (status, said) = retire.end("its start");
    assert_eq!(status.code(), Some(0), "{said}");
    let cluster = cluster.lock().unwrap();
    assert_eq!(cluster.finalizers, json!([]), "the operator put it back: {said}");
    // Kept, so that no other pod of the operator leads.
    assert_eq!(cluster.holder, "lampyris-retire");
}

//! `scan-agent serve` over both kinds of source, told to it as the node plugin does: the rows of real files on a
//! real S3 server, and of their copies in real storage servers.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod cluster;
#[path = "../source/tests/s3_server/mod.rs"]
mod s3_server;

use std::io::Write;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use client::Client;
use cluster::Cluster;
use ring::fd::{LineReader, send_line};
use s3_server::process::Process;
use serde_json::{Value, json};
use source::SourceConfig;

fn agent() -> Command {
    Command::new(env!("CARGO_BIN_EXE_scan-agent"))
}

/// The agent with its sockets and its log in `dir`.
fn serve(dir: &Path, more: &[&str]) -> Process {
    let mut command = agent();
    command.arg("serve").arg("--private-dir").arg(dir).arg("--app-dir").arg(dir).args(more);
    Process::start("scan-agent", command, dir)
}

/// A data set of a few files; its digests.
fn make_data(folder: &Path) -> Value {
    let args = ["make-data", "--bytes", "4000000", "--files", "2", "--out"];
    let made = agent().args(args).arg(folder).stdout(Stdio::null()).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    serde_json::from_slice(&std::fs::read(folder.join("digests.json")).unwrap()).unwrap()
}

fn connect(socket: &Path) -> UnixStream {
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        match UnixStream::connect(socket) {
            Ok(stream) => return stream,
            Err(error) => assert!(Instant::now() < until, "{}: {error}", socket.display()),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Scans two columns to the end: what `done` or `error` said.
fn scan(socket: &Path, dataset: &str, filter: Option<&str>) -> Value {
    let columns = json!(["id", "city"]);
    Scan::open(socket, &json!({"dataset": dataset, "columns": columns, "where": filter})).end()
}

/// A scan, seen from the client.
struct Scan {
    stream: UnixStream,
    reader: LineReader,
}

impl Scan {
    fn open(socket: &Path, what: &Value) -> Self {
        let stream = connect(socket);
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut open = json!({"version": 1, "batchRows": 500, "slabBytes": 1 << 20});
        open.as_object_mut().unwrap().extend(what.as_object().unwrap().clone());
        // An agent that takes nobody may have said so and closed already.
        let _ = send_line(&stream, &json!({ "open": open }).to_string(), &[]);
        Self { stream, reader: LineReader::new() }
    }

    fn hear(&mut self) -> Value {
        let line = self.reader.recv_line(&self.stream).unwrap().expect("the agent went away");
        serde_json::from_slice(&line.bytes).unwrap()
    }

    /// Takes every row: what `done` or `error` said.
    fn end(mut self) -> Value {
        let mut rows = 0;
        loop {
            let reply = self.hear();
            if let Some(batch) = reply.get("batch") {
                rows += batch["rows"].as_u64().unwrap();
                // Refused when this was the last batch: the agent has said all and does not listen any more.
                let release = json!({"release": {"id": batch["id"]}}).to_string();
                let _ = send_line(&self.stream, &release, &[]);
            } else if let Some(done) = reply.get("done") {
                assert_eq!(done["rows"], rows);
                return reply;
            } else if reply.get("error").is_some() {
                return reply;
            }
        }
    }
}

fn ends(agent: &mut Process) -> ExitStatus {
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        if let Some(status) = agent.child().try_wait().unwrap() {
            return status;
        }
        assert!(Instant::now() < until, "the agent does not end");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// An agent with a scan whose rows do not fit into its ring, that is asked to end and refuses new scans.
fn draining(dir: &Path) -> (Process, Scan, Value) {
    let folder = dir.join("data");
    let digests = make_data(&folder);
    let dataset = format!("made={}", folder.display());
    let mut agent = serve(dir, &["--dataset", &dataset, "--drain-seconds", "600"]);
    let (socket, made) = (dir.join("scan.sock"), json!({"dataset": "made"}));
    let mut running = Scan::open(&socket, &made);
    assert_eq!(running.hear()["opened"]["files"], 2);
    terminate(&mut agent);
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        let reply = Scan::open(&socket, &made).hear();
        if reply["error"]["reason"] == "Stopping" {
            return (agent, running, digests);
        }
        assert!(Instant::now() < until, "the agent takes new scans: {reply}");
    }
}

fn terminate(agent: &mut Process) {
    let pid = rustix::process::Pid::from_child(agent.child());
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
}

#[test]
fn an_agent_that_is_asked_to_end_lets_a_scan_end_first() {
    let dir = tempfile::tempdir().unwrap();
    let (mut agent, running, digests) = draining(dir.path());
    assert_eq!(running.end()["done"]["rows"], digests["rows"]);
    let status = ends(&mut agent);
    assert!(status.success(), "{status}");
}

#[test]
fn an_agent_that_is_asked_twice_ends_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let (mut agent, _running, _) = draining(dir.path());
    terminate(&mut agent);
    let status = ends(&mut agent);
    assert!(status.success(), "{status}");
    assert!(agent.said().contains("scans are cut"), "{}", agent.said());
}

async fn copy(client: &Client, folder: &Path, into: &str) {
    client.mkdir_all(into).await.unwrap();
    for name in ["part-00000.vortex", "part-00001.vortex"] {
        let bytes = std::fs::read(folder.join(name)).unwrap();
        let inode = client.create_path(&format!("{into}/{name}")).await.unwrap().inode;
        client.write_at(inode, 0, bytes.into()).await.unwrap();
        client.flush(inode).await.unwrap();
        client.release(inode).await;
    }
}

fn volume(name: &str, source: &Value, last: bool) -> String {
    let volume = json!({"name": format!("lampyris-{name}"), "dataset": name, "namespace": "ml",
        "mountPath": format!("/data/{name}"), "format": "Vortex", "source": source, "last": last});
    format!("{}\n", json!({ "volume": volume }))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_of_s3_and_of_the_store_are_scanned_and_filters_skip_bytes() {
    let Some(s3) = s3_server::server() else { return };
    let cluster = Cluster::start();
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("data");
    let digests = make_data(&folder);
    for name in ["part-00000.vortex", "part-00001.vortex"] {
        s3.put(&format!("set/{name}"), std::fs::read(folder.join(name)).unwrap()).await;
    }
    copy(&cluster.client().await, &folder, "/datasets/set").await;
    let on_s3 = serde_json::to_value(SourceConfig::S3(s3.config("s3://train/set"))).unwrap();
    let missing = serde_json::to_value(SourceConfig::S3(s3.config("s3://no-bucket/x"))).unwrap();
    let in_store = json!({"cluster": {"manager": cluster.manager, "path": "/datasets/set"}});

    let plugin = UnixListener::bind(dir.path().join("node.sock")).unwrap();
    let _agent = serve(dir.path(), &[]);
    let (mut plugin, _) = plugin.accept().unwrap();
    let said = [
        volume("s3", &on_s3, false),
        volume("missing", &missing, false),
        volume("store", &in_store, true),
    ];
    plugin.write_all(said.concat().as_bytes()).unwrap();
    plugin.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let mut heard = LineReader::new();
    let mut hear = || String::from_utf8(heard.recv_line(&plugin).unwrap().unwrap().bytes).unwrap();
    assert!(hear().contains(r#""role":"scan""#));
    let told = hear();
    assert!(told.contains("lampyris-missing") && told.contains("BucketNotFound"), "{told}");

    let socket = dir.path().join("scan.sock");
    for name in ["s3", "store"] {
        let all = scan(&socket, name, None);
        assert_eq!(all["done"]["rows"], digests["rows"], "{name}: {all}");
        // Again, because the first scan read the footers too.
        let all = scan(&socket, name, None);
        let few = scan(&socket, name, Some("id < 100"));
        assert_eq!(few["done"]["rows"], 100, "{name}: {few}");
        let bytes = |reply: &Value| reply["done"]["bytesFetched"].as_u64().unwrap();
        let file_bytes = all["done"]["fileBytes"].as_u64().unwrap();
        // Two narrow columns of rows that are mostly image.
        assert!(0 < bytes(&few) && bytes(&few) < bytes(&all), "{name}: {few} {all}");
        assert!(bytes(&all) * 4 < file_bytes, "{name}: {all}");
    }
    assert_eq!(scan(&socket, "missing", None)["error"]["reason"], "BucketNotFound");
    assert_eq!(scan(&socket, "/data/store", None)["done"]["rows"], digests["rows"]);
}

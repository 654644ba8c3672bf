//! The real process over real TCP: what survives when it is killed, and what it answers.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use bytes::Bytes;
use chain::id::{ChainId, ChainVersion, ClientId, InodeId, NodeId, RoutingVersion};
use rpc::conn::Connection;
use rpc::message::Request;
use rpc::message::manager::{GetRouting, Heartbeat, LocalState, Routing, TargetReport};
use rpc::message::meta::*;
use rpc::{Code, Error};
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, watch};

const DEADLINE: Duration = Duration::from_secs(60);
const TABLE: &str = r#"{"tableId":1,"revision":1,"chunkSizeBytes":1048576,"chains":[{"chainId":1,
    "targets":[{"targetId":100010101,"nodeId":10001,"disk":0}]}]}"#;

struct Process {
    child: Child,
    listen: String,
    admin: String,
}

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

impl Process {
    fn start(data: &Path) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_meta"))
            .args([
                "serve",
                "--cluster",
                "test",
                "--listen",
                "127.0.0.1:0",
                "--admin",
                "127.0.0.1:0",
            ])
            .arg("--data")
            .arg(data)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut seen = String::new();
        let fields = loop {
            let line = lines.next().unwrap_or_else(|| panic!("ended early:\n{seen}")).unwrap();
            let record: serde_json::Value = serde_json::from_str(&line).unwrap_or_default();
            if record["fields"]["message"] == "serving" {
                break record["fields"].clone();
            }
            seen += &line;
        };
        // The rest is read so that the process never waits for its log.
        std::thread::spawn(move || lines.for_each(drop));
        let field = |name: &str| fields[name].as_str().unwrap().to_owned();
        Self { child, listen: field("listen"), admin: field("admin") }
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn terminate(&mut self) -> ExitStatus {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        self.child.wait().unwrap()
    }

    /// Status and body.
    fn http(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.admin).unwrap();
        let length = body.len();
        write!(stream, "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }

    async fn call<R: Request>(&self, request: &R) -> Result<R::Response, Error> {
        let connection = Connection::connect(&self.listen).await?;
        Ok(connection.call(request, Bytes::new(), DEADLINE).await?.0)
    }
}

fn fsck(data: &Path) -> ExitStatus {
    Command::new(env!("CARGO_BIN_EXE_meta"))
        .args(["fsck", "--data"])
        .arg(data)
        .stderr(Stdio::inherit())
        .status()
        .unwrap()
}

/// A client that asks again, under the same number, until it is answered.
#[derive(Clone)]
struct Client {
    address: watch::Receiver<String>,
    id: ClientId,
    next: Arc<AtomicU64>,
    repeats: Arc<AtomicU64>,
    /// Gains a permit for each request that was answered.
    answered: Arc<Semaphore>,
}

impl Client {
    fn caller(&self) -> Caller {
        let request = self.next.fetch_add(1, Ordering::Relaxed);
        Caller { client: self.id, request, uid: 0, gid: 0 }
    }

    async fn run<R: Request>(&self, request: &R) -> Result<R::Response, Error> {
        let end = Instant::now() + DEADLINE;
        loop {
            let address = self.address.borrow().clone();
            let attempt = async {
                let connection = Connection::connect(&address).await?;
                Ok(connection.call(request, Bytes::new(), Duration::from_secs(5)).await?.0)
            };
            match attempt.await {
                Err(Error { code: Code::Unreachable | Code::Timeout | Code::Draining, .. }) => {
                    assert!(Instant::now() < end, "nobody answers");
                    self.repeats.fetch_add(1, Ordering::Relaxed);
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                result => {
                    self.answered.add_permits(1);
                    return result;
                }
            }
        }
    }

    /// Creates, renames and removes in a directory of its own; the names that must be there.
    async fn work(self, dir: InodeId, rounds: u64) -> BTreeSet<Bytes> {
        let mut names = BTreeSet::new();
        for i in 0..rounds {
            let (name, new_name) = (Bytes::from(format!("a{i}")), Bytes::from(format!("b{i}")));
            let caller = self.caller();
            let create =
                Create { caller, parent: dir, name: name.clone(), mode: 0o600, exclusive: true };
            let made = self.run(&create).await.unwrap();
            let report = ReportLength {
                caller: self.caller(),
                inode: made.attributes.inode,
                session: made.session,
                length: i,
                truncate_generation: 0,
                modified_ns: 1,
                close: true,
            };
            assert_eq!(self.run(&report).await.unwrap().length, i);
            let (caller, no_replace) = (self.caller(), true);
            let (parent, new_parent) = (dir, dir);
            let rename =
                Rename { caller, parent, name, new_parent, new_name: new_name.clone(), no_replace };
            self.run(&rename).await.unwrap();
            if i % 3 == 0 {
                let caller = self.caller();
                let remove = Remove { caller, parent: dir, name: new_name, directory: false };
                self.run(&remove).await.unwrap();
            } else {
                names.insert(new_name);
            }
        }
        names
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_process_loses_no_answer_and_does_nothing_twice() {
    let data = tempfile::tempdir().unwrap();
    let mut process = Process::start(data.path());
    assert_eq!(process.http("PUT", "/v1/table", TABLE).0, 200);
    let (address, receive) = watch::channel(process.listen.clone());
    let (mut tasks, repeats) = (tokio::task::JoinSet::new(), Arc::new(AtomicU64::new(0)));
    let answered = Arc::new(Semaphore::new(0));
    for id in 1..=6u32 {
        let next = Arc::new(AtomicU64::new(1));
        let (id, repeats) = (ClientId::new(id.into()), Arc::clone(&repeats));
        let (address, answered) = (receive.clone(), Arc::clone(&answered));
        let client = Client { address, id, next, repeats, answered };
        let name = Bytes::from(format!("d{}", id.get()));
        let make = MakeDirectory { caller: client.caller(), parent: ROOT, name, mode: 0o700 };
        let dir = client.run(&make).await.unwrap().inode;
        tasks.spawn(async move { (dir, client.clone().work(dir, 120).await, client) });
    }
    // Of 2400 requests of the clients the last third is left for after the last kill.
    for _ in 0..4 {
        let load = tokio::time::timeout(DEADLINE, answered.acquire_many(400));
        load.await.expect("too few requests were answered").unwrap().forget();
        process.kill();
        process = Process::start(data.path());
        address.send_replace(process.listen.clone());
    }
    for (dir, names, client) in tasks.join_all().await {
        let page = client.run(&ReadDirectory { inode: dir, cookie: 0, limit: 1024 }).await.unwrap();
        let found: BTreeSet<Bytes> = page.entries.into_iter().map(|e| e.name).collect();
        assert_eq!(found, names);
    }
    assert!(repeats.load(Ordering::Relaxed) > 0, "no request met a dead process");
    assert!(process.terminate().success());
    assert!(fsck(data.path()).success());
}

fn heartbeat(chain_version: ChainVersion) -> Heartbeat {
    let node = NodeId::new(10_001);
    let (target, chain) = (node.target(0, 0), ChainId::new(1));
    let report =
        TargetReport { target, chain, chain_version, state: LocalState::Online, used_bytes: 1 };
    Heartbeat {
        cluster: "test".into(),
        node,
        incarnation: 1,
        address: "127.0.0.1:9".into(),
        targets: vec![report],
        capacity_bytes: 100,
        used_bytes: 1,
        routing: RoutingVersion::default(),
    }
}

#[tokio::test]
async fn the_manager_brings_a_chain_up_and_remembers_it() {
    let data = tempfile::tempdir().unwrap();
    let mut process = Process::start(data.path());
    let first = process.call(&heartbeat(ChainVersion::NONE)).await.unwrap();
    assert_eq!((first.lease_ms, first.targets.len()), (6000, 0));
    assert_eq!(process.http("PUT", "/v1/table", TABLE), (200, "{}".into()));
    assert_eq!(process.http("PUT", "/v1/table", TABLE).0, 200);
    let changed = TABLE.replace("\"disk\":0", "\"disk\":1");
    assert_eq!(process.http("PUT", "/v1/table", &changed).0, 400);
    let conflicting = TABLE.replace("1048576", "2097152");
    let (status, body) = process.http("PUT", "/v1/table", &conflicting);
    assert_eq!((status, body.contains("revision 1 differs")), (409, true), "{body}");
    let told = process.call(&heartbeat(ChainVersion::NONE)).await.unwrap();
    assert_eq!(told.targets.len(), 1);
    let known = told.routing.unwrap();
    assert_eq!((known.chains[0].version, known.chains[0].head()), (ChainVersion::NEWBORN, None));
    // A client waits for the change; the server has stored the chain's version meanwhile.
    let wait = GetRouting { known: known.version, wait_ms: 30_000 };
    let stored = heartbeat(ChainVersion::NEWBORN);
    let (routing, served) = tokio::join!(process.call(&wait), process.call(&stored));
    let (routing, served): (Routing, Routing) =
        (routing.unwrap().routing.unwrap(), served.unwrap().routing.unwrap());
    assert_eq!(routing, served);
    assert_eq!(routing.chains[0].head(), Some(NodeId::new(10_001).target(0, 0)));
    let status: serde_json::Value =
        serde_json::from_str(&process.http("GET", "/v1/status", "").1).unwrap();
    assert_eq!((&status["ready"], &status["chains"]["serving"]), (&true.into(), &1.into()));
    process.kill();
    let process = Process::start(data.path());
    let unchanged = GetRouting { known: routing.version, wait_ms: 0 };
    assert_eq!(process.call(&unchanged).await.unwrap().routing, None);
    let again = GetRouting { known: RoutingVersion::default(), wait_ms: 0 };
    assert_eq!(process.call(&again).await.unwrap().routing, Some(routing));
}

#[tokio::test]
async fn the_admin_endpoint_answers_and_the_process_drains() {
    let data = tempfile::tempdir().unwrap();
    let mut process = Process::start(data.path());
    assert_eq!(process.http("GET", "/healthz", "").0, 200);
    assert_eq!(process.http("GET", "/readyz", "").0, 200);
    let missing = process.call(&Lookup { parent: ROOT, name: Bytes::from_static(b"x") }).await;
    assert_eq!(missing.unwrap_err().code, Code::NotFound);
    let metrics = process.http("GET", "/metrics", "").1;
    let counted = r#"lampyris_meta_requests_total{kind="0x0301",outcome="NotFound"} 1"#;
    assert!(metrics.contains(counted), "{metrics}");
    assert!(metrics.contains("lampyris_chains 0"), "{metrics}");
    let state: serde_json::Value =
        serde_json::from_str(&process.http("GET", "/state", "").1).unwrap();
    assert_eq!((&state["store"], &state["chains"]), (&"embedded".into(), &0.into()));
    assert!(process.http("PUT", "/v1/table", "{").1.contains("chain table:"));
    assert_eq!(process.http("GET", "/v1/other", "").0, 404);
    assert!(process.terminate().success());
}

#[test]
fn fsck_says_what_it_needs() {
    let empty = tempfile::tempdir().unwrap();
    assert!(!fsck(empty.path()).success());
    assert_eq!(std::fs::read_dir(empty.path()).unwrap().count(), 0, "it made nothing");
}

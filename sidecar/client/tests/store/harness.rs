//! Real processes that are killed, stopped and started again, and clients that check every byte meanwhile.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use chain::id::{ChainVersion, ChunkId, InodeId, RoutingVersion, TargetId};
use chain::table::Chain;
use client::{Client, ClientOptions, Error};
use rpc::conn::Pool;
use rpc::message::manager::{GetRouting, Routing};
use rpc::message::storage::{FileChunks, QueryFile, Read as ReadChunk};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::watch;
use tokio::task::JoinHandle;

pub(crate) const MIB: u64 = 1 << 20;
/// For whatever has to happen at some time.
const PATIENCE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(50);
/// Chains, each over all three servers.
const CHAINS: u64 = 3;
const REPLICAS: usize = 3;

fn binary(name: &str) -> PathBuf {
    let here = std::env::current_exe().unwrap();
    let built = here.parent().and_then(|deps| deps.parent()).unwrap().to_owned();
    let directory = std::env::var_os("LAMPYRIS_BIN_DIR").map_or(built, PathBuf::from);
    let path = directory.join(name);
    assert!(path.exists(), "{} is missing: build meta and storage-node first", path.display());
    path
}

/// A port that stays this test's: below those that the kernel hands out, so that a server finds it free again.
fn own_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    loop {
        let nth = NEXT.fetch_add(1, Ordering::Relaxed);
        let base = 12_000 + u16::try_from(std::process::id() % 200).unwrap() * 100;
        if TcpListener::bind(("127.0.0.1", base + nth)).is_ok() {
            return base + nth;
        }
    }
}

/// A process that dies with the test.
struct Process(Child);

impl Process {
    fn start(name: &str, args: &[String]) -> Self {
        let mut command = Command::new(binary(name));
        command.args(args).stdout(Stdio::null()).stderr(Stdio::null());
        Self(command.spawn().unwrap())
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.0);
        rustix::process::kill_process(pid, signal).unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A proxy that can hold back the answers: requests arrive, and who asked does not know it.
pub(crate) struct Gate {
    address: String,
    open: watch::Sender<bool>,
    accepting: JoinHandle<()>,
}

impl Gate {
    async fn open_to(server: &str) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (open, opened) = watch::channel(true);
        let server = server.to_owned();
        let accepting = tokio::spawn(async move {
            loop {
                let (client, _) = listener.accept().await.unwrap();
                let server = tokio::net::TcpStream::connect(&server).await.unwrap();
                let ((mut from_client, to_client), (from_server, mut to_server)) =
                    (client.into_split(), server.into_split());
                tokio::spawn(
                    async move { tokio::io::copy(&mut from_client, &mut to_server).await },
                );
                tokio::spawn(pass(from_server, to_client, opened.clone()));
            }
        });
        Self { address, open, accepting }
    }

    pub(crate) fn set_open(&self, open: bool) {
        self.open.send_replace(open);
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

/// Passes bytes on while the gate is open. An end that is gone ends it.
async fn pass(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut opened: watch::Receiver<bool>) {
    let mut bytes = vec![0; 64 << 10];
    while let Ok(count @ 1..) = from.read(&mut bytes).await {
        let open = opened.wait_for(|open| *open).await.is_ok();
        if !open || to.write_all(&bytes[..count]).await.is_err() {
            return;
        }
    }
}

/// The four processes of a cluster, by name `meta`, `10001`, `10002`, `10003`.
pub(crate) struct Cluster {
    manager: String,
    admin: String,
    processes: Mutex<Vec<(String, Option<Process>)>>,
    pool: Pool,
    directory: tempfile::TempDir,
}

/// All of a cluster's processes.
pub(crate) const ALL: [&str; 4] = ["meta", "10001", "10002", "10003"];

fn table() -> String {
    let chain = |chain: u64| {
        let targets: Vec<String> = (10_001..=10_003u64)
            .map(|node| {
                let target = node * 10_000 + 100 + chain;
                format!(r#"{{"targetId":{target},"nodeId":{node},"disk":0}}"#)
            })
            .collect();
        format!(r#"{{"chainId":{chain},"targets":[{}]}}"#, targets.join(","))
    };
    let chains: Vec<String> = (1..=CHAINS).map(chain).collect();
    let chains = chains.join(",");
    let head = r#""tableId":1,"revision":1,"stripeSize":0,"chunkSizeBytes":1048576"#;
    format!("{{{head},\"chains\":[{chains}]}}")
}

impl Cluster {
    /// Starts everything and waits until every chain serves with three replicas.
    pub(crate) async fn start() -> Self {
        let address = || format!("127.0.0.1:{}", own_port());
        let cluster = Self {
            manager: address(),
            admin: address(),
            processes: Mutex::new(ALL.map(|name| (name.to_owned(), None)).into()),
            pool: Pool::new(),
            directory: tempfile::tempdir().unwrap(),
        };
        ALL.iter().for_each(|name| cluster.start_again(name));
        let body = table();
        let length = body.len();
        let put = format!(
            "PUT /v1/table HTTP/1.1\r\nHost: m\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
        );
        let declared = || cluster.http(&put).is_ok_and(|answer| answer.starts_with("HTTP/1.1 2"));
        until("declare the table", async || declared()).await;
        cluster.wait_serving(REPLICAS).await;
        cluster
    }

    fn http(&self, request: &str) -> std::io::Result<String> {
        let mut stream = TcpStream::connect(&self.admin)?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        stream.write_all(request.as_bytes())?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    }

    fn args(&self, name: &str) -> Vec<String> {
        let directory = self.directory.path().join(name);
        std::fs::create_dir_all(&directory).unwrap();
        let data = directory.display().to_string();
        let any = || "127.0.0.1:0".to_owned();
        let own = |flags: &[(&str, String)]| {
            flags.iter().flat_map(|(flag, value)| [format!("--{flag}"), value.clone()]).collect()
        };
        let flags: Vec<String> = if name == "meta" {
            let (listen, admin) = (self.manager.clone(), self.admin.clone());
            own(&[("listen", listen), ("admin", admin), ("grace-seconds", "1".into())])
        } else {
            let (id, manager) = (name.to_owned(), self.manager.clone());
            let listen = ("listen", any());
            own(&[
                ("node-id", id),
                ("manager", manager),
                listen,
                ("advertise", any()),
                ("admin", any()),
            ])
        };
        let common = ["serve", "--cluster", "test", "--data", &data];
        common.map(str::to_owned).into_iter().chain(flags).collect()
    }

    fn with<R>(&self, name: &str, act: impl FnOnce(&mut Option<Process>) -> R) -> R {
        let mut processes = self.processes.lock().unwrap();
        act(&mut processes.iter_mut().find(|(known, _)| known == name).unwrap().1)
    }

    /// `kill -9`.
    pub(crate) fn kill(&self, name: &str) {
        self.with(name, |process| drop(process.take().unwrap()));
    }

    pub(crate) fn start_again(&self, name: &str) {
        let started =
            Process::start(if name == "meta" { name } else { "storage-node" }, &self.args(name));
        self.with(name, |process| *process = Some(started));
    }

    /// The process is there and does nothing.
    pub(crate) fn freeze(&self, name: &str) {
        self.with(name, |process| process.as_ref().unwrap().signal(rustix::process::Signal::STOP));
    }

    pub(crate) fn thaw(&self, name: &str) {
        self.with(name, |process| process.as_ref().unwrap().signal(rustix::process::Signal::CONT));
    }

    pub(crate) async fn client(&self) -> Client {
        self.client_with(|_| {}).await
    }

    pub(crate) async fn client_with(&self, change: impl FnOnce(&mut ClientOptions)) -> Client {
        let mut options = ClientOptions::new(&self.manager);
        change(&mut options);
        Client::connect(options).await.unwrap()
    }

    /// A client that hears from the metadata process only through a gate.
    pub(crate) async fn client_behind_gate(&self) -> (Client, Gate) {
        let gate = Gate::open_to(&self.manager).await;
        (Client::connect(ClientOptions::new(&gate.address)).await.unwrap(), gate)
    }

    pub(crate) async fn routing(&self) -> Option<Routing> {
        let request = GetRouting { known: RoutingVersion::new(0), wait_ms: 0 };
        let answer = self.pool.call(&self.manager, &request, Bytes::new(), POLL * 20).await;
        answer.ok()?.0.routing
    }

    /// Waits until every chain has exactly `count` serving targets.
    pub(crate) async fn wait_serving(&self, count: usize) {
        let all = |routing: &Routing| {
            let whole = |chain: &Chain| chain.serving().count() == count;
            routing.chains.len() as u64 == CHAINS && routing.chains.iter().all(whole)
        };
        let what = format!("{count} serving targets in each chain");
        until(&what, async || self.routing().await.is_some_and(|routing| all(&routing))).await;
    }

    /// What every target of a file's chains holds of it: chunks by target, chain by chain. Refused while something of it
    /// is pending.
    pub(crate) async fn chunks_of(&self, file: InodeId) -> Result<Vec<Copies>, Error> {
        let routing = self.routing().await.unwrap();
        let mut all = Vec::new();
        for chain in &routing.chains {
            let mut copies = Vec::new();
            for target in chain.serving() {
                let (chain, chain_version) = (chain.id, chain.version);
                let query =
                    QueryFile { chain, chain_version, target, file, from_index: 0, limit: 4096 };
                let address = address_of(&routing, target);
                let answer = self.pool.call(address, &query, Bytes::new(), PATIENCE).await;
                copies.push((target, answer?.0));
            }
            all.push(copies);
        }
        Ok(all)
    }

    /// Every replica of every chunk of the file has the same bytes. Answers the number of chunks.
    pub(crate) async fn assert_equal_copies(&self, file: InodeId) -> usize {
        let routing = self.routing().await.unwrap();
        let mut count = 0;
        for (chain, copies) in routing.chains.iter().zip(self.chunks_of(file).await.unwrap()) {
            assert_eq!(copies.len(), REPLICAS);
            for chunk in &copies[0].1.chunks {
                let mut seen = Vec::new();
                for (target, _) in &copies {
                    seen.push(self.read_copy(&routing, chain, *target, file, chunk.index).await);
                }
                assert!(seen.windows(2).all(|pair| pair[0] == pair[1]), "{file} {}", chunk.index);
                assert_eq!(seen[0].len(), chunk.length as usize);
                count += 1;
            }
            assert!(copies.windows(2).all(|pair| pair[0].1 == pair[1].1), "{copies:?}");
        }
        count
    }

    async fn read_copy(
        &self,
        routing: &Routing,
        chain: &Chain,
        target: TargetId,
        file: InodeId,
        index: u64,
    ) -> Bytes {
        let chain_version: ChainVersion = chain.version;
        let chunk = ChunkId { file, index };
        let (offset, length, relaxed) = (0, 1 << 20, false);
        let read =
            ReadChunk { chain: chain.id, chain_version, target, chunk, offset, length, relaxed };
        let address = address_of(routing, target);
        self.pool.call(address, &read, Bytes::new(), PATIENCE).await.unwrap().1
    }

    /// Bytes that storage server `node` says it has in use.
    pub(crate) fn used_bytes(&self, node: u64) -> u64 {
        let get = "GET /v1/status HTTP/1.1\r\nHost: m\r\nConnection: close\r\n\r\n";
        let answer = self.http(get).unwrap();
        let body = answer.split_once("\r\n\r\n").unwrap().1;
        let status: serde_json::Value = serde_json::from_str(body).unwrap();
        let nodes = status["nodes"].as_array().unwrap();
        let found = nodes.iter().find(|known| known["nodeId"] == node).unwrap();
        found["usedBytes"].as_u64().unwrap()
    }
}

/// What the targets of one chain hold of a file.
type Copies = Vec<(TargetId, FileChunks)>;

fn address_of(routing: &Routing, target: TargetId) -> &str {
    let known = routing.nodes.iter().find(|known| known.node == target.node());
    known.unwrap().address.as_str()
}

/// Waits until `holds` does.
pub(crate) async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds().await {
        assert!(Instant::now() < deadline, "never: {what}");
        tokio::time::sleep(POLL).await;
    }
}

pub(crate) fn pattern(seed: u64, length: u64) -> Bytes {
    (0..length).map(|at| (at.wrapping_mul(seed | 1) >> 7) as u8).collect()
}

pub(crate) async fn write_file(client: &Client, path: &str, bytes: &Bytes) {
    let inode = client.create_path(path).await.unwrap().inode;
    let step = 300_000;
    for (at, piece) in (0u64..).step_by(step).zip(bytes.chunks(step)) {
        client.write_at(inode, at, Bytes::copy_from_slice(piece)).await.unwrap();
    }
    client.flush(inode).await.unwrap();
    client.release(inode).await;
}

pub(crate) async fn read_file(client: &Client, path: &str) -> Bytes {
    let opened = client.open_path(path).await.unwrap();
    client.read_at(opened.inode, 0, opened.length + 10).await.unwrap()
}

/// What a load saw. Any error and any wrong byte ends the test.
#[derive(Debug)]
pub(crate) struct Seen {
    /// Numbers of the files that were written and closed.
    pub(crate) files: u64,
    pub(crate) slowest_read: Duration,
    pub(crate) slowest_write: Duration,
}

/// A client that reads one open file at scattered places, and one that writes and closes a file after the other.
pub(crate) struct Load {
    stop: Arc<AtomicBool>,
    reads: Arc<AtomicU64>,
    writes: Arc<AtomicU64>,
    reader: JoinHandle<Duration>,
    writer: JoinHandle<Duration>,
}

/// Bytes of the file that a load reads.
const READ_SIZE: u64 = 6 * MIB;
/// Bytes of each file that it writes: they cross a chunk's end.
const WRITE_SIZE: u64 = MIB + 100_000;

impl Load {
    pub(crate) async fn start(cluster: &Cluster) -> Self {
        let (reading, writing) = (cluster.client().await, cluster.client().await);
        let old = pattern(3, READ_SIZE);
        write_file(&reading, "/read", &old).await;
        let inode = reading.open_path("/read").await.unwrap().inode;
        let stop = Arc::new(AtomicBool::new(false));
        let (reads, writes) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let (ended, count) = (Arc::clone(&stop), Arc::clone(&reads));
        let reader = tokio::spawn(async move {
            let mut slowest = Duration::ZERO;
            while !ended.load(Ordering::SeqCst) {
                let nth = count.fetch_add(1, Ordering::SeqCst);
                let (at, length) = (nth * 700_001 % (READ_SIZE - 100_000), 100_000);
                let since = Instant::now();
                let bytes = reading.read_at(inode, at, length).await.unwrap();
                slowest = slowest.max(since.elapsed());
                let at = usize::try_from(at).unwrap();
                assert!(bytes == old[at..at + 100_000], "read {nth} at {at}");
                tokio::task::yield_now().await;
            }
            slowest
        });
        let (ended, count) = (Arc::clone(&stop), Arc::clone(&writes));
        let writer = tokio::spawn(async move {
            let mut slowest = Duration::ZERO;
            while !ended.load(Ordering::SeqCst) {
                let nth = count.load(Ordering::SeqCst);
                let since = Instant::now();
                write_file(&writing, &format!("/written-{nth}"), &pattern(nth, WRITE_SIZE)).await;
                slowest = slowest.max(since.elapsed());
                count.fetch_add(1, Ordering::SeqCst);
            }
            slowest
        });
        Self { stop, reads, writes, reader, writer }
    }

    /// Waits for some more reads and writes, all of them begun after this call but one each.
    pub(crate) async fn goes_on(&self) {
        let goal = |count: &AtomicU64, more| count.load(Ordering::SeqCst) + more;
        let (reads, writes) = (goal(&self.reads, 20), goal(&self.writes, 3));
        until("the load goes on", async || {
            assert!(!self.reader.is_finished() && !self.writer.is_finished(), "the load ended");
            self.reads.load(Ordering::SeqCst) >= reads
                && self.writes.load(Ordering::SeqCst) >= writes
        })
        .await;
    }

    /// Waits for some more reads.
    pub(crate) async fn reads_go_on(&self, more: u64) {
        let goal = self.reads.load(Ordering::SeqCst) + more;
        until("reads go on", async || self.reads.load(Ordering::SeqCst) >= goal).await;
    }

    /// Ends the load and reads back whatever it wrote, through a new client and on each replica.
    pub(crate) async fn finish(self, cluster: &Cluster) -> Seen {
        self.stop.store(true, Ordering::SeqCst);
        let (slowest_read, slowest_write) =
            (self.reader.await.unwrap(), self.writer.await.unwrap());
        let files = self.writes.load(Ordering::SeqCst);
        let client = cluster.client().await;
        cluster.wait_serving(REPLICAS).await;
        for nth in 0..files {
            let path = format!("/written-{nth}");
            assert!(read_file(&client, &path).await == pattern(nth, WRITE_SIZE), "{path}");
            let inode = client.stat_path(&path).await.unwrap().inode;
            assert_eq!(cluster.assert_equal_copies(inode).await, 2, "{path}");
        }
        Seen { files, slowest_read, slowest_write }
    }
}

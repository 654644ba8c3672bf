//! A small manager over `chain::table::next`, servers that can be killed, a client that checks.

#![allow(clippy::cast_possible_truncation, reason = "the numbers of tests are small")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by it")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use chain::id::{
    ChainId, ChainVersion, ChannelId, ChunkId, ClientId, InodeId, NodeId, RoutingVersion, TargetId,
    UpdateId, UpdateVersion,
};
use chain::table::{Chain, Local, Report, Reports, Revive, next};
use rpc::conn::{Connection, Pool};
use rpc::message::Request;
use rpc::message::manager::{
    Heartbeat, HeartbeatDone, LocalState, NodeAddress, Routing, TargetAssignment,
};
use rpc::message::storage::{FileChunks, QueryFile, Read, Update, UpdateOp};
use rpc::serve::{Call, Handler, Reply};
use rpc::{Code, Error, Retry};
use storage_node::args::{Io, Serve};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::watch;

/// Short, so that the tests are; the proportions are those of production.
const LEASE: Duration = Duration::from_millis(2_000);
const PATIENCE: Duration = Duration::from_secs(60);
const FILE: InodeId = InodeId::new(77);

struct Heard {
    at: Duration,
    beat: Heartbeat,
}

struct Table {
    chain: Chain,
    version: u64,
    heard: BTreeMap<NodeId, Heard>,
    returned: Option<Duration>,
}

/// The test's manager: one chain in memory.
struct Manager {
    table: Mutex<Table>,
    cut: Mutex<BTreeSet<NodeId>>,
    started: Duration,
    addresses: BTreeMap<NodeId, String>,
}

impl Manager {
    fn decide(&self, table: &mut Table) {
        let now = rpc::clock::boot_time();
        let lease = LEASE.mul_f64(1.01);
        let reports: Reports = table
            .chain
            .targets
            .iter()
            .filter_map(|t| Some((t.id, report(t.id, table, now, lease, self.started)?)))
            .collect();
        let is_down = table.chain.head().is_none();
        let alive = reports.values().any(|r| r.local != Local::Offline);
        table.returned = if is_down && alive { table.returned.or(Some(now)) } else { None };
        let waited = table.returned.is_some_and(|since| now - since > Duration::from_secs(2));
        let revive = if waited { Revive::Any } else { Revive::Together };
        if let Some(chain) = next(&table.chain, &reports, revive) {
            table.chain = chain;
            table.version += 1;
        }
    }

    fn chain(&self) -> Chain {
        let mut table = self.table.lock().unwrap();
        self.decide(&mut table);
        table.chain.clone()
    }

    fn beat(&self, beat: Heartbeat) -> HeartbeatDone {
        let mut table = self.table.lock().unwrap();
        let (node, known) = (beat.node, beat.routing.get());
        table.heard.insert(node, Heard { at: rpc::clock::boot_time(), beat });
        self.decide(&mut table);
        let routing = (known < table.version).then(|| Routing {
            version: RoutingVersion::new(table.version),
            table: 1,
            chunk_size_bytes: 1 << 20,
            stripe: 0,
            chains: vec![table.chain.clone()],
            nodes: self
                .addresses
                .iter()
                .map(|(node, address)| NodeAddress { node: *node, address: address.clone() })
                .collect(),
        });
        let target = node.target(0, 0);
        let targets = vec![TargetAssignment { target, chain: table.chain.id, disk: 0 }];
        let lease_ms = u32::try_from(LEASE.as_millis()).unwrap();
        HeartbeatDone { lease_ms, targets, routing }
    }
}

fn report(
    target: TargetId,
    table: &Table,
    now: Duration,
    lease: Duration,
    started: Duration,
) -> Option<Report> {
    let ms = |t: Duration| u64::try_from(t.as_millis()).unwrap();
    let gone = |at: Duration| {
        let ended = Report { local: Local::Offline, version: ChainVersion::NONE, at_ms: ms(at) };
        (now > at).then_some(ended)
    };
    let Some(heard) = table.heard.get(&target.node()) else { return gone(started + lease) };
    if now > heard.at + lease {
        return gone(heard.at + lease);
    }
    let said = heard.beat.targets.iter().find(|t| t.target == target)?;
    let local = match said.state {
        LocalState::Online => Local::Online,
        LocalState::UpToDate => Local::UpToDate,
        LocalState::Offline => Local::Offline,
    };
    Some(Report { local, version: said.chain_version, at_ms: ms(heard.at) })
}

impl Handler for Manager {
    async fn handle(&self, call: Call) -> Result<Reply, Error> {
        if call.kind != Heartbeat::KIND {
            return Err(call.unknown());
        }
        let beat: Heartbeat = call.decode()?;
        if self.cut.lock().unwrap().contains(&beat.node) {
            std::future::pending::<()>().await;
        }
        Ok(Reply::new(&self.beat(beat)))
    }
}

/// A server in a runtime of its own, so that a kill takes every task with it.
struct Process {
    runtime: Runtime,
    stop: watch::Sender<bool>,
    address: String,
    running: Option<storage_node::server::Running>,
}

/// Where others reach a node: bytes go through while it is not cut off.
struct Wire {
    to: Mutex<String>,
    is_cut: AtomicBool,
}

pub(crate) struct Cluster {
    runtime: Runtime,
    manager: Arc<Manager>,
    manager_address: String,
    wires: BTreeMap<u32, Arc<Wire>>,
    processes: Mutex<BTreeMap<u32, Process>>,
    disks: tempfile::TempDir,
    clients: AtomicU64,
}

fn node(n: u32) -> NodeId {
    NodeId::new(10_000 + n)
}

impl Cluster {
    pub(crate) fn start(count: u32) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let (mut wires, mut addresses) = (BTreeMap::new(), BTreeMap::new());
        for n in 1..=count {
            let wire = Arc::new(Wire { to: Mutex::default(), is_cut: AtomicBool::new(false) });
            let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
            addresses.insert(node(n), listener.local_addr().unwrap().to_string());
            runtime.spawn(relay(listener, Arc::clone(&wire)));
            wires.insert(n, wire);
        }
        let targets: Vec<TargetId> = (1..=count).map(|n| node(n).target(0, 0)).collect();
        let table = Table {
            chain: Chain::newborn(ChainId::new(1), &targets),
            version: 1,
            heard: BTreeMap::new(),
            returned: None,
        };
        let manager = Arc::new(Manager {
            table: Mutex::new(table),
            cut: Mutex::default(),
            started: rpc::clock::boot_time(),
            addresses,
        });
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let manager_address = listener.local_addr().unwrap().to_string();
        let (keep, stop) = watch::channel(false);
        let serving = Arc::clone(&manager);
        runtime.spawn(async move {
            rpc::serve::serve(listener, serving, stop).await;
            drop(keep);
        });
        let cluster = Self {
            runtime,
            manager,
            manager_address,
            wires,
            processes: Mutex::default(),
            disks: tempfile::tempdir().unwrap(),
            clients: AtomicU64::new(1),
        };
        (1..=count).for_each(|n| cluster.restart(n));
        cluster
    }

    pub(crate) fn run(&self, test: impl Future<Output = ()>) {
        self.runtime.block_on(test);
    }

    pub(crate) fn restart(&self, n: u32) {
        let dir = self.disks.path().join(n.to_string());
        std::fs::create_dir_all(&dir).unwrap();
        let args = Serve {
            cluster: "test".into(),
            node_id: node(n).get(),
            data: vec![dir],
            manager: self.manager_address.clone(),
            listen: "127.0.0.1:0".parse().unwrap(),
            advertise: "127.0.0.1:0".into(),
            admin: "127.0.0.1:0".parse().unwrap(),
            io: Io::Auto,
        };
        // A thread of its own: this may be called from inside the cluster's runtime.
        let process = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(2)
                .enable_all()
                .build()
                .unwrap();
            let (stop, stopped) = watch::channel(false);
            let running = runtime.block_on(storage_node::server::start(args, stopped)).unwrap();
            let address = running.address.to_string();
            Process { runtime, stop, address, running: Some(running) }
        });
        let process = process.join().unwrap();
        *self.wires[&n].to.lock().unwrap() = process.address.clone();
        self.processes.lock().unwrap().insert(n, process);
    }

    /// Ends a server between two of its steps, without a word to anybody.
    pub(crate) fn kill(&self, n: u32) {
        let process = self.processes.lock().unwrap().remove(&n).unwrap();
        let end = move || {
            drop(process.running);
            process.runtime.shutdown_timeout(Duration::from_secs(10));
        };
        std::thread::spawn(end).join().unwrap();
    }

    /// Asks a server to stop and waits until it has.
    pub(crate) async fn stop(&self, n: u32) {
        let mut process = self.processes.lock().unwrap().remove(&n).unwrap();
        process.stop.send_replace(true);
        process.running.take().unwrap().join().await;
        std::thread::spawn(move || process.runtime.shutdown_timeout(Duration::from_secs(10)));
    }

    pub(crate) fn cut(&self, n: u32) {
        self.wires[&n].is_cut.store(true, Ordering::SeqCst);
        self.manager.cut.lock().unwrap().insert(node(n));
    }

    pub(crate) fn heal(&self, n: u32) {
        self.manager.cut.lock().unwrap().remove(&node(n));
        self.wires[&n].is_cut.store(false, Ordering::SeqCst);
    }

    pub(crate) fn targets(&self) -> Vec<TargetId> {
        self.manager.chain().targets.iter().map(|t| t.id).collect()
    }

    pub(crate) fn head_node(&self) -> u32 {
        self.manager.chain().head().unwrap().node().get() - 10_000
    }

    pub(crate) fn tail_node(&self) -> u32 {
        self.manager.chain().tail().unwrap().node().get() - 10_000
    }

    pub(crate) async fn wait_serving(&self, count: usize) {
        let deadline = Instant::now() + PATIENCE;
        while self.manager.chain().serving().count() != count {
            assert!(Instant::now() < deadline, "never {count}: {:?}", self.manager.chain());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// All three serve, and some writes of a workload that goes on are through.
    pub(crate) async fn serving_under_load(&self, writes: u64) -> Workload {
        self.wait_serving(3).await;
        let load = Workload::start(self);
        load.wait_writes(writes).await;
        load
    }

    pub(crate) fn client(&self) -> Client {
        let id = self.clients.fetch_add(1, Ordering::Relaxed);
        let manager = Arc::clone(&self.manager);
        Client { id: ClientId::new(id.into()), seq: 0, pool: Pool::new(), manager }
    }

    /// Asks a server behind its cut wire, as a client on its side of the cut would.
    pub(crate) async fn assert_refuses(&self, n: u32) {
        let address = self.processes.lock().unwrap()[&n].address.clone();
        let connection = Connection::connect(&address).await.unwrap();
        for version in 1..=self.manager.chain().version.get() {
            let request = read_request(node(n).target(0, 0), ChainVersion::new(version), 0);
            let answer = connection.call(&request, Bytes::new(), Duration::from_secs(2)).await;
            let code = answer.expect_err("a server without a lease answered").code;
            assert!(
                matches!(code, Code::NoLease | Code::StaleChain | Code::NotServing),
                "{code:?}"
            );
        }
    }

    /// What the admin endpoint answers: status and body.
    pub(crate) async fn admin(&self, n: u32, path: &str) -> (u16, String) {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let address = self.processes.lock().unwrap()[&n].running.as_ref().unwrap().admin;
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        (status, body.to_owned())
    }

    pub(crate) async fn wait_admin(&self, n: u32, path: &str, status: u16) -> (u16, String) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let answer = self.admin(n, path).await;
            if answer.0 == status {
                return answer;
            }
            assert!(Instant::now() < deadline, "{path} never answers {status}: {answer:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Every copy of every chunk is what was last acknowledged, or newer and the same everywhere.
    pub(crate) async fn assert_equal_copies(&self, chunks: &BTreeMap<u64, Vec<u8>>) {
        let client = self.client();
        assert!(!chunks.is_empty());
        for (index, expected) in chunks {
            for target in self.targets() {
                let bytes = client.read_at(target, *index).await.expect("read a copy");
                assert_eq!(&bytes, expected, "chunk {index} on target {target}");
            }
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let left: Vec<u32> = self.processes.lock().unwrap().keys().copied().collect();
        left.into_iter().for_each(|n| self.kill(n));
    }
}

async fn relay(listener: TcpListener, wire: Arc<Wire>) {
    while let Ok((near, _)) = listener.accept().await {
        let wire = Arc::clone(&wire);
        tokio::spawn(async move {
            let to = wire.to.lock().unwrap().clone();
            if let Ok(far) = TcpStream::connect(to).await {
                let (near_read, near_write) = near.into_split();
                let (far_read, far_write) = far.into_split();
                tokio::join!(pump(near_read, far_write, &wire), pump(far_read, near_write, &wire));
            }
        });
    }
}

/// Moves bytes; while the wire is cut they wait, as in a network that drops packets.
async fn pump(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    wire: &Wire,
) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut buffer = vec![0; 64 << 10];
    while let Ok(n @ 1..) = from.read(&mut buffer).await {
        while wire.is_cut.load(Ordering::SeqCst) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        if to.write_all(&buffer[..n]).await.is_err() {
            return;
        }
    }
}

fn read_request(target: TargetId, version: ChainVersion, index: u64) -> Read {
    Read {
        chain: ChainId::new(1),
        chain_version: version,
        target,
        chunk: ChunkId { file: FILE, index },
        offset: 0,
        length: 1 << 20,
        relaxed: false,
    }
}

/// A client without caches or cleverness: tries again until it is answered.
pub(crate) struct Client {
    id: ClientId,
    seq: u64,
    pool: Pool,
    manager: Arc<Manager>,
}

impl Client {
    async fn call<R: Request>(
        &self,
        target: TargetId,
        request: &R,
        payload: Bytes,
    ) -> Result<(R::Response, Bytes), Error> {
        let address = &self.manager.addresses[&target.node()];
        self.pool.call(address, request, payload, Duration::from_millis(1_000)).await
    }

    pub(crate) async fn write(&mut self, index: u64, bytes: &[u8]) -> UpdateVersion {
        self.seq += 1;
        self.repeat(index, bytes).await
    }

    /// Sends the last write again, under its own name.
    pub(crate) async fn repeat(&self, index: u64, bytes: &[u8]) -> UpdateVersion {
        let sent = self.send(index, 0, UpdateOp::Write { offset: 0 }, bytes).await;
        sent.expect("a write is not refused")
    }

    /// A new update that carries this truncate generation; refused only for good.
    pub(crate) async fn update(
        &mut self,
        index: u64,
        truncate_generation: u64,
        op: UpdateOp,
        bytes: &[u8],
    ) -> Result<UpdateVersion, Error> {
        self.seq += 1;
        self.send(index, truncate_generation, op, bytes).await
    }

    /// Sends an update under the name of the last one.
    pub(crate) async fn send(
        &self,
        index: u64,
        truncate_generation: u64,
        op: UpdateOp,
        bytes: &[u8],
    ) -> Result<UpdateVersion, Error> {
        let id = UpdateId { client: self.id, channel: ChannelId::new(1), seq: self.seq };
        let deadline = Instant::now() + PATIENCE;
        loop {
            let chain = self.manager.chain();
            let error = match chain.head() {
                Some(target) => {
                    let request = Update {
                        chain: chain.id,
                        chain_version: chain.version,
                        target,
                        chunk: ChunkId { file: FILE, index },
                        id,
                        truncate_generation,
                        op,
                        chunk_size: 1 << 20,
                        checksum: crc32c::crc32c(bytes),
                    };
                    match self.call(target, &request, Bytes::copy_from_slice(bytes)).await {
                        Ok((done, _)) => return Ok(done.version),
                        Err(error) if error.code.retry() == Retry::Never => return Err(error),
                        Err(error) => error.to_string(),
                    }
                }
                None => "nobody serves".into(),
            };
            assert!(Instant::now() < deadline, "update {index}: {error}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// What a target says of the file.
    pub(crate) async fn query(&self, target: TargetId, from_index: u64, limit: u32) -> FileChunks {
        let chain = self.manager.chain();
        let (chain, chain_version, file) = (chain.id, chain.version, FILE);
        let request = QueryFile { chain, chain_version, target, file, from_index, limit };
        self.call(target, &request, Bytes::new()).await.expect("query").0
    }

    pub(crate) async fn read_at(&self, target: TargetId, index: u64) -> Result<Vec<u8>, Error> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.try_read(target, index).await {
                Ok(bytes) => return Ok(bytes),
                Err(error) if Instant::now() > deadline => return Err(error),
                Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    }

    async fn try_read(&self, target: TargetId, index: u64) -> Result<Vec<u8>, Error> {
        let version = self.manager.chain().version;
        let request = read_request(target, version, index);
        let (done, bytes) = self.call(target, &request, Bytes::new()).await?;
        assert_eq!(done.checksum, crc32c::crc32c(&bytes));
        Ok(bytes.to_vec())
    }

    /// Reads wherever somebody answers.
    async fn read(&self, index: u64) -> Result<Vec<u8>, Error> {
        let deadline = Instant::now() + PATIENCE;
        let mut last = Error::new(Code::ChainUnavailable, "nobody serves");
        let mut round = index as usize;
        while Instant::now() < deadline {
            let serving: Vec<TargetId> = self.manager.chain().serving().collect();
            round += 1;
            if let Some(target) = serving.get(round % serving.len().max(1)) {
                match self.try_read(*target, index).await {
                    Ok(bytes) => return Ok(bytes),
                    Err(error) if error.code == Code::Dirty => {
                        let tail = serving[serving.len() - 1];
                        if let Ok(bytes) = self.try_read(tail, index).await {
                            return Ok(bytes);
                        }
                    }
                    Err(error) => last = error,
                }
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Err(last)
    }
}

#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) failed_reads: u64,
    pub(crate) slowest_read: Duration,
    pub(crate) slowest_write: Duration,
    pub(crate) chunks: BTreeMap<u64, Vec<u8>>,
}

/// One writer that counts up in a few chunks, one reader that sees no step back.
pub(crate) struct Workload {
    stop: Arc<AtomicBool>,
    writes: Arc<AtomicU64>,
    writer: tokio::task::JoinHandle<Seen>,
    reader: tokio::task::JoinHandle<Seen>,
}

const CHUNKS: u64 = 5;

impl Workload {
    pub(crate) fn start(cluster: &Cluster) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let writes = Arc::new(AtomicU64::new(0));
        // What each chunk is known to hold at least: set after the acknowledgement.
        let acknowledged: Arc<[AtomicU64; CHUNKS as usize]> = Arc::default();
        let writer = tokio::spawn(write_on(
            cluster.client(),
            Arc::clone(&stop),
            Arc::clone(&writes),
            Arc::clone(&acknowledged),
        ));
        let reader = tokio::spawn(read_on(cluster.client(), Arc::clone(&stop), acknowledged));
        Self { stop, writes, writer, reader }
    }

    pub(crate) async fn wait_writes(&self, more: u64) {
        let until = self.writes.load(Ordering::SeqCst) + more;
        let deadline = Instant::now() + PATIENCE;
        while self.writes.load(Ordering::SeqCst) < until {
            assert!(!self.writer.is_finished() && !self.reader.is_finished());
            assert!(Instant::now() < deadline, "writes do not go on");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Ends it: no read failed, nobody waited long, and every copy holds what was written.
    pub(crate) async fn finish_unharmed(self, cluster: &Cluster) {
        let seen = self.finish().await;
        assert_eq!(seen.failed_reads, 0);
        assert!(seen.slowest_read < Duration::from_secs(5), "{seen:?}");
        assert!(seen.slowest_write < Duration::from_secs(10), "{seen:?}");
        cluster.assert_equal_copies(&seen.chunks).await;
    }

    pub(crate) async fn finish(self) -> Seen {
        self.stop.store(true, Ordering::SeqCst);
        let read = self.reader.await.unwrap();
        let written = self.writer.await.unwrap();
        Seen { failed_reads: read.failed_reads, slowest_read: read.slowest_read, ..written }
    }
}

async fn write_on(
    mut client: Client,
    stop: Arc<AtomicBool>,
    writes: Arc<AtomicU64>,
    acknowledged: Arc<[AtomicU64; CHUNKS as usize]>,
) -> Seen {
    let mut seen = Seen::default();
    let mut count = 0u64;
    while !stop.load(Ordering::SeqCst) {
        count += 1;
        let index = count % CHUNKS;
        // The count at both ends of several pages: a torn write would show.
        let mut bytes = vec![u8::try_from(count % 251).unwrap(); 20_000];
        bytes[..8].copy_from_slice(&count.to_le_bytes());
        bytes[19_992..].copy_from_slice(&count.to_le_bytes());
        let start = Instant::now();
        client.write(index, &bytes).await;
        seen.slowest_write = seen.slowest_write.max(start.elapsed());
        acknowledged[index as usize].store(count, Ordering::SeqCst);
        seen.chunks.insert(index, bytes);
        writes.fetch_add(1, Ordering::SeqCst);
    }
    seen
}

async fn read_on(
    client: Client,
    stop: Arc<AtomicBool>,
    acknowledged: Arc<[AtomicU64; CHUNKS as usize]>,
) -> Seen {
    let mut seen = Seen::default();
    let mut newest = [0u64; CHUNKS as usize];
    let mut round = 0usize;
    while !stop.load(Ordering::SeqCst) {
        round += 1;
        let at = round % CHUNKS as usize;
        let least = acknowledged[at].load(Ordering::SeqCst).max(newest[at]);
        let start = Instant::now();
        match client.read(at as u64).await {
            Ok(bytes) if bytes.is_empty() => assert_eq!(least, 0, "chunk {at} vanished"),
            Ok(bytes) => {
                let count = u64::from_le_bytes(bytes[..8].try_into().unwrap());
                let end = u64::from_le_bytes(bytes[19_992..20_000].try_into().unwrap());
                assert_eq!(count, end, "chunk {at} is torn");
                assert!(count >= least, "chunk {at} went back from {least} to {count} (R1)");
                newest[at] = count;
            }
            Err(_) => seen.failed_reads += 1,
        }
        seen.slowest_read = seen.slowest_read.max(start.elapsed());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    seen
}

//! The server of one node: its disks, its targets, and what each request does with them.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use bytes::Bytes;
use chain::id::{ChainId, ChunkId, NodeId, RoutingVersion, TargetId};
use chain::replica::{Update as ReplicaUpdate, Verdict};
use chain::table::Local;
use rpc::message::Request;
use rpc::message::chain::{
    ChunkPage, ForgetChunk, Forward, Link, ListChunks, ListedChunk, SyncDone,
};
use rpc::message::manager::{LocalState, TargetAssignment, TargetReport};
use rpc::message::storage::{FileChunks, QueryFile, Read, Update, UpdateDone, UpdateOp};
use rpc::serve::{Call, Handler, Reply};
use rpc::{Code, Error};

use crate::budget::Budget;
use crate::convert;
use crate::engine::{self, Engine, FileView};
use crate::metrics::Metrics;
use crate::peers::Peers;
use crate::target::{Target, now_ms};

/// Most chunks of one listing or query.
const PAGE_MAX: u32 = 4_096;

/// One storage server.
#[derive(Debug)]
pub struct Node {
    pub(crate) id: NodeId,
    pub(crate) cluster: String,
    pub(crate) incarnation: u64,
    pub(crate) disks: Vec<Engine>,
    pub(crate) peers: Arc<Peers>,
    pub(crate) metrics: Metrics,
    answers: Budget,
    targets: RwLock<BTreeMap<TargetId, Arc<Target>>>,
    pub(crate) routing: AtomicU64,
    pub(crate) lease_until_ms: AtomicU64,
    pub(crate) is_draining: AtomicBool,
}

impl Node {
    /// A server over open disks, with the targets that they hold.
    ///
    /// # Errors
    /// A disk's record of a target cannot be read.
    pub fn new(
        cluster: String,
        id: NodeId,
        incarnation: u64,
        disks: Vec<Engine>,
    ) -> Result<Self, engine::Error> {
        let peers = Arc::new(Peers::default());
        let mut targets = BTreeMap::new();
        for disk in &disks {
            for (target, record) in disk.targets()? {
                let record = Target::parse_record(record).map_err(|why| {
                    engine::Error::Failed(format!("record of target {target}: {why}").into())
                })?;
                let (chain, peers) = (record.chain, Arc::clone(&peers));
                let opened = Target::open(target, chain, Some(&record), disk.clone(), peers)?;
                targets.insert(target, opened);
            }
        }
        Ok(Self {
            id,
            cluster,
            incarnation,
            disks,
            peers,
            metrics: Metrics::default(),
            answers: Budget::default(),
            targets: RwLock::new(targets),
            routing: AtomicU64::new(0),
            lease_until_ms: AtomicU64::new(0),
            is_draining: AtomicBool::new(false),
        })
    }

    pub(crate) fn targets(&self) -> Vec<Arc<Target>> {
        let targets = self.targets.read().unwrap_or_else(PoisonError::into_inner);
        targets.values().map(Arc::clone).collect()
    }

    fn target(&self, id: TargetId, chain: ChainId) -> Result<Arc<Target>, Error> {
        let targets = self.targets.read().unwrap_or_else(PoisonError::into_inner);
        let target = targets.get(&id).filter(|t| t.chain == chain).map(Arc::clone);
        target.ok_or_else(|| {
            let why = format!("node {} holds no target {id} of chain {chain}", self.id);
            Error::new(Code::NotServing, why)
        })
    }

    /// Makes the targets that the declared table puts here.
    pub(crate) fn assign(&self, assignments: &[TargetAssignment]) {
        for wanted in assignments {
            if self.targets().iter().any(|t| t.id == wanted.target) {
                continue;
            }
            let Some(disk) = self.disks.get(wanted.disk as usize) else {
                tracing::error!(target_id = %wanted.target, disk = wanted.disk,
                    "the table names a disk that this server was not given: add a --data");
                continue;
            };
            let peers = Arc::clone(&self.peers);
            match Target::open(wanted.target, wanted.chain, None, disk.clone(), peers) {
                Ok(target) => {
                    let mut all = self.targets.write().unwrap_or_else(PoisonError::into_inner);
                    all.insert(wanted.target, target);
                }
                Err(error) => tracing::error!(target_id = %wanted.target, %error, "open a target"),
            }
        }
    }

    /// What the next heartbeat says of every target.
    pub(crate) fn reports(&self) -> Vec<TargetReport> {
        let is_draining = self.is_draining.load(Ordering::Acquire);
        let report = |target: Arc<Target>| {
            let (local, chain_version) = target.report();
            let state = match local {
                _ if is_draining => LocalState::Offline,
                Local::Offline => LocalState::Offline,
                Local::Online => LocalState::Online,
                Local::UpToDate => LocalState::UpToDate,
            };
            let (chain, used_bytes) = (target.chain, target.engine.stats().used_bytes);
            TargetReport { target: target.id, chain, chain_version, state, used_bytes }
        };
        self.targets().into_iter().map(report).collect()
    }

    /// Extends the lease of every target.
    pub(crate) fn renew(&self, until_ms: u64) {
        if self.is_draining.load(Ordering::Acquire) {
            return;
        }
        self.lease_until_ms.fetch_max(until_ms, Ordering::AcqRel);
        for target in self.targets() {
            target.replica().renew(until_ms);
        }
    }

    /// Answers no client from now on; neighbours still are.
    pub(crate) fn surrender(&self) {
        self.is_draining.store(true, Ordering::Release);
        self.lease_until_ms.store(0, Ordering::Release);
        for target in self.targets() {
            target.replica().surrender();
        }
    }

    /// Whether clients are answered: registered with the manager, and not long ago.
    ///
    /// # Errors
    /// What is missing.
    pub fn ready(&self) -> Result<(), String> {
        if self.is_draining.load(Ordering::Acquire) {
            return Err("draining".into());
        }
        match self.lease_until_ms.load(Ordering::Acquire) {
            0 => Err("not registered with the manager yet".into()),
            until if until <= now_ms() => Err("the lease from the manager has run out".into()),
            _ => Ok(()),
        }
    }

    /// Everything that a human may want to know.
    #[must_use]
    pub fn state(&self) -> serde_json::Value {
        let disk = |engine: &Engine| {
            let (state, stats) = (engine.state(), engine.stats());
            serde_json::json!({
                "disk": state.disk, "incarnation": state.incarnation, "io": state.io,
                "ioReason": state.io_reason, "direct": state.direct, "failed": state.failed,
                "capacityBytes": stats.capacity_bytes, "usedBytes": stats.used_bytes,
                "barriers": stats.barriers, "corruptPages": stats.corrupt_pages,
            })
        };
        let target = |target: Arc<Target>| {
            let replica = target.replica();
            let (pending, queued) = replica.load();
            let state = replica.chain().and_then(|c| c.state_of(target.id));
            let (local, version) = replica.report();
            serde_json::json!({
                "target": target.id.get(), "chain": target.chain.get(),
                "chainVersion": version.get(), "state": state.map(|s| format!("{s:?}")),
                "local": format!("{local:?}"), "pending": pending, "queued": queued,
            })
        };
        let lease = self.lease_until_ms.load(Ordering::Acquire).saturating_sub(now_ms());
        serde_json::json!({
            "cluster": self.cluster, "node": self.id.get(), "leaseLeftMs": lease,
            "routingVersion": self.routing.load(Ordering::Acquire),
            "draining": self.is_draining.load(Ordering::Acquire),
            "disks": self.disks.iter().map(disk).collect::<Vec<_>>(),
            "targets": self.targets().into_iter().map(target).collect::<Vec<_>>(),
        })
    }

    pub(crate) fn routing_version(&self) -> RoutingVersion {
        RoutingVersion::new(self.routing.load(Ordering::Acquire))
    }

    async fn read(&self, call: &Call) -> Result<Reply, Error> {
        let request: Read = call.decode()?;
        let target = self.target(request.target, request.chain)?;
        let room = self.answers.room(call.peer, request.length).await?;
        let (done, bytes) = target.read(&request).await?;
        self.metrics.read_bytes.inc_by(bytes.len() as u64);
        Ok(Reply::with_payload(&done, room.hold(bytes)))
    }

    async fn update(&self, call: Call) -> Result<Reply, Error> {
        let request: Update = call.decode()?;
        check_payload(&call.payload, request.checksum)?;
        check_update(&request, &call.payload)?;
        let target = self.target(request.target, request.chain)?;
        self.metrics.update_bytes.inc_by(call.payload.len() as u64);
        let update = ReplicaUpdate {
            chunk: request.chunk,
            id: request.id,
            truncate_generation: request.truncate_generation,
            change: convert::change(request.op, call.payload, request.checksum),
        };
        let done = target.update(request.chain_version, update).await?;
        Ok(Reply::new(&UpdateDone { version: done.version, chunk_length: done.length }))
    }

    async fn query(&self, call: &Call) -> Result<Reply, Error> {
        let request: QueryFile = call.decode()?;
        let target = self.target(request.target, request.chain)?;
        let found = look_up_file(&target, &request).await?;
        for (index, version) in found.pending {
            let (asked, chunk) = (request.chain_version, ChunkId { file: request.file, index });
            match target.replica().verdict(now_ms(), asked, chunk, Some(version), false) {
                Verdict::Answer => {}
                Verdict::Hold => return Err(Error::new(Code::ChunkBusy, "an update is pending")),
                Verdict::Refuse(refusal) => return Err(convert::error_out(&refusal)),
            }
        }
        let admitted = target.replica().admit(now_ms(), request.chain_version);
        admitted.map_err(|refusal| convert::error_out(&refusal))?;
        let chunks = found.chunks.into_iter().map(convert::chunk_length).collect();
        let last = found.last.map(convert::chunk_length);
        Ok(Reply::new(&FileChunks { chunks, last }))
    }

    async fn forward(&self, call: Call) -> Result<Reply, Error> {
        let request: Forward = call.decode()?;
        check_payload(&call.payload, request.checksum)?;
        let target = self.target_of(&request.link)?;
        let (version, era) = (request.link.chain_version, request.era);
        target.forward(version, era, convert::forward_in(request, call.payload)).await?;
        Ok(Reply::new(&()))
    }

    fn list(&self, call: &Call) -> Result<Reply, Error> {
        let request: ListChunks = call.decode()?;
        let target = self.target_of(&request.link)?;
        let known = target.replica().chain().map(|c| c.version);
        if known != Some(request.link.chain_version) {
            let version = known.map_or(0, chain::id::ChainVersion::get);
            let error = Error::new(Code::StaleChain, "list chunks under another chain version");
            return Err(error.with_detail(version));
        }
        let limit = request.limit.clamp(1, PAGE_MAX) as usize;
        let page = target.engine.list(target.id, request.after, limit);
        let page = page.map_err(|error| convert::engine_error(&error))?;
        let is_last = page.len() < limit;
        let entry = |(chunk, info): (ChunkId, engine::ChunkInfo)| ListedChunk {
            chunk,
            committed: info.committed.as_ref().map(convert::identity),
            is_pending: info.pending.is_some(),
        };
        let chunks = page.into_iter().map(entry).collect();
        Ok(Reply::new(&ChunkPage { chunks, is_last, incarnation: self.incarnation }))
    }

    async fn sync_done(&self, call: &Call) -> Result<Reply, Error> {
        let request: SyncDone = call.decode()?;
        if request.incarnation != self.incarnation {
            let why = "the process that was compared has ended";
            return Err(Error::new(Code::VersionGap, why).with_detail(self.incarnation));
        }
        let target = self.target_of(&request.link)?;
        target.sync_done(request.link.chain_version).await?;
        Ok(Reply::new(&()))
    }

    async fn forget(&self, call: &Call) -> Result<Reply, Error> {
        let request: ForgetChunk = call.decode()?;
        let target = self.target_of(&request.link)?;
        target.forget(request.link.chain_version, request.era, request.chunk).await?;
        Ok(Reply::new(&()))
    }

    fn target_of(&self, link: &Link) -> Result<Arc<Target>, Error> {
        self.target(link.target, link.chain)
    }
}

impl Handler for Node {
    async fn handle(&self, call: Call) -> Result<Reply, Error> {
        let kind = call.kind;
        let answer = match kind {
            Read::KIND => self.read(&call).await,
            Update::KIND => self.update(call).await,
            QueryFile::KIND => self.query(&call).await,
            Forward::KIND => self.forward(call).await,
            ListChunks::KIND => self.list(&call),
            ForgetChunk::KIND => self.forget(&call).await,
            SyncDone::KIND => self.sync_done(&call).await,
            _ => Err(call.unknown()),
        };
        self.metrics.count(kind, answer.as_ref().err().map(|error| error.code));
        answer
    }
}

fn check_payload(payload: &Bytes, checksum: u32) -> Result<(), Error> {
    let computed = crc32c::crc32c(payload);
    if computed == checksum {
        return Ok(());
    }
    let why = format!("payload has checksum {computed:#010x}, the message says {checksum:#010x}");
    Err(Error::new(Code::ChecksumMismatch, why))
}

/// What a client asks must fit into a chunk of the file's layout.
fn check_update(request: &Update, payload: &Bytes) -> Result<(), Error> {
    let size = u64::from(request.chunk_size);
    let length = payload.len() as u64;
    let (end, is_payload_right) = match request.op {
        UpdateOp::Write { offset } => (u64::from(offset) + length, length > 0),
        UpdateOp::Truncate { length: end } => (u64::from(end), length == 0),
        UpdateOp::Remove => (0, length == 0),
    };
    if size > engine::MAX_CHUNK_SIZE || end > size || !is_payload_right {
        let why = format!(
            "{:?} with {length} bytes in a chunk of {size}: at most {}",
            request.op,
            engine::MAX_CHUNK_SIZE
        );
        return Err(Error::new(Code::InvalidRequest, why));
    }
    Ok(())
}

/// What a query asks for. Not on a thread of the runtime: a file may have any number of removed
/// chunks, and each of them is passed.
async fn look_up_file(target: &Target, request: &QueryFile) -> Result<FileView, Error> {
    let (engine, id, file) = (target.engine.clone(), target.id, request.file);
    let (from, limit) = (request.from_index, request.limit.min(PAGE_MAX) as usize);
    let look_up = tokio::task::spawn_blocking(move || engine.file(id, file, from, limit));
    let found = look_up.await.map_err(|error| {
        Error::new(Code::Internal, format!("look up the chunks of file {file}: {error}"))
    })?;
    found.map_err(|error| convert::engine_error(&error))
}

#[cfg(test)]
mod tests;

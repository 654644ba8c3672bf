//! One target at work: its replica decides, its engine stores, its neighbours are called.
//!
//! The replica is behind a mutex that is held for one decision at a time and never across an
//! await: many connections feed it, and a decision takes microseconds. Whatever takes longer is
//! an effect, run by a task of its own that ends in one event.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use chain::id::{ChainId, ChainVersion, ChunkId, TargetId, UpdateVersion};
use chain::replica::{
    Content, Done, Effect, Era, Event, Forward, Message, Refusal, Replica, Token, Update, Verdict,
};
use chain::table::{Chain, Local};
use rpc::codec::Wire;
use rpc::message::chain::{ForgetChunk, Link};
use rpc::message::storage::{Read, ReadDone};
use rpc::{Code, Error};
use tokio::sync::{Notify, oneshot};

use crate::convert;
use crate::engine::{self, Engine, Which};
use crate::peers::Peers;

/// How long one attempt to forward may take; the replica then tries again.
const FORWARD_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a read may wait for a pending update to be decided.
const HOLD_MAX: Duration = Duration::from_millis(1_000);
/// Chunks looked up at once when a target is opened or listed.
const LIST_PAGE: usize = 1_024;

/// What the engine keeps for a target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TargetRecord {
    /// Layout of this record.
    format: u32,
    /// The chain.
    pub(crate) chain: ChainId,
    /// The newest version of it that was taken up: W1 across restarts.
    version: ChainVersion,
}
rpc::wire_fields!(TargetRecord { format: u32, chain: ChainId, version: ChainVersion });

/// The layout that this build reads and writes.
const RECORD_FORMAT: u32 = 1;

/// One target of one chain on one disk.
#[derive(Debug)]
pub(crate) struct Target {
    pub(crate) id: TargetId,
    pub(crate) chain: ChainId,
    pub(crate) engine: Engine,
    replica: Mutex<Replica>,
    waiting: Mutex<HashMap<Token, oneshot::Sender<Result<Done, Refusal>>>>,
    tokens: AtomicU64,
    peers: Arc<Peers>,
    /// An update was committed, or the chain changed.
    changed: Notify,
}

impl Target {
    /// Opens a target: finds its chain version and what is pending.
    pub(crate) fn open(
        id: TargetId,
        chain: ChainId,
        record: Option<&TargetRecord>,
        engine: Engine,
        peers: Arc<Peers>,
    ) -> Result<Arc<Self>, engine::Error> {
        let version = record.map_or(ChainVersion::NONE, |r| r.version);
        let incarnation = engine.state().incarnation;
        let mut pending = BTreeMap::new();
        let mut after = None;
        loop {
            let page = engine.list(id, after, LIST_PAGE)?;
            let Some((last, _)) = page.last() else { break };
            after = Some(*last);
            let version = |(chunk, info): &(_, engine::ChunkInfo)| {
                Some((*chunk, info.pending.as_ref()?.version))
            };
            pending.extend(page.iter().filter_map(version));
        }
        Ok(Arc::new(Self {
            id,
            chain,
            engine,
            replica: Mutex::new(Replica::new(id, incarnation, version, pending)),
            waiting: Mutex::default(),
            tokens: AtomicU64::new(1),
            peers,
            changed: Notify::new(),
        }))
    }

    pub(crate) fn replica(&self) -> MutexGuard<'_, Replica> {
        self.replica.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the record that the engine kept.
    pub(crate) fn parse_record(bytes: Vec<u8>) -> Result<TargetRecord, String> {
        let record = TargetRecord::from_bytes(bytes.into()).map_err(|e| e.to_string())?;
        if record.format == RECORD_FORMAT {
            Ok(record)
        } else {
            Err(format!("record of format {}, this build reads {RECORD_FORMAT}", record.format))
        }
    }

    /// Takes up a published chain, durably before anything is done under it (W1).
    pub(crate) async fn publish(self: &Arc<Self>, chain: Chain) -> Result<(), engine::Error> {
        if !self.replica().wants(&chain) {
            return Ok(());
        }
        let record =
            TargetRecord { format: RECORD_FORMAT, chain: chain.id, version: chain.version };
        self.engine.set_target_record(self.id, record.to_bytes().to_vec()).await?;
        tracing::info!(target_id = %self.id, chain = %chain.id, version = %chain.version,
            state = ?chain.state_of(self.id), "take up a chain");
        self.feed(Event::Chain(chain));
        self.changed.notify_waiters();
        Ok(())
    }

    /// What to tell the manager: a target on a failed disk is offline.
    pub(crate) fn report(&self) -> (Local, ChainVersion) {
        let (local, version) = self.replica().report();
        if self.engine.failed().is_some() { (Local::Offline, version) } else { (local, version) }
    }

    /// Feeds an event that somebody waits for.
    async fn ask(self: &Arc<Self>, event: impl FnOnce(Token) -> Event) -> Result<Done, Error> {
        let token = self.tokens.fetch_add(1, Ordering::Relaxed);
        let (answer, answered) = oneshot::channel();
        self.waiting().insert(token, answer);
        self.feed(event(token));
        match answered.await {
            Ok(Ok(done)) => Ok(done),
            Ok(Err(refusal)) => Err(convert::error_out(&refusal)),
            Err(_) => Err(Error::new(Code::Internal, format!("target {} gave no answer", self.id))),
        }
    }

    fn waiting(&self) -> MutexGuard<'_, HashMap<Token, oneshot::Sender<Result<Done, Refusal>>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) async fn update(
        self: &Arc<Self>,
        version: ChainVersion,
        update: Update,
    ) -> Result<Done, Error> {
        self.ask(|token| Event::Update(token, version, update)).await
    }

    pub(crate) async fn forward(
        self: &Arc<Self>,
        version: ChainVersion,
        era: Era,
        forward: Forward,
    ) -> Result<(), Error> {
        self.ask(|token| Event::Forward(token, version, era, forward)).await.map(drop)
    }

    pub(crate) async fn forget(
        self: &Arc<Self>,
        version: ChainVersion,
        era: Era,
        chunk: ChunkId,
    ) -> Result<(), Error> {
        self.ask(|token| Event::Forget(token, version, era, chunk)).await.map(drop)
    }

    pub(crate) async fn sync(
        self: &Arc<Self>,
        version: ChainVersion,
        chunk: ChunkId,
    ) -> Result<(), Error> {
        self.ask(|token| Event::Sync(token, version, chunk)).await.map(drop)
    }

    pub(crate) async fn sync_done(self: &Arc<Self>, version: ChainVersion) -> Result<(), Error> {
        let done = self.ask(|token| Event::SyncDone(token, version)).await.map(drop);
        self.peers.refresh.notify_one();
        done
    }

    /// Handles an event and everything that follows from it at once.
    pub(crate) fn feed(self: &Arc<Self>, event: Event) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            let is_commit = matches!(event, Event::Committed(..));
            let mut effects = Vec::new();
            self.replica().step(now_ms(), event, &mut effects);
            if is_commit {
                self.changed.notify_waiters();
            }
            events.extend(effects.into_iter().filter_map(|effect| self.apply(effect)));
        }
    }

    /// Starts an effect; answers the event that it ends in, if it ended already.
    fn apply(self: &Arc<Self>, effect: Effect) -> Option<Event> {
        let me = Arc::clone(self);
        match effect {
            Effect::Load(chunk, attempt, id) => {
                let known = self.engine.meta(self.id, chunk).map(|info| convert::known(&info, id));
                let known = known.map_err(|error| convert::engine_refusal(&error));
                return Some(Event::Loaded(chunk, attempt, known));
            }
            Effect::Stage(attempt, stage) => {
                let chunk = stage.chunk;
                tokio::spawn(async move {
                    let staged = me.engine.stage(me.id, convert::stage(stage)).await;
                    let staged = staged.map(|s| convert::state(&s));
                    let staged = staged.map_err(|error| convert::engine_refusal(&error));
                    me.feed(Event::Staged(chunk, attempt, staged));
                });
            }
            Effect::Commit(chunk, attempt, identity) => {
                tokio::spawn(async move {
                    let (version, assigned) = (identity.version, identity.assigned);
                    let done = me.engine.commit(me.id, chunk, version, assigned).await;
                    me.feed(Event::Committed(chunk, attempt, ended(done.map(drop))));
                });
            }
            Effect::DropPending(chunk, attempt, version) => {
                tokio::spawn(async move {
                    let done = me.engine.drop_pending(me.id, chunk, version).await;
                    me.feed(Event::Dropped(chunk, attempt, ended(done)));
                });
            }
            Effect::Erase(chunk, attempt) => {
                tokio::spawn(async move {
                    let done = me.erase(chunk).await;
                    me.feed(Event::Dropped(chunk, attempt, ended(done)));
                });
            }
            Effect::Send { chunk, attempt, chain, chain_version, era, to, message, delay_ms } => {
                tokio::spawn(async move {
                    tokio::time::sleep(Duration::from_millis(delay_ms)).await;
                    let link = Link { chain, chain_version, target: to };
                    let sent = me.send(link, era, chunk, message).await;
                    me.feed(Event::Sent(chunk, attempt, sent));
                });
            }
            Effect::Answer(token, result) => {
                let waiter = self.waiting().remove(&token);
                // A caller that is gone does not need the answer.
                drop(waiter.map(|waiter| waiter.send(result)));
            }
            Effect::Refresh => self.peers.refresh.notify_one(),
        }
        None
    }

    async fn send(
        &self,
        link: Link,
        era: Era,
        chunk: ChunkId,
        message: Message,
    ) -> Result<(), Refusal> {
        let to = link.target;
        let sent = match message {
            Message::Forward(forward) => self.send_forward(link, era, forward).await,
            Message::Pending { base } => {
                let forward = self.read_whole(chunk, Which::Pending).await?;
                self.send_forward(link, era, Forward { base, ..forward }).await
            }
            Message::Committed => {
                let forward = self.read_whole(chunk, Which::Committed).await?;
                self.send_forward(link, era, forward).await
            }
            Message::Forget => {
                let request = ForgetChunk { link, era, chunk };
                self.peers.call(to, &request, Bytes::new(), FORWARD_TIMEOUT).await.map(drop)
            }
        };
        sent.map_err(|error| {
            match error.code {
                Code::DivergedChunk | Code::VersionGap => tracing::error!(
                    chunk = %chunk, successor = %to, %error, "replicas disagree: writes stop"),
                Code::ChecksumMismatch => tracing::warn!(
                    chunk = %chunk, successor = %to, %error, "send it again from the disk"),
                _ => tracing::debug!(chunk = %chunk, successor = %to, %error, "send to successor"),
            }
            convert::refusal_in(&error)
        })
    }

    async fn send_forward(&self, link: Link, era: Era, forward: Forward) -> Result<(), Error> {
        let to = link.target;
        let (message, payload) = convert::forward_out(link, era, forward);
        self.peers.call(to, &message, payload, FORWARD_TIMEOUT).await.map(drop)
    }

    /// A forward of everything that one state of a chunk holds, verified while it is read.
    async fn read_whole(&self, chunk: ChunkId, which: Which) -> Result<Forward, Refusal> {
        // Bytes and state from one look: this may be an old attempt, beside which the chunk changes.
        let read = self.engine.read(self.id, chunk, 0, u64::MAX, which).await;
        let (bytes, state) = match read {
            Ok(read) => (read.bytes, read.state),
            Err(engine::Error::NotFound(_)) => (Bytes::new(), self.removed(chunk, which)?),
            Err(error) => return Err(convert::engine_refusal(&error)),
        };
        Ok(Forward {
            chunk,
            id: state.id,
            identity: convert::identity(&state),
            base: None,
            truncate_generation: state.truncate_generation,
            content: Content::Whole(convert::whole(bytes, &state)),
        })
    }

    /// The record of a removal, which has no bytes.
    fn removed(&self, chunk: ChunkId, which: Which) -> Result<engine::ChunkState, Refusal> {
        let info = self.engine.meta(self.id, chunk).map_err(|e| convert::engine_refusal(&e))?;
        let state = match which {
            Which::Committed => info.committed,
            Which::Pending => info.pending,
        };
        let changed = || Refusal::Engine(Code::Internal.number(), format!("{chunk} has changed"));
        state.filter(|s| s.removed).ok_or_else(changed)
    }

    /// Removes every trace of a chunk. A crash in between leaves a record that the next
    /// comparison finds.
    async fn erase(&self, chunk: ChunkId) -> Result<(), engine::Error> {
        let info = self.engine.meta(self.id, chunk)?;
        if let Some(pending) = info.pending {
            self.engine.drop_pending(self.id, chunk, pending.version).await?;
        }
        let Some(committed) = info.committed else { return Ok(()) };
        let mut version = committed.version;
        if !committed.removed {
            version = version.next();
            let stage = engine::Stage {
                chunk,
                version,
                chain_version: committed.chain_version,
                id: committed.id,
                truncate_generation: committed.truncate_generation,
                expected: None,
                // Whatever the generation: this chunk is of a history that the chain does not have.
                op: engine::Op::Replace(engine::Replace {
                    bytes: Bytes::new(),
                    removed: true,
                    checksum: crc32c::crc32c(&[]),
                    duplicates: engine::Duplicates::new(),
                }),
            };
            self.engine.stage(self.id, stage).await?;
            self.engine.commit(self.id, chunk, version, committed.chain_version).await?;
        }
        self.engine.forget_removed(self.id, chunk, version).await
    }

    /// Answers a read, if need be after the chunk's pending update was decided.
    pub(crate) async fn read(&self, request: &Read) -> Result<(ReadDone, Bytes), Error> {
        let refuse = |refusal: Refusal| convert::error_out(&refusal);
        let give_up = tokio::time::Instant::now() + HOLD_MAX;
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            self.replica().admit(now_ms(), request.chain_version).map_err(refuse)?;
            let Some((done, bytes, pending)) = self.read_committed(request).await? else {
                if tokio::time::Instant::now() < give_up {
                    continue;
                }
                return Err(Error::new(Code::ChunkBusy, "the chunk comes and goes"));
            };
            let verdict = self.replica().verdict(
                now_ms(),
                request.chain_version,
                request.chunk,
                pending,
                request.relaxed,
            );
            match verdict {
                Verdict::Answer => return Ok((done, bytes)),
                Verdict::Refuse(refusal) => return Err(refuse(refusal)),
                Verdict::Hold => {
                    if tokio::time::timeout_at(give_up, changed).await.is_err() {
                        let version = pending.unwrap_or(UpdateVersion::new(0));
                        return Err(refuse(Refusal::Dirty(version)));
                    }
                }
            }
        }
    }

    /// Committed bytes, and the version that was pending when they were looked up; `None` if the
    /// chunk was made in between, so that the next lookup finds it.
    async fn read_committed(&self, request: &Read) -> Result<Option<Committed>, Error> {
        let (offset, length) = (u64::from(request.offset), u64::from(request.length));
        let read = self.engine.read(self.id, request.chunk, offset, length, Which::Committed).await;
        match read {
            Ok(read) => {
                // The engine keeps a whole chunk's checksum, made from those of the pages that it
                // has just verified.
                let is_whole = offset == 0 && read.bytes.len() as u64 == read.state.length;
                let done = ReadDone {
                    version: read.state.version,
                    chunk_length: convert::state(&read.state).length,
                    checksum: if is_whole {
                        read.state.checksum
                    } else {
                        crc32c::crc32c(&read.bytes)
                    },
                };
                Ok(Some((done, read.bytes, read.pending)))
            }
            Err(engine::Error::NotFound(_)) => {
                let info = self.engine.meta(self.id, request.chunk);
                let info = info.map_err(|error| convert::engine_error(&error))?;
                if info.committed.as_ref().is_some_and(|c| !c.removed) {
                    return Ok(None);
                }
                let version = info.committed.map_or(UpdateVersion::new(0), |c| c.version);
                let done = ReadDone { version, chunk_length: 0, checksum: 0 };
                Ok(Some((done, Bytes::new(), info.pending.map(|p| p.version))))
            }
            Err(error) => {
                tracing::error!(target_id = %self.id, %error, "read");
                Err(convert::engine_error(&error))
            }
        }
    }
}

/// The answer, its bytes, and the version that was pending.
type Committed = (ReadDone, Bytes, Option<UpdateVersion>);

fn ended(result: Result<(), engine::Error>) -> Result<(), Refusal> {
    result.map_err(|error| {
        tracing::error!(%error, "engine");
        convert::engine_refusal(&error)
    })
}

/// CLOCK_BOOTTIME in milliseconds.
pub(crate) fn now_ms() -> u64 {
    u64::try_from(rpc::clock::boot_time().as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use chain::id::{ChannelId, ClientId, InodeId, NodeId, UpdateId};

    use super::*;
    use crate::engine::{IoMode, Op, Options, Stage};

    #[tokio::test]
    async fn a_whole_chunk_is_sent_as_one_state_has_it() {
        let dir = tempfile::tempdir().unwrap();
        let engine = Engine::open(&Options {
            dir: dir.path().to_owned(),
            cluster: "train".into(),
            node: NodeId::new(10_001),
            io: IoMode::Auto,
            capacity_bytes: Some(1 << 20),
        });
        let (engine, id) = (engine.unwrap(), NodeId::new(10_001).target(0, 0));
        let peers = Arc::default();
        let target = Target::open(id, ChainId::new(1), None, engine.clone(), peers).unwrap();
        let chunk = ChunkId { file: InodeId::new(7), index: 0 };
        let write = |bytes: Vec<u8>| Op::Write {
            offset: 0,
            checksum: crc32c::crc32c(&bytes),
            bytes: bytes.into(),
        };
        let ops =
            [write(vec![1; 9_000]), Op::Truncate { length: 0 }, write(vec![3; 70_000]), Op::Remove];
        let none = target.read_whole(chunk, Which::Committed).await;
        assert!(matches!(none, Err(Refusal::Engine(..))), "{none:?}");
        for (raw, op) in (1..).zip(ops) {
            let expected = match &op {
                Op::Write { bytes, .. } => (bytes.clone(), false),
                op => (Bytes::new(), matches!(op, Op::Remove)),
            };
            let (client, channel) = (ClientId::new(1), ChannelId::new(0));
            let stage = Stage {
                chunk,
                version: UpdateVersion::new(raw),
                chain_version: ChainVersion::new(1),
                id: UpdateId { client, channel, seq: raw },
                truncate_generation: raw,
                expected: None,
                op,
            };
            let state = engine.stage(id, stage).await.unwrap();
            let pending = target.read_whole(chunk, Which::Pending).await.unwrap();
            engine.commit(id, chunk, state.version, state.chain_version).await.unwrap();
            let gone = target.read_whole(chunk, Which::Pending).await;
            assert!(matches!(gone, Err(Refusal::Engine(..))), "{gone:?}");
            assert_eq!(target.read_whole(chunk, Which::Committed).await.unwrap(), pending);
            assert_eq!(pending.identity, convert::identity(&state));
            let Content::Whole(whole) = pending.content else { panic!("not whole") };
            assert_eq!((whole.bytes, whole.removed), expected);
            assert_eq!(whole.duplicates.len(), 1);
        }
    }
}

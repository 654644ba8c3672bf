//! What one target does for its chain: the protocol, as a state machine without IO or clock.
//!
//! Per chunk there is one lane of jobs; the first one is under way. A job loads what the engine
//! knows, decides, and goes on with each event that an effect ends in. A new version of the chain
//! starts the first job again. The rules cited here are those of `PROTOCOL.md`.

mod job;
mod types;

use std::collections::BTreeMap;

use crate::id::{ChainVersion, ChunkId, TargetId, UpdateVersion};
use crate::table::{Chain, Local, PublicState};

use job::{Job, Lane};
pub use types::{
    Applied, Change, Content, Done, Effect, Era, Event, Forward, Identity, Known, Message, Refusal,
    Stage, State, Token, Update, Whole,
};

/// Jobs that one chunk may queue: a client has few lanes, and answers come in milliseconds.
pub const CHUNK_QUEUE_MAX: usize = 64;
/// Jobs that one target may queue: bounds the memory that waiting payloads take.
pub const TARGET_QUEUE_MAX: usize = 1024;

/// Whether bytes that were read may leave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// They may.
    Answer,
    /// Not yet: an update that another target may have committed was pending here, and nobody
    /// further down could tell. Look up again when it is committed.
    Hold,
    /// They may not.
    Refuse(Refusal),
}

/// One target of one chain.
#[derive(Debug)]
pub struct Replica {
    id: TargetId,
    chain: Option<Chain>,
    version: ChainVersion,
    lease_until_ms: u64,
    synced: Option<ChainVersion>,
    /// What is sent now is sent in this era.
    era: Era,
    /// The newest era that was heard of the predecessor under the present chain version, by a
    /// target that syncs.
    heard: Era,
    /// Chunks with a pending state in the engine, and its version.
    pending: BTreeMap<ChunkId, UpdateVersion>,
    /// Those that were pending when the chain got its present version. They stay here after their
    /// commit: a read that looked them up before it is judged after it.
    inherited: BTreeMap<ChunkId, UpdateVersion>,
    lanes: BTreeMap<ChunkId, Lane>,
    queued: usize,
    attempts: u64,
}

impl Replica {
    /// A target whose disk was opened `incarnation` times and holds `version`
    /// ([`ChainVersion::NONE`] for an empty one) and the chunks `pending` with a pending state. It
    /// serves nobody before its first chain and lease.
    #[must_use]
    pub fn new(
        id: TargetId,
        incarnation: u64,
        version: ChainVersion,
        pending: BTreeMap<ChunkId, UpdateVersion>,
    ) -> Self {
        Self {
            id,
            chain: None,
            version,
            lease_until_ms: 0,
            synced: None,
            era: Era { incarnation, given_up: 0 },
            heard: Era::default(),
            inherited: pending.clone(),
            pending,
            lanes: BTreeMap::new(),
            queued: 0,
            attempts: 0,
        }
    }

    /// Whether `chain` is news: newer than what is known, or the first since the start.
    ///
    /// A disk without a copy takes up no version that would make it count as a complete one (R5).
    #[must_use]
    pub fn wants(&self, chain: &Chain) -> bool {
        let Some(state) = chain.state_of(self.id) else { return false };
        let is_copy = matches!(state, PublicState::Serving | PublicState::LastServing);
        if self.version == ChainVersion::NONE && is_copy && chain.version != ChainVersion::NEWBORN {
            return false;
        }
        let known = self.chain.as_ref().map(|c| c.version);
        chain.is_valid() && chain.version >= self.version && known != Some(chain.version)
    }

    /// The chain as this target knows it.
    #[must_use]
    pub const fn chain(&self) -> Option<&Chain> {
        self.chain.as_ref()
    }

    /// What to report to the manager.
    #[must_use]
    pub fn report(&self) -> (Local, ChainVersion) {
        let is_up_to_date = self.synced.is_some() && self.synced == self.chain_version();
        (if is_up_to_date { Local::UpToDate } else { Local::Online }, self.version)
    }

    /// Extends the lease: never shortens it, because grants may come out of order.
    pub fn renew(&mut self, until_ms: u64) {
        self.lease_until_ms = self.lease_until_ms.max(until_ms);
    }

    /// Gives the lease up: a clean stop answers nobody afterwards.
    pub const fn surrender(&mut self) {
        self.lease_until_ms = 0;
    }

    /// Whether nothing is under way.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.lanes.is_empty()
    }

    /// Number of chunks with a pending state, and of queued jobs.
    #[must_use]
    pub fn load(&self) -> (usize, usize) {
        (self.pending.len(), self.queued)
    }

    /// The target that this one, as the last serving one, has to bring up to date.
    #[must_use]
    pub fn sync_to(&self) -> Option<(TargetId, ChainVersion)> {
        let chain = self.chain.as_ref()?;
        let to = chain.syncing().filter(|_| chain.tail() == Some(self.id))?;
        Some((to, chain.version))
    }

    /// Whether a client's request under `chain_version` may be begun at `now_ms`.
    ///
    /// # Errors
    /// W1, R3, or not serving.
    pub fn admit(&self, now_ms: u64, chain_version: ChainVersion) -> Result<(), Refusal> {
        self.fence(chain_version)?;
        if self.state() != Some(PublicState::Serving) {
            return Err(Refusal::NotServing);
        }
        if now_ms >= self.lease_until_ms {
            return Err(Refusal::NoLease);
        }
        Ok(())
    }

    /// Decides over a read after its bytes are in memory. `pending` is the chunk's pending version
    /// at the moment when the committed bytes were looked up.
    #[must_use]
    pub fn verdict(
        &self,
        now_ms: u64,
        chain_version: ChainVersion,
        chunk: ChunkId,
        pending: Option<UpdateVersion>,
        relaxed: bool,
    ) -> Verdict {
        // R3: only now it is known that the bytes were current while the lease held.
        if let Err(refusal) = self.admit(now_ms, chain_version) {
            return Verdict::Refuse(refusal);
        }
        let (Some(pending), Some(chain)) = (pending, self.chain.as_ref()) else {
            return Verdict::Answer;
        };
        if relaxed {
            return Verdict::Answer;
        }
        if chain.tail() != Some(self.id) {
            return Verdict::Refuse(Refusal::Dirty(pending)); // R2
        }
        // R4: what was pending under an older version may have been read from the old tail; what
        // a syncing successor has may be read from it as soon as it is promoted. That an inherited
        // update is committed by now makes the bytes old, not certain.
        let is_inherited = self.inherited.get(&chunk).is_some_and(|last| pending <= *last);
        let is_uncertain = is_inherited || chain.syncing().is_some();
        if is_uncertain { Verdict::Hold } else { Verdict::Answer }
    }

    /// Handles one event. `now_ms` is CLOCK_BOOTTIME.
    pub fn step(&mut self, now_ms: u64, event: Event, out: &mut Vec<Effect>) {
        match event {
            Event::Chain(chain) => self.take_chain(chain, out),
            Event::Update(token, version, update) => {
                self.take_update(now_ms, token, version, update, out);
            }
            Event::Forward(token, version, era, forward) => {
                self.take_forward(token, version, era, forward, out);
            }
            Event::Sync(token, version, chunk) => self.take_sync(token, version, chunk, out),
            Event::Forget(token, version, era, chunk) => {
                self.take_forget(token, version, era, chunk, out);
            }
            Event::SyncDone(token, version) => out.push(self.take_sync_done(token, version)),
            Event::Loaded(chunk, attempt, result) => self.loaded(chunk, attempt, result, out),
            Event::Staged(chunk, attempt, result) => self.staged(chunk, attempt, result, out),
            Event::Committed(chunk, attempt, result) => self.committed(chunk, attempt, result, out),
            Event::Dropped(chunk, attempt, result) => self.dropped(chunk, attempt, result, out),
            Event::Sent(chunk, attempt, result) => self.sent(chunk, attempt, result, out),
        }
        let queued: usize = self.lanes.values().map(Lane::len).sum();
        debug_assert_eq!(self.queued, queued, "jobs are counted");
    }

    fn chain_version(&self) -> Option<ChainVersion> {
        self.chain.as_ref().map(|c| c.version)
    }

    fn state(&self) -> Option<PublicState> {
        self.chain.as_ref()?.state_of(self.id)
    }

    fn successor(&self) -> Option<TargetId> {
        self.chain.as_ref()?.successor(self.id)
    }

    /// W1.
    fn fence(&self, asked: ChainVersion) -> Result<(), Refusal> {
        match self.chain_version() {
            Some(version) if version == asked => Ok(()),
            _ => Err(Refusal::StaleChain(self.chain_version().unwrap_or(ChainVersion::NONE))),
        }
    }

    fn take_chain(&mut self, chain: Chain, out: &mut Vec<Effect>) {
        if !self.wants(&chain) {
            return;
        }
        assert!(chain.version >= self.version, "W1: a chain version never decreases");
        self.version = chain.version;
        self.chain = Some(chain);
        // Another predecessor counts its eras by itself; the old one's messages are fenced (W1).
        self.heard = Era::default();
        self.inherited = self.pending.clone();
        let busy: Vec<ChunkId> = self.lanes.keys().copied().collect();
        let idle: Vec<ChunkId> =
            self.pending.keys().filter(|c| !self.lanes.contains_key(c)).copied().collect();
        for chunk in busy {
            self.restart(chunk, out);
        }
        // W8: a new head drives on what the old one began, a new tail commits it. A target that
        // left the write order drives nothing: sync will overwrite what it has.
        if self.state() == Some(PublicState::Serving) {
            for chunk in idle {
                self.enqueue(Job::redrive(chunk), out);
            }
        }
    }

    fn take_update(
        &mut self,
        now_ms: u64,
        token: Token,
        version: ChainVersion,
        update: Update,
        out: &mut Vec<Effect>,
    ) {
        if self.chain_version().is_none_or(|own| version > own) {
            out.push(Effect::Refresh);
        }
        let admitted = self.admit(now_ms, version).and_then(|()| {
            let is_head = self.chain.as_ref().and_then(Chain::head) == Some(self.id);
            if is_head { Ok(()) } else { Err(Refusal::NotHead) }
        });
        match admitted {
            Ok(()) => self.enqueue(Job::update(token, update), out),
            Err(refusal) => out.push(Effect::Answer(token, Err(refusal))),
        }
    }

    fn take_forward(
        &mut self,
        token: Token,
        version: ChainVersion,
        era: Era,
        forward: Forward,
        out: &mut Vec<Effect>,
    ) {
        if self.chain_version().is_none_or(|own| version > own) {
            out.push(Effect::Refresh);
        }
        let admitted = self.fence(version).and_then(|()| match self.state() {
            // W2: it takes only what follows its content.
            Some(PublicState::Serving) => Ok(()),
            Some(PublicState::Syncing) => self.hear(era),
            _ => Err(Refusal::NotServing),
        });
        match admitted {
            Ok(()) => self.enqueue(Job::forward(token, forward), out),
            Err(refusal) => out.push(Effect::Answer(token, Err(refusal))),
        }
    }

    fn take_sync(
        &mut self,
        token: Token,
        version: ChainVersion,
        chunk: ChunkId,
        out: &mut Vec<Effect>,
    ) {
        let is_tail = self.chain.as_ref().and_then(Chain::tail) == Some(self.id);
        match self.fence(version) {
            Ok(()) if is_tail => self.enqueue(Job::sync(token, chunk), out),
            Ok(()) => out.push(Effect::Answer(token, Err(Refusal::NotServing))),
            Err(refusal) => out.push(Effect::Answer(token, Err(refusal))),
        }
    }

    fn take_forget(
        &mut self,
        token: Token,
        version: ChainVersion,
        era: Era,
        chunk: ChunkId,
        out: &mut Vec<Effect>,
    ) {
        let admitted = self.fence(version).and_then(|()| match self.state() {
            Some(PublicState::Syncing) => self.hear(era),
            _ => Err(Refusal::NotServing),
        });
        match admitted {
            Ok(()) => self.enqueue(Job::forget(token, chunk), out),
            Err(refusal) => out.push(Effect::Answer(token, Err(refusal))),
        }
    }

    /// S7: a message that the predecessor had given up before it sent what was heard already would
    /// take back what came in between.
    fn hear(&mut self, era: Era) -> Result<(), Refusal> {
        if era < self.heard {
            return Err(Refusal::Late);
        }
        self.heard = era;
        Ok(())
    }

    /// Y1: only the predecessor's word under the present version counts.
    fn take_sync_done(&mut self, token: Token, version: ChainVersion) -> Effect {
        if let Err(refusal) = self.fence(version) {
            return Effect::Answer(token, Err(refusal));
        }
        if self.state() != Some(PublicState::Syncing) {
            return Effect::Answer(token, Err(Refusal::NotServing));
        }
        self.synced = Some(version);
        Effect::Answer(token, Ok(Done { version: UpdateVersion::new(0), length: 0 }))
    }
}

#[cfg(test)]
mod tests;

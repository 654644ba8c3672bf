//! The jobs of one chunk, one after the other, and how each of them goes on.

use std::collections::VecDeque;

use super::types::{
    Change, Content, Done, Effect, Forward, Identity, Known, Message, Refusal, Stage, State, Token,
    Update,
};
use super::{CHUNK_QUEUE_MAX, Replica, TARGET_QUEUE_MAX};
use crate::id::{ChainVersion, ChunkId, UpdateId, UpdateVersion};
use crate::table::{Chain, PublicState};

/// Before a successor that is behind is asked again: it fetches the new chain meanwhile.
const RESEND_STALE_MS: u64 = 20;
/// Before a successor that could not answer is asked again.
const RESEND_FAILED_MS: u64 = 100;
/// Before a successor that contradicts is asked again: only a human or a new chain ends it.
const RESEND_CONFLICT_MS: u64 = 1_000;

/// What to do with a chunk.
#[derive(Clone, Debug)]
enum Work {
    Update(Update),
    Forward(Forward),
    Redrive,
    Sync,
    Forget,
}

#[derive(Clone, Debug)]
pub(super) struct Job {
    token: Option<Token>,
    chunk: ChunkId,
    work: Work,
    /// The chain version that fenced it; set when it is queued.
    version: ChainVersion,
}

impl Job {
    fn new(token: Option<Token>, chunk: ChunkId, work: Work) -> Self {
        Self { token, chunk, work, version: ChainVersion::NONE }
    }

    pub(super) fn update(token: Token, update: Update) -> Self {
        Self::new(Some(token), update.chunk, Work::Update(update))
    }

    pub(super) fn forward(token: Token, forward: Forward) -> Self {
        Self::new(Some(token), forward.chunk, Work::Forward(forward))
    }

    pub(super) fn sync(token: Token, chunk: ChunkId) -> Self {
        Self::new(Some(token), chunk, Work::Sync)
    }

    pub(super) fn forget(token: Token, chunk: ChunkId) -> Self {
        Self::new(Some(token), chunk, Work::Forget)
    }

    pub(super) fn redrive(chunk: ChunkId) -> Self {
        Self::new(None, chunk, Work::Redrive)
    }

    const fn id(&self) -> Option<UpdateId> {
        match &self.work {
            Work::Update(update) => Some(update.id),
            Work::Forward(forward) => Some(forward.id),
            Work::Redrive | Work::Sync | Work::Forget => None,
        }
    }

    /// What the successor is told of the pending state that this job made or found.
    fn message(&self, state: &State, base: Option<Identity>) -> Message {
        let forward = |generation, change: &Change| {
            Message::Forward(Forward {
                chunk: self.chunk,
                id: state.id,
                identity: state.identity,
                base,
                truncate_generation: generation,
                content: Content::Change(change.clone()),
            })
        };
        match &self.work {
            Work::Update(update) => forward(update.truncate_generation, &update.change),
            Work::Forward(Forward {
                content: Content::Change(change),
                truncate_generation,
                ..
            }) => forward(*truncate_generation, change),
            Work::Forward(_) | Work::Redrive | Work::Sync | Work::Forget => {
                Message::Pending { base }
            }
        }
    }
}

/// How far the first job is.
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "one for each busy chunk, most of them sending")]
enum Phase {
    Loading,
    Dropping,
    Staging { base: Option<Identity> },
    Sending { state: Option<State>, base: Option<Identity>, message: Message },
    Committing { state: State },
}

/// The jobs of one chunk.
#[derive(Debug)]
pub(super) struct Lane {
    jobs: VecDeque<Job>,
    attempt: u64,
    phase: Phase,
    /// The chain changed while the engine was at work: begin again when it is done.
    restart: bool,
}

impl Lane {
    pub(super) fn len(&self) -> usize {
        self.jobs.len()
    }

    const fn is_engine_at_work(&self) -> bool {
        matches!(self.phase, Phase::Dropping | Phase::Staging { .. } | Phase::Committing { .. })
    }
}

/// What a job does next, decided from what the engine knows.
enum Next {
    Finish(Result<Done, Refusal>),
    Stage(Stage, Option<Identity>),
    Drive(State, Option<Identity>),
    Send(Message),
    DropPending(UpdateVersion),
    Erase,
    RedriveFirst,
}

fn nothing_done() -> Done {
    Done { version: UpdateVersion::new(0), length: 0 }
}

fn done(state: &State) -> Done {
    Done { version: state.identity.version, length: state.length }
}

impl Replica {
    pub(super) fn enqueue(&mut self, mut job: Job, out: &mut Vec<Effect>) {
        job.version = self.version;
        let chunk = job.chunk;
        let waiting = self.lanes.get(&chunk).map_or(0, Lane::len);
        if waiting >= CHUNK_QUEUE_MAX || (self.queued >= TARGET_QUEUE_MAX && job.token.is_some()) {
            out.extend(job.token.map(|token| Effect::Answer(token, Err(Refusal::Busy))));
            return;
        }
        self.queued += 1;
        if let Some(lane) = self.lanes.get_mut(&chunk) {
            lane.jobs.push_back(job);
            return;
        }
        let jobs = VecDeque::from([job]);
        let lane = Lane { jobs, attempt: 0, phase: Phase::Loading, restart: false };
        self.lanes.insert(chunk, lane);
        self.begin(chunk, out);
    }

    /// Begins the first job of a chunk, from the start.
    fn begin(&mut self, chunk: ChunkId, out: &mut Vec<Effect>) {
        self.attempts += 1;
        let Some(lane) = self.lanes.get_mut(&chunk) else { return };
        let Some(job) = lane.jobs.front() else {
            self.lanes.remove(&chunk);
            return;
        };
        out.push(Effect::Load(chunk, self.attempts, job.id()));
        lane.attempt = self.attempts;
        lane.phase = Phase::Loading;
        lane.restart = false;
    }

    fn finish(&mut self, chunk: ChunkId, result: Result<Done, Refusal>, out: &mut Vec<Effect>) {
        let job = self.lanes.get_mut(&chunk).and_then(|lane| lane.jobs.pop_front());
        if let Some(job) = job {
            self.queued -= 1;
            out.extend(job.token.map(|token| Effect::Answer(token, result)));
        }
        self.begin(chunk, out);
    }

    /// The chain changed: jobs that the old version fenced are refused, the others begin again.
    pub(super) fn restart(&mut self, chunk: ChunkId, out: &mut Vec<Effect>) {
        let is_serving = self.state() == Some(PublicState::Serving);
        let is_head = is_serving && self.chain.as_ref().and_then(Chain::head) == Some(self.id);
        let Some(lane) = self.lanes.get_mut(&chunk) else { return };
        if lane.is_engine_at_work() {
            lane.restart = true;
            return;
        }
        let version = self.version;
        let before = lane.jobs.len();
        lane.jobs.retain(|job| {
            let keep = match job.work {
                Work::Update(_) => is_head,
                Work::Redrive => is_serving,
                Work::Forward(_) | Work::Sync | Work::Forget => job.version == version,
            };
            if !keep {
                let stale = |token| Effect::Answer(token, Err(Refusal::StaleChain(version)));
                out.extend(job.token.map(stale));
            }
            keep
        });
        self.queued -= before - lane.jobs.len();
        // W8: whatever the queue holds, what is pending goes first.
        let is_driven = matches!(lane.jobs.front(), Some(Job { work: Work::Redrive, .. }));
        if is_serving && self.pending.contains_key(&chunk) && !is_driven {
            lane.jobs.push_front(Job { version, ..Job::redrive(chunk) });
            self.queued += 1;
        }
        self.begin(chunk, out);
    }

    /// The lane whose first job started the effect that ended; `None` for an effect of an attempt
    /// that a new chain version has ended.
    fn current(&mut self, chunk: ChunkId, attempt: u64) -> Option<&mut Lane> {
        self.lanes.get_mut(&chunk).filter(|lane| lane.attempt == attempt)
    }

    /// Whether the job begins again because the chain changed meanwhile.
    fn restarts(&mut self, chunk: ChunkId, out: &mut Vec<Effect>) -> bool {
        let Some(lane) = self.lanes.get_mut(&chunk).filter(|lane| lane.restart) else {
            return false;
        };
        lane.phase = Phase::Loading;
        if let Some(version) = self.pending.get(&chunk) {
            self.inherited.insert(chunk, *version);
        }
        self.restart(chunk, out);
        true
    }

    pub(super) fn loaded(
        &mut self,
        chunk: ChunkId,
        attempt: u64,
        result: Result<Known, Refusal>,
        out: &mut Vec<Effect>,
    ) {
        let Some(lane) = self.current(chunk, attempt) else { return };
        let Some(job) = lane.jobs.front().cloned() else { return };
        let known = match result {
            Ok(known) => known,
            Err(refusal) => return self.finish(chunk, Err(refusal), out),
        };
        match &known.pending {
            Some(pending) => self.pending.insert(chunk, pending.identity.version),
            None => self.pending.remove(&chunk),
        };
        let next = match &job.work {
            Work::Update(update) => self.decide_update(update, &known),
            Work::Forward(forward) => self.decide_forward(forward, &known),
            Work::Redrive => match known.pending {
                Some(pending) => Next::Drive(pending, identity(known.committed.as_ref())),
                None => Next::Finish(Ok(nothing_done())),
            },
            Work::Sync => match (known.committed, known.pending) {
                (Some(_), _) => Next::Send(Message::Committed),
                // The first update of the chunk: driven, it brings the chunk along.
                (None, Some(_)) => Next::RedriveFirst,
                (None, None) => Next::Send(Message::Forget),
            },
            Work::Forget => match (known.committed, known.pending) {
                (None, None) => Next::Finish(Ok(nothing_done())),
                _ => Next::Erase,
            },
        };
        self.go_on(&job, next, out);
    }

    fn go_on(&mut self, job: &Job, next: Next, out: &mut Vec<Effect>) {
        let chunk = job.chunk;
        let Some(lane) = self.lanes.get_mut(&chunk) else { return };
        let attempt = lane.attempt;
        match next {
            Next::Finish(result) => self.finish(chunk, result, out),
            Next::Stage(stage, base) => {
                lane.phase = Phase::Staging { base };
                out.push(Effect::Stage(attempt, stage));
            }
            Next::Drive(state, base) => self.drive(job, state, base, out),
            Next::Send(message) => self.send(chunk, None, None, message, 0, out),
            Next::DropPending(version) => {
                lane.phase = Phase::Dropping;
                out.push(Effect::DropPending(chunk, attempt, version));
            }
            Next::Erase => {
                lane.phase = Phase::Dropping;
                out.push(Effect::Erase(chunk, attempt));
            }
            Next::RedriveFirst => {
                lane.jobs.push_front(Job { version: self.version, ..Job::redrive(chunk) });
                self.queued += 1;
                self.begin(chunk, out);
            }
        }
    }

    /// W2, W7: the head's part.
    fn decide_update(&self, update: &Update, known: &Known) -> Next {
        if let Some(applied) = known.applied.filter(|a| a.seq >= update.id.seq) {
            return Next::Finish(if applied.seq == update.id.seq {
                Ok(Done { version: applied.version, length: applied.length })
            } else {
                Err(Refusal::StaleUpdate)
            });
        }
        let base = identity(known.committed.as_ref());
        match known.pending {
            Some(pending) if pending.id == update.id => return Next::Drive(pending, base),
            Some(_) => return Next::RedriveFirst,
            None => {}
        }
        if known.committed.is_none() && update.change == Change::Remove {
            return Next::Finish(Ok(nothing_done()));
        }
        let committed = base.map_or(UpdateVersion::new(0), |b| b.version);
        Next::Stage(
            Stage {
                chunk: update.chunk,
                id: update.id,
                assigned: self.version,
                version: committed.next(),
                truncate_generation: update.truncate_generation,
                checksum: None,
                content: Content::Change(update.change.clone()),
            },
            base,
        )
    }

    /// W2: the part of everybody behind the head.
    fn decide_forward(&self, forward: &Forward, known: &Known) -> Next {
        let committed = identity(known.committed.as_ref());
        let pending = identity(known.pending.as_ref());
        let is_syncing = self.state() == Some(PublicState::Syncing);
        if let Some(own) = committed.filter(|c| c.is_same_update(&forward.identity)) {
            return match known.pending {
                Some(pending) if is_syncing => Next::DropPending(pending.identity.version),
                _ if own.checksum != forward.identity.checksum => conflict(own),
                _ => Next::Finish(Ok(nothing_done())),
            };
        }
        if let Some(state) = known.pending.filter(|p| p.identity.is_same_update(&forward.identity))
        {
            if state.identity == forward.identity {
                let same_base = committed == forward.base || is_syncing;
                return if same_base { Next::Drive(state, committed) } else { gap(committed) };
            }
            // W5: it would be two contents of one version. A syncing target takes the whole chunk.
            if !is_syncing {
                return conflict(state.identity);
            }
        }
        let stage = Next::Stage(staged(forward), committed);
        if committed == forward.base && pending.is_none() {
            return stage;
        }
        if is_syncing {
            // N5: a replace may overwrite anything, and only here.
            return match forward.content {
                Content::Change(_) => Next::Finish(Err(Refusal::NeedWhole)),
                Content::Whole(_) => {
                    let newest = [committed, pending].into_iter().flatten().map(|i| i.assigned);
                    let is_foreign = newest.max() > Some(forward.identity.assigned);
                    if is_foreign { Next::Erase } else { stage }
                }
            };
        }
        let Some(own) = committed else { return gap(committed) };
        let is_superseded = own.version > forward.identity.version
            && known.applied.is_some_and(|a| a.seq >= forward.id.seq);
        match pending {
            _ if is_superseded => Next::Finish(Ok(nothing_done())),
            Some(pending) => conflict(pending),
            None if own.version < forward.identity.version => gap(committed),
            None => conflict(own),
        }
    }

    /// W3: forward what is durable here, or commit it if nobody comes behind.
    fn drive(&mut self, job: &Job, state: State, base: Option<Identity>, out: &mut Vec<Effect>) {
        if self.successor().is_some() {
            let message = job.message(&state, base);
            self.send(job.chunk, Some(state), base, message, 0, out);
        } else {
            self.commit(job.chunk, state, out);
        }
    }

    fn send(
        &mut self,
        chunk: ChunkId,
        state: Option<State>,
        base: Option<Identity>,
        message: Message,
        delay_ms: u64,
        out: &mut Vec<Effect>,
    ) {
        let (Some(to), Some(chain)) = (self.successor(), self.chain.as_ref()) else {
            // Only a sync job gets here, and only when its successor has just left.
            return self.finish(chunk, Err(Refusal::StaleChain(self.version)), out);
        };
        let (chain, chain_version, era) = (chain.id, chain.version, self.era);
        let Some(lane) = self.lanes.get_mut(&chunk) else { return };
        let attempt = lane.attempt;
        lane.phase = Phase::Sending { state, base, message: message.clone() };
        out.push(Effect::Send { chunk, attempt, chain, chain_version, era, to, message, delay_ms });
    }

    fn commit(&mut self, chunk: ChunkId, state: State, out: &mut Vec<Effect>) {
        let Some(lane) = self.lanes.get_mut(&chunk) else { return };
        lane.phase = Phase::Committing { state };
        out.push(Effect::Commit(chunk, lane.attempt, state.identity));
    }

    pub(super) fn staged(
        &mut self,
        chunk: ChunkId,
        attempt: u64,
        result: Result<State, Refusal>,
        out: &mut Vec<Effect>,
    ) {
        let Some(lane) = self.current(chunk, attempt) else { return };
        let Phase::Staging { base } = lane.phase else { return };
        let Some(job) = lane.jobs.front().cloned() else { return };
        if let Ok(state) = &result {
            self.pending.insert(chunk, state.identity.version);
        }
        if self.restarts(chunk, out) {
            return;
        }
        let state = match result {
            Ok(state) => state,
            Err(refusal) => return self.finish(chunk, Err(refusal), out),
        };
        if let Some(base) = base.filter(|_| !matches!(job.work, Work::Forward(_))) {
            assert!(state.identity.version > base.version, "W2: versions grow");
        }
        self.drive(&job, state, base, out);
    }

    pub(super) fn sent(
        &mut self,
        chunk: ChunkId,
        attempt: u64,
        result: Result<(), Refusal>,
        out: &mut Vec<Effect>,
    ) {
        let own = self.version;
        let Some(lane) = self.current(chunk, attempt) else { return };
        let Phase::Sending { state, base, message } = lane.phase.clone() else { return };
        if matches!(result, Err(Refusal::Unreachable(_))) {
            // S7: it may still arrive, behind what is sent from now on.
            self.era.given_up += 1;
        }
        let (state, refusal) = match (state, result) {
            // W3: acknowledged under the present version: an older attempt is not current.
            (Some(state), Ok(())) => return self.commit(chunk, state, out),
            // S7: what was given up was of another chunk, perhaps.
            (state, Err(Refusal::Late)) => {
                return self.send(chunk, state, base, message, RESEND_STALE_MS, out);
            }
            (None, result) => return self.finish(chunk, result.map(|()| nothing_done()), out),
            (Some(state), Err(refusal)) => (state, refusal),
        };
        let (message, delay_ms) = match refusal {
            Refusal::NeedWhole => (Message::Pending { base }, 0),
            // N10: it may be the bytes in memory that are damaged; those on the disk are verified.
            Refusal::Damaged => (Message::Pending { base }, RESEND_FAILED_MS),
            Refusal::StaleChain(theirs) => {
                if theirs > own {
                    out.push(Effect::Refresh);
                }
                (message, RESEND_STALE_MS)
            }
            Refusal::Gap(_) | Refusal::Conflict(_) => (message, RESEND_CONFLICT_MS),
            _ => (message, RESEND_FAILED_MS),
        };
        self.send(chunk, Some(state), base, message, delay_ms, out);
    }

    pub(super) fn committed(
        &mut self,
        chunk: ChunkId,
        attempt: u64,
        result: Result<(), Refusal>,
        out: &mut Vec<Effect>,
    ) {
        let Some(lane) = self.current(chunk, attempt) else { return };
        let Phase::Committing { state } = lane.phase else { return };
        let restart = lane.restart;
        if result.is_ok() {
            self.pending.remove(&chunk);
            // What is committed stays so under any chain: the caller may know.
            self.finish(chunk, Ok(done(&state)), out);
            if restart {
                self.restart(chunk, out);
            }
        } else if !self.restarts(chunk, out) {
            self.finish(chunk, result.map(|()| nothing_done()), out);
        }
    }

    pub(super) fn dropped(
        &mut self,
        chunk: ChunkId,
        attempt: u64,
        result: Result<(), Refusal>,
        out: &mut Vec<Effect>,
    ) {
        let Some(lane) = self.current(chunk, attempt) else { return };
        if !matches!(lane.phase, Phase::Dropping) {
            return;
        }
        if self.restarts(chunk, out) {
            return;
        }
        match result {
            Ok(()) => self.begin(chunk, out),
            Err(refusal) => self.finish(chunk, Err(refusal), out),
        }
    }
}

fn identity(state: Option<&State>) -> Option<Identity> {
    state.map(|s| s.identity)
}

fn staged(forward: &Forward) -> Stage {
    Stage {
        chunk: forward.chunk,
        id: forward.id,
        assigned: forward.identity.assigned,
        version: forward.identity.version,
        truncate_generation: forward.truncate_generation,
        checksum: Some(forward.identity.checksum),
        content: forward.content.clone(),
    }
}

fn gap(committed: Option<Identity>) -> Next {
    Next::Finish(Err(Refusal::Gap(committed.map_or(UpdateVersion::new(0), |c| c.version))))
}

fn conflict(own: Identity) -> Next {
    Next::Finish(Err(Refusal::Conflict(own.version)))
}

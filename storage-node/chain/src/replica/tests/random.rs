//! Random histories of a whole chain: a manager with leases, three machines that die, lose their
//! last commits, are cut off or wiped, engines and messages that take their time (those too that
//! their sender has given up), clients that repeat themselves. What must hold of any of them is asserted while it runs, and once more when
//! everything is well again and at rest.

use std::collections::BTreeSet;

use super::*;
use crate::table::{Report, Reports, Revive, next};

const NODES: [u64; 3] = [1, 2, 3];
const LEASE: u64 = 60;
const WAIT: u64 = 61;
const CLIENTS: usize = 3;

/// A disk with the process on it, if there is one.
#[derive(Default)]
struct Machine {
    disk: Disk,
    version: ChainVersion,
    /// Commits that a crash may undo: what was committed before, oldest first.
    undo: Vec<(ChunkId, Option<Stored>)>,
    process: Option<Process>,
    /// Names the process.
    incarnation: u64,
    /// How often the disk was opened: an empty one begins anew.
    opened: u64,
    is_cut: bool,
}

#[derive(Debug)]
struct Process {
    replica: Replica,
    /// What the engine was asked for and has not done.
    work: Vec<Effect>,
    /// The answer to its last heartbeat, on its way.
    grant: Option<(u64, Chain)>,
}

enum Caller {
    Client(usize),
    Forward(u64),
    Sync,
    Nobody,
}

/// A request from one replica to another, until it is answered or given up.
struct Request {
    from: u64,
    incarnation: u64,
    chunk: ChunkId,
    attempt: u64,
}

#[derive(Debug)]
enum Mail {
    /// To a process: its connections end with it, and what was sent on them is lost.
    Go {
        request: u64,
        to: (u64, u64),
        version: ChainVersion,
        era: Era,
        body: Body,
    },
    Back {
        request: u64,
        result: Result<(), Refusal>,
    },
}

struct Job {
    from: (u64, u64),
    to: (u64, u64),
    version: ChainVersion,
    left: BTreeSet<Token>,
    is_failed: bool,
}

/// A read between lookup and verdict.
#[derive(Clone, Copy)]
struct Reading {
    node: (u64, u64),
    version: ChainVersion,
    chunk: ChunkId,
    found: Option<Identity>,
    pending: Option<UpdateVersion>,
    /// What had been shown to somebody when it began.
    floor: u64,
}

#[derive(Debug)]
struct Op {
    update: Update,
    token: Option<Token>,
}

struct Sim {
    now: u64,
    machines: BTreeMap<u64, Machine>,
    published: Vec<Chain>,
    heard: BTreeMap<u64, Report>,
    started: u64,
    mail: Vec<Mail>,
    /// What was given up and is still on its way.
    late: Vec<Mail>,
    requests: BTreeMap<u64, Request>,
    callers: BTreeMap<Token, (u64, Caller)>,
    tokens: Token,
    job: Option<Job>,
    ops: Vec<Option<Op>>,
    seq: u64,
    changes: BTreeMap<UpdateId, Change>,
    readings: Vec<Reading>,
    shown: BTreeMap<ChunkId, u64>,
    acked: Vec<(ChunkId, UpdateId, u64)>,
    history: BTreeMap<(ChunkId, u64), (Identity, UpdateId)>,
    versions: BTreeMap<(ChunkId, UpdateId), u64>,
    answered_reads: usize,
    held_reads: usize,
    undone_commits: usize,
    late_messages: usize,
}

fn chunk(n: usize) -> ChunkId {
    ChunkId { file: InodeId::new(5), index: n as u64 % 2 }
}

impl Sim {
    fn new() -> Self {
        let mut sim = Self {
            now: 1,
            machines: NODES.map(|n| (n, Machine::default())).into(),
            published: vec![Chain::newborn(ChainId::new(1), &NODES.map(target))],
            heard: BTreeMap::new(),
            started: 1,
            mail: Vec::new(),
            late: Vec::new(),
            requests: BTreeMap::new(),
            callers: BTreeMap::new(),
            tokens: 0,
            job: None,
            ops: (0..CLIENTS).map(|_| None).collect(),
            seq: 0,
            changes: BTreeMap::new(),
            readings: Vec::new(),
            shown: BTreeMap::new(),
            acked: Vec::new(),
            history: BTreeMap::new(),
            versions: BTreeMap::new(),
            answered_reads: 0,
            held_reads: 0,
            undone_commits: 0,
            late_messages: 0,
        };
        NODES.iter().for_each(|n| sim.start(*n));
        for _ in 0..3 {
            sim.tick(1, Revive::Together);
            NODES.iter().for_each(|n| sim.learn(*n));
        }
        sim
    }

    fn machine(&mut self, n: u64) -> &mut Machine {
        self.machines.get_mut(&n).unwrap()
    }

    fn process(&mut self, n: u64) -> Option<&mut Process> {
        self.machine(n).process.as_mut()
    }

    fn replica(&self, n: u64) -> Option<&Replica> {
        self.machines[&n].process.as_ref().map(|p| &p.replica)
    }

    /// The replica of a process, if that process still runs.
    fn same(&self, (n, incarnation): (u64, u64)) -> Option<&Replica> {
        self.replica(n).filter(|_| self.machines[&n].incarnation == incarnation)
    }

    fn chain(&self) -> &Chain {
        self.published.last().unwrap()
    }

    fn token(&mut self, n: u64, caller: Caller) -> Token {
        self.tokens += 1;
        self.callers.insert(self.tokens, (n, caller));
        self.tokens
    }

    fn start(&mut self, n: u64) {
        let machine = self.machine(n);
        if machine.process.is_some() {
            return;
        }
        let version = |(chunk, s): (&ChunkId, &Stored)| (*chunk, s.state.identity.version);
        let pending = machine.disk.pending.iter().map(version).collect();
        machine.incarnation += 1;
        machine.opened += 1;
        let replica = Replica::new(target(n), machine.opened, machine.version, pending);
        machine.process = Some(Process { replica, work: Vec::new(), grant: None });
    }

    /// The process dies, and with it up to `lost` commits that no barrier followed.
    fn kill(&mut self, n: u64, lost: usize) {
        let machine = self.machines.get_mut(&n).unwrap();
        machine.process = None;
        for _ in 0..lost {
            let Some((chunk, before)) = machine.undo.pop() else { break };
            let committed = machine.disk.committed.remove(&chunk).unwrap();
            machine.disk.pending.insert(chunk, committed);
            machine.disk.committed.extend(before.map(|b| (chunk, b)));
            self.undone_commits += 1;
        }
        machine.undo.clear();
        let orphans: Vec<Token> =
            self.callers.iter().filter(|(_, (at, _))| *at == n).map(|(t, _)| *t).collect();
        for token in orphans {
            self.answer(token, Err(Refusal::Unreachable("it died".into())));
        }
    }

    /// The disk is replaced by an empty one, if another serving target has what it had.
    fn wipe(&mut self, n: u64) {
        let is_copy = |m: u64| m != n && self.machines[&m].version != ChainVersion::NONE;
        if self.chain().serving().any(|m| is_copy(m.get())) {
            self.kill(n, 0);
            let incarnation = self.machines[&n].incarnation;
            *self.machine(n) = Machine { incarnation, ..Machine::default() };
        }
    }

    // The manager.

    /// Time passes; whoever can reach the manager sends a heartbeat.
    fn tick(&mut self, ms: u64, revive: Revive) {
        self.now += ms;
        for n in NODES {
            self.now += 1;
            let said = self.replica(n).filter(|_| !self.machines[&n].is_cut).map(Replica::report);
            if let Some((local, version)) = said {
                self.heard.insert(n, Report { local, version, at_ms: self.now });
            }
            self.decide(revive);
            let grant = said.map(|_| (self.now, self.chain().clone()));
            if let Some(process) = self.process(n).filter(|_| grant.is_some()) {
                process.grant = grant;
            }
        }
    }

    fn decide(&mut self, revive: Revive) {
        let now = self.now;
        let lost = |at_ms| Report { local: Local::Offline, version: ChainVersion::NONE, at_ms };
        let report = |n: &u64| match self.heard.get(n) {
            Some(r) if now > r.at_ms + WAIT => Some(lost(r.at_ms + WAIT)),
            Some(r) => Some(*r),
            None => (now > self.started + WAIT).then(|| lost(self.started + WAIT)),
        };
        let reports: Reports =
            NODES.iter().filter_map(|n| Some((target(*n), report(n)?))).collect();
        while let Some(chain) = next(self.chain(), &reports, revive) {
            self.published.push(chain);
        }
    }

    /// A heartbeat's answer arrives: the chain is taken up, then the lease.
    fn learn(&mut self, n: u64) {
        let Some(process) = self.process(n) else { return };
        let Some((sent, chain)) = process.grant.take() else { return };
        if process.replica.wants(&chain) {
            let machine = self.machine(n);
            machine.version = chain.version;
            machine.undo.clear();
            self.feed(n, Event::Chain(chain));
        }
        if let Some(process) = self.process(n) {
            process.replica.renew(sent + LEASE);
        }
    }

    // One replica and its engine.

    fn feed(&mut self, n: u64, event: Event) {
        let mut todo = vec![event];
        while let Some(event) = todo.pop() {
            let (now, mut out) = (self.now, Vec::new());
            let Some(process) = self.process(n) else { return };
            process.replica.step(now, event, &mut out);
            for effect in out {
                todo.extend(self.effect(n, effect));
            }
        }
    }

    fn effect(&mut self, n: u64, effect: Effect) -> Option<Event> {
        match effect {
            Effect::Load(chunk, attempt, id) => {
                return Some(Event::Loaded(
                    chunk,
                    attempt,
                    Ok(self.machines[&n].disk.known(chunk, id)),
                ));
            }
            Effect::Send { chunk, attempt, chain_version: version, era, to, message, .. } => {
                let body = read_body(&self.machines[&n].disk, chunk, message);
                self.tokens += 1;
                let (request, incarnation) = (self.tokens, self.machines[&n].incarnation);
                self.requests.insert(request, Request { from: n, incarnation, chunk, attempt });
                let to = (to.get(), self.machines[&to.get()].incarnation);
                self.mail.push(match body {
                    Some(body) => Mail::Go { request, to, version, era, body },
                    None => {
                        let result = Err(Refusal::Unreachable("it has changed".into()));
                        Mail::Back { request, result }
                    }
                });
            }
            Effect::Answer(token, result) => self.answer(token, result),
            Effect::Refresh => {}
            work => self.process(n)?.work.push(work),
        }
        None
    }

    /// The engine of `n` does one of the things that it was asked for.
    fn engine(&mut self, n: u64, which: usize) {
        let Some(process) = self.process(n) else { return };
        if process.work.is_empty() {
            return;
        }
        let work = process.work.remove(which % process.work.len());
        let machine = self.machine(n);
        let event = match work {
            Effect::Stage(attempt, stage) => {
                machine.undo.clear();
                Event::Staged(stage.chunk, attempt, machine.disk.stage(&stage))
            }
            Effect::Commit(chunk, attempt, identity) => {
                let stored = machine.disk.pending.remove(&chunk).unwrap();
                assert_eq!(stored.state.identity, identity);
                let id = stored.state.id;
                let before = machine.disk.committed.insert(chunk, stored);
                machine.undo.push((chunk, before));
                self.record(chunk, identity, id);
                Event::Committed(chunk, attempt, Ok(()))
            }
            Effect::DropPending(chunk, attempt, version) => {
                machine.undo.clear();
                let dropped = machine.disk.pending.remove(&chunk);
                assert!(dropped.is_none_or(|d| d.state.identity.version == version));
                Event::Dropped(chunk, attempt, Ok(()))
            }
            Effect::Erase(chunk, attempt) => {
                machine.undo.clear();
                machine.disk.pending.remove(&chunk);
                machine.disk.committed.remove(&chunk);
                Event::Dropped(chunk, attempt, Ok(()))
            }
            other => panic!("not the engine's: {other:?}"),
        };
        self.feed(n, event);
    }

    /// Whoever commits: a version is one content of one update, and an update has one version.
    fn record(&mut self, chunk: ChunkId, identity: Identity, id: UpdateId) {
        let version = identity.version.get();
        let known = *self.history.entry((chunk, version)).or_insert((identity, id));
        assert_eq!(known, (identity, id), "two contents of version {version} were committed");
        let known = *self.versions.entry((chunk, id)).or_insert(version);
        assert_eq!(known, version, "W7: {id:?} was applied twice");
    }

    // Messages.

    fn answer(&mut self, token: Token, result: Result<Done, Refusal>) {
        match self.callers.remove(&token) {
            Some((_, Caller::Client(client))) => self.answered(client, token, &result),
            Some((_, Caller::Forward(request))) => {
                self.mail.push(Mail::Back { request, result: result.map(drop) });
            }
            Some((_, Caller::Sync)) => {
                if let Some(job) = self.job.as_mut()
                    && job.left.remove(&token)
                {
                    job.is_failed |= result.is_err();
                }
            }
            Some((_, Caller::Nobody)) | None => {}
        }
    }

    fn deliver(&mut self, index: usize) {
        match self.mail.remove(index) {
            Mail::Go { request, to, version, era, body } => {
                let token = self.token(to.0, Caller::Forward(request));
                if self.same(to).is_none() {
                    return self.answer(token, Err(Refusal::Unreachable("nobody is there".into())));
                }
                self.feed(to.0, body.event(token, version, era));
            }
            Mail::Back { request, result } => self.sent(request, result),
        }
    }

    /// A request ended for the one who sent it: answered, or given up while it may still arrive.
    fn sent(&mut self, request: u64, result: Result<(), Refusal>) {
        let Some(Request { from, incarnation, chunk, attempt }) = self.requests.remove(&request)
        else {
            return;
        };
        if self.same((from, incarnation)).is_some() {
            self.feed(from, Event::Sent(chunk, attempt, result));
        }
    }

    fn give_up(&mut self, which: usize) {
        let open = self.requests.len();
        if let Some(request) = self.requests.keys().nth(which % open.max(1)).copied() {
            let is_it = |mail: &Mail| matches!(mail, Mail::Go { request: r, .. } if *r == request);
            if let Some(index) = self.mail.iter().position(is_it) {
                self.late.push(self.mail.remove(index));
            }
            self.sent(request, Err(Refusal::Unreachable("no answer in time".into())));
        }
    }

    /// Messages that were given up arrive after all.
    fn arrive_late(&mut self, most: usize) {
        for _ in 0..self.late.len().min(most) {
            self.late_messages += 1;
            self.mail.push(self.late.remove(0));
            self.deliver(self.mail.len() - 1);
        }
    }

    /// One step of bringing the syncing target up to date.
    fn sync(&mut self, which: usize) {
        if let Some(job) = self.job.take() {
            let current = |end| self.same(end).and_then(Replica::chain).map(|c| c.version);
            let version = Some(job.version);
            if current(job.from) != version || current(job.to) != version || job.is_failed {
                return;
            }
            if !job.left.is_empty() {
                self.job = Some(job);
                return;
            }
            let token = self.token(job.to.0, Caller::Nobody);
            self.feed(job.to.0, Event::SyncDone(token, job.version));
            // The worst moment there is: nothing is compared after it.
            return self.arrive_late(which % 8);
        }
        let pair = |n| Some((n, self.replica(n)?.sync_to()?));
        let Some((from, (to, version))) = NODES.into_iter().find_map(pair) else { return };
        let to = to.get();
        if self.replica(to).and_then(Replica::chain).map(|c| c.version) != Some(version) {
            return;
        }
        let page = |n: u64| self.machines[&n].disk.page();
        let plan = sync::plan(&page(from), &page(to));
        let end = |n: u64| (n, self.machines[&n].incarnation);
        let (ends, chunks) = ((end(from), end(to)), plan.chunks);
        let tokens: Vec<Token> = chunks.iter().map(|_| self.token(from, Caller::Sync)).collect();
        let left = tokens.iter().copied().collect();
        self.job = Some(Job { from: ends.0, to: ends.1, version, left, is_failed: false });
        for (token, chunk) in tokens.into_iter().zip(chunks) {
            self.feed(from, Event::Sync(token, version, chunk));
        }
    }

    // Clients.

    /// A chain as a client may know it: the newest, or one of the two before.
    fn view(&self, back: usize) -> Chain {
        self.published[self.published.len().saturating_sub(1 + back % 3)].clone()
    }

    /// A client begins an update, repeats it, or stops to wait for its answer.
    fn client(&mut self, which: usize) {
        let client = which % CLIENTS;
        if self.ops[client].is_none() {
            self.seq += 1;
            let text = format!("<{}>", self.seq);
            let change = match which / CLIENTS % 8 {
                0 => Change::Remove,
                1 => Change::Truncate { length: (self.seq % 9) as u32 },
                n => put(n as u32, &text),
            };
            let update = Update { chunk: chunk(which), ..update(client as u128, self.seq, change) };
            self.changes.insert(update.id, update.change.clone());
            self.ops[client] = Some(Op { update, token: None });
        }
        let view = self.view(if which.is_multiple_of(4) { which / 4 } else { 0 });
        let head = view.head().map(TargetId::get).filter(|n| self.replica(*n).is_some());
        let Some(head) = head else { return };
        let token = self.token(head, Caller::Client(client));
        let Some(op) = self.ops[client].as_mut() else { return };
        op.token = Some(token);
        let update = op.update.clone();
        self.feed(head, Event::Update(token, view.version, update));
    }

    fn answered(&mut self, client: usize, token: Token, result: &Result<Done, Refusal>) {
        let Some(op) = self.ops[client].take_if(|op| op.token == Some(token)) else { return };
        match result {
            Ok(done) => {
                let (chunk, version) = (op.update.chunk, done.version.get());
                self.show(chunk, version);
                if version > 0 {
                    self.acked.push((chunk, op.update.id, version));
                }
            }
            Err(Refusal::StaleUpdate | Refusal::Conflict(_)) => panic!("{result:?}"),
            Err(_) => self.ops[client] = Some(Op { token: None, ..op }),
        }
    }

    fn show(&mut self, chunk: ChunkId, version: u64) {
        let shown = self.shown.entry(chunk).or_default();
        *shown = version.max(*shown);
    }

    fn begin_read(&mut self, which: usize) {
        let (view, chunk) = (self.view(which / 16), chunk(which / 3));
        let serving: Vec<u64> = view.serving().map(TargetId::get).collect();
        let Some(n) = serving.get(which % serving.len().max(1)).copied() else { return };
        let admitted = self.replica(n).map(|r| r.admit(self.now, view.version));
        if admitted == Some(Ok(())) {
            let node = (n, self.machines[&n].incarnation);
            let floor = self.shown.get(&chunk).copied().unwrap_or(0);
            let reading =
                Reading { node, version: view.version, chunk, found: None, pending: None, floor };
            self.readings.push(self.look_up(reading));
        }
    }

    fn look_up(&self, reading: Reading) -> Reading {
        let known = self.machines[&reading.node.0].disk.known(reading.chunk, None);
        let found = known.committed.map(|s| s.identity);
        Reading { found, pending: known.pending.map(|s| s.identity.version), ..reading }
    }

    /// The bytes of a read are in memory: it is judged.
    fn finish_read(&mut self, which: usize) {
        if self.readings.is_empty() {
            return;
        }
        let reading = self.readings.swap_remove(which % self.readings.len());
        let Reading { version, chunk, pending, .. } = reading;
        let Some(replica) = self.same(reading.node) else { return };
        match replica.verdict(self.now, version, chunk, pending, false) {
            Verdict::Refuse(_) => {}
            Verdict::Hold => {
                self.held_reads += 1;
                self.readings.push(self.look_up(reading));
            }
            Verdict::Answer => {
                let found = reading.found.map_or(0, |i| i.version.get());
                assert!(
                    found >= reading.floor,
                    "R1: version {found} was read at {:?} after {} had been shown",
                    reading.node,
                    reading.floor
                );
                if let Some(found) = reading.found {
                    let (known, _) = self.history[&(chunk, found.version.get())];
                    assert_eq!(known, found);
                }
                self.show(chunk, found);
                self.answered_reads += 1;
            }
        }
    }

    // A run.

    fn step(&mut self, what: u8, which: usize) {
        let n = NODES[which % 3];
        match what {
            0..25 => self.client(which),
            25..55 => self.begin_read(which),
            55..90 => self.finish_read(which),
            90..145 if !self.mail.is_empty() => self.deliver(which % self.mail.len()),
            145..195 => self.engine(n, which / 3),
            195..200 => self.give_up(which),
            200..206 => self.kill(n, which / 3 % 4),
            206..216 => self.start(n),
            216..228 => {
                let revive = if which > 128 { Revive::Any } else { Revive::Together };
                self.tick(which as u64 % 25, revive);
            }
            228..240 => self.learn(n),
            240..249 => self.sync(which),
            249..252 => self.machine(n).is_cut ^= true,
            252 => self.wipe(n),
            254.. => self.arrive_late(which % 2),
            253 => {
                self.heard.clear();
                self.started = self.now;
            }
            _ => {}
        }
    }

    fn is_at_rest(&self) -> bool {
        let idle = |m: &Machine| {
            m.process.as_ref().is_some_and(|p| p.replica.is_idle()) && m.disk.pending.is_empty()
        };
        self.chain().serving().count() == 3
            && self.mail.is_empty()
            && self.machines.values().all(idle)
            && self.ops.iter().all(Option::is_none)
    }

    /// Everything is well from now on: the chain comes to rest by itself.
    fn settle(&mut self) {
        NODES.iter().for_each(|n| self.machine(*n).is_cut = false);
        for round in 0..400 {
            for n in NODES {
                self.start(n);
                self.learn(n);
                while self.process(n).is_some_and(|p| !p.work.is_empty()) {
                    self.engine(n, 0);
                }
            }
            for _ in 0..self.mail.len() {
                self.deliver(0);
            }
            self.sync(round);
            self.tick(3, Revive::Any);
            if self.is_at_rest() {
                return;
            }
            let is_waiting = |op: &Op| op.token.is_none();
            if let Some(client) = self.ops.iter().position(|op| op.as_ref().is_some_and(is_waiting))
            {
                // No multiple of four: it knows the newest chain.
                self.client([9, 1, 2][client] + round % 2 * 12);
            }
        }
        let at: Vec<_> = self.machines.values().map(|m| (&m.disk, &m.process)).collect();
        panic!("no rest under {:?}: {:?}, {:?}, {at:#?}", self.chain(), self.ops, self.mail);
    }

    /// W5, W6: every copy is the history, and the history has every acknowledged update.
    fn check_copies(&self) {
        for (chunk, id, version) in &self.acked {
            assert_eq!(self.history[&(*chunk, *version)].1, *id, "W6: an answer was not kept");
        }
        for index in 0..2 {
            let chunk = chunk(index);
            let count = self.history.range((chunk, 0)..=(chunk, u64::MAX)).count() as u64;
            let mut model = Disk::default();
            for version in 1..=count {
                let (identity, id) = self.history[&(chunk, version)];
                let state = model.stage(&Stage {
                    chunk,
                    id,
                    assigned: identity.assigned,
                    version: identity.version,
                    truncate_generation: 0,
                    checksum: Some(identity.checksum),
                    content: Content::Change(self.changes[&id].clone()),
                });
                let state = state.expect("a version is what was asked for");
                assert_eq!(state.identity, identity, "version {version} is not what was asked for");
                let stored = model.pending.remove(&chunk).unwrap();
                model.committed.insert(chunk, stored);
            }
            for (n, machine) in &self.machines {
                let copy = machine.disk.committed.get(&chunk);
                assert_eq!(copy, model.committed.get(&chunk), "the copy of {n}");
            }
        }
    }
}

/// What a message carries, read when it is sent; `None` if the chunk has changed meanwhile.
fn read_body(disk: &Disk, chunk: ChunkId, message: Message) -> Option<Body> {
    let (stored, base) = match message {
        Message::Forward(forward) => return Some(Body::Forward(forward)),
        Message::Forget => return Some(Body::Forget(chunk)),
        Message::Pending { base } => (disk.pending.get(&chunk)?, base),
        Message::Committed => (disk.committed.get(&chunk)?, None),
    };
    Some(Body::Forward(whole(stored, chunk, base)))
}

fn history(steps: impl IntoIterator<Item = (u8, u8)>) -> Sim {
    let mut sim = Sim::new();
    for (what, which) in steps {
        sim.step(what, usize::from(which));
    }
    sim.settle();
    sim.check_copies();
    sim
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]
    #[test]
    fn no_history_loses_repeats_or_takes_back_what_was_shown(
        steps in prop::collection::vec((any::<u8>(), any::<u8>()), 1..600),
    ) {
        history(steps);
    }
}

/// Long histories, the same in each run; and the proof that they are not a quiet life.
#[test]
fn long_histories_come_to_rest_with_everything_that_was_shown() {
    let seeds = std::env::var("LAMPYRIS_HISTORIES").ok().and_then(|n| n.parse().ok());
    let (mut chains, mut reads, mut holds, mut acked, mut undone, mut late) = (0, 0, 0, 0, 0, 0);
    for seed in 0..seeds.unwrap_or(200) {
        let mut state = seed;
        let steps = (0..2_000).map(|_| {
            let [what, which, ..] = crate::layout::splitmix64(&mut state).to_le_bytes();
            (what, which)
        });
        let sim = history(steps);
        chains += sim.published.len();
        reads += sim.answered_reads;
        holds += sim.held_reads;
        acked += sim.acked.len();
        undone += sim.undone_commits;
        late += sim.late_messages;
    }
    let seen = [chains, reads, holds, acked, undone, late];
    assert!(
        seen.into_iter().zip([2_000, 1_000, 50, 500, 100, 20]).all(|(n, least)| n > least),
        "{seen:?}"
    );
}

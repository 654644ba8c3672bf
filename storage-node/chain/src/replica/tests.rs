//! Message scripts: replicas over a store in memory, with the network in the test's hands.

#![allow(clippy::cast_possible_truncation, reason = "the numbers of tests are small")]

mod late;
mod random;

use std::collections::BTreeMap;

use bytes::Bytes;
use proptest::prelude::*;

use super::*;
use crate::id::{ChainId, ChannelId, ClientId, InodeId, UpdateId};
use crate::sync::{self, Entry, Page};
use crate::table::ChainTarget;

const CHUNK: ChunkId = ChunkId { file: InodeId::new(5), index: 0 };
const LEASE_MS: u64 = 1_000_000;

#[derive(Clone, Debug, PartialEq)]
struct Stored {
    state: State,
    bytes: Vec<u8>,
    removed: bool,
    applied: BTreeMap<(ClientId, ChannelId), Applied>,
}

#[derive(Clone, Debug, Default)]
struct Disk {
    committed: BTreeMap<ChunkId, Stored>,
    pending: BTreeMap<ChunkId, Stored>,
}

impl Disk {
    fn stage(&mut self, stage: &Stage) -> Result<State, Refusal> {
        let old = self.committed.get(&stage.chunk);
        let mut bytes = old.map(|o| o.bytes.clone()).unwrap_or_default();
        let mut applied = old.map(|o| o.applied.clone()).unwrap_or_default();
        let mut removed = false;
        match &stage.content {
            Content::Change(Change::Write { offset, bytes: new, checksum }) => {
                if crc32c::crc32c(new) != *checksum {
                    return Err(Refusal::Damaged);
                }
                let end = *offset as usize + new.len();
                bytes.resize(bytes.len().max(end), 0);
                bytes[*offset as usize..end].copy_from_slice(new);
            }
            Content::Change(Change::Truncate { length }) => bytes.resize(*length as usize, 0),
            Content::Change(Change::Remove) => {
                bytes.clear();
                removed = true;
            }
            Content::Whole(whole) => {
                bytes = whole.bytes.to_vec();
                removed = whole.removed;
                applied = whole.duplicates.iter().map(|(c, l, a)| ((*c, *l), *a)).collect();
            }
        }
        let length = bytes.len() as u32;
        if matches!(stage.content, Content::Change(_)) {
            let entry = Applied { seq: stage.id.seq, version: stage.version, length };
            applied.insert((stage.id.client, stage.id.channel), entry);
        }
        let checksum = crc32c::crc32c(&bytes);
        if stage.checksum.is_some_and(|expected| expected != checksum) {
            return Err(Refusal::Conflict(stage.version));
        }
        let identity = Identity { assigned: stage.assigned, version: stage.version, checksum };
        let state = State { identity, id: stage.id, length };
        self.pending.insert(stage.chunk, Stored { state, bytes, removed, applied });
        Ok(state)
    }

    fn known(&self, chunk: ChunkId, id: Option<UpdateId>) -> Known {
        let committed = self.committed.get(&chunk);
        let lane = id.map(|id| (id.client, id.channel));
        Known {
            committed: committed.map(|s| s.state),
            pending: self.pending.get(&chunk).map(|s| s.state),
            applied: lane.and_then(|lane| committed?.applied.get(&lane).copied()),
        }
    }

    fn page(&self) -> Page {
        let mut chunks: Vec<ChunkId> =
            self.committed.keys().chain(self.pending.keys()).copied().collect();
        chunks.sort_unstable();
        chunks.dedup();
        let entry = |chunk| Entry {
            chunk,
            committed: self.committed.get(&chunk).map(|s| s.state.identity),
            is_pending: self.pending.contains_key(&chunk),
        };
        Page { entries: chunks.into_iter().map(entry).collect(), is_last: true }
    }
}

/// On the way to a target, or back from it.
#[derive(Clone, Debug)]
enum Packet {
    Go { from: u64, to: u64, attempt: u64, version: ChainVersion, era: Era, body: Body },
    Back { to: u64, chunk: ChunkId, attempt: u64, result: Result<(), Refusal> },
}

#[derive(Clone, Debug)]
enum Body {
    Forward(Forward),
    Forget(ChunkId),
}

impl Body {
    fn chunk(&self) -> ChunkId {
        match self {
            Self::Forward(forward) => forward.chunk,
            Self::Forget(chunk) => *chunk,
        }
    }

    fn event(self, token: Token, version: ChainVersion, era: Era) -> Event {
        match self {
            Self::Forward(forward) => Event::Forward(token, version, era, forward),
            Self::Forget(chunk) => Event::Forget(token, version, era, chunk),
        }
    }
}

/// A forward of everything that one state of a chunk holds.
fn whole(stored: &Stored, chunk: ChunkId, base: Option<Identity>) -> Forward {
    let whole = Whole {
        bytes: stored.bytes.clone().into(),
        removed: stored.removed,
        duplicates: stored.applied.iter().map(|((c, l), a)| (*c, *l, *a)).collect(),
    };
    Forward {
        chunk,
        id: stored.state.id,
        identity: stored.state.identity,
        base,
        truncate_generation: 0,
        content: Content::Whole(whole),
    }
}

struct World {
    replicas: BTreeMap<u64, Replica>,
    disks: BTreeMap<u64, Disk>,
    network: Vec<Packet>,
    answers: BTreeMap<Token, Result<Done, Refusal>>,
    /// Who waits for the answer to a token of a forward: (target, chunk, attempt).
    waiting: BTreeMap<Token, (u64, ChunkId, u64)>,
    chain: Chain,
    tokens: Token,
    starts: u64,
}

fn target(n: u64) -> TargetId {
    TargetId::new(n)
}

fn members(states: &[(u64, PublicState)]) -> Vec<ChainTarget> {
    states.iter().map(|(n, state)| ChainTarget { id: target(*n), state: *state }).collect()
}

fn put(offset: u32, text: &str) -> Change {
    let bytes = Bytes::copy_from_slice(text.as_bytes());
    Change::Write { offset, checksum: crc32c::crc32c(&bytes), bytes }
}

fn write(seq: u64, text: &str) -> Update {
    update(7, seq, put(0, text))
}

fn update(client: u128, seq: u64, change: Change) -> Update {
    let id = UpdateId { client: ClientId::new(client), channel: ChannelId::new(1), seq };
    Update { chunk: CHUNK, id, truncate_generation: 0, change }
}

impl World {
    fn new() -> Self {
        use PublicState::Serving;
        let targets = members(&[(1, Serving), (2, Serving), (3, Serving)]);
        let chain = Chain { id: ChainId::new(1), version: ChainVersion::new(1), targets };
        let mut world = Self {
            replicas: BTreeMap::new(),
            disks: (1..=3).map(|n| (n, Disk::default())).collect(),
            network: Vec::new(),
            answers: BTreeMap::new(),
            waiting: BTreeMap::new(),
            chain,
            tokens: 0,
            starts: 0,
        };
        for n in 1..=3 {
            world.start(n);
        }
        world
    }

    /// The process of `n` starts on its disk.
    fn start(&mut self, n: u64) {
        let version = |(chunk, s): (&ChunkId, &Stored)| (*chunk, s.state.identity.version);
        let pending = self.disks[&n].pending.iter().map(version).collect();
        self.starts += 1;
        let mut replica = Replica::new(target(n), self.starts, ChainVersion::new(1), pending);
        replica.renew(LEASE_MS);
        self.replicas.insert(n, replica);
        self.event(n, Event::Chain(self.chain.clone()));
    }

    /// The process of `n` dies: what is on the way to or from it is lost.
    fn kill(&mut self, n: u64) {
        self.replicas.remove(&n);
        self.network.retain(|p| match p {
            Packet::Go { from, to, .. } => *from != n && *to != n,
            Packet::Back { to, .. } => *to != n,
        });
    }

    /// The manager publishes these states; everybody alive learns of it.
    fn publish(&mut self, states: &[(u64, PublicState)]) {
        self.chain.version = self.chain.version.next();
        self.chain.targets = members(states);
        assert!(self.chain.is_valid());
        let alive: Vec<u64> = self.replicas.keys().copied().collect();
        for n in alive {
            self.event(n, Event::Chain(self.chain.clone()));
        }
    }

    fn event(&mut self, n: u64, event: Event) {
        let mut todo = vec![event];
        while let Some(event) = todo.pop() {
            let mut out = Vec::new();
            let Some(replica) = self.replicas.get_mut(&n) else { return };
            replica.step(0, event, &mut out);
            for effect in out {
                todo.extend(self.apply(n, effect));
            }
        }
    }

    fn apply(&mut self, n: u64, effect: Effect) -> Option<Event> {
        let disk = self.disks.get_mut(&n).unwrap();
        match effect {
            Effect::Load(chunk, attempt, id) => {
                Some(Event::Loaded(chunk, attempt, Ok(disk.known(chunk, id))))
            }
            Effect::Stage(attempt, stage) => {
                Some(Event::Staged(stage.chunk, attempt, disk.stage(&stage)))
            }
            Effect::Commit(chunk, attempt, identity) => {
                let stored = disk.pending.remove(&chunk).unwrap();
                assert_eq!(stored.state.identity, identity);
                disk.committed.insert(chunk, stored);
                Some(Event::Committed(chunk, attempt, Ok(())))
            }
            Effect::DropPending(chunk, attempt, _) => {
                disk.pending.remove(&chunk);
                Some(Event::Dropped(chunk, attempt, Ok(())))
            }
            Effect::Erase(chunk, attempt) => {
                disk.pending.remove(&chunk);
                disk.committed.remove(&chunk);
                Some(Event::Dropped(chunk, attempt, Ok(())))
            }
            Effect::Send { chunk, attempt, chain_version, era, to, message, .. } => {
                let body = self.body(n, chunk, message);
                let (to, version) = (to.get(), chain_version);
                if self.replicas.contains_key(&to) {
                    self.network.push(Packet::Go { from: n, to, attempt, version, era, body });
                }
                None
            }
            Effect::Answer(token, result) => {
                if let Some((to, chunk, attempt)) = self.waiting.remove(&token) {
                    let result = result.map(|_| ());
                    self.network.push(Packet::Back { to, chunk, attempt, result });
                } else {
                    self.answers.insert(token, result);
                }
                None
            }
            Effect::Refresh => None,
        }
    }

    fn body(&self, n: u64, chunk: ChunkId, message: Message) -> Body {
        let disk = &self.disks[&n];
        let (stored, base) = match message {
            Message::Forward(forward) => return Body::Forward(forward),
            Message::Forget => return Body::Forget(chunk),
            Message::Pending { base } => (&disk.pending[&chunk], base),
            Message::Committed => (&disk.committed[&chunk], None),
        };
        Body::Forward(whole(stored, chunk, base))
    }

    fn token(&mut self) -> Token {
        self.tokens += 1;
        self.tokens
    }

    /// Delivers the packet at `index`.
    fn deliver(&mut self, index: usize) {
        match self.network.remove(index) {
            Packet::Go { from, to, attempt, version, era, body } => {
                let token = self.token();
                self.waiting.insert(token, (from, body.chunk(), attempt));
                self.event(to, body.event(token, version, era));
            }
            Packet::Back { to, chunk, attempt, result } => {
                self.event(to, Event::Sent(chunk, attempt, result));
            }
        }
    }

    /// Delivers everything in order, for as long as there is something.
    fn settle(&mut self) {
        for _ in 0..10_000 {
            if self.network.is_empty() {
                return;
            }
            self.deliver(0);
        }
        panic!("the network never falls silent: {:?}", self.network);
    }

    /// Delivers until `n` has the update pending.
    fn until_pending_at(&mut self, n: u64) {
        while !self.disks[&n].pending.contains_key(&CHUNK) {
            self.deliver(0);
        }
    }

    fn send(&mut self, to: u64, update: Update) -> Token {
        let token = self.token();
        let version = self.chain.version;
        self.event(to, Event::Update(token, version, update));
        token
    }

    /// The last serving target brings the syncing one up to date, as the sync worker does.
    fn sync(&mut self, from: u64, to: u64) {
        let plan = sync::plan(&self.disks[&from].page(), &self.disks[&to].page());
        for chunk in plan.chunks {
            let token = self.token();
            self.event(from, Event::Sync(token, self.chain.version, chunk));
            self.settle();
            assert!(self.answers[&token].is_ok(), "{:?}", self.answers[&token]);
        }
        let token = self.token();
        self.event(to, Event::SyncDone(token, self.chain.version));
        assert!(self.answers[&token].is_ok());
    }

    fn text(&self, n: u64) -> String {
        let stored = self.disks[&n].committed.get(&CHUNK);
        stored.map_or_else(|| "-".into(), |s| String::from_utf8(s.bytes.clone()).unwrap())
    }

    fn texts(&self) -> Vec<String> {
        [1, 2, 3].map(|n| self.text(n)).to_vec()
    }

    fn is_quiet(&self) -> bool {
        self.replicas.values().all(Replica::is_idle)
            && self.disks.values().all(|d| d.pending.is_empty())
    }

    fn done(&self, token: Token) -> (u64, u32) {
        let done = self.answers[&token].clone().unwrap();
        (done.version.get(), done.length)
    }
}

use PublicState::{LastServing, Offline, Serving, Syncing};

#[test]
fn a_write_is_answered_when_every_serving_target_committed_it() {
    let mut world = World::new();
    let token = world.send(1, write(1, "one"));
    assert!(!world.answers.contains_key(&token));
    world.settle();
    assert_eq!(world.done(token), (1, 3));
    assert_eq!(world.texts(), ["one", "one", "one"]);
    assert!(world.is_quiet());
}

#[test]
fn the_tail_commits_first_and_the_head_last() {
    let mut world = World::new();
    world.send(1, write(1, "one"));
    world.until_pending_at(2);
    assert_eq!(world.texts(), ["-", "-", "-"]);
    world.deliver(0);
    assert_eq!(world.texts(), ["-", "-", "one"]);
    world.deliver(0);
    assert_eq!(world.texts(), ["-", "one", "one"]);
}

#[test]
fn updates_of_one_chunk_go_one_at_a_time_and_in_order() {
    let mut world = World::new();
    let first = world.send(1, write(1, "aa"));
    let second = world.send(1, update(8, 1, put(2, "bb")));
    assert_eq!(world.network.len(), 1, "W2: one version under way");
    world.settle();
    assert_eq!((world.done(first), world.done(second)), ((1, 2), (2, 4)));
    assert_eq!(world.texts(), ["aabb", "aabb", "aabb"]);
}

#[test]
fn head_refuses_stale_chain_version_and_others_refuse_to_be_head() {
    let mut world = World::new();
    let stale = world.token();
    world.event(1, Event::Update(stale, ChainVersion::new(0), write(1, "x")));
    assert_eq!(world.answers[&stale], Err(Refusal::StaleChain(ChainVersion::new(1))));
    let wrong = world.send(2, write(1, "x"));
    assert_eq!(world.answers[&wrong], Err(Refusal::NotHead));
}

#[test]
fn head_dies_with_a_pending_update_and_the_retry_is_applied_once() {
    let mut world = World::new();
    world.send(1, write(1, "one"));
    world.until_pending_at(2);
    world.kill(1);
    world.publish(&[(2, Serving), (3, Serving), (1, Offline)]);
    world.settle();
    assert_eq!(world.texts(), ["-", "one", "one"], "W8: the new head drives it on");
    let other = world.send(2, update(8, 1, put(0, "two")));
    world.settle();
    assert_eq!(world.done(other), (2, 3));
    let retry = world.send(2, write(1, "one"));
    world.settle();
    assert_eq!(world.done(retry), (1, 3), "W7: answered from the table");
    assert_eq!(world.texts(), ["-", "two", "two"]);
}

#[test]
fn tail_dies_with_a_pending_update_and_the_new_tail_commits_it() {
    let mut world = World::new();
    let token = world.send(1, write(1, "one"));
    world.until_pending_at(2);
    world.kill(3);
    world.publish(&[(1, Serving), (2, Serving), (3, Offline)]);
    world.settle();
    assert_eq!(world.done(token), (1, 3));
    assert_eq!(world.texts(), ["one", "one", "-"]);
    assert!(world.is_quiet());
}

#[test]
fn middle_dies_with_a_pending_update_and_the_head_forwards_past_it() {
    let mut world = World::new();
    let token = world.send(1, write(1, "one"));
    world.until_pending_at(2);
    world.kill(2);
    world.publish(&[(1, Serving), (3, Serving), (2, Offline)]);
    world.settle();
    assert_eq!(world.done(token), (1, 3));
    assert_eq!(world.texts(), ["one", "-", "one"]);
}

#[test]
fn acknowledgement_lost_at_the_tail_is_answered_to_the_forward_again() {
    let mut world = World::new();
    let token = world.send(1, write(1, "one"));
    world.until_pending_at(2);
    world.deliver(0);
    assert_eq!(world.texts(), ["-", "-", "one"]);
    world.network.clear();
    world.kill(2);
    world.start(2);
    world.settle();
    assert_eq!(world.texts(), ["-", "one", "one"], "the restarted middle drives its pending");
    world.kill(1);
    world.start(1);
    world.settle();
    assert_eq!(world.texts(), ["one", "one", "one"]);
    assert!(!world.answers.contains_key(&token), "the client's connection is gone");
    let retry = world.send(1, write(1, "one"));
    assert_eq!(world.done(retry), (1, 3));
}

#[test]
fn any_target_alone_revives_the_chain_with_every_value_that_was_read() {
    for survivor in 1..=3 {
        let mut world = World::new();
        world.send(1, write(1, "one"));
        world.until_pending_at(2);
        world.deliver(0);
        assert_eq!(world.text(3), "one", "a read at the tail returned it");
        for n in 1..=3 {
            world.kill(n);
        }
        world.publish(&[(1, LastServing), (2, LastServing), (3, LastServing)]);
        let others: Vec<u64> = (1..=3).filter(|n| *n != survivor).collect();
        world.start(survivor);
        world.publish(&[(survivor, Serving), (others[0], Offline), (others[1], Offline)]);
        world.settle();
        assert_eq!(world.text(survivor), "one", "target {survivor}");
    }
}

#[test]
fn a_returning_target_catches_up_while_writes_go_on() {
    let mut world = World::new();
    world.send(1, write(1, "one"));
    world.settle();
    world.kill(3);
    world.publish(&[(1, Serving), (2, Serving), (3, Offline)]);
    world.send(1, write(2, "two"));
    world.settle();
    world.start(3);
    world.publish(&[(1, Serving), (2, Serving), (3, Syncing)]);
    let during = world.send(1, update(9, 1, put(3, "!")));
    world.settle();
    assert_eq!(world.done(during), (3, 4));
    assert_eq!(world.texts(), ["two!", "two!", "two!"], "S3: replaced whole, then committed");
    world.sync(2, 3);
    assert_eq!(world.replicas[&3].report(), (Local::UpToDate, ChainVersion::new(3)));
    world.publish(&[(1, Serving), (2, Serving), (3, Serving)]);
    assert_eq!(world.replicas[&3].report().0, Local::Online, "Y1: the word was for one version");
    let retry = world.send(1, write(2, "two"));
    world.settle();
    assert_eq!(world.done(retry), (2, 3), "N5: the table came along");
}

#[test]
fn a_removed_chunk_does_not_come_back_with_a_returning_target() {
    let mut world = World::new();
    world.send(1, write(1, "one"));
    world.settle();
    world.kill(3);
    world.publish(&[(1, Serving), (2, Serving), (3, Offline)]);
    world.send(1, update(7, 2, Change::Remove));
    world.settle();
    world.start(3);
    world.publish(&[(1, Serving), (2, Serving), (3, Syncing)]);
    world.sync(2, 3);
    assert!(world.disks[&3].committed[&CHUNK].removed);
    assert_eq!(world.disks[&3].committed, world.disks[&2].committed);
}

#[test]
fn an_update_that_only_a_dead_head_had_is_dropped_when_it_returns() {
    let mut world = World::new();
    world.send(1, write(1, "lost"));
    world.kill(1);
    world.publish(&[(2, Serving), (3, Serving), (1, Offline)]);
    world.start(1);
    world.publish(&[(2, Serving), (3, Serving), (1, Syncing)]);
    world.sync(3, 1);
    assert!(world.disks[&1].pending.is_empty() && world.disks[&1].committed.is_empty());
    // N6: version 1 is assigned again, to other bytes.
    world.publish(&[(2, Serving), (3, Serving), (1, Serving)]);
    world.send(2, update(8, 1, put(0, "kept")));
    world.settle();
    assert_eq!(world.texts(), ["kept", "kept", "kept"]);
}

#[test]
fn a_serving_target_refuses_what_does_not_build_on_its_content() {
    let mut world = World::new();
    world.send(1, write(1, "one"));
    world.settle();
    let stored = world.disks[&1].committed[&CHUNK].state;
    let identity = Identity { version: UpdateVersion::new(9), ..stored.identity };
    let whole = Whole { bytes: "bad".into(), removed: false, duplicates: vec![] };
    let forward = Forward {
        chunk: CHUNK,
        id: UpdateId { seq: 9, ..stored.id },
        identity,
        base: None,
        truncate_generation: 0,
        content: Content::Whole(whole),
    };
    let token = world.token();
    world.event(2, Event::Forward(token, ChainVersion::new(1), Era::default(), forward));
    assert_eq!(world.answers[&token], Err(Refusal::Gap(UpdateVersion::new(1))), "N5");
    assert_eq!(world.text(2), "one");
}

#[test]
fn reads_are_dirty_before_the_tail_and_held_where_nobody_knows_better() {
    let mut world = World::new();
    world.send(1, write(1, "one"));
    world.until_pending_at(2);
    let version = UpdateVersion::new(1);
    let read = |world: &World, n: u64, pending| {
        world.replicas[&n].verdict(5, world.chain.version, CHUNK, pending, false)
    };
    assert_eq!(read(&world, 1, Some(version)), Verdict::Refuse(Refusal::Dirty(version)), "R2");
    assert_eq!(read(&world, 3, Some(version)), Verdict::Answer);
    // The old tail may have shown the update: the new one may not answer before it committed it.
    world.kill(3);
    world.chain.version = world.chain.version.next();
    world.chain.targets = members(&[(1, Serving), (2, Serving), (3, Offline)]);
    let mut out = Vec::new();
    let chain = world.chain.clone();
    world.replicas.get_mut(&2).unwrap().step(0, Event::Chain(chain), &mut out);
    assert_eq!(read(&world, 2, Some(version)), Verdict::Hold, "R4");
    assert_eq!(read(&world, 2, None), Verdict::Answer);
}

#[test]
fn the_tail_holds_a_read_while_a_syncing_successor_may_have_the_update() {
    let mut world = World::new();
    world.kill(3);
    world.publish(&[(1, Serving), (2, Serving), (3, Offline)]);
    world.start(3);
    world.publish(&[(1, Serving), (2, Serving), (3, Syncing)]);
    world.send(1, write(1, "one"));
    world.until_pending_at(2);
    let pending = Some(UpdateVersion::new(1));
    let read = world.replicas[&2].verdict(5, world.chain.version, CHUNK, pending, false);
    assert_eq!(read, Verdict::Hold, "R4: the successor may show it as soon as it serves");
}

#[test]
fn what_was_looked_up_before_an_inherited_update_was_committed_is_never_an_answer() {
    let mut world = World::new();
    world.send(1, write(1, "one"));
    world.settle();
    world.send(1, write(2, "two"));
    world.until_pending_at(2);
    world.deliver(0);
    assert_eq!(world.texts(), ["one", "one", "two"], "a read at the tail returned it");
    world.kill(3);
    // A read at the new tail finds "one", and 2 pending; 2 is committed while its bytes come from
    // the disk.
    world.publish(&[(1, Serving), (2, Serving), (3, Offline)]);
    world.settle();
    assert_eq!(world.texts()[..2], ["two", "two"]);
    let read = |pending| {
        let pending = Some(UpdateVersion::new(pending));
        world.replicas[&2].verdict(5, world.chain.version, CHUNK, pending, false)
    };
    assert_eq!(read(2), Verdict::Hold, "R4: \"one\" would be a step back");
    assert_eq!(read(3), Verdict::Answer, "nobody has shown what came under this version");
}

#[test]
fn nothing_is_answered_once_the_lease_has_run_out() {
    let world = World::new();
    let read = |now| world.replicas[&1].verdict(now, world.chain.version, CHUNK, None, false);
    assert_eq!(read(LEASE_MS - 1), Verdict::Answer);
    assert_eq!(read(LEASE_MS), Verdict::Refuse(Refusal::NoLease), "R3");
    assert_eq!(world.replicas[&1].admit(LEASE_MS, world.chain.version), Err(Refusal::NoLease));
}

#[test]
fn an_empty_disk_takes_up_no_version_that_would_make_it_a_copy() {
    let chain = |state, version| Chain {
        id: ChainId::new(1),
        version: ChainVersion::new(version),
        targets: members(&[(1, state)]),
    };
    let empty = Replica::new(target(1), 1, ChainVersion::NONE, BTreeMap::new());
    assert!(!empty.wants(&chain(LastServing, 4)), "R5");
    assert!(!empty.wants(&chain(Serving, 4)));
    assert!(empty.wants(&chain(LastServing, 1)), "newborn: nothing was written yet");
    let old = Replica::new(target(1), 2, ChainVersion::new(5), BTreeMap::new());
    assert!(!old.wants(&chain(Serving, 4)), "W1");
    assert!(old.wants(&chain(Serving, 5)));
}

#[test]
fn a_full_queue_refuses_and_changes_nothing() {
    let mut world = World::new();
    for seq in 0..CHUNK_QUEUE_MAX as u128 {
        world.send(1, update(100 + seq, 1, Change::Truncate { length: 1 }));
    }
    let refused = world.send(1, update(99, 1, Change::Truncate { length: 9 }));
    assert_eq!(world.answers[&refused], Err(Refusal::Busy));
    world.settle();
    assert_eq!(world.text(3), "\0");
    assert!(world.is_quiet());
}

/// A random run: writes, deliveries in any order, losses, deaths and returns.
fn run(steps: &[(u8, u8)]) {
    let mut world = World::new();
    let mut seq = 0;
    let mut acked: Vec<String> = Vec::new();
    let mut tokens: Vec<(Token, String)> = Vec::new();
    for (what, which) in steps {
        let which = usize::from(*which);
        match what % 8 {
            0 | 1 => {
                seq += 1;
                let text = format!("{seq:04}");
                let head = world.chain.head().unwrap().get();
                let change = put(seq * 4, &text);
                let token = world.send(head, update(u128::from(seq), 1, change));
                tokens.push((token, text));
            }
            2..=5 if !world.network.is_empty() => world.deliver(which % world.network.len()),
            6 => fail_over(&mut world, which),
            7 => rejoin(&mut world),
            _ => {}
        }
        collect(&mut world, &mut tokens, &mut acked);
        check_prefix(&world);
    }
    world.settle();
    collect(&mut world, &mut tokens, &mut acked);
    let serving: Vec<u64> = world.chain.serving().map(TargetId::get).collect();
    let first = &world.disks[&serving[0]].committed;
    for n in &serving {
        assert_eq!(&world.disks[n].committed, first, "W5: serving targets agree");
    }
    let text =
        String::from_utf8_lossy(&first.get(&CHUNK).map(|s| s.bytes.clone()).unwrap_or_default())
            .into_owned();
    for update in acked {
        assert!(text.contains(&update), "W6: {update} is lost in {text:?}");
    }
}

fn collect(world: &mut World, tokens: &mut Vec<(Token, String)>, acked: &mut Vec<String>) {
    tokens.retain(|(token, text)| match world.answers.get(token) {
        Some(Ok(_)) => {
            acked.push(text.clone());
            false
        }
        Some(Err(_)) => false,
        None => true,
    });
}

/// W4: whoever is further down has no more committed than those above have durable.
fn check_prefix(world: &World) {
    let serving: Vec<u64> = world.chain.serving().map(TargetId::get).collect();
    let newest = |stored: Option<&Stored>| stored.map_or(0, |s| s.state.identity.version.get());
    for pair in serving.windows(2) {
        let (up, down) = (&world.disks[&pair[0]], &world.disks[&pair[1]]);
        let durable = newest(up.committed.get(&CHUNK)).max(newest(up.pending.get(&CHUNK)));
        assert!(newest(down.committed.get(&CHUNK)) <= durable, "W4: {:?}", world.chain);
    }
}

fn states(world: &World) -> (Vec<u64>, Vec<u64>) {
    let serving: Vec<u64> = world.chain.serving().map(TargetId::get).collect();
    let away = (1..=3).filter(|n| !serving.contains(n)).collect();
    (serving, away)
}

fn fail_over(world: &mut World, which: usize) {
    let (serving, away) = states(world);
    if serving.len() < 2 {
        return;
    }
    let dead = serving[which % serving.len()];
    world.kill(dead);
    let mut next: Vec<(u64, PublicState)> =
        serving.iter().filter(|n| **n != dead).map(|n| (*n, Serving)).collect();
    next.push((dead, Offline));
    next.extend(away.iter().map(|n| (*n, Offline)));
    world.publish(&next);
}

fn rejoin(world: &mut World) {
    let (serving, away) = states(world);
    let Some(back) = away.first() else { return };
    let others = away.iter().skip(1).map(|n| (*n, Offline));
    let publish = |world: &mut World, state| {
        let mut next: Vec<_> = serving.iter().map(|n| (*n, Serving)).collect();
        next.push((*back, state));
        next.extend(others.clone());
        world.publish(&next);
    };
    world.start(*back);
    publish(world, Syncing);
    world.sync(*serving.last().unwrap(), *back);
    publish(world, Serving);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]
    #[test]
    fn no_order_of_messages_and_deaths_loses_an_acknowledged_update(
        steps in prop::collection::vec((any::<u8>(), any::<u8>()), 1..120),
    ) {
        run(&steps);
    }
}

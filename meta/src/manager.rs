//! Who serves: the manager of storage servers and chains.
//!
//! [`decide`] is pure: a time, what is known and one event go in; what to remember and what to
//! store come out. [`service`] stores a change by compare-and-set before anybody hears of it.
//! A chain's next state is [`chain::table::next`]'s and nobody else's; here is only what that
//! function is told: who was heard, whose lease has ended, and whether a chain may come up with
//! less than all its copies.

pub mod service;
pub mod spec;

use crate::schema::{DeclaredTable, NodeRecord};
use chain::id::{ChainId, ChainVersion, NodeId, RoutingVersion, TargetId};
use chain::table::{Chain, ChainTarget, Local, PublicState, Report, Reports, Revive, next};
use rpc::message::manager::{
    Heartbeat, LocalState, NodeAddress, Routing, TargetAssignment, TargetReport,
};
use rpc::{Code, Error};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Lease of a storage server, counted by it from when it sent the heartbeat.
pub const LEASE_MS: u64 = 6_000;
/// How long the manager waits for a silent server: the lease and 1 %, counted from when it
/// processed the last heartbeat, which is later than when that was sent.
pub const LEASE_WAIT_MS: u64 = LEASE_MS + LEASE_MS / 100;
/// How long the first complete copy of a chain that nobody serves waits for the others, which then
/// need no sync, before it may bring the chain up by itself.
pub const TOGETHER_MS: u64 = 10_000;
/// Old processes of one server that are remembered, so that they are refused.
const RETIRED_MAX: usize = 8;
/// Most changes of one chain in one decision: a member goes through at most four states.
const STEPS_MAX: usize = 64;
/// Most bytes of a server's address.
const ADDRESS_MAX: usize = 256;

/// What the store holds and the routing table shows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stored {
    /// As the operator declared it.
    pub table: Option<DeclaredTable>,
    /// By id.
    pub chains: BTreeMap<ChainId, Chain>,
    /// By id.
    pub nodes: BTreeMap<NodeId, NodeRecord>,
    /// Grows at each change.
    pub version: RoutingVersion,
}

impl Stored {
    /// The routing table.
    #[must_use]
    pub fn routing(&self) -> Routing {
        let table = self.table.as_ref();
        let address = |(node, n): (&NodeId, &NodeRecord)| NodeAddress {
            node: *node,
            address: n.address.clone(),
        };
        Routing {
            version: self.version,
            table: table.map_or(0, |t| t.table),
            chunk_size_bytes: table.map_or(0, |t| t.chunk_size_bytes),
            stripe: table.map_or(0, |t| t.stripe),
            chains: self.chains.values().cloned().collect(),
            nodes: self.nodes.iter().map(address).collect(),
        }
    }
}

/// What a server last said. Not stored: after a restart of the manager it is heard anew.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Heard {
    /// When the heartbeat was processed.
    pub at_ms: u64,
    /// Which process sent it.
    pub incarnation: u64,
    /// By target.
    pub targets: BTreeMap<TargetId, TargetReport>,
    /// Size of its disks in bytes.
    pub capacity_bytes: u64,
    /// Stored bytes.
    pub used_bytes: u64,
}

impl Heard {
    /// The targets that the process may answer from, and until when: those of which it has a copy and that it has
    /// not given up.
    fn leases(&self) -> impl Iterator<Item = (TargetId, u64)> {
        let until_ms = self.at_ms + LEASE_WAIT_MS;
        let answers = |said: &&TargetReport| {
            said.state != LocalState::Offline && said.chain_version != ChainVersion::NONE
        };
        self.targets.values().filter(answers).map(move |said| (said.target, until_ms))
    }
}

/// Everything that decisions depend on.
#[derive(Clone, Debug)]
pub struct State {
    cluster: String,
    started_ms: u64,
    stored: Stored,
    heard: BTreeMap<NodeId, Heard>,
    retired: BTreeMap<NodeId, VecDeque<u64>>,
    /// Until when a process that a newer one of its node took the place of may answer from a target.
    old_leases_ms: BTreeMap<TargetId, u64>,
    /// Of a chain that nobody serves: when a complete copy was first heard again.
    returned_ms: BTreeMap<ChainId, u64>,
    chains_of: BTreeMap<NodeId, BTreeSet<ChainId>>,
}

/// What happens to the manager.
#[derive(Clone, Debug)]
pub enum Event {
    /// A storage server spoke.
    Heartbeat(Heartbeat),
    /// Time passed.
    Tick,
    /// The operator declared a table.
    Declare(DeclaredTable),
}

/// What to store, all or nothing, if the store still has the version before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// A new table.
    pub table: Option<DeclaredTable>,
    /// Chains that are new or changed.
    pub chains: Vec<Chain>,
    /// Servers that are new or changed.
    pub nodes: Vec<(NodeId, NodeRecord)>,
    /// The routing version after the change.
    pub version: RoutingVersion,
}

/// What follows from an event.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Decision {
    /// To remember at once.
    pub heard: Option<(NodeId, Heard)>,
    /// To store before it is published.
    pub change: Option<Change>,
}

/// Decides what follows from `event`, without doing it. `now_ms` is CLOCK_BOOTTIME of this machine.
///
/// # Errors
/// Refusals for the sender: [`Code::WrongCluster`], [`Code::InvalidRequest`].
pub fn decide(now_ms: u64, state: &State, event: &Event) -> Result<Decision, Error> {
    match event {
        Event::Heartbeat(heartbeat) => hear(now_ms, state, heartbeat),
        Event::Tick => {
            let chains = move_chains(now_ms, state, None, state.stored.chains.keys());
            Ok(Decision { heard: None, change: state.change(None, chains, Vec::new()) })
        }
        Event::Declare(table) => {
            let chains = spec::new_chains(&state.stored, table)?;
            let known = state.stored.table.as_ref() == Some(table);
            let table = (!known).then(|| table.clone());
            Ok(Decision { heard: None, change: state.change(table, chains, Vec::new()) })
        }
    }
}

fn hear(now_ms: u64, state: &State, heartbeat: &Heartbeat) -> Result<Decision, Error> {
    state.check_heartbeat(heartbeat)?;
    let node = heartbeat.node;
    let heard = Heard {
        at_ms: now_ms,
        incarnation: heartbeat.incarnation,
        targets: heartbeat.targets.iter().map(|t| (t.target, t.clone())).collect(),
        capacity_bytes: heartbeat.capacity_bytes,
        used_bytes: heartbeat.used_bytes,
    };
    let record =
        NodeRecord { address: heartbeat.address.clone(), incarnation: heartbeat.incarnation };
    let known = state.stored.nodes.get(&node) == Some(&record);
    let nodes = if known { Vec::new() } else { vec![(node, record)] };
    let concerned = state.chains_of.get(&node).into_iter().flatten();
    let chains = move_chains(now_ms, state, Some((node, &heard)), concerned);
    let change = state.change(None, chains, nodes);
    Ok(Decision { heard: Some((node, heard)), change })
}

/// The chains of `among` that change, as they become.
fn move_chains<'a>(
    now_ms: u64,
    state: &State,
    latest: Option<(NodeId, &Heard)>,
    among: impl Iterator<Item = &'a ChainId>,
) -> Vec<Chain> {
    let chains = among.filter_map(|id| state.stored.chains.get(id));
    chains.filter_map(|chain| move_chain(now_ms, state, latest, chain)).collect()
}

fn move_chain(
    now_ms: u64,
    state: &State,
    latest: Option<(NodeId, &Heard)>,
    chain: &Chain,
) -> Option<Chain> {
    let report = |t: &ChainTarget| Some((t.id, state.report(now_ms, latest, chain.id, t)?));
    let reports: Reports = chain.targets.iter().filter_map(report).collect();
    let revive = state.revive(now_ms, chain);
    let mut moved = next(chain, &reports, revive)?;
    for _ in 0..STEPS_MAX {
        match next(&moved, &reports, revive) {
            Some(further) => moved = further,
            None => break,
        }
    }
    Some(moved)
}

impl State {
    /// The manager at its start, with what the store holds. Nobody was heard yet.
    #[must_use]
    pub fn new(cluster: String, now_ms: u64, stored: Stored) -> Self {
        let mut state = Self {
            cluster,
            started_ms: now_ms,
            stored: Stored::default(),
            heard: BTreeMap::new(),
            retired: BTreeMap::new(),
            old_leases_ms: BTreeMap::new(),
            returned_ms: BTreeMap::new(),
            chains_of: BTreeMap::new(),
        };
        stored.chains.values().for_each(|chain| state.index(chain));
        state.stored = stored;
        state
    }

    /// What is stored.
    #[must_use]
    pub const fn stored(&self) -> &Stored {
        &self.stored
    }

    /// What `node` last said, if it said anything to this process.
    #[must_use]
    pub fn heard(&self, node: NodeId) -> Option<&Heard> {
        self.heard.get(&node)
    }

    /// Whether the manager counts `node` as alive.
    #[must_use]
    pub fn is_alive(&self, now_ms: u64, node: NodeId) -> bool {
        self.heard.get(&node).is_some_and(|h| now_ms <= h.at_ms + LEASE_WAIT_MS)
    }

    /// Bytes of the disks of living servers, all and used.
    #[must_use]
    pub fn space(&self) -> (u64, u64) {
        let sum = |f: fn(&Heard) -> u64| self.heard.values().map(f).fold(0, u64::saturating_add);
        (sum(|h| h.capacity_bytes), sum(|h| h.used_bytes))
    }

    /// The targets that the declared table puts on `node`.
    #[must_use]
    pub fn assignments(&self, node: NodeId) -> Vec<TargetAssignment> {
        let chains = self.chains_of.get(&node).into_iter().flatten();
        let members = chains.filter_map(|id| self.stored.chains.get(id)).flat_map(|chain| {
            chain.targets.iter().filter(|t| t.id.node() == node).filter_map(|t| {
                Some(TargetAssignment { target: t.id, chain: chain.id, disk: t.id.disk()? })
            })
        });
        members.collect()
    }

    /// Takes over what was decided, after it was stored.
    pub fn apply(&mut self, now_ms: u64, decision: Decision) {
        if let Some((node, heard)) = decision.heard {
            let incarnation = heard.incarnation;
            let before = self.heard.insert(node, heard);
            let stored = self.stored.nodes.get(&node).map(|n| n.incarnation);
            let known = before.as_ref().map(|h| h.incarnation);
            if let Some(old) = known.or(stored).filter(|old| *old != incarnation) {
                self.old_leases_ms.retain(|_, until_ms| *until_ms >= now_ms);
                let leases = before.iter().flat_map(Heard::leases);
                self.old_leases_ms.extend(leases);
                let retired = self.retired.entry(node).or_default();
                retired.push_back(old);
                if retired.len() > RETIRED_MAX {
                    retired.pop_front();
                }
            }
            self.note_return(now_ms, node);
        }
        let Some(change) = decision.change else { return };
        for chain in change.chains {
            let before =
                self.stored.chains.get(&chain.id).map_or(ChainVersion::NONE, |c| c.version);
            assert!(chain.version > before, "T1: {chain:?} after {before}");
            self.index(&chain);
            self.stored.chains.insert(chain.id, chain);
        }
        self.stored.nodes.extend(change.nodes);
        self.stored.table = change.table.or_else(|| self.stored.table.take());
        self.stored.version = change.version;
    }

    fn index(&mut self, chain: &Chain) {
        for node in chain.nodes() {
            self.chains_of.entry(node).or_default().insert(chain.id);
        }
        if chain.head().is_some() {
            self.returned_ms.remove(&chain.id);
        }
    }

    /// Notes that `node` is back with complete copies of chains that nobody serves.
    fn note_return(&mut self, now_ms: u64, node: NodeId) {
        for id in self.chains_of.get(&node).into_iter().flatten() {
            let members = self.stored.chains.get(id).into_iter().flat_map(|c| &c.targets);
            let mut own = members.filter(|t| t.id.node() == node);
            if own.any(|t| t.state == PublicState::LastServing) {
                self.returned_ms.entry(*id).or_insert(now_ms);
            }
        }
    }

    fn change(
        &self,
        table: Option<DeclaredTable>,
        chains: Vec<Chain>,
        nodes: Vec<(NodeId, NodeRecord)>,
    ) -> Option<Change> {
        let version = RoutingVersion::new(self.stored.version.get() + 1);
        let nothing = table.is_none() && chains.is_empty() && nodes.is_empty();
        (!nothing).then_some(Change { table, chains, nodes, version })
    }

    fn check_heartbeat(&self, heartbeat: &Heartbeat) -> Result<(), Error> {
        let node = heartbeat.node;
        if heartbeat.cluster != self.cluster {
            let why = format!(
                "node {node} belongs to cluster {}, not {}",
                heartbeat.cluster, self.cluster
            );
            return Err(Error::new(Code::WrongCluster, why));
        }
        let invalid =
            |why: String| Err(Error::new(Code::InvalidRequest, format!("node {node}: {why}")));
        if self.retired.get(&node).is_some_and(|old| old.contains(&heartbeat.incarnation)) {
            return invalid("a newer process of this node has registered".into());
        }
        if heartbeat.address.is_empty() || heartbeat.address.len() > ADDRESS_MAX {
            return invalid("its address is empty or too long".into());
        }
        if let Some(foreign) = heartbeat.targets.iter().find(|t| t.target.node() != node) {
            return invalid(format!("it reports target {} of another node", foreign.target));
        }
        Ok(())
    }

    /// What is known about a member of a chain; `None` while nothing may be concluded.
    fn report(
        &self,
        now_ms: u64,
        latest: Option<(NodeId, &Heard)>,
        chain: ChainId,
        member: &ChainTarget,
    ) -> Option<Report> {
        let (target, node) = (member.id, member.id.node());
        let latest = latest.filter(|(n, _)| *n == node).map(|(_, heard)| heard);
        let Some(heard) = latest.or_else(|| self.heard.get(&node)) else {
            let at_ms = self.started_ms + LEASE_WAIT_MS;
            let silent = Report { local: Local::Offline, version: ChainVersion::NONE, at_ms };
            return (now_ms > at_ms).then_some(silent);
        };
        let said = heard.targets.get(&target).filter(|t| t.chain == chain);
        let version = said.map_or(ChainVersion::NONE, |t| t.chain_version);
        let lease_end_ms = heard.at_ms + LEASE_WAIT_MS;
        if now_ms > lease_end_ms {
            return Some(Report { local: Local::Offline, version, at_ms: lease_end_ms });
        }
        let mut at_ms = heard.at_ms;
        if version == ChainVersion::NONE && member.state == PublicState::Serving {
            // An empty disk where a copy served: the process that had the copy may still answer.
            let old_lease_ms = self.old_lease_ms(node, heard.incarnation, target);
            if now_ms <= old_lease_ms {
                return None;
            }
            at_ms = at_ms.max(old_lease_ms);
        }
        let local = match said.map(|t| t.state) {
            Some(LocalState::Online) => Local::Online,
            Some(LocalState::UpToDate) => Local::UpToDate,
            // A living server that does not name a target does not have it.
            Some(LocalState::Offline) | None => Local::Offline,
        };
        Some(Report { local, version, at_ms })
    }

    /// Until when processes of `node` other than `incarnation` may answer from `target`. What an earlier manager
    /// granted is not known.
    fn old_lease_ms(&self, node: NodeId, incarnation: u64, target: TargetId) -> u64 {
        let before = self.heard.get(&node).filter(|heard| heard.incarnation != incarnation);
        let before = before.into_iter().flat_map(Heard::leases).find(|(id, _)| *id == target);
        let replaced = self.old_leases_ms.get(&target).copied();
        let known = before.map(|(_, until_ms)| until_ms).max(replaced);
        known.unwrap_or(0).max(self.started_ms + LEASE_WAIT_MS)
    }

    fn revive(&self, now_ms: u64, chain: &Chain) -> Revive {
        let since = self.returned_ms.get(&chain.id).copied().unwrap_or(now_ms);
        // A chain that nobody ever served waits for all its members: it has nothing to answer.
        if chain.version == ChainVersion::NEWBORN || now_ms < since + TOGETHER_MS {
            Revive::Together
        } else {
            Revive::Any
        }
    }
}

#[cfg(test)]
mod tests;

//! The operator's side of the manager: the declared table in, the cluster's status out, as JSON.

use super::{State, Stored};
use crate::schema::{DeclaredChain, DeclaredTable, DeclaredTarget};
use chain::id::{ChainId, NodeId, TargetId};
use chain::layout::{CHAINS_MAX, CHUNK_SIZE_MAX_BYTES, CHUNK_SIZE_MIN_BYTES};
use chain::table::{Chain, PublicState};
use rpc::{Code, Error};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// Most members of one chain.
const MEMBERS_MAX: usize = 16;

/// Body of `PUT /v1/table`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ChainTableSpec {
    /// The table, from 1.
    pub table_id: u32,
    /// Grows with each declaration.
    pub revision: u64,
    /// Most chains of one file; 0 = decide by the number of chains.
    #[serde(default)]
    pub stripe_size: u32,
    /// Chunk size of new files in bytes.
    pub chunk_size_bytes: u32,
    /// Ids from 1 without a gap.
    pub chains: Vec<ChainSpec>,
}

/// One chain of the table.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ChainSpec {
    /// The chain.
    pub chain_id: u32,
    /// In the order of a new chain: head first.
    pub targets: Vec<TargetSpec>,
}

/// One member of a chain.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TargetSpec {
    /// The target.
    pub target_id: u64,
    /// The server that it lives on.
    pub node_id: u32,
    /// The position of its disk, from 0.
    pub disk: u32,
}

impl ChainTableSpec {
    /// Checks the table by itself and orders it.
    ///
    /// # Errors
    /// [`Code::InvalidRequest`] names the first thing that is wrong.
    pub fn validate(&self) -> Result<DeclaredTable, Error> {
        let size = self.chunk_size_bytes;
        let size_fits = (CHUNK_SIZE_MIN_BYTES..=CHUNK_SIZE_MAX_BYTES).contains(&size);
        check(self.table_id >= 1, || "tableId must be at least 1".into())?;
        check(size_fits && size.is_power_of_two(), || {
            format!("chunkSizeBytes {size} must be a power of two from 65536 to 67108864")
        })?;
        let count = self.chains.len();
        check(count >= 1 && count <= CHAINS_MAX as usize, || format!("{count} chains"))?;
        let mut chains: Vec<&ChainSpec> = self.chains.iter().collect();
        chains.sort_by_key(|c| c.chain_id);
        let mut seen = BTreeSet::new();
        for (expected, chain) in (1u32..).zip(&chains) {
            check(chain.chain_id == expected, || {
                format!("chain ids must run from 1 without a gap: {expected} is missing or double")
            })?;
            chain.validate(&mut seen)?;
        }
        Ok(DeclaredTable {
            table: self.table_id,
            revision: self.revision,
            stripe: self.stripe_size,
            chunk_size_bytes: size,
            chains: chains.into_iter().map(ChainSpec::declared).collect(),
        })
    }
}

impl ChainSpec {
    fn validate(&self, seen: &mut BTreeSet<u64>) -> Result<(), Error> {
        let (id, count) = (self.chain_id, self.targets.len());
        check((1..=MEMBERS_MAX).contains(&count), || format!("chain {id} has {count} targets"))?;
        let mut nodes = BTreeSet::new();
        for TargetSpec { target_id, node_id, disk } in &self.targets {
            let target = TargetId::new(*target_id);
            let named = target.node() == NodeId::new(*node_id) && target.disk() == Some(*disk);
            check(named && *node_id > 0 && target_id % 100 > 0, || {
                format!("target {target_id} is not named after node {node_id} and disk {disk}")
            })?;
            check(seen.insert(*target_id), || format!("target {target_id} is in two places"))?;
            check(nodes.insert(node_id), || {
                format!("chain {id} has two targets on node {node_id}")
            })?;
        }
        Ok(())
    }

    fn declared(&self) -> DeclaredChain {
        let target =
            |t: &TargetSpec| DeclaredTarget { target: TargetId::new(t.target_id), disk: t.disk };
        DeclaredChain {
            chain: ChainId::new(self.chain_id),
            targets: self.targets.iter().map(target).collect(),
        }
    }
}

fn check(holds: bool, why: impl FnOnce() -> String) -> Result<(), Error> {
    if holds { Ok(()) } else { Err(Error::new(Code::InvalidRequest, why())) }
}

fn conflict<T>(why: String) -> Result<T, Error> {
    Err(Error::new(Code::Conflict, why))
}

/// The chains that a declaration adds to what is stored: nothing for the same table again.
///
/// # Errors
/// [`Code::Conflict`] for a declaration that is older, or changes or drops what is there.
pub(super) fn new_chains(stored: &Stored, table: &DeclaredTable) -> Result<Vec<Chain>, Error> {
    if let Some(known) = &stored.table {
        let (old, new) = (known.revision, table.revision);
        if known == table {
            return Ok(Vec::new());
        }
        if new <= old {
            return conflict(format!("revision {new} differs from the declared revision {old}"));
        }
        if known.table != table.table {
            return conflict(format!("the table is {}, not {}", known.table, table.table));
        }
        for chain in &known.chains {
            let same = table.chains.iter().any(|c| {
                let set = |c: &DeclaredChain| -> BTreeSet<TargetId> {
                    c.targets.iter().map(|t| t.target).collect()
                };
                c.chain == chain.chain && set(c) == set(chain)
            });
            if !same {
                return conflict(format!(
                    "chain {} exists: its members cannot change",
                    chain.chain
                ));
            }
        }
    }
    let is_new = |c: &&DeclaredChain| !stored.chains.contains_key(&c.chain);
    let newborn = |c: &DeclaredChain| {
        let targets: Vec<TargetId> = c.targets.iter().map(|t| t.target).collect();
        Chain::newborn(c.chain, &targets)
    };
    Ok(table.chains.iter().filter(is_new).map(newborn).collect())
}

/// Answer to `GET /v1/status`.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClusterStatus {
    cluster: String,
    ready: bool,
    table_revision: u64,
    table: Option<TableStatus>,
    chains: ChainCounts,
    nodes: Vec<NodeStatus>,
}

/// Which table was declared, so that the operator can tell it from the one that it would declare:
/// data outlives a StorageCluster, and its successor may have another shape.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TableStatus {
    /// See [`TableStatus::of`].
    digest: String,
    nodes: usize,
    chains: usize,
    /// Members of the longest chain.
    replicas: usize,
    /// Of the node that has most.
    targets_per_node: usize,
    chunk_size_bytes: u32,
}

impl TableStatus {
    /// The digest is SHA-256, in hex, of a line for the table and one for each chain in the order
    /// of ids, its targets head first:
    ///
    /// ```text
    /// table 1 revision 1 stripe 0 chunk 1048576
    /// chain 1: 100010101/0 100020101/0 100030101/0
    /// ```
    ///
    /// The operator makes the same of what it declares; `tests/declared-table.json` holds both to
    /// it.
    #[must_use]
    pub fn of(table: &DeclaredTable) -> Self {
        let DeclaredTable { table: id, revision, stripe, chunk_size_bytes, chains } = table;
        let mut text =
            format!("table {id} revision {revision} stripe {stripe} chunk {chunk_size_bytes}\n");
        let mut targets: BTreeMap<NodeId, usize> = BTreeMap::new();
        for chain in chains {
            // Writing into a String never fails.
            let _ = write!(text, "chain {}:", chain.chain.get());
            for DeclaredTarget { target, disk } in &chain.targets {
                let _ = write!(text, " {}/{disk}", target.get());
                *targets.entry(target.node()).or_default() += 1;
            }
            text.push('\n');
        }
        let digest = Sha256::digest(text.as_bytes());
        Self {
            digest: digest.iter().map(|byte| format!("{byte:02x}")).collect(),
            nodes: targets.len(),
            chains: chains.len(),
            replicas: chains.iter().map(|c| c.targets.len()).max().unwrap_or(0),
            targets_per_node: targets.into_values().max().unwrap_or(0),
            chunk_size_bytes: *chunk_size_bytes,
        }
    }
}

#[derive(Clone, Debug, Default, Serialize)]
struct ChainCounts {
    total: usize,
    serving: usize,
    degraded: usize,
    unavailable: usize,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct NodeStatus {
    node_id: u32,
    address: String,
    alive: bool,
    last_heartbeat_ms: Option<u64>,
    targets: TargetCounts,
    capacity_bytes: u64,
    used_bytes: u64,
}

#[derive(Clone, Copy, Debug, Default, Serialize)]
struct TargetCounts {
    total: usize,
    serving: usize,
    syncing: usize,
    offline: usize,
}

impl ClusterStatus {
    /// The status at a time.
    #[must_use]
    pub fn of(now_ms: u64, state: &State) -> Self {
        let mut chains = ChainCounts::default();
        for chain in state.stored.chains.values() {
            chains.total += 1;
            match chain.serving().count() {
                0 => chains.unavailable += 1,
                n if n < chain.targets.len() => chains.degraded += 1,
                _ => chains.serving += 1,
            }
        }
        Self {
            cluster: state.cluster.clone(),
            ready: chains.total > 0 && chains.unavailable == 0,
            table_revision: state.stored.table.as_ref().map_or(0, |t| t.revision),
            table: state.stored.table.as_ref().map(TableStatus::of),
            chains,
            nodes: state
                .stored
                .nodes
                .keys()
                .map(|node| NodeStatus::of(now_ms, state, *node))
                .collect(),
        }
    }
}

impl NodeStatus {
    fn of(now_ms: u64, state: &State, node: NodeId) -> Self {
        let heard = state.heard(node);
        let mut targets = TargetCounts::default();
        let chains = state.chains_of.get(&node).into_iter().flatten();
        let members = chains.filter_map(|c| state.stored.chains.get(c)).flat_map(|c| &c.targets);
        for target in members.filter(|t| t.id.node() == node) {
            targets.total += 1;
            match target.state {
                PublicState::Serving => targets.serving += 1,
                PublicState::Syncing | PublicState::Waiting => targets.syncing += 1,
                PublicState::Offline | PublicState::LastServing => targets.offline += 1,
            }
        }
        Self {
            node_id: node.get(),
            address: state.stored.nodes.get(&node).map(|n| n.address.clone()).unwrap_or_default(),
            alive: state.is_alive(now_ms, node),
            last_heartbeat_ms: heard.map(|h| now_ms.saturating_sub(h.at_ms)),
            targets,
            capacity_bytes: heard.map_or(0, |h| h.capacity_bytes),
            used_bytes: heard.map_or(0, |h| h.used_bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_declared_table_has_the_digest_that_the_operator_expects() {
        let golden = include_str!("../../tests/declared-table.json");
        let golden: serde_json::Value = serde_json::from_str(golden).unwrap();
        let spec: ChainTableSpec = serde_json::from_value(golden["body"].clone()).unwrap();
        let status = TableStatus::of(&spec.validate().unwrap());
        assert_eq!(serde_json::to_value(&status).unwrap(), golden["status"]);
        // The same table in another order is the same; any other is not.
        let mut turned = spec.clone();
        turned.chains.reverse();
        assert_eq!(TableStatus::of(&turned.validate().unwrap()), status);
        let mut others = vec![spec; 4];
        others[0].revision += 1;
        others[1].chunk_size_bytes *= 2;
        others[2].chains[0].targets.swap(0, 1);
        others[3].chains.pop();
        for other in others {
            assert_ne!(TableStatus::of(&other.validate().unwrap()).digest, status.digest);
        }
    }

    #[test]
    fn the_status_speaks_of_what_is_stored() {
        let golden = include_str!("../../tests/declared-table.json");
        let golden: serde_json::Value = serde_json::from_str(golden).unwrap();
        let spec: ChainTableSpec = serde_json::from_value(golden["body"].clone()).unwrap();
        let mut state = State::new("test".into(), 0, Stored::default());
        let said = |state: &State| serde_json::to_value(ClusterStatus::of(0, state)).unwrap();
        assert!(said(&state)["table"].is_null());
        let declare = super::super::Event::Declare(spec.validate().unwrap());
        let decision = super::super::decide(0, &state, &declare).unwrap();
        state.apply(0, decision);
        assert_eq!(said(&state)["table"], golden["status"]);
        // Read anew from the store.
        let again = State::new("test".into(), 0, state.stored().clone());
        assert_eq!(said(&again)["table"], golden["status"]);
    }
}

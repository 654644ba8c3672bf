//! What a StorageCluster needs next. Ids first (a StorageNode object for each), then servers, then,
//! once every server's failure domain is known, the chain table. Chain health comes from the
//! manager alone, never from pod readiness.

use std::collections::BTreeMap;

use crds::cluster::{Endpoints, StorageCount, manager_address};
use crds::names::{FIRST_NODE_ID, LABEL_NODE_ID};
use crds::shared::{ChainCount, TargetCount};
use crds::{ChainTable, StorageCluster, StorageClusterStatus, StorageNode, StorageNodeStatus};
use kube::ResourceExt;
use serde::Deserialize;
use serde_json::{Value, json};

use super::condition::{self, Verdict};
use super::workload::{self, meta_name, storage_name};
use super::{API_VERSION, Action, Children, Env, ObjectId, Plan, diff};

/// Seconds between looks at a cluster that is as it should be, and at one that is not.
const IDLE_S: u64 = 15;
const BUSY_S: u64 = 3;

/// What is known about one cluster.
#[derive(Debug)]
pub struct ClusterView {
    /// The object.
    pub cluster: StorageCluster,
    /// Its StorageNodes.
    pub nodes: Vec<StorageNode>,
    /// Its ChainTable.
    pub table: Option<ChainTable>,
    /// StatefulSets, Services and PodDisruptionBudgets that carry its label.
    pub children: Children,
    /// Kubernetes node of each storage pod, by storage node id.
    pub hosts: BTreeMap<i64, String>,
    /// Value of the failure-domain label of each of those nodes that has one.
    pub domains: BTreeMap<String, String>,
    /// What the manager says, if it answered.
    pub manager: Option<ManagerStatus>,
}

/// The manager's own account of its cluster.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct ManagerStatus {
    /// Whether it serves.
    pub ready: bool,
    /// Revision of the table that it serves; 0 without one.
    pub table_revision: i64,
    /// Which table that is; an older manager does not say.
    pub table: Option<ManagerTable>,
    /// Chains by state.
    pub chains: ChainCount,
    /// Storage nodes that it knows.
    pub nodes: Vec<ManagerNode>,
}

/// The table that the manager keeps.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct ManagerTable {
    /// As [`super::table::digest`] makes it.
    pub digest: String,
    /// Storage nodes in it.
    pub nodes: i64,
    /// Length of its chains.
    pub replicas: i64,
    /// Targets on each node.
    pub targets_per_node: i64,
    /// Bytes of a chunk.
    pub chunk_size_bytes: i64,
}

/// One storage node as the manager sees it.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct ManagerNode {
    /// Permanent id.
    pub node_id: i64,
    /// Whether its lease is valid.
    pub alive: bool,
    /// Targets by state.
    pub targets: TargetCount,
    /// Bytes that it can hold.
    pub capacity_bytes: i64,
}

/// Decides what to do about the cluster.
#[must_use]
pub fn plan(view: &ClusterView, env: &Env) -> Plan {
    let mut plan = Plan::default();
    if view.cluster.metadata.deletion_timestamp.is_some() {
        return plan;
    }
    let ids = wanted_ids(view);
    for id in ids.iter().filter(|id| !view.nodes.iter().any(|n| n.spec.node_id == **id)) {
        plan.actions.push(Action::Create(storage_node(&view.cluster, *id)));
    }
    for object in workload::shared_objects(&view.cluster) {
        let observed = child(view, &object);
        plan.ensure(object, observed);
    }
    let waiting = roll_out(&mut plan, view, &ids, env);
    plan.actions.extend(orphans(view, &ids).map(Action::Delete));
    for node in &view.nodes {
        node_status(&mut plan, view, node, env);
    }
    if view.table.is_none()
        && let Some(members) = members(view, &ids)
    {
        plan.actions.push(Action::Create(chain_table(&view.cluster, &members)));
    }
    cluster_status(&mut plan, view, &ids, &waiting, env);
    plan
}

/// The table's members once there is one: their data sits behind their ids. Before, the nodes that
/// exist and as many fresh ids as are missing; an id that was given out is never given out again.
fn wanted_ids(view: &ClusterView) -> Vec<i64> {
    if let Some(table) = &view.table {
        return table.spec.nodes.iter().map(|node| node.node_id).collect();
    }
    let mut ids: Vec<i64> = view.nodes.iter().map(|node| node.spec.node_id).collect();
    ids.sort_unstable();
    let mut last = ids.last().copied().unwrap_or(FIRST_NODE_ID - 1).max(high_water(view));
    let count = usize::try_from(view.cluster.spec.storage.count).unwrap_or_default();
    while ids.len() < count {
        last += 1;
        ids.push(last);
    }
    ids
}

fn high_water(view: &ClusterView) -> i64 {
    let status = view.cluster.status.as_ref();
    status.and_then(|s| s.last_node_id).unwrap_or(FIRST_NODE_ID - 1)
}

fn child<'a>(view: &'a ClusterView, desired: &Value) -> Option<&'a Value> {
    let id = ObjectId::of(desired);
    view.children.get(&(id.kind, id.name))
}

/// Applies the StatefulSets. A missing one or one that is down is applied at once; of those that
/// serve, one at a time, and only while every chain has all its replicas. Returns what waits.
fn roll_out(plan: &mut Plan, view: &ClusterView, ids: &[i64], env: &Env) -> Vec<String> {
    let mut sets = vec![workload::meta_set(&view.cluster, &env.images)];
    sets.extend(ids.iter().map(|id| workload::storage_set(&view.cluster, *id, &env.images)));
    let mut open = gate_is_open(view, &sets);
    let mut waiting = Vec::new();
    for set in sets {
        let observed = child(view, &set);
        let changed = observed.is_some_and(|have| !diff::covers(&set, have));
        if !changed || !observed.is_some_and(set_is_ready) {
            plan.ensure(set, observed);
        } else if open {
            open = false;
            plan.ensure(set, observed);
        } else {
            waiting.push(ObjectId::of(&set).name);
        }
    }
    waiting
}

/// The servers of StorageNodes that were deleted before there was a chain table: nobody wants them,
/// and no data is on them. Their claims stay.
fn orphans<'a>(view: &'a ClusterView, ids: &'a [i64]) -> impl Iterator<Item = ObjectId> + 'a {
    let cluster = &view.cluster;
    let never_had_a_table = never_had_a_table(view);
    let sets = view.children.values().filter(|child| child["kind"] == "StatefulSet");
    let deleting = |set: &Value| set["metadata"]["deletionTimestamp"].is_string();
    sets.filter(move |set| never_had_a_table && !deleting(set)).filter_map(move |set| {
        let id: i64 = set["metadata"]["labels"][LABEL_NODE_ID].as_str()?.parse().ok()?;
        let found = ObjectId::of(set);
        // Whatever else carries our labels, we made servers of this name and owner only.
        let ours = found.name == storage_name(&cluster.name_any(), id)
            && cluster.uid().is_some_and(|uid| is_owned_by(set, &uid));
        (ours && !ids.contains(&id)).then_some(found)
    })
}

fn is_owned_by(object: &Value, uid: &str) -> bool {
    let owners = object["metadata"]["ownerReferences"].as_array();
    owners.into_iter().flatten().any(|owner| owner["uid"] == uid)
}

/// Whether the cluster has no data for certain. That no ChainTable is there is not enough: it may
/// have been deleted, and its members' ids with the StorageNodes. The manager keeps the table that
/// data lies in, also that of an earlier cluster of this name; and where its volume was lost, the
/// cluster's own status remembers that there were chains.
fn never_had_a_table(view: &ClusterView) -> bool {
    let old = view.cluster.status.clone().unwrap_or_default();
    let had_chains = booted(&old) || old.chains.is_some_and(|chains| chains.total > 0);
    let manager_has_none = view
        .manager
        .as_ref()
        .is_some_and(|manager| manager.table_revision == 0 && manager.chains.total == 0);
    view.table.is_none() && manager_has_none && !had_chains
}

/// Whether taking one server away for a moment leaves every chain readable and writable.
fn gate_is_open(view: &ClusterView, sets: &[Value]) -> bool {
    let all_ready = sets.iter().filter_map(|set| child(view, set)).all(set_is_ready);
    let healthy = view
        .manager
        .as_ref()
        .is_some_and(|manager| manager.chains.degraded == 0 && manager.chains.unavailable == 0);
    all_ready && (healthy || view.table.is_none())
}

fn set_is_ready(set: &Value) -> bool {
    let status = &set["status"];
    status["readyReplicas"] == 1
        && status["updatedReplicas"] == 1
        && status["observedGeneration"] == set["metadata"]["generation"]
}

fn storage_node(cluster: &StorageCluster, id: i64) -> Value {
    let mut labels = workload::labels(cluster);
    labels[LABEL_NODE_ID] = json!(id.to_string());
    let name = storage_name(&cluster.name_any(), id);
    json!({
        "apiVersion": API_VERSION,
        "kind": "StorageNode",
        "metadata": workload::metadata(cluster, &name, &labels),
        "spec": {"clusterRef": {"name": cluster.name_any()}, "nodeId": id},
    })
}

fn chain_table(cluster: &StorageCluster, members: &[(i64, String)]) -> Value {
    let storage = &cluster.spec.storage;
    let name = format!("{}-table-1", cluster.name_any());
    let nodes: Vec<Value> =
        members.iter().map(|(id, domain)| json!({"nodeId": id, "failureDomain": domain})).collect();
    let chunk = diff::quantity_milli(&storage.chunk_size.0).unwrap_or_default() / 1_000;
    json!({
        "apiVersion": API_VERSION,
        "kind": "ChainTable",
        "metadata": workload::metadata(cluster, &name, &workload::labels(cluster)),
        "spec": {
            "clusterRef": {"name": cluster.name_any()},
            "tableId": 1,
            "revision": 1,
            "replicas": storage.replicas,
            "targetsPerNode": storage.targets_per_node,
            "chunkSizeBytes": i64::try_from(chunk).unwrap_or_default(),
            "nodes": nodes,
        },
    })
}

/// Every wanted id with its failure domain, once all are known.
fn members(view: &ClusterView, ids: &[i64]) -> Option<Vec<(i64, String)>> {
    ids.iter().map(|id| Some((*id, domain_of(view, *id)?))).collect()
}

fn domain_of(view: &ClusterView, id: i64) -> Option<String> {
    view.domains.get(view.hosts.get(&id)?).cloned()
}

fn node_status(plan: &mut Plan, view: &ClusterView, node: &StorageNode, env: &Env) {
    let id = node.spec.node_id;
    let old = node.status.clone().unwrap_or_default();
    let mut status = StorageNodeStatus {
        observed_generation: node.metadata.generation,
        node_name: view.hosts.get(&id).cloned().or_else(|| old.node_name.clone()),
        failure_domain: domain_of(view, id).or_else(|| old.failure_domain.clone()),
        ..old.clone()
    };
    let seen = view.manager.as_ref().map(|m| m.nodes.iter().find(|n| n.node_id == id));
    let host = status.node_name.clone().unwrap_or_else(|| "no node yet".to_owned());
    if let Some(seen) = seen {
        if let Some(seen) = seen {
            status.targets = Some(seen.targets.clone());
            status.capacity_bytes = Some(seen.capacity_bytes).filter(|bytes| *bytes > 0);
        }
        let (phase, verdict) = judge_node(seen, &host);
        status.phase = Some(phase.to_owned());
        let generation = node.metadata.generation;
        condition::set(&mut status.conditions, "Ready", verdict, generation, env.now);
    }
    if status != old {
        let id =
            ObjectId::new("StorageNode", &node.namespace().unwrap_or_default(), &node.name_any());
        plan.status(id, json!(status));
    }
}

fn judge_node(seen: Option<&ManagerNode>, host: &str) -> (&'static str, Verdict) {
    let Some(seen) = seen else {
        let text = "the manager has not heard from it yet";
        return ("Pending", Verdict::no("NotRegistered", text));
    };
    let targets = &seen.targets;
    if !seen.alive {
        let text = format!("the manager lost it on {host}: see its pod and that node");
        ("Lost", Verdict::no("LeaseExpired", text))
    } else if targets.total == 0 {
        ("Pending", Verdict::no("NoTargets", "it waits for the chain table"))
    } else if targets.serving == targets.total {
        ("Serving", Verdict::yes("Serving", format!("all {} targets serve", targets.total)))
    } else {
        let text = format!("{} of {} targets serve", targets.serving, targets.total);
        ("Syncing", Verdict::no("CatchingUp", text))
    }
}

fn cluster_status(plan: &mut Plan, view: &ClusterView, ids: &[i64], waiting: &[String], env: &Env) {
    let cluster = &view.cluster;
    let (name, namespace) = (cluster.name_any(), cluster.namespace().unwrap_or_default());
    let generation = cluster.metadata.generation;
    let old = cluster.status.clone().unwrap_or_default();
    let mut status = StorageClusterStatus { observed_generation: generation, ..old.clone() };
    status.last_node_id = ids.iter().copied().max().max(old.last_node_id);
    status.endpoints = Some(Endpoints { manager: manager_address(&name, &namespace) });
    if let Some(manager) = &view.manager {
        let ready = manager.nodes.iter().filter(|n| n.alive && ids.contains(&n.node_id)).count();
        let (ready, desired) = (as_i32(ready), as_i32(ids.len()));
        status.storage = Some(StorageCount { ready, desired, text: format!("{ready}/{desired}") });
        status.chains = Some(manager.chains.clone());
    }
    let ready = readiness(view, ids, &old);
    let degraded = view.manager.as_ref().map_or_else(
        || Verdict {
            status: "Unknown",
            reason: "ManagerUnavailable".to_owned(),
            message: "the manager does not answer".to_owned(),
        },
        |manager| lost_nodes(view, manager, booted(&old)),
    );
    let progressing = progress(plan, waiting);
    status.phase = Some(phase(&ready, &degraded, booted(&old)).to_owned());
    let settled = ready.holds() && !degraded.holds() && !progressing.holds();
    let list = &mut status.conditions;
    let told = (ready.clone(), degraded.clone());
    if condition::set(list, "Ready", ready, generation, env.now) {
        tell_ready(plan, &told.0);
    }
    let was = condition::is_true(list, "Degraded");
    condition::set(list, "Degraded", degraded, generation, env.now);
    if told.1.holds() && !was {
        plan.notice(true, &told.1.reason, told.1.message);
    }
    condition::set(list, "Progressing", progressing, generation, env.now);
    if status != old {
        plan.status(ObjectId::new("StorageCluster", &namespace, &name), json!(status));
    }
    plan.requeue(if settled { IDLE_S } else { BUSY_S });
}

fn as_i32(count: usize) -> i32 {
    i32::try_from(count).unwrap_or(i32::MAX)
}

fn tell_ready(plan: &mut Plan, ready: &Verdict) {
    let warning = !ready.holds()
        && ["FailureDomainMissing", "NoPlacement", "TableRefused", "ChainsUnavailable"]
            .contains(&&*ready.reason);
    if warning || ready.holds() {
        plan.notice(warning, &ready.reason, ready.message.clone());
    }
}

fn progress(plan: &Plan, waiting: &[String]) -> Verdict {
    let writes = plan.actions.iter().filter(|a| matches!(a, Action::Apply(_) | Action::Create(_)));
    match (waiting.first(), writes.count()) {
        (Some(first), _) => Verdict::yes(
            "RollingOut",
            format!("{first} is next; it waits until every chain has all its replicas"),
        ),
        (None, 0) => Verdict::no("UpToDate", "every object is as it should be"),
        (None, _) => Verdict::yes("Applying", "objects are being written"),
    }
}

fn phase(ready: &Verdict, degraded: &Verdict, booted: bool) -> &'static str {
    match (ready.holds(), degraded.holds()) {
        (_, true) => "Degraded",
        (true, false) => "Ready",
        (false, false) if booted => "Unavailable",
        (false, false) => "Pending",
    }
}

/// Whether the cluster has ever been Ready: before, replicas that are not there yet are no loss.
fn booted(old: &StorageClusterStatus) -> bool {
    matches!(old.phase.as_deref(), Some("Ready" | "Degraded" | "Unavailable"))
}

/// Ready once every chain had all its replicas; from then on as long as every chain can be read.
fn readiness(view: &ClusterView, ids: &[i64], old: &StorageClusterStatus) -> Verdict {
    if let Some(verdict) = unplaced(view, ids) {
        return verdict;
    }
    if let Some((reason, problem)) = view.table.as_ref().and_then(table_problem) {
        return Verdict::no(reason, problem);
    }
    let Some(manager) = &view.manager else {
        let text = format!(
            "the manager does not answer: see pod {}-0",
            meta_name(&view.cluster.name_any())
        );
        return Verdict::no("ManagerUnavailable", text);
    };
    let chains = &manager.chains;
    if !manager.ready || manager.table_revision == 0 || chains.total == 0 {
        Verdict::no("Bootstrapping", "the manager does not serve a chain table yet")
    } else if chains.serving < chains.total && !booted(old) {
        let text = format!("{} of {} chains have all their replicas", chains.serving, chains.total);
        Verdict::no("Bootstrapping", text)
    } else if !is_accepted(view) && !booted(old) {
        Verdict::no("Bootstrapping", "the chain table is being given to the manager")
    } else if chains.unavailable > 0 {
        let text = format!(
            "{} of {} chains have no replica that serves",
            chains.unavailable, chains.total
        );
        Verdict::no("ChainsUnavailable", text)
    } else if chains.degraded > 0 {
        Verdict::yes("ChainsServing", "every chain can be read and written")
    } else {
        Verdict::yes("AllChainsServing", "every chain has all its replicas")
    }
}

/// Why the chain table cannot be made yet.
fn unplaced(view: &ClusterView, ids: &[i64]) -> Option<Verdict> {
    if view.table.is_some() {
        return None;
    }
    let label = &view.cluster.spec.storage.failure_domain;
    let bare = view.hosts.values().find(|host| !view.domains.contains_key(*host));
    if let Some(host) = bare {
        let text =
            format!("node {host} has no label {label}: label it, or choose another failureDomain");
        return Some(Verdict::no("FailureDomainMissing", text));
    }
    let placed = ids.iter().filter(|id| view.hosts.contains_key(id)).count();
    let text = format!("{placed} of {} storage pods are scheduled", ids.len());
    (placed < ids.len()).then(|| Verdict::no("Scheduling", text))
}

fn table_problem(table: &ChainTable) -> Option<(&str, String)> {
    let status = table.status.as_ref()?;
    let ready = status.conditions.iter().find(|c| c.type_ == "Ready")?;
    let is_problem = ["NoPlacement", "TableRefused"].contains(&&*ready.reason);
    is_problem.then(|| (&*ready.reason, ready.message.clone()))
}

/// Whether the manager was seen to serve this very table, and not one of an earlier cluster.
fn is_accepted(view: &ClusterView) -> bool {
    let status = view.table.as_ref().and_then(|table| table.status.as_ref());
    status.is_some_and(|status| status.accepted_revision.is_some())
}

fn lost_nodes(view: &ClusterView, manager: &ManagerStatus, booted: bool) -> Verdict {
    let Some(table) = view.table.as_ref().filter(|_| manager.table_revision != 0) else {
        return Verdict::no("NoTable", "there is no chain table yet");
    };
    let verdict = super::table::degraded(&manager.chains);
    if !verdict.holds() {
        return verdict;
    }
    if !booted {
        return Verdict::no("Bootstrapping", "the first replicas are starting");
    }
    let name = view.cluster.name_any();
    // The manager also remembers those that were deleted before there was a table.
    let is_member = |id: i64| table.spec.nodes.iter().any(|node| node.node_id == id);
    let lost: Vec<String> = manager
        .nodes
        .iter()
        .filter(|node| !node.alive && is_member(node.node_id))
        .map(|node| {
            let host = view.hosts.get(&node.node_id).map_or("no node", String::as_str);
            format!("{}-0 on {host}", storage_name(&name, node.node_id))
        })
        .take(5)
        .collect();
    let hint = if lost.is_empty() {
        "replicas are catching up".to_owned()
    } else {
        format!("lost: {}; see those pods and nodes", lost.join(", "))
    };
    Verdict::yes(&verdict.reason, format!("{}; {hint}", verdict.message))
}

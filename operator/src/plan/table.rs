//! From a ChainTable's members to the table that the manager serves. The design is written into
//! the status first and pushed from there: a newer operator may design
//! another table from the same members, and the manager refuses a second body for one revision.

use std::collections::BTreeMap;
use std::fmt::Write;

use crds::names::LABEL_CLUSTER;
use crds::shared::ChainCount;
use crds::table::DesignStatus;
use crds::{ChainTable, ChainTableStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::ResourceExt;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::cluster::{ManagerStatus, ManagerTable};
use super::condition::{self, Verdict};
use super::{Action, Env, ObjectId, Plan};
use crate::placement::{self, MOVES_DEFAULT, NodeInput};

/// Seconds between looks at a manager that serves the table, and at one that does not.
const IDLE_S: u64 = 15;
const BUSY_S: u64 = 2;

/// What is known about one table.
#[derive(Debug)]
pub struct TableView {
    /// The object.
    pub table: ChainTable,
    /// What the manager says, if it answered.
    pub manager: Option<ManagerStatus>,
    /// The manager's refusal of the last push, if there was one.
    pub refusal: Option<String>,
}

/// What the manager has of the table.
#[derive(Debug)]
enum Standing {
    /// It does not answer.
    Silent,
    /// Nothing, or an older revision.
    Missing,
    /// The table.
    Accepted,
    /// Another one: what differs and what to do.
    Differs(String),
}

/// Decides what to do about the table.
#[must_use]
pub fn plan(view: &TableView, env: &Env) -> Plan {
    let mut plan = Plan::default();
    let table = &view.table;
    if table.metadata.deletion_timestamp.is_some() {
        return plan;
    }
    let old = table.status.clone().unwrap_or_default();
    let mut status = old.clone();
    status.observed_generation = table.metadata.generation;
    let mut verdict = None;
    if status.chains.is_empty() {
        match solve(table) {
            Ok((chains, design)) => (status.chains, status.design) = (chains, Some(design)),
            Err(reason) => verdict = Some(Verdict::no("NoPlacement", reason)),
        }
    }
    let designed_before = !old.chains.is_empty();
    let standing = standing(view, &status.chains);
    let accepted = matches!(standing, Standing::Accepted);
    if accepted {
        status.accepted_revision = Some(table.spec.revision);
    } else if matches!(standing, Standing::Differs(_)) {
        status.accepted_revision = None;
    } else if matches!(standing, Standing::Missing) && designed_before {
        let namespace = table.namespace().unwrap_or_default();
        let host = format!(
            "{}-meta.{namespace}.svc:{}",
            table.spec.cluster_ref.name,
            crds::names::META_ADMIN_PORT
        );
        plan.actions.push(Action::PushTable(host, body(table, &old.chains)));
    }
    if let Some(manager) = view.manager.as_ref().filter(|_| accepted) {
        status.health = Some(manager.chains.clone());
    }
    let verdict = verdict.unwrap_or_else(|| readiness(view, standing));
    let ready = verdict.holds();
    conclude(&mut plan, &mut status, view, verdict, env);
    if status != old {
        let id =
            ObjectId::new("ChainTable", &table.namespace().unwrap_or_default(), &table.name_any());
        plan.status(id, json!(status));
    }
    plan.requeue(if ready { IDLE_S } else { BUSY_S });
    plan
}

/// Whether the manager serves this very table.
#[must_use]
pub fn is_accepted(view: &TableView) -> bool {
    let status = view.table.status.as_ref();
    status.is_some_and(|status| matches!(standing(view, &status.chains), Standing::Accepted))
}

fn standing(view: &TableView, chains: &[String]) -> Standing {
    let Some(manager) = &view.manager else { return Standing::Silent };
    if manager.table_revision < view.table.spec.revision || chains.is_empty() {
        return Standing::Missing;
    }
    match &manager.table {
        // An older manager knows no more than the revision: nothing says that it has another table.
        None => Standing::Accepted,
        Some(kept) if kept.digest == digest(&body(&view.table, chains)) => Standing::Accepted,
        Some(kept) => Standing::Differs(difference(&view.table, kept)),
    }
}

/// The manager's table is the one that its data lies in. It stays when a StorageCluster is deleted,
/// and the next one of that name finds it again.
fn difference(table: &ChainTable, kept: &ManagerTable) -> String {
    let spec = &table.spec;
    let wanted = i64::try_from(spec.nodes.len()).unwrap_or(i64::MAX);
    // As a manifest says it.
    let size = |bytes: i64| match bytes % (1 << 20) {
        0 => format!("{}Mi", bytes >> 20),
        _ => format!("{}Ki", bytes >> 10),
    };
    let number = |number: i64| number.to_string();
    let fields = [
        ("count", number(kept.nodes), number(wanted)),
        ("replicas", number(kept.replicas), number(spec.replicas.into())),
        ("targetsPerNode", number(kept.targets_per_node), number(spec.targets_per_node.into())),
        ("chunkSize", size(kept.chunk_size_bytes), size(spec.chunk_size_bytes)),
    ];
    let differ = fields.iter().filter(|(_, kept, wanted)| kept != wanted);
    let mut parts: Vec<String> = differ
        .map(|(name, kept, wanted)| format!("storage.{name} {kept} (now {wanted})"))
        .collect();
    if parts.is_empty() {
        parts.push("other chains of the same nodes (another storage.failureDomain?)".to_owned());
    }
    let cluster = &spec.cluster_ref.name;
    format!(
        "it keeps the table and the data of an earlier StorageCluster {cluster}, which had {}: \
         delete this one and create it as that was, or, to begin without the data, delete the \
         PersistentVolumeClaims with label {LABEL_CLUSTER}={cluster} too",
        parts.join(", ")
    )
}

fn readiness(view: &TableView, standing: Standing) -> Verdict {
    let refused =
        |why: &str| Verdict::no("TableRefused", format!("the manager refused the table: {why}"));
    match (standing, &view.refusal) {
        (Standing::Accepted, _) => Verdict::yes("Accepted", "the manager serves this table"),
        (Standing::Differs(why), _) => refused(&why),
        (_, Some(why)) => refused(why),
        (Standing::Silent, None) => {
            Verdict::no("ManagerUnavailable", "the manager does not answer")
        }
        (Standing::Missing, None) => {
            Verdict::no("Pushing", "the table is being given to the manager")
        }
    }
}

fn conclude(
    plan: &mut Plan,
    status: &mut ChainTableStatus,
    view: &TableView,
    verdict: Verdict,
    env: &Env,
) {
    let generation = view.table.metadata.generation;
    let list: &mut Vec<Condition> = &mut status.conditions;
    let message = verdict.message.clone();
    let (ready, reason) = (verdict.holds(), verdict.reason.clone());
    let changed = condition::set(list, "Ready", verdict, generation, env.now);
    if changed && ready {
        plan.notice(false, &reason, message);
    } else if changed && (reason == "NoPlacement" || reason == "TableRefused") {
        plan.notice(true, &reason, message);
    }
    if let Some(design) = &status.design {
        let within = design.lambda_max <= design.lower_bound + 1;
        let text = format!(
            "two nodes share at most {} chains; no design does better than {}",
            design.lambda_max, design.lower_bound
        );
        let balanced = if within { Verdict::yes } else { Verdict::no };
        condition::set(list, "Balanced", balanced(&design.kind, text), generation, env.now);
    }
    if let Some(health) = &status.health {
        let verdict = degraded(health);
        condition::set(list, "Degraded", verdict, generation, env.now);
    }
}

/// Whether chains run with fewer replicas than they should.
#[must_use]
pub fn degraded(health: &ChainCount) -> Verdict {
    match (health.unavailable, health.degraded) {
        (0, 0) => Verdict::no("AllServing", format!("all {} chains serve", health.total)),
        (0, n) => Verdict::yes(
            "ReplicasMissing",
            format!("{n} of {} chains miss a replica", health.total),
        ),
        (n, _) => Verdict::yes(
            "ChainsUnavailable",
            format!("{n} of {} chains have no replica", health.total),
        ),
    }
}

/// The chains, head first, as text, and the quality of the design.
fn solve(table: &ChainTable) -> Result<(Vec<String>, DesignStatus), String> {
    let mut nodes = Vec::new();
    for node in &table.spec.nodes {
        let id = u32::try_from(node.node_id)
            .map_err(|_| format!("node id {} is too large", node.node_id))?;
        nodes.push(NodeInput { id, domain: node.failure_domain.clone() });
    }
    let number = |n: i32| usize::try_from(n).unwrap_or_default();
    let (replicas, targets) = (number(table.spec.replicas), number(table.spec.targets_per_node));
    let seed = u64::try_from(table.spec.table_id).unwrap_or_default();
    let design = placement::design(&nodes, replicas, targets, seed, MOVES_DEFAULT)
        .map_err(|error| error.to_string())?;
    let words = |group: &Vec<u32>| group.iter().map(u32::to_string).collect::<Vec<_>>().join(" ");
    let kind = match design.kind {
        placement::Kind::Exact => "Exact",
        placement::Kind::Balanced => "Balanced",
    };
    let quality = DesignStatus {
        kind: kind.to_owned(),
        lambda_max: i64::from(design.lambda_max),
        lambda_min: i64::from(design.lambda_min),
        lower_bound: i64::from(design.lower_bound),
    };
    Ok((design.groups.iter().map(words).collect(), quality))
}

/// The table as the manager takes it. Target ids follow from the order of the chains: the first
/// chain that a node is in has its slot 0, and so on.
#[must_use]
pub fn body(table: &ChainTable, chains: &[String]) -> Value {
    let mut slots: BTreeMap<i64, i64> = BTreeMap::new();
    let mut list = Vec::new();
    for (index, line) in chains.iter().enumerate() {
        let members = line.split(' ').filter_map(|word| word.parse::<i64>().ok());
        let targets: Vec<Value> = members
            .map(|node| {
                let slot = slots.entry(node).or_default();
                *slot += 1;
                json!({"targetId": node * 10_000 + 100 + *slot, "nodeId": node, "disk": 0})
            })
            .collect();
        list.push(json!({"chainId": index + 1, "targets": targets}));
    }
    json!({
        "tableId": table.spec.table_id,
        "revision": table.spec.revision,
        "stripeSize": 0,
        "chunkSizeBytes": table.spec.chunk_size_bytes,
        "chains": list,
    })
}

/// What tells the table in `body` from every other: the same text as the manager makes of a table
/// that it was given, hashed (see `TableStatus` in `meta/src/manager/spec.rs`).
#[must_use]
pub fn digest(body: &Value) -> String {
    let mut text = format!(
        "table {} revision {} stripe {} chunk {}\n",
        body["tableId"], body["revision"], body["stripeSize"], body["chunkSizeBytes"]
    );
    for chain in body["chains"].as_array().into_iter().flatten() {
        // Writing into a String never fails.
        let _ = write!(text, "chain {}:", chain["chainId"]);
        for target in chain["targets"].as_array().into_iter().flatten() {
            let _ = write!(text, " {}/{}", target["targetId"], target["disk"]);
        }
        text.push('\n');
    }
    Sha256::digest(text.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(domains: [&str; 3]) -> ChainTable {
        let nodes: Vec<Value> = (10_001..)
            .zip(domains)
            .map(|(id, domain)| json!({"nodeId": id, "failureDomain": domain}))
            .collect();
        serde_json::from_value(json!({
            "apiVersion": "lampyris.dev/v1alpha1", "kind": "ChainTable",
            "metadata": {"name": "train-table-1", "namespace": "storage"},
            "spec": {"clusterRef": {"name": "train"}, "tableId": 1, "revision": 1, "replicas": 3,
                "targetsPerNode": 3, "chunkSizeBytes": 1 << 20, "nodes": nodes},
        }))
        .unwrap()
    }

    #[test]
    fn a_table_has_the_body_and_the_digest_that_the_manager_knows() {
        let golden = include_str!("../../../meta/tests/declared-table.json");
        let golden: Value = serde_json::from_str(golden).unwrap();
        let chains = ["10003 10001 10002", "10002 10003 10001", "10001 10002 10003"];
        let body = body(&table(["a", "b", "c"]), &chains.map(str::to_owned));
        assert_eq!(body, golden["body"]);
        assert_eq!(digest(&body), golden["status"]["digest"]);
        let kept: ManagerTable = serde_json::from_value(golden["status"].clone()).unwrap();
        assert_eq!((kept.nodes, kept.replicas, kept.targets_per_node), (3, 3, 3));
        assert_eq!((kept.chunk_size_bytes, &*kept.digest), (1 << 20, &*digest(&body)));
    }

    fn verdict(table: ChainTable, manager: Value) -> (String, String, Plan) {
        let images = crate::plan::Images {
            registry: "r".to_owned(),
            tag: "1".to_owned(),
            pull_policy: "Always".to_owned(),
        };
        let now = k8s_openapi::jiff::Timestamp::UNIX_EPOCH;
        let env = Env { images, jobs: Default::default(), now };
        let manager = Some(serde_json::from_value(manager).unwrap());
        let plan = plan(&TableView { table, manager, refusal: None }, &env);
        let status = plan.actions.iter().find_map(|action| match action {
            Action::Status(_, status) => Some(status["conditions"][0].clone()),
            _ => None,
        });
        let text = |key: &str| status.as_ref().unwrap()[key].as_str().unwrap().to_owned();
        (text("reason"), text("message"), plan)
    }

    #[test]
    fn a_manager_that_keeps_another_table_is_named_with_what_differs() {
        let kept = |change: Value| {
            let mut kept = json!({"digest": "0", "nodes": 3, "replicas": 3, "targetsPerNode": 3, "chunkSizeBytes": 1 << 20});
            kept.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
            json!({"ready": true, "tableRevision": 1, "table": kept, "chains": {"total": 3, "serving": 3, "degraded": 0, "unavailable": 0}})
        };
        for (change, part) in [
            (json!({"nodes": 4}), "which had storage.count 4 (now 3): delete this one"),
            (json!({"replicas": 2}), "storage.replicas 2 (now 3)"),
            (json!({"targetsPerNode": 6}), "storage.targetsPerNode 6 (now 3)"),
            (json!({"chunkSizeBytes": 65536}), "storage.chunkSize 64Ki (now 1Mi)"),
            (json!({}), "another storage.failureDomain?"),
            (json!({"nodes": 4}), "PersistentVolumeClaims with label lampyris.dev/cluster=train"),
        ] {
            let (reason, message, plan) = verdict(table(["a", "b", "c"]), kept(change));
            assert_eq!(reason, "TableRefused", "{message}");
            assert!(message.contains(part), "{message}");
            let pushes = plan.actions.iter().any(|a| matches!(a, Action::PushTable(..)));
            assert!(!pushes, "the manager would refuse it");
            let warned = |a: &Action| matches!(a, Action::Event(n) if n.warning && n.reason == "TableRefused");
            assert!(plan.actions.iter().any(warned), "{message}");
        }
    }

    #[test]
    fn the_same_table_is_accepted_and_so_is_what_an_older_manager_may_have() {
        let (chains, _) = solve(&table(["a", "b", "c"])).unwrap();
        let digest = digest(&body(&table(["a", "b", "c"]), &chains));
        for manager in [
            json!({"tableRevision": 1, "table": {"digest": digest}}),
            json!({"tableRevision": 1}),
            json!({"tableRevision": 1, "table": null}),
        ] {
            // Whatever the hosts are called by now.
            let (reason, message, _) = verdict(table(["z", "b", "c"]), manager);
            assert_eq!(reason, "Accepted", "{message}");
        }
        let (reason, ..) = verdict(table(["a", "b", "c"]), json!({"tableRevision": 0}));
        assert_eq!(reason, "Pushing");
    }
}

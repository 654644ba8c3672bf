//! From a ChainTable's members to the table that the manager serves. The design is written into
//! the status first and pushed from there: a newer operator may design
//! another table from the same members, and the manager refuses a second body for one revision.

use std::collections::BTreeMap;

use crds::shared::ChainCount;
use crds::table::DesignStatus;
use crds::{ChainTable, ChainTableStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::ResourceExt;
use serde_json::{Value, json};

use super::cluster::ManagerStatus;
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
    let accepted = view.manager.as_ref().is_some_and(|m| m.table_revision >= table.spec.revision);
    if accepted {
        status.accepted_revision = Some(table.spec.revision);
    } else if let (true, Some(_)) = (designed_before, &view.manager) {
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
    let verdict = verdict.unwrap_or_else(|| readiness(view, accepted));
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

fn readiness(view: &TableView, accepted: bool) -> Verdict {
    match (&view.manager, &view.refusal) {
        (_, Some(why)) => {
            Verdict::no("TableRefused", format!("the manager refused the table: {why}"))
        }
        (None, _) => Verdict::no("ManagerUnavailable", "the manager does not answer"),
        (Some(_), None) if accepted => Verdict::yes("Accepted", "the manager serves this table"),
        (Some(_), None) => Verdict::no("Pushing", "the table is being given to the manager"),
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

//! Installing with helm, and that the operator writes nothing once it is done.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use kind_e2e::explain::explained;
use kind_e2e::site::{
    CLUSTER, OPERATOR, OPERATOR_LEASE, READY_WITHIN, STORAGE, SYSTEM, pods, site, storage_state,
};
use kind_e2e::{audit, helm, kube};
use serde_json::Value;

/// Longer than the 15 s after which an operator at rest looks at everything again (`plan::cluster::IDLE_S`).
const QUIET: Duration = Duration::from_secs(20);
/// Pods and Datasets of earlier tests are on their way out within this.
const RESTS_WITHIN: Duration = Duration::from_secs(120);
/// Between two looks at the audit log.
const LOOK_EVERY: Duration = Duration::from_secs(1);

#[test]
fn a_cluster_of_three_nodes_becomes_ready() -> Result<()> {
    explained(|| {
        let site = site()?;
        ensure!(site.ready_after < READY_WITHIN, "Ready after {:?}", site.ready_after);
        let args = ["-n", STORAGE, "wait", "--for=condition=Ready", "storagecluster/train"];
        kube::kubectl(&[args.as_slice(), &["--timeout=1s"]].concat())?;
        Ok(())
    })
}

#[test]
fn every_chain_of_a_new_cluster_spans_three_failure_domains() -> Result<()> {
    explained(|| {
        site()?;
        let table = kube::get(STORAGE, "chaintables.lampyris.dev", &format!("{CLUSTER}-table-1"))?;
        let chains = table["status"]["chains"].as_array().context("the table has chains")?;
        let nodes = table["spec"]["nodes"].as_array().context("the table has nodes")?.len();
        let targets = table["spec"]["targetsPerNode"].as_u64().context("targetsPerNode")?;
        let expected = nodes as u64 * targets / 3;
        let health = &table["status"]["health"];
        ensure!(
            chains.len() as u64 == expected
                && health["total"] == expected
                && health["serving"] == expected,
            "{expected} chains expected: {}",
            table["status"]
        );
        let (zone_of, held) = (zones_of_storage_nodes()?, members_of_chains()?);
        ensure!(held.len() == chains.len(), "servers hold the chains {held:?}");
        for (number, chain) in (1..).zip(chains) {
            let chain = chain.as_str().context("a chain is text")?;
            let members: BTreeSet<String> = chain.split(' ').map(str::to_owned).collect();
            ensure!(held.get(&number) == Some(&members), "chain {number} is {chain}: {held:?}");
            let zones: BTreeSet<_> = members.iter().filter_map(|id| zone_of.get(id)).collect();
            ensure!(zones.len() == 3, "chain {number} is {chain} in {zones:?}: {zone_of:?}");
        }
        Ok(())
    })
}

/// Zone of the Kubernetes node that each storage node runs on, by the storage node's id.
fn zones_of_storage_nodes() -> Result<BTreeMap<String, String>> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut zones = BTreeMap::new();
    for pod in pods("storage")? {
        let node = kube::get("default", "node", &text(&pod["spec"]["nodeName"]))?;
        let zone = text(&node["metadata"]["labels"]["topology.kubernetes.io/zone"]);
        ensure!(!zone.is_empty(), "a node without a zone: {}", node["metadata"]);
        zones.insert(text(&pod["metadata"]["labels"]["lampyris.dev/node-id"]), zone);
    }
    Ok(zones)
}

/// Ids of the storage nodes that hold a target of each chain, as they themselves say.
fn members_of_chains() -> Result<BTreeMap<u64, BTreeSet<String>>> {
    let mut members: BTreeMap<u64, BTreeSet<String>> = BTreeMap::new();
    for pod in pods("storage")? {
        let state = storage_state(&pod)?;
        for target in state["targets"].as_array().context("targets")? {
            let chain = target["chain"].as_u64().context("a target's chain")?;
            members.entry(chain).or_default().insert(state["node"].to_string());
        }
    }
    Ok(members)
}

#[test]
fn installing_raises_no_warning_and_restarts_nothing() -> Result<()> {
    explained(|| {
        // What an earlier run did to the same cluster is not this installation's fault.
        let begun = &site()?.begun;
        // The scheduler and kubelet warn of what heals by itself while images, claims and Secrets appear, and the API
        // server's own repair of addresses of a Service that reached its cache before the address did.
        let passing = ["FailedScheduling", "FailedMount", "Unhealthy", "ClusterIPNotAllocated"];
        let mut wrong = Vec::new();
        for namespace in [STORAGE, SYSTEM] {
            let warnings = kube::events(namespace, "type=Warning")?;
            let new = warnings.iter().filter(|warning| warning.last >= *begun);
            let unexpected = new.filter(|warning| !passing.contains(&warning.reason.as_str()));
            wrong.extend(unexpected.map(|w| format!("{} {}: {}", w.about, w.reason, w.message)));
            for pod in kube::list(namespace, "pods", "")? {
                wrong.extend(restarts(&pod, begun));
            }
        }
        ensure!(wrong.is_empty(), "{wrong:#?}");
        Ok(())
    })
}

/// The containers of a pod that ended and were started again since `begun`.
fn restarts(pod: &Value, begun: &str) -> Vec<String> {
    let lists = ["initContainerStatuses", "containerStatuses"];
    let all = lists.iter().flat_map(|list| pod["status"][list].as_array().into_iter().flatten());
    let restarted = all.filter(|status| {
        let ended = status["lastState"]["terminated"]["finishedAt"].as_str();
        status["restartCount"] != 0 && ended.is_none_or(|time| kube::moment(time).as_str() >= begun)
    });
    restarted.map(|status| format!("{} restarted: {status}", pod["metadata"]["name"])).collect()
}

#[test]
fn storage_pods_use_io_uring_under_their_own_seccomp_profile() -> Result<()> {
    explained(|| {
        site()?;
        let pods = pods("storage")?;
        ensure!(pods.len() == 3, "{} storage pods", pods.len());
        for pod in pods {
            let seccomp = &pod["spec"]["containers"][0]["securityContext"]["seccompProfile"];
            ensure!(seccomp["type"] == "Localhost", "{seccomp}");
            let state = storage_state(&pod)?;
            let disks = state["disks"].as_array().context("disks")?;
            ensure!(!disks.is_empty(), "{state}");
            // A profile that forbids it would make them fall back to threads without a word.
            ensure!(disks.iter().all(|disk| disk["io"] == "io_uring"), "{}", state["disks"]);
        }
        Ok(())
    })
}

/// What the operator wrote since the mark: how often its Lease, and what else.
fn writes_since(mark: &audit::Mark) -> Result<(usize, Vec<audit::Write>)> {
    let is_lease =
        |write: &audit::Write| write.resource == "leases" && write.object == OPERATOR_LEASE;
    let (leases, others): (Vec<_>, Vec<_>) =
        mark.writes_by(OPERATOR)?.into_iter().partition(is_lease);
    Ok((leases.len(), others))
}

/// Checks that the operator has written nothing but its Lease since the mark; without that the log would say nothing.
fn wrote_nothing_since(mark: &audit::Mark) -> Result<()> {
    let (renewals, writes) = writes_since(mark)?;
    ensure!(renewals > 0, "the log has no write of {OPERATOR_LEASE}: is it the right one?");
    ensure!(writes.is_empty(), "{writes:#?}");
    Ok(())
}

/// Waits until the operator has written nothing for [`QUIET`]; once for all tests.
fn rests() -> Result<()> {
    static RESTS: OnceLock<Result<(), String>> = OnceLock::new();
    RESTS
        .get_or_init(|| come_to_rest().map_err(|e| format!("{e:#}")))
        .clone()
        .map_err(|e| anyhow!("{e}"))
}

fn come_to_rest() -> Result<()> {
    site()?;
    let deadline = Instant::now() + RESTS_WITHIN;
    let (mut mark, mut since) = (audit::Mark::now()?, Instant::now());
    while since.elapsed() < QUIET {
        std::thread::sleep(LOOK_EVERY); // what is measured is a span of time itself
        let (_, writes) = writes_since(&mark)?;
        if !writes.is_empty() {
            ensure!(Instant::now() < deadline, "it never rests for {QUIET:?}: {writes:#?}");
            (mark, since) = (audit::Mark::now()?, Instant::now());
        }
    }
    wrote_nothing_since(&mark)
}

#[test]
fn an_operator_at_its_fixed_point_writes_nothing() -> Result<()> {
    explained(rests)
}

#[test]
fn applying_the_same_ten_times_makes_the_operator_write_nothing() -> Result<()> {
    explained(|| {
        rests()?;
        let manifest = helm::manifest(CLUSTER, STORAGE)?;
        kube::apply(&manifest)?; // kubectl's own annotation comes with the first one
        let mark = audit::Mark::now()?;
        for _ in 0..10 {
            kube::apply(&manifest)?;
        }
        std::thread::sleep(QUIET); // whatever the operator makes of it, it does so within this span
        wrote_nothing_since(&mark).context("after the same manifest came ten times")
    })
}

//! Installing with helm, and that the operator writes nothing once it is done.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use kind_e2e::site::{CLUSTER, OPERATOR, READY_WITHIN, STORAGE, SYSTEM, site};
use kind_e2e::{audit, helm, kube};

#[test]
fn a_cluster_of_three_nodes_becomes_ready() -> Result<()> {
    let site = site()?;
    ensure!(site.ready_after < READY_WITHIN, "Ready after {:?}", site.ready_after);
    kube::kubectl(&[
        "-n",
        STORAGE,
        "wait",
        "--for=condition=Ready",
        "storagecluster/train",
        "--timeout=1s",
    ])?;
    Ok(())
}

#[test]
fn every_chain_of_a_new_cluster_spans_three_failure_domains() -> Result<()> {
    site()?;
    let table = kube::get(STORAGE, "chaintables.lampyris.dev", &format!("{CLUSTER}-table-1"))?;
    let nodes = table["spec"]["nodes"].as_array().context("the table has nodes")?;
    let domains: BTreeSet<&str> =
        nodes.iter().filter_map(|n| n["failureDomain"].as_str()).collect();
    ensure!(
        domains == BTreeSet::from(["zone-1", "zone-2", "zone-3"]),
        "failure domains are {domains:?}"
    );
    let expected = nodes.len() as i64 * table["spec"]["targetsPerNode"].as_i64().unwrap_or(0) / 3;
    let health = &table["status"]["health"];
    ensure!(
        health["total"] == expected && health["serving"] == expected,
        "{expected} chains expected: {health}"
    );
    Ok(())
}

#[test]
fn installing_raises_no_warning() -> Result<()> {
    site()?;
    let mut warnings = kube::warnings(STORAGE)?;
    warnings.extend(kube::warnings(SYSTEM)?);
    // The scheduler and kubelet warn of what heals by itself while images, claims and Secrets appear.
    // A node that an earlier run cut off is remembered for an hour. The API server's own repair of addresses warns of
    // a Service that reached its cache before the address did.
    let passing = [
        "FailedScheduling",
        "FailedMount",
        "Unhealthy",
        "BackOff",
        "NodeNotReady",
        "ClusterIPNotAllocated",
    ];
    warnings.retain(|w| !passing.iter().any(|p| w.contains(p)));
    ensure!(warnings.is_empty(), "{warnings:#?}");
    Ok(())
}

#[test]
fn an_operator_at_its_fixed_point_writes_nothing() -> Result<()> {
    site()?;
    let quiet = Duration::from_secs(20);
    // Pods and Datasets of the tests before this one may still be on their way out.
    let deadline = Instant::now() + Duration::from_secs(120);
    loop {
        let mark = audit::Mark::now()?;
        std::thread::sleep(quiet); // what is measured is this span of time itself
        let writes = mark.writes_by(OPERATOR)?;
        if writes.is_empty() {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "it never rests for {quiet:?}: {writes:#?}");
    }
}

#[test]
fn applying_the_same_ten_times_makes_the_operator_write_nothing() -> Result<()> {
    site()?;
    let manifest = helm::manifest(CLUSTER, STORAGE)?;
    kube::apply(&manifest)?; // kubectl's own annotation comes with the first one
    let mark = audit::Mark::now()?;
    for _ in 0..10 {
        kube::apply(&manifest)?;
    }
    let settled = Duration::from_secs(5);
    std::thread::sleep(settled); // whatever the operator makes of it, it does so within this span
    let writes = mark.writes_by(OPERATOR)?;
    ensure!(writes.is_empty(), "writes after the same manifest came ten times: {writes:#?}");
    Ok(())
}

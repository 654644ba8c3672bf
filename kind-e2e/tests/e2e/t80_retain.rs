//! A storage cluster that is deleted keeps its volumes: made again from the same manifest, it has its data again.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Result, ensure};
use kind_e2e::explain::explained;
use kind_e2e::pod::{EXERCISE, Pod, SCRATCH};
use kind_e2e::site::{CLUSTER, STORAGE, create_cluster};
use kind_e2e::{helm, kube, wait};

/// Everything of a deleted cluster but its claims is gone within this.
const GONE_WITHIN: Duration = Duration::from_secs(60);
/// The Dataset says again that it can be read.
const READY_WITHIN: Duration = Duration::from_secs(60);

#[test]
fn a_cluster_that_is_deleted_and_made_again_has_its_data() -> Result<()> {
    explained(|| {
        let pod = Pod::start("before", "node-1")?;
        pod.exercise(&["create", "/data/retained/file", "3000000"])?;
        drop(pod);
        let before = claims()?;
        ensure!(before.len() == 4, "three storage nodes and the metadata have claims: {before:?}");
        helm::uninstall(CLUSTER, STORAGE)?;
        wait::until("nothing of the cluster is left", GONE_WITHIN, nothing_left)?;
        ensure!(claims()? == before, "{:?} were {before:?}", claims()?);
        let took = create_cluster()?;
        eprintln!("the cluster is Ready again after {took:?}");
        ensure!(claims()? == before, "{:?} were {before:?}", claims()?);
        wait::until("Dataset Ready", READY_WITHIN, || {
            kube::is_true(&kube::get(EXERCISE, "datasets.lampyris.dev", SCRATCH)?, "Ready")
        })?;
        let pod = Pod::start("after", "node-3")?;
        ensure!(pod.exercise(&["verify", "/data/retained/file"])?["bytes"] == 3_000_000);
        pod.exercise(&["remove", "/data/retained"])?;
        Ok(())
    })
}

/// The uid of each of the cluster's claims.
fn claims() -> Result<BTreeMap<String, String>> {
    let all = kube::list(STORAGE, "persistentvolumeclaims", "")?;
    let text = |claim: &serde_json::Value, key: &str| claim["metadata"][key].to_string();
    Ok(all.iter().map(|claim| (text(claim, "name"), text(claim, "uid"))).collect())
}

fn nothing_left() -> Result<()> {
    for kind in [
        "storageclusters.lampyris.dev",
        "storagenodes.lampyris.dev",
        "chaintables.lampyris.dev",
        "statefulsets",
        "services",
        "pods",
    ] {
        let left = kube::list(STORAGE, kind, "")?.len();
        ensure!(left == 0, "{left} {kind} are left");
    }
    Ok(())
}

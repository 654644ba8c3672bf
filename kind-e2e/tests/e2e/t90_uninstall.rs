//! Taking everything away again; the last test, since it leaves nothing installed.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use kind_e2e::explain::explained;
use kind_e2e::pod::{EXERCISE, Pod, dataset};
use kind_e2e::site::{CLUSTER, STORAGE, SYSTEM};
use kind_e2e::{helm, kube};
use serde_json::json;

/// Everything that is taken away is gone within this.
const GONE_WITHIN: Duration = Duration::from_secs(60);

fn timed(what: &str, action: impl FnOnce() -> Result<String>) -> Result<()> {
    let begin = Instant::now();
    action()?;
    let took = begin.elapsed();
    eprintln!("{what}: {took:?}");
    ensure!(took <= GONE_WITHIN, "{what} took {took:?}");
    Ok(())
}

fn delete_namespace(name: &str) -> Result<String> {
    kube::kubectl(&["delete", "namespace", name, "--timeout=90s"])
}

#[test]
fn namespaces_and_releases_go_within_a_minute() -> Result<()> {
    explained(|| {
        let pod = Pod::start("last", "node-2")?;
        pod.exercise(&["create", "/data/last", "1000000"])?;
        timed("namespace with a pod that reads", || delete_namespace(EXERCISE))?;
        drop(pod);
        // A Dataset whose operator goes first: nobody is left to take its finalizer.
        let left = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "left"}});
        kube::apply(&left.to_string())?;
        kube::apply(&dataset("left", "orphan", "/exercise").to_string())?;
        timed("helm uninstall of the cluster", || helm::uninstall(CLUSTER, STORAGE))?;
        timed("helm uninstall of the operator", || helm::uninstall("lampyris", SYSTEM))?;
        timed("namespace of the orphan", || delete_namespace("left"))?;
        timed("namespace of the cluster", || delete_namespace(STORAGE))?;
        timed("namespace of the operator", || delete_namespace(SYSTEM))
    })
}

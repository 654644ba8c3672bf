//! Taking everything away again; the last test, since it leaves nothing installed.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use kind_e2e::explain::explained;
use kind_e2e::pod::{EXERCISE, Pod, container, dataset, template};
use kind_e2e::site::{CLUSTER, STORAGE, SYSTEM};
use kind_e2e::{helm, kube, wait};
use serde_json::json;

/// Everything that is taken away is gone within this.
const GONE_WITHIN: Duration = Duration::from_secs(60);
/// The operator looks at the pods that use a Dataset within this.
const HELD_WITHIN: Duration = Duration::from_secs(30);
/// Namespace of what is left when the operator goes.
const LEFT: &str = "left";

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

/// The finalizers of the Dataset that is left.
fn finalizers() -> Result<serde_json::Value> {
    Ok(kube::get(LEFT, "datasets.lampyris.dev", "orphan")?["metadata"]["finalizers"].clone())
}

/// A Dataset that the operator holds, because a pod uses it, when it goes. The pod never runs: the node plugin goes
/// too, and nobody could take its mount away.
fn leave_a_dataset_in_use() -> Result<()> {
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": LEFT}});
    kube::apply(&namespace.to_string())?;
    kube::apply(&dataset(LEFT, "orphan", "/exercise").to_string())?;
    let mut pod = template(&[], &[container("app", &["idle"])]);
    pod["apiVersion"] = json!("v1");
    pod["kind"] = json!("Pod");
    pod["metadata"]["name"] = json!("user");
    pod["metadata"]["annotations"] = json!({"lampyris.dev/datasets": "orphan:/data:rw"});
    pod["spec"]["schedulingGates"] = json!([{"name": "example.com/never"}]);
    kube::apply_in(LEFT, &pod.to_string())?;
    wait::until("the operator holds the Dataset", HELD_WITHIN, || {
        let held = finalizers()?;
        ensure!(held == json!(["lampyris.dev/dataset"]), "{held}");
        Ok(())
    })?;
    Ok(())
}

#[test]
fn namespaces_and_releases_go_within_a_minute() -> Result<()> {
    explained(|| {
        let pod = Pod::start("last", "node-2")?;
        pod.exercise(&["create", "/data/last", "1000000"])?;
        timed("namespace with a pod that reads", || delete_namespace(EXERCISE))?;
        drop(pod);
        leave_a_dataset_in_use()?;
        timed("helm uninstall of the cluster", || helm::uninstall(CLUSTER, STORAGE))?;
        timed("helm uninstall of the operator", || helm::uninstall("lampyris", SYSTEM))?;
        // Whatever has been in the way: it has to be released by now, and nobody may hold it again.
        let held = finalizers()?;
        ensure!(held.is_null(), "nobody is left to take the finalizers {held}");
        timed("namespace of a Dataset in use", || delete_namespace(LEFT))?;
        timed("namespace of the cluster", || delete_namespace(STORAGE))?;
        timed("namespace of the operator", || delete_namespace(SYSTEM))
    })
}

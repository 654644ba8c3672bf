//! The installation that all tests share: the three charts, installed once for a run.

use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use serde_json::Value;

use crate::{helm, kube, wait};

/// Namespace of the operator, the node plugin and the keeper.
pub const SYSTEM: &str = "lampyris-system";
/// Namespace of the storage cluster.
pub const STORAGE: &str = "storage";
/// Name of the storage cluster.
pub const CLUSTER: &str = "train";
/// Part of the operator's user name in the audit log.
pub const OPERATOR: &str = "system:serviceaccount:lampyris-system:";
/// The Lease that the operator renews, as the audit log names it.
pub const OPERATOR_LEASE: &str = "lampyris-system/lampyris-operator";
/// Admin ports of a storage node, and of the manager and metadata process.
const STORAGE_ADMIN: i32 = 9101;
const META_ADMIN: i32 = 9001;
/// A cluster of three nodes is Ready within this.
pub const READY_WITHIN: Duration = Duration::from_secs(180);
/// The operator's pods end within this: it hands its Lease on first.
const OPERATOR_ENDS_WITHIN: Duration = Duration::from_secs(60);

/// What the installation took.
#[derive(Debug)]
pub struct Site {
    /// When it began, as [`kube::moment`] has it.
    pub begun: String,
    /// From `helm install` of the cluster chart to `Ready=True`.
    pub ready_after: Duration,
}

/// Installs the charts at the first call; later calls, also of other tests, give the same answer.
///
/// # Errors
/// When a chart cannot be installed or the cluster does not become Ready.
pub fn site() -> Result<&'static Site> {
    static SITE: OnceLock<Result<Site, String>> = OnceLock::new();
    SITE.get_or_init(|| install().map_err(|e| format!("{e:#}")))
        .as_ref()
        .map_err(|e| anyhow!("{e}"))
}

fn registry() -> String {
    std::env::var("LAMPYRIS_REGISTRY").unwrap_or_else(|_| "lampyris.local".to_owned())
}

/// The reference of one of our images.
#[must_use]
pub fn image(name: &str) -> String {
    format!("{}/{name}:{}", registry(), env!("CARGO_PKG_VERSION"))
}

/// Installs the definitions of our kinds alone.
///
/// # Errors
/// When no cluster answers or it refuses a definition.
pub fn definitions() -> Result<()> {
    kube::kubectl(&["get", "--raw", "/readyz"]).context(
        "no cluster answers: run ./kind-e2e/cluster up and export the KUBECONFIG that it prints",
    )?;
    helm::install("lampyris-crds", "lampyris-crds", SYSTEM, &[])?;
    Ok(())
}

fn install() -> Result<Site> {
    definitions()?;
    let begun = kube::now()?;
    helm::install("lampyris", "lampyris", SYSTEM, &[("images.registry", &registry())])?;
    let ready_after = create_cluster()?;
    Ok(Site { begun, ready_after })
}

/// Installs the cluster chart, or brings its release up to date; how long the cluster took to be Ready.
///
/// # Errors
/// When helm fails or the cluster does not become Ready.
pub fn create_cluster() -> Result<Duration> {
    // Without --wait: helm takes a new StorageCluster, which has no condition yet, for a finished one.
    let values = [("storage.failureDomain", "topology.kubernetes.io/zone")];
    helm::create(CLUSTER, "lampyris-cluster", STORAGE, &values)?;
    let (_, ready_after) = wait::until("StorageCluster Ready", READY_WITHIN, || {
        kube::is_true(&kube::get(STORAGE, "storageclusters.lampyris.dev", CLUSTER)?, "Ready")
    })?;
    Ok(ready_after)
}

/// The storage cluster's pods of one component: `storage` or `meta`.
///
/// # Errors
/// When they cannot be read.
pub fn pods(component: &str) -> Result<Vec<Value>> {
    let selector =
        format!("lampyris.dev/cluster={CLUSTER},app.kubernetes.io/component={component}");
    kube::list(STORAGE, "pods", &selector)
}

/// What the manager says of its cluster: `chains` by state, `nodes`.
///
/// # Errors
/// When it does not answer.
pub fn manager_status() -> Result<Value> {
    let pods = pods("meta")?;
    let name = pods.first().and_then(|pod| pod["metadata"]["name"].as_str());
    let said = kube::ask(STORAGE, name.context("a manager")?, META_ADMIN, "v1/status")?;
    serde_json::from_str(&said).context("parse the manager's status")
}

/// What a storage pod says of itself at `/state`.
///
/// # Errors
/// When it does not answer.
pub fn storage_state(pod: &Value) -> Result<Value> {
    let name = pod["metadata"]["name"].as_str().context("the pod's name")?;
    let said = kube::ask(STORAGE, name, STORAGE_ADMIN, "state")?;
    serde_json::from_str(&said).with_context(|| format!("parse the state of {name}"))
}

/// No operator runs while this lives; dropping it brings back the one that was there.
#[derive(Debug)]
pub struct OperatorAway {
    replicas: Option<String>,
}

impl OperatorAway {
    /// Ends the operator, if one is installed, and waits until its pods are gone.
    ///
    /// # Errors
    /// When it cannot be ended.
    pub fn begin() -> Result<Self> {
        let mut args = vec!["-n", SYSTEM, "get", "deployment", "lampyris-operator"];
        args.extend(["--ignore-not-found", "-o", "jsonpath={.spec.replicas}"]);
        let replicas = match kube::kubectl(&args)?.trim() {
            "" => return Ok(Self { replicas: None }),
            "0" => "2".to_owned(), // a run that was ended has left it away
            number => number.to_owned(),
        };
        let away = Self { replicas: Some(replicas) };
        scale("0")?;
        wait::until("no operator runs", OPERATOR_ENDS_WITHIN, || {
            let left = kube::list(SYSTEM, "pods", "app.kubernetes.io/component=operator")?.len();
            ensure!(left == 0, "{left} are left");
            Ok(())
        })?;
        Ok(away)
    }

    /// Brings the operator back and waits until it runs.
    ///
    /// # Errors
    /// When it does not come back.
    pub fn end(mut self) -> Result<()> {
        self.replicas.take().map_or(Ok(()), |replicas| bring_back(&replicas))
    }
}

impl Drop for OperatorAway {
    fn drop(&mut self) {
        if let Some(replicas) = self.replicas.take()
            && let Err(error) = bring_back(&replicas)
        {
            eprintln!("the operator stays away: {error:#}");
        }
    }
}

fn bring_back(replicas: &str) -> Result<()> {
    scale(replicas)?;
    let mut args = vec!["-n", SYSTEM, "rollout", "status", "deployment/lampyris-operator"];
    args.push("--timeout=120s");
    kube::kubectl(&args)?;
    Ok(())
}

fn scale(replicas: &str) -> Result<()> {
    let replicas = format!("--replicas={replicas}");
    kube::kubectl(&["-n", SYSTEM, "scale", "deployment/lampyris-operator", &replicas])?;
    Ok(())
}

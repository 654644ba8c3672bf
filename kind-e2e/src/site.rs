//! The installation that all tests share: the three charts, installed once for a run.

use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};

use crate::{helm, kube, wait};

/// Namespace of the operator, the node plugin and the keeper.
pub const SYSTEM: &str = "lampyris-system";
/// Namespace of the storage cluster.
pub const STORAGE: &str = "storage";
/// Name of the storage cluster.
pub const CLUSTER: &str = "train";
/// Part of the operator's user name in the audit log.
pub const OPERATOR: &str = "system:serviceaccount:lampyris-system:";
/// A cluster of three nodes is Ready within this.
pub const READY_WITHIN: Duration = Duration::from_secs(180);

/// What the installation took.
#[derive(Debug)]
pub struct Site {
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

/// The reference of one of our images.
#[must_use]
pub fn image(name: &str) -> String {
    let registry =
        std::env::var("LAMPYRIS_REGISTRY").unwrap_or_else(|_| "lampyris.local".to_owned());
    format!("{registry}/{name}:{}", env!("CARGO_PKG_VERSION"))
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
    helm::install("lampyris", "lampyris", SYSTEM, &[])?;
    // Without --wait: helm takes a new StorageCluster, which has no condition yet, for a finished one.
    helm::create(
        CLUSTER,
        "lampyris-cluster",
        STORAGE,
        &[("storage.failureDomain", "topology.kubernetes.io/zone")],
    )?;
    let (_, ready_after) = wait::until("StorageCluster Ready", READY_WITHIN, || {
        kube::is_true(&kube::get(STORAGE, "storageclusters.lampyris.dev", CLUSTER)?, "Ready")
    })?;
    Ok(Site { ready_after })
}

//! `operator retire`, run by the chart before an uninstall: without an operator nobody would remove
//! the finalizers that protect Datasets in use, and namespaces could never be deleted.
//!
//! The operator is told to go, and its Lease is taken. Whoever holds that is the only one that
//! writes, so it does not matter which of the operator's pods still run, or are only believed to,
//! on a node that was lost. Then the finalizers go, and nobody puts them back.

use std::time::Duration;

use anyhow::{Context, bail};
use crds::names::FINALIZER_DATASET;
use k8s_openapi::api::apps::v1::Deployment;
use kube::api::{DynamicObject, ListParams, Patch, PatchParams};
use kube::core::PartialObjectMeta;
use kube::{Api, Client, ResourceExt};
use serde_json::json;
use tokio::time::{sleep, timeout};

use crate::args::RetireArgs;
use crate::lease::{self, Election};
use crate::plan::ObjectId;
use crate::{api, execute};

/// How long the operator may take to hand its Lease on. That of a lost node runs out before.
const DEADLINE: Duration = Duration::from_secs(40);
/// Between two looks at the Datasets.
const PERIOD: Duration = Duration::from_millis(500);
/// Name in the Lease.
const IDENTITY: &str = "lampyris-retire";

/// Stops the operator and releases every Dataset.
///
/// # Errors
/// The API server refuses, the operator does not hand on its Lease, or the process is asked to
/// stop: it is the first of its container, which the kernel lets ignore a signal that it does not
/// handle.
pub async fn retire(args: RetireArgs) -> anyhow::Result<()> {
    let mut stop = rpc::shutdown::on_signal().context("watch for signals")?;
    tokio::select! {
        done = replace(&args) => done,
        () = rpc::shutdown::stopped(&mut stop) => bail!(
            "asked to stop before every Dataset was released: run it again, or remove the finalizer {FINALIZER_DATASET} of each Dataset"
        ),
    }
}

async fn replace(args: &RetireArgs) -> anyhow::Result<()> {
    let client = Client::try_default().await.context("reach the API server")?;
    stop_operator(&client, args).await?;
    let mut election = Election::new(client.clone(), &args.system_namespace, IDENTITY);
    if timeout(DEADLINE, election.acquire()).await.is_err() {
        bail!(
            "Lease {} is still held after {} s: end the pods of Deployment {}, and run it again",
            lease::NAME,
            DEADLINE.as_secs(),
            args.deployment
        );
    }
    // It is not given back: a pod of the operator that was not even told to end yet would take it.
    // It runs out by itself in 15 s, when the uninstall has taken away what such a pod may do.
    tokio::select! {
        done = release(&client) => done,
        () = election.hold() => bail!(
            "Lease {} was lost to another holder: see whether the operator was started again, and run it again",
            lease::NAME
        ),
    }
}

/// Removes the finalizers, and looks again until there are none: a last write of the operator that
/// was may arrive after it has gone.
async fn release(client: &Client) -> anyhow::Result<()> {
    let datasets = api::cluster_wide(client, "Dataset")?;
    let held = |d: &PartialObjectMeta<DynamicObject>| {
        d.finalizers().iter().any(|name| name == FINALIZER_DATASET)
    };
    loop {
        let found =
            datasets.list_metadata(&ListParams::default()).await.context("list datasets")?;
        let mut left = found.items.iter().filter(|d| held(d)).peekable();
        if left.peek().is_none() {
            return Ok(());
        }
        for dataset in left {
            let namespace = dataset.namespace().unwrap_or_default();
            let id = ObjectId::new("Dataset", &namespace, &dataset.name_any());
            match execute::set_finalizer(client, &id, FINALIZER_DATASET, false).await {
                // Its owner was faster: the next round sees what it is now.
                Err(error) if error.is_conflict() => {}
                done => done?,
            }
        }
        sleep(PERIOD).await;
    }
}

async fn stop_operator(client: &Client, args: &RetireArgs) -> anyhow::Result<()> {
    let deployments: Api<Deployment> = Api::namespaced(client.clone(), &args.system_namespace);
    let patch = Patch::Merge(json!({"spec": {"replicas": 0}}));
    let scaled = deployments.patch_scale(&args.deployment, &PatchParams::default(), &patch).await;
    match scaled {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
        Err(error) => Err(error).context("scale the operator to 0"),
    }
}

//! `operator retire`, run by the chart before an uninstall: without an operator nobody would remove
//! the finalizers that protect Datasets in use, and namespaces could never be deleted. First the
//! operator goes, so that it cannot put them back, then the finalizers.

use std::time::Duration;

use anyhow::{Context, bail};
use crds::names::FINALIZER_DATASET;
use k8s_openapi::api::apps::v1::Deployment;
use kube::api::{ListParams, Patch, PatchParams};
use kube::{Api, Client, ResourceExt};
use serde_json::json;
use tokio::time::{Instant, sleep};

use crate::args::RetireArgs;
use crate::plan::ObjectId;
use crate::{api, execute};

/// How long the operator's pods may take to end.
const DEADLINE: Duration = Duration::from_secs(40);
/// How often that is looked at.
const PERIOD: Duration = Duration::from_millis(500);

/// Stops the operator and releases every Dataset.
///
/// # Errors
/// The API server refuses, the operator's pods do not end, or the process is asked to stop: it is
/// the first of its container, which the kernel lets ignore a signal that it does not handle.
pub async fn retire(args: RetireArgs) -> anyhow::Result<()> {
    let mut stop = rpc::shutdown::on_signal().context("watch for signals")?;
    tokio::select! {
        done = release(&args) => done,
        () = rpc::shutdown::stopped(&mut stop) => bail!(
            "asked to stop before every Dataset was released: run it again, or remove the finalizer {FINALIZER_DATASET} of each Dataset"
        ),
    }
}

async fn release(args: &RetireArgs) -> anyhow::Result<()> {
    let client = Client::try_default().await.context("reach the API server")?;
    stop_operator(&client, args).await?;
    let datasets = api::cluster_wide(&client, "Dataset")?;
    let found = datasets.list_metadata(&ListParams::default()).await.context("list datasets")?;
    let held = |d: &kube::core::PartialObjectMeta<kube::api::DynamicObject>| {
        d.finalizers().iter().any(|name| name == FINALIZER_DATASET)
    };
    for dataset in found.items.iter().filter(|d| held(d)) {
        let namespace = dataset.namespace().unwrap_or_default();
        let id = ObjectId::new("Dataset", &namespace, &dataset.name_any());
        execute::set_finalizer(&client, &id, FINALIZER_DATASET, false).await?;
    }
    Ok(())
}

async fn stop_operator(client: &Client, args: &RetireArgs) -> anyhow::Result<()> {
    let deployments: Api<Deployment> = Api::namespaced(client.clone(), &args.system_namespace);
    let patch = Patch::Merge(json!({"spec": {"replicas": 0}}));
    let scaled = deployments.patch_scale(&args.deployment, &PatchParams::default(), &patch).await;
    match scaled {
        Ok(_) => {}
        Err(kube::Error::Api(status)) if status.is_not_found() => return Ok(()),
        Err(error) => return Err(error).context("scale the operator to 0"),
    }
    let start = Instant::now();
    while start.elapsed() < DEADLINE {
        let found = deployments.get_opt(&args.deployment).await.context("get the operator")?;
        let left = found.and_then(|d| d.status).and_then(|s| s.replicas).unwrap_or(0);
        if left == 0 {
            return Ok(());
        }
        sleep(PERIOD).await;
    }
    bail!("the pods of Deployment {} did not end", args.deployment)
}

//! DatasetLoad: observe, plan, execute.

use std::sync::Arc;

use crds::load::Progress;
use crds::names::{LABEL_LOAD, LOAD_ADMIN_PORT};
use crds::{Dataset, DatasetLoad};
use futures::StreamExt;
use hyper::Method;
use k8s_openapi::api::batch::v1::Job;
use kube::core::PartialObjectMeta;
use kube::runtime::controller::{Action as Next, Controller};
use kube::runtime::watcher;
use kube::{Api, Client, Resource, ResourceExt};
use tokio::sync::watch;

use super::{Context, ReconcileError, Shared, drive, labelled};
use crate::api::ApiError;
use crate::http;
use crate::plan::load::{LoadView, job_name};
use crate::{observe, plan};

type Meta = PartialObjectMeta<DatasetLoad>;

pub(super) async fn run(shared: &Shared, stop: watch::Receiver<bool>) {
    let client = || shared.client.clone();
    let controller = Controller::new(Api::<Meta>::all(client()), watcher::Config::default())
        .owns(Api::<Job>::all(client()), labelled(LABEL_LOAD));
    let context = Context::new(shared, "lampyris-load", "DatasetLoad");
    drive!(controller, reconcile, context, stop);
}

async fn reconcile(object: Arc<Meta>, context: Arc<Context>) -> Result<Next, ReconcileError> {
    let regarding = object.object_ref(&());
    let Some(load) = context.read::<DatasetLoad>(&regarding).await? else {
        return Ok(Next::await_change());
    };
    let client = &context.shared.client;
    let namespace = load.namespace().unwrap_or_default();
    let state = observe::job(client, &namespace, &job_name(&load)).await?;
    let target = dataset(client, &namespace, Some(&load.spec.dataset_ref.name)).await?;
    let source = load.spec.from.dataset_ref.as_ref().map(|reference| reference.name.as_str());
    let from = dataset(client, &namespace, source).await?;
    let progress = match &state.address {
        Some(address) => progress(address).await,
        None => None,
    };
    let view = LoadView { load, target, from, job: state.job, messages: state.messages, progress };
    context.finish(&plan::load::plan(&view, &context.env()), &regarding).await
}

async fn dataset(
    client: &Client,
    namespace: &str,
    name: Option<&str>,
) -> Result<Option<Dataset>, ApiError> {
    let Some(name) = name else { return Ok(None) };
    observe::get_as(client, "Dataset", namespace, name).await
}

/// What the pod says about its progress; it is not asked twice if it does not answer.
async fn progress(address: &str) -> Option<Progress> {
    let address: std::net::IpAddr = address.parse().ok()?;
    let host = std::net::SocketAddr::new(address, LOAD_ADMIN_PORT).to_string();
    let (status, state) = http::exchange(Method::GET, &host, "/state", None).await.ok()?;
    let part = state.get("progress").unwrap_or(&state).clone();
    status.is_success().then(|| serde_json::from_value(part).ok()).flatten()
}

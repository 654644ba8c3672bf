//! Dataset: observe, plan, execute.

use std::sync::Arc;
use std::time::Duration;

use crds::Dataset;
use crds::names::LABEL_DATASET;
use futures::StreamExt;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use kube::core::PartialObjectMeta;
use kube::runtime::controller::{Action as Next, Config, Controller};
use kube::runtime::reflector::ObjectRef;
use kube::runtime::watcher;
use kube::{Api, Resource, ResourceExt};
use tokio::sync::watch;

use super::{Context, ReconcileError, Shared, drive, labelled};
use crate::plan::dataset::{DatasetView, job_name};
use crate::webhook::users::{UserPod, injected};
use crate::{observe, plan};

type Meta = PartialObjectMeta<Dataset>;

/// The index of pods follows their events by this much at most, as a rule.
const DEBOUNCE: Duration = Duration::from_millis(200);

pub(super) async fn run(shared: &Shared, stop: watch::Receiver<bool>) {
    let client = || shared.client.clone();
    let inspectors = labelled(LABEL_DATASET);
    let controller = Controller::new(Api::<Meta>::all(client()), watcher::Config::default())
        .owns(Api::<Job>::all(client()), inspectors.clone())
        .watches(Api::<PartialObjectMeta<Pod>>::all(client()), inspectors, of_inspector)
        .watches(Api::<UserPod>::all(client()), injected(), of_user)
        .with_config(Config::default().debounce(DEBOUNCE));
    let context = Context::new(shared, "lampyris-dataset", "Dataset");
    drive!(controller, reconcile, context, stop);
}

#[expect(clippy::needless_pass_by_value, reason = "a watch gives its objects away")]
fn of_inspector(pod: PartialObjectMeta<Pod>) -> Option<ObjectRef<Meta>> {
    let name = pod.labels().get(LABEL_DATASET)?;
    Some(ObjectRef::new(name).within(&pod.namespace()?))
}

#[expect(clippy::needless_pass_by_value, reason = "a watch gives its objects away")]
fn of_user(pod: UserPod) -> Vec<ObjectRef<Meta>> {
    pod.datasets()
        .into_iter()
        .map(|(namespace, name)| ObjectRef::new(&name).within(&namespace))
        .collect()
}

async fn reconcile(object: Arc<Meta>, context: Arc<Context>) -> Result<Next, ReconcileError> {
    let regarding = object.object_ref(&());
    let Some(dataset) = context.read::<Dataset>(&regarding).await? else {
        return Ok(Next::await_change());
    };
    let client = &context.shared.client;
    let namespace = dataset.namespace().unwrap_or_default();
    let inspection = dataset.status.as_ref().and_then(|status| status.inspection.clone());
    let state = match inspection {
        Some(inspection) if dataset.spec.read_only => {
            observe::job(client, &namespace, &job_name(&dataset, &inspection)).await?
        }
        _ => observe::JobState::default(),
    };
    let cluster_ready = observe::cluster_ready(client, &dataset).await?;
    let users = context.shared.users.of(&namespace, &dataset.name_any());
    let view =
        DatasetView { dataset, job: state.job, messages: state.messages, users, cluster_ready };
    context.finish(&plan::dataset::plan(&view, &context.env()), &regarding).await
}

//! StorageCluster: observe, plan, execute.

use std::sync::Arc;

use crds::names::LABEL_CLUSTER;
use crds::{ChainTable, StorageCluster, StorageNode};
use futures::StreamExt;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{Pod, Service};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::core::PartialObjectMeta;
use kube::runtime::controller::{Action as Next, Controller};
use kube::runtime::reflector::ObjectRef;
use kube::runtime::watcher;
use kube::{Api, Resource, ResourceExt};
use tokio::sync::watch;

use super::{Context, ReconcileError, Shared, drive, labelled};
use crate::{observe, plan};

type Meta = PartialObjectMeta<StorageCluster>;

pub(super) async fn run(shared: &Shared, stop: watch::Receiver<bool>) {
    let client = || shared.client.clone();
    let controller = Controller::new(Api::<Meta>::all(client()), watcher::Config::default())
        .owns(Api::<StatefulSet>::all(client()), labelled(LABEL_CLUSTER))
        .owns(Api::<Service>::all(client()), labelled(LABEL_CLUSTER))
        .owns(Api::<PodDisruptionBudget>::all(client()), labelled(LABEL_CLUSTER))
        .owns(Api::<StorageNode>::all(client()), labelled(LABEL_CLUSTER))
        .owns(Api::<ChainTable>::all(client()), labelled(LABEL_CLUSTER))
        .watches(Api::<PartialObjectMeta<Pod>>::all(client()), labelled(LABEL_CLUSTER), of_pod);
    let context = Context::new(shared, "lampyris-cluster", "StorageCluster");
    drive!(controller, reconcile, context, stop);
}

#[expect(clippy::needless_pass_by_value, reason = "a watch gives its objects away")]
fn of_pod(pod: PartialObjectMeta<Pod>) -> Option<ObjectRef<Meta>> {
    let name = pod.labels().get(LABEL_CLUSTER)?;
    Some(ObjectRef::new(name).within(&pod.namespace()?))
}

async fn reconcile(object: Arc<Meta>, context: Arc<Context>) -> Result<Next, ReconcileError> {
    let regarding = object.object_ref(&());
    let Some(cluster) = context.read::<StorageCluster>(&regarding).await? else {
        return Ok(Next::await_change());
    };
    let view = observe::cluster(&context.shared.client, cluster).await?;
    context.finish(&plan::cluster::plan(&view, &context.env()), &regarding).await
}

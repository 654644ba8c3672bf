//! ChainTable: observe, plan, execute. A refused push is remembered until the next reconcile, where
//! it becomes a condition.

use std::sync::Arc;
use std::time::Duration;

use crds::ChainTable;
use crds::names::META_ADMIN_PORT;
use futures::StreamExt;
use kube::core::PartialObjectMeta;
use kube::runtime::controller::{Action as Next, Controller};
use kube::runtime::watcher;
use kube::{Api, Resource, ResourceExt};
use tokio::sync::watch;

use super::{Context, RESYNC_S, ReconcileError, Shared, drive};
use crate::execute::ExecuteError;
use crate::plan::table::TableView;
use crate::{observe, plan};

type Meta = PartialObjectMeta<ChainTable>;

pub(super) async fn run(shared: &Shared, stop: watch::Receiver<bool>) {
    let tables = Api::<Meta>::all(shared.client.clone());
    let controller = Controller::new(tables, watcher::Config::default());
    let context = Context::new(shared, "lampyris-table", "ChainTable");
    drive!(controller, reconcile, context, stop);
}

async fn reconcile(object: Arc<Meta>, context: Arc<Context>) -> Result<Next, ReconcileError> {
    let regarding = object.object_ref(&());
    let Some(table) = context.read::<ChainTable>(&regarding).await? else {
        context.refusals.remember(&regarding, None);
        return Ok(Next::await_change());
    };
    let namespace = table.namespace().unwrap_or_default();
    let host = format!("{}-meta.{namespace}.svc:{META_ADMIN_PORT}", table.spec.cluster_ref.name);
    let manager = observe::manager(&host).await;
    let view = TableView { table, manager, refusal: context.refusals.of(&regarding) };
    let env = context.env();
    // The search for a design takes up to two seconds of CPU: not on the runtime's own threads.
    let planned = tokio::task::spawn_blocking(move || plan::table::plan(&view, &env)).await;
    let planned = match planned {
        Ok(planned) => planned,
        Err(error) => {
            tracing::error!(%error, table = regarding.name, "plan a chain table");
            return Ok(Next::requeue(Duration::from_secs(RESYNC_S)));
        }
    };
    match context.finish(&planned, &regarding).await {
        Err(ReconcileError::Execute(ExecuteError::Refused(why))) => {
            context.refusals.remember(&regarding, Some(why.clone()));
            Err(ExecuteError::Refused(why).into())
        }
        other => {
            context.refusals.remember(&regarding, None);
            other
        }
    }
}

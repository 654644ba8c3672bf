//! ChainTable: observe, plan, execute. A refused push is remembered, for the condition, until the
//! manager takes the table.

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
use crate::plan::Action;
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
        context.refusals.forget(&regarding);
        return Ok(Next::await_change());
    };
    let (namespace, revision) = (table.namespace().unwrap_or_default(), table.spec.revision);
    let host = format!("{}-meta.{namespace}.svc:{META_ADMIN_PORT}", table.spec.cluster_ref.name);
    let manager = observe::manager(&host).await;
    let view = TableView { table, manager, refusal: context.refusals.of(&regarding, revision) };
    let serves = plan::table::is_accepted(&view);
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
    let pushes = planned.actions.iter().any(|action| matches!(action, Action::PushTable(..)));
    let outcome = context.finish(&planned, &regarding).await;
    match heard(&outcome, serves || pushes) {
        Word::Refused(why) => context.refusals.remember(&regarding, revision, why),
        Word::Taken => context.refusals.forget(&regarding),
        Word::None => {}
    }
    outcome
}

/// What the manager said about a table.
enum Word {
    /// It does not take it.
    Refused(String),
    /// It has it.
    Taken,
    /// Nothing: what it said before stands.
    None,
}

/// What a reconcile heard. One that went well heard that the table was taken if the manager was
/// seen to serve it, or was given it: `asked`.
fn heard(outcome: &Result<Next, ReconcileError>, asked: bool) -> Word {
    match outcome {
        Err(ReconcileError::Execute(ExecuteError::Refused(why))) => Word::Refused(why.clone()),
        Ok(_) if asked => Word::Taken,
        // Its store, the network or the API server failed, or it was not there to ask.
        Ok(_) | Err(_) => Word::None,
    }
}

#[cfg(test)]
mod tests {
    use hyper::StatusCode;

    use super::*;
    use crate::http::HttpError;

    fn failed(error: ExecuteError) -> Result<Next, ReconcileError> {
        Err(error.into())
    }

    /// Were it forgotten, the condition would go from TableRefused to Pushing and back, with an
    /// Event each time.
    #[test]
    fn a_refusal_stands_until_the_manager_takes_the_table() {
        let done = || Ok(Next::await_change());
        let refused = |outcome: &Result<Next, ReconcileError>, asked| match heard(outcome, asked) {
            Word::Refused(why) => Some(why),
            Word::Taken => None,
            Word::None => Some("as before".to_owned()),
        };
        let no = failed(ExecuteError::Refused("another shape".to_owned()));
        assert_eq!(refused(&no, true).as_deref(), Some("another shape"));
        for (outcome, asked) in [
            (failed(ExecuteError::Unavailable(StatusCode::SERVICE_UNAVAILABLE)), true),
            (failed(ExecuteError::Manager(HttpError::Timeout("manager".to_owned()))), true),
            (failed(ExecuteError::Lint("a status that is too long".to_owned())), true),
            (done(), false),
        ] {
            let stands = refused(&outcome, asked);
            assert_eq!(stands.as_deref(), Some("as before"), "{outcome:?}");
        }
        assert_eq!(refused(&done(), true), None);
    }
}

//! The four controllers. Each watches metadata only (and of pods with datasets the volumes), so
//! that an object that does not parse cannot stop the watch of the others; reconciling reads the
//! object whole and, if it does not parse, says so on that object alone.

mod cluster;
mod dataset;
mod load;
mod refusals;
mod table;

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use kube::runtime::controller::Action as Next;
use kube::runtime::events::{Recorder, Reporter};
use kube::runtime::watcher;
use serde::de::DeserializeOwned;
use thiserror::Error;
use tokio::sync::watch;

use self::refusals::Refusals;
use crate::api::ApiError;
use crate::execute::{ExecuteError, Executor};
use crate::metrics::{Metrics, ReconcileLabels};
use crate::observe;
use crate::plan::job::Placement;
use crate::plan::{Env, Images, Notice, Plan};
use crate::webhook::users::Users;

/// Longest time without a look at an object, in seconds: a safety net, watches do the work.
const RESYNC_S: u64 = 600;
/// First and longest wait after a failure, in seconds.
const RETRY_S: (u64, u64) = (1, 30);

/// Why a reconcile failed.
#[derive(Debug, Error)]
pub enum ReconcileError {
    /// Reading the API failed.
    #[error(transparent)]
    Observe(#[from] ApiError),
    /// Writing failed.
    #[error(transparent)]
    Execute(#[from] ExecuteError),
}

/// What all controllers share.
#[derive(Clone)]
pub struct Shared {
    /// The API server.
    pub client: Client,
    /// Images to deploy.
    pub images: Images,
    /// Where the pods of Jobs may run.
    pub jobs: Placement,
    /// Which pods use which Dataset.
    pub users: Users,
    /// Counters.
    pub metrics: Metrics,
}

impl Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("images", &self.images).finish_non_exhaustive()
    }
}

/// One controller's context.
struct Context {
    shared: Shared,
    executor: Executor,
    name: &'static str,
    kind: &'static str,
    failures: std::sync::Mutex<std::collections::HashMap<String, u32>>,
    refusals: Refusals,
}

/// Runs all controllers until `stop`.
pub async fn run(shared: Shared, stop: watch::Receiver<bool>) {
    futures::join!(
        cluster::run(&shared, stop.clone()),
        table::run(&shared, stop.clone()),
        dataset::run(&shared, stop.clone()),
        load::run(&shared, stop),
    );
}

impl Context {
    fn new(shared: &Shared, name: &'static str, kind: &'static str) -> Arc<Self> {
        let reporter = Reporter { controller: name.to_owned(), instance: None };
        let recorder = Recorder::new(shared.client.clone(), reporter);
        let executor = Executor::new(shared.client.clone(), recorder, name);
        Arc::new(Self {
            shared: shared.clone(),
            executor,
            name,
            kind,
            failures: Default::default(),
            refusals: Refusals::default(),
        })
    }

    fn env(&self) -> Env {
        let Shared { images, jobs, .. } = &self.shared;
        Env { images: images.clone(), jobs: jobs.clone(), now: Timestamp::now() }
    }

    /// The object whole. `None` if it is gone or does not parse; the latter is said in an event.
    async fn read<T: DeserializeOwned>(
        &self,
        regarding: &ObjectReference,
    ) -> Result<Option<T>, ReconcileError> {
        let namespace = regarding.namespace.as_deref().unwrap_or_default();
        let name = regarding.name.as_deref().unwrap_or_default();
        match observe::get_as(&self.shared.client, self.kind, namespace, name).await {
            Ok(found) => Ok(found),
            Err(ApiError::Decode { source, .. }) => {
                let message = format!("this object does not parse: {source}; correct it");
                let reason = "Malformed".to_owned();
                let notice = Notice { warning: true, reason, message };
                let mut plan = Plan::default();
                plan.actions.push(crate::plan::Action::Event(notice));
                self.executor.execute(&plan, regarding).await?;
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Carries the plan out and says when to look again.
    async fn finish(
        &self,
        plan: &Plan,
        regarding: &ObjectReference,
    ) -> Result<Next, ReconcileError> {
        self.executor.execute(plan, regarding).await?;
        let count = u64::try_from(plan.actions.len()).unwrap_or_default();
        self.labels(&self.shared.metrics.actions, "ok", count);
        self.labels(&self.shared.metrics.reconciles, "ok", 1);
        self.forget(regarding);
        Ok(Next::requeue(Duration::from_secs(plan.requeue_s.unwrap_or(RESYNC_S))))
    }

    fn labels(
        &self,
        family: &prometheus_client::metrics::family::Family<
            ReconcileLabels,
            prometheus_client::metrics::counter::Counter,
        >,
        result: &'static str,
        count: u64,
    ) {
        let labels = ReconcileLabels { controller: self.name, result };
        family.get_or_create(&labels).inc_by(count);
    }

    fn key(regarding: &ObjectReference) -> String {
        let text = |part: &Option<String>| part.clone().unwrap_or_default();
        format!("{}/{}", text(&regarding.namespace), text(&regarding.name))
    }

    fn forget(&self, regarding: &ObjectReference) {
        let mut failures = self.failures.lock().unwrap_or_else(|poison| poison.into_inner());
        failures.remove(&Self::key(regarding));
    }

    /// How long to wait after another failure of this object: doubled each time, up to a limit.
    fn back_off(&self, regarding: &ObjectReference, error: &ReconcileError) -> Next {
        self.labels(&self.shared.metrics.reconciles, "error", 1);
        let key = Self::key(regarding);
        let mut failures = self.failures.lock().unwrap_or_else(|poison| poison.into_inner());
        let count = failures.entry(key.clone()).or_default();
        let wait = (RETRY_S.0 << (*count).min(10)).min(RETRY_S.1);
        *count += 1;
        let cause = std::error::Error::source(error).map(ToString::to_string);
        tracing::warn!(controller = self.name, object = key, %error, cause, wait, "reconcile");
        Next::requeue(Duration::from_secs(wait))
    }
}

/// A watch of everything of ours that carries label `key`.
fn labelled(key: &str) -> watcher::Config {
    watcher::Config::default().labels(key)
}

/// Starts the controller and drives it until `stop`.
macro_rules! drive {
    ($controller:expr, $reconcile:expr, $context:expr, $stop:expr) => {{
        let mut stop = $stop;
        $controller
            .graceful_shutdown_on(async move { rpc::shutdown::stopped(&mut stop).await })
            .run($reconcile, |object, error, context| context.back_off(&object.object_ref(&()), error), $context)
            .for_each(|outcome| {
                if let Err(error) = outcome {
                    tracing::debug!(%error, "controller");
                }
                futures::future::ready(())
            })
            .await
    }};
}
use drive;

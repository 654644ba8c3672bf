//! The process: manager and metadata service behind one port, the admin endpoint behind another.

use crate::args::ServeArgs;
use crate::chunks::{Chunks, Remote};
use crate::collect::Collector;
use crate::manager::service::Manager;
use crate::manager::spec::ChainTableSpec;
use crate::op::Operation;
use crate::service::Meta;
use crate::txn::Store;
use crate::txn::embedded::Embedded;
use anyhow::Context;
use bytes::Bytes;
use chain::id::ClientId;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use rpc::admin::{Admin, Answer};
use rpc::frame::Kind;
use rpc::message::Request;
use rpc::message::manager::{GetRouting, Heartbeat};
use rpc::message::meta as message;
use rpc::serve::{Call, Handler, Reply};
use rpc::{Code, Error};
use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::sync::watch;

/// Pause between two rounds of the collector.
const COLLECT_PAUSE: Duration = Duration::from_secs(1);
/// How long requests under way may take to finish at the end.
const DRAIN: Duration = Duration::from_secs(10);
/// How often the store is asked whether it has failed.
const FAILURE_CHECK: Duration = Duration::from_millis(100);

/// Answers requests to both roles.
#[derive(Debug)]
pub struct Service<S, C> {
    meta: Arc<Meta<S, C>>,
    manager: Manager,
    metrics: Metrics,
    stopped: watch::Receiver<bool>,
}

#[derive(Clone, Debug)]
struct Metrics {
    requests: Family<[(&'static str, String); 2], Counter>,
    seconds: Family<[(&'static str, String); 1], Histogram>,
}

impl Metrics {
    fn register(registry: &mut Registry) -> Self {
        let seconds = || Histogram::new(exponential_buckets(0.000_1, 4.0, 8));
        let metrics =
            Self { requests: Family::default(), seconds: Family::new_with_constructor(seconds) };
        registry.register(
            "lampyris_meta_requests",
            "Requests by kind and outcome",
            metrics.requests.clone(),
        );
        registry.register(
            "lampyris_meta_request_seconds",
            "Time to answer",
            metrics.seconds.clone(),
        );
        metrics
    }

    fn note(&self, kind: Kind, start: Instant, outcome: Result<(), Code>) {
        let kind = format!("{:#06x}", kind.0);
        let outcome = outcome.map_or_else(|code| format!("{code:?}"), |()| "ok".into());
        self.seconds
            .get_or_create(&[("kind", kind.clone())])
            .observe(start.elapsed().as_secs_f64());
        self.requests.get_or_create(&[("kind", kind), ("outcome", outcome)]).inc();
    }
}

impl<S: Store, C: Chunks> Service<S, C> {
    /// Both roles, with their metrics in `registry`. Held answers end when `stopped` turns true.
    pub fn new(
        meta: Arc<Meta<S, C>>,
        manager: Manager,
        registry: &mut Registry,
        stopped: watch::Receiver<bool>,
    ) -> Self {
        Self { meta, manager, metrics: Metrics::register(registry), stopped }
    }

    async fn routing(&self, request: &GetRouting) -> Result<Reply, Error> {
        let mut stopped = self.stopped.clone();
        tokio::select! {
            done = self.manager.routing(request) => Ok(Reply::new(&done)),
            _ = stopped.wait_for(|stopped| *stopped) => {
                Err(Error::new(Code::Draining, "the manager ends"))
            }
        }
    }

    async fn run<R: Operation>(&self, call: &Call) -> Result<Reply, Error> {
        Ok(Reply::new(&self.meta.execute(&call.decode::<R>()?).await?))
    }

    async fn answer(&self, call: &Call) -> Result<Reply, Error> {
        match call.kind {
            Heartbeat::KIND => Ok(Reply::new(&self.manager.heartbeat(call.decode()?).await?)),
            GetRouting::KIND => self.routing(&call.decode()?).await,
            message::KeepSessions::KIND => {
                Ok(Reply::new(&self.meta.keep_sessions(&call.decode()?).await?))
            }
            message::Lookup::KIND => self.run::<message::Lookup>(call).await,
            message::GetAttributes::KIND => self.run::<message::GetAttributes>(call).await,
            message::SetAttributes::KIND => self.run::<message::SetAttributes>(call).await,
            message::Create::KIND => self.run::<message::Create>(call).await,
            message::Open::KIND => self.run::<message::Open>(call).await,
            message::ReportLength::KIND => self.run::<message::ReportLength>(call).await,
            message::Truncate::KIND => self.run::<message::Truncate>(call).await,
            message::MakeDirectory::KIND => self.run::<message::MakeDirectory>(call).await,
            message::MakeSymlink::KIND => self.run::<message::MakeSymlink>(call).await,
            message::ReadSymlink::KIND => self.run::<message::ReadSymlink>(call).await,
            message::Remove::KIND => self.run::<message::Remove>(call).await,
            message::Rename::KIND => self.run::<message::Rename>(call).await,
            message::ReadDirectory::KIND => self.run::<message::ReadDirectory>(call).await,
            message::StatFileSystem::KIND => self.run::<message::StatFileSystem>(call).await,
            _ => Err(call.unknown()),
        }
    }
}

impl<S: Store, C: Chunks> Handler for Service<S, C> {
    async fn handle(&self, call: Call) -> Result<Reply, Error> {
        let start = Instant::now();
        // Boxed: one future for seventeen kinds would be as large as the largest of them.
        let result = Box::pin(self.answer(&call)).await;
        let outcome = result.as_ref().map(|_| ()).map_err(|error| error.code);
        let kind = if outcome == Err(Code::UnknownKind) { Kind(0) } else { call.kind };
        self.metrics.note(kind, start, outcome);
        result
    }
}

/// Runs `meta serve` until it is told to stop.
///
/// # Errors
/// What kept it from starting, or made it end: then the supervisor starts it anew.
pub async fn serve(args: ServeArgs) -> anyhow::Result<()> {
    let mut stop = rpc::shutdown::on_signal().context("install signal handlers")?;
    std::fs::create_dir_all(&args.data)
        .with_context(|| format!("--data {}: create the directory", args.data.display()))?;
    let store = Embedded::open(&args.data)
        .with_context(|| format!("--data {}: open the store", args.data.display()))?;
    let (manager, owner) = Manager::start(store.clone(), args.cluster.clone()).await?;
    let published = manager.published();
    let chunks = Remote::new(published.clone(), ClientId::new(random()?));
    let meta = Meta::open(store.clone(), chunks, &args.cluster, random()?, published).await?;
    let meta = Arc::new(meta);
    let listener = bind("--listen", &args.listen).await?;
    let admin_listener = bind("--admin", &args.admin).await?;
    tracing::info!(
        cluster = args.cluster, listen = %listener.local_addr()?,
        admin = %admin_listener.local_addr()?, data = %args.data.display(), "serving"
    );
    let mut registry = Registry::default();
    let (stop_serving, stopped) = watch::channel(false);
    let service = Service::new(Arc::clone(&meta), manager.clone(), &mut registry, stopped.clone());
    let service = Arc::new(service);
    let draining = Arc::new(AtomicBool::new(false));
    let admin = Arc::new(admin(registry, &store, &manager, &draining));
    let (stop_admin, admin_stopped) = watch::channel(false);
    tokio::spawn(rpc::admin::serve(admin_listener, admin, admin_stopped));
    let serving = tokio::spawn(rpc::serve::serve(listener, service, stopped));
    let grace = Duration::from_secs(args.grace_seconds);
    let collector = tokio::spawn(collect(Collector::new(Arc::clone(&meta), grace)));
    let ended = tokio::select! {
        error = owner => Err(error.into()),
        failure = failed(&store) => Err(anyhow::anyhow!(failure)),
        _ = stop.wait_for(|stop| *stop) => Ok(()),
    };
    draining.store(true, Ordering::Relaxed);
    collector.abort();
    if ended.is_ok() {
        stop_serving.send_replace(true);
        if tokio::time::timeout(DRAIN, serving).await.is_err() {
            tracing::warn!("requests were still under way at the end");
        }
    }
    stop_admin.send_replace(true);
    ended
}

async fn bind(flag: &str, address: &str) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address).await.with_context(|| format!("{flag} {address}: bind"))
}

/// Ends when the store cannot go on.
async fn failed(store: &Embedded) -> String {
    let mut check = tokio::time::interval(FAILURE_CHECK);
    loop {
        check.tick().await;
        if let Some(failure) = store.failure() {
            return failure;
        }
    }
}

async fn collect<S: Store, C: Chunks>(mut collector: Collector<S, C>) {
    let mut pause = tokio::time::interval(COLLECT_PAUSE);
    pause.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        pause.tick().await;
        if let Err(error) = collector.round().await {
            tracing::warn!(%error, "collect removed files");
        }
    }
}

fn random() -> anyhow::Result<u128> {
    let mut raw = [0; 16];
    std::fs::File::open("/dev/urandom")
        .and_then(|mut file| file.read_exact(&mut raw))
        .context("read /dev/urandom")?;
    Ok(u128::from_le_bytes(raw))
}

fn admin(
    mut registry: Registry,
    store: &Embedded,
    manager: &Manager,
    draining: &Arc<AtomicBool>,
) -> Admin {
    let routing = manager.published();
    registry
        .register_collector(Box::new(Gauges { store: store.clone(), manager: manager.clone() }));
    let (ready_store, draining) = (store.clone(), Arc::clone(draining));
    let ready = move || match ready_store.failure() {
        Some(failure) => Err(failure),
        None if draining.load(Ordering::Relaxed) => Err("draining".into()),
        None => Ok(()),
    };
    let state = move || {
        let routing = Arc::clone(&routing.borrow().routing);
        let serving = routing.chains.iter().filter(|c| c.head().is_some()).count();
        serde_json::json!({
            "store": "embedded", "routingVersion": routing.version.get(), "table": routing.table,
            "chains": routing.chains.len(), "servingChains": serving, "nodes": routing.nodes.len(),
        })
    };
    let manager = manager.clone();
    Admin::new(registry, ready, state).with_routes(move |method, path, body| {
        let manager = manager.clone();
        async move { route(&manager, method.as_str(), &path, &body).await }
    })
}

async fn route(manager: &Manager, method: &str, path: &str, body: &Bytes) -> Option<Answer> {
    let result = match (method, path) {
        ("PUT", "/v1/table") => match serde_json::from_slice::<ChainTableSpec>(body) {
            Ok(spec) => manager.declare(&spec).await.map(|()| serde_json::json!({})),
            Err(error) => Err(Error::new(Code::InvalidRequest, format!("chain table: {error}"))),
        },
        ("GET", "/v1/status") => match manager.status().await {
            Ok(status) => serde_json::to_value(status)
                .map_err(|error| Error::new(Code::Internal, error.to_string())),
            Err(error) => Err(error),
        },
        _ => return None,
    };
    let (status, body) = match result {
        Ok(body) => (200, body),
        Err(error) => {
            let status = match error.code {
                Code::InvalidRequest => 400,
                Code::Conflict => 409,
                _ => 503,
            };
            (status, serde_json::json!({ "reason": error.message }))
        }
    };
    Some(Answer { status: status.try_into().ok()?, body })
}

/// Numbers that are read when somebody asks.
#[derive(Debug)]
struct Gauges {
    store: Embedded,
    manager: Manager,
}

impl prometheus_client::collector::Collector for Gauges {
    fn encode(
        &self,
        mut encoder: prometheus_client::encoding::DescriptorEncoder<'_>,
    ) -> Result<(), std::fmt::Error> {
        use prometheus_client::encoding::EncodeMetric;
        use prometheus_client::metrics::gauge::ConstGauge;
        let published = self.manager.published();
        let routing = Arc::clone(&published.borrow().routing);
        let (mut serving, mut degraded) = (0u64, 0u64);
        for chain in &routing.chains {
            let count = chain.serving().count();
            serving += u64::from(count > 0);
            degraded += u64::from(count > 0 && count < chain.targets.len());
        }
        let gauges = [
            ("lampyris_routing_version", "Version of the routing table", routing.version.get()),
            ("lampyris_chains", "Chains of the table", routing.chains.len() as u64),
            ("lampyris_chains_serving", "Chains with a serving target", serving),
            ("lampyris_chains_degraded", "Serving chains that lack a member", degraded),
            ("lampyris_meta_commits", "Commits since the start", self.store.commit_count()),
        ];
        for (name, help, value) in gauges {
            let gauge = ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
            let encoder = encoder.encode_descriptor(name, help, None, gauge.metric_type())?;
            gauge.encode(encoder)?;
        }
        Ok(())
    }
}

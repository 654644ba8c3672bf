//! What the server counts.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use rpc::Code;
use rpc::frame::Kind;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Request {
    kind: &'static str,
    outcome: String,
}

/// Counters of one server. Clones count together.
#[derive(Clone, Debug, Default)]
pub(crate) struct Metrics {
    requests: Family<Request, Counter>,
    pub(crate) read_bytes: Counter,
    pub(crate) update_bytes: Counter,
    pub(crate) heartbeats: Counter,
    pub(crate) heartbeat_failures: Counter,
    pub(crate) synced_chunks: Counter,
}

impl Metrics {
    pub(crate) fn register(&self, registry: &mut Registry) {
        let prefix = registry.sub_registry_with_prefix("lampyris_storage");
        prefix.register("requests", "Requests by kind and outcome", self.requests.clone());
        prefix.register("read_bytes", "Bytes answered to reads", self.read_bytes.clone());
        prefix.register("update_bytes", "Bytes of clients' updates", self.update_bytes.clone());
        prefix.register("heartbeats", "Leases granted", self.heartbeats.clone());
        let failures = self.heartbeat_failures.clone();
        prefix.register("heartbeat_failures", "Heartbeats without an answer", failures);
        let panics = "Requests whose handler panicked: each is a defect, see the log";
        prefix.register("handler_panics", panics, rpc::serve::panics());
        let synced = self.synced_chunks.clone();
        prefix.register("synced_chunks", "Chunks sent to a syncing successor", synced);
    }

    pub(crate) fn count(&self, kind: Kind, failure: Option<Code>) {
        let outcome = failure.map_or_else(|| "ok".into(), |code| format!("{code:?}"));
        self.requests.get_or_create(&Request { kind: kind.name(), outcome }).inc();
    }
}

//! What the server counts.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use rpc::Code;
use rpc::frame::Kind;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Request {
    kind: String,
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
        let synced = self.synced_chunks.clone();
        prefix.register("synced_chunks", "Chunks sent to a syncing successor", synced);
    }

    pub(crate) fn count(&self, kind: Kind, failure: Option<Code>) {
        let outcome = failure.map_or_else(|| "ok".into(), |code| format!("{code:?}"));
        let kind = match kind.0 {
            0x0101 => "read",
            0x0102 => "update",
            0x0103 => "query",
            0x0111 => "forward",
            0x0112 => "list",
            0x0113 => "forget",
            0x0114 => "sync_done",
            _ => "unknown",
        };
        self.requests.get_or_create(&Request { kind: kind.into(), outcome }).inc();
    }
}

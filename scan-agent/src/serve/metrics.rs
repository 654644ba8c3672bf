//! Counters of the agent.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// What the agent counts; clones count into the same.
#[derive(Debug, Clone, Default)]
pub(super) struct Metrics {
    /// Rows delivered.
    pub(super) rows: Counter,
    /// Bytes fetched from sources.
    pub(super) fetched: Counter,
    /// Scans that run now.
    pub(super) sessions: Gauge,
    failures: Family<FailureLabels, Counter>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FailureLabels {
    reason: String,
}

impl Metrics {
    /// Registers everything under `lampyris_scan_`.
    pub(super) fn register(&self, registry: &mut Registry) {
        let registry = registry.sub_registry_with_prefix("lampyris_scan");
        registry.register("rows", "Rows delivered to clients", self.rows.clone());
        registry.register("fetched_bytes", "Bytes fetched from sources", self.fetched.clone());
        registry.register("sessions", "Scans that run now", self.sessions.clone());
        registry.register("failures", "Scans refused or failed", self.failures.clone());
    }

    /// Counts a scan that was refused or failed.
    pub(super) fn failed(&self, reason: &str) {
        let labels = FailureLabels { reason: reason.to_owned() };
        self.failures.get_or_create(&labels).inc();
    }
}

//! What the operator counts. Names begin with `lampyris_operator_`.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

/// Labels of a reconcile.
#[derive(Clone, Debug, EncodeLabelSet, Eq, Hash, PartialEq)]
pub struct ReconcileLabels {
    /// Which controller.
    pub controller: &'static str,
    /// `ok` or `error`.
    pub result: &'static str,
}

/// Labels of an admission decision.
#[derive(Clone, Debug, EncodeLabelSet, Eq, Hash, PartialEq)]
pub struct AdmissionLabels {
    /// `injected`, `unchanged` or `denied`.
    pub decision: &'static str,
}

/// All counters of the process.
#[derive(Clone, Debug)]
pub struct Metrics {
    /// Reconciles by controller and result.
    pub reconciles: Family<ReconcileLabels, Counter>,
    /// Things that plans made the operator do, by controller; `result` is always `ok`.
    pub actions: Family<ReconcileLabels, Counter>,
    /// Admission decisions.
    pub admissions: Family<AdmissionLabels, Counter>,
    /// Seconds that an admission took.
    pub admission_seconds: Histogram,
    /// Whether this replica reconciles.
    pub leader: Gauge,
}

impl Metrics {
    /// Counters at zero, registered.
    pub fn new(registry: &mut Registry) -> Self {
        let metrics = Self {
            reconciles: Family::default(),
            actions: Family::default(),
            admissions: Family::default(),
            admission_seconds: Histogram::new([0.001, 0.002, 0.005, 0.01, 0.05, 0.25, 1.0]),
            leader: Gauge::default(),
        };
        let registry = registry.sub_registry_with_prefix("lampyris_operator");
        registry.register("reconciles", "Reconciles", metrics.reconciles.clone());
        registry.register("actions", "Planned actions carried out", metrics.actions.clone());
        registry.register("admissions", "Admission decisions", metrics.admissions.clone());
        registry.register(
            "admission_seconds",
            "Seconds that an admission took",
            metrics.admission_seconds.clone(),
        );
        registry.register("leader", "Whether this replica reconciles", metrics.leader.clone());
        metrics
    }
}

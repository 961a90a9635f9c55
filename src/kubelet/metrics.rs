//! What is counted of kubelet's calls.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use jiff::Timestamp;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

/// Kubelet's calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "the label values are these words")]
pub(super) enum Method {
    prepare,
    unprepare,
    get_info,
    notify,
}

/// How a call ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "the label values are these words")]
pub(super) enum Outcome {
    ok,
    /// At least one claim was answered with an error; or kubelet said that it does not take us.
    refused,
    /// A call without claims, as health probes make it.
    empty,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CallLabels {
    method: Method,
    result: Outcome,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct MethodLabel {
    method: Method,
}

/// From half a millisecond to the 45 seconds that kubelet waits.
const BUCKETS: [f64; 14] = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 15.0, 45.0];

/// The metrics of this module; a clone counts into the same.
#[derive(Debug, Clone)]
pub(super) struct Metrics {
    calls: Family<CallLabels, Counter>,
    claims: Family<CallLabels, Counter>,
    latency: Family<MethodLabel, Histogram, fn() -> Histogram>,
    registered: Gauge,
    last_call_seconds: Gauge<f64, AtomicU64>,
    panics: Counter,
    pub(super) streams: Gauge,
    /// The last call in milliseconds since 1970; 0 is none.
    last_call: Arc<AtomicI64>,
}

impl Metrics {
    pub(super) fn new(registry: &mut Registry) -> Self {
        let metrics = Self {
            calls: Family::default(),
            claims: Family::default(),
            latency: Family::new_with_constructor(|| Histogram::new(BUCKETS)),
            registered: Gauge::default(),
            last_call_seconds: Gauge::default(),
            panics: Counter::default(),
            streams: Gauge::default(),
            last_call: Arc::default(),
        };
        let registry = registry.sub_registry_with_prefix("kubelet");
        registry.register("calls", "Calls of kubelet by method and result", metrics.calls.clone());
        registry.register("claims", "Claims in calls of kubelet by method and result", metrics.claims.clone());
        let help = "Time from a call's arrival to its answer, by method";
        registry.register_with_unit("call_duration", help, Unit::Seconds, metrics.latency.clone());
        registry.register("registered", "1 while kubelet has the driver registered", metrics.registered.clone());
        let help = "When kubelet last called, since 1970";
        registry.register_with_unit("last_call_timestamp", help, Unit::Seconds, metrics.last_call_seconds.clone());
        registry.register(
            "panics",
            "Claims that ended in a panic, which was answered as an error",
            metrics.panics.clone(),
        );
        registry.register("health_streams", "Health streams that are open", metrics.streams.clone());
        metrics
    }

    /// A call of kubelet came in.
    pub(super) fn called(&self) {
        let now = Timestamp::now();
        self.last_call.store(now.as_millisecond(), Ordering::Relaxed);
        self.last_call_seconds.set(now.as_duration().as_secs_f64());
    }

    pub(super) fn answered(&self, method: Method, result: Outcome, took: Duration) {
        self.calls.get_or_create(&CallLabels { method, result }).inc();
        self.latency.get_or_create(&MethodLabel { method }).observe(took.as_secs_f64());
    }

    pub(super) fn claim(&self, method: Method, result: Outcome) {
        self.claims.get_or_create(&CallLabels { method, result }).inc();
    }

    pub(super) fn panicked(&self) {
        self.panics.inc();
    }

    pub(super) fn set_registered(&self, registered: bool) {
        self.registered.set(registered.into());
    }

    pub(super) fn last_call(&self) -> Option<Timestamp> {
        match self.last_call.load(Ordering::Relaxed) {
            0 => None,
            millis => Timestamp::from_millisecond(millis).ok(),
        }
    }
}

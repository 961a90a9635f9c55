//! Metrics of the API client and the publisher.

use std::sync::atomic::AtomicU64;

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Registry, Unit},
};

/// What was asked, and how it ended.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct Request {
    pub(crate) verb: &'static str,
    pub(crate) resource: &'static str,
    pub(crate) result: &'static str,
}

/// All metrics of this module.
#[derive(Debug)]
pub(crate) struct Metrics {
    pub(crate) requests: Family<Request, Counter>,
    pub(crate) claim_read: Histogram,
    pub(crate) connected: Gauge,
    pub(crate) credential_loads: Counter,
    pub(crate) certificate_ends: Gauge<f64, AtomicU64>,
    pub(crate) wanted_devices: Gauge,
    pub(crate) published_devices: Gauge,
    pub(crate) left_out_devices: Gauge,
    pub(crate) in_step: Gauge,
    pub(crate) slice_writes: Counter,
    pub(crate) events_sent: Counter,
    pub(crate) events_dropped: Counter,
}

impl Metrics {
    /// Registers them below `cluster`.
    pub(crate) fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            requests: Family::default(),
            claim_read: Histogram::new([0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0]),
            connected: Gauge::default(),
            credential_loads: Counter::default(),
            certificate_ends: Gauge::default(),
            wanted_devices: Gauge::default(),
            published_devices: Gauge::default(),
            left_out_devices: Gauge::default(),
            in_step: Gauge::default(),
            slice_writes: Counter::default(),
            events_sent: Counter::default(),
            events_dropped: Counter::default(),
        };
        let registry = registry.sub_registry_with_prefix("cluster");
        registry.register("requests", "Requests to the API server, by result", metrics.requests.clone());
        registry.register_with_unit("claim_read", "Time to read a claim", Unit::Seconds, metrics.claim_read.clone());
        registry.register("connected", "1 if the API server answers", metrics.connected.clone());
        registry.register("credential_loads", "Times credentials were loaded", metrics.credential_loads.clone());
        registry.register(
            "client_certificate_expiry_timestamp",
            "End of the client certificate; 0 if there is none",
            metrics.certificate_ends.clone(),
        );
        registry.register("wanted_devices", "Devices that are to be published", metrics.wanted_devices.clone());
        registry.register("published_devices", "Devices in our slices", metrics.published_devices.clone());
        registry.register(
            "left_out_devices",
            "Devices left out because the API server would refuse them",
            metrics.left_out_devices.clone(),
        );
        registry.register("slices_in_step", "1 if the slices are as wanted", metrics.in_step.clone());
        registry.register("slice_writes", "Slices written or deleted", metrics.slice_writes.clone());
        registry.register("events_sent", "Events written", metrics.events_sent.clone());
        registry.register("events_dropped", "Events dropped", metrics.events_dropped.clone());
        metrics
    }
}

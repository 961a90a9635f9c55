//! Numbers of the admin service.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    method: &'static str,
    code: &'static str,
}

#[derive(Debug, Clone)]
pub(super) struct Metrics {
    requests: Family<Labels, Counter>,
    pub(super) watches: Gauge,
}

impl Metrics {
    pub(super) fn new(registry: &mut Registry) -> Self {
        let metrics = Self { requests: Family::default(), watches: Gauge::default() };
        let registry = registry.sub_registry_with_prefix("admin");
        registry.register("requests", "Calls of the admin service, by method and outcome", metrics.requests.clone());
        registry.register("watches", "Watches of the admin service that are open", metrics.watches.clone());
        metrics
    }

    pub(super) fn answered(&self, method: &'static str, code: &'static str) {
        self.requests.get_or_create(&Labels { method, code }).inc();
    }
}

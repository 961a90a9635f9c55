//! What the driver holds of the cards, as metrics: read when somebody asks, so a card that is gone is gone there too.

use std::{
    fmt,
    sync::{Arc, Weak},
};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric},
    metrics::{MetricType, counter::Counter, family::Family, gauge::ConstGauge},
    registry::Registry,
};

use super::Core;
use crate::domain::health::{Alarm, Condition};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Kind {
    kind: &'static str,
}

/// How often the hardware said something unasked.
#[derive(Debug, Default)]
pub(super) struct Alarms(Family<Kind, Counter>);

impl Alarms {
    pub(super) fn new(registry: &mut Registry) -> Self {
        let alarms = Self::default();
        let help = "What the hardware said unasked: fault events, lost cards, and doubts that a poll must settle";
        registry.sub_registry_with_prefix("health").register("alarms", help, alarms.0.clone());
        alarms
    }

    pub(super) fn count(&self, alarm: &Alarm) {
        let kind = match alarm {
            Alarm::Event { .. } => "event",
            Alarm::Lost { .. } => "lost",
            Alarm::Unsure => "unsure",
        };
        self.0.get_or_create(&Kind { kind }).inc();
    }
}

/// Shows the cards of an engine for as long as there is one.
pub(super) fn register(registry: &mut Registry, core: &Arc<Core>) {
    registry.sub_registry_with_prefix("device").register_collector(Box::new(Cards(Arc::downgrade(core))));
}

struct Cards(Weak<Core>);

impl fmt::Debug for Cards {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Cards").finish()
    }
}

impl Collector for Cards {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Some(core) = self.0.upgrade() else { return Ok(()) };
        let cards = core.state.health_of_all();
        let help = "1 for the condition that a card is in, 0 for the others";
        let mut metric = encoder.encode_descriptor("condition", help, None, MetricType::Gauge)?;
        for (device, health) in &cards {
            for condition in Condition::ALL {
                let labels = [("device", device.as_str()), ("condition", condition.as_str())];
                let is_it = u32::from(health.condition == condition);
                ConstGauge::new(is_it).encode(metric.encode_family(&labels)?)?;
            }
        }
        let help = "Faults of a card that are there, or held because they were not long ago";
        let mut metric = encoder.encode_descriptor("faults", help, None, MetricType::Gauge)?;
        for (device, health) in &cards {
            let faults = u32::try_from(health.faults.len()).unwrap_or(u32::MAX);
            ConstGauge::new(faults).encode(metric.encode_family(&[("device", device.as_str())])?)?;
        }
        Ok(())
    }
}

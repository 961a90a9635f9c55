//! What the sensors of the cards say, as metrics. Computed when they are asked for: a card that is gone has none.

use std::{fmt, sync::Arc};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric as _},
    metrics::{MetricType, gauge::ConstGauge},
    registry::{Registry, Unit},
};

use super::Core;
use crate::domain::health::{HealthReading, Link};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Card {
    device: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Errors {
    device: String,
    kind: &'static str,
}

/// Gives the last reading of every card, by name.
type Readings = Box<dyn Fn() -> Vec<(String, HealthReading)> + Send + Sync>;

/// The collector.
pub(super) struct Sensors(Readings);

impl fmt::Debug for Sensors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sensors").finish_non_exhaustive()
    }
}

impl Sensors {
    pub(super) fn register(core: &Arc<Core>, registry: &mut Registry) {
        let core = core.clone();
        let sensors = Self(Box::new(move || core.state.readings()));
        registry.sub_registry_with_prefix("device").register_collector(Box::new(sensors));
    }
}

/// A gauge of all cards: its name, help and unit.
struct Gauge<'a>(&'a str, &'a str, Option<Unit>);

impl Gauge<'_> {
    /// Writes the values that there are; nothing if there is none.
    fn encode<L: EncodeLabelSet>(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        values: impl IntoIterator<Item = (L, f64)>,
    ) -> fmt::Result {
        let Self(name, help, unit) = self;
        let mut values = values.into_iter().peekable();
        if values.peek().is_none() {
            return Ok(());
        }
        let mut metric = encoder.encode_descriptor(name, help, unit.as_ref(), MetricType::Gauge)?;
        for (labels, value) in values {
            ConstGauge::new(value).encode(metric.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

impl Collector for Sensors {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let readings = (self.0)();
        let of_cards = |value: &dyn Fn(&HealthReading) -> Option<f64>| -> Vec<(Card, f64)> {
            let value =
                |(device, reading): &(String, HealthReading)| Some((Card { device: device.clone() }, value(reading)?));
            readings.iter().filter_map(value).collect()
        };
        let celsius = of_cards(&|reading| reading.temperature.map(f64::from));
        Gauge("temperature", "Temperature of the hottest chip", Some(Unit::Celsius)).encode(&mut encoder, celsius)?;
        let watts = of_cards(&|reading| reading.power.map(|tenths| f64::from(tenths) / 10.0));
        Gauge("power", "Power of all chips", Some(Unit::Other("watts".to_owned()))).encode(&mut encoder, watts)?;
        let errors =
            readings.iter().filter_map(|(device, reading)| Some((device, reading.ecc?))).flat_map(|(device, ecc)| {
                [("corrected", ecc.corrected), ("uncorrected", ecc.uncorrected)]
                    .map(|(kind, count)| (Errors { device: device.clone(), kind }, number(count)))
            });
        let help = "Memory errors that ECC has counted since the driver was loaded";
        Gauge("ecc_errors", help, None).encode(&mut encoder, errors)?;
        let pages = of_cards(&|reading| reading.ecc.map(|ecc| number(ecc.isolated_pages)));
        Gauge("ecc_isolated_pages", "Memory pages taken out of use", None).encode(&mut encoder, pages)?;
        let links = of_cards(&|reading| reading.link.map(|link| f64::from(u8::from(link == Link::Up))));
        Gauge("link_up", "1 if the network link is up, 0 if it is not", None).encode(&mut encoder, links)
    }
}

/// A count as metrics have it: exact for all that hardware counts in 32 bits.
fn number(count: u64) -> f64 {
    f64::from(u32::try_from(count).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;

    use super::*;
    use crate::domain::health::EccCounts;

    #[test]
    fn each_card_shows_what_its_sensors_say_and_nothing_that_they_do_not() {
        let ecc = Some(EccCounts { corrected: 7, uncorrected: 1, isolated_pages: 3 });
        let all = HealthReading {
            temperature: Some(-5),
            power: Some(912),
            ecc,
            link: Some(Link::Down),
            ..HealthReading::default()
        };
        let some = HealthReading { link: Some(Link::Up), ..HealthReading::default() };
        let mut registry = Registry::with_prefix("npu_dra");
        let readings: Readings =
            Box::new(move || vec![("npu-0".to_owned(), all.clone()), ("npu-1".to_owned(), some.clone())]);
        registry.sub_registry_with_prefix("device").register_collector(Box::new(Sensors(readings)));
        registry.sub_registry_with_prefix("none").register_collector(Box::new(Sensors(Box::new(Vec::new))));
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        let values: Vec<_> = text.lines().filter(|line| !line.starts_with('#')).collect();
        let wanted = [
            "npu_dra_device_temperature_celsius{device=\"npu-0\"} -5.0",
            "npu_dra_device_power_watts{device=\"npu-0\"} 91.2",
            "npu_dra_device_ecc_errors{device=\"npu-0\",kind=\"corrected\"} 7.0",
            "npu_dra_device_ecc_errors{device=\"npu-0\",kind=\"uncorrected\"} 1.0",
            "npu_dra_device_ecc_isolated_pages{device=\"npu-0\"} 3.0",
            "npu_dra_device_link_up{device=\"npu-0\"} 0.0",
            "npu_dra_device_link_up{device=\"npu-1\"} 1.0",
        ];
        assert_eq!(values, wanted, "{text}");
    }
}

//! Health of a device: what was read, what it means, and when it last changed.

use std::fmt;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// How well a chip is, from best to worst.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// No fault (DCMI 0).
    #[default]
    Ok,
    /// Nothing is known: not read, or not readable (DCMI 4). Not the same as bad.
    Unknown,
    /// Minor alarm (DCMI 1): usable.
    Minor,
    /// Major alarm (DCMI 2).
    Major,
    /// Critical alarm (DCMI 3).
    Critical,
    /// The chip has dropped off the bus or was not there (DCMI 0xFFFFFFFF, -8012).
    Gone,
}

impl Level {
    /// True if the device may be handed to a new claim.
    #[must_use]
    pub fn is_usable(self) -> bool {
        matches!(self, Self::Ok | Self::Unknown | Self::Minor)
    }

    /// The level as users see it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Unknown => "unknown",
            Self::Minor => "minor",
            Self::Major => "major",
            Self::Critical => "critical",
            Self::Gone => "gone",
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// One reading of a chip's health.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HealthReading {
    /// The level.
    pub level: Level,
    /// Active fault codes, as the vendor numbers them.
    pub codes: Vec<u32>,
    /// Temperature in °C.
    pub temperature: Option<i32>,
    /// Power in tenths of a watt.
    pub power: Option<i32>,
}

impl HealthReading {
    /// A reading of one level with nothing else known.
    #[must_use]
    pub fn of(level: Level) -> Self {
        Self { level, ..Self::default() }
    }

    /// The worst of several: highest level and temperature, summed power, all codes. `Unknown` if there are none.
    pub fn worst<'a>(readings: impl IntoIterator<Item = &'a Self>) -> Self {
        let mut worst: Option<Self> = None;
        for reading in readings {
            match &mut worst {
                None => worst = Some(reading.clone()),
                Some(worst) => {
                    worst.level = worst.level.max(reading.level);
                    worst.codes.extend(&reading.codes);
                    worst.temperature = worst.temperature.max(reading.temperature);
                    worst.power = match (worst.power, reading.power) {
                        (Some(a), Some(b)) => Some(a.saturating_add(b)),
                        (one, other) => one.or(other),
                    };
                }
            }
        }
        let mut worst = worst.unwrap_or_else(|| Self::of(Level::Unknown));
        worst.codes.sort_unstable();
        worst.codes.dedup();
        worst
    }
}

/// Fault codes as users see them, eight hex digits each, separated by blanks.
pub fn codes_text(codes: &[u32]) -> String {
    codes.iter().map(|code| format!("{code:08X}")).collect::<Vec<_>>().join(" ")
}

/// What the driver holds to be a device's health.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Health {
    /// The last reading.
    pub reading: HealthReading,
    /// When level or codes last changed.
    pub since: Timestamp,
}

/// Health of one published device, as kubelet's health stream wants it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceHealth {
    /// Pool.
    pub pool: String,
    /// Device.
    pub device: String,
    /// Level.
    pub level: Level,
    /// When it last changed.
    pub since: Timestamp,
    /// For people: ASCII, short; empty if all is well.
    pub message: String,
}

/// One step of health: the old state, a new reading, the time; gives the new state and whether users must hear of it.
#[must_use]
pub fn step(old: Option<&Health>, reading: HealthReading, now: Timestamp) -> (Health, bool) {
    match old {
        Some(old) if old.reading.level == reading.level && old.reading.codes == reading.codes => {
            (Health { reading, since: old.since }, false)
        }
        Some(_) => (Health { reading, since: now }, true),
        None => {
            let changed = reading.level != Level::Ok || !reading.codes.is_empty();
            (Health { reading, since: now }, changed)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    #[test]
    fn a_first_good_reading_is_no_news_and_a_first_bad_one_is() {
        assert!(!step(None, HealthReading::of(Level::Ok), at(1)).1);
        assert!(step(None, HealthReading::of(Level::Major), at(1)).1);
    }

    #[test]
    fn since_moves_only_when_level_or_codes_change() {
        let (first, _) = step(None, HealthReading::of(Level::Ok), at(1));
        let warmer = HealthReading { temperature: Some(50), ..HealthReading::default() };
        let (second, news) = step(Some(&first), warmer, at(2));
        assert_eq!((second.since, news), (at(1), false));
        let coded = HealthReading { codes: vec![0x80E0_1801], ..HealthReading::default() };
        let (third, news) = step(Some(&second), coded, at(3));
        assert_eq!((third.since, news), (at(3), true));
    }

    #[test]
    fn the_worst_of_two_dies_counts_for_the_card() {
        let a = HealthReading { level: Level::Minor, codes: vec![2], temperature: Some(40), power: Some(900) };
        let b = HealthReading { level: Level::Critical, codes: vec![1, 2], temperature: Some(60), power: Some(100) };
        let worst = HealthReading::worst([&a, &b]);
        assert_eq!(
            worst,
            HealthReading { level: Level::Critical, codes: vec![1, 2], temperature: Some(60), power: Some(1000) }
        );
        assert_eq!(HealthReading::worst([]).level, Level::Unknown);
    }
}

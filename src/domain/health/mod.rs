//! Health of a device: what a source says of it, what that means, and since when.

use std::fmt;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

mod state;
mod table;
#[cfg(test)]
mod tests;

pub use self::{
    state::{CODES_MAX, Cause, Condition, Fault, FaultMemory, Health, Policy},
    table::{Action, CARD_LOST, InvalidEntry, LINK_DOWN, Table, meaning, named, parse_code},
};

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

/// State of a network link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Link {
    /// It carries traffic.
    Up,
    /// It does not: a fault, or nobody ever put a cable in.
    Down,
}

impl Link {
    /// The state as users see it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Up => "up",
            Self::Down => "down",
        }
    }
}

/// Errors of a chip's memory that its ECC has counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EccCounts {
    /// Corrected errors (single bit).
    pub corrected: u64,
    /// Errors that could not be corrected (double bit).
    pub uncorrected: u64,
    /// Pages that were taken out of use.
    pub isolated_pages: u64,
}

impl EccCounts {
    /// The sum of two chips' counts.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            corrected: self.corrected.saturating_add(other.corrected),
            uncorrected: self.uncorrected.saturating_add(other.uncorrected),
            isolated_pages: self.isolated_pages.saturating_add(other.isolated_pages),
        }
    }
}

/// One reading of a chip's health: the answer of a poll.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HealthReading {
    /// The level.
    pub level: Level,
    /// Active fault codes, as the vendor numbers them.
    pub codes: Vec<u32>,
    /// True if there may be more codes than these: the list could not be read, or not to its end. A code that is missing
    /// in it has not recovered for that.
    pub partial: bool,
    /// Temperature in °C.
    pub temperature: Option<i32>,
    /// Power in tenths of a watt.
    pub power: Option<i32>,
    /// What ECC has counted.
    pub ecc: Option<EccCounts>,
    /// The network link; of several the worst.
    pub link: Option<Link>,
}

impl HealthReading {
    /// A reading of one level with nothing else known. Only [`Level::Ok`] and [`Level::Minor`] say that there is no code.
    #[must_use]
    pub fn of(level: Level) -> Self {
        Self { level, partial: !matches!(level, Level::Ok | Level::Minor), ..Self::default() }
    }

    /// A reading that says nothing.
    #[must_use]
    pub fn unknown() -> Self {
        Self::of(Level::Unknown)
    }

    /// The worst of several: highest level and temperature, summed power and ECC counts, all codes. `Unknown` if there
    /// are none.
    pub fn worst<'a>(readings: impl IntoIterator<Item = &'a Self>) -> Self {
        let sum = |a: Option<i32>, b: Option<i32>| match (a, b) {
            (Some(a), Some(b)) => Some(a.saturating_add(b)),
            (one, other) => one.or(other),
        };
        let mut worst: Option<Self> = None;
        for reading in readings {
            match &mut worst {
                None => worst = Some(reading.clone()),
                Some(worst) => {
                    worst.level = worst.level.max(reading.level);
                    worst.codes.extend(&reading.codes);
                    worst.partial |= reading.partial;
                    worst.temperature = worst.temperature.max(reading.temperature);
                    worst.power = sum(worst.power, reading.power);
                    worst.ecc = match (worst.ecc, reading.ecc) {
                        (Some(a), Some(b)) => Some(a.plus(b)),
                        (one, other) => one.or(other),
                    };
                    worst.link = worst.link.max(reading.link);
                }
            }
        }
        let mut worst = worst.unwrap_or_else(|| Self::of(Level::Unknown));
        worst.codes.sort_unstable();
        worst.codes.dedup();
        worst
    }
}

/// What an event says of its fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Turn {
    /// The fault is there from now on (DCMI assertion 1).
    Occurred,
    /// It is gone (DCMI assertion 0).
    Recovered,
    /// It happened and was over at once (DCMI assertion 2).
    Once,
}

/// A fault event of one chip.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FaultEvent {
    /// The code, as the vendor numbers it.
    pub code: u32,
    /// How bad the source holds it to be; `Ok` for a mere suggestion, `Unknown` if it does not say.
    pub level: Level,
    /// What happened.
    pub turn: Turn,
}

/// What a source says of one card.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Report {
    /// It answered a poll.
    Read(HealthReading),
    /// It sent an event.
    Event(FaultEvent),
    /// It was asked and did not answer: nothing new is known.
    Missed,
    /// The card is not there: dropped off its bus, its device node or PCI function gone.
    Lost,
}

/// What a backend says unasked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Alarm {
    /// A chip's fault event.
    Event {
        /// The chip.
        physical_id: u32,
        /// The event.
        event: FaultEvent,
    },
    /// A chip has gone.
    Lost {
        /// The chip.
        physical_id: u32,
    },
    /// Events may have been lost, or what they name is not known: only a poll tells.
    Unsure,
}

/// Fault codes as users see them, eight hex digits each, separated by blanks.
pub fn codes_text(codes: &[u32]) -> String {
    codes.iter().map(|code| format!("{code:08X}")).collect::<Vec<_>>().join(" ")
}

/// Health of one published device, as kubelet's health stream wants it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceHealth {
    /// Pool.
    pub pool: String,
    /// Device.
    pub device: String,
    /// What the driver holds of its card.
    pub condition: Condition,
    /// When that last changed.
    pub since: Timestamp,
    /// For people: ASCII, short; empty if all is well.
    pub message: String,
}

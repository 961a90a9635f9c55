//! What `cluster` knows of itself, for people and for the engine.

use std::{collections::BTreeMap, fmt};

use jiff::Timestamp;
use tokio::sync::watch;

/// Version of an API server.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ServerVersion {
    /// Major version, 1.
    pub major: u32,
    /// Minor version, for example 34.
    pub minor: u32,
    /// The full text, for example `v1.34.3`.
    pub text: String,
}

impl ServerVersion {
    /// True from Kubernetes 1.`minor` on.
    #[must_use]
    pub fn since(&self, minor: u32) -> bool {
        (self.major, self.minor) >= (1, minor)
    }
}

impl fmt::Display for ServerVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// What is known of a feature gate of the API server.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Gate {
    /// The probe gave no answer.
    #[default]
    Unknown,
    /// The API server keeps the gate's fields.
    On,
    /// The API server drops the gate's fields.
    Off,
}

impl fmt::Display for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unknown => "unknown",
            Self::On => "on",
            Self::Off => "off",
        })
    }
}

/// The feature gates that matter for what can be published, as the API server showed them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Gates {
    /// The server that was probed; `None` before the first probe.
    pub server: Option<ServerVersion>,
    /// `DRADeviceTaints`.
    pub taints: Gate,
    /// `DRAConsumableCapacity`.
    pub consumable_capacity: Gate,
    /// `DRAPartitionableDevices`.
    pub partitionable_devices: Gate,
    /// Why a gate is unknown; empty if none is.
    pub problem: String,
}

/// State of the credentials.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Credentials {
    /// Where they come from.
    pub source: String,
    /// Address of the API server; empty as long as nothing could be loaded.
    pub server: String,
    /// What is wrong with them, naming file and reason.
    pub problem: Option<String>,
    /// When the client certificate ends.
    pub certificate_ends: Option<Timestamp>,
    /// How often they were loaded.
    pub loads: u64,
}

/// A slice as it stands in the API server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SliceStatus {
    /// Name of the object.
    pub name: String,
    /// Number of devices in it.
    pub devices: usize,
    /// Generation of the pool that it carries; `None` if it is not there.
    pub generation: Option<i64>,
    /// When we last wrote it.
    pub written: Option<Timestamp>,
    /// Why it is not as it should be.
    pub problem: Option<String>,
}

/// State of the publisher.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Publishing {
    /// True once the engine said what is to be published.
    pub wanted: bool,
    /// True if the API server has exactly what is wanted.
    pub in_step: bool,
    /// The slices of the wanted pool.
    pub slices: Vec<SliceStatus>,
    /// What keeps the publisher from its work.
    pub problem: Option<String>,
    /// Devices that were left out because the API server would refuse them, with the rule.
    pub left_out: Vec<String>,
    /// What the API server drops of what is sent, with the gate's name.
    pub dropped: Option<String>,
}

/// Everything that `cluster` knows of itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Status {
    /// True if the last request was answered, whatever the answer.
    pub connected: bool,
    /// Version of the API server.
    pub version: Option<ServerVersion>,
    /// The credentials.
    pub credentials: Credentials,
    /// The slices.
    pub publishing: Publishing,
    /// Devices of ours that the node offers through another driver: allocatable resources below `huawei.com/`.
    pub other_devices: Vec<String>,
    /// Rights that are missing: verb and resource, with the server's text.
    pub forbidden: BTreeMap<String, String>,
    /// Unusable answers since the start, by class (`forbidden`, `conflict`, `throttled`, `server`, `network` …).
    pub errors: BTreeMap<&'static str, u64>,
    /// Events that were dropped because the queue was full or the API server away.
    pub events_dropped: u64,
}

/// The one place where the status is kept.
#[derive(Debug, Clone)]
pub(crate) struct StatusCell(watch::Sender<Status>);

impl StatusCell {
    pub(crate) fn new(status: Status) -> Self {
        Self(watch::Sender::new(status))
    }

    pub(crate) fn get(&self) -> Status {
        self.0.borrow().clone()
    }

    pub(crate) fn read<T>(&self, look: impl FnOnce(&Status) -> T) -> T {
        look(&self.0.borrow())
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<Status> {
        self.0.subscribe()
    }

    /// Changes it; watchers hear of it only if it did change.
    pub(crate) fn update(&self, change: impl FnOnce(&mut Status)) {
        self.0.send_if_modified(|status| {
            let before = status.clone();
            change(status);
            *status != before
        });
    }
}

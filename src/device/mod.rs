//! The hardware: one trait, four backends.

use std::{collections::BTreeMap, fmt};

use futures::future::BoxFuture;

use crate::domain::{health::HealthReading, notice::Severity, npu::Scan};

/// Why a backend could not do what it was asked. An empty scan is never a substitute for one of these.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// It is not ready yet (library initialising, fewer chips than PCI functions): ask again.
    #[error("{backend} is not ready: {why}")]
    NotReady {
        /// Backend.
        backend: &'static str,
        /// Why, with what is missing.
        why: String,
    },
    /// A child process that hangs in the vendor library cannot be ended (D state): no call is made until it goes.
    #[error("{backend} is hung: {why}")]
    Hung {
        /// Backend.
        backend: &'static str,
        /// What is known of it.
        why: String,
    },
    /// A call failed.
    #[error("{backend}: {call} failed: {why}")]
    Failed {
        /// Backend.
        backend: &'static str,
        /// Which call, with its arguments.
        call: String,
        /// Code or message.
        why: String,
    },
    /// The backend will never work as configured: a library that others can write, a file that is no library.
    #[error("{backend} is refused: {why}")]
    Refused {
        /// Backend.
        backend: &'static str,
        /// Which file and what to do.
        why: String,
    },
}

/// How a backend is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// Backend.
    pub backend: &'static str,
    /// `ready`, `starting`, `failed`, `hung`.
    pub state: &'static str,
    /// Where its data comes from: a library path, a sysfs root; empty if nowhere.
    pub source: String,
    /// How bad the present state is.
    pub severity: Severity,
    /// More, for people; empty if all is well.
    pub detail: String,
}

/// What the engine needs of the hardware. All calls are safe to make at the same time; the backend orders them.
pub trait Backend: Send + Sync + fmt::Debug {
    /// Name: `dcmi`, `sysfs`, `example`, `memory`.
    fn name(&self) -> &'static str;

    /// Reads all chips of the node, from a fresh start of the library if need be.
    fn scan(&self) -> BoxFuture<'_, Result<Scan, Fault>>;

    /// Reads the health of every chip of the last good scan, by physical id. A chip that has gone reads as
    /// [`Level::Gone`](crate::domain::health::Level::Gone).
    fn health(&self) -> BoxFuture<'_, Result<BTreeMap<u32, HealthReading>, Fault>>;

    /// How the backend is, without a vendor call.
    fn status(&self) -> Status;
}

//! A backend for tests: it reads what it is told, and fails as it is told.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use futures::{FutureExt as _, future::BoxFuture};

use super::{Backend, Fault, Status};
use crate::domain::{
    health::{HealthReading, Level},
    notice::Severity,
    npu::Scan,
};

const NAME: &str = "memory";

/// The backend.
#[derive(Debug, Default)]
pub struct Memory {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    scan: Scan,
    health: BTreeMap<u32, HealthReading>,
    fault: Option<Fault>,
    /// Chips of the last good scan; none before it.
    seen: Option<Vec<u32>>,
    scans: u64,
    polls: u64,
}

impl Memory {
    /// A node that reads like this.
    #[must_use]
    pub fn new(scan: Scan) -> Self {
        let memory = Self::default();
        memory.set_scan(scan);
        memory
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the next scan reads. Health is that of the readings, until it is set.
    pub fn set_scan(&self, scan: Scan) {
        let mut state = self.state();
        state.health = scan.chips.iter().map(|chip| (chip.physical_id, chip.health.clone())).collect();
        state.scan = scan;
    }

    /// What the next poll reads of a chip.
    pub fn set_health(&self, physical_id: u32, reading: HealthReading) {
        let mut state = self.state();
        if let Some(chip) = state.scan.chips.iter_mut().find(|chip| chip.physical_id == physical_id) {
            chip.health = reading.clone();
        }
        state.health.insert(physical_id, reading);
    }

    /// The chip falls off the bus: the next poll reads it as gone, the next scan does not have it.
    pub fn drop_chip(&self, physical_id: u32) {
        let mut state = self.state();
        state.scan.chips.retain(|chip| chip.physical_id != physical_id);
        state.health.insert(physical_id, HealthReading::of(Level::Gone));
    }

    /// From now on every call fails like this; `None` ends it.
    pub fn set_fault(&self, fault: Option<Fault>) {
        self.state().fault = fault;
    }

    /// Scans and health polls so far.
    #[must_use]
    pub fn calls(&self) -> (u64, u64) {
        let state = self.state();
        (state.scans, state.polls)
    }
}

impl Backend for Memory {
    fn name(&self) -> &'static str {
        NAME
    }

    fn scan(&self) -> BoxFuture<'_, Result<Scan, Fault>> {
        async move {
            let mut state = self.state();
            state.scans += 1;
            if let Some(fault) = &state.fault {
                return Err(fault.clone());
            }
            state.seen = Some(state.scan.chips.iter().map(|chip| chip.physical_id).collect());
            Ok(state.scan.clone())
        }
        .boxed()
    }

    fn health(&self) -> BoxFuture<'_, Result<BTreeMap<u32, HealthReading>, Fault>> {
        async move {
            let mut state = self.state();
            state.polls += 1;
            if let Some(fault) = &state.fault {
                return Err(fault.clone());
            }
            let Some(seen) = &state.seen else {
                return Err(Fault::NotReady { backend: NAME, why: "no scan yet".to_owned() });
            };
            let read = |id: &u32| (*id, state.health.get(id).cloned().unwrap_or_default());
            Ok(seen.iter().map(read).collect())
        }
        .boxed()
    }

    fn status(&self) -> Status {
        let state = self.state();
        let (name, severity, detail) = match &state.fault {
            None if state.seen.is_none() => ("starting", Severity::Info, "no scan yet".to_owned()),
            None => ("ready", Severity::Info, String::new()),
            Some(fault @ Fault::Hung { .. }) => ("hung", Severity::Error, fault.to_string()),
            Some(fault @ Fault::NotReady { .. }) => ("starting", Severity::Warning, fault.to_string()),
            Some(fault) => ("failed", Severity::Error, fault.to_string()),
        };
        Status { backend: NAME, state: name, source: String::new(), severity, detail }
    }
}

//! Chips by sysfs alone, for nodes without the vendor library.
//!
//! It knows PCI identity, family, NUMA node and physical id; never memory, cores, health or templates.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use futures::{FutureExt as _, future::BoxFuture};
use tracing::{info, warn};

use super::{
    Backend, Fault, Status, pci,
    presence::{self, Presence},
};
use crate::domain::{
    health::{HealthReading, Level},
    notice::Severity,
    npu::{ChipReading, Family, MissingChip, Scan},
};

const NAME: &str = "sysfs";

/// The backend.
#[derive(Debug)]
pub struct Sysfs {
    host_root: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Chips of the last good scan by physical id and what the host showed of them, or why there was none.
    last: Result<(Vec<u32>, Presence), Fault>,
    /// What was on the bus then.
    bus: pci::Bus,
    /// True once a health poll saw chips there that the last scan did not.
    outdated: bool,
    /// Chips that are known to have gone, so that each is said once.
    gone: BTreeMap<u32, presence::Absence>,
    suspended: bool,
}

impl State {
    fn new(suspended: bool) -> Self {
        let why = "no scan yet".to_owned();
        Self {
            last: Err(Fault::NotReady { backend: NAME, why }),
            bus: pci::Bus::default(),
            outdated: false,
            gone: BTreeMap::new(),
            suspended,
        }
    }

    fn working(&self) -> Result<(), Fault> {
        if self.suspended { Err(Fault::Suspended { backend: NAME }) } else { Ok(()) }
    }
}

impl Sysfs {
    /// Reads below this root.
    #[must_use]
    pub fn new(host_root: &Path) -> Self {
        Self { host_root: host_root.to_owned(), state: Mutex::new(State::new(false)) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read(&self) -> Result<Scan, Fault> {
        let directory = self.host_root.join("sys/bus/pci/devices");
        let (bus, functions) = pci::Bus::read(&self.host_root).map_err(|error| Fault::Failed {
            backend: NAME,
            call: format!("reading {}", directory.display()),
            why: error.to_string(),
        })?;
        let mut state = self.state();
        (state.bus, state.outdated) = (bus, false);
        drop(state);
        let mut scan = Scan { dies_bound: true, driver_version: self.driver_version(), ..Scan::default() };
        for function in functions {
            let missing = |why: &str| MissingChip { what: function.address.to_string(), why: why.to_owned() };
            let mut ids = function.physical_ids().into_iter();
            match ids.next() {
                None => scan.missing.push(missing("no ascend driver serves it (no dev_id); load the driver")),
                Some(id) if scan.chips.iter().any(|chip| chip.physical_id == id) => {
                    scan.missing.push(missing(&format!("its physical id {id} is that of another chip")));
                }
                Some(id) => scan.chips.push(self.chip(&function, id)),
            }
            for id in ids {
                scan.missing.push(missing(&format!(
                    "chip {id} cannot be told from the first one of its function without the vendor library"
                )));
            }
        }
        Ok(scan)
    }

    fn chip(&self, function: &pci::Function, physical_id: u32) -> ChipReading {
        let family = function.family();
        // The dies of a 910C card pair as 2k and 2k+1.
        let pair = (family == Family::Ascend910C).then(|| i32::try_from(physical_id / 2).ok()).flatten();
        ChipReading {
            physical_id,
            logic_id: None,
            card_id: pair,
            device_id: i32::from(pair.is_some() && physical_id % 2 == 1),
            bus_id: function.address,
            vdie: None,
            chip_name: String::new(),
            family,
            board_id: None,
            memory: None,
            ai_cores: None,
            numa_node: pci::numa_node(&self.host_root, function.address),
            pcie_root: pci::pcie_root(&self.host_root, function.address),
            health: HealthReading::of(if presence::lacks_node(&self.host_root, physical_id) {
                Level::Gone
            } else {
                Level::Unknown
            }),
        }
    }

    /// `Version=` of the driver's `version.info`; empty if there is none.
    fn driver_version(&self) -> String {
        let prefix = super::install_prefix(&self.host_root);
        let text = pci::read(&prefix.join("driver/version.info")).unwrap_or_default();
        let version = text.lines().find_map(|line| line.trim().strip_prefix("Version="));
        version.unwrap_or_default().trim().chars().filter(|c| !c.is_control()).take(64).collect()
    }
}

impl Backend for Sysfs {
    fn name(&self) -> &'static str {
        NAME
    }

    fn scan(&self) -> BoxFuture<'_, Result<Scan, Fault>> {
        async move {
            self.state().working()?;
            let scan = self.read();
            for chip in scan.iter().flat_map(|scan| &scan.missing) {
                warn!(chip = chip.what, why = chip.why, "a chip is left out");
            }
            let seen = |scan: &Scan| {
                let chips = scan.chips.iter().map(|chip| (chip.physical_id, chip.bus_id));
                (chips.clone().map(|(id, _)| id).collect(), Presence::of(&self.host_root, chips))
            };
            self.state().last = scan.as_ref().map(seen).map_err(Clone::clone);
            scan
        }
        .boxed()
    }

    fn health(&self) -> BoxFuture<'_, Result<BTreeMap<u32, HealthReading>, Fault>> {
        async move {
            let mut state = self.state();
            state.working()?;
            let (chips, presence) = state.last.clone()?;
            if state.bus.has_more(&self.host_root) {
                info!("chips have come to the bus; the cards are read again");
                state.outdated = true;
            }
            let gone: BTreeMap<_, _> = chips.iter().filter_map(|id| Some((*id, presence.absence(*id)?))).collect();
            for (id, absence) in gone.iter().filter(|(id, absence)| state.gone.get(id) != Some(absence)) {
                warn!(physical_id = id, why = %absence, "a chip has gone");
            }
            let level = |id| if gone.contains_key(&id) { Level::Gone } else { Level::Unknown };
            let readings = chips.into_iter().map(|id| (id, HealthReading::of(level(id)))).collect();
            state.gone = gone;
            Ok(readings)
        }
        .boxed()
    }

    fn is_outdated(&self) -> bool {
        self.state().outdated
    }

    fn suspend(&self) -> BoxFuture<'_, Result<(), Fault>> {
        async move {
            *self.state() = State::new(true);
            Ok(())
        }
        .boxed()
    }

    fn resume(&self) -> BoxFuture<'_, Result<(), Fault>> {
        async move {
            *self.state() = State::new(false);
            Ok(())
        }
        .boxed()
    }

    fn status(&self) -> Status {
        let known = self.state();
        let (state, severity, detail) = match (known.working(), &known.last) {
            (Err(fault), _) => ("suspended", Severity::Warning, fault.to_string()),
            (_, Ok(_)) => ("ready", Severity::Info, String::new()),
            (_, Err(fault @ Fault::NotReady { .. })) => ("starting", Severity::Info, fault.to_string()),
            (_, Err(fault)) => ("failed", Severity::Error, fault.to_string()),
        };
        let source = self.host_root.join("sys/bus/pci/devices").display().to_string();
        Status { backend: NAME, state, source, severity, detail }
    }
}

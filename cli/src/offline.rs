//! What root is shown while the daemon is down: the records on disk, read and never changed.

use std::{collections::BTreeMap, path::Path};

use npu_dra::{
    admin::view,
    daemon::settings,
    domain::{inventory::order, names::DeviceName, npu::StableId, record::Phase},
    store::{Loaded, Store},
};

use crate::document::{Claim, ClaimCounts, ClaimName, Device, Status};

/// The present boot; records of another one are told apart by it.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The records on disk.
#[derive(Debug)]
pub(crate) struct Offline {
    loaded: Loaded,
    boot_id: Option<String>,
    /// Name of the driver.
    driver: String,
}

impl Offline {
    /// Reads the records; gives as text why they cannot be read.
    pub(crate) fn read(state_dir: &Path) -> Result<Self, String> {
        let loaded = Store::read_only(state_dir).map_err(|error| error.to_string())?;
        let boot_id = std::fs::read_to_string(BOOT_ID).ok().map(|text| text.trim().to_owned());
        Ok(Self { loaded, boot_id, driver: settings::driver_name(&|name| std::env::var(name).ok()) })
    }

    /// The cards that the node remembers and those that claims hold. Of health and hardware nothing is known.
    pub(crate) fn devices(&self) -> Vec<Device> {
        let mut devices: BTreeMap<(u64, DeviceName), Device> = BTreeMap::new();
        for card in &self.loaded.node.cards {
            let hold = card.hold.as_ref().map(|hold| view::device_hold(hold).into());
            let bus_id = Some(card.bus_id.to_string());
            let device = Device { bus_id, hold, ..unknown(card.name.as_str(), &card.stable_id) };
            devices.insert(order(&card.name), device);
        }
        for record in &self.loaded.records {
            for holding in record.devices.iter().filter(|holding| !holding.admin_access) {
                // A part may be published under a name of its own: its card is what is listed here.
                let card = self.loaded.node.by_stable_id(&holding.stable_id);
                let name = card.map_or_else(|| DeviceName::new(holding.device.clone()), |card| Ok(card.name.clone()));
                let Ok(name) = name else { continue };
                let device =
                    devices.entry(order(&name)).or_insert_with(|| unknown(&holding.device, &holding.stable_id));
                let state = if holding.cut.is_some() { "split" } else { "in-use" };
                state.clone_into(&mut device.state);
                if device.physical_ids.is_empty() {
                    device.physical_ids.clone_from(&holding.physical_ids);
                }
                let claim = ClaimName {
                    namespace: (!record.claim.namespace.is_empty()).then(|| record.claim.namespace.clone()),
                    name: Some(record.claim.name.clone()),
                    uid: record.claim.uid.to_string(),
                };
                if !device.claims.contains(&claim) {
                    device.claims.push(claim);
                }
            }
        }
        devices.into_values().collect()
    }

    /// The claims, by namespace and name.
    pub(crate) fn claims(&self) -> Vec<Claim> {
        let card = |id: &StableId| self.loaded.node.by_stable_id(id).map(|card| card.name.to_string());
        let claim = |record| view::claim(record, &self.driver, self.boot_id.as_deref(), &card);
        let records = self.loaded.records.iter().map(claim);
        let quarantined = self.loaded.quarantined.iter().map(view::quarantined);
        let mut claims: Vec<Claim> = records.chain(quarantined).map(Into::into).collect();
        claims.sort_by(|a, b| (&a.namespace, &a.name, &a.uid).cmp(&(&b.namespace, &b.name, &b.uid)));
        claims
    }

    /// How everything is, as far as the records tell.
    pub(crate) fn status(&self) -> Status {
        let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let in_phase = |phase| count(self.loaded.records.iter().filter(|record| record.phase == phase).count());
        Status {
            daemon: None,
            backend: None,
            kubelet: None,
            cluster: None,
            claims: ClaimCounts {
                preparing: in_phase(Phase::Intent),
                prepared: in_phase(Phase::Prepared),
                releasing: in_phase(Phase::Releasing),
                quarantined: count(self.loaded.quarantined.len()),
            },
            slicing: None,
            attention: Vec::new(),
        }
    }
}

fn unknown(name: &str, stable_id: &StableId) -> Device {
    Device {
        name: name.to_owned(),
        state: "unknown".to_owned(),
        model: None,
        bus_id: None,
        ai_cores: None,
        memory_bytes: None,
        health: None,
        claims: Vec::new(),
        taints: Vec::new(),
        uuid: Some(stable_id.to_string()),
        physical_ids: Vec::new(),
        numa_node: None,
        topology_group: None,
        pcie_root: None,
        driver_version: None,
        reason: None,
        hold: None,
    }
}

//! What the engine knows: cards, health, and who holds what. Synchronous; the lock is never held over an await.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use jiff::Timestamp;
use tokio::sync::watch;

use super::Loaded;
use crate::{
    device::Status,
    domain::{
        claim::{AllocatedClaim, ClaimUid},
        health::{DeviceHealth, Health, HealthReading, Level, codes_text, step},
        inventory::Inventory,
        names::InvalidName,
        node::NodeMemory,
        notice::Notice,
        npu::{Npu, Scan},
        plan::{self, FoundFile, HealthMap, Node, Prepare, Recovery, Step},
        record::{Ledger, Quarantined, Record},
        refusal::Refusal,
        slice::{self, Pool},
    },
};

/// One card as `npuctl` shows it.
#[derive(Debug, Clone)]
pub struct DeviceView {
    /// The card.
    pub npu: Npu,
    /// Its health, if it was read.
    pub health: Option<Health>,
    /// Records of the claims that own it.
    pub owners: Vec<Record>,
}

/// Everything that is known of cards and claims at one moment.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// The node.
    pub node: Node,
    /// How the backend is.
    pub backend: Status,
    /// When the last good scan was made; `None` before the first.
    pub scanned_at: Option<Timestamp>,
    /// True once recovery has ended.
    pub recovered: bool,
    /// Version of the vendor's driver; empty if unknown.
    pub driver_version: String,
    /// Chips that the node has but that could not be read, with the reason.
    pub missing: Vec<String>,
    /// The cards.
    pub devices: Vec<DeviceView>,
    /// The records.
    pub claims: Vec<Record>,
    /// Claims whose records are damaged.
    pub quarantined: Vec<Quarantined>,
}

#[derive(Debug, Default)]
struct Known {
    inventory: Option<Arc<Inventory>>,
    scanned_at: Option<Timestamp>,
    memory: NodeMemory,
    /// True while `memory` is newer than what is on disk.
    unsaved: bool,
    health: HealthMap,
    ledger: Ledger,
}

/// The state, behind its lock.
#[derive(Debug)]
pub(super) struct State {
    node: Node,
    known: Mutex<Known>,
    recovered: watch::Sender<bool>,
    changes: watch::Sender<u64>,
    health: watch::Sender<Arc<Vec<DeviceHealth>>>,
}

/// What a new scan or health poll changed.
#[derive(Debug, Default)]
pub(super) struct Change {
    /// What to say.
    pub(super) notices: Vec<Notice>,
    /// The node's memory, if it must be written.
    pub(super) memory: Option<NodeMemory>,
}

impl State {
    pub(super) fn new(node: Node, loaded: Loaded) -> Self {
        let mut ledger = Ledger::default();
        for record in loaded.records {
            ledger.insert(record);
        }
        for quarantined in loaded.quarantined {
            ledger.quarantine(quarantined);
        }
        let known = Known { memory: loaded.memory, ledger, ..Known::default() };
        Self {
            node,
            known: Mutex::new(known),
            recovered: watch::Sender::new(false),
            changes: watch::Sender::new(0),
            health: watch::Sender::new(Arc::default()),
        }
    }

    /// A panic while the lock was held leaves whole values behind: every change below is one assignment or one entry.
    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn changed(&self, known: &Known) {
        let list = known.health_of_held(&self.node);
        self.health.send_if_modified(|old| {
            let news = **old != list;
            if news {
                *old = Arc::new(list);
            }
            news
        });
        self.changes.send_modify(|count| *count = count.wrapping_add(1));
    }

    pub(super) fn recovered(&self) -> watch::Receiver<bool> {
        self.recovered.subscribe()
    }

    pub(super) fn set_recovered(&self) {
        self.recovered.send_replace(true);
        self.changed(&self.known());
    }

    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    pub(super) fn health_stream(&self) -> watch::Receiver<Arc<Vec<DeviceHealth>>> {
        self.health.subscribe()
    }

    /// Takes in a good scan.
    pub(super) fn scanned(&self, scan: &Scan, now: Timestamp) -> Result<Change, InvalidName> {
        let mut known = self.known();
        let mut memory = known.memory.clone();
        let inventory = Inventory::from_scan(scan, &mut memory)?;
        let mut change = Change::default();
        if let Some(old) = &known.inventory {
            let names = |inventory: &Inventory| -> BTreeSet<_> {
                inventory.npus().iter().map(|npu| npu.name.clone()).collect()
            };
            let (before, after) = (names(old), names(&inventory));
            change.notices.extend(before.difference(&after).map(|device| Notice::Lost { device: device.clone() }));
            change.notices.extend(after.difference(&before).map(|device| Notice::Found { device: device.clone() }));
        }
        let readings: Vec<_> = inventory.npus().iter().map(|npu| (npu.clone(), npu.health())).collect();
        if memory != known.memory {
            known.memory = memory;
            known.unsaved = true;
        }
        change.memory = known.unsaved.then(|| known.memory.clone());
        known.inventory = Some(Arc::new(inventory));
        known.scanned_at = Some(now);
        for (npu, reading) in readings {
            known.read(&npu, reading, now, &mut change.notices);
        }
        self.changed(&known);
        Ok(change)
    }

    /// Takes in a health poll, by physical id.
    pub(super) fn polled(&self, readings: &std::collections::BTreeMap<u32, HealthReading>, now: Timestamp) -> Change {
        let mut known = self.known();
        let mut change = Change { memory: known.unsaved.then(|| known.memory.clone()), ..Change::default() };
        let Some(inventory) = known.inventory.clone() else { return change };
        for npu in inventory.npus() {
            let dies: Vec<_> = npu.dies.iter().filter_map(|die| readings.get(&die.physical_id)).collect();
            if !dies.is_empty() {
                known.read(npu, HealthReading::worst(dies), now, &mut change.notices);
            }
        }
        if !change.notices.is_empty() {
            self.changed(&known);
        }
        change
    }

    /// Notes that the node's memory is on disk.
    pub(super) fn saved(&self, memory: &NodeMemory) {
        let mut known = self.known();
        if known.memory == *memory {
            known.unsaved = false;
        }
    }

    /// True if a card is gone or missing, so that another scan may find it.
    pub(super) fn wants_rescan(&self) -> bool {
        let known = self.known();
        known.inventory.as_ref().is_none_or(|inventory| !inventory.missing.is_empty())
            || known.health.values().any(|health| health.reading.level == Level::Gone)
    }

    /// The pool that should be published; `None` while nothing is known: then nothing is rewritten.
    pub(super) fn pool(&self, taints_kept: bool) -> Option<Pool> {
        let known = self.known();
        let inventory = known.inventory.as_ref()?;
        let pool = slice::wanted(&self.node.driver, &self.node.pool, inventory, &known.health);
        let held = |name: &str| {
            inventory.by_name(name).is_some_and(|npu| known.ledger.owners(&npu.stable_id).next().is_some())
        };
        Some(if taints_kept { pool } else { slice::without_idle_tainted(pool, held) })
    }

    /// Plans a prepare and, if it can be, reserves its devices. Gives also the record that was there before.
    pub(super) fn reserve(&self, claim: &AllocatedClaim, now: Timestamp) -> Result<(Prepare, Option<Record>), Refusal> {
        let mut known = self.known();
        let Some(inventory) = known.inventory.clone() else {
            return Err(Refusal::NotScanned("no scan has succeeded".to_owned()));
        };
        let prepare = plan::prepare(&self.node, claim, &inventory, &known.health, &known.ledger, now)?;
        let before = known.ledger.get(&claim.claim.uid).cloned();
        if before.as_ref() != Some(&prepare.record) {
            known.ledger.insert(prepare.record.clone());
            self.changed(&known);
        }
        Ok((prepare, before))
    }

    /// Takes a reservation back after its steps were undone.
    pub(super) fn unreserve(&self, uid: &ClaimUid, before: Option<Record>) {
        let mut known = self.known();
        known.ledger.remove(uid);
        if let Some(before) = before {
            known.ledger.insert(before);
        }
        self.changed(&known);
    }

    /// Plans an unprepare; `file` tells whether the claim has a CDI file.
    pub(super) fn release(&self, uid: &ClaimUid, file: bool, force: bool) -> Result<Vec<Step>, Refusal> {
        if force { Ok(plan::release(uid)) } else { plan::unprepare(uid, &self.known().ledger, file) }
    }

    /// True if the claim's record is damaged.
    pub(super) fn is_quarantined(&self, uid: &ClaimUid) -> bool {
        self.known().ledger.quarantined(uid).is_some()
    }

    /// Forgets a claim whose steps are done; gives its record if it had one.
    pub(super) fn released(&self, uid: &ClaimUid) -> Option<Record> {
        let mut known = self.known();
        let record = known.ledger.remove(uid);
        known.ledger.unquarantine(uid);
        self.changed(&known);
        record
    }

    /// Plans the recovery after the first scan.
    pub(super) fn recovery(&self, files: &[FoundFile], now: Timestamp) -> Recovery {
        let known = self.known();
        match &known.inventory {
            Some(inventory) => plan::recover(&self.node, &known.ledger, inventory, files, now),
            None => Recovery::default(),
        }
    }

    /// True if a planned recovery step still holds: the claim may have been unprepared meanwhile.
    pub(super) fn still_holds(&self, step: &Step) -> bool {
        let known = self.known();
        match step {
            Step::Inject(injection) => {
                known.ledger.get(&injection.claim.uid).is_some_and(|record| plan::injection(record) == *injection)
            }
            Step::Write(record) => known.ledger.quarantined(&record.claim.uid).is_some(),
            Step::Withdraw(uid) | Step::Forget(uid) => known.ledger.get(uid).is_none(),
        }
    }

    /// Enters a record that recovery rebuilt.
    pub(super) fn rebuilt(&self, record: Record) {
        let mut known = self.known();
        known.ledger.insert(record);
        self.changed(&known);
    }

    pub(super) fn snapshot(&self, backend: Status) -> Snapshot {
        let known = self.known();
        let npus = known.inventory.as_ref().map(|inventory| inventory.npus()).unwrap_or_default();
        let devices = npus
            .iter()
            .map(|npu| DeviceView {
                npu: npu.clone(),
                health: known.health.get(&npu.stable_id).cloned(),
                owners: known.ledger.owners(&npu.stable_id).cloned().collect(),
            })
            .collect();
        let missing = known.inventory.as_ref().map(|inventory| &inventory.missing[..]).unwrap_or_default();
        Snapshot {
            node: self.node.clone(),
            backend,
            scanned_at: known.scanned_at,
            recovered: *self.recovered.borrow(),
            driver_version: known
                .inventory
                .as_ref()
                .map(|inventory| inventory.driver_version.clone())
                .unwrap_or_default(),
            missing: missing.iter().map(|chip| format!("{}: {}", chip.what, chip.why)).collect(),
            devices,
            claims: known.ledger.records().cloned().collect(),
            quarantined: known.ledger.all_quarantined().cloned().collect(),
        }
    }
}

impl Known {
    /// One card's new reading.
    fn read(&mut self, npu: &Npu, reading: HealthReading, now: Timestamp, notices: &mut Vec<Notice>) {
        let old = self.health.get(&npu.stable_id);
        let from = old.map(|old| old.reading.level);
        let (new, news) = step(old, reading, now);
        if news {
            let (to, codes) = (new.reading.level, new.reading.codes.clone());
            notices.push(Notice::Health { device: npu.name.clone(), from, to, codes });
        }
        self.health.insert(npu.stable_id.clone(), new);
    }

    /// Health of the devices that live claims hold or look at, each once.
    fn health_of_held(&self, node: &Node) -> Vec<DeviceHealth> {
        let Some(inventory) = &self.inventory else { return Vec::new() };
        let mut list = Vec::new();
        for npu in inventory.npus() {
            if self.ledger.owners(&npu.stable_id).next().is_none() {
                continue;
            }
            if let Some(health) = self.health.get(&npu.stable_id) {
                let codes = codes_text(&health.reading.codes);
                let level = health.reading.level;
                let message = match (level, codes.is_empty()) {
                    (Level::Ok, true) => String::new(),
                    (level, true) => format!("health {level}"),
                    (level, false) => format!("health {level}, codes {codes}"),
                };
                list.push(DeviceHealth {
                    pool: node.pool.to_string(),
                    device: npu.name.to_string(),
                    level,
                    since: health.since,
                    message,
                });
            }
        }
        list
    }
}

//! What the engine knows: cards, health, and who holds what. Synchronous; the lock is never held over an await.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use jiff::Timestamp;
use tokio::sync::watch;

use super::Loaded;
use crate::{
    device::Status,
    domain::{
        claim::{AllocatedClaim, ClaimRef, ClaimUid},
        health::{Condition, DeviceHealth, Health, HealthReading, Policy, Report},
        inventory::Inventory,
        model::Model,
        names::{DeviceName, InvalidName},
        node::{Hold, Lost, NodeMemory, Suspension},
        notice::{Notice, Severity},
        npu::{Npu, Scan, StableId},
        plan::{self, FoundFile, HealthMap, Node, Prepare, Readings, Recovery, Release, Step, World},
        record::{Ledger, Quarantined, Record},
        refusal::Refusal,
        slice::{self, Offer, Pool},
        vnpu::{CardReading, VnpuReading},
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
    /// Its last reading, if it can be cut.
    pub reading: Option<CardReading>,
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
    /// Why the node may remember less than it once did.
    pub problem: Option<String>,
    /// The cards.
    pub devices: Vec<DeviceView>,
    /// Cards that were lost since the host booted and are neither back nor replaced, as they were last seen.
    pub lost: Vec<DeviceView>,
    /// The records.
    pub claims: Vec<Record>,
    /// Claims whose records are damaged.
    pub quarantined: Vec<Quarantined>,
    /// Slicing model.
    pub model: Model,
    /// Why it is no better model; empty if it is the best.
    pub slicing: String,
    /// Why cards take no new claims, by name; also names of the static layout that no card has.
    pub closed: BTreeMap<String, String>,
    /// Cards that an operator keeps claims from, those that are not found too.
    pub holds: BTreeMap<StableId, Hold>,
    /// How long a card must be quiet before a fault of it is over.
    pub quiet: Duration,
}

#[derive(Debug, Default)]
struct Known {
    inventory: Option<Arc<Inventory>>,
    scanned_at: Option<Timestamp>,
    memory: NodeMemory,
    /// Why that may be less than was once remembered.
    problem: Option<String>,
    /// True while `memory` is newer than what is on disk.
    unsaved: bool,
    health: HealthMap,
    /// How health is judged.
    policy: Policy,
    ledger: Ledger,
    offer: Offer,
    /// The last readings of cards that can be cut.
    readings: Readings,
    /// vNPUs of ours that were found destroyed, so that it is said once.
    lost: BTreeSet<u32>,
    /// True once the vendor's replay of vNPUs after the boot has ended.
    replayed: bool,
    /// True once recovery has looked at every CDI file.
    tidy: bool,
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
    /// True if the node's memory has cards that it did not have before.
    pub(super) named: bool,
}

impl State {
    pub(super) fn new(node: Node, loaded: Loaded, policy: Policy, now: Timestamp) -> Self {
        let mut ledger = Ledger::default();
        for record in loaded.records {
            ledger.insert(record);
        }
        for quarantined in loaded.quarantined {
            ledger.quarantine(quarantined);
        }
        let mut memory = loaded.memory;
        let unsaved = !memory.lost.is_empty() && memory.lost.boot_id != node.boot_id;
        if unsaved {
            memory.lost = Lost::default();
        }
        let told = memory.cards.iter().filter_map(|card| {
            let is_lost = memory.lost.npus.iter().any(|npu| npu.stable_id == card.stable_id);
            let health = if is_lost {
                Health::remembered_lost(&card.faults, card.link, now)
            } else if card.faults.is_empty() && card.link.is_none() {
                return None;
            } else {
                Health::remembered(&card.faults, card.link, now)
            };
            Some((card.stable_id.clone(), health))
        });
        let health = told.collect();
        let why = "the API server has not said yet what it keeps".to_owned();
        let offer = Offer { chosen: false, why, holds: memory.holds(), ..Offer::default() };
        let problem = loaded.problem;
        let mut known = Known { memory, problem, unsaved, health, policy, ledger, offer, ..Known::default() };
        if let Some(suspension) = &known.memory.suspended {
            known.offer.suspended = Some(suspension.why());
            known.offer.model = suspension.model;
            known.offer.why.clear();
            known.inventory = suspension.inventory.clone().map(Arc::new);
        }
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

    /// Notes that CDI files agree with the records too.
    pub(super) fn set_tidy(&self) {
        let mut known = self.known();
        known.tidy = true;
        self.changed(&known);
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
        let mut reports: Vec<_> =
            inventory.npus().iter().map(|npu| (npu.clone(), Report::Read(npu.health()))).collect();
        if let Some(old) = &known.inventory {
            let is_in = |npu: &Npu, inventory: &Inventory| inventory.by_stable_id(&npu.stable_id).is_some();
            let lost = old.npus().iter().filter(|npu| !is_in(npu, &inventory));
            change.notices.extend(lost.map(|npu| Notice::Lost { device: npu.name.clone() }));
            let found = inventory.npus().iter().filter(|npu| !is_in(npu, old));
            change.notices.extend(found.map(|npu| Notice::Found { device: npu.name.clone() }));
        }
        change.named = memory != known.memory;
        let is_held = |card: &StableId| known.ledger.owners(card).next().is_some();
        memory.note_lost(&self.node.boot_id, known.inventory.as_deref(), &inventory, is_held);
        reports.extend(memory.lost.npus.iter().map(|npu| (npu.clone(), Report::Lost)));
        if memory != known.memory {
            known.memory = memory;
            known.unsaved = true;
        }
        // A card whose place another has taken is waited for no longer.
        let awaited: BTreeSet<_> = reports.iter().map(|(npu, _)| npu.stable_id.clone()).collect();
        known.health.retain(|card, health| health.condition != Condition::Lost || awaited.contains(card));
        known.inventory = Some(Arc::new(inventory));
        known.scanned_at = Some(now);
        known.report(reports, now, &mut change);
        self.changed(&known);
        Ok(change)
    }

    /// Takes in a health poll, by physical id; `None` if nobody answered it.
    pub(super) fn polled(&self, readings: Option<&BTreeMap<u32, HealthReading>>, now: Timestamp) -> Change {
        let mut known = self.known();
        let mut change = Change::default();
        let inventory = known.inventory.clone().unwrap_or_default();
        let report = |npu: &Npu| {
            let of_die = |id| readings.and_then(|readings| readings.get(&id));
            let dies: Vec<_> = npu.physical_ids().into_iter().filter_map(of_die).collect();
            if dies.is_empty() { Report::Missed } else { Report::Read(HealthReading::worst(dies)) }
        };
        let reports: Vec<_> = inventory.npus().iter().map(|npu| (npu.clone(), report(npu))).collect();
        if known.report(reports, now, &mut change) {
            self.changed(&known);
        }
        change
    }

    /// Takes in what the hardware said unasked, by physical id. Gives also whether all chips are known.
    pub(super) fn alarmed(&self, alarms: &[(u32, Report)], now: Timestamp) -> (Change, bool) {
        let mut known = self.known();
        let mut change = Change::default();
        let inventory = known.inventory.clone().unwrap_or_default();
        let card = |id: &u32| inventory.npus().iter().find(|npu| npu.physical_ids().contains(id));
        let reports: Vec<_> =
            alarms.iter().filter_map(|(id, report)| Some((card(id)?.clone(), report.clone()))).collect();
        let all = reports.len() == alarms.len();
        if known.report(reports, now, &mut change) {
            self.changed(&known);
        }
        (change, all)
    }

    /// Health of every card of the last scan and of those that are lost, by name.
    pub(super) fn health_of_all(&self) -> Vec<(DeviceName, Health)> {
        let known = self.known();
        let npus = known.inventory.as_ref().map(|inventory| inventory.npus()).unwrap_or_default();
        let npus = npus.iter().chain(&known.memory.lost.npus);
        npus.filter_map(|npu| Some((npu.name.clone(), known.health.get(&npu.stable_id)?.clone()))).collect()
    }

    /// Judges health by another policy from the next report on.
    pub(super) fn set_policy(&self, policy: Policy) {
        self.known().policy = policy;
    }

    /// Puts an operator's hand on a card, or takes it away; gives the claims that live on it. A lost card can be held too.
    pub(super) fn hold(&self, device: &str, hold: Option<Hold>) -> Result<(Change, Vec<ClaimRef>), Refusal> {
        let mut known = self.known();
        let no_such = || Refusal::NoSuch(format!("device {device}"));
        let card = known.memory.cards.iter_mut().find(|card| card.name.as_str() == device).ok_or_else(no_such)?;
        let same = |old: &Hold, new: &Hold| old.kind == new.kind && old.reason == new.reason;
        let is_news = match (&card.hold, &hold) {
            (Some(old), Some(new)) => !same(old, new),
            (old, new) => old.is_some() != new.is_some(),
        };
        let (name, id) = (card.name.clone(), card.stable_id.clone());
        if is_news {
            card.hold.clone_from(&hold);
            known.unsaved = true;
            known.offer.holds = known.memory.holds();
        }
        let claims: Vec<_> = known.ledger.owners(&id).map(|record| record.claim.clone()).collect();
        let mut change = Change::default();
        if is_news {
            change.notices.push(Notice::OnHold { device: name, hold, claims: claims.clone() });
            self.changed(&known);
        }
        Ok((change, claims))
    }

    /// Closes all cards and remembers them as they are, or takes a new reason for that; false if nothing is new.
    pub(super) fn suspend(&self, reason: &str, now: Timestamp) -> bool {
        let mut known = self.known();
        let suspension = match &known.memory.suspended {
            Some(former) if former.reason == reason => return false,
            // What was known then stays: the cards cannot be read now.
            Some(former) => Suspension { reason: reason.to_owned(), ..(**former).clone() },
            None => {
                let inventory = known.inventory.as_deref().cloned();
                Suspension { since: now, reason: reason.to_owned(), inventory, model: known.offer.model }
            }
        };
        self.set_suspension(&mut known, Some(Box::new(suspension)));
        true
    }

    /// What an operator's suspension is, if there is one.
    pub(super) fn suspension(&self) -> Option<Box<Suspension>> {
        self.known().memory.suspended.clone()
    }

    /// Puts back what [`suspension`](Self::suspension) gave.
    pub(super) fn restore_suspension(&self, former: Option<Box<Suspension>>) {
        self.set_suspension(&mut self.known(), former);
    }

    fn set_suspension(&self, known: &mut Known, suspension: Option<Box<Suspension>>) {
        known.offer.suspended = suspension.as_deref().map(Suspension::why);
        known.memory.suspended = suspension;
        known.unsaved = true;
        self.changed(known);
    }

    /// Opens the cards again; gives what was remembered.
    pub(super) fn resume(&self) -> Option<Box<Suspension>> {
        let mut known = self.known();
        let suspension = known.memory.suspended.take()?;
        known.offer.suspended = None;
        known.unsaved = true;
        self.changed(&known);
        Some(suspension)
    }

    /// True once the slicing model is known.
    pub(super) fn is_chosen(&self) -> bool {
        self.known().offer.chosen
    }

    /// True while an operator has taken the vendor's software from us.
    pub(super) fn is_suspended(&self) -> bool {
        self.known().memory.suspended.is_some()
    }

    /// True if the node's memory must be written.
    pub(super) fn is_unsaved(&self) -> bool {
        self.known().unsaved
    }

    /// The node's memory, if it must be written.
    pub(super) fn unsaved(&self) -> Option<NodeMemory> {
        let known = self.known();
        known.unsaved.then(|| known.memory.clone())
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
            || !known.memory.lost.is_empty()
            || known.health.values().any(|health| health.condition == Condition::Lost)
    }

    /// The pool that should be published; `None` while nothing is known: then nothing is rewritten.
    pub(super) fn pool(&self, taints_kept: bool) -> Option<Pool> {
        let known = self.known();
        let inventory = known.shown()?;
        let pool = slice::wanted(&self.node.driver, &self.node.pool, &inventory, &known.health, &known.offer);
        let held = |card: &str| {
            inventory.by_name(card).is_some_and(|npu| known.ledger.owners(&npu.stable_id).next().is_some())
        };
        Some(if taints_kept { pool } else { slice::without_idle_tainted(pool, held) })
    }

    /// How the cards are offered.
    pub(super) fn offer(&self) -> Offer {
        self.known().offer.clone()
    }

    /// What of the static layout cannot be had, by card name.
    pub(super) fn misfits(&self) -> BTreeMap<String, String> {
        self.known().misfits()
    }

    /// Changes how the cards are offered; what closes cards is not touched.
    pub(super) fn set_offer(&self, offer: Offer) {
        let mut known = self.known();
        let (closed, holds) = (std::mem::take(&mut known.offer.closed), std::mem::take(&mut known.offer.holds));
        let suspended = known.offer.suspended.take();
        known.offer = Offer { closed, holds, suspended, ..offer };
        self.changed(&known);
    }

    /// Records of claims that hold vNPUs or shares: they tie the node to its slicing model.
    pub(super) fn has_parts(&self) -> bool {
        let known = self.known();
        known
            .ledger
            .records()
            .flat_map(|record| &record.devices)
            .any(|holding| holding.cut.is_some() || holding.share_id.is_some())
    }

    /// True if a claim owns the card of that name, or a part of it.
    pub(super) fn is_held(&self, card: &str) -> bool {
        let known = self.known();
        let npu = known.inventory.as_ref().and_then(|inventory| inventory.by_name(card));
        npu.is_some_and(|npu| known.ledger.owners(&npu.stable_id).next().is_some())
    }

    /// Cards that can be cut, or hold vNPUs of ours, by physical id.
    pub(super) fn cuttable(&self) -> Vec<(StableId, u32)> {
        let known = self.known();
        let npus = known.inventory.as_ref().map(|inventory| inventory.npus()).unwrap_or_default();
        let cuttable = |npu: &&Npu| slice::sliceable(npu).is_ok() || !known.ledger.cut_ids(&npu.stable_id).is_empty();
        npus.iter().filter(cuttable).map(|npu| (npu.stable_id.clone(), npu.physical_id())).collect()
    }

    /// Takes in a card's reading: closes or opens it, and says what is new.
    pub(super) fn read_card(&self, card: &StableId, reading: CardReading) -> Change {
        let mut known = self.known();
        let mut change = Change::default();
        let Some(inventory) = known.inventory.clone() else { return change };
        let Some(npu) = inventory.by_stable_id(card) else { return change };
        for (claim, id) in plan::lost(npu, &reading, &self.node, &known.ledger) {
            if known.lost.insert(id) {
                change.notices.push(Notice::VnpuLost { claim, device: npu.name.clone(), id });
            }
        }
        known.lost.retain(|id| reading.vnpu(*id).is_none());
        let closed = plan::closed(npu, &reading, &self.node, &known.ledger);
        if closed.as_ref() != known.offer.closed.get(card) {
            change.notices.push(Notice::Closed { device: npu.name.clone(), why: closed.clone() });
            match closed {
                Some(why) => known.offer.closed.insert(card.clone(), why),
                None => known.offer.closed.remove(card),
            };
        }
        let news = known.readings.insert(card.clone(), reading.clone()) != Some(reading);
        if news || !change.notices.is_empty() {
            self.changed(&known);
        }
        change
    }

    /// True if a vNPU is on the node that no record names.
    pub(super) fn has_unowned_vnpu(&self) -> bool {
        let known = self.known();
        known.readings.iter().any(|(card, reading)| {
            let named = known.ledger.cut_ids(card);
            reading.vnpus.iter().any(|vnpu| !named.contains(&vnpu.id))
        })
    }

    /// True if any vNPU is on the node.
    pub(super) fn has_vnpu(&self) -> bool {
        self.known().readings.values().any(|reading| !reading.vnpus.is_empty())
    }

    /// Ids that vNPUs of other claims have on a card since this boot. What a record of an earlier boot names was gone
    /// then, and is made anew under a record of this one.
    pub(super) fn named(&self, card: &StableId, but: &ClaimUid) -> BTreeSet<u32> {
        plan::named_by_others(&self.known().ledger, &self.node, card, but)
    }

    /// Cards that must be read before a claim can be planned, by physical id.
    pub(super) fn cards_to_read(&self, claim: &AllocatedClaim) -> BTreeMap<StableId, u32> {
        let known = self.known();
        match &known.inventory {
            Some(inventory) => {
                plan::cards_to_read(known.world(&self.node, inventory, &Readings::new(), Timestamp::UNIX_EPOCH), claim)
            }
            None => BTreeMap::new(),
        }
    }

    /// The last reading of every card of the last good scan, by name.
    pub(super) fn readings(&self) -> Vec<(String, HealthReading)> {
        let known = self.known();
        let npus = known.inventory.as_ref().map(|inventory| inventory.npus()).unwrap_or_default();
        let reading = |npu: &Npu| Some((npu.name.to_string(), known.health.get(&npu.stable_id)?.reading.clone()));
        npus.iter().filter_map(reading).collect()
    }

    pub(super) fn is_scanned(&self) -> bool {
        self.known().inventory.is_some()
    }

    pub(super) fn is_replayed(&self) -> bool {
        self.known().replayed
    }

    pub(super) fn set_replayed(&self) {
        self.known().replayed = true;
    }

    /// Identity and physical id of a card, by its name.
    pub(super) fn card_of(&self, device: &str) -> Option<(StableId, u32)> {
        let known = self.known();
        let npu = known.inventory.as_ref()?.by_name(device)?;
        Some((npu.stable_id.clone(), npu.physical_id()))
    }

    /// The card that was last found under a physical id, if it is another than this one.
    pub(super) fn other_card(&self, card: &StableId, physical_id: u32) -> Option<StableId> {
        let known = self.known();
        let npu = known.inventory.as_ref()?.npus().iter().find(|npu| npu.physical_ids().contains(&physical_id))?;
        (npu.stable_id != *card).then(|| npu.stable_id.clone())
    }

    /// Identity and physical id of the card that a vNPU's id belongs to.
    pub(super) fn card_of_vnpu(&self, id: u32) -> Option<(StableId, u32)> {
        let known = self.known();
        let chip = plan::chip_of(id);
        let npu = known.inventory.as_ref()?.npus().iter().find(|npu| npu.physical_ids().contains(&chip))?;
        Some((npu.stable_id.clone(), chip))
    }

    /// Plans by everything that is known, and these readings.
    pub(super) fn plan<T>(
        &self,
        readings: &Readings,
        plan: impl FnOnce(World<'_>) -> Result<T, Refusal>,
    ) -> Result<T, Refusal> {
        let known = self.known();
        let inventory =
            known.inventory.as_ref().ok_or_else(|| Refusal::NotScanned("no scan has succeeded".to_owned()))?;
        plan(known.world(&self.node, inventory, readings, Timestamp::UNIX_EPOCH))
    }

    /// What follows when the vNPUs of an intent are made.
    pub(super) fn made(&self, intent: &Record, read: &[(usize, VnpuReading)]) -> Result<(Record, Vec<Step>), Refusal> {
        plan::made(&self.known().ledger, intent, read)
    }

    /// Plans an operator's vNPU and closes its card at once, so that no claim gets the card while it is made.
    pub(super) fn close_for_operator(
        &self,
        card: &StableId,
        readings: &Readings,
        device: &str,
        template: &str,
    ) -> Result<(u32, u32), Refusal> {
        let mut known = self.known();
        let inventory = known.inventory.clone();
        let inventory = inventory.ok_or_else(|| Refusal::NotScanned("no scan has succeeded".to_owned()))?;
        let world = known.world(&self.node, &inventory, readings, Timestamp::UNIX_EPOCH);
        let order = plan::operator_create(world, device, template)?;
        known.offer.closed.entry(card.clone()).or_insert_with(|| "an operator cuts it".to_owned());
        self.changed(&known);
        Ok(order)
    }

    /// Notes a vNPU that was made just now; how much of its card is left is not known until that is read again.
    pub(super) fn note_made(&self, card: &StableId, vnpu: &VnpuReading) {
        self.note(card, vnpu.id, Some(vnpu));
    }

    /// Notes that a vNPU is gone.
    pub(super) fn note_gone(&self, card: &StableId, id: u32) {
        self.note(card, id, None);
    }

    fn note(&self, card: &StableId, id: u32, vnpu: Option<&VnpuReading>) {
        let mut known = self.known();
        if let Some(reading) = known.readings.get_mut(card) {
            reading.vnpus.retain(|other| other.id != id);
            reading.vnpus.extend(vnpu.cloned());
            reading.free = None;
        }
        self.changed(&known);
    }

    /// Enters a record as it is on disk now.
    pub(super) fn enter(&self, record: Record) {
        let mut known = self.known();
        known.ledger.insert(record);
        self.changed(&known);
    }

    /// The record of a claim.
    pub(super) fn record(&self, uid: &ClaimUid) -> Option<Record> {
        self.known().ledger.get(uid).cloned()
    }

    /// Plans a prepare and, if it can be, reserves its devices. Gives also the record that was there before.
    pub(super) fn reserve(
        &self,
        claim: &AllocatedClaim,
        readings: &Readings,
        now: Timestamp,
    ) -> Result<(Prepare, Option<Record>), Refusal> {
        let mut known = self.known();
        let Some(inventory) = known.inventory.clone() else {
            return Err(Refusal::NotScanned("no scan has succeeded".to_owned()));
        };
        let prepare = plan::prepare(known.world(&self.node, &inventory, readings, now), claim)?;
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

    /// Plans an unprepare; `traces` tells whether a damaged record may stand for anything.
    pub(super) fn release(&self, uid: &ClaimUid, traces: bool, force: bool) -> Result<Release, Refusal> {
        let known = self.known();
        if force { Ok(plan::release(uid, &known.ledger)) } else { plan::unprepare(uid, &known.ledger, traces) }
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
            Some(inventory) => plan::recover(known.world(&self.node, inventory, &known.readings, now), files),
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
            Step::Write(record) => {
                let uid = &record.claim.uid;
                known.ledger.quarantined(uid).is_some() || known.ledger.get(uid) == Some(&**record)
            }
            Step::Withdraw(uid) | Step::Forget(uid) => known.ledger.get(uid).is_none(),
        }
    }

    pub(super) fn snapshot(&self, mut backend: Status) -> Snapshot {
        let known = self.known();
        if let Some(suspension) = &known.memory.suspended {
            // A process that does not end is still said.
            if backend.state != "hung" {
                (backend.state, backend.severity) = ("suspended", Severity::Warning);
                backend.detail = format!("{}; npuctl backend resume ends that", suspension.why());
            }
        }
        let npus = known.inventory.as_ref().map(|inventory| inventory.npus()).unwrap_or_default();
        let view = |npu: &Npu| DeviceView {
            npu: npu.clone(),
            health: known.health.get(&npu.stable_id).cloned(),
            owners: known.ledger.owners(&npu.stable_id).cloned().collect(),
            reading: known.readings.get(&npu.stable_id).cloned(),
        };
        let missing = known.inventory.as_ref().map(|inventory| &inventory.missing[..]).unwrap_or_default();
        Snapshot {
            node: self.node.clone(),
            backend,
            scanned_at: known.scanned_at,
            recovered: known.tidy,
            driver_version: known
                .inventory
                .as_ref()
                .map(|inventory| inventory.driver_version.clone())
                .unwrap_or_default(),
            problem: known.problem.clone(),
            missing: missing.iter().map(|chip| format!("{}: {}", chip.what, chip.why)).collect(),
            devices: npus.iter().map(view).collect(),
            lost: known.memory.lost.npus.iter().map(view).collect(),
            claims: known.ledger.records().cloned().collect(),
            quarantined: known.ledger.all_quarantined().cloned().collect(),
            model: known.offer.model,
            slicing: known.offer.why.clone(),
            closed: known
                .misfits()
                .into_iter()
                .chain(npus.iter().filter_map(|npu| Some((npu.name.to_string(), known.offer.closed(npu)?))))
                .collect(),
            holds: known.offer.holds.clone(),
            quiet: known.policy.quiet,
        }
    }
}

impl Known {
    /// What of the static layout cannot be had; that a card is lost is told elsewhere.
    fn misfits(&self) -> BTreeMap<String, String> {
        let mut misfits = self.inventory.as_ref().map(|inventory| self.offer.misfits(inventory)).unwrap_or_default();
        misfits.retain(|card, _| self.memory.lost.npus.iter().all(|npu| npu.name.as_str() != card));
        misfits
    }

    fn world<'a>(
        &'a self,
        node: &'a Node,
        inventory: &'a Inventory,
        readings: &'a Readings,
        now: Timestamp,
    ) -> World<'a> {
        let Self { offer, health, ledger, .. } = self;
        World { node, offer, inventory, health, ledger, readings, now }
    }

    /// Takes in what was reported of cards; true if anything that is shown changed.
    fn report(&mut self, reports: Vec<(Npu, Report)>, now: Timestamp, change: &mut Change) -> bool {
        let mut before: BTreeMap<StableId, (DeviceName, Option<Health>)> = BTreeMap::new();
        for (npu, report) in reports {
            let old = self.health.get(&npu.stable_id);
            let new = Health::step(old, &report, &self.policy, now);
            before.entry(npu.stable_id.clone()).or_insert_with(|| (npu.name, old.cloned()));
            self.health.insert(npu.stable_id, new);
        }
        let mut seen = false;
        for (card, (device, old)) in before {
            let Some(new) = self.health.get(&card) else { continue };
            seen |= old.as_ref() != Some(new);
            if let Some(entry) = self.memory.cards.iter_mut().find(|entry| entry.stable_id == card)
                && (entry.faults != new.memory() || entry.link != new.link)
            {
                entry.faults = new.memory();
                entry.link = new.link;
                self.unsaved = true;
            }
            if new.is_news(old.as_ref()) {
                change.notices.push(Notice::Health {
                    device,
                    from: old.map(|old| old.condition),
                    to: new.condition,
                    codes: new.codes(),
                    why: new.text(),
                    claims: self.ledger.owners(&card).map(|record| record.claim.clone()).collect(),
                });
            }
        }
        seen
    }

    /// The cards that are shown to the cluster: those that are there, and the lost ones on which claims live, so that
    /// what became of these is told.
    fn shown(&self) -> Option<Cow<'_, Inventory>> {
        let inventory = self.inventory.as_deref()?;
        let is_held = |npu: &&Npu| self.ledger.owners(&npu.stable_id).next().is_some();
        let mut lost = self.memory.lost.npus.iter().filter(is_held).cloned().peekable();
        Some(if lost.peek().is_some() { Cow::Owned(inventory.with(lost)) } else { Cow::Borrowed(inventory) })
    }

    /// Health of the devices that live claims hold or look at, each once.
    fn health_of_held(&self, node: &Node) -> Vec<DeviceHealth> {
        let Some(inventory) = self.shown() else { return Vec::new() };
        let mut list = Vec::new();
        for npu in inventory.npus() {
            if self.ledger.owners(&npu.stable_id).next().is_none() {
                continue;
            }
            if let Some(health) = self.health.get(&npu.stable_id) {
                list.push(DeviceHealth {
                    pool: node.pool.to_string(),
                    device: npu.name.to_string(),
                    condition: health.condition,
                    since: health.since,
                    message: health.text(),
                });
            }
        }
        list
    }
}

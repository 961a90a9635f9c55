//! What to do for a claim: prepare, unprepare, recover. Each gives ordered steps or a typed refusal.
//!
//! A plan's steps are done in order, and durable together: before a vendor's call, and before the answer. Whatever a
//! crash of the process leaves of them, or a power cut, which may undo them in any order until then, is a state from
//! which [`recover`], or the same call again, goes on. A step that fails is answered by undoing those before it, last
//! first ([`Step::undo`]).
//!
//! ```text
//! prepare, whole NPU:  Write(record) → Inject(CDI file) → answer
//! prepare, vNPU:       Write(intent, with its id) → create → read back → Write(record) → Inject → answer
//! unprepare:           Withdraw(CDI file) → Forget(record) → answer
//! unprepare, vNPU:     Write(releasing) → Withdraw → destroy → Forget → answer
//! ```
//!
//! The record comes first and goes last, so a CDI file that no record owns is never one of a live claim, and a vNPU
//! that no record names is never one of ours.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;

use super::{
    claim::{AllocatedClaim, AllocatedDevice, ClaimRef, ClaimUid, PreparedDevice, RESULTS_MAX},
    config,
    health::Health,
    inventory::Inventory,
    model::Model,
    names::{DriverName, PoolName},
    npu::{MIB, Npu, StableId},
    quantity::Quantity,
    record::{Cut, Holding, Ledger, Phase, Record, names},
    refusal::Refusal,
    slice::{self, MEMORY, Offer},
    vnpu::{self, CardReading, Sliceable, Template, VnpuReading},
};

/// What never changes while the daemon runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Our driver name.
    pub driver: DriverName,
    /// Our pool.
    pub pool: PoolName,
    /// The present boot.
    pub boot_id: String,
}

/// Health by card.
pub type HealthMap = BTreeMap<StableId, Health>;
/// Cards that were read just now, by identity.
pub type Readings = BTreeMap<StableId, CardReading>;

/// Everything that a plan goes by.
#[derive(Debug, Clone, Copy)]
pub struct World<'a> {
    /// The node.
    pub node: &'a Node,
    /// How its cards are offered.
    pub offer: &'a Offer,
    /// The last good scan.
    pub inventory: &'a Inventory,
    /// Health.
    pub health: &'a HealthMap,
    /// Who holds what.
    pub ledger: &'a Ledger,
    /// Cards that the claim cuts, as [`cards_to_read`] names them; read under the card's lock.
    pub readings: &'a Readings,
    /// The present time.
    pub now: Timestamp,
}

/// What a claim's CDI file is to hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Injection {
    /// Which claim.
    pub claim: ClaimRef,
    /// Its devices; never empty.
    pub devices: Vec<InjectedDevice>,
}

/// One device of a CDI file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InjectedDevice {
    /// Name: `<uid>_<stable id>`, with `_v<id>` behind it for a vNPU; `<uid>_look_<stable id>` for adminAccess.
    pub name: String,
    /// Physical ids whose nodes go in; none for a vNPU, and none for adminAccess, which gets the manager nodes only:
    /// opening a card's node would bind the card to the container that looks.
    pub physical_ids: Vec<u32>,
    /// Id of the vNPU whose node goes in.
    pub vnpu: Option<u32>,
}

/// A CDI file of ours, as found on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundFile {
    /// UID, from the file's name.
    pub uid: ClaimUid,
    /// What it holds, `None` if it is not readable as one of ours.
    pub content: Option<Injection>,
}

/// One act on the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Write the record of a claim.
    Write(Box<Record>),
    /// Make the CDI file of a claim be as given.
    Inject(Injection),
    /// Remove the CDI file of a claim, if it is there.
    Withdraw(ClaimUid),
    /// Remove the record of a claim, and its quarantined file, if they are there.
    Forget(ClaimUid),
}

impl Step {
    /// What takes this step back, given the record that was there before the plan began.
    pub fn undo(&self, before: Option<&Record>) -> Option<Self> {
        match (self, before) {
            (Self::Write(_), Some(before)) => Some(Self::Write(Box::new(before.clone()))),
            (Self::Write(record), None) => Some(Self::Forget(record.claim.uid.clone())),
            (Self::Inject(injection), None) => Some(Self::Withdraw(injection.claim.uid.clone())),
            // The claim was prepared before: its file stays.
            (Self::Inject(_), Some(_)) | (Self::Withdraw(_) | Self::Forget(_), _) => None,
        }
    }

    /// True for a step of a record, false for one of a CDI file.
    pub fn is_of_record(&self) -> bool {
        matches!(self, Self::Write(_) | Self::Forget(_))
    }

    /// Name of the step, for messages and metrics.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Write(_) => "writing the record",
            Self::Inject(_) => "writing the CDI file",
            Self::Withdraw(_) => "removing the CDI file",
            Self::Forget(_) => "removing the record",
        }
    }
}

/// A vNPU that is to be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order {
    /// Which device of the record.
    pub device: usize,
    /// Identity of the card.
    pub card: StableId,
    /// Physical id of the chip.
    pub physical_id: u32,
    /// Template.
    pub template: String,
    /// The id that it shall have.
    pub id: u32,
}

/// Steps that prepare a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prepare {
    /// The record that reserves the devices, from before the first step.
    pub record: Record,
    /// Steps in order; a replay writes no record. With orders, they end with the intent.
    pub steps: Vec<Step>,
    /// vNPUs to make after the steps; then [`made`] says what follows.
    pub orders: Vec<Order>,
}

/// What one of our results asks for.
#[derive(Debug)]
enum Ask<'a> {
    /// To look, and own nothing.
    Look(&'a Npu),
    /// A whole card.
    Whole(&'a Npu),
    /// A part of a card.
    Part(&'a Npu, Sliceable, Template),
}

impl Ask<'_> {
    fn npu(&self) -> &Npu {
        match self {
            Self::Look(npu) | Self::Whole(npu) | Self::Part(npu, ..) => npu,
        }
    }
}

/// The cards that must be read before [`prepare`] can decide, by physical id: those that the claim cuts.
pub fn cards_to_read(world: World<'_>, claim: &AllocatedClaim) -> BTreeMap<StableId, u32> {
    let cut = |result: &&AllocatedDevice| match ask(world, claim, result) {
        Ok(Ask::Part(npu, ..)) => Some((npu.stable_id.clone(), npu.physical_id())),
        _ => None,
    };
    ours(world.node, claim).iter().filter_map(cut).collect()
}

fn ours<'a>(node: &Node, claim: &'a AllocatedClaim) -> Vec<&'a AllocatedDevice> {
    claim.results.iter().filter(|result| result.driver == node.driver.as_str()).collect()
}

/// Plans a prepare. For whole cards it goes by the last good scan alone.
pub fn prepare(world: World<'_>, claim: &AllocatedClaim) -> Result<Prepare, Refusal> {
    let World { node, ledger, .. } = world;
    let reference = &claim.claim;
    if let Some(quarantined) = ledger.quarantined(&reference.uid) {
        return Err(Refusal::Quarantined { uid: reference.uid.to_string(), why: quarantined.why.clone() });
    }
    if claim.results.len() > RESULTS_MAX {
        return Err(Refusal::TooManyDevices(reference.clone(), claim.results.len()));
    }
    let ours = ours(node, claim);
    if ours.is_empty() {
        return Err(Refusal::NothingForUs(reference.clone(), node.driver.to_string()));
    }
    check_numbers(claim)?;
    let before = ledger.get(&reference.uid);
    if let Some(before) = before {
        if before.phase == Phase::Releasing {
            return Err(Refusal::Releasing(reference.clone()));
        }
        check_same_devices(before, &ours)?;
    }
    let mut devices: Vec<Holding> = Vec::with_capacity(ours.len());
    let mut orders = Vec::new();
    for result in &ours {
        let ask = ask(world, claim, result)?;
        let holding = hold(world, claim, result, &ask, before, &devices)?;
        let same =
            |other: &&mut Holding| other.stable_id == holding.stable_id && other.admin_access == holding.admin_access;
        match devices.iter_mut().find(same) {
            // Looking at one device for two requests is one entry with two names.
            Some(first) if holding.admin_access => {
                first.requests.extend(holding.requests);
                continue;
            }
            Some(first) if first.cut.is_none() || holding.cut.is_none() => {
                return Err(Refusal::Twice { claim: reference.clone(), device: holding.device });
            }
            _ => {}
        }
        if let Some(cut) = holding.cut.as_ref().filter(|cut| !cut.made) {
            let (card, physical_id) = (holding.stable_id.clone(), ask.npu().physical_id());
            orders.push(Order { device: devices.len(), card, physical_id, template: cut.template.clone(), id: cut.id });
        }
        devices.push(holding);
    }
    if let Some(before) = before.filter(|before| is_rebuilt(before)) {
        let is_kept = |old: &Holding| {
            let same = |cut: &Cut| old.cut.as_ref().is_none_or(|old| old.id == cut.id);
            devices.iter().any(|new| new.stable_id == old.stable_id && new.cut.as_ref().is_none_or(same))
        };
        if !before.devices.iter().all(is_kept) {
            return Err(reallocated(before, &ours));
        }
    }
    let phase = if orders.is_empty() { Phase::Prepared } else { Phase::Intent };
    let prepared_at =
        before.filter(|before| before.boot_id == node.boot_id).map_or(world.now, |before| before.prepared_at);
    let record = Record { claim: reference.clone(), boot_id: node.boot_id.clone(), phase, prepared_at, devices };
    let mut steps = Vec::with_capacity(2);
    // An intent is always written: one that is known may be left of a prepare that could not be undone, and the disk
    // may not have it.
    if before != Some(&record) || !orders.is_empty() {
        steps.push(Step::Write(Box::new(record.clone())));
    }
    if orders.is_empty() {
        steps.push(Step::Inject(injection(&record)));
    }
    Ok(Prepare { record, steps, orders })
}

/// What follows when the vNPUs of an intent are made: `read` has each one as it was read back, by device of the record.
///
/// One of the wrong template or size is refused, and so is one under an id that another claim's record names (a library
/// that ignores the wanted id can do that): the other's unprepare would destroy it. Its maker destroys all of them again.
pub fn made(ledger: &Ledger, intent: &Record, read: &[(usize, VnpuReading)]) -> Result<(Record, Vec<Step>), Refusal> {
    let mut record = intent.clone();
    for (index, reading) in read {
        let uid = &record.claim.uid;
        let Some(holding) = record.devices.get_mut(*index) else { continue };
        let (device, name) = (holding.device.clone(), cut_name(uid, &holding.stable_id, reading.id));
        let Some(cut) = &mut holding.cut else { continue };
        let names = |other: &&Record| {
            other.claim.uid != *uid
                && other.devices.iter().any(|holding| holding.cut.as_ref().is_some_and(|cut| cut.id == reading.id))
        };
        if let Some(holder) = ledger.owners(&holding.stable_id).find(names) {
            let (claim, holder, id) = (intent.claim.clone(), holder.claim.clone(), reading.id);
            return Err(Refusal::IdTaken { claim, device, id, holder });
        }
        if !reading.is_of(&cut.template) || !vnpu::is_size_of(reading.memory, cut.memory) {
            let shown = |template: &str, memory: u64| format!("{template} with {}", Quantity::bytes(memory));
            let wanted = shown(&cut.template, cut.memory);
            let made = shown(&reading.template, reading.memory);
            return Err(Refusal::WrongSize { claim: intent.claim.clone(), device, wanted, made });
        }
        (cut.id, cut.memory, cut.made) = (reading.id, reading.memory, true);
        holding.cdi_device = name;
    }
    record.phase = Phase::Prepared;
    let steps = vec![Step::Write(Box::new(record.clone())), Step::Inject(injection(&record))];
    Ok((record, steps))
}

/// A memory request that is no whole number of bytes, or less than a mebibyte, was not meant so.
fn check_numbers(claim: &AllocatedClaim) -> Result<(), Refusal> {
    for (request, asked) in &claim.asked_memory {
        if asked.to_u64().is_none_or(|bytes| bytes < MIB) {
            let bytes =
                asked.to_u64().map_or_else(|| "no number of bytes".to_owned(), |bytes| format!("{bytes} bytes"));
            let (claim, request) = (claim.claim.clone(), request.clone());
            return Err(Refusal::BareNumber { claim, request, asked: asked.to_string(), bytes });
        }
    }
    Ok(())
}

/// What a result of ours asks for.
fn ask<'a>(world: World<'a>, claim: &AllocatedClaim, result: &AllocatedDevice) -> Result<Ask<'a>, Refusal> {
    let reference = &claim.claim;
    let device = result.device.clone();
    let World { node, offer, inventory, .. } = world;
    if result.pool != node.pool.as_str() {
        let (pool, ours) = (result.pool.clone(), node.pool.to_string());
        return Err(Refusal::ForeignPool { claim: reference.clone(), device, pool, ours });
    }
    if slice::is_placeholder(&device) {
        return Err(Refusal::Placeholder { claim: reference.clone(), device });
    }
    let config = config::template_of(claim, result, node.driver.as_str())
        .map_err(|why| Refusal::BadConfig { claim: reference.clone(), why })?;
    let bad = |why: String| Err(Refusal::BadConfig { claim: reference.clone(), why });
    let not_cut =
        |device: String, why: &str| Err(Refusal::ShareNotCut { claim: reference.clone(), device, why: why.to_owned() });
    let off = |device: String| {
        if offer.chosen {
            not_cut(device, &offer.why)
        } else {
            Err(Refusal::ModelUnknown { claim: reference.clone(), device })
        }
    };
    if let Some(npu) = inventory.by_name(&device) {
        if result.admin_access {
            return Ok(Ask::Look(npu));
        }
        let booked = result.consumed_capacity.get(MEMORY).copied();
        let is_whole = |booked: Quantity| npu.memory().is_some_and(|memory| Quantity::bytes(memory) == booked);
        if booked.map_or(result.share_id.is_none(), is_whole) {
            return match config {
                Some(template) => bad(format!("vnpu.template is {template}, but {device} was allocated whole")),
                None => Ok(Ask::Whole(npu)),
            };
        }
        if offer.model == Model::Off {
            return off(device);
        }
        let Some(booked) = booked else { return not_cut(device, "the allocation does not say how much was booked") };
        let sliceable = match slice::sliceable(npu) {
            Ok(sliceable) => sliceable,
            Err(why) => return not_cut(device, &why.to_string()),
        };
        check_booked(claim, result, booked)?;
        let of_size = |template: &&Template| Quantity::bytes(template.takes.memory) == booked;
        let found = match config {
            Some(name) => match sliceable.template(&name) {
                Some(template) if of_size(&template) => Some(template),
                Some(template) => {
                    let memory = Quantity::bytes(template.takes.memory);
                    return bad(format!("vnpu.template {name} has {memory}, but {booked} were booked of {device}"));
                }
                None => return bad(format!("vnpu.template {name:?} is none of {}", sliceable.names())),
            },
            None => sliceable.templates.iter().filter(|template| template.plain).find(of_size),
        };
        let Some(template) = found.cloned() else {
            let valid = sliceable
                .exact()
                .iter()
                .map(|template| Quantity::bytes(template.takes.memory).to_string())
                .collect::<Vec<_>>();
            let (claim, booked, valid) = (reference.clone(), booked.to_string(), valid.join(", "));
            return Err(Refusal::BookedSize { claim, device, booked, valid });
        };
        return Ok(Ask::Part(npu, sliceable, template));
    }
    for npu in inventory.npus().iter().filter(|npu| device.starts_with(npu.name.as_str())) {
        // A part that was published before the model or the layout changed is known by its name all the same.
        if let Some(part) = slice::all_parts(offer, npu).into_iter().find(|part| part.name == device) {
            if result.admin_access {
                return Ok(Ask::Look(npu));
            }
            if offer.model == Model::Off {
                return off(device);
            }
            return match (slice::sliceable(npu), config) {
                (Ok(_), Some(name)) if name != part.template.name => {
                    bad(format!("vnpu.template is {name}, but {device} is a {}", part.template.name))
                }
                (Ok(sliceable), _) => Ok(Ask::Part(npu, sliceable, part.template)),
                (Err(why), _) => not_cut(device, &why.to_string()),
            };
        }
    }
    Err(Refusal::DeviceGone { claim: reference.clone(), device, why: gone(inventory) })
}

fn gone(inventory: &Inventory) -> String {
    if inventory.missing.is_empty() {
        return "no card has that name".to_owned();
    }
    let missing: Vec<_> = inventory.missing.iter().map(|chip| format!("{} ({})", chip.what, chip.why)).collect();
    format!("cards that cannot be read: {}", missing.join("; "))
}

/// The scheduler rounds a request up, never down.
fn check_booked(claim: &AllocatedClaim, result: &AllocatedDevice, booked: Quantity) -> Result<(), Refusal> {
    match claim.asked_memory.get(&result.request) {
        Some(asked) if *asked > booked => Err(Refusal::BookedLess {
            claim: claim.claim.clone(),
            device: result.device.clone(),
            asked: asked.to_string(),
            booked: booked.to_string(),
        }),
        _ => Ok(()),
    }
}

/// One result of ours as a holding, or why it cannot be. `earlier` are the claim's holdings so far.
fn hold(
    world: World<'_>,
    claim: &AllocatedClaim,
    result: &AllocatedDevice,
    ask: &Ask<'_>,
    before: Option<&Record>,
    earlier: &[Holding],
) -> Result<Holding, Refusal> {
    let (reference, npu) = (&claim.claim, ask.npu());
    let uid = &reference.uid;
    let held = before.and_then(|record| {
        let rebuilt = is_rebuilt(record);
        record.devices.iter().find(|holding| match ask {
            _ if !rebuilt => is_for(holding, result),
            // One of this template that no other result has got.
            Ask::Part(.., template) => {
                let is_free = |cut: &&Cut| {
                    let same = |other: &Cut| other.id == cut.id;
                    !earlier.iter().filter_map(|holding| holding.cut.as_ref()).any(same)
                };
                let cut = holding.cut.as_ref().filter(|cut| cut.template == template.name).filter(is_free);
                cut.is_some() && is_on_card_of(holding, result)
            }
            _ => holding.cut.is_none() && is_on_card_of(holding, result),
        })
    });
    if !matches!(ask, Ask::Look(_)) {
        check_card(world, reference, result, ask, held.is_some())?;
    }
    let (physical_ids, cut, cdi_device) = match ask {
        Ask::Look(_) => (Vec::new(), None, format!("{uid}_look_{}", npu.stable_id)),
        Ask::Whole(_) => (npu.physical_ids(), None, format!("{uid}_{}", npu.stable_id)),
        Ask::Part(_, sliceable, template) => {
            let kept = before.zip(held.and_then(|held| held.cut.as_ref()));
            let cut = part(world, reference, npu, sliceable, template, kept, earlier)?;
            let name = cut_name(uid, &npu.stable_id, cut.id);
            (Vec::new(), Some(cut), name)
        }
    };
    Ok(Holding {
        requests: vec![result.main_request().to_owned()],
        pool: result.pool.clone(),
        device: result.device.clone(),
        stable_id: npu.stable_id.clone(),
        physical_ids,
        admin_access: result.admin_access,
        share_id: result.share_id.clone(),
        cdi_device,
        cut,
    })
}

fn is_for(holding: &Holding, result: &AllocatedDevice) -> bool {
    holding.device == result.device
        && holding.admin_access == result.admin_access
        && holding.share_id == result.share_id
}

/// True if a record was rebuilt from its CDI file: it knows cards and vNPUs, but neither requests, nor shares, nor the
/// names of parts.
fn is_rebuilt(record: &Record) -> bool {
    record.devices.iter().all(|holding| holding.requests.is_empty())
}

/// True if a result is of the card, or of a part of the card, that a rebuilt record names.
fn is_on_card_of(holding: &Holding, result: &AllocatedDevice) -> bool {
    let rest = result.device.strip_prefix(holding.device.as_str());
    holding.admin_access == result.admin_access && rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
}

fn cut_name(uid: &ClaimUid, card: &StableId, id: u32) -> String {
    format!("{uid}_{card}_v{id}")
}

/// Whether the card may be had at all: by nobody else, healthy, open. A claim that has it keeps it.
fn check_card(
    world: World<'_>,
    claim: &ClaimRef,
    result: &AllocatedDevice,
    ask: &Ask<'_>,
    has_it: bool,
) -> Result<(), Refusal> {
    let (npu, device, driver) = (ask.npu(), result.device.clone(), &world.node.driver);
    let part = matches!(ask, Ask::Part(..));
    for holder in world.ledger.owners(&npu.stable_id).filter(|holder| holder.claim.uid != claim.uid) {
        let whole = holder
            .devices
            .iter()
            .any(|other| other.stable_id == npu.stable_id && other.cut.is_none() && !other.admin_access);
        if !part || whole {
            let (holder, uid) = (holder.claim.clone(), holder.claim.uid.to_string());
            return Err(Refusal::Held { claim: claim.clone(), device, holder, uid });
        }
    }
    if has_it {
        return Ok(());
    }
    let health = world.health.get(&npu.stable_id);
    if let Some((health, taint)) = health.and_then(|health| Some((health, slice::health_taint(driver, health)?)))
        && !result.tolerations.iter().any(|toleration| toleration.tolerates(&taint))
    {
        return Err(Refusal::Unhealthy {
            claim: claim.clone(),
            device,
            condition: health.condition,
            since: health.bad_since(),
            why: health.text(),
            taint: taint.key,
        });
    }
    if let Some(hold) = world.offer.holds.get(&npu.stable_id) {
        let taint = slice::hold_taint(driver, hold);
        if !result.tolerations.iter().any(|toleration| toleration.tolerates(&taint)) {
            return Err(Refusal::OnHold { claim: claim.clone(), device, hold: hold.clone(), taint: taint.key });
        }
    }
    if let Some(why) = world.offer.closed(npu) {
        return Err(Refusal::Closed { claim: claim.clone(), device, why });
    }
    Ok(())
}

/// A vNPU for a claim: the one that it has, or a new one with an id of our choice.
fn part(
    world: World<'_>,
    claim: &ClaimRef,
    npu: &Npu,
    sliceable: &Sliceable,
    template: &Template,
    kept: Option<(&Record, &Cut)>,
    earlier: &[Holding],
) -> Result<Cut, Refusal> {
    let device = npu.name.to_string();
    let Some(reading) = world.readings.get(&npu.stable_id) else {
        return Err(Refusal::CardBusy { claim: claim.clone(), device, why: "it could not be read".to_owned() });
    };
    if let Some((record, cut)) = kept {
        match reading.vnpu(cut.id) {
            // A vNPU of the intended id and template is ours, whoever made it again after a reboot.
            Some(found) if found.is_of(&cut.template) => {
                return Ok(Cut { made: true, memory: found.memory, ..cut.clone() });
            }
            Some(_) => return Err(Refusal::VnpuLost { claim: claim.clone(), device, id: cut.id }),
            None if record.boot_id == world.node.boot_id && record.phase == Phase::Prepared => {
                return Err(Refusal::VnpuLost { claim: claim.clone(), device, id: cut.id });
            }
            None => {}
        }
    }
    let here = |holding: &&Holding| holding.stable_id == npu.stable_id;
    let planned: Vec<_> = earlier.iter().filter(here).filter_map(|holding| holding.cut.as_ref()).collect();
    let named = world.ledger.cut_ids(&npu.stable_id);
    let foreign: Vec<_> = reading.ids().into_iter().filter(|id| !named.contains(id)).collect();
    if !foreign.is_empty() {
        let why = format!("it has vNPUs that are not ours: {}", id_text(&foreign));
        return Err(Refusal::Closed { claim: claim.clone(), device, why });
    }
    if planned.is_empty()
        && let Some(why) = reading.obstacle()
    {
        return Err(Refusal::CardBusy { claim: claim.clone(), device, why });
    }
    let unmade: Vec<_> = planned.iter().copied().filter(|cut| !cut.made).collect();
    check_room(claim, &device, sliceable, template, reading, &unmade)?;
    let taken: BTreeSet<_> = reading.ids().into_iter().chain(named).chain(planned.iter().map(|cut| cut.id)).collect();
    // After a boot it gets its own id again: the vendor's replay may still be to come, and must find it there.
    let others = world.ledger.owners(&npu.stable_id).filter(|record| record.claim.uid != claim.uid);
    let theirs = |id: &u32| {
        others.flat_map(|record| &record.devices).filter_map(|holding| holding.cut.as_ref()).any(|cut| cut.id == *id)
    };
    let own = kept.map(|(_, cut)| cut.id).filter(|id| planned.iter().all(|cut| cut.id != *id)).filter(|id| !theirs(id));
    let Some(id) = own.or_else(|| vnpu::ids(npu.physical_id()).find(|id| !taken.contains(id))) else {
        let (template, left) = (template.name.to_owned(), "no vNPU id is left".to_owned());
        return Err(Refusal::NoRoom { claim: claim.clone(), device, template, left });
    };
    Ok(Cut {
        template: template.name.to_owned(),
        memory: template.takes.memory,
        ai_cores: template.takes.ai_cores,
        id,
        made: false,
        before: reading.ids(),
    })
}

fn check_room(
    claim: &ClaimRef,
    device: &str,
    sliceable: &Sliceable,
    template: &Template,
    reading: &CardReading,
    unmade: &[&Cut],
) -> Result<(), Refusal> {
    let (claim, device, name) = (claim.clone(), device.to_owned(), template.name.to_owned());
    room(sliceable, template, reading, unmade).map_err(|left| Refusal::NoRoom { claim, device, template: name, left })
}

/// By our own arithmetic, and by what the chip says is free; an error says what is left.
fn room(sliceable: &Sliceable, template: &Template, reading: &CardReading, unmade: &[&Cut]) -> Result<(), String> {
    let planned = unmade.iter().filter_map(|cut| sliceable.template(&cut.template));
    let before = planned.fold(sliceable.room(reading), |room, planned| room?.after(planned));
    if before.and_then(|room| room.after(template)).is_some() {
        return Ok(());
    }
    let left = before.map(vnpu::Room::left);
    Err(left.map_or_else(
        || "nothing is left".to_owned(),
        |left| {
            let memory = Quantity::bytes(left.memory);
            let vnpu::Resources { ai_cores, ai_cpus, media, .. } = left;
            format!("{memory} of memory, {ai_cores} AI cores, {ai_cpus} AI CPUs and {media} JPEG decoders are left")
        },
    ))
}

fn id_text(ids: &[u32]) -> String {
    ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// A claim that is prepared keeps its devices until it is unprepared.
fn check_same_devices(before: &Record, ours: &[&AllocatedDevice]) -> Result<(), Refusal> {
    let key = |device: &str, admin: bool, share: &Option<String>| (device.to_owned(), admin, share.clone());
    let prepared: BTreeSet<_> =
        before.devices.iter().map(|holding| key(&holding.device, holding.admin_access, &holding.share_id)).collect();
    let allocated: BTreeSet<_> =
        ours.iter().map(|result| key(&result.device, result.admin_access, &result.share_id)).collect();
    let rebuilt = is_rebuilt(before)
        && before.devices.iter().all(|holding| ours.iter().any(|result| is_on_card_of(holding, result)))
        && ours.iter().all(|result| before.devices.iter().any(|holding| is_on_card_of(holding, result)));
    if prepared == allocated || rebuilt {
        return Ok(());
    }
    Err(reallocated(before, ours))
}

fn reallocated(before: &Record, ours: &[&AllocatedDevice]) -> Refusal {
    Refusal::Reallocated {
        claim: before.claim.clone(),
        prepared: before.device_names(),
        allocated: names(ours.iter().map(|result| result.device.as_str())),
    }
}

/// Answer for kubelet, one device a share.
pub fn answer(driver: &DriverName, record: &Record) -> Vec<PreparedDevice> {
    let device = |holding: &Holding| PreparedDevice {
        request_names: holding.requests.clone(),
        pool: holding.pool.clone(),
        device: holding.device.clone(),
        cdi_device_ids: vec![format!("{driver}/npu={}", holding.cdi_device)],
        share_id: holding.share_id.clone(),
    };
    record.devices.iter().map(device).collect()
}

/// What the CDI file of a record holds.
pub fn injection(record: &Record) -> Injection {
    let device = |holding: &Holding| InjectedDevice {
        name: holding.cdi_device.clone(),
        physical_ids: holding.physical_ids.clone(),
        vnpu: holding.cut.as_ref().map(|cut| cut.id),
    };
    Injection { claim: record.claim.clone(), devices: record.devices.iter().map(device).collect() }
}

/// Steps that let go of a claim.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Release {
    /// Steps before its vNPUs are destroyed.
    pub first: Vec<Step>,
    /// Its vNPUs, with the identity and the physical id of their cards; [`verdict`] says what to do with each.
    pub cuts: Vec<(StableId, u32, Cut)>,
    /// Steps after.
    pub last: Vec<Step>,
}

/// Plans an unprepare. Needs no API server, and for whole NPUs no hardware; a claim that we never knew is success.
///
/// `traces` tells whether a damaged record may stand for anything: a CDI file of the claim is on disk, or a vNPU that
/// nobody owns is on the node.
pub fn unprepare(uid: &ClaimUid, ledger: &Ledger, traces: bool) -> Result<Release, Refusal> {
    if let Some(quarantined) = ledger.quarantined(uid)
        && traces
    {
        return Err(Refusal::Quarantined { uid: uid.to_string(), why: quarantined.why.clone() });
    }
    Ok(release(uid, ledger))
}

/// Lets go of a claim whatever is known of it: root's `npuctl claims release UID --force`.
pub fn release(uid: &ClaimUid, ledger: &Ledger) -> Release {
    let record = ledger.get(uid);
    let holdings = record.iter().flat_map(|record| &record.devices);
    let cut =
        |holding: &Holding| Some((holding.stable_id.clone(), chip_of(holding.cut.as_ref()?.id), holding.cut.clone()?));
    let cuts: Vec<_> = holdings.filter_map(cut).collect();
    let mut first = Vec::with_capacity(2);
    if let Some(record) = record.filter(|record| !cuts.is_empty() && record.phase != Phase::Releasing) {
        first.push(Step::Write(Box::new(Record { phase: Phase::Releasing, ..record.clone() })));
    }
    first.push(Step::Withdraw(uid.clone()));
    Release { first, cuts, last: vec![Step::Forget(uid.clone())] }
}

/// The chip whose range a vNPU id is in.
pub fn chip_of(id: u32) -> u32 {
    id.saturating_sub(vnpu::ids(0).start) / 16
}

/// What to do with a vNPU that a record names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It is not there (any more).
    Gone,
    /// Destroy this id.
    Destroy(u32),
    /// One of these may be it; none is touched.
    Disputed(Vec<u32>),
}

/// Ids that vNPUs of other claims have on a card since this boot. What a record of an earlier boot names did not outlive
/// it, and is made anew, or adopted, under a record of this one.
pub fn named_by_others(ledger: &Ledger, node: &Node, card: &StableId, but: &ClaimUid) -> BTreeSet<u32> {
    let others = ledger.owners(card).filter(|record| record.claim.uid != *but && record.boot_id == node.boot_id);
    let holdings = others.flat_map(|record| &record.devices).filter(|holding| holding.stable_id == *card);
    holdings.filter_map(|holding| holding.cut.as_ref()).map(|cut| cut.id).collect()
}

/// Finds a record's vNPU on its card. `named` are the ids that other records name.
pub fn verdict(cut: &Cut, reading: &CardReading, named: &BTreeSet<u32>) -> Verdict {
    if let Some(found) = reading.vnpu(cut.id) {
        // Another template under our id is somebody else's: ours is gone.
        return if found.is_of(&cut.template) { Verdict::Destroy(cut.id) } else { Verdict::Gone };
    }
    if cut.made {
        return Verdict::Gone;
    }
    // The library may have ignored the wanted id: what is new since the intent, and of its template, is it.
    let new: Vec<_> = reading
        .vnpus
        .iter()
        .filter(|vnpu| !cut.before.contains(&vnpu.id) && !named.contains(&vnpu.id) && vnpu.is_of(&cut.template))
        .map(|vnpu| vnpu.id)
        .collect();
    match new[..] {
        [] => Verdict::Gone,
        [id] => Verdict::Destroy(id),
        _ => Verdict::Disputed(new),
    }
}

/// After a destroy failed: the id under which the library made the vNPU again, if it did.
pub fn remade(cut: &Cut, before: &CardReading, after: &CardReading) -> Option<u32> {
    let new = after.vnpus.iter().filter(|vnpu| before.vnpu(vnpu.id).is_none() && vnpu.is_of(&cut.template));
    match new.map(|vnpu| vnpu.id).collect::<Vec<_>>()[..] {
        [id] if after.vnpu(cut.id).is_none() => Some(id),
        _ => None,
    }
}

/// What start-up has to do.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recovery {
    /// Steps in any order: each claim has at most one.
    pub steps: Vec<Step>,
    /// Claims that were cut off while vNPUs were made or destroyed: they are released. Nothing was answered for them.
    pub releases: Vec<ClaimUid>,
    /// Claims whose damaged records were rebuilt.
    pub rebuilt: Vec<ClaimUid>,
    /// CDI files that no record owned.
    pub swept: Vec<ClaimUid>,
}

/// Plans start-up: the records are the truth, the CDI directory is made to agree with them, and a damaged record is
/// rebuilt from its CDI file where card and file agree.
///
/// Records of an earlier boot keep their devices; they are re-done at the next prepare.
pub fn recover(world: World<'_>, files: &[FoundFile]) -> Recovery {
    let mut recovery = Recovery::default();
    for record in world.ledger.records() {
        match record.phase {
            Phase::Intent | Phase::Releasing => recovery.releases.push(record.claim.uid.clone()),
            Phase::Prepared if record.boot_id == world.node.boot_id => {
                recovery.steps.push(Step::Inject(injection(record)));
            }
            Phase::Prepared => {}
        }
    }
    for file in files {
        if world.ledger.get(&file.uid).is_some() {
            continue;
        }
        if world.ledger.quarantined(&file.uid).is_some() {
            if let Some(record) = rebuild(world, file) {
                recovery.rebuilt.push(file.uid.clone());
                recovery.steps.push(Step::Write(Box::new(record)));
            }
            continue;
        }
        recovery.swept.push(file.uid.clone());
        recovery.steps.push(Step::Withdraw(file.uid.clone()));
    }
    recovery
}

/// The record that a CDI file stands for, if every device of it is a card or a vNPU that nobody else owns.
fn rebuild(world: World<'_>, file: &FoundFile) -> Option<Record> {
    let World { node, inventory, ledger, .. } = world;
    let content =
        file.content.as_ref().filter(|content| content.claim.uid == file.uid && !content.devices.is_empty())?;
    let mut devices = Vec::new();
    for device in &content.devices {
        let rest = device.name.strip_prefix(file.uid.as_str())?.strip_prefix('_')?;
        let (admin_access, rest) = rest.strip_prefix("look_").map_or((false, rest), |id| (true, id));
        let id = device.vnpu.map_or(Some(rest), |vnpu| rest.strip_suffix(&format!("_v{vnpu}")))?;
        let npu = inventory.by_stable_id(&StableId::from_text(id)?)?;
        let cut = match device.vnpu {
            Some(vnpu) => Some(found_cut(world, npu, vnpu)?),
            None => None,
        };
        let mut owners = ledger.owners(&npu.stable_id).flat_map(|record| &record.devices);
        let whole = |other: &Holding| other.stable_id == npu.stable_id && other.cut.is_none() && !other.admin_access;
        let taken = match (&cut, admin_access) {
            (_, true) => false,
            (Some(_), _) => owners.any(whole),
            (None, _) => owners.next().is_some(),
        };
        if taken {
            return None;
        }
        devices.push(Holding {
            requests: Vec::new(),
            pool: node.pool.to_string(),
            device: npu.name.to_string(),
            stable_id: npu.stable_id.clone(),
            physical_ids: if admin_access || cut.is_some() { Vec::new() } else { npu.physical_ids() },
            admin_access,
            share_id: None,
            cdi_device: device.name.clone(),
            cut,
        });
    }
    let (claim, boot_id) = (content.claim.clone(), node.boot_id.clone());
    Some(Record { claim, boot_id, phase: Phase::Prepared, prepared_at: world.now, devices })
}

/// A vNPU that a CDI file names and no record does, as it is on the card.
fn found_cut(world: World<'_>, npu: &Npu, id: u32) -> Option<Cut> {
    let found = world.readings.get(&npu.stable_id)?.vnpu(id)?;
    if world.ledger.cut_ids(&npu.stable_id).contains(&id) {
        return None;
    }
    let sliceable = slice::sliceable(npu).ok()?;
    let template = sliceable.templates.iter().find(|template| found.is_of(template.name))?;
    Some(Cut {
        template: template.name.to_owned(),
        memory: found.memory,
        ai_cores: found.ai_cores,
        id,
        made: true,
        before: Vec::new(),
    })
}

/// Plans a vNPU of an operator: with it the card leaves the pool, so no claim may own any of it.
pub fn operator_create(world: World<'_>, device: &str, template: &str) -> Result<(u32, u32), Refusal> {
    let denied = |why: String| Refusal::Denied { what: format!("a vNPU on {device}"), why };
    let npu = world.inventory.by_name(device).ok_or_else(|| Refusal::NoSuch(format!("device {device}")))?;
    let sliceable = slice::sliceable(npu).map_err(|why| denied(why.to_string()))?;
    let template =
        sliceable.template(template).ok_or_else(|| denied(format!("{template:?} is none of {}", sliceable.names())))?;
    if let Some(owner) = world.ledger.owners(&npu.stable_id).next() {
        return Err(denied(format!("claim {} owns (a part of) the card", owner.claim)));
    }
    let reading = world.readings.get(&npu.stable_id).ok_or_else(|| denied("the card could not be read".to_owned()))?;
    if let Some(why) = reading.obstacle() {
        return Err(denied(why));
    }
    let left = room(&sliceable, template, reading, &[]);
    left.map_err(|left| denied(format!("there is no room for {}: {left}", template.name)))?;
    let taken = reading.ids();
    let id = vnpu::ids(npu.physical_id()).find(|id| !taken.contains(id));
    Ok((npu.physical_id(), id.ok_or_else(|| denied("no vNPU id is left".to_owned()))?))
}

/// Plans the end of a vNPU that no claim has; gives its chip. One of a live claim is never destroyed, `force` or not.
pub fn operator_destroy(world: World<'_>, id: u32, force: bool) -> Result<u32, Refusal> {
    let denied = |why: String| Refusal::Denied { what: format!("destroying vNPU {id}"), why };
    let absent = || Refusal::NoSuch(format!("vNPU {id}"));
    let physical_id = chip_of(id);
    let npu = world.inventory.npus().iter().find(|npu| npu.physical_ids().contains(&physical_id)).ok_or_else(absent)?;
    let names = |holding: &Holding| holding.cut.as_ref().is_some_and(|cut| cut.id == id);
    if let Some(owner) = world.ledger.owners(&npu.stable_id).find(|record| record.devices.iter().any(names)) {
        return Err(denied(format!("it belongs to claim {}; delete the pod", owner.claim)));
    }
    let reading = world.readings.get(&npu.stable_id).ok_or_else(|| denied("the card could not be read".to_owned()))?;
    reading.vnpu(id).ok_or_else(absent)?;
    match &reading.processes {
        Some(pids) if pids.is_empty() => Ok(physical_id),
        _ if force => Ok(physical_id),
        Some(pids) => Err(denied(format!("processes run on the card: {pids:?}; --force destroys it all the same"))),
        None => Err(denied("the processes on the card cannot be read; --force destroys it all the same".to_owned())),
    }
}

/// Why a card takes no new claims: a vNPU or a process that is not ours, or a vNPU of ours that somebody destroyed.
pub fn closed(npu: &Npu, reading: &CardReading, node: &Node, ledger: &Ledger) -> Option<String> {
    let named = ledger.cut_ids(&npu.stable_id);
    let foreign: Vec<_> = reading.ids().into_iter().filter(|id| !named.contains(id)).collect();
    if !foreign.is_empty() {
        return Some(format!("it has vNPUs that are not ours: {}", id_text(&foreign)));
    }
    let lost = lost(npu, reading, node, ledger);
    if let Some((_, id)) = lost.first() {
        return Some(format!("vNPU {id} was destroyed by somebody else"));
    }
    match &reading.processes {
        Some(pids) if !pids.is_empty() && ledger.owners(&npu.stable_id).next().is_none() => {
            Some("a process runs on it that is not of a claim".to_owned())
        }
        _ => None,
    }
}

/// vNPUs of prepared claims of this boot that are no longer on their card.
pub fn lost(npu: &Npu, reading: &CardReading, node: &Node, ledger: &Ledger) -> Vec<(ClaimRef, u32)> {
    let mut lost = Vec::new();
    let live = |record: &&Record| record.phase == Phase::Prepared && record.boot_id == node.boot_id;
    for record in ledger.owners(&npu.stable_id).filter(live) {
        for cut in record
            .devices
            .iter()
            .filter(|holding| holding.stable_id == npu.stable_id)
            .filter_map(|holding| holding.cut.as_ref())
        {
            if cut.made && !reading.has(cut.id, &cut.template) {
                lost.push((record.claim.clone(), cut.id));
            }
        }
    }
    lost
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::domain::{
        health::{HealthReading, Level, Policy, Report},
        inventory::tests::inventory_of,
        names::NodeName,
        npu::MissingChip,
        quantity::Quantity,
        record::Quarantined,
        vnpu::Resources,
    };

    const BOOT: &str = "boot-1";

    fn node() -> Node {
        let pool = PoolName::of_node(&NodeName::new("master").unwrap()).unwrap();
        let driver = DriverName::new("npu.huawei.com").unwrap();
        Node { driver, pool, boot_id: BOOT.to_owned() }
    }

    fn uid(n: usize) -> ClaimUid {
        ClaimUid::new(format!("0000-{n}")).unwrap()
    }

    fn claim(n: usize, devices: &[(&str, bool)]) -> AllocatedClaim {
        let results = devices
            .iter()
            .enumerate()
            .map(|(index, (device, admin_access))| AllocatedDevice {
                request: format!("r{index}/sub"),
                driver: "npu.huawei.com".to_owned(),
                pool: "master/npu".to_owned(),
                device: (*device).to_owned(),
                admin_access: *admin_access,
                share_id: None,
                consumed_capacity: BTreeMap::new(),
                tolerations: Vec::new(),
            })
            .collect();
        let claim = ClaimRef { namespace: "ml".to_owned(), name: format!("claim-{n}"), uid: uid(n) };
        AllocatedClaim { claim, results, config: Vec::new(), asked_memory: BTreeMap::new() }
    }

    fn now() -> Timestamp {
        Timestamp::from_second(1_000).unwrap()
    }

    /// What the disk holds.
    #[derive(Debug, Clone, Default, PartialEq, Eq)]
    struct Disk {
        records: BTreeMap<ClaimUid, Record>,
        files: BTreeMap<ClaimUid, Injection>,
    }

    impl Disk {
        fn apply(&mut self, step: &Step) {
            match step {
                Step::Write(record) => drop(self.records.insert(record.claim.uid.clone(), (**record).clone())),
                Step::Inject(injection) => drop(self.files.insert(injection.claim.uid.clone(), injection.clone())),
                Step::Withdraw(uid) => drop(self.files.remove(uid)),
                Step::Forget(uid) => drop(self.records.remove(uid)),
            }
        }

        fn ledger(&self) -> Ledger {
            let mut ledger = Ledger::default();
            self.records.values().for_each(|record| ledger.insert(record.clone()));
            ledger
        }

        fn found(&self) -> Vec<FoundFile> {
            self.files
                .iter()
                .map(|(uid, content)| FoundFile { uid: uid.clone(), content: Some(content.clone()) })
                .collect()
        }

        /// Each record has its file, each file its record, and no card has two owners.
        fn assert_legal(&self) {
            assert_eq!(self.records.keys().collect::<Vec<_>>(), self.files.keys().collect::<Vec<_>>());
            let mut owned = BTreeSet::new();
            for record in self.records.values() {
                assert_eq!(self.files[&record.claim.uid], injection(record));
                for holding in record.devices.iter().filter(|holding| !holding.admin_access) {
                    assert!(owned.insert(holding.stable_id.clone()), "{} has two owners", holding.device);
                }
            }
        }
    }

    /// What a plan goes by, owned.
    struct Setting {
        node: Node,
        offer: Offer,
        inventory: Inventory,
        health: HealthMap,
        ledger: Ledger,
        readings: Readings,
        now: Timestamp,
    }

    impl Setting {
        fn of(disk: &Disk) -> Self {
            let (inventory, health, ledger) = (inventory_of(8), HealthMap::new(), disk.ledger());
            Self {
                node: node(),
                offer: Offer::default(),
                inventory,
                health,
                ledger,
                readings: Readings::new(),
                now: now(),
            }
        }

        fn world(&self) -> World<'_> {
            let Self { node, offer, inventory, health, ledger, readings, now } = self;
            World { node, offer, inventory, health, ledger, readings, now: *now }
        }
    }

    impl Disk {
        /// No card is held whole beside anybody else.
        fn assert_whole_or_cut(&self) {
            let holdings = || {
                self.records
                    .values()
                    .flat_map(|record| record.devices.iter().map(move |holding| (&record.claim, holding)))
            };
            for (claim, whole) in holdings().filter(|(_, holding)| holding.cut.is_none() && !holding.admin_access) {
                let shared = holdings().filter(|(other, holding)| {
                    *other != claim && holding.stable_id == whole.stable_id && !holding.admin_access
                });
                assert_eq!(shared.count(), 0, "{claim} shares {}", whole.device);
            }
        }
    }

    fn plan(claim: &AllocatedClaim, disk: &Disk) -> Result<Prepare, Refusal> {
        prepare(Setting::of(disk).world(), claim)
    }

    fn recovered(disk: &Disk) -> Disk {
        let mut disk = disk.clone();
        for step in recover(Setting::of(&disk).world(), &disk.found()).steps {
            disk.apply(&step);
        }
        disk
    }

    /// Unprepares on a disk without vNPUs.
    fn steps_of(release: Release) -> Vec<Step> {
        assert_eq!(release.cuts, []);
        [release.first, release.last].concat()
    }

    #[test]
    fn a_whole_npu_is_recorded_then_injected() {
        let prepared = plan(&claim(1, &[("npu-3", false)]), &Disk::default()).unwrap();
        let names: Vec<_> = prepared.steps.iter().map(Step::name).collect();
        assert_eq!(names, ["writing the record", "writing the CDI file"]);
        let id = "npu.huawei.com/npu=0000-1_0000A003-00000001-00000002-00000003-00000004";
        assert_eq!(
            answer(&node().driver, &prepared.record),
            [PreparedDevice {
                request_names: vec!["r0".to_owned()],
                pool: "master/npu".to_owned(),
                device: "npu-3".to_owned(),
                cdi_device_ids: vec![id.to_owned()],
                share_id: None,
            }]
        );
        assert_eq!(injection(&prepared.record).devices[0].physical_ids, [3]);
    }

    #[test]
    fn results_of_other_drivers_are_never_touched() {
        let mut mixed = claim(1, &[("npu-3", false), ("npu-4", false)]);
        mixed.results[1].driver = "other.example.com".to_owned();
        let prepared = plan(&mixed, &Disk::default()).unwrap();
        assert_eq!(prepared.record.device_names(), "npu-3");
        mixed.results.remove(0);
        assert!(matches!(plan(&mixed, &Disk::default()), Err(Refusal::NothingForUs(..))));
    }

    #[test]
    fn a_held_card_is_refused_and_both_claims_are_named() {
        let mut disk = Disk::default();
        plan(&claim(1, &[("npu-3", false)]), &disk).unwrap().steps.iter().for_each(|step| disk.apply(step));
        let text = plan(&claim(2, &[("npu-3", false)]), &disk).unwrap_err().to_string();
        assert!(text.contains("ml/claim-2") && text.contains("ml/claim-1"), "{text}");
    }

    #[test]
    fn an_admin_claim_looks_at_a_held_card_and_owns_nothing() {
        let mut disk = Disk::default();
        plan(&claim(1, &[("npu-3", false)]), &disk).unwrap().steps.iter().for_each(|step| disk.apply(step));
        let look = plan(&claim(2, &[("npu-3", true), ("npu-3", true), ("npu-4", true)]), &disk).unwrap();
        let answer = answer(&node().driver, &look.record);
        assert_eq!(answer.len(), 2);
        assert_eq!(answer[0].request_names, ["r0", "r1"]);
        assert!(look.record.devices.iter().all(|holding| holding.physical_ids.is_empty()));
        look.steps.iter().for_each(|step| disk.apply(step));
        disk.assert_legal();
        plan(&claim(3, &[("npu-4", false)]), &disk).unwrap();
    }

    #[test]
    fn what_cannot_be_kept_is_refused_with_its_own_reason() {
        let mut twice = claim(1, &[("npu-3", false), ("npu-3", false)]);
        assert!(matches!(plan(&twice, &Disk::default()), Err(Refusal::Twice { .. })));
        twice.results.truncate(1);
        twice.results[0].pool = "other/npu".to_owned();
        assert!(matches!(plan(&twice, &Disk::default()), Err(Refusal::ForeignPool { .. })));
        let many: Vec<_> = (0..33).map(|_| ("npu-0", true)).collect();
        assert_eq!(plan(&claim(1, &many), &Disk::default()), Err(Refusal::TooManyDevices(claim(1, &[]).claim, 33)));
        assert!(matches!(plan(&claim(1, &[("npu-9", false)]), &Disk::default()), Err(Refusal::DeviceGone { .. })));
        let mut share = claim(1, &[("npu-3", false)]);
        share.results[0].share_id = Some("s".to_owned());
        assert!(matches!(plan(&share, &Disk::default()), Err(Refusal::ShareNotCut { .. })));
        share.results[0].share_id = None;
        share.results[0].consumed_capacity.insert("memCapacity".to_owned(), Quantity::bytes(8 << 30));
        assert!(matches!(plan(&share, &Disk::default()), Err(Refusal::ShareNotCut { .. })));
    }

    #[test]
    fn a_gone_device_names_the_chips_that_cannot_be_read() {
        let mut setting = Setting::of(&Disk::default());
        setting.inventory = inventory_of(1);
        setting.inventory.missing = vec![MissingChip { what: "card 3".to_owned(), why: "-8012".to_owned() }];
        let text = prepare(setting.world(), &claim(1, &[("npu-3", false)])).unwrap_err().to_string();
        assert!(text.contains("card 3 (-8012)"), "{text}");
    }

    #[test]
    fn a_sick_card_takes_no_new_claim_but_keeps_the_one_it_has() {
        let mut setting = Setting::of(&Disk::default());
        let reading = HealthReading { codes: vec![0x80E0_1801], ..HealthReading::of(Level::Critical) };
        let sick = Health::step(None, &Report::Read(reading), &Policy::default(), now());
        setting.health.insert(setting.inventory.npus()[3].stable_id.clone(), sick);
        let wanted = claim(1, &[("npu-3", false)]);
        let refusal = prepare(setting.world(), &wanted).unwrap_err().to_string();
        for word in [
            "npu-3",
            "tainted since 1970-01-01T00:16:40Z: 80E01801",
            "80E01801 HBM multi-bit ECC",
            "npu.huawei.com/unhealthy",
        ] {
            assert!(refusal.contains(word), "{word}: {refusal}");
        }
        let mut disk = Disk::default();
        plan(&wanted, &disk).unwrap().steps.iter().for_each(|step| disk.apply(step));
        setting.ledger = disk.ledger();
        prepare(setting.world(), &wanted).unwrap();
    }

    #[test]
    fn a_claim_with_other_devices_must_be_unprepared_first() {
        let mut disk = Disk::default();
        plan(&claim(1, &[("npu-3", false)]), &disk).unwrap().steps.iter().for_each(|step| disk.apply(step));
        let text = plan(&claim(1, &[("npu-4", false)]), &disk).unwrap_err().to_string();
        assert!(text.contains("prepared with npu-3") && text.contains("now allocated npu-4"), "{text}");
    }

    #[test]
    fn after_a_reboot_the_record_is_written_anew() {
        let mut disk = Disk::default();
        let wanted = claim(1, &[("npu-3", false)]);
        plan(&wanted, &disk).unwrap().steps.iter().for_each(|step| disk.apply(step));
        let mut rebooted = Setting::of(&disk);
        rebooted.node.boot_id = "boot-2".to_owned();
        rebooted.now = Timestamp::from_second(2_000).unwrap();
        let later = rebooted.now;
        let again = prepare(rebooted.world(), &wanted).unwrap();
        assert_eq!(again.steps.len(), 2);
        assert_eq!((again.record.boot_id.as_str(), again.record.prepared_at), ("boot-2", later));
        assert_eq!(recover(rebooted.world(), &disk.found()), Recovery::default());
    }

    #[test]
    fn a_damaged_record_holds_its_claim_until_it_is_rebuilt_from_its_file() {
        let mut disk = Disk::default();
        plan(&claim(1, &[("npu-3", false)]), &disk).unwrap().steps.iter().for_each(|step| disk.apply(step));
        let quarantined = Quarantined { uid: uid(1), why: "its checksum is wrong".to_owned(), path: String::new() };
        let mut setting = Setting::of(&Disk::default());
        setting.ledger.quarantine(quarantined);
        assert!(matches!(unprepare(&uid(1), &setting.ledger, true), Err(Refusal::Quarantined { .. })));
        assert_eq!(unprepare(&uid(1), &setting.ledger, false).unwrap(), release(&uid(1), &setting.ledger));
        let recovery = recover(setting.world(), &disk.found());
        assert_eq!(recovery.rebuilt, [uid(1)]);
        let Step::Write(record) = &recovery.steps[0] else { panic!("{recovery:?}") };
        assert_eq!(record.device_names(), "npu-3");
        assert_eq!(injection(record), disk.files[&uid(1)]);
        // Not if somebody else owns the card by now.
        plan(&claim(2, &[("npu-3", false)]), &Disk::default()).unwrap().steps.iter().for_each(|step| {
            if let Step::Write(record) = step {
                setting.ledger.insert((**record).clone());
            }
        });
        assert_eq!(recover(setting.world(), &disk.found()).rebuilt, []);
    }

    // vNPUs. One 910B4 of the inventory: 32 GiB, 20 AI cores, 7 AI CPUs.

    const GIB: u64 = 1 << 30;

    fn consumable() -> Offer {
        Offer { model: Model::Consumable, ..Offer::default() }
    }

    /// A claim that was booked `gib` of each card, in shares of its own.
    fn booked(n: usize, shares: &[(&str, u64)]) -> AllocatedClaim {
        let mut claim = claim(n, &shares.iter().map(|(device, _)| (*device, false)).collect::<Vec<_>>());
        for (index, (result, (_, gib))) in claim.results.iter_mut().zip(shares).enumerate() {
            result.share_id = Some(format!("share-{n}-{index}"));
            result.consumed_capacity.insert(MEMORY.to_owned(), Quantity::bytes(gib * GIB));
        }
        claim
    }

    fn vnpu(id: u32, template: &str, gib: u64, ai_cores: u32) -> VnpuReading {
        VnpuReading { id, template: template.to_owned(), memory: gib * GIB, ai_cores }
    }

    fn idle() -> CardReading {
        CardReading { processes: Some(Vec::new()), ..CardReading::default() }
    }

    /// A setting whose cards are read as given, the others as idle.
    fn cutting(disk: &Disk, readings: &[(&str, CardReading)]) -> Setting {
        let mut setting = Setting { offer: consumable(), ..Setting::of(disk) };
        for npu in setting.inventory.npus() {
            let given = readings.iter().find(|(name, _)| *name == npu.name.as_str());
            setting.readings.insert(npu.stable_id.clone(), given.map_or_else(idle, |(_, reading)| reading.clone()));
        }
        setting
    }

    /// Prepares a claim whose vNPUs come out as ordered; gives the record.
    fn cut(disk: &mut Disk, setting: &Setting, claim: &AllocatedClaim) -> Record {
        let prepared = prepare(setting.world(), claim).unwrap();
        prepared.steps.iter().for_each(|step| disk.apply(step));
        let read: Vec<_> = prepared
            .orders
            .iter()
            .map(|order| {
                let cut = prepared.record.devices[order.device].cut.as_ref().unwrap();
                (order.device, vnpu(order.id, &order.template, cut.memory / GIB, cut.ai_cores))
            })
            .collect();
        let (record, steps) = made(&Ledger::default(), &prepared.record, &read).unwrap();
        for step in &steps {
            disk.apply(step);
        }
        record
    }

    fn refusal(setting: &Setting, claim: &AllocatedClaim) -> Refusal {
        prepare(setting.world(), claim).unwrap_err()
    }

    #[test]
    fn the_claim_of_the_requirements_is_cut_as_vir10_3c_16g() {
        let setting = cutting(&Disk::default(), &[]);
        let wanted = booked(1, &[("npu-2", 16)]);
        let cards: Vec<_> = cards_to_read(setting.world(), &wanted).into_values().collect();
        assert_eq!(cards, [2]);
        let prepared = prepare(setting.world(), &wanted).unwrap();
        assert_eq!(prepared.record.phase, Phase::Intent);
        assert_eq!(
            prepared.steps,
            [Step::Write(Box::new(prepared.record.clone()))],
            "the intent comes before the vendor's call"
        );
        let order = &prepared.orders[0];
        assert_eq!((order.physical_id, order.template.as_str(), order.id), (2, "vir10_3c_16g", 132));
        let (record, steps) =
            made(&Ledger::default(), &prepared.record, &[(0, vnpu(132, "vir10_3c_16g", 16, 10))]).unwrap();
        assert_eq!(steps.iter().map(Step::name).collect::<Vec<_>>(), ["writing the record", "writing the CDI file"]);
        let injected = &injection(&record).devices[0];
        assert_eq!((injected.vnpu, &injected.physical_ids), (Some(132), &vec![]));
        assert!(injected.name.ends_with("_v132"), "{}", injected.name);
        let answer = answer(&setting.node.driver, &record);
        assert_eq!((answer[0].device.as_str(), answer[0].share_id.as_deref()), ("npu-2", Some("share-1-0")));
    }

    #[test]
    fn the_whole_capacity_of_a_shared_card_is_the_whole_card() {
        let setting = cutting(&Disk::default(), &[]);
        let wanted = booked(1, &[("npu-2", 32)]);
        assert!(cards_to_read(setting.world(), &wanted).is_empty(), "no vendor call for a whole card");
        let prepared = prepare(setting.world(), &wanted).unwrap();
        assert_eq!((prepared.orders.len(), prepared.record.devices[0].physical_ids.clone()), (0, vec![2]));
    }

    #[test]
    fn a_size_that_is_no_template_is_an_error_and_never_a_whole_card() {
        let setting = cutting(&Disk::default(), &[]);
        let text = refusal(&setting, &booked(1, &[("npu-2", 12)])).to_string();
        assert!(text.contains("booked 12Gi of npu-2, which can be cut into 8Gi, 16Gi only"), "{text}");
        let off =
            Setting { offer: Offer { why: "because".to_owned(), ..Offer::default() }, ..Setting::of(&Disk::default()) };
        assert!(
            matches!(refusal(&off, &booked(1, &[("npu-2", 16)])), Refusal::ShareNotCut { why, .. } if why == "because")
        );
        let early = Setting { offer: Offer { chosen: false, ..Offer::default() }, ..Setting::of(&Disk::default()) };
        assert!(matches!(refusal(&early, &booked(1, &[("npu-2", 16)])), Refusal::ModelUnknown { .. }));
        let mut silent = booked(1, &[("npu-2", 16)]);
        silent.results[0].consumed_capacity.clear();
        assert!(matches!(refusal(&setting, &silent), Refusal::ShareNotCut { .. }));
    }

    #[test]
    fn a_bare_number_is_refused_with_the_text_that_mends_it() {
        let setting = cutting(&Disk::default(), &[]);
        for (asked, bytes) in [
            ("10000", "10000 bytes"),
            ("1048575", "1048575 bytes"),
            ("0", "0 bytes"),
            ("500m", "no number"),
            ("-5", "no number"),
        ] {
            let mut wanted = booked(1, &[("npu-2", 8)]);
            wanted.asked_memory.insert("r0/sub".to_owned(), asked.parse().unwrap());
            let text = refusal(&setting, &wanted).to_string();
            assert!(text.contains(bytes) && text.contains("10000Mi"), "{text}");
        }
        let mut wanted = booked(1, &[("npu-2", 8)]);
        wanted.asked_memory.insert("r0/sub".to_owned(), "9Gi".parse().unwrap());
        assert!(matches!(refusal(&setting, &wanted), Refusal::BookedLess { .. }));
        wanted.asked_memory.insert("r0/sub".to_owned(), "1Mi".parse().unwrap());
        prepare(setting.world(), &wanted).unwrap();
    }

    #[test]
    fn a_placeholder_is_refused_with_the_reason() {
        let setting = cutting(&Disk::default(), &[]);
        let text = refusal(&setting, &booked(1, &[("placeholder-0-3", 8)])).to_string();
        assert!(text.contains("DRAPartitionableDevices"), "{text}");
    }

    #[test]
    fn a_part_is_known_by_its_name_in_whatever_model_it_was_published() {
        let mut setting = cutting(&Disk::default(), &[]);
        let wanted = claim(1, &[("npu-3-vir05-1c-8g-2", false)]);
        let prepared = prepare(setting.world(), &wanted).unwrap();
        assert_eq!((prepared.orders[0].template.as_str(), prepared.orders[0].physical_id), ("vir05_1c_8g", 3));
        setting.offer.model = Model::Partitionable;
        prepare(setting.world(), &wanted).unwrap();
        assert!(matches!(refusal(&setting, &claim(1, &[("npu-3-vir05-1c-8g-9", false)])), Refusal::DeviceGone { .. }));
    }

    #[test]
    fn configuration_names_the_template_and_an_error_names_what_is_allowed() {
        let setting = cutting(&Disk::default(), &[]);
        let with = |template: &str, from_class: bool, requests: &[&str]| {
            let vnpu = Some(config::VnpuConfig { template: Some(template.to_owned()) });
            let parameters = Ok(config::NpuConfig { vnpu, ..config::NpuConfig::default() });
            let requests = requests.iter().map(ToString::to_string).collect();
            crate::domain::claim::OpaqueConfig { from_class, requests, driver: "npu.huawei.com".to_owned(), parameters }
        };
        let ordered = |configs: Vec<_>| {
            let wanted = AllocatedClaim { config: configs, ..booked(1, &[("npu-2", 16)]) };
            prepare(setting.world(), &wanted).map(|prepared| prepared.orders[0].template.clone())
        };
        assert_eq!(ordered(vec![with("vir10_3c_16g_nm", false, &[])]).unwrap(), "vir10_3c_16g_nm");
        let both = vec![with("vir10_4c_16g_m", false, &["r0"]), with("vir10_3c_16g_nm", true, &[])];
        assert_eq!(ordered(both).unwrap(), "vir10_4c_16g_m", "the claim's word counts more than the class's");
        assert_eq!(ordered(vec![with("vir05_1c_8g", false, &["other"])]).unwrap(), "vir10_3c_16g");
        let text = ordered(vec![with("vir05_1c_8g", false, &[])]).unwrap_err().to_string();
        assert!(text.contains("vir05_1c_8g has 8Gi, but 16Gi were booked"), "{text}");
        let text = ordered(vec![with("vir99", false, &[])]).unwrap_err().to_string();
        assert!(text.contains("none of vir05_1c_8g, vir10_3c_16g"), "{text}");
        let mut broken = with("x", false, &["other"]);
        broken.parameters = Err("unknown field `vnpuu`".to_owned());
        assert!(matches!(ordered(vec![broken]), Err(Refusal::BadConfig { .. })));
        let wanted = AllocatedClaim { config: vec![with("vir05_1c_8g", false, &[])], ..booked(1, &[("npu-2", 32)]) };
        assert!(matches!(refusal(&setting, &wanted), Refusal::BadConfig { .. }));
    }

    #[test]
    fn several_shares_of_one_card_get_ids_of_their_own() {
        let setting = cutting(&Disk::default(), &[]);
        let prepared = prepare(setting.world(), &booked(1, &[("npu-0", 8), ("npu-0", 16), ("npu-1", 8)])).unwrap();
        let ids: Vec<_> = prepared.orders.iter().map(|order| order.id).collect();
        assert_eq!(ids, [100, 101, 116]);
        let text = refusal(&setting, &booked(1, &[("npu-0", 16), ("npu-0", 16), ("npu-0", 8)])).to_string();
        assert!(text.contains("no room for vir05_1c_8g"), "{text}");
        assert!(matches!(refusal(&setting, &booked(1, &[("npu-0", 32), ("npu-0", 8)])), Refusal::Twice { .. }));
    }

    #[test]
    fn a_card_is_whole_or_cut_but_never_both() {
        let mut disk = Disk::default();
        cut(&mut disk, &cutting(&Disk::default(), &[]), &booked(1, &[("npu-0", 8)]));
        let one = CardReading { vnpus: vec![vnpu(100, "vir05_1c_8g", 8, 5)], ..idle() };
        let setting = cutting(&disk, &[("npu-0", one)]);
        assert!(matches!(refusal(&setting, &booked(2, &[("npu-0", 32)])), Refusal::Held { .. }));
        prepare(setting.world(), &booked(2, &[("npu-0", 8)])).unwrap();
        let mut disk = Disk::default();
        cut(&mut disk, &cutting(&Disk::default(), &[]), &booked(1, &[("npu-0", 32)]));
        assert!(matches!(refusal(&cutting(&disk, &[]), &booked(2, &[("npu-0", 8)])), Refusal::Held { .. }));
    }

    #[test]
    fn room_is_what_the_card_has_left_by_our_sums_and_by_its_own() {
        let mut disk = Disk::default();
        for n in 1..=2 {
            let made = (1..n).map(|made| vnpu(99 + made, "vir10_3c_16g", 16, 10)).collect();
            let setting = cutting(&disk, &[("npu-0", CardReading { vnpus: made, ..idle() })]);
            cut(&mut disk, &setting, &booked(usize::try_from(n).unwrap(), &[("npu-0", 16)]));
        }
        let full =
            CardReading { vnpus: vec![vnpu(100, "vir10_3c_16g", 16, 10), vnpu(101, "vir10_3c_16g", 16, 10)], ..idle() };
        let text = refusal(&cutting(&disk, &[("npu-0", full)]), &booked(3, &[("npu-0", 8)])).to_string();
        assert!(text.contains("0 of memory, 0 AI cores, 1 AI CPUs and 0 JPEG decoders are left"), "{text}");
        let short = Resources { memory: 32 * GIB, ai_cores: 4, ai_cpus: 7, media: 24 };
        let reading = CardReading { free: Some(short), ..idle() };
        let setting = cutting(&Disk::default(), &[("npu-0", reading)]);
        assert!(matches!(refusal(&setting, &booked(3, &[("npu-0", 8)])), Refusal::NoRoom { .. }));
        let reserved = Resources { memory: 7 * GIB, ai_cores: 5, ai_cpus: 1, media: 6 };
        let setting = cutting(&Disk::default(), &[("npu-0", CardReading { free: Some(reserved), ..idle() })]);
        prepare(setting.world(), &booked(3, &[("npu-0", 8)])).expect("the chip keeps some memory for itself");
    }

    #[test]
    fn a_card_that_somebody_else_uses_is_not_cut() {
        let foreign = CardReading { vnpus: vec![vnpu(103, "vir05_1c_8g", 8, 5)], ..idle() };
        let text =
            refusal(&cutting(&Disk::default(), &[("npu-0", foreign.clone())]), &booked(1, &[("npu-0", 8)])).to_string();
        assert!(text.contains("not ours: 103"), "{text}");
        let busy = CardReading { processes: Some(vec![4711]), ..idle() };
        let text =
            refusal(&cutting(&Disk::default(), &[("npu-0", busy.clone())]), &booked(1, &[("npu-0", 8)])).to_string();
        assert!(text.contains("4711"), "{text}");
        let blind = CardReading { processes: None, ..idle() };
        assert!(matches!(
            refusal(&cutting(&Disk::default(), &[("npu-0", blind)]), &booked(1, &[("npu-0", 8)])),
            Refusal::CardBusy { .. }
        ));
        let npu = &inventory_of(1).npus()[0].clone();
        assert!(closed(npu, &foreign, &node(), &Ledger::default()).unwrap().contains("103"));
        assert!(closed(npu, &busy, &node(), &Ledger::default()).unwrap().contains("process"));
        assert_eq!(closed(npu, &idle(), &node(), &Ledger::default()), None);
        let mut setting = cutting(&Disk::default(), &[]);
        setting.offer.closed.insert(npu.stable_id.clone(), "reason".to_owned());
        assert!(matches!(refusal(&setting, &booked(1, &[("npu-0", 32)])), Refusal::Closed { .. }), "nor given whole");
    }

    #[test]
    fn a_vnpu_of_another_name_or_size_is_refused_and_one_that_is_near_is_shown_as_read() {
        let setting = cutting(&Disk::default(), &[]);
        let intent = prepare(setting.world(), &booked(1, &[("npu-0", 8)])).unwrap().record;
        for wrong in [vnpu(100, "vir05_1c_8g", 16, 5), vnpu(100, "vir10_3c_16g", 8, 10)] {
            let text = made(&Ledger::default(), &intent, &[(0, wrong)]).unwrap_err().to_string();
            assert!(text.contains("wanted vir05_1c_8g with 8Gi"), "{text}");
        }
        let (record, _) = made(&Ledger::default(), &intent, &[(0, vnpu(100, "vir05_1c_8g", 7, 5))]).unwrap();
        assert_eq!(record.devices[0].cut.as_ref().unwrap().memory, 7 * GIB);
        // A library that ignores the wanted id: the record follows what was made.
        let (record, _) = made(&Ledger::default(), &intent, &[(0, vnpu(105, "vir05_1c_8g", 8, 5))]).unwrap();
        assert_eq!(injection(&record).devices[0].vnpu, Some(105));
    }

    #[test]
    fn a_replay_goes_by_the_card_and_makes_nothing_again_behind_a_users_back() {
        let mut disk = Disk::default();
        let wanted = booked(1, &[("npu-0", 8)]);
        cut(&mut disk, &cutting(&Disk::default(), &[]), &wanted);
        let there = CardReading { vnpus: vec![vnpu(100, "vir05_1c_8g", 8, 5)], ..idle() };
        let replay = prepare(cutting(&disk, &[("npu-0", there.clone())]).world(), &wanted).unwrap();
        assert_eq!((replay.orders.len(), replay.steps.len()), (0, 1), "only the CDI file is looked at");
        assert!(matches!(refusal(&cutting(&disk, &[]), &wanted), Refusal::VnpuLost { id: 100, .. }));
        let other = CardReading { vnpus: vec![vnpu(100, "vir10_3c_16g", 16, 10)], ..idle() };
        assert!(matches!(refusal(&cutting(&disk, &[("npu-0", other.clone())]), &wanted), Refusal::VnpuLost { .. }));
        let npu = inventory_of(1).npus()[0].clone();
        assert_eq!(lost(&npu, &idle(), &node(), &disk.ledger()), [(wanted.claim.clone(), 100)]);
        assert_eq!(lost(&npu, &there, &node(), &disk.ledger()), []);
        // After a reboot it is adopted if it is there, and made again if it is not.
        let rebooted = |reading: CardReading| {
            let mut setting = cutting(&disk, &[("npu-0", reading)]);
            setting.node.boot_id = "boot-2".to_owned();
            setting
        };
        let adopted = prepare(rebooted(there).world(), &wanted).unwrap();
        assert_eq!((adopted.orders.len(), adopted.record.phase, adopted.steps.len()), (0, Phase::Prepared, 2));
        let again = prepare(rebooted(idle()).world(), &wanted).unwrap();
        assert_eq!((again.orders.len(), again.record.phase), (1, Phase::Intent));
        assert_eq!(again.orders[0].id, 100, "the vendor's replay may still come, and must find it there");
        let mut known = rebooted(idle());
        known.ledger.insert(again.record.clone());
        assert_eq!(prepare(known.world(), &wanted).unwrap().steps, again.steps, "the disk may not have the intent");
        assert!(
            matches!(refusal(&rebooted(other), &wanted), Refusal::VnpuLost { .. }),
            "another template there is not ours"
        );
    }

    #[test]
    fn verdicts_never_touch_what_is_not_the_records() {
        let record = |made| Cut {
            template: "vir05_1c_8g".to_owned(),
            memory: 8 * GIB,
            ai_cores: 5,
            id: 100,
            made,
            before: vec![107],
        };
        let card = |vnpus: &[(u32, &str)]| CardReading {
            vnpus: vnpus.iter().map(|(id, template)| vnpu(*id, template, 8, 5)).collect(),
            ..idle()
        };
        let named = BTreeSet::from([101]);
        let ours = "vir05_1c_8g";
        for (made, vnpus, wanted) in [
            (true, &[(100, ours)][..], Verdict::Destroy(100)),
            (true, &[], Verdict::Gone),
            (true, &[(100, "vir10_3c_16g")], Verdict::Gone),
            (true, &[(102, ours)], Verdict::Gone),
            (false, &[(100, ours)], Verdict::Destroy(100)),
            (false, &[(107, ours), (101, ours), (103, "vir10_3c_16g")], Verdict::Gone),
            (false, &[(107, ours), (102, ours)], Verdict::Destroy(102)),
            (false, &[(102, ours), (103, ours)], Verdict::Disputed(vec![102, 103])),
        ] {
            assert_eq!(verdict(&record(made), &card(vnpus), &named), wanted, "{made} {vnpus:?}");
        }
        assert_eq!(remade(&record(true), &card(&[(100, ours)]), &card(&[(104, ours)])), Some(104));
        assert_eq!(remade(&record(true), &card(&[(100, ours)]), &card(&[(100, ours)])), None);
        assert_eq!(remade(&record(true), &card(&[(100, ours)]), &card(&[])), None);
    }

    #[test]
    fn a_release_writes_down_that_it_began_before_it_destroys() {
        let mut disk = Disk::default();
        let record = cut(&mut disk, &cutting(&Disk::default(), &[]), &booked(1, &[("npu-3", 8), ("npu-4", 16)]));
        let release = unprepare(&uid(1), &disk.ledger(), false).unwrap();
        let Step::Write(releasing) = &release.first[0] else { panic!("{release:?}") };
        assert_eq!((releasing.phase, &release.first[1]), (Phase::Releasing, &Step::Withdraw(uid(1))));
        assert_eq!(release.cuts.iter().map(|(_, chip, cut)| (*chip, cut.id)).collect::<Vec<_>>(), [(3, 148), (4, 164)]);
        assert_eq!(release.last, [Step::Forget(uid(1))]);
        disk.apply(&release.first[0]);
        assert_eq!(unprepare(&uid(1), &disk.ledger(), false).unwrap().first, [Step::Withdraw(uid(1))]);
        let setting = cutting(&disk, &[]);
        assert!(matches!(refusal(&setting, &booked(1, &[("npu-3", 8), ("npu-4", 16)])), Refusal::Releasing(_)));
        assert_eq!(recover(setting.world(), &disk.found()).releases, [uid(1)]);
        disk.apply(&Step::Write(Box::new(Record { phase: Phase::Intent, ..record })));
        assert_eq!(
            recover(cutting(&disk, &[]).world(), &disk.found()).releases,
            [uid(1)],
            "nothing was answered for it"
        );
    }

    #[test]
    fn an_operators_vnpu_needs_a_card_without_claims_and_never_touches_one_of_a_claim() {
        let mut disk = Disk::default();
        cut(&mut disk, &cutting(&Disk::default(), &[]), &booked(1, &[("npu-0", 8)]));
        let ours = CardReading { vnpus: vec![vnpu(100, "vir05_1c_8g", 8, 5)], ..idle() };
        let foreign =
            CardReading { vnpus: vec![vnpu(116, "vir10_3c_16g", 16, 10)], processes: Some(vec![7]), ..idle() };
        let busy = CardReading { processes: Some(vec![7]), ..idle() };
        let setting = cutting(&disk, &[("npu-0", ours), ("npu-1", foreign), ("npu-2", busy)]);
        let create = |device, template| {
            operator_create(setting.world(), device, template).map_err(|refusal| refusal.to_string())
        };
        assert_eq!(create("npu-3", "vir05_1c_8g"), Ok((3, 148)));
        assert_eq!(create("npu-1", "vir05_1c_8g"), Ok((1, 117)), "a card that is cut already is not disturbed");
        for (device, template, why) in [
            ("npu-0", "vir05_1c_8g", "claim ml/claim-1 owns"),
            ("npu-2", "vir05_1c_8g", "processes run on it: [7]"),
            ("npu-3", "vir99", "none of vir05_1c_8g"),
            ("npu-9", "vir05_1c_8g", "no device npu-9"),
        ] {
            assert!(create(device, template).unwrap_err().contains(why), "{why}");
        }
        let destroy = |id, force| operator_destroy(setting.world(), id, force).map_err(|refusal| refusal.to_string());
        assert!(destroy(100, true).unwrap_err().contains("belongs to claim ml/claim-1"));
        assert!(destroy(116, false).unwrap_err().contains("--force"));
        assert_eq!(destroy(116, true), Ok(1));
        for absent in [117, 149, 4000] {
            assert!(destroy(absent, true).unwrap_err().contains("no vNPU"));
        }
    }

    #[test]
    fn a_lost_record_of_a_vnpu_is_rebuilt_from_its_file_and_the_card() {
        let mut disk = Disk::default();
        cut(&mut disk, &cutting(&Disk::default(), &[]), &booked(1, &[("npu-0", 8)]));
        disk.records.clear();
        let quarantine = |readings: &[(&str, CardReading)]| {
            let mut setting = cutting(&Disk::default(), readings);
            setting.ledger.quarantine(Quarantined { uid: uid(1), why: "it is empty".to_owned(), path: String::new() });
            setting
        };
        let there = CardReading { vnpus: vec![vnpu(100, "vir05_1c_8g", 8, 5)], ..idle() };
        let recovery = recover(quarantine(&[("npu-0", there)]).world(), &disk.found());
        let Step::Write(record) = &recovery.steps[0] else { panic!("{recovery:?}") };
        assert_eq!(
            record.devices[0].cut.as_ref().map(|cut| (cut.id, cut.template.as_str())),
            Some((100, "vir05_1c_8g"))
        );
        assert_eq!(injection(record), disk.files[&uid(1)]);
        assert_eq!(recover(quarantine(&[]).world(), &disk.found()).rebuilt, [], "the vNPU is not on the card");
        // Prepared again it keeps its vNPU; a claim for something else does not make it forgotten.
        let there = CardReading { vnpus: vec![vnpu(100, "vir05_1c_8g", 8, 5)], ..idle() };
        let mut setting = cutting(&Disk::default(), &[("npu-0", there)]);
        setting.ledger.insert((**record).clone());
        let again = prepare(setting.world(), &booked(1, &[("npu-0", 8)])).unwrap();
        assert_eq!((again.orders.len(), injection(&again.record)), (0, injection(record)));
        let other = prepare(setting.world(), &booked(1, &[("npu-0", 16)]));
        assert!(matches!(other, Err(Refusal::Reallocated { .. })), "{other:?}");
    }

    fn devices() -> impl Strategy<Value = Vec<(&'static str, bool)>> {
        let names = prop::sample::select(&["npu-0", "npu-1", "npu-2", "npu-3", "npu-4"][..]);
        prop::collection::vec((names, prop::bool::weighted(0.2)), 1..4)
    }

    proptest! {
        #[test]
        fn no_plan_over_commits_a_card(asks in prop::collection::vec((0..6usize, 0..3usize, any::<bool>()), 1..40), bin in 0..3usize) {
            // Per bin: board, GiB, AI cores, AI CPUs, JPEG decoders.
            let (board, gib, cores, cpus, media) = [(0x28, 32, 20, 7, 24), (0x31, 64, 24, 6, 28), (0x32, 64, 20, 7, 24)][bin];
            let mut disk = Disk::default();
            let mut card: Vec<VnpuReading> = Vec::new();
            let mut inventory = None;
            for (n, size, release) in asks {
                let mut setting = cutting(&disk, &[("npu-0", CardReading { vnpus: card.clone(), ..idle() })]);
                let inventory = inventory.get_or_insert_with(|| {
                    let mut scan = crate::domain::inventory::tests::scan_of(1);
                    scan.chips[0].board_id = Some(board);
                    scan.chips[0].memory = Some(gib * GIB);
                    scan.chips[0].ai_cores = Some(cores);
                    Inventory::from_scan(&scan, &mut crate::domain::node::NodeMemory::default()).unwrap()
                });
                setting.inventory = inventory.clone();
                if release {
                    let release = unprepare(&uid(n), &disk.ledger(), false).unwrap();
                    for (_, _, cut) in &release.cuts {
                        if let Verdict::Destroy(id) = verdict(cut, &setting.readings[&setting.inventory.npus()[0].stable_id], &named_by_others(&disk.ledger(), &node(), &setting.inventory.npus()[0].stable_id, &uid(n))) {
                            card.retain(|vnpu| vnpu.id != id);
                        }
                    }
                    [release.first, release.last].concat().iter().for_each(|step| disk.apply(step));
                } else if !disk.records.contains_key(&uid(n)) {
                    let wanted = booked(n, &[("npu-0", gib >> (2 - size))]);
                    if prepare(setting.world(), &wanted).is_ok() {
                        let record = cut(&mut disk, &setting, &wanted);
                        for cut in record.devices.iter().filter_map(|holding| holding.cut.as_ref()) {
                            prop_assert!(card.iter().all(|vnpu| vnpu.id != cut.id), "an id is used twice");
                            card.push(vnpu(cut.id, &cut.template, cut.memory / GIB, cut.ai_cores));
                        }
                    }
                }
                disk.assert_whole_or_cut();
                let sliceable = slice::sliceable(&setting.inventory.npus()[0]).unwrap();
                let taken = card.iter().map(|vnpu| sliceable.template(&vnpu.template).unwrap().takes);
                let whole = Resources { memory: gib * GIB, ai_cores: cores, ai_cpus: cpus, media };
                prop_assert!(taken.clone().try_fold(whole, Resources::minus).is_some(), "over-committed: {card:?}");
                let held: usize = disk.records.values().flat_map(|record| &record.devices).filter(|holding| holding.cut.is_some()).count();
                prop_assert_eq!(held, card.len(), "each vNPU has its record");
            }
        }

        #[test]
        fn unprepare_after_prepare_restores_the_disk(others in prop::collection::vec(devices(), 0..4), mine in devices()) {
            let mut disk = Disk::default();
            for (n, devices) in others.iter().enumerate() {
                if let Ok(prepared) = plan(&claim(n, devices), &disk) {
                    prepared.steps.iter().for_each(|step| disk.apply(step));
                }
            }
            let before = disk.clone();
            if let Ok(prepared) = plan(&claim(99, &mine), &disk) {
                prepared.steps.iter().for_each(|step| disk.apply(step));
                disk.assert_legal();
                for step in steps_of(unprepare(&uid(99), &disk.ledger(), true).unwrap()) {
                    disk.apply(&step);
                }
            }
            prop_assert_eq!(disk, before);
        }

        #[test]
        fn preparing_twice_gives_the_same_answer_and_changes_nothing(mine in devices()) {
            let mut disk = Disk::default();
            if let Ok(first) = plan(&claim(1, &mine), &disk) {
                first.steps.iter().for_each(|step| disk.apply(step));
                let before = disk.clone();
                let second = plan(&claim(1, &mine), &disk).unwrap();
                prop_assert_eq!(answer(&node().driver, &second.record), answer(&node().driver, &first.record));
                prop_assert!(second.steps.iter().all(|step| matches!(step, Step::Inject(_))), "a replay writes no record");
                second.steps.iter().for_each(|step| disk.apply(step));
                prop_assert_eq!(disk, before);
            }
        }

        #[test]
        fn a_cut_after_any_step_is_recovered(others in prop::collection::vec(devices(), 0..4), mine in devices(), cut in 0..3usize, gone in any::<bool>()) {
            let mut disk = Disk::default();
            for (n, devices) in others.iter().enumerate() {
                if let Ok(prepared) = plan(&claim(n, devices), &disk) {
                    prepared.steps.iter().for_each(|step| disk.apply(step));
                }
            }
            if let Ok(prepared) = plan(&claim(99, &mine), &disk) {
                if gone {
                    prepared.steps.iter().for_each(|step| disk.apply(step));
                    steps_of(unprepare(&uid(99), &disk.ledger(), true).unwrap()).iter().take(cut).for_each(|step| disk.apply(step));
                } else {
                    prepared.steps.iter().take(cut).for_each(|step| disk.apply(step));
                }
            }
            let once = recovered(&disk);
            once.assert_legal();
            prop_assert_eq!(recovered(&once), once.clone(), "recovery is at rest after one turn");
        }

        #[test]
        fn undoing_any_prefix_restores_the_disk(mine in devices(), before in any::<bool>(), cut in 0..3usize) {
            let mut disk = Disk::default();
            if before && let Ok(first) = plan(&claim(1, &mine), &disk) {
                first.steps.iter().for_each(|step| disk.apply(step));
            }
            let start = disk.clone();
            if let Ok(prepared) = plan(&claim(1, &mine), &disk) {
                let earlier = start.records.get(&uid(1)).cloned();
                let done: Vec<_> = prepared.steps.iter().take(cut).collect();
                for step in &done {
                    disk.apply(step);
                }
                done.iter().rev().filter_map(|step| step.undo(earlier.as_ref())).for_each(|step| disk.apply(&step));
                prop_assert_eq!(disk, start);
            }
        }
    }
}

//! What to do for a claim: prepare, unprepare, recover. Each gives ordered steps or a typed refusal.
//!
//! A plan's steps are done in order, each one durable before the next begins. A crash between two of them leaves a
//! state from which [`recover`], or the same call again, goes on. A step that fails is answered by undoing those
//! before it, last first ([`Step::undo`]).
//!
//! ```text
//! prepare, whole NPU:  Write(record) → Inject(CDI file) → answer
//! unprepare:           Withdraw(CDI file) → Forget(record) → answer
//! ```
//!
//! The record comes first and goes last, so a CDI file that no record owns is never one of a live claim.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;

use super::{
    claim::{AllocatedClaim, AllocatedDevice, ClaimRef, ClaimUid, PreparedDevice, RESULTS_MAX},
    health::{Health, codes_text},
    inventory::Inventory,
    names::{DriverName, PoolName},
    npu::StableId,
    record::{Holding, Ledger, Phase, Record, names},
    refusal::Refusal,
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
    /// Why no vNPU is cut here.
    pub no_slicing: &'static str,
}

/// Health by card.
pub type HealthMap = BTreeMap<StableId, Health>;

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
    /// Name, `<uid>_<stable id>`, or `<uid>_look_<stable id>` for adminAccess.
    pub name: String,
    /// Physical ids whose nodes go in; none for adminAccess, which gets the manager nodes only: opening a card's node
    /// would bind the card to the container that looks.
    pub physical_ids: Vec<u32>,
}

/// A CDI file of ours, as found on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundFile {
    /// UID, from the file's name.
    pub uid: ClaimUid,
    /// What it holds, `None` if it is not readable as one of ours.
    pub content: Option<Injection>,
}

/// One durable act.
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
    #[must_use]
    pub fn undo(&self, before: Option<&Record>) -> Option<Self> {
        match (self, before) {
            (Self::Write(_), Some(before)) => Some(Self::Write(Box::new(before.clone()))),
            (Self::Write(record), None) => Some(Self::Forget(record.claim.uid.clone())),
            (Self::Inject(injection), None) => Some(Self::Withdraw(injection.claim.uid.clone())),
            // The claim was prepared before: its file stays.
            (Self::Inject(_), Some(_)) | (Self::Withdraw(_) | Self::Forget(_), _) => None,
        }
    }

    /// Name of the step, for messages and metrics.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Write(_) => "writing the record",
            Self::Inject(_) => "writing the CDI file",
            Self::Withdraw(_) => "removing the CDI file",
            Self::Forget(_) => "removing the record",
        }
    }
}

/// Steps that prepare a claim, and the answer once they are done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prepare {
    /// The record that reserves the devices, from before the first step.
    pub record: Record,
    /// Steps in order; a replay writes no record.
    pub steps: Vec<Step>,
    /// Answer for kubelet.
    pub answer: Vec<PreparedDevice>,
}

/// Plans a prepare. Makes no vendor call and reads nothing: `inventory` is the last good scan.
pub fn prepare(
    node: &Node,
    claim: &AllocatedClaim,
    inventory: &Inventory,
    health: &HealthMap,
    ledger: &Ledger,
    now: Timestamp,
) -> Result<Prepare, Refusal> {
    let reference = &claim.claim;
    if let Some(quarantined) = ledger.quarantined(&reference.uid) {
        return Err(Refusal::Quarantined { uid: reference.uid.to_string(), why: quarantined.why.clone() });
    }
    if claim.results.len() > RESULTS_MAX {
        return Err(Refusal::TooManyDevices(reference.clone(), claim.results.len()));
    }
    let ours: Vec<_> = claim.results.iter().filter(|result| result.driver == node.driver.as_str()).collect();
    if ours.is_empty() {
        return Err(Refusal::NothingForUs(reference.clone(), node.driver.to_string()));
    }
    let before = ledger.get(&reference.uid);
    if let Some(before) = before {
        check_same_devices(before, &ours)?;
    }
    let mut devices = Vec::with_capacity(ours.len());
    let mut owned = BTreeSet::new();
    let mut named = BTreeSet::new();
    for result in ours {
        let holding = hold(node, reference, result, inventory, health, ledger, before.is_some())?;
        let again = if holding.admin_access {
            !named.insert(holding.cdi_device.clone())
        } else {
            !owned.insert(holding.stable_id.clone())
        };
        match (again, holding.admin_access) {
            (false, _) => devices.push(holding),
            // Looking at one device for two requests is one entry with two names.
            (true, true) => {
                if let Some(first) =
                    devices.iter_mut().find(|other: &&mut Holding| other.cdi_device == holding.cdi_device)
                {
                    first.requests.extend(holding.requests);
                }
            }
            (true, false) => return Err(Refusal::Twice { claim: reference.clone(), device: holding.device }),
        }
    }
    let answer = devices.iter().map(|holding| answer(&node.driver, holding)).collect();
    let record = Record {
        claim: reference.clone(),
        boot_id: node.boot_id.clone(),
        phase: Phase::Prepared,
        prepared_at: before.filter(|before| before.boot_id == node.boot_id).map_or(now, |before| before.prepared_at),
        devices,
    };
    let mut steps = Vec::with_capacity(2);
    if before != Some(&record) {
        steps.push(Step::Write(Box::new(record.clone())));
    }
    steps.push(Step::Inject(injection(&record)));
    Ok(Prepare { record, steps, answer })
}

/// One result of ours as a holding, or why it cannot be.
fn hold(
    node: &Node,
    claim: &ClaimRef,
    result: &AllocatedDevice,
    inventory: &Inventory,
    health: &HealthMap,
    ledger: &Ledger,
    replay: bool,
) -> Result<Holding, Refusal> {
    let device = result.device.clone();
    if result.pool != node.pool.as_str() {
        let (pool, ours) = (result.pool.clone(), node.pool.to_string());
        return Err(Refusal::ForeignPool { claim: claim.clone(), device, pool, ours });
    }
    if result.share_id.is_some() || !result.consumed_capacity.is_empty() {
        return Err(Refusal::ShareNotCut { claim: claim.clone(), device, why: node.no_slicing.to_owned() });
    }
    let Some(npu) = inventory.by_name(&device) else {
        let why = if inventory.missing.is_empty() {
            "no card has that name".to_owned()
        } else {
            let missing: Vec<_> =
                inventory.missing.iter().map(|chip| format!("{} ({})", chip.what, chip.why)).collect();
            format!("cards that cannot be read: {}", missing.join("; "))
        };
        return Err(Refusal::DeviceGone { claim: claim.clone(), device, why });
    };
    if !result.admin_access {
        if let Some(holder) = ledger.owners(&npu.stable_id).find(|holder| holder.claim.uid != claim.uid) {
            let (holder, uid) = (holder.claim.clone(), holder.claim.uid.to_string());
            return Err(Refusal::Held { claim: claim.clone(), device, holder, uid });
        }
        let sick = health.get(&npu.stable_id).filter(|health| !health.reading.level.is_usable());
        if let Some(health) = sick.filter(|_| !replay) {
            let codes = match codes_text(&health.reading.codes) {
                codes if codes.is_empty() => codes,
                codes => format!(", codes {codes}"),
            };
            return Err(Refusal::Unhealthy { claim: claim.clone(), device, level: health.reading.level, codes });
        }
    }
    let cdi_device = if result.admin_access {
        format!("{}_look_{}", claim.uid, npu.stable_id)
    } else {
        format!("{}_{}", claim.uid, npu.stable_id)
    };
    Ok(Holding {
        requests: vec![result.main_request().to_owned()],
        pool: result.pool.clone(),
        device,
        stable_id: npu.stable_id.clone(),
        physical_ids: if result.admin_access { Vec::new() } else { npu.physical_ids() },
        admin_access: result.admin_access,
        share_id: None,
        cdi_device,
    })
}

/// A claim that is prepared keeps its devices until it is unprepared.
fn check_same_devices(before: &Record, ours: &[&AllocatedDevice]) -> Result<(), Refusal> {
    let prepared: BTreeSet<_> =
        before.devices.iter().map(|holding| (holding.device.as_str(), holding.admin_access)).collect();
    let allocated: BTreeSet<_> = ours.iter().map(|result| (result.device.as_str(), result.admin_access)).collect();
    if prepared == allocated {
        return Ok(());
    }
    Err(Refusal::Reallocated {
        claim: before.claim.clone(),
        prepared: before.device_names(),
        allocated: names(ours.iter().map(|result| result.device.as_str())),
    })
}

fn answer(driver: &DriverName, holding: &Holding) -> PreparedDevice {
    PreparedDevice {
        request_names: holding.requests.clone(),
        pool: holding.pool.clone(),
        device: holding.device.clone(),
        cdi_device_ids: vec![format!("{driver}/npu={}", holding.cdi_device)],
        share_id: holding.share_id.clone(),
    }
}

/// What the CDI file of a record holds.
#[must_use]
pub fn injection(record: &Record) -> Injection {
    let devices = record
        .devices
        .iter()
        .map(|holding| InjectedDevice { name: holding.cdi_device.clone(), physical_ids: holding.physical_ids.clone() })
        .collect();
    Injection { claim: record.claim.clone(), devices }
}

/// Plans an unprepare. Needs neither the API server nor the hardware; a claim that we never knew is success.
///
/// `file` tells whether a CDI file of the claim is on disk: a damaged record without one holds nothing.
pub fn unprepare(uid: &ClaimUid, ledger: &Ledger, file: bool) -> Result<Vec<Step>, Refusal> {
    if let Some(quarantined) = ledger.quarantined(uid)
        && file
    {
        return Err(Refusal::Quarantined { uid: uid.to_string(), why: quarantined.why.clone() });
    }
    Ok(release(uid))
}

/// Steps that let go of a claim whatever is known of it: root's `npuctl claims release UID --force`.
#[must_use]
pub fn release(uid: &ClaimUid) -> Vec<Step> {
    vec![Step::Withdraw(uid.clone()), Step::Forget(uid.clone())]
}

/// What start-up has to do.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recovery {
    /// Steps in any order: each claim has at most one.
    pub steps: Vec<Step>,
    /// Claims whose damaged records were rebuilt.
    pub rebuilt: Vec<ClaimUid>,
    /// CDI files that no record owned.
    pub swept: Vec<ClaimUid>,
}

/// Plans start-up: the records are the truth, the CDI directory is made to agree with them, and a damaged record is
/// rebuilt from its CDI file where card and file agree.
///
/// Records of an earlier boot keep their devices; they are re-done at the next prepare.
#[must_use]
pub fn recover(node: &Node, ledger: &Ledger, inventory: &Inventory, files: &[FoundFile], now: Timestamp) -> Recovery {
    let mut recovery = Recovery::default();
    for record in ledger.records().filter(|record| record.boot_id == node.boot_id) {
        recovery.steps.push(Step::Inject(injection(record)));
    }
    for file in files {
        if ledger.get(&file.uid).is_some() {
            continue;
        }
        if ledger.quarantined(&file.uid).is_some() {
            if let Some(record) = rebuild(node, file, inventory, ledger, now) {
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

/// The record that a CDI file stands for, if every device of it is a card of ours that nobody else owns.
fn rebuild(node: &Node, file: &FoundFile, inventory: &Inventory, ledger: &Ledger, now: Timestamp) -> Option<Record> {
    let content =
        file.content.as_ref().filter(|content| content.claim.uid == file.uid && !content.devices.is_empty())?;
    let mut devices = Vec::new();
    for device in &content.devices {
        let rest = device.name.strip_prefix(file.uid.as_str())?.strip_prefix('_')?;
        let (admin_access, id) = rest.strip_prefix("look_").map_or((false, rest), |id| (true, id));
        let npu = inventory.by_stable_id(&StableId::from_text(id)?)?;
        if !admin_access && ledger.owners(&npu.stable_id).next().is_some() {
            return None;
        }
        devices.push(Holding {
            requests: Vec::new(),
            pool: node.pool.to_string(),
            device: npu.name.to_string(),
            stable_id: npu.stable_id.clone(),
            physical_ids: if admin_access { Vec::new() } else { npu.physical_ids() },
            admin_access,
            share_id: None,
            cdi_device: device.name.clone(),
        });
    }
    let (claim, boot_id) = (content.claim.clone(), node.boot_id.clone());
    Some(Record { claim, boot_id, phase: Phase::Prepared, prepared_at: now, devices })
}

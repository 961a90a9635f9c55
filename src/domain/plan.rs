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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::domain::{
        health::{HealthReading, Level},
        inventory::tests::inventory_of,
        names::NodeName,
        npu::MissingChip,
        quantity::Quantity,
        record::Quarantined,
    };

    const BOOT: &str = "boot-1";

    fn node() -> Node {
        let pool = PoolName::of_node(&NodeName::new("master").unwrap()).unwrap();
        let driver = DriverName::new("npu.huawei.com").unwrap();
        Node { driver, pool, boot_id: BOOT.to_owned(), no_slicing: "not in this build" }
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
            })
            .collect();
        let claim = ClaimRef { namespace: "ml".to_owned(), name: format!("claim-{n}"), uid: uid(n) };
        AllocatedClaim { claim, results, config: Vec::new() }
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

    fn plan(claim: &AllocatedClaim, disk: &Disk) -> Result<Prepare, Refusal> {
        prepare(&node(), claim, &inventory_of(8), &HealthMap::new(), &disk.ledger(), now())
    }

    fn recovered(disk: &Disk) -> Disk {
        let mut disk = disk.clone();
        let ledger = disk.ledger();
        for step in recover(&node(), &ledger, &inventory_of(8), &disk.found(), now()).steps {
            disk.apply(&step);
        }
        disk
    }

    #[test]
    fn a_whole_npu_is_recorded_then_injected() {
        let prepared = plan(&claim(1, &[("npu-3", false)]), &Disk::default()).unwrap();
        let names: Vec<_> = prepared.steps.iter().map(Step::name).collect();
        assert_eq!(names, ["writing the record", "writing the CDI file"]);
        let id = "npu.huawei.com/npu=0000-1_0000A003-00000001-00000002-00000003-00000004";
        assert_eq!(
            prepared.answer,
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
        assert_eq!(look.answer.len(), 2);
        assert_eq!(look.answer[0].request_names, ["r0", "r1"]);
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
        let mut inventory = inventory_of(1);
        inventory.missing = vec![MissingChip { what: "card 3".to_owned(), why: "-8012".to_owned() }];
        let refusal =
            prepare(&node(), &claim(1, &[("npu-3", false)]), &inventory, &HealthMap::new(), &Ledger::default(), now());
        let text = refusal.unwrap_err().to_string();
        assert!(text.contains("card 3 (-8012)"), "{text}");
    }

    #[test]
    fn a_sick_card_takes_no_new_claim_but_keeps_the_one_it_has() {
        let inventory = inventory_of(8);
        let sick = Health {
            reading: HealthReading { codes: vec![0x80E0_1801], ..HealthReading::of(Level::Critical) },
            since: now(),
        };
        let health = HealthMap::from([(inventory.npus()[3].stable_id.clone(), sick)]);
        let wanted = claim(1, &[("npu-3", false)]);
        let refusal = prepare(&node(), &wanted, &inventory, &health, &Ledger::default(), now()).unwrap_err();
        assert!(refusal.to_string().ends_with("critical, codes 80E01801"), "{refusal}");
        let mut disk = Disk::default();
        plan(&wanted, &disk).unwrap().steps.iter().for_each(|step| disk.apply(step));
        prepare(&node(), &wanted, &inventory, &health, &disk.ledger(), now()).unwrap();
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
        let rebooted = Node { boot_id: "boot-2".to_owned(), ..node() };
        let later = Timestamp::from_second(2_000).unwrap();
        let again = prepare(&rebooted, &wanted, &inventory_of(8), &HealthMap::new(), &disk.ledger(), later).unwrap();
        assert_eq!(again.steps.len(), 2);
        assert_eq!((again.record.boot_id.as_str(), again.record.prepared_at), ("boot-2", later));
        assert_eq!(recover(&rebooted, &disk.ledger(), &inventory_of(8), &disk.found(), now()), Recovery::default());
    }

    #[test]
    fn a_damaged_record_holds_its_claim_until_it_is_rebuilt_from_its_file() {
        let mut disk = Disk::default();
        plan(&claim(1, &[("npu-3", false)]), &disk).unwrap().steps.iter().for_each(|step| disk.apply(step));
        let quarantined = Quarantined { uid: uid(1), why: "its checksum is wrong".to_owned(), path: String::new() };
        let mut ledger = Ledger::default();
        ledger.quarantine(quarantined);
        assert!(matches!(unprepare(&uid(1), &ledger, true), Err(Refusal::Quarantined { .. })));
        assert_eq!(unprepare(&uid(1), &ledger, false).unwrap(), release(&uid(1)));
        let recovery = recover(&node(), &ledger, &inventory_of(8), &disk.found(), now());
        assert_eq!(recovery.rebuilt, [uid(1)]);
        let Step::Write(record) = &recovery.steps[0] else { panic!("{recovery:?}") };
        assert_eq!(record.device_names(), "npu-3");
        assert_eq!(injection(record), disk.files[&uid(1)]);
        // Not if somebody else owns the card by now.
        plan(&claim(2, &[("npu-3", false)]), &Disk::default()).unwrap().steps.iter().for_each(|step| {
            if let Step::Write(record) = step {
                ledger.insert((**record).clone());
            }
        });
        assert_eq!(recover(&node(), &ledger, &inventory_of(8), &disk.found(), now()).rebuilt, []);
    }

    fn devices() -> impl Strategy<Value = Vec<(&'static str, bool)>> {
        let names = prop::sample::select(&["npu-0", "npu-1", "npu-2", "npu-3", "npu-4"][..]);
        prop::collection::vec((names, prop::bool::weighted(0.2)), 1..4)
    }

    proptest! {
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
                unprepare(&uid(99), &disk.ledger(), true).unwrap().iter().for_each(|step| disk.apply(step));
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
                prop_assert_eq!(&second.answer, &first.answer);
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
                    unprepare(&uid(99), &disk.ledger(), true).unwrap().iter().take(cut).for_each(|step| disk.apply(step));
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

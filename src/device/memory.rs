//! A backend for tests: it reads what it is told, cuts as the vendor's driver does, and fails as it is told.
//!
//! It has no clock, no threads and no randomness: the same calls give the same answers, fast enough for thousands of
//! random histories. Its table of templates is its own, so that a mistake in the driver's shows.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Mutex, MutexGuard, PoisonError},
};

use futures::{FutureExt, StreamExt as _, future::BoxFuture, stream::BoxStream};
use tokio::sync::broadcast;
use tokio_stream::wrappers::BroadcastStream;

use super::{Backend, Fault, Status, VendorMode};
use crate::domain::{
    health::{Alarm, HealthReading, Level},
    notice::Severity,
    npu::{ChipReading, Family, Scan},
    vnpu::{CardReading, Resources, VnpuReading},
};

const NAME: &str = "memory";

/// Alarms that wait for a reader.
const ALARMS: usize = 256;

/// Most vNPUs of a chip.
const MOST: usize = 16;

/// A template: name, part of the chip's memory (`1/n`), AI cores, AI CPUs, JPEG decoders, image engines.
type Row = (&'static str, u64, u32, u32, u32, u32);

/// Templates, AI CPUs, JPEG decoders and image engines of a 910B by its board id.
fn templates(board_id: u32) -> Option<(&'static [Row], u32, u32, u32)> {
    Some(match board_id {
        0x13 | 0x30 | 0x31 | 0x39 | 0x3a | 0x43 | 0x50 | 0x51 => {
            (&[("vir06_1c_16g", 4, 6, 1, 7, 2), ("vir12_3c_32g", 2, 12, 3, 14, 5)], 6, 28, 10)
        }
        0x10 | 0x12 | 0x32 | 0x38 | 0x3b | 0x3e | 0x42 | 0x53 => {
            (&[("vir05_1c_16g", 4, 5, 1, 6, 2), ("vir10_3c_32g", 2, 10, 3, 12, 4)], 7, 24, 8)
        }
        0x11 | 0x28 | 0x29 | 0x33 | 0x34 | 0x37 | 0x3c | 0x3d | 0x40 | 0x41 | 0x52 | 0x54 => {
            const ROWS: &[Row] = &[
                ("vir05_1c_8g", 4, 5, 1, 6, 2),
                ("vir10_3c_16g", 2, 10, 3, 12, 4),
                ("vir10_4c_16g_m", 2, 10, 4, 24, 9),
                ("vir10_3c_16g_nm", 2, 10, 3, 0, 0),
            ];
            (ROWS, 7, 24, 9)
        }
        _ => return None,
    })
}

/// How the simulated driver cuts.
#[allow(clippy::struct_excessive_bools, reason = "each is a way in which drivers differ")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cutting {
    /// False: no call for vNPUs is known.
    pub supported: bool,
    /// The driver chooses the id itself, whatever was asked.
    pub ignores_ids: bool,
    /// Each new vNPU really gets this memory in bytes instead of its part of the chip.
    pub real_memory: Option<u64>,
    /// Each new vNPU is shown under this name.
    pub real_name: Option<String>,
    /// False: what is left of a chip is not told.
    pub tells_free: bool,
    /// False: the processes on a chip are not told.
    pub tells_processes: bool,
    /// Whether vNPUs come back after a boot; `None`: not told.
    pub replay: Option<bool>,
    /// Whether the node cuts for virtual machines; `None`: not told.
    pub virtual_machines: Option<bool>,
}

impl Default for Cutting {
    fn default() -> Self {
        Self {
            supported: true,
            ignores_ids: false,
            real_memory: None,
            real_name: None,
            tells_free: true,
            tells_processes: true,
            replay: Some(true),
            virtual_machines: Some(false),
        }
    }
}

/// A vNPU as it really is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vnpu {
    /// Physical id of its chip.
    pub physical_id: u32,
    /// Template that it was made from.
    pub template: &'static str,
    /// Name under which it is shown.
    pub name: String,
    /// What it takes of its chip.
    pub takes: Resources,
    /// True while a container has it open: it cannot be destroyed.
    pub in_use: bool,
    image_engines: u32,
}

/// Calls that can be told to go wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Call {
    /// Reading a card.
    Card,
    /// Making a vNPU.
    Create,
    /// Destroying one.
    Destroy,
}

/// What goes wrong with a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Mishap {
    /// Nothing happens, and the call ends with this.
    Before(Fault),
    /// It happens, and the call ends with this all the same.
    After(Fault),
    /// Destroying: the vNPU is destroyed, made again under another id, and the call fails.
    Remade,
}

/// The backend.
#[derive(Debug)]
pub struct Memory {
    state: Mutex<State>,
    alarms: broadcast::Sender<Alarm>,
}

impl Default for Memory {
    fn default() -> Self {
        Self { state: Mutex::default(), alarms: broadcast::Sender::new(ALARMS) }
    }
}

/// A vNPU that the boot script makes again.
#[derive(Debug, Clone, Copy)]
struct Entry {
    id: u32,
    physical_id: u32,
    template: &'static str,
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
    cutting: Cutting,
    vnpus: BTreeMap<u32, Vnpu>,
    processes: BTreeMap<u32, Vec<i32>>,
    mishaps: BTreeMap<Call, VecDeque<Mishap>>,
    /// What the boot script makes again, in the order in which it does.
    boot_list: Vec<Entry>,
    disturbed: u64,
    suspended: bool,
}

fn failed(call: String, why: &str) -> Fault {
    Fault::Failed { backend: NAME, call, why: why.to_owned() }
}

fn busy(call: String, why: &str) -> Fault {
    Fault::Busy { backend: NAME, call, why: why.to_owned() }
}

/// Ids that vNPUs of a chip can have.
fn ids(physical_id: u32) -> std::ops::Range<u32> {
    100 + 16 * physical_id..116 + 16 * physical_id
}

impl State {
    /// Whether calls are answered at all.
    fn working(&self) -> Result<(), Fault> {
        if self.suspended {
            return Err(Fault::Suspended { backend: NAME });
        }
        self.fault.clone().map_or(Ok(()), Err)
    }

    /// The chip, if it is there and can be cut.
    fn chip(&self, physical_id: u32, call: &'static str) -> Result<&ChipReading, Fault> {
        self.working()?;
        let cannot = |why: &str| Fault::Unsupported { backend: NAME, call, why: why.to_owned() };
        if !self.cutting.supported {
            return Err(cannot("it was told to lack it"));
        }
        let chip = self.scan.chips.iter().find(|chip| chip.physical_id == physical_id);
        let chip = chip.ok_or(Fault::Gone { backend: NAME, chip: physical_id })?;
        if chip.family == Family::Ascend910B { Ok(chip) } else { Err(cannot("only a 910B can be cut")) }
    }

    fn of_chip(&self, physical_id: u32) -> impl Iterator<Item = (&u32, &Vnpu)> {
        self.vnpus.iter().filter(move |(_, vnpu)| vnpu.physical_id == physical_id)
    }

    /// What is left of a chip, and how many image engines.
    fn left(&self, chip: &ChipReading) -> (Resources, u32) {
        let (_, ai_cpus, media, image) = chip.board_id.and_then(templates).unwrap_or_default();
        let memory = chip.memory.unwrap_or(0);
        let whole = (Resources { memory, ai_cores: chip.ai_cores.unwrap_or(0), ai_cpus, media }, image);
        self.of_chip(chip.physical_id).fold(whole, |(left, image), (_, vnpu)| {
            let left = Resources {
                memory: left.memory.saturating_sub(vnpu.takes.memory),
                ai_cores: left.ai_cores.saturating_sub(vnpu.takes.ai_cores),
                ai_cpus: left.ai_cpus.saturating_sub(vnpu.takes.ai_cpus),
                media: left.media.saturating_sub(vnpu.takes.media),
            };
            (left, image.saturating_sub(vnpu.image_engines))
        })
    }

    fn card(&self, physical_id: u32) -> Result<CardReading, Fault> {
        let chip = self.chip(physical_id, "read vNPUs")?;
        let reading = |(id, vnpu): (&u32, &Vnpu)| VnpuReading {
            id: *id,
            template: vnpu.name.chars().take(15).collect(),
            memory: vnpu.takes.memory,
            ai_cores: vnpu.takes.ai_cores,
        };
        let processes = || self.processes.get(&physical_id).cloned().unwrap_or_default();
        Ok(CardReading {
            vnpus: self.of_chip(physical_id).map(reading).collect(),
            free: self.cutting.tells_free.then(|| self.left(chip).0),
            processes: self.cutting.tells_processes.then(processes),
        })
    }

    /// Makes a vNPU with this id, or with the first free one.
    fn create(&mut self, physical_id: u32, template: &str, id: Option<u32>) -> Result<u32, Fault> {
        let call = || format!("making {template} on chip {physical_id}");
        self.chip(physical_id, "make vNPUs")?;
        if id.is_some_and(|id| !ids(physical_id).contains(&id)) {
            return Err(failed(call(), "the number is not of this chip"));
        }
        let count = self.of_chip(physical_id).count();
        // The switch to slicing is thrown before anybody looks whether the chip is busy.
        let occupied = count == 0 && self.processes.get(&physical_id).is_some_and(|pids| !pids.is_empty());
        self.disturbed += u64::from(occupied);
        let chip = self.chip(physical_id, "make vNPUs")?;
        let rows = chip.board_id.and_then(templates).map_or(&[][..], |(rows, ..)| rows);
        let row = rows.iter().find(|(name, ..)| *name == template);
        let &(template, parts, ai_cores, ai_cpus, media, image_engines) =
            row.ok_or_else(|| failed(call(), "the chip has no such template"))?;
        if self.cutting.virtual_machines == Some(true) {
            return Err(failed(call(), "not permitted: the node cuts for virtual machines"));
        }
        let takes = Resources { memory: chip.memory.unwrap_or(0) / parts, ai_cores, ai_cpus, media };
        let (mut left, image) = self.left(chip);
        if self.cutting.real_memory.is_some() {
            // A driver that lies about memory is not held to it.
            left.memory = u64::MAX;
        }
        if count >= MOST || left.minus(takes).is_none() || image < image_engines {
            return Err(failed(call(), "it does not fit"));
        }
        if occupied {
            return Err(busy(call(), "a process runs on the chip"));
        }
        let mut range = ids(physical_id);
        let id = match id.filter(|_| !self.cutting.ignores_ids) {
            Some(id) if self.vnpus.contains_key(&id) => return Err(failed(call(), &format!("{id} is taken"))),
            Some(id) => id,
            None => range.find(|id| !self.vnpus.contains_key(id)).ok_or_else(|| failed(call(), "no number is free"))?,
        };
        let takes = Resources { memory: self.cutting.real_memory.unwrap_or(takes.memory), ..takes };
        let name = self.cutting.real_name.clone().unwrap_or_else(|| template.to_owned());
        self.vnpus.insert(id, Vnpu { physical_id, template, name, takes, in_use: false, image_engines });
        if self.cutting.replay == Some(true) {
            self.unlist(id);
            self.boot_list.push(Entry { id, physical_id, template });
        }
        Ok(id)
    }

    fn destroy(&mut self, physical_id: u32, id: u32) -> Result<(), Fault> {
        self.chip(physical_id, "destroy vNPUs")?;
        let call = || format!("destroying vnpu {id} of chip {physical_id}");
        if !ids(physical_id).contains(&id) {
            return Err(failed(call(), "it is not of this chip"));
        }
        if self.vnpus.get(&id).is_some_and(|vnpu| vnpu.in_use) {
            return Err(busy(call(), "it is in use"));
        }
        // One that is not there keeps its place in the list for the next boot: the driver finds that out first.
        if self.vnpus.remove(&id).is_some() {
            self.unlist(id);
        }
        Ok(())
    }

    fn unlist(&mut self, id: u32) {
        self.boot_list.retain(|entry| entry.id != id);
    }

    /// Makes a vNPU again under the next free id. The list for the next boot could not be saved: it stays as it was.
    fn remake(&mut self, physical_id: u32, id: u32) -> Result<(), Fault> {
        let (old, list) = (self.vnpus.get(&id).cloned(), self.boot_list.clone());
        self.destroy(physical_id, id)?;
        self.boot_list = list;
        let free = |new: &u32| *new != id && !self.vnpus.contains_key(new);
        let new = (id..ids(physical_id).end).chain(ids(physical_id)).find(free);
        self.vnpus.extend(new.zip(old));
        Err(failed(format!("destroying vnpu {id}"), "the list for the next boot cannot be saved"))
    }

    fn mishap(&mut self, call: Call) -> Option<Mishap> {
        self.mishaps.get_mut(&call)?.pop_front()
    }

    /// Does a call as the next mishap planted for it wants.
    fn attempt<T>(&mut self, call: Call, work: impl FnOnce(&mut Self) -> Result<T, Fault>) -> Result<T, Fault> {
        match self.mishap(call) {
            Some(Mishap::Before(fault)) => Err(fault),
            Some(Mishap::After(fault)) => work(self).and(Err(fault)),
            Some(Mishap::Remade) | None => work(self),
        }
    }
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

    /// Says something unasked.
    pub fn alarm(&self, alarm: Alarm) {
        // Without a reader nobody is to be told.
        let _ = self.alarms.send(alarm);
    }

    /// From now on every call fails like this; `None` ends it.
    pub fn set_fault(&self, fault: Option<Fault>) {
        self.state().fault = fault;
    }

    /// Changes how it cuts.
    pub fn cut(&self, change: impl FnOnce(&mut Cutting)) {
        change(&mut self.state().cutting);
    }

    /// The next call of this kind that nothing was planted for goes wrong like this.
    pub fn plant(&self, call: Call, mishap: Mishap) {
        self.state().mishaps.entry(call).or_default().push_back(mishap);
    }

    /// Takes away what was planted and has not happened.
    pub fn unplant(&self) {
        self.state().mishaps.clear();
    }

    /// All vNPUs as they really are, by id.
    #[must_use]
    pub fn vnpus(&self) -> BTreeMap<u32, Vnpu> {
        self.state().vnpus.clone()
    }

    /// Makes a vNPU as somebody else would, by the same rules; gives its id.
    pub fn add_vnpu(&self, physical_id: u32, template: &str) -> Result<u32, Fault> {
        self.state().create(physical_id, template, None)
    }

    /// Destroys a vNPU as somebody else would, in use or not; says whether it was there.
    pub fn remove_vnpu(&self, id: u32) -> bool {
        let mut state = self.state();
        state.unlist(id);
        state.vnpus.remove(&id).is_some()
    }

    /// A container opens a vNPU, or the last one has closed it.
    pub fn set_in_use(&self, id: u32, in_use: bool) {
        if let Some(vnpu) = self.state().vnpus.get_mut(&id) {
            vnpu.in_use = in_use;
        }
    }

    /// Sets the host pids of the processes on a chip.
    pub fn set_processes(&self, physical_id: u32, processes: &[i32]) {
        self.state().processes.insert(physical_id, processes.to_vec());
    }

    /// How often a chip with a process on it was to be cut for the first time: each time harms that process.
    #[must_use]
    pub fn disturbed(&self) -> u64 {
        self.state().disturbed
    }

    /// The machine restarts: vNPUs and processes are gone, and nothing was scanned yet. What the boot list has comes
    /// back with [`replay`](Self::replay).
    pub fn reboot(&self) {
        let mut state = self.state();
        state.vnpus.clear();
        state.processes.clear();
        state.mishaps.clear();
        state.seen = None;
    }

    /// The boot script makes the vNPUs of its list again, if it is switched on. Gives the ids made.
    pub fn replay(&self) -> Vec<u32> {
        let mut state = self.state();
        let list = if state.cutting.replay == Some(true) { state.boot_list.clone() } else { Vec::new() };
        let make = |Entry { id, physical_id, template }: Entry| {
            let there = state.vnpus.contains_key(&id);
            if there { None } else { state.create(physical_id, template, Some(id)).ok() }
        };
        list.into_iter().filter_map(make).collect()
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
            state.working()?;
            state.seen = Some(state.scan.chips.iter().map(|chip| chip.physical_id).collect());
            Ok(state.scan.clone())
        }
        .boxed()
    }

    fn health(&self) -> BoxFuture<'_, Result<BTreeMap<u32, HealthReading>, Fault>> {
        async move {
            let mut state = self.state();
            state.polls += 1;
            state.working()?;
            let Some(seen) = &state.seen else {
                return Err(Fault::NotReady { backend: NAME, why: "no scan yet".to_owned() });
            };
            let read = |id: &u32| (*id, state.health.get(id).cloned().unwrap_or_default());
            Ok(seen.iter().map(read).collect())
        }
        .boxed()
    }

    fn alarms(&self) -> BoxStream<'static, Alarm> {
        let alarms = BroadcastStream::new(self.alarms.subscribe());
        alarms.map(|alarm| alarm.unwrap_or(Alarm::Unsure)).chain(futures::stream::pending()).boxed()
    }

    fn suspend(&self) -> BoxFuture<'_, Result<(), Fault>> {
        async move {
            self.state().suspended = true;
            Ok(())
        }
        .boxed()
    }

    fn resume(&self) -> BoxFuture<'_, Result<(), Fault>> {
        async move {
            let mut state = self.state();
            (state.suspended, state.seen) = (false, None);
            Ok(())
        }
        .boxed()
    }

    fn status(&self) -> Status {
        let state = self.state();
        let fault = state.working().err();
        let (name, severity, detail) = match &fault {
            Some(fault @ Fault::Suspended { .. }) => ("suspended", Severity::Warning, fault.to_string()),
            None if state.seen.is_none() => ("starting", Severity::Info, "no scan yet".to_owned()),
            None => ("ready", Severity::Info, String::new()),
            Some(fault @ Fault::Hung { .. }) => ("hung", Severity::Error, fault.to_string()),
            Some(fault @ Fault::NotReady { .. }) => ("starting", Severity::Warning, fault.to_string()),
            Some(fault) => ("failed", Severity::Error, fault.to_string()),
        };
        Status { backend: NAME, state: name, source: String::new(), severity, detail }
    }

    fn card(&self, physical_id: u32) -> BoxFuture<'_, Result<CardReading, Fault>> {
        async move { self.state().attempt(Call::Card, |state| state.card(physical_id)) }.boxed()
    }

    fn create(&self, physical_id: u32, template: &str, id: u32) -> BoxFuture<'_, Result<u32, Fault>> {
        let template = template.to_owned();
        let create = move |state: &mut State| state.create(physical_id, &template, Some(id));
        async move { self.state().attempt(Call::Create, create) }.boxed()
    }

    fn destroy(&self, physical_id: u32, id: u32) -> BoxFuture<'_, Result<(), Fault>> {
        async move {
            let mut state = self.state();
            let remade = state.mishaps.get(&Call::Destroy).is_some_and(|next| next.front() == Some(&Mishap::Remade));
            state.attempt(Call::Destroy, |state| {
                if remade { state.remake(physical_id, id) } else { state.destroy(physical_id, id) }
            })
        }
        .boxed()
    }

    fn vendor(&self) -> BoxFuture<'_, Result<VendorMode, Fault>> {
        async move {
            let state = self.state();
            state.working()?;
            let Cutting { supported: true, replay, virtual_machines, .. } = state.cutting else {
                return Err(self.cannot("read the vNPU mode"));
            };
            let mut listed: Vec<u32> = state.boot_list.iter().map(|entry| entry.id).collect();
            listed.sort_unstable();
            Ok(VendorMode { replay, listed, virtual_machines })
        }
        .boxed()
    }

    fn set_replay(&self, on: bool) -> BoxFuture<'_, Result<(), Fault>> {
        async move {
            let mut state = self.state();
            state.working()?;
            if !state.cutting.supported {
                return Err(self.cannot("switch the vNPU replay"));
            }
            state.cutting.replay = Some(on);
            Ok(())
        }
        .boxed()
    }
}

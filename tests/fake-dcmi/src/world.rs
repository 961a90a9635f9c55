//! The simulated node as a directory, and what a test may do to it.
//!
//! ```text
//! world.json    cards, chips, behaviour ([`Data`])
//! faults.json   planted faults ([`FaultFile`])
//! vnpus/        one file per vNPU ([`Vnpu`])
//! events.log    fault events, one a line
//! dev/          where vdavinciN appears, unless `dev_dir` says otherwise
//! vnpu.cfg      the vendor's list for the next boot, unless `vnpu_cfg` says otherwise
//! calls.log     one line at the start and one at the end of each call
//! overlaps.log  calls that met another one
//! hits/         how often each fault was met
//! ```
//!
//! It outlives every process that loads the library. Everything is read again at each call, and every change here is
//! atomic, so a test may change the node under a running daemon.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

pub use crate::data::{
    Card, Chip, ChipState, Data, DiePolicy, Ecc, Environment, Family, Memory, NodeKind, Process, Slicing, Topology,
    Vnpu,
};
use crate::disk;
pub use crate::disk::WorldError;
pub use crate::fault::{Action, Fault, FaultFile, When};
pub use crate::profile::Profile;
use crate::slicing;

/// The variable that names the world directory to the library.
pub const VARIABLE: &str = "FAKE_DCMI_WORLD";

/// A simulated node.
#[derive(Clone, Debug)]
pub struct World {
    dir: PathBuf,
}

/// Held while a file of the world changes.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
}

impl World {
    /// Makes a new node in `dir`, which is created; what an older world left there is removed.
    pub fn create(dir: impl Into<PathBuf>, profile: Profile) -> Result<Self, WorldError> {
        Self::create_with(dir, &profile.data())
    }

    /// The same from any data.
    pub fn create_with(dir: impl Into<PathBuf>, data: &Data) -> Result<Self, WorldError> {
        let world = Self { dir: dir.into() };
        for name in ["vnpus", "hits", "dev"] {
            let path = world.dir.join(name);
            match fs::remove_dir_all(&path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(disk::at(&path)(error)),
                _ => fs::create_dir_all(&path).map_err(disk::at(&path))?,
            }
        }
        for name in ["calls.log", "overlaps.log", "events.log", "vnpu.cfg", "faults.json"] {
            match fs::remove_file(world.dir.join(name)) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(disk::at(&world.dir.join(name))(error));
                }
                _ => {}
            }
        }
        let lock = world.lock()?;
        disk::save(&world.path("faults.json"), &FaultFile::default())?;
        disk::save(&world.path("world.json"), data)?;
        drop(lock);
        Ok(world)
    }

    /// Opens an existing node.
    pub fn open(dir: impl Into<PathBuf>) -> Result<Self, WorldError> {
        let world = Self { dir: dir.into() };
        world.data()?;
        Ok(world)
    }

    /// A handle without a look at the directory.
    pub(crate) const fn at(dir: PathBuf) -> Self {
        Self { dir }
    }

    /// The directory, to be put into [`VARIABLE`].
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Waits until nobody else changes the world.
    pub(crate) fn lock(&self) -> Result<Lock, WorldError> {
        let path = self.path("world.lock");
        let file = disk::lock_file(&path)?;
        file.lock().map_err(disk::at(&path))?;
        Ok(Lock { _file: file })
    }

    /// The node as it is now.
    pub fn data(&self) -> Result<Data, WorldError> {
        disk::load(&self.path("world.json"))
    }

    /// Changes the node: no call sees half of the change.
    pub fn edit<R>(&self, change: impl FnOnce(&mut Data) -> R) -> Result<R, WorldError> {
        let lock = self.lock()?;
        self.edit_locked(&lock, change)
    }

    pub(crate) fn edit_locked<R>(&self, _lock: &Lock, change: impl FnOnce(&mut Data) -> R) -> Result<R, WorldError> {
        let mut data = self.data()?;
        let result = change(&mut data);
        disk::save(&self.path("world.json"), &data)?;
        Ok(result)
    }

    /// Changes one chip, found by physical id.
    pub fn edit_chip(&self, phy: u32, change: impl FnOnce(&mut Chip)) -> Result<(), WorldError> {
        self.edit(|data| data.chip_mut(phy).map(change))?.ok_or(WorldError::NoChip(phy))
    }

    /// Sets the health value of a chip: 0 ok … 3 critical, 4 unknown, 0xFFFFFFFF gone.
    pub fn set_health(&self, phy: u32, health: u32) -> Result<(), WorldError> {
        self.edit_chip(phy, |chip| chip.health = health)
    }

    /// Sets the current fault codes of a chip; sends no event.
    pub fn set_fault_codes(&self, phy: u32, codes: &[u32]) -> Result<(), WorldError> {
        self.edit_chip(phy, |chip| chip.errors = codes.to_vec())
    }

    /// Sets the ECC counters of a chip.
    pub fn set_ecc(&self, phy: u32, ecc: Ecc) -> Result<(), WorldError> {
        self.edit_chip(phy, |chip| chip.ecc = ecc)
    }

    /// Sets the processes that use a chip.
    pub fn set_processes(&self, phy: u32, processes: &[Process]) -> Result<(), WorldError> {
        self.edit_chip(phy, |chip| chip.processes = processes.to_vec())
    }

    /// The chip falls off the bus.
    pub fn drop_chip(&self, phy: u32) -> Result<(), WorldError> {
        self.edit_chip(phy, |chip| {
            chip.state = ChipState::Dropped;
            chip.epoch += 1;
        })
    }

    /// The chip is back; processes see it again after a new init.
    pub fn return_chip(&self, phy: u32) -> Result<(), WorldError> {
        self.edit_chip(phy, |chip| chip.state = ChipState::Up)
    }

    /// Sets whether a chip answers.
    pub fn set_state(&self, phy: u32, state: ChipState) -> Result<(), WorldError> {
        self.edit_chip(phy, |chip| chip.state = state)
    }

    /// Changes the order of enumeration: card `order[i]` (index in [`Data::cards`]) comes `i`-th. Card ids and logic ids
    /// change, physical ids and PCI addresses stay. An order that is no permutation leaves the rest behind it.
    pub fn reorder_cards(&self, order: &[usize]) -> Result<(), WorldError> {
        self.edit(|data| {
            let mut old: Vec<Option<Card>> = std::mem::take(&mut data.cards).into_iter().map(Some).collect();
            let mut cards: Vec<Card> = order.iter().filter_map(|index| old.get_mut(*index)?.take()).collect();
            cards.extend(old.into_iter().flatten());
            data.cards = cards;
        })
    }

    /// Swaps the hardware of two sockets: what belongs to a chip (die ids, health, faults) changes places, what belongs
    /// to a socket (physical id, PCI address, NUMA node) stays.
    pub fn swap_chips(&self, a: u32, b: u32) -> Result<(), WorldError> {
        self.edit(|data| {
            let (first, second) = (data.chip(a)?.clone(), data.chip(b)?.clone());
            let socket = |chip: Chip, socket: &Chip| Chip {
                phy: socket.phy,
                bus: socket.bus.clone(),
                numa: socket.numa,
                epoch: socket.epoch + 1,
                ..chip
            };
            *data.chip_mut(a)? = socket(second.clone(), &first);
            *data.chip_mut(b)? = socket(first, &second);
            Some(())
        })?
        .ok_or(WorldError::NoChip(a.max(b)))
    }

    /// Makes the device nodes of the chips present and of the managers in `dev_dir` (not those of vNPUs).
    pub fn make_nodes(&self) -> Result<(), WorldError> {
        let data = self.data()?;
        let chips = data.chips().filter(|chip| chip.state != ChipState::Dropped);
        let names = chips.map(|chip| format!("davinci{}", chip.phy));
        for name in names.chain(["davinci_manager", "devmm_svm", "hisi_hdc"].map(str::to_owned)) {
            slicing::make_node(self, &data, &name)?;
        }
        Ok(())
    }

    /// The planted faults.
    #[must_use]
    pub const fn faults(&self) -> Faults<'_> {
        Faults { world: self }
    }

    /// All vNPUs, by id.
    pub fn vnpus(&self) -> Result<Vec<Vnpu>, WorldError> {
        slicing::all(self)
    }

    /// Makes a vNPU as somebody else would (with `npu-smi`): the same rules, no call logged.
    pub fn add_vnpu(&self, phy: u32, template: &str) -> Result<u32, WorldError> {
        let wish = slicing::Wish { phy, template, id: None, vfg: None, maker: 0 };
        slicing::create(self, &wish, &|| Ok(())).map(|vnpu| vnpu.id).map_err(WorldError::Refused)
    }

    /// Destroys a vNPU as somebody else would, in use or not.
    pub fn remove_vnpu(&self, id: u32) -> Result<(), WorldError> {
        slicing::remove(self, id)
    }

    /// A container opens the node of a vNPU; `None`: the last process has closed it.
    pub fn open_vnpu(&self, id: u32, container: Option<u64>) -> Result<(), WorldError> {
        let lock = self.lock()?;
        let mut vnpu = slicing::find(self, id)?.ok_or(WorldError::NoVnpu(id))?;
        vnpu.in_use = container.is_some();
        vnpu.container = container.unwrap_or(0);
        let result = slicing::store(self, &vnpu);
        drop(lock);
        result
    }

    /// The machine restarts: vNPUs, their nodes, processes and sharing are gone, every chip that did not fail is back.
    /// What `vnpu.cfg` lists comes back with [`World::replay`].
    pub fn reboot(&self) -> Result<(), WorldError> {
        for vnpu in self.vnpus()? {
            slicing::forget(self, vnpu.id)?;
        }
        self.edit(|data| {
            for chip in data.cards.iter_mut().flat_map(|card| &mut card.chips) {
                chip.processes.clear();
                chip.shared = false;
                chip.sriov = false;
                chip.epoch += 1;
                if chip.state == ChipState::Resetting {
                    chip.state = ChipState::Up;
                }
            }
        })
    }

    /// The vendor's boot script makes the vNPUs of `vnpu.cfg` again, if recover mode is on. Gives the ids made.
    pub fn replay(&self) -> Result<Vec<u32>, WorldError> {
        slicing::replay(self)
    }

    /// Holds the lock of `vnpu.cfg`, as a running `npu-smi` does, until the guard is dropped.
    pub fn hold_config_lock(&self) -> Result<ConfigLock, WorldError> {
        let path = self.path("vnpu_cfg.lock");
        let file = disk::lock_file(&path)?;
        file.lock().map_err(disk::at(&path))?;
        Ok(ConfigLock { _file: file })
    }

    /// A fault occurs: its code joins the chip's current codes and an event is sent.
    pub fn occur(&self, phy: u32, code: u32, severity: u8) -> Result<(), WorldError> {
        self.edit_chip(phy, |chip| {
            if !chip.errors.contains(&code) {
                chip.errors.push(code);
            }
        })?;
        self.send_event(Notice { phy, code, severity, assertion: Assertion::Occurred })
    }

    /// A fault is over: its code leaves the chip's current codes and an event is sent.
    pub fn recover(&self, phy: u32, code: u32, severity: u8) -> Result<(), WorldError> {
        self.edit_chip(phy, |chip| chip.errors.retain(|current| *current != code))?;
        self.send_event(Notice { phy, code, severity, assertion: Assertion::Recovered })
    }

    /// Sends an event and changes nothing else.
    pub fn send_event(&self, notice: Notice) -> Result<(), WorldError> {
        self.send_events(&[notice])
    }

    /// Sends events at once and changes nothing else.
    pub fn send_events(&self, notices: &[Notice]) -> Result<(), WorldError> {
        self.append_events(notices.iter().map(|notice| (*notice, None)))
    }

    /// Sends an event with this logic id, whether any chip has it or not; the notice's chip does not count.
    pub fn send_stray_event(&self, logic: u16, notice: Notice) -> Result<(), WorldError> {
        self.append_events([(notice, Some(logic))])
    }

    fn append_events(&self, notices: impl IntoIterator<Item = (Notice, Option<u16>)>) -> Result<(), WorldError> {
        let lock = self.lock()?;
        let first = crate::events::end(self)?;
        let at_ms = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
        let at_ms = u64::try_from(at_ms).unwrap_or(u64::MAX);
        let events: Vec<_> = (first..)
            .zip(notices)
            .map(|(number, (notice, stray))| StoredEvent { number, at_ms, notice, stray })
            .collect();
        let result = crate::events::append(self, &events);
        drop(lock);
        result
    }

    /// Calls made so far.
    pub fn calls(&self) -> Result<Calls, WorldError> {
        let path = self.path("calls.log");
        match fs::read_to_string(&path) {
            Ok(text) => Ok(Calls::parse(&text)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Calls::default()),
            Err(error) => Err(disk::at(&path)(error)),
        }
    }

    /// Forgets the calls made so far.
    pub fn clear_calls(&self) -> Result<(), WorldError> {
        let path = self.path("calls.log");
        let file = File::options().create(true).append(true).open(&path).map_err(disk::at(&path))?;
        file.set_len(0).map_err(disk::at(&path))
    }

    /// One line per call that met another one: the library allows one at a time. Empty when all is well.
    pub fn overlaps(&self) -> Result<Vec<String>, WorldError> {
        let path = self.path("overlaps.log");
        match fs::read_to_string(&path) {
            Ok(text) => Ok(text.lines().map(str::to_owned).collect()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(disk::at(&path)(error)),
        }
    }
}

/// See [`World::hold_config_lock`].
#[derive(Debug)]
pub struct ConfigLock {
    _file: File,
}

/// The planted faults of a world.
#[derive(Clone, Copy, Debug)]
pub struct Faults<'a> {
    world: &'a World,
}

impl Faults<'_> {
    fn path(self) -> PathBuf {
        self.world.path("faults.json")
    }

    fn edit(self, change: impl FnOnce(&mut Vec<Fault>)) -> Result<(), WorldError> {
        let lock = self.world.lock()?;
        let mut file: FaultFile = disk::load(&self.path())?;
        change(&mut file.rules);
        let result = disk::save(&self.path(), &file);
        drop(lock);
        result
    }

    /// A rule whose count starts now.
    fn fresh(fault: Fault) -> Fault {
        use std::sync::atomic::{AtomicU64, Ordering};
        static NEXT: AtomicU64 = AtomicU64::new(0);
        if !fault.id.is_empty() {
            return fault;
        }
        let nanos = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Fault { id: format!("{}-{nanos}-{}-{number}", fault.function.replace('*', "all"), std::process::id()), ..fault }
    }

    /// Plants exactly these faults; counting starts now.
    pub fn set(self, faults: impl IntoIterator<Item = Fault>) -> Result<(), WorldError> {
        let fresh: Vec<Fault> = faults.into_iter().map(Self::fresh).collect();
        self.edit(|rules| *rules = fresh)
    }

    /// Plants one more; gives its id for [`Faults::hits`] and [`Faults::remove`].
    pub fn plant(self, fault: Fault) -> Result<String, WorldError> {
        let fresh = Self::fresh(fault);
        let id = fresh.id.clone();
        self.edit(|rules| rules.push(fresh))?;
        Ok(id)
    }

    /// Takes one away.
    pub fn remove(self, id: &str) -> Result<(), WorldError> {
        self.edit(|rules| rules.retain(|fault| fault.id != id))
    }

    /// Takes all away.
    pub fn clear(self) -> Result<(), WorldError> {
        self.edit(Vec::clear)
    }

    /// The planted faults.
    pub fn get(self) -> Result<Vec<Fault>, WorldError> {
        Ok(disk::load::<FaultFile>(&self.path())?.rules)
    }

    /// How many calls have matched this rule, harmed or not.
    #[must_use]
    pub fn hits(self, id: &str) -> u64 {
        fs::metadata(self.world.path("hits").join(id.replace('/', "_"))).map_or(0, |metadata| metadata.len())
    }
}

/// What a fault event says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Notice {
    /// Physical id of the chip; subscribers get its logic id.
    pub phy: u32,
    /// Fault code.
    pub code: u32,
    /// 0 suggestion, 1 minor, 2 major, 3 critical.
    pub severity: u8,
    /// What happened to the fault.
    pub assertion: Assertion,
}

/// What happened to a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Assertion {
    /// It is over.
    Recovered,
    /// It has begun.
    Occurred,
    /// It has no duration.
    OneShot,
}

/// An event in `events.log`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct StoredEvent {
    /// Grows from event to event.
    pub(crate) number: u64,
    pub(crate) at_ms: u64,
    pub(crate) notice: Notice,
    /// The logic id, if it is not that of the notice's chip.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) stray: Option<u16>,
}

/// One call of the library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// C name of the function.
    pub function: String,
    /// Calling process.
    pub pid: u32,
    /// Card id argument; none for calls that have none.
    pub card: Option<i32>,
    /// Device id argument.
    pub device: Option<i32>,
    /// Start, in microseconds since the epoch.
    pub start_us: u64,
    /// End; none if the call has not ended (running, or its process died in it).
    pub end_us: Option<u64>,
    /// What it returned.
    pub code: Option<i32>,
}

/// Calls in the order of their start.
#[derive(Clone, Debug, Default)]
pub struct Calls {
    /// The calls.
    pub list: Vec<Call>,
}

impl Calls {
    /// Lines are `+ start pid thread function card device` and `- end pid thread function code`.
    fn parse(text: &str) -> Self {
        let mut list: Vec<Call> = Vec::new();
        let mut open: BTreeMap<(u32, String), usize> = BTreeMap::new();
        for line in text.lines() {
            let words: Vec<&str> = line.split(' ').collect();
            let [sign, time, pid, thread, function, rest @ ..] = words.as_slice() else { continue };
            let (Ok(time), Ok(pid)) = (time.parse::<u64>(), pid.parse::<u32>()) else { continue };
            let key = (pid, (*thread).to_owned());
            if *sign == "+" {
                let number = |index: usize| rest.get(index).and_then(|word| word.parse().ok());
                open.insert(key, list.len());
                list.push(Call {
                    function: (*function).to_owned(),
                    pid,
                    card: number(0),
                    device: number(1),
                    start_us: time,
                    end_us: None,
                    code: None,
                });
            } else if let Some(call) = open.remove(&key).and_then(|index| list.get_mut(index)) {
                call.end_us = Some(time);
                call.code = rest.first().and_then(|word| word.parse().ok());
            }
        }
        Self { list }
    }

    /// Number of calls of this function.
    #[must_use]
    pub fn count(&self, function: &str) -> usize {
        self.of(function).count()
    }

    /// Calls of this function.
    pub fn of<'a>(&'a self, function: &'a str) -> impl Iterator<Item = &'a Call> {
        self.list.iter().filter(move |call| call.function == function)
    }

    /// Number of all calls.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.list.len()
    }

    /// Whether no call was made.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Calls that have started and not ended.
    pub fn unfinished(&self) -> impl Iterator<Item = &Call> {
        self.list.iter().filter(|call| call.code.is_none())
    }
}

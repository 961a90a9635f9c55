//! What one process knows of the world, and the frame around every call: count it, find overlaps, obey faults.

use core::ffi::{c_char, c_int};
use core::mem::MaybeUninit;
use std::cell::RefCell;
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use nix::sys::signal::{self, SigHandler, Signal};
use nix::unistd::{Pid, getppid};
use serde::de::DeserializeOwned;

use crate::code::{self, Answer};
use crate::data::{Chip, ChipState, Data, Family};
use crate::disk::{self, Stamp, WorldError};
use crate::fault::{Action, Fault, FaultFile, LAST_WAIT, When};
use crate::raw::Plain;
use crate::world::{VARIABLE, World};

/// A place for one result, given by the caller; `None` is a null pointer.
pub type Out<'a, T> = Option<&'a mut MaybeUninit<T>>;

thread_local! {
    static OVERRIDE: RefCell<Option<PathBuf>> = const { RefCell::new(None) };
}

static SESSIONS: Mutex<Vec<(PathBuf, Arc<Session>)>> = Mutex::new(Vec::new());

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The cards as `dcmi_init` found them. It stays as it is until the next init.
#[derive(Debug)]
pub(crate) struct Snapshot {
    pub(crate) cards: Vec<SnapCard>,
}

/// One entry of the card list.
#[derive(Debug)]
pub(crate) struct SnapCard {
    /// Card id, -1 for one that did not come up.
    pub(crate) id: i32,
    pub(crate) chips: Vec<SnapChip>,
    pub(crate) failed: i32,
    pub(crate) mcu: bool,
}

/// One chip of the snapshot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SnapChip {
    pub(crate) phy: u32,
    pub(crate) logic: u32,
    epoch: u64,
}

impl Snapshot {
    /// Counts what is there: cards and logic ids are dense, unless a card has an id of its own.
    fn take(data: &Data) -> Self {
        let (mut cards, mut logic, mut number) = (Vec::new(), 0, 0);
        for card in &data.cards {
            let failed = card.chips.iter().filter(|chip| chip.state == ChipState::Failed).count();
            let mut chips = Vec::new();
            for chip in &card.chips {
                if matches!(chip.state, ChipState::Up | ChipState::Resetting) {
                    chips.push(SnapChip { phy: chip.phy, logic, epoch: chip.epoch });
                    logic += 1;
                }
            }
            if chips.is_empty() && failed == 0 {
                continue;
            }
            let id = if chips.is_empty() { -1 } else { card.id.unwrap_or(number) };
            number += 1;
            let failed = i32::try_from(failed).unwrap_or(i32::MAX);
            cards.push(SnapCard { id, chips, failed, mcu: card.mcu });
        }
        Self { cards }
    }

    fn chips(&self) -> impl Iterator<Item = SnapChip> {
        self.cards.iter().flat_map(|card| &card.chips).copied()
    }
}

/// The last version of a file that was read.
struct Cached<T> {
    path: PathBuf,
    last: Mutex<Option<(Stamp, Arc<T>)>>,
}

impl<T: DeserializeOwned + Default> Cached<T> {
    const fn new(path: PathBuf) -> Self {
        Self { path, last: Mutex::new(None) }
    }

    /// The content now; the default if there is no file.
    fn get(&self) -> Result<Arc<T>, WorldError> {
        let mut last = locked(&self.last);
        let Some(stamp) = disk::current(&self.path)? else { return Ok(Arc::default()) };
        if let Some((old, value)) = &*last
            && *old == stamp
        {
            return Ok(Arc::clone(value));
        }
        let value: Arc<T> = Arc::new(disk::load(&self.path)?);
        *last = Some((stamp, Arc::clone(&value)));
        Ok(value)
    }
}

/// One process (or one test thread) and its world.
pub(crate) struct Session {
    pub(crate) world: World,
    gate: Mutex<File>,
    log: File,
    overlaps: File,
    data: Cached<Data>,
    faults: Cached<FaultFile>,
    snapshot: Mutex<Option<Arc<Snapshot>>>,
    pub(crate) subscribed: AtomicBool,
    /// The last event that the pull form gave away; `u64::MAX` before the first pull.
    pub(crate) pulled: AtomicU64,
}

impl Session {
    fn open(dir: &Path) -> Result<Self, WorldError> {
        let world = World::at(dir.to_owned());
        let append = |name: &str| {
            let path = world.path(name);
            File::options().create(true).append(true).open(&path).map_err(disk::at(&path))
        };
        Ok(Self {
            gate: Mutex::new(disk::lock_file(&world.path("call.lock"))?),
            log: append("calls.log")?,
            overlaps: append("overlaps.log")?,
            data: Cached::new(world.path("world.json")),
            faults: Cached::new(world.path("faults.json")),
            snapshot: Mutex::new(None),
            subscribed: AtomicBool::new(false),
            pulled: AtomicU64::new(u64::MAX),
            world,
        })
    }

    fn current() -> Result<Arc<Self>, String> {
        let dir = OVERRIDE
            .with_borrow(Clone::clone)
            .or_else(|| std::env::var_os(VARIABLE).map(PathBuf::from))
            .ok_or_else(|| format!("the variable {VARIABLE} must name the directory of a simulated node"))?;
        let mut sessions = locked(&SESSIONS);
        if let Some((_, session)) = sessions.iter().find(|(path, _)| *path == dir) {
            return Ok(Arc::clone(session));
        }
        let session = Arc::new(Self::open(&dir).map_err(|error| error.to_string())?);
        sessions.push((dir, Arc::clone(&session)));
        Ok(session)
    }

    pub(crate) fn data(&self) -> Result<Arc<Data>, WorldError> {
        self.data.get()
    }

    pub(crate) fn snapshot(&self) -> Option<Arc<Snapshot>> {
        locked(&self.snapshot).clone()
    }

    fn note_overlap(&self, function: &str, other: &str) {
        let line = format!("{} {} {} met a call of {other}\n", micros(), std::process::id(), function);
        let _ = (&self.overlaps).write_all(line.as_bytes());
    }

    fn run(&self, function: &'static str, target: Option<(i32, i32)>, body: Body<'_>) -> c_int {
        let gate = match self.gate.try_lock() {
            Ok(gate) => gate,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                self.note_overlap(function, "another thread");
                return code::RESOURCE_OCCUPIED;
            }
        };
        if gate.try_lock().is_err() {
            self.note_overlap(function, "another process");
            return code::RESOURCE_OCCUPIED;
        }
        // Counted before it is logged: whoever sees the call in the log knows that its faults were counted.
        let striking = self.striking(function, target);
        let (pid, thread) = (std::process::id(), nix::unistd::gettid());
        let (card, device) =
            target.map_or((String::from("-"), String::from("-")), |(c, d)| (c.to_string(), d.to_string()));
        let line = format!("+ {} {pid} {thread} {function} {card} {device}\n", micros());
        let _ = (&self.log).write_all(line.as_bytes());
        let result = striking.and_then(|striking| self.obey(&striking, target, body)).unwrap_or_else(|error| {
            complain(&error.to_string());
            code::INNER_ERR
        });
        let line = format!("- {} {pid} {thread} {function} {result}\n", micros());
        let _ = (&self.log).write_all(line.as_bytes());
        let _ = gate.unlock();
        result
    }

    /// The planted faults that strike this call.
    fn striking(&self, function: &str, target: Option<(i32, i32)>) -> Result<Vec<Fault>, WorldError> {
        let faults = self.faults.get()?;
        let mut striking = Vec::new();
        for fault in faults.rules.iter().filter(|fault| fault.matches(function, target)) {
            if fault.strikes(self.count(fault)?) {
                striking.push(fault.clone());
            }
        }
        Ok(striking)
    }

    /// Runs a call between the faults planted before and after it.
    fn obey(&self, striking: &[Fault], target: Option<(i32, i32)>, body: Body<'_>) -> Result<i32, WorldError> {
        let mut garbage = false;
        for fault in striking.iter().filter(|fault| fault.when == When::Before) {
            garbage |= fault.action == Action::Garbage;
            if let Some(code) = self.strike(fault.action, target)? {
                return Ok(code);
            }
        }
        let during = striking.iter().filter(|fault| fault.when == When::During).map(|fault| fault.action).collect();
        let call = Call { session: self, data: self.data()?, snapshot: self.snapshot(), garbage, target, during };
        let mut result = body(&call).err().unwrap_or(code::OK);
        for fault in striking.iter().filter(|fault| fault.when == When::After) {
            if let Some(code) = self.strike(fault.action, target)? {
                result = code;
            }
        }
        Ok(result)
    }

    /// Counts a matching call in a file, so that the count goes on after the process died.
    fn count(&self, fault: &Fault) -> Result<u64, WorldError> {
        let path = self.world.path("hits").join(fault.counter());
        let mut file = File::options().create(true).append(true).open(&path).map_err(disk::at(&path))?;
        file.write_all(b".").map_err(disk::at(&path))?;
        Ok(file.metadata().map_err(disk::at(&path))?.len())
    }

    /// Does what a fault says; gives a code if the call ends with it.
    fn strike(&self, action: Action, target: Option<(i32, i32)>) -> Result<Option<i32>, WorldError> {
        match action {
            Action::Return(code) => return Ok(Some(code)),
            Action::DelayMs(ms) => wait(ms),
            Action::Hang => loop {
                thread::sleep(Duration::from_hours(1)); // waits: for ever, as planted
            },
            Action::Crash => crash(),
            Action::KillSelf => {
                let _ = signal::kill(Pid::this(), Signal::SIGKILL);
                thread::sleep(LAST_WAIT); // waits: for its own end
            }
            Action::KillParent => {
                let parent = getppid();
                if parent.as_raw() > 1 {
                    let _ = signal::kill(parent, Signal::SIGKILL);
                }
                thread::sleep(LAST_WAIT); // waits: for its own end
                return Ok(Some(code::INNER_ERR));
            }
            Action::Drop => {
                if let Some(chip) = self.snapshot().and_then(|snapshot| seat(&snapshot, target?)) {
                    self.world.drop_chip(chip.phy)?;
                }
            }
            Action::Garbage => {}
        }
        Ok(None)
    }
}

type Body<'a> = Box<dyn FnOnce(&Call<'_>) -> Answer + 'a>;

fn seat(snapshot: &Snapshot, (card, device): (i32, i32)) -> Option<SnapChip> {
    let card = snapshot.cards.iter().find(|entry| entry.id == card && card >= 0)?;
    card.chips.get(usize::try_from(device).ok()?).copied()
}

fn micros() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros()
}

/// A world that cannot be read is a mistake of the test: say so where somebody will look.
pub(crate) fn complain(text: &str) {
    let _ = writeln!(std::io::stderr(), "fake libdcmi: {text}");
}

/// Takes this many milliseconds.
pub(crate) fn wait(ms: u64) {
    let end = Instant::now() + Duration::from_millis(ms);
    while let Some(left) = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
        thread::sleep(left); // waits: the latency that the world asks for
    }
}

/// Ends the process with SIGSEGV, whatever handlers it has.
fn crash() -> ! {
    // SAFETY: the default action replaces a handler; no code of ours runs in a handler.
    let _ = unsafe { signal::signal(Signal::SIGSEGV, SigHandler::SigDfl) };
    let _ = signal::raise(Signal::SIGSEGV);
    std::process::abort()
}

/// The frame around every exported function.
pub(crate) fn call(
    function: &'static str,
    target: Option<(i32, i32)>,
    body: impl FnOnce(&Call<'_>) -> Answer,
) -> c_int {
    match Session::current() {
        Ok(session) => session.run(function, target, Box::new(body)),
        Err(reason) => {
            complain(&reason);
            code::INNER_ERR
        }
    }
}

/// Runs `body` with this world for calls of this thread.
pub(crate) fn with_world<R>(dir: &Path, body: impl FnOnce() -> R) -> R {
    struct Reset(Option<PathBuf>);
    impl Drop for Reset {
        fn drop(&mut self) {
            OVERRIDE.set(self.0.take());
        }
    }
    let _reset = Reset(OVERRIDE.replace(Some(dir.to_owned())));
    body()
}

/// Forgets what this process knows of a world, as a new process would.
pub(crate) fn forget(dir: &Path) {
    locked(&SESSIONS).retain(|(path, _)| path != dir);
}

/// The session of the calling thread, for threads that go on after a call.
pub(crate) fn current() -> Option<Arc<Session>> {
    Session::current().ok()
}

/// One call in progress.
pub(crate) struct Call<'a> {
    pub(crate) session: &'a Session,
    pub(crate) data: Arc<Data>,
    snapshot: Option<Arc<Snapshot>>,
    garbage: bool,
    target: Option<(i32, i32)>,
    during: Vec<Action>,
}

impl Call<'_> {
    /// `dcmi_init`: the card table is built anew, in place.
    pub(crate) fn init(&self) -> Answer {
        wait(self.data.init_ms);
        let snapshot = Snapshot::take(&self.data);
        if snapshot.chips().next().is_none() {
            return Err(code::INNER_ERR);
        }
        *locked(&self.session.snapshot) = Some(Arc::new(snapshot));
        Ok(())
    }

    /// Whether an init has worked in this process.
    pub(crate) const fn ready(&self) -> bool {
        self.snapshot.is_some()
    }

    /// The entries of the card list; none before init.
    pub(crate) fn cards(&self) -> &[SnapCard] {
        self.snapshot.as_ref().map_or(&[], |snapshot| &snapshot.cards)
    }

    /// All chips of the snapshot with their card and device ids.
    pub(crate) fn seats(&self) -> impl Iterator<Item = (i32, i32, SnapChip)> {
        self.cards().iter().flat_map(|card| (0..).zip(&card.chips).map(move |(device, chip)| (card.id, device, *chip)))
    }

    /// A card by id. Entries listed as -1 cannot be addressed.
    pub(crate) fn card(&self, id: i32) -> Answer<&SnapCard> {
        self.cards().iter().find(|card| card.id == id && id >= 0).ok_or(code::INVALID_PARAMETER)
    }

    /// A chip by card and device id, whether it still answers or not.
    pub(crate) fn seat(&self, card: i32, device: i32) -> Answer<SnapChip> {
        let card = self.card(card)?;
        let index = usize::try_from(device).map_err(|_| code::INVALID_PARAMETER)?;
        if card.mcu && index == card.chips.len() {
            return Err(code::NOT_SUPPORT);
        }
        card.chips.get(index).copied().ok_or(code::INVALID_PARAMETER)
    }

    /// A chip that answers.
    pub(crate) fn chip(&self, card: i32, device: i32) -> Answer<&Chip> {
        self.alive(self.seat(card, device)?)
    }

    /// A chip that answers, with the generation of its card.
    pub(crate) fn chip_of(&self, card: i32, device: i32) -> Answer<(&Chip, Family)> {
        let chip = self.chip(card, device)?;
        Ok((chip, self.data.card_of(chip.phy).ok_or(code::DEVICE_NOT_EXIST)?.family))
    }

    /// The chip of a seat: gone if it was lost at any time since init.
    pub(crate) fn alive(&self, seat: SnapChip) -> Answer<&Chip> {
        let chip = self.data.chip(seat.phy).ok_or(code::DEVICE_NOT_EXIST)?;
        match chip.state {
            ChipState::Dropped | ChipState::Failed => Err(code::DEVICE_NOT_EXIST),
            _ if chip.epoch != seat.epoch => Err(code::DEVICE_NOT_EXIST),
            ChipState::Resetting => Err(code::NOT_READY),
            ChipState::Up => Ok(chip),
        }
    }

    /// Generation of the node's cards, for calls without a card argument.
    pub(crate) fn family(&self) -> Answer<Family> {
        self.data.cards.first().map(|card| card.family).ok_or(code::INVALID_DEVICE_ID)
    }

    /// Changes the world.
    pub(crate) fn edit<R>(&self, change: impl FnOnce(&mut Data) -> R) -> Answer<R> {
        self.session.world.edit(change).map_err(|error| {
            complain(&error.to_string());
            code::INNER_ERR
        })
    }

    /// The middle of the call's effect, where faults may strike.
    pub(crate) fn midway(&self) -> Answer {
        for action in &self.during {
            if let Some(code) = self.session.strike(*action, self.target).map_err(crate::slicing::broken)? {
                return Err(code);
            }
        }
        Ok(())
    }

    fn soil<T: Plain>(&self, value: T) -> MaybeUninit<T> {
        let mut cell = MaybeUninit::new(value);
        if self.garbage {
            let bytes = cell.as_mut_ptr().cast::<u8>();
            // SAFETY: the bytes are those of the cell, and `Plain` allows any pattern.
            unsafe { bytes.write_bytes(0xA5, size_of::<T>()) };
        }
        cell
    }

    /// Writes one result.
    pub(crate) fn put<T: Plain>(&self, out: Out<'_, T>, value: T) -> Answer {
        *out.ok_or(code::INVALID_PARAMETER)? = self.soil(value);
        Ok(())
    }

    /// Writes an array of results.
    ///
    /// # Safety
    /// `out` must be null or have room for all of `values`.
    pub(crate) unsafe fn put_all<T: Plain>(&self, out: *mut T, values: &[T]) -> Answer {
        if out.is_null() {
            return Err(code::INVALID_PARAMETER);
        }
        for (index, value) in values.iter().enumerate() {
            let cell = self.soil(*value);
            // SAFETY: the caller has room for all values, so for this one.
            let place = unsafe { out.add(index) }.cast::<MaybeUninit<T>>();
            // SAFETY: as above; the memory of a C caller need not be aligned for us.
            unsafe { place.write_unaligned(cell) };
        }
        Ok(())
    }

    /// Writes a NUL-terminated text; a buffer too short for it is refused.
    ///
    /// # Safety
    /// `out` must be null or have room for `room` characters.
    pub(crate) unsafe fn put_text(&self, out: *mut c_char, room: usize, text: &str) -> Answer {
        let chars: Vec<c_char> = text.bytes().chain([0]).map(|byte| c_char::from_ne_bytes([byte])).collect();
        if room < chars.len() {
            return Err(code::INVALID_PARAMETER);
        }
        // SAFETY: the room was checked.
        unsafe { self.put_all(out, &chars) }
    }
}

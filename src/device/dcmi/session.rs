//! The one thread that talks to the worker: starts it, asks it, ends it.
//!
//! The worker's parent-death signal is tied to the thread that started it, so this thread lives as long as the backend.
//! A crash, a missed deadline and a wanted re-scan are one path: the worker is ended and reaped, and the next scan
//! starts another. A worker that cannot be reaped stops everything until it can.

use std::{
    collections::{BTreeMap, HashSet},
    env,
    ffi::OsString,
    io::{self, Read},
    os::{
        fd::OwnedFd,
        unix::{net::UnixStream, process::ExitStatusExt as _},
    },
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, atomic::Ordering},
    thread,
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;
use serde::de::DeserializeOwned;
use tracing::{debug, info, warn};

use super::{
    BACKEND, Reply, Settings, Shared, Urgent, Work, ffi,
    reading::{self, Seat},
    wire::{self, At, Hello, NODE, OpenError, Outcome, Request, Trade, Trouble as Refused},
    worker,
};
use crate::{
    device::{Fault, pci, presence::Presence},
    domain::{
        health::{HealthReading, Level},
        notice::Severity,
        npu::{Link, MissingChip, Scan},
    },
};

/// Losses of the worker after which a chip is left out.
const SHUN_AFTER: u32 = 2;
/// How often the subscription to events is tried in one start of the library.
const SUBSCRIPTIONS: u32 = 3;

/// A process that was started and must be reaped.
pub(super) trait Process: Send {
    /// Its id.
    fn id(&self) -> u32;
    /// Sends SIGKILL.
    fn kill(&mut self);
    /// How it ended, if it has; it is reaped then.
    fn try_wait(&mut self) -> Option<ExitStatus>;
}

impl Process for Child {
    fn id(&self) -> u32 {
        Self::id(self)
    }

    fn kill(&mut self) {
        let _ = Self::kill(self);
    }

    fn try_wait(&mut self) -> Option<ExitStatus> {
        match Self::try_wait(self) {
            Ok(status) => status,
            // Nobody else reaps our children; if somebody does, it is gone all the same.
            Err(_) => Some(ExitStatus::from_raw(0)),
        }
    }
}

struct Worker {
    process: Box<dyn Process>,
    stream: UnixStream,
    started: Instant,
}

/// A chip in whose calls the worker was lost.
struct Suspect {
    /// How often, since it could last be read.
    losses: u32,
    /// When it was the last time.
    last: Instant,
    why: String,
}

/// What the library said at its last start, and whether that still holds.
struct Snapshot {
    seats: BTreeMap<u32, Seat>,
    links: Vec<Link>,
    /// The PCI functions of that moment.
    functions: Vec<pci::Function>,
    complete: bool,
    /// A chip has gone since.
    stale: bool,
    /// What the host showed of the chips.
    presence: Presence,
}

/// A row of scans that failed or were incomplete.
struct Trouble {
    since: Instant,
    /// Failed scans in a row.
    failures: u32,
    /// No new attempt before this time; until then calls fail like this.
    pause: Option<(Instant, Fault)>,
}

/// The state of the thread.
pub(super) struct Session {
    pub(super) settings: Settings,
    shared: Arc<Shared>,
    worker: Option<Worker>,
    /// A worker that was killed and does not end.
    ending: Option<Box<dyn Process>>,
    snapshot: Option<Snapshot>,
    /// What was on the bus at the last scan.
    bus: pci::Bus,
    trouble: Option<Trouble>,
    /// The last fault codes that could be read, by physical id.
    pub(super) codes: BTreeMap<u32, Vec<u32>>,
    /// Calls that this start of the library does not have, or not for this chip.
    pub(super) lacks: HashSet<Request>,
    /// How often the subscription to events is tried again.
    subscriptions: u32,
    /// No worker may be started.
    suspended: bool,
    /// Where the chips sit since the library's last start; empty until they were read. Unlike the snapshot it stays
    /// while they are read again.
    seats: BTreeMap<u32, Seat>,
    /// Chips that cannot be cut as long as this start of the library lasts, and why.
    pub(super) uncut: BTreeMap<u32, Fault>,
    /// Chips that are not asked for a while, so that one does not cost the node all the others.
    suspects: BTreeMap<(At, Trade), Suspect>,
    /// What was warned about, so that it is said once.
    warned: HashSet<String>,
}

impl Session {
    pub(super) fn new(settings: Settings, shared: Arc<Shared>) -> Self {
        Self {
            settings,
            shared,
            worker: None,
            ending: None,
            snapshot: None,
            bus: pci::Bus::default(),
            trouble: None,
            codes: BTreeMap::new(),
            lacks: HashSet::new(),
            subscriptions: 0,
            suspended: false,
            seats: BTreeMap::new(),
            uncut: BTreeMap::new(),
            suspects: BTreeMap::new(),
            warned: HashSet::new(),
        }
    }

    pub(super) fn shared(&self) -> Arc<Shared> {
        self.shared.clone()
    }

    /// Serves until the backend is dropped.
    pub(super) fn run(mut self) {
        while let Some(work) = self.shared.next() {
            match work {
                Work::Scan(reply) => self.attend(reply, Self::scan),
                Work::Health(reply) => self.attend(reply, Self::health),
                Work::Urgent(urgent) => self.serve(urgent),
            }
        }
        self.retire();
    }

    fn serve(&mut self, urgent: Urgent) {
        match urgent {
            Urgent::Create { physical_id, template, id, reply } => {
                self.attend(reply, |session| session.create(physical_id, &template, id));
            }
            Urgent::Destroy { physical_id, id, reply } => {
                self.attend(reply, |session| session.destroy(physical_id, id));
            }
            Urgent::Card(physical_id, reply) => self.attend(reply, |session| session.card(physical_id)),
            Urgent::Vendor(reply) => self.attend(reply, Self::vendor),
            Urgent::SetReplay(on, reply) => self.attend(reply, |session| session.set_replay(on)),
            // Done also when nobody waits for it any more: what an operator wants must not depend on his patience.
            Urgent::Suspend(reply) => drop(reply.send(self.suspend())),
            Urgent::Resume(reply) => drop(reply.send(self.resume())),
        }
    }

    fn attend<T>(&mut self, reply: Reply<T>, work: impl FnOnce(&mut Self) -> Result<T, Fault>) {
        if !reply.is_closed() {
            let _ = reply.send(work(self));
        }
    }

    /// One call of a scan or poll, after all that is more urgent.
    pub(super) fn call<T: DeserializeOwned>(&mut self, request: Request) -> Result<Outcome<T>, Fault> {
        // Before the first scan of a start is complete nobody knows which chip is which.
        while !self.seats.is_empty()
            && let Some(urgent) = self.shared.next_urgent()
        {
            self.serve(urgent);
        }
        self.ask(&request, self.settings.timing.read)
    }

    /// Where a chip sits in the library's numbering; starts the library if need be.
    pub(super) fn seat(&mut self, physical_id: u32) -> Result<Seat, Fault> {
        self.started()?;
        if let Some(seat) = self.seats.get(&physical_id) {
            return Ok(*seat);
        }
        // A chip that is left out of scans for a while, or may still come up, is there all the same.
        let shunned = self.suspects.keys().any(|(at, trade)| *trade == Trade::Scan && self.shunned(*at).is_some());
        if self.waited() && !shunned {
            return Err(Fault::Gone { backend: BACKEND, chip: physical_id });
        }
        let why = format!("chip {physical_id} does not answer now, or may not have come up yet");
        Err(Fault::NotReady { backend: BACKEND, why })
    }

    /// Makes sure that the library has started and its chips were read.
    pub(super) fn started(&mut self) -> Result<(), Fault> {
        self.reap()?;
        match self.seats.is_empty().then(|| self.scan()) {
            // A chip that is still missing does not hinder work on the others.
            Some(Err(fault)) if self.seats.is_empty() => Err(fault),
            _ => Ok(()),
        }
    }

    /// One call, now.
    pub(super) fn ask<T: DeserializeOwned>(&mut self, request: &Request, deadline: Duration) -> Result<T, Fault> {
        self.reap()?;
        let Some(worker) = &self.worker else {
            let why = "the library is being started again".to_owned();
            return Err(Fault::NotReady { backend: BACKEND, why });
        };
        let answer = exchange(&worker.stream, request, deadline);
        answer.map_err(|error| {
            let fault = self.lose(&request.to_string(), &error, deadline);
            if let Some(suspected) = request.blame() {
                let suspect = self.suspects.entry(suspected).or_insert_with(|| Suspect {
                    losses: 0,
                    last: Instant::now(),
                    why: String::new(),
                });
                suspect.losses = suspect.losses.saturating_add(1);
                (suspect.last, suspect.why) = (Instant::now(), fault.to_string());
            }
            fault
        })
    }

    /// Why a chip is left out of scans now: its calls have cost the worker twice in a row. It is tried again later.
    pub(super) fn shunned(&self, at: At) -> Option<String> {
        let suspect = self.suspects.get(&(at, Trade::Scan))?;
        let shunned = suspect.losses >= SHUN_AFTER && suspect.last.elapsed() < self.settings.timing.shun;
        shunned.then(|| suspect.why.clone())
    }

    /// Fails if such calls have cost the worker too often just now: each loss costs all other chips the time of a
    /// deadline and a new start. The pause grows with each loss.
    pub(super) fn spare(&self, at: At, trade: Trade) -> Result<(), Fault> {
        let Some(suspect) = self.suspects.get(&(at, trade)) else { return Ok(()) };
        let timing = &self.settings.timing;
        let (after, first, most) = if trade.is_extra() {
            (1, timing.shun, timing.shun.saturating_mul(16))
        } else {
            (SHUN_AFTER, timing.back_off, timing.shun)
        };
        let Some(doublings) = suspect.losses.checked_sub(after) else { return Ok(()) };
        let pause = first.saturating_mul(1 << doublings.min(16)).min(most);
        if suspect.last.elapsed() >= pause {
            return Ok(());
        }
        let why = format!(
            "not tried for {} s after {} losses in a row; {}",
            pause.as_secs_f32(),
            suspect.losses,
            suspect.why
        );
        Err(Fault::NotReady { backend: BACKEND, why })
    }

    /// A chip has answered such calls to their end.
    pub(super) fn cleared(&mut self, at: At, trade: Trade) {
        self.suspects.remove(&(at, trade));
    }

    /// Ends a worker that did not answer as it should; says why.
    fn lose(&mut self, call: &str, error: &io::Error, deadline: Duration) -> Fault {
        let late = matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock);
        let ended = self.end();
        let why = match ended {
            Err(fault) => {
                warn!(call, fault = fault.to_string(), "the vendor library hangs");
                return fault;
            }
            Ok(_) if late => format!("no answer within {} s; its process was ended", deadline.as_secs_f32()),
            Ok(Some(status)) => match (status.signal(), status.code()) {
                (Some(signal), _) => {
                    let name = Signal::try_from(signal).map_or("unknown signal", Signal::as_str);
                    format!("the vendor library's process died of {name}")
                }
                (None, code) => format!("the vendor library ended its process with code {}", code.unwrap_or(-1)),
            },
            Ok(None) => error.to_string(),
        };
        warn!(call, why, "the vendor library's process is started again");
        Fault::Failed { backend: BACKEND, call: call.to_owned(), why }
    }

    /// Kills the worker and reaps it; one that does not end makes the backend hung.
    fn end(&mut self) -> Result<Option<ExitStatus>, Fault> {
        self.snapshot = None;
        self.seats.clear();
        self.uncut.clear();
        self.lacks.clear();
        self.shared.set_link(None);
        let Some(Worker { mut process, stream, .. }) = self.worker.take() else { return Ok(None) };
        drop(stream);
        process.kill();
        let end = Instant::now() + self.settings.timing.reap;
        loop {
            if let Some(status) = process.try_wait() {
                return Ok(Some(status));
            }
            if Instant::now() >= end {
                self.ending = Some(process);
                return self.reap_worker().map(|()| None);
            }
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// Ends the worker where nobody waits for its answer.
    fn retire(&mut self) {
        if let Err(fault) = self.end() {
            warn!(fault = fault.to_string(), "the vendor library's process does not end");
        }
    }

    /// Ends the worker and starts no other.
    fn suspend(&mut self) -> Result<(), Fault> {
        self.suspended = true;
        let ended = self.end().and_then(|_| self.reap_worker());
        match &ended {
            Ok(()) => {
                info!("the vendor library was let go of; no call is made until it is taken up again");
                let detail = Fault::Suspended { backend: BACKEND }.to_string();
                self.shared.set_status("suspended", Severity::Warning, detail);
            }
            Err(fault) => self.warn_once(&fault.to_string()),
        }
        ended
    }

    /// Lets the next scan start the library, which may be another one.
    fn resume(&mut self) -> Result<(), Fault> {
        self.suspended = false;
        self.trouble = None;
        self.suspects.clear();
        self.codes.clear();
        self.warned.clear();
        self.shared.set_status("starting", Severity::Info, "no scan yet".to_owned());
        self.reap_worker()
    }

    /// Whether calls can be made: not while suspended, nor while a killed worker still exists.
    fn reap(&mut self) -> Result<(), Fault> {
        self.reap_worker()?;
        if self.suspended { Err(Fault::Suspended { backend: BACKEND }) } else { Ok(()) }
    }

    /// No call is made while a killed worker still exists.
    fn reap_worker(&mut self) -> Result<(), Fault> {
        let Some(process) = &mut self.ending else { return Ok(()) };
        if process.try_wait().is_some() {
            info!(pid = process.id(), "the vendor library's hung process has ended");
            self.ending = None;
            if self.suspended {
                let detail = Fault::Suspended { backend: BACKEND }.to_string();
                self.shared.set_status("suspended", Severity::Warning, detail);
            }
            return Ok(());
        }
        let why = format!(
            "process {} was killed and does not end (it waits in the kernel for the device); reset the device or \
             restart the host",
            process.id()
        );
        let fault = Fault::Hung { backend: BACKEND, why };
        self.shared.set_status("hung", Severity::Error, fault.to_string());
        Err(fault)
    }

    /// Reads all chips.
    fn scan(&mut self) -> Result<Scan, Fault> {
        self.reap()?;
        if let Some(Trouble { pause: Some((until, fault)), .. }) = &self.trouble
            && Instant::now() < *until
        {
            return Err(fault.clone());
        }
        let functions;
        (self.bus, functions) = pci::Bus::read(&self.settings.host_root).unwrap_or_default();
        self.shared.outdated.store(false, Ordering::Relaxed);
        if self.outdated(&functions) {
            self.retire();
        }
        let scan = self.attempt(functions);
        match &scan {
            Ok(scan) => self.settled(scan),
            Err(fault) => self.failed(fault),
        }
        scan
    }

    /// True if a scan needs a new start of the library: what it lists is what it saw at its last one.
    fn outdated(&self, functions: &[pci::Function]) -> bool {
        let Some(snapshot) = &self.snapshot else { return false };
        let age = self.worker.as_ref().map_or(Duration::MAX, |worker| worker.started.elapsed());
        let retry = !snapshot.complete && (!self.waited() || age >= self.settings.timing.missing);
        snapshot.stale || snapshot.functions != functions || retry
    }

    fn attempt(&mut self, functions: Vec<pci::Function>) -> Result<Scan, Fault> {
        self.shared.reading();
        let patience = self.patience(&functions);
        let links = self.snapshot.take().map(|snapshot| snapshot.links).unwrap_or_default();
        let reading = loop {
            if self.worker.is_none() {
                self.start(patience).map_err(|fault| name_missing(fault, &functions))?;
            }
            let shunned = self.all_shunned();
            match reading::read(self, &links) {
                // One more chip is left out now: the others need not wait for the next scan.
                Err(_) if self.ending.is_none() && self.all_shunned() > shunned => {}
                reading => break reading?,
            }
        };
        let (mut scan, seats) = (reading.scan, reading.seats);
        let expected: usize = functions.iter().map(|function| usize::try_from(function.chips).unwrap_or(1)).sum();
        let found = scan.chips.len();
        join_missing(&mut scan, &functions);
        self.seats.clone_from(&seats);
        self.shared.alarms.place(scan.chips.iter().filter_map(|chip| Some((chip.logic_id?, chip.physical_id))));
        let chips = scan.chips.iter().map(|chip| (chip.physical_id, chip.bus_id));
        self.snapshot = Some(Snapshot {
            seats,
            links: scan.links.clone(),
            presence: Presence::of(&self.settings.host_root, chips),
            functions,
            complete: scan.missing.is_empty(),
            stale: false,
        });
        if found < expected {
            let since = self.trouble.get_or_insert_with(Trouble::new).since;
            if found == 0 || since.elapsed() < patience {
                let why = format!("{found} of {expected} chips are up; missing: {}", listed(&scan.missing));
                return Err(Fault::NotReady { backend: BACKEND, why });
            }
        }
        Ok(scan)
    }

    fn all_shunned(&self) -> usize {
        self.suspects.keys().filter(|(at, trade)| *trade == Trade::Scan && self.shunned(*at).is_some()).count()
    }

    /// How long chips may take to come up after a boot or reset.
    fn patience(&self, functions: &[pci::Function]) -> Duration {
        let slow = functions.iter().any(|function| function.device_id == pci::DEVICE_910C);
        self.settings.wait.unwrap_or(if slow { Settings::WAIT_910C } else { Settings::WAIT })
    }

    /// True if chips have had their time to come up.
    fn waited(&self) -> bool {
        let functions = self.snapshot.as_ref().map(|snapshot| snapshot.functions.as_slice()).unwrap_or_default();
        self.trouble.as_ref().is_none_or(|trouble| trouble.since.elapsed() >= self.patience(functions))
    }

    fn settled(&mut self, scan: &Scan) {
        if scan.missing.is_empty() {
            self.trouble = None;
            self.shared.set_status("ready", Severity::Info, String::new());
        } else {
            let trouble = self.trouble.get_or_insert_with(Trouble::new);
            (trouble.failures, trouble.pause) = (0, None);
            let detail = format!("missing: {}", listed(&scan.missing));
            self.warn_once(&detail);
            self.shared.set_status("ready", Severity::Warning, detail);
        }
    }

    fn failed(&mut self, fault: &Fault) {
        if matches!(fault, Fault::Suspended { .. }) {
            return;
        }
        // An incomplete node keeps its worker for health polls; any other failure makes it suspect.
        if self.snapshot.is_none() {
            self.retire();
        }
        let waited = self.waited() && self.trouble.is_some();
        let timing = &self.settings.timing;
        let trouble = self.trouble.get_or_insert_with(Trouble::new);
        trouble.failures = trouble.failures.saturating_add(1);
        // The first retry is free: it mends a single crash or hang.
        let pause = match trouble.failures {
            1 => Duration::ZERO,
            n => timing.back_off.saturating_mul(1 << (n - 2).min(16)).min(timing.back_off_most),
        };
        trouble.pause = Some((Instant::now() + pause, fault.clone()));
        let (state, severity) = match fault {
            Fault::Hung { .. } => ("hung", Severity::Error),
            Fault::NotReady { .. } if !waited => ("starting", Severity::Warning),
            _ => ("failed", Severity::Error),
        };
        self.shared.set_status(state, severity, fault.to_string());
    }

    /// Starts a worker and, in it, the library.
    fn start(&mut self, patience: Duration) -> Result<(), Fault> {
        self.reap()?;
        let worker = self.spawn().map_err(|error| Fault::Failed {
            backend: BACKEND,
            call: format!("starting {}", self.settings.worker.display()),
            why: error.to_string(),
        })?;
        debug!(pid = worker.process.id(), "the vendor library's process was started");
        self.shared.set_link(worker.stream.try_clone().ok());
        let hello = receive::<Hello>(&worker.stream, Instant::now() + self.settings.timing.hello);
        self.worker = Some(worker);
        let loading = format!("loading {}", self.settings.library.display());
        match hello {
            Err(error) => return Err(self.lose(&loading, &error, self.settings.timing.hello)),
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                self.retire();
                return Err(match error {
                    OpenError::Refused(why) => Fault::Refused { backend: BACKEND, why },
                    OpenError::Lock(why) => Fault::Failed { backend: BACKEND, call: "taking the lock".to_owned(), why },
                    OpenError::Locked { holder } => Fault::NotReady {
                        backend: BACKEND,
                        why: format!(
                            "process {holder} still makes vendor calls and holds {}; end it if its daemon is gone",
                            self.settings.lock.display()
                        ),
                    },
                });
            }
        }
        match self.ask::<Outcome<()>>(&Request::Init, patience.max(self.settings.timing.init))? {
            Ok(()) => {
                self.subscriptions = SUBSCRIPTIONS;
                // Before the chips are read, so that no fault falls between.
                self.subscribe()
            }
            Err(trouble) => {
                self.retire();
                let why = format!("{} answered {trouble}", Request::Init);
                Err(Fault::NotReady { backend: BACKEND, why })
            }
        }
    }

    /// Asks for events, unless that has succeeded, is not to be had or has cost the worker lately. Without them faults
    /// are seen at the next poll.
    fn subscribe(&mut self) -> Result<(), Fault> {
        if self.subscriptions == 0 || self.spare(NODE, Trade::Events).is_err() {
            return Ok(());
        }
        self.subscriptions -= 1;
        let request = Request::Subscribe;
        let outcome = self.ask::<Outcome<()>>(&request, self.settings.timing.read)?;
        self.cleared(NODE, Trade::Events);
        if let Err(trouble) = outcome {
            self.warn_once(&format!("{request} answered {trouble}; faults are seen at the next poll only"));
        }
        if let Ok(()) | Err(Refused::Missing | Refused::Code(ffi::ERR_NOT_SUPPORT | ffi::ERR_OPER_NOT_PERMITTED)) =
            outcome
        {
            self.subscriptions = 0;
        }
        Ok(())
    }

    fn spawn(&self) -> io::Result<Worker> {
        let settings = &self.settings;
        let (events, their_events) = io::pipe()?;
        self.shared.clone().listen(events)?;
        let (stream, theirs) = UnixStream::pair()?;
        stream.set_write_timeout(Some(settings.timing.read))?;
        let child = Command::new(&settings.worker)
            .arg(worker::SUBCOMMAND)
            .arg(std::process::id().to_string())
            .args([&settings.lock, &settings.library])
            .arg(if settings.trust_library { "trust" } else { "check" })
            .env_clear()
            .envs(env::vars_os().filter(|(name, _)| is_for_library(name)))
            .envs(settings.environment.iter().cloned())
            .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
            .current_dir("/")
            .stdin(OwnedFd::from(theirs))
            .stdout(their_events)
            .stderr(Stdio::inherit())
            .spawn()?;
        Ok(Worker { process: Box::new(child), stream, started: Instant::now() })
    }

    /// Reads the health of every chip of the last start.
    fn health(&mut self) -> Result<BTreeMap<u32, HealthReading>, Fault> {
        self.reap()?;
        if self.snapshot.is_none() {
            self.scan()?;
        }
        self.subscribe()?;
        if self.bus.has_more(&self.settings.host_root) {
            info!("chips have come to the bus; the cards are read again");
            self.shared.outdated.store(true, Ordering::Relaxed);
        }
        let Some(Snapshot { seats, presence, .. }) = &self.snapshot else { return Ok(BTreeMap::new()) };
        let (seats, presence) = (seats.clone(), presence.clone());
        let mut readings = BTreeMap::new();
        for (physical_id, seat) in &seats {
            // A call about a chip that is not there may hang.
            if let Some(absence) = presence.absence(*physical_id) {
                self.warn_once(&format!("chip {physical_id} has gone: {absence}"));
                readings.insert(*physical_id, HealthReading::of(Level::Gone));
                continue;
            }
            let reading = reading::health(self, *physical_id, *seat)?;
            if reading.level == Level::Gone
                && let Some(snapshot) = &mut self.snapshot
            {
                snapshot.stale = true;
            }
            readings.insert(*physical_id, reading);
        }
        for (physical_id, seat) in seats {
            if let Some(reading) = readings.get_mut(&physical_id)
                && reading.level != Level::Gone
            {
                reading.link = reading::link(self, seat)?;
            }
        }
        Ok(readings)
    }

    /// Says something that stays true for long only once.
    pub(super) fn warn_once(&mut self, what: &str) {
        if self.warned.len() > 1000 {
            self.warned.clear();
        }
        if self.warned.insert(what.to_owned()) {
            warn!("{what}");
        }
    }
}

impl Trouble {
    fn new() -> Self {
        Self { since: Instant::now(), failures: 0, pause: None }
    }
}

/// Variables that the library may read; the daemon's own (credentials, systemd's, those that choose cards) stay here.
fn is_for_library(name: &OsString) -> bool {
    let name = name.to_string_lossy();
    matches!(&*name, "LANG" | "LC_ALL" | "TZ")
        || name.contains("DCMI")
        || (name.starts_with("ASCEND_") && name.contains("LOG"))
}

/// Adds the chips that the bus has to a start that failed.
fn name_missing(fault: Fault, functions: &[pci::Function]) -> Fault {
    match fault {
        Fault::NotReady { backend, why } if !functions.is_empty() => {
            let names: Vec<_> = functions.iter().map(|function| function.address.to_string()).collect();
            Fault::NotReady { backend, why: format!("{why}; missing: {}", names.join(", ")) }
        }
        other => other,
    }
}

/// Joins what the library could not read with what the bus has: a PCI address says more than a card number.
fn join_missing(scan: &mut Scan, functions: &[pci::Function]) {
    let mut absent = Vec::new();
    for function in functions {
        let found = scan.chips.iter().filter(|chip| chip.bus_id == function.address).count();
        let chips = usize::try_from(function.chips).unwrap_or(1);
        absent.extend((found..chips).map(|_| function.address.to_string()));
    }
    let expected: usize = functions.iter().map(|function| usize::try_from(function.chips).unwrap_or(1)).sum();
    if absent.is_empty() || scan.chips.len() >= expected {
        return;
    }
    let mut why: Vec<_> = scan.missing.iter().map(|chip| format!("{}: {}", chip.what, chip.why)).collect();
    if why.is_empty() {
        why.push("the vendor library does not list it".to_owned());
    }
    let why = if absent.len() > 1 && why.len() > 1 { format!("one of: {}", why.join("; ")) } else { why.join("; ") };
    scan.missing = absent.into_iter().map(|what| MissingChip { what, why: why.clone() }).collect();
}

fn listed(missing: &[MissingChip]) -> String {
    let mut reasons: Vec<&str> = missing.iter().map(|chip| chip.why.as_str()).collect();
    reasons.dedup();
    let names: Vec<&str> = missing.iter().map(|chip| chip.what.as_str()).collect();
    format!("{} ({})", names.join(", "), reasons.join("; "))
}

/// One request and its answer.
fn exchange<T: DeserializeOwned>(stream: &UnixStream, request: &Request, deadline: Duration) -> io::Result<T> {
    let end = Instant::now() + deadline;
    wire::send(stream, request)?;
    receive(stream, end)
}

fn receive<T: DeserializeOwned>(stream: &UnixStream, end: Instant) -> io::Result<T> {
    wire::receive(Until { stream, end })
}

/// A socket that is read until a point in time.
struct Until<'a> {
    stream: &'a UnixStream,
    end: Instant,
}

impl Read for Until<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        let mut stream = self.stream;
        stream.read(buffer)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::device::dcmi::Timing;

    /// A process that SIGKILL does not end until the kernel lets it go.
    struct Stuck(Arc<AtomicBool>);

    impl Process for Stuck {
        fn id(&self) -> u32 {
            4711
        }

        fn kill(&mut self) {}

        fn try_wait(&mut self) -> Option<ExitStatus> {
            self.0.load(Ordering::Relaxed).then(|| ExitStatus::from_raw(9))
        }
    }

    fn session() -> Session {
        let settings = Settings {
            host_root: "/nowhere".into(),
            library: "/nowhere/libdcmi.so".into(),
            trust_library: true,
            lock: "/nowhere/lock".into(),
            worker: "/nowhere/worker".into(),
            wait: None,
            environment: Vec::new(),
            timing: Timing { reap: Duration::from_millis(20), ..Timing::default() },
        };
        let shared = Arc::new(Shared::new(String::new()));
        Session::new(settings, shared)
    }

    #[test]
    fn a_worker_that_cannot_be_reaped_stops_all_calls_until_it_is() {
        let mut session = session();
        let freed = Arc::new(AtomicBool::new(false));
        let (stream, _silent) = UnixStream::pair().unwrap();
        session.worker = Some(Worker { process: Box::new(Stuck(freed.clone())), stream, started: Instant::now() });
        let deadline = Duration::from_millis(20);
        let fault = session.ask::<Outcome<String>>(&Request::DriverVersion, deadline).unwrap_err();
        assert!(matches!(&fault, Fault::Hung { why, .. } if why.contains("4711")), "{fault}");
        for _ in 0..3 {
            assert_eq!(session.scan(), Err(fault.clone()), "no second child starts");
            assert_eq!(session.health(), Err(fault.clone()));
            assert_eq!(session.card(0), Err(fault.clone()), "work on vnpus fails at once");
            assert_eq!(session.create(0, "vir05_1c_8g", 100), Err(fault.clone()));
            assert_eq!(session.destroy(0, 100), Err(fault.clone()));
            assert_eq!(session.vendor(), Err(fault.clone()));
            assert_eq!(session.set_replay(false), Err(fault.clone()));
        }
        assert_eq!(session.shared.status.lock().unwrap().state, "hung");
        freed.store(true, Ordering::Relaxed);
        let fault = session.scan().unwrap_err();
        assert!(fault.to_string().contains("starting /nowhere/worker"), "another child is wanted: {fault}");
        assert_eq!(session.shared.status.lock().unwrap().state, "failed");
    }

    #[test]
    fn only_what_the_library_reads_is_handed_to_it() {
        for name in ["LANG", "TZ", "FAKE_DCMI_WORLD", "ASCEND_GLOBAL_LOG_LEVEL"] {
            assert!(is_for_library(&name.into()), "{name}");
        }
        for name in
            ["ASCEND_VISIBLE_DEVICES", "LD_PRELOAD", "LD_LIBRARY_PATH", "NOTIFY_SOCKET", "KUBECONFIG", "LISTEN_FDS"]
        {
            assert!(!is_for_library(&name.into()), "{name}");
        }
    }

    #[test]
    fn missing_chips_go_by_their_address_where_the_bus_knows_it() {
        let function = |bus| pci::Function {
            address: format!("0000:{bus}:00.0").parse().unwrap(),
            device_id: 0xd802,
            chips: 1,
            dev_id: None,
            rows: Vec::new(),
        };
        let minus_one = MissingChip { what: "card 5 of the library's list".to_owned(), why: "it is down".to_owned() };
        let mut scan = Scan { missing: vec![minus_one.clone()], ..Scan::default() };
        join_missing(&mut scan, &[function("c1")]);
        assert_eq!(scan.missing.len(), 1);
        assert_eq!(scan.missing[0].what, "0000:c1:00.0");
        assert!(scan.missing[0].why.contains("card 5"), "{:?}", scan.missing);
        let mut scan = Scan { missing: vec![minus_one.clone()], ..Scan::default() };
        join_missing(&mut scan, &[]);
        assert_eq!(scan.missing, [minus_one]);
        let mut scan = Scan::default();
        join_missing(&mut scan, &[function("c1"), function("c2")]);
        assert_eq!(listed(&scan.missing), "0000:c1:00.0, 0000:c2:00.0 (the vendor library does not list it)");
    }
}

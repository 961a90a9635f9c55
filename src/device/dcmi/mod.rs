//! The vendor's DCMI library, in a child process.
//!
//! The library is not thread-safe, may hang, may crash, runs shells and keeps global state. So a child of the same
//! binary ([`worker`]) loads it and makes one call at a time; one thread of ours ([`session`]) asks it and ends it when
//! it does not answer. Callers put work into a queue: creating and destroying vNPUs, then reading a card's, go before
//! the next single call of a scan or poll, not only before the next scan.
//!
//! ```text
//!              scan, first poll            init, all reads           poll
//!   no worker ------------------> starting ----------------> ready <------+
//!       ^                            |                         |  +-------+
//!       |   reaped                   | crash, deadline,        | the same, or a chip has gone
//!       +----------------------------+ failed init             | and a scan is wanted
//!       +------------------------------------------------------+
//!       |   not reaped in 5 s
//!       +--> hung: every call fails at once until the kernel lets the process go
//! ```
//!
//! Suspended, the backend is as before its first scan and stays so: no worker, and every call fails at once.
//!
//! Fault events come on a pipe of their own, also while a call is in progress ([`alarms`]).

mod alarms;
mod boot_list;
pub mod ffi;
pub mod library;
mod reading;
mod session;
mod slicing;
pub mod wire;
pub mod worker;

use std::{
    collections::{BTreeMap, VecDeque},
    ffi::OsString,
    fmt,
    io::{self, PipeReader},
    net::Shutdown,
    os::unix::net::UnixStream,
    panic::{AssertUnwindSafe, catch_unwind},
    path::PathBuf,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use futures::{FutureExt as _, future::BoxFuture, stream::BoxStream};
use tokio::sync::oneshot;
use tracing::error;

use self::{alarms::Alarms, session::Session};
use super::{Backend, Fault, Status, VendorMode};
use crate::domain::{
    health::{Alarm, HealthReading},
    notice::Severity,
    npu::Scan,
    vnpu::CardReading,
};

const BACKEND: &str = "dcmi";

/// What the backend needs to know.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Root of the host's files, for sysfs.
    pub host_root: PathBuf,
    /// The vendor library.
    pub library: PathBuf,
    /// Loads a library that others than root could have changed.
    pub trust_library: bool,
    /// Lock file: who holds it makes vendor calls.
    pub lock: PathBuf,
    /// The executable whose hidden subcommand is the worker.
    pub worker: PathBuf,
    /// How long chips may take to come up; `None`: [`WAIT`](Self::WAIT), on a 910C [`WAIT_910C`](Self::WAIT_910C).
    pub wait: Option<Duration>,
    /// Variables for the library, beside those of its own that the daemon was started with.
    pub environment: Vec<(OsString, OsString)>,
    /// Deadlines and pauses.
    pub timing: Timing,
}

impl Settings {
    /// How long chips may take to come up.
    pub const WAIT: Duration = Duration::from_secs(150);
    /// The same on a 910C.
    pub const WAIT_910C: Duration = Duration::from_mins(6);
}

/// Deadlines and pauses.
#[derive(Debug, Clone)]
pub struct Timing {
    /// For one reading call.
    pub read: Duration,
    /// For creating or destroying a vNPU, and for calls that wait for the lock of the vendor's list of vNPUs.
    pub cut: Duration,
    /// For the library's start, if chips may not take longer to come up.
    pub init: Duration,
    /// For loading the library and taking the lock.
    pub hello: Duration,
    /// For a killed worker to end.
    pub reap: Duration,
    /// Pause before the third start in a row, doubled for each further one.
    pub back_off: Duration,
    /// The longest such pause.
    pub back_off_most: Duration,
    /// Pause between starts that only look for a chip that has been missing for longer than it may take to come up.
    pub missing: Duration,
    /// How long a chip whose calls have twice cost the worker is left out before it is tried again.
    pub shun: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            read: Duration::from_secs(2),
            cut: Duration::from_secs(30),
            init: Duration::from_secs(30),
            hello: Duration::from_secs(10),
            reap: Duration::from_secs(5),
            back_off: Duration::from_secs(1),
            back_off_most: Duration::from_secs(10),
            missing: Duration::from_mins(1),
            shun: Duration::from_mins(5),
        }
    }
}

type Reply<T> = oneshot::Sender<Result<T, Fault>>;

/// What callers want of the thread.
enum Work {
    Scan(Reply<Scan>),
    Health(Reply<BTreeMap<u32, HealthReading>>),
    Urgent(Urgent),
}

/// What goes before the next call of a scan or poll.
enum Urgent {
    Create { physical_id: u32, template: String, id: u32, reply: Reply<u32> },
    Destroy { physical_id: u32, id: u32, reply: Reply<()> },
    Card(u32, Reply<CardReading>),
    Vendor(Reply<VendorMode>),
    SetReplay(bool, Reply<()>),
    Suspend(Reply<()>),
    Resume(Reply<()>),
}

impl Urgent {
    /// True for what goes before what is only urgent.
    fn is_cut(&self) -> bool {
        matches!(self, Self::Create { .. } | Self::Destroy { .. } | Self::Suspend(_) | Self::Resume(_))
    }
}

#[derive(Default)]
struct Queue {
    cuts: VecDeque<Urgent>,
    urgent: VecDeque<Urgent>,
    ordinary: VecDeque<Work>,
    closed: bool,
}

impl Queue {
    fn next_urgent(&mut self) -> Option<Urgent> {
        self.cuts.pop_front().or_else(|| self.urgent.pop_front())
    }
}

/// What callers and the thread share.
struct Shared {
    queue: Mutex<Queue>,
    filled: Condvar,
    status: Mutex<Status>,
    /// The socket of the present worker: shut down, it wakes the thread from a call in progress.
    link: Mutex<Option<UnixStream>>,
    /// Events of the library, on their way to whoever reads them.
    alarms: Alarms,
    /// True once a health poll saw chips on the bus that the last scan did not.
    outdated: AtomicBool,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn new(source: String) -> Self {
        Self {
            queue: Mutex::default(),
            filled: Condvar::new(),
            status: Mutex::new(Status {
                backend: BACKEND,
                state: "starting",
                source,
                severity: Severity::Info,
                detail: "no scan yet".to_owned(),
            }),
            link: Mutex::default(),
            alarms: Alarms::default(),
            outdated: AtomicBool::new(false),
        }
    }

    fn push(&self, work: Work) {
        let mut queue = locked(&self.queue);
        // Dropped with its reply: whoever waits hears of it.
        if queue.closed {
            return;
        }
        match work {
            Work::Urgent(urgent) if urgent.is_cut() => queue.cuts.push_back(urgent),
            Work::Urgent(urgent) => queue.urgent.push_back(urgent),
            work => queue.ordinary.push_back(work),
        }
        drop(queue);
        self.filled.notify_one();
    }

    /// The next work, urgent first; waits for it. `None` when the backend is gone.
    fn next(&self) -> Option<Work> {
        let mut queue = locked(&self.queue);
        loop {
            if queue.closed {
                return None;
            }
            let urgent = queue.next_urgent().map(Work::Urgent);
            if let Some(work) = urgent.or_else(|| queue.ordinary.pop_front()) {
                return Some(work);
            }
            queue = self.filled.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The next urgent work, if there is any now.
    fn next_urgent(&self) -> Option<Urgent> {
        locked(&self.queue).next_urgent()
    }

    fn set_status(&self, state: &'static str, severity: Severity, detail: String) {
        let mut status = locked(&self.status);
        (status.state, status.severity, status.detail) = (state, severity, detail);
    }

    /// Notes that a first scan is on its way.
    fn reading(&self) {
        let mut status = locked(&self.status);
        if status.state == "starting" && status.severity == Severity::Info {
            "the library is starting".clone_into(&mut status.detail);
        }
    }

    fn set_link(&self, stream: Option<UnixStream>) {
        let closed = locked(&self.queue).closed;
        let mut link = locked(&self.link);
        if closed && let Some(stream) = &stream {
            let _ = stream.shutdown(Shutdown::Both);
        }
        *link = stream;
    }

    /// Takes in the events of a new worker, on a thread of its own that ends with that worker.
    fn listen(self: Arc<Self>, events: PipeReader) -> io::Result<()> {
        let start = self.alarms.begin();
        let listen = move || {
            while let Ok(event) = wire::receive(&events) {
                self.alarms.hear(start, event);
            }
        };
        thread::Builder::new().name("dcmi-events".to_owned()).stack_size(256 * 1024).spawn(listen).map(drop)
    }

    fn close(&self) {
        let mut queue = locked(&self.queue);
        queue.closed = true;
        queue.cuts.clear();
        queue.urgent.clear();
        queue.ordinary.clear();
        drop(queue);
        self.filled.notify_all();
        if let Some(stream) = &*locked(&self.link) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

/// The backend. Dropping it ends the worker.
pub struct Dcmi {
    shared: Arc<Shared>,
}

impl fmt::Debug for Dcmi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dcmi").field("status", &*locked(&self.shared.status)).finish_non_exhaustive()
    }
}

impl Dcmi {
    /// Starts the thread; the library is loaded by the first scan.
    pub fn new(settings: Settings) -> io::Result<Self> {
        let shared = Arc::new(Shared::new(settings.library.display().to_string()));
        let session = Session::new(settings, shared.clone());
        thread::Builder::new().name(BACKEND.to_owned()).spawn(move || {
            let shared = session.shared();
            if catch_unwind(AssertUnwindSafe(|| session.run())).is_err() {
                error!("the thread of the vendor library has panicked; restart the daemon");
                shared.set_status("failed", Severity::Error, "its thread has panicked; restart the daemon".to_owned());
                shared.close();
            }
        })?;
        Ok(Self { shared })
    }

    async fn ask<T: Send + 'static>(&self, work: impl FnOnce(Reply<T>) -> Work) -> Result<T, Fault> {
        self.put(work).await
    }

    /// Puts work into the queue at once; the answer is to be awaited.
    fn put<T: Send + 'static>(&self, work: impl FnOnce(Reply<T>) -> Work) -> BoxFuture<'static, Result<T, Fault>> {
        let (reply, answer) = oneshot::channel();
        self.shared.push(work(reply));
        async {
            answer.await.unwrap_or_else(|_| {
                let why = "its thread has ended; restart the daemon".to_owned();
                Err(Fault::Failed { backend: BACKEND, call: "waiting for an answer".to_owned(), why })
            })
        }
        .boxed()
    }
}

impl Drop for Dcmi {
    fn drop(&mut self) {
        self.shared.close();
    }
}

impl Backend for Dcmi {
    fn name(&self) -> &'static str {
        BACKEND
    }

    fn scan(&self) -> BoxFuture<'_, Result<Scan, Fault>> {
        self.ask(Work::Scan).boxed()
    }

    fn health(&self) -> BoxFuture<'_, Result<BTreeMap<u32, HealthReading>, Fault>> {
        self.ask(Work::Health).boxed()
    }

    fn is_outdated(&self) -> bool {
        self.shared.outdated.load(Ordering::Relaxed)
    }

    fn alarms(&self) -> BoxStream<'static, Alarm> {
        self.shared.alarms.stream()
    }

    fn status(&self) -> Status {
        locked(&self.shared.status).clone()
    }

    fn suspend(&self) -> BoxFuture<'_, Result<(), Fault>> {
        async move {
            let suspended = self.put(|reply| Work::Urgent(Urgent::Suspend(reply)));
            // Nothing is lost by breaking a start off, and it may take minutes.
            if locked(&self.shared.status).state != "ready"
                && let Some(stream) = &*locked(&self.shared.link)
            {
                let _ = stream.shutdown(Shutdown::Both);
            }
            suspended.await
        }
        .boxed()
    }

    fn resume(&self) -> BoxFuture<'_, Result<(), Fault>> {
        self.ask(|reply| Work::Urgent(Urgent::Resume(reply))).boxed()
    }

    fn card(&self, physical_id: u32) -> BoxFuture<'_, Result<CardReading, Fault>> {
        self.ask(move |reply| Work::Urgent(Urgent::Card(physical_id, reply))).boxed()
    }

    fn create(&self, physical_id: u32, template: &str, id: u32) -> BoxFuture<'_, Result<u32, Fault>> {
        let template = template.to_owned();
        self.ask(move |reply| Work::Urgent(Urgent::Create { physical_id, template, id, reply })).boxed()
    }

    fn destroy(&self, physical_id: u32, id: u32) -> BoxFuture<'_, Result<(), Fault>> {
        self.ask(move |reply| Work::Urgent(Urgent::Destroy { physical_id, id, reply })).boxed()
    }

    fn vendor(&self) -> BoxFuture<'_, Result<VendorMode, Fault>> {
        self.ask(|reply| Work::Urgent(Urgent::Vendor(reply))).boxed()
    }

    fn set_replay(&self, on: bool) -> BoxFuture<'_, Result<(), Fault>> {
        self.ask(move |reply| Work::Urgent(Urgent::SetReplay(on, reply))).boxed()
    }
}

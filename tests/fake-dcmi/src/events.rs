//! Fault events: numbered files of the world, handed to the callback by a thread of the library's own.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};

use crate::code::{self, Answer};
use crate::disk::{self, WorldError};
use crate::raw::{Event, EventFilter, Plain as _, chars};
use crate::session::{self, Session};
use crate::world::{Assertion, StoredEvent, World};

/// The callback of a subscription.
pub type Callback = unsafe extern "C" fn(*mut Event);

const BY_CODE: u64 = 1;
const BY_SEVERITY: u64 = 2;
const BY_NODE_TYPE: u64 = 4;
/// How long the pull form sleeps between two looks.
const PAUSE: Duration = Duration::from_millis(5);

/// Which events somebody wants.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Selection {
    pub(crate) card: i32,
    pub(crate) device: i32,
    pub(crate) filter: EventFilter,
}

fn number(name: &str) -> Option<u64> {
    name.strip_suffix(".json")?.parse().ok()
}

/// Number of the last event, 0 for none.
pub(crate) fn last(world: &World) -> Result<u64, WorldError> {
    Ok(after(world, 0)?.last().copied().unwrap_or(0))
}

/// Numbers of the events after this one, in order.
fn after(world: &World, seen: u64) -> Result<Vec<u64>, WorldError> {
    let path = world.path("events");
    let mut numbers = Vec::new();
    for entry in fs::read_dir(&path).map_err(disk::at(&path))? {
        let name = entry.map_err(disk::at(&path))?.file_name();
        numbers.extend(name.to_str().and_then(number).filter(|number| *number > seen));
    }
    numbers.sort_unstable();
    Ok(numbers)
}

/// The C form of an event, if it is wanted.
fn wanted(session: &Session, selection: &Selection, number: u64) -> Option<Event> {
    let stored: StoredEvent = disk::load(&session.world.path("events").join(format!("{number:08}.json"))).ok()?;
    let snapshot = session.snapshot()?;
    let (card, device, seat) = snapshot
        .cards
        .iter()
        .flat_map(|card| (0..).zip(&card.chips).map(move |(device, chip)| (card.id, device, *chip)))
        .find(|(_, _, chip)| chip.phy == stored.notice.phy)?;
    if (selection.card != -1 && selection.card != card) || (selection.device != -1 && selection.device != device) {
        return None;
    }
    let filter = &selection.filter;
    let (notice, node_type) = (stored.notice, 0);
    if (filter.filter_flag & BY_CODE != 0 && filter.event_id != notice.code)
        || (filter.filter_flag & BY_SEVERITY != 0 && filter.severity != notice.severity)
        || (filter.filter_flag & BY_NODE_TYPE != 0 && filter.node_type != node_type)
    {
        return None;
    }
    let mut event = Event::zeroed();
    event.event_t.event_id = notice.code;
    event.event_t.deviceid = u16::try_from(seat.logic).ok()?;
    event.event_t.severity = notice.severity;
    event.event_t.assertion = match notice.assertion {
        Assertion::Recovered => 0,
        Assertion::Occurred => 1,
        Assertion::OneShot => 2,
    };
    event.event_t.event_serial_num = i32::try_from(number).ok()?;
    event.event_t.notify_serial_num = i32::try_from(number).ok()?;
    event.event_t.alarm_raised_time = stored.at_ms;
    event.event_t.event_name = chars(&format!("simulated fault 0x{:08X}", notice.code));
    Some(event)
}

/// Starts the thread of the one subscription that a process may have.
pub(crate) fn subscribe(selection: Selection, handler: Callback) -> Answer {
    let session = session::current().ok_or(code::INNER_ERR)?;
    if session.subscribed.swap(true, Ordering::SeqCst) {
        return Err(code::RESOURCE_OCCUPIED);
    }
    let started = last(&session.world).map_err(|_| code::INNER_ERR).and_then(|seen| {
        let watch = Inotify::init(InitFlags::IN_CLOEXEC).map_err(|_| code::INNER_ERR)?;
        watch.add_watch(&session.world.path("events"), AddWatchFlags::IN_MOVED_TO).map_err(|_| code::INNER_ERR)?;
        let thread = thread::Builder::new().name("fault-events".to_owned()).stack_size(256 * 1024);
        let own = Arc::clone(&session);
        thread.spawn(move || deliver(&own, &selection, handler, &watch, seen)).map_err(|_| code::INNER_ERR)
    });
    if started.is_err() {
        session.subscribed.store(false, Ordering::SeqCst);
    }
    started.map(drop)
}

/// Hands over every event after `seen`, for ever.
fn deliver(session: &Session, selection: &Selection, handler: Callback, watch: &Inotify, mut seen: u64) {
    loop {
        for number in after(&session.world, seen).unwrap_or_default() {
            seen = number;
            if let Some(mut event) = wanted(session, selection, number) {
                // SAFETY: the subscriber promised a function of this type; the event lives until it returns.
                unsafe { handler(&raw mut event) };
            }
        }
        // Waits without using the processor; an error other than a signal ends the subscription.
        match watch.read_events() {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(_) => return,
        }
    }
}

/// The next wanted event since the last pull of this process, or since the first pull began.
pub(crate) fn pull(session: &Session, selection: &Selection, timeout_ms: i32) -> Answer<Event> {
    let failed = |_: WorldError| code::INNER_ERR;
    if session.pulled.load(Ordering::SeqCst) == u64::MAX {
        session.pulled.store(last(&session.world).map_err(failed)?, Ordering::SeqCst);
    }
    let start = Instant::now();
    loop {
        for number in after(&session.world, session.pulled.load(Ordering::SeqCst)).map_err(failed)? {
            session.pulled.store(number, Ordering::SeqCst);
            if let Some(event) = wanted(session, selection, number) {
                return Ok(event);
            }
        }
        if u64::try_from(timeout_ms).is_ok_and(|ms| start.elapsed() >= Duration::from_millis(ms)) {
            return Err(code::TIME_OUT);
        }
        thread::sleep(PAUSE); // waits: for the next event
    }
}

//! Fault events: lines of a file of the world, handed to the callback by a thread of the library's own.

use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::path::PathBuf;
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

fn path(world: &World) -> PathBuf {
    world.path("events.log")
}

/// Where the next event will stand.
pub(crate) fn end(world: &World) -> Result<u64, WorldError> {
    let path = path(world);
    match fs::metadata(&path) {
        Ok(metadata) => Ok(metadata.len()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            File::options().create(true).append(true).open(&path).map(|_| 0).map_err(disk::at(&path))
        }
        Err(error) => Err(disk::at(&path)(error)),
    }
}

/// Appends events. The caller holds the world's lock, so that nobody sees a part of a line.
pub(crate) fn append(world: &World, events: &[StoredEvent]) -> Result<(), WorldError> {
    let path = path(world);
    let mut lines = Vec::new();
    for event in events {
        serde_json::to_writer(&mut lines, event).map_err(|source| WorldError::Parse { path: path.clone(), source })?;
        lines.push(b'\n');
    }
    let mut file = File::options().create(true).append(true).open(&path).map_err(disk::at(&path))?;
    file.write_all(&lines).map_err(disk::at(&path))
}

/// The events from this place on, each with the place behind it.
fn after(world: &World, place: u64) -> Result<Vec<(u64, StoredEvent)>, WorldError> {
    let path = path(world);
    let mut text = String::new();
    let mut file = File::open(&path).map_err(disk::at(&path))?;
    file.seek(SeekFrom::Start(place)).map_err(disk::at(&path))?;
    file.read_to_string(&mut text).map_err(disk::at(&path))?;
    let (mut events, mut place) = (Vec::new(), place);
    for line in text.split_inclusive('\n').filter(|line| line.ends_with('\n')) {
        place += u64::try_from(line.len()).unwrap_or_default();
        let event = serde_json::from_str(line).map_err(|source| WorldError::Parse { path: path.clone(), source })?;
        events.push((place, event));
    }
    Ok(events)
}

/// The C form of an event, if it is wanted.
fn wanted(session: &Session, selection: &Selection, stored: &StoredEvent) -> Option<Event> {
    let (notice, node_type) = (stored.notice, 0);
    let logic = if let Some(logic) = stored.stray {
        logic
    } else {
        let snapshot = session.snapshot()?;
        let (card, device, seat) = snapshot
            .cards
            .iter()
            .flat_map(|card| (0..).zip(&card.chips).map(move |(device, chip)| (card.id, device, *chip)))
            .find(|(_, _, chip)| chip.phy == notice.phy)?;
        if (selection.card != -1 && selection.card != card) || (selection.device != -1 && selection.device != device) {
            return None;
        }
        u16::try_from(seat.logic).ok()?
    };
    let filter = &selection.filter;
    if (filter.filter_flag & BY_CODE != 0 && filter.event_id != notice.code)
        || (filter.filter_flag & BY_SEVERITY != 0 && filter.severity != notice.severity)
        || (filter.filter_flag & BY_NODE_TYPE != 0 && filter.node_type != node_type)
    {
        return None;
    }
    let mut event = Event::zeroed();
    event.event_t.event_id = notice.code;
    event.event_t.deviceid = logic;
    event.event_t.severity = notice.severity;
    event.event_t.assertion = match notice.assertion {
        Assertion::Recovered => 0,
        Assertion::Occurred => 1,
        Assertion::OneShot => 2,
    };
    event.event_t.event_serial_num = i32::try_from(stored.number).ok()?;
    event.event_t.notify_serial_num = i32::try_from(stored.number).ok()?;
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
    let started = end(&session.world).map_err(|_| code::INNER_ERR).and_then(|seen| {
        let watch = Inotify::init(InitFlags::IN_CLOEXEC).map_err(|_| code::INNER_ERR)?;
        watch.add_watch(&path(&session.world), AddWatchFlags::IN_MODIFY).map_err(|_| code::INNER_ERR)?;
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
        for (place, stored) in after(&session.world, seen).unwrap_or_default() {
            seen = place;
            if let Some(mut event) = wanted(session, selection, &stored) {
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
        session.pulled.store(end(&session.world).map_err(failed)?, Ordering::SeqCst);
    }
    let start = Instant::now();
    loop {
        for (place, stored) in after(&session.world, session.pulled.load(Ordering::SeqCst)).map_err(failed)? {
            session.pulled.store(place, Ordering::SeqCst);
            if let Some(event) = wanted(session, selection, &stored) {
                return Ok(event);
            }
        }
        if u64::try_from(timeout_ms).is_ok_and(|ms| start.elapsed() >= Duration::from_millis(ms)) {
            return Err(code::TIME_OUT);
        }
        thread::sleep(PAUSE); // waits: for the next event
    }
}

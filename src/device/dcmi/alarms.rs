//! Events of the library on their way from the worker to the engine.
//!
//! The library names chips by logic ids, which mean something only once its chips were read: what comes before that
//! waits. Nothing here blocks the reader of the worker's pipe; what is too much becomes one [`Alarm::Unsure`].

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Mutex, MutexGuard, PoisonError},
};

use futures::{StreamExt as _, stream::BoxStream};
use tokio::sync::broadcast;
use tokio_stream::wrappers::{BroadcastStream, errors::BroadcastStreamRecvError};
use tracing::warn;

use super::{ffi, wire::Event};
use crate::domain::health::{Alarm, FaultEvent, Level, Turn};

/// Alarms that wait for a reader.
const WAITING: usize = 256;
/// Events that wait for the chips to be read.
const EARLY: usize = 256;

/// The state of one start of the library.
#[derive(Debug, Default)]
struct Start {
    number: u64,
    /// Physical ids by logic id, once the chips were read.
    chips: Option<BTreeMap<u32, u32>>,
    early: Vec<Event>,
    lost: u64,
    /// Logic ids of chips that nobody knows, so that each is said once.
    strangers: BTreeSet<u16>,
}

#[derive(Debug)]
pub(super) struct Alarms {
    start: Mutex<Start>,
    sender: broadcast::Sender<Alarm>,
}

impl Default for Alarms {
    fn default() -> Self {
        Self { start: Mutex::default(), sender: broadcast::Sender::new(WAITING) }
    }
}

impl Alarms {
    fn start(&self) -> MutexGuard<'_, Start> {
        self.start.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new worker: events of earlier ones do not count any more. Gives its number.
    pub(super) fn begin(&self) -> u64 {
        let mut start = self.start();
        *start = Start { number: start.number + 1, ..Start::default() };
        start.number
    }

    /// The chips of this start, by logic id.
    pub(super) fn place(&self, chips: impl IntoIterator<Item = (u32, u32)>) {
        let mut start = self.start();
        start.chips = Some(chips.into_iter().collect());
        if start.early.len() >= EARLY {
            self.send(Alarm::Unsure);
        }
        for event in std::mem::take(&mut start.early) {
            self.tell(&mut start, event);
        }
    }

    /// Takes in an event of a worker.
    pub(super) fn hear(&self, number: u64, event: Event) {
        let mut start = self.start();
        if start.number != number {
            return;
        }
        if event.lost > start.lost {
            start.lost = event.lost;
            self.send(Alarm::Unsure);
        }
        if start.chips.is_some() {
            self.tell(&mut start, event);
        } else if start.early.len() < EARLY {
            start.early.push(event);
        }
    }

    fn tell(&self, start: &mut Start, event: Event) {
        let physical_id = start.chips.as_ref().and_then(|chips| chips.get(&event.logic.into()).copied());
        match (physical_id, fault(event)) {
            (Some(physical_id), Some(event)) => self.send(Alarm::Event { physical_id, event }),
            // A chip that came up after the library, or an event of another kind: a poll tells.
            (known, _) => {
                if start.strangers.insert(event.logic) {
                    let Event { code, logic, assertion, .. } = event;
                    let code = format!("{code:08X}");
                    let known = known.is_some();
                    warn!(code, logic, assertion, known, "an event cannot be understood; all chips are polled");
                }
                self.send(Alarm::Unsure);
            }
        }
    }

    fn send(&self, alarm: Alarm) {
        // Without a reader nobody is to be told.
        let _ = self.sender.send(alarm);
    }

    /// All alarms from now on.
    pub(super) fn stream(&self) -> BoxStream<'static, Alarm> {
        let unsure = |alarm: Result<Alarm, BroadcastStreamRecvError>| alarm.unwrap_or(Alarm::Unsure);
        BroadcastStream::new(self.sender.subscribe()).map(unsure).chain(futures::stream::pending()).boxed()
    }
}

fn fault(event: Event) -> Option<FaultEvent> {
    let level = match event.severity {
        0 => Level::Ok,
        1 => Level::Minor,
        2 => Level::Major,
        3 => Level::Critical,
        _ => Level::Unknown,
    };
    let turn = match event.assertion {
        ffi::EVENT_RECOVERED => Turn::Recovered,
        ffi::EVENT_OCCURRED => Turn::Occurred,
        ffi::EVENT_ONE_SHOT => Turn::Once,
        _ => return None,
    };
    Some(FaultEvent { code: event.code, level, turn })
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    fn event(logic: u16, code: u32) -> Event {
        Event { code, logic, severity: 2, assertion: 1, lost: 0 }
    }

    fn told(physical_id: u32, code: u32) -> Alarm {
        Alarm::Event { physical_id, event: FaultEvent { code, level: Level::Major, turn: Turn::Occurred } }
    }

    /// What has come so far.
    fn drain(stream: &mut BoxStream<'static, Alarm>) -> Vec<Alarm> {
        std::iter::from_fn(|| stream.next().now_or_never().flatten()).collect()
    }

    #[test]
    fn events_wait_until_the_chips_of_their_start_are_known_and_those_of_an_earlier_one_are_dropped() {
        let alarms = Alarms::default();
        let mut stream = alarms.stream();
        let old = alarms.begin();
        alarms.hear(old, event(0, 1));
        let new = alarms.begin();
        alarms.hear(old, event(0, 2));
        alarms.hear(new, event(1, 3));
        assert_eq!(drain(&mut stream), []);
        alarms.place([(0, 5), (1, 7)]);
        alarms.hear(old, event(0, 4));
        alarms.hear(new, event(0, 5));
        assert_eq!(drain(&mut stream), [told(7, 3), told(5, 5)]);
    }

    #[test]
    fn what_cannot_be_understood_or_was_lost_is_unsure() {
        let alarms = Alarms::default();
        let mut stream = alarms.stream();
        let start = alarms.begin();
        alarms.place([(0, 0)]);
        alarms.hear(start, event(77, 1));
        alarms.hear(start, Event { assertion: 9, ..event(0, 1) });
        alarms.hear(start, Event { lost: 3, ..event(0, 2) });
        alarms.hear(start, Event { lost: 3, severity: 200, ..event(0, 2) });
        let unknown = FaultEvent { code: 2, level: Level::Unknown, turn: Turn::Occurred };
        let last = Alarm::Event { physical_id: 0, event: unknown };
        assert_eq!(drain(&mut stream), [Alarm::Unsure, Alarm::Unsure, Alarm::Unsure, told(0, 2), last]);
    }

    #[test]
    fn a_reader_that_is_too_slow_and_a_flood_before_the_first_reading_are_unsure_once() {
        let alarms = Alarms::default();
        let mut stream = alarms.stream();
        let start = alarms.begin();
        for code in 0..1000 {
            alarms.hear(start, event(0, code));
        }
        alarms.place([(0, 0)]);
        let early = drain(&mut stream);
        assert_eq!(early[0], Alarm::Unsure);
        assert_eq!(early.len(), WAITING + 1);
        for code in 0..1000 {
            alarms.hear(start, event(0, code));
        }
        let late = drain(&mut stream);
        assert_eq!(late[0], Alarm::Unsure);
        assert_eq!(late.last(), Some(&told(0, 999)));
        drop(alarms);
        assert_eq!(stream.next().now_or_never(), None, "a stream without a backend does not end");
    }
}

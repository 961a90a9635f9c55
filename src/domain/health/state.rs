//! The state of a card's health, and the step that a report makes it take.
//!
//! ```text
//!  report ──► picture (what is active now) ──► causes, judged by the table ──► held faults ──► condition
//! ```
//!
//! A fault that is over stays *held* until the card has been quiet about it for [`Policy::quiet`]: a card that flaps stays
//! tainted, and how often it does changes nothing that others see. What is not known is never taken for recovered: a
//! missed answer, or a list of codes that was not read to its end, clears nothing.

use std::{collections::BTreeMap, fmt, time::Duration};

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use super::{
    FaultEvent, HealthReading, Level, Link, Report, Turn,
    table::{Action, CARD_LOST, LINK_DOWN, Table, named, parse_code},
};

/// Most codes of one card that are kept: as many as the vendor's list has places.
pub const CODES_MAX: usize = 128;
/// Most codes that a message names.
const NAMED_MAX: usize = 6;

/// What the driver holds of a card, from best to worst.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Condition {
    /// Nothing is wrong.
    Ok,
    /// Nothing is known: no answer, or one that says nothing. Not the same as bad.
    Unknown,
    /// Something is wrong that does not keep claims away.
    Warn,
    /// It gets no new claim.
    Tainted,
    /// It gets no new claim, and pods that do not tolerate it are evicted.
    Fatal,
    /// It is not there.
    Lost,
}

impl Condition {
    /// All conditions.
    pub const ALL: [Self; 6] = [Self::Ok, Self::Unknown, Self::Warn, Self::Tainted, Self::Fatal, Self::Lost];

    /// The condition as users see it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Unknown => "unknown",
            Self::Warn => "warn",
            Self::Tainted => "tainted",
            Self::Fatal => "fatal",
            Self::Lost => "lost",
        }
    }

    /// True if new claims may get the card.
    #[must_use]
    pub fn is_usable(self) -> bool {
        matches!(self, Self::Ok | Self::Unknown | Self::Warn)
    }
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What a fault comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Cause {
    /// The chip's level, where no code explains it.
    Level,
    /// A code.
    Code(u32),
}

impl From<Cause> for String {
    fn from(cause: Cause) -> Self {
        match cause {
            Cause::Level => "level".to_owned(),
            Cause::Code(code) => format!("{code:08X}"),
        }
    }
}

impl TryFrom<String> for Cause {
    type Error = super::table::InvalidEntry;
    fn try_from(text: String) -> Result<Self, Self::Error> {
        if text == "level" { Ok(Self::Level) } else { parse_code(&text).map(Self::Code) }
    }
}

/// A fault that is there, or is held because it was there not long ago.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// What is done about it: the most since it is held.
    pub action: Action,
    /// The worst level it was seen with.
    pub level: Level,
    /// When it was first seen.
    pub since: Timestamp,
    /// Since when it is better than `action` says; `None` while it is as bad.
    pub better: Option<Timestamp>,
}

/// A fault as it is remembered over restarts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FaultMemory {
    /// What it comes from.
    pub cause: Cause,
    /// What is done about it.
    pub action: Action,
    /// The worst level it was seen with.
    pub level: Level,
    /// When it was first seen.
    pub since: Timestamp,
}

/// How reports are judged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// What is done about which fault.
    pub table: Table,
    /// How long a card must be quiet before a fault of it is over.
    pub quiet: Duration,
    /// How many answers in a row may be missed before nothing is known any more.
    pub misses: u32,
}

impl Default for Policy {
    fn default() -> Self {
        Self { table: Table::default(), quiet: Duration::from_mins(1), misses: 3 }
    }
}

/// What the driver holds to be a card's health.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Health {
    /// What is active now: the last answer, and the events since.
    pub reading: HealthReading,
    /// What it comes to.
    pub condition: Condition,
    /// When `condition` last changed.
    pub since: Timestamp,
    /// Faults that are there or held, which are at least a warning.
    pub faults: BTreeMap<Cause, Fault>,
    /// The network link; up only after it was up for the quiet time.
    pub link: Option<Link>,
    /// Answers missed in a row.
    pub missed: u32,
    /// True once anything was reported: what was remembered only is nothing that users were told just now.
    heard: bool,
    /// Levels that events gave to active codes.
    told: BTreeMap<u32, Level>,
    /// Since when a link that was down is up.
    link_up: Option<Timestamp>,
}

impl Health {
    /// A card that nothing is known of yet, but what was remembered of its faults and its link.
    #[must_use]
    pub fn remembered(faults: &[FaultMemory], link: Option<Link>, now: Timestamp) -> Self {
        let fault = |memory: &FaultMemory| {
            let FaultMemory { cause, action, level, since } = memory.clone();
            (cause, Fault { action, level, since: since.min(now), better: None })
        };
        let mut health = Self {
            reading: HealthReading::of(Level::Unknown),
            condition: Condition::Unknown,
            since: now,
            faults: faults.iter().map(fault).collect(),
            link,
            missed: 0,
            heard: false,
            told: BTreeMap::new(),
            link_up: None,
        };
        health.condition = health.judged(u32::MAX);
        health.since = health.worst_since().unwrap_or(now);
        health
    }

    /// The same for a card that was lost when the daemon ended.
    #[must_use]
    pub fn remembered_lost(faults: &[FaultMemory], link: Option<Link>, now: Timestamp) -> Self {
        let mut health = Self::remembered(faults, link, now);
        health.reading = HealthReading::of(Level::Gone);
        health.condition = Condition::Lost;
        health
    }

    /// One step: what a report and the passing of time make of the old state.
    #[must_use]
    pub fn step(old: Option<&Self>, report: &Report, policy: &Policy, now: Timestamp) -> Self {
        let mut new = old.map_or_else(|| Self::remembered(&[], None, now), Clone::clone);
        new.turn_back(now);
        let once = new.picture(report);
        let answered = *report != Report::Missed;
        new.heard |= answered;
        if answered {
            new.hold(once, policy, now);
            new.hold_link(policy.quiet, now);
        }
        new.limit(&policy.table);
        let condition = new.judged(policy.misses);
        if condition != new.condition || old.is_none() {
            new.condition = condition;
            new.since = now;
        }
        new
    }

    /// A clock that jumped back must not make anything last longer than it was to.
    fn turn_back(&mut self, now: Timestamp) {
        self.since = self.since.min(now);
        self.link_up = self.link_up.map(|at| at.min(now));
        for fault in self.faults.values_mut() {
            fault.since = fault.since.min(now);
            fault.better = fault.better.map(|at| at.min(now));
        }
    }

    /// Draws the report into the picture; gives the event that was over at once.
    fn picture(&mut self, report: &Report) -> Option<FaultEvent> {
        match report {
            Report::Missed => {
                self.missed = self.missed.saturating_add(1);
                return None;
            }
            Report::Lost => {
                self.reading = HealthReading {
                    level: Level::Gone,
                    partial: true,
                    codes: std::mem::take(&mut self.reading.codes),
                    ..HealthReading::default()
                };
            }
            Report::Read(reading) => {
                let before = std::mem::replace(&mut self.reading, reading.clone());
                // A chip without any fault has none, also where its codes cannot be read.
                if reading.partial && reading.level != Level::Ok {
                    self.reading.codes.extend(before.codes);
                }
                // A link that is not told has not recovered for that.
                self.reading.link = reading.link.or(before.link);
            }
            Report::Event(event) => {
                let codes = &mut self.reading.codes;
                match event.turn {
                    Turn::Occurred => {
                        codes.push(event.code);
                        self.told.insert(event.code, event.level);
                    }
                    Turn::Recovered => codes.retain(|code| *code != event.code),
                    Turn::Once => return Some(*event),
                }
            }
        }
        if !matches!(report, Report::Event(_)) {
            self.missed = 0;
        }
        None
    }

    /// What of the picture is a fault now, with its action and level.
    fn present(&mut self, table: &Table) -> BTreeMap<Cause, (Action, Level)> {
        let Self { reading, told, .. } = self;
        reading.codes.sort_unstable();
        reading.codes.dedup();
        let level_of = |code: &u32| told.get(code).copied().unwrap_or(reading.level);
        if reading.codes.len() > CODES_MAX {
            let mut codes = std::mem::take(&mut reading.codes);
            codes.sort_by_key(|code| std::cmp::Reverse(table.action(*code, level_of(code))));
            codes.truncate(CODES_MAX);
            codes.sort_unstable();
            reading.codes = codes;
            reading.partial = true;
        }
        let mut present: BTreeMap<_, _> = reading
            .codes
            .iter()
            .map(|code| (Cause::Code(*code), (table.action(*code, level_of(code)), level_of(code))))
            .collect();
        told.retain(|code, _| reading.codes.binary_search(code).is_ok());
        let mut add = |code: u32, level| present.insert(Cause::Code(code), (table.action(code, level), level));
        if reading.level == Level::Gone {
            add(CARD_LOST, Level::Gone);
        }
        if reading.link == Some(Link::Down) {
            add(LINK_DOWN, Level::Minor);
        }
        let coded = !reading.codes.is_empty();
        let whole = coded && !reading.partial;
        let own = match reading.level {
            Level::Minor if !coded => Action::Warn,
            Level::Major if !whole => Action::Taint,
            // Only the administrator may explain a critical level away.
            Level::Critical if !(whole && reading.codes.iter().all(|code| table.overrides.contains_key(code))) => {
                Action::Taint
            }
            _ => Action::Ignore,
        };
        present.insert(Cause::Level, (own, reading.level));
        present.retain(|_, (action, _)| *action > Action::Ignore);
        present
    }

    /// Holds what is there, and lets go of what has been over for long enough.
    fn hold(&mut self, once: Option<FaultEvent>, policy: &Policy, now: Timestamp) {
        let present = self.present(&policy.table);
        for (cause, (action, level)) in &present {
            self.note(*cause, *action, *level, now);
        }
        let once = once.map(|event| {
            let action = policy.table.action(event.code, event.level);
            (Cause::Code(event.code), action, event.level)
        });
        if let Some((cause, action, level)) = once
            && action > Action::Ignore
        {
            self.note(cause, action, level, now);
        }
        self.faults.retain(|cause, fault| {
            let (action, level) = present.get(cause).copied().unwrap_or((Action::Ignore, Level::Ok));
            if action >= fault.action {
                return true;
            }
            let better = *fault.better.get_or_insert(now);
            if now.duration_since(better) >= span(policy.quiet) {
                // What was worse has been over for long enough; what came and went just now has not.
                let (action, level) = match once {
                    Some((other, lesser, told)) if other == *cause && lesser > action => (lesser, told),
                    _ => (action, level),
                };
                *fault = Fault { action, level, better: None, ..*fault };
            }
            fault.action > Action::Ignore
        });
    }

    fn note(&mut self, cause: Cause, action: Action, level: Level, now: Timestamp) {
        if self.faults.len() >= 2 * CODES_MAX && !self.faults.contains_key(&cause) {
            return;
        }
        let fault = self.faults.entry(cause).or_insert(Fault { action, level, since: now, better: None });
        fault.level = fault.level.max(level);
        if action >= fault.action {
            fault.action = action;
            fault.better = None;
        }
    }

    fn hold_link(&mut self, quiet: Duration, now: Timestamp) {
        match (self.link, self.reading.link) {
            (Some(Link::Down), Some(Link::Up)) => {
                let up = *self.link_up.get_or_insert(now);
                if now.duration_since(up) >= span(quiet) {
                    self.link = Some(Link::Up);
                }
            }
            (_, Some(link)) => {
                self.link = Some(link);
                self.link_up = None;
            }
            (_, None) => {}
        }
    }

    /// What the table now says less of is held no longer than the table says.
    fn limit(&mut self, table: &Table) {
        for (cause, fault) in &mut self.faults {
            if let Cause::Code(code) = cause
                && let Some(most) = table.fixed(*code)
            {
                fault.action = fault.action.min(most);
            }
        }
        self.faults.retain(|_, fault| fault.action > Action::Ignore);
    }

    fn judged(&self, misses: u32) -> Condition {
        let blind = self.missed >= misses || (self.reading.level == Level::Unknown && self.reading.partial);
        match self.action() {
            _ if self.reading.level == Level::Gone => Condition::Lost,
            Action::Evict => Condition::Fatal,
            Action::Taint => Condition::Tainted,
            _ if blind => Condition::Unknown,
            Action::Warn => Condition::Warn,
            Action::Ignore => Condition::Ok,
        }
    }

    /// What is done about the worst fault.
    #[must_use]
    pub fn action(&self) -> Action {
        self.faults.values().map(|fault| fault.action).max().unwrap_or(Action::Ignore)
    }

    /// The worst level of the faults that keep claims away.
    #[must_use]
    pub fn level(&self) -> Level {
        let bad = self.faults.values().filter(|fault| fault.action >= Action::Taint);
        bad.map(|fault| fault.level).max().unwrap_or(self.reading.level)
    }

    /// Since when the card is as bad as it is: the first of the faults that keep claims away, else the condition.
    #[must_use]
    pub fn bad_since(&self) -> Timestamp {
        self.worst_since().unwrap_or(self.since)
    }

    fn worst_since(&self) -> Option<Timestamp> {
        let bad = self.faults.values().filter(|fault| fault.action >= Action::Taint);
        bad.map(|fault| fault.since).min()
    }

    /// Since when every fault that keeps claims away is over; `None` if one is there, or there is none.
    #[must_use]
    pub fn quiet_since(&self) -> Option<Timestamp> {
        let mut bad = self.faults.values().filter(|fault| fault.action >= Action::Taint).map(|fault| fault.better);
        let first = bad.next()??;
        bad.try_fold(first, |last, better| better.map(|better| last.max(better)))
    }

    /// Codes that are active or held, in ascending order; those that are ignored only while they are active.
    #[must_use]
    pub fn codes(&self) -> Vec<u32> {
        let held = self.faults.keys().filter_map(|cause| match cause {
            Cause::Code(code) => Some(*code),
            Cause::Level => None,
        });
        let mut codes: Vec<_> = held.chain(self.reading.codes.iter().copied()).collect();
        codes.sort_unstable();
        codes.dedup();
        codes
    }

    /// What is wrong, the worst first, short enough for every message; empty if nothing is.
    #[must_use]
    pub fn text(&self) -> String {
        let mut faults: Vec<_> = self.faults.iter().collect();
        faults.sort_by_key(|(cause, fault)| (std::cmp::Reverse(fault.action), **cause == Cause::Level));
        let word = |cause: &Cause, fault: &Fault| match cause {
            Cause::Level => format!("level {}", fault.level),
            Cause::Code(code) => named(*code),
        };
        let mut words: Vec<_> = faults.iter().take(NAMED_MAX).map(|(cause, fault)| word(cause, fault)).collect();
        if faults.len() > NAMED_MAX {
            words.push(format!("and {} more", faults.len() - NAMED_MAX));
        }
        words.join(", ")
    }

    /// True if users must hear of the change from `old` to this.
    #[must_use]
    pub fn is_news(&self, old: Option<&Self>) -> bool {
        let Some(old) = old else { return !matches!(self.condition, Condition::Ok | Condition::Unknown) };
        let worse =
            |(cause, fault): (&Cause, &Fault)| old.faults.get(cause).is_none_or(|before| before.action < fault.action);
        let is_first = !old.heard && matches!(self.condition, Condition::Ok | Condition::Unknown);
        !is_first && (old.condition != self.condition || self.faults.iter().any(worse))
    }

    /// What must outlive a restart: faults that keep claims away.
    #[must_use]
    pub fn memory(&self) -> Vec<FaultMemory> {
        let bad = self.faults.iter().filter(|(_, fault)| fault.action >= Action::Taint);
        bad.map(|(cause, fault)| FaultMemory {
            cause: *cause,
            action: fault.action,
            level: fault.level,
            since: fault.since,
        })
        .collect()
    }
}

fn span(duration: Duration) -> SignedDuration {
    SignedDuration::try_from(duration).unwrap_or(SignedDuration::MAX)
}

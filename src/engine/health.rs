//! Keeps inventory, health and the published pool in step with the hardware.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, PoisonError, atomic::Ordering},
    time::Duration,
};

use futures::{FutureExt, StreamExt};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::{Core, claims, now, state::Change, suspended};
use crate::{
    device::Fault,
    domain::{
        health::{Alarm, Report},
        model::{self, Choice, Kept, Model},
        names::DeviceName,
        notice::{Notice, Severity},
        slice::Offer,
    },
};

/// Least time between two batches of alarms.
const ALARM_PACE: Duration = Duration::from_millis(100);
/// Most alarms in a batch.
const BATCH: usize = 4096;
/// Least time between two polls, also where the hardware wants one.
const LOOK_PACE: Duration = Duration::from_secs(1);

/// The engine's main loop: one turn is a scan or a health poll, and what follows from it.
pub(super) async fn run(core: &Arc<Core>, shutdown: CancellationToken, pulse: impl Fn() + Send + Sync) {
    let mut turn = Turn {
        fault: None,
        scan_due: Instant::now(),
        recovered: false,
        resumed: false,
        choice: None,
        kept: Kept::default(),
        unread: BTreeMap::new(),
        misfits: BTreeMap::new(),
    };
    let mut kept = core.api.kept();
    let alarms = listen(core);
    tokio::pin!(alarms);
    loop {
        let begun = Instant::now();
        while let Some(Some(newer)) = kept.next().now_or_never() {
            turn.kept = newer;
        }
        let work = turn.take(core);
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = work => {}
            // A slow vendor library is not a stuck engine: it has its own deadlines.
            () = heartbeat(&pulse, core) => {}
            () = &mut alarms => {}
        }
        pulse();
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = tokio::time::sleep(core.timing.health_interval) => {}
            // A server that was upgraded under us may keep less than before.
            Some(newer) = kept.next() => turn.kept = newer,
            () = doubt(core, begun + LOOK_PACE) => {}
            () = &mut alarms => {}
        }
    }
}

/// Pulses for as long as it is polled; proves on each beat that the state's lock can be had. A turn that is longer than
/// the time between two is an answer missed.
async fn heartbeat(pulse: &(impl Fn() + Send + Sync), core: &Arc<Core>) {
    loop {
        pulse();
        tokio::time::sleep(core.timing.health_interval).await;
        settle(core, core.state.polled(None, now())).await;
    }
}

/// Takes in what the hardware says unasked, at once; in a storm, all that came meanwhile at a bearable pace.
async fn listen(core: &Arc<Core>) {
    let mut alarms = core.backend.alarms();
    while let Some(first) = alarms.next().await {
        let mut batch = Vec::new();
        let mut unsure = false;
        let mut next = Some(first);
        while let Some(alarm) = next {
            core.alarms.count(&alarm);
            match alarm {
                Alarm::Event { physical_id, event } => batch.push((physical_id, Report::Event(event))),
                Alarm::Lost { physical_id } => batch.push((physical_id, Report::Lost)),
                Alarm::Unsure => unsure = true,
            }
            next = if batch.len() < BATCH { alarms.next().now_or_never().flatten() } else { None };
        }
        let (change, known) = core.state.alarmed(&batch, now());
        if !known {
            warn!("the hardware reports a fault of a chip that no scan has found; the cards are read again");
            core.strangers.store(true, Ordering::Relaxed);
        }
        if unsure || !known {
            core.unsure.notify_one();
        }
        settle(core, change).await;
        tokio::time::sleep(ALARM_PACE).await;
    }
    // A backend without events has none, it does not end the engine.
    std::future::pending::<()>().await;
}

/// Ends when the hardware wants a poll, but not before this time.
async fn doubt(core: &Arc<Core>, earliest: Instant) {
    core.unsure.notified().await;
    tokio::time::sleep_until(earliest).await;
}

/// Publishes the pool if it is another than the last.
fn publish(core: &Core) {
    // Before the model is known nothing is rewritten: a card must not be offered whole while it is cut.
    if !core.state.is_chosen() {
        return;
    }
    let mut shown = core.shown.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(pool) = core.state.pool(core.api.keeps_taints())
        && shown.as_ref() != Some(&pool)
    {
        core.api.publish(pool.clone());
        *shown = Some(pool);
    }
}

struct Turn {
    fault: Option<Fault>,
    scan_due: Instant,
    recovered: bool,
    /// True from a suspension to the first good scan after it.
    resumed: bool,
    choice: Option<Choice>,
    kept: Kept,
    /// Why cards cannot be read, by physical id: each reason is said once.
    unread: BTreeMap<u32, Fault>,
    /// What of the static layout cannot be had, by card name: each reason is said once.
    misfits: BTreeMap<String, String>,
}

impl Turn {
    async fn take(&mut self, core: &Arc<Core>) {
        if core.state.is_suspended() {
            return self.suspended(core).await;
        }
        let first = !self.recovered;
        let strange = core.strangers.load(Ordering::Relaxed) || self.resumed || core.backend.is_outdated();
        let scan = first || self.fault.is_some() || strange || core.state.wants_rescan();
        if scan && Instant::now() >= self.scan_due {
            core.strangers.store(false, Ordering::Relaxed);
            self.scan(core).await;
        }
        // The first scan has told all but the links. Later ones must not keep polls away: scans go on for as long as one
        // card is away, and the others are well or ill meanwhile.
        if !first && self.can_ask() {
            self.poll(core).await;
        } else if self.fault.is_some() {
            settle(core, core.state.polled(None, now())).await;
        }
        if self.recovered && self.can_ask() {
            read_cards(core, &mut self.unread).await;
        }
        self.show(core).await;
    }

    /// True if the cards that were found can be asked, also while others are on their way up.
    fn can_ask(&self) -> bool {
        matches!(self.fault, None | Some(Fault::NotReady { .. }))
    }

    async fn poll(&mut self, core: &Arc<Core>) {
        match core.backend.health().await {
            Ok(readings) => settle(core, core.state.polled(Some(&readings), now())).await,
            Err(fault) => {
                if self.fault.is_none() {
                    self.failed(core, fault);
                }
                settle(core, core.state.polled(None, now())).await;
            }
        }
    }

    /// A turn without any call of the vendor's software: what was known before stands.
    async fn suspended(&mut self, core: &Arc<Core>) {
        suspended::keep(core).await;
        if !self.recovered && core.state.is_scanned() {
            claims::recover(core).await;
            self.recovered = true;
        }
        (self.fault, self.resumed, self.scan_due) = (None, true, Instant::now());
        self.show(core).await;
    }

    async fn show(&mut self, core: &Arc<Core>) {
        self.choose(core).await;
        let misfits = core.state.misfits();
        for (card, why) in misfits.iter().filter(|(card, why)| self.misfits.get(*card) != Some(*why)) {
            if let Ok(device) = DeviceName::new(card.as_str()) {
                core.outbox.say(&Notice::Closed { device, why: Some(why.clone()) });
            }
        }
        self.misfits = misfits;
        publish(core);
    }

    /// Chooses the slicing model; it changes only while no claim holds a part that another model gave it.
    async fn choose(&mut self, core: &Arc<Core>) {
        let kept = self.kept;
        let wish = core.wish();
        let Some(mut choice) = model::choose(&wish, kept) else { return };
        let offer = core.state.offer();
        if core.state.is_suspended() {
            choice = Choice { model: offer.model, why: offer.why.clone() };
        } else if choice.model != Model::Off
            && let Some(why) = forbidden(core).await
        {
            choice = Choice { model: Model::Off, why };
        }
        let mut layout = wish.layout;
        if let Some(why) = self.pending(core, choice.model, &offer, &layout) {
            choice = Choice { model: offer.model, why };
            layout.clone_from(&offer.layout);
        }
        let (model, why) = (choice.model, choice.why.clone());
        if self.choice.as_ref() != Some(&choice) {
            if wish.enabled {
                core.outbox.say(&Notice::Model { model, why: why.clone() });
            }
            self.choice = Some(choice);
        }
        let rival = (core.rival)();
        let (closed, holds, suspended) = (offer.closed.clone(), offer.holds.clone(), offer.suspended.clone());
        let wanted = Offer { model, chosen: true, layout, kept, closed, holds, rival, suspended, why };
        if wanted != offer {
            core.state.set_offer(wanted);
            core.claims.retry();
        }
    }

    /// Why a model or a layout that is wanted has to wait for live claims.
    fn pending(
        &self,
        core: &Core,
        wanted: Model,
        offer: &Offer,
        layout: &BTreeMap<String, Vec<String>>,
    ) -> Option<String> {
        self.choice.as_ref()?;
        if wanted != offer.model {
            return core.state.has_parts().then(|| format!("{wanted} is pending until claims with parts are released"));
        }
        if wanted != Model::Static {
            return None;
        }
        let cards = layout.keys().chain(offer.layout.keys());
        let held: BTreeSet<_> = cards
            .filter(|card| layout.get(*card) != offer.layout.get(*card) && core.state.is_held(card))
            .map(String::as_str)
            .collect();
        let held = held.into_iter().collect::<Vec<_>>().join(", ");
        (!held.is_empty()).then(|| format!("another layout is pending until claims on {held} are released"))
    }

    async fn scan(&mut self, core: &Arc<Core>) {
        match core.backend.scan().await {
            Ok(scan) => match core.state.scanned(&scan, now()) {
                Ok(change) => {
                    if let Some(fault) = self.fault.take() {
                        let what = format!("{} works again after: {fault}", core.backend.name());
                        core.outbox.say(&Notice::Backend { severity: Severity::Info, what });
                    }
                    self.resumed = false;
                    settle(core, change).await;
                    if !self.recovered {
                        read_cards(core, &mut self.unread).await;
                        claims::recover(core).await;
                        self.recovered = true;
                    }
                    self.scan_due = Instant::now() + core.timing.rescan;
                }
                Err(error) => {
                    let why = error.to_string();
                    self.failed(
                        core,
                        Fault::Failed { backend: core.backend.name(), call: "naming the cards".to_owned(), why },
                    );
                }
            },
            Err(fault) => self.failed(core, fault),
        }
    }

    /// Remembers a fault, and says it once. What is published stays as it is.
    fn failed(&mut self, core: &Arc<Core>, fault: Fault) {
        // That was an operator's wish, in the middle of this turn.
        if matches!(fault, Fault::Suspended { .. }) {
            return;
        }
        if self.fault.as_ref() != Some(&fault) {
            core.outbox.say(&Notice::Backend { severity: Severity::Error, what: fault.to_string() });
        }
        // A fault that a re-scan may mend is re-scanned at once the first time, then at the interval.
        self.scan_due = if self.fault.is_none() { Instant::now() } else { Instant::now() + core.timing.rescan };
        self.fault = Some(fault);
    }
}

/// Reads the cards that can be cut, except those that a claim is working on.
async fn read_cards(core: &Arc<Core>, unread: &mut BTreeMap<u32, Fault>) {
    if !core.wish().enabled && !core.state.has_parts() {
        return;
    }
    for (card, physical_id) in core.state.cuttable() {
        let Some(_lock) = core.cards.try_lock(&card) else { continue };
        match core.backend.card(physical_id).await {
            Ok(reading) => {
                unread.remove(&physical_id);
                settle(core, core.state.read_card(&card, reading)).await;
            }
            Err(fault) => {
                if unread.get(&physical_id) != Some(&fault) && !matches!(fault, Fault::Suspended { .. }) {
                    warn!(physical_id, fault = %fault, "a card's vNPUs cannot be read; its last reading stays");
                }
                unread.insert(physical_id, fault);
            }
        }
    }
}

/// Why no card may be cut on this node, however it is configured. Switches the vendor's replay off where nothing is lost.
async fn forbidden(core: &Arc<Core>) -> Option<String> {
    if !core.state.is_scanned() {
        return None;
    }
    if let Some(rival) = (core.rival)() {
        return Some(format!("{rival}; such plugins destroy vNPUs that look idle"));
    }
    let vendor = match core.backend.vendor().await {
        Ok(vendor) => vendor,
        Err(fault @ Fault::Unsupported { .. }) => return Some(fault.to_string()),
        // Not known for a moment: what is offered stays as it is.
        Err(_) if core.state.offer().model != Model::Off => return None,
        Err(fault) => return Some(format!("how the vendor's software deals with vNPUs cannot be read: {fault}")),
    };
    if vendor.virtual_machines == Some(true) {
        return Some("the node cuts for virtual machines; run: npu-smi set -t vnpu-mode -d 0".to_owned());
    }
    if vendor.replay != Some(true) {
        return None;
    }
    let command = "run: npu-smi set -t vnpu-cfg-recover -d 0";
    if core.state.has_unowned_vnpu() {
        return Some(format!("the vendor's replay of vNPUs is on, and there are vNPUs that are not ours; {command}"));
    }
    // What is listed and not there after the replay's time is a left-over of the list.
    let pending = !vendor.listed.is_empty() && (core.uptime)() < core.timing.replay_wait;
    if core.state.has_vnpu() || pending {
        return None;
    }
    match core.backend.set_replay(false).await {
        Ok(()) => {
            let what = "the vendor's replay of vNPUs after a boot was switched off (vnpu-cfg-recover)".to_owned();
            core.outbox.say(&Notice::Backend { severity: Severity::Warning, what });
            None
        }
        Err(fault) => {
            Some(format!("the vendor's replay of vNPUs is on and cannot be switched off: {fault}; {command}"))
        }
    }
}

/// Says what changed, publishes it, and writes the node's memory if it did.
pub(super) async fn settle(core: &Arc<Core>, change: Change) {
    announce(core, &change);
    if let Err(why) = save(core).await {
        warn!(error = why, "the node's memory of its cards cannot be written; it is tried again at the next poll");
    }
}

/// Says what changed, and publishes it. A name is on disk before it is published: another card must never get it.
pub(super) fn announce(core: &Core, change: &Change) {
    for notice in &change.notices {
        core.outbox.say(notice);
    }
    if !change.named {
        publish(core);
    }
}

/// Writes the node's memory, if it is not on disk.
pub(super) async fn save(core: &Arc<Core>) -> Result<(), String> {
    if !core.state.is_unsaved() {
        return Ok(());
    }
    // One after the other: an older memory must never be written over a newer one.
    let turn = core.writing.clone().lock_owned().await;
    let state = core.clone();
    let write = move || {
        let _turn = turn;
        let Some(memory) = state.state.unsaved() else { return Ok(()) };
        state.disk.write_node(&memory).map(|()| state.state.saved(&memory))
    };
    let written = tokio::task::spawn_blocking(write).await;
    written.unwrap_or_else(|error| Err(error.to_string()))
}

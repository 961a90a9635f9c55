//! Cuts cards and un-cuts them: the only place where a plan meets the vendor library.
//!
//! A card is locked from its reading until its vNPU is recorded, so that no two claims decide by the same reading. Only
//! claims that cut the same card wait for each other.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures::future::BoxFuture;
use tokio::{sync::OwnedMutexGuard, time::Instant};
use tracing::{info, warn};

use super::{Core, health, steps};
use crate::{
    device::Fault,
    domain::{
        claim::ClaimRef,
        npu::StableId,
        plan::{self, Order, Readings, Step, Verdict},
        record::{Cut, Record},
        refusal::Refusal,
        vnpu::{CardReading, VnpuReading},
    },
};

/// How often a busy card is asked again, and the first pause between; it doubles.
const TRIES: u32 = 3;

/// The locks of the cards.
#[derive(Debug, Default)]
pub(super) struct Cards {
    locks: Mutex<HashMap<StableId, Arc<tokio::sync::Mutex<()>>>>,
}

impl Cards {
    fn of(&self, card: &StableId) -> Arc<tokio::sync::Mutex<()>> {
        self.locks.lock().unwrap_or_else(PoisonError::into_inner).entry(card.clone()).or_default().clone()
    }

    /// Locks cards in the order of their identities, so that two claims never wait for each other.
    pub(super) async fn lock(&self, cards: &BTreeMap<StableId, u32>) -> Vec<OwnedMutexGuard<()>> {
        let mut guards = Vec::with_capacity(cards.len());
        for card in cards.keys() {
            guards.push(self.of(card).lock_owned().await);
        }
        guards
    }

    /// Locks a card if nobody works on it.
    pub(super) fn try_lock(&self, card: &StableId) -> Option<OwnedMutexGuard<()>> {
        self.of(card).try_lock_owned().ok()
    }
}

fn failed(claim: &ClaimRef, what: &'static str) -> impl FnOnce(Fault) -> Refusal {
    let claim = claim.clone();
    move |fault| Refusal::Failed { claim, what, why: fault.to_string() }
}

/// Reads the cards that a claim cuts.
pub(super) async fn read(core: &Core, claim: &ClaimRef, cards: &BTreeMap<StableId, u32>) -> Result<Readings, Refusal> {
    let mut readings = Readings::new();
    for (card, physical_id) in cards {
        let reading = core.backend.card(*physical_id).await.map_err(failed(claim, "reading the card"))?;
        readings.insert(card.clone(), reading);
    }
    Ok(readings)
}

/// Makes one vNPU and reads it back. An error says nothing about whether it exists.
pub(super) async fn make(core: &Core, claim: &ClaimRef, order: &Order) -> Result<VnpuReading, Refusal> {
    let mut pause = core.timing.busy_pause;
    let mut tries = 1;
    let id = loop {
        match core.backend.create(order.physical_id, &order.template, order.id).await {
            Ok(id) => break id,
            Err(fault @ Fault::Busy { .. }) if tries < TRIES => {
                warn!(claim = %claim, tries, fault = %fault, "the card is busy; its vNPU is tried again");
                tokio::time::sleep(pause).await;
                (pause, tries) = (pause * 2, tries + 1);
            }
            Err(fault) => return Err(failed(claim, "making the vNPU")(fault)),
        }
    };
    let reading = core.backend.card(order.physical_id).await.map_err(failed(claim, "reading the vNPU back"))?;
    let found = reading.vnpu(id).cloned();
    if let Some(vnpu) = &found {
        core.state.note_made(&order.card, vnpu);
    }
    found.ok_or_else(|| Refusal::Failed {
        claim: claim.clone(),
        what: "reading the vNPU back",
        why: format!("the library made vNPU {id} and does not list it"),
    })
}

/// Destroys the vNPU that a record names, wherever the library has it; one that is gone is success. Never more than
/// that one, and never one that cannot be told from others.
///
/// The caller holds the card's lock.
pub(super) async fn destroy(
    core: &Core,
    claim: &ClaimRef,
    card: &StableId,
    physical_id: u32,
    cut: &Cut,
    force: bool,
) -> Result<(), Refusal> {
    let mut cut = cut.clone();
    let mut pause = core.timing.busy_pause;
    let mut last = String::new();
    for _ in 0..TRIES {
        if let Some(other) = core.state.other_card(card, physical_id) {
            // What has our id there is another claim's, or nobody's: ours went with its card.
            warn!(claim = %claim, vnpu = cut.id, %card, now = %other, "another card is in the place of the vNPU's");
            return Ok(());
        }
        let before = match core.backend.card(physical_id).await {
            Err(fault @ Fault::Gone { .. }) if force => {
                warn!(claim = %claim, vnpu = cut.id, %card, %fault, "released by force; its vNPU is left to its card");
                return Ok(());
            }
            Err(fault @ Fault::Gone { .. }) => {
                let (claim, device) = (claim.clone(), card.to_string());
                return Err(Refusal::DeviceGone { claim, device, why: fault.to_string() });
            }
            reading => reading.map_err(failed(claim, "reading the card"))?,
        };
        let id = match plan::verdict(&cut, &before, &core.state.named(card, &claim.uid)) {
            Verdict::Gone => return Ok(()),
            Verdict::Destroy(id) => id,
            Verdict::Disputed(ids) if force => {
                warn!(claim = %claim, ?ids, "released by force; none of these vNPUs is destroyed");
                return Ok(());
            }
            Verdict::Disputed(ids) => {
                let ids = ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
                return Err(Refusal::Disputed { claim: claim.clone(), device: card.to_string(), ids });
            }
        };
        let Err(fault) = core.backend.destroy(physical_id, id).await else {
            info!(claim = %claim, vnpu = id, "vNPU destroyed");
            core.state.note_gone(card, id);
            return Ok(());
        };
        // An error may come after success, or with the vNPU made again under another id.
        let after = read_one(core, claim, physical_id).await?;
        cut.id = id;
        if let Some(id) = plan::remade(&cut, &before, &after) {
            warn!(claim = %claim, old = cut.id, new = id, "the library made the vNPU again under another id");
            rename(core, claim, card, cut.id, id).await?;
            cut.id = id;
        } else if after.vnpu(id).is_none() {
            core.state.note_gone(card, id);
            return Ok(());
        }
        last = fault.to_string();
        tokio::time::sleep(pause).await;
        pause *= 2;
    }
    Err(Refusal::Failed { claim: claim.clone(), what: "destroying the vNPU", why: last })
}

async fn read_one(core: &Core, claim: &ClaimRef, physical_id: u32) -> Result<CardReading, Refusal> {
    core.backend.card(physical_id).await.map_err(failed(claim, "reading the card"))
}

/// Writes down that a vNPU of a claim has another id now.
async fn rename(core: &Core, claim: &ClaimRef, card: &StableId, old: u32, new: u32) -> Result<(), Refusal> {
    let Some(mut record) = core.state.record(&claim.uid) else { return Ok(()) };
    for holding in record.devices.iter_mut().filter(|holding| holding.stable_id == *card) {
        if let Some(cut) = holding.cut.as_mut().filter(|cut| cut.id == old) {
            cut.id = new;
        }
    }
    core.state.enter(record.clone());
    write(core, claim, record).await
}

async fn write(core: &Core, claim: &ClaimRef, record: Record) -> Result<(), Refusal> {
    steps::on_disk(core, vec![Step::Write(Box::new(record))]).await.map_err(|(what, why)| Refusal::Failed {
        claim: claim.clone(),
        what,
        why,
    })
}

/// Runs work of an operator as a task of its own: a caller that goes away leaves no card half changed and unlocked.
pub(super) fn detached<T: Send + 'static>(
    work: impl Future<Output = Result<T, Refusal>> + Send + 'static,
) -> BoxFuture<'static, Result<T, Refusal>> {
    Box::pin(async move {
        tokio::spawn(work).await.unwrap_or_else(|error| {
            Err(Refusal::OperatorFailed { what: "the operator's wish".to_owned(), why: error.to_string() })
        })
    })
}

/// Why no vNPU is made or destroyed while an operator has taken the vendor's software from us.
fn suspended(core: &Core) -> Option<String> {
    let why = core.state.suspension()?.why();
    Some(format!("{} is {why}; npuctl backend resume ends that", core.backend.name()))
}

/// What an operator is told of a fault that changed nothing: the chip's state refuses it, or it failed.
fn not_now(fault: &Fault, what: &str) -> Refusal {
    let (what, why) = (what.to_owned(), fault.to_string());
    match fault {
        Fault::NotReady { .. } | Fault::Busy { .. } => Refusal::Denied { what, why },
        _ => Refusal::OperatorFailed { what, why },
    }
}

/// Makes a vNPU for an operator; gives it as read back. The card leaves the pool, since no claim of ours names it.
pub(super) async fn operator_create(core: &Arc<Core>, device: &str, template: &str) -> Result<VnpuReading, Refusal> {
    let what = || format!("making a vNPU on {device}");
    let failed = |fault: Fault| Refusal::OperatorFailed { what: what(), why: fault.to_string() };
    let refused = |fault: Fault| not_now(&fault, &what());
    let (card, physical_id) = core.state.card_of(device).ok_or_else(|| Refusal::NoSuch(format!("device {device}")))?;
    if !core.wish().enabled {
        let why = "hard slicing is not enabled (--enable-hard-vnpu)".to_owned();
        return Err(Refusal::Denied { what: format!("a vNPU on {device}"), why });
    }
    if let Some(why) = suspended(core) {
        return Err(Refusal::Denied { what: what(), why });
    }
    let _lock = core.cards.lock(&BTreeMap::from([(card.clone(), physical_id)])).await;
    let reading = core.backend.card(physical_id).await.map_err(refused)?;
    let readings = Readings::from([(card.clone(), reading)]);
    let (physical_id, id) = core.state.close_for_operator(&card, &readings, device, template)?;
    let made = core.backend.create(physical_id, template, id).await;
    // Whatever came of it, what the card has now decides whether it takes claims.
    let after = read_anew(core, &card, physical_id).await;
    let id = made.map_err(refused)?;
    let why = format!("the library made vNPU {id} and does not list it");
    after.map_err(failed)?.vnpu(id).cloned().ok_or_else(|| Refusal::OperatorFailed { what: what(), why })
}

/// Destroys a vNPU that no claim has.
pub(super) async fn operator_destroy(core: &Arc<Core>, id: u32, force: bool) -> Result<(), Refusal> {
    let what = || format!("destroying vNPU {id}");
    let failed = |fault: Fault| Refusal::OperatorFailed { what: what(), why: fault.to_string() };
    if let Some(why) = suspended(core) {
        return Err(Refusal::Denied { what: what(), why });
    }
    let (card, physical_id) = core.state.card_of_vnpu(id).ok_or_else(|| Refusal::NoSuch(format!("vNPU {id}")))?;
    let _lock = core.cards.lock(&BTreeMap::from([(card.clone(), physical_id)])).await;
    let before = core.backend.card(physical_id).await.map_err(|fault| not_now(&fault, &what()))?;
    let readings = Readings::from([(card.clone(), before.clone())]);
    let physical_id = core.state.plan(&readings, |world| plan::operator_destroy(world, id, force))?;
    let destroyed = core.backend.destroy(physical_id, id).await;
    let after = read_anew(core, &card, physical_id).await;
    let Err(fault) = destroyed else { return Ok(()) };
    // An error may come after success, or with the vNPU made again under another id.
    match after.map_err(failed)? {
        after if after.ids().iter().any(|id| before.vnpu(*id).is_none()) => {
            let new: Vec<_> = after.ids().into_iter().filter(|id| before.vnpu(*id).is_none()).collect();
            let why = format!("{fault}; the library made it again as {new:?}");
            Err(Refusal::OperatorFailed { what: what(), why })
        }
        after if after.vnpu(id).is_none() => Ok(()),
        _ => Err(not_now(&fault, &what())),
    }
}

/// Reads a card and takes the reading in, so that it closes or opens at once.
async fn read_anew(core: &Arc<Core>, card: &StableId, physical_id: u32) -> Result<CardReading, Fault> {
    let reading = core.backend.card(physical_id).await?;
    health::settle(core, core.state.read_card(card, reading.clone())).await;
    Ok(reading)
}

/// Waits until the vendor's own replay of vNPUs after a boot has ended: before that an id may be taken at any moment.
///
/// It has ended if it is off, if it has nothing to bring back, if all of that is there, or if enough time has passed.
pub(super) async fn replayed(core: &Core, claim: &ClaimRef) -> Result<(), Refusal> {
    if core.state.is_replayed() {
        return Ok(());
    }
    let patience = Instant::now() + core.timing.replay_patience;
    loop {
        let up = (core.uptime)();
        let ended =
            up >= core.timing.replay_wait || is_replayed(core).await.map_err(failed(claim, "reading the vNPU mode"))?;
        if ended {
            core.state.set_replayed();
            return Ok(());
        }
        if Instant::now() >= patience {
            let why = "the vendor's replay of vNPUs after the boot has not ended".to_owned();
            return Err(Refusal::CardBusy { claim: claim.clone(), device: "the card".to_owned(), why });
        }
        tokio::time::sleep(core.timing.busy_pause.max(Duration::from_millis(10))).await;
    }
}

async fn is_replayed(core: &Core) -> Result<bool, Fault> {
    let vendor = core.backend.vendor().await?;
    if vendor.replay == Some(false) || vendor.listed.is_empty() {
        return Ok(true);
    }
    let mut there = Vec::new();
    for (_, physical_id) in core.state.cuttable() {
        there.extend(core.backend.card(physical_id).await?.ids());
    }
    Ok(vendor.listed.iter().all(|id| there.contains(id)))
}

//! One job per claim UID.
//!
//! * Different claims run side by side; equal requests join the job that runs.
//! * An unprepare cancels the prepare of its claim at that one's next step, waits for it to undo itself, then runs.
//! * A prepare that was *received* before an unprepare of its claim was answered brings nothing back: kubelet's calls
//!   can overtake each other. One received later is new (a direct claim keeps its UID from pod to pod).
//! * A prepare that finds its devices held by another claim waits a little for that one's unprepare, and one of a part
//!   for the slicing model.
//! * A job is a task of its own: it goes on when kubelet drops the call.
//! * A vNPU on a card that is lost cannot be destroyed. Its claim's unprepare is answered all the same, and its record
//!   stays until the card is back, or another is in its place.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    slice,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures::{FutureExt, future::BoxFuture};
use tokio::{
    sync::{Notify, watch},
    time::{Instant, sleep_until, timeout_at},
};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, error, info_span};

use super::{
    Core, cards, now,
    steps::{self, Outcome},
};
use crate::domain::{
    claim::{AllocatedClaim, ClaimRef, ClaimUid, PreparedDevice},
    notice::Notice,
    plan::{self, Readings, Step},
    record::{Cut, Phase, Record},
    refusal::Refusal,
    vnpu::VnpuReading,
};

/// Proof that a call was received, and when in the order of calls. A clone is the same call.
#[derive(Debug, Clone)]
pub struct Received(Arc<Receipt>);

#[derive(Debug)]
struct Receipt {
    sequence: u64,
    desk: Arc<Mutex<Desk>>,
}

impl Drop for Receipt {
    fn drop(&mut self) {
        let mut desk = lock(&self.desk);
        desk.open.remove(&self.sequence);
        desk.prune();
    }
}

/// Order of calls, and which claims were unprepared while older calls are still about.
#[derive(Debug, Default)]
struct Desk {
    next: u64,
    open: BTreeSet<u64>,
    unprepared: HashMap<ClaimUid, u64>,
}

impl Desk {
    /// A tombstone matters only while a call that is older than it is open.
    fn prune(&mut self) {
        match self.open.first().copied() {
            None => self.unprepared.clear(),
            Some(oldest) => self.unprepared.retain(|_, at| *at > oldest),
        }
    }
}

type PrepareResult = Result<Vec<PreparedDevice>, Refusal>;
type Pending<T> = watch::Receiver<Option<T>>;

/// The job of one claim.
#[derive(Debug, Clone)]
enum Job {
    Prepare {
        claim: ClaimRef,
        cancel: CancellationToken,
        done: Pending<PrepareResult>,
    },
    Unprepare {
        done: Pending<Result<(), Refusal>>,
    },
    /// Recovery's step for this claim.
    Recover {
        done: Pending<()>,
    },
}

/// All jobs.
#[derive(Debug, Default)]
pub(super) struct Claims {
    desk: Arc<Mutex<Desk>>,
    jobs: Mutex<HashMap<ClaimUid, Job>>,
    /// Claims whose release is tried until it is done.
    followed: Mutex<BTreeSet<ClaimUid>>,
    closed: AtomicBool,
    emptied: Notify,
    /// What a prepare may wait for has come: a claim was released, the slicing model is known, or no new work is taken.
    retry: Notify,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Claims {
    pub(super) fn received(&self) -> Received {
        let mut desk = lock(&self.desk);
        let sequence = desk.next;
        desk.next += 1;
        desk.open.insert(sequence);
        Received(Arc::new(Receipt { sequence, desk: self.desk.clone() }))
    }

    /// Refuses new work from now on.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.retry();
    }

    /// Lets prepares that were refused for a reason that passes try again.
    pub(super) fn retry(&self) {
        self.retry.notify_waiters();
    }

    /// Waits until no job runs.
    pub(super) async fn idle(&self) {
        loop {
            let emptied = self.emptied.notified();
            if lock(&self.jobs).is_empty() {
                return;
            }
            emptied.await;
        }
    }

    fn is_overtaken(&self, received: &Received, uid: &ClaimUid) -> bool {
        lock(&self.desk).unprepared.get(uid).is_some_and(|at| *at > received.0.sequence)
    }

    /// Notes that an unprepare is being answered now.
    fn unprepared(&self, uid: &ClaimUid) {
        let mut desk = lock(&self.desk);
        let at = desk.next;
        desk.next += 1;
        desk.unprepared.insert(uid.clone(), at);
        desk.prune();
    }

    fn end(&self, uid: &ClaimUid, is_mine: impl Fn(&Job) -> bool) {
        let mut jobs = lock(&self.jobs);
        if jobs.get(uid).is_some_and(is_mine) {
            jobs.remove(uid);
        }
        if jobs.is_empty() {
            self.emptied.notify_waiters();
        }
    }
}

/// Waits for a job's result; `None` if its task died.
async fn result<T: Clone>(mut done: Pending<T>) -> Option<T> {
    done.wait_for(Option::is_some).await.ok().and_then(|value| value.clone())
}

/// Answers with the result of a prepare that runs for `claim`.
fn join(claim: ClaimRef, done: Pending<PrepareResult>) -> BoxFuture<'static, PrepareResult> {
    async move { result(done).await.unwrap_or_else(|| Err(died(claim))) }.boxed()
}

fn died(claim: ClaimRef) -> Refusal {
    Refusal::Internal(claim, "its task ended without an answer".to_owned())
}

/// Runs a future, turning a panic into `None`: one bad claim must not take the node's admission down.
async fn guarded<T>(future: impl Future<Output = T>) -> Option<T> {
    std::panic::AssertUnwindSafe(future).catch_unwind().await.ok()
}

pub(super) fn prepare(core: Arc<Core>, received: Received, claim: ClaimRef) -> BoxFuture<'static, PrepareResult> {
    if core.claims.closed.load(Ordering::Acquire) {
        return futures::future::err(Refusal::Stopping).boxed();
    }
    let mut jobs = lock(&core.claims.jobs);
    if core.claims.is_overtaken(&received, &claim.uid) {
        return futures::future::err(Refusal::Overtaken(claim)).boxed();
    }
    match jobs.get(&claim.uid) {
        Some(Job::Prepare { claim: running, cancel, done }) if *running == claim && !cancel.is_cancelled() => {
            join(claim, done.clone())
        }
        // Its unprepare is not answered yet, so this call was received before.
        Some(Job::Prepare { .. } | Job::Unprepare { .. }) => futures::future::err(Refusal::Overtaken(claim)).boxed(),
        Some(Job::Recover { done }) => {
            let done = done.clone();
            drop(jobs);
            async move {
                result(done).await;
                prepare(core, received, claim).await
            }
            .boxed()
        }
        None => {
            let (sender, done) = watch::channel(None);
            let cancel = CancellationToken::new();
            let job = Job::Prepare { claim: claim.clone(), cancel: cancel.clone(), done: done.clone() };
            jobs.insert(claim.uid.clone(), job);
            drop(jobs);
            let span = info_span!("prepare", claim = %claim, claim.uid = %claim.uid);
            let reference = claim.clone();
            let work = async move {
                // Held to the end, so that an unprepare answered meanwhile is remembered.
                let _received = received;
                let done = guarded(run_prepare(&core, &reference, &cancel)).await;
                let answer = done.unwrap_or_else(|| {
                    error!("the prepare task panicked");
                    Err(Refusal::Internal(reference.clone(), "the task panicked".to_owned()))
                });
                if let Err(refusal) = &answer {
                    core.outbox.say(&Notice::Refused {
                        claim: reference.clone(),
                        operation: "prepare",
                        refusal: refusal.clone(),
                    });
                }
                core.claims.end(
                    &reference.uid,
                    |job| matches!(job, Job::Prepare { cancel: mine, .. } if !mine.is_cancelled()),
                );
                sender.send_replace(Some(answer));
            };
            tokio::spawn(work.instrument(span));
            join(claim, done)
        }
    }
}

async fn run_prepare(core: &Arc<Core>, claim: &ClaimRef, cancel: &CancellationToken) -> PrepareResult {
    let overtaken = || Err(Refusal::Overtaken(claim.clone()));
    let mut recovered = core.state.recovered();
    let known_by = Instant::now() + core.timing.first_scan_wait;
    tokio::select! {
        biased;
        () = cancel.cancelled() => return overtaken(),
        waited = timeout_at(known_by, recovered.wait_for(|done| *done)) => {
            if !matches!(waited, Ok(Ok(_))) {
                let status = core.backend.status();
                return Err(Refusal::NotScanned(format!("{} is {}: {}", status.backend, status.state, status.detail)));
            }
        }
    }
    let allocated = tokio::select! {
        biased;
        () = cancel.cancelled() => return overtaken(),
        read = core.api.claim(claim.clone()) => read?,
    };
    let released_by = Instant::now() + core.timing.release_wait;
    loop {
        // From before the try, so that nothing that comes during it is missed.
        let retry = core.claims.retry.notified();
        let answer = try_prepare(core, &allocated, cancel).await;
        // After a refusal kubelet lets a minute pass: what passes sooner is waited for.
        let until = match &answer {
            _ if core.claims.closed.load(Ordering::Acquire) => return answer,
            Err(Refusal::ModelUnknown { .. }) => known_by,
            // The scheduler gave it to this claim, so the other is about to be released: a pod that is deleted without
            // a grace period gives its devices away before kubelet has told us.
            Err(Refusal::Held { .. } | Refusal::NoRoom { .. }) => released_by,
            _ => return answer,
        };
        tokio::select! {
            biased;
            () = cancel.cancelled() => return overtaken(),
            () = retry => {}
            () = sleep_until(until) => return answer,
        }
    }
}

async fn try_prepare(core: &Arc<Core>, allocated: &AllocatedClaim, cancel: &CancellationToken) -> PrepareResult {
    let claim = &allocated.claim;
    let overtaken = || Err(Refusal::Overtaken(claim.clone()));
    if cancel.is_cancelled() {
        return overtaken();
    }
    if core.state.record(&claim.uid).is_some_and(|record| record.phase == Phase::Releasing) {
        // An unprepare was cut off, or failed. What it was to take away must be gone before the claim begins anew.
        run_unprepare(core, claim, false).await?;
    }
    let cards = core.state.cards_to_read(allocated);
    if cards.is_empty() {
        return prepare_whole(core, allocated, cancel).await;
    }
    let _locks = tokio::select! {
        biased;
        () = cancel.cancelled() => return overtaken(),
        locks = core.cards.lock(&cards) => locks,
    };
    tokio::select! {
        biased;
        () = cancel.cancelled() => return overtaken(),
        replayed = cards::replayed(core, claim) => replayed?,
    }
    let readings = cards::read(core, claim, &cards).await?;
    prepare_cut(core, allocated, &readings, cancel).await
}

/// Whole cards: disk work only, all of it in one go.
async fn prepare_whole(core: &Arc<Core>, allocated: &AllocatedClaim, cancel: &CancellationToken) -> PrepareResult {
    let claim = &allocated.claim;
    let (prepare, before) = core.state.reserve(allocated, &Readings::new(), now())?;
    let (disk, steps, token, earlier) = (core.disk.clone(), prepare.steps, cancel.clone(), before.clone());
    let run = move || steps::run(&*disk, &steps, earlier.as_ref(), &|| token.is_cancelled());
    let outcome = match tokio::task::spawn_blocking(run).await {
        Ok(outcome) => outcome,
        // A panic in a step: what reached the disk is unknown, so the claim keeps its devices until it is unprepared.
        Err(panic) => {
            doubt(core, prepare.record);
            return Err(Refusal::Internal(claim.clone(), panic.to_string()));
        }
    };
    match outcome {
        Outcome::Done => Ok(prepared(core, &prepare.record, before.is_some())),
        Outcome::Undone { step, why } => {
            core.state.unreserve(&claim.uid, before);
            match why {
                Some(why) => Err(Refusal::Failed { claim: claim.clone(), what: step, why }),
                None => Err(Refusal::Overtaken(claim.clone())),
            }
        }
        Outcome::Stuck { step, why } => {
            doubt(core, prepare.record);
            Err(Refusal::Failed { claim: claim.clone(), what: step, why })
        }
    }
}

/// Keeps a claim of whole cards whose record the disk may have or not. Its next prepare takes the record for one of an
/// earlier boot, and writes it again.
fn doubt(core: &Core, record: Record) {
    core.state.enter(Record { boot_id: String::new(), ..record });
}

fn prepared(core: &Core, record: &Record, replay: bool) -> Vec<PreparedDevice> {
    core.outbox.say(&Notice::Prepared { claim: record.claim.clone(), devices: record.device_names(), replay });
    plan::answer(&core.node.driver, record)
}

/// Parts of cards: intent, make, read back, record. The caller holds the locks of the cards.
async fn prepare_cut(
    core: &Arc<Core>,
    allocated: &AllocatedClaim,
    readings: &Readings,
    cancel: &CancellationToken,
) -> PrepareResult {
    let claim = &allocated.claim;
    let (prepare, before) = core.state.reserve(allocated, readings, now())?;
    let failed = |(what, why)| Refusal::Failed { claim: claim.clone(), what, why };
    if prepare.orders.is_empty() {
        // A replay: all its vNPUs are there.
        if let Err(why) = steps::on_disk(core, prepare.steps).await {
            // What the disk does not have must not be taken for written.
            core.state.unreserve(&claim.uid, before);
            return Err(failed(why));
        }
        return Ok(prepared(core, &prepare.record, before.is_some()));
    }
    let intent = prepare.record;
    let (mut read, mut recorded) = (Vec::with_capacity(prepare.orders.len()), false);
    let done = async {
        steps::on_disk(core, prepare.steps).await.map_err(failed)?;
        for order in &prepare.orders {
            if cancel.is_cancelled() {
                return Err(Refusal::Overtaken(claim.clone()));
            }
            read.push((order.device, cards::make(core, claim, order).await?));
        }
        let (record, steps) = core.state.made(&intent, &read)?;
        core.state.enter(record.clone());
        recorded = true;
        steps::on_disk(core, steps).await.map_err(failed)?;
        Ok(record)
    };
    match done.await {
        Ok(record) => Ok(prepared(core, &record, before.is_some())),
        Err(refusal) => {
            match undo_cut(core, &intent, &read, recorded, before).await {
                Ok(()) => {}
                // The record keeps all of it until the claim is unprepared, or a restart recovers it.
                Err(why) => {
                    error!(error = %why, "undoing a prepare failed; the claim keeps its vNPUs until it is unprepared");
                }
            }
            Err(refusal)
        }
    }
}

/// Takes back what an intent made, then the intent itself; `recorded` if the disk may have it as made. vNPUs that were
/// there before the intent stay.
async fn undo_cut(
    core: &Arc<Core>,
    intent: &Record,
    read: &[(usize, VnpuReading)],
    recorded: bool,
    before: Option<Record>,
) -> Result<(), Refusal> {
    let claim = &intent.claim;
    // Those that were read back are known for certain, whatever id they have.
    let mut known = intent.clone();
    for (device, reading) in read {
        if let Some(cut) = known.devices.get_mut(*device).and_then(|holding| holding.cut.as_mut()) {
            (cut.id, cut.template, cut.made) = (reading.id, reading.template.clone(), true);
        }
    }
    let failed = |(what, why)| Refusal::Failed { claim: claim.clone(), what, why };
    core.state.enter(known.clone());
    if recorded {
        // As long as the disk may say that the vNPUs are there, they must be: on a full disk nothing is destroyed.
        let releasing = Record { phase: Phase::Releasing, ..known };
        steps::on_disk(core, vec![Step::Write(Box::new(releasing.clone()))]).await.map_err(failed)?;
        core.state.enter(releasing);
    }
    let release = core.state.release(&claim.uid, false, true)?;
    let new = |cut: &Cut| {
        !intent.devices.iter().any(|holding| holding.cut.as_ref().is_some_and(|old| old.made && old.id == cut.id))
    };
    for (card, physical_id, cut) in release.cuts.iter().filter(|(_, _, cut)| new(cut)) {
        cards::destroy(core, claim, card, *physical_id, cut, false).await?;
    }
    let uid = claim.uid.clone();
    let steps = match &before {
        Some(before) => vec![Step::Write(Box::new(before.clone()))],
        None => vec![Step::Withdraw(uid.clone()), Step::Forget(uid)],
    };
    steps::on_disk(core, steps).await.map_err(failed)?;
    core.state.unreserve(&claim.uid, before);
    Ok(())
}

pub(super) fn unprepare(
    core: Arc<Core>,
    received: Received,
    claim: ClaimRef,
    force: bool,
) -> BoxFuture<'static, Result<(), Refusal>> {
    let (rest, reference) = (core.clone(), claim.clone());
    let done = release(core, received, claim, force);
    async move {
        match done.await {
            // The pod need not wait for a card that may never come back.
            Err(gone @ Refusal::DeviceGone { .. }) => {
                tokio::spawn(release_until_done(rest, reference, futures::future::err(gone).boxed()));
                Ok(())
            }
            done => done,
        }
    }
    .boxed()
}

/// The same, where a vNPU on a lost card is an error.
fn release(
    core: Arc<Core>,
    received: Received,
    claim: ClaimRef,
    force: bool,
) -> BoxFuture<'static, Result<(), Refusal>> {
    if core.claims.closed.load(Ordering::Acquire) {
        return futures::future::err(Refusal::Stopping).boxed();
    }
    let mut jobs = lock(&core.claims.jobs);
    let wait_for: BoxFuture<'static, ()> = match jobs.get(&claim.uid) {
        Some(Job::Unprepare { done }) => {
            let done = done.clone();
            return async move { result(done).await.unwrap_or_else(|| Err(died(claim))) }.boxed();
        }
        Some(Job::Prepare { cancel, done, .. }) => {
            cancel.cancel();
            result(done.clone()).map(drop).boxed()
        }
        Some(Job::Recover { done }) => result(done.clone()).map(drop).boxed(),
        None => futures::future::ready(()).boxed(),
    };
    let (sender, done) = watch::channel(None);
    jobs.insert(claim.uid.clone(), Job::Unprepare { done: done.clone() });
    drop(jobs);
    let span = info_span!("unprepare", claim = %claim, claim.uid = %claim.uid);
    let reference = claim.clone();
    let work = async move {
        let _received = received;
        wait_for.await;
        let done = guarded(run_unprepare(&core, &reference, force)).await;
        let answer = done.unwrap_or_else(|| {
            error!("the unprepare task panicked");
            Err(Refusal::Internal(reference.clone(), "the task panicked".to_owned()))
        });
        if let Err(refusal) = &answer {
            let claim = reference.clone();
            core.outbox.say(&Notice::Refused { claim, operation: "unprepare", refusal: refusal.clone() });
        }
        core.claims.unprepared(&reference.uid);
        core.claims.end(&reference.uid, |job| matches!(job, Job::Unprepare { .. }));
        core.claims.retry();
        sender.send_replace(Some(answer));
    };
    tokio::spawn(work.instrument(span));
    async move { result(done).await.unwrap_or_else(|| Err(died(claim))) }.boxed()
}

async fn run_unprepare(core: &Arc<Core>, claim: &ClaimRef, force: bool) -> Result<(), Refusal> {
    let failed = |(what, why)| Refusal::Failed { claim: claim.clone(), what, why };
    let traces = core.state.is_quarantined(&claim.uid) && {
        let (disk, uid) = (core.disk.clone(), claim.uid.clone());
        let looked = tokio::task::spawn_blocking(move || disk.has_file(&uid)).await;
        let looked = looked.unwrap_or_else(|panic| Err(panic.to_string()));
        looked.map_err(|why| failed(("looking for the CDI file", why)))? || core.state.has_unowned_vnpu()
    };
    let release = core.state.release(&claim.uid, traces, force)?;
    if release.cuts.is_empty() {
        if let Err(why) = steps::on_disk(core, [release.first, release.last].concat()).await {
            if let Some(record) = core.state.record(&claim.uid) {
                doubt(core, record);
            }
            return Err(failed(why));
        }
    } else {
        let writes = release.first.iter().find_map(|step| match step {
            Step::Write(record) => Some((**record).clone()),
            _ => None,
        });
        let begun = steps::on_disk(core, release.first).await;
        // After an error too: the disk may say that the release has begun, and a restart then ends it.
        if let Some(record) = writes {
            core.state.enter(record);
        }
        begun.map_err(failed)?;
        let mut lost = None;
        for (card, physical_id, cut) in &release.cuts {
            let _lock = core.cards.lock(&BTreeMap::from([(card.clone(), *physical_id)])).await;
            match cards::destroy(core, claim, card, *physical_id, cut, force).await {
                Err(gone @ Refusal::DeviceGone { .. }) => lost = Some(gone),
                outcome => outcome?,
            }
        }
        if let Some(gone) = lost {
            return Err(gone);
        }
        steps::on_disk(core, release.last).await.map_err(failed)?;
    }
    if let Some(record) = core.state.released(&claim.uid) {
        core.outbox.say(&Notice::Unprepared { claim: record.claim });
    }
    Ok(())
}

/// Makes records and CDI files agree after the first scan, claim by claim; a claim that is being worked on is left to
/// its job, which ends in the same state.
pub(super) async fn recover(core: &Arc<Core>) {
    let disk = core.disk.clone();
    let files = match tokio::task::spawn_blocking(move || disk.files()).await {
        Ok(Ok(files)) => files,
        Ok(Err(why)) => {
            error!(error = why, "the CDI directory cannot be read; recovery goes by the records alone");
            Vec::new()
        }
        Err(panic) => {
            error!(error = %panic, "reading the CDI directory panicked");
            Vec::new()
        }
    };
    let recovery = core.state.recovery(&files, now());
    for uid in recovery.releases {
        // Its own job: a library that hangs holds up nobody else.
        if let Some(record) = core.state.record(&uid) {
            let first = release(core.clone(), core.claims.received(), record.claim.clone(), false);
            tokio::spawn(release_until_done(core.clone(), record.claim, first));
        }
    }
    // Once the records are whole, prepares may come: each file is looked at by its claim's own job.
    let (records, files): (Vec<_>, Vec<_>) =
        recovery.steps.into_iter().partition(|step| matches!(step, Step::Write(_)));
    // A rebuilt claim holds its devices although the disk may be full: nobody else may get them.
    for step in &records {
        if let Step::Write(record) = step
            && core.state.still_holds(step)
        {
            core.state.enter((**record).clone());
        }
    }
    let mut left = recover_all(core, records).await;
    core.state.set_recovered();
    left.extend(recover_all(core, files).await);
    core.state.set_tidy();
    if !left.is_empty() {
        tokio::spawn(recover_until_done(core.clone(), left));
    }
}

/// Longest pause between two tries of what recovery could not do.
const LONGEST_PAUSE: Duration = Duration::from_mins(1);

/// A full disk or a hanging library must not leave a claim half released until the next start.
async fn release_until_done(core: Arc<Core>, claim: ClaimRef, first: BoxFuture<'static, Result<(), Refusal>>) {
    if !lock(&core.claims.followed).insert(claim.uid.clone()) {
        return;
    }
    follow(&core, &claim, first).await;
    lock(&core.claims.followed).remove(&claim.uid);
}

async fn follow(core: &Arc<Core>, claim: &ClaimRef, first: BoxFuture<'static, Result<(), Refusal>>) {
    let (mut done, mut pause) = (first.await, core.timing.busy_pause);
    while done.is_err() {
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
        let taken_up = lock(&core.claims.jobs).contains_key(&claim.uid);
        let is_cut_off = core.state.record(&claim.uid).is_some_and(|record| record.phase != Phase::Prepared);
        if taken_up || !is_cut_off || core.claims.closed.load(Ordering::Acquire) {
            return;
        }
        done = release(core.clone(), core.claims.received(), claim.clone(), false).await;
    }
}

async fn recover_until_done(core: Arc<Core>, mut left: Vec<Step>) {
    let mut pause = core.timing.busy_pause;
    while !left.is_empty() {
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
        if core.claims.closed.load(Ordering::Acquire) {
            return;
        }
        left = recover_all(&core, left).await;
    }
}

/// Does recovery's steps; gives those that are not done.
async fn recover_all(core: &Arc<Core>, steps: Vec<Step>) -> Vec<Step> {
    let work = core.clone();
    let run = move || steps.into_iter().filter(|step| !recover_one(&work, step)).collect();
    tokio::task::spawn_blocking(run).await.unwrap_or_else(|panic| {
        error!(error = %panic, "recovery panicked; claims are re-done at their next prepare");
        Vec::new()
    })
}

/// False if the step failed, or somebody works on its claim: what that leaves of it is done later.
fn recover_one(core: &Core, step: &Step) -> bool {
    let uid = match step {
        Step::Write(record) => &record.claim.uid,
        Step::Inject(injection) => &injection.claim.uid,
        Step::Withdraw(uid) | Step::Forget(uid) => uid,
    };
    let (sender, done) = watch::channel(None);
    {
        let mut jobs = lock(&core.claims.jobs);
        if jobs.contains_key(uid) {
            return false;
        }
        jobs.insert(uid.clone(), Job::Recover { done });
    }
    let mut is_done = true;
    if core.state.still_holds(step) {
        let done = core.disk.apply(step).and_then(|()| core.disk.settle(slice::from_ref(step)));
        match (done, step) {
            (Ok(()), Step::Write(_)) => core.outbox.say(&Notice::Rebuilt { uid: uid.to_string() }),
            (Ok(()), Step::Withdraw(_)) => core.outbox.say(&Notice::Swept { uid: uid.to_string() }),
            (Ok(()), _) => {}
            (Err(why), _) => {
                error!(claim.uid = %uid, step = step.name(), error = why, "recovery step failed; it is tried again");
                is_done = false;
            }
        }
    }
    core.claims.end(uid, |job| matches!(job, Job::Recover { .. }));
    sender.send_replace(Some(()));
    is_done
}

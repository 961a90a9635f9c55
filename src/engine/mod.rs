//! Claims and devices in motion. Decisions are those of `domain::plan`; the engine carries them out.
//!
//! * `state` is the only thing that changes: synchronous, its lock is never held over an await.
//! * `claims` runs one job per claim UID: equal requests join, an unprepare overtakes a prepare.
//! * `steps` does a plan's steps on the bounded blocking pool, makes them durable together, or undoes them.
//! * `health` keeps inventory, health and the published pool in step with the hardware.
//! * `suspended` takes the vendor's software from us and gives it back.
//! * `sensors` tells what the cards' sensors say.
//! * `outbox` turns one notice into journal entry, metric and Event.

mod cards;
mod claims;
mod health;
#[cfg(test)]
mod histories;
mod metrics;
mod outbox;
mod sensors;
mod state;
mod steps;
mod suspended;
#[cfg(test)]
mod tests;

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError, atomic::AtomicBool},
    time::Duration,
};

use futures::{future::BoxFuture, stream::BoxStream};
use jiff::Timestamp;
use prometheus_client::registry::Registry;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use self::{cards::Cards, claims::Claims, outbox::Outbox, sensors::Sensors, state::State};
pub use self::{
    claims::Received,
    state::{DeviceView, Snapshot},
    steps::Disk,
};
use crate::{
    device::Backend,
    domain::{
        claim::{AllocatedClaim, ClaimRef, ClaimUid, PreparedDevice},
        health::{DeviceHealth, Policy},
        model::{Kept, Wish},
        node::{Hold, HoldKind, NodeMemory},
        notice::Notice,
        plan::Node,
        record::{Quarantined, Record},
        refusal::Refusal,
        slice::Pool,
        vnpu::VnpuReading,
    },
};

/// What the engine needs of the API server.
pub trait Api: Send + Sync + 'static {
    /// Reads a claim with its allocation.
    fn claim(&self, claim: ClaimRef) -> BoxFuture<'static, Result<AllocatedClaim, Refusal>>;
    /// Sets the pool that should be published.
    fn publish(&self, pool: Pool);
    /// False if the API server is known to drop the taints of devices.
    fn keeps_taints(&self) -> bool {
        true
    }
    /// Tells the cluster of a notice; never blocks.
    fn event(&self, notice: &Notice);
    /// What the API server keeps: now, and whenever that changes, as when it is upgraded.
    fn kept(&self) -> BoxStream<'static, Kept>;
}

/// What the engine starts from.
#[derive(Debug, Default)]
pub struct Loaded {
    /// Records of all claims.
    pub records: Vec<Record>,
    /// Claims whose records are damaged.
    pub quarantined: Vec<Quarantined>,
    /// What the node remembers of its cards.
    pub memory: NodeMemory,
    /// Why that may be less than was once remembered.
    pub problem: Option<String>,
}

/// How often and how long.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// Time between two health polls.
    pub health_interval: Duration,
    /// Time between two scans while a card is missing or the last scan failed.
    pub rescan: Duration,
    /// How long a prepare waits for the start-up scan and the slicing model: less than kubelet's 45 s.
    pub first_scan_wait: Duration,
    /// How long a prepare waits for another claim to release what this one was given.
    pub release_wait: Duration,
    /// Pause before a busy card is asked again; it doubles.
    pub busy_pause: Duration,
    /// Time since boot after which the vendor's replay of vNPUs is over in any case.
    pub replay_wait: Duration,
    /// How long a prepare waits for that replay.
    pub replay_patience: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            health_interval: Duration::from_secs(5),
            rescan: Duration::from_secs(10),
            first_scan_wait: Duration::from_secs(40),
            release_wait: Duration::from_secs(5),
            busy_pause: Duration::from_secs(1),
            replay_wait: Duration::from_mins(2),
            replay_patience: Duration::from_secs(20),
        }
    }
}

/// The seams that the engine is built on.
pub struct Parts {
    /// What never changes.
    pub node: Node,
    /// The hardware.
    pub backend: Arc<dyn Backend>,
    /// Records, node memory and CDI files.
    pub disk: Arc<dyn Disk>,
    /// The API server.
    pub api: Arc<dyn Api>,
    /// What was on disk at the start.
    pub loaded: Loaded,
    /// How often and how long.
    pub timing: Timing,
    /// How health is judged.
    pub policy: Policy,
    /// Whether and how cards are cut.
    pub wish: Wish,
    /// Time since boot.
    pub uptime: Uptime,
    /// Tells of another driver of the same cards on this node: such drivers destroy vNPUs that look idle.
    pub rival: Rival,
}

/// Tells of another driver of the same cards.
pub type Rival = Box<dyn Fn() -> Option<String> + Send + Sync>;

/// Tells the time since boot.
pub type Uptime = Box<dyn Fn() -> Duration + Send + Sync>;

impl fmt::Debug for Parts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Parts").field("node", &self.node).finish_non_exhaustive()
    }
}

/// The engine. A clone is the same engine.
#[derive(Clone)]
pub struct Engine {
    core: Arc<Core>,
}

/// What all parts of the engine share.
pub(crate) struct Core {
    node: Node,
    backend: Arc<dyn Backend>,
    disk: Arc<dyn Disk>,
    api: Arc<dyn Api>,
    timing: Timing,
    wish: Mutex<Wish>,
    uptime: Uptime,
    rival: Rival,
    cards: Cards,
    state: State,
    claims: Claims,
    outbox: Outbox,
    alarms: metrics::Alarms,
    /// What was published last.
    shown: Mutex<Option<Pool>>,
    /// Whose turn it is to write the node's memory.
    writing: Arc<tokio::sync::Mutex<()>>,
    /// Wants a poll at once: what was said unasked may not be all.
    unsure: Notify,
    /// True while the hardware has named chips that no scan has found.
    strangers: AtomicBool,
    /// Whose turn it is to suspend or resume.
    hand: tokio::sync::Mutex<()>,
}

impl Core {
    /// How cards are to be cut, as it is wanted now.
    fn wish(&self) -> Wish {
        self.wish.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("node", &self.core.node).finish_non_exhaustive()
    }
}

impl Engine {
    /// Builds an engine and registers its metrics. Nothing runs yet, but calls may come: a prepare waits for
    /// [`run`](Self::run) to end the first scan.
    pub fn new(parts: Parts, registry: &mut Registry) -> Self {
        let outbox = Outbox::new(registry, parts.api.clone());
        for quarantined in &parts.loaded.quarantined {
            outbox.say(&Notice::Quarantined { uid: quarantined.uid.to_string(), why: quarantined.why.clone() });
        }
        let state = State::new(parts.node.clone(), parts.loaded, parts.policy, now());
        let core = Core {
            node: parts.node,
            backend: parts.backend,
            disk: parts.disk,
            api: parts.api,
            timing: parts.timing,
            wish: Mutex::new(parts.wish),
            uptime: parts.uptime,
            rival: parts.rival,
            cards: Cards::default(),
            state,
            claims: Claims::default(),
            outbox,
            alarms: metrics::Alarms::new(registry),
            shown: Mutex::default(),
            writing: Arc::default(),
            unsure: Notify::new(),
            strangers: AtomicBool::new(false),
            hand: tokio::sync::Mutex::default(),
        };
        let core = Arc::new(core);
        Sensors::register(&core, registry);
        metrics::register(registry, &core);
        Self { core }
    }

    /// Scans, recovers, publishes, then watches health until `shutdown`. `pulse` is called after every full turn:
    /// the watchdog's sign of life.
    pub async fn run(&self, shutdown: CancellationToken, pulse: impl Fn() + Send + Sync) {
        health::run(&self.core, shutdown, pulse).await;
    }

    /// Takes another slicing model and layout, at the next turn and as far as live claims let it. Whether slicing is
    /// enabled at all does not change while the process lives.
    pub fn reslice(&self, wish: Wish) {
        let mut running = self.core.wish.lock().unwrap_or_else(PoisonError::into_inner);
        *running = Wish { enabled: running.enabled, ..wish };
    }

    /// Marks a call as received; take one at the entry of each RPC.
    pub fn received(&self) -> Received {
        self.core.claims.received()
    }

    /// Prepares a claim. The work goes on if the answer is no longer awaited.
    pub fn prepare(
        &self,
        received: Received,
        claim: ClaimRef,
    ) -> BoxFuture<'static, Result<Vec<PreparedDevice>, Refusal>> {
        claims::prepare(self.core.clone(), received, claim)
    }

    /// Unprepares a claim. The work goes on if the answer is no longer awaited.
    pub fn unprepare(&self, received: Received, claim: ClaimRef) -> BoxFuture<'static, Result<(), Refusal>> {
        claims::unprepare(self.core.clone(), received, claim, false)
    }

    /// Lets go of a claim whatever is known of it: root's last resort for a damaged record.
    ///
    /// Succeeds for a claim that is not known, as an unprepare does.
    pub fn release(&self, uid: ClaimUid) -> BoxFuture<'static, Result<(), Refusal>> {
        let claim = ClaimRef { namespace: String::new(), name: uid.to_string(), uid };
        claims::unprepare(self.core.clone(), self.received(), claim, true)
    }

    /// Makes a vNPU for an operator: its card leaves the pool. Gives it as read back. The work goes on if the answer is
    /// no longer awaited.
    pub fn operator_create(
        &self,
        device: String,
        template: String,
    ) -> BoxFuture<'static, Result<VnpuReading, Refusal>> {
        let core = self.core.clone();
        cards::detached(async move { cards::operator_create(&core, &device, &template).await })
    }

    /// Destroys a vNPU that no claim has; `force` also while processes run on its card. The work goes on if the answer
    /// is no longer awaited.
    pub fn operator_destroy(&self, id: u32, force: bool) -> BoxFuture<'static, Result<(), Refusal>> {
        let core = self.core.clone();
        cards::detached(async move { cards::operator_destroy(&core, id, force).await })
    }

    /// Keeps claims from a card, or no longer (`None`); gives the claims that live on it. The work goes on if the answer
    /// is no longer awaited.
    pub fn hold(
        &self,
        device: String,
        wanted: Option<(HoldKind, String)>,
    ) -> BoxFuture<'static, Result<Vec<ClaimRef>, Refusal>> {
        let core = self.core.clone();
        cards::detached(async move {
            let hold = wanted.map(|(kind, reason)| Hold { kind, reason, since: now() });
            let what = match &hold {
                Some(hold) => format!("{device} is {}", hold.kind.as_str()),
                None => format!("{device} takes claims again"),
            };
            let (change, claims) = core.state.hold(&device, hold)?;
            health::announce(&core, &change);
            health::save(&core).await.map(|()| claims).map_err(|why| Refusal::NotKept { what, why })
        })
    }

    /// Lets go of the vendor's software, for its upgrade: cards take no new claims, what is prepared stays so, and no
    /// vendor call is made until [`resume`](Self::resume), also over restarts. An error of the backend means that a
    /// process of ours still has the device open; the node is suspended all the same.
    pub fn suspend(&self, reason: String) -> BoxFuture<'static, Result<(), Refusal>> {
        let core = self.core.clone();
        cards::detached(async move { suspended::suspend(&core, &reason).await })
    }

    /// Takes the vendor's software up again: all cards are read anew.
    pub fn resume(&self) -> BoxFuture<'static, Result<(), Refusal>> {
        let core = self.core.clone();
        cards::detached(async move { suspended::resume(&core).await })
    }

    /// Health of all devices that live claims hold; the complete list at each change.
    pub fn health(&self) -> watch::Receiver<Arc<Vec<DeviceHealth>>> {
        self.core.state.health_stream()
    }

    /// Judges health by another policy, from a poll on that is made at once.
    pub fn set_policy(&self, policy: Policy) {
        self.core.state.set_policy(policy);
        self.core.unsure.notify_one();
    }

    /// Everything that `npuctl` shows of cards and claims, without a vendor call.
    pub fn snapshot(&self) -> Snapshot {
        self.core.state.snapshot(self.core.backend.status())
    }

    /// Changes whenever a snapshot would look different.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.core.state.changes()
    }

    /// True once the first scan and the recovery after it have ended.
    pub fn is_recovered(&self) -> bool {
        *self.core.state.recovered().borrow()
    }

    /// Waits until no claim is being worked on, at most `bound`; true if so. New work is refused from now on.
    pub async fn drain(&self, bound: Duration) -> bool {
        self.core.claims.close();
        tokio::time::timeout(bound, self.core.claims.idle()).await.is_ok()
    }
}

/// The present time; the one clock of the engine.
fn now() -> Timestamp {
    Timestamp::now()
}

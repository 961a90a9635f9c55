//! The Kubernetes API: reads claims, keeps the node's `ResourceSlices` as wanted, writes Events.
//!
//! Trouble with the API server ends here: conflicts, expired watches, throttling, lost networks, rotated credentials.
//! Whoever is above hears a [`Refusal`] for a claim, and otherwise only sees the [`Status`].
//!
//! | part | does |
//! |---|---|
//! | `credentials`, `link` | the client, rebuilt when a file of its credentials changes; requests with a time limit |
//! | `claim` | GET of one claim, decoded leniently, refused strictly |
//! | `wire`, `limits`, `layout` | a slice as it travels, the API's limits, what has to be written (all pure) |
//! | `publisher` | list, watch, write, wait |
//! | `gates` | which fields the API server keeps |
//! | `events` | Events on the node and the claim |

use std::{path::PathBuf, sync::Arc, time::Duration};

use prometheus_client::registry::Registry;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use crate::domain::{
    claim::{AllocatedClaim, ClaimRef},
    names::{DriverName, NodeName},
    notice::Notice,
    refusal::Refusal,
    slice::Pool,
};

mod claim;
mod credentials;
mod error;
mod events;
mod gates;
mod layout;
mod limits;
mod link;
mod metrics;
mod publisher;
mod status;
mod wire;

pub use credentials::InCluster;
pub use status::{Credentials, Gate, Gates, Publishing, ServerVersion, SliceStatus, Status};

use events::Events;
use link::{Link, SharedLink};
use metrics::Metrics;
use publisher::Publisher;

/// How long things take. The defaults are right; tests shorten them.
#[derive(Debug, Clone)]
pub struct Timing {
    /// Longest time for a request.
    pub request: Duration,
    /// Pause before reading a claim is tried a second time; it doubles.
    pub claim_retry: Duration,
    /// After this time no further attempt at reading a claim begins.
    pub claim_patience: Duration,
    /// How often the credentials' files are looked at.
    pub files: Duration,
    /// Shortest time between two loads of credentials that a 401 asks for.
    pub reload_gap: Duration,
    /// Slices are written this long after the last of several changes.
    pub debounce: Duration,
    /// … but this long after the first at the latest.
    pub debounce_max: Duration,
    /// First pause after a failure.
    pub backoff_min: Duration,
    /// Longest pause after failures.
    pub backoff_max: Duration,
    /// Pause after a 403.
    pub forbidden: Duration,
    /// Pause before a slice that was refused as invalid is sent again unchanged.
    pub invalid: Duration,
    /// How long one watch lasts.
    pub watch: Duration,
    /// Events with the same reason and subject within this time become one.
    pub event_window: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            request: Duration::from_secs(10),
            claim_retry: Duration::from_millis(200),
            claim_patience: Duration::from_secs(4),
            files: Duration::from_secs(2),
            reload_gap: Duration::from_secs(1),
            debounce: Duration::from_millis(200),
            debounce_max: Duration::from_secs(1),
            backoff_min: Duration::from_millis(250),
            backoff_max: Duration::from_secs(15),
            forbidden: Duration::from_mins(1),
            invalid: Duration::from_mins(5),
            watch: Duration::from_mins(4),
            event_window: Duration::from_mins(10),
        }
    }
}

/// What `cluster` has to know.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Our driver.
    pub driver: DriverName,
    /// Our node.
    pub node: NodeName,
    /// The kubeconfig that was asked for.
    pub kubeconfig: Option<PathBuf>,
    /// The service account that is used if none was: [`InCluster::from_environment`].
    pub in_cluster: Option<InCluster>,
    /// The kubeconfig that is used if there is no such account either: kubelet's.
    pub fallback_kubeconfig: PathBuf,
    /// How long things take.
    pub timing: Timing,
}

/// The Kubernetes API as the driver uses it. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Cluster {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    link: SharedLink,
    driver: DriverName,
    node: NodeName,
    wanted: watch::Sender<Option<Pool>>,
    verify: Arc<Notify>,
    gates: watch::Sender<Gates>,
    events: Events,
}

impl Cluster {
    /// Does nothing yet but take note; metrics are registered under `cluster`.
    #[must_use]
    pub fn new(settings: &Settings, registry: &mut Registry) -> Self {
        let link = Arc::new(Link::new(settings, Metrics::register(registry)));
        let events = Events::new(Arc::clone(&link), settings.node.clone());
        Self {
            inner: Arc::new(Inner {
                link,
                driver: settings.driver.clone(),
                node: settings.node.clone(),
                wanted: watch::Sender::new(None),
                verify: Arc::new(Notify::new()),
                gates: watch::Sender::new(Gates::default()),
                events,
            }),
        }
    }

    /// Reads a claim with its allocation, in at most 10 s. Needs no [`Cluster::run`].
    ///
    /// # Errors
    /// `ClaimMissing`, `ClaimReplaced`, `NotAllocated`, `ClaimUnreadable`, `BadName`.
    pub async fn claim(&self, claim: &ClaimRef) -> Result<AllocatedClaim, Refusal> {
        self.inner.link.claim(claim, self.inner.driver.as_str()).await
    }

    /// Says what is to be published. Before the first call no slice is touched. Returns at once.
    pub fn publish(&self, pool: Pool) {
        self.inner.link.status.update(|status| status.publishing.wanted = true);
        self.inner.wanted.send_if_modified(|wanted| {
            let news = wanted.as_ref() != Some(&pool);
            if news {
                *wanted = Some(pool);
            }
            news
        });
    }

    /// Has the published slices looked at again now: kubelet may have deleted them while nobody watched.
    pub fn republish(&self) {
        self.inner.verify.notify_one();
    }

    /// Has an Event written. Never waits; what cannot be queued is counted and dropped.
    pub fn event(&self, notice: &Notice) {
        self.inner.events.send(notice);
    }

    /// What the API server's feature gates let through, with its version; probed at each new connection.
    #[must_use]
    pub fn gates(&self) -> watch::Receiver<Gates> {
        self.inner.gates.subscribe()
    }

    /// How things stand.
    #[must_use]
    pub fn status(&self) -> Status {
        self.inner.link.status.get()
    }

    /// Tells when things stand differently.
    #[must_use]
    pub fn status_changes(&self) -> watch::Receiver<Status> {
        self.inner.link.status.subscribe()
    }

    /// Does the standing work until `shutdown`: follows the credentials' files, publishes, writes Events. The slices stay
    /// when it ends.
    pub async fn run(&self, shutdown: CancellationToken) {
        let inner = Arc::clone(&self.inner);
        let files = supervise("credentials", move || {
            let link = Arc::clone(&inner.link);
            async move { link.follow_files().await }
        });
        let inner = Arc::clone(&self.inner);
        let slices = supervise("publisher", move || {
            let publisher = Publisher::new(
                Arc::clone(&inner.link),
                inner.driver.clone(),
                inner.node.clone(),
                inner.wanted.subscribe(),
                Arc::clone(&inner.verify),
                inner.gates.clone(),
            );
            publisher.run()
        });
        let inner = Arc::clone(&self.inner);
        let events = supervise("events", move || {
            let events = inner.events.clone();
            async move { events.run().await }
        });
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = async { tokio::join!(files, slices, events); } => {}
        }
    }
}

/// Runs a task that has no end; after a panic, again. The task ends with the caller.
async fn supervise<T, F>(name: &'static str, start: T)
where
    T: Fn() -> F,
    F: Future<Output = ()> + Send + 'static,
{
    loop {
        let mut set = tokio::task::JoinSet::new();
        set.spawn(start());
        match set.join_next().await {
            Some(Err(error)) if error.is_panic() => tracing::error!(task = name, "task panicked and is started again"),
            _ => return,
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

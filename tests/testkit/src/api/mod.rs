//! A stand-in for the API server that refuses what real ones refuse.
//!
//! Generic JSON storage over TLS on a free loopback port, inside the test's own process. It serves `resource.k8s.io/v1`,
//! nodes, pods and events, plays the releases 1.34 to 1.37 with their feature gates, knows the rights of a node's and of a
//! service account's credentials, records every request, and fails by order.
//!
//! | file | what |
//! |---|---|
//! | `serve` | listener, connections, the way of a request |
//! | `routes`, `selector` | what is asked for; discovery |
//! | `auth`, `tls`, `kubeconfig` | who asks and what they may do |
//! | `ops`, `patch` | create, update, patch, delete |
//! | `schema`, `gates`, `validate`, `validate_claim`, `metadata`, `events`, `cel`, `names`, `quantity` | decode, drop, refuse |
//! | `store`, `watch` | objects, versions, watches |
//! | `faults`, `record` | orders to fail, what came in |
//! | `policy` | the admission policy that reads a bare number of memory as MiB |
//! | `claims`, `allocator` | what controllers, kubelet, users and the scheduler would do |

mod allocator;
mod auth;
mod cel;
mod claims;
mod events;
mod faults;
mod gates;
mod kubeconfig;
mod metadata;
mod names;
mod ops;
mod patch;
mod policy;
mod quantity;
mod record;
mod routes;
mod schema;
mod selector;
mod serve;
mod status;
mod store;
mod tls;
mod validate;
mod validate_claim;
mod watch;

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use serde_json::{Value, json};
use tokio::{
    net::TcpListener,
    sync::{mpsc, oneshot, watch as signal},
    task::JoinHandle,
};

use self::{
    auth::Auth,
    faults::Faults,
    gates::Rules,
    serve::Order,
    store::{Store, meta, resource},
    watch::Cut,
};
pub use self::{
    auth::Who,
    claims::{ClaimBuilder, DeviceResult},
    faults::Fault,
    gates::{Gate, Release},
    kubeconfig::{How, Kubeconfig},
    quantity::Quantity,
    record::Request,
    watch::GoneAs,
};
use crate::pki::{Authority, Valid};

/// Whom its certificate is for.
const NAMES: [&str; 2] = ["127.0.0.1", "localhost"];

/// Everything behind the lock.
struct Inner {
    store: Store,
    rules: Rules,
    auth: Auth,
    faults: Faults,
    requests: Vec<Request>,
    /// How many requests were forgotten before the first of `requests`.
    forgotten: usize,
    /// Open watches by resource.
    watches: BTreeMap<&'static str, usize>,
    bookmark_every: Duration,
    gone_as: GoneAs,
    tls: Arc<rustls::ServerConfig>,
    /// Offered to new connections.
    http2: bool,
    /// Whether the shipped admission policy is installed.
    memory_policy: bool,
}

/// What the server's tasks share.
struct Shared {
    inner: Mutex<Inner>,
    changed: signal::Sender<u64>,
    cut: signal::Sender<(u64, Cut)>,
    silent: signal::Sender<bool>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes or reads the state, then wakes everybody who waits for a change.
    fn update<R>(&self, work: impl FnOnce(&mut Inner) -> R) -> R {
        let result = work(&mut self.lock());
        self.changed.send_modify(|n| *n += 1);
        result
    }
}

/// A certificate that the server shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerCertificate {
    /// A good one, newly made.
    Good,
    /// One that has expired.
    Expired,
    /// One of an authority that no kubeconfig names.
    Stranger,
}

/// A running API server; it ends when this is dropped.
pub struct ApiServer {
    shared: Arc<Shared>,
    address: SocketAddr,
    orders: mpsc::Sender<Order>,
    task: JoinHandle<()>,
    authority: Authority,
    stranger: Authority,
    numbers: std::sync::atomic::AtomicU64,
}

impl std::fmt::Debug for ApiServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ApiServer").field("address", &self.address).finish_non_exhaustive()
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The server's state, for conditions to wait for.
#[derive(Clone, Copy)]
pub struct State<'a>(&'a Inner);

impl std::fmt::Debug for State<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State").field("version", &self.0.store.version()).finish_non_exhaustive()
    }
}

impl<'a> State<'a> {
    /// The slices of a driver on a node, by name.
    #[must_use]
    pub fn slices(self, driver: &str, node: &str) -> Vec<&'a Value> {
        let of = |s: &Value, path: &str, want: &str| s.pointer(path).and_then(Value::as_str) == Some(want);
        let all = self.0.store.list("resourceslices", None).map(|s| &**s);
        all.filter(|s| of(s, "/spec/driver", driver) && of(s, "/spec/nodeName", node)).collect()
    }

    /// All objects of a resource, by its plural name.
    #[must_use]
    pub fn objects(self, plural: &str) -> Vec<&'a Value> {
        let found = store::RESOURCES.iter().find(|r| r.plural == plural);
        found.map(|r| self.0.store.list(r.plural, None).map(|o| &**o).collect()).unwrap_or_default()
    }

    /// All requests since the start, oldest first.
    #[must_use]
    pub fn requests(self) -> &'a [Request] {
        &self.0.requests
    }

    /// The requests since `start` that were to change something (no dry runs).
    #[must_use]
    pub fn writes_since(self, start: Instant) -> Vec<&'a Request> {
        self.0.requests.iter().filter(|r| r.at >= start && r.is_write()).collect()
    }

    /// How many watches of a resource are open.
    #[must_use]
    pub fn watches(self, plural: &str) -> usize {
        self.0.watches.get(plural).copied().unwrap_or(0)
    }
}

impl ApiServer {
    /// Starts a server of this release with its default gates, on a free port of 127.0.0.1. Must be called inside a tokio
    /// runtime, which has to outlive it.
    ///
    /// # Errors
    /// No port, no certificate.
    pub async fn start(release: Release) -> anyhow::Result<Self> {
        let authority = Authority::new("simulated-ca")?;
        let stranger = Authority::new("stranger-ca")?;
        let tls = tls::server_config(&authority.server(&NAMES, Valid::Now)?)?;
        let listener = TcpListener::bind("127.0.0.1:0").await.context("cannot listen on 127.0.0.1")?;
        let address = listener.local_addr()?;
        let inner = Inner {
            store: Store::new(),
            rules: Rules::of(release),
            auth: Auth::default(),
            faults: Faults::default(),
            requests: Vec::new(),
            forgotten: 0,
            watches: BTreeMap::new(),
            bookmark_every: Duration::from_mins(1),
            gone_as: GoneAs::default(),
            tls,
            http2: true,
            memory_policy: false,
        };
        let shared = Arc::new(Shared {
            inner: Mutex::new(inner),
            changed: signal::Sender::new(0),
            cut: signal::Sender::new((0, Cut::Close)),
            silent: signal::Sender::new(false),
        });
        let (orders, receiver) = mpsc::channel(4);
        let task = tokio::spawn(serve::run(listener, address, Arc::clone(&shared), receiver));
        Ok(Self { shared, address, orders, task, authority, stranger, numbers: std::sync::atomic::AtomicU64::new(0) })
    }

    fn next_number(&self) -> u64 {
        self.numbers.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
    }

    /// `https://127.0.0.1:PORT`
    #[must_use]
    pub fn url(&self) -> String {
        format!("https://{}", self.address)
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The certificate of the authority that signed the server's, as PEM.
    #[must_use]
    pub fn ca_pem(&self) -> &str {
        &self.authority.pem
    }

    // Releases and gates.

    /// The release that is played.
    #[must_use]
    pub fn release(&self) -> Release {
        self.shared.lock().rules.release
    }

    /// Switches a gate.
    pub fn set_gate(&self, gate: Gate, on: bool) {
        self.shared.update(|inner| inner.rules.set(gate, on));
    }

    /// Becomes another release with its default gates and drops all watches, as a control plane that is upgraded.
    pub fn upgrade(&self, release: Release) {
        self.shared.update(|inner| inner.rules = Rules::of(release));
        self.cut_watches();
    }

    /// Installs, or removes, the shipped admission policy that reads a bare `memCapacity` as MiB.
    pub fn set_memory_policy(&self, installed: bool) {
        self.shared.update(|inner| inner.memory_policy = installed);
    }

    // Faults.

    /// Orders a fault; of several that match a request the first ordered is taken.
    pub fn inject(&self, fault: Fault) {
        self.shared.update(|inner| inner.faults.add(fault));
    }

    /// Takes back all faults and the latency.
    pub fn clear_faults(&self) {
        self.shared.update(|inner| inner.faults.clear());
    }

    /// Every request takes at least this long.
    pub fn set_latency(&self, latency: Duration) {
        self.shared.update(|inner| inner.faults.latency = latency);
    }

    /// While silent, connections are accepted and nothing is answered or sent on them, watches included; afterwards all goes on.
    pub fn set_silent(&self, silent: bool) {
        self.shared.silent.send_replace(silent);
    }

    /// Ends all watches.
    pub fn cut_watches(&self) {
        self.shared.cut.send_modify(|c| *c = (c.0 + 1, Cut::Close));
    }

    /// Makes all resource versions known so far too old (410) and ends all watches with an `ERROR` event.
    pub fn expire_versions(&self) {
        self.shared.update(|inner| inner.store.expire());
        self.shared.cut.send_modify(|c| *c = (c.0 + 1, Cut::Gone));
    }

    /// How a watch from a version that is too old is refused.
    pub fn set_gone_as(&self, how: GoneAs) {
        self.shared.update(|inner| inner.gone_as = how);
    }

    /// The interval of bookmarks on idle watches (60 s at first).
    pub fn set_bookmark_interval(&self, every: Duration) {
        self.shared.update(|inner| inner.bookmark_every = every);
    }

    /// How long the node authorizer does not know a new slice (403 to get, update, patch, delete).
    pub fn set_graph_lag(&self, lag: Duration) {
        self.shared.update(|inner| inner.auth.graph_lag = lag);
    }

    /// Refuses connections and drops the open ones; the port stays reserved.
    ///
    /// # Errors
    /// The port was lost to somebody else.
    pub async fn stop_listening(&self) -> anyhow::Result<()> {
        self.order(Order::Stop).await.context("cannot keep the port")
    }

    /// Listens again on the same port.
    ///
    /// # Errors
    /// The port was lost to somebody else.
    pub async fn resume_listening(&self) -> anyhow::Result<()> {
        self.order(Order::Resume).await.context("cannot listen again")
    }

    /// Drops all open connections, watches too, without a goodbye.
    ///
    /// # Errors
    /// The server has ended.
    pub async fn drop_connections(&self) -> anyhow::Result<()> {
        self.order(Order::Drop).await.context("cannot drop the connections")
    }

    async fn order(&self, make: fn(oneshot::Sender<std::io::Result<()>>) -> Order) -> anyhow::Result<()> {
        let (done, outcome) = oneshot::channel();
        self.orders.send(make(done)).await.map_err(|_| anyhow::anyhow!("the server has ended"))?;
        Ok(outcome.await.context("the server has ended")??)
    }

    /// Offers HTTP/2 to new connections, as real servers do, or does not, as some proxies before them.
    pub fn set_http2(&self, offered: bool) {
        self.shared.update(|inner| inner.http2 = offered);
    }

    /// Shows another certificate to new connections (drop the open ones to be sure).
    ///
    /// # Errors
    /// A certificate that cannot be made.
    pub fn set_certificate(&self, which: ServerCertificate) -> anyhow::Result<()> {
        let authority = if which == ServerCertificate::Stranger { &self.stranger } else { &self.authority };
        let valid = if which == ServerCertificate::Expired { Valid::Once } else { Valid::Now };
        let config = tls::server_config(&authority.server(&NAMES, valid)?)?;
        self.shared.update(|inner| inner.tls = config);
        Ok(())
    }

    // Looking.

    /// Looks at the state.
    pub fn with_state<R>(&self, look: impl FnOnce(State<'_>) -> R) -> R {
        look(State(&self.shared.lock()))
    }

    /// Waits until the state fulfils `condition`.
    ///
    /// # Errors
    /// It did not within `deadline`; the message names the last requests.
    pub async fn wait_until(
        &self,
        mut condition: impl FnMut(State<'_>) -> bool,
        deadline: Duration,
    ) -> anyhow::Result<()> {
        let mut changed = self.shared.changed.subscribe();
        let end = tokio::time::Instant::now() + deadline;
        loop {
            changed.mark_unchanged();
            if self.with_state(&mut condition) {
                return Ok(());
            }
            if tokio::time::timeout_at(end, changed.changed()).await.is_err() {
                if self.with_state(&mut condition) {
                    return Ok(());
                }
                let last = self.with_state(|s| {
                    let texts = s.requests().iter().rev().take(8).map(|r| {
                        format!(
                            "{} {} {}: {}",
                            r.verb,
                            r.path,
                            r.query,
                            r.status.map_or_else(|| "open".to_owned(), |s| s.to_string())
                        )
                    });
                    texts.collect::<Vec<_>>().join("; ")
                });
                bail!(
                    "the API server did not reach the wanted state within {deadline:?}; last requests, newest first: {last}"
                );
            }
        }
    }

    /// The slices of a driver on a node, by name.
    #[must_use]
    pub fn slices(&self, driver: &str, node: &str) -> Vec<Value> {
        self.with_state(|s| s.slices(driver, node).into_iter().cloned().collect())
    }

    /// All objects of a resource, by its plural name.
    #[must_use]
    pub fn objects(&self, plural: &str) -> Vec<Value> {
        self.with_state(|s| s.objects(plural).into_iter().cloned().collect())
    }

    /// One object; the namespace is empty for cluster-wide ones.
    #[must_use]
    pub fn object(&self, plural: &str, namespace: &str, name: &str) -> Option<Value> {
        let known = store::RESOURCES.iter().find(|r| r.plural == plural)?;
        self.shared.lock().store.get(known.plural, namespace, name).map(|o| (**o).clone())
    }

    /// All events (of both API groups), in the order of their names.
    #[must_use]
    pub fn events(&self) -> Vec<Value> {
        self.objects("events")
    }

    /// All requests since the start, oldest first.
    #[must_use]
    pub fn requests(&self) -> Vec<Request> {
        self.with_state(|s| s.requests().to_vec())
    }

    /// The requests since `start` that were to change something (no dry runs).
    #[must_use]
    pub fn writes_since(&self, start: Instant) -> Vec<Request> {
        self.with_state(|s| s.writes_since(start).into_iter().cloned().collect())
    }

    /// Forgets the recorded requests, so that a long run does not pile them up.
    pub fn forget_requests(&self) {
        self.shared.update(|inner| {
            inner.forgotten += inner.requests.len();
            inner.requests.clear();
        });
    }

    // Setting the stage.

    /// Adds a node, or makes it anew with another uid; returns the uid.
    pub fn add_node(&self, name: &str) -> String {
        self.shared.update(|inner| {
            let uid = inner.store.uid();
            let node = json!({
                "apiVersion": "v1", "kind": "Node",
                "metadata": {"name": name, "uid": uid, "creationTimestamp": schema::seconds(jiff::Timestamp::now())},
                "spec": {}, "status": {},
            });
            inner.store.remove("nodes", "", name);
            inner.store.put("nodes", node);
            uid
        })
    }

    /// Deletes an object without asking; false if there is none.
    pub fn delete(&self, group: &str, plural: &str, namespace: &str, name: &str) -> bool {
        let Some(resource) = resource(group, plural) else { return false };
        self.shared.update(|inner| inner.store.remove(resource.plural, namespace, name).is_some())
    }

    /// Changes a stored object without asking, as an administrator or another controller would; false if there is none.
    pub fn edit(&self, plural: &str, namespace: &str, name: &str, change: impl FnOnce(&mut Value)) -> bool {
        let Some(known) = store::RESOURCES.iter().find(|r| r.plural == plural) else { return false };
        self.shared.update(|inner| {
            let Some(old) = inner.store.get(known.plural, namespace, name) else { return false };
            let mut object = (**old).clone();
            change(&mut object);
            debug_assert_eq!(meta(&object, "name"), name);
            inner.store.put(known.plural, object);
            true
        })
    }
}

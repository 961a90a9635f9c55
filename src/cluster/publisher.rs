//! Keeps the node's slices in the API server as wanted.
//!
//! ```text
//!            wanted pool (nothing is written before the first)
//!                 |
//!   connect -> probe -> list -> watch -> write what differs -> wait
//!      ^         |________________^            |                |
//!      |                 410, 409, conflict    |   change, wipe, retry time
//!      |_______ network, 401, 429, 5xx: pause __|________________|
//! ```
//!
//! One task, one request at a time, so no slice is ever written twice at once. What one slice is refused for (403, 422)
//! holds up that slice alone.

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::{DefaultHasher, Hash as _, Hasher as _},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use futures::StreamExt as _;
use http_body_util::BodyDataStream;
use jiff::Timestamp;
use kube::client::Body;
use serde::Deserialize;
use serde_json::json;
use tokio::{
    sync::{Notify, watch},
    time::{Instant, sleep_until},
};

use crate::domain::{
    names::{DriverName, NodeName},
    slice::Pool,
};

use super::{
    error::ApiError,
    gates,
    layout::{self, Layout, Observed, Owner, Step},
    limits,
    link::{Ask, Backoff, SharedLink, jitter},
    status::{Gate, Gates, SliceStatus},
    wire::{FIELD_MANAGER, List, PATH, Slice, same_sharing, same_spec, same_taints},
};

/// How long after its creation a 403 on a slice is normal: the node authorizer has not heard of the slice yet.
const AUTHORIZER_LAG: Duration = Duration::from_secs(30);
/// A session that was in step for this long was a good one.
const CALM: Duration = Duration::from_secs(10);
/// Longest line of a watch, in bytes.
const LINE_MAX: usize = 8 << 20;

/// Why a slice is not touched for a while.
#[derive(Debug)]
struct Hold {
    until: Instant,
    /// The content that was refused; other content may be tried at once.
    content: Option<u64>,
    why: String,
}

/// How a session with the API server ended without an error.
enum End {
    /// What we know is out of date: list again.
    Relist,
    /// Nobody wants anything published any more.
    Stop,
}

/// The publisher's state between requests.
#[derive(Debug)]
pub(crate) struct Publisher {
    link: SharedLink,
    driver: DriverName,
    node: NodeName,
    wanted: watch::Receiver<Option<Pool>>,
    verify: Arc<Notify>,
    gates: watch::Sender<Gates>,
    observed: Observed,
    /// Highest generation seen or given.
    generation: i64,
    owner: Option<Owner>,
    holds: BTreeMap<String, Hold>,
    /// What was sent under a name, and the version that the server made of it, where it kept less than was sent.
    reduced: BTreeMap<String, (u64, String, BTreeSet<&'static str>)>,
    created: BTreeMap<String, Instant>,
    written: BTreeMap<String, Timestamp>,
    probe_due: bool,
    backoff: Backoff,
    /// Since when all is as it should be.
    calm: Option<Instant>,
    relists: u32,
    left_out: BTreeSet<String>,
}

impl Publisher {
    pub(crate) fn new(
        link: SharedLink,
        driver: DriverName,
        node: NodeName,
        wanted: watch::Receiver<Option<Pool>>,
        verify: Arc<Notify>,
        gates: watch::Sender<Gates>,
    ) -> Self {
        let backoff = Backoff::new(link.timing.backoff_min, link.timing.backoff_max);
        Self {
            link,
            driver,
            node,
            wanted,
            verify,
            gates,
            observed: Observed::new(),
            generation: 0,
            owner: None,
            holds: BTreeMap::new(),
            reduced: BTreeMap::new(),
            created: BTreeMap::new(),
            written: BTreeMap::new(),
            probe_due: true,
            backoff,
            calm: None,
            relists: 0,
            left_out: BTreeSet::new(),
        }
    }

    /// Works until nobody can want anything any more.
    pub(crate) async fn run(mut self) {
        let mut credentials = self.link.generation();
        loop {
            self.link.ready().await;
            credentials.borrow_and_update();
            // What is wanted may depend on the gates, so they are probed before anything is.
            let session = match if self.probe_due { self.probe().await } else { Ok(()) } {
                Ok(()) => {
                    // Until a first pool is wanted the inventory is unknown: what is published stays as it is.
                    if self.wanted.wait_for(Option::is_some).await.is_err() {
                        return;
                    }
                    self.session(&mut credentials).await
                }
                Err(error) => Err(error),
            };
            let error = match session {
                Ok(End::Stop) => return,
                Ok(End::Relist) => {
                    self.relists += 1;
                    // One more look is what a conflict asks for; a row of them is a quarrel.
                    if self.relists > 2 {
                        let pause = self.pause(None);
                        tokio::time::sleep(pause).await;
                    }
                    continue;
                }
                Err(error) => error,
            };
            self.failed(&error);
            let pause = match error.code() {
                Some(403) => jitter(self.link.timing.forbidden),
                _ => self.pause(error.retry_after()),
            };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                _ = credentials.changed() => {}
                () = self.verify.notified() => {}
            }
        }
    }

    /// The pause before the next session. A session that held for a while begins the row anew; one that was cut off at
    /// once does not, however well it began.
    fn pause(&mut self, asked: Option<Duration>) -> Duration {
        if self.calm.take().is_some_and(|since| since.elapsed() > CALM) {
            self.backoff.reset();
        }
        self.backoff.pause(asked)
    }

    fn failed(&mut self, error: &ApiError) {
        if error.is_connection() || error.code() == Some(401) {
            self.probe_due = true;
        }
        let problem = match error.code() {
            Some(404) => format!(
                "{error}; resource.k8s.io/v1 is not served (Kubernetes 1.34 or later is needed), or there is no node {:?} (--node-name)",
                self.node.as_str()
            ),
            _ => error.to_string(),
        };
        let mut news = false;
        self.link.status.update(|status| {
            news = status.publishing.problem.as_ref() != Some(&problem);
            status.publishing.problem = Some(problem.clone());
            status.publishing.in_step = false;
        });
        self.link.metrics.in_step.set(0);
        if news {
            tracing::warn!("slices cannot be kept in step: {problem}");
        }
    }

    /// From the first look to the end of what can be relied on.
    async fn session(&mut self, credentials: &mut watch::Receiver<u64>) -> Result<End, ApiError> {
        let mut version = self.list().await?;
        let mut stream = match self.watch(&version).await {
            Ok(stream) => stream,
            Err(error) if error.code() == Some(410) => return Ok(End::Relist),
            Err(error) => return Err(error),
        };
        let mut due = Some(Instant::now());
        // While changes keep coming the write waits for them, but not longer than this.
        let mut latest = None;
        loop {
            if due.is_some_and(|at| at <= Instant::now()) {
                latest = None;
                due = match self.reconcile().await? {
                    Reconciled::Done { retry } => {
                        if self.probe_due {
                            self.probe().await?;
                            Some(Instant::now() + self.link.timing.debounce)
                        } else {
                            retry
                        }
                    }
                    Reconciled::Stale => return Ok(End::Relist),
                };
            }
            let timer = due;
            tokio::select! {
                line = stream.next() => match self.line(line, &mut version)? {
                    Seen::Nothing => {}
                    Seen::Change => {
                        let limit = *latest.get_or_insert(Instant::now() + self.link.timing.debounce_max);
                        due = Some((Instant::now() + self.link.timing.debounce).min(limit));
                    }
                    Seen::Expired => return Ok(End::Relist),
                    Seen::End => {
                        // A server that ends a watch before its time is going away: another one may come.
                        if stream.opened.elapsed() + Duration::from_secs(5) < self.link.timing.watch {
                            self.probe_due = true;
                            let pause = self.pause(None);
                            tokio::time::sleep(pause).await;
                            return Ok(End::Relist);
                        }
                        match self.watch(&version).await {
                            Ok(next) => stream = next,
                            Err(error) if error.code() == Some(410) => return Ok(End::Relist),
                            Err(error) => return Err(error),
                        }
                    }
                },
                changed = self.wanted.changed() => {
                    if changed.is_err() {
                        return Ok(End::Stop);
                    }
                    due = Some(Instant::now());
                }
                () = self.verify.notified() => return Ok(End::Relist),
                _ = credentials.changed() => {
                    self.probe_due = true;
                    return Ok(End::Relist);
                }
                () = async { match timer { Some(at) => sleep_until(at).await, None => std::future::pending().await } } => {}
            }
        }
    }

    async fn probe(&mut self) -> Result<(), ApiError> {
        // Nothing is stored, so any name will do that keeps the rule.
        let pool = self.node.as_str();
        let found = gates::probe(&self.link, self.driver.as_str(), self.node.as_str(), pool).await?;
        self.probe_due = false;
        self.reduced.clear();
        // A 422 may have been another server's; what is refused for good is refused again.
        let before = self.gates.borrow().clone();
        if before != found {
            self.holds.retain(|_, hold| hold.content.is_none());
            tracing::info!(
                server = %found.server.as_ref().map_or_else(String::new, ToString::to_string),
                taints = %found.taints, consumable = %found.consumable_capacity, partitionable = %found.partitionable_devices,
                problem = %found.problem, "API server probed"
            );
            self.link.status.update(|status| status.version.clone_from(&found.server));
            let withdraw = found.taints == Gate::Off && before.taints != Gate::Off;
            self.gates.send_replace(found);
            if withdraw {
                // Whoever decides what is published may have to withdraw tainted devices first.
                tokio::time::sleep(self.link.timing.debounce).await;
            }
        }
        Ok(())
    }

    /// What a node's credentials must name to be allowed to look.
    fn selector(&self) -> String {
        format!("fieldSelector=spec.driver%3D{},spec.nodeName%3D{}", self.driver, self.node)
    }

    async fn list(&mut self) -> Result<String, ApiError> {
        let path = format!("{PATH}?{}", self.selector());
        let ask =
            Ask { verb: "list", resource: "resourceslices", path: &path, body: None, within: self.link.timing.request };
        let body = self.link.ask(ask).await?;
        let list: List = parse(&body, "list resourceslices")?;
        // A list is rare enough to look again at who else offers devices of this node.
        self.owner = None;
        self.observed = list.items.unwrap_or_default().into_iter().map(|s| (s.metadata.name.clone(), s)).collect();
        let seen = self.observed.values().map(|slice| slice.spec.pool.generation).max().unwrap_or(0);
        self.generation = self.generation.max(seen);
        Ok(list.metadata.resource_version)
    }

    async fn watch(&self, version: &str) -> Result<Lines, ApiError> {
        let time = self.link.timing.watch;
        let path = format!(
            "{PATH}?{}&watch=true&allowWatchBookmarks=true&timeoutSeconds={}&resourceVersion={version}",
            self.selector(),
            time.as_secs().max(1)
        );
        let ask = Ask {
            verb: "watch",
            resource: "resourceslices",
            path: &path,
            body: None,
            within: self.link.timing.request,
        };
        match self.link.open(ask).await {
            Ok(body) => Ok(Lines::new(body, time + Duration::from_secs(30))),
            Err(error) => Err(error),
        }
    }

    /// Takes in a line of the watch.
    fn line(&mut self, line: Result<Option<Bytes>, String>, version: &mut String) -> Result<Seen, ApiError> {
        let url = || self.link.status.read(|status| status.credentials.server.clone());
        let line = match line {
            Ok(Some(line)) => line,
            Ok(None) => return Ok(Seen::End),
            Err(why) => {
                return Err(ApiError::Network { url: url(), why: format!("the watch of our slices broke off: {why}") });
            }
        };
        let event: Event = parse(&line, "watch resourceslices")?;
        match event.kind.as_str() {
            "BOOKMARK" => {
                let Object { object }: Object<Marked> = parse(&line, "watch resourceslices")?;
                *version = object.metadata.resource_version;
                Ok(Seen::Nothing)
            }
            "ADDED" | "MODIFIED" | "DELETED" => {
                let Object { object: slice }: Object<Slice> = parse(&line, "watch resourceslices")?;
                version.clone_from(&slice.metadata.resource_version);
                Ok(if self.take(slice, event.kind == "DELETED") { Seen::Change } else { Seen::Nothing })
            }
            "ERROR" => {
                let Object { object: status }: Object<StatusObject> = parse(&line, "watch resourceslices")?;
                if status.code == 410 {
                    return Ok(Seen::Expired);
                }
                Err(ApiError::Status {
                    code: status.code,
                    reason: status.reason,
                    message: status.message,
                    retry_after: None,
                })
            }
            _ => Ok(Seen::Nothing),
        }
    }

    /// Takes in what the watch says of a slice; false if it is our own write coming back, or older.
    fn take(&mut self, slice: Slice, deleted: bool) -> bool {
        let name = slice.metadata.name.clone();
        let held = self.observed.get(&name).map(|held| &held.metadata);
        let same_object = held.is_some_and(|held| held.uid == slice.metadata.uid);
        if deleted {
            // A node that was deleted and made again has another UID; with the old one as owner the slices would be
            // collected as soon as they are made.
            self.owner = None;
            self.created.remove(&slice.metadata.uid);
            if same_object {
                self.observed.remove(&name);
            }
            return same_object;
        }
        let number = |text: &str| text.parse::<u64>().ok();
        let old = held.is_some_and(|held| {
            same_object
                && match (number(&held.resource_version), number(&slice.metadata.resource_version)) {
                    (Some(held), Some(now)) => now <= held,
                    _ => held.resource_version == slice.metadata.resource_version,
                }
        });
        if old {
            return false;
        }
        self.generation = self.generation.max(slice.spec.pool.generation);
        self.observed.insert(name, slice);
        true
    }

    /// Reads the node's UID, once until there is a reason to doubt it.
    async fn owner(&mut self) -> Result<Owner, ApiError> {
        if let Some(owner) = &self.owner {
            return Ok(owner.clone());
        }
        let path = format!("/api/v1/nodes/{}", self.node);
        let ask = Ask { verb: "get", resource: "nodes", path: &path, body: None, within: self.link.timing.request };
        let owner = match self.link.ask(ask).await {
            Ok(body) => {
                let node: NodeObject = parse(&body, "get nodes")?;
                let uid = node.metadata.uid.clone();
                let offered = node.other_devices();
                self.link.status.update(|status| status.other_devices = offered);
                Owner::Node(uid)
            }
            Err(error) if error.code() == Some(403) => Owner::Unreadable,
            Err(error) => return Err(error),
        };
        self.owner = Some(owner.clone());
        Ok(owner)
    }

    /// Writes what differs.
    async fn reconcile(&mut self) -> Result<Reconciled, ApiError> {
        let Some(pool) = self.wanted.borrow_and_update().clone() else { return Ok(Reconciled::Done { retry: None }) };
        let gates = self.gates.borrow().clone();
        let (pool, left_out) = limits::within(&pool, &gates);
        self.warn_of(&left_out);
        let owner = self.owner().await?;
        let tainted = pool.slices.iter().flat_map(|slice| &slice.devices).any(|device| !device.taints.is_empty());
        let with_taints = gates.taints != Gate::Off;
        let layout = layout::plan(&self.observed, &pool, self.node.as_str(), &owner, self.generation, with_taints);
        self.generation = layout.generation;

        let now = Instant::now();
        self.holds.retain(|_, hold| hold.until > now);
        let mut dropped = BTreeSet::new();
        if tainted && !with_taints {
            dropped.insert("taints (feature gate DRADeviceTaints is off)");
        }
        for step in &layout.steps {
            match self.write(step, &mut dropped).await? {
                Written::Yes | Written::Held => {}
                Written::Stale => return Ok(Reconciled::Stale),
            }
        }
        self.report(&pool, &layout, left_out, &dropped);
        if self.holds.is_empty() {
            self.calm.get_or_insert_with(Instant::now);
            self.relists = 0;
        }
        Ok(Reconciled::Done { retry: self.holds.values().map(|hold| hold.until).min() })
    }

    /// One write and what its answer means.
    async fn write(&mut self, step: &Step, dropped: &mut BTreeSet<&'static str>) -> Result<Written, ApiError> {
        let (verb, metadata, path, body) = match step {
            Step::Delete(metadata) => {
                let preconditions = json!({"uid": metadata.uid, "resourceVersion": metadata.resource_version});
                let options = json!({"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": preconditions});
                ("delete", metadata, format!("{PATH}/{}", metadata.name), options.to_string().into_bytes())
            }
            Step::Create(slice) => {
                ("create", &slice.metadata, format!("{PATH}?fieldManager={FIELD_MANAGER}"), bytes_of(slice)?)
            }
            Step::Replace(slice) => {
                let path = format!("{PATH}/{}?fieldManager={FIELD_MANAGER}", slice.metadata.name);
                ("update", &slice.metadata, path, bytes_of(slice)?)
            }
        };
        let name = metadata.name.clone();
        let content = match step {
            Step::Delete(_) => None,
            Step::Create(slice) | Step::Replace(slice) => Some(digest(slice)),
        };
        if let Some(hold) = self.holds.get(&name)
            && (hold.content.is_none() || hold.content == content)
        {
            return Ok(Written::Held);
        }
        if let (Some(content), Some((sent, version, what))) = (content, self.reduced.get(&name))
            && content == *sent
            && *version == metadata.resource_version
        {
            dropped.extend(what);
            return Ok(Written::Yes);
        }
        let ask =
            Ask { verb, resource: "resourceslices", path: &path, body: Some(body), within: self.link.timing.request };
        match self.link.ask(ask).await {
            Ok(body) => {
                self.holds.remove(&name);
                self.link.metrics.slice_writes.inc();
                match step {
                    Step::Delete(_) => {
                        self.observed.remove(&name);
                        self.written.remove(&name);
                    }
                    Step::Create(sent) | Step::Replace(sent) => {
                        let kept: Slice = parse(&body, &format!("{verb} resourceslices"))?;
                        self.compare(sent, &kept, dropped);
                        if verb == "create" {
                            self.created.insert(kept.metadata.uid.clone(), Instant::now());
                            self.created.retain(|_, at| at.elapsed() < AUTHORIZER_LAG);
                        }
                        self.written.insert(name.clone(), Timestamp::now());
                        self.observed.insert(name, kept);
                    }
                }
                Ok(Written::Yes)
            }
            Err(error) => self.refused(step, name, content, error),
        }
    }

    /// What a refused write means for its slice.
    fn refused(
        &mut self,
        step: &Step,
        name: String,
        content: Option<u64>,
        error: ApiError,
    ) -> Result<Written, ApiError> {
        match (step, error.code()) {
            (Step::Delete(_), Some(404)) => {
                self.observed.remove(&name);
                Ok(Written::Yes)
            }
            // Somebody was faster, or it is gone, or an earlier answer of ours was lost: look again.
            (_, Some(409)) | (Step::Replace(_), Some(404)) => Ok(Written::Stale),
            (_, Some(403)) => {
                let uid = match step {
                    Step::Delete(metadata) => &metadata.uid,
                    Step::Create(slice) | Step::Replace(slice) => &slice.metadata.uid,
                };
                let fresh = self.created.get(uid).is_some_and(|at| at.elapsed() < AUTHORIZER_LAG);
                let pause = if fresh {
                    Duration::from_secs(1).min(self.link.timing.forbidden)
                } else {
                    jitter(self.link.timing.forbidden)
                };
                self.holds.insert(name, Hold { until: Instant::now() + pause, content: None, why: error.to_string() });
                Ok(Written::Held)
            }
            (_, Some(400 | 413 | 422)) => {
                tracing::error!(slice = %name, "slice refused as invalid: {error}");
                let until = Instant::now() + jitter(self.link.timing.invalid);
                self.holds.insert(name, Hold { until, content, why: error.to_string() });
                // The server may have been upgraded under us.
                self.probe_due = true;
                Ok(Written::Held)
            }
            _ => Err(error),
        }
    }

    /// Looks at what the server made of what was sent.
    fn compare(&mut self, sent: &Slice, kept: &Slice, dropped: &mut BTreeSet<&'static str>) {
        if same_spec(&sent.spec, &kept.spec) {
            self.reduced.remove(&sent.metadata.name);
            return;
        }
        let pairs = || sent.spec.devices().iter().zip(kept.spec.devices());
        let mut what = BTreeSet::new();
        if pairs().any(|(sent, kept)| !same_taints(sent, kept)) {
            what.insert("taints (feature gate DRADeviceTaints is off)");
            self.gates.send_if_modified(|gates| std::mem::replace(&mut gates.taints, Gate::Off) != Gate::Off);
        }
        if pairs().any(|(sent, kept)| !same_sharing(sent, kept)) {
            what.insert("sharing (feature gate DRAConsumableCapacity or DRAPartitionableDevices is off)");
        }
        if what.is_empty() {
            what.insert("fields (the API server does not say which)");
        }
        dropped.extend(&what);
        // Not to be sent again until either side changes.
        self.reduced.insert(sent.metadata.name.clone(), (digest(sent), kept.metadata.resource_version.clone(), what));
    }

    fn warn_of(&mut self, left_out: &[String]) {
        let now: BTreeSet<String> = left_out.iter().cloned().collect();
        for line in now.difference(&self.left_out) {
            tracing::warn!("{line}");
        }
        self.left_out = now;
    }

    fn report(&self, pool: &Pool, layout: &Layout, left_out: Vec<String>, dropped: &BTreeSet<&'static str>) {
        let slices: Vec<SliceStatus> = layout
            .names
            .iter()
            .map(|name| {
                let stored = self.observed.get(name);
                SliceStatus {
                    name: name.clone(),
                    devices: stored.map_or(0, |slice| slice.spec.devices().len()),
                    generation: stored.map(|slice| slice.spec.pool.generation),
                    written: self.written.get(name).copied(),
                    problem: self.holds.get(name).map(|hold| hold.why.clone()),
                }
            })
            .collect();
        let dropped = (!dropped.is_empty())
            .then(|| format!("the API server drops {}", dropped.iter().copied().collect::<Vec<_>>().join(" and ")));
        let in_step = self.holds.is_empty();
        let count = |number: usize| i64::try_from(number).unwrap_or(i64::MAX);
        let metrics = &self.link.metrics;
        metrics.in_step.set(i64::from(in_step));
        metrics
            .wanted_devices
            .set(count(pool.slices.iter().map(|slice| slice.devices.len()).sum::<usize>() + left_out.len()));
        metrics.left_out_devices.set(count(left_out.len()));
        metrics.published_devices.set(count(slices.iter().map(|slice| slice.devices).sum()));
        self.link.status.update(|status| {
            status.publishing.in_step = in_step;
            status.publishing.slices = slices;
            status.publishing.left_out = left_out;
            status.publishing.problem =
                self.holds.iter().next().map(|(name, hold)| format!("slice {name} cannot be written: {}", hold.why));
            status.publishing.dropped = dropped;
        });
    }
}

/// What a reconciliation came to.
enum Reconciled {
    /// All was written that can be; when to try the rest.
    Done { retry: Option<Instant> },
    /// What we knew was out of date.
    Stale,
}

/// What a write came to.
enum Written {
    Yes,
    Held,
    Stale,
}

/// What a line of the watch came to.
enum Seen {
    Nothing,
    Change,
    Expired,
    End,
}

#[derive(Deserialize)]
struct Event {
    #[serde(rename = "type")]
    kind: String,
}

#[derive(Deserialize)]
struct Object<T> {
    object: T,
}

#[derive(Deserialize)]
struct NodeObject {
    metadata: Mark,
    #[serde(default)]
    status: Option<NodeStatus>,
}

#[derive(Default, Deserialize)]
struct NodeStatus {
    #[serde(default)]
    allocatable: Option<BTreeMap<String, String>>,
}

impl NodeObject {
    /// Ascend devices that the node offers through a device plugin.
    fn other_devices(self) -> Vec<String> {
        let allocatable = self.status.unwrap_or_default().allocatable.unwrap_or_default();
        let offered = |(name, count): &(String, String)| name.starts_with("huawei.com/") && count != "0";
        allocatable.into_iter().filter(offered).map(|(name, _)| name).collect()
    }
}

#[derive(Deserialize)]
struct Marked {
    metadata: Mark,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Mark {
    #[serde(default)]
    uid: String,
    #[serde(default)]
    resource_version: String,
}

#[derive(Deserialize)]
struct StatusObject {
    #[serde(default)]
    code: u16,
    #[serde(default)]
    reason: String,
    #[serde(default)]
    message: String,
}

fn parse<'a, T: Deserialize<'a>>(body: &'a [u8], what: &str) -> Result<T, ApiError> {
    serde_json::from_slice(body).map_err(|error| ApiError::Answer { what: what.to_owned(), why: error.to_string() })
}

fn bytes_of(slice: &Slice) -> Result<Vec<u8>, ApiError> {
    serde_json::to_vec(slice)
        .map_err(|error| ApiError::Answer { what: "our own slice".to_owned(), why: error.to_string() })
}

/// Tells one content of a slice from another, within this process.
fn digest(slice: &Slice) -> u64 {
    let mut hasher = DefaultHasher::new();
    serde_json::to_string(&slice.spec).unwrap_or_default().hash(&mut hasher);
    format!("{:?}", slice.metadata.owner_references).hash(&mut hasher);
    hasher.finish()
}

/// The lines of a watch.
struct Lines {
    body: BodyDataStream<Body>,
    buffer: Vec<u8>,
    /// Up to here the buffer has no end of a line.
    searched: usize,
    opened: Instant,
    ends: Instant,
}

impl Lines {
    fn new(body: Body, within: Duration) -> Self {
        let opened = Instant::now();
        Self { body: BodyDataStream::new(body), buffer: Vec::new(), searched: 0, opened, ends: opened + within }
    }

    /// The next line, `None` at the end. Can be dropped and called again without loss.
    async fn next(&mut self) -> Result<Option<Bytes>, String> {
        loop {
            if let Some(at) = self.buffer[self.searched..].iter().position(|byte| *byte == b'\n') {
                let rest = self.buffer.split_off(self.searched + at + 1);
                let line = std::mem::replace(&mut self.buffer, rest);
                self.searched = 0;
                if line.iter().all(u8::is_ascii_whitespace) {
                    continue;
                }
                return Ok(Some(line.into()));
            }
            self.searched = self.buffer.len();
            if self.buffer.len() > LINE_MAX {
                return Err(format!("a line is longer than {LINE_MAX} bytes"));
            }
            match tokio::time::timeout_at(self.ends, self.body.next()).await {
                Ok(Some(Ok(data))) => self.buffer.extend_from_slice(&data),
                // What follows the last line end was cut off: the next watch brings it again.
                Ok(Some(Err(error))) => return Err(error.to_string()),
                Ok(None) => return Ok(None),
                Err(_) => return Err("the server did not end it in time".to_owned()),
            }
        }
    }
}

//! Events on the node, on the claim where there is one, and on the pods of the claims that a card's health touches.
//!
//! Best effort: a bounded queue, a budget, one Event for what repeats itself within ten minutes. What cannot be written
//! is counted; the journal has it anyway.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use jiff::Timestamp;
use k8s_openapi::{
    api::core::v1::{Event, EventSource, ObjectReference},
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time},
};
use serde::Deserialize;
use serde_json::json;
use tokio::{
    sync::mpsc,
    time::{Instant, sleep, timeout},
};

use crate::domain::{
    claim::ClaimRef,
    names::{NodeName, is_dns_label, is_dns_subdomain},
    notice::{Notice, Severity},
};

use super::link::{Ask, SharedLink};

/// Longest queue.
const QUEUE: usize = 256;
/// Most Events that are remembered.
const REMEMBERED: usize = 256;
/// Events that may be written at once; one more comes into the budget every [`REFILL`].
const BURST: u32 = 25;
/// See [`BURST`].
const REFILL: Duration = Duration::from_secs(5);
/// How long an Event waits for the API server to come back.
const PATIENCE: Duration = Duration::from_secs(30);
/// Longest message, in bytes; the API's limit is 1024.
const MESSAGE_MAX: usize = 1000;
/// An Event that only repeats itself is counted up at most this often.
const RECOUNT: Duration = Duration::from_mins(1);

/// Who writes the Events.
#[derive(Debug, Clone)]
pub(crate) struct Events {
    link: SharedLink,
    node: NodeName,
    queue: mpsc::Sender<Notice>,
    receiver: Arc<Mutex<Option<mpsc::Receiver<Notice>>>>,
}

/// What an Event is about.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Subject {
    reason: &'static str,
    /// Claim, device or whatever else the notice names: two cards must not share one Event.
    what: String,
    /// What it stands on.
    about: String,
}

/// What an Event stands on.
#[derive(Debug, Clone, Copy)]
enum About<'a> {
    Node,
    Claim(&'a ClaimRef),
    Pod { namespace: &'a str, name: &'a str, uid: &'a str },
}

/// A claim, as far as it tells its pods.
#[derive(Deserialize)]
struct Claim {
    metadata: Metadata,
    #[serde(default)]
    status: Option<Status>,
}

#[derive(Deserialize)]
struct Metadata {
    uid: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Status {
    #[serde(default)]
    reserved_for: Option<Vec<Consumer>>,
}

/// Who has reserved a claim.
#[derive(Deserialize)]
struct Consumer {
    #[serde(default)]
    resource: String,
    name: String,
    uid: String,
}

/// An Event that was written.
#[derive(Debug)]
struct Written {
    namespace: String,
    name: String,
    message: String,
    count: i32,
    first: Instant,
    sent: Instant,
}

impl Events {
    pub(crate) fn new(link: SharedLink, node: NodeName) -> Self {
        let (queue, receiver) = mpsc::channel(QUEUE);
        Self { link, node, queue, receiver: Arc::new(Mutex::new(Some(receiver))) }
    }

    /// Queues a notice, or drops it.
    pub(crate) fn send(&self, notice: &Notice) {
        if notice.makes_event() && self.queue.try_send(notice.clone()).is_err() {
            self.dropped();
        }
    }

    fn dropped(&self) {
        self.link.metrics.events_dropped.inc();
        self.link.status.update(|status| status.events_dropped += 1);
    }

    /// Writes what is queued, for ever.
    pub(crate) async fn run(&self) {
        let Some(receiver) = self.receiver.lock().unwrap_or_else(PoisonError::into_inner).take() else { return };
        // Handed back when this ends, also by a panic, for the next run.
        let mut lease = Lease { place: &self.receiver, receiver: Some(receiver) };
        let mut book = HashMap::new();
        let mut budget = Budget { left: BURST, since: Instant::now() };
        while let Some(notice) = lease.next().await {
            let claim = notice.claim().filter(|claim| !claim.namespace.is_empty()).map(About::Claim);
            for about in [Some(About::Node), claim].into_iter().flatten() {
                if !self.write(&notice, about, &mut book, &mut budget).await {
                    self.dropped();
                }
            }
            for claim in notice.affected() {
                for pod in self.pods(claim).await {
                    let about = About::Pod { namespace: &claim.namespace, name: &pod.name, uid: &pod.uid };
                    if !self.write(&notice, about, &mut book, &mut budget).await {
                        self.dropped();
                    }
                }
            }
        }
    }

    /// Pods that have reserved a claim; none if that cannot be read.
    async fn pods(&self, claim: &ClaimRef) -> Vec<Consumer> {
        if !is_dns_label(&claim.namespace) || !is_dns_subdomain(&claim.name) || !self.reachable().await {
            return Vec::new();
        }
        let path = format!("/apis/resource.k8s.io/v1/namespaces/{}/resourceclaims/{}", claim.namespace, claim.name);
        let within = self.link.timing.request;
        let ask = Ask { verb: "get", resource: "resourceclaims", path: &path, body: None, within };
        let Ok(body) = self.link.ask(ask).await else { return Vec::new() };
        let Ok(read) = serde_json::from_slice::<Claim>(&body) else { return Vec::new() };
        if read.metadata.uid != claim.uid.as_str() {
            return Vec::new();
        }
        let consumers = read.status.and_then(|status| status.reserved_for).unwrap_or_default();
        consumers.into_iter().filter(|consumer| consumer.resource == "pods").collect()
    }

    /// Writes one Event; false if it was dropped.
    async fn write(
        &self,
        notice: &Notice,
        about: About<'_>,
        book: &mut HashMap<Subject, Written>,
        budget: &mut Budget,
    ) -> bool {
        let window = self.link.timing.event_window;
        let message = shortened(notice.message());
        let subject = Subject { reason: notice.reason(), what: what(notice), about: about.id() };
        book.retain(|_, written| written.first.elapsed() < window);
        if let Some(written) = book.get_mut(&subject) {
            written.count = written.count.saturating_add(1);
            if written.message == message && written.sent.elapsed() < RECOUNT {
                return true;
            }
            if !budget.take() || !self.reachable().await {
                return false;
            }
            let body = json!({
                "count": written.count, "lastTimestamp": now(), "message": message, "type": kind(notice)
            });
            let path = format!("/api/v1/namespaces/{}/events/{}", written.namespace, written.name);
            if self.ask("patch", &path, body.to_string().into_bytes()).await {
                written.message = message;
                written.sent = Instant::now();
                return true;
            }
            // It may have been removed: written anew below, out of the same budget.
            book.remove(&subject);
        }
        if book.len() >= REMEMBERED || !budget.take() || !self.reachable().await {
            return false;
        }
        let event = self.event(notice, about, &message);
        let (Some(namespace), Some(name), Ok(body)) =
            (event.metadata.namespace.clone(), event.metadata.name.clone(), serde_json::to_vec(&event))
        else {
            return false;
        };
        if !self.ask("create", &format!("/api/v1/namespaces/{namespace}/events"), body).await {
            return false;
        }
        let at = Instant::now();
        book.insert(subject, Written { namespace, name, message, count: 1, first: at, sent: at });
        true
    }

    fn event(&self, notice: &Notice, about: About<'_>, message: &str) -> Event {
        let namespace = about.namespace().to_owned();
        let about = match about {
            About::Claim(claim) => ObjectReference {
                api_version: Some("resource.k8s.io/v1".to_owned()),
                kind: Some("ResourceClaim".to_owned()),
                namespace: Some(claim.namespace.clone()),
                name: Some(claim.name.clone()),
                uid: Some(claim.uid.to_string()),
                ..ObjectReference::default()
            },
            // Nodes have no namespace, their Events stand in "default"; kubelet too gives the name as UID.
            About::Node => ObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("Node".to_owned()),
                name: Some(self.node.to_string()),
                uid: Some(self.node.to_string()),
                ..ObjectReference::default()
            },
            About::Pod { namespace, name, uid } => ObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("Pod".to_owned()),
                namespace: Some(namespace.to_owned()),
                name: Some(name.to_owned()),
                uid: Some(uid.to_owned()),
                ..ObjectReference::default()
            },
        };
        let base: String = about.name.clone().unwrap_or_default().chars().take(200).collect();
        let name = format!("{base}.{:016x}", Timestamp::now().as_nanosecond() & i128::from(u64::MAX));
        Event {
            metadata: ObjectMeta { name: Some(name), namespace: Some(namespace), ..ObjectMeta::default() },
            involved_object: about,
            reason: Some(notice.reason().to_owned()),
            message: Some(message.to_owned()),
            type_: Some(kind(notice).to_owned()),
            count: Some(1),
            first_timestamp: Some(now()),
            last_timestamp: Some(now()),
            source: Some(EventSource { component: Some("npu-dra".to_owned()), host: Some(self.node.to_string()) }),
            reporting_component: Some("npu-dra".to_owned()),
            reporting_instance: Some(self.node.to_string()),
            ..Event::default()
        }
    }

    /// Waits a while for the API server; false if it stays away.
    async fn reachable(&self) -> bool {
        let mut status = self.link.status.subscribe();
        let patience = PATIENCE.min(self.link.timing.request * 3);
        timeout(patience, status.wait_for(|status| status.connected)).await.is_ok_and(|result| result.is_ok())
    }

    async fn ask(&self, verb: &'static str, path: &str, body: Vec<u8>) -> bool {
        for attempt in 0..2 {
            let ask =
                Ask { verb, resource: "events", path, body: Some(body.clone()), within: self.link.timing.request };
            match self.link.ask(ask).await {
                Ok(_) => {
                    self.link.metrics.events_sent.inc();
                    return true;
                }
                Err(error) => {
                    tracing::debug!(%error, "event not written");
                    // Only what may go away by itself, and where nothing can have been written, is worth another try.
                    if attempt > 0 || !matches!(error.code(), Some(429 | 503)) {
                        return false;
                    }
                    sleep(error.retry_after().unwrap_or(Duration::from_secs(1)).min(Duration::from_secs(5))).await;
                }
            }
        }
        false
    }
}

/// The queue's end while somebody reads from it.
struct Lease<'a> {
    place: &'a Mutex<Option<mpsc::Receiver<Notice>>>,
    receiver: Option<mpsc::Receiver<Notice>>,
}

impl Lease<'_> {
    async fn next(&mut self) -> Option<Notice> {
        self.receiver.as_mut()?.recv().await
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        *self.place.lock().unwrap_or_else(PoisonError::into_inner) = self.receiver.take();
    }
}

/// Tokens that refill with time.
#[derive(Debug)]
struct Budget {
    left: u32,
    since: Instant,
}

impl Budget {
    fn take(&mut self) -> bool {
        while self.left < BURST && self.since.elapsed() >= REFILL {
            self.left += 1;
            self.since += REFILL;
        }
        if self.left == BURST {
            self.since = Instant::now();
        }
        let any = self.left > 0;
        self.left = self.left.saturating_sub(1);
        any
    }
}

/// What a notice is about, beside its reason.
fn what(notice: &Notice) -> String {
    match notice {
        Notice::Prepared { claim, .. } | Notice::Unprepared { claim } => claim.uid.to_string(),
        Notice::Refused { claim, operation, .. } => format!("{} {operation}", claim.uid),
        Notice::Health { device, .. }
        | Notice::Lost { device }
        | Notice::Found { device }
        | Notice::Closed { device, .. }
        | Notice::OnHold { device, .. } => device.to_string(),
        Notice::VnpuLost { id, .. } => id.to_string(),
        Notice::Model { model, .. } => model.to_string(),
        Notice::Quarantined { uid, .. } | Notice::Rebuilt { uid } | Notice::Swept { uid } => uid.clone(),
        Notice::Backend { .. } => String::new(),
    }
}

fn kind(notice: &Notice) -> &'static str {
    if notice.severity() == Severity::Info { "Normal" } else { "Warning" }
}

impl About<'_> {
    /// Where Events on it stand.
    fn namespace(&self) -> &str {
        match self {
            Self::Node => "default",
            Self::Claim(claim) => &claim.namespace,
            Self::Pod { namespace, .. } => namespace,
        }
    }

    fn id(&self) -> String {
        match self {
            Self::Node => String::new(),
            Self::Claim(claim) => claim.uid.to_string(),
            Self::Pod { uid, .. } => format!("pod {uid}"),
        }
    }
}

fn now() -> Time {
    Time(Timestamp::now())
}

fn shortened(message: String) -> String {
    if message.len() <= MESSAGE_MAX {
        return message;
    }
    let mut text = String::new();
    for c in message.chars() {
        if text.len() + c.len_utf8() > MESSAGE_MAX {
            break;
        }
        text.push(c);
    }
    text.push_str("...");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_message_is_cut_at_a_character() {
        let text = shortened("é".repeat(900));
        assert!(text.len() <= MESSAGE_MAX + 3 && text.ends_with("é..."));
        assert_eq!(shortened("x".into()), "x");
    }

    #[test]
    fn the_budget_ends_and_comes_back() {
        let mut budget = Budget { left: BURST, since: Instant::now() };
        assert_eq!((0..100).filter(|_| budget.take()).count(), 25);
        budget.since = budget.since.checked_sub(REFILL * 3).unwrap();
        assert_eq!((0..100).filter(|_| budget.take()).count(), 3);
    }
}

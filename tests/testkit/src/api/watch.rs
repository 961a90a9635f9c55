//! Watch streams.

use std::{
    convert::Infallible,
    sync::Arc,
    time::{Duration, Instant},
};

use axum::body::{Body, Bytes};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::{
    Shared,
    routes::{Query, Target},
    selector::Selector,
    status::{Cause, Failure},
    store::{Change, Resource},
};

/// How a server tells a client that its resource version is too old.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum GoneAs {
    /// HTTP 200 and an `ERROR` event with code 410, as the watch cache does.
    #[default]
    Event,
    /// HTTP 410.
    Status,
}

/// Why all watches end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cut {
    Close,
    Gone,
}

struct Stream {
    shared: Arc<Shared>,
    resource: &'static Resource,
    namespace: Option<String>,
    selector: Selector,
    /// Everything up to this version was sent.
    position: u64,
    bookmarks: bool,
    sender: mpsc::Sender<Result<Bytes, Infallible>>,
}

/// Counts open watches while it lives.
struct Open(Arc<Shared>, &'static str);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.update(|inner| {
            if let Some(count) = inner.watches.get_mut(self.1) {
                *count = count.saturating_sub(1);
            }
        });
    }
}

/// Reads a version.
///
/// # Errors
/// 500, as real servers answer to what is no number.
pub(crate) fn version(text: &str) -> Result<u64, Failure> {
    text.parse().map_err(|_| {
        let mut failure = Failure::new(500, format!("strconv.ParseUint: parsing \"{text}\": invalid syntax"));
        failure.reason = "";
        failure
    })
}

/// Checks that `resourceVersionMatch` is used where it may be, and only there.
///
/// # Errors
/// 422.
pub(crate) fn version_match(query: &Query) -> Result<(), Failure> {
    let refuse = |why: &str| {
        let cause = Cause {
            reason: "FieldValueForbidden",
            field: "resourceVersionMatch".to_owned(),
            message: format!("Forbidden: {why}"),
        };
        Err(Failure::invalid("ListOptions", "meta.k8s.io", "", &[cause]))
    };
    let how = query.get("resourceVersionMatch");
    let initial = !query.get("sendInitialEvents").is_empty();
    if initial && how != "NotOlderThan" {
        return refuse("sendInitialEvents requires setting resourceVersionMatch to NotOlderThan");
    }
    if !how.is_empty() && !initial && query.is_true("watch") {
        return refuse("resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided");
    }
    if !how.is_empty() && !initial && query.get("resourceVersion").is_empty() {
        return refuse("resourceVersionMatch is forbidden unless resourceVersion is provided");
    }
    Ok(())
}

/// Opens a watch.
///
/// # Errors
/// 400 for a malformed version, 410 if it is too old and the server says so by status.
pub(crate) fn open(shared: &Arc<Shared>, target: &Target, query: &Query, selector: Selector) -> Result<Body, Failure> {
    let from = match query.get("resourceVersion") {
        "" | "0" => None,
        text => Some(version(text)?),
    };
    version_match(query)?;
    let whole = from.is_none() || query.is_true("sendInitialEvents");
    let namespace = (!target.namespace.is_empty()).then(|| target.namespace.clone());
    let plural = target.resource.plural;
    let seconds: u64 = match query.get("timeoutSeconds") {
        "" => 1800,
        text => text.parse().map_err(|_| Failure::bad_request(format!("Invalid value: \"{text}\"")))?,
    };
    let end = Instant::now() + Duration::from_secs(seconds);
    let (sender, receiver) = mpsc::channel(64);

    let mut cut = shared.cut.subscribe();
    let (first, position, gone) = shared.update(|inner| {
        let store = &inner.store;
        if let Some(from) = from.filter(|f| *f < store.oldest()) {
            let failure = Failure::gone(from, store.oldest());
            if inner.gone_as == GoneAs::Status {
                return Err(failure);
            }
            return Ok((vec![line("ERROR", &failure.body())], from, true));
        }
        let mut first = Vec::new();
        if whole {
            let objects = store.list(plural, namespace.as_deref()).filter(|o| selector.matches(o));
            first.extend(objects.map(|o| line("ADDED", o)));
            // Without a version a client that takes bookmarks is told where the beginning ends.
            let unasked = query.get("resourceVersion").is_empty() && query.is_true("allowWatchBookmarks");
            if query.is_true("sendInitialEvents") || unasked {
                first.push(bookmark(target.resource, store.version(), true));
            }
        }
        let position = if whole { store.version() } else { from.unwrap_or(0) };
        *inner.watches.entry(plural).or_default() += 1;
        Ok((first, position, false))
    })?;
    if gone {
        return Ok(Body::from(first.concat()));
    }
    let guard = Open(Arc::clone(shared), plural);
    let mut stream = Stream {
        shared: Arc::clone(shared),
        resource: target.resource,
        namespace,
        selector,
        position,
        bookmarks: query.is_true("allowWatchBookmarks"),
        sender,
    };
    tokio::spawn(async move {
        let _guard = guard;
        let client = stream.sender.clone();
        tokio::select! {
            () = client.closed() => {}
            () = stream.run(first, end) => {}
            changed = cut.changed() => {
                if changed.is_ok() && cut.borrow().1 == Cut::Gone {
                    let failure = Failure::gone(stream.position, stream.shared.update(|i| i.store.oldest()));
                    let _ = stream.sender.try_send(Ok(line("ERROR", &failure.body())));
                }
            }
        }
    });
    Ok(Body::from_stream(ReceiverStream::new(receiver)))
}

impl Stream {
    async fn run(&mut self, first: Vec<Bytes>, end: Instant) {
        let mut changed = self.shared.changed.subscribe();
        for line in first {
            if self.sender.send(Ok(line)).await.is_err() {
                return;
            }
        }
        let mut last = Instant::now();
        loop {
            changed.mark_unchanged();
            let (lines, interval) = match self.pending() {
                Ok(pending) => pending,
                Err(failure) => {
                    let _ = self.sender.send(Ok(line("ERROR", &failure.body()))).await;
                    return;
                }
            };
            let mut silent = self.shared.silent.subscribe();
            for line in lines {
                if silent.wait_for(|s| !s).await.is_err() || self.sender.send(Ok(line)).await.is_err() {
                    return;
                }
            }
            let left = end.saturating_duration_since(Instant::now());
            let next = (last + interval).saturating_duration_since(Instant::now());
            tokio::select! {
                outcome = changed.changed() => if outcome.is_err() { return },
                () = tokio::time::sleep(next.min(left)) => { // waits: for the next bookmark or the end of the watch
                    let done = left <= next;
                    last = Instant::now();
                    if self.bookmarks && !*silent.borrow() {
                        let line = bookmark(self.resource, self.position, false);
                        if self.sender.send(Ok(line)).await.is_err() {
                            return;
                        }
                    }
                    if done {
                        return;
                    }
                }
            }
        }
    }

    /// What happened since the last look, and the interval of bookmarks; 410 when that is no longer known.
    fn pending(&mut self) -> Result<(Vec<Bytes>, Duration), Failure> {
        let inner = self.shared.lock();
        let mut lines = Vec::new();
        if self.position < inner.store.oldest() {
            return Err(Failure::gone(self.position, inner.store.oldest()));
        }
        for change in inner.store.since(self.position, self.resource.plural) {
            lines.extend(self.event(change));
        }
        self.position = inner.store.version();
        Ok((lines, inner.bookmark_every))
    }

    fn event(&self, change: &Change) -> Option<Bytes> {
        let seen = |object: &Option<Arc<Value>>| {
            object.as_ref().is_some_and(|o| {
                let here = self.namespace.as_deref().is_none_or(|n| super::store::meta(o, "namespace") == n);
                here && self.selector.matches(o)
            })
        };
        let kind = match (seen(&change.old), seen(&change.new)) {
            (false, true) => "ADDED",
            (true, true) => "MODIFIED",
            (true, false) => "DELETED",
            (false, false) => return None,
        };
        let object = if kind == "DELETED" { change.old.as_ref() } else { change.new.as_ref() };
        object.map(|o| line(kind, o))
    }
}

fn line(kind: &str, object: &Value) -> Bytes {
    Bytes::from(format!("{}\n", json!({"type": kind, "object": object})))
}

fn bookmark(resource: &Resource, version: u64, initial_end: bool) -> Bytes {
    let mut metadata = json!({"resourceVersion": version.to_string(), "creationTimestamp": null});
    if initial_end {
        metadata["annotations"] = json!({"k8s.io/initial-events-end": "true"});
    }
    line("BOOKMARK", &json!({"kind": resource.kind, "apiVersion": resource.api_version(), "metadata": metadata}))
}

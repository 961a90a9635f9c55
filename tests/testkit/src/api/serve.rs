//! The listener, the connections, and the way of one request through them.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use axum::body::Body;
use http::{HeaderMap, Request, Response, header};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
};
use serde_json::Value;
use tokio::{
    net::{TcpListener, TcpSocket, TcpStream},
    sync::{mpsc, oneshot},
    task::JoinSet,
    time::sleep,
};
use tokio_rustls::TlsAcceptor;

use super::{
    Shared,
    auth::Who,
    events,
    faults::Action,
    ops::{self, Write},
    record,
    routes::{self, Query, Target},
    selector::Selector,
    status::Failure,
    watch,
};

const LARGEST_BODY: usize = 3 * 1024 * 1024;
/// What is read, so that a client whose body is too large hears why.
const READ_MOST: usize = 64 * 1024 * 1024;

/// Orders for the listener.
#[derive(Debug)]
pub(crate) enum Order {
    /// Refuse connections and drop the open ones; the port stays ours.
    Stop(oneshot::Sender<io::Result<()>>),
    /// Listen again on the same port.
    Resume(oneshot::Sender<io::Result<()>>),
    /// Drop the open connections.
    Drop(oneshot::Sender<io::Result<()>>),
}

enum Port {
    Open(TcpListener),
    /// Bound and not listening: connections are refused and nobody else gets the port.
    Held(TcpSocket),
    Lost,
}

fn hold(address: SocketAddr) -> io::Result<TcpSocket> {
    let socket = TcpSocket::new_v4()?;
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    Ok(socket)
}

/// Accepts until the task is aborted; all connections end with it.
pub(crate) async fn run(
    listener: TcpListener,
    address: SocketAddr,
    shared: Arc<Shared>,
    mut orders: mpsc::Receiver<Order>,
) {
    let mut port = Port::Open(listener);
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = accept(&port) => match accepted {
                Ok(stream) => drop(connections.spawn(connection(stream, Arc::clone(&shared)))),
                Err(_) => sleep(Duration::from_millis(10)).await, // waits: for file descriptors to come free
            },
            Some(_) = connections.join_next() => {}
            order = orders.recv() => match order {
                None => return,
                Some(Order::Drop(done)) => {
                    connections.shutdown().await;
                    let _ = done.send(Ok(()));
                }
                Some(Order::Stop(done)) => {
                    port = Port::Lost;
                    connections.shutdown().await;
                    let held = hold(address);
                    let outcome = held.map(|socket| port = Port::Held(socket));
                    let _ = done.send(outcome);
                }
                Some(Order::Resume(done)) => {
                    let outcome = match std::mem::replace(&mut port, Port::Lost) {
                        Port::Open(listener) => Ok(listener),
                        Port::Held(socket) => socket.listen(1024),
                        Port::Lost => hold(address).and_then(|s| s.listen(1024)),
                    };
                    let outcome = outcome.map(|listener| port = Port::Open(listener));
                    let _ = done.send(outcome);
                }
            }
        }
    }
}

async fn accept(port: &Port) -> io::Result<TcpStream> {
    match port {
        Port::Open(listener) => listener.accept().await.map(|(stream, _)| stream),
        Port::Held(_) | Port::Lost => std::future::pending().await,
    }
}

async fn connection(stream: TcpStream, shared: Arc<Shared>) {
    let mut silent = shared.silent.subscribe();
    if silent.wait_for(|s| !s).await.is_err() {
        return;
    }
    let _ = stream.set_nodelay(true);
    let (config, http2) = {
        let inner = shared.lock();
        (inner.tls.clone(), inner.http2)
    };
    let config = if http2 {
        let mut config = (*config).clone();
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Arc::new(config)
    } else {
        config
    };
    let Ok(stream) = TlsAcceptor::from(config).accept(stream).await else { return };
    let certificate: Option<Arc<[u8]>> =
        stream.get_ref().1.peer_certificates().and_then(|c| c.first()).map(|c| Arc::from(c.as_ref()));
    let service = service_fn(move |request| answer(request, certificate.clone(), Arc::clone(&shared)));
    let _ = auto::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service).await;
}

/// What a request says about itself.
struct Asked {
    query: Query,
    target: Option<Target>,
    content_type: String,
    accept: String,
    bearer: Option<String>,
    /// Its place among all requests since the start.
    index: usize,
}

async fn answer(
    request: Request<Incoming>,
    certificate: Option<Arc<[u8]>>,
    shared: Arc<Shared>,
) -> io::Result<Response<Body>> {
    let mut silent = shared.silent.subscribe();
    let (parts, body) = request.into_parts();
    let body = axum::body::to_bytes(Body::new(body), READ_MOST).await;
    let size = body.as_ref().map_or(READ_MOST, axum::body::Bytes::len);
    let (asked, who) = receive(&shared, &parts, size, certificate.as_deref());
    let _ = silent.wait_for(|s| !s).await;

    let (verb, resource) = asked.names(&parts);
    let user = who.as_ref().ok().and_then(Option::as_ref).map(Who::user).unwrap_or_default();
    let (latency, action) = shared.update(|i| (i.faults.latency, i.faults.take(&verb, &resource, &user)));
    if !latency.is_zero() {
        sleep(latency).await; // waits: the latency that the test ordered
    }
    let mut lose = false;
    let ordered = match action {
        None => None,
        Some(Action::Delay(time)) => {
            sleep(time).await; // waits: the delay that the test ordered
            None
        }
        Some(Action::BlackHole) => std::future::pending().await,
        Some(Action::LoseAnswer) => {
            lose = true;
            None
        }
        Some(Action::Status { code, retry_after }) => {
            let mut failure = Failure::new(code, "the server was told to fail");
            failure.retry_after = retry_after;
            Some(failure)
        }
    };
    let outcome = match (ordered, body, who) {
        (Some(failure), _, _) | (None, _, Err(failure)) => Err(failure),
        (None, Err(_), _) => Err(Failure::new(413, "request is too large")),
        (None, Ok(body), _) if body.len() > LARGEST_BODY => Err(Failure::new(413, "request is too large")),
        (None, Ok(body), Ok(who)) => serve(&shared, &asked, parts.uri.path(), who.as_ref(), &body),
    };
    let response = match outcome {
        Ok(response) => response,
        Err(failure) if failure.code == 0 => return Err(io::Error::other(failure.message)),
        Err(failure) => failed(&failure, Form::of(&asked.accept).unwrap_or_default()),
    };
    let status = response.status().as_u16();
    shared.update(|inner| {
        let index = asked.index.checked_sub(inner.forgotten);
        if let Some(request) = index.and_then(|i| inner.requests.get_mut(i)) {
            request.status = Some(status);
            request.answered = Some(std::time::Instant::now());
        }
    });
    if lose { Err(io::Error::other("the answer is lost by order")) } else { Ok(response) }
}

impl Asked {
    fn names(&self, parts: &http::request::Parts) -> (String, String) {
        match &self.target {
            Some(target) => (target.verb.clone(), target.full_resource()),
            None => (parts.method.as_str().to_lowercase(), String::new()),
        }
    }
}

/// Reads the head of a request, finds out who asks and records it.
fn receive(
    shared: &Shared,
    parts: &http::request::Parts,
    size: usize,
    certificate: Option<&[u8]>,
) -> (Asked, Result<Option<Who>, Failure>) {
    let query_text = parts.uri.query().unwrap_or_default();
    let query = Query::parse(query_text);
    let target = Target::parse(&parts.method, parts.uri.path(), &query);
    let text = |name| head(&parts.headers, name);
    let bearer = text(header::AUTHORIZATION).strip_prefix("Bearer ").map(ToOwned::to_owned);
    let mut asked = Asked {
        query,
        target,
        content_type: text(header::CONTENT_TYPE),
        accept: text(header::ACCEPT),
        bearer,
        index: 0,
    };
    let (verb, resource) = asked.names(parts);
    let target = asked.target.as_ref();
    let mut request = record::Request {
        at: std::time::Instant::now(),
        wall: jiff::Timestamp::now(),
        verb,
        path: parts.uri.path().to_owned(),
        query: query_text.to_owned(),
        resource,
        namespace: target.map(|t| t.namespace.clone()).unwrap_or_default(),
        name: target.map(|t| t.name.clone()).unwrap_or_default(),
        user: String::new(),
        user_agent: text(header::USER_AGENT),
        content_type: asked.content_type.clone(),
        body_size: size,
        dry_run: !asked.query.get("dryRun").is_empty(),
        status: None,
        answered: None,
    };
    let who = shared.update(|inner| {
        let who = inner.auth.authenticate(certificate, asked.bearer.as_deref());
        if let Ok(who) = &who {
            request.user = who.as_ref().map_or_else(|| "system:anonymous".to_owned(), Who::user);
        }
        asked.index = inner.forgotten + inner.requests.len();
        inner.requests.push(request);
        who
    });
    (asked, who)
}

fn head(headers: &HeaderMap, name: header::HeaderName) -> String {
    headers.get(name).and_then(|v| v.to_str().ok()).unwrap_or_default().to_owned()
}

fn serve(
    shared: &Arc<Shared>,
    asked: &Asked,
    path: &str,
    who: Option<&Who>,
    body: &[u8],
) -> Result<Response<Body>, Failure> {
    let Some(target) = &asked.target else {
        let found = shared.update(|inner| routes::discovery(path, &inner.rules));
        return match found {
            Some(Value::String(text)) => Ok(reply(200, "text/plain", Body::from(text))),
            Some(document) => Ok(json(200, &document, Form::default())),
            None if Target::refuses_method(path, &asked.query) => {
                Err(Failure::new(405, "the server does not allow this method on the requested resource"))
            }
            None => {
                let mut failure = Failure::new(404, "the server could not find the requested resource");
                if !routes::is_served(path) {
                    failure.reason = "";
                }
                Err(failure)
            }
        };
    };
    let query = &asked.query;
    let form = Form::of(&asked.accept).ok_or_else(|| {
        Failure::new(406, "only the following media types are accepted: application/json, application/yaml")
    })?;
    let selector = shared.update(|inner| {
        let (fields, labels) = (query.get("fieldSelector"), query.get("labelSelector"));
        let selector = Selector::parse(target.resource, &inner.rules, fields, labels)?;
        inner.auth.authorize(who, target, &selector, &inner.store, &inner.rules)?;
        Ok(selector)
    })?;
    let (group, plural) = (target.resource.group, target.resource.plural);
    match target.verb.as_str() {
        "watch" => {
            let body = watch::open(shared, target, query, selector)?;
            Ok(reply(200, "application/json", body))
        }
        "list" => {
            let page = Page::read(query)?;
            let list = shared.update(|inner| {
                let namespace = (!target.namespace.is_empty()).then_some(target.namespace.as_str());
                let objects = inner.store.list(plural, namespace).filter(|o| selector.matches(o));
                let core = group != "events.k8s.io";
                let items: Vec<Value> =
                    objects.map(|o| if core { (**o).clone() } else { events::converted(o, false) }).collect();
                page.body(target, inner.store.version(), items)
            });
            Ok(json(200, &list, form))
        }
        "get" => {
            match query.get("resourceVersion") {
                "" => {}
                text => drop(watch::version(text)?),
            }
            let found = shared.lock().found(target);
            found.map(|o| json(200, &o, form)).ok_or_else(|| Failure::not_found(plural, group, &target.name))
        }
        _ => {
            let write = Write { target, who, query, content_type: &asked.content_type, body };
            shared.update(|inner| inner.write(&write)).map(|(code, body)| json(code, &body, form))
        }
    }
}

/// A part of a list.
struct Page {
    limit: usize,
    skipped: usize,
}

impl Page {
    fn read(query: &Query) -> Result<Self, Failure> {
        watch::version_match(query)?;
        let bad = |name: &str| Failure::bad_request(format!("{name} is not understood: {:?}", query.get(name)));
        let number = |name: &str| match query.get(name) {
            "" => Ok(0),
            text => text.parse().map_err(|_| bad(name)),
        };
        if number("resourceVersion").is_err() {
            return Err(bad("resourceVersion"));
        }
        Ok(Self { limit: number("limit")?, skipped: number("continue")? })
    }

    fn body(&self, target: &Target, version: u64, items: Vec<Value>) -> Value {
        let all = items.len();
        let limit = if self.limit == 0 { all } else { self.limit };
        let items: Vec<Value> = items.into_iter().skip(self.skipped).take(limit).collect();
        let mut list = ops::list_body(target.resource, version, &items);
        let end = self.skipped + items.len();
        if end < all {
            list["metadata"]["continue"] = Value::from(end.to_string());
        }
        list
    }
}

/// The form of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Form {
    #[default]
    Json,
    Yaml,
    /// As `kubectl get` asks for it.
    Table,
    /// Metadata alone.
    Partial,
}

impl Form {
    /// The first that is wanted and known; `None` if none is.
    fn of(accept: &str) -> Option<Self> {
        if accept.is_empty() {
            return Some(Self::Json);
        }
        accept.split(',').find_map(|wanted| {
            let mut parts = wanted.split(';').map(str::trim);
            let kind = parts.next().unwrap_or_default();
            let as_what = parts.find_map(|part| part.strip_prefix("as="));
            match (kind, as_what) {
                ("application/json", Some("Table")) => Some(Self::Table),
                ("application/json", Some("PartialObjectMetadata" | "PartialObjectMetadataList")) => {
                    Some(Self::Partial)
                }
                ("application/json" | "application/*" | "*/*", None) => Some(Self::Json),
                ("application/yaml", None) => Some(Self::Yaml),
                _ => None,
            }
        })
    }

    fn shown(self, body: &Value) -> Value {
        let meta = "meta.k8s.io/v1";
        match (self, body["items"].as_array()) {
            (Self::Table, _) => serde_json::json!({"kind": "Table", "apiVersion": meta}),
            (Self::Partial, None) => {
                serde_json::json!({"kind": "PartialObjectMetadata", "apiVersion": meta, "metadata": body["metadata"]})
            }
            (Self::Partial, Some(items)) => {
                let items: Option<Vec<Value>> =
                    (!items.is_empty()).then(|| items.iter().map(|item| self.shown(item)).collect());
                let kind = "PartialObjectMetadataList";
                serde_json::json!({"kind": kind, "apiVersion": meta, "metadata": body["metadata"], "items": items})
            }
            (Self::Json | Self::Yaml, _) => body.clone(),
        }
    }
}

fn json(code: u16, body: &Value, form: Form) -> Response<Body> {
    match form {
        Form::Json => reply(code, "application/json", Body::from(body.to_string())),
        Form::Yaml => {
            let text = serde_saphyr::to_string(body).unwrap_or_default();
            reply(code, "application/yaml", Body::from(text))
        }
        Form::Table | Form::Partial => reply(code, "application/json", Body::from(form.shown(body).to_string())),
    }
}

fn failed(failure: &Failure, form: Form) -> Response<Body> {
    let form = if form == Form::Yaml { form } else { Form::Json };
    let mut response = json(failure.code, &failure.body(), form);
    if let Some(seconds) = failure.retry_after {
        response.headers_mut().insert(header::RETRY_AFTER, header::HeaderValue::from(seconds));
    }
    response
}

fn reply(code: u16, content_type: &'static str, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    *response.status_mut() = http::StatusCode::from_u16(code).unwrap_or(http::StatusCode::INTERNAL_SERVER_ERROR);
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static(content_type));
    response
}

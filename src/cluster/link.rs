//! The one way to the API server: a client that is rebuilt when its credentials change, and requests with a time limit
//! whose answers come back as bytes or as an [`ApiError`].

use std::{
    hash::{BuildHasher as _, RandomState},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use http::{Method, Request, Response, header};
use http_body_util::{BodyExt as _, Limited};
use hyper_rustls::{FixedServerNameResolver, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{Client as HttpClient, connect::HttpConnector},
    rt::{TokioExecutor, TokioTimer},
};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Status as ApiStatus;
use kube::{
    Client,
    client::{Body, ConfigExt as _},
    config::Config,
};
use tokio::{
    sync::watch,
    time::{Instant, timeout},
};
use tower::ServiceBuilder;

use super::{
    Settings, Timing,
    credentials::{Attempt, CredentialsError, Fingerprint, Source},
    error::{ApiError, chain},
    metrics::{Metrics, Request as Label},
    status::{Credentials, Status, StatusCell},
};

/// Largest answer that is read, in bytes: etcd keeps no object over 1.5 MiB, and a list has few of ours.
const ANSWER_MAX: usize = 32 << 20;

/// A request, as data.
#[derive(Debug)]
pub(crate) struct Ask<'a> {
    /// Verb as in a role: `get`, `list`, `watch`, `create` …
    pub(crate) verb: &'static str,
    /// Resource as in a role.
    pub(crate) resource: &'static str,
    /// Path with query.
    pub(crate) path: &'a str,
    /// JSON body.
    pub(crate) body: Option<Vec<u8>>,
    /// Time limit for the whole answer (of a watch: for its beginning).
    pub(crate) within: Duration,
}

/// The client in use.
#[derive(Default)]
struct Current {
    client: Option<Client>,
    fingerprint: Fingerprint,
    problem: String,
    url: String,
    authority: String,
    tried: Option<Instant>,
}

/// The way to the API server.
pub(crate) struct Link {
    source: Source,
    pub(crate) timing: Timing,
    current: Mutex<Current>,
    /// Held while credentials are loaded: one load at a time.
    loading: tokio::sync::Mutex<()>,
    /// Counts the clients that were built.
    generation: watch::Sender<u64>,
    pub(crate) status: StatusCell,
    pub(crate) metrics: Metrics,
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link").field("source", &self.source).finish_non_exhaustive()
    }
}

impl Link {
    pub(crate) fn new(settings: &Settings, metrics: Metrics) -> Self {
        // An error means that somebody in this process was first, with the same provider: there is only one.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let source =
            Source::choose(settings.kubeconfig.as_deref(), settings.in_cluster.as_ref(), &settings.fallback_kubeconfig);
        let credentials = Credentials { source: source.to_string(), ..Credentials::default() };
        Self {
            source,
            timing: settings.timing.clone(),
            current: Mutex::default(),
            loading: tokio::sync::Mutex::default(),
            generation: watch::Sender::new(0),
            status: StatusCell::new(Status { credentials, ..Status::default() }),
            metrics,
        }
    }

    /// Tells when another client is in use.
    pub(crate) fn generation(&self) -> watch::Receiver<u64> {
        self.generation.subscribe()
    }

    fn current(&self) -> std::sync::MutexGuard<'_, Current> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks after the credentials' files for ever.
    pub(crate) async fn follow_files(&self) {
        loop {
            self.load(false).await;
            tokio::time::sleep(jitter(self.timing.files)).await;
        }
    }

    /// Loads the credentials if a file changed, or if they could not be used and it is time to try again; always if
    /// `anyway`.
    async fn load(&self, anyway: bool) {
        let _one = self.loading.lock().await;
        let (known, usable, tried) = {
            let current = self.current();
            (current.fingerprint.clone(), current.client.is_some(), current.tried)
        };
        let source = self.source.clone();
        let loaded = tokio::task::spawn_blocking(move || {
            let again = known.again();
            let rest = tried.is_some_and(|at| usable || at.elapsed() < Duration::from_secs(30));
            if !anyway && rest && again == known {
                return None;
            }
            // The age of the files is taken before they are read, so that a change in between is seen by the next look.
            let mut attempt = source.load();
            let mut fingerprint = again;
            let read = Fingerprint::of(&attempt.files);
            if !fingerprint.same_files(&read) {
                fingerprint = read;
                attempt = source.load();
            }
            let built = build(&source, &attempt.config);
            Some((attempt, fingerprint, built))
        })
        .await;
        match loaded {
            Ok(None) => {}
            Ok(Some((attempt, fingerprint, built))) => self.take(attempt, fingerprint, built),
            Err(error) => tracing::error!(%error, "loading the credentials ended abnormally"),
        }
    }

    fn take(&self, attempt: Attempt, fingerprint: Fingerprint, built: Result<(Client, String), String>) {
        let ends = attempt.certificate.as_ref().map(|(ends, _)| *ends);
        let expired = attempt
            .certificate
            .filter(|(ends, _)| *ends < Timestamp::now())
            .map(|(ends, file)| format!("client certificate {} ended {ends}; it must be renewed", file.display()));
        let failed = built.as_ref().err().cloned();
        let problem = failed.clone().or(expired);
        let news = {
            let mut current = self.current();
            let news = problem.clone().unwrap_or_default() != current.problem;
            *current = Current {
                fingerprint,
                problem: problem.clone().unwrap_or_default(),
                authority: attempt.authority,
                tried: Some(Instant::now()),
                ..Current::default()
            };
            if let Ok((client, url)) = built {
                current.client = Some(client);
                current.url = url;
            }
            news
        };
        match &problem {
            Some(problem) if news => tracing::warn!(source = %self.source, "credentials cannot be used: {problem}"),
            None => tracing::info!(source = %self.source, "credentials loaded"),
            Some(_) => {}
        }
        self.metrics.credential_loads.inc();
        #[allow(clippy::cast_precision_loss, reason = "whole seconds of this century fit a double")]
        self.metrics.certificate_ends.set(ends.map_or(0.0, |ends| ends.as_second() as f64));
        let url = self.current().url.clone();
        self.status.update(|status| {
            status.credentials.problem = problem;
            status.credentials.certificate_ends = ends;
            status.credentials.loads += 1;
            if failed.is_some() {
                status.connected = false;
            } else {
                status.credentials.server = url;
            }
        });
        if failed.is_none() {
            self.generation.send_modify(|generation| *generation += 1);
        }
    }

    /// The client, its number and the server's address.
    async fn client(&self) -> Result<(Client, u64, String), ApiError> {
        let ready = |current: &Current| {
            current.client.clone().map(|client| (client, *self.generation.borrow(), current.url.clone()))
        };
        if let Some(client) = ready(&self.current()) {
            return Ok(client);
        }
        if self.current().tried.is_none_or(|at| at.elapsed() > self.timing.reload_gap) {
            self.load(false).await;
        }
        let current = self.current();
        ready(&current).ok_or_else(|| ApiError::Credentials(current.problem.clone()))
    }

    /// Loads credentials if none were loaded yet.
    pub(crate) async fn ready(&self) {
        let _ = self.client().await;
    }

    /// Asks and reads the whole answer.
    pub(crate) async fn ask(&self, ask: Ask<'_>) -> Result<Bytes, ApiError> {
        let (verb, resource, what, within) = (ask.verb, ask.resource, format!("{} {}", ask.verb, ask.path), ask.within);
        let answer = async {
            let (generation, url, response) = self.send(ask).await?;
            let status = response.status();
            let retry_after = retry_after(&response);
            let body = Limited::new(response.into_body(), ANSWER_MAX)
                .collect()
                .await
                .map_err(|error| ApiError::Network { url, why: format!("the answer to {what} broke off: {error}") })?
                .to_bytes();
            if status.is_success() {
                return Ok(body);
            }
            Err(self.refused(generation, status.as_u16(), &body, retry_after).await)
        };
        let url = self.current().url.clone();
        let result = timeout(within, answer).await.unwrap_or_else(|_| Err(ApiError::Timeout { url, after: within }));
        self.note(verb, resource, result.as_ref().err());
        result
    }

    /// Opens a stream of answers.
    pub(crate) async fn open(&self, ask: Ask<'_>) -> Result<Body, ApiError> {
        let (verb, resource, within) = (ask.verb, ask.resource, ask.within);
        let answer = async {
            let (generation, url, response) = self.send(ask).await?;
            let status = response.status();
            if status.is_success() {
                return Ok(response.into_body());
            }
            let retry_after = retry_after(&response);
            let body = Limited::new(response.into_body(), ANSWER_MAX)
                .collect()
                .await
                .map_err(|error| ApiError::Network { url, why: error.to_string() })?
                .to_bytes();
            Err(self.refused(generation, status.as_u16(), &body, retry_after).await)
        };
        let url = self.current().url.clone();
        let result = timeout(within, answer).await.unwrap_or_else(|_| Err(ApiError::Timeout { url, after: within }));
        self.note(verb, resource, result.as_ref().err());
        result
    }

    async fn send(&self, ask: Ask<'_>) -> Result<(u64, String, Response<Body>), ApiError> {
        let (client, generation, url) = self.client().await?;
        let method = match ask.verb {
            "create" => Method::POST,
            "update" => Method::PUT,
            "patch" => Method::PATCH,
            "delete" => Method::DELETE,
            _ => Method::GET,
        };
        let content = if ask.verb == "patch" { "application/merge-patch+json" } else { "application/json" };
        let mut request = Request::builder()
            .method(method)
            .uri(ask.path)
            .header(header::ACCEPT, "application/json")
            .header(header::USER_AGENT, concat!("npu-dra/", env!("CARGO_PKG_VERSION")));
        if ask.body.is_some() {
            request = request.header(header::CONTENT_TYPE, content);
        }
        let request = request
            .body(Body::from(ask.body.unwrap_or_default()))
            .map_err(|error| ApiError::Network { url: url.clone(), why: error.to_string() })?;
        match client.send(request).await {
            Ok(response) => Ok((generation, url, response)),
            Err(error) => {
                let why = chain(&error);
                let why = ["ServiceError: ", "HyperError: "]
                    .iter()
                    .fold(why.as_str(), |text, prefix| text.strip_prefix(prefix).unwrap_or(text))
                    .to_owned();
                if let Some((_, fault)) = why.split_once("invalid peer certificate: ") {
                    let authority = self.current().authority.clone();
                    let problem = format!(
                        "the certificate of the API server at {url} is not trusted by the certificate authority in {authority}: {fault}"
                    );
                    self.status.update(|status| {
                        status.connected = false;
                        status.credentials.problem = Some(problem);
                    });
                }
                Err(ApiError::Network { url, why })
            }
        }
    }

    /// Makes the error of an answer that is one. After a 401 the credentials are read again, once for each client.
    async fn refused(&self, generation: u64, code: u16, body: &[u8], retry_after: Option<Duration>) -> ApiError {
        let (reason, message, later) = match serde_json::from_slice::<ApiStatus>(body) {
            Ok(status) => {
                let later = status.details.and_then(|details| details.retry_after_seconds);
                (status.reason.unwrap_or_default(), status.message.unwrap_or_default(), later)
            }
            Err(_) => (String::new(), String::from_utf8_lossy(body).trim().chars().take(300).collect(), None),
        };
        let later = later.and_then(|seconds| u64::try_from(seconds).ok()).map(Duration::from_secs);
        let error = ApiError::Status { code, reason, message, retry_after: retry_after.or(later) };
        if code == 401 {
            let problem = {
                let current = self.current();
                if current.problem.is_empty() {
                    format!(
                        "the API server at {} does not accept the credentials of {} (401)",
                        current.url, self.source
                    )
                } else {
                    format!("the API server at {} answers 401: {}", current.url, current.problem)
                }
            };
            // A client that was just built is given time: the server may be behind, and nothing would change.
            let stale = self.current().tried.is_none_or(|at| at.elapsed() > self.timing.reload_gap);
            if *self.generation.borrow() == generation && stale {
                self.load(true).await;
            }
            self.status.update(|status| status.credentials.problem = Some(problem));
        }
        error
    }

    /// Counts an answer and keeps the status in step.
    fn note(&self, verb: &'static str, resource: &'static str, error: Option<&ApiError>) {
        let result = error.map_or("ok", ApiError::class);
        self.metrics.requests.get_or_create(&Label { verb, resource, result }).inc();
        let right = format!("{verb} {resource}");
        // A 403 for one claim is about that claim.
        let counts_as_right = (verb, resource) != ("get", "resourceclaims");
        let connected = error.is_none_or(|error| !error.is_connection());
        self.metrics.connected.set(i64::from(connected));
        let kept = Some(self.current().problem.clone()).filter(|kept| !kept.is_empty());
        if error.is_none()
            && self.status.read(|status| {
                status.connected && status.credentials.problem == kept && !status.forbidden.contains_key(&right)
            })
        {
            return;
        }
        let mut lost_right = None;
        self.status.update(|status| {
            status.connected = connected;
            // Whatever was answered, if it was not 401, came over good TLS to good credentials.
            if error.is_none_or(|error| error.code().is_some_and(|code| code != 401)) {
                status.credentials.problem = kept;
            }
            match error {
                None => {
                    status.forbidden.remove(&right);
                }
                Some(error) => {
                    *status.errors.entry(error.class()).or_default() += 1;
                    if error.code() == Some(403) && counts_as_right {
                        let text = error.to_string();
                        if status.forbidden.insert(right.clone(), text.clone()).is_none() {
                            lost_right = Some(text);
                        }
                    }
                }
            }
        });
        if let Some(text) = lost_right {
            tracing::error!(source = %self.source, "no right to {right}: {text}");
        }
    }

    /// For texts: whose credentials these are.
    pub(crate) fn source(&self) -> String {
        self.source.to_string()
    }
}

fn retry_after(response: &Response<Body>) -> Option<Duration> {
    let text = response.headers().get(header::RETRY_AFTER)?.to_str().ok()?;
    text.parse().ok().map(Duration::from_secs)
}

/// The client of a configuration, and its server's address. May run a login program that the kubeconfig names.
fn build(source: &Source, config: &Result<Config, CredentialsError>) -> Result<(Client, String), String> {
    let config = config.as_ref().map_err(|error| chain(error))?;
    let url = config.cluster_url.to_string().trim_end_matches('/').to_owned();
    client(config).map(|client| (client, url)).map_err(|why| format!("{source}: {why}"))
}

/// A client without retries and without a time limit of its own. A connection whose other end has vanished is given up
/// after half a minute, or a watch would wait for ever for what it missed.
fn client(config: &Config) -> Result<Client, String> {
    const QUIET: Duration = Duration::from_secs(10);
    const LOST: Duration = Duration::from_secs(30);
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    tcp.set_connect_timeout(Some(Duration::from_secs(5)));
    tcp.set_keepalive(Some(QUIET));
    tcp.set_keepalive_interval(Some(QUIET));
    tcp.set_keepalive_retries(Some(2));
    tcp.set_tcp_user_timeout(Some(LOST));
    let tls = config.rustls_client_config().map_err(|error| chain(&error))?;
    let mut connector = HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http();
    if let Some(name) = &config.tls_server_name {
        let name = name.clone().try_into().map_err(|_| format!("tls-server-name {name:?} is no name of a server"))?;
        connector = connector.with_server_name_resolver(FixedServerNameResolver::new(name));
    }
    // Many claims at once share one connection with the watch; a server that only speaks HTTP/1.1 is served too.
    let connector = connector.enable_all_versions().wrap_connector(tcp);
    let http = HttpClient::builder(TokioExecutor::new())
        .timer(TokioTimer::new())
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(LOST)
        .pool_max_idle_per_host(8)
        .http2_keep_alive_interval(LOST)
        .http2_keep_alive_timeout(QUIET)
        .http2_keep_alive_while_idle(true)
        .build(connector);
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer().map_err(|error| chain(&error))?)
        .layer(config.extra_headers_layer().map_err(|error| chain(&error))?)
        .map_err(tower::BoxError::from)
        .service(http);
    Ok(Client::new(service, config.default_namespace.clone()))
}

/// Between three quarters and five quarters of a time, so that the nodes of a cluster do not march in step.
pub(crate) fn jitter(time: Duration) -> Duration {
    let random = RandomState::new().hash_one(0_u8) % 1024;
    time.mul_f64(0.75 + f64::from(u32::try_from(random).unwrap_or(0)) / 2048.0)
}

/// Growing pauses between attempts.
#[derive(Debug)]
pub(crate) struct Backoff {
    min: Duration,
    max: Duration,
    next: Duration,
}

impl Backoff {
    pub(crate) fn new(min: Duration, max: Duration) -> Self {
        Self { min, max, next: min }
    }

    pub(crate) fn reset(&mut self) {
        self.next = self.min;
    }

    /// The pause before the next attempt: at least what the server asks for.
    pub(crate) fn pause(&mut self, asked: Option<Duration>) -> Duration {
        let own = jitter(self.next);
        self.next = (self.next * 2).min(self.max);
        let asked = asked.unwrap_or_default().min(Duration::from_mins(2));
        own.max(asked + jitter(asked / 4))
    }
}

/// Keeps `Arc<Link>` short at the places that share it.
pub(crate) type SharedLink = Arc<Link>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_their_limit_and_heed_the_server() {
        let (min, max) = (Duration::from_millis(100), Duration::from_secs(1));
        let mut backoff = Backoff::new(min, max);
        assert!(backoff.pause(None) <= min.mul_f64(1.25));
        for _ in 0..20 {
            assert!(backoff.pause(None) <= max.mul_f64(1.25));
        }
        assert!(backoff.pause(None) >= max.mul_f64(0.75));
        assert!(backoff.pause(Some(Duration::from_secs(7))) >= Duration::from_secs(7));
        assert!(backoff.pause(Some(Duration::from_secs(100_000))) <= Duration::from_secs(160));
        backoff.reset();
        assert!(backoff.pause(None) <= min.mul_f64(1.25));
    }
}

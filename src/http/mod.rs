//! The one TCP listener of `--healthcheck-port`: gRPC health check, `/healthz`, `/readyz`, `/metrics`.
//!
//! | path | answers |
//! |---|---|
//! | `grpc.health.v1.Health` | whether kubelet's sockets answer |
//! | `/healthz` | 200 as long as the process runs |
//! | `/readyz` | 200 if kubelet's sockets answer, 503 and why if not |
//! | `/metrics` | the metrics of all modules, encoded |
//!
//! The port is open to the pod network, because kubelet's probes come from there. So everything here is read-only and
//! bounded: connections, their number, and the time that a request may take to arrive.

mod grpc;
mod probe;

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use npu_proto::grpc_health::health_server::HealthServer;
use prometheus_client::registry::Registry;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use probe::Probe;

pub use probe::NotReady;

/// Connections at a time; more wait in the kernel's queue.
const CONNECTIONS: usize = 64;
/// How long a request's head may take to arrive.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);
/// How long running answers may take to end at stop.
const GRACE: Duration = Duration::from_millis(500);

/// What is served, and where.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Where to listen; port 0 takes any free one.
    pub address: SocketAddr,
    /// The DRA socket that `/readyz` calls.
    pub endpoint: PathBuf,
    /// The registration socket that `/readyz` calls.
    pub registration: PathBuf,
    /// How long the readiness check may take; kubelet's probes give up after a second unless told otherwise.
    pub timeout: Duration,
}

/// The port could not be opened.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address}: choose another --healthcheck-port, or -1 for none")]
pub struct ListenError {
    /// The address.
    pub address: SocketAddr,
    /// Why.
    #[source]
    pub source: io::Error,
}

/// The listener, open but not served yet.
#[derive(Debug)]
pub struct Bound {
    settings: Settings,
    listener: TcpListener,
    address: SocketAddr,
}

/// Opens the port.
///
/// # Errors
/// The address is in use or not ours to use.
pub async fn bind(settings: Settings) -> Result<Bound, ListenError> {
    let failed = |source| ListenError { address: settings.address, source };
    let listener = TcpListener::bind(settings.address).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    Ok(Bound { settings, listener, address })
}

impl Bound {
    /// The address with the port that was taken.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `shutdown`, then ends the running answers. `registry` holds the metrics of all modules.
    pub async fn serve(self, registry: Arc<Registry>, shutdown: CancellationToken) {
        let Self { settings, listener, address } = self;
        let probe = Probe::new(&settings.endpoint, &settings.registration, settings.timeout);
        let app = routes(probe, registry, shutdown.clone());
        tracing::info!(%address, "serving health checks and metrics");

        let mut server = auto::Builder::new(TokioExecutor::new());
        server.http1().timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT);
        server
            .http2()
            .timer(TokioTimer::new())
            .keep_alive_interval(Some(Duration::from_secs(30)))
            .max_concurrent_streams(16);
        let places = Arc::new(Semaphore::new(CONNECTIONS));
        let graceful = GracefulShutdown::new();
        loop {
            let next = async {
                let place = Arc::clone(&places).acquire_owned().await;
                (place, accept(&listener).await)
            };
            let Some((place, stream)) = shutdown.run_until_cancelled(next).await else { break };
            let (server, app, watcher) = (server.clone(), app.clone(), graceful.watcher());
            tokio::spawn(async move {
                // A connection that never says a word must not keep its place.
                if !matches!(tokio::time::timeout(HEAD_TIMEOUT, stream.peek(&mut [0])).await, Ok(Ok(1))) {
                    return;
                }
                let connection = server.serve_connection(TokioIo::new(stream), TowerToHyperService::new(app));
                if let Err(error) = watcher.watch(connection).await {
                    tracing::debug!(error = %error, "a connection to the health port ended early");
                }
                drop(place);
            });
        }
        drop(listener);
        if tokio::time::timeout(GRACE, graceful.shutdown()).await.is_err() {
            tracing::debug!("connections to the health port were still open at stop");
        }
    }
}

/// The next connection; errors such as no descriptors left are waited out.
async fn accept(listener: &TcpListener) -> TcpStream {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => return stream,
            Err(error) => {
                tracing::warn!(error = %error, "could not accept a connection to the health port");
                tokio::time::sleep(Duration::from_millis(100)).await; // waits: for descriptors to be free again
            }
        }
    }
}

fn routes(probe: Probe, registry: Arc<Registry>, stop: CancellationToken) -> Router {
    let health = HealthServer::new(grpc::Service { probe: probe.clone(), stop });
    let ready = Router::new().route("/readyz", get(readyz)).with_state(probe);
    let metrics = Router::new().route("/metrics", get(metrics)).with_state(registry);
    Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .merge(ready)
        .merge(metrics)
        .route_service("/grpc.health.v1.Health/{method}", health)
}

async fn readyz(State(probe): State<Probe>) -> Response {
    match probe.check().await {
        Ok(()) => "ok\n".into_response(),
        Err(error) => (StatusCode::SERVICE_UNAVAILABLE, format!("not ready: {error}\n")).into_response(),
    }
}

async fn metrics(State(registry): State<Arc<Registry>>) -> Response {
    let mut text = String::new();
    match prometheus_client::encoding::text::encode(&mut text, &registry) {
        Ok(()) => {
            let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            ([(header::CONTENT_TYPE, kind)], text).into_response()
        }
        Err(error) => {
            tracing::error!(error = %error, "could not encode the metrics");
            (StatusCode::INTERNAL_SERVER_ERROR, "the metrics could not be encoded\n").into_response()
        }
    }
}

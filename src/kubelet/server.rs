//! The two gRPC servers: how they start, stay and stop.
//!
//! Sockets can be removed behind a daemon that runs for months: by hand, or with kubelet's whole directory when a node
//! is reset and joined again. So a look every now and then finds that out, and both are made anew.

use std::future::Future;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, stream};
use npu_proto::dra_v1::dra_plugin_server::DraPluginServer as DraV1Server;
use npu_proto::dra_v1beta1::dra_plugin_server::DraPluginServer as DraV1Beta1Server;
use npu_proto::health_v1::dra_resource_health_server::DraResourceHealthServer as HealthV1Server;
use npu_proto::health_v1alpha1::dra_resource_health_server::DraResourceHealthServer as HealthV1Alpha1Server;
use npu_proto::registration::PluginInfo;
use npu_proto::registration::registration_server::RegistrationServer;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::task::{JoinError, JoinHandle};
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Error, Server};

use super::dra::Dra;
use super::health::Health;
use super::metrics::Metrics;
use super::registration::{Registrar, Registration};
use super::sockets::{Listening, Socket, SocketError, Sockets};
use super::{Claims, SUPPORTED_VERSIONS, ServeError, Settings};

/// What is served, on whatever sockets.
#[derive(Debug)]
pub(super) struct Services<C> {
    claims: Arc<C>,
    sockets: Sockets,
    heartbeat: Duration,
    registrar: Arc<Registrar>,
    metrics: Metrics,
}

impl<C: Claims> Services<C> {
    pub(super) fn new(
        claims: Arc<C>,
        sockets: Sockets,
        settings: &Settings,
        state: watch::Sender<Registration>,
        metrics: Metrics,
    ) -> Self {
        let info = PluginInfo {
            r#type: "DRAPlugin".into(),
            name: settings.driver.to_string(),
            endpoint: sockets.endpoint().display().to_string(),
            supported_versions: SUPPORTED_VERSIONS.map(str::to_owned).to_vec(),
        };
        let registrar = Arc::new(Registrar { info, state, metrics: metrics.clone() });
        Self { claims, sockets, heartbeat: settings.heartbeat, registrar, metrics }
    }

    /// Starts both servers, then lets kubelet see the registration socket.
    pub(super) fn start(&self, listening: Listening) -> Result<Servers, SocketError> {
        let Listening { endpoint: (dra_listener, endpoint), registration: (listener, mut registration) } = listening;
        let stop = CancellationToken::new();
        let dra = Dra { claims: Arc::clone(&self.claims), metrics: self.metrics.clone() };
        let health = Health {
            list: self.claims.health(),
            heartbeat: self.heartbeat,
            stop: stop.clone(),
            streams: self.metrics.streams.clone(),
        };
        let router = Server::builder()
            .add_service(DraV1Server::new(dra.clone()))
            .add_service(DraV1Beta1Server::new(dra))
            .add_service(HealthV1Server::new(health.clone()))
            .add_service(HealthV1Alpha1Server::new(health));
        let incoming = connections(dra_listener, self.sockets.endpoint())?;
        let dra = Task::spawn(router.serve_with_incoming_shutdown(incoming, stop.clone().cancelled_owned()));

        let registrar = RegistrationServer::from_arc(Arc::clone(&self.registrar));
        let router = Server::builder().add_service(registrar);
        let incoming = connections(listener, self.sockets.registration())?;
        let registrar = Task::spawn(router.serve_with_incoming_shutdown(incoming, stop.clone().cancelled_owned()));
        registration.show()?;
        tracing::info!(
            registration = %self.sockets.registration().display(),
            endpoint = %self.sockets.endpoint().display(),
            "serving kubelet"
        );
        Ok(Servers { dra, registrar, endpoint: Some(endpoint), registration: Some(registration), stop })
    }

    /// Serves until `shutdown`, and makes the sockets anew when they are gone.
    pub(super) async fn keep_up(
        self,
        servers: Servers,
        look: Duration,
        grace: Duration,
        shutdown: CancellationToken,
    ) -> Result<(), ServeError> {
        let mut servers = Some(servers);
        let mut trouble = String::new();
        let mut look = tokio::time::interval(look);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let ended = async {
                match &mut servers {
                    Some(servers) => servers.ended(&self.sockets).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = shutdown.cancelled() => break,
                error = ended => return Err(error),
                _ = look.tick() => {}
            }
            if servers.as_ref().is_some_and(Servers::are_in_place) {
                continue;
            }
            if let Some(lost) = servers.take() {
                tracing::error!(
                    registration = %self.sockets.registration().display(),
                    endpoint = %self.sockets.endpoint().display(),
                    "somebody removed a socket of ours; making both anew"
                );
                self.registrar.forget();
                lost.retire(grace);
            }
            match self.sockets.listen().and_then(|listening| self.start(listening)) {
                Ok(anew) => servers = Some(anew),
                Err(error) => {
                    let text = error.to_string();
                    if text != trouble {
                        tracing::warn!(error = %text, "cannot serve kubelet for now; trying again");
                        trouble = text;
                    }
                }
            }
        }
        if let Some(servers) = servers {
            servers.stop(grace).await;
        }
        Ok(())
    }
}

/// Both servers on one pair of sockets.
#[derive(Debug)]
pub(super) struct Servers {
    dra: Task,
    registrar: Task,
    endpoint: Option<Socket>,
    registration: Option<Socket>,
    stop: CancellationToken,
}

impl Servers {
    /// Waits for a server to end although nobody stops it.
    async fn ended(&mut self, sockets: &Sockets) -> ServeError {
        let ended = |path: &Path, result: Result<Result<(), Error>, JoinError>| ServeError::Ended {
            path: path.into(),
            source: result.ok().and_then(Result::err),
        };
        tokio::select! {
            result = &mut self.dra.0 => ended(sockets.endpoint(), result),
            result = &mut self.registrar.0 => ended(sockets.registration(), result),
        }
    }

    fn are_in_place(&self) -> bool {
        [&self.endpoint, &self.registration].into_iter().flatten().all(Socket::is_in_place)
    }

    /// Stops in the order that loses no call: kubelet lets go, running calls end, the DRA socket goes.
    async fn stop(mut self, grace: Duration) {
        drop(self.registration.take());
        self.drain(grace).await;
        drop(self.endpoint.take());
    }

    /// Makes way for other servers at once; running calls end beside them.
    fn retire(mut self, grace: Duration) {
        drop(self.registration.take());
        drop(self.endpoint.take());
        tokio::spawn(async move { self.drain(grace).await });
    }

    /// Ends the health streams and takes no new calls, then waits for the running ones.
    async fn drain(&mut self, grace: Duration) {
        self.stop.cancel();
        let both = async { tokio::join!(&mut self.dra.0, &mut self.registrar.0) };
        if tokio::time::timeout(grace, both).await.is_err() {
            tracing::warn!(?grace, "calls of kubelet were still running at stop; their work goes on or is on record");
        }
    }
}

/// A server's task, which does not outlive its owner.
#[derive(Debug)]
struct Task(JoinHandle<Result<(), Error>>);

impl Task {
    fn spawn(server: impl Future<Output = Result<(), Error>> + Send + 'static) -> Self {
        Self(tokio::spawn(server))
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Connections without end. An error of accept, such as no descriptors left, is waited out: a server that stopped or
/// span then would be lost to kubelet for good.
fn connections(
    listener: std::os::unix::net::UnixListener,
    path: &Path,
) -> Result<impl Stream<Item = std::io::Result<UnixStream>> + use<>, SocketError> {
    let failed = |source| SocketError::Listen { path: path.into(), source };
    let listener = UnixListener::from_std(listener).map_err(failed)?;
    Ok(stream::unfold(listener, |listener| async move {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => return Some((Ok(stream), listener)),
                Err(error) => {
                    tracing::warn!(error = %error, "could not accept a connection of kubelet");
                    tokio::time::sleep(Duration::from_millis(100)).await; // waits: for descriptors to be free again
                }
            }
        }
    }))
}

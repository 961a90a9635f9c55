//! Kubelet's side: registration, prepare and unprepare (v1 and v1beta1), health streams (v1 and v1alpha1).
//!
//! ```text
//!   bind ──> DRA socket listens ──> serve ──> registration socket appears ──> GetInfo ──> Notify
//!   stop ──> registration socket goes ──> health streams end ──> running calls end, bounded ──> DRA socket goes
//! ```
//!
//! Invariants:
//! * Kubelet never sees a registration socket without a DRA server behind it.
//! * A call is answered with exactly one entry for each claim UID; what goes wrong with one claim is that claim's error.
//! * Nothing here decides about devices: every claim goes to [`Claims`].

mod dra;
mod health;
mod metrics;
mod registration;
mod sockets;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use futures::{Stream, stream};
use jiff::Timestamp;
use npu_proto::dra_v1::dra_plugin_server::DraPluginServer as DraV1Server;
use npu_proto::dra_v1beta1::dra_plugin_server::DraPluginServer as DraV1Beta1Server;
use npu_proto::health_v1::dra_resource_health_server::DraResourceHealthServer as HealthV1Server;
use npu_proto::health_v1alpha1::dra_resource_health_server::DraResourceHealthServer as HealthV1Alpha1Server;
use npu_proto::registration::PluginInfo;
use npu_proto::registration::registration_server::RegistrationServer;
use prometheus_client::registry::Registry;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;

use crate::domain::claim::{ClaimRef, PreparedDevice};
use crate::domain::health::DeviceHealth;
use crate::domain::names::{DriverName, InstanceId};
use crate::domain::refusal::Refusal;
use crate::engine::{self, Engine};
use metrics::Metrics;
use sockets::Socket;

pub use registration::{Registration, SUPPORTED_VERSIONS, Verdict};
pub use sockets::{LONGEST_PATH, SocketError, Sockets};

/// What kubelet's calls need of the engine.
pub trait Claims: Send + Sync + 'static {
    /// The mark of a call, made when it came in.
    type Received: Clone + Send + Sync + 'static;

    /// Marks a call that comes in now.
    fn received(&self) -> Self::Received;

    /// Makes a claim's devices ready.
    fn prepare(&self, received: Self::Received, claim: ClaimRef) -> BoxFuture<'static, Prepared>;

    /// Releases a claim.
    fn unprepare(&self, received: Self::Received, claim: ClaimRef) -> BoxFuture<'static, Result<(), Refusal>>;

    /// The health of the devices in use: always the complete list.
    fn health(&self) -> watch::Receiver<Arc<Vec<DeviceHealth>>>;
}

/// The devices of a prepared claim, or why it was not prepared.
pub type Prepared = Result<Vec<PreparedDevice>, Refusal>;

impl Claims for Engine {
    type Received = engine::Received;

    fn received(&self) -> Self::Received {
        Self::received(self)
    }

    fn prepare(&self, received: Self::Received, claim: ClaimRef) -> BoxFuture<'static, Prepared> {
        Self::prepare(self, received, claim)
    }

    fn unprepare(&self, received: Self::Received, claim: ClaimRef) -> BoxFuture<'static, Result<(), Refusal>> {
        Self::unprepare(self, received, claim)
    }

    fn health(&self) -> watch::Receiver<Arc<Vec<DeviceHealth>>> {
        Self::health(self)
    }
}

/// How the driver presents itself to kubelet.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The driver's name.
    pub driver: DriverName,
    /// Tells two instances apart that overlap in a rolling update.
    pub instance: Option<InstanceId>,
    /// The directory that kubelet watches for registration sockets.
    pub registrar_dir: PathBuf,
    /// The directory that holds a directory for each plugin.
    pub plugins_dir: PathBuf,
    /// The longest silence of a health stream.
    pub heartbeat: Duration,
    /// How long running calls may take to end at stop.
    pub grace: Duration,
}

impl Settings {
    /// The defaults: a list every 10 s, and one second for calls that run at stop.
    #[must_use]
    pub fn new(driver: DriverName, registrar_dir: PathBuf, plugins_dir: PathBuf) -> Self {
        Self {
            driver,
            instance: None,
            registrar_dir,
            plugins_dir,
            heartbeat: Duration::from_secs(10),
            grace: Duration::from_secs(1),
        }
    }
}

/// The servers could not go on. The daemon ends then; systemd starts it again.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A server ended although nobody stopped it.
    #[error("the gRPC server on {} ended by itself", path.display())]
    Ended {
        /// Its socket.
        path: PathBuf,
        /// Why, if it said so.
        #[source]
        source: Option<tonic::transport::Error>,
    },
}

/// Both sockets, made and listening, but without a server; kubelet does not see the registration socket yet.
#[derive(Debug)]
pub struct Bound {
    settings: Settings,
    sockets: Sockets,
    endpoint: (UnixListener, Socket),
    registration: (UnixListener, Socket),
    metrics: Metrics,
}

/// Makes both sockets. What killed instances left is removed; what is not ours is an error and stays.
///
/// Must be called in a tokio runtime, and by the owner of the state directory only.
///
/// # Errors
/// A path is unfit, the registration directory is missing, or something is in the way.
pub fn bind(settings: Settings, registry: &mut Registry) -> Result<Bound, SocketError> {
    let sockets =
        Sockets::new(&settings.driver, settings.instance.as_ref(), &settings.registrar_dir, &settings.plugins_dir)?;
    for path in sockets.clear()? {
        tracing::info!(path = %path.display(), "removed a socket that a killed instance left");
    }
    let listener = |path: &Path, made: (std::os::unix::net::UnixListener, Socket)| {
        let failed = |source| SocketError::Listen { path: path.into(), source };
        UnixListener::from_std(made.0).map(|listener| (listener, made.1)).map_err(failed)
    };
    let endpoint = listener(sockets.endpoint(), sockets.listen_endpoint()?)?;
    let registration = listener(sockets.registration(), sockets.listen_registration()?)?;
    Ok(Bound { settings, sockets, endpoint, registration, metrics: Metrics::new(registry) })
}

impl Bound {
    /// The names of the sockets.
    #[must_use]
    pub fn sockets(&self) -> &Sockets {
        &self.sockets
    }

    /// Serves until `shutdown`: first the DRA socket, then the registration socket appears.
    ///
    /// # Errors
    /// Somebody else put something at the registration socket's name since `bind`.
    pub fn serve<C: Claims>(self, claims: Arc<C>, shutdown: CancellationToken) -> Result<Serving, SocketError> {
        let Self { settings, sockets, endpoint, registration, metrics } = self;
        let stop = Stop::default();
        let health = health::Health {
            list: claims.health(),
            heartbeat: settings.heartbeat,
            stop: stop.streams.clone(),
            streams: metrics.streams.clone(),
        };
        let dra = dra::Dra { claims, metrics: metrics.clone() };
        let router = Server::builder()
            .add_service(DraV1Server::new(dra.clone()))
            .add_service(DraV1Beta1Server::new(dra))
            .add_service(HealthV1Server::new(health.clone()))
            .add_service(HealthV1Alpha1Server::new(health));
        let (listener, endpoint) = endpoint;
        let signal = stop.endpoint.clone().cancelled_owned();
        let dra = Abort(tokio::spawn(router.serve_with_incoming_shutdown(connections(listener), signal)));

        let state = watch::Sender::new(Registration::default());
        let status = Status { sockets: sockets.clone(), registration: state.subscribe(), metrics: metrics.clone() };
        let registrar = registration::Registrar {
            info: PluginInfo {
                r#type: "DRAPlugin".into(),
                name: settings.driver.to_string(),
                endpoint: sockets.endpoint().display().to_string(),
                supported_versions: SUPPORTED_VERSIONS.map(str::to_owned).to_vec(),
            },
            state,
            metrics,
        };
        let router = Server::builder().add_service(RegistrationServer::new(registrar));
        let (listener, mut registration) = registration;
        let signal = stop.registration.clone().cancelled_owned();
        let registrar = Abort(tokio::spawn(router.serve_with_incoming_shutdown(connections(listener), signal)));
        registration.show()?;
        tracing::info!(
            registration = %sockets.registration().display(),
            endpoint = %sockets.endpoint().display(),
            "serving kubelet"
        );

        let running = Running { sockets, dra, registrar, endpoint, registration, stop, grace: settings.grace };
        Ok(Serving { status, task: tokio::spawn(running.until(shutdown)) })
    }
}

/// The servers at work. Dropping it leaves them running; they stop at the shutdown given to [`Bound::serve`].
#[derive(Debug)]
pub struct Serving {
    status: Status,
    task: JoinHandle<Result<(), ServeError>>,
}

impl Serving {
    /// What is known of kubelet.
    #[must_use]
    pub fn status(&self) -> Status {
        self.status.clone()
    }

    /// Waits until both servers have ended and their sockets are gone.
    ///
    /// # Errors
    /// A server ended before the shutdown.
    pub async fn stopped(self) -> Result<(), ServeError> {
        match self.task.await {
            Ok(result) => result,
            Err(error) => {
                tracing::error!(error = %error, "the task that holds kubelet's sockets ended");
                Err(ServeError::Ended { path: self.status.sockets.endpoint().into(), source: None })
            }
        }
    }
}

/// What is known of kubelet; cheap to clone, always of the moment.
#[derive(Debug, Clone)]
pub struct Status {
    sockets: Sockets,
    registration: watch::Receiver<Registration>,
    metrics: Metrics,
}

impl Status {
    /// The names of the sockets.
    #[must_use]
    pub fn sockets(&self) -> &Sockets {
        &self.sockets
    }

    /// What kubelet says of us, at every change.
    #[must_use]
    pub fn registration(&self) -> watch::Receiver<Registration> {
        self.registration.clone()
    }

    /// When kubelet last called; health probes do not count.
    #[must_use]
    pub fn last_call(&self) -> Option<Timestamp> {
        self.metrics.last_call()
    }
}

#[derive(Debug, Default)]
struct Stop {
    registration: CancellationToken,
    streams: CancellationToken,
    endpoint: CancellationToken,
}

/// A server's task.
type Task = Abort<Result<(), tonic::transport::Error>>;

#[derive(Debug)]
struct Running {
    sockets: Sockets,
    dra: Task,
    registrar: Task,
    endpoint: Socket,
    registration: Socket,
    stop: Stop,
    grace: Duration,
}

impl Running {
    async fn until(mut self, shutdown: CancellationToken) -> Result<(), ServeError> {
        let ended = |path: &Path, result: Result<Result<(), tonic::transport::Error>, _>| {
            let source = result.ok().and_then(Result::err);
            Err(ServeError::Ended { path: path.into(), source })
        };
        let result = tokio::select! {
            () = shutdown.cancelled() => Ok(()),
            result = &mut self.dra.0 => ended(self.sockets.endpoint(), result),
            result = &mut self.registrar.0 => ended(self.sockets.registration(), result),
        };
        // Kubelet lets go of the driver as soon as this socket is gone, and sends no new calls.
        drop(self.registration);
        self.stop.registration.cancel();
        self.stop.streams.cancel();
        self.stop.endpoint.cancel();
        if result.is_ok() {
            let both = async { tokio::join!(&mut self.dra.0, &mut self.registrar.0) };
            if tokio::time::timeout(self.grace, both).await.is_err() {
                tracing::warn!(grace = ?self.grace, "calls of kubelet were still running at stop; their records hold them");
            }
        }
        drop(self.endpoint);
        result
    }
}

/// A task that does not outlive its owner.
#[derive(Debug)]
struct Abort<T>(JoinHandle<T>);

impl<T> Drop for Abort<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Connections without end. An error of accept, such as no descriptors left, is waited out: a server that stopped or
/// span then would be lost to kubelet for good.
fn connections(listener: UnixListener) -> impl Stream<Item = std::io::Result<UnixStream>> {
    stream::unfold(listener, |listener| async move {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => return Some((Ok(stream), listener)),
                Err(error) => {
                    tracing::warn!(error = %error, "could not accept a connection of kubelet");
                    tokio::time::sleep(Duration::from_millis(100)).await; // waits: for descriptors to be free again
                }
            }
        }
    })
}

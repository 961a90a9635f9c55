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
mod server;
mod sockets;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use jiff::Timestamp;
use prometheus_client::registry::Registry;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::domain::claim::{ClaimRef, PreparedDevice};
use crate::domain::health::DeviceHealth;
use crate::domain::names::{DriverName, InstanceId};
use crate::domain::refusal::Refusal;
use crate::engine::{self, Engine};
use metrics::Metrics;
use server::Services;
use sockets::Listening;

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
    /// How often we look whether the sockets are still there.
    pub look: Duration,
}

impl Settings {
    /// The defaults: a list every 10 s, one second for calls that run at stop, a look every 2 s.
    #[must_use]
    pub fn new(driver: DriverName, registrar_dir: PathBuf, plugins_dir: PathBuf) -> Self {
        Self {
            driver,
            instance: None,
            registrar_dir,
            plugins_dir,
            heartbeat: Duration::from_secs(10),
            grace: Duration::from_secs(1),
            look: Duration::from_secs(2),
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
    listening: Listening,
    metrics: Metrics,
}

/// Makes both sockets. What killed instances left is removed; what is not ours is an error and stays.
///
/// Only the owner of the state directory may call this.
///
/// # Errors
/// A path is unfit, the registration directory is missing, or something is in the way.
pub fn bind(settings: Settings, registry: &mut Registry) -> Result<Bound, SocketError> {
    let sockets =
        Sockets::new(&settings.driver, settings.instance.as_ref(), &settings.registrar_dir, &settings.plugins_dir)?;
    let listening = sockets.listen()?;
    Ok(Bound { settings, sockets, listening, metrics: Metrics::new(registry) })
}

impl Bound {
    /// The names of the sockets.
    #[must_use]
    pub fn sockets(&self) -> &Sockets {
        &self.sockets
    }

    /// Serves until `shutdown`: first the DRA socket, then the registration socket appears. Needs a tokio runtime.
    ///
    /// # Errors
    /// Somebody else put something at the registration socket's name since `bind`.
    pub fn serve<C: Claims>(self, claims: Arc<C>, shutdown: CancellationToken) -> Result<Serving, SocketError> {
        let Self { settings, sockets, listening, metrics } = self;
        let state = watch::Sender::new(Registration::default());
        let status = Status { sockets: sockets.clone(), registration: state.subscribe(), metrics: metrics.clone() };
        let services = Services::new(claims, sockets, &settings, state, metrics);
        let servers = services.start(listening)?;
        let task = tokio::spawn(services.keep_up(servers, settings.look, settings.grace, shutdown));
        Ok(Serving { status, task })
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

/// What is known of kubelet. A clone costs little and goes on telling the present state.
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

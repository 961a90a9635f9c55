//! The service behind `npuctl`, on a unix socket of its own: what the node has, who holds it, how everything is.
//!
//! ```text
//! socket → peer credentials → decision → snapshot → message
//! ```
//!
//! * `socket` binds the socket, or adopts systemd's.
//! * `peer` decides who may do what: reads are for root and one group, changes for root alone.
//! * `view` turns domain data into messages.
//! * `service` is the service itself. Only making and destroying a vNPU and suspending wait for the vendor library; all else answers
//!   at once.

mod metrics;
mod peer;
mod service;
mod socket;
#[cfg(test)]
mod tests;
pub mod view;

use std::{fmt, sync::Arc};

use futures::future::BoxFuture;
use jiff::Timestamp;
use npu_proto::admin::admin_server::AdminServer;
use prometheus_client::registry::Registry;
use tokio::sync::watch;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;

use self::{metrics::Metrics, service::Service};
pub use self::{
    peer::{Access, Caller, Denied, Permissions, Readers},
    socket::{Socket, SocketError},
};
use crate::{
    domain::{
        claim::{ClaimRef, ClaimUid},
        node::HoldKind,
        refusal::Refusal,
        vnpu::VnpuReading,
    },
    engine::Snapshot,
};

/// Key of the metadata by which a denied reader is told whose members may look; absent if this node has no such group.
pub const READERS_GROUP: &str = "readers-group";

/// What the service needs of the rest of the daemon. Nothing here may block.
pub trait Sources: Send + Sync + 'static {
    /// Cards and claims at this moment.
    fn snapshot(&self) -> Snapshot;
    /// Changes whenever a snapshot would look different.
    fn changes(&self) -> watch::Receiver<u64>;
    /// Lets go of a claim whatever is known of it.
    fn release(&self, uid: ClaimUid) -> BoxFuture<'static, Result<(), Refusal>>;
    /// Makes a vNPU of a template on a device for an operator; gives it as read back.
    fn create_vnpu(&self, device: String, template: String) -> BoxFuture<'static, Result<VnpuReading, Refusal>>;
    /// Destroys a vNPU that no claim has, with `force` also while processes run on its card.
    fn destroy_vnpu(&self, id: u32, force: bool) -> BoxFuture<'static, Result<(), Refusal>>;
    /// Keeps claims from a device, or no longer (`None`); gives the claims that live on it.
    fn hold(
        &self,
        device: String,
        wanted: Option<(HoldKind, String)>,
    ) -> BoxFuture<'static, Result<Vec<ClaimRef>, Refusal>>;
    /// Lets go of the vendor's software for its upgrade, for this reason, which may be empty.
    fn suspend(&self, reason: String) -> BoxFuture<'static, Result<(), Refusal>>;
    /// Takes it up again.
    fn resume(&self) -> BoxFuture<'static, Result<(), Refusal>>;
    /// What kubelet said of us.
    fn kubelet(&self) -> Kubelet;
    /// How the API server and our slices are.
    fn cluster(&self) -> Cluster;
    /// The present time.
    fn now(&self) -> Timestamp {
        Timestamp::now()
    }
}

/// What kubelet said of us.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Kubelet {
    /// When it last took us in or refused us; `None` before the first word.
    pub since: Option<Timestamp>,
    /// Why it refuses us, in its words.
    pub refused: Option<String>,
    /// How many times it took us in.
    pub registrations: u64,
    /// Services offered to it, `v1.DRAPlugin`.
    pub versions: Vec<String>,
    /// When it last called to prepare or unprepare.
    pub last_call: Option<Timestamp>,
}

/// How the API server and our slices are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cluster {
    /// `ok`, `starting`, `failed`, `off`.
    pub state: &'static str,
    /// Name of the node.
    pub node: String,
    /// Our pool.
    pub pool: String,
    /// Its generation; `None` if nothing was published.
    pub generation: Option<u64>,
    /// When we last wrote to the API server.
    pub written_at: Option<Timestamp>,
    /// Where the API server is; empty if unknown.
    pub server: String,
    /// Its version; empty if unknown.
    pub server_version: String,
    /// Where the credentials come from; empty if there are none.
    pub credentials: String,
    /// The last error that was not made good since; empty if none.
    pub error: String,
    /// The slices of the pool, by position.
    pub slices: Vec<Slice>,
}

/// One slice of our pool.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Slice {
    /// Name of the object; empty until the API server has named it.
    pub name: String,
    /// Position in the pool, from 0.
    pub index: u32,
    /// Number of its devices.
    pub devices: u32,
    /// Generation of the pool that it was written with.
    pub generation: Option<u64>,
    /// `published`, `pending`, `failed`.
    pub state: &'static str,
    /// When it was last written.
    pub written_at: Option<Timestamp>,
    /// Why it could not be written; empty if it could.
    pub error: String,
}

/// Which daemon this is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// Version.
    pub version: &'static str,
    /// Process.
    pub pid: u32,
    /// When it started.
    pub started_at: Timestamp,
}

impl Identity {
    /// This very process.
    pub fn of_this_process(started_at: Timestamp) -> Self {
        Self { version: env!("CARGO_PKG_VERSION"), pid: std::process::id(), started_at }
    }
}

/// The admin service could not go on serving.
#[derive(Debug, thiserror::Error)]
#[error("the admin service ended")]
pub struct ServeError(#[source] tonic::transport::Error);

/// The admin service, ready to be served.
pub struct Admin {
    service: Service,
}

impl fmt::Debug for Admin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Admin").finish_non_exhaustive()
    }
}

impl Admin {
    /// Builds the service and registers its metrics.
    pub fn new(
        sources: Arc<dyn Sources>,
        permissions: Permissions,
        identity: Identity,
        registry: &mut Registry,
    ) -> Self {
        let metrics = Metrics::new(registry);
        Self { service: Service { sources, permissions, identity, metrics, shutdown: CancellationToken::new() } }
    }

    /// Serves until `shutdown`; then open watches end, and a socket that we bound is removed.
    ///
    /// # Errors
    /// The listener fails.
    pub async fn serve(self, socket: Socket, shutdown: CancellationToken) -> Result<(), ServeError> {
        let (listener, _own) = socket.into_parts();
        let service = Service { shutdown: shutdown.clone(), ..self.service };
        tonic::transport::Server::builder()
            .add_service(AdminServer::new(service))
            .serve_with_incoming_shutdown(UnixListenerStream::new(listener), shutdown.cancelled_owned())
            .await
            .map_err(ServeError)
    }
}

//! The readiness check: it asks over the real sockets, as kubelet would.

use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use npu_proto::dra_v1::NodePrepareResourcesRequest;
use npu_proto::dra_v1::dra_plugin_client::DraPluginClient;
use npu_proto::registration::InfoRequest;
use npu_proto::registration::registration_client::RegistrationClient;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};

/// Why the driver is not ready.
#[derive(Debug, thiserror::Error)]
pub enum NotReady {
    /// No or a wrong answer on a socket.
    #[error("{call} on {} failed: {status}", socket.display())]
    Call {
        /// What was asked.
        call: &'static str,
        /// The socket.
        socket: PathBuf,
        /// The answer.
        status: String,
    },
    /// No answer in time.
    #[error("no answer within {0:?}")]
    Late(Duration),
}

/// Asks the DRA socket and the registration socket. A clone uses the same connections.
#[derive(Debug, Clone)]
pub(super) struct Probe {
    endpoint: (PathBuf, Channel),
    registration: (PathBuf, Channel),
    timeout: Duration,
}

impl Probe {
    /// Connects with the first check, and again whenever the connection is lost. Must be called in a tokio runtime.
    pub(super) fn new(endpoint: &Path, registration: &Path, timeout: Duration) -> Self {
        Self {
            endpoint: (endpoint.into(), channel(endpoint)),
            registration: (registration.into(), channel(registration)),
            timeout,
        }
    }

    /// Checks now: an empty prepare on the DRA socket, `GetInfo` on the registration socket.
    pub(super) async fn check(&self) -> Result<(), NotReady> {
        let failed = |call, socket: &Path, status: &tonic::Status| NotReady::Call {
            call,
            socket: socket.into(),
            status: format!("{:?} {}", status.code(), status.message()),
        };
        let check = async {
            let (socket, channel) = &self.endpoint;
            let request = NodePrepareResourcesRequest { claims: Vec::new() };
            let answer = DraPluginClient::new(channel.clone()).node_prepare_resources(request).await;
            answer.map_err(|status| failed("an empty prepare", socket, &status))?;
            let (socket, channel) = &self.registration;
            let answer = RegistrationClient::new(channel.clone()).get_info(InfoRequest {}).await;
            answer.map_err(|status| failed("GetInfo", socket, &status))?;
            Ok(())
        };
        tokio::time::timeout(self.timeout, check).await.map_err(|_| NotReady::Late(self.timeout))?
    }
}

fn channel(socket: &Path) -> Channel {
    let socket = PathBuf::from(socket);
    Endpoint::from_static("http://localhost").connect_with_connector_lazy(tower::service_fn(move |_: Uri| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    }))
}

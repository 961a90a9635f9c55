//! The service behind the registration socket.

use std::time::Instant;

use jiff::Timestamp;
use npu_proto::registration::registration_server::Registration as Service;
use npu_proto::registration::{InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse};
use tokio::sync::watch;
use tonic::transport::server::UdsConnectInfo;
use tonic::{Request, Response, Status};

use super::metrics::{Method, Metrics, Outcome};

/// What we serve, in the order in which kubelet is to choose.
pub const SUPPORTED_VERSIONS: [&str; 4] =
    ["v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth"];

/// What kubelet last said about us.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Registration {
    /// How many times kubelet said that it took us in. Each time it may have deleted our slices just before.
    pub times: u64,
    /// Its last word; `None` before the first, and after the socket was removed behind us.
    pub verdict: Option<Verdict>,
}

impl Registration {
    /// True if kubelet's last word was that we are registered.
    #[must_use]
    pub fn is_registered(&self) -> bool {
        matches!(&self.verdict, Some(verdict) if verdict.refused.is_none())
    }
}

/// One call of `NotifyRegistrationStatus`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    /// When it came.
    pub at: Timestamp,
    /// Why kubelet does not take us, in its words.
    pub refused: Option<String>,
}

/// Answers kubelet's two questions.
#[derive(Debug)]
pub(super) struct Registrar {
    pub(super) info: PluginInfo,
    pub(super) state: watch::Sender<Registration>,
    pub(super) metrics: Metrics,
}

impl Registrar {
    /// The socket is gone, and with it kubelet's registration.
    pub(super) fn forget(&self) {
        self.metrics.set_registered(false);
        self.state.send_modify(|state| state.verdict = None);
    }
}

#[tonic::async_trait]
impl Service for Registrar {
    async fn get_info(&self, request: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        let start = Instant::now();
        // Our own readiness probe asks as well, and is not kubelet.
        if !is_ourselves(&request) {
            self.metrics.called();
            self.metrics.answered(Method::get_info, Outcome::ok, start.elapsed());
            tracing::debug!("kubelet asked who we are");
        }
        Ok(Response::new(self.info.clone()))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let start = Instant::now();
        self.metrics.called();
        let RegistrationStatus { plugin_registered, error } = request.into_inner();
        let at = Timestamp::now();
        self.metrics.set_registered(plugin_registered);
        if plugin_registered {
            self.state.send_modify(|state| {
                state.times += 1;
                state.verdict = Some(Verdict { at, refused: None });
            });
            self.metrics.answered(Method::notify, Outcome::ok, start.elapsed());
            tracing::info!("kubelet registered the driver");
            return Ok(Response::new(RegistrationStatusResponse {}));
        }
        tracing::error!(error = %error, "kubelet refused to register the driver");
        let answer =
            Status::failed_precondition(format!("kubelet did not register driver {}: {error}", self.info.name));
        self.state.send_modify(|state| state.verdict = Some(Verdict { at, refused: Some(error) }));
        self.metrics.answered(Method::notify, Outcome::refused, start.elapsed());
        Err(answer)
    }
}

/// True if the call came from this very process.
pub(super) fn is_ourselves<T>(request: &Request<T>) -> bool {
    let peer = request.extensions().get::<UdsConnectInfo>().and_then(|info| info.peer_cred);
    let pid = peer.and_then(|peer| peer.pid()).and_then(|pid| u32::try_from(pid).ok());
    pid == Some(std::process::id())
}

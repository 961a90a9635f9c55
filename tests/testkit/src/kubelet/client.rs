//! The calls that kubelet makes once a driver is registered, with kubelet's own time limits and bookkeeping.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use npu_proto::dra_v1::dra_plugin_client::DraPluginClient as V1;
use npu_proto::dra_v1beta1::dra_plugin_client::DraPluginClient as V1Beta1;
use npu_proto::health_v1::dra_resource_health_client::DraResourceHealthClient as HealthV1;
use npu_proto::health_v1alpha1::dra_resource_health_client::DraResourceHealthClient as HealthV1Alpha1;
use npu_proto::{dra_v1, dra_v1beta1, health_v1, health_v1alpha1};
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Request, Status, Streaming};

pub use npu_proto::dra_v1::{Claim, Device};
pub use npu_proto::health_v1::{DeviceHealth, HealthStatus};

/// How long kubelet waits for a prepare or an unprepare.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(45);

/// A claim by its three names.
#[must_use]
pub fn claim(namespace: &str, name: &str, uid: &str) -> Claim {
    Claim { namespace: namespace.into(), uid: uid.into(), name: name.into() }
}

/// The two forms of the prepare service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DraVersion {
    /// `k8s.io.kubelet.pkg.apis.dra.v1`
    V1,
    /// `k8s.io.kubelet.pkg.apis.dra.v1beta1`
    V1Beta1,
}

impl DraVersion {
    /// The word for it among a plugin's `supported_versions`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::V1 => "v1.DRAPlugin",
            Self::V1Beta1 => "v1beta1.DRAPlugin",
        }
    }
}

/// The two forms of the health service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HealthVersion {
    /// Package `v1`.
    V1,
    /// Package `v1alpha1`.
    V1Alpha1,
}

impl HealthVersion {
    /// The word for it among a plugin's `supported_versions`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::V1 => "v1.DRAResourceHealth",
            Self::V1Alpha1 => "v1alpha1.DRAResourceHealth",
        }
    }
}

/// Why a call as a whole failed: kubelet fails the whole pod then.
#[derive(Debug)]
pub enum CallError {
    /// The call itself failed.
    Status(Box<Status>),
    /// The call was answered, but not once for each claim.
    Entries(String),
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Status(status) => write!(f, "{:?}: {}", status.code(), status.message()),
            Self::Entries(what) => f.write_str(what),
        }
    }
}

impl std::error::Error for CallError {}

impl From<Status> for CallError {
    fn from(status: Status) -> Self {
        Self::Status(Box::new(status))
    }
}

/// What a prepare says for each claim, by UID.
pub type PrepareAnswer = HashMap<String, Result<Vec<Device>, String>>;
/// What an unprepare says for each claim, by UID.
pub type UnprepareAnswer = HashMap<String, Result<(), String>>;

/// Opens a gRPC channel to a unix socket, with `localhost` as authority, as kubelet does for a DRA endpoint.
///
/// # Errors
/// Nobody listens there within `timeout`.
pub async fn channel(socket: &Path, timeout: Duration) -> Result<Channel, tonic::transport::Error> {
    let socket = PathBuf::from(socket);
    let endpoint = Endpoint::from_static("http://localhost").connect_timeout(timeout);
    endpoint
        .connect_with_connector(tower::service_fn(move |_: Uri| {
            let socket = socket.clone();
            async move { UnixStream::connect(socket).await.map(TokioIo::new) }
        }))
        .await
}

/// Kubelet's side of a driver's DRA socket.
#[derive(Debug, Clone)]
pub struct DraClient {
    channel: Channel,
    version: DraVersion,
}

impl DraClient {
    /// Connects to a driver's endpoint.
    ///
    /// # Errors
    /// Nobody listens there.
    pub async fn connect(endpoint: &Path, version: DraVersion) -> Result<Self, tonic::transport::Error> {
        Ok(Self { channel: channel(endpoint, Duration::from_secs(10)).await?, version })
    }

    /// The same connection, speaking another version.
    #[must_use]
    pub fn speaking(&self, version: DraVersion) -> Self {
        Self { channel: self.channel.clone(), version }
    }

    /// The version this client speaks.
    #[must_use]
    pub fn version(&self) -> DraVersion {
        self.version
    }

    /// Prepares all claims in one call, waits as long as kubelet does, and keeps kubelet's books: every claim must be
    /// answered, and no other.
    ///
    /// # Errors
    /// The call failed as a whole, or its entries are not those asked for.
    pub async fn prepare(&self, claims: &[Claim]) -> Result<PrepareAnswer, CallError> {
        self.prepare_within(claims, CALL_TIMEOUT).await
    }

    /// As [`Self::prepare`], with another time limit. When it passes the call is cancelled at the driver too, as a
    /// kubelet that goes away or gives up would do.
    ///
    /// # Errors
    /// As [`Self::prepare`]; `DeadlineExceeded` when the time is up.
    pub async fn prepare_within(&self, claims: &[Claim], timeout: Duration) -> Result<PrepareAnswer, CallError> {
        let answer: PrepareAnswer = match self.version {
            DraVersion::V1 => {
                let mut client = V1::new(self.channel.clone());
                let request = limited(dra_v1::NodePrepareResourcesRequest { claims: claims.to_vec() }, timeout);
                let response = within(timeout, client.node_prepare_resources(request)).await?;
                response.claims.into_iter().map(|(uid, entry)| (uid, result(entry.error, entry.devices))).collect()
            }
            DraVersion::V1Beta1 => {
                let mut client = V1Beta1::new(self.channel.clone());
                let claims = claims.iter().cloned().map(older_claim).collect();
                let request = limited(dra_v1beta1::NodePrepareResourcesRequest { claims }, timeout);
                let response = within(timeout, client.node_prepare_resources(request)).await?;
                let entries = response.claims.into_iter();
                entries
                    .map(|(uid, entry)| {
                        (uid, result(entry.error, entry.devices.into_iter().map(newer_device).collect()))
                    })
                    .collect()
            }
        };
        check_entries(claims, &answer)?;
        Ok(answer)
    }

    /// Prepares one claim: its devices, or the driver's words about it.
    ///
    /// # Errors
    /// The text that kubelet would put into the pod's event.
    pub async fn prepare_one(&self, claim: &Claim) -> Result<Vec<Device>, String> {
        let mut answer = self.prepare(std::slice::from_ref(claim)).await.map_err(|error| error.to_string())?;
        answer.remove(&claim.uid).unwrap_or_else(|| Err("the claim was skipped".into()))
    }

    /// Releases all claims in one call; see [`Self::prepare`].
    ///
    /// # Errors
    /// As [`Self::prepare`].
    pub async fn unprepare(&self, claims: &[Claim]) -> Result<UnprepareAnswer, CallError> {
        self.unprepare_within(claims, CALL_TIMEOUT).await
    }

    /// As [`Self::unprepare`], with another time limit.
    ///
    /// # Errors
    /// As [`Self::prepare_within`].
    pub async fn unprepare_within(&self, claims: &[Claim], timeout: Duration) -> Result<UnprepareAnswer, CallError> {
        let answer: UnprepareAnswer = match self.version {
            DraVersion::V1 => {
                let mut client = V1::new(self.channel.clone());
                let request = limited(dra_v1::NodeUnprepareResourcesRequest { claims: claims.to_vec() }, timeout);
                let response = within(timeout, client.node_unprepare_resources(request)).await?;
                response.claims.into_iter().map(|(uid, entry)| (uid, result(entry.error, ()))).collect()
            }
            DraVersion::V1Beta1 => {
                let mut client = V1Beta1::new(self.channel.clone());
                let claims = claims.iter().cloned().map(older_claim).collect();
                let request = limited(dra_v1beta1::NodeUnprepareResourcesRequest { claims }, timeout);
                let response = within(timeout, client.node_unprepare_resources(request)).await?;
                response.claims.into_iter().map(|(uid, entry)| (uid, result(entry.error, ()))).collect()
            }
        };
        check_entries(claims, &answer)?;
        Ok(answer)
    }

    /// Releases one claim.
    ///
    /// # Errors
    /// The text that kubelet would put into the pod's event.
    pub async fn unprepare_one(&self, claim: &Claim) -> Result<(), String> {
        let mut answer = self.unprepare(std::slice::from_ref(claim)).await.map_err(|error| error.to_string())?;
        answer.remove(&claim.uid).unwrap_or_else(|| Err("the claim was skipped".into()))
    }

    /// Opens the health stream.
    ///
    /// # Errors
    /// The driver does not serve this version.
    pub async fn watch_health(&self, version: HealthVersion) -> Result<HealthStream, CallError> {
        let stream = match version {
            HealthVersion::V1 => {
                let mut client = HealthV1::new(self.channel.clone());
                let response = client.node_watch_resources(health_v1::NodeWatchResourcesRequest {}).await?;
                Messages::V1(response.into_inner())
            }
            HealthVersion::V1Alpha1 => {
                let mut client = HealthV1Alpha1::new(self.channel.clone());
                let response = client.node_watch_resources(health_v1alpha1::NodeWatchResourcesRequest {}).await?;
                Messages::V1Alpha1(response.into_inner())
            }
        };
        Ok(HealthStream { stream })
    }
}

/// A driver's health stream as kubelet reads it.
#[derive(Debug)]
pub struct HealthStream {
    stream: Messages,
}

#[derive(Debug)]
enum Messages {
    V1(Streaming<health_v1::NodeWatchResourcesResponse>),
    V1Alpha1(Streaming<health_v1alpha1::NodeWatchResourcesResponse>),
}

impl HealthStream {
    /// The next complete list, or `None` when the driver ended the stream.
    ///
    /// # Errors
    /// The stream broke, or nothing came within `timeout` (`DeadlineExceeded`).
    pub async fn next(&mut self, timeout: Duration) -> Result<Option<Vec<DeviceHealth>>, CallError> {
        let next = async {
            match &mut self.stream {
                Messages::V1(stream) => Ok(stream.message().await?.map(|message| message.devices)),
                Messages::V1Alpha1(stream) => {
                    Ok(stream.message().await?.map(|message| message.devices.into_iter().map(newer_health).collect()))
                }
            }
        };
        tokio::time::timeout(timeout, next)
            .await
            .map_err(|_| Status::deadline_exceeded(format!("no health message within {timeout:?}")))?
    }

    /// Reads until a list satisfies `wanted` and returns it.
    ///
    /// # Errors
    /// The stream ended or broke, or no such list came within `timeout`.
    pub async fn wait_for(
        &mut self,
        timeout: Duration,
        wanted: impl Fn(&[DeviceHealth]) -> bool,
    ) -> Result<Vec<DeviceHealth>, CallError> {
        let end = tokio::time::Instant::now() + timeout;
        loop {
            let left = end.saturating_duration_since(tokio::time::Instant::now());
            let list = self.next(left).await?.ok_or_else(|| Status::unavailable("the driver ended the stream"))?;
            if wanted(&list) {
                return Ok(list);
            }
        }
    }
}

/// A request that carries its time limit to the driver, as Go's clients do.
fn limited<T>(message: T, timeout: Duration) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(timeout);
    request
}

/// Waits for an answer on this side too: dropping the call resets its stream, which cancels it at the driver.
async fn within<T>(
    timeout: Duration,
    call: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<T, Status> {
    match tokio::time::timeout(timeout, call).await {
        Ok(answer) => answer.map(tonic::Response::into_inner),
        Err(_) => Err(Status::deadline_exceeded(format!("no answer within {timeout:?}"))),
    }
}

fn result<T>(error: String, value: T) -> Result<T, String> {
    if error.is_empty() { Ok(value) } else { Err(error) }
}

fn check_entries<T>(asked: &[Claim], answer: &HashMap<String, T>) -> Result<(), CallError> {
    if let Some(uid) = answer.keys().find(|uid| !asked.iter().any(|claim| claim.uid == **uid)) {
        return Err(CallError::Entries(format!("the driver answered for claim {uid}, which was not asked for")));
    }
    let skipped = asked.iter().filter(|claim| !answer.contains_key(&claim.uid)).count();
    if skipped > 0 {
        return Err(CallError::Entries(format!("the driver skipped {skipped} claims")));
    }
    Ok(())
}

fn older_claim(claim: Claim) -> dra_v1beta1::Claim {
    dra_v1beta1::Claim { namespace: claim.namespace, uid: claim.uid, name: claim.name }
}

fn newer_device(device: dra_v1beta1::Device) -> Device {
    Device {
        request_names: device.request_names,
        pool_name: device.pool_name,
        device_name: device.device_name,
        cdi_device_ids: device.cdi_device_ids,
        share_id: None,
    }
}

fn newer_health(health: health_v1alpha1::DeviceHealth) -> DeviceHealth {
    DeviceHealth {
        device: health
            .device
            .map(|device| health_v1::DeviceIdentifier { pool_name: device.pool_name, device_name: device.device_name }),
        health: health.health,
        last_updated_time: health.last_updated_time,
        health_check_timeout_seconds: health.health_check_timeout_seconds,
        message: health.message,
    }
}

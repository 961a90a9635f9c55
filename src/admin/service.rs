//! The service: each call is permitted or denied, then answered from a snapshot.

use std::{sync::Arc, time::Duration};

use futures::stream::{self, BoxStream, StreamExt as _};
use npu_proto::admin::{self as proto, admin_server};
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Request, Response, Status, transport::server::UdsConnectInfo};

use super::{
    Identity, READERS_GROUP, Sources,
    metrics::Metrics,
    peer::{Access, Denied, Permissions},
    view,
};
use crate::domain::{
    claim::ClaimUid,
    node::HoldKind,
    plan::chip_of,
    refusal::{Kind, Refusal},
};

/// Least time between two answers of a watch: a burst of changes becomes one answer.
const PACE: Duration = Duration::from_millis(50);

/// Longest reason that an operator may give, in bytes.
const REASON_MAX: usize = 256;

pub(super) struct Service {
    pub(super) sources: Arc<dyn Sources>,
    pub(super) permissions: Permissions,
    pub(super) identity: Identity,
    pub(super) metrics: Metrics,
    pub(super) shutdown: CancellationToken,
}

impl Service {
    fn permit<T>(&self, request: &Request<T>, access: Access) -> Result<(), Status> {
        let peer = request.extensions().get::<UdsConnectInfo>().and_then(|info| info.peer_cred);
        let caller = self.permissions.caller(peer);
        self.permissions.decide(caller.as_ref(), access).map_err(|denied| {
            tracing::warn!(%denied, "a call of the admin service was denied");
            let mut status = Status::permission_denied(denied.to_string());
            if let Denied::NotReader { group, .. } = &denied
                && let Ok(group) = group.parse()
            {
                status.metadata_mut().insert(READERS_GROUP, group);
            }
            status
        })
    }

    /// Permits and answers one read.
    fn read<T, R>(&self, method: &'static str, request: &Request<T>, answer: impl FnOnce() -> R) -> Answer<R> {
        let result = self.permit(request, Access::Read).map(|()| Response::new(answer()));
        self.count(method, result)
    }

    fn count<R>(&self, method: &'static str, result: Answer<R>) -> Answer<R> {
        self.metrics.answered(method, result.as_ref().map_or_else(|status| word(status.code()), |_| "ok"));
        result
    }

    async fn release(&self, request: Request<proto::ReleaseClaimRequest>) -> Answer<proto::ReleaseClaimResponse> {
        self.permit(&request, Access::Change)?;
        let uid = ClaimUid::new(request.into_inner().uid).map_err(|e| Status::invalid_argument(e.to_string()))?;
        let claims = view::claims(&self.sources.snapshot());
        let held = claims.into_iter().find(|claim| claim.claim.as_ref().is_some_and(|name| name.uid == uid.as_str()));
        let Some(held) = held else {
            return Err(Status::not_found(format!("this node holds no claim with UID {uid}")));
        };
        let released = self.sources.release(uid.clone()).await;
        released.map_err(|refusal| refused(&refusal, &format!("releasing claim {uid} by force")))?;
        tracing::warn!(claim.uid = %uid, "root released a claim by force");
        Ok(Response::new(proto::ReleaseClaimResponse { claim: Some(held) }))
    }
}

impl Service {
    async fn create(&self, request: Request<proto::CreateVnpuRequest>) -> Answer<proto::CreateVnpuResponse> {
        self.permit(&request, Access::Change)?;
        let proto::CreateVnpuRequest { device, template } = request.into_inner();
        let made = self.sources.create_vnpu(device.clone(), template.clone()).await;
        let made =
            made.map_err(|refusal| refused(&refusal, &format!("making a vNPU by {template:?} on {device:?}")))?;
        tracing::warn!(npu = device, template, vnpu = made.id, "root made a vNPU");
        let snapshot = self.sources.snapshot();
        let entries = view::vnpus(&snapshot);
        let listed = entries.into_iter().find(|entry| entry.vnpu.as_ref().is_some_and(|vnpu| vnpu.id == made.id));
        // A card that was lost meanwhile has no entry: what was read back is told all the same.
        let npu = snapshot.devices.iter().map(|view| &view.npu).find(|npu| npu.name.as_str() == device);
        Ok(Response::new(proto::CreateVnpuResponse {
            taken_at_ms: self.sources.now().as_millisecond(),
            vnpu: listed.or_else(|| npu.map(|npu| view::foreign(npu, &made))),
            closed: snapshot.closed.get(&device).cloned().unwrap_or_default(),
        }))
    }

    async fn destroy(&self, request: Request<proto::DestroyVnpuRequest>) -> Answer<proto::DestroyVnpuResponse> {
        self.permit(&request, Access::Change)?;
        let proto::DestroyVnpuRequest { id, force } = request.into_inner();
        let destroyed = self.sources.destroy_vnpu(id, force).await;
        destroyed.map_err(|refusal| refused(&refusal, &format!("destroying vNPU {id}")))?;
        tracing::warn!(vnpu = id, force, "root destroyed a vNPU");
        let snapshot = self.sources.snapshot();
        let chip = chip_of(id);
        let npu = snapshot.devices.iter().map(|view| &view.npu).find(|npu| npu.physical_ids().contains(&chip));
        let device = npu.map(|npu| npu.name.to_string()).unwrap_or_default();
        let closed = snapshot.closed.get(&device).cloned().unwrap_or_default();
        Ok(Response::new(proto::DestroyVnpuResponse { device, closed }))
    }
}

impl Service {
    async fn set_hold(&self, request: Request<proto::HoldRequest>) -> Answer<proto::HoldResponse> {
        self.permit(&request, Access::Change)?;
        let proto::HoldRequest { device, kind, reason } = request.into_inner();
        let kind = match kind.as_str() {
            "" => None,
            "cordoned" => Some(HoldKind::Cordon),
            "drained" => Some(HoldKind::Drain),
            other => return Err(Status::invalid_argument(format!("{other:?} is neither cordoned nor drained"))),
        };
        let reason = one_line(reason)?;
        let held = self.sources.hold(device.clone(), kind.map(|kind| (kind, reason))).await;
        let claims = held.map_err(|refusal| {
            let wish = kind.map_or("taking the operator's hand off", |kind| match kind {
                HoldKind::Cordon => "cordoning",
                HoldKind::Drain => "draining",
            });
            refused(&refusal, &format!("{wish} {device:?}"))
        })?;
        Ok(Response::new(proto::HoldResponse { claims: claims.iter().map(view::claim_name).collect() }))
    }
}

impl Service {
    async fn suspend(&self, request: Request<proto::SuspendBackendRequest>) -> Answer<proto::SuspendBackendResponse> {
        self.permit(&request, Access::Change)?;
        let reason = one_line(request.into_inner().reason)?;
        let suspended = self.sources.suspend(reason.clone()).await;
        suspended.map_err(|refusal| refused(&refusal, "suspending the backend"))?;
        tracing::warn!(reason, "root suspended the backend");
        Ok(Response::new(proto::SuspendBackendResponse {}))
    }

    async fn resume(&self, request: Request<proto::ResumeBackendRequest>) -> Answer<proto::ResumeBackendResponse> {
        self.permit(&request, Access::Change)?;
        self.sources.resume().await.map_err(|refusal| refused(&refusal, "resuming the backend"))?;
        tracing::warn!("root resumed the backend");
        Ok(Response::new(proto::ResumeBackendResponse {}))
    }
}

type Answer<T> = Result<Response<T>, Status>;

/// A code as metrics name it.
fn word(code: Code) -> &'static str {
    match code {
        Code::PermissionDenied => "denied",
        Code::NotFound => "not_found",
        Code::InvalidArgument => "invalid",
        Code::FailedPrecondition => "refused",
        _ => "failed",
    }
}

/// A reason that an operator gives: text of one line, not too long.
fn one_line(reason: String) -> Result<String, Status> {
    if reason.len() > REASON_MAX {
        let size = reason.len();
        return Err(Status::invalid_argument(format!("the reason has {size} bytes; at most {REASON_MAX} are allowed")));
    }
    if reason.contains(char::is_control) {
        let why = "the reason has a line break or another control character; one line of text is allowed";
        return Err(Status::invalid_argument(why));
    }
    Ok(reason)
}

/// A refusal of what root wished, as a gRPC status; the log has it too.
fn refused(refusal: &Refusal, wish: &str) -> Status {
    let code = code(refusal);
    let outcome = if code == Code::Aborted { "failed" } else { "was refused" };
    tracing::warn!(why = %refusal, "{wish} for root {outcome}");
    Status::new(code, refusal.to_string())
}

/// The code of a refusal: `Aborted` is what was tried and failed, `FailedPrecondition` what the state of something
/// does not allow. No refusal is `InvalidArgument`: that is a request that no state would allow.
fn code(refusal: &Refusal) -> Code {
    match (refusal.kind(), refusal) {
        (Kind::NotFound, _) => Code::NotFound,
        (
            Kind::Retry,
            Refusal::OperatorFailed { .. }
            | Refusal::Failed { .. }
            | Refusal::NotKept { .. }
            | Refusal::ClaimUnreadable { .. }
            | Refusal::Internal(..),
        ) => Code::Aborted,
        (Kind::Retry | Kind::Permanent | Kind::Conflict | Kind::Exhausted, _) => Code::FailedPrecondition,
    }
}

#[tonic::async_trait]
impl admin_server::Admin for Service {
    async fn devices(&self, request: Request<proto::DevicesRequest>) -> Answer<proto::DevicesResponse> {
        self.read("devices", &request, || proto::DevicesResponse {
            taken_at_ms: self.sources.now().as_millisecond(),
            devices: view::devices(&self.sources.snapshot()),
        })
    }

    async fn claims(&self, request: Request<proto::ClaimsRequest>) -> Answer<proto::ClaimsResponse> {
        self.read("claims", &request, || proto::ClaimsResponse {
            taken_at_ms: self.sources.now().as_millisecond(),
            claims: view::claims(&self.sources.snapshot()),
        })
    }

    async fn slices(&self, request: Request<proto::SlicesRequest>) -> Answer<proto::SlicesResponse> {
        self.read("slices", &request, || view::slices(&self.sources.cluster(), self.sources.now()))
    }

    async fn status(&self, request: Request<proto::StatusRequest>) -> Answer<proto::StatusResponse> {
        self.read("status", &request, || {
            let (kubelet, cluster) = (self.sources.kubelet(), self.sources.cluster());
            view::status(&self.sources.snapshot(), &kubelet, &cluster, &self.identity, self.sources.now())
        })
    }

    async fn version(&self, request: Request<proto::VersionRequest>) -> Answer<proto::VersionResponse> {
        self.read("version", &request, || proto::VersionResponse {
            version: self.identity.version.to_owned(),
            apis: vec!["npu.admin.v1".to_owned()],
        })
    }

    type WatchStream = BoxStream<'static, Result<proto::WatchResponse, Status>>;

    async fn watch(&self, request: Request<proto::WatchRequest>) -> Answer<Self::WatchStream> {
        self.read("watch", &request, || {
            let watching = Watching {
                wanted: *request.get_ref(),
                changes: self.sources.changes(),
                sources: self.sources.clone(),
                told: view::Told::default(),
                shutdown: self.shutdown.clone(),
                _open: Open::new(&self.metrics.watches),
            };
            stream::unfold(watching, Watching::next).boxed()
        })
    }

    async fn release_claim(&self, request: Request<proto::ReleaseClaimRequest>) -> Answer<proto::ReleaseClaimResponse> {
        let result = self.release(request).await;
        self.count("release_claim", result)
    }

    async fn vnpus(&self, request: Request<proto::VnpusRequest>) -> Answer<proto::VnpusResponse> {
        self.read("vnpus", &request, || proto::VnpusResponse {
            taken_at_ms: self.sources.now().as_millisecond(),
            vnpus: view::vnpus(&self.sources.snapshot()),
        })
    }

    async fn templates(&self, request: Request<proto::TemplatesRequest>) -> Answer<proto::TemplatesResponse> {
        self.read("templates", &request, || proto::TemplatesResponse {
            taken_at_ms: self.sources.now().as_millisecond(),
            devices: view::templates(&self.sources.snapshot()),
        })
    }

    async fn create_vnpu(&self, request: Request<proto::CreateVnpuRequest>) -> Answer<proto::CreateVnpuResponse> {
        let result = self.create(request).await;
        self.count("create_vnpu", result)
    }

    async fn hold(&self, request: Request<proto::HoldRequest>) -> Answer<proto::HoldResponse> {
        let result = self.set_hold(request).await;
        self.count("hold", result)
    }

    async fn destroy_vnpu(&self, request: Request<proto::DestroyVnpuRequest>) -> Answer<proto::DestroyVnpuResponse> {
        let result = self.destroy(request).await;
        self.count("destroy_vnpu", result)
    }

    async fn suspend_backend(
        &self,
        request: Request<proto::SuspendBackendRequest>,
    ) -> Answer<proto::SuspendBackendResponse> {
        let result = self.suspend(request).await;
        self.count("suspend_backend", result)
    }

    async fn resume_backend(
        &self,
        request: Request<proto::ResumeBackendRequest>,
    ) -> Answer<proto::ResumeBackendResponse> {
        let result = self.resume(request).await;
        self.count("resume_backend", result)
    }
}

/// One watch that is open.
struct Watching {
    wanted: proto::WatchRequest,
    changes: watch::Receiver<u64>,
    sources: Arc<dyn Sources>,
    told: view::Told,
    shutdown: CancellationToken,
    _open: Open,
}

impl Watching {
    /// The next answer; `None` when the daemon ends.
    async fn next(mut self) -> Option<(Result<proto::WatchResponse, Status>, Self)> {
        let mut is_first = self.told.is_new();
        let shutdown = self.shutdown.clone();
        loop {
            if !std::mem::take(&mut is_first) {
                tokio::select! {
                    changed = self.next_change() => changed?,
                    () = shutdown.cancelled() => return None,
                }
            }
            self.changes.mark_unchanged();
            if let Some(news) = self.told.news(&self.sources.snapshot(), self.wanted, self.sources.now()) {
                return Some((Ok(news), self));
            }
        }
    }
}

impl Watching {
    async fn next_change(&mut self) -> Option<()> {
        tokio::time::sleep(PACE).await;
        self.changes.changed().await.ok()
    }
}

/// Counts an open watch for as long as it lives.
struct Open(Gauge);

impl Open {
    fn new(watches: &Gauge) -> Self {
        watches.inc();
        Self(watches.clone())
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.dec();
    }
}

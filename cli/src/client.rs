//! The connection to the daemon.

use std::{
    io,
    os::unix::fs::{FileTypeExt as _, MetadataExt as _},
    path::{Path, PathBuf},
    time::Duration,
};

use hyper_util::rt::TokioIo;
use npu_proto::admin::{self as proto, admin_client::AdminClient};
use tokio::{net::UnixStream, time::timeout};
use tonic::{
    Response, Status, Streaming,
    transport::{Channel, Endpoint},
};

use crate::failure::Failure;

/// Largest answer that is taken, in bytes: far more than a node's claims need.
const LARGEST_ANSWER: usize = 256 << 20;

/// The group whose members may look, unless the settings name another one.
const GROUP: &str = "npu-dra";

/// What to do where a vNPU is not as somebody thought.
pub(crate) const SEE_VNPUS: &str = "See who holds what: npuctl vnpu list";

/// A connection to the daemon.
#[derive(Debug)]
pub(crate) struct Client {
    inner: AdminClient<Channel>,
    socket: PathBuf,
    bound: Duration,
}

impl Client {
    /// Connects.
    pub(crate) async fn connect(socket: &Path, bound: Duration) -> Result<Self, Failure> {
        let late = || Failure::Timeout { socket: socket.to_owned(), after: bound };
        let stream = timeout(bound, UnixStream::connect(socket)).await.map_err(|_| late())?;
        let stream = stream.map_err(|cause| match cause.kind() {
            io::ErrorKind::PermissionDenied => {
                Failure::LockedOut { socket: socket.to_owned(), group: group_of(socket) }
            }
            _ => Failure::Unreachable { socket: socket.to_owned(), cause: told_apart(cause, socket), records: None },
        })?;
        // The channel asks for a connection once; should it ask again, the first one is lost.
        let mut stream = Some(TokioIo::new(stream));
        let connector = tower::service_fn(move |_| {
            let stream = stream.take().ok_or_else(|| io::Error::other("the daemon closed the connection"));
            async move { stream }
        });
        let endpoint = Endpoint::from_static("http://npu-dra");
        let channel = timeout(bound, endpoint.connect_with_connector(connector))
            .await
            .map_err(|_| late())?
            .map_err(|error| Failure::Lost { socket: socket.to_owned(), why: root_cause(&error) })?;
        let inner = AdminClient::new(channel).max_decoding_message_size(LARGEST_ANSWER);
        Ok(Self { inner, socket: socket.to_owned(), bound })
    }

    async fn answer<T>(&self, call: impl Future<Output = Result<Response<T>, Status>>) -> Result<T, Failure> {
        match timeout(self.bound, call).await {
            Ok(Ok(answer)) => Ok(answer.into_inner()),
            Ok(Err(status)) => Err(Failure::of_status(&status, self.socket.clone())),
            Err(_) => Err(Failure::Timeout { socket: self.socket.clone(), after: self.bound }),
        }
    }

    pub(crate) async fn devices(&self) -> Result<proto::DevicesResponse, Failure> {
        self.answer(self.inner.clone().devices(proto::DevicesRequest {})).await
    }

    pub(crate) async fn claims(&self) -> Result<proto::ClaimsResponse, Failure> {
        self.answer(self.inner.clone().claims(proto::ClaimsRequest {})).await
    }

    pub(crate) async fn slices(&self) -> Result<proto::SlicesResponse, Failure> {
        self.answer(self.inner.clone().slices(proto::SlicesRequest {})).await
    }

    pub(crate) async fn status(&self) -> Result<proto::StatusResponse, Failure> {
        self.answer(self.inner.clone().status(proto::StatusRequest {})).await
    }

    pub(crate) async fn version(&self) -> Result<proto::VersionResponse, Failure> {
        self.answer(self.inner.clone().version(proto::VersionRequest {})).await
    }

    pub(crate) async fn vnpus(&self) -> Result<proto::VnpusResponse, Failure> {
        self.answer(self.inner.clone().vnpus(proto::VnpusRequest {})).await
    }

    pub(crate) async fn templates(&self) -> Result<proto::TemplatesResponse, Failure> {
        self.answer(self.inner.clone().templates(proto::TemplatesRequest {})).await
    }

    /// Makes a vNPU.
    pub(crate) async fn create_vnpu(&self, device: &str, template: &str) -> Result<proto::CreateVnpuResponse, Failure> {
        let request = proto::CreateVnpuRequest { device: device.to_owned(), template: template.to_owned() };
        let answer = self.answer(self.inner.clone().create_vnpu(request)).await;
        answer.map_err(|failure| match failure {
            Failure::NotFound(..) => Failure::NoDevice(device.to_owned()),
            other => other.advise("See what can be cut: npuctl vnpu templates"),
        })
    }

    /// Destroys a vNPU.
    pub(crate) async fn destroy_vnpu(&self, id: u32, force: bool) -> Result<proto::DestroyVnpuResponse, Failure> {
        let request = proto::DestroyVnpuRequest { id, force };
        let answer = self.answer(self.inner.clone().destroy_vnpu(request)).await;
        answer.map_err(|failure| failure.advise(SEE_VNPUS))
    }

    /// Keeps claims from a device, or with an empty kind lets them have it again.
    pub(crate) async fn hold(&self, device: &str, kind: &str, reason: &str) -> Result<proto::HoldResponse, Failure> {
        let request =
            proto::HoldRequest { device: device.to_owned(), kind: kind.to_owned(), reason: reason.to_owned() };
        self.answer(self.inner.clone().hold(request)).await
    }

    /// Lets go of the driver.
    pub(crate) async fn suspend(&self, reason: &str) -> Result<proto::SuspendBackendResponse, Failure> {
        let request = proto::SuspendBackendRequest { reason: reason.to_owned() };
        let answer = self.answer(self.inner.clone().suspend_backend(request)).await;
        answer.map_err(|failure| failure.advise("See how it is: npuctl status"))
    }

    /// Takes the driver up again.
    pub(crate) async fn resume(&self) -> Result<proto::ResumeBackendResponse, Failure> {
        let answer = self.answer(self.inner.clone().resume_backend(proto::ResumeBackendRequest {})).await;
        answer.map_err(|failure| failure.advise("See how it is: npuctl status"))
    }

    /// Lets go of a claim.
    pub(crate) async fn release(&self, uid: &str) -> Result<proto::ReleaseClaimResponse, Failure> {
        let request = proto::ReleaseClaimRequest { uid: uid.to_owned() };
        match timeout(self.bound, self.inner.clone().release_claim(request)).await {
            Ok(Err(status)) if status.code() == tonic::Code::NotFound => Err(Failure::NoClaim(uid.to_owned())),
            Ok(result) => self.answer(std::future::ready(result)).await,
            Err(_) => Err(Failure::Timeout { socket: self.socket.clone(), after: self.bound }),
        }
    }

    /// Begins to watch.
    pub(crate) async fn watch(&self, request: proto::WatchRequest) -> Result<Streaming<proto::WatchResponse>, Failure> {
        self.answer(self.inner.clone().watch(request)).await
    }

    /// The next answer of a watch; it may take for ever.
    pub(crate) async fn next(
        &self,
        stream: &mut Streaming<proto::WatchResponse>,
    ) -> Result<proto::WatchResponse, Failure> {
        match stream.message().await {
            Ok(Some(answer)) => Ok(answer),
            Ok(None) => Err(Failure::Lost { socket: self.socket.clone(), why: "it is stopping".to_owned() }),
            Err(status) => Err(Failure::of_status(&status, self.socket.clone())),
        }
    }
}

/// The group that a socket belongs to; none if it is root's, the usual one if it cannot be seen.
fn group_of(socket: &Path) -> Option<String> {
    let Ok(metadata) = std::fs::metadata(socket) else { return Some(GROUP.to_owned()) };
    if metadata.gid() == 0 {
        return None;
    }
    let group = nix::unistd::Group::from_gid(metadata.gid().into()).ok().flatten();
    Some(group.map_or_else(|| metadata.gid().to_string(), |group| group.name))
}

/// The kernel refuses a connection to a file that is no socket as it does to one that nobody listens at.
fn told_apart(cause: io::Error, socket: &Path) -> io::Error {
    let is_other = std::fs::metadata(socket).is_ok_and(|metadata| !metadata.file_type().is_socket());
    if is_other { io::Error::other("it is no socket") } else { cause }
}

/// The innermost cause of an error.
fn root_cause(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

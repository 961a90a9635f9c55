//! What can go wrong: one line of what and which, one of what to do, and an exit status.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use npu_dra::admin::READERS_GROUP;
use tonic::{Code, Status};

use crate::args::SOCKET;

/// Why a command did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// Nobody listens.
    #[error("cannot reach npu-dra at {}: {}", socket.display(), io_text(cause))]
    Unreachable {
        socket: PathBuf,
        cause: io::Error,
        /// Why the records could not be read instead.
        records: Option<String>,
    },
    /// The socket's mode keeps us out.
    #[error("not permitted to reach npu-dra at {}: permission denied", socket.display())]
    LockedOut {
        socket: PathBuf,
        /// The group that the mode lets in, if that is another one than root's.
        group: Option<String>,
    },
    /// The daemon said no.
    #[error("not permitted by npu-dra at {}: {why}", socket.display())]
    NotPermitted {
        socket: PathBuf,
        why: String,
        /// The group whose members may, if there is one.
        group: Option<String>,
    },
    /// No answer in time.
    #[error("npu-dra at {} did not answer within {after:?}", socket.display())]
    Timeout { socket: PathBuf, after: Duration },
    /// It went away.
    #[error("lost the connection to npu-dra at {}: {why}", socket.display())]
    Lost { socket: PathBuf, why: String },
    /// The daemon does not know the call.
    #[error("npu-dra at {} does not know what is asked of it", socket.display())]
    TooOld { socket: PathBuf },
    /// A call failed.
    #[error("npu-dra at {} failed: {why}", socket.display())]
    Failed { socket: PathBuf, why: String },
    /// The state of something does not allow it.
    #[error("refused by npu-dra: {0}")]
    Refused(String, &'static str),
    /// No such device.
    #[error("no NPU named {0} on this node")]
    NoDevice(String),
    /// The daemon found nothing of that name.
    #[error("{0}")]
    NotFound(String, &'static str),
    /// No such claim.
    #[error("no claim with UID {0} on this node")]
    NoClaim(String),
    /// The records on disk do not know it; the daemon, were it there, might.
    #[error("{what} {name} is not in the records, and npu-dra does not answer at {}", socket.display())]
    NotRecorded { what: &'static str, name: String, socket: PathBuf },
    /// The output could not be written.
    #[error("cannot write {what}: {}", io_text(cause))]
    Output { what: String, cause: io::Error },
    /// A document could not be made.
    #[error("cannot make the {0} document: {1}")]
    Document(&'static str, String),
    /// Wrong usage that clap cannot see.
    #[error("{0}")]
    Usage(String, &'static str),
}

impl Failure {
    /// The failure behind a status of the daemon.
    pub(crate) fn of_status(status: &Status, socket: PathBuf) -> Self {
        let why = status.message().to_owned();
        // A status that has a cause was not sent by the daemon: the connection made it.
        if std::error::Error::source(status).is_some() {
            return Self::Lost { socket, why };
        }
        match status.code() {
            Code::PermissionDenied => {
                let group = status.metadata().get(READERS_GROUP).and_then(|group| group.to_str().ok());
                Self::NotPermitted { socket, why, group: group.map(str::to_owned) }
            }
            Code::InvalidArgument => Self::Usage(why, "See what is allowed: the same command with --help"),
            Code::FailedPrecondition => Self::Refused(why, "See who holds what: npuctl claims list"),
            Code::NotFound => Self::NotFound(why, "See what there is: npuctl devices"),
            Code::Unimplemented => Self::TooOld { socket },
            Code::Unavailable | Code::Cancelled => Self::Lost { socket, why },
            _ => Self::Failed { socket, why },
        }
    }

    /// The same, with other advice where the daemon refused or found nothing.
    pub(crate) fn advise(self, advice: &'static str) -> Self {
        match self {
            Self::Refused(why, _) => Self::Refused(why, advice),
            Self::NotFound(why, _) => Self::NotFound(why, advice),
            other => other,
        }
    }

    /// Exit status.
    pub(crate) fn code(&self) -> u8 {
        match self {
            Self::Failed { .. } | Self::TooOld { .. } | Self::Output { .. } | Self::Document(..) => 1,
            Self::Usage(..) => 2,
            Self::NoDevice(_) | Self::NoClaim(_) | Self::NotFound(..) => 3,
            Self::Unreachable { .. } | Self::Timeout { .. } | Self::Lost { .. } | Self::NotRecorded { .. } => 4,
            Self::LockedOut { .. } | Self::NotPermitted { .. } => 5,
            Self::Refused(..) => 6,
        }
    }

    /// What to do.
    pub(crate) fn advice(&self) -> String {
        match self {
            Self::Unreachable { socket, records: Some(why), .. } => {
                format!("{}\n  Its records cannot be read either: {why}", find(socket))
            }
            Self::Unreachable { socket, .. } | Self::NotRecorded { socket, .. } => find(socket),
            Self::LockedOut { group: Some(group), .. } | Self::NotPermitted { group: Some(group), .. } => format!(
                "Only root and members of group {group} may. Join it with: usermod -aG {group} USER (then log in again)"
            ),
            Self::LockedOut { group: None, .. } | Self::NotPermitted { group: None, .. } => {
                "Run the same command as root".to_owned()
            }
            Self::Timeout { .. } | Self::Lost { .. } | Self::Failed { .. } => {
                "See what it says of it: journalctl -u npu-dra".to_owned()
            }
            Self::TooOld { .. } => {
                "It is not the admin socket of npu-dra, or npu-dra is older than this npuctl. Compare: npuctl version"
                    .to_owned()
            }
            Self::NoDevice(_) => "See all with: npuctl devices".to_owned(),
            Self::NoClaim(_) => "See all with: npuctl claims list".to_owned(),
            Self::Output { .. } => "Check the place that it is written to".to_owned(),
            Self::Document(..) => "This is a defect of npuctl: please report it".to_owned(),
            Self::Usage(_, advice) | Self::Refused(_, advice) | Self::NotFound(_, advice) => (*advice).to_owned(),
        }
    }
}

/// What to do where nobody listens.
fn find(socket: &Path) -> String {
    if socket == Path::new(SOCKET) {
        return "Nobody listens there. If npu-dra is not running: systemctl start npu-dra".to_owned();
    }
    format!(
        "Nobody listens there, and npu-dra was not looked for at its usual place, {SOCKET}. \
         Check --socket and NPUCTL_SOCKET against admin.socket of: npu-dra check-config"
    )
}

/// An I/O error as people say it, without the number.
fn io_text(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "no such file".to_owned(),
        io::ErrorKind::ConnectionRefused => "connection refused".to_owned(),
        io::ErrorKind::PermissionDenied => "permission denied".to_owned(),
        io::ErrorKind::NotADirectory => "not a directory".to_owned(),
        io::ErrorKind::StorageFull => "no space left".to_owned(),
        io::ErrorKind::InvalidInput => "the path cannot be a socket's (too long?)".to_owned(),
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_status_has_its_exit_code() {
        let code = |code, text: &str| Failure::of_status(&Status::new(code, text), "/s".into()).code();
        for (status, text, expected) in [
            (Code::PermissionDenied, "", 5),
            (Code::FailedPrecondition, "", 6),
            (Code::NotFound, "", 3),
            (Code::Unavailable, "", 4),
            (Code::Unimplemented, "", 1),
            (Code::InvalidArgument, "", 2),
            (Code::Internal, "", 1),
            (Code::Aborted, "", 1),
        ] {
            assert_eq!(code(status, text), expected, "{status:?}");
        }
        let broken = Status::from_error(Box::new(io::Error::other("reset")));
        assert_eq!(Failure::of_status(&broken, "/s".into()).code(), 4);
    }

    #[test]
    fn starting_npu_dra_is_advised_only_where_it_listens_by_default() {
        let advice = |socket: &str| {
            let cause = io::ErrorKind::NotFound.into();
            Failure::Unreachable { socket: socket.into(), cause, records: None }.advice()
        };
        assert!(advice(SOCKET).contains("systemctl start npu-dra"));
        let other = advice("/tmp/other.sock");
        assert!(!other.contains("systemctl") && other.contains(SOCKET) && other.contains("--socket"), "{other}");
    }
}

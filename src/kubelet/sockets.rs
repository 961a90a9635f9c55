//! The two unix sockets: their names, what may be in their way, and how they appear and go.
//!
//! Kubelet's watcher must never see a socket on which nobody listens yet, or with a wider mode than it is to keep. So a
//! socket is made under a name with a leading dot, which kubelet skips, and linked to its own name once it listens.
//! A link, unlike a rename, never replaces what is there.

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, MetadataExt as _};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::socket::{self, AddressFamily, Backlog, SockFlag, SockType, UnixAddr};
use nix::sys::stat::{Mode, fchmod};

use crate::domain::names::{DriverName, InstanceId};

/// A unix socket address holds no longer path than this, in bytes.
pub const LONGEST_PATH: usize = 107;
/// Waiting connections that the kernel keeps for us.
const BACKLOG: i32 = 128;

/// Why the sockets could not be served. Nothing is left behind.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// A path that no socket can have.
    #[error("socket path {} has {length} bytes and the limit is {LONGEST_PATH}: use a shorter kubelet directory or instance id", path.display())]
    TooLong {
        /// The path.
        path: PathBuf,
        /// Its length in bytes.
        length: usize,
    },
    /// Kubelet is told the path, so it must not depend on a working directory.
    #[error("socket path {} is not absolute: give kubelet's directories as absolute paths", path.display())]
    Relative {
        /// The path.
        path: PathBuf,
    },
    /// Kubelet sends the path as an HTTP/2 authority, and this one would be reset.
    #[error("socket path {} cannot be called by kubelet, which sends it as an HTTP/2 authority: use another kubelet directory", path.display())]
    Unspeakable {
        /// The path.
        path: PathBuf,
    },
    /// The directory that kubelet watches is not there.
    #[error("cannot use kubelet's registration directory {}: start kubelet first, or name its directory with --kubelet-registrar-directory-path", path.display())]
    Registrar {
        /// The directory.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Our own directory below kubelet's plugins could not be made.
    #[error("cannot make the plugin directory {}", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Something that is no socket bears the name.
    #[error("{} is {kind} and not a socket: find out whose it is, then remove it", path.display())]
    Foreign {
        /// The path.
        path: PathBuf,
        /// What it is.
        kind: &'static str,
    },
    /// Somebody listens there.
    #[error("another process serves {}: stop it, or give this one an instance id of its own", path.display())]
    InUse {
        /// The path.
        path: PathBuf,
    },
    /// It could not be found out whether somebody listens there, or the dead socket could not be removed.
    #[error("cannot clear the way for socket {}", path.display())]
    Clear {
        /// The path.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The socket could not be made.
    #[error("cannot listen on {}", path.display())]
    Listen {
        /// The path.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// The names of a driver's sockets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sockets {
    driver: DriverName,
    registrar_dir: PathBuf,
    data_dir: PathBuf,
    registration: PathBuf,
    endpoint: PathBuf,
}

impl Sockets {
    /// Names and checks the sockets of `driver`; an instance id tells two instances of one driver apart.
    ///
    /// # Errors
    /// A path is too long, not absolute, or none that kubelet can call.
    pub fn new(
        driver: &DriverName,
        instance: Option<&InstanceId>,
        registrar_dir: &Path,
        plugins_dir: &Path,
    ) -> Result<Self, SocketError> {
        let data_dir = plugins_dir.join(driver.as_str());
        // The at sign is what makes kubelet's authority a legal one: what stands before it reads as user-info.
        let (registration, endpoint) = match instance {
            None => (format!("{driver}@reg.sock"), "dra@npu.sock".to_owned()),
            Some(id) => (format!("{driver}-{id}@reg.sock"), format!("dra-{id}@npu.sock")),
        };
        let sockets = Self {
            driver: driver.clone(),
            registration: registrar_dir.join(registration),
            endpoint: data_dir.join(endpoint),
            registrar_dir: registrar_dir.into(),
            data_dir,
        };
        for path in [&sockets.registration, &sockets.endpoint] {
            let length = path.as_os_str().len();
            if length > LONGEST_PATH {
                return Err(SocketError::TooLong { path: path.clone(), length });
            }
            if !path.is_absolute() {
                return Err(SocketError::Relative { path: path.clone() });
            }
            if !speakable(path) {
                return Err(SocketError::Unspeakable { path: path.clone() });
            }
        }
        Ok(sockets)
    }

    /// The socket by which kubelet finds the driver.
    #[must_use]
    pub fn registration(&self) -> &Path {
        &self.registration
    }

    /// The socket on which kubelet makes its calls.
    #[must_use]
    pub fn endpoint(&self) -> &Path {
        &self.endpoint
    }

    /// Looks at everything that may be in the way, removes what killed instances left, and makes the plugin directory.
    fn clear(&self) -> Result<Vec<PathBuf>, SocketError> {
        let registrar = |source| SocketError::Registrar { path: self.registrar_dir.clone(), source };
        if !std::fs::metadata(&self.registrar_dir).map_err(registrar)?.is_dir() {
            return Err(registrar(Errno::ENOTDIR.into()));
        }
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o750)
            .create(&self.data_dir)
            .map_err(|source| SocketError::Directory { path: self.data_dir.clone(), source })?;
        clear_way(&self.registration)?;
        clear_way(&self.endpoint)?;

        let driver = self.driver.as_str();
        let mut swept =
            sweep(&self.registrar_dir, |name| of_pattern(name, driver, "@reg.sock") || of_temporary(name, driver));
        swept.extend(sweep(&self.data_dir, |name| of_pattern(name, "dra", "@npu.sock") || of_temporary(name, "dra")));
        Ok(swept)
    }

    /// Clears the way and makes both sockets. The DRA socket is there at once; kubelet does not see the registration
    /// socket before [`Socket::show`].
    pub(super) fn listen(&self) -> Result<Listening, SocketError> {
        for path in self.clear()? {
            tracing::info!(path = %path.display(), "removed a socket that a killed instance left");
        }
        let mut endpoint = listen(&self.data_dir.join(temporary("dra")), &self.endpoint)?;
        endpoint.1.show()?;
        let registration = listen(&self.registrar_dir.join(temporary(self.driver.as_str())), &self.registration)?;
        Ok(Listening { endpoint, registration })
    }
}

/// Both sockets, listening.
#[derive(Debug)]
pub(super) struct Listening {
    pub(super) endpoint: (UnixListener, Socket),
    pub(super) registration: (UnixListener, Socket),
}

/// A socket file of ours. Dropping it removes the file, if it is still ours.
#[derive(Debug)]
pub(super) struct Socket {
    path: PathBuf,
    wanted: PathBuf,
    identity: (u64, u64),
    /// Keeps the inode's number from being given to a successor's socket.
    _pin: OwnedFd,
}

impl Socket {
    /// Gives the socket its own name.
    pub(super) fn show(&mut self) -> Result<(), SocketError> {
        let failed = |source| SocketError::Listen { path: self.wanted.clone(), source };
        std::fs::hard_link(&self.path, &self.wanted).map_err(failed)?;
        let hidden = std::mem::replace(&mut self.path, self.wanted.clone());
        // The file that kubelet sees is in place. A hidden name that stays behind is swept at the next start.
        if let Err(error) = std::fs::remove_file(&hidden) {
            tracing::warn!(path = %hidden.display(), error = %error, "could not remove the socket's hidden name");
        }
        Ok(())
    }

    /// True while the file is there and ours.
    pub(super) fn is_in_place(&self) -> bool {
        identity(&self.path).is_ok_and(|found| found == self.identity)
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if self.is_in_place()
            && let Err(error) = std::fs::remove_file(&self.path)
        {
            tracing::warn!(path = %self.path.display(), error = %error, "could not remove the socket");
        }
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    std::fs::symlink_metadata(path).map(|metadata| (metadata.dev(), metadata.ino()))
}

/// Makes a socket with mode 0600 from its first moment, under a name that kubelet skips.
fn listen(hidden: &Path, wanted: &Path) -> Result<(UnixListener, Socket), SocketError> {
    let make = || -> nix::Result<UnixListener> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let fd = socket::socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
        // On Linux the file takes the mode of the unbound socket.
        fchmod(&fd, Mode::S_IRUSR | Mode::S_IWUSR)?;
        socket::bind(fd.as_raw_fd(), &UnixAddr::new(hidden)?)?;
        socket::listen(&fd, Backlog::new(BACKLOG)?)?;
        Ok(UnixListener::from(fd))
    };
    let failed = |source| SocketError::Listen { path: wanted.into(), source };
    let listener = make().map_err(|errno| failed(errno.into()))?;
    let identity = identity(hidden).map_err(failed)?;
    let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let pin = nix::fcntl::open(hidden, flags, Mode::empty()).map_err(|errno| failed(errno.into()))?;
    Ok((listener, Socket { path: hidden.into(), wanted: wanted.into(), identity, _pin: pin }))
}

/// Never longer than the name it stands for: a pid has at most seven digits.
fn temporary(stem: &str) -> String {
    format!(".{stem}-{}", std::process::id())
}

fn of_temporary(name: &str, stem: &str) -> bool {
    let pid = name.strip_prefix('.').and_then(|rest| rest.strip_prefix(stem)).and_then(|rest| rest.strip_prefix('-'));
    pid.is_some_and(|pid| !pid.is_empty() && pid.bytes().all(|byte| byte.is_ascii_digit()))
}

/// `<stem><end>` or `<stem>-<id><end>`.
fn of_pattern(name: &str, stem: &str, end: &str) -> bool {
    let id = name.strip_prefix(stem).and_then(|rest| rest.strip_suffix(end));
    id.is_some_and(|id| id.is_empty() || id.starts_with('-'))
}

/// Whether the path, percent-encoded as kubelet's client does it, is an authority to the HTTP/2 library.
fn speakable(path: &Path) -> bool {
    use std::fmt::Write as _;
    let Some(text) = path.to_str() else { return false };
    let mut authority = String::new();
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.~!$&'()*+,;=:[]@".contains(&byte) {
            authority.push(char::from(byte));
        } else {
            let _ = write!(authority, "%{byte:02X}");
        }
    }
    authority.parse::<http::uri::Authority>().is_ok()
}

/// What a connect says about a socket file.
enum Probe {
    Alive,
    Dead,
    Gone,
}

/// Connects without ever waiting.
fn probe(path: &Path) -> io::Result<Probe> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let fd = socket::socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    match socket::connect(fd.as_raw_fd(), &UnixAddr::new(path)?) {
        // A full queue of waiting connections has somebody at its end.
        Ok(()) | Err(Errno::EAGAIN | Errno::EINPROGRESS) => Ok(Probe::Alive),
        Err(Errno::ECONNREFUSED) => Ok(Probe::Dead),
        Err(Errno::ENOENT) => Ok(Probe::Gone),
        Err(errno) => Err(errno.into()),
    }
}

/// Removes a socket on which nobody listens; anything else at this path is an error.
fn clear_way(path: &Path) -> Result<(), SocketError> {
    let failed = |source| SocketError::Clear { path: path.into(), source };
    let kind = match std::fs::symlink_metadata(path) {
        Ok(metadata) => metadata.file_type(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed(error)),
    };
    if !kind.is_socket() {
        let kind = if kind.is_file() {
            "a regular file"
        } else if kind.is_dir() {
            "a directory"
        } else if kind.is_symlink() {
            if path.exists() { "a symbolic link" } else { "a dangling symbolic link" }
        } else {
            "a special file"
        };
        return Err(SocketError::Foreign { path: path.into(), kind });
    }
    match probe(path).map_err(failed)? {
        Probe::Alive => Err(SocketError::InUse { path: path.into() }),
        Probe::Gone => Ok(()),
        Probe::Dead => match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed(error)),
            _ => Ok(()),
        },
    }
}

/// Removes dead sockets with names of ours and returns them. What cannot be removed stays: it is in nobody's way.
fn sweep(dir: &Path, ours: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    entries
        .filter_map(Result::ok)
        .filter(|entry| entry.file_name().to_str().is_some_and(&ours))
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_socket()))
        .map(|entry| entry.path())
        .filter(|path| matches!(probe(path), Ok(Probe::Dead)) && std::fs::remove_file(path).is_ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt as _;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    const DRIVER: &str = "npu.huawei.com";

    fn directories() -> (tempfile::TempDir, PathBuf, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let registrar = dir.path().join("reg");
        std::fs::create_dir(&registrar).unwrap();
        let plugins = dir.path().join("plugins");
        (dir, registrar, plugins)
    }

    fn named(id: Option<&str>, registrar: &Path, plugins: &Path) -> Result<Sockets, SocketError> {
        let id = id.map(|id| InstanceId::new(id).unwrap());
        Sockets::new(&DriverName::new(DRIVER).unwrap(), id.as_ref(), registrar, plugins)
    }

    fn sockets(registrar: &Path, plugins: &Path) -> Sockets {
        named(None, registrar, plugins).unwrap()
    }

    /// A socket file without a listener, as SIGKILL leaves it.
    fn dead(path: &Path) {
        drop(UnixListener::bind(path).unwrap());
        assert!(path.exists());
    }

    #[test]
    fn the_names_hold_the_at_sign_and_the_instance() {
        let (registrar, plugins) =
            (Path::new("/var/lib/kubelet/plugins_registry"), Path::new("/var/lib/kubelet/plugins"));
        let one = sockets(registrar, plugins);
        assert_eq!(one.registration(), Path::new("/var/lib/kubelet/plugins_registry/npu.huawei.com@reg.sock"));
        assert_eq!(one.endpoint(), Path::new("/var/lib/kubelet/plugins/npu.huawei.com/dra@npu.sock"));
        let other = named(Some("a1"), registrar, plugins).unwrap();
        assert_eq!(other.registration(), Path::new("/var/lib/kubelet/plugins_registry/npu.huawei.com-a1@reg.sock"));
        assert_eq!(other.endpoint(), Path::new("/var/lib/kubelet/plugins/npu.huawei.com/dra-a1@npu.sock"));
    }

    #[test]
    fn a_path_of_107_bytes_is_served_and_one_of_108_is_refused_with_the_number() {
        let (dir, ..) = directories();
        let file = "/npu.huawei.com@reg.sock".len();
        let long = |length: usize| {
            let padding = length - file - dir.path().as_os_str().len() - 1;
            dir.path().join("r".repeat(padding))
        };
        let registrar = long(107);
        std::fs::create_dir(&registrar).unwrap();
        let sockets = sockets(&registrar, &dir.path().join("p"));
        assert_eq!(sockets.registration().as_os_str().len(), 107);
        let mut listening = sockets.listen().unwrap();
        listening.registration.1.show().unwrap();
        assert!(matches!(probe(sockets.registration()), Ok(Probe::Alive)));

        let error = named(None, &long(108), &dir.path().join("p")).unwrap_err().to_string();
        assert!(error.contains("108 bytes") && error.contains("107"), "{error}");
    }

    #[test]
    fn directories_are_absolute_and_may_hold_odd_characters() {
        let plugins = Path::new("/plugins");
        assert!(matches!(named(None, Path::new("reg"), plugins), Err(SocketError::Relative { .. })));
        for odd in ["/odd dir", "/a@b", "/a:b:c", "/ä%"] {
            named(None, Path::new(odd), plugins).unwrap();
        }
        let bytes = std::ffi::OsStr::from_bytes(b"/\xff");
        assert!(matches!(named(None, Path::new(bytes), plugins), Err(SocketError::Unspeakable { .. })));
    }

    #[test]
    fn a_stale_socket_is_replaced_and_a_served_one_is_not() {
        let (_dir, registrar, plugins) = directories();
        let sockets = sockets(&registrar, &plugins);
        sockets.clear().unwrap();
        dead(sockets.registration());
        dead(sockets.endpoint());
        sockets.clear().unwrap();
        assert!(!sockets.registration().exists() && !sockets.endpoint().exists());

        let _listening = sockets.listen().unwrap();
        let error = sockets.clear().unwrap_err();
        assert!(matches!(&error, SocketError::InUse { path } if path == sockets.endpoint()), "{error}");
        assert!(sockets.endpoint().exists());
    }

    #[test]
    fn what_is_no_socket_is_left_alone_and_named() {
        let (dir, registrar, plugins) = directories();
        let sockets = sockets(&registrar, &plugins);
        let path = sockets.registration();
        std::fs::write(path, "precious").unwrap();
        assert!(sockets.clear().unwrap_err().to_string().contains("is a regular file"));
        assert_eq!(std::fs::read(path).unwrap(), b"precious");
        std::fs::remove_file(path).unwrap();

        symlink(dir.path().join("nowhere"), path).unwrap();
        assert!(sockets.clear().unwrap_err().to_string().contains("a dangling symbolic link"));
        assert!(path.is_symlink());
        std::fs::remove_file(path).unwrap();

        std::fs::create_dir(path).unwrap();
        assert!(sockets.clear().unwrap_err().to_string().contains("is a directory"));
    }

    #[test]
    fn left_overs_of_killed_instances_are_swept_and_nothing_else_is() {
        let (_dir, registrar, plugins) = directories();
        let sockets = sockets(&registrar, &plugins);
        sockets.clear().unwrap();
        let plugin = plugins.join(DRIVER);
        let ours = [
            registrar.join("npu.huawei.com-old@reg.sock"),
            registrar.join(".npu.huawei.com-4194304"),
            plugin.join("dra-old@npu.sock"),
            plugin.join(".dra-77"),
        ];
        let others = [
            registrar.join("other.example@reg.sock"),
            registrar.join("npu.huawei.com-reg.sock"),
            registrar.join("npu.huawei.company@reg.sock"),
            plugin.join("monitor.sock"),
        ];
        ours.iter().chain(&others).for_each(|path| dead(path));
        let alive = registrar.join("npu.huawei.com-new@reg.sock");
        let _alive = UnixListener::bind(&alive).unwrap();
        let file = registrar.join("npu.huawei.com-file@reg.sock");
        std::fs::write(&file, "").unwrap();

        let mut swept = sockets.clear().unwrap();
        swept.sort();
        let mut expected = ours.to_vec();
        expected.sort();
        assert_eq!(swept, expected);
        assert!(others.iter().chain([&alive, &file]).all(|path| path.exists()));
    }

    #[test]
    fn a_socket_is_private_shown_once_it_listens_and_removed_only_while_it_is_ours() {
        let (_dir, registrar, plugins) = directories();
        let sockets = sockets(&registrar, &plugins);
        let mut listening = sockets.listen().unwrap();
        assert!(!sockets.registration().exists());
        listening.registration.1.show().unwrap();
        for path in [sockets.registration(), sockets.endpoint()] {
            assert_eq!(std::fs::metadata(path).unwrap().permissions().mode() & 0o7777, 0o600);
            assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
        }
        drop(listening);
        assert!(!sockets.registration().exists() && !sockets.endpoint().exists());

        let mut listening = sockets.listen().unwrap();
        listening.registration.1.show().unwrap();
        assert!(listening.registration.1.is_in_place());
        std::fs::remove_file(sockets.registration()).unwrap();
        let _successor = UnixListener::bind(sockets.registration()).unwrap();
        assert!(!listening.registration.1.is_in_place());
        drop(listening);
        assert!(sockets.registration().exists(), "the successor's socket was removed");
    }

    #[test]
    fn a_missing_registration_directory_says_what_to_do() {
        let (dir, _, plugins) = directories();
        let sockets = sockets(&dir.path().join("nowhere"), &plugins);
        let error = sockets.clear().unwrap_err();
        assert!(error.to_string().contains("--kubelet-registrar-directory-path"), "{error}");
    }
}

//! The admin socket: bound by us, or adopted from systemd.

use std::{
    io,
    os::unix::{
        fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _},
        net::{UnixListener as StdListener, UnixStream},
    },
    path::{Path, PathBuf},
};

use nix::{
    errno::Errno,
    unistd::{Gid, Group},
};
use tokio::net::UnixListener;

use super::peer::Readers;
use crate::domain::names::SOCKET_PATH_MAX;

/// Why there is no admin socket. Nothing is left behind.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// The kernel takes no longer path.
    #[error("admin socket path {} has {length} bytes and the limit is {SOCKET_PATH_MAX}: choose a shorter one", path.display())]
    TooLong {
        /// The path.
        path: PathBuf,
        /// Its length in bytes.
        length: usize,
    },
    /// Something that is no socket bears the name.
    #[error("{} is in the way of the admin socket and is no socket: find out whose it is, then remove it", path.display())]
    Foreign {
        /// The path.
        path: PathBuf,
    },
    /// Somebody listens there.
    #[error("another process serves the admin socket {}: stop it, or choose another path", path.display())]
    InUse {
        /// The path.
        path: PathBuf,
    },
    /// Anything else that went wrong on the way.
    #[error("cannot {what} admin socket {}", path.display())]
    Failed {
        /// Which step.
        what: &'static str,
        /// The path.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// A listening admin socket. One that we bound is removed when this is dropped.
#[derive(Debug)]
pub struct Socket {
    pub(super) listener: UnixListener,
    own: Option<Own>,
}

/// The file that we made; another one under its name is not ours to remove.
#[derive(Debug)]
struct Own {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl Drop for Own {
    fn drop(&mut self) {
        let is_ours = std::fs::symlink_metadata(&self.path)
            .is_ok_and(|file| file.dev() == self.device && file.ino() == self.inode);
        if is_ours && let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "the admin socket was not removed");
        }
    }
}

impl Socket {
    /// Listens on `path` with permission bits `mode`, owned by group `readers` where there is one.
    ///
    /// A dead socket of an earlier run is replaced; a living one, and anything that is no socket, is left alone. To be
    /// called from within a tokio runtime.
    ///
    /// # Errors
    /// The path is too long or taken, or the file system refuses.
    pub fn bind(path: &Path, mode: u32, readers: Option<&Readers>) -> Result<Self, SocketError> {
        let length = path.as_os_str().len();
        if length > SOCKET_PATH_MAX {
            return Err(SocketError::TooLong { path: path.to_owned(), length });
        }
        let failed = |what| move |source| SocketError::Failed { what, path: path.to_owned(), source };
        if let Some(directory) = path.parent().filter(|directory| !directory.as_os_str().is_empty()) {
            std::fs::create_dir_all(directory).map_err(failed("make the directory of"))?;
        }
        clear(path)?;
        let listener = StdListener::bind(path).map_err(|source| match source.kind() {
            io::ErrorKind::AddrInUse => SocketError::InUse { path: path.to_owned() },
            _ => failed("bind")(source),
        })?;
        let file = std::fs::symlink_metadata(path).map_err(failed("look at"))?;
        let own = Own { path: path.to_owned(), device: file.dev(), inode: file.ino() };
        // Whoever connects before the next two lines is judged by credentials like everybody else.
        if let Some(readers) = readers {
            match nix::unistd::chown(path, None, Some(Gid::from_raw(readers.gid))) {
                Ok(()) => {}
                // Run by hand by somebody who is neither root nor a member: then the socket is for that user alone.
                Err(Errno::EPERM) => {
                    tracing::warn!(group = readers.name, "the admin socket cannot be given to the group");
                }
                Err(errno) => return Err(failed("give the group to")(errno.into())),
            }
        }
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).map_err(failed("set the mode of"))?;
        Ok(Self { listener: listen(listener).map_err(failed("listen on"))?, own: Some(own) })
    }

    /// Takes a socket that systemd made and will remove. To be called from within a tokio runtime.
    ///
    /// # Errors
    /// It cannot be made non-blocking.
    pub fn adopt(listener: StdListener) -> io::Result<Self> {
        Ok(Self { listener: listen(listener)?, own: None })
    }

    /// Where the socket is, if we bound it.
    pub fn path(&self) -> Option<&Path> {
        self.own.as_ref().map(|own| own.path.as_path())
    }

    pub(super) fn into_parts(self) -> (UnixListener, impl Send + Sync) {
        (self.listener, self.own)
    }
}

impl Readers {
    /// Looks up the group of that name; `None` if the node has no such group.
    ///
    /// # Errors
    /// The user database cannot be read.
    pub fn of_group(name: &str) -> io::Result<Option<Self>> {
        let group = Group::from_name(name)?;
        Ok(group.map(|group| Self { name: name.to_owned(), gid: group.gid.as_raw() }))
    }
}

fn listen(listener: StdListener) -> io::Result<UnixListener> {
    listener.set_nonblocking(true)?;
    UnixListener::from_std(listener)
}

/// Removes a dead socket.
fn clear(path: &Path) -> Result<(), SocketError> {
    let failed = |what| move |source| SocketError::Failed { what, path: path.to_owned(), source };
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed("look at")(error)),
        Ok(file) if !file.file_type().is_socket() => return Err(SocketError::Foreign { path: path.to_owned() }),
        Ok(_) => {}
    }
    match UnixStream::connect(path) {
        Ok(_) => Err(SocketError::InUse { path: path.to_owned() }),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path).map_err(failed("remove the dead"))
        }
        Err(error) => Err(failed("find out who serves")(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        std::fs::metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[tokio::test]
    async fn a_socket_has_its_mode_and_is_removed_at_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/admin.sock");
        let socket = Socket::bind(&path, 0o660, None).unwrap();
        assert_eq!(mode(&path), 0o660);
        assert_eq!(socket.path(), Some(path.as_path()));
        drop(socket);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn a_socket_is_given_to_its_group() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("admin.sock");
        let gid = nix::unistd::getgid().as_raw();
        let _socket = Socket::bind(&path, 0o660, Some(&Readers { name: "own".to_owned(), gid })).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().gid(), gid);
    }

    #[tokio::test]
    async fn a_dead_socket_is_replaced_and_a_living_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("admin.sock");
        drop(StdListener::bind(&path).unwrap());
        assert!(path.exists());
        let socket = Socket::bind(&path, 0o600, None).unwrap();
        assert!(matches!(Socket::bind(&path, 0o600, None), Err(SocketError::InUse { .. })));
        assert!(path.exists());
        drop(socket);
    }

    #[tokio::test]
    async fn a_file_in_the_way_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("admin.sock");
        std::fs::write(&path, "mine").unwrap();
        assert!(matches!(Socket::bind(&path, 0o600, None), Err(SocketError::Foreign { .. })));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "mine");
    }

    #[tokio::test]
    async fn a_path_of_108_bytes_is_refused() {
        let path = PathBuf::from(format!("/{}", "x".repeat(107)));
        assert!(matches!(Socket::bind(&path, 0o600, None), Err(SocketError::TooLong { length: 108, .. })));
    }

    #[tokio::test]
    async fn an_adopted_socket_stays_and_so_does_one_that_replaced_ours() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("admin.sock");
        let adopted = Socket::adopt(StdListener::bind(&path).unwrap()).unwrap();
        assert_eq!(adopted.path(), None);
        drop(adopted);
        assert!(path.exists());
        let ours = Socket::bind(&path, 0o600, None).unwrap();
        // Both exist at once, so that the second cannot have the inode of the first.
        let other = dir.path().join("other.sock");
        let replaced = StdListener::bind(&other).unwrap();
        std::fs::rename(&other, &path).unwrap();
        drop(ours);
        assert!(path.exists());
        drop(replaced);
    }

    #[test]
    fn a_group_that_does_not_exist_is_none() {
        assert_eq!(Readers::of_group("no-such-group-here").unwrap(), None);
    }
}

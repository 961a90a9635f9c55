//! Files that are replaced whole and durably: the ground that [`store`](crate::store) and [`cdi`](crate::cdi) share,
//! one step below both.
//!
//! A replace is: temporary file in the same directory, fsync, rename, fsync of the directory. A crash at any point
//! leaves the old content or the new one. [`put`] and [`remove`] leave out the last step, so that one [`sync_dir`]
//! serves several of them: every process sees them done, a power cut may undo them until then. Temporary names begin
//! with `.` and end in `.tmp`, so that neither a reader of records nor a container runtime takes one for a file.

use std::{
    ffi::OsStr,
    fs::{self, DirBuilder, File, OpenOptions, Permissions},
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use nix::fcntl::OFlag;

/// An act on the file system that failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}: {cause}{}", path.display(), advice(cause))]
pub struct DiskError {
    /// What was tried: `write`, `create directory`, …
    pub action: &'static str,
    /// On which path.
    pub path: PathBuf,
    /// Why it failed.
    pub cause: io::Error,
}

impl DiskError {
    /// For `map_err`.
    pub fn at(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        move |cause| Self { action, path: path.into(), cause }
    }
}

fn advice(cause: &io::Error) -> &'static str {
    match cause.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "; free some space there",
        io::ErrorKind::ReadOnlyFilesystem => "; remount it writable, or name another directory",
        _ => "",
    }
}

/// True for the name of a temporary file of ours.
#[must_use]
pub fn is_temporary(name: &OsStr) -> bool {
    let bytes = name.as_encoded_bytes();
    bytes.starts_with(b".") && bytes.ends_with(b".tmp")
}

/// Replaces a file whole, with this mode whatever the umask says. When it returns every process finds the new content;
/// a power cut leaves the old content or the new one, and the new one for certain once [`sync_dir`] was called.
///
/// After an error the temporary file is gone and the old content stays.
pub fn put(path: &Path, contents: &[u8], mode: u32) -> Result<(), DiskError> {
    let (dir, name) = parts(path)?;
    let temporary = dir.join(temporary_name(name));
    write_new(&temporary, contents, mode)
        .map_err(DiskError::at("write", path))
        .and_then(|()| fs::rename(&temporary, path).map_err(DiskError::at("replace", path)))
        .inspect_err(|_| {
            // The sweep at the next start takes what cannot be removed now.
            let _ = fs::remove_file(&temporary);
        })
}

/// As [`put`], and when it returns the new content is durable.
///
/// After an error the old content stays; only if the very last step (fsync of the directory) failed may an existing
/// file have its new content already. A file that did not exist does not exist then.
pub fn replace(path: &Path, contents: &[u8], mode: u32) -> Result<(), DiskError> {
    let (dir, _) = parts(path)?;
    let existed = path.symlink_metadata().is_ok();
    put(path, contents, mode)?;
    sync_dir(dir).inspect_err(|_| {
        if !existed {
            let _ = fs::remove_file(path);
        }
    })
}

/// Removes a file; true if it was there. A power cut may bring it back until [`sync_dir`] was called.
pub fn remove(path: &Path) -> Result<bool, DiskError> {
    match fs::remove_file(path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(DiskError::at("remove", path)(error)),
    }
}

/// Makes renames and removals in a directory durable.
pub fn sync_dir(dir: &Path) -> Result<(), DiskError> {
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(DiskError::at("make durable", dir))
}

/// Creates a directory with this mode if it is absent, its parents with 0755.
pub fn create_dir(dir: &Path, mode: u32) -> Result<(), DiskError> {
    let failed = || DiskError::at("create directory", dir);
    if dir.is_dir() {
        return Ok(());
    }
    let parent = dir.parent().filter(|parent| !parent.as_os_str().is_empty());
    if let Some(parent) = parent {
        DirBuilder::new().recursive(true).mode(0o755).create(parent).map_err(failed())?;
    }
    match DirBuilder::new().mode(mode).create(dir) {
        Ok(()) => {
            fs::set_permissions(dir, Permissions::from_mode(mode)).map_err(failed())?;
            sync_dir(parent.unwrap_or(Path::new(".")))
        }
        // Somebody else was faster; a file in its place is an error.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && dir.is_dir() => Ok(()),
        Err(error) => Err(failed()(error)),
    }
}

/// Reads a regular file of at most `most` bytes. Follows no link in the last component and never blocks on a pipe.
pub fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(flags.bits()).open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::other(if metadata.is_dir() { "is a directory" } else { "is not a regular file" }));
    }
    if metadata.len() > most {
        return Err(io::Error::other(format!("is {} bytes long, more than {most}", metadata.len())));
    }
    let mut bytes = Vec::with_capacity(usize::try_from(metadata.len()).unwrap_or(0));
    file.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Removes the temporary files that a crash left in a directory, those whose target's name passes `ours`.
///
/// To be called only by the one owner of the files: a write in flight would lose its temporary file.
pub fn sweep(dir: &Path, ours: impl Fn(&str) -> bool) -> Result<(), DiskError> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(DiskError::at("list", dir)(error)),
    };
    for entry in entries {
        let name = entry.map_err(DiskError::at("list", dir))?.file_name();
        if is_temporary(&name) && name.to_str().is_some_and(|name| ours(&name[1..])) {
            let path = dir.join(&name);
            fs::remove_file(&path).map_err(DiskError::at("remove", path))?;
        }
    }
    Ok(())
}

fn parts(path: &Path) -> Result<(&Path, &OsStr), DiskError> {
    match (path.parent(), path.file_name()) {
        (Some(dir), Some(name)) if !dir.as_os_str().is_empty() => Ok((dir, name)),
        _ => Err(DiskError::at("use", path)(io::Error::from(io::ErrorKind::InvalidInput))),
    }
}

fn temporary_name(name: &OsStr) -> std::ffi::OsString {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let mut out = OsStr::new(".").to_owned();
    out.push(name);
    out.push(format!(".{}-{number}.tmp", std::process::id()));
    out
}

fn write_new(path: &Path, contents: &[u8], mode: u32) -> io::Result<()> {
    // A leftover of a dead process that had our id (in a container every daemon is process 1) is overwritten.
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(mode)
        .custom_flags(OFlag::O_NOFOLLOW.bits())
        .open(path)?;
    file.set_permissions(Permissions::from_mode(mode))?;
    file.write_all(contents)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_replace_leaves_the_new_content_its_mode_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        for content in ["one", "longer content", ""] {
            replace(&path, content.as_bytes(), 0o644).unwrap();
            assert_eq!(read(&path, 100).unwrap(), content.as_bytes());
        }
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o644);
        assert_eq!(names(dir.path()), ["a.json"]);
    }

    #[test]
    fn what_is_put_or_removed_is_seen_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        put(&path, b"one", 0o600).unwrap();
        put(&path, b"two", 0o640).unwrap();
        assert_eq!(read(&path, 100).unwrap(), b"two");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o640);
        assert_eq!(names(dir.path()), ["a.json"]);
        assert!(remove(&path).unwrap());
        assert!(!remove(&path).unwrap());
        assert!(names(dir.path()).is_empty());
    }

    #[test]
    fn a_failed_replace_names_path_and_cause_and_leaves_no_temporary_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        fs::create_dir(&path).unwrap();
        let error = replace(&path, b"x", 0o600).unwrap_err();
        assert!(error.to_string().starts_with(&format!("cannot replace {}: ", path.display())), "{error}");
        assert_eq!(names(dir.path()), ["a.json"]);
        let error = replace(&dir.path().join("absent/a.json"), b"x", 0o600).unwrap_err();
        assert_eq!(error.cause.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_read_refuses_what_is_no_regular_file() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("long"), [0; 11]).unwrap();
        std::os::unix::fs::symlink(at("long"), at("link")).unwrap();
        nix::unistd::mkfifo(&at("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(read(&at("long"), 11).is_ok());
        assert_eq!(read(&at("long"), 10).unwrap_err().to_string(), "is 11 bytes long, more than 10");
        assert_eq!(read(dir.path(), 10).unwrap_err().to_string(), "is a directory");
        assert_eq!(read(&at("pipe"), 10).unwrap_err().to_string(), "is not a regular file");
        assert!(read(&at("link"), 100).unwrap_err().to_string().contains("symbolic link"));
    }

    #[test]
    fn a_sweep_takes_only_temporary_files_of_ours() {
        let dir = tempfile::tempdir().unwrap();
        for name in [".ours.json.1-2.tmp", ".other.1-2.tmp", "ours.tmp", ".ours.json"] {
            fs::write(dir.path().join(name), "").unwrap();
        }
        sweep(dir.path(), |name| name.starts_with("ours")).unwrap();
        assert_eq!(names(dir.path()), [".other.1-2.tmp", ".ours.json", "ours.tmp"]);
        sweep(&dir.path().join("absent"), |_| true).unwrap();
    }

    #[test]
    fn a_directory_is_created_with_its_mode_and_a_file_in_its_place_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let made = dir.path().join("a/b");
        create_dir(&made, 0o700).unwrap();
        create_dir(&made, 0o700).unwrap();
        assert_eq!(fs::metadata(&made).unwrap().permissions().mode() & 0o7777, 0o700);
        fs::write(dir.path().join("file"), "").unwrap();
        let error = create_dir(&dir.path().join("file"), 0o755).unwrap_err();
        assert!(error.to_string().contains("cannot create directory"), "{error}");
        assert!(create_dir(&dir.path().join("file/below"), 0o755).is_err());
    }
}

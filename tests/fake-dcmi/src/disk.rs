//! Files of a world: read with a stamp, replaced atomically.

use std::fs::{self, File, Metadata};
use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Why a world cannot be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum WorldError {
    /// A file operation failed.
    #[error("cannot use {path} of the simulated node: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file is not what it should be.
    #[error("cannot read {path} of the simulated node: {source}; correct it or create the world again")]
    Parse {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// There is no such chip.
    #[error("the simulated node has no chip with physical id {0}")]
    NoChip(u32),
    /// There is no such vNPU.
    #[error("the simulated node has no vnpu {0}")]
    NoVnpu(u32),
    /// The simulated library would refuse this.
    #[error("the simulated library refuses this with {0}")]
    Refused(i32),
}

/// Adds the path to an I/O error.
pub(crate) fn at(path: &Path) -> impl FnOnce(std::io::Error) -> WorldError {
    |source| WorldError::Io { path: path.to_owned(), source }
}

/// Identity of one version of a file. Writers make the time strictly grow, so equal stamps mean equal content.
pub(crate) type Stamp = (SystemTime, u64, u64);

fn stamp(metadata: &Metadata) -> Stamp {
    (metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH), metadata.ino(), metadata.len())
}

/// The stamp of the file as it is now; none if it does not exist.
pub(crate) fn current(path: &Path) -> Result<Option<Stamp>, WorldError> {
    match fs::metadata(path) {
        Ok(metadata) => Ok(Some(stamp(&metadata))),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(at(path)(error)),
    }
}

/// Reads a JSON file.
pub(crate) fn load<T: DeserializeOwned>(path: &Path) -> Result<T, WorldError> {
    let text = fs::read(path).map_err(at(path))?;
    serde_json::from_slice(&text).map_err(|source| WorldError::Parse { path: path.to_owned(), source })
}

/// Replaces a file. The caller holds the world's lock.
pub(crate) fn replace(path: &Path, content: &[u8]) -> Result<(), WorldError> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let temp = path.with_extension(format!("{}-{}.tmp", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
    let before = fs::metadata(path).and_then(|metadata| metadata.modified()).ok();
    let now = SystemTime::now();
    let time = before.map_or(now, |before| now.max(before + Duration::from_micros(1)));
    let mut file = File::create(&temp).map_err(at(&temp))?;
    file.write_all(content).map_err(at(&temp))?;
    file.set_modified(time).map_err(at(&temp))?;
    fs::rename(&temp, path).map_err(at(path))
}

/// Replaces a JSON file. The caller holds the world's lock.
pub(crate) fn save<T: Serialize>(path: &Path, value: &T) -> Result<(), WorldError> {
    let text =
        serde_json::to_vec_pretty(value).map_err(|source| WorldError::Parse { path: path.to_owned(), source })?;
    replace(path, &text)
}

/// Opens a lock file.
pub(crate) fn lock_file(path: &Path) -> Result<File, WorldError> {
    File::options().create(true).truncate(false).write(true).open(path).map_err(at(path))
}

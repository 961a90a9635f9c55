//! Claim records and the node's memory on disk.
//!
//! ```text
//! <state dir>/lock                   flock of the one owner, with its process id
//! <state dir>/node.json              device names by stable id
//! <state dir>/claims/<uid>.json      one record a claim
//! <state dir>/quarantine/<uid>.json  a damaged record, kept for people; its claim stays held
//! <state dir>/node.json.damaged      a damaged node.json, kept for people
//! ```
//!
//! A write replaces one file, whatever the number of claims. What is written or removed of records is seen by every
//! process at once and durable once [`Store::settle`] has returned; `node.json` is durable when it is written.
//! Everything here blocks: callers use a pool of threads. Calls for different claims may run at the same time; for one
//! claim the caller orders them.

mod envelope;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
};

use crate::{
    disk::{self, DiskError},
    domain::{
        claim::ClaimUid,
        node::NodeMemory,
        record::{Quarantined, Record},
    },
};
use envelope::{Unreadable, decode, encode};

/// Longest file that is read, in bytes: a record of 32 devices is about 20 KiB, a `node.json` of 64 cards too.
const FILE_MAX: u64 = 4 << 20;
/// How often a held lock is tried again.
const LOCK_POLL: Duration = Duration::from_millis(50);
/// Field by which the devices of a record are told apart.
const RECORD_IDENTITY: &str = "cdiDevice";
/// Field by which the cards of the node's memory are told apart.
const NODE_IDENTITY: &str = "stableId";

/// Why the state directory could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Another process owns it.
    #[error("state directory {} is in use by {owner}: stop that one, or give this one a state directory of its own", dir.display())]
    Locked {
        /// The state directory.
        dir: PathBuf,
        /// `process <pid>`, as the owner wrote it into the lock file.
        owner: String,
    },
    /// It cannot be created, or not be locked.
    #[error(transparent)]
    Disk(#[from] DiskError),
}

/// Why the state could not be loaded. A damaged file is no reason: it is set aside.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// A newer version wrote here; this one would lose what it does not understand.
    #[error(
        "{} has format {format}, written by {writer}; this version reads up to format {}: install {writer} again, or \
         remove the file to forget {}",
        path.display(),
        envelope::FORMAT,
        if path.ends_with("node.json") { "the names, faults and holds of the cards" } else { "the claim" }
    )]
    Newer {
        /// Which file.
        path: PathBuf,
        /// Its format.
        format: u32,
        /// Version that wrote it.
        writer: String,
    },
    /// The directory cannot be read.
    #[error(transparent)]
    Disk(#[from] DiskError),
}

/// Why something could not be stored.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The disk refused.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// It cannot be put into JSON.
    #[error("cannot encode {what}: {cause}")]
    Encode {
        /// What: a claim's UID, or `node.json`.
        what: String,
        /// Why.
        cause: serde_json::Error,
    },
}

/// All that is on disk.
#[derive(Debug, Default)]
pub struct Loaded {
    /// Sound records, by UID.
    pub records: Vec<Record>,
    /// Claims whose records are damaged, by UID. Not one of them is among the records.
    pub quarantined: Vec<Quarantined>,
    /// The node's memory; where `node.json` is absent or damaged, what the records tell of it.
    pub node: NodeMemory,
    /// What was wrong with `node.json`, and where it was put; told as long as it is there.
    pub node_problem: Option<String>,
    /// Files in the directory of records that cannot be anybody's: no UID could have that name. Left alone.
    pub strangers: Vec<PathBuf>,
}

/// The state directory, owned until it is dropped.
#[derive(Debug)]
pub struct Store {
    paths: Paths,
    lock: Flock<File>,
}

impl Store {
    /// Creates the state directory (0700) if it is absent, and takes its lock; with `wait` tries for so long.
    pub fn open(dir: impl Into<PathBuf>, wait: Option<Duration>) -> Result<Self, OpenError> {
        let paths = Paths { dir: dir.into() };
        disk::create_dir(&paths.dir, 0o700)?;
        let lock = take_lock(&paths, wait)?;
        for dir in [paths.claims(), paths.quarantine()] {
            disk::create_dir(&dir, 0o700)?;
        }
        Ok(Self { paths, lock })
    }

    /// Reads everything, sweeps temporary files that a crash left, and sets damaged files aside.
    ///
    /// A damaged `node.json` does not stop the start: names of cards that are held come from the records, the others
    /// are given anew. A file of a newer format does, before anything was changed.
    pub fn load(&self) -> Result<Loaded, LoadError> {
        let paths = &self.paths;
        for dir in [&paths.dir, &paths.claims(), &paths.quarantine()] {
            // On a directory that cannot be written the leftovers do no harm.
            if let Err(error) = disk::sweep(dir, |_| true) {
                tracing::warn!(%error, "a temporary file was left");
            }
        }
        let mut scan = Scan::of(paths)?;
        for (uid, bad) in &mut scan.bad {
            let aside = paths.quarantined(uid);
            if bad.path == aside {
                continue;
            }
            match set_aside(&bad.path, &aside) {
                Ok(()) => bad.path = aside,
                Err(error) => tracing::warn!(%error, claim.uid = %uid, "a damaged record stays where it is"),
            }
        }
        if let Some(why) = &mut scan.node_problem {
            let aside = paths.damaged_node();
            match set_aside(&paths.node(), &aside) {
                Ok(()) => *why = format!("{why}; it was moved to {}", aside.display()),
                Err(error) => tracing::warn!(%error, "a damaged node.json stays where it is"),
            }
        } else if paths.damaged_node().exists() {
            scan.node_problem =
                Some(format!("node.json was damaged once; it is in {}", paths.damaged_node().display()));
        }
        for uid in scan.good.keys().filter(|uid| scan.aside.contains(*uid)) {
            // The record was rewritten, and a crash came before its damaged one was removed.
            remove_any(&paths.quarantined(uid))?;
        }
        // What was read may be the last act of a process that died before it was durable.
        for dir in [&paths.dir, &paths.claims(), &paths.quarantine()] {
            disk::sync_dir(dir)?;
        }
        Ok(scan.into_loaded())
    }

    /// Reads everything and changes nothing, without a lock: for people, while the daemon is down.
    pub fn read_only(dir: impl Into<PathBuf>) -> Result<Loaded, LoadError> {
        let paths = Paths { dir: dir.into() };
        fs::metadata(&paths.dir).map_err(DiskError::at("read", &paths.dir))?;
        Ok(Scan::of(&paths)?.into_loaded())
    }

    /// Stores the record of a claim, durably after [`settle`](Self::settle); a damaged record of the same claim is
    /// thrown away.
    ///
    /// After an error the old record stays, or there is none if there was none; see [`disk::put`].
    pub fn write(&self, record: &Record) -> Result<(), WriteError> {
        let uid = &record.claim.uid;
        let path = self.paths.record(uid);
        let bytes = renewed(record, &path, RECORD_IDENTITY).map_err(encoding(uid))?;
        let damaged = self.paths.quarantined(uid);
        if damaged.symlink_metadata().is_err() {
            return Ok(disk::put(&path, &bytes, 0o600)?);
        }
        // Once the record is durable it wins over the damaged one, which the next load removes if this cannot.
        disk::replace(&path, &bytes, 0o600)?;
        if let Err(error) = remove_any(&damaged) {
            tracing::warn!(%error, claim.uid = %uid, "a damaged record was left beside its new one");
        }
        Ok(())
    }

    /// Removes the record of a claim, durably after [`settle`](Self::settle), and its damaged one. Success also if
    /// there is none.
    pub fn remove(&self, uid: &ClaimUid) -> Result<(), DiskError> {
        // In this order a crash between the two leaves the record, never a damaged one alone.
        if remove_any(&self.paths.quarantined(uid))? {
            disk::sync_dir(&self.paths.quarantine())?;
        }
        remove_any(&self.paths.record(uid)).map(drop)
    }

    /// Makes all that was written and removed of records durable, whoever did it.
    pub fn settle(&self) -> Result<(), DiskError> {
        disk::sync_dir(&self.paths.claims())
    }

    /// Stores the node's memory.
    pub fn write_node(&self, node: &NodeMemory) -> Result<(), WriteError> {
        let path = self.paths.node();
        let bytes = renewed(node, &path, NODE_IDENTITY).map_err(encoding("node.json"))?;
        Ok(disk::replace(&path, &bytes, 0o600)?)
    }

    /// The state directory.
    pub fn dir(&self) -> &Path {
        &self.paths.dir
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // Nobody shall be told of a process that is gone. The lock itself ends with its file.
        let _ = self.lock.set_len(0);
    }
}

#[derive(Debug)]
struct Paths {
    dir: PathBuf,
}

impl Paths {
    fn claims(&self) -> PathBuf {
        self.dir.join("claims")
    }

    fn quarantine(&self) -> PathBuf {
        self.dir.join("quarantine")
    }

    fn record(&self, uid: &ClaimUid) -> PathBuf {
        self.claims().join(format!("{uid}.json"))
    }

    fn quarantined(&self, uid: &ClaimUid) -> PathBuf {
        self.quarantine().join(format!("{uid}.json"))
    }

    fn node(&self) -> PathBuf {
        self.dir.join("node.json")
    }

    fn damaged_node(&self) -> PathBuf {
        self.dir.join("node.json.damaged")
    }

    fn lock(&self) -> PathBuf {
        self.dir.join("lock")
    }
}

fn take_lock(paths: &Paths, wait: Option<Duration>) -> Result<Flock<File>, OpenError> {
    let path = paths.lock();
    let until = Instant::now() + wait.unwrap_or_default();
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path)
        .map_err(DiskError::at("open", &path))?;
    loop {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => {
                // On a full disk we still can release claims, which frees space: the number is only for people.
                let noted =
                    lock.set_len(0).and_then(|()| (&*lock).write_all(std::process::id().to_string().as_bytes()));
                if let Err(error) = noted {
                    tracing::warn!(%error, path = %path.display(), "the process id could not be written");
                }
                return Ok(lock);
            }
            Err((back, Errno::EWOULDBLOCK)) if Instant::now() < until => {
                file = back;
                std::thread::sleep(LOCK_POLL);
            }
            Err((_, Errno::EWOULDBLOCK)) => {
                let pid = disk::read(&path, 64).ok().and_then(|bytes| String::from_utf8(bytes).ok());
                let pid = pid.map(|pid| pid.trim().to_owned()).filter(|pid| !pid.is_empty());
                let owner = pid.map_or_else(|| "another process".to_owned(), |pid| format!("process {pid}"));
                return Err(OpenError::Locked { dir: paths.dir.clone(), owner });
            }
            Err((_, errno)) => return Err(DiskError::at("lock", &path)(errno.into()).into()),
        }
    }
}

/// The bytes that replace a file.
fn renewed<T>(body: &T, path: &Path, identity: &str) -> serde_json::Result<Vec<u8>>
where
    T: serde::Serialize + serde::de::DeserializeOwned,
{
    encode(body, disk::read(path, FILE_MAX).ok().as_deref(), identity)
}

fn encoding(what: impl ToString) -> impl FnOnce(serde_json::Error) -> WriteError {
    move |cause| WriteError::Encode { what: what.to_string(), cause }
}

/// Removes whatever is there, a directory with all that is in it; true if something was.
fn remove_any(path: &Path) -> Result<bool, DiskError> {
    let removed = match fs::remove_file(path) {
        Err(error) if matches!(error.kind(), io::ErrorKind::IsADirectory | io::ErrorKind::PermissionDenied) => {
            if path.symlink_metadata().is_ok_and(|metadata| metadata.is_dir()) {
                fs::remove_dir_all(path)
            } else {
                Err(error)
            }
        }
        other => other,
    };
    match removed {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(DiskError::at("remove", path)(error)),
    }
}

/// Moves a damaged file out of the way; an older one in that place is replaced.
fn set_aside(from: &Path, to: &Path) -> Result<(), DiskError> {
    if to.is_dir() || from.is_dir() {
        remove_any(to)?;
    }
    fs::rename(from, to).map_err(DiskError::at("set aside", from))
}

/// What is on disk.
#[derive(Default)]
struct Scan {
    good: BTreeMap<ClaimUid, Record>,
    bad: BTreeMap<ClaimUid, Bad>,
    /// Everything that was set aside, what has a sound record too.
    aside: BTreeSet<ClaimUid>,
    node: Option<NodeMemory>,
    node_problem: Option<String>,
    strangers: Vec<PathBuf>,
}

struct Bad {
    path: PathBuf,
    why: String,
}

impl Scan {
    fn of(paths: &Paths) -> Result<Self, LoadError> {
        let mut scan = Self::default();
        for path in listed(&paths.claims())? {
            let Some(uid) = uid_of(&path) else {
                if !path.file_name().is_some_and(disk::is_temporary) {
                    scan.strangers.push(path);
                }
                continue;
            };
            match read::<Record>(&path)? {
                None => {}
                Some(Ok(record)) if record.claim.uid == uid => {
                    scan.good.insert(uid, record);
                }
                Some(Ok(record)) => {
                    let why = format!("it holds the record of another claim, {}", record.claim.uid);
                    scan.bad.insert(uid, Bad { path, why });
                }
                Some(Err(why)) => {
                    scan.bad.insert(uid, Bad { path, why });
                }
            }
        }
        for path in listed(&paths.quarantine())? {
            let Some(uid) = uid_of(&path) else { continue };
            if !scan.good.contains_key(&uid) && !scan.bad.contains_key(&uid) {
                let why = match read::<Record>(&path) {
                    Ok(Some(Err(why))) => why,
                    Ok(Some(Ok(record))) if record.claim.uid != uid => {
                        format!("it holds the record of another claim, {}", record.claim.uid)
                    }
                    Ok(Some(Ok(_))) => {
                        let claims = paths.claims();
                        format!("it can be read now: stop the daemon and move it back to {}", claims.display())
                    }
                    Ok(None) => continue,
                    Err(error) => error.to_string(),
                };
                scan.bad.insert(uid.clone(), Bad { path, why });
            }
            scan.aside.insert(uid);
        }
        match read::<NodeMemory>(&paths.node())? {
            None => {}
            Some(Ok(node)) => scan.node = Some(node),
            Some(Err(why)) => scan.node_problem = Some(format!("{} is damaged: {why}", paths.node().display())),
        }
        Ok(scan)
    }

    fn into_loaded(self) -> Loaded {
        let node = self.node.unwrap_or_else(|| NodeMemory::from_records(self.good.values()));
        let quarantined = self.bad.into_iter().map(|(uid, Bad { path, why })| Quarantined {
            uid,
            why,
            path: path.display().to_string(),
        });
        Loaded {
            records: self.good.into_values().collect(),
            quarantined: quarantined.collect(),
            node,
            node_problem: self.node_problem,
            strangers: self.strangers,
        }
    }
}

fn listed(dir: &Path) -> Result<Vec<PathBuf>, DiskError> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(DiskError::at("list", dir)(error)),
    };
    entries.map(|entry| Ok(entry.map_err(DiskError::at("list", dir))?.path())).collect()
}

fn uid_of(path: &Path) -> Option<ClaimUid> {
    (path.extension() == Some(OsStr::new("json"))).then_some(())?;
    ClaimUid::new(path.file_stem()?.to_str()?).ok()
}

/// A file's body, or what is wrong with the file. An error is never the file's own fault.
fn read<T: serde::de::DeserializeOwned>(path: &Path) -> Result<Option<Result<T, String>>, LoadError> {
    match disk::read(path, FILE_MAX) {
        Ok(bytes) => match decode(&bytes) {
            Ok(body) => Ok(Some(Ok(body))),
            Err(Unreadable::Damaged(why)) => Ok(Some(Err(why))),
            Err(Unreadable::Newer { format, writer }) => {
                Err(LoadError::Newer { path: path.to_owned(), format, writer })
            }
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) if is_shortage(&error) => Err(DiskError::at("read", path)(error).into()),
        Err(error) => Ok(Some(Err(format!("it cannot be read: {error}")))),
    }
}

/// True where we lack files or memory: then every file would look damaged.
fn is_shortage(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw);
    matches!(errno, Some(Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM | Errno::EINTR))
}

//! The hardware: one trait, four backends.

pub mod dcmi;
pub mod example;
pub mod memory;
pub mod pci;
mod presence;
pub mod sysfs;

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fmt, io,
    path::{Path, PathBuf},
    str::FromStr,
    sync::Arc,
    time::Duration,
};

use futures::{StreamExt as _, future::BoxFuture, stream::BoxStream};

use crate::domain::{
    health::{Alarm, HealthReading},
    notice::Severity,
    npu::Scan,
    vnpu::CardReading,
};

/// Why a backend could not do what it was asked. An empty scan is never a substitute for one of these.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// It is not ready yet (library initialising, fewer chips than PCI functions): ask again.
    #[error("{backend} is not ready: {why}")]
    NotReady {
        /// Backend.
        backend: &'static str,
        /// Why, with what is missing.
        why: String,
    },
    /// A child process that hangs in the vendor library cannot be ended (D state): no call is made until it goes.
    #[error("{backend} is hung: {why}")]
    Hung {
        /// Backend.
        backend: &'static str,
        /// What is known of it.
        why: String,
    },
    /// A call failed.
    #[error("{backend}: {call} failed: {why}")]
    Failed {
        /// Backend.
        backend: &'static str,
        /// Which call, with its arguments.
        call: String,
        /// Code or message.
        why: String,
    },
    /// The chip, or its configuration lock, is in use just now: ask again in a moment.
    #[error("{backend}: {call} is refused for now: {why}")]
    Busy {
        /// Backend.
        backend: &'static str,
        /// Which call, with its arguments.
        call: String,
        /// Code or message.
        why: String,
    },
    /// The backend, the library or the chip cannot do this at all.
    #[error("{backend} cannot {call}: {why}")]
    Unsupported {
        /// Backend.
        backend: &'static str,
        /// What it was asked.
        call: &'static str,
        /// Code or message.
        why: String,
    },
    /// The last good scan has no such chip.
    #[error("{backend}: chip {chip} is not on this node; the last scan does not have it")]
    Gone {
        /// Backend.
        backend: &'static str,
        /// Its physical id.
        chip: u32,
    },
    /// An operator has taken the vendor's software from it.
    #[error("{backend} is suspended; `npuctl backend resume` ends that")]
    Suspended {
        /// Backend.
        backend: &'static str,
    },
    /// The backend will never work as configured: a library that others can write, a file that is no library.
    #[error("{backend} is refused: {why}")]
    Refused {
        /// Backend.
        backend: &'static str,
        /// Which file and what to do.
        why: String,
    },
}

/// How a backend is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// Backend.
    pub backend: &'static str,
    /// `ready`, `starting`, `failed`, `hung`, `suspended`.
    pub state: &'static str,
    /// Where its data comes from: a library path, a sysfs root; empty if nowhere.
    pub source: String,
    /// How bad the present state is.
    pub severity: Severity,
    /// More, for people; empty if all is well.
    pub detail: String,
}

/// What the engine needs of the hardware. All calls are safe to make at the same time; the backend orders them.
pub trait Backend: Send + Sync + fmt::Debug {
    /// Name: `dcmi`, `sysfs`, `example`, `memory`.
    fn name(&self) -> &'static str;

    /// Reads all chips of the node, from a fresh start of the library if need be.
    fn scan(&self) -> BoxFuture<'_, Result<Scan, Fault>>;

    /// Reads the health of every chip of the last good scan, by physical id. A chip that has gone reads as
    /// [`Level::Gone`](crate::domain::health::Level::Gone).
    fn health(&self) -> BoxFuture<'_, Result<BTreeMap<u32, HealthReading>, Fault>>;

    /// True if chips came to the bus after the last scan, as far as the last [`health`](Self::health) saw: only another
    /// scan reads them.
    fn is_outdated(&self) -> bool {
        false
    }

    /// What the hardware says unasked, from now on. It never ends. A reader that is too slow gets [`Alarm::Unsure`] for
    /// what it missed.
    fn alarms(&self) -> BoxStream<'static, Alarm> {
        futures::stream::pending().boxed()
    }

    /// How the backend is, without a vendor call.
    fn status(&self) -> Status;

    /// Lets go of the vendor's software for its upgrade: no library is loaded, no device open, no process of ours is
    /// left. Until [`resume`](Self::resume) all other calls fail with [`Fault::Suspended`]. After an error something is
    /// still held by a process that does not end; nothing new begins all the same.
    ///
    /// A backend that holds nothing has nothing to let go of.
    fn suspend(&self) -> BoxFuture<'_, Result<(), Fault>> {
        Box::pin(futures::future::ok(()))
    }

    /// Ends [`suspend`](Self::suspend): the next scan begins from nothing.
    fn resume(&self) -> BoxFuture<'_, Result<(), Fault>> {
        Box::pin(futures::future::ok(()))
    }

    /// Reads what a chip says of its vNPUs, what is left of it, and which processes run on it.
    fn card(&self, _physical_id: u32) -> BoxFuture<'_, Result<CardReading, Fault>> {
        Box::pin(futures::future::err(self.cannot("read vNPUs")))
    }

    /// Makes a vNPU with this id; gives the id that it has, which a library may choose otherwise.
    ///
    /// After an error the vNPU may exist all the same: read the card before deciding.
    fn create(&self, _physical_id: u32, _template: &str, _id: u32) -> BoxFuture<'_, Result<u32, Fault>> {
        Box::pin(futures::future::err(self.cannot("make vNPUs")))
    }

    /// Destroys a vNPU; one that is not there (any more) is success.
    ///
    /// After an error it may be gone, or made again under another id: read the card before deciding.
    fn destroy(&self, _physical_id: u32, _id: u32) -> BoxFuture<'_, Result<(), Fault>> {
        Box::pin(futures::future::err(self.cannot("destroy vNPUs")))
    }

    /// Reads how the vendor's own software deals with vNPUs on this node.
    fn vendor(&self) -> BoxFuture<'_, Result<VendorMode, Fault>> {
        Box::pin(futures::future::err(self.cannot("read the vNPU mode")))
    }

    /// Switches the vendor's replay of vNPUs after a boot on or off.
    fn set_replay(&self, _on: bool) -> BoxFuture<'_, Result<(), Fault>> {
        Box::pin(futures::future::err(self.cannot("switch the vNPU replay")))
    }

    /// The fault of a backend that was asked for something that it does not have.
    fn cannot(&self, call: &'static str) -> Fault {
        Fault::Unsupported { backend: self.name(), call, why: "this backend only reads".to_owned() }
    }
}

/// How the vendor's own software deals with vNPUs on this node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VendorMode {
    /// True if vNPUs are made again after a boot (`/etc/vnpu.cfg`, recover mode); `None` if it cannot be read.
    pub replay: Option<bool>,
    /// Ids that the replay brings back, from `/etc/vnpu.cfg`.
    pub listed: Vec<u32>,
    /// True if the node cuts for virtual machines, not for containers; `None` if it cannot be read.
    pub virtual_machines: Option<bool>,
}

/// Which backend the operator wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Choice {
    /// The vendor library if there is one, else sysfs.
    #[default]
    Auto,
    /// The vendor library.
    Dcmi,
    /// Sysfs.
    Sysfs,
    /// This many example GPUs (profile `gpu`).
    Example(u32),
}

/// Why a text names no backend.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no backend; use auto, dcmi or sysfs, or device profile gpu for example gpus")]
pub struct InvalidChoice(pub String);

impl Choice {
    /// Example GPUs where nothing says how many.
    pub const EXAMPLES: u32 = 8;
}

impl FromStr for Choice {
    type Err = InvalidChoice;

    fn from_str(text: &str) -> Result<Self, InvalidChoice> {
        match text {
            "auto" => Ok(Self::Auto),
            "dcmi" => Ok(Self::Dcmi),
            "sysfs" => Ok(Self::Sysfs),
            "example" => Ok(Self::Example(Self::EXAMPLES)),
            other => Err(InvalidChoice(other.to_owned())),
        }
    }
}

/// What [`open`] needs to know.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Which backend.
    pub choice: Choice,
    /// Root of the host's files: `/`, or where a container has them mounted.
    pub host_root: PathBuf,
    /// Directory of the lock that vendor calls need; it must exist.
    pub state_dir: PathBuf,
    /// The vendor library; `None`: looked for in its usual places below the host root.
    pub library: Option<PathBuf>,
    /// Loads a library that others than root could have changed.
    pub trust_library: bool,
    /// How long chips may take to come up after a boot or reset; `None`: 150 s, on a 910C 360 s.
    pub wait: Option<Duration>,
    /// The executable that has the worker as its hidden subcommand: this one.
    pub worker: PathBuf,
    /// Variables for the vendor library, beside those of its own that the daemon was started with.
    pub environment: Vec<(OsString, OsString)>,
    /// Deadlines and pauses around vendor calls.
    pub timing: dcmi::Timing,
}

impl Settings {
    /// The settings of a host process with this state directory.
    #[must_use]
    pub fn new(choice: Choice, host_root: &Path, state_dir: &Path) -> Self {
        Self {
            choice,
            host_root: host_root.to_owned(),
            state_dir: state_dir.to_owned(),
            library: None,
            trust_library: false,
            wait: None,
            // Also after an upgrade has replaced the file: the worker must be of our own version.
            worker: PathBuf::from("/proc/self/exe"),
            environment: Vec::new(),
            timing: dcmi::Timing::default(),
        }
    }
}

/// Why no backend could be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The vendor library was asked for and there is none.
    #[error("no libdcmi.so: looked for {}; install the Ascend driver, name the library, or use backend sysfs", list(.0))]
    NoLibrary(Vec<PathBuf>),
    /// The system has no thread for it.
    #[error("cannot start the thread of the vendor library: {0}")]
    Thread(#[source] io::Error),
}

fn list(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}

/// Opens the backend that the operator wants. No vendor call is made yet.
///
/// `auto` takes sysfs only where no library file exists; a library that is refused or fails stays the choice.
pub fn open(settings: &Settings) -> Result<Arc<dyn Backend>, OpenError> {
    let places = settings.library.clone().map_or_else(|| library_places(&settings.host_root), |library| vec![library]);
    let library = places.iter().find(|path| path.is_file());
    Ok(match (settings.choice, library) {
        (Choice::Example(count), _) => Arc::new(example::Example::new(count)),
        (Choice::Sysfs, _) => Arc::new(sysfs::Sysfs::new(&settings.host_root)),
        (Choice::Auto, None) if settings.library.is_none() => Arc::new(sysfs::Sysfs::new(&settings.host_root)),
        (Choice::Auto | Choice::Dcmi, None) => return Err(OpenError::NoLibrary(places)),
        (Choice::Auto | Choice::Dcmi, Some(library)) => {
            let settings = dcmi::Settings {
                host_root: settings.host_root.clone(),
                library: library.clone(),
                trust_library: settings.trust_library,
                lock: settings.state_dir.join("dcmi.lock"),
                worker: settings.worker.clone(),
                wait: settings.wait,
                environment: settings.environment.clone(),
                timing: settings.timing.clone(),
            };
            Arc::new(dcmi::Dcmi::new(settings).map_err(OpenError::Thread)?)
        }
    })
}

/// Where the Ascend driver is installed, below the host root: as `/etc/ascend_install.info` says, else the default.
fn install_prefix(host_root: &Path) -> PathBuf {
    let info = pci::read(&host_root.join("etc/ascend_install.info")).unwrap_or_default();
    let prefix = info.lines().find_map(|line| line.trim().strip_prefix("Driver_Install_Path_Param="));
    let prefix = prefix.map(str::trim).filter(|prefix| prefix.starts_with('/')).unwrap_or("/usr/local/Ascend");
    below(host_root, Path::new(prefix))
}

/// A host's absolute path, below the host root.
fn below(host_root: &Path, path: &Path) -> PathBuf {
    host_root.join(path.strip_prefix("/").unwrap_or(path))
}

/// Places of the vendor library, the likeliest first.
fn library_places(host_root: &Path) -> Vec<PathBuf> {
    let mut places = vec![install_prefix(host_root).join("driver/lib64/driver/libdcmi.so")];
    let usual = [
        "usr/local/Ascend/driver/lib64/driver/libdcmi.so",
        "usr/local/dcmi/libdcmi.so",
        "usr/lib64/libdcmi.so",
        "usr/local/lib/libdcmi.so",
    ];
    for place in usual.map(|place| host_root.join(place)) {
        if !places.contains(&place) {
            places.push(place);
        }
    }
    places
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn settings(root: &Path, choice: Choice) -> Settings {
        Settings::new(choice, root, root)
    }

    fn put(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn auto_takes_sysfs_only_where_no_library_file_exists() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(open(&settings(root.path(), Choice::Auto)).unwrap().name(), "sysfs");
        fs::create_dir_all(root.path().join("usr/local/dcmi/libdcmi.so")).unwrap();
        assert_eq!(open(&settings(root.path(), Choice::Auto)).unwrap().name(), "sysfs", "a directory is no library");
        put(root.path(), "usr/lib64/libdcmi.so", "not even a library");
        assert_eq!(open(&settings(root.path(), Choice::Auto)).unwrap().name(), "dcmi");
        assert_eq!(open(&settings(root.path(), Choice::Sysfs)).unwrap().name(), "sysfs");
    }

    #[test]
    fn the_install_file_of_the_host_leads_to_the_library() {
        let root = tempfile::tempdir().unwrap();
        put(
            root.path(),
            "etc/ascend_install.info",
            "UserName=HwHiAiUser\nDriver_Install_Path_Param=/opt/ascend\nodd line",
        );
        put(root.path(), "opt/ascend/driver/lib64/driver/libdcmi.so", "");
        let backend = open(&settings(root.path(), Choice::Auto)).unwrap();
        assert_eq!(backend.name(), "dcmi");
        let library = root.path().join("opt/ascend/driver/lib64/driver/libdcmi.so");
        assert_eq!(backend.status().source, library.display().to_string());
    }

    #[test]
    fn a_library_that_was_named_and_is_not_there_is_an_error_that_says_where_it_was_looked_for() {
        let root = tempfile::tempdir().unwrap();
        let mut named = settings(root.path(), Choice::Auto);
        named.library = Some(PathBuf::from("/nowhere/libdcmi.so"));
        assert!(open(&named).unwrap_err().to_string().contains("/nowhere/libdcmi.so"));
        let error = open(&settings(root.path(), Choice::Dcmi)).unwrap_err().to_string();
        assert!(error.contains("usr/local/dcmi/libdcmi.so"), "{error}");
    }

    #[test]
    fn backends_are_chosen_by_name() {
        assert_eq!("auto".parse(), Ok(Choice::Auto));
        assert_eq!("sysfs".parse(), Ok(Choice::Sysfs));
        assert!("nvml".parse::<Choice>().unwrap_err().to_string().contains("nvml"));
    }
}

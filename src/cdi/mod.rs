//! CDI files: what a container runtime adds to a container that uses devices of a claim.
//!
//! One file a claim, `<driver>-claim_<uid>.json`, of kind `<driver>/npu`. Files of others are left alone. What is
//! written or removed is seen by every process at once and durable once [`Cdi::settle`] has returned. Everything here
//! blocks: callers use a pool of threads. Calls for different claims may run at the same time; for one claim the caller
//! orders them. Only the owner of the state directory may open the CDI root: leftovers are swept.

mod host;
mod spec;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
};

use crate::{
    disk::{self, DiskError},
    domain::{
        claim::{ClaimRef, ClaimUid},
        names::{DriverName, is_cdi_device_name},
        plan::{FoundFile, InjectedDevice, Injection},
    },
};
use host::Host;
use spec::{Device, Edits, Spec, VERSION};

/// Longest file that is read, in bytes.
const FILE_MAX: u64 = 4 << 20;
/// Names the claim in a file of ours, `<namespace>/<name>`.
const CLAIM_ENV: &str = "NPU_DRA_CLAIM=";
/// Names an example device in a container, followed by its number.
const EXAMPLE_ENV: &str = "NPU_DRA_EXAMPLE_DEVICE_";
/// Tells a container that it looks at an example device.
const EXAMPLE_LOOK_ENV: &str = "NPU_DRA_EXAMPLE_LOOK=";
/// Path of a card's node, without its number.
const CARD_NODE: &str = "/dev/davinci";
const VNPU_NODE: &str = "/dev/vdavinci";

/// What a claim's file could not be written, removed or found for.
#[derive(Debug, thiserror::Error)]
pub enum CdiError {
    /// No kind of device can be made of the driver's name.
    #[error("driver name {0} cannot be the vendor of a CDI kind: it must begin with a letter")]
    Vendor(DriverName),
    /// A device node of the host is missing or is none. Nothing was written.
    #[error("device node {path} cannot be given to a container: {cause}; is the vendor's driver loaded?")]
    Node {
        /// Path on the host.
        path: String,
        /// Why.
        cause: io::Error,
    },
    /// A runtime would refuse the file. Nothing was written.
    #[error("CDI file of claim {uid} would not be valid: {why}")]
    Invalid {
        /// Which claim.
        uid: ClaimUid,
        /// Why.
        why: String,
    },
    /// The disk gave back something else than was written.
    #[error("CDI file {} does not read back as it was written: {why}", path.display())]
    ReadBack {
        /// Which file.
        path: PathBuf,
        /// How it differs.
        why: String,
    },
    /// The disk refused.
    #[error(transparent)]
    Disk(#[from] DiskError),
}

/// Where CDI files go, and what goes into them.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Directory of CDI files, which the container runtime reads.
    pub root: PathBuf,
    /// Our name: the vendor of the kind.
    pub driver: DriverName,
    /// Where the host's `/` is.
    pub host_root: PathBuf,
    /// True for profile `gpu`: devices without hardware, of which a container sees environment variables.
    pub example: bool,
    /// True to set `ASCEND_VISIBLE_DEVICES=void`, lest the vendor's container runtime add cards that an image names.
    pub hide_from_ascend_runtime: bool,
    /// What is bound beyond the usual, where it is there.
    pub optional_binds: Vec<OptionalBind>,
}

/// What only some jobs need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OptionalBind {
    /// `/etc/hccl_rootinfo.json`, the rank table of the node.
    RootInfo,
    /// The driver's `topo`, a description of the links.
    Topo,
}

/// A file of another in our directory that has devices of our kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conflict {
    /// Which file.
    pub path: PathBuf,
    /// Devices of our files that it defines too: the runtime gives such a device to nobody.
    pub devices: Vec<String>,
}

/// The directory of CDI files.
#[derive(Debug)]
pub struct Cdi {
    settings: Settings,
    host: Host,
    kind: String,
}

impl Cdi {
    /// Creates the root (0755) if it is absent, and sweeps what a crash left of our own.
    pub fn open(settings: Settings) -> Result<Self, CdiError> {
        if !settings.driver.as_str().starts_with(|c: char| c.is_ascii_alphabetic()) {
            return Err(CdiError::Vendor(settings.driver));
        }
        let kind = format!("{}/npu", settings.driver);
        let host = Host { root: settings.host_root.clone() };
        let cdi = Self { settings, host, kind };
        disk::create_dir(&cdi.settings.root, 0o755)?;
        if let Err(error) = disk::sweep(&cdi.settings.root, |name| name.starts_with(&cdi.prefix())) {
            tracing::warn!(%error, "a temporary file was left");
        }
        Ok(cdi)
    }

    /// Makes the file of a claim be as given, durably after [`settle`](Self::settle); true if it had to be written.
    ///
    /// Device nodes and binds are those that the host has now. After an error the file is as it was.
    pub fn ensure(&self, injection: &Injection) -> Result<bool, CdiError> {
        let contents = self.render(injection)?;
        let path = self.path(&injection.claim.uid);
        if disk::read(&path, FILE_MAX).is_ok_and(|found| found == contents) {
            return Ok(false);
        }
        disk::create_dir(&self.settings.root, 0o755)?;
        disk::put(&path, &contents, 0o644)?;
        match disk::read(&path, FILE_MAX) {
            Ok(found) if found == contents => Ok(true),
            Ok(_) => Err(CdiError::ReadBack { path, why: "the content is another".to_owned() }),
            Err(error) => Err(CdiError::ReadBack { path, why: error.to_string() }),
        }
    }

    /// Removes the file of a claim, durably after [`settle`](Self::settle); true if it was there.
    pub fn remove(&self, uid: &ClaimUid) -> Result<bool, CdiError> {
        Ok(disk::remove(&self.path(uid))?)
    }

    /// Makes all that was written and removed durable, whoever did it. An absent root holds nothing and is no error.
    pub fn settle(&self) -> Result<(), CdiError> {
        match disk::sync_dir(&self.settings.root) {
            Err(error) if error.cause.kind() != io::ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// True if a claim has a file.
    pub fn exists(&self, uid: &ClaimUid) -> Result<bool, CdiError> {
        let path = self.path(uid);
        match path.symlink_metadata() {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(DiskError::at("look for", path)(error).into()),
        }
    }

    /// The files whose names are of our pattern, by UID; none if the root is absent.
    pub fn list(&self) -> Result<Vec<FoundFile>, CdiError> {
        let (ours, _) = self.entries()?;
        let files = ours.into_iter().map(|(uid, path)| {
            let content = disk::read(&path, FILE_MAX).ok().and_then(|bytes| self.parse(&uid, &bytes));
            FoundFile { uid, content }
        });
        Ok(files.collect())
    }

    /// Files of others with devices of our kind: left by an older version or written by hand. They are not touched.
    pub fn conflicts(&self) -> Result<Vec<Conflict>, CdiError> {
        let (ours, foreign) = self.entries()?;
        let mut suspects = Vec::new();
        for path in foreign {
            let small = fs::metadata(&path).is_ok_and(|file| file.is_file() && file.len() <= FILE_MAX);
            let text = if small { fs::read_to_string(&path).unwrap_or_default() } else { String::new() };
            // JSON or YAML: the kind and the names stand there letter for letter.
            if text.contains(&self.kind) {
                suspects.push((path, text));
            }
        }
        if suspects.is_empty() {
            return Ok(Vec::new());
        }
        let mut names = BTreeSet::new();
        for (uid, path) in &ours {
            if let Some(content) = disk::read(path, FILE_MAX).ok().and_then(|bytes| self.parse(uid, &bytes)) {
                names.extend(content.devices.into_iter().map(|device| device.name));
            }
        }
        let conflicts = suspects.into_iter().map(|(path, text)| {
            let devices = names.iter().filter(|name| text.contains(name.as_str())).cloned().collect();
            Conflict { path, devices }
        });
        Ok(conflicts.collect())
    }

    /// Path of the file of a claim.
    pub fn path(&self, uid: &ClaimUid) -> PathBuf {
        self.settings.root.join(format!("{}{uid}.json", self.prefix()))
    }

    fn prefix(&self) -> String {
        format!("{}-claim_", self.settings.driver)
    }

    /// Our files and the CDI files of others, each in the order of their names.
    fn entries(&self) -> Result<(BTreeMap<ClaimUid, PathBuf>, Vec<PathBuf>), CdiError> {
        let root = &self.settings.root;
        let (mut ours, mut foreign) = (BTreeMap::new(), Vec::new());
        let entries = match fs::read_dir(root) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok((ours, foreign)),
            Err(error) => return Err(DiskError::at("list", root)(error).into()),
        };
        for entry in entries {
            let path = entry.map_err(DiskError::at("list", root))?.path();
            if let Some(uid) = self.uid_of(&path) {
                ours.insert(uid, path);
            } else if path.extension().is_some_and(|extension| extension == "json" || extension == "yaml") {
                foreign.push(path);
            }
        }
        foreign.sort();
        Ok((ours, foreign))
    }

    fn uid_of(&self, path: &Path) -> Option<ClaimUid> {
        let name = path.file_name()?.to_str()?;
        ClaimUid::new(name.strip_prefix(&self.prefix())?.strip_suffix(".json")?).ok()
    }

    fn render(&self, injection: &Injection) -> Result<Vec<u8>, CdiError> {
        let invalid = |why: String| CdiError::Invalid { uid: injection.claim.uid.clone(), why };
        if injection.devices.is_empty() {
            return Err(invalid("it has no device".to_owned()));
        }
        let mut names = BTreeSet::new();
        let mut devices = Vec::with_capacity(injection.devices.len());
        for device in &injection.devices {
            if !is_cdi_device_name(&device.name) {
                return Err(invalid(format!("{:?} is no name of a CDI device", device.name)));
            }
            if !names.insert(&device.name) {
                return Err(invalid(format!("device {} is in it twice", device.name)));
            }
            devices.push(Device { name: device.name.clone(), container_edits: self.device_edits(device)? });
        }
        let spec = Spec {
            cdi_version: VERSION.to_owned(),
            kind: self.kind.clone(),
            devices,
            container_edits: self.claim_edits(&injection.claim)?,
        };
        let mut contents = serde_json::to_vec_pretty(&spec).map_err(|error| invalid(error.to_string()))?;
        contents.push(b'\n');
        Ok(contents)
    }

    fn device_edits(&self, device: &InjectedDevice) -> Result<Edits, CdiError> {
        let ids = &device.physical_ids;
        if self.settings.example {
            let env = if ids.is_empty() {
                vec![format!("{EXAMPLE_LOOK_ENV}{}", device.name)]
            } else {
                ids.iter().map(|id| format!("{EXAMPLE_ENV}{id}={}", device.name)).collect()
            };
            return Ok(Edits { env, ..Edits::default() });
        }
        let device_nodes = match device.vnpu {
            Some(id) => vec![self.host.vnpu(id)?],
            None if ids.is_empty() => vec![self.host.manager()?],
            None => ids.iter().map(|id| self.host.card(*id)).collect::<Result<_, _>>()?,
        };
        Ok(Edits { device_nodes, ..Edits::default() })
    }

    fn claim_edits(&self, claim: &ClaimRef) -> Result<Edits, CdiError> {
        let mut env = vec![format!("{CLAIM_ENV}{}/{}", claim.namespace, claim.name)];
        if self.settings.example {
            return Ok(Edits { env, ..Edits::default() });
        }
        if self.settings.hide_from_ascend_runtime {
            env.push("ASCEND_VISIBLE_DEVICES=void".to_owned());
        }
        let mounts = self.host.mounts(&self.settings.optional_binds);
        Ok(Edits { env, device_nodes: self.host.managers()?, mounts })
    }

    /// What a file of ours was written for.
    fn parse(&self, uid: &ClaimUid, bytes: &[u8]) -> Option<Injection> {
        let spec: Spec = serde_json::from_slice(bytes).ok()?;
        if spec.kind != self.kind || spec.devices.is_empty() {
            return None;
        }
        let named = spec.container_edits.env.iter().find_map(|env| env.strip_prefix(CLAIM_ENV)?.split_once('/'));
        let (namespace, name) = named.unwrap_or_default();
        let devices = spec.devices.iter().map(|device| {
            let mut physical_ids = physical_ids(&device.container_edits)?;
            let vnpu = vnpu_id(&device.container_edits);
            // Inside the container a vNPU's node has a card's name.
            physical_ids.retain(|id| Some(*id) != vnpu);
            Some(InjectedDevice { name: device.name.clone(), physical_ids, vnpu })
        });
        Some(Injection {
            claim: ClaimRef { namespace: namespace.to_owned(), name: name.to_owned(), uid: uid.clone() },
            devices: devices.collect::<Option<_>>()?,
        })
    }
}

/// The vNPU of a device, if it is one.
fn vnpu_id(edits: &Edits) -> Option<u32> {
    let nodes = edits.device_nodes.iter().filter_map(|node| node.host_path.as_deref());
    nodes.into_iter().find_map(|path| path.strip_prefix(VNPU_NODE)?.parse().ok())
}

/// The cards of a device; none if it only looks, `None` if the edits are not of our making.
fn physical_ids(edits: &Edits) -> Option<Vec<u32>> {
    let nodes = edits.device_nodes.iter().filter_map(|node| node.path.strip_prefix(CARD_NODE));
    let nodes = nodes.filter(|rest| !rest.starts_with('_'));
    let examples = edits.env.iter().filter_map(|env| env.strip_prefix(EXAMPLE_ENV)?.split_once('='));
    nodes.chain(examples.map(|(number, _)| number)).map(|number| number.parse().ok()).collect()
}

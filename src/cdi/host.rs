//! What the host offers to a container: device nodes with their group and mode, and paths to bind.
//!
//! Everything is looked up below the host root, and written down as the host knows it.

use std::{
    collections::BTreeSet,
    ffi::OsString,
    fs, io,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Component, Path, PathBuf},
};

use super::{
    CdiError, OptionalBind,
    spec::{DeviceNode, Mount},
};

/// Where the vendor's software lies in every container, wherever it lies on the host.
const ASCEND: &str = "/usr/local/Ascend";
/// Names the directory of the vendor's software on the host.
const INSTALL_INFO: &str = "/etc/ascend_install.info";
/// Key in it.
const INSTALL_PATH: &str = "Driver_Install_Path_Param";
/// Parts of the driver, below its directory.
const DRIVER_PARTS: [&str; 4] = ["driver/lib64", "driver/include", "driver/tools/hccn_tool", "driver/version.info"];
/// Paths that are the same in the container.
const FIXED: [&str; 5] =
    ["/usr/local/dcmi", "/usr/local/bin/npu-smi", "/usr/local/sbin/npu-smi", INSTALL_INFO, "/etc/hccn.conf"];
/// As many links as the kernel follows.
const LINKS_MAX: u32 = 40;

/// Managers that every container needs.
const MANAGERS: [&str; 3] = ["davinci_manager", "devmm_svm", "hisi_hdc"];
/// Manager of media engines, which not every card has.
const DVPP: &str = "dvpp_cmdlist";

/// The host's file system.
#[derive(Debug, Clone)]
pub(super) struct Host {
    pub(super) root: PathBuf,
}

impl Host {
    /// Node of a card.
    pub(super) fn card(&self, physical_id: u32) -> Result<DeviceNode, CdiError> {
        self.node(&format!("davinci{physical_id}"))
    }

    /// Node of a vNPU, which containers know under a card's name.
    pub(super) fn vnpu(&self, id: u32) -> Result<DeviceNode, CdiError> {
        let node = self.node(&format!("vdavinci{id}"))?;
        Ok(DeviceNode { path: format!("/dev/davinci{id}"), host_path: Some(node.path), ..node })
    }

    /// Node through which a container may look without owning a card.
    pub(super) fn manager(&self) -> Result<DeviceNode, CdiError> {
        self.node(MANAGERS[0])
    }

    /// Nodes that every container needs.
    pub(super) fn managers(&self) -> Result<Vec<DeviceNode>, CdiError> {
        let mut nodes = MANAGERS.iter().map(|name| self.node(name)).collect::<Result<Vec<_>, _>>()?;
        match self.node(DVPP) {
            Ok(node) => nodes.push(node),
            Err(CdiError::Node { cause, .. }) if cause.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        Ok(nodes)
    }

    fn node(&self, name: &str) -> Result<DeviceNode, CdiError> {
        let path = format!("/dev/{name}");
        // A link to a node counts as that node.
        let metadata = match fs::metadata(self.at(&path)) {
            Ok(metadata) if metadata.file_type().is_char_device() => metadata,
            Ok(_) => {
                let cause = io::Error::new(io::ErrorKind::InvalidInput, "it is no character device");
                return Err(CdiError::Node { path, cause });
            }
            Err(cause) => return Err(CdiError::Node { path, cause }),
        };
        Ok(DeviceNode {
            path,
            host_path: None,
            file_mode: metadata.mode() & 0o777,
            permissions: "rw".to_owned(),
            gid: metadata.gid(),
        })
    }

    /// Read-only binds of everything that is there.
    pub(super) fn mounts(&self, optional: &[OptionalBind]) -> Vec<Mount> {
        let install = self.install_path();
        let part = |part: &str| (install.join(part), Path::new(ASCEND).join(part));
        let fixed = |path: &str| (PathBuf::from(path), PathBuf::from(path));
        let optional = optional.iter().map(|bind| match bind {
            OptionalBind::RootInfo => fixed("/etc/hccl_rootinfo.json"),
            OptionalBind::Topo => part("driver/topo"),
        });
        let mut plain = BTreeSet::new();
        let usual = DRIVER_PARTS.into_iter().map(part).chain(FIXED.into_iter().map(fixed));
        usual
            .chain(optional)
            .filter(|(host, _)| self.is_there(host, &mut plain))
            .map(|(host, container)| Mount {
                host_path: host.display().to_string(),
                container_path: container.display().to_string(),
                options: ["ro", "rbind", "rprivate"].map(str::to_owned).to_vec(),
            })
            .collect()
    }

    /// Directory of the vendor's software, as the host names it.
    fn install_path(&self) -> PathBuf {
        let text = fs::read(self.at(INSTALL_INFO)).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let named = text.lines().find_map(|line| {
            let (key, value) = line.split_once('=')?;
            (key.trim() == INSTALL_PATH).then(|| PathBuf::from(value.trim()))
        });
        let plain =
            |path: &PathBuf| path.is_absolute() && path.components().all(|part| !matches!(part, Component::ParentDir));
        named.filter(plain).unwrap_or_else(|| ASCEND.into())
    }

    /// Where a path of the host lies for us.
    fn at(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// True if the host finds something at a path of its own; its absolute links stay below its root. `plain` is what
    /// was found before and is no link.
    fn is_there(&self, path: &Path, plain: &mut BTreeSet<PathBuf>) -> bool {
        // Below the true root that is what the kernel finds.
        if self.root == Path::new("/") { path.exists() } else { self.walked(path, plain) }
    }

    /// The same below another root, one part of the path after the other.
    fn walked(&self, path: &Path, plain: &mut BTreeSet<PathBuf>) -> bool {
        let mut todo: Vec<OsString> = path.components().rev().map(|part| part.as_os_str().to_owned()).collect();
        let mut here = PathBuf::from("/");
        let mut links = 0;
        while let Some(part) = todo.pop() {
            match part.to_str() {
                Some("/") => here = "/".into(),
                Some(".") => {}
                Some("..") => {
                    here.pop();
                }
                _ => {
                    let next = here.join(&part);
                    if plain.contains(&next) {
                        here = next;
                        continue;
                    }
                    match fs::read_link(self.at(&next)) {
                        Ok(_) if links == LINKS_MAX => return false,
                        Ok(target) => {
                            links += 1;
                            todo.extend(target.components().rev().map(|part| part.as_os_str().to_owned()));
                        }
                        // What is no link is there, or it is not.
                        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                            plain.insert(next.clone());
                            here = next;
                        }
                        Err(_) => return false,
                    }
                }
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn host() -> (tempfile::TempDir, Host) {
        let dir = tempfile::tempdir().unwrap();
        let host = Host { root: dir.path().to_owned() };
        (dir, host)
    }

    #[test]
    fn links_of_the_host_are_followed_below_its_root() {
        let (dir, host) = host();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir_all(at("opt/real")).unwrap();
        fs::write(at("opt/real/file"), "").unwrap();
        symlink("/opt/real", at("absolute")).unwrap();
        symlink("opt/../opt/real", at("relative")).unwrap();
        symlink("../../absolute/file", at("opt/real/up")).unwrap();
        symlink("/proc/self", at("outside")).unwrap();
        symlink("loop", at("loop")).unwrap();
        let mut plain = BTreeSet::new();
        for turn in ["anew", "with what is known"] {
            for there in ["/absolute/file", "/relative/file", "/opt/real/up", "/opt"] {
                assert!(host.is_there(Path::new(there), &mut plain), "{there}, {turn}");
            }
            for absent in ["/outside", "/loop", "/absent", "/opt/real/file/below", "/absolute/no"] {
                assert!(!host.is_there(Path::new(absent), &mut plain), "{absent}, {turn}");
            }
        }
        assert_eq!(plain, ["/opt", "/opt/real", "/opt/real/file"].map(PathBuf::from).into());
    }

    #[test]
    fn below_the_true_root_the_kernel_and_the_walk_agree() {
        let host = Host { root: "/".into() };
        for path in ["/dev/null", "/etc", "/proc/self/exe", "/etc/../etc/passwd", "/absent", "/dev/null/below"] {
            let (path, mut plain) = (Path::new(path), BTreeSet::new());
            assert_eq!(host.is_there(path, &mut plain), host.walked(path, &mut plain), "{}", path.display());
        }
    }

    #[test]
    fn the_install_path_comes_from_the_vendors_file_and_has_a_default() {
        let (dir, host) = host();
        assert_eq!(host.install_path(), Path::new(ASCEND));
        fs::create_dir(dir.path().join("etc")).unwrap();
        for (text, path) in [
            ("Driver_Install_Type=full\nDriver_Install_Path_Param=/opt/driver\n", "/opt/driver"),
            ("garbage\n Driver_Install_Path_Param = /opt/driver-old \r\n", "/opt/driver-old"),
            ("Driver_Install_Path_Param=relative\n", ASCEND),
            ("Driver_Install_Path_Param=/opt/../etc\n", ASCEND),
            ("Driver_Install_Path_Params=/opt\n\u{0}", ASCEND),
        ] {
            fs::write(dir.path().join("etc/ascend_install.info"), text).unwrap();
            assert_eq!(host.install_path(), Path::new(path), "{text:?}");
        }
    }
}

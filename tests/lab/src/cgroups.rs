//! Which control groups a machine gets: a child of our own in every hierarchy that the host has.
//!
//! A host with version 1 hierarchies (beside a version 2 one or not) gives the machine all of them; a host with only
//! version 2 gives it a child of the root group, since a group with processes of its own hands no controllers down.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::Context as _;

/// A hierarchy as a machine mounts it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hierarchy {
    /// Controllers as the kernel lists them (`cpu,cpuacct`), `name=systemd`, or nothing for version 2.
    pub(crate) controllers: String,
    /// The directory of our own group on the host.
    pub(crate) own: PathBuf,
}

impl Hierarchy {
    fn is_v2(&self) -> bool {
        self.controllers.is_empty()
    }
}

/// What the machine gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) hierarchies: Vec<Hierarchy>,
}

impl Layout {
    /// Only version 2, mounted at `/sys/fs/cgroup`.
    pub(crate) fn is_unified(&self) -> bool {
        self.hierarchies.iter().all(Hierarchy::is_v2)
    }

    /// Reads what this host has.
    pub(crate) fn of_host() -> anyhow::Result<Self> {
        let groups = fs::read_to_string("/proc/self/cgroup").context("cannot read /proc/self/cgroup")?;
        let mounts = fs::read_to_string("/proc/self/mountinfo").context("cannot read /proc/self/mountinfo")?;
        Ok(Self { hierarchies: hierarchies(&groups, &mounts) })
    }

    /// Makes a group called `name` in every hierarchy, and returns their directories.
    pub(crate) fn make(&self, name: &str) -> anyhow::Result<Vec<PathBuf>> {
        let mut made = Vec::new();
        for hierarchy in &self.hierarchies {
            let dir = hierarchy.own.join(name);
            fs::create_dir_all(&dir).with_context(|| format!("cannot make the control group {}", dir.display()))?;
            made.push(dir.clone());
            let has = |controller: &str| hierarchy.controllers.split(',').any(|one| one == controller);
            if has("cpuset") {
                // A new group starts with neither processors nor memory, and takes no process.
                for file in ["cpus", "mems"] {
                    for name in [format!("cpuset.{file}"), file.to_owned()] {
                        if let Ok(text) = fs::read_to_string(hierarchy.own.join(&name)) {
                            fs::write(dir.join(&name), text).context("cannot hand a group its processors")?;
                        }
                    }
                }
            }
            if has("memory") {
                // Newer kernels do this always and have no such file.
                let _ = fs::write(dir.join("memory.use_hierarchy"), "1");
            }
        }
        Ok(made)
    }
}

/// What a machine would lack on this host, in words; nothing if all is there.
pub(crate) fn missing() -> Option<String> {
    match Layout::of_host() {
        Ok(layout) if !layout.hierarchies.is_empty() => None,
        Ok(_) => Some("no control group file system is mounted: mount cgroup2 at /sys/fs/cgroup".to_owned()),
        Err(error) => Some(format!("{error:#}")),
    }
}

/// Pairs the lines of `/proc/self/cgroup` with where they are mounted.
fn hierarchies(groups: &str, mounts: &str) -> Vec<Hierarchy> {
    let mut found = Vec::new();
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        if let Some((mount, top)) = mount_of(mounts, controllers) {
            // In a container the mount may show a part of the hierarchy only.
            let below = path.strip_prefix(top.trim_end_matches('/')).unwrap_or("");
            let own = mount.join(below.trim_start_matches('/'));
            found.push(Hierarchy { controllers: controllers.to_owned(), own: if own.is_dir() { own } else { mount } });
        }
    }
    let unified = found.iter().all(Hierarchy::is_v2);
    for hierarchy in found.iter_mut().filter(|_| unified) {
        if let Some((mount, _)) = mount_of(mounts, "") {
            hierarchy.own = mount;
        }
    }
    found
}

/// The mount point of a hierarchy, and which part of it is mounted there.
fn mount_of(mounts: &str, controllers: &str) -> Option<(PathBuf, String)> {
    mounts.lines().find_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        let left: Vec<_> = left.split(' ').collect();
        let (&top, &at) = (left.get(3)?, left.get(4)?);
        let right: Vec<_> = right.split(' ').collect();
        let (&kind, &options) = (right.first()?, right.get(2)?);
        let same = if controllers.is_empty() {
            kind == "cgroup2"
        } else {
            kind == "cgroup" && controllers.split(',').all(|one| options.split(',').any(|other| one == other))
        };
        (same && Path::new(at).is_absolute()).then(|| (PathBuf::from(at), top.to_owned()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_1_groups_are_found_where_they_are_mounted() {
        let groups = "4:memory:/box/7\n3:cpu,cpuacct:/\n2:name=systemd:/\n0::/\n";
        let mounts = "33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
                      35 31 0:32 /box /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n\
                      40 31 0:37 / /sys/fs/cgroup/systemd rw shared:4 - cgroup cgroup rw,name=systemd\n";
        let found = hierarchies(groups, mounts);
        let names: Vec<_> = found.iter().map(|one| one.controllers.as_str()).collect();
        // The version 2 hierarchy is not mounted: the machine does without.
        assert_eq!(names, ["memory", "cpu,cpuacct", "name=systemd"]);
        assert_eq!(found[1].own, Path::new("/sys/fs/cgroup/cpu,cpuacct"));
        assert!(!Layout { hierarchies: found }.is_unified());
    }

    #[test]
    fn a_host_with_version_2_alone_uses_the_root_group() {
        let mounts = "25 20 0:22 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n";
        let found = hierarchies("0::/user.slice/session-1.scope\n", mounts);
        assert_eq!(found, [Hierarchy { controllers: String::new(), own: "/sys/fs/cgroup".into() }]);
        assert!(Layout { hierarchies: found }.is_unified());
    }
}

//! What this host looks like before and after: a run must leave nothing but the cache directory changed.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process, thread,
    time::{Duration, Instant},
};

use anyhow::bail;
use nix::sys::inotify::{InitFlags, Inotify};

/// Settings of the kernel that kubelet, containerd or CNI would like to change.
const SETTINGS: [&str; 14] = [
    "fs/inotify/max_user_instances",
    "fs/inotify/max_user_watches",
    "kernel/core_pattern",
    "kernel/domainname",
    "kernel/hostname",
    "kernel/keys/root_maxbytes",
    "kernel/keys/root_maxkeys",
    "kernel/panic",
    "kernel/panic_on_oops",
    "net/ipv4/conf/all/forwarding",
    "net/ipv4/conf/all/route_localnet",
    "net/ipv4/ip_forward",
    "vm/overcommit_memory",
    "vm/panic_on_oom",
];
/// Where such programs leave files. Of these only names that are theirs count: others work on this host as well.
const DIRS: [&str; 11] =
    ["/tmp", "/var/tmp", "/run", "/dev", "/dev/shm", "/etc", "/etc/cdi", "/opt", "/usr/local", "/var/lib", "/var/log"];
const NAMES: [&str; 14] = [
    "kube",
    "containerd",
    "etcd",
    "npu",
    "davinci",
    "cni",
    "netns",
    "runc",
    "crio",
    "cdi",
    "Ascend",
    "dcmi",
    "node1",
    "devmm",
];
/// How long what ends may take to be gone.
const SETTLE: Duration = Duration::from_secs(10);

/// How many inotify instances this user can still have, as far as it matters.
pub(crate) fn free_inotify_instances() -> usize {
    let had: Vec<_> = (0..256).map_while(|_| Inotify::init(InitFlags::IN_CLOEXEC).ok()).collect();
    had.len()
}

/// A host at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Host {
    mounts: BTreeSet<String>,
    links: BTreeSet<String>,
    settings: BTreeMap<&'static str, String>,
    files: BTreeSet<PathBuf>,
}

impl Host {
    /// As it is now.
    pub(crate) fn now() -> Self {
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let mount = |line: &str| {
            let mut words = line.split(' ').skip(3);
            Some(format!("{} of {}", words.nth(1)?, line.split(" - ").nth(1)?))
        };
        let setting = |name: &'static str| Some((name, fs::read_to_string(Path::new("/proc/sys").join(name)).ok()?));
        let ours = |path: &PathBuf| {
            let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            NAMES.iter().any(|word| name.contains(word))
        };
        Self {
            mounts: mounts.lines().filter_map(mount).collect(),
            links: names("/sys/class/net"),
            settings: SETTINGS.into_iter().filter_map(setting).collect(),
            files: DIRS.iter().flat_map(|dir| list(dir)).filter(ours).collect(),
        }
    }

    /// Fails if anything is not as it was, or anything of this program's machines is still there. What is ending gets a
    /// little time.
    ///
    /// # Errors
    /// The differences.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        let deadline = Instant::now() + SETTLE;
        loop {
            let differences = self.differences();
            if differences.is_empty() {
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!("this host is not as it was:\n{}", differences.join("\n"));
            }
            thread::sleep(Duration::from_millis(200)); // waits: for what is ending
        }
    }

    fn differences(&self) -> Vec<String> {
        let now = Self::now();
        let mut found = Vec::new();
        found.extend(now.mounts.difference(&self.mounts).map(|one| format!("a mount is left: {one}")));
        found.extend(self.mounts.difference(&now.mounts).map(|one| format!("a mount is gone: {one}")));
        found.extend(now.links.difference(&self.links).map(|one| format!("a network link is left: {one}")));
        found.extend(self.links.difference(&now.links).map(|one| format!("a network link is gone: {one}")));
        for (name, before) in &self.settings {
            let after = now.settings.get(name).map(String::as_str).unwrap_or_default();
            if after != before {
                found.push(format!("/proc/sys/{name} was {} and is {}", before.trim(), after.trim()));
            }
        }
        found.extend(now.files.difference(&self.files).map(|one| format!("a file is left: {}", one.display())));
        found.extend(groups().map(|one| format!("a control group is left: {}", one.display())));
        found.extend(children().map(|one| format!("a process is left: {one}")));
        found.extend(directories().map(|one| format!("a machine's directory is left: {}", one.display())));
        found
    }
}

/// What the names of this program's machines have in them.
fn mark() -> String {
    format!(".{}.", process::id())
}

fn list(dir: &str) -> Vec<PathBuf> {
    fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

fn names(dir: &str) -> BTreeSet<String> {
    list(dir).iter().filter_map(|path| Some(path.file_name()?.to_string_lossy().into_owned())).collect()
}

/// Control groups of this program's machines, in every hierarchy that this process is in.
fn groups() -> impl Iterator<Item = PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let roots: Vec<_> = mounts
        .lines()
        .filter(|line| line.contains(" - cgroup"))
        .filter_map(|line| line.split(' ').nth(4).map(PathBuf::from))
        .collect();
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let own: Vec<_> =
        own.lines().filter_map(|line| Some(line.splitn(3, ':').nth(2)?.trim_start_matches('/').to_owned())).collect();
    let dirs: BTreeSet<_> = roots
        .iter()
        .flat_map(|root| own.iter().map(|group| root.join(group)).chain([root.clone()]))
        .flat_map(|dir| list(&dir.to_string_lossy()))
        .filter(|path| path.to_string_lossy().contains(&mark()))
        .collect();
    dirs.into_iter()
}

/// Processes that this one started and that still run.
fn children() -> impl Iterator<Item = String> {
    let own = process::id().to_string();
    let children: Vec<_> = list("/proc")
        .into_iter()
        .filter_map(|path| {
            let stat = fs::read_to_string(path.join("stat")).ok()?;
            // The name in parentheses may hold anything.
            let (head, tail) = stat.rsplit_once(')')?;
            (tail.split_whitespace().nth(1)? == own).then(|| format!("{head})"))
        })
        .collect();
    children.into_iter()
}

fn directories() -> impl Iterator<Item = PathBuf> {
    let machines = lab::cache_dir().map(|dir| dir.join("machines")).unwrap_or_default();
    let left: Vec<_> =
        list(&machines.to_string_lossy()).into_iter().filter(|path| path.to_string_lossy().contains(&mark())).collect();
    left.into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_that_is_as_it_was_has_no_differences_and_one_that_is_not_has() {
        let host = Host::now();
        let mut other = host.clone();
        other.settings.insert("kernel/panic", "something else".to_owned());
        other.mounts.insert("/nowhere of tmpfs".to_owned());
        other.links.insert("veth-gone".to_owned());
        let found = other.differences().join("\n");
        assert!(found.contains("/proc/sys/kernel/panic was something else"), "{found}");
        assert!(found.contains("a mount is gone: /nowhere"), "{found}");
        assert!(found.contains("a network link is gone: veth-gone"), "{found}");
    }
}

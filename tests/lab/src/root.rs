//! The file system of a machine, as a tar in the cache directory.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, bail};
use nix::fcntl::{Flock, FlockArg};

/// A Debian root: suite and packages. Two of the same are one tar.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Root {
    suite: String,
    packages: Vec<String>,
}

/// What every machine has, beside what its tier asks for.
const BASE: [&str; 6] = ["systemd", "systemd-sysv", "dbus", "iproute2", "mount", "procps"];

/// Raised when roots of an older making will not do.
const MAKING: &str = "1";

impl Root {
    /// The smallest Debian of this suite with a systemd and `packages`.
    #[must_use]
    pub fn debian(suite: &str, packages: &[&str]) -> Self {
        let mut packages: Vec<_> = BASE.iter().chain(packages).map(|name| (*name).to_owned()).collect();
        packages.sort();
        packages.dedup();
        Self { suite: suite.to_owned(), packages }
    }

    /// The tar's path; made now if the cache lacks it, which takes about a minute and the network.
    ///
    /// # Errors
    /// `mmdebstrap` failed: the text has its last lines.
    pub fn ready(&self) -> anyhow::Result<PathBuf> {
        let dir = crate::cache_dir()?.join("roots");
        fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let tar = dir.join(format!("{}-{:016x}.tar", self.suite, self.key()));
        if tar.is_file() {
            return Ok(tar);
        }
        let lock = File::create(tar.with_extension("lock")).context("cannot make the lock of a root")?;
        let _held = Flock::lock(lock, FlockArg::LockExclusive).map_err(|(_, errno)| errno)?;
        if !tar.is_file() {
            self.make(&tar)?;
        }
        Ok(tar)
    }

    fn make(&self, tar: &Path) -> anyhow::Result<()> {
        let started = std::time::Instant::now();
        let part = tar.with_extension("part");
        let log = tar.with_extension("log");
        eprintln!("making a root of Debian {} with {} packages (once)", self.suite, self.packages.len());
        let output = File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
        let status = Command::new("mmdebstrap")
            .args(["--variant=minbase", "--format=tar", "--skip=check/qemu"])
            .arg("--aptopt=Acquire::Retries \"3\"")
            .arg(format!("--include={}", self.packages.join(",")))
            .arg(&self.suite)
            .arg(&part)
            .args(mirror().map(|mirror| format!("deb {mirror} {} main", self.suite)))
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .status()
            .context("cannot run mmdebstrap")?;
        if !status.success() {
            let _ = fs::remove_file(&part);
            let text = fs::read_to_string(&log).unwrap_or_default();
            let lines: Vec<_> = text.lines().rev().take(8).collect();
            let last: Vec<_> = lines.into_iter().rev().collect();
            bail!("mmdebstrap of {} failed ({status}); its log is {}:\n{}", self.suite, log.display(), last.join("\n"));
        }
        fs::write(tar.with_extension("packages"), self.packages.join("\n") + "\n")?;
        fs::rename(&part, tar).with_context(|| format!("cannot rename {}", part.display()))?;
        eprintln!("made {} in {:.0?}", tar.display(), started.elapsed());
        Ok(())
    }

    /// A number that differs for another suite, another list of packages or another way of making it (FNV-1a).
    fn key(&self) -> u64 {
        let text = format!("{MAKING}\n{}\n{}", self.suite, self.packages.join("\n"));
        text.bytes().fold(0xcbf2_9ce4_8422_2325, |key, byte| (key ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
    }
}

/// The Debian mirror that this machine's own apt sources name; mmdebstrap has one of its own where they name none.
fn mirror() -> Option<String> {
    let mut texts = vec![fs::read_to_string("/etc/apt/sources.list").unwrap_or_default()];
    for entry in fs::read_dir("/etc/apt/sources.list.d").into_iter().flatten().flatten() {
        texts.push(fs::read_to_string(entry.path()).unwrap_or_default());
    }
    mirror_in(&texts.join("\n"))
}

/// The first address that ends like a Debian archive.
fn mirror_in(sources: &str) -> Option<String> {
    let lines = sources.lines().map(str::trim).filter(|line| line.starts_with("URIs:") || line.starts_with("deb "));
    lines
        .flat_map(str::split_whitespace)
        .map(|word| word.trim_end_matches('/'))
        .find(|word| word.starts_with("http") && word.ends_with("/debian"))
        .map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_of_packages_does_not_matter_but_the_packages_do() {
        let key = |packages: &[&str]| Root::debian("trixie", packages).key();
        assert_eq!(key(&["rpm", "dnf"]), key(&["dnf", "rpm", "dnf"]));
        assert_ne!(key(&["rpm", "dnf"]), key(&["rpm"]));
        assert_ne!(key(&["rpm"]), Root::debian("bookworm", &["rpm"]).key());
    }

    #[test]
    fn the_mirror_is_debians_archive_and_no_other_source() {
        let sources = "Types: deb\nURIs: https://deb.example.com/node_20.x\n\
                       deb http://security.example.org/debian-security bookworm-security main\n\
                       deb [signed-by=/x] http://mirror.example.org/debian/ bookworm main\n";
        assert_eq!(mirror_in(sources).as_deref(), Some("http://mirror.example.org/debian"));
        assert_eq!(mirror_in("# deb http://mirror.example.org/debian x main"), None);
    }
}

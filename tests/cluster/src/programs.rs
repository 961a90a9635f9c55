//! What runs in a node: Go programs built from modules into the user's cache, and our own from cargo's directory.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Instant,
};

use anyhow::{Context as _, bail, ensure};
use nix::fcntl::{Flock, FlockArg};
use sha2::{Digest as _, Sha256};

/// This crate's own files.
const HERE: &str = env!("CARGO_MANIFEST_DIR");

/// The oldest Go that builds every version.
const GO: (u32, u32) = (1, 26);

/// A Go module below `tests/cluster` and what is built of it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Module {
    /// Its directory, also the key in the cache.
    pub(crate) name: &'static str,
    /// The module whose commands are built.
    of: &'static str,
    commands: &'static [&'static str],
    /// Build tags, separated by blanks.
    tags: &'static str,
    /// The version that Kubernetes' programs call themselves.
    version: &'static str,
}

const KUBERNETES: &[&str] = &[
    "cmd/kube-apiserver",
    "cmd/kube-controller-manager",
    "cmd/kube-scheduler",
    "cmd/kubelet",
    "cmd/kubectl",
    "test/e2e/dra/test-driver",
];

impl Module {
    const fn kubernetes(name: &'static str, version: &'static str) -> Self {
        Self { name, of: "k8s.io/kubernetes", commands: KUBERNETES, tags: "", version }
    }

    /// Kubernetes 1.34.3.
    pub(crate) const K1_34: Self = Self::kubernetes("kubernetes-1.34.3", "1.34.3");
    /// Kubernetes 1.36.3.
    pub(crate) const K1_36: Self = Self::kubernetes("kubernetes-1.36.3", "1.36.3");
    /// Kubernetes 1.37.2.
    pub(crate) const K1_37: Self = Self::kubernetes("kubernetes-1.37.2", "1.37.2");
    /// containerd 2.2.9.
    pub(crate) const CONTAINERD: Self = Self {
        name: "containerd-2.2.9",
        of: "github.com/containerd/containerd/v2",
        commands: &["cmd/containerd", "cmd/containerd-shim-runc-v2", "cmd/ctr"],
        tags: "no_btrfs no_devmapper no_zfs",
        version: "",
    };

    /// The directory of its programs; they are built now if the cache lacks them or has those of other sources.
    pub(crate) fn ready(&self) -> anyhow::Result<PathBuf> {
        let cache = lab::cache_dir()?.join("cluster");
        fs::create_dir_all(&cache).with_context(|| format!("cannot make {}", cache.display()))?;
        let dir = cache.join(self.name);
        let key = self.key()?;
        let current = |dir: &Path| fs::read_to_string(dir.join("built-from")).is_ok_and(|text| text == key);
        if current(&dir) {
            return Ok(dir);
        }
        let lock = File::create(cache.join(format!("{}.lock", self.name))).context("cannot make a lock")?;
        let _held = Flock::lock(lock, FlockArg::LockExclusive).map_err(|(_, errno)| errno)?;
        if !current(&dir) {
            self.build(&dir, &key)?;
        }
        Ok(dir)
    }

    fn source(&self) -> PathBuf {
        Path::new(HERE).join(self.name)
    }

    /// Differs for other sources and another way of building.
    fn key(&self) -> anyhow::Result<String> {
        let mut hash = Sha256::new();
        for file in ["go.mod", "go.sum"] {
            let path = self.source().join(file);
            hash.update(fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?);
        }
        hash.update(self.arguments(Path::new("")).join("\n"));
        Ok(format!("{:x}\n", hash.finalize()))
    }

    fn arguments(&self, to: &Path) -> Vec<String> {
        let mut flags = "-s -w".to_owned();
        let mut numbers = self.version.split('.');
        if let (Some(major), Some(minor)) = (numbers.next(), numbers.next()) {
            // Without these the servers call themselves v0.0.0, and version checks misbehave.
            for (name, value) in
                [("gitVersion", format!("v{}", self.version)), ("gitMajor", major.into()), ("gitMinor", minor.into())]
            {
                flags.push_str(&[" -X k8s.io/component-base/version.", name, "=", &value].concat());
            }
        }
        let mut arguments = vec!["build".to_owned(), "-trimpath".to_owned(), "-ldflags".to_owned(), flags];
        if !self.tags.is_empty() {
            arguments.extend(["-tags".to_owned(), self.tags.to_owned()]);
        }
        arguments.extend(["-o".to_owned(), format!("{}/", to.display())]);
        arguments.extend(self.commands.iter().map(|command| format!("{}/{command}", self.of)));
        arguments
    }

    fn build(&self, dir: &Path, key: &str) -> anyhow::Result<()> {
        let started = Instant::now();
        let part = dir.with_extension("part");
        for old in [&part, &dir.to_owned()] {
            if old.exists() {
                fs::remove_dir_all(old).with_context(|| format!("cannot remove {}", old.display()))?;
            }
        }
        fs::create_dir_all(&part).with_context(|| format!("cannot make {}", part.display()))?;
        println!("building {} (once; some minutes)", self.name);
        let status = Command::new("go")
            .args(self.arguments(&part))
            .current_dir(self.source())
            .env("CGO_ENABLED", "0")
            .env("GOFLAGS", "-mod=readonly -buildvcs=false")
            .stdin(Stdio::null())
            .status()
            .context("cannot run go")?;
        ensure!(status.success(), "go build of {} failed ({status})", self.name);
        fs::write(part.join("built-from"), key)?;
        fs::rename(&part, dir).with_context(|| format!("cannot rename {}", part.display()))?;
        println!("built {} in {:.0?}", self.name, started.elapsed());
        Ok(())
    }
}

/// Why Go cannot be used here; nothing if it can.
pub(crate) fn missing_go() -> Option<String> {
    let how = format!("Go {}.{} or later is needed to build Kubernetes: get it from https://go.dev/dl", GO.0, GO.1);
    let Ok(output) = Command::new("go").args(["env", "GOVERSION"]).stdin(Stdio::null()).output() else {
        return Some(format!("missing program: go. {how}"));
    };
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    let mut numbers = text.trim_start_matches("go").split('.').map(|part| part.parse::<u32>().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    (version < GO).then(|| format!("go is {text}. {how}"))
}

/// Our own programs, as `make release` leaves them.
#[derive(Debug, Clone)]
pub(crate) struct Own {
    dir: PathBuf,
}

impl Own {
    /// Those of cargo's directory of this kind (`target/release`).
    ///
    /// # Errors
    /// One is not there.
    pub(crate) fn in_dir(dir: PathBuf) -> anyhow::Result<Self> {
        for name in ["npu-dra", "npuctl", "testkit", "libdcmi.so"] {
            let path = dir.join(name);
            if !path.is_file() {
                bail!("there is no {}; make release builds it", path.display());
            }
        }
        Ok(Self { dir })
    }

    /// The path of one.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }
}

/// The repository's own files.
pub(crate) fn repository() -> PathBuf {
    Path::new(HERE).ancestors().nth(2).unwrap_or(Path::new("/")).to_owned()
}

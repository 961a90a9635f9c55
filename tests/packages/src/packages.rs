//! The packages to test, and the release after them.

use std::{
    fmt, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, bail, ensure};

use crate::Cli;

/// An older and a newer release of both packages, in both formats.
#[derive(Debug)]
pub(crate) struct Packages {
    /// The older release.
    pub(crate) older: Release,
    /// The newer release.
    pub(crate) newer: Release,
    /// Whether the newer one is under test (an older release was given), else the older one is.
    pub(crate) newer_is_tested: bool,
}

/// One release: a directory with its packages.
#[derive(Debug, Clone)]
pub(crate) struct Release {
    pub(crate) dir: PathBuf,
    /// `0.1.0-1`.
    pub(crate) version: String,
}

/// There is nothing to test yet.
#[derive(Debug)]
pub(crate) struct Missing(String);

impl std::error::Error for Missing {}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Packages {
    /// Finds what is to be tested, and packs the next release if no older one was given.
    pub(crate) fn find(cli: &Cli) -> anyhow::Result<Self> {
        for program in ["testkit", "libdcmi.so"] {
            let path = cli.programs.join(program);
            if !path.is_file() {
                bail!(Missing(format!("{} is missing: run make release", path.display())));
            }
        }
        let dist = cli.checkout.join(&cli.dist);
        let tested = Release::in_dir(&dist)?;
        if let Some(previous) = &cli.previous {
            return Ok(Self { older: Release::in_dir(previous)?, newer: tested, newer_is_tested: true });
        }
        let newer = pack_next(&cli.checkout, &tested)?;
        Ok(Self { older: tested, newer, newer_is_tested: false })
    }

    /// The release under test.
    pub(crate) fn tested(&self) -> &Release {
        if self.newer_is_tested { &self.newer } else { &self.older }
    }
}

impl Release {
    fn in_dir(dir: &Path) -> anyhow::Result<Self> {
        let arch = std::env::consts::ARCH;
        let missing = |what: &str| Missing(format!("no {what} in {}: run make packages", dir.display()));
        let mut versions = Vec::new();
        for entry in fs::read_dir(dir).map_err(|_| missing("packages"))? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            let version = name.strip_prefix("npu-dra-").and_then(|rest| rest.strip_suffix(&format!(".{arch}.rpm")));
            versions.extend(version.map(str::to_owned));
        }
        let version = match versions.as_slice() {
            [version] => version.clone(),
            [] => bail!(missing(&format!("RPM of npu-dra for {arch}"))),
            _ => bail!("{} has several releases ({}); remove all but one", dir.display(), versions.join(", ")),
        };
        let release = Self { dir: dir.to_owned(), version };
        for file in release.debs().into_iter().chain(release.rpms()) {
            if !dir.join(&file).is_file() {
                bail!(missing(&file));
            }
        }
        Ok(release)
    }

    /// File names of its DEBs.
    pub(crate) fn debs(&self) -> [String; 2] {
        let arch = if std::env::consts::ARCH == "aarch64" { "arm64" } else { "amd64" };
        ["npu-dra", "npuctl"].map(|name| format!("{name}_{}_{arch}.deb", self.version))
    }

    /// File names of its RPMs.
    pub(crate) fn rpms(&self) -> [String; 2] {
        ["npu-dra", "npuctl"].map(|name| format!("{name}-{}.{}.rpm", self.version, std::env::consts::ARCH))
    }
}

/// A line that `packaging/pack.sh` gives the settings file of a next release more.
pub(crate) const NEXT_LINE: &str = "# As packaged in release";

/// Packs the same programs again as the next release. Kept until the packages under test change.
fn pack_next(checkout: &Path, tested: &Release) -> anyhow::Result<Release> {
    let checkout = checkout.canonicalize().context("cannot find the checkout")?;
    let (version, number) = tested.version.rsplit_once('-').context("the packages have no release number")?;
    let number: u32 = number.parse().with_context(|| format!("{number} is no release number"))?;
    let next = number + 1;
    let dir = checkout.join("target/package-test/next");
    let stamp = stamp(&tested.dir.join(&tested.rpms()[0]))?;
    if fs::read_to_string(dir.join("made-from")).is_ok_and(|text| text == stamp) {
        return Release::in_dir(&dir);
    }
    if dir.exists() {
        fs::remove_dir_all(&dir).with_context(|| format!("cannot remove {}", dir.display()))?;
    }
    fs::create_dir_all(&dir)?;
    eprintln!("packing release {version}-{next} of the same programs, to upgrade to");
    let packed = Command::new("sh")
        .arg(checkout.join("packaging/pack.sh"))
        .arg(std::env::consts::ARCH)
        .arg(&dir)
        .arg(next.to_string())
        .output()
        .context("cannot run packaging/pack.sh")?;
    ensure!(packed.status.success(), "packing the next release failed:\n{}", String::from_utf8_lossy(&packed.stderr));
    fs::write(dir.join("made-from"), stamp)?;
    Release::in_dir(&dir)
}

fn stamp(file: &Path) -> anyhow::Result<String> {
    let about = fs::metadata(file).with_context(|| format!("cannot read {}", file.display()))?;
    Ok(format!("{:?} {}", about.modified()?, about.len()))
}

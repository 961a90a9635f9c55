//! A machine with the packages at hand, the NPUs' world, and the cluster around the node.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use dcmi::world::World;
use lab::{Machine, Options, Root};
use serde_json::Value;

use crate::packages::{Packages, Release};

/// Long enough for anything that is to happen; reached only by a failure.
pub(crate) const SOON: Duration = Duration::from_secs(40);

/// How packages are handled on a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    Deb,
    Rpm,
}

/// One set of the catalogue that has a machine.
#[derive(Debug)]
pub(crate) struct Set {
    pub(crate) name: &'static str,
    pub(crate) format: Format,
    suite: &'static str,
    packages: &'static [&'static str],
}

/// All of them.
pub(crate) const SETS: [Set; 3] = [
    Set { name: "trixie", format: Format::Deb, suite: "trixie", packages: &[] },
    Set { name: "bookworm", format: Format::Deb, suite: "bookworm", packages: &[] },
    Set { name: "rpm", format: Format::Rpm, suite: "trixie", packages: &["rpm", "dnf", "createrepo-c"] },
];

/// Which of the two releases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Which {
    Older,
    Newer,
}

/// A machine under test.
#[derive(Debug)]
pub(crate) struct Stage {
    pub(crate) set: &'static Set,
    pub(crate) machine: Machine,
    older: Release,
    newer: Release,
    tested: Release,
    /// Whether the newer release is known to bring another settings file.
    pub(crate) new_settings: bool,
}

/// A claim that kubelet prepared.
#[derive(Debug, Clone)]
pub(crate) struct Claim {
    pub(crate) name: String,
    pub(crate) uid: String,
    /// The devices' CDI names, as the answer has them.
    pub(crate) cdi: Vec<String>,
}

/// All that a claim leaves on a node, read past the daemon.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Live {
    vnpus: Vec<String>,
    cdi: BTreeMap<String, String>,
    records: BTreeMap<String, String>,
    /// Calls that make or destroy a vNPU, ever.
    cuts: usize,
}

impl Live {
    /// Nothing was made, destroyed or written since.
    pub(crate) fn untouched(&self, now: &Self) -> anyhow::Result<()> {
        ensure!(self.vnpus == now.vnpus, "vNPUs were {:?} and are {:?}", self.vnpus, now.vnpus);
        ensure!(self.cdi == now.cdi, "CDI files changed:\n{:#?}\n{:#?}", self.cdi, now.cdi);
        ensure!(self.records == now.records, "records changed:\n{:#?}\n{:#?}", self.records, now.records);
        ensure!(self.cuts == now.cuts, "{} vendor calls made or destroyed a vNPU", now.cuts - self.cuts);
        Ok(())
    }

    pub(crate) fn vnpus(&self) -> usize {
        self.vnpus.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.vnpus.is_empty() && self.cdi.is_empty() && self.records.is_empty()
    }
}

const TESTKIT_UNIT: &str = "[Unit]\nDescription=Kubelet and API server stand-ins\n\
    [Service]\nType=exec\nExecStart=/usr/local/bin/testkit cluster\nSyslogIdentifier=testkit\n";

/// What a machine without hardware needs beside the packages: the library's world is the hardware.
const HARDWARE: &str = "[Service]\nEnvironment=FAKE_DCMI_WORLD=/var/lib/testkit/world\n";

/// Namespaces of a container without `CAP_SYS_RESOURCE` can neither lower an OOM score nor raise a limit.
const NO_RESOURCE: &str = "OOMScoreAdjust=0\nLimitRTPRIO=infinity\n";

const SETTINGS: &str = "enable-hard-vnpu = true\nhealth.interval = \"500ms\"\n";

impl Stage {
    /// Boots a machine of this set with the packages in `/packages`, and the node's cluster.
    pub(crate) fn boot(set: &'static Set, packages: &Packages, programs: &Path) -> anyhow::Result<Self> {
        let tar = Root::debian(set.suite, set.packages).ready()?;
        let machine = Machine::boot(&Options::new("node1", &tar), |root| prepare(root, set, packages, programs))?;
        let stage = Self {
            set,
            machine,
            older: packages.older.clone(),
            newer: packages.newer.clone(),
            tested: packages.tested().clone(),
            new_settings: !packages.newer_is_tested,
        };
        stage.start_cluster()?;
        if set.format == Format::Rpm {
            stage.make_repository()?;
        }
        Ok(stage)
    }

    fn start_cluster(&self) -> anyhow::Result<()> {
        self.sh("systemctl start testkit.service")?;
        self.machine.wait("the stand-ins of kubelet and API server", SOON, |machine| {
            let answers =
                machine.try_sh("test -S /var/lib/testkit/run/sandbox.sock && systemctl is-active -q testkit")?;
            Ok(answers.status.success().then_some(()))
        })
    }

    /// A repository of both releases, and a stub that provides what the base of a distribution with RPMs would.
    fn make_repository(&self) -> anyhow::Result<()> {
        self.sh(include_str!("repository.sh"))?;
        Ok(())
    }

    pub(crate) fn sh(&self, script: &str) -> anyhow::Result<String> {
        self.machine.sh(script)
    }

    /// Exit code, standard output, standard error.
    pub(crate) fn try_sh(&self, script: &str) -> anyhow::Result<(i32, String, String)> {
        let output = self.machine.try_sh(script)?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ok((output.status.code().unwrap_or(-1), text(&output.stdout), text(&output.stderr)))
    }

    /// An error with the end of the service's journal.
    pub(crate) fn with_journal(&self, error: &anyhow::Error) -> anyhow::Error {
        let script = "systemctl status --no-pager --lines=0 npu-dra.service npu-dra.socket\n\
                      journalctl --no-pager -b -n 25 -o short-monotonic -u npu-dra.service -u testkit.service";
        let journal = self.try_sh(script).map(|(_, text, _)| text).unwrap_or_default();
        anyhow::anyhow!("{error:#}\n--- journal\n{journal}")
    }

    pub(crate) fn keep(self) -> anyhow::Result<String> {
        self.machine.keep()
    }

    fn release(&self, which: Which) -> &Release {
        match which {
            Which::Older => &self.older,
            Which::Newer => &self.newer,
        }
    }

    /// Version of the release.
    pub(crate) fn version(&self, which: Which) -> &str {
        &self.release(which).version
    }

    /// The release under test.
    pub(crate) fn tested(&self) -> Which {
        if self.tested.version == self.older.version { Which::Older } else { Which::Newer }
    }

    /// The version that the package database has; `None` if it is not installed.
    pub(crate) fn installed(&self) -> anyhow::Result<Option<String>> {
        let script = match self.set.format {
            Format::Deb => "dpkg-query -W -f '${db:Status-Status} ${Version}' npu-dra",
            Format::Rpm => "rpm -q --qf 'installed %{VERSION}-%{RELEASE}' npu-dra",
        };
        let (code, text, _) = self.try_sh(script)?;
        Ok((code == 0).then(|| text.strip_prefix("installed ").map(str::to_owned)).flatten())
    }

    /// Installs, upgrades or downgrades both packages to a release, as an administrator would without a terminal.
    pub(crate) fn install(&self, which: Which) -> anyhow::Result<String> {
        let version = self.version(which);
        let dir = match which {
            Which::Older => "older",
            Which::Newer => "newer",
        };
        let script = match self.set.format {
            Format::Deb => format!(
                "export DEBIAN_FRONTEND=noninteractive\n\
                 apt-get install -y -q --allow-downgrades -o Dpkg::Options::=--force-confold \
                 -o Dpkg::Options::=--force-confdef /packages/{dir}/*.deb 2>&1"
            ),
            Format::Rpm => {
                let verb = match self.installed()? {
                    None => "install",
                    Some(_) if which == Which::Older => "downgrade",
                    Some(_) => "upgrade",
                };
                format!("dnf -y {verb} npu-dra-{version} npuctl-{version} 2>&1")
            }
        };
        let text = self.sh(&script)?;
        let now = self.installed()?;
        ensure!(now.as_deref() == Some(version), "{version} was installed, but the database says {now:?}:\n{text}");
        Ok(text)
    }

    /// Removes both packages; configuration and state stay.
    pub(crate) fn remove(&self) -> anyhow::Result<String> {
        let text = self.sh(match self.set.format {
            Format::Deb => "DEBIAN_FRONTEND=noninteractive apt-get remove -y -q npu-dra npuctl 2>&1",
            Format::Rpm => "dnf -y remove npu-dra npuctl 2>&1",
        })?;
        ensure!(self.installed()?.is_none(), "npu-dra is still installed:\n{text}");
        Ok(text)
    }

    /// The release under test is installed, with slicing on and the hardware's drop-in; nothing else is promised.
    pub(crate) fn have_installed(&self) -> anyhow::Result<()> {
        if self.installed()?.as_deref() != Some(self.tested.version.as_str()) {
            self.install(self.tested())?;
        }
        self.machine.write("/etc/npu-dra/npu-dra.toml.d/lab.toml", SETTINGS)
    }

    /// It runs, is enabled, and has read the NPUs; claims may be there.
    pub(crate) fn have_running(&self) -> anyhow::Result<()> {
        self.have_installed()?;
        self.sh("systemctl daemon-reload\nsystemctl reset-failed\nsystemctl enable --now npu-dra 2>&1")?;
        self.wait_ready()
    }

    /// It runs, and nobody has a claim.
    pub(crate) fn fresh(&self) -> anyhow::Result<()> {
        self.have_running()?;
        for record in self.live()?.records.keys() {
            let uid = record.trim_end_matches(".json");
            let shown: Value = serde_json::from_str(&self.sh(&format!("npuctl claims show {uid} -o json"))?)?;
            let name = shown["items"][0]["name"].as_str().context("a record has no name")?.to_owned();
            self.unprepare(&name)?;
        }
        let live = self.live()?;
        ensure!(live.is_empty(), "the node is not clean: {live:?}");
        Ok(())
    }

    /// Waits until kubelet has taken the daemon in, and the NPUs are read and published.
    pub(crate) fn wait_ready(&self) -> anyhow::Result<()> {
        self.machine.wait("npu-dra to be ready", SOON, |_| {
            let status: Value = serde_json::from_str(&self.sh("npuctl status -o json")?)?;
            let status = &status["items"][0];
            let slices = self.sh("npuctl slices --no-headers")?;
            let ready = status["daemon"]["recovered"] == true
                && status["kubelet"]["registered"] == true
                && slices.contains(" published ");
            if ready { Ok(Some(())) } else { bail!("status is {status:#}, slices are\n{slices}") }
        })
    }

    /// The service's main process.
    pub(crate) fn main_pid(&self) -> anyhow::Result<u32> {
        let pid: u32 = self.show("MainPID")?.parse()?;
        ensure!(pid != 0, "the service has no process");
        Ok(pid)
    }

    /// A property of the service.
    pub(crate) fn show(&self, property: &str) -> anyhow::Result<String> {
        Ok(self.sh(&format!("systemctl show -P {property} npu-dra.service"))?.trim().to_owned())
    }

    /// Waits until the service is active under another main process.
    pub(crate) fn wait_other_pid(&self, before: u32) -> anyhow::Result<u32> {
        self.machine.wait("another main process", SOON, |_| {
            let now: u32 = self.show("MainPID")?.parse()?;
            let active = self.show("ActiveState")? == "active";
            Ok((active && now != 0 && now != before).then_some(now))
        })
    }

    /// As scheduler and kubelet do it: a claim is made, allocated, and prepared; one that exists is prepared again.
    pub(crate) fn prepare(&self, name: &str, memory: Option<&str>) -> anyhow::Result<Claim> {
        let memory = memory.map(|memory| format!("--memory {memory}")).unwrap_or_default();
        let text = self.sh(&format!("testkit prepare {name} {memory} --sandbox /var/lib/testkit"))?;
        let uid = text.lines().find_map(|line| line.strip_prefix("claim ")?.split_once("uid ").map(|(_, uid)| uid));
        let uid = uid.context("testkit named no uid")?.trim().to_owned();
        let words = text.lines().filter_map(|line| line.strip_prefix("prepared ")?.split_once(" as "));
        let cdi: Vec<_> = words.map(|(_, names)| names.to_owned()).collect();
        ensure!(!cdi.is_empty(), "nothing was prepared:\n{text}");
        Ok(Claim { name: name.to_owned(), uid, cdi })
    }

    pub(crate) fn unprepare(&self, name: &str) -> anyhow::Result<()> {
        self.sh(&format!("testkit unprepare {name} --sandbox /var/lib/testkit"))?;
        Ok(())
    }

    /// A whole card, and two parts of others.
    pub(crate) fn three_claims(&self) -> anyhow::Result<[Claim; 3]> {
        let claims =
            [self.prepare("whole", None)?, self.prepare("big", Some("10000"))?, self.prepare("small", Some("8Gi"))?];
        let live = self.live()?;
        ensure!(live.vnpus() == 2 && live.cdi.len() == 3, "three claims left {live:?}");
        Ok(claims)
    }

    /// Prepares claims again: the answers must be those that kubelet got before.
    pub(crate) fn same_answers(&self, claims: &[Claim]) -> anyhow::Result<()> {
        for claim in claims {
            let again = self.prepare(&claim.name, None)?;
            ensure!(again.cdi == claim.cdi && again.uid == claim.uid, "{claim:?} is answered as {again:?} now");
        }
        Ok(())
    }

    /// Releases claims, after which nothing of them may be left.
    pub(crate) fn release_all(&self, claims: &[Claim]) -> anyhow::Result<()> {
        for claim in claims {
            self.unprepare(&claim.name)?;
        }
        let live = self.live()?;
        ensure!(live.is_empty(), "released claims left {live:?}");
        Ok(())
    }

    /// What claims have on this node now.
    pub(crate) fn live(&self) -> anyhow::Result<Live> {
        let root = self.machine.root();
        let world = World::open(root.join("var/lib/testkit/world")).context("cannot open the NPUs' world")?;
        let vnpus = world.vnpus().context("cannot read the vNPUs")?;
        let calls = world.calls().context("cannot read the vendor calls")?;
        let cutting = |function: &str| function.contains("create_vdevice") || function.contains("destroy_vdevice");
        Ok(Live {
            vnpus: vnpus.iter().map(|vnpu| format!("{} {} {}", vnpu.id, vnpu.phy, vnpu.template)).collect(),
            cdi: files(&root.join("etc/cdi"))?,
            records: files(&root.join("var/lib/npu-dra/claims"))?,
            cuts: calls.list.iter().filter(|call| cutting(&call.function)).count(),
        })
    }
}

/// What lies on the machine's disk before it boots.
fn prepare(root: &Path, set: &Set, packages: &Packages, programs: &Path) -> anyhow::Result<()> {
    let put = |from: PathBuf, to: &str| {
        let to = root.join(to);
        let dir = to.parent().context("no directory")?;
        fs::create_dir_all(dir)?;
        fs::copy(&from, &to).with_context(|| format!("cannot copy {}", from.display()))?;
        anyhow::Ok(())
    };
    put(programs.join("testkit"), "usr/local/bin/testkit")?;
    put(programs.join("libdcmi.so"), "usr/local/dcmi/libdcmi.so")?;
    for (name, release) in [("older", &packages.older), ("newer", &packages.newer)] {
        let files = if set.format == Format::Deb { release.debs() } else { release.rpms() };
        for file in files {
            put(release.dir.join(&file), &format!("packages/{name}/{file}"))?;
        }
    }
    let mut drop_in = HARDWARE.to_owned();
    if !has_sys_resource()? {
        drop_in += NO_RESOURCE;
    }
    for (file, text) in [
        ("etc/systemd/system/testkit.service", TESTKIT_UNIT),
        ("etc/systemd/system/npu-dra.service.d/lab.conf", &drop_in),
    ] {
        let path = root.join(file);
        fs::create_dir_all(path.parent().context("no directory")?)?;
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// Whether a process here may lower an OOM score and raise a limit.
fn has_sys_resource() -> anyhow::Result<bool> {
    let status = fs::read_to_string("/proc/self/status")?;
    let caps = status.lines().find_map(|line| line.strip_prefix("CapEff:")).context("no CapEff")?;
    Ok(u64::from_str_radix(caps.trim(), 16)? & (1 << 24) != 0)
}

/// Names and texts of the files in a directory that may be absent; dot files are somebody's work in progress.
fn files(dir: &Path) -> anyhow::Result<BTreeMap<String, String>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(dir).into_iter().flatten() {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if entry.file_type()?.is_file() && !name.starts_with('.') {
            found.insert(name, fs::read_to_string(entry.path())?);
        }
    }
    Ok(found)
}

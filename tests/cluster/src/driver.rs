//! The driver in a node: which cards it finds, how it is set up, and the unit that runs it.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, ensure};
use dcmi::world::{ChipState, Data, NodeKind, Profile, World};
use serde_json::Value;

use crate::{
    plane::{PCI, Plane, SOON, WORLD, write},
    programs::repository,
};

/// The driver's name.
pub(crate) const DRIVER: &str = "npu.huawei.com";
/// The driver's slices.
pub(crate) const SLICES: &str = "/apis/resource.k8s.io/v1/resourceslices?fieldSelector=spec.driver%3Dnpu.huawei.com";

/// Major number of the stand-ins for device nodes: the kernel's memory devices.
const MAJOR: u64 = 1;
/// Minor number of `davinci0`. There is no such memory device, so that an open which the device control group lets pass
/// ends with "No such device or address", and one that it does not with "Operation not permitted".
const FIRST_MINOR: u64 = 64;
/// The group of the vendor's software.
pub(crate) const GID: u32 = 1500;

/// The cards of the node and the settings of the driver.
#[derive(Debug, Clone)]
pub(crate) struct Driver {
    cards: Data,
    settings: BTreeMap<String, String>,
}

impl PartialEq for Driver {
    fn eq(&self, other: &Self) -> bool {
        let cards = |driver: &Self| serde_json::to_string(&driver.cards).ok();
        self.settings == other.settings && cards(self) == cards(other)
    }
}

impl Driver {
    /// Eight 910B4 that are offered whole.
    pub(crate) fn whole() -> Self {
        let driver = Self { cards: Data::default(), settings: BTreeMap::new() };
        driver
            .on(Profile::Ascend910B4)
            .with("health.interval", "\"1s\"")
            .with("log.level", "\"debug,h2=info,hyper=info,hyper_util=info,rustls=info,tower=info\"")
    }

    /// Eight 910B4 that are cut, by the best model that the API server keeps.
    pub(crate) fn cutting() -> Self {
        Self::whole().with("enable-hard-vnpu", "true")
    }

    /// The same with the cards of another profile.
    pub(crate) fn on(self, profile: Profile) -> Self {
        self.edit(|cards| *cards = profile.data())
    }

    /// The same with other cards.
    pub(crate) fn edit(mut self, change: impl FnOnce(&mut Data)) -> Self {
        change(&mut self.cards);
        self.cards.dev_dir = PathBuf::from("/dev");
        self.cards.vnpu_cfg = PathBuf::from("/etc/vnpu.cfg");
        self.cards.node = NodeKind::Distinct { major: MAJOR, first: FIRST_MINOR, gid: GID };
        self
    }

    /// The same with a setting of npu-dra.toml: key, and value as TOML.
    pub(crate) fn with(mut self, key: &str, value: &str) -> Self {
        self.settings.insert(key.to_owned(), value.to_owned());
        self
    }

    /// The number of cards that work.
    pub(crate) fn cards(&self) -> usize {
        let works = |card: &&dcmi::world::Card| card.chips.iter().any(|chip| chip.state == ChipState::Up);
        self.cards.cards.iter().filter(works).count()
    }

    fn settings(&self) -> String {
        let lines: Vec<_> = self.settings.iter().map(|(key, value)| format!("{key} = {value}\n")).collect();
        lines.concat()
    }

    /// Makes the node's cards and settings these, and starts the driver with nothing remembered. It must not run.
    fn set_up(&self, plane: &Plane) -> anyhow::Result<()> {
        plane.sh("rm -rf /var/lib/npu-dra/* /etc/cdi/* /etc/vnpu.cfg /etc/npu-dra\n\
             rm -f /dev/davinci* /dev/vdavinci* /dev/devmm_svm /dev/hisi_hdc /dev/dvpp_cmdlist")?;
        let cards = &self.cards;
        plane.inside(|| {
            let world = World::create_with(WORLD, cards).context("cannot make the world of NPUs")?;
            world.make_nodes().context("cannot make the device nodes")
        })?;
        fill_bus(&plane.file(PCI), cards)?;
        write(&plane.file("/etc/npu-dra/npu-dra.toml"), self.settings().as_bytes())?;
        plane.api().delete(SLICES)?;
        Ok(())
    }

    /// Starts the driver on a node that is as this says, and waits until kubelet and scheduler know it. Whatever ran
    /// before is stopped and forgotten.
    ///
    /// # Errors
    /// It does not come up.
    pub(crate) fn start_afresh(&self, plane: &Plane) -> anyhow::Result<()> {
        plane.sh("systemctl stop npu-dra.service npu-dra.socket 2>/dev/null || true; systemctl reset-failed npu-dra.service 2>/dev/null || true")?;
        self.set_up(plane)?;
        plane.run(&["systemctl", "start", "npu-dra.service"])?;
        self.wait_published(plane)
    }

    /// Waits until kubelet has registered the driver, and the pool is complete and has all cards.
    ///
    /// # Errors
    /// They are not in time.
    pub(crate) fn wait_published(&self, plane: &Plane) -> anyhow::Result<()> {
        plane.machine().wait("the driver to be registered and its pool to be complete", SOON, |_| {
            let slices = plane.api().list(SLICES)?;
            let (complete, whole) = (is_complete(&slices), whole_cards(&slices));
            ensure!(
                complete && whole == self.cards(),
                "{} slices with {whole} cards, complete: {complete}",
                slices.len()
            );
            let status = status(plane)?;
            ensure!(status["kubelet"]["registered"] == true, "{}", status["kubelet"]);
            Ok(Some(()))
        })
    }
}

/// The memory of the driver's processes, in KiB: the sum of their proportional set sizes.
///
/// # Errors
/// The driver does not run.
pub(crate) fn processes_pss(plane: &Plane) -> anyhow::Result<u64> {
    pss_of(plane, plane.main_pid("npu-dra.service")?)
}

/// The proportional set size of a process of the node and its children, in KiB.
///
/// # Errors
/// There is no such process.
pub(crate) fn pss_of(plane: &Plane, pid: u32) -> anyhow::Result<u64> {
    let text = plane.sh(&format!(
        "for one in {pid} $(cat /proc/{pid}/task/*/children); do grep ^Pss: /proc/$one/smaps_rollup; done"
    ))?;
    let sizes = text.lines().filter_map(|line| line.split_whitespace().nth(1)).map(str::parse::<u64>);
    sizes.sum::<Result<_, _>>().context("the kernel's sizes cannot be read")
}

/// The items that `npuctl WORDS -o json` shows.
pub(crate) fn npuctl(plane: &Plane, words: &[&str]) -> anyhow::Result<Vec<Value>> {
    let all: Vec<_> = ["npuctl"].into_iter().chain(words.iter().copied()).chain(["-o", "json"]).collect();
    let mut document: Value = serde_json::from_str(&plane.run(&all)?)?;
    match document["items"].take() {
        Value::Array(items) => Ok(items),
        _ => anyhow::bail!("npuctl {} shows no items: {document}", words.join(" ")),
    }
}

/// What `npuctl status` shows.
pub(crate) fn status(plane: &Plane) -> anyhow::Result<Value> {
    npuctl(plane, &["status"])?.into_iter().next().context("npuctl status shows nothing")
}

/// Whether these are all slices of one generation of a pool.
pub(crate) fn is_complete(slices: &[Value]) -> bool {
    let pool = |slice: &Value| slice["spec"]["pool"].clone();
    slices.first().is_some_and(|first| {
        slices.iter().all(|slice| pool(slice) == pool(first)) && pool(first)["resourceSliceCount"] == slices.len()
    })
}

/// How many devices of these slices are whole cards (or, in the static model, stand for one).
fn whole_cards(slices: &[Value]) -> usize {
    let mut cards: Vec<String> = Vec::new();
    for device in slices.iter().filter_map(|slice| slice["spec"]["devices"].as_array()).flatten() {
        let attributes = &device["attributes"];
        if attributes["type"]["string"] != "placeholder" {
            let card = attributes["uuid"]["string"].as_str().unwrap_or_default();
            if !cards.iter().any(|known| known == card) {
                cards.push(card.to_owned());
            }
        }
    }
    cards.len()
}

/// Puts the driver's unit into a node's root before it boots: the shipped one, with what a simulated library needs.
///
/// # Errors
/// A file cannot be copied.
pub(crate) fn install_unit(root: &Path) -> anyhow::Result<()> {
    let shipped = repository().join("systemd");
    for (from, to) in [
        ("npu-dra.service", "usr/lib/systemd/system/npu-dra.service"),
        ("npu-dra.socket", "usr/lib/systemd/system/npu-dra.socket"),
        ("npu-dra.sysusers", "usr/lib/sysusers.d/npu-dra.conf"),
        ("npu-dra.tmpfiles", "usr/lib/tmpfiles.d/npu-dra.conf"),
    ] {
        let text = fs::read(shipped.join(from)).with_context(|| format!("cannot read systemd/{from}"))?;
        write(&root.join(to), &text)?;
    }
    // The library makes device nodes as the kernel's driver would. Such a machine cannot lower a score.
    let drop_in = format!(
        "[Service]\nEnvironment={}={WORLD} RUST_BACKTRACE=1\nCapabilityBoundingSet=CAP_MKNOD\nOOMScoreAdjust=0\n",
        dcmi::world::VARIABLE
    );
    write(&root.join("etc/systemd/system/npu-dra.service.d/cluster-test.conf"), drop_in.as_bytes())?;
    fs::create_dir_all(root.join(WORLD.trim_start_matches('/'))).context("cannot make the world's directory")
}

/// Makes a directory look like `/sys/bus/pci` with these cards on it.
fn fill_bus(bus: &Path, cards: &Data) -> anyhow::Result<()> {
    for name in ["devices", "roots"] {
        let dir = bus.join(name);
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    }
    for chip in cards.chips().filter(|chip| chip.state != ChipState::Dropped) {
        let root = format!("pci{}0", chip.bus.get(..6).unwrap_or("0000:0"));
        let function = Path::new("roots").join(root).join(&chip.bus);
        let behind: Vec<_> = cards.chips().filter(|other| other.bus == chip.bus).map(|other| other.phy).collect();
        for (name, text) in [
            ("vendor", "0x19e5".to_owned()),
            ("device", format!("{:#06x}", chip.pci_device)),
            ("class", "0x120000".to_owned()),
            ("numa_node", chip.numa.to_string()),
            ("dev_id", behind.iter().min().unwrap_or(&chip.phy).to_string()),
            ("davinci_dev_num", behind.len().to_string()),
        ] {
            write(&bus.join(&function).join(name), format!("{text}\n").as_bytes())?;
        }
        let link = bus.join("devices").join(&chip.bus);
        if link.symlink_metadata().is_err() {
            symlink(Path::new("..").join(&function), &link)
                .with_context(|| format!("cannot link {}", link.display()))?;
        }
    }
    Ok(())
}

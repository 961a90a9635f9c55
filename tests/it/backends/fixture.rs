//! The same node, eight 910B4, for each backend, and what a test may do to it.

use std::{fs, os::unix::fs::symlink, path::Path, sync::Arc, time::Duration};

use dcmi::world::{Action, Fault as Planted, Profile, World};
use npu_dra::{
    device::{self, Backend, Choice, Fault, Settings, memory},
    domain::{
        health::{Alarm, FaultEvent, HealthReading, Level, Turn},
        npu::{ChipReading, Family, Link, Scan, Vdie},
    },
};
use tempfile::TempDir;

/// A node behind a backend.
pub(crate) trait Fixture: Send + Sync {
    /// Name of the backend.
    const NAME: &'static str;
    /// A healthy node, not yet scanned.
    fn new() -> Self;
    fn backend(&self) -> &dyn Backend;
    /// Physical id and PCI address of each chip, by physical id.
    fn chips(&self) -> Vec<(u32, String)> {
        let chips = Profile::Ascend910B4.data();
        chips.chips().map(|chip| (chip.phy, chip.bus.clone())).collect()
    }
    /// A chip falls off the bus.
    fn lose(&self, physical_id: u32);
    /// It is back.
    fn give_back(&self, physical_id: u32);
    /// Sets health and fault codes of a chip.
    fn alarm(&self, physical_id: u32, level: Level, codes: &[u32]);
    /// A fault begins or ends on a chip, and an event says so.
    fn fault_event(&self, physical_id: u32, code: u32, occurred: bool);
    /// The device node of a chip vanishes, or is back.
    fn set_device_node(&self, physical_id: u32, there: bool);
    /// A process runs on a chip, or none does any more.
    fn occupy(&self, physical_id: u32, pids: &[i32]);
    /// Makes a vNPU as somebody else would; gives its id.
    fn add_vnpu(&self, physical_id: u32, template: &str) -> u32;
    /// Destroys a vNPU as somebody else would.
    fn remove_vnpu(&self, id: u32);
    /// A container opens a vNPU, or has closed it.
    fn open_vnpu(&self, id: u32, open: bool);
    /// Ids of all vNPUs that really exist.
    fn vnpus(&self) -> Vec<u32>;
    /// From now on the library chooses ids itself.
    fn ignore_ids(&self);
    /// The next destroy makes the vNPU again under another id, and fails.
    fn remake(&self);
    /// The next create makes the vNPU, and fails.
    fn fail_after_create(&self);
    /// The node cuts for virtual machines.
    fn cut_for_machines(&self);
    /// The machine restarts; the vendor's boot script has not run.
    fn reboot(&self);
    /// The vendor's boot script runs.
    fn replay(&self);
    /// From now on nothing can be read.
    fn shatter(&self);
    /// All can be read again.
    fn mend(&self);
}

/// NUMA node of a chip of the node.
pub(crate) fn numa(physical_id: u32) -> u32 {
    let data = Profile::Ascend910B4.data();
    u32::try_from(data.chip(physical_id).unwrap().numa).unwrap()
}

pub(crate) struct Memory {
    backend: memory::Memory,
    whole: Scan,
}

impl Fixture for Memory {
    const NAME: &'static str = "memory";

    fn new() -> Self {
        Self::of(Profile::Ascend910B4)
    }

    fn backend(&self) -> &dyn Backend {
        &self.backend
    }

    fn lose(&self, physical_id: u32) {
        self.backend.drop_chip(physical_id);
    }

    fn give_back(&self, _: u32) {
        self.backend.set_scan(self.whole.clone());
    }

    fn alarm(&self, physical_id: u32, level: Level, codes: &[u32]) {
        self.backend.set_health(physical_id, HealthReading { codes: codes.to_vec(), ..HealthReading::of(level) });
    }

    fn fault_event(&self, physical_id: u32, code: u32, occurred: bool) {
        let turn = if occurred { Turn::Occurred } else { Turn::Recovered };
        let codes = if occurred { vec![code] } else { Vec::new() };
        self.backend.set_health(physical_id, HealthReading { codes, ..HealthReading::default() });
        self.backend.alarm(Alarm::Event { physical_id, event: FaultEvent { code, level: Level::Major, turn } });
    }

    fn set_device_node(&self, _: u32, _: bool) {
        unreachable!("it has no device nodes");
    }

    fn occupy(&self, physical_id: u32, pids: &[i32]) {
        self.backend.set_processes(physical_id, pids);
    }

    fn add_vnpu(&self, physical_id: u32, template: &str) -> u32 {
        self.backend.add_vnpu(physical_id, template).unwrap()
    }

    fn remove_vnpu(&self, id: u32) {
        assert!(self.backend.remove_vnpu(id));
    }

    fn open_vnpu(&self, id: u32, open: bool) {
        self.backend.set_in_use(id, open);
    }

    fn vnpus(&self) -> Vec<u32> {
        self.backend.vnpus().into_keys().collect()
    }

    fn ignore_ids(&self) {
        self.backend.cut(|cutting| cutting.ignores_ids = true);
    }

    fn remake(&self) {
        self.backend.plant(memory::Call::Destroy, memory::Mishap::Remade);
    }

    fn fail_after_create(&self) {
        let fault = Fault::Failed { backend: "memory", call: "create".to_owned(), why: "told to fail".to_owned() };
        self.backend.plant(memory::Call::Create, memory::Mishap::After(fault));
    }

    fn cut_for_machines(&self) {
        self.backend.cut(|cutting| cutting.virtual_machines = Some(true));
    }

    fn reboot(&self) {
        self.backend.reboot();
    }

    fn replay(&self) {
        self.backend.replay();
    }

    fn shatter(&self) {
        let call = "a call".to_owned();
        self.backend.set_fault(Some(Fault::Failed { backend: "memory", call, why: "told to fail".to_owned() }));
    }

    fn mend(&self) {
        self.backend.set_fault(None);
    }
}

impl Memory {
    /// A node of 910Bs.
    pub(crate) fn of(profile: Profile) -> Self {
        let data = profile.data();
        let chips: Vec<ChipReading> = data
            .chips()
            .map(|chip| ChipReading {
                physical_id: chip.phy,
                logic_id: Some(chip.phy),
                card_id: i32::try_from(chip.phy).ok(),
                device_id: 0,
                bus_id: chip.bus.parse().unwrap(),
                vdie: Vdie::from_words(chip.vdie),
                chip_name: chip.chip_name.clone(),
                family: Family::Ascend910B,
                board_id: data.card_of(chip.phy).map(|card| card.board_id),
                memory: Some(chip.memory.mb() << 20),
                ai_cores: Some(chip.aicores),
                numa_node: u32::try_from(chip.numa).ok(),
                pcie_root: None,
                health: HealthReading::default(),
            })
            .collect();
        let links = (0..8).flat_map(|a| (a + 1..8).map(move |b| Link { a, b })).collect();
        let whole = Scan { chips, links, dies_bound: true, ..Scan::default() };
        Self { backend: memory::Memory::new(whole.clone()), whole }
    }

    pub(crate) fn inner(&self) -> &memory::Memory {
        &self.backend
    }
}

/// Makes the PCI side of a node below `host`, as the kernel and the Ascend driver show it.
pub(crate) fn make_tree(host: &Path, data: &dcmi::world::Data) {
    fs::create_dir_all(host.join("sys/bus/pci/devices")).unwrap();
    for chip in data.chips() {
        let real = format!("pci{}:c0/{}", &chip.bus[..4], chip.bus);
        let directory = host.join("sys/devices").join(&real);
        fs::create_dir_all(&directory).unwrap();
        let put = |name: &str, text: String| fs::write(directory.join(name), text).unwrap();
        put("vendor", "0x19e5\n".to_owned());
        put("device", format!("{:#06x}\n", chip.pci_device));
        put("class", "0x120000\n".to_owned());
        put("numa_node", format!("{}\n", chip.numa));
        put("dev_id", format!("{}\n", chip.phy));
        put("davinci_dev_num", "1\n".to_owned());
        put("devdrv_sysfs_bdf_to_devid", format!("bdf udevid add_id\n{} {1} {1}\n", &chip.bus[5..], chip.phy));
        plug(host, &chip.bus);
    }
}

/// Puts a function onto the bus.
pub(crate) fn plug(host: &Path, bus: &str) {
    let link = host.join("sys/bus/pci/devices").join(bus);
    symlink(Path::new("../../../devices").join(format!("pci{}:c0/{bus}", &bus[..4])), link).unwrap();
}

/// Takes a function off the bus.
pub(crate) fn unplug(host: &Path, bus: &str) {
    fs::remove_file(host.join("sys/bus/pci/devices").join(bus)).unwrap();
}

/// Makes the device node of a chip, or takes it away; the driver's other nodes are there in any case.
fn set_device_node(host: &Path, physical_id: u32, there: bool) {
    let dev = host.join("dev");
    fs::create_dir_all(&dev).unwrap();
    fs::write(dev.join("davinci_manager"), "").unwrap();
    let node = dev.join(format!("davinci{physical_id}"));
    if there {
        fs::write(node, "").unwrap();
    } else {
        fs::remove_file(node).unwrap();
    }
}

pub(crate) struct Sysfs {
    host: TempDir,
    backend: Arc<dyn Backend>,
}

impl Sysfs {
    fn bus(physical_id: u32) -> String {
        Profile::Ascend910B4.data().chip(physical_id).unwrap().bus.clone()
    }
}

impl Fixture for Sysfs {
    const NAME: &'static str = "sysfs";

    fn new() -> Self {
        let host = tempfile::tempdir().unwrap();
        make_tree(host.path(), &Profile::Ascend910B4.data());
        let backend = device::open(&Settings::new(Choice::Auto, host.path(), host.path())).unwrap();
        Self { host, backend }
    }

    fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    fn lose(&self, physical_id: u32) {
        unplug(self.host.path(), &Self::bus(physical_id));
    }

    fn give_back(&self, physical_id: u32) {
        plug(self.host.path(), &Self::bus(physical_id));
    }

    fn alarm(&self, _: u32, _: Level, _: &[u32]) {
        unreachable!("sysfs knows no health");
    }

    fn fault_event(&self, _: u32, _: u32, _: bool) {
        unreachable!("sysfs knows no faults");
    }

    fn set_device_node(&self, physical_id: u32, there: bool) {
        set_device_node(self.host.path(), physical_id, there);
    }

    fn occupy(&self, _: u32, _: &[i32]) {
        unreachable!("sysfs knows no processes");
    }

    fn add_vnpu(&self, _: u32, _: &str) -> u32 {
        unreachable!("sysfs knows no vnpus");
    }

    fn remove_vnpu(&self, _: u32) {
        unreachable!("sysfs knows no vnpus");
    }

    fn open_vnpu(&self, _: u32, _: bool) {
        unreachable!("sysfs knows no vnpus");
    }

    fn vnpus(&self) -> Vec<u32> {
        unreachable!("sysfs knows no vnpus");
    }

    fn ignore_ids(&self) {
        unreachable!("sysfs knows no vnpus");
    }

    fn remake(&self) {
        unreachable!("sysfs knows no vnpus");
    }

    fn fail_after_create(&self) {
        unreachable!("sysfs knows no vnpus");
    }

    fn cut_for_machines(&self) {
        unreachable!("sysfs knows no vnpus");
    }

    fn reboot(&self) {
        unreachable!("sysfs knows no vnpus");
    }

    fn replay(&self) {
        unreachable!("sysfs knows no vnpus");
    }

    fn shatter(&self) {
        let bus = self.host.path().join("sys/bus/pci");
        fs::rename(bus.join("devices"), bus.join("away")).unwrap();
    }

    fn mend(&self) {
        let bus = self.host.path().join("sys/bus/pci");
        fs::rename(bus.join("away"), bus.join("devices")).unwrap();
    }
}

/// A node behind the simulated vendor library in a real worker process.
pub(crate) struct Dcmi {
    pub(crate) world: World,
    pub(crate) dir: TempDir,
    pub(crate) settings: Settings,
    backend: Arc<dyn Backend>,
}

impl Dcmi {
    /// A node of this kind.
    pub(crate) fn of(profile: Profile) -> Self {
        Self::with(profile, |_| {})
    }

    /// The same with other settings.
    pub(crate) fn with(profile: Profile, change: impl FnOnce(&mut Settings)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let world = World::create(dir.path().join("world"), profile).unwrap();
        let host = dir.path().join("host");
        let mut data = world.data().unwrap();
        data.cards.retain(|card| card.chips.iter().all(|chip| chip.state == dcmi::world::ChipState::Up));
        make_tree(&host, &data);
        fs::create_dir(host.join("etc")).unwrap();
        world.edit(|data| data.vnpu_cfg = host.join("etc/vnpu.cfg")).unwrap();
        let mut settings = Settings::new(Choice::Dcmi, &host, dir.path());
        settings.library = Some(dcmi::library_path());
        settings.trust_library = true;
        settings.worker = env!("CARGO_BIN_EXE_npu-dra").into();
        settings.environment = vec![(dcmi::world::VARIABLE.into(), world.dir().into())];
        settings.timing.back_off = Duration::from_millis(5);
        settings.timing.back_off_most = Duration::from_millis(20);
        settings.timing.missing = Duration::ZERO;
        // Much time on a busy machine; tests of deadlines set their own.
        settings.timing.read = Duration::from_secs(20);
        settings.timing.hello = Duration::from_secs(30);
        settings.wait = Some(Duration::from_secs(30));
        change(&mut settings);
        let backend = device::open(&settings).unwrap();
        Self { world, dir, settings, backend }
    }

    pub(crate) fn host(&self) -> std::path::PathBuf {
        self.dir.path().join("host")
    }

    pub(crate) fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    /// The same node behind another backend.
    pub(crate) fn behind(mut self, settings: Settings) -> Self {
        self.backend = device::open(&settings).unwrap();
        self.settings = settings;
        self
    }

    /// The process that made the last call.
    pub(crate) fn worker(&self) -> u32 {
        self.world.calls().unwrap().list.last().unwrap().pid
    }

    pub(crate) fn bus(&self, physical_id: u32) -> String {
        self.world.data().unwrap().chip(physical_id).unwrap().bus.clone()
    }
}

impl Drop for Dcmi {
    /// Whatever a test did: one call at a time, and no worker is left. The backend ends it when it is dropped.
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert_eq!(self.world.overlaps().unwrap(), Vec::<String>::new(), "calls of the library met");
        }
    }
}

impl Fixture for Dcmi {
    const NAME: &'static str = "dcmi";

    fn new() -> Self {
        Self::of(Profile::Ascend910B4)
    }

    fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    fn lose(&self, physical_id: u32) {
        unplug(&self.host(), &self.bus(physical_id));
        self.world.drop_chip(physical_id).unwrap();
    }

    fn give_back(&self, physical_id: u32) {
        plug(&self.host(), &self.bus(physical_id));
        self.world.return_chip(physical_id).unwrap();
    }

    fn alarm(&self, physical_id: u32, level: Level, codes: &[u32]) {
        let value = match level {
            Level::Ok => 0,
            Level::Minor => 1,
            Level::Major => 2,
            Level::Critical => 3,
            Level::Unknown => 4,
            Level::Gone => u32::MAX,
        };
        self.world.set_health(physical_id, value).unwrap();
        self.world.set_fault_codes(physical_id, codes).unwrap();
    }

    fn fault_event(&self, physical_id: u32, code: u32, occurred: bool) {
        if occurred {
            self.world.occur(physical_id, code, 2).unwrap();
        } else {
            self.world.recover(physical_id, code, 2).unwrap();
        }
    }

    fn set_device_node(&self, physical_id: u32, there: bool) {
        set_device_node(&self.host(), physical_id, there);
    }

    fn occupy(&self, physical_id: u32, pids: &[i32]) {
        let processes: Vec<_> = pids.iter().map(|pid| dcmi::world::Process { pid: *pid, bytes: 1 << 30 }).collect();
        self.world.set_processes(physical_id, &processes).unwrap();
    }

    fn add_vnpu(&self, physical_id: u32, template: &str) -> u32 {
        self.world.add_vnpu(physical_id, template).unwrap()
    }

    fn remove_vnpu(&self, id: u32) {
        self.world.remove_vnpu(id).unwrap();
    }

    fn open_vnpu(&self, id: u32, open: bool) {
        self.world.open_vnpu(id, open.then_some(0xABC)).unwrap();
    }

    fn vnpus(&self) -> Vec<u32> {
        self.world.vnpus().unwrap().iter().map(|vnpu| vnpu.id).collect()
    }

    fn ignore_ids(&self) {
        self.world.edit(|data| data.slicing.ignore_ids = true).unwrap();
    }

    fn remake(&self) {
        self.world.edit(|data| data.slicing.save_code = Some(-8014)).unwrap();
    }

    fn fail_after_create(&self) {
        self.world.faults().set([Planted::new("dcmi_create_vdevice", Action::Return(-8005)).after().times(1)]).unwrap();
    }

    fn cut_for_machines(&self) {
        self.world.edit(|data| data.vdevice_mode = 1).unwrap();
    }

    fn reboot(&self) {
        self.world.reboot().unwrap();
    }

    fn replay(&self) {
        self.world.replay().unwrap();
    }

    fn shatter(&self) {
        self.world.faults().set([Planted::new("*", Action::Return(-8005))]).unwrap();
    }

    fn mend(&self) {
        self.world.faults().clear().unwrap();
    }
}

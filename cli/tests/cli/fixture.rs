//! A daemon's admin service with a world that tests set.

use std::{
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::{Arc, Mutex},
    time::Duration,
};

use futures::future::BoxFuture;
use jiff::Timestamp;
use npu_dra::{
    admin::{Admin, Cluster, Identity, Kubelet, Permissions, Slice, Socket, Sources},
    device::Status,
    domain::{
        claim::{ClaimRef, ClaimUid},
        health::{Health, HealthReading, Level, Policy, Report},
        inventory::Inventory,
        model::Model,
        names::{DriverName, NodeName, PoolName},
        node::{Hold, HoldKind, NodeMemory},
        notice::Severity,
        npu::{ChipReading, Family, MIB, Npu, Scan, StableId, Vdie},
        plan::Node,
        record::{Cut, Holding, Phase, Quarantined, Record},
        refusal::Refusal,
        vnpu::{CardReading, Resources, VnpuReading},
    },
    engine::{DeviceView, Snapshot},
};
use tokio::{runtime::Runtime, sync::watch};
use tokio_util::sync::CancellationToken;

/// UID of the claim that owns `npu-0`.
pub(crate) const TRAIN: &str = "11111111-aaaa-4bbb-8ccc-000000000001";
/// UID of the claim whose record is damaged.
pub(crate) const DAMAGED: &str = "22222222-aaaa-4bbb-8ccc-000000000002";
/// UID of the claim that looks at two cards.
pub(crate) const LOOK: &str = "33333333-aaaa-4bbb-8ccc-000000000003";
/// UID of the claim whose card is gone, and whose release is refused.
pub(crate) const GONE: &str = "44444444-aaaa-4bbb-8ccc-000000000004";

/// The present of the world, `before` seconds ago.
pub(crate) fn ago(before: i64) -> Timestamp {
    Timestamp::from_second(1_796_040_000 - before).unwrap()
}

fn chip(physical_id: u32, name: &str, bus: &str) -> ChipReading {
    let (family, memory, ai_cores) =
        if name == "910B3" { (Family::Ascend910B, 65536, 20) } else { (Family::Ascend310P, 24576, 8) };
    ChipReading {
        physical_id,
        logic_id: Some(physical_id),
        card_id: i32::try_from(physical_id).ok(),
        device_id: 0,
        bus_id: bus.parse().unwrap(),
        vdie: Vdie::from_words([0xA000 + physical_id, 1, 2, 3, 4]),
        chip_name: name.to_owned(),
        family,
        board_id: None,
        memory: Some(memory * MIB),
        ai_cores: Some(ai_cores),
        numa_node: Some(physical_id / 2),
        pcie_root: Some("pci0000:c0".to_owned()),
        health: HealthReading::default(),
    }
}

/// The cards of the node: one held, one free, one with a fault, one of which little is known.
pub(crate) fn cards() -> (Inventory, NodeMemory) {
    let mut unknown = chip(3, "310P3", "0000:02:00.0");
    unknown.chip_name = String::new();
    unknown.memory = None;
    unknown.ai_cores = None;
    unknown.numa_node = None;
    unknown.vdie = None;
    let chips = vec![
        chip(0, "910B3", "0000:c1:00.0"),
        chip(1, "910B3", "0000:c2:00.0"),
        chip(2, "310P3", "0000:01:00.0"),
        unknown,
    ];
    let scan = Scan { chips, dies_bound: true, driver_version: "24.1.0".to_owned(), ..Scan::default() };
    let mut memory = NodeMemory::default();
    let inventory = Inventory::from_scan(&scan, &mut memory).unwrap();
    (inventory, memory)
}

fn holding(uid: &str, device: &str, stable_id: &StableId, physical_id: u32, admin_access: bool) -> Holding {
    Holding {
        requests: vec!["npu".to_owned()],
        pool: "worker-3/npu".to_owned(),
        device: device.to_owned(),
        stable_id: stable_id.clone(),
        physical_ids: vec![physical_id],
        admin_access,
        share_id: None,
        cdi_device: format!("{uid}_{}{stable_id}", if admin_access { "look_" } else { "" }),
        cut: None,
    }
}

fn record(uid: &str, path: (&str, &str), prepared_at: Timestamp, devices: Vec<Holding>) -> Record {
    Record {
        claim: ClaimRef { namespace: path.0.to_owned(), name: path.1.to_owned(), uid: ClaimUid::new(uid).unwrap() },
        boot_id: "5b0e9b7e-0000-4000-8000-000000000001".to_owned(),
        phase: Phase::Prepared,
        prepared_at,
        devices,
    }
}

/// The claims of the node that have sound records.
pub(crate) fn records(npus: &[Npu]) -> Vec<Record> {
    let id = |index: usize| &npus[index].stable_id;
    let lost = StableId::from_text("0000A007-00000001-00000002-00000003-00000004").unwrap();
    vec![
        record(TRAIN, ("ml", "train-0"), ago(3 * 3600 + 12 * 60), vec![holding(TRAIN, "npu-0", id(0), 0, false)]),
        record(
            LOOK,
            ("ops", "monitor"),
            ago(41),
            vec![holding(LOOK, "npu-0", id(0), 0, true), holding(LOOK, "npu-1", id(1), 1, true)],
        ),
        record(GONE, ("ml", "infer-a"), ago(2 * 86_400), vec![holding(GONE, "npu-7", &lost, 7, false)]),
    ]
}

/// The world that most tests see.
pub(crate) fn snapshot() -> Snapshot {
    let (inventory, _) = cards();
    let records = records(inventory.npus());
    let devices = inventory.npus().iter().map(|npu| {
        let reading = match npu.physical_id() {
            2 => {
                HealthReading { codes: vec![0x80E0_1801], temperature: Some(71), ..HealthReading::of(Level::Critical) }
            }
            _ => HealthReading { temperature: Some(43), power: Some(935), ..HealthReading::of(Level::Ok) },
        };
        DeviceView {
            npu: npu.clone(),
            health: (npu.physical_id() != 3).then(|| health(reading, ago(2 * 3600))),
            owners: if npu.physical_id() == 0 { vec![records[0].clone()] } else { Vec::new() },
            reading: None,
        }
    });
    let node = NodeName::new("worker-3").unwrap();
    Snapshot {
        node: Node {
            driver: DriverName::new("npu.huawei.com").unwrap(),
            pool: PoolName::of_node(&node).unwrap(),
            boot_id: "5b0e9b7e-0000-4000-8000-000000000001".to_owned(),
        },
        backend: Status {
            backend: "dcmi",
            state: "ready",
            source: "/usr/local/dcmi/libdcmi.so".to_owned(),
            severity: Severity::Info,
            detail: String::new(),
        },
        scanned_at: Some(ago(60)),
        recovered: true,
        driver_version: inventory.driver_version.clone(),
        missing: vec!["0000:03:00.0: the driver does not list it".to_owned()],
        problem: None,
        devices: devices.collect(),
        lost: Vec::new(),
        claims: records,
        quarantined: vec![damaged()],
        model: Model::Off,
        slicing: "hard slicing is not enabled (--enable-hard-vnpu)".to_owned(),
        closed: std::collections::BTreeMap::new(),
        holds: std::collections::BTreeMap::new(),
        quiet: Duration::from_mins(1),
    }
}

/// The health of a card that was first read like this.
pub(crate) fn health(reading: HealthReading, since: Timestamp) -> Health {
    Health::step(None, &Report::Read(reading), &Policy::default(), since)
}

const GIB: u64 = 1 << 30;

/// A vNPU of `npu-1` as the card shows it.
fn read(id: u32, template: &str, ai_cores: u32, memory: u64) -> VnpuReading {
    VnpuReading { id, template: template.to_owned(), memory, ai_cores }
}

/// Gives `npu-1` to a claim in part.
fn cut(world: &mut Snapshot, uid: &str, name: &str, wanted: &VnpuReading, phase: Phase) {
    let mut holding = holding(uid, "npu-1", &world.devices[1].npu.stable_id, 1, false);
    holding.share_id = Some(format!("{uid}-share"));
    holding.cdi_device = format!("{}_v{}", holding.cdi_device, wanted.id);
    holding.cut = Some(Cut {
        template: wanted.template.clone(),
        memory: wanted.memory,
        ai_cores: wanted.ai_cores,
        id: wanted.id,
        made: phase != Phase::Intent,
        before: Vec::new(),
    });
    let record = Record { phase, ..record(uid, ("ml", name), ago(41), vec![holding]) };
    world.devices[1].owners.push(record.clone());
    world.claims.push(record);
}

/// Makes the 910B cards such that they can be cut, with `npu-1` read and idle.
pub(crate) fn sliced(world: &mut Snapshot) {
    for device in &mut world.devices[..2] {
        device.npu.dies[0].board_id = Some(0x32);
    }
    world.devices[1].reading = Some(CardReading { processes: Some(Vec::new()), ..CardReading::default() });
    world.model = Model::Consumable;
    world.slicing = String::new();
}

/// Cuts `npu-1` into two parts, of which one is still being made.
pub(crate) fn split(world: &mut Snapshot) {
    sliced(world);
    let (first, second) = (read(116, "vir10_3c_32g", 10, 32 * GIB), read(117, "vir05_1c_16g", 5, 16 * GIB));
    cut(world, "66666666-aaaa-4bbb-8ccc-000000000006", "infer-b", &first, Phase::Prepared);
    cut(world, "77777777-aaaa-4bbb-8ccc-000000000007", "infer-c", &second, Phase::Intent);
    // The chip keeps some memory for itself.
    let vnpus = vec![VnpuReading { memory: 32 * GIB - 512 * MIB, ..first }];
    let free = Some(Resources { memory: 31 * GIB, ai_cores: 10, ai_cpus: 4, media: 12 });
    world.devices[1].reading = Some(CardReading { vnpus, free, processes: Some(Vec::new()) });
}

/// Puts an operator's vNPU beside those of claims on `npu-1`, destroys one of these, and releases the other.
pub(crate) fn disturbed(world: &mut Snapshot) {
    sliced(world);
    let (lost, leaving, foreign) = (
        read(116, "vir05_1c_16g", 5, 16 * GIB),
        read(117, "vir05_1c_16g", 5, 16 * GIB),
        read(120, "vir10_3c_32g", 10, 32 * GIB),
    );
    cut(world, "66666666-aaaa-4bbb-8ccc-000000000006", "infer-b", &lost, Phase::Prepared);
    cut(world, "77777777-aaaa-4bbb-8ccc-000000000007", "infer-c", &leaving, Phase::Releasing);
    let reading = CardReading { vnpus: vec![leaving, foreign], free: None, processes: Some(Vec::new()) };
    world.devices[1].reading = Some(reading);
    world.closed.insert("npu-1".to_owned(), "it has vNPUs that are not ours: 120".to_owned());
    world.model = Model::Partitionable;
    "the API server does not keep DRAConsumableCapacity".clone_into(&mut world.slicing);
}

fn damaged() -> Quarantined {
    Quarantined {
        uid: ClaimUid::new(DAMAGED).unwrap(),
        why: "the checksum is wrong".to_owned(),
        path: format!("/var/lib/npu-dra/quarantine/{DAMAGED}.json"),
    }
}

/// The rest of the daemon.
pub(crate) struct World {
    snapshot: Mutex<Snapshot>,
    changes: watch::Sender<u64>,
}

impl World {
    /// Changes the world and tells so.
    pub(crate) fn change(&self, change: impl FnOnce(&mut Snapshot)) {
        change(&mut self.snapshot.lock().unwrap());
        self.changes.send_modify(|count| *count += 1);
    }
}

impl Sources for World {
    fn snapshot(&self) -> Snapshot {
        self.snapshot.lock().unwrap().clone()
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    fn release(&self, uid: ClaimUid) -> BoxFuture<'static, Result<(), Refusal>> {
        let refused = uid.as_str() == GONE;
        if !refused {
            self.change(|world| {
                world.claims.retain(|record| record.claim.uid != uid);
                world.quarantined.retain(|quarantined| quarantined.uid != uid);
                for device in &mut world.devices {
                    device.owners.retain(|record| record.claim.uid != uid);
                }
            });
        }
        let claim = |name: &str| ClaimRef { namespace: "ml".to_owned(), name: name.to_owned(), uid: uid.clone() };
        let refusal = Refusal::Held {
            claim: claim("infer-a"),
            device: "npu-7".to_owned(),
            holder: claim("infer-b"),
            uid: "55555555-aaaa-4bbb-8ccc-000000000005".to_owned(),
        };
        Box::pin(async move { if refused { Err(refusal) } else { Ok(()) } })
    }

    /// As the engine does it, for the template of 16 GiB on `npu-1`.
    fn create_vnpu(&self, device: String, template: String) -> BoxFuture<'static, Result<VnpuReading, Refusal>> {
        let denied = |why: &str| Err(Refusal::Denied { what: format!("a vNPU on {device}"), why: why.to_owned() });
        let result = match (device.as_str(), template.as_str()) {
            ("npu-1", "vir05_1c_16g") => {
                let made = read(117, &template, 5, 16 * GIB);
                self.change(|world| {
                    world.devices[1].reading.get_or_insert_default().vnpus.push(made.clone());
                    world.closed.insert(device, "it has vNPUs that are not ours: 117".to_owned());
                });
                Ok(made)
            }
            ("npu-1", "vir10_3c_32g") => {
                let why = "dcmi: dcmi_create_vdevice failed: -8020".to_owned();
                Err(Refusal::OperatorFailed { what: format!("making a vNPU on {device}"), why })
            }
            ("npu-1", _) => denied("\"vir99\" is none of vir05_1c_16g, vir10_3c_32g"),
            ("npu-0", _) => denied("claim ml/train-0 owns (a part of) the card"),
            _ => Err(Refusal::NoSuch(format!("device {device}"))),
        };
        Box::pin(async { result })
    }

    /// As the engine does it, for the vNPU that [`create_vnpu`](Self::create_vnpu) makes.
    fn destroy_vnpu(&self, id: u32, force: bool) -> BoxFuture<'static, Result<(), Refusal>> {
        let denied = |why: &str| Err(Refusal::Denied { what: format!("destroying vNPU {id}"), why: why.to_owned() });
        let result = match (id, force) {
            (116, _) => denied("it belongs to claim ml/infer-b; delete the pod"),
            (117, false) => denied("processes run on the card: [4711]; --force destroys it all the same"),
            (117, true) => {
                self.change(|world| {
                    world.devices[1].reading = Some(CardReading::default());
                    world.closed.clear();
                });
                Ok(())
            }
            _ => Err(Refusal::NoSuch(format!("vNPU {id}"))),
        };
        Box::pin(async { result })
    }

    fn hold(
        &self,
        device: String,
        wanted: Option<(HoldKind, String)>,
    ) -> BoxFuture<'static, Result<Vec<ClaimRef>, Refusal>> {
        let mut result = Err(Refusal::NoSuch(format!("device {device}")));
        self.change(|world| {
            let Some(view) = world.devices.iter().find(|view| view.npu.name.as_str() == device) else { return };
            result = Ok(view.owners.iter().map(|record| record.claim.clone()).collect());
            match wanted {
                Some((kind, reason)) => {
                    world.holds.insert(view.npu.stable_id.clone(), Hold { kind, reason, since: ago(90) });
                }
                None => drop(world.holds.remove(&view.npu.stable_id)),
            }
        });
        Box::pin(async { result })
    }

    fn suspend(&self, reason: String) -> BoxFuture<'static, Result<(), Refusal>> {
        self.change(|world| {
            world.backend.state = "suspended";
            world.backend.detail = format!("suspended by an operator: {reason}; npuctl backend resume ends that");
        });
        Box::pin(async { Ok(()) })
    }

    fn resume(&self) -> BoxFuture<'static, Result<(), Refusal>> {
        self.change(|world| {
            world.backend.state = "starting";
            "no scan yet".clone_into(&mut world.backend.detail);
        });
        Box::pin(async { Ok(()) })
    }

    fn kubelet(&self) -> Kubelet {
        Kubelet {
            since: Some(ago(4 * 86_400)),
            refused: None,
            registrations: 1,
            versions: vec!["v1.DRAPlugin".to_owned(), "v1beta1.DRAPlugin".to_owned()],
            last_call: Some(ago(41)),
        }
    }

    fn cluster(&self) -> Cluster {
        let slice = Slice {
            name: "worker-3-npu.huawei.com-0".to_owned(),
            index: 0,
            devices: 4,
            generation: Some(17),
            state: "published",
            written_at: Some(ago(120)),
            error: String::new(),
        };
        Cluster {
            state: "ok",
            node: "worker-3".to_owned(),
            pool: "worker-3/npu".to_owned(),
            generation: Some(17),
            written_at: Some(ago(120)),
            server: "https://10.0.0.1:6443".to_owned(),
            server_version: "v1.34.3".to_owned(),
            credentials: "/etc/kubernetes/kubelet.conf".to_owned(),
            error: String::new(),
            slices: vec![slice],
        }
    }

    fn now(&self) -> Timestamp {
        ago(0)
    }
}

/// A directory that every user may enter.
pub(crate) fn open_dir() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    dir
}

/// The admin service, served until it is dropped.
pub(crate) struct Daemon {
    pub(crate) world: Arc<World>,
    socket: PathBuf,
    shutdown: CancellationToken,
    runtime: Option<Runtime>,
    _dir: tempfile::TempDir,
}

impl Daemon {
    /// Serves the world to the user that runs the test.
    pub(crate) fn start() -> Self {
        let permissions = Permissions { owner: nix::unistd::geteuid().as_raw(), readers: None };
        Self::start_with(permissions, 0o660)
    }

    /// Serves the world with other rules and another file mode.
    pub(crate) fn start_with(permissions: Permissions, mode: u32) -> Self {
        let dir = open_dir();
        let socket = dir.path().join("admin.sock");
        let world = Arc::new(World { snapshot: Mutex::new(snapshot()), changes: watch::Sender::new(0) });
        let identity = Identity { version: "0.3.1", pid: 912, started_at: ago(4 * 86_400) };
        let admin =
            Admin::new(world.clone(), permissions, identity, &mut prometheus_client::registry::Registry::default());
        let shutdown = CancellationToken::new();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let guard = runtime.enter();
        let bound = Socket::bind(&socket, mode, None).unwrap();
        drop(guard);
        runtime.spawn(admin.serve(bound, shutdown.clone()));
        Self { world, socket, shutdown, runtime: Some(runtime), _dir: dir }
    }

    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// `npuctl` with arguments, for this daemon.
    pub(crate) fn npuctl(&self, args: &[&str]) -> Command {
        npuctl(&self.socket, args)
    }

    /// Ends as the daemon does at SIGTERM.
    pub(crate) fn stop(&self) {
        self.shutdown.cancel();
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.shutdown.cancel();
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// `npuctl` with arguments, for a socket; nothing of the caller's environment counts.
pub(crate) fn npuctl(socket: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_npuctl"));
    command.args(args).env_clear().env("NPUCTL_SOCKET", socket).env("NPUCTL_STATE_DIR", "/nonexistent/npu-dra");
    command
}

/// What a run gave: exit status, stdout, stderr.
pub(crate) fn result(output: &Output) -> (i32, String, String) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (output.status.code().expect("it ends by itself"), text(&output.stdout), text(&output.stderr))
}

/// Runs to the end.
pub(crate) fn run(command: &mut Command) -> (i32, String, String) {
    result(&command.output().unwrap())
}

pub(crate) fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

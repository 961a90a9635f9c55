//! The service over a real socket, with sources that a test sets.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use futures::future::BoxFuture;
use hyper_util::rt::TokioIo;
use jiff::Timestamp;
use npu_proto::admin::{self as proto, admin_client::AdminClient};
use prometheus_client::registry::Registry;
use tokio::{net::UnixStream, sync::watch, task::JoinHandle, time::timeout};
use tokio_util::sync::CancellationToken;
use tonic::{
    Code,
    transport::{Channel, Endpoint},
};

use super::{Admin, Cluster, Identity, Kubelet, Permissions, Socket, Sources};
use crate::{
    device::Status,
    domain::{
        claim::{ClaimRef, ClaimUid},
        health::{Health, HealthReading, Level, Policy, Report},
        inventory::tests::inventory_of,
        model::Model,
        names::{DriverName, NodeName, PoolName},
        node::{Hold, HoldKind},
        notice::Severity,
        npu::StableId,
        plan::Node,
        record::{Cut, Holding, Phase, Quarantined, Record},
        refusal::Refusal,
        vnpu::{CardReading, Resources, VnpuReading},
    },
    engine::{DeviceView, Snapshot},
};

const BOUND: Duration = Duration::from_secs(10);

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

fn record(uid: &str, stable_id: &StableId, device: &str) -> Record {
    let holding = Holding {
        requests: vec!["npu".to_owned()],
        pool: "worker-3/npu".to_owned(),
        device: device.to_owned(),
        stable_id: stable_id.clone(),
        physical_ids: vec![0],
        admin_access: false,
        share_id: None,
        cdi_device: format!("{uid}_{stable_id}"),
        cut: None,
    };
    Record {
        claim: ClaimRef { namespace: "ml".to_owned(), name: format!("train-{uid}"), uid: ClaimUid::new(uid).unwrap() },
        boot_id: "boot-1".to_owned(),
        phase: Phase::Prepared,
        prepared_at: at(100),
        devices: vec![holding],
    }
}

fn health(reading: HealthReading) -> Health {
    Health::step(None, &Report::Read(reading), &Policy::default(), at(50))
}

/// Three cards: `npu-0` held by claim `u0`, `npu-1` critical, `npu-2` free; and a damaged record `bad`.
fn snapshot() -> Snapshot {
    let inventory = inventory_of(3);
    let held = record("u0", &inventory.npus()[0].stable_id, "npu-0");
    let levels = [Level::Ok, Level::Critical, Level::Ok];
    let devices = inventory.npus().iter().zip(levels).map(|(npu, level)| {
        let codes = if level == Level::Ok { vec![] } else { vec![0x80E0_1801] };
        DeviceView {
            npu: npu.clone(),
            health: Some(health(HealthReading { codes, ..HealthReading::of(level) })),
            owners: if npu.name.as_str() == "npu-0" { vec![held.clone()] } else { vec![] },
            reading: None,
        }
    });
    let node_name = NodeName::new("worker-3").unwrap();
    Snapshot {
        node: Node {
            driver: DriverName::new("npu.huawei.com").unwrap(),
            pool: PoolName::of_node(&node_name).unwrap(),
            boot_id: "boot-1".to_owned(),
        },
        backend: Status {
            backend: "memory",
            state: "ready",
            source: String::new(),
            severity: Severity::Info,
            detail: String::new(),
        },
        scanned_at: Some(at(40)),
        recovered: true,
        driver_version: "24.1.0".to_owned(),
        missing: Vec::new(),
        problem: None,
        devices: devices.collect(),
        lost: Vec::new(),
        claims: vec![held.clone()],
        quarantined: vec![Quarantined {
            uid: ClaimUid::new("bad").unwrap(),
            why: "the checksum is wrong".to_owned(),
            path: "/var/lib/npu-dra/quarantine/bad.json".to_owned(),
        }],
        model: Model::Off,
        slicing: "hard slicing is not enabled (--enable-hard-vnpu)".to_owned(),
        closed: std::collections::BTreeMap::new(),
        holds: std::collections::BTreeMap::new(),
        quiet: Duration::from_mins(1),
    }
}

struct Fixed {
    snapshot: Mutex<Snapshot>,
    changes: watch::Sender<u64>,
    released: Mutex<Vec<String>>,
}

impl Sources for Fixed {
    fn snapshot(&self) -> Snapshot {
        self.snapshot.lock().unwrap().clone()
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    fn release(&self, uid: ClaimUid) -> BoxFuture<'static, Result<(), Refusal>> {
        self.released.lock().unwrap().push(uid.to_string());
        Box::pin(async { Ok(()) })
    }

    fn create_vnpu(&self, device: String, template: String) -> BoxFuture<'static, Result<VnpuReading, Refusal>> {
        let read = VnpuReading { id: 148, template, memory: 7 << 30, ai_cores: 5 };
        let result = match device.as_str() {
            "npu-2" => Ok(read),
            "npu-0" => Err(Refusal::Denied { what: format!("a vNPU on {device}"), why: "a claim owns it".to_owned() }),
            "npu-1" => Err(Refusal::NotScanned("no scan has succeeded".to_owned())),
            _ => Err(Refusal::NoSuch(format!("device {device}"))),
        };
        Box::pin(async { result })
    }

    fn destroy_vnpu(&self, id: u32, force: bool) -> BoxFuture<'static, Result<(), Refusal>> {
        let why = "processes run on the card".to_owned();
        let refusal = Refusal::OperatorFailed { what: format!("destroying vNPU {id}"), why };
        Box::pin(async move { if force { Ok(()) } else { Err(refusal) } })
    }

    fn hold(
        &self,
        device: String,
        wanted: Option<(HoldKind, String)>,
    ) -> BoxFuture<'static, Result<Vec<ClaimRef>, Refusal>> {
        let mut world = self.snapshot.lock().unwrap();
        let npu = world.devices.iter().map(|view| view.npu.clone()).find(|npu| npu.name.as_str() == device);
        let result = match (npu, wanted) {
            (None, _) => Err(Refusal::NoSuch(format!("device {device}"))),
            (Some(npu), Some((kind, reason))) => {
                world.holds.insert(npu.stable_id, Hold { kind, reason, since: at(900) });
                Ok(world.claims.iter().map(|record| record.claim.clone()).collect())
            }
            (Some(npu), None) => {
                world.holds.remove(&npu.stable_id);
                Ok(Vec::new())
            }
        };
        Box::pin(async { result })
    }

    fn suspend(&self, reason: String) -> BoxFuture<'static, Result<(), Refusal>> {
        let refusal = Refusal::OperatorFailed { what: "letting go".to_owned(), why: "it hangs".to_owned() };
        Box::pin(async move { if reason == "hung" { Err(refusal) } else { Ok(()) } })
    }

    fn resume(&self) -> BoxFuture<'static, Result<(), Refusal>> {
        Box::pin(futures::future::ok(()))
    }

    fn kubelet(&self) -> Kubelet {
        Kubelet { since: Some(at(10)), registrations: 1, ..Kubelet::default() }
    }

    fn cluster(&self) -> Cluster {
        Cluster { state: "ok", ..Cluster::default() }
    }

    fn now(&self) -> Timestamp {
        at(1000)
    }
}

struct Running {
    sources: Arc<Fixed>,
    client: AdminClient<Channel>,
    shutdown: CancellationToken,
    server: JoinHandle<()>,
    registry: Registry,
    dir: tempfile::TempDir,
}

async fn start(owner: u32) -> Running {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("admin.sock");
    let sources = Arc::new(Fixed {
        snapshot: Mutex::new(snapshot()),
        changes: watch::Sender::new(0),
        released: Mutex::default(),
    });
    let mut registry = Registry::default();
    let identity = Identity { version: "0.3.1", pid: 912, started_at: at(0) };
    let permissions = Permissions { owner, readers: None };
    let admin = Admin::new(sources.clone(), permissions, identity, &mut registry);
    let shutdown = CancellationToken::new();
    let socket = Socket::bind(&path, 0o660, None).unwrap();
    let server = tokio::spawn({
        let shutdown = shutdown.clone();
        async move { admin.serve(socket, shutdown).await.unwrap() }
    });
    let stream = UnixStream::connect(&path).await.unwrap();
    let mut stream = Some(TokioIo::new(stream));
    let connector = tower::service_fn(move |_| {
        let stream = stream.take().ok_or_else(|| std::io::Error::other("connected once"));
        async move { stream }
    });
    let channel = Endpoint::from_static("http://admin").connect_with_connector(connector).await.unwrap();
    Running { sources, client: AdminClient::new(channel), shutdown, server, registry, dir }
}

async fn start_as_own() -> Running {
    start(nix::unistd::getuid().as_raw()).await
}

impl Running {
    fn change(&self, change: impl FnOnce(&mut Snapshot)) {
        change(&mut self.sources.snapshot.lock().unwrap());
        self.sources.changes.send_modify(|count| *count += 1);
    }

    fn metrics(&self) -> String {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry).unwrap();
        text
    }
}

#[tokio::test]
async fn devices_tell_state_health_holder_and_taint() {
    let mut running = start_as_own().await;
    let answer = running.client.devices(proto::DevicesRequest {}).await.unwrap().into_inner();
    assert_eq!(answer.taken_at_ms, 1_000_000);
    let states: Vec<_> = answer.devices.iter().map(|device| (device.name.as_str(), device.state.as_str())).collect();
    assert_eq!(states, [("npu-0", "in-use"), ("npu-1", "tainted"), ("npu-2", "free")]);
    assert_eq!(answer.devices[0].claims[0].name, "train-u0");
    assert_eq!(answer.devices[0].memory_bytes, Some(32 << 30));
    let health = answer.devices[1].health.as_ref().unwrap();
    assert_eq!((health.level.as_str(), &health.codes[..]), ("critical", &[0x80E0_1801][..]));
    assert_eq!(answer.devices[1].taints[0].effect, "NoSchedule");
    assert!(answer.devices[0].taints.is_empty());
}

#[tokio::test]
async fn a_card_that_a_claim_holds_and_no_scan_finds_is_listed_as_gone() {
    let mut running = start_as_own().await;
    running.change(|snapshot| drop(snapshot.devices.remove(0)));
    let answer = running.client.devices(proto::DevicesRequest {}).await.unwrap().into_inner();
    let gone = answer.devices.last().unwrap();
    assert_eq!((gone.name.as_str(), gone.state.as_str(), gone.claims.len()), ("npu-0", "gone", 1));
    let status = running.client.status(proto::StatusRequest {}).await.unwrap().into_inner();
    let about = status.attention.iter().find(|point| point.subject == "npu-0").unwrap();
    assert_eq!(about.text, "health lost; held by ml/train-u0");

    // Before the first scan nobody can say that it is gone.
    running.change(|snapshot| snapshot.scanned_at = None);
    let answer = running.client.devices(proto::DevicesRequest {}).await.unwrap().into_inner();
    let unknown = answer.devices.last().unwrap();
    assert_eq!((unknown.state.as_str(), &unknown.health), ("in-use", &None));
}

#[tokio::test]
async fn claims_tell_their_cdi_devices_and_damaged_ones_their_file() {
    let mut running = start_as_own().await;
    let answer = running.client.claims(proto::ClaimsRequest {}).await.unwrap().into_inner();
    let [bad, held] = &answer.claims[..] else { panic!("two claims expected") };
    assert_eq!((bad.state.as_str(), bad.reason.as_str()), ("quarantined", "the checksum is wrong"));
    assert!(bad.damaged_file.ends_with("bad.json"));
    assert!(held.devices[0].cdi_device.starts_with("npu.huawei.com/npu=u0_"));
    assert!(held.this_boot);
}

#[tokio::test]
async fn status_names_what_a_human_should_look_at() {
    let mut running = start_as_own().await;
    let status = running.client.status(proto::StatusRequest {}).await.unwrap().into_inner();
    let points: Vec<_> = status.attention.iter().map(|point| point.subject.as_str()).collect();
    assert_eq!(points, ["npu-1", "claim bad"]);
    assert_eq!(
        status.attention[0].text,
        "health tainted: 80E01801 HBM multi-bit ECC, level critical; tainted NoSchedule"
    );
    let counts = status.claims.unwrap();
    assert_eq!((counts.prepared, counts.quarantined), (1, 1));
    running.change(|snapshot| {
        snapshot.problem = Some("node.json was damaged once; it is in /x".to_owned());
        let mut lost = snapshot.devices.remove(2);
        lost.health = Some(health(HealthReading::of(Level::Gone)));
        snapshot.lost.push(lost);
    });
    let status = running.client.status(proto::StatusRequest {}).await.unwrap().into_inner();
    let points: Vec<_> = status.attention.iter().map(|point| format!("{}: {}", point.subject, point.text)).collect();
    assert!(points[0].starts_with("node: node.json was damaged once; it is in /x. Drains"), "{points:?}");
    assert!(points[2].starts_with("npu-2: health lost"), "{points:?}");
    let devices = running.client.devices(proto::DevicesRequest {}).await.unwrap().into_inner().devices;
    assert_eq!((devices[2].name.as_str(), devices[2].state.as_str()), ("npu-2", "gone"));
    assert_eq!(status.backend.unwrap().devices, 2, "those that are there");
    assert!(status.kubelet.unwrap().registered);
}

#[tokio::test]
async fn root_drains_a_card_and_lets_claims_have_it_again() {
    let mut running = start_as_own().await;
    let hold = |device: &str, kind: &str, reason: &str| proto::HoldRequest {
        device: device.to_owned(),
        kind: kind.to_owned(),
        reason: reason.to_owned(),
    };
    let answer = running.client.hold(hold("npu-0", "drained", "a fan")).await.unwrap().into_inner();
    assert_eq!(answer.claims.len(), 1);
    running.client.hold(hold("npu-2", "cordoned", "")).await.unwrap();
    let devices = running.client.devices(proto::DevicesRequest {}).await.unwrap().into_inner().devices;
    let shown: Vec<_> = devices.iter().map(|device| device.state.as_str()).collect();
    assert_eq!(shown, ["draining", "tainted", "cordoned"]);
    assert_eq!(devices[0].reason, "drained by an operator: a fan");
    let hold_of = devices[0].hold.as_ref().unwrap();
    assert_eq!((hold_of.kind.as_str(), hold_of.reason.as_str(), hold_of.since_ms), ("drained", "a fan", 900_000));
    let taint = &devices[0].taints[0];
    assert_eq!((taint.key.as_str(), taint.effect.as_str()), ("npu.huawei.com/drained", "NoExecute"));
    assert_eq!(devices[2].taints[0].effect, "NoSchedule");
    let status = running.client.status(proto::StatusRequest {}).await.unwrap().into_inner();
    assert!(status.attention.iter().any(|point| point.text == "drained by an operator: a fan"), "{status:?}");

    running.client.hold(hold("npu-0", "", "")).await.unwrap();
    let devices = running.client.devices(proto::DevicesRequest {}).await.unwrap().into_inner().devices;
    assert_eq!((devices[0].state.as_str(), devices[0].taints.len(), &devices[0].hold), ("in-use", 0, &None));
    for (request, code) in [
        (hold("npu-9", "drained", ""), Code::NotFound),
        (hold("npu-0", "erased", ""), Code::InvalidArgument),
        (hold("npu-0", "drained", &"x".repeat(257)), Code::InvalidArgument),
        (hold("npu-0", "drained", "two\nlines"), Code::InvalidArgument),
        (hold("npu-0", "cordoned", "\u{1b}[31m"), Code::InvalidArgument),
    ] {
        assert_eq!(running.client.hold(request).await.unwrap_err().code(), code);
    }
}

const GIB: u64 = 1 << 30;

fn read(id: u32, template: &str, gib: u64, ai_cores: u32) -> VnpuReading {
    VnpuReading { id, template: template.to_owned(), memory: gib * GIB, ai_cores }
}

/// A claim's vNPU on the third card, of 8 GiB.
fn cut(world: &mut Snapshot, uid: &str, id: u32, phase: Phase) {
    let mut record = record(uid, &world.devices[2].npu.stable_id, "npu-2");
    let (template, made) = ("vir05_1c_8g".to_owned(), phase != Phase::Intent);
    record.devices[0].cut = Some(Cut { template, memory: 8 * GIB, ai_cores: 5, id, made, before: Vec::new() });
    record.phase = phase;
    world.devices[2].owners.push(record.clone());
    world.claims.push(record);
}

#[tokio::test]
async fn vnpus_are_those_of_claims_and_those_that_the_cards_have_besides() {
    let mut running = start_as_own().await;
    running.change(|world| {
        for (uid, id, phase) in [
            ("there", 132, Phase::Prepared),
            ("lost", 133, Phase::Prepared),
            ("other", 134, Phase::Prepared),
            ("new", 135, Phase::Intent),
            ("old", 136, Phase::Releasing),
        ] {
            cut(world, uid, id, phase);
        }
        let vnpus =
            vec![read(132, "vir05_1c_8g", 7, 5), read(134, "vir10_3c_16g", 16, 10), read(140, "vir05_1c_8g", 8, 5)];
        world.devices[2].reading = Some(CardReading { vnpus, free: None, processes: Some(Vec::new()) });
        world.closed.insert("npu-2".to_owned(), "it has vNPUs that are not ours: 140".to_owned());
    });
    let list = running.client.vnpus(proto::VnpusRequest {}).await.unwrap().into_inner().vnpus;
    let shown: Vec<_> = list
        .iter()
        .map(|entry| {
            let claim = entry.claim.as_ref().map_or("-", |claim| claim.uid.as_str());
            (entry.name.as_str(), entry.state.as_str(), claim, entry.vnpu.as_ref().unwrap().memory_bytes / GIB)
        })
        .collect();
    assert_eq!(
        shown,
        [
            ("vnpu-2-132", "prepared", "there", 7),
            ("vnpu-2-133", "lost", "lost", 8),
            ("vnpu-2-134", "lost", "other", 8),
            ("vnpu-2-134", "foreign", "-", 16),
            ("vnpu-2-135", "preparing", "new", 8),
            ("vnpu-2-136", "releasing", "old", 8),
            ("vnpu-2-140", "foreign", "-", 8),
        ]
    );
    let status = running.client.status(proto::StatusRequest {}).await.unwrap().into_inner();
    let points: Vec<_> = status.attention.iter().map(|point| format!("{}: {}", point.subject, point.text)).collect();
    for expected in [
        "npu-2: takes no new claims: it has vNPUs that are not ours: 140",
        "vnpu-2-133: of claim ml/train-lost on npu-2 was destroyed by somebody else; delete the pod",
        "claim ml/train-new: its vNPUs are still being made",
        "claim ml/train-old: it is released, but its vNPUs are not destroyed yet",
    ] {
        assert!(points.iter().any(|point| point == expected), "{expected} is not in {points:#?}");
    }
    let devices = running.client.devices(proto::DevicesRequest {}).await.unwrap().into_inner().devices;
    assert_eq!((devices[2].state.as_str(), devices[2].taints.len()), ("closed", 1));
    assert_eq!(devices[2].reason, "it has vNPUs that are not ours: 140");

    // After a reboot a vNPU that is not there is made again, and before the first reading nothing is lost.
    running.change(|world| "boot-2".clone_into(&mut world.node.boot_id));
    let list = running.client.vnpus(proto::VnpusRequest {}).await.unwrap().into_inner().vnpus;
    assert_eq!((list[0].state.as_str(), list[1].state.as_str()), ("prepared", "absent"));
    running.change(|world| world.devices[2].reading = None);
    let list = running.client.vnpus(proto::VnpusRequest {}).await.unwrap().into_inner().vnpus;
    assert_eq!((list.len(), list[1].state.as_str()), (5, "prepared"));
    running.change(|world| drop(world.devices.remove(2)));
    let list = running.client.vnpus(proto::VnpusRequest {}).await.unwrap().into_inner().vnpus;
    assert_eq!((list[1].name.as_str(), list[1].state.as_str()), ("vnpu-2-133", "gone"));
}

#[tokio::test]
async fn templates_tell_what_can_still_be_cut_or_why_nothing_can() {
    let mut running = start_as_own().await;
    let fits =
        |device: &proto::DeviceTemplates| device.templates.iter().map(|template| template.fits).collect::<Vec<_>>();
    let all = running.client.templates(proto::TemplatesRequest {}).await.unwrap().into_inner().devices;
    assert_eq!((fits(&all[0]), all[0].reason.as_str()), (vec![Some(0); 4], "claim ml/train-u0 holds all of it"));
    assert_eq!(fits(&all[2]), [None; 4], "not read");
    assert_eq!(all[2].reason, "hard slicing is not enabled (--enable-hard-vnpu)");

    running.change(|world| {
        (world.model, world.slicing) = (Model::Consumable, String::new());
        cut(world, "there", 132, Phase::Prepared);
        cut(world, "new", 133, Phase::Intent);
        let vnpus = vec![read(132, "vir05_1c_8g", 7, 5)];
        let free = Some(Resources { memory: 23 * GIB, ai_cores: 15, ai_cpus: 6, media: 18 });
        world.devices[2].reading = Some(CardReading { vnpus, free, processes: Some(vec![7]) });
        let busy = CardReading { processes: Some(vec![4711]), ..CardReading::default() };
        world.devices[1].reading = Some(busy);
    });
    let all = running.client.templates(proto::TemplatesRequest {}).await.unwrap().into_inner().devices;
    assert_eq!((fits(&all[1]), all[1].reason.as_str()), (vec![Some(0); 4], "processes run on it: [4711]"));
    assert_eq!((fits(&all[2]), all[2].reason.as_str()), (vec![Some(2), Some(1), Some(1), Some(0)], ""));
    let mix = |mix: &proto::Mix| {
        mix.parts.iter().map(|part| format!("{} x {}", part.count, part.template)).collect::<Vec<_>>().join(" + ")
    };
    assert_eq!(
        all[2].mixes.iter().map(mix).collect::<Vec<_>>(),
        ["2 x vir05_1c_8g", "1 x vir10_3c_16g", "1 x vir10_3c_16g_nm"]
    );
}

#[tokio::test]
async fn what_an_operator_wants_of_vnpus_is_done_or_refused_with_its_code() {
    let mut running = start_as_own().await;
    let mut create = async |device: &str| {
        let request = proto::CreateVnpuRequest { device: device.to_owned(), template: "vir05_1c_8g".to_owned() };
        running.client.create_vnpu(request).await.map(tonic::Response::into_inner)
    };
    let made = create("npu-2").await.unwrap().vnpu.unwrap();
    assert_eq!((made.name.as_str(), made.state.as_str()), ("vnpu-2-148", "foreign"));
    assert_eq!(create("npu-0").await.unwrap_err().code(), Code::FailedPrecondition);
    assert_eq!(create("npu-1").await.unwrap_err().code(), Code::FailedPrecondition, "not scanned yet is no failure");
    let absent = create("npu-9").await.unwrap_err();
    assert_eq!((absent.code(), absent.message()), (Code::NotFound, "there is no device npu-9"));
    let mut destroy = async |force| {
        let request = proto::DestroyVnpuRequest { id: 132, force };
        running.client.destroy_vnpu(request).await.map(tonic::Response::into_inner)
    };
    assert_eq!(destroy(true).await.unwrap().device, "npu-2");
    let failed = destroy(false).await.unwrap_err();
    assert_eq!((failed.code(), failed.message().contains("processes run")), (Code::Aborted, true));
    let metrics = running.metrics();
    assert!(metrics.contains(r#"admin_requests_total{method="create_vnpu",code="refused"} 2"#), "{metrics}");
}

/// What is logged while it lives, by this thread.
struct Log {
    written: Arc<Mutex<Vec<u8>>>,
    _on: tracing::subscriber::DefaultGuard,
}

struct Lines(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Log {
    fn start() -> Self {
        let written = Arc::new(Mutex::default());
        let sink = written.clone();
        let log = tracing_subscriber::fmt().with_ansi(false).with_writer(move || Lines(sink.clone())).finish();
        Self { written, _on: tracing::subscriber::set_default(log) }
    }

    fn text(&self) -> String {
        String::from_utf8(std::mem::take(&mut *self.written.lock().unwrap())).unwrap()
    }
}

#[tokio::test]
async fn the_log_has_what_came_of_an_operators_wish_and_no_wish_before_it() {
    let log = Log::start();
    let mut running = start_as_own().await;
    let mut create = async |device: &str| {
        let request = proto::CreateVnpuRequest { device: device.to_owned(), template: "vir05_1c_8g".to_owned() };
        let _ = running.client.create_vnpu(request).await;
        log.text()
    };
    let text = create("npu-2").await;
    assert!(text.contains("root made a vNPU npu=\"npu-2\" template=\"vir05_1c_8g\" vnpu=148"), "{text}");
    let text = create("npu-0").await;
    assert!(
        text.contains(
            "making a vNPU by \"vir05_1c_8g\" on \"npu-0\" for root was refused why=a vNPU on npu-0: a claim"
        ),
        "{text}"
    );
    assert!(!text.contains("root made"), "{text}");
    let mut destroy = async |force| {
        let _ = running.client.destroy_vnpu(proto::DestroyVnpuRequest { id: 132, force }).await;
        log.text()
    };
    let text = destroy(true).await;
    assert!(text.contains("root destroyed a vNPU vnpu=132 force=true"), "{text}");
    let text = destroy(false).await;
    assert!(text.contains("destroying vNPU 132 for root failed why=destroying vNPU 132 failed: processes"), "{text}");
    assert!(!text.contains("root destroyed"), "{text}");

    let mut suspend = async |reason: &str| {
        let _ = running.client.suspend_backend(proto::SuspendBackendRequest { reason: reason.to_owned() }).await;
        log.text()
    };
    let text = suspend("driver 26.0").await;
    assert!(text.contains("root suspended the backend reason=\"driver 26.0\""), "{text}");
    let text = suspend("hung").await;
    assert!(text.contains("suspending the backend for root failed") && !text.contains("root suspended"), "{text}");
    let request = proto::HoldRequest { device: "npu-9".to_owned(), kind: "drained".to_owned(), reason: String::new() };
    assert!(running.client.hold(request).await.is_err());
    let text = log.text();
    assert!(text.contains("draining \"npu-9\" for root was refused why=there is no device npu-9"), "{text}");
    let _ = running.client.release_claim(proto::ReleaseClaimRequest { uid: "u0".to_owned() }).await;
    let text = log.text();
    assert!(text.contains("root released a claim by force claim.uid=u0"), "{text}");
}

#[tokio::test]
async fn suspending_reaches_the_engine_with_a_reason_of_one_line() {
    let mut running = start_as_own().await;
    let mut suspend = async |reason: &str| {
        let request = proto::SuspendBackendRequest { reason: reason.to_owned() };
        running.client.suspend_backend(request).await.map(drop).map_err(|status| status.code())
    };
    for bad in ["two\nlines", "\u{1b}[31m", &"x".repeat(300)] {
        assert_eq!(suspend(bad).await, Err(Code::InvalidArgument), "{bad:?}");
    }
    assert_eq!(suspend("").await, Ok(()));
    assert_eq!(suspend("driver 26.0").await, Ok(()));
    assert_eq!(suspend("hung").await, Err(Code::Aborted));
    assert!(running.client.resume_backend(proto::ResumeBackendRequest {}).await.is_ok());
}

#[tokio::test]
async fn release_reaches_the_engine_only_for_a_claim_that_is_held() {
    let mut running = start_as_own().await;
    let mut release = async |uid: &str| {
        running.client.release_claim(proto::ReleaseClaimRequest { uid: uid.to_owned() }).await.map(|_| ())
    };
    assert_eq!(release("nobody").await.unwrap_err().code(), Code::NotFound);
    assert_eq!(release("../x").await.unwrap_err().code(), Code::InvalidArgument);
    release("bad").await.unwrap();
    release("u0").await.unwrap();
    assert_eq!(*running.sources.released.lock().unwrap(), ["bad", "u0"]);
    let metrics = running.metrics();
    assert!(metrics.contains(r#"admin_requests_total{method="release_claim",code="ok"} 2"#), "{metrics}");
}

#[tokio::test]
async fn a_watch_tells_everything_once_and_then_only_what_changes() {
    let mut running = start_as_own().await;
    let request = proto::WatchRequest { devices: true, claims: true };
    let mut stream = running.client.watch(request).await.unwrap().into_inner();
    let first = stream.message().await.unwrap().unwrap();
    assert_eq!((first.complete, first.devices.len(), first.claims.len()), (true, 3, 2));
    assert!(running.metrics().contains("admin_watches 1"));

    // A change that shows nothing new is no answer; the next one is.
    running.change(|_| ());
    running.change(|snapshot| {
        snapshot.devices[0].owners.clear();
        snapshot.claims.clear();
    });
    let news = timeout(BOUND, stream.message()).await.unwrap().unwrap().unwrap();
    let names: Vec<_> = news.devices.iter().map(|device| device.name.as_str()).collect();
    assert_eq!((news.complete, names), (false, vec!["npu-0"]));
    assert_eq!((news.claims.len(), &news.removed_claims[..]), (0, &["u0".to_owned()][..]));

    // The end of the daemon ends the watch, and takes the socket away.
    running.shutdown.cancel();
    assert_eq!(timeout(BOUND, stream.message()).await.unwrap().unwrap(), None);
    timeout(BOUND, running.server).await.unwrap().unwrap();
    assert!(!running.dir.path().join("admin.sock").exists());
}

#[tokio::test]
async fn a_watch_of_claims_says_nothing_of_devices() {
    let mut running = start_as_own().await;
    let request = proto::WatchRequest { devices: false, claims: true };
    let mut stream = running.client.watch(request).await.unwrap().into_inner();
    assert!(stream.message().await.unwrap().unwrap().devices.is_empty());
    drop(stream);
    let ended = async {
        while !running.metrics().contains("admin_watches 0") {
            tokio::task::yield_now().await;
        }
    };
    timeout(BOUND, ended).await.expect("a dropped watch ends in the daemon too");
}

#[tokio::test]
async fn a_caller_without_permission_is_denied() {
    if nix::unistd::getuid().is_root() {
        // Root is never denied; npuctl's own tests call as another user.
        return;
    }
    let mut running = start(0).await;
    let denied = running.client.devices(proto::DevicesRequest {}).await.unwrap_err();
    assert_eq!(denied.code(), Code::PermissionDenied);
    assert!(running.metrics().contains(r#"admin_requests_total{method="devices",code="denied"} 1"#));
}

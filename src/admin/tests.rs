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
        health::{Health, HealthReading, Level},
        inventory::tests::inventory_of,
        model::Model,
        names::{DriverName, NodeName, PoolName},
        notice::Severity,
        npu::StableId,
        plan::Node,
        record::{Holding, Phase, Quarantined, Record},
        refusal::Refusal,
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

/// Three cards: `npu-0` held by claim `u0`, `npu-1` critical, `npu-2` free; and a damaged record `bad`.
fn snapshot() -> Snapshot {
    let inventory = inventory_of(3);
    let held = record("u0", &inventory.npus()[0].stable_id, "npu-0");
    let levels = [Level::Ok, Level::Critical, Level::Ok];
    let devices = inventory.npus().iter().zip(levels).map(|(npu, level)| {
        let codes = if level == Level::Ok { vec![] } else { vec![0x80E0_1801] };
        DeviceView {
            npu: npu.clone(),
            health: Some(Health { reading: HealthReading { codes, ..HealthReading::of(level) }, since: at(50) }),
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
        devices: devices.collect(),
        claims: vec![held.clone()],
        quarantined: vec![Quarantined {
            uid: ClaimUid::new("bad").unwrap(),
            why: "the checksum is wrong".to_owned(),
            path: "/var/lib/npu-dra/quarantine/bad.json".to_owned(),
        }],
        model: Model::Off,
        slicing: "hard slicing is not enabled (--enable-hard-vnpu)".to_owned(),
        closed: std::collections::BTreeMap::new(),
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
    assert_eq!(about.text, "health gone, held by ml/train-u0");

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
    assert_eq!(status.attention[0].text, "health critical (code 80E01801), tainted NoSchedule");
    let counts = status.claims.unwrap();
    assert_eq!((counts.prepared, counts.quarantined), (1, 1));
    assert!(status.kubelet.unwrap().registered);
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

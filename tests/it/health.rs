//! A fault on its way through the real daemon: from the simulated library to everybody who must hear of it.

use std::{
    fs,
    time::{Duration, Instant},
};

use dcmi::world::{Assertion, Notice, Profile};
use nix::sys::signal::Signal;
use npu_proto::admin as proto;
use serde_json::{Value, json};
use testkit::{
    api::{ApiServer, Gate, Release},
    kubelet::{
        Kubelet,
        client::{Claim, HealthVersion, channel},
    },
    node::{DRIVER, Daemon, NODE, Node, SOON, allocated_claim, until},
};

const BINARY: &str = env!("CARGO_BIN_EXE_npu-dra");
const ECC: u32 = 0x80E0_1801;
const CRITICAL: u8 = 3;
/// How long a card must be quiet in these tests.
const QUIET: &str = "--health-quiet=2s";

struct Setting {
    node: Node,
    api: ApiServer,
    kubelet: Kubelet,
}

impl Setting {
    async fn new(release: Release) -> Self {
        let mut node = Node::new(Profile::Ascend910B4).unwrap();
        let api = node.start_api(release).await.unwrap();
        let kubelet = node.start_kubelet().unwrap();
        Self { node, api, kubelet }
    }

    async fn daemon(&self, flags: &[&str]) -> Daemon {
        let daemon = self.node.daemon_with(BINARY, flags);
        let daemon = self.node.start_registered(daemon, &self.kubelet).await.unwrap();
        self.api.wait_until(|state| !state.slices(DRIVER, NODE).is_empty(), SOON).await.unwrap();
        daemon
    }

    async fn prepare(&self, claim: &Claim) -> Result<(), String> {
        self.kubelet.client(DRIVER).unwrap().prepare_one(claim).await.map(drop)
    }

    /// Taints of a device as `key=value:effect`.
    fn taints(&self, device: &str) -> Vec<String> {
        taints_of(&self.api.slices(DRIVER, NODE), device)
    }

    async fn wait_taints(&self, device: &str, wanted: &[&str]) {
        let is_so = until(SOON, || self.taints(device) == wanted).await;
        assert!(is_so, "{device} has {:?} and not {wanted:?}", self.taints(device));
    }

    /// Events with this reason, as what they stand on.
    fn subjects(&self, reason: &str) -> Vec<String> {
        let events = self.api.events();
        let about = events.iter().filter(|event| event["reason"] == reason).map(|event| {
            let object = &event["involvedObject"];
            format!("{} {}", object["kind"].as_str().unwrap(), object["name"].as_str().unwrap())
        });
        about.collect()
    }

    async fn admin(&self) -> proto::admin_client::AdminClient<tonic::transport::Channel> {
        let channel = channel(&self.node.admin_socket(), SOON).await.unwrap();
        proto::admin_client::AdminClient::new(channel)
    }

    /// What `npuctl` is told of a card's health, once it satisfies `wanted`.
    async fn health(&self, device: &str, wanted: impl Fn(&proto::Health) -> bool) -> proto::Health {
        let mut client = self.admin().await;
        let late = Instant::now() + SOON;
        loop {
            let devices = client.devices(proto::DevicesRequest {}).await.unwrap().into_inner().devices;
            let health = devices.into_iter().find(|other| other.name == device).and_then(|device| device.health);
            match health {
                Some(health) if wanted(&health) => return health,
                health => assert!(Instant::now() < late, "{device} has {health:?}"),
            }
            tokio::time::sleep(Duration::from_millis(20)).await; // waits: for the health, with a deadline
        }
    }

    async fn hold(&self, device: &str, kind: &str) -> usize {
        let request =
            proto::HoldRequest { device: device.to_owned(), kind: kind.to_owned(), reason: "a fan".to_owned() };
        self.admin().await.hold(request).await.unwrap().into_inner().claims.len()
    }

    /// Sends the daemon a reload, and waits for its word about it.
    async fn reload(&self, daemon: &Daemon, word: &str) {
        daemon.signal(Signal::SIGHUP).unwrap();
        daemon.wait_log(word, SOON).await.unwrap();
    }
}

fn taints_of(slices: &[Value], device: &str) -> Vec<String> {
    let devices = slices.iter().flat_map(|slice| slice["spec"]["devices"].as_array().unwrap());
    let found = devices.into_iter().find(|other| other["name"] == device);
    let taints = found.and_then(|device| device["taints"].as_array()).cloned().unwrap_or_default();
    let text = |taint: &Value| {
        let part = |name: &str| taint[name].as_str().unwrap_or_default().to_owned();
        format!("{}={}:{}", part("key"), part("value"), part("effect"))
    };
    taints.iter().map(text).collect()
}

const UNHEALTHY: &str = "npu.huawei.com/unhealthy=critical:NoSchedule";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fault_is_said_everywhere_and_is_over_after_the_quiet_time() {
    let setting = Setting::new(Release::V1_36).await;
    let daemon = setting.daemon(&[QUIET]).await;
    let claim = allocated_claim(&setting.api, "one", &["npu-3"]).unwrap();
    setting.api.edit("resourceclaims", "default", "one", |claim| {
        claim["status"]["reservedFor"] = json!([{"resource": "pods", "name": "train", "uid": "pod-uid"}]);
    });
    setting.prepare(&claim).await.unwrap();
    let mut streams = Vec::new();
    for version in [HealthVersion::V1, HealthVersion::V1Alpha1] {
        let client = setting.kubelet.client(DRIVER).unwrap();
        streams.push(client.watch_health(version).await.unwrap());
    }

    let start = Instant::now();
    setting.node.world().occur(3, ECC, CRITICAL).unwrap();
    setting.node.world().set_health(3, CRITICAL.into()).unwrap();
    let tainted = until(SOON, || !setting.taints("npu-3").is_empty()).await;
    assert!(tainted && start.elapsed() < Duration::from_secs(1), "after {:?}", start.elapsed());
    setting.wait_taints("npu-3", &[UNHEALTHY]).await;
    for stream in &mut streams {
        let ill = stream.wait_for(SOON, |list| list.iter().any(|device| device.health == 2)).await.unwrap();
        assert_eq!(ill.len(), 1, "only devices of live claims");
        assert!(ill[0].message.is_empty() || ill[0].message.contains("80E01801 HBM multi-bit ECC"), "{ill:?}");
    }
    let said = until(SOON, || setting.subjects("NpuHealthChanged").len() >= 2).await;
    assert!(said, "{:?}", setting.api.events());
    let mut subjects = setting.subjects("NpuHealthChanged");
    subjects.sort();
    assert_eq!(subjects, [format!("Node {NODE}"), "Pod train".to_owned()]);
    let health = setting.health("npu-3", |health| health.level == "critical").await;
    assert_eq!((health.condition.as_str(), &health.codes[..]), ("tainted", &[ECC][..]));
    assert!(daemon.log().contains("80E01801"), "the journal has the code");

    // Who has it keeps it, nobody else gets it but who tolerates it.
    setting.prepare(&claim).await.unwrap();
    setting.kubelet.client(DRIVER).unwrap().unprepare_one(&claim).await.unwrap();
    let other = allocated_claim(&setting.api, "two", &["npu-3"]).unwrap();
    let refused = setting.prepare(&other).await.unwrap_err();
    for word in ["npu-3", "tainted since 20", "80E01801 HBM multi-bit ECC", "npu.huawei.com/unhealthy"] {
        assert!(refused.contains(word), "{word}: {refused}");
    }
    let log = daemon.log();
    let warned: Vec<_> = log.lines().filter(|line| line.contains("WARN") && line.contains("refused")).collect();
    assert_eq!(warned.len(), 1, "a refusal is told once: {warned:#?}");
    setting.api.edit("resourceclaims", "default", "two", |claim| {
        claim["status"]["allocation"]["devices"]["results"][0]["tolerations"] =
            json!([{"key": "npu.huawei.com/unhealthy", "operator": "Exists"}]);
    });
    setting.prepare(&other).await.unwrap();

    // Over, and held for the quiet time.
    setting.node.world().recover(3, ECC, CRITICAL).unwrap();
    setting.node.world().set_health(3, 0).unwrap();
    let quiet = Instant::now();
    let open = until(SOON, || setting.taints("npu-3").is_empty()).await;
    assert!(open && quiet.elapsed() > Duration::from_millis(1900), "after {:?}", quiet.elapsed());
    setting.health("npu-3", |health| health.condition == "ok").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fault_event_taints_at_once_where_nobody_polls() {
    let setting = Setting::new(Release::V1_36).await;
    let _daemon = setting.daemon(&[QUIET, "--health-interval=600s"]).await;
    let world = setting.node.world();
    let subscribed = until(SOON, || world.calls().unwrap().count("dcmi_subscribe_fault_event") > 0).await;
    assert!(subscribed, "the daemon listens to the library's events");
    let start = Instant::now();
    // The card itself does not tell of it: a poll would find nothing.
    world.send_event(Notice { phy: 3, code: ECC, severity: CRITICAL, assertion: Assertion::Occurred }).unwrap();
    setting.wait_taints("npu-3", &[UNHEALTHY]).await;
    let took = start.elapsed();
    assert!(took < Duration::from_secs(1), "after {took:?}");
    let health = setting.health("npu-3", |health| health.condition == "tainted").await;
    assert_eq!(health.codes, [ECC]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_card_that_flaps_stays_tainted_over_a_crash_and_writes_one_slice() {
    let setting = Setting::new(Release::V1_36).await;
    let mut daemon = setting.daemon(&[QUIET]).await;
    let world = setting.node.world();
    setting.api.forget_requests();
    let start = Instant::now();
    for _ in 0..20 {
        let notice = |assertion| Notice { phy: 2, code: ECC, severity: CRITICAL, assertion };
        let storm: Vec<_> = (0..25).flat_map(|_| [notice(Assertion::Occurred), notice(Assertion::Recovered)]).collect();
        world.send_events(&storm).unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await; // waits: a storm of 1,000 events a second
    }
    setting.wait_taints("npu-2", &[UNHEALTHY]).await;
    let writes = setting.api.writes_since(start);
    let slices = writes.iter().filter(|write| write.path.contains("resourceslices")).count();
    assert_eq!(slices, 1, "{:?}", writes.iter().map(|write| &write.path).collect::<Vec<_>>());
    let events = writes.iter().filter(|write| write.path.contains("/events")).count();
    assert!(events <= 2, "{events} Events");

    daemon.kill().unwrap();
    let _daemon = setting.daemon(&[QUIET]).await;
    // The first thing that it knows of the card.
    setting
        .health("npu-2", |health| {
            assert_eq!(health.condition, "tainted");
            true
        })
        .await;
    assert_eq!(setting.taints("npu-2"), [UNHEALTHY]);
    setting.wait_taints("npu-2", &[]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fault_while_the_api_server_is_away_is_told_when_it_is_back_and_so_is_its_end() {
    let setting = Setting::new(Release::V1_36).await;
    let _daemon = setting.daemon(&["--health-quiet=1s"]).await;
    setting.api.stop_listening().await.unwrap();
    setting.api.drop_connections().await.unwrap();
    setting.node.world().set_fault_codes(1, &[ECC]).unwrap();
    let known =
        until(SOON, || fs::read_to_string(setting.node.state().join("node.json")).unwrap().contains("80E01801"));
    assert!(known.await, "the fault is remembered");
    setting.api.resume_listening().await.unwrap();
    let told = until(SOON * 3, || !setting.taints("npu-1").is_empty()).await;
    assert!(told, "the taint comes with the server");
    setting.node.world().set_fault_codes(1, &[]).unwrap();
    setting.wait_taints("npu-1", &[]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixty_four_faults_at_once_and_events_of_strangers_leave_the_daemon_well() {
    let setting = Setting::new(Release::V1_36).await;
    let mut daemon = setting.daemon(&[QUIET]).await;
    let world = setting.node.world();
    let codes: Vec<u32> = (0..64).map(|n| 0xA000_0000 + n).collect();
    world.set_fault_codes(5, &codes).unwrap();
    world.set_health(5, 2).unwrap();
    let stray = Notice { phy: 0, code: ECC, severity: CRITICAL, assertion: Assertion::Occurred };
    world.send_stray_event(999, stray).unwrap();
    setting.wait_taints("npu-5", &["npu.huawei.com/unhealthy=major:NoSchedule"]).await;
    let health = setting.health("npu-5", |health| health.codes.len() == 64).await;
    assert!(health.reason.ends_with("and 58 more"), "{}", health.reason);
    world.set_health(6, 0xFFFF_FFFF).unwrap();
    setting.wait_taints("npu-6", &["npu.huawei.com/unhealthy=gone:NoSchedule"]).await;
    assert!(setting.taints("npu-0").is_empty(), "the stranger is not npu-0");
    assert!(daemon.exit_status().unwrap().is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_administrators_table_evicts_and_one_with_a_mistake_leaves_the_old_in_force() {
    let setting = Setting::new(Release::V1_36).await;
    let table = setting.node.dir().join("faults.toml");
    fs::write(&table, "80E01801 = \"evict\"\n").unwrap();
    let flag = format!("--health-faults={}", table.display());
    let daemon = setting.daemon(&[QUIET, &flag]).await;
    setting.node.world().set_fault_codes(4, &[ECC]).unwrap();
    let evicted = "npu.huawei.com/unhealthy=fault:NoExecute";
    setting.wait_taints("npu-4", &[evicted]).await;
    setting.health("npu-4", |health| health.condition == "fatal").await;

    fs::write(&table, "80E01801 = \"evict\"\n80E18005 = \"evikt\"\n").unwrap();
    setting.reload(&daemon, "faults.toml:2: \"evikt\" is no action").await;
    assert_eq!(setting.taints("npu-4"), [evicted]);

    fs::write(&table, "80E01801 = \"ignore\"\n").unwrap();
    setting.reload(&daemon, "faults=1").await;
    setting.wait_taints("npu-4", &[]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_outlives_a_restart_and_ends_when_the_operator_says_so() {
    let setting = Setting::new(Release::V1_36).await;
    let mut daemon = setting.daemon(&[]).await;
    let claim = allocated_claim(&setting.api, "one", &["npu-0"]).unwrap();
    setting.prepare(&claim).await.unwrap();
    assert_eq!(setting.hold("npu-0", "drained").await, 1);
    setting.hold("npu-1", "cordoned").await;
    let drained = "npu.huawei.com/drained=a-fan:NoExecute";
    setting.wait_taints("npu-0", &[drained]).await;
    setting.wait_taints("npu-1", &["npu.huawei.com/cordoned=a-fan:NoSchedule"]).await;
    let said = until(SOON, || !setting.subjects("NpuDrained").is_empty()).await;
    assert!(said, "{:?}", setting.api.events());

    daemon.kill().unwrap();
    let _daemon = setting.daemon(&[]).await;
    assert_eq!(setting.taints("npu-0"), [drained]);
    setting.prepare(&claim).await.expect("who has it keeps it");
    setting.kubelet.client(DRIVER).unwrap().unprepare_one(&claim).await.unwrap();
    let other = allocated_claim(&setting.api, "two", &["npu-0"]).unwrap();
    let refused = setting.prepare(&other).await.unwrap_err();
    assert!(refused.contains("drained by an operator since 20") && refused.contains("(a fan)"), "{refused}");
    setting.hold("npu-0", "").await;
    setting.wait_taints("npu-0", &[]).await;
    setting.prepare(&other).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_the_server_keeps_no_taints_an_idle_card_is_withdrawn_and_a_held_one_stays() {
    let setting = Setting::new(Release::V1_34).await;
    setting.api.set_gate(Gate::DeviceTaints, false);
    let _daemon = setting.daemon(&["--health-quiet=1s"]).await;
    let offers = |device: &str| {
        let slices = setting.api.slices(DRIVER, NODE);
        let mut devices = slices.iter().flat_map(|slice| slice["spec"]["devices"].as_array().unwrap());
        devices.any(|other| other["name"] == device)
    };
    let claim = allocated_claim(&setting.api, "one", &["npu-1"]).unwrap();
    setting.prepare(&claim).await.unwrap();
    for card in [1, 2] {
        setting.node.world().set_fault_codes(card, &[ECC]).unwrap();
    }
    assert!(until(SOON, || !offers("npu-2")).await);
    assert!(offers("npu-1"), "a claim lives on it");
    setting.kubelet.client(DRIVER).unwrap().unprepare_one(&claim).await.unwrap();
    assert!(until(SOON, || !offers("npu-1")).await);
    for card in [1, 2] {
        setting.node.world().set_fault_codes(card, &[]).unwrap();
    }
    assert!(until(SOON, || offers("npu-1") && offers("npu-2")).await);
}

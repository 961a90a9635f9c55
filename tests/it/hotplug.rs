//! Cards that are lost, come back, change places or are swapped under the real daemon, and a vendor library whose
//! process does not end.

use std::{
    fs,
    time::{Duration, Instant},
};

use dcmi::world::{Action, DiePolicy, Fault as Planted, Profile};
use npu_proto::admin as proto;
use serde_json::{Value, json};
use testkit::{
    api::{ApiServer, DeviceResult, Release},
    kubelet::{
        self, Kubelet,
        client::{Claim, HealthVersion, channel},
    },
    node::{DRIVER, Daemon, NODE, Node, POOL, SOON, allocated_claim, until},
    stuck::Stuck,
};

const BINARY: &str = env!("CARGO_BIN_EXE_npu-dra");
const NAMESPACE: &str = "default";

struct Setting {
    daemon: Daemon,
    kubelet: Kubelet,
    api: ApiServer,
    node: Node,
}

impl Setting {
    async fn new(profile: Profile) -> Self {
        let mut node = Node::new(profile).unwrap();
        let api = node.start_api(Release::V1_36).await.unwrap();
        let kubelet = node.start_kubelet().unwrap();
        let command = node.daemon_with(BINARY, &["--enable-hard-vnpu=true", "--health-quiet=1s"]);
        let daemon = node.start_registered(command, &kubelet).await.unwrap();
        Self { daemon, kubelet, api, node }
    }

    /// What is published: name, identity and whether it takes new claims.
    fn devices(&self) -> Vec<(String, String, bool)> {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let mut devices = Vec::new();
        for slice in self.api.slices(DRIVER, NODE) {
            for device in slice["spec"]["devices"].as_array().into_iter().flatten() {
                let open = device["taints"].as_array().is_none_or(Vec::is_empty);
                let attributes = &device["attributes"];
                if attributes["type"]["string"] == "npu" {
                    devices.push((text(&device["name"]), text(&attributes["uuid"]["string"]), open));
                }
            }
        }
        devices.sort();
        devices
    }

    fn open(&self) -> Vec<String> {
        self.devices().into_iter().filter(|(.., open)| *open).map(|(name, ..)| name).collect()
    }

    async fn wait(&self, what: &str, condition: impl FnMut() -> bool) {
        assert!(until(SOON, condition).await, "{what}: {:?}\n{}", self.devices(), self.daemon.log());
    }

    /// A claim that was allocated a quarter of a card.
    fn part(&self, name: &str, device: &str) -> Claim {
        let exactly = json!({"deviceClassName": DRIVER, "allocationMode": "ExactCount", "count": 1,
            "capacity": {"requests": {"memCapacity": "8Gi"}}});
        let result = DeviceResult::new("npu", DRIVER, POOL, device).share("share").consumes("memCapacity", "8Gi");
        let builder = self.api.claim_builder(NAMESPACE, name);
        let stored = builder.raw_request(json!({"name": "npu", "exactly": exactly})).result(result).node(NODE).store();
        kubelet::claim(NAMESPACE, name, stored["metadata"]["uid"].as_str().unwrap())
    }

    fn whole(&self, name: &str, device: &str) -> Claim {
        allocated_claim(&self.api, name, &[device]).unwrap()
    }

    async fn prepare(&self, claim: &Claim) -> Result<(), String> {
        self.kubelet.client(DRIVER).unwrap().prepare_one(claim).await.map(drop)
    }

    async fn prepared(&self, claim: &Claim) {
        let outcome = self.prepare(claim).await;
        outcome.unwrap_or_else(|error| panic!("{error}\n{}", self.daemon.log()));
    }

    async fn unprepare(&self, claim: &Claim) -> Result<(), String> {
        self.kubelet.client(DRIVER).unwrap().unprepare_one(claim).await
    }

    async fn released(&self, claim: &Claim) {
        let outcome = self.unprepare(claim).await;
        outcome.unwrap_or_else(|error| panic!("{error}\n{}", self.daemon.log()));
    }

    /// A chip falls off its bus, or is back there.
    fn lose(&self, physical_id: u32) {
        self.node.world().drop_chip(physical_id).unwrap();
        self.node.sync_host().unwrap();
    }

    fn give_back(&self, physical_id: u32) {
        self.node.world().return_chip(physical_id).unwrap();
        self.node.sync_host().unwrap();
    }

    fn vnpus(&self) -> Vec<u32> {
        self.node.world().vnpus().unwrap().into_iter().map(|vnpu| vnpu.id).collect()
    }

    /// What `npuctl devices` is told.
    async fn shown(&self) -> Vec<proto::Device> {
        let channel = channel(&self.node.admin_socket(), SOON).await.unwrap();
        let mut client = proto::admin_client::AdminClient::new(channel);
        client.devices(proto::DevicesRequest {}).await.unwrap().into_inner().devices
    }

    fn records(&self) -> usize {
        self.node.records().unwrap().len()
    }
}

fn tainted((name, uuid, _): &(String, String, bool)) -> (String, String, bool) {
    (name.clone(), uuid.clone(), false)
}

fn names(numbers: impl IntoIterator<Item = u32>) -> Vec<String> {
    numbers.into_iter().map(|number| format!("npu-{number}")).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_on_a_lost_card_stay_recorded_can_be_released_and_the_card_comes_back_under_its_name() {
    let setting = Setting::new(Profile::Ascend910B4).await;
    setting.wait("all cards", || setting.open() == names(0..8)).await;
    let whole = setting.devices();
    let (kept, gone, part) =
        (setting.whole("kept", "npu-2"), setting.whole("gone", "npu-5"), setting.part("part", "npu-6"));
    for claim in [&kept, &gone, &part] {
        setting.prepared(claim).await;
    }
    assert_eq!((setting.records(), setting.vnpus()), (3, vec![196]));
    setting.lose(5);
    setting.lose(6);
    setting.wait("the lost cards take no claims", || setting.open() == names([0, 1, 2, 3, 4, 7])).await;
    assert_eq!(setting.records(), 3);
    let late = setting.whole("late", "npu-5");
    let refused = setting.prepare(&late).await.unwrap_err();
    assert!(!refused.is_empty());
    for name in names([5, 6]) {
        setting.daemon.wait_log(&format!("{name} is no longer found"), SOON).await.unwrap();
    }
    // Its pods can go; what cannot be undone now is kept for the card's return.
    for claim in [&part, &gone] {
        setting.released(claim).await;
    }
    assert_eq!((setting.records(), setting.vnpus()), (2, vec![196]));
    setting.released(&part).await;
    setting.give_back(5);
    setting.give_back(6);
    setting.wait("all cards again", || setting.devices() == whole).await;
    setting.wait("the vNPU is destroyed", || (setting.records(), setting.vnpus()) == (1, vec![])).await;
    setting.prepared(&late).await;
    for claim in [&late, &kept] {
        setting.released(claim).await;
    }
    assert_eq!(setting.node.cdi_files().unwrap(), [""; 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_card_is_shown_until_it_is_back_also_over_a_restart() {
    let mut setting = Setting::new(Profile::Ascend910B4).await;
    setting.wait("all cards", || setting.open() == names(0..8)).await;
    let whole = setting.devices();
    let held = setting.whole("held", "npu-5");
    setting.prepared(&held).await;
    let mut stream = setting.kubelet.client(DRIVER).unwrap().watch_health(HealthVersion::V1).await.unwrap();
    setting.lose(3);
    setting.lose(5);
    for name in names([3, 5]) {
        setting.daemon.wait_log(&format!("{name} is no longer found"), SOON).await.unwrap();
    }
    let shown = setting.shown().await;
    let lost = |shown: &[proto::Device]| -> Vec<(String, String, bool)> {
        let lost = shown.iter().filter(|device| device.health.as_ref().is_some_and(|it| it.condition == "lost"));
        lost.map(|device| (device.name.clone(), device.state.clone(), device.bus_id.is_empty())).collect()
    };
    let both = [3, 5].map(|number| (format!("npu-{number}"), "gone".to_owned(), false));
    assert_eq!(lost(&shown), both);
    // The pod of the claim hears of it, and its card stays published with a taint.
    stream.wait_for(SOON, |list| list.len() == 1 && list[0].health == 2).await.unwrap();
    setting.wait("the held card's taint", || setting.devices().contains(&tainted(&whole[5]))).await;
    setting.wait("the idle card goes", || setting.devices().iter().all(|(name, ..)| name != "npu-3")).await;

    let memory = setting.node.state().join("node.json");
    let kept = || fs::read_to_string(&memory).is_ok_and(|text| text.contains("\"lost\""));
    setting.wait("the loss is on disk", kept).await;
    setting.daemon.kill().unwrap();
    let command = setting.node.daemon_with(BINARY, &["--enable-hard-vnpu=true", "--health-quiet=1s"]);
    setting.daemon = setting.node.start_registered(command, &setting.kubelet).await.unwrap();
    assert_eq!(lost(&setting.shown().await), both);
    setting.give_back(3);
    setting.give_back(5);
    setting.wait("all cards again", || setting.devices() == whole).await;
    assert_eq!(lost(&setting.shown().await), []);
    setting.released(&held).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_card_that_comes_after_a_complete_scan_is_found() {
    for backend in ["dcmi", "sysfs"] {
        let mut node = Node::new(Profile::Ascend910B4).unwrap();
        node.world().drop_chip(6).unwrap();
        node.sync_host().unwrap();
        let api = node.start_api(Release::V1_36).await.unwrap();
        let kubelet = node.start_kubelet().unwrap();
        let flags = [&format!("--backend={backend}")[..], "--health-quiet=1s"];
        let daemon = node.start_registered(node.daemon_with(BINARY, &flags), &kubelet).await.unwrap();
        let setting = Setting { daemon, kubelet, api, node };
        setting.wait("seven cards", || setting.open() == names([0, 1, 2, 3, 4, 5, 7])).await;
        setting.give_back(6);
        setting.wait("the eighth", || setting.open() == names(0..8)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reset_that_changes_the_order_of_cards_leaves_names_with_their_cards() {
    let setting = Setting::new(Profile::Ascend910B4).await;
    setting.wait("all cards", || setting.open() == names(0..8)).await;
    let before = setting.devices();
    let claim = setting.whole("one", "npu-1");
    setting.prepared(&claim).await;
    setting.lose(7);
    setting.wait("a card is lost", || setting.open().len() == 7).await;
    let world = setting.node.world();
    world.reorder_cards(&[7, 6, 5, 4, 3, 2, 1, 0]).unwrap();
    // Two cards changed their places too, and with them their physical ids and addresses.
    world.swap_chips(2, 3).unwrap();
    setting.give_back(7);
    setting.wait("all cards under their names", || setting.devices() == before).await;
    let uuid = |name: &str| before.iter().find(|(device, ..)| device == name).unwrap().1.clone();
    let words = world.data().unwrap().chip(3).unwrap().vdie.map(|word| format!("{word:08X}")).join("-");
    assert_eq!(uuid("npu-2"), words, "the card of the second socket sits in the third");
    let swapped = setting.whole("swapped", "npu-2");
    setting.prepared(&swapped).await;
    let files = setting.node.cdi_files().unwrap();
    let file = files.iter().find(|file| file.contains(&swapped.uid)).unwrap();
    let cdi = fs::read_to_string(setting.node.cdi().join(file)).unwrap();
    assert!(cdi.contains("\"/dev/davinci3\""), "{cdi}");
    for claim in [&claim, &swapped] {
        setting.released(claim).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_swapped_card_is_a_new_device_and_the_claims_of_the_old_one_never_touch_it() {
    let setting = Setting::new(Profile::Ascend910B4).await;
    setting.wait("all cards", || setting.open() == names(0..8)).await;
    let (old, whole) = (setting.part("old", "npu-4"), setting.whole("whole", "npu-3"));
    setting.prepared(&old).await;
    setting.prepared(&whole).await;
    assert_eq!(setting.vnpus(), [164]);
    for id in [3, 4] {
        setting.lose(id);
    }
    setting.wait("the cards are lost", || setting.open() == names([0, 1, 2, 5, 6, 7])).await;
    setting.node.world().remove_vnpu(164).unwrap();
    for id in [3, 4] {
        setting.node.world().edit_chip(id, |chip| chip.vdie[0] ^= 0xFFFF).unwrap();
        setting.give_back(id);
    }
    // The lowest unused numbers; the names of the old cards stay theirs.
    setting.wait("new devices", || setting.open() == names([0, 1, 2, 5, 6, 7, 8, 9])).await;
    let new = setting.part("new", "npu-9");
    setting.prepared(&new).await;
    assert_eq!(setting.vnpus(), [164], "the id that the old claim names is the new claim's now");
    setting.released(&old).await;
    setting.released(&whole).await;
    assert_eq!((setting.vnpus(), setting.records()), (vec![164], 1), "the new claim's vNPU is its own");
    setting.released(&new).await;
    assert_eq!((setting.vnpus(), setting.records()), (vec![], 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_910c_that_loses_a_die_is_not_offered_by_half_and_comes_back_whole() {
    let setting = Setting::new(Profile::Ascend910C(DiePolicy::Value(0))).await;
    let mut all = names((0..8).map(|card| 2 * card));
    all.sort();
    setting.wait("all cards", || setting.open() == all).await;
    let before = setting.devices();
    let claim = setting.whole("one", "npu-4");
    setting.prepared(&claim).await;
    // The first die of one card, the second of another.
    for die in [4, 9] {
        setting.lose(die);
    }
    setting.wait("both cards take no claims", || setting.open() == names([0, 10, 12, 14, 2, 6])).await;
    for name in names([4, 8]) {
        let refused = setting.prepare(&setting.whole(&format!("on-{name}"), &name)).await.unwrap_err();
        assert!(!refused.is_empty());
    }
    assert_eq!(setting.records(), 1);
    for die in [4, 9] {
        setting.give_back(die);
    }
    setting.wait("all cards again", || setting.devices() == before).await;
    setting.released(&claim).await;
    assert_eq!(setting.records(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_library_whose_process_does_not_end_holds_up_vnpus_only_and_the_daemon_recovers_by_itself() {
    let mut setting = Setting::new(Profile::Ascend910B4).await;
    setting.wait("all cards", || setting.open() == names(0..8)).await;
    let (part, whole) = (setting.part("part", "npu-1"), setting.whole("whole", "npu-0"));
    setting.prepared(&part).await;
    setting.prepared(&whole).await;
    assert_eq!(setting.vnpus(), [116]);
    let worker = setting.node.world().calls().unwrap().list.last().unwrap().pid;
    let stuck = Stuck::hold(worker).unwrap();
    let health = "dcmi_get_device_health";
    setting.node.world().faults().set([Planted::new(health, Action::Hang).card(7).times(1)]).unwrap();
    setting.daemon.wait_log("was killed and does not end", SOON).await.unwrap();
    let pids = setting.node.world().calls().unwrap();
    let last = pids.list.iter().map(|call| call.pid).next_back();

    // Whole cards go on from the last good scan, and what cannot be done is said at once.
    let next = setting.whole("next", "npu-2");
    setting.prepared(&next).await;
    setting.released(&whole).await;
    let other = setting.part("other", "npu-3");
    let start = Instant::now();
    let refused = setting.prepare(&other).await.unwrap_err();
    assert!(refused.contains(&worker.to_string()) && start.elapsed() < Duration::from_secs(3), "{refused}");
    let refused = setting.unprepare(&part).await.unwrap_err();
    assert!(refused.contains(&worker.to_string()), "{refused}");
    assert_eq!((setting.records(), setting.vnpus()), (2, vec![116]), "the release is kept for later");
    assert_eq!(setting.open(), names(0..8), "nobody has said that a card is sick");
    assert_eq!(setting.node.world().calls().unwrap().list.iter().map(|call| call.pid).next_back(), last, "no other");

    drop(stuck);
    setting.daemon.wait_log("hung process has ended", SOON).await.unwrap();
    let end = Instant::now() + SOON;
    while let Err(refused) = setting.unprepare(&part).await {
        assert!(Instant::now() < end, "{refused}\n{}", setting.daemon.log());
        tokio::time::sleep(Duration::from_millis(50)).await; // waits: for the library to be started again
    }
    setting.prepared(&other).await;
    assert_eq!(setting.vnpus(), [148]);
    for claim in [&other, &next] {
        setting.released(claim).await;
    }
    assert_eq!((setting.records(), setting.vnpus()), (0, vec![]));
    assert_eq!(setting.daemon.stop().await.unwrap().0, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_whose_library_does_not_end_can_be_stopped_and_killed() {
    for kill in [false, true] {
        let mut setting = Setting::new(Profile::Ascend910B4).await;
        setting.wait("all cards", || setting.open() == names(0..8)).await;
        let worker = setting.node.world().calls().unwrap().list.last().unwrap().pid;
        let stuck = Stuck::hold(worker).unwrap();
        let health = "dcmi_get_device_health";
        setting.node.world().faults().set([Planted::new(health, Action::Hang).times(1)]).unwrap();
        setting.daemon.wait_log("was killed and does not end", SOON).await.unwrap();
        if kill {
            setting.daemon.kill().unwrap();
        } else {
            let (code, time) = setting.daemon.stop().await.unwrap();
            assert!(code == 0 && time < Duration::from_secs(3), "{code}, {time:?}");
        }
        drop(stuck);
    }
}

//! The slicing models end to end: what the real daemon publishes to each server is allocated as the scheduler does, with
//! the shipped classes, then prepared, cut and given back.

use std::{fs, path::PathBuf};

use dcmi::world::Profile;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use testkit::{
    api::{ApiServer, DeviceResult, Gate, Release, State},
    kubelet::{self, Kubelet, client::Claim},
    node::{DRIVER, Daemon, NODE, Node, POOL, SOON, until},
};

const BINARY: &str = env!("CARGO_BIN_EXE_npu-dra");
const GROUP: &str = "resource.k8s.io";
const NAMESPACE: &str = "ascend-dra";

struct Setting {
    daemon: Daemon,
    kubelet: Kubelet,
    api: ApiServer,
    node: Node,
}

/// The objects of a shipped manifest.
fn shipped(file: &str) -> Vec<Value> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("packaging/manifests").join(file);
    serde_saphyr::from_multiple(&fs::read_to_string(path).unwrap()).unwrap()
}

impl Setting {
    /// A node with 910B4, a server with these gates more, and the daemon with slicing on; our classes and the policy are
    /// installed.
    async fn new(release: Release, gates: &[Gate], flags: &[&str]) -> Self {
        let mut node = Node::new(Profile::Ascend910B4).unwrap();
        let api = node.start_api(release).await.unwrap();
        for gate in gates {
            api.set_gate(*gate, true);
        }
        api.set_memory_policy(true);
        for class in [shipped("deviceclass.yaml"), shipped("deviceclass-templates.yaml")].concat() {
            api.create(GROUP, "deviceclasses", "", &class).unwrap();
        }
        let template = shipped("sample-memory.yaml").remove(1);
        api.create(GROUP, "resourceclaimtemplates", NAMESPACE, &template).unwrap();
        let kubelet = node.start_kubelet().unwrap();
        let command = node.daemon_with(BINARY, &[&["--enable-hard-vnpu=true"], flags].concat());
        let daemon = node.start_registered(command, &kubelet).await.unwrap();
        Self { daemon, kubelet, api, node }
    }

    /// Waits until the pool is there, and gives the names of its devices of this type.
    async fn published(&self, kind: &str) -> Vec<String> {
        let seen = self.api.wait_until(|state| !state.slices(DRIVER, NODE).is_empty(), SOON).await;
        seen.unwrap_or_else(|error| panic!("{error}\n{}", self.daemon.log()));
        // A pool of several slices is complete only when all are there.
        let complete = || {
            let slices = self.api.slices(DRIVER, NODE);
            slices.iter().all(|slice| slice["spec"]["pool"]["resourceSliceCount"] == slices.len())
        };
        assert!(until(SOON, complete).await, "{}", self.daemon.log());
        let mut names = Vec::new();
        for slice in self.api.slices(DRIVER, NODE) {
            for device in slice["spec"]["devices"].as_array().into_iter().flatten() {
                if device["attributes"]["type"]["string"] == kind {
                    names.push(device["name"].as_str().unwrap().to_owned());
                }
            }
        }
        names
    }

    /// Lets the scheduler allocate a stored claim; gives it as kubelet names it, and the device.
    fn allocate(&self, name: &str) -> Result<(Claim, String), String> {
        let stored = self.api.allocate(NAMESPACE, name).map_err(|error| format!("{error:#}"))?;
        let claim = kubelet::claim(NAMESPACE, name, stored["metadata"]["uid"].as_str().unwrap());
        let device = &stored["status"]["allocation"]["devices"]["results"][0]["device"];
        Ok((claim, device.as_str().unwrap().to_owned()))
    }

    /// Stores a claim and lets the scheduler allocate it.
    fn claim(&self, name: &str, class: &str, memory: Option<&str>) -> Result<(Claim, String), String> {
        let mut exactly = json!({"deviceClassName": class});
        if let Some(memory) = memory {
            exactly["capacity"] = json!({"requests": {"memCapacity": memory}});
        }
        let claim = json!({
            "metadata": {"name": name},
            "spec": {"devices": {"requests": [{"name": "npu", "exactly": exactly}]}},
        });
        self.api.create(GROUP, "resourceclaims", NAMESPACE, &claim).unwrap();
        self.allocate(name)
    }

    async fn prepare(&self, claim: &Claim) -> Result<(), String> {
        self.kubelet.client(DRIVER).unwrap().prepare_one(claim).await.map(drop)
    }

    /// Prepares what the scheduler gave.
    async fn prepared(&self, given: Result<(Claim, String), String>) -> (Claim, String) {
        let (claim, device) = given.unwrap();
        let outcome = self.prepare(&claim).await;
        outcome.unwrap_or_else(|error| panic!("{error}\n{}", self.daemon.log()));
        (claim, device)
    }

    /// Releases and deletes a claim.
    async fn release(&self, claim: &Claim) {
        self.kubelet.client(DRIVER).unwrap().unprepare_one(claim).await.unwrap();
        assert!(self.api.delete_claim(NAMESPACE, &claim.name));
    }

    /// The vNPUs of the hardware: physical id of the card and template.
    fn vnpus(&self) -> Vec<(u32, String)> {
        self.node.world().vnpus().unwrap().into_iter().map(|vnpu| (vnpu.phy, vnpu.template)).collect()
    }

    fn assert_nothing_is_left(&self) {
        assert_eq!(self.vnpus(), []);
        assert_eq!(self.node.records().unwrap(), [""; 0]);
        assert_eq!(self.node.cdi_files().unwrap(), [""; 0]);
        assert_eq!(self.node.world().overlaps().unwrap(), [""; 0]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_claim_of_the_requirements_gets_vir10_3c_16g_on_every_server_that_shares_capacity() {
    let both: &[Gate] = &[Gate::ConsumableCapacity, Gate::PartitionableDevices];
    for (release, gates) in
        [(Release::V1_34, both), (Release::V1_35, both), (Release::V1_36, &[]), (Release::V1_37, &[])]
    {
        let setting = Setting::new(release, gates, &[]).await;
        setting.published("npu").await;
        setting.api.claim_from_template(NAMESPACE, "npu-claim-template", "sample").unwrap();
        let (claim, device) = setting.prepared(setting.allocate("sample")).await;
        assert_eq!(device, "npu-0", "{release:?}");
        assert_eq!(setting.vnpus(), [(0, "vir10_3c_16g".to_owned())], "{release:?}");
        setting.release(&claim).await;
        setting.assert_nothing_is_left();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_the_server_drops_the_capacity_the_claim_gets_a_whole_card() {
    let setting = Setting::new(Release::V1_34, &[], &[]).await;
    assert_eq!(setting.published("npu").await.len(), 8);
    let stored = setting.api.claim_from_template(NAMESPACE, "npu-claim-template", "sample").unwrap();
    assert!(stored.pointer("/spec/devices/requests/0/exactly/capacity").is_none());
    let (claim, device) = setting.prepared(setting.allocate("sample")).await;
    assert_eq!((device.as_str(), setting.vnpus()), ("npu-0", vec![]));
    setting.release(&claim).await;
    setting.assert_nothing_is_left();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_1_34_a_full_first_card_hinders_no_other_and_placeholders_are_given_to_nobody() {
    let gates = [Gate::ConsumableCapacity, Gate::PartitionableDevices];
    let setting = Setting::new(Release::V1_34, &gates, &[]).await;
    assert_eq!(setting.published("placeholder").await.len(), 32);
    let (whole, device) = setting.prepared(setting.claim("whole", DRIVER, None)).await;
    assert_eq!(device, "npu-0");
    let (part, device) = setting.prepared(setting.claim("part", DRIVER, Some("8Gi"))).await;
    assert_eq!(device, "npu-1");
    assert_eq!(setting.vnpus(), [(1, "vir05_1c_8g".to_owned())]);

    let class = json!({"metadata": {"name": "any"}, "spec": {"selectors": [
        {"cel": {"expression": "device.driver == \"npu.huawei.com\""}}]}});
    setting.api.create(GROUP, "deviceclasses", "", &class).unwrap();
    let (any, device) = setting.prepared(setting.claim("any", "any", Some("8Gi"))).await;
    assert_eq!(device, "npu-1", "a class without a type reaches no placeholder");
    for claim in [&whole, &part, &any] {
        setting.release(claim).await;
    }
    setting.assert_nothing_is_left();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_placeholder_that_was_allocated_all_the_same_is_refused() {
    let setting = Setting::new(Release::V1_34, &[Gate::ConsumableCapacity], &[]).await;
    let placeholders = setting.published("placeholder").await;
    let result = DeviceResult::new("npu", DRIVER, POOL, &placeholders[0])
        .share("5b9c3a52-7a5e-4b8e-9f57-d0f1a2b3c4d5")
        .consumes("memCapacity", "8Gi");
    let builder = setting.api.claim_builder(NAMESPACE, "odd").request("npu", DRIVER, 1).result(result);
    let stored = builder.node(NODE).store();
    let claim = kubelet::claim(NAMESPACE, "odd", stored["metadata"]["uid"].as_str().unwrap());
    let refused = setting.prepare(&claim).await.unwrap_err();
    assert!(refused.contains("placeholder"), "{refused}");
    setting.assert_nothing_is_left();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_only_counters_are_kept_each_part_is_a_device_of_its_class() {
    for release in [Release::V1_34, Release::V1_35] {
        let setting = Setting::new(release, &[Gate::PartitionableDevices], &[]).await;
        assert_eq!(setting.published("npu").await.len(), 8);
        let (half, device) = setting.prepared(setting.claim("half", "vir10-3c-16g.npu.huawei.com", None)).await;
        assert_eq!(device, "npu-0-vir10-3c-16g-0", "{release:?}");
        let (whole, device) = setting.prepared(setting.claim("whole", DRIVER, None)).await;
        assert_eq!(device, "npu-1", "a card of which a part is taken is not given whole");
        let mut quarters = Vec::new();
        for name in ["a", "b"] {
            quarters.push(setting.prepared(setting.claim(name, "vir05-1c-8g.npu.huawei.com", None)).await);
        }
        assert!(quarters.iter().all(|(_, device)| device.starts_with("npu-0-vir05-1c-8g-")), "{quarters:?}");
        let mut vnpus = setting.vnpus();
        vnpus.sort();
        let expected = ["vir05_1c_8g", "vir05_1c_8g", "vir10_3c_16g"].map(|template| (0, template.to_owned()));
        assert_eq!(vnpus, expected, "{release:?}");
        for (claim, _) in quarters.iter().chain([&(half, String::new()), &(whole, String::new())]) {
            setting.release(claim).await;
        }
        setting.assert_nothing_is_left();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hangup_changes_the_static_layout_but_not_under_a_claim() {
    let flags = ["--slicing-model=static", "--slicing-layout"];
    let (mut node, text) =
        (Node::new(Profile::Ascend910B4).unwrap(), |layout| format!("slicing.layout = \"{layout}\"\n"));
    let config = node.dir().join("npu-dra.toml");
    fs::write(&config, text("npu-0=vir10_3c_16g+vir10_3c_16g")).unwrap();
    let api = node.start_api(Release::V1_36).await.unwrap();
    for class in shipped("deviceclass-templates.yaml") {
        api.create(GROUP, "deviceclasses", "", &class).unwrap();
    }
    let kubelet = node.start_kubelet().unwrap();
    let command = node.daemon_with(BINARY, &[&["--enable-hard-vnpu=true"], &flags[..]].concat());
    let daemon = node.start_registered(command, &kubelet).await.unwrap();
    let setting = Setting { daemon, kubelet, api, node };
    let reload = |layout: &'static str| {
        fs::write(&config, text(layout)).unwrap();
        setting.daemon.signal(Signal::SIGHUP).unwrap();
    };
    let offers = |wanted: usize| {
        move |state: State<'_>| {
            let slices = state.slices(DRIVER, NODE);
            let parts = slices.iter().flat_map(|slice| slice["spec"]["devices"].as_array().into_iter().flatten());
            parts.filter(|device| device["attributes"]["type"]["string"] == "vnpu").count() == wanted
        }
    };
    setting.api.wait_until(offers(2), SOON).await.unwrap();
    reload("npu-0=vir05_1c_8g+vir05_1c_8g+vir05_1c_8g");
    setting.api.wait_until(offers(3), SOON).await.unwrap();

    let (claim, _) = setting.prepared(setting.claim("part", "vir05-1c-8g.npu.huawei.com", None)).await;
    reload("npu-0=vir10_3c_16g");
    setting.daemon.wait_log("layout is pending until claims on npu-0", SOON).await.unwrap();
    assert_eq!(setting.published("vnpu").await.len(), 3, "a layout changed under a claim");
    setting.release(&claim).await;
    setting.api.wait_until(offers(1), SOON).await.unwrap();
    setting.assert_nothing_is_left();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_layout_that_a_card_cannot_have_closes_it_and_one_that_no_card_can_have_is_refused() {
    let mut node = Node::new(Profile::Ascend910B4).unwrap();
    let config = node.dir().join("npu-dra.toml");
    let layout = |layout: &str| {
        fs::write(&config, format!("slicing.model = \"static\"\n\nslicing.layout = \"{layout}\"\n")).unwrap();
    };
    layout("npu-0=vir10_3c_16g; npu-1=vir10_3c_16g+vir10_3c_16g+vir10_3c_16g; npu-2=vir12_3c_32g; npu-77=vir05_1c_8g");
    let api = node.start_api(Release::V1_36).await.unwrap();
    for class in [shipped("deviceclass.yaml"), shipped("deviceclass-templates.yaml")].concat() {
        api.create(GROUP, "deviceclasses", "", &class).unwrap();
    }
    let kubelet = node.start_kubelet().unwrap();
    let command = node.daemon_with(BINARY, &["--enable-hard-vnpu=true"]);
    let daemon = node.start_registered(command, &kubelet).await.unwrap();
    let setting = Setting { daemon, kubelet, api, node };
    assert_eq!(setting.published("vnpu").await, ["npu-0-vir10-3c-16g-0"]);
    let slices = setting.api.slices(DRIVER, NODE);
    let devices = slices.iter().flat_map(|slice| slice["spec"]["devices"].as_array().into_iter().flatten());
    let closed = devices.filter(|device| device["taints"][0]["key"] == "npu.huawei.com/closed");
    assert_eq!(closed.map(|device| device["name"].clone()).collect::<Vec<_>>(), ["npu-1", "npu-2"]);
    for line in [
        "npu-1 takes no new claims: slicing.layout asks for 3 x vir10_3c_16g, which is more than the chip has",
        "npu-2 takes no new claims: slicing.layout asks for vir12_3c_32g, which the chip does not have; it has vir05",
        "npu-77 takes no new claims: slicing.layout names it, but no such card is there",
    ] {
        setting.daemon.wait_log(line, SOON).await.unwrap();
    }
    let (part, _) = setting.prepared(setting.claim("part", "vir10-3c-16g.npu.huawei.com", None)).await;
    let refused = setting.claim("more", "vir10-3c-16g.npu.huawei.com", None).unwrap_err();
    assert!(refused.contains("no free device"), "{refused}");
    let (whole, device) = setting.prepared(setting.claim("whole", DRIVER, None)).await;
    assert_eq!(device, "npu-3", "a closed card was given whole");
    setting.release(&part).await;
    setting.release(&whole).await;

    layout("npu-0=vir99");
    setting.daemon.signal(Signal::SIGHUP).unwrap();
    setting.daemon.wait_log("npu-dra.toml:3: slicing.layout = \"npu-0=vir99\" is not valid", SOON).await.unwrap();
    assert_eq!(setting.published("vnpu").await, ["npu-0-vir10-3c-16g-0"], "the settings before it stay in force");
    layout("npu-0=vir10_3c_16g; npu-1=vir10_3c_16g+vir10_3c_16g");
    setting.daemon.signal(Signal::SIGHUP).unwrap();
    let open = |state: State<'_>| {
        let slices = state.slices(DRIVER, NODE);
        let devices = slices.iter().flat_map(|slice| slice["spec"]["devices"].as_array().into_iter().flatten());
        devices.clone().count() == 9 && devices.into_iter().all(|device| device["taints"][0].is_null())
    };
    setting.api.wait_until(open, SOON).await.unwrap();
    assert_eq!(setting.daemon.log().matches("npu-1 takes no new claims").count(), 1, "said once");
    setting.assert_nothing_is_left();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_static_layout_needs_no_gate() {
    let layout = "--slicing-layout=npu-2=vir10_3c_16g+vir05_1c_8g";
    let setting = Setting::new(Release::V1_34, &[], &[layout]).await;
    assert_eq!(setting.published("npu").await.len(), 7);
    let (part, device) = setting.prepared(setting.claim("part", "vir10-3c-16g.npu.huawei.com", None)).await;
    assert_eq!((device.as_str(), setting.vnpus()), ("npu-2-vir10-3c-16g-0", vec![(2, "vir10_3c_16g".to_owned())]));
    let none = setting.claim("more", "vir10-3c-16g.npu.huawei.com", None).unwrap_err();
    assert!(none.contains("no free device"), "{none}");
    let (whole, device) = setting.prepared(setting.claim("whole", DRIVER, None)).await;
    assert_eq!(device, "npu-0");
    setting.release(&part).await;
    setting.release(&whole).await;
    setting.assert_nothing_is_left();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_share_that_cannot_be_cut_is_an_error_and_never_a_whole_card() {
    let setting = Setting::new(Release::V1_36, &[], &[]).await;
    setting.published("npu").await;
    for (name, memory) in [("zero", "0"), ("less", "-5"), ("milli", "500m"), ("fraction", "10000.5")] {
        let (claim, _) = setting.claim(name, DRIVER, Some(memory)).unwrap();
        let refused = setting.prepare(&claim).await.unwrap_err();
        assert!(refused.contains("10000Mi"), "{memory}: {refused}");
        setting.release(&claim).await;
    }
    for (name, memory) in [("more", "33Gi"), ("huge", "1e30")] {
        let refused = setting.claim(name, DRIVER, Some(memory)).unwrap_err();
        assert!(refused.contains("none with room"), "{memory}: {refused}");
    }
    setting.assert_nothing_is_left();
}

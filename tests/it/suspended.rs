//! The real daemon while an operator has taken the vendor's software from it: `npuctl backend suspend|resume`.

use std::{fs, path::Path, time::Duration};

use dcmi::world::{Action, Fault as Planted, Profile};
use npu_proto::admin::{self as proto, admin_client::AdminClient};
use serde_json::{Value, json};
use testkit::{
    api::{ApiServer, DeviceResult, Release},
    kubelet::{self, Kubelet, client::Claim},
    node::{DRIVER, Daemon, NODE, Node, POOL, SOON, allocated_claim, until},
    stuck::Stuck,
};
use tonic::transport::{Channel, Endpoint};

const BINARY: &str = env!("CARGO_BIN_EXE_npu-dra");
const REASON: &str = "driver 26.0";

struct Setting {
    daemon: Option<Daemon>,
    kubelet: Kubelet,
    api: ApiServer,
    node: Node,
}

impl Setting {
    async fn new() -> Self {
        let mut node = Node::new(Profile::Ascend910B4).unwrap();
        let api = node.start_api(Release::V1_36).await.unwrap();
        let kubelet = node.start_kubelet().unwrap();
        let mut setting = Self { daemon: None, kubelet, api, node };
        setting.start().await;
        setting.wait("all cards", |devices| devices.len() == 8 && devices.iter().all(is_open)).await;
        setting
    }

    async fn start(&mut self) {
        let command = self.node.daemon_with(BINARY, &["--enable-hard-vnpu=true", "--health-quiet=1s"]);
        self.daemon = Some(self.node.start_registered(command, &self.kubelet).await.unwrap());
    }

    fn daemon(&mut self) -> &mut Daemon {
        self.daemon.as_mut().unwrap()
    }

    fn log(&self) -> String {
        self.daemon.as_ref().map(Daemon::log).unwrap_or_default()
    }

    /// The published devices, placeholders left out.
    fn devices(&self) -> Vec<Value> {
        let slices = self.api.slices(DRIVER, NODE);
        let devices = slices.iter().filter_map(|slice| slice["spec"]["devices"].as_array()).flatten();
        devices.filter(|device| device["attributes"]["type"]["string"] == "npu").cloned().collect()
    }

    async fn wait(&self, what: &str, condition: impl Fn(&[Value]) -> bool) {
        let found = until(SOON, || condition(&self.devices())).await;
        assert!(found, "{what}: {:?}\n{}", self.devices(), self.log());
    }

    async fn admin(&self) -> AdminClient<Channel> {
        let endpoint = Endpoint::try_from(format!("unix:{}", self.node.admin_socket().display())).unwrap();
        AdminClient::new(endpoint.connect().await.unwrap())
    }

    async fn suspend(&self) -> Result<(), tonic::Status> {
        let request = proto::SuspendBackendRequest { reason: REASON.to_owned() };
        self.admin().await.suspend_backend(request).await.map(drop)
    }

    async fn resume(&self) {
        self.admin().await.resume_backend(proto::ResumeBackendRequest {}).await.unwrap();
    }

    async fn status(&self) -> proto::Backend {
        self.admin().await.status(proto::StatusRequest {}).await.unwrap().into_inner().backend.unwrap()
    }

    fn part(&self, name: &str, device: &str) -> Claim {
        let exactly = json!({"deviceClassName": DRIVER, "allocationMode": "ExactCount", "count": 1,
            "capacity": {"requests": {"memCapacity": "8Gi"}}});
        let result = DeviceResult::new("npu", DRIVER, POOL, device).share("share").consumes("memCapacity", "8Gi");
        let builder = self.api.claim_builder("default", name);
        let stored = builder.raw_request(json!({"name": "npu", "exactly": exactly})).result(result).node(NODE).store();
        kubelet::claim("default", name, stored["metadata"]["uid"].as_str().unwrap())
    }

    fn whole(&self, name: &str, device: &str) -> Claim {
        allocated_claim(&self.api, name, &[device]).unwrap()
    }

    async fn prepare(&self, claim: &Claim) -> Result<Vec<String>, String> {
        let devices = self.kubelet.client(DRIVER).unwrap().prepare_one(claim).await?;
        Ok(devices.into_iter().flat_map(|device| device.cdi_device_ids).collect())
    }

    async fn unprepare(&self, claim: &Claim) -> Result<(), String> {
        self.kubelet.client(DRIVER).unwrap().unprepare_one(claim).await
    }

    fn calls(&self) -> usize {
        self.node.world().calls().unwrap().len()
    }
}

fn is_open(device: &Value) -> bool {
    device["taints"].as_array().is_none_or(Vec::is_empty)
}

/// Closed by a taint that lets what runs go on.
fn is_closed(device: &Value) -> bool {
    let taints = device["taints"].as_array();
    taints.is_some_and(|taints| !taints.is_empty() && taints.iter().all(|taint| taint["effect"] == "NoSchedule"))
}

/// A device without its taints and the driver's version: what must not change.
fn shape(device: &Value) -> Value {
    let mut device = device.clone();
    device.as_object_mut().unwrap().remove("taints");
    device["attributes"].as_object_mut().unwrap().remove("driverVersion");
    device
}

/// True while a process has the vendor library loaded or a device node open.
fn holds_hardware(pid: u32) -> bool {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let open = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let mut targets = open.filter_map(|fd| fs::read_link(fd.path()).ok());
    maps.contains("libdcmi.so") || targets.any(|target| target.to_string_lossy().contains("davinci"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_suspended_daemon_lets_go_of_the_driver_keeps_what_is_prepared_and_reads_the_new_driver_after() {
    let mut setting = Setting::new().await;
    let (whole, part) = (setting.whole("whole", "npu-0"), setting.part("part", "npu-1"));
    let ids = setting.prepare(&whole).await.unwrap();
    setting.prepare(&part).await.unwrap();
    let (before, records) = (setting.devices(), setting.node.records().unwrap());
    let worker = setting.node.world().calls().unwrap().list.last().unwrap().pid;

    setting.suspend().await.unwrap();
    assert!(!Path::new(&format!("/proc/{worker}")).exists(), "the library's process is gone");
    let daemon = setting.daemon().pid();
    assert!(!holds_hardware(daemon));
    setting.wait("all cards are closed", |devices| devices.len() == 8 && devices.iter().all(is_closed)).await;
    assert_eq!(setting.devices().iter().map(shape).collect::<Vec<_>>(), before.iter().map(shape).collect::<Vec<_>>());
    let status = setting.status().await;
    assert_eq!(status.state, "suspended");
    assert!(status.detail.contains(REASON) && status.detail.contains("npuctl backend resume"), "{}", status.detail);
    let calls = setting.calls();

    assert_eq!(setting.prepare(&whole).await.unwrap(), ids, "what is prepared is answered as before");
    // The driver is replaced: chips go and come, and nobody minds.
    for id in 0..8 {
        setting.node.world().drop_chip(id).unwrap();
    }
    setting.node.sync_host().unwrap();
    let refused = setting.prepare(&setting.whole("new", "npu-2")).await.unwrap_err();
    assert!(refused.contains(REASON), "{refused}");
    let refused = setting.prepare(&setting.part("new-part", "npu-3")).await.unwrap_err();
    assert!(refused.contains("suspend"), "{refused}");
    let refused = setting.unprepare(&part).await.unwrap_err();
    assert!(refused.contains("suspended"), "{refused}");
    assert_eq!(setting.node.records().unwrap(), records);

    // Also over a crash and over a restart of the daemon, and if kubelet wipes the slices.
    setting.daemon().kill().unwrap();
    setting.start().await;
    setting.api.kubelet_wipe(NODE);
    setting.wait("all cards are back and closed", |devices| devices.len() == 8 && devices.iter().all(is_closed)).await;
    assert_eq!(setting.devices().iter().map(shape).collect::<Vec<_>>(), before.iter().map(shape).collect::<Vec<_>>());
    assert_eq!(setting.status().await.state, "suspended");
    assert_eq!(setting.node.records().unwrap(), records);
    setting.unprepare(&whole).await.unwrap();
    assert_eq!(setting.calls(), calls, "no vendor call was made");

    for id in 0..8 {
        setting.node.world().return_chip(id).unwrap();
    }
    setting.node.world().edit(|data| "26.0.1".clone_into(&mut data.driver_version)).unwrap();
    setting.node.sync_host().unwrap();
    setting.resume().await;
    let is_new = |device: &Value| is_open(device) && device["attributes"]["driverVersion"]["string"] == "26.0.1";
    setting.wait("all cards are open", |devices| devices.len() == 8 && devices.iter().all(is_new)).await;
    assert_eq!(setting.devices().iter().map(shape).collect::<Vec<_>>(), before.iter().map(shape).collect::<Vec<_>>());
    assert_eq!(setting.status().await.state, "ready");
    setting.unprepare(&part).await.unwrap();
    assert_eq!((setting.node.records().unwrap().len(), setting.node.world().vnpus().unwrap().len()), (0, 0));
    setting.daemon().kill().unwrap();
    setting.start().await;
    setting.wait("still open after a restart", |devices| devices.len() == 8 && devices.iter().all(is_open)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_that_does_not_end_is_said_and_the_node_is_suspended_all_the_same() {
    let mut setting = Setting::new().await;
    let worker = setting.node.world().calls().unwrap().list.last().unwrap().pid;
    let stuck = Stuck::hold(worker).unwrap();
    let refused = setting.suspend().await.unwrap_err();
    assert!(refused.message().contains(&worker.to_string()), "{refused}");
    setting.wait("all cards are closed", |devices| devices.iter().all(is_closed)).await;
    assert_eq!(setting.status().await.state, "hung");
    drop(stuck);
    let end = std::time::Instant::now() + SOON;
    while setting.status().await.state != "suspended" {
        assert!(std::time::Instant::now() < end, "{}", setting.log());
        tokio::time::sleep(Duration::from_millis(20)).await; // waits: for the process to be reaped
    }
    let calls = setting.calls();
    setting.suspend().await.unwrap();
    setting.resume().await;
    setting.wait("all cards are open", |devices| devices.len() == 8 && devices.iter().all(is_open)).await;
    assert!(until(SOON, || setting.calls() > calls).await, "{}", setting.log());
    assert_eq!(setting.daemon().stop().await.unwrap().0, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_driver_that_is_not_ready_at_once_keeps_the_slices_and_is_waited_for() {
    let mut setting = Setting::new().await;
    setting.suspend().await.unwrap();
    setting.node.world().faults().set([Planted::new("dcmi_init", Action::Return(-8005)).times(3)]).unwrap();
    setting.resume().await;
    setting.wait("all cards are open", |devices| devices.len() == 8 && devices.iter().all(is_open)).await;
    let end = std::time::Instant::now() + SOON;
    while setting.status().await.state != "ready" {
        assert!(std::time::Instant::now() < end, "{}", setting.log());
        tokio::time::sleep(Duration::from_millis(20)).await; // waits: for the library to come up
    }
    assert!(setting.node.world().calls().unwrap().count("dcmi_init") >= 4);
    assert_eq!(setting.daemon().stop().await.unwrap().0, 0);
}

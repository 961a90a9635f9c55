//! Kubelet's sockets against the kubelet stand-in, with an engine of a few lines behind them.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures::FutureExt as _;
use futures::future::BoxFuture;
use npu_dra::domain::claim::{ClaimRef, PreparedDevice};
use npu_dra::domain::health::{Condition, DeviceHealth};
use npu_dra::domain::names::{DriverName, InstanceId};
use npu_dra::domain::refusal::Refusal;
use npu_dra::kubelet::{Bound, Claims, Prepared, SUPPORTED_VERSIONS, Serving, Settings, SocketError, Status, bind};
use npu_proto::registration::RegistrationStatus;
use npu_proto::registration::registration_client::RegistrationClient;
use prometheus_client::registry::Registry;
use testkit::kubelet::client::{Claim, DraClient, DraVersion, HealthStatus, HealthVersion, channel, claim};
use testkit::kubelet::{Kubelet, What, raw};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

const DRIVER: &str = "npu.huawei.com";
const SOON: Duration = Duration::from_secs(10);

/// An engine that does what a claim's name says.
#[derive(Debug)]
pub(crate) struct Puppet {
    /// What was asked and what ended, in order.
    log: watch::Sender<Vec<String>>,
    /// A claim called `slow` waits for this.
    gate: watch::Sender<bool>,
    health: watch::Sender<Arc<Vec<DeviceHealth>>>,
    calls: Mutex<u64>,
}

impl Puppet {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            log: watch::Sender::default(),
            gate: watch::Sender::new(false),
            health: watch::Sender::new(Arc::new(vec![health(Condition::Ok)])),
            calls: Mutex::new(0),
        })
    }

    async fn wait_log(&self, line: &str) {
        let mut log = self.log.subscribe();
        let seen = tokio::time::timeout(SOON, log.wait_for(|log| log.iter().any(|entry| entry == line))).await.is_ok();
        assert!(seen, "{line:?} did not come: {:?}", self.log());
    }

    fn log(&self) -> Vec<String> {
        self.log.borrow().clone()
    }

    async fn act(
        log: watch::Sender<Vec<String>>,
        gate: watch::Sender<bool>,
        what: String,
        claim: ClaimRef,
    ) -> Result<(), Refusal> {
        let note = |line| log.send_modify(|log| log.push(line));
        note(format!("{what} {}", claim.name));
        match claim.name.as_str() {
            "bad" => return Err(Refusal::NotAllocated(claim)),
            "panic" => panic!("the engine tripped"),
            "slow" => {
                gate.subscribe().wait_for(|open| *open).await.unwrap();
            }
            _ => {}
        }
        note(format!("{what} {} done", claim.name));
        Ok(())
    }
}

impl Claims for Puppet {
    type Received = u64;

    fn received(&self) -> u64 {
        let mut calls = self.calls.lock().unwrap();
        *calls += 1;
        *calls
    }

    fn prepare(&self, received: u64, claim: ClaimRef) -> BoxFuture<'static, Prepared> {
        let what = format!("prepare {received}");
        let act = Self::act(self.log.clone(), self.gate.clone(), what, claim.clone());
        async move {
            act.await?;
            Ok(vec![PreparedDevice {
                request_names: vec!["npu".into()],
                pool: "node/npu".into(),
                device: "npu-0".into(),
                cdi_device_ids: vec![format!("{DRIVER}/npu={}_x", claim.uid)],
                share_id: Some("share".into()),
            }])
        }
        .boxed()
    }

    fn unprepare(&self, received: u64, claim: ClaimRef) -> BoxFuture<'static, Result<(), Refusal>> {
        Self::act(self.log.clone(), self.gate.clone(), format!("unprepare {received}"), claim).boxed()
    }

    fn health(&self) -> watch::Receiver<Arc<Vec<DeviceHealth>>> {
        self.health.subscribe()
    }
}

fn health(condition: Condition) -> DeviceHealth {
    DeviceHealth {
        pool: "node/npu".into(),
        device: "npu-0".into(),
        condition,
        since: jiff::Timestamp::from_second(1_700_000_000).unwrap(),
        message: if condition == Condition::Ok { String::new() } else { format!("health {condition}") },
    }
}

/// Kubelet's directories in a temporary place.
pub(crate) struct Directories {
    root: tempfile::TempDir,
}

impl Directories {
    pub(crate) fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("plugins_registry")).unwrap();
        Self { root }
    }

    fn registrar(&self) -> PathBuf {
        self.root.path().join("plugins_registry")
    }

    fn plugins(&self) -> PathBuf {
        self.root.path().join("plugins")
    }

    fn settings(&self) -> Settings {
        Settings::new(DriverName::new(DRIVER).unwrap(), self.registrar(), self.plugins())
    }
}

/// A driver that serves until it is stopped.
pub(crate) struct Driver {
    pub(crate) status: Status,
    puppet: Arc<Puppet>,
    shutdown: CancellationToken,
    serving: Serving,
}

impl Driver {
    pub(crate) fn start(directories: &Directories, registry: &mut Registry) -> Self {
        Self::serve(bind(directories.settings(), registry).unwrap())
    }

    fn start_with(settings: Settings) -> Result<Self, SocketError> {
        bind(settings, &mut Registry::default()).map(Self::serve)
    }

    fn serve(bound: Bound) -> Self {
        let (puppet, shutdown) = (Puppet::new(), CancellationToken::new());
        let serving = bound.serve(Arc::clone(&puppet), shutdown.clone()).unwrap();
        Self { status: serving.status(), puppet, shutdown, serving }
    }

    pub(crate) async fn stop(self) {
        self.shutdown.cancel();
        tokio::time::timeout(SOON, self.serving.stopped()).await.unwrap().unwrap();
    }

    pub(crate) async fn client(&self, version: DraVersion) -> DraClient {
        DraClient::connect(self.status.sockets().endpoint(), version).await.unwrap()
    }
}

fn claims(names: &[&str]) -> Vec<Claim> {
    names.iter().map(|name| claim("ns", name, &format!("uid-{name}"))).collect()
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[tokio::test]
async fn the_driver_registers_with_the_sockets_of_the_design_and_goes_without_a_trace() {
    let directories = Directories::new();
    let kubelet = Kubelet::start(&directories.registrar()).unwrap();
    let driver = Driver::start(&directories, &mut Registry::default());
    let plugin = kubelet.wait_registered(DRIVER, SOON).await.unwrap();
    assert_eq!(plugin.socket, directories.registrar().join("npu.huawei.com@reg.sock"));
    assert_eq!(plugin.endpoint, directories.plugins().join("npu.huawei.com/dra@npu.sock"));
    assert_eq!(plugin.supported_versions, SUPPORTED_VERSIONS);
    assert_eq!(plugin.client.version(), DraVersion::V1);
    for socket in [&plugin.socket, &plugin.endpoint] {
        assert_eq!(std::fs::metadata(socket).unwrap().permissions().mode() & 0o7777, 0o600);
    }
    assert!(driver.status.registration().borrow().is_registered());
    assert!(driver.status.last_call().is_some());

    driver.stop().await;
    kubelet.wait_deregistered(DRIVER, SOON).await.unwrap();
    assert!(names(&directories.registrar()).is_empty());
    assert!(names(&directories.plugins().join(DRIVER)).is_empty());
}

/// Kubelet dials as soon as the name appears, so everything behind it must be there.
#[tokio::test]
async fn kubelet_never_has_to_try_a_second_time() {
    for _ in 0..20 {
        let directories = Directories::new();
        let kubelet = Kubelet::start(&directories.registrar()).unwrap();
        let driver = Driver::start(&directories, &mut Registry::default());
        kubelet.wait_registered(DRIVER, SOON).await.unwrap();
        let refused = kubelet.log().into_iter().find(|entry| matches!(entry.what, What::Refused(_)));
        assert!(refused.is_none(), "{refused:?}");
        driver.stop().await;
    }
}

#[tokio::test]
async fn kubelets_authorities_are_answered_and_a_bare_path_is_not() {
    let directories = Directories::new();
    let driver = Driver::start(&directories, &mut Registry::default());
    let socket = driver.status.sockets().registration();
    let path = socket.to_str().unwrap();
    for good in [raw::authority_of(path), "localhost".into()] {
        let answer = raw::get_info_with(socket, &good, SOON).await.unwrap();
        let raw::Answer::Response { status: 200, info: Some(info) } = answer else { panic!("{good}: {answer:?}") };
        assert_eq!(info.name, DRIVER);
    }
    for bad in [path.to_owned(), raw::authority_of(&path.replace('@', "-"))] {
        assert_eq!(raw::get_info_with(socket, &bad, SOON).await.unwrap(), raw::Answer::Reset(1), "{bad}");
    }
    // Whatever an empty authority gets, the server must live on.
    let _ = raw::get_info_with(socket, "", SOON).await.unwrap();
    assert!(matches!(raw::get_info(socket, SOON).await.unwrap(), raw::Answer::Response { status: 200, .. }));
    driver.stop().await;
}

#[tokio::test]
async fn a_kubelet_that_restarts_finds_the_driver_and_each_registration_is_counted() {
    let directories = Directories::new();
    let driver = Driver::start(&directories, &mut Registry::default());
    let mut registration = driver.status.registration();
    let mut kubelet = Kubelet::start(&directories.registrar()).unwrap();
    kubelet.wait_registered(DRIVER, SOON).await.unwrap();
    kubelet.restart().unwrap();
    kubelet.wait_registered(DRIVER, SOON).await.unwrap();
    tokio::time::timeout(SOON, registration.wait_for(|state| state.times == 2)).await.unwrap().unwrap();
    driver.stop().await;
}

#[tokio::test]
async fn a_refusal_of_kubelet_is_kept_and_answered_with_an_error() {
    let directories = Directories::new();
    let driver = Driver::start(&directories, &mut Registry::default());
    let channel = channel(driver.status.sockets().registration(), SOON).await.unwrap();
    let refused = RegistrationStatus { plugin_registered: false, error: "no room".into() };
    let answer = RegistrationClient::new(channel).notify_registration_status(refused).await;
    assert!(answer.unwrap_err().message().contains("no room"));
    let state = driver.status.registration().borrow().clone();
    assert!(!state.is_registered());
    assert_eq!(state.verdict.unwrap().refused.as_deref(), Some("no room"));
    driver.stop().await;
}

#[tokio::test]
async fn both_versions_give_the_same_answer_except_for_the_share() {
    let directories = Directories::new();
    let driver = Driver::start(&directories, &mut Registry::default());
    let claim = claim("ns", "good", "uid-good");
    let v1 = driver.client(DraVersion::V1).await;
    let mut devices = v1.prepare_one(&claim).await.unwrap();
    assert_eq!(devices[0].share_id.as_deref(), Some("share"));
    assert_eq!(devices[0].cdi_device_ids, ["npu.huawei.com/npu=uid-good_x"]);
    let v1beta1 = driver.client(DraVersion::V1Beta1).await;
    let older = v1beta1.prepare_one(&claim).await.unwrap();
    devices[0].share_id = None;
    assert_eq!(older, devices);
    v1.unprepare_one(&claim).await.unwrap();
    v1beta1.unprepare_one(&claim).await.unwrap();
    driver.stop().await;
}

#[tokio::test]
async fn every_claim_has_its_own_entry_and_its_own_error() {
    let directories = Directories::new();
    let driver = Driver::start(&directories, &mut Registry::default());
    let mut asked = claims(&["good", "bad", "panic", "other", "good"]);
    asked.push(claim("ns", "climber", "../../etc/passwd"));
    asked.push(claim("ns", "", "uid-nameless"));
    asked.push(claim("ns", "no-uid", ""));
    for version in [DraVersion::V1, DraVersion::V1Beta1] {
        let client = driver.client(version).await;
        let prepared = client.prepare(&asked).await.unwrap();
        assert_eq!(prepared.len(), 7);
        assert!(prepared["uid-good"].is_ok() && prepared["uid-other"].is_ok());
        assert!(prepared["uid-bad"].as_ref().unwrap_err().contains("ns/bad"));
        assert!(prepared["uid-panic"].as_ref().unwrap_err().contains("the engine tripped"));
        assert!(prepared["../../etc/passwd"].as_ref().unwrap_err().contains("claim UID"));
        assert!(prepared["uid-nameless"].is_err() && prepared[""].is_err());
        let released = client.unprepare(&asked).await.unwrap();
        assert_eq!(released.len(), 7);
        assert_eq!(released["uid-good"], Ok(()));
        assert!(released["uid-bad"].is_err() && released["uid-panic"].is_err());
    }
    // A UID that is named twice in one call is one claim.
    let times = driver.puppet.log().iter().filter(|line| *line == "prepare 1 good").count();
    assert_eq!(times, 1, "{:?}", driver.puppet.log());
    driver.stop().await;
}

#[tokio::test]
async fn a_call_without_claims_is_answered_without_the_engine() {
    let directories = Directories::new();
    let driver = Driver::start(&directories, &mut Registry::default());
    for version in [DraVersion::V1, DraVersion::V1Beta1] {
        let client = driver.client(version).await;
        assert!(client.prepare(&[]).await.unwrap().is_empty());
        assert!(client.unprepare(&[]).await.unwrap().is_empty());
    }
    assert!(driver.puppet.log().is_empty());
    assert_eq!(driver.status.last_call(), None, "a probe is not kubelet");
    driver.stop().await;
}

#[tokio::test]
async fn a_slow_claim_holds_up_no_other_call_and_goes_on_when_kubelet_gives_up() {
    let directories = Directories::new();
    let driver = Driver::start(&directories, &mut Registry::default());
    let client = driver.client(DraVersion::V1).await;
    let slow = claims(&["slow"]);
    let late = client.prepare_within(&slow, Duration::from_millis(200)).await.unwrap_err().to_string();
    assert!(late.contains("DeadlineExceeded") || late.contains("Cancelled"), "{late}");
    client.prepare_one(&claim("ns", "good", "uid-good")).await.unwrap();
    assert!(!driver.puppet.log().contains(&"prepare 1 slow done".to_owned()));
    driver.puppet.gate.send_replace(true);
    driver.puppet.wait_log("prepare 1 slow done").await;
    driver.stop().await;
}

#[tokio::test]
async fn health_comes_at_once_at_every_change_and_as_a_heartbeat_and_ends_at_stop() {
    let directories = Directories::new();
    let settings = Settings { heartbeat: Duration::from_millis(50), ..directories.settings() };
    let driver = Driver::start_with(settings).unwrap();
    let client = driver.client(DraVersion::V1).await;
    let mut streams = Vec::new();
    for version in [HealthVersion::V1, HealthVersion::V1Alpha1] {
        let mut stream = client.watch_health(version).await.unwrap();
        let first = stream.next(SOON).await.unwrap().unwrap();
        assert_eq!(first.len(), 1);
        assert_eq!(first[0].health(), HealthStatus::Healthy);
        assert_eq!(first[0].last_updated_time, 1_700_000_000);
        assert_eq!(first[0].health_check_timeout_seconds, 1);
        assert_eq!(first[0].device.as_ref().unwrap().device_name, "npu-0");
        // Nothing changes, yet the list comes again and again.
        for _ in 0..3 {
            assert_eq!(stream.next(SOON).await.unwrap().unwrap(), first);
        }
        streams.push(stream);
    }
    driver.puppet.health.send_replace(Arc::new(vec![health(Condition::Tainted)]));
    for stream in &mut streams {
        let bad = stream.wait_for(SOON, |list| list[0].health() == HealthStatus::Unhealthy).await.unwrap();
        assert_eq!(bad[0].message, "health tainted");
    }
    driver.puppet.health.send_replace(Arc::new(vec![health(Condition::Unknown)]));
    for stream in &mut streams {
        stream.wait_for(SOON, |list| list[0].health() == HealthStatus::Unknown).await.unwrap();
    }
    driver.stop().await;
    for stream in &mut streams {
        while stream.next(SOON).await.unwrap().is_some() {}
    }
}

#[tokio::test]
async fn the_first_health_list_waits_for_no_heartbeat_and_the_timeout_is_three_of_them() {
    let directories = Directories::new();
    let settings = Settings { heartbeat: SOON * 10, ..directories.settings() };
    let driver = Driver::start_with(settings).unwrap();
    let client = driver.client(DraVersion::V1).await;
    let mut stream = client.watch_health(HealthVersion::V1).await.unwrap();
    assert_eq!(stream.next(SOON).await.unwrap().unwrap()[0].health_check_timeout_seconds, 300);
    driver.stop().await;
}

#[tokio::test]
async fn at_stop_the_registration_goes_first_and_a_running_call_ends_well() {
    let directories = Directories::new();
    let settings = Settings { grace: SOON, ..directories.settings() };
    let driver = Driver::start_with(settings).unwrap();
    let kubelet = Kubelet::start(&directories.registrar()).unwrap();
    let client = kubelet.wait_registered(DRIVER, SOON).await.unwrap().client;
    let endpoint = driver.status.sockets().endpoint().to_owned();
    let call = tokio::spawn(async move { client.prepare_one(&claim("ns", "slow", "uid-slow")).await });
    driver.puppet.wait_log("prepare 1 slow").await;

    let puppet = Arc::clone(&driver.puppet);
    driver.shutdown.cancel();
    kubelet.wait_deregistered(DRIVER, SOON).await.unwrap();
    assert!(endpoint.exists(), "the DRA socket went before the running call had ended");
    assert!(!call.is_finished());
    puppet.gate.send_replace(true);
    assert_eq!(call.await.unwrap().unwrap().len(), 1);
    driver.stop().await;
    assert!(!endpoint.exists());
}

#[tokio::test]
async fn a_call_that_does_not_end_holds_up_the_stop_only_for_its_grace() {
    let directories = Directories::new();
    let settings = Settings { grace: Duration::from_millis(100), ..directories.settings() };
    let driver = Driver::start_with(settings).unwrap();
    let client = driver.client(DraVersion::V1).await;
    let call = tokio::spawn(async move { client.prepare_one(&claim("ns", "slow", "uid-slow")).await });
    driver.puppet.wait_log("prepare 1 slow").await;
    let start = Instant::now();
    let endpoint = driver.status.sockets().endpoint().to_owned();
    driver.stop().await;
    assert!(start.elapsed() < Duration::from_secs(5));
    assert!(!endpoint.exists());
    call.abort();
}

#[tokio::test]
async fn a_second_instance_needs_an_id_and_then_serves_beside_the_first() {
    let directories = Directories::new();
    let kubelet = Kubelet::start(&directories.registrar()).unwrap();
    let first = Driver::start(&directories, &mut Registry::default());
    kubelet.wait_registered(DRIVER, SOON).await.unwrap();
    let Err(error) = Driver::start_with(directories.settings()) else { panic!("two servers on one socket") };
    assert!(matches!(error, SocketError::InUse { .. }), "{error}");

    let instance = Some(InstanceId::new("b2").unwrap());
    let second = Driver::start_with(Settings { instance, ..directories.settings() }).unwrap();
    kubelet.wait_instances(DRIVER, 2, SOON).await.unwrap();
    let plugin = kubelet.plugin(DRIVER).unwrap();
    assert!(plugin.socket.ends_with("npu.huawei.com-b2@reg.sock"));
    assert!(plugin.endpoint.ends_with("npu.huawei.com/dra-b2@npu.sock"));
    first.stop().await;
    kubelet.wait_instances(DRIVER, 1, SOON).await.unwrap();
    kubelet.client(DRIVER).unwrap().prepare_one(&claim("ns", "good", "uid-good")).await.unwrap();
    second.stop().await;
}

#[tokio::test]
async fn what_a_killed_instance_left_is_in_nobodys_way() {
    let directories = Directories::new();
    let data = directories.plugins().join(DRIVER);
    std::fs::create_dir_all(&data).unwrap();
    let left = [
        directories.registrar().join("npu.huawei.com@reg.sock"),
        directories.registrar().join("npu.huawei.com-old@reg.sock"),
        data.join("dra@npu.sock"),
        data.join("dra-old@npu.sock"),
    ];
    for path in &left {
        drop(std::os::unix::net::UnixListener::bind(path).unwrap());
    }
    let kubelet = Kubelet::start(&directories.registrar()).unwrap();
    let driver = Driver::start(&directories, &mut Registry::default());
    kubelet.wait_registered(DRIVER, SOON).await.unwrap();
    assert_eq!(names(&directories.registrar()), ["npu.huawei.com@reg.sock"]);
    assert_eq!(names(&data), ["dra@npu.sock"]);
    driver.stop().await;
}

#[tokio::test]
async fn a_start_that_fails_leaves_nothing_behind() {
    let directories = Directories::new();
    let file = directories.registrar().join("npu.huawei.com@reg.sock");
    std::fs::write(&file, "").unwrap();
    let Err(error) = Driver::start_with(directories.settings()) else { panic!("a file was taken for a socket") };
    assert!(error.to_string().contains("is a regular file"), "{error}");
    assert!(names(&directories.plugins().join(DRIVER)).is_empty());
    std::fs::remove_file(&file).unwrap();

    // Somebody takes the name between bind and serve.
    let bound = bind(directories.settings(), &mut Registry::default()).unwrap();
    std::fs::write(&file, "").unwrap();
    let error = bound.serve(Puppet::new(), CancellationToken::new()).unwrap_err();
    assert!(matches!(error, SocketError::Listen { .. }), "{error}");
    assert_eq!(names(&directories.registrar()), ["npu.huawei.com@reg.sock"]);
    assert!(file.is_file());
    assert!(names(&directories.plugins().join(DRIVER)).is_empty());
}

/// Kubelet's client closes a connection that is idle for long, and comes back.
#[tokio::test]
async fn many_connections_that_come_and_go_are_all_served() {
    let directories = Directories::new();
    let driver = Driver::start(&directories, &mut Registry::default());
    for _ in 0..100 {
        let client = driver.client(DraVersion::V1).await;
        client.prepare_one(&claim("ns", "good", "uid-good")).await.unwrap();
    }
    driver.stop().await;
}

/// A node that is reset and joined again loses kubelet's directories under a running daemon.
#[tokio::test]
async fn sockets_that_vanish_are_made_anew_even_with_their_directories() {
    let directories = Directories::new();
    let settings = Settings { look: Duration::from_millis(20), ..directories.settings() };
    let driver = Driver::start_with(settings).unwrap();
    let kubelet = Kubelet::start(&directories.registrar()).unwrap();
    let plugin = kubelet.wait_registered(DRIVER, SOON).await.unwrap();
    let mut registration = driver.status.registration();
    for socket in [&plugin.socket, &plugin.endpoint] {
        let times = registration.borrow_and_update().times;
        std::fs::remove_file(socket).unwrap();
        let again = registration.wait_for(|state| state.times > times && state.is_registered());
        tokio::time::timeout(SOON, again).await.unwrap().unwrap();
    }
    drop(kubelet);

    std::fs::remove_dir_all(directories.registrar()).unwrap();
    std::fs::remove_dir_all(directories.plugins()).unwrap();
    let lost = registration.wait_for(|state| !state.is_registered());
    tokio::time::timeout(SOON, lost).await.unwrap().unwrap();
    std::fs::create_dir(directories.registrar()).unwrap();
    let kubelet = Kubelet::start(&directories.registrar()).unwrap();
    let client = kubelet.wait_registered(DRIVER, SOON).await.unwrap().client;
    client.prepare_one(&claim("ns", "good", "uid-good")).await.unwrap();
    driver.stop().await;
    assert!(names(&directories.registrar()).is_empty());
}

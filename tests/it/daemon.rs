//! The real daemon on a simulated node: started, asked, killed, stopped, and given bad input.

use std::{
    fs,
    path::Path,
    process::{Command, Output},
    time::Duration,
};

use dcmi::world::Profile;
use nix::sys::signal::Signal;
use testkit::{
    api::{ApiServer, Fault, How, Release, Who},
    kubelet::{Kubelet, client::Claim},
    node::{DRIVER, Daemon, NODE, Node, POOL, SOON, allocated_claim, until},
};

const BINARY: &str = env!("CARGO_BIN_EXE_npu-dra");

/// A node with API server and kubelet.
struct Setting {
    node: Node,
    api: ApiServer,
    kubelet: Kubelet,
}

impl Setting {
    async fn new() -> Self {
        let mut node = Node::new(Profile::Ascend910B4).unwrap();
        let api = node.start_api(Release::V1_34).await.unwrap();
        let kubelet = node.start_kubelet().unwrap();
        Self { node, api, kubelet }
    }

    async fn daemon(&self) -> Daemon {
        self.daemon_with(&[]).await
    }

    async fn daemon_with(&self, flags: &[&str]) -> Daemon {
        self.node.start_registered(self.node.daemon_with(BINARY, flags), &self.kubelet).await.unwrap()
    }

    async fn prepare(&self, claim: &Claim) -> Result<Vec<String>, String> {
        let devices = self.kubelet.client(DRIVER).unwrap().prepare_one(claim).await?;
        Ok(devices.into_iter().flat_map(|device| device.cdi_device_ids).collect())
    }

    async fn unprepare(&self, claim: &Claim) -> Result<(), String> {
        self.kubelet.client(DRIVER).unwrap().unprepare_one(claim).await
    }

    async fn wait_slices(&self, devices: usize) {
        let count = |state: testkit::api::State<'_>| {
            let slices = state.slices(DRIVER, NODE);
            slices.iter().map(|slice| slice["spec"]["devices"].as_array().map_or(0, Vec::len)).sum::<usize>() == devices
        };
        self.api.wait_until(count, SOON).await.unwrap();
    }

    fn kubelet_entries(&self) -> Vec<String> {
        let mut found = Vec::new();
        for dir in [self.node.registrar(), self.node.plugins().join(DRIVER)] {
            if let Ok(entries) = fs::read_dir(dir) {
                found.extend(entries.map(|entry| entry.unwrap().path().display().to_string()));
            }
        }
        found
    }
}

fn run(mut command: Command) -> Output {
    command.output().unwrap()
}

fn error_of(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_whole_npu_travels_from_chip_to_container_and_back() {
    let setting = Setting::new().await;
    let mut daemon = setting.daemon().await;
    setting.wait_slices(8).await;
    let slice = setting.api.slices(DRIVER, NODE).remove(0);
    assert_eq!(slice["spec"]["pool"]["name"], POOL);
    let first = &slice["spec"]["devices"][0];
    assert_eq!(first["name"], "npu-0");
    assert_eq!(first["attributes"]["chipName"]["string"], "910B4");
    assert_eq!(first["attributes"]["numaNode"]["int"], 6);
    assert_eq!(first["attributes"]["topologyGroup"]["string"], "ring-0");
    assert_eq!(first["capacity"]["memCapacity"]["value"], "32Gi");

    let claim = allocated_claim(&setting.api, "one", &["npu-3"]).unwrap();
    let ids = setting.prepare(&claim).await.unwrap();
    assert_eq!(ids.len(), 1);
    assert!(ids[0].starts_with(&format!("{DRIVER}/npu={}_", claim.uid)), "{ids:?}");
    let files = setting.node.cdi_files().unwrap();
    assert_eq!(files.len(), 1);
    let cdi = fs::read_to_string(setting.node.cdi().join(&files[0])).unwrap();
    assert!(cdi.contains("\"/dev/davinci3\"") && !cdi.contains("\"/dev/davinci0\""), "{cdi}");
    assert!(cdi.contains("ASCEND_VISIBLE_DEVICES=void"), "{cdi}");

    // A crash loses nothing: the claim is prepared, its card is its own, and it can be let go of.
    daemon.kill().unwrap();
    let daemon = setting.daemon().await;
    assert_eq!(setting.prepare(&claim).await.unwrap(), ids);
    let other = allocated_claim(&setting.api, "two", &["npu-3"]).unwrap();
    let refused = setting.prepare(&other).await.unwrap_err();
    assert!(refused.contains("default/one"), "{refused}");

    setting.unprepare(&claim).await.unwrap();
    assert_eq!(setting.node.cdi_files().unwrap(), [""; 0]);
    assert_eq!(setting.node.records().unwrap(), [""; 0]);
    setting.prepare(&other).await.unwrap();
    setting.unprepare(&other).await.unwrap();
    assert_eq!(setting.node.cdi_files().unwrap(), [""; 0]);
    drop(daemon);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_takes_less_than_two_seconds_and_leaves_no_socket() {
    let setting = Setting::new().await;
    let mut daemon = setting.daemon().await;
    let claim = allocated_claim(&setting.api, "one", &["npu-0"]).unwrap();
    setting.prepare(&claim).await.unwrap();
    let worker = worker_of(daemon.pid());
    assert!(worker.is_some(), "the vendor library runs in a child");
    let (code, time) = daemon.stop().await.unwrap();
    assert_eq!(code, 0, "{}", daemon.log());
    assert!(time < Duration::from_secs(2), "{time:?}\n{}", daemon.log());
    assert_eq!(setting.kubelet_entries(), [""; 0]);
    assert!(!setting.node.admin_socket().exists());
    assert_eq!(setting.node.records().unwrap().len(), 1, "what is prepared stays prepared");
    let gone = until(SOON, || worker.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists())).await;
    assert!(gone, "the worker ends with the daemon");
}

/// The process of the vendor library.
fn worker_of(daemon: u32) -> Option<u32> {
    let children = fs::read_to_string(format!("/proc/{daemon}/task/{daemon}/children")).ok()?;
    let own = fs::read_dir(format!("/proc/{daemon}/task")).ok()?.flatten();
    let all: Vec<_> = own
        .filter_map(|task| fs::read_to_string(task.path().join("children")).ok())
        .chain([children])
        .flat_map(|text| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
        .collect();
    all.first()?.parse().ok()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_does_not_wait_for_a_library_that_hangs() {
    let setting = Setting::new().await;
    setting.node.world().faults().plant(dcmi::world::Fault::init_hangs()).unwrap();
    let mut daemon = setting.daemon().await;
    let claim = allocated_claim(&setting.api, "one", &["npu-0"]).unwrap();
    let client = setting.kubelet.client(DRIVER).unwrap();
    let waiting = tokio::spawn(async move { client.prepare_one(&claim).await });
    let (code, time) = daemon.stop().await.unwrap();
    assert_eq!(code, 0);
    assert!(waiting.await.unwrap().is_err(), "kubelet tries again");
    assert_eq!(setting.node.records().unwrap(), [""; 0]);
    assert!(time < Duration::from_secs(2), "{time:?}\n{}", daemon.log());
    assert_eq!(setting.kubelet_entries(), [""; 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_api_server_that_fails_for_ever_stops_neither_start_nor_prepared_claims_nor_unprepare() {
    let setting = Setting::new().await;
    let mut daemon = setting.daemon().await;
    let claim = allocated_claim(&setting.api, "one", &["npu-1"]).unwrap();
    let ids = setting.prepare(&claim).await.unwrap();
    daemon.kill().unwrap();
    setting.api.inject(Fault::status(500));
    let daemon = setting.daemon().await;
    let file = setting.node.cdi_files().unwrap();
    assert_eq!(file.len(), 1, "the container can still start: {ids:?}");
    let refused = setting.prepare(&claim).await.unwrap_err();
    assert!(refused.contains("500") || refused.contains("API server"), "{refused}");
    assert_eq!(setting.node.cdi_files().unwrap(), file, "a failed replay takes nothing away");
    setting.unprepare(&claim).await.unwrap();
    assert_eq!(setting.node.cdi_files().unwrap(), [""; 0]);
    assert_eq!(setting.node.records().unwrap(), [""; 0]);
    drop(daemon);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_credentials_stop_neither_start_nor_unprepare_and_say_what_is_wrong() {
    for (how, refusal, logged) in [
        (None, "no.kubeconfig", "no.kubeconfig cannot be read"),
        (Some(How::ExpiredCertificate), "not accepted", "ended 2021-01-01T00:00:00Z; it must be renewed"),
        (Some(How::WrongCa), "certificate", "certificate"),
        (Some(How::StrangerCertificate), "not accepted", "401"),
    ] {
        let mut node = Node::new(Profile::Ascend910B4).unwrap();
        let api = ApiServer::start(Release::V1_34).await.unwrap();
        api.add_node(NODE);
        if let Some(how) = how {
            let file = api.kubeconfig(&node.dir().join("kubeconfig"), &Who::Node(NODE.to_owned()), how).unwrap();
            node.use_kubeconfig(file.path);
        }
        let kubelet = node.start_kubelet().unwrap();
        let mut daemon = node.start_registered(node.daemon(BINARY), &kubelet).await.unwrap();
        let claim = allocated_claim(&api, "one", &["npu-0"]).unwrap();
        let client = kubelet.client(DRIVER).unwrap();
        let refused = client.prepare_one(&claim).await.unwrap_err();
        assert!(refused.to_lowercase().contains(refusal), "{how:?}: {refused}");
        daemon.wait_log(logged, SOON).await.unwrap();
        client.unprepare_one(&claim).await.unwrap();
        assert_eq!(daemon.stop().await.unwrap().0, 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_profile_gpu_offers_example_devices_on_the_same_trips() {
    let setting = Setting::new().await;
    let flags = ["--device-profile=gpu", "--backend", "--dcmi-library", "--trust-library", "--example-count=3"];
    let daemon = setting.daemon_with(&flags).await;
    setting.wait_slices(3).await;
    let claim = allocated_claim(&setting.api, "one", &["gpu-1"]).unwrap();
    let ids = setting.prepare(&claim).await.unwrap();
    assert_eq!(ids.len(), 1);
    let files = setting.node.cdi_files().unwrap();
    let cdi = fs::read_to_string(setting.node.cdi().join(&files[0])).unwrap();
    assert!(!cdi.contains("davinci"), "there is no hardware behind it: {cdi}");
    setting.unprepare(&claim).await.unwrap();
    assert_eq!(setting.node.cdi_files().unwrap(), [""; 0]);
    drop(daemon);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_instance_is_refused_and_names_the_first() {
    let setting = Setting::new().await;
    let daemon = setting.daemon().await;
    let output = run(setting.node.daemon(BINARY));
    assert_eq!(output.status.code(), Some(3));
    assert!(error_of(&output).contains(&format!("process {}", daemon.pid())), "{}", error_of(&output));
    let claim = allocated_claim(&setting.api, "one", &["npu-0"]).unwrap();
    setting.prepare(&claim).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_drivers_with_one_name_are_one_too_many_and_the_first_goes_on() {
    let setting = Setting::new().await;
    let daemon = setting.daemon().await;
    let dir = setting.node.dir().join("second");
    let flags = ["state-dir", "cdi-root", "runtime-dir"].map(|flag| format!("--{flag}={}", dir.join(flag).display()));
    let output = run(setting.node.daemon_with(BINARY, &flags.each_ref().map(String::as_str)));
    assert_eq!(output.status.code(), Some(1));
    assert!(error_of(&output).contains("another process serves"), "{}", error_of(&output));
    let claim = allocated_claim(&setting.api, "one", &["npu-0"]).unwrap();
    setting.prepare(&claim).await.unwrap();
    drop(daemon);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_with_an_id_waits_for_the_old_one_and_registers_only_then() {
    let setting = Setting::new().await;
    let mut old = setting.daemon_with(&["--instance-id=old"]).await;
    let mut new = setting.node.start(setting.node.daemon_with(BINARY, &["--instance-id=new"])).unwrap();
    let claim = allocated_claim(&setting.api, "one", &["npu-0"]).unwrap();
    setting.prepare(&claim).await.unwrap();
    assert_eq!(setting.kubelet.instances(DRIVER).len(), 1);
    assert_eq!(new.exit_status().unwrap(), None, "it waits");
    assert_eq!(old.stop().await.unwrap().0, 0);
    let registered = setting.kubelet.wait_registered(DRIVER, SOON).await;
    assert!(registered.unwrap().socket.ends_with(format!("{DRIVER}-new@reg.sock")), "{}", new.log());
    assert!(until(SOON, || setting.kubelet.instances(DRIVER).len() == 1).await);
    setting.unprepare(&claim).await.unwrap();
    assert_eq!(setting.node.cdi_files().unwrap(), [""; 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_of_a_newer_version_stop_the_start_and_name_their_writer() {
    let setting = Setting::new().await;
    let mut daemon = setting.daemon().await;
    let claim = allocated_claim(&setting.api, "one", &["npu-0"]).unwrap();
    setting.prepare(&claim).await.unwrap();
    daemon.kill().unwrap();
    let path = setting.node.state().join("claims").join(format!("{}.json", claim.uid));
    let newer = r#"{"format":99,"writer":"npu-dra 9.1.0","body":{}}"#;
    fs::write(&path, newer).unwrap();
    let output = run(setting.node.daemon(BINARY));
    assert_eq!(output.status.code(), Some(4), "{}", error_of(&output));
    let error = error_of(&output);
    assert!(error.contains("9.1.0") && error.contains(&claim.uid), "{error}");
    assert_eq!(fs::read_to_string(&path).unwrap(), newer, "the record is as it was");
    assert_eq!(setting.node.cdi_files().unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_damaged_record_holds_its_claim_until_it_is_rebuilt() {
    let setting = Setting::new().await;
    let mut daemon = setting.daemon().await;
    let claim = allocated_claim(&setting.api, "one", &["npu-0"]).unwrap();
    let ids = setting.prepare(&claim).await.unwrap();
    daemon.kill().unwrap();
    let path = setting.node.state().join("claims").join(format!("{}.json", claim.uid));
    let mut bytes = fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x01;
    fs::write(&path, bytes).unwrap();
    let daemon = setting.daemon().await;
    assert!(until(SOON, || daemon.log().contains("was rebuilt from its CDI file")).await, "{}", daemon.log());
    assert_eq!(setting.prepare(&claim).await.unwrap(), ids);
    setting.unprepare(&claim).await.unwrap();
    assert_eq!(setting.node.cdi_files().unwrap(), [""; 0]);
    assert_eq!(setting.node.records().unwrap(), [""; 0]);
}

#[test]
fn bad_settings_are_refused_with_what_is_wrong_and_touch_nothing() {
    let node = Node::new(Profile::Ascend910B4).unwrap();
    let config = node.dir().join("bad.toml");
    fs::write(&config, "node-name = \"a\"\n\ncdi-rot = \"/x\"\n").unwrap();
    let config = format!("--config={}", config.display());
    let long = format!("--kubelet-registrar-directory-path=/{}", "k".repeat(100));
    let long_admin = format!("--admin-socket=/{}", "s".repeat(120));
    let file = node.dir().join("a-file");
    fs::write(&file, "").unwrap();
    let below_file = format!("--state-dir={}/state", file.display());
    let cases = [
        (config.as_str(), 2, "bad.toml:3: unknown key \"cdi-rot\""),
        ("--config=/nonexistent.toml", 2, "/nonexistent.toml: cannot be read: No such file"),
        ("--node-name=Bad_Node", 2, "flag --node-name: node-name = \"Bad_Node\" is not valid"),
        ("--driver-name=-x", 2, "driver-name = \"-x\" is not valid"),
        ("--instance-id=a/b", 2, "instance-id = \"a/b\" is not valid"),
        ("--device-wait=soon", 2, "flag --device-wait: device.wait = \"soon\" is not valid"),
        ("--healthcheck-port=0", 2, "healthcheck-port = 0 is not valid"),
        (long.as_str(), 2, "has 125 bytes and the limit is 107"),
        (long_admin.as_str(), 2, "has 121 bytes, 107 are allowed"),
        (below_file.as_str(), 1, "a-file"),
        ("--host-root=/nonexistent", 1, "boot_id: is --host-root right?"),
        ("--kubelet-registrar-directory-path=/nonexistent", 1, "start kubelet first"),
        ("--dcmi-library=/nonexistent/libdcmi.so", 1, "/nonexistent/libdcmi.so"),
    ];
    for (flag, code, expected) in cases {
        let output = run(node.daemon_with(BINARY, &[flag]));
        let error = error_of(&output);
        assert_eq!(output.status.code(), Some(code), "{flag}: {error}");
        assert!(error.contains(expected), "{flag}: {error}");
    }
    assert_eq!(node.records().unwrap(), [""; 0]);
    assert_eq!(node.cdi_files().unwrap(), [""; 0]);
    assert_eq!(fs::read_dir(node.registrar()).unwrap().count(), 0);
}

#[test]
fn unknown_flags_are_refused_and_help_has_every_flag_of_the_requirements() {
    let output = Command::new(BINARY).arg("--no-such-flag").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let output = Command::new(BINARY).arg("--help").output().unwrap();
    let help = String::from_utf8(output.stdout).unwrap();
    for flag in [
        "--cdi-root",
        "--device-profile",
        "--driver-name",
        "--kubelet-registrar-directory-path",
        "--kubelet-plugins-directory-path",
        "--enable-hard-vnpu",
        "--node-name",
        "--healthcheck-port",
        "--kubeconfig",
    ] {
        assert!(help.contains(flag), "{flag}");
    }
    for default in ["/etc/cdi", "npu.huawei.com", "/var/lib/kubelet/plugins_registry", "/var/lib/kubelet/plugins"] {
        assert!(help.contains(default), "{default}");
    }
    let version = Command::new(BINARY).arg("--version").output().unwrap();
    assert_eq!(String::from_utf8(version.stdout).unwrap(), format!("npu-dra {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn check_config_prints_the_settings_and_where_each_came_from() {
    let node = Node::new(Profile::Ascend910B4).unwrap();
    let config = node.dir().join("npu-dra.toml");
    fs::write(&config, "[device]\nwait = \"10s\"\n").unwrap();
    let mut command = Command::new(BINARY);
    command.args(["check-config", "--cdi-root=/run/cdi", "--config"]).arg(&config).env("NODE_NAME", "worker-3");
    let output = run(command);
    assert_eq!(output.status.code(), Some(0), "{}", error_of(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    let line = |key: &str| {
        let line = text.lines().find(|line| line.starts_with(&format!("{key} = "))).unwrap();
        line.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    assert_eq!(line("cdi-root"), "cdi-root = \"/run/cdi\" # flag --cdi-root");
    assert_eq!(line("node-name"), "node-name = \"worker-3\" # variable NODE_NAME");
    assert_eq!(line("device.wait"), format!("device.wait = \"10s\" # {}:2", config.display()));
    assert_eq!(line("driver-name"), "driver-name = \"npu.huawei.com\" # default");
    let long = format!("--kubelet-plugins-directory-path=/{}", "k".repeat(100));
    let output = Command::new(BINARY).args(["check-config", &long]).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "what the daemon would refuse is refused here");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hangup_reads_the_log_level_again_and_ends_nothing() {
    let setting = Setting::new().await;
    let config = setting.node.dir().join("npu-dra.toml");
    fs::write(&config, "log.level = \"info\"\n").unwrap();
    let mut daemon = setting.daemon_with(&["--log-level"]).await;
    fs::write(&config, "log.level = \"debug\"\n").unwrap();
    daemon.signal(Signal::SIGHUP).unwrap();
    daemon.wait_log("reloaded", SOON).await.unwrap();
    fs::write(&config, "log.level = \"debug\"\ndevice.wait = \"9s\"\n").unwrap();
    daemon.signal(Signal::SIGHUP).unwrap();
    daemon.wait_log("need a restart: device.wait", SOON).await.unwrap();
    fs::write(&config, "log.level = 5\n").unwrap();
    daemon.signal(Signal::SIGHUP).unwrap();
    daemon.wait_log("npu-dra.toml:1: log.level", SOON).await.unwrap();
    let claim = allocated_claim(&setting.api, "one", &["npu-0"]).unwrap();
    setting.prepare(&claim).await.unwrap();
    assert_eq!(daemon.exit_status().unwrap(), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn systemd_hears_ready_signs_of_life_and_stopping_even_while_the_library_hangs() {
    let setting = Setting::new().await;
    setting.node.world().faults().plant(dcmi::world::Fault::init_hangs()).unwrap();
    let path = setting.node.dir().join("notify");
    let systemd = tokio::net::UnixDatagram::bind(&path).unwrap();
    let mut command = setting.node.daemon(BINARY);
    command.env("NOTIFY_SOCKET", &path).env("WATCHDOG_USEC", "100000");
    let mut daemon = setting.node.start_registered(command, &setting.kubelet).await.unwrap();
    hear(&systemd, "READY=1").await;
    for _ in 0..3 {
        hear(&systemd, "WATCHDOG=1").await;
    }
    assert_eq!(daemon.stop().await.unwrap().0, 0);
    hear(&systemd, "STOPPING=1").await;
}

/// Waits until the service manager is told this; what else comes is let pass.
async fn hear(systemd: &tokio::net::UnixDatagram, wanted: &str) {
    let mut buffer = [0; 4096];
    let heard = async {
        loop {
            let length = systemd.recv(&mut buffer).await.unwrap();
            if std::str::from_utf8(&buffer[..length]).unwrap().lines().any(|line| line == wanted) {
                return;
            }
        }
    };
    assert!(tokio::time::timeout(SOON, heard).await.is_ok(), "{wanted} was not heard");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_admin_socket_of_systemd_is_adopted_and_left_in_its_place() {
    let setting = Setting::new().await;
    let path = setting.node.dir().join("systemd.sock");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let plain = setting.node.daemon(BINARY);
    let mut command = Command::new("/bin/sh");
    // The descriptor is 3, and the process is the one that is named.
    let script = "exec 3<&0 0</dev/null; export LISTEN_PID=$$ LISTEN_FDS=1 LISTEN_FDNAMES=admin; exec \"$0\" \"$@\"";
    command.args(["-c", script, BINARY]).args(plain.get_args()).env_clear();
    command.envs(plain.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command.stdin(std::os::fd::OwnedFd::from(listener));
    let mut daemon = setting.node.start_registered(command, &setting.kubelet).await.unwrap();
    let channel = testkit::kubelet::client::channel(&path, SOON).await.unwrap();
    let mut client = npu_proto::admin::admin_client::AdminClient::new(channel);
    let status = client.version(npu_proto::admin::VersionRequest {}).await;
    assert!(status.is_ok(), "{status:?}\n{}", daemon.log());
    assert!(!setting.node.admin_socket().exists(), "there is one admin socket");
    assert_eq!(daemon.stop().await.unwrap().0, 0);
    assert!(path.exists(), "systemd removes it");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_health_port_tells_readiness_and_metrics() {
    let setting = Setting::new().await;
    let port = free_port();
    let flag = format!("--healthcheck-port={port}");
    let mut daemon = setting.daemon_with(&[&flag, "--healthcheck-address=127.0.0.1"]).await;
    assert!(until(SOON, || get(port, "/readyz").starts_with("HTTP/1.1 200")).await, "{}", daemon.log());
    let metrics = get(port, "/metrics");
    for name in ["npu_dra_kubelet_", "npu_dra_cluster_claim_read_seconds"] {
        assert!(metrics.contains(name), "{name}: {metrics}");
    }
    assert_eq!(daemon.stop().await.unwrap().0, 0);
    assert_eq!(get(port, "/healthz"), "");
}

/// A port that nobody had a moment ago.
fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// The whole answer, empty if there is none.
fn get(port: u16, path: &str) -> String {
    use std::io::{Read as _, Write as _};
    let Ok(mut stream) = std::net::TcpStream::connect(("127.0.0.1", port)) else { return String::new() };
    let mut text = String::new();
    let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    let _ = stream.write_all(request.as_bytes()).and_then(|()| stream.read_to_string(&mut text).map(drop));
    text
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hard_vnpu_tells_the_slicing_model_and_is_refused_in_a_container() {
    let setting = Setting::new().await;
    let daemon = setting.daemon_with(&["--enable-hard-vnpu=true"]).await;
    daemon.wait_log("slicing model is", SOON).await.unwrap();
    let output = run({
        let mut command = setting.node.daemon_with(BINARY, &["--enable-hard-vnpu=true"]);
        command.env("KUBERNETES_SERVICE_HOST", "10.96.0.1");
        command
    });
    assert_eq!(output.status.code(), Some(2));
    assert!(error_of(&output).contains("slicing needs a host process"), "{}", error_of(&output));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_library_that_others_could_change_is_not_loaded_and_no_card_is_made_up_for_it() {
    use std::os::unix::fs::PermissionsExt as _;
    let setting = Setting::new().await;
    let library = setting.node.dir().join("libdcmi.so");
    fs::copy(dcmi::library_path(), &library).unwrap();
    fs::set_permissions(&library, fs::Permissions::from_mode(0o777)).unwrap();
    let flags = [format!("--dcmi-library={}", library.display()), "--trust-library=false".to_owned()];
    let daemon = setting.daemon_with(&flags.each_ref().map(String::as_str)).await;
    daemon.wait_log("is refused", SOON).await.unwrap();
    let claim = allocated_claim(&setting.api, "one", &["npu-0"]).unwrap();
    let client = setting.kubelet.client(DRIVER).unwrap();
    assert!(client.prepare_within(std::slice::from_ref(&claim), Duration::from_millis(500)).await.is_err());
    client.unprepare_one(&claim).await.unwrap();
    assert_eq!(setting.api.slices(DRIVER, NODE).len(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_init_that_fails_five_times_and_then_works_is_waited_for() {
    let setting = Setting::new().await;
    setting.node.world().faults().plant(dcmi::world::Fault::init_fails(5)).unwrap();
    let daemon = setting.daemon().await;
    let claim = allocated_claim(&setting.api, "one", &["npu-7"]).unwrap();
    setting.prepare(&claim).await.unwrap_or_else(|error| panic!("{error}\n{}", daemon.log()));
    setting.wait_slices(8).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_with_more_devices_than_the_api_allows_is_refused() {
    let setting = Setting::new().await;
    let daemon = setting.daemon().await;
    let names: Vec<_> = (0..33).map(|number| format!("npu-{number}")).collect();
    let names: Vec<_> = names.iter().map(String::as_str).collect();
    let claim = allocated_claim(&setting.api, "many", &names).unwrap();
    let refused = setting.prepare(&claim).await.unwrap_err();
    assert!(refused.contains("33"), "{refused}\n{}", daemon.log());
    assert_eq!(setting.node.cdi_files().unwrap(), [""; 0]);
    assert_eq!(setting.node.records().unwrap(), [""; 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cdi_directory_is_made_if_it_is_missing_and_files_of_others_in_it_are_left_alone() {
    let setting = Setting::new().await;
    fs::remove_dir_all(setting.node.cdi()).unwrap();
    let mut daemon = setting.daemon().await;
    let foreign = setting.node.cdi().join("other.json");
    let text = format!(r#"{{"cdiVersion":"0.5.0","kind":"{DRIVER}/npu","devices":[]}}"#);
    fs::write(&foreign, &text).unwrap();
    let claim = allocated_claim(&setting.api, "one", &["npu-0"]).unwrap();
    setting.prepare(&claim).await.unwrap();
    daemon.kill().unwrap();
    let daemon = setting.daemon().await;
    daemon.wait_log("has devices of our kind", SOON).await.unwrap();
    setting.unprepare(&claim).await.unwrap();
    assert_eq!(setting.node.cdi_files().unwrap(), ["other.json"]);
    assert_eq!(fs::read_to_string(foreign).unwrap(), text);
}

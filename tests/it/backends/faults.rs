//! A vendor library that hangs, crashes and is killed, and a daemon that dies.

use std::{
    collections::BTreeSet,
    fs::File,
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use dcmi::world::{Action, Fault as Planted, Profile};
use futures::StreamExt as _;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use npu_dra::{device::Fault, domain::health::Level};

use super::{fixture::Dcmi, scanned, scanned_until};

/// The calls of one scan of a node, by index.
async fn calls_of_a_scan(profile: Profile) -> Vec<String> {
    let node = Dcmi::of(profile);
    scanned(node.backend()).await;
    node.world.calls().unwrap().list.into_iter().map(|call| call.function).collect()
}

/// True while a process exists and is no zombie.
pub(super) fn lives(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| stat.rsplit(") ").next().is_some_and(|rest| !rest.starts_with('Z')))
}

async fn until(what: &str, condition: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !condition() {
        assert!(Instant::now() < end, "{what}");
        tokio::time::sleep(Duration::from_millis(5)).await; // waits: for another process
    }
}

fn send(signal: Signal, pid: u32) {
    kill(Pid::from_raw(i32::try_from(pid).unwrap()), signal).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_in_any_call_of_a_scan_is_one_fault_and_the_next_scan_works() {
    let calls = calls_of_a_scan(Profile::Many(2)).await;
    assert!(calls.len() > 30, "{}", calls.len());
    let cases = futures::stream::iter(calls.into_iter().enumerate()).map(|(index, function)| async move {
        let node = Dcmi::of(Profile::Many(2));
        let skip = u64::try_from(index).unwrap();
        node.world.faults().set([Planted::new("*", Action::Crash).skip(skip).times(1)]).unwrap();
        match node.backend().scan().await {
            Err(Fault::Failed { call, why, .. }) => {
                let name = call.split('(').next().unwrap();
                assert!(function.starts_with(name) && why.contains("SIGSEGV"), "{function}: {call}: {why}");
            }
            other => panic!("{index} {function}: {other:?}"),
        }
        assert_eq!(scanned(node.backend()).await.chips.len(), 2);
        let pids: BTreeSet<u32> = node.world.calls().unwrap().list.iter().map(|call| call.pid).collect();
        assert_eq!(pids.len(), 2, "one worker died, one came");
    });
    cases.buffer_unordered(4).collect::<Vec<()>>().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hang_in_any_call_of_a_scan_ends_at_its_deadline_and_the_next_scan_works() {
    let functions: BTreeSet<String> = calls_of_a_scan(Profile::Many(2)).await.into_iter().collect();
    let cases = futures::stream::iter(functions).map(|function| async move {
        let node = Dcmi::with(Profile::Many(2), |settings| {
            settings.timing.read = Duration::from_millis(700);
            settings.timing.init = Duration::from_millis(700);
            settings.wait = Some(Duration::ZERO);
        });
        node.world.faults().set([Planted::new(&function, Action::Hang).times(1)]).unwrap();
        let start = Instant::now();
        match node.backend().scan().await {
            Err(Fault::Failed { call, why, .. }) => {
                let name = call.split('(').next().unwrap();
                assert!(function.starts_with(name) && why.contains("no answer within"), "{function}: {call}: {why}");
            }
            other => panic!("{function}: {other:?}"),
        }
        assert!(start.elapsed() < Duration::from_secs(10), "{function}: {:?}", start.elapsed());
        let hung = node.world.calls().unwrap().unfinished().last().unwrap().pid;
        assert!(!lives(hung), "{function}: the hanging worker is reaped");
        assert_eq!(scanned(node.backend()).await.chips.len(), 2, "{function}");
    });
    cases.buffer_unordered(4).collect::<Vec<()>>().await;
}

#[tokio::test]
async fn a_crash_in_a_health_poll_costs_one_poll() {
    let node = Dcmi::of(Profile::Ascend910B4);
    scanned(node.backend()).await;
    node.world.faults().set([Planted::new("dcmi_get_device_health", Action::Crash).card(3).times(1)]).unwrap();
    let fault = node.backend().health().await.unwrap_err();
    assert!(fault.to_string().contains("dcmi_get_device_health(3, 0)"), "{fault}");
    assert_eq!(node.backend().health().await.unwrap().len(), 8, "the poll starts the library again");
}

#[tokio::test]
async fn a_chip_whose_calls_always_hang_or_crash_does_not_cost_the_node_the_others() {
    for action in [Action::Hang, Action::Crash] {
        let node = Dcmi::with(Profile::Ascend910B4, |settings| {
            settings.timing.read = Duration::from_secs(1);
            settings.timing.shun = Duration::from_mins(5);
            settings.wait = Some(Duration::ZERO);
        });
        scanned(node.backend()).await;
        node.world.faults().set([Planted::new("dcmi_get_device_health", action).card(3)]).unwrap();
        let fault = node.backend().health().await.unwrap_err();
        assert!(fault.to_string().contains("(3, 0)"), "{fault}");
        let scan = scanned(node.backend()).await;
        assert_eq!(scan.chips.len(), 7);
        assert_eq!(scan.missing[0].what, node.bus(3));
        assert!(scan.missing[0].why.contains("dcmi_get_device_health(3, 0)"), "{:?}", scan.missing);
        let health = node.backend().health().await.unwrap();
        assert!(health.len() == 7 && health.values().all(|reading| reading.level == Level::Ok), "{health:?}");
    }
}

#[tokio::test]
async fn a_chip_that_was_left_out_is_tried_again_and_costs_the_others_nothing() {
    let node = Dcmi::with(Profile::Ascend910B4, |settings| {
        settings.timing.shun = Duration::from_millis(1);
        settings.wait = Some(Duration::ZERO);
    });
    node.world.faults().set([Planted::new("dcmi_get_device_temperature", Action::Crash).card(3).times(4)]).unwrap();
    assert_eq!(scanned_until(node.backend(), |scan| scan.chips.len() == 8).await.chips.len(), 8);
}

#[tokio::test]
async fn an_init_that_fails_five_times_works_at_the_sixth_and_says_what_is_missing_until_then() {
    let node = Dcmi::of(Profile::Ascend910B4);
    node.world.faults().set([Planted::init_fails(5)]).unwrap();
    match node.backend().scan().await {
        Err(Fault::NotReady { why, .. }) => {
            assert!(why.contains("dcmi_init() answered -8005"), "{why}");
            assert!((0..8).all(|chip| why.contains(&node.bus(chip))), "{why}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(node.backend().status().state, "starting");
    assert_eq!(scanned(node.backend()).await.chips.len(), 8);
    let calls = node.world.calls().unwrap();
    assert_eq!(calls.count("dcmi_init"), 6);
    let pids: BTreeSet<u32> = calls.of("dcmi_init").map(|call| call.pid).collect();
    assert_eq!(pids.len(), 6, "each init in a process of its own");
    assert_eq!(node.backend().status().state, "ready");
}

#[tokio::test]
async fn an_init_that_fails_for_ever_backs_off_and_the_state_says_so() {
    let node = Dcmi::with(Profile::Ascend910B4, |settings| {
        settings.wait = Some(Duration::ZERO);
        settings.timing.back_off = Duration::from_mins(10);
        settings.timing.back_off_most = Duration::from_mins(10);
    });
    node.world.faults().set([Planted::init_fails(u64::MAX)]).unwrap();
    for _ in 0..20 {
        assert!(matches!(node.backend().scan().await, Err(Fault::NotReady { .. })));
    }
    assert_eq!(node.world.calls().unwrap().count("dcmi_init"), 2, "the first retry is free, the next waits");
    let status = node.backend().status();
    assert_eq!(status.state, "failed");
    assert!(status.detail.contains("-8005"), "{}", status.detail);
}

#[tokio::test]
async fn a_worker_killed_between_calls_is_replaced() {
    let node = Dcmi::of(Profile::Ascend910B4);
    scanned(node.backend()).await;
    send(Signal::SIGKILL, node.worker());
    let fault = node.backend().health().await.unwrap_err();
    assert!(fault.to_string().contains("SIGKILL"), "{fault}");
    assert_eq!(node.backend().health().await.unwrap().len(), 8);
    assert_eq!(scanned(node.backend()).await.chips.len(), 8);
}

#[tokio::test]
async fn a_library_that_ends_its_process_costs_one_call() {
    let node = Dcmi::of(Profile::Ascend910B4);
    scanned(node.backend()).await;
    node.world.faults().set([Planted::new("dcmi_get_device_temperature", Action::KillSelf).times(1)]).unwrap();
    assert!(node.backend().health().await.is_err());
    assert_eq!(node.backend().health().await.unwrap().len(), 8);
}

#[tokio::test]
async fn signals_that_stop_the_daemon_do_not_end_a_call() {
    let node = Dcmi::of(Profile::Ascend910B4);
    scanned(node.backend()).await;
    let worker = node.worker();
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        send(signal, worker);
    }
    assert_eq!(node.backend().health().await.unwrap().len(), 8);
    assert_eq!(node.worker(), worker);
}

#[tokio::test]
async fn a_dropped_backend_leaves_no_worker_even_in_a_call_that_hangs() {
    let node = Dcmi::of(Profile::Ascend910B4);
    node.world.faults().set([Planted::new("dcmi_get_device_board_info", Action::Hang)]).unwrap();
    let begun = || node.world.calls().unwrap().count("dcmi_get_device_board_info") == 1;
    tokio::select! {
        scan = node.backend().scan() => panic!("{scan:?}"),
        () = until("the call has begun", begun) => {}
    }
    let worker = node.worker();
    assert!(lives(worker));
    drop(node);
    until("the worker has ended", || !lives(worker)).await;
}

#[tokio::test]
async fn no_vendor_call_is_made_while_another_process_holds_the_lock() {
    let node = Dcmi::of(Profile::Ascend910B4);
    let path = node.dir.path().join("dcmi.lock");
    std::fs::write(&path, "4711").unwrap();
    let stale = File::options().write(true).open(&path).unwrap();
    stale.lock().unwrap();
    match node.backend().scan().await {
        Err(Fault::NotReady { why, .. }) => {
            assert!(why.contains("4711") && why.contains(path.to_str().unwrap()), "{why}");
        }
        other => panic!("{other:?}"),
    }
    assert!(node.world.calls().unwrap().is_empty());
    drop(stale);
    assert_eq!(scanned(node.backend()).await.chips.len(), 8);
}

#[tokio::test]
async fn a_state_directory_that_is_not_there_is_named() {
    let node = Dcmi::with(Profile::Ascend910B4, |settings| settings.state_dir = "/nowhere/at/all".into());
    let fault = node.backend().scan().await.unwrap_err();
    assert!(fault.to_string().contains("/nowhere/at/all/dcmi.lock"), "{fault}");
    assert!(node.world.calls().unwrap().is_empty());
}

#[tokio::test]
async fn many_callers_never_make_two_calls_of_the_library_meet() {
    let node = Dcmi::of(Profile::Ascend910B4);
    let backend = node.backend();
    let scans = futures::future::join_all((0..5).map(|_| backend.scan()));
    let polls = futures::future::join_all((0..20).map(|_| backend.health()));
    let (scans, polls) = tokio::join!(scans, polls);
    assert!(scans.iter().all(Result::is_ok) && polls.iter().all(Result::is_ok));
    assert!(node.world.calls().unwrap().len() > 1000);
    assert!(node.world.overlaps().unwrap().is_empty());
}

/// Directory of the node that [`a_daemon`] serves.
const NODE: &str = "BACKENDS_TEST_NODE";
/// Name of the test that is its process.
const DAEMON: &str = "backends::faults::a_daemon";

/// Not a test: the process that stands for a daemon, run by those below it.
#[tokio::test]
#[ignore = "a process of other tests"]
async fn a_daemon() {
    let Some(dir) = std::env::var_os(NODE) else { return };
    let (settings, _) = settings_below(Path::new(&dir));
    let backend = npu_dra::device::open(&settings).unwrap();
    let _ = backend.scan().await;
    loop {
        let _ = backend.health().await;
        tokio::time::sleep(Duration::from_millis(20)).await; // waits: to be killed
    }
}

/// Settings of a daemon with its node below this directory, and the node.
fn settings_below(dir: &Path) -> (npu_dra::device::Settings, dcmi::world::World) {
    let world = dir.join("world");
    let world =
        dcmi::world::World::open(&world).or_else(|_| dcmi::world::World::create(&world, Profile::Many(2))).unwrap();
    let mut settings = npu_dra::device::Settings::new(npu_dra::device::Choice::Dcmi, dir, dir);
    settings.library = Some(dcmi::library_path());
    settings.trust_library = true;
    settings.worker = env!("CARGO_BIN_EXE_npu-dra").into();
    settings.environment = vec![(dcmi::world::VARIABLE.into(), world.dir().into())];
    settings.timing.read = Duration::from_secs(20);
    (settings, world)
}

/// Kills and reaps the process whatever the test does.
struct Killed(std::process::Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Ends a worker whatever the test does: it is nobody's child when its daemon is gone.
struct Ended(u32);

impl Drop for Ended {
    fn drop(&mut self) {
        if lives(self.0) {
            send(Signal::SIGKILL, self.0);
        }
    }
}

fn start_daemon(dir: &Path) -> Killed {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", DAEMON])
        .env(NODE, dir)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    Killed(child)
}

#[tokio::test]
async fn a_daemon_that_is_killed_takes_its_worker_along() {
    let dir = tempfile::tempdir().unwrap();
    let (settings, world) = settings_below(dir.path());
    let mut daemon = start_daemon(dir.path());
    until("the daemon polls", || world.calls().unwrap().count("dcmi_get_device_health") > 4).await;
    let worker = world.calls().unwrap().list[0].pid;
    let _ended = Ended(worker);
    assert!(lives(worker) && worker != daemon.0.id());
    daemon.0.kill().unwrap();
    daemon.0.wait().unwrap();
    until("the worker has ended", || !lives(worker)).await;
    let next = npu_dra::device::open(&settings).unwrap();
    assert_eq!(scanned(&*next).await.chips.len(), 2, "the lock is free");
}

#[tokio::test]
async fn a_daemon_that_is_killed_while_its_worker_hangs_takes_it_along() {
    let dir = tempfile::tempdir().unwrap();
    let (settings, world) = settings_below(dir.path());
    world.faults().set([Planted::new("dcmi_get_device_hbm_info", Action::Hang).times(1)]).unwrap();
    let mut daemon = start_daemon(dir.path());
    until("the call has begun", || world.calls().unwrap().count("dcmi_get_device_hbm_info") == 1).await;
    let worker = world.calls().unwrap().list[0].pid;
    let _ended = Ended(worker);
    daemon.0.kill().unwrap();
    daemon.0.wait().unwrap();
    until("the worker has ended", || !lives(worker)).await;
    let next = npu_dra::device::open(&settings).unwrap();
    assert_eq!(scanned(&*next).await.chips.len(), 2);
}

#[tokio::test]
async fn the_library_has_sigchld_as_it_is_by_default_whatever_the_daemon_was_started_with() {
    let dir = tempfile::tempdir().unwrap();
    let (_, world) = settings_below(dir.path());
    let child = Command::new("env")
        .arg("--ignore-signal=CHLD")
        .arg(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", DAEMON])
        .env(NODE, dir.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let daemon = Killed(child);
    until("the daemon polls", || world.calls().unwrap().count("dcmi_get_device_health") > 4).await;
    let ignored = |pid: u32| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap().trim().to_owned();
        u64::from_str_radix(&mask, 16).unwrap()
    };
    let has = |mask: u64, signal: Signal| mask >> (signal as u32 - 1) & 1 == 1;
    assert!(has(ignored(daemon.0.id()), Signal::SIGCHLD), "the daemon was started as planned");
    let worker = ignored(world.calls().unwrap().list[0].pid);
    assert!(!has(worker, Signal::SIGCHLD));
    assert!(has(worker, Signal::SIGTERM));
}

#[tokio::test]
async fn a_daemon_that_is_killed_inside_a_call_takes_its_worker_along() {
    let dir = tempfile::tempdir().unwrap();
    let (settings, world) = settings_below(dir.path());
    world.faults().set([Planted::new("dcmi_get_device_hbm_info", Action::KillParent).times(1)]).unwrap();
    let mut daemon = start_daemon(dir.path());
    daemon.0.wait().unwrap();
    let worker = world.calls().unwrap().list[0].pid;
    let _ended = Ended(worker);
    until("the worker has ended", || !lives(worker)).await;
    let next = npu_dra::device::open(&settings).unwrap();
    assert_eq!(scanned(&*next).await.chips.len(), 2);
    assert!(world.overlaps().unwrap().is_empty());
}

#[tokio::test]
async fn a_worker_whose_parent_is_another_process_makes_no_call() {
    let dir = tempfile::tempdir().unwrap();
    let (_, world) = settings_below(dir.path());
    let status = Command::new(env!("CARGO_BIN_EXE_npu-dra"))
        .args(["dcmi-worker", "1"])
        .args([dir.path().join("lock"), dcmi::library_path()])
        .arg("trust")
        .env(dcmi::world::VARIABLE, world.dir())
        .stdin(Stdio::null())
        .status()
        .unwrap();
    assert_eq!(status.code(), Some(3));
    assert!(world.calls().unwrap().is_empty());
}

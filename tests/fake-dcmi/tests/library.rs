//! The built library in processes of its own, loaded by a C program through the prototypes of `tests/abi/dcmi.h`.
#![allow(clippy::unwrap_used, missing_docs, reason = "a test that fails may panic")]

use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;

use dcmi::world::{Action, Assertion, Fault, Notice, Profile, World};

/// The compiled caller, made once, beside the other things that are built: nobody drops what is static.
fn caller() -> &'static Path {
    static CALLER: OnceLock<PathBuf> = OnceLock::new();
    CALLER.get_or_init(|| {
        let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("call");
        dcmi::abi::compile("call.c", &program);
        program
    })
}

struct Node {
    dir: tempfile::TempDir,
    world: World,
}

/// A caller that dies with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Node {
    fn new(profile: Profile) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let world = World::create(dir.path().join("world"), profile).unwrap();
        Self { dir, world }
    }

    fn command(&self, library: &Path, commands: &str) -> Command {
        let mut command = Command::new(caller());
        command.arg(library).args(commands.split_whitespace()).env(dcmi::world::VARIABLE, self.world.dir());
        command
    }

    /// Runs commands to their end; gives the lines they printed.
    fn call(&self, commands: &str) -> Vec<String> {
        let output = finish(&mut self.command(&dcmi::library_path(), commands));
        assert!(output.status.success(), "{commands}: {output:?}");
        String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
    }

    fn start(&self, commands: &str) -> Running {
        let mut command = self.command(&dcmi::library_path(), commands);
        Running(command.stdout(Stdio::piped()).spawn().unwrap())
    }
}

/// Runs a command to its end, which must come soon.
fn finish(command: &mut Command) -> Output {
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut child = Running(child);
    let mut status = None;
    until("the end of a caller", || {
        status = child.0.try_wait().unwrap();
        status.is_some()
    });
    // What the callers print fits into a pipe.
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    child.0.stdout.take().unwrap().read_to_end(&mut stdout).unwrap();
    child.0.stderr.take().unwrap().read_to_end(&mut stderr).unwrap();
    Output { status: status.unwrap(), stdout, stderr }
}

/// Waits for something that another process does.
fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !done() {
        assert!(Instant::now() < deadline, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(1)); // waits: for another process
    }
}

#[test]
fn a_c_program_reads_the_cards_through_the_header() {
    let node = Node::new(Profile::Ascend910B4);
    let die = node.world.data().unwrap().chip(7).unwrap().vdie;
    let die: Vec<String> = die.iter().map(|word| format!("{word:08X}")).collect();
    assert_eq!(
        node.call("list init list logic 7 0 pci 7 0 die 7 0 topo 0 0 7 0 health 7 0"),
        [
            "list -8005",
            "init 0",
            "list 0 0 1 2 3 4 5 6 7",
            "logic 0 7",
            "pci 0 0000:42:00.0",
            &format!("die 0 {}", die.join("-")),
            "topo 0 3",
            "health 0 0",
        ]
    );
}

#[test]
fn a_vnpu_outlives_the_process_that_made_it() {
    let node = Node::new(Profile::Ascend910B4);
    assert_eq!(node.call("init create 2 0 vir05_1c_8g 135"), ["init 0", "create 0 135"]);
    assert_eq!(node.call("init total 2 0 total 3 0"), ["init 0", "total 0 360 135", "total 0 360"]);
    assert!(node.world.dir().join("dev/vdavinci135").exists());
    assert_eq!(node.call("init destroy 2 0 135 destroy 2 0 135"), ["init 0", "destroy 0", "destroy -8008"]);
    assert!(node.world.vnpus().unwrap().is_empty());
    assert!(!node.world.dir().join("dev/vdavinci135").exists());
}

#[test]
fn events_arrive_on_their_own_thread_and_one_subscription_is_all() {
    let node = Node::new(Profile::Ascend910B4);
    node.world.drop_chip(0).unwrap();
    node.world.occur(3, 0x1111, 2).unwrap();
    let mut child = node.start("init subscribe 0 subscribe 0 await 2");
    let mut lines = BufReader::new(child.0.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert_eq!(lines.by_ref().take(3).collect::<Vec<_>>(), ["init 0", "subscribe 0", "subscribe -8020"]);
    node.world.occur(3, 0x80E0_1801, 2).unwrap();
    node.world.recover(3, 0x80E0_1801, 2).unwrap();
    assert_eq!(
        lines.collect::<Vec<_>>(),
        [
            "event 0 80E01801 logic 2 severity 2 assertion 1",
            "event 0 80E01801 logic 2 severity 2 assertion 0",
            "await 2",
        ],
        "logic ids, and none of the events before the subscription"
    );
    assert_eq!(node.world.data().unwrap().chip(3).unwrap().errors, [0x1111]);
}

#[test]
fn the_filter_passed_by_value_is_obeyed() {
    let node = Node::new(Profile::Ascend910B4);
    let mut child = node.start("init subscribe 0x8C2FA009 await 1");
    let mut lines = BufReader::new(child.0.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert_eq!(lines.by_ref().take(2).collect::<Vec<_>>(), ["init 0", "subscribe 0"]);
    let send = |code| Notice { phy: 1, code, severity: 0, assertion: Assertion::OneShot };
    node.world.send_event(send(0x80C9_8009)).unwrap();
    node.world.send_event(send(0x8C2F_A009)).unwrap();
    assert_eq!(lines.collect::<Vec<_>>(), ["event 0 8C2FA009 logic 1 severity 0 assertion 2", "await 1"]);
    assert_eq!(Node::new(Profile::Ascend310P3).call("init subscribe 0"), ["init 0", "subscribe -8255"]);
}

#[test]
fn a_burst_and_events_of_chips_that_nobody_has_arrive_in_order() {
    let node = Node::new(Profile::Ascend910B4);
    let mut child = node.start("init subscribe 0 await 65");
    let mut lines = BufReader::new(child.0.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert_eq!(lines.by_ref().take(2).collect::<Vec<_>>(), ["init 0", "subscribe 0"]);
    let notice =
        |number: u32| Notice { phy: number % 8, code: 0x1000 + number, severity: 3, assertion: Assertion::Occurred };
    node.world.send_events(&(0..64).map(notice).collect::<Vec<_>>()).unwrap();
    node.world.send_stray_event(77, notice(64)).unwrap();
    let mut wanted: Vec<_> =
        (0..64).map(|n| format!("event 0 {:08X} logic {} severity 3 assertion 1", 0x1000 + n, n % 8)).collect();
    wanted.extend(["event 0 00001040 logic 77 severity 3 assertion 1".to_owned(), "await 65".to_owned()]);
    assert_eq!(lines.collect::<Vec<_>>(), wanted);
}

#[test]
fn a_crash_a_kill_and_a_hang_end_the_process_and_leave_the_world_whole() {
    let node = Node::new(Profile::Ascend910B4);
    let plant = |fault: Fault| node.world.faults().set([fault]).unwrap();

    plant(Fault::new("dcmi_get_device_health", Action::Crash).card(1).times(1));
    let status = finish(&mut node.command(&dcmi::library_path(), "init health 1 0")).status;
    assert_eq!(status.signal(), Some(Signal::SIGSEGV as i32));
    assert_eq!(node.call("init health 1 0"), ["init 0", "health 0 0"], "the count outlives the crash");

    plant(Fault::new("dcmi_create_vdevice", Action::KillSelf));
    let status = finish(&mut node.command(&dcmi::library_path(), "init create 0 0 vir05_1c_8g 100")).status;
    assert_eq!((status.signal(), node.world.vnpus().unwrap().len()), (Some(Signal::SIGKILL as i32), 0));

    plant(Fault::new("dcmi_create_vdevice", Action::KillSelf).after());
    let status = finish(&mut node.command(&dcmi::library_path(), "init create 0 0 vir05_1c_8g 100")).status;
    assert_eq!((status.signal(), node.world.vnpus().unwrap()[0].id), (Some(Signal::SIGKILL as i32), 100));

    plant(Fault::init_hangs());
    let child = node.start("init");
    until("the hang", || node.world.calls().unwrap().unfinished().count() == 4);
    drop(child);
    assert_eq!(node.call("init health 1 0"), ["init 0", "health 0 0"]);
    assert_eq!(node.world.overlaps().unwrap(), Vec::<String>::new());
}

#[test]
fn a_call_can_kill_the_process_that_started_its_own() {
    let node = Node::new(Profile::Ascend910B4);
    node.world.faults().set([Fault::new("dcmi_set_destroy_vdevice", Action::KillParent).after()]).unwrap();
    let id = node.world.add_vnpu(0, "vir05_1c_8g").unwrap();
    // The shell is the parent; the caller gets its pipe and goes on without it.
    let script = format!("\"$0\" \"$1\" init destroy 0 0 {id}; echo the parent lives");
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(script).arg(caller()).arg(dcmi::library_path());
    let mut child = shell.env(dcmi::world::VARIABLE, node.world.dir()).stdout(Stdio::null()).spawn().unwrap();
    assert_eq!(child.wait().unwrap().signal(), Some(Signal::SIGKILL as i32));
    assert!(node.world.vnpus().unwrap().is_empty(), "the effect came first");
    let pid = node.world.calls().unwrap().unfinished().next().unwrap().pid;
    signal::kill(Pid::from_raw(pid.try_into().unwrap()), Signal::SIGKILL).unwrap();
}

#[test]
fn calls_of_two_processes_may_not_overlap_either() {
    let node = Node::new(Profile::Ascend910B4);
    let fault = Fault::new("dcmi_get_device_health", Action::Hang).card(0);
    let id = node.world.faults().plant(fault).unwrap();
    let slow = node.start("init health 0 0");
    until("the hanging call", || node.world.faults().hits(&id) == 1);
    assert_eq!(node.call("init"), ["init -8020"]);
    assert_eq!(node.world.overlaps().unwrap().len(), 1);
    drop(slow);
    assert_eq!(node.call("init"), ["init 0"]);
}

#[test]
fn an_old_driver_lacks_the_newer_symbols_and_nothing_else() {
    let node = Node::new(Profile::Old);
    let old = node.dir.path().join("libdcmi.so");
    dcmi::testing::strip_symbols(&dcmi::library_path(), &old, Profile::Old.missing_symbols()).unwrap();
    let commands = "has dcmi_get_device_chip_info_v2 has dcmi_get_device_chip_info init health 0 0 \
                    has dcmi_get_multi_die_policy";
    let output = finish(&mut node.command(&old, commands));
    assert!(output.status.success(), "{output:?}");
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "has no\nhas yes\ninit 0\nhealth 0 0\nhas no\n");
    let error = dcmi::testing::strip_symbols(&dcmi::library_path(), &old, &["dcmi_no_such"]).unwrap_err();
    assert_eq!(error.to_string(), "the library has no symbol dcmi_no_such");
}

/// Every prototype of the header must be there under its own name.
#[test]
fn the_library_exports_every_function_of_the_header() {
    let header = std::fs::read_to_string(dcmi::abi::directory().join("dcmi.h")).unwrap();
    let names: Vec<&str> = header
        .lines()
        .filter_map(|line| line.strip_prefix("int dcmi_"))
        .map(|line| line.split('(').next().unwrap())
        .collect();
    assert!(names.len() > 70, "only {} prototypes", names.len());
    let node = Node::new(Profile::Ascend910B4);
    let commands: Vec<String> = names.iter().map(|name| format!("has dcmi_{name}")).collect();
    let missing: Vec<&str> = node
        .call(&commands.join(" "))
        .iter()
        .zip(&names)
        .filter(|(answer, _)| *answer == "has no")
        .map(|(_, name)| *name)
        .collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn a_world_that_is_not_there_is_said_on_standard_error() {
    let mut command = Command::new(caller());
    let output = finish(command.arg(dcmi::library_path()).arg("init").env_remove(dcmi::world::VARIABLE));
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "init -8005\n");
    assert!(String::from_utf8(output.stderr).unwrap().contains("FAKE_DCMI_WORLD"));
}

#[test]
fn a_changed_world_is_seen_by_the_next_call() {
    let node = Node::new(Profile::Ascend910B4);
    let dir = node.world.dir().to_owned();
    // Many changes within one tick of the file system's clock.
    for health in [1, 2, 3, 0].repeat(25) {
        node.world.set_health(0, health).unwrap();
        let seen = dcmi::testing::with_world(&dir, || {
            let mut value = core::mem::MaybeUninit::uninit();
            init_once();
            health_of(&mut value)
        });
        assert_eq!(seen, health);
    }
    dcmi::testing::restart(&dir);
}

#[allow(unsafe_code)]
fn init_once() {
    // SAFETY: it takes no pointers.
    assert_eq!(unsafe { dcmi::calls::inventory::dcmi_init() }, 0);
}

#[allow(unsafe_code)]
fn health_of(value: &mut core::mem::MaybeUninit<u32>) -> u32 {
    // SAFETY: the pointer leads to a live local.
    assert_eq!(unsafe { dcmi::calls::fault::dcmi_get_device_health(0, 0, Some(value)) }, 0);
    // SAFETY: the call worked, so it wrote the value.
    unsafe { value.assume_init() }
}

/// Benchmarks run on this library, so it must cost next to nothing. The bound is loose: machines are shared.
#[test]
fn a_call_on_64_cards_costs_well_under_a_millisecond() {
    let node = Node::new(Profile::Many(64));
    let lines = node.call("init bench 5");
    let nanos: u64 = lines[1].strip_prefix("bench 0 ").unwrap().parse().unwrap();
    assert!(nanos < 1_000_000, "{nanos} ns a call");
}

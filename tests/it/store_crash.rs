//! Records and CDI files under SIGKILL and failing disks: a child acts out a claim's life and is cut at every call that
//! changes a file; what is left must be the old state or the new one, and nothing else.

use std::{
    collections::BTreeMap,
    fs::{self, OpenOptions},
    io::Write,
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::Command,
    sync::Mutex,
};

use npu_dra::{
    cdi::{Cdi, Settings},
    domain::{
        claim::{ClaimRef, ClaimUid},
        names::{DeviceName, DriverName},
        node::{CardMemory, NodeMemory},
        npu::StableId,
        plan::injection,
        record::{Holding, Phase, Record},
    },
    store::Store,
};
use testkit::faultline::{Action, Call, Cut, Faultline, When};

/// Tells the child which directory to work in; without it the child does nothing.
const CHILD: &str = "NPU_DRA_TEST_STORE_CRASH";
/// The child, as the test harness names it.
const CHILD_TEST: &str = "store_crash::a_child_acts_out_a_claims_life_when_it_is_told_to";
const ENOSPC: i32 = 28;
const EIO: i32 = 5;
const EROFS: i32 = 30;

type Outcome = Result<(), String>;

/// What a node holds, in words that the test can compare.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct State {
    /// Boot id of each record, by claim; `damaged` for a quarantined one.
    claims: BTreeMap<String, String>,
    /// Devices of each CDI file, by claim.
    files: BTreeMap<String, usize>,
    /// Names in `node.json`.
    cards: Vec<String>,
}

/// One act of the child: how it is done, and what it changes. Acts are repeatable.
struct Act {
    name: &'static str,
    run: fn(&Disk) -> Outcome,
    change: fn(&mut State),
}

/// What the child holds open.
struct Disk {
    store: Store,
    cdi: Cdi,
}

fn uid(name: &str) -> ClaimUid {
    ClaimUid::new(format!("8a1c1f0e-55aa-4c6f-9e57-{name}")).unwrap()
}

fn record(name: &str, boot: &str) -> Record {
    let stable_id = StableId::from_text("pci-0000:c1:00.0").unwrap();
    Record {
        claim: ClaimRef { namespace: "default".to_owned(), name: name.to_owned(), uid: uid(name) },
        boot_id: boot.to_owned(),
        phase: Phase::Prepared,
        prepared_at: "2026-03-01T10:00:00Z".parse().unwrap(),
        devices: vec![Holding {
            requests: vec!["npu".to_owned()],
            pool: "node-1/npu".to_owned(),
            device: "npu-0".to_owned(),
            cdi_device: format!("{}_{stable_id}", uid(name)),
            cut: None,
            stable_id,
            physical_ids: vec![0],
            admin_access: false,
            share_id: None,
        }],
    }
}

fn memory(cards: u8) -> NodeMemory {
    let card = |n: u8| {
        let bus_id = format!("0000:{n:02x}:00.0");
        CardMemory {
            name: DeviceName::new(format!("npu-{n}")).unwrap(),
            stable_id: StableId::from_text(&format!("pci-{bus_id}")).unwrap(),
            vdie: None,
            bus_id: bus_id.parse().unwrap(),
            faults: Vec::new(),
            link: None,
            hold: None,
        }
    };
    NodeMemory { cards: (0..cards).map(card).collect(), suspended: None, ..NodeMemory::default() }
}

fn write(disk: &Disk, name: &str, boot: &str) -> Outcome {
    disk.store.write(&record(name, boot)).map_err(|error| error.to_string())?;
    disk.store.settle().map_err(|error| error.to_string())
}

fn forget(disk: &Disk, name: &str) -> Outcome {
    disk.store.remove(&uid(name)).map_err(|error| error.to_string())?;
    disk.store.settle().map_err(|error| error.to_string())
}

fn inject(disk: &Disk, name: &str) -> Outcome {
    disk.cdi.ensure(&injection(&record(name, "b1"))).map_err(|error| error.to_string())?;
    disk.cdi.settle().map_err(|error| error.to_string())
}

fn withdraw(disk: &Disk, name: &str) -> Outcome {
    disk.cdi.remove(&uid(name)).map_err(|error| error.to_string())?;
    disk.cdi.settle().map_err(|error| error.to_string())
}

fn remember(disk: &Disk, cards: u8) -> Outcome {
    disk.store.write_node(&memory(cards)).map_err(|error| error.to_string())
}

fn set(map: &mut BTreeMap<String, String>, name: &str, boot: &str) {
    map.insert(name.to_owned(), boot.to_owned());
}

fn file(state: &mut State, name: &str) {
    state.files.insert(name.to_owned(), 1);
}

/// Two claims prepared, one prepared anew after a boot, one released; a damaged record rewritten, another released.
const LIFE: &[Act] = &[
    Act { name: "remember a card", run: |d| remember(d, 1), change: |s| s.cards = vec!["npu-0".to_owned()] },
    Act { name: "write record a", run: |d| write(d, "a", "b1"), change: |s| set(&mut s.claims, "a", "b1") },
    Act { name: "inject a", run: |d| inject(d, "a"), change: |s| file(s, "a") },
    Act { name: "write record b", run: |d| write(d, "b", "b1"), change: |s| set(&mut s.claims, "b", "b1") },
    Act { name: "inject b", run: |d| inject(d, "b"), change: |s| file(s, "b") },
    Act { name: "rewrite record a", run: |d| write(d, "a", "b2"), change: |s| set(&mut s.claims, "a", "b2") },
    Act {
        name: "remember two cards",
        run: |d| remember(d, 2),
        change: |s| s.cards = vec!["npu-0".to_owned(), "npu-1".to_owned()],
    },
    Act { name: "rewrite damaged c", run: |d| write(d, "c", "b1"), change: |s| set(&mut s.claims, "c", "b1") },
    Act { name: "forget damaged d", run: |d| forget(d, "d"), change: |s| s.claims.retain(|name, _| name != "d") },
    Act { name: "withdraw a", run: |d| withdraw(d, "a"), change: |s| s.files.retain(|name, _| name != "a") },
    Act { name: "forget a", run: |d| forget(d, "a"), change: |s| s.claims.retain(|name, _| name != "a") },
];

/// What must be there once so many acts are done.
fn after(acts: usize) -> State {
    let mut state = State::default();
    set(&mut state.claims, "c", "damaged");
    set(&mut state.claims, "d", "damaged");
    for act in &LIFE[..acts] {
        (act.change)(&mut state);
    }
    state
}

fn settings(dir: &Path) -> Settings {
    Settings {
        root: dir.join("disk/cdi"),
        driver: DriverName::new("npu.huawei.com").unwrap(),
        host_root: dir.join("host"),
        example: true,
        hide_from_ascend_runtime: true,
        optional_binds: Vec::new(),
    }
}

fn open(dir: &Path) -> Result<Disk, String> {
    let store = Store::open(dir.join("disk/state"), None).map_err(|error| error.to_string())?;
    store.load().map_err(|error| error.to_string())?;
    let cdi = Cdi::open(settings(dir)).map_err(|error| error.to_string())?;
    Ok(Disk { store, cdi })
}

#[test]
fn a_child_acts_out_a_claims_life_when_it_is_told_to() {
    let Some(dir) = std::env::var_os(CHILD).map(PathBuf::from) else { return };
    let mut progress = OpenOptions::new().append(true).create(true).open(dir.join("progress")).unwrap();
    let mut say = |line: String| progress.write_all(format!("{line}\n").as_bytes()).unwrap();
    let again = std::env::var_os("NPU_DRA_TEST_AGAIN").is_some();
    // An act that failed is tried once more, as kubelet would.
    let mut attempt = |name: &str, run: &mut dyn FnMut() -> Outcome| {
        let mut outcome = run();
        if let Err(error) = &outcome {
            say(format!("failed {name}: {error}"));
            if again {
                outcome = run();
            }
        }
        if outcome.is_ok() {
            say(format!("done {name}"));
        }
        outcome.is_ok()
    };
    let mut disk = None;
    let opened = attempt("open", &mut || {
        disk = Some(open(&dir)?);
        Ok(())
    });
    if !opened {
        return;
    }
    let disk = disk.unwrap();
    for act in LIFE {
        if !attempt(act.name, &mut || (act.run)(&disk)) {
            return;
        }
    }
}

/// How a run of the child went.
struct Run {
    dir: tempfile::TempDir,
    signal: Option<i32>,
    /// Acts that were done; `None` if not even the opening was.
    done: Option<usize>,
    failures: Vec<String>,
    calls: Vec<Call>,
}

/// Runs the child on a fresh disk with two damaged records.
fn run(cut: Option<Cut>, again: bool) -> Run {
    let dir = tempfile::tempdir().unwrap();
    let claims = dir.path().join("disk/state/claims");
    fs::create_dir_all(&claims).unwrap();
    for name in ["c", "d"] {
        fs::write(claims.join(format!("{}.json", uid(name))), "{\"format\":1,").unwrap();
    }
    let line = Faultline::new(Path::new(env!("CARGO_TARGET_TMPDIR")), [dir.path().join("disk")]).unwrap();
    let line = line.log(dir.path().join("log"));
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", CHILD_TEST, "--test-threads=1"]).env(CHILD, dir.path());
    if again {
        command.env("NPU_DRA_TEST_AGAIN", "1");
    }
    line.arm(&mut command, cut);
    let output = command.output().unwrap();
    let signal = output.status.signal();
    assert!(output.status.success() || signal == Some(9), "{}", String::from_utf8_lossy(&output.stdout));
    let progress = fs::read_to_string(dir.path().join("progress")).unwrap_or_default();
    let done = progress.lines().filter(|line| line.starts_with("done ")).count().checked_sub(1);
    let failures = progress.lines().filter(|line| line.starts_with("failed ")).map(str::to_owned).collect();
    Run { signal, done, failures, calls: line.calls().unwrap(), dir }
}

/// What a new owner finds after a run, once it has opened everything. Leaves no temporary file behind.
fn found(run: &Run) -> State {
    let name = |uid: &ClaimUid| uid.as_str().rsplit('-').next().unwrap().to_owned();
    let disk = open(run.dir.path()).unwrap();
    let loaded = disk.store.load().unwrap();
    assert_eq!(loaded.node_problem, None);
    let mut state = State::default();
    for record in &loaded.records {
        state.claims.insert(name(&record.claim.uid), record.boot_id.clone());
    }
    for quarantined in &loaded.quarantined {
        let before = state.claims.insert(name(&quarantined.uid), "damaged".to_owned());
        assert_eq!(before, None, "a claim is sound or damaged, not both");
    }
    for file in disk.cdi.list().unwrap() {
        state.files.insert(name(&file.uid), file.content.expect("a CDI file is whole").devices.len());
    }
    // Without node.json the names come from the records.
    if run.dir.path().join("disk/state/node.json").exists() {
        state.cards = loaded.node.cards.iter().map(|card| card.name.to_string()).collect();
    }
    assert_no_temporary_file(run);
    state
}

fn assert_no_temporary_file(run: &Run) {
    for dir in ["disk/state", "disk/state/claims", "disk/state/quarantine", "disk/cdi"] {
        for entry in fs::read_dir(run.dir.path().join(dir)).unwrap() {
            let path = entry.unwrap().path();
            assert!(path.extension().is_none_or(|extension| extension != "tmp"), "{} was left", path.display());
        }
    }
}

/// The calls of a life that nothing cuts.
fn whole_life() -> Vec<Call> {
    let whole = run(None, false);
    assert_eq!((whole.done, whole.signal), (Some(LIFE.len()), None));
    assert_eq!(found(&whole), after(LIFE.len()));
    whole.calls
}

/// Runs one check for each number from 1, a few at a time.
fn for_each(cases: usize, check: impl Fn(usize) + Sync) {
    let next = Mutex::new(1..=cases);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while let Some(number) = { next.lock().unwrap().next() } {
                    check(number);
                }
            });
        }
    });
}

/// Asserts that a run left the state before or after the act that it was cut in.
fn assert_old_or_new(run: &Run, what: &str) {
    let done = run.done.unwrap_or(0);
    let state = found(run);
    let next = LIFE.get(done).filter(|_| run.done.is_some());
    let new = next.map(|_| after(done + 1));
    assert!(
        state == after(done) || Some(&state) == new.as_ref(),
        "{what}, in act {:?}: {state:?}\nis neither {:?}\nnor {new:?}",
        next.map_or("open", |act| act.name),
        after(done)
    );
}

#[test]
fn a_kill_at_any_step_leaves_the_old_state_or_the_new() {
    let cases = whole_life().len();
    assert!(cases > 40, "{cases} calls");
    for action in [Action::KillBefore, Action::KillAfter] {
        for_each(cases, |number| {
            let run = run(Some(Cut { when: When::At(number), action }), false);
            // The very last call is made when the store is closed: all acts are done by then.
            assert_eq!(run.signal, Some(9), "call {number} of {cases}");
            assert_old_or_new(&run, &format!("{action:?} of call {number}: {:?}", run.calls.last()));
        });
    }
    eprintln!("store_crash: {} kills", cases * 2);
}

/// True for calls whose failure may be borne: the process id in the lock, and moving a damaged record aside or away (it
/// stays where it is, held, until the next load). What must not be borne shows in the state at the end.
fn may_be_borne(call: &Call) -> bool {
    let on_lock = call.path.ends_with("state/lock") && call.name != "open";
    on_lock || call.path.parent().is_some_and(|dir| dir.ends_with("quarantine"))
}

#[test]
fn an_error_at_any_step_is_reported_loses_nothing_and_is_over_when_tried_again() {
    let calls = whole_life();
    let cases = calls.len();
    for errno in [ENOSPC, EIO, EROFS] {
        for_each(cases, |number| {
            let run = run(Some(Cut { when: When::At(number), action: Action::Fail(errno) }), true);
            let call = &run.calls[number - 1];
            assert_eq!(run.done, Some(LIFE.len()), "call {number}, {call:?}: {:?}", run.failures);
            assert!(may_be_borne(call) || !run.failures.is_empty(), "call {number}, {call:?} failed unnoticed");
            for failure in &run.failures {
                assert!(failure.contains(&format!("(os error {errno})")), "{failure}");
                assert!(failure.contains(&run.dir.path().display().to_string()), "names a path: {failure}");
            }
            assert_no_temporary_file(&run);
            assert_eq!(found(&run), after(LIFE.len()), "call {number}, {call:?}");
        });
    }
    eprintln!("store_crash: {} single errors", cases * 3);
}

#[test]
fn a_disk_that_is_full_from_any_step_on_loses_nothing() {
    let cases = whole_life().len();
    for_each(cases, |number| {
        let run = run(Some(Cut { when: When::From(number), action: Action::Fail(ENOSPC) }), true);
        assert_old_or_new(&run, &format!("full from call {number} on"));
    });
    eprintln!("store_crash: {cases} full disks");
}

#[test]
fn what_is_reported_as_done_is_durable() {
    let calls = whole_life();
    let mut replaced = 0;
    for (index, call) in calls.iter().enumerate() {
        let dir = call.path.parent().unwrap();
        let is_json = call.path.extension().is_some_and(|extension| extension == "json");
        match call.name.as_str() {
            "rename" if !dir.ends_with("quarantine") => {
                replaced += 1;
                let before: Vec<_> = calls[index - 3..index].iter().map(|call| call.name.as_str()).collect();
                assert_eq!(before, ["open", "write", "fsync"], "{call:?}");
                assert!(calls[index - 1].path.extension().is_some_and(|extension| extension == "tmp"));
                assert_eq!(
                    (calls[index + 1].name.as_str(), calls[index + 1].path.as_path()),
                    ("fsync", dir),
                    "{call:?}"
                );
            }
            // The other claims have no damaged record to remove: nothing is to be made durable.
            "unlink" if dir.ends_with("quarantine") && !call.path.ends_with(format!("{}.json", uid("d"))) => {}
            "rename" | "unlink" if is_json => {
                let durable = calls[index..].iter().any(|later| later.name == "fsync" && later.path == dir);
                assert!(durable, "{call:?}");
            }
            _ => {}
        }
    }
    assert_eq!(replaced, 8, "one durable replace for each of the acts that write");
}

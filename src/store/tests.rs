use std::{fs::Permissions, os::unix::fs::PermissionsExt};

use serde_json::{Value, json};
use tempfile::TempDir;

use super::*;
use crate::domain::{
    claim::ClaimRef,
    health::{Action, Cause, FaultMemory, Level, Link},
    names::DeviceName,
    node::{CardMemory, Hold, HoldKind},
    npu::{PciAddress, StableId, Vdie},
    record::{Holding, Phase},
};

fn uid(n: u32) -> ClaimUid {
    ClaimUid::new(format!("8a1c1f0e-55aa-4c6f-9e57-{n:012}")).unwrap()
}

fn record(n: u32) -> Record {
    let stable_id = StableId::at_first_sight(Vdie::from_words([n, 2, 3, 4, 5]).as_ref(), PciAddress::default());
    Record {
        claim: ClaimRef { namespace: "default".to_owned(), name: format!("claim-{n}"), uid: uid(n) },
        boot_id: "b4c4c1f8-0000-4000-8000-000000000001".to_owned(),
        phase: Phase::Prepared,
        prepared_at: "2026-03-01T10:00:00Z".parse().unwrap(),
        devices: vec![Holding {
            requests: vec!["npu".to_owned()],
            pool: "node-1/npu".to_owned(),
            device: format!("npu-{n}"),
            cdi_device: format!("{}_{stable_id}", uid(n)),
            stable_id,
            physical_ids: vec![n],
            cut: None,
            admin_access: false,
            share_id: None,
        }],
    }
}

fn memory() -> NodeMemory {
    let card = CardMemory {
        name: DeviceName::new("npu-0").unwrap(),
        stable_id: StableId::from_text("pci-0000:c1:00.0").unwrap(),
        vdie: None,
        bus_id: "0000:c1:00.0".parse().unwrap(),
        faults: vec![
            FaultMemory {
                cause: Cause::Code(0x80E0_1801),
                action: Action::Evict,
                level: Level::Critical,
                since: jiff::Timestamp::UNIX_EPOCH,
            },
            FaultMemory {
                cause: Cause::Level,
                action: Action::Taint,
                level: Level::Major,
                since: jiff::Timestamp::UNIX_EPOCH,
            },
        ],
        link: Some(Link::Down),
        hold: Some(Hold { kind: HoldKind::Drain, reason: "a fan".to_owned(), since: jiff::Timestamp::UNIX_EPOCH }),
    };
    NodeMemory { cards: vec![card], suspended: None, ..NodeMemory::default() }
}

fn open(dir: &TempDir) -> Store {
    Store::open(dir.path().join("state"), None).unwrap()
}

/// Every path below a directory.
fn tree(dir: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(tree(&path));
        }
        found.push(path.display().to_string());
    }
    found.sort();
    found
}

/// As [`tree`], from the state directory and without its lock and directories.
fn files(store: &Store) -> Vec<String> {
    let root = format!("{}/", store.dir().display());
    let all = tree(store.dir()).into_iter().map(|path| path.replacen(&root, "", 1));
    all.filter(|path| !matches!(path.as_str(), "lock" | "claims" | "quarantine")).collect()
}

/// Changes the JSON of a stored file and puts a fitting checksum on it.
fn edit(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut value: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    value.as_object_mut().unwrap().remove("checksum");
    change(&mut value);
    let covered = format!("\",{}\n", &value.to_string()[1..]);
    let sealed = format!("{{\"checksum\":\"crc32:{:08x}{covered}", crc32fast::hash(covered.as_bytes()));
    fs::write(path, sealed).unwrap();
}

#[test]
fn what_is_written_is_loaded_by_the_next_one() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir);
    store.write(&record(2)).unwrap();
    store.write(&record(1)).unwrap();
    store.write(&record(3)).unwrap();
    store.remove(&uid(3)).unwrap();
    store.remove(&uid(3)).unwrap();
    store.settle().unwrap();
    store.write_node(&memory()).unwrap();
    drop(store);
    let store = open(&dir);
    let loaded = store.load().unwrap();
    assert_eq!(loaded.records, [record(1), record(2)]);
    assert_eq!(loaded.node, memory());
    assert!(loaded.quarantined.is_empty() && loaded.node_problem.is_none() && loaded.strangers.is_empty());
    assert_eq!(
        files(&store),
        [format!("claims/{}.json", uid(1)), format!("claims/{}.json", uid(2)), "node.json".into()]
    );
    let mode = |path: PathBuf| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    assert_eq!(mode(store.dir().to_owned()), 0o700);
    assert_eq!(mode(store.paths.record(&uid(1))), 0o600);
    assert_eq!(Store::read_only(store.dir()).unwrap().records, loaded.records, "also while the lock is held");
}

#[test]
fn a_second_owner_is_refused_and_told_the_process_of_the_first() {
    let dir = tempfile::tempdir().unwrap();
    let first = open(&dir);
    let error = Store::open(first.dir(), None).unwrap_err().to_string();
    assert!(error.contains(&format!("in use by process {}: ", std::process::id())), "{error}");
    let begun = Instant::now();
    assert!(Store::open(first.dir(), Some(Duration::from_millis(120))).is_err());
    assert!(begun.elapsed() >= Duration::from_millis(120));
    let path = first.dir().to_owned();
    let waiting = std::thread::spawn(move || Store::open(path, Some(Duration::from_secs(20))));
    drop(first);
    assert!(waiting.join().unwrap().is_ok(), "the waiting one gets it when the first ends");
}

#[test]
fn fields_of_another_version_survive_a_rewrite() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir);
    store.write(&record(1)).unwrap();
    store.write_node(&memory()).unwrap();
    edit(&store.paths.record(&uid(1)), |value| {
        value["host"] = json!("a");
        value["body"]["vnpus"] = json!([{"id": 101}]);
        value["body"]["devices"][0]["template"] = json!("vir05_1c_8g");
    });
    edit(&store.paths.node(), |value| value["body"]["cards"][0]["drained"] = json!(true));
    let mut changed = record(1);
    changed.boot_id = "another".to_owned();
    store.write(&changed).unwrap();
    store.write_node(&memory()).unwrap();
    let read = |path: PathBuf| serde_json::from_slice::<Value>(&fs::read(path).unwrap()).unwrap();
    let value = read(store.paths.record(&uid(1)));
    assert_eq!(value["host"], "a");
    assert_eq!(value["body"]["vnpus"][0]["id"], 101);
    assert_eq!(value["body"]["devices"][0]["template"], "vir05_1c_8g");
    assert_eq!(value["body"]["bootId"], "another");
    assert_eq!(read(store.paths.node())["body"]["cards"][0]["drained"], true);
    assert_eq!(store.load().unwrap().records, [changed]);
}

/// What is said of a damaged record, and how to damage the one at a path.
type Damage = (&'static str, fn(&Path));

fn damages() -> Vec<Damage> {
    vec![
        ("the file is empty", |path| fs::write(path, "").unwrap()),
        ("changed or cut off", |path| {
            let bytes = fs::read(path).unwrap();
            fs::write(path, &bytes[..bytes.len() / 2]).unwrap();
        }),
        ("changed or cut off", |path| {
            let mut bytes = fs::read(path).unwrap();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 0x10;
            fs::write(path, bytes).unwrap();
        }),
        ("does not begin with a checksum", |path| fs::write(path, "not json at all").unwrap()),
        ("cannot be read: is a directory", |path| {
            fs::remove_file(path).unwrap();
            fs::create_dir(path).unwrap();
            fs::write(path.join("inside"), "").unwrap();
        }),
        ("cannot be read: Too many levels of symbolic links", |path| {
            fs::remove_file(path).unwrap();
            std::os::unix::fs::symlink(path, path).unwrap();
        }),
        ("record of another claim", |path| {
            fs::copy(path.with_file_name(format!("{}.json", uid(2))), path).unwrap();
        }),
        ("missing field `devices`", |path| {
            edit(path, |value| {
                value["body"].as_object_mut().unwrap().remove("devices");
            });
        }),
    ]
}

#[test]
fn a_damaged_record_is_set_aside_alone_and_stays_so_until_it_is_rewritten_or_removed() {
    for (what, damage) in damages() {
        let dir = tempfile::tempdir().unwrap();
        let store = open(&dir);
        for n in 1..=3 {
            store.write(&record(n)).unwrap();
        }
        damage(&store.paths.record(&uid(1)));
        let before = tree(store.dir());
        let looked = Store::read_only(store.dir()).unwrap();
        assert_eq!(tree(store.dir()), before, "{what}: a look changes nothing");
        assert_eq!(looked.quarantined[0].path, store.paths.record(&uid(1)).display().to_string());
        for turn in ["first", "second"] {
            let loaded = store.load().unwrap();
            assert_eq!(loaded.records, [record(2), record(3)], "{what}, {turn} load");
            assert_eq!(loaded.quarantined.len(), 1);
            let quarantined = &loaded.quarantined[0];
            assert_eq!(quarantined.uid, uid(1));
            assert!(quarantined.why.contains(what), "{what}, {turn} load: {}", quarantined.why);
            assert_eq!(quarantined.path, store.paths.quarantined(&uid(1)).display().to_string());
            assert!(store.paths.quarantined(&uid(1)).symlink_metadata().is_ok());
            assert!(store.paths.record(&uid(1)).symlink_metadata().is_err());
        }
        store.write(&record(1)).unwrap();
        let loaded = store.load().unwrap();
        assert_eq!((loaded.records.len(), loaded.quarantined.len()), (3, 0), "{what}");
        assert_eq!(files(&store).len(), 3);

        damage(&store.paths.record(&uid(1)));
        store.load().unwrap();
        store.remove(&uid(1)).unwrap();
        let loaded = store.load().unwrap();
        assert_eq!((loaded.records.len(), loaded.quarantined.len()), (2, 0), "{what}");
        assert_eq!(files(&store).len(), 2);
    }
}

#[test]
fn a_record_that_cannot_be_opened_is_damaged_too() {
    if nix::unistd::geteuid().is_root() {
        return; // root opens everything
    }
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir);
    store.write(&record(1)).unwrap();
    fs::set_permissions(store.paths.record(&uid(1)), Permissions::from_mode(0o000)).unwrap();
    assert!(store.load().unwrap().quarantined[0].why.contains("Permission denied"));
}

#[test]
fn a_crash_between_rewriting_and_clearing_a_quarantined_record_ends_with_the_record() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir);
    store.write(&record(1)).unwrap();
    fs::write(store.paths.quarantined(&uid(1)), "damaged").unwrap();
    let loaded = store.load().unwrap();
    assert_eq!((loaded.records.len(), loaded.quarantined.len()), (1, 0));
    assert!(!store.paths.quarantined(&uid(1)).exists());
}

#[test]
fn what_cannot_be_made_durable_is_said_with_its_path() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir);
    fs::remove_dir(store.paths.claims()).unwrap();
    let error = store.settle().unwrap_err().to_string();
    let claims = store.paths.claims();
    assert!(error.starts_with(&format!("cannot make durable {}: No such file", claims.display())), "{error}");
}

#[test]
fn a_set_aside_record_that_can_be_read_again_still_waits_for_a_person() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir);
    store.write(&record(1)).unwrap();
    fs::rename(store.paths.record(&uid(1)), store.paths.quarantined(&uid(1))).unwrap();
    let loaded = store.load().unwrap();
    assert!(loaded.records.is_empty());
    assert!(loaded.quarantined[0].why.contains("it can be read now: stop the daemon and move it back to"));
}

#[test]
fn a_newer_format_stops_the_start_and_changes_nothing() {
    for of_node in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let store = open(&dir);
        store.write(&record(1)).unwrap();
        store.write(&record(2)).unwrap();
        store.write_node(&memory()).unwrap();
        fs::write(store.paths.record(&uid(1)), "damaged").unwrap();
        let path = if of_node { store.paths.node() } else { store.paths.record(&uid(2)) };
        edit(&path, |value| {
            value["format"] = json!(2);
            value["writer"] = json!("npu-dra 7.1.0");
        });
        let before = tree(store.dir());
        let error = store.load().unwrap_err().to_string();
        assert!(error.contains("has format 2, written by npu-dra 7.1.0"), "{error}");
        assert!(error.contains(&path.display().to_string()), "{error}");
        let lost = if of_node { "to forget the names, faults and holds of the cards" } else { "to forget the claim" };
        assert!(error.ends_with(lost), "{error}");
        assert!(Store::read_only(store.dir()).is_err());
        assert_eq!(tree(store.dir()), before);
    }
}

#[test]
fn a_damaged_node_memory_is_set_aside_and_held_cards_keep_their_names() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir);
    store.write(&record(4)).unwrap();
    store.write_node(&memory()).unwrap();
    fs::write(store.paths.node(), "{").unwrap();
    let loaded = store.load().unwrap();
    let problem = loaded.node_problem.unwrap();
    assert!(problem.contains("node.json is damaged: ") && problem.contains("node.json.damaged"), "{problem}");
    assert_eq!(loaded.node.cards.len(), 1);
    assert_eq!(loaded.node.cards[0].name.as_str(), "npu-4");
    assert_eq!(loaded.node.cards[0].stable_id, record(4).devices[0].stable_id);
    let again = store.load().unwrap();
    assert!(again.node_problem.unwrap().contains("node.json.damaged"), "until somebody has taken it away");
    assert_eq!(again.node, loaded.node);
    fs::remove_file(store.paths.damaged_node()).unwrap();
    assert!(store.load().unwrap().node_problem.is_none());
}

#[test]
fn leftovers_are_swept_and_strangers_are_named_but_left() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir);
    let temporary = format!("claims/.{}.json.1-0.tmp", uid(1));
    for name in [temporary.as_str(), ".node.json.1-1.tmp", "claims/README", "claims/a_b.json"] {
        fs::write(store.dir().join(name), "x").unwrap();
    }
    let looked = Store::read_only(store.dir()).unwrap();
    let mut loaded = store.load().unwrap();
    loaded.strangers.sort();
    assert_eq!(loaded.strangers, [store.dir().join("claims/README"), store.dir().join("claims/a_b.json")]);
    assert_eq!(looked.strangers.len(), 2);
    assert_eq!(files(&store), ["claims/README", "claims/a_b.json"]);
}

#[test]
fn a_state_directory_that_cannot_be_made_or_read_is_named_with_the_cause() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    let error = Store::open(&file, None).unwrap_err().to_string();
    assert!(error.contains(&format!("cannot create directory {}: ", file.display())), "{error}");
    let error = Store::read_only(dir.path().join("absent")).unwrap_err().to_string();
    assert!(error.contains("cannot read") && error.contains("absent: No such file"), "{error}");
}

#[test]
fn two_thousand_records_load() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir);
    for n in 0..2_000 {
        let bytes = encode(&record(n), None, RECORD_IDENTITY).unwrap();
        fs::write(store.paths.record(&uid(n)), bytes).unwrap();
    }
    store.write_node(&memory()).unwrap();
    let begun = Instant::now();
    let loaded = store.load().unwrap();
    eprintln!("2,000 records loaded in {:?}", begun.elapsed());
    assert_eq!(loaded.records.len(), 2_000);
}

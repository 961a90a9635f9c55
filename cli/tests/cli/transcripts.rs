//! Every command's output, as transcripts that are also documentation.

use npu_dra::{domain::record::Phase, store::Store};

use crate::fixture::{self, Daemon};

fn cases() -> trycmd::TestCases {
    let cases = trycmd::TestCases::new();
    // The width at which help is wrapped.
    cases.env("COLUMNS", "100");
    cases.register_bin("npuctl", std::path::Path::new(env!("CARGO_BIN_EXE_npuctl")));
    cases
}

#[test]
fn commands_print_what_their_transcripts_say() {
    let daemon = Daemon::start();
    let cases = cases();
    cases.env("NPUCTL_SOCKET", daemon.socket().to_str().unwrap());
    cases.insert_var("[SOCKET]", daemon.socket().to_str().unwrap().to_owned()).unwrap();
    cases.insert_var("[VERSION]", env!("CARGO_PKG_VERSION")).unwrap();
    cases.case("tests/cli/transcripts/online/*.trycmd");
    cases.run();
    drop(daemon);
}

#[test]
fn a_card_that_is_split_shows_its_parts() {
    let daemon = Daemon::start();
    daemon.world.change(fixture::split);
    let cases = cases();
    cases.env("NPUCTL_SOCKET", daemon.socket().to_str().unwrap());
    cases.case("tests/cli/transcripts/split/*.trycmd");
    cases.run();
    drop(daemon);
}

#[test]
fn a_card_that_others_use_too_shows_who_and_what_is_lost() {
    let daemon = Daemon::start();
    daemon.world.change(fixture::disturbed);
    let cases = cases();
    cases.env("NPUCTL_SOCKET", daemon.socket().to_str().unwrap());
    cases.case("tests/cli/transcripts/disturbed/*.trycmd");
    cases.run();
    drop(daemon);
}

#[test]
fn an_operator_makes_and_destroys_vnpus() {
    let daemon = Daemon::start();
    daemon.world.change(fixture::sliced);
    let cases = cases();
    cases.env("NPUCTL_SOCKET", daemon.socket().to_str().unwrap());
    cases.insert_var("[SOCKET]", daemon.socket().to_str().unwrap().to_owned()).unwrap();
    cases.case("tests/cli/transcripts/operator/*.trycmd");
    cases.run();
    drop(daemon);
}

#[test]
fn an_operator_drains_and_cordons_cards() {
    let daemon = Daemon::start();
    let cases = cases();
    cases.env("NPUCTL_SOCKET", daemon.socket().to_str().unwrap());
    cases.case("tests/cli/transcripts/held/*.trycmd");
    cases.run();
    drop(daemon);
}

#[test]
fn an_operator_takes_the_driver_away_and_gives_it_back() {
    let daemon = Daemon::start();
    let cases = cases();
    cases.env("NPUCTL_SOCKET", daemon.socket().to_str().unwrap());
    cases.insert_var("[SOCKET]", daemon.socket().to_str().unwrap().to_owned()).unwrap();
    cases.case("tests/cli/transcripts/backend/*.trycmd");
    cases.run();
    drop(daemon);
}

#[test]
fn root_sees_the_records_while_the_daemon_is_down() {
    if !fixture::is_root() {
        // Others get an error: see the test of that.
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (state, socket) = (dir.path().join("state"), dir.path().join("admin.sock"));
    let (inventory, memory) = fixture::cards();
    let store = Store::open(&state, None).unwrap();
    for record in fixture::records(inventory.npus()) {
        assert_eq!(record.phase, Phase::Prepared);
        store.write(&record).unwrap();
    }
    store.write_node(&memory).unwrap();
    drop(store);
    std::fs::write(state.join("claims").join(format!("{}.json", fixture::DAMAGED)), "not a record").unwrap();
    let before = files(&state);
    let cases = cases();
    cases.env("NPUCTL_SOCKET", socket.to_str().unwrap());
    cases.env("NPUCTL_STATE_DIR", state.to_str().unwrap());
    cases.insert_var("[STATE]", state.to_str().unwrap().to_owned()).unwrap();
    cases.insert_var("[SOCKET]", socket.to_str().unwrap().to_owned()).unwrap();
    cases.case("tests/cli/transcripts/offline/*.trycmd");
    cases.run();
    assert_eq!(files(&state), before, "looking changes nothing");
}

/// Every file below a directory, with what is in it.
fn files(dir: &std::path::Path) -> Vec<(std::path::PathBuf, Vec<u8>)> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            all.extend(files(&path));
        } else {
            all.push((path.clone(), std::fs::read(&path).unwrap()));
        }
    }
    all.sort();
    all
}

#[test]
fn json_and_yaml_are_one_document_with_exact_bytes() {
    let daemon = Daemon::start();
    for args in [
        &["devices"][..],
        &["device", "npu-0"],
        &["claims", "list"],
        &["claims", "show", fixture::TRAIN],
        &["slices"],
        &["status"],
        &["version"],
        &["vnpu", "list", "-q"],
        &["vnpu", "templates"],
    ] {
        let form = |form: &str| fixture::run(&mut daemon.npuctl(&[args, &["-o", form]].concat()));
        let ((_, json, _), (code, yaml, words)) = (form("json"), form("yaml"));
        assert_eq!((code, words.as_str()), (0, ""), "{args:?}");
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        let yaml: serde_json::Value = serde_saphyr::from_str(&yaml).unwrap();
        assert_eq!(json, yaml, "{args:?}");
        assert_eq!(json["apiVersion"], "npuctl/v1");
        assert!(json["kind"].is_string() && json["items"].is_array(), "{json}");
    }
    let (_, json, _) = fixture::run(&mut daemon.npuctl(&["device", "npu-0", "-o", "json"]));
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["items"][0]["memoryBytes"], 68_719_476_736_u64);
}

#[test]
fn there_is_no_colour_off_a_terminal_unless_asked_for() {
    let daemon = Daemon::start();
    let coloured = |args: &[&str], no_color: &str| {
        let (code, data, _) = fixture::run(daemon.npuctl(args).env("NO_COLOR", no_color));
        assert_eq!(code, 0);
        data.contains('\x1b')
    };
    assert!(!coloured(&["devices"], ""));
    assert!(!coloured(&["devices"], "1"));
    assert!(!coloured(&["devices", "--color", "never"], ""));
    assert!(coloured(&["devices", "--color", "always"], ""));
    assert!(!coloured(&["devices", "--color", "always", "-o", "json"], ""));
}

#[test]
fn a_reader_that_has_gone_is_no_failure() {
    let daemon = Daemon::start();
    for args in [&["devices"][..], &["devices", "-o", "json"], &["completion", "bash"], &["status"], &["--help"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = daemon.npuctl(args).stdout(writer).output().unwrap();
        let (code, _, words) = fixture::result(&output);
        assert_eq!((code, words.as_str()), (0, ""), "{args:?}");
    }
}

#[test]
fn release_frees_the_card_and_tells_whose_it_was() {
    let daemon = Daemon::start();
    let (code, data, words) = fixture::run(&mut daemon.npuctl(&["claims", "release", fixture::TRAIN, "--force"]));
    assert_eq!((code, data.as_str()), (0, ""));
    assert_eq!(words, format!("npuctl: claim ml/train-0 (UID {}) is released\n", fixture::TRAIN));
    let (_, data, _) = fixture::run(&mut daemon.npuctl(&["devices", "npu-0", "--no-headers"]));
    assert!(data.contains("free   -"), "{data}");
    let (code, ..) = fixture::run(&mut daemon.npuctl(&["claims", "show", fixture::TRAIN]));
    assert_eq!(code, 3);
}

#[test]
fn a_claim_has_the_same_cdi_devices_online_and_offline() {
    if !fixture::is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (state, socket) = (dir.path().join("state"), dir.path().join("absent.sock"));
    let store = Store::open(&state, None).unwrap();
    for record in fixture::records(fixture::cards().0.npus()) {
        store.write(&record).unwrap();
    }
    drop(store);
    let args = ["claims", "show", fixture::TRAIN, "-o", "json"];
    let devices = |command: &mut std::process::Command| {
        let (_, json, words) = fixture::run(command);
        let json: serde_json::Value = serde_json::from_str(&json).expect(&words);
        json["items"][0]["devices"][0]["cdiDevice"].as_str().unwrap().to_owned()
    };
    let daemon = Daemon::start();
    let online = devices(&mut daemon.npuctl(&args));
    assert!(online.starts_with("npu.huawei.com/npu="), "{online}");
    let offline = |driver: &str| {
        devices(fixture::npuctl(&socket, &args).env("NPUCTL_STATE_DIR", &state).env("DRIVER_NAME", driver))
    };
    assert_eq!(offline(""), online);
    assert_eq!(offline("npu.example.com"), online.replace("npu.huawei.com", "npu.example.com"));
}

#[test]
fn a_reason_that_is_too_long_or_has_more_than_one_line_is_exit_2() {
    let daemon = Daemon::start();
    let long = "x".repeat(257);
    for command in [&["cordon", "npu-0"][..], &["drain", "npu-0"], &["backend", "suspend"]] {
        for (reason, why) in [
            (long.as_str(), "npuctl: the reason has 257 bytes; at most 256 are allowed\n"),
            ("two\nlines", "npuctl: the reason has a line break or another control character"),
        ] {
            let (code, data, words) = fixture::run(&mut daemon.npuctl(&[command, &["--reason", reason]].concat()));
            assert_eq!((code, data.as_str()), (2, ""), "{command:?}: {words}");
            assert!(words.starts_with(why) && !words.contains("journalctl"), "{words}");
        }
        let (code, ..) = fixture::run(&mut daemon.npuctl(&[command, &["--reason", &long[1..]]].concat()));
        assert_eq!(code, 0, "{command:?}");
    }
}

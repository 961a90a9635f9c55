//! vNPUs through a vendor library that hangs, dies, lies, lacks calls or is in somebody else's hands.

use std::{
    collections::BTreeSet,
    fs,
    time::{Duration, Instant},
};

use dcmi::{
    testing::strip_symbols,
    world::{Action, DiePolicy, Fault as Planted, Process, Profile},
};
use npu_dra::{
    device::{Fault, Settings, VendorMode},
    domain::vnpu::Resources,
};

use super::{fixture::Dcmi, scanned};

const CREATE: &str = "dcmi_create_vdevice";
const DESTROY: &str = "dcmi_set_destroy_vdevice";
const QUERY: &str = "dcmi_get_device_info";
const PROCESSES: &str = "dcmi_get_device_resource_info";
const MODE: &str = "dcmi_get_vdevice_mode";
const REPLAY: &str = "dcmi_get_vnpu_config_recover_mode";
const SET_REPLAY: &str = "dcmi_set_vnpu_config_recover_mode";
const QUARTER: &str = "vir05_1c_8g";

fn vnpus(node: &Dcmi) -> Vec<u32> {
    node.world.vnpus().unwrap().iter().map(|vnpu| vnpu.id).collect()
}

fn plant(node: &Dcmi, fault: Planted) {
    node.world.faults().set([fault]).unwrap();
}

async fn ids(node: &Dcmi, physical_id: u32) -> Vec<u32> {
    node.backend().card(physical_id).await.unwrap().ids()
}

/// What a fault that says nothing of the outcome says.
fn why<T: std::fmt::Debug>(outcome: Result<T, Fault>) -> String {
    match outcome {
        Err(Fault::Failed { call, why, .. }) => format!("{call}: {why}"),
        other => panic!("{other:?}"),
    }
}

fn is_busy<T>(outcome: &Result<T, Fault>, code: &str) -> bool {
    matches!(outcome, Err(Fault::Busy { why, .. }) if why.contains(code))
}

/// How many processes have made calls.
fn workers(node: &Dcmi) -> usize {
    node.world.calls().unwrap().list.iter().map(|call| call.pid).collect::<BTreeSet<_>>().len()
}

#[tokio::test]
async fn a_library_that_dies_in_a_create_or_destroy_costs_one_error_and_the_card_tells_what_happened() {
    let plan = |function, action| Planted::new(function, action).times(1);
    for action in [Action::Crash, Action::KillSelf] {
        for (planted, there) in [
            (plan(CREATE, action), false),
            (plan(CREATE, action).during(), true),
            (plan(CREATE, action).after(), true),
            (plan(DESTROY, action), true),
            (plan(DESTROY, action).during(), false),
            (plan(DESTROY, action).after(), false),
        ] {
            let node = Dcmi::of(Profile::Many(2));
            let (function, when) = (planted.function.clone(), planted.when);
            let case = format!("{function} {when:?} {action:?}");
            scanned(node.backend()).await;
            if function == DESTROY {
                assert_eq!(node.backend().create(1, QUARTER, 120).await, Ok(120));
            }
            plant(&node, planted);
            let said = match function.as_str() {
                CREATE => why(node.backend().create(1, QUARTER, 120).await),
                _ => why(node.backend().destroy(1, 120).await),
            };
            assert!(said.contains(&function) && said.contains("died of SIG"), "{case}: {said}");
            assert_eq!(ids(&node, 1).await, if there { vec![120] } else { vec![] }, "{case}");
            assert_eq!(workers(&node), 2, "{case}: one worker died, one came");
            assert_eq!(node.backend().destroy(1, 120).await, Ok(()), "{case}");
            assert_eq!(vnpus(&node), [0; 0], "{case}");
        }
    }
}

#[tokio::test]
async fn a_create_or_destroy_that_hangs_ends_at_its_deadline_and_the_card_tells_what_happened() {
    for (function, when_after, there) in
        [(CREATE, false, false), (CREATE, true, true), (DESTROY, false, true), (DESTROY, true, false)]
    {
        let node = Dcmi::with(Profile::Many(2), |settings| settings.timing.cut = Duration::from_secs(1));
        assert_eq!(node.backend().card(0).await.unwrap().ids(), [0; 0]);
        if function == DESTROY {
            assert_eq!(node.backend().create(0, QUARTER, 100).await, Ok(100));
        }
        let fault = Planted::new(function, Action::Hang).times(1);
        plant(&node, if when_after { fault.after() } else { fault });
        let start = Instant::now();
        let said = match function {
            CREATE => why(node.backend().create(0, QUARTER, 100).await),
            _ => why(node.backend().destroy(0, 100).await),
        };
        assert!(said.contains(function) && said.contains("no answer within 1 s"), "{said}");
        assert!(start.elapsed() < Duration::from_secs(15), "{:?}", start.elapsed());
        let hung = node.world.calls().unwrap().unfinished().last().unwrap().pid;
        assert!(!super::faults::lives(hung), "the hanging worker is reaped");
        assert_eq!(ids(&node, 0).await, if there { vec![100] } else { vec![] }, "{function} after: {when_after}");
    }
}

#[tokio::test]
async fn a_chip_that_hangs_again_and_again_when_its_vnpus_are_read_is_left_alone_for_a_while() {
    let node = Dcmi::with(Profile::Many(2), |settings| {
        settings.timing.read = Duration::from_secs(2);
        settings.timing.back_off = Duration::from_mins(1);
    });
    scanned(node.backend()).await;
    plant(&node, Planted::new(QUERY, Action::Crash).card(1));
    for _ in 0..2 {
        assert!(why(node.backend().card(1).await).contains("52, 1"));
    }
    let fault = node.backend().card(1).await;
    assert!(matches!(&fault, Err(Fault::NotReady { why, .. }) if why.contains("2 losses")), "{fault:?}");
    assert_eq!(ids(&node, 0).await, [0; 0], "the other chip is served");
    assert_eq!(node.backend().health().await.unwrap().len(), 2, "and both are polled");
    assert_eq!(workers(&node), 3, "two died, the third goes on");
}

#[tokio::test]
async fn refusals_are_told_apart_by_what_helps() {
    let node = Dcmi::of(Profile::Many(2));
    scanned(node.backend()).await;
    for code in [-8013, -8020] {
        for function in [CREATE, DESTROY] {
            plant(&node, Planted::new(function, Action::Return(code)));
            let busy = match function {
                CREATE => is_busy(&node.backend().create(0, QUARTER, 100).await, &code.to_string()),
                _ => is_busy(&node.backend().destroy(0, 100).await, &code.to_string()),
            };
            assert!(busy, "{function} {code}");
        }
    }
    plant(&node, Planted::new(CREATE, Action::Return(-8001)));
    let said = why(node.backend().create(0, QUARTER, 100).await);
    assert!(["-8001", "fit", "process", "template"].iter().all(|word| said.contains(word)), "{said}");
    plant(&node, Planted::new(CREATE, Action::Return(-8002)));
    assert!(why(node.backend().create(0, QUARTER, 100).await).contains("root"));
    for code in [-8003, -8005, -8006, -8008, -8010, -8012, -8017, -1, 1] {
        plant(&node, Planted::new(CREATE, Action::Return(code)));
        assert!(why(node.backend().create(0, QUARTER, 100).await).contains(&code.to_string()));
    }
    node.world.faults().clear().unwrap();
    assert_eq!(node.backend().create(0, QUARTER, 100).await, Ok(100));
    plant(&node, Planted::new(DESTROY, Action::Return(-8008)));
    assert_eq!(node.backend().destroy(0, 100).await, Ok(()));
    plant(&node, Planted::new(DESTROY, Action::Return(-8001)));
    assert!(is_busy(&node.backend().destroy(0, 100).await, "-8001"), "it still exists: it is in use");
    node.world.remove_vnpu(100).unwrap();
    assert_eq!(node.backend().destroy(0, 100).await, Ok(()), "a bad parameter for one that is gone");
    for code in [-8002, -8005, -8006, -8014] {
        plant(&node, Planted::new(DESTROY, Action::Return(code)));
        assert!(why(node.backend().destroy(0, 100).await).contains(&code.to_string()));
    }
}

#[tokio::test]
async fn a_busy_chip_that_answers_bad_parameter_says_that_a_process_may_be_the_reason() {
    let node = Dcmi::of(Profile::Many(2));
    scanned(node.backend()).await;
    node.world.edit(|data| data.slicing.busy_code = -8001).unwrap();
    node.world.set_processes(0, &[Process { pid: 4711, bytes: 1 }]).unwrap();
    assert!(why(node.backend().create(0, QUARTER, 100).await).contains("a process runs on the chip"));
    assert_eq!(node.backend().card(0).await.unwrap().processes, Some(vec![4711]));
}

#[tokio::test]
async fn the_vendors_lock_in_other_hands_is_busy_and_nothing_is_left() {
    let node = Dcmi::of(Profile::Many(2));
    scanned(node.backend()).await;
    node.world.edit(|data| data.slicing.lock_wait_ms = 20).unwrap();
    let lock = node.world.hold_config_lock().unwrap();
    assert!(is_busy(&node.backend().create(0, QUARTER, 100).await, "-8020"));
    assert_eq!(ids(&node, 0).await, [0; 0]);
    drop(lock);
    assert_eq!(node.backend().create(0, QUARTER, 100).await, Ok(100));
    let lock = node.world.hold_config_lock().unwrap();
    assert!(is_busy(&node.backend().destroy(0, 100).await, "-8020"));
    assert_eq!(ids(&node, 0).await, [101], "the library made it again");
    drop(lock);
    assert_eq!(node.backend().destroy(0, 101).await, Ok(()));
}

#[tokio::test]
async fn an_error_although_the_last_vnpu_is_gone_is_an_error_and_the_card_is_empty() {
    let node = Dcmi::of(Profile::Many(2));
    assert_eq!(node.backend().create(0, QUARTER, 100).await, Ok(100), "the first call starts the library");
    node.world.edit(|data| data.slicing.sriov_off_code = Some(-8009)).unwrap();
    assert!(why(node.backend().destroy(0, 100).await).contains("-8009"));
    assert_eq!(ids(&node, 0).await, [0; 0]);
}

#[tokio::test]
async fn rubbish_in_the_result_of_a_create_is_no_id() {
    for (action, there) in [(Action::Garbage, true), (Action::Return(0), false)] {
        let node = Dcmi::of(Profile::Many(2));
        scanned(node.backend()).await;
        plant(&node, Planted::new(CREATE, action).times(1));
        let said = why(node.backend().create(1, QUARTER, 118).await);
        assert!(said.contains("impossible") && said.contains("read"), "{said}");
        assert_eq!(ids(&node, 1).await, if there { vec![118] } else { vec![] });
    }
}

#[tokio::test]
async fn rubbish_in_a_reading_is_a_fault_and_never_an_empty_card() {
    let node = Dcmi::of(Profile::Many(2));
    scanned(node.backend()).await;
    assert_eq!(node.backend().create(0, QUARTER, 100).await, Ok(100));
    // Calls of a reading: list, one vNPU, what is left.
    for action in [Action::Garbage, Action::Return(0), Action::Return(-8005), Action::Return(-8012)] {
        for skip in 0..3 {
            plant(&node, Planted::new(QUERY, action).skip(skip).times(1));
            let reading = node.backend().card(0).await;
            // A query of which nothing came back could be of one vNPU or of what is left.
            assert!(matches!(reading, Err(Fault::Failed { .. })), "{action:?} {skip}: {reading:?}");
        }
        plant(&node, Planted::new(PROCESSES, action).times(1));
        match (action, node.backend().card(0).await) {
            (Action::Return(-8012), reading) => assert!(reading.is_err(), "{reading:?}"),
            (_, reading) => assert_eq!(reading.unwrap().processes, None, "{action:?}"),
        }
    }
    node.world.faults().clear().unwrap();
    assert_eq!(ids(&node, 0).await, [100]);
}

#[tokio::test]
async fn a_vnpu_that_goes_while_its_card_is_read_is_not_in_the_reading() {
    let node = Dcmi::of(Profile::Many(2));
    scanned(node.backend()).await;
    for id in [100, 101] {
        assert_eq!(node.backend().create(0, QUARTER, id).await, Ok(id));
    }
    plant(&node, Planted::new(QUERY, Action::Return(-8008)).skip(2).times(1));
    assert_eq!(ids(&node, 0).await, [100, 101], "read again: it is there after all");
    plant(&node, Planted::new(QUERY, Action::Return(-8008)).skip(1));
    assert!(node.backend().card(0).await.is_err(), "listed, and unknown, for ever");
}

#[tokio::test]
async fn as_many_processes_as_a_query_tells_are_read() {
    let node = Dcmi::of(Profile::Many(2));
    scanned(node.backend()).await;
    let processes: Vec<_> = (1..=32).map(|pid| Process { pid, bytes: 1 }).collect();
    node.world.set_processes(0, &processes).unwrap();
    assert_eq!(node.backend().card(0).await.unwrap().processes, Some((1..=32).collect()));
}

#[tokio::test]
async fn names_and_sizes_are_told_as_the_library_tells_them() {
    let node = Dcmi::of(Profile::Ascend910B2);
    scanned(node.backend()).await;
    node.world.edit(|data| data.slicing.real_memory_mb = Some(7168)).unwrap();
    node.world.edit(|data| data.slicing.real_name = Some("vir06_1c_16g_and_a_long_rest".to_owned())).unwrap();
    assert_eq!(node.backend().create(0, "vir06_1c_16g", 100).await, Ok(100));
    let reading = node.backend().card(0).await.unwrap();
    let vnpu = &reading.vnpus[0];
    assert_eq!((vnpu.template.as_str(), vnpu.memory, vnpu.ai_cores), ("vir06_1c_16g_an", 7168 << 20, 6));
    let memory = (65_536 - 7168) << 20;
    assert_eq!(reading.free, Some(Resources { memory, ai_cores: 18, ai_cpus: 5, media: 21 }));
}

/// A node whose library lacks these symbols.
fn without(profile: Profile, symbols: &[&str]) -> Dcmi {
    let node = Dcmi::of(profile);
    let library = node.dir.path().join("libdcmi.so");
    strip_symbols(&dcmi::library_path(), &library, symbols).unwrap();
    let settings = Settings { library: Some(library), ..node.settings.clone() };
    node.behind(settings)
}

#[tokio::test]
async fn a_library_without_calls_for_vnpus_makes_none_and_names_them() {
    for symbol in [CREATE, DESTROY, QUERY] {
        let node = without(Profile::Many(2), &[symbol]);
        assert_eq!(scanned(node.backend()).await.chips.len(), 2);
        let faults = [
            node.backend().card(0).await.map(drop),
            node.backend().create(0, QUARTER, 100).await.map(drop),
            node.backend().destroy(0, 100).await,
            node.backend().vendor().await.map(drop),
        ];
        for fault in faults {
            assert!(matches!(&fault, Err(Fault::Unsupported { why, .. }) if why.contains(symbol)), "{fault:?}");
        }
        let calls = node.world.calls().unwrap();
        assert_eq!([CREATE, DESTROY, QUERY].map(|function| calls.count(function)), [0; 3], "nothing is called");
    }
}

#[tokio::test]
async fn a_library_without_the_rest_still_cuts() {
    let node = without(Profile::Many(2), &[MODE, REPLAY, SET_REPLAY, PROCESSES]);
    scanned(node.backend()).await;
    assert_eq!(node.backend().create(0, QUARTER, 100).await, Ok(100));
    assert_eq!(node.backend().card(0).await.unwrap().processes, None);
    let vendor = node.backend().vendor().await.unwrap();
    assert_eq!(vendor, VendorMode { replay: Some(true), listed: vec![100], virtual_machines: None }, "by the file");
    let fault = node.backend().set_replay(false).await;
    assert!(matches!(&fault, Err(Fault::Unsupported { .. })), "{fault:?}");
}

#[tokio::test]
async fn a_chip_that_cannot_be_cut_is_asked_once() {
    for profile in [Profile::Ascend910C(DiePolicy::Value(1)), Profile::Ascend910CSliced(DiePolicy::Value(0))] {
        let node = Dcmi::of(profile);
        scanned(node.backend()).await;
        for _ in 0..3 {
            let fault = node.backend().card(2).await;
            assert!(matches!(&fault, Err(Fault::Unsupported { why, .. }) if why.contains("-8255")), "{fault:?}");
        }
        assert_eq!(node.world.calls().unwrap().count(QUERY), 1);
        let fault = node.backend().create(2, "vir05_1c_16g", 132).await;
        assert!(matches!(&fault, Err(Fault::Unsupported { .. })), "{fault:?}");
        let vendor = node.backend().vendor().await.unwrap();
        assert_eq!(vendor, VendorMode { replay: None, listed: vec![], virtual_machines: Some(false) });
        assert!(matches!(node.backend().set_replay(false).await, Err(Fault::Unsupported { .. })));
    }
}

#[tokio::test]
async fn the_list_for_the_next_boot_is_read_with_care() {
    let node = Dcmi::of(Profile::Many(2));
    scanned(node.backend()).await;
    let path = node.host().join("etc/vnpu.cfg");
    fs::write(
        &path,
        b"vnpu_config_recover:enable\n[vnpu-config start]\n0:100:x\nrubbish\n\xff\n1:65535:all\n1:117:y\n",
    )
    .unwrap();
    let vendor = node.backend().vendor().await;
    // The vendor's own library cannot read such a file; what it lists counts all the same.
    assert_eq!(vendor.map(|vendor| (vendor.replay, vendor.listed)), Ok((Some(true), vec![100, 117])));
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    let said = why(node.backend().vendor().await);
    assert!(said.contains(path.to_str().unwrap()) && said.contains("regular"), "unknown is not empty: {said}");
    assert!(why(node.backend().set_replay(false).await).contains("/etc/vnpu.cfg"));
}

#[tokio::test]
async fn a_mode_that_cannot_be_read_is_unknown() {
    let node = Dcmi::of(Profile::Many(2));
    scanned(node.backend()).await;
    let planted = [Action::Return(-8002), Action::Return(0), Action::Garbage]
        .map(|action| [Planted::new(MODE, action), Planted::new(REPLAY, action)]);
    for faults in planted {
        node.world.faults().set(faults).unwrap();
        assert_eq!(node.backend().vendor().await.unwrap(), VendorMode::default());
    }
}

#[tokio::test]
async fn a_mode_call_that_hangs_ends_at_its_deadline() {
    for function in [MODE, REPLAY, SET_REPLAY] {
        let node = Dcmi::with(Profile::Many(2), |settings| {
            (settings.timing.read, settings.timing.cut) = (Duration::from_secs(2), Duration::from_secs(2));
        });
        scanned(node.backend()).await;
        plant(&node, Planted::new(function, Action::Hang).times(1));
        let said = match function {
            SET_REPLAY => why(node.backend().set_replay(false).await),
            _ => why(node.backend().vendor().await),
        };
        assert!(said.contains(function) && said.contains("no answer"), "{said}");
        assert_eq!(node.backend().vendor().await.unwrap().replay, Some(true));
        assert_eq!(node.backend().set_replay(false).await, Ok(()));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_first_slice_that_takes_long_delays_reads_and_does_not_fail_them() {
    let node = Dcmi::with(Profile::Many(4), |settings| settings.timing.read = Duration::from_secs(1));
    scanned(node.backend()).await;
    node.world.edit(|data| data.slicing.first_ms = 1500).unwrap();
    let backend = node.backend();
    let (slow, other, card, health) = futures::join!(
        backend.create(0, QUARTER, 100),
        backend.create(1, QUARTER, 116),
        backend.card(2),
        backend.health()
    );
    assert_eq!((slow, other), (Ok(100), Ok(116)));
    assert!(card.is_ok() && health.unwrap().len() == 4);
    assert_eq!(workers(&node), 1);
    let calls = node.world.calls().unwrap();
    let order: Vec<_> = calls.list.iter().map(|call| call.function.as_str()).collect();
    let second = order.iter().rposition(|function| *function == CREATE).unwrap();
    let read = order.iter().position(|function| *function == QUERY).unwrap();
    assert!(second < read, "both creates go before the reading");
}

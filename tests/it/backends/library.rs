//! What the vendor library says, and what the driver makes of it.

use std::{fs, os::unix::fs::PermissionsExt as _, path::Path, time::Duration};

use dcmi::{
    NEWER_SYMBOLS,
    testing::strip_symbols,
    world::{Action, ChipState, Data, DiePolicy, Fault as Planted, Profile},
};
use npu_dra::{
    device::{Fault, Settings},
    domain::{
        health::{HealthReading, Level},
        npu::{Family, Scan},
    },
};

use super::{
    fixture::{Dcmi, plug, unplug},
    scanned,
};

async fn reading(node: &Dcmi, physical_id: u32) -> HealthReading {
    node.backend().health().await.unwrap()[&physical_id].clone()
}

/// Every field of every chip against the world, joined by physical id.
fn assert_like(scan: &Scan, data: &Data) {
    assert_eq!(scan.chips.len(), data.chips().count());
    for chip in &scan.chips {
        let real = data.chip(chip.physical_id).unwrap();
        let card = data.card_of(chip.physical_id).unwrap();
        assert_eq!(chip.bus_id.to_string(), real.bus);
        assert_eq!(chip.chip_name, real.chip_name);
        assert_eq!(chip.ai_cores, Some(real.aicores));
        assert_eq!(chip.memory, Some(real.memory.mb() << 20));
        assert_eq!(chip.board_id, Some(card.board_id));
        assert_eq!(chip.numa_node, u32::try_from(real.numa).ok());
        assert_eq!(chip.pcie_root, Some(format!("pci{}:c0", &real.bus[..4])));
        let words = real.vdie.map(|word| format!("{word:08X}")).join("-");
        assert_eq!(chip.vdie.as_ref().unwrap().as_str(), words);
        assert_eq!(chip.health.temperature, Some(real.temperature));
        assert_eq!(chip.health.power, Some(real.power));
        assert_eq!(chip.health.level, Level::Ok);
        let place = card.chips.iter().position(|other| other.phy == chip.physical_id).unwrap();
        assert_eq!(chip.device_id, i32::try_from(place).unwrap());
    }
}

#[tokio::test]
async fn every_field_of_every_chip_is_that_of_its_own_card_in_any_order() {
    for profile in [Profile::Ascend910B4, Profile::Ascend910B3, Profile::Ascend910B2, Profile::Mixed] {
        let node = Dcmi::of(profile);
        let count = node.world.data().unwrap().cards.len();
        let reverse: Vec<usize> = (0..count).rev().collect();
        node.world.reorder_cards(&reverse).unwrap();
        let scan = scanned(node.backend()).await;
        assert_like(&scan, &node.world.data().unwrap());
        assert_eq!(scan.driver_version, node.world.data().unwrap().driver_version);
        let first = scan.chips.iter().find(|chip| chip.logic_id == Some(0)).unwrap();
        assert_ne!(first.physical_id, 0, "logic and physical ids differ in this world");
    }
}

#[tokio::test]
async fn a_310p_has_ddr_sparse_card_numbers_and_an_mcu_that_is_no_npu() {
    let node = Dcmi::of(Profile::Ascend310P3);
    let scan = scanned(node.backend()).await;
    assert_like(&scan, &node.world.data().unwrap());
    assert_eq!(scan.chips.iter().map(|chip| chip.card_id).collect::<Vec<_>>(), [Some(2), Some(5)]);
    assert!(scan.chips.iter().all(|chip| chip.family == Family::Ascend310P));
    assert!(scan.links.is_empty());
}

#[tokio::test]
async fn the_dies_of_a_910c_are_bound_unless_the_policy_says_one() {
    for (policy, bound) in
        [(DiePolicy::Value(0), true), (DiePolicy::Value(1), false), (DiePolicy::Unreadable(-8005), true)]
    {
        let node = Dcmi::of(Profile::Ascend910C(policy));
        let scan = scanned(node.backend()).await;
        assert_like(&scan, &node.world.data().unwrap());
        assert_eq!(scan.dies_bound, bound, "{policy:?}");
        assert!(scan.chips.iter().all(|chip| chip.family == Family::Ascend910C));
        assert!(scan.chips.iter().all(|chip| chip.card_id == i32::try_from(chip.physical_id / 2).ok()));
        assert_eq!(scan.links.len(), 120, "all pairs of sixteen dies");
    }
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
async fn an_old_driver_lacks_calls_and_is_read_all_the_same() {
    let node = without(Profile::Old, NEWER_SYMBOLS);
    assert_like(&scanned(node.backend()).await, &node.world.data().unwrap());
}

#[tokio::test]
async fn a_910c_of_a_driver_without_die_policy_is_bound() {
    let node = without(Profile::Ascend910C(DiePolicy::Value(1)), &["dcmi_get_multi_die_policy"]);
    assert!(scanned(node.backend()).await.dies_bound);
}

#[tokio::test]
async fn every_optional_call_may_be_missing() {
    let optional = [
        "dcmi_get_driver_version",
        "dcmi_get_device_id_in_card",
        "dcmi_get_fault_device_num_in_card",
        "dcmi_get_device_type",
        "dcmi_get_device_chip_info",
        "dcmi_get_device_board_info",
        "dcmi_get_device_die_v2",
        "dcmi_get_device_hbm_info",
        "dcmi_get_device_boot_status",
        "dcmi_get_product_type",
        "dcmi_get_device_errorcode_v2",
        "dcmi_get_device_temperature",
        "dcmi_get_device_power_info",
        "dcmi_get_topo_info_by_device_id",
    ];
    let node = without(Profile::Ascend910B4, &optional);
    let scan = scanned(node.backend()).await;
    assert_eq!(scan.chips.len(), 8);
    assert!(scan.chips.iter().all(|chip| chip.vdie.is_none() && chip.memory.is_none()));
    assert!(scan.chips.iter().all(|chip| chip.family == Family::Ascend910B && chip.health.level == Level::Ok));
    assert!(scan.links.is_empty());
    assert_eq!(node.backend().health().await.unwrap().len(), 8);
}

#[tokio::test]
async fn a_library_without_a_mandatory_call_is_refused_by_its_name() {
    for symbol in ["dcmi_init", "dcmi_get_device_health", "dcmi_get_device_pcie_info_v2"] {
        let node = without(Profile::Ascend910B4, &[symbol]);
        match node.backend().scan().await {
            Err(Fault::Refused { why, .. }) => assert!(why.contains(symbol), "{why}"),
            other => panic!("{other:?}"),
        }
        assert!(node.world.calls().unwrap().is_empty(), "no call is made");
    }
}

#[tokio::test]
async fn a_file_that_is_no_library_is_refused_and_taken_when_it_has_become_one() {
    let node = Dcmi::of(Profile::Ascend910B4);
    let library = node.dir.path().join("libdcmi.so");
    fs::write(&library, "not a library\n").unwrap();
    let settings = Settings { library: Some(library.clone()), ..node.settings.clone() };
    let node = node.behind(settings);
    match node.backend().scan().await {
        Err(Fault::Refused { why, .. }) => assert!(why.contains(library.to_str().unwrap()), "{why}"),
        other => panic!("{other:?}"),
    }
    assert_eq!(node.backend().status().state, "failed");
    fs::copy(dcmi::library_path(), &library).unwrap();
    assert_eq!(scanned(node.backend()).await.chips.len(), 8, "the operator has put it right");
}

#[tokio::test]
async fn a_library_that_others_can_write_is_not_loaded() {
    let node = Dcmi::of(Profile::Ascend910B4);
    let library = node.dir.path().join("libdcmi.so");
    fs::copy(dcmi::library_path(), &library).unwrap();
    fs::set_permissions(&library, fs::Permissions::from_mode(0o666)).unwrap();
    let settings = Settings { library: Some(library.clone()), trust_library: false, ..node.settings.clone() };
    let node = node.behind(settings);
    match node.backend().scan().await {
        Err(Fault::Refused { why, .. }) => {
            assert!(why.contains(library.to_str().unwrap()) && why.contains("trust-library"), "{why}");
        }
        other => panic!("{other:?}"),
    }
    assert!(node.world.calls().unwrap().is_empty());
}

#[tokio::test]
async fn a_card_listed_as_minus_one_is_missing_and_the_others_count() {
    let node = Dcmi::of(Profile::FailedCard);
    let scan = scanned(node.backend()).await;
    assert_eq!(scan.chips.len(), 7);
    assert_eq!(scan.missing.len(), 1, "{:?}", scan.missing);
    let status = node.backend().status();
    assert_eq!(status.state, "ready");
    assert!(status.detail.contains("missing"), "{}", status.detail);
}

#[tokio::test]
async fn fewer_chips_than_the_bus_has_are_waited_for_and_named() {
    let node = Dcmi::of(Profile::Ascend910B4);
    node.world.set_state(6, ChipState::Dropped).unwrap();
    let bus = node.bus(6);
    match node.backend().scan().await {
        Err(Fault::NotReady { why, .. }) => assert!(why.contains("7 of 8") && why.contains(&bus), "{why}"),
        other => panic!("{other:?}"),
    }
    assert_eq!(node.backend().status().state, "starting");
    node.world.set_state(6, ChipState::Up).unwrap();
    assert_eq!(scanned(node.backend()).await.chips.len(), 8);
    assert_eq!(node.backend().status().detail, "");
}

#[tokio::test]
async fn when_the_wait_is_over_the_chips_that_are_up_count() {
    let node = Dcmi::with(Profile::Ascend910B4, |settings| settings.wait = Some(Duration::ZERO));
    node.world.set_state(6, ChipState::Dropped).unwrap();
    let scan = scanned(node.backend()).await;
    assert_eq!(scan.chips.len(), 7);
    assert_eq!(scan.missing[0].what, node.bus(6));
    node.world.set_state(6, ChipState::Up).unwrap();
    assert_eq!(scanned(node.backend()).await.chips.len(), 8, "and the search goes on");
}

#[tokio::test]
async fn virtual_functions_and_other_devices_of_the_vendor_are_not_waited_for() {
    let node = Dcmi::of(Profile::Ascend910B4);
    let put = |bus: &str, device: &str, class: &str, physfn: bool| {
        let directory = node.host().join(format!("sys/devices/pci0000:c0/{bus}"));
        fs::create_dir_all(&directory).unwrap();
        fs::write(directory.join("vendor"), "0x19e5\n").unwrap();
        fs::write(directory.join("device"), device).unwrap();
        fs::write(directory.join("class"), class).unwrap();
        if physfn {
            std::os::unix::fs::symlink("../0000:c1:00.0", directory.join("physfn")).unwrap();
        }
        plug(&node.host(), bus);
    };
    put("0000:c1:00.1", "0xd805", "0x120000", true);
    put("0000:c1:00.2", "0xd802", "0x120000", true);
    put("0000:7d:00.0", "0xa222", "0x020000", false);
    put("0000:08:00.0", "0x1711", "0x030000", false);
    let scan = scanned(node.backend()).await;
    assert_eq!((scan.chips.len(), scan.missing.len()), (8, 0));
}

#[tokio::test]
async fn a_chip_that_is_being_reset_is_missing_and_the_others_count() {
    let node = Dcmi::with(Profile::Ascend910B4, |settings| settings.wait = Some(Duration::ZERO));
    scanned(node.backend()).await;
    node.world.set_state(2, ChipState::Resetting).unwrap();
    assert_eq!(reading(&node, 2).await.level, Level::Gone);
    let scan = scanned(node.backend()).await;
    assert_eq!(scan.chips.len(), 7);
    assert!(scan.missing[0].why.contains("boot status"), "{:?}", scan.missing);
    node.world.set_state(2, ChipState::Up).unwrap();
    assert_eq!(scanned(node.backend()).await.chips.len(), 8);
}

#[tokio::test]
async fn a_list_without_cards_is_a_fault_while_the_bus_has_some() {
    let node = Dcmi::with(Profile::Ascend910B4, |settings| settings.wait = Some(Duration::ZERO));
    for chip in 0..8 {
        node.world.set_state(chip, ChipState::Failed).unwrap();
    }
    for _ in 0..3 {
        assert!(matches!(node.backend().scan().await, Err(Fault::NotReady { .. })));
    }
}

#[tokio::test]
async fn a_success_that_wrote_nothing_is_a_fault_wherever_it_matters() {
    for function in [
        "dcmi_get_card_list",
        "dcmi_get_device_id_in_card",
        "dcmi_get_device_logic_id",
        "dcmi_get_device_phyid_from_logicid",
        "dcmi_get_device_chip_info_v2",
        "dcmi_get_device_board_info",
        "dcmi_get_device_die_v2",
        "dcmi_get_device_pcie_info_v2",
        "dcmi_get_device_hbm_info",
    ] {
        let node = Dcmi::of(Profile::Ascend910B4);
        let data = node.world.data().unwrap();
        for chip in data.chips() {
            unplug(&node.host(), &chip.bus);
        }
        node.world.faults().set([Planted::new(function, Action::Return(0)).times(1)]).unwrap();
        match node.backend().scan().await {
            Err(Fault::Failed { call, why, .. }) => {
                let name = call.split('(').next().unwrap();
                assert!(function.starts_with(name) && why.contains("impossible"), "{function}: {call}: {why}");
            }
            other => panic!("{function}: {other:?}"),
        }
        assert_eq!(scanned(node.backend()).await.chips.len(), 8);
    }
}

#[tokio::test]
async fn rubbish_from_any_call_never_makes_a_chip_that_is_not_there() {
    let first = Dcmi::of(Profile::Ascend910B4);
    let whole = scanned(first.backend()).await;
    let mut functions: Vec<String> = first.world.calls().unwrap().list.into_iter().map(|call| call.function).collect();
    functions.sort();
    functions.dedup();
    for function in functions {
        let node = Dcmi::of(Profile::Ascend910B4);
        node.world.faults().set([Planted::new(&function, Action::Garbage)]).unwrap();
        if let Ok(scan) = node.backend().scan().await {
            for chip in &scan.chips {
                assert!(whole.chips.iter().any(|real| real.physical_id == chip.physical_id), "{function}");
            }
        }
        node.world.faults().clear().unwrap();
        assert_eq!(scanned(node.backend()).await.chips.len(), 8, "{function}");
    }
}

#[tokio::test]
async fn only_a_chip_without_a_vdie_has_none_and_any_other_answer_fails_the_scan() {
    let die = "dcmi_get_device_die_v2";
    let node = Dcmi::with(Profile::Ascend910B4, |settings| settings.timing.back_off = Duration::ZERO);
    node.world.faults().set([Planted::new(die, Action::Return(-8255)).card(1)]).unwrap();
    node.world.edit_chip(2, |chip| chip.vdie = [0; 5]).unwrap();
    let scan = scanned(node.backend()).await;
    for chip in &scan.chips {
        assert_eq!(chip.vdie.is_none(), [1, 2].contains(&chip.physical_id), "{}", chip.physical_id);
    }
    for code in [-8001, -8005, -8006, -8010, -8012, -8020] {
        node.world.faults().set([Planted::new(die, Action::Return(code)).card(3)]).unwrap();
        match node.backend().scan().await {
            Err(Fault::Failed { call, why, .. }) => {
                assert!(call.contains("die_v2(3, 0)") && why.contains(&code.to_string()), "{call}: {why}");
            }
            other => panic!("{code}: {other:?}"),
        }
    }
}

#[tokio::test]
async fn health_values_and_codes_mean_what_the_vendor_says() {
    let node = Dcmi::of(Profile::Ascend910B4);
    scanned(node.backend()).await;
    for (value, level) in [
        (0, Level::Ok),
        (1, Level::Minor),
        (2, Level::Major),
        (3, Level::Critical),
        (4, Level::Unknown),
        (77, Level::Unknown),
        (u32::MAX, Level::Gone),
    ] {
        node.world.set_health(4, value).unwrap();
        assert_eq!(reading(&node, 4).await.level, level, "{value}");
    }
    node.world.set_health(4, 0).unwrap();
    for (code, level) in [
        (-8012, Level::Gone),
        (-8008, Level::Gone),
        (-8007, Level::Gone),
        (-8010, Level::Unknown),
        (-8005, Level::Unknown),
        (-8255, Level::Unknown),
    ] {
        let fault = Planted::new("dcmi_get_device_health", Action::Return(code)).card(4);
        node.world.faults().set([fault]).unwrap();
        let health = node.backend().health().await.unwrap();
        assert_eq!(health.len(), 8);
        assert_eq!(health[&4].level, level, "{code}");
        assert!((0..8).filter(|id| *id != 4).all(|id| health[&id].level == Level::Ok), "{code}");
    }
}

#[tokio::test]
async fn fault_codes_that_cannot_be_read_stay_as_they_were() {
    let node = Dcmi::of(Profile::Ascend910B4);
    scanned(node.backend()).await;
    node.world.set_fault_codes(1, &[0x8C2F_A009]).unwrap();
    assert_eq!(reading(&node, 1).await.codes, [0x8C2F_A009]);
    node.world.faults().set([Planted::new("dcmi_get_device_errorcode_v2", Action::Return(-8005))]).unwrap();
    assert_eq!(reading(&node, 1).await.codes, [0x8C2F_A009]);
    node.world.faults().clear().unwrap();
    node.world.set_fault_codes(1, &[]).unwrap();
    assert!(reading(&node, 1).await.codes.is_empty());
}

#[tokio::test]
async fn as_many_fault_codes_as_a_chip_can_have_are_read() {
    let node = Dcmi::of(Profile::Ascend910B4);
    scanned(node.backend()).await;
    let codes: Vec<u32> = (0..128).map(|number| 0x8000_0000 + number).collect();
    node.world.set_fault_codes(0, &codes).unwrap();
    assert_eq!(reading(&node, 0).await.codes, codes);
}

#[tokio::test]
async fn links_that_cannot_be_read_stay_as_they_were() {
    let node = Dcmi::of(Profile::Ascend910B4);
    assert_eq!(scanned(node.backend()).await.links.len(), 28);
    node.world.faults().set([Planted::new("dcmi_get_topo_info_by_device_id", Action::Return(-8006))]).unwrap();
    assert_eq!(scanned(node.backend()).await.links.len(), 28);
}

#[tokio::test]
async fn a_scan_of_an_unchanged_node_does_not_start_the_library_again_and_a_lost_chip_does() {
    let node = Dcmi::with(Profile::Ascend910B4, |settings| settings.wait = Some(Duration::ZERO));
    for _ in 0..3 {
        scanned(node.backend()).await;
        node.backend().health().await.unwrap();
    }
    assert_eq!(node.world.calls().unwrap().count("dcmi_init"), 1);
    node.world.drop_chip(0).unwrap();
    node.backend().health().await.unwrap();
    assert_eq!(scanned(node.backend()).await.chips.len(), 7);
    assert_eq!(node.world.calls().unwrap().count("dcmi_init"), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_urgent_call_goes_before_the_next_call_of_a_scan() {
    let node = Dcmi::of(Profile::Ascend910B4);
    let backend = node.backend();
    assert_eq!(backend.card(3).await.unwrap().ids(), [0; 0], "the first call starts the library");
    node.world.faults().set([Planted::new("dcmi_get_device_health", Action::DelayMs(50))]).unwrap();
    node.world.clear_calls().unwrap();
    let (scan, first, second) = tokio::join!(
        backend.scan(),
        async {
            until_called(&node, "dcmi_get_device_health").await;
            backend.card(3).await
        },
        async {
            until_called(&node, "dcmi_get_device_health").await;
            backend.create(4, "vir05_1c_8g", 164).await
        }
    );
    assert_eq!(scan.unwrap().chips.len(), 8);
    assert!(first.is_ok() && second.is_ok(), "{first:?} {second:?}");
    let calls = node.world.calls().unwrap();
    let last = |function: &str| calls.list.iter().rposition(|call| call.function == function).unwrap();
    let done = last("dcmi_create_vdevice").max(last("dcmi_get_device_resource_info"));
    let later = calls.list[done..].iter().filter(|call| call.function == "dcmi_get_device_health").count();
    assert!(later >= 4, "urgent work waited for the whole scan: {later} health calls came after it");
}

async fn until_called(node: &Dcmi, function: &str) {
    while node.world.calls().unwrap().count(function) == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await; // waits: for the scan to be in its calls
    }
}

#[tokio::test]
async fn the_worker_keeps_the_daemons_secrets_and_standard_input_from_the_library() {
    let node = Dcmi::of(Profile::Ascend910B4);
    let path = node.dir.path().join("handed on unawares");
    let stray = fs::File::create(&path).unwrap();
    nix::fcntl::fcntl(&stray, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::empty())).unwrap();
    scanned(node.backend()).await;
    let proc = Path::new("/proc").join(node.worker().to_string());
    let environment = fs::read_to_string(proc.join("environ")).unwrap();
    let names: Vec<_> = environment.split('\0').filter_map(|line| line.split('=').next()).collect();
    assert!(names.contains(&"FAKE_DCMI_WORLD") && names.contains(&"PATH"), "{names:?}");
    assert!(!names.iter().any(|name| name.starts_with("CARGO")), "{names:?}");
    for stream in ["0", "1"] {
        assert_eq!(fs::read_link(proc.join("fd").join(stream)).unwrap(), Path::new("/dev/null"));
    }
    let open: Vec<_> = fs::read_dir(proc.join("fd")).unwrap().map(|fd| fs::read_link(fd.unwrap().path())).collect();
    assert!(!open.iter().any(|to| to.as_ref().is_ok_and(|to| *to == path)), "{open:?}");
    let status = fs::read_to_string(proc.join("status")).unwrap();
    let threads = status.lines().find(|line| line.starts_with("Threads:")).unwrap();
    assert!(threads.ends_with("\t2"), "its own and the library's for events, and no runtime: {threads}");
}

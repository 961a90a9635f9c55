//! What the simulated library must reproduce, called in this process: one world per test.
#![allow(unsafe_code, reason = "the functions under test are C functions")]
#![allow(clippy::unwrap_used, missing_docs, reason = "a test that fails may panic")]

#[macro_use]
mod common;

use core::ffi::c_int;
use core::mem::MaybeUninit;
use std::time::{Duration, Instant};

use common::{Node, get, text};
use dcmi::code;
use dcmi::raw::{
    BoardInfo, ChipInfo, ChipInfoV2, DieId, Event, EventFilter, HbmInfo, MemoryInfoV3, PcieInfoAll, Plain as _,
    ProcMemInfo, SpodInfo,
};
use dcmi::world::{Action, ChipState, DiePolicy, Ecc, Environment, Fault, Process, Profile};

fn list() -> (c_int, Vec<c_int>) {
    let mut ids = [0; 64];
    let (code, count) = get(|out| c!(inventory::dcmi_get_card_list(out, ids.as_mut_ptr(), 64)));
    (code, ids[..usize::try_from(count).unwrap()].to_vec())
}

fn health(card: c_int) -> (c_int, u32) {
    get(|out| c!(fault::dcmi_get_device_health(card, 0, out)))
}

fn logic(card: c_int, device: c_int) -> (c_int, c_int) {
    get(|out| c!(inventory::dcmi_get_device_logic_id(out, card, device)))
}

fn phy_of(card: c_int, device: c_int) -> u32 {
    let (_, logic) = logic(card, device);
    get(|out| c!(inventory::dcmi_get_device_phyid_from_logicid(logic.try_into().unwrap(), out))).1
}

fn name(card: c_int, device: c_int) -> String {
    let (code, info) = get::<ChipInfo>(|out| c!(describe::dcmi_get_device_chip_info(card, device, out)));
    assert_eq!(code, code::OK);
    text(&info.chip_name)
}

#[test]
fn before_init_the_calls_answer_as_a_fresh_library_does() {
    let node = Node::new(Profile::Ascend910B4);
    node.run(|| {
        assert_eq!(list().0, code::INNER_ERR);
        assert_eq!(logic(0, 0).0, code::NOT_READY);
        assert_eq!(get::<u32>(|out| c!(inventory::dcmi_get_device_type(0, 0, out))), (code::OK, 0xFF));
        assert_eq!(get::<c_int>(|out| c!(inventory::dcmi_get_device_num_in_card(0, out))), (code::OK, 0));
    });
}

#[test]
fn the_node_of_the_requirements_describes_its_cards() {
    let node = Node::new(Profile::Ascend910B4);
    node.up(|| {
        assert_eq!(list(), (code::OK, (0..8).collect()));
        assert_eq!(name(0, 0), "910B4");
        let (code, pci) = get::<PcieInfoAll>(|out| c!(describe::dcmi_get_device_pcie_info_v2(0, 0, out)));
        assert_eq!((code, pci.venderid, pci.deviceid, pci.bdf_busid), (code::OK, 0x19e5, 0xd802, 0xc1));
        let (code, hbm) = get::<HbmInfo>(|out| c!(describe::dcmi_get_device_hbm_info(0, 0, out)));
        assert_eq!((code, hbm.memory_size), (code::OK, 32_768));
        let (code, ddr) = get::<MemoryInfoV3>(|out| c!(describe::dcmi_get_device_memory_info_v3(0, 0, out)));
        assert_eq!((code, ddr.memory_size), (code::OK, 0), "a 910B has no ordinary memory, and says so with success");
        let mut product = [0; 256];
        assert_eq!(c!(describe::dcmi_get_product_type(0, 0, product.as_mut_ptr(), 256)), code::NOT_SUPPORT);
        assert_eq!(node.world.data().unwrap().chip(0).unwrap().numa, 6);
        assert_eq!(get::<u32>(|out| c!(describe::dcmi_get_device_boot_status(0, 0, out))), (code::OK, 16));
        let mut cpus = [0; 32];
        let (code, _) =
            get::<c_int>(|out| c!(describe::dcmi_get_affinity_cpu_info_by_device_id(0, 0, cpus.as_mut_ptr(), out)));
        assert_eq!((code, text(&cpus.map(|c| c.to_ne_bytes()[0]))), (code::OK, "144-167".to_owned()));
    });
    assert_eq!(node.world.overlaps().unwrap(), Vec::<String>::new());
}

#[test]
fn every_chip_has_a_die_id_of_its_own() {
    let node = Node::new(Profile::Many(64));
    node.up(|| {
        let mut ids: Vec<[u32; 5]> = (0..64)
            .map(|card| get::<DieId>(|out| c!(describe::dcmi_get_device_die_v2(card, 0, 1, out))).1.soc_die)
            .collect();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), 64);
    });
}

#[test]
fn a_310p_has_sparse_card_ids_a_controller_and_ordinary_memory() {
    let node = Node::new(Profile::Ascend310P3);
    node.up(|| {
        assert_eq!(list(), (code::OK, vec![2, 5]));
        assert_eq!(get::<u32>(|out| c!(inventory::dcmi_get_device_type(5, 0, out))), (code::OK, 0));
        assert_eq!(get::<u32>(|out| c!(inventory::dcmi_get_device_type(5, 1, out))), (code::OK, 1));
        assert_eq!(get::<u32>(|out| c!(inventory::dcmi_get_device_type(5, 2, out))).0, code::INVALID_PARAMETER);
        assert_eq!(get::<u32>(|out| c!(inventory::dcmi_get_device_type(0, 0, out))).0, code::INVALID_PARAMETER);
        assert_eq!(logic(5, 1).0, code::NOT_SUPPORT);
        assert_eq!(logic(5, 0), (code::OK, 1));
        let (code, memory) = get::<MemoryInfoV3>(|out| c!(describe::dcmi_get_device_memory_info_v3(2, 0, out)));
        assert_eq!((code, memory.memory_size), (code::OK, 24_576));
        assert_eq!(get::<HbmInfo>(|out| c!(describe::dcmi_get_device_hbm_info(2, 0, out))).0, code::NOT_SUPPORT);
        let mut product = [0; 256];
        assert_eq!(c!(describe::dcmi_get_product_type(2, 0, product.as_mut_ptr(), 256)), code::OK);
        let link = get::<c_int>(|out| c!(describe::dcmi_get_topo_info_by_device_id(2, 0, 5, 0, out)));
        assert_eq!(link.0, code::NOT_SUPPORT);
    });
}

#[test]
fn a_910c_has_two_dies_per_card() {
    let node = Node::new(Profile::Ascend910C(DiePolicy::Value(0)));
    node.up(|| {
        assert_eq!(list().1.len(), 8);
        assert_eq!((logic(3, 1), phy_of(3, 1)), ((code::OK, 7), 7));
        let (_, info) = get::<ChipInfoV2>(|out| c!(describe::dcmi_get_device_chip_info_v2(3, 1, out)));
        assert_eq!((text(&info.chip_name), text(&info.npu_name)), ("Ascend910".to_owned(), "910_9392".to_owned()));
        let (_, board) = get::<BoardInfo>(|out| c!(describe::dcmi_get_device_board_info(3, 0, out)));
        assert_eq!(board.board_id, 0xb0);
        let link = |a, b, x, y| get::<c_int>(|out| c!(describe::dcmi_get_topo_info_by_device_id(a, b, x, y, out))).1;
        assert_eq!((link(3, 0, 3, 1), link(3, 0, 4, 0), link(3, 0, 3, 0)), (6, 7, 0));
        assert_eq!(get::<u32>(|out| c!(control::dcmi_get_multi_die_policy(out))), (code::OK, 0));
        let mut size = 48;
        let mut spod = SpodInfo::zeroed();
        let code = c!(control::dcmi_get_device_info(3, 1, 12, 1, (&raw mut spod).cast(), Some(&mut size)));
        assert_eq!((code, spod.sdid, size), (code::OK, 7, 48));
    });
    node.world.edit(|data| data.die_policy = DiePolicy::Unreadable(code::INNER_ERR)).unwrap();
    node.run(|| assert_eq!(get::<u32>(|out| c!(control::dcmi_get_multi_die_policy(out))).0, code::INNER_ERR));
    let other = Node::new(Profile::Ascend910B4);
    other.up(|| assert_eq!(get::<u32>(|out| c!(control::dcmi_get_multi_die_policy(out))).0, code::NOT_SUPPORT));
}

#[test]
fn a_card_that_did_not_come_up_is_listed_as_minus_one() {
    let node = Node::new(Profile::FailedCard);
    node.up(|| {
        assert_eq!(list(), (code::OK, vec![0, 1, 2, 3, 4, -1, 6, 7]));
        assert_eq!(get::<c_int>(|out| c!(inventory::dcmi_get_device_num_in_card(-1, out))).0, code::INVALID_PARAMETER);
        assert_eq!(get::<c_int>(|out| c!(inventory::dcmi_get_all_device_count(out))), (code::OK, 7));
        assert_eq!((logic(6, 0), phy_of(6, 0)), ((code::OK, 5), 6));
    });
}

#[test]
fn a_missing_card_shifts_card_and_logic_ids_but_not_physical_ids() {
    let node = Node::new(Profile::Ascend910B4);
    node.world.drop_chip(2).unwrap();
    node.up(|| {
        assert_eq!(list().1, (0..7).collect::<Vec<_>>());
        assert_eq!((logic(2, 0), phy_of(2, 0)), ((code::OK, 2), 3));
        let (code, card) = get::<c_int>(|out| {
            c!(inventory::dcmi_get_card_id_device_id_from_phyid(out, Some(&mut MaybeUninit::uninit()), 3))
        });
        assert_eq!((code, card), (code::OK, 2));
        assert_eq!(
            get::<u32>(|out| c!(inventory::dcmi_get_device_logicid_from_phyid(2, out))).0,
            code::INVALID_DEVICE_ID
        );
    });
}

#[test]
fn a_chip_that_leaves_stays_listed_and_one_that_returns_needs_a_new_init() {
    let node = Node::new(Profile::Ascend910B4);
    node.up(|| {
        node.world.drop_chip(3).unwrap();
        assert_eq!(list().1.len(), 8);
        assert_eq!(health(3), (code::NOT_READY, 4));
        assert_eq!(get::<HbmInfo>(|out| c!(describe::dcmi_get_device_hbm_info(3, 0, out))).0, code::DEVICE_NOT_EXIST);
        let mut codes = [0; 128];
        let errors = get::<c_int>(|out| c!(fault::dcmi_get_device_errorcode_v2(3, 0, out, codes.as_mut_ptr(), 128)));
        assert_eq!(errors.0, code::INNER_ERR, "every failure below this call looks the same");
        node.world.return_chip(3).unwrap();
        assert_eq!(health(3).0, code::NOT_READY);
        assert_eq!(c!(inventory::dcmi_init()), code::OK);
        assert_eq!(health(3), (code::OK, 0));
    });
}

#[test]
fn an_init_that_finds_nothing_fails() {
    let node = Node::new(Profile::Ascend310P3);
    node.world.drop_chip(0).unwrap();
    node.world.drop_chip(1).unwrap();
    node.run(|| {
        assert_eq!(c!(inventory::dcmi_init()), code::INNER_ERR);
        assert_eq!(list().0, code::INNER_ERR);
    });
}

#[test]
fn health_is_unknown_not_ready_or_gone_as_the_chip_is() {
    let node = Node::new(Profile::Ascend910B4);
    node.up(|| {
        for value in [0, 1, 2, 3, 0xFFFF_FFFF] {
            node.world.set_health(1, value).unwrap();
            assert_eq!(health(1), (code::OK, value));
        }
        node.world.set_state(1, ChipState::Resetting).unwrap();
        assert_eq!(health(1), (code::NOT_READY, 4));
        assert_eq!(get::<u32>(|out| c!(describe::dcmi_get_device_boot_status(1, 0, out))), (code::OK, 2));
        assert_eq!(health(9).0, code::INVALID_PARAMETER);
        assert_eq!(c!(fault::dcmi_get_device_health(0, 0, None)), code::INVALID_PARAMETER);
    });
}

#[test]
fn fault_codes_need_room_and_processes_are_listed() {
    let node = Node::new(Profile::Ascend910B4);
    node.world.set_fault_codes(4, &[0x80E0_1801, 0x8107_8603]).unwrap();
    node.world.set_processes(4, &[Process { pid: 4711, bytes: 1 << 30 }]).unwrap();
    node.up(|| {
        let mut codes = [0; 128];
        let mut errors =
            |len| get::<c_int>(|out| c!(fault::dcmi_get_device_errorcode_v2(4, 0, out, codes.as_mut_ptr(), len)));
        assert_eq!(errors(1).0, code::INVALID_PARAMETER);
        assert_eq!(errors(128), (code::OK, 2));
        assert_eq!(codes[..2], [0x80E0_1801, 0x8107_8603]);
        let mut processes = [ProcMemInfo::zeroed(); 32];
        let (code, count) =
            get::<c_int>(|out| c!(describe::dcmi_get_device_resource_info(4, 0, processes.as_mut_ptr(), out)));
        assert_eq!((code, count, processes[0].proc_id, processes[0].proc_mem_usage), (code::OK, 1, 4711, 1 << 30));
    });
}

#[test]
fn the_hardware_of_two_sockets_can_be_swapped_and_cards_reordered() {
    let node = Node::new(Profile::Ascend910B4);
    let die = |card| get::<DieId>(|out| c!(describe::dcmi_get_device_die_v2(card, 0, 1, out))).1.soc_die;
    let (first, second) = node.up(|| (die(0), die(1)));
    node.world.swap_chips(0, 1).unwrap();
    node.up(|| {
        assert_eq!((die(0), die(1)), (second, first));
        assert_eq!(phy_of(0, 0), 0);
    });
    node.world.reorder_cards(&[7, 6, 5, 4, 3, 2, 1, 0]).unwrap();
    node.up(|| assert_eq!((phy_of(0, 0), phy_of(7, 0)), (7, 0)));
}

#[test]
fn a_fault_hits_the_calls_it_names_and_no_other() {
    let node = Node::new(Profile::Ascend910B4);
    node.up(|| {
        let fault = Fault::new("dcmi_get_device_health", Action::Return(code::TIME_OUT)).card(2).skip(1).times(2);
        let id = node.world.faults().plant(fault).unwrap();
        let codes: Vec<c_int> = (0..5).map(|_| health(2).0).collect();
        assert_eq!(codes, [code::OK, code::TIME_OUT, code::TIME_OUT, code::OK, code::OK]);
        assert_eq!(health(3).0, code::OK);
        assert_eq!(node.world.faults().hits(&id), 5);

        node.world.faults().set([Fault::new("dcmi_get_device_hbm_info", Action::Garbage)]).unwrap();
        let (code, hbm) = get::<HbmInfo>(|out| c!(describe::dcmi_get_device_hbm_info(2, 0, out)));
        assert_eq!((code, hbm.memory_size), (code::OK, 0xA5A5_A5A5_A5A5_A5A5));

        node.world.faults().set([Fault::new("*", Action::DelayMs(30)).times(1)]).unwrap();
        let start = Instant::now();
        assert_eq!(health(2).0, code::OK);
        assert!(start.elapsed() >= Duration::from_millis(30));

        node.world.faults().set([Fault::new("dcmi_get_device_health", Action::Drop).card(5)]).unwrap();
        assert_eq!((health(5).0, health(4).0), (code::NOT_READY, code::OK));
    });
    node.world.faults().set([Fault::init_fails(3)]).unwrap();
    node.run(|| {
        let codes: Vec<c_int> = (0..4).map(|_| c!(inventory::dcmi_init())).collect();
        assert_eq!(codes, [code::INNER_ERR, code::INNER_ERR, code::INNER_ERR, code::OK]);
    });
}

#[test]
fn a_fault_count_goes_on_in_the_next_process() {
    let node = Node::new(Profile::Ascend910B4);
    node.world.faults().set([Fault::init_fails(2)]).unwrap();
    let codes: Vec<c_int> = (0..3)
        .map(|_| {
            dcmi::testing::restart(node.dir.path());
            node.run(|| c!(inventory::dcmi_init()))
        })
        .collect();
    assert_eq!(codes, [code::INNER_ERR, code::INNER_ERR, code::OK]);
}

#[test]
fn calls_are_logged_with_their_arguments_and_codes() {
    let node = Node::new(Profile::Ascend910B4);
    node.up(|| {
        health(3);
        health(9);
    });
    let calls = node.world.calls().unwrap();
    assert_eq!((calls.len(), calls.count("dcmi_init"), calls.count("dcmi_get_device_health")), (3, 1, 2));
    let seen: Vec<_> = calls.of("dcmi_get_device_health").map(|call| (call.card, call.device, call.code)).collect();
    assert_eq!(seen, [(Some(3), Some(0), Some(code::OK)), (Some(9), Some(0), Some(code::INVALID_PARAMETER))]);
    assert_eq!(calls.unfinished().count(), 0);
    node.world.clear_calls().unwrap();
    assert!(node.world.calls().unwrap().is_empty());
}

#[test]
fn a_call_that_meets_another_is_found_and_fails() {
    let node = Node::new(Profile::Ascend910B4);
    node.up(|| ());
    let dir = node.dir.path().to_owned();
    let waiting = std::thread::spawn(move || {
        let filter = EventFilter::zeroed();
        let wait = || get::<Event>(|out| c!(fault::dcmi_get_fault_event(-1, -1, -1, filter, out))).0;
        dcmi::testing::with_world(&dir, wait)
    });
    let deadline = Instant::now() + Duration::from_secs(20);
    while node.world.calls().unwrap().unfinished().count() == 0 {
        assert!(Instant::now() < deadline, "the waiting call never began");
        std::thread::sleep(Duration::from_millis(1)); // waits: until the other call is in
    }
    assert_eq!(node.run(|| health(0)).0, code::RESOURCE_OCCUPIED);
    while !waiting.is_finished() {
        assert!(Instant::now() < deadline, "the waiting call never ended");
        node.world.occur(0, 0x8107_8603, 1).unwrap();
        std::thread::sleep(Duration::from_millis(1)); // waits: until the other call has seen the event
    }
    assert_eq!(waiting.join().unwrap(), code::OK);
    let overlaps = node.world.overlaps().unwrap();
    assert!(overlaps.len() == 1 && overlaps[0].contains("dcmi_get_device_health"), "{overlaps:?}");
}

#[test]
fn ecc_counters_are_those_of_the_chip_and_an_older_driver_writes_fewer() {
    let node = Node::new(Profile::Ascend910B4);
    node.world.set_ecc(2, Ecc { single: 7, double: 1, isolated_double: 3, ..Ecc::default() }).unwrap();
    let read = || {
        let mut words = [u32::MAX; 16];
        let code = c!(describe::dcmi_get_device_ecc_info(2, 0, 2, words.as_mut_ptr().cast()));
        (code, words)
    };
    node.world.edit(|data| data.wide_ecc = false).unwrap();
    node.up(|| {
        let (code, words) = read();
        assert_eq!((code, &words[..7], words[7]), (code::OK, &[1, 7, 1, 0, 0, 0, 3][..], u32::MAX));
        node.world.edit(|data| data.wide_ecc = true).unwrap();
        assert_eq!(read().1[7..10], [0, 0, u32::MAX]);
        assert_eq!(
            c!(describe::dcmi_get_device_ecc_info(2, 0, 0, words.as_ptr().cast_mut().cast())),
            code::NOT_SUPPORT
        );
    });
}

extern "C" fn ignore(_: *mut Event) {}

#[test]
fn an_ordinary_container_may_not_slice_and_a_user_may_not_query() {
    let node = Node::new(Profile::Ascend910B4);
    node.up(|| {
        node.world.edit(|data| data.environment = Environment::Pod).unwrap();
        assert_eq!(c!(vnpu::dcmi_create_vdevice(0, 0, None, None)), code::OPER_NOT_PERMITTED);
        node.world.edit(|data| data.environment = Environment::PodUser).unwrap();
        assert_eq!(
            c!(fault::dcmi_subscribe_fault_event(-1, -1, EventFilter::zeroed(), Some(ignore))),
            code::OPER_NOT_PERMITTED
        );
        node.world.edit(|data| data.environment = Environment::User).unwrap();
        let mut buffer = [0_u64; 45];
        let mut size = 360;
        let code = c!(control::dcmi_get_device_info(0, 0, 52, 1, buffer.as_mut_ptr().cast(), Some(&mut size)));
        assert_eq!(code, code::OPER_NOT_PERMITTED);
    });
}

/// The bytes that a call wrote into a buffer that is too large for it.
fn written(call: impl FnOnce(*mut u64) -> c_int) -> (c_int, usize) {
    let mut buffer = [u64::from_ne_bytes([0x5A; 8]); 512];
    let code = call(buffer.as_mut_ptr());
    let bytes: Vec<u8> = buffer.iter().flat_map(|word| word.to_ne_bytes()).collect();
    (code, bytes.iter().rposition(|byte| *byte != 0x5A).map_or(0, |last| last + 1))
}

/// A place for a struct at the start of the buffer.
fn place<'a, T>(buffer: *mut u64) -> Option<&'a mut MaybeUninit<T>> {
    // SAFETY: the buffer is large and aligned enough for every struct, and nothing else uses it meanwhile.
    unsafe { buffer.cast::<MaybeUninit<T>>().as_mut() }
}

#[test]
fn a_call_writes_the_bytes_of_its_struct_and_no_more() {
    let node = Node::new(Profile::Ascend910B4);
    node.up(|| {
        assert_eq!(written(|b| c!(describe::dcmi_get_device_chip_info(0, 0, place(b)))), (code::OK, 100));
        assert_eq!(written(|b| c!(describe::dcmi_get_device_chip_info_v2(0, 0, place(b)))), (code::OK, 132));
        assert_eq!(written(|b| c!(describe::dcmi_get_device_pcie_info(0, 0, place(b)))), (code::OK, 28));
        assert_eq!(written(|b| c!(describe::dcmi_get_device_pcie_info_v2(0, 0, place(b)))), (code::OK, 64));
        assert_eq!(written(|b| c!(describe::dcmi_get_card_elabel_v2(0, place(b)))), (code::OK, 1280));
        assert_eq!(written(|b| c!(describe::dcmi_get_device_hbm_info(0, 0, place(b)))), (code::OK, 32));
        assert_eq!(written(|b| c!(describe::dcmi_get_device_memory_info_v3(0, 0, place(b)))), (code::OK, 112));
        assert_eq!(written(|b| c!(describe::dcmi_get_hccs_link_bandwidth_info(0, 0, place(b)))), (code::OK, 280));
        // The struct that two headers disagree about.
        assert_eq!(written(|b| c!(describe::dcmi_get_device_ecc_info(0, 0, 2, b.cast()))), (code::OK, 36));
        node.world.edit(|data| data.wide_ecc = false).unwrap();
        assert_eq!(written(|b| c!(describe::dcmi_get_device_ecc_info(0, 0, 2, b.cast()))), (code::OK, 28));
        // A buffer that is too small stays as it is.
        let mut size = 359;
        let query = |b: *mut u64| c!(control::dcmi_get_device_info(0, 0, 52, 1, b.cast(), Some(&mut size)));
        assert_eq!(written(query), (code::INVALID_PARAMETER, 0));
    });
}

#[test]
fn null_pointers_are_bad_parameters() {
    let node = Node::new(Profile::Ascend910B4);
    node.up(|| {
        assert_eq!(c!(inventory::dcmi_get_card_list(None, [0; 64].as_mut_ptr(), 64)), code::INVALID_PARAMETER);
        assert_eq!(
            get(|out| c!(inventory::dcmi_get_card_list(out, std::ptr::null_mut(), 64))).0,
            code::INVALID_PARAMETER
        );
        assert_eq!(
            get(|out| c!(inventory::dcmi_get_card_list(out, [0; 7].as_mut_ptr(), 7))).0,
            code::INVALID_PARAMETER
        );
        assert_eq!(c!(describe::dcmi_get_device_chip_info(0, 0, None)), code::INVALID_PARAMETER);
        assert_eq!(c!(vnpu::dcmi_create_vdevice(0, 0, None, None)), code::INVALID_PARAMETER);
        assert_eq!(c!(fault::dcmi_subscribe_fault_event(-1, -1, EventFilter::zeroed(), None)), code::INVALID_PARAMETER);
        let mut size = 8;
        assert_eq!(
            c!(control::dcmi_get_device_info(0, 0, 52, 1, std::ptr::null_mut(), Some(&mut size))),
            code::INVALID_PARAMETER
        );
        assert_eq!(
            c!(control::dcmi_get_device_info(0, 0, 99, 1, (&raw mut size).cast(), Some(&mut 4))),
            code::INVALID_PARAMETER
        );
    });
}

#[test]
fn events_can_be_pulled_with_a_time_limit() {
    let node = Node::new(Profile::Ascend910B4);
    let pull = |timeout, filter| get::<Event>(|out| c!(fault::dcmi_get_fault_event(-1, -1, timeout, filter, out)));
    node.up(|| {
        assert_eq!(pull(30_001, EventFilter::zeroed()).0, code::INVALID_PARAMETER);
        assert_eq!(pull(0, EventFilter::zeroed()).0, code::TIME_OUT);
        node.world.occur(6, 0x80E0_1801, 2).unwrap();
        node.world.occur(7, 0x80E1_8005, 3).unwrap();
        let filter = EventFilter { filter_flag: 2, severity: 3, ..EventFilter::zeroed() };
        let (code, event) = pull(1000, filter);
        assert_eq!((code, event.event_t.deviceid, event.event_t.event_id), (code::OK, 7, 0x80E1_8005));
        assert_eq!(pull(0, EventFilter::zeroed()).0, code::TIME_OUT, "what the filter refused is gone");
    });
}

#[test]
fn sharing_is_refused_while_in_use_and_covers_both_dies() {
    let node = Node::new(Profile::Ascend910C(DiePolicy::Value(0)));
    let shared = |device| get::<c_int>(|out| c!(control::dcmi_get_device_share_enable(2, device, out))).1;
    node.up(|| {
        assert_eq!(c!(control::dcmi_set_device_share_enable(2, 0, 1)), code::OK);
        assert_eq!((shared(0), shared(1)), (1, 1));
        node.world.set_processes(5, &[Process { pid: 1, bytes: 1 }]).unwrap();
        assert_eq!(c!(control::dcmi_set_device_share_enable(2, 0, 0)), code::NOT_SUPPORT_IN_CONTAINER);
        assert_eq!(c!(control::dcmi_set_multi_die_policy(1)), code::OK);
        assert_eq!(get::<u32>(|out| c!(control::dcmi_get_multi_die_policy(out))), (code::OK, 1));
    });
}

#[test]
fn every_profile_has_a_name_and_comes_up() {
    for name in [
        "910b4",
        "910b3",
        "910b2",
        "910c",
        "910c-independent",
        "910c-unreadable",
        "910c-sliced",
        "310p3",
        "old",
        "mixed",
        "failed-card",
        "many-64",
    ] {
        let node = Node::new(name.parse().unwrap());
        node.up(|| assert!(!list().1.is_empty(), "{name}"));
        node.world.make_nodes().unwrap();
        assert!(node.dir.path().join("dev/davinci0").exists());
        let chips: Vec<_> = node.world.data().unwrap().chips().map(|chip| chip.bus.clone()).collect();
        let unique: std::collections::BTreeSet<_> = chips.iter().collect();
        assert_eq!(unique.len(), chips.len(), "{name}: two chips on one PCI address");
    }
    assert!("many-65".parse::<Profile>().is_err());
}

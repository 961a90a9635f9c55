//! vNPUs: the answers of create, destroy and query in the order in which the real library finds them.
#![allow(unsafe_code, reason = "the functions under test are C functions")]
#![allow(clippy::unwrap_used, missing_docs, reason = "a test that fails may panic")]

#[macro_use]
mod common;

use core::ffi::{c_char, c_int};
use std::time::{Duration, Instant};

use common::{Node, get, text};
use dcmi::code;
use dcmi::raw::{CreateVdevOut, CreateVdevRes, Plain, SocFreeResource, SocTotalResource, VdevQuery};
use dcmi::template::TemplateSet;
use dcmi::world::{Action, DiePolicy, Environment, Fault, Memory, Process, Profile};

const AUTO: u32 = u32::MAX;

fn create_out(card: c_int, template: &str, id: u32) -> (c_int, CreateVdevOut) {
    let mut wish = CreateVdevRes::zeroed();
    (wish.vdev_id, wish.vfg_id) = (id, AUTO);
    for (slot, byte) in wish.template_name.iter_mut().zip(template.bytes()) {
        *slot = c_char::from_ne_bytes([byte]);
    }
    get(|out| c!(vnpu::dcmi_create_vdevice(card, 0, Some(&wish), out)))
}

/// The code, or the id.
fn create(card: c_int, template: &str, id: u32) -> Result<u32, c_int> {
    let (code, out) = create_out(card, template, id);
    if code == code::OK { Ok(out.vdev_id) } else { Err(code) }
}

fn destroy(card: c_int, id: u32) -> c_int {
    c!(vnpu::dcmi_set_destroy_vdevice(card, 0, id))
}

fn info<T: Plain>(card: c_int, sub: u32, mut value: T) -> Result<T, c_int> {
    let mut size = u32::try_from(size_of::<T>()).unwrap();
    let code = c!(control::dcmi_get_device_info(card, 0, 52, sub, (&raw mut value).cast(), Some(&mut size)));
    assert!(code != code::OK || size == u32::try_from(size_of::<T>()).unwrap());
    if code == code::OK { Ok(value) } else { Err(code) }
}

fn query(card: c_int, sub: u32, id: u32) -> Result<VdevQuery, c_int> {
    let mut asked = VdevQuery::zeroed();
    asked.vdev_id = id;
    info(card, sub, asked)
}

fn ids(card: c_int) -> Vec<u32> {
    let total = info(card, 1, SocTotalResource::zeroed()).unwrap();
    total.vdev_id[..usize::try_from(total.vdev_num).unwrap()].to_vec()
}

fn near(a: f32, b: f32) -> bool {
    (a - b).abs() < 0.01
}

fn chars(array: &[c_char]) -> String {
    text(&array.iter().map(|c| c.to_ne_bytes()[0]).collect::<Vec<_>>())
}

#[test]
fn a_vnpu_has_the_size_of_its_template_and_the_filling_of_the_real_answer() {
    let node = Node::new(Profile::Ascend910B4);
    node.up(|| {
        let (code, out) = create_out(3, "vir10_3c_16g", 150);
        assert_eq!((code, out.vdev_id, out.vfg_id), (code::OK, 150, 0));
        assert_eq!([out.pcie_bus, out.pcie_device, out.pcie_func], [AUTO; 3]);
        assert_eq!(out.reserved[..4], 3_u32.to_ne_bytes(), "the function id of 148 + 2 is 3");
        assert!(out.reserved[4..].iter().all(|byte| *byte == 0xFF));

        let one = query(3, 0, 150).unwrap().query_info;
        assert_eq!((chars(&one.name).as_str(), one.vfid, one.is_container_used), ("vir10_3c_16g", 3, 0));
        assert_eq!((one.computing.memory_size, one.computing.device_aicpu), (16_384, 3));
        assert!(near(one.computing.aic, 10.0) && near(one.media.jpegd, 12.0));
        node.world.open_vnpu(150, Some(0x00AB_CDEF_0123)).unwrap();
        let one = query(3, 0, 150).unwrap().query_info;
        assert_eq!((one.is_container_used, one.container_id), (1, 0x00AB_CDEF_0123));

        let free = info(3, 2, SocFreeResource::zeroed()).unwrap();
        assert!(near(free.computing.aic, 10.0));
        assert_eq!((free.computing.memory_size, free.computing.device_aicpu), (16_384, 4));
        let total = info(3, 1, SocTotalResource::zeroed()).unwrap();
        assert!(near(total.computing.aic, 20.0));
        assert_eq!((ids(3), ids(2)), (vec![150], vec![]));
        let link = std::fs::read_link(node.dir.path().join("dev/vdavinci150")).unwrap();
        assert_eq!(link.to_str(), Some("/dev/null"));
    });
}

#[test]
fn ids_are_of_the_chips_own_range_and_used_once() {
    let node = Node::new(Profile::Ascend910B4);
    node.up(|| {
        assert_eq!(create(1, "vir05_1c_8g", AUTO), Ok(116));
        assert_eq!(create(1, "vir05_1c_8g", 131), Ok(131));
        for id in [131, 115, 132, 0] {
            assert_eq!(create(1, "vir05_1c_8g", id), Err(code::INVALID_PARAMETER));
        }
        assert_eq!(create(1, "vir05_1c_8g", AUTO), Ok(117));
    });
    let node = Node::new(Profile::Many(64));
    node.up(|| assert_eq!(create(63, "vir05_1c_8g", 1123), Ok(1123)));
}

#[test]
fn the_board_decides_the_templates_and_the_fraction_decides_the_memory() {
    let sizes = [
        (Profile::Ascend910B4, "vir05_1c_8g", 8192),
        (Profile::Ascend910B4, "vir10_3c_16g_nm", 16_384),
        (Profile::Ascend910B3, "vir10_3c_32g", 32_768),
        (Profile::Ascend910B2, "vir06_1c_16g", 16_384),
    ];
    for (profile, template, memory) in sizes {
        let node = Node::new(profile);
        node.up(|| {
            let id = create(0, template, AUTO).unwrap();
            assert_eq!(query(0, 0, id).unwrap().query_info.computing.memory_size, memory);
            assert_eq!(create(0, "vir03_1c_8g", AUTO), Err(code::INVALID_PARAMETER));
        });
    }
    // A 64 GB board of the 32 GB bin: the name says 8 GB, the slice has 16.
    let node = Node::new(Profile::Ascend910B4);
    node.world.edit(|data| data.cards[0].board_id = 0x41).unwrap();
    node.world.edit_chip(0, |chip| chip.memory = Memory::Hbm { mb: 65_536, used_mb: 0 }).unwrap();
    node.up(|| {
        let id = create(0, "vir05_1c_8g", AUTO).unwrap();
        assert_eq!(query(0, 0, id).unwrap().query_info.computing.memory_size, 16_384);
        assert_eq!(create(0, "vir05_1c_16g", AUTO), Err(code::INVALID_PARAMETER));
    });
    node.world.edit(|data| data.cards[1].board_id = 0x99).unwrap();
    node.up(|| assert_eq!(create(1, "vir05_1c_8g", AUTO), Err(code::INVALID_PARAMETER)));
}

#[test]
fn what_does_not_fit_is_a_bad_parameter() {
    let node = Node::new(Profile::Ascend910B4);
    node.up(|| {
        assert!((0..4).all(|_| create(0, "vir05_1c_8g", AUTO).is_ok()));
        assert_eq!(create(0, "vir05_1c_8g", AUTO), Err(code::INVALID_PARAMETER));
        assert!((0..2).all(|_| create(1, "vir10_3c_16g", AUTO).is_ok()));
        // AI cores and memory would do, AI CPUs and media engines do not.
        assert!(create(2, "vir10_4c_16g_m", AUTO).is_ok());
        assert_eq!(create(2, "vir10_4c_16g_m", AUTO), Err(code::INVALID_PARAMETER));
        assert!(create(2, "vir10_3c_16g_nm", AUTO).is_ok());
    });
}

#[test]
fn a_busy_chip_answers_busy_or_a_bad_parameter_and_its_job_was_disturbed() {
    let node = Node::new(Profile::Ascend910B4);
    node.world.set_processes(0, &[Process { pid: 1, bytes: 1 }]).unwrap();
    node.up(|| {
        assert_eq!(create(0, "vir05_1c_8g", AUTO), Err(code::NOT_SUPPORT_IN_CONTAINER));
        node.world.edit(|data| data.slicing.busy_code = code::INVALID_PARAMETER).unwrap();
        assert_eq!(create(0, "vir05_1c_8g", AUTO), Err(code::INVALID_PARAMETER));
        let chip = node.world.data().unwrap().chip(0).unwrap().clone();
        assert_eq!((chip.disturbed, chip.sriov), (2, false));
        assert!(create(1, "vir05_1c_8g", AUTO).is_ok());
    });
}

#[test]
fn only_the_first_slice_of_a_card_is_slow() {
    let node = Node::new(Profile::Ascend910B4);
    let first_ms = |ms| node.world.edit(|data| data.slicing.first_ms = ms).unwrap();
    let took = || {
        let start = Instant::now();
        assert!(create(0, "vir05_1c_8g", AUTO).is_ok());
        start.elapsed()
    };
    node.up(|| {
        first_ms(150);
        assert!(took() >= Duration::from_millis(150));
        first_ms(20_000);
        assert!(took() < Duration::from_secs(20));
        first_ms(150);
        assert_eq!(destroy(0, 65_535), code::OK);
        assert!(took() >= Duration::from_millis(150), "the switch is off again after the last one");
    });
}

#[test]
fn destroy_tells_in_use_from_gone_and_can_take_all() {
    let node = Node::new(Profile::Ascend910B4);
    node.up(|| {
        let first = create(0, "vir05_1c_8g", AUTO).unwrap();
        let second = create(0, "vir05_1c_8g", AUTO).unwrap();
        node.world.open_vnpu(first, Some(1)).unwrap();
        assert_eq!(destroy(0, first), code::INVALID_PARAMETER);
        assert_eq!(destroy(1, first), code::INVALID_PARAMETER);
        assert_eq!((destroy(0, second), destroy(0, second)), (code::OK, code::DEVICE_NOT_EXIST));
        assert_eq!(query(0, 0, second).unwrap_err(), code::DEVICE_NOT_EXIST);
        node.world.open_vnpu(first, None).unwrap();
        create(0, "vir10_3c_16g", AUTO).unwrap();
        assert_eq!((destroy(0, 65_535), ids(0)), (code::OK, vec![]));
        assert!(!node.world.data().unwrap().chip(0).unwrap().sriov);
        assert!(std::fs::read_dir(node.dir.path().join("dev")).unwrap().next().is_none());
    });
}

#[test]
fn vnpus_come_back_after_a_boot_only_in_recover_mode() {
    let node = Node::new(Profile::Ascend910B4);
    let mode = || get::<u32>(|out| c!(vnpu::dcmi_get_vnpu_config_recover_mode(out)));
    node.up(|| {
        assert_eq!(mode(), (code::OK, 1), "on by default");
        create(2, "vir10_3c_16g", 140).unwrap();
    });
    let list = std::fs::read_to_string(node.dir.path().join("vnpu.cfg")).unwrap();
    assert_eq!(
        list,
        "vnpu_config_recover:enable\n[vnpu-config start]\n\
         2:140:npu-smi set -t create-vnpu -i 2 -c 0 -f vir10_3c_16g -v 140\n[vnpu-config end]\n"
    );
    node.world.reboot().unwrap();
    assert!(node.world.vnpus().unwrap().is_empty());
    assert_eq!(node.world.replay().unwrap(), [140]);
    node.up(|| {
        assert_eq!(ids(2), [140]);
        assert_eq!(c!(vnpu::dcmi_set_vnpu_config_recover_mode(0)), code::OK);
        assert_eq!(mode(), (code::OK, 0));
        create(3, "vir05_1c_8g", AUTO).unwrap();
    });
    node.world.reboot().unwrap();
    assert_eq!(node.world.replay().unwrap(), Vec::<u32>::new());
    node.up(|| assert_eq!(ids(2), Vec::<u32>::new()));
}

#[test]
fn a_310p_is_made_again_in_its_group() {
    let node = Node::new(Profile::Ascend310P3);
    node.up(|| {
        create(5, "vir04_3c", AUTO).unwrap();
        create(5, "vir02", AUTO).unwrap();
    });
    let before = node.world.vnpus().unwrap();
    node.world.reboot().unwrap();
    assert_eq!(node.world.replay().unwrap().len(), 2);
    let after = node.world.vnpus().unwrap();
    assert_eq!(before.iter().map(|vnpu| vnpu.vfg).collect::<Vec<_>>(), [0, 1]);
    assert_eq!(after.iter().map(|vnpu| (vnpu.id, vnpu.vfg)).collect::<Vec<_>>(), [(116, 0), (117, 1)]);
}

#[test]
fn a_list_that_cannot_be_saved_undoes_a_create_and_brings_a_destroyed_vnpu_back_under_another_id() {
    let node = Node::new(Profile::Ascend910B4);
    node.up(|| {
        let id = create(0, "vir05_1c_8g", AUTO).unwrap();
        node.world.edit(|data| data.slicing.save_code = Some(code::INVALID_PARAMETER)).unwrap();
        assert_eq!(create(1, "vir05_1c_8g", AUTO), Err(code::INVALID_PARAMETER));
        assert_eq!(ids(1), Vec::<u32>::new());
        assert!(!node.world.data().unwrap().chip(1).unwrap().sriov);
        assert_eq!(destroy(0, id), code::INVALID_PARAMETER);
        assert_eq!(ids(0), [id + 1]);
        assert!(node.dir.path().join("dev").join(format!("vdavinci{}", id + 1)).exists());
    });
}

#[test]
fn a_list_that_is_no_plain_file_is_an_error_of_its_own() {
    let node = Node::new(Profile::Ascend910B4);
    std::fs::create_dir(node.dir.path().join("vnpu.cfg")).unwrap();
    node.up(|| {
        assert_eq!(create(0, "vir05_1c_8g", AUTO), Err(code::FILE_OPERATE_FAIL));
        let mode = get::<u32>(|out| c!(vnpu::dcmi_get_vnpu_config_recover_mode(out)));
        assert_eq!(mode.0, code::INNER_ERR, "here every failure looks the same");
    });
    std::fs::remove_dir(node.dir.path().join("vnpu.cfg")).unwrap();
}

#[test]
fn the_list_locked_by_somebody_else_is_occupied() {
    let node = Node::new(Profile::Ascend910B4);
    node.world.edit(|data| data.slicing.lock_wait_ms = 20).unwrap();
    let lock = node.world.hold_config_lock().unwrap();
    node.up(|| {
        assert_eq!(create(0, "vir05_1c_8g", AUTO), Err(code::RESOURCE_OCCUPIED));
        assert_eq!(ids(0), Vec::<u32>::new());
        drop(lock);
        assert!(create(0, "vir05_1c_8g", AUTO).is_ok());
    });
}

#[test]
fn the_last_destroy_can_fail_although_the_vnpu_is_gone() {
    let node = Node::new(Profile::Ascend910B4);
    node.world.edit(|data| data.slicing.sriov_off_code = Some(code::IOCTL_FAIL)).unwrap();
    node.up(|| {
        let id = create(0, "vir05_1c_8g", AUTO).unwrap();
        assert_eq!(destroy(0, id), code::IOCTL_FAIL);
        assert_eq!(ids(0), Vec::<u32>::new());
    });
}

#[test]
fn the_load_query_is_for_the_310p_only() {
    let node = Node::new(Profile::Ascend910B4);
    node.up(|| {
        let id = create(0, "vir05_1c_8g", AUTO).unwrap();
        assert_eq!(query(0, 5, id).unwrap_err(), code::NOT_SUPPORT);
        assert_eq!(query(0, 4, id).unwrap_err(), code::INVALID_PARAMETER);
    });
    let node = Node::new(Profile::Ascend310P3);
    node.up(|| {
        let id = create(2, "vir02", AUTO).unwrap();
        assert_eq!(query(2, 5, id).unwrap().query_info.computing.vdev_memory_total, 6144 * 1024);
    });
}

#[test]
fn a_310p_runs_out_of_ai_cpus_before_cores() {
    let node = Node::new(Profile::Ascend310P3);
    node.up(|| {
        assert!((0..7).all(|_| create(2, "vir01", AUTO).is_ok()));
        assert_eq!(create(2, "vir01", AUTO), Err(code::INVALID_PARAMETER));
        assert!((0..6).all(|_| create(5, "vir01", AUTO).is_ok()));
        assert_eq!(create(5, "vir02", AUTO), Err(code::INVALID_PARAMETER));
        assert!(create(5, "vir02_1c", AUTO).is_ok());
        let free = info(5, 2, SocFreeResource::zeroed()).unwrap();
        assert_eq!((free.computing.device_aicpu, free.vfg_num), (0, 0));
    });
}

#[test]
fn a_910c_is_sliced_only_by_a_newer_driver_with_unbound_dies() {
    let slice = |profile| Node::new(profile).up(|| create(0, "vir05_1c_16g", AUTO));
    assert_eq!(slice(Profile::Ascend910C(DiePolicy::Value(1))), Err(code::NOT_SUPPORT));
    assert_eq!(slice(Profile::Ascend910CSliced(DiePolicy::Value(0))), Err(code::NOT_SUPPORT));
    assert_eq!(slice(Profile::Ascend910CSliced(DiePolicy::Value(1))), Ok(100));
    let node = Node::new(Profile::Ascend910CSliced(DiePolicy::Value(1)));
    node.world.edit(|data| data.slicing.on_910c = Some(TemplateSet::B2)).unwrap();
    node.up(|| assert_eq!(create(0, "vir05_1c_16g", AUTO), Err(code::INVALID_PARAMETER)));
}

#[test]
fn modes_are_read_and_set_where_the_chip_and_the_place_allow_it() {
    let node = Node::new(Profile::Ascend910B4);
    let mode = || get::<c_int>(|out| c!(vnpu::dcmi_get_vdevice_mode(out)));
    node.up(|| {
        assert_eq!(mode(), (code::OK, 0));
        create(0, "vir05_1c_8g", AUTO).unwrap();
        assert_eq!(c!(vnpu::dcmi_set_vdevice_mode(1)), code::RESOURCE_OCCUPIED);
        assert_eq!(c!(control::dcmi_set_device_reset(0, 0, 1)), code::OPER_NOT_PERMITTED, "a sliced chip");
        destroy(0, 65_535);
        assert_eq!(c!(vnpu::dcmi_set_vdevice_mode(1)), code::OK);
        assert_eq!(create(0, "vir05_1c_8g", AUTO), Err(code::OPER_NOT_PERMITTED));
        node.world.edit(|data| data.environment = Environment::PrivilegedPod).unwrap();
        assert_eq!(mode(), (code::OK, 1));
    });
    let node = Node::new(Profile::Ascend910C(DiePolicy::Value(0)));
    node.world.edit(|data| data.environment = Environment::PrivilegedPod).unwrap();
    node.up(|| {
        assert_eq!(mode().0, code::OPER_NOT_PERMITTED);
        assert_eq!(c!(vnpu::dcmi_set_vdevice_mode(0)), code::NOT_SUPPORT);
        assert_eq!(get::<u32>(|out| c!(vnpu::dcmi_get_vnpu_config_recover_mode(out))).0, code::NOT_SUPPORT);
    });
}

#[test]
fn a_library_can_ignore_the_id_and_lie_about_size_and_name() {
    let node = Node::new(Profile::Ascend910B4);
    node.world
        .edit(|data| {
            data.slicing.ignore_ids = true;
            data.slicing.real_memory_mb = Some(4096);
            data.slicing.real_name = Some("vir99".to_owned());
        })
        .unwrap();
    node.up(|| {
        assert_eq!(create(0, "vir05_1c_8g", 107), Ok(100));
        let one = query(0, 0, 100).unwrap().query_info;
        assert_eq!((chars(&one.name).as_str(), one.computing.memory_size), ("vir99", 4096));
    });
}

#[test]
fn a_vnpu_of_somebody_else_is_there_without_a_call() {
    let node = Node::new(Profile::Ascend910B4);
    let id = node.world.add_vnpu(4, "vir10_3c_16g").unwrap();
    node.up(|| {
        assert_eq!(ids(4), [id]);
        node.world.remove_vnpu(id).unwrap();
        assert_eq!(ids(4), Vec::<u32>::new());
    });
    assert_eq!(node.world.calls().unwrap().count("dcmi_create_vdevice"), 0);
    assert_eq!(node.world.vnpus().unwrap(), []);
    assert!(node.world.add_vnpu(4, "vir99").is_err());
}

#[test]
fn a_fault_in_the_middle_of_a_create_leaves_the_vnpu_out_of_the_list() {
    let node = Node::new(Profile::Ascend910B4);
    let fault = Fault::new("dcmi_create_vdevice", Action::Return(code::TIME_OUT)).during().times(1);
    node.world.faults().set([fault]).unwrap();
    node.up(|| {
        assert_eq!(create(0, "vir05_1c_8g", 105), Err(code::TIME_OUT));
        assert_eq!(ids(0), [105]);
        assert!(!node.dir.path().join("vnpu.cfg").exists());
        node.world
            .faults()
            .set([Fault::new("dcmi_set_destroy_vdevice", Action::Return(code::TIME_OUT)).after()])
            .unwrap();
        assert_eq!(destroy(0, 105), code::TIME_OUT);
        assert_eq!(ids(0), Vec::<u32>::new());
    });
}

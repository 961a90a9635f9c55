//! The C structs, declared here on their own: a declaration shared with the driver would hide a layout mistake.

use core::ffi::{c_char, c_ulong};

/// Structs made of integers, floats and arrays of them, for which all-zero bytes are a value.
///
/// # Safety
/// Every bit pattern must be a value of the type.
pub unsafe trait Plain: Copy {
    /// The value whose bytes are all zero.
    #[must_use]
    fn zeroed() -> Self {
        // SAFETY: implementors promise that every bit pattern, all zeros too, is a value.
        unsafe { core::mem::zeroed() }
    }
}

macro_rules! plain {
    ($($ty:ty),* $(,)?) => {$(
        // SAFETY: an integer or float has no invalid bit pattern.
        unsafe impl Plain for $ty {}
    )*};
}
plain!(u8, i8, u32, i32, u64);

macro_rules! structs {
    ($($(#[$meta:meta])* $name:ident = $c_name:literal { $($field:ident: $ty:ty),* $(,)? })*) => {
        $(
            $(#[$meta])*
            #[doc = concat!("C name: `", $c_name, "`.")]
            #[repr(C)]
            #[derive(Clone, Copy, Debug)]
            #[allow(missing_docs)]
            pub struct $name { $(pub $field: $ty),* }
            // SAFETY: only integers, floats and arrays or structs of them.
            unsafe impl Plain for $name {}
        )*

        /// Sizes, alignments and field offsets of every struct, under the names that `tests/abi/print.c` prints.
        fn struct_layout() -> Vec<(String, usize)> {
            let mut lines = Vec::new();
            $(
                lines.push((concat!("sizeof.", $c_name).to_owned(), core::mem::size_of::<$name>()));
                lines.push((concat!("alignof.", $c_name).to_owned(), core::mem::align_of::<$name>()));
                $(
                    let field = stringify!($field).trim_start_matches("r#");
                    lines.push((format!(concat!("offsetof.", $c_name, ".{}"), field), core::mem::offset_of!($name, $field)));
                )*
            )*
            lines
        }
    };
}

structs! {
    ChipInfo = "dcmi_chip_info" { chip_type: [u8; 32], chip_name: [u8; 32], chip_ver: [u8; 32], aicore_cnt: u32 }
    ChipInfoV2 = "dcmi_chip_info_v2" {
        chip_type: [u8; 32], chip_name: [u8; 32], chip_ver: [u8; 32], aicore_cnt: u32, npu_name: [u8; 32],
    }
    /// Device before bus, unlike [`PcieInfoAll`].
    PcieInfo = "dcmi_pcie_info" {
        deviceid: u32, venderid: u32, subvenderid: u32, subdeviceid: u32, bdf_deviceid: u32, bdf_busid: u32, bdf_funcid: u32,
    }
    PcieInfoAll = "dcmi_pcie_info_all" {
        venderid: u32, subvenderid: u32, deviceid: u32, subdeviceid: u32, domain: i32, bdf_busid: u32, bdf_deviceid: u32,
        bdf_funcid: u32, reserve: [u8; 32],
    }
    BoardInfo = "dcmi_board_info" { board_id: u32, pcb_id: u32, bom_id: u32, slot_id: u32 }
    DieId = "dcmi_die_id" { soc_die: [u32; 5] }
    ElabelInfo = "dcmi_elabel_info" {
        product_name: [c_char; 256], model: [c_char; 256], manufacturer: [c_char; 256], manufacturer_date: [c_char; 256],
        serial_number: [c_char; 256],
    }
    HbmInfo = "dcmi_hbm_info" { memory_size: u64, freq: u32, memory_usage: u64, temp: i32, bandwith_util_rate: u32 }
    MemoryInfoV3 = "dcmi_get_memory_info_stru" {
        memory_size: u64, memory_available: u64, freq: u32, hugepagesize: c_ulong, hugepages_total: c_ulong,
        hugepages_free: c_ulong, utiliza: u32, reserve: [u8; 60],
    }
    MemoryInfo = "dcmi_memory_info_stru" { memory_size: u64, freq: u32, utiliza: u32 }
    EccInfo = "dcmi_ecc_info" {
        enable_flag: i32, single_bit_error_cnt: u32, double_bit_error_cnt: u32, total_single_bit_error_cnt: u32,
        total_double_bit_error_cnt: u32, single_bit_isolated_pages_cnt: u32, double_bit_isolated_pages_cnt: u32,
        single_bit_next_isolated_pages_cnt: u32, double_bit_next_isolated_pages_cnt: u32,
    }
    ProcMemInfo = "dcmi_proc_mem_info" { proc_id: i32, proc_mem_usage: c_ulong }
    BaseResource = "dcmi_base_resource" {
        token: u64, token_max: u64, task_timeout: u64, vfg_id: u32, vip_mode: u8, reserved: [u8; 31],
    }
    ComputingResource = "dcmi_computing_resource" {
        aic: f32, aiv: f32, dsa: u16, rtsq: u16, acsq: u16, cdqm: u16, c_core: u16, ffts: u16, sdma: u16, pcie_dma: u16,
        memory_size: u64, event_id: u32, notify_id: u32, stream_id: u32, model_id: u32, topic_schedule_aicpu: u16,
        host_ctrl_cpu: u16, host_aicpu: u16, device_aicpu: u16, topic_ctrl_cpu_slot: u16, vdev_aicore_utilization: u32,
        vdev_memory_total: u64, vdev_memory_free: u64, reserved: [u8; 12],
    }
    MediaResource = "dcmi_media_resource" {
        jpegd: f32, jpege: f32, vpc: f32, vdec: f32, pngd: f32, venc: f32, reserved: [u8; 32],
    }
    CreateVdevRes = "dcmi_create_vdev_res_stru" {
        vdev_id: u32, vfg_id: u32, template_name: [c_char; 32], reserved: [u8; 64],
    }
    CreateVdevOut = "dcmi_create_vdev_out" {
        vdev_id: u32, pcie_bus: u32, pcie_device: u32, pcie_func: u32, vfg_id: u32, reserved: [u8; 32],
    }
    VdevQueryInfo = "dcmi_vdev_query_info" {
        name: [c_char; 16], status: u32, is_container_used: u32, vfid: u32, vfg_id: u32, container_id: u64,
        base: BaseResource, computing: ComputingResource, media: MediaResource,
    }
    VdevQuery = "dcmi_vdev_query_stru" { vdev_id: u32, query_info: VdevQueryInfo }
    SocFreeResource = "dcmi_soc_free_resource" {
        vfg_num: u32, vfg_bitmap: u32, base: BaseResource, computing: ComputingResource, media: MediaResource,
    }
    SocTotalResource = "dcmi_soc_total_resource" {
        vdev_num: u32, vdev_id: [u32; 32], vfg_num: u32, vfg_bitmap: u32, base: BaseResource,
        computing: ComputingResource, media: MediaResource,
    }
    SpodInfo = "dcmi_spod_info" {
        sdid: u32, scale_type: u32, super_pod_id: u32, server_id: u32, chassis_id: u32, super_pod_type: u32, reserve: [u32; 6],
    }
    DmsFaultEvent = "dcmi_dms_fault_event" {
        event_id: u32, deviceid: u16, node_type: u8, node_id: u8, sub_node_type: u8, sub_node_id: u8, severity: u8,
        assertion: u8, event_serial_num: i32, notify_serial_num: i32, alarm_raised_time: u64, event_name: [c_char; 256],
        additional_info: [c_char; 32], resv: [u8; 32],
    }
    /// The union of the C declaration has one member today.
    Event = "dcmi_event" { r#type: u32, event_t: DmsFaultEvent }
    EventFilter = "dcmi_event_filter" { filter_flag: u64, event_id: u32, severity: u8, node_type: u8, resv: [u8; 32] }
    MultiUtilizationInfo = "dcmi_multi_utilization_info" {
        aic_util: u32, aiv_util: u32, aicore_util: u32, npu_util: u32, reserved: [u32; 8],
    }
    IpAddr = "dcmi_ip_addr" { u_addr: [u8; 16], ip_type: u32 }
    /// Only its size and its first field are known.
    HccsBandwidthInfo = "dcmi_hccs_bandwidth_info" { profiling_time: i32, bandwidth: [f64; 34] }
    /// Only its size is known.
    PcieLinkBandwidthInfo = "dcmi_pcie_link_bandwidth_info" { words: [u64; 11] }
}

/// The numbers of the C enumerations and limits, under the names of `tests/abi/dcmi.h`.
const CONSTANTS: &[(&str, i64)] = &[
    ("sizeof.enum", 4),
    ("DCMI_UNIT_NPU", 0),
    ("DCMI_UNIT_MCU", 1),
    ("DCMI_UNIT_CPU", 2),
    ("DCMI_UNIT_INVALID", 255),
    ("DCMI_DIE_NDIE", 0),
    ("DCMI_DIE_VDIE", 1),
    ("DCMI_DIE_DDIE", 2),
    ("DCMI_RESET_OUT_OF_BAND", 0),
    ("DCMI_RESET_IN_BAND", 1),
    ("DCMI_VDEVICE_DOCKER", 0),
    ("DCMI_VDEVICE_VM", 1),
    ("DCMI_DIE_POLICY_UNION", 0),
    ("DCMI_DIE_POLICY_INDEPENDENT", 1),
    ("DCMI_MAIN_CHIP_INF", 12),
    ("DCMI_MAIN_HCCS", 16),
    ("DCMI_MAIN_SVM", 51),
    ("DCMI_MAIN_VDEV_MNG", 52),
    ("DCMI_MAIN_SEC", 53),
    ("DCMI_MAIN_SIO", 56),
    ("DCMI_MAIN_DEVICE_SHARE", 0x8001),
    ("DCMI_VDEV_GET_ONE", 0),
    ("DCMI_VDEV_GET_TOTAL", 1),
    ("DCMI_VDEV_GET_FREE", 2),
    ("DCMI_VDEV_SET_SRIOV", 3),
    ("DCMI_VDEV_GET_ACTIVITY", 5),
    ("DCMI_CHIP_INF_CHIP_ID", 0),
    ("DCMI_CHIP_INF_SPOD_INFO", 1),
    ("DCMI_BOOT_UNINIT", 0),
    ("DCMI_BOOT_BIOS", 1),
    ("DCMI_BOOT_OS", 2),
    ("DCMI_BOOT_FINISH", 3),
    ("DCMI_BOOT_SYSTEM_START_FINISH", 16),
    ("DCMI_MEMORY_DDR", 0),
    ("DCMI_MEMORY_SRAM", 1),
    ("DCMI_MEMORY_HBM", 2),
    ("DCMI_MEMORY_NPU", 3),
    ("DCMI_MEMORY_NONE", 255),
    ("DCMI_FREQ_DDR", 1),
    ("DCMI_FREQ_CTRL_CPU", 2),
    ("DCMI_FREQ_HBM", 6),
    ("DCMI_FREQ_AICORE", 7),
    ("DCMI_UTIL_DDR_MEMORY", 1),
    ("DCMI_UTIL_AICORE", 2),
    ("DCMI_UTIL_AICPU", 3),
    ("DCMI_UTIL_HBM", 6),
    ("DCMI_UTIL_NPU", 13),
    ("DCMI_TOPO_SELF", 0),
    ("DCMI_TOPO_SYS", 1),
    ("DCMI_TOPO_PHB", 2),
    ("DCMI_TOPO_HCCS", 3),
    ("DCMI_TOPO_PXB", 4),
    ("DCMI_TOPO_PIX", 5),
    ("DCMI_TOPO_SIO", 6),
    ("DCMI_TOPO_HCCS_SW", 7),
    ("DCMI_TOPO_UB", 8),
    ("DCMI_HEALTH_OK", 0),
    ("DCMI_HEALTH_MINOR", 1),
    ("DCMI_HEALTH_MAJOR", 2),
    ("DCMI_HEALTH_CRITICAL", 3),
    ("DCMI_HEALTH_UNKNOWN", 4),
    ("DCMI_HEALTH_GONE", 0xFFFF_FFFF),
    ("DCMI_NETWORK_OK", 0),
    ("DCMI_NETWORK_MAX", 255),
    ("DCMI_IP_V4", 0),
    ("DCMI_IP_V6", 1),
    ("DCMI_EVENT_DMS_FAULT", 0),
    ("DCMI_EVENT_RECOVERED", 0),
    ("DCMI_EVENT_OCCURRED", 1),
    ("DCMI_EVENT_ONE_SHOT", 2),
    ("DCMI_FILTER_EVENT_ID", 1),
    ("DCMI_FILTER_SEVERITY", 2),
    ("DCMI_FILTER_NODE_TYPE", 4),
    ("DCMI_VDEV_ID_AUTO", 0xFFFF_FFFF),
    ("DCMI_VDEV_ID_ALL", 65535),
    ("DCMI_MAX_CARDS", 64),
    ("DCMI_MAX_DEVICES_PER_CARD", 4),
    ("DCMI_MAX_VDEVS", 32),
    ("DCMI_MAX_PROCESSES", 32),
    ("DCMI_MAX_ERROR_CODES", 128),
    ("DCMI_MAX_VERSION", 255),
    ("DCMI_OK", 0),
    ("DCMI_ERR_INVALID_PARAMETER", -8001),
    ("DCMI_ERR_OPER_NOT_PERMITTED", -8002),
    ("DCMI_ERR_MEM_OPERATE_FAIL", -8003),
    ("DCMI_ERR_SECURE_FUN_FAIL", -8004),
    ("DCMI_ERR_INNER_ERR", -8005),
    ("DCMI_ERR_TIME_OUT", -8006),
    ("DCMI_ERR_INVALID_DEVICE_ID", -8007),
    ("DCMI_ERR_DEVICE_NOT_EXIST", -8008),
    ("DCMI_ERR_IOCTL_FAIL", -8009),
    ("DCMI_ERR_SEND_MSG_FAIL", -8010),
    ("DCMI_ERR_RECV_MSG_FAIL", -8011),
    ("DCMI_ERR_NOT_READY", -8012),
    ("DCMI_ERR_NOT_SUPPORT_IN_CONTAINER", -8013),
    ("DCMI_ERR_FILE_OPERATE_FAIL", -8014),
    ("DCMI_ERR_RESET_FAIL", -8015),
    ("DCMI_ERR_ABORT_OPERATE", -8016),
    ("DCMI_ERR_IS_UPGRADING", -8017),
    ("DCMI_ERR_RESOURCE_OCCUPIED", -8020),
    ("DCMI_ERR_PARTITION_NOT_RIGHT", -8022),
    ("DCMI_ERR_CONFIG_INFO_NOT_EXIST", -8023),
    ("DCMI_ERR_NOT_SUPPORT", -8255),
];

/// Every size, alignment, offset and constant of this library as `(name, value)`, in no particular order.
///
/// Compare it with what C makes of `tests/abi/dcmi.h`: [`crate::abi::c_layout`].
#[must_use]
pub fn layout() -> Vec<(String, i64)> {
    struct_layout()
        .into_iter()
        .filter_map(|(name, value)| Some((name, i64::try_from(value).ok()?)))
        .chain(CONSTANTS.iter().map(|(name, value)| ((*name).to_owned(), *value)))
        .collect()
}

/// Copies `text` into a fixed array of bytes: cut if too long, always NUL-terminated.
pub(crate) fn bytes<const N: usize>(text: &str) -> [u8; N] {
    let mut array = [0; N];
    for (slot, byte) in array.iter_mut().take(N - 1).zip(text.bytes()) {
        *slot = byte;
    }
    array
}

/// The same for arrays of C characters.
pub(crate) fn chars<const N: usize>(text: &str) -> [c_char; N] {
    bytes(text).map(|byte: u8| c_char::from_ne_bytes([byte]))
}

/// Text up to the first NUL, within the array.
pub(crate) fn text(array: &[c_char]) -> String {
    let bytes: Vec<u8> = array.iter().take_while(|c| **c != 0).map(|c| c.to_ne_bytes()[0]).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

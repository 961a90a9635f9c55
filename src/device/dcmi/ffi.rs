//! The vendor library's C, spelled in Rust and nothing else: structs, constants, function types.
//!
//! Names of fields are the vendor's; padding is explicit, so that no byte of a struct is uninitialised. Sizes and
//! offsets are compared with a C compiler's in `tests/it/abi.rs`.

#![allow(unsafe_code, missing_docs, clippy::pub_underscore_fields)]

use core::ffi::{c_char, c_int, c_uint, c_ulong, c_void};

/// Structs that are plain memory: all-zero bytes are a value.
///
/// # Safety
/// Only for `#[repr(C)]` structs of integers, floats and arrays or structs of them.
pub unsafe trait Plain: Copy {
    /// The value whose bytes are all zero.
    #[must_use]
    fn zeroed() -> Self {
        // SAFETY: implementors have no invalid bit pattern.
        unsafe { core::mem::zeroed() }
    }
}

// SAFETY: an integer.
unsafe impl Plain for c_int {}
// SAFETY: an integer.
unsafe impl Plain for c_uint {}

macro_rules! structs {
    ($($(#[$meta:meta])* pub struct $name:ident = $c_name:literal { $(pub $field:ident: $ty:ty,)* })*) => {
        $(
            $(#[$meta])*
            #[repr(C)]
            #[derive(Debug, Clone, Copy)]
            pub struct $name { $(pub $field: $ty,)* }
            // SAFETY: integers, floats, and arrays and structs of them.
            unsafe impl Plain for $name {}
        )*

        /// Size, alignment and offsets of every struct, as `sizeof.NAME`, `alignof.NAME` and `offsetof.NAME.FIELD`.
        #[must_use]
        pub fn layout() -> Vec<(String, usize)> {
            let mut lines = Vec::new();
            $(
                lines.push((concat!("sizeof.", $c_name).to_owned(), size_of::<$name>()));
                lines.push((concat!("alignof.", $c_name).to_owned(), align_of::<$name>()));
                $(
                    let field = stringify!($field).trim_start_matches("r#");
                    if !field.starts_with('_') {
                        let offset = core::mem::offset_of!($name, $field);
                        lines.push((format!(concat!("offsetof.", $c_name, ".{}"), field), offset));
                    }
                )*
            )*
            lines
        }
    };
}

structs! {
    /// `dcmi_chip_info`, 100 bytes.
    pub struct ChipInfo = "dcmi_chip_info" {
        pub chip_type: [c_char; 32],
        pub chip_name: [c_char; 32],
        pub chip_ver: [c_char; 32],
        pub aicore_cnt: c_uint,
    }
    /// `dcmi_chip_info_v2`, 132 bytes.
    pub struct ChipInfoV2 = "dcmi_chip_info_v2" {
        pub chip_type: [c_char; 32],
        pub chip_name: [c_char; 32],
        pub chip_ver: [c_char; 32],
        pub aicore_cnt: c_uint,
        pub npu_name: [c_char; 32],
    }
    /// `dcmi_pcie_info_all`, 64 bytes. The domain is signed.
    pub struct PcieInfoAll = "dcmi_pcie_info_all" {
        pub venderid: c_uint,
        pub subvenderid: c_uint,
        pub deviceid: c_uint,
        pub subdeviceid: c_uint,
        pub domain: c_int,
        pub bdf_busid: c_uint,
        pub bdf_deviceid: c_uint,
        pub bdf_funcid: c_uint,
        pub reserve: [u8; 32],
    }
    /// `dcmi_board_info`, 16 bytes.
    pub struct BoardInfo = "dcmi_board_info" {
        pub board_id: c_uint,
        pub pcb_id: c_uint,
        pub bom_id: c_uint,
        pub slot_id: c_uint,
    }
    /// `dcmi_die_id`, 20 bytes.
    pub struct DieId = "dcmi_die_id" {
        pub soc_die: [c_uint; 5],
    }
    /// `dcmi_elabel_info`, 1280 bytes.
    pub struct ElabelInfo = "dcmi_elabel_info" {
        pub product_name: [c_char; 256],
        pub model: [c_char; 256],
        pub manufacturer: [c_char; 256],
        pub manufacturer_date: [c_char; 256],
        pub serial_number: [c_char; 256],
    }
    /// `dcmi_hbm_info`, 32 bytes. Memory in MiB, temperature in °C.
    pub struct HbmInfo = "dcmi_hbm_info" {
        pub memory_size: u64,
        pub freq: c_uint,
        pub _pad: [u8; 4],
        pub memory_usage: u64,
        pub temp: c_int,
        pub bandwith_util_rate: c_uint,
    }
    /// `dcmi_get_memory_info_stru`, 112 bytes. Memory in MiB, huge page size in KiB.
    pub struct MemoryInfoV3 = "dcmi_get_memory_info_stru" {
        pub memory_size: u64,
        pub memory_available: u64,
        pub freq: c_uint,
        pub _pad: [u8; 4],
        pub hugepagesize: c_ulong,
        pub hugepages_total: c_ulong,
        pub hugepages_free: c_ulong,
        pub utiliza: c_uint,
        pub reserve: [u8; 60],
    }
    /// `dcmi_memory_info_stru`, 16 bytes.
    pub struct MemoryInfo = "dcmi_memory_info_stru" {
        pub memory_size: u64,
        pub freq: c_uint,
        pub utiliza: c_uint,
    }
    /// `dcmi_ecc_info`, 36 bytes here and 28 in older headers: the last two may stay untouched.
    pub struct EccInfo = "dcmi_ecc_info" {
        pub enable_flag: c_int,
        pub single_bit_error_cnt: c_uint,
        pub double_bit_error_cnt: c_uint,
        pub total_single_bit_error_cnt: c_uint,
        pub total_double_bit_error_cnt: c_uint,
        pub single_bit_isolated_pages_cnt: c_uint,
        pub double_bit_isolated_pages_cnt: c_uint,
        pub single_bit_next_isolated_pages_cnt: c_uint,
        pub double_bit_next_isolated_pages_cnt: c_uint,
    }
    /// `dcmi_proc_mem_info`, 16 bytes. Host process id; memory in bytes.
    pub struct ProcMemInfo = "dcmi_proc_mem_info" {
        pub proc_id: c_int,
        pub _pad: [u8; 4],
        pub proc_mem_usage: c_ulong,
    }
    /// `dcmi_base_resource`, 64 bytes.
    pub struct BaseResource = "dcmi_base_resource" {
        pub token: u64,
        pub token_max: u64,
        pub task_timeout: u64,
        pub vfg_id: c_uint,
        pub vip_mode: u8,
        pub reserved: [u8; 31],
        pub _pad: [u8; 4],
    }
    /// `dcmi_computing_resource`, 96 bytes. Cores are floats; memory in MiB, of the last two in KiB.
    pub struct ComputingResource = "dcmi_computing_resource" {
        pub aic: f32,
        pub aiv: f32,
        pub dsa: u16,
        pub rtsq: u16,
        pub acsq: u16,
        pub cdqm: u16,
        pub c_core: u16,
        pub ffts: u16,
        pub sdma: u16,
        pub pcie_dma: u16,
        pub memory_size: u64,
        pub event_id: c_uint,
        pub notify_id: c_uint,
        pub stream_id: c_uint,
        pub model_id: c_uint,
        pub topic_schedule_aicpu: u16,
        pub host_ctrl_cpu: u16,
        pub host_aicpu: u16,
        pub device_aicpu: u16,
        pub topic_ctrl_cpu_slot: u16,
        pub _pad: [u8; 2],
        pub vdev_aicore_utilization: c_uint,
        pub vdev_memory_total: u64,
        pub vdev_memory_free: u64,
        pub reserved: [u8; 12],
        pub _pad_end: [u8; 4],
    }
    /// `dcmi_media_resource`, 56 bytes.
    pub struct MediaResource = "dcmi_media_resource" {
        pub jpegd: f32,
        pub jpege: f32,
        pub vpc: f32,
        pub vdec: f32,
        pub pngd: f32,
        pub venc: f32,
        pub reserved: [u8; 32],
    }
    /// `dcmi_create_vdev_res_stru`, 104 bytes.
    pub struct CreateVdevRes = "dcmi_create_vdev_res_stru" {
        pub vdev_id: c_uint,
        pub vfg_id: c_uint,
        pub template_name: [c_char; 32],
        pub reserved: [u8; 64],
    }
    /// `dcmi_create_vdev_out`, 52 bytes.
    pub struct CreateVdevOut = "dcmi_create_vdev_out" {
        pub vdev_id: c_uint,
        pub pcie_bus: c_uint,
        pub pcie_device: c_uint,
        pub pcie_func: c_uint,
        pub vfg_id: c_uint,
        pub reserved: [u8; 32],
    }
    /// `dcmi_vdev_query_info`, 256 bytes.
    pub struct VdevQueryInfo = "dcmi_vdev_query_info" {
        pub name: [c_char; 16],
        pub status: c_uint,
        pub is_container_used: c_uint,
        pub vfid: c_uint,
        pub vfg_id: c_uint,
        pub container_id: u64,
        pub base: BaseResource,
        pub computing: ComputingResource,
        pub media: MediaResource,
    }
    /// `dcmi_vdev_query_stru`, 264 bytes; the id is an input.
    pub struct VdevQuery = "dcmi_vdev_query_stru" {
        pub vdev_id: c_uint,
        pub _pad: [u8; 4],
        pub query_info: VdevQueryInfo,
    }
    /// `dcmi_soc_free_resource`, 224 bytes.
    pub struct SocFreeResource = "dcmi_soc_free_resource" {
        pub vfg_num: c_uint,
        pub vfg_bitmap: c_uint,
        pub base: BaseResource,
        pub computing: ComputingResource,
        pub media: MediaResource,
    }
    /// `dcmi_soc_total_resource`, 360 bytes.
    pub struct SocTotalResource = "dcmi_soc_total_resource" {
        pub vdev_num: c_uint,
        pub vdev_id: [c_uint; 32],
        pub vfg_num: c_uint,
        pub vfg_bitmap: c_uint,
        pub _pad: [u8; 4],
        pub base: BaseResource,
        pub computing: ComputingResource,
        pub media: MediaResource,
    }
    /// `dcmi_spod_info`, 48 bytes.
    pub struct SpodInfo = "dcmi_spod_info" {
        pub sdid: c_uint,
        pub scale_type: c_uint,
        pub super_pod_id: c_uint,
        pub server_id: c_uint,
        pub chassis_id: c_uint,
        pub super_pod_type: c_uint,
        pub reserve: [c_uint; 6],
    }
    /// `dcmi_dms_fault_event`, 352 bytes. `deviceid` is a logic id, the time is in ms since the epoch.
    pub struct DmsFaultEvent = "dcmi_dms_fault_event" {
        pub event_id: c_uint,
        pub deviceid: u16,
        pub node_type: u8,
        pub node_id: u8,
        pub sub_node_type: u8,
        pub sub_node_id: u8,
        pub severity: u8,
        pub assertion: u8,
        pub event_serial_num: c_int,
        pub notify_serial_num: c_int,
        pub _pad: [u8; 4],
        pub alarm_raised_time: u64,
        pub event_name: [c_char; 256],
        pub additional_info: [c_char; 32],
        pub resv: [u8; 32],
    }
    /// `dcmi_event`, 360 bytes; the vendor's union has this one member.
    pub struct Event = "dcmi_event" {
        pub r#type: c_uint,
        pub _pad: [u8; 4],
        pub event_t: DmsFaultEvent,
    }
    /// `dcmi_event_filter`, 48 bytes; passed by value.
    pub struct EventFilter = "dcmi_event_filter" {
        pub filter_flag: u64,
        pub event_id: c_uint,
        pub severity: u8,
        pub node_type: u8,
        pub resv: [u8; 32],
        pub _pad: [u8; 2],
    }
    /// `dcmi_multi_utilization_info`, 48 bytes, percent.
    pub struct MultiUtilizationInfo = "dcmi_multi_utilization_info" {
        pub aic_util: c_uint,
        pub aiv_util: c_uint,
        pub aicore_util: c_uint,
        pub npu_util: c_uint,
        pub reserved: [c_uint; 8],
    }
    /// `dcmi_pcie_info`, 28 bytes, without the PCI domain; device before bus, unlike [`PcieInfoAll`].
    pub struct PcieInfo = "dcmi_pcie_info" {
        pub deviceid: c_uint,
        pub venderid: c_uint,
        pub subvenderid: c_uint,
        pub subdeviceid: c_uint,
        pub bdf_deviceid: c_uint,
        pub bdf_busid: c_uint,
        pub bdf_funcid: c_uint,
    }
    /// `dcmi_ip_addr`, 20 bytes; the union is 4 bytes of IPv4 or 16 of IPv6.
    pub struct IpAddr = "dcmi_ip_addr" {
        pub u_addr: [u8; 16],
        pub ip_type: c_uint,
    }
    /// `dcmi_hccs_bandwidth_info`, 280 bytes; the time in ms is an input.
    pub struct HccsBandwidthInfo = "dcmi_hccs_bandwidth_info" {
        pub profiling_time: c_int,
        pub _pad: [u8; 4],
        pub bandwidth: [f64; 34],
    }
    /// `dcmi_pcie_link_bandwidth_info`, 88 bytes, of which only the size is known.
    pub struct PcieLinkBandwidthInfo = "dcmi_pcie_link_bandwidth_info" {
        pub words: [u64; 11],
    }
}

macro_rules! constants {
    ($($name:ident: $ty:ty = $value:expr,)*) => {
        $(pub const $name: $ty = $value;)*

        /// Every constant under its C name, which is ours behind `DCMI_`.
        #[must_use]
        pub fn constants() -> Vec<(String, i64)> {
            vec![$((concat!("DCMI_", stringify!($name)).to_owned(), i64::from($name)),)*]
        }
    };
}

// The unit type, die, reset channel, vNPU mode and so on are enums of 4 bytes in C.
constants! {
    MAX_CARDS: u16 = 64,
    MAX_DEVICES_PER_CARD: u16 = 4,
    MAX_VDEVS: u16 = 32,
    MAX_PROCESSES: u16 = 32,
    MAX_ERROR_CODES: u16 = 128,
    MAX_VERSION: u16 = 255,
    UNIT_NPU: c_uint = 0,
    UNIT_MCU: c_uint = 1,
    UNIT_CPU: c_uint = 2,
    UNIT_INVALID: c_uint = 255,
    DIE_NDIE: c_uint = 0,
    DIE_VDIE: c_uint = 1,
    DIE_DDIE: c_uint = 2,
    RESET_OUT_OF_BAND: c_uint = 0,
    RESET_IN_BAND: c_uint = 1,
    VDEVICE_DOCKER: c_int = 0,
    VDEVICE_VM: c_int = 1,
    DIE_POLICY_UNION: c_uint = 0,
    DIE_POLICY_INDEPENDENT: c_uint = 1,
    MAIN_CHIP_INF: c_uint = 12,
    MAIN_HCCS: c_uint = 16,
    MAIN_SVM: c_uint = 51,
    MAIN_VDEV_MNG: c_uint = 52,
    MAIN_SEC: c_uint = 53,
    MAIN_SIO: c_uint = 56,
    MAIN_DEVICE_SHARE: c_uint = 0x8001,
    VDEV_GET_ONE: c_uint = 0,
    VDEV_GET_TOTAL: c_uint = 1,
    VDEV_GET_FREE: c_uint = 2,
    VDEV_SET_SRIOV: c_uint = 3,
    VDEV_GET_ACTIVITY: c_uint = 5,
    VDEV_ID_AUTO: c_uint = 0xFFFF_FFFF,
    VDEV_ID_ALL: c_uint = 65535,
    CHIP_INF_CHIP_ID: c_uint = 0,
    CHIP_INF_SPOD_INFO: c_uint = 1,
    BOOT_UNINIT: c_uint = 0,
    BOOT_BIOS: c_uint = 1,
    BOOT_OS: c_uint = 2,
    BOOT_FINISH: c_uint = 3,
    BOOT_SYSTEM_START_FINISH: c_uint = 16,
    MEMORY_DDR: c_uint = 0,
    MEMORY_SRAM: c_uint = 1,
    MEMORY_HBM: c_uint = 2,
    MEMORY_NPU: c_uint = 3,
    MEMORY_NONE: c_uint = 255,
    FREQ_DDR: c_uint = 1,
    FREQ_CTRL_CPU: c_uint = 2,
    FREQ_HBM: c_uint = 6,
    FREQ_AICORE: c_uint = 7,
    UTIL_DDR_MEMORY: c_int = 1,
    UTIL_AICORE: c_int = 2,
    UTIL_AICPU: c_int = 3,
    UTIL_HBM: c_int = 6,
    UTIL_NPU: c_int = 13,
    TOPO_SELF: c_int = 0,
    TOPO_SYS: c_int = 1,
    TOPO_PHB: c_int = 2,
    TOPO_HCCS: c_int = 3,
    TOPO_PXB: c_int = 4,
    TOPO_PIX: c_int = 5,
    TOPO_SIO: c_int = 6,
    TOPO_HCCS_SW: c_int = 7,
    TOPO_UB: c_int = 8,
    HEALTH_OK: c_uint = 0,
    HEALTH_MINOR: c_uint = 1,
    HEALTH_MAJOR: c_uint = 2,
    HEALTH_CRITICAL: c_uint = 3,
    HEALTH_UNKNOWN: c_uint = 4,
    HEALTH_GONE: c_uint = 0xFFFF_FFFF,
    NETWORK_OK: c_uint = 0,
    NETWORK_MAX: c_uint = 255,
    EVENT_DMS_FAULT: c_uint = 0,
    EVENT_RECOVERED: u8 = 0,
    EVENT_OCCURRED: u8 = 1,
    EVENT_ONE_SHOT: u8 = 2,
    FILTER_EVENT_ID: c_uint = 1,
    FILTER_SEVERITY: c_uint = 2,
    FILTER_NODE_TYPE: c_uint = 4,
    IP_V4: c_uint = 0,
    IP_V6: c_uint = 1,
    OK: c_int = 0,
    ERR_INVALID_PARAMETER: c_int = -8001,
    ERR_OPER_NOT_PERMITTED: c_int = -8002,
    ERR_MEM_OPERATE_FAIL: c_int = -8003,
    ERR_SECURE_FUN_FAIL: c_int = -8004,
    ERR_INNER_ERR: c_int = -8005,
    ERR_TIME_OUT: c_int = -8006,
    ERR_INVALID_DEVICE_ID: c_int = -8007,
    ERR_DEVICE_NOT_EXIST: c_int = -8008,
    ERR_IOCTL_FAIL: c_int = -8009,
    ERR_SEND_MSG_FAIL: c_int = -8010,
    ERR_RECV_MSG_FAIL: c_int = -8011,
    ERR_NOT_READY: c_int = -8012,
    ERR_NOT_SUPPORT_IN_CONTAINER: c_int = -8013,
    ERR_FILE_OPERATE_FAIL: c_int = -8014,
    ERR_RESET_FAIL: c_int = -8015,
    ERR_ABORT_OPERATE: c_int = -8016,
    ERR_IS_UPGRADING: c_int = -8017,
    ERR_RESOURCE_OCCUPIED: c_int = -8020,
    ERR_PARTITION_NOT_RIGHT: c_int = -8022,
    ERR_CONFIG_INFO_NOT_EXIST: c_int = -8023,
    ERR_NOT_SUPPORT: c_int = -8255,
}

/// Topology types that are direct links between two dies.
pub const LINKS: [c_int; 3] = [TOPO_HCCS, TOPO_SIO, TOPO_HCCS_SW];
/// Codes that say: the device is not there, or not any more, or not yet.
pub const GONE: [c_int; 3] = [ERR_INVALID_DEVICE_ID, ERR_DEVICE_NOT_EXIST, ERR_NOT_READY];
/// Physical ids are below 256 and share the number space of vNPUs, which ends at 1123.
pub const LAST_ID: c_uint = 1123;
/// First id that a vNPU can have.
pub const FIRST_VDEV_ID: c_uint = 100;
/// AI CPUs of a chip or vNPU where they are shared.
pub const AI_CPUS_SHARED: u16 = 0xFFFF;
/// More AI cores than any chip has.
pub const MOST_AI_CORES: u16 = 4096;

/// The vendor's word for a return code.
#[must_use]
pub fn code_name(code: c_int) -> &'static str {
    match code {
        OK => "ok",
        ERR_INVALID_PARAMETER => "invalid parameter",
        ERR_OPER_NOT_PERMITTED => "operation not permitted",
        ERR_MEM_OPERATE_FAIL => "memory operation failed",
        ERR_SECURE_FUN_FAIL => "secure function failed",
        ERR_INNER_ERR => "inner error",
        ERR_TIME_OUT => "time-out",
        ERR_INVALID_DEVICE_ID => "invalid device id",
        ERR_DEVICE_NOT_EXIST => "device does not exist",
        ERR_IOCTL_FAIL => "ioctl failed",
        ERR_SEND_MSG_FAIL => "sending to the device failed",
        ERR_RECV_MSG_FAIL => "receiving from the device failed",
        ERR_NOT_READY => "device not ready",
        ERR_NOT_SUPPORT_IN_CONTAINER => "not supported in a container, or busy",
        ERR_FILE_OPERATE_FAIL => "file operation failed",
        ERR_RESET_FAIL => "reset failed",
        ERR_ABORT_OPERATE => "aborted",
        ERR_IS_UPGRADING => "upgrade in progress",
        ERR_RESOURCE_OCCUPIED => "resource occupied",
        ERR_PARTITION_NOT_RIGHT => "wrong partition",
        ERR_CONFIG_INFO_NOT_EXIST => "no configuration",
        ERR_NOT_SUPPORT => "not supported",
        _ => "unknown code",
    }
}

/// `(void)`.
pub type Init = unsafe extern "C" fn() -> c_int;
/// `(text, length)`.
pub type Text = unsafe extern "C" fn(*mut c_char, c_uint) -> c_int;
/// `(count, list, length)`.
pub type CardList = unsafe extern "C" fn(*mut c_int, *mut c_int, c_int) -> c_int;
/// `(card, out)`.
pub type CardInt = unsafe extern "C" fn(c_int, *mut c_int) -> c_int;
/// `(card, NPU chips, index of the MCU, index of the CPU)`.
pub type CardChips = unsafe extern "C" fn(c_int, *mut c_int, *mut c_int, *mut c_int) -> c_int;
/// `(out, card, device)`: the output comes first.
pub type LogicId = unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int;
/// `(id, out)`.
pub type Convert = unsafe extern "C" fn(c_uint, *mut c_uint) -> c_int;
/// `(card, device, out)`, the commonest form.
pub type Chip<T> = unsafe extern "C" fn(c_int, c_int, *mut T) -> c_int;
/// `(card, device, type, out)`.
pub type Die = unsafe extern "C" fn(c_int, c_int, c_uint, *mut DieId) -> c_int;
/// `(card, device, text, length)`.
pub type ChipText = unsafe extern "C" fn(c_int, c_int, *mut c_char, c_int) -> c_int;
/// `(card, device, count, list, length)`.
pub type ErrorCodes = unsafe extern "C" fn(c_int, c_int, *mut c_int, *mut c_uint, c_uint) -> c_int;
/// `(card, device, other card, other device, out)`.
pub type Topology = unsafe extern "C" fn(c_int, c_int, c_int, c_int, *mut c_int) -> c_int;
/// `(out)`.
pub type Policy = unsafe extern "C" fn(*mut c_uint) -> c_int;
/// `(card, device, memory kind, out)`.
pub type Ecc = unsafe extern "C" fn(c_int, c_int, c_uint, *mut EccInfo) -> c_int;
/// `(card, device, list of 32, count)`.
pub type Processes = unsafe extern "C" fn(c_int, c_int, *mut ProcMemInfo, *mut c_int) -> c_int;
/// `(card, device, main command, sub command, buffer, size in and out)`.
pub type GetInfo = unsafe extern "C" fn(c_int, c_int, c_uint, c_uint, *mut c_void, *mut c_uint) -> c_int;
/// `(out)`.
pub type Mode = unsafe extern "C" fn(*mut c_int) -> c_int;
/// `(wish)`.
pub type SetPolicy = unsafe extern "C" fn(c_uint) -> c_int;
/// `(card, device, wish, result)`.
pub type CreateVdevice = unsafe extern "C" fn(c_int, c_int, *mut CreateVdevRes, *mut CreateVdevOut) -> c_int;
/// `(card, device, id)`; 65535 destroys all.
pub type DestroyVdevice = unsafe extern "C" fn(c_int, c_int, c_uint) -> c_int;
/// Called on a thread of the library: must not unwind, must not block.
pub type Callback = unsafe extern "C" fn(*mut Event);
/// `(card, device, filter by value, callback)`.
pub type Subscribe = unsafe extern "C" fn(c_int, c_int, EventFilter, Callback) -> c_int;

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

macro_rules! plain {
    ($($(#[$meta:meta])* pub struct $name:ident { $(pub $field:ident: $ty:ty,)* })*) => {$(
        $(#[$meta])*
        #[repr(C)]
        #[derive(Debug, Clone, Copy)]
        pub struct $name { $(pub $field: $ty,)* }
        // SAFETY: integers, floats, and arrays and structs of them.
        unsafe impl Plain for $name {}
    )*};
}

plain! {
    /// `dcmi_chip_info`, 100 bytes.
    pub struct ChipInfo {
        pub chip_type: [c_char; 32],
        pub chip_name: [c_char; 32],
        pub chip_ver: [c_char; 32],
        pub aicore_cnt: c_uint,
    }
    /// `dcmi_chip_info_v2`, 132 bytes.
    pub struct ChipInfoV2 {
        pub chip_type: [c_char; 32],
        pub chip_name: [c_char; 32],
        pub chip_ver: [c_char; 32],
        pub aicore_cnt: c_uint,
        pub npu_name: [c_char; 32],
    }
    /// `dcmi_pcie_info_all`, 64 bytes. The domain is signed.
    pub struct PcieInfoAll {
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
    pub struct BoardInfo {
        pub board_id: c_uint,
        pub pcb_id: c_uint,
        pub bom_id: c_uint,
        pub slot_id: c_uint,
    }
    /// `dcmi_die_id`, 20 bytes.
    pub struct DieId {
        pub soc_die: [c_uint; 5],
    }
    /// `dcmi_elabel_info`, 1280 bytes.
    pub struct ElabelInfo {
        pub product_name: [c_char; 256],
        pub model: [c_char; 256],
        pub manufacturer: [c_char; 256],
        pub manufacturer_date: [c_char; 256],
        pub serial_number: [c_char; 256],
    }
    /// `dcmi_hbm_info`, 32 bytes. Memory in MiB, temperature in °C.
    pub struct HbmInfo {
        pub memory_size: u64,
        pub freq: c_uint,
        pub _pad: [u8; 4],
        pub memory_usage: u64,
        pub temp: c_int,
        pub bandwith_util_rate: c_uint,
    }
    /// `dcmi_get_memory_info_stru`, 112 bytes. Memory in MiB, huge page size in KiB.
    pub struct MemoryInfoV3 {
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
    pub struct MemoryInfo {
        pub memory_size: u64,
        pub freq: c_uint,
        pub utiliza: c_uint,
    }
    /// `dcmi_ecc_info`, 36 bytes here and 28 in older headers: the last two may stay untouched.
    pub struct EccInfo {
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
    pub struct ProcMemInfo {
        pub proc_id: c_int,
        pub _pad: [u8; 4],
        pub proc_mem_usage: c_ulong,
    }
    /// `dcmi_base_resource`, 64 bytes.
    pub struct BaseResource {
        pub token: u64,
        pub token_max: u64,
        pub task_timeout: u64,
        pub vfg_id: c_uint,
        pub vip_mode: u8,
        pub reserved: [u8; 31],
        pub _pad: [u8; 4],
    }
    /// `dcmi_computing_resource`, 96 bytes. Cores are floats; memory in MiB, of the last two in KiB.
    pub struct ComputingResource {
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
    pub struct MediaResource {
        pub jpegd: f32,
        pub jpege: f32,
        pub vpc: f32,
        pub vdec: f32,
        pub pngd: f32,
        pub venc: f32,
        pub reserved: [u8; 32],
    }
    /// `dcmi_create_vdev_res_stru`, 104 bytes.
    pub struct CreateVdevRes {
        pub vdev_id: c_uint,
        pub vfg_id: c_uint,
        pub template_name: [c_char; 32],
        pub reserved: [u8; 64],
    }
    /// `dcmi_create_vdev_out`, 52 bytes.
    pub struct CreateVdevOut {
        pub vdev_id: c_uint,
        pub pcie_bus: c_uint,
        pub pcie_device: c_uint,
        pub pcie_func: c_uint,
        pub vfg_id: c_uint,
        pub reserved: [u8; 32],
    }
    /// `dcmi_vdev_query_info`, 256 bytes.
    pub struct VdevQueryInfo {
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
    pub struct VdevQuery {
        pub vdev_id: c_uint,
        pub _pad: [u8; 4],
        pub query_info: VdevQueryInfo,
    }
    /// `dcmi_soc_free_resource`, 224 bytes.
    pub struct SocFreeResource {
        pub vfg_num: c_uint,
        pub vfg_bitmap: c_uint,
        pub base: BaseResource,
        pub computing: ComputingResource,
        pub media: MediaResource,
    }
    /// `dcmi_soc_total_resource`, 360 bytes.
    pub struct SocTotalResource {
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
    pub struct SpodInfo {
        pub sdid: c_uint,
        pub scale_type: c_uint,
        pub super_pod_id: c_uint,
        pub server_id: c_uint,
        pub chassis_id: c_uint,
        pub super_pod_type: c_uint,
        pub reserve: [c_uint; 6],
    }
    /// `dcmi_dms_fault_event`, 352 bytes. `deviceid` is a logic id, the time is in ms since the epoch.
    pub struct DmsFaultEvent {
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
    pub struct Event {
        pub r#type: c_uint,
        pub _pad: [u8; 4],
        pub event_t: DmsFaultEvent,
    }
    /// `dcmi_event_filter`, 48 bytes; passed by value.
    pub struct EventFilter {
        pub filter_flag: u64,
        pub event_id: c_uint,
        pub severity: u8,
        pub node_type: u8,
        pub resv: [u8; 32],
        pub _pad: [u8; 2],
    }
    /// `dcmi_multi_utilization_info`, 48 bytes, percent.
    pub struct MultiUtilizationInfo {
        pub aic_util: c_uint,
        pub aiv_util: c_uint,
        pub aicore_util: c_uint,
        pub npu_util: c_uint,
        pub reserve: [c_uint; 8],
    }
    /// `dcmi_pcie_info`, 28 bytes, without the PCI domain; device before bus, unlike [`PcieInfoAll`].
    pub struct PcieInfo {
        pub deviceid: c_uint,
        pub venderid: c_uint,
        pub subvenderid: c_uint,
        pub subdeviceid: c_uint,
        pub bdf_deviceid: c_uint,
        pub bdf_busid: c_uint,
        pub bdf_funcid: c_uint,
    }
}

/// `enum dcmi_unit_type`.
pub const UNIT_NPU: c_uint = 0;
/// `enum dcmi_die_type`: the serial-like id.
pub const DIE_VDIE: c_uint = 1;
/// `enum dcmi_boot_status`: the only value that means ready.
pub const BOOT_FINISHED: c_uint = 16;
/// `enum dcmi_multi_die_policy`: a die may be given alone.
pub const POLICY_INDEPENDENT: c_uint = 1;
/// Health of a device that does not exist.
pub const HEALTH_NOT_EXIST: c_uint = 0xFFFF_FFFF;
/// Topology types that are direct links: HCCS, SIO, HCCS through a switch.
pub const TOPO_LINKS: [c_int; 3] = [3, 6, 7];
/// Most cards in a list.
pub const MAX_CARDS: usize = 64;
/// Most NPU chips on a card.
pub const MAX_CHIPS: c_int = 4;
/// Fault codes that a query must have room for.
pub const MAX_ERROR_CODES: usize = 128;

/// Physical ids are below 256 and share the number space of vNPUs, which ends at 1123.
pub const MAX_PHYSICAL_ID: c_uint = 1123;
/// More AI cores than any chip has.
pub const MAX_AI_CORES: c_uint = 4096;

/// `-8007`, `-8008`, `-8012`: the device is not there, or not any more, or not yet.
pub const GONE: [c_int; 3] = [-8007, -8008, -8012];
/// `-8255`: not for this chip, driver or environment.
pub const NOT_SUPPORT: c_int = -8255;

/// The vendor's word for a return code.
#[must_use]
pub fn code_name(code: c_int) -> &'static str {
    match code {
        0 => "ok",
        -8001 => "invalid parameter",
        -8002 => "operation not permitted",
        -8003 => "memory operation failed",
        -8004 => "secure function failed",
        -8005 => "inner error",
        -8006 => "time-out",
        -8007 => "invalid device id",
        -8008 => "device does not exist",
        -8009 => "ioctl failed",
        -8010 => "sending to the device failed",
        -8011 => "receiving from the device failed",
        -8012 => "device not ready",
        -8013 => "not supported in a container, or busy",
        -8014 => "file operation failed",
        -8015 => "reset failed",
        -8016 => "aborted",
        -8017 => "upgrade in progress",
        -8020 => "resource occupied",
        -8022 => "wrong partition",
        -8023 => "no configuration",
        -8255 => "not supported",
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
/// `(card, device, wish, result)`.
pub type CreateVdevice = unsafe extern "C" fn(c_int, c_int, *mut CreateVdevRes, *mut CreateVdevOut) -> c_int;
/// `(card, device, id)`; 65535 destroys all.
pub type DestroyVdevice = unsafe extern "C" fn(c_int, c_int, c_uint) -> c_int;
/// Called on a thread of the library: must not unwind, must not block.
pub type Callback = unsafe extern "C" fn(*mut Event);
/// `(card, device, filter by value, callback)`.
pub type Subscribe = unsafe extern "C" fn(c_int, c_int, EventFilter, Callback) -> c_int;

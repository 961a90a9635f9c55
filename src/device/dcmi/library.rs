//! The safe side of the vendor library: checked before it is loaded, loaded once, never unloaded.
//!
//! The library starts threads of its own, so it stays for the process's life. A symbol that an older driver does not
//! have is [`Trouble::Missing`], not a crash. Every result buffer has room behind it, for structs that have grown.

#![allow(unsafe_code)]

use core::ffi::{c_char, c_int, c_uint, c_ulong, c_void};
use std::{
    fs::{self, File},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
};

use libloading::os::unix::{Library as Handle, RTLD_GLOBAL, RTLD_LAZY};

use super::{
    ffi::{self, Plain},
    wire::{self, At, Board, ChipInfo, Codes, Ecc, Free, OpenError, Outcome, Pcie, TemplateName, Trouble, Vnpu},
};

/// Levels of directories that a library may be deep.
const MAX_LEVELS: usize = 20;

/// Libraries that the vendor's needs, in the order in which they need each other, below `driver/lib64`.
const DEPENDENCIES: [&str; 5] =
    ["libc_sec.so", "libmmpa.so", "libascend_hal.so", "libdrvdsmi_host.so", "libdsmi_network.so"];

/// Room for fault codes: what the vendor says is the most, and what is tried if that is too little.
const CODES: [usize; 2] = [128, 1024];

/// Where the library's thread puts events. It is set before the subscription, of which a process has one.
static EVENTS: OnceLock<File> = OnceLock::new();
/// Events that found no room there.
static LOST: AtomicU64 = AtomicU64::new(0);

/// A result on its way, with room for a library whose struct has grown since our header.
#[repr(C)]
struct Roomy<T> {
    value: T,
    room: [u64; 64],
}

impl<T: Plain> Roomy<T> {
    fn new() -> Self {
        Self::preset(T::zeroed())
    }

    fn preset(value: T) -> Self {
        Self { value, room: [0; 64] }
    }

    fn place(&mut self) -> *mut T {
        (&raw mut *self).cast()
    }
}

macro_rules! symbols {
    ($($field:ident: $ty:ty = $name:literal,)*) => {
        /// One function pointer per symbol that the library has.
        #[derive(Debug, Clone, Copy)]
        struct Symbols { $($field: Option<$ty>,)* }

        impl Symbols {
            fn resolve(handle: &Handle) -> Self {
                Self { $($field: {
                    // SAFETY: the type is the one that the vendor's header gives this name.
                    let symbol = unsafe { handle.get::<Option<$ty>>($name) };
                    symbol.ok().and_then(|symbol| *symbol)
                },)* }
            }
        }
    };
}

symbols! {
    init: ffi::Init = c"dcmi_init",
    driver_version: ffi::Text = c"dcmi_get_driver_version",
    card_list: ffi::CardList = c"dcmi_get_card_list",
    card_num_list: ffi::CardList = c"dcmi_get_card_num_list",
    device_id_in_card: ffi::CardChips = c"dcmi_get_device_id_in_card",
    device_num_in_card: ffi::CardInt = c"dcmi_get_device_num_in_card",
    fault_device_num_in_card: ffi::CardInt = c"dcmi_get_fault_device_num_in_card",
    device_type: ffi::Chip<c_uint> = c"dcmi_get_device_type",
    logic_id: ffi::LogicId = c"dcmi_get_device_logic_id",
    physical_id: ffi::Convert = c"dcmi_get_device_phyid_from_logicid",
    chip_info: ffi::Chip<ffi::ChipInfo> = c"dcmi_get_device_chip_info",
    chip_info_v2: ffi::Chip<ffi::ChipInfoV2> = c"dcmi_get_device_chip_info_v2",
    board_info: ffi::Chip<ffi::BoardInfo> = c"dcmi_get_device_board_info",
    die: ffi::Die = c"dcmi_get_device_die_v2",
    pcie_info: ffi::Chip<ffi::PcieInfoAll> = c"dcmi_get_device_pcie_info_v2",
    hbm_info: ffi::Chip<ffi::HbmInfo> = c"dcmi_get_device_hbm_info",
    memory_info: ffi::Chip<ffi::MemoryInfoV3> = c"dcmi_get_device_memory_info_v3",
    boot_status: ffi::Chip<c_uint> = c"dcmi_get_device_boot_status",
    product_type: ffi::ChipText = c"dcmi_get_product_type",
    health: ffi::Chip<c_uint> = c"dcmi_get_device_health",
    error_codes: ffi::ErrorCodes = c"dcmi_get_device_errorcode_v2",
    temperature: ffi::Chip<c_int> = c"dcmi_get_device_temperature",
    power: ffi::Chip<c_int> = c"dcmi_get_device_power_info",
    card_power: ffi::CardInt = c"dcmi_mcu_get_power_info",
    ecc: ffi::Ecc = c"dcmi_get_device_ecc_info",
    network: ffi::Chip<c_uint> = c"dcmi_get_device_network_health",
    subscribe: ffi::Subscribe = c"dcmi_subscribe_fault_event",
    topology: ffi::Topology = c"dcmi_get_topo_info_by_device_id",
    die_policy: ffi::Policy = c"dcmi_get_multi_die_policy",
    device_info: ffi::GetInfo = c"dcmi_get_device_info",
    processes: ffi::Processes = c"dcmi_get_device_resource_info",
    create_vdevice: ffi::CreateVdevice = c"dcmi_create_vdevice",
    destroy_vdevice: ffi::DestroyVdevice = c"dcmi_set_destroy_vdevice",
    vdevice_mode: ffi::Mode = c"dcmi_get_vdevice_mode",
    recover_mode: ffi::Policy = c"dcmi_get_vnpu_config_recover_mode",
    set_recover_mode: ffi::SetPolicy = c"dcmi_set_vnpu_config_recover_mode",
}

impl Symbols {
    /// Without these no NPU can be found or told from another.
    fn mandatory(&self) -> Vec<&'static str> {
        [
            ("dcmi_init", self.init.is_some()),
            ("dcmi_get_card_list", self.card_list.is_some() || self.card_num_list.is_some()),
            ("dcmi_get_device_logic_id", self.logic_id.is_some()),
            ("dcmi_get_device_phyid_from_logicid", self.physical_id.is_some()),
            ("dcmi_get_device_chip_info", self.chip_info.is_some() || self.chip_info_v2.is_some()),
            ("dcmi_get_device_pcie_info_v2", self.pcie_info.is_some()),
            ("dcmi_get_device_health", self.health.is_some()),
        ]
        .into_iter()
        .filter_map(|(name, found)| (!found).then_some(name))
        .collect()
    }

    /// Without these no vNPU can be made, read back or destroyed.
    fn slicing_gaps(&self) -> Vec<String> {
        let mut needed = vec![
            ("dcmi_create_vdevice", self.create_vdevice.is_some()),
            ("dcmi_set_destroy_vdevice", self.destroy_vdevice.is_some()),
            ("dcmi_get_device_info", self.device_info.is_some()),
        ];
        needed.retain(|(_, found)| !found);
        needed.into_iter().map(|(name, _)| name.to_owned()).collect()
    }
}

/// The loaded library. It is not thread-safe: its calls take `&mut self`.
#[derive(Debug)]
pub struct Library {
    symbols: Symbols,
}

fn check(code: c_int) -> Outcome<()> {
    if code == 0 { Ok(()) } else { Err(Trouble::Code(code)) }
}

/// The text of a buffer, up to its first NUL or its end; bytes that are no UTF-8 and control characters are replaced.
fn text(buffer: &[c_char]) -> String {
    let bytes: Vec<u8> = buffer.iter().map(|c| c.to_ne_bytes()[0]).take_while(|byte| *byte != 0).collect();
    String::from_utf8_lossy(&bytes).trim().replace(char::is_control, "\u{fffd}")
}

impl Library {
    /// Checks, loads and resolves. The libraries that it needs are loaded first where they exist beside it, since the
    /// loader's path need not name their directories.
    pub fn open(path: &Path, trust: bool) -> Result<Self, OpenError> {
        let path = checked(path, trust)?;
        for directory in dependency_directories(&path) {
            for dependency in DEPENDENCIES.map(|name| directory.join(name)) {
                if dependency.is_file() {
                    // One that does not load is left to the loader: if it is needed, loading the library says so.
                    let _ = load(&checked(&dependency, trust)?);
                }
            }
        }
        let handle = load(&path)?;
        let symbols = Symbols::resolve(&handle);
        std::mem::forget(handle);
        match symbols.mandatory() {
            missing if missing.is_empty() => Ok(Self { symbols }),
            missing => Err(OpenError::Refused(format!(
                "{} lacks {}; upgrade the Ascend driver, or name its libdcmi.so",
                path.display(),
                missing.join(", ")
            ))),
        }
    }

    /// Starts the library. To be called once.
    #[doc(alias = "dcmi_init")]
    pub fn init(&mut self) -> Outcome<()> {
        let init = self.symbols.init.ok_or(Trouble::Missing)?;
        // SAFETY: takes nothing.
        check(unsafe { init() })
    }

    /// Version of the driver.
    #[doc(alias = "dcmi_get_driver_version")]
    pub fn driver_version(&mut self) -> Outcome<String> {
        let call = self.symbols.driver_version.ok_or(Trouble::Missing)?;
        let mut buffer: [c_char; 512] = [0; 512];
        // SAFETY: the buffer is twice as long as said, which is more than the longest version.
        check(unsafe { call(buffer.as_mut_ptr(), 256) })?;
        Ok(text(&buffer[..256]))
    }

    /// Card numbers; −1 stands for a card that did not come up.
    #[doc(alias = "dcmi_get_card_list")]
    pub fn cards(&mut self) -> Outcome<Vec<i32>> {
        let call = self.symbols.card_list.or(self.symbols.card_num_list).ok_or(Trouble::Missing)?;
        let mut count = Roomy::<c_int>::preset(-1);
        let mut list: [c_int; 128] = [-1; 128];
        // SAFETY: the list is longer than said.
        check(unsafe { call(count.place(), list.as_mut_ptr(), 64) })?;
        Ok(list[..counted(count.value, ffi::MAX_CARDS)?].to_vec())
    }

    /// NPU chips of a card, the MCU not counted.
    #[doc(alias = "dcmi_get_device_id_in_card")]
    pub fn chips(&mut self, card: i32) -> Outcome<i32> {
        if let Some(call) = self.symbols.device_id_in_card {
            let [mut chips, mut mcu, mut cpu] = [(); 3].map(|()| Roomy::<c_int>::preset(-1));
            // SAFETY: three places for one integer each.
            check(unsafe { call(card, chips.place(), mcu.place(), cpu.place()) })?;
            return in_range(chips.value, ffi::MAX_DEVICES_PER_CARD.into());
        }
        in_range(card_int(self.symbols.device_num_in_card, card)?, ffi::MAX_DEVICES_PER_CARD.into())
    }

    /// Chips of a card that failed to come up.
    #[doc(alias = "dcmi_get_fault_device_num_in_card")]
    pub fn failed_chips(&mut self, card: i32) -> Outcome<i32> {
        card_int(self.symbols.fault_device_num_in_card, card)
    }

    /// Power of a whole card in tenths of a watt, 310P.
    #[doc(alias = "dcmi_mcu_get_power_info")]
    pub fn card_power(&mut self, card: i32) -> Outcome<i32> {
        card_int(self.symbols.card_power, card)
    }

    /// Kind of unit: 0 for an NPU.
    #[doc(alias = "dcmi_get_device_type")]
    pub fn unit(&mut self, at: At) -> Outcome<u32> {
        chip(self.symbols.device_type, at, ffi::UNIT_INVALID)
    }

    /// Logic id of a chip.
    #[doc(alias = "dcmi_get_device_logic_id")]
    pub fn logic_id(&mut self, at: At) -> Outcome<i32> {
        let call = self.symbols.logic_id.ok_or(Trouble::Missing)?;
        let mut out = Roomy::<c_int>::preset(-1);
        // SAFETY: a place for one integer.
        check(unsafe { call(out.place(), at.card, at.device) })?;
        in_range(out.value, c_int::MAX)
    }

    /// Physical id of a logic id.
    #[doc(alias = "dcmi_get_device_phyid_from_logicid")]
    pub fn physical_id(&mut self, logic_id: u32) -> Outcome<u32> {
        let call = self.symbols.physical_id.ok_or(Trouble::Missing)?;
        let mut out = Roomy::<c_uint>::preset(c_uint::MAX);
        // SAFETY: a place for one integer.
        check(unsafe { call(logic_id, out.place()) })?;
        if out.value > ffi::LAST_ID {
            return Err(Trouble::Nonsense(out.value.into()));
        }
        Ok(out.value)
    }

    /// Names and AI cores of a chip, from the newer call where the library has it.
    #[doc(alias = "dcmi_get_device_chip_info_v2")]
    pub fn chip_info(&mut self, at: At) -> Outcome<ChipInfo> {
        if self.symbols.chip_info_v2.is_some() {
            let preset = ffi::ChipInfoV2 { aicore_cnt: c_uint::MAX, ..Plain::zeroed() };
            match chip(self.symbols.chip_info_v2, at, preset) {
                Err(Trouble::Code(ffi::ERR_NOT_SUPPORT)) if self.symbols.chip_info.is_some() => {}
                info => {
                    let info = info?;
                    return named(&info.chip_name, &info.npu_name, info.aicore_cnt);
                }
            }
        }
        let preset = ffi::ChipInfo { aicore_cnt: c_uint::MAX, ..Plain::zeroed() };
        let info = chip(self.symbols.chip_info, at, preset)?;
        named(&info.chip_name, &[], info.aicore_cnt)
    }

    /// Board of a chip.
    #[doc(alias = "dcmi_get_device_board_info")]
    pub fn board(&mut self, at: At) -> Outcome<Board> {
        let preset = ffi::BoardInfo { board_id: c_uint::MAX, ..Plain::zeroed() };
        let info = chip(self.symbols.board_info, at, preset)?;
        if info.board_id == c_uint::MAX {
            return Err(Trouble::Nonsense(-1));
        }
        Ok(Board { board_id: info.board_id, slot_id: info.slot_id })
    }

    /// The serial-like id of a die, five words.
    #[doc(alias = "dcmi_get_device_die_v2")]
    pub fn die(&mut self, at: At) -> Outcome<[u32; 5]> {
        let call = self.symbols.die.ok_or(Trouble::Missing)?;
        let mut out = Roomy::preset(ffi::DieId { soc_die: [c_uint::MAX; 5] });
        // SAFETY: a place for the struct.
        check(unsafe { call(at.card, at.device, ffi::DIE_VDIE, out.place()) })?;
        if out.value.soc_die == [c_uint::MAX; 5] {
            return Err(Trouble::Nonsense(-1));
        }
        Ok(out.value.soc_die)
    }

    /// PCI address of a chip.
    #[doc(alias = "dcmi_get_device_pcie_info_v2")]
    pub fn pcie(&mut self, at: At) -> Outcome<Pcie> {
        let preset = ffi::PcieInfoAll { bdf_busid: c_uint::MAX, ..Plain::zeroed() };
        let info = chip(self.symbols.pcie_info, at, preset)?;
        Ok(Pcie {
            domain: info.domain,
            bus: info.bdf_busid,
            device: info.bdf_deviceid,
            function: info.bdf_funcid,
            device_id: info.deviceid,
        })
    }

    /// Size of the high-bandwidth memory in MiB.
    #[doc(alias = "dcmi_get_device_hbm_info")]
    pub fn hbm(&mut self, at: At) -> Outcome<u64> {
        let preset = ffi::HbmInfo { memory_size: u64::MAX, ..Plain::zeroed() };
        size(chip(self.symbols.hbm_info, at, preset)?.memory_size)
    }

    /// Size of the DDR memory in MiB.
    #[doc(alias = "dcmi_get_device_memory_info_v3")]
    pub fn memory(&mut self, at: At) -> Outcome<u64> {
        let preset = ffi::MemoryInfoV3 { memory_size: u64::MAX, ..Plain::zeroed() };
        size(chip(self.symbols.memory_info, at, preset)?.memory_size)
    }

    /// Boot status; 16 is ready.
    #[doc(alias = "dcmi_get_device_boot_status")]
    pub fn boot_status(&mut self, at: At) -> Outcome<u32> {
        chip(self.symbols.boot_status, at, 0)
    }

    /// Product of a chip, `Atlas 300I Duo`; 910 and 910B tell none.
    #[doc(alias = "dcmi_get_product_type")]
    pub fn product(&mut self, at: At) -> Outcome<String> {
        let call = self.symbols.product_type.ok_or(Trouble::Missing)?;
        let mut buffer: [c_char; 512] = [0; 512];
        // SAFETY: the buffer is twice as long as said.
        check(unsafe { call(at.card, at.device, buffer.as_mut_ptr(), 256) })?;
        Ok(text(&buffer[..256]))
    }

    /// Health value; 4 (unknown) is preset, since a failing call leaves it.
    #[doc(alias = "dcmi_get_device_health")]
    pub fn health(&mut self, at: At) -> Outcome<u32> {
        chip(self.symbols.health, at, ffi::HEALTH_UNKNOWN)
    }

    /// Active fault codes. A chip with more than the vendor foresees is asked again with more room.
    #[doc(alias = "dcmi_get_device_errorcode_v2")]
    pub fn error_codes(&mut self, at: At) -> Outcome<Codes> {
        let call = self.symbols.error_codes.ok_or(Trouble::Missing)?;
        let mut result = Err(Trouble::Missing);
        for room in CODES {
            let mut count = Roomy::<c_int>::preset(-1);
            let mut list: Vec<c_uint> = vec![0; room * 2];
            let length = c_uint::try_from(room).map_err(|_| Trouble::Nonsense(-1))?;
            // SAFETY: the list is twice as long as said.
            result =
                check(unsafe { call(at.card, at.device, count.place(), list.as_mut_ptr(), length) }).and_then(|()| {
                    // A library that counts what it had no room for has filled the list all the same.
                    let counted = usize::try_from(count.value).map_err(|_| Trouble::Nonsense(count.value.into()))?;
                    list.truncate(counted.min(room));
                    Ok(Codes { list, complete: counted <= room })
                });
            match &result {
                Err(Trouble::Code(ffi::ERR_INVALID_PARAMETER)) | Ok(Codes { complete: false, .. }) => {}
                _ => return result,
            }
        }
        result
    }

    /// What ECC has counted of a kind of memory.
    #[doc(alias = "dcmi_get_device_ecc_info")]
    pub fn ecc(&mut self, at: At, memory: u32) -> Outcome<Ecc> {
        let call = self.symbols.ecc.ok_or(Trouble::Missing)?;
        let mut out = Roomy::preset(ffi::EccInfo { enable_flag: -1, ..Plain::zeroed() });
        // SAFETY: a place for the struct, with room behind it.
        check(unsafe { call(at.card, at.device, memory, out.place()) })?;
        let info = out.value;
        Ok(Ecc {
            enabled: in_range(info.enable_flag, 1)? == 1,
            single: info.single_bit_error_cnt,
            double: info.double_bit_error_cnt,
            isolated: info.single_bit_isolated_pages_cnt.saturating_add(info.double_bit_isolated_pages_cnt),
        })
    }

    /// What the test of a chip's network link found; 0 is well. It may block.
    #[doc(alias = "dcmi_get_device_network_health")]
    pub fn network(&mut self, at: At) -> Outcome<u32> {
        chip(self.symbols.network, at, ffi::NETWORK_MAX)
    }

    /// From now on the library's thread writes the events of all chips into this file, which must not block. A process
    /// has one subscription, and the library no way to end it.
    #[doc(alias = "dcmi_subscribe_fault_event")]
    pub fn subscribe(&mut self, events: &File) -> Outcome<()> {
        let call = self.symbols.subscribe.ok_or(Trouble::Missing)?;
        if EVENTS.get().is_none() {
            let events = events.try_clone().map_err(|_| Trouble::Missing)?;
            let _ = EVENTS.set(events);
        }
        // SAFETY: the filter is passed by value; the callback lives as long as the process and has the vendor's type.
        check(unsafe { call(-1, -1, ffi::EventFilter::zeroed(), on_event) })
    }

    /// Temperature in °C.
    #[doc(alias = "dcmi_get_device_temperature")]
    pub fn temperature(&mut self, at: At) -> Outcome<i32> {
        chip(self.symbols.temperature, at, 0)
    }

    /// Power of a chip in tenths of a watt.
    #[doc(alias = "dcmi_get_device_power_info")]
    pub fn power(&mut self, at: At) -> Outcome<i32> {
        chip(self.symbols.power, at, 0)
    }

    /// Kind of connection between two chips.
    #[doc(alias = "dcmi_get_topo_info_by_device_id")]
    pub fn topology(&mut self, a: At, b: At) -> Outcome<i32> {
        let call = self.symbols.topology.ok_or(Trouble::Missing)?;
        let mut out = Roomy::<c_int>::preset(-1);
        // SAFETY: a place for one integer.
        check(unsafe { call(a.card, a.device, b.card, b.device, out.place()) })?;
        in_range(out.value, c_int::MAX)
    }

    /// Whether the dies of a 910C may be given alone (1) or go together (0).
    #[doc(alias = "dcmi_get_multi_die_policy")]
    pub fn die_policy(&mut self) -> Outcome<u32> {
        let call = self.symbols.die_policy.ok_or(Trouble::Missing)?;
        let mut out = Roomy::<c_uint>::new();
        // SAFETY: a place for one integer.
        check(unsafe { call(out.place()) })?;
        Ok(out.value)
    }

    /// Names of the calls for vNPUs that the library lacks; makes no call.
    pub fn slicing_gaps(&self) -> Vec<String> {
        self.symbols.slicing_gaps()
    }

    /// Ids of the vNPUs of a chip.
    #[doc(alias = "dcmi_get_device_info")]
    pub fn vnpus(&mut self, at: At) -> Outcome<Vec<u32>> {
        let preset = ffi::SocTotalResource { vdev_num: c_uint::MAX, ..Plain::zeroed() };
        let total = self.vdev_info(at, ffi::VDEV_GET_TOTAL, preset)?;
        let count = c_int::try_from(total.vdev_num).unwrap_or(-1);
        Ok(total.vdev_id[..counted(count, ffi::MAX_VDEVS)?].to_vec())
    }

    /// One vNPU of a chip.
    #[doc(alias = "dcmi_get_device_info")]
    pub fn vnpu(&mut self, at: At, id: u32) -> Outcome<Vnpu> {
        let mut preset = ffi::VdevQuery { vdev_id: id, ..Plain::zeroed() };
        (preset.query_info.computing.aic, preset.query_info.computing.memory_size) = (-1.0, u64::MAX);
        let info = self.vdev_info(at, ffi::VDEV_GET_ONE, preset)?.query_info;
        Ok(Vnpu {
            // One that fills its array has no NUL, and what the last byte would be is lost in any case.
            template: text(&info.name[..info.name.len() - 1]),
            memory: size(info.computing.memory_size)?,
            ai_cores: whole_cores(info.computing.aic)?,
        })
    }

    /// What is left of a chip.
    #[doc(alias = "dcmi_get_device_info")]
    pub fn free_resources(&mut self, at: At) -> Outcome<Free> {
        let mut preset = ffi::SocFreeResource::zeroed();
        (preset.computing.aic, preset.computing.memory_size) = (-1.0, u64::MAX);
        preset.computing.device_aicpu = ffi::AI_CPUS_SHARED;
        preset.media.jpegd = -1.0;
        let left = self.vdev_info(at, ffi::VDEV_GET_FREE, preset)?;
        let (free, media) = (left.computing, left.media);
        Ok(Free {
            memory: size(free.memory_size)?,
            ai_cores: whole_cores(free.aic)?,
            ai_cpus: Some(free.device_aicpu).filter(|cpus| *cpus != ffi::AI_CPUS_SHARED),
            // Counted as cores are, and no reason to distrust the rest where that is nonsense.
            jpeg_decoders: whole_cores(media.jpegd).ok(),
        })
    }

    /// One query about vNPUs; the value is what the library reads first, and then what it wrote.
    fn vdev_info<T: Plain>(&mut self, at: At, query: c_uint, value: T) -> Outcome<T> {
        let call = self.symbols.device_info.ok_or(Trouble::Missing)?;
        let mut buffer = Roomy::preset(value);
        let mut size = Roomy::<c_uint>::preset(c_uint::try_from(size_of::<T>()).map_err(|_| Trouble::Nonsense(-1))?);
        let place: *mut c_void = buffer.place().cast();
        // SAFETY: a buffer with room for more than the size says, and a place for one integer.
        check(unsafe { call(at.card, at.device, ffi::MAIN_VDEV_MNG, query, place, size.place()) })?;
        Ok(buffer.value)
    }

    /// Host pids of the processes on a chip.
    #[doc(alias = "dcmi_get_device_resource_info")]
    pub fn processes(&mut self, at: At) -> Outcome<Vec<i32>> {
        let call = self.symbols.processes.ok_or(Trouble::Missing)?;
        let mut count = Roomy::<c_int>::preset(-1);
        let mut list = [ffi::ProcMemInfo { proc_id: 0, _pad: [0; 4], proc_mem_usage: c_ulong::MAX }; 64];
        // SAFETY: the list has twice the entries that the call may fill.
        check(unsafe { call(at.card, at.device, list.as_mut_ptr(), count.place()) })?;
        Ok(list[..counted(count.value, ffi::MAX_PROCESSES)?].iter().map(|process| process.proc_id).collect())
    }

    /// Makes a vNPU with this id; gives the id that it has.
    #[doc(alias = "dcmi_create_vdevice")]
    pub fn create_vnpu(&mut self, at: At, template: &TemplateName, id: u32) -> Outcome<u32> {
        let call = self.symbols.create_vdevice.ok_or(Trouble::Missing)?;
        one_vnpu(id)?;
        let mut wish = Roomy::preset(ffi::CreateVdevRes {
            vdev_id: id,
            vfg_id: ffi::VDEV_ID_AUTO,
            template_name: template.bytes().map(|byte| c_char::from_ne_bytes([byte])),
            reserved: [0; 64],
        });
        let mut out = Roomy::preset(ffi::CreateVdevOut { vdev_id: c_uint::MAX, ..Plain::zeroed() });
        // SAFETY: two places for their structs.
        check(unsafe { call(at.card, at.device, wish.place(), out.place()) })?;
        one_vnpu(out.value.vdev_id)?;
        Ok(out.value.vdev_id)
    }

    /// Destroys one vNPU. The number that stands for all of them never reaches the library.
    #[doc(alias = "dcmi_set_destroy_vdevice")]
    pub fn destroy_vnpu(&mut self, at: At, id: u32) -> Outcome<()> {
        let call = self.symbols.destroy_vdevice.ok_or(Trouble::Missing)?;
        one_vnpu(id)?;
        // SAFETY: takes numbers only.
        check(unsafe { call(at.card, at.device, id) })
    }

    /// What vNPUs are for: 0 containers, 1 virtual machines.
    #[doc(alias = "dcmi_get_vdevice_mode")]
    pub fn vnpu_mode(&mut self) -> Outcome<i32> {
        let call = self.symbols.vdevice_mode.ok_or(Trouble::Missing)?;
        let mut out = Roomy::<c_int>::preset(-1);
        // SAFETY: a place for one integer.
        check(unsafe { call(out.place()) })?;
        in_range(out.value, ffi::VDEVICE_VM)
    }

    /// Whether vNPUs are made again after a boot.
    #[doc(alias = "dcmi_get_vnpu_config_recover_mode")]
    pub fn replay(&mut self) -> Outcome<bool> {
        let call = self.symbols.recover_mode.ok_or(Trouble::Missing)?;
        let mut out = Roomy::<c_uint>::preset(c_uint::MAX);
        // SAFETY: a place for one integer.
        check(unsafe { call(out.place()) })?;
        match out.value {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(Trouble::Nonsense(other.into())),
        }
    }

    /// Sets whether vNPUs are made again after a boot.
    #[doc(alias = "dcmi_set_vnpu_config_recover_mode")]
    pub fn set_replay(&mut self, on: bool) -> Outcome<()> {
        let call = self.symbols.set_recover_mode.ok_or(Trouble::Missing)?;
        // SAFETY: takes a number only.
        check(unsafe { call(c_uint::from(on)) })
    }
}

/// Called on the library's thread, also while a call is in progress on ours. It does not block: an event without room
/// is counted. It cannot unwind: nothing in it panics, and if it did, the process would end.
unsafe extern "C" fn on_event(event: *mut ffi::Event) {
    if event.is_null() {
        return;
    }
    // SAFETY: the library gives an event that lives until the callback returns; it need not be aligned for us.
    let event = unsafe { event.read_unaligned() };
    if event.r#type != ffi::EVENT_DMS_FAULT {
        return;
    }
    let fault = event.event_t;
    let (code, logic) = (fault.event_id, fault.deviceid);
    let (severity, assertion) = (fault.severity, fault.assertion);
    let told = wire::Event { code, logic, severity, assertion, lost: LOST.load(Ordering::Relaxed) };
    // A message is shorter than what a pipe takes whole or not at all.
    let written = EVENTS.get().is_some_and(|events| wire::send(Whole(events), &told).is_ok());
    if !written {
        LOST.fetch_add(1, Ordering::Relaxed);
    }
}

/// A pipe that is written to once a message: one that takes a part of it is an error.
struct Whole<'a>(&'a File);

impl std::io::Write for Whole<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.write(bytes)
    }

    fn write_all(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        if self.0.write(bytes)? == bytes.len() { Ok(()) } else { Err(std::io::ErrorKind::WriteZero.into()) }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// An id that is that of one vNPU: neither the library's own choice nor all of a chip's.
fn one_vnpu(id: u32) -> Outcome<()> {
    if (ffi::FIRST_VDEV_ID..=ffi::LAST_ID).contains(&id) { Ok(()) } else { Err(Trouble::Nonsense(id.into())) }
}

/// Whole AI cores of a number that the library gives as a float.
fn whole_cores(cores: f32) -> Outcome<u32> {
    if !(0.0..=f32::from(ffi::MOST_AI_CORES)).contains(&cores) {
        return Err(Trouble::Nonsense(-1));
    }
    // A little more than it says: thirds of cores do not add up to wholes in a float.
    let whole = (1..=ffi::MOST_AI_CORES).take_while(|count| f32::from(*count) <= cores + 0.01).last();
    Ok(whole.unwrap_or(0).into())
}

/// One number of a card.
fn card_int(call: Option<ffi::CardInt>, card: i32) -> Outcome<i32> {
    let call = call.ok_or(Trouble::Missing)?;
    let mut out = Roomy::<c_int>::preset(-1);
    // SAFETY: a place for one integer.
    check(unsafe { call(card, out.place()) })?;
    Ok(out.value)
}

/// The commonest form of call: one chip, one result.
fn chip<T: Plain>(call: Option<ffi::Chip<T>>, at: At, preset: T) -> Outcome<T> {
    let call = call.ok_or(Trouble::Missing)?;
    let mut out = Roomy::preset(preset);
    // SAFETY: a place for the struct, with room behind it.
    check(unsafe { call(at.card, at.device, out.place()) })?;
    Ok(out.value)
}

/// A number from 0 to `most`.
fn in_range(value: c_int, most: c_int) -> Outcome<i32> {
    if (0..=most).contains(&value) { Ok(value) } else { Err(Trouble::Nonsense(value.into())) }
}

/// Length of a list that the library filled.
fn counted(count: c_int, room: u16) -> Outcome<usize> {
    usize::try_from(count).ok().filter(|count| *count <= usize::from(room)).ok_or(Trouble::Nonsense(count.into()))
}

/// A memory size in MiB; the largest chip has less than 2^24.
fn size(mib: u64) -> Outcome<u64> {
    if mib < 1 << 24 { Ok(mib) } else { Err(Trouble::Nonsense(i64::try_from(mib).unwrap_or(-1))) }
}

fn named(chip_name: &[c_char], npu_name: &[c_char], ai_cores: c_uint) -> Outcome<ChipInfo> {
    if ai_cores > ffi::MOST_AI_CORES.into() {
        return Err(Trouble::Nonsense(ai_cores.into()));
    }
    Ok(ChipInfo { chip_name: text(chip_name), npu_name: text(npu_name), ai_cores })
}

fn load(path: &Path) -> Result<Handle, OpenError> {
    // SAFETY: the file was checked; running its initialisers is what the operator asked for, and this process exists
    // for it.
    unsafe { Handle::open(Some(path), RTLD_LAZY | RTLD_GLOBAL) }
        .map_err(|error| OpenError::Refused(format!("{} cannot be loaded: {error}", path.display())))
}

/// `lib64/common` and `lib64/driver` of the driver that a library belongs to, or of the default one beside `dcmi`.
fn dependency_directories(library: &Path) -> Vec<PathBuf> {
    let lib64 = library.ancestors().find(|directory| directory.ends_with("driver/lib64")).map(Path::to_owned);
    let beside = library.parent().filter(|directory| directory.ends_with("usr/local/dcmi")).and_then(Path::parent);
    let lib64 = lib64.or_else(|| beside.map(|local| local.join("Ascend/driver/lib64")));
    lib64.map(|lib64| vec![lib64.join("common"), lib64.join("driver")]).unwrap_or_default()
}

/// What is wrong with a file or directory on the way to a library; `None` if root alone can change it.
fn flaw(uid: u32, mode: u32, symlink: bool) -> Option<String> {
    if uid != 0 {
        return Some(format!("belongs to uid {uid}, not to root"));
    }
    (!symlink && mode & 0o022 != 0).then(|| format!("can be written by group or others (mode {:04o})", mode & 0o7777))
}

/// The real path of a library that may be loaded: a regular file which, with every directory above it (also on the way
/// through symbolic links), belongs to root and can be written by nobody else.
pub fn checked(path: &Path, trust: bool) -> Result<PathBuf, OpenError> {
    let refused = |what: &Path, why: &str| {
        OpenError::Refused(format!("library {} is not loaded: {} {why}", path.display(), what.display()))
    };
    let real = fs::canonicalize(path).map_err(|error| refused(path, &format!("cannot be followed: {error}")))?;
    if !fs::metadata(&real).is_ok_and(|metadata| metadata.is_file()) {
        return Err(refused(&real, "is not a regular file"));
    }
    if trust {
        return Ok(real);
    }
    for whole in [path, &real] {
        if whole.ancestors().count() > MAX_LEVELS {
            return Err(refused(whole, &format!("is more than {MAX_LEVELS} levels deep")));
        }
        for step in whole.ancestors().filter(|step| !step.as_os_str().is_empty()) {
            let metadata =
                fs::symlink_metadata(step).map_err(|error| refused(step, &format!("cannot be read: {error}")))?;
            if let Some(flaw) = flaw(metadata.uid(), metadata.mode(), metadata.is_symlink()) {
                return Err(refused(step, &format!("{flaw}; give it to root alone, or set trust-library")));
            }
        }
    }
    Ok(real)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_ends_at_its_first_nul_or_at_its_buffer() {
        let chars = |text: &[u8]| text.iter().map(|byte| c_char::from_ne_bytes([*byte])).collect::<Vec<_>>();
        assert_eq!(text(&chars(b"910B4\0rubbish")), "910B4");
        assert_eq!(text(&chars(b"no end")), "no end");
        assert_eq!(text(&chars(b"\xff\x01x\0")), "\u{fffd}\u{fffd}x");
        assert_eq!(text(&[]), "");
    }

    #[test]
    fn cores_are_counted_in_wholes() {
        for (float, cores) in [(0.0, 0), (0.5, 0), (9.995, 10), (10.0, 10), (19.9, 19), (20.001, 20), (4096.0, 4096)] {
            assert_eq!(whole_cores(float), Ok(cores), "{float}");
        }
        for float in [-1.0, f32::NAN, f32::INFINITY, f32::from_bits(0xa5a5_a5a5), 5000.0] {
            assert!(whole_cores(float).is_err(), "{float}");
        }
    }

    #[test]
    fn only_the_number_of_one_vnpu_reaches_the_library() {
        assert!(one_vnpu(100).is_ok() && one_vnpu(1123).is_ok());
        for id in [0, 99, 1124, ffi::VDEV_ID_ALL, ffi::VDEV_ID_AUTO] {
            assert_eq!(one_vnpu(id), Err(Trouble::Nonsense(id.into())));
        }
    }

    #[test]
    fn only_root_may_own_or_write_what_is_loaded() {
        assert_eq!(flaw(0, 0o100_755, false), None);
        assert_eq!(flaw(0, 0o120_777, true), None);
        assert!(flaw(0, 0o40_775, false).is_some());
        assert!(flaw(0, 0o41_777, false).is_some());
        assert!(flaw(1000, 0o100_755, false).is_some());
        assert!(flaw(1000, 0o120_777, true).is_some());
    }

    #[test]
    fn a_library_that_others_can_write_is_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("libdcmi.so");
        fs::write(&file, "text").unwrap();
        let OpenError::Refused(why) = checked(&file, false).unwrap_err() else { panic!("refused") };
        assert!(why.contains(file.to_str().unwrap()), "{why}");
        assert!(checked(&file, true).is_ok());
        assert!(checked(dir.path(), true).is_err(), "a directory is no library");
        assert!(checked(&dir.path().join("absent"), true).is_err());
        let OpenError::Refused(why) = Library::open(&file, true).unwrap_err() else { panic!("refused") };
        assert!(why.contains("cannot be loaded"), "{why}");
    }

    #[test]
    fn the_drivers_own_directories_are_found_from_either_place_of_the_library() {
        let found = |path: &str| dependency_directories(Path::new(path));
        let both = vec![
            PathBuf::from("/usr/local/Ascend/driver/lib64/common"),
            PathBuf::from("/usr/local/Ascend/driver/lib64/driver"),
        ];
        assert_eq!(found("/usr/local/Ascend/driver/lib64/driver/libdcmi.so"), both);
        assert_eq!(found("/usr/local/dcmi/libdcmi.so"), both);
        assert_eq!(found("/usr/lib64/libdcmi.so"), Vec::<PathBuf>::new());
    }

    #[test]
    fn a_library_without_symbols_names_those_that_it_lacks() {
        // SAFETY: the C library is loaded already.
        let handle = unsafe { Handle::open(Some("libc.so.6"), RTLD_LAZY) }.unwrap();
        let missing = Symbols::resolve(&handle).mandatory();
        assert_eq!(missing.len(), 7);
    }
}

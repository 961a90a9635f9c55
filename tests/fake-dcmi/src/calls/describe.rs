//! Description, memory, load, sensors, affinity and topology.

use core::ffi::{c_char, c_int, c_uchar, c_uint};

use crate::code::{self, Answer};
use crate::data::{Chip, Ecc, Family, Memory};
use crate::raw::{
    BoardInfo, ChipInfo, ChipInfoV2, DieId, EccInfo, ElabelInfo, HbmInfo, HccsBandwidthInfo, MemoryInfo, MemoryInfoV3,
    MultiUtilizationInfo, PcieInfo, PcieInfoAll, PcieLinkBandwidthInfo, Plain as _, ProcMemInfo, bytes, chars,
};
use crate::session::{Call, Out};

const VENDOR: u32 = 0x19e5;
const BOOTED: u32 = 16;
const BOOTING: u32 = 2;
/// Entries that a caller must give to the process list.
const PROCESSES: usize = 32;

/// Domain, bus, device and function of `0000:c1:00.0`.
fn address(bus: &str) -> Option<(i32, u32, u32, u32)> {
    let (domain, rest) = bus.split_once(':')?;
    let (bus, rest) = rest.split_once(':')?;
    let (device, function) = rest.split_once('.')?;
    let hex = |text| u32::from_str_radix(text, 16).ok();
    Some((i32::from_str_radix(domain, 16).ok()?, hex(bus)?, hex(device)?, hex(function)?))
}

/// Size and use of ordinary memory; a chip with HBM has none of it.
fn ddr(chip: &Chip) -> (u64, u64) {
    match chip.memory {
        Memory::Ddr { mb, used_mb } => (mb, used_mb),
        Memory::Hbm { .. } => (0, 0),
    }
}

fn percent(used: u64, all: u64) -> u32 {
    (used * 100).checked_div(all).and_then(|percent| u32::try_from(percent).ok()).unwrap_or(0)
}

fn legacy_memory(call: &Call<'_>, card_id: c_int, device_id: c_int, info: Out<'_, MemoryInfo>) -> Answer {
    let (mb, used) = ddr(call.chip(card_id, device_id)?);
    call.put(info, MemoryInfo { memory_size: mb, freq: 3200, utiliza: percent(used, mb) })
}

exports! {
    /// Name and cores of a chip.
    fn dcmi_get_device_chip_info(card_id: c_int, device_id: c_int, info: Out<'_, ChipInfo>) about Some((card_id, device_id)) => |call| {
        let chip = call.chip(card_id, device_id)?;
        call.put(info, ChipInfo {
            chip_type: bytes(&chip.chip_type), chip_name: bytes(&chip.chip_name), chip_ver: bytes("V1"), aicore_cnt: chip.aicores,
        })
    };

    /// The same with the product's NPU name.
    fn dcmi_get_device_chip_info_v2(card_id: c_int, device_id: c_int, info: Out<'_, ChipInfoV2>) about Some((card_id, device_id)) => |call| {
        let chip = call.chip(card_id, device_id)?;
        call.put(info, ChipInfoV2 {
            chip_type: bytes(&chip.chip_type), chip_name: bytes(&chip.chip_name), chip_ver: bytes("V1"), aicore_cnt: chip.aicores,
            npu_name: bytes(&chip.npu_name),
        })
    };

    /// PCI address without its domain.
    fn dcmi_get_device_pcie_info(card_id: c_int, device_id: c_int, info: Out<'_, PcieInfo>) about Some((card_id, device_id)) => |call| {
        let chip = call.chip(card_id, device_id)?;
        let (_, bus, device, function) = address(&chip.bus).ok_or(code::INNER_ERR)?;
        call.put(info, PcieInfo {
            deviceid: chip.pci_device, venderid: VENDOR, subvenderid: VENDOR, subdeviceid: chip.pci_device,
            bdf_deviceid: device, bdf_busid: bus, bdf_funcid: function,
        })
    };

    /// PCI address with its domain.
    fn dcmi_get_device_pcie_info_v2(card_id: c_int, device_id: c_int, info: Out<'_, PcieInfoAll>) about Some((card_id, device_id)) => |call| {
        let chip = call.chip(card_id, device_id)?;
        let (domain, bus, device, function) = address(&chip.bus).ok_or(code::INNER_ERR)?;
        call.put(info, PcieInfoAll {
            venderid: VENDOR, subvenderid: VENDOR, deviceid: chip.pci_device, subdeviceid: chip.pci_device, domain,
            bdf_busid: bus, bdf_deviceid: device, bdf_funcid: function, reserve: [0; 32],
        })
    };

    /// Board of a chip.
    fn dcmi_get_device_board_info(card_id: c_int, device_id: c_int, info: Out<'_, BoardInfo>) about Some((card_id, device_id)) => |call| {
        let chip = call.chip(card_id, device_id)?;
        let card = call.data.card_of(chip.phy).ok_or(code::DEVICE_NOT_EXIST)?;
        let slot_id = u32::try_from(card_id).map_err(|_| code::INVALID_PARAMETER)?;
        call.put(info, BoardInfo { board_id: card.board_id, pcb_id: 1, bom_id: 1, slot_id })
    };

    /// Main board of a chip.
    fn dcmi_get_mainboard_id(card_id: c_int, device_id: c_int, id: Out<'_, c_uint>) about Some((card_id, device_id)) => |call| {
        let chip = call.chip(card_id, device_id)?;
        call.put(id, call.data.card_of(chip.phy).ok_or(code::DEVICE_NOT_EXIST)?.mainboard_id)
    };

    /// Product name; only a 310P has one.
    fn dcmi_get_product_type(card_id: c_int, device_id: c_int, buf: *mut c_char, buf_size: c_int) about Some((card_id, device_id)) => |call| {
        let (chip, family) = call.chip_of(card_id, device_id)?;
        if family != Family::Ascend310P {
            return Err(code::NOT_SUPPORT);
        }
        let card = call.data.card_of(chip.phy).ok_or(code::DEVICE_NOT_EXIST)?;
        // SAFETY: the caller gave `buf_size` bytes.
        unsafe { call.put_text(buf, usize::try_from(buf_size).unwrap_or(0), &card.product) }
    };

    /// Die ids: 0 NDIE, 1 VDIE.
    fn dcmi_get_device_die_v2(card_id: c_int, device_id: c_int, kind: c_uint, id: Out<'_, DieId>) about Some((card_id, device_id)) => |call| {
        let chip = call.chip(card_id, device_id)?;
        match kind {
            0 => call.put(id, DieId { soc_die: chip.ndie }),
            1 => call.put(id, DieId { soc_die: chip.vdie }),
            _ => Err(code::INVALID_PARAMETER),
        }
    };

    /// Electronic label of a board.
    fn dcmi_get_card_elabel_v2(card_id: c_int, info: Out<'_, ElabelInfo>) about Some((card_id, -1)) => |call| {
        let chip = call.chip(card_id, 0)?;
        let card = call.data.card_of(chip.phy).ok_or(code::DEVICE_NOT_EXIST)?;
        call.put(info, ElabelInfo {
            product_name: chars(&card.product), model: chars(&chip.chip_name), manufacturer: chars("Huawei"),
            manufacturer_date: chars("2025-03-14"), serial_number: chars(&card.serial),
        })
    };

    /// Boot status; 16 is up.
    fn dcmi_get_device_boot_status(card_id: c_int, device_id: c_int, status: Out<'_, c_uint>) about Some((card_id, device_id)) => |call| {
        match call.chip(card_id, device_id) {
            Ok(_) => call.put(status, BOOTED),
            Err(code::NOT_READY) => call.put(status, BOOTING),
            Err(code) => Err(code),
        }
    };

    /// Work mode, an older chip's affair.
    fn dcmi_get_npu_work_mode(card_id: c_int, mode: Out<'_, c_uchar>) about Some((card_id, -1)) => |call| {
        call.card(card_id)?;
        if mode.is_none() { Err(code::INVALID_PARAMETER) } else { Err(code::NOT_SUPPORT) }
    };

    /// High-bandwidth memory in MB: 910B and 910C.
    fn dcmi_get_device_hbm_info(card_id: c_int, device_id: c_int, info: Out<'_, HbmInfo>) about Some((card_id, device_id)) => |call| {
        let chip = call.chip(card_id, device_id)?;
        let Memory::Hbm { mb, used_mb } = chip.memory else { return Err(code::NOT_SUPPORT) };
        call.put(info, HbmInfo { memory_size: mb, freq: 1600, memory_usage: used_mb, temp: chip.temperature, bandwith_util_rate: 0 })
    };

    /// Ordinary memory in MB: 310P; a chip with HBM answers zero.
    fn dcmi_get_device_memory_info_v3(card_id: c_int, device_id: c_int, info: Out<'_, MemoryInfoV3>) about Some((card_id, device_id)) => |call| {
        let (mb, used) = ddr(call.chip(card_id, device_id)?);
        let mut memory = MemoryInfoV3::zeroed();
        memory.memory_size = mb;
        memory.memory_available = mb - used.min(mb);
        memory.freq = 3200;
        memory.hugepagesize = 2048;
        memory.utiliza = percent(used, mb);
        call.put(info, memory)
    };

    /// The oldest form of the same.
    fn dcmi_get_memory_info(card_id: c_int, device_id: c_int, info: Out<'_, MemoryInfo>) about Some((card_id, device_id)) => |call| {
        legacy_memory(call, card_id, device_id, info)
    };

    /// An older form of the same.
    fn dcmi_get_device_memory_info_v2(card_id: c_int, device_id: c_int, info: Out<'_, MemoryInfo>) about Some((card_id, device_id)) => |call| {
        legacy_memory(call, card_id, device_id, info)
    };

    /// Utilisation in percent, by type.
    fn dcmi_get_device_utilization_rate(
        card_id: c_int, device_id: c_int, kind: c_int, rate: Out<'_, c_uint>,
    ) about Some((card_id, device_id)) => |call| {
        let chip = call.chip(card_id, device_id)?;
        match kind {
            1..=6 | 8 | 10 | 12..=14 => call.put(rate, chip.utilization),
            _ => Err(code::INVALID_PARAMETER),
        }
    };

    /// Utilisation of all core kinds at once; newer drivers.
    fn dcmi_get_device_multi_utilization_rate(
        card_id: c_int, device_id: c_int, info: Out<'_, MultiUtilizationInfo>,
    ) about Some((card_id, device_id)) => |call| {
        let rate = call.chip(card_id, device_id)?.utilization;
        call.put(info, MultiUtilizationInfo { aic_util: rate, aiv_util: rate, aicore_util: rate, npu_util: rate, reserved: [0; 8] })
    };

    /// Degrees Celsius.
    fn dcmi_get_device_temperature(card_id: c_int, device_id: c_int, value: Out<'_, c_int>) about Some((card_id, device_id)) => |call| {
        let temperature = call.chip(card_id, device_id)?.temperature;
        call.put(value, temperature)
    };

    /// Power of a chip in tenths of a watt; a 310P knows only that of its card.
    fn dcmi_get_device_power_info(card_id: c_int, device_id: c_int, value: Out<'_, c_int>) about Some((card_id, device_id)) => |call| {
        let (chip, family) = call.chip_of(card_id, device_id)?;
        if family == Family::Ascend310P { Err(code::NOT_SUPPORT) } else { call.put(value, chip.power) }
    };

    /// Power of a card with a controller, in tenths of a watt.
    fn dcmi_mcu_get_power_info(card_id: c_int, value: Out<'_, c_int>) about Some((card_id, -1)) => |call| {
        if !call.card(card_id)?.mcu {
            return Err(code::NOT_SUPPORT);
        }
        let power = call.chip(card_id, 0)?.power;
        call.put(value, power)
    };

    /// Hundredths of a volt.
    fn dcmi_get_device_voltage(card_id: c_int, device_id: c_int, value: Out<'_, c_uint>) about Some((card_id, device_id)) => |call| {
        call.chip(card_id, device_id)?;
        call.put(value, 88)
    };

    /// MHz, by frequency type.
    fn dcmi_get_device_frequency(card_id: c_int, device_id: c_int, kind: c_uint, value: Out<'_, c_uint>) about Some((card_id, device_id)) => |call| {
        call.chip(card_id, device_id)?;
        let mhz = match kind {
            1 => 3200,
            2 => 2000,
            6 => 1600,
            7 | 9 | 12 => 1650,
            _ => return Err(code::INVALID_PARAMETER),
        };
        call.put(value, mhz)
    };

    /// ECC counters. The struct has 28 bytes for older drivers and 36 for newer ones.
    fn dcmi_get_device_ecc_info(card_id: c_int, device_id: c_int, kind: c_uint, info: *mut EccInfo) about Some((card_id, device_id)) => |call| {
        let chip = call.chip(card_id, device_id)?;
        let known = match chip.memory {
            Memory::Hbm { .. } => kind == 2,
            Memory::Ddr { .. } => kind == 0,
        };
        if !known {
            return Err(code::NOT_SUPPORT);
        }
        let Ecc { single, double, total_single, total_double, isolated_single, isolated_double } = chip.ecc;
        let counters = [1, single, double, total_single, total_double, isolated_single, isolated_double, 0, 0];
        let fields = if call.data.wide_ecc { 9 } else { 7 };
        // SAFETY: the caller gave at least the size of the struct that this driver knows.
        unsafe { call.put_all(info.cast::<u32>(), &counters[..fields]) }
    };

    /// Processes on a chip; the caller gives 32 entries.
    fn dcmi_get_device_resource_info(
        card_id: c_int, device_id: c_int, list: *mut ProcMemInfo, num: Out<'_, c_int>,
    ) about Some((card_id, device_id)) => |call| {
        let chip = call.chip(card_id, device_id)?;
        let processes: Vec<ProcMemInfo> = chip
            .processes
            .iter()
            .take(PROCESSES)
            .map(|process| ProcMemInfo { proc_id: process.pid, proc_mem_usage: process.bytes })
            .collect();
        // SAFETY: the caller gave 32 entries, and there are no more.
        unsafe { call.put_all(list, &processes) }?;
        call.put(num, c_int::try_from(processes.len()).map_err(|_| code::INNER_ERR)?)
    };

    /// PCI Express bandwidth; not modelled.
    fn dcmi_get_pcie_link_bandwidth_info(
        card_id: c_int, device_id: c_int, info: Out<'_, PcieLinkBandwidthInfo>,
    ) about Some((card_id, device_id)) => |call| {
        call.chip(card_id, device_id)?;
        if info.is_none() { Err(code::INVALID_PARAMETER) } else { Err(code::NOT_SUPPORT) }
    };

    /// CPUs near a chip: 24 per NUMA node. Only a 910B tells.
    fn dcmi_get_affinity_cpu_info_by_device_id(
        card_id: c_int, device_id: c_int, cpu_list: *mut c_char, len: Out<'_, c_int>,
    ) about Some((card_id, device_id)) => |call| {
        let (chip, family) = call.chip_of(card_id, device_id)?;
        if family != Family::Ascend910B {
            return Err(code::NOT_SUPPORT);
        }
        let first = chip.numa.max(0) * 24;
        let text = format!("{first}-{}", first + 23);
        call.put(len, c_int::try_from(text.len()).map_err(|_| code::INNER_ERR)?)?;
        // SAFETY: the caller gave at least 32 bytes.
        unsafe { call.put_text(cpu_list, 32, &text) }
    };

    /// Kind of link between two chips: 910B and 910C.
    fn dcmi_get_topo_info_by_device_id(
        card_id1: c_int, device_id1: c_int, card_id2: c_int, device_id2: c_int, topo_type: Out<'_, c_int>,
    ) about Some((card_id1, device_id1)) => |call| {
        let (a, family) = call.chip_of(card_id1, device_id1)?;
        let (b, other) = call.chip_of(card_id2, device_id2)?;
        if family == Family::Ascend310P || other == Family::Ascend310P {
            return Err(code::NOT_SUPPORT);
        }
        let topology = call.data.topology.as_ref().ok_or(code::NOT_SUPPORT)?;
        call.put(topo_type, topology.link(a.phy, b.phy, card_id1 == card_id2))
    };

    /// The card beside a 910C card.
    fn dcmi_get_netdev_brother_device(card_id: c_int, device_id: c_int, brother: Out<'_, c_int>) about Some((card_id, device_id)) => |call| {
        let (_, family) = call.chip_of(card_id, device_id)?;
        if family != Family::Ascend910C {
            return Err(code::NOT_SUPPORT);
        }
        call.card(card_id ^ 1)?;
        call.put(brother, card_id ^ 1)
    };

    /// HCCS bandwidth; always idle.
    fn dcmi_get_hccs_link_bandwidth_info(
        card_id: c_int, device_id: c_int, info: Out<'_, HccsBandwidthInfo>,
    ) about Some((card_id, device_id)) => |call| {
        let (_, family) = call.chip_of(card_id, device_id)?;
        if family == Family::Ascend310P {
            return Err(code::NOT_SUPPORT);
        }
        call.put(info, HccsBandwidthInfo { profiling_time: 1, bandwidth: [0.0; 34] })
    };
}

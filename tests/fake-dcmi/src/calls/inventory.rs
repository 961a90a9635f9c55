//! Lifecycle and inventory.

use core::ffi::{c_char, c_int, c_uint};

use crate::code::{self, Answer};
use crate::session::{Call, Out};

const UNIT_NPU: u32 = 0;
const UNIT_MCU: u32 = 1;
const UNIT_INVALID: u32 = 0xFF;

fn room(len: c_int) -> usize {
    usize::try_from(len).unwrap_or(0)
}

/// # Safety
/// `list` must be null or have room for `len` entries.
unsafe fn card_list(call: &Call<'_>, num: Out<'_, c_int>, list: *mut c_int, len: c_int) -> Answer {
    if !call.ready() {
        return Err(code::INNER_ERR);
    }
    let ids: Vec<c_int> = call.cards().iter().map(|card| card.id).collect();
    if room(len) < ids.len() || list.is_null() {
        return Err(code::INVALID_PARAMETER);
    }
    call.put(num, c_int::try_from(ids.len()).map_err(|_| code::INNER_ERR)?)?;
    // SAFETY: the caller gave room for `len` entries, which are enough.
    unsafe { call.put_all(list, &ids) }
}

fn count(number: usize) -> Answer<c_int> {
    c_int::try_from(number).map_err(|_| code::INNER_ERR)
}

exports! {
    /// Enumerates the cards; a second call does it again, in place.
    fn dcmi_init() about None => |call| call.init();

    /// The entry point of a later generation of chips, which this node does not have.
    fn dcmiv2_init() about None => |_call| Err(code::NOT_SUPPORT);

    /// Version of the library; at least 16 bytes.
    fn dcmi_get_dcmi_version(ver: *mut c_char, len: c_uint) about None => |call| {
        if len < 16 {
            return Err(code::INVALID_PARAMETER);
        }
        // SAFETY: the caller gave `len` bytes.
        unsafe { call.put_text(ver, usize::try_from(len).unwrap_or(0), &call.data.dcmi_version) }
    };

    /// Version of the driver.
    fn dcmi_get_driver_version(ver: *mut c_char, len: c_uint) about None => |call| {
        if !call.ready() {
            return Err(code::INNER_ERR);
        }
        // SAFETY: the caller gave `len` bytes.
        unsafe { call.put_text(ver, usize::try_from(len).unwrap_or(0), &call.data.driver_version) }
    };

    /// Card ids; -1 for a card that did not come up.
    fn dcmi_get_card_list(card_num: Out<'_, c_int>, card_list_: *mut c_int, list_len: c_int) about None => |call| {
        // SAFETY: passed on.
        unsafe { card_list(call, card_num, card_list_, list_len) }
    };

    /// The older name of the same.
    fn dcmi_get_card_num_list(card_num: Out<'_, c_int>, card_list_: *mut c_int, list_len: c_int) about None => |call| {
        // SAFETY: passed on.
        unsafe { card_list(call, card_num, card_list_, list_len) }
    };

    /// Number of NPU chips.
    fn dcmi_get_all_device_count(all: Out<'_, c_int>) about None => |call| call.put(all, count(call.seats().count())?);

    /// Number of NPU chips of a card; 0 before init.
    fn dcmi_get_device_num_in_card(card_id: c_int, num: Out<'_, c_int>) about Some((card_id, -1)) => |call| {
        if !call.ready() {
            return call.put(num, 0);
        }
        call.put(num, count(call.card(card_id)?.chips.len())?)
    };

    /// Number of NPU chips of a card and the indices of MCU and CPU, -1 for none.
    fn dcmi_get_device_id_in_card(
        card_id: c_int, device_id_max: Out<'_, c_int>, mcu_id: Out<'_, c_int>, cpu_id: Out<'_, c_int>,
    ) about Some((card_id, -1)) => |call| {
        let card = call.card(card_id)?;
        let chips = count(card.chips.len())?;
        call.put(device_id_max, chips)?;
        call.put(mcu_id, if card.mcu { chips } else { -1 })?;
        call.put(cpu_id, -1)
    };

    /// What sits at an index; "invalid" before init.
    fn dcmi_get_device_type(card_id: c_int, device_id: c_int, kind: Out<'_, c_uint>) about Some((card_id, device_id)) => |call| {
        if !call.ready() {
            return call.put(kind, UNIT_INVALID);
        }
        match call.seat(card_id, device_id) {
            Ok(_) => call.put(kind, UNIT_NPU),
            Err(code::NOT_SUPPORT) => call.put(kind, UNIT_MCU),
            Err(code) => Err(code),
        }
    };

    /// Logic id of a chip. The result comes first.
    fn dcmi_get_device_logic_id(logic_id: Out<'_, c_int>, card_id: c_int, device_id: c_int) about Some((card_id, device_id)) => |call| {
        if !call.ready() {
            return Err(code::NOT_READY);
        }
        let seat = call.seat(card_id, device_id)?;
        call.put(logic_id, c_int::try_from(seat.logic).map_err(|_| code::INNER_ERR)?)
    };

    /// Card and device id from a logic id.
    fn dcmi_get_card_id_device_id_from_logicid(
        card_id: Out<'_, c_int>, device_id: Out<'_, c_int>, logic_id: c_uint,
    ) about None => |call| {
        let (card, device, _) = call.seats().find(|(_, _, chip)| chip.logic == logic_id).ok_or(code::INVALID_DEVICE_ID)?;
        call.put(card_id, card)?;
        call.put(device_id, device)
    };

    /// Card and device id from a physical id.
    fn dcmi_get_card_id_device_id_from_phyid(
        card_id: Out<'_, c_int>, device_id: Out<'_, c_int>, phy_id: c_uint,
    ) about None => |call| {
        let (card, device, _) = call.seats().find(|(_, _, chip)| chip.phy == phy_id).ok_or(code::INVALID_DEVICE_ID)?;
        call.put(card_id, card)?;
        call.put(device_id, device)
    };

    /// Physical id from a logic id.
    fn dcmi_get_device_phyid_from_logicid(logic_id: c_uint, phy_id: Out<'_, c_uint>) about None => |call| {
        let (_, _, chip) = call.seats().find(|(_, _, chip)| chip.logic == logic_id).ok_or(code::INVALID_DEVICE_ID)?;
        call.put(phy_id, chip.phy)
    };

    /// Logic id from a physical id.
    fn dcmi_get_device_logicid_from_phyid(phy_id: c_uint, logic_id: Out<'_, c_uint>) about None => |call| {
        let (_, _, chip) = call.seats().find(|(_, _, chip)| chip.phy == phy_id).ok_or(code::INVALID_DEVICE_ID)?;
        call.put(logic_id, chip.logic)
    };

    /// Chips of a card that did not come up.
    fn dcmi_get_fault_device_num_in_card(card_id: c_int, num: Out<'_, c_int>) about Some((card_id, -1)) => |call| {
        let failed = call.card(card_id)?.failed;
        call.put(num, failed)
    };
}

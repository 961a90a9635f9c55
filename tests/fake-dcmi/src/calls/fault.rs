//! Health, fault codes and fault events.

use core::ffi::{c_char, c_int, c_uchar, c_uint};

use crate::code;
use crate::data::{Environment, Family};
use crate::events::{self, Callback, Selection};
use crate::raw::{Event, EventFilter};
use crate::session::Out;

const HEALTH_UNKNOWN: u32 = 4;

exports! {
    /// Health of a chip. The value is "unknown" until it is known, and a chip that is lost is "not ready".
    fn dcmi_get_device_health(card_id: c_int, device_id: c_int, health: Out<'_, c_uint>) about Some((card_id, device_id)) => |call| {
        let Some(health) = health else { return Err(code::INVALID_PARAMETER) };
        call.put(Some(&mut *health), HEALTH_UNKNOWN)?;
        match call.chip(card_id, device_id) {
            Ok(chip) => call.put(Some(health), chip.health),
            Err(code::DEVICE_NOT_EXIST) => Err(code::NOT_READY),
            Err(code) => Err(code),
        }
    };

    /// Health of the driver.
    fn dcmi_get_driver_health(health: Out<'_, c_uint>) about None => |call| call.put(health, call.data.driver_health);

    /// Current fault codes. A wrong chip is a bad parameter; every other failure looks the same.
    fn dcmi_get_device_errorcode_v2(
        card_id: c_int, device_id: c_int, error_count: Out<'_, c_int>, list: *mut c_uint, list_len: c_uint,
    ) about Some((card_id, device_id)) => |call| {
        let seat = call.seat(card_id, device_id)?;
        let errors = &call.alive(seat).map_err(|_| code::INNER_ERR)?.errors;
        if usize::try_from(list_len).unwrap_or(0) < errors.len() {
            return Err(code::INVALID_PARAMETER);
        }
        call.put(error_count, c_int::try_from(errors.len()).map_err(|_| code::INNER_ERR)?)?;
        // SAFETY: the caller gave `list_len` entries, which are enough.
        unsafe { call.put_all(list, errors) }
    };

    /// Fault codes of the driver: none.
    fn dcmi_get_driver_errorcode(error_count: Out<'_, c_int>, list: *mut c_uint, list_len: c_uint) about None => |call| {
        if list.is_null() || list_len == 0 {
            return Err(code::INVALID_PARAMETER);
        }
        call.put(error_count, 0)
    };

    /// What a fault code means.
    fn dcmi_get_device_errorcode_string(
        card_id: c_int, device_id: c_int, error_code: c_uint, buf: *mut c_uchar, buf_size: c_int,
    ) about Some((card_id, device_id)) => |call| {
        call.chip(card_id, device_id)?;
        let text = format!("simulated fault 0x{error_code:08X}");
        // SAFETY: the caller gave `buf_size` bytes.
        unsafe { call.put_text(buf.cast::<c_char>(), usize::try_from(buf_size).unwrap_or(0), &text) }
    };

    /// Asks for a callback at every fault event; once per process. Card -1 and device -1 mean all.
    fn dcmi_subscribe_fault_event(
        card_id: c_int, device_id: c_int, filter: EventFilter, handler: Option<Callback>,
    ) about Some((card_id, device_id)) => |call| {
        let handler = handler.ok_or(code::INVALID_PARAMETER)?;
        if call.data.environment == Environment::PodUser {
            return Err(code::OPER_NOT_PERMITTED);
        }
        if call.family()? == Family::Ascend310P {
            return Err(code::NOT_SUPPORT);
        }
        if (card_id, device_id) != (-1, -1) {
            call.seat(card_id, device_id)?;
        }
        events::subscribe(Selection { card: card_id, device: device_id, filter }, handler)
    };

    /// Waits for the next fault event: -1 for ever, else at most 30 s.
    fn dcmi_get_fault_event(
        card_id: c_int, device_id: c_int, timeout: c_int, filter: EventFilter, event: Out<'_, Event>,
    ) about Some((card_id, device_id)) => |call| {
        if event.is_none() || !(-1..=30_000).contains(&timeout) {
            return Err(code::INVALID_PARAMETER);
        }
        let next = events::pull(call.session, &Selection { card: card_id, device: device_id, filter }, timeout)?;
        call.put(event, next)
    };

    /// The current fault events: not on this path.
    fn dcmi_get_device_current_fault_event(
        card_id: c_int, device_id: c_int, buf: *mut Event, buf_len: c_int, event_count: Out<'_, c_int>,
    ) about Some((card_id, device_id)) => |_call| {
        if buf.is_null() || buf_len < 1 || event_count.is_none() {
            return Err(code::INVALID_PARAMETER);
        }
        Err(code::NOT_SUPPORT)
    };

    /// State of a chip's network port; a 310P has none.
    fn dcmi_get_device_network_health(card_id: c_int, device_id: c_int, result: Out<'_, c_uint>) about Some((card_id, device_id)) => |call| {
        let (chip, family) = call.chip_of(card_id, device_id)?;
        if family == Family::Ascend310P { Err(code::NOT_SUPPORT) } else { call.put(result, chip.network) }
    };
}

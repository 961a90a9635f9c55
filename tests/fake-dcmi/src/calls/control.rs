//! The generic get and set calls, sharing, die policy and reset.

use core::ffi::{c_int, c_uint, c_void};

use crate::code::{self, Answer};
use crate::data::{ChipState, DiePolicy, Environment, Family};
use crate::raw::{Plain, SpodInfo};
use crate::session::{Call, Out};
use crate::slicing::{self, broken};

const CHIP_INF: u32 = 12;
const QOS: u32 = 13;
const SVM: u32 = 51;
const VDEV_MNG: u32 = 52;
const SEC: u32 = 53;
const DEVICE_SHARE: u32 = 0x8001;
/// Main commands that exist.
const MAIN: [u32; 27] =
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 50, 51, 52, 53, 55, 56, 0x8000, 0x8001, 0x8003];

/// Reads a struct that the caller filled in.
///
/// # Safety
/// `buf` must be null or have `size` readable bytes.
pub(super) unsafe fn input<T: Plain>(buf: *const u8, size: u32) -> Answer<T> {
    if buf.is_null() || usize::try_from(size).unwrap_or(0) < size_of::<T>() {
        return Err(code::INVALID_PARAMETER);
    }
    // SAFETY: the size was checked, and any bytes are a value.
    Ok(unsafe { buf.cast::<T>().read_unaligned() })
}

/// Writes a struct and its size.
///
/// # Safety
/// `buf` must be null or have `*size` writable bytes.
pub(super) unsafe fn output<T: Plain>(call: &Call<'_>, buf: *mut u8, size: &mut u32, value: T) -> Answer {
    if usize::try_from(*size).unwrap_or(0) < size_of::<T>() {
        return Err(code::INVALID_PARAMETER);
    }
    *size = u32::try_from(size_of::<T>()).map_err(|_| code::INNER_ERR)?;
    // SAFETY: the size was checked.
    unsafe { call.put_all(buf.cast::<T>(), &[value]) }
}

/// Super-pod facts of a 910C.
fn spod(call: &Call<'_>, seat: (c_int, c_int)) -> Answer<SpodInfo> {
    let (chip, family) = call.chip_of(seat.0, seat.1)?;
    if family != Family::Ascend910C {
        return Err(code::NOT_SUPPORT);
    }
    Ok(SpodInfo {
        sdid: chip.phy,
        scale_type: 384,
        super_pod_id: 1,
        server_id: 0,
        chassis_id: 0,
        super_pod_type: 0,
        reserve: [0; 6],
    })
}

/// A call that only a 910C knows.
fn only_910c(call: &Call<'_>, card_id: c_int, device_id: c_int) -> Answer {
    match call.chip_of(card_id, device_id)?.1 {
        Family::Ascend910C => Ok(()),
        _ => Err(code::NOT_SUPPORT),
    }
}

exports! {
    /// Reads by main and sub command. `size` is the room on the way in and what was written on the way out.
    fn dcmi_get_device_info(
        card_id: c_int, device_id: c_int, main_cmd: c_uint, sub_cmd: c_uint, buf: *mut c_void, size: Option<&mut c_uint>,
    ) about Some((card_id, device_id)) => |call| {
        let Some(size) = size else { return Err(code::INVALID_PARAMETER) };
        if buf.is_null() || !MAIN.contains(&main_cmd) {
            return Err(code::INVALID_PARAMETER);
        }
        let buf = buf.cast::<u8>();
        match main_cmd {
            // SAFETY: the caller gave `size` bytes.
            VDEV_MNG => unsafe { super::vnpu::info(call, (card_id, device_id), sub_cmd, buf, size) },
            CHIP_INF if sub_cmd == 1 => {
                let info = spod(call, (card_id, device_id))?;
                // SAFETY: the caller gave `size` bytes.
                unsafe { output(call, buf, size, info) }
            }
            DEVICE_SHARE if sub_cmd == 0 => {
                let shared = i32::from(call.chip(card_id, device_id)?.shared);
                // SAFETY: the caller gave `size` bytes.
                unsafe { output(call, buf, size, shared) }
            }
            SVM | SEC | QOS if call.data.environment != Environment::Host => Err(code::OPER_NOT_PERMITTED),
            _ => {
                call.chip(card_id, device_id)?;
                Err(code::NOT_SUPPORT)
            }
        }
    };

    /// Writes by main and sub command: only the SR-IOV switch, which clients must leave alone.
    fn dcmi_set_device_info(
        card_id: c_int, device_id: c_int, main_cmd: c_uint, sub_cmd: c_uint, buf: *const c_void, size: c_uint,
    ) about Some((card_id, device_id)) => |call| {
        if buf.is_null() || !MAIN.contains(&main_cmd) {
            return Err(code::INVALID_PARAMETER);
        }
        let chip = call.chip(card_id, device_id)?;
        if (main_cmd, sub_cmd) != (VDEV_MNG, 3) {
            return Err(code::NOT_SUPPORT);
        }
        // SAFETY: the caller gave `size` bytes.
        let on: u32 = unsafe { input(buf.cast::<u8>(), size) }?;
        call.session.world.edit_chip(chip.phy, |chip| chip.sriov = on == 1).map_err(broken)
    };

    /// Whether several containers may open a chip.
    fn dcmi_get_device_share_enable(card_id: c_int, device_id: c_int, enable: Out<'_, c_int>) about Some((card_id, device_id)) => |call| {
        let shared = call.chip(card_id, device_id)?.shared;
        call.put(enable, c_int::from(shared))
    };

    /// Changes that; both dies of a 910C go together.
    fn dcmi_set_device_share_enable(card_id: c_int, device_id: c_int, enable: c_int) about Some((card_id, device_id)) => |call| {
        if !(0..=1).contains(&enable) {
            return Err(code::INVALID_PARAMETER);
        }
        let chip = call.chip(card_id, device_id)?;
        let card = call.data.card_of(chip.phy).ok_or(code::DEVICE_NOT_EXIST)?;
        let dies: Vec<u32> = match card.family {
            Family::Ascend910C => card.chips.iter().map(|chip| chip.phy).collect(),
            _ => vec![chip.phy],
        };
        if card.chips.iter().any(|chip| dies.contains(&chip.phy) && !chip.processes.is_empty()) {
            return Err(code::NOT_SUPPORT_IN_CONTAINER);
        }
        call.edit(|data| {
            for die in dies {
                if let Some(chip) = data.chip_mut(die) {
                    chip.shared = enable == 1;
                }
            }
        })
    };

    /// Whether the two dies of a 910C go to containers together (0) or alone (1).
    fn dcmi_get_multi_die_policy(policy: Out<'_, c_uint>) about None => |call| {
        if call.family()? != Family::Ascend910C {
            return Err(code::NOT_SUPPORT);
        }
        match call.data.die_policy {
            DiePolicy::Value(value) => call.put(policy, value),
            DiePolicy::Unreadable(code) => Err(code),
        }
    };

    /// Changes that.
    fn dcmi_set_multi_die_policy(policy: c_uint) about None => |call| {
        if call.family()? != Family::Ascend910C {
            return Err(code::NOT_SUPPORT);
        }
        if !matches!(call.data.environment, Environment::Host | Environment::PrivilegedPod) {
            return Err(code::OPER_NOT_PERMITTED);
        }
        if policy > 1 {
            return Err(code::INVALID_PARAMETER);
        }
        call.edit(|data| data.die_policy = DiePolicy::Value(policy))
    };

    /// State of a super-pod node.
    fn dcmi_get_spod_node_status(
        card_id: c_int, device_id: c_int, sdid: c_uint, status: Out<'_, c_uint>,
    ) about Some((card_id, device_id)) => |call| {
        let _ = sdid;
        only_910c(call, card_id, device_id)?;
        call.put(status, 0)
    };

    /// Changes that.
    fn dcmi_set_spod_node_status(card_id: c_int, device_id: c_int, sdid: c_uint, status: c_uint) about Some((card_id, device_id)) => |call| {
        let _ = (sdid, status);
        only_910c(call, card_id, device_id)
    };

    /// Resets a chip in-band (1). It must be idle and not sliced.
    fn dcmi_set_device_reset(card_id: c_int, device_id: c_int, channel: c_uint) about Some((card_id, device_id)) => |call| {
        let seat = call.seat(card_id, device_id)?;
        let chip = call.data.chip(seat.phy).ok_or(code::DEVICE_NOT_EXIST)?;
        if channel > 1 {
            return Err(code::INVALID_PARAMETER);
        }
        if !slicing::of_chip(&call.session.world, chip.phy).map_err(broken)?.is_empty() {
            return Err(code::OPER_NOT_PERMITTED);
        }
        if !chip.processes.is_empty() {
            return Err(code::NOT_SUPPORT_IN_CONTAINER);
        }
        call.session.world.edit_chip(chip.phy, |chip| {
            chip.health = 0;
            chip.errors.clear();
            if chip.state == ChipState::Resetting {
                chip.state = ChipState::Up;
            }
        }).map_err(broken)
    };

    /// Before an out-of-band reset.
    fn dcmi_set_device_pre_reset(card_id: c_int, device_id: c_int) about Some((card_id, device_id)) => |call| {
        call.seat(card_id, device_id).map(drop)
    };

    /// The older name of the same.
    fn dcmi_pre_reset_soc(card_id: c_int, device_id: c_int) about Some((card_id, device_id)) => |call| {
        call.seat(card_id, device_id).map(drop)
    };

    /// After an out-of-band reset.
    fn dcmi_set_device_rescan(card_id: c_int, device_id: c_int) about Some((card_id, device_id)) => |call| {
        call.seat(card_id, device_id).map(drop)
    };

    /// The older name of the same.
    fn dcmi_rescan_soc(card_id: c_int, device_id: c_int) about Some((card_id, device_id)) => |call| {
        call.seat(card_id, device_id).map(drop)
    };

    /// Whether an out-of-band reset is possible: 910C only.
    fn dcmi_get_device_outband_channel_state(card_id: c_int, device_id: c_int, state: Out<'_, c_int>) about Some((card_id, device_id)) => |call| {
        only_910c(call, card_id, device_id)?;
        call.put(state, 1)
    };
}

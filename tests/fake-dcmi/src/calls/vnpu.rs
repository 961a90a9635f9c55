//! vNPUs: create, destroy, mode, recover mode; the queries behind `dcmi_get_device_info`.

use core::ffi::{c_int, c_uint};

use crate::boot_list::BootList;
use crate::code::{self, Answer};
use crate::data::{Environment, Family, Vnpu};
use crate::raw::{
    BaseResource, ComputingResource, CreateVdevOut, CreateVdevRes, MediaResource, Plain, SocFreeResource,
    SocTotalResource, VdevQuery, VdevQueryInfo, chars, text,
};
use crate::session::{Call, Out, wait};
use crate::slicing::{self, Amount, Budget, Wish, broken};
use crate::template::{self, Media, TemplateSet};

/// "Let the driver choose."
const AUTO: u32 = u32::MAX;
/// Destroys every vNPU of the chip.
const ALL: u32 = 65_535;

/// Who may create and destroy.
fn permitted(call: &Call<'_>) -> Answer {
    match call.data.environment {
        Environment::Host | Environment::PrivilegedPod => Ok(()),
        Environment::Pod | Environment::PodUser | Environment::User => Err(code::OPER_NOT_PERMITTED),
    }
}

fn real(number: u16) -> f32 {
    f32::from(number)
}

fn media(media: Media) -> MediaResource {
    let mut out = MediaResource::zeroed();
    out.jpegd = real(media.jpegd);
    out.jpege = real(media.jpege);
    out.vpc = real(media.vpc);
    out.vdec = real(media.vdec);
    out.venc = real(media.venc);
    out
}

fn computing(amount: Amount) -> ComputingResource {
    let mut out = ComputingResource::zeroed();
    out.aic = real(u16::try_from(amount.aicores).unwrap_or(u16::MAX));
    out.memory_size = amount.memory_mb;
    out.device_aicpu = amount.aicpus;
    out
}

fn base(vfg: u32) -> BaseResource {
    BaseResource { vfg_id: vfg, ..BaseResource::zeroed() }
}

fn query(vnpu: &Vnpu, set: TemplateSet) -> VdevQuery {
    let engines = set.find(&vnpu.template).map_or_else(Media::default, |template| template.media);
    let amount = Amount { aicores: vnpu.aicores, aicpus: vnpu.aicpus, memory_mb: vnpu.memory_mb, media: engines };
    VdevQuery {
        vdev_id: vnpu.id,
        query_info: VdevQueryInfo {
            name: chars(&vnpu.name),
            status: 1,
            is_container_used: u32::from(vnpu.in_use),
            vfid: vnpu.vfid,
            vfg_id: vnpu.vfg,
            container_id: vnpu.container,
            base: base(vnpu.vfg),
            computing: computing(amount),
            media: media(engines),
        },
    }
}

/// One query of `VDEV_MNG`.
///
/// # Safety
/// `buf` must be null or have room for `*size` bytes.
pub(super) unsafe fn info(call: &Call<'_>, place: (c_int, c_int), sub: u32, buf: *mut u8, size: &mut u32) -> Answer {
    if call.data.environment == Environment::User {
        return Err(code::OPER_NOT_PERMITTED);
    }
    let chip = call.chip(place.0, place.1)?;
    let (card, _, set) = slicing::templates(&call.data, chip.phy)?;
    let world = &call.session.world;
    let load =
        || -> Answer<Budget> { Ok(slicing::budget(set, chip, &slicing::of_chip(world, chip.phy).map_err(broken)?)) };
    match sub {
        0 | 5 => {
            if sub == 5 && card.family != Family::Ascend310P {
                return Err(code::NOT_SUPPORT);
            }
            // SAFETY: passed on.
            let asked: VdevQuery = unsafe { super::control::input(buf, *size) }?;
            if !template::ids(chip.phy).contains(&asked.vdev_id) {
                return Err(code::INVALID_PARAMETER);
            }
            let vnpu = slicing::find(world, asked.vdev_id).map_err(broken)?.ok_or(code::DEVICE_NOT_EXIST)?;
            let mut answer = query(&vnpu, set);
            if sub == 5 {
                answer.query_info.computing.vdev_memory_total = vnpu.memory_mb * 1024;
                answer.query_info.computing.vdev_memory_free = vnpu.memory_mb * 1024;
            }
            // SAFETY: passed on.
            unsafe { super::control::output(call, buf, size, answer) }
        }
        1 => {
            let budget = load()?;
            let mut answer = SocTotalResource::zeroed();
            answer.vdev_num = u32::try_from(budget.ids.len()).map_err(|_| code::INNER_ERR)?;
            for (slot, id) in answer.vdev_id.iter_mut().zip(&budget.ids) {
                *slot = *id;
            }
            if set == TemplateSet::P310 {
                (answer.vfg_num, answer.vfg_bitmap) = (4, 0b1111);
            }
            answer.computing = computing(budget.total);
            answer.media = media(budget.total.media);
            // SAFETY: passed on.
            unsafe { super::control::output(call, buf, size, answer) }
        }
        2 => {
            let budget = load()?;
            let mut answer = SocFreeResource::zeroed();
            (answer.vfg_num, answer.vfg_bitmap) = (budget.groups.count_ones(), budget.groups);
            answer.computing = computing(budget.free);
            answer.media = media(budget.free.media);
            // SAFETY: passed on.
            unsafe { super::control::output(call, buf, size, answer) }
        }
        _ => Err(code::INVALID_PARAMETER),
    }
}

exports! {
    /// Makes a vNPU from a template.
    fn dcmi_create_vdevice(
        card_id: c_int, device_id: c_int, vdev: Option<&CreateVdevRes>, out: Out<'_, CreateVdevOut>,
    ) about Some((card_id, device_id)) => |call| {
        permitted(call)?;
        let (Some(wish), Some(out)) = (vdev, out) else { return Err(code::INVALID_PARAMETER) };
        let chip = call.chip(card_id, device_id)?;
        let name = text(&wish.template_name);
        let some = |id: u32| (id != AUTO).then_some(id);
        let vnpu = slicing::create(&call.session.world, &Wish {
            phy: chip.phy, template: &name, id: some(wish.vdev_id), vfg: some(wish.vfg_id), maker: std::process::id(),
        }, &|| call.midway())?;
        let mut reserved = [0xFF; 32];
        reserved[..4].copy_from_slice(&vnpu.vfid.to_ne_bytes());
        call.put(Some(out), CreateVdevOut {
            vdev_id: vnpu.id, pcie_bus: AUTO, pcie_device: AUTO, pcie_func: AUTO, vfg_id: vnpu.vfg, reserved,
        })
    };

    /// Destroys a vNPU, or with 65535 every one of the chip.
    fn dcmi_set_destroy_vdevice(card_id: c_int, device_id: c_int, vdev_id: c_uint) about Some((card_id, device_id)) => |call| {
        permitted(call)?;
        let chip = call.chip(card_id, device_id)?;
        let world = &call.session.world;
        slicing::templates(&call.data, chip.phy)?;
        wait(call.data.slicing.destroy_ms);
        if vdev_id != ALL {
            return slicing::destroy(world, chip.phy, vdev_id, &|| call.midway());
        }
        for vnpu in slicing::of_chip(world, chip.phy).map_err(broken)? {
            slicing::destroy(world, chip.phy, vnpu.id, &|| call.midway())?;
        }
        Ok(())
    };

    /// Container mode: 0 docker, 1 VM. In a container only a privileged one on a 910B may ask.
    fn dcmi_get_vdevice_mode(mode: Out<'_, c_int>) about None => |call| {
        let family = call.family()?;
        match (call.data.environment, family) {
            (Environment::Host, _) | (Environment::PrivilegedPod, Family::Ascend910B) => call.put(mode, call.data.vdevice_mode),
            _ => Err(code::OPER_NOT_PERMITTED),
        }
    };

    /// Changes the container mode; refused while there are vNPUs, and always on a 910C.
    fn dcmi_set_vdevice_mode(mode: c_int) about None => |call| {
        if call.family()? == Family::Ascend910C {
            return Err(code::NOT_SUPPORT);
        }
        permitted(call)?;
        if !(0..=1).contains(&mode) {
            return Err(code::INVALID_PARAMETER);
        }
        if !call.session.world.vnpus().map_err(broken)?.is_empty() {
            return Err(code::RESOURCE_OCCUPIED);
        }
        call.edit(|data| data.vdevice_mode = mode)
    };

    /// Whether vNPUs come back after a boot. Every failure looks the same.
    fn dcmi_get_vnpu_config_recover_mode(mode: Out<'_, c_uint>) about None => |call| {
        if call.family()? == Family::Ascend910C {
            return Err(code::NOT_SUPPORT);
        }
        permitted(call)?;
        let list = BootList::load(&call.session.world, &call.data).map_err(|_| code::INNER_ERR)?;
        call.put(mode, u32::from(list.recover))
    };

    /// Sets whether vNPUs come back after a boot. Every failure looks the same.
    fn dcmi_set_vnpu_config_recover_mode(mode: c_uint) about None => |call| {
        if call.family()? == Family::Ascend910C {
            return Err(code::NOT_SUPPORT);
        }
        permitted(call)?;
        if mode > 1 {
            return Err(code::INVALID_PARAMETER);
        }
        BootList::change(&call.session.world, &call.data, |list| {
            list.recover = mode == 1;
            true
        })
        .map_err(|_| code::INNER_ERR)
    };
}

//! vNPUs as the driver and the library keep them: rules, files, device nodes and the list for the next boot.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::boot_list::BootList;
use crate::code::{self, Answer};
use crate::data::{Card, Chip, ChipState, Data, Family, NodeKind, Vnpu};
use crate::disk::{self, WorldError};
use crate::session::{complain, wait};
use crate::template::{self, Media, Template, TemplateSet};
use crate::world::World;

/// What a create asks for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wish<'a> {
    pub(crate) phy: u32,
    pub(crate) template: &'a str,
    /// None: the driver chooses.
    pub(crate) id: Option<u32>,
    pub(crate) vfg: Option<u32>,
    pub(crate) maker: u32,
}

/// A failure of the simulation itself, not of the simulated library.
#[allow(clippy::needless_pass_by_value, reason = "made for map_err")]
pub(crate) fn broken(error: WorldError) -> i32 {
    if let WorldError::Refused(code) = error {
        return code;
    }
    complain(&error.to_string());
    code::INNER_ERR
}

fn file(world: &World, id: u32) -> PathBuf {
    world.path("vnpus").join(format!("{id}.json"))
}

/// Ids of all vNPUs, in order.
fn present(world: &World) -> Result<Vec<u32>, WorldError> {
    let path = world.path("vnpus");
    let mut ids = Vec::new();
    for entry in fs::read_dir(&path).map_err(disk::at(&path))? {
        let name = entry.map_err(disk::at(&path))?.file_name();
        ids.extend(name.to_str().and_then(|name| name.strip_suffix(".json")).and_then(|id| id.parse::<u32>().ok()));
    }
    ids.sort_unstable();
    Ok(ids)
}

/// All vNPUs, by id.
pub(crate) fn all(world: &World) -> Result<Vec<Vnpu>, WorldError> {
    present(world)?.into_iter().filter_map(|id| find(world, id).transpose()).collect()
}

/// The vNPUs of one chip, by id.
pub(crate) fn of_chip(world: &World, phy: u32) -> Result<Vec<Vnpu>, WorldError> {
    let ids = template::ids(phy);
    present(world)?.into_iter().filter(|id| ids.contains(id)).filter_map(|id| find(world, id).transpose()).collect()
}

/// One vNPU.
pub(crate) fn find(world: &World, id: u32) -> Result<Option<Vnpu>, WorldError> {
    match disk::load(&file(world, id)) {
        Ok(vnpu) => Ok(Some(vnpu)),
        Err(WorldError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Writes a vNPU's file. The caller holds the world's lock.
pub(crate) fn store(world: &World, vnpu: &Vnpu) -> Result<(), WorldError> {
    disk::save(&file(world, vnpu.id), vnpu)
}

fn below(world: &World, path: &Path) -> PathBuf {
    world.dir().join(path)
}

/// Makes a device node.
pub(crate) fn make_node(world: &World, data: &Data, name: &str) -> Result<(), WorldError> {
    let dir = below(world, &data.dev_dir);
    fs::create_dir_all(&dir).map_err(disk::at(&dir))?;
    let path = dir.join(name);
    let made = match &data.node {
        NodeKind::Symlink(target) => symlink(target, &path),
        NodeKind::Char(major, minor) => {
            use nix::sys::stat::{Mode, SFlag, makedev, mknod};
            let mode = Mode::from_bits_truncate(0o660);
            mknod(&path, SFlag::S_IFCHR, mode, makedev(*major, *minor)).map_err(std::io::Error::from)
        }
        NodeKind::Distinct { major, first, gid } => make_distinct(&path, *major, first + offset(name), *gid),
    };
    match made {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => Err(disk::at(&path)(error)),
        _ => Ok(()),
    }
}

/// Makes a device as the driver and its udev rule would, whatever this process's umask is.
fn make_distinct(path: &Path, major: u64, minor: u64, gid: u32) -> std::io::Result<()> {
    use nix::sys::stat::{Mode, SFlag, makedev, mknod};
    use std::os::unix::fs::{PermissionsExt as _, chown};
    mknod(path, SFlag::S_IFCHR, Mode::empty(), makedev(major, minor))?;
    chown(path, None, Some(gid))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o660))
}

/// How far the minor number of a node is from that of `davinci0`.
fn offset(name: &str) -> u64 {
    let number = |prefix: &str| name.strip_prefix(prefix)?.parse::<u64>().ok();
    match (number("vdavinci"), number("davinci"), name) {
        (Some(id), _, _) => 1000 + id,
        (_, Some(phy), _) => phy,
        (_, _, "davinci_manager") => 500,
        (_, _, "devmm_svm") => 501,
        (_, _, "hisi_hdc") => 502,
        _ => 503,
    }
}

/// Removes the file and the node of a vNPU.
pub(crate) fn forget(world: &World, id: u32) -> Result<(), WorldError> {
    let data = world.data()?;
    let node = below(world, &data.dev_dir).join(format!("vdavinci{id}"));
    for path in [node, file(world, id)] {
        match fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(disk::at(&path)(error)),
            _ => {}
        }
    }
    Ok(())
}

/// What a chip has, what its vNPUs have taken, and what is left.
#[derive(Clone, Debug)]
pub(crate) struct Budget {
    pub(crate) ids: Vec<u32>,
    pub(crate) total: Amount,
    pub(crate) free: Amount,
    /// vGroups without a vNPU, as bits; 310P only.
    pub(crate) groups: u32,
}

/// An amount of a chip.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Amount {
    pub(crate) aicores: u32,
    pub(crate) aicpus: u16,
    pub(crate) memory_mb: u64,
    pub(crate) media: Media,
}

impl Amount {
    fn minus(self, other: Self) -> Self {
        Self {
            aicores: self.aicores.saturating_sub(other.aicores),
            aicpus: self.aicpus.saturating_sub(other.aicpus),
            memory_mb: self.memory_mb.saturating_sub(other.memory_mb),
            media: self.media.minus(other.media),
        }
    }
}

/// Adds up a chip.
pub(crate) fn budget(set: TemplateSet, chip: &Chip, vnpus: &[Vnpu]) -> Budget {
    let total = Amount { aicores: chip.aicores, aicpus: chip.aicpus, memory_mb: chip.memory.mb(), media: set.media() };
    let free = vnpus.iter().fold(total, |free, vnpu| {
        let media = set.find(&vnpu.template).map_or_else(Media::default, |template| template.media);
        free.minus(Amount { aicores: vnpu.aicores, aicpus: vnpu.aicpus, memory_mb: vnpu.memory_mb, media })
    });
    let taken = vnpus.iter().fold(0, |bits, vnpu| bits | 1_u32 << vnpu.vfg.min(31));
    let groups = if set == TemplateSet::P310 { 0b1111 & !taken } else { 0 };
    Budget { ids: vnpus.iter().map(|vnpu| vnpu.id).collect(), total, free, groups }
}

/// The template set of a chip's card. An independent die of a 910C is the condition for slicing it.
pub(crate) fn templates(data: &Data, phy: u32) -> Answer<(&Card, &Chip, TemplateSet)> {
    let card = data.card_of(phy).ok_or(code::DEVICE_NOT_EXIST)?;
    let chip = data.chip(phy).ok_or(code::DEVICE_NOT_EXIST)?;
    let set = TemplateSet::of(card, &data.slicing)?;
    if card.family == Family::Ascend910C && data.die_policy != crate::data::DiePolicy::Value(1) {
        return Err(code::NOT_SUPPORT);
    }
    Ok((card, chip, set))
}

fn has_sriov(family: Family) -> bool {
    matches!(family, Family::Ascend910B | Family::Ascend910C)
}

/// What happens between the two halves of a change: nothing, or a planted fault.
pub(crate) type Midway<'a> = &'a dyn Fn() -> Answer;

/// Makes a vNPU: SR-IOV, template, kernel, list for the next boot, in this order.
pub(crate) fn create(world: &World, wish: &Wish<'_>, midway: Midway<'_>) -> Answer<Vnpu> {
    let data = world.data().map_err(broken)?;
    let card = data.card_of(wish.phy).ok_or(code::DEVICE_NOT_EXIST)?;
    if has_sriov(card.family) {
        // A set that does not exist for the chip is found out before the switch is thrown.
        if templates(&data, wish.phy).is_err_and(|code| code == code::NOT_SUPPORT) {
            return Err(code::NOT_SUPPORT);
        }
        sriov_on(world, &data, wish.phy)?;
    }
    wait(data.slicing.create_ms);
    let made = kernel_create(world, wish);
    if made.is_ok() {
        midway()?;
    }
    let made = made.and_then(|vnpu| {
        if let Err(code) = remember(world, &vnpu) {
            forget(world, vnpu.id).map_err(broken)?;
            return Err(code);
        }
        Ok(vnpu)
    });
    if made.is_err() {
        sriov_off_if_empty(world, wish.phy)?;
    }
    made
}

/// Throws the SR-IOV switch if it is off. It does so before anybody looks whether the chip is busy: that harms a job.
fn sriov_on(world: &World, data: &Data, phy: u32) -> Answer {
    let chip = data.chip(phy).ok_or(code::DEVICE_NOT_EXIST)?;
    if chip.sriov {
        return Ok(());
    }
    let busy = !chip.processes.is_empty();
    if busy {
        world.edit_chip(phy, |chip| chip.disturbed += 1).map_err(broken)?;
        if data.slicing.busy_code == code::INVALID_PARAMETER {
            return Err(code::INVALID_PARAMETER);
        }
    }
    wait(data.slicing.first_ms);
    world.edit_chip(phy, |chip| chip.sriov = true).map_err(broken)
}

fn sriov_off_if_empty(world: &World, phy: u32) -> Answer {
    if of_chip(world, phy).map_err(broken)?.is_empty() {
        world.edit_chip(phy, |chip| chip.sriov = false).map_err(broken)?;
    }
    Ok(())
}

/// The kernel's part, in its order of checks.
fn kernel_create(world: &World, wish: &Wish<'_>) -> Answer<Vnpu> {
    let lock = world.lock().map_err(broken)?;
    let data = world.data().map_err(broken)?;
    let (card, chip, set) = templates(&data, wish.phy)?;
    let template = set.find(wish.template).ok_or(code::INVALID_PARAMETER)?;
    if data.vdevice_mode == 1 {
        return Err(code::OPER_NOT_PERMITTED);
    }
    let vnpus = of_chip(world, wish.phy).map_err(broken)?;
    if vnpus.len() >= template::limit(card.family) || !fits(&data, set, chip, &vnpus, template) {
        return Err(code::INVALID_PARAMETER);
    }
    if vnpus.is_empty() && !chip.processes.is_empty() {
        return Err(data.slicing.busy_code);
    }
    if chip.state != ChipState::Up {
        return Err(code::INVALID_PARAMETER);
    }
    let wanted = wish.id.filter(|_| !data.slicing.ignore_ids);
    let id = choose_id(chip.phy, &vnpus, wanted)?;
    let vfg = choose_group(set, &vnpus, template, wish.vfg)?;
    let memory_mb = data.slicing.real_memory_mb.unwrap_or_else(|| template::memory_mb(template, chip));
    let vnpu = Vnpu {
        id,
        phy: chip.phy,
        vfid: id - template::ids(chip.phy).start + 1,
        vfg,
        template: template.name.to_owned(),
        name: data.slicing.real_name.clone().unwrap_or_else(|| template.name.to_owned()),
        aicores: template.aicores,
        aicpus: template.aicpus,
        memory_mb,
        container: 0,
        in_use: false,
        maker: wish.maker,
    };
    store(world, &vnpu).map_err(broken)?;
    make_node(world, &data, &format!("vdavinci{id}")).map_err(broken)?;
    drop(lock);
    Ok(vnpu)
}

/// AI cores are the kernel's check, the rest the firmware's; both look the same from outside. A world that lies about
/// memory is not held to it.
fn fits(data: &Data, set: TemplateSet, chip: &Chip, vnpus: &[Vnpu], template: Template) -> bool {
    let free = budget(set, chip, vnpus).free;
    template.aicores <= free.aicores
        && template.aicpus <= free.aicpus
        && template.media.within(free.media)
        && (data.slicing.real_memory_mb.is_some() || template::memory_mb(template, chip) <= free.memory_mb)
}

fn choose_id(phy: u32, vnpus: &[Vnpu], wanted: Option<u32>) -> Answer<u32> {
    let mut range = template::ids(phy);
    let taken = |id: u32| vnpus.iter().any(|vnpu| vnpu.id == id);
    match wanted {
        Some(id) if !range.contains(&id) || taken(id) => Err(code::INVALID_PARAMETER),
        Some(id) => Ok(id),
        None => range.find(|id| !taken(*id)).ok_or(code::INVALID_PARAMETER),
    }
}

/// vGroups have two AI cores each; a one-core slice may share one.
fn choose_group(set: TemplateSet, vnpus: &[Vnpu], template: Template, wanted: Option<u32>) -> Answer<u32> {
    if set != TemplateSet::P310 {
        return Ok(0);
    }
    let used = |group: u32| vnpus.iter().filter(|vnpu| vnpu.vfg == group).map(|vnpu| vnpu.aicores).sum::<u32>();
    match wanted {
        Some(group @ 0..4) => Ok(group),
        Some(_) => Err(code::INVALID_PARAMETER),
        None => Ok((0..4).find(|group| used(*group) + template.aicores.min(2) <= 2).unwrap_or(3)),
    }
}

/// Enters a vNPU into the list for the next boot, if recover mode is on.
fn remember(world: &World, vnpu: &Vnpu) -> Answer {
    let data = world.data().map_err(broken)?;
    let (card, device) = seat(&data, vnpu.phy);
    BootList::change(world, &data, |list| {
        if list.recover {
            list.add(vnpu, card, device);
        }
        list.recover
    })
}

/// Card and device number as the node counts them now, for the command in the list.
fn seat(data: &Data, phy: u32) -> (i32, usize) {
    for (number, card) in (0..).zip(&data.cards) {
        if let Some(device) = card.chips.iter().position(|chip| chip.phy == phy) {
            return (card.id.unwrap_or(number), device);
        }
    }
    (-1, 0)
}

/// Destroys one vNPU as the library does. It can end with an error although the vNPU is gone, and bring it back under
/// another id.
pub(crate) fn destroy(world: &World, phy: u32, id: u32, midway: Midway<'_>) -> Answer {
    let data = world.data().map_err(broken)?;
    if !template::ids(phy).contains(&id) {
        return Err(code::INVALID_PARAMETER);
    }
    let lock = world.lock().map_err(broken)?;
    let vnpu = find(world, id).map_err(broken)?.ok_or(code::DEVICE_NOT_EXIST)?;
    if vnpu.in_use {
        return Err(code::INVALID_PARAMETER);
    }
    forget(world, id).map_err(broken)?;
    drop(lock);
    midway()?;
    let updated = BootList::change(world, &data, |list| list.remove(id));
    if let Err(code) = updated {
        restore(world, &vnpu)?;
        return Err(code);
    }
    let left = of_chip(world, phy).map_err(broken)?;
    if left.is_empty() && data.card_of(phy).is_some_and(|card| has_sriov(card.family)) {
        if let Some(code) = data.slicing.sriov_off_code {
            return Err(code);
        }
        sriov_off_if_empty(world, phy)?;
    }
    Ok(())
}

/// Makes a destroyed vNPU again, under the next free id after its own.
fn restore(world: &World, old: &Vnpu) -> Answer {
    let lock = world.lock().map_err(broken)?;
    let data = world.data().map_err(broken)?;
    let range = template::ids(old.phy);
    let vnpus = of_chip(world, old.phy).map_err(broken)?;
    let free = |id: &u32| *id != old.id && !vnpus.iter().any(|vnpu| vnpu.id == *id);
    let id = range.clone().find(|id| *id > old.id && free(id)).or_else(|| range.clone().find(free)).unwrap_or(old.id);
    let vnpu = Vnpu { id, vfid: id - range.start + 1, ..old.clone() };
    store(world, &vnpu).map_err(broken)?;
    make_node(world, &data, &format!("vdavinci{id}")).map_err(broken)?;
    drop(lock);
    Ok(())
}

/// Destroys a vNPU whatever its state, as a test may.
pub(crate) fn remove(world: &World, id: u32) -> Result<(), WorldError> {
    let lock = world.lock()?;
    let vnpu = find(world, id)?.ok_or(WorldError::NoVnpu(id))?;
    forget(world, id)?;
    drop(lock);
    let data = world.data()?;
    BootList::change(world, &data, |list| list.remove(id)).map_err(WorldError::Refused)?;
    sriov_off_if_empty(world, vnpu.phy).map_err(WorldError::Refused)
}

/// What the boot script does with the list.
pub(crate) fn replay(world: &World) -> Result<Vec<u32>, WorldError> {
    let data = world.data()?;
    let list = BootList::load(world, &data).map_err(WorldError::Refused)?;
    let mut made = Vec::new();
    for entry in list.entries.iter().filter(|_| list.recover) {
        let wish = Wish { phy: entry.phy, template: &entry.template, id: Some(entry.id), vfg: entry.vfg, maker: 0 };
        if find(world, entry.id)?.is_none()
            && let Ok(vnpu) = create(world, &wish, &|| Ok(()))
        {
            made.push(vnpu.id);
        }
    }
    Ok(made)
}

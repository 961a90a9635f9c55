//! The `ResourceSlices` that the node should have, as plain data.

use std::collections::BTreeMap;

use super::{
    health::{Action, Health, Level, Link},
    inventory::Inventory,
    model::{Kept, Model},
    names::{DriverName, PoolName, attribute_text, label_from},
    node::{Hold, HoldKind},
    npu::{Family, Npu, StableId},
    plan::HealthMap,
    quantity::Quantity,
    vnpu::{NotSliceable, Resources, Sliceable, Template},
};

mod guard;

/// Name of the capacity that claims ask for.
pub const MEMORY: &str = "memCapacity";
/// Most counter sets in one slice (`resource.k8s.io/v1` from 1.35 on).
const COUNTER_SETS_PER_SLICE: usize = 8;

/// Most devices that we put into one slice: the API's limit where any device has taints or counters.
pub const DEVICES_PER_SLICE: usize = 64;

/// Value of an attribute.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Attribute {
    /// A string of at most 64 bytes.
    Text(String),
    /// A whole number.
    Int(i64),
    /// A truth value.
    Bool(bool),
}

/// Effect of a taint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Effect {
    /// No new claim.
    NoSchedule,
    /// No new claim, and pods that hold it are evicted.
    NoExecute,
}

impl Effect {
    /// The effect as Kubernetes writes it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NoSchedule => "NoSchedule",
            Self::NoExecute => "NoExecute",
        }
    }
}

/// A taint of a device.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Taint {
    /// Key, a qualified name.
    pub key: String,
    /// Value.
    pub value: String,
    /// Effect.
    pub effect: Effect,
}

/// How a request is rounded to what a shared device gives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Policy {
    /// One of these values, ascending, at most ten; a request without a value gets the default.
    Values {
        /// What can be given.
        valid: Vec<Quantity>,
        /// What is given without a request.
        default: Quantity,
    },
    /// Any value from the minimum, which is also the default.
    From(Quantity),
}

/// A capacity of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capacity {
    /// All that there is.
    pub value: Quantity,
    /// How requests are rounded; only on a shared device.
    pub policy: Option<Policy>,
}

impl Capacity {
    /// A capacity that is not shared out.
    pub fn plain(value: Quantity) -> Self {
        Self { value, policy: None }
    }
}

/// Counters by name: what a set has, or what a device takes from it.
pub type Counters = BTreeMap<String, Quantity>;

/// A device as it should be published.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Device {
    /// Name.
    pub name: String,
    /// Attributes by name; ours without domain.
    pub attributes: BTreeMap<String, Attribute>,
    /// Capacities by name.
    pub capacity: BTreeMap<String, Capacity>,
    /// True if several claims may have a share (`allowMultipleAllocations`).
    pub shared: bool,
    /// Name of a counter set, and what the device takes from it.
    pub consumes: Option<(String, Counters)>,
    /// Taints.
    pub taints: Vec<Taint>,
}

/// One slice as it should be published.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Slice {
    /// Position in the pool, from 0: part of the object's name, so that the server sorts slices as we do.
    pub index: usize,
    /// Counter sets by name.
    pub counters: BTreeMap<String, Counters>,
    /// Devices in order of preference.
    pub devices: Vec<Device>,
}

/// All slices of the pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pool {
    /// Driver.
    pub driver: DriverName,
    /// Pool.
    pub name: PoolName,
    /// Its slices; one without devices says "driver is up, has nothing".
    pub slices: Vec<Slice>,
}

/// How the node's cards are offered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    /// The slicing model.
    pub model: Model,
    /// False until it is known what the API server keeps: until then the model is [`Model::Off`], or the one that the
    /// node remembers.
    pub chosen: bool,
    /// Templates by card name, for the static model.
    pub layout: BTreeMap<String, Vec<String>>,
    /// What the API server keeps.
    pub kept: Kept,
    /// Cards that take no new claims, with the reason: foreign vNPUs or processes.
    pub closed: BTreeMap<StableId, String>,
    /// Cards that an operator keeps claims from.
    pub holds: BTreeMap<StableId, Hold>,
    /// Another driver of the same cards on this node, which closes all of them.
    pub rival: Option<String>,
    /// An operator's reason to close all of them.
    pub suspended: Option<String>,
    /// Why it is this model and no better one; empty if it is the best.
    pub why: String,
}

impl Offer {
    /// Why a card takes no new claims.
    pub fn closed(&self, npu: &Npu) -> Option<String> {
        let told = self.suspended.as_ref().or(self.rival.as_ref()).or_else(|| self.closed.get(&npu.stable_id));
        told.cloned().or_else(|| self.misfit(npu))
    }

    /// Why a card cannot be cut as the layout says; `None` if it can be, or is not in it.
    fn misfit(&self, npu: &Npu) -> Option<String> {
        let names = self.layout.get(npu.name.as_str()).filter(|_| self.model == Model::Static)?;
        match sliceable(npu) {
            Ok(sliceable) => sliceable.check(names).err().map(|why| format!("slicing.layout {why}")),
            Err(why) => Some(format!("slicing.layout cuts it, but {why}")),
        }
    }

    /// What of the layout cannot be had, by card name: cards that it does not fit, and names that no card has.
    pub fn misfits(&self, inventory: &Inventory) -> BTreeMap<String, String> {
        let absent = |card: &String| match inventory.by_name(card) {
            Some(npu) => self.misfit(npu),
            None => Some("slicing.layout names it, but no such card is there".to_owned()),
        };
        let cards = self.layout.keys().filter(|_| self.model == Model::Static);
        cards.filter_map(|card| Some((card.clone(), absent(card)?))).collect()
    }
}

impl Default for Offer {
    /// Whole cards, all open.
    fn default() -> Self {
        Self {
            model: Model::Off,
            chosen: true,
            layout: BTreeMap::new(),
            kept: Kept::default(),
            closed: BTreeMap::new(),
            holds: BTreeMap::new(),
            rival: None,
            suspended: None,
            why: String::new(),
        }
    }
}

/// One part of a card, as published by the partitionable and the static model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Name, `npu-0-vir05-1c-8g-0`.
    pub name: String,
    /// Its template.
    pub template: Template,
}

/// The slots of a card, small to large: as many of each template as fit an empty card, or those of a layout that fits it.
///
/// A slot is no place on the card: any slot of a template is as good as another.
pub fn parts(offer: &Offer, npu: &Npu) -> Vec<Part> {
    if offer.misfit(npu).is_some() { Vec::new() } else { parts_of(offer, offer.model, npu) }
}

/// The slots that any model could have published, so that an allocation of an earlier one is understood.
pub fn all_parts(offer: &Offer, npu: &Npu) -> Vec<Part> {
    let mut parts = parts_of(offer, Model::Partitionable, npu);
    parts.extend(
        parts_of(offer, Model::Static, npu).into_iter().filter(|part| !parts.contains(part)).collect::<Vec<_>>(),
    );
    parts
}

/// True for the name of a placeholder.
pub fn is_placeholder(device: &str) -> bool {
    device.strip_prefix(guard::PREFIX).is_some_and(|rest| rest.starts_with('-'))
}

fn parts_of(offer: &Offer, model: Model, npu: &Npu) -> Vec<Part> {
    let Ok(sliceable) = sliceable(npu) else { return Vec::new() };
    let number = |template: &Template| match model {
        Model::Partitionable => sliceable.empty().fitting(template),
        Model::Static => {
            let layout = offer.layout.get(npu.name.as_str());
            layout.map_or(0, |names| names.iter().filter(|name| *name == template.name).count())
        }
        Model::Consumable | Model::Off => 0,
    };
    let mut parts = Vec::new();
    for template in &sliceable.templates {
        for slot in 0..number(template) {
            let name = format!("{}-{}-{slot}", npu.name, label_from(template.name));
            parts.push(Part { name, template: template.clone() });
        }
    }
    parts
}

/// What a card can be cut into. A card of two dies is not cut.
pub fn sliceable(npu: &Npu) -> Result<Sliceable, NotSliceable> {
    match &npu.dies[..] {
        [die] => Sliceable::of(die),
        dies => Err(NotSliceable::Family { chip: dies.first().map(|die| die.chip_name.clone()).unwrap_or_default() }),
    }
}

/// The wanted pool.
pub fn wanted(driver: &DriverName, pool: &PoolName, inventory: &Inventory, health: &HealthMap, offer: &Offer) -> Pool {
    let writer = Writer { driver, inventory, health, offer };
    let mut slices = match offer.model {
        Model::Off => chunked(writer.cards(&Writer::whole), DEVICES_PER_SLICE),
        Model::Consumable => guard::guarded(writer.cards(&Writer::shared), offer.kept, &writer.blank()),
        Model::Static => chunked(writer.cards(&Writer::laid_out), DEVICES_PER_SLICE),
        Model::Partitionable => writer.partitioned(),
    };
    if slices.is_empty() {
        slices.push(Slice::default());
    }
    for (index, slice) in slices.iter_mut().enumerate() {
        slice.index = index;
    }
    Pool { driver: driver.clone(), name: pool.clone(), slices }
}

/// The pool for an API server that drops taints: a tainted device would be offered like a sound one, so it is withdrawn
/// while no claim holds (a part of) its card.
pub fn without_idle_tainted(mut pool: Pool, held: impl Fn(&str) -> bool) -> Pool {
    let card = |device: &Device| match device.attributes.get("parent") {
        Some(Attribute::Text(parent)) if !parent.is_empty() => parent.clone(),
        _ => device.name.clone(),
    };
    for slice in &mut pool.slices {
        slice.devices.retain(|device| device.taints.is_empty() || held(&card(device)));
    }
    pool
}

/// Devices in slices of at most `most`.
fn chunked(devices: Vec<Device>, most: usize) -> Vec<Slice> {
    let mut slices: Vec<Slice> = Vec::new();
    for device in devices {
        match slices.last_mut() {
            Some(slice) if slice.devices.len() < most => slice.devices.push(device),
            _ => slices.push(Slice { devices: vec![device], ..Slice::default() }),
        }
    }
    slices
}

/// Turns cards into devices.
struct Writer<'a> {
    driver: &'a DriverName,
    inventory: &'a Inventory,
    health: &'a HealthMap,
    offer: &'a Offer,
}

impl Writer<'_> {
    fn cards(&self, form: &dyn Fn(&Self, &Npu) -> Vec<Device>) -> Vec<Device> {
        self.inventory.npus().iter().flat_map(|npu| form(self, npu)).collect()
    }

    /// A card as one exclusive device.
    fn whole(&self, npu: &Npu) -> Vec<Device> {
        let mut device = whole_card(npu, &self.inventory.driver_version, self.link(npu));
        device.taints = self.taints(npu);
        vec![device]
    }

    /// A card as one device that is shared out by memory; whole, if it cannot be cut.
    fn shared(&self, npu: &Npu) -> Vec<Device> {
        let mut devices = self.whole(npu);
        if let (Ok(sliceable), Some(device)) = (sliceable(npu), devices.first_mut()) {
            let whole = Quantity::bytes(sliceable.whole.memory);
            let mut valid: Vec<_> =
                sliceable.exact().iter().map(|template| Quantity::bytes(template.takes.memory)).collect();
            valid.push(whole);
            let policy = Some(Policy::Values { valid, default: whole });
            device.shared = true;
            device.capacity.insert(MEMORY.to_owned(), Capacity { value: whole, policy });
        }
        devices
    }

    /// The parts of a card's layout, or the whole card if it has none. One that its layout does not fit is shown whole and
    /// closed.
    fn laid_out(&self, npu: &Npu) -> Vec<Device> {
        let parts = parts(self.offer, npu);
        if parts.is_empty() { self.whole(npu) } else { parts.iter().map(|part| self.part(npu, part)).collect() }
    }

    fn part(&self, npu: &Npu, part: &Part) -> Device {
        let mut device = whole_card(npu, &self.inventory.driver_version, self.link(npu));
        let takes = part.template.takes;
        device.name.clone_from(&part.name);
        let text = |value: &str| Attribute::Text(attribute_text(value));
        device.attributes.extend([
            ("type".to_owned(), text("vnpu")),
            ("template".to_owned(), text(part.template.name)),
            ("parent".to_owned(), text(npu.name.as_str())),
            ("aiCores".to_owned(), Attribute::Int(i64::from(takes.ai_cores))),
        ]);
        device.capacity.insert(MEMORY.to_owned(), Capacity::plain(Quantity::bytes(takes.memory)));
        device.taints = self.taints(npu);
        device
    }

    /// Whole cards first, then parts from small to large, all tied by the counters of their card.
    fn partitioned(&self) -> Vec<Slice> {
        let cards: Vec<_> = self.inventory.npus().iter().map(|npu| self.tied(npu)).collect();
        if self.offer.kept.is_1_34 {
            return combined(cards);
        }
        let mut slices: Vec<Slice> = Vec::new();
        let (mut whole, mut split) = (Vec::new(), Vec::new());
        for (set, mut devices) in cards {
            if let Some((name, counters)) = set {
                match slices.last_mut() {
                    Some(slice) if slice.counters.len() < COUNTER_SETS_PER_SLICE => {
                        drop(slice.counters.insert(name, counters));
                    }
                    _ => slices.push(Slice { counters: BTreeMap::from([(name, counters)]), ..Slice::default() }),
                }
            }
            split.extend(devices.split_off(1));
            whole.extend(devices);
        }
        // A stable sort: parts of one size stay in the order of their cards.
        split.sort_by_key(|device| device.capacity.get(MEMORY).map(|memory| memory.value));
        whole.extend(split);
        slices.extend(chunked(whole, DEVICES_PER_SLICE));
        slices
    }

    /// A card's counter set, if it can be cut, and its devices, the whole card first.
    fn tied(&self, npu: &Npu) -> TiedCard {
        let mut devices = self.whole(npu);
        let Ok(sliceable) = sliceable(npu) else { return (None, devices) };
        let set = npu.name.to_string();
        let counters = |takes: Resources| {
            Counters::from([
                ("ai-cores".to_owned(), Quantity::count(u64::from(takes.ai_cores))),
                ("ai-cpus".to_owned(), Quantity::count(u64::from(takes.ai_cpus))),
                ("media".to_owned(), Quantity::count(u64::from(takes.media))),
                ("memory".to_owned(), Quantity::bytes(takes.memory)),
            ])
        };
        for device in &mut devices {
            device.consumes = Some((set.clone(), counters(sliceable.whole)));
        }
        for part in parts(self.offer, npu) {
            let mut device = self.part(npu, &part);
            device.consumes = Some((set.clone(), counters(part.template.takes)));
            devices.push(device);
        }
        (Some((set, counters(sliceable.whole))), devices)
    }

    fn link(&self, npu: &Npu) -> Option<Link> {
        self.health.get(&npu.stable_id)?.link
    }

    /// Taints of a card: its health, and why it takes no new claims.
    fn taints(&self, npu: &Npu) -> Vec<Taint> {
        let health = self.health.get(&npu.stable_id);
        let mut taints: Vec<_> = health.and_then(|health| health_taint(self.driver, health)).into_iter().collect();
        if let Some(why) = self.offer.closed(npu) {
            taints.push(closed_taint(self.driver, &why));
        }
        taints.extend(self.offer.holds.get(&npu.stable_id).map(|hold| hold_taint(self.driver, hold)));
        taints
    }

    /// A device with our attribute names and no card behind it.
    fn blank(&self) -> Device {
        let text = || Attribute::Text(String::new());
        let int = || Attribute::Int(-1);
        let attributes = BTreeMap::from([
            ("chipName".to_owned(), text()),
            ("numaNode".to_owned(), int()),
            ("physicalId".to_owned(), int()),
            ("busId".to_owned(), text()),
            ("uuid".to_owned(), text()),
            ("aiCores".to_owned(), int()),
            ("driverVersion".to_owned(), Attribute::Text(attribute_text(&self.inventory.driver_version))),
            ("type".to_owned(), text()),
            ("template".to_owned(), text()),
            ("parent".to_owned(), text()),
            ("link".to_owned(), text()),
            ("dies".to_owned(), Attribute::Int(0)),
        ]);
        Device { attributes, ..Device::default() }
    }
}

/// A card's counter set, if it can be cut, and its devices, the whole card first.
type TiedCard = (Option<(String, Counters)>, Vec<Device>);

/// 1.34: the counters of a card stand in the slice of its devices, at most 32 counters and 64 devices a slice.
fn combined(cards: Vec<TiedCard>) -> Vec<Slice> {
    const COUNTERS_PER_SLICE: usize = 32;
    let mut groups: Vec<(usize, Slice, Vec<Device>)> = Vec::new();
    for (set, mut devices) in cards {
        let counters = set.as_ref().map_or(0, |(_, counters)| counters.len());
        let fits = groups.last().is_some_and(|(used, slice, parts)| {
            used + counters <= COUNTERS_PER_SLICE
                && slice.devices.len() + parts.len() + devices.len() <= DEVICES_PER_SLICE
        });
        if !fits {
            groups.push((0, Slice::default(), Vec::new()));
        }
        if let Some((used, slice, parts)) = groups.last_mut() {
            *used += counters;
            slice.counters.extend(set);
            parts.extend(devices.split_off(1));
            slice.devices.extend(devices);
        }
    }
    groups
        .into_iter()
        .map(|(_, mut slice, mut parts)| {
            parts.sort_by_key(|device| device.capacity.get(MEMORY).map(|memory| memory.value));
            slice.devices.extend(parts);
            slice
        })
        .collect()
}

/// The taint of a card whose health keeps claims away.
///
/// Its value is as coarse as it is so that a fault which comes and goes, or brings others, is no change of the slice.
pub fn health_taint(driver: &DriverName, health: &Health) -> Option<Taint> {
    if health.condition.is_usable() {
        return None;
    }
    let value = match health.level() {
        level @ (Level::Major | Level::Critical | Level::Gone) => level.as_str(),
        Level::Ok | Level::Unknown | Level::Minor => "fault",
    };
    let effect = if health.action() == Action::Evict { Effect::NoExecute } else { Effect::NoSchedule };
    Some(Taint { key: format!("{driver}/unhealthy"), value: value.to_owned(), effect })
}

/// The taint of a card that takes no new claims.
pub fn closed_taint(driver: &DriverName, why: &str) -> Taint {
    Taint { key: format!("{driver}/closed"), value: label_from(why), effect: Effect::NoSchedule }
}

/// The taint of a card that an operator keeps claims from.
pub fn hold_taint(driver: &DriverName, hold: &Hold) -> Taint {
    let effect = match hold.kind {
        HoldKind::Cordon => Effect::NoSchedule,
        HoldKind::Drain => Effect::NoExecute,
    };
    Taint { key: format!("{driver}/{}", hold.kind.as_str()), value: label_from(&hold.reason), effect }
}

/// A whole card. Every device of ours has the same own attribute names: a missing one would be a CEL error that stops
/// a pod's scheduling.
fn whole_card(npu: &Npu, driver_version: &str, link: Option<Link>) -> Device {
    let first = npu.first();
    let text = |value: &str| Attribute::Text(attribute_text(value));
    let number = |value: Option<u32>| Attribute::Int(value.map_or(-1, i64::from));
    let dies = i64::try_from(npu.dies.len()).unwrap_or(i64::MAX);
    let kind = if first.family == Family::Example { "gpu" } else { "npu" };
    let mut attributes = BTreeMap::from([
        ("chipName".to_owned(), text(&first.chip_name)),
        ("numaNode".to_owned(), number(first.numa_node)),
        ("physicalId".to_owned(), Attribute::Int(i64::from(first.physical_id))),
        ("topologyGroup".to_owned(), text(&npu.topology_group)),
        ("busId".to_owned(), text(&first.bus_id.to_string())),
        ("uuid".to_owned(), text(npu.stable_id.as_str())),
        ("aiCores".to_owned(), number(npu.ai_cores())),
        ("driverVersion".to_owned(), text(driver_version)),
        ("type".to_owned(), text(kind)),
        ("template".to_owned(), text("")),
        ("parent".to_owned(), text("")),
        ("link".to_owned(), text(link.map_or("", Link::as_str))),
        ("dies".to_owned(), Attribute::Int(dies)),
    ]);
    if first.family != Family::Example {
        attributes.insert("resource.kubernetes.io/pciBusID".to_owned(), text(&first.bus_id.to_string()));
        if let Some(root) = &first.pcie_root {
            attributes.insert("resource.kubernetes.io/pcieRoot".to_owned(), text(root));
        }
        if let Some(node) = first.numa_node {
            attributes.insert("resource.kubernetes.io/numaNode".to_owned(), Attribute::Int(i64::from(node)));
        }
    }
    let memory = Capacity::plain(Quantity::bytes(npu.memory().unwrap_or(0)));
    let capacity = BTreeMap::from([(MEMORY.to_owned(), memory)]);
    Device { name: npu.name.to_string(), attributes, capacity, ..Device::default() }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::domain::{
        health::{self, HealthReading, Report},
        inventory::tests::{inventory_of, scan_of},
        names::{NodeName, is_qualified_name},
        node::NodeMemory,
    };

    fn pool(inventory: &Inventory, health: &HealthMap) -> Pool {
        let name = PoolName::of_node(&NodeName::new("master").unwrap()).unwrap();
        wanted(&DriverName::new("npu.huawei.com").unwrap(), &name, inventory, health, &Offer::default())
    }

    fn sick(level: Level) -> Health {
        let report = Report::Read(HealthReading::of(level));
        Health::step(None, &report, &health::Policy::default(), jiff::Timestamp::UNIX_EPOCH)
    }

    #[test]
    fn the_card_of_the_requirements_is_published_as_they_show_it() {
        let pool = pool(&inventory_of(1), &HealthMap::new());
        let device = &pool.slices[0].devices[0];
        assert_eq!((pool.name.as_str(), device.name.as_str()), ("master/npu", "npu-0"));
        assert_eq!(device.attributes["chipName"], Attribute::Text("910B4".to_owned()));
        assert_eq!(device.attributes["numaNode"], Attribute::Int(6));
        assert_eq!(device.attributes["physicalId"], Attribute::Int(0));
        assert_eq!(device.attributes["topologyGroup"], Attribute::Text("ring-0".to_owned()));
        assert_eq!(device.attributes["resource.kubernetes.io/pciBusID"], Attribute::Text("0000:10:00.0".to_owned()));
        assert_eq!(device.capacity["memCapacity"].value.to_string(), "32Gi");
        assert!(device.taints.is_empty());
    }

    #[test]
    fn every_device_has_the_same_own_attributes_within_the_limits_whatever_the_hardware_says() {
        let mut scan = scan_of(3);
        scan.driver_version = "v".repeat(200);
        scan.chips[1].chip_name = format!("{}é\u{0}", "n".repeat(63));
        scan.chips[1].numa_node = None;
        scan.chips[1].memory = None;
        scan.chips[1].ai_cores = None;
        scan.chips[1].pcie_root = None;
        scan.chips[2].chip_name = String::new();
        let inventory = Inventory::from_scan(&scan, &mut NodeMemory::default()).unwrap();
        let pool = pool(&inventory, &HealthMap::new());
        let own =
            |device: &Device| device.attributes.keys().filter(|name| !name.contains('/')).cloned().collect::<Vec<_>>();
        let devices = &pool.slices[0].devices;
        for device in devices {
            assert_eq!(own(device), own(&devices[0]));
            assert!(device.attributes.len() + device.capacity.len() <= 32);
            assert!(device.attributes.keys().all(|name| is_qualified_name(name)));
            assert!(!device.attributes.values().any(|value| matches!(value, Attribute::Text(text) if text.len() > 64)));
        }
        assert_eq!(devices[1].attributes["numaNode"], Attribute::Int(-1));
        assert_eq!(devices[1].capacity["memCapacity"].value.to_string(), "0");
    }

    #[test]
    fn a_sick_card_is_tainted_and_an_unknown_one_is_not() {
        let inventory = inventory_of(2);
        let at = sick;
        let ids: Vec<_> = inventory.npus().iter().map(|npu| npu.stable_id.clone()).collect();
        let health = HealthMap::from([(ids[0].clone(), at(Level::Critical)), (ids[1].clone(), at(Level::Unknown))]);
        let pool = pool(&inventory, &health);
        let taint = Taint {
            key: "npu.huawei.com/unhealthy".to_owned(),
            value: "critical".to_owned(),
            effect: Effect::NoSchedule,
        };
        assert_eq!(pool.slices[0].devices[0].taints, [taint]);
        assert!(pool.slices[0].devices[1].taints.is_empty());
    }

    #[test]
    fn without_taints_an_idle_sick_card_is_withdrawn_and_a_held_one_stays() {
        let inventory = inventory_of(3);
        let health =
            inventory.npus().iter().take(2).map(|npu| (npu.stable_id.clone(), sick(Level::Critical))).collect();
        let pool = pool(&inventory, &health);
        let names = |pool: &Pool| pool.slices[0].devices.iter().map(|d| d.name.clone()).collect::<Vec<_>>();
        assert_eq!(names(&pool), ["npu-0", "npu-1", "npu-2"]);
        assert_eq!(names(&without_idle_tainted(pool, |name| name == "npu-1")), ["npu-1", "npu-2"]);
    }

    fn offered(inventory: &Inventory, offer: &Offer) -> Pool {
        let name = PoolName::of_node(&NodeName::new("master").unwrap()).unwrap();
        wanted(&DriverName::new("npu.huawei.com").unwrap(), &name, inventory, &HealthMap::new(), offer)
    }

    fn kept(is_1_34: bool, partitionable: bool) -> Kept {
        Kept { consumable: Some(true), partitionable: Some(partitionable), is_1_34 }
    }

    fn names(slice: &Slice) -> Vec<&str> {
        slice.devices.iter().map(|device| device.name.as_str()).collect()
    }

    #[test]
    fn a_consumable_card_gives_its_template_sizes_and_the_whole_by_default() {
        let offer = Offer { model: Model::Consumable, kept: kept(false, true), ..Offer::default() };
        let pool = offered(&inventory_of(2), &offer);
        assert_eq!(names(&pool.slices[0]), ["npu-0", "npu-1"]);
        let device = &pool.slices[0].devices[0];
        let memory = &device.capacity[MEMORY];
        let Some(Policy::Values { valid, default }) = &memory.policy else { panic!("{memory:?}") };
        let valid: Vec<_> = valid.iter().map(ToString::to_string).collect();
        assert_eq!(
            (valid, default.to_string(), memory.value.to_string()),
            (vec!["8Gi".into(), "16Gi".into(), "32Gi".into()], "32Gi".into(), "32Gi".into())
        );
        assert!(device.shared && device.consumes.is_none());
        assert_eq!(device.capacity.len(), 1, "an unnamed capacity would cost its whole value");
    }

    #[test]
    fn on_1_34_every_consumable_slice_begins_with_guarded_placeholders() {
        let offer = Offer { model: Model::Consumable, kept: kept(true, true), ..Offer::default() };
        let pool = offered(&inventory_of(40), &offer);
        assert_eq!(pool.slices.iter().map(|slice| slice.devices.len()).collect::<Vec<_>>(), [64, 40]);
        for slice in &pool.slices {
            let (guards, cards) = slice.devices.split_at(32);
            assert!(cards.iter().all(|card| card.shared && card.consumes.is_none()));
            for guard in guards {
                assert_eq!(guard.attributes["type"], Attribute::Text("placeholder".to_owned()));
                assert_eq!(guard.capacity[MEMORY].value.to_string(), "1Pi");
                let (set, takes) = guard.consumes.as_ref().unwrap();
                let has = &slice.counters[set];
                assert!(takes.iter().all(|(name, takes)| has[name] < *takes), "nothing is left of the counter");
            }
        }
        let all: BTreeSet<_> = pool.slices.iter().flat_map(names).collect();
        assert_eq!(all.len(), 104, "names are unique in the pool");
        let own = |device: &Device| {
            device
                .attributes
                .keys()
                .filter(|name| !name.contains('/') && *name != "topologyGroup")
                .cloned()
                .collect::<Vec<_>>()
        };
        assert_eq!(own(&pool.slices[0].devices[0]), own(&pool.slices[0].devices[32]));
    }

    #[test]
    fn without_counters_the_placeholders_stand_unguarded_and_no_counter_is_sent() {
        let offer = Offer { model: Model::Consumable, kept: kept(true, false), ..Offer::default() };
        let pool = offered(&inventory_of(2), &offer);
        assert_eq!(pool.slices[0].devices.len(), 34);
        assert!(pool.slices[0].counters.is_empty());
        assert!(pool.slices[0].devices.iter().all(|device| device.consumes.is_none()));
    }

    #[test]
    fn partitions_are_whole_cards_first_and_then_parts_from_small_to_large() {
        let offer = Offer { model: Model::Partitionable, kept: kept(false, true), ..Offer::default() };
        let pool = offered(&inventory_of(2), &offer);
        assert_eq!(pool.slices.len(), 2, "counters stand apart from devices");
        assert!(pool.slices[0].devices.is_empty() && pool.slices[1].counters.is_empty());
        assert_eq!(pool.slices[0].counters.keys().collect::<Vec<_>>(), ["npu-0", "npu-1"]);
        let all = names(&pool.slices[1]);
        assert_eq!(all[..4], ["npu-0", "npu-1", "npu-0-vir05-1c-8g-0", "npu-0-vir05-1c-8g-1"]);
        assert_eq!(all.len(), 2 * (1 + 4 + 2 + 2 + 1));
        let part = pool.slices[1].devices.iter().find(|device| device.name == "npu-1-vir10-3c-16g-1").unwrap();
        assert_eq!(part.attributes["template"], Attribute::Text("vir10_3c_16g".to_owned()));
        assert_eq!(part.attributes["parent"], Attribute::Text("npu-1".to_owned()));
        assert_eq!(part.capacity[MEMORY].value.to_string(), "16Gi");
        let (set, takes) = part.consumes.as_ref().unwrap();
        assert_eq!(
            (set.as_str(), takes["ai-cores"].to_string(), takes["ai-cpus"].to_string(), takes["media"].to_string()),
            ("npu-1", "10".into(), "3".into(), "12".into())
        );
        let all = pool.slices[1].devices.iter().find(|device| device.name == "npu-1-vir10-4c-16g-m-0").unwrap();
        assert_eq!(all.consumes.as_ref().unwrap().1["media"], pool.slices[0].counters["npu-1"]["media"]);
    }

    #[test]
    fn on_1_34_counters_and_their_devices_share_a_slice_within_its_limits() {
        let offer = Offer { model: Model::Partitionable, kept: kept(true, true), ..Offer::default() };
        let pool = offered(&inventory_of(16), &offer);
        for slice in &pool.slices {
            assert!(slice.devices.len() <= 64);
            assert!(slice.counters.values().map(BTreeMap::len).sum::<usize>() <= 32);
            for device in &slice.devices {
                assert!(slice.counters.contains_key(&device.consumes.as_ref().unwrap().0));
            }
        }
        assert_eq!(pool.slices.iter().map(|slice| slice.devices.len()).sum::<usize>(), 160);
    }

    #[test]
    fn a_static_layout_is_published_as_plain_devices() {
        let layout = BTreeMap::from([(
            "npu-0".to_owned(),
            vec!["vir10_3c_16g".to_owned(), "vir05_1c_8g".to_owned(), "vir05_1c_8g".to_owned()],
        )]);
        let offer = Offer { model: Model::Static, layout, ..Offer::default() };
        let pool = offered(&inventory_of(2), &offer);
        assert_eq!(
            names(&pool.slices[0]),
            ["npu-0-vir05-1c-8g-0", "npu-0-vir05-1c-8g-1", "npu-0-vir10-3c-16g-0", "npu-1"]
        );
        assert!(pool.slices[0].devices.iter().all(|device| device.consumes.is_none() && !device.shared));
    }

    #[test]
    fn a_card_that_its_layout_does_not_fit_takes_no_new_claims() {
        let mut scan = scan_of(6);
        scan.chips[5].family = Family::Ascend310P;
        let inventory = Inventory::from_scan(&scan, &mut NodeMemory::default()).unwrap();
        let layout = [
            ("npu-0", &["vir10_3c_16g", "vir10_3c_16g"][..]),
            ("npu-1", &["vir10_3c_16g", "vir10_3c_16g", "vir10_3c_16g"]),
            ("npu-2", &["vir12_3c_32g"]),
            ("npu-3", &["vir10_4c_16g_m", "vir10_4c_16g_m"]),
            ("npu-5", &["vir05_1c_8g"]),
            ("npu-77", &["vir05_1c_8g"]),
        ];
        let layout = layout
            .map(|(card, names)| (card.to_owned(), names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>()));
        let offer = Offer { model: Model::Static, layout: BTreeMap::from(layout), ..Offer::default() };
        let pool = offered(&inventory, &offer);
        let open = |device: &&Device| device.taints.is_empty();
        let devices = &pool.slices[0].devices;
        let names = |devices: Vec<&Device>| devices.iter().map(|device| device.name.clone()).collect::<Vec<_>>();
        assert_eq!(
            names(devices.iter().filter(open).collect()),
            ["npu-0-vir10-3c-16g-0", "npu-0-vir10-3c-16g-1", "npu-4"],
            "neither whole nor the part that fits"
        );
        let closed: Vec<_> = devices.iter().filter(|device| !open(device)).collect();
        assert!(closed.iter().all(|device| device.taints[0].key == "npu.huawei.com/closed"), "{closed:?}");
        assert_eq!(names(closed), ["npu-1", "npu-2", "npu-3", "npu-5"]);
        let misfits = offer.misfits(&inventory);
        assert_eq!(misfits.keys().collect::<Vec<_>>(), ["npu-1", "npu-2", "npu-3", "npu-5", "npu-77"]);
        let why = "slicing.layout asks for 3 x vir10_3c_16g, which is more than the chip has";
        assert_eq!(misfits["npu-1"], why);
        assert_eq!(offer.closed(&inventory.npus()[1]).as_deref(), Some(why));
        assert_eq!(misfits["npu-77"], "slicing.layout names it, but no such card is there");
        // Another model does not read the layout.
        let offer = Offer { model: Model::Off, ..offer };
        assert!(offer.misfits(&inventory).is_empty());
        assert!(offered(&inventory, &offer).slices[0].devices.iter().all(|device| device.taints.is_empty()));
    }

    #[test]
    fn a_closed_card_is_tainted_with_the_reason() {
        let inventory = inventory_of(1);
        let closed = BTreeMap::from([(inventory.npus()[0].stable_id.clone(), "foreign vNPU".to_owned())]);
        let pool = offered(&inventory, &Offer { closed, ..Offer::default() });
        assert_eq!(pool.slices[0].devices[0].taints[0].value, "foreign-vnpu");
    }

    #[test]
    fn slices_hold_at_most_64_devices_and_an_empty_node_has_one() {
        let sizes = |cards| {
            pool(&inventory_of(cards), &HealthMap::new())
                .slices
                .iter()
                .map(|slice| slice.devices.len())
                .collect::<Vec<_>>()
        };
        assert_eq!(sizes(0), [0]);
        assert_eq!(sizes(64), [64]);
        assert_eq!(sizes(65), [64, 1]);
    }

    #[test]
    fn equal_inventories_give_equal_pools() {
        let mut scan = scan_of(8);
        let one = pool(&Inventory::from_scan(&scan, &mut NodeMemory::default()).unwrap(), &HealthMap::new());
        scan.chips.reverse();
        let mut memory = NodeMemory::default();
        assert_eq!(pool(&Inventory::from_scan(&scan, &mut memory).unwrap(), &HealthMap::new()), one);
    }
}

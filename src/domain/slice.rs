//! The `ResourceSlices` that the node should have, as plain data.

use std::collections::BTreeMap;

use super::{
    health::Level,
    inventory::Inventory,
    names::{DriverName, PoolName, attribute_text},
    npu::{Family, Npu},
    plan::HealthMap,
    quantity::Quantity,
};

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

/// A device as it should be published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Name.
    pub name: String,
    /// Attributes by name; ours without domain.
    pub attributes: BTreeMap<String, Attribute>,
    /// Capacities by name.
    pub capacity: BTreeMap<String, Quantity>,
    /// Taints.
    pub taints: Vec<Taint>,
}

/// One slice as it should be published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slice {
    /// Position in the pool, from 0: part of the object's name, so that the server sorts slices as we do.
    pub index: usize,
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

/// The wanted pool of whole cards.
#[must_use]
pub fn wanted(driver: &DriverName, pool: &PoolName, inventory: &Inventory, health: &HealthMap) -> Pool {
    let devices: Vec<_> = inventory
        .npus()
        .iter()
        .map(|npu| {
            let taints =
                health.get(&npu.stable_id).map(|health| taints(driver, health.reading.level)).unwrap_or_default();
            whole_card(npu, &inventory.driver_version, taints)
        })
        .collect();
    let mut slices: Vec<_> = devices
        .chunks(DEVICES_PER_SLICE)
        .enumerate()
        .map(|(index, devices)| Slice { index, devices: devices.to_vec() })
        .collect();
    if slices.is_empty() {
        slices.push(Slice { index: 0, devices: Vec::new() });
    }
    Pool { driver: driver.clone(), name: pool.clone(), slices }
}

/// The pool for an API server that drops taints: a tainted device would be offered like a sound one, so it is withdrawn
/// while no claim holds it.
#[must_use]
pub fn without_idle_tainted(mut pool: Pool, held: impl Fn(&str) -> bool) -> Pool {
    for slice in &mut pool.slices {
        slice.devices.retain(|device| device.taints.is_empty() || held(&device.name));
    }
    pool
}

/// The taints that a health level stands for.
#[must_use]
pub fn taints(driver: &DriverName, level: Level) -> Vec<Taint> {
    if level.is_usable() {
        return Vec::new();
    }
    vec![Taint { key: format!("{driver}/unhealthy"), value: level.to_string(), effect: Effect::NoSchedule }]
}

/// A whole card. Every device of ours has the same own attribute names: a missing one would be a CEL error that stops
/// a pod's scheduling.
fn whole_card(npu: &Npu, driver_version: &str, taints: Vec<Taint>) -> Device {
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
    let capacity = BTreeMap::from([("memCapacity".to_owned(), Quantity::bytes(npu.memory().unwrap_or(0)))]);
    Device { name: npu.name.to_string(), attributes, capacity, taints }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{
        health::{Health, HealthReading},
        inventory::tests::{inventory_of, scan_of},
        names::{NodeName, is_qualified_name},
        node::NodeMemory,
    };

    fn pool(inventory: &Inventory, health: &HealthMap) -> Pool {
        let name = PoolName::of_node(&NodeName::new("master").unwrap()).unwrap();
        wanted(&DriverName::new("npu.huawei.com").unwrap(), &name, inventory, health)
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
        assert_eq!(device.capacity["memCapacity"].to_string(), "32Gi");
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
        assert_eq!(devices[1].capacity["memCapacity"].to_string(), "0");
    }

    #[test]
    fn a_sick_card_is_tainted_and_an_unknown_one_is_not() {
        let inventory = inventory_of(2);
        let at = |level| Health { reading: HealthReading::of(level), since: jiff::Timestamp::UNIX_EPOCH };
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
        let sick = Health { reading: HealthReading::of(Level::Critical), since: jiff::Timestamp::UNIX_EPOCH };
        let health = inventory.npus().iter().take(2).map(|npu| (npu.stable_id.clone(), sick.clone())).collect();
        let pool = pool(&inventory, &health);
        let names = |pool: &Pool| pool.slices[0].devices.iter().map(|d| d.name.clone()).collect::<Vec<_>>();
        assert_eq!(names(&pool), ["npu-0", "npu-1", "npu-2"]);
        assert_eq!(names(&without_idle_tainted(pool, |name| name == "npu-1")), ["npu-1", "npu-2"]);
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

//! The node's cards, joined from what a backend read and what the node remembers.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{
    names::{DeviceName, InvalidName},
    node::NodeMemory,
    npu::{ChipReading, Family, MissingChip, Npu, Scan, StableId},
};

/// The cards of one good scan.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Inventory {
    npus: Vec<Npu>,
    /// Chips that the node has but the backend could not read.
    pub missing: Vec<MissingChip>,
    /// Version of the vendor's driver; empty if unknown.
    pub driver_version: String,
}

impl Inventory {
    /// Joins a scan with the node's memory, which learns the cards that are new to it.
    pub fn from_scan(scan: &Scan, memory: &mut NodeMemory) -> Result<Self, InvalidName> {
        let groups = topology(scan);
        let mut npus = Vec::new();
        let mut missing = scan.missing.clone();
        for dies in cards(scan) {
            let Some(first) = dies.first() else { continue };
            if is_half(scan, &dies) {
                // By its one die it would be taken for another card, and half a pair in a container fails.
                let why = "its other die is missing, and the two go to a container together".to_owned();
                missing.push(MissingChip { what: format!("the card of chip {}", first.physical_id), why });
                continue;
            }
            let prefix = if first.family == Family::Example { "gpu" } else { "npu" };
            let card = memory.recognise(prefix, first.physical_id, first.vdie.as_ref(), first.bus_id)?;
            npus.push(Npu {
                name: card.name.clone(),
                stable_id: card.stable_id.clone(),
                topology_group: format!("ring-{}", groups.get(&first.physical_id).unwrap_or(&first.physical_id)),
                dies,
            });
        }
        npus.sort_by_key(|npu| order(&npu.name));
        Ok(Self { npus, missing, driver_version: scan.driver_version.clone() })
    }

    /// The cards, by the number in their names.
    #[must_use]
    pub fn npus(&self) -> &[Npu] {
        &self.npus
    }

    /// The same with cards that are not there any more.
    #[must_use]
    pub fn with(&self, lost: impl IntoIterator<Item = Npu>) -> Self {
        let mut all = self.clone();
        all.npus.extend(lost);
        all.npus.sort_by_key(|npu| order(&npu.name));
        all
    }

    /// The card of a name.
    #[must_use]
    pub fn by_name(&self, name: &str) -> Option<&Npu> {
        self.npus.iter().find(|npu| npu.name.as_str() == name)
    }

    /// The card of an identity.
    #[must_use]
    pub fn by_stable_id(&self, id: &StableId) -> Option<&Npu> {
        self.npus.iter().find(|npu| npu.stable_id == *id)
    }
}

/// Names sort by their number, `npu-2` before `npu-10`.
#[must_use]
pub fn order(name: &DeviceName) -> (u64, DeviceName) {
    let number = name.as_str().rsplit('-').next().and_then(|digits| digits.parse().ok()).unwrap_or(u64::MAX);
    (number, name.clone())
}

/// Groups the chips into cards: the dies of a bound 910C card are one, every other chip is alone.
fn cards(scan: &Scan) -> Vec<Vec<ChipReading>> {
    let mut chips = scan.chips.clone();
    chips.sort_by_key(|chip| chip.physical_id);
    let mut cards: Vec<Vec<ChipReading>> = Vec::new();
    for chip in chips {
        let mate = scan.dies_bound && chip.family == Family::Ascend910C && chip.card_id.is_some();
        let card = cards.iter_mut().find(|dies| {
            mate && dies
                .first()
                .is_some_and(|first| first.family == Family::Ascend910C && first.card_id == chip.card_id)
        });
        match card {
            Some(dies) => dies.push(chip),
            None => cards.push(vec![chip]),
        }
    }
    cards
}

/// Dies of a 910C card.
const DIES_910C: usize = 2;

/// True for a 910C card of which a die is missing although its dies are bound to each other.
fn is_half(scan: &Scan, dies: &[ChipReading]) -> bool {
    let bound = |die: &ChipReading| die.family == Family::Ascend910C && die.card_id.is_some();
    scan.dies_bound && dies.iter().all(bound) && dies.len() < DIES_910C
}

/// For each physical id the lowest one that it is linked to, directly or over others.
fn topology(scan: &Scan) -> BTreeMap<u32, u32> {
    let mut lowest: BTreeMap<u32, u32> = scan.chips.iter().map(|chip| (chip.physical_id, chip.physical_id)).collect();
    loop {
        let mut moved = false;
        for link in &scan.links {
            if let (Some(&a), Some(&b)) = (lowest.get(&link.a), lowest.get(&link.b))
                && a != b
            {
                lowest.insert(link.a, a.min(b));
                lowest.insert(link.b, a.min(b));
                moved = true;
            }
        }
        if !moved {
            return lowest;
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::domain::{
        health::HealthReading,
        npu::{Link, MIB, PciAddress, Vdie},
    };

    /// A 910B4 with 32 GiB; `bus` 0xc1 and on.
    pub(crate) fn chip(physical_id: u32) -> ChipReading {
        let offset = u8::try_from(physical_id).unwrap();
        ChipReading {
            physical_id,
            logic_id: Some(physical_id),
            card_id: Some(i32::try_from(physical_id).unwrap()),
            device_id: 0,
            bus_id: PciAddress { domain: 0, bus: 0x10 + offset, device: 0, function: 0 },
            vdie: Vdie::from_words([0xa000 + physical_id, 1, 2, 3, 4]),
            chip_name: "910B4".to_owned(),
            family: Family::Ascend910B,
            board_id: Some(0x28),
            memory: Some(32768 * MIB),
            ai_cores: Some(20),
            numa_node: Some(6),
            pcie_root: Some("pci0000:c0".to_owned()),
            health: HealthReading::default(),
        }
    }

    pub(crate) fn scan_of(cards: u32) -> Scan {
        Scan {
            chips: (0..cards).map(chip).collect(),
            dies_bound: true,
            driver_version: "24.1.rc3".to_owned(),
            ..Scan::default()
        }
    }

    pub(crate) fn inventory_of(cards: u32) -> Inventory {
        Inventory::from_scan(&scan_of(cards), &mut NodeMemory::default()).unwrap()
    }

    #[test]
    fn cards_sort_by_number_and_keep_all_their_own_readings() {
        let mut scan = scan_of(12);
        scan.chips.reverse();
        let inventory = Inventory::from_scan(&scan, &mut NodeMemory::default()).unwrap();
        for (index, npu) in inventory.npus().iter().enumerate() {
            let index = u32::try_from(index).unwrap();
            assert_eq!(npu.name.as_str(), format!("npu-{index}"));
            assert_eq!(*npu.first(), chip(index));
        }
    }

    #[test]
    fn linked_cards_share_a_group_and_a_lonely_card_has_its_own() {
        let mut scan = scan_of(5);
        scan.links = vec![Link { a: 3, b: 2 }, Link { a: 1, b: 2 }, Link { a: 9, b: 0 }];
        let inventory = Inventory::from_scan(&scan, &mut NodeMemory::default()).unwrap();
        let groups: Vec<_> = inventory.npus().iter().map(|npu| npu.topology_group.as_str()).collect();
        assert_eq!(groups, ["ring-0", "ring-1", "ring-1", "ring-1", "ring-4"]);
    }

    #[test]
    fn bound_dies_of_a_910c_are_one_device_and_independent_ones_are_two() {
        let mut scan = scan_of(4);
        for chip in &mut scan.chips {
            chip.family = Family::Ascend910C;
            chip.card_id = Some(i32::try_from(chip.physical_id / 2).unwrap());
            chip.device_id = i32::try_from(chip.physical_id % 2).unwrap();
        }
        let bound = Inventory::from_scan(&scan, &mut NodeMemory::default()).unwrap();
        let ids: Vec<_> = bound.npus().iter().map(Npu::physical_ids).collect();
        assert_eq!(ids, [vec![0, 1], vec![2, 3]]);
        assert_eq!(bound.npus()[1].name.as_str(), "npu-2", "the even die names the card");
        assert_eq!(bound.npus()[0].memory(), Some(2 * 32768 * MIB));
        // A die falls off, the first one of its card or the second: the card is missing, and back under its own name.
        let mut memory = NodeMemory::default();
        let whole = Inventory::from_scan(&scan, &mut memory).unwrap();
        for lost in [0, 1] {
            let mut less = scan.clone();
            less.chips.retain(|chip| chip.physical_id != lost);
            let half = Inventory::from_scan(&less, &mut memory).unwrap();
            assert_eq!(half.npus(), &whole.npus()[1..]);
            assert!(half.missing[0].what.contains(&format!("chip {}", 1 - lost)), "{:?}", half.missing);
            assert_eq!(Inventory::from_scan(&scan, &mut memory).unwrap(), whole);
        }
        scan.dies_bound = false;
        let alone = Inventory::from_scan(&scan, &mut NodeMemory::default()).unwrap();
        assert_eq!(alone.npus().len(), 4);
    }
}

//! What the node remembers of its cards, so that a name stays with its card.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::{
    health::{FaultMemory, Link},
    inventory::{Inventory, order},
    model::Model,
    names::{DeviceName, InvalidName},
    npu::{Npu, PciAddress, StableId, Vdie},
    record::Record,
};

/// The memory of a node, kept in `node.json`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeMemory {
    /// Every card ever seen, the most recently named last.
    #[serde(default)]
    pub cards: Vec<CardMemory>,
    /// Set while an operator has taken the vendor's software from us.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub suspended: Option<Box<Suspension>>,
    /// Cards that are lost: a restart does not bring them back.
    #[serde(default, skip_serializing_if = "Lost::is_empty")]
    pub lost: Lost,
}

/// Cards that were lost since the host booted and are neither back nor replaced, as they were last seen.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Lost {
    /// The boot in which they were lost. What is not there after the next one was taken out.
    pub boot_id: String,
    /// The cards, by the number in their names.
    pub npus: Vec<Npu>,
}

impl Lost {
    /// True if no card is lost.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.npus.is_empty()
    }
}

/// An operator has taken the vendor's software from us, and what was known then: with it the node goes on, also over
/// restarts, until it is given back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Suspension {
    /// Since when.
    pub since: Timestamp,
    /// Why, in the operator's words; empty if he gave none.
    #[serde(default)]
    pub reason: String,
    /// The cards of the last good scan; `None` if there was none.
    #[serde(default)]
    pub inventory: Option<Inventory>,
    /// How they were offered.
    pub model: Model,
}

impl Suspension {
    /// Why no card takes new claims.
    #[must_use]
    pub fn why(&self) -> String {
        let colon = if self.reason.is_empty() { "" } else { ": " };
        format!("suspended by an operator{colon}{}", self.reason)
    }
}

/// What is remembered of one card.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CardMemory {
    /// Its name.
    pub name: DeviceName,
    /// Its identity since first sight.
    pub stable_id: StableId,
    /// Die identity, if it was ever read.
    pub vdie: Option<Vdie>,
    /// Where it was last seen.
    pub bus_id: PciAddress,
    /// Faults that keep claims away: a restart is no recovery.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub faults: Vec<FaultMemory>,
    /// Its network link: what is published does not change by a restart.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<Link>,
    /// An operator's hand on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hold: Option<Hold>,
}

/// What an operator has done to a card.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Hold {
    /// Whether it is drained too.
    pub kind: HoldKind,
    /// Why, in the operator's words; may be empty.
    pub reason: String,
    /// Since when.
    pub since: Timestamp,
}

/// How an operator keeps claims from a card.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HoldKind {
    /// No new claim gets it.
    Cordon,
    /// No new claim gets it, and pods that do not tolerate it are evicted.
    Drain,
}

impl HoldKind {
    /// What the card then is, and the name of its taint.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Cordon => "cordoned",
            Self::Drain => "drained",
        }
    }
}

impl NodeMemory {
    /// What the records of claims tell of a node whose own memory is lost: cards that are held keep their names.
    ///
    /// The Bus-Id of a card with a VDIE is not in its record: it stays all zeros until the next scan.
    #[must_use]
    pub fn from_records<'a>(records: impl IntoIterator<Item = &'a Record>) -> Self {
        let mut memory = Self::default();
        for holding in records.into_iter().flat_map(|record| &record.devices) {
            let Ok(name) = DeviceName::new(holding.device.as_str()) else { continue };
            if memory.cards.iter().any(|card| card.name == name || card.stable_id == holding.stable_id) {
                continue;
            }
            let vdie = Vdie::of_stable_id(&holding.stable_id);
            let bus_id = holding.stable_id.as_str().strip_prefix("pci-").and_then(|text| text.parse().ok());
            let Some(bus_id) = bus_id.or_else(|| vdie.is_some().then(PciAddress::default)) else { continue };
            memory.cards.push(CardMemory {
                name,
                stable_id: holding.stable_id.clone(),
                vdie,
                bus_id,
                faults: Vec::new(),
                link: None,
                hold: None,
            });
        }
        memory
    }

    /// Finds or makes the memory of a card.
    ///
    /// Gaining or losing a VDIE on one Bus-Id is the same card; a different VDIE there is a new one.
    pub fn recognise(
        &mut self,
        prefix: &str,
        number: u32,
        vdie: Option<&Vdie>,
        bus_id: PciAddress,
    ) -> Result<&CardMemory, InvalidName> {
        let known = match vdie {
            Some(vdie) => self.cards.iter().rposition(|card| card.vdie.as_ref() == Some(vdie)).or_else(|| {
                let last = self.cards.iter().rposition(|card| card.bus_id == bus_id)?;
                self.cards[last].vdie.is_none().then_some(last)
            }),
            None => self.cards.iter().rposition(|card| card.bus_id == bus_id),
        };
        let index = if let Some(index) = known {
            let card = &mut self.cards[index];
            card.bus_id = bus_id;
            if card.vdie.is_none() {
                card.vdie = vdie.cloned();
            }
            index
        } else {
            let name = self.free_name(prefix, number)?;
            let mut stable_id = StableId::at_first_sight(vdie, bus_id);
            let mut turn = 1;
            while self.cards.iter().any(|card| card.stable_id == stable_id) {
                turn += 1;
                stable_id = StableId::from_text(&format!("pci-{bus_id}-{turn}")).unwrap_or(stable_id);
            }
            self.cards.push(CardMemory {
                name,
                stable_id,
                vdie: vdie.cloned(),
                bus_id,
                faults: Vec::new(),
                link: None,
                hold: None,
            });
            self.cards.len() - 1
        };
        Ok(&self.cards[index])
    }

    /// Notes which cards are lost: those of the scan before, and those that were lost earlier in this boot, that are not
    /// `found` now. One whose place another card has taken will not come back: it counts only while a claim holds it.
    pub fn note_lost(
        &mut self,
        boot_id: &str,
        before: Option<&Inventory>,
        found: &Inventory,
        is_held: impl Fn(&StableId) -> bool,
    ) {
        let mut lost = std::mem::take(&mut self.lost);
        if lost.boot_id != boot_id {
            lost = Lost { boot_id: boot_id.to_owned(), npus: Vec::new() };
        }
        for npu in before.map(Inventory::npus).unwrap_or_default() {
            if !lost.npus.iter().any(|known| known.stable_id == npu.stable_id) {
                lost.npus.push(npu.clone());
            }
        }
        let has_place =
            |npu: &Npu, other: &Npu| npu.dies.iter().any(|die| other.dies.iter().any(|on| on.bus_id == die.bus_id));
        lost.npus.retain(|npu| {
            let is_replaced = found.npus().iter().any(|other| has_place(npu, other));
            found.by_stable_id(&npu.stable_id).is_none() && (!is_replaced || is_held(&npu.stable_id))
        });
        if !lost.is_empty() {
            lost.npus.sort_by_key(|npu| order(&npu.name));
            self.lost = lost;
        }
    }

    /// Cards that an operator keeps claims from.
    #[must_use]
    pub fn holds(&self) -> BTreeMap<StableId, Hold> {
        let held = self.cards.iter().filter_map(|card| Some((card.stable_id.clone(), card.hold.clone()?)));
        held.collect()
    }

    /// The card of an identity.
    #[must_use]
    pub fn by_stable_id(&self, id: &StableId) -> Option<&CardMemory> {
        self.cards.iter().find(|card| card.stable_id == *id)
    }

    /// `<prefix>-<number>`, or the lowest unused number if that name is taken.
    fn free_name(&self, prefix: &str, number: u32) -> Result<DeviceName, InvalidName> {
        let taken = |name: &DeviceName| self.cards.iter().any(|card| card.name == *name);
        let wanted = DeviceName::new(format!("{prefix}-{number}"))?;
        if !taken(&wanted) {
            return Ok(wanted);
        }
        for number in 0..=u32::MAX {
            let name = DeviceName::new(format!("{prefix}-{number}"))?;
            if !taken(&name) {
                return Ok(name);
            }
        }
        Ok(wanted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bus(n: u8) -> PciAddress {
        PciAddress { domain: 0, bus: n, device: 0, function: 0 }
    }

    fn vdie(n: u32) -> Vdie {
        Vdie::from_words([n, 0, 0, 0, 1]).unwrap()
    }

    fn name(memory: &mut NodeMemory, number: u32, die: Option<u32>, at: u8) -> String {
        memory.recognise("npu", number, die.map(vdie).as_ref(), bus(at)).unwrap().name.to_string()
    }

    #[test]
    fn a_card_keeps_its_name_when_the_order_changes() {
        let mut memory = NodeMemory::default();
        assert_eq!(name(&mut memory, 0, Some(10), 1), "npu-0");
        assert_eq!(name(&mut memory, 1, Some(11), 2), "npu-1");
        assert_eq!(name(&mut memory, 1, Some(10), 2), "npu-0");
        assert_eq!(name(&mut memory, 0, Some(11), 1), "npu-1");
    }

    #[test]
    fn a_swapped_card_is_a_new_one_with_the_lowest_unused_number() {
        let mut memory = NodeMemory::default();
        name(&mut memory, 0, Some(10), 1);
        name(&mut memory, 1, Some(11), 2);
        assert_eq!(name(&mut memory, 0, Some(99), 1), "npu-2");
        assert_eq!(name(&mut memory, 0, Some(10), 7), "npu-0", "the old card is known wherever it comes back");
    }

    #[test]
    fn gaining_or_losing_a_vdie_on_one_bus_id_is_the_same_card() {
        let mut memory = NodeMemory::default();
        assert_eq!(name(&mut memory, 0, None, 1), "npu-0");
        let id = memory.cards[0].stable_id.clone();
        assert_eq!(name(&mut memory, 0, Some(10), 1), "npu-0");
        assert_eq!(name(&mut memory, 0, None, 1), "npu-0");
        assert_eq!(memory.cards.len(), 1);
        assert_eq!(memory.cards[0].stable_id, id, "the identity stays that of first sight");
    }

    #[test]
    fn a_lost_memory_is_rebuilt_from_the_records_so_that_held_cards_keep_their_names() {
        use crate::domain::{
            claim::{ClaimRef, ClaimUid},
            record::{Holding, Phase},
        };
        let mut before = NodeMemory::default();
        name(&mut before, 0, Some(10), 1);
        name(&mut before, 5, None, 2);
        let hold = |card: &CardMemory| Holding {
            requests: vec![],
            pool: "n/npu".to_owned(),
            device: card.name.to_string(),
            stable_id: card.stable_id.clone(),
            physical_ids: vec![],
            admin_access: false,
            share_id: None,
            cdi_device: String::new(),
            cut: None,
        };
        let record = Record {
            claim: ClaimRef { namespace: String::new(), name: String::new(), uid: ClaimUid::new("u").unwrap() },
            boot_id: String::new(),
            phase: Phase::Prepared,
            prepared_at: jiff::Timestamp::UNIX_EPOCH,
            devices: before.cards.iter().chain(&before.cards).map(hold).collect(),
        };
        let mut memory = NodeMemory::from_records([&record]);
        assert_eq!(memory.cards.len(), 2);
        assert_eq!(name(&mut memory, 7, Some(10), 1), "npu-0");
        assert_eq!(name(&mut memory, 0, None, 2), "npu-5");
        assert_eq!(memory, before);
    }

    #[test]
    fn a_card_is_lost_until_it_is_back_or_replaced_or_the_host_boots() {
        use crate::domain::{inventory::tests::scan_of, npu::Scan};
        let mut memory = NodeMemory::default();
        let all = Inventory::from_scan(&scan_of(3), &mut memory).unwrap();
        let without = |gone: &[u32], memory: &mut NodeMemory| {
            let chips = scan_of(3).chips.into_iter().filter(|chip| !gone.contains(&chip.physical_id)).collect();
            Inventory::from_scan(&Scan { chips, ..scan_of(3) }, memory).unwrap()
        };
        let lost = |memory: &NodeMemory| memory.lost.npus.iter().map(|npu| npu.name.to_string()).collect::<Vec<_>>();
        let (two, one) = (without(&[1], &mut memory), without(&[1, 2], &mut memory));
        memory.note_lost("boot", None, &all, |_| false);
        assert_eq!(lost(&memory), [""; 0], "what was never found is not lost");
        memory.note_lost("boot", Some(&all), &two, |_| false);
        memory.note_lost("boot", Some(&two), &one, |_| false);
        assert_eq!(lost(&memory), ["npu-1", "npu-2"]);
        let text = serde_json::to_string(&memory).unwrap();
        let mut memory = serde_json::from_str::<NodeMemory>(&text).unwrap();
        assert_eq!(lost(&memory), ["npu-1", "npu-2"]);
        // The daemon has been restarted.
        memory.note_lost("boot", None, &two, |_| false);
        assert_eq!(lost(&memory), ["npu-1"]);

        let mut other = scan_of(3);
        other.chips[1].vdie = Some(vdie(99));
        let swapped = Inventory::from_scan(&other, &mut memory).unwrap();
        memory.note_lost("boot", Some(&two), &swapped, |_| true);
        assert_eq!(lost(&memory), ["npu-1"], "a claim holds it");
        memory.note_lost("boot", Some(&swapped), &swapped, |_| false);
        assert_eq!(lost(&memory), [""; 0]);

        memory.note_lost("boot", Some(&all), &one, |_| false);
        memory.note_lost("the next", None, &one, |_| true);
        assert_eq!((lost(&memory).len(), memory.lost.boot_id.as_str()), (0, ""));
    }

    #[test]
    fn two_cards_never_share_an_identity() {
        let mut memory = NodeMemory::default();
        name(&mut memory, 0, None, 1);
        // The card moves away, and another without VDIE takes its place.
        memory.cards[0].bus_id = bus(5);
        name(&mut memory, 0, None, 1);
        assert_eq!(memory.cards.len(), 2);
        assert_ne!(memory.cards[0].stable_id, memory.cards[1].stable_id);
    }
}

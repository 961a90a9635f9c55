//! Ready-made nodes.

use std::str::FromStr;

use crate::code;
use crate::data::{Card, Chip, ChipState, Data, DiePolicy, Ecc, Family, Memory, Topology};
use crate::template::TemplateSet;

/// Symbols that a driver of about 6.0/23.x does not have.
pub const NEWER_SYMBOLS: &[&str] = &[
    "dcmi_get_device_chip_info_v2",
    "dcmi_get_device_multi_utilization_rate",
    "dcmi_get_hccs_link_bandwidth_info",
    "dcmi_get_netdev_brother_device",
    "dcmi_get_multi_die_policy",
    "dcmi_set_multi_die_policy",
    "dcmi_get_spod_node_status",
    "dcmi_set_spod_node_status",
];

/// A kind of node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    /// 8 × 910B4 with 32 GB: the node of the requirements.
    Ascend910B4,
    /// 8 × 910B3 with 64 GB.
    Ascend910B3,
    /// 8 × 910B2 with 64 GB.
    Ascend910B2,
    /// 8 cards with two 910C dies each, on a driver that cannot slice them.
    Ascend910C(DiePolicy),
    /// The same on a driver that can slice a die once the pair is unbound.
    Ascend910CSliced(DiePolicy),
    /// 2 × 310P3 with 24 GB in sparse slots.
    Ascend310P3,
    /// 8 × 910B4 on a driver that lacks [`NEWER_SYMBOLS`]: use it with [`crate::testing::strip_symbols`].
    Old,
    /// Cards of several kinds in one node.
    Mixed,
    /// 8 × 910B4 of which the sixth did not come up and is listed as -1.
    FailedCard,
    /// This many 910B4 (at most 64), for benchmarks.
    Many(u32),
}

/// Names for command lines: `910b4`, `910b3`, `910b2`, `910c`, `910c-independent`, `910c-unreadable`, `910c-sliced`,
/// `310p3`, `old`, `mixed`, `failed-card`, `many-N`.
impl FromStr for Profile {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Ok(match name {
            "910b4" => Self::Ascend910B4,
            "910b3" => Self::Ascend910B3,
            "910b2" => Self::Ascend910B2,
            "910c" => Self::Ascend910C(DiePolicy::Value(0)),
            "910c-independent" => Self::Ascend910C(DiePolicy::Value(1)),
            "910c-unreadable" => Self::Ascend910C(DiePolicy::Unreadable(code::INNER_ERR)),
            "910c-sliced" => Self::Ascend910CSliced(DiePolicy::Value(1)),
            "310p3" => Self::Ascend310P3,
            "old" => Self::Old,
            "mixed" => Self::Mixed,
            "failed-card" => Self::FailedCard,
            other => match other.strip_prefix("many-").and_then(|n| n.parse().ok()) {
                Some(n @ 1..=64) => Self::Many(n),
                _ => {
                    return Err(format!(
                        "unknown profile {other:?}: use 910b4, 910b3, 910b2, 910c, 910c-independent, 910c-unreadable, \
                         910c-sliced, 310p3, old, mixed, failed-card or many-N with N from 1 to 64"
                    ));
                }
            },
        })
    }
}

/// Bus number and NUMA node of the eight sockets of a four-processor server.
const SLOTS: [(u32, i32); 8] = [(0xc1, 6), (0xc2, 6), (0x81, 4), (0x82, 4), (0x01, 0), (0x02, 0), (0x41, 2), (0x42, 2)];

impl Profile {
    /// The node's data.
    #[must_use]
    pub fn data(self) -> Data {
        let mut data = Data::default();
        match self {
            Self::Ascend910B4 | Self::Old | Self::FailedCard => data.cards = (0..8).map(b4).collect(),
            Self::Many(count) => data.cards = (0..count.min(64)).map(b4).collect(),
            Self::Ascend910B3 => data.cards = (0..8).map(b3).collect(),
            Self::Ascend910B2 => {
                data.cards = (0..8).map(|slot| b(slot, "910B2", 0x31, 65_536, 24, 6)).collect();
            }
            Self::Ascend910C(policy) | Self::Ascend910CSliced(policy) => {
                data.cards = (0..8).map(c).collect();
                data.die_policy = policy;
                if matches!(self, Self::Ascend910CSliced(_)) {
                    "26.0.rc1".clone_into(&mut data.driver_version);
                    "26.0.rc1.b080".clone_into(&mut data.dcmi_version);
                    data.slicing.on_910c = Some(TemplateSet::B3);
                }
            }
            Self::Ascend310P3 => data.cards = vec![p(0, 2), p(1, 5)],
            Self::Mixed => {
                data.cards = vec![b4(0), b4(1), b3(2), b3(3), p(4, 10), p(5, 12)];
            }
        }
        if self == Self::Old {
            "23.0.0".clone_into(&mut data.driver_version);
            "23.0.0".clone_into(&mut data.dcmi_version);
        }
        if self == Self::FailedCard {
            data.cards[5].chips[0].state = ChipState::Failed;
        }
        data.wide_ecc = self != Self::Old;
        data.topology = topology(&data.cards);
        data
    }

    /// Symbols that this profile's library does not have.
    #[must_use]
    pub const fn missing_symbols(self) -> &'static [&'static str] {
        match self {
            Self::Old => NEWER_SYMBOLS,
            _ => &[],
        }
    }
}

/// All HBM chips of eight sockets form one ring; a node without any has no topology call.
fn topology(cards: &[Card]) -> Option<Topology> {
    let linked: Vec<&Card> = cards.iter().filter(|card| card.family != Family::Ascend310P).collect();
    let ring_link = if linked.iter().any(|card| card.family == Family::Ascend910C) { 7 } else { 3 };
    let rings = linked.chunks(8).map(|ring| ring.iter().flat_map(|card| card.chips.iter().map(|c| c.phy)).collect());
    (!linked.is_empty()).then(|| Topology { rings: rings.collect(), ring_link, other_link: 1, links: Vec::new() })
}

/// Five words that look like a die id and differ for every chip.
fn die(seed: u32, phy: u32) -> [u32; 5] {
    let mut state = seed ^ phy.wrapping_mul(0x9E37_79B9);
    [(); 5].map(|()| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state ^ (state >> 15)
    })
}

fn chip(phy: u32, name: &str, memory: Memory, aicores: u32, aicpus: u16) -> Chip {
    let slot = usize::try_from(phy % 8).unwrap_or_default();
    let (bus, numa) = SLOTS[slot];
    Chip {
        phy,
        bus: format!("{:04x}:{bus:02x}:00.0", phy / 8),
        numa,
        pci_device: 0xd802,
        vdie: die(0x5EED_0001, phy),
        ndie: die(0x5EED_0002, phy),
        chip_type: "Ascend".to_owned(),
        chip_name: name.to_owned(),
        npu_name: String::new(),
        aicores,
        aicpus,
        memory,
        health: 0,
        errors: Vec::new(),
        temperature: 42,
        power: 912,
        utilization: 0,
        processes: Vec::new(),
        state: ChipState::Up,
        epoch: 0,
        ecc: Ecc::default(),
        network: 0,
        shared: false,
        sriov: false,
        disturbed: 0,
    }
}

fn card(family: Family, board_id: u32, chips: Vec<Chip>) -> Card {
    let serial = format!("0213{:08}", chips.first().map_or(0, |chip| chip.phy) + 71_000);
    Card { id: None, family, product: String::new(), board_id, mainboard_id: 0, serial, mcu: false, chips }
}

/// A 910B: about a tenth of its HBM is in use when idle.
fn b(phy: u32, name: &str, board_id: u32, mb: u64, aicores: u32, aicpus: u16) -> Card {
    let memory = Memory::Hbm { mb, used_mb: if mb > 32_768 { 4096 } else { 3072 } };
    card(Family::Ascend910B, board_id, vec![chip(phy, name, memory, aicores, aicpus)])
}

fn b4(phy: u32) -> Card {
    b(phy, "910B4", 0x40, 32_768, 20, 7)
}

fn b3(phy: u32) -> Card {
    b(phy, "910B3", 0x32, 65_536, 20, 7)
}

/// A 910C card: dies 2k and 2k+1, each a PCI function of its own.
fn c(number: u32) -> Card {
    let slot = usize::try_from(number % 8).unwrap_or_default();
    let (bus, numa) = SLOTS[slot];
    let dies = [0, 1].map(|die| {
        let mut chip = chip(number * 2 + die, "Ascend910", Memory::Hbm { mb: 65_536, used_mb: 4096 }, 20, 7);
        chip.bus = format!("0000:{:02x}:00.0", bus + die * 8);
        chip.numa = numa;
        chip.pci_device = 0xd803;
        "910_9392".clone_into(&mut chip.npu_name);
        chip
    });
    let mut card = card(Family::Ascend910C, 0xb0, dies.into());
    card.mainboard_id = 0x14;
    card.mcu = true;
    card
}

fn p(phy: u32, id: i32) -> Card {
    let mut chip = chip(phy, "310P3", Memory::Ddr { mb: 24_576, used_mb: 1536 }, 8, 7);
    chip.pci_device = 0xd500;
    let mut card = card(Family::Ascend310P, 0x64, vec![chip]);
    card.id = Some(id);
    "Atlas 300I Pro".clone_into(&mut card.product);
    card.mcu = true;
    card
}

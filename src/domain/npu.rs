//! What an NPU is: identity, chip model, and what a backend reads of one.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use super::{health::HealthReading, names::DeviceName};

/// Bytes in one mebibyte; the vendor library counts memory in these and calls them MB.
pub const MIB: u64 = 1 << 20;

/// PCI address, printed `dddd:bb:dd.f` in lower case.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PciAddress {
    /// PCI domain.
    pub domain: u16,
    /// Bus number.
    pub bus: u8,
    /// Device number, 0 to 31.
    pub device: u8,
    /// Function number, 0 to 7.
    pub function: u8,
}

/// Why a text is not a PCI address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a PCI address of the form dddd:bb:dd.f")]
pub struct InvalidPciAddress(pub String);

impl FromStr for PciAddress {
    type Err = InvalidPciAddress;

    fn from_str(text: &str) -> Result<Self, InvalidPciAddress> {
        let parse = || {
            let (domain, rest) = text.trim().split_once(':')?;
            let (bus, rest) = rest.split_once(':')?;
            let (device, function) = rest.split_once('.')?;
            let hex = |part: &str, most: usize| {
                (part.len() <= most && !part.starts_with('+'))
                    .then_some(())
                    .and_then(|()| u16::from_str_radix(part, 16).ok())
            };
            let address = Self {
                domain: hex(domain, 4)?,
                bus: u8::try_from(hex(bus, 2)?).ok()?,
                device: u8::try_from(hex(device, 2)?).ok()?,
                function: u8::try_from(hex(function, 1)?).ok()?,
            };
            (address.device < 32 && address.function < 8).then_some(address)
        };
        parse().ok_or_else(|| InvalidPciAddress(text.to_owned()))
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

impl TryFrom<String> for PciAddress {
    type Error = InvalidPciAddress;
    fn try_from(text: String) -> Result<Self, InvalidPciAddress> {
        text.parse()
    }
}

impl From<PciAddress> for String {
    fn from(address: PciAddress) -> Self {
        address.to_string()
    }
}

/// Serial-like id of a die, burnt into the chip: five 8-digit upper-case hex words joined by `-`.
///
/// `dcmi_get_device_die_v2`, type 1. All zeros means that the chip has none.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Vdie(String);

impl Vdie {
    /// From the five words of the library; `None` if all are zero.
    #[must_use]
    pub fn from_words(words: [u32; 5]) -> Option<Self> {
        if words == [0; 5] {
            return None;
        }
        Some(Self(words.map(|word| format!("{word:08X}")).join("-")))
    }

    /// The VDIE that an identity is, if it is one.
    #[must_use]
    pub fn of_stable_id(id: &StableId) -> Option<Self> {
        let hex = |word: &str| word.len() == 8 && word.bytes().all(|b| b.is_ascii_digit() || matches!(b, b'A'..=b'F'));
        let words: Vec<_> = id.as_str().split('-').collect();
        (words.len() == 5 && words.into_iter().all(hex)).then(|| Self(id.0.clone()))
    }

    /// The id as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The identity of a card that survives resets, reboots and reordering.
///
/// The VDIE of its first die, or `pci-<Bus-Id>` where the chip tells none. Published as attribute `uuid`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct StableId(String);

impl StableId {
    /// Identity at first sight.
    #[must_use]
    pub fn at_first_sight(vdie: Option<&Vdie>, bus_id: PciAddress) -> Self {
        match vdie {
            Some(vdie) => Self(vdie.0.clone()),
            None => Self(format!("pci-{bus_id}")),
        }
    }

    /// Takes an id that was written down before; `None` for text that no CDI device name could carry.
    #[must_use]
    pub fn from_text(text: &str) -> Option<Self> {
        super::names::is_cdi_device_name(text).then(|| Self(text.to_owned()))
    }

    /// The id as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for StableId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Chip families that differ in dies, memory kind or slicing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Family {
    /// 910B1 to 910B4, one die, HBM.
    Ascend910B,
    /// 910C (`910_93`, Atlas A3), two dies a card.
    Ascend910C,
    /// 310P, DDR.
    Ascend310P,
    /// Any other Ascend chip: offered whole.
    Other,
    /// Not hardware: an example GPU of profile `gpu`.
    Example,
}

impl Family {
    /// Board ids of 910C boards (DCMI board information).
    const BOARDS_910C: [u32; 9] = [0xb0, 0xb1, 0xb2, 0xb3, 0xb4, 0x81, 0x83, 0xd1, 0xd3];

    /// The family by board id and by the name that the chip gives itself.
    #[must_use]
    pub fn of(chip_name: &str, board_id: Option<u32>) -> Self {
        if board_id.is_some_and(|id| Self::BOARDS_910C.contains(&id)) {
            return Self::Ascend910C;
        }
        let starts = |prefix: &str| {
            chip_name.strip_prefix(prefix).is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
        };
        if starts("910B") || starts("A2G") || chip_name == "910B" {
            Self::Ascend910B
        } else if chip_name.starts_with("310P") || starts("I2") || chip_name == "I2" {
            Self::Ascend310P
        } else if chip_name.starts_with("910_93") || chip_name.starts_with("910C") {
            Self::Ascend910C
        } else {
            Self::Other
        }
    }
}

/// What is known of a chip by its name; used where the chip itself does not say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Model {
    /// Name as the vendor library gives it.
    pub chip_name: &'static str,
    /// Family.
    pub family: Family,
    /// Memory of one die, MiB.
    pub memory_mib: u64,
    /// AI cores of one die.
    pub ai_cores: u32,
    /// AI CPUs of one die.
    pub ai_cpus: u32,
}

/// The chips that the driver was written for.
pub const MODELS: [Model; 8] = [
    Model { chip_name: "910B1", family: Family::Ascend910B, memory_mib: 65536, ai_cores: 24, ai_cpus: 6 },
    Model { chip_name: "910B2", family: Family::Ascend910B, memory_mib: 65536, ai_cores: 24, ai_cpus: 6 },
    Model { chip_name: "910B3", family: Family::Ascend910B, memory_mib: 65536, ai_cores: 20, ai_cpus: 7 },
    Model { chip_name: "910B4", family: Family::Ascend910B, memory_mib: 32768, ai_cores: 20, ai_cpus: 7 },
    Model { chip_name: "910B4-1", family: Family::Ascend910B, memory_mib: 65536, ai_cores: 20, ai_cpus: 7 },
    Model { chip_name: "Ascend910", family: Family::Ascend910C, memory_mib: 65536, ai_cores: 20, ai_cpus: 7 },
    Model { chip_name: "310P1", family: Family::Ascend310P, memory_mib: 24576, ai_cores: 8, ai_cpus: 7 },
    Model { chip_name: "310P3", family: Family::Ascend310P, memory_mib: 24576, ai_cores: 8, ai_cpus: 7 },
];

impl Model {
    /// The model of a chip; `Ascend910` counts only on 910C boards, since 910A chips use that name too.
    #[must_use]
    pub fn lookup(chip_name: &str, family: Family) -> Option<&'static Self> {
        MODELS.iter().find(|model| model.chip_name == chip_name && model.family == family)
    }
}

/// What a backend reads of one chip (one die).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ChipReading {
    /// Host-wide number: N of `/dev/davinciN`.
    pub physical_id: u32,
    /// Enumeration order of the driver; `None` where the backend has no such thing.
    pub logic_id: Option<u32>,
    /// Card number of the vendor library; `None` outside it.
    pub card_id: Option<i32>,
    /// Chip number in the card.
    pub device_id: i32,
    /// PCI address.
    pub bus_id: PciAddress,
    /// Identity of the die; `None` if the chip tells none.
    pub vdie: Option<Vdie>,
    /// Chip name, for example `910B4`; empty if unknown.
    pub chip_name: String,
    /// Family.
    pub family: Family,
    /// Board id, which selects templates; `None` if unknown.
    pub board_id: Option<u32>,
    /// Memory in bytes; `None` if unknown.
    pub memory: Option<u64>,
    /// AI cores; `None` if unknown.
    pub ai_cores: Option<u32>,
    /// NUMA node of the PCI function; `None` if unknown or −1.
    pub numa_node: Option<u32>,
    /// First component of the sysfs path, `pci0000:c0`; `None` if unknown.
    pub pcie_root: Option<String>,
    /// Health at the time of the scan. It is not kept: what it was says nothing of what it is.
    #[serde(skip, default = "HealthReading::unknown")]
    pub health: HealthReading,
}

/// A direct connection between two dies, by physical id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Link {
    /// One end.
    pub a: u32,
    /// The other end.
    pub b: u32,
}

/// A chip that should be there and is not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MissingChip {
    /// What is known of it: a PCI address or a card number.
    pub what: String,
    /// Why it is not in the scan.
    pub why: String,
}

/// One complete reading of the node's NPUs. A failed reading is an error of the backend, never an empty scan.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Scan {
    /// The chips, in no particular order.
    pub chips: Vec<ChipReading>,
    /// HCCS and SIO connections between them.
    pub links: Vec<Link>,
    /// True if the two dies of a 910C card go to a container together (policy 0 or unreadable).
    pub dies_bound: bool,
    /// Version of the vendor's driver; empty if unknown.
    pub driver_version: String,
    /// Chips that the node has but the backend could not read.
    pub missing: Vec<MissingChip>,
}

/// One card of the node: what is published as one device and given to a container whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Npu {
    /// Name in our pool, kept for the card's life.
    pub name: DeviceName,
    /// Identity.
    pub stable_id: StableId,
    /// Its dies, by physical id; two for a bound 910C card, else one. Never empty.
    pub dies: Vec<ChipReading>,
    /// Name of the group of cards that are linked, never empty.
    pub topology_group: String,
}

impl Npu {
    /// The die that stands for the card: the one with the lowest physical id.
    #[must_use]
    pub fn first(&self) -> &ChipReading {
        &self.dies[0]
    }

    /// Physical id that stands for the card.
    #[must_use]
    pub fn physical_id(&self) -> u32 {
        self.first().physical_id
    }

    /// Physical ids of all dies.
    #[must_use]
    pub fn physical_ids(&self) -> Vec<u32> {
        self.dies.iter().map(|die| die.physical_id).collect()
    }

    /// Memory of all dies in bytes; `None` if any is unknown.
    #[must_use]
    pub fn memory(&self) -> Option<u64> {
        self.dies.iter().map(|die| die.memory).try_fold(0u64, |sum, memory| Some(sum.saturating_add(memory?)))
    }

    /// AI cores of all dies; `None` if any is unknown.
    #[must_use]
    pub fn ai_cores(&self) -> Option<u32> {
        self.dies.iter().map(|die| die.ai_cores).try_fold(0u32, |sum, cores| Some(sum.saturating_add(cores?)))
    }

    /// The worst health of its dies at the scan.
    #[must_use]
    pub fn health(&self) -> HealthReading {
        HealthReading::worst(self.dies.iter().map(|die| &die.health))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pci_addresses_are_read_in_any_case_and_printed_in_lower_case() {
        let address: PciAddress = "0000:C1:00.0".parse().unwrap();
        assert_eq!(address.to_string(), "0000:c1:00.0");
        for bad in
            ["", "c1:00.0", "0000:c1:00", "0000:c1:20.0", "0000:c1:00.8", "00000:c1:00.0", "0000:+1:00.0", "g:0:0.0"]
        {
            assert!(bad.parse::<PciAddress>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_vdie_is_five_upper_case_words_and_zeros_are_none() {
        let vdie = Vdie::from_words([0xab, 1, 2, 3, 0xffff_ffff]).unwrap();
        assert_eq!(vdie.as_str(), "000000AB-00000001-00000002-00000003-FFFFFFFF");
        assert_eq!(Vdie::from_words([0; 5]), None);
    }

    #[test]
    fn a_stable_id_fits_into_a_cdi_device_name() {
        let bus_id: PciAddress = "0000:c1:00.0".parse().unwrap();
        let id = StableId::at_first_sight(None, bus_id);
        assert_eq!(id.as_str(), "pci-0000:c1:00.0");
        assert_eq!(StableId::from_text(id.as_str()), Some(id));
        assert_eq!(StableId::from_text("../x"), None);
    }

    #[test]
    fn families_go_by_board_first_and_name_second() {
        for (name, board, family) in [
            ("910B4", Some(0x28), Family::Ascend910B),
            ("910B4-1", None, Family::Ascend910B),
            ("A2G3", None, Family::Ascend910B),
            ("Ascend910", Some(0xb0), Family::Ascend910C),
            ("Ascend910", None, Family::Other),
            ("910_9391", None, Family::Ascend910C),
            ("310P3", Some(1), Family::Ascend310P),
            ("I2", None, Family::Ascend310P),
            ("910", None, Family::Other),
            ("", None, Family::Other),
        ] {
            assert_eq!(Family::of(name, board), family, "{name}");
        }
    }

    #[test]
    fn the_model_table_knows_the_chips_of_the_requirements() {
        assert_eq!(Model::lookup("910B4", Family::Ascend910B).unwrap().memory_mib, 32768);
        assert_eq!(Model::lookup("910B2", Family::Ascend910B).unwrap().ai_cores, 24);
        assert_eq!(Model::lookup("Ascend910", Family::Other), None);
        assert_eq!(Model::lookup("vir05_1c_8g", Family::Other), None);
    }
}

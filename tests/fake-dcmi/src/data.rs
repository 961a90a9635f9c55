//! What `world.json` holds: the cards of a node and how its vendor library behaves.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::code;
use crate::template::TemplateSet;

/// Everything about a simulated node that is not a vNPU or a fault.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Data {
    /// Version of the driver, as `dcmi_get_driver_version` prints it.
    pub driver_version: String,
    /// Version of the library.
    pub dcmi_version: String,
    /// The node's cards in the order in which the driver enumerates them.
    pub cards: Vec<Card>,
    /// Links between chips; none: `dcmi_get_topo_info_by_device_id` answers -8255.
    pub topology: Option<Topology>,
    /// Who the calling process is to the driver.
    pub environment: Environment,
    /// Where `vdavinciN` appears; a relative path is below the world directory.
    pub dev_dir: PathBuf,
    /// What a device node is made of.
    pub node: NodeKind,
    /// The vendor's list of vNPUs to make again after a boot; a relative path is below the world directory.
    pub vnpu_cfg: PathBuf,
    /// How long `dcmi_init` takes, in milliseconds.
    pub init_ms: u64,
    /// How slicing behaves.
    pub slicing: Slicing,
    /// The answer of `dcmi_get_multi_die_policy` on a 910C.
    pub die_policy: DiePolicy,
    /// Container mode: 0 docker, 1 VM.
    pub vdevice_mode: i32,
    /// Whether `dcmi_get_device_ecc_info` knows the two newer fields (36 bytes instead of 28).
    pub wide_ecc: bool,
    /// The answer of `dcmi_get_driver_health`.
    pub driver_health: u32,
}

impl Default for Data {
    fn default() -> Self {
        Self {
            driver_version: "25.2.0".to_owned(),
            dcmi_version: "25.2.0.b100".to_owned(),
            cards: Vec::new(),
            topology: None,
            environment: Environment::Host,
            dev_dir: PathBuf::from("dev"),
            node: NodeKind::Symlink(PathBuf::from("/dev/null")),
            vnpu_cfg: PathBuf::from("vnpu.cfg"),
            init_ms: 0,
            slicing: Slicing::default(),
            die_policy: DiePolicy::Value(0),
            vdevice_mode: 0,
            wide_ecc: false,
            driver_health: 0,
        }
    }
}

impl Data {
    /// All chips, card by card.
    pub fn chips(&self) -> impl Iterator<Item = &Chip> {
        self.cards.iter().flat_map(|card| &card.chips)
    }

    /// The chip with this physical id.
    #[must_use]
    pub fn chip(&self, phy: u32) -> Option<&Chip> {
        self.chips().find(|chip| chip.phy == phy)
    }

    /// The chip with this physical id, to change it.
    pub fn chip_mut(&mut self, phy: u32) -> Option<&mut Chip> {
        self.cards.iter_mut().flat_map(|card| &mut card.chips).find(|chip| chip.phy == phy)
    }

    /// The card that carries this chip.
    #[must_use]
    pub fn card_of(&self, phy: u32) -> Option<&Card> {
        self.cards.iter().find(|card| card.chips.iter().any(|chip| chip.phy == phy))
    }
}

/// Generation of a chip; decides which calls it answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Family {
    /// Ascend 310P: DDR, sparse card ids, MCU.
    #[serde(rename = "310P")]
    Ascend310P,
    /// Ascend 910B: HBM, one chip per card.
    #[serde(rename = "910B")]
    Ascend910B,
    /// Ascend 910C (`910_93`, A3): HBM, two dies per card.
    #[serde(rename = "910C")]
    Ascend910C,
}

/// A board with one or more chips.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Card {
    /// Fixed card id of a PCIe-card product (a slot number); without it cards are counted over those present.
    #[serde(default)]
    pub id: Option<i32>,
    /// Generation of its chips.
    pub family: Family,
    /// Product name; only a 310P tells it.
    #[serde(default)]
    pub product: String,
    /// Board id: selects the template set of a 910B.
    pub board_id: u32,
    /// Main board id: tells the products of a 910C apart.
    #[serde(default)]
    pub mainboard_id: u32,
    /// Serial number of the board.
    #[serde(default)]
    pub serial: String,
    /// Whether a management controller sits at the index after the last chip.
    #[serde(default)]
    pub mcu: bool,
    /// Its chips; more than one on a 910C and a 300I Duo.
    pub chips: Vec<Chip>,
}

/// One NPU chip (a die on a 910C).
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Chip {
    /// Physical id: N of `/dev/davinciN`.
    pub phy: u32,
    /// PCI address, `0000:c1:00.0`.
    pub bus: String,
    /// NUMA node; negative where the firmware does not say.
    pub numa: i32,
    /// PCI device id.
    pub pci_device: u32,
    /// The stable, serial-like id.
    pub vdie: [u32; 5],
    /// The other die id.
    #[serde(default)]
    pub ndie: [u32; 5],
    /// `Ascend`.
    pub chip_type: String,
    /// `910B4`, `310P3`, `Ascend910` …
    pub chip_name: String,
    /// Name of the product's NPU, 910C only.
    #[serde(default)]
    pub npu_name: String,
    /// AI cores.
    pub aicores: u32,
    /// AI CPUs.
    pub aicpus: u16,
    /// Memory of the chip.
    pub memory: Memory,
    /// Health value of `dcmi_get_device_health`.
    #[serde(default)]
    pub health: u32,
    /// Current fault codes.
    #[serde(default)]
    pub errors: Vec<u32>,
    /// Degrees Celsius.
    #[serde(default)]
    pub temperature: i32,
    /// Tenths of a watt.
    #[serde(default)]
    pub power: i32,
    /// Utilisation, percent, given for every utilisation type.
    #[serde(default)]
    pub utilization: u32,
    /// Processes that use the chip.
    #[serde(default)]
    pub processes: Vec<Process>,
    /// Whether the chip answers.
    #[serde(default)]
    pub state: ChipState,
    /// Counts losses: a process that counted the chip before the last loss finds it again only after a new init.
    #[serde(default)]
    pub epoch: u64,
    /// ECC counters of its memory.
    #[serde(default)]
    pub ecc: Ecc,
    /// RoCE detect result, 0 = ok.
    #[serde(default)]
    pub network: u32,
    /// Whether several containers may open the chip.
    #[serde(default)]
    pub shared: bool,
    /// Whether SR-IOV is on: true while the chip carries vNPUs (910B and 910C).
    #[serde(default)]
    pub sriov: bool,
    /// How often the SR-IOV switch was thrown while a process ran on the chip: each time harms that job.
    #[serde(default)]
    pub disturbed: u64,
}

/// Memory of a chip, in MB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Memory {
    /// High-bandwidth memory (910B, 910C).
    Hbm {
        /// Size.
        mb: u64,
        /// In use.
        used_mb: u64,
    },
    /// Ordinary memory (310P).
    Ddr {
        /// Size.
        mb: u64,
        /// In use.
        used_mb: u64,
    },
}

impl Memory {
    /// Size in MB.
    #[must_use]
    pub const fn mb(self) -> u64 {
        match self {
            Self::Hbm { mb, .. } | Self::Ddr { mb, .. } => mb,
        }
    }
}

/// ECC counters of a chip's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Ecc {
    /// Errors of one bit since the driver was loaded, which were corrected.
    pub single: u32,
    /// Errors of two bits since the driver was loaded.
    pub double: u32,
    /// Errors of one bit in the chip's life.
    pub total_single: u32,
    /// Errors of two bits in the chip's life.
    pub total_double: u32,
    /// Pages isolated for errors of one bit.
    pub isolated_single: u32,
    /// Pages isolated for errors of two bits.
    pub isolated_double: u32,
}

/// Whether a chip answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChipState {
    /// In service.
    #[default]
    Up,
    /// Off the bus: not seen by an init; who knows it from before gets errors.
    Dropped,
    /// On the bus, but it did not come up: its card is listed as -1.
    Failed,
    /// Being reset: "not ready".
    Resetting,
}

/// A process on a chip.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Process {
    /// Process id on the host.
    pub pid: i32,
    /// Memory in bytes.
    pub bytes: u64,
}

/// Links between chips. Two dies of one 910C card are always linked by SIO.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Topology {
    /// Groups of physical ids; inside one, chips are linked by `ring_link`.
    pub rings: Vec<Vec<u32>>,
    /// Link type inside a ring: 3 HCCS, 7 HCCS through a switch.
    pub ring_link: i32,
    /// Link type between rings: 1 across NUMA nodes.
    pub other_link: i32,
    /// Exceptions: (physical id, physical id, type), either way round.
    pub links: Vec<(u32, u32, i32)>,
}

impl Topology {
    /// Link type between two chips; `same_card` for two dies of one card.
    #[must_use]
    pub fn link(&self, a: u32, b: u32, same_card: bool) -> i32 {
        if a == b {
            return 0;
        }
        if let Some((_, _, kind)) = self.links.iter().find(|(x, y, _)| (*x, *y) == (a, b) || (*y, *x) == (a, b)) {
            return *kind;
        }
        if same_card {
            return 6;
        }
        if self.rings.iter().any(|ring| ring.contains(&a) && ring.contains(&b)) {
            return self.ring_link;
        }
        self.other_link
    }
}

/// Who the calling process is to the driver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Environment {
    /// Root on the physical host.
    #[default]
    Host,
    /// Root in a privileged container.
    PrivilegedPod,
    /// Root in an ordinary container.
    Pod,
    /// Anybody else in a container.
    PodUser,
    /// Anybody else on the host.
    User,
}

/// What a device node is made of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NodeKind {
    /// A symbolic link to this path: needs no privileges, `stat` sees a character device.
    Symlink(PathBuf),
    /// A character device with these numbers; needs `CAP_MKNOD`.
    Char(u64, u64),
    /// A character device of its own for every node, as on hardware: mode 0660 and this group; needs `CAP_MKNOD` and
    /// `CAP_CHOWN`.
    Distinct {
        /// Major number of all.
        major: u64,
        /// Minor number of `davinci0`; the others follow from it.
        first: u64,
        /// Group of all.
        gid: u32,
    },
}

/// Answer of the multi-die policy call on a 910C.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DiePolicy {
    /// 0: both dies together; 1: a die may be given alone.
    Value(u32),
    /// The call ends with this code.
    Unreadable(i32),
}

/// How slicing behaves. Everything beyond the defaults is a way in which a library was seen, or is feared, to differ.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Slicing {
    /// Extra time of the first slice on a 910B or 910C (the SR-IOV switch), in milliseconds.
    pub first_ms: u64,
    /// Time of every create, in milliseconds.
    pub create_ms: u64,
    /// Time of every destroy, in milliseconds.
    pub destroy_ms: u64,
    /// What a chip with a process answers: -8013, or -8001 from a 910B whose SR-IOV switch refuses.
    pub busy_code: i32,
    /// The template set of a 910C; none: its driver cannot slice (-8255).
    pub on_910c: Option<TemplateSet>,
    /// Replaces the template set that board id or memory would select.
    pub templates: Option<TemplateSet>,
    /// The library chooses the vNPU's id itself whatever was asked.
    pub ignore_ids: bool,
    /// Each vNPU really gets this memory (MB) instead of its fraction.
    pub real_memory_mb: Option<u64>,
    /// Each vNPU is reported under this template name.
    pub real_name: Option<String>,
    /// `vnpu.cfg` cannot be saved: the call is undone and ends with this code.
    pub save_code: Option<i32>,
    /// SR-IOV cannot be switched off: the destroy of the last vNPU works and ends with this code.
    pub sriov_off_code: Option<i32>,
    /// How long a call waits for the lock of `vnpu.cfg` before -8020, in milliseconds.
    pub lock_wait_ms: u64,
}

impl Default for Slicing {
    fn default() -> Self {
        Self {
            first_ms: 0,
            create_ms: 0,
            destroy_ms: 0,
            busy_code: code::NOT_SUPPORT_IN_CONTAINER,
            on_910c: None,
            templates: None,
            ignore_ids: false,
            real_memory_mb: None,
            real_name: None,
            save_code: None,
            sriov_off_code: None,
            lock_wait_ms: 5000,
        }
    }
}

/// A vNPU, as kept in `vnpus/<id>.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Vnpu {
    /// N of `/dev/vdavinciN`.
    pub id: u32,
    /// Physical id of its chip.
    pub phy: u32,
    /// Function id on the chip, from 1.
    pub vfid: u32,
    /// vGroup, 310P only.
    pub vfg: u32,
    /// Template it was made from.
    pub template: String,
    /// Name under which it is reported.
    pub name: String,
    /// AI cores.
    pub aicores: u32,
    /// AI CPUs.
    pub aicpus: u16,
    /// Memory in MB.
    pub memory_mb: u64,
    /// Id of the container that opened the node, 0 for none.
    #[serde(default)]
    pub container: u64,
    /// Whether a process in a container has opened the node.
    #[serde(default)]
    pub in_use: bool,
    /// Process that made it; 0 for one that the world was given.
    #[serde(default)]
    pub maker: u32,
}

//! What proxy and worker say to each other: one request, one answer, each a length and then JSON.
//!
//! JSON because both ends are the same executable (no version skew), a scan is some hundred messages of a hundred
//! bytes, `serde_json` is in the binary anyway, and what passes can be read with `strace`.

use std::{
    fmt,
    io::{self, Read, Write},
};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// Longest message in bytes; the longest real one, 1,024 fault codes, has less than 12 KiB.
const MAX_MESSAGE: usize = 64 * 1024;

/// One chip by the library's numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct At {
    /// Card number.
    pub card: i32,
    /// Chip number in the card.
    pub device: i32,
}

/// Stands for the node where calls that are about no chip are told apart.
pub const NODE: At = At { card: -1, device: -1 };

/// Name of a template as the library takes it: 1 to 31 bytes of printable ASCII.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TemplateName([u8; 32]);

impl TemplateName {
    /// The name, `None` if the library has no room for it.
    #[must_use]
    pub fn new(name: &str) -> Option<Self> {
        let mut bytes = [0; 32];
        let fits = !name.is_empty() && name.len() < bytes.len() && name.bytes().all(|byte| byte.is_ascii_graphic());
        fits.then(|| {
            bytes[..name.len()].copy_from_slice(name.as_bytes());
            Self(bytes)
        })
    }

    /// The bytes, filled up with NULs, of which there is at least one.
    #[must_use]
    pub fn bytes(&self) -> [u8; 32] {
        self.0
    }
}

impl fmt::Display for TemplateName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let end = self.0.iter().position(|byte| *byte == 0).unwrap_or(self.0.len());
        f.write_str(&String::from_utf8_lossy(&self.0[..end]))
    }
}

/// One call of the library.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[allow(missing_docs)] // each is the call that its text form names
pub enum Request {
    Init,
    DriverVersion,
    Cards,
    Chips(i32),
    FailedChips(i32),
    Unit(At),
    LogicId(At),
    PhysicalId(u32),
    ChipInfo(At),
    Board(At),
    Die(At),
    Pcie(At),
    Hbm(At),
    Memory(At),
    BootStatus(At),
    Product(At),
    Health(At),
    ErrorCodes(At),
    Temperature(At),
    Power(At),
    CardPower(i32),
    /// The counters of a kind of memory.
    Ecc(At, u32),
    Network(At),
    /// From now on the library's events come on the second channel, as [`Event`]s.
    Subscribe,
    Topology(At, At),
    DiePolicy,
    /// No call: which of the calls for vNPUs the library lacks.
    SlicingGaps,
    Vnpus(At),
    Vnpu(At, u32),
    FreeResources(At),
    Processes(At),
    CreateVnpu(At, TemplateName, u32),
    DestroyVnpu(At, u32),
    VnpuMode,
    Replay,
    SetReplay(bool),
}

impl Request {
    /// Whom a loss of the worker in this call is put down to.
    #[must_use]
    pub fn blame(&self) -> Option<(At, Trade)> {
        match *self {
            Self::Vnpus(at) | Self::Vnpu(at, _) | Self::FreeResources(at) | Self::Processes(at) => {
                Some((at, Trade::Look))
            }
            Self::CreateVnpu(at, ..) | Self::DestroyVnpu(at, _) => Some((at, Trade::Cut)),
            Self::VnpuMode | Self::Replay => Some((NODE, Trade::Look)),
            Self::SetReplay(_) => Some((NODE, Trade::Cut)),
            Self::Unit(at)
            | Self::LogicId(at)
            | Self::ChipInfo(at)
            | Self::Board(at)
            | Self::Die(at)
            | Self::Pcie(at)
            | Self::Hbm(at)
            | Self::Memory(at)
            | Self::BootStatus(at)
            | Self::Product(at)
            | Self::Health(at)
            | Self::ErrorCodes(at)
            | Self::Temperature(at)
            | Self::Power(at)
            | Self::Ecc(at, _) => Some((at, Trade::Scan)),
            Self::Network(at) => Some((at, Trade::Network)),
            Self::Subscribe => Some((NODE, Trade::Events)),
            Self::Init
            | Self::DriverVersion
            | Self::Cards
            | Self::Chips(_)
            | Self::FailedChips(_)
            | Self::PhysicalId(_)
            | Self::CardPower(_)
            | Self::Topology(..)
            | Self::DiePolicy
            | Self::SlicingGaps => None,
        }
    }
}

/// Kinds of calls, told apart because a chip can hang in one of them and be sound in the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Trade {
    /// Those of a scan or health poll.
    Scan,
    /// Those that read vNPUs and processes.
    Look,
    /// Creating and destroying.
    Cut,
    /// That of the network link, which is known to block.
    Network,
    /// Subscribing to events.
    Events,
}

impl Trade {
    /// True for calls that the driver can do without: one loss is enough to leave them out for long.
    #[must_use]
    pub fn is_extra(self) -> bool {
        matches!(self, Self::Network | Self::Events)
    }
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, at) = match *self {
            Self::Init => return f.write_str("dcmi_init()"),
            Self::DriverVersion => return f.write_str("dcmi_get_driver_version()"),
            Self::Cards => return f.write_str("dcmi_get_card_list()"),
            Self::DiePolicy => return f.write_str("dcmi_get_multi_die_policy()"),
            Self::Chips(card) => return write!(f, "dcmi_get_device_id_in_card({card})"),
            Self::FailedChips(card) => return write!(f, "dcmi_get_fault_device_num_in_card({card})"),
            Self::CardPower(card) => return write!(f, "dcmi_mcu_get_power_info({card})"),
            Self::PhysicalId(logic) => return write!(f, "dcmi_get_device_phyid_from_logicid({logic})"),
            Self::Topology(a, b) => {
                return write!(
                    f,
                    "dcmi_get_topo_info_by_device_id({}, {}, {}, {})",
                    a.card, a.device, b.card, b.device
                );
            }
            Self::SlicingGaps => return f.write_str("looking for dcmi_create_vdevice()"),
            Self::VnpuMode => return f.write_str("dcmi_get_vdevice_mode()"),
            Self::Replay => return f.write_str("dcmi_get_vnpu_config_recover_mode()"),
            Self::SetReplay(on) => {
                return write!(f, "dcmi_set_vnpu_config_recover_mode({})", u8::from(on));
            }
            Self::Vnpus(at) => return write!(f, "dcmi_get_device_info({}, {}, 52, 1)", at.card, at.device),
            Self::Vnpu(at, id) => {
                return write!(f, "dcmi_get_device_info({}, {}, 52, 0) of vnpu {id}", at.card, at.device);
            }
            Self::FreeResources(at) => return write!(f, "dcmi_get_device_info({}, {}, 52, 2)", at.card, at.device),
            Self::CreateVnpu(at, template, id) => {
                return write!(f, "dcmi_create_vdevice({}, {}, {template}, {id})", at.card, at.device);
            }
            Self::DestroyVnpu(at, id) => {
                return write!(f, "dcmi_set_destroy_vdevice({}, {}, {id})", at.card, at.device);
            }
            Self::Subscribe => return f.write_str("dcmi_subscribe_fault_event(-1, -1)"),
            Self::Ecc(at, memory) => {
                return write!(f, "dcmi_get_device_ecc_info({}, {}, {memory})", at.card, at.device);
            }
            Self::Network(at) => ("dcmi_get_device_network_health", at),
            Self::Processes(at) => ("dcmi_get_device_resource_info", at),
            Self::Unit(at) => ("dcmi_get_device_type", at),
            Self::LogicId(at) => ("dcmi_get_device_logic_id", at),
            Self::ChipInfo(at) => ("dcmi_get_device_chip_info", at),
            Self::Board(at) => ("dcmi_get_device_board_info", at),
            Self::Die(at) => ("dcmi_get_device_die_v2", at),
            Self::Pcie(at) => ("dcmi_get_device_pcie_info_v2", at),
            Self::Hbm(at) => ("dcmi_get_device_hbm_info", at),
            Self::Memory(at) => ("dcmi_get_device_memory_info_v3", at),
            Self::BootStatus(at) => ("dcmi_get_device_boot_status", at),
            Self::Product(at) => ("dcmi_get_product_type", at),
            Self::Health(at) => ("dcmi_get_device_health", at),
            Self::ErrorCodes(at) => ("dcmi_get_device_errorcode_v2", at),
            Self::Temperature(at) => ("dcmi_get_device_temperature", at),
            Self::Power(at) => ("dcmi_get_device_power_info", at),
        };
        write!(f, "{name}({}, {})", at.card, at.device)
    }
}

/// Why a call gave nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Trouble {
    /// The library's own return code.
    Code(i32),
    /// The library does not have this call.
    Missing,
    /// It said that all was well and gave a value that cannot be, or none.
    Nonsense(i64),
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "{code} ({})", super::ffi::code_name(*code)),
            Self::Missing => f.write_str("this driver does not have the call"),
            Self::Nonsense(value) => write!(f, "success with an impossible value ({value})"),
        }
    }
}

/// What a call gave.
pub type Outcome<T> = Result<T, Trouble>;

/// Names and AI cores of a chip.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChipInfo {
    /// `910B4`, `Ascend910`.
    pub chip_name: String,
    /// Name of a 910C's product; empty elsewhere.
    pub npu_name: String,
    /// AI cores.
    pub ai_cores: u32,
}

/// Board of a chip.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Board {
    /// Board id.
    pub board_id: u32,
    /// Slot.
    pub slot_id: u32,
}

/// PCI address of a chip as the library says it, not yet checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pcie {
    /// PCI domain.
    pub domain: i32,
    /// Bus.
    pub bus: u32,
    /// Device.
    pub device: u32,
    /// Function.
    pub function: u32,
    /// PCI device id, 0xd802 and so on.
    pub device_id: u32,
}

/// A vNPU as a query tells it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vnpu {
    /// Template name, cut to 15 bytes.
    pub template: String,
    /// Memory in MiB.
    pub memory: u64,
    /// Whole AI cores.
    pub ai_cores: u32,
}

/// What is left of a chip.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Free {
    /// Memory in MiB.
    pub memory: u64,
    /// Whole AI cores.
    pub ai_cores: u32,
    /// AI CPUs; `None` where they are shared.
    pub ai_cpus: Option<u16>,
    /// JPEG decoders; `None` where they are not told.
    pub jpeg_decoders: Option<u32>,
}

/// What ECC has counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ecc {
    /// False: nothing is counted.
    pub enabled: bool,
    /// Errors of one bit, which were corrected.
    pub single: u32,
    /// Errors of two bits, which were not.
    pub double: u32,
    /// Pages that were taken out of use.
    pub isolated: u32,
}

/// Active fault codes of a chip.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Codes {
    /// The codes, in no order.
    pub list: Vec<u32>,
    /// False: there are more than found room.
    pub complete: bool,
}

/// A fault event, on the second channel from the worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Fault code.
    pub code: u32,
    /// Logic id of the chip.
    pub logic: u16,
    /// 0 suggestion, 1 minor, 2 major, 3 critical.
    pub severity: u8,
    /// 0 recovered, 1 occurred, 2 over at once.
    pub assertion: u8,
    /// Events that found no room in the channel since the worker's start.
    pub lost: u64,
}

/// The worker's first message: whether calls can be made.
pub type Hello = Result<(), OpenError>;

/// Why a worker can make no call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum OpenError {
    /// Another process makes vendor calls.
    Locked {
        /// What the lock file says of it.
        holder: String,
    },
    /// The lock file cannot be used.
    Lock(String),
    /// The library must not or cannot be loaded.
    Refused(String),
}

/// Writes one message.
pub fn send(mut stream: impl Write, message: &impl Serialize) -> io::Result<()> {
    let mut frame = vec![0; 4];
    serde_json::to_writer(&mut frame, message)?;
    let length = u32::try_from(frame.len() - 4).map_err(|_| io::ErrorKind::InvalidInput)?;
    frame[..4].copy_from_slice(&length.to_le_bytes());
    stream.write_all(&frame)
}

/// Reads one message.
pub fn receive<T: DeserializeOwned>(mut stream: impl Read) -> io::Result<T> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = usize::try_from(u32::from_le_bytes(length)).unwrap_or(usize::MAX);
    if length > MAX_MESSAGE {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("a message of {length} bytes")));
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body)?;
    Ok(serde_json::from_slice(&body)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_arrives_as_it_was_sent() {
        let mut wire = Vec::new();
        let request = Request::Topology(At { card: 1, device: 0 }, At { card: -1, device: 2 });
        send(&mut wire, &request).unwrap();
        send(&mut wire, &Outcome::<u32>::Err(Trouble::Code(-8012))).unwrap();
        let mut wire = wire.as_slice();
        assert_eq!(receive::<Request>(&mut wire).unwrap(), request);
        assert_eq!(receive::<Outcome<u32>>(&mut wire).unwrap(), Err(Trouble::Code(-8012)));
        assert_eq!(receive::<Request>(&mut wire).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn a_message_too_long_or_not_ours_is_an_error() {
        let long = u32::MAX.to_le_bytes();
        assert_eq!(receive::<Request>(&long[..]).unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert!(receive::<Request>(&b"\x02\0\0\0{}"[..]).is_err());
    }

    #[test]
    fn calls_and_codes_read_as_the_vendor_names_them() {
        assert_eq!(Request::Health(At { card: 3, device: 1 }).to_string(), "dcmi_get_device_health(3, 1)");
        let create = Request::CreateVnpu(At { card: 3, device: 0 }, TemplateName::new("vir05_1c_8g").unwrap(), 148);
        assert_eq!(create.to_string(), "dcmi_create_vdevice(3, 0, vir05_1c_8g, 148)");
        assert_eq!(Trouble::Code(-8005).to_string(), "-8005 (inner error)");
    }

    #[test]
    fn a_template_name_always_ends_before_its_buffer() {
        let longest = "v".repeat(31);
        assert_eq!(TemplateName::new(&longest).unwrap().to_string(), longest);
        assert_eq!(TemplateName::new(&longest).unwrap().bytes()[31], 0);
        for bad in ["", "with space", "nul\0", "\u{e9}", &"v".repeat(32)] {
            assert!(TemplateName::new(bad).is_none(), "{bad:?}");
        }
    }
}

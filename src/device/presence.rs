//! Whether chips still show on the host: their PCI functions and device nodes, without the vendor library.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use super::pci;
use crate::domain::npu::PciAddress;

/// Why a chip is held to have gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Absence {
    /// Its PCI function is no longer on the bus.
    Function(PciAddress),
    /// No Ascend driver serves its PCI function any more.
    Driver(PciAddress),
    /// It has no device node.
    Node(u32),
}

impl std::fmt::Display for Absence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Function(address) => write!(f, "PCI function {address} is no longer on the bus"),
            Self::Driver(address) => write!(f, "no ascend driver serves PCI function {address} any more"),
            Self::Node(number) => write!(f, "/dev/davinci{number} is not there"),
        }
    }
}

/// What the host showed of one chip.
#[derive(Debug, Clone, Copy)]
struct Seen {
    address: PciAddress,
    function: bool,
    driver: bool,
    node: bool,
}

/// What the host showed of the chips of a scan. Only what was seen then can be missed later: a container need not show
/// the bus or the devices of its host.
#[derive(Debug, Clone, Default)]
pub(super) struct Presence {
    host_root: PathBuf,
    chips: BTreeMap<u32, Seen>,
}

impl Presence {
    /// Looks at the chips of a scan, given by physical id.
    pub(super) fn of(host_root: &Path, chips: impl IntoIterator<Item = (u32, PciAddress)>) -> Self {
        let look = |(id, address)| {
            let function = pci::exists(host_root, address);
            let driver = function && pci::is_served(host_root, address);
            (id, Seen { address, function, driver, node: node(host_root, id).exists() })
        };
        Self { host_root: host_root.to_owned(), chips: chips.into_iter().map(look).collect() }
    }

    /// What of a chip is no longer to be seen; `None` if nothing is missed.
    pub(super) fn absence(&self, id: u32) -> Option<Absence> {
        let Seen { address, function, driver, node: had_node } = *self.chips.get(&id)?;
        if function && !pci::exists(&self.host_root, address) {
            return Some(Absence::Function(address));
        }
        if driver && !pci::is_served(&self.host_root, address) {
            return Some(Absence::Driver(address));
        }
        let lost = had_node && !node(&self.host_root, id).exists();
        (lost || lacks_node(&self.host_root, id)).then_some(Absence::Node(id))
    }
}

/// True if the host has the driver's other device nodes and not that of this chip.
pub(super) fn lacks_node(host_root: &Path, id: u32) -> bool {
    host_root.join("dev/davinci_manager").exists() && !node(host_root, id).exists()
}

fn node(host_root: &Path, id: u32) -> PathBuf {
    host_root.join(format!("dev/davinci{id}"))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn only_what_was_seen_can_be_missed_and_a_node_also_where_the_others_are() {
        let host = tempfile::tempdir().unwrap();
        let address: PciAddress = "0000:c1:00.0".parse().unwrap();
        let function = host.path().join("sys/bus/pci/devices/0000:c1:00.0");
        let look = || Presence::of(host.path(), [(3, address)]);
        assert_eq!(look().absence(3), None, "a host that shows nothing misses nothing");
        fs::create_dir_all(&function).unwrap();
        let bare = look();
        fs::write(function.join("dev_id"), "3\n").unwrap();
        fs::create_dir(host.path().join("dev")).unwrap();
        fs::write(host.path().join("dev/davinci3"), "").unwrap();
        let whole = look();
        assert_eq!((bare.absence(3), whole.absence(3), whole.absence(4)), (None, None, None));
        fs::remove_file(host.path().join("dev/davinci3")).unwrap();
        assert_eq!((bare.absence(3), whole.absence(3)), (None, Some(Absence::Node(3))));
        fs::write(host.path().join("dev/davinci_manager"), "").unwrap();
        assert_eq!(bare.absence(3), Some(Absence::Node(3)));
        fs::remove_file(function.join("dev_id")).unwrap();
        assert_eq!(whole.absence(3), Some(Absence::Driver(address)));
        fs::remove_dir(&function).unwrap();
        assert_eq!((bare.absence(3), whole.absence(3)), (Some(Absence::Function(address)), whole.absence(3)));
    }
}

//! Ascend chips on the PCI bus, as sysfs below the host root shows them. Odd files are skipped, never fatal.

use std::{
    collections::BTreeSet,
    ffi::OsString,
    fs::{self, File},
    io::{self, Read as _},
    path::{Path, PathBuf},
};

use crate::domain::npu::{Family, PciAddress};

/// Vendor id of Huawei; some boards carry that of their maker with the chip's own device id.
const VENDORS: [u32; 4] = [0x19e5, 0x20c6, 0x203f, 0x20e9];
/// Class "processing accelerator"; Huawei's network and graphics chips have others.
const ACCELERATOR: u32 = 0x1200;
/// A virtual function of a sliced 910B.
const VIRTUAL_FUNCTION: u32 = 0xd805;
/// PCI device id of a 910C die.
pub const DEVICE_910C: u32 = 0xd803;

/// One row of `devdrv_sysfs_bdf_to_devid`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// Physical id.
    pub physical_id: u32,
    /// The driver's internal number.
    pub add_id: u32,
}

/// One PCI function that carries chips.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Function {
    /// Its address.
    pub address: PciAddress,
    /// PCI device id.
    pub device_id: u32,
    /// Chips behind it: 1, or 2 for a 310P with two chips.
    pub chips: u32,
    /// The driver's internal number of its first chip; `None` while no driver serves it.
    pub dev_id: Option<u32>,
    /// The driver's table, those rows that name this function.
    pub rows: Vec<Row>,
}

impl Function {
    /// Chip family by PCI device id; 0xd802 does not tell 910B1 from 910B4.
    #[must_use]
    pub fn family(&self) -> Family {
        match self.device_id {
            0xd802 => Family::Ascend910B,
            DEVICE_910C => Family::Ascend910C,
            0xd500 | 0xd501 => Family::Ascend310P,
            _ => Family::Other,
        }
    }

    /// Physical ids of its chips: from the driver's table, else its internal number, which is the same on ordinary
    /// servers.
    #[must_use]
    pub fn physical_ids(&self) -> Vec<u32> {
        let chips = usize::try_from(self.chips).unwrap_or(1);
        let mut rows = self.rows.clone();
        if rows.len() > chips
            && let Some(dev_id) = self.dev_id
        {
            // The table has no PCI domain: of two functions with one bus number, ours has our internal number.
            rows.retain(|row| (dev_id..dev_id.saturating_add(self.chips)).contains(&row.add_id));
        }
        if rows.is_empty() || rows.len() > chips {
            return self.dev_id.map(|first| (first..first.saturating_add(self.chips)).collect()).unwrap_or_default();
        }
        rows.iter().map(|row| row.physical_id).collect()
    }
}

fn devices(host_root: &Path) -> PathBuf {
    host_root.join("sys/bus/pci/devices")
}

/// What was on the bus at a scan, to notice what comes later.
#[derive(Debug, Clone, Default)]
pub struct Bus {
    /// Everything that the bus listed when it was last looked at: to read that is cheap.
    names: BTreeSet<OsString>,
    /// The functions with Ascend chips of the scan.
    addresses: BTreeSet<PciAddress>,
}

impl Bus {
    /// The bus as it is, and the functions with Ascend chips on it.
    pub fn read(host_root: &Path) -> io::Result<(Self, Vec<Function>)> {
        // First the names: what comes between the two is noticed later.
        let names = names(host_root);
        let functions = functions(host_root)?;
        let addresses = functions.iter().map(|function| function.address).collect();
        Ok((Self { names, addresses }, functions))
    }

    /// True if a function with Ascend chips has come since the scan; each is told once.
    pub fn has_more(&mut self, host_root: &Path) -> bool {
        let names = names(host_root);
        if names == self.names {
            return false;
        }
        self.names = names;
        let functions = functions(host_root).unwrap_or_default();
        let before = self.addresses.len();
        self.addresses.extend(functions.iter().map(|function| function.address));
        self.addresses.len() > before
    }
}

fn names(host_root: &Path) -> BTreeSet<OsString> {
    fs::read_dir(devices(host_root)).into_iter().flatten().flatten().map(|entry| entry.file_name()).collect()
}

/// All functions with Ascend chips, virtual functions left out, by address.
pub fn functions(host_root: &Path) -> io::Result<Vec<Function>> {
    let mut functions = Vec::new();
    for entry in fs::read_dir(devices(host_root))? {
        let Ok(entry) = entry else { continue };
        let Some(address) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        functions.extend(function(&entry.path(), address));
    }
    functions.sort_by_key(|function| function.address);
    Ok(functions)
}

fn function(path: &Path, address: PciAddress) -> Option<Function> {
    let vendor = hexadecimal(&path.join("vendor"))?;
    let device_id = hexadecimal(&path.join("device"))?;
    let known = matches!(device_id, 0xd100 | 0xd105 | 0xd500 | 0xd501 | 0xd801..=0xd804 | 0xd806..=0xd808);
    let accelerator = vendor == VENDORS[0]
        && device_id != VIRTUAL_FUNCTION
        && hexadecimal(&path.join("class")).is_some_and(|class| class >> 8 == ACCELERATOR);
    if !VENDORS.contains(&vendor) || !(known || accelerator) || fs::symlink_metadata(path.join("physfn")).is_ok() {
        return None;
    }
    Some(Function {
        address,
        device_id,
        chips: decimal(&path.join("davinci_dev_num")).filter(|chips| (1..=4).contains(chips)).unwrap_or(1),
        dev_id: decimal(&path.join("dev_id")),
        rows: read(&path.join("devdrv_sysfs_bdf_to_devid")).map(|table| rows(&table, address)).unwrap_or_default(),
    })
}

/// Rows `bus:dev.func udevid add_id` that name this function; anything else is skipped.
fn rows(table: &str, address: PciAddress) -> Vec<Row> {
    let mut rows = Vec::new();
    for line in table.lines() {
        let fields: Vec<&str> = line.split(|c: char| c.is_whitespace() || c == ',').filter(|f| !f.is_empty()).collect();
        let [bdf, physical_id, add_id] = fields[..] else { continue };
        let whole =
            if bdf.matches(':').count() == 1 { format!("{:04x}:{bdf}", address.domain) } else { bdf.to_owned() };
        if whole.parse() != Ok(address) {
            continue;
        }
        if let (Ok(physical_id), Ok(add_id)) = (physical_id.parse(), add_id.parse()) {
            rows.push(Row { physical_id, add_id });
        }
    }
    rows
}

/// NUMA node of a function; `None` if the firmware does not say.
#[must_use]
pub fn numa_node(host_root: &Path, address: PciAddress) -> Option<u32> {
    read(&devices(host_root).join(address.to_string()).join("numa_node"))?.parse().ok()
}

/// Root complex of a function, `pci0000:c0`, from where its sysfs link leads.
#[must_use]
pub fn pcie_root(host_root: &Path, address: PciAddress) -> Option<String> {
    let real = fs::canonicalize(devices(host_root).join(address.to_string())).ok()?;
    let root = real.iter().find_map(|step| step.to_str().filter(|step| is_root(step)))?;
    Some(root.to_owned())
}

/// True for `pciDDDD:BB`.
fn is_root(step: &str) -> bool {
    step.strip_prefix("pci").and_then(|rest| rest.split_once(':')).is_some_and(|(domain, bus)| {
        let hex = |text: &str| !text.is_empty() && text.chars().all(|c| c.is_ascii_hexdigit());
        hex(domain) && hex(bus)
    })
}

/// True if the function is on the bus now.
#[must_use]
pub fn exists(host_root: &Path, address: PciAddress) -> bool {
    devices(host_root).join(address.to_string()).is_dir()
}

/// True if an Ascend driver serves the function now.
#[must_use]
pub fn is_served(host_root: &Path, address: PciAddress) -> bool {
    devices(host_root).join(address.to_string()).join("dev_id").is_file()
}

/// A small text file, trimmed; `None` for anything else.
pub(super) fn read(path: &Path) -> Option<String> {
    if !fs::metadata(path).ok()?.is_file() {
        return None;
    }
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(64 * 1024).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).trim().to_owned())
}

fn hexadecimal(path: &Path) -> Option<u32> {
    u32::from_str_radix(read(path)?.trim_start_matches("0x"), 16).ok()
}

fn decimal(path: &Path) -> Option<u32> {
    read(path)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "bdf udevid add_id\nc1:00.0 5 1\nc1:00.0 13 9\nnonsense\n\nc2:00.0 x 2\n82:00.0 2";

    fn function(domain: u16, bus: u8, dev_id: Option<u32>) -> Function {
        let address = PciAddress { domain, bus, device: 0, function: 0 };
        Function { address, device_id: 0xd802, chips: 1, dev_id, rows: rows(TABLE, address) }
    }

    #[test]
    fn a_function_that_comes_is_told_once_and_other_devices_are_not() {
        let root = tempfile::tempdir().unwrap();
        let add = |address: &str, vendor: &str| {
            let dir = devices(root.path()).join(address);
            fs::create_dir_all(&dir).unwrap();
            for (name, text) in [("vendor", vendor), ("device", "0xd802"), ("class", "0x120000")] {
                fs::write(dir.join(name), text).unwrap();
            }
        };
        add("0000:c1:00.0", "0x19e5");
        let (mut bus, functions) = Bus::read(root.path()).unwrap();
        assert_eq!((functions.len(), bus.has_more(root.path())), (1, false));
        add("0000:01:00.0", "0x8086");
        assert!(!bus.has_more(root.path()));
        add("0000:c2:00.0", "0x19e5");
        assert_eq!((bus.has_more(root.path()), bus.has_more(root.path())), (true, false));
        fs::remove_dir_all(devices(root.path()).join("0000:c2:00.0")).unwrap();
        assert!(!bus.has_more(root.path()), "what goes is seen by its chip");
    }

    #[test]
    fn the_drivers_table_decides_the_physical_id_and_the_domain_by_the_internal_number() {
        assert_eq!(function(0, 0xc1, Some(1)).physical_ids(), [5]);
        assert_eq!(function(1, 0xc1, Some(9)).physical_ids(), [13]);
        assert_eq!(function(0, 0xc2, Some(2)).physical_ids(), [2], "a row that cannot be read is no row");
        assert_eq!(function(0, 0x41, None).physical_ids(), Vec::<u32>::new());
        assert_eq!(function(0, 0xc1, None).physical_ids(), Vec::<u32>::new(), "two rows and no way to choose");
    }

    #[test]
    fn a_root_complex_is_told_from_a_device() {
        assert!(is_root("pci0000:c0"));
        for other in ["pci", "0000:c1:00.0", "pci0000", "pci_bus", "pcix:y"] {
            assert!(!is_root(other), "{other}");
        }
    }
}

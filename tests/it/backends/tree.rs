//! Sysfs trees as kernels, drivers and accidents make them.

use std::{fs, path::Path};

use npu_dra::{
    device::{self, Backend as _, Choice, Settings, example::Example, sysfs::Sysfs},
    domain::npu::{Family, Scan},
};

/// A PCI function: files by name and content.
fn function(host: &Path, bus: &str, files: &[(&str, &str)]) {
    let directory = host.join("sys/bus/pci/devices").join(bus);
    fs::create_dir_all(&directory).unwrap();
    for (name, content) in files {
        fs::write(directory.join(name), content).unwrap();
    }
}

async fn scan(host: &Path) -> Scan {
    Sysfs::new(host).scan().await.unwrap()
}

const VENDOR: (&str, &str) = ("vendor", "0x19e5\n");

#[tokio::test]
async fn families_go_by_device_id_and_other_chips_are_offered_too() {
    let host = tempfile::tempdir().unwrap();
    for (number, device) in ["0xd802", "0xd803", "0xd500", "0xd801", "0x1711"].into_iter().enumerate() {
        let id = number.to_string();
        function(host.path(), &format!("0000:0{number}:00.0"), &[VENDOR, ("device", device), ("dev_id", &id)]);
    }
    let mut chips = scan(host.path()).await.chips;
    chips.sort_by_key(|chip| chip.physical_id);
    let families: Vec<_> = chips.iter().map(|chip| chip.family).collect();
    assert_eq!(families, [Family::Ascend910B, Family::Ascend910C, Family::Ascend310P, Family::Other]);
    for chip in chips {
        assert_eq!((chip.chip_name.as_str(), chip.memory, chip.vdie, chip.board_id), ("", None, None, None));
    }
}

#[tokio::test]
async fn the_drivers_table_is_preferred_to_its_internal_number() {
    let host = tempfile::tempdir().unwrap();
    let table = "bdf udevid add_id\nc1:00.0 7 0\nc2:00.0 3 1\n";
    let common = [VENDOR, ("device", "0xd802"), ("devdrv_sysfs_bdf_to_devid", table)];
    function(host.path(), "0000:c1:00.0", &[&common[..], &[("dev_id", "0")]].concat());
    function(host.path(), "0000:c2:00.0", &[&common[..], &[("dev_id", "1")]].concat());
    let mut ids: Vec<_> = scan(host.path()).await.chips.iter().map(|c| (c.physical_id, c.bus_id.to_string())).collect();
    ids.sort();
    assert_eq!(ids, [(3, "0000:c2:00.0".to_owned()), (7, "0000:c1:00.0".to_owned())]);
}

#[tokio::test]
async fn the_dies_of_a_910c_pair_up_by_number() {
    let host = tempfile::tempdir().unwrap();
    for id in 0..4 {
        let number = id.to_string();
        function(host.path(), &format!("0000:0{id}:00.0"), &[VENDOR, ("device", "0xd803"), ("dev_id", &number)]);
    }
    let mut scan = scan(host.path()).await;
    scan.chips.sort_by_key(|chip| chip.physical_id);
    let seats: Vec<_> = scan.chips.iter().map(|chip| (chip.card_id, chip.device_id)).collect();
    assert_eq!(seats, [(Some(0), 0), (Some(0), 1), (Some(1), 0), (Some(1), 1)]);
    assert!(scan.dies_bound);
}

#[tokio::test]
async fn a_second_chip_behind_one_function_is_named_as_missing_since_nothing_tells_them_apart() {
    let host = tempfile::tempdir().unwrap();
    let files = [VENDOR, ("device", "0xd501"), ("dev_id", "4"), ("davinci_dev_num", "2")];
    function(host.path(), "0000:01:00.0", &files);
    let scan = scan(host.path()).await;
    assert_eq!(scan.chips.iter().map(|chip| chip.physical_id).collect::<Vec<_>>(), [4]);
    assert_eq!(scan.missing.len(), 1);
    assert!(scan.missing[0].why.contains("chip 5"), "{:?}", scan.missing);
}

#[tokio::test]
async fn a_chip_without_its_driver_is_named_as_missing() {
    let host = tempfile::tempdir().unwrap();
    function(host.path(), "0000:01:00.0", &[VENDOR, ("device", "0xd802")]);
    let scan = scan(host.path()).await;
    assert!(scan.chips.is_empty());
    assert!(scan.missing[0].what == "0000:01:00.0" && scan.missing[0].why.contains("driver"), "{:?}", scan.missing);
}

#[tokio::test]
async fn two_functions_with_one_physical_id_are_not_two_chips() {
    let host = tempfile::tempdir().unwrap();
    for bus in ["0000:01:00.0", "0000:02:00.0"] {
        function(host.path(), bus, &[VENDOR, ("device", "0xd802"), ("dev_id", "0")]);
    }
    let scan = scan(host.path()).await;
    assert_eq!((scan.chips.len(), scan.missing.len()), (1, 1));
}

#[tokio::test]
async fn odd_files_are_passed_over() {
    let host = tempfile::tempdir().unwrap();
    let devices = host.path().join("sys/bus/pci/devices");
    function(host.path(), "0000:c1:00.0", &[VENDOR, ("device", "0xd802"), ("dev_id", "0"), ("numa_node", "-1")]);
    function(host.path(), "not-a-device", &[VENDOR, ("device", "0xd802"), ("dev_id", "1")]);
    function(host.path(), "0000:c2:00.0", &[("vendor", "rubbish"), ("device", "0xd802"), ("dev_id", "2")]);
    function(host.path(), "0000:c3:00.0", &[VENDOR, ("dev_id", "3")]);
    function(host.path(), "0000:c4:00.0", &[("device", "0xd802")]);
    fs::create_dir_all(devices.join("0000:c4:00.0/vendor")).unwrap();
    fs::write(devices.join("0000:c5:00.0"), "a file where a directory should be").unwrap();
    std::os::unix::fs::symlink("0000:c6:00.0", devices.join("0000:c6:00.0")).unwrap();
    fs::write(devices.join("0000:c1:00.0/devdrv_sysfs_bdf_to_devid"), [0xff; 4096]).unwrap();
    nix::unistd::mkfifo(&devices.join("0000:c1:00.0/davinci_dev_num"), nix::sys::stat::Mode::S_IRUSR).unwrap();
    let scan = scan(host.path()).await;
    assert_eq!(scan.chips.len(), 1, "{scan:?}");
    assert_eq!((scan.chips[0].physical_id, scan.chips[0].numa_node), (0, None), "-1 is no node");
    assert!(scan.missing.is_empty());
}

#[tokio::test]
async fn the_version_file_of_the_driver_is_read_where_the_install_file_leads() {
    let host = tempfile::tempdir().unwrap();
    fs::create_dir_all(host.path().join("sys/bus/pci/devices")).unwrap();
    fs::create_dir_all(host.path().join("etc")).unwrap();
    fs::create_dir_all(host.path().join("opt/a/driver")).unwrap();
    fs::write(host.path().join("etc/ascend_install.info"), "Driver_Install_Path_Param=/opt/a\n").unwrap();
    fs::write(host.path().join("opt/a/driver/version.info"), "package_version=1\nVersion=24.1.rc3\n").unwrap();
    assert_eq!(scan(host.path()).await.driver_version, "24.1.rc3");
}

#[tokio::test]
async fn a_host_without_pci_is_a_fault_and_one_without_npus_is_empty() {
    let host = tempfile::tempdir().unwrap();
    assert!(Sysfs::new(host.path()).scan().await.is_err());
    fs::create_dir_all(host.path().join("sys/bus/pci/devices")).unwrap();
    assert!(scan(host.path()).await.chips.is_empty());
}

#[tokio::test]
async fn example_gpus_are_as_many_as_wanted_and_all_different() {
    let node = Example::new(300);
    let scan = node.scan().await.unwrap();
    let mut addresses: Vec<_> = scan.chips.iter().map(|chip| chip.bus_id).collect();
    addresses.dedup();
    assert_eq!(addresses.len(), 300);
    assert!(scan.chips.iter().all(|chip| chip.family == Family::Example && chip.memory.is_some()));
    assert_eq!(node.health().await.unwrap().len(), 300);
    let host = tempfile::tempdir().unwrap();
    let opened = device::open(&Settings::new(Choice::Example(8), host.path(), host.path())).unwrap();
    assert_eq!(opened.scan().await.unwrap().chips.len(), 8);
    assert_eq!(opened.status().state, "ready");
}

use std::{
    fs::Permissions,
    os::unix::fs::{PermissionsExt, symlink},
    sync::atomic::{AtomicBool, Ordering},
};

use proptest::prelude::*;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::*;

/// A CDI root, and a host where 8 cards and everything to bind exist.
struct World {
    dir: TempDir,
}

impl World {
    fn new() -> Self {
        let world = Self { dir: tempfile::tempdir().unwrap() };
        let host = world.host();
        let install = "opt/vendor/driver";
        for dir in
            ["dev", "etc", "usr/local/dcmi", "usr/local/bin", &format!("{install}/lib64"), &format!("{install}/tools")]
        {
            fs::create_dir_all(host.join(dir)).unwrap();
        }
        for n in 0..8 {
            world.node(&format!("davinci{n}"));
        }
        for name in ["davinci_manager", "devmm_svm", "hisi_hdc"] {
            world.node(name);
        }
        fs::write(host.join("etc/ascend_install.info"), "Driver_Install_Path_Param=/opt/vendor\n").unwrap();
        for file in ["etc/hccn.conf", "usr/local/bin/npu-smi", "opt/vendor/driver/version.info"] {
            fs::write(host.join(file), "").unwrap();
        }
        world
    }

    fn host(&self) -> PathBuf {
        self.dir.path().join("host")
    }

    /// A device node: a link, since only root can make nodes.
    fn node(&self, name: &str) {
        symlink("/dev/null", self.host().join("dev").join(name)).unwrap();
    }

    fn root(&self) -> PathBuf {
        self.dir.path().join("cdi")
    }

    fn settings(&self) -> Settings {
        Settings {
            root: self.root(),
            driver: DriverName::new("npu.huawei.com").unwrap(),
            host_root: self.host(),
            example: false,
            hide_from_ascend_runtime: true,
            optional_binds: Vec::new(),
        }
    }

    fn cdi(&self) -> Cdi {
        Cdi::open(self.settings()).unwrap()
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.root()).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

const UID: &str = "0a1c1f0e-55aa-4c6f-9e57-000000000001";
const VDIE: &str = "0B3D6A10-20E04410-0A148A4A-12C60050-0C0A0002";

fn uid() -> ClaimUid {
    ClaimUid::new(UID).unwrap()
}

fn injection(devices: &[(&str, &[u32])]) -> Injection {
    Injection {
        claim: ClaimRef { namespace: "team-a".to_owned(), name: "train".to_owned(), uid: uid() },
        devices: devices
            .iter()
            .map(|(name, ids)| InjectedDevice { name: format!("{UID}_{name}"), physical_ids: ids.to_vec(), vnpu: None })
            .collect(),
    }
}

fn written(cdi: &Cdi) -> String {
    fs::read_to_string(cdi.path(&uid())).unwrap()
}

#[test]
fn the_file_of_a_whole_npu_is_exactly_this() {
    let world = World::new();
    let cdi = world.cdi();
    assert!(cdi.ensure(&injection(&[(VDIE, &[3])])).unwrap());
    assert_eq!(written(&cdi), include_str!("../../tests/fixtures/cdi/whole-npu.json"));
    assert_eq!(world.names(), [format!("npu.huawei.com-claim_{UID}.json")]);
    let mode = fs::metadata(cdi.path(&uid())).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o644);
}

#[test]
fn a_910c_has_both_dies_in_one_device_and_a_look_has_the_manager_alone() {
    let world = World::new();
    world.node("dvpp_cmdlist");
    fs::create_dir(world.host().join("opt/vendor/driver/topo")).unwrap();
    fs::write(world.host().join("etc/hccl_rootinfo.json"), "").unwrap();
    let cdi = Cdi::open(Settings {
        hide_from_ascend_runtime: false,
        optional_binds: vec![OptionalBind::RootInfo, OptionalBind::Topo],
        ..world.settings()
    })
    .unwrap();
    let wanted = injection(&[(VDIE, &[4, 5]), ("look_pci-0000:c1:00.0", &[])]);
    cdi.ensure(&wanted).unwrap();
    assert_eq!(written(&cdi), include_str!("../../tests/fixtures/cdi/910c-and-look.json"));
    assert!(!written(&cdi).contains("LD_LIBRARY_PATH"));
    let found = cdi.list().unwrap();
    assert_eq!(found, [FoundFile { uid: uid(), content: Some(wanted) }]);
}

#[test]
fn example_devices_are_environment_only_and_need_no_host() {
    let world = World::new();
    let host_root = world.dir.path().join("absent");
    let cdi = Cdi::open(Settings { example: true, host_root, ..world.settings() }).unwrap();
    let wanted = injection(&[("gpu-2", &[2]), ("look_gpu-1", &[])]);
    cdi.ensure(&wanted).unwrap();
    let value: Value = serde_json::from_str(&written(&cdi)).unwrap();
    let devices = json!([
        {"name": format!("{UID}_gpu-2"), "containerEdits": {"env": [format!("NPU_DRA_EXAMPLE_DEVICE_2={UID}_gpu-2")]}},
        {"name": format!("{UID}_look_gpu-1"), "containerEdits": {"env": [format!("NPU_DRA_EXAMPLE_LOOK={UID}_look_gpu-1")]}},
    ]);
    assert_eq!(value["devices"], devices);
    assert_eq!(value["containerEdits"], json!({"env": ["NPU_DRA_CLAIM=team-a/train"]}));
    assert_eq!(cdi.list().unwrap()[0].content, Some(wanted));
}

#[test]
fn the_same_again_writes_nothing_and_a_changed_host_or_file_is_written_anew() {
    let world = World::new();
    let cdi = world.cdi();
    let wanted = injection(&[(VDIE, &[3])]);
    assert!(cdi.ensure(&wanted).unwrap());
    let content = written(&cdi);
    let inode = || std::os::unix::fs::MetadataExt::ino(&fs::metadata(cdi.path(&uid())).unwrap());
    let first = inode();
    assert!(!cdi.ensure(&wanted).unwrap());
    assert_eq!(inode(), first);
    for damage in ["", "{", "{}"] {
        fs::write(cdi.path(&uid()), damage).unwrap();
        assert!(cdi.ensure(&wanted).unwrap());
        assert_eq!(written(&cdi), content);
    }
    fs::remove_file(world.host().join("etc/hccn.conf")).unwrap();
    assert!(cdi.ensure(&wanted).unwrap());
    assert!(!written(&cdi).contains("hccn.conf"));
}

#[test]
fn a_missing_or_false_device_node_is_named_and_nothing_is_written() {
    let world = World::new();
    let cdi = world.cdi();
    let refused = |devices: &[(&str, &[u32])]| {
        let error = cdi.ensure(&injection(devices)).unwrap_err().to_string();
        assert!(world.names().is_empty());
        error
    };
    let error = refused(&[(VDIE, &[3, 9])]);
    assert!(error.starts_with("device node /dev/davinci9 cannot be given to a container: No such file"), "{error}");
    fs::remove_file(world.host().join("dev/davinci3")).unwrap();
    fs::write(world.host().join("dev/davinci3"), "").unwrap();
    assert!(
        refused(&[(VDIE, &[3])]).contains("/dev/davinci3 cannot be given to a container: it is no character device")
    );
    fs::remove_file(world.host().join("dev/hisi_hdc")).unwrap();
    assert!(refused(&[(VDIE, &[0])]).contains("/dev/hisi_hdc"));
}

#[test]
fn what_a_runtime_would_refuse_is_never_written() {
    let world = World::new();
    let cdi = world.cdi();
    for (bad, why) in [
        (injection(&[]), "it has no device"),
        (injection(&[("a/b", &[0])]), "is no name of a CDI device"),
        (injection(&[(VDIE, &[0]), (VDIE, &[1])]), "is in it twice"),
    ] {
        let error = cdi.ensure(&bad).unwrap_err().to_string();
        assert!(error.contains(why) && error.contains(UID), "{error}");
    }
    assert!(world.names().is_empty());
    let driver = DriverName::new("1st.example.com").unwrap();
    assert!(matches!(Cdi::open(Settings { driver, ..world.settings() }), Err(CdiError::Vendor(_))));
}

#[test]
fn a_file_is_removed_once_and_found_until_then() {
    let world = World::new();
    let cdi = world.cdi();
    assert!(!cdi.exists(&uid()).unwrap());
    cdi.ensure(&injection(&[(VDIE, &[3])])).unwrap();
    assert!(cdi.exists(&uid()).unwrap());
    assert!(cdi.remove(&uid()).unwrap());
    assert!(!cdi.remove(&uid()).unwrap());
    assert!(!cdi.exists(&uid()).unwrap());
    assert!(world.names().is_empty());
}

#[test]
fn a_root_that_vanishes_is_made_again_and_holds_nothing_meanwhile() {
    let world = World::new();
    let cdi = world.cdi();
    let mode = fs::metadata(world.root()).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o755);
    fs::remove_dir(world.root()).unwrap();
    assert!(cdi.list().unwrap().is_empty());
    assert!(!cdi.exists(&uid()).unwrap());
    assert!(!cdi.remove(&uid()).unwrap());
    cdi.settle().expect("nothing is there to be lost");
    assert!(cdi.ensure(&injection(&[(VDIE, &[3])])).unwrap());
    cdi.settle().unwrap();
    assert_eq!(cdi.list().unwrap().len(), 1);
}

#[test]
fn a_root_that_is_a_file_or_cannot_be_written_is_named_with_the_cause() {
    let world = World::new();
    fs::write(world.root(), "").unwrap();
    let error = Cdi::open(world.settings()).unwrap_err().to_string();
    assert!(error.contains(&format!("cannot create directory {}: ", world.root().display())), "{error}");
    fs::remove_file(world.root()).unwrap();
    let cdi = world.cdi();
    // A directory in the file's place cannot be replaced, by root neither.
    fs::create_dir_all(cdi.path(&uid()).join("x")).unwrap();
    let error = cdi.ensure(&injection(&[(VDIE, &[3])])).unwrap_err().to_string();
    assert!(error.contains(&format!("cannot replace {}: ", cdi.path(&uid()).display())), "{error}");
    assert_eq!(world.names().len(), 1, "no temporary file");
    assert_eq!(cdi.list().unwrap(), [FoundFile { uid: uid(), content: None }]);
    if nix::unistd::geteuid().is_root() {
        return; // root writes everywhere
    }
    fs::remove_dir_all(cdi.path(&uid())).unwrap();
    fs::set_permissions(world.root(), Permissions::from_mode(0o500)).unwrap();
    let error = cdi.ensure(&injection(&[(VDIE, &[3])])).unwrap_err().to_string();
    fs::set_permissions(world.root(), Permissions::from_mode(0o700)).unwrap();
    assert!(error.contains("Permission denied"), "{error}");
}

#[test]
fn files_of_others_are_left_alone_and_those_of_our_kind_are_reported() {
    let world = World::new();
    let cdi = world.cdi();
    cdi.ensure(&injection(&[(VDIE, &[3])])).unwrap();
    let older = format!("kind: npu.huawei.com/npu\ndevices:\n- name: {UID}_{VDIE}\n");
    let others = [
        ("nvidia.json", "{\"kind\": \"nvidia.com/gpu\"}"),
        ("npu.huawei.com-base.json", "{\"kind\": \"npu.huawei.com/npu\", \"devices\": [{\"name\": \"all\"}]}"),
        (&format!("npu.huawei.com-claim-{UID}.yaml"), older.as_str()),
        ("npu.huawei.com-claim_a_b.json", "not ours"),
        (&format!("other.example.com-claim_{UID}.json"), "not ours"),
        ("broken.yaml", "\u{0}"),
        ("notes.txt", "npu.huawei.com/npu"),
        (".npu.huawei.com-claim_x.json.1-0.tmp", "a leftover"),
        (".other-claim_x.json.1-0.tmp", "a leftover of another"),
    ];
    for (name, content) in others {
        fs::write(world.root().join(name), content).unwrap();
    }
    let cdi = world.cdi();
    assert_eq!(cdi.list().unwrap().len(), 1);
    let path = |name: &str| world.root().join(name);
    let conflicts = [
        Conflict { path: path("npu.huawei.com-base.json"), devices: vec![] },
        Conflict { path: path(&format!("npu.huawei.com-claim-{UID}.yaml")), devices: vec![format!("{UID}_{VDIE}")] },
    ];
    assert_eq!(cdi.conflicts().unwrap(), conflicts);
    cdi.remove(&uid()).unwrap();
    let mut left: Vec<_> = others.iter().map(|(name, _)| (*name).to_owned()).collect();
    left.retain(|name| name != ".npu.huawei.com-claim_x.json.1-0.tmp");
    left.sort();
    assert_eq!(world.names(), left, "only our own leftover is swept");
}

#[test]
fn a_reader_never_sees_half_a_file() {
    let world = World::new();
    let cdi = world.cdi();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut seen = 0;
            while !done.load(Ordering::Relaxed) {
                let entries = fs::read_dir(world.root()).unwrap();
                for path in entries
                    .map(|entry| entry.unwrap().path())
                    .filter(|path| path.extension().is_some_and(|e| e == "json"))
                {
                    if let Ok(bytes) = fs::read(&path) {
                        serde_json::from_slice::<Spec>(&bytes).unwrap_or_else(|error| panic!("{error}: {bytes:?}"));
                        seen += 1;
                    }
                }
                std::thread::yield_now();
            }
            seen
        });
        for turn in 0..150 {
            let ids: Vec<_> = (0..=turn % 8).collect();
            cdi.ensure(&injection(&[(VDIE, &ids)])).unwrap();
            if turn % 5 == 0 {
                cdi.remove(&uid()).unwrap();
            }
        }
        done.store(true, Ordering::Relaxed);
        assert!(reader.join().unwrap() > 0);
    });
}

fn claims() -> impl Strategy<Value = Injection> {
    let device = prop_oneof![
        prop::collection::vec(0_u32..8, 1..3).prop_map(|ids| (format!("pci-0000:{:02x}:00.0", ids[0]), ids)),
        (0_u32..8).prop_map(|id| (format!("look_pci-0000:{id:02x}:00.0"), vec![])),
    ];
    (
        "[0-9a-f]{8}(-[0-9a-f]{4}){3}",
        "[a-z]{0,5}",
        "[ -~]{0,9}",
        prop::collection::btree_map("[a-z]{1,3}", device, 1..6),
    )
        .prop_map(|(uid, namespace, name, devices)| Injection {
            devices: devices
                .into_iter()
                .map(|(key, (id, physical_ids))| InjectedDevice {
                    name: format!("{uid}_{id}-{key}"),
                    physical_ids,
                    vnpu: None,
                })
                .collect(),
            claim: ClaimRef { namespace, name, uid: ClaimUid::new(uid).unwrap() },
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn every_file_reads_back_as_what_it_was_written_for(wanted in claims(), example: bool) {
        let world = World::new();
        let cdi = Cdi::open(Settings { example, ..world.settings() }).unwrap();
        let bytes = cdi.render(&wanted).unwrap();
        prop_assert_eq!(&bytes, &cdi.render(&wanted).unwrap());
        let spec: Spec = serde_json::from_slice(&bytes).unwrap();
        prop_assert!(spec.devices.iter().all(|device| is_cdi_device_name(&device.name)));
        prop_assert!(spec.devices.iter().all(|device| !device.container_edits.is_empty()));
        let edits = spec.devices.iter().map(|device| &device.container_edits).chain([&spec.container_edits]);
        for env in edits.flat_map(|edits| &edits.env) {
            prop_assert!(env.split_once('=').is_some_and(|(name, _)| !name.is_empty() && name != "LD_LIBRARY_PATH"));
        }
        prop_assert_eq!(cdi.parse(&wanted.claim.uid, &bytes), Some(wanted));
    }
}

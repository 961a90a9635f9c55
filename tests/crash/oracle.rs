//! What must hold on a node whatever was cut off there. It goes by three things alone: the world of NPUs, the CDI
//! directory, and what kubelet was told. It knows nothing of how the daemon keeps its records.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use anyhow::Context as _;
use dcmi::world::{Vnpu, World};
use serde_json::Value;
use testkit::kubelet::client::Device;

/// What kubelet knows of a claim.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Known {
    /// It was answered as prepared with these devices, and its unprepare was not asked for.
    Prepared(Vec<Device>),
    /// A call failed or was not answered: it may be there or not.
    Unsure,
    /// It was never asked for, or answered as released.
    Gone,
}

/// What a claim asks of a card.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Want {
    /// All of it.
    Whole(u32),
    /// A part by this template.
    Part(u32, &'static str),
    /// A look, by adminAccess.
    Look(u32),
}

impl Want {
    pub(crate) fn phy(&self) -> u32 {
        match self {
            Self::Whole(phy) | Self::Part(phy, _) | Self::Look(phy) => *phy,
        }
    }
}

/// A claim as the oracle sees it.
#[derive(Debug, Clone)]
pub(crate) struct Claim {
    pub(crate) uid: String,
    pub(crate) wants: Vec<Want>,
    pub(crate) known: Known,
}

/// A device in a CDI file.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Node {
    /// `/dev/davinci<phy>`
    Chip(u32),
    /// `/dev/vdavinci<id>`
    Vnpu(u32),
}

/// CDI name of a device, and the NPU nodes that it brings.
type Names = BTreeMap<String, Vec<Node>>;

/// What is there to be seen.
#[derive(Debug, Clone)]
pub(crate) struct Scene {
    vnpus: Vec<Vnpu>,
    /// Memory in MB, AI cores and AI CPUs, by physical id.
    chips: BTreeMap<u32, [u64; 3]>,
    /// By file name; the error of one that cannot be read.
    files: BTreeMap<String, Result<Names, String>>,
}

impl Scene {
    pub(crate) fn look(world: &World, cdi: &Path) -> anyhow::Result<Self> {
        let data = world.data().context("the world")?;
        let chip =
            |chip: &dcmi::world::Chip| (chip.phy, [chip.memory.mb(), u64::from(chip.aicores), u64::from(chip.aicpus)]);
        let mut files = BTreeMap::new();
        for entry in fs::read_dir(cdi)? {
            let entry = entry?;
            let content = match fs::read(entry.path()) {
                Ok(bytes) => names(&bytes).map_err(|error| format!("{error:#}")),
                // Removed meanwhile.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                Err(error) => Err(error.to_string()),
            };
            files.insert(entry.file_name().to_string_lossy().into_owned(), content);
        }
        Ok(Self { vnpus: world.vnpus().context("the vNPUs")?, chips: data.chips().map(chip).collect(), files })
    }

    pub(crate) fn vnpus(&self) -> &[Vnpu] {
        &self.vnpus
    }

    /// Everything that is wrong, in words; `kept` are vNPUs that nobody may have touched.
    pub(crate) fn complaints(&self, claims: &[Claim], kept: &[Vnpu]) -> Vec<String> {
        let mut found = Vec::new();
        let mut owners: BTreeMap<&Node, Vec<&str>> = BTreeMap::new();
        for (name, content) in &self.files {
            let Some(claim) = claims.iter().find(|claim| name.contains(&claim.uid)) else {
                found.push(format!("the CDI file {name} is of no claim"));
                continue;
            };
            if name.starts_with('.') {
                found.push(format!("a temporary file is left: {name}"));
                continue;
            }
            if claim.known == Known::Gone {
                found.push(format!("the CDI file {name} is of a claim that is gone"));
            }
            match content {
                Ok(devices) => {
                    for node in devices.values().flatten() {
                        owners.entry(node).or_default().push(name);
                    }
                }
                Err(why) => found.push(format!("the CDI file {name} cannot be read: {why}")),
            }
        }
        for (node, files) in owners.iter().filter(|(_, files)| files.len() > 1) {
            found.push(format!("{node:?} is in more than one place: {}", files.join(", ")));
        }
        let injected: BTreeSet<u32> = owners
            .keys()
            .filter_map(|node| match node {
                Node::Vnpu(id) => Some(*id),
                Node::Chip(_) => None,
            })
            .collect();
        for claim in claims {
            if let Known::Prepared(devices) = &claim.known {
                found.extend(self.missing(claim, devices));
            }
        }
        self.check_vnpus(claims, kept, &injected, &mut found);
        self.check_room(&owners, &mut found);
        found
    }

    /// What a claim that was answered as prepared lacks.
    fn missing(&self, claim: &Claim, answer: &[Device]) -> Vec<String> {
        let uid = &claim.uid;
        let mut files = self.files.iter().filter(|(name, _)| name.contains(uid) && !name.starts_with('.'));
        let (Some((_, Ok(devices))), None) = (files.next(), files.next()) else {
            return vec![format!("claim {uid} was answered as prepared and does not have one readable CDI file")];
        };
        let mut found = Vec::new();
        let mut left: Vec<&Node> = Vec::new();
        for id in answer.iter().flat_map(|device| &device.cdi_device_ids) {
            match id.split_once('=').and_then(|(_, name)| devices.get(name)) {
                Some(nodes) => left.extend(nodes),
                None => found.push(format!("the CDI file of claim {uid} has no device {id}")),
            }
        }
        for want in &claim.wants {
            let is_it = |node: &&Node| match (want, node) {
                (Want::Whole(phy), Node::Chip(chip)) => phy == chip,
                (Want::Part(phy, template), Node::Vnpu(id)) => {
                    self.vnpus.iter().any(|vnpu| vnpu.id == *id && vnpu.phy == *phy && vnpu.template == *template)
                }
                _ => false,
            };
            match (want, left.iter().position(is_it)) {
                (Want::Look(_), _) => {}
                (_, Some(index)) => drop(left.remove(index)),
                (_, None) => found.push(format!("claim {uid} was promised {want:?} and does not have it")),
            }
        }
        found.extend(left.iter().map(|node| format!("claim {uid} has {node:?}, which it did not ask for")));
        found
    }

    fn check_vnpus(&self, claims: &[Claim], kept: &[Vnpu], injected: &BTreeSet<u32>, found: &mut Vec<String>) {
        for vnpu in kept.iter().filter(|vnpu| !self.vnpus.contains(vnpu)) {
            found.push(format!("vNPU {} of somebody else was touched", vnpu.id));
        }
        for id in injected.iter().filter(|id| !self.vnpus.iter().any(|vnpu| vnpu.id == **id)) {
            // The file of a claim that nobody was told of may wait for its unprepare.
            if claims.iter().all(|claim| claim.known != Known::Unsure) {
                found.push(format!("vNPU {id} is in a CDI file and does not exist"));
            }
        }
        // Those that no file names must be of a claim whose unprepare is still to come.
        let mut room: Vec<(u32, &str)> = Vec::new();
        for claim in claims.iter().filter(|claim| claim.known == Known::Unsure) {
            room.extend(claim.wants.iter().filter_map(|want| match want {
                Want::Part(phy, template) => Some((*phy, *template)),
                Want::Whole(_) | Want::Look(_) => None,
            }));
        }
        for vnpu in self.vnpus.iter().filter(|vnpu| !injected.contains(&vnpu.id) && !kept.contains(vnpu)) {
            match room.iter().position(|slot| *slot == (vnpu.phy, vnpu.template.as_str())) {
                Some(index) => drop(room.swap_remove(index)),
                None => found.push(format!("vNPU {} ({} of chip {}) is of no claim", vnpu.id, vnpu.template, vnpu.phy)),
            }
        }
    }

    fn check_room(&self, owners: &BTreeMap<&Node, Vec<&str>>, found: &mut Vec<String>) {
        for (phy, total) in &self.chips {
            let mut taken = [0; 3];
            for vnpu in self.vnpus.iter().filter(|vnpu| vnpu.phy == *phy) {
                for (sum, part) in
                    taken.iter_mut().zip([vnpu.memory_mb, u64::from(vnpu.aicores), u64::from(vnpu.aicpus)])
                {
                    *sum += part;
                }
            }
            if taken.iter().zip(total).any(|(taken, total)| taken > total) {
                found.push(format!("chip {phy} is over-committed: {taken:?} of {total:?}"));
            }
            if taken != [0; 3] && owners.contains_key(&Node::Chip(*phy)) {
                found.push(format!("chip {phy} was given whole and is cut"));
            }
        }
    }
}

/// The devices of a CDI file.
fn names(bytes: &[u8]) -> anyhow::Result<Names> {
    let spec: Value = serde_json::from_slice(bytes)?;
    let mut found = Names::new();
    for device in spec["devices"].as_array().context("no devices")? {
        let name = device["name"].as_str().context("a device without a name")?;
        let mut nodes = Vec::new();
        for node in device["containerEdits"]["deviceNodes"].as_array().into_iter().flatten() {
            let path = node["hostPath"].as_str().or(node["path"].as_str()).context("a node without a path")?;
            let number = |prefix: &str| path.strip_prefix(prefix).and_then(|number| number.parse().ok());
            nodes.extend(number("/dev/davinci").map(Node::Chip).or(number("/dev/vdavinci").map(Node::Vnpu)));
        }
        if found.insert(name.to_owned(), nodes).is_some() {
            anyhow::bail!("two devices are named {name}");
        }
    }
    Ok(found)
}

/// An oracle that finds nothing wrong proves nothing: each kind of harm is planted here and must be found.
#[cfg(test)]
mod tests {
    use dcmi::world::Profile;
    use serde_json::json;

    use super::*;

    const PART: &str = "vir05_1c_8g";

    /// A node with claim `a` on chip 3, claim `b` with a part of chip 0, and nothing wrong.
    struct Planted {
        dir: tempfile::TempDir,
        world: World,
        claims: Vec<Claim>,
    }

    impl Planted {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            fs::create_dir(dir.path().join("cdi")).unwrap();
            let world = World::create(dir.path().join("world"), Profile::Ascend910B4).unwrap();
            let id = world.add_vnpu(0, PART).unwrap();
            let claims = vec![claim("a", Want::Whole(3)), claim("b", Want::Part(0, PART))];
            let planted = Self { dir, world, claims };
            planted.file("x_a.json", &[("a_0", "/dev/davinci3".to_owned())]);
            planted.file("x_b.json", &[("b_0", format!("/dev/vdavinci{id}"))]);
            planted
        }

        fn file(&self, name: &str, devices: &[(&str, String)]) {
            let device = |(name, host): &(&str, String)| {
                json!({"name": name, "containerEdits": {"deviceNodes": [
                    {"path": "/dev/davinci_manager"}, {"path": "/dev/davinci0", "hostPath": host},
                ]}})
            };
            let devices: Vec<_> = devices.iter().map(device).collect();
            let spec = json!({"cdiVersion": "0.5.0", "kind": "npu.huawei.com/npu", "devices": devices});
            fs::write(self.dir.path().join("cdi").join(name), spec.to_string()).unwrap();
        }

        fn remove(&self, name: &str) {
            fs::remove_file(self.dir.path().join("cdi").join(name)).unwrap();
        }

        /// What is wrong; `kept` are the vNPUs of others.
        fn complaints(&self, kept: &[Vnpu]) -> String {
            let scene = Scene::look(&self.world, &self.dir.path().join("cdi")).unwrap();
            scene.complaints(&self.claims, kept).join("; ")
        }
    }

    fn claim(uid: &str, want: Want) -> Claim {
        let id = format!("npu.huawei.com/npu={uid}_0");
        let device = Device { cdi_device_ids: vec![id], ..Device::default() };
        Claim { uid: format!("_{uid}"), wants: vec![want], known: Known::Prepared(vec![device]) }
    }

    #[test]
    fn a_node_where_nothing_is_wrong_gives_no_complaint() {
        let planted = Planted::new();
        assert_eq!(planted.complaints(&planted.world.vnpus().unwrap()), "");
    }

    #[test]
    fn a_device_in_two_files_is_found() {
        let mut planted = Planted::new();
        planted.claims.push(claim("c", Want::Whole(3)));
        planted.file("x_c.json", &[("c_0", "/dev/davinci3".to_owned())]);
        assert_eq!(planted.complaints(&[]), "Chip(3) is in more than one place: x_a.json, x_c.json");
    }

    #[test]
    fn a_prepared_claim_without_its_device_is_found() {
        let planted = Planted::new();
        planted.remove("x_a.json");
        assert!(planted.complaints(&[]).contains("does not have one readable CDI file"));
        planted.file("x_a.json", &[("a_0", "/dev/davinci4".to_owned())]);
        let text = planted.complaints(&[]);
        assert!(text.contains("promised Whole(3)") && text.contains("has Chip(4)"), "{text}");
        planted.file("x_a.json", &[("a_1", "/dev/davinci3".to_owned())]);
        assert!(planted.complaints(&[]).contains("has no device npu.huawei.com/npu=a_0"));
        fs::write(planted.dir.path().join("cdi/x_a.json"), "{").unwrap();
        assert!(planted.complaints(&[]).contains("cannot be read"));
    }

    #[test]
    fn what_a_released_claim_left_is_found() {
        let mut planted = Planted::new();
        planted.claims[0].known = Known::Gone;
        assert_eq!(planted.complaints(&[]), "the CDI file x_a.json is of a claim that is gone");
        planted.remove("x_a.json");
        planted.file(".x_a.json.7.tmp", &[]);
        assert_eq!(planted.complaints(&[]), "a temporary file is left: .x_a.json.7.tmp");
        planted.remove(".x_a.json.7.tmp");
        planted.file("x_z.json", &[]);
        assert_eq!(planted.complaints(&[]), "the CDI file x_z.json is of no claim");
    }

    #[test]
    fn a_leaked_vnpu_is_found_and_one_that_waits_for_an_unprepare_is_not() {
        let mut planted = Planted::new();
        planted.world.add_vnpu(1, PART).unwrap();
        assert!(planted.complaints(&[]).contains("(vir05_1c_8g of chip 1) is of no claim"));
        planted.claims.push(Claim { known: Known::Unsure, ..claim("c", Want::Part(1, PART)) });
        assert_eq!(planted.complaints(&[]), "");
        planted.world.add_vnpu(1, PART).unwrap();
        assert!(planted.complaints(&[]).contains("is of no claim"), "one claim does not account for two");
    }

    #[test]
    fn a_vnpu_that_was_destroyed_or_made_again_is_found() {
        let planted = Planted::new();
        let kept = planted.world.vnpus().unwrap();
        planted.world.remove_vnpu(kept[0].id).unwrap();
        let text = planted.complaints(&kept);
        for part in ["of somebody else was touched", "does not exist", "promised Part(0, \"vir05_1c_8g\")"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn an_over_committed_card_is_found() {
        let planted = Planted::new();
        planted.world.edit_chip(0, |chip| chip.aicpus = 0).unwrap();
        assert!(planted.complaints(&[]).contains("chip 0 is over-committed"));
        planted.world.edit_chip(0, |chip| chip.aicpus = 7).unwrap();
        planted.file("x_a.json", &[("a_0", "/dev/davinci0".to_owned())]);
        assert!(planted.complaints(&[]).contains("chip 0 was given whole and is cut"));
    }
}

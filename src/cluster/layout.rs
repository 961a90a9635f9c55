//! What has to be written so that the API server has the wanted slices: a pure comparison.
//!
//! A pool's generation changes only when slices come or go or devices move between them; then every slice is written
//! with the new one, and the pool is unusable for as long as that takes. Anything else rewrites just the slice that it
//! is about. A slice that somebody deleted comes back as it was.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

use crate::domain::slice::Pool;

use super::wire::{self, Device, Metadata, Slice, Spec, same_spec};

/// The slices of ours that the API server has, by name.
pub(crate) type Observed = BTreeMap<String, Slice>;

/// Something to write.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Step {
    /// Delete a slice that is not wanted, exactly as it was seen.
    Delete(Metadata),
    /// Create a slice.
    Create(Slice),
    /// Replace a slice.
    Replace(Slice),
}

/// All that is to be written, in order.
#[derive(Debug, PartialEq)]
pub(crate) struct Layout {
    /// The pool's generation when it is done.
    pub(crate) generation: i64,
    /// Names of the wanted slices, in order.
    pub(crate) names: Vec<String>,
    /// What to write.
    pub(crate) steps: Vec<Step>,
}

/// Who owns the slices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Owner {
    /// The node, with this UID.
    Node(String),
    /// We may not read the node: an owner that is there stays, none is added.
    Unreadable,
}

/// Name of a slice: sorts as its index, is the same after a lost answer, and is unlike every other driver's and node's.
pub(crate) fn name(index: usize, driver: &str, node: &str) -> String {
    // FNV-1a, 64 bits: has to stay the same for ever, which the standard library's hash does not promise.
    let hash = driver
        .bytes()
        .chain([0])
        .chain(node.bytes())
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    format!("{index:05x}-{hash:016x}")
}

/// Compares. `highest` is the highest generation that this process has seen or given.
pub(crate) fn plan(
    observed: &Observed,
    pool: &Pool,
    node: &str,
    owner: &Owner,
    highest: i64,
    with_taints: bool,
) -> Layout {
    let count = i64::try_from(pool.slices.len()).unwrap_or(i64::MAX);
    let wanted: Vec<(String, Vec<Device>, Option<serde_json::Value>)> = pool
        .slices
        .iter()
        .map(|slice| {
            let mut devices: Vec<_> = slice.devices.iter().map(Device::of).collect();
            if !with_taints {
                for device in &mut devices {
                    device.taints = None;
                }
            }
            (name(slice.index, pool.driver.as_str(), node), devices, wire::shared_counters(&slice.counters))
        })
        .collect();
    let names: Vec<String> = wanted.iter().map(|(name, ..)| name.clone()).collect();
    let kept: BTreeSet<&str> = names.iter().map(String::as_str).collect();
    // The pool's name cannot be changed in place.
    let usable = |slice: &Slice| slice.spec.pool.name == pool.name.as_str();

    let mut steps = Vec::new();
    for (name, slice) in observed {
        if !kept.contains(name.as_str()) || !usable(slice) {
            steps.push(Step::Delete(slice.metadata.clone()));
        }
    }

    let present: Vec<&Slice> = names.iter().filter_map(|name| observed.get(name)).filter(|s| usable(s)).collect();
    let seen = observed.values().filter(|s| usable(s)).map(|s| s.spec.pool.generation).max();
    let highest = seen.unwrap_or(0).max(highest);
    let generation = if stands(&wanted, observed, &present, count, highest) { highest.max(1) } else { highest + 1 };

    for (name, devices, shared_counters) in wanted {
        let spec = Spec {
            driver: pool.driver.to_string(),
            pool: wire::Pool { name: pool.name.to_string(), generation, resource_slice_count: count },
            node_name: Some(node.to_owned()),
            devices: Some(devices).filter(|list| !list.is_empty()),
            shared_counters,
        };
        let stored = observed.get(&name).filter(|slice| usable(slice));
        let mut slice = Slice {
            api_version: "resource.k8s.io/v1".to_owned(),
            kind: "ResourceSlice".to_owned(),
            metadata: Metadata { name, owner_references: owners(owner, node), ..Metadata::default() },
            spec,
        };
        match stored {
            None => steps.push(Step::Create(slice)),
            Some(stored) => {
                let same_owner = *owner == Owner::Unreadable
                    || stored.metadata.owner_references.as_deref().unwrap_or_default()
                        == slice.metadata.owner_references.as_deref().unwrap_or_default();
                if !same_owner || !same_spec(&stored.spec, &slice.spec) {
                    slice.spec.keep_taint_times(&stored.spec);
                    let owners = if *owner == Owner::Unreadable {
                        stored.metadata.owner_references.clone()
                    } else {
                        slice.metadata.owner_references
                    };
                    slice.metadata = Metadata { owner_references: owners, ..stored.metadata.clone() };
                    steps.push(Step::Replace(slice));
                }
            }
        }
    }
    Layout { generation, names, steps }
}

/// True if what is there is of one generation and divides the devices as wanted, so that the generation can stay.
fn stands(
    wanted: &[(String, Vec<Device>, Option<serde_json::Value>)],
    observed: &Observed,
    present: &[&Slice],
    count: i64,
    highest: i64,
) -> bool {
    let whole = present.iter().all(|s| s.spec.pool.generation == highest && s.spec.pool.resource_slice_count == count);
    let members = |devices: &[Device]| devices.iter().map(|device| device.name.clone()).collect::<BTreeSet<_>>();
    let moved = wanted
        .iter()
        .filter(|(name, devices, _)| observed.get(name).is_some_and(|s| members(s.spec.devices()) != members(devices)))
        .count();
    whole && moved <= 1
}

fn owners(owner: &Owner, node: &str) -> Option<Vec<OwnerReference>> {
    match owner {
        Owner::Unreadable => None,
        Owner::Node(uid) => Some(vec![OwnerReference {
            api_version: "v1".to_owned(),
            kind: "Node".to_owned(),
            name: node.to_owned(),
            uid: uid.clone(),
            controller: Some(true),
            block_owner_deletion: None,
        }]),
    }
}

#[cfg(test)]
mod tests {
    use crate::domain::{
        names::{DriverName, PoolName},
        slice::{Device as WantedDevice, Effect, Slice as WantedSlice, Taint},
    };

    use super::*;

    fn device(name: usize, tainted: bool) -> WantedDevice {
        let taint = Taint { key: "k".into(), value: "v".into(), effect: Effect::NoSchedule };
        WantedDevice {
            name: format!("npu-{name}"),
            attributes: [("x".to_owned(), crate::domain::slice::Attribute::Int(1))].into(),
            taints: if tainted { vec![taint] } else { Vec::new() },
            ..WantedDevice::default()
        }
    }

    fn pool(name: &str, devices: &[WantedDevice]) -> Pool {
        let mut slices: Vec<_> = devices
            .chunks(2)
            .enumerate()
            .map(|(index, devices)| WantedSlice { index, devices: devices.to_vec(), ..WantedSlice::default() })
            .collect();
        if slices.is_empty() {
            slices.push(WantedSlice::default());
        }
        Pool { driver: DriverName::new("d").unwrap(), name: PoolName::new(name).unwrap(), slices }
    }

    fn run(observed: &mut Observed, pool: &Pool, highest: i64) -> (i64, Vec<String>) {
        let layout = plan(observed, pool, "node", &Owner::Node("uid".into()), highest, true);
        let mut log = Vec::new();
        for step in layout.steps {
            match step {
                Step::Delete(metadata) => {
                    observed.remove(&metadata.name);
                    log.push(format!("delete {}", &metadata.name[..5]));
                }
                Step::Create(slice) => {
                    log.push(format!("create {} {}", &slice.metadata.name[..5], slice.spec.pool.generation));
                    assert!(observed.insert(slice.metadata.name.clone(), slice).is_none());
                }
                Step::Replace(slice) => {
                    log.push(format!("replace {} {}", &slice.metadata.name[..5], slice.spec.pool.generation));
                    assert!(observed.insert(slice.metadata.name.clone(), slice).is_some());
                }
            }
        }
        let again = plan(observed, pool, "node", &Owner::Node("uid".into()), layout.generation, true);
        assert!(again.steps.is_empty(), "a second look finds work: {:?}", again.steps);
        (layout.generation, log)
    }

    #[test]
    fn a_device_change_rewrites_its_slice_only_and_keeps_the_generation() {
        let mut observed = Observed::new();
        let mut devices: Vec<_> = (0..4).map(|n| device(n, false)).collect();
        assert_eq!(
            run(&mut observed, &pool("p", &devices), 0),
            (1, vec!["create 00000 1".into(), "create 00001 1".into()])
        );
        devices[3] = device(3, true);
        assert_eq!(run(&mut observed, &pool("p", &devices), 1), (1, vec!["replace 00001 1".into()]));
        devices[0] = device(0, true);
        devices[3] = device(3, false);
        assert_eq!(
            run(&mut observed, &pool("p", &devices), 1),
            (1, vec!["replace 00000 1".into(), "replace 00001 1".into()])
        );
    }

    #[test]
    fn slices_that_come_or_go_and_devices_that_move_give_all_a_new_generation() {
        let mut observed = Observed::new();
        let devices: Vec<_> = (0..5).map(|n| device(n, false)).collect();
        run(&mut observed, &pool("p", &devices[..4]), 0);
        let (generation, log) = run(&mut observed, &pool("p", &devices), 1);
        assert_eq!((generation, log.len()), (2, 3));
        assert!(observed.values().all(|s| s.spec.pool.generation == 2 && s.spec.pool.resource_slice_count == 3));
        let (generation, log) = run(&mut observed, &pool("p", &devices[1..]), 2);
        assert_eq!(
            (generation, log.as_slice()),
            (3, &["delete 00002".into(), "replace 00000 3".into(), "replace 00001 3".into()][..])
        );
        let (generation, log) = run(&mut observed, &pool("p", &[]), 3);
        assert_eq!((generation, log.len()), (4, 2));
    }

    #[test]
    fn a_deleted_slice_comes_back_in_the_generation_of_the_others() {
        let mut observed = Observed::new();
        let devices: Vec<_> = (0..4).map(|n| device(n, false)).collect();
        run(&mut observed, &pool("p", &devices), 7);
        observed.remove(&name(1, "d", "node"));
        assert_eq!(run(&mut observed, &pool("p", &devices), 7), (7, vec!["create 00001 7".into()]));
        observed.clear();
        assert_eq!(run(&mut observed, &pool("p", &devices), 7).0, 7);
    }

    #[test]
    fn a_change_that_was_cut_off_half_way_is_done_anew() {
        let mut observed = Observed::new();
        let devices: Vec<_> = (0..4).map(|n| device(n, false)).collect();
        run(&mut observed, &pool("p", &devices), 0);
        observed.get_mut(&name(0, "d", "node")).unwrap().spec.pool.generation = 2;
        assert_eq!(run(&mut observed, &pool("p", &devices), 0).0, 3);
    }

    #[test]
    fn a_slice_of_another_pool_is_replaced_and_a_foreign_index_deleted() {
        let mut observed = Observed::new();
        let devices: Vec<_> = (0..2).map(|n| device(n, false)).collect();
        run(&mut observed, &pool("old", &devices), 0);
        let (generation, log) = run(&mut observed, &pool("new", &devices), 0);
        assert_eq!((generation, log), (1, vec!["delete 00000".into(), "create 00000 1".into()]));
    }

    #[test]
    fn a_node_made_anew_becomes_the_owner_and_an_unreadable_one_changes_nothing() {
        let mut observed = Observed::new();
        let pool = pool("p", &[device(0, false)]);
        run(&mut observed, &pool, 0);
        let owned = |owner| plan(&observed, &pool, "node", &owner, 1, true).steps.len();
        assert_eq!(owned(Owner::Node("uid".into())), 0);
        assert_eq!(owned(Owner::Node("other".into())), 1);
        assert_eq!(owned(Owner::Unreadable), 0);
    }

    #[test]
    fn names_sort_by_index_and_differ_by_driver_and_node() {
        assert!(name(9, "d", "n") < name(16, "d", "n"));
        assert_ne!(name(0, "d", "n")[6..], name(0, "d", "m")[6..]);
        assert_ne!(name(0, "da", "n")[6..], name(0, "d", "an")[6..]);
        assert!(crate::domain::names::is_dns_subdomain(&name(0, "npu.huawei.com", "node-1")));
    }
}

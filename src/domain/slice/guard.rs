//! Placeholders against a fault of Kubernetes 1.34's scheduler.
//!
//! That scheduler checks the capacity of a shared device against the wrong device: the one that stands in the slice at
//! the number of the request's device (kubernetes/kubernetes issue 133705, mended in 1.35 only). So a slice begins with
//! 32 devices, the most that a claim can have, that always have room, and from which nothing can be allocated: each
//! takes one of a counter that has none. Where counters are off, only a class that selects `type == "npu"` keeps claims
//! off them.

use std::collections::BTreeMap;

use super::{Attribute, Capacity, Counters, DEVICES_PER_SLICE, Device, MEMORY, Policy, Slice, chunked};
use crate::domain::{claim::RESULTS_MAX, model::Kept, quantity::Quantity};

/// Prefix of a placeholder's name.
pub(super) const PREFIX: &str = "placeholder";
/// The counter of which there is none.
const COUNTER: &str = "none";
/// 1 Pi: more than any claim asks for.
const ROOM: u64 = 1 << 50;

/// Shared cards in slices, each behind placeholders if the server is a 1.34.
pub(super) fn guarded(cards: Vec<Device>, kept: Kept, blank: &Device) -> Vec<Slice> {
    if !kept.is_1_34 {
        return chunked(cards, DEVICES_PER_SLICE);
    }
    let mut slices = chunked(cards, DEVICES_PER_SLICE - RESULTS_MAX);
    let counted = kept.partitionable == Some(true);
    for (number, slice) in slices.iter_mut().enumerate() {
        let set = format!("{PREFIX}-{number}");
        let placeholders = (0..RESULTS_MAX).map(|place| placeholder(&set, place, counted, blank));
        slice.devices = placeholders.chain(std::mem::take(&mut slice.devices)).collect();
        if counted {
            slice.counters.insert(set, Counters::from([(COUNTER.to_owned(), Quantity::count(0))]));
        }
    }
    slices
}

fn placeholder(set: &str, place: usize, counted: bool, blank: &Device) -> Device {
    let one = Quantity::count(1);
    let mut device = blank.clone();
    device.name = format!("{set}-{place}");
    device.attributes.insert("type".to_owned(), Attribute::Text(PREFIX.to_owned()));
    let capacity = Capacity { value: Quantity::bytes(ROOM), policy: Some(Policy::From(one)) };
    device.capacity = BTreeMap::from([(MEMORY.to_owned(), capacity)]);
    device.shared = true;
    device.consumes = counted.then(|| (set.to_owned(), Counters::from([(COUNTER.to_owned(), one)])));
    device
}

//! Releases and feature gates: what a server of a release does with fields that it knows but that are switched off.
//!
//! A gated field that is off is dropped without a word before validation, unless the stored object already uses the feature.

use std::collections::BTreeSet;

use serde_json::Value;

/// A Kubernetes release that the server can play.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Release {
    /// 1.34
    V1_34,
    /// 1.35
    V1_35,
    /// 1.36
    V1_36,
    /// 1.37
    V1_37,
}

impl Release {
    /// The minor number, 34 to 37.
    #[must_use]
    pub fn minor(self) -> u32 {
        match self {
            Self::V1_34 => 34,
            Self::V1_35 => 35,
            Self::V1_36 => 36,
            Self::V1_37 => 37,
        }
    }
}

/// A feature gate of the API server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Gate {
    /// `DRAConsumableCapacity`: `allowMultipleAllocations`, `requestPolicy`, `capacity` of claims, `shareID`.
    ConsumableCapacity,
    /// `DRAPartitionableDevices`: `sharedCounters`, `consumesCounters`, per-device node selection.
    PartitionableDevices,
    /// `DRADeviceTaints`: `taints`. Tolerations of claims are kept without it.
    DeviceTaints,
    /// `DRADeviceBindingConditions`: `bindsToNode`, `bindingConditions`, `bindingFailureConditions`.
    DeviceBindingConditions,
    /// `DRAListTypeAttributes`: `bools`, `ints`, `strings`, `versions`.
    ListTypeAttributes,
    /// `DRAPrioritizedList`: `firstAvailable`.
    PrioritizedList,
    /// `DRAAdminAccess`: `adminAccess`.
    AdminAccess,
    /// `DRAResourceClaimDeviceStatus`: `status.devices`.
    ResourceClaimDeviceStatus,
    /// `DRAExtendedResource`: `extendedResourceName` of classes.
    ExtendedResource,
}

impl Gate {
    const ALL: [Self; 9] = [
        Self::ConsumableCapacity,
        Self::PartitionableDevices,
        Self::DeviceTaints,
        Self::DeviceBindingConditions,
        Self::ListTypeAttributes,
        Self::PrioritizedList,
        Self::AdminAccess,
        Self::ResourceClaimDeviceStatus,
        Self::ExtendedResource,
    ];

    fn default_on(self, release: Release) -> bool {
        match self {
            Self::ConsumableCapacity
            | Self::PartitionableDevices
            | Self::DeviceTaints
            | Self::DeviceBindingConditions
            | Self::ExtendedResource => release >= Release::V1_36,
            Self::ListTypeAttributes => false,
            Self::PrioritizedList | Self::AdminAccess | Self::ResourceClaimDeviceStatus => true,
        }
    }
}

/// The rules in force: a release and the gates that are on.
#[derive(Debug, Clone)]
pub(crate) struct Rules {
    pub(crate) release: Release,
    on: BTreeSet<Gate>,
}

impl Rules {
    pub(crate) fn of(release: Release) -> Self {
        Self { release, on: Gate::ALL.into_iter().filter(|g| g.default_on(release)).collect() }
    }

    pub(crate) fn set(&mut self, gate: Gate, on: bool) {
        if on {
            self.on.insert(gate);
        } else {
            self.on.remove(&gate);
        }
    }

    pub(crate) fn has(&self, gate: Gate) -> bool {
        self.on.contains(&gate)
    }

    pub(crate) fn since(&self, release: Release) -> bool {
        self.release >= release
    }

    /// Removes the gated fields of a slice that `old` does not use already.
    pub(crate) fn drop_from_slice(&self, slice: &mut Value, old: Option<&Value>) {
        let keep = |gate: Gate, used: fn(&Value) -> bool| self.has(gate) || old.is_some_and(used);
        let consumable = keep(Gate::ConsumableCapacity, slice_shares);
        let partitionable = keep(Gate::PartitionableDevices, slice_counts);
        let taints = keep(Gate::DeviceTaints, |s| devices_have(s, &["taints"]));
        let binding = keep(Gate::DeviceBindingConditions, |s| {
            devices_have(s, &["bindsToNode", "bindingConditions", "bindingFailureConditions"])
        });
        let lists = keep(Gate::ListTypeAttributes, |_| false);
        let Some(spec) = slice.get_mut("spec").and_then(Value::as_object_mut) else { return };
        if !partitionable {
            spec.remove("sharedCounters");
            spec.remove("perDeviceNodeSelection");
        }
        for device in spec.get_mut("devices").and_then(Value::as_array_mut).into_iter().flatten() {
            let Some(device) = device.as_object_mut() else { continue };
            let mut gone: Vec<&str> = Vec::new();
            if !partitionable {
                gone.extend(["consumesCounters", "nodeName", "nodeSelector", "allNodes"]);
            }
            if !taints {
                gone.push("taints");
            }
            if !binding {
                gone.extend(["bindsToNode", "bindingConditions", "bindingFailureConditions"]);
            }
            if !consumable {
                gone.push("allowMultipleAllocations");
                for capacity in values_mut(device.get_mut("capacity")) {
                    remove(capacity, &["requestPolicy"]);
                }
            }
            if !lists {
                for attribute in values_mut(device.get_mut("attributes")) {
                    remove(attribute, &["bools", "ints", "strings", "versions"]);
                }
            }
            for name in gone {
                device.remove(name);
            }
        }
    }

    /// Removes the gated field of a class.
    pub(crate) fn drop_from_class(&self, class: &mut Value, old: Option<&Value>) {
        let used = old.is_some_and(|old| old.pointer("/spec/extendedResourceName").is_some());
        if let Some(spec) = class.get_mut("spec").filter(|_| !self.has(Gate::ExtendedResource) && !used) {
            remove(spec, &["extendedResourceName"]);
        }
    }

    /// Removes the gated fields of a claim (`spec` and `status`) or of a template's inner claim spec.
    pub(crate) fn drop_from_claim(&self, claim: &mut Value, old: Option<&Value>) {
        let consumable = self.has(Gate::ConsumableCapacity) || old.is_some_and(claim_shares);
        let spec = match claim.pointer("/spec/spec") {
            Some(_) => claim.pointer_mut("/spec/spec/devices"),
            None => claim.pointer_mut("/spec/devices"),
        };
        if let Some(devices) = spec {
            for request in items_mut(devices.get_mut("requests")) {
                if !self.has(Gate::PrioritizedList) {
                    remove(request, &["firstAvailable"]);
                }
                let mut inner: Vec<&mut Value> = Vec::new();
                if let Some(request) = request.as_object_mut() {
                    for (name, value) in request.iter_mut() {
                        match name.as_str() {
                            "exactly" => inner.push(value),
                            "firstAvailable" => inner.extend(items_mut(Some(value))),
                            _ => {}
                        }
                    }
                }
                for one in inner {
                    if !consumable {
                        remove(one, &["capacity"]);
                    }
                    if !self.has(Gate::AdminAccess) {
                        remove(one, &["adminAccess"]);
                    }
                }
            }
        }
        let Some(status) = claim.get_mut("status") else { return };
        if !self.has(Gate::ResourceClaimDeviceStatus) {
            remove(status, &["devices"]);
        }
        for result in items_mut(status.pointer_mut("/allocation/devices/results")) {
            if !consumable {
                remove(result, &["shareID", "consumedCapacity"]);
            }
            if !self.has(Gate::DeviceBindingConditions) {
                remove(result, &["bindingConditions", "bindingFailureConditions"]);
            }
        }
        if !consumable {
            for device in items_mut(status.get_mut("devices")) {
                remove(device, &["shareID"]);
            }
        }
    }
}

fn items_mut(list: Option<&mut Value>) -> impl Iterator<Item = &mut Value> {
    list.and_then(Value::as_array_mut).into_iter().flatten()
}

fn values_mut(map: Option<&mut Value>) -> impl Iterator<Item = &mut Value> {
    map.and_then(Value::as_object_mut).into_iter().flat_map(serde_json::Map::values_mut)
}

fn remove(value: &mut Value, names: &[&str]) {
    if let Some(map) = value.as_object_mut() {
        for name in names {
            map.remove(*name);
        }
    }
}

fn devices(slice: &Value) -> impl Iterator<Item = &Value> {
    slice.pointer("/spec/devices").and_then(Value::as_array).into_iter().flatten()
}

fn devices_have(slice: &Value, names: &[&str]) -> bool {
    devices(slice).any(|d| names.iter().any(|n| d.get(*n).is_some()))
}

fn slice_shares(slice: &Value) -> bool {
    devices(slice).any(|d| {
        d.get("allowMultipleAllocations").is_some()
            || d.get("capacity")
                .and_then(Value::as_object)
                .is_some_and(|c| c.values().any(|v| v.get("requestPolicy").is_some()))
    })
}

fn slice_counts(slice: &Value) -> bool {
    slice.pointer("/spec/sharedCounters").is_some()
        || slice.pointer("/spec/perDeviceNodeSelection").is_some()
        || devices_have(slice, &["consumesCounters"])
}

fn claim_shares(claim: &Value) -> bool {
    let requests = claim.pointer("/spec/devices/requests").and_then(Value::as_array);
    requests.into_iter().flatten().any(|r| {
        r.pointer("/exactly/capacity").is_some()
            || r.get("firstAvailable")
                .and_then(Value::as_array)
                .is_some_and(|subs| subs.iter().any(|s| s.get("capacity").is_some()))
    })
}

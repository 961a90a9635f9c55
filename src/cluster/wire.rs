//! A `ResourceSlice` as it travels, and when two of them say the same.
//!
//! Own types: what the API server adds and we do not know is ignored, what it drops shows as a difference, and nothing
//! else of an object is kept in memory.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::domain::{
    quantity::Quantity,
    slice::{Attribute, Capacity as WantedCapacity, Counters, Device as WantedDevice, Effect, Policy},
};

/// Where slices are.
pub(crate) const PATH: &str = "/apis/resource.k8s.io/v1/resourceslices";
/// Our field manager.
pub(crate) const FIELD_MANAGER: &str = "npu-dra";

/// A list of slices.
#[derive(Debug, Deserialize)]
pub(crate) struct List {
    pub(crate) metadata: ListMeta,
    #[serde(default)]
    pub(crate) items: Option<Vec<Slice>>,
}

/// Metadata of a list, or of a bookmark.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ListMeta {
    #[serde(default)]
    pub(crate) resource_version: String,
}

/// A slice.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Slice {
    #[serde(default)]
    pub(crate) api_version: String,
    #[serde(default)]
    pub(crate) kind: String,
    pub(crate) metadata: Metadata,
    pub(crate) spec: Spec,
}

/// What of its metadata is ours to say or must be handed back unchanged.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Metadata {
    pub(crate) name: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) uid: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) resource_version: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) owner_references: Option<Vec<OwnerReference>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) labels: Option<Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) annotations: Option<Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) finalizers: Option<Value>,
    /// Set while the object waits for finalizers to let it go.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) deletion_timestamp: Option<String>,
}

/// What a slice says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Spec {
    pub(crate) driver: String,
    pub(crate) pool: Pool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) node_name: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) devices: Option<Vec<Device>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) shared_counters: Option<Value>,
}

/// The pool that a slice is part of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Pool {
    pub(crate) name: String,
    pub(crate) generation: i64,
    pub(crate) resource_slice_count: i64,
}

/// A device.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Device {
    pub(crate) name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) attributes: Option<BTreeMap<String, Value>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) capacity: Option<BTreeMap<String, Capacity>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) taints: Option<Vec<Taint>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) allow_multiple_allocations: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) consumes_counters: Option<Value>,
}

/// A capacity.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Capacity {
    pub(crate) value: Value,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) request_policy: Option<Value>,
}

/// A taint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Taint {
    pub(crate) key: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) value: Option<String>,
    pub(crate) effect: String,
    /// Filled in by the server; an eviction's clock starts there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) time_added: Option<String>,
}

impl Device {
    /// Of the domain's device.
    pub(crate) fn of(wanted: &WantedDevice) -> Self {
        let attribute = |value: &Attribute| match value {
            Attribute::Text(text) => json!({ "string": text }),
            Attribute::Int(number) => json!({ "int": number }),
            Attribute::Bool(truth) => json!({ "bool": truth }),
        };
        let capacity = |capacity: &WantedCapacity| Capacity {
            value: Value::String(capacity.value.to_string()),
            request_policy: capacity.policy.as_ref().map(policy),
        };
        let consumes =
            |(set, counters): &(String, Counters)| json!([{ "counterSet": set, "counters": counters_value(counters) }]);
        let attributes: BTreeMap<_, _> =
            wanted.attributes.iter().map(|(name, value)| (name.clone(), attribute(value))).collect();
        let capacity: BTreeMap<_, _> =
            wanted.capacity.iter().map(|(name, value)| (name.clone(), capacity(value))).collect();
        let taints: Vec<_> = wanted
            .taints
            .iter()
            .map(|taint| Taint {
                key: taint.key.clone(),
                value: Some(taint.value.clone()).filter(|value| !value.is_empty()),
                effect: match taint.effect {
                    Effect::NoSchedule => "NoSchedule".to_owned(),
                    Effect::NoExecute => "NoExecute".to_owned(),
                },
                time_added: None,
            })
            .collect();
        Self {
            name: wanted.name.clone(),
            attributes: Some(attributes).filter(|map| !map.is_empty()),
            capacity: Some(capacity).filter(|map| !map.is_empty()),
            taints: Some(taints).filter(|list| !list.is_empty()),
            allow_multiple_allocations: wanted.shared.then_some(true),
            consumes_counters: wanted.consumes.as_ref().map(consumes),
        }
    }
}

/// Counter sets of a slice; none is absent.
pub(crate) fn shared_counters(sets: &BTreeMap<String, Counters>) -> Option<Value> {
    let set = |(name, counters): (&String, &Counters)| json!({ "name": name, "counters": counters_value(counters) });
    (!sets.is_empty()).then(|| sets.iter().map(set).collect())
}

fn counters_value(counters: &Counters) -> Value {
    counters.iter().map(|(name, value)| (name.clone(), json!({ "value": value.to_string() }))).collect()
}

fn policy(policy: &Policy) -> Value {
    match policy {
        Policy::Values { valid, default } => {
            let valid: Vec<_> = valid.iter().map(ToString::to_string).collect();
            json!({ "default": default.to_string(), "validValues": valid })
        }
        Policy::From(least) => json!({ "default": least.to_string(), "validRange": { "min": least.to_string() } }),
    }
}

impl Spec {
    /// Its devices, whether absent or empty.
    pub(crate) fn devices(&self) -> &[Device] {
        self.devices.as_deref().unwrap_or_default()
    }

    /// Keeps the times that the server gave to taints which stay: another time would start an eviction's clock anew.
    pub(crate) fn keep_taint_times(&mut self, stored: &Spec) {
        for device in self.devices.iter_mut().flatten() {
            let Some(before) = stored.devices().iter().find(|before| before.name == device.name) else { continue };
            for taint in device.taints.iter_mut().flatten() {
                taint.time_added = before
                    .taints
                    .iter()
                    .flatten()
                    .find(|old| same_taint(old, taint))
                    .and_then(|old| old.time_added.clone());
            }
        }
    }
}

/// True if both specs say the same: quantities by value, absent as empty, taints without their time.
pub(crate) fn same_spec(a: &Spec, b: &Spec) -> bool {
    a.driver == b.driver
        && a.pool == b.pool
        && a.node_name == b.node_name
        && same_optional(a.shared_counters.as_ref(), b.shared_counters.as_ref())
        && a.devices().len() == b.devices().len()
        && a.devices().iter().zip(b.devices()).all(|(a, b)| same_device(a, b))
}

fn same_device(a: &Device, b: &Device) -> bool {
    a.name == b.name && same_attributes(a, b) && same_capacity(a, b) && same_taints(a, b) && same_sharing(a, b)
}

fn same_attributes(a: &Device, b: &Device) -> bool {
    let empty = BTreeMap::new();
    let (a, b) = (a.attributes.as_ref().unwrap_or(&empty), b.attributes.as_ref().unwrap_or(&empty));
    a.len() == b.len() && a.iter().all(|(name, value)| b.get(name).is_some_and(|other| same_value(value, other)))
}

fn same_capacity(a: &Device, b: &Device) -> bool {
    let empty = BTreeMap::new();
    let (a, b) = (a.capacity.as_ref().unwrap_or(&empty), b.capacity.as_ref().unwrap_or(&empty));
    let same = |a: &Capacity, b: &Capacity| {
        same_quantity(&a.value, &b.value) && same_optional(a.request_policy.as_ref(), b.request_policy.as_ref())
    };
    a.len() == b.len() && a.iter().all(|(name, value)| b.get(name).is_some_and(|other| same(value, other)))
}

/// True if taints are equal without their time.
pub(crate) fn same_taints(a: &Device, b: &Device) -> bool {
    let (a, b) = (a.taints.as_deref().unwrap_or_default(), b.taints.as_deref().unwrap_or_default());
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same_taint(a, b))
}

fn same_taint(a: &Taint, b: &Taint) -> bool {
    a.key == b.key && a.effect == b.effect && a.value.as_deref().unwrap_or("") == b.value.as_deref().unwrap_or("")
}

/// True if both are shared, or not, in the same way.
pub(crate) fn same_sharing(a: &Device, b: &Device) -> bool {
    a.allow_multiple_allocations.unwrap_or(false) == b.allow_multiple_allocations.unwrap_or(false)
        && same_optional(a.consumes_counters.as_ref(), b.consumes_counters.as_ref())
}

fn same_quantity(a: &Value, b: &Value) -> bool {
    let parse = |value: &Value| {
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        text.parse::<Quantity>().ok()
    };
    match (parse(a), parse(b)) {
        (Some(a), Some(b)) => a == b,
        _ => a == b,
    }
}

fn same_optional(a: Option<&Value>, b: Option<&Value>) -> bool {
    same_value(a.unwrap_or(&Value::Null), b.unwrap_or(&Value::Null))
}

/// JSON equality with null, empty list and empty object alike, and strings that are quantities of one value alike where
/// the key says that they are quantities.
fn same_value(a: &Value, b: &Value) -> bool {
    match (a, b) {
        _ if blank(a) && blank(b) => true,
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same_value(a, b)),
        (Value::Object(a), Value::Object(b)) => {
            let keys = a.keys().chain(b.keys());
            let at = |map: &serde_json::Map<String, Value>, key: &str| map.get(key).cloned().unwrap_or(Value::Null);
            keys.into_iter().all(|key| {
                let (a, b) = (at(a, key), at(b, key));
                match key.as_str() {
                    "value" | "default" | "min" | "max" | "step" => same_quantity(&a, &b) || same_value(&a, &b),
                    "validValues" => match (a.as_array(), b.as_array()) {
                        (Some(a), Some(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same_quantity(a, b)),
                        _ => same_value(&a, &b),
                    },
                    _ => same_value(&a, &b),
                }
            })
        }
        _ => a == b,
    }
}

fn blank(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(value: Value) -> Spec {
        serde_json::from_value(value).unwrap()
    }

    fn with_device(device: &Value) -> Spec {
        spec(json!({"driver": "d", "nodeName": "n", "pool": {"name": "p", "generation": 1, "resourceSliceCount": 1},
            "devices": [device]}))
    }

    #[test]
    fn canonical_quantities_empty_lists_and_taint_times_are_no_difference() {
        let sent =
            with_device(&json!({"name": "a", "capacity": {"memCapacity": {"value": "32768Mi"}}, "attributes": {},
            "taints": [{"key": "k", "value": "", "effect": "NoSchedule"}]}));
        let kept = with_device(&json!({"name": "a", "capacity": {"memCapacity": {"value": "32Gi"}},
            "taints": [{"key": "k", "effect": "NoSchedule", "timeAdded": "2026-01-01T00:00:00Z"}],
            "fieldOfTheFuture": 1}));
        assert!(same_spec(&sent, &kept));
    }

    #[test]
    fn every_other_difference_is_seen() {
        let base = json!({"name": "a", "capacity": {"m": {"value": "1"}}, "attributes": {"x": {"int": 1}},
            "taints": [{"key": "k", "effect": "NoSchedule"}]});
        for change in [
            json!({"name": "b"}),
            json!({"capacity": {"m": {"value": "2"}}}),
            json!({"capacity": {"m": {"value": "1", "requestPolicy": {"default": "1"}}}}),
            json!({"capacity": null}),
            json!({"attributes": {"x": {"int": 2}}}),
            json!({"attributes": {"x": {"string": "1"}}}),
            json!({"attributes": {"x": {"int": 1}, "y": {"int": 1}}}),
            json!({"taints": []}),
            json!({"taints": [{"key": "k", "effect": "NoExecute"}]}),
            json!({"taints": [{"key": "k", "value": "v", "effect": "NoSchedule"}]}),
            json!({"allowMultipleAllocations": true}),
            json!({"consumesCounters": [{"counterSet": "s"}]}),
        ] {
            let mut other = base.clone();
            other.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
            assert!(!same_spec(&with_device(&base), &with_device(&other)), "{change}");
        }
    }

    #[test]
    fn policies_are_compared_by_value() {
        let policy = |text: &str| {
            with_device(&json!({"name": "a", "allowMultipleAllocations": true,
                "capacity": {"m": {"value": "32Gi", "requestPolicy": {"default": text, "validValues": ["8Gi", text]}}}}))
        };
        assert!(same_spec(&policy("32Gi"), &policy("32768Mi")));
        assert!(!same_spec(&policy("32Gi"), &policy("16Gi")));
    }

    #[test]
    fn a_taint_that_stays_keeps_its_time_and_a_new_one_gets_none() {
        let stored = with_device(&json!({"name": "a", "taints": [
            {"key": "k", "value": "v", "effect": "NoExecute", "timeAdded": "2026-01-01T00:00:00Z"}]}));
        let mut same =
            with_device(&json!({"name": "a", "taints": [{"key": "k", "value": "v", "effect": "NoExecute"}]}));
        same.keep_taint_times(&stored);
        assert_eq!(same.devices()[0].taints.as_ref().unwrap()[0].time_added.as_deref(), Some("2026-01-01T00:00:00Z"));
        let mut other =
            with_device(&json!({"name": "a", "taints": [{"key": "k", "value": "w", "effect": "NoExecute"}]}));
        other.keep_taint_times(&stored);
        assert_eq!(other.devices()[0].taints.as_ref().unwrap()[0].time_added, None);
    }
}

//! Every limit of the API, once under and once over it, as 1.35 has it: of the other releases the corpus has the answers of real
//! servers.

use serde_json::{Map, Value, json};
use testkit::api::{Gate, Release};

use super::{SLICES, World, post, put, slice};

type Change = fn(&mut Value);

/// What must come of a slice: accepted, or refused with a cause for this field (a part of its path) and reason.
type Case = (&'static str, Change, Option<(&'static str, &'static str)>);

const INVALID: &str = "FieldValueInvalid";
const REQUIRED: &str = "FieldValueRequired";
const TOO_MANY: &str = "FieldValueTooMany";
const TOO_LONG: &str = "FieldValueTooLong";
const DUPLICATE: &str = "FieldValueDuplicate";
const FORBIDDEN: &str = "FieldValueForbidden";
const UNSUPPORTED: &str = "FieldValueNotSupported";

fn devices(slice: &mut Value, count: usize) {
    let list: Vec<Value> = (0..count).map(|i| json!({"name": format!("npu-{i}")})).collect();
    slice["spec"]["devices"] = Value::Array(list);
}

fn device(slice: &mut Value) -> &mut Value {
    &mut slice["spec"]["devices"][0]
}

fn attributes(count: usize) -> Value {
    let map: Map<String, Value> = (0..count).map(|i| (format!("a{i}"), json!({"int": i}))).collect();
    Value::Object(map)
}

fn counters(count: usize) -> Value {
    let map: Map<String, Value> = (0..count).map(|i| (format!("c{i}"), json!({"value": "1"}))).collect();
    Value::Object(map)
}

fn sets(count: usize, each: usize) -> Value {
    Value::Array((0..count).map(|i| json!({"name": format!("s{i}"), "counters": counters(each)})).collect())
}

fn taints(count: usize) -> Value {
    Value::Array((0..count).map(|i| json!({"key": format!("k{i}"), "effect": "NoSchedule"})).collect())
}

fn policy(slice: &mut Value, policy: &Value) {
    let device = device(slice);
    device["allowMultipleAllocations"] = json!(true);
    device["capacity"] = json!({"memCapacity": {"value": "32Gi", "requestPolicy": policy}});
}

fn attribute(slice: &mut Value, name: &str, value: &Value) {
    device(slice)["attributes"] = json!({name: value});
}

const EVERYWHERE: &[Case] = &[
    ("a small slice", |_| {}, None),
    ("no devices", |s| s["spec"]["devices"] = json!([]), None),
    ("128 devices", |s| devices(s, 128), None),
    ("129 devices", |s| devices(s, 129), Some(("spec.devices", TOO_MANY))),
    (
        "two devices of one name",
        |s| s["spec"]["devices"] = json!([{"name": "a"}, {"name": "a"}]),
        Some(("devices[1].name", DUPLICATE)),
    ),
    ("a device without name", |s| device(s)["name"] = json!(""), Some(("devices[0].name", INVALID))),
    ("a device name with a dot", |s| device(s)["name"] = json!("npu.0"), Some(("devices[0].name", INVALID))),
    ("a device name of 63", |s| device(s)["name"] = json!("a".repeat(63)), None),
    ("a device name of 64", |s| device(s)["name"] = json!("a".repeat(64)), Some(("devices[0].name", INVALID))),
    ("32 attributes", |s| *device(s) = json!({"name": "a", "attributes": attributes(32)}), None),
    (
        "33 attributes",
        |s| *device(s) = json!({"name": "a", "attributes": attributes(33)}),
        Some(("devices[0]", INVALID)),
    ),
    (
        "31 attributes and 2 capacities",
        |s| {
            *device(s) = json!({"name": "a", "attributes": attributes(31), "capacity": {"x": {"value": "1"}, "y": {"value": "1"}}});
        },
        Some(("devices[0]", INVALID)),
    ),
    ("a string of 64", |s| attribute(s, "a", &json!({"string": "x".repeat(64)})), None),
    (
        "a string of 65",
        |s| attribute(s, "a", &json!({"string": "x".repeat(65)})),
        Some(("attributes[a].string", TOO_LONG)),
    ),
    ("an attribute without value", |s| attribute(s, "a", &json!({})), Some(("attributes[a]", REQUIRED))),
    (
        "an attribute with two values",
        |s| attribute(s, "a", &json!({"string": "x", "int": 1})),
        Some(("attributes[a]", INVALID)),
    ),
    ("a strict version", |s| attribute(s, "a", &json!({"version": "24.1.0-rc.2"})), None),
    (
        "a version with a leading zero",
        |s| attribute(s, "a", &json!({"version": "24.01.0"})),
        Some(("attributes[a].version", INVALID)),
    ),
    (
        "a version of two parts",
        |s| attribute(s, "a", &json!({"version": "24.1"})),
        Some(("attributes[a].version", INVALID)),
    ),
    (
        "an attribute name with a dash",
        |s| attribute(s, "Bus-Id", &json!({"int": 1})),
        Some(("attributes[Bus-Id]", INVALID)),
    ),
    ("an attribute name of 32", |s| attribute(s, &"a".repeat(32), &json!({"int": 1})), None),
    (
        "an attribute name of 33",
        |s| attribute(s, &"a".repeat(33), &json!({"int": 1})),
        Some(("attributes[aaa", TOO_LONG)),
    ),
    (
        "an attribute name with domain",
        |s| attribute(s, "resource.kubernetes.io/pcieRoot", &json!({"string": "pci0000:00"})),
        None,
    ),
    (
        "an attribute domain of 64",
        |s| attribute(s, &format!("{}/a", "d".repeat(64)), &json!({"int": 1})),
        Some(("attributes[ddd", TOO_LONG)),
    ),
    (
        "a capacity name with a dash",
        |s| device(s)["capacity"] = json!({"a-b": {"value": "1"}}),
        Some(("capacity[a-b]", INVALID)),
    ),
    ("a capacity without value", |s| device(s)["capacity"] = json!({"a": {}}), None),
    ("no driver", |s| s["spec"]["driver"] = json!(""), Some(("spec.driver", REQUIRED))),
    ("a driver of 64", |s| s["spec"]["driver"] = json!("d".repeat(64)), Some(("spec.driver", TOO_LONG))),
    ("a driver that is no domain", |s| s["spec"]["driver"] = json!("npu_huawei"), Some(("spec.driver", INVALID))),
    ("no pool name", |s| s["spec"]["pool"]["name"] = json!(""), Some(("spec.pool.name", REQUIRED))),
    (
        "a pool name with an empty part",
        |s| s["spec"]["pool"]["name"] = json!("node1//npu"),
        Some(("spec.pool.name", INVALID)),
    ),
    ("a pool name of 254", |s| s["spec"]["pool"]["name"] = json!("p".repeat(254)), Some(("spec.pool.name", TOO_LONG))),
    ("generation -1", |s| s["spec"]["pool"]["generation"] = json!(-1), Some(("spec.pool.generation", INVALID))),
    (
        "slice count 0",
        |s| s["spec"]["pool"]["resourceSliceCount"] = json!(0),
        Some(("spec.pool.resourceSliceCount", INVALID)),
    ),
    ("no node selection", |s| s["spec"]["nodeName"] = Value::Null, Some(("spec", REQUIRED))),
    ("two node selections", |s| s["spec"]["allNodes"] = json!(true), Some(("spec", INVALID))),
    ("allNodes false", |s| s["spec"]["allNodes"] = json!(false), Some(("spec.allNodes", INVALID))),
    ("an empty node name", |s| s["spec"]["nodeName"] = json!(""), Some(("spec.nodeName", INVALID))),
    (
        "perDeviceNodeSelection without a device's",
        |s| {
            s["spec"]["nodeName"] = Value::Null;
            s["spec"]["perDeviceNodeSelection"] = json!(true);
        },
        Some(("devices[0]", REQUIRED)),
    ),
    (
        "perDeviceNodeSelection with a device's",
        |s| {
            s["spec"]["nodeName"] = Value::Null;
            s["spec"]["perDeviceNodeSelection"] = json!(true);
            device(s)["nodeName"] = json!("node1");
        },
        None,
    ),
    (
        "a device's node without perDeviceNodeSelection",
        |s| device(s)["nodeName"] = json!("node1"),
        Some(("devices[0]", INVALID)),
    ),
    ("a name that is no domain", |s| s["metadata"]["name"] = json!("A_b"), Some(("metadata.name", INVALID))),
    (
        "a policy on an exclusive device",
        |s| {
            policy(s, &json!({"default": "1Gi"}));
            device(s)["allowMultipleAllocations"] = json!(false);
        },
        Some(("requestPolicy", FORBIDDEN)),
    ),
    ("valid values", |s| policy(s, &json!({"default": "32Gi", "validValues": ["8Gi", "16384Mi", "32Gi"]})), None),
    (
        "10 valid values",
        |s| {
            policy(
                s,
                &json!({"default": "1Gi", "validValues": (1..=10).map(|n| format!("{n}Gi")).collect::<Vec<_>>()}),
            );
        },
        None,
    ),
    (
        "11 valid values",
        |s| {
            policy(
                s,
                &json!({"default": "1Gi", "validValues": (1..=11).map(|n| format!("{n}Gi")).collect::<Vec<_>>()}),
            );
        },
        Some(("validValues", TOO_MANY)),
    ),
    (
        "valid values out of order",
        |s| policy(s, &json!({"default": "8Gi", "validValues": ["16Gi", "8Gi"]})),
        Some(("validValues", INVALID)),
    ),
    (
        "a valid value twice",
        |s| policy(s, &json!({"default": "8Gi", "validValues": ["8Gi", "8192Mi"]})),
        Some(("validValues", DUPLICATE)),
    ),
    (
        "a valid value above the capacity",
        |s| policy(s, &json!({"default": "8Gi", "validValues": ["8Gi", "64Gi"]})),
        Some(("validValues", INVALID)),
    ),
    (
        "valid values without default",
        |s| policy(s, &json!({"validValues": ["8Gi"]})),
        Some(("requestPolicy.default", REQUIRED)),
    ),
    (
        "a default that is no valid value",
        |s| policy(s, &json!({"default": "4Gi", "validValues": ["8Gi"]})),
        Some(("requestPolicy", INVALID)),
    ),
    (
        "valid values and a range",
        |s| policy(s, &json!({"default": "8Gi", "validValues": ["8Gi"], "validRange": {"min": "8Gi"}})),
        Some(("requestPolicy", FORBIDDEN)),
    ),
    (
        "a range",
        |s| policy(s, &json!({"default": "2Gi", "validRange": {"min": "1Gi", "max": "32Gi", "step": "1Gi"}})),
        None,
    ),
    (
        "a range without min",
        |s| policy(s, &json!({"default": "2Gi", "validRange": {"max": "4Gi"}})),
        Some(("validRange.min", REQUIRED)),
    ),
    (
        "a range without default",
        |s| policy(s, &json!({"validRange": {"min": "1Gi"}})),
        Some(("requestPolicy.default", REQUIRED)),
    ),
    (
        "max below min",
        |s| policy(s, &json!({"default": "4Gi", "validRange": {"min": "4Gi", "max": "2Gi"}})),
        Some(("validRange.max", INVALID)),
    ),
    (
        "max off the step",
        |s| policy(s, &json!({"default": "1Gi", "validRange": {"min": "1Gi", "max": "4Gi", "step": "2Gi"}})),
        Some(("validRange.step", INVALID)),
    ),
    (
        "a default off the step",
        |s| policy(s, &json!({"default": "2Gi", "validRange": {"min": "1Gi", "max": "5Gi", "step": "2Gi"}})),
        Some(("validRange.step", INVALID)),
    ),
    (
        "a default below min",
        |s| policy(s, &json!({"default": "1Gi", "validRange": {"min": "2Gi"}})),
        Some(("validRange", INVALID)),
    ),
    (
        "max above the capacity",
        |s| policy(s, &json!({"default": "1Gi", "validRange": {"min": "1Gi", "max": "64Gi"}})),
        Some(("validRange.max", INVALID)),
    ),
    ("4 taints", |s| device(s)["taints"] = taints(4), None),
    ("a taint without effect", |s| device(s)["taints"] = json!([{"key": "a"}]), Some(("taints[0].effect", REQUIRED))),
    (
        "a taint with a made-up effect",
        |s| device(s)["taints"] = json!([{"key": "a", "effect": "Never"}]),
        Some(("taints[0].effect", UNSUPPORTED)),
    ),
    (
        "a taint without key",
        |s| device(s)["taints"] = json!([{"effect": "NoSchedule"}]),
        Some(("taints[0].key", INVALID)),
    ),
    (
        "a taint value with a space",
        |s| device(s)["taints"] = json!([{"key": "a", "value": "a b", "effect": "NoSchedule"}]),
        Some(("taints[0].value", INVALID)),
    ),
    (
        "5 binding conditions",
        |s| device(s)["bindingConditions"] = json!(["a", "b", "c", "d", "e"]),
        Some(("bindingConditions", TOO_MANY)),
    ),
    (
        "a counter set without counters",
        |s| {
            s["spec"]["devices"] = json!([]);
            s["spec"]["sharedCounters"] = json!([{"name": "a"}]);
        },
        Some(("sharedCounters[0].counters", REQUIRED)),
    ),
    (
        "two counter sets of one name",
        |s| {
            s["spec"]["devices"] = json!([]);
            s["spec"]["sharedCounters"] =
                json!([{"name": "a", "counters": counters(1)}, {"name": "a", "counters": counters(1)}]);
        },
        Some(("sharedCounters[1].name", DUPLICATE)),
    ),
    (
        "a counter set name that is no label",
        |s| {
            s["spec"]["devices"] = json!([]);
            s["spec"]["sharedCounters"] = json!([{"name": "A", "counters": counters(1)}]);
        },
        Some(("sharedCounters[0].name", INVALID)),
    ),
    (
        "a counter name that is no label",
        |s| {
            s["spec"]["devices"] = json!([]);
            s["spec"]["sharedCounters"] = json!([{"name": "a", "counters": {"aiCores": {"value": "1"}}}]);
        },
        Some(("counters[aiCores]", INVALID)),
    ),
];

fn consuming(slice: &mut Value, count: usize, each: usize) {
    devices(slice, count);
    for device in slice["spec"]["devices"].as_array_mut().unwrap() {
        device["consumesCounters"] = json!([{"counterSet": "s0", "counters": counters(each)}]);
    }
}

const NEW_LAYOUT: &[Case] = &[
    ("counters and devices in one slice", |s| s["spec"]["sharedCounters"] = sets(1, 2), Some(("spec", INVALID))),
    (
        "8 sets of 32 counters",
        |s| {
            s["spec"]["devices"] = json!([]);
            s["spec"]["sharedCounters"] = sets(8, 32);
        },
        None,
    ),
    (
        "9 sets",
        |s| {
            s["spec"]["devices"] = json!([]);
            s["spec"]["sharedCounters"] = sets(9, 1);
        },
        Some(("spec.sharedCounters", TOO_MANY)),
    ),
    (
        "33 counters in a set",
        |s| {
            s["spec"]["devices"] = json!([]);
            s["spec"]["sharedCounters"] = sets(1, 33);
        },
        Some(("sharedCounters[0].counters", TOO_MANY)),
    ),
    (
        "2 sets consumed, defined elsewhere",
        |s| {
            device(s)["consumesCounters"] =
                json!([{"counterSet": "x", "counters": counters(32)}, {"counterSet": "y", "counters": counters(1)}]);
        },
        None,
    ),
    (
        "3 sets consumed",
        |s| device(s)["consumesCounters"] = json!([{"counterSet": "x", "counters": counters(1)}, {"counterSet": "y", "counters": counters(1)}, {"counterSet": "z", "counters": counters(1)}]),
        Some(("consumesCounters", TOO_MANY)),
    ),
    (
        "a set consumed twice",
        |s| {
            device(s)["consumesCounters"] =
                json!([{"counterSet": "x", "counters": counters(1)}, {"counterSet": "x", "counters": counters(1)}]);
        },
        Some(("consumesCounters[1].counterSet", DUPLICATE)),
    ),
    (
        "33 counters consumed of a set",
        |s| device(s)["consumesCounters"] = json!([{"counterSet": "x", "counters": counters(33)}]),
        Some(("consumesCounters[0].counters", TOO_MANY)),
    ),
    ("64 devices with counters", |s| consuming(s, 64, 1), None),
    ("65 devices with counters", |s| consuming(s, 65, 1), Some(("spec.devices", TOO_MANY))),
    (
        "64 devices, one tainted",
        |s| {
            devices(s, 64);
            device(s)["taints"] = taints(1);
        },
        None,
    ),
    (
        "65 devices, one tainted",
        |s| {
            devices(s, 65);
            device(s)["taints"] = taints(1);
        },
        Some(("spec.devices", TOO_MANY)),
    ),
    ("16 taints", |s| device(s)["taints"] = taints(16), None),
    ("17 taints", |s| device(s)["taints"] = taints(17), Some(("taints", TOO_MANY))),
    ("a taint with effect None", |s| device(s)["taints"] = json!([{"key": "a", "effect": "None"}]), None),
];

const LIST_VALUES: &[Case] = &[
    ("a list attribute", |s| attribute(s, "a", &json!({"ints": [0, 1]})), None),
    ("48 values", |s| attribute(s, "a", &json!({"ints": vec![1; 48]})), None),
    ("49 values", |s| attribute(s, "a", &json!({"ints": vec![1; 49]})), Some(("devices[0]", INVALID))),
];

#[tokio::test]
async fn every_limit_is_kept_in_a_release_that_no_server_was_asked_about() {
    for release in [Release::V1_35, Release::V1_36, Release::V1_37] {
        let world = World::new(release).await;
        let gates = [
            Gate::ConsumableCapacity,
            Gate::PartitionableDevices,
            Gate::DeviceTaints,
            Gate::DeviceBindingConditions,
            Gate::ListTypeAttributes,
        ];
        for gate in gates {
            world.server.set_gate(gate, true);
        }
        let admin = world.admin().await;
        let cases = if release == Release::V1_35 { [EVERYWHERE, NEW_LAYOUT].concat() } else { LIST_VALUES.to_vec() };
        for (what, change, expected) in cases {
            let mut body = slice("a", "node1");
            change(&mut body);
            let outcome = post(&admin, &format!("{SLICES}?dryRun=All"), &body).await;
            match (outcome, expected) {
                (Ok(_), None) => {}
                (Ok(_), Some(_)) => panic!("{release:?}, {what}: accepted"),
                (Err(status), None) => panic!("{release:?}, {what}: {}", status.message),
                (Err(status), Some((field, reason))) => {
                    assert_eq!((status.code, status.reason.as_str()), (422, "Invalid"), "{what}: {}", status.message);
                    let refused = status.details.as_ref().map(|d| d.causes.clone()).unwrap_or_default();
                    let found = refused.iter().any(|c| c.field.contains(field) && c.reason == reason);
                    assert!(found, "{release:?}, {what}: {}", status.message);
                }
            }
        }
    }
}

#[tokio::test]
async fn what_is_no_slice_at_all_is_a_bad_request() {
    let world = World::new(Release::V1_36).await;
    let admin = world.admin().await;
    let table: &[(&str, Change)] = &[
        ("devices that are no list", |s| s["spec"]["devices"] = json!({})),
        ("an int that is a string", |s| attribute(s, "a", &json!({"int": "1"}))),
        ("a fraction for an int", |s| attribute(s, "a", &json!({"int": 1.5}))),
        ("a malformed quantity", |s| device(s)["capacity"]["memCapacity"]["value"] = json!("32GiB")),
        ("an empty quantity", |s| device(s)["capacity"]["memCapacity"]["value"] = json!("")),
        ("a malformed time", |s| {
            device(s)["taints"] = json!([{"key": "a", "effect": "NoSchedule", "timeAdded": "today"}]);
        }),
        ("another kind", |s| s["kind"] = json!("ResourceClaim")),
        ("another version", |s| s["apiVersion"] = json!("resource.k8s.io/v1beta1")),
    ];
    for (what, change) in table {
        let mut body = slice("a", "node1");
        change(&mut body);
        let status = post(&admin, SLICES, &body).await.expect_err(what);
        assert_eq!((status.code, status.reason.as_str()), (400, "BadRequest"), "{what}: {}", status.message);
    }
    let numbers = json!({"memCapacity": {"value": 1024}});
    let mut body = slice("a", "node1");
    device(&mut body)["capacity"] = numbers;
    let back = post(&admin, SLICES, &body).await.unwrap();
    assert_eq!(back["spec"]["devices"][0]["capacity"]["memCapacity"]["value"], "1024");
}

#[tokio::test]
async fn a_slice_that_is_too_large_is_refused() {
    let world = World::new(Release::V1_36).await;
    let admin = world.admin().await;
    let mut body = slice("a", "node1");
    body["metadata"]["annotations"] = json!({"x": "y".repeat(300_000)});
    assert_eq!(post(&admin, SLICES, &body).await.unwrap_err().code, 422);
    body["metadata"]["annotations"] = json!({"x": "y".repeat(3_200_000)});
    assert_eq!(post(&admin, SLICES, &body).await.unwrap_err().code, 413);
}

#[tokio::test]
async fn driver_pool_name_and_node_name_are_immutable() {
    let world = World::new(Release::V1_36).await;
    let admin = world.admin().await;
    post(&admin, SLICES, &slice("a", "node1")).await.unwrap();
    let path = format!("{SLICES}/a");
    let table: &[(&str, Change)] = &[
        ("spec.driver", |s| s["spec"]["driver"] = json!("other.example.com")),
        ("spec.pool.name", |s| s["spec"]["pool"]["name"] = json!("other")),
        ("spec.nodeName", |s| s["spec"]["nodeName"] = json!("node2")),
    ];
    for (field, change) in table {
        let mut body = slice("a", "node1");
        change(&mut body);
        let status = put(&admin, &path, &body).await.expect_err(field);
        assert_eq!(status.code, 422, "{field}");
        assert!(status.message.contains(field) && status.message.contains("immutable"), "{}", status.message);
    }
    let mut body = slice("b", "node1");
    assert_eq!(put(&admin, &path, &body).await.unwrap_err().code, 400, "another name than the URL's");
    body["metadata"] = json!({"name": "a", "uid": "another"});
    assert_eq!(put(&admin, &path, &body).await.unwrap_err().code, 409, "another uid");
}

#[tokio::test]
async fn claims_templates_and_classes_are_checked() {
    let world = World::new(Release::V1_36).await;
    let admin = world.admin().await;
    let claims = "/apis/resource.k8s.io/v1/namespaces/ml/resourceclaims";
    let request = |name: &str| json!({"name": name, "exactly": {"deviceClassName": "npu.huawei.com"}});
    let claim = |devices: Value| json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": "c"}, "spec": {"devices": devices}});
    let many: Vec<Value> = (0..33).map(|i| request(&format!("r{i}"))).collect();
    let large = json!({"x": "y".repeat(10 * 1024)});
    let table = [
        ("33 requests", json!({"requests": many}), "devices.requests"),
        ("two requests of one name", json!({"requests": [request("a"), request("a")]}), "requests[1]"),
        ("no class", json!({"requests": [{"name": "a", "exactly": {}}]}), "deviceClassName"),
        ("neither form", json!({"requests": [{"name": "a"}]}), "requests[0]"),
        ("count -1", json!({"requests": [{"name": "a", "exactly": {"deviceClassName": "c", "count": -1}}]}), "count"),
        (
            "a large parameter",
            json!({"requests": [request("a")], "config": [{"opaque": {"driver": "npu.huawei.com", "parameters": large}}]}),
            "parameters",
        ),
        ("a constraint on nothing", json!({"requests": [request("a")], "constraints": [{}]}), "constraints[0]"),
    ];
    for (what, devices, field) in table {
        let status = post(&admin, claims, &claim(devices)).await.expect_err(what);
        assert_eq!(status.code, 422, "{what}");
        assert!(status.message.contains(field), "{what}: {}", status.message);
    }
    let made = post(&admin, claims, &claim(json!({"requests": [request("a")]}))).await.unwrap();
    assert_eq!(made["spec"]["devices"]["requests"][0]["exactly"]["count"], 1, "defaults are filled in");
    let mut changed = made.clone();
    changed["spec"]["devices"]["requests"][0]["name"] = json!("b");
    let status = put(&admin, &format!("{claims}/c"), &changed).await.unwrap_err();
    assert!(status.message.contains("immutable"), "{}", status.message);
    let mut stranger = made;
    stranger["status"] = json!({"devices": [{"driver": "npu.huawei.com", "pool": "p", "device": "d"}]});
    let status = put(&admin, &format!("{claims}/c/status"), &stranger).await.unwrap_err();
    assert!(status.message.contains("status.devices[0]"), "{}", status.message);
    let class = json!({"metadata": {"name": "x"}, "spec": {"selectors": [{"cel": {"expression": ""}}]}});
    assert_eq!(post(&admin, "/apis/resource.k8s.io/v1/deviceclasses", &class).await.unwrap_err().code, 422);
}

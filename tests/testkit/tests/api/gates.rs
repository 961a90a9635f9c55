//! Fields that a server drops without a word.

use serde_json::{Value, json};
use testkit::api::{Gate, Release};

use super::{SLICES, World, post, put, slice};

/// A slice that uses everything.
fn full(name: &str) -> Value {
    let mut body = slice(name, "node1");
    body["spec"]["devices"][0] = json!({
        "name": "npu-0",
        "attributes": {"type": {"string": "npu"}},
        "allowMultipleAllocations": true,
        "capacity": {"memCapacity": {"value": "32Gi", "requestPolicy": {"default": "32Gi"}}},
        "consumesCounters": [{"counterSet": "card-0", "counters": {"memory": {"value": "1"}}}],
        "taints": [{"key": "a", "effect": "NoSchedule"}],
        "bindsToNode": true, "bindingConditions": ["a"], "bindingFailureConditions": ["b"],
    });
    body
}

const FIELDS: [(&str, Gate); 6] = [
    ("/spec/devices/0/allowMultipleAllocations", Gate::ConsumableCapacity),
    ("/spec/devices/0/capacity/memCapacity/requestPolicy", Gate::ConsumableCapacity),
    ("/spec/devices/0/consumesCounters", Gate::PartitionableDevices),
    ("/spec/devices/0/taints", Gate::DeviceTaints),
    ("/spec/devices/0/bindsToNode", Gate::DeviceBindingConditions),
    ("/spec/devices/0/bindingConditions", Gate::DeviceBindingConditions),
];

#[tokio::test]
async fn each_release_keeps_what_its_default_gates_say() {
    for (release, kept) in
        [(Release::V1_34, false), (Release::V1_35, false), (Release::V1_36, true), (Release::V1_37, true)]
    {
        let world = World::new(release).await;
        let admin = world.admin().await;
        let back = post(&admin, SLICES, &full("a")).await.unwrap();
        for (field, _) in FIELDS {
            assert_eq!(back.pointer(field).is_some(), kept, "{release:?} {field}");
        }
        assert_eq!(back["spec"]["devices"][0]["capacity"]["memCapacity"]["value"], "32Gi");
    }
}

#[tokio::test]
async fn each_gate_drops_its_own_fields_only() {
    let gates =
        [Gate::ConsumableCapacity, Gate::PartitionableDevices, Gate::DeviceTaints, Gate::DeviceBindingConditions];
    for off in gates {
        let world = World::new(Release::V1_36).await;
        world.server.set_gate(off, false);
        let admin = world.admin().await;
        let back = post(&admin, SLICES, &full("a")).await.unwrap();
        for (field, gate) in FIELDS {
            assert_eq!(back.pointer(field).is_some(), gate != off, "without {off:?}: {field}");
        }
    }
}

#[tokio::test]
async fn shared_counters_go_with_their_gate() {
    let world = World::new(Release::V1_36).await;
    let admin = world.admin().await;
    let mut body = slice("a", "node1");
    body["spec"]["devices"] = json!([]);
    body["spec"]["sharedCounters"] = json!([{"name": "card-0", "counters": {"memory": {"value": "32768Mi"}}}]);
    let path = format!("{SLICES}?dryRun=All");
    let back = post(&admin, &path, &body).await.unwrap();
    assert_eq!(back["spec"]["sharedCounters"][0]["counters"]["memory"]["value"], "32Gi");
    world.server.set_gate(Gate::PartitionableDevices, false);
    let back = post(&admin, &path, &body).await.unwrap();
    assert!(back["spec"].get("sharedCounters").is_none());
}

#[tokio::test]
async fn list_attributes_need_the_gate_and_1_36() {
    let mut body = slice("a", "node1");
    body["spec"]["devices"][0]["attributes"] = json!({"numa": {"ints": [0]}});
    for (release, on, kept) in
        [(Release::V1_35, true, false), (Release::V1_36, false, false), (Release::V1_36, true, true)]
    {
        let world = World::new(release).await;
        world.server.set_gate(Gate::ListTypeAttributes, on);
        let admin = world.admin().await;
        let outcome = post(&admin, SLICES, &body).await;
        assert_eq!(outcome.is_ok(), kept, "{release:?} {on}: a dropped list leaves an attribute without value");
    }
}

#[tokio::test]
async fn a_field_that_is_in_use_survives_its_gate() {
    let world = World::new(Release::V1_36).await;
    let admin = world.admin().await;
    let made = post(&admin, SLICES, &full("a")).await.unwrap();
    world.server.set_gate(Gate::ConsumableCapacity, false);
    let back = put(&admin, &format!("{SLICES}/a"), &made).await.unwrap();
    assert_eq!(back["spec"]["devices"][0]["allowMultipleAllocations"], true);
}

#[tokio::test]
async fn claims_and_templates_lose_their_capacity_before_anybody_validates_it() {
    let world = World::new(Release::V1_34).await;
    let admin = world.admin().await;
    let spec = json!({"devices": {
        "requests": [
            {"name": "a", "exactly": {"deviceClassName": "c", "capacity": {"requests": {"not-legal": "10000"}}}},
            {"name": "b", "firstAvailable": [{"name": "x", "deviceClassName": "c", "capacity": {"requests": {"memCapacity": "8Gi"}}}]},
        ],
        "constraints": [{"matchAttribute": "a.b/c", "distinctAttribute": "a.b/d"}],
    }});
    let claim = json!({"metadata": {"name": "c"}, "spec": spec.clone()});
    let template = json!({"metadata": {"name": "t"}, "spec": {"spec": spec}});
    let claims = "/apis/resource.k8s.io/v1/namespaces/ml/resourceclaims?dryRun=All";
    let templates = "/apis/resource.k8s.io/v1/namespaces/ml/resourceclaimtemplates?dryRun=All";
    let back = post(&admin, claims, &claim).await.unwrap();
    assert!(!back.to_string().contains("capacity"), "{back}");
    let back = post(&admin, templates, &template).await.unwrap();
    assert!(!back.to_string().contains("capacity"), "{back}");
    world.server.set_gate(Gate::ConsumableCapacity, true);
    assert!(post(&admin, claims, &claim).await.unwrap().to_string().contains("not-legal"), "nor does anybody then");
    let mut good = claim;
    good["spec"]["devices"]["requests"][0]["exactly"]["capacity"]["requests"] = json!({"memCapacity": "10000Mi"});
    let back = post(&admin, claims, &good).await.unwrap();
    let kept = &back["spec"]["devices"]["requests"][0]["exactly"]["capacity"]["requests"]["memCapacity"];
    assert_eq!(kept, "10000Mi");
}

#[tokio::test]
async fn an_upgrade_under_us_changes_the_rules() {
    let world = World::new(Release::V1_34).await;
    world.server.set_gate(Gate::PartitionableDevices, true);
    let admin = world.admin().await;
    let mut body = slice("a", "node1");
    body["spec"]["sharedCounters"] = json!([{"name": "card-0", "counters": {"memory": {"value": "1"}}}]);
    post(&admin, SLICES, &body).await.unwrap();
    world.server.upgrade(Release::V1_36);
    let status = put(&admin, &format!("{SLICES}/a"), &body).await.unwrap_err();
    assert_eq!(status.code, 422, "{}", status.message);
}

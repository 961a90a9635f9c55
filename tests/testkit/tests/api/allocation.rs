//! The tiny allocator, and the policy that reads bare numbers of memory.

use serde_json::{Value, json};
use testkit::api::{Gate, Release};

use super::{SLICES, World, post, put, slice};

const CLAIMS: &str = "/apis/resource.k8s.io/v1/namespaces/ml/resourceclaims";
const TEMPLATES: &str = "/apis/resource.k8s.io/v1/namespaces/ml/resourceclaimtemplates";

fn claim(name: &str, exactly: &Value) -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": name},
        "spec": {"devices": {"requests": [{"name": "npu", "exactly": exactly}]}},
    })
}

fn asking(memory: &Value) -> Value {
    json!({"deviceClassName": "npu.huawei.com", "capacity": {"requests": {"memCapacity": memory}}})
}

/// A card that is shared out in quarters, halves and as a whole.
fn shared(name: &str) -> Value {
    json!({
        "name": name, "allowMultipleAllocations": true, "attributes": {"type": {"string": "npu"}},
        "capacity": {"memCapacity": {"value": "32Gi",
            "requestPolicy": {"default": "32Gi", "validValues": ["8Gi", "16Gi", "32Gi"]}}},
    })
}

/// As drivers put before shared cards on 1.34.
fn placeholder(name: &str) -> Value {
    json!({
        "name": name, "allowMultipleAllocations": true, "attributes": {"type": {"string": "placeholder"}},
        "capacity": {"memCapacity": {"value": "1Pi", "requestPolicy": {"default": "1", "validRange": {"min": "1"}}}},
        "consumesCounters": [{"counterSet": "guard", "counters": {"none": {"value": "1"}}}],
    })
}

fn slice_of(devices: &[Value]) -> Value {
    let mut body = slice("a", "node1");
    body["spec"]["devices"] = json!(devices);
    body
}

fn guarded(cards: &[Value]) -> Value {
    let holders = (0..32).map(|number| placeholder(&format!("placeholder-{number}")));
    let mut body = slice_of(&holders.chain(cards.iter().cloned()).collect::<Vec<_>>());
    body["spec"]["sharedCounters"] = json!([{"name": "guard", "counters": {"none": {"value": "0"}}}]);
    body
}

/// What a claim of this form was given: device and memory for each result; or why nothing.
async fn given(world: &World, name: &str, exactly: &Value) -> Result<Vec<(String, String)>, String> {
    let admin = world.admin().await;
    post(&admin, CLAIMS, &claim(name, exactly)).await.unwrap();
    let claim = world.server.allocate("ml", name).map_err(|error| format!("{error:#}"))?;
    let results = claim["status"]["allocation"]["devices"]["results"].as_array().unwrap().clone();
    let text = |value: &Value| value.as_str().unwrap_or("-").to_owned();
    Ok(results.iter().map(|r| (text(&r["device"]), text(&r["consumedCapacity"]["memCapacity"]))).collect())
}

fn pairs(expected: &[(&str, &str)]) -> Vec<(String, String)> {
    expected.iter().map(|(device, memory)| ((*device).to_owned(), (*memory).to_owned())).collect()
}

#[tokio::test]
async fn with_the_policy_a_bare_number_is_stored_as_mebibytes() {
    let world = World::new(Release::V1_36).await;
    let admin = world.admin().await;
    world.server.set_memory_policy(true);
    let table = [
        (json!(10000), "10000Mi"),
        (json!("10k"), "10000Mi"),
        (json!("1e4"), "10000Mi"),
        (json!(1_048_575), "1048575Mi"),
        (json!(1), "1Mi"),
        (json!("1Mi"), "1Mi"),
        (json!("10Gi"), "10Gi"),
        (json!(0), "0"),
        (json!(-5), "-5"),
        (json!("500m"), "500m"),
        (json!("10000.5"), "10000500m"),
    ];
    for (number, (written, stored)) in table.into_iter().enumerate() {
        let made = post(&admin, CLAIMS, &claim(&format!("c{number}"), &asking(&written))).await.unwrap();
        let memory = &made["spec"]["devices"]["requests"][0]["exactly"]["capacity"]["requests"]["memCapacity"];
        assert_eq!(memory, stored, "{written}");
    }
    for (number, exactly) in [
        json!({"deviceClassName": "any"}),
        json!({"deviceClassName": "any", "capacity": {}}),
        json!({"deviceClassName": "any", "capacity": {"requests": {}}}),
        json!({"deviceClassName": "any", "capacity": {"requests": null}}),
    ]
    .into_iter()
    .enumerate()
    {
        let made = post(&admin, CLAIMS, &claim(&format!("n{number}"), &exactly)).await.unwrap();
        let exactly = &made["spec"]["devices"]["requests"][0]["exactly"];
        assert!(exactly.pointer("/capacity/requests/memCapacity").is_none(), "{exactly}");
    }
    let other = json!({"deviceClassName": "any", "capacity": {"requests": {"cores": 5}}});
    let made = post(&admin, CLAIMS, &claim("other", &other)).await.unwrap();
    assert_eq!(made["spec"]["devices"]["requests"][0]["exactly"]["capacity"]["requests"], json!({"cores": "5"}));
}

#[tokio::test]
async fn the_policy_reaches_templates_alternatives_and_claims_of_older_templates() {
    let world = World::new(Release::V1_36).await;
    let admin = world.admin().await;
    let alternatives = json!({"devices": {"requests": [{"name": "npu", "firstAvailable": [
        {"name": "big", "deviceClassName": "x", "capacity": {"requests": {"memCapacity": "20k"}}},
        {"name": "small", "deviceClassName": "x", "capacity": {"requests": {"memCapacity": "8Gi"}}},
    ]}]}});
    let template = |name: &str| {
        json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate",
            "metadata": {"name": name}, "spec": {"spec": alternatives},
        })
    };
    let first = |spec: &Value| {
        spec.pointer("/devices/requests/0/firstAvailable/0/capacity/requests/memCapacity").unwrap().clone()
    };
    let old = post(&admin, TEMPLATES, &template("old")).await.unwrap();
    assert_eq!(first(&old["spec"]["spec"]), "20k", "the policy is not there yet");
    world.server.set_memory_policy(true);
    let made = world.server.claim_from_template("ml", "old", "made").unwrap();
    assert_eq!(first(&made["spec"]), "20000Mi");
    let new = post(&admin, TEMPLATES, &template("new")).await.unwrap();
    assert_eq!(first(&new["spec"]["spec"]), "20000Mi");
}

#[tokio::test]
async fn the_policy_changes_on_update_only_what_the_update_changes() {
    let world = World::new(Release::V1_36).await;
    let admin = world.admin().await;
    let mut old = post(&admin, CLAIMS, &claim("old", &asking(&json!(10000)))).await.unwrap();
    world.server.set_memory_policy(true);
    old["metadata"]["finalizers"] = json!(["a.example.com/keep"]);
    let kept = put(&admin, &format!("{CLAIMS}/old"), &old).await.unwrap();
    let memory = |claim: &Value| claim["spec"]["devices"]["requests"][0]["exactly"]["capacity"]["requests"].clone();
    assert_eq!(memory(&kept), json!({"memCapacity": "10k"}), "an unconverted claim can still be edited");

    let mut again = claim("new", &asking(&json!(10000)));
    post(&admin, CLAIMS, &again).await.unwrap();
    again["metadata"]["namespace"] = json!("ml");
    let applied = put(&admin, &format!("{CLAIMS}/new"), &again).await.unwrap();
    assert_eq!(memory(&applied), json!({"memCapacity": "10000Mi"}), "the same manifest again is accepted");
}

#[tokio::test]
async fn shares_are_rounded_booked_and_refused_only_for_lack_of_room() {
    let world = World::new(Release::V1_36).await;
    let admin = world.admin().await;
    post(&admin, SLICES, &slice_of(&[shared("npu-0"), shared("npu-1")])).await.unwrap();
    let ask = |memory: &str| asking(&json!(memory));
    assert_eq!(given(&world, "a", &ask("10000Mi")).await.unwrap(), pairs(&[("npu-0", "16Gi")]));
    assert_eq!(given(&world, "b", &ask("10k")).await.unwrap(), pairs(&[("npu-0", "8Gi")]), "bare bytes: the least");
    assert_eq!(given(&world, "c", &ask("9Gi")).await.unwrap(), pairs(&[("npu-1", "16Gi")]), "8Gi are left of npu-0");
    let whole = json!({"deviceClassName": "npu.huawei.com"});
    assert!(given(&world, "d", &whole).await.unwrap_err().contains("none with room"), "no card is untouched");
    assert_eq!(given(&world, "e", &ask("8Gi")).await.unwrap(), pairs(&[("npu-0", "8Gi")]));
    assert!(given(&world, "f", &ask("33Gi")).await.is_err(), "more than a card");
    world.server.delete_claim("ml", "c");
    assert_eq!(given(&world, "g", &whole).await.unwrap(), pairs(&[("npu-1", "32Gi")]));
    let shares: std::collections::BTreeSet<String> = ["a", "b", "e", "g"]
        .iter()
        .map(|name| {
            world.server.claim("ml", name).unwrap()["status"]["allocation"]["devices"]["results"][0]["shareID"]
                .to_string()
        })
        .collect();
    assert_eq!(shares.len(), 4);
    assert!(shares.iter().all(|id| id.trim_matches('"').len() == 36), "{shares:?}");
    let other =
        json!({"deviceClassName": "npu.huawei.com", "capacity": {"requests": {"npu.huawei.com/memCapacity": "8Gi"}}});
    world.server.delete_claim("ml", "g");
    assert!(given(&world, "h", &other).await.is_err(), "another name of the capacity matches nothing");
}

#[tokio::test]
async fn the_devices_of_a_request_are_spread_except_on_1_34() {
    let three = json!({"deviceClassName": "x", "count": 3, "capacity": {"requests": {"memCapacity": "8Gi"}}});
    let world = World::new(Release::V1_36).await;
    post(&world.admin().await, SLICES, &slice_of(&[shared("npu-0"), shared("npu-1")])).await.unwrap();
    let expected = pairs(&[("npu-0", "8Gi"), ("npu-1", "8Gi"), ("npu-0", "8Gi")]);
    assert_eq!(given(&world, "a", &three).await.unwrap(), expected);

    let world = World::new(Release::V1_34).await;
    world.server.set_gate(Gate::ConsumableCapacity, true);
    world.server.set_gate(Gate::PartitionableDevices, true);
    post(&world.admin().await, SLICES, &guarded(&[shared("npu-0"), shared("npu-1")])).await.unwrap();
    assert_eq!(given(&world, "a", &three).await.unwrap(), pairs(&[("npu-0", "8Gi"); 3]));
}

#[tokio::test]
async fn the_fault_of_1_34_is_played_and_guarded_placeholders_cure_it() {
    let ask = |memory: &str| asking(&json!(memory));
    let whole = json!({"deviceClassName": "npu.huawei.com"});
    let world = World::new(Release::V1_34).await;
    world.server.set_gate(Gate::ConsumableCapacity, true);
    world.server.set_gate(Gate::PartitionableDevices, true);
    let admin = world.admin().await;
    let mut made = post(&admin, SLICES, &slice_of(&[shared("npu-0"), shared("npu-1")])).await.unwrap();
    assert_eq!(given(&world, "a", &whole).await.unwrap(), pairs(&[("npu-0", "32Gi")]));
    assert!(given(&world, "b", &ask("8Gi")).await.is_err(), "a full first device hinders all others");
    let nine = json!({"deviceClassName": "x", "count": 9, "capacity": {"requests": {"memCapacity": "8Gi"}}});
    world.server.delete_claim("ml", "a");
    assert!(given(&world, "c", &nine).await.unwrap_err().contains("panics"), "there is no third device");

    world.server.delete("resource.k8s.io", "resourceslices", "", "a");
    made["spec"] = guarded(&[shared("npu-0"), shared("npu-1"), shared("npu-2")])["spec"].take();
    made["metadata"] = json!({"name": "a"});
    post(&admin, SLICES, &made).await.unwrap();
    assert_eq!(given(&world, "d", &whole).await.unwrap(), pairs(&[("npu-0", "32Gi")]));
    assert_eq!(given(&world, "e", &ask("10000Mi")).await.unwrap(), pairs(&[("npu-1", "16Gi")]));
    assert_eq!(given(&world, "f", &ask("8Gi")).await.unwrap(), pairs(&[("npu-1", "8Gi")]));
    assert!(given(&world, "g", &nine).await.unwrap_err().contains("none with room"), "five are left, and no panic");
    let by_driver = json!({"metadata": {"name": "driver-only"}, "spec": {"selectors": [
        {"cel": {"expression": "device.driver == \"npu.huawei.com\""}}]}});
    post(&admin, "/apis/resource.k8s.io/v1/deviceclasses", &by_driver).await.unwrap();
    let any = json!({"deviceClassName": "driver-only", "capacity": {"requests": {"memCapacity": "8Gi"}}});
    assert_eq!(given(&world, "h", &any).await.unwrap(), pairs(&[("npu-1", "8Gi")]), "never a placeholder");
}

#[tokio::test]
async fn counters_tie_a_card_to_its_parts() {
    let world = World::new(Release::V1_36).await;
    let admin = world.admin().await;
    let takes = |cores: u32| json!([{"counterSet": "npu-0", "counters": {"cores": {"value": cores.to_string()}}}]);
    let device = |name: &str, kind: &str, template: &str, cores: u32| {
        json!({
            "name": name, "consumesCounters": takes(cores),
            "attributes": {"type": {"string": kind}, "template": {"string": template}},
        })
    };
    let mut counters = slice("counters", "node1");
    counters["spec"]["devices"] = json!([]);
    counters["spec"]["sharedCounters"] = json!([{"name": "npu-0", "counters": {"cores": {"value": "20"}}}]);
    counters["spec"]["pool"]["resourceSliceCount"] = json!(2);
    let mut devices = slice_of(&[
        device("npu-0", "npu", "", 20),
        device("npu-0-half-0", "vnpu", "half", 10),
        device("npu-0-half-1", "vnpu", "half", 10),
    ]);
    devices["spec"]["pool"]["resourceSliceCount"] = json!(2);
    post(&admin, SLICES, &counters).await.unwrap();
    post(&admin, SLICES, &devices).await.unwrap();
    let selector = r#"device.driver == "npu.huawei.com" && device.attributes["npu.huawei.com"].template == "half""#;
    let half = json!({"metadata": {"name": "half"}, "spec": {"selectors": [{"cel": {"expression": selector}}]}});
    post(&admin, "/apis/resource.k8s.io/v1/deviceclasses", &half).await.unwrap();
    let (whole, half) = (json!({"deviceClassName": "npu.huawei.com"}), json!({"deviceClassName": "half"}));
    assert_eq!(given(&world, "a", &half).await.unwrap(), pairs(&[("npu-0-half-0", "-")]));
    assert!(given(&world, "b", &whole).await.is_err(), "half of the cores are taken");
    assert_eq!(given(&world, "c", &half).await.unwrap(), pairs(&[("npu-0-half-1", "-")]));
    world.server.delete_claim("ml", "a");
    world.server.delete_claim("ml", "c");
    assert_eq!(given(&world, "d", &whole).await.unwrap(), pairs(&[("npu-0", "-")]));
    assert!(given(&world, "e", &half).await.is_err(), "the card is taken");
}

#[tokio::test]
async fn alternatives_configuration_and_administrators_are_understood() {
    let world = World::new(Release::V1_36).await;
    let admin = world.admin().await;
    post(&admin, SLICES, &slice_of(&[shared("npu-0")])).await.unwrap();
    let opaque = json!({"opaque": {"driver": "npu.huawei.com", "parameters": {"kind": "VnpuConfig"}}});
    let class = json!({"metadata": {"name": "set"}, "spec": {"config": [opaque], "selectors": [
        {"cel": {"expression": "device.driver == \"npu.huawei.com\""}}]}});
    post(&admin, "/apis/resource.k8s.io/v1/deviceclasses", &class).await.unwrap();
    let mut body = claim("a", &json!({}));
    let alternative = |name: &str, memory: &str| json!({"name": name, "deviceClassName": "set", "capacity": {"requests": {"memCapacity": memory}}});
    body["spec"]["devices"]["requests"] =
        json!([{"name": "npu", "firstAvailable": [alternative("huge", "64Gi"), alternative("half", "16Gi")]}]);
    body["spec"]["devices"]["config"] = json!([opaque]);
    post(&admin, CLAIMS, &body).await.unwrap();
    let allocated = world.server.allocate("ml", "a").unwrap()["status"]["allocation"]["devices"].clone();
    assert_eq!(allocated["results"][0]["request"], "npu/half");
    let sources: Vec<&Value> = allocated["config"].as_array().unwrap().iter().map(|entry| &entry["source"]).collect();
    assert_eq!(sources, ["FromClass", "FromClaim"]);

    let look = json!({"deviceClassName": "set", "allocationMode": "All", "adminAccess": true,
        "capacity": {"requests": {"memCapacity": "8Gi"}}});
    assert_eq!(given(&world, "b", &look).await.unwrap(), pairs(&[("npu-0", "8Gi")]));
    let rest = json!({"deviceClassName": "set", "capacity": {"requests": {"memCapacity": "16Gi"}}});
    assert_eq!(given(&world, "c", &rest).await.unwrap(), pairs(&[("npu-0", "16Gi")]), "looking takes nothing");
    assert!(world.server.allocate("ml", "c").unwrap_err().to_string().contains("allocated already"));
}

//! The shipped manifests: they parse, and keep the rules without which a cluster would be harmed.

use std::{collections::BTreeSet, fs, path::PathBuf};

use npu_dra::domain::{
    health::HealthReading,
    npu::{ChipReading, Family},
    vnpu::Sliceable,
};
use serde_json::Value;

fn dir() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("packaging/manifests")
}

fn text(file: &str) -> String {
    fs::read_to_string(dir().join(file)).unwrap()
}

fn objects(file: &str) -> Vec<Value> {
    serde_saphyr::from_multiple(&text(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

/// All objects of all files.
fn all() -> Vec<(String, Value)> {
    let files = fs::read_dir(dir()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let all = files.flat_map(|file| objects(&file).into_iter().map(move |object| (file.clone(), object)));
    all.collect()
}

/// The expressions of an object's selectors, wherever they stand.
fn expressions(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(map) => {
            if let Some(expression) = map.get("cel").and_then(|cel| cel["expression"].as_str()) {
                found.push(expression.to_owned());
            }
            map.values().for_each(|value| expressions(value, found));
        }
        Value::Array(items) => items.iter().for_each(|value| expressions(value, found)),
        _ => {}
    }
}

#[test]
fn every_manifest_parses_and_has_the_version_that_its_kind_has() {
    let expected = |file: &str, kind: &str| match kind {
        "Namespace" | "Pod" | "ServiceAccount" => "v1",
        "ClusterRole" | "ClusterRoleBinding" => "rbac.authorization.k8s.io/v1",
        "DeviceClass" | "ResourceClaimTemplate" => "resource.k8s.io/v1",
        "MutatingAdmissionPolicy" | "MutatingAdmissionPolicyBinding" if file.contains("v1beta1") => {
            "admissionregistration.k8s.io/v1beta1"
        }
        "MutatingAdmissionPolicy"
        | "MutatingAdmissionPolicyBinding"
        | "ValidatingAdmissionPolicy"
        | "ValidatingAdmissionPolicyBinding" => "admissionregistration.k8s.io/v1",
        other => panic!("{file}: {other} is not expected"),
    };
    let all = all();
    for (file, object) in &all {
        let kind = object["kind"].as_str().unwrap();
        assert_eq!(object["apiVersion"], expected(file, kind), "{file}: {kind}");
        let name = object["metadata"]["name"].as_str().unwrap();
        let label = |part: &str| {
            !part.is_empty()
                && part.len() <= 63
                && part.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
                && !part.starts_with('-')
                && !part.ends_with('-')
        };
        assert!(name.split('.').all(label), "{file}: {name}");
    }
    assert_eq!(all.iter().map(|(file, _)| file).collect::<BTreeSet<_>>().len(), 7);
}

#[test]
fn every_selector_asks_for_the_driver_first() {
    let mut found = Vec::new();
    for (_, object) in all() {
        expressions(&object, &mut found);
    }
    assert!(found.len() > 8);
    for expression in found {
        assert!(expression.starts_with("device.driver == \"npu.huawei.com\" && "), "{expression}");
    }
}

#[test]
fn the_main_class_takes_npus_only() {
    let [class] = &objects("deviceclass.yaml")[..] else { panic!("one class") };
    assert_eq!(class["metadata"]["name"], "npu.huawei.com");
    let mut found = Vec::new();
    expressions(class, &mut found);
    assert_eq!(found.len(), 1);
    assert!(found[0].ends_with("&& device.attributes[\"npu.huawei.com\"].type == \"npu\""), "{}", found[0]);
}

#[test]
fn each_template_that_a_chip_can_have_has_its_class() {
    let mut templates = BTreeSet::new();
    for board in 0..0x100 {
        let chip = ChipReading {
            physical_id: 0,
            logic_id: None,
            card_id: None,
            device_id: 0,
            bus_id: "0000:c1:00.0".parse().unwrap(),
            vdie: None,
            chip_name: "910B".to_owned(),
            family: Family::Ascend910B,
            board_id: Some(board),
            memory: Some(1 << 35),
            ai_cores: None,
            numa_node: None,
            pcie_root: None,
            health: HealthReading::default(),
        };
        if let Ok(sliceable) = Sliceable::of(&chip) {
            templates.extend(sliceable.templates.into_iter().map(|template| template.name));
        }
    }
    let mut classes = BTreeSet::new();
    for class in objects("deviceclass-templates.yaml") {
        let mut found = Vec::new();
        expressions(&class, &mut found);
        let template = found[0].rsplit("template == \"").next().unwrap().trim_end_matches('"').to_owned();
        assert!(found[0].contains("type == \"vnpu\""), "{}", found[0]);
        assert_eq!(class["metadata"]["name"], format!("{}.npu.huawei.com", template.replace('_', "-")));
        assert!(classes.insert(template), "twice");
    }
    assert_eq!(classes, templates.into_iter().map(str::to_owned).collect());
}

#[test]
fn the_two_forms_of_the_memory_policy_differ_only_in_their_version() {
    let version = |objects: Vec<Value>| {
        let strip = |mut object: Value| {
            let version = object.as_object_mut().unwrap().remove("apiVersion").unwrap();
            (version.as_str().unwrap().to_owned(), object)
        };
        objects.into_iter().map(strip).unzip::<String, Value, Vec<_>, Vec<_>>()
    };
    let (stable, body) = version(objects("memory-policy.yaml"));
    let (beta, same) = version(objects("memory-policy-v1beta1.yaml"));
    assert_eq!(stable, ["admissionregistration.k8s.io/v1"; 2]);
    assert_eq!(beta, ["admissionregistration.k8s.io/v1beta1"; 2]);
    assert_eq!(body, same);
    assert_eq!(body[1]["spec"]["policyName"], body[0]["metadata"]["name"]);
    assert_eq!(body[0]["spec"]["failurePolicy"], "Fail");
    // Kubernetes 1.34 knows neither of these in CEL.
    assert!(!text("memory-policy.yaml").contains("lists.range") && !text("memory-policy.yaml").contains("flatten"));
}

#[test]
fn the_sample_claim_is_the_one_of_the_requirements_word_for_word() {
    let wanted = "apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: npu-claim-template, namespace: ascend-dra}
spec:
  spec:
    devices:
      requests:
        - name: npu
          exactly:
            deviceClassName: npu.huawei.com
            capacity: {requests: {memCapacity: 10000}}
";
    assert!(text("sample-memory.yaml").contains(wanted));
}

#[test]
fn the_pods_of_the_samples_use_the_templates_beside_them() {
    for file in ["sample-memory.yaml", "sample-whole-npu.yaml"] {
        let objects = objects(file);
        let of = |kind: &str| objects.iter().find(|object| object["kind"] == kind).unwrap();
        let (template, pod) = (of("ResourceClaimTemplate"), of("Pod"));
        let claim = &pod["spec"]["resourceClaims"][0];
        assert_eq!(claim["resourceClaimTemplateName"], template["metadata"]["name"], "{file}");
        assert_eq!(pod["metadata"]["namespace"], template["metadata"]["namespace"], "{file}");
        assert_eq!(pod["spec"]["containers"][0]["resources"]["claims"][0]["name"], claim["name"], "{file}");
    }
}

#[test]
fn the_account_has_the_rights_that_the_driver_uses_and_its_policies_name_it() {
    let objects = objects("rbac.yaml");
    let cluster_role = objects.iter().find(|object| object["kind"] == "ClusterRole").unwrap();
    let verbs = |resource: &str| {
        let rules = cluster_role["rules"].as_array().unwrap();
        let found = rules.iter().find(|rule| rule["resources"].as_array().unwrap().iter().any(|r| r == resource));
        let verbs = found.unwrap()["verbs"].as_array().unwrap();
        verbs.iter().map(|verb| verb.as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(verbs("resourceslices"), ["get", "list", "watch", "create", "update", "patch", "delete"]);
    assert_eq!(verbs("resourceclaims"), ["get"]);
    assert_eq!(verbs("nodes"), ["get"]);
    assert_eq!(verbs("events"), ["create", "patch"]);
    let account = objects.iter().find(|object| object["kind"] == "ServiceAccount").unwrap();
    let meta = |name: &str| account["metadata"][name].as_str().unwrap();
    let user = format!("system:serviceaccount:{}:{}", meta("namespace"), meta("name"));
    for policy in objects.iter().filter(|object| object["kind"] == "ValidatingAdmissionPolicy") {
        let condition = policy["spec"]["matchConditions"][0]["expression"].as_str().unwrap();
        assert_eq!(condition, format!("request.userInfo.username == \"{user}\""));
    }
}

//! What the API server refuses in an object's metadata.

use serde_json::{Map, Value};

use super::{
    gates::{Release, Rules},
    names,
    store::{Resource, meta},
    validate::{Causes, list, text},
};

/// All annotations together, in bytes.
const ANNOTATIONS: usize = 256 * 1024;

/// Checks the metadata of a decoded object.
pub(crate) fn check(causes: &mut Causes, resource: &Resource, object: &Value, rules: &Rules) {
    let name = meta(object, "name");
    if name.is_empty() {
        causes.required("metadata.name", "name or generateName is required");
    } else if resource.group == "resource.k8s.io" || resource.plural == "events" {
        causes.check("metadata.name", name, names::subdomain(name, 253));
    }
    let none = Value::Object(Map::new());
    let metadata = object.get("metadata").unwrap_or(&none);
    let map = |name: &str| metadata.get(name).and_then(Value::as_object).into_iter().flatten();
    for (key, value) in map("labels") {
        causes.check("metadata.labels", key, names::label_key(key));
        let value = value.as_str().unwrap_or_default();
        causes.check("metadata.labels", value, names::label_value(value));
    }
    let mut size = 0;
    for (key, value) in map("annotations") {
        causes.check("metadata.annotations", key, names::label_key(&key.to_lowercase()));
        size += key.len() + value.as_str().map_or(0, str::len);
    }
    if size > ANNOTATIONS {
        causes.too_long("metadata.annotations", ANNOTATIONS);
    }
    for (index, owner) in list(metadata, "ownerReferences").iter().enumerate() {
        if text(owner, "uid").unwrap_or_default().is_empty() {
            if rules.since(Release::V1_37) {
                causes.required(&format!("metadata.ownerReferences[{index}].uid"), "must not be empty");
            } else {
                causes.invalid("metadata.ownerReferences.uid", "", "must not be empty");
            }
        }
    }
}

//! Merge patches, and server-side apply as far as one manager per object needs it.

use serde_json::{Map, Value, json};

use super::{status::Failure, store::Resource};

/// JSON merge patch (RFC 7396).
pub(crate) fn merge(target: &mut Value, patch: Value) {
    let Value::Object(patch) = patch else {
        *target = patch;
        return;
    };
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    let Some(map) = target.as_object_mut() else { return };
    for (name, value) in patch {
        if value.is_null() {
            map.remove(&name);
        } else {
            merge(map.entry(name).or_insert(Value::Null), value);
        }
    }
}

/// Server-side apply onto an existing object: metadata is merged, the applied parts replace the stored ones (lists are
/// atomic), except `status.devices` of a claim, whose entries are merged by key.
///
/// # Errors
/// The fields that another manager owns, unless `force`.
pub(crate) fn apply(
    old: &Value,
    applied: &Value,
    manager: &str,
    force: bool,
    subresource: &str,
) -> Result<Value, Vec<(String, String)>> {
    let owner = old.pointer("/metadata/managedFields/0/manager").and_then(Value::as_str).unwrap_or(manager);
    let parts: &[&str] = if subresource == "status" { &["status"] } else { &["spec"] };
    if owner != manager && !force {
        let mut conflicts = Vec::new();
        for part in parts {
            if let Some(value) = applied.get(*part).filter(|_| *part == "spec") {
                differing(&old[*part], value, &format!(".{part}"), &mut |field| {
                    conflicts.push((field.to_owned(), owner.to_owned()));
                });
            }
        }
        if !conflicts.is_empty() {
            return Err(conflicts);
        }
    }
    let mut merged = old.clone();
    if let Some(metadata) = applied.get("metadata").cloned() {
        merge(&mut merged["metadata"], metadata);
    }
    for part in parts {
        let Some(value) = applied.get(*part).cloned() else { continue };
        if *part == "status" {
            let mut status = merged.get("status").cloned().unwrap_or_else(|| json!({}));
            for (name, value) in value.as_object().cloned().into_iter().flatten() {
                if name == "devices" {
                    let kept = merge_devices(status.get("devices"), &value, &applied_devices(old, manager));
                    status["devices"] = kept;
                } else {
                    status[name] = value;
                }
            }
            merged["status"] = status;
        } else {
            merged[*part] = value;
        }
    }
    Ok(merged)
}

/// Finds the fields that are set to something else; lists are one field each.
fn differing(old: &Value, new: &Value, path: &str, found: &mut impl FnMut(&str)) {
    match (old, new) {
        (Value::Object(old), Value::Object(new)) => {
            for (name, value) in new {
                if let Some(before) = old.get(name) {
                    differing(before, value, &format!("{path}.{name}"), found);
                }
            }
        }
        (old, new) if old == new => {}
        _ => found(path),
    }
}

/// JSON Patch (RFC 6902), as far as `add`, `remove`, `replace` and `test`.
///
/// # Errors
/// 400 for what is no patch, 422 for one that does not fit the object.
pub(crate) fn json_patch(object: &Value, body: &[u8]) -> Result<Value, Failure> {
    let patch: Value =
        serde_json::from_slice(body).map_err(|e| Failure::bad_request(format!("error decoding patch: {e}")))?;
    let steps = patch.as_array().ok_or_else(|| Failure::bad_request("error decoding patch: no list"))?;
    let mut object = object.clone();
    for step in steps {
        let text = |name: &str| step.get(name).and_then(Value::as_str).unwrap_or_default();
        let misfit = || Failure::new(422, format!("the server rejected our request: {step} does not fit"));
        let (above, key) = text("path").rsplit_once('/').ok_or_else(misfit)?;
        let key = key.replace("~1", "/").replace("~0", "~");
        let value = step.get("value").cloned().unwrap_or_default();
        if text("op") == "test" {
            if object.pointer(text("path")) == Some(&value) {
                continue;
            }
            return Err(misfit());
        }
        match (object.pointer_mut(above).ok_or_else(misfit)?, text("op")) {
            (Value::Object(map), "add") => drop(map.insert(key, value)),
            (Value::Object(map), "replace") if map.contains_key(&key) => drop(map.insert(key, value)),
            (Value::Object(map), "remove") => drop(map.remove(&key).ok_or_else(misfit)?),
            (Value::Array(items), "add") if key == "-" => items.push(value),
            (Value::Array(items), op) => {
                let index: usize = key.parse().ok().filter(|index| *index < items.len()).ok_or_else(misfit)?;
                match op {
                    "add" => items.insert(index, value),
                    "replace" => items[index] = value,
                    _ => drop(items.remove(index)),
                }
            }
            _ => return Err(misfit()),
        }
    }
    Ok(object)
}

/// What identifies a device's status.
fn device_key(device: &Value) -> Value {
    ["driver", "pool", "device", "shareID"].map(|n| device.get(n).cloned().unwrap_or_default()).to_vec().into()
}

/// The devices that a manager has applied to a claim's status before.
fn applied_devices(object: &Value, manager: &str) -> Vec<Value> {
    let entries = object.pointer("/metadata/managedFields").and_then(Value::as_array);
    let mine = entries.into_iter().flatten().find(|e| e["manager"] == manager && e["subresource"] == "status");
    mine.and_then(|e| e["devices"].as_array().cloned()).unwrap_or_default()
}

/// What `managedFields` says after a manager has applied a claim's status.
pub(crate) fn status_entry(applied: &Value, manager: &str) -> Value {
    let devices = applied.pointer("/status/devices").and_then(Value::as_array);
    let keys: Vec<Value> = devices.into_iter().flatten().map(device_key).collect();
    json!({"manager": manager, "operation": "Apply", "subresource": "status", "devices": keys})
}

/// Entries are merged by their key; those that a manager applied before and now does not are taken away.
fn merge_devices(old: Option<&Value>, applied: &Value, before: &[Value]) -> Value {
    let applied = applied.as_array().cloned().unwrap_or_default();
    let mut all: Vec<Value> = old.and_then(Value::as_array).cloned().unwrap_or_default();
    all.retain(|o| {
        let key = device_key(o);
        !before.contains(&key) && !applied.iter().any(|a| device_key(a) == key)
    });
    all.extend(applied);
    Value::Array(all)
}

/// The 409 of an apply that meets other managers' fields.
pub(crate) fn conflict(resource: &Resource, name: &str, conflicts: &[(String, String)]) -> Failure {
    let texts: Vec<String> = conflicts.iter().map(|(f, m)| format!("conflict with \"{m}\": {f}")).collect();
    let message = format!("Apply failed with {} conflicts: {}", conflicts.len(), texts.join("; "));
    let mut failure = Failure::new(409, message);
    let causes: Vec<Value> = conflicts
        .iter()
        .map(
            |(f, m)| json!({"reason": "FieldManagerConflict", "message": format!("conflict with \"{m}\""), "field": f}),
        )
        .collect();
    failure.details = Some(json!({"name": name, "group": resource.group, "kind": resource.plural, "causes": causes}));
    failure
}

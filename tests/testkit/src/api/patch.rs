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
            for (name, value) in applied.get(*part).and_then(Value::as_object).into_iter().flatten() {
                if old[*part].get(name).is_some_and(|o| o != value) && *part == "spec" {
                    conflicts.push((format!(".{part}.{name}"), owner.to_owned()));
                }
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
                    let kept = merge_devices(status.get("devices"), &value);
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

fn merge_devices(old: Option<&Value>, applied: &Value) -> Value {
    let key = |v: &Value| ["driver", "pool", "device", "shareID"].map(|n| v.get(n).cloned().unwrap_or_default());
    let applied = applied.as_array().cloned().unwrap_or_default();
    let mut all: Vec<Value> = old.and_then(Value::as_array).cloned().unwrap_or_default();
    all.retain(|o| !applied.iter().any(|a| key(a) == key(o)));
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

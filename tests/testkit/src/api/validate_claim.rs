//! What the API server refuses in claims, templates and classes (422).

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use super::{
    cel,
    gates::{Gate, Rules},
    names,
    validate::{Causes, binding, duplicated, is_late, list, text},
};

/// The requests of a claim, each with its alternatives.
type Requests<'a> = BTreeMap<&'a str, BTreeSet<&'a str>>;

/// Checks a claim, and against `old` when it replaces one.
pub(crate) fn claim(new: &Value, old: Option<&Value>, rules: &Rules) -> Causes {
    let mut causes = Causes::default();
    let none = Value::Object(Map::new());
    if spec_changed(new, old, &mut causes, rules) {
        return causes;
    }
    claim_spec(&mut causes, new.get("spec").unwrap_or(&none), "spec", rules);
    causes
}

/// Checks a claim template.
pub(crate) fn template(new: &Value, old: Option<&Value>, rules: &Rules) -> Causes {
    let mut causes = Causes::default();
    let none = Value::Object(Map::new());
    if spec_changed(new, old, &mut causes, rules) {
        return causes;
    }
    let metadata = new.pointer("/spec/metadata").and_then(Value::as_object);
    for name in metadata.into_iter().flat_map(Map::keys) {
        if !matches!(name.as_str(), "labels" | "annotations" | "creationTimestamp") {
            causes.forbidden(&format!("spec.metadata.{name}"), "must not be set in template");
        }
    }
    claim_spec(&mut causes, new.pointer("/spec/spec").unwrap_or(&none), "spec.spec", rules);
    causes
}

/// A spec does not change; from 1.36 on nothing else is said of one that does.
fn spec_changed(new: &Value, old: Option<&Value>, causes: &mut Causes, rules: &Rules) -> bool {
    let changed = old.is_some_and(|old| old.get("spec") != new.get("spec"));
    if changed {
        causes.invalid("spec", "", "field is immutable");
    }
    changed && is_late(rules)
}

/// Checks a device class.
pub(crate) fn class(new: &Value, rules: &Rules) -> Causes {
    let mut causes = Causes::default();
    let none = Value::Object(Map::new());
    let spec = new.get("spec").unwrap_or(&none);
    selectors(&mut causes, spec, "spec", rules);
    config(&mut causes, spec, "spec", 32, &Requests::new(), rules);
    if let Some(name) = text(spec, "extendedResourceName") {
        let good = name.contains('/') && !name.contains("kubernetes.io/") && names::label_key(name).is_ok();
        if !good {
            causes.invalid("spec.extendedResourceName", name, "must be a valid extended resource name");
        }
    }
    causes
}

fn requests(devices: &Value) -> Requests<'_> {
    let name = |request| text(request, "name").unwrap_or_default();
    let all = list(devices, "requests").iter();
    all.map(|request| (name(request), list(request, "firstAvailable").iter().map(name).collect())).collect()
}

/// A request's name, or that of an alternative: `request` or `request/alternative`.
fn reference(causes: &mut Causes, field: &str, name: &str, requests: &Requests<'_>) {
    let parts: Vec<&str> = name.split('/').collect();
    let known = match parts.as_slice() {
        [request] => requests.contains_key(request),
        [request, alternative] => requests.get(request).is_some_and(|all| all.contains(alternative)),
        _ => false,
    };
    if parts.len() <= 2 {
        for part in &parts {
            causes.check(field, part, names::label(part));
        }
    }
    if !known {
        let why =
            "must be the name of a request in the claim or the name of a request and a subrequest separated by '/'";
        causes.invalid(field, name, why);
    }
}

fn references(causes: &mut Causes, holder: &Value, path: &str, requests: &Requests<'_>, rules: &Rules) {
    let names = list(holder, "requests");
    let path = format!("{path}.requests");
    if causes.is_over(&path, names.len(), 32, rules) {
        return;
    }
    let mut seen = BTreeSet::new();
    for (index, name) in names.iter().filter_map(Value::as_str).enumerate() {
        let at = format!("{path}[{index}]");
        reference(causes, &at, name, requests);
        if !seen.insert(name) {
            causes.duplicate(&at, name);
        }
    }
}

fn claim_spec(causes: &mut Causes, spec: &Value, path: &str, rules: &Rules) {
    let none = Value::Object(Map::new());
    let devices = spec.get("devices").unwrap_or(&none);
    let path = format!("{path}.devices");
    let known = requests(devices);
    let requests = list(devices, "requests");
    if !causes.is_over(&format!("{path}.requests"), requests.len(), 32, rules) {
        let mut seen = BTreeSet::new();
        for (index, request) in requests.iter().enumerate() {
            let at = format!("{path}.requests[{index}]");
            let name = text(request, "name").unwrap_or_default();
            self::request(causes, request, &at, rules);
            if !seen.insert(name) {
                causes.duplicate(&duplicated(&at, "name", rules), name);
            }
        }
    }
    let constraints = list(devices, "constraints");
    if !causes.is_over(&format!("{path}.constraints"), constraints.len(), 32, rules) {
        for (index, constraint) in constraints.iter().enumerate() {
            self::constraint(causes, constraint, &format!("{path}.constraints[{index}]"), &known, rules);
        }
    }
    config(causes, devices, &path, 32, &known, rules);
}

fn request(causes: &mut Causes, request: &Value, at: &str, rules: &Rules) {
    let name = text(request, "name").unwrap_or_default();
    causes.check(&format!("{at}.name"), name, names::label(name));
    let subs = list(request, "firstAvailable");
    let exactly = request.get("exactly");
    if exactly.is_some() && !subs.is_empty() {
        let why = "exactly one of `exactly` or `firstAvailable` is required, but multiple fields are set";
        causes.invalid(at, "", why);
        if is_late(rules) {
            return;
        }
    }
    if exactly.is_none() && subs.is_empty() {
        causes.required(at, "exactly one of `exactly` or `firstAvailable` is required");
    }
    if !causes.is_over(&format!("{at}.firstAvailable"), subs.len(), 8, rules) {
        let mut seen = BTreeSet::new();
        for (index, sub) in subs.iter().enumerate() {
            let at = format!("{at}.firstAvailable[{index}]");
            let name = text(sub, "name").unwrap_or_default();
            causes.check(&format!("{at}.name"), name, names::label(name));
            one_request(causes, sub, &at, rules);
            if !seen.insert(name) {
                causes.duplicate(&duplicated(&at, "name", rules), name);
            }
        }
    }
    if let Some(exact) = exactly {
        one_request(causes, exact, &format!("{at}.exactly"), rules);
    }
}

fn constraint(causes: &mut Causes, constraint: &Value, at: &str, known: &Requests<'_>, rules: &Rules) {
    references(causes, constraint, at, known, rules);
    for field in ["matchAttribute", "distinctAttribute"] {
        let Some(name) = text(constraint, field) else { continue };
        let field = format!("{at}.{field}");
        causes.qualified(&field, name, rules);
        if !name.is_empty() && !name.contains('/') {
            causes.invalid(&field, name, "must include a domain");
        }
        // The second is not looked at.
        return;
    }
    if rules.has(Gate::ConsumableCapacity) {
        causes.required(at, "exactly one of \"matchAttribute\" or \"distinctAttribute\" is required");
    } else {
        causes.required(&format!("{at}.matchAttribute"), "");
    }
}

fn one_request(causes: &mut Causes, request: &Value, path: &str, rules: &Rules) {
    let class = text(request, "deviceClassName").unwrap_or_default();
    if class.is_empty() {
        causes.required(&format!("{path}.deviceClassName"), "");
    } else {
        causes.check(&format!("{path}.deviceClassName"), class, names::subdomain(class, 253));
    }
    let count = request.get("count").and_then(Value::as_i64);
    match text(request, "allocationMode").unwrap_or("ExactCount") {
        "ExactCount" => {
            if let Some(count) = count.filter(|c| *c <= 0) {
                causes.invalid(&format!("{path}.count"), &count.to_string(), "must be greater than zero");
            }
        }
        "All" => {
            if let Some(count) = count.filter(|c| *c != 0) {
                let why = "must not be specified when allocationMode is 'All'";
                causes.invalid(&format!("{path}.count"), &count.to_string(), why);
            }
        }
        other => causes.unsupported(&format!("{path}.allocationMode"), other, "\"All\", \"ExactCount\""),
    }
    selectors(causes, request, path, rules);
    for (index, toleration) in list(request, "tolerations").iter().enumerate() {
        self::toleration(causes, toleration, &format!("{path}.tolerations[{index}]"));
    }
}

fn toleration(causes: &mut Causes, toleration: &Value, at: &str) {
    if let Some(key) = text(toleration, "key").filter(|key| !key.is_empty()) {
        causes.check(&format!("{at}.key"), key, names::label_key(key));
    }
    let value = text(toleration, "value").unwrap_or_default();
    match text(toleration, "operator") {
        Some("Exists") if !value.is_empty() => {
            causes.invalid(&format!("{at}.value"), value, "must be empty for operator `Exists`");
        }
        Some("Exists") => {}
        Some("Equal") => causes.check(&format!("{at}.value"), value, names::label_value(value)),
        None | Some("") => causes.required(&format!("{at}.operator"), ""),
        Some(other) => causes.unsupported(&format!("{at}.operator"), other, "\"Equal\", \"Exists\""),
    }
    match text(toleration, "effect") {
        None | Some("NoSchedule" | "NoExecute") => {}
        Some(other) => causes.unsupported(&format!("{at}.effect"), other, "\"NoExecute\", \"NoSchedule\""),
    }
}

fn selectors(causes: &mut Causes, holder: &Value, path: &str, rules: &Rules) {
    let selectors = list(holder, "selectors");
    if causes.is_over(&format!("{path}.selectors"), selectors.len(), 32, rules) {
        return;
    }
    for (index, selector) in selectors.iter().enumerate() {
        let at = format!("{path}.selectors[{index}].cel");
        let Some(cel) = selector.get("cel") else {
            causes.required(&at, "");
            continue;
        };
        let at = format!("{at}.expression");
        let expression = text(cel, "expression").unwrap_or_default();
        if expression.len() > 10 * 1024 {
            causes.too_long(&at, 10 * 1024);
        } else if let Err(why) = cel::check(expression, rules) {
            causes.invalid(&at, expression, &why);
        }
    }
}

fn config(causes: &mut Causes, holder: &Value, path: &str, most: usize, known: &Requests<'_>, rules: &Rules) {
    let entries = list(holder, "config");
    if causes.is_over(&format!("{path}.config"), entries.len(), most, rules) {
        return;
    }
    for (index, entry) in entries.iter().enumerate() {
        let at = format!("{path}.config[{index}]");
        references(causes, entry, &at, known, rules);
        if most > 32 {
            match text(entry, "source").unwrap_or_default() {
                "FromClass" | "FromClaim" => {}
                "" => causes.required(&format!("{at}.source"), ""),
                other => causes.unsupported(&format!("{at}.source"), other, "\"FromClaim\", \"FromClass\""),
            }
        }
        let at = format!("{at}.opaque");
        let Some(opaque) = entry.get("opaque") else {
            causes.required(&at, "");
            continue;
        };
        causes.driver(&format!("{at}.driver"), text(opaque, "driver").unwrap_or_default(), rules);
        extension(causes, opaque.get("parameters"), &format!("{at}.parameters"));
    }
}

/// An object of somebody else's kind, of at most 10 KiB.
fn extension(causes: &mut Causes, value: Option<&Value>, at: &str) {
    match value {
        None | Some(Value::Null) => causes.required(at, ""),
        Some(value) if value.to_string().len() > 10 * 1024 => causes.too_long(at, 10 * 1024),
        Some(Value::Object(_)) => {}
        Some(_) => causes.invalid(at, "<value omitted>", "must be a valid JSON object"),
    }
}

/// Takes the reports of devices away that were just deallocated.
pub(crate) fn drop_deallocated(claim: &mut Value, old: Option<&Value>) {
    let keys = |claim: &Value| -> BTreeSet<[String; 4]> {
        let results = claim.pointer("/status/allocation/devices/results").and_then(Value::as_array);
        results.into_iter().flatten().map(key).collect()
    };
    let gone: BTreeSet<_> = old.map(keys).unwrap_or_default().difference(&keys(claim)).cloned().collect();
    let Some(status) = claim.get_mut("status").and_then(Value::as_object_mut) else { return };
    if let Some(Value::Array(devices)) = status.get_mut("devices") {
        devices.retain(|device| !gone.contains(&key(device)));
        if devices.is_empty() {
            status.remove("devices");
        }
    }
}

/// Checks a claim's status against the one that it replaces.
pub(crate) fn status(new: &Value, old: Option<&Value>, rules: &Rules) -> Causes {
    let mut causes = Causes::default();
    let none = Value::Object(Map::new());
    let status = new.get("status").unwrap_or(&none);
    let allocation = status.get("allocation");
    reserved(&mut causes, status, allocation.is_some(), rules);
    let before = old.and_then(|old| old.pointer("/status/allocation"));
    match (before, allocation) {
        (Some(before), Some(after)) if before != after => {
            causes.invalid("status.allocation", "", "field is immutable");
        }
        (None, Some(allocation)) => self::allocation(&mut causes, allocation, new, rules),
        _ => {}
    }
    let results = status.pointer("/allocation/devices/results").and_then(Value::as_array);
    let results: &[Value] = results.map_or(&[], Vec::as_slice);
    let mut seen = BTreeSet::new();
    for (index, device) in list(status, "devices").iter().enumerate() {
        let at = format!("status.devices[{index}]");
        device_status(&mut causes, device, &at, results, rules);
        if !seen.insert(key(device)) {
            causes.duplicate(&duplicated(&at, "deviceID", rules), &key(device).join("/"));
        }
    }
    causes
}

fn key(device: &Value) -> [String; 4] {
    ["driver", "pool", "device", "shareID"].map(|n| text(device, n).unwrap_or_default().to_owned())
}

fn reserved(causes: &mut Causes, status: &Value, allocated: bool, rules: &Rules) {
    let reserved = list(status, "reservedFor");
    if causes.is_over("status.reservedFor", reserved.len(), 256, rules) {
        return;
    }
    let mut seen = BTreeSet::new();
    for (index, user) in reserved.iter().enumerate() {
        let at = format!("status.reservedFor[{index}]");
        for field in ["resource", "name", "uid"] {
            if text(user, field).unwrap_or_default().is_empty() {
                causes.required(&format!("{at}.{field}"), "");
            }
        }
        if !seen.insert(text(user, "uid").unwrap_or_default()) {
            causes.duplicate(&duplicated(&at, "uid", rules), text(user, "uid").unwrap_or_default());
        }
    }
    if !reserved.is_empty() && !allocated {
        causes.forbidden("status.reservedFor", "may not be specified when `allocated` is not set");
    }
}

fn allocation(causes: &mut Causes, allocation: &Value, claim: &Value, rules: &Rules) {
    let none = Value::Object(Map::new());
    let known = requests(claim.pointer("/spec/devices").unwrap_or(&none));
    let devices = allocation.get("devices").unwrap_or(&none);
    let at = "status.allocation.devices";
    let results = list(devices, "results");
    if !causes.is_over(&format!("{at}.results"), results.len(), 32, rules) {
        for (index, result) in results.iter().enumerate() {
            let at = format!("{at}.results[{index}]");
            let part = |name: &str| text(result, name).unwrap_or_default();
            reference(causes, &format!("{at}.request"), part("request"), &known);
            causes.driver(&format!("{at}.driver"), part("driver"), rules);
            causes.pool(&format!("{at}.pool"), part("pool"));
            causes.check(&format!("{at}.device"), part("device"), names::label(part("device")));
            binding(causes, result, &at, rules);
            if let Some(share) = text(result, "shareID") {
                causes.uuid(&format!("{at}.shareID"), share);
            }
        }
    }
    config(causes, devices, at, 64, &known, rules);
}

fn device_status(causes: &mut Causes, device: &Value, at: &str, results: &[Value], rules: &Rules) {
    let part = |name: &str| text(device, name).unwrap_or_default();
    causes.driver(&format!("{at}.driver"), part("driver"), rules);
    causes.pool(&format!("{at}.pool"), part("pool"));
    causes.check(&format!("{at}.device"), part("device"), names::label(part("device")));
    if let Some(share) = text(device, "shareID") {
        causes.uuid(&format!("{at}.shareID"), share);
    }
    if !results.iter().any(|r| key(r) == key(device)) {
        causes.invalid(at, &key(device).join("/"), "must be an allocated device in the claim");
    }
    let conditions = list(device, "conditions");
    if conditions.len() > 8 {
        causes.too_many(&format!("{at}.conditions"), conditions.len(), 8);
    }
    for (index, condition) in conditions.iter().enumerate() {
        let at = format!("{at}.conditions[{index}]");
        let part = |name: &str| text(condition, name).unwrap_or_default();
        for field in ["type", "reason", "lastTransitionTime"] {
            if part(field).is_empty() {
                causes.required(&format!("{at}.{field}"), "");
            }
        }
        if !matches!(part("status"), "True" | "False" | "Unknown") {
            causes.unsupported(&format!("{at}.status"), part("status"), "\"False\", \"True\", \"Unknown\"");
        }
    }
    if let Some(data) = device.get("data").filter(|data| !data.is_null()) {
        extension(causes, Some(data), &format!("{at}.data"));
    }
}

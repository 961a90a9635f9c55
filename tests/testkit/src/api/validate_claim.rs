//! What the API server refuses in claims, templates and classes (422): the limits that a driver can meet.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::{
    names,
    status::Cause,
    validate::{Causes, list, text},
};

/// Checks a claim, and against `old` when it replaces one.
pub(crate) fn claim(new: &Value, old: Option<&Value>) -> Vec<Cause> {
    let mut causes = Causes::default();
    let none = Value::Object(Map::new());
    let spec = new.get("spec").unwrap_or(&none);
    if old.is_some_and(|o| o.get("spec") != new.get("spec")) {
        causes.invalid("spec", "", "field is immutable");
    }
    claim_spec(&mut causes, spec, "spec");
    causes.0
}

/// Checks a claim template.
pub(crate) fn template(new: &Value, old: Option<&Value>) -> Vec<Cause> {
    let mut causes = Causes::default();
    let none = Value::Object(Map::new());
    if old.is_some_and(|o| o.get("spec") != new.get("spec")) {
        causes.invalid("spec", "", "field is immutable");
    }
    claim_spec(&mut causes, new.pointer("/spec/spec").unwrap_or(&none), "spec.spec");
    causes.0
}

/// Checks a device class.
pub(crate) fn class(new: &Value) -> Vec<Cause> {
    let mut causes = Causes::default();
    let none = Value::Object(Map::new());
    let spec = new.get("spec").unwrap_or(&none);
    selectors(&mut causes, spec, "spec");
    config(&mut causes, spec, "spec", 32);
    causes.0
}

fn claim_spec(causes: &mut Causes, spec: &Value, path: &str) {
    let none = Value::Object(Map::new());
    let devices = spec.get("devices").unwrap_or(&none);
    let path = format!("{path}.devices");
    let requests = list(devices, "requests");
    if requests.len() > 32 {
        causes.too_many(&format!("{path}.requests"), requests.len(), 32);
    }
    let mut seen = BTreeSet::new();
    for (index, request) in requests.iter().enumerate() {
        let at = format!("{path}.requests[{index}]");
        let name = text(request, "name").unwrap_or_default();
        if let Err(why) = names::label(name) {
            causes.invalid(&format!("{at}.name"), name, why);
        }
        if !seen.insert(name) {
            causes.duplicate(&format!("{at}.name"), name);
        }
        let subs = list(request, "firstAvailable");
        match (request.get("exactly"), subs.is_empty()) {
            (Some(_), false) => {
                causes.invalid(
                    &at,
                    "",
                    "exactly one of `exactly` or `firstAvailable` is required, but multiple fields are set",
                );
            }
            (None, true) => causes.required(&at, "exactly one of `exactly` or `firstAvailable` is required"),
            _ => {}
        }
        if subs.len() > 8 {
            causes.too_many(&format!("{at}.firstAvailable"), subs.len(), 8);
        }
        for (sub_index, sub) in subs.iter().enumerate() {
            one_request(causes, sub, &format!("{at}.firstAvailable[{sub_index}]"));
        }
        if let Some(exact) = request.get("exactly") {
            one_request(causes, exact, &format!("{at}.exactly"));
        }
    }
    let constraints = list(devices, "constraints");
    if constraints.len() > 32 {
        causes.too_many(&format!("{path}.constraints"), constraints.len(), 32);
    }
    for (index, constraint) in constraints.iter().enumerate() {
        if constraint.get("matchAttribute").is_none() && constraint.get("distinctAttribute").is_none() {
            causes.required(&format!("{path}.constraints[{index}].matchAttribute"), "");
        }
    }
    config(causes, devices, &path, 32);
}

fn one_request(causes: &mut Causes, request: &Value, path: &str) {
    let class = text(request, "deviceClassName").unwrap_or_default();
    if class.is_empty() {
        causes.required(&format!("{path}.deviceClassName"), "");
    } else if let Err(why) = names::subdomain(class, 253) {
        causes.invalid(&format!("{path}.deviceClassName"), class, why);
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
    selectors(causes, request, path);
    for name in request.pointer("/capacity/requests").and_then(Value::as_object).into_iter().flat_map(Map::keys) {
        if let Err(why) = names::qualified(name) {
            causes.invalid(&format!("{path}.capacity.requests[{name}]"), name, why);
        }
    }
}

fn selectors(causes: &mut Causes, holder: &Value, path: &str) {
    let selectors = list(holder, "selectors");
    if selectors.len() > 32 {
        causes.too_many(&format!("{path}.selectors"), selectors.len(), 32);
    }
    for (index, selector) in selectors.iter().enumerate() {
        let at = format!("{path}.selectors[{index}].cel.expression");
        match selector.pointer("/cel/expression").and_then(Value::as_str) {
            None | Some("") => causes.required(&at, ""),
            Some(expression) if expression.len() > 10 * 1024 => causes.too_long(&at, 10 * 1024),
            Some(_) => {}
        }
    }
}

fn config(causes: &mut Causes, holder: &Value, path: &str, most: usize) {
    let entries = list(holder, "config");
    if entries.len() > most {
        causes.too_many(&format!("{path}.config"), entries.len(), most);
    }
    for (index, entry) in entries.iter().enumerate() {
        let at = format!("{path}.config[{index}].opaque");
        let Some(opaque) = entry.get("opaque") else {
            causes.required(&at, "");
            continue;
        };
        let driver = text(opaque, "driver").unwrap_or_default();
        if let Err(why) = names::subdomain(driver, 63) {
            causes.invalid(&format!("{at}.driver"), driver, why);
        }
        match opaque.get("parameters") {
            None => causes.required(&format!("{at}.parameters"), ""),
            Some(parameters) if parameters.to_string().len() > 10 * 1024 => {
                causes.too_long(&format!("{at}.parameters"), 10 * 1024);
            }
            Some(Value::Object(_)) => {}
            Some(_) => causes.invalid(&format!("{at}.parameters"), "<value omitted>", "must be a valid JSON object"),
        }
    }
}

/// Checks a claim's status.
pub(crate) fn status(new: &Value) -> Vec<Cause> {
    let mut causes = Causes::default();
    let none = Value::Object(Map::new());
    let status = new.get("status").unwrap_or(&none);
    let results = status.pointer("/allocation/devices/results").and_then(Value::as_array);
    let results: &[Value] = results.map_or(&[], Vec::as_slice);
    if results.len() > 32 {
        causes.too_many("status.allocation.devices.results", results.len(), 32);
    }
    if list(status, "reservedFor").len() > 256 {
        causes.too_many("status.reservedFor", list(status, "reservedFor").len(), 256);
    }
    if let Some(allocated) = status.pointer("/allocation/devices") {
        config(&mut causes, allocated, "status.allocation.devices", 64);
    }
    let key = |v: &Value| ["driver", "pool", "device", "shareID"].map(|n| text(v, n).unwrap_or_default().to_owned());
    let mut seen = BTreeSet::new();
    for (index, device) in list(status, "devices").iter().enumerate() {
        let at = format!("status.devices[{index}]");
        if !results.iter().any(|r| key(r) == key(device)) {
            causes.invalid(&at, &key(device).join("/"), "must be an allocated device in the claim");
        }
        if !seen.insert(key(device)) {
            causes.duplicate(&at, &key(device).join("/"));
        }
        if list(device, "conditions").len() > 8 {
            causes.too_many(&format!("{at}.conditions"), list(device, "conditions").len(), 8);
        }
        if device.get("data").is_some_and(|d| d.to_string().len() > 10 * 1024) {
            causes.too_long(&format!("{at}.data"), 10 * 1024);
        }
    }
    causes.0
}

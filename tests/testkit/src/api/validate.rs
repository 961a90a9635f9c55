//! What the API server refuses in a `ResourceSlice` (422), release by release.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::{
    gates::{Gate, Release, Rules},
    names,
    quantity::Quantity,
    status::Cause,
};

/// Collects causes.
#[derive(Debug, Default)]
pub(crate) struct Causes(pub(crate) Vec<Cause>);

impl Causes {
    fn push(&mut self, reason: &'static str, field: &str, message: impl Into<String>) {
        self.0.push(Cause { reason, field: field.to_owned(), message: message.into() });
    }

    pub(crate) fn invalid(&mut self, field: &str, value: &str, why: &str) {
        self.push("FieldValueInvalid", field, format!("Invalid value: \"{value}\": {why}"));
    }

    pub(crate) fn required(&mut self, field: &str, why: &str) {
        self.push("FieldValueRequired", field, format!("Required value: {why}"));
    }

    pub(crate) fn too_many(&mut self, field: &str, have: usize, most: usize) {
        self.push("FieldValueTooMany", field, format!("Too many: {have}: must have at most {most} items"));
    }

    pub(crate) fn too_long(&mut self, field: &str, most: usize) {
        self.push("FieldValueTooLong", field, format!("Too long: may not be more than {most} bytes"));
    }

    pub(crate) fn duplicate(&mut self, field: &str, value: &str) {
        self.push("FieldValueDuplicate", field, format!("Duplicate value: \"{value}\""));
    }

    pub(crate) fn forbidden(&mut self, field: &str, why: &str) {
        self.push("FieldValueForbidden", field, format!("Forbidden: {why}"));
    }

    pub(crate) fn unsupported(&mut self, field: &str, value: &str, known: &str) {
        self.push(
            "FieldValueNotSupported",
            field,
            format!("Unsupported value: \"{value}\": supported values: {known}"),
        );
    }

    fn check(&mut self, field: &str, value: &str, outcome: Result<(), &'static str>) {
        if let Err(why) = outcome {
            self.invalid(field, value, why);
        }
    }
}

pub(crate) fn text<'a>(value: &'a Value, name: &str) -> Option<&'a str> {
    value.get(name).and_then(Value::as_str)
}

pub(crate) fn list<'a>(value: &'a Value, name: &str) -> &'a [Value] {
    value.get(name).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

fn map<'a>(value: &'a Value, name: &str) -> Option<&'a Map<String, Value>> {
    value.get(name).and_then(Value::as_object)
}

fn nano(value: &Value, name: &str) -> Option<i128> {
    text(value, name).and_then(|t| Quantity::parse(t).ok()).map(|q| q.nano())
}

/// Checks a slice, and against `old` when it replaces one.
pub(crate) fn slice(new: &Value, old: Option<&Value>, rules: &Rules) -> Vec<Cause> {
    let mut causes = Causes::default();
    let none = Value::Object(Map::new());
    let spec = new.get("spec").unwrap_or(&none);
    if let Some(old) = old {
        let old = old.get("spec").unwrap_or(&none);
        for (field, path) in [("driver", "/driver"), ("pool.name", "/pool/name"), ("nodeName", "/nodeName")] {
            if old.pointer(path) != spec.pointer(path) {
                let value = spec.pointer(path).and_then(Value::as_str).unwrap_or("null");
                causes.invalid(&format!("spec.{field}"), value, "field is immutable");
            }
        }
    }
    match text(spec, "driver").unwrap_or_default() {
        "" => causes.required("spec.driver", ""),
        driver if driver.len() > 63 => causes.too_long("spec.driver", 63),
        driver => causes.check("spec.driver", driver, names::subdomain(&driver.to_ascii_lowercase(), 63)),
    }
    pool(&mut causes, spec.get("pool").unwrap_or(&none));
    node_selection(&mut causes, spec, "spec", rules, true);
    counters_and_devices(&mut causes, spec, rules);
    causes.0
}

fn pool(causes: &mut Causes, pool: &Value) {
    match text(pool, "name").unwrap_or_default() {
        "" => causes.required("spec.pool.name", ""),
        name if name.len() > 253 => causes.too_long("spec.pool.name", 253),
        name => {
            for part in name.split('/') {
                causes.check("spec.pool.name", part, names::subdomain(part, 253));
            }
        }
    }
    let number = |name: &str| pool.get(name).and_then(Value::as_i64).unwrap_or(0);
    if number("resourceSliceCount") <= 0 {
        let value = number("resourceSliceCount").to_string();
        causes.invalid("spec.pool.resourceSliceCount", &value, "must be greater than zero");
    }
    if number("generation") < 0 {
        let value = number("generation").to_string();
        causes.invalid("spec.pool.generation", &value, "must be greater than or equal to zero");
    }
}

/// Exactly one way to say which nodes see a slice (or a device, with `perDeviceNodeSelection`).
fn node_selection(causes: &mut Causes, holder: &Value, path: &str, rules: &Rules, of_slice: bool) {
    let mut chosen = 0;
    if let Some(name) = text(holder, "nodeName") {
        chosen += 1;
        if name.is_empty() {
            causes.invalid(&format!("{path}.nodeName"), "", "must be either unset or set to a non-empty string");
        } else {
            causes.check(&format!("{path}.nodeName"), name, names::subdomain(name, 253));
        }
    }
    if let Some(selector) = holder.get("nodeSelector") {
        chosen += 1;
        if list(selector, "nodeSelectorTerms").len() != 1 {
            causes.invalid(
                &format!("{path}.nodeSelector.nodeSelectorTerms"),
                "",
                "must have exactly one node selector term",
            );
        }
    }
    let per_device = of_slice && rules.has(Gate::PartitionableDevices);
    for name in ["allNodes", "perDeviceNodeSelection"] {
        if name == "perDeviceNodeSelection" && !per_device {
            continue;
        }
        match holder.get(name) {
            Some(Value::Bool(true)) => chosen += 1,
            Some(_) => causes.invalid(&format!("{path}.{name}"), "false", "must be either unset or set to true"),
            None => {}
        }
    }
    let which = match (of_slice, per_device) {
        (true, true) => "`nodeName`, `nodeSelector`, `allNodes`, `perDeviceNodeSelection`",
        _ => "`nodeName`, `nodeSelector`, or `allNodes`",
    };
    match chosen {
        1 => {}
        0 => causes.required(path, &format!("exactly one of {which} is required")),
        _ => causes.invalid(path, "", &format!("exactly one of {which} is required, but multiple fields are set")),
    }
}

fn counters_and_devices(causes: &mut Causes, spec: &Value, rules: &Rules) {
    let new_layout = rules.since(Release::V1_35);
    let devices = list(spec, "devices");
    let sets = list(spec, "sharedCounters");
    if new_layout && !devices.is_empty() && !sets.is_empty() {
        causes.invalid("spec", "", "only one of `sharedCounters` or `devices` is allowed");
    }
    shared_counters(causes, sets, new_layout);

    let special = devices.iter().any(|d| {
        !list(d, "taints").is_empty()
            || !list(d, "consumesCounters").is_empty()
            || map(d, "attributes").is_some_and(|a| a.values().any(has_list))
    });
    let most = if new_layout && special { 64 } else { 128 };
    if devices.len() > most {
        causes.too_many("spec.devices", devices.len(), most);
    }
    let mut seen = BTreeSet::new();
    let mut consumed = 0;
    for (index, device) in devices.iter().enumerate() {
        let path = format!("spec.devices[{index}]");
        let name = text(device, "name").unwrap_or_default();
        if !seen.insert(name) {
            causes.duplicate(&format!("{path}.name"), name);
        }
        self::device(causes, device, &path, rules);
        if spec.get("perDeviceNodeSelection") == Some(&Value::Bool(true)) {
            node_selection(causes, device, &path, rules, false);
        } else {
            for field in ["nodeName", "nodeSelector", "allNodes"] {
                if device.get(field).is_some() {
                    let why = "can only be set if `perDeviceNodeSelection` is set to true in the ResourceSlice spec";
                    causes.invalid(&format!("{path}.{field}"), "", why);
                }
            }
        }
        consumed += consumes(causes, device, &path, sets, new_layout);
    }
    if !new_layout && consumed > 1024 {
        let why = "the total number of counters in devices must not exceed 1024";
        causes.invalid("spec.devices", &consumed.to_string(), why);
    }
}

fn has_list(attribute: &Value) -> bool {
    ["bools", "ints", "strings", "versions"].iter().any(|n| attribute.get(*n).is_some())
}

fn counter_names(causes: &mut Causes, counters: Option<&Map<String, Value>>, path: &str) -> usize {
    let Some(counters) = counters.filter(|c| !c.is_empty()) else {
        causes.required(&format!("{path}.counters"), "");
        return 0;
    };
    for (name, counter) in counters {
        causes.check(&format!("{path}.counters[{name}]"), name, names::label(name));
        if counter.get("value").is_none() {
            causes.required(&format!("{path}.counters[{name}].value"), "");
        }
    }
    counters.len()
}

fn shared_counters(causes: &mut Causes, sets: &[Value], new_layout: bool) {
    let mut seen = BTreeSet::new();
    let mut total = 0;
    for (index, set) in sets.iter().enumerate() {
        let path = format!("spec.sharedCounters[{index}]");
        match text(set, "name").unwrap_or_default() {
            "" => causes.required(&format!("{path}.name"), ""),
            name => {
                causes.check(&format!("{path}.name"), name, names::label(name));
                if !seen.insert(name) {
                    causes.duplicate(&format!("{path}.name"), name);
                }
            }
        }
        let count = counter_names(causes, map(set, "counters"), &path);
        if new_layout && count > 32 {
            causes.too_many(&format!("{path}.counters"), count, 32);
        }
        total += count;
    }
    if new_layout && sets.len() > 8 {
        causes.too_many("spec.sharedCounters", sets.len(), 8);
    }
    if !new_layout && total > 32 {
        let why = "the total number of counters in sharedCounters must not exceed 32";
        causes.invalid("spec.sharedCounters", &total.to_string(), why);
    }
}

/// Checks `consumesCounters` of one device; returns the number of counters in it.
fn consumes(causes: &mut Causes, device: &Value, path: &str, sets: &[Value], new_layout: bool) -> usize {
    let entries = list(device, "consumesCounters");
    let path = format!("{path}.consumesCounters");
    let mut seen = BTreeSet::new();
    let mut total = 0;
    for (index, entry) in entries.iter().enumerate() {
        let at = format!("{path}[{index}]");
        let name = text(entry, "counterSet").unwrap_or_default();
        if name.is_empty() {
            causes.required(&format!("{at}.counterSet"), "");
        } else if !seen.insert(name) {
            causes.duplicate(&format!("{at}.counterSet"), name);
        }
        let count = counter_names(causes, map(entry, "counters"), &at);
        total += count;
        if new_layout {
            if count > 32 {
                causes.too_many(&format!("{at}.counters"), count, 32);
            }
            continue;
        }
        let Some(set) = sets.iter().find(|s| text(s, "name") == Some(name)) else {
            let why = "must reference a counterSet defined in the ResourceSlice sharedCounters";
            causes.invalid(&format!("{at}.counterSet"), name, why);
            continue;
        };
        for counter in map(entry, "counters").into_iter().flat_map(Map::keys) {
            if !map(set, "counters").is_some_and(|c| c.contains_key(counter)) {
                let why = "must reference a counter defined in the ResourceSlice sharedCounters";
                causes.invalid(&format!("{at}.counters"), counter, why);
            }
        }
    }
    if new_layout && entries.len() > 2 {
        causes.too_many(&path, entries.len(), 2);
    }
    if !new_layout && total > 32 {
        causes.invalid(&path, &total.to_string(), "the total number of counters in a device must not exceed 32");
    }
    total
}

fn device(causes: &mut Causes, device: &Value, path: &str, rules: &Rules) {
    match text(device, "name").unwrap_or_default() {
        "" => causes.required(&format!("{path}.name"), ""),
        name => causes.check(&format!("{path}.name"), name, names::label(name)),
    }
    let attributes = map(device, "attributes");
    let capacities = map(device, "capacity");
    let total = attributes.map_or(0, Map::len) + capacities.map_or(0, Map::len);
    if total > 32 {
        let why = "the total number of attributes and capacities must not exceed 32";
        causes.invalid(path, &total.to_string(), why);
    }
    let values: usize = attributes.into_iter().flat_map(Map::values).map(count_values).sum();
    if rules.since(Release::V1_36) && values > 48 {
        causes.invalid(path, &values.to_string(), "the total number of attribute values must not exceed 48");
    }
    for (name, attribute) in attributes.into_iter().flatten() {
        let at = format!("{path}.attributes[{name}]");
        causes.check(&at, name, names::qualified(name));
        self::attribute(causes, attribute, &at);
    }
    let shared = device.get("allowMultipleAllocations") == Some(&Value::Bool(true));
    for (name, capacity) in capacities.into_iter().flatten() {
        let at = format!("{path}.capacity[{name}]");
        causes.check(&at, name, names::qualified(name));
        self::capacity(causes, capacity, &at, shared);
    }
    taints(causes, device, path, rules);
    for field in ["bindingConditions", "bindingFailureConditions"] {
        let conditions = list(device, field);
        let at = format!("{path}.{field}");
        if conditions.len() > 4 {
            causes.too_many(&at, conditions.len(), 4);
        }
        for condition in conditions.iter().filter_map(Value::as_str) {
            causes.check(&at, condition, names::label_key(condition));
        }
    }
}

fn count_values(attribute: &Value) -> usize {
    let lists = ["bools", "ints", "strings", "versions"];
    lists.iter().map(|n| list(attribute, n).len()).sum::<usize>().max(1)
}

fn attribute(causes: &mut Causes, attribute: &Value, path: &str) {
    let set = attribute.as_object().map_or(0, Map::len);
    if set == 0 {
        causes.required(path, "exactly one value must be specified");
    } else if set > 1 {
        causes.invalid(path, &attribute.to_string(), "exactly one value must be specified");
    }
    let mut strings: Vec<(&str, bool)> = Vec::new();
    strings.extend(text(attribute, "string").map(|t| (t, false)));
    strings.extend(text(attribute, "version").map(|t| (t, true)));
    strings.extend(list(attribute, "strings").iter().filter_map(Value::as_str).map(|t| (t, false)));
    strings.extend(list(attribute, "versions").iter().filter_map(Value::as_str).map(|t| (t, true)));
    for (value, version) in strings {
        let at = format!("{path}.{}", if version { "version" } else { "string" });
        if value.len() > 64 {
            causes.too_long(&at, 64);
        } else if version {
            causes.check(&at, value, names::version(value));
        }
    }
}

fn capacity(causes: &mut Causes, capacity: &Value, path: &str, shared: bool) {
    let Some(value) = nano(capacity, "value") else {
        causes.required(&format!("{path}.value"), "");
        return;
    };
    let Some(policy) = capacity.get("requestPolicy") else { return };
    let path = format!("{path}.requestPolicy");
    if !shared {
        causes.forbidden(&path, "allowMultipleAllocations must be true");
        return;
    }
    let default = nano(policy, "default");
    let values: Vec<i128> = list(policy, "validValues")
        .iter()
        .filter_map(|v| v.as_str().and_then(|t| Quantity::parse(t).ok()))
        .map(|q| q.nano())
        .collect();
    let range = policy.get("validRange");
    if default.is_none() && (!values.is_empty() || range.is_some()) {
        causes.required(&format!("{path}.default"), "required when validValues or validRange is defined");
    }
    if let Some(default) = default.filter(|d| *d > value) {
        let why = "default must not exceed the capacity value";
        causes.invalid(&format!("{path}.default"), &default.to_string(), why);
    }
    if !values.is_empty() && range.is_some() {
        causes.forbidden(&format!("{path}.validRange"), "only one of `validValues` or `validRange` may be set");
    }
    let at = format!("{path}.validValues");
    if values.len() > 10 {
        causes.too_many(&at, values.len(), 10);
    }
    for pair in values.windows(2) {
        if pair[0] == pair[1] {
            causes.duplicate(&at, &pair[0].to_string());
        } else if pair[0] > pair[1] {
            causes.invalid(&at, &pair[0].to_string(), "values must be sorted in ascending order");
        }
    }
    for one in values.iter().filter(|v| **v > value) {
        causes.invalid(&at, &one.to_string(), "must not exceed the capacity value");
    }
    if let Some(default) = default.filter(|d| !values.is_empty() && !values.contains(d)) {
        causes.invalid(&path, &default.to_string(), "default value is not valid: must be one of validValues");
    }
    if let Some(range) = range {
        valid_range(causes, range, &format!("{path}.validRange"), value, default);
    }
}

fn valid_range(causes: &mut Causes, range: &Value, path: &str, value: i128, default: Option<i128>) {
    let Some(min) = nano(range, "min") else {
        causes.required(&format!("{path}.min"), "required when validRange is defined");
        return;
    };
    let max = nano(range, "max");
    if min > value {
        causes.invalid(&format!("{path}.min"), &min.to_string(), "min must not exceed the capacity value");
    }
    if let Some(max) = max {
        if max > value {
            causes.invalid(&format!("{path}.max"), &max.to_string(), "max must not exceed the capacity value");
        }
        if max < min {
            causes.invalid(&format!("{path}.max"), &max.to_string(), "max must not be less than min");
        }
    }
    if let Some(default) = default.filter(|d| *d < min || max.is_some_and(|m| *d > m)) {
        causes.invalid(path, &default.to_string(), "default must lie between min and max");
    }
    let Some(step) = nano(range, "step") else { return };
    if step <= 0 {
        causes.invalid(&format!("{path}.step"), &step.to_string(), "step must be greater than zero");
        return;
    }
    if min + step > value {
        let why = "one step above min must not exceed the capacity value";
        causes.invalid(&format!("{path}.step"), &step.to_string(), why);
    }
    for (name, point) in [("max", max), ("default", default)] {
        if let Some(point) = point.filter(|p| (p - min) % step != 0) {
            let why = format!("{name} must be a multiple of step from min");
            causes.invalid(&format!("{path}.step"), &point.to_string(), &why);
        }
    }
}

fn taints(causes: &mut Causes, device: &Value, path: &str, rules: &Rules) {
    let taints = list(device, "taints");
    let most = if rules.since(Release::V1_35) { 16 } else { 4 };
    if taints.len() > most {
        causes.too_many(&format!("{path}.taints"), taints.len(), most);
    }
    for (index, taint) in taints.iter().enumerate() {
        let at = format!("{path}.taints[{index}]");
        let key = text(taint, "key").unwrap_or_default();
        causes.check(&format!("{at}.key"), key, names::label_key(key));
        let value = text(taint, "value").unwrap_or_default();
        causes.check(&format!("{at}.value"), value, names::label_value(value));
        match text(taint, "effect") {
            None => causes.required(&format!("{at}.effect"), ""),
            Some("NoSchedule" | "NoExecute") => {}
            Some("None") if rules.since(Release::V1_35) => {}
            Some(other) => causes.unsupported(&format!("{at}.effect"), other, "\"NoExecute\", \"NoSchedule\""),
        }
    }
}

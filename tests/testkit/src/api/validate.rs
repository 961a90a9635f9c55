//! What the API server refuses in a `ResourceSlice` (422), release by release.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::{
    gates::{Release, Rules},
    names,
    quantity::Quantity,
    status::Cause,
};

/// True for the validation of 1.36 and later, which names other fields and stops at a list that is too long.
pub(crate) fn is_late(rules: &Rules) -> bool {
    rules.since(Release::V1_36)
}

/// Collects causes.
#[derive(Debug, Default)]
pub(crate) struct Causes {
    pub(crate) all: Vec<Cause>,
    /// The server would have panicked.
    pub(crate) divided_by_zero: bool,
}

impl Causes {
    fn push(&mut self, reason: &'static str, field: &str, message: impl Into<String>) {
        self.all.push(Cause { reason, field: field.to_owned(), message: message.into() });
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

    pub(crate) fn check(&mut self, field: &str, value: &str, outcome: Result<(), &'static str>) {
        if let Err(why) = outcome {
            self.invalid(field, value, why);
        }
    }

    /// A list over its limit. From 1.36 on nothing else is said of it then, and `true` comes back.
    pub(crate) fn is_over(&mut self, field: &str, have: usize, most: usize, rules: &Rules) -> bool {
        if have > most {
            self.too_many(field, have, most);
        }
        have > most && is_late(rules)
    }

    /// The name of a driver.
    pub(crate) fn driver(&mut self, field: &str, name: &str, rules: &Rules) {
        if name.is_empty() {
            self.required(field, "");
            if is_late(rules) {
                return;
            }
        }
        if name.len() > 63 {
            self.too_long(field, 63);
        }
        self.check(field, name, names::subdomain(&name.to_ascii_lowercase(), 253));
    }

    /// The name of a pool.
    pub(crate) fn pool(&mut self, field: &str, name: &str) {
        if name.is_empty() {
            self.required(field, "");
            return;
        }
        if name.len() > 253 {
            self.too_long(field, 253);
        }
        for part in name.split('/') {
            self.check(field, part, names::subdomain(part, 253));
        }
    }

    /// The name of an attribute or capacity. Three parts and more are not looked at: a real server's fault.
    pub(crate) fn qualified(&mut self, field: &str, name: &str, rules: &Rules) {
        let missing = |causes: &mut Self, why: &str| {
            if is_late(rules) {
                causes.invalid(field, "", why);
            } else {
                causes.required(field, why);
            }
        };
        let parts: Vec<&str> = name.split('/').collect();
        match parts.as_slice() {
            [""] => missing(self, "name required"),
            [name] => self.identifier(field, name),
            [domain, name] => {
                if domain.is_empty() {
                    missing(self, "the domain must not be empty");
                } else {
                    self.driver(field, domain, rules);
                }
                if name.is_empty() {
                    missing(self, "the name must not be empty");
                } else {
                    self.identifier(field, name);
                }
            }
            _ => {}
        }
    }

    fn identifier(&mut self, field: &str, name: &str) {
        if name.len() > 32 {
            self.too_long(field, 32);
        }
        self.check(field, name, names::identifier(name));
    }

    /// A UUID in lower case, as ids of shares are.
    pub(crate) fn uuid(&mut self, field: &str, text: &str) {
        let hex = |part: &str| part.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        let lengths: Vec<usize> = text.split('-').map(str::len).collect();
        if lengths != [8, 4, 4, 4, 12] || !text.split('-').all(hex) {
            self.invalid(field, text, "error validating uid");
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
pub(crate) fn slice(new: &Value, old: Option<&Value>, rules: &Rules) -> Causes {
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
    causes.driver("spec.driver", text(spec, "driver").unwrap_or_default(), rules);
    pool(&mut causes, spec.get("pool").unwrap_or(&none));
    node_selection(&mut causes, spec, "spec", true);
    counters_and_devices(&mut causes, spec, rules);
    causes
}

fn pool(causes: &mut Causes, pool: &Value) {
    causes.pool("spec.pool.name", text(pool, "name").unwrap_or_default());
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
fn node_selection(causes: &mut Causes, holder: &Value, path: &str, of_slice: bool) {
    let mut chosen = 0;
    match text(holder, "nodeName") {
        None => {}
        Some("") => {
            causes.invalid(&format!("{path}.nodeName"), "", "must be either unset or set to a non-empty string");
        }
        Some(name) => {
            chosen += 1;
            causes.check(&format!("{path}.nodeName"), name, names::subdomain(name, 253));
        }
    }
    if let Some(selector) = holder.get("nodeSelector") {
        chosen += 1;
        if of_slice && list(selector, "nodeSelectorTerms").len() != 1 {
            causes.invalid(
                &format!("{path}.nodeSelector.nodeSelectorTerms"),
                "",
                "must have exactly one node selector term",
            );
        }
    }
    let flags: &[&str] = if of_slice { &["allNodes", "perDeviceNodeSelection"] } else { &["allNodes"] };
    for name in flags {
        match holder.get(*name) {
            Some(Value::Bool(true)) => chosen += 1,
            Some(_) => causes.invalid(&format!("{path}.{name}"), "false", "must be either unset or set to true"),
            None => {}
        }
    }
    let which = if of_slice {
        "`nodeName`, `nodeSelector`, `allNodes`, `perDeviceNodeSelection`"
    } else {
        "`nodeName`, `nodeSelector`, or `allNodes`"
    };
    match chosen {
        1 => {}
        0 => causes.required(path, &format!("exactly one of {which} is required")),
        _ => causes.invalid(path, "", &format!("exactly one of {which} is required, but multiple fields are set")),
    }
}

fn counters_and_devices(causes: &mut Causes, spec: &Value, rules: &Rules) {
    let apart = rules.since(Release::V1_35);
    let devices = list(spec, "devices");
    let sets = list(spec, "sharedCounters");
    if apart && !devices.is_empty() && !sets.is_empty() {
        causes.invalid("spec", "", "only one of `sharedCounters` or `devices` is allowed");
    }
    shared_counters(causes, sets, rules);

    let special = devices.iter().any(|d| {
        !list(d, "taints").is_empty()
            || !list(d, "consumesCounters").is_empty()
            || map(d, "attributes").is_some_and(|a| a.values().any(has_list))
    });
    let most = if apart && special { 64 } else { 128 };
    if causes.is_over("spec.devices", devices.len(), most, rules) {
        return;
    }
    let mut seen = BTreeSet::new();
    let mut consumed = 0;
    for (index, device) in devices.iter().enumerate() {
        let path = format!("spec.devices[{index}]");
        let name = text(device, "name").unwrap_or_default();
        if !seen.insert(name) {
            causes.duplicate(&duplicated(&path, "name", rules), name);
        }
        self::device(causes, device, &path, rules);
        if spec.get("perDeviceNodeSelection") == Some(&Value::Bool(true)) {
            node_selection(causes, device, &path, false);
        } else if ["nodeName", "nodeSelector", "allNodes"].iter().any(|field| device.get(*field).is_some()) {
            let why = "`nodeName`, `nodeSelector` and `allNodes` can only be set if `perDeviceNodeSelection` is set to true in the ResourceSlice spec";
            causes.invalid(&path, "", why);
        }
        consumed += consumes(causes, device, &path, sets, rules);
    }
    if !apart && consumed > 1024 {
        let why = "the total number of counters in devices must not exceed 1024";
        causes.invalid("spec.devices", &consumed.to_string(), why);
    }
}

/// The field of an item that stands in a list a second time.
pub(crate) fn duplicated(path: &str, key: &str, rules: &Rules) -> String {
    if is_late(rules) { path.to_owned() } else { format!("{path}.{key}") }
}

fn has_list(attribute: &Value) -> bool {
    ["bools", "ints", "strings", "versions"].iter().any(|n| attribute.get(*n).is_some())
}

/// Where a bad key of a map is reported.
fn key_field(map: &str, key: &str, rules: &Rules) -> String {
    if is_late(rules) { map.to_owned() } else { format!("{map}[{key}]") }
}

fn counter_names(causes: &mut Causes, counters: Option<&Map<String, Value>>, path: &str, rules: &Rules) -> usize {
    let Some(counters) = counters.filter(|c| !c.is_empty()) else {
        causes.required(&format!("{path}.counters"), "");
        return 0;
    };
    let at = format!("{path}.counters");
    if rules.since(Release::V1_35) && causes.is_over(&at, counters.len(), 32, rules) {
        return counters.len();
    }
    for name in counters.keys() {
        causes.check(&key_field(&at, name, rules), name, names::label(name));
    }
    counters.len()
}

fn shared_counters(causes: &mut Causes, sets: &[Value], rules: &Rules) {
    let apart = rules.since(Release::V1_35);
    if apart && causes.is_over("spec.sharedCounters", sets.len(), 8, rules) {
        return;
    }
    let mut seen = BTreeSet::new();
    let mut total = 0;
    for (index, set) in sets.iter().enumerate() {
        let path = format!("spec.sharedCounters[{index}]");
        let name = text(set, "name").unwrap_or_default();
        if name.is_empty() {
            causes.required(&format!("{path}.name"), "");
        } else {
            causes.check(&format!("{path}.name"), name, names::label(name));
        }
        if !seen.insert(name) {
            causes.duplicate(&duplicated(&path, "name", rules), name);
        }
        total += counter_names(causes, map(set, "counters"), &path, rules);
    }
    if !apart && total > 32 {
        let why = "the total number of shared counters must not exceed 32";
        causes.invalid("spec.sharedCounters", &total.to_string(), why);
    }
}

/// Checks `consumesCounters` of one device; returns the number of counters in it.
fn consumes(causes: &mut Causes, device: &Value, path: &str, sets: &[Value], rules: &Rules) -> usize {
    let apart = rules.since(Release::V1_35);
    let entries = list(device, "consumesCounters");
    let device_path = path;
    let path = format!("{path}.consumesCounters");
    if apart && causes.is_over(&path, entries.len(), 2, rules) {
        return 0;
    }
    let mut seen = BTreeSet::new();
    let mut total = 0;
    for (index, entry) in entries.iter().enumerate() {
        let at = format!("{path}[{index}]");
        let name = text(entry, "counterSet").unwrap_or_default();
        if name.is_empty() {
            causes.required(&format!("{at}.counterSet"), "");
        } else if apart {
            causes.check(&format!("{at}.counterSet"), name, names::label(name));
        }
        if !seen.insert(name) {
            causes.duplicate(&duplicated(&at, "counterSet", rules), name);
        }
        total += counter_names(causes, map(entry, "counters"), &at, rules);
        if apart {
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
    if !apart && total > 32 {
        causes.invalid(device_path, &total.to_string(), "the total number of counters must not exceed 32");
    }
    total
}

fn device(causes: &mut Causes, device: &Value, path: &str, rules: &Rules) {
    let name = text(device, "name").unwrap_or_default();
    causes.check(&format!("{path}.name"), name, names::label(name));
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
    let all = format!("{path}.attributes");
    for (name, attribute) in attributes.into_iter().flatten() {
        causes.qualified(&key_field(&all, name, rules), name, rules);
        self::attribute(causes, attribute, &format!("{all}[{name}]"), rules);
    }
    let shared = device.get("allowMultipleAllocations") == Some(&Value::Bool(true));
    let all = format!("{path}.capacity");
    for (name, capacity) in capacities.into_iter().flatten() {
        causes.qualified(&key_field(&all, name, rules), name, rules);
        self::capacity(causes, capacity, &format!("{all}[{name}]"), shared, rules);
    }
    taints(causes, device, path, rules);
    binding(causes, device, path, rules);
}

/// The conditions of a device, or of an allocated one, that must be reported before its pod is bound.
pub(crate) fn binding(causes: &mut Causes, device: &Value, path: &str, rules: &Rules) {
    let fields = ["bindingConditions", "bindingFailureConditions"];
    let [wanted, failures] = fields.map(|field| list(device, field));
    for (field, conditions, other) in [(fields[0], wanted, failures), (fields[1], failures, wanted)] {
        let at = format!("{path}.{field}");
        let over = causes.is_over(&at, conditions.len(), 4, rules);
        let mut seen = BTreeSet::new();
        for (index, condition) in conditions.iter().filter_map(Value::as_str).enumerate() {
            let at = format!("{at}[{index}]");
            if !over {
                causes.check(&at, condition, names::label_key(condition));
            }
            if !seen.insert(condition) {
                causes.duplicate(&at, condition);
            }
            if field == fields[1] && wanted.iter().any(|w| w.as_str() == Some(condition)) {
                causes.invalid(&at, condition, "bindingFailureConditions must not overlap with bindingConditions");
            }
        }
        if conditions.is_empty() && !other.is_empty() {
            causes.invalid(&at, "[]", "bindingConditions and bindingFailureConditions need each other");
        }
    }
}

fn count_values(attribute: &Value) -> usize {
    let lists = ["bools", "ints", "strings", "versions"];
    lists.iter().map(|n| list(attribute, n).len()).sum::<usize>().max(1)
}

fn attribute(causes: &mut Causes, attribute: &Value, path: &str, rules: &Rules) {
    let set = attribute.as_object().map_or(0, Map::len);
    if set == 0 && !is_late(rules) {
        causes.required(path, "exactly one value must be specified");
    } else if set != 1 {
        causes.invalid(path, &attribute.to_string(), "exactly one value must be specified");
    }
    let mut strings: Vec<(String, &str, bool)> = Vec::new();
    for (name, version) in [("string", false), ("version", true)] {
        strings.extend(text(attribute, name).map(|t| (format!("{path}.{name}"), t, version)));
        let many = format!("{name}s");
        for (index, item) in list(attribute, &many).iter().filter_map(Value::as_str).enumerate() {
            strings.push((format!("{path}.{many}[{index}]"), item, version));
        }
    }
    for (at, value, version) in strings {
        if value.len() > 64 {
            causes.too_long(&at, 64);
        }
        if version {
            causes.check(&at, value, names::version(value));
        }
    }
}

fn capacity(causes: &mut Causes, capacity: &Value, path: &str, shared: bool, rules: &Rules) {
    let value = nano(capacity, "value").unwrap_or_default();
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
    if !values.is_empty() && range.is_some() {
        let why =
            "exactly one policy can be specified, cannot specify \"validValues\" and \"validRange\" at the same time";
        causes.forbidden(&path, why);
        return;
    }
    if values.is_empty() && range.is_none() {
        return;
    }
    let Some(default) = default else {
        causes.required(&format!("{path}.default"), "required when validValues or validRange is defined");
        return;
    };
    if let Some(range) = range {
        valid_range(causes, range, &format!("{path}.validRange"), value, default, rules);
        return;
    }
    let at = format!("{path}.validValues");
    for (index, pair) in values.windows(2).enumerate() {
        if pair[0] > pair[1] {
            let why = "values must be sorted in ascending order";
            causes.invalid(&format!("{at}[{}]", index + 1), &pair[1].to_string(), why);
        }
    }
    let over = causes.is_over(&at, values.len(), 10, rules);
    let mut seen = BTreeSet::new();
    for (index, one) in values.iter().enumerate().filter(|_| !over) {
        let at = format!("{at}[{index}]");
        if *one > value {
            causes.invalid(&at, &one.to_string(), "option is larger than capacity value");
        }
        // Parts of a unit are rounded up before they are compared.
        if !seen.insert(one.div_euclid(UNIT) + i128::from(one.rem_euclid(UNIT) != 0)) {
            causes.duplicate(&at, &one.to_string());
        }
    }
    if over || !values.contains(&default) {
        causes.invalid(&at, &default.to_string(), "default value is not valid according to the requestPolicy");
    }
}

/// One, in the units in which quantities are counted here.
const UNIT: i128 = 1_000_000_000;

fn valid_range(causes: &mut Causes, range: &Value, path: &str, value: i128, default: i128, rules: &Rules) {
    let Some(min) = nano(range, "min") else {
        causes.required(&format!("{path}.min"), "required when validRange is defined");
        return;
    };
    let max = nano(range, "max");
    let own = rules.since(Release::V1_37);
    let of_default = |other: &str| format!("{path}.{}", if own { "default" } else { other });
    if min > value {
        causes.invalid(&format!("{path}.min"), &min.to_string(), "min is larger than capacity value");
    }
    if default < min {
        causes.invalid(&of_default("min"), &default.to_string(), "default is less than min");
    }
    if let Some(max) = max {
        if max < min {
            causes.invalid(&format!("{path}.max"), &max.to_string(), "min is larger than max");
        }
        if max > value {
            causes.invalid(&format!("{path}.max"), &max.to_string(), "max is larger than capacity value");
        }
        if default > max {
            causes.invalid(&of_default("max"), &default.to_string(), "default is more than max");
        }
    }
    let Some(step) = nano(range, "step") else { return };
    let at = format!("{path}.step");
    if min + step > value {
        causes.invalid(&at, &step.to_string(), "one step is larger than capacity value");
    }
    if step <= 0 {
        if step == 0 && !own {
            // Real servers divide by it before 1.37, and hang up.
            causes.divided_by_zero = true;
        } else {
            causes.invalid(&at, &step.to_string(), "must be greater than zero");
        }
        return;
    }
    for point in [Some(default), max].into_iter().flatten() {
        if (point - min) % step != 0 {
            causes.invalid(&at, &point.to_string(), "value is not a multiple of a given step from min");
        }
    }
}

fn taints(causes: &mut Causes, device: &Value, path: &str, rules: &Rules) {
    let taints = list(device, "taints");
    let late = rules.since(Release::V1_35);
    if causes.is_over(&format!("{path}.taints"), taints.len(), if late { 16 } else { 4 }, rules) {
        return;
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
            Some("None") if late => {}
            Some(other) => causes.unsupported(&format!("{at}.effect"), other, "\"NoExecute\", \"NoSchedule\""),
        }
    }
}

//! The shapes of the served types: what a typed decoder would refuse (400), silently drop (unknown fields, empty optional
//! values) and rewrite (quantities, times).

use serde_json::{Map, Value};

use super::{gates::Release, quantity::Quantity};

/// The shape of one JSON value.
#[derive(Debug)]
pub(crate) enum Shape {
    /// A string; kept also when empty.
    Str,
    /// A string that is dropped when empty.
    OptStr,
    /// A whole number of 64 bits.
    Int,
    Bool,
    Quantity,
    /// RFC 3339, cut to seconds.
    Time,
    Any,
    /// `"0"` when absent.
    Amount,
    /// Dropped when empty.
    List(&'static Shape),
    /// `null` when empty or absent.
    Listed(&'static Shape),
    /// The same before a release, and dropped when empty since.
    ListedBefore(Release, &'static Shape),
    /// A quantity; `null` when absent.
    AmountOrNull,
    /// Dropped when empty.
    Map(&'static Shape),
    Obj(&'static [Field]),
    /// `{}` when absent.
    Present(&'static [Field]),
}

/// One field of an object: its name, its shape, the first release that knows it.
pub(crate) type Field = (&'static str, &'static Shape, Release);

use Release::{V1_34, V1_36};
use Shape::{Amount, AmountOrNull, Any, Bool, Int, List, Listed, ListedBefore, Obj, OptStr, Present, Str, Time};

const TAINT: Shape =
    Obj(&[("key", &Str, V1_34), ("value", &OptStr, V1_34), ("effect", &OptStr, V1_34), ("timeAdded", &Time, V1_34)]);
const TOLERATIONS: Shape = List(&Obj(&[
    ("key", &OptStr, V1_34),
    ("operator", &OptStr, V1_34),
    ("value", &OptStr, V1_34),
    ("effect", &OptStr, V1_34),
    ("tolerationSeconds", &Int, V1_34),
]));
const COUNTERS: Shape = Shape::Map(&Obj(&[("value", &Amount, V1_34)]));
const QUANTITIES: Shape = Shape::Map(&Amount);
const STRINGS: Shape = List(&Str);

const ATTRIBUTE: Shape = Obj(&[
    ("bool", &Bool, V1_34),
    ("int", &Int, V1_34),
    ("string", &Str, V1_34),
    ("version", &Str, V1_34),
    ("bools", &List(&Bool), V1_36),
    ("ints", &List(&Int), V1_36),
    ("strings", &STRINGS, V1_36),
    ("versions", &STRINGS, V1_36),
]);
const CAPACITY: Shape = Obj(&[
    ("value", &Amount, V1_34),
    (
        "requestPolicy",
        &Obj(&[
            ("default", &AmountOrNull, V1_34),
            ("validValues", &List(&Shape::Quantity), V1_34),
            (
                "validRange",
                &Obj(&[
                    ("min", &Shape::Quantity, V1_34),
                    ("max", &Shape::Quantity, V1_34),
                    ("step", &Shape::Quantity, V1_34),
                ]),
                V1_34,
            ),
        ]),
        V1_34,
    ),
]);
const DEVICE: Shape = Obj(&[
    ("name", &Str, V1_34),
    ("attributes", &Shape::Map(&ATTRIBUTE), V1_34),
    ("capacity", &Shape::Map(&CAPACITY), V1_34),
    ("consumesCounters", &List(&Obj(&[("counterSet", &Str, V1_34), ("counters", &COUNTERS, V1_34)])), V1_34),
    ("nodeName", &Str, V1_34),
    ("nodeSelector", &Any, V1_34),
    ("allNodes", &Bool, V1_34),
    ("taints", &List(&TAINT), V1_34),
    ("bindsToNode", &Bool, V1_34),
    ("bindingConditions", &STRINGS, V1_34),
    ("bindingFailureConditions", &STRINGS, V1_34),
    ("allowMultipleAllocations", &Bool, V1_34),
]);
const META: Shape = Obj(&[
    ("name", &OptStr, V1_34),
    ("generateName", &OptStr, V1_34),
    ("namespace", &OptStr, V1_34),
    ("uid", &OptStr, V1_34),
    ("resourceVersion", &OptStr, V1_34),
    ("generation", &Int, V1_34),
    ("creationTimestamp", &Time, V1_34),
    ("deletionTimestamp", &Time, V1_34),
    ("deletionGracePeriodSeconds", &Int, V1_34),
    ("selfLink", &OptStr, V1_34),
    ("labels", &Shape::Map(&Str), V1_34),
    ("annotations", &Shape::Map(&Str), V1_34),
    (
        "ownerReferences",
        &List(&Obj(&[
            ("apiVersion", &Str, V1_34),
            ("kind", &Str, V1_34),
            ("name", &Str, V1_34),
            ("uid", &Str, V1_34),
            ("controller", &Bool, V1_34),
            ("blockOwnerDeletion", &Bool, V1_34),
        ])),
        V1_34,
    ),
    ("finalizers", &List(&Str), V1_34),
    ("managedFields", &List(&Any), V1_34),
]);

/// `resourceslices`
pub(crate) const SLICE: Shape = Obj(&[
    ("apiVersion", &Str, V1_34),
    ("kind", &Str, V1_34),
    ("metadata", &META, V1_34),
    (
        "spec",
        &Present(&[
            ("driver", &Str, V1_34),
            (
                "pool",
                &Present(&[("name", &Str, V1_34), ("generation", &Int, V1_34), ("resourceSliceCount", &Int, V1_34)]),
                V1_34,
            ),
            ("nodeName", &Str, V1_34),
            ("nodeSelector", &Any, V1_34),
            ("allNodes", &Bool, V1_34),
            ("devices", &ListedBefore(V1_36, &DEVICE), V1_34),
            ("perDeviceNodeSelection", &Bool, V1_34),
            ("sharedCounters", &List(&Obj(&[("name", &Str, V1_34), ("counters", &COUNTERS, V1_34)])), V1_34),
        ]),
        V1_34,
    ),
]);

const SELECTORS: Shape = List(&Obj(&[("cel", &Obj(&[("expression", &Str, V1_34)]), V1_34)]));
const CAPACITY_REQUEST: Shape = Obj(&[("requests", &QUANTITIES, V1_34)]);
const EXACT: Shape = Obj(&[
    ("deviceClassName", &Str, V1_34),
    ("selectors", &SELECTORS, V1_34),
    ("allocationMode", &OptStr, V1_34),
    ("count", &Int, V1_34),
    ("adminAccess", &Bool, V1_34),
    ("tolerations", &TOLERATIONS, V1_34),
    ("capacity", &CAPACITY_REQUEST, V1_34),
]);
const SUB: Shape = Obj(&[
    ("name", &Str, V1_34),
    ("deviceClassName", &Str, V1_34),
    ("selectors", &SELECTORS, V1_34),
    ("allocationMode", &OptStr, V1_34),
    ("count", &Int, V1_34),
    ("tolerations", &TOLERATIONS, V1_34),
    ("capacity", &CAPACITY_REQUEST, V1_34),
]);
const OPAQUE: Shape = Obj(&[("driver", &Str, V1_34), ("parameters", &Any, V1_34)]);
const CLAIM_SPEC: Shape = Present(&[(
    "devices",
    &Present(&[
        (
            "requests",
            &Listed(&Obj(&[("name", &Str, V1_34), ("exactly", &EXACT, V1_34), ("firstAvailable", &List(&SUB), V1_34)])),
            V1_34,
        ),
        (
            "constraints",
            &List(&Obj(&[
                ("requests", &STRINGS, V1_34),
                ("matchAttribute", &Str, V1_34),
                ("distinctAttribute", &Str, V1_34),
            ])),
            V1_34,
        ),
        ("config", &List(&Obj(&[("requests", &STRINGS, V1_34), ("opaque", &OPAQUE, V1_34)])), V1_34),
    ]),
    V1_34,
)]);
const RESULT: Shape = Obj(&[
    ("request", &Str, V1_34),
    ("driver", &Str, V1_34),
    ("pool", &Str, V1_34),
    ("device", &Str, V1_34),
    ("adminAccess", &Bool, V1_34),
    ("tolerations", &TOLERATIONS, V1_34),
    ("bindingConditions", &STRINGS, V1_34),
    ("bindingFailureConditions", &STRINGS, V1_34),
    ("shareID", &Str, V1_34),
    ("consumedCapacity", &QUANTITIES, V1_34),
]);
const CONDITION: Shape = Obj(&[
    ("type", &Str, V1_34),
    ("status", &Str, V1_34),
    ("observedGeneration", &Int, V1_34),
    ("lastTransitionTime", &Time, V1_34),
    ("reason", &Str, V1_34),
    ("message", &Str, V1_34),
]);
const CLAIM_STATUS: Shape = Present(&[
    (
        "allocation",
        &Obj(&[
            (
                "devices",
                &Present(&[
                    ("results", &List(&RESULT), V1_34),
                    (
                        "config",
                        &List(&Obj(&[
                            ("source", &Str, V1_34),
                            ("requests", &STRINGS, V1_34),
                            ("opaque", &OPAQUE, V1_34),
                        ])),
                        V1_34,
                    ),
                ]),
                V1_34,
            ),
            ("nodeSelector", &Any, V1_34),
            ("allocationTimestamp", &Time, V1_34),
        ]),
        V1_34,
    ),
    ("reservedFor", &List(&Any), V1_34),
    (
        "devices",
        &List(&Obj(&[
            ("driver", &Str, V1_34),
            ("pool", &Str, V1_34),
            ("device", &Str, V1_34),
            ("shareID", &Str, V1_34),
            ("conditions", &Listed(&CONDITION), V1_34),
            ("data", &Any, V1_34),
            ("networkData", &Any, V1_34),
        ])),
        V1_34,
    ),
]);

/// `resourceclaims`
pub(crate) const CLAIM: Shape = Obj(&[
    ("apiVersion", &Str, V1_34),
    ("kind", &Str, V1_34),
    ("metadata", &META, V1_34),
    ("spec", &CLAIM_SPEC, V1_34),
    ("status", &CLAIM_STATUS, V1_34),
]);

const TEMPLATE_META: Shape = Present(&[
    ("name", &OptStr, V1_34),
    ("generateName", &OptStr, V1_34),
    ("namespace", &OptStr, V1_34),
    ("labels", &Shape::Map(&Str), V1_34),
    ("annotations", &Shape::Map(&Str), V1_34),
    ("ownerReferences", &List(&Any), V1_34),
    ("finalizers", &STRINGS, V1_34),
]);

/// `resourceclaimtemplates`
pub(crate) const TEMPLATE: Shape = Obj(&[
    ("apiVersion", &Str, V1_34),
    ("kind", &Str, V1_34),
    ("metadata", &META, V1_34),
    ("spec", &Present(&[("metadata", &TEMPLATE_META, V1_34), ("spec", &CLAIM_SPEC, V1_34)]), V1_34),
]);

/// `deviceclasses`
pub(crate) const CLASS: Shape = Obj(&[
    ("apiVersion", &Str, V1_34),
    ("kind", &Str, V1_34),
    ("metadata", &META, V1_34),
    (
        "spec",
        &Present(&[
            ("selectors", &SELECTORS, V1_34),
            ("config", &List(&Obj(&[("opaque", &OPAQUE, V1_34)])), V1_34),
            ("extendedResourceName", &Str, V1_34),
        ]),
        V1_34,
    ),
]);

/// Types that are kept as they come (nodes, pods, events).
pub(crate) const FREE: Shape = Any;

/// The first field that a type does not know.
pub(crate) fn unknown(value: &Value, shape: &Shape, release: Release, path: &str) -> Option<String> {
    let below = |name: &str| if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
    match (shape, value) {
        (Obj(fields) | Present(fields), Value::Object(map)) => map.iter().find_map(|(name, value)| {
            let known = fields.iter().find(|(known, _, since)| known == name && release >= *since);
            match known {
                Some((_, inner, _)) => unknown(value, inner, release, &below(name)),
                None => Some(below(name)),
            }
        }),
        (List(inner) | Listed(inner) | ListedBefore(_, inner), Value::Array(items)) => {
            items.iter().enumerate().find_map(|(n, item)| unknown(item, inner, release, &format!("{path}[{n}]")))
        }
        (Shape::Map(inner), Value::Object(map)) => {
            map.iter().find_map(|(name, item)| unknown(item, inner, release, &below(name)))
        }
        _ => None,
    }
}

/// What a decoder makes of a field that is absent; `None` if it stays so.
fn absent(shape: &Shape, release: Release) -> Option<Value> {
    match shape {
        Amount => Some(Value::String("0".to_owned())),
        Listed(_) | AmountOrNull => Some(Value::Null),
        ListedBefore(since, _) => (release < *since).then_some(Value::Null),
        Present(_) => Some(Value::Object(Map::new())),
        _ => None,
    }
}

/// Decodes `value`: unknown, null and empty optional values go, quantities and times are rewritten.
///
/// `Ok(None)` means that the value is dropped.
///
/// # Errors
/// The text of a 400 answer: a value of the wrong type, a malformed quantity or time.
pub(crate) fn decode(value: Value, shape: &Shape, release: Release, path: &str) -> Result<Option<Value>, String> {
    if value.is_null() {
        return match absent(shape, release) {
            Some(Value::Null) => Ok(Some(Value::Null)),
            Some(value) => decode(value, shape, release, path),
            None => Ok(None),
        };
    }
    let wrong = |want: &str, value: &Value| {
        let have = match value {
            Value::Bool(_) => "bool",
            Value::Number(_) => "number",
            Value::String(_) => "string",
            Value::Array(_) => "array",
            Value::Object(_) => "object",
            Value::Null => "null",
        };
        Err(format!("json: cannot unmarshal {have} into Go struct field {path} of type {want}"))
    };
    Ok(Some(match (shape, value) {
        (Any, value) => value,
        (OptStr, Value::String(text)) if text.is_empty() => return Ok(None),
        (Str | OptStr, Value::String(text)) => Value::String(text),
        (Str | OptStr, other) => return wrong("string", &other),
        (Bool, Value::Bool(flag)) => Value::Bool(flag),
        (Bool, other) => return wrong("bool", &other),
        (Int, Value::Number(number)) if number.is_i64() => Value::Number(number),
        (Int, other) => return wrong("int64", &other),
        (Shape::Quantity | Amount | AmountOrNull, Value::String(text)) => {
            Value::String(Quantity::printed(text.trim())?)
        }
        (Shape::Quantity | Amount | AmountOrNull, Value::Number(number)) => {
            Value::String(Quantity::printed(&number.to_string())?)
        }
        (Shape::Quantity | Amount | AmountOrNull, other) => return wrong("resource.Quantity", &other),
        (Time, Value::String(text)) => {
            let time: jiff::Timestamp = text.parse().map_err(|e| format!("parsing time {text:?}: {e}"))?;
            Value::String(seconds(time))
        }
        (Time, other) => return wrong("v1.Time", &other),
        (List(inner) | Listed(inner) | ListedBefore(_, inner), Value::Array(items)) => {
            let mut out = Vec::with_capacity(items.len());
            for item in items {
                out.push(decode(item, inner, release, path)?.unwrap_or_else(|| Value::Object(Map::new())));
            }
            if out.is_empty() {
                return Ok(absent(shape, release));
            }
            Value::Array(out)
        }
        (List(_) | Listed(_) | ListedBefore(..), other) => return wrong("slice", &other),
        (Shape::Map(inner), Value::Object(items)) => {
            let mut out = Map::new();
            for (name, item) in items {
                let item = decode(item, inner, release, path)?.unwrap_or_else(|| Value::Object(Map::new()));
                out.insert(name, item);
            }
            if out.is_empty() {
                return Ok(None);
            }
            Value::Object(out)
        }
        (Shape::Map(_), other) => return wrong("map", &other),
        (Obj(fields) | Present(fields), Value::Object(mut items)) => {
            let mut out = Map::new();
            for (name, inner, since) in *fields {
                let item = items.remove(*name).filter(|item| release >= *since && !item.is_null());
                let Some(item) = item.or_else(|| absent(inner, release)) else { continue };
                let below = if path.is_empty() { (*name).to_owned() } else { format!("{path}.{name}") };
                if let Some(item) = decode(item, inner, release, &below)? {
                    out.insert((*name).to_owned(), item);
                }
            }
            Value::Object(out)
        }
        (Obj(_) | Present(_), other) => return wrong("struct", &other),
    }))
}

/// A time as the API server prints it.
pub(crate) fn seconds(time: jiff::Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

//! Events in their two forms: that of the core group and that of `events.k8s.io`. Both are kept in the form of the core.

use serde_json::{Map, Value, json};

use super::{
    store::Resource,
    validate::{Causes, text},
};

/// Names of a field in the core group and in `events.k8s.io`.
const NAMES: [(&str, &str); 7] = [
    ("involvedObject", "regarding"),
    ("message", "note"),
    ("source", "deprecatedSource"),
    ("firstTimestamp", "deprecatedFirstTimestamp"),
    ("lastTimestamp", "deprecatedLastTimestamp"),
    ("count", "deprecatedCount"),
    ("reportingComponent", "reportingController"),
];

/// An event of the core group in the form of `events.k8s.io`, or the other way round.
pub(crate) fn converted(event: &Value, to_core: bool) -> Value {
    let mut out = Map::new();
    for (name, value) in event.as_object().into_iter().flatten() {
        let renamed = NAMES.iter().find(|(core, new)| name == if to_core { new } else { core });
        let name = renamed.map_or(name.as_str(), |(core, new)| if to_core { core } else { new });
        out.insert(name.to_owned(), value.clone());
    }
    out.insert("apiVersion".to_owned(), json!(if to_core { "v1" } else { "events.k8s.io/v1" }));
    Value::Object(out)
}

/// Fills in what a decoder gives an event.
pub(crate) fn default(resource: &Resource, event: &mut Value) {
    let Some(event) = event.as_object_mut() else { return };
    let core = resource.group.is_empty();
    let name = |at: usize| if core { NAMES[at].0 } else { NAMES[at].1 };
    for (name, value) in [
        ("eventTime", json!(null)),
        (name(0), json!({})),
        (name(2), json!({})),
        (name(3), json!(null)),
        (name(4), json!(null)),
    ] {
        event.entry(name.to_owned()).or_insert(value);
    }
    if core {
        for name in ["reportingComponent", "reportingInstance"] {
            event.entry(name.to_owned()).or_insert(json!(""));
        }
    }
}

/// A time that is none is a body that is not understood.
pub(crate) fn times(event: &Value) -> Result<(), String> {
    for name in ["eventTime", "firstTimestamp", "lastTimestamp", "deprecatedFirstTimestamp", "deprecatedLastTimestamp"]
    {
        if let Some(text) = event.get(name).and_then(Value::as_str) {
            text.parse::<jiff::Timestamp>().map_err(|e| format!("parsing time {text:?}: {e}"))?;
        }
    }
    Ok(())
}

/// Checks an event.
pub(crate) fn check(resource: &Resource, event: &Value) -> Causes {
    let mut causes = Causes::default();
    let core = resource.group.is_empty();
    let object = &event[if core { "involvedObject" } else { "regarding" }];
    let namespace = text(object, "namespace").unwrap_or_default();
    let own = event.pointer("/metadata/namespace").and_then(Value::as_str).unwrap_or_default();
    // Events about what has no namespace stand in the default one.
    if namespace != own && !(namespace.is_empty() && own == "default") {
        causes.invalid("involvedObject.namespace", namespace, "does not match event.namespace");
    }
    if !core {
        if event.get("eventTime").is_none_or(Value::is_null) {
            causes.required("eventTime", "");
            return causes;
        }
        if text(event, "note").is_some_and(|note| note.len() > 1024) {
            causes.invalid("message", "", "can have at most 1024 characters");
        }
    }
    causes
}

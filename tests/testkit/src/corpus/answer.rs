//! What is kept of an answer: what a client could act on, without what differs from run to run.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::{cases::Step, http::Reply};

/// An answer, as far as it matters.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Answer {
    /// Status code.
    pub code: u16,
    /// Reason of a refusal.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// Causes of a refusal: reason and field.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub causes: BTreeSet<String>,
    /// Type of the answer, where the request asked for one.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub kind: String,
    /// What was sent and does not stand in the answer.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub lost: BTreeSet<String>,
    /// What stands otherwise in the answer than it was sent.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub changed: BTreeMap<String, Value>,
    /// What the server added.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub added: BTreeMap<String, Value>,
    /// What the case looks at.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub seen: BTreeMap<String, Value>,
    /// Names in a list, or events of a watch, in their order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub items: Option<Vec<String>>,
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&serde_json::to_string(self).unwrap_or_default())
    }
}

/// Metadata that every object gets and no case is about; a case that is, looks at it.
const FURNITURE: [&str; 5] = ["uid", "creationTimestamp", "resourceVersion", "generation", "managedFields"];
/// Names of the objects of a case and of the stage begin like this; others are left out of lists.
const OURS: &str = "corpus";

impl Answer {
    /// Keeps what matters of a reply to `sent`.
    pub(crate) fn of(step: &Step, sent: &Value, reply: &Reply, known: &BTreeMap<String, Value>) -> Self {
        let mut answer = Self { code: reply.code, ..Self::default() };
        if step.accept.is_some() {
            answer.kind.clone_from(&reply.kind);
        }
        if step.quiet {
            return answer;
        }
        let method = step.call.split(' ').next().unwrap_or_default();
        if step.call.contains("watch=") && reply.code == 200 {
            answer.items = Some(events(&reply.body));
            return answer;
        }
        let body = reply.json();
        if body["kind"] == "Status" && reply.code >= 400 {
            body["reason"].as_str().unwrap_or_default().clone_into(&mut answer.reason);
            for cause in body.pointer("/details/causes").and_then(Value::as_array).into_iter().flatten() {
                let part = |name: &str| cause[name].as_str().unwrap_or_default().to_owned();
                answer.causes.insert(format!("{} {}", part("reason"), part("field")).trim_end().to_owned());
            }
        } else if let Some(items) = body["items"].as_array() {
            let names = items.iter().map(|item| item["metadata"]["name"].as_str().unwrap_or_default());
            answer.items = Some(names.filter(|name| name.starts_with(OURS)).map(ToOwned::to_owned).collect());
        } else if matches!(method, "POST" | "PUT" | "PATCH") && sent.is_object() && body.is_object() {
            answer.compare(sent, &body, "", known);
            if method == "PATCH" {
                answer.added.clear();
            }
        }
        for pointer in &step.look {
            let value = body.pointer(pointer).cloned().unwrap_or_else(|| json!("absent"));
            answer.seen.insert(pointer.clone(), normal(pointer, value, known));
        }
        answer
    }

    fn compare(&mut self, sent: &Value, back: &Value, path: &str, known: &BTreeMap<String, Value>) {
        match (sent, back) {
            (Value::Object(sent), Value::Object(back)) => {
                for (name, value) in sent {
                    let below = format!("{path}/{name}");
                    if path == "/metadata" && FURNITURE.contains(&name.as_str()) {
                        continue;
                    }
                    match back.get(name) {
                        Some(other) => self.compare(value, other, &below, known),
                        None => drop(self.lost.insert(below)),
                    }
                }
                for (name, value) in back.iter().filter(|(name, _)| !sent.contains_key(*name)) {
                    if path == "/metadata" && FURNITURE.contains(&name.as_str()) {
                        continue;
                    }
                    let below = format!("{path}/{name}");
                    let random = below == "/metadata/name";
                    let value = if random { json!("<name>") } else { normal(&below, value.clone(), known) };
                    self.added.insert(below, value);
                }
            }
            (Value::Array(sent), Value::Array(back)) => {
                // Of many alike one tells enough.
                let place = |index: usize| if sent.len() > 4 { "*".to_owned() } else { index.to_string() };
                for index in 0..sent.len().max(back.len()) {
                    let below = format!("{path}/{}", place(index));
                    match (sent.get(index), back.get(index)) {
                        (Some(sent), Some(back)) => self.compare(sent, back, &below, known),
                        (Some(_), None) => drop(self.lost.insert(below)),
                        (None, Some(value)) => {
                            let value = normal(&below, value.clone(), known);
                            self.added.insert(below, value);
                        }
                        (None, None) => {}
                    }
                }
            }
            (sent, back) if sent == back => {}
            (_, back) => drop(self.changed.insert(path.to_owned(), normal(path, back.clone(), known))),
        }
    }
}

const INITIAL_END: &str = "/metadata/annotations/k8s.io~1initial-events-end";

/// The events of a watch, without bookmarks in passing.
fn events(body: &[u8]) -> Vec<String> {
    let text = String::from_utf8_lossy(body);
    let mut all = Vec::new();
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        let event: Value = serde_json::from_str(line).unwrap_or_else(|_| json!({"type": "broken off"}));
        let (kind, object) = (event["type"].as_str().unwrap_or_default(), &event["object"]);
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        match kind {
            "BOOKMARK" if object.pointer(INITIAL_END) == Some(&json!("true")) => {
                all.push("BOOKMARK at the end of the first events".to_owned());
            }
            "BOOKMARK" => {}
            "ERROR" => all.push(format!("ERROR {} {}", object["code"], object["reason"].as_str().unwrap_or_default())),
            _ if name.starts_with(OURS) => all.push(format!("{kind} {name}")),
            _ => {}
        }
    }
    all
}

/// A value without what differs from run to run.
fn normal(path: &str, value: Value, known: &BTreeMap<String, Value>) -> Value {
    let name = path.rsplit('/').next().unwrap_or_default();
    match value {
        Value::Object(map) => {
            let inner = map.into_iter().map(|(name, value)| {
                let value = normal(&format!("{path}/{name}"), value, known);
                (name, value)
            });
            Value::Object(inner.collect::<Map<_, _>>())
        }
        Value::Array(items) => items.into_iter().map(|item| normal(path, item, known)).collect(),
        Value::String(text) => {
            if let Some((name, _)) = known.iter().find(|(_, value)| value.as_str() == Some(text.as_str())) {
                return json!(format!("${{{name}}}"));
            }
            match name {
                "uid" => json!("<uid>"),
                "resourceVersion" => json!("<version>"),
                _ if text.parse::<jiff::Timestamp>().is_ok() => json!("<time>"),
                _ => Value::String(text),
            }
        }
        other => other,
    }
}

//! Field and label selectors.

use serde_json::Value;

use super::{
    gates::{Release, Rules},
    status::Failure,
    store::{Resource, meta},
};

#[derive(Debug, Clone)]
struct Term {
    key: String,
    /// `None`: the key must exist (labels only).
    value: Option<String>,
    equal: bool,
}

/// What a list, watch or deletecollection is confined to.
#[derive(Debug, Clone, Default)]
pub(crate) struct Selector {
    fields: Vec<Term>,
    labels: Vec<Term>,
}

impl Selector {
    /// Reads both selectors of a query.
    ///
    /// # Errors
    /// 400 for a field that the resource does not support, or a text that is no selector.
    pub(crate) fn parse(resource: &Resource, rules: &Rules, fields: &str, labels: &str) -> Result<Self, Failure> {
        let fields = terms(fields, false)?;
        for term in &fields {
            let known = match (resource.plural, term.key.as_str()) {
                (_, "metadata.namespace") => resource.namespaced,
                (_, "metadata.name")
                | ("resourceslices", "spec.nodeName" | "spec.driver")
                | ("pods", "spec.nodeName" | "status.phase") => true,
                ("resourceslices", "spec.pool.name") => rules.since(Release::V1_37),
                ("events", key) => key.starts_with("involvedObject.") || matches!(key, "reason" | "type" | "source"),
                _ => false,
            };
            if !known {
                return Err(Failure::bad_request(format!("field label not supported: {}", term.key)));
            }
        }
        Ok(Self { fields, labels: terms(labels, true)? })
    }

    /// The value that a field must have, if the selector says so.
    pub(crate) fn required(&self, key: &str) -> Option<&str> {
        self.fields.iter().find(|t| t.equal && t.key == key).and_then(|t| t.value.as_deref())
    }

    pub(crate) fn matches(&self, object: &Value) -> bool {
        let field = |key: &str| match key {
            "metadata.name" => meta(object, "name").to_owned(),
            "metadata.namespace" => meta(object, "namespace").to_owned(),
            other => {
                let found = object.pointer(&format!("/{}", other.replace('.', "/")));
                found.and_then(Value::as_str).unwrap_or_default().to_owned()
            }
        };
        let label = |key: &str| object["metadata"]["labels"].get(key).and_then(Value::as_str).map(ToOwned::to_owned);
        self.fields.iter().all(|t| (Some(field(&t.key)) == t.value) == t.equal)
            && self.labels.iter().all(|t| match &t.value {
                None => label(&t.key).is_some() == t.equal,
                Some(value) => (label(&t.key).as_ref() == Some(value)) == t.equal,
            })
    }
}

fn terms(text: &str, bare: bool) -> Result<Vec<Term>, Failure> {
    text.split(',')
        .filter(|p| !p.trim().is_empty())
        .map(|part| {
            let part = part.trim();
            let split = part
                .split_once("!=")
                .map(|(k, v)| (k, v, false))
                .or_else(|| part.split_once("==").or_else(|| part.split_once('=')).map(|(k, v)| (k, v, true)));
            match split {
                Some((key, value, equal)) => {
                    Ok(Term { key: key.trim().to_owned(), value: Some(value.trim().to_owned()), equal })
                }
                None if bare => Ok(match part.strip_prefix('!') {
                    Some(key) => Term { key: key.to_owned(), value: None, equal: false },
                    None => Term { key: part.to_owned(), value: None, equal: true },
                }),
                None => Err(Failure::bad_request(format!("invalid selector: '{part}'; can't understand it"))),
            }
        })
        .collect()
}

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
    /// Empty: the key must exist (labels only).
    values: Vec<String>,
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
        self.fields.iter().find(|t| t.equal && t.key == key).and_then(|t| t.values.first()).map(String::as_str)
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
        self.fields.iter().all(|t| t.values.contains(&field(&t.key)) == t.equal)
            && self.labels.iter().all(|t| {
                let label = label(&t.key);
                let found =
                    if t.values.is_empty() { label.is_some() } else { label.is_some_and(|l| t.values.contains(&l)) };
                found == t.equal
            })
    }
}

fn terms(text: &str, labels: bool) -> Result<Vec<Term>, Failure> {
    parts(text).into_iter().map(|part| term(part, labels)).collect()
}

/// Splits at commas that stand in no brackets.
fn parts(text: &str) -> Vec<&str> {
    let mut depth = 0_u32;
    let split = text.split(move |c| {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            _ => {}
        }
        c == ',' && depth == 0
    });
    split.map(str::trim).filter(|part| !part.is_empty()).collect()
}

fn term(part: &str, labels: bool) -> Result<Term, Failure> {
    let split = part
        .split_once("!=")
        .map(|(k, v)| (k, v, false))
        .or_else(|| part.split_once("==").or_else(|| part.split_once('=')).map(|(k, v)| (k, v, true)));
    if let Some((key, value, equal)) = split {
        return Ok(Term { key: key.trim().to_owned(), values: vec![value.trim().to_owned()], equal });
    }
    let words: Vec<&str> = part.splitn(3, ' ').collect();
    match words.as_slice() {
        [key] if labels => {
            let (key, equal) = key.strip_prefix('!').map_or((*key, true), |key| (key, false));
            Ok(Term { key: key.to_owned(), values: Vec::new(), equal })
        }
        [key, word @ ("in" | "notin"), set] if labels && set.starts_with('(') && set.ends_with(')') => {
            let values = set[1..set.len() - 1].split(',').map(|value| value.trim().to_owned()).collect();
            Ok(Term { key: (*key).to_owned(), values, equal: *word == "in" })
        }
        _ => Err(Failure::bad_request(format!("invalid selector: '{part}'; can't understand it"))),
    }
}

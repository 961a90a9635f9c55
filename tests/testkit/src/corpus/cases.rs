//! The requests, and how the short form in which they are written becomes paths and bodies.
//!
//! A body is JSON with four additions: `{base: NAME, set: {POINTER: VALUE}, drop: [POINTER]}` takes a named object and
//! changes it; `{$times: N, $item: X}` is a list, with `$key` a map, in which `$n` is the number of the item; `{$text: "a",
//! $times: N}` is a long text. `${NAME}` in any text stands for what an earlier answer gave.

use std::collections::BTreeMap;

use anyhow::{Context as _, bail, ensure};
use serde::Deserialize;
use serde_json::{Map, Value, json};

const FILES: [(&str, &str); 6] = [
    ("slices.yaml", include_str!("requests/slices.yaml")),
    ("claims.yaml", include_str!("requests/claims.yaml")),
    ("objects.yaml", include_str!("requests/objects.yaml")),
    ("rights.yaml", include_str!("requests/rights.yaml")),
    ("reading.yaml", include_str!("requests/reading.yaml")),
    ("policies.yaml", include_str!("requests/policies.yaml")),
];

/// The file whose cases need the policy for bare numbers.
const POLICIES: &str = "policies.yaml";

/// One file of cases.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    bases: BTreeMap<String, Value>,
    cases: Vec<Map<String, Value>>,
}

/// Some requests that belong together.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    pub(crate) name: String,
    /// Why the stand-in need not answer as real servers do.
    pub(crate) apart: String,
    pub(crate) steps: Vec<Step>,
    pub(crate) needs_memory_policy: bool,
}

impl Case {
    /// Reads a case: a name and steps, or a name and the only step.
    fn read(mut case: Map<String, Value>, needs_memory_policy: bool) -> anyhow::Result<Self> {
        let mut text = |name: &str| match case.remove(name) {
            Some(Value::String(text)) => text,
            _ => String::new(),
        };
        let (name, apart) = (text("name"), text("apart"));
        ensure!(!name.is_empty(), "a case without name");
        let steps = match case.remove("steps") {
            Some(steps) => serde_json::from_value(steps),
            None => serde_json::from_value(Value::Object(case)).map(|step| vec![step]),
        };
        let steps = steps.with_context(|| format!("case {name:?}"))?;
        Ok(Self { name, apart, steps, needs_memory_policy })
    }
}

/// One request.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Step {
    /// Method and path; the path's first word may be a short name.
    pub(crate) call: String,
    /// Whose credentials.
    #[serde(rename = "as", default)]
    pub(crate) who: Actor,
    #[serde(default)]
    pub(crate) body: Value,
    /// `Content-Type`.
    #[serde(rename = "type", default)]
    pub(crate) kind: Option<String>,
    /// `Accept`; the answer's type is kept then.
    #[serde(default)]
    pub(crate) accept: Option<String>,
    /// Names for parts of the answer.
    #[serde(default)]
    pub(crate) keep: BTreeMap<String, String>,
    /// Parts of the answer that are kept beside what every answer is asked for.
    #[serde(default)]
    pub(crate) look: Vec<String>,
    /// Keep the code alone.
    #[serde(default)]
    pub(crate) quiet: bool,
    /// Ask again until the answer has this code: what the server learns a little later.
    #[serde(default)]
    pub(crate) until: Option<u16>,
    /// Requests to send while this watch is open.
    #[serde(default)]
    pub(crate) during: Vec<Step>,
}

/// Whose credentials a request carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Actor {
    #[default]
    Admin,
    /// The node's kubelet.
    Node,
    /// Another node's kubelet.
    OtherNode,
    /// The driver's service account with a token bound to the node.
    Account,
    /// The same account with a token bound to nothing.
    LooseAccount,
    /// Another service account.
    Stranger,
    Anonymous,
    /// A token that the server does not know.
    Unknown,
}

/// The corpus.
#[derive(Debug)]
pub(crate) struct Corpus {
    bases: BTreeMap<String, Value>,
    pub(crate) cases: Vec<Case>,
}

impl Corpus {
    /// Reads the corpus, which is part of the program.
    ///
    /// # Errors
    /// A mistake in it.
    pub(crate) fn read() -> anyhow::Result<Self> {
        let mut corpus = Self { bases: BTreeMap::new(), cases: Vec::new() };
        for (name, text) in FILES {
            let file: File = serde_saphyr::from_str(text).with_context(|| format!("{name} is not understood"))?;
            corpus.bases.extend(file.bases);
            for case in file.cases {
                corpus.cases.push(Case::read(case, name == POLICIES)?);
            }
        }
        let mut names: Vec<&str> = corpus.cases.iter().map(|case| case.name.as_str()).collect();
        names.sort_unstable();
        for pair in names.windows(2) {
            ensure!(pair[0] != pair[1], "two cases are called {:?}", pair[0]);
        }
        Ok(corpus)
    }

    /// Writes a body out.
    pub(crate) fn body(&self, body: &Value, known: &BTreeMap<String, Value>) -> anyhow::Result<Value> {
        self.expand(body, known, None)
    }

    fn expand(&self, value: &Value, known: &BTreeMap<String, Value>, number: Option<u64>) -> anyhow::Result<Value> {
        Ok(match value {
            Value::String(text) => match number {
                Some(number) if text == "$n" => json!(number),
                Some(number) => filled(&text.replace("$n", &number.to_string()), known),
                None => filled(text, known),
            },
            Value::Array(items) => {
                items.iter().map(|item| self.expand(item, known, number)).collect::<Result<_, _>>()?
            }
            Value::Object(map) if map.contains_key("$times") => self.repeated(map, known)?,
            Value::Object(map) if map.contains_key("base") => self.changed(map, known, number)?,
            Value::Object(map) => {
                let mut out = Map::new();
                for (name, item) in map {
                    out.insert(name.clone(), self.expand(item, known, number)?);
                }
                Value::Object(out)
            }
            other => other.clone(),
        })
    }

    fn repeated(&self, map: &Map<String, Value>, known: &BTreeMap<String, Value>) -> anyhow::Result<Value> {
        let times = map["$times"].as_u64().context("$times is a number")?;
        if let Some(text) = map.get("$text").and_then(Value::as_str) {
            return Ok(Value::String(text.repeat(usize::try_from(times)?)));
        }
        let item = map.get("$item").context("$times needs $item or $text")?;
        let items = (0..times).map(|n| self.expand(item, known, Some(n)));
        let Some(key) = map.get("$key").and_then(Value::as_str) else {
            return items.collect::<Result<_, _>>().map(Value::Array);
        };
        let mut out = Map::new();
        for (n, item) in items.enumerate() {
            out.insert(key.replace("$n", &n.to_string()), item?);
        }
        Ok(Value::Object(out))
    }

    fn changed(
        &self,
        map: &Map<String, Value>,
        known: &BTreeMap<String, Value>,
        number: Option<u64>,
    ) -> anyhow::Result<Value> {
        let name = map["base"].as_str().context("base is a name")?;
        let base = known.get(name).or_else(|| self.bases.get(name)).with_context(|| format!("no base {name}"))?;
        let mut object = self.expand(base, known, number)?;
        if let Some(set) = map.get("set").and_then(Value::as_object) {
            for (pointer, value) in set {
                let value = self.expand(value, known, number)?;
                put(&mut object, pointer, value)?;
            }
        }
        for pointer in map.get("drop").and_then(Value::as_array).into_iter().flatten() {
            drop_at(&mut object, pointer.as_str().context("drop is a list of pointers")?);
        }
        Ok(object)
    }
}

/// Puts what is known in place of `${NAME}`.
pub(crate) fn filled(text: &str, known: &BTreeMap<String, Value>) -> Value {
    let mut text = text.to_owned();
    for (name, value) in known {
        let place = format!("${{{name}}}");
        if text == place {
            return value.clone();
        }
        if let Value::String(value) = value {
            text = text.replace(&place, value);
        }
    }
    Value::String(text)
}

fn put(object: &mut Value, pointer: &str, value: Value) -> anyhow::Result<()> {
    let mut place = object;
    for key in pointer.split('/').skip(1) {
        let key = key.replace("~1", "/").replace("~0", "~");
        place = match place {
            Value::Array(items) => {
                let index: usize = key.parse().with_context(|| format!("{pointer}: {key} is no index"))?;
                if items.len() == index {
                    items.push(Value::Null);
                }
                items.get_mut(index).with_context(|| format!("{pointer}: no item {index}"))?
            }
            Value::Object(map) => map.entry(key).or_insert(Value::Null),
            Value::Null => {
                *place = json!({});
                match place {
                    Value::Object(map) => map.entry(key).or_insert(Value::Null),
                    _ => bail!("{pointer}: not reached"),
                }
            }
            _ => bail!("{pointer}: {key} is in no object"),
        };
    }
    *place = value;
    Ok(())
}

fn drop_at(object: &mut Value, pointer: &str) {
    let Some((above, key)) = pointer.rsplit_once('/') else { return };
    let key = key.replace("~1", "/").replace("~0", "~");
    match object.pointer_mut(above) {
        Some(Value::Object(map)) => drop(map.remove(&key)),
        Some(Value::Array(items)) => {
            if let Ok(index) = key.parse::<usize>()
                && index < items.len()
            {
                items.remove(index);
            }
        }
        _ => {}
    }
}

const CORPUS_NAMESPACE: &str = "corpus";

/// Writes a path out: `claims/c/status?x=y` is below the corpus' own namespace.
pub(crate) fn path(short: &str, known: &BTreeMap<String, Value>) -> String {
    let text = filled(short, known);
    let text = text.as_str().unwrap_or_default();
    if text.starts_with('/') {
        return text.to_owned();
    }
    let end = text.find(['/', '?']).unwrap_or(text.len());
    let (word, rest) = text.split_at(end);
    let resource = "/apis/resource.k8s.io/v1";
    let base = match word {
        "slices" => format!("{resource}/resourceslices"),
        "classes" => format!("{resource}/deviceclasses"),
        "claims" => format!("{resource}/namespaces/{CORPUS_NAMESPACE}/resourceclaims"),
        "all-claims" => format!("{resource}/resourceclaims"),
        "admin-claims" => format!("{resource}/namespaces/corpus-admin/resourceclaims"),
        "templates" => format!("{resource}/namespaces/{CORPUS_NAMESPACE}/resourceclaimtemplates"),
        "nodes" => "/api/v1/nodes".to_owned(),
        "pods" => format!("/api/v1/namespaces/{CORPUS_NAMESPACE}/pods"),
        "all-pods" => "/api/v1/pods".to_owned(),
        "events" => format!("/api/v1/namespaces/{CORPUS_NAMESPACE}/events"),
        "new-events" => format!("/apis/events.k8s.io/v1/namespaces/{CORPUS_NAMESPACE}/events"),
        other => other.to_owned(),
    };
    format!("{base}{rest}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_are_written_out() {
        let corpus = Corpus {
            bases: BTreeMap::from([("thing".to_owned(), json!({"a": [{"b": 1}], "c": "${who}"}))]),
            cases: Vec::new(),
        };
        let known = BTreeMap::from([("who".to_owned(), json!("me"))]);
        let body = json!({"base": "thing", "set": {"/a/1": {"x": "${who}!"}, "/d/e~1f": {"$times": 2, "$key": "k$n", "$item": {"n": "$n", "t": "$n."}}, "/g": {"$text": "ab", "$times": 3}}, "drop": ["/a/0/b"]});
        let out = corpus.body(&body, &known).unwrap();
        let expected = json!({
            "a": [{}, {"x": "me!"}], "c": "me", "g": "ababab",
            "d": {"e/f": {"k0": {"n": 0, "t": "0."}, "k1": {"n": 1, "t": "1."}}},
        });
        assert_eq!(out, expected);
        assert_eq!(
            path("claims/c/status?dryRun=All", &known),
            "/apis/resource.k8s.io/v1/namespaces/corpus/resourceclaims/c/status?dryRun=All"
        );
    }
}

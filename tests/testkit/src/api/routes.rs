//! From a request line to what is asked for, and the discovery documents.

use std::collections::BTreeMap;

use http::Method;
use serde_json::{Value, json};

use super::{
    gates::Rules,
    store::{RESOURCES, Resource, resource},
};

/// A decoded query.
#[derive(Debug, Clone, Default)]
pub(crate) struct Query(BTreeMap<String, String>);

impl Query {
    pub(crate) fn parse(text: &str) -> Self {
        let pairs = text.split('&').filter(|p| !p.is_empty()).map(|pair| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            (decode(name), decode(value))
        });
        Self(pairs.collect())
    }

    pub(crate) fn get(&self, name: &str) -> &str {
        self.0.get(name).map_or("", String::as_str)
    }

    pub(crate) fn is_true(&self, name: &str) -> bool {
        matches!(self.get(name), "true" | "1")
    }
}

/// Undoes percent-encoding.
fn decode(text: &str) -> String {
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        match byte {
            b'+' => out.push(b' '),
            b'%' => {
                let pair = [bytes.next().unwrap_or(b'0'), bytes.next().unwrap_or(b'0')];
                let hex = std::str::from_utf8(&pair).unwrap_or("00");
                out.push(u8::from_str_radix(hex, 16).unwrap_or(b'?'));
            }
            other => out.push(other),
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// A request for a resource.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    pub(crate) resource: &'static Resource,
    pub(crate) verb: String,
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) subresource: String,
}

impl Target {
    /// `resourceclaims` or `resourceclaims/status`.
    pub(crate) fn full_resource(&self) -> String {
        if self.subresource.is_empty() {
            self.resource.plural.to_owned()
        } else {
            format!("{}/{}", self.resource.plural, self.subresource)
        }
    }

    /// Whether a path names something that knows other methods than the one that was asked.
    pub(crate) fn refuses_method(path: &str, query: &Query) -> bool {
        ["GET", "POST", "PUT", "PATCH", "DELETE"].into_iter().any(|method| {
            let method = Method::from_bytes(method.as_bytes()).unwrap_or_default();
            Self::parse(&method, path, query).is_some()
        })
    }

    /// Reads a path like `/apis/resource.k8s.io/v1/namespaces/ml/resourceclaims/train/status`; `None` if it names no served resource.
    pub(crate) fn parse(method: &Method, path: &str, query: &Query) -> Option<Self> {
        let parts: Vec<String> = path.split('/').filter(|p| !p.is_empty()).map(decode).collect();
        let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
        let (group, rest) = match parts.as_slice() {
            ["api", "v1", rest @ ..] => ("", rest),
            ["apis", group, "v1", rest @ ..] => (*group, rest),
            _ => return None,
        };
        let (namespace, rest) = match rest {
            ["namespaces", namespace, rest @ ..] if !rest.is_empty() => (*namespace, rest),
            other => ("", other),
        };
        let (plural, name, subresource) = match rest {
            [plural] => (*plural, "", ""),
            [plural, name] => (*plural, *name, ""),
            [plural, name, sub] => (*plural, *name, *sub),
            _ => return None,
        };
        let resource = resource(group, plural)?;
        let scoped = resource.namespaced != namespace.is_empty();
        let everywhere = namespace.is_empty() && name.is_empty() && *method == Method::GET;
        if !(scoped || everywhere) || !(subresource.is_empty() || (subresource == "status" && resource.has_status)) {
            return None;
        }
        let verb = match (method.as_str(), name.is_empty()) {
            ("GET", false) => "get",
            ("GET", true) if query.is_true("watch") => "watch",
            ("GET", true) => "list",
            ("POST", true) => "create",
            ("PUT", false) => "update",
            ("PATCH", false) => "patch",
            ("DELETE", false) => "delete",
            ("DELETE", true) => "deletecollection",
            _ => return None,
        };
        Some(Self {
            resource,
            verb: verb.to_owned(),
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            subresource: subresource.to_owned(),
        })
    }
}

/// Whether a path is below a group that is served.
pub(crate) fn is_served(path: &str) -> bool {
    ["/api/v1/", "/apis/resource.k8s.io/", "/apis/events.k8s.io/"].iter().any(|group| path.starts_with(group))
}

/// The answer to a path that is no resource, if there is one: discovery, version, health. Text answers are strings.
pub(crate) fn discovery(path: &str, rules: &Rules) -> Option<Value> {
    let groups = ["resource.k8s.io", "events.k8s.io"];
    let group = |name: &str| {
        let version = json!({"groupVersion": format!("{name}/v1"), "version": "v1"});
        json!({"name": name, "versions": [version.clone()], "preferredVersion": version})
    };
    let resources = |of: &str| {
        let mut list = Vec::new();
        for r in RESOURCES.iter().filter(|r| r.group == of) {
            let verbs = json!(["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]);
            list.push(json!({"name": r.plural, "singularName": r.kind.to_lowercase(), "namespaced": r.namespaced, "kind": r.kind, "verbs": verbs}));
            if r.has_status {
                let verbs = json!(["get", "patch", "update"]);
                list.push(json!({"name": format!("{}/status", r.plural), "singularName": "", "namespaced": r.namespaced, "kind": r.kind, "verbs": verbs}));
            }
        }
        let version = if of.is_empty() { "v1".to_owned() } else { format!("{of}/v1") };
        json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": list})
    };
    let minor = rules.release.minor();
    Some(match path.trim_end_matches('/') {
        "/livez" | "/readyz" | "/healthz" => json!("ok"),
        "/version" => json!({
            "major": "1", "minor": minor.to_string(), "gitVersion": format!("v1.{minor}.3"),
            "gitCommit": "0000000000000000000000000000000000000000", "gitTreeState": "clean",
            "buildDate": "2026-01-01T00:00:00Z", "goVersion": "go1.26", "compiler": "gc", "platform": "linux/amd64",
        }),
        "/api" => json!({"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}),
        "/apis" => {
            json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups.iter().map(|g| group(g)).collect::<Vec<_>>()})
        }
        "/api/v1" => resources(""),
        other => {
            let rest = other.strip_prefix("/apis/")?;
            let name = rest.strip_suffix("/v1").unwrap_or(rest);
            groups.iter().find(|g| **g == name)?;
            if rest == name {
                let mut one = group(name);
                one["kind"] = json!("APIGroup");
                one["apiVersion"] = json!("v1");
                one
            } else {
                resources(name)
            }
        }
    })
}

//! Who asks, and what they may do: the Node authorizer, `NodeRestriction`, and the rights of a driver's service account.

use std::{
    collections::{BTreeSet, HashMap},
    time::{Duration, Instant},
};

use serde_json::Value;

use super::{
    gates::{Release, Rules},
    routes::Target,
    selector::Selector,
    status::Failure,
    store::{Store, meta},
    validate::Causes,
};

/// Whose credentials a kubeconfig carries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Who {
    /// A cluster administrator: may do everything.
    Admin,
    /// A node's kubelet, `system:node:<name>`.
    Node(String),
    /// The driver's service account, its token bound to a node.
    ServiceAccount {
        /// Namespace of the account.
        namespace: String,
        /// Name of the account.
        name: String,
        /// The node to which the token is bound.
        node: String,
    },
}

impl Who {
    /// The user name that the server sees.
    #[must_use]
    pub fn user(&self) -> String {
        match self {
            Self::Admin => "kubernetes-admin".to_owned(),
            Self::Node(node) => format!("system:node:{node}"),
            Self::ServiceAccount { namespace, name, .. } => format!("system:serviceaccount:{namespace}:{name}"),
        }
    }

    /// Whether this is the account to which the shipped role is bound.
    fn is_driver(&self) -> bool {
        matches!(self, Self::ServiceAccount { namespace, name, .. } if namespace == "npu-dra" && name == "npu-dra")
    }

    pub(crate) fn groups(&self) -> Vec<String> {
        match self {
            Self::Admin => vec!["system:masters".to_owned()],
            Self::Node(_) => vec!["system:nodes".to_owned()],
            Self::ServiceAccount { .. } => vec!["system:serviceaccounts".to_owned()],
        }
    }
}

/// The known credentials and the relations between nodes and claims.
#[derive(Debug, Default)]
pub(crate) struct Auth {
    certificates: HashMap<Vec<u8>, (Who, bool)>,
    tokens: HashMap<String, (Who, bool)>,
    /// (node, namespace, claim) of pods bound to the node.
    pub(crate) bound: BTreeSet<(String, String, String)>,
    /// How long a new slice is unknown to the node authorizer.
    pub(crate) graph_lag: Duration,
    /// When each slice was created, by uid.
    pub(crate) created: HashMap<String, Instant>,
}

impl Auth {
    pub(crate) fn add_certificate(&mut self, der: Vec<u8>, who: Who, valid: bool) {
        self.certificates.insert(der, (who, valid));
    }

    pub(crate) fn add_token(&mut self, token: String, who: Who, valid: bool) {
        self.tokens.insert(token, (who, valid));
    }

    pub(crate) fn revoke_certificate(&mut self, der: &[u8]) {
        if let Some((_, valid)) = self.certificates.get_mut(der) {
            *valid = false;
        }
    }

    pub(crate) fn revoke_token(&mut self, token: &str) {
        if let Some((_, valid)) = self.tokens.get_mut(token) {
            *valid = false;
        }
    }

    /// Finds out who asks; `Ok(None)` is an anonymous client.
    pub(crate) fn authenticate(
        &self,
        certificate: Option<&[u8]>,
        bearer: Option<&str>,
    ) -> Result<Option<Who>, Failure> {
        let entry = match (certificate, bearer) {
            (Some(der), _) => self.certificates.get(der),
            (None, Some(token)) => self.tokens.get(token),
            (None, None) => return Ok(None),
        };
        match entry {
            Some((who, true)) => Ok(Some(who.clone())),
            _ => Err(Failure::new(401, "Unauthorized")),
        }
    }

    /// Decides whether `who` may do this.
    pub(crate) fn authorize(
        &self,
        who: Option<&Who>,
        target: &Target,
        selector: &Selector,
        store: &Store,
        rules: &Rules,
    ) -> Result<(), Failure> {
        let user = who.map_or_else(|| "system:anonymous".to_owned(), Who::user);
        let deny = |why: &str| {
            let what = target.full_resource();
            Err(Failure::forbidden(&user, &target.verb, &what, target.resource.group, &target.name, why))
        };
        match who {
            Some(Who::Admin) => Ok(()),
            None => deny("anonymous requests have no rights"),
            Some(Who::Node(node)) => match self.node_may(node, target, selector, store, rules) {
                Ok(()) => Ok(()),
                Err(why) => deny(&why),
            },
            Some(who) => {
                let verb = target.verb.as_str();
                // The shipped role, packaging/manifests/rbac.yaml.
                let allowed = match target.full_resource().as_str() {
                    "resourceslices" => verb != "deletecollection",
                    "resourceclaims" | "nodes" => verb == "get",
                    "resourceclaims/status" => matches!(verb, "get" | "update" | "patch"),
                    "events" => matches!(verb, "create" | "patch"),
                    _ => false,
                };
                if allowed && who.is_driver() { Ok(()) } else { deny("no RBAC rule allows it") }
            }
        }
    }

    fn node_may(
        &self,
        node: &str,
        target: &Target,
        selector: &Selector,
        store: &Store,
        rules: &Rules,
    ) -> Result<(), String> {
        let verb = target.verb.as_str();
        let unrelated = || Err(format!("no relationship found between node '{node}' and this object"));
        match target.full_resource().as_str() {
            "resourceslices" => match verb {
                "create" => Ok(()),
                "list" | "watch" | "deletecollection" => {
                    if selector.required("spec.nodeName") == Some(node) {
                        Ok(())
                    } else {
                        Err(format!(
                            "can only list/watch/deletecollection resourceslices with spec.nodeName={node} field selector"
                        ))
                    }
                }
                _ => {
                    let Some(slice) = store.get("resourceslices", "", &target.name) else { return unrelated() };
                    let known = self.created.get(meta(slice, "uid")).is_none_or(|at| at.elapsed() >= self.graph_lag);
                    let own = slice.pointer("/spec/nodeName").and_then(Value::as_str) == Some(node);
                    if known && own { Ok(()) } else { unrelated() }
                }
            },
            "resourceclaims" if verb == "get" => {
                let key = (node.to_owned(), target.namespace.clone(), target.name.clone());
                let bound = self.bound.contains(&key) || has_pod(store, &key);
                if bound { Ok(()) } else { unrelated() }
            }
            "resourceclaims" => Err("node users can only get resourceclaims".to_owned()),
            "nodes" if verb == "get" && target.name == node => Ok(()),
            "nodes" if matches!(verb, "list" | "watch") && selector.required("metadata.name") == Some(node) => Ok(()),
            "nodes" => Err(format!("node '{node}' cannot read nodes other than itself")),
            "pods" if verb == "get" => Ok(()),
            "pods" if matches!(verb, "list" | "watch") && selector.required("spec.nodeName") == Some(node) => Ok(()),
            "events" if matches!(verb, "create" | "patch" | "update") => {
                // The role of nodes has events of the new form since 1.36.
                if target.resource.group.is_empty() || rules.since(Release::V1_36) {
                    Ok(())
                } else {
                    Err("no RBAC rule allows it".to_owned())
                }
            }
            _ => Err("no rule allows it".to_owned()),
        }
    }
}

/// Whether a pod on the node uses the claim, by its own name or from a template.
fn has_pod(store: &Store, (node, namespace, claim): &(String, String, String)) -> bool {
    store.list("pods", Some(namespace)).any(|pod| {
        let names = |list: &str| {
            let all = pod.pointer(list).and_then(Value::as_array).into_iter().flatten();
            all.filter_map(|entry| entry["resourceClaimName"].as_str())
        };
        pod.pointer("/spec/nodeName").and_then(Value::as_str) == Some(node)
            && names("/spec/resourceClaims").chain(names("/status/resourceClaimStatuses")).any(|name| name == claim)
    })
}

/// `NodeRestriction`: what a node creates is of that node.
pub(crate) fn restrict_node(who: Option<&Who>, slice: &Value) -> Result<(), Failure> {
    let of = slice.pointer("/spec/nodeName").and_then(Value::as_str);
    match who {
        Some(Who::Node(node)) if of != Some(node.as_str()) => {
            let name = meta(slice, "name");
            let why = "can only create ResourceSlice with the same NodeName as the requesting node";
            Err(Failure::new(403, format!("resourceslices.resource.k8s.io \"{name}\" is forbidden: {why}")))
        }
        _ => Ok(()),
    }
}

/// The shipped policy for the driver's account. `slice` is what would be stored, or what is deleted.
pub(crate) fn admit_slice(who: Option<&Who>, slice: &Value) -> Result<(), Failure> {
    let Some(Who::ServiceAccount { node, .. }) = who.filter(|who| who.is_driver()) else { return Ok(()) };
    let of = slice.pointer("/spec/nodeName").and_then(Value::as_str).unwrap_or_default();
    let driver = slice.pointer("/spec/driver").and_then(Value::as_str).unwrap_or_default();
    let why = if node.is_empty() {
        "the token is not bound to a node"
    } else if of != node {
        "this account may only write ResourceSlices of the node that its token is bound to"
    } else if driver != DRIVER {
        "this account may only write ResourceSlices of driver npu.huawei.com"
    } else {
        return Ok(());
    };
    Err(Failure::denied("resourceslices.resource.k8s.io", meta(slice, "name"), "npu-dra-slices", why))
}

const DRIVER: &str = "npu.huawei.com";

/// Whether an account may change a claim's status as it wants to: the shipped policy, and from 1.36 on the synthetic
/// subresources `binding` and `driver` of the shipped role.
pub(crate) fn admit_claim_status(who: Option<&Who>, new: &Value, old: &Value, rules: &Rules) -> Result<(), Failure> {
    let Some(Who::ServiceAccount { node, .. }) = who.filter(|who| who.is_driver()) else { return Ok(()) };
    let part = |claim: &'_ Value, name: &str| claim.pointer(&format!("/status/{name}")).cloned();
    let changed = |name: &str| part(new, name) != part(old, name);
    let others = |claim: &Value| {
        let devices = part(claim, "devices").and_then(|devices| devices.as_array().cloned()).unwrap_or_default();
        devices.into_iter().filter(|device| device["driver"] != DRIVER).collect::<Vec<_>>()
    };
    let bound = changed("allocation") || changed("reservedFor");
    let foreign = others(new) != others(old);
    if rules.since(Release::V1_36) {
        let nodes = new.pointer("/status/allocation/nodeSelector/nodeSelectorTerms/0/matchFields/0/values/0");
        let associated = nodes.and_then(Value::as_str) == Some(node.as_str());
        let field = match () {
            () if bound => "status.allocation",
            () if changed("devices") && (foreign || !associated) => "status.devices",
            () => return Ok(()),
        };
        let mut causes = Causes::default();
        causes.forbidden(field, "changing it needs rights on a synthetic subresource");
        return Err(Failure::invalid("ResourceClaim", "resource.k8s.io", meta(new, "name"), &causes.all));
    }
    if !bound && !foreign {
        return Ok(());
    }
    let why = "this account may only report devices of driver npu.huawei.com";
    Err(Failure::denied("resourceclaims.resource.k8s.io", meta(new, "name"), "npu-dra-claim-status", why))
}

//! Who asks, and what they may do: the Node authorizer, `NodeRestriction`, and the rights of a driver's service account.

use std::{
    collections::{BTreeSet, HashMap},
    time::{Duration, Instant},
};

use serde_json::Value;

use super::{
    routes::Target,
    selector::Selector,
    status::Failure,
    store::{Store, meta},
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
    ) -> Result<(), Failure> {
        let user = who.map_or_else(|| "system:anonymous".to_owned(), Who::user);
        let deny = |why: &str| {
            let what = target.full_resource();
            Err(Failure::forbidden(&user, &target.verb, &what, target.resource.group, &target.name, why))
        };
        match who {
            Some(Who::Admin) => Ok(()),
            None => deny("anonymous requests have no rights"),
            Some(Who::Node(node)) => match self.node_may(node, target, selector, store) {
                Ok(()) => Ok(()),
                Err(why) => deny(&why),
            },
            Some(Who::ServiceAccount { .. }) => {
                let verb = target.verb.as_str();
                let allowed = match target.full_resource().as_str() {
                    "resourceslices" => true,
                    "resourceclaims" => matches!(verb, "get" | "list" | "watch"),
                    "resourceclaims/status" => matches!(verb, "get" | "update" | "patch"),
                    "nodes" => verb == "get",
                    "pods" => matches!(verb, "get" | "list" | "watch"),
                    "events" => matches!(verb, "create" | "patch"),
                    _ => false,
                };
                if allowed { Ok(()) } else { deny("no RBAC rule allows it") }
            }
        }
    }

    fn node_may(&self, node: &str, target: &Target, selector: &Selector, store: &Store) -> Result<(), String> {
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
                if self.bound.contains(&key) { Ok(()) } else { unrelated() }
            }
            "resourceclaims" => Err("node users can only get resourceclaims".to_owned()),
            "nodes" if verb == "get" && target.name == node => Ok(()),
            "nodes" => Err(format!("node '{node}' cannot read nodes other than itself")),
            "pods" if verb == "get" => Ok(()),
            "pods" if matches!(verb, "list" | "watch") && selector.required("spec.nodeName") == Some(node) => Ok(()),
            "events" if matches!(verb, "create" | "patch" | "update") => Ok(()),
            _ => Err("no rule allows it".to_owned()),
        }
    }
}

/// Admission: `NodeRestriction` for nodes, the shipped policy for the service account. `slice` is what would be stored or was deleted.
pub(crate) fn admit_slice(who: Option<&Who>, slice: &Value) -> Result<(), Failure> {
    let of = slice.pointer("/spec/nodeName").and_then(Value::as_str);
    let name = meta(slice, "name");
    match who {
        Some(Who::Node(node)) if of != Some(node.as_str()) => Err(Failure::new(
            403,
            format!(
                "resourceslices.resource.k8s.io \"{name}\" is forbidden: can only create ResourceSlice with the same NodeName as the requesting node"
            ),
        )),
        Some(Who::ServiceAccount { node, .. }) if of != Some(node.as_str()) => {
            let mut failure = Failure::new(
                422,
                format!(
                    "resourceslices.resource.k8s.io \"{name}\" is forbidden: ValidatingAdmissionPolicy 'npu-dra-slices' denied request: a service account of node {node} may only change its own slices"
                ),
            );
            failure.reason = "Invalid";
            Err(failure)
        }
        _ => Ok(()),
    }
}

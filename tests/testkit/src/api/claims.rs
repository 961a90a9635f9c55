//! What controllers, kubelet and users would do to the API server: claims, with an allocation too, and wiping.

use std::collections::BTreeSet;

use anyhow::Context as _;
use serde_json::{Value, json};

use super::{
    ApiServer,
    auth::Who,
    ops::Write,
    routes::{Query, Target},
    schema,
    store::{meta, resource},
    validate::text,
};

pub(super) const CLAIMS: &str = "resourceclaims";

/// One allocated device of a claim.
#[derive(Debug, Clone)]
pub struct DeviceResult(Value);

impl DeviceResult {
    /// A device for a request (`req` or `req/sub`).
    #[must_use]
    pub fn new(request: &str, driver: &str, pool: &str, device: &str) -> Self {
        Self(json!({"request": request, "driver": driver, "pool": pool, "device": device}))
    }

    /// The share of a device that several claims use.
    #[must_use]
    pub fn share(mut self, id: &str) -> Self {
        self.0["shareID"] = json!(id);
        self
    }

    /// What the share takes of a capacity, as a quantity.
    #[must_use]
    pub fn consumes(mut self, capacity: &str, quantity: &str) -> Self {
        self.0["consumedCapacity"][capacity] = json!(quantity);
        self
    }

    /// Allocated for looking only.
    #[must_use]
    pub fn admin_access(mut self) -> Self {
        self.0["adminAccess"] = json!(true);
        self
    }
}

/// Builds a `ResourceClaim` and stores it as the scheduler would leave it.
#[derive(Debug)]
pub struct ClaimBuilder<'a> {
    server: &'a ApiServer,
    object: Value,
    node: Option<String>,
    allocated: bool,
}

impl ClaimBuilder<'_> {
    /// Adds a request for `count` devices of a class.
    #[must_use]
    pub fn request(mut self, name: &str, class: &str, count: u32) -> Self {
        let request = json!({"name": name, "exactly": {
            "deviceClassName": class, "allocationMode": "ExactCount", "count": count,
        }});
        push(&mut self.object, "/spec/devices/requests", request);
        self
    }

    /// Adds a request as it is.
    #[must_use]
    pub fn raw_request(mut self, request: Value) -> Self {
        push(&mut self.object, "/spec/devices/requests", request);
        self
    }

    /// Adds an allocated device, of our driver or another one.
    #[must_use]
    pub fn result(mut self, result: DeviceResult) -> Self {
        self.allocated = true;
        push(&mut self.object, "/status/allocation/devices/results", result.0);
        self
    }

    /// Adds opaque configuration to the allocation; `source` is `FromClass` or `FromClaim`, no `requests` means all.
    #[must_use]
    pub fn config(mut self, source: &str, driver: &str, requests: &[&str], parameters: &Value) -> Self {
        self.allocated = true;
        let entry =
            json!({"source": source, "requests": requests, "opaque": {"driver": driver, "parameters": parameters}});
        push(&mut self.object, "/status/allocation/devices/config", entry);
        self
    }

    /// Gives the claim this uid instead of a new one.
    #[must_use]
    pub fn uid(mut self, uid: &str) -> Self {
        self.object["metadata"]["uid"] = json!(uid);
        self
    }

    /// Says that a pod on this node uses the claim, so that the node may read it.
    #[must_use]
    pub fn node(mut self, node: &str) -> Self {
        self.node = Some(node.to_owned());
        self
    }

    /// Stores the claim (over an older one of that name) and returns it.
    #[must_use]
    pub fn store(mut self) -> Value {
        let node = self.node.clone();
        if !self.allocated
            && let Some(claim) = self.object.as_object_mut()
        {
            claim.remove("status");
        } else if let Some(node) = &node {
            self.object["status"]["allocation"]["nodeSelector"] = node_selector(node);
        }
        self.server.shared.update(|inner| {
            let mut object = self.object.clone();
            if meta(&object, "uid").is_empty() {
                object["metadata"]["uid"] = json!(inner.store.uid());
            }
            object["metadata"]["creationTimestamp"] = json!(schema::seconds(jiff::Timestamp::now()));
            if let Some(node) = node {
                inner.auth.bound.insert((
                    node,
                    meta(&object, "namespace").to_owned(),
                    meta(&object, "name").to_owned(),
                ));
            }
            (*inner.store.put(CLAIMS, object)).clone()
        })
    }
}

fn push(object: &mut Value, path: &str, item: Value) {
    let mut at = object;
    for part in path.split('/').skip(1) {
        at = &mut at[part];
    }
    match at {
        Value::Array(items) => items.push(item),
        other => *other = Value::Array(vec![item]),
    }
}

pub(super) fn node_selector(node: &str) -> Value {
    json!({"nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}]})
}

impl ApiServer {
    /// Starts a claim; [`ClaimBuilder::store`] ends it.
    #[must_use]
    pub fn claim_builder(&self, namespace: &str, name: &str) -> ClaimBuilder<'_> {
        let object = json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            "metadata": {"namespace": namespace, "name": name},
            "spec": {"devices": {}}, "status": {},
        });
        ClaimBuilder { server: self, object, node: None, allocated: false }
    }

    /// The stored claim.
    #[must_use]
    pub fn claim(&self, namespace: &str, name: &str) -> Option<Value> {
        self.object(CLAIMS, namespace, name)
    }

    /// Deletes a claim and the pods that used it; false if there is none.
    pub fn delete_claim(&self, namespace: &str, name: &str) -> bool {
        self.shared.update(|inner| {
            inner.auth.bound.retain(|(_, ns, n)| !(ns == namespace && n == name));
            inner.store.remove(CLAIMS, namespace, name).is_some()
        })
    }

    /// Says that a pod on `node` uses the claim.
    pub fn bind_claim(&self, node: &str, namespace: &str, name: &str) {
        let key = (node.to_owned(), namespace.to_owned(), name.to_owned());
        self.shared.update(|inner| inner.auth.bound.insert(key));
    }

    /// Says that the pod on `node` is gone while the claim stays: the node gets 403 from now on.
    pub fn unbind_claim(&self, node: &str, namespace: &str, name: &str) {
        let key = (node.to_owned(), namespace.to_owned(), name.to_owned());
        self.shared.update(|inner| inner.auth.bound.remove(&key));
    }

    /// Deletes all slices of a node, of all drivers, as kubelet does when it starts; returns how many.
    pub fn kubelet_wipe(&self, node: &str) -> usize {
        self.wipe(|slice| slice.pointer("/spec/nodeName").and_then(Value::as_str) == Some(node))
    }

    /// Deletes the slices of one driver on a node, as kubelet does 30 s after the driver vanished; returns how many.
    pub fn kubelet_wipe_driver(&self, node: &str, driver: &str) -> usize {
        self.wipe(|slice| {
            slice.pointer("/spec/nodeName").and_then(Value::as_str) == Some(node)
                && slice.pointer("/spec/driver").and_then(Value::as_str) == Some(driver)
        })
    }

    /// Deletes slices whose owner, by uid, is no stored node, as the garbage collector does; returns how many.
    pub fn collect_garbage(&self) -> usize {
        let nodes: BTreeSet<String> = self.objects("nodes").iter().map(|n| meta(n, "uid").to_owned()).collect();
        self.wipe(|slice| {
            let owners = slice.pointer("/metadata/ownerReferences").and_then(Value::as_array);
            owners
                .is_some_and(|o| !o.is_empty() && o.iter().all(|o| !nodes.contains(text(o, "uid").unwrap_or_default())))
        })
    }

    fn wipe(&self, doomed: impl Fn(&Value) -> bool) -> usize {
        self.shared.update(|inner| {
            let slices = inner.store.list("resourceslices", None).filter(|s| doomed(s));
            let names: Vec<String> = slices.map(|s| meta(s, "name").to_owned()).collect();
            for name in &names {
                inner.store.remove("resourceslices", "", name);
            }
            names.len()
        })
    }

    /// Creates an object as somebody with all rights would over the wire: decoded, defaulted, mutated, validated.
    ///
    /// # Errors
    /// A resource that is not served, or the server's refusal.
    pub fn create(&self, group: &str, plural: &str, namespace: &str, object: &Value) -> anyhow::Result<Value> {
        let resource = resource(group, plural).with_context(|| format!("{plural}.{group} is not served"))?;
        let target = Target {
            resource,
            verb: "create".to_owned(),
            namespace: namespace.to_owned(),
            name: String::new(),
            subresource: String::new(),
        };
        let write = Write {
            target: &target,
            who: Some(&Who::Admin),
            query: &Query::default(),
            content_type: "application/json",
            body: &object.to_string().into_bytes(),
        };
        let made = self.shared.update(|inner| inner.write(&write));
        made.map(|(_, stored)| stored).map_err(|failure| anyhow::anyhow!("{}", failure.message))
    }

    /// Makes a claim from a stored template, as the controller does for a pod.
    ///
    /// # Errors
    /// No such template, or the server's refusal.
    pub fn claim_from_template(&self, namespace: &str, template: &str, name: &str) -> anyhow::Result<Value> {
        let found = self.object("resourceclaimtemplates", namespace, template);
        let found = found.with_context(|| format!("there is no template {namespace}/{template}"))?;
        let claim = json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            "metadata": {"namespace": namespace, "name": name}, "spec": found["spec"]["spec"],
        });
        self.create("resource.k8s.io", CLAIMS, namespace, &claim)
    }

    /// Stores any object as it is (classes, templates, pods, nodes), without validation; for setting the stage.
    ///
    /// # Errors
    /// A resource that is not served.
    pub fn store_raw(&self, group: &str, plural: &str, mut object: Value) -> anyhow::Result<Value> {
        let resource = resource(group, plural).with_context(|| format!("{plural}.{group} is not served"))?;
        Ok(self.shared.update(|inner| {
            if meta(&object, "uid").is_empty() {
                object["metadata"]["uid"] = json!(inner.store.uid());
            }
            (*inner.store.put(resource.plural, object)).clone()
        }))
    }
}

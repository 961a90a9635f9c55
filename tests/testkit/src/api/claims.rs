//! What scheduler, kubelet and users would do to the API server: claims with an allocation, wiping, a tiny allocation.

use std::{collections::BTreeSet, sync::Arc};

use anyhow::{Context as _, bail};
use serde_json::{Value, json};

use super::{
    ApiServer, Inner, schema,
    store::{meta, resource},
    validate::{list, text},
};

const CLAIMS: &str = "resourceclaims";

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

fn node_selector(node: &str) -> Value {
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

    /// Gives a stored claim free whole devices (attribute `type` is `npu`, no taint that keeps claims off) from the published
    /// slices of complete pools, and says that a pod on their node uses it. Knows only `exactly` with a count; no scheduler.
    ///
    /// # Errors
    /// No such claim, a request that it does not understand, too few free devices.
    pub fn allocate(&self, namespace: &str, name: &str) -> anyhow::Result<Value> {
        self.shared.update(|inner| {
            let claim = inner.store.get(CLAIMS, namespace, name).map(Arc::clone);
            let mut claim = (*claim.with_context(|| format!("there is no claim {namespace}/{name}"))?).clone();
            let mut free = free_devices(inner).into_iter();
            let mut results = Vec::new();
            let mut node = String::new();
            let requests = claim.pointer("/spec/devices/requests").and_then(Value::as_array).cloned();
            for request in requests.unwrap_or_default() {
                let exact = request.get("exactly").context("only requests with `exactly` can be allocated here")?;
                let count = exact.get("count").and_then(Value::as_u64).unwrap_or(1);
                let wanted = text(&request, "name").unwrap_or_default();
                for _ in 0..count {
                    let Some(device) = free.next() else {
                        bail!("claim {namespace}/{name}: no free device for request {wanted}")
                    };
                    node.clone_from(&device.node);
                    results.push(json!({
                        "request": wanted, "driver": device.driver, "pool": device.pool, "device": device.name,
                    }));
                }
            }
            claim["status"]["allocation"] =
                json!({"devices": {"results": results}, "nodeSelector": node_selector(&node)});
            inner.auth.bound.insert((node, namespace.to_owned(), name.to_owned()));
            Ok((*inner.store.put(CLAIMS, claim)).clone())
        })
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

struct Free {
    node: String,
    driver: String,
    pool: String,
    name: String,
}

fn free_devices(inner: &Inner) -> Vec<Free> {
    let slices: Vec<&Arc<Value>> = inner.store.list("resourceslices", None).collect();
    let pool_of = |s: &Value| {
        (
            s.pointer("/spec/driver").cloned().unwrap_or_default(),
            s.pointer("/spec/pool/name").cloned().unwrap_or_default(),
        )
    };
    let number = |s: &Value, name: &str| s.pointer(&format!("/spec/pool/{name}")).and_then(Value::as_i64).unwrap_or(0);
    let mut used = BTreeSet::new();
    for claim in inner.store.list(CLAIMS, None) {
        let results = claim.pointer("/status/allocation/devices/results").and_then(Value::as_array);
        for result in results.into_iter().flatten().filter(|r| r.get("adminAccess") != Some(&json!(true))) {
            used.insert(["driver", "pool", "device"].map(|n| text(result, n).unwrap_or_default().to_owned()));
        }
    }
    let mut free = Vec::new();
    for slice in &slices {
        let peers: Vec<&&Arc<Value>> = slices.iter().filter(|s| pool_of(s) == pool_of(slice)).collect();
        let newest = peers.iter().map(|s| number(s, "generation")).max().unwrap_or(0);
        let current = peers.iter().filter(|s| number(s, "generation") == newest).count();
        let complete = i64::try_from(current).is_ok_and(|c| c == number(slice, "resourceSliceCount"));
        if number(slice, "generation") != newest || !complete {
            continue;
        }
        let at = |path: &str| slice.pointer(path).and_then(Value::as_str).unwrap_or_default().to_owned();
        for device in list(&slice["spec"], "devices") {
            let whole = device.pointer("/attributes/type/string").and_then(Value::as_str) == Some("npu");
            let tainted =
                list(device, "taints").iter().any(|t| matches!(text(t, "effect"), Some("NoSchedule" | "NoExecute")));
            let one = Free {
                node: at("/spec/nodeName"),
                driver: at("/spec/driver"),
                pool: at("/spec/pool/name"),
                name: text(device, "name").unwrap_or_default().to_owned(),
            };
            let key = [one.driver.clone(), one.pool.clone(), one.name.clone()];
            if whole && !tainted && !used.contains(&key) {
                free.push(one);
            }
        }
    }
    free
}

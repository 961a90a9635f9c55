//! Create, update, patch, delete: what happens to an object between the wire and the store.
//!
//! The order is the API server's: decode and default, mutate by policy, drop gated fields, validate, store. A dry run stops before the last step.

use std::{sync::Arc, time::Instant};

use serde_json::{Map, Value, json};

use super::{
    Inner,
    auth::{Who, admit_slice as admit},
    patch, policy,
    routes::{Query, Target},
    schema,
    selector::Selector,
    status::Failure,
    store::{Resource, meta},
    validate, validate_claim,
};

const LARGEST: usize = 1_500_000;

/// A request to change something, past authorization.
#[derive(Debug)]
pub(crate) struct Write<'a> {
    pub(crate) target: &'a Target,
    pub(crate) who: Option<&'a Who>,
    pub(crate) query: &'a Query,
    pub(crate) content_type: &'a str,
    pub(crate) body: &'a [u8],
}

impl Write<'_> {
    fn json(&self) -> Result<Value, Failure> {
        let value: Value = serde_json::from_slice(self.body)
            .map_err(|e| Failure::bad_request(format!("the object provided is unrecognized: {e}")))?;
        let part = |name: &str| value.get(name).is_none_or(|p| p.is_object() || p.is_null());
        if value.is_object() && part("metadata") && part("spec") && part("status") {
            Ok(value)
        } else {
            Err(Failure::bad_request("json: cannot unmarshal the body into an object"))
        }
    }

    fn dry(&self) -> Result<bool, Failure> {
        let text = match self.query.get("dryRun") {
            "" => {
                let options: Value = serde_json::from_slice(self.body).unwrap_or_default();
                let first = options.get("dryRun").and_then(|d| d.get(0)).and_then(Value::as_str).unwrap_or_default();
                if self.target.verb.starts_with("delete") { first.to_owned() } else { String::new() }
            }
            text => text.to_owned(),
        };
        match text.as_str() {
            "" => Ok(false),
            "All" => Ok(true),
            other => Err(Failure::new(
                422,
                format!("invalid dryRun: Unsupported value: \"{other}\": supported values: \"All\""),
            )),
        }
    }
}

impl Inner {
    /// Does a write; returns the status and the body of the answer.
    pub(crate) fn write(&mut self, write: &Write<'_>) -> Result<(u16, Value), Failure> {
        match write.target.verb.as_str() {
            "create" => {
                let dry = write.dry()?;
                let object = write.json()?;
                Ok((201, self.create(write, object, dry)?))
            }
            "update" => {
                let dry = write.dry()?;
                let object = write.json()?;
                Ok((200, self.replace(write, object, dry)?))
            }
            "patch" => self.patch(write),
            "delete" => self.delete(write).map(|body| (200, body)),
            _ => self.delete_collection(write).map(|body| (200, body)),
        }
    }

    fn create(&mut self, write: &Write<'_>, mut object: Value, dry: bool) -> Result<Value, Failure> {
        let resource = write.target.resource;
        same_type(resource, &object)?;
        let metadata = object.as_object_mut().map(|o| o.entry("metadata").or_insert_with(|| json!({})));
        if let Some(Value::Object(metadata)) = metadata {
            place(metadata, write.target)?;
            if metadata.get("resourceVersion").and_then(Value::as_str).is_some_and(|v| !v.is_empty()) {
                return Err(Failure::bad_request("resourceVersion should not be set on objects to be created"));
            }
        } else {
            return Err(Failure::bad_request("metadata must be an object"));
        }
        if resource.plural == "resourceclaims"
            && let Some(map) = object.as_object_mut()
        {
            map.remove("status");
        }
        let mut object = self.prepare(resource, object, None)?;
        if resource.plural == "resourceslices" {
            admit(write.who, &object)?;
        }
        let name = meta(&object, "name").to_owned();
        if self.store.get(resource.plural, meta(&object, "namespace"), &name).is_some() {
            return Err(Failure::exists(resource.plural, resource.group, &name));
        }
        let uid = self.store.uid();
        object["metadata"]["uid"] = json!(uid);
        object["metadata"]["creationTimestamp"] = json!(schema::seconds(jiff::Timestamp::now()));
        if resource.group == "resource.k8s.io" {
            object["metadata"]["generation"] = json!(1);
        }
        own(&mut object, write, None);
        if dry {
            return Ok(object);
        }
        if resource.plural == "resourceslices" {
            self.auth.created.insert(uid, Instant::now());
        }
        Ok((*self.store.put(resource.plural, object)).clone())
    }

    fn replace(&mut self, write: &Write<'_>, mut object: Value, dry: bool) -> Result<Value, Failure> {
        let target = write.target;
        let resource = target.resource;
        same_type(resource, &object)?;
        let Some(old) = self.store.get(resource.plural, &target.namespace, &target.name).map(Arc::clone) else {
            return Err(Failure::not_found(resource.plural, resource.group, &target.name));
        };
        let name = meta(&object, "name");
        if name != target.name {
            let why = format!("the name of the object ({name}) does not match the name on the URL ({})", target.name);
            return Err(Failure::bad_request(why));
        }
        preconditions(resource, &old, meta(&object, "uid"), meta(&object, "resourceVersion"))?;
        // A subresource changes only its part, and the main resource all but that.
        if resource.plural == "resourceclaims" {
            let kept: &[&str] = if target.subresource == "status" { &["spec", "metadata"] } else { &["status"] };
            for part in kept {
                object[*part] = old.get(*part).cloned().unwrap_or_default();
            }
        }
        for name in ["uid", "creationTimestamp", "namespace", "generation", "deletionTimestamp"] {
            let kept = old["metadata"].get(name).cloned();
            if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
                match kept {
                    Some(kept) => drop(metadata.insert(name.to_owned(), kept)),
                    None => drop(metadata.remove(name)),
                }
            }
        }
        object["metadata"]["resourceVersion"] = old["metadata"]["resourceVersion"].clone();
        let mut object = self.prepare(resource, object, Some(&old))?;
        if resource.plural == "resourceslices" {
            admit(write.who, &object)?;
            admit(write.who, &old)?;
        }
        if resource.group == "resource.k8s.io" && object.get("spec") != old.get("spec") {
            let generation = old["metadata"]["generation"].as_i64().unwrap_or(0) + 1;
            object["metadata"]["generation"] = json!(generation);
        }
        own(&mut object, write, Some(&old));
        if dry || object == *old {
            return Ok(object);
        }
        let deleting = !meta(&object, "deletionTimestamp").is_empty() && !has_finalizers(&object);
        let stored = self.store.put(resource.plural, object);
        if deleting {
            self.store.remove(resource.plural, &target.namespace, &target.name);
        }
        Ok((*stored).clone())
    }

    fn patch(&mut self, write: &Write<'_>) -> Result<(u16, Value), Failure> {
        let target = write.target;
        let resource = target.resource;
        let dry = write.dry()?;
        let patch = write.json()?;
        let old = self.store.get(resource.plural, &target.namespace, &target.name).map(Arc::clone);
        match write.content_type.split(';').next().unwrap_or_default().trim() {
            "application/apply-patch+yaml" => {
                let manager = write.query.get("fieldManager");
                if manager.is_empty() {
                    return Err(Failure::bad_request(
                        "PatchOptions.meta.k8s.io \"\" is invalid: fieldManager: Required value: is required for apply patch",
                    ));
                }
                if patch.get("apiVersion").is_none() || patch.get("kind").is_none() {
                    return Err(Failure::bad_request("apiVersion and kind must be set in an apply patch"));
                }
                if patch["metadata"].get("managedFields").is_some_and(|m| !m.is_null()) {
                    return Err(Failure::bad_request("metadata.managedFields must be nil"));
                }
                let Some(old) = old else {
                    if !target.subresource.is_empty() {
                        return Err(Failure::not_found(resource.plural, resource.group, &target.name));
                    }
                    let mut object = patch;
                    object["metadata"]["name"] = json!(target.name);
                    if !meta(&object, "uid").is_empty() {
                        return Err(Failure::conflict(
                            resource.plural,
                            resource.group,
                            &target.name,
                            "uid mismatch: the object does not exist",
                        ));
                    }
                    return Ok((201, self.create(write, object, dry)?));
                };
                preconditions(resource, &old, meta(&patch, "uid"), meta(&patch, "resourceVersion"))?;
                let merged = patch::apply(&old, &patch, manager, write.query.is_true("force"), &target.subresource)
                    .map_err(|causes| patch::conflict(resource, &target.name, &causes))?;
                Ok((200, self.replace(write, merged, dry)?))
            }
            "application/merge-patch+json" | "application/strategic-merge-patch+json" => {
                let Some(old) = old else {
                    return Err(Failure::not_found(resource.plural, resource.group, &target.name));
                };
                preconditions(resource, &old, meta(&patch, "uid"), meta(&patch, "resourceVersion"))?;
                let mut merged = (*old).clone();
                patch::merge(&mut merged, patch);
                Ok((200, self.replace(write, merged, dry)?))
            }
            other => Err(Failure::new(415, format!("the body of the request was in an unknown format - {other}"))),
        }
    }

    fn delete(&mut self, write: &Write<'_>) -> Result<Value, Failure> {
        let target = write.target;
        let resource = target.resource;
        let options: Value = match write.body {
            [] => Value::Null,
            body => serde_json::from_slice(body).map_err(|e| Failure::bad_request(format!("DeleteOptions: {e}")))?,
        };
        let Some(old) = self.store.get(resource.plural, &target.namespace, &target.name).map(Arc::clone) else {
            return Err(Failure::not_found(resource.plural, resource.group, &target.name));
        };
        let wanted = |name: &str| options["preconditions"].get(name).and_then(Value::as_str).unwrap_or_default();
        preconditions(resource, &old, wanted("uid"), wanted("resourceVersion"))?;
        if resource.plural == "resourceslices" {
            admit(write.who, &old)?;
        }
        if !write.dry()? {
            self.remove(resource, &old);
        }
        Ok((*old).clone())
    }

    /// Removes an object, or marks it when it has finalizers.
    pub(crate) fn remove(&mut self, resource: &'static Resource, old: &Value) {
        if has_finalizers(old) {
            if meta(old, "deletionTimestamp").is_empty() {
                let mut marked = old.clone();
                marked["metadata"]["deletionTimestamp"] = json!(schema::seconds(jiff::Timestamp::now()));
                self.store.put(resource.plural, marked);
            }
            return;
        }
        self.store.remove(resource.plural, meta(old, "namespace"), meta(old, "name"));
    }

    fn delete_collection(&mut self, write: &Write<'_>) -> Result<Value, Failure> {
        let target = write.target;
        let resource = target.resource;
        let (fields, labels) = (write.query.get("fieldSelector"), write.query.get("labelSelector"));
        let selector = Selector::parse(resource, &self.rules, fields, labels)?;
        let namespace = (!target.namespace.is_empty()).then_some(target.namespace.as_str());
        let doomed: Vec<Arc<Value>> =
            self.store.list(resource.plural, namespace).filter(|o| selector.matches(o)).map(Arc::clone).collect();
        if resource.plural == "resourceslices" {
            for slice in &doomed {
                admit(write.who, slice)?;
            }
        }
        if !write.dry()? {
            for object in &doomed {
                self.remove(resource, object);
            }
        }
        let items: Vec<Value> = doomed.iter().map(|o| (**o).clone()).collect();
        Ok(list_body(resource, self.store.version(), &items))
    }

    /// Decodes, drops gated fields and validates.
    fn prepare(&self, resource: &'static Resource, object: Value, old: Option<&Value>) -> Result<Value, Failure> {
        let mut object = object;
        let stated = object["metadata"].as_object_mut().map(|m| {
            m.retain(|_, v| !v.is_null());
            m.get("name").and_then(Value::as_str).unwrap_or_default().to_owned()
        });
        let name = stated.unwrap_or_default();
        default(resource, &mut object);
        let decoded = schema::decode(object, &resource.shape, self.rules.release, "").map_err(|e| {
            Failure::bad_request(format!(
                "{} in version \"v1\" cannot be handled as a {}: {e}",
                resource.kind, resource.kind
            ))
        })?;
        let mut object = decoded.unwrap_or_else(|| json!({}));
        object["apiVersion"] = json!(resource.api_version());
        object["kind"] = json!(resource.kind);
        if self.memory_policy && matches!(resource.plural, "resourceclaims" | "resourceclaimtemplates") {
            policy::bare_memory_to_mebi(&mut object, old);
        }
        let causes = match resource.plural {
            "resourceslices" => {
                self.rules.drop_from_slice(&mut object, old);
                validate::slice(&object, old, &self.rules)
            }
            "resourceclaims" => {
                self.rules.drop_from_claim(&mut object, old);
                let mut causes = validate_claim::claim(&object, old);
                causes.extend(validate_claim::status(&object));
                causes
            }
            "resourceclaimtemplates" => {
                self.rules.drop_from_claim(&mut object, old);
                validate_claim::template(&object, old)
            }
            "deviceclasses" => validate_claim::class(&object),
            _ => Vec::new(),
        };
        let mut all = Vec::new();
        if let Err(why) = super::names::subdomain(&name, 253) {
            let message = format!("Invalid value: \"{name}\": {why}");
            all.push(super::status::Cause { reason: "FieldValueInvalid", field: "metadata.name".to_owned(), message });
        }
        all.extend(causes);
        if !all.is_empty() {
            return Err(Failure::invalid(resource.kind, resource.group, &name, &all));
        }
        if object.to_string().len() > LARGEST {
            return Err(Failure::new(413, "etcdserver: request is too large"));
        }
        Ok(object)
    }
}

/// Fills in what the server fills in.
fn default(resource: &Resource, object: &mut Value) {
    let array = |v: Option<&mut Value>| v.and_then(Value::as_array_mut).map(std::mem::take).unwrap_or_default();
    match resource.plural {
        "resourceslices" => {
            let now = schema::seconds(jiff::Timestamp::now());
            let devices = object.pointer_mut("/spec/devices").and_then(Value::as_array_mut);
            for device in devices.into_iter().flatten() {
                for taint in device.get_mut("taints").and_then(Value::as_array_mut).into_iter().flatten() {
                    if taint.is_object() && taint.get("timeAdded").is_none_or(Value::is_null) {
                        taint["timeAdded"] = json!(now);
                    }
                }
            }
        }
        "resourceclaims" | "resourceclaimtemplates" => {
            let path = if resource.plural == "resourceclaims" {
                "/spec/devices/requests"
            } else {
                "/spec/spec/devices/requests"
            };
            let mut requests = array(object.pointer_mut(path));
            for request in &mut requests {
                if let Some(exact) = request.get_mut("exactly") {
                    default_request(exact);
                }
                for sub in request.get_mut("firstAvailable").and_then(Value::as_array_mut).into_iter().flatten() {
                    default_request(sub);
                }
            }
            if let Some(place) = object.pointer_mut(path).filter(|p| p.is_array()) {
                *place = Value::Array(requests);
            }
        }
        _ => {}
    }
}

fn default_request(request: &mut Value) {
    let Some(request) = request.as_object_mut() else { return };
    if request.get("allocationMode").and_then(Value::as_str).unwrap_or_default().is_empty() {
        request.insert("allocationMode".to_owned(), json!("ExactCount"));
    }
    if request["allocationMode"] == "ExactCount" && request.get("count").and_then(Value::as_i64).unwrap_or(0) == 0 {
        request.insert("count".to_owned(), json!(1));
    }
}

fn same_type(resource: &Resource, object: &Value) -> Result<(), Failure> {
    let version = object.get("apiVersion").and_then(Value::as_str).unwrap_or_default();
    let kind = object.get("kind").and_then(Value::as_str).unwrap_or_default();
    let wrong =
        (!version.is_empty() && version != resource.api_version()) || (!kind.is_empty() && kind != resource.kind);
    if wrong {
        let want = resource.api_version();
        return Err(Failure::bad_request(format!(
            "the API version in the data ({version}, Kind={kind}) does not match the expected API version ({want}, Kind={})",
            resource.kind
        )));
    }
    Ok(())
}

/// Sets namespace and name of an object that is to be created.
fn place(metadata: &mut Map<String, Value>, target: &Target) -> Result<(), Failure> {
    let given = metadata.get("namespace").and_then(Value::as_str).unwrap_or_default();
    if target.resource.namespaced {
        if !given.is_empty() && given != target.namespace {
            return Err(Failure::bad_request(
                "the namespace of the provided object does not match the namespace sent on the request",
            ));
        }
        metadata.insert("namespace".to_owned(), json!(target.namespace));
    } else {
        metadata.remove("namespace");
    }
    metadata.remove("uid");
    let name = metadata.get("name").and_then(Value::as_str).unwrap_or_default();
    let base = metadata.get("generateName").and_then(Value::as_str).unwrap_or_default();
    if name.is_empty() && !base.is_empty() {
        use std::hash::{BuildHasher as _, RandomState};
        let alphabet = b"bcdfghjklmnpqrstvwxz2456789";
        let mut seed = RandomState::new().hash_one(base);
        let mut full: String = base.chars().take(58).collect();
        for _ in 0..5 {
            let index = usize::try_from(seed % 27).unwrap_or(0);
            full.push(char::from(alphabet[index]));
            seed /= 27;
        }
        metadata.insert("name".to_owned(), json!(full));
    }
    Ok(())
}

fn preconditions(resource: &Resource, old: &Value, uid: &str, version: &str) -> Result<(), Failure> {
    let name = meta(old, "name");
    let conflict = |why: String| Err(Failure::conflict(resource.plural, resource.group, name, &why));
    if !uid.is_empty() && uid != meta(old, "uid") {
        return conflict(format!(
            "Precondition failed: UID in precondition: {uid}, UID in object meta: {}",
            meta(old, "uid")
        ));
    }
    if !version.is_empty() && version != meta(old, "resourceVersion") {
        return conflict(
            "the object has been modified; please apply your changes to the latest version and try again".to_owned(),
        );
    }
    Ok(())
}

fn has_finalizers(object: &Value) -> bool {
    object["metadata"].get("finalizers").and_then(Value::as_array).is_some_and(|f| !f.is_empty())
}

/// Notes in `managedFields` which manager wrote last; one entry is enough here.
fn own(object: &mut Value, write: &Write<'_>, old: Option<&Value>) {
    let apply = write.content_type.starts_with("application/apply-patch");
    let manager = match write.query.get("fieldManager") {
        "" => "unknown",
        manager => manager,
    };
    let unchanged = old.is_some_and(|old| {
        old.get("spec") == object.get("spec") && old.get("status") == object.get("status") && !apply
    });
    let entry = match old.and_then(|o| o["metadata"].get("managedFields")) {
        Some(kept) if unchanged => kept.clone(),
        _ => json!([{"manager": manager, "operation": if apply { "Apply" } else { "Update" }}]),
    };
    object["metadata"]["managedFields"] = entry;
}

/// The body of a list answer.
pub(crate) fn list_body(resource: &Resource, version: u64, items: &[Value]) -> Value {
    json!({
        "kind": format!("{}List", resource.kind), "apiVersion": resource.api_version(),
        "metadata": {"resourceVersion": version.to_string()}, "items": items,
    })
}

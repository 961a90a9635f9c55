//! Create, update, patch, delete: what happens to an object between the wire and the store.
//!
//! The order is the API server's: decode and default, mutate by policy, drop gated fields, validate, store. A dry run stops before the last step.

use std::{sync::Arc, time::Instant};

use serde_json::{Map, Value, json};

use super::{
    Inner,
    auth::{Who, admit_claim_status, admit_slice as admit, restrict_node},
    events, metadata, patch, policy,
    routes::{Query, Target},
    schema,
    selector::Selector,
    status::{Cause, Failure},
    store::{Resource, meta},
    validate::{self, Causes},
    validate_claim,
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
    /// The type of the body.
    fn kind(&self) -> &str {
        self.content_type.split(';').next().unwrap_or_default().trim()
    }

    fn json(&self) -> Result<Value, Failure> {
        let yaml = match self.kind() {
            "" | "application/json" => false,
            "application/yaml" | "application/apply-patch+yaml" => true,
            other => {
                let message = format!("the body of the request was in an unknown format - {other}");
                return Err(Failure::new(415, message));
            }
        };
        let unrecognized =
            |e: &dyn std::fmt::Display| Failure::bad_request(format!("the object provided is unrecognized: {e}"));
        let value: Value = match serde_json::from_slice(self.body) {
            Ok(value) => value,
            Err(error) if !yaml => return Err(unrecognized(&error)),
            Err(_) => serde_saphyr::from_slice(self.body).map_err(|e| unrecognized(&e))?,
        };
        if is_object(&value) {
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
            other => {
                let message = format!("Unsupported value: \"{other}\": supported values: \"All\"");
                let cause = Cause { reason: "FieldValueNotSupported", field: "dryRun".to_owned(), message };
                Err(Failure::invalid("CreateOptions", "meta.k8s.io", "", &[cause]))
            }
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
            metadata.remove("resourceVersion");
        } else {
            return Err(Failure::bad_request("metadata must be an object"));
        }
        if resource.plural == "resourceclaims"
            && let Some(map) = object.as_object_mut()
        {
            map.remove("status");
        }
        if resource.plural == "resourceslices" {
            restrict_node(write.who, &object)?;
        }
        let mut object = self.prepare(write, object, None)?;
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
        if counts_generations(resource) {
            object["metadata"]["generation"] = json!(1);
        }
        own(&mut object, write, None);
        if dry {
            return Ok(object);
        }
        if resource.plural == "resourceslices" {
            self.auth.created.insert(uid, Instant::now());
        }
        Ok(self.keep(resource, object))
    }

    /// Stores an object; events are kept in one form, whichever they came in.
    fn keep(&mut self, resource: &'static Resource, object: Value) -> Value {
        if resource.group != "events.k8s.io" {
            return (*self.store.put(resource.plural, object)).clone();
        }
        events::converted(&self.store.put(resource.plural, events::converted(&object, true)), false)
    }

    /// The stored object that is asked for, in the form of its group.
    pub(crate) fn found(&self, target: &Target) -> Option<Arc<Value>> {
        let resource = target.resource;
        let found = self.store.get(resource.plural, &target.namespace, &target.name)?;
        let convert = resource.group == "events.k8s.io";
        Some(if convert { Arc::new(events::converted(found, false)) } else { Arc::clone(found) })
    }

    fn replace(&mut self, write: &Write<'_>, mut object: Value, dry: bool) -> Result<Value, Failure> {
        let target = write.target;
        let resource = target.resource;
        same_type(resource, &object)?;
        let name = meta(&object, "name");
        if name != target.name {
            let why = format!("the name of the object ({name}) does not match the name on the URL ({})", target.name);
            return Err(Failure::bad_request(why));
        }
        let Some(old) = self.found(target) else {
            return Err(Failure::not_found(resource.plural, resource.group, &target.name));
        };
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
        let mut object = self.prepare(write, object, Some(&old))?;
        if resource.plural == "resourceslices" {
            admit(write.who, &object)?;
        }
        if resource.plural == "resourceclaims" && target.subresource == "status" {
            admit_claim_status(write.who, &object, &old, &self.rules)?;
        }
        if counts_generations(resource) && object.get("spec") != old.get("spec") {
            let generation = old["metadata"]["generation"].as_i64().unwrap_or(0) + 1;
            object["metadata"]["generation"] = json!(generation);
        }
        own(&mut object, write, Some(&old));
        if dry || object == *old {
            return Ok(object);
        }
        if !meta(&object, "deletionTimestamp").is_empty() && !has_finalizers(&object) {
            self.store.remove(resource.plural, &target.namespace, &target.name);
            return Ok(object);
        }
        Ok(self.keep(resource, object))
    }

    fn patch(&mut self, write: &Write<'_>) -> Result<(u16, Value), Failure> {
        let target = write.target;
        let resource = target.resource;
        let dry = write.dry()?;
        let old = self.found(target);
        let not_found = || Failure::not_found(resource.plural, resource.group, &target.name);
        match write.kind() {
            "application/apply-patch+yaml" => self.apply(write, old, dry),
            "application/merge-patch+json" | "application/strategic-merge-patch+json" => {
                let old = old.ok_or_else(not_found)?;
                let patch: Value = serde_json::from_slice(write.body)
                    .map_err(|e| Failure::bad_request(format!("the patch is not understood: {e}")))?;
                let mut merged = (*old).clone();
                patch::merge(&mut merged, patch);
                self.patched(write, &old, merged, dry)
            }
            "application/json-patch+json" => {
                let old = old.ok_or_else(not_found)?;
                let merged = patch::json_patch(&old, write.body)?;
                self.patched(write, &old, merged, dry)
            }
            other => Err(Failure::new(415, format!("the body of the request was in an unknown format - {other}"))),
        }
    }

    /// Stores what a patch made of an object.
    fn patched(&mut self, write: &Write<'_>, old: &Value, merged: Value, dry: bool) -> Result<(u16, Value), Failure> {
        let resource = write.target.resource;
        let one = |field: &str, message: String| {
            let cause = Cause { reason: "FieldValueInvalid", field: field.to_owned(), message };
            Failure::invalid(resource.kind, resource.group, &write.target.name, &[cause])
        };
        if !is_object(&merged) {
            return Err(one("patch", "Invalid value: the patch makes no object".to_owned()));
        }
        if meta(&merged, "uid") != meta(old, "uid") {
            let message = format!("Invalid value: \"{}\": field is immutable", meta(&merged, "uid"));
            return Err(one("metadata.uid", message));
        }
        preconditions(resource, old, "", meta(&merged, "resourceVersion"))?;
        Ok((200, self.replace(write, merged, dry)?))
    }

    fn apply(&mut self, write: &Write<'_>, old: Option<Arc<Value>>, dry: bool) -> Result<(u16, Value), Failure> {
        let target = write.target;
        let resource = target.resource;
        let applied = write.json()?;
        let manager = write.query.get("fieldManager");
        if manager.is_empty() {
            let message = "Required value: is required for apply patch".to_owned();
            let cause = Cause { reason: "FieldValueRequired", field: "fieldManager".to_owned(), message };
            return Err(Failure::invalid("PatchOptions", "meta.k8s.io", "", &[cause]));
        }
        if applied.get("apiVersion").is_none() || applied.get("kind").is_none() {
            return Err(Failure::bad_request("apiVersion and kind must be set in an apply patch"));
        }
        if applied["metadata"].get("managedFields").is_some_and(|m| !m.is_null()) {
            return Err(Failure::bad_request("metadata.managedFields must be nil"));
        }
        if let Some(field) = schema::unknown(&applied, &resource.shape, self.rules.release, "") {
            let message = format!("failed to create typed patch object: {field}: field not declared in schema");
            let mut failure = Failure::new(500, message);
            failure.reason = "";
            return Err(failure);
        }
        let name = meta(&applied, "name");
        if !name.is_empty() && name != target.name {
            let why = format!("the name of the object ({name}) does not match the name on the URL ({})", target.name);
            return Err(Failure::bad_request(why));
        }
        let Some(old) = old else {
            if !target.subresource.is_empty() {
                return Err(Failure::not_found(resource.plural, resource.group, &target.name));
            }
            let mut object = applied;
            object["metadata"]["name"] = json!(target.name);
            if !meta(&object, "uid").is_empty() {
                let why = "uid mismatch: the object does not exist";
                return Err(Failure::conflict(resource.plural, resource.group, &target.name, why));
            }
            return Ok((201, self.create(write, object, dry)?));
        };
        preconditions(resource, &old, meta(&applied, "uid"), meta(&applied, "resourceVersion"))?;
        let merged = patch::apply(&old, &applied, manager, write.query.is_true("force"), &target.subresource)
            .map_err(|causes| patch::conflict(resource, &target.name, &causes))?;
        Ok((200, self.replace(write, merged, dry)?))
    }

    fn delete(&mut self, write: &Write<'_>) -> Result<Value, Failure> {
        let target = write.target;
        let resource = target.resource;
        let options: Value = match write.body {
            [] => Value::Null,
            body => serde_json::from_slice(body).map_err(|e| Failure::bad_request(format!("DeleteOptions: {e}")))?,
        };
        let Some(old) = self.found(target) else {
            return Err(Failure::not_found(resource.plural, resource.group, &target.name));
        };
        let wanted = |name: &str| options["preconditions"].get(name).and_then(Value::as_str).unwrap_or_default();
        preconditions(resource, &old, wanted("uid"), wanted("resourceVersion"))?;
        if resource.plural == "resourceslices" {
            admit(write.who, &old)?;
        }
        if write.dry()? {
            return Ok((*old).clone());
        }
        self.remove(resource, &old);
        let marked = self.store.get(resource.plural, &target.namespace, &target.name);
        Ok(marked.map_or_else(|| (*old).clone(), |marked| (**marked).clone()))
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
    fn prepare(&self, write: &Write<'_>, object: Value, old: Option<&Value>) -> Result<Value, Failure> {
        let resource = write.target.resource;
        let release = self.rules.release;
        let mut object = object;
        let strict = write.query.get("fieldValidation") == "Strict";
        if let Some(field) = schema::unknown(&object, &resource.shape, release, "").filter(|_| strict) {
            return Err(Failure::bad_request(format!("strict decoding error: unknown field \"{field}\"")));
        }
        if object["metadata"].is_null() {
            object["metadata"] = json!({});
        }
        default(resource, &mut object);
        let decoded = schema::decode(object, &resource.shape, release, "").map_err(|e| {
            Failure::bad_request(format!(
                "{} in version \"v1\" cannot be handled as a {}: {e}",
                resource.kind, resource.kind
            ))
        })?;
        let mut object = decoded.unwrap_or_else(|| json!({}));
        if resource.plural == "events" {
            events::times(&object).map_err(Failure::bad_request)?;
        }
        object["apiVersion"] = json!(resource.api_version());
        object["kind"] = json!(resource.kind);
        if self.memory_policy && matches!(resource.plural, "resourceclaims" | "resourceclaimtemplates") {
            policy::bare_memory_to_mebi(&mut object, old);
        }
        let status = write.target.subresource == "status";
        let mut causes = match resource.plural {
            "resourceslices" => {
                self.rules.drop_from_slice(&mut object, old);
                validate::slice(&object, old, &self.rules)
            }
            "resourceclaims" => {
                self.rules.drop_from_claim(&mut object, old);
                if status {
                    validate_claim::drop_deallocated(&mut object, old);
                    validate_claim::status(&object, old, &self.rules)
                } else {
                    let mut causes = validate_claim::claim(&object, old, &self.rules);
                    self.admin_access(write, &object, "spec", &mut causes);
                    causes
                }
            }
            "resourceclaimtemplates" => {
                self.rules.drop_from_claim(&mut object, old);
                let mut causes = validate_claim::template(&object, old, &self.rules);
                self.admin_access(write, &object, "spec.spec", &mut causes);
                causes
            }
            "deviceclasses" => {
                self.rules.drop_from_class(&mut object, old);
                validate_claim::class(&object, &self.rules)
            }
            "events" => events::check(resource, &object),
            _ => Causes::default(),
        };
        if causes.divided_by_zero {
            return Err(Failure::hang_up());
        }
        metadata::check(&mut causes, resource, &object, &self.rules);
        if !causes.all.is_empty() {
            return Err(Failure::invalid(resource.kind, resource.group, meta(&object, "name"), &causes.all));
        }
        if object.to_string().len() > LARGEST && write.query.get("dryRun").is_empty() {
            return Err(Failure::new(413, "etcdserver: request is too large"));
        }
        Ok(object)
    }

    /// An administrator's access needs a namespace with a label; namespaces that nobody made have it.
    fn admin_access(&self, write: &Write<'_>, claim: &Value, path: &str, causes: &mut Causes) {
        let Some(namespace) = self.store.get("namespaces", "", &write.target.namespace) else { return };
        let labelled =
            namespace.pointer("/metadata/labels/resource.kubernetes.io~1admin-access") == Some(&json!("true"));
        let requests = claim.pointer(&format!("/{}/devices/requests", path.replace('.', "/")));
        for (index, request) in requests.and_then(Value::as_array).into_iter().flatten().enumerate() {
            if !labelled && request.pointer("/exactly/adminAccess") == Some(&json!(true)) {
                let field = format!("{path}.devices.requests[{index}].adminAccess");
                let why = "admin access to devices requires the `resource.kubernetes.io/admin-access: true` label on the containing namespace";
                causes.forbidden(&field, why);
            }
        }
    }
}

/// Whether a value has the outline of an object.
fn is_object(value: &Value) -> bool {
    let part = |name: &str| value.get(name).is_none_or(|p| p.is_object() || p.is_null());
    value.is_object() && ["metadata", "spec", "status"].into_iter().all(part)
}

/// Claims and their templates, whose specs never change, count none.
fn counts_generations(resource: &Resource) -> bool {
    matches!(resource.plural, "resourceslices" | "deviceclasses")
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
        "events" => events::default(resource, object),
        _ => {}
    }
}

fn default_request(request: &mut Value) {
    for toleration in request.get_mut("tolerations").and_then(Value::as_array_mut).into_iter().flatten() {
        if toleration.is_object() && toleration.get("operator").and_then(Value::as_str).unwrap_or_default().is_empty() {
            toleration["operator"] = json!("Equal");
        }
    }
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

/// Notes in `managedFields` which manager wrote the spec last, and what each has applied to the status.
fn own(object: &mut Value, write: &Write<'_>, old: Option<&Value>) {
    let apply = write.content_type.starts_with("application/apply-patch");
    let manager = match write.query.get("fieldManager") {
        "" => "unknown",
        manager => manager,
    };
    let before = old.and_then(|o| o["metadata"]["managedFields"].as_array().cloned()).unwrap_or_default();
    let (of_status, mut entries): (Vec<Value>, Vec<Value>) =
        before.into_iter().partition(|entry| entry["subresource"] == "status");
    if write.target.subresource.is_empty() {
        let same = old.is_some_and(|old| old.get("spec") == object.get("spec") && !apply);
        if entries.is_empty() || !same {
            entries = vec![json!({"manager": manager, "operation": if apply { "Apply" } else { "Update" }})];
        }
        entries.extend(of_status);
    } else {
        entries.extend(of_status.into_iter().filter(|entry| !apply || entry["manager"] != manager));
        if apply && let Ok(applied) = write.json() {
            entries.push(patch::status_entry(&applied, manager));
        }
    }
    object["metadata"]["managedFields"] = Value::Array(entries);
}

/// The body of a list answer.
pub(crate) fn list_body(resource: &Resource, version: u64, items: &[Value]) -> Value {
    json!({
        "kind": format!("{}List", resource.kind), "apiVersion": resource.api_version(),
        "metadata": {"resourceVersion": version.to_string()}, "items": items,
    })
}

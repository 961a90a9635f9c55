//! Generic JSON storage with one resource version for all, and the log of changes that watches read.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

use serde_json::{Value, json};

use super::schema::{self, Shape};

/// A served resource.
#[derive(Debug)]
pub(crate) struct Resource {
    pub(crate) group: &'static str,
    pub(crate) plural: &'static str,
    pub(crate) kind: &'static str,
    pub(crate) namespaced: bool,
    pub(crate) has_status: bool,
    pub(crate) shape: Shape,
}

impl Resource {
    pub(crate) fn api_version(&self) -> String {
        if self.group.is_empty() { "v1".to_owned() } else { format!("{}/v1", self.group) }
    }
}

/// Everything that is served; all in version `v1`.
pub(crate) static RESOURCES: [Resource; 9] = [
    Resource {
        group: "resource.k8s.io",
        plural: "resourceslices",
        kind: "ResourceSlice",
        namespaced: false,
        has_status: false,
        shape: schema::SLICE,
    },
    Resource {
        group: "resource.k8s.io",
        plural: "resourceclaims",
        kind: "ResourceClaim",
        namespaced: true,
        has_status: true,
        shape: schema::CLAIM,
    },
    Resource {
        group: "resource.k8s.io",
        plural: "resourceclaimtemplates",
        kind: "ResourceClaimTemplate",
        namespaced: true,
        has_status: false,
        shape: schema::TEMPLATE,
    },
    Resource {
        group: "resource.k8s.io",
        plural: "deviceclasses",
        kind: "DeviceClass",
        namespaced: false,
        has_status: false,
        shape: schema::CLASS,
    },
    Resource { group: "", plural: "nodes", kind: "Node", namespaced: false, has_status: true, shape: schema::FREE },
    Resource { group: "", plural: "pods", kind: "Pod", namespaced: true, has_status: true, shape: schema::FREE },
    Resource { group: "", plural: "events", kind: "Event", namespaced: true, has_status: false, shape: schema::FREE },
    Resource {
        group: "",
        plural: "namespaces",
        kind: "Namespace",
        namespaced: false,
        has_status: false,
        shape: schema::FREE,
    },
    Resource {
        group: "events.k8s.io",
        plural: "events",
        kind: "Event",
        namespaced: true,
        has_status: false,
        shape: schema::FREE,
    },
];

/// The served resource of that group and plural name.
pub(crate) fn resource(group: &str, plural: &str) -> Option<&'static Resource> {
    RESOURCES.iter().find(|r| r.group == group && r.plural == plural)
}

/// One change, for watches.
#[derive(Debug, Clone)]
pub(crate) struct Change {
    pub(crate) version: u64,
    pub(crate) plural: &'static str,
    pub(crate) old: Option<Arc<Value>>,
    pub(crate) new: Option<Arc<Value>>,
}

const KEPT_CHANGES: usize = 20_000;

/// The stored objects.
#[derive(Debug, Default)]
pub(crate) struct Store {
    version: u64,
    oldest: u64,
    /// By resource, namespace and name; a namespace ends with a slash, as it does in etcd, which decides the order.
    objects: BTreeMap<(&'static str, String, String), Arc<Value>>,
    log: VecDeque<Change>,
    uids: u64,
}

impl Store {
    pub(crate) fn new() -> Self {
        Self { version: 100, oldest: 100, ..Self::default() }
    }

    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    /// The oldest version from which a watch can start.
    pub(crate) fn oldest(&self) -> u64 {
        self.oldest
    }

    /// Makes every version known so far too old.
    pub(crate) fn expire(&mut self) {
        self.version += 1;
        self.oldest = self.version;
        self.log.clear();
    }

    pub(crate) fn get(&self, plural: &'static str, namespace: &str, name: &str) -> Option<&Arc<Value>> {
        self.objects.get(&(plural, format!("{namespace}/"), name.to_owned()))
    }

    /// All objects of a resource, by name; of one namespace if given.
    pub(crate) fn list<'a>(
        &'a self,
        plural: &'static str,
        namespace: Option<&'a str>,
    ) -> impl Iterator<Item = &'a Arc<Value>> {
        let from = (plural, String::new(), String::new());
        self.objects
            .range(from..)
            .take_while(move |((p, _, _), _)| *p == plural)
            .filter(move |((_, ns, _), _)| namespace.is_none_or(|n| ns.strip_suffix('/') == Some(n)))
            .map(|(_, object)| object)
    }

    /// Stores an object under its metadata's name and gives it the next version.
    pub(crate) fn put(&mut self, plural: &'static str, mut object: Value) -> Arc<Value> {
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        let key = (plural, format!("{}/", meta(&object, "namespace")), meta(&object, "name").to_owned());
        let new = Arc::new(object);
        let old = self.objects.insert(key, Arc::clone(&new));
        self.push(plural, old, Some(Arc::clone(&new)));
        new
    }

    /// Removes an object; what is returned carries the version of the removal.
    pub(crate) fn remove(&mut self, plural: &'static str, namespace: &str, name: &str) -> Option<Arc<Value>> {
        let old = self.objects.remove(&(plural, format!("{namespace}/"), name.to_owned()))?;
        self.version += 1;
        let mut last = (*old).clone();
        last["metadata"]["resourceVersion"] = json!(self.version.to_string());
        let last = Arc::new(last);
        self.push(plural, Some(Arc::clone(&last)), None);
        Some(last)
    }

    fn push(&mut self, plural: &'static str, old: Option<Arc<Value>>, new: Option<Arc<Value>>) {
        self.log.push_back(Change { version: self.version, plural, old, new });
        if self.log.len() > KEPT_CHANGES
            && let Some(gone) = self.log.pop_front()
        {
            self.oldest = gone.version;
        }
    }

    /// The changes of a resource after `version`.
    pub(crate) fn since(&self, version: u64, plural: &'static str) -> impl Iterator<Item = &Change> {
        let start = self.log.partition_point(|c| c.version <= version);
        self.log.range(start..).filter(move |c| c.plural == plural)
    }

    /// A new uid, unique within this server and unlike those of another one in this process.
    pub(crate) fn uid(&mut self) -> String {
        self.uids += 1;
        random_uid(self.uids)
    }
}

/// A random UUID; a number can be mixed in.
pub(crate) fn random_uid(number: u64) -> String {
    use std::hash::{BuildHasher as _, RandomState};
    let a = RandomState::new().hash_one(number);
    let b = RandomState::new().hash_one(a);
    format!(
        "{:08x}-{:04x}-4{:03x}-8{:03x}-{:012x}",
        a >> 32,
        (a >> 16) & 0xffff,
        a & 0xfff,
        b >> 52,
        b & 0xffff_ffff_ffff
    )
}

/// A text of `metadata`, empty if absent.
pub(crate) fn meta<'a>(object: &'a Value, name: &str) -> &'a str {
    object.get("metadata").and_then(|m| m.get(name)).and_then(Value::as_str).unwrap_or_default()
}

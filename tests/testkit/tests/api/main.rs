//! The API server stand-in, met with a real client.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a helper of a test fails the test")]

mod allocation;
mod faults;
mod gates;
mod refusals;
mod rights;
mod watches;

use std::time::Duration;

use http::{Method, Request, header};
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::{
    Api, Client, Config,
    api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions},
    config::{KubeConfigOptions, Kubeconfig},
    core::Status,
};
use serde_json::{Value, json};
use testkit::api::{ApiServer, Gate, How, Release, Who};

const SLICES: &str = "/apis/resource.k8s.io/v1/resourceslices";
const DEADLINE: Duration = Duration::from_secs(20);

/// A client with the credentials of a written kubeconfig.
async fn client_of(path: &std::path::Path) -> Client {
    let config = Kubeconfig::read_from(path).unwrap();
    let config = Config::from_custom_kubeconfig(config, &KubeConfigOptions::default()).await.unwrap();
    Client::try_from(config).unwrap()
}

struct World {
    server: ApiServer,
    dir: tempfile::TempDir,
}

impl World {
    async fn new(release: Release) -> Self {
        Self { server: ApiServer::start(release).await.unwrap(), dir: tempfile::tempdir().unwrap() }
    }

    async fn client(&self, who: &Who, how: How) -> Client {
        client_of(&self.server.kubeconfig(self.dir.path(), who, how).unwrap().path).await
    }

    async fn admin(&self) -> Client {
        self.client(&Who::Admin, How::Certificate).await
    }

    async fn node(&self, name: &str) -> Client {
        self.client(&Who::Node(name.to_owned()), How::Certificate).await
    }
}

/// Sends a request as it is; the answer is the body, or the `Status` of an error.
async fn call(client: &Client, method: Method, path: &str, kind: &str, body: &Value) -> Result<Value, Box<Status>> {
    let bytes = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
    let request = Request::builder().method(method).uri(path).header(header::CONTENT_TYPE, kind).body(bytes).unwrap();
    match client.request::<Value>(request).await {
        Ok(value) => Ok(value),
        Err(kube::Error::Api(status)) => Err(status),
        Err(other) => panic!("{path}: {other}"),
    }
}

async fn post(client: &Client, path: &str, body: &Value) -> Result<Value, Box<Status>> {
    call(client, Method::POST, path, "application/json", body).await
}

async fn put(client: &Client, path: &str, body: &Value) -> Result<Value, Box<Status>> {
    call(client, Method::PUT, path, "application/json", body).await
}

async fn get(client: &Client, path: &str) -> Result<Value, Box<Status>> {
    call(client, Method::GET, path, "application/json", &Value::Null).await
}

async fn delete(client: &Client, path: &str) -> Result<Value, Box<Status>> {
    call(client, Method::DELETE, path, "application/json", &Value::Null).await
}

/// A small good slice.
fn slice(name: &str, node: &str) -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice",
        "metadata": {"name": name},
        "spec": {
            "driver": "npu.huawei.com", "nodeName": node,
            "pool": {"name": format!("{node}/npu"), "generation": 1, "resourceSliceCount": 1},
            "devices": [{
                "name": "npu-0",
                "attributes": {"type": {"string": "npu"}, "physicalId": {"int": 0}, "template": {"string": ""}},
                "capacity": {"memCapacity": {"value": "32768Mi"}},
            }],
        },
    })
}

#[tokio::test]
async fn a_slice_comes_back_canonical_and_with_what_the_server_fills_in() {
    let world = World::new(Release::V1_36).await;
    let admin = world.admin().await;
    let mut sent = slice("a", "node1");
    sent["spec"]["devices"][0]["taints"] = json!([{"key": "npu.huawei.com/health", "effect": "NoSchedule"}]);
    sent["spec"]["devices"][0]["madeUp"] = json!(1);
    let back = post(&admin, SLICES, &sent).await.unwrap();
    let device = &back["spec"]["devices"][0];
    assert_eq!(device["capacity"]["memCapacity"]["value"], "32Gi");
    assert!(device["taints"][0]["timeAdded"].as_str().unwrap().ends_with('Z'));
    assert_eq!(device["attributes"]["template"]["string"], "", "an empty string attribute is kept");
    assert!(device.get("madeUp").is_none(), "unknown fields are dropped");
    assert!(!back["metadata"]["uid"].as_str().unwrap().is_empty());
    assert_eq!(back["metadata"]["generation"], 1);
    assert_eq!(get(&admin, &format!("{SLICES}/a")).await.unwrap(), back);
}

#[tokio::test]
async fn the_typed_client_creates_applies_replaces_and_deletes() {
    let world = World::new(Release::V1_36).await;
    let api: Api<ResourceSlice> = Api::all(world.admin().await);
    let typed: ResourceSlice = serde_json::from_value(slice("a", "node1")).unwrap();
    let apply = PatchParams::apply("npu-dra");
    let made = api.patch("a", &apply, &Patch::Apply(&typed)).await.unwrap();
    let again = api.patch("a", &apply, &Patch::Apply(&typed)).await.unwrap();
    assert_eq!(made.metadata.resource_version, again.metadata.resource_version, "nothing changed, nothing written");

    let mut more = made.clone();
    more.spec.pool.generation = 2;
    let replaced = api.replace("a", &PostParams::default(), &more).await.unwrap();
    assert_ne!(replaced.metadata.resource_version, made.metadata.resource_version);
    let stale = api.replace("a", &PostParams::default(), &more).await.unwrap_err();
    assert!(matches!(&stale, kube::Error::Api(s) if s.code == 409 && s.reason == "Conflict"), "{stale}");
    let twice = api.create(&PostParams::default(), &typed).await.unwrap_err();
    assert!(matches!(&twice, kube::Error::Api(s) if s.code == 409 && s.reason == "AlreadyExists"), "{twice}");
    let foreign = api.patch("a", &PatchParams::apply("other"), &Patch::Apply(&typed)).await.unwrap_err();
    assert!(matches!(&foreign, kube::Error::Api(s) if s.code == 409), "{foreign}");
    api.patch("a", &PatchParams::apply("other").force(), &Patch::Apply(&typed)).await.unwrap();

    let wrong = Preconditions { uid: Some("another".to_owned()), resource_version: None };
    let refused = api.delete("a", &DeleteParams::default().preconditions(wrong)).await.unwrap_err();
    assert!(matches!(&refused, kube::Error::Api(s) if s.code == 409), "{refused}");
    let old = Preconditions { uid: None, resource_version: made.metadata.resource_version };
    let refused = api.delete("a", &DeleteParams::default().preconditions(old)).await.unwrap_err();
    assert!(matches!(&refused, kube::Error::Api(s) if s.code == 409), "{refused}");
    api.delete("a", &DeleteParams::default()).await.unwrap();
    assert!(api.get_opt("a").await.unwrap().is_none());
    let gone = api.replace("a", &PostParams::default(), &replaced).await.unwrap_err();
    assert!(matches!(&gone, kube::Error::Api(s) if s.code == 404), "{gone}");
}

#[tokio::test]
async fn a_dry_run_answers_and_stores_nothing() {
    let world = World::new(Release::V1_34).await;
    let admin = world.admin().await;
    let mut probe = slice("probe", "node1");
    probe["spec"]["devices"][0]["allowMultipleAllocations"] = json!(true);
    let path = format!("{SLICES}?dryRun=All");
    let back = post(&admin, &path, &probe).await.unwrap();
    assert!(back["spec"]["devices"][0].get("allowMultipleAllocations").is_none());
    world.server.set_gate(Gate::ConsumableCapacity, true);
    let back = post(&admin, &path, &probe).await.unwrap();
    assert_eq!(back["spec"]["devices"][0]["allowMultipleAllocations"], true);
    assert!(world.server.objects("resourceslices").is_empty());
    let start = std::time::Instant::now();
    post(&admin, &path, &probe).await.unwrap();
    assert!(world.server.writes_since(start).is_empty(), "a dry run is no write");
    assert_eq!(post(&admin, &format!("{SLICES}?dryRun=Some"), &probe).await.unwrap_err().code, 422);
}

#[tokio::test]
async fn discovery_and_version_are_what_the_client_expects() {
    let world = World::new(Release::V1_35).await;
    let admin = world.admin().await;
    let version = admin.apiserver_version().await.unwrap();
    assert_eq!((version.major.as_str(), version.minor.as_str()), ("1", "35"));
    let list = admin.list_api_group_resources("resource.k8s.io/v1").await.unwrap();
    assert!(list.resources.iter().any(|r| r.name == "resourceslices" && !r.namespaced));
    assert_eq!(admin.list_api_groups().await.unwrap().groups.len(), 2);
    world.server.upgrade(Release::V1_37);
    assert_eq!(admin.apiserver_version().await.unwrap().minor, "37");
    let ok = admin.request_text(Request::get("/livez").body(Vec::new()).unwrap()).await.unwrap();
    assert_eq!(ok, "ok");
}

#[tokio::test]
async fn a_dry_run_of_any_verb_changes_nothing() {
    let world = World::new(Release::V1_36).await;
    let admin = world.admin().await;
    let stored = post(&admin, SLICES, &slice("a", "node1")).await.unwrap();
    let mut changed = slice("a", "node1");
    changed["spec"]["pool"]["generation"] = json!(2);
    let path = format!("{SLICES}/a?dryRun=All&fieldManager=npu-dra&force=true");
    let replaced = put(&admin, &path, &changed).await.unwrap();
    assert_eq!((&replaced["spec"]["pool"]["generation"], &replaced["metadata"]["generation"]), (&json!(2), &json!(2)));
    for kind in ["application/apply-patch+yaml", "application/merge-patch+json"] {
        let patched = call(&admin, Method::PATCH, &path, kind, &changed).await.unwrap();
        assert_eq!(patched["spec"]["pool"]["generation"], 2, "{kind}");
    }
    delete(&admin, &path).await.unwrap();
    delete(&admin, &format!("{SLICES}?dryRun=All")).await.unwrap();
    let options = json!({"kind": "DeleteOptions", "apiVersion": "v1", "dryRun": ["All"]});
    let bare = format!("{SLICES}/a");
    call(&admin, Method::DELETE, &bare, "application/json", &options).await.unwrap();
    assert_eq!(get(&admin, &bare).await.unwrap(), stored);
}

#[tokio::test]
async fn an_apply_needs_a_manager_and_a_type_and_other_patches_are_refused() {
    let world = World::new(Release::V1_36).await;
    let admin = world.admin().await;
    let apply = "application/apply-patch+yaml";
    let path = format!("{SLICES}/a");
    let code = |kind: &'static str, query: &'static str, body: Value| {
        let (admin, path) = (admin.clone(), format!("{path}{query}"));
        async move { call(&admin, Method::PATCH, &path, kind, &body).await.map_or_else(|s| s.code, |_| 200) }
    };
    assert_eq!(code(apply, "", slice("a", "node1")).await, 422, "no field manager");
    assert_eq!(code(apply, "?fieldManager=x", json!({"spec": {}})).await, 400, "no kind");
    assert_eq!(code("application/merge-patch+json", "", json!({})).await, 404);
    assert_eq!(code("application/json-patch+json", "", json!([])).await, 404);
    assert_eq!(code("application/json", "", json!({})).await, 415);
    assert_eq!(code(apply, "?fieldManager=x", slice("a", "node1")).await, 200);
    let stale = json!({"metadata": {"resourceVersion": "1"}});
    assert_eq!(code("application/merge-patch+json", "", stale).await, 409);
    assert_eq!(code("application/merge-patch+json", "", json!({"metadata": "x"})).await, 422);
}

#[tokio::test]
async fn a_claim_with_a_finalizer_stays_until_it_is_taken_away() {
    let world = World::new(Release::V1_36).await;
    let admin = world.admin().await;
    let claims = "/apis/resource.k8s.io/v1/namespaces/ml/resourceclaims";
    let claim = json!({
        "metadata": {"name": "c", "finalizers": ["resource.kubernetes.io/delete-protection"]},
        "spec": {"devices": {"requests": [{"name": "npu", "exactly": {"deviceClassName": "npu.huawei.com"}}]}},
    });
    let path = format!("{claims}/c");
    post(&admin, claims, &claim).await.unwrap();
    delete(&admin, &path).await.unwrap();
    let mut marked = get(&admin, &path).await.unwrap();
    assert!(marked["metadata"]["deletionTimestamp"].is_string());
    marked["metadata"]["finalizers"] = json!([]);
    put(&admin, &path, &marked).await.unwrap();
    assert_eq!(get(&admin, &path).await.unwrap_err().code, 404);
}

//! `cluster` against the API server stand-in: every kind of trouble, and back in step afterwards.

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    time::{Duration, Instant},
};

use npu_dra::{
    cluster::{Cluster, Gate, InCluster, Settings, Status, Timing},
    domain::{
        claim::{ClaimRef, ClaimUid},
        health::Condition,
        names::{DeviceName, DriverName, NodeName, PoolName},
        notice::Notice,
        refusal::{Kind, Refusal},
        slice::{Attribute, Capacity, DEVICES_PER_SLICE, Device, Effect, Pool, Slice, Taint},
    },
};
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::api::{
    ApiServer, DeviceResult, Fault, Gate as ServerGate, GoneAs, How, Kubeconfig, Release, ServerCertificate, Who,
};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

const DRIVER: &str = "npu.huawei.com";
const NODE: &str = "node-1";
/// Long enough for a loaded machine; nothing waits for it that works.
const LONG: Duration = Duration::from_secs(20);

/// A server, credentials, and a running `Cluster`.
struct World {
    api: ApiServer,
    dir: TempDir,
    kubeconfig: Kubeconfig,
    cluster: Cluster,
    registry: Registry,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Drop for World {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn timing() -> Timing {
    Timing {
        files: Duration::from_millis(50),
        reload_gap: Duration::from_millis(100),
        backoff_min: Duration::from_millis(50),
        backoff_max: Duration::from_millis(400),
        forbidden: Duration::from_millis(600),
        claim_retry: Duration::from_millis(50),
        claim_patience: Duration::from_millis(500),
        request: Duration::from_secs(5),
        ..Timing::default()
    }
}

fn settings(kubeconfig: &Path) -> Settings {
    Settings {
        driver: DriverName::new(DRIVER).unwrap(),
        node: NodeName::new(NODE).unwrap(),
        kubeconfig: Some(kubeconfig.to_owned()),
        in_cluster: None,
        fallback_kubeconfig: "/nonexistent/kubelet.conf".into(),
        timing: timing(),
    }
}

fn node() -> Who {
    Who::Node(NODE.to_owned())
}

impl World {
    async fn new(release: Release) -> Self {
        Self::with(release, How::Certificate, |_| {}).await
    }

    async fn with(release: Release, how: How, change: impl FnOnce(&mut Settings)) -> Self {
        let api = ApiServer::start(release).await.unwrap();
        api.add_node(NODE);
        let dir = TempDir::new().unwrap();
        let kubeconfig = api.kubeconfig(dir.path(), &node(), how).unwrap();
        let mut settings = settings(&kubeconfig.path);
        change(&mut settings);
        Self::around(api, dir, kubeconfig, &settings)
    }

    fn around(api: ApiServer, dir: TempDir, kubeconfig: Kubeconfig, settings: &Settings) -> Self {
        let mut registry = Registry::default();
        let cluster = Cluster::new(settings, &mut registry);
        let stop = CancellationToken::new();
        let task = tokio::spawn({
            let (cluster, stop) = (cluster.clone(), stop.clone());
            async move { cluster.run(stop).await }
        });
        Self { api, dir, kubeconfig, cluster, registry, stop, task }
    }

    /// Publishes and waits until the server has it.
    async fn publish(&self, pool: Pool) {
        let wanted = wire(&pool);
        self.cluster.publish(pool);
        self.api
            .wait_until(|state| published(&state.slices(DRIVER, NODE)) == wanted, LONG)
            .await
            .unwrap_or_else(|error| panic!("{error}\n{:#?}", self.cluster.status()));
        self.status(|status| status.publishing.in_step).await;
    }

    /// Waits for a status.
    async fn status(&self, condition: impl FnMut(&Status) -> bool) -> Status {
        let mut changes = self.cluster.status_changes();
        let result = tokio::time::timeout(LONG, changes.wait_for(condition)).await;
        let Ok(status) = result else { panic!("the status never came: {:#?}", self.cluster.status()) };
        status.unwrap().clone()
    }

    async fn until(&self, what: &str, mut condition: impl FnMut(&[&Value]) -> bool) {
        self.api
            .wait_until(|state| condition(&state.slices(DRIVER, NODE)), LONG)
            .await
            .unwrap_or_else(|error| panic!("{what}: {error}\n{:#?}", self.cluster.status()));
    }

    /// How many requests of that kind there were.
    fn count(&self, verb: &str, resource: &str) -> usize {
        self.api.with_state(|s| s.requests().iter().filter(|r| r.verb == verb && r.resource == resource).count())
    }

    async fn counted(&self, verb: &str, resource: &str, at_least: usize) {
        self.api
            .wait_until(
                |s| {
                    let fits =
                        |r: &&testkit::api::Request| r.verb == verb && r.resource == resource && r.status.is_some();
                    s.requests().iter().filter(fits).count() >= at_least
                },
                LONG,
            )
            .await
            .unwrap();
    }

    fn writes(&self, since: Instant) -> Vec<String> {
        self.api.writes_since(since).iter().map(|r| format!("{} {}", r.verb, r.name)).collect()
    }

    fn claim(&self, name: &str) -> ClaimRef {
        let stored = self.api.claim("ns", name).unwrap();
        let uid = stored.pointer("/metadata/uid").unwrap().as_str().unwrap();
        ClaimRef { namespace: "ns".into(), name: name.into(), uid: ClaimUid::new(uid).unwrap() }
    }

    fn allocated_claim(&self, name: &str) -> ClaimRef {
        let result = DeviceResult::new("npu", DRIVER, "node-1/npu", "npu-0");
        let _ = self.api.claim_builder("ns", name).request("npu", DRIVER, 1).result(result).node(NODE).store();
        self.claim(name)
    }

    fn metrics(&self) -> String {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry).unwrap();
        text
    }
}

/// Lets some time pass in which nothing may happen.
async fn quiet(time: Duration) {
    tokio::time::sleep(time).await; // waits: to see that nothing is done meanwhile
}

fn device(number: usize) -> Device {
    Device {
        name: format!("npu-{number}"),
        attributes: BTreeMap::from([
            ("type".to_owned(), Attribute::Text("npu".to_owned())),
            ("physicalId".to_owned(), Attribute::Int(i64::try_from(number).unwrap())),
        ]),
        capacity: BTreeMap::from([("memCapacity".to_owned(), Capacity::plain("32Gi".parse().unwrap()))]),
        ..Device::default()
    }
}

fn tainted(number: usize) -> Device {
    let taint = Taint { key: format!("{DRIVER}/unhealthy"), value: "critical".into(), effect: Effect::NoSchedule };
    Device { taints: vec![taint], ..device(number) }
}

fn pool(devices: &[Device]) -> Pool {
    let mut slices: Vec<_> = devices
        .chunks(DEVICES_PER_SLICE)
        .enumerate()
        .map(|(index, devices)| Slice { index, devices: devices.to_vec(), ..Slice::default() })
        .collect();
    if slices.is_empty() {
        slices.push(Slice::default());
    }
    Pool { driver: DriverName::new(DRIVER).unwrap(), name: PoolName::new("node-1/npu").unwrap(), slices }
}

fn cards(count: usize) -> Vec<Device> {
    (0..count).map(device).collect()
}

/// Device names with the number of their taints, slice by slice.
type Shape = Vec<Vec<(String, usize)>>;

fn wire(pool: &Pool) -> Shape {
    pool.slices.iter().map(|s| s.devices.iter().map(|d| (d.name.clone(), d.taints.len())).collect()).collect()
}

fn published(slices: &[&Value]) -> Shape {
    let list = |value: Option<&Value>| value.and_then(Value::as_array).cloned().unwrap_or_default();
    let device = |d: &Value| (d["name"].as_str().unwrap().to_owned(), list(d.get("taints")).len());
    slices.iter().map(|s| list(s.pointer("/spec/devices")).iter().map(device).collect()).collect()
}

fn generations(slices: &[&Value]) -> Vec<(i64, i64)> {
    let number = |s: &Value, path: &str| s.pointer(path).and_then(Value::as_i64).unwrap();
    slices.iter().map(|s| (number(s, "/spec/pool/generation"), number(s, "/spec/pool/resourceSliceCount"))).collect()
}

// Publishing.

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_written_before_a_pool_is_wanted() {
    let world = World::new(Release::V1_36).await;
    world.publish(pool(&cards(2))).await;
    world.stop.cancel();
    world.status(|_| true).await;
    let claim = world.allocated_claim("c");
    let since = Instant::now();
    // A daemon that does not know its cards yet: what is published stays.
    let again = Cluster::new(&settings(&world.kubeconfig.path), &mut Registry::default());
    let task = tokio::spawn({
        let again = again.clone();
        async move { again.run(CancellationToken::new()).await }
    });
    again.republish();
    again.claim(&claim).await.unwrap();
    quiet(Duration::from_millis(500)).await;
    task.abort();
    assert!(world.writes(since).is_empty());
    assert_eq!(published(&world.api.slices(DRIVER, NODE).iter().collect::<Vec<_>>())[0].len(), 2);
    assert!(!again.status().publishing.wanted);
}

#[tokio::test(flavor = "multi_thread")]
async fn slices_carry_owner_and_shape_and_are_written_once() {
    let world = World::new(Release::V1_36).await;
    let since = Instant::now();
    world.publish(pool(&cards(2))).await;
    let slice = &world.api.slices(DRIVER, NODE)[0];
    let node = world.api.object("nodes", "", NODE).unwrap();
    assert_eq!(slice.pointer("/metadata/ownerReferences/0/uid"), node.pointer("/metadata/uid"));
    assert_eq!(slice.pointer("/metadata/ownerReferences/0/kind"), Some(&json!("Node")));
    assert_eq!(
        slice.pointer("/spec/pool"),
        Some(&json!({"name": "node-1/npu", "generation": 1, "resourceSliceCount": 1}))
    );
    assert_eq!(slice.pointer("/spec/devices/1/capacity/memCapacity/value"), Some(&json!("32Gi")));
    assert_eq!(slice.pointer("/spec/devices/1/attributes/physicalId/int"), Some(&json!(1)));
    let lists = world.count("list", "resourceslices");
    world.cluster.republish();
    world.counted("list", "resourceslices", lists + 1).await;
    world.counted("watch", "resourceslices", 1).await;
    world.cluster.publish(pool(&cards(2)));
    quiet(Duration::from_millis(700)).await;
    assert_eq!(world.writes(since).len(), 1, "{:?}", world.writes(since));
    let status = world.cluster.status();
    assert!(status.connected && status.credentials.problem.is_none() && status.publishing.problem.is_none());
    assert_eq!(status.publishing.slices[0].devices, 2);
    assert_eq!(status.publishing.slices[0].generation, Some(1));
    assert!(status.publishing.slices[0].written.is_some());
    assert!(status.credentials.certificate_ends.is_some());
    assert!(status.version.unwrap().since(36));
    assert!(world.metrics().contains("cluster_published_devices 2"), "{}", world.metrics());
}

#[tokio::test(flavor = "multi_thread")]
async fn wiped_slices_are_back_within_two_seconds() {
    let world = World::new(Release::V1_36).await;
    world.publish(pool(&cards(70))).await;
    let mut slowest = Duration::ZERO;
    for round in 0..3 {
        let begin = Instant::now();
        assert_eq!(world.api.kubelet_wipe(NODE), 2, "round {round}");
        world.until("back after the wipe", |s| s.len() == 2).await;
        slowest = slowest.max(begin.elapsed());
        world.status(|s| s.publishing.in_step && s.publishing.slices.iter().all(|s| s.generation == Some(1))).await;
    }
    assert!(slowest < Duration::from_secs(2), "{slowest:?}");
    let slices = world.api.slices(DRIVER, NODE);
    assert_eq!(generations(&slices.iter().collect::<Vec<_>>()), [(1, 2), (1, 2)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_storm_of_wipes_is_answered_in_few_writes() {
    let world = World::new(Release::V1_36).await;
    world.publish(pool(&cards(1))).await;
    let since = Instant::now();
    for _ in 0..20 {
        world.api.kubelet_wipe(NODE);
        world.api.edit("nodes", "", NODE, |node| node["metadata"]["labels"] = json!({"x": "y"}));
        quiet(Duration::from_millis(20)).await;
    }
    world.until("back after the storm", |s| s.len() == 1).await;
    quiet(Duration::from_millis(500)).await;
    assert_eq!(world.api.slices(DRIVER, NODE).len(), 1);
    let writes = world.writes(since);
    assert!(writes.len() <= 4, "{writes:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn sixty_five_devices_make_two_slices_and_a_change_rewrites_one() {
    let world = World::new(Release::V1_36).await;
    let mut devices = cards(65);
    world.publish(pool(&devices)).await;
    let slices = world.api.slices(DRIVER, NODE);
    assert_eq!(generations(&slices.iter().collect::<Vec<_>>()), [(1, 2), (1, 2)]);
    let names: Vec<_> = slices.iter().map(|s| s.pointer("/metadata/name").unwrap().as_str().unwrap()).collect();
    assert!(names[0].starts_with("00000-") && names[1].starts_with("00001-"), "{names:?}");

    let since = Instant::now();
    devices[64] = tainted(64);
    world.publish(pool(&devices)).await;
    assert_eq!(world.writes(since), [format!("update {}", names[1])]);
    assert!(since.elapsed() < Duration::from_secs(1), "a taint took {:?}", since.elapsed());

    // A third slice: all of the pool's slices move to the next generation together.
    let since = Instant::now();
    devices.extend((65..129).map(device));
    world.publish(pool(&devices)).await;
    assert_eq!(world.writes(since).len(), 3);
    let slices = world.api.slices(DRIVER, NODE);
    assert_eq!(generations(&slices.iter().collect::<Vec<_>>()), [(2, 3), (2, 3), (2, 3)]);

    let since = Instant::now();
    world.publish(pool(&devices[..10])).await;
    let writes = world.writes(since);
    assert_eq!(writes.iter().filter(|w| w.starts_with("delete")).count(), 2, "{writes:?}");
    let slices = world.api.slices(DRIVER, NODE);
    assert_eq!(generations(&slices.iter().collect::<Vec<_>>()), [(3, 1)]);

    world.publish(pool(&[])).await;
    assert_eq!(world.api.slices(DRIVER, NODE).len(), 1, "an empty slice says that the driver is there");
}

#[tokio::test(flavor = "multi_thread")]
async fn other_spellings_of_a_quantity_cause_no_write_and_other_values_are_put_right() {
    let world = World::new(Release::V1_36).await;
    world.publish(pool(&cards(1))).await;
    let name = world.cluster.status().publishing.slices[0].name.clone();
    let since = Instant::now();
    let set = |value: &str| {
        let value = json!(value);
        world
            .api
            .edit("resourceslices", "", &name, |s| s["spec"]["devices"][0]["capacity"]["memCapacity"]["value"] = value)
    };
    assert!(set("32768Mi"));
    quiet(Duration::from_millis(600)).await;
    assert!(world.writes(since).is_empty());
    assert!(set("64Gi"));
    world
        .until("put right", |s| s[0].pointer("/spec/devices/0/capacity/memCapacity/value") == Some(&json!("32Gi")))
        .await;
    assert_eq!(world.writes(since), [format!("update {name}")]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_taint_keeps_its_time_when_something_else_changes() {
    let world = World::new(Release::V1_36).await;
    let mut devices = vec![tainted(0), device(1)];
    world.publish(pool(&devices)).await;
    let name = world.cluster.status().publishing.slices[0].name.clone();
    let old = json!("2026-01-02T03:04:05Z");
    let since = Instant::now();
    world.api.edit("resourceslices", "", &name, |s| s["spec"]["devices"][0]["taints"][0]["timeAdded"] = old.clone());
    quiet(Duration::from_millis(500)).await;
    assert!(world.writes(since).is_empty(), "a taint's time is no difference");
    devices[1] = tainted(1);
    world.publish(pool(&devices)).await;
    let slice = &world.api.slices(DRIVER, NODE)[0];
    assert_eq!(slice.pointer("/spec/devices/0/taints/0/timeAdded"), Some(&old));
    assert!(slice.pointer("/spec/devices/1/taints/0/timeAdded").is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn slices_of_others_stay_and_obsolete_ones_of_ours_go() {
    let world = World::new(Release::V1_36).await;
    let slice = |name: &str, driver: &str| {
        json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": name},
            "spec": {"driver": driver, "nodeName": NODE, "pool": {"name": NODE, "generation": 7, "resourceSliceCount": 1}}})
    };
    world.api.store_raw("resource.k8s.io", "resourceslices", slice("node-1-old-x7k2p", DRIVER)).unwrap();
    world.api.store_raw("resource.k8s.io", "resourceslices", slice("other", "gpu.example.com")).unwrap();
    world.publish(pool(&cards(1))).await;
    let names: Vec<_> = world
        .api
        .objects("resourceslices")
        .iter()
        .map(|s| s["metadata"]["name"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(names.len(), 2, "{names:?}");
    assert!(names.contains(&"other".to_owned()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_device_that_the_server_would_refuse_is_left_out_with_a_warning() {
    let world = World::new(Release::V1_36).await;
    let mut bad = device(1);
    bad.attributes.insert("chipName".into(), Attribute::Text("x".repeat(200)));
    world.cluster.publish(pool(&[device(0), bad, device(2)]));
    world.until("the others", |s| s.first().is_some_and(|s| published(&[s])[0].len() == 2)).await;
    let status = world.status(|s| s.publishing.in_step).await;
    assert!(status.publishing.left_out[0].contains("npu-1") && status.publishing.left_out[0].contains("200 bytes"));
    assert_eq!(status.errors.get("invalid"), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_made_anew_becomes_the_owner() {
    let world = World::new(Release::V1_36).await;
    world.publish(pool(&cards(1))).await;
    let uid = world.api.add_node(NODE);
    assert_eq!(world.api.collect_garbage(), 1);
    world
        .until("back with the new owner", |s| {
            s.first().and_then(|s| s.pointer("/metadata/ownerReferences/0/uid")) == Some(&json!(uid))
        })
        .await;
    assert_eq!(world.api.collect_garbage(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn slices_stay_when_the_daemon_stops() {
    let mut world = World::new(Release::V1_36).await;
    world.publish(pool(&cards(3))).await;
    let since = Instant::now();
    world.stop.cancel();
    (&mut world.task).await.unwrap();
    assert!(since.elapsed() < Duration::from_secs(1));
    assert!(world.writes(since).is_empty());
    assert_eq!(world.api.slices(DRIVER, NODE).len(), 1);
}

// Trouble.

#[tokio::test(flavor = "multi_thread")]
async fn a_conflict_is_looked_into_and_overcome() {
    let world = World::new(Release::V1_36).await;
    world.publish(pool(&cards(1))).await;
    world.api.inject(Fault::status(409).on("update", "resourceslices").times(2));
    world.publish(pool(&[tainted(0)])).await;
    let status = world.cluster.status();
    assert_eq!(status.errors.get("conflict"), Some(&2));
    assert_eq!(status.publishing.problem, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_was_lost_makes_no_second_slice() {
    let world = World::new(Release::V1_36).await;
    world.api.inject(Fault::lose_answer().on("create", "resourceslices").times(1));
    world.publish(pool(&cards(1))).await;
    world.api.inject(Fault::lose_answer().on("update", "resourceslices").times(1));
    world.publish(pool(&[tainted(0)])).await;
    assert_eq!(world.api.objects("resourceslices").len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_that_is_too_old_is_begun_anew_in_both_forms() {
    let world = World::new(Release::V1_36).await;
    world.publish(pool(&cards(1))).await;
    for how in [GoneAs::Event, GoneAs::Status] {
        world.api.set_gone_as(how);
        let lists = world.count("list", "resourceslices");
        let since = Instant::now();
        world.api.expire_versions();
        world.counted("list", "resourceslices", lists + 1).await;
        world.api.wait_until(|s| s.watches("resourceslices") == 1, LONG).await.unwrap();
        assert!(world.writes(since).is_empty());
        world.api.kubelet_wipe(NODE);
        world.until("back", |s| s.len() == 1).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_right_is_said_once_and_tried_slowly() {
    let world = World::new(Release::V1_36).await;
    world.api.inject(Fault::status(403).on("create", "resourceslices"));
    world.cluster.publish(pool(&cards(1)));
    let status = world.status(|s| s.publishing.problem.is_some()).await;
    assert!(status.forbidden.contains_key("create resourceslices"), "{status:#?}");
    assert!(status.publishing.slices[0].problem.as_ref().unwrap().contains("403"), "{status:#?}");
    assert!(!status.publishing.in_step);
    let before = world.count("create", "resourceslices");
    quiet(Duration::from_secs(2)).await;
    let tries = world.count("create", "resourceslices") - before;
    assert!((1..=5).contains(&tries), "{tries} tries in 2 s at a pause of 0.6 s");
    world.api.clear_faults();
    world.until("published in the end", |s| s.len() == 1).await;
    let status = world.status(|s| s.publishing.in_step).await;
    assert!(status.forbidden.is_empty() && status.publishing.problem.is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn each_missing_right_is_named_by_verb_and_resource() {
    for (verb, resource) in [
        ("get", "version"),
        ("get", "nodes"),
        ("list", "resourceslices"),
        ("watch", "resourceslices"),
        ("update", "resourceslices"),
        ("delete", "resourceslices"),
    ] {
        let world = World::new(Release::V1_36).await;
        let fault = if resource == "version" {
            Fault::status(403).on("get", "").times(1)
        } else {
            Fault::status(403).on(verb, resource)
        };
        world.api.inject(fault);
        world.cluster.publish(pool(&cards(65)));
        if matches!(verb, "update" | "delete") {
            world.until("first", |s| s.len() == 2).await;
            world.cluster.publish(pool(&[tainted(0)]));
        }
        let right = format!("{verb} {resource}");
        world.status(|s| s.forbidden.contains_key(&right)).await;
        if verb == "get" {
            // Neither is needed to publish.
            world.until("published all the same", |s| s.len() == 2).await;
        }
        world.api.clear_faults();
        world.status(|s| s.publishing.in_step && (verb == "get" || s.forbidden.is_empty())).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_that_is_cut_off_again_and_again_is_opened_with_pauses() {
    let world = World::new(Release::V1_36).await;
    world.publish(pool(&cards(1))).await;
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(3) {
        world.api.cut_watches();
        quiet(Duration::from_millis(20)).await;
    }
    let lists = world.count("list", "resourceslices");
    assert!((3..=20).contains(&lists), "{lists} lists in 3 s at a longest pause of 0.4 s");
    world.api.kubelet_wipe(NODE);
    world.until("back", |s| s.len() == 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_403_right_after_the_creation_is_normal_for_a_node() {
    let world = World::with(Release::V1_36, How::Certificate, |s| s.timing.forbidden = Duration::from_mins(1)).await;
    world.api.set_graph_lag(Duration::from_millis(800));
    world.publish(pool(&cards(1))).await;
    let begin = Instant::now();
    world.publish(pool(&[tainted(0)])).await;
    assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_may_list_only_with_its_selector() {
    let world = World::new(Release::V1_36).await;
    world.publish(pool(&cards(1))).await;
    assert_eq!(world.cluster.status().errors.get("forbidden"), None);
    let requests = world.api.requests();
    let looks: Vec<_> = requests.iter().filter(|r| matches!(r.verb.as_str(), "list" | "watch")).collect();
    assert!(
        !looks.is_empty() && looks.iter().all(|r| r.query.contains("spec.nodeName") && r.query.contains("spec.driver"))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_slice_is_not_sent_again_until_it_is_another() {
    let world = World::new(Release::V1_36).await;
    world.publish(pool(&cards(1))).await;
    let probes = world.api.requests().iter().filter(|r| r.dry_run).count();
    world.api.inject(Fault::status(422).on("update", "resourceslices"));
    world.cluster.publish(pool(&[tainted(0)]));
    let status = world.status(|s| s.publishing.problem.is_some()).await;
    assert!(status.publishing.slices[0].problem.as_ref().unwrap().contains("422"), "{status:#?}");
    quiet(Duration::from_millis(1500)).await;
    assert_eq!(world.count("update", "resourceslices"), 1);
    assert!(world.api.requests().iter().filter(|r| r.dry_run).count() > probes, "the gates are probed again");
    world.api.clear_faults();
    let mut other = tainted(0);
    other.taints[0].value = "other".into();
    world.publish(pool(&[other])).await;
    assert_eq!(world.cluster.status().publishing.problem, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn throttling_is_heeded() {
    let world = World::new(Release::V1_36).await;
    world.publish(pool(&cards(1))).await;
    world.api.inject(Fault::status(429).retry_after(2).on("update", "resourceslices").times(1));
    let begin = Instant::now();
    world.publish(pool(&[tainted(0)])).await;
    assert!(begin.elapsed() >= Duration::from_secs(2), "{:?}", begin.elapsed());
    assert_eq!(world.count("update", "resourceslices"), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_answers_500_for_ever_is_asked_with_pauses() {
    let world = World::new(Release::V1_36).await;
    let claim = world.allocated_claim("c");
    world.api.inject(Fault::status(500).on("*", "*"));
    world.cluster.publish(pool(&cards(1)));
    let status = world.status(|s| s.publishing.problem.is_some()).await;
    assert!(status.publishing.problem.as_ref().unwrap().contains("500"), "{status:#?}");
    assert!(status.connected, "an answer is an answer");
    let begin = Instant::now();
    let refusal = world.cluster.claim(&claim).await.unwrap_err();
    assert!(matches!(&refusal, Refusal::ClaimUnreadable { retry: true, why, .. } if why.contains("500")), "{refusal}");
    assert!(begin.elapsed() < Duration::from_secs(10));
    let before = world.api.requests().len();
    quiet(Duration::from_secs(2)).await;
    let asked = world.api.requests().len() - before;
    assert!((1..=12).contains(&asked), "{asked} requests in 2 s at a longest pause of 0.4 s");
    world.api.clear_faults();
    world.until("published in the end", |s| s.len() == 1).await;
    world.cluster.claim(&claim).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_changed_while_the_network_was_away_is_published_when_it_is_back() {
    let world = World::new(Release::V1_36).await;
    world.publish(pool(&cards(1))).await;
    world.api.stop_listening().await.unwrap();
    world.cluster.publish(pool(&[tainted(0)]));
    let status = world.status(|s| !s.connected).await;
    assert!(status.publishing.slices.len() == 1, "what is known stays known");
    let status = world.status(|s| s.publishing.problem.is_some()).await;
    assert!(status.publishing.problem.as_ref().unwrap().contains("cannot be reached"), "{status:#?}");
    quiet(Duration::from_millis(800)).await;
    world.api.kubelet_wipe(NODE);
    let probes = world.api.requests().iter().filter(|r| r.dry_run).count();
    world.api.resume_listening().await.unwrap();
    world.until("the taint", |s| published(s) == [[("npu-0".to_owned(), 1)]]).await;
    assert!(world.api.requests().iter().filter(|r| r.dry_run).count() > probes, "a new connection is probed");
    world.publish(pool(&cards(1))).await;
    assert!(world.cluster.status().connected);
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_that_are_dropped_now_and_then_cost_nothing() {
    let world = World::new(Release::V1_36).await;
    let claim = world.allocated_claim("c");
    world.publish(pool(&cards(1))).await;
    let since = Instant::now();
    for _ in 0..3 {
        world.api.drop_connections().await.unwrap();
        world.cluster.claim(&claim).await.unwrap();
    }
    world.api.wait_until(|s| s.watches("resourceslices") == 1, LONG).await.unwrap();
    world.api.kubelet_wipe(NODE);
    world.until("back", |s| s.len() == 1).await;
    assert_eq!(world.writes(since).len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_the_api_group_is_named_as_such() {
    let world = World::new(Release::V1_36).await;
    world.api.inject(Fault::status(404).on("*", "resourceslices"));
    world.cluster.publish(pool(&cards(1)));
    let status = world.status(|s| s.publishing.problem.is_some()).await;
    assert!(status.publishing.problem.unwrap().contains("1.34 or later"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_is_not_there_is_waited_for() {
    let world = World::with(Release::V1_36, How::Certificate, |_| {}).await;
    world.api.delete("", "nodes", "", NODE);
    world.cluster.publish(pool(&cards(1)));
    let status = world.status(|s| s.publishing.problem.is_some()).await;
    assert!(status.publishing.problem.unwrap().contains("--node-name"));
    assert!(world.api.slices(DRIVER, NODE).is_empty());
    world.api.add_node(NODE);
    world.until("published", |s| s.len() == 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_http2_is_served_as_well() {
    let api = ApiServer::start(Release::V1_36).await.unwrap();
    api.set_http2(false);
    api.add_node(NODE);
    let dir = TempDir::new().unwrap();
    let kubeconfig = api.kubeconfig(dir.path(), &node(), How::Certificate).unwrap();
    let settings = settings(&kubeconfig.path);
    let world = World::around(api, dir, kubeconfig, &settings);
    let claim = world.allocated_claim("c");
    world.publish(pool(&cards(1))).await;
    world.cluster.claim(&claim).await.unwrap();
    world.api.kubelet_wipe(NODE);
    world.until("back", |s| s.len() == 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_falls_silent_is_given_up_and_found_again() {
    let world = World::with(Release::V1_36, How::Certificate, |s| {
        s.timing.request = Duration::from_secs(1);
    })
    .await;
    world.publish(pool(&cards(1))).await;
    world.api.set_silent(true);
    world.cluster.publish(pool(&[tainted(0)]));
    let status = world.status(|s| !s.connected).await;
    assert!(status.publishing.slices.len() == 1);
    world.api.set_silent(false);
    world.until("the taint", |s| s.first().is_some_and(|s| published(&[s])[0][0].1 == 1)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn many_claims_are_read_at_once() {
    let world = World::new(Release::V1_36).await;
    world.publish(pool(&cards(1))).await;
    let claims: Vec<_> = (0..64).map(|n| world.allocated_claim(&format!("c{n}"))).collect();
    world.api.set_latency(Duration::from_millis(100));
    let begin = Instant::now();
    let reads = claims.iter().map(|claim| world.cluster.claim(claim));
    for read in futures::future::join_all(reads).await {
        read.unwrap();
    }
    let took = begin.elapsed();
    assert!(took < Duration::from_secs(3), "64 reads of 0.1 s took {took:?} together");
}

// Gates.

#[tokio::test(flavor = "multi_thread")]
async fn taints_that_the_server_drops_are_named_and_appear_after_its_upgrade() {
    let world = World::new(Release::V1_34).await;
    let mut gates = world.cluster.gates();
    let since = Instant::now();
    world.cluster.publish(pool(&[tainted(0), device(1)]));
    tokio::time::timeout(LONG, gates.wait_for(|g| g.taints == Gate::Off)).await.unwrap().unwrap();
    let status = world.status(|s| s.publishing.dropped.is_some()).await;
    assert!(status.publishing.dropped.as_ref().unwrap().contains("DRADeviceTaints"), "{status:#?}");
    assert!(status.version.as_ref().is_some_and(|v| v.since(34) && !v.since(35)));
    quiet(Duration::from_millis(700)).await;
    assert_eq!(world.writes(since).len(), 1, "a dropped taint is no reason to write again");
    world.api.upgrade(Release::V1_36);
    world.until("the taint", |s| published(s)[0][0].1 == 1).await;
    let status = world.status(|s| s.publishing.in_step && s.publishing.dropped.is_none()).await;
    assert!(status.version.is_some_and(|v| v.since(36)));
    let gates = world.cluster.gates().borrow().clone();
    assert_eq!((gates.taints, gates.consumable_capacity, gates.partitionable_devices), (Gate::On, Gate::On, Gate::On));
}

#[tokio::test(flavor = "multi_thread")]
async fn each_gate_is_probed_on_each_release() {
    for (release, on) in
        [(Release::V1_34, false), (Release::V1_34, true), (Release::V1_35, true), (Release::V1_37, true)]
    {
        let world = World::new(release).await;
        for gate in [ServerGate::DeviceTaints, ServerGate::ConsumableCapacity, ServerGate::PartitionableDevices] {
            world.api.set_gate(gate, on);
        }
        world.publish(pool(&cards(1))).await;
        let gates = world.cluster.gates().borrow().clone();
        let want = if on { Gate::On } else { Gate::Off };
        assert_eq!(gates.problem, "", "{release:?} {on}");
        assert_eq!(
            (gates.taints, gates.consumable_capacity, gates.partitionable_devices),
            (want, want, want),
            "{release:?} {on}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gate_that_goes_off_under_us_is_noticed_by_what_comes_back() {
    let world = World::new(Release::V1_36).await;
    world.publish(pool(&cards(1))).await;
    world.api.set_gate(ServerGate::DeviceTaints, false);
    world.cluster.publish(pool(&[tainted(0)]));
    let status = world.status(|s| s.publishing.dropped.is_some()).await;
    assert!(status.publishing.dropped.unwrap().contains("DRADeviceTaints"));
    assert_eq!(world.cluster.gates().borrow().taints, Gate::Off);
    quiet(Duration::from_millis(600)).await;
    assert_eq!(world.count("update", "resourceslices"), 1);
}

// Credentials.

#[tokio::test(flavor = "multi_thread")]
async fn credentials_of_every_kind_are_replaced_while_running() {
    for how in [How::Certificate, How::Token, How::TokenFile] {
        let mut world = World::with(Release::V1_36, how, |_| {}).await;
        let claim = world.allocated_claim("c");
        world.publish(pool(&cards(1))).await;
        for _ in 0..2 {
            let mut kubeconfig = world.kubeconfig.clone();
            let loads = world.cluster.status().credentials.loads;
            world.api.rotate(&mut kubeconfig).unwrap();
            world.kubeconfig = kubeconfig;
            world.status(|s| s.credentials.loads > loads).await;
            world.cluster.claim(&claim).await.unwrap_or_else(|e| panic!("{how:?}: {e}"));
            world.api.kubelet_wipe(NODE);
            world.until("back with new credentials", |s| s.len() == 1).await;
            let status = world.status(|s| s.publishing.in_step).await;
            assert_eq!(status.credentials.problem, None, "{how:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn new_credentials_are_taken_on_a_401_before_anybody_looks_at_the_files() {
    let mut world = World::with(Release::V1_36, How::Certificate, |s| s.timing.files = Duration::from_hours(1)).await;
    let claim = world.allocated_claim("c");
    world.publish(pool(&cards(1))).await;
    quiet(timing().reload_gap).await;
    let mut kubeconfig = world.kubeconfig.clone();
    world.api.rotate(&mut kubeconfig).unwrap();
    world.kubeconfig = kubeconfig;
    world.cluster.claim(&claim).await.unwrap();
    assert_eq!(world.cluster.status().credentials.problem, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_file_may_end_in_a_newline() {
    let world = World::with(Release::V1_36, How::TokenFile, |_| {}).await;
    let file = world.kubeconfig.token_file.clone().unwrap();
    let token = fs::read_to_string(&file).unwrap();
    fs::write(&file, format!("{}\n", token.trim())).unwrap();
    let claim = world.allocated_claim("c");
    world.status(|s| s.credentials.loads > 0).await;
    world.publish(pool(&cards(1))).await;
    world.cluster.claim(&claim).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn credentials_that_ended_are_named_and_replaced_ones_taken() {
    for how in [How::ExpiredCertificate, How::StrangerCertificate, How::WrongToken] {
        let world = World::with(Release::V1_36, how, |_| {}).await;
        world.cluster.publish(pool(&cards(1)));
        let status = world.status(|s| s.credentials.problem.as_ref().is_some_and(|p| p.contains("401"))).await;
        let problem = status.credentials.problem.unwrap();
        let file = world.kubeconfig.path.display().to_string();
        if how == How::ExpiredCertificate {
            assert!(problem.contains("current.pem ended 2021-01-01"), "{problem}");
        } else {
            assert!(problem.contains(&file), "{problem}");
        }
        quiet(Duration::from_secs(1)).await;
        let asked = world.api.requests().len();
        assert!(asked < 60, "{how:?}: {asked} requests with bad credentials");
        // Another kubeconfig is put in its place.
        let good = world.api.kubeconfig(world.dir.path(), &node(), How::Certificate).unwrap();
        fs::rename(&good.path, &world.kubeconfig.path).unwrap();
        world.until("published with good credentials", |s| s.len() == 1).await;
        let status = world.status(|s| s.publishing.in_step).await;
        assert_eq!(status.credentials.problem, None, "{how:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_authority_is_named_with_its_file_and_put_right() {
    let world = World::with(Release::V1_36, How::WrongCa, |_| {}).await;
    let claim = world.allocated_claim("c");
    world.cluster.publish(pool(&cards(1)));
    let status = world.status(|s| s.credentials.problem.is_some()).await;
    let problem = status.credentials.problem.unwrap();
    assert!(problem.contains("ca.crt") && problem.contains("not trusted"), "{problem}");
    let refusal = world.cluster.claim(&claim).await.unwrap_err();
    assert_eq!(refusal.kind(), Kind::Retry);
    let text = fs::read_to_string(&world.kubeconfig.path).unwrap();
    let (_, rest) = text.split_once("certificate-authority: \"").unwrap();
    let (authority, _) = rest.split_once('"').unwrap();
    fs::write(authority, world.api.ca_pem()).unwrap();
    world.until("published with the right authority", |s| s.len() == 1).await;
    let status = world.status(|s| s.publishing.in_step).await;
    assert_eq!(status.credentials.problem, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_shows_another_certificate_for_a_while_is_found_again() {
    let world = World::new(Release::V1_36).await;
    world.publish(pool(&cards(1))).await;
    for bad in [ServerCertificate::Stranger, ServerCertificate::Expired] {
        world.api.set_certificate(bad).unwrap();
        world.api.drop_connections().await.unwrap();
        let status = world.status(|s| s.credentials.problem.is_some()).await;
        assert!(!status.connected);
        world.api.set_certificate(ServerCertificate::Good).unwrap();
        world.status(|s| s.connected && s.credentials.problem.is_none() && s.publishing.in_step).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kubeconfig_that_appears_later_is_used() {
    let api = ApiServer::start(Release::V1_36).await.unwrap();
    api.add_node(NODE);
    let dir = TempDir::new().unwrap();
    let kubeconfig = api.kubeconfig(dir.path(), &node(), How::Certificate).unwrap();
    let away = dir.path().join("away");
    fs::rename(&kubeconfig.path, &away).unwrap();
    // As on a node where kubelet has not been set up yet: the fallback.
    let settings =
        Settings { kubeconfig: None, fallback_kubeconfig: kubeconfig.path.clone(), ..settings(&kubeconfig.path) };
    let world = World::around(api, dir, kubeconfig, &settings);
    let claim = world.allocated_claim("c");
    world.cluster.publish(pool(&cards(1)));
    let status = world.status(|s| s.credentials.problem.is_some()).await;
    let problem = status.credentials.problem.unwrap();
    assert!(
        problem.contains("cannot be read") && problem.contains(&world.kubeconfig.path.display().to_string()),
        "{problem}"
    );
    let refusal = world.cluster.claim(&claim).await.unwrap_err();
    assert!(matches!(&refusal, Refusal::ClaimUnreadable { retry: true, .. }), "{refusal}");
    fs::rename(&away, &world.kubeconfig.path).unwrap();
    world.until("published", |s| s.len() == 1).await;
    world.cluster.claim(&claim).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_uses_its_service_account() {
    let api = ApiServer::start(Release::V1_36).await.unwrap();
    api.add_node(NODE);
    let dir = TempDir::new().unwrap();
    let who = Who::ServiceAccount { namespace: "npu-dra".into(), name: "npu-dra".into(), node: NODE.into() };
    let account = dir.path().join("account");
    api.service_account_files(&account, &who).unwrap();
    let kubeconfig = api.kubeconfig(dir.path(), &who, How::Token).unwrap();
    let address = api.address();
    let settings = Settings {
        kubeconfig: None,
        in_cluster: Some(InCluster {
            host: address.ip().to_string(),
            port: address.port().to_string(),
            dir: account.clone(),
        }),
        ..settings(&kubeconfig.path)
    };
    let world = World::around(api, dir, kubeconfig, &settings);
    world.publish(pool(&cards(1))).await;
    assert!(world.cluster.status().credentials.source.contains("service account"));
    // The kubelet renews it.
    let loads = world.cluster.status().credentials.loads;
    world.api.service_account_files(&account, &who).unwrap();
    world.status(|s| s.credentials.loads > loads).await;
    let claim = world.allocated_claim("c");
    world.cluster.claim(&claim).await.unwrap();
}

// Claims.

#[tokio::test(flavor = "multi_thread")]
async fn each_fate_of_a_claim_has_its_own_refusal() {
    let world = World::new(Release::V1_36).await;
    let claim = world.allocated_claim("c");
    let read = world.cluster.claim(&claim).await.unwrap();
    assert_eq!(read.claim, claim);
    assert_eq!((read.results[0].device.as_str(), read.results[0].pool.as_str()), ("npu-0", "node-1/npu"));

    let other = ClaimRef { uid: ClaimUid::new("0-0").unwrap(), ..claim.clone() };
    let refusal = world.cluster.claim(&other).await.unwrap_err();
    assert!(matches!(&refusal, Refusal::ClaimReplaced { found, .. } if *found == claim.uid.to_string()), "{refusal}");

    let _ = world.api.claim_builder("ns", "raw").request("npu", DRIVER, 1).node(NODE).store();
    let refusal = world.cluster.claim(&world.claim("raw")).await.unwrap_err();
    assert!(matches!(refusal, Refusal::NotAllocated(_)), "{refusal}");

    world.api.unbind_claim(NODE, "ns", "c");
    let refusal = world.cluster.claim(&claim).await.unwrap_err();
    let unreadable =
        |why: &str| matches!(&refusal, Refusal::ClaimUnreadable { retry: true, why: text, .. } if text.contains(why));
    assert!(unreadable("403") && unreadable("no pod of this node"), "a 403 is unknown, never gone: {refusal}");
    assert!(world.cluster.status().forbidden.is_empty(), "one claim's 403 is no missing right");

    let bad = ClaimRef { namespace: "../x".into(), ..claim.clone() };
    assert!(matches!(world.cluster.claim(&bad).await, Err(Refusal::BadName(_))));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_that_is_gone_is_missing() {
    let who = Who::ServiceAccount { namespace: "npu-dra".into(), name: "npu-dra".into(), node: NODE.into() };
    let api = ApiServer::start(Release::V1_36).await.unwrap();
    let dir = TempDir::new().unwrap();
    let kubeconfig = api.kubeconfig(dir.path(), &who, How::Token).unwrap();
    let settings = settings(&kubeconfig.path);
    let world = World::around(api, dir, kubeconfig, &settings);
    let claim = world.allocated_claim("c");
    world.cluster.claim(&claim).await.unwrap();
    world.api.delete_claim("ns", "c");
    assert!(matches!(world.cluster.claim(&claim).await, Err(Refusal::ClaimMissing(_))));
}

#[tokio::test(flavor = "multi_thread")]
async fn reading_a_claim_survives_short_trouble_and_ends_in_time() {
    let world = World::with(Release::V1_36, How::Certificate, |s| s.timing.request = Duration::from_secs(1)).await;
    let claim = world.allocated_claim("c");
    for code in [403, 429, 500, 503, 504] {
        world.api.inject(Fault::status(code).retry_after(0).on("get", "resourceclaims").times(1));
        world.cluster.claim(&claim).await.unwrap_or_else(|e| panic!("{code}: {e}"));
    }
    for code in [429, 500] {
        world.api.inject(Fault::status(code).on("get", "resourceclaims"));
        let begin = Instant::now();
        let refusal = world.cluster.claim(&claim).await.unwrap_err();
        assert!(matches!(&refusal, Refusal::ClaimUnreadable { retry: true, .. }), "{refusal}");
        assert!(begin.elapsed() < Duration::from_secs(3), "{:?}", begin.elapsed());
        world.api.clear_faults();
    }
    world.api.inject(Fault::black_hole().on("get", "resourceclaims"));
    let begin = Instant::now();
    let refusal = world.cluster.claim(&claim).await.unwrap_err();
    assert!(
        matches!(&refusal, Refusal::ClaimUnreadable { retry: true, why, .. } if why.contains("within")),
        "{refusal}"
    );
    assert!(begin.elapsed() < Duration::from_secs(3), "{:?}", begin.elapsed());
    world.api.clear_faults();
    world.api.stop_listening().await.unwrap();
    let refusal = world.cluster.claim(&claim).await.unwrap_err();
    assert!(
        matches!(&refusal, Refusal::ClaimUnreadable { retry: true, why, .. } if why.contains("cannot be reached")),
        "{refusal}"
    );
}

// Events.

fn fault_of(number: usize, to: Condition) -> Notice {
    let device = DeviceName::new(format!("npu-{number}")).unwrap();
    Notice::Health { device, from: None, to, codes: vec![7], why: "00000007".to_owned(), claims: Vec::new() }
}

#[tokio::test(flavor = "multi_thread")]
async fn events_stand_on_the_node_and_on_the_claim() {
    let world = World::new(Release::V1_36).await;
    let claim = world.allocated_claim("c");
    world.cluster.claim(&claim).await.unwrap();
    world.cluster.event(&Notice::Refused {
        claim: claim.clone(),
        operation: "prepare",
        refusal: Refusal::NotAllocated(claim.clone()),
    });
    world.cluster.event(&Notice::Unprepared { claim: claim.clone() });
    world.api.wait_until(|s| s.objects("events").len() == 2, LONG).await.unwrap();
    let events = world.api.events();
    let of = |kind: &str| events.iter().find(|e| e["involvedObject"]["kind"] == kind).unwrap();
    assert_eq!(of("Node")["metadata"]["namespace"], "default");
    assert_eq!(of("Node")["involvedObject"]["name"], NODE);
    assert_eq!(of("ResourceClaim")["metadata"]["namespace"], "ns");
    assert_eq!(of("ResourceClaim")["involvedObject"]["uid"], json!(claim.uid.as_str()));
    for event in &events {
        assert_eq!((&event["reason"], &event["type"]), (&json!("NpuRefused"), &json!("Warning")));
        assert_eq!(event["message"], "prepare refused: claim ns/c is not allocated");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_repeats_itself_stays_one_event_and_each_card_has_its_own() {
    let world = World::new(Release::V1_36).await;
    world.publish(pool(&cards(2))).await;
    for _ in 0..50 {
        world.cluster.event(&fault_of(0, Condition::Tainted));
    }
    world.cluster.event(&fault_of(1, Condition::Tainted));
    world.cluster.event(&fault_of(0, Condition::Ok));
    world.api.wait_until(|s| s.objects("events").iter().any(|e| e["count"] == 51), LONG).await.unwrap();
    let events = world.api.events();
    assert_eq!(events.len(), 2, "{events:#?}");
    let first = events.iter().find(|e| e["count"] == 51).unwrap();
    assert!(first["message"].as_str().unwrap().starts_with("health of npu-0 is ok"), "the newest stands: {first}");
    assert_eq!(first["type"], "Normal", "all is well again");
    assert_eq!(world.count("patch", "events"), 1);
    assert_eq!(world.cluster.status().events_dropped, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn events_never_wait_and_are_dropped_and_counted_when_there_are_too_many() {
    let world = World::with(Release::V1_36, How::Certificate, |s| s.timing.request = Duration::from_millis(300)).await;
    world.api.stop_listening().await.unwrap();
    let begin = Instant::now();
    for number in 0..1000 {
        world.cluster.event(&fault_of(number, Condition::Tainted));
    }
    assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());
    let status = world.status(|s| s.events_dropped >= 700).await;
    assert!(!status.connected);
    assert!(world.metrics().contains("cluster_events_dropped_total"));
}

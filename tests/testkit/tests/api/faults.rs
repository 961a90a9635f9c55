//! Faults by order, the record of requests, and what surrounds the server.

use std::time::{Duration, Instant};

use serde_json::json;
use testkit::api::{ApiServer, DeviceResult, Fault, Release};

use super::{DEADLINE, SLICES, World, get, post, put, slice};

#[tokio::test]
async fn a_status_is_answered_as_often_as_ordered() {
    let world = World::new(Release::V1_36).await;
    let admin = world.admin().await;
    world.server.inject(Fault::status(500).on("create", "resourceslices").times(2));
    for expected in [500, 500, 200] {
        let code = post(&admin, SLICES, &slice("a", "node1")).await.map_or_else(|s| s.code, |_| 200);
        assert_eq!(code, expected);
    }
    world.server.inject(Fault::status(403).on("*", "resourceslices").by("system:node:node1"));
    get(&admin, SLICES).await.unwrap();
    let node = world.node("node1").await;
    for _ in 0..3 {
        let own = format!("{SLICES}?fieldSelector=spec.nodeName=node1");
        assert_eq!(get(&node, &own).await.unwrap_err().code, 403);
    }
    world.server.clear_faults();
    get(&node, &format!("{SLICES}/a")).await.unwrap();
}

#[tokio::test]
async fn too_many_requests_says_when_to_come_again() {
    let world = World::new(Release::V1_36).await;
    let admin = world.admin().await;
    world.server.inject(Fault::status(429).retry_after(1).on("list", "resourceslices").times(1));
    get(&admin, SLICES).await.unwrap();
    let codes: Vec<Option<u16>> = world.server.requests().iter().map(|r| r.status).collect();
    assert_eq!(codes, [Some(429), Some(200)], "the client came again by itself");
}

#[tokio::test]
async fn latency_delay_and_black_holes_hold_a_request_back() {
    let world = World::new(Release::V1_36).await;
    let admin = world.admin().await;
    world.server.set_latency(Duration::from_millis(20));
    let start = Instant::now();
    get(&admin, SLICES).await.unwrap();
    assert!(start.elapsed() >= Duration::from_millis(20));
    world.server.inject(Fault::delay(Duration::from_millis(50)).times(1));
    let start = Instant::now();
    get(&admin, SLICES).await.unwrap();
    assert!(start.elapsed() >= Duration::from_millis(70));
    world.server.clear_faults();
    world.server.inject(Fault::black_hole().on("get", "resourceslices").times(1));
    let path = format!("{SLICES}/a");
    let held = tokio::time::timeout(Duration::from_millis(100), get(&admin, &path)).await;
    assert!(held.is_err());
    assert_eq!(get(&admin, &path).await.unwrap_err().code, 404);
}

#[tokio::test]
async fn a_lost_answer_leaves_the_change_behind() {
    let world = World::new(Release::V1_36).await;
    let admin = world.admin().await;
    world.server.inject(Fault::lose_answer().on("create", "resourceslices").times(1));
    let request = http::Request::post(SLICES).header("content-type", "application/json");
    let request = request.body(slice("a", "node1").to_string().into_bytes()).unwrap();
    assert!(admin.request::<serde_json::Value>(request).await.is_err());
    assert!(world.server.object("resourceslices", "", "a").is_some());
}

#[tokio::test]
async fn a_stopped_listener_refuses_and_comes_back_on_its_port() {
    let world = World::new(Release::V1_36).await;
    let admin = world.admin().await;
    get(&admin, SLICES).await.unwrap();
    let address = world.server.address();
    world.server.stop_listening().await.unwrap();
    let refused = tokio::net::TcpStream::connect(address).await.unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
    world.server.resume_listening().await.unwrap();
    assert_eq!(world.server.address(), address);
    get(&admin, SLICES).await.unwrap();
}

#[tokio::test]
async fn a_silent_server_goes_on_where_it_stopped() {
    let world = World::new(Release::V1_36).await;
    let admin = world.admin().await;
    world.server.set_silent(true);
    let asking = tokio::spawn({
        let admin = admin.clone();
        async move { get(&admin, SLICES).await.is_ok() }
    });
    let held = tokio::time::timeout(Duration::from_millis(100), asking).await;
    assert!(held.is_err());
    world.server.set_silent(false);
    get(&admin, SLICES).await.unwrap();
}

#[tokio::test]
async fn requests_are_recorded_and_can_be_waited_for() {
    let world = World::new(Release::V1_36).await;
    let node = world.node("node1").await;
    let start = Instant::now();
    let posting = tokio::spawn({
        let node = node.clone();
        async move { post(&node, SLICES, &slice("a", "node1")).await.unwrap() }
    });
    world.server.wait_until(|s| s.slices("npu.huawei.com", "node1").len() == 1, DEADLINE).await.unwrap();
    posting.await.unwrap();
    get(&node, &format!("{SLICES}/a")).await.unwrap();
    let writes = world.server.writes_since(start);
    assert_eq!(writes.len(), 1);
    let write = &writes[0];
    assert_eq!((write.verb.as_str(), write.user.as_str(), write.status), ("create", "system:node:node1", Some(201)));
    assert!(write.body_size > 100 && write.path == SLICES);
    let never = world.server.wait_until(|_| false, Duration::from_millis(10)).await.unwrap_err();
    assert!(never.to_string().contains("create"), "{never}");
}

#[tokio::test]
async fn a_dropped_server_is_gone() {
    let server = ApiServer::start(Release::V1_36).await.unwrap();
    let address = server.address();
    drop(server);
    for _ in 0..500 {
        if tokio::net::TcpStream::connect(address).await.is_err() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await; // waits: for the aborted task to let go of the port
    }
    panic!("still listening");
}

#[tokio::test]
async fn allocation_takes_free_whole_devices_of_complete_pools() {
    let world = World::new(Release::V1_36).await;
    let admin = world.admin().await;
    let mut body = slice("a", "node1");
    let named = |name: &str, kind: &str| json!({"name": name, "attributes": {"type": {"string": kind}}});
    let mut bad = named("npu-2", "npu");
    bad["taints"] = json!([{"key": "a", "effect": "NoSchedule"}]);
    body["spec"]["devices"] = json!([named("x", "placeholder"), named("npu-0", "npu"), named("npu-1", "npu"), bad]);
    body["spec"]["pool"]["resourceSliceCount"] = json!(2);
    let mut made = post(&admin, SLICES, &body).await.unwrap();
    let _ = world.server.claim_builder("ml", "c").request("npu", "npu.huawei.com", 1).store();
    assert!(world.server.allocate("ml", "c").is_err(), "the pool is incomplete");
    made["spec"]["pool"]["resourceSliceCount"] = json!(1);
    put(&admin, &format!("{SLICES}/a"), &made).await.unwrap();
    let _ = world
        .server
        .claim_builder("ml", "taken")
        .result(DeviceResult::new("npu", "npu.huawei.com", "node1/npu", "npu-0"))
        .store();
    let claim = world.server.allocate("ml", "c").unwrap();
    assert_eq!(claim["status"]["allocation"]["devices"]["results"][0]["device"], "npu-1");
    let node = world.node("node1").await;
    get(&node, "/apis/resource.k8s.io/v1/namespaces/ml/resourceclaims/c").await.unwrap();
    let _ = world.server.claim_builder("ml", "d").request("npu", "npu.huawei.com", 1).store();
    assert!(world.server.allocate("ml", "d").is_err(), "nothing is free");
}

#[tokio::test]
async fn garbage_collection_takes_slices_of_nodes_that_are_gone() {
    let world = World::new(Release::V1_36).await;
    let admin = world.admin().await;
    let uid = world.server.add_node("node1");
    let mut body = slice("a", "node1");
    body["metadata"]["ownerReferences"] =
        json!([{"apiVersion": "v1", "kind": "Node", "name": "node1", "uid": uid, "controller": true}]);
    post(&admin, SLICES, &body).await.unwrap();
    post(&admin, SLICES, &slice("b", "node1")).await.unwrap();
    assert_eq!(world.server.collect_garbage(), 0);
    world.server.add_node("node1");
    assert_eq!(world.server.collect_garbage(), 1);
    assert_eq!(world.server.kubelet_wipe_driver("node1", "other.example.com"), 0);
    assert_eq!(world.server.kubelet_wipe_driver("node1", "npu.huawei.com"), 1);
}

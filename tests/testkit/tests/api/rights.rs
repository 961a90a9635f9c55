//! Who may do what.

use http::Method;
use serde_json::{Value, json};
use testkit::api::{DeviceResult, How, Release, ServerCertificate, Who};

use super::{SLICES, World, call, client_of, delete, get, post, put, slice};

const CLAIMS: &str = "/apis/resource.k8s.io/v1/namespaces/ml/resourceclaims";

#[tokio::test]
async fn a_node_sees_and_changes_its_own_slices_only() {
    let world = World::new(Release::V1_36).await;
    let (admin, node) = (world.admin().await, world.node("node1").await);
    post(&admin, SLICES, &slice("theirs", "node2")).await.unwrap();
    post(&node, SLICES, &slice("ours", "node1")).await.unwrap();

    let code = |outcome: Result<Value, Box<kube::core::Status>>| outcome.map_or_else(|s| s.code, |_| 200);
    let own = format!("{SLICES}?fieldSelector=spec.nodeName%3Dnode1");
    assert_eq!(code(get(&node, &own).await), 200);
    let more = format!("{SLICES}?fieldSelector=spec.driver%3Dnpu.huawei.com%2Cspec.nodeName%3Dnode1");
    assert_eq!(code(get(&node, &more).await), 200);
    for query in
        ["", "?fieldSelector=spec.nodeName%3Dnode2", "?fieldSelector=spec.driver%3Dnpu.huawei.com", "?watch=true"]
    {
        assert_eq!(code(get(&node, &format!("{SLICES}{query}")).await), 403, "{query}");
        if !query.contains("watch") {
            assert_eq!(code(delete(&node, &format!("{SLICES}{query}")).await), 403, "{query}");
        }
    }
    assert_eq!(code(post(&node, SLICES, &slice("x", "node2")).await), 403);
    let mut everywhere = slice("x", "node1");
    everywhere["spec"]["nodeName"] = Value::Null;
    everywhere["spec"]["allNodes"] = json!(true);
    assert_eq!(code(post(&node, SLICES, &everywhere).await), 403);
    assert_eq!(code(get(&node, &format!("{SLICES}/ours")).await), 200);
    assert_eq!(code(get(&node, &format!("{SLICES}/theirs")).await), 403);
    assert_eq!(code(get(&node, &format!("{SLICES}/absent")).await), 403, "never 404");
    assert_eq!(code(put(&node, &format!("{SLICES}/theirs"), &slice("theirs", "node2")).await), 403);
    assert_eq!(code(put(&node, &format!("{SLICES}/ours"), &slice("ours", "node1")).await), 200);
    let apply = |name: &'static str| {
        let node = node.clone();
        async move {
            let path = format!("{SLICES}/{name}?fieldManager=npu-dra");
            call(&node, Method::PATCH, &path, "application/apply-patch+yaml", &slice(name, "node1")).await
        }
    };
    assert_eq!(code(apply("ours").await), 409, "another manager's fields, for create and PUT left no name");
    assert_eq!(code(apply("absent").await), 403, "an apply that would create needs a slice that the authorizer knows");
    assert_eq!(code(delete(&node, &format!("{SLICES}/ours")).await), 200);
    assert_eq!(code(delete(&node, &own).await), 200);
    assert_eq!(world.server.objects("resourceslices").len(), 1);
}

#[tokio::test]
async fn a_new_slice_is_unknown_to_the_authorizer_for_a_while() {
    let world = World::new(Release::V1_36).await;
    let node = world.node("node1").await;
    world.server.set_graph_lag(std::time::Duration::from_hours(1));
    post(&node, SLICES, &slice("a", "node1")).await.unwrap();
    assert_eq!(get(&node, &format!("{SLICES}/a")).await.unwrap_err().code, 403);
    world.server.set_graph_lag(std::time::Duration::ZERO);
    get(&node, &format!("{SLICES}/a")).await.unwrap();
}

#[tokio::test]
async fn a_node_reads_claims_of_its_own_pods_only() {
    let world = World::new(Release::V1_36).await;
    let node = world.node("node1").await;
    let result =
        DeviceResult::new("npu", "npu.huawei.com", "node1/npu", "npu-0").share("s").consumes("memCapacity", "8Gi");
    let made = world
        .server
        .claim_builder("ml", "mine")
        .request("npu", "npu.huawei.com", 1)
        .result(result)
        .node("node1")
        .store();
    let other = world.server.claim_builder("ml", "other").request("npu", "npu.huawei.com", 1).store();
    assert!(other.get("status").is_none());
    let read = get(&node, &format!("{CLAIMS}/mine")).await.unwrap();
    assert_eq!(read, made);
    let first = &read["status"]["allocation"]["devices"]["results"][0];
    assert_eq!((&first["shareID"], &first["consumedCapacity"]["memCapacity"]), (&json!("s"), &json!("8Gi")));
    for path in [
        format!("{CLAIMS}/other"),
        format!("{CLAIMS}/absent"),
        CLAIMS.to_owned(),
        format!("{CLAIMS}?watch=1"),
        "/apis/resource.k8s.io/v1/resourceclaims".to_owned(),
    ] {
        assert_eq!(get(&node, &path).await.unwrap_err().code, 403, "{path}");
    }
    assert_eq!(put(&node, &format!("{CLAIMS}/mine/status"), &made).await.unwrap_err().code, 403);
    world.server.unbind_claim("node1", "ml", "mine");
    assert_eq!(get(&node, &format!("{CLAIMS}/mine")).await.unwrap_err().code, 403, "the pod is gone");
    world.server.bind_claim("node1", "ml", "mine");
    get(&node, &format!("{CLAIMS}/mine")).await.unwrap();
    assert!(world.server.delete_claim("ml", "mine"));
    assert_eq!(get(&node, &format!("{CLAIMS}/mine")).await.unwrap_err().code, 403, "never 404");
}

#[tokio::test]
async fn a_node_reads_its_own_node_and_writes_events() {
    let world = World::new(Release::V1_36).await;
    let node = world.node("node1").await;
    let uid = world.server.add_node("node1");
    world.server.add_node("node2");
    assert_eq!(get(&node, "/api/v1/nodes/node1").await.unwrap()["metadata"]["uid"], uid.as_str());
    assert_eq!(get(&node, "/api/v1/nodes/node2").await.unwrap_err().code, 403);
    assert_eq!(get(&node, "/apis/resource.k8s.io/v1/deviceclasses").await.unwrap_err().code, 403);
    let event = json!({"metadata": {"generateName": "e."}, "reason": "Prepared", "eventTime": "2026-01-01T00:00:00Z"});
    for path in ["/apis/events.k8s.io/v1/namespaces/default/events", "/api/v1/namespaces/default/events"] {
        let made = post(&node, path, &event).await.unwrap();
        let name = made["metadata"]["name"].as_str().unwrap();
        let patch = json!({"series": {"count": 2}});
        let back = call(&node, Method::PATCH, &format!("{path}/{name}"), "application/merge-patch+json", &patch).await;
        assert_eq!(back.unwrap()["series"]["count"], 2);
    }
    assert_eq!(world.server.events().len(), 2);
    assert_ne!(world.server.add_node("node1"), uid, "a node made anew has another uid");
}

#[tokio::test]
async fn a_service_account_has_the_rights_of_its_role_and_its_nodes_slices() {
    let world = World::new(Release::V1_36).await;
    let who =
        Who::ServiceAccount { namespace: "npu-dra".to_owned(), name: "npu-dra".to_owned(), node: "node1".to_owned() };
    let account = world.client(&who, How::TokenFile).await;
    post(&account, SLICES, &slice("a", "node1")).await.unwrap();
    let refused = post(&account, SLICES, &slice("b", "node2")).await.unwrap_err();
    assert!(refused.code == 422 && refused.message.contains("ValidatingAdmissionPolicy"), "{}", refused.message);
    assert_eq!(get(&account, SLICES).await.unwrap()["items"].as_array().unwrap().len(), 1);
    assert_eq!(get(&account, &format!("{SLICES}/absent")).await.unwrap_err().code, 404);
    let result = DeviceResult::new("npu", "npu.huawei.com", "node1/npu", "npu-0");
    let mut claim = world.server.claim_builder("ml", "c").request("npu", "c", 1).result(result).node("node1").store();
    assert_eq!(get(&account, CLAIMS).await.unwrap_err().code, 403, "one claim at a time");
    get(&account, &format!("{CLAIMS}/c")).await.unwrap();
    assert_eq!(post(&account, CLAIMS, &claim).await.unwrap_err().code, 403);
    claim["status"]["devices"] = json!([{"driver": "npu.huawei.com", "pool": "node1/npu", "device": "npu-0"}]);
    put(&account, &format!("{CLAIMS}/c/status"), &claim).await.unwrap();
    let apply = json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "status": {"devices": [
        {"driver": "npu.huawei.com", "pool": "node1/npu", "device": "npu-0", "conditions": [
            {"type": "Ready", "status": "True", "reason": "Prepared", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"},
        ]},
    ]}});
    let path = format!("{CLAIMS}/c/status?fieldManager=npu-dra&force=true");
    let back = call(&account, Method::PATCH, &path, "application/apply-patch+yaml", &apply).await.unwrap();
    assert_eq!(back["status"]["devices"][0]["conditions"][0]["type"], "Ready");
    assert!(back["status"]["allocation"].is_object(), "the rest of the status stays");
}

#[tokio::test]
async fn bad_credentials_are_unauthorized_and_none_are_forbidden() {
    let world = World::new(Release::V1_36).await;
    for how in [How::ExpiredCertificate, How::StrangerCertificate, How::WrongToken] {
        let client = world.client(&Who::Admin, how).await;
        assert_eq!(get(&client, SLICES).await.unwrap_err().code, 401, "{how:?}");
    }
    let nobody = world.client(&Who::Admin, How::Anonymous).await;
    assert_eq!(get(&nobody, SLICES).await.unwrap_err().code, 403);
    for how in [How::Certificate, How::Token, How::TokenFile] {
        get(&world.client(&Who::Admin, how).await, SLICES).await.unwrap();
    }
    assert_eq!(world.server.requests().last().unwrap().user, "kubernetes-admin");
}

#[tokio::test]
async fn a_wrong_authority_ends_in_a_tls_error_at_the_client() {
    let world = World::new(Release::V1_36).await;
    let wrong = world.client(&Who::Admin, How::WrongCa).await;
    assert!(wrong.apiserver_version().await.is_err());
    let right = world.admin().await;
    right.apiserver_version().await.unwrap();
    for certificate in [ServerCertificate::Expired, ServerCertificate::Stranger] {
        world.server.set_certificate(certificate).unwrap();
        world.server.drop_connections().await.unwrap();
        assert!(right.apiserver_version().await.is_err(), "{certificate:?}");
    }
    world.server.set_certificate(ServerCertificate::Good).unwrap();
    right.apiserver_version().await.unwrap();
}

#[tokio::test]
async fn a_rotated_credential_replaces_the_old_one() {
    let world = World::new(Release::V1_36).await;
    for how in [How::Certificate, How::Token, How::TokenFile] {
        let mut written = world.server.kubeconfig(world.dir.path(), &Who::Node("node1".to_owned()), how).unwrap();
        let before = client_of(&written.path).await;
        before.apiserver_version().await.unwrap();
        world.server.rotate(&mut written).unwrap();
        assert!(before.apiserver_version().await.is_err(), "{how:?}: the old one");
        client_of(&written.path).await.apiserver_version().await.unwrap();
        world.server.expire(&written);
        assert!(client_of(&written.path).await.apiserver_version().await.is_err(), "{how:?}: expired");
    }
}

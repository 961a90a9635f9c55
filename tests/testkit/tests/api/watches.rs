//! Lists, watches, and what happens to them.

use std::{pin::pin, time::Duration};

use futures::{StreamExt as _, TryStreamExt as _};
use http::Request;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::{
    Api, Client, ResourceExt as _,
    api::{WatchEvent, WatchParams},
    runtime::watcher::{self, watcher},
};
use serde_json::json;
use testkit::api::{GoneAs, Release};

use super::{DEADLINE, SLICES, World, delete, get, post, put, slice};

async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(DEADLINE, future).await.expect("nothing came in time")
}

fn code_of(event: Option<Result<WatchEvent<ResourceSlice>, kube::Error>>) -> u16 {
    match event {
        Some(Ok(WatchEvent::Error(status)) | Err(kube::Error::Api(status))) => status.code,
        other => panic!("no error: {other:?}"),
    }
}

async fn version(client: &Client) -> String {
    get(client, SLICES).await.unwrap()["metadata"]["resourceVersion"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn a_watch_sees_what_its_selector_lets_through() {
    let world = World::new(Release::V1_36).await;
    let (admin, node) = (world.admin().await, world.node("node1").await);
    let start = version(&admin).await;
    let api: Api<ResourceSlice> = Api::all(node);
    let params = WatchParams::default().fields("spec.nodeName=node1");
    let mut events = pin!(api.watch(&params, &start).await.unwrap());
    post(&admin, SLICES, &slice("theirs", "node2")).await.unwrap();
    let mut made = post(&admin, SLICES, &slice("ours", "node1")).await.unwrap();
    made["spec"]["pool"]["generation"] = json!(2);
    put(&admin, &format!("{SLICES}/ours"), &made).await.unwrap();
    assert_eq!(world.server.kubelet_wipe("node1"), 1);
    let mut seen = Vec::new();
    for _ in 0..3 {
        seen.push(match within(events.next()).await.unwrap().unwrap() {
            WatchEvent::Added(s) => format!("added {}", s.name_any()),
            WatchEvent::Modified(s) => format!("modified {}", s.name_any()),
            WatchEvent::Deleted(s) => format!("deleted {}", s.name_any()),
            other => panic!("{other:?}"),
        });
    }
    assert_eq!(seen, ["added ours", "modified ours", "deleted ours"]);
    assert_eq!(world.server.with_state(|s| s.watches("resourceslices")), 1);
}

#[tokio::test]
async fn an_idle_watch_gets_bookmarks() {
    let world = World::new(Release::V1_36).await;
    world.server.set_bookmark_interval(Duration::from_millis(20));
    let api: Api<ResourceSlice> = Api::all(world.admin().await);
    let mut events = pin!(api.watch(&WatchParams::default(), "0").await.unwrap());
    let event = within(events.next()).await.unwrap().unwrap();
    assert!(matches!(event, WatchEvent::Bookmark(b) if !b.metadata.resource_version.is_empty()));
}

#[tokio::test]
async fn a_version_that_is_too_old_is_gone_as_status_or_as_event() {
    let world = World::new(Release::V1_36).await;
    let admin = world.admin().await;
    let old = version(&admin).await;
    let api: Api<ResourceSlice> = Api::all(admin.clone());
    let mut open = pin!(api.watch(&WatchParams::default(), &old).await.unwrap());
    world.server.expire_versions();
    assert_eq!(code_of(within(open.next()).await), 410, "the open watch");
    let mut late = pin!(api.watch(&WatchParams::default(), &old).await.unwrap());
    assert_eq!(code_of(within(late.next()).await), 410, "as an event");
    world.server.set_gone_as(GoneAs::Status);
    let refused = match api.watch(&WatchParams::default(), &old).await {
        Ok(stream) => code_of(Box::pin(stream).next().await),
        Err(kube::Error::Api(status)) => status.code,
        Err(other) => panic!("{other}"),
    };
    assert_eq!(refused, 410, "as a status");
    let fresh = version(&admin).await;
    let mut again = pin!(api.watch(&WatchParams::default(), &fresh).await.unwrap());
    post(&admin, SLICES, &slice("a", "node1")).await.unwrap();
    assert!(matches!(within(again.next()).await, Some(Ok(WatchEvent::Added(_)))));
}

#[tokio::test]
async fn the_clients_watcher_survives_cuts_and_expiry() {
    let world = World::new(Release::V1_36).await;
    let (admin, node) = (world.admin().await, world.node("node1").await);
    let api: Api<ResourceSlice> = Api::all(node);
    let config = watcher::Config::default().fields("spec.nodeName=node1");
    let mut applied = pin!(watcher(api, config).filter_map(async |e| match e {
        Ok(watcher::Event::Apply(s) | watcher::Event::InitApply(s)) => Some(s.name_any()),
        _ => None,
    }));
    let cuts: [fn(&World); 3] = [|_| {}, |w| w.server.cut_watches(), |w| w.server.expire_versions()];
    for (index, cut) in cuts.into_iter().enumerate() {
        cut(&world);
        let name = format!("s{index}");
        post(&admin, SLICES, &slice(&name, "node1")).await.unwrap();
        while within(applied.next()).await.unwrap() != name {}
    }
    world.server.drop_connections().await.unwrap();
    post(&admin, SLICES, &slice("last", "node1")).await.unwrap();
    while within(applied.next()).await.unwrap() != "last" {}
}

#[tokio::test]
async fn initial_events_are_sent_when_asked_for() {
    let world = World::new(Release::V1_36).await;
    let admin = world.admin().await;
    post(&admin, SLICES, &slice("a", "node1")).await.unwrap();
    let path =
        format!("{SLICES}?watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true");
    let request = Request::get(path).body(Vec::new()).unwrap();
    let events: Vec<WatchEvent<ResourceSlice>> =
        within(admin.request_events(request).await.unwrap().take(2).try_collect()).await.unwrap();
    assert!(matches!(&events[0], WatchEvent::Added(s) if s.name_any() == "a"));
    assert!(
        matches!(&events[1], WatchEvent::Bookmark(b) if b.metadata.annotations.contains_key("k8s.io/initial-events-end"))
    );
}

#[tokio::test]
async fn field_selectors_confine_lists_and_deletes() {
    let world = World::new(Release::V1_36).await;
    let admin = world.admin().await;
    for (name, node) in [("a", "node1"), ("b", "node1"), ("c", "node2")] {
        post(&admin, SLICES, &slice(name, node)).await.unwrap();
    }
    let names = |selector: &'static str| {
        let admin = admin.clone();
        async move {
            let list = get(&admin, &format!("{SLICES}?fieldSelector={selector}")).await.unwrap();
            list["items"]
                .as_array()
                .unwrap()
                .iter()
                .map(|s| s["metadata"]["name"].as_str().unwrap().to_owned())
                .collect::<String>()
        }
    };
    assert_eq!(names("spec.nodeName=node1").await, "ab");
    assert_eq!(names("metadata.name=c").await, "c");
    assert_eq!(names("spec.driver=npu.huawei.com,spec.nodeName!=node1").await, "c");
    assert_eq!(get(&admin, &format!("{SLICES}?fieldSelector=spec.pool.name=x")).await.unwrap_err().code, 400);
    delete(&admin, &format!("{SLICES}?fieldSelector=spec.driver=other,spec.nodeName=node1")).await.unwrap();
    assert_eq!(world.server.objects("resourceslices").len(), 3);
    delete(&admin, &format!("{SLICES}?fieldSelector=spec.nodeName=node1")).await.unwrap();
    assert_eq!(names("").await, "c");
    world.server.upgrade(Release::V1_37);
    assert_eq!(names("spec.pool.name=node2/npu").await, "c");
}

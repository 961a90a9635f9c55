//! The stand-in against a driver that does no more than register: does it refuse what a real kubelet refuses?

use std::path::{Path, PathBuf};
use std::time::Duration;

use npu_proto::dra_v1::dra_plugin_server::{DraPlugin, DraPluginServer};
use npu_proto::dra_v1::{
    NodePrepareResourceResponse, NodePrepareResourcesRequest, NodePrepareResourcesResponse,
    NodeUnprepareResourcesRequest, NodeUnprepareResourcesResponse,
};
use npu_proto::registration::registration_server::{Registration, RegistrationServer};
use npu_proto::registration::{InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse};
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status};

use super::{Kubelet, Options, Task, What, claim, raw};

const SOON: Duration = Duration::from_secs(10);

#[derive(Clone)]
struct Driver {
    endpoint: PathBuf,
    versions: Vec<String>,
}

#[tonic::async_trait]
impl Registration for Driver {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: "DRAPlugin".into(),
            name: "test.example".into(),
            endpoint: self.endpoint.display().to_string(),
            supported_versions: self.versions.clone(),
        }))
    }

    async fn notify_registration_status(
        &self,
        _: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

#[tonic::async_trait]
impl DraPlugin for Driver {
    /// Answers for one claim more than it was asked for when it is asked for two, and skips all when asked for three.
    async fn node_prepare_resources(
        &self,
        request: Request<NodePrepareResourcesRequest>,
    ) -> Result<Response<NodePrepareResourcesResponse>, Status> {
        let mut claims = request.into_inner().claims;
        match claims.len() {
            2 => claims.push(claim("other", "other", "other")),
            3 => claims.clear(),
            _ => {}
        }
        let entries = claims.into_iter().map(|claim| {
            let error = if claim.name == "bad" { "it is bad".into() } else { String::new() };
            (claim.uid, NodePrepareResourceResponse { devices: Vec::new(), error })
        });
        Ok(Response::new(NodePrepareResourcesResponse { claims: entries.collect() }))
    }

    async fn node_unprepare_resources(
        &self,
        _: Request<NodeUnprepareResourcesRequest>,
    ) -> Result<Response<NodeUnprepareResourcesResponse>, Status> {
        std::future::pending().await
    }
}

/// Serves a driver whose registration socket has this name.
fn serve(dir: &Path, name: &str, endpoint: &str, versions: &[&str]) -> (PathBuf, Task) {
    let socket = dir.join(name);
    let driver = Driver {
        endpoint: dir.parent().unwrap().join(endpoint),
        versions: versions.iter().map(ToString::to_string).collect(),
    };
    let endpoint_listener =
        (!driver.endpoint.exists()).then(|| UnixListenerStream::new(UnixListener::bind(&driver.endpoint).unwrap()));
    let listener = UnixListenerStream::new(UnixListener::bind(&socket).unwrap());
    let task = tokio::spawn(async move {
        let registration = tonic::transport::Server::builder().add_service(RegistrationServer::new(driver.clone()));
        let dra = tonic::transport::Server::builder().add_service(DraPluginServer::new(driver));
        let dra = async {
            match endpoint_listener {
                Some(listener) => dra.serve_with_incoming(listener).await,
                None => Ok(()),
            }
        };
        let _ = tokio::join!(registration.serve_with_incoming(listener), dra);
    });
    (socket, Task(Some(task)))
}

fn directory() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let registry = dir.path().join("plugins_registry");
    std::fs::create_dir(&registry).unwrap();
    (dir, registry)
}

fn refused(entry: &super::Entry, words: &str) -> bool {
    matches!(&entry.what, What::Refused(text) if text.contains(words))
}

/// This is why our socket has an `@` in its name.
#[tokio::test]
async fn a_socket_without_an_at_sign_never_registers() {
    let (_dir, registry) = directory();
    let kubelet = Kubelet::start(&registry).unwrap();
    let (_socket, _driver) = serve(&registry, "test.example-reg.sock", "dra.sock", &["v1.DRAPlugin"]);
    kubelet.wait_entry(SOON, |entry| refused(entry, "Reset(1)")).await.unwrap();
    assert!(kubelet.plugin("test.example").is_none());
}

#[tokio::test]
async fn a_socket_with_an_at_sign_registers_and_goes_with_its_name() {
    let (_dir, registry) = directory();
    let kubelet = Kubelet::start(&registry).unwrap();
    let (socket, driver) = serve(&registry, "test.example@reg.sock", "dra@npu.sock", &["v1.DRAPlugin"]);
    let plugin = kubelet.wait_registered("test.example", SOON).await.unwrap();
    assert!(plugin.endpoint.ends_with("dra@npu.sock"));

    std::fs::remove_file(&socket).unwrap();
    kubelet.wait_deregistered("test.example", SOON).await.unwrap();
    drop(driver);
    std::fs::remove_file(&plugin.endpoint).unwrap();
    let (_socket, _driver) = serve(&registry, "test.example@reg.sock", "dra@npu.sock", &["v1.DRAPlugin"]);
    kubelet.wait_registered("test.example", SOON).await.unwrap();
}

#[tokio::test]
async fn a_socket_that_is_there_already_is_found_at_start_and_after_a_restart() {
    let (_dir, registry) = directory();
    let (_socket, _driver) = serve(&registry, "test.example@reg.sock", "dra@npu.sock", &["v1.DRAPlugin"]);
    let mut kubelet = Kubelet::start(&registry).unwrap();
    kubelet.wait_registered("test.example", SOON).await.unwrap();
    kubelet.restart().unwrap();
    kubelet.wait_registered("test.example", SOON).await.unwrap();
    let registered = kubelet.log().iter().filter(|entry| matches!(entry.what, What::Registered(_))).count();
    assert_eq!(registered, 2);
}

#[tokio::test]
async fn the_first_known_version_in_the_plugins_order_is_taken() {
    let (_dir, registry) = directory();
    let kubelet = Kubelet::start(&registry).unwrap();
    let versions = ["v9.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAPlugin"];
    let (_socket, _driver) = serve(&registry, "test.example@reg.sock", "dra@npu.sock", &versions);
    let plugin = kubelet.wait_registered("test.example", SOON).await.unwrap();
    assert_eq!(plugin.client.version().as_str(), "v1beta1.DRAPlugin");
}

#[tokio::test]
async fn words_that_are_no_versions_and_an_endpoint_used_twice_are_refused() {
    let (_dir, registry) = directory();
    let options = Options { first_back_off: Duration::from_millis(50), ..Options::default() };
    let kubelet = Kubelet::start_with(&registry, options).unwrap();
    let (_one, _first) = serve(&registry, "a@reg.sock", "dra@npu.sock", &["v1", "1.0.0"]);
    kubelet.wait_entry(SOON, |entry| refused(entry, "is known to this kubelet")).await.unwrap();

    let (_two, _second) = serve(&registry, "b@reg.sock", "dra@npu.sock", &["v1.DRAPlugin"]);
    kubelet.wait_registered("test.example", SOON).await.unwrap();
    let (_three, _third) = serve(&registry, "c@reg.sock", "dra@npu.sock", &["v1.DRAPlugin"]);
    kubelet.wait_entry(SOON, |entry| refused(entry, "already registered")).await.unwrap();
    assert_eq!(kubelet.instances("test.example").len(), 1);
}

#[tokio::test]
async fn a_stale_socket_is_tried_again() {
    let (_dir, registry) = directory();
    drop(std::os::unix::net::UnixListener::bind(registry.join("stale@reg.sock")).unwrap());
    let options = Options { first_back_off: Duration::from_millis(20), ..Options::default() };
    let kubelet = Kubelet::start_with(&registry, options).unwrap();
    let twice = |kubelet: &Kubelet| kubelet.log().iter().filter(|entry| refused(entry, "does not answer")).count() >= 2;
    kubelet.wait_entry(SOON, |_| twice(&kubelet)).await.unwrap();
}

#[tokio::test]
async fn the_answer_to_other_authorities_can_be_seen() {
    let (_dir, registry) = directory();
    let (socket, _driver) = serve(&registry, "test.example-reg.sock", "dra@npu.sock", &["v1.DRAPlugin"]);
    let good = raw::get_info_with(&socket, "localhost", SOON).await.unwrap();
    assert!(matches!(good, raw::Answer::Response { status: 200, info: Some(info) } if info.name == "test.example"));
    let bad = raw::get_info(&socket, SOON).await.unwrap();
    assert_eq!(bad, raw::Answer::Reset(1));
}

#[tokio::test]
async fn kubelets_bookkeeping_finds_entries_too_many_and_too_few() {
    let (_dir, registry) = directory();
    let kubelet = Kubelet::start(&registry).unwrap();
    let (_socket, _driver) = serve(&registry, "test.example@reg.sock", "dra@npu.sock", &["v1.DRAPlugin"]);
    let client = kubelet.wait_registered("test.example", SOON).await.unwrap().client;
    let claims = [claim("n", "a", "1"), claim("n", "b", "2"), claim("n", "c", "3")];
    assert_eq!(client.prepare_one(&claims[0]).await, Ok(Vec::new()));
    assert_eq!(client.prepare_one(&claim("n", "bad", "4")).await, Err("it is bad".into()));
    assert!(client.prepare(&claims[..2]).await.unwrap_err().to_string().contains("not asked for"));
    assert!(client.prepare(&claims).await.unwrap_err().to_string().contains("skipped 3 claims"));
    let late = client.unprepare_within(&claims, Duration::from_millis(100)).await.unwrap_err();
    assert!(late.to_string().contains("DeadlineExceeded") || late.to_string().contains("Cancelled"), "{late}");
}

//! The health port: HTTP/1 and gRPC on one listener, answered over the real sockets.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use npu_dra::http;
use npu_proto::grpc_health::HealthCheckRequest;
use npu_proto::grpc_health::health_check_response::ServingStatus;
use npu_proto::grpc_health::health_client::HealthClient;
use prometheus_client::registry::Registry;
use testkit::kubelet::client::{DraVersion, claim};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};

use crate::kubelet::{Directories, Driver};

const SOON: Duration = Duration::from_secs(10);

/// A health port in front of a driver, both gone at the end of [`Port::stop`].
struct Port {
    address: SocketAddr,
    shutdown: CancellationToken,
    task: JoinHandle<()>,
}

impl Port {
    async fn start(driver: &Driver, registry: Registry) -> Self {
        let settings = http::Settings {
            address: "127.0.0.1:0".parse().unwrap(),
            endpoint: driver.status.sockets().endpoint().into(),
            registration: driver.status.sockets().registration().into(),
            timeout: Duration::from_secs(5),
        };
        let bound = http::bind(settings).await.unwrap();
        let (address, shutdown) = (bound.address(), CancellationToken::new());
        assert_ne!(address.port(), 0);
        let task = tokio::spawn(bound.serve(Arc::new(registry), shutdown.clone()));
        Self { address, shutdown, task }
    }

    /// Head and body of an answer.
    async fn get(&self, path: &str) -> (String, String) {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        tokio::time::timeout(SOON, stream.read_to_string(&mut answer)).await.unwrap().unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.to_owned(), body.to_owned())
    }

    async fn client(&self) -> HealthClient<Channel> {
        let endpoint = Endpoint::try_from(format!("http://{}", self.address)).unwrap();
        HealthClient::new(endpoint.connect().await.unwrap())
    }

    async fn check(&self, service: &str) -> Result<ServingStatus, tonic::Status> {
        let mut client = self.client().await;
        let answer = client.check(HealthCheckRequest { service: service.into() }).await?;
        Ok(answer.into_inner().status())
    }

    async fn stop(self) {
        self.shutdown.cancel();
        tokio::time::timeout(SOON, self.task).await.unwrap().unwrap();
        assert!(TcpStream::connect(self.address).await.is_err());
    }
}

#[tokio::test]
async fn readiness_goes_over_kubelets_sockets() {
    let directories = Directories::new();
    let driver = Driver::start(&directories, &mut Registry::default());
    let port = Port::start(&driver, Registry::default()).await;
    assert!(port.get("/healthz").await.0.starts_with("HTTP/1.1 200 "));
    assert!(port.get("/readyz").await.0.starts_with("HTTP/1.1 200 "));
    assert_eq!(port.check("").await.unwrap(), ServingStatus::Serving);
    assert_eq!(port.check("liveness").await.unwrap(), ServingStatus::Serving);
    assert_eq!(port.check("other").await.unwrap_err().code(), tonic::Code::NotFound);
    assert_eq!(driver.status.last_call(), None, "a probe is not kubelet");

    driver.stop().await;
    assert!(port.get("/healthz").await.0.starts_with("HTTP/1.1 200 "));
    let (head, body) = port.get("/readyz").await;
    assert!(head.starts_with("HTTP/1.1 503 "), "{head}");
    assert!(body.contains("dra@npu.sock"), "{body}");
    assert_eq!(port.check("").await.unwrap(), ServingStatus::NotServing);

    // A driver that comes back is ready again over the same probe.
    let driver = Driver::start(&directories, &mut Registry::default());
    assert!(port.get("/readyz").await.0.starts_with("HTTP/1.1 200 "));
    driver.stop().await;
    port.stop().await;
}

#[tokio::test]
async fn a_watch_of_the_health_tells_the_state_at_once_and_ends_at_stop() {
    let directories = Directories::new();
    let driver = Driver::start(&directories, &mut Registry::default());
    let port = Port::start(&driver, Registry::default()).await;
    let mut client = port.client().await;
    for (service, status) in [("", ServingStatus::Serving), ("other", ServingStatus::ServiceUnknown)] {
        let mut stream = client.watch(HealthCheckRequest { service: service.into() }).await.unwrap().into_inner();
        let first = tokio::time::timeout(SOON, stream.message()).await.unwrap().unwrap().unwrap();
        assert_eq!(first.status(), status);
    }
    port.stop().await;
    driver.stop().await;
}

#[tokio::test]
async fn the_metrics_hold_kubelets_calls() {
    let directories = Directories::new();
    let mut registry = Registry::with_prefix("npu_dra");
    let driver = Driver::start(&directories, &mut registry);
    let client = driver.client(DraVersion::V1).await;
    client.prepare_one(&claim("ns", "good", "uid-good")).await.unwrap();
    client.prepare_one(&claim("ns", "bad", "uid-bad")).await.unwrap_err();
    client.prepare_one(&claim("ns", "panic", "uid-panic")).await.unwrap_err();
    let port = Port::start(&driver, registry).await;
    let (head, body) = port.get("/metrics").await;
    assert!(head.to_lowercase().contains("content-type: application/openmetrics-text; version=1.0.0"), "{head}");
    for line in [
        "npu_dra_kubelet_calls_total{method=\"prepare\",result=\"ok\"} 1",
        "npu_dra_kubelet_calls_total{method=\"prepare\",result=\"refused\"} 2",
        "npu_dra_kubelet_call_duration_seconds_count{method=\"prepare\"} 3",
        "npu_dra_kubelet_panics_total 1",
        "npu_dra_kubelet_registered 0",
        "npu_dra_kubelet_last_call_timestamp_seconds ",
        "# EOF",
    ] {
        assert!(body.contains(line), "{line} is not in\n{body}");
    }
    port.stop().await;
    driver.stop().await;
}

#[tokio::test]
async fn a_port_in_use_is_named() {
    let taken = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let settings = http::Settings {
        address: taken.local_addr().unwrap(),
        endpoint: "/nowhere".into(),
        registration: "/nowhere".into(),
        timeout: SOON,
    };
    let error = http::bind(settings).await.unwrap_err().to_string();
    assert!(
        error.contains(&taken.local_addr().unwrap().to_string()) && error.contains("--healthcheck-port"),
        "{error}"
    );
}

#[tokio::test]
async fn connections_that_say_nothing_do_not_stop_the_port() {
    let directories = Directories::new();
    let driver = Driver::start(&directories, &mut Registry::default());
    let port = Port::start(&driver, Registry::default()).await;
    let mut silent = Vec::new();
    for _ in 0..20 {
        silent.push(TcpStream::connect(port.address).await.unwrap());
    }
    assert!(port.get("/healthz").await.0.starts_with("HTTP/1.1 200 "));
    port.stop().await;
    driver.stop().await;
}

//! gRPC's health check, answered by the readiness check.

use std::pin::Pin;
use std::time::Duration;

use futures::{Stream, stream};
use npu_proto::grpc_health::health_check_response::ServingStatus;
use npu_proto::grpc_health::health_server::Health;
use npu_proto::grpc_health::{HealthCheckRequest, HealthCheckResponse};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::probe::Probe;

/// The names that a probe may ask for; they all mean the driver as a whole.
const SERVICES: [&str; 3] = ["", "liveness", "readiness"];
/// How often a `Watch` looks again.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// Serves `grpc.health.v1.Health`.
#[derive(Clone)]
pub(super) struct Service {
    pub(super) probe: Probe,
    pub(super) stop: CancellationToken,
}

impl Service {
    async fn status(&self) -> ServingStatus {
        match self.probe.check().await {
            Ok(()) => ServingStatus::Serving,
            Err(error) => {
                tracing::warn!(error = %error, "the health check failed");
                ServingStatus::NotServing
            }
        }
    }
}

fn response(status: ServingStatus) -> HealthCheckResponse {
    HealthCheckResponse { status: status.into() }
}

#[tonic::async_trait]
impl Health for Service {
    async fn check(&self, request: Request<HealthCheckRequest>) -> Result<Response<HealthCheckResponse>, Status> {
        let service = request.into_inner().service;
        if !SERVICES.contains(&service.as_str()) {
            return Err(Status::not_found(format!(
                "no service {service:?}: ask for \"\", \"liveness\" or \"readiness\""
            )));
        }
        Ok(Response::new(response(self.status().await)))
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<HealthCheckResponse, Status>> + Send>>;

    async fn watch(&self, request: Request<HealthCheckRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let known = SERVICES.contains(&request.into_inner().service.as_str());
        let stream = stream::unfold((self.clone(), None), move |(service, last)| async move {
            let stop = service.stop.clone();
            let next = async {
                let mut beat = tokio::time::interval(LOOK_AGAIN);
                loop {
                    beat.tick().await;
                    // The protocol wants a watch of an unknown service to stay open: it may come to be known.
                    let now = if known { service.status().await } else { ServingStatus::ServiceUnknown };
                    if last != Some(now) {
                        return now;
                    }
                }
            };
            let now = stop.run_until_cancelled(next).await?;
            Some((Ok(response(now)), (service, Some(now))))
        });
        Ok(Response::new(Box::pin(stream)))
    }
}

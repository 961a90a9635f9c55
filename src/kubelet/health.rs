//! The health streams: the whole list at once, at every change, and as a heartbeat.
//!
//! Kubelet takes a device's health for unknown when it has heard nothing for the timeout that comes with the list. The
//! timeout is three heartbeats, so that one late message does no harm.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, StreamExt as _, stream};
use npu_proto::{health_v1, health_v1alpha1};
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::watch;
use tokio::time::Interval;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use crate::domain::health::{Condition, DeviceHealth};

/// The longest text that kubelet keeps, in bytes.
const LONGEST_MESSAGE: usize = 1024;

/// Serves `DRAResourceHealth`, v1 and v1alpha1.
#[derive(Clone)]
pub(super) struct Health {
    pub(super) list: watch::Receiver<Arc<Vec<DeviceHealth>>>,
    pub(super) heartbeat: Duration,
    pub(super) stop: CancellationToken,
    pub(super) streams: Gauge,
}

struct Watching {
    list: watch::Receiver<Arc<Vec<DeviceHealth>>>,
    beat: Interval,
    stop: CancellationToken,
    _open: Open,
}

/// Counts a stream while it lives.
struct Open(Gauge);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.dec();
    }
}

impl Health {
    /// Complete lists until the daemon stops or the reader goes away. A slow reader misses lists, never the last one.
    fn lists(&self) -> impl Stream<Item = Arc<Vec<DeviceHealth>>> + Send + use<> {
        self.streams.inc();
        let watching = Watching {
            list: self.list.clone(),
            beat: tokio::time::interval(self.heartbeat),
            stop: self.stop.clone(),
            _open: Open(self.streams.clone()),
        };
        stream::unfold(watching, |mut watching| async move {
            // The first beat is at once, and with it the first list.
            tokio::select! {
                biased;
                () = watching.stop.cancelled() => return None,
                changed = watching.list.changed() => changed.ok()?,
                _ = watching.beat.tick() => {}
            }
            watching.beat.reset();
            let list = Arc::clone(&watching.list.borrow_and_update());
            Some((list, watching))
        })
    }

    fn timeout_seconds(&self) -> i64 {
        let seconds = (self.heartbeat * 3).as_millis().div_ceil(1000).max(1);
        i64::try_from(seconds).unwrap_or(i64::MAX)
    }
}

/// At most as long as kubelet keeps, cut between characters.
fn short(message: &str) -> String {
    let end = (0..=message.len().min(LONGEST_MESSAGE)).rev().find(|end| message.is_char_boundary(*end)).unwrap_or(0);
    message[..end].to_owned()
}

/// Implements the service of one package: the messages of both are the same, their types are not.
macro_rules! health_service {
    ($package:ident) => {
        #[tonic::async_trait]
        impl $package::dra_resource_health_server::DraResourceHealth for Health {
            type NodeWatchResourcesStream =
                Pin<Box<dyn Stream<Item = Result<$package::NodeWatchResourcesResponse, Status>> + Send>>;

            async fn node_watch_resources(
                &self,
                _: Request<$package::NodeWatchResourcesRequest>,
            ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
                let timeout = self.timeout_seconds();
                let message = move |list: Arc<Vec<DeviceHealth>>| $package::NodeWatchResourcesResponse {
                    devices: list
                        .iter()
                        .map(|device| $package::DeviceHealth {
                            device: Some($package::DeviceIdentifier {
                                pool_name: device.pool.clone(),
                                device_name: device.device.clone(),
                            }),
                            health: match device.condition {
                                Condition::Ok | Condition::Warn => $package::HealthStatus::Healthy,
                                Condition::Unknown => $package::HealthStatus::Unknown,
                                Condition::Tainted | Condition::Fatal | Condition::Lost => {
                                    $package::HealthStatus::Unhealthy
                                }
                            }
                            .into(),
                            last_updated_time: device.since.as_second(),
                            health_check_timeout_seconds: timeout,
                            message: short(&device.message),
                        })
                        .collect(),
                };
                tracing::debug!("kubelet opened a health stream");
                Ok(Response::new(Box::pin(self.lists().map(move |list| Ok(message(list))))))
            }
        }
    };
}

health_service!(health_v1);
health_service!(health_v1alpha1);

#[cfg(test)]
mod tests {
    use super::short;

    #[test]
    fn a_long_message_is_cut_between_characters() {
        assert_eq!(short("fine"), "fine");
        assert_eq!(short(&"x".repeat(2000)).len(), 1024);
        assert_eq!(short(&"ä".repeat(2000)).len(), 1024);
        assert_eq!(short(&format!("x{}", "ä".repeat(2000))).len(), 1023);
    }
}

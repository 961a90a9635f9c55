//! Puts the modules of the layers below behind the traits of the engine and the admin service.

use std::{error::Error, fmt};

use futures::{FutureExt as _, StreamExt as _, future::BoxFuture, stream::BoxStream};
use tokio::sync::watch;
use tokio_stream::wrappers::WatchStream;

use crate::{
    admin, cdi,
    cluster::{self, Cluster},
    domain::{
        claim::{AllocatedClaim, ClaimRef, ClaimUid},
        model::Kept,
        node::{HoldKind, NodeMemory},
        notice::Notice,
        plan::{FoundFile, Node, Step},
        refusal::Refusal,
        slice::Pool,
        vnpu::VnpuReading,
    },
    engine::{Api, Disk, Engine, Snapshot},
    kubelet, store,
};

impl Api for Cluster {
    fn claim(&self, claim: ClaimRef) -> BoxFuture<'static, Result<AllocatedClaim, Refusal>> {
        let cluster = self.clone();
        async move { Self::claim(&cluster, &claim).await }.boxed()
    }

    fn publish(&self, pool: Pool) {
        Self::publish(self, pool);
    }

    fn keeps_taints(&self) -> bool {
        self.gates().borrow().taints != cluster::Gate::Off
    }

    fn event(&self, notice: &Notice) {
        Self::event(self, notice);
    }

    fn kept(&self) -> BoxStream<'static, Kept> {
        WatchStream::new(self.gates()).map(|gates| kept(&gates)).boxed()
    }
}

/// What the probed gates mean for the slicing models.
fn kept(gates: &cluster::Gates) -> Kept {
    let known = |gate| match gate {
        cluster::Gate::On => Some(true),
        cluster::Gate::Off => Some(false),
        cluster::Gate::Unknown => None,
    };
    Kept {
        consumable: known(gates.consumable_capacity),
        partitionable: known(gates.partitionable_devices),
        is_1_34: gates.server.as_ref().is_some_and(|server| !server.since(35)),
    }
}

/// All that is durable: records, the node's memory, CDI files.
#[derive(Debug)]
pub(super) struct Files {
    pub(super) store: store::Store,
    pub(super) cdi: cdi::Cdi,
}

impl Disk for Files {
    fn apply(&self, step: &Step) -> Result<(), String> {
        match step {
            Step::Write(record) => self.store.write(record).map_err(text),
            Step::Inject(injection) => self.cdi.ensure(injection).map(drop).map_err(text),
            Step::Withdraw(uid) => self.cdi.remove(uid).map(drop).map_err(text),
            Step::Forget(uid) => self.store.remove(uid).map_err(text),
        }
    }

    fn settle(&self, steps: &[Step]) -> Result<(), String> {
        let of = |records: bool| steps.iter().any(|step| step.is_of_record() == records);
        let records = if of(true) { self.store.settle().map_err(text) } else { Ok(()) };
        let files = if of(false) { self.cdi.settle().map_err(text) } else { Ok(()) };
        records.and(files)
    }

    fn has_file(&self, uid: &ClaimUid) -> Result<bool, String> {
        self.cdi.exists(uid).map_err(text)
    }

    fn files(&self) -> Result<Vec<FoundFile>, String> {
        self.cdi.list().map_err(text)
    }

    fn write_node(&self, memory: &NodeMemory) -> Result<(), String> {
        self.store.write_node(memory).map_err(text)
    }
}

/// An error with all its causes.
fn text(error: impl Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

/// What the admin service shows.
pub(super) struct View {
    pub(super) engine: Engine,
    pub(super) kubelet: kubelet::Status,
    pub(super) cluster: Cluster,
    pub(super) node: Node,
    pub(super) node_name: String,
}

impl fmt::Debug for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("View").field("node", &self.node).finish_non_exhaustive()
    }
}

impl admin::Sources for View {
    fn snapshot(&self) -> Snapshot {
        self.engine.snapshot()
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.engine.changes()
    }

    fn release(&self, uid: ClaimUid) -> BoxFuture<'static, Result<(), Refusal>> {
        self.engine.release(uid)
    }

    fn create_vnpu(&self, device: String, template: String) -> BoxFuture<'static, Result<VnpuReading, Refusal>> {
        self.engine.operator_create(device, template)
    }

    fn destroy_vnpu(&self, id: u32, force: bool) -> BoxFuture<'static, Result<(), Refusal>> {
        self.engine.operator_destroy(id, force)
    }

    fn hold(
        &self,
        device: String,
        wanted: Option<(HoldKind, String)>,
    ) -> BoxFuture<'static, Result<Vec<ClaimRef>, Refusal>> {
        self.engine.hold(device, wanted)
    }

    fn suspend(&self, reason: String) -> BoxFuture<'static, Result<(), Refusal>> {
        self.engine.suspend(reason)
    }

    fn resume(&self) -> BoxFuture<'static, Result<(), Refusal>> {
        self.engine.resume()
    }

    fn kubelet(&self) -> admin::Kubelet {
        let registration = self.kubelet.registration().borrow().clone();
        admin::Kubelet {
            since: registration.verdict.as_ref().map(|verdict| verdict.at),
            refused: registration.verdict.and_then(|verdict| verdict.refused),
            registrations: registration.times,
            versions: kubelet::SUPPORTED_VERSIONS.map(str::to_owned).to_vec(),
            last_call: self.kubelet.last_call(),
        }
    }

    fn cluster(&self) -> admin::Cluster {
        cluster_view(self.cluster.status(), &self.node_name, &self.node)
    }
}

/// How the API server and our slices are, as `npuctl` shows them.
fn cluster_view(status: cluster::Status, node_name: &str, node: &Node) -> admin::Cluster {
    let publishing = status.publishing;
    let number = |generation: Option<i64>| generation.and_then(|number| u64::try_from(number).ok());
    let failed = status.credentials.problem.is_some() || publishing.problem.is_some();
    let mut problems: Vec<String> = Vec::new();
    problems.extend(status.credentials.problem);
    problems.extend(publishing.problem);
    // These leave the rest in working order.
    problems.extend(publishing.dropped);
    problems.extend(publishing.left_out);
    problems.extend(status.forbidden.into_iter().map(|(what, why)| format!("not permitted to {what}: {why}")));
    let slices = publishing.slices.iter().zip(0..).map(|(slice, index)| admin::Slice {
        name: slice.name.clone(),
        index,
        devices: u32::try_from(slice.devices).unwrap_or(u32::MAX),
        generation: number(slice.generation),
        state: match (&slice.problem, slice.generation) {
            (Some(_), _) => "failed",
            (None, Some(_)) => "published",
            (None, None) => "pending",
        },
        written_at: slice.written,
        error: slice.problem.clone().unwrap_or_default(),
    });
    admin::Cluster {
        state: match (failed, status.connected && publishing.in_step) {
            (true, _) => "failed",
            (false, true) => "ok",
            (false, false) => "starting",
        },
        node: node_name.to_owned(),
        pool: node.pool.to_string(),
        generation: publishing.slices.iter().filter_map(|slice| number(slice.generation)).max(),
        written_at: publishing.slices.iter().filter_map(|slice| slice.written).max(),
        server: status.credentials.server,
        server_version: status.version.map(|version| version.text).unwrap_or_default(),
        credentials: status.credentials.source,
        error: problems.join("; "),
        slices: slices.collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::names::{DriverName, PoolName};

    fn view(status: cluster::Status) -> admin::Cluster {
        let node = Node {
            driver: DriverName::new("npu.huawei.com").unwrap(),
            pool: PoolName::new("n/npu").unwrap(),
            boot_id: String::new(),
        };
        cluster_view(status, "n", &node)
    }

    #[test]
    fn the_cluster_fails_by_what_stops_it_and_not_by_what_one_device_lacks() {
        let mut status = cluster::Status::default();
        assert_eq!(view(status.clone()).state, "starting");
        status.connected = true;
        status.publishing.in_step = true;
        assert_eq!(view(status.clone()).state, "ok");
        status.publishing.left_out.push("device \"npu-1\" is not published: why".to_owned());
        let lacking = view(status.clone());
        assert_eq!((lacking.state, lacking.error.as_str()), ("ok", "device \"npu-1\" is not published: why"));
        status.credentials.problem = Some("expired".to_owned());
        assert_eq!(view(status).state, "failed");
    }

    #[test]
    fn an_error_is_told_with_all_its_causes() {
        let error = store::LoadError::Disk(crate::disk::DiskError::at("read", "/x")(std::io::Error::other("why")));
        assert_eq!(text(error), "cannot read /x: why");
    }
}

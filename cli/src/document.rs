//! What `-o json` and `-o yaml` print. Keys are only ever added.

use jiff::Timestamp;
use npu_dra::{admin::view::vnpu_name, domain::plan::chip_of};
use npu_proto::admin as proto;
use serde::Serialize;

/// The version of these documents.
const API_VERSION: &str = "npuctl/v1";

/// A document: things of one kind.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Document<'a, T> {
    api_version: &'static str,
    kind: &'static str,
    /// True if it comes from the records on disk because the daemon is down.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    offline: bool,
    items: &'a [T],
}

impl<'a, T> Document<'a, T> {
    pub(crate) fn new(kind: &'static str, offline: bool, items: &'a [T]) -> Self {
        Self { api_version: API_VERSION, kind, offline, items }
    }
}

/// One thing, as a watch prints it.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Single<'a, T> {
    api_version: &'static str,
    kind: &'static str,
    #[serde(flatten)]
    item: &'a T,
}

impl<'a, T> Single<'a, T> {
    pub(crate) fn new(kind: &'static str, item: &'a T) -> Self {
        Self { api_version: API_VERSION, kind, item }
    }
}

/// One NPU.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Device {
    pub(crate) name: String,
    pub(crate) state: String,
    pub(crate) model: Option<String>,
    pub(crate) bus_id: Option<String>,
    pub(crate) ai_cores: Option<u32>,
    pub(crate) memory_bytes: Option<u64>,
    pub(crate) health: Option<Health>,
    pub(crate) claims: Vec<ClaimName>,
    pub(crate) taints: Vec<Taint>,
    pub(crate) uuid: Option<String>,
    pub(crate) physical_ids: Vec<u32>,
    pub(crate) numa_node: Option<u32>,
    pub(crate) topology_group: Option<String>,
    pub(crate) pcie_root: Option<String>,
    pub(crate) driver_version: Option<String>,
    /// Why it takes no new claims although none owns it whole.
    pub(crate) reason: Option<String>,
    pub(crate) hold: Option<Hold>,
}

/// What an operator has done to a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Hold {
    pub(crate) kind: String,
    pub(crate) reason: Option<String>,
    pub(crate) since: Option<Timestamp>,
}

/// How well one device is.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct CardHealth {
    pub(crate) name: String,
    /// `None` if it was not read yet.
    pub(crate) health: Option<Health>,
}

impl CardHealth {
    /// True if it is known to be well.
    pub(crate) fn is_ok(&self) -> bool {
        self.health.as_ref().is_some_and(|health| health.condition == "ok")
    }
}

impl From<Device> for CardHealth {
    fn from(device: Device) -> Self {
        Self { name: device.name, health: device.health }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Health {
    /// What npu-dra holds of the card.
    pub(crate) condition: String,
    /// What the card says of itself.
    pub(crate) level: String,
    pub(crate) since: Option<Timestamp>,
    /// What is wrong.
    pub(crate) reason: Option<String>,
    /// When it takes claims again if it stays quiet.
    pub(crate) quiet_until: Option<Timestamp>,
    /// Eight hex digits each.
    pub(crate) codes: Vec<String>,
    pub(crate) temperature_celsius: Option<i32>,
    pub(crate) power_watts: Option<f64>,
    pub(crate) ecc: Option<Ecc>,
    /// Network link: up or down.
    pub(crate) link: Option<String>,
}

/// What ECC has counted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Ecc {
    pub(crate) corrected: u64,
    pub(crate) uncorrected: u64,
    pub(crate) isolated_pages: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Taint {
    pub(crate) key: String,
    pub(crate) value: String,
    pub(crate) effect: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct ClaimName {
    pub(crate) namespace: Option<String>,
    pub(crate) name: Option<String>,
    pub(crate) uid: String,
}

impl ClaimName {
    /// `namespace/name`; `None` if it is not known.
    pub(crate) fn path(&self) -> Option<String> {
        match (&self.namespace, &self.name) {
            (Some(namespace), Some(name)) => Some(format!("{namespace}/{name}")),
            (None, Some(name)) => Some(format!("?/{name}")),
            (_, None) => None,
        }
    }
}

/// One claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Claim {
    pub(crate) uid: String,
    pub(crate) namespace: Option<String>,
    pub(crate) name: Option<String>,
    pub(crate) state: String,
    pub(crate) reason: Option<String>,
    pub(crate) prepared_at: Option<Timestamp>,
    /// `None` if it is not known what it holds.
    pub(crate) devices: Option<Vec<Holding>>,
    pub(crate) boot_id: Option<String>,
    pub(crate) this_boot: Option<bool>,
    pub(crate) damaged_file: Option<String>,
}

impl Claim {
    pub(crate) fn path(&self) -> Option<String> {
        ClaimName { namespace: self.namespace.clone(), name: self.name.clone(), uid: String::new() }.path()
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Holding {
    pub(crate) device: String,
    pub(crate) pool: String,
    pub(crate) requests: Vec<String>,
    pub(crate) uuid: String,
    pub(crate) physical_ids: Vec<u32>,
    pub(crate) admin_access: bool,
    pub(crate) share_id: Option<String>,
    pub(crate) cdi_device: String,
    /// `None` for a whole card.
    pub(crate) vnpu: Option<Part>,
}

/// The part of a card that a claim holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Part {
    pub(crate) id: u32,
    pub(crate) template: String,
    pub(crate) card: Option<String>,
    pub(crate) ai_cores: u32,
    pub(crate) memory_bytes: u64,
    /// True once it was made and read back.
    pub(crate) made: bool,
}

/// One vNPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Vnpu {
    pub(crate) name: String,
    pub(crate) state: String,
    #[serde(flatten)]
    pub(crate) part: Part,
    /// `None` if no claim has it.
    pub(crate) claim: Option<ClaimName>,
    pub(crate) prepared_at: Option<Timestamp>,
    pub(crate) cdi_device: Option<String>,
}

impl Vnpu {
    /// The vNPUs that claims hold, by chip and id: what the records tell, without a look at the cards.
    pub(crate) fn of_claims(claims: &[Claim]) -> Vec<Self> {
        let mut vnpus: Vec<_> = claims.iter().flat_map(Self::of_claim).collect();
        vnpus.sort_by_key(|vnpu| vnpu.part.id);
        vnpus
    }

    fn of_claim(claim: &Claim) -> impl Iterator<Item = Self> {
        claim.devices.iter().flatten().filter_map(|holding| {
            let part = holding.vnpu.clone()?;
            Some(Self {
                name: vnpu_name(chip_of(part.id), part.id),
                state: claim.state.clone(),
                claim: Some(ClaimName {
                    namespace: claim.namespace.clone(),
                    name: claim.name.clone(),
                    uid: claim.uid.clone(),
                }),
                prepared_at: claim.prepared_at,
                cdi_device: Some(holding.cdi_device.clone()),
                part,
            })
        })
    }
}

/// What can be cut from one NPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Cuttable {
    pub(crate) device: String,
    pub(crate) model: Option<String>,
    /// Why nothing can be cut, or no claim gets what can.
    pub(crate) reason: Option<String>,
    /// Empty if it is never cut.
    pub(crate) templates: Vec<Template>,
    /// What still fits together; nothing can be added to any of these.
    pub(crate) mixes: Vec<Vec<MixPart>>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Template {
    pub(crate) name: String,
    pub(crate) ai_cores: u32,
    pub(crate) ai_cpus: u32,
    pub(crate) memory_bytes: u64,
    /// How many can still be cut; `None` if that is not known.
    pub(crate) fits: Option<u32>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct MixPart {
    pub(crate) template: String,
    pub(crate) count: u32,
}

/// How cards are cut.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Slicing {
    pub(crate) model: Option<String>,
    /// Why it is off or of no better model.
    pub(crate) reason: Option<String>,
}

/// One slice.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Slice {
    pub(crate) name: Option<String>,
    pub(crate) pool: String,
    pub(crate) index: u32,
    pub(crate) devices: u32,
    pub(crate) generation: Option<u64>,
    pub(crate) state: String,
    pub(crate) written_at: Option<Timestamp>,
    pub(crate) error: Option<String>,
}

/// How everything is.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Status {
    pub(crate) daemon: Option<Daemon>,
    pub(crate) backend: Option<Backend>,
    pub(crate) kubelet: Option<Kubelet>,
    pub(crate) cluster: Option<Cluster>,
    pub(crate) claims: ClaimCounts,
    pub(crate) slicing: Option<Slicing>,
    pub(crate) attention: Vec<Attention>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Daemon {
    pub(crate) version: String,
    pub(crate) pid: u32,
    pub(crate) started_at: Option<Timestamp>,
    pub(crate) driver: String,
    pub(crate) recovered: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Backend {
    pub(crate) name: String,
    pub(crate) state: String,
    pub(crate) source: Option<String>,
    pub(crate) driver_version: Option<String>,
    pub(crate) detail: Option<String>,
    pub(crate) scanned_at: Option<Timestamp>,
    pub(crate) devices: u32,
    pub(crate) missing: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Kubelet {
    pub(crate) registered: bool,
    pub(crate) since: Option<Timestamp>,
    pub(crate) refused: Option<String>,
    pub(crate) registrations: u64,
    pub(crate) versions: Vec<String>,
    pub(crate) last_call: Option<Timestamp>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Cluster {
    pub(crate) state: Option<String>,
    pub(crate) node: Option<String>,
    pub(crate) pool: Option<String>,
    pub(crate) generation: Option<u64>,
    pub(crate) written_at: Option<Timestamp>,
    pub(crate) server: Option<String>,
    pub(crate) server_version: Option<String>,
    pub(crate) credentials: Option<String>,
    pub(crate) error: Option<String>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(crate) struct ClaimCounts {
    pub(crate) preparing: u32,
    pub(crate) prepared: u32,
    pub(crate) releasing: u32,
    pub(crate) quarantined: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Attention {
    pub(crate) subject: String,
    pub(crate) text: String,
    pub(crate) since: Option<Timestamp>,
}

/// The versions of both sides.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Versions {
    pub(crate) npuctl: String,
    /// `None` if the daemon is down.
    pub(crate) npu_dra: Option<String>,
}

/// Text, or nothing if it is empty.
fn text(text: String) -> Option<String> {
    (!text.is_empty()).then_some(text)
}

/// A time of a message.
pub(crate) fn time(millis: i64) -> Option<Timestamp> {
    Timestamp::from_millisecond(millis).ok()
}

impl From<proto::Device> for Device {
    fn from(device: proto::Device) -> Self {
        Self {
            name: device.name,
            state: device.state,
            model: text(device.model),
            bus_id: text(device.bus_id),
            ai_cores: device.ai_cores,
            memory_bytes: device.memory_bytes,
            health: device.health.map(Into::into),
            claims: device.claims.into_iter().map(Into::into).collect(),
            taints: device.taints.into_iter().map(Into::into).collect(),
            uuid: text(device.uuid),
            physical_ids: device.physical_ids,
            numa_node: device.numa_node,
            topology_group: text(device.topology_group),
            pcie_root: text(device.pcie_root),
            driver_version: text(device.driver_version),
            reason: text(device.reason),
            hold: device.hold.map(Into::into),
        }
    }
}

impl From<proto::DeviceHold> for Hold {
    fn from(hold: proto::DeviceHold) -> Self {
        Self { kind: hold.kind, reason: text(hold.reason), since: time(hold.since_ms) }
    }
}

impl From<proto::Health> for Health {
    fn from(health: proto::Health) -> Self {
        let ecc = health.ecc_corrected.zip(health.ecc_uncorrected);
        Self {
            condition: health.condition,
            level: health.level,
            since: health.since_ms.and_then(time),
            reason: text(health.reason),
            quiet_until: health.quiet_until_ms.and_then(time),
            ecc: ecc.map(|(corrected, uncorrected)| Ecc {
                corrected,
                uncorrected,
                isolated_pages: health.ecc_isolated_pages.unwrap_or_default(),
            }),
            link: text(health.link),
            codes: health.codes.iter().map(|code| format!("{code:08X}")).collect(),
            temperature_celsius: health.temperature_celsius,
            power_watts: health.power_deciwatts.map(|power| f64::from(power) / 10.0),
        }
    }
}

impl From<proto::Taint> for Taint {
    fn from(taint: proto::Taint) -> Self {
        Self { key: taint.key, value: taint.value, effect: taint.effect }
    }
}

impl From<proto::ClaimName> for ClaimName {
    fn from(claim: proto::ClaimName) -> Self {
        Self { namespace: text(claim.namespace), name: text(claim.name), uid: claim.uid }
    }
}

impl From<proto::Claim> for Claim {
    fn from(claim: proto::Claim) -> Self {
        let name = ClaimName::from(claim.claim.unwrap_or_default());
        let is_known = !claim.boot_id.is_empty() || !claim.devices.is_empty();
        Self {
            uid: name.uid,
            namespace: name.namespace,
            name: name.name,
            state: claim.state,
            reason: text(claim.reason),
            prepared_at: claim.prepared_at_ms.and_then(time),
            devices: is_known.then(|| claim.devices.into_iter().map(Into::into).collect()),
            this_boot: (!claim.boot_id.is_empty()).then_some(claim.this_boot),
            boot_id: text(claim.boot_id),
            damaged_file: text(claim.damaged_file),
        }
    }
}

impl From<proto::Holding> for Holding {
    fn from(holding: proto::Holding) -> Self {
        Self {
            device: holding.device,
            pool: holding.pool,
            requests: holding.requests,
            uuid: holding.uuid,
            physical_ids: holding.physical_ids,
            admin_access: holding.admin_access,
            share_id: holding.share_id,
            cdi_device: holding.cdi_device,
            vnpu: holding.vnpu.map(Into::into),
        }
    }
}

impl From<proto::Vnpu> for Part {
    fn from(vnpu: proto::Vnpu) -> Self {
        Self {
            id: vnpu.id,
            template: vnpu.template,
            card: text(vnpu.card),
            ai_cores: vnpu.ai_cores,
            memory_bytes: vnpu.memory_bytes,
            made: vnpu.made,
        }
    }
}

impl From<proto::VnpuEntry> for Vnpu {
    fn from(entry: proto::VnpuEntry) -> Self {
        Self {
            name: entry.name,
            state: entry.state,
            part: entry.vnpu.unwrap_or_default().into(),
            claim: entry.claim.map(Into::into),
            prepared_at: entry.prepared_at_ms.and_then(time),
            cdi_device: text(entry.cdi_device),
        }
    }
}

impl From<proto::DeviceTemplates> for Cuttable {
    fn from(device: proto::DeviceTemplates) -> Self {
        let template = |template: proto::Template| Template {
            name: template.name,
            ai_cores: template.ai_cores,
            ai_cpus: template.ai_cpus,
            memory_bytes: template.memory_bytes,
            fits: template.fits,
        };
        let part = |part: proto::MixPart| MixPart { template: part.template, count: part.count };
        Self {
            device: device.device,
            model: text(device.model),
            reason: text(device.reason),
            templates: device.templates.into_iter().map(template).collect(),
            mixes: device.mixes.into_iter().map(|mix| mix.parts.into_iter().map(part).collect()).collect(),
        }
    }
}

impl Slice {
    pub(crate) fn new(pool: &str, slice: proto::Slice) -> Self {
        Self {
            name: text(slice.name),
            pool: pool.to_owned(),
            index: slice.index,
            devices: slice.devices,
            generation: slice.generation,
            state: slice.state,
            written_at: slice.written_at_ms.and_then(time),
            error: text(slice.error),
        }
    }
}

impl From<proto::StatusResponse> for Status {
    fn from(status: proto::StatusResponse) -> Self {
        let counts = status.claims.unwrap_or_default();
        Self {
            daemon: status.daemon.map(|daemon| Daemon {
                version: daemon.version,
                pid: daemon.pid,
                started_at: time(daemon.started_at_ms),
                driver: daemon.driver,
                recovered: daemon.recovered,
            }),
            backend: status.backend.map(|backend| Backend {
                name: backend.name,
                state: backend.state,
                source: text(backend.source),
                driver_version: text(backend.driver_version),
                detail: text(backend.detail),
                scanned_at: backend.scanned_at_ms.and_then(time),
                devices: backend.devices,
                missing: backend.missing,
            }),
            kubelet: status.kubelet.map(|kubelet| Kubelet {
                registered: kubelet.registered,
                since: kubelet.since_ms.and_then(time),
                refused: text(kubelet.refused),
                registrations: kubelet.registrations,
                versions: kubelet.versions,
                last_call: kubelet.last_call_ms.and_then(time),
            }),
            cluster: status.cluster.map(|cluster| Cluster {
                state: text(cluster.state),
                node: text(cluster.node),
                pool: text(cluster.pool),
                generation: cluster.generation,
                written_at: cluster.written_at_ms.and_then(time),
                server: text(cluster.server),
                server_version: text(cluster.server_version),
                credentials: text(cluster.credentials),
                error: text(cluster.error),
            }),
            claims: ClaimCounts {
                preparing: counts.preparing,
                prepared: counts.prepared,
                releasing: counts.releasing,
                quarantined: counts.quarantined,
            },
            slicing: Some(Slicing { model: text(status.slicing_model), reason: text(status.no_slicing) }),
            attention: status
                .attention
                .into_iter()
                .map(|point| Attention {
                    subject: point.subject,
                    text: point.text,
                    since: point.since_ms.and_then(time),
                })
                .collect(),
        }
    }
}

//! What the domain knows, as the messages that `npuctl` is sent. Pure.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use jiff::Timestamp;
use npu_proto::admin as proto;

use super::{Cluster, Identity, Kubelet};
use crate::{
    domain::{
        claim::ClaimRef,
        health::{Condition, Health, Level, Link},
        model::Model,
        node::{Hold, HoldKind},
        notice::Severity,
        npu::{Npu, StableId},
        plan,
        record::{Cut, Holding, Phase, Quarantined, Record},
        slice,
        vnpu::{self, CardReading, VnpuReading},
    },
    engine::{DeviceView, Snapshot},
};

/// All devices: the cards of the last good scan, then those that are lost, then those of an earlier boot that claims hold.
pub(super) fn devices(snapshot: &Snapshot) -> Vec<proto::Device> {
    let shown = |view| device(view, snapshot, closed(snapshot, view));
    let known = || snapshot.devices.iter().chain(&snapshot.lost);
    let mut devices: Vec<_> = known().map(shown).collect();
    let present: BTreeSet<_> = known().map(|view| &view.npu.stable_id).collect();
    let mut absent: BTreeMap<_, proto::Device> = BTreeMap::new();
    for record in &snapshot.claims {
        let holdings = record.devices.iter().filter(|holding| !holding.admin_access);
        for holding in holdings.filter(|holding| !present.contains(&holding.stable_id)) {
            let claim = claim_name(&record.claim);
            let device =
                absent.entry(&holding.stable_id).or_insert_with(|| absent_device(holding, snapshot.scanned_at));
            if !device.claims.contains(&claim) {
                device.claims.push(claim);
            }
        }
    }
    devices.extend(absent.into_values());
    devices
}

fn device(view: &DeviceView, snapshot: &Snapshot, closed: Option<&str>) -> proto::Device {
    let Snapshot { node, driver_version, quiet, .. } = snapshot;
    let (npu, first) = (&view.npu, view.npu.first());
    let sick = view.health.as_ref().filter(|health| !health.condition.is_usable());
    let hold = snapshot.holds.get(&npu.stable_id);
    let state = match (sick.map(|health| health.condition), holder_of_all(view)) {
        (Some(Condition::Lost), _) => "gone",
        _ if hold.is_some_and(|hold| hold.kind == HoldKind::Drain) && view.owners.is_empty() => "drained",
        _ if hold.is_some_and(|hold| hold.kind == HoldKind::Drain) => "draining",
        (_, Some(_)) => "in-use",
        _ if hold.is_some() && view.owners.is_empty() => "cordoned",
        (Some(_), _) => "tainted",
        _ if closed.is_some() => "closed",
        _ if !view.owners.is_empty() => "split",
        _ => "free",
    };
    let by_hand = hold.map(hold_text);
    let sick_text = sick.map(|health| format!("health {}: {}", health.condition, health.text()));
    let reason = closed.map(str::to_owned).into_iter().chain(by_hand).chain(sick_text).collect::<Vec<_>>().join("; ");
    let mut taints: Vec<_> = sick.and_then(|health| slice::health_taint(&node.driver, health)).into_iter().collect();
    taints.extend(closed.map(|why| slice::closed_taint(&node.driver, why)));
    taints.extend(hold.map(|hold| slice::hold_taint(&node.driver, hold)));
    proto::Device {
        name: npu.name.to_string(),
        model: first.chip_name.clone(),
        bus_id: first.bus_id.to_string(),
        ai_cores: npu.ai_cores(),
        memory_bytes: npu.memory(),
        health: view.health.as_ref().map(|health| self::health(health, *quiet)),
        state: state.to_owned(),
        claims: view.owners.iter().map(|record| claim_name(&record.claim)).collect(),
        uuid: npu.stable_id.to_string(),
        physical_ids: npu.physical_ids(),
        numa_node: first.numa_node,
        topology_group: npu.topology_group.clone(),
        pcie_root: first.pcie_root.clone().unwrap_or_default(),
        taints: taints.into_iter().map(taint).collect(),
        driver_version: driver_version.clone(),
        reason,
        hold: hold.map(device_hold),
    }
}

/// What an operator has done to a card.
pub fn device_hold(hold: &Hold) -> proto::DeviceHold {
    let Hold { kind, reason, since } = hold;
    proto::DeviceHold { kind: kind.as_str().to_owned(), reason: reason.clone(), since_ms: since.as_millisecond() }
}

fn hold_text(hold: &Hold) -> String {
    let why = if hold.reason.is_empty() { String::new() } else { format!(": {}", hold.reason) };
    format!("{} by an operator{why}", hold.kind.as_str())
}

/// Why a card takes no new claims.
fn closed<'a>(snapshot: &'a Snapshot, view: &DeviceView) -> Option<&'a str> {
    snapshot.closed.get(view.npu.name.as_str()).map(String::as_str)
}

/// The claim that owns a card whole.
fn holder_of_all(view: &DeviceView) -> Option<&Record> {
    let is_whole =
        |holding: &Holding| holding.stable_id == view.npu.stable_id && holding.cut.is_none() && !holding.admin_access;
    view.owners.iter().find(|record| record.devices.iter().any(is_whole))
}

/// A card that a claim holds and that the last good scan did not find; before the first scan nobody knows.
fn absent_device(holding: &Holding, scanned_at: Option<Timestamp>) -> proto::Device {
    let gone = proto::Health {
        level: Level::Gone.to_string(),
        condition: Condition::Lost.to_string(),
        ..proto::Health::default()
    };
    proto::Device {
        name: holding.device.clone(),
        health: scanned_at.is_some().then_some(gone),
        state: if scanned_at.is_some() { "gone" } else { "in-use" }.to_owned(),
        uuid: holding.stable_id.to_string(),
        physical_ids: holding.physical_ids.clone(),
        ..proto::Device::default()
    }
}

fn health(health: &Health, quiet: Duration) -> proto::Health {
    let reading = &health.reading;
    let until = health.quiet_since().and_then(|since| since.checked_add(quiet).ok());
    proto::Health {
        level: reading.level.to_string(),
        since_ms: Some(health.since.as_millisecond()),
        codes: health.codes(),
        temperature_celsius: reading.temperature,
        power_deciwatts: reading.power,
        condition: health.condition.to_string(),
        reason: health.text(),
        quiet_until_ms: until.map(Timestamp::as_millisecond),
        ecc_corrected: reading.ecc.map(|ecc| ecc.corrected),
        ecc_uncorrected: reading.ecc.map(|ecc| ecc.uncorrected),
        ecc_isolated_pages: reading.ecc.map(|ecc| ecc.isolated_pages),
        link: health.link.map(Link::as_str).unwrap_or_default().to_owned(),
    }
}

fn taint(taint: slice::Taint) -> proto::Taint {
    proto::Taint { key: taint.key, value: taint.value, effect: taint.effect.as_str().to_owned() }
}

pub(super) fn claim_name(claim: &ClaimRef) -> proto::ClaimName {
    proto::ClaimName { namespace: claim.namespace.clone(), name: claim.name.clone(), uid: claim.uid.to_string() }
}

/// All vNPUs: those of claims, whether they are there or not, and those that the cards have besides; by card and id.
pub(super) fn vnpus(snapshot: &Snapshot) -> Vec<proto::VnpuEntry> {
    let views: BTreeMap<_, _> = snapshot.devices.iter().map(|view| (&view.npu.stable_id, view)).collect();
    let mut entries = Vec::new();
    for record in &snapshot.claims {
        for holding in &record.devices {
            if let Some(cut) = &holding.cut {
                let view = views.get(&holding.stable_id).copied();
                let position = view.map_or(u32::MAX, |view| view.npu.physical_id());
                entries.push(((position, cut.id), vnpu_of_claim(snapshot, record, holding, cut, view)));
            }
        }
    }
    for view in &snapshot.devices {
        for vnpu in view.reading.iter().flat_map(|reading| &reading.vnpus) {
            let is_it = |cut: &Cut| cut.id == vnpu.id && vnpu.is_of(&cut.template);
            let mut holdings = view.owners.iter().flat_map(|record| &record.devices);
            if !holdings
                .any(|holding| holding.stable_id == view.npu.stable_id && holding.cut.as_ref().is_some_and(is_it))
            {
                entries.push(((view.npu.physical_id(), vnpu.id), foreign(&view.npu, vnpu)));
            }
        }
    }
    entries.sort_by_key(|(position, _)| *position);
    entries.into_iter().map(|(_, entry)| entry).collect()
}

fn vnpu_of_claim(
    snapshot: &Snapshot,
    record: &Record,
    holding: &Holding,
    cut: &Cut,
    view: Option<&DeviceView>,
) -> proto::VnpuEntry {
    let reading = view.and_then(|view| view.reading.as_ref());
    let is_there = reading.map(|reading| reading.has(cut.id, &cut.template));
    let state = match record.phase {
        Phase::Intent | Phase::Releasing => record.phase.as_str(),
        Phase::Prepared if view.is_none() && snapshot.scanned_at.is_some() => "gone",
        Phase::Prepared if is_there != Some(false) => record.phase.as_str(),
        Phase::Prepared if record.boot_id != snapshot.node.boot_id => "absent",
        Phase::Prepared => "lost",
    };
    let mut vnpu = part(cut, view.map(|view| view.npu.name.to_string()));
    if let Some(read) = reading.and_then(|reading| reading.vnpu(cut.id)).filter(|_| is_there == Some(true)) {
        (vnpu.memory_bytes, vnpu.ai_cores, vnpu.made) = (read.memory, read.ai_cores, true);
    }
    proto::VnpuEntry {
        name: vnpu_name(view.map_or_else(|| plan::chip_of(cut.id), |view| view.npu.physical_id()), cut.id),
        vnpu: Some(vnpu),
        state: state.to_owned(),
        claim: Some(claim_name(&record.claim)),
        prepared_at_ms: Some(record.prepared_at.as_millisecond()),
        cdi_device: format!("{}/npu={}", snapshot.node.driver, holding.cdi_device),
    }
}

/// A vNPU that no claim has.
pub(super) fn foreign(npu: &Npu, read: &VnpuReading) -> proto::VnpuEntry {
    let vnpu = proto::Vnpu {
        id: read.id,
        template: read.template.clone(),
        ai_cores: read.ai_cores,
        memory_bytes: read.memory,
        made: true,
        card: npu.name.to_string(),
    };
    let name = vnpu_name(npu.physical_id(), read.id);
    proto::VnpuEntry { name, vnpu: Some(vnpu), state: "foreign".to_owned(), ..proto::VnpuEntry::default() }
}

/// The name of a vNPU: by the physical id of its chip and its own id.
pub fn vnpu_name(physical_id: u32, id: u32) -> String {
    format!("vnpu-{physical_id}-{id}")
}

/// What can still be cut from each card, or why nothing can.
pub(super) fn templates(snapshot: &Snapshot) -> Vec<proto::DeviceTemplates> {
    snapshot.devices.iter().map(|view| templates_of(view, snapshot)).collect()
}

fn templates_of(view: &DeviceView, snapshot: &Snapshot) -> proto::DeviceTemplates {
    let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    let (device, model) = (view.npu.name.to_string(), view.npu.first().chip_name.clone());
    let sliceable = match slice::sliceable(&view.npu) {
        Ok(sliceable) => sliceable,
        Err(why) => {
            return proto::DeviceTemplates {
                device,
                model,
                reason: why.to_string(),
                ..proto::DeviceTemplates::default()
            };
        }
    };
    let off = (snapshot.model == Model::Off).then(|| snapshot.slicing.clone()).filter(|why| !why.is_empty());
    let holder = holder_of_all(view).map(|record| format!("claim {} holds all of it", record.claim));
    let reading = view.reading.as_ref();
    // What stands in the way of everybody, then what only keeps claims away.
    let obstacle = holder.or_else(|| reading.and_then(CardReading::obstacle));
    let unread = || off.clone().unwrap_or_else(|| "it has not been read yet".to_owned());
    let closed = || closed(snapshot, view).map(|why| format!("takes no new claims: {why}"));
    let parts = || off.as_ref().map(|why| format!("no claim gets a part: {why}"));
    let reason = obstacle.clone().or_else(|| reading.is_none().then(unread)).or_else(parts).or_else(closed);
    // vNPUs that are being made take their room already.
    let holdings = view.owners.iter().flat_map(|record| &record.devices);
    let cuts =
        holdings.filter(|holding| holding.stable_id == view.npu.stable_id).filter_map(|holding| holding.cut.as_ref());
    let room = reading.map(|reading| {
        let unmade = cuts.filter(|cut| !cut.made && !reading.has(cut.id, &cut.template));
        let unmade = unmade.filter_map(|cut| sliceable.template(&cut.template));
        unmade.fold(sliceable.room(reading), |room, template| room?.after(template)).filter(|_| obstacle.is_none())
    });
    let room = if obstacle.is_some() { Some(None) } else { room };
    let template = |template: &vnpu::Template| proto::Template {
        name: template.name.to_owned(),
        ai_cores: template.takes.ai_cores,
        ai_cpus: template.takes.ai_cpus,
        memory_bytes: template.takes.memory,
        fits: room.map(|room| count(room.map_or(0, |room| room.fitting(template)))),
    };
    let mix = |mix: vnpu::Mix| proto::Mix {
        parts: mix
            .0
            .into_iter()
            .map(|(name, n)| proto::MixPart { template: name.to_owned(), count: count(n) })
            .collect(),
    };
    let mixes = room.flatten().map(|room| room.mixes(&sliceable.templates)).unwrap_or_default();
    proto::DeviceTemplates {
        device,
        model,
        templates: sliceable.templates.iter().map(template).collect(),
        mixes: mixes.into_iter().map(mix).collect(),
        reason: reason.unwrap_or_default(),
    }
}

/// All claims, by namespace and name.
pub(super) fn claims(snapshot: &Snapshot) -> Vec<proto::Claim> {
    let driver = snapshot.node.driver.as_str();
    let card = |id: &StableId| {
        snapshot.devices.iter().find(|view| view.npu.stable_id == *id).map(|view| view.npu.name.to_string())
    };
    let mut claims: Vec<_> = snapshot
        .claims
        .iter()
        .map(|record| claim(record, driver, Some(&snapshot.node.boot_id), &card))
        .chain(snapshot.quarantined.iter().map(quarantined))
        .collect();
    claims.sort_by(|a, b| {
        let key = |claim: &proto::Claim| {
            claim.claim.as_ref().map(|name| (name.namespace.clone(), name.name.clone(), name.uid.clone()))
        };
        key(a).cmp(&key(b))
    });
    claims
}

/// A claim as its record tells it, held through this driver; `card` names the card of an identity. Without the present
/// boot every record counts as one of an earlier boot.
pub fn claim(
    record: &Record,
    driver: &str,
    boot_id: Option<&str>,
    card: &dyn Fn(&StableId) -> Option<String>,
) -> proto::Claim {
    let holding = |holding: &Holding| proto::Holding {
        device: holding.device.clone(),
        pool: holding.pool.clone(),
        requests: holding.requests.clone(),
        uuid: holding.stable_id.to_string(),
        physical_ids: holding.physical_ids.clone(),
        admin_access: holding.admin_access,
        share_id: holding.share_id.clone(),
        cdi_device: format!("{driver}/npu={}", holding.cdi_device),
        vnpu: holding.cut.as_ref().map(|cut| part(cut, card(&holding.stable_id))),
    };
    proto::Claim {
        claim: Some(claim_name(&record.claim)),
        state: record.phase.as_str().to_owned(),
        prepared_at_ms: Some(record.prepared_at.as_millisecond()),
        devices: record.devices.iter().map(holding).collect(),
        boot_id: record.boot_id.clone(),
        this_boot: boot_id == Some(&record.boot_id),
        reason: String::new(),
        damaged_file: String::new(),
    }
}

fn part(cut: &Cut, card: Option<String>) -> proto::Vnpu {
    proto::Vnpu {
        id: cut.id,
        template: cut.template.clone(),
        ai_cores: cut.ai_cores,
        memory_bytes: cut.memory,
        made: cut.made,
        card: card.unwrap_or_default(),
    }
}

/// A claim whose record is damaged.
pub fn quarantined(quarantined: &Quarantined) -> proto::Claim {
    proto::Claim {
        claim: Some(proto::ClaimName { uid: quarantined.uid.to_string(), ..proto::ClaimName::default() }),
        state: "quarantined".to_owned(),
        reason: quarantined.why.clone(),
        damaged_file: quarantined.path.clone(),
        ..proto::Claim::default()
    }
}

/// The pool as it was published.
pub(super) fn slices(cluster: &Cluster, now: Timestamp) -> proto::SlicesResponse {
    let slice = |slice: &super::Slice| proto::Slice {
        name: slice.name.clone(),
        index: slice.index,
        devices: slice.devices,
        generation: slice.generation,
        state: slice.state.to_owned(),
        written_at_ms: slice.written_at.map(Timestamp::as_millisecond),
        error: slice.error.clone(),
    };
    proto::SlicesResponse {
        taken_at_ms: now.as_millisecond(),
        pool: cluster.pool.clone(),
        generation: cluster.generation,
        slices: cluster.slices.iter().map(slice).collect(),
        error: cluster.error.clone(),
    }
}

/// How everything is.
pub(super) fn status(
    snapshot: &Snapshot,
    kubelet: &Kubelet,
    cluster: &Cluster,
    identity: &Identity,
    now: Timestamp,
) -> proto::StatusResponse {
    let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    let in_phase = |phase| count(snapshot.claims.iter().filter(|record| record.phase == phase).count());
    proto::StatusResponse {
        taken_at_ms: now.as_millisecond(),
        daemon: Some(proto::Daemon {
            version: identity.version.to_owned(),
            pid: identity.pid,
            started_at_ms: identity.started_at.as_millisecond(),
            driver: snapshot.node.driver.to_string(),
            recovered: snapshot.recovered,
        }),
        backend: Some(proto::Backend {
            name: snapshot.backend.backend.to_owned(),
            state: snapshot.backend.state.to_owned(),
            source: snapshot.backend.source.clone(),
            driver_version: snapshot.driver_version.clone(),
            detail: snapshot.backend.detail.clone(),
            scanned_at_ms: snapshot.scanned_at.map(Timestamp::as_millisecond),
            devices: count(snapshot.devices.len()),
            missing: snapshot.missing.clone(),
        }),
        kubelet: Some(proto::Kubelet {
            registered: kubelet.since.is_some() && kubelet.refused.is_none(),
            since_ms: kubelet.since.map(Timestamp::as_millisecond),
            refused: kubelet.refused.clone().unwrap_or_default(),
            registrations: kubelet.registrations,
            versions: kubelet.versions.clone(),
            last_call_ms: kubelet.last_call.map(Timestamp::as_millisecond),
        }),
        cluster: Some(proto::Cluster {
            state: cluster.state.to_owned(),
            node: cluster.node.clone(),
            pool: cluster.pool.clone(),
            generation: cluster.generation,
            written_at_ms: cluster.written_at.map(Timestamp::as_millisecond),
            server: cluster.server.clone(),
            server_version: cluster.server_version.clone(),
            credentials: cluster.credentials.clone(),
            error: cluster.error.clone(),
        }),
        claims: Some(proto::ClaimCounts {
            prepared: in_phase(Phase::Prepared),
            quarantined: count(snapshot.quarantined.len()),
            preparing: in_phase(Phase::Intent),
            releasing: in_phase(Phase::Releasing),
        }),
        attention: attention(snapshot, kubelet, cluster),
        no_slicing: snapshot.slicing.clone(),
        slicing_model: snapshot.model.to_string(),
    }
}

/// What a human should look at, the worst causes first.
fn attention(snapshot: &Snapshot, kubelet: &Kubelet, cluster: &Cluster) -> Vec<proto::Attention> {
    let point =
        |subject: &str, text: String, since_ms| proto::Attention { subject: subject.to_owned(), text, since_ms };
    let mut all = Vec::new();
    if let Some(problem) = &snapshot.problem {
        let text = format!(
            "{problem}. Drains, cordons and a suspension of before are forgotten: make them again, then remove that file \
             and restart the daemon"
        );
        all.push(point("node", text, None));
    }
    let backend = &snapshot.backend;
    // A backend that works but misses chips: they are told one by one.
    let works = backend.state == "ready" && !snapshot.missing.is_empty();
    if backend.severity != Severity::Info && !works {
        let colon = if backend.detail.is_empty() { "" } else { ": " };
        all.push(point("backend", format!("{}{colon}{}", backend.state, backend.detail), None));
    }
    all.extend(snapshot.missing.iter().map(|chip| point("backend", format!("chip is missing: {chip}"), None)));
    if let Some(refused) = &kubelet.refused {
        let since = kubelet.since.map(Timestamp::as_millisecond);
        all.push(point("kubelet", format!("refuses to register the driver: {refused}"), since));
    }
    if !cluster.error.is_empty() {
        all.push(point("cluster", cluster.error.clone(), None));
    }
    for device in devices(snapshot) {
        let Some(health) = &device.health else { continue };
        if matches!(health.condition.as_str(), "ok" | "unknown") {
            continue;
        }
        let colon = if health.reason.is_empty() { "" } else { ": " };
        let mut parts = vec![format!("health {}{colon}{}", health.condition, health.reason)];
        if device.bus_id.is_empty() {
            let holders = device.claims.iter().map(|claim| format!("{}/{}", claim.namespace, claim.name));
            parts.push(format!("held by {}", holders.collect::<Vec<_>>().join(", ")));
        }
        parts.extend(device.taints.iter().map(|taint| format!("tainted {}", taint.effect)));
        let text = parts.join("; ");
        all.push(point(&device.name, text, health.since_ms));
    }
    for view in snapshot.devices.iter().chain(&snapshot.lost) {
        if let Some(hold) = snapshot.holds.get(&view.npu.stable_id) {
            all.push(point(view.npu.name.as_str(), hold_text(hold), Some(hold.since.as_millisecond())));
        }
    }
    for (device, why) in &snapshot.closed {
        all.push(point(device, format!("takes no new claims: {why}"), None));
    }
    all.extend(vnpus(snapshot).iter().filter(|entry| entry.state == "lost").map(|entry| {
        let claim = entry.claim.clone().unwrap_or_default();
        let card = entry.vnpu.as_ref().map(|vnpu| vnpu.card.as_str()).unwrap_or_default();
        let text = format!(
            "of claim {}/{} on {card} was destroyed by somebody else; delete the pod",
            claim.namespace, claim.name
        );
        point(&entry.name, text, None)
    }));
    for record in &snapshot.claims {
        let (subject, parts) =
            (format!("claim {}", record.claim), record.devices.iter().any(|holding| holding.cut.is_some()));
        match record.phase {
            Phase::Intent if parts => all.push(point(&subject, "its vNPUs are still being made".to_owned(), None)),
            Phase::Releasing if parts => {
                all.push(point(&subject, "it is released, but its vNPUs are not destroyed yet".to_owned(), None));
            }
            Phase::Intent | Phase::Releasing | Phase::Prepared => {}
        }
    }
    for quarantined in &snapshot.quarantined {
        let text = format!(
            "record is damaged: {}; when its pod is gone: npuctl claims release {} --force",
            quarantined.why, quarantined.uid
        );
        all.push(point(&format!("claim {}", quarantined.uid), text, None));
    }
    all
}

/// What a watcher was told last.
#[derive(Debug, Default)]
pub(super) struct Told {
    devices: BTreeMap<String, proto::Device>,
    claims: BTreeMap<String, proto::Claim>,
    begun: bool,
}

impl Told {
    /// True until the first answer.
    pub(super) fn is_new(&self) -> bool {
        !self.begun
    }

    /// What the watcher has to hear now; `None` if nothing.
    pub(super) fn news(
        &mut self,
        snapshot: &Snapshot,
        wanted: proto::WatchRequest,
        now: Timestamp,
    ) -> Option<proto::WatchResponse> {
        let devices = if wanted.devices { devices(snapshot) } else { Vec::new() };
        let claims = if wanted.claims { claims(snapshot) } else { Vec::new() };
        let (devices, removed_devices) = changed(&mut self.devices, devices, |device| device.name.clone());
        let (claims, removed_claims) = changed(&mut self.claims, claims, |claim| {
            claim.claim.as_ref().map(|name| name.uid.clone()).unwrap_or_default()
        });
        let complete = !self.begun;
        self.begun = true;
        let nothing =
            devices.is_empty() && removed_devices.is_empty() && claims.is_empty() && removed_claims.is_empty();
        (complete || !nothing).then(|| proto::WatchResponse {
            taken_at_ms: now.as_millisecond(),
            complete,
            devices,
            removed_devices,
            claims,
            removed_claims,
        })
    }
}

/// Takes in a new list; gives what is new or different, in the list's order, and the keys of what is no longer there.
fn changed<T: Clone + PartialEq>(
    told: &mut BTreeMap<String, T>,
    list: Vec<T>,
    key: impl Fn(&T) -> String,
) -> (Vec<T>, Vec<String>) {
    let keys: BTreeSet<_> = list.iter().map(&key).collect();
    let removed: Vec<_> = told.keys().filter(|old| !keys.contains(*old)).cloned().collect();
    told.retain(|old, _| keys.contains(old));
    let mut news = Vec::new();
    for item in list {
        if told.get(&key(&item)) != Some(&item) {
            told.insert(key(&item), item.clone());
            news.push(item);
        }
    }
    (news, removed)
}

//! What a cluster makes of a card that is sick, and of one that an operator wants for himself.

use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use serde_json::{Value, json};

use super::{Case, lifecycle::part};
use crate::{
    driver::{Driver, SLICES},
    plane::NODE,
    stage::{Request, Stage, claim, claim_template, name, pod, wait, wait_for},
};

pub(crate) const CASES: &[Case] =
    &[("health-fault", fault), ("health-in-pod-status", in_pod_status), ("health-drain", drain)];

/// Memory that ECC cannot correct, and how bad the vendor calls it.
const ECC: u32 = 0x80E0_1801;
const CRITICAL: u8 = 3;
/// How soon a fault must be in the slice: a second, and as much again where all settings run at a time.
const AT_ONCE: Duration = Duration::from_secs(2);

const UNHEALTHY: &str = "npu.huawei.com/unhealthy=critical:NoSchedule";
const DRAINED: &str = "npu.huawei.com/drained=a-fan:NoExecute";
const CORDONED: &str = "npu.huawei.com/cordoned=a-fan:NoSchedule";

/// Two cards, so that none of a case hides behind the other; what is over is over after a second.
fn driver() -> Driver {
    Driver::cutting().edit(|cards| cards.cards.truncate(2)).with("health.quiet", "\"1s\"")
}

/// A pod with the claim that it names, or the template of its claim.
struct Tenant {
    claim: Value,
    pod: Value,
}

/// A part of one certain card; all of it where cards are not shared.
fn part_of(stage: &Stage, card: u32) -> Request {
    let physical_id = "device.attributes[\"npu.huawei.com\"].physicalId";
    part(stage).select(&format!("device.driver == \"npu.huawei.com\" && {physical_id} == {card}"))
}

impl Tenant {
    /// A pod of this claim or template, which it is named as.
    fn create(stage: &Stage, claim: Value) -> anyhow::Result<Self> {
        let pod = pod(name(&claim), &[&claim]);
        stage.create(&[&claim, &pod])?;
        Ok(Self { claim, pod })
    }

    fn ask(stage: &Stage, name: &str, card: u32) -> anyhow::Result<Self> {
        Self::create(stage, claim_template(name, &[part_of(stage, card)]))
    }

    fn start(stage: &Stage, name: &str, card: u32) -> anyhow::Result<Self> {
        let tenant = Self::ask(stage, name, card)?;
        stage.wait_running(&tenant.pod)?;
        Ok(tenant)
    }

    /// One that puts up with a taint.
    fn start_tolerant(stage: &Stage, name: &str, card: u32, key: &str, effect: &str) -> anyhow::Result<Self> {
        let toleration = json!([{"key": key, "operator": "Exists", "effect": effect}]);
        let request = part_of(stage, card).set("tolerations", toleration);
        let tenant = Self::create(stage, claim_template(name, &[request]))?;
        stage.wait_running(&tenant.pod)?;
        Ok(tenant)
    }

    /// Fails if its container has been touched.
    fn check(&self, stage: &Stage) -> anyhow::Result<()> {
        let pod = stage.get(&self.pod)?;
        let main = &pod["status"]["containerStatuses"][0];
        ensure!(main["ready"] == true && main["restartCount"] == 0, "pod {} ran: {main}", name(&self.pod));
        ensure!(pod["metadata"]["deletionTimestamp"].is_null(), "pod {} is on its way out", name(&self.pod));
        Ok(())
    }

    fn leave(self, stage: &Stage) -> anyhow::Result<()> {
        stage.delete(&[&self.pod, &self.claim])
    }
}

/// The taints of a device as `key=value:effect`; none if it is not offered.
fn taints_of<'a>(devices: impl IntoIterator<Item = &'a Value>, card: u32) -> Option<Vec<String>> {
    let device = devices.into_iter().find(|device| device["name"] == format!("npu-{card}"))?;
    let text = |taint: &Value| {
        let part = |name: &str| taint[name].as_str().unwrap_or_default().to_owned();
        format!("{}={}:{}", part("key"), part("value"), part("effect"))
    };
    Some(device["taints"].as_array().into_iter().flatten().map(text).collect())
}

/// Waits until a card is offered with these taints and no others.
fn wait_taints(stage: &Stage, card: u32, wanted: &[&str]) -> anyhow::Result<()> {
    wait(&format!("npu-{card} to be offered with taints {wanted:?}"), || {
        let taints = taints_of(&stage.devices()?, card);
        ensure!(taints.as_deref().is_some_and(|taints| taints == wanted), "{taints:?}");
        Ok(Some(()))
    })
}

/// Waits until a card is not offered.
fn wait_withdrawn(stage: &Stage, card: u32) -> anyhow::Result<()> {
    wait(&format!("npu-{card} to be withdrawn"), || Ok(taints_of(&stage.devices()?, card).is_none().then_some(())))
}

/// The taints of a card as `kubectl` shows them.
fn kubectl_taints(stage: &Stage, card: u32) -> anyhow::Result<String> {
    let path = format!(
        "jsonpath={{range .items[*].spec.devices[?(@.name==\"npu-{card}\")].taints[*]}}\
         {{.key}}={{.value}}:{{.effect}}{{\"\\n\"}}{{end}}"
    );
    Ok(stage.plane().kubectl(&["get", "resourceslices", "--output", &path])?.trim().to_owned())
}

/// What `npuctl COMMAND` says of a card.
fn said_of(stage: &Stage, command: &str, card: u32) -> anyhow::Result<Value> {
    // `npuctl health` ends with 8 if a card is not ok; what it shows counts here.
    let text = stage.plane().sh(&format!("npuctl {command} --output json || test $? = 8"))?;
    let document: Value = serde_json::from_str(&text)?;
    let items = document["items"].as_array().context("npuctl shows no items")?;
    let item = items.iter().find(|item| item["name"] == format!("npu-{card}"));
    item.cloned().with_context(|| format!("npuctl {command} does not name npu-{card}: {document}"))
}

/// Waits until an event of the node has this text.
fn wait_node_event(stage: &Stage, text: &str) -> anyhow::Result<String> {
    stage.wait_event(&json!({"metadata": {"name": NODE}}), text)
}

/// A card falls ill; when.
fn occur(stage: &Stage, card: u32) -> anyhow::Result<Instant> {
    stage.world(|world| {
        let at = Instant::now();
        world.occur(card, ECC, CRITICAL)?;
        world.set_health(card, CRITICAL.into())?;
        Ok(at)
    })
}

/// A card is well again; since when.
fn recover(stage: &Stage, card: u32) -> anyhow::Result<Instant> {
    stage.world(|world| {
        let at = Instant::now();
        world.recover(card, ECC, CRITICAL)?;
        world.set_health(card, 0)?;
        Ok(at)
    })
}

/// A fault is in the slice at once, keeps new pods from the card and leaves the old one alone, until it is over.
fn fault(stage: &Stage) -> anyhow::Result<()> {
    stage.with(&driver())?;
    let old = Tenant::start(stage, "patient", 0)?;
    let changes = stage.api().watch(SLICES)?;
    // Where the server keeps no taints, the card that nobody has shows how soon it is withdrawn.
    let taints = stage.kubernetes().taints();
    let began = occur(stage, 0)?;
    let (began, shown) = if taints { (began, 0) } else { (occur(stage, 1)?, 1) };
    let told = wait_for(Duration::from_secs(20), &format!("the fault of npu-{shown} to be in the slice"), || {
        while let Ok((at, event)) = changes.try_recv() {
            let devices = event["object"]["spec"]["devices"].as_array().into_iter().flatten();
            let there = taints_of(devices, shown);
            if there.as_ref().is_none_or(|taints| !taints.is_empty()) {
                return Ok(Some((at - began, there)));
            }
        }
        Ok(None)
    });
    let (took, there) = told?;
    let what = if taints { "taint in the slice" } else { "card out of the slice" };
    stage.note(format!("fault → {what} {:.0} ms, as a watch sees it", took.as_secs_f64() * 1000.0));
    ensure!(took <= AT_ONCE, "the fault was in the slice only after {took:.1?}: {there:?}");
    wait_node_event(stage, "health of npu-0 is tainted")?;
    stage.wait_event(&old.pod, "80E01801 HBM multi-bit ECC")?;
    let health = &said_of(stage, "health", 0)?["health"];
    ensure!(health["condition"] == "tainted" && health["codes"] == json!(["80E01801"]), "npuctl says {health}");

    let old = if taints {
        ensure!(kubectl_taints(stage, 0)? == UNHEALTHY, "kubectl shows {:?}", kubectl_taints(stage, 0)?);
        ensure!(kubectl_taints(stage, 1)?.is_empty(), "kubectl shows {:?} for npu-1", kubectl_taints(stage, 1)?);
        Some(old)
    } else {
        // A claim lives on it.
        wait_taints(stage, 0, &[])?;
        old.check(stage)?;
        old.leave(stage)?;
        wait_withdrawn(stage, 0)?;
        None
    };
    let new = Tenant::ask(stage, "newcomer", 0)?;
    let refused = stage.wait_unschedulable(&new.pod)?;
    ensure!(refused.contains("cannot allocate all claims"), "the newcomer waits for another reason: {refused}");
    if taints {
        Tenant::start_tolerant(stage, "tolerant", 0, "npu.huawei.com/unhealthy", "NoSchedule")?.leave(stage)?;
    }

    let over = recover(stage, 0)?;
    if !taints {
        recover(stage, 1)?;
    }
    wait_taints(stage, 0, &[])?;
    stage.note(format!("over → usable {:.1} s (health.quiet is 1 s)", over.elapsed().as_secs_f64()));
    stage.wait_running(&new.pod)?;
    if let Some(old) = old {
        old.check(stage)?;
        old.leave(stage)?;
    }
    new.leave(stage)?;
    wait_taints(stage, 1, &[])?;
    stage.wait_empty()
}

/// How the only container's devices are, as the pod's status tells.
fn health_in_status(stage: &Stage, tenant: &Tenant) -> anyhow::Result<Value> {
    let pod = stage.get(&tenant.pod)?;
    let all = &pod["status"]["containerStatuses"][0]["allocatedResourcesStatus"];
    let entry = format!("claim:{}", name(&tenant.claim));
    let ours = |one: &&Value| one["name"].as_str().is_some_and(|name| name.starts_with(&entry));
    let ours = all.as_array().into_iter().flatten().find(ours);
    match ours.and_then(|one| one["resources"].as_array()).map(Vec::as_slice) {
        Some([resource]) => Ok(resource.clone()),
        _ => bail!("not one device in the pod's status: {all}"),
    }
}

/// Waits until the pod's status tells this health.
fn wait_health(stage: &Stage, tenant: &Tenant, wanted: &str) -> anyhow::Result<Value> {
    wait(&format!("the pod's status to tell {wanted}"), || {
        let resource = health_in_status(stage, tenant)?;
        ensure!(resource["health"] == wanted, "{resource}");
        Ok(Some(resource))
    })
}

/// The pod's status tells how its card is, also after kubelet began anew in the middle of a fault.
fn in_pod_status(stage: &Stage) -> anyhow::Result<()> {
    stage.with(&driver())?;
    let requests = [part_of(stage, 1)];
    // Kubelet of 1.34 shows only claims that have the name by which the pod calls them.
    let older = stage.kubernetes().minor < 35;
    let claim = if older { claim("in-status", &requests) } else { claim_template("in-status", &requests) };
    let patient = Tenant::create(stage, claim)?;
    stage.wait_running(&patient.pod)?;
    wait_health(stage, &patient, "Healthy")?;
    let began = occur(stage, 1)?;
    let ill = wait_health(stage, &patient, "Unhealthy")?;
    let took = began.elapsed();
    // 1.34 has no message.
    let message = ill["message"].as_str().map_or_else(String::new, |text| format!(" ({text})"));
    stage.note(format!("fault → Unhealthy in the pod's status {:.1} s{message}", took.as_secs_f64()));

    let registrations = stage.status()?["kubelet"]["registrations"].as_u64().context("no number")?;
    stage.plane().run(&["systemctl", "restart", "kubelet"])?;
    wait("kubelet to register the driver again", || {
        let kubelet = stage.status()?["kubelet"].take();
        ensure!(kubelet["registered"] == true && kubelet["registrations"].as_u64() > Some(registrations), "{kubelet}");
        Ok(Some(()))
    })?;
    // It removed the slices, and they must be back with the taint.
    wait_taints(stage, 1, &[UNHEALTHY])?;
    wait_health(stage, &patient, "Unhealthy")?;
    let over = recover(stage, 1)?;
    // Kubelet remembers over its restart what it was told last: that this changes shows that it listens again.
    wait_health(stage, &patient, "Healthy")?;
    stage.note(format!("over → Healthy {:.1} s, kubelet restarted in between", over.elapsed().as_secs_f64()));
    patient.check(stage)?;
    patient.leave(stage)?;
    wait_taints(stage, 1, &[])?;
    stage.wait_empty()
}

/// An operator keeps claims from cards: who may stay stays, over a restart too, until it is undone.
fn drain(stage: &Stage) -> anyhow::Result<()> {
    stage.with(&driver())?;
    let taints = stage.kubernetes().taints();
    // Where no taints are kept nobody is evicted, and the scheduler of 1.34 keeps the toleration to itself.
    let stays = match (taints, stage.kubernetes().minor) {
        (true, ..35) => None,
        (true, _) => Some(Tenant::start_tolerant(stage, "stays", 0, "npu.huawei.com/drained", "NoExecute")?),
        (false, _) => Some(Tenant::start(stage, "stays", 0)?),
    };
    let held = Tenant::start(stage, "held", 1)?;
    let npuctl = |words: &str| stage.plane().sh(&format!("npuctl {words}"));

    npuctl("drain npu-0 --reason 'a fan'")?;
    npuctl("cordon npu-1 --reason 'a fan'")?;
    let shown = |card: u32, taint: &str| if taints { wait_taints(stage, card, &[taint]) } else { Ok(()) };
    shown(0, DRAINED)?;
    shown(1, CORDONED)?;
    if taints {
        ensure!(kubectl_taints(stage, 0)? == DRAINED, "kubectl shows {:?}", kubectl_taints(stage, 0)?);
    }
    for (card, kind) in [(0, "drained"), (1, "cordoned")] {
        let device = said_of(stage, "devices", card)?;
        ensure!(device["hold"]["kind"] == kind && device["hold"]["reason"] == "a fan", "npuctl says {device}");
    }
    let word = if stays.is_some() { "draining" } else { "drained" };
    ensure!(said_of(stage, "devices", 0)?["state"] == word, "npu-0 is not {word}");
    wait_node_event(stage, "npu-0 is drained by an operator: a fan")?;
    if let Some(stays) = &stays {
        stage.wait_event(&stays.pod, "npu-0 is drained by an operator: a fan")?;
    }

    stage.plane().run(&["systemctl", "restart", "npu-dra"])?;
    stage.wait_published()?;
    shown(0, DRAINED)?;
    shown(1, CORDONED)?;
    stays.iter().chain([&held]).try_for_each(|tenant| tenant.check(stage))?;
    let left = if taints {
        npuctl("drain npu-1 --reason 'a fan'")?;
        let evicting = Instant::now();
        stage.wait_gone(&held.pod)?;
        stage.note(format!("drain → pod evicted {:.1} s", evicting.elapsed().as_secs_f64()));
        stage.delete(&[&held.claim])?;
        stays
    } else {
        // A card is withdrawn when nobody has it any more.
        if let Some(stays) = stays {
            stays.leave(stage)?;
        }
        wait_withdrawn(stage, 0)?;
        Some(held)
    };
    let new = Tenant::ask(stage, "newcomer", 0)?;
    let refused = stage.wait_unschedulable(&new.pod)?;
    ensure!(refused.contains("cannot allocate all claims"), "the newcomer waits for another reason: {refused}");

    npuctl("drain npu-0 --undo")?;
    npuctl("cordon npu-1 --undo")?;
    wait_taints(stage, 0, &[])?;
    wait_taints(stage, 1, &[])?;
    stage.wait_running(&new.pod)?;
    if let Some(left) = left {
        left.check(stage)?;
        left.leave(stage)?;
    }
    new.leave(stage)?;
    stage.wait_empty()
}

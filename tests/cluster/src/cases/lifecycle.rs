//! What happens to claims when something around them goes away and comes back.

use std::{fs, time::Instant};

use anyhow::{Context as _, ensure};
use dcmi::world::Profile;
use serde_json::{Value, json};

use super::Case;
use crate::{
    api::path_of,
    driver::{Driver, is_complete},
    plane::BOOT_ID,
    stage::{Request, Stage, claim, claim_template, pod, request, wait},
};

pub(crate) const CASES: &[Case] = &[
    ("driver-down", driver_down),
    ("server-down", server_down),
    ("claim-forced", claim_forced),
    ("booked-twice", booked_twice),
    ("boot", boot),
    ("upgrade", upgrade),
];

/// 8Gi where cards are shared, else a whole card.
pub(super) fn part(stage: &Stage) -> Request {
    if stage.kubernetes().shares() { request("npu").memory("8Gi") } else { request("npu") }
}

/// How many vNPUs a claim for [`part`] has.
fn cuts(stage: &Stage) -> usize {
    usize::from(stage.kubernetes().shares())
}

/// The numbers of the cards that a container sees.
fn cards(stage: &Stage, pod: &Value) -> anyhow::Result<String> {
    wait("the container to list its device nodes", || {
        let said = stage.shell(pod, "cd /dev && ls -d davinci[0-9]*")?;
        ensure!(said.code == 0, "{said:?}");
        Ok(Some(said.text))
    })
}

/// A pod that the API server keeps until kubelet has let go of it: one without any grace is deleted at once.
fn graceful(name: &str, claims: &[&Value]) -> Value {
    let mut pod = pod(name, claims);
    pod["spec"]["terminationGracePeriodSeconds"] = json!(1);
    pod
}

/// What the node holds of claims: names and contents of records and CDI files, and vNPUs by id and template.
#[derive(Debug, PartialEq)]
struct Held {
    records: Vec<(String, Value)>,
    cdi: Vec<(String, Value)>,
    vnpus: Vec<(u32, u32, String)>,
}

impl Held {
    fn by(stage: &Stage) -> anyhow::Result<Self> {
        let vnpus = stage.vnpus()?.into_iter().map(|vnpu| (vnpu.id, vnpu.phy, vnpu.template)).collect();
        Ok(Self { records: stage.records()?, cdi: stage.cdi()?, vnpus })
    }
}

/// A pod goes and another comes while the driver is down; both end well when it is back.
fn driver_down(stage: &Stage) -> anyhow::Result<()> {
    stage.with(&Driver::cutting())?;
    let template = claim_template("down", &[part(stage)]);
    let (old, new) = (graceful("old", &[&template]), graceful("new", &[&template]));
    stage.create(&[&template, &old])?;
    stage.wait_running(&old)?;
    let held = Held::by(stage)?;
    ensure!(held.records.len() == 1 && held.cdi.len() == 1 && held.vnpus.len() == cuts(stage), "{held:?}");

    stage.plane().run(&["systemctl", "stop", "npu-dra.service"])?;
    stage.api().delete_gently(&path_of(&old)?)?;
    stage.create(&[&new])?;
    stage.wait_event(&new, "FailedPrepareDynamicResources")?;
    // Kubelet keeps a pod whose claim it could not release, so that nobody else is given its card.
    let cursor = stage.plane().cursor()?;
    wait("kubelet to try to release the claim", || {
        Ok(stage.plane().journal("kubelet", &cursor)?.contains("unprepare dynamic resources").then_some(()))
    })?;
    ensure!(stage.api().find(&path_of(&old)?)?.is_some(), "the pod is gone before its claim was released");
    ensure!(Held::by(stage)? == held, "something changed while the driver was down");

    let back = Instant::now();
    stage.plane().run(&["systemctl", "start", "npu-dra.service"])?;
    stage.wait_published()?;
    stage.wait_running(&new)?;
    let created = back.elapsed();
    stage.wait_gone(&old)?;
    let deleted = back.elapsed();
    let after = Held::by(stage)?;
    ensure!(after.records.len() == 1 && after.records[0].0 != held.records[0].0, "{after:?}");
    ensure!(after.vnpus.len() == cuts(stage), "{after:?}");
    stage.note(format!(
        "start → new pod runs {:.1} s, old pod gone {:.1} s (kubelet's retries)",
        created.as_secs_f64(),
        deleted.as_secs_f64()
    ));
    stage.delete(&[&new, &template])?;
    stage.wait_empty()
}

/// Without an API server a claim is released, the driver starts, and a pod that comes meanwhile waits and then runs.
fn server_down(stage: &Stage) -> anyhow::Result<()> {
    stage.with(&Driver::cutting())?;
    let template = claim_template("server", &[part(stage)]);
    let (old, new) = (pod("ends", &[&template]), pod("begins", &[&template]));
    stage.create(&[&template, &old])?;
    stage.wait_running(&old)?;
    let stop_server = || stage.plane().run(&["systemctl", "stop", "kube-apiserver.service"]);

    // The driver is away while the new pod is given to the node, so that its claim is not prepared before the server goes.
    stage.plane().run(&["systemctl", "stop", "npu-dra.service"])?;
    stage.create(&[&new])?;
    stage.wait_event(&new, "FailedPrepareDynamicResources")?;
    let container = stage.get(&old)?["status"]["containerStatuses"][0]["containerID"].clone();
    let container = container.as_str().and_then(|id| id.strip_prefix("containerd://")).context("no container")?;
    stop_server()?;
    stage.plane().run(&["systemctl", "start", "npu-dra.service"])?;
    wait("the driver to be registered", || {
        let status = stage.status()?;
        ensure!(status["kubelet"]["registered"] == true, "{status}");
        Ok(Some(()))
    })?;
    let cards = stage.npuctl(&["devices"])?;
    ensure!(cards.len() == 8, "without a server the driver shows {} cards", cards.len());

    stage.plane().run(&["ctr", "-n", "k8s.io", "tasks", "kill", "--signal", "SIGKILL", container])?;
    let ended = Instant::now();
    stage.wait_empty().context("without a server the claim is not released")?;
    let released = ended.elapsed();

    stage.plane().run(&["systemctl", "start", "kube-apiserver.service"])?;
    stage.plane().wait_for_server()?;
    let back = Instant::now();
    stage.wait_published()?;
    stage.wait_running(&new)?;
    let ran = back.elapsed();
    stage.note(format!(
        "released {:.1} s after the container's end; new pod runs {:.1} s after the server is back",
        released.as_secs_f64(),
        ran.as_secs_f64()
    ));
    stage.delete(&[&old, &new, &template])?;
    stage.wait_empty()
}

/// A claim that is taken away from under its pod, and made again under its name, is released with the pod.
fn claim_forced(stage: &Stage) -> anyhow::Result<()> {
    stage.with(&Driver::cutting())?;
    let claim = claim("forced", &[part(stage)]);
    let pod = pod("robbed", &[&claim]);
    stage.create(&[&claim, &pod])?;
    stage.wait_running(&pod)?;
    let held = Held::by(stage)?;
    let path = path_of(&claim)?;
    stage.api().merge(&path, &json!({"metadata": {"finalizers": null}}))?;
    stage.api().delete(&path)?;
    stage.wait_gone(&claim)?;
    // Somebody who repairs things this way makes the claim again.
    stage.create(&[&claim])?;
    ensure!(Held::by(stage)? == held, "the pod still runs, but its claim's devices changed");
    stage.delete(&[&pod])?;
    stage.wait_empty().context("the claim that is no more is not released")?;
    stage.delete(&[&claim])
}

/// Two claims are booked one card, as a busy scheduler of 1.34.3 does now and then: the driver refuses the second, and
/// says who has the card. The schedulers of all releases keep booked devices as a set: when the second claim goes they take
/// the card for free, and book it again.
fn booked_twice(stage: &Stage) -> anyhow::Result<()> {
    const REFUSAL: &str = "is held by claim default/first";
    stage.with(&Driver::whole().on(Profile::Many(1)))?;
    let [first, second, third] = ["first", "second", "third"].map(|name| claim(name, &[request("npu")]));
    let [holder, rival, late] =
        [("holder", &first), ("rival", &second), ("late", &third)].map(|(name, claim)| pod(name, &[claim]));
    stage.create(&[&first, &holder])?;
    stage.wait_running(&holder)?;
    let held = Held::by(stage)?;
    let allocation = stage.get(&first)?["status"]["allocation"].clone();
    stage.create(&[&second])?;
    stage.api().merge(&(path_of(&second)? + "/status"), &json!({"status": {"allocation": allocation}}))?;
    stage.create(&[&rival])?;
    stage.wait_event(&rival, REFUSAL)?;
    stage.delete(&[&rival, &second])?;
    stage.create(&[&third, &late])?;
    stage.wait_event(&late, REFUSAL)?;
    // A new scheduler gathers what is booked from the claims that there are.
    stage.delete(&[&late, &third])?;
    stage.plane().run(&["systemctl", "restart", "kube-scheduler.service"])?;
    stage.create(&[&third, &late])?;
    stage.wait_unschedulable(&late)?;
    ensure!(Held::by(stage)? == held, "what the first claim has was touched");
    stage.delete(&[&holder, &first, &late, &third])?;
    stage.wait_empty()
}

/// The node boots: containers, vNPUs and their device nodes are gone, and the same claim gets its device again.
fn boot(stage: &Stage) -> anyhow::Result<()> {
    stage.with(&Driver::cutting())?;
    let template = claim_template("boot", &[part(stage)]);
    let mut pod = pod("endures", &[&template]);
    pod["spec"]["restartPolicy"] = json!("Always");
    stage.create(&[&template, &pod])?;
    stage.wait_running(&pod)?;
    let before = Held::by(stage)?;
    let nodes = cards(stage, &pod)?;
    let booted = boot_id(&before)?;

    stage.plane().run(&["systemctl", "stop", "kubelet.service", "npu-dra.service"])?;
    stage
        .plane()
        .sh("for task in $(ctr -n k8s.io tasks list -q); do ctr -n k8s.io tasks kill -s SIGKILL $task; done")?;
    stage.world(|world| Ok(world.reboot()?))?;
    let next = "5a3b0c9e-1f53-4e0c-9d5f-000000000002";
    fs::write(stage.plane().file(BOOT_ID), format!("{next}\n"))?;
    stage.plane().run(&["systemctl", "start", "npu-dra.service", "kubelet.service"])?;
    let started = Instant::now();
    stage.wait_restarted(&pod, 1)?;
    stage.note(format!("runs again {:.1} s after kubelet's start", started.elapsed().as_secs_f64()));

    let after = Held::by(stage)?;
    ensure!(boot_id(&after)? == next && booted != next, "the record is still of boot {booted}: {after:?}");
    ensure!(after.vnpus == before.vnpus, "the claim had {:?} and has {:?}", before.vnpus, after.vnpus);
    ensure!(after.cdi == before.cdi, "the CDI file was {:?} and is {:?}", before.cdi, after.cdi);
    let again = cards(stage, &pod)?;
    ensure!(again == nodes, "the container had {nodes} and has {again}");
    stage.wait_published()?;
    stage.delete(&[&pod, &template])?;
    stage.wait_empty()
}

/// The boot that the only record names.
fn boot_id(held: &Held) -> anyhow::Result<String> {
    fn find(value: &Value) -> Option<&str> {
        match value {
            Value::Object(map) => map.get("bootId").and_then(Value::as_str).or_else(|| map.values().find_map(find)),
            _ => None,
        }
    }
    let [(_, record)] = &held.records[..] else { anyhow::bail!("not one record: {held:?}") };
    find(record).map(str::to_owned).with_context(|| format!("the record names no boot: {record}"))
}

/// The control plane becomes a newer one with live claims: slices are laid anew for it, and claims stay as they are.
fn upgrade(stage: &Stage) -> anyhow::Result<()> {
    let next = stage.setting().next.context("this setting has nothing to upgrade to")?;
    stage.with(&Driver::cutting())?;
    let (small, whole) = (claim_template("small", &[part(stage)]), claim_template("large", &[request("npu")]));
    let (first, second) = (pod("small", &[&small]), pod("large", &[&whole]));
    stage.create(&[&small, &whole, &first, &second])?;
    stage.wait_running(&first)?;
    stage.wait_running(&second)?;
    ensure!(placeholders(stage)? == 32, "1.34 is not offered its placeholders");
    let model = stage.status()?["slicing"]["active"].clone();
    let (held, claims) = (Held::by(stage)?, [stage.claim_of(&first, "small")?, stage.claim_of(&second, "large")?]);

    let started = Instant::now();
    stage.plane().switch(&next)?;
    let up = started.elapsed();
    wait("the slices to be laid anew", || {
        let slices = stage.slices()?;
        ensure!(is_complete(&slices) && placeholders(stage)? == 0, "{} placeholders", placeholders(stage)?);
        Ok(Some(()))
    })?;
    stage.note(format!(
        "1.34.3 → 1.36.3 in {:.1} s, slices laid anew {:.1} s later",
        up.as_secs_f64(),
        started.elapsed().saturating_sub(up).as_secs_f64()
    ));
    stage.wait_published()?;
    ensure!(stage.status()?["slicing"]["active"] == model, "the model changed from {model}");
    ensure!(Held::by(stage)? == held, "the upgrade changed what the node holds");
    stage.wait_running(&first)?;
    stage.wait_running(&second)?;
    for (pod, entry, before) in [(&first, "small", &claims[0]), (&second, "large", &claims[1])] {
        let after = stage.claim_of(pod, entry)?;
        ensure!(after["status"]["allocation"] == before["status"]["allocation"], "was {before}, is {after}");
    }

    // The new scheduler sees what is taken: four more cards' worth of eighths beside the whole card, none on it.
    stage.install_manifests()?;
    let third = pod("more", &[&small]);
    stage.create(&[&third])?;
    stage.wait_running(&third)?;
    ensure!(stage.vnpus()?.len() == 2, "{:?}", stage.vnpus()?);
    let taken = &claims[1]["status"]["allocation"]["devices"]["results"][0]["device"];
    let given = stage.claim_of(&third, "small")?;
    ensure!(
        given["status"]["allocation"]["devices"]["results"][0]["device"] != *taken,
        "{given} has the whole card {taken}"
    );
    stage.delete(&[&first, &second, &third, &small, &whole])?;
    stage.wait_empty()
}

/// How many published devices are placeholders.
fn placeholders(stage: &Stage) -> anyhow::Result<usize> {
    let devices = stage.devices()?;
    Ok(devices.iter().filter(|device| device["attributes"]["type"]["string"] == "placeholder").count())
}

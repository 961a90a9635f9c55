//! Pods that come and go for a while: nothing is left, and memory does not grow.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use dcmi::world::Profile;
use serde_json::{Value, json};

use super::{
    Case,
    booking::{Share, overbooked},
};
use crate::{
    driver::{Driver, processes_pss},
    stage::{Stage, claim_template, name, pod, request, wait},
};

pub(crate) const CASES: &[Case] = &[("soak", soak_briefly), ("soak-3-minutes", soak_long)];

/// Pods of one round.
const PODS: usize = 20;
/// Cards of the node.
const CARDS: u32 = 24;
/// How many of them are to spare where they are not shared.
const SPARE: usize = 4;
/// By how much the last rounds may be above the first: one leaked page a pod would be more after three minutes.
const GROWTH_KIB: u64 = 1024;

fn soak_briefly(stage: &Stage) -> anyhow::Result<()> {
    soak(stage, Duration::from_secs(30))
}

fn soak_long(stage: &Stage) -> anyhow::Result<()> {
    soak(stage, Duration::from_mins(3))
}

/// Four cards are taken whole and four in quarters; where cards are not shared 20 are. Some are to spare, for the
/// scheduler's faults: one of 1.34 books a card twice ([`run`]), and now and then a busy one of 1.36 or 1.37 finds no room
/// on the last card that has some, and does not look at the pod again.
fn soak(stage: &Stage, time: Duration) -> anyhow::Result<()> {
    let shares = stage.kubernetes().shares();
    let driver = if shares { Driver::cutting() } else { Driver::whole() };
    let driver = driver.on(Profile::Many(CARDS));
    stage.with(&driver)?;
    let (whole, part) =
        (claim_template("whole", &[request("npu")]), claim_template("part", &[request("npu").memory("8Gi")]));
    stage.create(&[&whole, &part])?;
    let pods: Vec<Value> = (0..PODS)
        .map(|number| {
            let template = if shares && number >= 4 { &part } else { &whole };
            pod(&format!("soak-{number}"), &[template])
        })
        .collect();
    let pods: Vec<&Value> = pods.iter().collect();
    let pid = stage.plane().main_pid("npu-dra.service")?;
    let (mut memory, mut booked_twice) = (Vec::new(), 0);
    let started = Instant::now();
    while started.elapsed() < time || memory.len() < 3 {
        stage.create(&pods)?;
        let mut others = Vec::new();
        for pod in &pods {
            others.extend(run(stage, pod)?);
        }
        booked_twice += others.len();
        let (records, cdi, vnpus) = (stage.records()?.len(), stage.cdi()?.len(), stage.vnpus()?.len());
        let cut = if shares { PODS - 4 } else { 0 };
        ensure!((records, cdi, vnpus) == (PODS, PODS, cut), "{records} records, {cdi} CDI files, {vnpus} vNPUs");
        stage.delete(&pods.iter().copied().chain(&others).collect::<Vec<_>>())?;
        stage.wait_empty()?;
        memory.push(processes_pss(stage.plane())?);
    }
    ensure!(stage.plane().main_pid("npu-dra.service")? == pid, "the driver was restarted");
    // The first round fills caches.
    let (first, last) = (memory.get(1).context("no rounds")?, memory.last().context("no rounds")?);
    let took = started.elapsed().as_secs_f64();
    stage.note(format!(
        "{} × {PODS} pods in {took:.0} s; Σ Pss {:.1} MiB after round 2, {:.1} MiB after the last",
        memory.len(),
        mebibytes(*first),
        mebibytes(*last)
    ));
    if booked_twice > 0 {
        stage.note(format!("{booked_twice} pods for which the scheduler had booked a card beyond what it has"));
    }
    ensure!(*last <= first + GROWTH_KIB, "memory grew: Σ Pss in KiB after each round: {memory:?}");
    stage.delete(&[&whole, &part])
}

/// Waits until a pod runs, or another one in its stead; those others. A busy scheduler of 1.34.3 may book a card beyond what
/// it has, and the driver refuses the last claim. The refused pod stays where it is meanwhile: without its claim this
/// scheduler may take the card for free and book it again (case booked-twice).
fn run(stage: &Stage, pod: &Value) -> anyhow::Result<Vec<Value>> {
    const REFUSALS: [&str; 2] = ["is held by claim", "there is no room for"];
    let older = stage.kubernetes().minor < 35;
    let mut others: Vec<Value> = Vec::new();
    loop {
        let pod = others.last().unwrap_or(pod);
        let refused = older
            && wait(&format!("pod {} to run, or to be refused", name(pod)), || {
                let now = stage.get(pod)?;
                let runs = now["status"]["phase"] == "Running";
                let events = stage.events(&now);
                ensure!(runs || REFUSALS.iter().any(|text| events.contains(text)), "{}\n{events}", now["status"]);
                Ok(Some(!runs))
            })?;
        if !refused {
            stage.wait_running(pod)?;
            return Ok(others);
        }
        let claim = stage.claim_of(pod, pod["spec"]["resourceClaims"][0]["name"].as_str().context("no claim")?)?;
        let own = Share::of(&claim).context("refused without an allocation")?;
        let claims = stage.api().list("/apis/resource.k8s.io/v1/namespaces/default/resourceclaims")?;
        let over = overbooked(&stage.slices()?, &claims)?;
        let booked_twice = over.iter().any(|(_, device)| own.iter().any(|share| share.device == *device));
        ensure!(booked_twice, "refused, but {own:?} is not booked beyond what it has: {}", stage.events(pod));
        ensure!(others.len() < SPARE, "pod {} and its {} followers were refused", name(pod), others.len());
        let mut other = pod.clone();
        other["metadata"]["name"] = json!(format!("{}-again", name(pod)));
        stage.create(&[&other])?;
        others.push(other);
    }
}

fn mebibytes(kib: u64) -> f64 {
    f64::from(u32::try_from(kib).unwrap_or(u32::MAX)) / 1024.0
}

//! Pods that come and go for a while: nothing is left, and memory does not grow.

use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use dcmi::world::Profile;
use serde_json::Value;

use super::{Case, booking::Share};
use crate::{
    api::path_of,
    driver::{Driver, processes_pss},
    stage::{Stage, claim_template, name, pod, request, wait},
};

pub(crate) const CASES: &[Case] = &[("soak", soak_briefly), ("soak-3-minutes", soak_long)];

/// Pods of one round.
const PODS: usize = 20;
/// By how much the last rounds may be above the first: one leaked page a pod would be more after three minutes.
const GROWTH_KIB: u64 = 1024;

fn soak_briefly(stage: &Stage) -> anyhow::Result<()> {
    soak(stage, Duration::from_secs(30))
}

fn soak_long(stage: &Stage) -> anyhow::Result<()> {
    soak(stage, Duration::from_mins(3))
}

/// Four cards are taken whole and four in quarters; where cards are not shared 20 are. Some are to spare: now and then a
/// busy scheduler of 1.36 or 1.37 finds no room on the last one that has some, and does not look at the pod again.
fn soak(stage: &Stage, time: Duration) -> anyhow::Result<()> {
    let shares = stage.kubernetes().shares();
    let driver = if shares { Driver::cutting() } else { Driver::whole() };
    let driver = driver.on(Profile::Many(24));
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
        for pod in &pods {
            booked_twice += run(stage, pod)?;
        }
        let (records, cdi, vnpus) = (stage.records()?.len(), stage.cdi()?.len(), stage.vnpus()?.len());
        let cut = if shares { PODS - 4 } else { 0 };
        ensure!((records, cdi, vnpus) == (PODS, PODS, cut), "{records} records, {cdi} CDI files, {vnpus} vNPUs");
        stage.delete(&pods)?;
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
        stage.note(format!("{booked_twice} cards that the scheduler had booked twice"));
    }
    ensure!(*last <= first + GROWTH_KIB, "memory grew: Σ Pss in KiB after each round: {memory:?}");
    stage.delete(&[&whole, &part])
}

/// Waits until a pod runs. A busy scheduler of 1.34.3 may give one card to two claims (kubernetes/kubernetes pull request
/// 136269), of which the driver refuses the second: such a pod is made anew. How often that was.
fn run(stage: &Stage, pod: &Value) -> anyhow::Result<usize> {
    let older = stage.kubernetes().minor < 35;
    for booked_twice in 0.. {
        let refused = older
            && wait(&format!("pod {} to run, or to be refused", name(pod)), || {
                let now = stage.get(pod)?;
                let runs = now["status"]["phase"] == "Running";
                ensure!(runs || stage.events(&now).contains("is held by claim"), "{}", now["status"]);
                Ok(Some(!runs))
            })?;
        if !refused {
            stage.wait_running(pod)?;
            return Ok(booked_twice);
        }
        let claim = stage.claim_of(pod, pod["spec"]["resourceClaims"][0]["name"].as_str().context("no claim")?)?;
        let (own, path) = (Share::of(&claim).context("refused without an allocation")?, path_of(&claim)?);
        let all = stage.api().list("/apis/resource.k8s.io/v1/namespaces/default/resourceclaims")?;
        let others = all.iter().filter(|other| name(other) != name(&claim)).filter_map(Share::of).flatten();
        let twice = others.into_iter().any(|share| own.iter().any(|mine| mine.device == share.device));
        ensure!(twice, "no other claim has {own:?}: {}", stage.events(pod));
        stage.delete(&[pod])?;
        wait(&format!("{path} to go after its pod"), || Ok(stage.api().find(&path)?.is_none().then_some(())))?;
        stage.create(&[pod])?;
    }
    bail!("pod {} was refused for ever", name(pod))
}

fn mebibytes(kib: u64) -> f64 {
    f64::from(u32::try_from(kib).unwrap_or(u32::MAX)) / 1024.0
}

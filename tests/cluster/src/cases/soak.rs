//! Pods that come and go for a while: nothing is left, and memory does not grow.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use dcmi::world::Profile;
use serde_json::Value;

use super::Case;
use crate::{
    driver::{Driver, processes_pss},
    stage::{Stage, claim_template, pod, request},
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
    let mut memory = Vec::new();
    let started = Instant::now();
    while started.elapsed() < time || memory.len() < 3 {
        stage.create(&pods)?;
        for pod in &pods {
            stage.wait_running(pod)?;
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
    ensure!(*last <= first + GROWTH_KIB, "memory grew: Σ Pss in KiB after each round: {memory:?}");
    stage.delete(&[&whole, &part])
}

fn mebibytes(kib: u64) -> f64 {
    f64::from(u32::try_from(kib).unwrap_or(u32::MAX)) / 1024.0
}

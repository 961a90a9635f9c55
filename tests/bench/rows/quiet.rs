//! What needs time to pass: memory, the writes of a quiet hour, slices that were wiped, a fault on its way to a taint.

use std::{
    fs,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, ensure};
use serde_json::Value;
use testkit::node::{DRIVER, NODE, SOON};
use tokio::time::{Instant as Clock, sleep_until};

use super::claims::CARDS;
use crate::{
    Run,
    samples::Samples,
    stage::{Stage, prepared},
};

/// Time between the last prepare and the look at the memory.
const SETTLE: Duration = Duration::from_secs(30);
/// Length of the quiet time.
const QUIET: Duration = Duration::from_mins(5);
const HOUR: Duration = Duration::from_hours(1);
/// DCMI's health value of a critical fault.
const CRITICAL: u32 = 3;
/// The vendor call that tells of it.
const HEALTH_CALL: &str = "dcmi_get_device_health";

/// Memory of a small and a full node, then five quiet minutes of the full one. A third node is disturbed meanwhile.
pub(crate) async fn quiet(run: &mut Run) -> anyhow::Result<()> {
    let (settle, quiet) = (run.waiting(SETTLE), run.waiting(QUIET));
    let (mut small, small_since) = loaded(run, "small", 8, 56).await?;
    let (mut full, full_since) = loaded(run, "full", CARDS, 1000).await?;
    for (name, stage, since) in [("memory-8", &mut small, small_since), ("memory-64", &mut full, full_since)] {
        sleep_until(since + settle).await; // waits: until the daemon has given back what a burst needs
        let (kib, parts) = family_pss(stage.daemon()?.pid())?;
        run.budgets.measured(name, f64::from(kib) / 1024.0, parts);
    }
    drop(small);
    full.api.forget_requests();
    let start = Instant::now();
    let end = Clock::now() + quiet;
    let disturbed = disturb(run).await;
    sleep_until(end).await; // waits: for the quiet minutes to pass
    let (writes, watched) = (full.api.writes_since(start), start.elapsed());
    ensure!(full.daemon()?.exit_status()?.is_none(), "the daemon ended in the quiet minutes");
    let reads = full.api.with_state(|state| state.requests().len()) - writes.len();
    let note = format!("{} writes and {reads} reads in {:.0} s", writes.len(), watched.as_secs_f64());
    let hour = f64::from(u32::try_from(writes.len())?) * HOUR.as_secs_f64() / watched.as_secs_f64();
    run.budgets.measured("quiet-writes", hour, note);
    disturbed
}

/// A node with every card prepared, and admin claims beside them; with the time of the last prepare.
async fn loaded(run: &Run, name: &str, cards: u32, looks: u32) -> anyhow::Result<(Stage, Clock)> {
    let mut stage = Stage::set(&run.dir(name), cards).await?;
    stage.copy_binaries()?;
    stage.start().await?;
    let client = stage.client()?;
    for number in 0..cards {
        prepared(&client, &stage.claim(&stage.card(number))?).await?;
    }
    stage.fill(run.scaled(looks, 10)).await?;
    Ok((stage, Clock::now()))
}

/// Sum of the proportional set sizes of a process and all below it, in KiB, and how it is made up.
fn family_pss(pid: u32) -> anyhow::Result<(u32, String)> {
    let (mut sum, mut parts, mut left) = (0, Vec::new(), vec![pid]);
    while let Some(pid) = left.pop() {
        let path = format!("/proc/{pid}/smaps_rollup");
        let rollup = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
        let field = |name: &str| -> anyhow::Result<u32> {
            let line = rollup.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            let number = line.and_then(|line| line.split_whitespace().next()).and_then(|number| number.parse().ok());
            number.with_context(|| format!("{path} has no {name}"))
        };
        let pss = field("Pss")?;
        parts.push(format!("{pss} KiB ({} anonymous)", field("Pss_Anon")?));
        sum += pss;
        for task in fs::read_dir(format!("/proc/{pid}/task"))? {
            let children = fs::read_to_string(task?.path().join("children")).unwrap_or_default();
            left.extend(children.split_whitespace().filter_map(|child| child.parse::<u32>().ok()));
        }
    }
    Ok((sum, parts.join(" + ")))
}

/// Kubelet wipes the slices, and cards fail.
async fn disturb(run: &mut Run) -> anyhow::Result<()> {
    let stage = Stage::run(&run.dir("disturbed"), CARDS).await?;
    let mut back = Samples::default();
    for _ in 0..run.scaled(10, 5) {
        let start = Instant::now();
        ensure!(stage.api.kubelet_wipe(NODE) > 0, "there were no slices to wipe");
        stage.wait_published(SOON).await?;
        back.push(start.elapsed());
        // Wipes come alone: kubelet does not start twice in a second.
        tokio::time::sleep(Duration::from_secs(1)).await; // waits: for the time between two wipes
    }
    run.budgets.measured("slices-back", back.percentile(100), back.summary());

    let mut taint = Samples::default();
    for number in 0..run.scaled(12, 6) {
        taint.push(fault_to_taint(&stage, number * 5).await?);
    }
    run.budgets.measured("fault-taint", taint.percentile(100), taint.summary());
    Ok(())
}

/// From the end of the vendor call that first tells of a fault to the taint in the API server.
async fn fault_to_taint(stage: &Stage, card: u32) -> anyhow::Result<Duration> {
    let world = stage.node.world();
    world.clear_calls()?;
    world.set_health(card, CRITICAL)?;
    let changed = micros();
    let device = stage.card(card);
    stage.api.wait_until(|state| tainted(&state.slices(DRIVER, NODE), &device), SOON).await?;
    let seen = micros();
    let calls = world.calls()?;
    let ends = calls.of(HEALTH_CALL).filter(|call| call.card == i32::try_from(card).ok());
    let told = ends.filter_map(|call| call.end_us).find(|end| *end >= changed);
    let told = told.with_context(|| format!("{device} was tainted and nobody asked the library how it is"))?;
    Ok(Duration::from_micros(seen.saturating_sub(told)))
}

pub(super) fn tainted(slices: &[&Value], device: &str) -> bool {
    let devices = slices.iter().filter_map(|slice| slice["spec"]["devices"].as_array()).flatten();
    devices
        .filter(|one| one["name"] == device)
        .any(|one| one["taints"].as_array().is_some_and(|taints| !taints.is_empty()))
}

/// Microseconds since the epoch, as the fake library logs them.
fn micros() -> u64 {
    let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

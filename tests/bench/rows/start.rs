//! Processes that start: the daemon, the daemon after a crash, `npuctl`.

use std::{
    path::PathBuf,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use testkit::{
    kubelet::{Claim, DraClient, DraVersion, claim},
    node::{DRIVER, SOON},
};

use super::claims::CARDS;
use crate::{
    Run,
    samples::Samples,
    stage::{Stage, daemon_binary},
};

/// Pause between two tries to reach a daemon that starts.
const STEP: Duration = Duration::from_micros(500);

/// From exec to kubelet's word that we are registered.
pub(crate) async fn register(run: &mut Run) -> anyhow::Result<()> {
    for init_ms in [0, 300] {
        let mut stage = Stage::set(&run.dir(&format!("register-{init_ms}")), CARDS).await?;
        stage.node.world().edit(|data| data.init_ms = init_ms)?;
        let mut samples = Samples::default();
        for _ in 0..run.scaled(25, 5) {
            let start = Instant::now();
            stage.spawn()?;
            let plugin = stage.kubelet.wait_registered(DRIVER, SOON).await?;
            samples.push(plugin.notified.duration_since(start));
            stage.daemon()?.stop().await?;
            stage.kubelet.wait_deregistered(DRIVER, SOON).await?;
        }
        run.budgets.measured(&format!("register-{init_ms}"), samples.percentile(50), samples.summary());
    }
    Ok(())
}

/// From SIGKILL to the first answer of the next daemon, started at once. A prepare is asked for as well: it waits for
/// the scan, so it shows the vendor library's speed too.
pub(crate) async fn killed(run: &mut Run) -> anyhow::Result<()> {
    let mut stage = Stage::run(&run.dir("killed"), CARDS).await?;
    let records = run.scaled(1000, 10);
    let held = stage.fill(records).await?;
    let endpoint = stage.endpoint()?;
    let (mut unprepared, mut replayed) = (Samples::default(), Samples::default());
    for round in 0..run.scaled(15, 3) {
        let known = held.get(usize::try_from(round)?).context("too few records")?.clone();
        let unknown = claim("bench", "unknown", &format!("00000000-0000-4000-8000-{round:012}"));
        let start = Instant::now();
        stage.daemon()?.kill()?;
        stage.spawn()?;
        let (first, again) = tokio::try_join!(
            answered(endpoint.clone(), start, unknown, false),
            answered(endpoint.clone(), start, known, true)
        )?;
        unprepared.push(first);
        replayed.push(again);
        stage.wait_published(SOON).await?;
    }
    run.say(&format!("  prepare replayed after the kill, with scan and recovery: {}", replayed.summary()));
    let note = format!("{records} records: {}", unprepared.summary());
    run.budgets.measured("killed", unprepared.percentile(100), note);
    Ok(())
}

/// Asks until an answer comes; gives the time since `start`.
async fn answered(endpoint: PathBuf, start: Instant, claim: Claim, prepare: bool) -> anyhow::Result<Duration> {
    let asking = async {
        loop {
            if let Ok(client) = DraClient::connect(&endpoint, DraVersion::V1).await {
                let outcome = if prepare {
                    client.prepare_one(&claim).await.map(drop)
                } else {
                    client.unprepare_one(&claim).await
                };
                match outcome {
                    Ok(()) => return start.elapsed(),
                    // The old daemon's connection breaks under the call.
                    Err(_) => tokio::time::sleep(STEP).await, // waits: for the next daemon
                }
            } else {
                tokio::time::sleep(STEP).await; // waits: for the next daemon's socket
            }
        }
    };
    tokio::time::timeout(SOON, asking).await.with_context(|| format!("claim {} was never answered", claim.uid))
}

/// `npuctl devices`, from before it is started to after it has ended.
pub(crate) async fn npuctl(run: &mut Run) -> anyhow::Result<()> {
    let stage = Stage::run(&run.dir("npuctl"), CARDS).await?;
    let binary = daemon_binary().with_file_name("npuctl");
    ensure!(binary.exists(), "{} is missing: build it with cargo build --release -p npuctl", binary.display());
    let devices = || {
        let mut command = Command::new(&binary);
        command.arg("--socket").arg(stage.node.admin_socket()).arg("devices").stdin(Stdio::null());
        command
    };
    let mut samples = Samples::default();
    for _ in 0..run.scaled(200, 50) {
        let start = Instant::now();
        let output = tokio::task::block_in_place(|| devices().output())?;
        samples.push(start.elapsed());
        let (shown, said) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        ensure!(output.status.success() && shown.contains("npu-63"), "npuctl devices: {}, {said}", output.status);
    }
    run.budgets.measured("npuctl-devices", samples.percentile(50), samples.summary());
    Ok(())
}

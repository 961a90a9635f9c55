//! Claims outlive the service.

use std::time::Instant;

use anyhow::{Context as _, ensure};

use crate::stage::{SOON, Stage};

pub(crate) fn sigkill(stage: &Stage) -> anyhow::Result<String> {
    stage.fresh()?;
    let claims = stage.three_claims()?;
    let (live, pid) = (stage.live()?, stage.main_pid()?);
    let worker = stage.sh(&format!("pgrep -P {pid}"))?;
    let killed = Instant::now();
    stage.sh(&format!("kill -9 {pid}"))?;
    stage.wait_other_pid(pid)?;
    let took = killed.elapsed();
    stage.wait_ready()?;
    for old in worker.lines() {
        let (code, ..) = stage.try_sh(&format!("test -e /proc/{old}"))?;
        ensure!(code != 0, "the worker {old} of the killed daemon is still there");
    }
    live.untouched(&stage.live()?)?;
    stage.same_answers(&claims)?;
    live.untouched(&stage.live()?)?;
    stage.release_all(&claims)?;
    Ok(format!("active again after {:.1} s (RestartSec=2s)", took.as_secs_f64()))
}

pub(crate) fn stop_and_start(stage: &Stage) -> anyhow::Result<String> {
    stage.fresh()?;
    let claims = stage.three_claims()?;
    let live = stage.live()?;
    let stopping = Instant::now();
    stage.sh("systemctl stop npu-dra.service")?;
    let took = stopping.elapsed();
    let left = stage.try_sh("pgrep -x npu-dra")?.1;
    ensure!(left.is_empty(), "processes are left after the stop: {left}");
    let sockets = stage.sh("find /var/lib/kubelet -type s")?;
    ensure!(sockets.is_empty(), "sockets are left after the stop: {sockets}");
    live.untouched(&stage.live()?)?;
    // Root sees the truth even now.
    let (code, text, error) = stage.try_sh("npuctl claims list")?;
    let names = claims.iter().all(|claim| text.contains(&claim.name));
    ensure!(code == 4 && names && (text + &error).contains("offline"), "npuctl claims list ends with {code}: {error}");
    stage.sh("systemctl start npu-dra.service")?;
    stage.wait_ready()?;
    live.untouched(&stage.live()?)?;
    stage.same_answers(&claims)?;
    stage.release_all(&claims)?;
    Ok(format!("stopped in {:.1} s", took.as_secs_f64()))
}

pub(crate) fn late_directories(stage: &Stage) -> anyhow::Result<String> {
    stage.fresh()?;
    // A node whose kubelet and container runtime come after this service, or were removed with the last cluster.
    stage.sh("systemctl stop npu-dra.service testkit.service\nrm -rf /etc/cdi /var/lib/kubelet/*")?;
    stage.sh("systemctl start npu-dra.service")?;
    let active = stage.show("ActiveState")?;
    ensure!(active == "active", "without the directories it is {active}");
    // And once more while it runs: an administrator who starts the node's cluster anew.
    stage.sh("rm -rf /etc/cdi\nmkdir /etc/cdi\nsystemctl start testkit.service")?;
    stage.wait_ready()?;
    // The API server is a new one: until the cards are published there, a claim finds none.
    let claim = stage.machine.wait("a claim to be prepared", SOON, |_| stage.prepare("late", Some("8Gi")).map(Some))?;
    let live = stage.live()?;
    ensure!(live.vnpus() == 1, "a claim that came late left {live:?}");
    stage.release_all(&[claim])?;
    Ok(String::new())
}

pub(crate) fn journal(stage: &Stage) -> anyhow::Result<String> {
    stage.fresh()?;
    let claims = stage.three_claims()?;
    stage.release_all(&claims)?;
    let mut lines = 0;
    for claim in &claims {
        let text = stage.machine.wait("the journal of a claim", SOON, |_| {
            let text = stage.sh(&format!("journalctl -q -o json F_CLAIM_UID={}", claim.uid))?;
            Ok((text.lines().count() >= 2).then_some(text))
        })?;
        for line in text.lines() {
            let entry: serde_json::Value = serde_json::from_str(line).context("a journal line is no JSON")?;
            ensure!(entry["_SYSTEMD_UNIT"] == "npu-dra.service", "an entry is another's: {entry:#}");
            let named = entry["F_CLAIM"].as_str().is_some_and(|name| name.contains(&claim.name));
            ensure!(named, "an entry does not name its claim {}: {entry:#}", claim.name);
            for other in claims.iter().filter(|other| other.uid != claim.uid) {
                ensure!(!line.contains(&other.uid), "an entry of {} tells of {}", claim.name, other.name);
            }
            lines += 1;
        }
    }
    Ok(format!("{lines} entries for {} claims", claims.len()))
}

//! The service as systemd runs it.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use serde_json::Value;

use crate::stage::{SOON, Stage};

pub(crate) fn enable_now(stage: &Stage) -> anyhow::Result<String> {
    stage.have_installed()?;
    stage.sh("systemctl disable --now npu-dra.service npu-dra.socket 2>&1\nsystemctl daemon-reload")?;
    let started = Instant::now();
    stage.sh("systemctl enable --now npu-dra 2>&1")?;
    let took = started.elapsed();
    let enabled = stage.sh("systemctl is-enabled npu-dra.service npu-dra.socket")?;
    ensure!(enabled == "enabled\nenabled\n", "is-enabled says {enabled}");
    let active = stage.sh("systemctl is-active npu-dra.service npu-dra.socket")?;
    ensure!(active == "active\nactive\n", "is-active says {active}");
    stage.wait_ready()?;
    let devices: Value = serde_json::from_str(&stage.sh("npuctl devices -o json")?)?;
    let count = devices["items"].as_array().context("no items")?.len();
    ensure!(count == 8, "{count} devices of 8");
    let restarts = stage.show("NRestarts")?;
    ensure!(restarts == "0", "it was restarted {restarts} times");
    Ok(format!("enable --now took {:.1} s, {count} devices", took.as_secs_f64()))
}

pub(crate) fn status_text(stage: &Stage) -> anyhow::Result<String> {
    stage.fresh()?;
    let wait = |claims: usize| {
        stage.machine.wait("the status text", SOON, |_| {
            let text = stage.show("StatusText")?;
            let right =
                text.contains("dcmi") && text.contains("8 devices") && text.contains(&format!("{claims} claim"));
            if right { Ok(Some(text)) } else { anyhow::bail!("it is {text:?}") }
        })
    };
    wait(0)?;
    let claims = stage.three_claims()?;
    let text = wait(3)?;
    stage.release_all(&claims)?;
    wait(0)?;
    Ok(text)
}

pub(crate) fn socket_order(stage: &Stage) -> anyhow::Result<String> {
    stage.fresh()?;
    // The socket's file is systemd's, not the daemon's: root:npu-dra 660, and its inode outlives the daemon.
    let look = "stat -c '%a %U:%G %i' /run/npu-dra/admin.sock";
    let before = stage.sh(look)?;
    ensure!(before.starts_with("660 root:npu-dra "), "the socket is {before}");
    stage.sh("systemctl restart npu-dra.service")?;
    stage.wait_ready()?;
    let order = stage
        .sh("systemctl show -p ActiveEnterTimestampMonotonic --value npu-dra.socket npu-dra.service | tr '\\n' ' '")?;
    let times: Vec<u64> = order.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    ensure!(matches!(times.as_slice(), [socket, service] if socket <= service), "the socket came later: {order}");

    stage.sh("systemctl stop npu-dra.service")?;
    let (_, active, _) = stage.try_sh("systemctl is-active npu-dra.service npu-dra.socket")?;
    ensure!(active == "inactive\ninactive\n", "after stop: {active}");
    let (code, _, text) = stage.try_sh("test ! -e /run/npu-dra/admin.sock && npuctl devices")?;
    ensure!(code == 4, "npuctl ends with {code} when the service is stopped: {text}");
    let (_, active, _) = stage.try_sh("systemctl is-active npu-dra.service")?;
    ensure!(active == "inactive\n", "npuctl started what was stopped: {active}");

    // The socket alone: who asks is answered by a service that is started for it.
    stage.sh("systemctl start npu-dra.socket")?;
    let (_, active, _) = stage.try_sh("systemctl is-active npu-dra.service")?;
    ensure!(active == "inactive\n", "the socket's start started the service: {active}");
    let started = Instant::now();
    stage.sh("npuctl status")?;
    let took = started.elapsed();
    stage.wait_ready()?;
    Ok(format!("a first npuctl is answered in {} ms", took.as_millis()))
}

pub(crate) fn reload(stage: &Stage) -> anyhow::Result<String> {
    const FILE: &str = "/etc/npu-dra/npu-dra.toml.d/reload.toml";
    const STATIC: &str = "slicing.model = \"static\"\n";
    stage.fresh()?;
    let layout = |templates: &str| format!("{STATIC}slicing.layout = \"npu-0={templates}\"\n");
    stage.machine.write(FILE, &layout("vir10_3c_16g+vir10_3c_16g"))?;
    stage.sh("systemctl restart npu-dra")?;
    stage.wait_ready()?;
    let offered = |count: usize| {
        stage.machine.wait("the layout to be offered", SOON, |_| {
            let slices: Value = serde_json::from_str(&stage.sh("npuctl slices -o json")?)?;
            let numbers =
                slices["items"].as_array().into_iter().flatten().filter_map(|slice| slice["devices"].as_u64());
            let sum = numbers.sum::<u64>();
            if sum == u64::try_from(count)? { Ok(Some(())) } else { anyhow::bail!("{sum} of {count}: {slices:#}") }
        })
    };
    // Seven whole cards, and the parts of npu-0.
    offered(9)?;
    let pid = stage.main_pid()?;
    let reload_with = |text: &str, expected: &[&str]| {
        stage.machine.write(FILE, text)?;
        let cursor = stage.sh("journalctl -n 0 --show-cursor -q | sed -n 's/^-- cursor: //p'")?;
        stage.sh("systemctl reload npu-dra")?;
        stage.machine.wait("the journal's answer to a reload", SOON, |_| {
            let log = stage.sh(&format!("journalctl -q -o cat -u npu-dra --after-cursor='{}'", cursor.trim()))?;
            let all = expected.iter().all(|word| log.contains(word));
            if all { Ok(Some(log)) } else { anyhow::bail!("it is {log}") }
        })
    };
    let result = (|| {
        let parts = layout("vir10_3c_16g+vir05_1c_8g+vir05_1c_8g");
        reload_with(&parts, &["reloaded"])?;
        offered(10)?;
        reload_with(&format!("{parts}log.level = \"debug\"\n"), &["reloaded"])?;
        let active = stage.show("ActiveState")?;
        ensure!(active == "active", "after the reload it is {active}");
        let claim = stage.prepare("loud", None)?;
        stage.unprepare(&claim.name)?;
        stage.machine.wait("a line of level debug", SOON, |_| {
            // tracing-journald gives level debug this priority.
            let log = stage.sh(&format!("journalctl -q -o cat _PID={pid} PRIORITY=6 -n 5"))?;
            Ok((!log.is_empty()).then_some(()))
        })?;
        reload_with(&format!("{parts}health.interval = \"3s\"\n"), &["need a restart: health.interval"])?;
        reload_with(&format!("{parts}health.intervall = \"3s\"\n"), &["nothing was reloaded", "intervall"])?;
        reload_with(&parts, &["reloaded"])
    })();
    let same = stage.main_pid().is_ok_and(|now| now == pid);
    stage.sh(&format!("rm -f {FILE}\nsystemctl restart npu-dra"))?;
    result?;
    ensure!(same, "the process is another one");
    stage.wait_ready()?;
    Ok(String::new())
}

pub(crate) fn wrong_settings(stage: &Stage) -> anyhow::Result<String> {
    const FILE: &str = "/etc/npu-dra/npu-dra.toml.d/wrong.toml";
    stage.fresh()?;
    stage.machine.write(FILE, "device.weit = \"3s\"\n")?;
    let (code, ..) = stage.try_sh("systemctl restart npu-dra.service")?;
    let told = stage.machine.wait("the mistake in the journal", SOON, |_| {
        let text = stage.sh("journalctl -q -o cat -u npu-dra.service -n 20")?;
        if text.contains("wrong.toml:1") && text.contains("weit") {
            Ok(Some(()))
        } else {
            anyhow::bail!("it is\n{text}")
        }
    });
    let active = stage.show("ActiveState")?;
    let status = stage.show("ExecMainStatus")?;
    stage.sh(&format!("rm {FILE}"))?;
    told?;
    ensure!(code != 0, "a start with a wrong setting succeeded");
    ensure!(active == "failed" && status == "2", "it is {active}, exit {status}");
    stage.sh("systemctl start npu-dra.service")?;
    stage.wait_ready()?;
    Ok(String::new())
}

/// The engine looks at kubelet's directory of device plugins in each of its turns. A FUSE file system that nobody
/// serves stands there for a dead network mount: the look does not return, while all other threads go on.
const HANG: &str = "mkdir -p /var/lib/kubelet/device-plugins\n\
    systemd-run -q --unit=hang --property=Type=exec /bin/sh -c 'exec 3<>/dev/fuse; \
    mount -i -t fuse nobody /var/lib/kubelet/device-plugins -o fd=3,rootmode=40000,user_id=0,group_id=0 && exec sleep 600'";

pub(crate) fn watchdog(stage: &Stage) -> anyhow::Result<String> {
    const DROP_IN: &str = "/etc/systemd/system/npu-dra.service.d/watchdog.conf";
    stage.fresh()?;
    let shipped = stage.show("WatchdogUSec")?;
    ensure!(shipped == "30s", "the unit's watchdog is {shipped}");
    // The shipped 30 s would only be waited for.
    stage.machine.write(DROP_IN, "[Service]\nWatchdogSec=3s\n")?;
    stage.sh("systemctl daemon-reload\nsystemctl restart npu-dra")?;
    stage.wait_ready()?;
    let claims = stage.three_claims()?;
    let (live, pid) = (stage.live()?, stage.main_pid()?);
    let hung = Instant::now();
    stage.sh(HANG)?;
    let result = (|| {
        stage.machine.wait("the engine to hang", SOON, |_| {
            let waiting = stage.sh(&format!("cat /proc/{pid}/task/*/wchan | tr '\\0' '\\n'"));
            let calls = stage.sh(&format!("cat /proc/{pid}/task/*/stat | cut -d' ' -f3"))?;
            Ok((waiting.is_ok_and(|text| text.contains("fuse") || text.contains("request")) || calls.contains('D'))
                .then_some(()))
        })?;
        // The rest of the daemon is well: this is not a stopped process.
        let status = stage.sh("npuctl --timeout 2s devices -o name")?;
        ensure!(status.lines().count() == 8, "npuctl is not answered while the engine hangs: {status}");
        stage.machine.wait("the watchdog", SOON, |_| Ok((stage.main_pid().ok() != Some(pid)).then_some(hung.elapsed())))
    })();
    stage.sh("systemctl kill -s KILL hang.service || true\numount -l /var/lib/kubelet/device-plugins || true")?;
    let took = result?;
    let journal = stage.sh("journalctl -q -o cat -u npu-dra -n 60")?;
    ensure!(journal.contains("atchdog timeout"), "the watchdog is not the reason:\n{journal}");
    stage.wait_other_pid(pid)?;
    stage.wait_ready()?;
    live.untouched(&stage.live()?)?;
    stage.same_answers(&claims)?;
    stage.sh(&format!("rm {DROP_IN}\nsystemctl daemon-reload\nsystemctl restart npu-dra"))?;
    stage.wait_ready()?;
    stage.release_all(&claims)?;
    ensure!(took > Duration::from_millis(500), "it ended after {took:?}, before the watchdog could see anything");
    Ok(format!("killed {:.1} s after the hang with WatchdogSec=3s", took.as_secs_f64()))
}

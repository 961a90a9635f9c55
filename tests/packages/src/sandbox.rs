//! What the service's sandbox allows, seen from inside of it.

use std::{collections::BTreeSet, fmt::Write as _};

use anyhow::{Context as _, ensure};
use dcmi::world::World;

use crate::stage::{SOON, Stage};

const DROP_IN: &str = "/etc/systemd/system/npu-dra.service.d/probe.conf";
const ANSWERS: &str = "/run/npu-dra/probe";

/// What the vendor's library and the driver need.
const ALLOWED: [&str; 10] =
    ["vnpu-list", "vnpu-lock", "log", "cdi", "kubelet", "state", "shell", "foreign-node", "inet-socket", "seccomp"];
/// What nothing in the service needs.
const REFUSED: [&str; 9] = [
    "mount",
    "mount-namespace",
    "user-namespace",
    "packet-socket",
    "raw-socket",
    "make-node",
    "setuid",
    "personality",
    "others-processes",
];

/// Starts the service with the probe in front, in the same sandbox, and returns the probe's lines.
fn probe(stage: &Stage, walk: bool) -> anyhow::Result<Vec<String>> {
    stage.machine.write("/packages/probe.pl", include_str!("probe.pl"))?;
    stage.sh("test -e /dev/probe-node || { mknod -m 600 /dev/probe-node c 1 3; chown nobody /dev/probe-node; }")?;
    stage.sh("systemctl is-active -q foreign || systemd-run -q --unit=foreign --uid=nobody sleep infinity\n\
         systemctl show -P MainPID foreign.service >/packages/foreign.pid")?;
    let walk = if walk { " walk" } else { "" };
    stage
        .machine
        .write(DROP_IN, &format!("[Service]\nExecStartPre=/usr/bin/perl /packages/probe.pl {ANSWERS}{walk}\n"))?;
    let started = stage.sh(&format!("rm -f {ANSWERS}\nsystemctl daemon-reload\nsystemctl restart npu-dra.service"));
    let answers = stage.sh(&format!("cat {ANSWERS}"));
    stage.sh(&format!("rm {DROP_IN}\nsystemctl daemon-reload"))?;
    started?;
    Ok(answers?.lines().map(str::to_owned).collect())
}

pub(crate) fn holds(stage: &Stage) -> anyhow::Result<String> {
    stage.fresh()?;
    let answers = probe(stage, false)?;
    let said = |name: &str| {
        let line = answers.iter().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.with_context(|| format!("the probe says nothing of {name}: {answers:?}"))
    };
    let mut wrong = String::new();
    for name in ALLOWED {
        if !["yes", "2"].contains(&said(name)?) {
            let _ = write!(wrong, " {name} is not possible;");
        }
    }
    for name in REFUSED {
        if said(name)? != "no" {
            let _ = write!(wrong, " {name} is possible;");
        }
    }
    ensure!(wrong.is_empty(), "in the sandbox{wrong}\n{}", answers.join("\n"));
    ensure!(said("nonewprivs")? == "1", "new privileges can be had");
    // CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_SYS_ADMIN.
    let capabilities = u64::from_str_radix(said("capbnd")?, 16)?;
    ensure!(capabilities == 0x0020_000b, "the capabilities are {capabilities:#x}");
    // The worker, with the vendor's library in it, is in the same one.
    let workers = stage.sh(&format!("pgrep -P {}", stage.main_pid()?))?;
    let worker = workers.lines().next().context("there is no worker")?;
    let status =
        stage.sh(&format!("grep -E '^(NoNewPrivs|Seccomp|CapBnd):' /proc/{worker}/status | tr '\\t\\n' '  '"))?;
    ensure!(status.contains("NoNewPrivs: 1") && status.contains("Seccomp: 2"), "the worker has {status}");
    stage.wait_ready()?;
    Ok(format!("{} facts", answers.len()))
}

/// Where the strict sandbox may write. `/dev` is open as a directory; `DevicePolicy=closed` shuts the devices.
const STRICT: [&str; 7] =
    ["/dev", "/etc/cdi", "/run/npu-dra", "/tmp", "/var/lib/kubelet", "/var/lib/npu-dra", "/var/tmp"];

pub(crate) fn strict(stage: &Stage) -> anyhow::Result<String> {
    const STRICT_FILE: &str = "/etc/systemd/system/npu-dra.service.d/strict.conf";
    stage.fresh()?;
    // sysfs with one card, as a node with the kernel driver has it.
    let world = World::open(stage.machine.root().join("var/lib/testkit/world"))?.data()?;
    let chip = world.chips().next().context("the world has no chip")?;
    let card = format!("/sys/bus/pci/devices/{}", chip.bus);
    stage.sh(&format!(
        "mount -t tmpfs pci /sys/bus/pci/devices\nmkdir {card}\n\
         echo 0x19e5 >{card}/vendor\necho {:#06x} >{card}/device\necho 0x120000 >{card}/class\n\
         echo {} >{card}/numa_node\necho {} >{card}/dev_id\necho 1 >{card}/davinci_dev_num\n\
         install -D -m 0644 /usr/share/npu-dra/npu-dra-strict.conf {STRICT_FILE}",
        chip.pci_device, chip.numa, chip.phy
    ))?;
    let result = (|| {
        let answers = probe(stage, true)?;
        let writable: BTreeSet<_> = answers.iter().filter_map(|line| line.strip_prefix("writable ")).collect();
        let extra: Vec<_> = writable.iter().filter(|dir| !STRICT.contains(dir)).collect();
        ensure!(extra.is_empty(), "more can be written than is needed: {extra:?}");
        for dir in ["/etc/cdi", "/run/npu-dra", "/var/lib/kubelet", "/var/lib/npu-dra"] {
            ensure!(writable.contains(dir), "{dir} cannot be written, only {writable:?}");
        }
        let status = stage.machine.wait("the card of sysfs", SOON, |_| {
            let devices = stage.sh("npuctl devices -o name")?;
            if devices.contains("npu-0") { Ok(Some(devices)) } else { anyhow::bail!("devices are {devices:?}") }
        })?;
        stage.wait_ready()?;
        let claim = stage.prepare("strict", None)?;
        let live = stage.live()?;
        stage.unprepare(&claim.name)?;
        ensure!(!live.is_empty(), "nothing was prepared; devices are {status}");
        Ok(writable.into_iter().collect::<Vec<_>>().join(" "))
    })();
    stage.sh(&format!(
        "rm {STRICT_FILE}\numount -l /sys/bus/pci/devices\nsystemctl daemon-reload\nsystemctl restart npu-dra.service"
    ))?;
    let writable = result?;
    stage.wait_ready()?;
    Ok(format!("writable: {writable}"))
}

pub(crate) fn memory_limit(stage: &Stage) -> anyhow::Result<String> {
    const LIMIT: &str = "/etc/systemd/system/npu-dra.service.d/limit.conf";
    stage.fresh()?;
    let claims = stage.three_claims()?;
    let live = stage.live()?;
    let group = stage.show("ControlGroup")?;
    let value = |old: &str, new: &str| {
        let text = stage
            .sh(&format!("cat /sys/fs/cgroup/memory{group}/{old} 2>/dev/null || cat /sys/fs/cgroup{group}/{new}"))?;
        text.trim().parse::<u64>().with_context(|| format!("{old} is {text}"))
    };
    let limit = value("memory.limit_in_bytes", "memory.max")?;
    let used = value("memory.usage_in_bytes", "memory.current")?;
    ensure!(limit == 1 << 30, "the control group's limit is {limit}");
    ensure!(used < limit / 8, "{used} bytes are used of {limit}");
    stage.machine.write(LIMIT, "[Service]\nMemoryMax=2M\n")?;
    stage.sh("systemctl daemon-reload\nsystemctl restart --no-block npu-dra.service")?;
    let result = stage.machine.wait("the limit to be felt", SOON, |_| {
        let result = stage.show("Result")?;
        Ok(["signal", "oom-kill", "resources"].contains(&result.as_str()).then_some(result))
    });
    stage.sh(&format!("rm {LIMIT}\nsystemctl daemon-reload\nsystemctl restart npu-dra.service"))?;
    let result = result?;
    stage.wait_ready()?;
    live.untouched(&stage.live()?)?;
    stage.same_answers(&claims)?;
    stage.release_all(&claims)?;
    Ok(format!("{} MiB used of 1 GiB; below its use the result is {result}", used >> 20))
}

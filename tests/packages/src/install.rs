//! What installation does, and what it does not.

use anyhow::ensure;

use crate::stage::{Format, Stage};

/// Files that a user looks for, and how they are: mode, owner, path.
const FILES: [&str; 10] = [
    "755 root:root /usr/sbin/npu-dra",
    "755 root:root /usr/bin/npuctl",
    "644 root:root /usr/lib/systemd/system/npu-dra.service",
    "644 root:root /usr/lib/systemd/system/npu-dra.socket",
    "644 root:root /usr/lib/sysusers.d/npu-dra.conf",
    "644 root:root /usr/lib/tmpfiles.d/npu-dra.conf",
    "644 root:root /etc/npu-dra/npu-dra.toml",
    "755 root:root /etc/npu-dra/npu-dra.toml.d",
    "644 root:root /usr/share/bash-completion/completions/npuctl",
    "644 root:root /usr/share/fish/vendor_completions.d/npuctl.fish",
];

pub(crate) fn starts_nothing(stage: &Stage) -> anyhow::Result<String> {
    ensure!(stage.installed()?.is_none(), "this case wants a machine without the package");
    stage.install(stage.tested())?;
    for wanted in FILES {
        let path = wanted.rsplit(' ').next().unwrap_or_default();
        let found = stage.sh(&format!("stat -L -c '%a %U:%G %n' {path}"))?;
        ensure!(found.trim() == wanted, "{path} is {}", found.trim());
    }
    // Documentation may be left out of a small root (dpkg's path-exclude), so the package's own list is asked.
    let list = stage.sh(match stage.set.format {
        Format::Deb => "dpkg -L npu-dra npuctl",
        Format::Rpm => "rpm -ql npu-dra npuctl",
    })?;
    for page in ["man8/npu-dra.8", "man5/npu-dra.toml.5", "man1/npuctl.1"] {
        ensure!(list.contains(&format!("/usr/share/man/{page}")), "there is no manual page {page}");
    }
    ensure!(list.contains("/_npuctl"), "there is no completion for zsh");

    let (_, enabled, _) = stage.try_sh("systemctl is-enabled npu-dra.service npu-dra.socket")?;
    ensure!(enabled == "disabled\ndisabled\n", "installation enabled something: {enabled}");
    let (_, active, _) = stage.try_sh("systemctl is-active npu-dra.service npu-dra.socket")?;
    ensure!(active == "inactive\ninactive\n", "installation started something: {active}");
    stage.sh("getent group npu-dra")?;
    let (_, failed, _) = stage.try_sh("systemctl --failed --no-legend --plain")?;
    ensure!(failed.is_empty(), "units failed: {failed}");
    let version = stage.sh("npu-dra --version; npuctl --version")?;
    Ok(version.trim().replace('\n', ", "))
}

pub(crate) fn unit_is_clean(stage: &Stage) -> anyhow::Result<String> {
    stage.have_installed()?;
    // As it is shipped: without the drop-in of this machine.
    let text = stage.sh(
        "mkdir -p /tmp/units\ncp /usr/lib/systemd/system/npu-dra.* /tmp/units\n\
         systemd-analyze verify --man=no --recursive-errors=yes /tmp/units/npu-dra.service /tmp/units/npu-dra.socket 2>&1",
    )?;
    ensure!(text.trim().is_empty(), "systemd-analyze verify says: {text}");
    let score =
        stage.sh("systemd-analyze security --offline=true --no-pager /tmp/units/npu-dra.service | tail -n 1")?;
    let score: String = score.chars().filter(char::is_ascii).collect();
    let version = stage.sh("systemctl --version | head -n 1")?;
    Ok(format!("{}, {}", version.trim(), score.trim().trim_matches('"')))
}

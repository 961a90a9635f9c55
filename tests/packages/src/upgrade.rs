//! From one release to the next, and back.

use anyhow::ensure;

use crate::{
    packages::NEXT_LINE,
    stage::{Format, SOON, Stage, Which},
};

const CONFIG: &str = "/etc/npu-dra/npu-dra.toml";
const EDIT: &str = "# The administrator was here.";

/// The older release runs, with three live claims and an edited configuration; then the newer one comes.
pub(crate) fn keeps(stage: &Stage) -> anyhow::Result<String> {
    stage.fresh()?;
    if stage.installed()?.as_deref() != Some(stage.version(Which::Older)) {
        stage.install(Which::Older)?;
        stage.wait_ready()?;
    }
    stage.sh(&format!("grep -q '{EDIT}' {CONFIG} || printf '%s\\n' '{EDIT}' 'device.wait = \"77s\"' >>{CONFIG}"))?;
    stage.sh("systemctl restart npu-dra")?;
    stage.wait_ready()?;
    let claims = stage.three_claims()?;
    let (live, pid) = (stage.live()?, stage.main_pid()?);
    stage.install(Which::Newer)?;
    stage.wait_other_pid(pid)?;
    stage.wait_ready()?;
    live.untouched(&stage.live()?)?;
    stage.same_answers(&claims)?;
    let enabled = stage.sh("systemctl is-enabled npu-dra.service npu-dra.socket")?;
    ensure!(enabled == "enabled\nenabled\n", "after the upgrade is-enabled says {enabled}");
    let active = stage.sh("systemctl is-active npu-dra.service npu-dra.socket")?;
    ensure!(active == "active\nactive\n", "after the upgrade is-active says {active}");

    let kept = stage.sh(&format!("cat {CONFIG}"))?;
    ensure!(kept.contains(EDIT) && !kept.contains(NEXT_LINE), "the edited configuration was not kept:\n{kept}");
    let offered = match stage.set.format {
        Format::Deb => format!("{CONFIG}.dpkg-dist"),
        Format::Rpm => format!("{CONFIG}.rpmnew"),
    };
    let (code, text, _) = stage.try_sh(&format!("cat {offered}"))?;
    let beside = code == 0 && !text.contains(EDIT);
    ensure!(beside || !stage.new_settings, "the new configuration was not put beside it as {offered}");
    let settings = stage.sh("npu-dra check-config")?;
    ensure!(settings.contains("77s"), "the edit is not in effect:\n{settings}");
    Ok(format!("{} to {}", stage.version(Which::Older), stage.version(Which::Newer)))
}

/// Goes on where an upgrade ended; alone it makes one.
pub(crate) fn downgrade(stage: &Stage) -> anyhow::Result<String> {
    stage.have_running()?;
    if stage.installed()?.as_deref() != Some(stage.version(Which::Newer)) {
        stage.install(Which::Newer)?;
        stage.wait_ready()?;
    }
    let claims = stage.three_claims()?;
    let (live, pid) = (stage.live()?, stage.main_pid()?);
    stage.install(Which::Older)?;
    stage.wait_other_pid(pid)?;
    stage.wait_ready()?;
    live.untouched(&stage.live()?)?;
    stage.same_answers(&claims)?;
    stage.release_all(&claims)?;
    Ok(format!("{} to {}", stage.version(Which::Newer), stage.version(Which::Older)))
}

pub(crate) fn starts_nothing(stage: &Stage) -> anyhow::Result<String> {
    stage.fresh()?;
    if stage.installed()?.as_deref() != Some(stage.version(Which::Older)) {
        stage.install(Which::Older)?;
        stage.wait_ready()?;
    }
    stage.sh("systemctl disable --now npu-dra.service npu-dra.socket 2>&1")?;
    stage.install(Which::Newer)?;
    stage.machine.wait("systemd to be idle", SOON, |_| {
        Ok(stage.sh("systemctl list-jobs --no-legend")?.trim().is_empty().then_some(()))
    })?;
    let (_, active, _) = stage.try_sh("systemctl is-active npu-dra.service npu-dra.socket")?;
    ensure!(active == "inactive\ninactive\n", "the upgrade started something: {active}");
    let (_, enabled, _) = stage.try_sh("systemctl is-enabled npu-dra.service npu-dra.socket")?;
    ensure!(enabled == "disabled\ndisabled\n", "the upgrade enabled something: {enabled}");
    stage.have_running()?;
    Ok(String::new())
}

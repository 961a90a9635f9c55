//! Removal keeps state; purge removes it, never a vNPU, and not while claims are live.

use anyhow::ensure;

use crate::stage::{Claim, Stage};

pub(crate) fn keeps(stage: &Stage) -> anyhow::Result<String> {
    remove_and_return(stage, |_| {
        let left = stage.try_sh("pgrep -x npu-dra; find /run/npu-dra /var/lib/kubelet -type s")?.1;
        ensure!(left.is_empty(), "processes or sockets are left after removal: {left}");
        let (_, active, _) = stage.try_sh("systemctl is-active npu-dra.service npu-dra.socket")?;
        ensure!(!active.lines().any(|line| line == "active"), "after removal: {active}");
        let (_, failed, _) = stage.try_sh("systemctl --failed --no-legend --plain")?;
        ensure!(failed.is_empty(), "removal left failed units: {failed}");
        Ok(())
    })
}

pub(crate) fn purge_refuses(stage: &Stage) -> anyhow::Result<String> {
    remove_and_return(stage, |claims| {
        let (code, text, error) = stage.try_sh("DEBIAN_FRONTEND=noninteractive apt-get purge -y -q npu-dra 2>&1")?;
        let text = text + &error;
        ensure!(code != 0, "purge did not refuse:\n{text}");
        for claim in claims {
            ensure!(text.contains(&claim.name) && text.contains(&claim.uid), "purge does not name {claim:?}:\n{text}");
        }
        Ok(())
    })
}

/// Three claims live through the package's removal, what happens then, and the installation that follows: the way out
/// that a refused purge names.
fn remove_and_return(stage: &Stage, removed: impl FnOnce(&[Claim]) -> anyhow::Result<()>) -> anyhow::Result<String> {
    stage.fresh()?;
    let claims = stage.three_claims()?;
    let live = stage.live()?;
    stage.remove()?;
    removed(&claims)?;
    live.untouched(&stage.live()?)?;
    stage.install(stage.tested())?;
    stage.have_running()?;
    live.untouched(&stage.live()?)?;
    stage.same_answers(&claims)?;
    stage.release_all(&claims)?;
    Ok(String::new())
}

pub(crate) fn purge_removes(stage: &Stage) -> anyhow::Result<String> {
    stage.fresh()?;
    // Somebody else's vNPU, and one of an operator.
    stage.sh("testkit foreign 5 vir05_1c_8g --sandbox /var/lib/testkit")?;
    stage.sh("npuctl vnpu create --device npu-6 --template vir10_3c_16g")?;
    let before = stage.live()?;
    ensure!(before.vnpus() == 2, "two vNPUs were made, there are {before:?}");
    stage.sh("rm -f /etc/npu-dra/npu-dra.toml.d/*")?;
    stage.sh("DEBIAN_FRONTEND=noninteractive apt-get purge -y -q npu-dra npuctl 2>&1")?;
    let left = stage.try_sh(
        "ls -d /var/lib/npu-dra /etc/npu-dra /run/npu-dra/admin.sock /usr/share/npu-dra /usr/sbin/npu-dra \
         /etc/systemd/system/*.wants/npu-dra.* 2>/dev/null; pgrep -x npu-dra",
    )?;
    ensure!(left.1.is_empty(), "purge left {}", left.1);
    before.untouched(&stage.live()?)?;
    let (code, ..) = stage.try_sh("dpkg-query -W npu-dra 2>/dev/null | grep .")?;
    ensure!(code != 0, "the package database still knows npu-dra");
    Ok(format!("{} vNPUs of others are still there", before.vnpus()))
}

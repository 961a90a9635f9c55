//! Who may do what with npuctl.

use anyhow::ensure;

use crate::stage::Stage;

pub(crate) fn who_you_are(stage: &Stage) -> anyhow::Result<String> {
    stage.fresh()?;
    let claim = stage.prepare("part", Some("8Gi"))?;
    stage.sh("id member >/dev/null 2>&1 || useradd --no-create-home member\nusermod -a -G npu-dra member")?;
    let member = "runuser -u member -- ";
    let nobody = "runuser -u nobody -- ";
    for who in ["", member] {
        let devices = stage.sh(&format!("{who}npuctl devices"))?;
        ensure!(devices.lines().count() == 9 && devices.contains("npu-7"), "{who}npuctl devices says\n{devices}");
        let vnpus = stage.sh(&format!("{who}npuctl vnpu list"))?;
        ensure!(vnpus.contains("vir05_1c_8g") && vnpus.contains("part"), "{who}npuctl vnpu list says\n{vnpus}");
    }
    for command in ["devices", "vnpu list"] {
        let (code, out, text) = stage.try_sh(&format!("{nobody}npuctl {command}"))?;
        ensure!(code == 5 && out.is_empty(), "as nobody, {command} ends with {code}: {out}{text}");
        ensure!(text.contains("not permitted") && text.contains("npu-dra"), "the text does not help: {text}");
    }
    let create = "npuctl vnpu create --device npu-7 --template vir05_1c_8g";
    let (code, _, text) = stage.try_sh(&format!("{member}{create}"))?;
    ensure!(code == 5, "a member may cut cards: exit {code}, {text}");
    let made = stage.sh(&format!("{create} -o json"))?;
    let listed = stage.sh("npuctl vnpu list -o name")?;
    ensure!(listed.lines().count() == 2, "root cut a card ({made}), and the list is\n{listed}");
    let (name, _) =
        listed.lines().map(|name| (name, name.contains("npu-7"))).fold((String::new(), false), |kept, next| {
            if kept.1 || !(next.1 || next.0.starts_with("vnpu-7")) { kept } else { (next.0.to_owned(), true) }
        });
    ensure!(!name.is_empty(), "no vNPU of npu-7 in\n{listed}");
    stage.sh(&format!("npuctl vnpu destroy {name}"))?;
    stage.release_all(&[claim])?;
    let (_, _, text) = stage.try_sh(&format!("{nobody}npuctl devices"))?;
    Ok(text.trim().lines().next().unwrap_or_default().to_owned())
}

//! Whole NPUs: who registers stays registered, what a container gets, and that nothing is left.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow, ensure};
use serde_json::{Value, json};

use super::Case;
use crate::{
    driver::{Driver, SLICES, is_complete},
    image,
    stage::{Stage, claim_template, container, name, pod, request, wait, wait_for},
};

pub(crate) const CASES: &[Case] = &[
    ("kubelet-restart", kubelet_restart),
    ("driver-restart", driver_restart),
    ("driver-killed", driver_killed),
    ("only-its-devices", only_its_devices),
    ("environment-and-mounts", environment_and_mounts),
    ("nothing-left", nothing_left),
];

/// How soon slices must be back after kubelet removed them.
const BACK: Duration = Duration::from_secs(2);

/// A pod that runs with a whole card, and the template of its claim.
struct Holder {
    template: Value,
    pod: Value,
}

impl Holder {
    fn start(stage: &Stage, name: &str) -> anyhow::Result<Self> {
        let template = claim_template(name, &[request("npu")]);
        let pod = pod(name, &[&template]);
        stage.create(&[&template, &pod])?;
        stage.wait_running(&pod)?;
        Ok(Self { template, pod })
    }

    /// The number of its card, which is also that of its device node.
    fn card(&self, stage: &Stage) -> anyhow::Result<u32> {
        let claim = stage.claim_of(&self.pod, name(&self.template))?;
        let device = claim["status"]["allocation"]["devices"]["results"][0]["device"].as_str().context("no device")?;
        device.strip_prefix("npu-").context("an odd name")?.parse().context("an odd number")
    }

    /// Fails if its container has been touched.
    fn check(&self, stage: &Stage) -> anyhow::Result<()> {
        let pod = stage.get(&self.pod)?;
        let main = &pod["status"]["containerStatuses"][0];
        ensure!(main["ready"] == true && main["restartCount"] == 0, "the pod that ran before: {main}");
        let nodes = stage.shell(&self.pod, "ls -d /dev/davinci[0-9]*")?.text;
        let card = self.card(stage)?;
        ensure!(nodes == format!("/dev/davinci{card}"), "the pod that ran before has {nodes:?}, not card {card}");
        Ok(())
    }

    fn stop(self, stage: &Stage) -> anyhow::Result<()> {
        stage.delete(&[&self.pod, &self.template])
    }
}

/// What was before goes on, and a new pod gets a card of its own; then all is given back.
fn check_service(stage: &Stage, before: Holder) -> anyhow::Result<()> {
    before.check(stage)?;
    let after = Holder::start(stage, "after")?;
    ensure!(after.card(stage)? != before.card(stage)?, "two pods have one card");
    before.stop(stage)?;
    after.stop(stage)?;
    stage.wait_empty()
}

/// Waits until the driver was registered more than `times` times by kubelet, or anew after it was started.
fn wait_registered(stage: &Stage, times: u64) -> anyhow::Result<()> {
    wait("kubelet to register the driver again", || {
        let kubelet = stage.status()?["kubelet"].take();
        ensure!(kubelet["registered"] == true && kubelet["registrations"].as_u64() > Some(times), "{kubelet}");
        Ok(Some(()))
    })
}

/// Kubelet is restarted: it removes the node's slices, and registers what it finds.
fn kubelet_restart(stage: &Stage) -> anyhow::Result<()> {
    stage.with(&Driver::cutting())?;
    let before = Holder::start(stage, "before")?;
    let registrations = stage.status()?["kubelet"]["registrations"].as_u64().context("no number")?;
    let slices = stage.slices()?;
    let events = stage.api().watch(SLICES)?;
    stage.plane().run(&["systemctl", "restart", "kubelet"])?;

    // What the list holds, as its events tell.
    let mut held: BTreeMap<String, Value> = slices.iter().map(|one| (name(one).to_owned(), one.clone())).collect();
    let (mut wiped, mut back): (Option<Instant>, Option<Instant>) = (None, None);
    wait_for(Duration::from_secs(30), "kubelet to remove the slices and the driver to put them back", || {
        while let Ok((at, event)) = events.try_recv() {
            let slice = &event["object"];
            if event["type"] == "DELETED" {
                held.remove(name(slice));
                (wiped, back) = (Some(at), None);
            } else {
                held.insert(name(slice).to_owned(), slice.clone());
            }
            let whole = held.len() == slices.len() && is_complete(&held.values().cloned().collect::<Vec<_>>());
            if wiped.is_some() && whole {
                back = Some(at);
            }
        }
        ensure!(wiped.is_some(), "the slices were not removed");
        Ok(back)
    })?;
    let took = back.zip(wiped).map(|(back, wiped)| back - wiped).context("no time")?;
    stage.note(format!("slices back {:.0} ms after kubelet's wipe, as a watch sees it", took.as_secs_f64() * 1000.0));
    ensure!(took <= BACK, "the slices were back only {took:.1?} after kubelet's wipe");

    wait_registered(stage, registrations)?;
    check_service(stage, before)
}

/// The driver is restarted by its unit.
fn driver_restart(stage: &Stage) -> anyhow::Result<()> {
    stage.with(&Driver::cutting())?;
    let before = Holder::start(stage, "before")?;
    let events = stage.api().watch(SLICES)?;
    let old = stage.plane().main_pid("npu-dra")?;
    let started = Instant::now();
    stage.plane().run(&["systemctl", "restart", "npu-dra"])?;
    wait_registered(stage, 0)?;
    stage.note(format!("registered again after {:.1} s", started.elapsed().as_secs_f64()));
    ensure!(stage.plane().main_pid("npu-dra")? != old, "it is the same process");
    stage.wait_published()?;
    check_service(stage, before)?;
    let changes: Vec<_> = events.try_iter().map(|(_, event)| event["type"].clone()).collect();
    ensure!(!changes.contains(&json!("DELETED")), "slices were removed although nothing changed: {changes:?}");
    Ok(())
}

/// The driver is killed; its unit starts it again.
fn driver_killed(stage: &Stage) -> anyhow::Result<()> {
    stage.with(&Driver::cutting())?;
    let before = Holder::start(stage, "before")?;
    let old = stage.plane().main_pid("npu-dra")?;
    let killed = Instant::now();
    stage.plane().run(&["systemctl", "kill", "--signal=SIGKILL", "npu-dra.service"])?;
    wait("another process", || {
        let now = stage.plane().main_pid("npu-dra")?;
        Ok((now != 0 && now != old).then_some(()))
    })?;
    wait_registered(stage, 0)?;
    stage.note(format!("registered again after {:.1} s", killed.elapsed().as_secs_f64()));
    stage.wait_published()?;
    check_service(stage, before)
}

/// What an open of a device node ends with.
const PASSED: &str = "No such device or address";
const DENIED: &str = "Operation not permitted";

/// Whoever runs in the container opens its own card and no other.
fn only_its_devices(stage: &Stage) -> anyhow::Result<()> {
    stage.with(&Driver::cutting())?;
    let template = claim_template("own", &[request("npu")]);
    let mut pod = pod("own", &[&template]);
    let users = [
        ("root", json!({})),
        ("user-1000", json!({"runAsUser": 1000, "runAsGroup": 1000})),
        ("user-65534", json!({"runAsUser": 65534, "runAsGroup": 65534})),
        ("root-bare", json!({"runAsUser": 0, "capabilities": {"drop": ["ALL"]}, "allowPrivilegeEscalation": false})),
    ];
    let volume = json!([{"name": "nodes", "mountPath": "/nodes"}]);
    let run = |(user, context): &(&str, Value)| {
        let claims = json!({"claims": [{"name": "own"}]});
        container(user, json!({"securityContext": context, "resources": claims, "volumeMounts": volume}))
    };
    pod["spec"]["containers"] = users.iter().map(run).collect();
    // Nodes of all cards, open to everybody: only the device control group stands before them.
    let script = "for n in 0 1 2 3 4 5 6 7; do mknod -m 666 /nodes/$n c 1 $((64 + n)); done";
    let make = json!({"command": ["sh", "-c", script], "volumeMounts": volume});
    pod["spec"]["initContainers"] = json!([container("make", make)]);
    pod["spec"]["volumes"] = json!([{"name": "nodes", "emptyDir": {}}]);
    stage.create(&[&template, &pod])?;
    stage.wait_running(&pod)?;
    let holder = Holder { template, pod };
    let card = holder.card(stage)?;
    let nodes = format!("davinci{card} davinci_manager devmm_svm hisi_hdc");
    for (user, _) in &users {
        // One line for each node: what an open for reading and writing ends with.
        let script = "cd /dev && for n in davinci* vdavinci* devmm_svm hisi_hdc /nodes/?; do\n\
                      [ -e \"$n\" ] && echo \"$n $( { : <>\"$n\"; } 2>&1 | sed 's/.*: //')\"\ndone";
        let text = stage.exec(&holder.pod, user, &["sh", "-c", script])?.text;
        let seen: BTreeMap<_, _> = text.lines().filter_map(|line| line.split_once(' ')).collect();
        let own: Vec<_> = seen.keys().copied().filter(|node| !node.starts_with('/')).collect();
        ensure!(own.join(" ") == nodes, "{user} sees {own:?}");
        for (node, end) in &seen {
            let mine = !node.starts_with('/') || *node == format!("/nodes/{card}");
            let wanted = if mine { PASSED } else { DENIED };
            ensure!(*end == wanted, "{user} with card {card} opens {node}: {end:?} instead of {wanted:?}");
        }
        ensure!(seen.len() == 12, "{user}: {text:?}");
    }
    holder.stop(stage)?;
    stage.wait_empty()
}

/// What a container's mounts of the vendor's software are: place and options.
const MOUNTS: &str = "\
/etc/ascend_install.info ro
/etc/hccn.conf ro
/usr/local/Ascend/driver/include ro
/usr/local/Ascend/driver/lib64 ro
/usr/local/Ascend/driver/tools/hccn_tool ro
/usr/local/Ascend/driver/version.info ro
/usr/local/bin/npu-smi ro
/usr/local/dcmi ro";

/// The image's library path survives, its choice of cards does not; the vendor's software is there, read-only.
fn environment_and_mounts(stage: &Stage) -> anyhow::Result<()> {
    stage.with(&Driver::cutting())?;
    let holder = Holder::start(stage, "settings")?;
    let variables = stage.shell(&holder.pod, "env | grep -e ^LD_ -e ^ASCEND_ | sort")?.text;
    let wanted = format!("ASCEND_VISIBLE_DEVICES=void\nLD_LIBRARY_PATH={}", image::LIBRARY_PATH);
    ensure!(variables == wanted, "the container has\n{variables}\ninstead of\n{wanted}");
    let script =
        "awk '$5 ~ /Ascend|ascend|hccn|npu-smi|dcmi/ { print $5, substr($6, 1, 2) }' /proc/self/mountinfo | sort";
    let mounts = stage.shell(&holder.pod, script)?.text;
    ensure!(mounts == MOUNTS, "the container has\n{mounts}\ninstead of\n{MOUNTS}");
    let version = stage.shell(&holder.pod, "cat /usr/local/Ascend/driver/version.info; echo x >/etc/hccn.conf")?;
    ensure!(version.text.contains("Version=25.2.0") && version.text.contains("Read-only"), "{version:?}");
    holder.stop(stage)?;
    stage.wait_empty()
}

/// While a pod runs there is one record and one CDI file of its claim; when it is gone, nothing.
fn nothing_left(stage: &Stage) -> anyhow::Result<()> {
    stage.with(&Driver::cutting())?;
    let holder = Holder::start(stage, "leaves")?;
    let claim = stage.claim_of(&holder.pod, "leaves")?;
    let uid = claim["metadata"]["uid"].as_str().context("no uid")?.to_owned();
    let (records, cdi) = (stage.records()?, stage.cdi()?);
    let one = |files: &[(String, Value)]| files.len() == 1 && files.iter().all(|(file, _)| file.contains(&uid));
    ensure!(one(&records) && one(&cdi), "records {records:?}, CDI files {cdi:?}");
    let shown = stage.npuctl(&["claims", "list"])?;
    ensure!(shown.len() == 1 && shown[0]["uid"] == json!(uid), "npuctl shows {shown:?}");
    let card = holder.card(stage)?;
    holder.stop(stage)?;
    stage.wait_gone(&claim)?;
    stage.wait_empty()?;
    let free = stage.npuctl(&["devices"])?;
    let device = free.iter().find(|device| device["name"] == format!("npu-{card}")).context("the card is gone")?;
    ensure!(device["claims"] == json!([]), "{device}");
    let left = stage.plane().sh("find /etc/cdi /var/run/cdi /var/lib/npu-dra/claims -type f 2>/dev/null || true")?;
    if left.trim().is_empty() { Ok(()) } else { Err(anyhow!("files are left: {left}")) }
}

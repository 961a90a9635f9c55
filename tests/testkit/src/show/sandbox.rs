//! `testkit sandbox`: a simulated node that stays up, and the commands that act on it as scheduler and kubelet do.
//!
//! The commands reach the sandbox by a socket in its directory: one JSON line asks, one JSON line answers. Preparing and
//! releasing goes from the command to the daemon's own socket, in kubelet's protocol.

use std::{path::Path, process::ExitStatus, time::Duration};

use anyhow::{Context as _, bail};
use dcmi::world::{Profile, World};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use testkit::{
    api::{ApiServer, How, Who},
    kubelet::client::{Claim, DraClient, DraVersion},
    node::{DRIVER, Daemon, Node, SOON},
};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    net::{UnixListener, UnixStream},
};

use super::{GROUP, Stage, named, say};

const NAMESPACE: &str = "default";
/// How the daemon of a sandbox is started.
const FLAGS: &[&str] = &["--enable-hard-vnpu=true"];
/// Time between the daemon's end and its next start: long enough to look at the records meanwhile.
const PAUSE: Duration = Duration::from_secs(3);
pub(super) const SOCKET: &str = "run/sandbox.sock";

/// A claim that is asked for.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Wanted {
    /// Its name.
    pub(crate) claim: String,
    /// Memory, as a quantity; none for whole cards.
    pub(crate) memory: Option<String>,
    /// Number of devices.
    pub(crate) count: u32,
    /// Class.
    pub(crate) class: String,
}

/// What a command asks of the sandbox.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Order {
    /// Make this claim and allocate it; one that exists is given as it is.
    Claim(Wanted),
    /// Find a claim.
    Find(String),
    /// Delete a claim.
    Delete(String),
}

/// Keeps a node up until it is ended.
pub(crate) async fn run() -> anyhow::Result<()> {
    let mut stage = Stage::new().await?;
    let listener = UnixListener::bind(stage.node.dir().join(SOCKET)).context("cannot listen in the sandbox")?;
    let admin = stage.api.kubeconfig(&stage.node.dir().join("admin"), &Who::Admin, How::Certificate)?;
    stage.start(FLAGS).await?;
    guide(&stage, &admin.path);
    loop {
        tokio::select! {
            connection = listener.accept() => {
                let (stream, _) = connection.context("the sandbox's socket failed")?;
                // A command that goes away, or sends what is no order, harms nobody.
                let _ = serve(&stage.api, stream).await;
            }
            status = ended(&mut stage) => {
                let status = status?;
                say(format!("\nthe daemon ended ({status}); its log ends with\n{}", stage.end_of_log()));
                say("it is started again, as systemd would do");
                tokio::time::sleep(PAUSE).await; // waits: as systemd does between two starts
                // The node is its user's: whatever cards it has now, and whatever the daemon says of them, it stays.
                match stage.restart(FLAGS).await {
                    Ok(()) => say(format!("npu-dra runs (pid {})", pid(&stage))),
                    Err(error) => say(format!("{error:#}; it is tried again")),
                }
            }
        }
    }
}

/// Waits until the daemon has ended.
async fn ended(stage: &mut Stage) -> anyhow::Result<ExitStatus> {
    let daemon = stage.daemon.as_mut().context("no daemon runs")?;
    loop {
        if let Some(status) = daemon.exit_status()? {
            return Ok(status);
        }
        tokio::time::sleep(Duration::from_millis(200)).await; // waits: for the daemon's end
    }
}

fn pid(stage: &Stage) -> u32 {
    stage.daemon.as_ref().map_or(0, Daemon::pid)
}

/// Tells a reader where things are and what to try.
fn guide(stage: &Stage, kubeconfig: &Path) {
    let dir = stage.node.dir().display();
    let testkit = stage.program("testkit").display().to_string();
    let npuctl = stage.program("npuctl").display().to_string();
    let socket = stage.node.admin_socket().display().to_string();
    let pid = pid(stage);
    let url = stage.api.url();
    say(format!(
        "A simulated node with 8 Ascend 910B4 is up: npu-dra runs (pid {pid}). Ctrl-C ends it and removes everything.

  {dir}/logs       the daemon's log
  {dir}/state      claim records
  {dir}/cdi        CDI files
  {dir}/host       what the daemon takes for the host (/dev, /sys, /etc)
  {dir}/world      the NPUs, as the simulated libdcmi.so sees them
  {dir}/kubelet    kubelet's sockets
  API server 1.36: {url}, kubeconfig {kubeconfig}

Look (in another terminal):
  export TESTKIT_SANDBOX={dir} NPUCTL_SOCKET={socket} NPUCTL_STATE_DIR={dir}/state
  {npuctl} devices
  {npuctl} status
  kubectl --kubeconfig {kubeconfig} get resourceslices -o yaml

Prepare claims as scheduler and kubelet do, and release them:
  {testkit} prepare a                   # one whole NPU
  {testkit} prepare b --memory 10000    # about 10 GiB: a vNPU of template vir10_3c_16g
  {testkit} prepare c --memory 8Gi
  {npuctl} vnpu list
  {npuctl} vnpu templates --device npu-0
  {npuctl} claims list
  cat {dir}/cdi/*
  kill -9 {pid}                         # nothing is lost; it is started again. While it is down, root is shown
                                        # the records, marked offline: {npuctl} claims list
  {testkit} prepare a                   # the same answer
  {testkit} unprepare a

Cut a card by hand, as an operator (it takes no claims meanwhile):
  {npuctl} vnpu create --device npu-6 --template vir05_1c_8g
  {npuctl} vnpu destroy 196

Break something:
  {testkit} fault 3 80E01801            # npu-3 tells of memory errors, by an event and at each poll; --end ends it
  {testkit} fault 3 8C2FA009 minor      # any code, as bad as you like
  {testkit} health 3 critical           # the chip's own verdict; {testkit} health 3 ok ends it
  {testkit} lose 5                      # npu-5 falls off its bus; --back brings it back under its name
  {testkit} foreign 4 vir05_1c_8g       # a vNPU of somebody else: npu-4 takes no new claims
  {testkit} foreign --remove 116        # a vNPU vanishes, such as that of claim b
  echo '{{\"rules\": [{{\"function\": \"dcmi_create_vdevice\", \"times\": 1, \"action\": \"crash\"}}]}}' > {dir}/world/faults.json
  echo '{{\"rules\": [{{\"function\": \"dcmi_get_device_health\", \"card\": 5, \"action\": \"hang\"}}]}}' > {dir}/world/faults.json
  rm {dir}/world/faults.json",
        kubeconfig = kubeconfig.display(),
    ));
}

/// Answers one order.
pub(super) async fn serve(api: &ApiServer, stream: UnixStream) -> anyhow::Result<()> {
    let (reader, mut writer) = stream.into_split();
    let mut line = String::new();
    tokio::time::timeout(SOON, BufReader::new(reader).read_line(&mut line)).await??;
    let answer = match serde_json::from_str(&line).map_err(Into::into).and_then(|order| obey(api, order)) {
        Ok(claim) => json!({"ok": claim}),
        Err(error) => json!({"error": format!("{error:#}")}),
    };
    writer.write_all(format!("{answer}\n").as_bytes()).await?;
    Ok(())
}

fn obey(api: &ApiServer, order: Order) -> anyhow::Result<Value> {
    let find = |name: &str| {
        let found = api.claim(NAMESPACE, name);
        found.with_context(|| format!("there is no claim {name}"))
    };
    match order {
        Order::Find(name) => find(&name),
        Order::Delete(name) => {
            let claim = find(&name)?;
            api.delete_claim(NAMESPACE, &name);
            Ok(claim)
        }
        Order::Claim(wanted) => {
            if let Ok(claim) = find(&wanted.claim) {
                return Ok(claim);
            }
            let mut exactly = json!({"deviceClassName": wanted.class, "count": wanted.count});
            if let Some(memory) = wanted.memory {
                exactly["capacity"] = json!({"requests": {"memCapacity": memory}});
            }
            let claim = json!({
                "metadata": {"name": wanted.claim},
                "spec": {"devices": {"requests": [{"name": "npu", "exactly": exactly}]}},
            });
            api.create(GROUP, "resourceclaims", NAMESPACE, &claim)?;
            api.allocate(NAMESPACE, &wanted.claim).inspect_err(|_| {
                api.delete_claim(NAMESPACE, &wanted.claim);
            })
        }
    }
}

/// Sends an order to a sandbox.
async fn send(dir: &Path, order: &Order) -> anyhow::Result<Value> {
    let path = dir.join(SOCKET);
    let why = || format!("no sandbox at {}: is `testkit sandbox` running there?", path.display());
    let stream = UnixStream::connect(&path).await.with_context(why)?;
    let (reader, mut writer) = stream.into_split();
    writer.write_all(format!("{}\n", serde_json::to_string(order)?).as_bytes()).await?;
    let mut line = String::new();
    tokio::time::timeout(SOON, BufReader::new(reader).read_line(&mut line)).await??;
    let mut answer: Value = serde_json::from_str(&line).context("the sandbox gave no answer")?;
    if let Some(error) = answer["error"].as_str() {
        bail!("{error}");
    }
    Ok(answer["ok"].take())
}

async fn driver(dir: &Path) -> anyhow::Result<DraClient> {
    let socket = dir.join("kubelet/plugins").join(DRIVER).join("dra@npu.sock");
    let client = DraClient::connect(&socket, DraVersion::V1).await;
    client.with_context(|| format!("the daemon does not answer at {}", socket.display()))
}

/// Makes a claim, lets it be allocated, and prepares it.
pub(crate) async fn prepare(dir: &Path, wanted: Wanted) -> anyhow::Result<()> {
    let stored = send(dir, &Order::Claim(wanted)).await?;
    let claim: Claim = named(&stored)?;
    say(format!("claim {}/{}, uid {}", claim.namespace, claim.name, claim.uid));
    for result in stored["status"]["allocation"]["devices"]["results"].as_array().into_iter().flatten() {
        let text = |name: &str| result[name].as_str().unwrap_or("-").to_owned();
        let memory = result["consumedCapacity"]["memCapacity"].as_str().unwrap_or("all");
        say(format!(
            "allocated {} of pool {}, share {}, memory {memory}",
            text("device"),
            text("pool"),
            text("shareID")
        ));
    }
    let devices = driver(dir).await?.prepare_one(&claim).await.map_err(anyhow::Error::msg)?;
    for device in devices {
        say(format!("prepared {} as {}", device.device_name, device.cdi_device_ids.join(", ")));
    }
    Ok(())
}

/// Releases a claim and deletes it.
pub(crate) async fn unprepare(dir: &Path, name: &str) -> anyhow::Result<()> {
    let claim = named(&send(dir, &Order::Find(name.to_owned())).await?)?;
    driver(dir).await?.unprepare_one(&claim).await.map_err(anyhow::Error::msg)?;
    send(dir, &Order::Delete(name.to_owned())).await?;
    say(format!("released claim {name}"));
    Ok(())
}

fn world(dir: &Path) -> anyhow::Result<World> {
    World::open(dir.join("world")).with_context(|| format!("no sandbox at {}", dir.display()))
}

/// Makes a vNPU behind the driver's back.
pub(crate) fn add_vnpu(dir: &Path, npu: u32, template: &str) -> anyhow::Result<()> {
    let id = world(dir)?.add_vnpu(npu, template).with_context(|| format!("cannot make {template} on NPU {npu}"))?;
    say(format!("NPU {npu} has vNPU {id}, and npu-dra did not make it"));
    Ok(())
}

/// Removes a vNPU behind the driver's back.
pub(crate) fn remove_vnpu(dir: &Path, id: u32) -> anyhow::Result<()> {
    world(dir)?.remove_vnpu(id).with_context(|| format!("cannot remove vNPU {id}"))?;
    say(format!("vNPU {id} is gone"));
    Ok(())
}

/// Lets a fault begin or end.
pub(crate) fn fault(dir: &Path, npu: u32, code: u32, severity: u8, end: bool) -> anyhow::Result<()> {
    let world = world(dir)?;
    let outcome = if end { world.recover(npu, code, severity) } else { world.occur(npu, code, severity) };
    outcome.with_context(|| format!("cannot change the faults of NPU {npu}"))?;
    say(format!("fault {code:08X} of NPU {npu} has {}", if end { "ended" } else { "begun" }));
    Ok(())
}

/// Lets a chip fall off its bus, or come back.
pub(crate) fn lose(dir: &Path, npu: u32, back: bool) -> anyhow::Result<()> {
    let world = world(dir)?;
    let outcome = if back { world.return_chip(npu) } else { world.drop_chip(npu) };
    outcome.with_context(|| format!("cannot move NPU {npu}"))?;
    Node::in_dir(dir, Profile::Ascend910B4)?.sync_host()?;
    say(format!("NPU {npu} is {} its bus", if back { "back on" } else { "off" }));
    Ok(())
}

/// Gives a chip another state of health.
pub(crate) fn health(dir: &Path, npu: u32, level: u32) -> anyhow::Result<()> {
    world(dir)?.set_health(npu, level).with_context(|| format!("cannot change the health of NPU {npu}"))?;
    say(format!("NPU {npu} reports health {level}"));
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt as _};

    use super::*;

    /// A stage whose daemon and npuctl are these scripts.
    async fn stage(dir: &Path, daemon: &str, npuctl: &str) -> Stage {
        for (name, text) in [("npu-dra", daemon), ("npuctl", npuctl), ("libdcmi.so", "")] {
            fs::write(dir.join(name), format!("#!/bin/sh\n{text}\n")).unwrap();
            fs::set_permissions(dir.join(name), fs::Permissions::from_mode(0o755)).unwrap();
        }
        Stage::with(dir.to_owned()).await.unwrap()
    }

    #[tokio::test]
    async fn a_daemon_that_is_started_again_without_a_card_need_not_publish_it() {
        let dir = tempfile::tempdir().unwrap();
        let mut stage = stage(dir.path(), "exec sleep 600", "exit 0").await;
        stage.node.world().drop_chip(7).unwrap();
        // Nothing is ever published.
        tokio::time::timeout(SOON / 2, stage.restart(FLAGS)).await.expect("an answer is enough").unwrap();
        assert_eq!(stage.daemon.as_mut().unwrap().exit_status().unwrap(), None);
    }

    #[tokio::test]
    async fn a_daemon_that_ends_at_once_does_not_end_the_sandbox() {
        let dir = tempfile::tempdir().unwrap();
        let mut stage = stage(dir.path(), "exit 2", "exit 4").await;
        tokio::time::timeout(SOON / 2, stage.restart(FLAGS)).await.expect("its end is seen").unwrap();
        assert_eq!(ended(&mut stage).await.unwrap().code(), Some(2));
    }

    #[tokio::test]
    async fn a_daemon_that_cannot_be_started_is_as_one_that_has_ended() {
        let dir = tempfile::tempdir().unwrap();
        let mut stage = stage(dir.path(), "exit 2", "exit 4").await;
        stage.restart(FLAGS).await.unwrap();
        fs::remove_file(dir.path().join("npu-dra")).unwrap();
        assert!(stage.restart(FLAGS).await.is_err());
        assert_eq!(ended(&mut stage).await.unwrap().code(), Some(2), "so that the next start is tried");
    }
}

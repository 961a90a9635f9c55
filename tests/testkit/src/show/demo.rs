//! `testkit demo`: the main job, step by step. Every command and every output is real.

use std::{
    fs,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use serde_json::{Value, json};
use testkit::{
    api::DeviceResult,
    kubelet::client::Claim,
    node::{DRIVER, NODE, POOL, SOON, until},
};

use super::{GROUP, NAMESPACE, SAMPLE_MEMORY, Stage, cards, entries, heading, millis, named, narrow, quote, say};

/// A demo that takes longer hangs.
const LONGEST: Duration = Duration::from_mins(3);
const HARD_VNPU: &str = "--enable-hard-vnpu=true";

/// Runs all steps; the last line is `demo: ok`, or the error tells what was wrong and what was left.
pub(crate) async fn run() -> anyhow::Result<()> {
    let mut stage = Stage::new().await?;
    let outcome = match tokio::time::timeout(LONGEST, steps(&mut stage)).await {
        Ok(outcome) => outcome,
        Err(_) => Err(anyhow::anyhow!("not done after {LONGEST:?}")),
    };
    match outcome {
        Ok(()) => {
            say("\ndemo: ok");
            Ok(())
        }
        Err(error) => {
            say("\nThe end of the daemon's log:");
            quote(&stage.end_of_log());
            let left = left(&stage).unwrap_or_else(|error| vec![format!("{error:#}")]);
            bail!("demo: failed: {error:#}\nleft: {}", list(&left))
        }
    }
}

async fn steps(stage: &mut Stage) -> anyhow::Result<()> {
    heading(
        "A node with 8 Ascend 910B4 of 32 GB, kubelet and a Kubernetes 1.36 API server (simulated); npu-dra (real)",
    );
    let start = Instant::now();
    say(format!("$ npu-dra {HARD_VNPU}"));
    stage.start(&[HARD_VNPU]).await?;
    say(format!("  registered with kubelet, hardware read, published after {}", millis(start.elapsed())));
    published(stage)?;
    stage.npuctl(&["devices"]).await?;

    let mut held = vec![whole_npu(stage).await?, part_of_an_npu(stage).await?];
    crash(stage, &held).await?;
    held.extend(four_on_one_card(stage).await?);
    no_room(stage).await?;
    release(stage, &held).await?;
    finish(stage).await
}

/// A prepared claim and what kubelet was told.
struct Prepared {
    claim: Claim,
    devices: Vec<String>,
}

/// A claim for one whole NPU.
async fn whole_npu(stage: &Stage) -> anyhow::Result<Prepared> {
    heading("A pod asks for one whole NPU (packaging/manifests/sample-whole-npu.yaml)");
    stage.api.claim_from_template(NAMESPACE, "whole-npu", "train")?;
    let prepared = allocate_and_prepare(stage, "train").await?;
    let table = stage.npuctl(&["devices"]).await?;
    ensure!(table.contains("ascend-dra/train"), "npuctl devices does not name the claim");
    let table = stage.npuctl(&["claims", "list"]).await?;
    ensure!(table.contains("train"), "npuctl claims list does not have the claim");
    show_cdi(stage, &prepared.claim)?;
    Ok(prepared)
}

/// The claim of the requirements: a bare number of MiB.
async fn part_of_an_npu(stage: &Stage) -> anyhow::Result<Prepared> {
    heading("A pod asks for a part of an NPU (packaging/manifests/sample-memory.yaml)");
    let manifest = SAMPLE_MEMORY.split("---\n").find(|part| part.contains("kind: ResourceClaimTemplate"));
    quote(manifest.context("the sample has no template")?);
    let stored = stage.api.claim_from_template(NAMESPACE, "npu-claim-template", "infer")?;
    let memory = &stored["spec"]["devices"]["requests"][0]["exactly"]["capacity"]["requests"]["memCapacity"];
    say(format!("  stored, after the shipped policy gave the number its unit: memCapacity {memory}"));
    ensure!(memory == "10000Mi", "the claim asks for {memory}");
    let prepared = allocate_and_prepare(stage, "infer").await?;
    let table = stage.npuctl(&["vnpu", "list"]).await?;
    ensure!(table.contains("vir10_3c_16g"), "npuctl vnpu list has no vir10_3c_16g");
    let vnpus = stage.node.world().vnpus()?;
    let [vnpu] = &vnpus[..] else { bail!("the node has {} vNPUs instead of one", vnpus.len()) };
    ensure!(vnpu.template == "vir10_3c_16g", "the node has a vNPU of template {}", vnpu.template);
    let node = cdi_device_nodes(stage, &prepared.claim)?;
    say(format!("  the container gets {node}"));
    let host = format!("\"hostPath\":\"/dev/vdavinci{}\"", vnpu.id);
    ensure!(node.contains(&host), "the CDI file has no {host}");
    Ok(prepared)
}

/// Fills one card with four quarters.
async fn four_on_one_card(stage: &Stage) -> anyhow::Result<Vec<Prepared>> {
    heading("Four pods ask for 8Gi each of one card, npu-2");
    let mut held = Vec::new();
    for name in ["quarter-1", "quarter-2", "quarter-3", "quarter-4"] {
        stage.api.create(GROUP, "resourceclaims", NAMESPACE, &quarter(name))?;
        held.push(allocate_and_prepare(stage, name).await?);
    }
    stage.npuctl(&["vnpu", "list"]).await?;
    let vnpus = stage.node.world().vnpus()?;
    let quarters = vnpus.iter().filter(|vnpu| vnpu.phy == 2 && vnpu.template == "vir05_1c_8g").count();
    ensure!(
        quarters == 4 && vnpus.len() == 5,
        "the node has {} vNPUs, {quarters} of them quarters of npu-2",
        vnpus.len()
    );
    Ok(held)
}

/// A claim for 8Gi of the card with physical id 2.
fn quarter(name: &str) -> Value {
    let card = "device.driver == \"npu.huawei.com\" && device.attributes[\"npu.huawei.com\"].physicalId == 2";
    json!({
        "metadata": {"name": name},
        "spec": {"devices": {"requests": [{"name": "npu", "exactly": {
            "deviceClassName": DRIVER, "selectors": [{"cel": {"expression": card}}],
            "capacity": {"requests": {"memCapacity": "8Gi"}},
        }}]}},
    })
}

/// One more finds no room, neither with the scheduler nor, if the scheduler were wrong, with the driver.
async fn no_room(stage: &Stage) -> anyhow::Result<()> {
    heading("A fifth pod asks for 8Gi of the same card");
    let fifth = "quarter-5";
    stage.api.create(GROUP, "resourceclaims", NAMESPACE, &quarter(fifth))?;
    let Err(refusal) = stage.api.allocate(NAMESPACE, fifth) else { bail!("the scheduler gave more than there is") };
    say(format!("  scheduler: {refusal:#}"));
    let before = (stage.node.world().vnpus()?, cdi_texts(stage)?);
    let result = DeviceResult::new("npu", DRIVER, POOL, "npu-2")
        .share("5b9c3a52-7a5e-4b8e-9f57-d0f1a2b3c4d5")
        .consumes("memCapacity", "8Gi");
    let request = quarter(fifth)["spec"]["devices"]["requests"][0].take();
    let forced = stage.api.claim_builder(NAMESPACE, fifth).raw_request(request).result(result).node(NODE).store();
    let claim = named(&forced)?;
    say("  the same, allocated by force:");
    let Err(refusal) = stage.prepare(&claim).await else { bail!("the driver cut more than there is") };
    say(format!("  kubelet: NodePrepareResources({fifth}) failed: {refusal}"));
    ensure!((stage.node.world().vnpus()?, cdi_texts(stage)?) == before, "the refused claim left something");
    stage.unprepare(&claim).await.map_err(anyhow::Error::msg)?;
    stage.api.delete_claim(NAMESPACE, fifth);
    Ok(())
}

/// Kills the daemon and compares what is there before and after.
async fn crash(stage: &mut Stage, held: &[Prepared]) -> anyhow::Result<()> {
    heading("The daemon is killed, and started again");
    let before = (stage.ask(&["claims", "list", "-o", "json"]).await?, cdi_texts(stage)?);
    let vnpus = stage.node.world().vnpus()?;
    let daemon = stage.daemon.as_mut().context("no daemon runs")?;
    say(format!("$ kill -9 {}", daemon.pid()));
    daemon.kill()?;
    ensure!(cdi_texts(stage)? == before.1, "the crash changed a CDI file");
    say("  the CDI files are still there: containers of the pods can be started all the time");
    let start = Instant::now();
    say(format!("$ npu-dra {HARD_VNPU}"));
    stage.start(&[HARD_VNPU]).await?;
    say(format!(
        "  registered with kubelet, hardware read, records compared with it after {}",
        millis(start.elapsed())
    ));
    let after = stage.ask(&["claims", "list", "-o", "json"]).await?;
    ensure!(without_times(&after)? == without_times(&before.0)?, "the claims changed:\n{}\n{after}", before.0);
    stage.npuctl(&["claims", "list"]).await?;
    ensure!(cdi_texts(stage)? == before.1, "the start changed a CDI file");
    for prepared in held {
        let (name, again) = (&prepared.claim.name, stage.prepare(&prepared.claim).await.map_err(anyhow::Error::msg)?);
        ensure!(again == prepared.devices, "for {name} kubelet is told {again:?} instead of {:?}", prepared.devices);
    }
    ensure!(cdi_texts(stage)? == before.1, "preparing again changed a CDI file");
    ensure!(stage.node.world().vnpus()? == vnpus, "the vNPUs changed");
    say("  same claims, same CDI files, same vNPUs; kubelet prepares again and gets the same answers");
    Ok(())
}

/// Lets the allocator give devices to a stored claim, and kubelet prepare it.
async fn allocate_and_prepare(stage: &Stage, name: &str) -> anyhow::Result<Prepared> {
    let stored = stage.api.allocate(NAMESPACE, name)?;
    let claim = named(&stored)?;
    for result in stored["status"]["allocation"]["devices"]["results"].as_array().into_iter().flatten() {
        let share = match result["consumedCapacity"]["memCapacity"].as_str() {
            Some(memory) => format!(", {memory} of its memory, share {}", result["shareID"].as_str().unwrap_or("?")),
            None => String::new(),
        };
        say(format!("  scheduler: claim {name} gets {}{share}", result["device"].as_str().unwrap_or("?")));
    }
    let start = Instant::now();
    let devices = stage.prepare(&claim).await.map_err(anyhow::Error::msg)?;
    say(format!("  kubelet: NodePrepareResources({}) = {} ({})", claim.name, list(&devices), millis(start.elapsed())));
    Ok(Prepared { claim, devices })
}

/// Releases claims as kubelet does when their pods have ended.
async fn release(stage: &Stage, held: &[Prepared]) -> anyhow::Result<()> {
    heading("The pods end");
    for Prepared { claim, .. } in held {
        stage.unprepare(claim).await.map_err(anyhow::Error::msg)?;
        say(format!("  kubelet: NodeUnprepareResources({}) = ok", claim.name));
        ensure!(stage.api.delete_claim(&claim.namespace, &claim.name), "claim {} is gone already", claim.name);
    }
    stage.npuctl(&["claims", "list"]).await?;
    stage.npuctl(&["vnpu", "list"]).await?;
    Ok(())
}

/// Checks that nothing is left, stops the daemon, checks again.
async fn finish(stage: &mut Stage) -> anyhow::Result<()> {
    heading("Nothing is left");
    stage.wait_published(8).await?;
    published(stage)?;
    let things = held(stage)?;
    ensure!(things.is_empty(), "left while the daemon runs: {}", list(&things));
    say("  no record, no CDI file, no vNPU");
    let overlaps = stage.node.world().overlaps()?;
    ensure!(overlaps.is_empty(), "the vendor library was called twice at a time: {}", list(&overlaps));
    let daemon = stage.daemon.as_mut().context("no daemon runs")?;
    let pid = daemon.pid();
    say(format!("$ kill {pid}"));
    let (code, time) = daemon.stop().await?;
    ensure!(code == 0, "the daemon ended with {code}");
    say(format!("  ended with 0 after {}", millis(time)));
    ensure!(time < Duration::from_secs(2), "ending took {time:?}");
    until(SOON, || left(stage).is_ok_and(|things| things.is_empty())).await;
    let things = left(stage)?;
    ensure!(things.is_empty(), "left after the daemon: {}", list(&things));
    say("  no record, no CDI file, no vNPU, no socket, no process");
    Ok(())
}

/// Shows the published slices and checks them against the requirements.
fn published(stage: &Stage) -> anyhow::Result<()> {
    let slices = stage.api.slices(DRIVER, NODE);
    for slice in &slices {
        let name = slice["metadata"]["name"].as_str().unwrap_or("?");
        let pool = slice["spec"]["pool"]["name"].as_str().unwrap_or("?");
        say(format!("  ResourceSlice {name}: driver {DRIVER}, node {NODE}, pool {pool}, {} NPUs", cards(slice)));
    }
    let all = slices.iter().flat_map(|slice| slice["spec"]["devices"].as_array().into_iter().flatten());
    let first = all.into_iter().find(|device| device["name"] == "npu-0").context("npu-0 is not published")?;
    let shown = json!({
        "name": first["name"],
        "chipName": first["attributes"]["chipName"], "numaNode": first["attributes"]["numaNode"],
        "physicalId": first["attributes"]["physicalId"], "topologyGroup": first["attributes"]["topologyGroup"],
        "memCapacity": first["capacity"]["memCapacity"]["value"],
    });
    let wanted = json!({
        "name": "npu-0",
        "chipName": {"string": "910B4"}, "numaNode": {"int": 6}, "physicalId": {"int": 0},
        "topologyGroup": {"string": "ring-0"}, "memCapacity": "32Gi",
    });
    ensure!(shown == wanted, "npu-0 is published as {shown}, not as {wanted}");
    Ok(())
}

/// Shows the CDI file of a claim.
fn show_cdi(stage: &Stage, claim: &Claim) -> anyhow::Result<()> {
    let name = stage.node.cdi_files()?.into_iter().find(|name| name.contains(&claim.uid));
    let path = stage.node.cdi().join(name.context("the claim has no CDI file")?);
    say(format!("$ cat {}", path.display()));
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let value: Value = serde_json::from_str(&text).with_context(|| format!("{} is no JSON", path.display()))?;
    quote(&narrow(&value, 0));
    Ok(())
}

/// The device nodes of a claim's devices, on one line.
fn cdi_device_nodes(stage: &Stage, claim: &Claim) -> anyhow::Result<String> {
    let texts = cdi_texts(stage)?;
    let text = texts.iter().find(|(name, _)| name.contains(&claim.uid)).context("the claim has no CDI file")?;
    let value: Value = serde_json::from_str(&text.1).context("the CDI file is no JSON")?;
    let devices = value["devices"].as_array().into_iter().flatten();
    Ok(devices.map(|device| device["containerEdits"]["deviceNodes"].to_string()).collect::<Vec<_>>().join(" "))
}

/// All CDI files, by name, with their text.
fn cdi_texts(stage: &Stage) -> anyhow::Result<Vec<(String, String)>> {
    let names = stage.node.cdi_files()?;
    names.into_iter().map(|name| Ok((name.clone(), fs::read_to_string(stage.node.cdi().join(name))?))).collect()
}

/// The claims without what may change at a start.
fn without_times(document: &str) -> anyhow::Result<Value> {
    fn strip(value: &mut Value) {
        match value {
            Value::Object(map) => {
                map.retain(|name, _| !name.ends_with("At") && name != "since");
                map.values_mut().for_each(strip);
            }
            Value::Array(items) => items.iter_mut().for_each(strip),
            _ => {}
        }
    }
    let mut value = serde_json::from_str(document).context("npuctl gave no JSON")?;
    strip(&mut value);
    Ok(value)
}

/// Records, CDI files and vNPUs that are there.
fn held(stage: &Stage) -> anyhow::Result<Vec<String>> {
    let mut things: Vec<String> = stage.node.records()?.into_iter().map(|name| format!("record {name}")).collect();
    things.extend(stage.node.cdi_files()?.into_iter().map(|name| format!("CDI file {name}")));
    things.extend(stage.node.world().vnpus()?.into_iter().map(|vnpu| format!("vNPU {} {}", vnpu.id, vnpu.template)));
    things
        .extend(stage.api.objects("resourceclaims").iter().map(|claim| format!("claim {}", claim["metadata"]["name"])));
    Ok(things)
}

/// All that is there: what is held, sockets, and processes of the node.
fn left(stage: &Stage) -> anyhow::Result<Vec<String>> {
    let mut things = held(stage)?;
    let sockets = [stage.node.registrar(), stage.node.plugins().join(DRIVER)].into_iter().flat_map(|dir| entries(&dir));
    things.extend(sockets.map(|path| format!("socket {path}")));
    if stage.node.admin_socket().exists() {
        things.push(format!("socket {}", stage.node.admin_socket().display()));
    }
    // The daemon's processes carry the node's directory in their command line or their world.
    let marks = [stage.node.dir().as_os_str().as_encoded_bytes()];
    for process in fs::read_dir("/proc").context("cannot read /proc")?.flatten() {
        let number = process.file_name().to_string_lossy().parse::<u32>();
        let Some(pid) = number.ok().filter(|pid| *pid != std::process::id()) else { continue };
        let holds = |file: &str| {
            let text = fs::read(process.path().join(file)).unwrap_or_default();
            marks.iter().any(|mark| text.windows(mark.len()).any(|part| part == *mark))
        };
        if holds("cmdline") || holds("environ") {
            things.push(format!("process {pid}"));
        }
    }
    Ok(things)
}

/// For readers: the things, or none.
fn list(things: &[String]) -> String {
    if things.is_empty() { "nothing".to_owned() } else { things.join(", ") }
}

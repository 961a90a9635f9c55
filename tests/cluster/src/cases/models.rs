//! Parts of cards: the requirements' sample and the policy behind it, the slicing models, and every way in which
//! containers and pods share what a claim has.

use anyhow::{Context as _, ensure};
use dcmi::world::Profile;
use serde_json::{Value, json};

use super::{
    Case,
    booking::{Booking, Share, booked},
};
use crate::{
    api::path_of,
    driver::Driver,
    stage::{Stage, claim, claim_template, container, name, pod, request, shipped, wait},
};

pub(crate) const CASES: &[Case] = &[
    ("sample-without-gates", sample_without_gates),
    ("memory-policy", memory_policy),
    ("memory-policy-and-older-objects", older_objects),
    ("four-parts-and-a-fifth", four_and_a_fifth),
    ("several-requests", several_requests),
    ("first-available", first_available),
    ("claim-of-two-containers", two_containers),
    ("claim-of-two-pods", two_pods),
    ("admin-access", admin_access),
    ("admin-access-and-shares", admin_and_shares),
    ("exact-subset", exact_subset),
    ("model-partitionable", partitionable),
    ("model-static", fixed_layout),
];

/// The vNPUs that there are: physical id of the card and template, sorted.
fn made(stage: &Stage) -> anyhow::Result<Vec<(u32, String)>> {
    let mut made: Vec<_> = stage.vnpus()?.into_iter().map(|vnpu| (vnpu.phy, vnpu.template)).collect();
    made.sort();
    Ok(made)
}

/// The device nodes of cards and vNPUs in a container.
fn cards_in(stage: &Stage, pod: &Value, container: &str) -> anyhow::Result<Vec<String>> {
    let script = "cd /dev; for node in davinci[0-9]* vdavinci*; do [ -e $node ] && echo $node; done; echo end";
    let said = stage.exec(pod, container, &["sh", "-c", script])?;
    let mut lines: Vec<_> = said.text.lines().map(str::to_owned).collect();
    ensure!(lines.pop().as_deref() == Some("end"), "a look into {} ended early: {said:?}", name(pod));
    Ok(lines)
}

/// The node under which a container sees a vNPU.
fn vnpu_node(id: u32) -> String {
    format!("davinci{id}")
}

/// Deletes objects at once and waits until nothing of them is left on the node.
fn clear(stage: &Stage, objects: &[&Value]) -> anyhow::Result<()> {
    stage.delete(objects)?;
    stage.wait_empty()
}

// --- the sample

fn sample_objects() -> (Value, Value) {
    let of = |kind: &str, name: &str| json!({"kind": kind, "metadata": {"name": name, "namespace": "ascend-dra"}});
    (of("Pod", "npu-slice"), of("ResourceClaimTemplate", "npu-claim-template"))
}

/// With the default gates of 1.34 the claim loses its size, and gets a whole card; the driver's status says so.
fn sample_without_gates(stage: &Stage) -> anyhow::Result<()> {
    stage.with(&Driver::cutting())?;
    let (pod, template) = sample_objects();
    stage.plane().apply(&shipped("sample-memory.yaml")?)?;
    stage.wait_running(&pod)?;
    let stored = stage.get(&template)?;
    ensure!(stored["spec"]["spec"]["devices"]["requests"][0]["exactly"]["capacity"].is_null(), "{stored}");
    let claim = stage.claim_of(&pod, "npu")?;
    ensure!(booked(&Share::of(&claim).context("not allocated")?) == [("npu-0", "")], "{}", claim["status"]);
    ensure!(stage.vnpus()?.is_empty() && cards_in(stage, &pod, "main")? == ["davinci0"]);
    let status = stage.plane().run(&["npuctl", "status"])?;
    ensure!(status.contains("DRAConsumableCapacity"), "npuctl status does not name the gate:\n{status}");
    stage.api().delete(&path_of(&pod)?)?;
    clear(stage, &[&pod, &template])
}

// --- the policy that gives bare numbers their unit

/// What is written, and what the server stores.
fn table() -> Vec<(Value, Value)> {
    let changed = [
        (json!(10_000), "10000Mi"),
        (json!("10k"), "10000Mi"),
        (json!("1e4"), "10000Mi"),
        (json!(1), "1Mi"),
        (json!(1_048_575), "1048575Mi"),
    ];
    let same = ["1Mi", "1048576", "10Gi", "10000Mi", "0", "-5", "500m"];
    let mut table: Vec<_> = changed.into_iter().map(|(written, stored)| (written, json!(stored))).collect();
    table.extend(same.map(|quantity| (json!(quantity), Value::Null)));
    table.extend([0, -5].map(|number| (json!(number), Value::Null)));
    table.push((json!("10000.5"), Value::Null));
    table
}

/// What is stored where for every way to write a claim, and that a manifest can be applied again.
fn memory_policy(stage: &Stage) -> anyhow::Result<()> {
    stage.with(&Driver::cutting())?;
    let template = claim_template("applied", &[request("npu").memory(10_000)]);
    let direct = claim("applied", &[request("npu").memory(10_000)]);
    for _ in 0..2 {
        stage.plane().apply(&format!("{template}\n---\n{direct}\n"))?;
        for object in [&template, &direct] {
            let stored = stage.get(object)?["spec"].to_string();
            ensure!(stored.contains("\"10000Mi\""), "{stored}");
        }
    }
    stage.delete(&[&template, &direct])?;
    let sized = |capacity: Value| request("npu").set("capacity", capacity);
    let memory = |value: &Value| json!({"requests": {"memCapacity": value}});
    let exactly = "/devices/requests/0/exactly/capacity";
    let kept =
        |capacity: Option<&Value>| capacity.and_then(|capacity| capacity.pointer("/requests/memCapacity")).cloned();
    for (written, stored) in table() {
        let direct = claim("row", &[sized(memory(&written)).class("any.example.com")]);
        let template = claim_template("row", &[sized(memory(&written))]);
        let mut alternatives = claim("row", &[]);
        let large = json!({"name": "large", "deviceClassName": "npu.huawei.com", "capacity": memory(&json!("64Gi"))});
        let small = json!({"name": "small", "deviceClassName": "npu.huawei.com", "capacity": memory(&written)});
        alternatives["spec"]["devices"]["requests"] = json!([
            {"name": "first", "exactly": {"deviceClassName": "npu.huawei.com"}},
            {"name": "npu", "firstAvailable": [large, small]},
        ]);
        for (object, path) in [
            (&direct, format!("/spec{exactly}")),
            (&template, format!("/spec/spec{exactly}")),
            (&alternatives, "/spec/devices/requests/1/firstAvailable/1/capacity".to_owned()),
        ] {
            let seen = kept(stage.api().try_out(object)?.pointer(&path));
            if stored.is_null() {
                // Unchanged in value: the server may write a quantity in another way.
                let policy = seen.as_ref().and_then(Value::as_str).is_some_and(|text| text.ends_with("Mi"));
                let own = written.as_str().is_some_and(|text| text.ends_with("Mi"));
                ensure!(seen.is_some() && policy == own, "{written} in {path} became {seen:?}");
            } else {
                ensure!(seen.as_ref() == Some(&stored), "{written} in {path} became {seen:?}, not {stored}");
            }
        }
    }
    for capacity in [Value::Null, json!({}), json!({"requests": {}}), json!({"requests": null})] {
        let seen = stage.api().try_out(&claim("row", &[sized(capacity.clone())]))?;
        ensure!(kept(seen.pointer(&format!("/spec{exactly}"))).is_none(), "{capacity} became {seen}");
    }
    let other = stage.api().try_out(&claim("row", &[sized(json!({"requests": {"cores": 10_000}}))]))?;
    let cores = other.pointer(&format!("/spec{exactly}/requests/cores"));
    ensure!(cores == Some(&json!("10k")) || cores == Some(&json!("10000")), "{other}");

    // The last places that a claim has: request 32, and alternative 8 of it.
    let mut wide = claim("wide", &[]);
    let plain = json!({"deviceClassName": "npu.huawei.com"});
    let mut requests: Vec<_> = (0..31).map(|number| json!({"name": format!("r{number}"), "exactly": plain})).collect();
    let alternative = |number| json!({"name": format!("a{number}"), "deviceClassName": "npu.huawei.com", "capacity": memory(&json!(10_000))});
    requests.push(json!({"name": "last", "firstAvailable": (0..8).map(alternative).collect::<Vec<_>>()}));
    wide["spec"]["devices"]["requests"] = json!(requests);
    let seen = stage.api().try_out(&wide)?;
    let last = seen.pointer("/spec/devices/requests/31/firstAvailable/7/capacity");
    ensure!(kept(last) == Some(json!("10000Mi")), "{seen}");
    Ok(())
}

/// Objects from before the policy: a template's claims are converted when they are made, an old claim can still be
/// edited, and the driver refuses to give it what nobody meant.
fn older_objects(stage: &Stage) -> anyhow::Result<()> {
    stage.with(&Driver::cutting())?;
    let template = claim_template("older", &[request("npu").memory(10_000)]);
    let claim = claim("old", &[request("npu").memory(10_000)]);
    let stored = |object: &Value| -> anyhow::Result<bool> {
        let text = stage.api().try_out(object)?["spec"].to_string();
        Ok(text.contains("10000Mi"))
    };
    stage.plane().kubectl(&["delete", "mutatingadmissionpolicybinding", "npu-memory-units"])?;
    let before = (|| {
        wait("the policy to act no more", || Ok((!stored(&template)?).then_some(())))?;
        stage.create(&[&template, &claim])
    })();
    stage.install_manifests()?;
    before?;
    let bare = stage.get(&claim)?["spec"].to_string();
    ensure!(!bare.contains("Mi"), "the claim was converted: {bare}");

    let path = path_of(&claim)?;
    stage.api().merge(&path, &json!({"metadata": {"annotations": {"example.com/note": "seen"}}}))?;
    stage.api().merge(&path, &json!({"metadata": {"finalizers": ["example.com/hold"]}}))?;
    stage.api().merge(&path, &json!({"metadata": {"finalizers": []}}))?;

    let (new, old) = (pod("new", &[&template]), pod("old", &[&claim]));
    stage.create(&[&new, &old])?;
    stage.wait_running(&new)?;
    let converted = Share::of(&stage.claim_of(&new, "older")?).context("not allocated")?;
    ensure!(converted.len() == 1 && converted[0].memory == "16Gi", "{converted:?}");
    let said = stage.wait_event(&old, "memCapacity")?;
    ensure!(said.starts_with("FailedPrepareDynamicResources") && said.contains("10000Mi"), "{said}");
    let kept = stage.get(&claim)?;
    ensure!(Share::of(&kept).is_some_and(|shares| shares[0].memory == "8Gi"), "{}", kept["status"]);
    ensure!(made(stage)?.len() == 1 && stage.records()?.len() == 1, "the old claim has something");
    clear(stage, &[&new, &old, &template, &claim])
}

// --- parts in use

/// Four quarters of one card, each in a pod; the fifth waits until one leaves.
fn four_and_a_fifth(stage: &Stage) -> anyhow::Result<()> {
    stage.with(&Driver::cutting())?;
    let on_card_0 = "device.driver == 'npu.huawei.com' && device.attributes['npu.huawei.com'].physicalId == 0";
    let template = claim_template("quarter", &[request("npu").memory("8Gi").select(on_card_0)]);
    let pods = ["a", "b", "c", "d", "e"].map(|name| pod(name, &[&template]));
    let four: Vec<_> = std::iter::once(&template).chain(&pods[..4]).collect();
    stage.create(&four)?;
    let mut seen = Vec::new();
    for pod in &pods[..4] {
        stage.wait_running(pod)?;
        seen.extend(cards_in(stage, pod, "main")?);
    }
    let nodes = |stage: &Stage| -> anyhow::Result<Vec<String>> {
        Ok(stage.vnpus()?.iter().map(|vnpu| vnpu_node(vnpu.id)).collect())
    };
    seen.sort();
    let first = nodes(stage)?;
    ensure!(seen == first && made(stage)? == vec![(0, "vir05_1c_8g".to_owned()); 4], "{seen:?} of {first:?}");
    stage.create(&[&pods[4]])?;
    stage.wait_unschedulable(&pods[4])?;
    let gone = cards_in(stage, &pods[1], "main")?;
    // Without a grace period the scheduler gives the room away before kubelet has released it: the driver waits for that.
    stage.delete(&[&pods[1]])?;
    stage.wait_running(&pods[4])?;
    let said = stage.events(&pods[4]);
    ensure!(!said.contains("FailedPrepareDynamicResources"), "the fifth was refused at first:\n{said}");
    ensure!(made(stage)?.len() == 4, "there are vNPUs {:?}", made(stage)?);
    for pod in [&pods[0], &pods[2], &pods[3], &pods[4]] {
        let own = cards_in(stage, pod, "main")?;
        ensure!(own.len() == 1 && nodes(stage)?.contains(&own[0]), "{} has {own:?}", name(pod));
        ensure!(own != gone || name(pod) == "e", "{} has the vNPU that was destroyed", name(pod));
    }
    clear(stage, &pods.iter().chain([&template]).collect::<Vec<_>>())
}

/// One claim with two requests: each container has that of the request which it names.
fn several_requests(stage: &Stage) -> anyhow::Result<()> {
    stage.with(&Driver::cutting())?;
    let template = claim_template("several", &[request("part").memory("8Gi"), request("whole")]);
    let mut pod = pod("several", &[&template]);
    let of = |request: &str| json!({"resources": {"claims": [{"name": "several", "request": request}]}});
    pod["spec"]["containers"] = json!([
        container("part", of("part")),
        container("whole", of("whole")),
        container("none", json!({})),
        container("both", json!({"resources": {"claims": [{"name": "several"}]}})),
    ]);
    stage.create(&[&template, &pod])?;
    stage.wait_running(&pod)?;
    let shares = Share::of(&stage.claim_of(&pod, "several")?).context("not allocated")?;
    let vnpus = stage.vnpus()?;
    let node = |request: &str| -> anyhow::Result<String> {
        let share = shares.iter().find(|share| share.request == request).context("a request has nothing")?;
        match vnpus.first() {
            Some(vnpu) if request == "part" => Ok(vnpu_node(vnpu.id)),
            _ => share.device.strip_prefix("npu-").map(|number| format!("davinci{number}")).context("an odd name"),
        }
    };
    ensure!(vnpus.len() == usize::from(stage.kubernetes().shares()), "there are vNPUs {vnpus:?}");
    let (part, whole) = (node("part")?, node("whole")?);
    let mut both = [part.clone(), whole.clone()];
    both.sort();
    ensure!(part != whole, "{shares:?}");
    for (container, wanted) in [("part", &[part][..]), ("whole", &[whole]), ("none", &[]), ("both", &both)] {
        let seen = cards_in(stage, &pod, container)?;
        ensure!(seen == wanted, "container {container} has {seen:?}, not {wanted:?}");
    }
    clear(stage, &[&pod, &template])
}

/// The first alternative that there is: a card that the node lacks, else a part (a whole card where sizes are dropped).
fn first_available(stage: &Stage) -> anyhow::Result<()> {
    stage.with(&Driver::cutting())?;
    let mut template = claim_template("first", &[]);
    let chip = "device.driver == 'npu.huawei.com' && device.attributes['npu.huawei.com'].chipName == '910B3'";
    template["spec"]["spec"]["devices"]["requests"] = json!([{"name": "npu", "firstAvailable": [
        {"name": "other", "deviceClassName": "npu.huawei.com", "selectors": [{"cel": {"expression": chip}}]},
        {"name": "ours", "deviceClassName": "npu.huawei.com", "capacity": {"requests": {"memCapacity": 10_000}}},
    ]}]);
    let mut pod = pod("first", &[&template]);
    // By the request's own name, whichever alternative it becomes.
    pod["spec"]["containers"][0]["resources"]["claims"] = json!([{"name": "first", "request": "npu"}]);
    stage.create(&[&template, &pod])?;
    stage.wait_running(&pod)?;
    let shares = Share::of(&stage.claim_of(&pod, "first")?).context("not allocated")?;
    let [share] = &shares[..] else { anyhow::bail!("the claim has {shares:?}") };
    ensure!(share.request == "npu/ours", "{share:?}");
    let seen = cards_in(stage, &pod, "main")?;
    if stage.kubernetes().shares() {
        ensure!(share.memory == "16Gi" && made(stage)? == [(0, "vir10_3c_16g".to_owned())], "{share:?}");
        ensure!(seen == [vnpu_node(stage.vnpus()?[0].id)], "{seen:?}");
    } else {
        ensure!(seen == ["davinci0"], "{seen:?}");
    }
    clear(stage, &[&pod, &template])
}

/// An init container and two others of one pod have the claim, one has not.
fn two_containers(stage: &Stage) -> anyhow::Result<()> {
    stage.with(&Driver::cutting())?;
    let template = claim_template("shared", &[request("npu").memory("10Gi")]);
    let mut pod = pod("shared", &[&template]);
    let claims = json!({"resources": {"claims": [{"name": "shared"}]}});
    let mut init = container("init", claims.clone());
    init["command"] = json!(["sh", "-c", "cd /dev; echo davinci[0-9]* >/dev/termination-log"]);
    pod["spec"]["initContainers"] = json!([init]);
    pod["spec"]["containers"] =
        json!([container("a", claims.clone()), container("b", claims), container("none", json!({}))]);
    stage.create(&[&template, &pod])?;
    let now = stage.wait_running(&pod)?;
    let vnpus = stage.vnpus()?;
    let wanted = if stage.kubernetes().shares() {
        ensure!(vnpus.len() == 1 && vnpus[0].template == "vir10_3c_16g", "there are vNPUs {vnpus:?}");
        vnpu_node(vnpus[0].id)
    } else {
        ensure!(vnpus.is_empty(), "there are vNPUs {vnpus:?}");
        "davinci0".to_owned()
    };
    let said = &now["status"]["initContainerStatuses"][0]["state"]["terminated"]["message"];
    ensure!(said.as_str().is_some_and(|text| text.trim() == wanted), "the init container saw {said}");
    let seen = ["a", "b", "none"].map(|container| cards_in(stage, &pod, container));
    let [a, b, none] = seen;
    ensure!(a? == [wanted.as_str()] && b? == [wanted.as_str()] && none?.is_empty(), "not all see {wanted}");
    ensure!(stage.records()?.len() == 1 && stage.cdi()?.len() == 1);
    clear(stage, &[&pod, &template])
}

/// Two pods have one claim: what it holds stays until the second leaves, and a third that comes then has it anew.
fn two_pods(stage: &Stage) -> anyhow::Result<()> {
    stage.with(&Driver::cutting())?;
    let claim = claim("common", &[request("npu").memory("8Gi")]);
    let [first, second, third] = ["first", "second", "third"].map(|name| pod(name, &[&claim]));
    stage.create(&[&claim, &first])?;
    if stage.kubernetes().minor < 35 {
        // This kubelet lists a claim's devices twice if two pods bring it at once. With ResourceHealthStatus on the
        // server refuses such a status, and the pods never run: the documentation warns of it.
        stage.wait_running(&first)?;
    }
    stage.create(&[&second])?;
    stage.wait_running(&first)?;
    stage.wait_running(&second)?;
    let node = cards_in(stage, &first, "main")?;
    let ids = |stage: &Stage| -> anyhow::Result<Vec<u32>> { Ok(stage.vnpus()?.iter().map(|vnpu| vnpu.id).collect()) };
    let held = ids(stage)?;
    ensure!(node.len() == 1 && cards_in(stage, &second, "main")? == node, "they do not see the same");
    ensure!(held.len() == usize::from(stage.kubernetes().shares()), "there are vNPUs {held:?}");
    let records = stage.records()?;
    ensure!(records.len() == 1 && stage.cdi()?.len() == 1);
    stage.delete(&[&first])?;
    // Kubelet's own list is the last to change: when the third pod runs, it has dealt with the first.
    stage.create(&[&third])?;
    stage.wait_running(&third)?;
    ensure!(cards_in(stage, &third, "main")? == node && cards_in(stage, &second, "main")? == node);
    ensure!(ids(stage)? == held && stage.cdi()?.len() == 1 && stage.records()?[0].0 == records[0].0);
    let left = [&second, &third].map(|pod| stage.get(pod));
    stage.delete(&[&second, &third])?;
    stage.wait_empty()?;
    // Kubelet's repeated release of a pod that has gone takes the claim from the next one, if that comes meanwhile.
    for pod in left {
        stage.wait_forgotten(&pod?)?;
    }
    // A claim keeps its identity from pod to pod.
    let again = pod("again", &[&claim]);
    stage.create(&[&again])?;
    stage.wait_running(&again)?;
    ensure!(cards_in(stage, &again, "main")?.len() == 1 && stage.records()?[0].0 == records[0].0);
    clear(stage, &[&again, &claim])
}

// --- looking on

const ADMIN: &str = "resource.kubernetes.io/admin-access";

/// Calls with a namespace in which claims may look at everything.
fn with_admins(stage: &Stage, call: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<()> {
    let label = |value: Value| {
        stage.api().merge("/api/v1/namespaces/default", &json!({"metadata": {"labels": {ADMIN: value}}})).map(drop)
    };
    label(json!("true"))?;
    let outcome = call();
    label(Value::Null)?;
    outcome
}

/// A monitor looks at all cards, those in use included: it has the managers' nodes and takes nothing from anybody.
fn admin_access(stage: &Stage) -> anyhow::Result<()> {
    stage.with(&Driver::whole())?;
    let look = || request("look").set("adminAccess", json!(true)).set("allocationMode", json!("All"));
    let (own, monitor) = (claim_template("own", &[request("npu")]), claim_template("monitor", &[look()]));
    let refused = stage.api().try_out(&monitor).err().context("any namespace may have admin access")?;
    ensure!(refused.to_string().contains(ADMIN), "{refused:#}");
    with_admins(stage, || {
        let (user, watcher) = (pod("user", &[&own]), pod("watcher", &[&monitor]));
        let later = pod("later", &[&own]);
        stage.create(&[&own, &monitor, &user])?;
        stage.wait_running(&user)?;
        stage.create(&[&watcher])?;
        stage.wait_running(&watcher)?;
        let seen = Share::of(&stage.claim_of(&watcher, "monitor")?).context("not allocated")?;
        ensure!(seen.len() == 8 && seen.iter().all(|share| share.admin), "{seen:?}");
        let nodes = stage.shell(&watcher, "cd /dev; ls -d davinci* devmm_svm hisi_hdc 2>/dev/null")?.text;
        ensure!(nodes == "davinci_manager\ndevmm_svm\nhisi_hdc", "the watcher has {nodes:?}");
        // Cards that are looked at are free.
        stage.create(&[&later])?;
        stage.wait_running(&later)?;
        stage.delete(&[&watcher])?;
        wait("the watcher's record to go", || Ok((stage.records()?.len() == 2).then_some(())))?;
        for pod in [&user, &later] {
            ensure!(cards_in(stage, pod, "main")?.len() == 1, "{} lost its card", name(pod));
        }
        clear(stage, &[&user, &later, &own, &monitor])
    })
}

/// Shared cards: the scheduler checks the room for a look, too. What the documentation says of it.
fn admin_and_shares(stage: &Stage) -> anyhow::Result<()> {
    stage.with(&Driver::cutting())?;
    let booking = Booking::begin(stage)?;
    booking.node("looked", &["npu-0", "npu-1"])?;
    let look = || request("look").set("adminAccess", json!(true));
    let everything = || look().set("allocationMode", json!("All"));
    with_admins(stage, || {
        let all = booking.ask("looked", "all", &[everything()])?;
        let got = booking.got(&all)?;
        ensure!(got.len() == 2 && got.iter().all(|share| share.admin), "{got:?}");
        let part = booking.ask("looked", "part", &[request("npu").memory("8Gi")])?;
        ensure!(booked(&booking.got(&part)?) == [("npu-0", "8Gi")]);
        // Not the card that is partly used.
        let one = booking.ask("looked", "one", &[look()])?;
        ensure!(booking.got_one(&one)?.device == "npu-1");
        let again = booking.ask("looked", "again", &[everything()])?;
        if stage.kubernetes().minor < 37 {
            let got = booking.got(&again)?;
            ensure!(got.len() == 1 && got[0].device == "npu-1" && got[0].admin, "{got:?}");
        } else {
            booking.refused(&again)?;
        }
        // A look takes nothing.
        let whole = booking.ask("looked", "whole", &[request("npu")])?;
        ensure!(booked(&booking.got(&whole)?) == [("npu-1", "32Gi")]);
        booking.end()
    })
}

// --- other cards and models

/// 910B2 in the consumable model: only sizes that memory alone makes exact.
fn exact_subset(stage: &Stage) -> anyhow::Result<()> {
    stage.with(&Driver::cutting().on(Profile::Ascend910B2).edit(|data| data.cards.truncate(2)))?;
    let devices = stage.devices()?;
    let card = devices.iter().find(|device| device["name"] == "npu-0").context("there is no npu-0")?;
    let valid = &card["capacity"]["memCapacity"]["requestPolicy"]["validValues"];
    ensure!(*valid == json!(["16Gi", "32Gi", "64Gi"]), "{card}");
    let sizes = [("small", "8Gi"), ("half", "20Gi"), ("quarter", "16Gi")];
    let templates = sizes.map(|(name, memory)| claim_template(name, &[request("npu").memory(memory)]));
    let pods = templates.each_ref().map(|template| pod(name(template), &[template]));
    stage.create(&templates.iter().chain(&pods).collect::<Vec<_>>())?;
    for (pod, wanted) in pods.iter().zip(["16Gi", "32Gi", "16Gi"]) {
        stage.wait_running(pod)?;
        let shares = Share::of(&stage.claim_of(pod, name(pod))?).context("not allocated")?;
        ensure!(booked(&shares) == [("npu-0", wanted)], "{} has {shares:?}", name(pod));
    }
    let wanted = ["vir06_1c_16g", "vir06_1c_16g", "vir12_3c_32g"].map(|template| (0, template.to_owned()));
    ensure!(made(stage)? == wanted, "there are vNPUs {:?}", made(stage)?);
    clear(stage, &pods.iter().chain(&templates).collect::<Vec<_>>())
}

/// Parts as devices of their own, tied by counters: exact for cores, AI CPUs and media engines as well.
fn partitionable(stage: &Stage) -> anyhow::Result<()> {
    let driver = Driver::cutting().edit(|data| data.cards.truncate(2)).with("slicing.model", "\"partitionable\"");
    stage.with(&driver)?;
    let part = |name: &str, class: &str| claim_template(name, &[request("npu").class(class)]);
    let templates = [
        part("quarter", "vir05-1c-8g.npu.huawei.com"),
        part("half", "vir10-3c-16g.npu.huawei.com"),
        part("whole", "npu.huawei.com"),
    ];
    let pods = templates.each_ref().map(|template| pod(name(template), &[template]));
    let last = pod("last", &[&templates[0]]);
    stage.create(&templates.iter().chain(&pods).chain([&last]).collect::<Vec<_>>())?;
    for pod in pods.iter().chain([&last]) {
        stage.wait_running(pod)?;
    }
    let wanted = ["vir05_1c_8g", "vir05_1c_8g", "vir10_3c_16g"].map(|template| (0, template.to_owned()));
    ensure!(made(stage)? == wanted, "there are vNPUs {:?}", made(stage)?);
    let whole = cards_in(stage, &pods[2], "main")?;
    ensure!(whole == ["davinci1"], "the whole card is {whole:?}");
    let half = Share::of(&stage.claim_of(&pods[1], "half")?).context("not allocated")?;
    ensure!(half.len() == 1 && half[0].device.starts_with("npu-0-vir10-3c-16g-"), "{half:?}");

    // What fits beside what, on nodes of one card.
    let booking = Booking::begin(stage)?;
    for node in ["cpus", "split", "whole"] {
        booking.node(node, &["npu-0"])?;
    }
    let of = |class: &str| [request("npu").class(class)];
    let (media, half) = ("vir10-4c-16g-m.npu.huawei.com", "vir10-3c-16g.npu.huawei.com");
    // 4 + 4 AI CPUs of 7, although memory and cores would do.
    let first = booking.ask("cpus", "first", &of(media))?;
    booking.got(&first)?;
    let second = booking.ask("cpus", "second", &of(media))?;
    booking.refused(&second)?;
    // Nor is a media engine left for a part that has a share of them.
    let third = booking.ask("cpus", "third", &of(half))?;
    booking.refused(&third)?;
    let other = booking.ask("cpus", "other", &of("vir10-3c-16g-nm.npu.huawei.com"))?;
    booking.got(&other)?;
    let split = booking.ask("split", "part", &of(half))?;
    booking.got(&split)?;
    let none = booking.ask("split", "whole", &of("npu.huawei.com"))?;
    booking.refused(&none)?;
    let whole = booking.ask("whole", "whole", &[request("npu").memory("8Gi")])?;
    let got = booking.got_one(&whole)?;
    ensure!(got.device == "npu-0", "the class of whole cards gave {got:?}");
    let none = booking.ask("whole", "part", &of(half))?;
    booking.refused(&none)?;
    booking.end()?;
    clear(stage, &pods.iter().chain([&last]).chain(&templates).collect::<Vec<_>>())
}

/// The administrator's layout, which needs no gate.
fn fixed_layout(stage: &Stage) -> anyhow::Result<()> {
    let layout = "\"npu-0=vir10_3c_16g+vir05_1c_8g\"";
    let driver = Driver::cutting().edit(|data| data.cards.truncate(2)).with("slicing.layout", layout);
    // Where nothing better can be had, it comes by itself.
    let better = stage.kubernetes().shares() || stage.kubernetes().partitions();
    stage.with(&if better { driver.with("slicing.model", "\"static\"") } else { driver })?;
    let devices = stage.devices()?;
    let names: Vec<_> = devices.iter().filter_map(|device| device["name"].as_str()).collect();
    ensure!(names == ["npu-0-vir05-1c-8g-0", "npu-0-vir10-3c-16g-0", "npu-1"], "{names:?}");
    let part = |name: &str, class: &str| claim_template(name, &[request("npu").class(class)]);
    let templates = [
        part("quarter", "vir05-1c-8g.npu.huawei.com"),
        part("half", "vir10-3c-16g.npu.huawei.com"),
        part("whole", "npu.huawei.com"),
    ];
    let pods = templates.each_ref().map(|template| pod(name(template), &[template]));
    let late = pod("late", &[&templates[0]]);
    stage.create(&templates.iter().chain(&pods).collect::<Vec<_>>())?;
    for pod in &pods {
        stage.wait_running(pod)?;
    }
    stage.create(&[&late])?;
    stage.wait_unschedulable(&late)?;
    let wanted = ["vir05_1c_8g", "vir10_3c_16g"].map(|template| (0, template.to_owned()));
    ensure!(made(stage)? == wanted, "there are vNPUs {:?}", made(stage)?);
    let whole = cards_in(stage, &pods[2], "main")?;
    ensure!(whole == ["davinci1"], "the whole card is {whole:?}");
    clear(stage, &pods.iter().chain([&late]).chain(&templates).collect::<Vec<_>>())
}

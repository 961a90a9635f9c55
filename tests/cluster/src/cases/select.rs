//! Choosing cards by what they are: CEL over the attributes, with another driver's devices on the same node, and
//! `matchAttribute`.

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};

use super::{
    Case,
    booking::{Booking, booked},
    scheduler::mixed,
};
use crate::stage::{Request, Stage, claim, request};

pub(crate) const CASES: &[Case] = &[
    ("select-by-attribute", by_attribute),
    ("select-beside-another-driver", beside_another_driver),
    ("select-matching", matching),
];

/// Our class, and one attribute of ours.
fn with(condition: &str) -> Request {
    request("npu").select(&format!("device.driver == 'npu.huawei.com' && {condition}"))
}

/// A slice of another driver, whose devices have none of our attributes.
fn publish_others(booking: &Booking<'_>, node: &str) -> anyhow::Result<()> {
    let gpu = |name: &str| json!({"name": name, "attributes": {"model": {"string": "other"}}});
    booking.publish(
        &format!("{node}-other"),
        json!({
            "driver": "other.example.com", "nodeName": node, "devices": [gpu("other-0"), gpu("other-1")],
            "pool": {"name": format!("{node}-other"), "generation": 1, "resourceSliceCount": 1},
        }),
    )
}

fn class(name: &str, expression: &str) -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": name},
        "spec": {"selectors": [{"cel": {"expression": expression}}]},
    })
}

/// Each attribute that the requirements name finds its cards, with strangers on the same node.
fn by_attribute(stage: &Stage) -> anyhow::Result<()> {
    stage.with(&mixed())?;
    let booking = Booking::begin(stage)?;
    booking.node("by", &["npu-0", "npu-1", "npu-2", "npu-3", "npu-4", "npu-5"])?;
    publish_others(&booking, "by")?;
    let ours = "device.attributes['npu.huawei.com']";
    let chosen = [
        ("chip", format!("{ours}.chipName == '910B3'"), Some("npu-2")),
        ("numa", format!("{ours}.numaNode == 4"), Some("npu-3")),
        ("numa-again", format!("{ours}.numaNode == 4"), None),
        ("id", format!("{ours}.physicalId == 1"), Some("npu-1")),
        ("group", format!("{ours}.topologyGroup == 'ring-0'"), Some("npu-0")),
        ("group-again", format!("{ours}.topologyGroup == 'ring-0'"), None),
        ("bus", "device.attributes['resource.kubernetes.io'].pciBusID == '0000:02:00.0'".to_owned(), Some("npu-5")),
        ("large", "device.capacity['npu.huawei.com'].memCapacity.isGreaterThan(quantity('32Gi'))".to_owned(), None),
        ("small", "device.capacity['npu.huawei.com'].memCapacity == quantity('24Gi')".to_owned(), Some("npu-4")),
    ];
    for (name, condition, wanted) in chosen {
        let asked = booking.ask("by", name, &[with(&condition)])?;
        match wanted {
            Some(device) => {
                let got = booking.got_one(&asked)?;
                ensure!(got.device == device, "{condition} got {got:?}");
            }
            None => drop(booking.refused(&asked)?),
        }
    }
    booking.end()
}

/// An expression that does not name the driver first is an error as soon as another driver's device is looked at, and
/// stops the pod; the shipped class and expressions that do name it work.
fn beside_another_driver(stage: &Stage) -> anyhow::Result<()> {
    stage.with(&mixed())?;
    let booking = Booking::begin(stage)?;
    let plain = "device.attributes['npu.huawei.com'].chipName == '910B3'";
    booking.create(&class("plain.example.com", plain))?;
    booking.create(&class("guarded.example.com", &format!("device.driver == 'npu.huawei.com' && {plain}")))?;
    booking.create(&class("other.example.com", "device.driver == 'other.example.com'"))?;
    // Names of pools decide the order: here the stranger is looked at first.
    booking.node("xx", &["npu-0", "npu-2", "npu-3"])?;
    publish_others(&booking, "xx")?;
    booking.node("alone", &["npu-0", "npu-2"])?;

    let both = [request("npu"), request("other").class("other.example.com")];
    let both = booking.ask("xx", "both", &both)?;
    let got = booking.got(&both)?;
    let devices: Vec<_> = got.iter().map(|share| (share.request.as_str(), share.device.as_str())).collect();
    ensure!(devices == [("npu", "npu-0"), ("other", "other-0")], "{got:?}");

    let guarded = booking.ask("xx", "guarded", &[request("npu").class("guarded.example.com")])?;
    ensure!(booking.got_one(&guarded)?.device == "npu-2");
    // The class has refused the stranger before the claim's own expression is read.
    let own = booking.ask("xx", "own", &[request("npu").select(plain)])?;
    ensure!(booking.got_one(&own)?.device == "npu-3");

    let alone = booking.ask("alone", "plain", &[request("npu").class("plain.example.com")])?;
    ensure!(booking.got_one(&alone)?.device == "npu-2");
    let stopped = booking.ask("xx", "plain", &[request("npu").class("plain.example.com")])?;
    let said = booking.stopped(&stopped)?;
    ensure!(said.contains("no such key"), "{said}");
    booking.end()
}

/// Several cards that have an attribute in common.
fn matching(stage: &Stage) -> anyhow::Result<()> {
    stage.with(&mixed())?;
    let booking = Booking::begin(stage)?;
    let match_by = |requests: &[Request], names: &[&str], name: &str| {
        let mut claim = claim(name, requests);
        let constraint = |name: &&str| json!({"matchAttribute": name});
        claim["spec"]["devices"]["constraints"] = json!(names.iter().map(constraint).collect::<Vec<_>>());
        claim
    };
    let (group, root) = ("npu.huawei.com/topologyGroup", "resource.kubernetes.io/pcieRoot");
    let cards = ["npu-0", "npu-1", "npu-2", "npu-3"];
    for node in ["links", "roots", "both"] {
        booking.node(node, &cards)?;
        publish_others(&booking, node)?;
    }
    // Card 0 is away: what goes with it by links is card 2, by PCIe card 1.
    for node in ["links", "roots"] {
        let first = booking.ask(node, "first", &[with("device.attributes['npu.huawei.com'].physicalId == 0")])?;
        booking.got(&first)?;
    }
    let pair = [request("npu").count(2)];
    let links = booking.ask_with(&["links"], match_by(&pair, &[group], "links-pair"))?;
    let roots = booking.ask_with(&["roots"], match_by(&pair, &[root], "roots-pair"))?;
    let both = booking.ask_with(&["both"], match_by(&pair, &[group, root], "both-pair"))?;
    let devices = |asked| -> anyhow::Result<Vec<String>> {
        let got = booking.got(asked)?;
        Ok(booked(&got).iter().map(|(device, _)| (*device).to_owned()).collect())
    };
    let (by_links, by_roots) = (devices(&links)?, devices(&roots)?);
    ensure!(by_links == ["npu-1", "npu-3"], "cards with links: {by_links:?}");
    ensure!(by_roots == ["npu-2", "npu-3"], "cards of one PCIe root: {by_roots:?}");
    booking.refused(&both)?;
    if stage.kubernetes().shares() {
        // A part and a whole card with links between them.
        let requests = [request("part").memory("8Gi"), request("whole")];
        let asked = booking.ask_with(&["both"], match_by(&requests, &[group], "both-sizes"))?;
        let got = booking.got(&asked)?;
        let of = |name: &str| got.iter().find(|share| share.request == name).context("a request has nothing");
        let (part, whole) = (of("part")?, of("whole")?);
        ensure!((part.device.as_str(), part.memory.as_str()) == ("npu-0", "8Gi"), "{got:?}");
        ensure!((whole.device.as_str(), whole.memory.as_str()) == ("npu-2", "64Gi"), "{got:?}");
    }
    booking.end()
}

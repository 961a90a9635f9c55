//! What the real scheduler makes of our slices: exact booking, refusals only for lack of room, and no panic. 1.34 checks
//! the capacity of the wrong device (kubernetes/kubernetes issue 133705), which the placeholders cure.

use anyhow::{Context as _, ensure};
use dcmi::world::Profile;
use serde_json::json;

use super::{
    Case,
    booking::{Booking, Share, booked},
};
use crate::{
    driver::Driver,
    plane::Plane,
    stage::{Request, Stage, claim, pod, request, wait},
};

pub(crate) const CASES: &[Case] = &[
    ("scheduler-full-card", full_card),
    ("scheduler-counts", counts),
    ("scheduler-whole-and-part", whole_and_part),
    ("scheduler-own-class", own_class),
    ("scheduler-two-nodes", two_nodes),
    ("scheduler-whole-cards", whole_cards),
    ("scheduler-without-placeholders", without_placeholders),
    ("scheduler-booked-not-prepared", booked_not_prepared),
    ("scheduler-mixed-sizes", mixed_sizes),
];

/// A full card does not hinder the next, whatever stands first.
fn full_card(stage: &Stage) -> anyhow::Result<()> {
    stage.with(&Driver::cutting())?;
    let booking = Booking::begin(stage)?;
    booking.node("full", &["npu-0", "npu-1"])?;
    let whole = booking.ask("full", "whole", &[request("npu")])?;
    ensure!(booked(&booking.got(&whole)?) == [("npu-0", "32Gi")]);
    let small = booking.ask("full", "small", &[request("npu").memory("8Gi")])?;
    let bare = booking.ask("full", "bare", &[request("npu").memory("10000Mi")])?;
    ensure!(booked(&booking.got(&small)?) == [("npu-1", "8Gi")]);
    ensure!(booked(&booking.got(&bare)?) == [("npu-1", "16Gi")]);
    let half = booking.ask("full", "half", &[request("npu").memory("16Gi")])?;
    booking.refused(&half)?;
    let last = booking.ask("full", "last", &[request("npu").memory("1Mi")])?;
    ensure!(booked(&booking.got(&last)?) == [("npu-1", "8Gi")]);
    booking.refused(&half)?;
    // The whole card leaves, and the half that waited gets it.
    booking.leave(&whole)?;
    ensure!(booked(&booking.got(&half)?) == [("npu-0", "16Gi")]);
    booking.end()
}

/// Requests for several devices: whole ones on cards of their own, shares wherever there is room. One request may get
/// the same card again and again on 1.34, later releases give each of its devices on another card.
fn counts(stage: &Stage) -> anyhow::Result<()> {
    stage.with(&Driver::cutting())?;
    let booking = Booking::begin(stage)?;
    let repeats = stage.kubernetes().minor < 35;
    let cards: Vec<_> = (0..8).map(|number| format!("npu-{number}")).collect();
    let cards: Vec<_> = cards.iter().map(String::as_str).collect();
    for (node, number) in [("pair", 3), ("three", 3), ("two", 2), ("nine", 3), ("too-many", 2), ("eight", 8)] {
        booking.node(node, &cards[..number])?;
    }
    let shares = |count| [request("npu").memory("8Gi").count(count)];
    let pair = booking.ask("pair", "two", &[request("npu").count(2)])?;
    let three = booking.ask("three", "three", &shares(3))?;
    let eight = booking.ask("eight", "eight", &shares(8))?;
    let narrow = booking.ask("two", "three", &shares(3))?;
    let nine = booking.ask("nine", "nine", &shares(9))?;
    let too_many = booking.ask("too-many", "nine", &shares(9))?;
    let whole = booking.ask("too-many", "whole", &[request("npu").count(3)])?;

    ensure!(booked(&booking.got(&pair)?) == [("npu-0", "32Gi"), ("npu-1", "32Gi")]);
    let halves = [request("a").memory("16Gi"), request("b").memory("16Gi")];
    let halves = booking.ask("pair", "halves", &halves)?;
    ensure!(booked(&booking.got(&halves)?) == [("npu-2", "16Gi"), ("npu-2", "16Gi")]);
    let beside = booking.ask("pair", "beside", &[request("npu").memory("8Gi")])?;
    booking.refused(&beside)?;

    for (asked, number, anywhere) in [(&three, 3, true), (&eight, 8, true), (&narrow, 3, repeats), (&nine, 9, repeats)]
    {
        if anywhere {
            let got = booking.got(asked)?;
            ensure!(got.len() == number && got.iter().all(|share| share.memory == "8Gi"), "{got:?}");
        } else {
            booking.refused(asked)?;
        }
    }
    booking.refused(&too_many)?;
    booking.refused(&whole)?;
    if !repeats {
        let got = booking.got(&eight)?;
        ensure!(booked(&got).iter().map(|(device, _)| *device).eq(cards), "{got:?}");
        let full = booking.ask("eight", "full", &[request("npu")])?;
        booking.refused(&full)?;
    }
    booking.end()
}

/// One claim with a whole card and a part.
fn whole_and_part(stage: &Stage) -> anyhow::Result<()> {
    stage.with(&Driver::cutting())?;
    let booking = Booking::begin(stage)?;
    booking.node("two", &["npu-0", "npu-1"])?;
    booking.node("one", &["npu-0"])?;
    let both = [request("whole"), request("part").memory("16Gi")];
    let two = booking.ask("two", "both", &both)?;
    let one = booking.ask("one", "both", &both)?;
    let got = booking.got(&two)?;
    let of = |name: &str| got.iter().find(|share| share.request == name).context("a request has nothing");
    let (whole, part) = (of("whole")?, of("part")?);
    ensure!(whole.memory == "32Gi" && part.memory == "16Gi" && whole.device != part.device, "{got:?}");
    booking.refused(&one)?;
    // The other way round, and beside it.
    let turned = [request("part").memory("16Gi"), request("more").memory("8Gi")];
    let turned = booking.ask("one", "turned", &turned)?;
    let beside = booking.ask("two", "beside", &[request("npu").memory("16Gi")])?;
    let got = booking.got(&turned)?;
    ensure!(booked(&got) == [("npu-0", "16Gi"), ("npu-0", "8Gi")], "{got:?}");
    ensure!(booking.got_one(&beside)?.memory == "16Gi");
    booking.end()
}

/// A class of the user's own that selects by nothing but the driver.
fn own_class(stage: &Stage) -> anyhow::Result<()> {
    stage.with(&Driver::cutting())?;
    let booking = Booking::begin(stage)?;
    booking.create(&json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": "any.example.com"},
        "spec": {"selectors": [{"cel": {"expression": "device.driver == 'npu.huawei.com'"}}]},
    }))?;
    booking.node("own", &["npu-0", "npu-1", "npu-2"])?;
    let any = || request("npu").class("any.example.com");
    let whole = booking.ask("own", "whole", &[any()])?;
    let got = booking.got_one(&whole)?;
    ensure!(got.device == "npu-0", "{got:?}");
    if stage.kubernetes().shares() {
        let part = booking.ask("own", "part", &[any().memory("10000Mi")])?;
        ensure!(booked(&booking.got(&part)?) == [("npu-1", "16Gi")]);
        let parts = ["a", "b", "c", "d", "e", "f"].map(|name| request(name).class("any.example.com").memory("8Gi"));
        let parts = booking.ask("own", "parts", &parts)?;
        ensure!(booking.got(&parts)?.len() == 6);
        // More than any card has, and less than a placeholder says.
        let huge = booking.ask("own", "huge", &[any().memory("64Gi")])?;
        booking.refused(&huge)?;
    } else {
        let two = booking.ask("own", "two", &[any().count(2)])?;
        ensure!(booked(&booking.got(&two)?) == [("npu-1", ""), ("npu-2", "")]);
    }
    let none = booking.ask("own", "none", &[any()])?;
    booking.refused(&none)?;
    let all = booking.ask("own", "all", &[any().set("allocationMode", json!("All"))])?;
    booking.refused(&all)?;
    booking.end()
}

/// Pods find the node that has room; a claim does not span nodes.
fn two_nodes(stage: &Stage) -> anyhow::Result<()> {
    stage.with(&Driver::cutting())?;
    let booking = Booking::begin(stage)?;
    booking.node("left", &["npu-0"])?;
    booking.node("right", &["npu-0"])?;
    let both = ["left", "right"];
    let ask = |name: &str, request| booking.ask_with(&both, claim(name, &[request]));
    let pair = ask("pair", request("npu").count(2))?;
    booking.refused(&pair)?;
    let (first, second) = (ask("first", request("npu"))?, ask("second", request("npu"))?);
    let pools = [booking.got_one(&first)?.pool, booking.got_one(&second)?.pool];
    ensure!(pools.contains(&"left/npu".to_owned()) && pools.contains(&"right/npu".to_owned()), "{pools:?}");
    let third = ask("third", request("npu"))?;
    booking.refused(&third)?;
    booking.leave(&second)?;
    ensure!(booking.got_one(&third)?.pool == pools[1]);
    if stage.kubernetes().shares() {
        booking.leave(&first)?;
        let parts = ["a", "b", "c", "d"].map(|name| ask(name, request("npu").memory("8Gi")));
        for part in parts {
            let got = booking.got_one(&part?)?;
            ensure!(got.pool == pools[0] && got.memory == "8Gi", "{got:?}");
        }
        booking.refused(&ask("e", request("npu").memory("8Gi"))?)?;
    }
    booking.end()
}

/// Cards that are not shared: by number, by least memory, and no more than there are.
fn whole_cards(stage: &Stage) -> anyhow::Result<()> {
    stage.with(&Driver::whole())?;
    let booking = Booking::begin(stage)?;
    booking.node("whole", &["npu-0", "npu-1", "npu-2"])?;
    let two = booking.ask("whole", "two", &[request("npu").count(2)])?;
    ensure!(booked(&booking.got(&two)?) == [("npu-0", ""), ("npu-1", "")]);
    // Whether the server keeps it or drops it: the memory of a card that is not shared is a minimum.
    let least = booking.ask("whole", "least", &[request("npu").memory("16Gi")])?;
    let got = booking.got(&least)?;
    ensure!(got.iter().map(|share| share.device.as_str()).eq(["npu-2"]), "{got:?}");
    let none = booking.ask("whole", "none", &[request("npu")])?;
    booking.refused(&none)?;
    booking.leave(&two)?;
    ensure!(booked(&booking.got(&none)?) == [("npu-0", "")]);
    let all = booking.ask("whole", "all", &[request("npu").set("allocationMode", json!("All"))])?;
    booking.refused(&all)?;
    booking.leave(&none)?;
    booking.leave(&least)?;
    ensure!(booking.got(&all)?.len() == 3);
    booking.end()
}

/// Without the placeholders 1.34 lets a full first card block the second: they are there for a reason, and what the
/// other cases see is their work.
fn without_placeholders(stage: &Stage) -> anyhow::Result<()> {
    stage.with(&Driver::cutting())?;
    let booking = Booking::begin(stage)?;
    let cards = ["npu-0", "npu-1"];
    booking.node_with("bare", |device| cards.iter().any(|card| device["name"] == *card))?;
    let whole = booking.ask("bare", "whole", &[request("npu")])?;
    ensure!(booked(&booking.got(&whole)?) == [("npu-0", "32Gi")]);
    let small = booking.ask("bare", "small", &[request("npu").memory("8Gi")])?;
    booking.refused(&small)?;
    booking.end()
}

/// Kubelet stands still until this is dropped.
#[derive(Debug)]
struct Frozen<'a>(&'a Plane);

impl<'a> Frozen<'a> {
    fn kubelet(plane: &'a Plane) -> anyhow::Result<Self> {
        plane.run(&["systemctl", "kill", "--kill-whom=main", "--signal=STOP", "kubelet"])?;
        Ok(Self(plane))
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        let _ = self.0.run(&["systemctl", "kill", "--kill-whom=main", "--signal=CONT", "kubelet"]);
    }
}

/// What is booked counts before the driver prepares it, and is what the driver then makes.
fn booked_not_prepared(stage: &Stage) -> anyhow::Result<()> {
    stage.with(&Driver::cutting())?;
    let on_card_1 = "device.driver == 'npu.huawei.com' && device.attributes['npu.huawei.com'].physicalId == 1";
    let create = |name: &str, request: Request| {
        let claim = claim(name, &[request]);
        let pod = pod(name, &[&claim]);
        stage.create(&[&claim, &pod]).map(|()| (claim, pod))
    };
    let part = |memory: &str| request("npu").memory(memory).select(on_card_1);
    let first = create("whole", request("npu"))?;
    stage.wait_running(&first.1)?;
    let before = stage.slices()?;
    let frozen = Frozen::kubelet(stage.plane())?;
    let parts = [create("a", part("8Gi"))?, create("b", part("10000Mi"))?, create("c", part("8Gi"))?];
    let booked = ["8Gi", "16Gi", "8Gi"];
    for ((claim, _), memory) in parts.iter().zip(booked) {
        let shares = wait("a claim to be allocated", || Ok(Share::of(&stage.get(claim)?)))?;
        let got: Vec<_> = shares.iter().map(|share| (share.device.as_str(), share.memory.as_str())).collect();
        ensure!(got == [("npu-1", memory)], "{got:?}");
    }
    let late = create("late", part("8Gi"))?;
    stage.wait_unschedulable(&late.1)?;
    ensure!(stage.vnpus()?.is_empty() && stage.records()?.len() == 1, "kubelet was not frozen");
    ensure!(stage.slices()? == before, "the slices changed although no card did");
    drop(frozen);
    for (_, pod) in &parts {
        stage.wait_running(pod)?;
    }
    let mut made: Vec<_> = stage.vnpus()?.iter().map(|vnpu| (vnpu.phy, vnpu.template.clone())).collect();
    made.sort();
    let wanted = ["vir05_1c_8g", "vir05_1c_8g", "vir10_3c_16g"].map(|template| (1, template.to_owned()));
    ensure!(made == wanted, "there are vNPUs {made:?}");
    let all: Vec<_> = parts.iter().chain([&first, &late]).collect();
    let pods = all.iter().map(|(_, pod)| pod);
    stage.delete(&pods.chain(all.iter().map(|(claim, _)| claim)).collect::<Vec<_>>())?;
    stage.wait_empty()
}

/// Two 910B4, two 910B3 and two 310P3: 32, 64 and 24 GB. Groups of links and those of the bus cross each other.
pub(crate) fn mixed() -> Driver {
    Driver::cutting().on(Profile::Mixed).edit(|cards| {
        if let Some(topology) = &mut cards.topology {
            topology.rings = vec![vec![0, 2], vec![1, 3]];
        }
    })
}

/// Cards of 64 and 32 GB, and some that cannot be cut, in one pool.
fn mixed_sizes(stage: &Stage) -> anyhow::Result<()> {
    stage.with(&mixed())?;
    let booking = Booking::begin(stage)?;
    for (node, cards) in [("mixed", ["npu-0", "npu-2"]), ("large", ["npu-0", "npu-2"]), ("pair", ["npu-1", "npu-3"])] {
        booking.node(node, &cards)?;
    }
    booking.node("uncut", &["npu-4"])?;
    let part = |memory: &str| request("npu").memory(memory);

    let whole = booking.ask("mixed", "whole", &[request("npu")])?;
    let small = booking.ask("mixed", "small", &[part("8Gi")])?;
    let half = booking.ask("mixed", "half", &[part("32Gi")])?;
    let all = booking.ask("large", "all", &[part("64Gi")])?;
    let pair = booking.ask("pair", "pair", &[request("npu").count(2)])?;
    let uncut = booking.ask("uncut", "least", &[part("16Gi")])?;
    ensure!(booked(&booking.got(&whole)?) == [("npu-0", "32Gi")]);
    ensure!(booked(&booking.got(&small)?) == [("npu-2", "16Gi")]);
    ensure!(booked(&booking.got(&half)?) == [("npu-2", "32Gi")]);
    ensure!(booked(&booking.got(&all)?) == [("npu-2", "64Gi")]);
    ensure!(booked(&booking.got(&pair)?) == [("npu-1", "32Gi"), ("npu-3", "64Gi")]);
    // A card that cannot be cut is not shared: memory is a minimum there.
    ensure!(booked(&booking.got(&uncut)?) == [("npu-4", "")]);

    let large = booking.ask("mixed", "large", &[part("64Gi")])?;
    let beside = booking.ask("uncut", "beside", &[part("8Gi")])?;
    booking.refused(&large)?;
    booking.refused(&beside)?;
    let rest = booking.ask("mixed", "rest", &[part("9Gi")])?;
    ensure!(booked(&booking.got(&rest)?) == [("npu-2", "16Gi")]);
    let none = booking.ask("mixed", "none", &[part("8Gi")])?;
    booking.refused(&none)?;
    let halves = [request("a").memory("16Gi"), request("b").memory("16Gi")];
    let halves = booking.ask("large", "halves", &halves)?;
    ensure!(booked(&booking.got(&halves)?) == [("npu-0", "16Gi"), ("npu-0", "16Gi")]);
    booking.end()
}

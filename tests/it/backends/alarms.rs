//! What the hardware says unasked, and what only a look at the host tells.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use dcmi::world::{Action, Assertion, ChipState, Ecc, Environment, Fault as Planted, Notice, Profile};
use futures::{StreamExt as _, stream::BoxStream};
use npu_dra::{
    device::Settings,
    domain::health::{Alarm, EccCounts, FaultEvent, HealthReading, Level, Link, Turn},
};

use super::{
    fixture::{Dcmi, Fixture},
    scanned, scanned_until,
};

const SUBSCRIBE: &str = "dcmi_subscribe_fault_event";
const CODE: u32 = 0x80E0_1801;

async fn next(alarms: &mut BoxStream<'static, Alarm>) -> Alarm {
    let alarm = tokio::time::timeout(Duration::from_secs(30), alarms.next()).await;
    alarm.expect("no alarm came").expect("a stream of alarms does not end")
}

fn event(physical_id: u32, code: u32, turn: Turn) -> Alarm {
    Alarm::Event { physical_id, event: FaultEvent { code, level: Level::Major, turn } }
}

pub(super) async fn a_fault_event_says_what_happened_to_which_chip<F: Fixture>(node: &F) {
    let mut alarms = node.backend().alarms();
    scanned(node.backend()).await;
    node.fault_event(3, CODE, true);
    assert_eq!(next(&mut alarms).await, event(3, CODE, Turn::Occurred));
    assert_eq!(node.backend().health().await.unwrap()[&3].codes, [CODE]);
    node.fault_event(3, CODE, false);
    assert_eq!(next(&mut alarms).await, event(3, CODE, Turn::Recovered));
    assert!(node.backend().health().await.unwrap()[&3].codes.is_empty());
}

pub(super) async fn many_faults_at_once_are_all_heard_of<F: Fixture>(node: &F) {
    let mut alarms = node.backend().alarms();
    scanned(node.backend()).await;
    let mut wanted = BTreeSet::new();
    for number in 0..64 {
        node.fault_event(number % 8, 0x1000 + number, true);
        wanted.insert((number % 8, 0x1000 + number));
    }
    while !wanted.is_empty() {
        let Alarm::Event { physical_id, event } = next(&mut alarms).await else { panic!("nothing was lost") };
        assert!(wanted.remove(&(physical_id, event.code)), "{physical_id}: {event:?}");
    }
}

pub(super) async fn a_reader_that_comes_later_hears_only_what_comes_then<F: Fixture>(node: &F) {
    let mut first = node.backend().alarms();
    scanned(node.backend()).await;
    node.fault_event(1, CODE, true);
    assert_eq!(next(&mut first).await, event(1, CODE, Turn::Occurred));
    let mut second = node.backend().alarms();
    node.fault_event(2, CODE, true);
    for alarms in [&mut first, &mut second] {
        assert_eq!(next(alarms).await, event(2, CODE, Turn::Occurred));
    }
}

pub(super) async fn a_chip_without_its_device_node_is_gone_and_back_with_it<F: Fixture>(node: &F) {
    for (id, _) in node.chips() {
        node.set_device_node(id, true);
    }
    let gone = async || {
        let health = node.backend().health().await.unwrap();
        health.into_iter().filter(|(_, reading)| reading.level == Level::Gone).map(|(id, _)| id).collect::<Vec<_>>()
    };
    scanned(node.backend()).await;
    assert_eq!(gone().await, [0; 0]);
    node.set_device_node(2, false);
    assert_eq!(gone().await, [2]);
    let scan = scanned(node.backend()).await;
    let chip = scan.chips.iter().find(|chip| chip.physical_id == 2).unwrap();
    assert_eq!(chip.health.level, Level::Gone, "a scan sees it too");
    assert_eq!(gone().await, [2], "and it stays so after a scan");
    node.set_device_node(2, true);
    assert_eq!(gone().await, [0; 0]);
}

async fn reading(node: &Dcmi, physical_id: u32) -> HealthReading {
    node.backend().health().await.unwrap()[&physical_id].clone()
}

fn notice(phy: u32, code: u32) -> Notice {
    Notice { phy, code, severity: 2, assertion: Assertion::Occurred }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_come_while_a_call_is_in_progress() {
    let node = Dcmi::of(Profile::Ascend910B4);
    let mut alarms = node.backend().alarms();
    scanned(node.backend()).await;
    node.world.faults().set([Planted::new("dcmi_get_device_health", Action::Hang).card(0).times(1)]).unwrap();
    node.world.clear_calls().unwrap();
    let told = async {
        while node.world.calls().unwrap().is_empty() {
            tokio::time::sleep(Duration::from_millis(1)).await; // waits: for the call to hang
        }
        node.world.occur(6, CODE, 2).unwrap();
        next(&mut alarms).await
    };
    tokio::select! {
        alarm = told => assert_eq!(alarm, event(6, CODE, Turn::Occurred)),
        health = node.backend().health() => panic!("the call did not hang: {health:?}"),
    }
}

#[tokio::test]
async fn events_name_chips_by_logic_ids_which_are_not_physical_ones() {
    let node = Dcmi::of(Profile::Ascend910B4);
    node.world.reorder_cards(&[7, 6, 5, 4, 3, 2, 1, 0]).unwrap();
    let mut alarms = node.backend().alarms();
    let scan = scanned(node.backend()).await;
    assert_eq!(scan.chips.iter().find(|chip| chip.physical_id == 6).unwrap().logic_id, Some(1));
    node.world.occur(6, CODE, 2).unwrap();
    assert_eq!(next(&mut alarms).await, event(6, CODE, Turn::Occurred));
    node.world.send_stray_event(77, notice(0, CODE)).unwrap();
    assert_eq!(next(&mut alarms).await, Alarm::Unsure, "a chip that nobody knows");
    let once = Notice { assertion: Assertion::OneShot, severity: 3, ..notice(5, 0x40F8_4E00) };
    node.world.send_event(once).unwrap();
    let told = FaultEvent { code: 0x40F8_4E00, level: Level::Critical, turn: Turn::Once };
    assert_eq!(next(&mut alarms).await, Alarm::Event { physical_id: 5, event: told });
}

#[tokio::test]
async fn each_start_of_the_library_subscribes_once_and_its_successor_again() {
    let node = Dcmi::of(Profile::Ascend910B4);
    let mut alarms = node.backend().alarms();
    scanned(node.backend()).await;
    scanned(node.backend()).await;
    node.backend().health().await.unwrap();
    assert_eq!(node.world.calls().unwrap().count(SUBSCRIBE), 1);
    node.world.faults().set([Planted::new("dcmi_get_device_health", Action::Crash).times(1)]).unwrap();
    assert!(node.backend().health().await.is_err());
    scanned(node.backend()).await;
    let calls = node.world.calls().unwrap();
    let pids: BTreeSet<_> = calls.of(SUBSCRIBE).map(|call| (call.pid, call.code)).collect();
    assert_eq!((calls.count(SUBSCRIBE), pids.len()), (2, 2), "{pids:?}");
    node.world.occur(0, CODE, 2).unwrap();
    assert_eq!(next(&mut alarms).await, event(0, CODE, Turn::Occurred));
}

#[tokio::test]
async fn a_library_without_events_is_polled() {
    let node = Dcmi::of(Profile::Ascend910B4);
    let library = node.dir.path().join("libdcmi.so");
    let symbols = [SUBSCRIBE, "dcmi_get_device_ecc_info", "dcmi_get_device_network_health"];
    dcmi::testing::strip_symbols(&dcmi::library_path(), &library, &symbols).unwrap();
    let settings = Settings { library: Some(library), ..node.settings.clone() };
    let node = node.behind(settings);
    scanned(node.backend()).await;
    node.world.occur(3, CODE, 2).unwrap();
    let read = reading(&node, 3).await;
    assert_eq!((read.codes, read.ecc, read.link), (vec![CODE], None, None));
    assert_eq!(node.backend().status().detail, "", "that is no fault of the node");
}

#[tokio::test]
async fn a_subscription_that_is_refused_is_tried_again_and_one_that_is_not_to_be_had_is_not() {
    let node = Dcmi::of(Profile::Ascend910B4);
    node.world.faults().set([Planted::new(SUBSCRIBE, Action::Return(-8020)).times(2)]).unwrap();
    let mut alarms = node.backend().alarms();
    scanned(node.backend()).await;
    for _ in 0..5 {
        node.backend().health().await.unwrap();
    }
    assert_eq!(node.world.calls().unwrap().count(SUBSCRIBE), 3);
    node.world.occur(0, CODE, 2).unwrap();
    assert_eq!(next(&mut alarms).await, event(0, CODE, Turn::Occurred));
    for (profile, environment) in
        [(Profile::Ascend310P3, Environment::Host), (Profile::Ascend910B4, Environment::PodUser)]
    {
        let node = Dcmi::of(profile);
        node.world.edit(|data| data.environment = environment).unwrap();
        scanned(node.backend()).await;
        for _ in 0..3 {
            node.backend().health().await.unwrap();
        }
        assert_eq!(node.world.calls().unwrap().count(SUBSCRIBE), 1, "{profile:?}");
    }
}

#[tokio::test]
async fn a_subscription_that_hangs_or_crashes_costs_one_start_and_is_left_out_then() {
    for action in [Action::Hang, Action::Crash] {
        let node = Dcmi::with(Profile::Ascend910B4, |settings| settings.timing.read = Duration::from_secs(1));
        node.world.faults().set([Planted::new(SUBSCRIBE, action)]).unwrap();
        let fault = node.backend().scan().await.unwrap_err();
        assert!(fault.to_string().contains(SUBSCRIBE), "{fault}");
        assert_eq!(scanned(node.backend()).await.chips.len(), 8);
        node.backend().health().await.unwrap();
        assert_eq!(node.world.calls().unwrap().count(SUBSCRIBE), 1);
        assert_eq!(node.backend().status().state, "ready");
    }
}

#[tokio::test]
async fn a_link_whose_test_hangs_costs_one_start_and_is_left_out_then() {
    let node = Dcmi::with(Profile::Ascend910B4, |settings| settings.timing.read = Duration::from_secs(1));
    scanned(node.backend()).await;
    node.world.faults().set([Planted::new("dcmi_get_device_network_health", Action::Hang).card(2)]).unwrap();
    let fault = node.backend().health().await.unwrap_err();
    assert!(fault.to_string().contains("dcmi_get_device_network_health(2, 0)"), "{fault}");
    for _ in 0..3 {
        let health = node.backend().health().await.unwrap();
        for (id, reading) in health {
            assert_eq!(reading.level, Level::Ok);
            assert_eq!(reading.link, (id != 2).then_some(Link::Up), "{id}");
        }
    }
}

#[tokio::test]
async fn a_poll_tells_temperature_power_ecc_and_link() {
    let node = Dcmi::of(Profile::Ascend910B4);
    scanned(node.backend()).await;
    let ecc = Ecc { single: 7, double: 2, isolated_single: 1, isolated_double: 3, ..Ecc::default() };
    node.world.set_ecc(1, ecc).unwrap();
    node.world.edit_chip(1, |chip| (chip.temperature, chip.power, chip.network) = (95, 3100, 3)).unwrap();
    let read = reading(&node, 1).await;
    assert_eq!((read.temperature, read.power, read.link), (Some(95), Some(3100), Some(Link::Down)));
    assert_eq!(read.ecc, Some(EccCounts { corrected: 7, uncorrected: 2, isolated_pages: 4 }));
    assert_eq!(read.level, Level::Ok, "none of them is a fault by itself");
    for (network, link) in
        [(0, Some(Link::Up)), (6, None), (8, None), (255, None), (7, Some(Link::Down)), (0xA5A5_A5A5, None)]
    {
        node.world.edit_chip(1, |chip| chip.network = network).unwrap();
        assert_eq!(reading(&node, 1).await.link, link, "{network}");
    }
    let node = Dcmi::of(Profile::Ascend310P3);
    scanned(node.backend()).await;
    let id = *node.backend().health().await.unwrap().keys().next().unwrap();
    let read = reading(&node, id).await;
    assert_eq!(read.link, None, "a 310P has no port");
    assert_eq!(read.ecc, Some(EccCounts::default()));
    let asked = node.world.calls().unwrap().count("dcmi_get_device_network_health");
    assert_eq!(asked, 2, "each chip is asked once what it does not have");
}

#[tokio::test]
async fn more_fault_codes_than_the_vendor_foresees_are_read_and_still_more_are_partial() {
    let node = Dcmi::of(Profile::Ascend910B4);
    scanned(node.backend()).await;
    let codes: Vec<u32> = (0..200).map(|number| 0x8000_0000 + number).collect();
    node.world.set_fault_codes(0, &codes).unwrap();
    let read = reading(&node, 0).await;
    assert_eq!((read.codes, read.partial), (codes.clone(), false));
    node.world.set_fault_codes(0, &(0..2000).collect::<Vec<_>>()).unwrap();
    let read = reading(&node, 0).await;
    assert_eq!((read.codes, read.partial), (codes, true), "what was known of it stays");
}

#[tokio::test]
async fn a_chip_in_reset_is_gone_and_back_without_a_fault_of_the_others() {
    let node = Dcmi::with(Profile::Ascend910B4, |settings| settings.wait = Some(Duration::ZERO));
    scanned(node.backend()).await;
    node.world.set_state(4, ChipState::Resetting).unwrap();
    let health = node.backend().health().await.unwrap();
    assert!(health.iter().all(|(id, reading)| (reading.level == Level::Gone) == (*id == 4)), "{health:?}");
    let scan = scanned(node.backend()).await;
    assert_eq!(scan.missing.len(), 1, "{:?}", scan.missing);
    assert_eq!(scan.missing[0].what, node.bus(4));
    node.world.set_state(4, ChipState::Up).unwrap();
    scanned_until(node.backend(), |scan| scan.chips.len() == 8).await;
    assert_eq!(reading(&node, 4).await.level, Level::Ok);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_storm_of_events_is_heard_of_and_calls_are_answered_meanwhile() {
    let node = Dcmi::of(Profile::Ascend910B4);
    let mut alarms = node.backend().alarms();
    scanned(node.backend()).await;
    for round in 0..20 {
        let events: Vec<_> = (0..500).map(|number| notice(number % 8, round * 1000 + number)).collect();
        node.world.send_events(&events).unwrap();
        assert_eq!(node.backend().health().await.unwrap().len(), 8);
    }
    node.world.send_event(notice(3, CODE)).unwrap();
    let end = Instant::now() + Duration::from_secs(30);
    loop {
        assert!(Instant::now() < end, "the last event was not heard of");
        match next(&mut alarms).await {
            last if last == event(3, CODE, Turn::Occurred) => break,
            Alarm::Event { .. } => {}
            // It may have been among those that found no room.
            Alarm::Unsure => node.world.send_event(notice(3, CODE)).unwrap(),
            Alarm::Lost { .. } => panic!("nothing was lost"),
        }
    }
}

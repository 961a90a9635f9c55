//! One suite of tests for every backend, and what only the vendor library's backend must stand.

mod alarms;
mod faults;
mod fixture;
mod library;
mod slicing;
mod suspended;
mod tree;
mod twins;
mod vnpus;

use std::time::{Duration, Instant};

use fixture::{Dcmi, Fixture, Memory, Sysfs};
use npu_dra::{
    device::{Backend, Fault},
    domain::{
        health::Level,
        npu::{Family, Scan},
    },
};

use alarms::{
    a_chip_without_its_device_node_is_gone_and_back_with_it, a_fault_event_says_what_happened_to_which_chip,
    a_reader_that_comes_later_hears_only_what_comes_then, many_faults_at_once_are_all_heard_of,
};
use suspended::{
    a_suspended_backend_answers_nothing_until_it_is_resumed, suspending_twice_and_resuming_twice_harms_nothing,
};
use vnpus::{
    a_backend_that_only_reads_says_so, a_chip_with_a_process_is_busy_and_shows_it,
    a_library_that_chooses_ids_says_which, a_lost_chip_has_no_reading,
    a_node_that_cuts_for_machines_says_so_and_makes_nothing, a_template_that_the_chip_lacks_makes_nothing,
    a_vnpu_has_the_id_that_was_asked_and_the_size_of_its_template, a_vnpu_in_use_is_busy,
    a_vnpu_that_was_made_again_has_another_id, an_error_after_a_create_leaves_a_vnpu_to_be_read,
    an_id_is_used_once_and_is_the_chips_own, an_uncut_card_has_no_vnpus_all_of_itself_left_and_no_process,
    destroying_removes_exactly_one_and_is_success_when_it_is_gone, four_quarters_or_two_halves_fit_and_no_more,
    the_replay_brings_back_what_it_lists_and_can_be_switched_off, what_others_make_and_destroy_is_read,
};

/// One cell of the table: a test is generated, or is not applicable.
macro_rules! cell {
    (runs $name:ident $fixture:ty) => {
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $name() {
            super::$name(&<$fixture as $crate::backends::fixture::Fixture>::new()).await;
        }
    };
    (na $name:ident $fixture:ty) => {};
}

macro_rules! count {
    (runs) => {
        1
    };
    (na) => {
        0
    };
}

/// The table: per test what memory, sysfs and dcmi do with it.
macro_rules! suite {
    ($($memory:ident $sysfs:ident $dcmi:ident $name:ident,)*) => {
        mod memory { $(cell!($memory $name crate::backends::Memory);)* }
        mod sysfs { $(cell!($sysfs $name crate::backends::Sysfs);)* }
        mod dcmi { $(cell!($dcmi $name crate::backends::Dcmi);)* }

        #[test]
        fn the_suite_has_as_many_tests_per_backend_as_are_counted_here() {
            let all = [$(stringify!($name)),*].len();
            let memory: usize = [$(count!($memory)),*].iter().sum();
            let sysfs: usize = [$(count!($sysfs)),*].iter().sum();
            let dcmi: usize = [$(count!($dcmi)),*].iter().sum();
            assert_eq!((all, memory, sysfs, dcmi), (39, 37, 18, 38));
        }
    };
}

suite! {
    // memory sysfs dcmi
    runs runs runs a_scan_finds_every_chip_with_its_own_number_and_address,
    runs runs runs a_scan_tells_family_and_numa_node,
    runs na   runs a_scan_tells_chip_name_memory_and_cores,
    runs na   runs a_scan_tells_which_chips_are_linked,
    runs runs runs two_scans_of_an_unchanged_node_are_equal,
    runs runs runs health_has_exactly_the_chips_of_the_last_scan,
    runs runs runs health_before_the_first_scan_is_never_empty,
    runs na   runs an_alarm_is_read_with_its_codes,
    runs runs runs a_chip_that_falls_off_the_bus_is_gone_and_the_others_are_not,
    runs runs runs a_lost_chip_is_not_in_the_next_scan,
    runs runs runs a_chip_that_comes_back_is_the_same_card,
    runs runs runs a_broken_backend_gives_a_fault_and_no_empty_scan,
    runs runs runs a_backend_that_works_again_scans_again,
    runs runs runs the_status_follows_what_happens,
    runs runs runs calls_at_the_same_time_are_all_answered,
    runs runs runs a_caller_that_goes_away_harms_nobody,
    runs runs runs the_name_and_the_status_agree,
    runs na   runs an_uncut_card_has_no_vnpus_all_of_itself_left_and_no_process,
    runs na   runs a_vnpu_has_the_id_that_was_asked_and_the_size_of_its_template,
    runs na   runs four_quarters_or_two_halves_fit_and_no_more,
    runs na   runs an_id_is_used_once_and_is_the_chips_own,
    runs na   runs a_library_that_chooses_ids_says_which,
    runs na   runs a_template_that_the_chip_lacks_makes_nothing,
    runs na   runs a_chip_with_a_process_is_busy_and_shows_it,
    runs na   runs destroying_removes_exactly_one_and_is_success_when_it_is_gone,
    runs na   runs a_vnpu_in_use_is_busy,
    runs na   runs what_others_make_and_destroy_is_read,
    runs na   runs an_error_after_a_create_leaves_a_vnpu_to_be_read,
    runs na   runs a_vnpu_that_was_made_again_has_another_id,
    runs na   runs a_node_that_cuts_for_machines_says_so_and_makes_nothing,
    runs na   runs the_replay_brings_back_what_it_lists_and_can_be_switched_off,
    runs na   runs a_lost_chip_has_no_reading,
    na   runs na   a_backend_that_only_reads_says_so,
    runs na   runs a_fault_event_says_what_happened_to_which_chip,
    runs na   runs many_faults_at_once_are_all_heard_of,
    runs na   runs a_reader_that_comes_later_hears_only_what_comes_then,
    na   runs runs a_chip_without_its_device_node_is_gone_and_back_with_it,
    runs runs runs a_suspended_backend_answers_nothing_until_it_is_resumed,
    runs runs runs suspending_twice_and_resuming_twice_harms_nothing,
}

/// Scans until it works; a backend may need some time to come up.
pub(crate) async fn scanned(backend: &dyn Backend) -> Scan {
    let end = Instant::now() + Duration::from_secs(30);
    loop {
        match backend.scan().await {
            Ok(scan) => return scan,
            Err(fault) => assert!(Instant::now() < end, "no scan: {fault}"),
        }
        tokio::time::sleep(Duration::from_millis(5)).await; // waits: for the backend to come up
    }
}

/// Scans until a scan is as wanted.
pub(crate) async fn scanned_until(backend: &dyn Backend, wanted: impl Fn(&Scan) -> bool) -> Scan {
    let end = Instant::now() + Duration::from_secs(30);
    loop {
        let scan = scanned(backend).await;
        if wanted(&scan) {
            return scan;
        }
        assert!(Instant::now() < end, "no such scan: {scan:?}");
        tokio::time::sleep(Duration::from_millis(5)).await; // waits: for the node to change
    }
}

async fn a_scan_finds_every_chip_with_its_own_number_and_address<F: Fixture>(node: &F) {
    let mut scan = scanned(node.backend()).await;
    scan.chips.sort_by_key(|chip| chip.physical_id);
    let found: Vec<_> = scan.chips.iter().map(|chip| (chip.physical_id, chip.bus_id.to_string())).collect();
    assert_eq!(found, node.chips());
    assert!(scan.missing.is_empty(), "{:?}", scan.missing);
}

async fn a_scan_tells_family_and_numa_node<F: Fixture>(node: &F) {
    let scan = scanned(node.backend()).await;
    for chip in scan.chips {
        assert_eq!(chip.family, Family::Ascend910B);
        assert_eq!(chip.numa_node, Some(fixture::numa(chip.physical_id)));
    }
}

async fn a_scan_tells_chip_name_memory_and_cores<F: Fixture>(node: &F) {
    let scan = scanned(node.backend()).await;
    for chip in scan.chips {
        assert_eq!((chip.chip_name.as_str(), chip.memory, chip.ai_cores), ("910B4", Some(32 << 30), Some(20)));
        assert!(chip.vdie.is_some());
    }
}

async fn a_scan_tells_which_chips_are_linked<F: Fixture>(node: &F) {
    let scan = scanned(node.backend()).await;
    assert_eq!(scan.links.len(), 28, "all pairs of eight");
}

async fn two_scans_of_an_unchanged_node_are_equal<F: Fixture>(node: &F) {
    let first = scanned(node.backend()).await;
    assert_eq!(scanned(node.backend()).await, first);
}

async fn health_has_exactly_the_chips_of_the_last_scan<F: Fixture>(node: &F) {
    scanned(node.backend()).await;
    let health = node.backend().health().await.unwrap();
    let ids: Vec<_> = node.chips().into_iter().map(|(id, _)| id).collect();
    assert_eq!(health.keys().copied().collect::<Vec<_>>(), ids);
    assert!(health.values().all(|reading| reading.level.is_usable()), "{health:?}");
}

async fn health_before_the_first_scan_is_never_empty<F: Fixture>(node: &F) {
    match node.backend().health().await {
        Ok(health) => assert_eq!(health.len(), node.chips().len()),
        Err(fault) => assert!(matches!(fault, Fault::NotReady { .. }), "{fault}"),
    }
}

async fn an_alarm_is_read_with_its_codes<F: Fixture>(node: &F) {
    scanned(node.backend()).await;
    node.alarm(3, Level::Major, &[0x80E0_1801, 0x8107_8603]);
    let health = node.backend().health().await.unwrap();
    assert_eq!(health[&3].level, Level::Major);
    assert_eq!(health[&3].codes, [0x80E0_1801, 0x8107_8603]);
    assert_eq!(health[&2].level, Level::Ok);
    assert!(health[&2].codes.is_empty());
    let scan = scanned(node.backend()).await;
    let chip = scan.chips.iter().find(|chip| chip.physical_id == 3).unwrap();
    assert_eq!(chip.health.level, Level::Major, "a scan reads health too");
}

async fn a_chip_that_falls_off_the_bus_is_gone_and_the_others_are_not<F: Fixture>(node: &F) {
    scanned(node.backend()).await;
    node.lose(5);
    let health = node.backend().health().await.unwrap();
    for (id, reading) in health {
        assert_eq!(reading.level == Level::Gone, id == 5, "{id}: {reading:?}");
    }
}

async fn a_lost_chip_is_not_in_the_next_scan<F: Fixture>(node: &F) {
    scanned(node.backend()).await;
    node.lose(5);
    let _ = node.backend().health().await;
    let scan = scanned_until(node.backend(), |scan| scan.chips.len() == 7).await;
    assert!(scan.chips.iter().all(|chip| chip.physical_id != 5));
    assert_eq!(node.backend().health().await.unwrap().len(), 7);
}

async fn a_chip_that_comes_back_is_the_same_card<F: Fixture>(node: &F) {
    let before = scanned(node.backend()).await;
    node.lose(5);
    let _ = node.backend().health().await;
    scanned_until(node.backend(), |scan| scan.chips.len() == 7).await;
    node.give_back(5);
    let after = scanned_until(node.backend(), |scan| scan.chips.len() == 8).await;
    let card = |scan: &Scan| scan.chips.iter().find(|chip| chip.physical_id == 5).cloned().unwrap();
    assert_eq!(card(&before).vdie, card(&after).vdie);
    assert_eq!(card(&before).bus_id, card(&after).bus_id);
}

async fn a_broken_backend_gives_a_fault_and_no_empty_scan<F: Fixture>(node: &F) {
    scanned(node.backend()).await;
    node.shatter();
    for _ in 0..3 {
        assert!(node.backend().scan().await.is_err());
    }
}

async fn a_backend_that_works_again_scans_again<F: Fixture>(node: &F) {
    let before = scanned(node.backend()).await;
    node.shatter();
    assert!(node.backend().scan().await.is_err());
    node.mend();
    assert_eq!(scanned(node.backend()).await, before);
}

async fn the_status_follows_what_happens<F: Fixture>(node: &F) {
    assert_eq!(node.backend().status().state, "starting");
    scanned(node.backend()).await;
    let status = node.backend().status();
    assert_eq!((status.state, status.detail.as_str()), ("ready", ""));
    node.shatter();
    let _ = node.backend().scan().await;
    let status = node.backend().status();
    assert_ne!(status.state, "ready");
    assert!(!status.detail.is_empty());
    node.mend();
    scanned(node.backend()).await;
    assert_eq!(node.backend().status().state, "ready");
}

async fn calls_at_the_same_time_are_all_answered<F: Fixture>(node: &F) {
    scanned(node.backend()).await;
    let backend = node.backend();
    let scans = futures::future::join_all((0..4).map(|_| backend.scan()));
    let polls = futures::future::join_all((0..8).map(|_| backend.health()));
    let (scans, polls) = futures::join!(scans, polls);
    assert!(scans.iter().all(|scan| scan.as_ref().is_ok_and(|scan| scan.chips.len() == 8)));
    assert!(polls.iter().all(|poll| poll.as_ref().is_ok_and(|poll| poll.len() == 8)));
}

async fn a_caller_that_goes_away_harms_nobody<F: Fixture>(node: &F) {
    for _ in 0..3 {
        let impatient = tokio::time::timeout(Duration::from_millis(1), node.backend().scan());
        let _ = impatient.await;
    }
    assert_eq!(scanned(node.backend()).await.chips.len(), 8);
}

async fn the_name_and_the_status_agree<F: Fixture>(node: &F) {
    let backend = node.backend();
    assert_eq!(backend.name(), F::NAME);
    assert_eq!(backend.status().backend, F::NAME);
    node.shatter();
    assert!(backend.scan().await.unwrap_err().to_string().starts_with(F::NAME));
}

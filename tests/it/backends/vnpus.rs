//! The suite's tests of vNPUs, for every backend that has them.

use npu_dra::{
    device::{Fault, VendorMode},
    domain::vnpu::{CardReading, Resources},
};

use super::{fixture::Fixture, scanned, scanned_until};

const GIB: u64 = 1 << 30;
const QUARTER: &str = "vir05_1c_8g";
const HALF: &str = "vir10_3c_16g";

async fn card<F: Fixture>(node: &F, physical_id: u32) -> CardReading {
    node.backend().card(physical_id).await.unwrap()
}

async fn made<F: Fixture>(node: &F, physical_id: u32, template: &str, id: u32) {
    assert_eq!(node.backend().create(physical_id, template, id).await, Ok(id));
}

fn left(gib: u64, ai_cores: u32, ai_cpus: u32, media: u32) -> Resources {
    Resources { memory: gib * GIB, ai_cores, ai_cpus, media }
}

pub(super) async fn an_uncut_card_has_no_vnpus_all_of_itself_left_and_no_process<F: Fixture>(node: &F) {
    scanned(node.backend()).await;
    for (physical_id, _) in node.chips() {
        let whole = CardReading { vnpus: Vec::new(), free: Some(left(32, 20, 7, 24)), processes: Some(Vec::new()) };
        assert_eq!(card(node, physical_id).await, whole);
    }
}

pub(super) async fn a_vnpu_has_the_id_that_was_asked_and_the_size_of_its_template<F: Fixture>(node: &F) {
    scanned(node.backend()).await;
    made(node, 3, HALF, 150).await;
    made(node, 3, QUARTER, 163).await;
    let reading = card(node, 3).await;
    let read: Vec<_> =
        reading.vnpus.iter().map(|vnpu| (vnpu.id, vnpu.template.as_str(), vnpu.memory / GIB, vnpu.ai_cores)).collect();
    assert_eq!(read, [(150, HALF, 16, 10), (163, QUARTER, 8, 5)]);
    assert_eq!(reading.free, Some(left(8, 5, 3, 6)));
    assert_eq!(card(node, 2).await.ids(), [0; 0], "another card");
    let longest = "vir10_3c_16g_nm";
    made(node, 5, longest, 180).await;
    assert!(card(node, 5).await.vnpu(180).unwrap().is_of(longest));
}

pub(super) async fn four_quarters_or_two_halves_fit_and_no_more<F: Fixture>(node: &F) {
    scanned(node.backend()).await;
    for id in 100..104 {
        made(node, 0, QUARTER, id).await;
    }
    for id in 116..118 {
        made(node, 1, HALF, id).await;
    }
    for (physical_id, id, left) in [(0, 104, left(0, 0, 3, 0)), (1, 118, left(0, 0, 1, 0))] {
        match node.backend().create(physical_id, QUARTER, id).await {
            Err(Fault::Failed { why, .. }) => assert!(why.contains("fit"), "{why}"),
            other => panic!("{other:?}"),
        }
        assert_eq!(card(node, physical_id).await.free, Some(left));
    }
    assert_eq!(node.vnpus(), [100, 101, 102, 103, 116, 117]);
    // Memory and cores would do; AI CPUs or media engines do not.
    made(node, 2, "vir10_4c_16g_m", 132).await;
    assert_eq!(card(node, 2).await.free, Some(left(16, 10, 3, 0)));
    for template in ["vir10_4c_16g_m", HALF, QUARTER] {
        assert!(node.backend().create(2, template, 133).await.is_err(), "{template}");
    }
    made(node, 2, "vir10_3c_16g_nm", 133).await;
}

pub(super) async fn an_id_is_used_once_and_is_the_chips_own<F: Fixture>(node: &F) {
    scanned(node.backend()).await;
    made(node, 1, QUARTER, 116).await;
    for id in [0, 99, 100, 115, 116, 132, 65_535, u32::MAX] {
        let refused = node.backend().create(1, QUARTER, id).await;
        assert!(matches!(refused, Err(Fault::Failed { .. })), "{id}: {refused:?}");
    }
    assert_eq!(node.vnpus(), [116]);
}

pub(super) async fn a_library_that_chooses_ids_says_which<F: Fixture>(node: &F) {
    scanned(node.backend()).await;
    node.ignore_ids();
    assert_eq!(node.backend().create(2, QUARTER, 140).await, Ok(132));
    assert_eq!(node.backend().create(2, QUARTER, 140).await, Ok(133));
    assert_eq!(card(node, 2).await.ids(), [132, 133]);
}

pub(super) async fn a_template_that_the_chip_lacks_makes_nothing<F: Fixture>(node: &F) {
    scanned(node.backend()).await;
    let long = "v".repeat(40);
    for template in ["vir03_1c_8g", "vir05_1c_16g", "vir01", "", "vir05_1c_8g\0", "vir05 1c", &long] {
        let refused = node.backend().create(0, template, 100).await;
        assert!(matches!(refused, Err(Fault::Failed { .. })), "{template:?}: {refused:?}");
    }
    assert_eq!(node.vnpus(), [0; 0]);
}

pub(super) async fn a_chip_with_a_process_is_busy_and_shows_it<F: Fixture>(node: &F) {
    scanned(node.backend()).await;
    node.occupy(4, &[4711, 4712]);
    assert_eq!(card(node, 4).await.processes, Some(vec![4711, 4712]));
    let refused = node.backend().create(4, QUARTER, 164).await;
    assert!(matches!(refused, Err(Fault::Busy { .. })), "{refused:?}");
    node.occupy(4, &[]);
    made(node, 4, QUARTER, 164).await;
    node.occupy(4, &[4711]);
    made(node, 4, QUARTER, 165).await;
}

pub(super) async fn destroying_removes_exactly_one_and_is_success_when_it_is_gone<F: Fixture>(node: &F) {
    scanned(node.backend()).await;
    for (physical_id, id) in [(0, 100), (0, 101), (1, 117)] {
        made(node, physical_id, QUARTER, id).await;
    }
    for _ in 0..2 {
        assert_eq!(node.backend().destroy(0, 100).await, Ok(()));
        assert_eq!(node.vnpus(), [101, 117]);
    }
    // Numbers that are not the chip's own, and the one that would destroy all of it.
    for id in [117, 0, 99, 65_535, u32::MAX] {
        let refused = node.backend().destroy(0, id).await;
        assert!(matches!(refused, Err(Fault::Failed { .. })), "{id}: {refused:?}");
    }
    assert_eq!(node.vnpus(), [101, 117]);
    assert_eq!(card(node, 0).await.free, Some(left(24, 15, 6, 18)));
}

pub(super) async fn a_vnpu_in_use_is_busy<F: Fixture>(node: &F) {
    scanned(node.backend()).await;
    made(node, 6, HALF, 196).await;
    node.open_vnpu(196, true);
    let refused = node.backend().destroy(6, 196).await;
    assert!(matches!(refused, Err(Fault::Busy { .. })), "{refused:?}");
    assert_eq!(node.vnpus(), [196]);
    node.open_vnpu(196, false);
    assert_eq!(node.backend().destroy(6, 196).await, Ok(()));
    assert_eq!(node.vnpus(), [0; 0]);
}

pub(super) async fn what_others_make_and_destroy_is_read<F: Fixture>(node: &F) {
    scanned(node.backend()).await;
    let id = node.add_vnpu(7, HALF);
    assert_eq!(id, 212);
    assert_eq!(card(node, 7).await.ids(), [212]);
    made(node, 7, QUARTER, 213).await;
    node.remove_vnpu(213);
    assert_eq!(card(node, 7).await.ids(), [212]);
    assert_eq!(node.backend().destroy(7, 213).await, Ok(()), "somebody else has destroyed it");
    assert_eq!(node.vnpus(), [212]);
}

pub(super) async fn an_error_after_a_create_leaves_a_vnpu_to_be_read<F: Fixture>(node: &F) {
    scanned(node.backend()).await;
    node.fail_after_create();
    assert!(node.backend().create(0, QUARTER, 105).await.is_err());
    assert_eq!(card(node, 0).await.ids(), [105]);
    made(node, 0, QUARTER, 106).await;
}

pub(super) async fn a_vnpu_that_was_made_again_has_another_id<F: Fixture>(node: &F) {
    scanned(node.backend()).await;
    made(node, 0, QUARTER, 100).await;
    made(node, 0, QUARTER, 101).await;
    node.remake();
    assert!(node.backend().destroy(0, 100).await.is_err());
    assert_eq!(card(node, 0).await.ids(), [101, 102]);
    assert!(card(node, 0).await.vnpu(102).unwrap().is_of(QUARTER));
}

pub(super) async fn a_node_that_cuts_for_machines_says_so_and_makes_nothing<F: Fixture>(node: &F) {
    scanned(node.backend()).await;
    assert_eq!(node.backend().vendor().await.unwrap().virtual_machines, Some(false));
    node.cut_for_machines();
    assert_eq!(node.backend().vendor().await.unwrap().virtual_machines, Some(true));
    match node.backend().create(0, QUARTER, 100).await {
        Err(Fault::Failed { why, .. }) => assert!(why.contains("permitted"), "{why}"),
        other => panic!("{other:?}"),
    }
    assert_eq!(node.vnpus(), [0; 0]);
}

pub(super) async fn the_replay_brings_back_what_it_lists_and_can_be_switched_off<F: Fixture>(node: &F) {
    scanned(node.backend()).await;
    let vendor = |replay, listed: &[u32]| VendorMode {
        replay: Some(replay),
        listed: listed.to_vec(),
        virtual_machines: Some(false),
    };
    assert_eq!(node.backend().vendor().await.unwrap(), vendor(true, &[]));
    made(node, 3, HALF, 150).await;
    made(node, 0, QUARTER, 101).await;
    assert_eq!(node.backend().vendor().await.unwrap(), vendor(true, &[101, 150]));
    node.reboot();
    scanned(node.backend()).await;
    assert_eq!(node.vnpus(), [0; 0]);
    node.replay();
    assert_eq!(node.vnpus(), [101, 150]);
    assert!(card(node, 3).await.vnpu(150).unwrap().is_of(HALF));
    assert_eq!(node.backend().destroy(0, 101).await, Ok(()));
    assert_eq!(node.backend().set_replay(false).await, Ok(()));
    assert_eq!(node.backend().vendor().await.unwrap(), vendor(false, &[150]));
    made(node, 0, QUARTER, 102).await;
    node.reboot();
    scanned(node.backend()).await;
    node.replay();
    assert_eq!(node.vnpus(), [0; 0]);
    assert_eq!(node.backend().set_replay(true).await, Ok(()));
    assert_eq!(node.backend().vendor().await.unwrap().replay, Some(true));
}

pub(super) async fn a_lost_chip_has_no_reading<F: Fixture>(node: &F) {
    scanned(node.backend()).await;
    node.lose(5);
    assert!(node.backend().card(5).await.is_err());
    assert!(node.backend().create(5, QUARTER, 180).await.is_err());
    assert!(node.backend().card(77).await.is_err(), "one that never was");
    assert_eq!(card(node, 4).await.ids(), [0; 0], "the others can be read");
    let _ = node.backend().health().await;
    scanned_until(node.backend(), |scan| scan.chips.len() == 7).await;
    let gone = Fault::Gone { backend: F::NAME, chip: 5 };
    assert_eq!(node.backend().card(5).await, Err(gone.clone()));
    assert_eq!(node.backend().destroy(5, 180).await, Err(gone));
}

pub(super) async fn a_backend_that_only_reads_says_so<F: Fixture>(node: &F) {
    scanned(node.backend()).await;
    let backend = node.backend();
    let faults = [
        backend.card(0).await.map(drop),
        backend.create(0, QUARTER, 100).await.map(drop),
        backend.destroy(0, 100).await,
        backend.vendor().await.map(drop),
        backend.set_replay(false).await,
    ];
    for fault in faults {
        assert!(matches!(fault, Err(Fault::Unsupported { backend, .. }) if backend == F::NAME), "{fault:?}");
    }
}

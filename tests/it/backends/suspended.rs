//! A backend that an operator has taken the vendor's software from.

use std::{path::Path, time::Duration};

use dcmi::world::{Action, Fault as Planted, Profile};
use npu_dra::device::Fault;

use super::{
    faults::lives,
    fixture::{Dcmi, Fixture},
    scanned,
};

pub(super) async fn a_suspended_backend_answers_nothing_until_it_is_resumed<F: Fixture>(node: &F) {
    let backend = node.backend();
    let before = scanned(backend).await;
    assert_eq!(backend.suspend().await, Ok(()));
    let suspended = Fault::Suspended { backend: F::NAME };
    for _ in 0..2 {
        assert_eq!(backend.scan().await, Err(suspended.clone()));
        assert_eq!(backend.health().await, Err(suspended.clone()));
    }
    let status = backend.status();
    assert_eq!(status.state, "suspended");
    assert!(status.detail.contains("npuctl backend resume"), "{}", status.detail);
    assert_eq!(backend.resume().await, Ok(()));
    assert_eq!(backend.status().state, "starting");
    assert_eq!(scanned(backend).await, before);
    assert_eq!(backend.status().state, "ready");
}

pub(super) async fn suspending_twice_and_resuming_twice_harms_nothing<F: Fixture>(node: &F) {
    let backend = node.backend();
    for _ in 0..2 {
        assert_eq!(backend.resume().await, Ok(()), "what is not suspended can be resumed");
    }
    for _ in 0..2 {
        assert_eq!(backend.suspend().await, Ok(()), "what was never scanned can be suspended");
    }
    assert_eq!(backend.health().await, Err(Fault::Suspended { backend: F::NAME }));
    for _ in 0..2 {
        assert_eq!(backend.resume().await, Ok(()));
    }
    assert_eq!(scanned(backend).await.chips.len(), 8);
}

#[tokio::test]
async fn no_library_is_loaded_and_no_call_made_while_suspended_and_the_driver_version_is_read_again() {
    let node = Dcmi::of(Profile::Ascend910B4);
    let backend = node.backend();
    scanned(backend).await;
    let worker = node.worker();
    assert!(lives(worker));
    backend.suspend().await.unwrap();
    assert!(!Path::new(&format!("/proc/{worker}")).exists(), "the worker is gone and reaped");
    let calls = node.world.calls().unwrap().len();
    let suspended = Fault::Suspended { backend: "dcmi" };
    assert_eq!(backend.card(0).await, Err(suspended.clone()));
    assert_eq!(backend.create(0, "vir05_1c_8g", 100).await, Err(suspended.clone()));
    assert_eq!(backend.destroy(0, 100).await, Err(suspended.clone()));
    assert_eq!(backend.vendor().await, Err(suspended.clone()));
    assert_eq!(backend.set_replay(false).await, Err(suspended.clone()));
    assert_eq!(backend.scan().await, Err(suspended));
    assert_eq!(node.world.calls().unwrap().len(), calls);
    node.world.edit(|data| "26.0.1".clone_into(&mut data.driver_version)).unwrap();
    backend.resume().await.unwrap();
    assert_eq!(scanned(backend).await.driver_version, "26.0.1");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn suspending_lets_a_vnpu_be_made_to_its_end_and_breaks_a_scan_off() {
    let node = Dcmi::of(Profile::Ascend910B4);
    let backend = node.backend();
    scanned(backend).await;
    node.world.faults().set([Planted::new("dcmi_create_vdevice", Action::DelayMs(300))]).unwrap();
    let called = async {
        while node.world.calls().unwrap().count("dcmi_create_vdevice") == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await; // waits: for the vNPU to be begun
        }
        backend.suspend().await
    };
    let (made, suspended) = tokio::join!(backend.create(3, "vir05_1c_8g", 148), called);
    assert_eq!((made, suspended), (Ok(148), Ok(())));
    assert_eq!(node.vnpus(), [148]);
    backend.resume().await.unwrap();
    scanned(backend).await;
    node.world.faults().set([Planted::new("dcmi_get_device_health", Action::DelayMs(50))]).unwrap();
    node.world.clear_calls().unwrap();
    let called = async {
        while node.world.calls().unwrap().count("dcmi_get_device_health") == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await; // waits: for the scan to be in its calls
        }
        backend.suspend().await
    };
    let (scan, suspended) = tokio::join!(backend.scan(), called);
    assert_eq!((scan, suspended), (Err(Fault::Suspended { backend: "dcmi" }), Ok(())));
    assert!(node.world.calls().unwrap().count("dcmi_get_device_health") < 8);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_library_that_hangs_in_its_start_can_be_suspended_at_once() {
    let node = Dcmi::of(Profile::Ascend910B4);
    let backend = node.backend();
    node.world.faults().set([Planted::new("dcmi_init", Action::Hang)]).unwrap();
    let called = async {
        while node.world.calls().unwrap().count("dcmi_init") == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await; // waits: for the library to be started
        }
        tokio::time::timeout(Duration::from_secs(10), backend.suspend()).await
    };
    let (scan, suspended) = tokio::join!(backend.scan(), called);
    assert!(scan.is_err(), "{scan:?}");
    assert_eq!(suspended, Ok(Ok(())), "its deadline is 30 s");
    assert_eq!(backend.status().state, "suspended");
}

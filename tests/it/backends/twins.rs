//! The backend for tests against the simulated vendor library: whatever is done to both, both answer the same. The two
//! share no code, so a rule of slicing that one has wrong shows here.

use dcmi::world::Profile;
use npu_dra::device::{Backend, Fault};
use proptest::{
    prelude::*,
    strategy::ValueTree as _,
    test_runner::{RngAlgorithm, TestRng, TestRunner},
};

use super::{
    fixture::{Dcmi, Fixture, Memory},
    scanned,
};

/// What can happen to a node; numbers are taken modulo what there is.
#[derive(Debug, Clone)]
enum Event {
    Create { chip: u32, template: usize, id: u32 },
    Destroy { pick: usize },
    DestroyAny { chip: u32, id: u32 },
    Foreign { chip: u32, template: usize },
    Vanish { pick: usize },
    Open { pick: usize, open: bool },
    Occupy { chip: u32, busy: bool },
    SetReplay(bool),
    IgnoreIds(bool),
    Reboot { replay: bool },
}

const CHIPS: u32 = 2;

fn event() -> impl Strategy<Value = Event> {
    let chip = || 0..CHIPS;
    prop_oneof![
        8 => (chip(), 0..5usize, 0..19u32).prop_map(|(chip, template, id)| Event::Create { chip, template, id }),
        5 => (0..32usize).prop_map(|pick| Event::Destroy { pick }),
        1 => (chip(), 0..19u32).prop_map(|(chip, id)| Event::DestroyAny { chip, id }),
        2 => (chip(), 0..5usize).prop_map(|(chip, template)| Event::Foreign { chip, template }),
        1 => (0..32usize).prop_map(|pick| Event::Vanish { pick }),
        2 => (0..32usize, any::<bool>()).prop_map(|(pick, open)| Event::Open { pick, open }),
        2 => (chip(), any::<bool>()).prop_map(|(chip, busy)| Event::Occupy { chip, busy }),
        1 => any::<bool>().prop_map(Event::SetReplay),
        1 => any::<bool>().prop_map(Event::IgnoreIds),
        1 => any::<bool>().prop_map(|replay| Event::Reboot { replay }),
    ]
}

/// The outcome as far as both must agree: what came of it, or what kind of fault.
fn kind<T: std::fmt::Debug>(outcome: Result<T, Fault>) -> String {
    match outcome {
        Ok(value) => format!("{value:?}"),
        Err(Fault::Busy { .. }) => "busy".to_owned(),
        Err(Fault::Failed { .. }) => "failed".to_owned(),
        Err(other) => format!("{other:?}"),
    }
}

struct Twins {
    memory: Memory,
    library: Dcmi,
}

impl Twins {
    async fn both(&self, what: impl AsyncFn(&dyn Backend) -> String) -> [String; 2] {
        [what(self.memory.backend()).await, what(Fixture::backend(&self.library)).await]
    }

    async fn happen(&self, event: &Event, templates: &[&str]) -> [String; 2] {
        let nothing = [String::new(), String::new()];
        let picked = |pick: usize| {
            let all = self.memory.vnpus();
            all.get(pick % all.len().max(1)).copied()
        };
        let chip_of = |id: u32| (id - 100) / 16;
        match *event {
            Event::Create { chip, template, id } => {
                // A number before and two behind the chip's own as well.
                let (template, id) = (templates[template % templates.len()], 99 + 16 * chip + id);
                self.both(async |backend| kind(backend.create(chip, template, id).await)).await
            }
            Event::Destroy { pick } => match picked(pick) {
                Some(id) => self.both(async |backend| kind(backend.destroy(chip_of(id), id).await)).await,
                None => nothing,
            },
            Event::DestroyAny { chip, id } => {
                self.both(async |backend| kind(backend.destroy(chip, 99 + 16 * chip + id).await)).await
            }
            Event::Foreign { chip, template } => {
                let template = templates[template % templates.len()];
                let memory = self.memory.inner().add_vnpu(chip, template).ok();
                [format!("{memory:?}"), format!("{:?}", self.library.world.add_vnpu(chip, template).ok())]
            }
            Event::Vanish { pick } => {
                if let Some(id) = picked(pick) {
                    self.memory.remove_vnpu(id);
                    self.library.remove_vnpu(id);
                }
                nothing
            }
            Event::Open { pick, open } => {
                if let Some(id) = picked(pick) {
                    self.memory.open_vnpu(id, open);
                    self.library.open_vnpu(id, open);
                }
                nothing
            }
            Event::Occupy { chip, busy } => {
                let pids: &[i32] = if busy { &[4711] } else { &[] };
                self.memory.occupy(chip, pids);
                self.library.occupy(chip, pids);
                nothing
            }
            Event::SetReplay(on) => self.both(async |backend| kind(backend.set_replay(on).await)).await,
            Event::IgnoreIds(ignore) => {
                self.memory.inner().cut(|cutting| cutting.ignores_ids = ignore);
                self.library.world.edit(|data| data.slicing.ignore_ids = ignore).unwrap();
                nothing
            }
            Event::Reboot { replay } => {
                self.memory.reboot();
                self.library.reboot();
                if replay {
                    self.memory.replay();
                    self.library.replay();
                }
                scanned(self.memory.backend()).await;
                scanned(Fixture::backend(&self.library)).await;
                nothing
            }
        }
    }

    /// All that can be read.
    async fn view(&self) -> [String; 2] {
        self.both(async |backend| {
            let mut view = kind(backend.vendor().await);
            for chip in 0..CHIPS {
                view += &kind(backend.card(chip).await);
            }
            view
        })
        .await
    }

    fn disturbed(&self) -> [u64; 2] {
        let data = self.library.world.data().unwrap();
        [self.memory.inner().disturbed(), data.chips().map(|chip| chip.disturbed).sum()]
    }
}

#[tokio::test]
async fn the_backend_for_tests_cuts_as_the_simulated_library_does() {
    let b4 = ["vir05_1c_8g", "vir10_3c_16g", "vir10_4c_16g_m", "vir10_3c_16g_nm", "vir03_1c_8g"];
    for (profile, templates) in [
        (Profile::Ascend910B4, &b4[..]),
        (Profile::Ascend910B3, &["vir05_1c_16g", "vir10_3c_32g", "vir05_1c_8g"]),
        (Profile::Ascend910B2, &["vir06_1c_16g", "vir12_3c_32g", "vir10_3c_32g"]),
    ] {
        let twins = Twins { memory: Memory::of(profile), library: Dcmi::of(profile) };
        scanned(twins.memory.backend()).await;
        scanned(Fixture::backend(&twins.library)).await;
        let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[7; 32]);
        let mut runner = TestRunner::new_with_rng(ProptestConfig::default(), rng);
        let events = prop::collection::vec(event(), 250).new_tree(&mut runner).unwrap().current();
        let mut made = 0;
        for (number, event) in events.iter().enumerate() {
            let [memory, library] = twins.happen(event, templates).await;
            assert_eq!(memory, library, "{profile:?}, event {number}: {event:?}");
            let [memory, library] = twins.view().await;
            assert_eq!(memory, library, "{profile:?}, after event {number}: {event:?}");
            let [memory, library] = twins.disturbed();
            assert_eq!(memory, library, "{profile:?}, after event {number}: {event:?}");
            made += usize::from(!twins.memory.vnpus().is_empty());
        }
        assert!(made > 100, "a history in which next to nothing was made: {made}");
    }
}

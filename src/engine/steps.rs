//! Carries out a plan's steps, in order, makes them durable together, and takes them back if that fails.

use tracing::{debug, error};

use super::Core;
use crate::domain::{
    claim::ClaimUid,
    node::NodeMemory,
    plan::{FoundFile, Step},
    record::Record,
};

/// Records, node memory and CDI files. Blocking: called on the blocking pool only.
pub trait Disk: Send + Sync + 'static {
    /// Does one step: from now on every process of this boot finds it done. Doing a step that is already done is
    /// success.
    fn apply(&self, step: &Step) -> Result<(), String>;
    /// Makes applied steps durable, and tries all of them whatever fails. To be called also for a step that found
    /// everything in place: what did it before may not have made it durable.
    fn settle(&self, steps: &[Step]) -> Result<(), String>;
    /// True if the claim has a CDI file.
    fn has_file(&self, uid: &ClaimUid) -> Result<bool, String>;
    /// All CDI files of ours.
    fn files(&self) -> Result<Vec<FoundFile>, String>;
    /// Writes the node's memory.
    fn write_node(&self, memory: &NodeMemory) -> Result<(), String>;
}

/// Names the act of making steps durable, as [`Step::name`] does a step.
pub(super) const SETTLING: &str = "making the files durable";

/// Does steps durably on the blocking pool, with no way back; an error names the step. What was done before a step that
/// failed is durable too.
pub(super) async fn on_disk(core: &Core, steps: Vec<Step>) -> Result<(), (&'static str, String)> {
    let disk = core.disk.clone();
    let run = move || {
        let applied = steps.iter().try_for_each(|step| disk.apply(step).map_err(|why| (step.name(), why)));
        let settled = disk.settle(&steps).map_err(|why| (SETTLING, why));
        applied.and(settled)
    };
    tokio::task::spawn_blocking(run).await.unwrap_or_else(|panic| Err(("disk work", panic.to_string())))
}

/// How a run of steps ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// All are done and durable.
    Done,
    /// One failed or was overtaken; those before it were undone.
    Undone {
        /// The step that was not done.
        step: &'static str,
        /// The error; `None` if an unprepare overtook the run.
        why: Option<String>,
    },
    /// As `Undone`, but an undo failed too: the disk may hold what the plan wanted.
    Stuck {
        /// The step that was not done.
        step: &'static str,
        /// Both errors.
        why: String,
    },
}

/// Does the steps durably; stops before a step if `overtaken` says so.
pub(super) fn run(disk: &dyn Disk, steps: &[Step], before: Option<&Record>, overtaken: &dyn Fn() -> bool) -> Outcome {
    for (index, step) in steps.iter().enumerate() {
        if overtaken() {
            return back(disk, &steps[..index], before, step.name(), None);
        }
        if let Err(why) = disk.apply(step) {
            // A step that failed may be half done, so it is undone too.
            return back(disk, &steps[..=index], before, step.name(), Some(why));
        }
        debug!(step = step.name(), "step done");
    }
    match disk.settle(steps) {
        Ok(()) => Outcome::Done,
        Err(why) => back(disk, steps, before, SETTLING, Some(why)),
    }
}

/// Takes back the steps that a run has reached, and tells why it ended.
fn back(
    disk: &dyn Disk,
    reached: &[Step],
    before: Option<&Record>,
    step: &'static str,
    why: Option<String>,
) -> Outcome {
    match undo(disk, reached, before) {
        Ok(()) => Outcome::Undone { step, why },
        Err(undo) => {
            let why = why.unwrap_or_else(|| "overtaken by an unprepare".to_owned());
            Outcome::Stuck { step, why: format!("{why}; and undoing it failed: {undo}") }
        }
    }
}

/// Takes steps back durably, last first. Goes on past errors and tells all of them.
fn undo(disk: &dyn Disk, steps: &[Step], before: Option<&Record>) -> Result<(), String> {
    let undos: Vec<_> = steps.iter().rev().filter_map(|step| step.undo(before)).collect();
    let mut errors = Vec::new();
    let mut note = |undo: &'static str, outcome: Result<(), String>| {
        if let Err(why) = outcome {
            error!(step = undo, error = why, "undo failed");
            errors.push(format!("{undo}: {why}"));
        }
    };
    for undo in &undos {
        note(undo.name(), disk.apply(undo));
    }
    note(SETTLING, disk.settle(&undos));
    if errors.is_empty() { Ok(()) } else { Err(errors.join("; ")) }
}

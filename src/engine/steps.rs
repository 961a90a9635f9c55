//! Carries out a plan's durable steps, in order, and takes them back if one fails.

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
    /// Does one step durably. Doing a step that is already done is success.
    fn apply(&self, step: &Step) -> Result<(), String>;
    /// True if the claim has a CDI file.
    fn has_file(&self, uid: &ClaimUid) -> Result<bool, String>;
    /// All CDI files of ours.
    fn files(&self) -> Result<Vec<FoundFile>, String>;
    /// Writes the node's memory.
    fn write_node(&self, memory: &NodeMemory) -> Result<(), String>;
}

/// Does steps on the blocking pool, with no way back; an error names the step.
pub(super) async fn on_disk(core: &Core, steps: Vec<Step>) -> Result<(), (&'static str, String)> {
    let disk = core.disk.clone();
    let run = move || steps.iter().try_for_each(|step| disk.apply(step).map_err(|why| (step.name(), why)));
    tokio::task::spawn_blocking(run).await.unwrap_or_else(|panic| Err(("disk work", panic.to_string())))
}

/// How a run of steps ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// All are done.
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

/// Does the steps; stops before a step if `overtaken` says so.
pub(super) fn run(disk: &dyn Disk, steps: &[Step], before: Option<&Record>, overtaken: &dyn Fn() -> bool) -> Outcome {
    for (index, step) in steps.iter().enumerate() {
        let failure = if overtaken() { Some(None) } else { disk.apply(step).err().map(Some) };
        let Some(why) = failure else {
            debug!(step = step.name(), "step done");
            continue;
        };
        // A step that failed may be half done, so it is undone too.
        let reached = if why.is_some() { index + 1 } else { index };
        return match undo(disk, &steps[..reached], before) {
            Ok(()) => Outcome::Undone { step: step.name(), why },
            Err(undo) => {
                let why = why.unwrap_or_else(|| "overtaken by an unprepare".to_owned());
                Outcome::Stuck { step: step.name(), why: format!("{why}; and undoing it failed: {undo}") }
            }
        };
    }
    Outcome::Done
}

/// Takes steps back, last first. Goes on past errors and tells all of them.
fn undo(disk: &dyn Disk, steps: &[Step], before: Option<&Record>) -> Result<(), String> {
    let mut errors = Vec::new();
    for undo in steps.iter().rev().filter_map(|step| step.undo(before)) {
        if let Err(why) = disk.apply(&undo) {
            error!(step = undo.name(), error = why, "undo failed");
            errors.push(format!("{}: {why}", undo.name()));
        }
    }
    if errors.is_empty() { Ok(()) } else { Err(errors.join("; ")) }
}

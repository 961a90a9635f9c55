//! An operator takes the vendor's software from us, for its upgrade, and gives it back.

use std::sync::Arc;

use super::{
    Core,
    health::{save, settle},
    now,
    state::Change,
};
use crate::domain::{
    notice::{Notice, Severity},
    refusal::Refusal,
};

/// How often the node's memory is written if others change it meanwhile.
const WRITES: u32 = 3;

/// Closes the cards, remembers that on disk, then lets go. What is being done to vNPUs is done to its end first.
pub(super) async fn suspend(core: &Arc<Core>, reason: &str) -> Result<(), Refusal> {
    let _hand = core.hand.lock().await;
    let former = core.state.suspension();
    if core.state.suspend(reason, now()) {
        if let Err(why) = written(core).await {
            // A restart would take the library up again, in the middle of its upgrade.
            core.state.restore_suspension(former);
            settle(core, Change::default()).await;
            return Err(Refusal::OperatorFailed {
                what: "suspending the backend".to_owned(),
                why: format!("the node's memory cannot be written: {why}"),
            });
        }
        let what = format!("{} is suspended: {}", core.backend.name(), reason_or_none(reason));
        core.outbox.say(&Notice::Backend { severity: Severity::Warning, what });
    }
    core.backend.suspend().await.map_err(|fault| Refusal::OperatorFailed {
        what: "letting go of the vendor's software".to_owned(),
        why: format!("{fault}; the node is suspended, but do not touch the driver before that process has ended"),
    })
}

fn reason_or_none(reason: &str) -> &str {
    if reason.is_empty() { "no reason was given" } else { reason }
}

/// Opens the cards again. The next turn reads them anew.
pub(super) async fn resume(core: &Arc<Core>) -> Result<(), Refusal> {
    let _hand = core.hand.lock().await;
    core.backend.resume().await.map_err(|fault| Refusal::OperatorFailed {
        what: "taking the vendor's software up again".to_owned(),
        why: fault.to_string(),
    })?;
    let Some(suspension) = core.state.resume() else { return Ok(()) };
    let written = written(core).await;
    core.unsure.notify_one();
    let what = format!("{} is resumed; it was {}", core.backend.name(), suspension.why());
    core.outbox.say(&Notice::Backend { severity: Severity::Info, what });
    written.map_err(|why| Refusal::OperatorFailed {
        what: "remembering that the backend is resumed".to_owned(),
        why: format!(
            "the node's memory cannot be written: {why}; it is tried again, but a restart before that suspends it"
        ),
    })
}

/// Publishes, and writes the node's memory; gives why it cannot be written.
async fn written(core: &Arc<Core>) -> Result<(), String> {
    let mut why = "it changes all the time".to_owned();
    for _ in 0..WRITES {
        settle(core, Change::default()).await;
        match save(core).await {
            Ok(()) if !core.state.is_unsaved() => return Ok(()),
            Ok(()) => {}
            Err(error) => why = error,
        }
    }
    Err(why)
}

/// Keeps what is suspended so: also after a restart, and until a process that did not end has ended.
pub(super) async fn keep(core: &Arc<Core>) {
    let Ok(_hand) = core.hand.try_lock() else { return };
    if core.state.is_suspended() && core.backend.status().state != "suspended" {
        // What still holds the device shows in the status.
        let _ = core.backend.suspend().await;
    }
}

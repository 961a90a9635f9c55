//! An operator takes the vendor's software from us, for its upgrade, and gives it back.

use std::sync::Arc;

use super::{Core, health::settle, now, state::Change};
use crate::domain::{
    notice::{Notice, Severity},
    refusal::Refusal,
};

/// How often the node's memory is written if others change it meanwhile.
const WRITES: u32 = 3;

/// Closes the cards, remembers that on disk, then lets go. What is being done to vNPUs is done to its end first.
pub(super) async fn suspend(core: &Arc<Core>, reason: &str) -> Result<(), Refusal> {
    let _hand = core.hand.lock().await;
    if core.state.suspend(reason, now()) {
        if !written(core).await {
            // A restart would take the library up again, in the middle of its upgrade.
            core.state.resume();
            settle(core, Change::default()).await;
            return Err(Refusal::OperatorFailed {
                what: "suspending the backend".to_owned(),
                why: "the node's memory cannot be written; see the log".to_owned(),
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
    let is_written = written(core).await;
    core.unsure.notify_one();
    let what = format!("{} is resumed; it was {}", core.backend.name(), suspension.why());
    core.outbox.say(&Notice::Backend { severity: Severity::Info, what });
    if is_written {
        return Ok(());
    }
    Err(Refusal::OperatorFailed {
        what: "remembering that the backend is resumed".to_owned(),
        why: "the node's memory cannot be written; it is tried again, but a restart before that suspends it".to_owned(),
    })
}

/// Publishes, and writes the node's memory; false if it cannot be written.
async fn written(core: &Arc<Core>) -> bool {
    for _ in 0..WRITES {
        settle(core, Change::default()).await;
        if !core.state.is_unsaved() {
            return true;
        }
    }
    false
}

/// Keeps what is suspended so: also after a restart, and until a process that did not end has ended.
pub(super) async fn keep(core: &Arc<Core>) {
    let Ok(_hand) = core.hand.try_lock() else { return };
    if core.state.is_suspended() && core.backend.status().state != "suspended" {
        // What still holds the device shows in the status.
        let _ = core.backend.suspend().await;
    }
}

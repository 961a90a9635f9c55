//! Keeps inventory, health and the published pool in step with the hardware.

use std::sync::Arc;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::{Core, claims, now, state::Change};
use crate::{
    device::Fault,
    domain::{
        notice::{Notice, Severity},
        slice::Pool,
    },
};

/// The engine's main loop: one turn is a scan or a health poll, and what follows from it.
pub(super) async fn run(core: &Arc<Core>, shutdown: CancellationToken, pulse: impl Fn() + Send + Sync) {
    let mut turn = Turn { published: None, fault: None, scan_due: Instant::now(), recovered: false };
    loop {
        let work = turn.take(core);
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = work => {}
            // A slow vendor library is not a stuck engine: it has its own deadlines.
            () = heartbeat(&pulse, core) => {}
        }
        pulse();
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = tokio::time::sleep(core.timing.health_interval) => {}
        }
    }
}

/// Pulses for as long as it is polled; proves on each beat that the state's lock can be had.
async fn heartbeat(pulse: &(impl Fn() + Send + Sync), core: &Arc<Core>) {
    loop {
        let _ = core.state.wants_rescan();
        pulse();
        tokio::time::sleep(core.timing.health_interval).await;
    }
}

struct Turn {
    published: Option<Pool>,
    fault: Option<Fault>,
    scan_due: Instant,
    recovered: bool,
}

impl Turn {
    async fn take(&mut self, core: &Arc<Core>) {
        let scan = !self.recovered || self.fault.is_some() || core.state.wants_rescan();
        if scan && Instant::now() >= self.scan_due {
            self.scan(core).await;
        } else if self.recovered && self.fault.is_none() {
            match core.backend.health().await {
                Ok(readings) => settle(core, core.state.polled(&readings, now())).await,
                Err(fault) => self.failed(core, fault),
            }
        }
        self.publish(core);
    }

    async fn scan(&mut self, core: &Arc<Core>) {
        match core.backend.scan().await {
            Ok(scan) => match core.state.scanned(&scan, now()) {
                Ok(change) => {
                    if let Some(fault) = self.fault.take() {
                        let what = format!("{} works again after: {fault}", core.backend.name());
                        core.outbox.say(&Notice::Backend { severity: Severity::Info, what });
                    }
                    settle(core, change).await;
                    if !self.recovered {
                        claims::recover(core).await;
                        self.recovered = true;
                    }
                    self.scan_due = Instant::now() + core.timing.rescan;
                }
                Err(error) => {
                    let why = error.to_string();
                    self.failed(
                        core,
                        Fault::Failed { backend: core.backend.name(), call: "naming the cards".to_owned(), why },
                    );
                }
            },
            Err(fault) => self.failed(core, fault),
        }
    }

    /// Remembers a fault, and says it once. What is published stays as it is.
    fn failed(&mut self, core: &Arc<Core>, fault: Fault) {
        if self.fault.as_ref() != Some(&fault) {
            core.outbox.say(&Notice::Backend { severity: Severity::Error, what: fault.to_string() });
        }
        // A fault that a re-scan may mend is re-scanned at once the first time, then at the interval.
        self.scan_due = if self.fault.is_none() { Instant::now() } else { Instant::now() + core.timing.rescan };
        self.fault = Some(fault);
    }

    fn publish(&mut self, core: &Arc<Core>) {
        if let Some(pool) = core.state.pool(core.api.keeps_taints())
            && self.published.as_ref() != Some(&pool)
        {
            core.api.publish(pool.clone());
            self.published = Some(pool);
        }
    }
}

/// Says what changed, and writes the node's memory if it did.
async fn settle(core: &Arc<Core>, change: Change) {
    for notice in &change.notices {
        core.outbox.say(notice);
    }
    let Some(memory) = change.memory else { return };
    let (disk, state) = (core.disk.clone(), core.clone());
    let write = move || disk.write_node(&memory).map(|()| state.state.saved(&memory));
    let written = tokio::task::spawn_blocking(write).await;
    if let Err(why) = written.unwrap_or_else(|error| Err(error.to_string())) {
        warn!(error = why, "the node's memory of its cards cannot be written; it is tried again at the next poll");
    }
}

//! One notice, said everywhere: journal entry, metric, Event. (Taints and the health stream follow from the state.)

use std::{fmt, sync::Arc};

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};
use tracing::{error, info, warn};

use super::Api;
use crate::domain::notice::{Notice, Severity};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    reason: &'static str,
}

/// Where notices go.
pub(super) struct Outbox {
    notices: Family<Labels, Counter>,
    api: Arc<dyn Api>,
}

impl fmt::Debug for Outbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outbox").finish_non_exhaustive()
    }
}

impl Outbox {
    pub(super) fn new(registry: &mut Registry, api: Arc<dyn Api>) -> Self {
        let notices = Family::default();
        registry.sub_registry_with_prefix("engine").register("notices", "What happened, by reason", notices.clone());
        Self { notices, api }
    }

    /// Says a notice. Never blocks.
    pub(super) fn say(&self, notice: &Notice) {
        let reason = notice.reason();
        let claim = notice.claim();
        let uid = claim.map(|claim| claim.uid.as_str());
        let claim = claim.map(ToString::to_string);
        let message = notice.message();
        match notice.severity() {
            Severity::Info => info!(reason, claim, claim.uid = uid, "{message}"),
            Severity::Warning => warn!(reason, claim, claim.uid = uid, "{message}"),
            Severity::Error => error!(reason, claim, claim.uid = uid, "{message}"),
        }
        self.notices.get_or_create(&Labels { reason }).inc();
        if notice.makes_event() {
            self.api.event(notice);
        }
    }
}

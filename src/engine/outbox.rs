//! One notice, said everywhere: journal entry, metric, Event. (Taints and the health stream follow from the state.)

use std::{fmt, sync::Arc};

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};
use tracing::{error, info, warn};

use super::Api;
use crate::domain::{
    health::{Condition, codes_text},
    notice::{Notice, Severity},
};

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
        let npu = notice.device().map(ToString::to_string);
        let (mut condition, mut before, mut codes, mut kind) = (None, None, None, None);
        match notice {
            Notice::Health { from, to, codes: active, .. } => {
                condition = Some(to.as_str());
                before = from.map(Condition::as_str);
                codes = Some(codes_text(active));
            }
            Notice::Refused { refusal, .. } => kind = Some(refusal.kind().as_str()),
            _ => {}
        }
        let message = notice.message();
        macro_rules! journal {
            ($level:ident) => {
                $level!(reason, claim, claim.uid = uid, npu, condition, before, codes, kind, "{message}")
            };
        }
        match notice.severity() {
            Severity::Info => journal!(info),
            Severity::Warning => journal!(warn),
            Severity::Error => journal!(error),
        }
        self.notices.get_or_create(&Labels { reason }).inc();
        if notice.makes_event() {
            self.api.event(notice);
        }
    }
}

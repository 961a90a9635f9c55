//! What happened, as data: the engine's outbox turns one notice into Event, journal entry, metric and health stream.

use super::{
    claim::ClaimRef,
    health::Condition,
    model::Model,
    names::DeviceName,
    node::{Hold, HoldKind},
    refusal::{Kind, Refusal},
};

/// How much attention a notice wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// State changed as it should.
    Info,
    /// Something is degraded.
    Warning,
    /// A human must act.
    Error,
}

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Notice {
    /// A claim was prepared.
    Prepared {
        /// The claim.
        claim: ClaimRef,
        /// Its devices, for messages.
        devices: String,
        /// True if it was prepared before.
        replay: bool,
    },
    /// A claim was unprepared.
    Unprepared {
        /// The claim.
        claim: ClaimRef,
    },
    /// A call was refused.
    Refused {
        /// The claim.
        claim: ClaimRef,
        /// `prepare` or `unprepare`.
        operation: &'static str,
        /// Why.
        refusal: Refusal,
    },
    /// A card's health changed.
    Health {
        /// The card.
        device: DeviceName,
        /// Condition before, if there was one.
        from: Option<Condition>,
        /// Condition now.
        to: Condition,
        /// Codes that are active or held.
        codes: Vec<u32>,
        /// What is wrong, in words; empty if nothing is.
        why: String,
        /// Claims that live on the card.
        claims: Vec<ClaimRef>,
    },
    /// A card that was in the last good scan is not in this one.
    Lost {
        /// The card.
        device: DeviceName,
    },
    /// A card is new in this scan.
    Found {
        /// The card.
        device: DeviceName,
    },
    /// A card takes no new claims, or does again.
    Closed {
        /// The card.
        device: DeviceName,
        /// Why; `None` if it is open again.
        why: Option<String>,
    },
    /// An operator keeps claims from a card, or no longer does.
    OnHold {
        /// The card.
        device: DeviceName,
        /// What the operator did; `None` if claims come again.
        hold: Option<Hold>,
        /// Claims that live on the card.
        claims: Vec<ClaimRef>,
    },
    /// A vNPU of ours was destroyed by somebody else.
    VnpuLost {
        /// The claim that has it.
        claim: ClaimRef,
        /// The card.
        device: DeviceName,
        /// Its id.
        id: u32,
    },
    /// The node offers its cards in another way.
    Model {
        /// The slicing model.
        model: Model,
        /// Why it is no better one; empty if it is the best.
        why: String,
    },
    /// A damaged record was set aside.
    Quarantined {
        /// The claim's UID.
        uid: String,
        /// What is wrong.
        why: String,
    },
    /// A damaged record was rebuilt from its CDI file.
    Rebuilt {
        /// The claim's UID.
        uid: String,
    },
    /// A CDI file that no record owned was removed.
    Swept {
        /// The UID in its name.
        uid: String,
    },
    /// The vendor library, or what stands for it, changed state.
    Backend {
        /// Severity of the change.
        severity: Severity,
        /// What happened.
        what: String,
    },
}

impl Notice {
    /// How much attention it wants.
    #[must_use]
    pub fn severity(&self) -> Severity {
        match self {
            Self::Prepared { .. } | Self::Unprepared { .. } | Self::Found { .. } | Self::Closed { why: None, .. } => {
                Severity::Info
            }
            Self::OnHold { hold: None, .. } | Self::Health { to: Condition::Ok, .. } => Severity::Info,
            Self::Model { why, .. } if why.is_empty() => Severity::Info,
            Self::Health { to: Condition::Unknown | Condition::Warn, .. } => Severity::Warning,
            Self::Refused { refusal, .. } if refusal.kind() == Kind::Retry => Severity::Warning,
            Self::Backend { severity, .. } => *severity,
            Self::Health { .. } | Self::Lost { .. } | Self::Quarantined { .. } | Self::VnpuLost { .. } => {
                Severity::Error
            }
            Self::Closed { .. }
            | Self::OnHold { .. }
            | Self::Model { .. }
            | Self::Refused { .. }
            | Self::Rebuilt { .. }
            | Self::Swept { .. } => Severity::Warning,
        }
    }

    /// Reason of an Event: an upper-camel-case word.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Prepared { .. } => "NpuPrepared",
            Self::Unprepared { .. } => "NpuUnprepared",
            Self::Refused { .. } => "NpuRefused",
            Self::Health { .. } => "NpuHealthChanged",
            Self::Lost { .. } => "NpuLost",
            Self::Found { .. } => "NpuFound",
            Self::Closed { why: Some(_), .. } => "NpuClosed",
            Self::Closed { why: None, .. } => "NpuOpen",
            Self::OnHold { hold: Some(Hold { kind: HoldKind::Drain, .. }), .. } => "NpuDrained",
            Self::OnHold { hold: Some(_), .. } => "NpuCordoned",
            Self::OnHold { hold: None, .. } => "NpuUncordoned",
            Self::VnpuLost { .. } => "NpuVnpuLost",
            Self::Model { .. } => "NpuSlicingModel",
            Self::Quarantined { .. } => "NpuRecordQuarantined",
            Self::Rebuilt { .. } => "NpuRecordRebuilt",
            Self::Swept { .. } => "NpuCdiFileSwept",
            Self::Backend { .. } => "NpuBackend",
        }
    }

    /// True if an Event is made of it: what an admin must hear, not each claim that comes and goes.
    #[must_use]
    pub fn makes_event(&self) -> bool {
        !matches!(self, Self::Prepared { .. } | Self::Unprepared { .. } | Self::Swept { .. })
    }

    /// The claim that it is about.
    #[must_use]
    pub fn claim(&self) -> Option<&ClaimRef> {
        match self {
            Self::Prepared { claim, .. }
            | Self::Unprepared { claim }
            | Self::Refused { claim, .. }
            | Self::VnpuLost { claim, .. } => Some(claim),
            _ => None,
        }
    }

    /// The card that it is about.
    #[must_use]
    pub fn device(&self) -> Option<&DeviceName> {
        match self {
            Self::Health { device, .. }
            | Self::Lost { device }
            | Self::Found { device }
            | Self::Closed { device, .. }
            | Self::OnHold { device, .. }
            | Self::VnpuLost { device, .. } => Some(device),
            _ => None,
        }
    }

    /// Claims whose pods must hear of it.
    #[must_use]
    pub fn affected(&self) -> &[ClaimRef] {
        match self {
            Self::Health { claims, .. }
            | Self::OnHold { hold: Some(Hold { kind: HoldKind::Drain, .. }), claims, .. } => claims,
            _ => &[],
        }
    }

    /// The text.
    pub fn message(&self) -> String {
        match self {
            Self::Prepared { claim, devices, replay: false } => format!("claim {claim} prepared with {devices}"),
            Self::Prepared { claim, devices, replay: true } => format!("claim {claim} prepared again with {devices}"),
            Self::Unprepared { claim } => format!("claim {claim} unprepared"),
            Self::Refused { operation, refusal, .. } => format!("{operation} refused: {refusal}"),
            Self::Health { device, from, to, why, .. } => {
                let from = from.filter(|from| from != to).map_or_else(String::new, |from| format!(" (was {from})"));
                let why = if why.is_empty() { String::new() } else { format!(": {why}") };
                format!("health of {device} is {to}{from}{why}")
            }
            Self::Lost { device } => format!("{device} is no longer found on this node"),
            Self::Found { device } => format!("{device} was found on this node"),
            Self::Closed { device, why: Some(why) } => format!("{device} takes no new claims: {why}"),
            Self::Closed { device, why: None } => format!("{device} takes new claims again"),
            Self::OnHold { device, hold: None, .. } => format!("an operator lets claims have {device} again"),
            Self::OnHold { device, hold: Some(hold), .. } => {
                let why = if hold.reason.is_empty() { String::new() } else { format!(": {}", hold.reason) };
                format!("{device} is {} by an operator{why}", hold.kind.as_str())
            }
            Self::VnpuLost { claim, device, id } => {
                format!("vNPU {id} of claim {claim} on {device} was destroyed by somebody else; delete the pod")
            }
            Self::Model { model, why } if why.is_empty() => format!("slicing model is {model}"),
            Self::Model { model, why } => format!("slicing model is {model}: {why}"),
            Self::Quarantined { uid, why } => format!("the record of claim {uid} is damaged and was set aside: {why}"),
            Self::Rebuilt { uid } => format!("the record of claim {uid} was rebuilt from its CDI file"),
            Self::Swept { uid } => format!("the CDI file of claim {uid}, which no record owns, was removed"),
            Self::Backend { what, .. } => what.clone(),
        }
    }
}

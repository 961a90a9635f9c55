//! Why something is not done: typed, with the claim, device or file that it is about.

use jiff::Timestamp;

use super::{
    claim::{ClaimRef, RESULTS_MAX},
    health::Condition,
    node::Hold,
};

/// What a caller can do about a refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Try again later: nothing is wrong with the request.
    Retry,
    /// The same request will never succeed.
    Permanent,
    /// Something that the request names does not exist.
    NotFound,
    /// Somebody else holds what the request wants.
    Conflict,
    /// There is not enough of it.
    Exhausted,
}

impl Kind {
    /// Name as used in metrics and Event reasons.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Retry => "Retry",
            Self::Permanent => "Permanent",
            Self::NotFound => "NotFound",
            Self::Conflict => "Conflict",
            Self::Exhausted => "Exhausted",
        }
    }
}

/// A refusal. The text is what kubelet shows to the user of the pod.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The start-up scan has not ended yet.
    #[error("the NPUs of this node are not known yet ({0}); kubelet will try again")]
    NotScanned(String),
    /// What the API server keeps, and so the slicing model, is not known yet.
    #[error(
        "claim {claim} was allocated a part of device {device}, and the API server has not said yet which slicing model \
         it keeps; kubelet will try again"
    )]
    ModelUnknown {
        /// The claim.
        claim: ClaimRef,
        /// The device.
        device: String,
    },
    /// The claim has no device of this driver.
    #[error("claim {0} has no device of driver {1}")]
    NothingForUs(ClaimRef, String),
    /// More results than Kubernetes allows.
    #[error("claim {0} has {1} allocated devices; at most {RESULTS_MAX} are allowed")]
    TooManyDevices(ClaimRef, usize),
    /// The allocation names a pool that is not this node's.
    #[error("claim {claim} was allocated device {device} of pool {pool}, which is not the pool of this node ({ours})")]
    ForeignPool {
        /// The claim.
        claim: ClaimRef,
        /// Device of the allocation.
        device: String,
        /// Pool of the allocation.
        pool: String,
        /// Our pool.
        ours: String,
    },
    /// The device is not on the node (any more).
    #[error("device {device} of claim {claim} is not on this node: {why}; delete the pod so that it is scheduled anew")]
    DeviceGone {
        /// The claim.
        claim: ClaimRef,
        /// The device.
        device: String,
        /// What is known of it.
        why: String,
    },
    /// The device's health forbids new claims.
    #[error(
        "device {device} of claim {claim} is {condition} since {since:.0}: {why}; delete the pod, or let the claim tolerate \
         the taint {taint}"
    )]
    Unhealthy {
        /// The claim.
        claim: ClaimRef,
        /// The device.
        device: String,
        /// What the driver holds of it.
        condition: Condition,
        /// Since when.
        since: Timestamp,
        /// Codes and levels.
        why: String,
        /// Key of its taint.
        taint: String,
    },
    /// An operator keeps claims from the device.
    #[error(
        "device {device} of claim {claim} is {} by an operator since {:.0} ({}); delete the pod, or let the claim \
         tolerate the taint {taint}",
        hold.kind.as_str(), hold.since, if hold.reason.is_empty() { "no reason given" } else { &hold.reason }
    )]
    OnHold {
        /// The claim.
        claim: ClaimRef,
        /// The device.
        device: String,
        /// What the operator did.
        hold: Hold,
        /// Key of its taint.
        taint: String,
    },
    /// What an operator wants is in force, but is not on disk.
    #[error("{what}, but that cannot be written to disk and ends with the daemon: {why}")]
    NotKept {
        /// What is in force.
        what: String,
        /// Why it is not on disk.
        why: String,
    },
    /// Another claim holds the device.
    #[error("device {device} of claim {claim} is held by claim {holder} (UID {uid}) until kubelet unprepares that one")]
    Held {
        /// The claim.
        claim: ClaimRef,
        /// The device.
        device: String,
        /// Who holds it.
        holder: ClaimRef,
        /// UID of the holder.
        uid: String,
    },
    /// One claim names one device twice.
    #[error("claim {claim} was allocated device {device} twice")]
    Twice {
        /// The claim.
        claim: ClaimRef,
        /// The device.
        device: String,
    },
    /// The scheduler booked a share, and this build or node cannot cut one.
    #[error("claim {claim} was allocated a share of device {device}, but vNPUs are not cut on this node: {why}")]
    ShareNotCut {
        /// The claim.
        claim: ClaimRef,
        /// The device.
        device: String,
        /// Why not.
        why: String,
    },
    /// The memory that the claim asks for is no sensible number of bytes.
    #[error(
        "request {request} of claim {claim} asks for memCapacity {asked}, which is {bytes} to Kubernetes; write the unit, for example 10000Mi"
    )]
    BareNumber {
        /// The claim.
        claim: ClaimRef,
        /// The request.
        request: String,
        /// What it asks for.
        asked: String,
        /// What that means.
        bytes: String,
    },
    /// What the scheduler booked is no size that the card can be cut into.
    #[error("claim {claim} was booked {booked} of {device}, which can be cut into {valid} only")]
    BookedSize {
        /// The claim.
        claim: ClaimRef,
        /// The device.
        device: String,
        /// What was booked.
        booked: String,
        /// What can be.
        valid: String,
    },
    /// The scheduler booked less than the claim asks for.
    #[error("claim {claim} asks for {asked} of memory, but was booked {booked} of {device}")]
    BookedLess {
        /// The claim.
        claim: ClaimRef,
        /// The device.
        device: String,
        /// What it asks for.
        asked: String,
        /// What was booked.
        booked: String,
    },
    /// The allocation names a placeholder.
    #[error(
        "claim {claim} was allocated the placeholder {device}; select NPUs with device.attributes[\"npu.huawei.com\"].type == \"npu\", and switch on the gate DRAPartitionableDevices"
    )]
    Placeholder {
        /// The claim.
        claim: ClaimRef,
        /// The device.
        device: String,
    },
    /// The card takes no new claims.
    #[error("{device} takes no new claims, so claim {claim} cannot have it: {why}")]
    Closed {
        /// The claim.
        claim: ClaimRef,
        /// The device.
        device: String,
        /// Why.
        why: String,
    },
    /// The card has not enough left.
    #[error("there is no room for {template} of claim {claim} on {device}: {left}")]
    NoRoom {
        /// The claim.
        claim: ClaimRef,
        /// The card.
        device: String,
        /// The template.
        template: String,
        /// What is left.
        left: String,
    },
    /// A process runs on the card, or may.
    #[error("{device} is not cut for claim {claim}: {why}; the first cut of a card disturbs what runs on it")]
    CardBusy {
        /// The claim.
        claim: ClaimRef,
        /// The card.
        device: String,
        /// Which processes, or why they are not known.
        why: String,
    },
    /// The new vNPU is not what was asked for; it was destroyed again.
    #[error("claim {claim} wanted {wanted} on {device}, but the card made {made}; it was destroyed again")]
    WrongSize {
        /// The claim.
        claim: ClaimRef,
        /// The card.
        device: String,
        /// Template and size that were asked for.
        wanted: String,
        /// Template and size that were made.
        made: String,
    },
    /// The library gave the new vNPU an id that another claim's record names; it was destroyed again.
    #[error(
        "the library made vNPU {id} on {device} for claim {claim}, but the record of claim {holder} names that id; it was destroyed again, and can be made once that claim is prepared again or released"
    )]
    IdTaken {
        /// The claim.
        claim: ClaimRef,
        /// The card.
        device: String,
        /// The id.
        id: u32,
        /// Whose record names it.
        holder: ClaimRef,
    },
    /// A vNPU of the claim is gone, and it was not us.
    #[error("vNPU {id} of claim {claim} on {device} was destroyed by somebody else; delete the pod")]
    VnpuLost {
        /// The claim.
        claim: ClaimRef,
        /// The card.
        device: String,
        /// Its id.
        id: u32,
    },
    /// Which vNPU is the claim's cannot be told.
    #[error("which of the vNPUs {ids} on {device} belongs to claim {claim} cannot be told; none is destroyed")]
    Disputed {
        /// The claim.
        claim: ClaimRef,
        /// The card.
        device: String,
        /// The candidates.
        ids: String,
    },
    /// An unprepare of the claim has begun and not ended.
    #[error("claim {0} is being released; kubelet will try again")]
    Releasing(ClaimRef),
    /// An operator's wish that would harm.
    #[error("{what}: {why}")]
    Denied {
        /// What was wished.
        what: String,
        /// Why not.
        why: String,
    },
    /// An operator named something that is not there.
    #[error("there is no {0}")]
    NoSuch(String),
    /// A vendor call for an operator failed.
    #[error("{what} failed: {why}")]
    OperatorFailed {
        /// What was tried.
        what: String,
        /// The error.
        why: String,
    },
    /// The configuration of claim or class is not valid.
    #[error("the configuration of claim {claim} is not valid: {why}")]
    BadConfig {
        /// The claim.
        claim: ClaimRef,
        /// Field, value and what is allowed.
        why: String,
    },
    /// The claim is prepared with other devices than its allocation names now.
    #[error("claim {claim} is prepared with {prepared}, but is now allocated {allocated}; it must be unprepared first")]
    Reallocated {
        /// The claim.
        claim: ClaimRef,
        /// Devices of the record.
        prepared: String,
        /// Devices of the allocation.
        allocated: String,
    },
    /// The claim's record is damaged and could not be rebuilt.
    #[error(
        "the record of claim {uid} is damaged ({why}) and what it holds is not known; when its pod is gone, run: npuctl claims release {uid} --force"
    )]
    Quarantined {
        /// UID of the claim.
        uid: String,
        /// What is wrong with the record.
        why: String,
    },
    /// The claim could not be read.
    #[error("claim {claim} cannot be read: {why}")]
    ClaimUnreadable {
        /// The claim.
        claim: ClaimRef,
        /// What the API server or the network said.
        why: String,
        /// True if it may be read later.
        retry: bool,
    },
    /// The API server has no such claim.
    #[error("claim {0} does not exist in the API server")]
    ClaimMissing(ClaimRef),
    /// The API server has another claim under that name.
    #[error("claim {claim} was replaced: kubelet asks for UID {}, the API server has {found}", claim.uid)]
    ClaimReplaced {
        /// The claim that kubelet asks for.
        claim: ClaimRef,
        /// UID in the API server.
        found: String,
    },
    /// The scheduler has not allocated the claim.
    #[error("claim {0} is not allocated")]
    NotAllocated(ClaimRef),
    /// Something in the call is not a valid name.
    #[error("{0}")]
    BadName(String),
    /// The node could not do it: disk, CDI directory, vendor library.
    #[error("{what} for claim {claim} failed: {why}")]
    Failed {
        /// The claim.
        claim: ClaimRef,
        /// The step.
        what: &'static str,
        /// The error.
        why: String,
    },
    /// An Unprepare of the same claim overtook this Prepare.
    #[error("claim {0} was unprepared while it was being prepared")]
    Overtaken(ClaimRef),
    /// The daemon ends.
    #[error("the driver is stopping; kubelet will try again")]
    Stopping,
    /// A defect of ours; the claim's task ended.
    #[error("internal error while serving claim {0}: {1}")]
    Internal(ClaimRef, String),
}

impl Refusal {
    /// What a caller can do about it: the one table behind gRPC codes, Event reasons and exit codes.
    #[must_use]
    pub fn kind(&self) -> Kind {
        match self {
            Self::NotScanned(_)
            | Self::ModelUnknown { .. }
            | Self::Failed { .. }
            | Self::Overtaken(_)
            | Self::Stopping
            | Self::Releasing(_)
            | Self::CardBusy { .. }
            | Self::IdTaken { .. }
            | Self::OperatorFailed { .. }
            | Self::Internal(..)
            | Self::NotKept { .. }
            | Self::ClaimUnreadable { retry: true, .. } => Kind::Retry,
            Self::DeviceGone { .. }
            | Self::ClaimMissing(_)
            | Self::NotAllocated(_)
            | Self::ClaimReplaced { .. }
            | Self::NoSuch(_) => Kind::NotFound,
            Self::Held { .. }
            | Self::Reallocated { .. }
            | Self::Quarantined { .. }
            | Self::Disputed { .. }
            | Self::Denied { .. }
            | Self::VnpuLost { .. } => Kind::Conflict,
            Self::Unhealthy { .. } | Self::OnHold { .. } | Self::Closed { .. } | Self::NoRoom { .. } => Kind::Exhausted,
            Self::NothingForUs(..)
            | Self::TooManyDevices(..)
            | Self::ForeignPool { .. }
            | Self::Twice { .. }
            | Self::ShareNotCut { .. }
            | Self::BareNumber { .. }
            | Self::BookedSize { .. }
            | Self::BookedLess { .. }
            | Self::Placeholder { .. }
            | Self::WrongSize { .. }
            | Self::BadConfig { .. }
            | Self::BadName(_)
            | Self::ClaimUnreadable { retry: false, .. } => Kind::Permanent,
        }
    }
}

//! A `ResourceClaim` as far as the driver is concerned.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Serialize};

use super::{config::NpuConfig, names::InvalidName, quantity::Quantity, slice::Taint};

/// Most results that an allocation may have (`resource.k8s.io/v1`).
pub const RESULTS_MAX: usize = 32;

/// UID of a claim: names its record and its CDI file, so it may hold only letters, digits and `-`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ClaimUid(String);

impl ClaimUid {
    /// Takes a UID as kubelet sends it.
    pub fn new(text: impl Into<String>) -> Result<Self, InvalidName> {
        let value = text.into();
        let bytes = value.as_bytes();
        let fits = |b: &u8| b.is_ascii_alphanumeric();
        if bytes.len() <= 63
            && bytes.first().is_some_and(fits)
            && bytes.last().is_some_and(fits)
            && bytes.iter().all(|b| fits(b) || *b == b'-')
        {
            Ok(Self(value))
        } else {
            Err(InvalidName { what: "claim UID", value, rule: "letters, digits and '-', at most 63 bytes" })
        }
    }

    /// The UID as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for ClaimUid {
    type Error = InvalidName;
    fn try_from(text: String) -> Result<Self, InvalidName> {
        Self::new(text)
    }
}

impl From<ClaimUid> for String {
    fn from(uid: ClaimUid) -> Self {
        uid.0
    }
}

impl fmt::Display for ClaimUid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Which claim: what kubelet names in every call.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClaimRef {
    /// Namespace; empty only for a claim that was rebuilt and never told it.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// UID: a claim made anew under the same name is another claim.
    pub uid: ClaimUid,
}

impl fmt::Display for ClaimRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// A claim with the allocation that the scheduler gave it, as read from the API server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllocatedClaim {
    /// Which claim.
    pub claim: ClaimRef,
    /// Every device result, those of other drivers included.
    pub results: Vec<AllocatedDevice>,
    /// Opaque configuration, in the order of precedence (class first, claim after), all drivers'.
    pub config: Vec<OpaqueConfig>,
    /// Memory that the claim's spec asks for, by request (`main` or `main/sub`), before the scheduler rounded it.
    pub asked_memory: BTreeMap<String, Quantity>,
}

/// One device of an allocation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllocatedDevice {
    /// Request, possibly `main/sub`.
    pub request: String,
    /// Driver that owns the device.
    pub driver: String,
    /// Pool.
    pub pool: String,
    /// Device.
    pub device: String,
    /// True if the claim only looks and owns nothing.
    pub admin_access: bool,
    /// Share of a shared device.
    pub share_id: Option<String>,
    /// What the scheduler booked of a shared device.
    pub consumed_capacity: BTreeMap<String, Quantity>,
    /// Taints that the claim puts up with.
    pub tolerations: Vec<Toleration>,
}

impl AllocatedDevice {
    /// The request without its sub-request: what kubelet knows.
    #[must_use]
    pub fn main_request(&self) -> &str {
        self.request.split('/').next().unwrap_or(&self.request)
    }
}

/// A toleration of a claim's request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Toleration {
    /// Key of the taint; empty means all keys.
    pub key: String,
    /// Value of the taint; `None` means all values (operator `Exists`).
    pub value: Option<String>,
    /// Effect of the taint; empty means all effects.
    pub effect: String,
}

impl Toleration {
    /// True if a taint is put up with, by Kubernetes' rules.
    #[must_use]
    pub fn tolerates(&self, taint: &Taint) -> bool {
        (self.effect.is_empty() || self.effect == taint.effect.as_str())
            && (self.key.is_empty() || self.key == taint.key)
            && self.value.as_ref().is_none_or(|value| *value == taint.value)
    }
}

/// Opaque configuration of a class or a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpaqueConfig {
    /// True if it comes from the `DeviceClass`.
    pub from_class: bool,
    /// Requests that it is for; empty means all.
    pub requests: Vec<String>,
    /// Driver that it is for.
    pub driver: String,
    /// What it says, or why it cannot be read; for other drivers an empty one.
    pub parameters: Result<NpuConfig, String>,
}

/// One device of kubelet's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreparedDevice {
    /// Main request names that the device is for.
    pub request_names: Vec<String>,
    /// Pool.
    pub pool: String,
    /// Device.
    pub device: String,
    /// Fully qualified CDI device ids, `<vendor>/<class>=<name>`.
    pub cdi_device_ids: Vec<String>,
    /// Share of a shared device.
    pub share_id: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uid_can_never_leave_its_directory() {
        assert!(ClaimUid::new("8a1c1f0e-55aa-4c6f-9e57-1b2c3d4e5f60").is_ok());
        for bad in ["", "../x", "a/b", "-a", "a-", ".", "a_b", "ü", &"a".repeat(64)] {
            assert!(ClaimUid::new(bad).is_err(), "{bad}");
        }
    }
}

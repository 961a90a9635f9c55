//! Opaque configuration of claims and classes: what a user may say beyond memory.
//!
//! ```yaml
//! apiVersion: npu.huawei.com/v1
//! kind: NpuConfig
//! vnpu: {template: vir10_3c_16g_nm}
//! ```

use serde::Deserialize;

use super::claim::{AllocatedClaim, AllocatedDevice};

/// The only version that there is.
pub const API_VERSION: &str = "npu.huawei.com/v1";
/// The only kind that there is.
pub const KIND: &str = "NpuConfig";

/// Configuration of one or more requests.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NpuConfig {
    /// [`API_VERSION`].
    pub api_version: String,
    /// [`KIND`].
    pub kind: String,
    /// How a part of a card is cut.
    #[serde(default)]
    pub vnpu: Option<VnpuConfig>,
}

/// How a part of a card is cut.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct VnpuConfig {
    /// Template by name; else the plain one of the booked size.
    #[serde(default)]
    pub template: Option<String>,
}

impl NpuConfig {
    /// Checks what the decoder cannot.
    pub fn check(self) -> Result<Self, String> {
        if self.api_version != API_VERSION {
            return Err(format!("apiVersion is {:?}; allowed is {API_VERSION}", self.api_version));
        }
        if self.kind != KIND {
            return Err(format!("kind is {:?}; allowed is {KIND}", self.kind));
        }
        Ok(self)
    }
}

/// The template that the configuration names for a result: the last entry that is for its request counts, those of the
/// class come before those of the claim. Every entry of ours must be valid, whether it counts or not.
pub fn template_of(claim: &AllocatedClaim, result: &AllocatedDevice, driver: &str) -> Result<Option<String>, String> {
    let mut template = None;
    let ours = claim.config.iter().filter(|config| config.driver == driver);
    for (from_class, config) in ours
        .clone()
        .filter(|config| config.from_class)
        .chain(ours.filter(|config| !config.from_class))
        .map(|config| (config.from_class, config))
    {
        let parameters = config.parameters.as_ref().map_err(|why| {
            format!("{}: {why}", if from_class { "configuration of the class" } else { "configuration of the claim" })
        })?;
        let meant = config.requests.is_empty()
            || config.requests.iter().any(|request| *request == result.request || request == result.main_request());
        if meant {
            template = parameters.vnpu.as_ref().and_then(|vnpu| vnpu.template.clone());
        }
    }
    Ok(template)
}

//! The part of the CDI specification, version 0.5.0, that we write and read. The order of fields is that of the file.

use serde::{Deserialize, Serialize};

/// Version that is written: the lowest that has `hostPath` and device names that begin with a digit. Old container
/// runtimes refuse the whole file of a newer one.
pub(super) const VERSION: &str = "0.5.0";

/// A CDI file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Spec {
    pub(super) cdi_version: String,
    /// `<vendor>/<class>`.
    pub(super) kind: String,
    pub(super) devices: Vec<Device>,
    /// What every container gets that uses any of the devices.
    #[serde(default, skip_serializing_if = "Edits::is_empty")]
    pub(super) container_edits: Edits,
}

/// A device that a container can name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Device {
    pub(super) name: String,
    /// Never empty: a runtime refuses the whole file for one empty device.
    pub(super) container_edits: Edits,
}

/// What is changed in a container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Edits {
    /// `NAME=value`; replaces what the image sets.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) env: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) device_nodes: Vec<DeviceNode>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) mounts: Vec<Mount>,
}

impl Edits {
    pub(super) fn is_empty(&self) -> bool {
        self.env.is_empty() && self.device_nodes.is_empty() && self.mounts.is_empty()
    }
}

/// A device node. Type and numbers are left out: the runtime reads them when it creates the container, and a reloaded
/// vendor driver may have changed them since. The user is left out too: with one, root without capabilities could not
/// open the node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct DeviceNode {
    /// In the container.
    pub(super) path: String,
    /// On the host, if it is another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) host_path: Option<String>,
    /// Permission bits.
    pub(super) file_mode: u32,
    /// Of the cgroup's device rule.
    pub(super) permissions: String,
    pub(super) gid: u32,
}

/// A bind mount.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Mount {
    pub(super) host_path: String,
    pub(super) container_path: String,
    pub(super) options: Vec<String>,
}

//! The settings in which the cases run: a Kubernetes release, a containerd, and the gates that an administrator set.

use crate::programs::Module;

/// A Kubernetes release with its gates.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kubernetes {
    /// Its programs.
    pub(crate) module: Module,
    /// Minor version.
    pub(crate) minor: u32,
    /// Feature gates of all four programs; empty for the defaults.
    pub(crate) gates: &'static str,
    /// Gates of the API server alone.
    pub(crate) server_gates: &'static str,
    /// API versions that the API server serves beside its defaults.
    pub(crate) serves: &'static str,
    /// The shipped policy that gives bare numbers their unit, if this server can have one.
    pub(crate) policy: Option<&'static str>,
}

impl Kubernetes {
    /// Whether the API server keeps `capacity` in claims and shared devices in slices.
    pub(crate) fn shares(&self) -> bool {
        self.minor >= 36 || self.gates.contains("DRAConsumableCapacity")
    }

    /// Whether it keeps counters.
    pub(crate) fn partitions(&self) -> bool {
        self.minor >= 36 || self.gates.contains("DRAPartitionableDevices")
    }

    /// Whether it keeps taints of devices.
    pub(crate) fn taints(&self) -> bool {
        self.minor >= 36 || self.gates.contains("DRADeviceTaints")
    }
}

/// One way to set up a node and its control plane: a set of the catalogue.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setting {
    /// Its name in the catalogue.
    pub(crate) name: &'static str,
    /// What runs at first.
    pub(crate) kubernetes: Kubernetes,
    /// What the case of this setting upgrades to.
    pub(crate) next: Option<Kubernetes>,
    /// containerd built from its module; none: Debian's own.
    pub(crate) containerd: Option<Module>,
}

const DEFAULT_1_34: Kubernetes =
    Kubernetes { module: Module::K1_34, minor: 34, gates: "", server_gates: "", serves: "", policy: None };

/// The gates that the documentation names for 1.34. The scheduler waits for ever for v1alpha3 if taints are on and the
/// server does not serve it.
const GATED_1_34: Kubernetes = Kubernetes {
    gates: "DRAConsumableCapacity=true,DRAPartitionableDevices=true,DRADeviceTaints=true,\
            DRAResourceClaimDeviceStatus=true,ResourceHealthStatus=true",
    server_gates: "MutatingAdmissionPolicy=true",
    serves: "resource.k8s.io/v1alpha3=true,admissionregistration.k8s.io/v1beta1=true",
    policy: Some("memory-policy-v1beta1.yaml"),
    ..DEFAULT_1_34
};

const DEFAULT_1_36: Kubernetes =
    Kubernetes { module: Module::K1_36, minor: 36, policy: Some("memory-policy.yaml"), ..DEFAULT_1_34 };
const DEFAULT_1_37: Kubernetes = Kubernetes { module: Module::K1_37, minor: 37, ..DEFAULT_1_36 };

/// All settings, in the order in which they run.
pub(crate) const SETTINGS: [Setting; 6] = [
    Setting { name: "1.34.3", kubernetes: DEFAULT_1_34, next: None, containerd: None },
    Setting { name: "1.34.3-gated", kubernetes: GATED_1_34, next: None, containerd: None },
    Setting { name: "1.36.3", kubernetes: DEFAULT_1_36, next: None, containerd: Some(Module::CONTAINERD) },
    // The three minutes' soak has a node of its own, so that the other cases need not wait for it.
    Setting { name: "1.37.2-soak", kubernetes: DEFAULT_1_37, next: None, containerd: Some(Module::CONTAINERD) },
    Setting { name: "1.37.2", kubernetes: DEFAULT_1_37, next: None, containerd: Some(Module::CONTAINERD) },
    Setting { name: "upgrade", kubernetes: GATED_1_34, next: Some(DEFAULT_1_36), containerd: None },
];

/// The settings that a `VERSION` means: several words, each a release (1.34.3 in both its settings) or a setting.
///
/// # Errors
/// The word that means none.
pub(crate) fn named(words: &str) -> Result<Vec<&'static str>, String> {
    let mut names = Vec::new();
    for word in words.split([' ', ',']).filter(|word| !word.is_empty()) {
        let family = format!("{word}-");
        let before = names.len();
        let meant = SETTINGS.iter().filter(|one| one.name == word || one.name.starts_with(&family));
        names.extend(meant.map(|setting| setting.name));
        if names.len() == before {
            return Err(word.to_owned());
        }
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_means_all_its_settings_and_a_setting_itself() {
        assert_eq!(named("1.34.3").unwrap(), ["1.34.3", "1.34.3-gated"]);
        assert_eq!(named("1.34.3-gated, 1.36.3").unwrap(), ["1.34.3-gated", "1.36.3"]);
        assert_eq!(named("1.35"), Err("1.35".to_owned()));
        assert!(named("").unwrap().is_empty());
    }
}

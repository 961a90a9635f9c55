//! The naming rules that Kubernetes and CDI impose, in one place.
//!
//! Limits are those of the `resource.k8s.io/v1` API validation and of the CDI specification.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Longest DNS label, in bytes.
pub const DNS_LABEL_MAX: usize = 63;
/// Longest string attribute of a device, in bytes.
pub const ATTRIBUTE_STRING_MAX: usize = 64;
/// Longest C identifier in an attribute or capacity name, in bytes.
pub const IDENTIFIER_MAX: usize = 32;
/// Longest path of a unix socket, in bytes, without the terminating NUL.
pub const SOCKET_PATH_MAX: usize = 107;

/// Why a name was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} {value:?} is not valid: {rule}")]
pub struct InvalidName {
    /// What kind of name it should have been.
    pub what: &'static str,
    /// The offending text.
    pub value: String,
    /// The rule that it breaks.
    pub rule: &'static str,
}

/// True for an RFC 1123 label: lower-case alphanumerics and `-`, alphanumeric at both ends, at most 63 bytes.
#[must_use]
pub fn is_dns_label(text: &str) -> bool {
    let bytes = text.as_bytes();
    let ends = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    !bytes.is_empty()
        && bytes.len() <= DNS_LABEL_MAX
        && bytes.iter().all(|b| ends(b) || *b == b'-')
        && bytes.first().is_some_and(ends)
        && bytes.last().is_some_and(ends)
}

/// True for an RFC 1123 subdomain: labels joined by `.`, at most 253 bytes.
pub fn is_dns_subdomain(text: &str) -> bool {
    text.len() <= 253 && text.split('.').all(is_dns_label)
}

/// True for a C identifier of at most 32 bytes, the form of an attribute name without domain.
#[must_use]
pub fn is_identifier(text: &str) -> bool {
    let bytes = text.as_bytes();
    bytes.len() <= IDENTIFIER_MAX
        && bytes.first().is_some_and(|b| b.is_ascii_alphabetic() || *b == b'_')
        && bytes.iter().all(|b| b.is_ascii_alphanumeric() || *b == b'_')
}

/// True for an attribute or capacity name: an identifier, optionally behind `domain/` of at most 63 bytes.
#[must_use]
pub fn is_qualified_name(text: &str) -> bool {
    match text.split_once('/') {
        None => is_identifier(text),
        Some((domain, name)) => domain.len() <= DNS_LABEL_MAX && is_dns_subdomain(domain) && is_identifier(name),
    }
}

/// True for the name of a CDI device: alphanumerics and `_ - . :`, alphanumeric at both ends.
pub fn is_cdi_device_name(text: &str) -> bool {
    let bytes = text.as_bytes();
    bytes.iter().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.' | b':'))
        && bytes.first().is_some_and(u8::is_ascii_alphanumeric)
        && bytes.last().is_some_and(u8::is_ascii_alphanumeric)
}

/// Makes any text fit for a string attribute: control characters and replacement characters go, at most 64 bytes,
/// cut at a character boundary.
///
/// One gate for every string that comes from hardware: a single longer one would make the API server refuse a
/// whole slice.
#[must_use]
pub fn attribute_text(text: &str) -> String {
    let mut out = String::new();
    for c in text.trim().chars().filter(|c| !c.is_control() && *c != char::REPLACEMENT_CHARACTER) {
        if out.len() + c.len_utf8() > ATTRIBUTE_STRING_MAX {
            break;
        }
        out.push(c);
    }
    out
}

/// Turns any text into a DNS label: upper case is lowered, other bytes become `-`, ends are trimmed, 63 bytes at most.
/// Empty if nothing is left.
#[must_use]
pub fn label_from(text: &str) -> String {
    let mapped: String = text
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' })
        .take(DNS_LABEL_MAX)
        .collect();
    mapped.trim_matches('-').to_owned()
}

macro_rules! name_type {
    ($(#[$doc:meta])* $type:ident, $what:literal, $rule:literal, $check:expr) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $type(String);

        impl $type {
            /// Takes a name that keeps the rule.
            pub fn new(text: impl Into<String>) -> Result<Self, InvalidName> {
                let value = text.into();
                let check: fn(&str) -> bool = $check;
                if check(&value) { Ok(Self(value)) } else { Err(InvalidName { what: $what, value, rule: $rule }) }
            }

            /// The name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<String> for $type {
            type Error = InvalidName;
            fn try_from(text: String) -> Result<Self, InvalidName> {
                Self::new(text)
            }
        }

        impl std::str::FromStr for $type {
            type Err = InvalidName;
            fn from_str(text: &str) -> Result<Self, InvalidName> {
                Self::new(text)
            }
        }

        impl From<$type> for String {
            fn from(name: $type) -> Self {
                name.0
            }
        }

        impl AsRef<str> for $type {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

name_type!(
    /// Name of a device in our pool, for example `npu-0`: a DNS label.
    DeviceName,
    "device name",
    "lower-case letters, digits and '-', at most 63 bytes",
    is_dns_label
);
name_type!(
    /// Name of a Kubernetes node: a DNS subdomain.
    NodeName,
    "node name",
    "a DNS subdomain: lower-case letters, digits, '-' and '.', at most 253 bytes",
    is_dns_subdomain
);
name_type!(
    /// Name of a DRA driver, for example `npu.huawei.com`: a DNS subdomain of at most 63 bytes.
    DriverName,
    "driver name",
    "a DNS subdomain of at most 63 bytes",
    |text| text.len() <= DNS_LABEL_MAX && is_dns_subdomain(text)
);
name_type!(
    /// Name of a pool: one or more DNS subdomains joined by `/`, at most 253 bytes.
    PoolName,
    "pool name",
    "DNS subdomains joined by '/', at most 253 bytes",
    |text| text.len() <= 253 && text.split('/').all(is_dns_subdomain)
);
name_type!(
    /// Instance id of a daemon in a rolling update: letters, digits and `-`, at most 63 bytes.
    InstanceId,
    "instance id",
    "letters, digits and '-', at most 63 bytes",
    |text| !text.is_empty() && text.len() <= 63 && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
);

impl PoolName {
    /// Our pool of a node, `<node>/npu`: no other driver may use it, or the scheduler mixes up its counters.
    ///
    /// A node name of 250 bytes or more leaves no room and is refused.
    pub fn of_node(node: &NodeName) -> Result<Self, InvalidName> {
        Self::new(format!("{node}/npu"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dns_labels_keep_the_rule() {
        for good in ["a", "npu-0", "0a", &"a".repeat(63)] {
            assert!(is_dns_label(good), "{good}");
        }
        for bad in ["", "-a", "a-", "A", "a_b", "a.b", &"a".repeat(64), "ü"] {
            assert!(!is_dns_label(bad), "{bad}");
        }
    }

    #[test]
    fn qualified_names_have_an_identifier_and_at_most_one_domain() {
        for good in ["chipName", "_x", "resource.kubernetes.io/pcieRoot", "a/b"] {
            assert!(is_qualified_name(good), "{good}");
        }
        for bad in ["Bus-Id", "", "a/b/c", "A/b", "9x", &"a".repeat(33), "/b", "a/"] {
            assert!(!is_qualified_name(bad), "{bad}");
        }
    }

    #[test]
    fn cdi_device_names_may_start_with_a_digit_and_hold_a_bus_id() {
        assert!(is_cdi_device_name("0f3c_pci-0000:c1:00.0"));
        for bad in ["", "_a", "a_", "a/b", "a b", "ü"] {
            assert!(!is_cdi_device_name(bad), "{bad}");
        }
    }

    #[test]
    fn attribute_text_is_cut_at_a_character_boundary_and_loses_control_characters() {
        assert_eq!(attribute_text(" 910B4\0\n "), "910B4");
        let long = format!("{}é", "x".repeat(63));
        assert_eq!(attribute_text(&long), "x".repeat(63));
        assert_eq!(attribute_text(&"y".repeat(200)).len(), 64);
        assert_eq!(attribute_text("a\u{fffd}b"), "ab");
    }

    #[test]
    fn the_pool_of_a_node_carries_its_name() {
        let node = NodeName::new("worker-3.example").unwrap();
        assert_eq!(PoolName::of_node(&node).unwrap().as_str(), "worker-3.example/npu");
        assert!(NodeName::new("Worker_3").unwrap_err().to_string().contains("node name \"Worker_3\" is not valid"));
    }

    #[test]
    fn a_label_is_made_from_any_text() {
        assert_eq!(label_from("vir05_1c_8g"), "vir05-1c-8g");
        assert_eq!(label_from("--"), "");
    }
}

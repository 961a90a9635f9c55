//! The API's limits, checked before anything is sent: a device that breaks one is left out with the rule's name, because
//! the API server would refuse the whole slice for it.

use std::collections::BTreeSet;

use crate::domain::{
    names::{ATTRIBUTE_STRING_MAX, is_dns_label, is_dns_subdomain, is_qualified_name},
    slice::{Attribute, DEVICES_PER_SLICE, Device, Pool},
};

use super::status::Gates;

/// Most attributes and capacities of a device, together.
const PROPERTIES_MAX: usize = 32;

/// The pool with what the API server takes, and what was left out and why.
pub(crate) fn within(pool: &Pool, gates: &Gates) -> (Pool, Vec<String>) {
    // Before 1.35 a device has at most 4 taints; as long as the version is unknown the smaller number is safe.
    let taints_max = if gates.server.as_ref().is_some_and(|server| server.since(35)) { 16 } else { 4 };
    let mut left_out = Vec::new();
    let mut names = BTreeSet::new();
    let mut out = pool.clone();
    for slice in &mut out.slices {
        let mut kept = 0;
        slice.devices.retain(|device| {
            let broken = broken_rule(device, pool.driver.as_str(), taints_max)
                .or_else(|| (!names.insert(device.name.clone())).then(|| "its name is used twice".to_owned()))
                .or_else(|| {
                    (kept == DEVICES_PER_SLICE).then(|| format!("its slice has more than {DEVICES_PER_SLICE} devices"))
                });
            match broken {
                None => {
                    kept += 1;
                    true
                }
                Some(why) => {
                    left_out.push(format!("device {:?} is not published: {why}", device.name));
                    false
                }
            }
        });
    }
    (out, left_out)
}

/// The first rule that a device breaks.
fn broken_rule(device: &Device, driver: &str, taints_max: usize) -> Option<String> {
    if !is_dns_label(&device.name) {
        return Some("its name is no DNS label of at most 63 bytes".to_owned());
    }
    let properties = device.attributes.len() + device.capacity.len();
    if properties > PROPERTIES_MAX {
        return Some(format!("it has {properties} attributes and capacities, at most {PROPERTIES_MAX} are allowed"));
    }
    for name in device.attributes.keys().chain(device.capacity.keys()) {
        if !is_qualified_name(name) {
            return Some(format!("{name:?} is no name of an attribute or capacity"));
        }
        if name.split_once('/').is_some_and(|(domain, _)| domain == driver) {
            return Some(format!("{name:?} must not carry the driver's own domain"));
        }
    }
    for (name, value) in &device.attributes {
        if let Attribute::Text(text) = value
            && text.len() > ATTRIBUTE_STRING_MAX
        {
            return Some(format!(
                "attribute {name} has {} bytes, at most {ATTRIBUTE_STRING_MAX} are allowed",
                text.len()
            ));
        }
    }
    if device.taints.len() > taints_max {
        return Some(format!("it has {} taints, at most {taints_max} are allowed", device.taints.len()));
    }
    for (index, taint) in device.taints.iter().enumerate() {
        if !is_label_key(&taint.key) {
            return Some(format!("{:?} is no key of a taint", taint.key));
        }
        if !taint.value.is_empty() && !is_label_name(&taint.value) {
            return Some(format!("{:?} is no value of a taint", taint.value));
        }
        if device.taints.iter().take(index).any(|other| other.key == taint.key && other.effect == taint.effect) {
            return Some(format!("taint {} stands twice with one effect", taint.key));
        }
    }
    None
}

/// True for the key of a label or taint: a name, optionally behind a DNS subdomain and `/`.
fn is_label_key(text: &str) -> bool {
    match text.split_once('/') {
        None => is_label_name(text),
        Some((domain, name)) => is_dns_subdomain(domain) && is_label_name(name),
    }
}

/// True for the name part of a label key and for a label's value: alphanumerics and `-_.`, at most 63 bytes.
fn is_label_name(text: &str) -> bool {
    let bytes = text.as_bytes();
    bytes.len() <= 63
        && bytes.iter().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
        && bytes.first().is_some_and(u8::is_ascii_alphanumeric)
        && bytes.last().is_some_and(u8::is_ascii_alphanumeric)
}

#[cfg(test)]
mod tests {
    use crate::domain::{
        names::{DriverName, PoolName},
        quantity::Quantity,
        slice::{Capacity, Effect, Slice, Taint},
    };

    use super::*;

    fn device(name: &str) -> Device {
        Device { name: name.into(), ..Device::default() }
    }

    fn taint(key: &str, value: &str) -> Taint {
        Taint { key: key.into(), value: value.into(), effect: Effect::NoSchedule }
    }

    fn check(devices: Vec<Device>) -> (Vec<String>, Vec<String>) {
        let pool = Pool {
            driver: DriverName::new("npu.huawei.com").unwrap(),
            name: PoolName::new("n/npu").unwrap(),
            slices: vec![Slice { devices, ..Slice::default() }],
        };
        let (pool, left_out) = within(&pool, &Gates::default());
        (pool.slices[0].devices.iter().map(|d| d.name.clone()).collect(), left_out)
    }

    #[test]
    fn a_device_that_breaks_a_rule_is_left_out_and_the_others_stay() {
        let attribute = |name: &str, value| {
            let mut device = device("bad");
            device.attributes.insert(name.into(), value);
            device
        };
        let mut many = device("bad");
        for n in 0..33 {
            many.capacity.insert(format!("c{n}"), Capacity::plain(Quantity::count(1)));
        }
        let mut tainted = device("bad");
        tainted.taints = (0..5).map(|n| taint(&format!("k{n}"), "")).collect();
        let with_taint = |key: &str, value: &str| Device { taints: vec![taint(key, value)], ..device("bad") };
        let twice = Device { taints: vec![taint("k", "a"), taint("k", "b")], ..device("bad") };
        for (bad, rule) in [
            (device("Bad_Name"), "DNS label"),
            (attribute("Bus-Id", Attribute::Int(1)), "no name of an attribute"),
            (attribute("npu.huawei.com/x", Attribute::Int(1)), "own domain"),
            (attribute("x", Attribute::Text("y".repeat(65))), "65 bytes"),
            (many, "33 attributes"),
            (tainted, "5 taints"),
            (with_taint(&"k".repeat(64), ""), "no key of a taint"),
            (with_taint("k", "a b"), "no value of a taint"),
            (twice, "stands twice"),
            (device("good"), "used twice"),
        ] {
            let (kept, left_out) = check(vec![device("good"), bad, device("fine")]);
            assert_eq!(kept, ["good", "fine"], "{rule}");
            assert!(left_out.len() == 1 && left_out[0].contains(rule), "{left_out:?}");
        }
    }

    #[test]
    fn a_newer_server_takes_more_taints() {
        let device = Device { taints: (0..5).map(|n| taint(&format!("k{n}"), "")).collect(), ..device("a") };
        let server = super::super::status::ServerVersion { major: 1, minor: 35, text: "v1.35.0".into() };
        let pool = Pool {
            driver: DriverName::new("d").unwrap(),
            name: PoolName::new("p").unwrap(),
            slices: vec![Slice { devices: vec![device], ..Slice::default() }],
        };
        let gates = Gates { server: Some(server), ..Gates::default() };
        assert!(within(&pool, &gates).1.is_empty());
    }

    #[test]
    fn a_slice_is_cut_at_64_devices() {
        let (kept, left_out) = check((0..66).map(|n| device(&format!("npu-{n}"))).collect());
        assert_eq!((kept.len(), left_out.len()), (64, 2));
    }
}

//! What the shipped `MutatingAdmissionPolicy` does to a claim or template: a bare `memCapacity` is read as MiB.
//!
//! | `memCapacity` in the manifest | stored |
//! |---|---|
//! | `10000`, `"10k"`, `"1e4"` | `10000Mi` |
//! | `1Mi` and more, `0`, negative, fractional, no number for that capacity | unchanged |
//!
//! On update only what differs from the stored object is changed, so that a manifest can be applied twice and an older,
//! unconverted claim can still get a finalizer.

use serde_json::{Value, json};

use super::quantity::Quantity;

const NANO: i128 = 1_000_000_000;
const MEBI: i128 = 1 << 20;
const MEMORY: &str = "/capacity/requests/memCapacity";

/// Rewrites the bare numbers of a decoded claim or claim template.
pub(crate) fn bare_memory_to_mebi(object: &mut Value, old: Option<&Value>) {
    let before = old.and_then(requests).cloned();
    let place = if object.pointer("/spec/spec").is_some() { "/spec/spec/devices/requests" } else { REQUESTS };
    let requests = object.pointer_mut(place).and_then(Value::as_array_mut);
    for (index, request) in requests.into_iter().flatten().enumerate() {
        let stored = before.as_ref().and_then(|before| before.get(index));
        if let Some(exact) = request.get_mut("exactly") {
            rewrite(exact, stored.and_then(|stored| stored.get("exactly")));
        }
        let alternatives = request.get_mut("firstAvailable").and_then(Value::as_array_mut);
        for (index, alternative) in alternatives.into_iter().flatten().enumerate() {
            rewrite(alternative, stored.and_then(|stored| stored.get("firstAvailable")?.get(index)));
        }
    }
}

const REQUESTS: &str = "/spec/devices/requests";

fn requests(object: &Value) -> Option<&Value> {
    object.pointer("/spec/spec/devices/requests").or_else(|| object.pointer(REQUESTS))
}

fn rewrite(request: &mut Value, stored: Option<&Value>) {
    let same = |text: &Value| stored.and_then(|stored| stored.pointer(MEMORY)) == Some(text);
    let Some(memory) = request.pointer_mut(MEMORY).filter(|memory| !same(memory)) else { return };
    let Some(quantity) = memory.as_str().and_then(|text| Quantity::parse(text).ok()) else { return };
    let whole = quantity.nano() % NANO == 0;
    if whole
        && (1..MEBI).contains(&(quantity.nano() / NANO))
        && let Ok(mebi) = Quantity::parse(&format!("{}Mi", quantity.nano() / NANO))
    {
        *memory = json!(mebi.canonical());
    }
}

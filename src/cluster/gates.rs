//! Which feature gates the API server has on, found by sending their fields with `dryRun=All` and looking at what comes
//! back: a server drops what is off without a word.

use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    error::ApiError,
    link::{Ask, Link},
    status::{Gate, Gates, ServerVersion},
    wire::{FIELD_MANAGER, PATH},
};

#[derive(Deserialize)]
struct Version {
    #[serde(default)]
    major: String,
    #[serde(default)]
    minor: String,
    #[serde(default, rename = "gitVersion")]
    text: String,
}

/// The version that `/version` tells; vendors write `34+`.
fn version(body: &[u8]) -> Option<ServerVersion> {
    let read: Version = serde_json::from_slice(body).ok()?;
    let digits = |text: &str| text.trim_end_matches(|c: char| !c.is_ascii_digit()).parse().ok();
    Some(ServerVersion { major: digits(&read.major)?, minor: digits(&read.minor)?, text: read.text })
}

/// Asks for the version and probes. Fails only if the connection does: what the server refuses leaves a gate unknown.
pub(crate) async fn probe(link: &Link, driver: &str, node: &str, pool: &str) -> Result<Gates, ApiError> {
    let mut gates = Gates::default();
    let ask = Ask { verb: "get", resource: "version", path: "/version", body: None, within: link.timing.request };
    match link.ask(ask).await {
        Ok(body) => gates.server = version(&body),
        Err(error) => give_up(error, &mut gates.problem)?,
    }

    let device = json!({
        "name": "probe",
        "allowMultipleAllocations": true,
        "capacity": {"probe": {"value": "2", "requestPolicy": {"default": "1", "validValues": ["1", "2"]}}},
        "taints": [{"key": "probe", "effect": "NoSchedule"}],
    });
    match dry_run(link, driver, node, pool, json!({ "devices": [device] })).await {
        Ok(kept) => {
            let has = |path: &str| kept.pointer(path).is_some_and(|value| !value.is_null());
            gates.taints = gate(has("/spec/devices/0/taints/0"));
            gates.consumable_capacity = gate(
                has("/spec/devices/0/allowMultipleAllocations")
                    && has("/spec/devices/0/capacity/probe/requestPolicy/default"),
            );
        }
        Err(error) => give_up(error, &mut gates.problem)?,
    }

    let set = json!([{"name": "probe", "counters": {"probe": {"value": "1"}}}]);
    // From 1.35 on counters and devices must not stand in one slice, before they had to.
    let apart = gates.server.as_ref().is_none_or(|server| server.since(35));
    let content = if apart {
        json!({ "sharedCounters": set })
    } else {
        let consumes = json!([{"counterSet": "probe", "counters": {"probe": {"value": "1"}}}]);
        json!({ "sharedCounters": set, "devices": [{"name": "probe", "consumesCounters": consumes}] })
    };
    match dry_run(link, driver, node, pool, content).await {
        Ok(kept) => {
            gates.partitionable_devices =
                gate(kept.pointer("/spec/sharedCounters/0/counters/probe").is_some_and(|value| !value.is_null()));
        }
        Err(error) => give_up(error, &mut gates.problem)?,
    }
    Ok(gates)
}

/// Passes on what makes further questions useless; writes down the rest.
fn give_up(error: ApiError, problem: &mut String) -> Result<(), ApiError> {
    match error.code() {
        Some(400 | 403 | 404 | 405 | 409 | 422) => {
            if !problem.is_empty() {
                problem.push_str("; ");
            }
            problem.push_str(&error.to_string());
            Ok(())
        }
        _ if matches!(error, ApiError::Answer { .. }) => {
            problem.push_str(&error.to_string());
            Ok(())
        }
        _ => Err(error),
    }
}

fn gate(kept: bool) -> Gate {
    if kept { Gate::On } else { Gate::Off }
}

async fn dry_run(link: &Link, driver: &str, node: &str, pool: &str, content: Value) -> Result<Value, ApiError> {
    let mut spec = json!({
        "driver": driver,
        "nodeName": node,
        "pool": {"name": pool, "generation": 1, "resourceSliceCount": 1},
    });
    if let (Some(spec), Value::Object(content)) = (spec.as_object_mut(), content) {
        spec.extend(content);
    }
    // "fffff" is no index of a slice that is ever published.
    let name = super::layout::name(0xf_ffff, driver, node);
    let slice = json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": name},
        "spec": spec,
    });
    let path = format!("{PATH}?dryRun=All&fieldManager={FIELD_MANAGER}");
    let ask = Ask {
        verb: "create",
        resource: "resourceslices",
        path: &path,
        body: Some(slice.to_string().into_bytes()),
        within: link.timing.request,
    };
    let body = link.ask(ask).await?;
    serde_json::from_slice(&body)
        .map_err(|error| ApiError::Answer { what: "the gate probe".to_owned(), why: error.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_vendors_are_read() {
        let read = |text: &str| version(text.as_bytes());
        let plain = read(r#"{"major":"1","minor":"34","gitVersion":"v1.34.3"}"#).unwrap();
        assert!(plain.since(34) && !plain.since(35));
        assert!(read(r#"{"major":"1","minor":"36+","gitVersion":"v1.36.3-eks"}"#).unwrap().since(36));
        assert_eq!(read("{}"), None);
        assert_eq!(read("x"), None);
    }
}

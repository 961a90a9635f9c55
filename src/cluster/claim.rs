//! Reading a claim: GET with a check of the UID, decoded into just what the driver needs.
//!
//! Own types rather than the generated ones: a claim of a newer server decodes as well, and nothing is kept that is not
//! used. What would change the meaning of an allocation and is not understood is refused, never skipped.

use std::{collections::BTreeMap, time::Duration};

use serde::Deserialize;
use tokio::time::{Instant, sleep, timeout_at};

use crate::domain::{
    claim::{AllocatedClaim, AllocatedDevice, ClaimRef, OpaqueConfig, Toleration},
    config::NpuConfig,
    names::{is_dns_label, is_dns_subdomain},
    quantity::{InvalidQuantity, Quantity},
    refusal::Refusal,
    slice::MEMORY,
};

use super::{
    error::ApiError,
    link::{Ask, Backoff, Link},
};

/// Longest time that reading a claim may take: well within kubelet's 45 s, so that it hears our reason.
const WITHIN: Duration = Duration::from_secs(10);
/// Longest time for one attempt.
const ATTEMPT: Duration = Duration::from_secs(5);

#[derive(Deserialize)]
struct Claim {
    metadata: Metadata,
    #[serde(default)]
    spec: Option<ClaimSpec>,
    #[serde(default)]
    status: Option<Status>,
}

#[derive(Deserialize)]
struct ClaimSpec {
    #[serde(default)]
    devices: Option<Requests>,
}

#[derive(Deserialize)]
struct Requests {
    #[serde(default)]
    requests: Option<Vec<Request>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Request {
    name: String,
    #[serde(default)]
    exactly: Option<RequestAsk>,
    #[serde(default)]
    first_available: Option<Vec<RequestAsk>>,
}

#[derive(Deserialize)]
struct RequestAsk {
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    capacity: Option<RequestCapacity>,
    #[serde(default)]
    tolerations: Option<Vec<DeviceToleration>>,
}

#[derive(Deserialize)]
struct RequestCapacity {
    #[serde(default)]
    requests: Option<BTreeMap<String, serde_json::Value>>,
}

#[derive(Deserialize)]
struct Metadata {
    uid: String,
}

#[derive(Deserialize)]
struct Status {
    #[serde(default)]
    allocation: Option<Allocation>,
}

#[derive(Deserialize)]
struct Allocation {
    #[serde(default)]
    devices: Option<Devices>,
}

#[derive(Default, Deserialize)]
struct Devices {
    #[serde(default)]
    results: Option<Vec<DeviceResult>>,
    #[serde(default)]
    config: Option<Vec<Config>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct DeviceResult {
    request: String,
    driver: String,
    pool: String,
    device: String,
    #[serde(default)]
    admin_access: Option<bool>,
    #[serde(default, rename = "shareID")]
    share_id: Option<String>,
    #[serde(default)]
    consumed_capacity: Option<BTreeMap<String, serde_json::Value>>,
    #[serde(default)]
    tolerations: Option<Vec<DeviceToleration>>,
}

#[derive(Deserialize)]
struct DeviceToleration {
    #[serde(default)]
    key: String,
    #[serde(default)]
    operator: String,
    #[serde(default)]
    value: String,
    #[serde(default)]
    effect: String,
}

impl From<DeviceToleration> for Toleration {
    fn from(read: DeviceToleration) -> Self {
        let DeviceToleration { key, operator, value, effect } = read;
        Self { key, value: Some(value).filter(|_| operator != "Exists"), effect }
    }
}

#[derive(Deserialize)]
struct Config {
    #[serde(default)]
    source: String,
    #[serde(default)]
    requests: Option<Vec<String>>,
    #[serde(default)]
    opaque: Option<Opaque>,
}

#[derive(Deserialize)]
struct Opaque {
    driver: String,
    #[serde(default)]
    parameters: serde_json::Value,
}

impl Link {
    /// Reads a claim and its allocation.
    pub(crate) async fn claim(&self, claim: &ClaimRef, driver: &str) -> Result<AllocatedClaim, Refusal> {
        if !is_dns_label(&claim.namespace) || !is_dns_subdomain(&claim.name) {
            return Err(Refusal::BadName(format!("{claim} is not the name of a claim")));
        }
        let path = format!("/apis/resource.k8s.io/v1/namespaces/{}/resourceclaims/{}", claim.namespace, claim.name);
        let begin = Instant::now();
        let deadline = begin + WITHIN.min(self.timing.request);
        let mut backoff = Backoff::new(self.timing.claim_retry, Duration::from_secs(2));
        let body = loop {
            let ask = Ask { verb: "get", resource: "resourceclaims", path: &path, body: None, within: ATTEMPT };
            let error = match timeout_at(deadline, self.ask(ask)).await {
                Ok(Ok(body)) => break body,
                Ok(Err(error)) => error,
                Err(_) => ApiError::Timeout {
                    url: self.status.read(|status| status.credentials.server.clone()),
                    after: begin.elapsed(),
                },
            };
            let pause = backoff.pause(error.retry_after());
            // Within the same seconds kubelet may have heard of a pod before the authorizer did, a connection may have
            // been closed while idle, a certificate may have been renewed: worth another try, kubelet's own comes late.
            let again = match error.code() {
                Some(404) => return Err(Refusal::ClaimMissing(claim.clone())),
                Some(401 | 403 | 408 | 429 | 500..) => true,
                Some(_) => false,
                None => matches!(error, ApiError::Network { .. }),
            };
            if !again || Instant::now() + pause >= deadline || begin.elapsed() > self.timing.claim_patience {
                return Err(unreadable(claim, &error, &self.source()));
            }
            sleep(pause).await;
        };
        self.metrics.claim_read.observe(begin.elapsed().as_secs_f64());
        decode(claim, driver, &body)
    }
}

/// The refusal that an API error stands for. All of them may be gone at the next try; a 403 says nothing about the claim.
fn unreadable(claim: &ClaimRef, error: &ApiError, source: &str) -> Refusal {
    let why = match error.code() {
        Some(403) => format!(
            "{error}; {source} may not read it: no pod of this node uses the claim (any more), or the right to get resourceclaims is missing"
        ),
        Some(401) => format!("{error}; the credentials of {source} are not accepted"),
        _ => error.to_string(),
    };
    Refusal::ClaimUnreadable { claim: claim.clone(), why, retry: true }
}

fn decode(claim: &ClaimRef, driver: &str, body: &[u8]) -> Result<AllocatedClaim, Refusal> {
    let refuse = |why: String| Refusal::ClaimUnreadable { claim: claim.clone(), why, retry: false };
    let read: Claim = serde_json::from_slice(body).map_err(|error| {
        refuse(format!("the API server's answer is not a claim that this driver understands: {error}"))
    })?;
    if read.metadata.uid != claim.uid.as_str() {
        return Err(Refusal::ClaimReplaced { claim: claim.clone(), found: read.metadata.uid });
    }
    let allocation =
        read.status.and_then(|status| status.allocation).ok_or_else(|| Refusal::NotAllocated(claim.clone()))?;
    let devices = allocation.devices.unwrap_or_default();
    let requests = read.spec.and_then(|spec| spec.devices).and_then(|devices| devices.requests);
    let asked = Asked::by(requests).map_err(|why| refuse(format!("memCapacity: {why}")))?;

    let mut results = Vec::new();
    for result in devices.results.unwrap_or_default() {
        let mut consumed_capacity = BTreeMap::new();
        for (name, value) in result.consumed_capacity.unwrap_or_default() {
            let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            match text.parse::<Quantity>() {
                Ok(quantity) => {
                    consumed_capacity.insert(name, quantity);
                }
                Err(error) if result.driver == driver => {
                    return Err(refuse(format!("capacity {name} of device {}: {error}", result.device)));
                }
                Err(_) => {}
            }
        }
        // The scheduler copies the request's tolerations to the result, that of 1.34 does not.
        let mut tolerations = asked.tolerations.get(&result.request).cloned().unwrap_or_default();
        tolerations.extend(result.tolerations.into_iter().flatten().map(Toleration::from));
        results.push(AllocatedDevice {
            request: result.request,
            driver: result.driver,
            pool: result.pool,
            device: result.device,
            admin_access: result.admin_access.unwrap_or(false),
            share_id: result.share_id,
            consumed_capacity,
            tolerations,
        });
    }

    let mut config = Vec::new();
    for entry in devices.config.unwrap_or_default() {
        let requests = entry.requests.unwrap_or_default();
        match entry.opaque {
            Some(opaque) => config.push(OpaqueConfig {
                from_class: entry.source == "FromClass",
                requests,
                driver: opaque.driver.clone(),
                parameters: if opaque.driver == driver {
                    serde_json::from_value::<NpuConfig>(opaque.parameters)
                        .map_err(|error| error.to_string())
                        .and_then(NpuConfig::check)
                } else {
                    Ok(NpuConfig::default())
                },
            }),
            None if meets(&requests, &results, driver) => {
                return Err(refuse(
                    "its configuration has an entry of a kind that this driver does not know (no opaque part); a newer driver is needed"
                        .to_owned(),
                ));
            }
            None => {}
        }
    }
    Ok(AllocatedClaim { claim: claim.clone(), results, config, asked_memory: asked.memory })
}

/// What the requests of a claim ask for, by request; sub-requests are `main/sub`.
#[derive(Default)]
struct Asked {
    memory: BTreeMap<String, Quantity>,
    tolerations: BTreeMap<String, Vec<Toleration>>,
}

impl Asked {
    fn by(requests: Option<Vec<Request>>) -> Result<Self, InvalidQuantity> {
        let mut asked = Self::default();
        for request in requests.into_iter().flatten() {
            let exactly = request.exactly.into_iter().map(|ask| (request.name.clone(), ask));
            let alternatives = request.first_available.unwrap_or_default().into_iter();
            let alternatives =
                alternatives.map(|ask| (format!("{}/{}", request.name, ask.name.clone().unwrap_or_default()), ask));
            for (name, ask) in exactly.chain(alternatives) {
                let tolerations = ask.tolerations.into_iter().flatten().map(Toleration::from);
                asked.tolerations.insert(name.clone(), tolerations.collect());
                let capacity = ask.capacity.and_then(|capacity| capacity.requests).unwrap_or_default();
                if let Some(value) = capacity.get(MEMORY) {
                    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                    asked.memory.insert(name, text.parse()?);
                }
            }
        }
        Ok(asked)
    }
}

/// True if a configuration for these requests touches a device of this driver.
fn meets(requests: &[String], results: &[AllocatedDevice], driver: &str) -> bool {
    let ours = |result: &&AllocatedDevice| result.driver == driver;
    let named = |result: &AllocatedDevice| {
        requests.is_empty() || requests.iter().any(|name| *name == result.request || name == result.main_request())
    };
    results.iter().filter(ours).any(named)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::domain::{claim::ClaimUid, refusal::Kind};

    use super::*;

    fn claim() -> ClaimRef {
        ClaimRef { namespace: "ns".into(), name: "c".into(), uid: ClaimUid::new("u-1").unwrap() }
    }

    fn read(value: &Value) -> Result<AllocatedClaim, Refusal> {
        decode(&claim(), "npu.huawei.com", &serde_json::to_vec(value).unwrap())
    }

    fn allocated(results: &Value, config: &Value) -> Value {
        json!({"metadata": {"uid": "u-1"}, "status": {"allocation": {"devices": {"results": results, "config": config}}}})
    }

    #[test]
    fn a_claim_of_a_newer_server_is_read_with_everything_that_matters() {
        let value = allocated(
            &json!([
                {"request": "npu/sub", "driver": "npu.huawei.com", "pool": "n/npu", "device": "npu-0", "adminAccess": true,
                 "shareID": "s", "consumedCapacity": {"memCapacity": "16Gi"}, "fieldOfTheFuture": {"a": 1}},
                {"request": "x", "driver": "other", "pool": "p", "device": "d", "consumedCapacity": {"odd": "??"}},
            ]),
            &json!([
                {"source": "FromClass", "requests": [], "opaque": {"driver": "npu.huawei.com",
                    "parameters": {"apiVersion": "npu.huawei.com/v1", "kind": "NpuConfig", "vnpu": {"template": "vir05_1c_8g"}}}},
                {"source": "FromClaim", "opaque": {"driver": "other", "parameters": {}}},
            ]),
        );
        let read = read(&value).unwrap();
        let first = &read.results[0];
        assert_eq!((first.main_request(), first.admin_access, first.share_id.as_deref()), ("npu", true, Some("s")));
        assert_eq!(first.consumed_capacity["memCapacity"], "16Gi".parse().unwrap());
        assert!(!read.results[1].admin_access);
        assert_eq!(read.config.len(), 2);
        assert!(read.config[0].from_class && !read.config[1].from_class);
        let template = read.config[0].parameters.clone().unwrap().vnpu.unwrap().template;
        assert_eq!(template.as_deref(), Some("vir05_1c_8g"));
    }

    #[test]
    fn a_device_has_the_tolerations_of_its_request_and_of_its_result() {
        let toleration = |key: &str| json!([{"key": key, "operator": "Exists", "effect": "NoSchedule"}]);
        let result = |request: &str, tolerations: Value| json!({"request": request, "driver": "npu.huawei.com", "pool": "p", "device": "d", "tolerations": tolerations});
        let results = [result("npu", toleration("result")), result("either/first", Value::Null)];
        let mut value = allocated(&json!(results), &json!([]));
        value["spec"] = json!({"devices": {"requests": [
            {"name": "npu", "exactly": {"tolerations": toleration("own")}},
            {"name": "either", "firstAvailable": [
                {"name": "first", "tolerations": toleration("first")},
                {"name": "second", "tolerations": toleration("second")},
            ]},
        ]}});
        let read = read(&value).unwrap();
        let keys = |number: usize| -> Vec<_> {
            let tolerations: &[Toleration] = &read.results[number].tolerations;
            tolerations.iter().map(|toleration| (toleration.key.as_str(), toleration.effect.as_str())).collect()
        };
        assert_eq!(keys(0), [("own", "NoSchedule"), ("result", "NoSchedule")]);
        assert_eq!(keys(1), [("first", "NoSchedule")]);
    }

    #[test]
    fn another_uid_is_a_replaced_claim_and_no_allocation_is_said_so() {
        let other = read(&json!({"metadata": {"uid": "u-2"}}));
        assert!(matches!(other, Err(Refusal::ClaimReplaced { found, .. }) if found == "u-2"));
        for status in
            [json!({}), json!({"status": null}), json!({"status": {}}), json!({"status": {"allocation": null}})]
        {
            let mut value = json!({"metadata": {"uid": "u-1"}});
            value.as_object_mut().unwrap().extend(status.as_object().unwrap().clone());
            assert!(matches!(read(&value), Err(Refusal::NotAllocated(_))), "{value}");
        }
        let empty = read(&json!({"metadata": {"uid": "u-1"}, "status": {"allocation": {}}})).unwrap();
        assert!(empty.results.is_empty());
    }

    #[test]
    fn a_configuration_of_an_unknown_kind_is_refused_only_where_it_touches_our_devices() {
        let results = json!([
            {"request": "npu/a", "driver": "npu.huawei.com", "pool": "p", "device": "d"},
            {"request": "x", "driver": "other", "pool": "p", "device": "d"},
        ]);
        for requests in [json!(null), json!([]), json!(["npu"]), json!(["npu/a"])] {
            let value = allocated(&results, &json!([{"source": "FromClaim", "requests": requests, "novel": {}}]));
            let refusal = read(&value).unwrap_err();
            assert_eq!(refusal.kind(), Kind::Permanent);
            assert!(refusal.to_string().contains("newer driver"), "{refusal}");
        }
        for requests in [json!(["x"]), json!(["npu/b"])] {
            let value = allocated(&results, &json!([{"source": "FromClaim", "requests": requests, "novel": {}}]));
            assert!(read(&value).is_ok());
        }
    }

    #[test]
    fn a_capacity_that_is_no_quantity_and_an_answer_that_is_no_claim_are_permanent_refusals() {
        let result = json!([{"request": "r", "driver": "npu.huawei.com", "pool": "p", "device": "d",
            "consumedCapacity": {"memCapacity": "lots"}}]);
        assert_eq!(read(&allocated(&result, &json!([]))).unwrap_err().kind(), Kind::Permanent);
        assert_eq!(read(&json!({"kind": "Status"})).unwrap_err().kind(), Kind::Permanent);
        assert_eq!(read(&json!([])).unwrap_err().kind(), Kind::Permanent);
    }
}

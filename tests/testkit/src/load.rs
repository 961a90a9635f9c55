//! A load on a driver's DRA socket, for the figures: kubelet's calls for many claims, one at a time and side by side.
//!
//! The claims are made first, with their allocation, as a scheduler would leave them, and deleted afterwards. A driver that
//! reads claims with a node's credentials may do so only for claims of that node's pods; its user can be given the right
//! without pods.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use http::{HeaderMap, HeaderValue, Method, header};
use serde::Serialize;
use serde_json::{Value, json};

use crate::{
    corpus::Client,
    kubelet::client::{Claim, DraClient, DraVersion, claim},
};

/// What is allocated to the claims.
#[derive(Debug, Clone)]
pub struct Target {
    /// Name of the driver.
    pub driver: String,
    /// Pool of the devices.
    pub pool: String,
    /// Devices; claims beyond their number only look at them (`adminAccess`).
    pub devices: Vec<String>,
    /// Node of the devices.
    pub node: String,
}

/// An API server and an administrator's token for it.
#[derive(Debug)]
pub struct Cluster {
    client: Client,
    headers: HeaderMap,
}

const NAMESPACE: &str = "npu-load";
const BINDING: &str = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/npu-load";
const ROLE: &str = "/apis/rbac.authorization.k8s.io/v1/clusterroles/npu-load";

impl Cluster {
    /// A server; `ca` is the PEM of its authority, `admin` a token of an administrator.
    ///
    /// # Errors
    /// The authority or the token cannot be used.
    pub fn new(url: &str, ca: &str, admin: &str) -> anyhow::Result<Self> {
        let mut headers = HeaderMap::new();
        headers.insert(header::AUTHORIZATION, HeaderValue::from_str(&format!("Bearer {admin}"))?);
        headers.insert(header::ACCEPT, HeaderValue::from_static("application/json"));
        Ok(Self { client: Client::new(url, ca)?, headers })
    }

    async fn ask(&self, method: Method, path: &str, kind: &'static str, body: &Value) -> anyhow::Result<(u16, Value)> {
        let mut headers = self.headers.clone();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
        let body = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
        let reply = self.client.send(&method, path, &headers, body).await?;
        Ok((reply.code, reply.json()))
    }

    async fn apply(&self, path: &str, object: &Value) -> anyhow::Result<Value> {
        let path = format!("{path}?fieldManager=npu-load&force=true");
        let (code, made) = self.ask(Method::PATCH, &path, "application/apply-patch+yaml", object).await?;
        ensure!(code < 300, "{path} cannot be applied ({code}): {}", made["message"]);
        Ok(made)
    }

    /// Makes claims with an allocation; `reader` is a user who may read them.
    ///
    /// # Errors
    /// The server refuses something.
    pub async fn make_claims(&self, target: &Target, count: usize, reader: Option<&str>) -> anyhow::Result<Vec<Claim>> {
        ensure!(!target.devices.is_empty(), "no devices are named");
        let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {
            "name": NAMESPACE, "labels": {"resource.kubernetes.io/admin-access": "true"},
        }});
        self.apply(&format!("/api/v1/namespaces/{NAMESPACE}"), &namespace).await?;
        if let Some(user) = reader {
            self.let_read(user).await?;
        }
        let mut claims = Vec::with_capacity(count);
        for index in 0..count {
            claims.push(self.make_claim(target, index).await?);
        }
        Ok(claims)
    }

    async fn let_read(&self, user: &str) -> anyhow::Result<()> {
        let rbac = "rbac.authorization.k8s.io";
        let version = format!("{rbac}/v1");
        let role = json!({"apiVersion": version, "kind": "ClusterRole", "metadata": {"name": "npu-load"},
            "rules": [{"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaims"], "verbs": ["get"]}]});
        let binding = json!({"apiVersion": version, "kind": "ClusterRoleBinding", "metadata": {"name": "npu-load"},
            "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": "npu-load"},
            "subjects": [{"apiGroup": rbac, "kind": "User", "name": user}]});
        self.apply(ROLE, &role).await?;
        self.apply(BINDING, &binding).await.map(drop)
    }

    async fn make_claim(&self, target: &Target, index: usize) -> anyhow::Result<Claim> {
        let looks = index >= target.devices.len();
        let name = format!("load-{index}");
        let path = format!("/apis/resource.k8s.io/v1/namespaces/{NAMESPACE}/resourceclaims");
        let mut request = json!({"name": "npu", "exactly": {"deviceClassName": "npu-load"}});
        let mut result = json!({"request": "npu", "driver": target.driver, "pool": target.pool,
            "device": target.devices[index % target.devices.len()]});
        if looks {
            request["exactly"]["adminAccess"] = json!(true);
            result["adminAccess"] = json!(true);
        }
        let object = json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            "metadata": {"name": name}, "spec": {"devices": {"requests": [request]}}});
        let (code, mut made) = self.ask(Method::POST, &path, "application/json", &object).await?;
        ensure!(code == 201, "claim {name} cannot be made ({code}): {}", made["message"]);
        let terms = json!([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": [target.node]}]}]);
        made["status"] = json!({"allocation": {
            "devices": {"results": [result]}, "nodeSelector": {"nodeSelectorTerms": terms},
        }});
        let status = format!("{path}/{name}/status");
        let (code, made) = self.ask(Method::PUT, &status, "application/json", &made).await?;
        ensure!(code == 200, "claim {name} cannot be allocated ({code}): {}", made["message"]);
        let uid = made["metadata"]["uid"].as_str().context("a claim without uid")?;
        Ok(claim(NAMESPACE, &name, uid))
    }

    /// Deletes the claims and the right to read them.
    ///
    /// # Errors
    /// The server does not answer.
    pub async fn delete_claims(&self) -> anyhow::Result<()> {
        let claims = format!("/apis/resource.k8s.io/v1/namespaces/{NAMESPACE}/resourceclaims");
        for path in [claims.as_str(), BINDING, ROLE] {
            self.ask(Method::DELETE, path, "application/json", &Value::Null).await?;
        }
        Ok(())
    }
}

/// Times of one kind of call.
#[derive(Debug, Serialize)]
pub struct Times {
    /// Half of them took at most so many milliseconds.
    pub p50_ms: f64,
    /// 99 of 100 took at most so many milliseconds.
    pub p99_ms: f64,
}

/// A measurement: claims prepared and released again.
#[derive(Debug, Serialize)]
pub struct Run {
    /// How many at a time.
    pub at_once: usize,
    /// Pairs of a prepare and an unprepare.
    pub pairs: usize,
    /// Pairs in a second.
    pub pairs_per_second: f64,
    /// The prepares.
    pub prepare: Times,
    /// The unprepares.
    pub unprepare: Times,
}

/// All that was measured.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The service that was spoken.
    pub service: &'static str,
    /// One after the other, then side by side.
    pub runs: Vec<Run>,
}

/// Prepares and releases the claims: `rounds` times one after the other, and as often all at once.
///
/// # Errors
/// The driver does not answer, or refuses a claim.
pub async fn measure(socket: &Path, claims: &[Claim], rounds: usize) -> anyhow::Result<Report> {
    let client = speaking(socket).await?;
    // The first calls open connections and fill caches.
    pairs(&client, claims, 1, claims.len()).await?;
    let mut runs = Vec::new();
    for at_once in [1, claims.len()] {
        runs.push(pairs(&client, claims, rounds, at_once).await?);
    }
    Ok(Report { service: client.version().as_str(), runs })
}

/// A client that speaks the newest service that the driver has.
async fn speaking(socket: &Path) -> anyhow::Result<DraClient> {
    let client = DraClient::connect(socket, DraVersion::V1).await;
    let client = client.with_context(|| format!("nobody listens at {}", socket.display()))?;
    for version in [DraVersion::V1, DraVersion::V1Beta1] {
        let client = client.speaking(version);
        if client.prepare(&[]).await.is_ok() {
            return Ok(client);
        }
    }
    bail!("{} serves neither v1 nor v1beta1", socket.display())
}

async fn pairs(client: &DraClient, claims: &[Claim], rounds: usize, at_once: usize) -> anyhow::Result<Run> {
    let start = Instant::now();
    let work = claims.iter().map(|claim| async move {
        let mut times = Vec::with_capacity(rounds);
        for _ in 0..rounds {
            let start = Instant::now();
            let refused = |what: &str, why: String| anyhow::anyhow!("{what} of {}: {why}", claim.name);
            client.prepare_one(claim).await.map_err(|why| refused("prepare", why))?;
            let prepared = Instant::now();
            client.unprepare_one(claim).await.map_err(|why| refused("unprepare", why))?;
            times.push((prepared - start, prepared.elapsed()));
        }
        anyhow::Ok(times)
    });
    let times: Vec<_> = stream::iter(work).buffer_unordered(at_once).try_collect().await?;
    let seconds = start.elapsed().as_secs_f64();
    let (prepares, unprepares): (Vec<_>, Vec<_>) = times.into_iter().flatten().unzip();
    let count = prepares.len();
    let per_second = f64::from(u32::try_from(count).unwrap_or(u32::MAX)) / seconds;
    Ok(Run {
        at_once,
        pairs: count,
        pairs_per_second: per_second,
        prepare: times_of(prepares),
        unprepare: times_of(unprepares),
    })
}

fn times_of(mut all: Vec<Duration>) -> Times {
    all.sort_unstable();
    let at = |part: usize| {
        let index = (all.len() * part / 100).min(all.len().saturating_sub(1));
        all.get(index).copied().unwrap_or_default().as_secs_f64() * 1e3
    };
    Times { p50_ms: at(50), p99_ms: at(99) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_the_times_are_told() {
        let times = times_of((1..=200).map(Duration::from_millis).collect());
        assert!((times.p50_ms - 101.0).abs() < 1e-9 && (times.p99_ms - 199.0).abs() < 1e-9, "{times:?}");
        let none = times_of(Vec::new());
        assert!(none.p50_ms == 0.0 && none.p99_ms == 0.0);
    }
}

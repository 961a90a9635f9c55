//! A server to which the corpus is sent, what has to stand there first, and whose credentials are used.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context as _, bail, ensure};
use http::{HeaderMap, HeaderName, HeaderValue, Method, header};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{cases::Actor, http::Client};
use crate::api::{ApiServer, Who};

/// The node that the corpus uses.
const NODE: &str = "corpus-node";
/// A node of which others must keep their hands off.
const OTHER_NODE: &str = "corpus-other-node";
const NAMESPACES: [&str; 3] = ["corpus", "corpus-admin", "npu-dra"];
const RBAC: &str = include_str!("../../../../packaging/manifests/rbac.yaml");
const SOON: Duration = Duration::from_secs(30);

/// A server and the credentials for it.
#[derive(Debug)]
pub struct Server {
    client: Client,
    /// Tokens; who has none is impersonated by the administrator.
    tokens: BTreeMap<&'static str, String>,
    known: BTreeMap<String, Value>,
    /// What was applied, to be taken away again.
    applied: Vec<String>,
    memory_policy: Option<&'static str>,
}

impl Server {
    /// A real server; `admin` is a token of group `system:masters`, `ca` the PEM of its authority.
    ///
    /// # Errors
    /// The authority cannot be read.
    pub fn real(url: &str, ca: &str, admin: &str) -> anyhow::Result<Self> {
        let tokens = BTreeMap::from([("admin", admin.to_owned())]);
        Ok(Self {
            client: Client::new(url, ca)?,
            tokens,
            known: BTreeMap::new(),
            applied: Vec::new(),
            memory_policy: None,
        })
    }

    /// The stand-in, with everything in place.
    pub(crate) fn stand_in(api: &ApiServer) -> anyhow::Result<Self> {
        let mut known = BTreeMap::new();
        for (node, name) in [(NODE, "node-uid"), (OTHER_NODE, "other-node-uid")] {
            known.insert(name.to_owned(), json!(api.add_node(node)));
        }
        for name in NAMESPACES {
            let mut object = namespace(name);
            object["metadata"]["uid"] = json!("");
            api.store_raw("", "namespaces", object)?;
        }
        let account = |node: &str| Who::ServiceAccount {
            namespace: "npu-dra".to_owned(),
            name: "npu-dra".to_owned(),
            node: node.to_owned(),
        };
        let stranger =
            Who::ServiceAccount { namespace: "corpus".to_owned(), name: "default".to_owned(), node: NODE.to_owned() };
        let tokens = BTreeMap::from([
            ("admin", api.token(&Who::Admin)),
            ("node", api.token(&Who::Node(NODE.to_owned()))),
            ("other-node", api.token(&Who::Node(OTHER_NODE.to_owned()))),
            ("account", api.token(&account(NODE))),
            ("loose-account", api.token(&account(""))),
            ("stranger", api.token(&stranger)),
        ]);
        let client = Client::new(&api.url(), api.ca_pem())?;
        Ok(Self { client, tokens, known, applied: Vec::new(), memory_policy: None })
    }

    /// What the stage gives every case: uids of the nodes.
    pub(crate) fn known(&self) -> &BTreeMap<String, Value> {
        &self.known
    }

    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    /// Adds somebody's credentials to a request.
    pub(crate) fn credentials(&self, who: Actor, headers: &mut HeaderMap) -> anyhow::Result<()> {
        let (name, user, group) = match who {
            Actor::Anonymous => return Ok(()),
            Actor::Unknown => ("", "", ""),
            Actor::Admin => ("admin", "", ""),
            Actor::Node => ("node", NODE, "system:nodes"),
            Actor::OtherNode => ("other-node", OTHER_NODE, "system:nodes"),
            Actor::Account => ("account", "", ""),
            Actor::LooseAccount => ("loose-account", "", ""),
            Actor::Stranger => ("stranger", "", ""),
        };
        let token = if name.is_empty() { Some("nobody-knows-this") } else { self.tokens.get(name).map(String::as_str) };
        let impersonate = token.is_none();
        let token = token.or_else(|| self.tokens.get("admin").map(String::as_str)).unwrap_or_default();
        headers.insert(header::AUTHORIZATION, HeaderValue::from_str(&format!("Bearer {token}"))?);
        if impersonate {
            ensure!(!user.is_empty(), "there is no token for {name}");
            let mut add = |name: &'static str, value: &str| {
                headers.append(HeaderName::from_static(name), HeaderValue::from_str(value)?);
                anyhow::Ok(())
            };
            add("impersonate-user", &format!("system:node:{user}"))?;
            add("impersonate-group", group)?;
            add("impersonate-group", "system:authenticated")?;
        }
        Ok(())
    }

    async fn admin(
        &self,
        method: Method,
        path: &str,
        kind: &'static str,
        body: &Value,
    ) -> anyhow::Result<(u16, Value)> {
        let mut headers = HeaderMap::new();
        self.credentials(Actor::Admin, &mut headers)?;
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
        headers.insert(header::ACCEPT, HeaderValue::from_static("application/json"));
        let body = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
        let reply = self.client.send(&method, path, &headers, body).await?;
        Ok((reply.code, reply.json()))
    }

    async fn json(&self, method: Method, path: &str, body: &Value) -> anyhow::Result<(u16, Value)> {
        self.admin(method, path, "application/json", body).await
    }

    /// What the server says of its version.
    ///
    /// # Errors
    /// No answer.
    pub async fn version(&self) -> anyhow::Result<String> {
        let (_, version) = self.json(Method::GET, "/version", &Value::Null).await?;
        Ok(version["gitVersion"].as_str().unwrap_or_default().to_owned())
    }

    /// Sets the stage at a real server: namespaces, nodes, the account of the driver with its rights and policies.
    pub(crate) async fn set(&mut self, memory_policy: Option<&'static str>) -> anyhow::Result<()> {
        self.memory_policy = memory_policy;
        for name in NAMESPACES {
            self.apply(&namespace(name)).await?;
        }
        for (name, known) in [(NODE, "node-uid"), (OTHER_NODE, "other-node-uid")] {
            let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}});
            let made = self.apply(&node).await?;
            self.known.insert(known.to_owned(), made["metadata"]["uid"].clone());
        }
        for object in objects(RBAC)? {
            self.apply(&object).await?;
        }
        let plain = json!({"apiVersion": "v1", "kind": "ServiceAccount",
            "metadata": {"name": "default", "namespace": "corpus"}});
        self.apply(&plain).await?;
        let bound = json!({"kind": "Node", "apiVersion": "v1", "name": NODE, "uid": self.known["node-uid"]});
        let account = "/api/v1/namespaces/npu-dra/serviceaccounts/npu-dra/token";
        let stranger = "/api/v1/namespaces/corpus/serviceaccounts/default/token";
        for (name, path, bound) in
            [("account", account, Some(&bound)), ("loose-account", account, None), ("stranger", stranger, Some(&bound))]
        {
            let mut ask = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}});
            if let Some(bound) = bound {
                ask["spec"]["boundObjectRef"] = bound.clone();
            }
            let (code, made) = self.json(Method::POST, path, &ask).await?;
            let token = made.pointer("/status/token").and_then(Value::as_str);
            let token = token.with_context(|| format!("no token ({code}): {}", made["message"]))?;
            self.tokens.insert(name, token.to_owned());
        }
        self.wait_for_guard().await
    }

    /// Waits until the policy that guards slices acts.
    async fn wait_for_guard(&self) -> anyhow::Result<()> {
        let slice = json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": "corpus-guard"},
            "spec": {"driver": "other.example.com", "nodeName": NODE,
                "pool": {"name": "corpus", "generation": 1, "resourceSliceCount": 1}},
        });
        let mut headers = HeaderMap::new();
        self.credentials(Actor::Account, &mut headers)?;
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        let path = "/apis/resource.k8s.io/v1/resourceslices?dryRun=All";
        let end = Instant::now() + SOON;
        loop {
            let reply = self.client.send(&Method::POST, path, &headers, slice.to_string().into_bytes()).await?;
            if reply.code == 422 {
                return Ok(());
            }
            ensure!(Instant::now() < end, "the policy of rbac.yaml does not act: {}", reply.json());
            tokio::time::sleep(Duration::from_millis(100)).await; // waits: a policy acts some time after it was made
        }
    }

    /// Installs or removes the policy for bare numbers, and waits until that is seen.
    pub(crate) async fn set_memory_policy(&self, on: bool) -> anyhow::Result<()> {
        let Some(manifest) = self.memory_policy else { return Ok(()) };
        for object in objects(manifest)? {
            let path = path_of(&object)?;
            if on {
                self.apply_at(&path, &object).await?;
            } else {
                self.json(Method::DELETE, &path, &Value::Null).await?;
            }
        }
        let claim = json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": "corpus-policy"},
            "spec": {"devices": {"requests": [{"name": "npu", "exactly": {"deviceClassName": "npu.huawei.com",
                "capacity": {"requests": {"memCapacity": "1"}}}}]}},
        });
        let path = "/apis/resource.k8s.io/v1/namespaces/corpus/resourceclaims?dryRun=All";
        let memory = "/spec/devices/requests/0/exactly/capacity/requests/memCapacity";
        let end = Instant::now() + SOON;
        loop {
            let (_, made) = self.json(Method::POST, path, &claim).await?;
            if (made.pointer(memory) == Some(&json!("1Mi"))) == on {
                return Ok(());
            }
            ensure!(
                Instant::now() < end,
                "the policy for bare numbers does not {}: {made}",
                if on { "act" } else { "end" }
            );
            tokio::time::sleep(Duration::from_millis(100)).await; // waits: a policy acts some time after it was made
        }
    }

    async fn apply(&mut self, object: &Value) -> anyhow::Result<Value> {
        let path = path_of(object)?;
        let made = self.apply_at(&path, object).await?;
        self.applied.push(path);
        Ok(made)
    }

    async fn apply_at(&self, path: &str, object: &Value) -> anyhow::Result<Value> {
        let path = format!("{path}?fieldManager=corpus&force=true");
        let (code, made) = self.admin(Method::PATCH, &path, "application/apply-patch+yaml", object).await?;
        ensure!(code < 300, "{path} cannot be applied ({code}): {}", made["message"]);
        Ok(made)
    }

    /// Deletes what a case made, finalizers or not.
    pub(crate) async fn remove(&self, path: &str) -> anyhow::Result<()> {
        let now = json!({"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0});
        for _ in 0..3 {
            let (code, _) = self.json(Method::DELETE, path, &now).await?;
            if code == 404 {
                return Ok(());
            }
            let (code, object) = self.json(Method::GET, path, &Value::Null).await?;
            if code == 404 {
                return Ok(());
            }
            if object.pointer("/metadata/finalizers").is_some() {
                let bare = json!({"metadata": {"finalizers": null}});
                self.admin(Method::PATCH, path, "application/merge-patch+json", &bare).await?;
            }
        }
        bail!("{path} cannot be removed")
    }

    /// Takes away everything that was applied.
    pub(crate) async fn clear(&mut self) -> anyhow::Result<()> {
        for path in std::mem::take(&mut self.applied).iter().rev() {
            self.json(Method::DELETE, path, &Value::Null).await?;
        }
        Ok(())
    }
}

fn namespace(name: &str) -> Value {
    let mut object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
    if name == "corpus-admin" {
        object["metadata"]["labels"] = json!({"resource.kubernetes.io/admin-access": "true"});
    }
    object
}

fn objects(manifest: &str) -> anyhow::Result<Vec<Value>> {
    Ok(serde_saphyr::from_multiple(manifest)?)
}

/// Where an object of a manifest is kept.
fn path_of(object: &Value) -> anyhow::Result<String> {
    let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
    let (version, kind) = (text("/apiVersion"), text("/kind"));
    let plural = match kind {
        "ValidatingAdmissionPolicy" => "validatingadmissionpolicies".to_owned(),
        "MutatingAdmissionPolicy" => "mutatingadmissionpolicies".to_owned(),
        "DeviceClass" => "deviceclasses".to_owned(),
        "" => bail!("an object without kind"),
        kind => format!("{}s", kind.to_lowercase()),
    };
    let root = if version.contains('/') { "apis" } else { "api" };
    let namespace = match text("/metadata/namespace") {
        "" => String::new(),
        namespace => format!("/namespaces/{namespace}"),
    };
    Ok(format!("/{root}/{version}{namespace}/{plural}/{}", text("/metadata/name")))
}

//! Plain requests to the node's API server, from outside of its network.
//!
//! The threads that talk live in the node's network namespace, so no port of the host is used. An object's path follows
//! from its kind and name.

use std::{
    fs::File,
    future::Future,
    path::Path,
    sync::mpsc::{Receiver, channel},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use http::{Method, Request};
use http_body_util::BodyExt as _;
use kube::{
    Client,
    client::Body,
    config::{Config, KubeConfigOptions, Kubeconfig},
};
use nix::sched::{CloneFlags, setns};
use serde_json::Value;
use tokio::{
    runtime::{Builder, Runtime},
    time::timeout,
};

/// How long one answer may take.
const ANSWER: Duration = Duration::from_secs(30);

/// What the API server said.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    /// The HTTP code.
    pub(crate) code: u16,
    /// The body, if it is JSON; else its text as a string.
    pub(crate) body: Value,
}

/// A refusal, as an error.
#[derive(Debug, Clone)]
pub(crate) struct Refused {
    /// What was asked.
    asked: String,
    /// The answer.
    pub(crate) answer: Answer,
}

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let body = &self.answer.body;
        let text = body["message"].as_str().map_or_else(|| body.to_string(), str::to_owned);
        write!(f, "{}: {} {text}", self.asked, self.answer.code)
    }
}

impl std::error::Error for Refused {}

/// One user of the API server.
pub(crate) struct Api {
    runtime: Runtime,
    client: Client,
}

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Api").finish_non_exhaustive()
    }
}

impl Api {
    /// A user by a kubeconfig whose files are named as this host sees them. `leader` is the machine's first process.
    pub(crate) fn new(leader: u32, kubeconfig: Kubeconfig) -> anyhow::Result<Self> {
        let path = format!("/proc/{leader}/ns/net");
        let namespace = File::open(&path).with_context(|| format!("cannot open {path}"))?;
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("node-net")
            .on_thread_start(move || {
                if let Err(error) = setns(&namespace, CloneFlags::CLONE_NEWNET) {
                    // A thread in the wrong network would talk to somebody else's server.
                    panic!("cannot enter the node's network: {error}");
                }
            })
            .enable_all()
            .build()
            .context("cannot start threads")?;
        let options = KubeConfigOptions::default();
        let config = Config::from_custom_kubeconfig(kubeconfig, &options);
        let _entered = runtime.enter();
        let config = runtime.block_on(config).context("the kubeconfig cannot be used")?;
        let client = Client::try_from(config).context("no client can be made")?;
        Ok(Self { runtime, client })
    }

    /// Runs a future on the threads in the node's network.
    pub(crate) fn wait<T: Send + 'static>(
        &self,
        future: impl Future<Output = T> + Send + 'static,
    ) -> anyhow::Result<T> {
        self.runtime.block_on(self.runtime.spawn(future)).context("a task in the node's network failed")
    }

    /// The client, for what this type does not offer; to be used within [`Api::wait`].
    pub(crate) fn client(&self) -> Client {
        self.client.clone()
    }

    /// Sends any request and returns whatever comes back. `content` is the body's type.
    ///
    /// # Errors
    /// Nobody answers.
    pub(crate) fn raw(&self, method: Method, path: &str, content: &str, body: Vec<u8>) -> anyhow::Result<Answer> {
        let asked = format!("{method} {path}");
        let request = Request::builder().method(method).uri(path).header("content-type", content);
        let request = request.header("accept", "application/json").body(Body::from(body))?;
        let client = self.client();
        let answer = self.wait(async move {
            let ask = async move {
                let response = client.send(request).await?;
                let code = response.status().as_u16();
                let bytes = response.into_body().collect().await?.to_bytes();
                let text = || Value::String(String::from_utf8_lossy(&bytes).into_owned());
                anyhow::Ok(Answer { code, body: serde_json::from_slice(&bytes).unwrap_or_else(|_| text()) })
            };
            timeout(ANSWER, ask).await
        })?;
        answer.with_context(|| format!("{asked}: no answer after {ANSWER:?}"))?.context(asked)
    }

    fn ask(&self, method: Method, path: &str, content: &str, body: Vec<u8>) -> anyhow::Result<Value> {
        let asked = format!("{method} {path}");
        let answer = self.raw(method, path, content, body)?;
        if (200..300).contains(&answer.code) { Ok(answer.body) } else { bail!(Refused { asked, answer }) }
    }

    /// Reads a path.
    pub(crate) fn get(&self, path: &str) -> anyhow::Result<Value> {
        self.ask(Method::GET, path, "application/json", Vec::new())
    }

    /// Reads a path that may not be there.
    pub(crate) fn find(&self, path: &str) -> anyhow::Result<Option<Value>> {
        let answer = self.raw(Method::GET, path, "application/json", Vec::new())?;
        match answer.code {
            404 => Ok(None),
            200 => Ok(Some(answer.body)),
            _ => bail!(Refused { asked: format!("GET {path}"), answer }),
        }
    }

    /// The items of a list.
    pub(crate) fn list(&self, path: &str) -> anyhow::Result<Vec<Value>> {
        let mut list = self.get(path)?;
        match list["items"].take() {
            Value::Array(items) => Ok(items),
            _ => bail!("GET {path}: not a list"),
        }
    }

    /// The changes of a list from now on, each with the time at which it came, for two minutes at most.
    pub(crate) fn watch(&self, path: &str) -> anyhow::Result<Receiver<(Instant, Value)>> {
        let list = self.get(path)?;
        let version = list["metadata"]["resourceVersion"].as_str().context("the list has no version")?;
        let sign = if path.contains('?') { '&' } else { '?' };
        let path = format!("{path}{sign}watch=true&timeoutSeconds=120&resourceVersion={version}");
        let request = Request::get(path).header("accept", "application/json").body(Body::empty())?;
        let (client, (sender, receiver)) = (self.client(), channel());
        let mut body = self.wait(async move { client.send(request).await })??.into_body();
        drop(self.runtime.spawn(async move {
            let mut rest = Vec::new();
            while let Some(Ok(frame)) = body.frame().await {
                rest.extend_from_slice(frame.data_ref().map(AsRef::as_ref).unwrap_or_default());
                while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
                    let line: Vec<u8> = rest.drain(..=end).collect();
                    let event = serde_json::from_slice(&line).unwrap_or(Value::Null);
                    if sender.send((Instant::now(), event)).is_err() {
                        return;
                    }
                }
            }
        }));
        Ok(receiver)
    }

    /// Creates an object.
    pub(crate) fn create(&self, object: &Value) -> anyhow::Result<Value> {
        self.ask(Method::POST, &Kind::of(object)?.collection(object), "application/json", serde_json::to_vec(object)?)
    }

    /// Creates an object for nothing but the answer.
    pub(crate) fn try_out(&self, object: &Value) -> anyhow::Result<Value> {
        let path = Kind::of(object)?.collection(object) + "?dryRun=All";
        self.ask(Method::POST, &path, "application/json", serde_json::to_vec(object)?)
    }

    /// Changes parts of an object; `path` may end with `/status`.
    pub(crate) fn merge(&self, path: &str, change: &Value) -> anyhow::Result<Value> {
        self.ask(Method::PATCH, path, "application/merge-patch+json", serde_json::to_vec(change)?)
    }

    /// Deletes what is at a path at once; true if there was something.
    pub(crate) fn delete(&self, path: &str) -> anyhow::Result<bool> {
        let options =
            br#"{"kind":"DeleteOptions","apiVersion":"v1","gracePeriodSeconds":0,"propagationPolicy":"Background"}"#;
        self.delete_with(path, options)
    }

    /// Deletes what is at a path as kubectl does without options.
    pub(crate) fn delete_gently(&self, path: &str) -> anyhow::Result<bool> {
        self.delete_with(path, br#"{"kind":"DeleteOptions","apiVersion":"v1","propagationPolicy":"Background"}"#)
    }

    fn delete_with(&self, path: &str, options: &[u8]) -> anyhow::Result<bool> {
        let answer = self.raw(Method::DELETE, path, "application/json", options.to_vec())?;
        match answer.code {
            404 => Ok(false),
            200..300 => Ok(true),
            _ => bail!(Refused { asked: format!("DELETE {path}"), answer }),
        }
    }
}

/// Where objects of a kind stand.
#[derive(Debug, Clone, Copy)]
struct Kind {
    group: &'static str,
    plural: &'static str,
    namespaced: bool,
}

impl Kind {
    fn of(object: &Value) -> anyhow::Result<Self> {
        let kind = object["kind"].as_str().context("the object has no kind")?;
        let (group, plural, namespaced) = match kind {
            "Pod" => ("api/v1", "pods", true),
            "Node" => ("api/v1", "nodes", false),
            "Namespace" => ("api/v1", "namespaces", false),
            "ResourceClaim" => ("apis/resource.k8s.io/v1", "resourceclaims", true),
            "ResourceClaimTemplate" => ("apis/resource.k8s.io/v1", "resourceclaimtemplates", true),
            "ResourceSlice" => ("apis/resource.k8s.io/v1", "resourceslices", false),
            "DeviceClass" => ("apis/resource.k8s.io/v1", "deviceclasses", false),
            other => bail!("where objects of kind {other} stand is not known here: add it to api.rs"),
        };
        Ok(Self { group, plural, namespaced })
    }

    fn collection(&self, object: &Value) -> String {
        let Self { group, plural, namespaced } = self;
        if *namespaced {
            let namespace = object["metadata"]["namespace"].as_str().unwrap_or("default");
            format!("/{group}/namespaces/{namespace}/{plural}")
        } else {
            format!("/{group}/{plural}")
        }
    }
}

/// The path of an object that has a kind and a name.
///
/// # Errors
/// It lacks one of them, or its kind is not known here.
pub(crate) fn path_of(object: &Value) -> anyhow::Result<String> {
    let name = object["metadata"]["name"].as_str().context("the object has no name")?;
    Ok(format!("{}/{name}", Kind::of(object)?.collection(object)))
}

/// A kubeconfig for a user whose credentials are files below `root`.
pub(crate) fn kubeconfig(root: &Path, user: &str) -> Value {
    let (certificate, key) = if user == "node" {
        // Where kubelet keeps its own: one file with both.
        (
            "/var/lib/kubelet/pki/kubelet-client-current.pem".to_owned(),
            "/var/lib/kubelet/pki/kubelet-client-current.pem".to_owned(),
        )
    } else {
        (format!("/etc/kubernetes/pki/{user}.crt"), format!("/etc/kubernetes/pki/{user}.key"))
    };
    let file = |path: &str| root.join(path.trim_start_matches('/')).display().to_string();
    serde_json::json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "node",
        "clusters": [{"name": "node", "cluster": {
            "server": "https://127.0.0.1:6443", "certificate-authority": file("/etc/kubernetes/pki/ca.crt"),
        }}],
        "users": [{"name": user, "user": {"client-certificate": file(&certificate), "client-key": file(&key)}}],
        "contexts": [{"name": "node", "context": {"cluster": "node", "user": user}}],
    })
}

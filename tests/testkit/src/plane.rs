//! A real API server without a cluster: etcd and kube-apiserver on free ports of 127.0.0.1, in a directory of their own.
//!
//! Node authorizer, `NodeRestriction` and RBAC are on, as in production. Nothing reads what is stored: no controller, no
//! scheduler, no kubelet. Both programs end with the value, and with this process if it is killed.

use std::{
    fs::{self, File},
    net::TcpListener,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context as _, bail};
use http::{HeaderMap, Method};
use tempfile::TempDir;
use tokio::{
    process::{Child, Command},
    time::Instant,
};

use crate::{corpus::Client, pki::signing_key};

/// The administrator's token.
pub const ADMIN: &str = "admintoken";
const READY: Duration = Duration::from_secs(90);

/// Where the programs are.
#[derive(Debug, Clone)]
pub struct Programs {
    /// Directory with `kubernetes-<version>/kube-apiserver`.
    pub kubernetes: PathBuf,
    /// The program etcd.
    pub etcd: PathBuf,
}

/// A running etcd and kube-apiserver.
#[derive(Debug)]
pub struct Plane {
    dir: TempDir,
    url: String,
    ca: String,
    // The server goes before its store.
    server: Child,
    etcd: Child,
}

impl Plane {
    /// Starts both and waits until the server is ready.
    ///
    /// # Errors
    /// A program is missing or ends, or the server is not ready in time; its log is in the message.
    pub async fn start(programs: &Programs, version: &str, gates: &[String], apis: &[&str]) -> anyhow::Result<Self> {
        let dir = tempfile::Builder::new().prefix("npu-plane-").tempdir().context("cannot make a directory")?;
        let at = |name: &str| dir.path().join(name);
        let apiserver = programs.kubernetes.join(format!("kubernetes-{version}/kube-apiserver"));
        if !apiserver.exists() {
            bail!("there is no {}: `make cluster-test VERSION={version}` builds it", apiserver.display());
        }
        let (private, public) = signing_key()?;
        fs::write(at("sa.key"), private)?;
        fs::write(at("sa.pub"), public)?;
        fs::write(at("tokens.csv"), format!("{ADMIN},admin,1,system:masters\n"))?;

        let [clients, peers, port] = [free_port()?, free_port()?, free_port()?];
        let (clients, peers) = (format!("http://127.0.0.1:{clients}"), format!("http://127.0.0.1:{peers}"));
        let etcd = guarded(&programs.etcd, &at("etcd.log"))?
            .arg("--data-dir")
            .arg(at("etcd"))
            .args(["--listen-client-urls", &clients, "--advertise-client-urls", &clients])
            .args(["--listen-peer-urls", &peers, "--initial-advertise-peer-urls", &peers])
            .args(["--initial-cluster", &format!("default={peers}"), "--unsafe-no-fsync"])
            .spawn()
            .with_context(|| format!("cannot start {}", programs.etcd.display()))?;
        age(&clients).await?;
        let mut command = guarded(&apiserver, &at("apiserver.log"))?;
        command
            .arg(format!("--etcd-servers={clients}"))
            .arg(format!("--secure-port={port}"))
            .arg(format!("--cert-dir={}", at("certs").display()))
            .arg(format!("--service-account-key-file={}", at("sa.pub").display()))
            .arg(format!("--service-account-signing-key-file={}", at("sa.key").display()))
            .arg(format!("--token-auth-file={}", at("tokens.csv").display()))
            .args(["--bind-address=127.0.0.1", "--service-account-issuer=https://cluster.test"])
            .args(["--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction"])
            .args(["--service-cluster-ip-range=10.96.0.0/24", "--endpoint-reconciler-type=none"]);
        if !gates.is_empty() {
            command.arg(format!("--feature-gates={}", gates.join(",")));
        }
        if !apis.is_empty() {
            command.arg(format!("--runtime-config={}", apis.join(",")));
        }
        let server = command.spawn().with_context(|| format!("cannot start {}", apiserver.display()))?;
        let url = format!("https://127.0.0.1:{port}");
        let mut plane = Self { dir, url, ca: String::new(), server, etcd };
        plane.wait().await?;
        Ok(plane)
    }

    async fn wait(&mut self) -> anyhow::Result<()> {
        let end = Instant::now() + READY;
        let certificate = self.dir.path().join("certs/apiserver.crt");
        loop {
            if let Ok(ca) = fs::read_to_string(&certificate)
                && let Ok(client) = Client::new(&self.url, &ca)
                && let Ok(reply) = client.send(&Method::GET, "/readyz", &bearer()?, Vec::new()).await
                && reply.code == 200
            {
                self.ca = ca;
                return Ok(());
            }
            if let Some(status) = self.server.try_wait()? {
                bail!("kube-apiserver ended ({status}):\n{}", self.log("apiserver.log"));
            }
            if let Some(status) = self.etcd.try_wait()? {
                bail!("etcd ended ({status}):\n{}", self.log("etcd.log"));
            }
            if Instant::now() > end {
                bail!("kube-apiserver is not ready after {READY:?}:\n{}", self.log("apiserver.log"));
            }
            tokio::time::sleep(Duration::from_millis(100)).await; // waits: the server starts
        }
    }

    fn log(&self, name: &str) -> String {
        let text = fs::read_to_string(self.dir.path().join(name)).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(15)..].join("\n")
    }

    /// `https://127.0.0.1:PORT`
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The authority of its certificate, PEM.
    #[must_use]
    pub fn ca(&self) -> &str {
        &self.ca
    }

    /// Its directory; files may be put there.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }
}

/// Gives etcd a past: a server that starts then knows that version 1 is too old for a watch, as in any cluster that is used.
async fn age(etcd: &str) -> anyhow::Result<()> {
    let client = Client::new(etcd, "")?;
    let mut headers = HeaderMap::new();
    headers.insert(http::header::CONTENT_TYPE, http::HeaderValue::from_static("application/json"));
    let end = Instant::now() + READY;
    let mut written = 0;
    while written < 20 {
        // The key is "age", in base 64.
        let put = br#"{"key": "YWdl", "value": "YWdl"}"#.to_vec();
        match client.send(&Method::POST, "/v3/kv/put", &headers, put).await {
            Ok(reply) if reply.code == 200 => written += 1,
            outcome if Instant::now() > end => bail!("etcd does not answer: {outcome:?}"),
            _ => tokio::time::sleep(Duration::from_millis(50)).await, // waits: etcd starts
        }
    }
    Ok(())
}

fn bearer() -> anyhow::Result<HeaderMap> {
    let mut headers = HeaderMap::new();
    headers.insert(http::header::AUTHORIZATION, format!("Bearer {ADMIN}").parse()?);
    Ok(headers)
}

/// A program that ends with this process, however that ends, and writes into a log.
fn guarded(program: &Path, log: &Path) -> anyhow::Result<Command> {
    let out = File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
    let mut command = Command::new("setpriv");
    command
        .args(["--pdeathsig", "KILL", "--"])
        .arg(program)
        .stdin(Stdio::null())
        .stdout(out.try_clone()?)
        .stderr(out)
        .kill_on_drop(true);
    Ok(command)
}

fn free_port() -> anyhow::Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0").context("no free port")?.local_addr()?.port())
}

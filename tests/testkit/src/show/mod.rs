//! What `testkit demo` and `testkit sandbox` share: the programs, the node and its cluster, and plain lines.

pub(crate) mod cluster;
pub(crate) mod demo;
pub(crate) mod sandbox;

use std::{
    env,
    io::{self, Write as _},
    path::{Path, PathBuf},
    process::Stdio,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use dcmi::world::Profile;
use serde_json::Value;
use testkit::{
    api::{ApiServer, Release},
    kubelet::{Kubelet, client::Claim},
    node::{DRIVER, Daemon, NODE, Node, SOON},
};

/// The shipped manifests, as they were when this was built.
const CLASS: &str = include_str!("../../../../packaging/manifests/deviceclass.yaml");
const TEMPLATE_CLASSES: &str = include_str!("../../../../packaging/manifests/deviceclass-templates.yaml");
const SAMPLE_MEMORY: &str = include_str!("../../../../packaging/manifests/sample-memory.yaml");
const SAMPLE_WHOLE: &str = include_str!("../../../../packaging/manifests/sample-whole-npu.yaml");

/// Namespace of the samples.
const NAMESPACE: &str = "ascend-dra";
/// The group of claims and classes.
const GROUP: &str = "resource.k8s.io";

/// Prints one line.
fn say(line: impl AsRef<str>) {
    // A reader who went away needs no lines.
    let _ = writeln!(io::stdout().lock(), "{}", line.as_ref());
}

/// Prints a heading.
fn heading(text: &str) {
    say(format!("\n== {text}"));
}

/// Prints lines of somebody else's output.
fn quote(text: &str) {
    for line in text.trim_end().lines() {
        say(format!("  {line}"));
    }
}

/// The simulated node, its cluster, and the programs that are shown. All of it ends when this is dropped.
struct Stage {
    daemon: Option<Daemon>,
    kubelet: Kubelet,
    api: ApiServer,
    node: Node,
    /// Directory of the programs.
    programs: PathBuf,
}

impl Stage {
    /// Sets the stage: a node with eight 910B4, an API server of 1.36 with our classes, samples and policy, a kubelet.
    async fn new() -> anyhow::Result<Self> {
        let own = env::current_exe().context("cannot tell where this program is")?;
        Self::with(own.parent().context("this program has no directory")?.to_owned()).await
    }

    /// The same, with the programs of a directory.
    async fn with(programs: PathBuf) -> anyhow::Result<Self> {
        for name in ["npu-dra", "npuctl", "libdcmi.so"] {
            let path = programs.join(name);
            let how = "build them all: cargo build -p npu-dra -p npuctl -p testkit -p fake-dcmi";
            ensure!(path.is_file(), "there is no {}; {how}", path.display());
        }
        let mut node = Node::new(Profile::Ascend910B4)?;
        let api = node.start_api(Release::V1_36).await?;
        api.set_memory_policy(true);
        add_manifests(&api)?;
        let kubelet = node.start_kubelet()?;
        Ok(Self { daemon: None, kubelet, api, node, programs })
    }

    fn program(&self, name: &str) -> PathBuf {
        self.programs.join(name)
    }

    /// Starts the daemon and waits until kubelet has taken it in, the hardware is read and the cards are published.
    async fn start(&mut self, flags: &[&str]) -> anyhow::Result<()> {
        let command = self.node.daemon_with(self.program("npu-dra"), flags);
        self.daemon = Some(self.node.start_registered(command, &self.kubelet).await?);
        let end = Instant::now() + SOON;
        while !self.is_recovered().await? {
            ensure!(Instant::now() < end, "the daemon has not recovered after {SOON:?}");
            tokio::time::sleep(Duration::from_millis(5)).await; // waits: for the first scan
        }
        self.wait_published(8).await
    }

    /// Starts the daemon in whatever has become of its node, and waits until it answers or has ended again.
    async fn restart(&mut self, flags: &[&str]) -> anyhow::Result<()> {
        let command = self.node.daemon_with(self.program("npu-dra"), flags);
        self.daemon = Some(self.node.start(command)?);
        let end = Instant::now() + SOON;
        while self.ask(&["version"]).await.is_err() {
            let ended = self.daemon.as_mut().is_none_or(|daemon| !matches!(daemon.exit_status(), Ok(None)));
            if ended || Instant::now() > end {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await; // waits: for the admin socket
        }
        Ok(())
    }

    /// Whether the daemon has compared its records with the hardware.
    async fn is_recovered(&self) -> anyhow::Result<bool> {
        let status: Value = serde_json::from_str(&self.ask(&["status", "-o", "json"]).await?)?;
        Ok(status["items"][0]["daemon"]["recovered"] == true)
    }

    /// Waits until the slices offer this many NPUs.
    async fn wait_published(&self, npus: usize) -> anyhow::Result<()> {
        self.api
            .wait_until(|state| state.slices(DRIVER, NODE).into_iter().map(cards).sum::<usize>() == npus, SOON)
            .await
    }

    /// Runs npuctl as a reader would, and shows command and output.
    async fn npuctl(&self, arguments: &[&str]) -> anyhow::Result<String> {
        say(format!("$ npuctl {}", arguments.join(" ")));
        let text = self.ask(arguments).await?;
        quote(&text);
        Ok(text)
    }

    /// Runs npuctl and gives its output.
    async fn ask(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let mut command = tokio::process::Command::new(self.program("npuctl"));
        command.args(arguments).env("NPUCTL_SOCKET", self.node.admin_socket()).env("NO_COLOR", "1");
        command.stdin(Stdio::null()).kill_on_drop(true);
        let output = tokio::time::timeout(SOON, command.output()).await.context("npuctl does not end")??;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        if !output.status.success() {
            let error = String::from_utf8_lossy(&output.stderr);
            bail!("npuctl {} failed ({}): {}", arguments.join(" "), output.status, error.trim());
        }
        Ok(text)
    }

    /// Kubelet's prepare; gives the CDI names.
    async fn prepare(&self, claim: &Claim) -> Result<Vec<String>, String> {
        let client = self.kubelet.client(DRIVER).map_err(|error| error.to_string())?;
        let devices = client.prepare_one(claim).await?;
        Ok(devices.into_iter().flat_map(|device| device.cdi_device_ids).collect())
    }

    /// Kubelet's unprepare.
    async fn unprepare(&self, claim: &Claim) -> Result<(), String> {
        let client = self.kubelet.client(DRIVER).map_err(|error| error.to_string())?;
        client.unprepare_one(claim).await
    }

    /// The last lines of the daemon's log.
    fn end_of_log(&self) -> String {
        let log = self.daemon.as_ref().map(Daemon::log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(30)..].join("\n")
    }
}

/// Gives a server our classes and samples.
fn add_manifests(api: &ApiServer) -> anyhow::Result<()> {
    for object in [CLASS, TEMPLATE_CLASSES, SAMPLE_MEMORY, SAMPLE_WHOLE].into_iter().flat_map(objects) {
        let object = object?;
        match object["kind"].as_str() {
            Some("DeviceClass") => drop(api.create(GROUP, "deviceclasses", "", &object)?),
            Some("ResourceClaimTemplate") => {
                api.create(GROUP, "resourceclaimtemplates", NAMESPACE, &object)?;
            }
            _ => {}
        }
    }
    Ok(())
}

/// How many NPUs a slice offers.
fn cards(slice: &Value) -> usize {
    let devices = slice["spec"]["devices"].as_array();
    devices.into_iter().flatten().filter(|device| device["attributes"]["type"]["string"] == "npu").count()
}

/// The objects of a manifest.
fn objects(manifest: &str) -> Vec<anyhow::Result<Value>> {
    match serde_saphyr::from_multiple::<Value>(manifest) {
        Ok(objects) => objects.into_iter().map(Ok).collect(),
        Err(error) => vec![Err(anyhow::anyhow!("a shipped manifest cannot be read: {error}"))],
    }
}

/// JSON for readers: what fits stands on one line.
fn narrow(value: &Value, indent: usize) -> String {
    const WIDTH: usize = 100;
    let flat = value.to_string();
    if flat.len() + indent <= WIDTH {
        return flat;
    }
    let inner = " ".repeat(indent + 2);
    let (open, lines, close) = match value {
        Value::Object(map) => {
            let lines = map.iter().map(|(name, value)| format!("{inner}\"{name}\": {}", narrow(value, indent + 2)));
            ('{', lines.collect::<Vec<_>>(), '}')
        }
        Value::Array(items) => {
            ('[', items.iter().map(|item| format!("{inner}{}", narrow(item, indent + 2))).collect(), ']')
        }
        _ => return flat,
    };
    format!("{open}\n{}\n{}{close}", lines.join(",\n"), " ".repeat(indent))
}

/// A stored claim as kubelet names it.
fn named(stored: &Value) -> anyhow::Result<Claim> {
    let meta = |name: &str| stored["metadata"][name].as_str().with_context(|| format!("the claim has no {name}"));
    Ok(testkit::kubelet::claim(meta("namespace")?, meta("name")?, meta("uid")?))
}

/// A time for readers.
fn millis(time: Duration) -> String {
    format!("{} ms", time.as_millis())
}

/// The names in a directory, none if it is not there.
fn entries(dir: &Path) -> Vec<String> {
    let Ok(found) = std::fs::read_dir(dir) else { return Vec::new() };
    let mut paths: Vec<String> = found.flatten().map(|entry| entry.path().display().to_string()).collect();
    paths.sort();
    paths
}

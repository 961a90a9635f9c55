//! The stand-in for the API server, held against real ones.
//!
//! One corpus of requests (`requests/*.yaml`) is sent to real servers and to the stand-in. Of each answer the part that a
//! client could act on is kept: status code, reason, the fields that were refused, what became of the fields that were
//! sent. The answers of real servers are recorded once for each setting (`tests/fixtures/corpus/*.json`); the fast tier
//! holds the stand-in against them, the cluster tier the servers themselves.
//!
//! | file | what |
//! |---|---|
//! | `cases` | the requests, written short, and how they are written out |
//! | `http` | a plain HTTP client |
//! | `stage` | what has to stand before the first request; whose credentials are used |
//! | `run` | sends everything and keeps the answers |
//! | `answer` | what is kept of an answer |

mod answer;
mod cases;
mod http;
mod run;
mod stage;

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use self::{
    answer::Answer,
    http::{Client, Reply},
    stage::Server,
};
use crate::{
    api::{ApiServer, Gate, Release},
    plane::{self, Plane},
};

/// The answers of one server: of each case, the answers to its requests in their order.
pub type Answers = BTreeMap<String, Vec<Answer>>;

/// A release with its gates, whose answers are recorded.
#[derive(Debug, Clone, Copy)]
pub struct Setting {
    /// Its name, which is that of the file with its answers.
    pub name: &'static str,
    /// Version of Kubernetes.
    pub version: &'static str,
    /// What the stand-in plays.
    pub release: Release,
    /// Gates that are on against the default.
    pub gates: &'static [(&'static str, Option<Gate>)],
    /// APIs that are served against the default.
    pub apis: &'static [&'static str],
    /// The manifest with the policy for bare numbers of memory, if the server can have it.
    memory_policy: Option<&'static str>,
}

/// The four settings.
pub const SETTINGS: [Setting; 4] = [
    Setting { name: "1.34.3", version: "1.34.3", release: Release::V1_34, gates: &[], apis: &[], memory_policy: None },
    Setting {
        name: "1.34.3-gated",
        version: "1.34.3",
        release: Release::V1_34,
        gates: &[
            ("DRAConsumableCapacity", Some(Gate::ConsumableCapacity)),
            ("DRAPartitionableDevices", Some(Gate::PartitionableDevices)),
            ("DRADeviceTaints", Some(Gate::DeviceTaints)),
            ("DRAResourceClaimDeviceStatus", None),
            ("ResourceHealthStatus", None),
            ("MutatingAdmissionPolicy", None),
        ],
        apis: &["resource.k8s.io/v1alpha3=true", "admissionregistration.k8s.io/v1beta1=true"],
        memory_policy: Some(include_str!("../../../../packaging/manifests/memory-policy-v1beta1.yaml")),
    },
    Setting {
        name: "1.36.3",
        version: "1.36.3",
        release: Release::V1_36,
        gates: &[],
        apis: &[],
        memory_policy: Some(include_str!("../../../../packaging/manifests/memory-policy.yaml")),
    },
    Setting {
        name: "1.37.2",
        version: "1.37.2",
        release: Release::V1_37,
        gates: &[],
        apis: &[],
        memory_policy: Some(include_str!("../../../../packaging/manifests/memory-policy.yaml")),
    },
];

impl Setting {
    /// The setting of that name.
    ///
    /// # Errors
    /// There is none.
    pub fn named(name: &str) -> anyhow::Result<Self> {
        let names = || SETTINGS.map(|setting| setting.name).join(", ");
        SETTINGS
            .into_iter()
            .find(|s| s.name == name)
            .with_context(|| format!("no setting {name}; there are {}", names()))
    }

    /// The file with its answers.
    #[must_use]
    pub fn file(&self, answers: &Path) -> PathBuf {
        answers.join(format!("{}.json", self.name))
    }

    /// Reads its recorded answers.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn recorded(&self, answers: &Path) -> anyhow::Result<Answers> {
        let path = self.file(answers);
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let recorded: Recorded =
            serde_json::from_str(&text).with_context(|| format!("{} is not understood", path.display()))?;
        Ok(recorded.answers)
    }

    /// Writes down answers of a real server.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn record(&self, answers: &Path, server: &str, found: Answers) -> anyhow::Result<()> {
        let path = self.file(answers);
        let recorded = Recorded { setting: self.name.to_owned(), server: server.to_owned(), answers: found };
        fs::create_dir_all(answers).with_context(|| format!("cannot make {}", answers.display()))?;
        fs::write(&path, lines(&recorded)?).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Starts a stand-in of this setting and sends it the corpus. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// It does not start, or a request is not answered.
    pub async fn ask_stand_in(&self) -> anyhow::Result<Answers> {
        let api = ApiServer::start(self.release).await?;
        for gate in self.gates.iter().filter_map(|(_, gate)| *gate) {
            api.set_gate(gate, true);
        }
        let server = Server::stand_in(&api)?;
        run::all(&server, |on| api.set_memory_policy(on && self.memory_policy.is_some())).await
    }

    /// Sends the corpus to a running server and takes away what it made there.
    ///
    /// # Errors
    /// A request is not answered.
    pub async fn ask(&self, server: &mut Server) -> anyhow::Result<Answers> {
        server.set(self.memory_policy).await?;
        let answers = run::all(server, |_| {}).await;
        server.clear().await?;
        answers
    }

    /// Starts etcd and a kube-apiserver of this setting.
    ///
    /// # Errors
    /// A program is missing or does not become ready.
    pub async fn start(&self, programs: &plane::Programs) -> anyhow::Result<Plane> {
        let gates: Vec<String> = self.gates.iter().map(|(gate, _)| format!("{gate}=true")).collect();
        Plane::start(programs, self.version, &gates, self.apis).await
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct Recorded {
    setting: String,
    /// What the server says of its version.
    server: String,
    answers: Answers,
}

/// One answer a line, so that a difference between two recordings can be read.
fn lines(recorded: &Recorded) -> anyhow::Result<String> {
    let mut text = format!(
        "{{\"setting\": {}, \"server\": {}, \"answers\": {{\n",
        Value::from(recorded.setting.as_str()),
        Value::from(recorded.server.as_str())
    );
    for (index, (case, answers)) in recorded.answers.iter().enumerate() {
        let answers: Vec<String> = answers.iter().map(serde_json::to_string).collect::<Result<_, _>>()?;
        let comma = if index + 1 < recorded.answers.len() { "," } else { "" };
        writeln!(text, "{}: [\n  {}\n]{comma}", Value::from(case.as_str()), answers.join(",\n  "))?;
    }
    text.push_str("}}\n");
    Ok(text)
}

/// Leaves out the cases in which the stand-in need not answer as real servers do.
///
/// # Errors
/// A mistake in the corpus.
pub fn comparable(mut answers: Answers) -> anyhow::Result<Answers> {
    for case in cases::Corpus::read()?.cases.iter().filter(|case| !case.apart.is_empty()) {
        answers.remove(&case.name);
    }
    Ok(answers)
}

/// Where two servers answer differently, a line for each difference.
#[must_use]
pub fn differences(one: &str, expected: &Answers, other: &str, found: &Answers) -> Vec<String> {
    let mut all = Vec::new();
    let none = Vec::new();
    for case in expected.keys().chain(found.keys().filter(|case| !expected.contains_key(*case))) {
        let (a, b) = (expected.get(case).unwrap_or(&none), found.get(case).unwrap_or(&none));
        for step in 0..a.len().max(b.len()) {
            let show = |answer: Option<&Answer>| answer.map_or_else(|| "nothing".to_owned(), Answer::to_string);
            if a.get(step) != b.get(step) {
                let number = if a.len() > 1 { format!(", request {}", step + 1) } else { String::new() };
                all.push(format!("{case}{number}:\n  {one}: {}\n  {other}: {}", show(a.get(step)), show(b.get(step))));
            }
        }
    }
    all
}

/// Fails with all differences, if there are any.
///
/// # Errors
/// There are differences.
pub fn agree(one: &str, expected: &Answers, other: &str, found: &Answers) -> anyhow::Result<()> {
    let all = differences(one, expected, other, found);
    if all.is_empty() {
        return Ok(());
    }
    bail!("{} of {} cases are answered differently:\n{}", all.len(), expected.len(), all.join("\n"))
}

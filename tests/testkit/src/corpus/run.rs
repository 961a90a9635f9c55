//! Sends the corpus and keeps the answers.

use std::{collections::BTreeMap, time::Duration};

use anyhow::Context as _;
use http::{HeaderMap, HeaderValue, Method, header};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{
    Answers,
    answer::Answer,
    cases::{self, Case, Corpus, Step},
    http::Reply,
    stage::Server,
};

/// How long a server may take to learn what it is to know.
const SOON: Duration = Duration::from_secs(20);

/// Sends all cases. `memory_policy` is told before the first case that needs the policy, and at the end.
pub(crate) async fn all(server: &Server, memory_policy: impl Fn(bool)) -> anyhow::Result<Answers> {
    let corpus = Corpus::read()?;
    let mut answers = Answers::new();
    for case in corpus.cases.iter().filter(|case| !case.needs_memory_policy) {
        answers.insert(case.name.clone(), one(server, &corpus, case).await?);
    }
    memory_policy(true);
    server.set_memory_policy(true).await?;
    for case in corpus.cases.iter().filter(|case| case.needs_memory_policy) {
        answers.insert(case.name.clone(), one(server, &corpus, case).await?);
    }
    memory_policy(false);
    server.set_memory_policy(false).await?;
    Ok(answers)
}

/// What a case has learnt and made.
#[derive(Default)]
struct Progress {
    known: BTreeMap<String, Value>,
    /// Paths of objects, in the order of their creation.
    made: Vec<String>,
    answers: Vec<Answer>,
}

async fn one(server: &Server, corpus: &Corpus, case: &Case) -> anyhow::Result<Vec<Answer>> {
    let mut progress = Progress { known: server.known().clone(), ..Progress::default() };
    let mut outcome = Ok(());
    for step in &case.steps {
        outcome = Box::pin(request(server, corpus, step, &mut progress)).await;
        if outcome.is_err() {
            break;
        }
    }
    for path in progress.made.iter().rev() {
        server.remove(path).await?;
    }
    outcome.with_context(|| format!("case {:?}", case.name))?;
    Ok(progress.answers)
}

async fn request(server: &Server, corpus: &Corpus, step: &Step, progress: &mut Progress) -> anyhow::Result<()> {
    let (method, path) = step.call.split_once(' ').with_context(|| format!("{:?} is no call", step.call))?;
    let method: Method = method.parse()?;
    let path = cases::path(path, &progress.known);
    let sent = corpus.body(&step.body, &progress.known)?;
    let body = match &sent {
        Value::Null => Vec::new(),
        // A text is sent as it is: what is no JSON.
        Value::String(text) => text.clone().into_bytes(),
        other => other.to_string().into_bytes(),
    };
    let mut headers = HeaderMap::new();
    if !body.is_empty() {
        let kind = step.kind.as_deref().unwrap_or("application/json");
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_str(kind)?);
    }
    headers.insert(header::ACCEPT, HeaderValue::from_str(step.accept.as_deref().unwrap_or("application/json"))?);
    server.credentials(step.who, &mut headers)?;

    let end = Instant::now() + SOON;
    let reply = loop {
        let asked = server.client().send(&method, &path, &headers, body.clone());
        let reply =
            if step.during.is_empty() { asked.await? } else { watched(server, corpus, step, progress, asked).await? };
        if step.until.is_none_or(|code| code == reply.code) || Instant::now() > end {
            break reply;
        }
        tokio::time::sleep(Duration::from_millis(50)).await; // waits: the answer changes when the server has learnt it
    };
    let back = reply.json();
    if method == Method::POST && reply.code == 201 && !path.contains("dryRun") && !path.ends_with("/token") {
        let name = back["metadata"]["name"].as_str().unwrap_or_default();
        progress.made.push(format!("{}/{name}", path.split('?').next().unwrap_or_default()));
    } else if method == Method::PATCH && reply.code == 201 && !path.contains("dryRun") {
        progress.made.push(path.split('?').next().unwrap_or_default().to_owned());
    }
    progress.answers.push(Answer::of(step, &sent, &reply, &progress.known));
    for (name, pointer) in &step.keep {
        let value = back.pointer(pointer).cloned().unwrap_or_else(|| json!(""));
        progress.known.insert(name.clone(), value);
    }
    Ok(())
}

/// Sends other requests while a watch is open; its own answer comes before theirs.
async fn watched(
    server: &Server,
    corpus: &Corpus,
    step: &Step,
    progress: &mut Progress,
    watch: impl Future<Output = anyhow::Result<Reply>>,
) -> anyhow::Result<Reply> {
    let others = async {
        for step in &step.during {
            Box::pin(request(server, corpus, step, progress)).await?;
        }
        anyhow::Ok(())
    };
    // The watch names the version from which it starts, so that it sees what happens before it is open.
    let (reply, others) = tokio::join!(watch, others);
    others?;
    reply
}

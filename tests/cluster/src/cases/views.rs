//! What `kubectl get` shows, held against the files of `golden/`; those of the requirements are in them.
//!
//! `GOLDEN=write` writes the files instead: look at what changed before it is committed.

use std::{env, fmt::Write as _, fs, path::Path};

use anyhow::{Context as _, bail, ensure};
use serde_json::Value;

use super::Case;
use crate::{
    driver::Driver,
    stage::{Stage, claim, pod, request},
};

pub(crate) const CASES: &[Case] = &[("views", views)];

/// What differs from run to run.
const VARIES: [&str; 8] = [
    "allocationTimestamp:",
    "uid:",
    "resourceVersion:",
    "creationTimestamp:",
    "generation:",
    "lastTransitionTime:",
    "shareID:",
    "time:",
];

fn views(stage: &Stage) -> anyhow::Result<()> {
    stage.with(&Driver::cutting().edit(|data| data.cards.truncate(1)))?;
    let wanted = if stage.kubernetes().shares() { request("npu").memory("10000Mi") } else { request("npu") };
    let claim = claim("view", &[wanted]);
    let pod = pod("view", &[&claim]);
    stage.create(&[&claim, &pod])?;
    stage.wait_running(&pod)?;
    let mut differences = Vec::new();
    for kind in ["resourceslices", "deviceclasses", "resourceclaims"] {
        for format in ["wide", "yaml"] {
            let text = settled(&stage.plane().kubectl(&["get", kind, "--output", format])?, format == "wide");
            differences.extend(difference(stage, &format!("{kind}.{format}"), &text)?);
        }
    }
    required(&stage.devices()?)?;
    stage.delete(&[&pod, &claim])?;
    stage.wait_empty()?;
    ensure!(differences.is_empty(), "{}", differences.join("\n"));
    Ok(())
}

/// The text without what varies.
fn settled(text: &str, table: bool) -> String {
    let mut out = String::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let first = line.trim_start().trim_start_matches("- ");
        if first.starts_with("kubectl.kubernetes.io/last-applied-configuration:") {
            lines.next();
        } else if table {
            // The last column is the age.
            let words: Vec<_> = line.split_whitespace().collect();
            let age = if words.last() == Some(&"AGE") { "AGE" } else { "-" };
            let kept = words.get(..words.len().saturating_sub(1)).unwrap_or_default();
            let _ = writeln!(out, "{}  {age}", kept.join("  "));
        } else if !VARIES.iter().any(|key| first.starts_with(key)) {
            let _ = writeln!(out, "{line}");
        }
    }
    out
}

/// How a text differs from its file: that of this release's minor version if there is one, else that of all.
fn difference(stage: &Stage, name: &str, text: &str) -> anyhow::Result<Option<String>> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden");
    let own = dir.join(format!("1.{}", stage.kubernetes().minor));
    let path = if own.is_dir() { own.join(name) } else { dir.join(name) };
    if env::var("GOLDEN").is_ok_and(|word| word == "write") {
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        return Ok(None);
    }
    let wanted = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    if wanted == text {
        return Ok(None);
    }
    let (left, right): (Vec<_>, Vec<_>) = (wanted.lines().collect(), text.lines().collect());
    let at = left.iter().zip(&right).take_while(|(a, b)| a == b).count();
    let (was, is) = (left.get(at).unwrap_or(&"(end)"), right.get(at).unwrap_or(&"(end)"));
    Ok(Some(format!("{name}, line {}: {was:?} became {is:?}", at + 1)))
}

/// What the requirements show of a card, whatever the files say.
fn required(devices: &[Value]) -> anyhow::Result<()> {
    let Some(card) = devices.iter().find(|device| device["name"] == "npu-0") else { bail!("there is no npu-0") };
    let attributes = &card["attributes"];
    ensure!(
        attributes["chipName"]["string"] == "910B4"
            && attributes["numaNode"]["int"].is_i64()
            && attributes["physicalId"]["int"] == 0
            && attributes["topologyGroup"]["string"] == "ring-0"
            && card["capacity"]["memCapacity"]["value"] == "32Gi",
        "{card}"
    );
    Ok(())
}

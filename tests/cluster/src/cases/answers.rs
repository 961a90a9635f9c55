//! The API server's stand-in, on which the fast tiers rest, is held against the server itself.

use std::fs;

use super::Case;
use crate::{programs, stage::Stage};

pub(crate) const CASES: &[Case] = &[("corpus", corpus)];

/// The corpus goes to a server of its own beside the node's: controllers would change what it makes.
fn corpus(stage: &Stage) -> anyhow::Result<()> {
    let (plane, name) = (stage.plane(), stage.setting().name);
    let recorded = programs::repository().join(format!("tests/fixtures/corpus/{name}.json"));
    fs::create_dir_all(plane.file("/opt/corpus"))?;
    fs::copy(recorded, plane.file(&format!("/opt/corpus/{name}.json")))?;
    let said = plane.run(&[
        "/opt/testkit",
        "corpus",
        "check",
        "--setting",
        name,
        "--kubernetes",
        "/opt",
        "--etcd",
        "/usr/bin/etcd",
        "--answers",
        "/opt/corpus",
    ])?;
    stage.note(said.trim());
    Ok(())
}

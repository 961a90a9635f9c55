//! The real daemon, cut off at every durable step and in every vendor call.
//!
//! For each scene the calls that change a file below the state and CDI directories are counted once; then the scene is
//! played again and again, and each time the daemon is killed before or after another one of them, or that call fails
//! with ENOSPC or EIO, once or from then on. Where cards are cut, the worker or the daemon is killed before, in the
//! middle of and after each vendor call, too. The daemon starts again, kubelet goes on in either way, and the oracle
//! looks at what is left.
//!
//! `NPU_DRA_CRASH_DAEMON` names the release daemon. Without it the debug daemon plays a sample of the cases.

mod histories;
mod oracle;
mod stage;

use std::{env, path::PathBuf, sync::Arc};

use oracle::Want::{self, Look, Whole};
use stage::{Act, Scenario};
use testkit::node::Node;
use tokio::{sync::Semaphore, task::JoinSet};

/// Nodes at one time.
const NODES: usize = 3;
/// Fewest cases of the whole tier.
const LEAST: usize = 2500;
/// Of the debug daemon's cases, one in so many is played.
const SAMPLE: usize = 16;

const SECOND_BOOT: &str = "3f1c8a52-0000-4000-8000-000000000002";

fn scenarios() -> Vec<Scenario> {
    let beside = |scenario: Scenario| scenario.beside("beside", vec![Whole(7)]);
    let whole = |name, act, least| beside(Scenario::new(name, act, vec![Whole(3)], least));
    let two = vec![Whole(3), Whole(4)];
    vec![
        Scenario { from_start: true, ..Scenario::new("first start, prepare", Act::Prepare, vec![Whole(3)], 12) },
        whole("prepare", Act::Prepare, 8),
        beside(Scenario::new("prepare two", Act::Prepare, two.clone(), 8)),
        Scenario { prepared: true, meanwhile: lose_file, ..whole("prepare again", Act::Prepare, 5) },
        whole("unprepare", Act::Unprepare, 4),
        beside(Scenario::new("unprepare two", Act::Unprepare, two, 4)),
        Scenario {
            prepared: true,
            boots: true,
            between: |node, _| node.reboot(SECOND_BOOT),
            ..whole("prepare after a boot", Act::Prepare, 5)
        },
        beside(Scenario::new("prepare adminAccess", Act::Prepare, vec![Look(7)], 8)),
        Scenario { between: damage_record, ..whole("start with a damaged record", Act::Start, 5) },
        Scenario { between: lose_file, ..whole("start without the CDI file", Act::Start, 4) },
    ]
}

const QUARTER: Want = Want::Part(0, "vir05_1c_8g");
const HALF: Want = Want::Part(0, "vir10_3c_16g");

/// The same where cards are cut, beside a part of the same card.
fn cut_scenarios() -> Vec<Scenario> {
    let beside = |scenario: Scenario| scenario.beside("beside", vec![QUARTER]).beside("whole", vec![Whole(7)]);
    let part = |name, act, least| beside(Scenario::new(name, act, vec![QUARTER], least));
    let two = || vec![QUARTER, HALF];
    vec![
        Scenario::new("prepare the first part", Act::Prepare, vec![QUARTER], 14),
        Scenario { foreign: vec![(5, "vir05_1c_8g")], ..part("prepare a part", Act::Prepare, 14) },
        beside(Scenario::new("prepare two parts", Act::Prepare, two(), 14)),
        beside(Scenario::new("prepare a card and a part", Act::Prepare, vec![Whole(3), QUARTER], 14)),
        Scenario { prepared: true, meanwhile: lose_file, ..part("prepare a part again", Act::Prepare, 5) },
        part("unprepare a part", Act::Unprepare, 8),
        Scenario {
            foreign: vec![(5, "vir05_1c_8g")],
            ..beside(Scenario::new("unprepare two parts", Act::Unprepare, two(), 8))
        },
        Scenario {
            prepared: true,
            boots: true,
            between: |node, _| node.reboot(SECOND_BOOT),
            ..part("prepare a part after a boot", Act::Prepare, 10)
        },
        Scenario { between: damage_record, ..part("start with a damaged record of a part", Act::Start, 5) },
    ]
}

/// Somebody has cleaned up in the CDI directory.
fn lose_file(node: &Node, uid: &str) -> anyhow::Result<()> {
    for name in node.cdi_files()?.iter().filter(|name| name.contains(uid)) {
        std::fs::remove_file(node.cdi().join(name))?;
    }
    Ok(())
}

/// A bit of the subject's record flips.
fn damage_record(node: &Node, uid: &str) -> anyhow::Result<()> {
    for name in node.records()?.iter().filter(|name| name.contains(uid)) {
        let path = node.state().join("claims").join(name);
        let mut bytes = std::fs::read(&path)?;
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(&path, bytes)?;
    }
    Ok(())
}

fn all_scenarios() -> impl Iterator<Item = Scenario> {
    cut_scenarios().into_iter().chain(scenarios())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
#[allow(clippy::print_stdout, reason = "the number of cases is shown")]
async fn a_daemon_that_is_cut_off_anywhere_loses_nothing_and_leaks_nothing() {
    let release = env::var_os("NPU_DRA_CRASH_DAEMON").map(PathBuf::from);
    let stride = if release.is_some() { 1 } else { SAMPLE };
    let binary = release.unwrap_or_else(|| env!("CARGO_BIN_EXE_npu-dra").into());
    assert!(binary.is_file(), "{} is no file", binary.display());
    let only = env::var("NPU_DRA_CRASH_ONLY").unwrap_or_default();
    let nodes = Arc::new(Semaphore::new(NODES));
    let mut running = JoinSet::new();
    for scenario in all_scenarios().filter(|scenario| scenario.name.contains(&only)) {
        let (binary, nodes) = (binary.clone(), nodes.clone());
        running.spawn(async move {
            let _turn = nodes.acquire_owned().await;
            let name = scenario.name;
            (name, stage::run(scenario, binary, stride).await)
        });
    }
    let (mut all, mut failures) = (0, Vec::new());
    while let Some(ended) = running.join_next().await {
        let (name, report) = ended.unwrap();
        match report {
            Ok(report) => {
                println!(
                    "crash: {name}: {} steps, {} vendor calls, {} cases",
                    report.steps, report.vendor, report.cases
                );
                all += report.cases;
                let expected = report.expected.div_ceil(stride);
                if report.failures.is_empty() && report.cases != expected {
                    failures.push(format!("{name}: {} cases were played, not {expected}", report.cases));
                }
                failures.extend(report.failures);
            }
            Err(error) => failures.push(format!("{name}: {error:#}")),
        }
    }
    println!("crash: {all} cases");
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
    assert!(stride > 1 || !only.is_empty() || all >= LEAST, "only {all} cases were played");
}

/// Random histories of each bin that the release daemon is put through.
const HISTORIES: u64 = 200;

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
#[allow(clippy::print_stdout, reason = "the number of histories is shown")]
async fn random_histories_of_each_bin_keep_every_promise() {
    let release = env::var_os("NPU_DRA_CRASH_DAEMON").map(PathBuf::from);
    let number = if release.is_some() { HISTORIES } else { 5 };
    let binary = release.unwrap_or_else(|| env!("CARGO_BIN_EXE_npu-dra").into());
    let nodes = Arc::new(Semaphore::new(NODES));
    let mut running = JoinSet::new();
    for (bin, seed) in histories::BINS.into_iter().flat_map(|bin| (1..=number).map(move |seed| (bin, seed))) {
        let (binary, nodes) = (binary.clone(), nodes.clone());
        running.spawn(async move {
            let _turn = nodes.acquire_owned().await;
            histories::play(bin, seed, binary).await
        });
    }
    let (mut told, mut failures) = (0, Vec::new());
    while let Some(ended) = running.join_next().await {
        told += 1;
        failures.extend(ended.unwrap().err().map(|error| format!("{error:#}")));
    }
    println!("crash: {told} histories of the daemon, {number} for each bin");
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures[..failures.len().min(5)].join("\n"));
}

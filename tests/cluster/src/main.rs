//! The cluster tier: the driver on a real Kubernetes, in every setting of the catalogue.
//!
//! ```text
//! programs, image ─▶ plane (a machine with a control plane) ─▶ stage (the driver, pods, claims) ─▶ cases
//! ```

#![allow(clippy::print_stdout)] // the account of the cases is this program's output

mod api;
mod cases;
mod driver;
mod host;
mod image;
mod plane;
mod programs;
mod prove;
mod setting;
mod stage;

use std::{
    env, fs,
    path::PathBuf,
    process::ExitCode,
    sync::{Mutex, PoisonError},
    thread,
    time::Instant,
};

use anyhow::Context as _;
use lab::cases::{Account, CANNOT_RUN, Catalogue, Choice, caught};

use crate::{
    host::Host,
    plane::{Parts, Plane},
    programs::Own,
    setting::{SETTINGS, Setting},
    stage::Stage,
};

const CATALOGUE: &str = include_str!("../CASES.toml");

/// The set and the case that look at the host after all others.
const HOST: &str = "host";
const UNCHANGED: &str = "host-unchanged";

/// How many settings run at a time: cases mostly wait.
const JOBS: usize = 4;
/// What each of them may need of memory, in KiB.
const NODE_KIB: usize = 1536 * 1024;
/// What each of them needs of inotify instances. A user can have 128 by default, and a kubelet that gets none runs on
/// without finding any driver.
const NODE_INOTIFY: usize = 20;

/// What the variables of the command line ask for.
struct Wanted {
    choice: Choice,
    keep: bool,
    own: PathBuf,
    /// How many settings at a time.
    jobs: usize,
}

fn main() -> ExitCode {
    let missing: Vec<_> = [lab::require(&[]).err().map(|missing| missing.to_string()), programs::missing_go()]
        .into_iter()
        .flatten()
        .collect();
    if !missing.is_empty() {
        eprintln!("cluster-test cannot run here:\n{}", missing.join("\n"));
        return ExitCode::from(CANNOT_RUN);
    }
    match wanted().and_then(|wanted| run(&wanted)) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("cluster-test: {error:#}");
            ExitCode::from(CANNOT_RUN)
        }
    }
}

fn wanted() -> anyhow::Result<Wanted> {
    let variable = |name: &str| env::var(name).unwrap_or_default();
    let sets = setting::named(&variable("VERSION")).map_err(|word| {
        let all: Vec<_> = SETTINGS.iter().map(|setting| setting.name).collect();
        anyhow::anyhow!("VERSION={word}: there is no such setting; there are {}", all.join(", "))
    })?;
    let keep = !matches!(variable("KEEP").as_str(), "" | "0");
    let mut sets: Vec<String> = sets.into_iter().map(str::to_owned).collect();
    if sets.is_empty() {
        sets.extend(SETTINGS.iter().map(|setting| setting.name.to_owned()));
    }
    let prove = env::args().any(|word| word == "--prove");
    if prove && variable("VERSION").is_empty() {
        sets.clear();
    } else if !keep {
        // What stays up is no stranger to the host.
        sets.push(HOST.to_owned());
    }
    let names = variable("CASE").split([' ', ',']).filter(|part| !part.is_empty()).map(str::to_owned).collect();
    let own = env::var_os("PROGRAMS").map_or_else(|| programs::repository().join("target/release"), PathBuf::from);
    let jobs = match variable("JOBS").as_str() {
        "" => JOBS.min(memory_kib() / NODE_KIB).min(host::free_inotify_instances() / NODE_INOTIFY).max(1),
        number => number.parse().ok().filter(|jobs| *jobs > 0).context("JOBS is no number of settings: use 1 to 6")?,
    };
    Ok(Wanted { choice: Choice { sets, names }, keep, own, jobs })
}

/// The memory that is available, in KiB; much, if the kernel does not say.
fn memory_kib() -> usize {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(usize::MAX)
}

fn run(wanted: &Wanted) -> anyhow::Result<ExitCode> {
    let catalogue = Catalogue::parse(CATALOGUE)?;
    let own = Own::in_dir(wanted.own.clone())?;
    if env::args().any(|word| word == "--prove") {
        return prove::run(&own, &wanted.choice.sets, &wanted.choice.names);
    }
    let account = Account::open("cluster-test", catalogue, wanted.choice.clone())?;
    let before = Host::now();
    let settings: Vec<_> = SETTINGS.iter().filter(|setting| account.wants_set(setting.name)).collect();
    let kept = settings.last().filter(|_| wanted.keep).map(|setting| setting.name);
    // Building takes all cores and is no part of the cases' time.
    let ready = settings.iter().filter_map(|setting| match Parts::ready(setting, &own) {
        Ok(parts) => Some((*setting, parts)),
        Err(error) => {
            account.blocked(setting.name, &error);
            None
        }
    });
    let ready: Vec<_> = ready.collect();
    let (free, needed) = (host::free_inotify_instances(), wanted.jobs.min(ready.len()) * NODE_INOTIFY);
    if free < needed {
        println!(
            "        {free} inotify instances are free, and the nodes need {needed}: kubelet may find no driver; raise \
             fs.inotify.max_user_instances, or run fewer settings at a time (JOBS)"
        );
    }
    let started = Instant::now();
    for stage in side_by_side(&account, ready, wanted.jobs, kept) {
        run_cases(&account, &stage, true);
        if kept == Some(stage.setting().name) {
            println!("{}", stage.into_plane().keep()?);
        }
    }
    println!("        all nodes and cases: {:.0} s", started.elapsed().as_secs_f64());
    if !wanted.keep && account.wants(HOST, UNCHANGED) {
        account.run(HOST, UNCHANGED, || before.check());
    }
    Ok(account.finish())
}

/// Runs the cases of several settings at a time, each setting on a node of its own: cases mostly wait. Returns the
/// stages that are still needed: for the cases that run alone, and the one that is kept.
fn side_by_side(account: &Account, settings: Vec<(&Setting, Parts)>, jobs: usize, kept: Option<&str>) -> Vec<Stage> {
    let queue = Mutex::new(settings.into_iter());
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || {
        let mut stages = Vec::new();
        while let Some((setting, parts)) = next() {
            match caught(|| set_up(setting, &parts)) {
                Ok(stage) => {
                    run_cases(account, &stage, false);
                    if kept == Some(setting.name) || wanted_cases(account, setting, true).next().is_some() {
                        stages.push(stage);
                    }
                }
                Err(error) => account.blocked(setting.name, &error),
            }
        }
        stages
    };
    thread::scope(|scope| {
        let lanes: Vec<_> = (0..jobs).map(|_| scope.spawn(work)).collect();
        lanes.into_iter().flat_map(|lane| lane.join().unwrap_or_default()).collect()
    })
}

fn set_up(setting: &Setting, parts: &Parts) -> anyhow::Result<Stage> {
    let started = Instant::now();
    let plane = Plane::up(setting, parts)?;
    let ready = started.elapsed();
    let stage = Stage::set(plane, setting).context("the node cannot be set up")?;
    println!("        {}: node ready after {:.1} s", setting.name, ready.as_secs_f64());
    Ok(stage)
}

/// The cases of a setting that are to run, those that run alone or the others.
fn wanted_cases(account: &Account, setting: &Setting, alone: bool) -> impl Iterator<Item = cases::Case> {
    let set = setting.name;
    cases::all()
        .filter(move |(name, _)| account.lists(set, name) && account.wants(set, name) && account.alone(name) == alone)
}

fn run_cases(account: &Account, stage: &Stage, alone: bool) {
    for (name, case) in wanted_cases(account, stage.setting(), alone) {
        account.run(stage.setting().name, name, || {
            stage.begin()?;
            stage.end(caught(|| case(stage)))
        });
    }
}

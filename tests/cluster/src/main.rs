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
mod pki;
mod plane;
mod programs;
mod prove;
mod setting;
mod stage;

use std::{env, path::PathBuf, process::ExitCode, time::Instant};

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

/// What the variables of the command line ask for.
struct Wanted {
    choice: Choice,
    keep: bool,
    own: PathBuf,
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
    Ok(Wanted { choice: Choice { sets, names }, keep, own })
}

fn run(wanted: &Wanted) -> anyhow::Result<ExitCode> {
    let catalogue = Catalogue::parse(CATALOGUE)?;
    let own = Own::in_dir(wanted.own.clone())?;
    if env::args().any(|word| word == "--prove") {
        return prove::run(&own, &wanted.choice.sets, &wanted.choice.names);
    }
    let mut account = Account::open("cluster-test", catalogue, wanted.choice.clone())?;
    let before = Host::now();
    let settings: Vec<_> = SETTINGS.iter().filter(|setting| account.wants_set(setting.name)).collect();
    for (number, setting) in settings.iter().enumerate() {
        let last = number + 1 == settings.len();
        if let Err(error) = run_setting(&mut account, setting, &own, wanted.keep && last) {
            account.blocked(setting.name, &error);
        }
    }
    if !wanted.keep && account.wants(HOST, UNCHANGED) {
        account.run(HOST, UNCHANGED, || before.check());
    }
    Ok(account.finish())
}

fn run_setting(account: &mut Account, setting: &Setting, own: &Own, keep: bool) -> anyhow::Result<()> {
    let parts = Parts::ready(setting, own)?;
    let started = Instant::now();
    let plane = Plane::up(setting, &parts)?;
    let ready = started.elapsed();
    let stage = Stage::set(plane, setting).context("the node cannot be set up")?;
    println!("        {}: node ready after {:.1} s", setting.name, ready.as_secs_f64());
    for (name, case) in cases::all() {
        if account.lists(setting.name, name) && account.wants(setting.name, name) {
            account.run(setting.name, name, || {
                stage.begin()?;
                stage.end(caught(|| case(&stage)))
            });
        }
    }
    if keep {
        println!("{}", stage.into_plane().keep()?);
    }
    Ok(())
}

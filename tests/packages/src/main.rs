//! `make package-test`: the DEBs and RPMs of `dist/` on machines with a real systemd.
//!
//! README.md beside this says what it proves and what it does not; `CASES.toml` lists the cases.

mod access;
mod claims;
mod install;
mod leftovers;
mod packages;
mod readme;
mod removal;
mod sandbox;
mod service;
mod stage;
mod upgrade;

use std::{path::PathBuf, process::ExitCode};

use anyhow::Context as _;
use clap::Parser;
use lab::cases::{Account, CANNOT_RUN, Catalogue, Choice};

use crate::{packages::Packages, stage::Stage};

/// The last line's first word.
const TIER: &str = "package-test";

/// Install the packages of npu-dra on machines with a real systemd, and try them. Needs root.
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    /// Only cases with one of these texts in their names
    #[arg(value_name = "CASE", env = "CASE", value_delimiter = ' ')]
    cases: Vec<String>,
    /// Only this set: trixie, bookworm, rpm or lab
    #[arg(long, value_name = "SET", env = "SET", value_delimiter = ' ')]
    set: Vec<String>,
    /// The checkout
    #[arg(long, value_name = "DIR", default_value = ".")]
    checkout: PathBuf,
    /// Directory of the packages to test
    #[arg(long, value_name = "DIR", env = "DIST", default_value = "dist")]
    dist: PathBuf,
    /// Directory of an older release's packages; without it the next release is packed from the same programs, and
    /// those to test are the older ones
    #[arg(long, value_name = "DIR", env = "PREVIOUS")]
    previous: Option<PathBuf>,
    /// Directory of testkit and of the simulated libdcmi.so
    #[arg(long, value_name = "DIR", env = "PROGRAMS", default_value = "target/release")]
    programs: PathBuf,
    /// Leave the machines up, and say how to enter and how to stop them
    #[arg(long, env = "KEEP", value_parser = clap::builder::FalseyValueParser::new(), default_value = "false")]
    keep: bool,
    /// Boot a machine and wait to be ended: how the set lab looks from inside
    #[arg(long, hide = true, value_name = "HOW")]
    hold: Option<String>,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(&cli) {
        Ok(code) => code,
        Err(error) if error.is::<lab::Missing>() || error.is::<packages::Missing>() => {
            eprintln!("{TIER}: cannot run here: {error}");
            ExitCode::from(CANNOT_RUN)
        }
        Err(error) => {
            eprintln!("{TIER}: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: &Cli) -> anyhow::Result<ExitCode> {
    lab::require(&[])?;
    if let Some(how) = &cli.hold {
        return leftovers::hold(how);
    }
    let catalogue = Catalogue::parse(include_str!("../CASES.toml"))?;
    // A variable that is set to nothing chooses nothing.
    let given = |list: &[String]| list.iter().filter(|word| !word.is_empty()).cloned().collect();
    let choice = Choice { sets: given(&cli.set), names: given(&cli.cases) };
    let account = Account::open(TIER, catalogue, choice)?;
    let wanted: Vec<_> = stage::SETS.iter().filter(|set| account.wants_set(set.name)).collect();
    let packages = if wanted.is_empty() { None } else { Some(Packages::find(cli)?) };
    for set in wanted {
        let packages = packages.as_ref().context("no packages")?;
        match Stage::boot(set, packages, &cli.programs) {
            Ok(stage) => {
                run_set(&account, &stage);
                if cli.keep {
                    eprintln!("{}", stage.keep()?);
                }
            }
            Err(error) => account.blocked(set.name, &error),
        }
    }
    if account.wants_set("lab") {
        leftovers::run(&account);
    }
    Ok(account.finish())
}

/// What a case does; the text is shown beside its name.
type Case = fn(&Stage) -> anyhow::Result<String>;

/// One machine, all its cases. Each can run alone; in this order none has much to set up.
fn run_set(account: &Account, stage: &Stage) {
    let set = stage.set.name;
    let cases: &[(&str, Case)] = &[
        ("install-starts-nothing", install::starts_nothing),
        ("readme-installs-and-first-use-works", readme::installs),
        ("unit-is-clean", install::unit_is_clean),
        ("enable-now-serves", service::enable_now),
        ("status-text-tells-devices-and-claims", service::status_text),
        ("npuctl-asks-who-you-are", access::who_you_are),
        ("socket-comes-first-and-goes-with-the-service", service::socket_order),
        ("reload-takes-what-it-can-and-says-the-rest", service::reload),
        ("wrong-settings-are-not-retried", service::wrong_settings),
        ("watchdog-restarts-a-wedged-engine", service::watchdog),
        ("sigkill-is-survived", claims::sigkill),
        ("stop-and-start-keep-claims", claims::stop_and_start),
        ("late-directories-are-found", claims::late_directories),
        ("journal-is-searchable-by-claim", claims::journal),
        ("sandbox-holds-what-it-promises", sandbox::holds),
        ("strict-drop-in-writes-nowhere-else", sandbox::strict),
        ("memory-limit-is-enforced", sandbox::memory_limit),
        ("upgrade-keeps-claims-and-configuration", upgrade::keeps),
        ("downgrade-keeps-claims", upgrade::downgrade),
        ("upgrade-starts-nothing", upgrade::starts_nothing),
        ("removal-keeps-claims", removal::keeps),
        ("purge-refuses-live-claims", removal::purge_refuses),
        ("purge-removes-state", removal::purge_removes),
    ];
    for (name, case) in cases {
        if account.lists(set, name) {
            account.run(set, name, || case(stage).map_err(|error| stage.with_journal(&error)));
        }
    }
}

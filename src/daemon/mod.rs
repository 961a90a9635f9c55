//! The process: command line, settings, log, and the wiring of all modules.

mod adapters;
mod cli;
mod logging;
mod manual;
mod run;
pub mod settings;
mod systemd;

use std::{ffi::OsString, io, io::Write as _, process::ExitCode};

use anyhow::Context as _;
use clap::ArgMatches;

use self::{
    cli::Task,
    logging::Log,
    settings::{Given, Inputs, Settings, SettingsError},
};

/// Exit code of wrong settings, as clap's for a wrong command line: starting again does not help.
const EXIT_SETTINGS: u8 = 2;

/// Runs the program; `args` begins with its name.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let matches = cli::command().get_matches_from(args);
    match cli::task(&matches) {
        Task::Man(directory) => {
            let written = manual::write_pages(&directory);
            outcome(written.with_context(|| format!("cannot write the man pages to {}", directory.display())))
        }
        Task::Example => outcome(say(&manual::example())),
        Task::CheckConfig => match load(&matches) {
            Ok((inputs, settings)) => match run::check_paths(&settings) {
                Ok(()) => outcome(say(&settings::describe(&inputs, &settings))),
                Err(error) => failure(error.exit_code(), &error.into()),
            },
            Err(error) => failure(EXIT_SETTINGS, &error.into()),
        },
        Task::Run => match load(&matches) {
            Ok((inputs, settings)) => {
                let log = logging::start(&settings);
                match run::run(settings, || reload(&matches, &inputs, &log)) {
                    Ok(()) => ExitCode::SUCCESS,
                    Err(error) => failure(error.exit_code(), &error.into()),
                }
            }
            Err(error) => failure(EXIT_SETTINGS, &error.into()),
        },
    }
}

/// Reads and checks the settings of a command line.
fn load(matches: &ArgMatches) -> Result<(Inputs, Settings), SettingsError> {
    let config = cli::config(matches);
    // Where it cannot be read, an operator who gives no node name is asked for one.
    let host_name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let given = Given {
        config: config.as_deref(),
        flag: &|key| cli::flag(matches, key),
        variable: &|name| std::env::var(name).ok(),
        host_name: &host_name,
    };
    let inputs = settings::read(&given)?;
    let settings = Settings::from_inputs(&inputs, &given)?;
    Ok((inputs, settings))
}

/// Reads the settings again and gives them back: the log's level is taken over here, what else can be changed while
/// running by the caller; whatever else differs from what runs is named.
fn reload(matches: &ArgMatches, running: &Inputs, log: &Log) -> Option<Settings> {
    match load(matches) {
        Ok((inputs, settings)) => {
            log.set_level(&settings.log_level);
            let (level, faults) = (&settings.log_level, settings.health.table.overrides.len());
            let later = settings::need_restart(running, &inputs).join(", ");
            if later.is_empty() {
                tracing::info!(level, faults, "reloaded");
            } else {
                tracing::warn!(level, faults, "reloaded, but these have changed and need a restart: {later}");
            }
            Some(settings)
        }
        Err(error) => {
            let error = anyhow::Error::from(error);
            tracing::error!("the settings are not valid, nothing was reloaded: {error:#}");
            None
        }
    }
}

/// Writes to stdout; a reader that has gone is no error.
fn say(text: &str) -> anyhow::Result<()> {
    match io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error).context("cannot write to stdout"),
        _ => Ok(()),
    }
}

fn outcome(result: anyhow::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failure(1, &error),
    }
}

/// Says why, one line, and gives the exit code.
fn failure(code: u8, error: &anyhow::Error) -> ExitCode {
    // Nobody can be told if stderr is gone.
    let _ = io::stderr().write_all(format!("npu-dra: {error:#}\n").as_bytes());
    code.into()
}

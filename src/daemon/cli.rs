//! The command line: made from the table of settings.

use std::path::PathBuf;

use clap::{Arg, ArgAction, ArgMatches, Command, builder::ValueParser};

use super::settings::{KEYS, Key, Kind};

/// What to do.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Task {
    /// Run the daemon.
    Run,
    /// Print the effective settings.
    CheckConfig,
    /// Write the man pages into a directory.
    Man(PathBuf),
    /// Print the example file.
    Example,
}

/// The command, with every flag of the table.
pub(super) fn command() -> Command {
    let config = Arg::new("config")
        .long("config")
        .value_name("PATH")
        .value_parser(ValueParser::path_buf())
        .global(true)
        .help("Settings file, with drop-ins in PATH.d [default: /etc/npu-dra/npu-dra.toml, if it is there]");
    let generate = Command::new("generate")
        .about("Writes what packages ship beside the binary")
        .hide(true)
        .subcommand_required(true)
        .subcommand(
            Command::new("man")
                .about("Writes npu-dra(8) and npu-dra.toml(5)")
                .arg(Arg::new("directory").value_name("DIR").required(true).value_parser(ValueParser::path_buf())),
        )
        .subcommand(Command::new("config").about("Prints the example settings file"));
    Command::new("npu-dra")
        .version(env!("CARGO_PKG_VERSION"))
        .about("Kubernetes DRA driver for Ascend NPUs: the daemon of a node")
        .after_help(
            "A flag beats its environment variable, which beats /etc/npu-dra/npu-dra.toml and its drop-ins.\n\
             npu-dra.toml(5) says more of each setting; npuctl(1) shows what the daemon does.",
        )
        .arg(config)
        .args(KEYS.iter().map(argument))
        .subcommand(
            Command::new("check-config").about("Prints the effective settings and where each came from, then exits"),
        )
        .subcommand(generate)
}

fn argument(key: &Key) -> Arg {
    let arg = Arg::new(key.flag)
        .long(key.flag)
        .value_name(key.kind.placeholder())
        .help(format!("{} {}", key.help, notes(key)))
        .allow_hyphen_values(matches!(key.kind, Kind::Number(..)))
        .action(ArgAction::Set)
        .global(true);
    match key.kind {
        Kind::Switch => arg.num_args(0..=1).require_equals(true).default_missing_value("true"),
        _ => arg,
    }
}

/// Default and variable of a key, as clap writes them.
fn notes(key: &Key) -> String {
    let choices = match key.kind {
        Kind::Choice(words) => format!("[one of: {}] ", words.join(", ")),
        _ => String::new(),
    };
    let default = match (key.default, key.derived) {
        ("", "") => "none".to_owned(),
        ("", derived) => derived.to_owned(),
        (default, "") => default.to_owned(),
        (default, derived) => format!("{derived}, else {default}"),
    };
    format!("{choices}[default: {default}] [env: {}]", key.variable())
}

/// What the command line asks for.
pub(super) fn task(matches: &ArgMatches) -> Task {
    match matches.subcommand() {
        Some(("check-config", _)) => Task::CheckConfig,
        Some(("generate", generate)) => match generate.subcommand() {
            Some(("man", man)) => Task::Man(man.get_one("directory").cloned().unwrap_or_default()),
            _ => Task::Example,
        },
        _ => Task::Run,
    }
}

/// Value of a key's flag.
pub(super) fn flag(matches: &ArgMatches, key: &Key) -> Option<String> {
    matches.get_one::<String>(key.flag).cloned()
}

/// File named by `--config`.
pub(super) fn config(matches: &ArgMatches) -> Option<PathBuf> {
    matches.get_one::<PathBuf>("config").cloned()
}

//! The command line.

// These comments are the help text, printed as they stand.
#![allow(clippy::doc_markdown)]

use std::{path::PathBuf, str::FromStr, time::Duration};

use clap::{Args, Parser, Subcommand, ValueEnum};
use jiff::SignedDuration;

use crate::document::Health;

/// Where the daemon listens unless told otherwise.
pub(crate) const SOCKET: &str = "/run/npu-dra/admin.sock";
/// Where the daemon keeps its records unless told otherwise.
pub(crate) const STATE_DIR: &str = "/var/lib/npu-dra";

/// What the exit statuses mean, for help and manual.
pub(crate) const EXIT_CODES: &str = "\
Exit status:
  0  ok
  1  failed
  2  wrong usage
  3  not found
  4  npu-dra cannot be reached (root gets its records, marked offline)
  5  not permitted
  6  refused by the state that something is in
  8  health: an NPU that was asked for is not ok";

/// Shows and controls what npu-dra, the Kubernetes DRA driver for Ascend NPUs, does on this node.
#[derive(Debug, Parser)]
#[command(name = "npuctl", version, after_help = EXIT_CODES, max_term_width = 100, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Global options")]
pub(crate) struct Global {
    /// Admin socket of npu-dra
    #[arg(long, global = true, value_name = "PATH", env = "NPUCTL_SOCKET", default_value = SOCKET, hide_env_values = true)]
    pub(crate) socket: PathBuf,
    /// State directory of npu-dra, read by root while npu-dra is down
    #[arg(long, global = true, value_name = "DIR", env = "NPUCTL_STATE_DIR", default_value = STATE_DIR, hide_env_values = true)]
    pub(crate) state_dir: PathBuf,
    /// Form of the output
    #[arg(short, long, global = true, value_name = "FORM", value_enum, default_value_t)]
    pub(crate) output: Form,
    /// Leave the header line out
    #[arg(long, global = true)]
    pub(crate) no_headers: bool,
    /// When to use colour; NO_COLOR switches `auto` off
    #[arg(long, global = true, value_name = "WHEN", value_enum, default_value_t)]
    pub(crate) color: When,
    /// Say nothing but errors on stderr
    #[arg(short, long, global = true)]
    pub(crate) quiet: bool,
    /// Say on stderr what is done
    #[arg(short, long, global = true, conflicts_with = "quiet")]
    pub(crate) verbose: bool,
    /// How long to wait for an answer: 10s, 500ms [default: 10s, and 2m where a vNPU is made or destroyed or the driver let go of]
    #[arg(long, global = true, value_name = "DURATION")]
    pub(crate) timeout: Option<Timeout>,
}

impl Global {
    /// How long to wait for an answer that needs no vendor library.
    pub(crate) fn timeout(&self) -> Duration {
        self.timeout.map_or(Duration::from_secs(10), |timeout| timeout.0)
    }

    /// How long to wait while the vendor library works: it may take half a minute, and may have other work before.
    pub(crate) fn long_timeout(&self) -> Duration {
        self.timeout.map_or(Duration::from_mins(2), |timeout| timeout.0)
    }
}

/// Form of the output.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Form {
    #[default]
    Table,
    Wide,
    Json,
    Yaml,
    Name,
}

/// When to use colour.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum When {
    #[default]
    Auto,
    Always,
    Never,
}

/// How long to wait.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Timeout(pub(crate) Duration);

impl FromStr for Timeout {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let seconds = text.parse::<u32>().ok().map(|seconds| Duration::from_secs(seconds.into()));
        let parsed = seconds.or_else(|| Duration::try_from(text.parse::<SignedDuration>().ok()?).ok());
        match parsed {
            Some(duration) if !duration.is_zero() => Ok(Self(duration)),
            _ => Err("a time is needed, such as 10s or 500ms".to_owned()),
        }
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// List the NPUs of this node
    Devices {
        /// Only these
        #[arg(value_name = "NAME")]
        names: Vec<String>,
        /// Go on and print what changes, until Ctrl-C
        #[arg(short, long)]
        watch: bool,
        /// Only those in this condition, or with this level of their own
        #[arg(long, value_name = "STATE", value_enum, value_delimiter = ',')]
        health: Vec<State>,
    },
    /// Show one NPU in full
    Device {
        /// Its name, npu-0
        #[arg(value_name = "NAME")]
        name: String,
    },
    /// Show how well the NPUs are; exit 8 if one is not ok
    Health {
        /// Only these
        #[arg(value_name = "NAME")]
        names: Vec<String>,
        /// Go on and print what changes, until Ctrl-C
        #[arg(short, long)]
        watch: bool,
    },
    /// Keep new claims from an NPU and evict the pods that have it (root only)
    Drain {
        #[command(flatten)]
        hold: Hold,
    },
    /// Keep new claims from an NPU; pods that have it stay (root only)
    Cordon {
        #[command(flatten)]
        hold: Hold,
    },
    /// vNPUs, the parts that NPUs are cut into
    #[command(arg_required_else_help = true)]
    Vnpu {
        #[command(subcommand)]
        command: Vnpu,
    },
    /// Claims that this node holds
    #[command(arg_required_else_help = true)]
    Claims {
        #[command(subcommand)]
        command: Claims,
    },
    /// The vendor's software, as npu-dra uses it
    #[command(arg_required_else_help = true)]
    Backend {
        #[command(subcommand)]
        command: Backend,
    },
    /// List the ResourceSlices of this node
    Slices,
    /// Show how npu-dra is, and everything around it
    Status,
    /// Show the versions of npuctl and npu-dra
    Version,
    /// Print a completion script for a shell
    Completion {
        /// The shell
        #[arg(value_name = "SHELL")]
        shell: clap_complete::Shell,
    },
    /// Write files that packages hold
    #[command(hide = true)]
    Generate {
        #[command(subcommand)]
        command: Generate,
    },
}

/// An operator's hand on an NPU.
#[derive(Debug, Args)]
pub(crate) struct Hold {
    /// The NPU
    #[arg(value_name = "NAME")]
    pub(crate) device: String,
    /// Why, in one line of at most 256 bytes; shown to everybody who asks
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub(crate) reason: String,
    /// Let claims have it again, whether it was drained or cordoned
    #[arg(long, conflicts_with = "reason")]
    pub(crate) undo: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Vnpu {
    /// List the vNPUs and who holds them
    List {
        /// Only those of this NPU
        #[arg(long, value_name = "NAME")]
        device: Option<String>,
    },
    /// Show the templates that NPUs can be cut by, and what can still be cut
    Templates {
        /// Only those of this NPU
        #[arg(long, value_name = "NAME")]
        device: Option<String>,
    },
    /// Make a vNPU that no claim has (root only); its NPU takes no new claims while it is there
    Create {
        /// The NPU to cut, which no claim may hold a part of
        #[arg(long, value_name = "NAME")]
        device: String,
        /// Template of the vNPU: see vnpu templates
        #[arg(long, value_name = "NAME")]
        template: String,
    },
    /// Destroy a vNPU that no claim has (root only)
    Destroy {
        /// Its name, vnpu-0-100, or its id, 100
        #[arg(value_name = "NAME|ID")]
        vnpu: VnpuName,
        /// Also while processes run on its NPU; never a vNPU of a claim
        #[arg(long)]
        force: bool,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Backend {
    /// Let go of the driver so that it can be upgraded (root only): NPUs take no new claims, what is prepared stays so
    ///
    /// No library is loaded and no device open until `npuctl backend resume`, also when npu-dra is started again.
    Suspend {
        /// Why, in one line of at most 256 bytes, for those who look at the status
        #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
        reason: String,
    },
    /// Take the driver up again (root only): all NPUs are read anew
    Resume,
}

/// A vNPU as it is named on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct VnpuName {
    /// Physical id of its chip, if that was told.
    pub(crate) chip: Option<u32>,
    /// Its id.
    pub(crate) id: u32,
}

impl FromStr for VnpuName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // No sign, and no number that the vendor library takes for all of them.
        let number = |text: &str| {
            let is_plain = text.bytes().all(|byte| byte.is_ascii_digit());
            text.parse::<u32>().ok().filter(|number| is_plain && *number < u32::from(u16::MAX))
        };
        let name = match text.strip_prefix("vnpu-") {
            Some(rest) => {
                rest.split_once('-').and_then(|(chip, id)| Some(Self { chip: Some(number(chip)?), id: number(id)? }))
            }
            None => number(text).map(|id| Self { chip: None, id }),
        };
        name.ok_or_else(|| "a vNPU is needed, such as vnpu-0-100 or 100".to_owned())
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Claims {
    /// List the claims
    List {
        /// Go on and print what changes, until Ctrl-C
        #[arg(short, long)]
        watch: bool,
    },
    /// Show the record of one claim in full
    Show {
        /// Its UID
        #[arg(value_name = "UID")]
        uid: String,
    },
    /// Let go of a claim whatever is known of it (root only): the last resort for a damaged record
    Release {
        /// Its UID
        #[arg(value_name = "UID")]
        uid: String,
        /// Yes, although a pod that still runs loses its devices to the next claim
        #[arg(long)]
        force: bool,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Generate {
    /// Write the manual pages
    Man {
        /// Directory that they are written to
        #[arg(value_name = "DIR")]
        dir: PathBuf,
    },
}

/// State of health, as it is asked for: conditions, then levels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum State {
    Ok,
    Unknown,
    Warn,
    Tainted,
    Fatal,
    Lost,
    Minor,
    Major,
    Critical,
    Gone,
}

impl State {
    /// True if a card with this health is meant; `None` if nothing is known of it.
    pub(crate) fn is_of(self, health: Option<&Health>) -> bool {
        let Some(health) = health else { return self == Self::Unknown };
        match self {
            Self::Minor | Self::Major | Self::Critical | Self::Gone => health.level == self.as_str(),
            _ => health.condition == self.as_str(),
        }
    }

    fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Unknown => "unknown",
            Self::Warn => "warn",
            Self::Tainted => "tainted",
            Self::Fatal => "fatal",
            Self::Lost => "lost",
            Self::Minor => "minor",
            Self::Major => "major",
            Self::Critical => "critical",
            Self::Gone => "gone",
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_vnpu_is_named_by_its_name_or_its_id() {
        assert_eq!("vnpu-1-117".parse(), Ok(VnpuName { chip: Some(1), id: 117 }));
        assert_eq!("117".parse(), Ok(VnpuName { chip: None, id: 117 }));
        for bad in ["", "npu-1", "vnpu-1", "vnpu-1-", "vnpu--117", "-1", "+100", "65535", "4294967295", "vnpu-1-117-2"]
        {
            assert!(bad.parse::<VnpuName>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_timeout_is_a_duration_or_whole_seconds() {
        for (text, millis) in [("10s", 10_000), ("500ms", 500), ("3", 3000), ("1m", 60_000)] {
            assert_eq!(text.parse::<Timeout>().unwrap().0, Duration::from_millis(millis), "{text}");
        }
        for bad in ["", "0", "-1s", "soon", "10 parsecs"] {
            assert!(bad.parse::<Timeout>().is_err(), "{bad}");
        }
    }
}

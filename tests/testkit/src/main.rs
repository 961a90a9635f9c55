//! `testkit demo` and `testkit sandbox`: the real daemon on a simulated node, for people without hardware.

mod held;
mod show;

use std::{path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand, ValueEnum};
use tokio::signal::unix::{SignalKind, signal};

/// The real npu-dra on a simulated node with eight Ascend 910B4.
#[derive(Debug, Parser)]
#[command(version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the main job step by step and check that nothing is left
    Demo,
    /// Keep a simulated node up until Ctrl-C
    Sandbox,
    /// Serve the cluster of a node whose npu-dra is started by something else, such as systemd: API server and kubelet
    Cluster {
        /// Directory of the NPUs' world and of the credentials
        #[arg(long, value_name = "DIR", default_value = "/var/lib/testkit")]
        dir: PathBuf,
        /// The node's root: device nodes, vendor files and kubelet's directories are made below it
        #[arg(long, value_name = "DIR", default_value = "/")]
        host: PathBuf,
    },
    /// Make a claim in a sandbox and prepare it, as scheduler and kubelet do
    Prepare {
        /// Name of the claim; one that exists is prepared again
        #[arg(value_name = "CLAIM")]
        claim: String,
        /// Part of a card by memory: 10000 (MiB), 8Gi; a whole card without it
        #[arg(long, value_name = "QUANTITY")]
        memory: Option<String>,
        /// Number of devices
        #[arg(long, default_value_t = 1)]
        count: u32,
        /// Class of the devices
        #[arg(long, default_value = "npu.huawei.com")]
        class: String,
        #[command(flatten)]
        sandbox: Sandbox,
    },
    /// Release a claim in a sandbox, as kubelet does when its pod ends, and delete it
    Unprepare {
        /// Name of the claim
        #[arg(value_name = "CLAIM")]
        claim: String,
        #[command(flatten)]
        sandbox: Sandbox,
    },
    /// Make a vNPU in a sandbox that npu-dra knows nothing of, as another tool would, or remove one
    Foreign {
        /// Physical id of the NPU, or with --remove the vNPU's id
        #[arg(value_name = "ID")]
        id: u32,
        /// Template of the vNPU
        #[arg(default_value = "vir05_1c_8g")]
        template: String,
        /// Remove a vNPU instead, whoever made it
        #[arg(long)]
        remove: bool,
        #[command(flatten)]
        sandbox: Sandbox,
    },
    /// Let a fault begin on an NPU of a sandbox, or end: the chip tells its code, and the library sends an event
    Fault {
        /// Its physical id: N of /dev/davinciN
        #[arg(value_name = "NPU")]
        npu: u32,
        /// The fault's code in hexadecimal: 80E01801
        #[arg(value_name = "CODE", value_parser = code)]
        code: u32,
        /// How bad the event says that it is
        #[arg(value_enum, default_value_t = Level::Major)]
        severity: Level,
        /// End it instead
        #[arg(long)]
        end: bool,
        #[command(flatten)]
        sandbox: Sandbox,
    },
    /// Let an NPU of a sandbox fall off its bus, or come back
    Lose {
        /// Its physical id: N of /dev/davinciN
        #[arg(value_name = "NPU")]
        npu: u32,
        /// Bring it back instead
        #[arg(long)]
        back: bool,
        #[command(flatten)]
        sandbox: Sandbox,
    },
    /// Give an NPU of a sandbox another state of health
    Health {
        /// Its physical id: N of /dev/davinciN
        #[arg(value_name = "NPU")]
        npu: u32,
        /// The state that the chip reports
        #[arg(value_enum)]
        level: Level,
        #[command(flatten)]
        sandbox: Sandbox,
    },
    /// Hold the API server's stand-in, or a real server, against recorded answers
    #[command(subcommand)]
    Corpus(held::Corpus),
}

#[derive(Debug, clap::Args)]
struct Sandbox {
    /// Directory of the sandbox
    #[arg(long = "sandbox", value_name = "DIR", env = "TESTKIT_SANDBOX")]
    dir: PathBuf,
}

/// What a chip says of itself.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Level {
    Ok,
    Minor,
    Major,
    Critical,
}

impl Level {
    /// The number that the vendor's library has for it.
    fn number(self) -> u8 {
        match self {
            Self::Ok => 0,
            Self::Minor => 1,
            Self::Major => 2,
            Self::Critical => 3,
        }
    }
}

/// A fault code as it is printed, with or without `0x`.
fn code(text: &str) -> Result<u32, String> {
    u32::from_str_radix(text.trim_start_matches("0x"), 16)
        .map_err(|_| "a fault code has up to eight hexadecimal digits, such as 80E01801".to_owned())
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let runtime = match tokio::runtime::Runtime::new() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("testkit: cannot start: {error}");
            return ExitCode::FAILURE;
        }
    };
    let until_stopped =
        matches!(cli.command, Command::Sandbox | Command::Cluster { .. } | Command::Corpus(held::Corpus::Serve { .. }));
    // Whatever ends the work, its processes and directories go with it.
    let outcome = runtime.block_on(async {
        let mut interrupts = signal(SignalKind::interrupt())?;
        let mut ends = signal(SignalKind::terminate())?;
        let mut hang_ups = signal(SignalKind::hangup())?;
        tokio::select! {
            outcome = work(cli.command) => outcome,
            _ = interrupts.recv() => anyhow::bail!(Stopped("Ctrl-C")),
            _ = ends.recv() => anyhow::bail!(Stopped("SIGTERM")),
            _ = hang_ups.recv() => anyhow::bail!(Stopped("SIGHUP")),
        }
    });
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if until_stopped && error.is::<Stopped>() => {
            eprintln!("\n{error}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("\ntestkit: {error:#}");
            ExitCode::from(if error.is::<Stopped>() { 130 } else { 1 })
        }
    }
}

async fn work(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Demo => show::demo::run().await,
        Command::Sandbox => show::sandbox::run().await,
        Command::Cluster { dir, host } => show::cluster::run(&dir, &host).await,
        Command::Prepare { claim, memory, count, class, sandbox } => {
            let wanted = show::sandbox::Wanted { claim, memory, count, class };
            show::sandbox::prepare(&sandbox.dir, wanted).await
        }
        Command::Unprepare { claim, sandbox } => show::sandbox::unprepare(&sandbox.dir, &claim).await,
        Command::Foreign { id, remove: true, sandbox, .. } => show::sandbox::remove_vnpu(&sandbox.dir, id),
        Command::Foreign { id, template, sandbox, .. } => show::sandbox::add_vnpu(&sandbox.dir, id, &template),
        Command::Fault { npu, code, severity, end, sandbox } => {
            show::sandbox::fault(&sandbox.dir, npu, code, severity.number(), end)
        }
        Command::Lose { npu, back, sandbox } => show::sandbox::lose(&sandbox.dir, npu, back),
        Command::Health { npu, level, sandbox } => show::sandbox::health(&sandbox.dir, npu, u32::from(level.number())),
        Command::Corpus(what) => held::corpus(what).await,
    }
}

/// Somebody ended the program before it was done.
#[derive(Debug)]
struct Stopped(&'static str);

impl std::fmt::Display for Stopped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ended by {}; processes and files of the simulated node are removed", self.0)
    }
}

impl std::error::Error for Stopped {}

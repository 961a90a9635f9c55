//! Measures the budgets of `budgets.toml` on this machine: `make bench`.
//!
//! The release daemon and `npuctl`, the fake library with 64 cards, the stand-ins for API server and kubelet; state and
//! CDI files on a disk. Rows may be named (`-- prepare npuctl`); the others are missing then, and the run fails. So it
//! does with `BENCH_QUICK=1`, which measures less and waits less, for work on the bench itself.

mod budgets;
mod floor;
mod rows;
mod samples;
mod stage;

use std::{
    env,
    io::{self, Write as _},
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use budgets::Budgets;
use samples::rate;
use tempfile::TempDir;

/// What can be measured, in the order in which it is.
const ROWS: [&str; 9] = ["register", "prepare", "parallel", "cut", "killed", "npuctl", "polling", "faults", "quiet"];
/// Replaces of one writer, and of each of many, for the floor.
const FLOOR: (u32, u32) = (1000, 30);

/// One run of the bench. Its directory goes with it.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) budgets: Budgets,
    dir: TempDir,
    quick: bool,
}

impl Run {
    /// A directory for something.
    pub(crate) fn dir(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// How often something is done; a quick run does the `part`th of it.
    pub(crate) fn scaled(&self, count: u32, part: u32) -> u32 {
        if self.quick { (count / part).max(1) } else { count }
    }

    /// How long something is waited for; a quick run waits for a tenth of it.
    pub(crate) fn waiting(&self, time: Duration) -> Duration {
        if self.quick { time / 10 } else { time }
    }

    /// Writes a line; a reader that has gone is no error.
    #[expect(clippy::unused_self, reason = "only a run has something to say")]
    pub(crate) fn say(&self, line: &str) {
        let _ = writeln!(io::stdout().lock(), "{line}");
    }

    /// The machine's own floor.
    fn floor(&self) -> anyhow::Result<()> {
        let dir = self.dir("floor");
        let one = floor::one_writer(&dir, FLOOR.0)?;
        self.say(&format!("floor: one durable replace of 800 bytes: {}", one.summary()));
        let time = floor::many_writers(&dir, FLOOR.1)?;
        let (single, all) = (rate(FLOOR.0, one.total()), rate(FLOOR.1 * floor::WRITERS, time));
        self.say(&format!("floor: {single:.0}/s of one writer, {all:.0}/s of {} writers", floor::WRITERS));
        Ok(())
    }

    /// Measures what is wanted; a row that fails leaves its figures missing.
    async fn measure(&mut self, wanted: &[String]) {
        for row in ROWS.into_iter().filter(|row| wanted.is_empty() || wanted.iter().any(|name| name == row)) {
            let start = Instant::now();
            let result = match row {
                "register" => rows::start::register(self).await,
                "prepare" => rows::claims::prepare(self).await,
                "parallel" => rows::claims::parallel(self).await,
                "cut" => rows::cut::cut(self).await,
                "killed" => rows::start::killed(self).await,
                "npuctl" => rows::start::npuctl(self).await,
                "polling" => rows::polling::polling(self).await,
                "faults" => rows::faults::faults(self).await,
                _ => rows::quiet::quiet(self).await,
            };
            let state = result.map_or_else(|error| format!("failed: {error:#}"), |()| "measured".to_owned());
            self.say(&format!("{row}: {state}, {:.0} s", start.elapsed().as_secs_f64()));
        }
    }
}

fn main() -> ExitCode {
    match bench() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            let _ = writeln!(io::stderr(), "bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// True if every budget is met.
fn bench() -> anyhow::Result<bool> {
    // Cargo adds flags of its own.
    let wanted: Vec<String> = env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    if let Some(stranger) = wanted.iter().find(|name| !ROWS.contains(&name.as_str())) {
        anyhow::bail!("there is no row {stranger}: name some of {}", ROWS.join(", "));
    }
    let base = env::var_os("BENCH_DIR").map_or_else(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")), PathBuf::from);
    let quick = env::var_os("BENCH_QUICK").is_some_and(|value| value == "1");
    let run = Run { budgets: Budgets::read()?, dir: directory(&base)?, quick };
    run.say(&format!("directory: {}, {}", run.dir.path().display(), floor::file_system(run.dir.path())?));
    run.say(&load());
    if quick {
        run.say("BENCH_QUICK: fewer samples and shorter waits; this proves nothing");
    }
    run.floor()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(finish(run, &wanted))
}

/// Measures and judges. A signal ends it; daemons and directories go either way.
async fn finish(mut run: Run, wanted: &[String]) -> anyhow::Result<bool> {
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    tokio::select! {
        () = run.measure(wanted) => {}
        _ = tokio::signal::ctrl_c() => anyhow::bail!("interrupted"),
        _ = terminate.recv() => anyhow::bail!("told to end"),
    }
    let (table, verdict) = run.budgets.judge()?;
    run.say(&table);
    run.say(&format!("bench: {verdict}{}", if run.quick { ", but quick: nothing is proven" } else { "" }));
    Ok(verdict.is_good() && !run.quick)
}

/// How busy the machine is. Work of others makes every time longer, most of all those of processors.
fn load() -> String {
    let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load: f64 = load.split(' ').next().and_then(|load| load.parse().ok()).unwrap_or_default();
    let busy = u32::try_from(processors).is_ok_and(|processors| load > f64::from(processors) / 2.0);
    let warning = if busy { ": others work here too, and times are longer for it" } else { "" };
    format!("load: {load} on {processors} processors{warning}")
}

fn directory(base: &Path) -> anyhow::Result<TempDir> {
    std::fs::create_dir_all(base).with_context(|| format!("cannot make {}", base.display()))?;
    let made = tempfile::Builder::new().prefix("bench-").tempdir_in(base);
    made.with_context(|| format!("cannot make a directory in {}", base.display()))
}

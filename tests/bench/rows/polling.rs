//! What it costs to look at cards all the time: processor time of a quiet node.

use std::{fs, time::Duration};

use anyhow::{Context as _, ensure};
use tokio::time::{Instant as Clock, sleep_until};

use crate::{Run, stage::Stage};

/// Cards of the node.
const CARDS: u32 = 16;
/// Time after the start that is not measured: the first scan and the first writes.
const SETTLE: Duration = Duration::from_secs(20);
/// Length of what is measured.
const QUIET: Duration = Duration::from_mins(5);
const HOUR: Duration = Duration::from_hours(1);
/// The call that each poll makes once for a card.
const HEALTH_CALL: &str = "dcmi_get_device_health";

/// Processor time in an hour, with the health interval that users get.
pub(crate) async fn polling(run: &mut Run) -> anyhow::Result<()> {
    let mut stage = Stage::run(&run.dir("polling"), CARDS).await?;
    sleep_until(Clock::now() + run.waiting(SETTLE)).await; // waits: for the start to be over
    let pid = stage.daemon()?.pid();
    stage.node.world().clear_calls()?;
    let (start, before) = (Clock::now(), family_ticks(pid)?);
    sleep_until(start + run.waiting(QUIET)).await; // waits: for the quiet minutes to pass
    let (watched, after) = (start.elapsed(), family_ticks(pid)?);
    ensure!(stage.daemon()?.exit_status()?.is_none(), "the daemon ended in the quiet minutes");
    let calls = stage.node.world().calls()?;
    let polls = calls.count(HEALTH_CALL) / usize::try_from(CARDS)?;
    ensure!(polls > 0, "nobody looked at the cards");
    let hours = HOUR.as_secs_f64() / watched.as_secs_f64();
    let seconds = |before: u32, after: u32| f64::from(after.saturating_sub(before)) / TICKS * hours;
    let own = seconds(before.own, after.own);
    let worker = seconds(before.children, after.children);
    let note = format!(
        "{own:.1} s the daemon + {worker:.1} s the library's process, {polls} polls of {CARDS} cards and {} calls in {:.0} s",
        calls.len(),
        watched.as_secs_f64()
    );
    run.budgets.measured("polling", own + worker, note);
    Ok(())
}

/// Ticks of the processor clock in a second, as /proc counts them for every program.
const TICKS: f64 = 100.0;

/// Processor time of a process and of all below it, in ticks.
struct Ticks {
    own: u32,
    children: u32,
}

fn family_ticks(pid: u32) -> anyhow::Result<Ticks> {
    let mut ticks = Ticks { own: ticks_of(pid)?, children: 0 };
    let mut left = children(pid)?;
    while let Some(pid) = left.pop() {
        ticks.children += ticks_of(pid)?;
        left.extend(children(pid)?);
    }
    Ok(ticks)
}

fn ticks_of(pid: u32) -> anyhow::Result<u32> {
    let path = format!("/proc/{pid}/stat");
    let stat = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    // Behind the name, which may have blanks: state, then eleven fields, then user and system time, then those of
    // children that have ended.
    let fields: Vec<&str> = stat.rsplit(") ").next().unwrap_or_default().split(' ').collect();
    let times = fields.get(11..15).with_context(|| format!("{path} is too short"))?;
    times.iter().map(|time| time.parse::<u32>().with_context(|| format!("{path} has the time {time}"))).sum()
}

fn children(pid: u32) -> anyhow::Result<Vec<u32>> {
    let mut all = Vec::new();
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let text = fs::read_to_string(task?.path().join("children")).unwrap_or_default();
        all.extend(text.split_whitespace().filter_map(|child| child.parse::<u32>().ok()));
    }
    Ok(all)
}

//! Faults that events tell: how soon they are taints, and what a storm of them writes.

use std::time::{Duration, Instant};

use anyhow::ensure;
use dcmi::world::{Assertion, Notice};
use testkit::node::{DRIVER, NODE, SOON};
use tokio::time::{Instant as Clock, sleep_until};

use super::{claims::CARDS, quiet::tainted};
use crate::{Run, samples::Samples, stage::Stage};

/// HBM multi-bit ECC.
const CODE: u32 = 0x80E0_1801;
const CRITICAL: u8 = 3;
/// Faults that are timed.
const FAULTS: u32 = 200;
/// Cards that flap, how long, and how many events go out at a time, a tenth of a second apart.
const FLAPPING: u32 = 8;
const STORM: Duration = Duration::from_secs(5);
const BURST: u32 = 100;

/// Faults one after the other, then a storm.
pub(crate) async fn faults(run: &mut Run) -> anyhow::Result<()> {
    let stage = Stage::failing(&run.dir("faults"), CARDS).await?;
    let mut times = Samples::default();
    for number in 0..run.scaled(FAULTS, 10) {
        let (card, device) = (number % CARDS, stage.card(number));
        let is_tainted = |yes| move |device: &str, slices: &[&serde_json::Value]| tainted(slices, device) == yes;
        // A card's earlier fault must be over.
        let open = is_tainted(false);
        stage.api.wait_until(|state| open(&device, &state.slices(DRIVER, NODE)), SOON).await?;
        let start = Instant::now();
        stage.node.world().occur(card, CODE, CRITICAL)?;
        let told = is_tainted(true);
        stage.api.wait_until(|state| told(&device, &state.slices(DRIVER, NODE)), SOON).await?;
        times.push(start.elapsed());
        stage.node.world().recover(card, CODE, CRITICAL)?;
    }
    run.budgets.measured("event-taint", times.percentile(99), times.summary());

    let all = |state: testkit::api::State<'_>, yes: bool, cards: u32| {
        let slices = state.slices(DRIVER, NODE);
        (0..cards).all(|card| tainted(&slices, &stage.card(card)) == yes)
    };
    stage.api.wait_until(|state| all(state, false, CARDS), SOON).await?;
    stage.api.forget_requests();
    let (start, mut next, mut sent) = (Instant::now(), Clock::now(), 0_u32);
    while start.elapsed() < run.waiting(STORM) {
        let notice = |number: u32| Notice {
            phy: number / 2 % FLAPPING,
            code: CODE,
            severity: CRITICAL,
            assertion: if number.is_multiple_of(2) { Assertion::Occurred } else { Assertion::Recovered },
        };
        let burst: Vec<_> = (sent..sent + BURST).map(notice).collect();
        stage.node.world().send_events(&burst)?;
        sent += BURST;
        next += Duration::from_millis(100);
        sleep_until(next).await; // waits: a storm of 1,000 events a second
    }
    let lasted = start.elapsed();
    ensure!(stage.api.with_state(|state| all(state, true, FLAPPING)), "not every card that flaps is tainted");
    stage.api.wait_until(|state| all(state, false, FLAPPING), SOON).await?;
    let writes = stage.api.writes_since(start);
    let slices = writes.iter().filter(|write| write.path.contains("resourceslices")).count();
    // Each card becomes tainted once, and once is no longer.
    let ratio = f64::from(u32::try_from(writes.len())?) / f64::from(2 * FLAPPING);
    let note = format!(
        "{slices} slice writes and {} of Events for {sent} events in {:.0} s",
        writes.len() - slices,
        lasted.as_secs_f64()
    );
    run.budgets.measured("storm-writes", ratio, note);
    Ok(())
}

//! Preparing parts of cards: our own time beside the library's, and who waits for a card that is slow to be cut.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use testkit::kubelet::DraClient;

use crate::{
    Run, floor,
    samples::{Samples, ms},
    stage::{Stage, prepared},
};

/// Cards of the stage.
const CARDS: u32 = 64;
/// What a card's first slice takes where it is slow.
const SLOW: Duration = Duration::from_millis(1500);
/// Prepares in a block, before the bare replaces have their turn.
const BLOCK: u32 = 20;

pub(crate) async fn cut(run: &mut Run) -> anyhow::Result<()> {
    let stage = Stage::cutting(&run.dir("cut"), CARDS).await?;
    let client = stage.client()?;
    own_time(run, &stage, &client).await?;
    slow_card(run, &stage, &client).await
}

/// A prepare of a part, less the API server's and the vendor library's time.
async fn own_time(run: &mut Run, stage: &Stage, client: &DraClient) -> anyhow::Result<()> {
    let dir = run.dir("cut-replace");
    let (mut own, mut bare) = (Samples::default(), Samples::default());
    for _ in 0..run.scaled(25, 10) {
        for number in 0..BLOCK {
            own.push(stage.own_time_of_part(client, &stage.card(number)).await?);
        }
        bare.extend(tokio::task::block_in_place(|| floor::one_writer(&dir, BLOCK))?);
    }
    run.budgets.measured("cut-replace-p50", bare.percentile(50), "");
    run.budgets.measured("cut-p50", own.percentile(50), own.summary());
    Ok(())
}

/// One card takes long for its first slice. Whole cards must not wait for it at all; a part of another card waits for
/// the call that is under way, since the library does one thing at a time.
async fn slow_card(run: &mut Run, stage: &Stage, client: &DraClient) -> anyhow::Result<()> {
    let whole = |number: u32| stage.card(2 + number % (CARDS - 2));
    let mut idle = Samples::default();
    for number in 0..run.scaled(100, 4) {
        idle.push(stage.own_time(client, &whole(number)).await?);
    }
    let first_ms = u64::try_from(SLOW.as_millis())?;
    stage.node.world().edit(|data| data.slicing.first_ms = first_ms)?;
    let (mut beside, mut waits) = (Samples::default(), Samples::default());
    for _ in 0..run.scaled(5, 5) {
        let (slow, queued) = (stage.part(&stage.card(0))?, stage.part(&stage.card(1))?);
        let begin = Instant::now();
        let one = async { prepared(client, &slow).await.map(|()| begin.elapsed()) };
        let other = async { prepared(client, &queued).await.map(|()| begin.elapsed()) };
        let others = async {
            let mut number = 0;
            while begin.elapsed() < SLOW {
                beside.push(stage.own_time(client, &whole(number)).await?);
                number += 1;
            }
            anyhow::Ok(())
        };
        let (one, other, ()) = tokio::try_join!(one, other, others)?;
        // Each of the two first slices takes its time; what is over both is waiting for something else.
        waits.push(one.max(other).saturating_sub(SLOW * 2));
        stage.release(client, &[slow, queued]).await?;
    }
    stage.node.world().edit(|data| data.slicing.first_ms = 0)?;
    let note = format!("{} beside it, {} on an idle node", beside.summary(), idle.summary());
    run.budgets.measured("slice-elsewhere", beside.percentile(50) / idle.percentile(50), note);
    run.budgets.measured("slice-queue", waits.percentile(100), format!("two first slices of {:.0} ms", ms(SLOW)));
    anyhow::ensure!(beside.len() > 0, "no whole card was prepared meanwhile");
    let overlaps = stage.node.world().overlaps().context("cannot read the overlaps")?;
    anyhow::ensure!(overlaps.is_empty(), "calls of the library overlapped: {overlaps:?}");
    Ok(())
}

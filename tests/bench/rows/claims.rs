//! Preparing whole cards: one after the other beside few and many records, and 64 at once.

use std::time::Duration;

use crate::{
    Run, floor,
    samples::{Samples, median, rate},
    stage::Stage,
};

/// The bench's cards.
pub(crate) const CARDS: u32 = 64;
/// Records of the full node.
const MANY: u32 = 10_000;
/// Prepares, and replaces, before the other node has its turn.
const BLOCK: u32 = 40;
const BLOCKS: u32 = 26;
/// What the API server takes where it is slow.
const SLOW: Duration = Duration::from_millis(20);

/// Own time of a prepare. Both nodes and the bare replaces take turns, so that all three meet the same machine.
pub(crate) async fn prepare(run: &mut Run) -> anyhow::Result<()> {
    let (few, many) = (Stage::run(&run.dir("few"), CARDS).await?, Stage::run(&run.dir("many"), CARDS).await?);
    few.fill(1).await?;
    let records = run.scaled(MANY, 20);
    many.fill(records).await?;
    let (few_client, many_client) = (few.client()?, many.client()?);
    let dir = run.dir("replace");
    let (mut at_few, mut at_many, mut bare) = (Samples::default(), Samples::default(), Samples::default());
    for _ in 0..run.scaled(BLOCKS, 10) {
        at_few.extend(few.own_times(&few_client, BLOCK).await?);
        at_many.extend(many.own_times(&many_client, BLOCK).await?);
        bare.extend(tokio::task::block_in_place(|| floor::one_writer(&dir, BLOCK))?);
    }
    run.say(&format!("  replace beside the prepares: {}", bare.summary()));
    let budgets = &mut run.budgets;
    budgets.measured("replace-p50", bare.percentile(50), "");
    budgets.measured("replace-p99", bare.percentile(99), "");
    budgets.measured("prepare-p50", at_few.percentile(50), at_few.summary());
    budgets.measured("prepare-p99", at_few.percentile(99), "");
    let note = format!("{records} records: {}", at_many.summary());
    budgets.measured("prepare-10000-p50", at_many.percentile(50), note);
    budgets.measured("prepare-10000-p99", at_many.percentile(99), "");
    budgets.measured("prepare-growth", at_many.percentile(50) / at_few.percentile(50), "");
    Ok(())
}

/// Many claims at once to one at a time, beside the disk's own many writers to one.
pub(crate) async fn parallel(run: &mut Run) -> anyhow::Result<()> {
    let stage = Stage::run(&run.dir("parallel"), CARDS).await?;
    let client = stage.client()?;
    let dir = run.dir("writers");
    let mut rates = [const { Vec::new() }; 4];
    for _ in 0..run.scaled(12, 4) {
        for (at_once, rates) in [false, true].into_iter().zip(&mut rates) {
            rates.push(rate(CARDS, stage.prepare_all(&client, at_once).await?));
        }
        let (one, many) = tokio::task::block_in_place(|| {
            let one = floor::one_writer(&dir, 2 * CARDS)?;
            anyhow::Ok((one, floor::many_writers(&dir, 16)?))
        })?;
        rates[2].push(rate(2 * CARDS, one.total()));
        rates[3].push(rate(16 * floor::WRITERS, many));
    }
    let [single, all, one, many] = rates.map(median);
    let note = format!("{all:.0} prepares/s to {single:.0}");
    run.budgets.measured("parallel-fast-api", all / single, note);
    run.budgets.measured("writers-gain", many / one, "");
    run.say(&format!("  replaces beside them: {many:.0}/s of 64 writers to {one:.0}/s of one"));

    stage.api.set_latency(SLOW);
    let mut rates = [const { Vec::new() }; 2];
    for _ in 0..run.scaled(4, 2) {
        for (at_once, rates) in [false, true].into_iter().zip(&mut rates) {
            rates.push(rate(CARDS, stage.prepare_all(&client, at_once).await?));
        }
    }
    let [single, all] = rates.map(median);
    run.budgets.measured("parallel-slow-api", all / single, format!("{all:.0} prepares/s to {single:.0}"));
    Ok(())
}

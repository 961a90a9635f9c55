//! A load on a driver's DRA socket, for the figures: kubelet's calls for many claims, one at a time and side by side. It
//! asks nothing else of a driver, so that any can be measured alike.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use futures::{StreamExt as _, TryStreamExt as _, stream};

use crate::kubelet::client::{Claim, DraClient, DraVersion};

/// Times of one kind of call.
#[derive(Debug)]
pub struct Times {
    /// Half of them took at most so many milliseconds.
    pub p50_ms: f64,
    /// 99 of 100 took at most so many milliseconds.
    pub p99_ms: f64,
}

/// A measurement: claims prepared and released again.
#[derive(Debug)]
pub struct Run {
    /// How many at a time.
    pub at_once: usize,
    /// Pairs of a prepare and an unprepare.
    pub pairs: usize,
    /// Pairs in a second.
    pub pairs_per_second: f64,
    /// The prepares.
    pub prepare: Times,
    /// The unprepares.
    pub unprepare: Times,
}

/// Prepares and releases the claims, which exist and are allocated: `rounds` times one after the other, then as often all
/// at once.
///
/// # Errors
/// The driver does not answer, or refuses a claim.
pub async fn measure(socket: &Path, claims: &[Claim], rounds: usize) -> anyhow::Result<[Run; 2]> {
    let client = speaking(socket).await?;
    // The first calls open connections and fill caches.
    pairs(&client, claims, 1, claims.len()).await?;
    Ok([pairs(&client, claims, rounds, 1).await?, pairs(&client, claims, rounds, claims.len()).await?])
}

/// A client that speaks the newest service that the driver has.
async fn speaking(socket: &Path) -> anyhow::Result<DraClient> {
    let client = DraClient::connect(socket, DraVersion::V1).await;
    let client = client.with_context(|| format!("nobody listens at {}", socket.display()))?;
    for version in [DraVersion::V1, DraVersion::V1Beta1] {
        let client = client.speaking(version);
        if client.prepare(&[]).await.is_ok() {
            return Ok(client);
        }
    }
    bail!("{} serves neither v1 nor v1beta1", socket.display())
}

async fn pairs(client: &DraClient, claims: &[Claim], rounds: usize, at_once: usize) -> anyhow::Result<Run> {
    let start = Instant::now();
    let work = claims.iter().map(|claim| async move {
        let mut times = Vec::with_capacity(rounds);
        for _ in 0..rounds {
            let start = Instant::now();
            let refused = |what: &str, why: String| anyhow::anyhow!("{what} of {}: {why}", claim.name);
            client.prepare_one(claim).await.map_err(|why| refused("prepare", why))?;
            let prepared = Instant::now();
            client.unprepare_one(claim).await.map_err(|why| refused("unprepare", why))?;
            times.push((prepared - start, prepared.elapsed()));
        }
        anyhow::Ok(times)
    });
    let work: Vec<_> = work.collect();
    let times: Vec<_> = stream::iter(work).buffer_unordered(at_once).try_collect().await?;
    let seconds = start.elapsed().as_secs_f64();
    let (prepares, unprepares): (Vec<_>, Vec<_>) = times.into_iter().flatten().unzip();
    let count = prepares.len();
    let per_second = f64::from(u32::try_from(count).unwrap_or(u32::MAX)) / seconds;
    Ok(Run {
        at_once,
        pairs: count,
        pairs_per_second: per_second,
        prepare: times_of(prepares),
        unprepare: times_of(unprepares),
    })
}

fn times_of(mut all: Vec<Duration>) -> Times {
    all.sort_unstable();
    let at = |part: usize| {
        let index = (all.len() * part / 100).min(all.len().saturating_sub(1));
        all.get(index).copied().unwrap_or_default().as_secs_f64() * 1e3
    };
    Times { p50_ms: at(50), p99_ms: at(99) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_the_times_are_told() {
        let times = times_of((1..=200).map(Duration::from_millis).collect());
        assert!((times.p50_ms - 101.0).abs() < 1e-9 && (times.p99_ms - 199.0).abs() < 1e-9, "{times:?}");
        let none = times_of(Vec::new());
        assert!(none.p50_ms == 0.0 && none.p99_ms == 0.0);
    }
}

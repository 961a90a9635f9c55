//! Samples of time and what they say.

use std::time::Duration;

/// Measured times.
#[derive(Debug, Clone, Default)]
pub(crate) struct Samples(Vec<Duration>);

impl Samples {
    pub(crate) fn push(&mut self, sample: Duration) {
        self.0.push(sample);
    }

    pub(crate) fn extend(&mut self, samples: Self) {
        self.0.extend(samples.0);
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn total(&self) -> Duration {
        self.0.iter().sum()
    }

    /// A percentile by nearest rank, in milliseconds; 100 is the worst. NaN without samples, which meets no budget.
    pub(crate) fn percentile(&self, percent: usize) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let rank = (sorted.len() * percent).div_ceil(100).max(1);
        sorted.get(rank - 1).map_or(f64::NAN, |sample| ms(*sample))
    }

    /// `n=… p50=… p99=… worst=…`, in milliseconds.
    pub(crate) fn summary(&self) -> String {
        let at = |percent| self.percentile(percent);
        format!("n={} p50={:.2} p99={:.2} worst={:.2} ms", self.len(), at(50), at(99), at(100))
    }
}

/// Milliseconds.
pub(crate) fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// The middle of some numbers; NaN of none.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len().saturating_sub(1) / 2).copied().unwrap_or(f64::NAN)
}

/// Things in a second.
pub(crate) fn rate(count: u32, time: Duration) -> f64 {
    f64::from(count) / time.as_secs_f64()
}

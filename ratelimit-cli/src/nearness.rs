//! [`Nearness`]: how near the callers of a limit came to it.

use std::borrow::Cow;
use std::collections::HashMap;

use ratelimit_core::Decision;

/// The bins of callers that were never denied: nothing left, and a bin per tenth of the capacity.
pub(crate) const BINS: usize = 11;
/// The most callers of one limit that are told apart.
const MAX_CALLERS: usize = 1 << 20;

/// The callers of one limit by the least share of the capacity that was left to them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Nearness {
    /// By key: 0 if the limit denied the caller, otherwise its lowest bin plus 1.
    least: HashMap<Box<str>, u8>,
    /// Requests of callers beyond [`MAX_CALLERS`].
    uncounted: u64,
}

/// How many callers are in each bin.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Histogram {
    /// The callers that the limit denied at least once.
    pub(crate) denied: u64,
    /// The others. The first bin had nothing left at least once; bin `n` had at least once no more than `n` tenths.
    pub(crate) bins: [u64; BINS],
    /// Requests of callers that are in no bin, because there were too many callers.
    pub(crate) uncounted: u64,
}

impl Nearness {
    pub(crate) fn count(&mut self, key: Cow<'_, str>, decision: &Decision) {
        let seen = if decision.allowed { 1 + bin(decision.remaining, decision.limit) } else { 0 };
        if let Some(least) = self.least.get_mut(&*key) {
            *least = (*least).min(seen);
        } else if self.least.len() < MAX_CALLERS {
            self.least.insert(key.into(), seen);
        } else {
            self.uncounted += 1;
        }
    }

    pub(crate) fn histogram(&self) -> Histogram {
        let mut histogram = Histogram { uncounted: self.uncounted, ..Histogram::default() };
        for &least in self.least.values() {
            match usize::from(least).checked_sub(1) {
                None => histogram.denied += 1,
                Some(bin) => histogram.bins[bin.min(BINS - 1)] += 1,
            }
        }
        histogram
    }
}

/// The share in tenths, rounded up, so that only nothing is 0.
fn bin(remaining: u64, limit: u64) -> u8 {
    let tenths = (u128::from(remaining) * 10).div_ceil(u128::from(limit.max(1)));
    u8::try_from(tenths.min(10)).unwrap_or(10)
}

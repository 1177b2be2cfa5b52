//! [`Nearness`]: how near the callers of a limit came to it.

use std::borrow::Cow;
use std::collections::HashMap;

use ratelimit_core::Decision;
use serde::Serialize;

/// The bins of callers that were never denied: nothing left, and a bin per tenth of the capacity.
const BINS: usize = 11;
/// The most callers of one limit that a replay tells apart.
pub const MAX_CALLERS: usize = 1 << 20;

/// The callers of one limit by what was left to them, and what they used.
pub struct Nearness {
    /// By key: the lowest bin, none if the limit denied the caller; and the most that it used at
    /// once.
    callers: HashMap<Box<str>, (Option<usize>, u64)>,
    /// The most callers that are counted, each for itself.
    most: usize,
    /// Requests of callers beyond these.
    uncounted: u64,
}

/// How many callers are in each bin.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Histogram {
    /// The callers that the limit denied at least once.
    pub callers_denied: u64,
    /// The others. The first bin had nothing left at least once; bin `n` had at least once no more
    /// than `n` tenths.
    pub(crate) least_left: [u64; BINS],
    /// Requests of callers that are in no bin, because there were too many callers.
    pub(crate) uncounted: u64,
}

impl Nearness {
    pub(crate) fn new(most: usize) -> Self {
        Self { callers: HashMap::new(), most, uncounted: 0 }
    }

    pub(crate) fn count(&mut self, key: Cow<'_, str>, decision: &Decision) {
        let bin = decision.allowed.then(|| bin(decision.remaining, decision.limit));
        let used = bin.map_or(u64::MAX, |_| decision.limit - decision.remaining);
        if let Some((least, most)) = self.callers.get_mut(&*key) {
            // None is less than any bin.
            (*least, *most) = (bin.min(*least), used.max(*most));
        } else if self.callers.len() < self.most {
            self.callers.insert(key.into(), (bin, used));
        } else {
            self.uncounted += 1;
        }
    }

    /// The most that each caller used at once, by its key; the maximum if it was denied.
    pub(crate) fn most_used(&self) -> impl Iterator<Item = (&str, u64)> {
        self.callers.iter().map(|(key, (_, used))| (&**key, *used))
    }

    /// How many callers are in each bin.
    pub fn histogram(&self) -> Histogram {
        let mut histogram = Histogram { uncounted: self.uncounted, ..Histogram::default() };
        for &(least, _) in self.callers.values() {
            match least {
                None => histogram.callers_denied += 1,
                Some(bin) => histogram.least_left[bin] += 1,
            }
        }
        histogram
    }
}

/// The share in tenths, rounded up, so that only nothing is 0.
fn bin(remaining: u64, limit: u64) -> usize {
    let tenths = (u128::from(remaining) * 10).div_ceil(u128::from(limit.max(1)));
    usize::try_from(tenths).unwrap_or(BINS).min(BINS - 1)
}

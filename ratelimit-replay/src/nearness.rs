//! [`Nearness`]: how near the callers of a limit came to it, and what they needed.

use std::cmp::Reverse;

use ratelimit_core::{AnyAlgorithm, Decision, Limit};
use serde::Serialize;
use smallvec::SmallVec;

use crate::by_hash::{ByHash, hash_of};
use crate::caller::Caller;
use crate::suggest::Needs;

/// The bins of callers that were never denied: nothing left, and a bin per tenth of the capacity.
const BINS: u8 = 11;

/// The callers of one limit by what was left to them, and by what they needed.
pub struct Nearness {
    callers: ByHash<Seen>,
    /// Requests of callers that are not among them, because there were too many callers.
    left_out: u64,
}

/// What was seen of one caller.
struct Seen {
    /// The lowest bin: `None` if the limit denied the caller, the last if it decided nothing.
    least: Option<u8>,
    /// The capacity that the caller needs; 0 if that was not observed.
    need: u64,
}

/// How many callers are in each bin.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Histogram {
    /// The callers that the limit denied at least once.
    pub callers_denied: u64,
    /// The others. The first bin had nothing left at least once; bin `n` had at least once no more
    /// than `n` tenths.
    pub(crate) least_left: [u64; BINS as usize],
    /// Requests of callers that are in no bin, because there were too many callers.
    pub uncounted: u64,
}

impl Default for Seen {
    fn default() -> Self {
        Self { least: Some(BINS), need: 0 }
    }
}

impl Nearness {
    /// `most`: how many callers are counted one by one.
    pub(crate) const fn of_at_most(most: usize) -> Self {
        Self { callers: ByHash::new(most), left_out: 0 }
    }

    /// Counts a decision about the caller whose key has this hash.
    pub(crate) fn decided(&mut self, hash: u64, decision: &Decision) {
        let bin = decision.allowed.then(|| bin(decision.remaining, decision.limit));
        match self.callers.of(hash, Seen::default) {
            // None is less than any bin.
            Some(seen) => seen.least = bin.min(seen.least),
            None => self.left_out += 1,
        }
    }

    /// The most that a caller needs, for one of its requests. `is_counted`: whether a decision
    /// about that is counted, too.
    pub(crate) fn need_of(&mut self, hash: u64, is_counted: bool) -> Option<&mut u64> {
        let seen = self.callers.of(hash, Seen::default);
        self.left_out += u64::from(seen.is_none() && !is_counted);
        seen.map(|seen| &mut seen.need)
    }

    /// What callers needed of a limit of this algorithm.
    pub(crate) fn needs(&self, algorithm: AnyAlgorithm) -> Needs {
        let needs = self.callers.values().map(|seen| seen.need).filter(|need| *need > 0);
        let mut needs: Vec<_> = needs.collect();
        needs.sort_unstable_by_key(|need| Reverse(*need));
        Needs { algorithm, capacities: needs, left_out: self.left_out }
    }

    /// Requests of callers that are not counted, because there were too many callers.
    pub(crate) const fn left_out(&self) -> u64 {
        self.left_out
    }

    /// How many callers are in each bin.
    pub fn histogram(&self) -> Histogram {
        let mut histogram = Histogram { uncounted: self.left_out, ..Histogram::default() };
        for seen in self.callers.values() {
            match seen.least.map(usize::from) {
                None => histogram.callers_denied += 1,
                Some(bin) => {
                    histogram.least_left.get_mut(bin).into_iter().for_each(|callers| *callers += 1);
                }
            }
        }
        histogram
    }
}

/// The hashes of a caller's keys by the places of the limits: `None` under a limit that does not
/// apply to the caller.
pub(crate) type KeyHashes = SmallVec<[Option<u64>; 4]>;

/// The hash of a caller's key under a limit.
pub(crate) fn key_hash(limit: &Limit<AnyAlgorithm>, caller: &Caller) -> Option<u64> {
    limit.key_for(caller).map(|key| hash_of(&*key))
}

/// The share in tenths, rounded up, so that only nothing is 0.
fn bin(remaining: u64, limit: u64) -> u8 {
    let tenths = (u128::from(remaining) * 10).div_ceil(u128::from(limit.max(1)));
    u8::try_from(tenths).unwrap_or(u8::MAX).min(BINS - 1)
}

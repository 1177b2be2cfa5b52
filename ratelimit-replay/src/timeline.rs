//! [`Timeline`]: admissions and denials over time, in a bounded number of buckets.

use std::collections::BTreeMap;

use ratelimit_core::Timestamp;

/// How many times each readable width of a bucket is the one before it, from 1 µs by 1 ms, 1 s, 1
/// min, 1 h and 1 d to 360 d: so buckets are merged without splitting any.
const WIDER: [u64; 19] = [1_000, 10, 10, 5, 2, 5, 2, 3, 2, 5, 2, 3, 2, 3, 4, 2, 5, 6, 12];
/// The most buckets between the first and the last. 2^52 µs are 145 of the widest.
const MAX_BUCKETS: u64 = 180;
/// The most steps between round times on an axis.
const MAX_TICKS: u64 = 6;

/// The width at a place among all.
fn width_us(place: usize) -> u64 {
    WIDER[..place].iter().product()
}

/// Requests over time. The buckets widen as the time span grows.
#[derive(Clone, Debug, Default)]
pub(crate) struct Timeline {
    width: usize,
    buckets: BTreeMap<u64, TimeBucket>,
}

/// The requests of one stretch of time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TimeBucket {
    pub(crate) all: Counts,
    /// What each limit decided, by its position in the policy.
    pub(crate) by_limit: BTreeMap<usize, Counts>,
}

/// Admitted and denied requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) admitted: u64,
    pub(crate) denied: u64,
}

impl Counts {
    fn count(&mut self, allowed: bool) {
        self.admitted += u64::from(allowed);
        self.denied += u64::from(!allowed);
    }

    pub(crate) const fn total(self) -> u64 {
        self.admitted + self.denied
    }

    fn add(&mut self, other: Self) {
        self.admitted += other.admitted;
        self.denied += other.denied;
    }
}

impl TimeBucket {
    /// What one limit decided.
    pub(crate) fn limit(&self, place: usize) -> Counts {
        self.by_limit.get(&place).copied().unwrap_or_default()
    }
}

impl Timeline {
    /// Counts a request, and what each limit that applied said.
    pub(crate) fn count(
        &mut self,
        at: Timestamp,
        allowed: bool,
        by_limit: impl IntoIterator<Item = (usize, bool)>,
    ) {
        let place = at.as_us() / self.width_us();
        let bucket = self.buckets.entry(place).or_default();
        bucket.all.count(allowed);
        for (place, allowed) in by_limit {
            bucket.by_limit.entry(place).or_default().count(allowed);
        }
        if bucket.all.total() == 1 {
            self.widen();
        }
    }

    /// The width of a bucket in microseconds.
    pub(crate) fn width_us(&self) -> u64 {
        width_us(self.width)
    }

    /// Every bucket from the first to the last, empty ones included, with its start.
    pub(crate) fn buckets(&self) -> Vec<(Timestamp, TimeBucket)> {
        let Some((first, last)) = self.ends() else { return Vec::new() };
        let start = |place: u64| Timestamp::saturating_from_us(place * self.width_us());
        let bucket = |place| self.buckets.get(&place).cloned().unwrap_or_default();
        (first..=last).map(|place| (start(place), bucket(place))).collect()
    }

    /// Round times between the first bucket and the end of the last, a few of them, and the step
    /// between two.
    pub(crate) fn ticks(&self) -> (u64, impl Iterator<Item = Timestamp>) {
        let ends =
            self.ends().map(|(first, last)| [first, last + 1].map(|at| at * self.width_us()));
        let [from, to] = ends.unwrap_or_default();
        let mut widths = (self.width..=WIDER.len()).map(width_us);
        let step = widths.find(|width| (to - from) / width <= MAX_TICKS).unwrap_or(u64::MAX);
        let ticks = from.div_ceil(step)..=to / step;
        (step, ticks.map(move |tick| Timestamp::saturating_from_us(tick * step)))
    }

    fn ends(&self) -> Option<(u64, u64)> {
        Some((*self.buckets.first_key_value()?.0, *self.buckets.last_key_value()?.0))
    }

    fn widen(&mut self) {
        while let Some((first, last)) = self.ends()
            && last - first >= MAX_BUCKETS
            && let Some(merged) = WIDER.get(self.width)
        {
            self.width += 1;
            for (place, bucket) in std::mem::take(&mut self.buckets) {
                let into = self.buckets.entry(place / merged).or_default();
                into.all.add(bucket.all);
                for (place, counts) in bucket.by_limit {
                    into.by_limit.entry(place).or_default().add(counts);
                }
            }
        }
    }
}

//! [`Timeline`]: admissions and denials over time, in a bounded number of buckets.

use std::collections::BTreeMap;

use ratelimit_core::Timestamp;

/// Readable bucket widths in microseconds. Each divides the next, so that buckets can be merged without
/// splitting any.
const WIDTHS_US: [u64; 20] = [
    1,
    1_000,
    10_000,
    100_000,
    500_000,
    S,
    5 * S,
    10 * S,
    30 * S,
    60 * S,
    300 * S,
    600 * S,
    1_800 * S,
    3_600 * S,
    3 * 3_600 * S,
    12 * 3_600 * S,
    DAY,
    5 * DAY,
    30 * DAY,
    360 * DAY,
];
const S: u64 = 1_000_000;
const DAY: u64 = 86_400 * S;
/// The most buckets between the first and the last. 2^52 µs are 145 of the widest.
const MAX_BUCKETS: u64 = 180;

/// Requests over time. The buckets widen as the time span grows.
#[derive(Clone, Debug, Default)]
pub(crate) struct Timeline {
    width: usize,
    buckets: BTreeMap<u64, Bucket>,
}

/// The requests of one stretch of time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Bucket {
    pub(crate) all: Counts,
    /// What each limit decided, by its position in the policy; shorter if the last limits decided nothing.
    pub(crate) by_limit: Vec<Counts>,
}

/// Admitted and denied requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) admitted: u64,
    pub(crate) denied: u64,
}

impl Counts {
    fn count(&mut self, allowed: bool) {
        if allowed {
            self.admitted += 1;
        } else {
            self.denied += 1;
        }
    }

    pub(crate) const fn total(self) -> u64 {
        self.admitted + self.denied
    }

    fn add(&mut self, other: Self) {
        self.admitted += other.admitted;
        self.denied += other.denied;
    }
}

impl Bucket {
    /// What one limit decided.
    pub(crate) fn limit(&self, place: usize) -> Counts {
        self.by_limit.get(place).copied().unwrap_or_default()
    }

    fn limit_mut(&mut self, place: usize) -> Option<&mut Counts> {
        if self.by_limit.len() <= place {
            self.by_limit.resize(place + 1, Counts::default());
        }
        self.by_limit.get_mut(place)
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
            if let Some(counts) = bucket.limit_mut(place) {
                counts.count(allowed);
            }
        }
        if bucket.all.total() == 1 {
            self.widen();
        }
    }

    /// The width of a bucket in microseconds.
    pub(crate) fn width_us(&self) -> u64 {
        WIDTHS_US[self.width]
    }

    /// Every bucket from the first to the last, empty ones included, with its start.
    pub(crate) fn buckets(&self) -> Vec<(Timestamp, Bucket)> {
        let Some((first, last)) = self.ends() else { return Vec::new() };
        let start = |place: u64| Timestamp::saturating_from_us(place * self.width_us());
        let bucket = |place| self.buckets.get(&place).cloned().unwrap_or_default();
        (first..=last).map(|place| (start(place), bucket(place))).collect()
    }

    fn ends(&self) -> Option<(u64, u64)> {
        Some((*self.buckets.first_key_value()?.0, *self.buckets.last_key_value()?.0))
    }

    fn widen(&mut self) {
        while let Some((first, last)) = self.ends()
            && last - first >= MAX_BUCKETS
            && self.width + 1 < WIDTHS_US.len()
        {
            let merged = WIDTHS_US[self.width + 1] / self.width_us();
            self.width += 1;
            for (place, bucket) in std::mem::take(&mut self.buckets) {
                let into = self.buckets.entry(place / merged).or_default();
                into.all.add(bucket.all);
                for (place, counts) in bucket.by_limit.into_iter().enumerate() {
                    if let Some(into) = into.limit_mut(place) {
                        into.add(counts);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_width_divides_the_next() {
        for pair in WIDTHS_US.windows(2) {
            assert_eq!(pair[1] % pair[0], 0, "{pair:?}");
        }
    }

    #[test]
    fn buckets_are_few_and_count_every_request() {
        let mut timeline = Timeline::default();
        let mut at = 1;
        for n in 0..52_u32 {
            let allowed = n % 3 == 0;
            timeline.count(Timestamp::from_us(at).expect("a time"), allowed, [(1, allowed)]);
            at *= 2;
        }
        timeline.count(Timestamp::MAX, true, []);
        let buckets = timeline.buckets();
        assert!(buckets.len() as u64 <= MAX_BUCKETS, "{}", buckets.len());
        let sum = |count: fn(&Bucket) -> u64| buckets.iter().map(|(_, b)| count(b)).sum::<u64>();
        assert_eq!((sum(|b| b.all.total()), sum(|b| b.all.denied)), (53, 34));
        assert_eq!((sum(|b| b.limit(1).total()), sum(|b| b.limit(1).denied)), (52, 34));
        assert_eq!((sum(|b| b.limit(0).total()), sum(|b| b.limit(2).total())), (0, 0));
    }

    #[test]
    fn an_hour_is_shown_by_the_half_minute() {
        let mut timeline = Timeline::default();
        for second in (0..3_600).rev() {
            timeline.count(Timestamp::saturating_from_us(second * S), true, []);
        }
        assert_eq!((timeline.width_us(), timeline.buckets().len()), (30 * S, 120));
    }
}

//! [`Admissions`]: checks what callers saw admitted against the bound of the limit, however long
//! the history is.
//!
//! A [`History`](crate::History) is explained exactly, and has at most 128 requests. This checker
//! needs neither an order nor the store's answers, only when each request was asked and answered: a
//! charge certainly lies in every interval that contains both. No interval may contain more than
//! the limit admits in it, plus what was allowed there, as after a reset or a failover that lost
//! writes.

use std::fmt;

use ratelimit_core::{Algorithm, AnyAlgorithm, Timestamp};

use crate::almanac::number;

/// When something happened, as far as is known: no earlier and no later.
type Between = [Timestamp; 2];

/// What was admitted of one limit for one key.
///
/// ```
/// use ratelimit_core::{Gcra, AnyAlgorithm, Timestamp};
/// use ratelimit_testkit::Admissions;
///
/// let mut admissions = Admissions::new(AnyAlgorithm::from(Gcra::per_second(1).burst(2).build()?));
/// let ms = |ms: u64| Timestamp::saturating_from_us(ms * 1_000);
/// admissions.add([ms(0), ms(10)], 2);
/// // It may have been decided when one had flowed back.
/// admissions.add([ms(5), ms(1_001)], 1);
/// admissions.check()?;
/// admissions.add([ms(20), ms(30)], 1);
/// assert!(admissions.check().is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Admissions {
    algorithm: AnyAlgorithm,
    admitted: Vec<(Between, u64)>,
    allowed: Vec<(Between, u64)>,
}

impl Admissions {
    /// Nothing admitted yet.
    ///
    /// # Panics
    /// The limit counts leases, which end when they are released.
    #[must_use]
    pub fn new(algorithm: AnyAlgorithm) -> Self {
        assert!(
            !matches!(algorithm, AnyAlgorithm::Concurrency(_)),
            "{algorithm} bounds no interval"
        );
        Self { algorithm, admitted: Vec::new(), allowed: Vec::new() }
    }

    /// Adds a charge between two times: what an acquire asked for, or less if it was settled at
    /// less.
    pub fn add(&mut self, between: [Timestamp; 2], cost: u64) {
        self.admitted.push((between, cost));
    }

    /// Allows so much more in every interval that may contain this event: the capacity for each
    /// reset, and for a failover.
    pub fn allow(&mut self, between: [Timestamp; 2], cost: u64) {
        self.allowed.push((between, cost));
    }

    /// Checks every interval that begins with one request and ends with another.
    ///
    /// # Errors
    /// The interval that exceeds its bound by the most.
    pub fn check(&self) -> Result<(), Excess> {
        let mut by_end: Vec<_> = self.admitted.iter().collect();
        by_end.sort_unstable_by_key(|([_, end], _)| *end);
        let excess = |begin: Timestamp| {
            let mut admitted = 0;
            let within = by_end.iter().filter(move |([first, _], _)| *first >= begin);
            within.filter_map(move |([_, end], cost)| {
                admitted += cost;
                let bound = self.bound(begin, *end);
                (admitted > bound).then_some(Excess {
                    algorithm: self.algorithm,
                    begin,
                    end: *end,
                    admitted,
                    bound,
                })
            })
        };
        let worst = by_end.iter().flat_map(|([begin, _], _)| excess(*begin));
        worst.max_by_key(|excess| excess.admitted - excess.bound).map_or(Ok(()), Err)
    }

    /// The most that may be admitted from `begin` to `end`, both included.
    fn bound(&self, begin: Timestamp, end: Timestamp) -> u64 {
        let meets = |[first, last]: &Between| *first <= end && *last >= begin;
        let allowed = self.allowed.iter().filter(|(between, _)| meets(between));
        let allowed: u64 = allowed.map(|(_, cost)| cost).sum();
        allowed.saturating_add(most_between(&self.algorithm, begin.as_us(), end.as_us()))
    }
}

/// The most that a limit admits between two times, both included, whatever came before.
fn most_between(algorithm: &AnyAlgorithm, begin_us: u64, end_us: u64) -> u64 {
    let length_us = end_us.saturating_sub(begin_us);
    let aligned = |window_us: u64| end_us / window_us - begin_us / window_us + 1;
    let capacity = algorithm.capacity();
    match algorithm {
        AnyAlgorithm::Gcra(_) => {
            let refill = crate::seeds::refill(algorithm);
            let rate = refill.rate();
            let refilled =
                u128::from(rate.count()) * u128::from(length_us) / u128::from(rate.period_us());
            capacity.saturating_add(u64::try_from(refilled).unwrap_or(u64::MAX))
        }
        AnyAlgorithm::FixedWindow(window) => {
            let [first, last] = [begin_us, end_us].map(|at_us| number(window, at_us));
            (last - first + 1).saturating_mul(capacity)
        }
        AnyAlgorithm::SlidingCounter(counter) => {
            aligned(counter.window_us()).saturating_mul(capacity)
        }
        AnyAlgorithm::BucketedWindow(bucketed) => {
            let buckets = aligned(bucketed.bucket_us());
            let most = bucketed.windows().iter().map(|window| {
                let windows = buckets.div_ceil(window.span_us / bucketed.bucket_us());
                windows.saturating_mul(window.limit)
            });
            most.min().unwrap_or_default()
        }
        // Any window of this length holds no more than the capacity.
        AnyAlgorithm::SlidingLog(log) => (length_us / log.window_us() + 1).saturating_mul(capacity),
        // A window may end with its block, and a block with its window.
        AnyAlgorithm::Lockout(lockout) => {
            let shortest_us = lockout.window_us().min(lockout.block_us());
            (length_us / shortest_us + 2).saturating_mul(capacity)
        }
        // The first window may end, and the last may begin, inside the interval.
        other => (length_us / crate::seeds::full_us(other) + 2).saturating_mul(capacity),
    }
}

/// More was admitted in an interval than the limit admits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Excess {
    /// The limit.
    pub algorithm: AnyAlgorithm,
    /// The interval's begin.
    pub begin: Timestamp,
    /// The interval's end.
    pub end: Timestamp,
    /// What was admitted in it.
    pub admitted: u64,
    /// The most that may be.
    pub bound: u64,
}

impl fmt::Display for Excess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { algorithm, begin, end, admitted, bound } = self;
        write!(
            f,
            "{algorithm}: admitted {admitted} from {begin} to {end}, where at most {bound} may be"
        )
    }
}

impl std::error::Error for Excess {}

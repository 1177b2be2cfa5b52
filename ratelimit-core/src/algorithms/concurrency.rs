//! The concurrency limit: a semaphore whose permits are leases.
//!
//! Source: Gray and Cheriton, "Leases: An Efficient Fault-Tolerant Mechanism for Distributed File
//! Cache Consistency" (1989). A lease ends by itself, so a caller that dies frees its place. A
//! request with a [`ReservationId`](crate::ReservationId) gets a lease under that id:
//! [renewing](crate::Algorithm::renew) extends it, and [settling](crate::Algorithm::settle)
//! releases it. A request without an id gets a lease that ends with its time, or by a refund.
//!
//! A lease granted or renewed at `t` counts until just before `t + lease`, and no longer at `t +
//! lease`. The wait of a denied request assumes that no lease is released early.
//!
//! The arithmetic is in `entries.rs`. `concurrency.lua` in `ratelimit-redis` is the same algorithm
//! in Lua.

use alloc::format;

use crate::builder::{AlgorithmBuilder, without_burst};
use crate::entries::{LogState, LoggedWindow};
use crate::error::ConfigError;
use crate::rate::{Rate, whole_number};

/// The largest limit: each step reads all leases.
const MAX_LIMIT: u64 = 10_000;

/// At most a number of requests at the same time, each for at most the length of a lease.
///
/// A step takes time and memory in proportion to the live leases.
///
/// ```
/// use ratelimit_core::{Algorithm, Concurrency, Timestamp};
/// use ratelimit_core::algorithm::Write;
/// use ratelimit_core::store::Reservation;
///
/// // Two at once, each for half a minute at most.
/// let downloads = Concurrency::new("2/30s".parse()?)?;
/// let Write::Put { state, .. } = downloads.step(None, Timestamp::ZERO, 2).write else { unreachable!() };
/// assert!(!downloads.step(Some(&state), Timestamp::ZERO, 1).decision.allowed);
///
/// let lease = Reservation::new(Timestamp::ZERO, 2);
/// let released = downloads.settle(Some(&state), Timestamp::ZERO, &lease, 0).expect("leases can be");
/// assert_eq!(released.decision.remaining, 2);
/// # Ok::<(), ratelimit_core::ConfigError>(())
/// ```
pub type Concurrency = LoggedWindow<true>;

/// What [`Concurrency`] keeps for a key: its leases, oldest first, one entry per moment.
pub type ConcurrencyState = LogState<true>;

impl Concurrency {
    /// The count of the rate at the same time, with leases of the rate's period: `20/30s` is 20 at
    /// the same time, each for at most half a minute.
    ///
    /// # Errors
    /// A count above 10,000, because each step reads all leases.
    pub fn new(rate: Rate) -> Result<Self, ConfigError> {
        let (limit, window_us) = (rate.count(), rate.period_us());
        if limit > MAX_LIMIT {
            return Err(ConfigError::new(format!(
                "{limit} at the same time are too many, because each step reads all leases; write at \
                 most {MAX_LIMIT}"
            )));
        }
        Ok(Self { limit, window_us })
    }

    /// The length of a lease in microseconds.
    #[must_use]
    pub const fn lease_us(&self) -> u64 {
        self.window_us
    }
}

without_burst!(Concurrency = "concurrency" by lease_us reading read_rate);

/// The count and the length of a lease. A count alone lacks the length.
fn read_rate(text: &str) -> Result<Rate, ConfigError> {
    let count = text.trim();
    text.parse().map_err(|error| match whole_number(count) {
        Some(1..) => ConfigError::new(format!(
            "a count needs the length of a lease; write \"{count}/30s\" for {count} at the same time, each \
             for at most half a minute"
        )),
        _ => error,
    })
}

impl Concurrency {
    /// `count` at the same time, each for at most `lease`, to be finished with
    /// [`build`](AlgorithmBuilder::build).
    ///
    /// ```
    /// use core::time::Duration;
    /// use ratelimit_core::Concurrency;
    ///
    /// let downloads = Concurrency::at_once(20, Duration::from_secs(30)).build()?;
    /// assert_eq!(downloads, "20/30s".parse()?);
    /// # Ok::<(), ratelimit_core::ConfigError>(())
    /// ```
    pub fn at_once(count: u64, lease: core::time::Duration) -> AlgorithmBuilder<Self> {
        AlgorithmBuilder::new(Rate::new(count, lease))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithms::Algorithm;
    use crate::entries::LoggedCost;
    use crate::reservation::Reservation;
    use crate::timestamp::Timestamp;

    fn timestamp(us: u64) -> Timestamp {
        Timestamp::from_us(us).expect("a test's time")
    }

    fn entry((us, cost): (u64, u64)) -> LoggedCost {
        LoggedCost { timestamp: timestamp(us), cost }
    }

    #[test]
    fn a_release_and_a_renewal_take_the_lease_at_its_time_alone() {
        let limit = Concurrency::new("9/10us".parse().expect("a rate")).expect("a limit");
        let state = |leases: &[_]| ConcurrencyState {
            entries: leases.iter().copied().map(entry).collect(),
        };
        let there = state(&[(1, 2), (3, 1), (5, 4)]);
        // The moment, the lease, and what is there after it was released or renewed.
        for (now, (us, cost), released, renewed) in [
            (6, (3, 1), &[(1, 2), (5, 4)][..], &[(1, 2), (5, 4), (6, 1)][..]),
            (6, (1, 2), &[(3, 1), (5, 4)], &[(3, 1), (5, 4), (6, 2)]),
            // Its part of a moment.
            (6, (5, 3), &[(1, 2), (3, 1), (5, 1)], &[(1, 2), (3, 1), (5, 1), (6, 3)]),
            // A reset forgot it, and others were granted since; it has ended.
            (6, (2, 4), &[(1, 2), (3, 1), (5, 4)], &[(1, 2), (3, 1), (5, 4)]),
            (15, (5, 4), &[(1, 2), (3, 1), (5, 4)], &[(1, 2), (3, 1), (5, 4)]),
        ] {
            let lease = Reservation::new(timestamp(us), cost);
            let settled = limit.settle(Some(&there), timestamp(now), &lease, 0).expect("a lease");
            assert_eq!(settled.write.after(Some(&there)), Some(&state(released)), "{lease:?}");
            let step = limit.renew(Some(&there), timestamp(now), &lease);
            assert_eq!(step.write.after(Some(&there)), Some(&state(renewed)), "{lease:?}");
        }
        // If the clock has gone back, a lease counts as granted with the newest one, and is
        // released there.
        assert_eq!(limit.charged_at(Some(&there), timestamp(3)), timestamp(5));
        let granted = limit.step(Some(&there), timestamp(3), 1).write;
        assert_eq!(granted.after(None), Some(&state(&[(1, 2), (3, 1), (5, 5)])));
        assert!(Concurrency::new("10001/s".parse().expect("a rate")).is_err());
    }

    #[test]
    fn leases_in_no_order_deny_and_panic_nothing() {
        let limit = Concurrency::new("1/10us".parse().expect("a rate")).expect("a limit");
        let entries = [(0, 0), (90, 0), (0, 1)].map(entry).to_vec();
        let step = limit.step(Some(&ConcurrencyState { entries }), timestamp(95), 1);
        assert_eq!((step.decision.allowed, step.decision.retry_after_us), (false, Some(1)));
    }
}

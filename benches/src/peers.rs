//! The limiters under measurement, behind one trait.

use std::collections::HashMap;
use std::hint::black_box;
use std::num::NonZeroU32;
use std::time::Duration;

use governor::clock::{Clock as GovernorClock, QuantaClock};
use governor::middleware::NoOpMiddleware;
use governor::state::keyed::DashMapStateStore;
use governor::{Quota, RateLimiter as GovernorLimiter};
use limitador::limit::Expression;
use ratelimit_core::{Algorithm, Clock, Gcra, Limit, Limits, Rate, RateLimiter, Verdict};
use ratelimit_memory::MemoryStore;

use crate::keys::CallerKey;
use crate::measure::{Fallible, MeasuredRound, round};

/// One token per `period`, up to `burst` at once. A limiter with windows instead of buckets admits
/// `burst` in a window that is longer than the run.
#[derive(Clone, Copy)]
pub(crate) struct Allowance {
    pub(crate) period: Duration,
    pub(crate) burst: NonZeroU32,
}

/// The number of requests per batch of [`MeasuredLimiter::check_all`].
pub(crate) const BATCH: usize = 8;

/// A limiter under measurement.
pub(crate) trait MeasuredLimiter: Sync {
    /// Charges the key 1 if that fits. This call is measured.
    fn check(&self, key: &CallerKey) -> bool;

    /// Charges each key 1 if that fits, and returns how many were allowed. A limiter without a call
    /// for several keys decides one after the other.
    fn check_all(&self, keys: &[CallerKey]) -> usize {
        keys.iter().filter(|key| self.check(key)).count()
    }

    /// Charges the key this cost before the measurement.
    fn charge(&self, key: &CallerKey, cost: NonZeroU32) -> bool {
        (0..cost.get()).all(|_| self.check(key))
    }

    /// A round of single checks, or of batches of this size. Compiled per limiter, so that no
    /// virtual call is measured.
    fn round(&self, threads: &[Vec<CallerKey>], passes: u32, batch: usize) -> MeasuredRound {
        if batch == 1 {
            round(threads, passes, |keys| keys.iter().filter(|key| self.check(key)).count())
        } else {
            let all =
                |keys: &[CallerKey]| keys.chunks(batch).map(|keys| self.check_all(keys)).sum();
            round(threads, passes, all)
        }
    }
}

/// Decides by a function.
pub(crate) struct ByFunction<F>(pub(crate) F);

impl<F: Fn(&CallerKey) -> bool + Sync> MeasuredLimiter for ByFunction<F> {
    fn check(&self, key: &CallerKey) -> bool {
        (self.0)(key)
    }
}

/// Limits of these algorithms, three at most, all of which apply to every key.
pub(crate) fn limits<A: Algorithm>(algorithms: impl IntoIterator<Item = A>) -> Fallible<Limits<A>> {
    let names = ["limit", "limit-2", "limit-3", "limit-4", "limit-5"];
    let limits = names.iter().zip(algorithms).map(|(name, algorithm)| Limit::new(name, algorithm));
    Ok(Limits::new(limits.collect::<Result<Vec<_>, _>>()?)?)
}

/// `MemoryStore`, with the answer in full.
pub(crate) struct Ours<C = ratelimit_memory::PreciseClock>(RateLimiter<MemoryStore<Gcra, C>, Gcra>);

impl<C: Clock> Ours<C> {
    pub(crate) fn new(allowance: Allowance, clock: C, capacity: usize) -> Fallible<Self> {
        let store = MemoryStore::builder().capacity(capacity).clock(clock).build();
        Ok(Self(RateLimiter::new(limits([gcra(allowance)?])?, store)))
    }

    /// The number of checks that shared a state. It must be 0: a full store would be measured
    /// otherwise.
    pub(crate) fn overflowed(&self) -> u64 {
        self.0.store().overflowed()
    }
}

/// The limit of this allowance.
pub(crate) fn gcra(allowance: Allowance) -> Fallible<Gcra> {
    let period_us = u64::try_from(allowance.period.as_micros())?;
    Ok(Gcra::new(Rate::per_us(1, period_us)?, allowance.burst.get().into())?)
}

impl<C: Clock> MeasuredLimiter for Ours<C> {
    fn check(&self, key: &CallerKey) -> bool {
        // By reference: passing it by value would measure a copy.
        let said = self.0.check_now(key.as_str());
        black_box(&said).as_ref().is_ok_and(Verdict::allowed)
    }

    fn check_all(&self, keys: &[CallerKey]) -> usize {
        let Ok(keys) = <&[CallerKey; BATCH]>::try_from(keys) else {
            return keys.iter().filter(|key| self.check(key)).count();
        };
        let mut allowed = 0;
        MemoryStore::check_each_now(&self.0, &keys.each_ref().map(CallerKey::as_str), |_, said| {
            let said = black_box(&said).as_ref();
            allowed += usize::from(said.is_ok_and(Verdict::allowed));
        });
        allowed
    }

    fn charge(&self, key: &CallerKey, cost: NonZeroU32) -> bool {
        let verdict = self.0.check_n_now(key.as_str(), cost.get().into());
        verdict.is_ok_and(|verdict| verdict.allowed())
    }
}

/// governor, keyed, with its defaults but for the clock: dashmap, `SipHash`, no snapshot in the
/// answer.
pub(crate) struct Governor<C: GovernorClock = QuantaClock>(
    GovernorLimiter<CallerKey, DashMapStateStore<CallerKey>, C, NoOpMiddleware<C::Instant>>,
);

impl Governor {
    /// With its default clock, too.
    pub(crate) fn new(allowance: Allowance) -> Fallible<Self> {
        Self::with_clock(allowance, QuantaClock::default())
    }
}

impl<C: GovernorClock> Governor<C> {
    pub(crate) fn with_clock(allowance: Allowance, clock: C) -> Fallible<Self> {
        let quota = Quota::with_period(allowance.period).ok_or("a period above zero")?;
        let quota = quota.allow_burst(allowance.burst);
        Ok(Self(GovernorLimiter::dashmap_with_clock(quota, clock)))
    }

    /// Removes expired keys, which governor does on request only.
    pub(crate) fn retain_recent(&self) {
        self.0.retain_recent();
    }
}

impl<C: GovernorClock + Sync> MeasuredLimiter for Governor<C>
where
    C::Instant: Send + Sync,
{
    fn check(&self, key: &CallerKey) -> bool {
        black_box(&self.0.check_key(key)).is_ok()
    }

    fn charge(&self, key: &CallerKey, cost: NonZeroU32) -> bool {
        matches!(self.0.check_key_n(key, cost), Ok(Ok(())))
    }
}

/// How long limitador's window is: longer than any run.
const WINDOW_S: u64 = 3_600;

/// limitador with its store in memory: a fixed window, the key a variable of the request.
pub(crate) struct Limitador {
    limiter: limitador::RateLimiter,
    namespace: limitador::limit::Namespace,
}

impl Limitador {
    pub(crate) fn new(allowance: Allowance, key_count: usize) -> Fallible<Self> {
        // Its cache drops keys when it is full; twice the room keeps them all.
        let limiter = limitador::RateLimiter::new((2 * key_count).max(1_000) as u64);
        let key = Expression::try_from("key")?;
        let most = allowance.burst.get().into();
        limiter.add_limit(limitador::limit::Limit::new("bench", most, WINDOW_S, [], [key]));
        Ok(Self { limiter, namespace: "bench".into() })
    }
}

impl MeasuredLimiter for Limitador {
    fn check(&self, key: &CallerKey) -> bool {
        self.charge(key, NonZeroU32::MIN)
    }

    fn charge(&self, key: &CallerKey, cost: NonZeroU32) -> bool {
        let request = HashMap::from([("key".to_owned(), key.as_str().to_owned())]);
        let context = limitador::limit::Context::from(request);
        let cost = cost.get().into();
        let result = self.limiter.check_rate_limited_and_update(&self.namespace, &context, cost);
        let result = black_box(&result).as_ref();
        result.is_ok_and(|result| !result.limited && !result.counters.is_empty())
    }
}

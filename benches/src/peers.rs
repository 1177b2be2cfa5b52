//! The limiters that are measured, each through the same two calls.

use std::collections::HashMap;
use std::error::Error;
use std::hint::black_box;
use std::num::NonZeroU32;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use governor::{DefaultKeyedRateLimiter, Quota};
use ratelimit_core::{Gcra, Limit, Limits, Rate, RateLimiter};
use ratelimit_memory::MemoryStore;

use crate::keys::Key;

/// One token per `period`, up to `burst` at once.
#[derive(Clone, Copy)]
pub(crate) struct Allowance {
    pub(crate) period: Duration,
    pub(crate) burst: NonZeroU32,
}

/// Anything that can be measured.
pub(crate) trait Subject: Sync {
    /// Charges the key 1 if that fits: what is measured.
    fn check(&self, key: &Key) -> bool;

    /// Charges the key so much, before anything is measured.
    fn charge(&self, key: &Key, cost: NonZeroU32) -> bool;
}

/// Ours, with the answer in full.
pub(crate) struct Ours(RateLimiter<MemoryStore<Gcra>, Gcra>);

impl Ours {
    pub(crate) fn new(allowance: Allowance) -> Result<Self, Box<dyn Error>> {
        let period_us = u64::try_from(allowance.period.as_micros())?;
        let gcra = Gcra::new(Rate::new(1, period_us)?, allowance.burst.get().into())?;
        let limits = Limits::new([Limit::new("bench", gcra)?])?;
        Ok(Self(RateLimiter::new(limits, MemoryStore::new())))
    }

    /// How many checks had no state of their own: none, or something else was measured.
    pub(crate) fn overflowed(&self) -> u64 {
        self.0.store().overflowed()
    }
}

impl Subject for Ours {
    fn check(&self, key: &Key) -> bool {
        let verdict = black_box(self.0.check_now(key.as_str()));
        verdict.is_ok_and(|verdict| verdict.allowed())
    }

    fn charge(&self, key: &Key, cost: NonZeroU32) -> bool {
        let verdict = self.0.check_n_now(key.as_str(), cost.get().into());
        verdict.is_ok_and(|verdict| verdict.allowed())
    }
}

/// governor, keyed, with its defaults: dashmap, `SipHash`, quanta, no snapshot in the answer.
pub(crate) struct Governor(DefaultKeyedRateLimiter<Key>);

impl Governor {
    pub(crate) fn new(allowance: Allowance) -> Result<Self, Box<dyn Error>> {
        let quota = Quota::with_period(allowance.period).ok_or("a period above zero")?;
        Ok(Self(DefaultKeyedRateLimiter::keyed(quota.allow_burst(allowance.burst))))
    }
}

impl Subject for Governor {
    fn check(&self, key: &Key) -> bool {
        black_box(self.0.check_key(key)).is_ok()
    }

    fn charge(&self, key: &Key, cost: NonZeroU32) -> bool {
        matches!(self.0.check_key_n(key, cost), Ok(Ok(())))
    }
}

/// What one would write without a library: a map of theoretical arrival times under one lock. It
/// never forgets a key, answers with a bool, and is here to show what the rest costs.
pub(crate) struct Plain {
    since: Instant,
    period_ns: u128,
    burst: u128,
    arrivals_ns: Mutex<HashMap<Key, u128>>,
}

impl Plain {
    pub(crate) fn new(allowance: Allowance) -> Self {
        Self {
            since: Instant::now(),
            period_ns: allowance.period.as_nanos(),
            burst: allowance.burst.get().into(),
            arrivals_ns: Mutex::default(),
        }
    }

    fn charge_n(&self, key: &Key, cost: u32) -> bool {
        let mut arrivals_ns = self.arrivals_ns.lock().unwrap_or_else(PoisonError::into_inner);
        let now_ns = self.since.elapsed().as_nanos();
        let held = arrivals_ns.get_mut(key);
        let from_ns = held.as_deref().map_or(now_ns, |tat_ns| now_ns.max(*tat_ns));
        let next_ns = from_ns + self.period_ns * u128::from(cost);
        let fits = next_ns - now_ns <= self.period_ns * self.burst;
        match held {
            Some(tat_ns) if fits => *tat_ns = next_ns,
            None if fits => drop(arrivals_ns.insert(key.clone(), next_ns)),
            _ => {}
        }
        fits
    }
}

impl Subject for Plain {
    fn check(&self, key: &Key) -> bool {
        black_box(self.charge_n(key, 1))
    }

    fn charge(&self, key: &Key, cost: NonZeroU32) -> bool {
        self.charge_n(key, cost.get())
    }
}

//! Limiters beside governor, each asked as its documentation says.

use std::collections::HashMap;
use std::error::Error;
use std::fmt;
use std::future::Future;
use std::hint::black_box;
use std::num::NonZeroU32;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, SystemTime};

use limitador::limit::Expression;
use trypema::RateLimiterBuilder;
use trypema::local::LocalRateLimiterProvider;

use crate::keys::Key;

use super::{Allowance, Subject};

/// Longer than any run, for limiters that count in windows.
const WINDOW_S: u64 = 3_600;

/// What a future that never waits comes to. What async costs is little here, and no part of this
/// benchmark.
fn at_once<F: Future>(future: F) -> Option<F::Output> {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => Some(output),
        Poll::Pending => None,
    }
}

/// limitador with its store in memory: a fixed window, the key a variable of the request.
pub(crate) struct Limitador {
    limiter: limitador::RateLimiter,
    namespace: limitador::limit::Namespace,
}

impl Limitador {
    pub(crate) fn new(allowance: Allowance, key_count: usize) -> Result<Self, Box<dyn Error>> {
        // Its cache drops keys when it is full; twice the room keeps them all.
        let limiter = limitador::RateLimiter::new((2 * key_count).max(1_000) as u64);
        let key = Expression::try_from("key")?;
        let most = allowance.burst.get().into();
        limiter.add_limit(limitador::limit::Limit::new("bench", most, WINDOW_S, [], [key]));
        Ok(Self { limiter, namespace: "bench".into() })
    }

    fn charge_n(&self, key: &Key, cost: u32) -> bool {
        let request = HashMap::from([("key".to_owned(), key.as_str().to_owned())]);
        let context = limitador::limit::Context::from(request);
        let result =
            self.limiter.check_rate_limited_and_update(&self.namespace, &context, cost.into());
        let result = black_box(&result).as_ref();
        result.is_ok_and(|result| !result.limited && !result.counters.is_empty())
    }
}

impl Subject for Limitador {
    fn check(&self, key: &Key) -> bool {
        self.charge_n(key, 1)
    }

    fn charge(&self, key: &Key, cost: NonZeroU32) -> bool {
        self.charge_n(key, cost.get())
    }
}

/// throttle-kit: GCRA in a dashmap, whole milliseconds, 1 at a time.
pub(crate) struct ThrottleKit(throttle_kit::RateLimiter<throttle_kit::InMemoryBackend>);

impl ThrottleKit {
    pub(crate) fn new(allowance: Allowance) -> Self {
        let quota = throttle_kit::Quota::from_parts(allowance.period, allowance.burst.get());
        Self(throttle_kit::RateLimiter::new(quota, throttle_kit::InMemoryBackend::new()))
    }
}

impl Subject for ThrottleKit {
    fn check(&self, key: &Key) -> bool {
        let said = at_once(self.0.check(key.as_str()));
        black_box(&said).as_ref().is_some_and(|result| result.allowed)
    }

    fn charge(&self, key: &Key, cost: NonZeroU32) -> bool {
        (0..cost.get().min(2)).all(|_| self.check(key))
    }
}

/// trypema: a sliding window of buckets.
pub(crate) struct Trypema {
    provider: Arc<LocalRateLimiterProvider>,
    rate: trypema::RateLimit,
}

impl Trypema {
    pub(crate) fn new(allowance: Allowance) -> Result<Self, Box<dyn Error>> {
        let window = trypema::WindowSize::seconds(WINDOW_S)?;
        let builder = LocalRateLimiterProvider::builder().window_size(window);
        let provider = builder.disable_cleanup().build()?;
        // Half a request more, so that a rate that is no exact float admits no fewer.
        let rate =
            (f64::from(allowance.burst.get()) + 0.5) / Duration::from_secs(WINDOW_S).as_secs_f64();
        Ok(Self { provider, rate: trypema::RateLimit::per_second(rate)? })
    }

    fn charge_n(&self, key: &Key, cost: u32) -> bool {
        let decision = self.provider.absolute().inc(key.as_str(), &self.rate, cost.into());
        matches!(black_box(&decision), trypema::RateLimitDecision::Allowed)
    }
}

impl Subject for Trypema {
    fn check(&self, key: &Key) -> bool {
        self.charge_n(key, 1)
    }

    fn charge(&self, key: &Key, cost: NonZeroU32) -> bool {
        self.charge_n(key, cost.get())
    }
}

/// Its key, which it takes by value and wants to be able to display.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Owned(Key);

impl fmt::Display for Owned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.as_str())
    }
}

/// The crate `gcra` with its dashmap.
pub(crate) struct GcraCrate {
    limiter: gcra::RateLimiter<Owned>,
    limit: gcra::RateLimit,
}

impl GcraCrate {
    pub(crate) fn new(allowance: Allowance) -> Self {
        let burst = allowance.burst.get();
        let limit = gcra::RateLimit::new(burst, allowance.period * burst);
        Self { limiter: gcra::RateLimiter::new(0), limit }
    }

    fn charge_n(&self, key: &Key, cost: u32) -> bool {
        let decision = at_once(self.limiter.check(Owned(key.clone()), &self.limit, cost));
        black_box(&decision).as_ref().is_some_and(Result::is_ok)
    }
}

impl Subject for GcraCrate {
    fn check(&self, key: &Key) -> bool {
        self.charge_n(key, 1)
    }

    fn charge(&self, key: &Key, cost: NonZeroU32) -> bool {
        self.charge_n(key, cost.get())
    }
}

/// throttlecrab, which wants to be alone when it decides: behind a mutex, as threads would share it.
pub(crate) struct ThrottleCrab {
    limiter: Mutex<throttlecrab::RateLimiter<throttlecrab::AdaptiveStore>>,
    /// So many in so many seconds: it counts whole ones.
    count: i64,
    period_s: i64,
    burst: i64,
}

impl ThrottleCrab {
    pub(crate) fn new(allowance: Allowance, key_count: usize) -> Result<Self, Box<dyn Error>> {
        let store = throttlecrab::AdaptiveStore::with_capacity(key_count);
        let period_s = allowance.period.as_secs().max(1);
        let count = u128::from(period_s) * 1_000_000 / allowance.period.as_micros().max(1);
        Ok(Self {
            limiter: Mutex::new(throttlecrab::RateLimiter::new(store)),
            count: i64::try_from(count)?,
            period_s: i64::try_from(period_s)?,
            burst: allowance.burst.get().into(),
        })
    }

    fn charge_n(&self, key: &Key, cost: u32) -> bool {
        let mut limiter = self.limiter.lock().unwrap_or_else(PoisonError::into_inner);
        let (key, cost, now) = (key.as_str(), cost.into(), SystemTime::now());
        let decision = limiter.rate_limit(key, self.burst, self.count, self.period_s, cost, now);
        black_box(&decision).as_ref().is_ok_and(|(allowed, _)| *allowed)
    }
}

impl Subject for ThrottleCrab {
    fn check(&self, key: &Key) -> bool {
        self.charge_n(key, 1)
    }

    fn charge(&self, key: &Key, cost: NonZeroU32) -> bool {
        self.charge_n(key, cost.get())
    }
}

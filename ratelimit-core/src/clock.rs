//! Clocks, for the stores that keep their own time.

use core::sync::atomic::{AtomicU64, Ordering};

use alloc::sync::Arc;

use crate::timestamp::Timestamp;

/// What time it is. It should never go back; where it does, states hold their own.
pub trait Clock: Send + Sync {
    /// Now.
    fn now(&self) -> Timestamp;
}

impl<C: Clock + ?Sized> Clock for Arc<C> {
    fn now(&self) -> Timestamp {
        (**self).now()
    }
}

/// The operating system's time, read once and carried on by its monotonic clock: it never goes
/// back and never jumps, and two processes started apart agree to within what the system's clock
/// was set between.
#[cfg(feature = "std")]
#[derive(Clone, Copy, Debug)]
pub struct SystemClock {
    origin: Timestamp,
    since: std::time::Instant,
}

#[cfg(feature = "std")]
impl SystemClock {
    /// A clock that agrees with the operating system's now.
    #[must_use]
    pub fn new() -> Self {
        let epoch = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        Self { origin: Timestamp::ZERO + epoch, since: std::time::Instant::now() }
    }
}

#[cfg(feature = "std")]
impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(feature = "std")]
impl Clock for SystemClock {
    fn now(&self) -> Timestamp {
        self.origin + self.since.elapsed()
    }
}

/// A clock that stands still until it is told, for tests. Clones share one time.
///
/// ```
/// use core::time::Duration;
/// use ratelimit_core::{Clock, ManualClock};
/// let clock = ManualClock::default();
/// let held_by_the_store = clock.clone();
/// clock.advance(Duration::from_secs(1));
/// assert_eq!(held_by_the_store.now().as_us(), 1_000_000);
/// ```
#[derive(Clone, Debug, Default)]
pub struct ManualClock(Arc<AtomicU64>);

impl ManualClock {
    /// A clock that stands at `now`.
    #[must_use]
    pub fn new(now: Timestamp) -> Self {
        Self(Arc::new(AtomicU64::new(now.as_us())))
    }

    /// Sets the time, also back.
    pub fn set(&self, now: Timestamp) {
        self.0.store(now.as_us(), Ordering::SeqCst);
    }

    /// Moves the time on by whole microseconds of `by`, also from several threads at once.
    pub fn advance(&self, by: core::time::Duration) {
        let later = |us| Some((Timestamp::saturating_from_us(us) + by).as_us());
        // What is always given cannot fail.
        let _ = self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, later);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        Timestamp::saturating_from_us(self.0.load(Ordering::SeqCst))
    }
}

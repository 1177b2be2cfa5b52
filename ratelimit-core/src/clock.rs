//! Clocks, for stores that keep their own time.

use core::sync::atomic::{AtomicU64, Ordering};

use alloc::sync::Arc;

use crate::timestamp::Timestamp;

/// A source of time. It should never go back; if it does, states keep their own time.
pub trait Clock: Send + Sync {
    /// The current time.
    fn now(&self) -> Timestamp;
}

impl<C: Clock + ?Sized> Clock for Arc<C> {
    fn now(&self) -> Timestamp {
        (**self).now()
    }
}

/// The operating system's time, read once and continued by its monotonic clock. It never goes back
/// and never jumps. Two processes differ by as much as the system's clock was set between their
/// starts.
#[cfg(feature = "std")]
#[derive(Clone, Copy, Debug)]
#[allow(clippy::disallowed_types, reason = "the clock")]
pub struct SystemClock {
    origin: Timestamp,
    since: std::time::Instant,
}

#[cfg(feature = "std")]
#[allow(clippy::disallowed_types, reason = "the clock")]
impl SystemClock {
    /// A clock that starts at the operating system's current time.
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

/// Tokio's time, which a test can pause: then it stands still while tasks work, and passes at once
/// when all of them sleep. A store on any other clock stands still while a program sleeps in paused
/// time.
///
/// It needs a tokio runtime where it is made and read, as tokio's own time does.
///
/// ```
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() {
/// use core::time::Duration;
/// use ratelimit_core::{Clock, TokioClock};
/// let clock = TokioClock::default();
/// tokio::time::sleep(Duration::from_secs(60)).await; // passes at once, in paused time
/// assert!(clock.now().as_us() >= 60_000_000);
/// # }
/// ```
#[cfg(feature = "tokio")]
#[derive(Clone, Copy, Debug)]
pub struct TokioClock {
    origin: Timestamp,
    since: tokio::time::Instant,
}

#[cfg(feature = "tokio")]
impl TokioClock {
    /// A clock that reads `now`, and goes on from there.
    #[must_use]
    pub fn new(now: Timestamp) -> Self {
        Self { origin: now, since: tokio::time::Instant::now() }
    }
}

#[cfg(feature = "tokio")]
impl Default for TokioClock {
    fn default() -> Self {
        Self::new(Timestamp::ZERO)
    }
}

#[cfg(feature = "tokio")]
impl Clock for TokioClock {
    fn now(&self) -> Timestamp {
        self.origin + self.since.elapsed()
    }
}

/// A clock that stands still until a test moves it. Clones share one time.
///
/// ```
/// use core::time::Duration;
/// use ratelimit_core::{Clock, ManualClock};
/// let clock = ManualClock::default();
/// let clock_of_the_store = clock.clone();
/// clock.advance(Duration::from_secs(1));
/// assert_eq!(clock_of_the_store.now().as_us(), 1_000_000);
/// ```
#[derive(Clone, Debug, Default)]
pub struct ManualClock(Arc<AtomicU64>);

impl ManualClock {
    /// A clock that stands at `now`.
    #[must_use]
    pub fn new(now: Timestamp) -> Self {
        Self(Arc::new(AtomicU64::new(now.as_us())))
    }

    /// Sets the time, forward or back.
    pub fn set(&self, now: Timestamp) {
        self.0.store(now.as_us(), Ordering::SeqCst);
    }

    /// Moves the time forward by the whole microseconds of `by`, atomically.
    pub fn advance(&self, by: core::time::Duration) {
        let later = |us| Some((Timestamp::saturating_from_us(us) + by).as_us());
        // `later` always returns a time, so this cannot fail.
        let _ = self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, later);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        Timestamp::saturating_from_us(self.0.load(Ordering::SeqCst))
    }
}

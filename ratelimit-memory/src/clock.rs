//! Clocks for a store that reads one at every decision.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use ratelimit_core::{Clock, Tick};

/// The processor's time stamp counter, where it has one to be relied on, and otherwise the operating system's
/// monotonic clock: exact to the microsecond, and read in a third of the time that
/// [`SystemClock`](ratelimit_core::SystemClock) takes.
///
/// It begins with the operating system's time and never jumps. How fast the counter runs is measured when the
/// first such clock is made, within a fifth of a second, and right to some millionths: by as much a limit
/// may recover faster or slower than the wall clock says.
///
/// ```
/// use ratelimit_core::{Clock, SystemClock};
/// use ratelimit_memory::PreciseClock;
/// let (precise, system) = (PreciseClock::new().now(), SystemClock::new().now());
/// assert!(precise.as_us().abs_diff(system.as_us()) < 1_000_000);
/// ```
#[derive(Clone, Debug)]
pub struct PreciseClock {
    counter: quanta::Clock,
    /// What the counter showed at the origin.
    begin: u64,
    origin: Tick,
}

impl PreciseClock {
    /// A clock that agrees with the operating system's now.
    #[must_use]
    pub fn new() -> Self {
        let counter = quanta::Clock::new();
        let epoch = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        Self { begin: counter.raw(), counter, origin: Tick::ZERO + epoch }
    }
}

impl Default for PreciseClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for PreciseClock {
    #[inline]
    fn now(&self) -> Tick {
        let ns = self.counter.delta_as_nanos(self.begin, self.counter.raw());
        self.origin.saturating_add_us(ns / 1_000)
    }
}

/// How often a coarse clock moves.
const STEP: Duration = Duration::from_millis(1);

/// A clock that moves once a millisecond, and costs next to nothing to read.
///
/// A thread of its own moves it, for all its clones, until the last of them is dropped. Where the machine does
/// not let that thread run the steps are longer. It is never ahead of the time, and never goes back; a limit
/// may so recover a step too late, never too early.
///
/// ```
/// use ratelimit_memory::{CoarseClock, MemoryStore};
/// let store = MemoryStore::builder().clock(CoarseClock::new()).build::<ratelimit_core::Gcra>();
/// assert!(store.is_empty());
/// ```
#[derive(Clone, Debug)]
pub struct CoarseClock(Arc<AtomicU64>);

impl CoarseClock {
    /// A clock that agrees with the operating system's now.
    #[must_use]
    pub fn new() -> Self {
        let precise = PreciseClock::new();
        let shown = Arc::new(AtomicU64::new(precise.now().as_us()));
        let moved = Arc::downgrade(&shown);
        let thread = std::thread::Builder::new().name("coarse-clock".into());
        // Without its thread a clock would stand still: what cannot be made is as bad as no memory.
        let spawned = thread.spawn(move || keep_moving(&precise, &moved));
        drop(spawned);
        Self(shown)
    }
}

/// Moves a clock on for as long as somebody has it.
fn keep_moving(precise: &PreciseClock, moved: &Weak<AtomicU64>) {
    loop {
        std::thread::sleep(STEP);
        let Some(shown) = moved.upgrade() else { return };
        shown.fetch_max(precise.now().as_us(), Ordering::Relaxed);
    }
}

impl Default for CoarseClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for CoarseClock {
    #[inline]
    fn now(&self) -> Tick {
        Tick::saturating_from_us(self.0.load(Ordering::Relaxed))
    }
}

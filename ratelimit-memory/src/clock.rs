//! Clocks for a store that reads one at every decision.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use ratelimit_core::{Clock, SystemClock, Tick};

/// The processor's time stamp counter, where it has one to be relied on, and otherwise the operating system's
/// monotonic clock: exact to the microsecond, and read in a third of the time that
/// [`SystemClock`](ratelimit_core::SystemClock) takes.
///
/// It begins with the operating system's time and never jumps. How fast the counter runs is measured when the
/// first such clock is made, within a fifth of a second, and right to some millionths: by as much a limit
/// may recover faster or slower than the wall clock says.
///
/// # What it does not promise
///
/// - A thread never sees it go back, and all processors count alike. But a processor may read the counter
///   some instructions early: a thread that has just been handed another's reading may read some
///   microseconds less. States hold their own time, so that nothing is minted by that but those
///   microseconds, where a state has ended and was forgotten by the later reading. Whoever needs the strict
///   order takes [`SystemClock`](ratelimit_core::SystemClock), which waits for it: that is what makes it
///   slower.
/// - The time that a machine is suspended does not count, as it does not for the system's monotonic clock.
///   On some machines the counter begins anew after a suspension to memory: then this clock has gone back,
///   and until it has caught up limits recover nothing. For machines that sleep take `SystemClock` or a
///   [`CoarseClock`]. Servers do not; and a virtual machine that is moved or restored takes its counter along.
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
    /// Microseconds from one of its steps to the next, in parts of which 2^64 are one.
    step_scaled_us: u64,
    /// What its microseconds were short of the time, or too many, when the clock was made: the time when it began.
    offset_us: i64,
    origin_us: i64,
}

/// So many steps that their nanoseconds tell a step to a few parts in a hundred thousand millions.
const MANY_STEPS: u64 = 1 << 40;

impl PreciseClock {
    /// A clock that agrees with the operating system's now.
    #[must_use]
    pub fn new() -> Self {
        let counter = quanta::Clock::new();
        let epoch = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        let begin = counter.raw();
        let step_scaled_us = step_scaled_us(counter.delta_as_nanos(0, MANY_STEPS));
        let origin_us = (Tick::ZERO + epoch).as_us().cast_signed();
        let offset_us = origin_us.wrapping_sub(us_of(begin, step_scaled_us));
        Self { counter, step_scaled_us, offset_us, origin_us }
    }
}

/// The scaled microseconds of a step of a counter that takes so many nanoseconds for [`MANY_STEPS`]. A step
/// takes a microsecond at the most: no counter that is used counts as slowly, and this one would be slow itself.
fn step_scaled_us(many_ns: u64) -> u64 {
    let scaled = (u128::from(many_ns) << u64::BITS) / (u128::from(MANY_STEPS) * 1_000);
    u64::try_from(scaled).unwrap_or(u64::MAX)
}

/// The microseconds that so many steps take.
#[inline]
fn us_of(steps: u64, step_scaled_us: u64) -> i64 {
    ((u128::from(steps) * u128::from(step_scaled_us)) >> u64::BITS) as i64
}

impl Default for PreciseClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for PreciseClock {
    #[inline]
    fn now(&self) -> Tick {
        let now_us = us_of(self.counter.raw(), self.step_scaled_us).wrapping_add(self.offset_us);
        // One processor may be a little behind the one that read the beginning.
        Tick::saturating_from_us(now_us.max(self.origin_us).cast_unsigned())
    }
}

/// How often a coarse clock moves.
const STEP: Duration = Duration::from_millis(1);

/// A clock that moves once a millisecond, and costs next to nothing to read.
///
/// A thread of its own moves it by [`SystemClock`], for all its clones, until the last of them is dropped. Where
/// the machine does not let that thread run the steps are longer. It is never ahead of the time, and never goes
/// back, whoever has handed over to whom what it showed; a limit may so recover a step too late, never too
/// early.
///
/// Where there can be no thread every reading is one of `SystemClock`: dearer, but right. A process that has been
/// forked has no such thread, and has to make a clock of its own.
///
/// ```
/// use ratelimit_memory::{CoarseClock, MemoryStore};
/// let store = MemoryStore::builder().clock(CoarseClock::new()).build::<ratelimit_core::Gcra>();
/// assert!(store.is_empty());
/// ```
#[derive(Clone, Debug)]
pub struct CoarseClock(Coarse);

#[derive(Clone, Debug)]
enum Coarse {
    /// What a thread last wrote.
    Moved(Arc<AtomicU64>),
    /// There is no thread.
    Read(SystemClock),
}

impl CoarseClock {
    /// A clock that agrees with the operating system's now.
    #[must_use]
    pub fn new() -> Self {
        Self::spawned(SystemClock::new(), thread::Builder::new().name("coarse-clock".into()))
    }

    fn spawned(by: SystemClock, thread: thread::Builder) -> Self {
        let moved = moved(by, thread).map(|(shown, _)| Coarse::Moved(shown));
        // Without its thread it would stand still.
        Self(moved.unwrap_or(Coarse::Read(by)))
    }
}

/// What a clock shows, and the thread that moves it for as long as somebody has it.
fn moved(by: SystemClock, thread: thread::Builder) -> io::Result<(Arc<AtomicU64>, JoinHandle<()>)> {
    let shown = Arc::new(AtomicU64::new(by.now().as_us()));
    let moved = Arc::downgrade(&shown);
    let keep_moving = move || {
        loop {
            thread::sleep(STEP);
            let Some(shown) = moved.upgrade() else { return };
            shown.fetch_max(by.now().as_us(), Ordering::Relaxed);
        }
    };
    Ok((shown, thread.spawn(keep_moving)?))
}

impl Default for CoarseClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for CoarseClock {
    #[inline]
    fn now(&self) -> Tick {
        match &self.0 {
            Coarse::Moved(shown) => Tick::saturating_from_us(shown.load(Ordering::Relaxed)),
            Coarse::Read(system) => system.now(),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests;

//! Clocks that are cheap enough to be read at every decision.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use ratelimit_core::{Clock, SystemClock, Timestamp};

/// Only where the kernel tells which counter it trusts.
#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod counter;

/// Reads the processor's counter where the kernel itself keeps time by it, and
/// [`SystemClock`](ratelimit_core::SystemClock) everywhere else. Both are exact to the microsecond;
/// reading the counter takes a third of the time of a `SystemClock`.
///
/// The clock starts at the operating system's time and never jumps. The first such clock measures
/// the counter's rate, which takes up to a fifth of a second and is accurate to a few parts per
/// million. A limit refills faster or slower than the wall clock by the same error.
///
/// # When the counter is read
///
/// A processor that calls its counter invariant may still be wrong: on machines with several
/// sockets, after firmware has written to the counter, or under a hypervisor. Linux checks the
/// counter against other clocks and abandons it when it drifts. `PreciseClock` therefore asks the
/// kernel when the clock is made. On Linux, the counter is read if
/// `/sys/devices/system/clocksource/clocksource0/current_clocksource` contains `tsc` (x86-64) or
/// `arch_sys_counter` (64-bit ARM). If the file contains anything else or cannot be read, and on
/// every other system, the clock is a `SystemClock`. Existing clocks do not notice when the kernel
/// abandons the counter later.
///
/// # What the counter does not promise
///
/// - A thread never sees the clock go back, and all processors count alike. But a processor may
///   read the counter a few instructions early, so a thread that has just received another thread's
///   reading may read a few microseconds less. States carry their own timestamps, so this mints at
///   most those microseconds, and only where a state has ended and the later reading made the store
///   forget it. Use [`SystemClock`](ratelimit_core::SystemClock) for a strict order: it waits for
///   the counter, which makes it slower.
/// - The time during which a machine is suspended does not count, as with the system's monotonic
///   clock. On some machines the counter restarts after a suspension to memory: the clock then goes
///   back, and limits refill nothing until it has caught up. Use `SystemClock` or a [`CoarseClock`]
///   on machines that sleep. Servers do not sleep, and a virtual machine that is moved or restored
///   takes its counter along.
///
/// ```
/// use ratelimit_core::{Clock, SystemClock};
/// use ratelimit_memory::PreciseClock;
/// let (precise, system) = (PreciseClock::new().now(), SystemClock::new().now());
/// assert!(precise.as_us().abs_diff(system.as_us()) < 1_000_000);
/// ```
#[derive(Clone, Debug)]
pub struct PreciseClock(Precise);

#[derive(Clone, Debug)]
enum Precise {
    #[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
    Counter(counter::Counter),
    System(SystemClock),
}

impl PreciseClock {
    /// Creates a clock that agrees with the operating system's at this moment.
    #[must_use]
    pub fn new() -> Self {
        #[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
        if counter::is_trusted(std::fs::read_to_string(counter::CLOCKSOURCE)) {
            return Self(Precise::Counter(counter::Counter::new()));
        }
        Self(Precise::System(SystemClock::new()))
    }
}

impl Default for PreciseClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for PreciseClock {
    #[inline]
    fn now(&self) -> Timestamp {
        match &self.0 {
            #[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
            Precise::Counter(counter) => counter.now(),
            Precise::System(system) => system.now(),
        }
    }
}

/// The period at which a coarse clock moves.
const STEP: Duration = Duration::from_millis(1);

/// A clock that moves once per millisecond, and costs next to nothing to read.
///
/// A background thread moves the clock by [`SystemClock`] for all its clones, and ends when the
/// last clone is dropped. The steps are longer where the machine does not let that thread run. The
/// clock is never ahead of the system clock and never goes back, even between threads that exchange
/// readings: a limit may refill one step too late, never too early.
///
/// Where no thread can be started, every reading is one of `SystemClock`: slower, but right. A
/// forked process does not inherit the thread, and has to make a clock of its own.
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
    /// The time that the thread last wrote.
    Moved(Arc<AtomicU64>),
    /// The clock to read where no thread can be started.
    Read(SystemClock),
}

impl CoarseClock {
    /// Creates a clock that agrees with the operating system's at this moment, and its thread.
    #[must_use]
    pub fn new() -> Self {
        Self::start(SystemClock::new(), thread::Builder::new().name("coarse-clock".into()))
    }

    fn start(by: SystemClock, thread: thread::Builder) -> Self {
        let moved = start_thread(by, thread).map(|(shown, _)| Coarse::Moved(shown));
        // Without a thread the clock would stand still.
        Self(moved.unwrap_or(Coarse::Read(by)))
    }
}

/// The time that a clock shows, and the thread that moves it while any clone is alive.
fn start_thread(
    by: SystemClock,
    thread: thread::Builder,
) -> io::Result<(Arc<AtomicU64>, JoinHandle<()>)> {
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
    fn now(&self) -> Timestamp {
        match &self.0 {
            Coarse::Moved(shown) => Timestamp::saturating_from_us(shown.load(Ordering::Relaxed)),
            Coarse::Read(system) => system.now(),
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests;

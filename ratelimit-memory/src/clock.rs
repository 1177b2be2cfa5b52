//! Clocks for a store that reads one at every decision.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use ratelimit_core::{Clock, SystemClock, Timestamp};

/// Where the kernel can be asked which counter it trusts.
#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod counter;

/// The processor's counter where the kernel itself keeps time by it, and otherwise
/// [`SystemClock`](ratelimit_core::SystemClock): exact to the microsecond, and with the counter read in a third of
/// the time that `SystemClock` takes.
///
/// It begins with the operating system's time and never jumps. How fast the counter runs is measured when the
/// first such clock is made, within a fifth of a second, and right to some millionths: by as much a limit
/// may recover faster or slower than the wall clock says.
///
/// # When the counter is read
///
/// A processor that calls its counter invariant may still be wrong about it, on machines with several sockets, after
/// firmware has written to it, or under a hypervisor. Linux watches the counter against other clocks and leaves it
/// when it drifts. So the kernel is asked, when the clock is made: on Linux, if
/// `/sys/devices/system/clocksource/clocksource0/current_clocksource` says `tsc` (x86-64) or `arch_sys_counter`
/// (64-bit ARM), the counter is read. If it says anything else, if it cannot be read, and on every other system, the
/// clock is a `SystemClock`. A kernel that comes to mistrust the counter later is not noticed by clocks that
/// there are.
///
/// # What the counter does not promise
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
pub struct PreciseClock(Precise);

#[derive(Clone, Debug)]
enum Precise {
    #[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
    Counter(counter::Counter),
    System(SystemClock),
}

impl PreciseClock {
    /// A clock that agrees with the operating system's now.
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
    fn now(&self) -> Timestamp {
        match &self.0 {
            Coarse::Moved(shown) => Timestamp::saturating_from_us(shown.load(Ordering::Relaxed)),
            Coarse::Read(system) => system.now(),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests;

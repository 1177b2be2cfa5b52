//! The clocks that our store is measured with: what it has by default, and one that is read for next
//! to nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use ratelimit_core::{Clock, SystemClock, Tick};

/// The precise clock, as JSON and tables name it.
pub(crate) const PRECISE: &str = "precise";
/// The coarse one.
pub(crate) const COARSE: &str = "coarse";

/// How far behind a coarse clock may be; governor's is measured with the same.
pub(crate) const COARSE_STEP: Duration = Duration::from_millis(1);

/// The precise clock of our store.
pub(crate) fn precise() -> SystemClock {
    SystemClock::new()
}

/// A clock that a thread of its own sets every [`COARSE_STEP`]: to read it is to load a number. Clones
/// share one time; the thread ends with the last of them.
#[derive(Clone, Debug)]
pub(crate) struct CoarseClock(Arc<Upkeep>);

#[derive(Debug)]
struct Upkeep {
    time: Arc<Time>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Time {
    now_us: AtomicU64,
    is_over: AtomicBool,
}

impl CoarseClock {
    /// A clock that agrees with the operating system's now.
    pub(crate) fn new() -> std::io::Result<Self> {
        let clock = SystemClock::new();
        let time = Arc::new(Time {
            now_us: AtomicU64::new(clock.now().as_us()),
            is_over: AtomicBool::new(false),
        });
        let set = Arc::clone(&time);
        let thread = std::thread::Builder::new().name("coarse-clock".into()).spawn(move || {
            while !set.is_over.load(Ordering::Relaxed) {
                std::thread::park_timeout(COARSE_STEP);
                set.now_us.store(clock.now().as_us(), Ordering::Relaxed);
            }
        })?;
        Ok(Self(Arc::new(Upkeep { time, thread: Some(thread) })))
    }
}

impl Clock for CoarseClock {
    fn now(&self) -> Tick {
        Tick::saturating_from_us(self.0.time.now_us.load(Ordering::Relaxed))
    }
}

impl Drop for Upkeep {
    fn drop(&mut self) {
        self.time.is_over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // It has nothing to tell, and never panics.
            drop(thread.join());
        }
    }
}

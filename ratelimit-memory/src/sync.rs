//! The primitives that the store is built on, swapped for loom's when it explores them.

#[cfg(loom)]
pub(crate) use loom::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence},
};
#[cfg(not(loom))]
pub(crate) use std::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence},
};

/// Locks, also after a panic of another holder.
///
/// The only foreign code under a lock is an algorithm's pure step. Nothing is written before all steps of a
/// batch are done, and a step in place writes when it has decided: a panic there leaves the states whole.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// How many times to wait for a line that is locked, for nanoseconds as a rule, before letting others run:
/// its holder may be waiting for this very processor.
#[cfg(not(loom))]
const WAITS: u32 = 8;

/// Waits, having waited so often: each time twice as long, so that those who wait do not keep the line from
/// the one who is writing to it.
#[cfg(not(loom))]
pub(crate) fn wait(waited: &mut u32) {
    if *waited < WAITS {
        (0..1 << *waited).for_each(|_| std::hint::spin_loop());
        *waited += 1;
    } else {
        std::thread::yield_now();
    }
}

/// Lets the others run.
#[cfg(loom)]
pub(crate) fn wait(_waited: &mut u32) {
    loom::thread::yield_now();
}

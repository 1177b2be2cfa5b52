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
use std::sync::{PoisonError, TryLockError};

/// Locks, also after a panic of another holder.
///
/// The foreign code that runs under a lock is an algorithm's, and the clock's. All of it runs before the first
/// write of a call: what a batch comes to is noted, and written once nothing is left that could panic. So a panic
/// leaves every state as it was, and what was reserved is given back when it is dropped ([`Reserved`]).
///
/// The exception is [`step_in_place`] and [`settle_in_place`], where an algorithm writes over the one state that
/// a call is about. As it has to, it decides before it writes. If it panics later all the same, or in
/// [`entries_in`] of the new state, then that one state is what the algorithm has made of it, counted with the
/// entries that it had before.
///
/// [`Reserved`]: crate::capacity::Reserved
/// [`step_in_place`]: ratelimit_core::Algorithm::step_in_place
/// [`settle_in_place`]: ratelimit_core::Algorithm::settle_in_place
/// [`entries_in`]: ratelimit_core::Algorithm::entries_in
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Locks if no other thread holds the lock, also after a panic of another holder.
pub(crate) fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(panicked)) => Some(panicked.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_taken_after_a_panic_of_its_holder_and_not_while_it_is_held() {
        let mutex = Mutex::new(7);
        let held = try_lock(&mutex).expect("free");
        assert!(try_lock(&mutex).is_none());
        drop(held);
        let panicked = std::thread::scope(|scope| {
            let holder = scope.spawn(|| {
                let _held = lock(&mutex);
                std::panic::resume_unwind(Box::new(()));
            });
            holder.join().is_err()
        });
        assert!(panicked && mutex.is_poisoned());
        assert_eq!(*lock(&mutex), 7);
        assert_eq!(*try_lock(&mutex).expect("free"), 7);
    }
}

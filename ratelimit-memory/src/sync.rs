//! The primitives that the store is built on, swapped for loom's in tests where it explores them.

#[cfg(not(all(test, loom)))]
use std::time::Duration;

#[cfg(all(test, loom))]
pub(crate) use loom::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence},
};
#[cfg(not(all(test, loom)))]
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
/// (A sweep may drop states after the write, which is foreign code as well. What it frees is counted all the same.)
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

/// How to wait for the lock of an entry, which its holder keeps for some instructions.
#[cfg(not(all(test, loom)))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pause {
    /// Executes so many spin hints.
    Spin(u32),
    /// Lets another thread run.
    Yield,
    /// Lets all other threads run, also those of a lower priority.
    Sleep(Duration),
}

/// After how many spins a thread yields: its lock's holder may be waiting for this very processor.
#[cfg(not(all(test, loom)))]
const SPINS: u32 = 8;
/// After how many yields more it sleeps. A thread of a real-time class that yields runs on, ahead of a holder of
/// a lower priority, for as long as the system lets it.
#[cfg(not(all(test, loom)))]
const YIELDS: u32 = 30;
/// For how long it then sleeps, each time.
#[cfg(not(all(test, loom)))]
const SLEEP: Duration = Duration::from_micros(50);

/// The pause of a thread that has waited so often.
#[cfg(not(all(test, loom)))]
const fn pause_after(waited: u32) -> Pause {
    if waited < SPINS {
        // Each time twice as long, so that the waiting threads leave the bucket to the one that writes to it.
        Pause::Spin(1 << waited)
    } else if waited < SPINS + YIELDS {
        Pause::Yield
    } else {
        Pause::Sleep(SLEEP)
    }
}

/// Waits, having waited so often: spins, then yields, then sleeps.
#[cfg(not(all(test, loom)))]
pub(crate) fn wait(waited: &mut u32) {
    match pause_after(*waited) {
        Pause::Spin(hints) => (0..hints).for_each(|_| std::hint::spin_loop()),
        Pause::Yield => std::thread::yield_now(),
        Pause::Sleep(time) => std::thread::sleep(time),
    }
    *waited = waited.saturating_add(1);
}

/// Lets the others run.
#[cfg(all(test, loom))]
pub(crate) fn wait(waited: &mut u32) {
    *waited = waited.saturating_add(1);
    loom::thread::yield_now();
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_waits_spins_then_yields_then_sleeps() {
        let pauses: Vec<Pause> = (0..100).map(pause_after).collect();
        let spins = (0..8).map(|n| Pause::Spin(1 << n));
        let yields = std::iter::repeat_n(Pause::Yield, 30);
        let sleeps = std::iter::repeat_n(Pause::Sleep(Duration::from_micros(50)), 62);
        assert_eq!(pauses, spins.chain(yields).chain(sleeps).collect::<Vec<_>>());
        assert_eq!(pause_after(u32::MAX), Pause::Sleep(Duration::from_micros(50)));
    }

    #[test]
    fn each_wait_counts() {
        let mut waited = 0;
        (1..=45).for_each(|count| {
            wait(&mut waited);
            assert_eq!(waited, count);
        });
        waited = u32::MAX;
        wait(&mut waited);
        assert_eq!(waited, u32::MAX);
    }

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

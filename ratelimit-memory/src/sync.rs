//! The synchronization primitives of the store, replaced by loom's in its models.

#[cfg(all(test, loom))]
pub(crate) use loom::sync::{
    Mutex, MutexGuard, RwLock, RwLockReadGuard,
    atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence},
};
#[cfg(not(all(test, loom)))]
pub(crate) use std::sync::{
    Mutex, MutexGuard, RwLock, RwLockReadGuard,
    atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence},
};
use std::sync::{PoisonError, TryLockError};

/// Locks a mutex, even if another holder has panicked.
///
/// The foreign code that runs under a lock is an algorithm's and the clock's. All of it runs before
/// the first write of a call: a batch notes its writes, and makes them once no code is left that
/// could panic. So a panic leaves every state as it was, and reserved room is given back on drop
/// ([`ReservedRoom`]).
///
/// The exception is [`step_in_place`], by which an algorithm changes the one state of a call. Its
/// contract is to decide before it writes. If it panics later all the same, or [`entries_in`] of
/// the new state does, then this one state is as the algorithm has left it, counted with the
/// entries that it had before. (A sweep may drop states after the write, which is foreign code as
/// well. The room that it frees is counted all the same.)
///
/// [`ReservedRoom`]: crate::capacity::ReservedRoom
/// [`step_in_place`]: ratelimit_core::algorithm::InMemory::step_in_place
/// [`entries_in`]: ratelimit_core::algorithm::InMemory::entries_in
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Locks for reading, even if a writer has panicked.
pub(crate) fn read<T>(shared: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    shared.read().unwrap_or_else(PoisonError::into_inner)
}

/// Locks a mutex that is unlocked, even if another holder has panicked.
pub(crate) fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(panicked)) => Some(panicked.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// Waits for the lock of a slot, which its holder keeps for a few instructions, and counts the
/// wait: spins first, then yields, then sleeps.
#[cfg(not(all(test, loom)))]
pub(crate) fn wait(waited: &mut u32) {
    /// After so many spins a thread yields: the lock's holder may be waiting for this very
    /// processor.
    const SPINS: u32 = 8;
    /// After so many more yields it sleeps. A thread of a real-time class that yields keeps
    /// running, ahead of a holder of a lower priority, for as long as the system lets it.
    const YIELDS: u32 = 30;
    /// How long it then sleeps, each time.
    const SLEEP: std::time::Duration = std::time::Duration::from_micros(50);

    if *waited < SPINS {
        // Each spin is twice as long as the last, so that waiting threads leave the cache line to
        // the writer.
        (0..1 << *waited).for_each(|_| std::hint::spin_loop());
    } else if *waited < SPINS + YIELDS {
        std::thread::yield_now();
    } else {
        std::thread::sleep(SLEEP);
    }
    *waited = waited.saturating_add(1);
}

/// Lets the other threads run.
#[cfg(all(test, loom))]
pub(crate) fn wait(waited: &mut u32) {
    *waited = waited.saturating_add(1);
    loom::thread::yield_now();
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn a_lock_can_be_taken_after_its_holder_panics_but_not_while_it_is_held() {
        let mutex = Mutex::new(7);
        std::thread::scope(|scope| {
            let holder = scope.spawn(|| {
                let _held = lock(&mutex);
                assert!(try_lock(&mutex).is_none());
                std::panic::resume_unwind(Box::new(()));
            });
            assert!(holder.join().is_err() && mutex.is_poisoned());
        });
        assert_eq!(*lock(&mutex), 7);
        assert_eq!(*try_lock(&mutex).expect("free"), 7);
    }
}

//! The primitives that the store is built on, swapped for loom's when it explores them.

#[cfg(loom)]
pub(crate) use loom::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicU64, AtomicUsize, Ordering},
};
#[cfg(not(loom))]
pub(crate) use std::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicU64, AtomicUsize, Ordering},
};

/// Locks, also after a panic of another holder.
///
/// The only foreign code under a lock is an algorithm's pure step, and nothing is written before all
/// steps of a batch are done: a panic there leaves the states whole.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// How keys are hashed: `SipHash` with random keys, so that nobody can choose keys that collide. Loom runs
/// the same execution again and again, and needs it to be the same: fixed keys.
#[cfg(loom)]
pub(crate) type KeyHasher = std::hash::BuildHasherDefault<std::hash::DefaultHasher>;
/// How keys are hashed: `SipHash` with random keys, so that nobody can choose keys that collide.
#[cfg(not(loom))]
pub(crate) type KeyHasher = std::hash::RandomState;

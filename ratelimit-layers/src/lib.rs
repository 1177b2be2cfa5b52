//! Stores around a store of `ratelimit-core`.

#![cfg_attr(test, allow(clippy::expect_used, clippy::unwrap_used, clippy::panic))]

use std::sync::{Mutex, MutexGuard, PoisonError};

mod top_denied;

pub use top_denied::{Denied, TopDenied};

/// Locks, also after a panic of a thread that held the lock: no critical section here leaves a state half changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

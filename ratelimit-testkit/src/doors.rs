//! [`Doors`]: a store that counts by which door keys come in.

use std::sync::atomic::{AtomicUsize, Ordering};

use ratelimit_core::{Algorithm, Batch, Limit, Store, SyncStore, Verdict};

/// A store around a store that counts the keys that reach it one by one, and several at once: for tests of what forwards
/// to a store.
///
/// ```
/// # use ratelimit_core::{Gcra, Limits, RateLimiter, SyncStore};
/// # use ratelimit_testkit::Doors;
/// # fn example<S: SyncStore<Gcra>>(limits: Limits<Gcra>, store: S) {
/// let limiter = RateLimiter::new(limits, Doors::new(store));
/// limiter.check_each_now(&["alice", "bob"], |_, said| assert!(said.is_ok()));
/// assert!(limiter.check_now("carol").is_ok());
/// assert_eq!((limiter.store().several(), limiter.store().single()), (2, 1));
/// # }
/// ```
#[derive(Debug, Default)]
pub struct Doors<S> {
    store: S,
    several: AtomicUsize,
    single: AtomicUsize,
}

impl<S> Doors<S> {
    /// Counts what reaches this store.
    pub const fn new(store: S) -> Self {
        Self { store, several: AtomicUsize::new(0), single: AtomicUsize::new(0) }
    }

    /// How many keys came by [`SyncStore::acquire_each_now`] since the last look.
    pub fn several(&self) -> usize {
        self.several.swap(0, Ordering::Relaxed)
    }

    /// How many keys came by [`SyncStore::acquire_now`] since the last look.
    pub fn single(&self) -> usize {
        self.single.swap(0, Ordering::Relaxed)
    }
}

impl<A: Algorithm, S: Store<A>> Store<A> for Doors<S> {
    type Error = S::Error;

    fn apply(
        &self,
        batch: &Batch<'_, A>,
    ) -> impl Future<Output = Result<Verdict, S::Error>> + Send {
        self.store.apply(batch)
    }
}

impl<A: Algorithm, S: SyncStore<A>> SyncStore<A> for Doors<S> {
    fn apply_now(&self, batch: &Batch<'_, A>) -> Result<Verdict, S::Error> {
        self.store.apply_now(batch)
    }

    fn acquire_now(&self, limit: &Limit<A>, key: &str, cost: u64) -> Result<Verdict, S::Error> {
        self.single.fetch_add(1, Ordering::Relaxed);
        self.store.acquire_now(limit, key, cost)
    }

    fn acquire_each_now(
        &self,
        limit: &Limit<A>,
        keys: &[&str],
        cost: u64,
        report: impl FnMut(usize, Result<Verdict, S::Error>),
    ) {
        self.several.fetch_add(keys.len(), Ordering::Relaxed);
        self.store.acquire_each_now(limit, keys, cost, report);
    }
}

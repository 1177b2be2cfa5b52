//! [`AlsoSync`]: runs the laws through [`SyncStore`], too.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ratelimit_core::store::{Batch, Now, Op};
use ratelimit_core::{Algorithm, Limit, Store, SyncStore, Verdict};

use crate::capability::Capability;
use crate::harness::{Harness, StoreClock};

/// Wraps a harness whose store is a [`SyncStore`], so that every second request, at random, takes
/// that way.
///
/// A plain acquire at the store's own time goes to [`acquire_now`](SyncStore::acquire_now), all
/// else to [`apply_now`](SyncStore::apply_now). Every answer, and what is left of the keys, is then
/// the same by either way. In [`ByOwnClock`](crate::ByOwnClock), this wrapper comes inside.
///
/// ```
/// # use std::time::Duration;
/// # use ratelimit_core::algorithm::AnyState;
/// # use ratelimit_core::store::Batch;
/// # use ratelimit_core::{Limit, AnyAlgorithm, Refusal, Store, SyncStore, Verdict};
/// # use ratelimit_testkit::{PureStore, StoreClock};
/// use ratelimit_testkit::{AlsoSync, ByOwnClock, Harness, conformance};
///
/// # struct MapStore(PureStore);
/// # impl Store<AnyAlgorithm> for MapStore {
/// #     type Error = Refusal;
/// #     async fn apply(&self, batch: &Batch<'_, AnyAlgorithm>) -> Result<Verdict, Refusal> {
/// #         self.apply_now(batch)
/// #     }
/// # }
/// impl SyncStore<AnyAlgorithm> for MapStore {
/// #   fn apply_now(&self, batch: &Batch<'_, AnyAlgorithm>) -> Result<Verdict, Refusal> {
/// #       self.0.decide(batch)
/// #   }
///     // …
/// }
///
/// struct Mine;
///
/// impl Harness for Mine {
///     type Store = MapStore;
/// #   fn new() -> Self { Mine }
/// #   fn store(&self) -> MapStore { MapStore(PureStore::new()) }
/// #   fn clock(&self, store: &MapStore) -> StoreClock { store.0.clock().into() }
/// #   async fn state(&self, store: &MapStore, limit: &Limit<AnyAlgorithm>, key: &str) -> Option<AnyState> {
/// #       store.0.state(limit, key)
/// #   }
/// #   async fn leaks(&self, _: &MapStore, _within: Duration) -> Vec<String> { vec![] }
///     // …
/// }
///
/// conformance!(map, AlsoSync<Mine>);
/// conformance!(map_own_clock, ByOwnClock<AlsoSync<Mine>>);
/// # fn main() {}
/// ```
#[derive(Clone, Copy, Debug)]
pub struct AlsoSync<H>(H);

/// A store that is asked by both of its ways.
#[derive(Debug)]
pub struct ByBothWays<S> {
    store: S,
    /// The number of requests.
    calls: AtomicU64,
}

impl<A: Algorithm, S: SyncStore<A>> Store<A> for ByBothWays<S> {
    type Error = S::Error;

    async fn apply(&self, batch: &Batch<'_, A>) -> Result<Verdict, S::Error> {
        // A mixed counter: no pattern of requests keeps one of them from one of the ways, and a
        // case repeats.
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        if call.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 63 == 0 {
            return self.store.apply(batch).await;
        }
        match (batch.checks(), batch.operation(), batch.time()) {
            ([check], Op::Acquire, Now::Store) if batch.is_plain() => {
                self.store.acquire_now(check.limit, check.key, check.cost)
            }
            _ => self.store.apply_now(batch),
        }
    }
}

#[deny(clippy::missing_trait_methods)]
impl<A: Algorithm, H: Harness<A, Store: SyncStore<A>>> Harness<A> for AlsoSync<H> {
    type Store = ByBothWays<H::Store>;

    const CASES: u32 = H::CASES;
    const SMALL_TRACE_REQUESTS: u32 = H::SMALL_TRACE_REQUESTS;
    const LACKS: &'static [Capability] = H::LACKS;

    fn new() -> Self {
        Self(H::new())
    }

    fn store(&self) -> Self::Store {
        ByBothWays { store: self.0.store(), calls: AtomicU64::new(0) }
    }

    fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.0.block_on(future)
    }

    fn clock(&self, store: &Self::Store) -> StoreClock {
        self.0.clock(&store.store)
    }

    async fn state(&self, store: &Self::Store, limit: &Limit<A>, key: &str) -> Option<A::State> {
        self.0.state(&store.store, limit, key).await
    }

    async fn leaks(&self, store: &Self::Store, within: Duration) -> Vec<String> {
        self.0.leaks(&store.store, within).await
    }
}

//! [`ByOwnClock`]: runs all the laws at the store's own time.

use std::time::Duration;

use ratelimit_core::algorithm::AnyState;
use ratelimit_core::store::{Batch, Now, Op};
use ratelimit_core::{AnyAlgorithm, Limit, Store, Verdict};

use crate::capability::Capability;
use crate::harness::{Harness, StoreClock};

/// Wraps a harness whose store has a settable clock, so that every request is decided at the
/// store's own time.
///
/// Before a request at a given time, the wrapper sets the store's clock to that time and then asks
/// under [`Now::Store`]. Requests that only look keep their given time, because they may look ahead
/// and the clock must not follow them. The laws then cover the path that a store takes in
/// production.
///
/// ```
/// # use std::time::Duration;
/// # use ratelimit_core::{Limit, AnyAlgorithm};
/// # use ratelimit_core::algorithm::AnyState;
/// use ratelimit_testkit::{ByOwnClock, Harness, PureStore, StoreClock, conformance};
///
/// struct Pure;
///
/// impl Harness for Pure {
///     type Store = PureStore;
///     fn new() -> Self { Pure }
///     fn store(&self) -> PureStore { PureStore::new() }
///     fn clock(&self, store: &PureStore) -> StoreClock { store.clock().into() }
/// #     async fn state(&self, store: &PureStore, limit: &Limit<AnyAlgorithm>, key: &str) -> Option<AnyState> {
/// #         store.state(limit, key)
/// #     }
/// #     async fn leaks(&self, _: &PureStore, _within: Duration) -> Vec<String> { vec![] }
///     // …
/// }
///
/// conformance!(pure_own_clock, ByOwnClock<Pure>);
/// # fn main() {}
/// ```
#[derive(Clone, Copy, Debug)]
pub struct ByOwnClock<H>(H);

/// A store whose clock is set to the time of each request before it decides.
#[derive(Debug)]
pub struct AtOwnTime<S> {
    store: S,
    clock: StoreClock,
}

impl<S: Store<AnyAlgorithm>> Store<AnyAlgorithm> for AtOwnTime<S> {
    type Error = S::Error;

    async fn apply(&self, batch: &Batch<'_, AnyAlgorithm>) -> Result<Verdict, S::Error> {
        let op = batch.operation();
        // Adopting that nothing remains charges everything.
        let nothing = op != Op::Adopt && batch.checks().iter().all(|check| check.cost == 0);
        let looks = op == Op::Peek || (nothing && batch.reservation_id().is_none());
        match (batch.time(), &self.clock) {
            // Concurrent requests for one time all set the same moment.
            (Now::At(at), StoreClock::Settable(set)) if !looks => {
                set(at);
                self.store.apply(&batch.now(Now::Store)).await
            }
            _ => self.store.apply(batch).await,
        }
    }

    fn server_of(&self, batch: &Batch<'_, AnyAlgorithm>) -> Option<u64> {
        self.store.server_of(batch)
    }
}

/// Checks that the harness lacks nothing, and lists what its store lacks here: its sweeps follow
/// the times of the requests, so an expired state may or may not still be present, and count for a
/// limit that was made longer.
const fn lacks<H: Harness>() -> &'static [Capability] {
    assert!(
        H::LACKS.is_empty(),
        "`ByOwnClock` is for a store that lacks nothing: write a harness of its own for this one"
    );
    &[Capability::PastTimes, Capability::States, Capability::Changes]
}

#[deny(clippy::missing_trait_methods)]
impl<H: Harness> Harness for ByOwnClock<H> {
    type Store = AtOwnTime<H::Store>;

    /// A quarter of the cases at given times.
    const CASES: u32 = H::CASES.div_ceil(4);
    const SMALL_TRACE_REQUESTS: u32 = H::SMALL_TRACE_REQUESTS;
    const LACKS: &'static [Capability] = lacks::<H>();

    fn new() -> Self {
        Self(H::new())
    }

    fn store(&self) -> Self::Store {
        let store = self.0.store();
        let clock = self.0.clock(&store);
        assert!(
            matches!(clock, StoreClock::Settable(_)),
            "the store's own clock cannot be set: tell how in `Harness::clock`"
        );
        AtOwnTime { store, clock }
    }

    fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.0.block_on(future)
    }

    fn clock(&self, store: &Self::Store) -> StoreClock {
        self.0.clock(&store.store)
    }

    async fn state(
        &self,
        store: &Self::Store,
        limit: &Limit<AnyAlgorithm>,
        key: &str,
    ) -> Option<AnyState> {
        self.0.state(&store.store, limit, key).await
    }

    async fn leaks(&self, store: &Self::Store, within: Duration) -> Vec<String> {
        self.0.leaks(&store.store, within).await
    }
}

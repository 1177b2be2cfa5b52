//! A store that takes the window of a calendar from the client's clock is caught: the store's own
//! clock decides.

use std::time::Duration;

use ratelimit_core::algorithm::AnyState;
use ratelimit_core::store::{Batch, Now};
use ratelimit_core::{AnyAlgorithm, Clock as _, Limit, Refusal, Store, Timestamp, Verdict};
use ratelimit_testkit::{
    Calendars, Harness, Property, PureStore, StoreClock, try_same_algorithm_on,
};

/// A store whose clients have a clock that stands still since they were started. If `trusts`, it
/// counts in the window that a client names.
struct WithClients {
    store: PureStore,
    started: Timestamp,
    trusts: bool,
}

impl WithClients {
    /// The store's time, or the last moment of the client's window.
    fn time(&self, batch: &Batch<'_, AnyAlgorithm>) -> Now {
        let by_store = self.store.clock().now();
        let ends = batch.checks().iter().filter_map(|check| match check.limit.algorithm() {
            AnyAlgorithm::FixedWindow(window) => {
                Some(window.calendar()?.window(self.started).end_us)
            }
            _ => None,
        });
        match ends.min() {
            Some(end_us) if self.trusts => {
                Now::At(by_store.min(Timestamp::saturating_from_us(end_us - 1)))
            }
            _ => Now::Store,
        }
    }
}

impl Store<AnyAlgorithm> for WithClients {
    type Error = Refusal;

    async fn apply(&self, batch: &Batch<'_, AnyAlgorithm>) -> Result<Verdict, Refusal> {
        match batch.time() {
            Now::Store => self.store.apply(&batch.now(self.time(batch))).await,
            Now::At(_) => self.store.apply(batch).await,
        }
    }
}

struct Clients {
    trusted: bool,
}

impl Harness for Clients {
    type Store = WithClients;

    fn new() -> Self {
        Self { trusted: false }
    }

    fn store(&self) -> WithClients {
        let store = PureStore::new();
        let started = store.clock().now();
        WithClients { store, started, trusts: self.trusted }
    }

    fn clock(&self, store: &WithClients) -> StoreClock {
        store.store.clock().into()
    }

    async fn state(
        &self,
        store: &WithClients,
        limit: &Limit<AnyAlgorithm>,
        key: &str,
    ) -> Option<AnyState> {
        store.store.state(limit, key)
    }

    async fn leaks(&self, _: &WithClients, _: Duration) -> Vec<String> {
        Vec::new()
    }
}

#[test]
fn a_window_by_the_clients_clock_is_caught_where_the_stores_decides() {
    let tried = |trusted| {
        let property = Property::DecidesByItsOwnClock;
        try_same_algorithm_on::<Calendars, _>(&Clients { trusted }, property, 32)
    };
    tried(false).expect("it is sound");
    let failure = tried(true).expect_err("the client's clock decides");
    assert_eq!(failure.law, Property::DecidesByItsOwnClock.law(), "{failure}");
}

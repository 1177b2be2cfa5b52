//! The harnesses of wrong stores.

use std::sync::PoisonError;
use std::time::Duration;

use ratelimit_core::{Limit, Policy, PolicyState, Timestamp};

use crate::capability::Capability;
use crate::harness::{Harness, StoreClock};
use crate::wrong::{Flaw, OwnClock, WrongStore};

/// A harness for stores with this flaw, or without any.
#[derive(Clone, Copy, Debug, Default)]
pub struct WrongHarness(pub Option<Flaw>);

impl Harness for WrongHarness {
    type Store = WrongStore;

    const SMALL_TRACE_REQUESTS: u32 = 3;

    fn new() -> Self {
        Self(None)
    }

    fn store(&self) -> WrongStore {
        WrongStore::new(self.0)
    }

    fn clock(&self, store: &WrongStore) -> StoreClock {
        match &store.clock {
            OwnClock::Manual(clock) => StoreClock::from(clock),
            OwnClock::System(_) => StoreClock::Real,
        }
    }

    async fn state(
        &self,
        store: &WrongStore,
        limit: &Limit<Policy>,
        key: &str,
    ) -> Option<PolicyState> {
        if store.cannot(Capability::States) {
            return None;
        }
        store.entries().get(&store.key(limit, key)).map(|entry| entry.state.clone())
    }

    async fn leaks(&self, store: &WrongStore, within: Duration) -> Vec<String> {
        let by = store.clock.now() + within;
        let leaking = |key: String, sweep_at: Option<Timestamp>| match sweep_at {
            Some(at) if at <= by => None,
            Some(at) => Some(format!("{key} until {at}")),
            None => Some(format!("{key} for ever")),
        };
        let entries = store.entries();
        let states = entries.iter().map(|(key, entry)| (format!("{key:?}"), entry.sweep_at));
        let reservations = store.reservations.lock().unwrap_or_else(PoisonError::into_inner);
        let reservations =
            reservations.iter().map(|(key, entry)| (format!("{key:?}"), entry.sweep_at));
        states.chain(reservations).filter_map(|(key, sweep_at)| leaking(key, sweep_at)).collect()
    }
}

/// The same stores with clocks that run in real time.
#[derive(Clone, Copy, Debug, Default)]
pub struct WrongInRealTime(pub Option<Flaw>);

impl Harness for WrongInRealTime {
    type Store = WrongStore;

    const SMALL_TRACE_REQUESTS: u32 = 3;

    fn new() -> Self {
        Self(None)
    }

    fn store(&self) -> WrongStore {
        WrongStore::in_real_time(self.0)
    }

    async fn state(
        &self,
        store: &WrongStore,
        limit: &Limit<Policy>,
        key: &str,
    ) -> Option<PolicyState> {
        WrongHarness(self.0).state(store, limit, key).await
    }

    async fn leaks(&self, store: &WrongStore, within: Duration) -> Vec<String> {
        WrongHarness(self.0).leaks(store, within).await
    }
}

//! Every law that a store keeps, a cache of its denials keeps.

use std::time::Duration;

use ratelimit_core::{Limit, ManualClock, Policy, PolicyState};
use ratelimit_testkit::{Harness, StoreClock, conformance};

use crate::memory::{BEGIN, Plain, leaks_of};
use crate::noted::Noted;
use crate::{Cached, lasting};

struct Laws(ManualClock);

impl Harness for Laws {
    type Store = Plain<Cached>;

    const CASES: u32 = 32;
    const SMALL_TRACE_REQUESTS: u32 = 2;

    fn new() -> Self {
        Self(ManualClock::new(BEGIN))
    }

    fn store(&self) -> Self::Store {
        self.0.set(BEGIN);
        Plain(lasting(&self.0).capacity(8).build(Noted::new(&self.0)))
    }

    fn clock(&self, _: &Self::Store) -> StoreClock {
        StoreClock::from(&self.0)
    }

    async fn state(
        &self,
        store: &Self::Store,
        limit: &Limit<Policy>,
        key: &str,
    ) -> Option<PolicyState> {
        store.0.store().memory.state(limit.name(), key)
    }

    async fn leaks(&self, store: &Self::Store, within: Duration) -> Vec<String> {
        let memory = &store.0.store().memory;
        leaks_of(memory, memory, &self.0, within)
    }
}

conformance!(cached, Laws);

//! The conformance laws on the memory store, async and sync.
#![cfg(not(loom))]
#![allow(clippy::expect_used, reason = "tests")]

use std::time::Duration;

use ratelimit_core::{
    Batch, Check, Limit, ManualClock, Now, Op, Policy, PolicyState, Store, SyncStore, Timestamp,
    Verdict,
};
use ratelimit_memory::{MemoryError, MemoryStore};
use ratelimit_testkit::{ByOwnClock, Harness, StoreClock, conformance};

type Memory = MemoryStore<Policy, ManualClock>;

/// How many calls may pass until all expired states are gone. Each sweeps two slots of one of four shards, and
/// three of the smallest table's 512 buckets; no law makes more than a few dozen keys.
const CALLS_TO_SWEEP: usize = 200;

/// The time at which every store is built.
const BEGIN: Timestamp = Timestamp::saturating_from_us(1_795_218_392_123_456);

fn new_store(clock: &ManualClock) -> Memory {
    clock.set(BEGIN);
    MemoryStore::builder().shards(4).clock(clock.clone()).build()
}

/// Moves the clock on, and checks that calls sweep up in passing.
fn leaks_of(store: &Memory, clock: &ManualClock, within: Duration) -> Vec<String> {
    clock.advance(within);
    let rate = "1/s".parse().expect("a rate");
    let other = ratelimit_core::FixedWindow::new(rate).expect("a limit");
    let other = Limit::new("other", Policy::from(other)).expect("a name");
    for n in 0..CALLS_TO_SWEEP {
        let check = Check { limit: &other, key: &n.to_string(), cost: 1 };
        let peek = Batch::one(&check).op(Op::Peek).now(Now::Store);
        let _ = store.apply_now(&peek).expect("every algorithm can be peeked at");
    }
    match store.len() + store.reservations() {
        0 => Vec::new(),
        held => vec![format!("{held} keys and reservations after {CALLS_TO_SWEEP} more calls")],
    }
}

/// The store as a service uses it: async.
struct Awaited(ManualClock);

impl Harness for Awaited {
    type Store = Memory;

    fn new() -> Self {
        Self(ManualClock::new(BEGIN))
    }

    fn store(&self) -> Memory {
        new_store(&self.0)
    }

    fn clock(&self, _: &Memory) -> StoreClock {
        StoreClock::from(&self.0)
    }

    async fn state(&self, store: &Memory, limit: &Limit<Policy>, key: &str) -> Option<PolicyState> {
        store.state(limit.name(), key)
    }

    async fn leaks(&self, store: &Memory, within: Duration) -> Vec<String> {
        leaks_of(store, &self.0, within)
    }
}

conformance!(memory, Awaited);

/// The store as a unit test or a worker without a runtime uses it: sync.
struct AtOnce(Memory);

impl Store<Policy> for AtOnce {
    type Error = MemoryError;

    async fn apply(&self, batch: &Batch<'_, Policy>) -> Result<Verdict, MemoryError> {
        self.0.apply_now(batch)
    }
}

struct Sync(ManualClock);

impl Harness for Sync {
    type Store = AtOnce;

    const CASES: u32 = 32;
    const SMALL_TRACE_REQUESTS: u32 = 2;

    fn new() -> Self {
        Self(ManualClock::new(BEGIN))
    }

    fn store(&self) -> AtOnce {
        AtOnce(new_store(&self.0))
    }

    fn clock(&self, _: &AtOnce) -> StoreClock {
        StoreClock::from(&self.0)
    }

    async fn state(&self, store: &AtOnce, limit: &Limit<Policy>, key: &str) -> Option<PolicyState> {
        store.0.state(limit.name(), key)
    }

    async fn leaks(&self, store: &AtOnce, within: Duration) -> Vec<String> {
        leaks_of(&store.0, &self.0, within)
    }
}

conformance!(memory_sync, Sync);

/// The store by its own clock, which is set to the time of each request, so that compact states lie in buckets.
struct InTable(ManualClock);

impl Harness for InTable {
    type Store = Memory;

    fn new() -> Self {
        Self(ManualClock::default())
    }

    fn store(&self) -> Memory {
        self.0.set(Timestamp::ZERO);
        MemoryStore::builder().shards(4).clock(self.0.clone()).build()
    }

    fn clock(&self, _: &Memory) -> StoreClock {
        StoreClock::from(&self.0)
    }

    async fn state(&self, store: &Memory, limit: &Limit<Policy>, key: &str) -> Option<PolicyState> {
        store.state(limit.name(), key)
    }

    async fn leaks(&self, store: &Memory, within: Duration) -> Vec<String> {
        leaks_of(store, &self.0, within)
    }
}

conformance!(memory_own_clock, ByOwnClock<InTable>);

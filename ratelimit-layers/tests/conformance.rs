//! While the inner store answers, a fallback keeps every law that the inner store keeps, and so does a list of those who are
//! denied most.
#![allow(clippy::expect_used, missing_docs, reason = "tests")]

mod common;
#[path = "common/memory.rs"]
mod memory;

use std::time::Duration;

use memory::{BEGIN, Memory, leaks_of};
use ratelimit_core::{Limit, Limits, ManualClock, OnOutage, Policy, PolicyState};
use ratelimit_layers::{Fallback, TopDenied};
use ratelimit_memory::MemoryStore;
use ratelimit_testkit::{Harness, StoreClock, conformance};
use tokio::runtime::Runtime;

type Layered = TopDenied<Fallback<Memory, Policy, ManualClock>>;

struct Healthy {
    clock: ManualClock,
    runtime: Runtime,
}

fn inner(store: &Layered) -> &Memory {
    store.store().store()
}

impl Harness for Healthy {
    type Store = Layered;

    const CASES: u32 = 32;
    const SMALL_TRACE_REQUESTS: u32 = 2;

    fn new() -> Self {
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = runtime.worker_threads(1).enable_time().build().expect("a runtime");
        Self { clock: ManualClock::new(BEGIN), runtime }
    }

    fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.runtime.block_on(future)
    }

    fn store(&self) -> Layered {
        self.clock.set(BEGIN);
        let memory = MemoryStore::builder().shards(4).clock(self.clock.clone()).build();
        // The limits of the laws have no choice; while the store answers, none is asked for.
        let open = Limits::new([common::limit("l", "gcra 1/s", OnOutage::Open)]).expect("limits");
        // On a busy machine a call can wait longer than any deadline that suits a service.
        let settings = Fallback::builder().deadline(Duration::from_secs(600));
        let fallback = settings.clock(self.clock.clone()).build(memory, &open);
        TopDenied::new(fallback.expect("a choice"), 16)
    }

    fn clock(&self, _: &Layered) -> StoreClock {
        StoreClock::from(&self.clock)
    }

    async fn state(
        &self,
        store: &Layered,
        limit: &Limit<Policy>,
        key: &str,
    ) -> Option<PolicyState> {
        inner(store).state(limit.name(), key)
    }

    async fn leaks(&self, store: &Layered, within: Duration) -> Vec<String> {
        leaks_of(store, inner(store), &self.clock, within)
    }
}

conformance!(healthy, Healthy);

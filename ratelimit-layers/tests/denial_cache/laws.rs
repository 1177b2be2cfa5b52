//! Every law that a store keeps, a cache of its denials keeps.

use std::time::Duration;

use ratelimit_core::{
    Batch, Check, EntryStore, Limit, ManualClock, Now, Op, Policy, PolicyState, Store, SyncStore,
    Verdict, WindowEntry,
};
use ratelimit_memory::MemoryError;
use ratelimit_testkit::{Harness, StoreClock, conformance};

use crate::noted::{BEGIN, Noted};
use crate::{Cached, lasting, limit};

/// More calls than there are states to sweep up.
const CALLS_TO_SWEEP: usize = 200;

struct Laws(ManualClock);

/// A cache that does not tell where its verdicts come from, as the pure step does not.
struct Plain(Cached);

impl Store<Policy> for Plain {
    type Error = MemoryError;

    async fn apply(&self, batch: &Batch<'_, Policy>) -> Result<Verdict, MemoryError> {
        let verdict = self.0.apply(batch).await?;
        Ok(Verdict::several(verdict.decisions().to_vec()))
    }
}

impl EntryStore<Policy> for Plain {
    async fn entries(
        &self,
        limit: &Limit<Policy>,
        key: &str,
        now: Now,
    ) -> Result<Vec<WindowEntry>, MemoryError> {
        self.0.entries(limit, key, now).await
    }
}

impl Harness for Laws {
    type Store = Plain;

    const CASES: u32 = 32;
    const SMALL_TRACE_REQUESTS: u32 = 2;

    fn new() -> Self {
        Self(ManualClock::new(BEGIN))
    }

    fn store(&self) -> Plain {
        self.0.set(BEGIN);
        Plain(lasting(&self.0).capacity(8).build(Noted::new(&self.0)))
    }

    fn clock(&self, _: &Plain) -> StoreClock {
        StoreClock::from(&self.0)
    }

    async fn state(&self, store: &Plain, limit: &Limit<Policy>, key: &str) -> Option<PolicyState> {
        store.0.store().memory.state(limit.name(), key)
    }

    async fn leaks(&self, store: &Plain, within: Duration) -> Vec<String> {
        self.0.advance(within);
        let (memory, other) = (&store.0.store().memory, limit("other", "fixed-window 1/s"));
        for n in 0..CALLS_TO_SWEEP {
            let check = Check { limit: &other, key: &n.to_string(), cost: 1 };
            let _ = memory.apply_now(&Batch::one(&check).op(Op::Peek)).expect("decides");
        }
        match memory.len() {
            0 => Vec::new(),
            held => vec![format!("{held} keys after {CALLS_TO_SWEEP} more calls")],
        }
    }
}

conformance!(cached, Laws);

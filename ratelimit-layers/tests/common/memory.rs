//! Stores in memory under the laws, behind a layer.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::time::Duration;

use ratelimit_core::{
    Batch, Check, EntryStore, Limit, ManualClock, Now, OnOutage, Op, Policy, Store, SyncStore,
    Timestamp, Verdict, WindowEntry,
};
use ratelimit_memory::MemoryStore;

pub(crate) type Memory = MemoryStore<Policy, ManualClock>;

pub(crate) const BEGIN: Timestamp = Timestamp::saturating_from_us(1_795_218_392_123_456);

/// More calls than there are states to sweep up.
const CALLS_TO_SWEEP: usize = 200;

/// Moves the clock on, and says what memory still keeps after calls to a store around it.
pub(crate) fn leaks_of(
    store: &impl SyncStore<Policy>,
    memory: &Memory,
    clock: &ManualClock,
    within: Duration,
) -> Vec<String> {
    clock.advance(within);
    let other = Limit::new("other", "fixed-window 1/s".parse().expect("a policy")).expect("a name");
    let other = other.on_outage(OnOutage::Open);
    for n in 0..CALLS_TO_SWEEP {
        let check = Check { limit: &other, key: &n.to_string(), cost: 1 };
        let _ = store.apply_now(&Batch::one(&check).op(Op::Peek)).expect("decides");
    }
    match memory.len() + memory.reservations() {
        0 => Vec::new(),
        held => vec![format!("{held} keys and reservations after {CALLS_TO_SWEEP} more calls")],
    }
}

/// A store that does not tell where its verdicts come from, as the pure step does not.
pub(crate) struct Plain<S>(pub(crate) S);

impl<S: Store<Policy>> Store<Policy> for Plain<S> {
    type Error = S::Error;

    async fn apply(&self, batch: &Batch<'_, Policy>) -> Result<Verdict, S::Error> {
        let verdict = self.0.apply(batch).await?;
        Ok(Verdict::several(verdict.decisions().to_vec()))
    }
}

impl<S: EntryStore<Policy>> EntryStore<Policy> for Plain<S> {
    async fn entries(
        &self,
        limit: &Limit<Policy>,
        key: &str,
        now: Now,
    ) -> Result<Vec<WindowEntry>, S::Error> {
        self.0.entries(limit, key, now).await
    }
}

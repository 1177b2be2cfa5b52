//! [`Noted`]: a store in memory that says which states its decisions leave, and counts its calls.

use std::future::poll_fn;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use ratelimit_core::{
    Batch, Check, Clock, Decision, EntryStore, Limit, ManualClock, Now, Op, Policy, PolicyState,
    Snapshot, SnapshotStore, Store, SyncStore, Verdict, WindowEntry, WithSnapshot,
};
use ratelimit_memory::{MemoryError, MemoryStore};

pub(crate) use crate::memory::BEGIN;

#[derive(Debug)]
pub(crate) struct Noted {
    pub(crate) memory: MemoryStore<Policy, ManualClock>,
    clock: ManualClock,
    turn: Mutex<()>,
    calls: AtomicU64,
    /// How long the request and its reply take.
    trip_us: [AtomicU64; 2],
    /// Whether the reply comes at the second poll only.
    is_slow: AtomicBool,
    /// Whether it never says what it saw.
    is_silent: AtomicBool,
}

impl Noted {
    pub(crate) fn new(clock: &ManualClock) -> Self {
        Self {
            memory: MemoryStore::builder().shards(4).clock(clock.clone()).build(),
            clock: clock.clone(),
            turn: Mutex::default(),
            calls: AtomicU64::new(0),
            trip_us: Default::default(),
            is_slow: AtomicBool::new(false),
            is_silent: AtomicBool::new(false),
        }
    }

    pub(crate) fn takes(&self, there_us: u64, back_us: u64) {
        self.trip_us[0].store(there_us, Ordering::SeqCst);
        self.trip_us[1].store(back_us, Ordering::SeqCst);
    }

    pub(crate) fn is_slow(&self, is_slow: bool) {
        self.is_slow.store(is_slow, Ordering::SeqCst);
    }

    pub(crate) fn is_silent(&self, is_silent: bool) {
        self.is_silent.store(is_silent, Ordering::SeqCst);
    }

    /// How many calls came since the last look.
    pub(crate) fn calls(&self) -> u64 {
        self.calls.swap(0, Ordering::SeqCst)
    }

    /// What it would decide now.
    pub(crate) fn would(&self, limit: &Limit<Policy>, key: &str, cost: u64) -> Decision {
        let check = Check { limit, key, cost };
        let peek = Batch::one(&check).op(Op::Peek);
        *self.memory.apply_now(&peek).expect("decides").summary()
    }

    fn travel(&self, way: usize) {
        self.clock.advance(Duration::from_micros(self.trip_us[way].load(Ordering::SeqCst)));
    }

    fn decide(&self, batch: &Batch<'_, Policy>) -> Result<WithSnapshot<PolicyState>, MemoryError> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        self.travel(0);
        let decided = {
            let _turn = self.turn.lock().expect("no panic");
            let now = self.clock.now();
            let verdict = self.memory.apply_now(batch)?;
            let state =
                |check: &Check<'_, Policy>| self.memory.state(check.limit.name(), check.key);
            let states = batch.checks().iter().map(state).collect();
            // Another thread may have moved the clock since.
            let is_sure = now == self.clock.now() && !self.is_silent.load(Ordering::SeqCst);
            (verdict, is_sure.then_some(Snapshot { now, states }))
        };
        self.travel(1);
        Ok(decided)
    }

    async fn reply(&self) {
        let mut waits = self.is_slow.load(Ordering::SeqCst);
        poll_fn(|_| if std::mem::take(&mut waits) { Poll::Pending } else { Poll::Ready(()) }).await;
    }
}

impl Store<Policy> for Noted {
    type Error = MemoryError;

    async fn apply(&self, batch: &Batch<'_, Policy>) -> Result<Verdict, MemoryError> {
        let decided = self.decide(batch);
        self.reply().await;
        decided.map(|(verdict, _)| verdict)
    }
}

impl SnapshotStore<Policy> for Noted {
    async fn apply_with_snapshot(
        &self,
        batch: &Batch<'_, Policy>,
    ) -> Result<WithSnapshot<PolicyState>, MemoryError> {
        let decided = self.decide(batch);
        self.reply().await;
        decided
    }
}

impl EntryStore<Policy> for Noted {
    async fn entries(
        &self,
        limit: &Limit<Policy>,
        key: &str,
        now: Now,
    ) -> Result<Vec<WindowEntry>, MemoryError> {
        self.memory.entries(limit, key, now).await
    }
}

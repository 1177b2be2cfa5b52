//! After concurrent calls of every kind, in a store that is too small, no count has drifted.

use std::time::Duration;

use ratelimit_core::{
    Batch, BucketedWindow, Check, Clock, Concurrency, FixedWindow, Gcra, Limit, ManualClock, Now,
    Op, Policy, ReservationId, SlidingLog, SyncStore, Timestamp,
};
use ratelimit_memory::MemoryStore;

use crate::common::Chance;

const BEGIN: Timestamp = Timestamp::saturating_from_us(1_795_218_392_123_456);
const CAPACITY: usize = 500;
const ENTRIES: usize = 400;
const KEYS: u64 = 900;

type Memory = MemoryStore<Policy, ManualClock>;

impl Chance {
    fn one_of<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[usize::try_from(self.below(all.len() as u64)).expect("small")]
    }
}

/// Algorithms whose states lie in buckets and in shards, under two names, so that each key's state moves
/// between both.
fn limits(name: &str) -> Vec<Limit<Policy>> {
    let rate = |text: &str| text.parse().expect("a rate");
    let policies: [Policy; 7] = [
        Gcra::new(rate("5/s"), 5).expect("a limit").into(),
        Gcra::new(rate("1/d"), 30).expect("a limit").into(),
        Gcra::new(rate("3/m"), 3).expect("a limit").into(),
        FixedWindow::new(rate("5/s")).expect("a limit").into(),
        SlidingLog::new(rate("5/s")).expect("a limit").into(),
        BucketedWindow::new(1_000_000, &[rate("9/s"), rate("20/10s")]).expect("a limit").into(),
        Concurrency::new(rate("3/60s")).expect("a limit").into(),
    ];
    policies.map(|policy| Limit::new(name, policy).expect("a name")).into()
}

fn anything(store: &Memory, clock: &ManualClock, seed: u64, rounds: u64) {
    let (one, other) = (limits("one"), limits("other"));
    let mut chance = Chance(seed);
    for _ in 0..rounds {
        let key = chance.below(KEYS).to_string();
        let check = |limit, cost| Check { limit, key: &key, cost };
        let checks =
            [check(chance.one_of(&one), 1 + chance.below(2)), check(chance.one_of(&other), 1)];
        let checks = if chance.below(4) == 0 { &checks[..] } else { &checks[..1] };
        let mut batch = Batch::new(checks).expect("distinct");
        batch = batch.op(*chance.one_of(&[
            Op::Acquire,
            Op::Acquire,
            Op::Acquire,
            Op::Acquire,
            Op::Peek,
            Op::Refund,
            Op::Force,
            Op::Reset,
        ]));
        if chance.below(8) == 0 {
            batch = batch.now(Now::At(clock.now()));
        }
        if chance.below(4) == 0 {
            let id = ReservationId::new(u128::from(chance.below(200)));
            batch = batch.id(id).op(*chance.one_of(&[Op::Acquire, Op::Settle, Op::Renew]));
        }
        // Some of these requests are invalid, and are refused.
        _ = store.apply_now(&batch);
        assert!(store.len() <= CAPACITY, "{} keys", store.len());
        assert!(store.entry_count() <= ENTRIES, "{} entries", store.entry_count());
        if chance.below(64) == 0 {
            clock.advance(Duration::from_millis(chance.below(300)));
        }
    }
}

/// Fills the store until new keys share a state, so that the shared states are swept too; then makes calls
/// until all expired states are freed.
fn until_swept(store: &Memory, clock: &ManualClock) {
    let (in_table, in_shards) = (&limits("sweep")[1], &limits("sweep")[3]);
    let ask = |limit: &Limit<Policy>, turn: u64, op: Op, id: Option<ReservationId>| {
        let key = turn.to_string();
        let check = Check { limit, key: &key, cost: 1 };
        let batch = Batch::one(&check).op(op);
        _ = store.apply_now(&id.map_or(batch, |id| batch.id(id)));
    };
    clock.advance(Duration::from_secs(400 * 86_400));
    (0..3_000).for_each(|turn| ask(in_table, turn, Op::Acquire, None));
    clock.advance(Duration::from_secs(400 * 86_400));
    for turn in 0..20_000 {
        let id = Some(ReservationId::new(u128::from(turn)));
        for limit in [in_table, in_shards] {
            ask(limit, turn, Op::Acquire, None);
            ask(limit, turn, Op::Reset, None);
        }
        ask(in_table, turn, Op::Acquire, id);
        ask(in_table, turn, Op::Reset, None);
        clock.advance(Duration::from_secs(2 * 3_600));
        if turn > 2_000 && store.len() <= 20 && store.entry_count() == 0 {
            return;
        }
    }
}

#[test]
fn no_count_drifts_under_concurrent_calls_of_every_kind() {
    for seed in 0..6 {
        let clock = ManualClock::new(BEGIN);
        let store: Memory = MemoryStore::builder()
            .capacity(CAPACITY)
            .entries(ENTRIES)
            .shards(4)
            .clock(clock.clone())
            .build();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (store, clock) = (&store, &clock);
                scope.spawn(move || anything(store, clock, seed * 8 + thread, 8_000));
            }
        });
        assert!(store.overflowed() > 0, "the store was too small");
        until_swept(&store, &clock);
        // Only the states that the last calls of the sweep have left.
        assert!(store.len() <= 20, "seed {seed}: {} keys", store.len());
        assert_eq!(store.entry_count(), 0, "seed {seed}");
    }
}

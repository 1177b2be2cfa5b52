//! A batch across servers, whose clocks differ, behind a cache that knows the states of its parts.

use std::time::Duration;

use ratelimit_core::{
    Batch, Check, Decision, ManualClock, Policy, PolicyState, SnapshotStore, Source, Store,
    SyncStore, Timestamp, Verdict, WithSnapshot,
};
use ratelimit_layers::DenialCache;
use ratelimit_memory::{MemoryError, MemoryStore};
use ratelimit_testkit::block_on;

use crate::noted::BEGIN;
use crate::{lasting, limit};

/// Alice's server, and that of all others.
struct Servers([MemoryStore<Policy, ManualClock>; 2]);

impl Servers {
    fn new(clocks: [&ManualClock; 2]) -> Self {
        Self(clocks.map(|clock| MemoryStore::builder().clock(clock.clone()).build()))
    }

    fn of(&self, key: &str) -> &MemoryStore<Policy, ManualClock> {
        &self.0[usize::from(key != "alice")]
    }
}

impl Store<Policy> for Servers {
    type Error = MemoryError;

    async fn apply(&self, batch: &Batch<'_, Policy>) -> Result<Verdict, MemoryError> {
        let each = batch.checks().iter().map(|check| {
            Ok(*self.of(check.key).apply_now(&batch.with_checks(&[*check]))?.summary())
        });
        Ok(Verdict::several(each.collect::<Result<Vec<Decision>, MemoryError>>()?))
    }
}

impl SnapshotStore<Policy> for Servers {
    async fn apply_with_snapshot(
        &self,
        batch: &Batch<'_, Policy>,
    ) -> Result<WithSnapshot<PolicyState>, MemoryError> {
        match batch.checks() {
            [check] => self.of(check.key).apply_with_snapshot(batch).await,
            _ => Ok((self.apply(batch).await?, None)),
        }
    }
}

#[test]
fn a_batch_is_not_denied_because_one_server_is_ahead_of_another() {
    let local = ManualClock::new(BEGIN);
    for ahead in ["alice", "bob"] {
        let later = Timestamp::saturating_from_us(BEGIN.as_us() + 5_000_000);
        let of = |key| ManualClock::new(if key == ahead { later } else { BEGIN });
        let clocks = ["alice", "bob"].map(of);
        let cache: DenialCache<_, Policy, _> =
            lasting(&local).build(Servers::new([&clocks[0], &clocks[1]]));
        let limit = limit("api", "gcra 1/s burst 10");
        let check = |key, cost| Check { limit: &limit, key, cost };
        let ask = |checks: &[Check<'_, Policy>]| {
            block_on(cache.apply(&Batch::new(checks).expect("distinct"))).expect("decides")
        };
        // Each is denied, and would have two a second later.
        for key in ["alice", "bob"] {
            assert!(ask(&[check(key, 9)]).allowed());
            assert!(!ask(&[check(key, 3)]).allowed());
            assert_eq!(ask(&[check(key, 3)]).source(), Source::Cache);
        }
        // Both are known, and denied for what neither has.
        let none = ask(&[check("alice", 3), check("bob", 3)]);
        assert_eq!((none.allowed(), none.source()), (false, Source::Cache));
        for clock in clocks.iter().chain([&local]) {
            clock.advance(Duration::from_secs(1));
        }
        let both = ask(&[check("alice", 2), check("bob", 2)]);
        assert_eq!((both.allowed(), both.source()), (true, Source::Store), "{ahead} is ahead");
    }
}

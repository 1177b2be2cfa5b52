//! Caches that are wrong in one way each. The test that holds for [`DenialCache`](ratelimit_layers::DenialCache) must fail for
//! each of them.

use std::collections::HashMap;
use std::sync::Mutex;

use ratelimit_core::{
    Algorithm, Batch, Clock, ManualClock, Op, Policy, PolicyState, SnapshotStore, Source, Store,
    Timestamp, Verdict,
};
use ratelimit_memory::MemoryError;

use crate::exact::{compare, never_late};
use crate::noted::{BEGIN, Noted};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flaw {
    /// It denies a request that costs less than the denied one.
    ForgetsCost,
    /// It still denies after a reset.
    SurvivesReset,
    /// It still denies after a refund or a settlement.
    SurvivesRefunds,
    /// It counts the wait from the moment of the reply.
    CountsFromReply,
    /// It answers attempts, which are charged.
    CachesAttempts,
}

struct Kept {
    state: Option<PolicyState>,
    now: Timestamp,
    sent: Timestamp,
    cost: u64,
}

/// The simplest cache: of single checks, and without a bound.
struct Simple {
    store: Noted,
    clock: ManualClock,
    flaw: Option<Flaw>,
    kept: Mutex<HashMap<(String, String), Kept>>,
}

impl Simple {
    fn new(clock: &ManualClock, flaw: Option<Flaw>) -> Self {
        let (store, clock) = (Noted::new(clock), clock.clone());
        Self { store, clock, flaw, kept: Mutex::default() }
    }

    fn is(&self, flaw: Flaw) -> bool {
        self.flaw == Some(flaw)
    }

    fn drop_keys(&self, batch: &Batch<'_, Policy>) {
        let mut kept = self.kept.lock().expect("no panic");
        for check in batch.checks() {
            kept.remove(&(check.limit.name().into(), check.key.into()));
        }
    }
}

impl Store<Policy> for Simple {
    type Error = MemoryError;

    async fn apply(&self, batch: &Batch<'_, Policy>) -> Result<Verdict, MemoryError> {
        let check = match batch.checks() {
            [check] if batch.is_plain() && batch.operation() == Op::Acquire => check,
            _ => {
                let keeps = match batch.operation() {
                    Op::Reset => self.is(Flaw::SurvivesReset),
                    Op::Refund | Op::Settle => self.is(Flaw::SurvivesRefunds),
                    op => op == Op::Peek,
                };
                if !keeps {
                    self.drop_keys(batch);
                }
                return self.store.apply(batch).await;
            }
        };
        let policy = *check.limit.algorithm();
        if policy.charges_denials() && !self.is(Flaw::CachesAttempts) {
            return self.store.apply(batch).await;
        }
        let sent = self.clock.now();
        let key = (check.limit.name().to_owned(), check.key.to_owned());
        if let Some(kept) = self.kept.lock().expect("no panic").get(&key) {
            let now = kept.now.saturating_add_us(sent.saturating_us_since(kept.sent));
            let cost = if self.is(Flaw::ForgetsCost) { kept.cost } else { check.cost };
            let decision = policy.step(kept.state.as_ref(), now, cost).costing(check.cost).decision;
            if !decision.allowed {
                return Ok(Verdict::one(decision).with_source(Source::Cache));
            }
        }
        let (verdict, snapshot) = self.store.apply_with_snapshot(batch).await?;
        self.drop_keys(batch);
        if let Some(snapshot) = snapshot.filter(|_| !verdict.allowed()) {
            let sent = if self.is(Flaw::CountsFromReply) { self.clock.now() } else { sent };
            let state = snapshot.states.into_iter().next().flatten();
            let kept = Kept { state, now: snapshot.now, sent, cost: check.cost };
            self.kept.lock().expect("no panic").insert(key, kept);
        }
        Ok(verdict)
    }
}

const GCRA: &str = "gcra 10/s burst 7";

#[test]
fn caches_that_forget_cost_or_survive_a_reset_or_answer_attempts_are_caught() {
    let compared = |flaw, words| {
        let clock = ManualClock::new(BEGIN);
        compare(&Simple::new(&clock, flaw), &clock, words, 3, 3_000)
    };
    assert_eq!(compared(None, GCRA), Ok(3_000));
    for flaw in [Flaw::ForgetsCost, Flaw::SurvivesReset, Flaw::SurvivesRefunds] {
        let caught = compared(Some(flaw), GCRA).expect_err("is caught");
        assert!(caught.starts_with("request"), "{flaw:?}: {caught}");
    }
    let caught = compared(Some(Flaw::CachesAttempts), "gcra 10/s burst 7 count attempts")
        .expect_err("is caught");
    assert!(caught.starts_with("request"), "{caught}");
}

#[test]
fn a_cache_that_counts_from_the_reply_is_caught() {
    let tried = |flaw| {
        let clock = ManualClock::new(BEGIN);
        let cache = Simple::new(&clock, flaw);
        never_late(&cache, &cache.store, &clock, "gcra 10/s burst 4", 2_000)
    };
    assert_eq!(tried(None), Ok(2_000));
    assert!(tried(Some(Flaw::CountsFromReply)).expect_err("is caught").starts_with("request"));
}

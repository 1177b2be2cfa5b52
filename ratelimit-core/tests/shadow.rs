//! Shadow limits: they decide and charge, and never deny.

#![allow(clippy::expect_used, clippy::panic, reason = "tests")]

use std::collections::HashMap;
use std::sync::Mutex;

use ratelimit_core::{
    Batch, FixedWindow, Limit, Limits, Op, Policy, PolicyState, RateLimiter, Refusal,
    ReservationId, Snapshot, Store, SyncStore, Timestamp, Verdict, decide,
};

/// A store of one key per limit, which may fail for a limit of one name.
#[derive(Default)]
struct Simple {
    states: Mutex<HashMap<String, PolicyState>>,
    fails_for: Option<&'static str>,
}

/// How it fails.
const FAILED: Refusal = Refusal::EndOfTime { now_us: 7 };

impl Store<Policy> for Simple {
    type Error = Refusal;

    async fn apply(&self, batch: &Batch<'_, Policy>) -> Result<Verdict, Refusal> {
        self.apply_now(batch)
    }
}

impl SyncStore<Policy> for Simple {
    fn apply_now(&self, batch: &Batch<'_, Policy>) -> Result<Verdict, Refusal> {
        let names: Vec<_> = batch.checks().iter().map(|check| check.limit.name()).collect();
        if self.fails_for.is_some_and(|name| names.contains(&name)) {
            return Err(FAILED);
        }
        let mut all = self.states.lock().expect("no panic");
        let states = names.iter().map(|name| all.get(*name).cloned()).collect();
        let mut kept = Snapshot { now: Timestamp::saturating_from_us(1), states };
        let verdict = decide(batch, kept.now, &mut kept)?;
        for (name, state) in names.into_iter().zip(kept.states) {
            state.map(|state| all.insert(name.to_owned(), state));
        }
        Ok(verdict)
    }
}

fn limit(name: &str, count: u64) -> Limit<Policy> {
    let window = FixedWindow::per_minute(count).build().expect("a limit");
    Limit::new(name, window.into()).expect("a name")
}

fn limiter(limits: impl IntoIterator<Item = Limit<Policy>>) -> RateLimiter<Simple> {
    RateLimiter::new(Limits::new(limits).expect("limits"), Simple::default())
}

#[test]
fn a_shadow_limit_decides_and_charges_and_never_denies() {
    let limiter = limiter([limit("strict", 2).shadow(), limit("plain", 3)]);
    let mut seen = Vec::new();
    for _ in 0..4 {
        let verdict = limiter.check_now("alice").expect("decided");
        let shadow: Vec<_> = verdict.shadow_decisions().map(|d| (d.allowed, d.remaining)).collect();
        assert_eq!(verdict.decisions().len(), 1);
        let named = limiter.named(&verdict);
        assert_eq!(named.by_name("plain").map(|plain| plain.remaining), Some(verdict.remaining()));
        assert!(named.shadow().all(|decision| decision.name() == "strict"));
        seen.push((verdict.allowed(), verdict.remaining(), shadow));
    }
    assert_eq!(
        seen,
        [
            (true, 2, vec![(true, 1)]),
            (true, 1, vec![(true, 0)]),
            (true, 0, vec![(false, 0)]),
            // A request that an enforced limit denies does not reach the shadow limits.
            (false, 0, vec![]),
        ]
    );
}

#[test]
fn shadow_limits_do_not_spare_each_other() {
    let limiter = limiter([limit("one", 1).shadow(), limit("two", 2).shadow()]);
    let shadow = |verdict: Verdict| -> Vec<_> {
        assert!(verdict.allowed() && verdict.is_unlimited());
        verdict.shadow_decisions().map(|d| (d.allowed, d.remaining)).collect()
    };
    assert_eq!(shadow(limiter.check_now("alice").expect("decided")), [(true, 0), (true, 1)]);
    assert_eq!(shadow(limiter.check_now("alice").expect("decided")), [(false, 0), (true, 0)]);
    assert_eq!(shadow(limiter.peek_now("alice", 1).expect("decided")), [(false, 0), (false, 0)]);
}

#[test]
fn an_error_of_a_shadow_limit_refuses_no_request() {
    let store = Simple { fails_for: Some("strict"), ..Simple::default() };
    let limits = Limits::new([limit("strict", 2).shadow(), limit("plain", 3)]).expect("limits");
    let limiter = RateLimiter::new(limits, store);
    let verdict = limiter.check_now("alice").expect("decided");
    assert!(verdict.allowed() && verdict.shadow_decisions().len() == 0);
    // No window counts under an id: the enforced limit says so, not the shadow limit.
    let missing = limiter.commit_now("alice", ReservationId::new(1), 1);
    assert!(matches!(missing, Err(Refusal::UnknownReservation { .. })));
}

#[test]
fn a_single_shadow_limit_takes_no_fast_path() {
    let limiter = limiter([limit("only", 1).shadow()]);
    assert!((0..3).all(|_| limiter.check_now("a").expect("decided").allowed()));
    assert!(limiter.request("a").apply_now(Op::Force).expect("decided").allowed());
    assert!(limiter.check_n_now("a", 9).expect("decided").allowed());
    // A caller that it does not apply to is not refused either.
    assert!(limiter.check_now(&[("user", "alice")]).expect("decided").allowed());
}

//! Shadow limits: they decide and charge, and never deny.

#![allow(clippy::expect_used, clippy::panic, reason = "tests")]

use std::cell::Cell;
use std::sync::Mutex;

use ratelimit_core::{
    Algorithm, Batch, ErrorKind, FixedWindow, Limit, Limits, Op, Policy, PolicyState, RateLimiter,
    Refusal, ReservationId, Store, StoreError, SyncStore, Timestamp, Verdict, decide,
};

/// A store of one key per limit, which may fail for a limit of one name.
#[derive(Default)]
struct Simple {
    states: Mutex<Vec<(String, PolicyState)>>,
    fails_for: Option<&'static str>,
}

#[derive(Debug, PartialEq)]
struct Failed;

impl std::fmt::Display for Failed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("failed")
    }
}

impl std::error::Error for Failed {}

impl From<Refusal> for Failed {
    fn from(_: Refusal) -> Self {
        Self
    }
}

impl StoreError for Failed {
    fn kind(&self) -> ErrorKind {
        ErrorKind::Unavailable
    }
}

/// The states of a batch, by the names of its limits.
struct Named<'a>(&'a mut Vec<(String, PolicyState)>, Vec<&'a str>);

impl ratelimit_core::States<PolicyState> for Named<'_> {
    fn get(&self, position: usize) -> Option<&PolicyState> {
        self.0.iter().find(|(name, _)| name == self.1[position]).map(|(_, state)| state)
    }

    fn put(&mut self, position: usize, write: ratelimit_core::Write<PolicyState>) {
        let name = self.1[position];
        match write {
            ratelimit_core::Write::Keep => {}
            ratelimit_core::Write::Put { state, .. } => {
                self.0.retain(|(known, _)| known != name);
                self.0.push((name.to_owned(), state));
            }
            ratelimit_core::Write::Remove => self.0.retain(|(known, _)| known != name),
        }
    }

    fn reservation(&self, _: usize) -> Option<ratelimit_core::Reservation> {
        None
    }

    fn fingerprint(&self) -> u64 {
        0
    }

    fn put_reservation(&mut self, _: usize, _: ratelimit_core::Reservation, _: Timestamp) {}
}

impl Store<Policy> for Simple {
    type Error = Failed;

    async fn apply(&self, batch: &Batch<'_, Policy>) -> Result<Verdict, Failed> {
        self.apply_now(batch)
    }
}

impl SyncStore<Policy> for Simple {
    fn apply_now(&self, batch: &Batch<'_, Policy>) -> Result<Verdict, Failed> {
        let names: Vec<_> = batch.checks().iter().map(|check| check.limit.name()).collect();
        if self.fails_for.is_some_and(|name| names.contains(&name)) {
            return Err(Failed);
        }
        let mut states = self.states.lock().expect("no panic");
        decide(batch, Timestamp::from_us(1).expect("a time"), &mut Named(&mut states, names))
            .map_err(Failed::from)
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
    assert_eq!(missing, Err(Failed));
}

#[test]
fn a_single_shadow_limit_takes_no_fast_path() {
    let limiter = limiter([limit("only", 1).shadow()]);
    let allowed = Cell::new(0);
    limiter.check_each_now(&["a", "a", "a"], |_, verdict| {
        allowed.set(allowed.get() + u32::from(verdict.expect("decided").allowed()));
    });
    assert_eq!(allowed.get(), 3);
    assert!(limiter.request("a").apply_now(Op::Force).expect("decided").allowed());
    assert!(limiter.check_n_now("a", 9).expect("decided").allowed());
    // A caller that it does not apply to is not refused either.
    assert!(limiter.check_now(&[("user", "alice")]).expect("decided").allowed());
    assert_eq!(limit("only", 1).shadow().algorithm().capacity(), 1);
}

//! Shadow limits: they decide and charge, and never deny.

use ratelimit_core::store::Op;
use ratelimit_core::{Refusal, ReservationId, Verdict};
use ratelimit_memory::MemoryError;

use crate::common::{limit, limiter};

/// What the shadow limits say about a request, and leave.
fn shadow(verdict: &Verdict) -> Vec<(bool, u64)> {
    verdict.shadow_decisions().map(|decision| (decision.allowed, decision.remaining)).collect()
}

#[test]
fn a_shadow_limit_decides_and_charges_and_never_denies() {
    let limits = [limit("strict", "fixed-window 2/m").shadow(), limit("plain", "fixed-window 3/m")];
    let (limiter, _clock) = limiter(limits, |builder| builder);
    let mut seen = Vec::new();
    for _ in 0..4 {
        let verdict = limiter.check_now("alice").expect("decided");
        assert_eq!(verdict.decisions().len(), 1);
        let named = limiter.named(&verdict);
        assert_eq!(named.by_name("plain").map(|plain| plain.remaining), Some(verdict.remaining()));
        assert!(named.shadow().all(|decision| decision.name() == "strict"));
        seen.push((verdict.allowed(), verdict.remaining(), shadow(&verdict)));
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
    let limits = [("one", "fixed-window 1/m"), ("two", "fixed-window 2/m")];
    let limits = limits.map(|(name, words)| limit(name, words).shadow());
    let (limiter, _clock) = limiter(limits, |builder| builder);
    for (op, due) in [
        (Op::Acquire, [(true, 0), (true, 1)]),
        (Op::Acquire, [(false, 0), (true, 0)]),
        (Op::Peek, [(false, 0), (false, 0)]),
    ] {
        let verdict = limiter.request("alice").apply_now(op).expect("decided");
        assert!(verdict.allowed() && verdict.is_unlimited());
        assert_eq!(shadow(&verdict), due);
    }
}

/// No log counts under an id.
#[test]
fn an_error_of_a_shadow_limit_refuses_no_request() {
    let limits = [limit("strict", "sliding-log 2/m").shadow(), limit("plain", "fixed-window 3/m")];
    let (limiter, _clock) = limiter(limits, |builder| builder);
    let verdict = limiter.reserve_now("alice", ReservationId::new(1), 1).expect("decided");
    assert!(verdict.allowed() && verdict.shadow_decisions().len() == 0);
    // It is the enforced limit that says what is missing.
    let missing = limiter.commit_now("alice", ReservationId::new(2), 1);
    let unknown = Refusal::UnknownReservation { id: ReservationId::new(2) };
    assert_eq!(missing, Err(MemoryError::Refused(unknown)));
}

#[test]
fn a_single_shadow_limit_takes_no_fast_path() {
    let (limiter, _clock) =
        limiter([limit("only", "fixed-window 1/m").shadow()], |builder| builder);
    assert!((0..3).all(|_| limiter.check_now("a").expect("decided").allowed()));
    assert!(limiter.request("a").apply_now(Op::Force).expect("decided").allowed());
    assert!(limiter.check_n_now("a", 9).expect("decided").allowed());
    // A caller that it does not apply to is not refused either.
    assert!(limiter.check_now(&[("user", "alice")]).expect("decided").allowed());
}

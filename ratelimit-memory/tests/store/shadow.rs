//! Shadow limits: they decide and charge, and never deny.

use ratelimit_core::store::Op;
use ratelimit_core::{Limits, RateLimiter, Refusal, ReservationId};
use ratelimit_memory::MemoryError;

use crate::common::{limit, limiter, store};

/// Whether a request is allowed, and what each shadow limit says and leaves.
type Said<'s> = (bool, &'s [(bool, u64)]);

/// Sends requests of one caller to shadow limits, and to an enforced one if there is one.
fn are_said(shadows: &[&str], enforced: Option<&str>, requests: &[(Op, Said<'_>)]) {
    let limits = ["one", "two"].into_iter().zip(shadows);
    let limits = limits.map(|(name, words)| limit(name, words).shadow());
    let limits = limits.chain(enforced.map(|words| limit("plain", words)));
    let limiter =
        RateLimiter::new(Limits::new(limits).expect("limits"), store(|builder| builder).0);
    for (op, (allowed, said)) in requests {
        let verdict = limiter.request("alice").apply_now(*op).expect("decided");
        let shadow = verdict.shadow_decisions().map(|it| (it.allowed, it.remaining));
        assert_eq!((verdict.allowed(), &shadow.collect::<Vec<_>>()[..]), (*allowed, *said));
        assert_eq!(verdict.is_unlimited(), enforced.is_none());
        let named = limiter.named(&verdict);
        assert!(named.shadow().zip(["one", "two"]).all(|(it, name)| it.name() == name));
        assert_eq!(named.by_name("plain").is_some(), enforced.is_some());
    }
}

#[test]
fn a_shadow_limit_decides_and_charges_and_never_denies() {
    let requests = [
        (Op::Acquire, (true, &[(true, 1)][..])),
        (Op::Acquire, (true, &[(true, 0)])),
        (Op::Acquire, (true, &[(false, 0)])),
        // A request that an enforced limit denies does not reach the shadow limits.
        (Op::Acquire, (false, &[])),
    ];
    are_said(&["fixed-window 2/m"], Some("fixed-window 3/m"), &requests);
    // Alone it takes no fast path.
    are_said(&["fixed-window 2/m"], None, &requests[..3]);
    let force = (Op::Force, (true, &[(true, 0)][..]));
    are_said(&["fixed-window 1/m"], None, &[requests[1], requests[2], force]);
}

#[test]
fn shadow_limits_do_not_spare_each_other() {
    let requests = [
        (Op::Acquire, (true, &[(true, 0), (true, 1)][..])),
        (Op::Acquire, (true, &[(false, 0), (true, 0)])),
        (Op::Peek, (true, &[(false, 0), (false, 0)])),
    ];
    are_said(&["fixed-window 1/m", "fixed-window 2/m"], None, &requests);
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
    // A caller that it does not apply to is not refused either.
    let (limiter, _clock) =
        self::limiter([limit("only", "fixed-window 1/m").shadow()], |builder| builder);
    assert!(limiter.check_now(&[("user", "alice")]).expect("decided").allowed());
}

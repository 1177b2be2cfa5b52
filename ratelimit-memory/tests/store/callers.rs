//! The facade over the memory store, as a service uses it: callers of several identifiers, limits that apply to some of
//! them, and several callers at once.

use ratelimit_core::store::Op;
use ratelimit_core::{
    ErrorKind, Identifiers, Limit, Limits, Policy, RateLimiter, ReservationId, StoreError,
    Timestamp, Verdict,
};
use ratelimit_memory::{MemoryError, MemoryStore};
use ratelimit_testkit::block_on;

use crate::common::{Limiter, Memory, ask, limit, limiter, store};

fn limits() -> [Limit<Policy>; 3] {
    let by = |limit: Limit<Policy>, names: &[&str]| limit.by(names).expect("plain names");
    [
        by(limit("burst", "gcra 1/s burst 3"), &["ip"]),
        by(limit("daily", "fixed-window 5/d"), &["user"]),
        by(limit("pair", "fixed-window 2/h"), &["ip", "user"]),
    ]
}

#[test]
fn several_limits_of_several_identifiers_are_charged_all_or_none_and_named() {
    let (limiter, clock) = limiter(limits(), |builder| builder);
    clock.set(Timestamp::ZERO);
    let alice = [("ip", "192.0.2.1"), ("user", "alice")];
    assert_eq!(limiter.request(&alice).applicable().collect::<Vec<_>>(), [0, 1, 2]);
    assert!(limiter.check_n_now(&alice, 2).expect("decides").allowed());
    let denied = limiter.check_now(&alice).expect("decides");
    // The pair's limit denies. The others would have admitted, and are uncharged.
    let seen = limiter.named(&denied).map(|d| (d.name(), d.allowed, d.remaining));
    assert_eq!(
        seen.collect::<Vec<_>>(),
        [("burst", true, 1), ("daily", true, 3), ("pair", false, 0)]
    );
    assert_eq!((denied.allowed(), denied.limit(), denied.remaining()), (false, 2, 0));
    clock.advance(denied.retry_after().expect("it fits later"));
    assert!(limiter.check_now(&alice).expect("decides").allowed());
    // Another address makes another pair, of the same user.
    let elsewhere = [("ip", "192.0.2.2"), ("user", "alice")];
    assert_eq!(limiter.peek_now(&elsewhere, 0).expect("decides").decisions()[1].remaining, 2);
    // Without a user only the address is limited.
    let unlimited = limiter.peek_now(&[("ip", "192.0.2.1")], 0).expect("decides");
    assert_eq!(limiter.named(&unlimited).map(|d| d.name()).collect::<Vec<_>>(), ["burst"]);
    assert!(limiter.named(&unlimited).by_name("daily").is_none());
    // Without an address only the user is, whether the identifier is kept as text or written as text.
    let ip = std::net::IpAddr::from([192, 0, 2, 1]);
    for caller in [&[("user", "alice")] as &dyn Identifiers, &[("user", ip)]] {
        let verdict = limiter.peek_now(caller, 0).expect("decides");
        assert_eq!(limiter.named(&verdict).map(|d| d.name()).collect::<Vec<_>>(), ["daily"]);
    }
}

/// Asks in every way about a caller to whom no limit applies or who lacks a required identifier.
fn all_ways<C: Identifiers + Sync + ?Sized>(
    limiter: &Limiter,
    caller: &C,
) -> Vec<Result<Verdict, MemoryError>> {
    let id = ReservationId::new(7);
    let mut results = vec![
        limiter.check_now(caller),
        limiter.check_n_now(caller, 2),
        limiter.peek_now(caller, 1),
        limiter.force_now(caller, 1),
        limiter.refund_now(caller, 1),
        limiter.reset_now(caller),
        limiter.reserve_now(caller, id, 1),
        limiter.commit_now(caller, id, 1),
        limiter.renew_now(caller, id),
        block_on(limiter.check(caller)),
        block_on(limiter.request(caller).metadata(b"who").acquire()),
    ];
    MemoryStore::check_each_now(limiter, &[caller, caller], |_, decided| results.push(decided));
    results
}

/// Limits, a caller, whether it may be unlimited, and what an error then says.
type Case<'c> = (Vec<Limit<Policy>>, &'c (dyn Identifiers + Sync), bool, &'c [&'c str]);

#[test]
fn a_request_to_which_no_limit_applies_is_an_error_that_names_the_identifiers_or_admitted() {
    let [by_ip, daily, pair] = limits();
    let required = vec![by_ip.clone(), daily.required(), pair];
    let (ip, user) = ([("ip", "192.0.2.1")], [("user", "alice")]);
    let cases: [Case<'_>; 6] = [
        (
            vec![by_ip.clone()],
            &[("IP", "192.0.2.1")],
            false,
            &["identifier \"IP\"", "wants \"ip\""],
        ),
        (limits().into(), &"a bare key", false, &["no limit applies", "which has a bare key"]),
        (limits().into(), &[("", ""); 0], false, &["which has no identifier", "allow_unlimited()"]),
        (limits().into(), &"a bare key", true, &[]),
        (required, &ip, true, &["is required and wants", "identifier \"ip\""]),
        (vec![by_ip.required()], &user, true, &["is required and wants", "identifier \"user\""]),
    ];
    for (limits, caller, allows_unlimited, expected) in cases {
        let mut limiter = RateLimiter::new(Limits::new(limits).expect("limits"), store(|b| b).0);
        if allows_unlimited {
            limiter = limiter.allow_unlimited();
        }
        for decided in all_ways(&limiter, caller) {
            match decided {
                Ok(verdict) => {
                    assert!(expected.is_empty() && verdict.allowed() && verdict.is_unlimited());
                }
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Invalid);
                    let says = |part: &&str| error.to_string().contains(part);
                    assert!(!expected.is_empty() && expected.iter().all(says), "{error}");
                }
            }
        }
        assert!(limiter.store().is_empty());
    }
}

/// Asks one limiter about all callers at once, and another of the same limits about one after the other: places
/// come in order, each once, and the answers are the same, also when asked again.
fn agrees<C: Identifiers + ?Sized>(limits: &[Limit<Policy>], callers: &[&C]) {
    let limiter =
        || RateLimiter::new(Limits::new(limits.iter().cloned()).expect("limits"), store(|b| b).0);
    let (at_once, alone) = (limiter(), limiter());
    for turn in 0..3 {
        let mut reported = Vec::new();
        MemoryStore::check_each_now(&at_once, callers, |position, decided| {
            reported.push((position, decided));
        });
        let expected = callers.iter().map(|caller| alone.check_now(*caller)).enumerate();
        assert_eq!(
            reported,
            expected.collect::<Vec<_>>(),
            "turn {turn}, {} callers",
            callers.len()
        );
        assert_eq!(at_once.store().len(), alone.store().len(), "turn {turn}");
    }
}

#[test]
fn several_callers_are_decided_as_one_by_one() {
    let [gcra, window, log] =
        ["gcra 2/h", "fixed-window 5/h", "sliding-log 2/h"].map(|words| limit(&words[..3], words));
    for limits in [vec![gcra.clone()], vec![window.clone()], vec![log], vec![gcra, window]] {
        for count in [0, 1, 7, 8, 9, 16, 17] {
            let names: Vec<_> = (0..count).map(|n| format!("caller {n}")).collect();
            agrees::<str>(&limits, &names.iter().map(String::as_str).collect::<Vec<_>>());
        }
        agrees::<str>(&limits, &["a"; 17]);
        agrees::<str>(&limits, &["a", "b", "a", "a", "c", "b", "a", "a", "a", "a", "b"]);
    }
    let [by_ip, by_user, by_both] = limits();
    let both: &[(&str, &str)] = &[("ip", "1.2.3.4"), ("user", "u")];
    let (user, neither) = (&both[1..], &both[..0]);
    for limits in [vec![by_ip.clone()], vec![by_both], vec![by_ip, by_user]] {
        agrees(&limits, &[both, user, neither, both, both, both, user, both, both, user, both]);
        // The caller without the identifier is the last of eight, the first of the next, and the last of all.
        agrees(&limits, &[both, both, both, both, both, both, both, user, user, both, neither]);
    }
}

#[test]
fn the_closure_may_call_the_limiter_again() {
    let (limiter, _clock) = limiter([limit("one", "gcra 4/h")], |builder| builder);
    let mut left = Vec::new();
    MemoryStore::check_each_now::<str>(&limiter, &["a", "b", "a"], |_, decided| {
        let again = limiter.check_now("a").expect("decides");
        left.push((decided.expect("decides").remaining(), again.remaining()));
    });
    // `a` is charged by the call and by the closure, in turn.
    assert_eq!(left, [(3, 2), (3, 1), (0, 0)]);
}

/// As of a thread in a model of loom, which has 32 KiB, and no test allocator beside it. A segment has as many.
#[test]
fn a_store_is_made_used_and_dropped_on_a_small_stack() {
    let thread = std::thread::Builder::new().stack_size(64 * 1_024);
    let works = thread.spawn(|| {
        let (store, _): (Memory, _) = store(|builder| builder);
        let limit = limit("l", "gcra 1/h burst 3");
        (0..4).filter(|_| ask(&store, (&limit, "a"), Op::Acquire, 1).allowed()).count()
    });
    assert_eq!(works.expect("a thread").join().expect("no panic"), 3);
}

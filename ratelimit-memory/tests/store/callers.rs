//! The facade over the memory store, as a service uses it: callers of several identifiers, limits
//! that apply to some of them, and several callers at once.

use ratelimit_core::store::Op;
use ratelimit_core::{
    AnyAlgorithm, ErrorKind, Identifiers, Limit, Limits, RateLimiter, ReservationId, StoreError,
    Verdict,
};
use ratelimit_memory::{MemoryError, MemoryStore};
use ratelimit_testkit::block_on;

use crate::common::{Limiter, Memory, ask, limit, limiter, store};

fn limits() -> [Limit<AnyAlgorithm>; 3] {
    let by = |limit: Limit<AnyAlgorithm>, names: &[&str]| limit.by(names).expect("plain names");
    [
        by(limit("burst", "gcra 1/s burst 3"), &["ip"]),
        by(limit("daily", "fixed-window 5/d"), &["user"]),
        by(limit("pair", "fixed-window 2/h"), &["ip", "user"]),
    ]
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
        limiter.request(caller).peek_now(),
        limiter.request(caller).force_now(),
        limiter.request(caller).refund_now(),
        limiter.request(caller).reset_now(),
        limiter.request(caller).id(id).check_now(),
        limiter.request(caller).id(id).cost(1).settle_now(),
        limiter.request(caller).id(id).renew_now(),
        block_on(limiter.check(caller)),
        block_on(limiter.request(caller).metadata(b"who").check()),
    ];
    MemoryStore::check_each_now(limiter, &[caller, caller], |_, decided| results.push(decided));
    results
}

/// Limits, a caller, whether it may be unlimited, and what an error then says.
type Case<'c> = (Vec<Limit<AnyAlgorithm>>, &'c (dyn Identifiers + Sync), bool, &'c [&'c str]);

#[test]
fn a_request_to_which_no_limit_applies_is_an_error_that_names_the_identifiers_or_admitted() {
    let [by_ip, daily, pair] = limits();
    let required = vec![by_ip.clone(), daily.required(), pair];
    let login = by_ip.clone().when("path", "/login").expect("a condition");
    let of_login = required[1].clone().when_not("path", ["/", "/health"]).expect("a condition");
    let (home, signup) =
        ([("ip", "192.0.2.1"), ("path", "/")], [("ip", "192.0.2.1"), ("path", "/signup")]);
    let (ip, user) = ([("ip", "192.0.2.1")], [("user", "alice")]);
    let cases: [Case<'_>; 10] = [
        (
            vec![by_ip.clone()],
            &[("IP", "192.0.2.1")],
            false,
            &["identifier \"IP\"", "wants \"ip\""],
        ),
        (limits().into(), &"a bare key", false, &["no limit applies", "which has a bare key"]),
        (limits().into(), &[("", ""); 0], false, &["which has no identifier", "allow_unlimited()"]),
        (limits().into(), &"a bare key", true, &[]),
        (required, &ip, true, &["wants", "identifier \"ip\""]),
        (
            vec![login.clone()],
            &home,
            false,
            &["limit \"burst\" wants \"ip\" when path = \"/login\"", "identifier \"ip\", \"path\""],
        ),
        // A required limit is required of those that meet its conditions.
        (vec![login.clone().required()], &home, true, &[]),
        (vec![login.clone(), of_login.clone()], &home, true, &[]),
        (vec![login, of_login], &signup, true, &["wants \"user\" when not path"]),
        (vec![by_ip.required()], &user, true, &["wants", "identifier \"user\""]),
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

/// Asks one limiter about all callers at once, and another of the same limits about one after the
/// other: places come in order, each once, and the answers are the same, also when asked again.
fn agrees<C: Identifiers + ?Sized>(limits: &[Limit<AnyAlgorithm>], callers: &[&C]) {
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
    // In shadow, alone and beside another, none of them denies. A required one refuses each caller
    // that lacks its identifier.
    for limits in [
        vec![by_ip.clone().shadow()],
        vec![by_ip.clone().shadow(), by_user.clone()],
        vec![by_ip.clone().required()],
        vec![by_both.clone().required(), by_user.clone().shadow()],
    ] {
        let both: &[(&str, &str)] = &[("ip", "1.2.3.4"), ("user", "u")];
        agrees(&limits, &[both, both, &both[1..], both, both, both, &both[..1], both, both, both]);
    }
    let both: &[(&str, &str)] = &[("ip", "1.2.3.4"), ("user", "u")];
    let (user, neither) = (&both[1..], &both[..0]);
    for limits in [vec![by_ip.clone()], vec![by_both], vec![by_ip, by_user]] {
        agrees(&limits, &[both, user, neither, both, both, both, user, both, both, user, both]);
        // The caller without the identifier is the last of eight, the first of the next, and the
        // last of all.
        agrees(&limits, &[both, both, both, both, both, both, both, user, user, both, neither]);
    }
}

/// The identifiers of a caller may be parts of one text, such as a path and its beginning.
#[test]
fn identifiers_that_are_parts_of_one_text_count_as_copies_of_them_do() {
    const TEXT: &str = "acme/al";
    let parts = || (0..=TEXT.len()).flat_map(|end| (0..=end).map(move |begin| &TEXT[begin..end]));
    for words in [["gcra 9/h"; 2], ["gcra 9/h", "fixed-window 9/h"], ["sliding-log 9/h"; 2]] {
        let all = ["tenant", "user"].map(|name| (name, words[usize::from(name == "user")]));
        let all = all.map(|(name, words)| limit(name, words).by([name]).expect("a plain name"));
        let limiter = || RateLimiter::new(Limits::new(all.clone()).expect("two"), store(|b| b).0);
        let (of_parts, of_copies) = (limiter(), limiter());
        for (tenant, user) in parts().flat_map(|one| parts().map(move |other| (one, other))) {
            let decided = of_parts.check_now(&[("tenant", tenant), ("user", user)]);
            let due =
                of_copies.check_now(&[("tenant", tenant.to_owned()), ("user", user.to_owned())]);
            assert_eq!(decided, due, "{words:?}: {tenant:?}, {user:?}");
        }
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

/// As of a thread in a model of loom, which has 32 KiB, and no test allocator beside it. A segment
/// has as many.
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

//! Window logs, attempts and stacks over the memory store, through the facade.

use std::time::Duration;

use ratelimit_core::{
    Attempts, Batch, Check, ErrorKind, FirstRequestWindow, FixedWindow, Gcra, InMemory, Limit,
    Limits, ManualClock, Op, Policy, RateLimiter, ReservationId, SlidingLog, Stack, StoreError,
    SyncStore, Timestamp, TokenBucket, WindowLog,
};
use ratelimit_memory::MemoryStore;
use ratelimit_testkit::block_on;

fn limiter<const N: usize>(
    limits: [(&str, Policy); N],
) -> (RateLimiter<MemoryStore<Policy, ManualClock>>, ManualClock) {
    let clock = ManualClock::new(Timestamp::ZERO);
    let store = MemoryStore::builder().clock(clock.clone()).build();
    let limits = limits.map(|(name, policy)| Limit::new(name, policy).expect("a name"));
    (RateLimiter::new(Limits::new(limits).expect("limits"), store), clock)
}

fn log() -> (&'static str, Policy) {
    ("log", WindowLog::new("3/m".parse().expect("a rate")).expect("a limit").into())
}

fn per_minute(limit: &str) -> FixedWindow {
    FixedWindow::new(limit.parse().expect("a rate")).expect("a limit")
}

#[test]
fn a_window_log_returns_the_metadata_of_its_charges() {
    let fixed = ("fixed", per_minute("9/m").into());
    let (limiter, clock) = limiter([log(), fixed]);
    let who = |at: &[u8]| limiter.request("a").metadata(at).apply_now(Op::Acquire);
    for path in [&b"GET /login"[..], b"", b"\0\xff"] {
        assert!(who(path).expect("decides").allowed());
        clock.advance(Duration::from_secs(1));
    }
    assert!(!who(b"one too many").expect("decides").allowed());
    let entries = || {
        let entries = block_on(limiter.entries("a")).expect("decides");
        let short = |entries: Vec<ratelimit_core::WindowEntry>| -> Vec<_> {
            entries
                .into_iter()
                .map(|e| (e.timestamp.as_us(), e.cost, e.metadata.to_vec()))
                .collect()
        };
        entries.into_iter().map(|(name, entries)| (name, short(entries))).collect::<Vec<_>>()
    };
    let log = vec![
        (0, 1, b"GET /login".to_vec()),
        (1_000_000, 1, vec![]),
        (2_000_000, 1, b"\0\xff".to_vec()),
    ];
    assert_eq!(entries(), [("log", log), ("fixed", vec![])]);
    clock.advance(Duration::from_secs(57));
    assert_eq!(entries(), [("log", vec![]), ("fixed", vec![])]);
}

#[test]
fn metadata_is_bounded_where_it_is_kept() {
    let (limiter, _clock) = limiter([log()]);
    let (bare, _clock) = self::limiter([("fixed", per_minute("9/m").into())]);
    let bytes = [7; 257];
    let refused = limiter.request("a").metadata(&bytes).apply_now(Op::Acquire);
    let refused = refused.expect_err("a byte too many");
    assert_eq!(refused.kind(), ErrorKind::Invalid);
    assert_eq!(
        refused.to_string(),
        "limit \"log\": 257 bytes of metadata are more than the 256 that it keeps of a request; \
         shorten them"
    );
    assert!(limiter.store().is_empty());
    assert!(limiter.request("a").metadata(&bytes[1..]).apply_now(Op::Acquire).is_ok());
    assert!(bare.request("a").metadata(&bytes).apply_now(Op::Acquire).is_ok(), "it keeps none");
}

#[test]
fn an_attempt_is_charged_also_when_another_limit_denies() {
    let tries = FirstRequestWindow::new("2/m".parse().expect("a rate")).expect("a limit");
    let (limiter, clock) =
        limiter([("tries", Attempts::new(tries).into()), ("fixed", per_minute("1/m").into())]);
    assert!(limiter.check_now("a").expect("decides").allowed());
    let denied = limiter.check_now("a").expect("decides");
    assert_eq!(denied.denied_by().collect::<Vec<_>>(), [1]);
    let both = limiter.check_now("a").expect("decides");
    assert_eq!(both.denied_by().collect::<Vec<_>>(), [0, 1]);
    assert_eq!(both.decisions().iter().map(|d| d.remaining).collect::<Vec<_>>(), [0, 0]);
    clock.advance(Duration::from_secs(60));
    assert!(limiter.check_now("a").expect("decides").allowed());
}

#[test]
fn a_stack_decides_as_its_limits_side_by_side_and_is_one_key() {
    let rate = |text: &str| text.parse().expect("a rate");
    let limits: [Policy; 3] = [
        Gcra::new(rate("2/s"), 4).expect("a limit").into(),
        per_minute("20/m").into(),
        SlidingLog::new(rate("9/10s")).expect("a limit").into(),
    ];
    let (side_by_side, clock) =
        limiter([("gcra", limits[0]), ("fixed", limits[1]), ("log", limits[2])]);
    let stack = Limit::new("stack", Stack::new(limits).expect("a stack")).expect("a name");
    let store: MemoryStore<Stack<Policy>, _> = MemoryStore::builder().clock(clock.clone()).build();
    let stacked = RateLimiter::new(Limits::new([stack]).expect("one"), store);

    // A linear congruential generator: pseudo-random, the same in every run.
    let mut chance: u64 = 7;
    let mut next = |below: u64| {
        chance = chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (chance >> 33) % below
    };
    let mut denied = 0;
    for _ in 0..2_000 {
        clock.advance(Duration::from_millis(next(900)));
        let (op, cost) = match next(12) {
            0 => (Op::Refund, next(3)),
            1 => (Op::Force, next(6)),
            2 => (Op::Peek, next(6)),
            _ => (Op::Acquire, next(4)),
        };
        let due = side_by_side.request("a").cost(cost).apply_now(op).expect("decides");
        let got = stacked.request("a").cost(cost).apply_now(op).expect("decides");
        assert_eq!(got.summary(), due.summary(), "{op} {cost}");
        denied += usize::from(!got.allowed());
        assert!(stacked.store().len() <= 1);
    }
    assert!(denied > 100, "{denied}");
    let _ = stacked.check_now("a").expect("decides");
    assert_eq!((stacked.store().len(), side_by_side.store().len()), (1, 3));
}

/// A store, and two limits of one name: the states of one lie in buckets, those of the other in shards.
fn two_kinds() -> (MemoryStore<Policy, ManualClock>, [Limit<Policy>; 2]) {
    let store = MemoryStore::builder().clock(ManualClock::new(Timestamp::ZERO)).build();
    let rate = "3/m".parse().expect("a rate");
    let identifier_names: [Policy; 2] = [
        Gcra::new(rate, 3).expect("a limit").into(),
        TokenBucket::new(rate, 3).expect("a limit").into(),
    ];
    (store, identifier_names.map(|policy| Limit::new("l", policy).expect("a name")))
}

/// The limit's algorithm is changed and changed back: a reservation charges the key's one state.
#[test]
fn a_reservation_under_a_changed_limit_leaves_one_state() {
    for key in (0..100).map(|n| n.to_string()) {
        let (store, [in_table, in_shard]) = two_kinds();
        let reserve = |limit, id| {
            let check = Check { limit, key: &key, cost: 1 };
            let verdict =
                store.apply_now(&Batch::one(&check).id(ReservationId::new(id))).expect("a place");
            assert!(verdict.allowed());
        };
        // A state of the other algorithm is ignored.
        assert_eq!(store.acquire_now(&in_table, &key, 1).expect("decides").remaining(), 2);
        reserve(&in_shard, 1);
        assert_eq!((store.len(), store.reservations()), (1, 1));
        assert_eq!(store.acquire_now(&in_table, &key, 1).expect("decides").remaining(), 2);
        assert_eq!(store.len(), 1);
        assert_eq!(store.acquire_now(&in_table, &key, 1).expect("decides").remaining(), 1);
        reserve(&in_shard, 2);
        assert_eq!((store.len(), store.reservations()), (1, 2));
    }
}

/// A key whose first state a reservation wrote is found where that state lies.
#[test]
fn a_key_that_was_reserved_first_has_one_state() {
    for key in (0..100).map(|n| n.to_string()) {
        let (store, [in_table, in_shard]) = two_kinds();
        let check = Check { limit: &in_shard, key: &key, cost: 1 };
        let batch = Batch::one(&check).id(ReservationId::new(1));
        assert_eq!(store.apply_now(&batch).expect("a place").remaining(), 2);
        assert_eq!(store.acquire_now(&in_table, &key, 1).expect("decides").remaining(), 2);
        assert_eq!((store.len(), store.reservations()), (1, 1));
    }
}

#[test]
fn a_part_of_a_batch_that_is_denied_elsewhere_charges_attempts_only() {
    /// The remaining capacity afterwards, and the wait that the part reports.
    fn part<A: InMemory>(algorithm: A) -> (u64, Option<u64>) {
        let clock = ManualClock::new(Timestamp::ZERO);
        let store: MemoryStore<A, _> = MemoryStore::builder().clock(clock).build();
        let limit = Limit::new("l", algorithm).expect("a name");
        let check = Check { limit: &limit, key: "k", cost: 1 };
        let verdict = store.apply_now(&Batch::one(&check).denied_elsewhere()).expect("decides");
        let peek = Check { cost: 0, ..check };
        let left = store.apply_now(&Batch::one(&peek).op(Op::Peek)).expect("decides").remaining();
        (left, verdict.summary().retry_after_us)
    }
    let window = FixedWindow::new("1/m".parse().expect("a rate")).expect("a limit");
    assert_eq!(part(window), (1, Some(0)));
    let log = SlidingLog::new("5/h".parse().expect("a rate")).expect("a limit");
    assert_eq!(part(log).0, 5);
    assert_eq!(part(Attempts::new(window)), (0, Some(60_000_000)));
}

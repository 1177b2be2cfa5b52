//! Limits that count attempts as published patterns do, in tables of requests and decisions.

#![allow(clippy::expect_used, clippy::panic, reason = "tests")]

use ratelimit_core::{
    Algorithm, Attempts, Batch, BucketedWindow, Check, Decision, FirstRequestWindow, FixedWindow,
    Gcra, KeepsEntries, Limit, Op, Policy, PolicyState, Rate, Reservation, SlidingCounter,
    SlidingCounterState, SlidingLog, States, Timestamp, TokenBucket, WindowLog, Write, decide,
};

const SECOND_US: u64 = 1_000_000;

fn rate(text: &str) -> Rate {
    text.parse().expect("a rate")
}

fn at(us: u64) -> Timestamp {
    Timestamp::from_us(us).expect("a test's time")
}

/// One key of one limit.
struct Key<A: Algorithm> {
    algorithm: A,
    state: Option<A::State>,
}

impl<A: Algorithm> Key<A> {
    fn new(algorithm: A) -> Self {
        Self { algorithm, state: None }
    }

    fn acquire(&mut self, us: u64, cost: u64) -> Decision {
        let step = self.algorithm.step(self.state.as_ref(), at(us), cost);
        self.state = step.write.after(self.state.as_ref()).cloned();
        step.decision
    }

    /// Replays a table of requests: the time in milliseconds, the cost, whether it is admitted, and what remains.
    fn replays(&mut self, table: &[(u64, u64, bool, u64)]) {
        for (row, &(ms, cost, allowed, remaining)) in table.iter().enumerate() {
            let got = self.acquire(ms * 1_000, cost);
            assert_eq!((got.allowed, got.remaining), (allowed, remaining), "row {row}: {got:?}");
        }
    }
}

/// INCR, then EXPIRE if the result is 1; more than 3 are denied. The counter stops at the limit, its time to live does not.
#[test]
fn a_fixed_window_of_attempts_is_incr_and_expire() {
    let mut key = Key::new(Attempts::new(FirstRequestWindow::new(rate("3/10s")).expect("limit")));
    key.replays(&[
        (2_000, 1, true, 2),
        (3_000, 1, true, 1),
        (9_000, 1, true, 0),
        (11_000, 1, false, 0),
        (11_999, 1, false, 0),
        // The key has expired, ten seconds after the first request.
        (12_000, 1, true, 2),
    ]);
    let counted = key.state.as_ref().map(|state| (state.start, state.count));
    assert_eq!(counted, Some((at(12 * SECOND_US), 1)));
    key.replays(&[(12_500, 3, false, 0), (13_000, 1, false, 0)]);
    assert_eq!(key.state.map(|state| state.count), Some(3));
}

/// LLEN, then RPUSH if there is room; or RPUSH, then LLEN.
#[test]
fn a_full_window_log_records_no_more_attempts() {
    let log = WindowLog::new(rate("2/10s")).expect("a limit");
    let table = [(0, 1, true, 1), (1_000, 1, true, 0), (2_000, 1, false, 0), (9_999, 1, false, 0)];
    let (mut admitted, mut tried) = (Key::new(log), Key::new(Attempts::new(log)));
    admitted.replays(&table);
    tried.replays(&table);
    let times = |state: &Option<_>| {
        let state = state.as_ref().expect("in its window");
        log.entries_of(state, at(9_999_000)).iter().map(|e| e.timestamp.as_us()).collect::<Vec<_>>()
    };
    assert_eq!(times(&admitted.state), [0, SECOND_US]);
    // A full list records no more.
    assert_eq!(times(&tried.state), [0, SECOND_US]);
    for key in [&mut admitted.state, &mut tried.state] {
        assert_eq!(log.step(key.as_ref(), at(10 * SECOND_US), 1).decision.remaining, 1);
    }
}

/// ZREMRANGEBYSCORE, ZADD, ZCARD in one MULTI: a caller that keeps trying stays out.
#[test]
fn a_sliding_log_of_attempts_denies_a_caller_that_keeps_trying() {
    let log = SlidingLog::new(rate("2/10s")).expect("a limit");
    let (mut patient, mut eager) = (Key::new(Attempts::new(log)), Key::new(Attempts::new(log)));
    let table = [(0, 1, true, 1), (1_000, 1, true, 0), (2_000, 1, false, 0)];
    patient.replays(&table);
    eager.replays(&table);
    for second in 3..60 {
        assert!(!eager.acquire(second * SECOND_US, 1).allowed, "at {second} s");
    }
    // The newest two attempts decide everything, so the log keeps no more.
    assert_eq!(eager.state.as_ref().map(|state| state.entries.len()), Some(2));
    assert!(eager.acquire(68 * SECOND_US, 1).allowed);
    // A caller that waits for `retry_after` is admitted, and no sooner.
    assert_eq!(patient.acquire(3 * SECOND_US, 1).retry_after_us, Some(9 * SECOND_US));
    assert!(patient.acquire(12 * SECOND_US, 1).allowed);
    // A log that counts admissions forgets the denied attempts.
    let mut admitted = Key::new(log);
    admitted.replays(&table);
    admitted.replays(&[(9_999, 1, false, 0), (10_000, 1, true, 0), (11_000, 1, true, 0)]);
}

/// Cloudflare's example of 2017: 50 per minute, 42 in the last minute and 18 in this one, of which 15 seconds have
/// passed: 42 · 0.75 + 18 = 49.5.
#[test]
fn a_sliding_counter_weights_the_previous_window_as_cloudflare_does() {
    let counter = SlidingCounter::new(rate("50/m")).expect("a limit");
    let start = at(60 * SECOND_US);
    let state = SlidingCounterState { start, previous: 42, current: 18, window_us: 60 * SECOND_US };
    let mut key = Key { algorithm: counter, state: Some(state) };
    key.replays(&[(75_000, 0, true, 1), (75_000, 2, false, 1), (75_000, 1, true, 0)]);
    assert!(!key.acquire(75 * SECOND_US, 1).allowed);
    // A counter of attempts fills its window with them, and counts no further.
    let mut key = Key { algorithm: Attempts::new(counter), state: Some(state) };
    key.replays(&[(75_000, 2, false, 0), (75_000, 40, false, 0), (119_999, 1, false, 0)]);
    assert_eq!(
        key.state,
        Some(SlidingCounterState { start, previous: 42, current: 50, window_us: 60 * SECOND_US })
    );
    // In the next window 50 fade, and the attempt itself counts 1: 50 · 58.8/60 is 49, and 48 must be left.
    assert_eq!(key.acquire(120 * SECOND_US, 1).retry_after_us, Some(1_200_001));
}

/// A bucket of 4 that refills one per second, by either algorithm.
#[test]
fn gcra_and_token_bucket_charge_attempts_alike() {
    let table = [
        (0, 3, true, 1),
        (0, 2, false, 1),
        (1_000, 2, true, 0),
        (1_500, 1, false, 0),
        (3_000, 1, true, 1),
        (9_000, 4, true, 0),
    ];
    Key::new(TokenBucket::new(rate("1/s"), 4).expect("a limit")).replays(&table);
    Key::new(Gcra::new(rate("1/s"), 4).expect("a limit")).replays(&table);
    // Every attempt that does not fit drains it, so it fills only while no request comes.
    let tried = [(0, 3, true, 1), (0, 2, false, 0), (1_999, 2, false, 0), (3_999, 2, true, 0)];
    Key::new(Attempts::new(TokenBucket::new(rate("1/s"), 4).expect("a limit"))).replays(&tried);
    Key::new(Attempts::new(Gcra::new(rate("1/s"), 4).expect("a limit"))).replays(&tried);
}

#[test]
fn an_attempt_that_never_fits_leaves_a_full_limit() {
    let mut fixed = Key::new(Attempts::new(FixedWindow::new(rate("3/s")).expect("a limit")));
    let never = fixed.acquire(0, u64::MAX);
    assert_eq!((never.allowed, never.remaining, never.retry_after_us), (false, 0, None));
    assert_eq!(fixed.state.map(|state| state.count), Some(3));
}

#[test]
fn an_attempt_shortens_the_oldest_entries_until_the_log_is_exactly_full() {
    let log = Attempts::new(SlidingLog::new(rate("5/10s")).expect("a limit"));
    let mut key = Key::new(log);
    let entries = |key: &Key<Attempts<SlidingLog>>| {
        let state = key.state.as_ref().expect("charged");
        state.entries.iter().map(|e| (e.timestamp.as_us() / SECOND_US, e.cost)).collect::<Vec<_>>()
    };
    key.replays(&[(0, 3, true, 2), (1_000, 2, true, 0), (2_000, 2, false, 0)]);
    assert_eq!(entries(&key), [(0, 1), (1, 2), (2, 2)]);
    key.replays(&[(2_000, 1, false, 0)]);
    assert_eq!(entries(&key), [(1, 2), (2, 3)]);
    key.replays(&[(3_000, 9, false, 0)]);
    assert_eq!(entries(&key), [(3, 5)]);
    key.replays(&[(3_000, 1, false, 0)]);
    assert_eq!(entries(&key), [(3, 5)]);
}

#[test]
fn an_attempt_cuts_older_buckets_to_the_room_of_every_window_that_contains_them() {
    let windows = [rate("3/s"), rate("5/2s")];
    let buckets = BucketedWindow::new(500_000, &windows).expect("a limit");
    let mut key = Key::new(Attempts::new(buckets));
    let counts = |key: &Key<Attempts<BucketedWindow>>| {
        let state = key.state.as_ref().expect("charged");
        let counts = state.buckets.iter().map(|b| (b.start.as_us() / 1_000, b.count));
        counts.collect::<Vec<_>>()
    };
    // A cost above the capacity fills the shorter window, and leaves two in the longer one.
    key.replays(&[(0, 9, false, 0)]);
    assert_eq!(counts(&key), [(0, 3)]);
    key.replays(&[(1_000, 2, true, 0), (1_500, 2, false, 0)]);
    // The shorter window has room for one of the second bucket, the longer one for two of the first.
    assert_eq!(counts(&key), [(0, 2), (1_000, 1), (1_500, 2)]);
}

#[test]
fn a_peek_and_a_cost_of_zero_charge_no_attempt() {
    let mut key = Key::new(Attempts::new(SlidingLog::new(rate("2/s")).expect("a limit")));
    key.replays(&[(0, 2, true, 0), (0, 0, true, 0)]);
    let before = key.state.clone();
    let due = key.algorithm.step(before.as_ref(), at(1), 1).decision;
    assert_eq!(key.state, before, "a step writes nothing of itself");
    assert_eq!(key.acquire(1, 1), due);
    assert!(key.algorithm.charges_denials());
    // A full limit owes no more than its capacity: a refund makes room.
    let back = key.algorithm.refund(key.state.as_ref(), at(1), 1).expect("has refunds");
    assert_eq!(back.decision.remaining, 1);
}

/// The states of a batch in the order of its checks.
struct Kept(Vec<Option<PolicyState>>);

impl States<PolicyState> for Kept {
    fn get(&self, position: usize) -> Option<&PolicyState> {
        self.0[position].as_ref()
    }

    fn put(&mut self, position: usize, write: Write<PolicyState>) {
        match write {
            Write::Keep => {}
            Write::Put { state, .. } => self.0[position] = Some(state),
            Write::Remove => self.0[position] = None,
        }
    }

    fn reservation(&self, _: usize) -> Option<Reservation> {
        None
    }

    fn fingerprint(&self) -> u64 {
        0
    }

    fn put_reservation(&mut self, _: usize, _: Reservation, _: Timestamp) {}
}

#[test]
fn the_wait_of_a_denied_batch_counts_what_its_own_attempt_charged() {
    let limit = |name, policy: Policy| Limit::new(name, policy).expect("a name");
    let gcra = |burst| Gcra::new(rate("1/s"), burst).expect("a limit");
    let a = limit("a", gcra(1).into());
    let decide_twice = |b: Policy, cost: u64| {
        let b = limit("b", b);
        let checks = [(&a, 1), (&b, cost)].map(|(limit, cost)| Check { limit, key: "k", cost });
        let batch = Batch::new(&checks).expect("two limits");
        let mut kept = Kept(vec![None, None]);
        assert!(decide(&batch, Timestamp::ZERO, &mut kept).expect("decides").allowed());
        let peeked = decide(&batch.op(Op::Peek), Timestamp::ZERO, &mut kept).expect("decides");
        let denied = decide(&batch, Timestamp::ZERO, &mut kept).expect("decides");
        assert!(!denied.allowed() && denied.decisions()[1].allowed);
        assert_eq!(peeked, denied);
        (denied.decisions()[1].retry_after_us, denied.summary().retry_after_us)
    };
    let two_per_minute = FixedWindow::new(rate("2/m")).expect("a limit");
    let waits = decide_twice(Attempts::new(two_per_minute).into(), 1);
    assert_eq!(waits, (Some(60 * SECOND_US), Some(60 * SECOND_US)));
    // The attempt left one of seven: three fit again after two seconds.
    let waits = decide_twice(Attempts::new(gcra(7)).into(), 3);
    assert_eq!(waits, (Some(2 * SECOND_US), Some(2 * SECOND_US)));
    // Where the same request fits again, the other limit alone makes it wait.
    let waits = decide_twice(Attempts::new(gcra(9)).into(), 3);
    assert_eq!(waits, (Some(0), Some(SECOND_US)));
}

#[test]
fn an_attempt_before_the_time_of_the_state_counts_from_that_time() {
    let gcra = Gcra::new(rate("3/s"), 4).expect("a limit");
    let mut key = Key::new(gcra);
    key.acquire(5, 1);
    let state = key.state.as_ref();
    for now in [3, 5, 9] {
        assert_eq!(gcra.charged_at(state, at(now)), at(now.max(5)));
        assert_eq!(Attempts::new(gcra).charged_at(state, at(now)), at(now.max(5)));
    }
}

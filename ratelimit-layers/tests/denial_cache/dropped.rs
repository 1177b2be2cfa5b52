//! What the cache does not answer, and what it drops.

use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use ratelimit_core::{
    Batch, Check, Limit, Limits, ManualClock, Now, Op, Policy, RateLimiter, ReservationId, Source,
    Store, Verdict,
};
use ratelimit_layers::DenialCache;
use ratelimit_testkit::block_on;

use crate::noted::{BEGIN, Noted};
use crate::{Cached, lasting, limit};

fn cached() -> (Cached, ManualClock) {
    let clock = ManualClock::new(BEGIN);
    (lasting(&clock).build(Noted::new(&clock)), clock)
}

fn apply(store: &Cached, batch: &Batch<'_, Policy>) -> Verdict {
    block_on(store.apply(batch)).expect("decides")
}

fn check(store: &Cached, limit: &Limit<Policy>, cost: u64) -> Verdict {
    apply(store, &Batch::one(&Check { limit, key: "alice", cost }))
}

/// Lets a limit of three admit all, and deny once.
fn exhaust(store: &Cached, limit: &Limit<Policy>) {
    assert!(check(store, limit, 3).allowed());
    assert!(!check(store, limit, 1).allowed());
    store.store().calls();
}

#[test]
fn under_an_attack_the_store_is_asked_for_what_it_admits_and_one_denial() {
    let (store, clock) = cached();
    let limit = limit("l", "fixed-window 3/m");
    clock.set(ratelimit_core::Timestamp::saturating_from_us(
        BEGIN.as_us() / 60_000_000 * 60_000_000,
    ));
    for minute in 0..5 {
        for second in 0..60_000 {
            let verdict = check(&store, &limit, 1);
            assert_eq!(verdict.allowed(), second < 3);
            // In later windows the state is known from the admitted requests.
            let is_known = second > 3 || (second == 3 && minute > 0);
            assert_eq!(verdict.source() == Source::Cache, is_known, "{minute} {second}");
            clock.advance(Duration::from_millis(1));
        }
        assert_eq!(store.store().calls(), if minute == 0 { 4 } else { 3 });
    }
    let counts = store.counts();
    assert_eq!((counts.asked, counts.answered, counts.keys), (16, 299_984, 1));
}

#[test]
fn what_is_reset_refunded_settled_or_forced_here_is_asked_of_the_store() {
    let limit = limit("l", "gcra 3/h burst 3");
    for op in [Op::Reset, Op::Refund, Op::Force, Op::Settle, Op::Renew] {
        let (store, _) = cached();
        let (reserved, id) =
            (Check { limit: &limit, key: "alice", cost: 2 }, ReservationId::new(7));
        assert!(apply(&store, &Batch::one(&reserved).id(id)).allowed());
        assert!(check(&store, &limit, 1).allowed());
        for is_cached in [false, true] {
            let verdict = check(&store, &limit, 1);
            assert!(!verdict.allowed() && (verdict.source() == Source::Cache) == is_cached);
        }
        let other = Check { cost: 1, ..reserved };
        let batch = Batch::one(&other).op(op);
        let batch = if matches!(op, Op::Settle | Op::Renew) { batch.id(id) } else { batch };
        assert!(apply(&store, &batch).allowed());
        let verdict = check(&store, &limit, 1);
        assert_eq!(verdict.source(), Source::Store, "{op}");
        assert_eq!(verdict.allowed(), !matches!(op, Op::Force | Op::Renew), "{op}");
    }
}

#[test]
fn a_denial_from_before_a_reset_is_not_kept_after_it() {
    let (store, _) = cached();
    let limit = limit("l", "gcra 3/h burst 3");
    assert!(check(&store, &limit, 3).allowed());
    let one = Check { limit: &limit, key: "alice", cost: 1 };
    let batch = Batch::one(&one);
    store.store().is_slow(true);
    let mut denied = pin!(store.apply(&batch));
    assert!(poll(denied.as_mut()).is_pending());
    store.store().is_slow(false);
    // The reset is sent and answered while the denial is on its way back.
    assert!(apply(&store, &batch.op(Op::Reset)).allowed());
    let Poll::Ready(Ok(verdict)) = poll(denied) else { panic!("it has its answer") };
    assert!(!verdict.allowed());
    assert!(check(&store, &limit, 1).allowed());
}

#[test]
fn a_reset_whose_caller_goes_away_drops_the_key() {
    let (store, _) = cached();
    let limit = limit("l", "gcra 3/h burst 3");
    exhaust(&store, &limit);
    let one = Check { limit: &limit, key: "alice", cost: 1 };
    let reset = Batch::one(&one).op(Op::Reset);
    store.store().is_slow(true);
    {
        let mut reset = pin!(store.apply(&reset));
        assert!(poll(reset.as_mut()).is_pending());
    }
    store.store().is_slow(false);
    assert!(check(&store, &limit, 1).allowed());
}

pub(crate) fn poll<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

#[test]
fn a_limit_that_has_changed_is_asked_of_the_store() {
    let (store, _) = cached();
    exhaust(&store, &limit("l", "gcra 3/h burst 3"));
    let larger = limit("l", "gcra 3/h burst 4");
    assert!(check(&store, &larger, 1).source() == Source::Store);
    assert_eq!(store.store().calls(), 1);
    // Another limit of the same parameters is another key.
    assert!(check(&store, &limit("m", "gcra 3/h burst 3"), 1).allowed());
}

#[test]
fn attempts_and_leases_are_always_asked_of_the_store() {
    for words in ["gcra 3/h burst 3 count attempts", "concurrency 3/h"] {
        let (store, _) = cached();
        let limit = limit("l", words);
        exhaust(&store, &limit);
        for _ in 0..5 {
            assert_eq!(check(&store, &limit, 1).source(), Source::Store, "{words}");
        }
        assert_eq!((store.store().calls(), store.counts().keys), (5, 0));
        // Nor does a batch with such a limit use what is kept of others.
        let other = limit_of_three();
        exhaust(&store, &other);
        let checks = [&limit, &other].map(|limit| Check { limit, key: "alice", cost: 1 });
        let verdict = apply(&store, &Batch::new(&checks).expect("distinct"));
        assert_eq!((verdict.source(), verdict.denied_by().count()), (Source::Store, 2));
    }
}

fn limit_of_three() -> Limit<Policy> {
    limit("three", "sliding-counter 3/h")
}

#[test]
fn peeks_ids_metadata_and_given_times_are_always_asked_of_the_store() {
    let (store, _) = cached();
    let limit = limit("l", "window-log 3/h");
    exhaust(&store, &limit);
    let one = Check { limit: &limit, key: "alice", cost: 1 };
    let batch = Batch::one(&one);
    let asked = [
        batch.op(Op::Peek),
        batch.id(ReservationId::new(1)),
        batch.metadata(b"why"),
        batch.now(Now::At(BEGIN)),
    ];
    for batch in asked {
        assert!(check(&store, &limit, 1).source() == Source::Store || store.counts().keys == 1);
        store.store().calls();
        let _ = block_on(store.apply(&batch));
        assert_eq!(store.store().calls(), 1, "{batch:?}");
    }
}

#[test]
fn a_batch_is_answered_if_all_its_states_are_known_and_one_denies() {
    let (store, _) = cached();
    let (few, many) = (limit("few", "gcra 3/h burst 3"), limit("many", "gcra 90/h burst 90"));
    exhaust(&store, &few);
    let checks = [&few, &many].map(|limit| Check { limit, key: "alice", cost: 1 });
    let batch = Batch::new(&checks).expect("distinct");
    // The state of the second is unknown.
    assert_eq!(apply(&store, &batch).source(), Source::Store);
    let cached = apply(&store, &batch);
    assert_eq!(cached.source(), Source::Cache);
    assert_eq!(cached.decisions()[1].remaining, 90);
    // What passes the second alone counts at once in the next answer.
    assert!(check(&store, &many, 7).allowed());
    let cached = apply(&store, &batch);
    assert_eq!((cached.source(), cached.decisions()[1].remaining), (Source::Cache, 83));
    assert_eq!(cached.denied_by().collect::<Vec<_>>(), [0]);
}

#[test]
fn an_answer_counts_no_longer_than_the_maximum_age() {
    let clock = ManualClock::new(BEGIN);
    let settings = DenialCache::builder().clock(clock.clone()).max_age(Duration::from_millis(500));
    let store: Cached = settings.build(Noted::new(&clock));
    let limit = limit("l", "gcra 3/h burst 3");
    exhaust(&store, &limit);
    // Another process resets the key.
    let one = Check { limit: &limit, key: "alice", cost: 1 };
    let reset = Batch::one(&one).op(Op::Reset);
    let _ = block_on(store.store().apply(&reset)).expect("resets");
    clock.advance(Duration::from_millis(500));
    assert_eq!(check(&store, &limit, 1).source(), Source::Cache);
    clock.advance(Duration::from_micros(1));
    assert!(check(&store, &limit, 1).allowed());
}

#[test]
fn of_two_states_of_one_time_that_with_less_left_counts() {
    let (store, _) = cached();
    let limit = limit("l", "gcra 3/h burst 3");
    assert!(!check(&store, &limit, 4).allowed());
    let one = Check { limit: &limit, key: "alice", cost: 1 };
    let batch = Batch::one(&one);
    store.store().is_slow(true);
    let [mut first, mut second] = [(); 2].map(|()| Box::pin(store.apply(&batch)));
    assert!(poll(first.as_mut()).is_pending() && poll(second.as_mut()).is_pending());
    store.store().is_slow(false);
    assert!(poll(second.as_mut()).is_ready() && poll(first.as_mut()).is_ready());
    let verdict = check(&store, &limit, 2);
    assert_eq!((verdict.source(), verdict.remaining()), (Source::Cache, 1));
}

#[test]
fn a_clock_that_has_gone_back_tells_nothing() {
    let (store, clock) = cached();
    let limit = limit("l", "gcra 3/h burst 3");
    exhaust(&store, &limit);
    clock.set(ratelimit_core::Timestamp::saturating_from_us(BEGIN.as_us() - 1));
    assert_eq!(check(&store, &limit, 1).source(), Source::Store);
}

#[test]
fn after_a_clock_has_gone_back_what_it_timed_before_counts_no_more() {
    let (store, clock) = cached();
    let limit = limit("l", "gcra 3/h burst 3");
    exhaust(&store, &limit);
    let late = Check { limit: &limit, key: "late", cost: 4 };
    let batch = Batch::one(&late);
    store.store().is_slow(true);
    let mut late = pin!(store.apply(&batch));
    assert!(poll(late.as_mut()).is_pending());
    store.store().is_slow(false);
    clock.set(ratelimit_core::Timestamp::saturating_from_us(BEGIN.as_us() - 5_000_000));
    assert!(poll(late.as_mut()).is_ready());
    // It passes the time at which both were sent.
    clock.advance(Duration::from_millis(5_500));
    assert_eq!(apply(&store, &batch).source(), Source::Store);
    assert_eq!(check(&store, &limit, 1).source(), Source::Store);
}

#[test]
fn keys_that_are_dropped_and_come_again_take_no_room() {
    let clock = ManualClock::new(BEGIN);
    let store: Cached = lasting(&clock).capacity(100).build(Noted::new(&clock));
    let limit = limit("l", "gcra 1/h burst 1");
    let keys: Vec<_> = (0..50).map(|n| n.to_string()).collect();
    for _ in 0..10 {
        for key in &keys {
            let one = Check { limit: &limit, key, cost: 1 };
            let batch = Batch::one(&one);
            let _ = apply(&store, &batch.op(Op::Reset));
            assert!(apply(&store, &batch).allowed());
            assert_eq!(apply(&store, &batch).source(), Source::Store);
        }
        assert_eq!(store.counts().keys, 50);
    }
}

#[test]
fn it_keeps_no_more_keys_than_it_may_and_forgets_those_that_are_too_old() {
    let clock = ManualClock::new(BEGIN);
    let settings = DenialCache::builder().clock(clock.clone()).capacity(10);
    let store: Cached = settings.build(Noted::new(&clock));
    let limit = limit("l", "gcra 1/h burst 1");
    let ask = |key: &str| apply(&store, &Batch::one(&Check { limit: &limit, key, cost: 1 }));
    let deny = |key: &str| {
        assert!(ask(key).allowed());
        assert!(!ask(key).allowed());
    };
    for n in 0..1_000 {
        deny(&n.to_string());
        assert_eq!(store.counts().keys, 10.min(n + 1));
    }
    assert_eq!(ask("999").source(), Source::Cache);
    assert_eq!((ask("0").allowed(), ask("0").source()), (false, Source::Cache));
    // Each key that comes drops two that are too old.
    clock.advance(Duration::from_secs(2));
    for n in 1_000..1_010 {
        deny(&n.to_string());
    }
    assert_eq!(store.counts().keys, 10);
    clock.advance(Duration::from_secs(2));
    for n in 1_010..1_015 {
        deny(&n.to_string());
    }
    assert_eq!(store.counts().keys, 5);
    store.forget();
    assert_eq!((store.counts().keys, ask("1014").source()), (0, Source::Store));
}

#[test]
fn a_store_that_says_nothing_of_what_it_saw_is_always_asked() {
    let (store, _) = cached();
    store.store().is_silent(true);
    let limit = limit("l", "gcra 3/h burst 3");
    exhaust(&store, &limit);
    assert_eq!(check(&store, &limit, 1).source(), Source::Store);
    assert_eq!(store.counts().keys, 0);
}

#[test]
fn a_limiter_over_a_cache_decides_shadow_limits_as_over_the_store() {
    let (store, _) = cached();
    let limits = [limit("l", "gcra 3/h burst 3"), limit("s", "gcra 1/h burst 1").shadow()];
    let limiter = RateLimiter::new(Limits::new(limits).expect("limits"), store);
    for n in 0..3 {
        let verdict = block_on(limiter.check("alice")).expect("decides");
        assert!(verdict.allowed() && verdict.source() == Source::Store);
        let shadow: Vec<_> = verdict.shadow_decisions().map(|shadow| shadow.allowed).collect();
        assert_eq!(shadow, [n == 0]);
    }
    // The third decision of the shadow limit came from the cache.
    assert_eq!(limiter.store().counts().answered, 1);
}

/// Their replies are read in another order than the store decided them, as by tasks of several threads.
#[test]
fn a_denial_from_before_an_admitted_request_is_not_kept_after_it() {
    let (store, clock) = cached();
    let limit = limit("l", "gcra 3/d burst 3");
    let mut context = Context::from_waker(Waker::noop());
    for is_known in [false, true] {
        assert!(check(&store, &limit, 1).allowed());
        store.store().is_slow(true);
        let one = Check { limit: &limit, key: "alice", cost: 3 };
        let batch = Batch::one(&one);
        let mut late = pin!(store.apply(&batch));
        assert!(late.as_mut().poll(&mut context).is_pending(), "decided, and not yet answered");
        store.store().is_slow(false);
        clock.advance(Duration::from_millis(1));
        // Whether a state is kept that the admitted request replaces.
        if is_known {
            assert!(!check(&store, &limit, 4).allowed());
        }
        assert!(check(&store, &limit, 1).allowed());
        let Poll::Ready(denied) = late.as_mut().poll(&mut context) else {
            panic!("it was decided")
        };
        assert_eq!(denied.expect("decides").remaining(), 2);
        let verdict = check(&store, &limit, 3);
        assert_eq!((verdict.allowed(), verdict.remaining()), (false, 1), "{is_known}");
        let _ = apply(&store, &Batch::one(&one).op(Op::Reset));
    }
}

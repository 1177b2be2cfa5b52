//! A denial cache answers what the store would answer, and never answers what the store alone can.

mod pace;
mod rounds;

use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use ratelimit_core::store::{Batch, Check, Now, Op};
use ratelimit_core::{
    Algorithm as _, AnyAlgorithm, Limit, ManualClock, ReservationId, Source, Store, Timestamp,
    Verdict,
};
use ratelimit_layers::{DenialCache, DenialCacheBuilder};
use ratelimit_testkit::block_on;

use crate::common::{BEGIN, Fake, Mode, ask, limit, operate, poll};

/// No trace needs more requests than this for one answer of the cache.
const REQUESTS_PER_DENIAL: u64 = 200;

type Cached = DenialCache<Fake, AnyAlgorithm, ManualClock>;

/// A store that answers at the second poll.
const SLOW: Mode = Mode::Late(Duration::ZERO);

/// The settings of a cache that never finds an answer too old.
fn lasting(clock: &ManualClock) -> DenialCacheBuilder<ManualClock> {
    DenialCache::builder().clock(clock.clone()).max_age(Duration::MAX)
}

fn cached_store() -> (Cached, ManualClock) {
    let clock = ManualClock::new(BEGIN);
    (lasting(&clock).build(Fake::new(&clock)), clock)
}

fn apply(store: &Cached, batch: &Batch<'_, AnyAlgorithm>) -> Verdict {
    block_on(store.apply(batch)).expect("decides")
}

fn check(store: &Cached, limit: &Limit<AnyAlgorithm>, cost: u64) -> Verdict {
    block_on(ask(store, limit, "alice", cost))
}

/// Three an hour.
fn three() -> Limit<AnyAlgorithm> {
    limit("three", "gcra 3/h burst 3")
}

/// Lets a limit of three admit all, and deny once.
fn exhaust(store: &Cached, limit: &Limit<AnyAlgorithm>) {
    assert!(check(store, limit, 3).allowed());
    assert!(!check(store, limit, 1).allowed());
    store.store().calls();
}

#[test]
fn what_changes_a_key_here_is_asked_of_the_store() {
    let (limit, id) = (three(), ReservationId::new(7));
    for op in [Op::Reset, Op::Refund, Op::Force, Op::Settle, Op::Renew] {
        let (store, _) = cached_store();
        let reserved = Check { limit: &limit, key: "alice", cost: 2 };
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
    // Also if the caller goes away.
    let (store, _) = cached_store();
    exhaust(&store, &limit);
    store.store().once(SLOW);
    assert!(poll(pin!(operate(&store, Op::Reset, &limit, "alice", 1))).is_pending());
    assert!(check(&store, &limit, 1).allowed());
}

/// A reply comes after others that the store decided later, as to tasks of several threads.
#[test]
fn a_state_from_before_is_not_kept_after_what_the_store_decided_since() {
    // What is done since, how much later, and whether a state is kept then, which the admitted
    // request replaces.
    for (op, later_ms, is_known, due) in [
        (Op::Reset, 0, false, (Source::Store, true)),
        (Op::Acquire, 1, false, (Source::Store, false)),
        (Op::Acquire, 1, true, (Source::Cache, false)),
        (Op::Acquire, 0, true, (Source::Cache, false)),
    ] {
        let (store, clock) = cached_store();
        let limit = three();
        assert!(check(&store, &limit, 1).allowed());
        store.store().once(SLOW);
        let late = Check { limit: &limit, key: "alice", cost: 3 };
        let (late, one) = (Batch::one(&late), Check { cost: 1, ..late });
        let mut late = pin!(store.apply(&late));
        assert!(poll(late.as_mut()).is_pending(), "decided, and not yet answered");
        clock.advance(Duration::from_millis(later_ms));
        if is_known {
            assert!(!check(&store, &limit, 4).allowed());
        }
        assert!(apply(&store, &Batch::one(&one).op(op)).allowed());
        let Poll::Ready(Ok(denied)) = poll(late) else { panic!("it was decided") };
        assert!(!denied.allowed() && denied.remaining() == 2);
        let verdict = check(&store, &limit, 3);
        assert_eq!((verdict.source(), verdict.allowed()), due, "{op} {later_ms} ms later");
        assert_eq!(verdict.remaining(), u64::from(!verdict.allowed()), "{op}");
    }
}

#[test]
fn what_the_cache_cannot_know_is_always_asked_of_the_store() {
    let three = three();
    for (words, mode) in [
        ("gcra 3/h burst 3 count attempts", Mode::Answers),
        ("concurrency 3/h", Mode::Answers),
        ("gcra 3/h burst 3", Mode::Silent),
    ] {
        let (store, _) = cached_store();
        store.store().set(mode);
        let limit = limit("l", words);
        exhaust(&store, &limit);
        for _ in 0..5 {
            assert_eq!(check(&store, &limit, 1).source(), Source::Store, "{words}");
        }
        assert_eq!((store.store().calls(), store.counts().keys), (5, 0));
        // Nor does a batch with such a limit use what is kept of others.
        store.store().set(Mode::Answers);
        exhaust(&store, &three);
        let checks = [&limit, &three].map(|limit| Check { limit, key: "alice", cost: 1 });
        let verdict = apply(&store, &Batch::new(&checks).expect("distinct"));
        assert_eq!((verdict.source(), verdict.denied_by().count()), (Source::Store, 2));
    }
    let (store, _) = cached_store();
    exhaust(&store, &three);
    let one = Check { limit: &three, key: "alice", cost: 1 };
    let batch = Batch::one(&one);
    for batch in [
        batch.op(Op::Peek),
        batch.id(ReservationId::new(1)),
        batch.metadata(b"why"),
        batch.now(Now::At(BEGIN)),
    ] {
        let _ = check(&store, &three, 1);
        store.store().calls();
        let _ = block_on(store.apply(&batch));
        assert_eq!(store.store().calls(), 1, "{batch:?}");
    }
}

/// Nothing can have been charged under it before. Under an id of the caller's, it may be a
/// repetition of what was admitted.
#[test]
fn the_denial_of_a_reservation_is_answered_if_its_id_was_drawn_for_it() {
    let (store, limit) = (cached_store().0, three());
    let reserve = |id: u128, is_drawn: bool| {
        let check = Check { limit: &limit, key: "alice", cost: 2 };
        let batch = Batch::one(&check).id(ReservationId::new(id));
        apply(&store, &if is_drawn { batch.settled_once() } else { batch })
    };
    assert!(reserve(1, true).allowed());
    for (id, is_drawn, due) in [
        (2, true, (false, Source::Store)),
        (3, true, (false, Source::Cache)),
        (4, false, (false, Source::Store)),
        (5, true, (false, Source::Store)),
        (6, true, (false, Source::Cache)),
        (1, false, (true, Source::Store)),
    ] {
        let verdict = reserve(id, is_drawn);
        assert_eq!((verdict.allowed(), verdict.source()), due, "{id}");
    }
    // A plain request and a reservation learn of each other.
    assert!(!reserve(7, true).allowed());
    assert_eq!(check(&store, &limit, 3).source(), Source::Cache);
    assert!(check(&store, &limit, 1).allowed());
    let verdict = reserve(8, true);
    assert_eq!((verdict.remaining(), verdict.source()), (0, Source::Cache));
    // And none leaves a reservation.
    assert_eq!(store.store().memory.reservations(), 1);
}

#[test]
fn a_batch_is_answered_if_all_its_states_are_known_and_one_denies() {
    let (store, _) = cached_store();
    let (few, many) = (three(), limit("many", "gcra 90/h burst 90"));
    exhaust(&store, &few);
    let checks = [&few, &many].map(|limit| Check { limit, key: "alice", cost: 1 });
    let batch = Batch::new(&checks).expect("distinct");
    // The state of the second is unknown.
    assert_eq!(apply(&store, &batch).source(), Source::Store);
    let cached = apply(&store, &batch);
    assert_eq!((cached.source(), cached.decisions()[1].remaining), (Source::Cache, 90));
    // What passes the second alone counts at once in the next answer.
    assert!(check(&store, &many, 7).allowed());
    let cached = apply(&store, &batch);
    assert_eq!((cached.source(), cached.decisions()[1].remaining), (Source::Cache, 83));
    assert_eq!(cached.denied_by().collect::<Vec<_>>(), [0]);
}

#[test]
fn an_answer_counts_no_longer_than_the_maximum_age_and_not_after_the_clock_has_gone_back() {
    let clock = ManualClock::new(BEGIN);
    let settings = DenialCache::builder().clock(clock.clone()).max_age(Duration::from_millis(500));
    let (store, limit): (Cached, _) = (settings.build(Fake::new(&clock)), three());
    exhaust(&store, &limit);
    // Another process resets the key.
    let _ = block_on(operate(store.store(), Op::Reset, &limit, "alice", 1));
    clock.advance(Duration::from_millis(500));
    assert_eq!(check(&store, &limit, 1).source(), Source::Cache);
    clock.advance(Duration::from_micros(1));
    assert!(check(&store, &limit, 1).allowed());

    // Of several states the oldest counts, wherever its limit stands.
    for order in [[0, 1], [1, 0]] {
        let clock = ManualClock::new(BEGIN);
        let settings = DenialCache::builder().max_age(Duration::from_millis(500));
        let store: Cached = settings.clock(clock.clone()).build(Fake::new(&clock));
        let all = [three(), self::limit("many", "gcra 90/h burst 90")];
        let checks = order.map(|place: usize| Check { limit: &all[place], key: "alice", cost: 1 });
        let batch = Batch::new(&checks).expect("distinct");
        exhaust(&store, &all[0]);
        assert_eq!(apply(&store, &batch).source(), Source::Store);
        clock.advance(Duration::from_millis(400));
        assert!(check(&store, &all[1], 1).allowed());
        assert_eq!(apply(&store, &batch).source(), Source::Cache);
        clock.advance(Duration::from_millis(200));
        assert_eq!(apply(&store, &batch).source(), Source::Store, "{order:?}");
    }

    for back_us in [1, 5_000_000] {
        let (store, clock) = cached_store();
        exhaust(&store, &limit);
        let late = Check { limit: &limit, key: "late", cost: 4 };
        let batch = Batch::one(&late);
        store.store().once(SLOW);
        let mut late = pin!(store.apply(&batch));
        assert!(poll(late.as_mut()).is_pending());
        clock.set(Timestamp::saturating_from_us(BEGIN.as_us() - back_us));
        if back_us == 1 {
            assert_eq!(check(&store, &limit, 1).source(), Source::Store);
            continue;
        }
        assert!(poll(late).is_ready());
        // It passes the time at which both were sent.
        clock.advance(Duration::from_millis(5_500));
        assert_eq!(apply(&store, &batch).source(), Source::Store);
        assert_eq!(check(&store, &limit, 1).source(), Source::Store);
    }
}

#[test]
fn it_keeps_no_more_keys_than_it_may_and_forgets_those_that_are_too_old() {
    let clock = ManualClock::new(BEGIN);
    let settings = DenialCache::builder().clock(clock.clone()).capacity(10);
    let store: Cached = settings.build(Fake::new(&clock));
    let limit = limit("l", "gcra 1/h burst 1");
    let ask = |key: &str| block_on(ask(&store, &limit, key, 1));
    let deny = |key: usize| {
        assert!(ask(&key.to_string()).allowed());
        assert!(!ask(&key.to_string()).allowed());
    };
    for n in 0..1_000 {
        deny(n);
        assert_eq!(store.counts().keys, 10.min(n + 1));
    }
    assert_eq!(ask("999").source(), Source::Cache);
    assert_eq!((ask("0").allowed(), ask("0").source()), (false, Source::Cache));
    // Each key that comes drops two that are too old.
    clock.advance(Duration::from_secs(2));
    (1_000..1_010).for_each(deny);
    assert_eq!(store.counts().keys, 10);
    clock.advance(Duration::from_secs(2));
    (1_010..1_015).for_each(deny);
    assert_eq!(store.counts().keys, 5);
    store.forget();
    assert_eq!((store.counts().keys, ask("1014").source()), (0, Source::Store));
    // Keys that are dropped and come again take no room.
    store.forget();
    for _ in 0..10 {
        for n in 0..5 {
            let _ = block_on(operate(&store, Op::Reset, &limit, &n.to_string(), 1));
            deny(n);
        }
        assert_eq!(store.counts().keys, 5);
    }
}

/// Where the store is a trip away, no answer denies what the store would admit, and none waits
/// longer than the store says, or shorter by more than the way of the request that was denied; even
/// if the parameters of the limit change.
#[test]
fn a_denial_ends_no_later_than_in_the_store() {
    const MOST_TRIP_US: u64 = 20_000;
    for words in [
        ["gcra 10/s burst 4"; 2],
        ["gcra 10/s burst 4", "gcra 7/s burst 6"],
        ["sliding-counter 5/s", "sliding-counter 7/s"],
        ["fixed-window 5/s", "fixed-window 16/4s"],
        ["token-bucket 5/s burst 8", "token-bucket 9/s burst 4"],
        ["sliding-log 5/s"; 2],
        ["sliding-log 5/s", "gcra 10/s burst 4"],
    ] {
        let (store, clock) = cached_store();
        let limits = words.map(|words| limit("first", words));
        let mut random = fastrand::Rng::with_seed(2);
        let mut requests = 0;
        while store.counts().answered < 2_000 {
            requests += 1;
            assert!(requests < 2_000 * REQUESTS_PER_DENIAL, "{words:?}: {:?}", store.counts());
            let limit = &limits[random.usize(..2)];
            clock.advance(Duration::from_micros(random.u64(..30_000)));
            let trip = [(); 2].map(|()| Duration::from_micros(random.u64(..MOST_TRIP_US)));
            store.store().set(Mode::Far(trip));
            let cost = random.u64(1..5);
            let memory = &store.store().memory;
            let due = block_on(operate(memory, Op::Peek, limit, "alice", cost));
            let asked = Check { limit, key: "alice", cost };
            let reserves = random.bool() && limit.algorithm().reservation_us().is_some();
            let verdict = if reserves {
                let id = ReservationId::new(random.u128(..));
                apply(&store, &Batch::one(&asked).id(id).settled_once())
            } else {
                check(&store, limit, cost)
            };
            if verdict.source() == Source::Cache {
                let [got_us, due_us] =
                    [&verdict, &due].map(|verdict| verdict.summary().retry_after_us.unwrap_or(0));
                let is_late = due.allowed() || got_us > due_us || got_us + MOST_TRIP_US < due_us;
                assert!(!is_late, "{words:?}, request {requests}: {verdict:?} for {due:?}");
            }
        }
    }
}

#[test]
fn a_batch_is_not_denied_because_one_server_is_ahead_of_another() {
    for ahead in ["alice", "bob"] {
        let (local, server) = (ManualClock::new(BEGIN), ManualClock::new(BEGIN));
        let later = BEGIN.saturating_add_us(5_000_000);
        let cache: Cached = lasting(&local).build(Fake::new(&server));
        let limit = limit("api", "gcra 1/s burst 10");
        let check = |key, cost| Check { limit: &limit, key, cost };
        let ask = |checks: &[Check<'_, AnyAlgorithm>]| {
            let batch = Batch::new(checks).expect("distinct");
            let verdict = block_on(cache.apply(&batch)).expect("decides");
            (verdict.allowed(), verdict.source())
        };
        // Each is denied, and would have two a second later.
        for key in ["alice", "bob"] {
            server.set(if key == ahead { later } else { BEGIN });
            assert_eq!(ask(&[check(key, 9)]), (true, Source::Store));
            assert_eq!(ask(&[check(key, 3)]), (false, Source::Store));
            assert_eq!(ask(&[check(key, 3)]), (false, Source::Cache));
        }
        // Both are known, and denied for what neither has.
        assert_eq!(ask(&[check("alice", 3), check("bob", 3)]), (false, Source::Cache));
        local.advance(Duration::from_secs(1));
        server.set(later.saturating_add_us(1_000_000));
        let both = ask(&[check("alice", 2), check("bob", 2)]);
        assert_eq!(both, (true, Source::Store), "{ahead} is ahead");
    }
}

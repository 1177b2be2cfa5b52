//! Allotments: one process admits what it would admit without, and how they end.

use std::pin::pin;
use std::thread;
use std::time::Duration;

use proptest::prelude::*;
use ratelimit_core::store::{Batch, Check, Now, Op, Reservation};
use ratelimit_core::{
    AnyAlgorithm, ErrorKind, Limit, ManualClock, ReservationId, Source, Store, SyncStore, Verdict,
};
use ratelimit_layers::{AllotmentCounts, Allotments, AllotmentsBuilder};
use ratelimit_testkit::block_on;
use tokio::time::timeout;

use crate::common::{
    BEGIN, Fake, Mode, UNAVAILABLE, ask, ask_all, limit, memory, operate, poll, remaining,
    run_until_idle,
};

type Scripted = Allotments<Fake, AnyAlgorithm, ManualClock>;

const LIFETIME: Duration = Duration::from_millis(500);
const MILLISECOND: Duration = Duration::from_millis(1);

/// The settings of allotments that take all that is left, of this clock.
fn greedy(clock: &ManualClock) -> AllotmentsBuilder<ManualClock> {
    Allotments::builder().clock(clock.clone()).divisor(1).lifetime(LIFETIME)
}

fn scripted_store() -> (Scripted, Limit<AnyAlgorithm>, ManualClock) {
    let clock = ManualClock::new(BEGIN);
    (greedy(&clock).build(Fake::new(&clock)), daily(), clock)
}

fn daily() -> Limit<AnyAlgorithm> {
    limit("daily", "fixed-window 100/d")
}

/// Asks until 7 were admitted: 1, then a draw of 2, then one of 4. The next request draws eight.
async fn seven(store: &Scripted, limit: &Limit<AnyAlgorithm>) {
    for _ in 0..7 {
        assert!(ask(store, limit, "alice", 1).await.allowed());
    }
    assert_eq!(store.counts().draws, 2);
}

/// Draws eight and uses two of them.
async fn two_of_eight(store: &Scripted, limit: &Limit<AnyAlgorithm>) {
    seven(store, limit).await;
    for _ in 0..2 {
        assert!(ask(store, limit, "alice", 1).await.allowed());
    }
    assert_eq!((store.counts().draws, store.store().remaining(limit, "alice")), (3, 100 - 15));
}

/// What went back, what was forfeited, and what Alice has left in the store.
fn end_and_count(store: &Scripted, limit: &Limit<AnyAlgorithm>) -> [u64; 3] {
    let AllotmentCounts { given_back, forfeited, .. } = store.counts();
    [given_back, forfeited, store.store().remaining(limit, "alice")]
}

#[test]
fn of_many_threads_at_one_moment_none_is_admitted_beyond_the_limits_and_nothing_is_lost() {
    for words in
        ["gcra 37/d", "token-bucket 37/d", "fixed-window 37/d", "fixed-window 37/month debt 7"]
    {
        let clock = ManualClock::new(BEGIN);
        let limits = [limit("a", words), limit("b", words)];
        let store = greedy(&clock).build(memory(&clock));
        let either_way = [limits.clone(), [limits[1].clone(), limits[0].clone()]];
        let asks: [&[Limit<AnyAlgorithm>]; 4] =
            [&limits[..1], &limits[1..], &either_way[0], &either_way[1]];
        let admitted = |thread: usize, rounds: usize| {
            let mut admitted = [0; 2];
            for round in 0..rounds {
                let asked = asks[(thread + round) % 4];
                let allowed = block_on(ask_all(&store, asked, "alice", 1)).allowed();
                for (limit, admitted) in limits.iter().zip(&mut admitted) {
                    let is_asked = asked.iter().any(|asked| asked.name() == limit.name());
                    *admitted += u64::from(allowed && is_asked);
                }
            }
            admitted
        };
        let admitted = thread::scope(|scope| {
            let threads = [0, 1, 2, 3].map(|n| scope.spawn(move || admitted(n, 40)));
            threads.map(|thread| thread.join().expect("no panic"))
        });
        block_on(store.give_back());
        for (n, limit) in limits.iter().enumerate() {
            let admitted: u64 = admitted.iter().map(|each| each[n]).sum();
            assert_eq!(admitted + remaining(store.store(), limit, "alice"), 37, "{words}: {n}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn before_a_process_ends_it_gives_back_all_that_is_left() {
    let (store, limit, clock) = scripted_store();
    two_of_eight(&store, &limit).await;
    let keys: Vec<String> = (0..200).map(|n| n.to_string()).collect();
    for key in keys.iter().flat_map(|key| [key; 2]) {
        assert!(ask(&store, &limit, key, 1).await.allowed());
    }
    let before = store.store().memory.reservations();
    assert_eq!(store.give_back().await, 0);
    assert_eq!(end_and_count(&store, &limit), [206, 0, 91]);
    assert!(keys.iter().all(|key| store.store().remaining(&limit, key) == 98));
    // The reservation of a draw is forgotten soon after it was given back. Those that were spent
    // whole were not settled.
    clock.advance(Duration::from_micros(Reservation::REPEAT_US));
    for n in 0..1_000 {
        let _ = remaining(&store.store().memory, &limit, &n.to_string());
    }
    assert_eq!(before - store.store().memory.reservations(), 201);

    // A store that hangs holds it up for some time only, and it says what did not go back.
    let (store, limit, _) = scripted_store();
    two_of_eight(&store, &limit).await;
    store.store().set(Mode::Hangs);
    assert_eq!(timeout(Duration::from_secs(3_600), store.give_back()).await, Ok(6));
    // Later requests draw again, and what they leave goes back.
    store.store().set(Mode::Answers);
    for _ in 0..2 {
        assert!(ask(&store, &limit, "alice", 1).await.allowed());
    }
    // Those that are still on their way are not back.
    assert_eq!((store.give_back().await, store.counts().given_back), (6, 14));
}

/// What happens to eight units and to their slot if their draw is not answered.
#[tokio::test(start_paused = true)]
async fn a_draw_without_an_answer_is_never_spent_and_leaves_the_slot_free() {
    for (mode, due) in [
        // Its reply is lost, and its units go back.
        (Mode::ChargesAndHangs, [8, 0, 93]),
        // Its future is dropped, and the store does not know of it.
        (Mode::Hangs, [0, 8, 93]),
        // Its outcome is unknown, and the store does not know of it either.
        (Mode::Fails(ErrorKind::Indeterminate), [0, 8, 93]),
        (UNAVAILABLE, [0, 0, 93]),
    ] {
        let (store, limit, _) = scripted_store();
        seven(&store, &limit).await;
        store.store().once(mode);
        let check = Check { limit: &limit, key: "alice", cost: 1 };
        let batch = Batch::one(&check);
        {
            let mut draw = pin!(store.apply(&batch));
            let lost = timeout(MILLISECOND, draw.as_mut()).await;
            assert!(lost.is_err() || lost.is_ok_and(|said| said.is_err()), "{mode:?}");
            if mode == Mode::Hangs {
                // Meanwhile another request goes to the store by itself, and waits for no draw.
                assert!(ask(&store, &limit, "alice", 1).await.allowed());
                assert_eq!(store.counts().draws, 3);
            }
        }
        run_until_idle().await;
        let [given_back, forfeited, remaining] = end_and_count(&store, &limit);
        let more = u64::from(mode == Mode::Hangs);
        assert_eq!([given_back, forfeited, remaining + more], due, "{mode:?}");
        let source = ask(&store, &limit, "alice", 1).await.source();
        assert_eq!((source, store.counts().draws), (Source::Store, 4));
    }
}

#[tokio::test(start_paused = true)]
async fn a_draw_that_is_kept_and_not_polled_ends_no_serving() {
    let (store, limit, clock) = scripted_store();
    seven(&store, &limit).await;
    store.store().once(Mode::Hangs);
    let mut kept = Box::pin(ask(&store, &limit, "alice", 1));
    assert!(poll(kept.as_mut()).is_pending());
    clock.advance(LIFETIME);
    for _ in 0..8 {
        assert!(ask(&store, &limit, "alice", 1).await.allowed());
    }
    let counts = store.counts();
    assert!(counts.draws > 3 && counts.served > 0, "{counts:?}");
    drop(kept);
}

#[tokio::test(start_paused = true)]
async fn what_changes_a_key_ends_its_allotment() {
    // The rest is given back first, but not if a reset has returned it.
    for (op, due) in
        [(Op::Reset, [0, 6, 100]), (Op::Force, [6, 0, 100 - 9 - 30]), (Op::Refund, [6, 0, 100])]
    {
        let (store, limit, _) = scripted_store();
        two_of_eight(&store, &limit).await;
        assert!(operate(&store, op, &limit, "alice", 30).await.allowed());
        assert_eq!(end_and_count(&store, &limit), due, "{op}");
    }
    // Changed parameters of the limit.
    let (store, limit, _) = scripted_store();
    two_of_eight(&store, &limit).await;
    let smaller = self::limit("daily", "fixed-window 50/d");
    let verdict = ask(&store, &smaller, "alice", 1).await;
    assert_eq!((verdict.source(), verdict.limit()), (Source::Store, 50));
    run_until_idle().await;
    assert_eq!(store.counts().given_back, 6);
}

#[tokio::test(start_paused = true)]
async fn a_draw_that_is_under_way_during_a_reset_is_not_spent() {
    // It is known by each of its keys, also after all was given back.
    for (limits, gives_back) in
        [(vec![daily()], false), (vec![daily(), limit("other", "fixed-window 100/d")], true)]
    {
        let (store, limit, _) = scripted_store();
        store.store().set(Mode::Late(Duration::from_millis(5)));
        for _ in 0..3 {
            assert!(ask_all(&store, &limits, "alice", 1).await.allowed());
        }
        let mut draw = pin!(ask_all(&store, &limits, "alice", 1));
        // It is charged, and its answer is on its way.
        assert!(timeout(MILLISECOND, draw.as_mut()).await.is_err());
        if gives_back {
            store.give_back().await;
        }
        assert!(operate(&store, Op::Reset, &limit, "alice", 1).await.allowed());
        assert!(draw.await.allowed());
        let [given_back, forfeited, _] = end_and_count(&store, &limit);
        assert_eq!([given_back, forfeited], [0, 3 * limits.len() as u64]);
        let next = ask_all(&store, &limits, "alice", 1).await;
        assert_eq!(next.source(), Source::Store);
    }
    // Nor is what is drawn while a reset is in flight, which may be charged before it.
    let (store, limit, _) = scripted_store();
    seven(&store, &limit).await;
    store.store().once(Mode::Late(Duration::from_millis(5)));
    let mut reset = pin!(operate(&store, Op::Reset, &limit, "alice", 1));
    assert!(poll(reset.as_mut()).is_pending());
    for _ in 0..2 {
        assert!(ask(&store, &limit, "alice", 1).await.allowed());
    }
    assert!(reset.await.allowed());
    assert_eq!((store.counts().forfeited, store.counts().given_back), (6, 0));
}

/// The allotments of several users share the limit of their address. All of them are settled at
/// once, even if the caller that ended them leaves.
#[tokio::test(start_paused = true)]
async fn a_caller_that_goes_away_ends_no_settlement() {
    for goes in [false, true] {
        let (store, address, _) = scripted_store();
        store.store().set(Mode::Late(Duration::from_millis(5)));
        let user = limit("user", "fixed-window 100/d");
        let of_address = Check { limit: &address, key: "::1", cost: 1 };
        for name in ["alice", "bob", "carol"] {
            let both = [of_address, Check { limit: &user, key: name, cost: 1 }];
            for _ in 0..4 {
                let verdict = store.apply(&Batch::new(&both).expect("distinct")).await;
                assert!(verdict.expect("decides").allowed());
            }
        }
        let force = Batch::one(&of_address).op(Op::Force);
        // The settlements take 5 ms together, and the charge after them as long.
        let most = Duration::from_millis(if goes { 1 } else { 11 });
        assert_eq!(timeout(most, store.apply(&force)).await.is_err(), goes);
        tokio::time::advance(Duration::from_millis(20)).await;
        run_until_idle().await;
        assert_eq!((store.counts().given_back, store.counts().forfeited), (3 * 6, 0));
    }
}

#[tokio::test(start_paused = true)]
async fn slots_are_bounded_and_one_that_goes_gives_back_what_it_has() {
    let (limit, clock) = (daily(), ManualClock::new(BEGIN));
    let store: Scripted = greedy(&clock).capacity(1).build(Fake::new(&clock));
    two_of_eight(&store, &limit).await;
    for n in 0..20 {
        assert!(ask(&store, &limit, &n.to_string(), 1).await.allowed());
    }
    run_until_idle().await;
    assert!(store.counts().slots <= 2, "{:?}", store.counts());
    assert_eq!(end_and_count(&store, &limit), [6, 0, 91]);
}

#[tokio::test(start_paused = true)]
async fn requests_that_cannot_be_served_go_to_the_store_as_they_are() {
    let (store, daily, _) = scripted_store();
    let ask_store = async |batch: Batch<'_, AnyAlgorithm>| {
        for _ in 0..6 {
            let verdict = store.apply(&batch).await.expect("decides");
            assert!(verdict.source() == Source::Store);
        }
        assert_eq!(store.counts().draws, 0, "{batch:?}");
    };
    let check = Check { limit: &daily, key: "alice", cost: 1 };
    for words in [
        "sliding-log 50/d",
        "sliding-counter 50/d",
        "first-request-window 50/d",
        "window-log 50/d",
        "concurrency 50/d",
        "lockout 50/d block 1d",
        "fixed-window 50/d count attempts",
    ] {
        let limit = limit("other", words);
        let other = Check { limit: &limit, key: words, cost: 1 };
        ask_store(Batch::one(&other)).await;
        ask_store(Batch::new(&[check, Check { key: "bob", ..other }]).expect("distinct")).await;
    }
    ask_store(Batch::one(&check).id(ReservationId::new(7))).await;
    ask_store(Batch::one(&check).now(Now::At(BEGIN))).await;
    ask_store(Batch::one(&check).op(Op::Peek)).await;
    ask_store(Batch::one(&check).without_store()).await;
    let long = "x".repeat(1_025);
    ask_store(Batch::one(&Check { key: &long, ..check })).await;
    // A cost of 0 changes nothing, and nothing is drawn for it.
    ask_store(Batch::one(&Check { cost: 0, ..check })).await;

    // Nor is a draw repeated that the store refuses.
    let (store, limit, _) = scripted_store();
    store.store().set(Mode::RefusesIds);
    for n in 0..110 {
        assert_eq!(ask(&store, &limit, "alice", 1).await.allowed(), n < 100);
    }
    let counts = store.counts();
    assert_eq!((counts.draws, counts.served, counts.asked), (1, 0, 110));
}

/// A request after a pause: an operation, and which limits, with their keys and costs.
fn request() -> impl Strategy<Value = (u64, Op, Vec<(usize, usize, u64)>)> {
    let rare = prop::sample::select(vec![Op::Peek, Op::Force, Op::Refund, Op::Reset]);
    let op = prop_oneof![6 => Just(Op::Acquire), 1 => rare];
    let pause_us =
        prop_oneof![6 => Just(0), 6 => 0..5_000_u64, 1 => 0..300_000_u64, 1 => 0..2_000_000_u64];
    let check = (0..3_usize, 0..2_usize, 1..4_u64);
    let several = prop::collection::vec(check, 1..=2).prop_map(|mut checks| {
        checks.dedup_by_key(|(limit, key, _)| (*limit, *key));
        checks
    });
    (pause_us, op, prop_oneof![Just(vec![(0, 0, 1)]), several])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn one_node_admits_what_the_store_alone_admits(
        requests in prop::collection::vec(request(), 1..120),
        lifetime_ms in 1..2_000_u64,
        divisor in 1..4_u64,
    ) {
        const KEYS: [&str; 2] = ["alice", "bob"];
        let rates = ["second 30/s", "short 9/250ms", "day 400/d"];
        let limits = rates.map(|rate| {
            let (name, rate) = rate.split_once(' ').expect(rate);
            limit(name, &format!("fixed-window {rate}"))
        });
        let clock = ManualClock::new(BEGIN);
        let lifetime = Duration::from_millis(lifetime_ms);
        let store = greedy(&clock).divisor(divisor).lifetime(lifetime).build(memory(&clock));
        let plain = memory(&clock);
        let all: Vec<_> = (0..limits.len()).flat_map(|limit| [(limit, 0, 1), (limit, 1, 1)]).collect();
        for (pause_us, op, checks) in requests {
            clock.advance(Duration::from_micros(pause_us));
            // A reset of one limit of a batch leaves the others charged with what was drawn beside
            // it.
            let checks = if op == Op::Reset { &all } else { &checks };
            let check = |(limit, key, cost): &(usize, usize, u64)| {
                Check { limit: &limits[*limit], key: KEYS[*key], cost: *cost }
            };
            let checks: Vec<_> = checks.iter().map(check).collect();
            let batch = Batch::new(&checks).expect("distinct").op(op);
            let said = block_on(store.apply(&batch)).expect("decides");
            let due = plain.apply_now(&batch).expect("decides");
            let told = |verdict: &Verdict| (verdict.allowed(), verdict.retry_after());
            prop_assert_eq!(told(&said), told(&due), "{:?}", batch);
            if said.source() == Source::Allotment {
                prop_assert!(op == Op::Acquire && said.allowed());
            }
        }
        // And the store is charged what was admitted.
        block_on(store.give_back());
        for (limit, key, _) in all {
            let [left, due] = [store.store(), &plain].map(|store| {
                *block_on(operate(store, Op::Peek, &limits[limit], KEYS[key], 0)).summary()
            });
            prop_assert_eq!(left, due);
        }
    }
}

/// Other processes find most of the smaller limit, however much is left of the larger.
#[tokio::test(start_paused = true)]
async fn of_several_limits_the_one_with_the_least_left_bounds_a_draw() {
    for (divisor, order) in [(2, [0, 1]), (2, [1, 0]), (8, [0, 1]), (8, [1, 0])] {
        let clock = ManualClock::new(BEGIN);
        let all = [limit("small", "fixed-window 80/d"), limit("large", "fixed-window 9000/d")];
        let limits = order.map(|place: usize| all[place].clone());
        let store = greedy(&clock).divisor(divisor).build(Fake::new(&clock));
        for nth in 1..=40 {
            let before = store.store().remaining(&all[0], "alice");
            assert!(ask_all(&store, &limits, "alice", 1).await.allowed());
            let drawn = before - store.store().remaining(&all[0], "alice");
            assert!(drawn <= (before / divisor).max(1), "{divisor}, {order:?}, {nth}: {drawn}");
        }
        assert!(store.counts().draws > 2);
    }
}

/// A caller who is denied costs the others, who share a limit with it, no calls.
#[tokio::test(start_paused = true)]
async fn a_denial_leaves_allotments_to_limits_that_do_not_deny() {
    let clock = ManualClock::new(BEGIN);
    let store = greedy(&clock).build(Fake::new(&clock));
    let [user, all] = ["user", "all"].map(|name| limit(name, "fixed-window 9000/d"));
    let ask = async |user: &Limit<AnyAlgorithm>, key: &str| {
        let check = |limit, key| Check { limit, key, cost: 1 };
        let checks = [check(user, key), check(&all, "all")];
        store.apply(&Batch::new(&checks).expect("distinct")).await.expect("decides").allowed()
    };
    // Seven, and one of a draw of eight.
    for _ in 0..8 {
        assert!(ask(&user, "alice").await);
    }
    let before = store.counts();
    let none = limit("none", "fixed-window 0/d");
    assert!(!ask(&none, "eve").await);
    assert!(ask(&user, "alice").await);
    let after = store.counts();
    assert_eq!((after.given_back, after.served), (before.given_back, before.served + 1));
    assert_eq!(after.asked, before.asked + 1);
}

/// A request after a pause under limits that are replaced, now and then, by others of other
/// numbers.
fn reloading() -> impl Strategy<Value = (u64, [usize; 2], u8, u64)> {
    let pause_us = prop_oneof![3 => Just(0), 3 => 0..5_000_u64, 1 => 0..2_000_000_u64];
    (pause_us, [0..3_usize, 0..3_usize], 0..3_u8, 1..9_u64)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    /// With a runtime and without, in which what ends is settled in other ways, and with so few
    /// slots that they make room.
    #[test]
    fn across_reloads_one_node_answers_as_the_store_alone_and_counts_what_is_lost(
        requests in prop::collection::vec(reloading(), 1..60),
        stays in 1..6_usize,
        capacity in 1..4_usize,
        has_runtime: bool,
    ) {
        const NUMBERS: [u64; 3] = [64, 16, 200];
        let clock = ManualClock::new(BEGIN);
        let policy = |name, number: usize| {
            limit(name, &format!("fixed-window {}/d", NUMBERS[number]))
        };
        let store = greedy(&clock).capacity(capacity).build(Fake::new(&clock));
        let plain = memory(&clock);
        let run = async {
            let mut numbers = [0; 2];
            for (at, (pause_us, new, which, cost)) in requests.into_iter().enumerate() {
                clock.advance(Duration::from_micros(pause_us));
                numbers = if at % stays == 0 { new } else { numbers };
                let both = [policy("a", numbers[0]), policy("b", numbers[1])];
                let asked = match which {
                    0 => &both[..1],
                    1 => &both[1..],
                    _ => &both[..],
                };
                let said = ask_all(&store, asked, "alice", cost).await;
                let due = ask_all(&plain, asked, "alice", cost).await;
                let told = |verdict: &Verdict| (verdict.allowed(), verdict.retry_after());
                prop_assert_eq!(told(&said), told(&due), "{}: {:?} {}", at, asked, cost);
            }
            let forfeited = store.counts().forfeited;
            let lost = store.give_back().await;
            prop_assert_eq!((forfeited, lost), (0, 0));
            for (name, number) in [("a", numbers[0]), ("b", numbers[1])] {
                let limit = policy(name, number);
                prop_assert_eq!(store.store().remaining(&limit, "alice"), remaining(&plain, &limit, "alice"));
            }
            Ok(())
        };
        if has_runtime { crate::common::paused_runtime().block_on(run)? } else { block_on(run)? }
    }
}

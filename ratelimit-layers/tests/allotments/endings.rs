//! How allotments end, and what becomes of what is left.

use std::pin::pin;
use std::time::Duration;

use ratelimit_core::{
    Batch, Check, ErrorKind, Limit, ManualClock, Op, Policy, Refusal, Reservation, ReservationId,
    Source, Store, SyncStore, Verdict,
};
use ratelimit_layers::Allotments;
use ratelimit_memory::{MemoryError, MemoryStore};
use ratelimit_testkit::block_on;
use tokio::task::yield_now;
use tokio::time::timeout;

use crate::{BEGIN, ask, greedy, left, limit};

#[path = "../common/mod.rs"]
pub(crate) mod common;

use common::{Mode, Scripted};

type Scripts = Allotments<Scripted, Policy, ManualClock>;

const LIFETIME: Duration = Duration::from_millis(500);

fn daily() -> Limit<Policy> {
    limit("daily", "fixed-window 100/d")
}

fn scripted(clock: &ManualClock) -> Scripts {
    greedy(clock).lifetime(LIFETIME).build(Scripted::new(clock))
}

/// Lets so much time pass, for the clocks and for tasks.
async fn pass(clock: &ManualClock, by: Duration) {
    clock.advance(by);
    tokio::time::advance(by).await;
    for _ in 0..8 {
        yield_now().await;
    }
}

/// Asks until 7 were admitted: 1, then a draw of 2, then one of 4.
async fn seven(store: &Scripts, limit: &Limit<Policy>) {
    for _ in 0..7 {
        assert!(ask(store, limit, "alice", 1).await.allowed());
    }
    assert_eq!(store.counts().draws, 2);
}

/// Asks for two more, for which eight are drawn.
async fn two_of_eight(store: &Scripts, limit: &Limit<Policy>) {
    seven(store, limit).await;
    for _ in 0..2 {
        assert!(ask(store, limit, "alice", 1).await.allowed());
    }
    assert_eq!((store.counts().draws, store.store().left(limit, "alice")), (3, 100 - 15));
}

#[tokio::test(start_paused = true)]
async fn what_is_left_goes_back_after_a_lifetime_without_a_request() {
    let (limit, clock) = (daily(), ManualClock::new(BEGIN));
    let store = scripted(&clock);
    two_of_eight(&store, &limit).await;
    pass(&clock, Duration::from_millis(498)).await;
    assert_eq!((store.counts().given_back, store.store().left(&limit, "alice")), (0, 85));
    pass(&clock, Duration::from_millis(3)).await;
    assert_eq!((store.counts().given_back, store.store().left(&limit, "alice")), (6, 91));
    assert_eq!(store.counts().forfeited, 0);
}

#[tokio::test(start_paused = true)]
async fn a_node_that_is_denied_gets_what_another_node_does_not_use_after_a_lifetime() {
    let (limit, clock) = (limit("small", "fixed-window 15/d"), ManualClock::new(BEGIN));
    let idle = greedy(&clock).lifetime(LIFETIME).build(std::sync::Arc::new(Scripted::new(&clock)));
    let busy = greedy(&clock).lifetime(LIFETIME).build(idle.store().clone());
    for _ in 0..8 {
        assert!(ask(&idle, &limit, "alice", 1).await.allowed());
    }
    // It has drawn all of the limit.
    assert!(!ask(&busy, &limit, "alice", 1).await.allowed());
    pass(&clock, LIFETIME + Duration::from_millis(1)).await;
    for n in 0..8 {
        assert_eq!(ask(&busy, &limit, "alice", 1).await.allowed(), n < 7);
    }
}

#[tokio::test(start_paused = true)]
async fn before_a_process_ends_it_gives_back_all_that_is_left() {
    let (limit, clock) = (daily(), ManualClock::new(BEGIN));
    let store = scripted(&clock);
    two_of_eight(&store, &limit).await;
    let keys: Vec<String> = (0..200).map(|n| n.to_string()).collect();
    for key in keys.iter().flat_map(|key| [key; 2]) {
        assert!(ask(&store, &limit, key, 1).await.allowed());
    }
    store.give_back().await;
    assert_eq!((store.counts().given_back, store.store().left(&limit, "alice")), (206, 91));
    for key in &keys {
        assert_eq!(store.store().left(&limit, key), 98);
    }
}

#[tokio::test(start_paused = true)]
async fn giving_back_to_a_store_that_hangs_ends_and_says_what_did_not_go_back() {
    let (limit, clock) = (daily(), ManualClock::new(BEGIN));
    let store = scripted(&clock);
    two_of_eight(&store, &limit).await;
    store.store().set(Mode::Hangs);
    let waits = timeout(Duration::from_secs(3_600), store.give_back()).await;
    assert_eq!(waits, Ok(6));
    // Later requests draw again, and what they leave goes back.
    store.store().set(Mode::Answers);
    assert!(ask(&store, &limit, "alice", 1).await.allowed());
    assert!(ask(&store, &limit, "alice", 1).await.allowed());
    assert_eq!((store.give_back().await, store.counts().given_back), (0, 14));
}

#[tokio::test(start_paused = true)]
async fn the_reservation_of_a_draw_is_forgotten_soon_after_it_was_given_back() {
    let (limit, clock) = (daily(), ManualClock::new(BEGIN));
    let memory = MemoryStore::builder().clock(clock.clone()).build::<Policy>();
    let store = greedy(&clock).build(memory);
    for _ in 0..8 {
        assert!(ask(&store, &limit, "alice", 1).await.allowed());
    }
    store.give_back().await;
    let before = store.store().reservations();
    clock.advance(Duration::from_micros(Reservation::REPEAT_US));
    for n in 0..200 {
        let _ = left(store.store(), &limit, &n.to_string()).await;
    }
    // The draws that were spent whole were not settled.
    assert_eq!(before - store.store().reservations(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_lost_reply_is_never_spent_and_its_units_go_back() {
    let (limit, clock) = (daily(), ManualClock::new(BEGIN));
    let store = scripted(&clock);
    seven(&store, &limit).await;
    store.store().set(Mode::ChargesAndHangs);
    let lost = timeout(Duration::from_millis(1), ask(&store, &limit, "alice", 1)).await;
    assert!(lost.is_err());
    store.store().set(Mode::Answers);
    for _ in 0..8 {
        yield_now().await;
    }
    assert_eq!((store.counts().given_back, store.store().left(&limit, "alice")), (8, 93));
    // The slot draws again.
    let verdict = ask(&store, &limit, "alice", 1).await;
    assert_eq!((verdict.source(), store.counts().draws), (Source::Store, 4));
}

#[tokio::test(start_paused = true)]
async fn units_of_unknown_outcome_are_forfeited_if_they_cannot_be_given_back() {
    let (limit, clock) = (daily(), ManualClock::new(BEGIN));
    let store = scripted(&clock);
    seven(&store, &limit).await;
    store.store().set(Mode::Fails(ErrorKind::Indeterminate));
    let check = Check { limit: &limit, key: "alice", cost: 1 };
    let lost = store.apply(&Batch::one(&check)).await;
    assert!(lost.is_err());
    for _ in 0..8 {
        yield_now().await;
    }
    assert_eq!((store.counts().given_back, store.counts().forfeited), (0, 8));
}

#[tokio::test(start_paused = true)]
async fn a_future_that_is_dropped_before_its_draw_is_answered_leaves_the_slot_free() {
    let (limit, clock) = (daily(), ManualClock::new(BEGIN));
    let store = scripted(&clock);
    seven(&store, &limit).await;
    store.store().set(Mode::Hangs);
    {
        let mut hanging = pin!(ask(&store, &limit, "alice", 1));
        assert!(timeout(Duration::from_millis(1), &mut hanging).await.is_err());
        // Meanwhile another request goes to the store by itself, and waits for no draw.
        store.store().set(Mode::Answers);
        assert!(ask(&store, &limit, "alice", 1).await.allowed());
        assert_eq!(store.counts().draws, 3);
    }
    assert!(ask(&store, &limit, "alice", 1).await.allowed());
    assert_eq!(store.counts().draws, 4);
}

#[tokio::test(start_paused = true)]
async fn a_draw_that_is_kept_and_not_polled_ends_no_serving() {
    let (limit, clock) = (daily(), ManualClock::new(BEGIN));
    let store = scripted(&clock);
    seven(&store, &limit).await;
    store.store().set(Mode::Hangs);
    let mut kept = Box::pin(ask(&store, &limit, "alice", 1));
    assert!(timeout(Duration::from_millis(1), &mut kept).await.is_err());
    store.store().set(Mode::Answers);
    clock.advance(LIFETIME);
    for _ in 0..8 {
        assert!(ask(&store, &limit, "alice", 1).await.allowed());
    }
    let counts = store.counts();
    assert!(counts.draws > 3 && counts.served > 0, "{counts:?}");
    drop(kept);
}

#[tokio::test(start_paused = true)]
async fn while_the_store_is_away_what_is_left_is_spent_and_nothing_more() {
    let (limit, clock) = (daily(), ManualClock::new(BEGIN));
    let store = scripted(&clock);
    two_of_eight(&store, &limit).await;
    store.store().set(common::UNAVAILABLE);
    let check = Check { limit: &limit, key: "alice", cost: 1 };
    for _ in 0..6 {
        let verdict = store.apply(&Batch::one(&check)).await.expect("it was drawn");
        assert_eq!(verdict.source(), Source::Allotment);
    }
    for _ in 0..3 {
        assert!(store.apply(&Batch::one(&check)).await.is_err());
    }
    store.store().set(Mode::Answers);
    assert_eq!(store.store().left(&limit, "alice"), 85);
}

async fn operate(store: &Scripts, limit: &Limit<Policy>, op: Op, cost: u64) -> Verdict {
    let check = Check { limit, key: "alice", cost };
    store.apply(&Batch::one(&check).op(op)).await.expect("decides")
}

#[tokio::test(start_paused = true)]
async fn a_reset_ends_what_was_drawn_before_it_and_nothing_is_given_back() {
    let (limit, clock) = (daily(), ManualClock::new(BEGIN));
    let store = scripted(&clock);
    two_of_eight(&store, &limit).await;
    assert!(operate(&store, &limit, Op::Reset, 1).await.allowed());
    assert_eq!((store.counts().forfeited, store.store().left(&limit, "alice")), (6, 100));
    let mut admitted = 0;
    while ask(&store, &limit, "alice", 1).await.allowed() {
        admitted += 1;
    }
    assert_eq!((admitted, store.counts().given_back), (100, 0));
}

#[tokio::test(start_paused = true)]
async fn a_draw_that_is_under_way_during_a_reset_is_not_spent() {
    let (limit, clock) = (daily(), ManualClock::new(BEGIN));
    let slow = Slow(MemoryStore::builder().clock(clock.clone()).build());
    let store = greedy(&clock).lifetime(LIFETIME).build(slow);
    let check = Check { limit: &limit, key: "alice", cost: 1 };
    let (plain, reset) = (Batch::one(&check), Batch::one(&check).op(Op::Reset));
    for _ in 0..3 {
        assert!(store.apply(&plain).await.expect("decides").allowed());
    }
    let mut draw = pin!(store.apply(&plain));
    // It is charged, and its answer is on its way.
    assert!(timeout(Duration::from_millis(1), &mut draw).await.is_err());
    assert!(store.apply(&reset).await.expect("resets").allowed());
    assert!(draw.await.expect("decides").allowed());
    assert_eq!(store.counts().forfeited, 3);
    assert_eq!(store.apply(&plain).await.expect("decides").source(), Source::Store);
}

/// A store whose answers take a while.
struct Slow(MemoryStore<Policy, ManualClock>);

impl Store<Policy> for Slow {
    type Error = MemoryError;

    async fn apply(&self, batch: &Batch<'_, Policy>) -> Result<Verdict, MemoryError> {
        let said = self.0.apply_now(batch);
        tokio::time::sleep(Duration::from_millis(5)).await;
        said
    }
}

#[tokio::test(start_paused = true)]
async fn a_draw_that_is_under_way_is_known_by_its_keys_also_after_all_was_given_back() {
    let clock = ManualClock::new(BEGIN);
    let (one, other) = (daily(), limit("other", "fixed-window 100/d"));
    let slow = Slow(MemoryStore::builder().clock(clock.clone()).build());
    let store = greedy(&clock).lifetime(LIFETIME).build(slow);
    let both = [&one, &other].map(|limit| Check { limit, key: "alice", cost: 1 });
    let plain = Batch::new(&both).expect("distinct");
    for _ in 0..3 {
        assert!(store.apply(&plain).await.expect("decides").allowed());
    }
    let mut draw = pin!(store.apply(&plain));
    assert!(timeout(Duration::from_millis(1), &mut draw).await.is_err());
    store.give_back().await;
    let reset = Batch::one(&both[0]).op(Op::Reset);
    assert!(store.apply(&reset).await.expect("resets").allowed());
    assert!(draw.await.expect("decides").allowed());
    assert_eq!((store.counts().forfeited, store.counts().given_back), (6, 0));
}

/// The allotments of several users share the limit of their address. All of them are settled at once, also if the caller that
/// ended them goes away.
#[tokio::test(start_paused = true)]
async fn a_caller_that_goes_away_ends_no_settlement() {
    for goes in [false, true] {
        let clock = ManualClock::new(BEGIN);
        let (address, user) = (daily(), limit("user", "fixed-window 100/d"));
        let slow = Slow(MemoryStore::builder().clock(clock.clone()).build());
        let store = greedy(&clock).lifetime(LIFETIME).build(slow);
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
        for _ in 0..20 {
            yield_now().await;
        }
        assert_eq!((store.counts().given_back, store.counts().forfeited), (3 * 6, 0));
    }
}

#[tokio::test(start_paused = true)]
async fn a_forced_charge_and_a_refund_find_all_that_is_left_in_the_store() {
    for (op, left) in [(Op::Force, 100 - 9 - 30), (Op::Refund, 100)] {
        let (limit, clock) = (daily(), ManualClock::new(BEGIN));
        let store = scripted(&clock);
        two_of_eight(&store, &limit).await;
        assert_eq!(operate(&store, &limit, op, 30).await.remaining(), left, "{op}");
        assert_eq!((store.counts().given_back, store.counts().forfeited), (6, 0), "{op}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_batch_that_is_denied_takes_back_what_other_batches_hold_of_its_keys() {
    let clock = ManualClock::new(BEGIN);
    let (small, large) = (limit("small", "fixed-window 15/d"), daily());
    let store = scripted(&clock);
    // All of `small` is drawn, beside `large`.
    let both = |cost| [&small, &large].map(|limit| Check { limit, key: "alice", cost });
    let one = both(1);
    for _ in 0..8 {
        assert!(
            store.apply(&Batch::new(&one).expect("distinct")).await.expect("decides").allowed()
        );
    }
    assert_eq!(store.store().left(&small, "alice"), 0);
    assert!(ask(&store, &small, "alice", 7).await.allowed());
    assert!(!ask(&store, &small, "alice", 1).await.allowed());
    assert_eq!(store.counts().given_back, 14);
}

#[tokio::test(start_paused = true)]
async fn changed_parameters_of_a_limit_end_its_allotment() {
    let (limit, clock) = (daily(), ManualClock::new(BEGIN));
    let store = scripted(&clock);
    two_of_eight(&store, &limit).await;
    let smaller = self::limit("daily", "fixed-window 50/d");
    let verdict = ask(&store, &smaller, "alice", 1).await;
    assert_eq!((verdict.source(), verdict.limit()), (Source::Store, 50));
    for _ in 0..8 {
        yield_now().await;
    }
    assert_eq!(store.counts().given_back, 6);
}

#[tokio::test(start_paused = true)]
async fn slots_are_bounded_and_one_that_goes_gives_back_what_it_has() {
    let (limit, clock) = (daily(), ManualClock::new(BEGIN));
    let store: Scripts = greedy(&clock).lifetime(LIFETIME).capacity(1).build(Scripted::new(&clock));
    two_of_eight(&store, &limit).await;
    for n in 0..20 {
        assert!(ask(&store, &limit, &n.to_string(), 1).await.allowed());
    }
    for _ in 0..8 {
        yield_now().await;
    }
    assert!(store.counts().slots <= 2, "{:?}", store.counts());
    assert_eq!((store.counts().given_back, store.store().left(&limit, "alice")), (6, 91));
}

/// A store that refuses reservations.
struct Refusing(MemoryStore<Policy, ManualClock>);

impl Store<Policy> for Refusing {
    type Error = MemoryError;

    async fn apply(&self, batch: &Batch<'_, Policy>) -> Result<Verdict, MemoryError> {
        if batch.reservation_id().is_some() {
            return Err(Refusal::CannotReserve { limit: "daily".to_owned() }.into());
        }
        self.0.apply_now(batch)
    }
}

#[test]
fn a_store_that_refuses_draws_decides_every_request_by_itself() {
    let (limit, clock) = (daily(), ManualClock::new(BEGIN));
    let store = Refusing(MemoryStore::builder().clock(clock.clone()).build());
    let store = greedy(&clock).lifetime(LIFETIME).build(store);
    for n in 0..110 {
        assert_eq!(block_on(ask(&store, &limit, "alice", 1)).allowed(), n < 100);
    }
    assert_eq!((store.counts().draws, store.counts().served, store.counts().asked), (1, 0, 110));
}

#[test]
fn requests_that_cannot_be_served_go_to_the_store_as_they_are() {
    let clock = ManualClock::new(BEGIN);
    let store = scripted(&clock);
    let ask = |batch: Batch<'_, Policy>| {
        for _ in 0..6 {
            let verdict = block_on(store.apply(&batch)).expect("decides");
            assert!(verdict.source() == Source::Store);
        }
        assert_eq!(store.counts().draws, 0, "{batch:?}");
    };
    for words in [
        "sliding-log 50/d",
        "sliding-counter 50/d",
        "first-request-window 50/d",
        "window-log 50/d",
        "concurrency 50/d",
    ] {
        let limit = limit(words.split(' ').next().unwrap_or(""), words);
        ask(Batch::one(&Check { limit: &limit, key: "alice", cost: 1 }));
    }
    let attempts: Policy = "fixed-window 50/d".parse().expect("a policy");
    let attempts = attempts.by_attempts().expect("it can");
    let attempts = Limit::new("attempts", attempts).expect("a name");
    ask(Batch::one(&Check { limit: &attempts, key: "alice", cost: 1 }));
    let (served, log) = (daily(), limit("log", "sliding-log 50/d"));
    let check = Check { limit: &served, key: "alice", cost: 1 };
    ask(Batch::new(&[check, Check { limit: &log, key: "bob", cost: 1 }]).expect("distinct"));
    ask(Batch::one(&check).id(ReservationId::new(7)));
    ask(Batch::one(&check).now(ratelimit_core::Now::At(BEGIN)));
    ask(Batch::one(&check).op(Op::Peek));
    ask(Batch::one(&check).without_store());
    // A cost of 0 changes nothing, and nothing is drawn for it.
    ask(Batch::one(&Check { cost: 0, ..check }));
}

//! A reservation that owns what it needs settles or releases itself, wherever it is dropped.
//!
//! Time is paused: a store that answers after a minute takes none.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ratelimit_core::store::{Batch, Check, Op};
use ratelimit_core::{
    AnyAlgorithm, DynError, ErrorKind, LimitCosts, Limits, ManualClock, OwnedReservation,
    RateLimiter, Reserved, Store, StoreError, Verdict,
};
use tokio::runtime::{Builder, Runtime};
use tokio::task::yield_now;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::common::{Memory, limit, limiter, store};

const ANSWER: Duration = Duration::from_secs(60);
/// A hundred, and next to nothing flows back.
const BUCKET: &str = "gcra 1/d burst 100";
const LEASES: &str = "concurrency 100/1h";
/// A hundred, and nothing comes back within hours.
const WINDOW: &str = "fixed-window 100/360d";

/// A store in memory that decides at once and answers a minute later, or never.
struct Slow {
    store: Memory,
    /// How many of the next requests are lost, peeks aside: a settlement on its way to the store,
    /// any other on its way back.
    lost: AtomicU64,
    /// 1 if the answer to the next settlement is lost on its way back, and 2 if that to the next
    /// forced charge is.
    late: AtomicU64,
}

#[derive(Debug, thiserror::Error)]
#[error("the answer was lost")]
struct Lost;

impl StoreError for Lost {
    fn kind(&self) -> ErrorKind {
        ErrorKind::Indeterminate
    }
}

impl Store<AnyAlgorithm> for Slow {
    type Error = DynError;

    async fn apply(&self, batch: &Batch<'_, AnyAlgorithm>) -> Result<Verdict, DynError> {
        if batch.operation() == Op::Peek {
            return self.store.apply(batch).await.map_err(DynError::new);
        }
        let lost = |lost: u64| lost.checked_sub(1);
        let is_lost = self.lost.fetch_update(Ordering::SeqCst, Ordering::SeqCst, lost).is_ok();
        let arrives = !is_lost || batch.operation() != Op::Settle;
        let (op, late) = (batch.operation(), self.late.load(Ordering::SeqCst));
        let is_late = (late == 1 && op == Op::Settle) || (late == 2 && op == Op::Force);
        let is_lost = is_lost || is_late && self.late.swap(0, Ordering::SeqCst) > 0;
        let answer = if arrives { Some(self.store.apply(batch).await) } else { None };
        sleep(ANSWER).await;
        let answer = answer.filter(|_| !is_lost).ok_or_else(|| DynError::new(Lost))?;
        answer.map_err(DynError::new)
    }
}

type Limiter = Arc<RateLimiter<Slow>>;
type Reservation = OwnedReservation<Slow, AnyAlgorithm, &'static str>;

fn slow(words: &str) -> (Limiter, ManualClock) {
    slow_of(&[("l", words)])
}

fn slow_of(rows: &[(&str, &str)]) -> (Limiter, ManualClock) {
    let (store, clock) = store(|builder| builder);
    let limits = Limits::new(rows.iter().map(|(name, words)| limit(name, words))).expect("limits");
    (Arc::new(RateLimiter::new(limits, Slow { store, lost: 0.into(), late: 0.into() })), clock)
}

async fn remaining(limiter: &Limiter) -> u64 {
    limiter.request("alice").cost(0).peek().await.expect("decides").remaining()
}

async fn reserve<S: Store<AnyAlgorithm> + 'static>(
    limiter: &Arc<RateLimiter<S>>,
    estimate: impl Into<LimitCosts>,
) -> OwnedReservation<S, AnyAlgorithm, &'static str> {
    match limiter.reserve("alice", estimate).await.expect("decides") {
        Reserved::Granted(reservation) => reservation,
        Reserved::Denied(verdict) => panic!("denied: {verdict:?}"),
    }
}

/// What is left once all that was spawned has run as far as it can.
async fn left_at_the_end(limiter: &Limiter) -> u64 {
    sleep(10 * ANSWER).await;
    yield_now().await;
    remaining(limiter).await
}

#[tokio::test(start_paused = true)]
async fn what_is_committed_is_charged_and_what_is_cancelled_or_denied_is_not() {
    let (limiter, _) = slow(BUCKET);
    let reservation = reserve(&limiter, 40).await;
    assert_eq!((remaining(&limiter).await, reservation.verdict().remaining()), (60, 60));
    assert_eq!(reservation.settle(15).await.expect("settles").remaining(), 85);
    assert_eq!(reserve(&limiter, 40).await.settle(0).await.expect("settles").remaining(), 85);
    let answer = limiter.reserve("alice", 101).await.expect("decides");
    assert!(matches!(answer, Reserved::Denied(verdict) if verdict.retry_after().is_none()));
    assert_eq!(left_at_the_end(&limiter).await, 85);
}

#[tokio::test(start_paused = true)]
async fn a_settlement_that_gets_lost_is_sent_again_at_least_once() {
    for (lost, due) in [(0, 100), (1, 100), (2, 60)] {
        let (limiter, _) = slow(BUCKET);
        let mut reservation = reserve(&limiter, 40).await;
        reservation.set_cost(0);
        limiter.store().lost.store(lost, Ordering::SeqCst);
        drop(reservation);
        assert_eq!(left_at_the_end(&limiter).await, due, "{lost} are lost");
    }
}

#[tokio::test(start_paused = true)]
async fn a_dropped_reservation_is_settled_at_its_estimate_or_at_the_cost_that_was_set() {
    let (limiter, _) = slow(BUCKET);
    drop(reserve(&limiter, 40).await);
    assert_eq!(left_at_the_end(&limiter).await, 60);
    let mut sending = reserve(&limiter, 40).await;
    (1..=7).for_each(|sent| sending.set_cost(sent));
    assert_eq!((sending.costs().uniform(), remaining(&limiter).await), (Some(7), 20));
    let id = sending.id();
    drop(sending);
    assert_eq!(left_at_the_end(&limiter).await, 53);
    // It has been settled, and not only left to expire.
    let other = limiter.request("alice").id(id).cost(8).settle().await.expect_err("settled at 7");
    assert!(other.to_string().contains("settled at 7"), "{other}");
}

#[tokio::test(start_paused = true)]
async fn an_extension_only_grows_and_the_cost_of_an_unknown_name_settles_the_rest() {
    let (limiter, _) = slow(BUCKET);
    let mut growing = reserve(&limiter, 10).await;
    for (total, allowed, reserved) in [(30, true, 30), (20, true, 30), (101, false, 30)] {
        let verdict = growing.extend(total).await.expect("extends");
        assert_eq!((verdict.allowed(), growing.costs().get("l")), (allowed, reserved));
    }
    assert!(growing.extend(LimitCosts::from(1).with("x", 40)).await.is_err());
    drop(growing);
    assert_eq!(left_at_the_end(&limiter).await, 70);
    let refused = reserve(&limiter, 10).await.settle(LimitCosts::from(1).with("x", 1)).await;
    assert_eq!(refused.expect_err("no limit is named x").kind(), ErrorKind::Invalid);
    let mut named = reserve(&limiter, 10).await;
    named.set_cost(LimitCosts::from(4).with("x", 1));
    drop(named);
    assert_eq!(left_at_the_end(&limiter).await, 70 - 10 - 4);
    let (limiter, _) = slow(LEASES);
    let mut lease = reserve(&limiter, 2).await;
    assert!(lease.extend(2).await.expect("keeps its places").allowed());
    assert_eq!(lease.extend(3).await.expect_err("a lease").kind(), ErrorKind::Unsupported);
    drop(lease);
    assert_eq!(left_at_the_end(&limiter).await, 100);
    // Beside what grows, a lease keeps its places, unless it is named.
    let (limiter, _) = slow_of(&[("tokens", WINDOW), ("streams", "concurrency 2/1h")]);
    let mut stream = reserve(&limiter, LimitCosts::from(1).with("tokens", 10)).await;
    let verdict = stream.extend(30).await.expect("extends");
    let left: Vec<_> = verdict.decisions().iter().map(|decision| decision.remaining).collect();
    assert_eq!((verdict.allowed(), left), (true, vec![70, 1]));
    let named = LimitCosts::from(40).with("streams", 2);
    let error = stream.extend(named).await.expect_err("a lease");
    assert_eq!(error.kind(), ErrorKind::Unsupported);
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_released_when_it_is_dropped_or_its_task_panics_and_lives_while_it_is_renewed() {
    let (limiter, clock) = slow(LEASES);
    let lease = reserve(&limiter, 3).await;
    assert_eq!(remaining(&limiter).await, 97);
    drop(lease);
    assert_eq!(left_at_the_end(&limiter).await, 100);
    let lease = reserve(&limiter, 1).await;
    let task = tokio::spawn(async move {
        let _lease = lease;
        std::panic::resume_unwind(Box::new("the task ends"));
    });
    assert!(task.await.is_err());
    assert_eq!(left_at_the_end(&limiter).await, 100);
    let lease = reserve(&limiter, 1).await;
    for _ in 0..3 {
        clock.advance(Duration::from_secs(3_000));
        assert!(lease.renew().await.expect("renews").allowed());
    }
    assert_eq!(remaining(&limiter).await, 99);
    clock.advance(Duration::from_secs(3_600));
    assert_eq!(remaining(&limiter).await, 100);
    assert_eq!(lease.renew().await.expect_err("its time is over").kind(), ErrorKind::Ended);
}

/// An hour and a minute after it was charged.
async fn held_for_long(limiter: &Limiter, clock: &ManualClock) -> Reservation {
    let held = reserve(limiter, 40).await;
    clock.advance(Duration::from_secs(3_660));
    held
}

#[tokio::test(start_paused = true)]
async fn a_reservation_that_is_extended_or_renewed_lives_for_another_hour() {
    let (limiter, clock) = slow(WINDOW);
    for extends in [true, false] {
        let mut held = reserve(&limiter, 10).await;
        for _ in 0..4 {
            clock.advance(Duration::from_secs(1_800));
            let kept = if extends { held.extend(10).await } else { held.renew().await };
            assert!(kept.expect("it lives").allowed());
        }
        let _ = held.settle(0).await.expect("it lives");
        assert_eq!(remaining(&limiter).await, 100, "extended: {extends}");
    }
}

/// A window's charge comes back in that window only, and a renewal moves none.
#[tokio::test(start_paused = true)]
async fn what_an_earlier_window_has_counted_does_not_come_back_after_a_renewal() {
    let (limiter, clock) = slow("fixed-window 100/30m");
    for renews in [false, true] {
        let held = reserve(&limiter, 10).await;
        clock.advance(Duration::from_secs(1_800));
        let _ = reserve(&limiter, 5).await.settle(5).await.expect("settles");
        if renews {
            assert!(held.renew().await.expect("it lives").allowed());
        }
        let _ = held.settle(0).await.expect("it lives");
        assert_eq!(remaining(&limiter).await, 95, "renewed: {renews}");
    }
}

/// What was too little is charged, once, and what was too much stays charged.
#[tokio::test(start_paused = true)]
async fn a_settlement_that_comes_too_late_charges_what_is_missing_and_says_so() {
    let (limiter, clock) = slow(WINDOW);
    let held = held_for_long(&limiter, &clock).await;
    assert_eq!(held.settle(10).await.expect_err("it is late").kind(), ErrorKind::Ended);
    assert_eq!(remaining(&limiter).await, 60);
    let held = held_for_long(&limiter, &clock).await;
    assert_eq!(held.settle(45).await.expect_err("it is late").kind(), ErrorKind::Ended);
    assert_eq!(remaining(&limiter).await, 60 - 45);
    // The first answer to the settlement, and then that to the charge, are lost: it is sent again.
    let (limiter, clock) = slow(WINDOW);
    for lost in [1, 2] {
        let before = remaining(&limiter).await;
        let mut held = held_for_long(&limiter, &clock).await;
        let told = Arc::new(Mutex::new(Vec::new()));
        let heard = told.clone();
        held.on_error(move |error| heard.lock().expect("no panic").push(error.kind()));
        held.set_cost(45);
        limiter.store().late.store(lost, Ordering::SeqCst);
        drop(held);
        assert_eq!(left_at_the_end(&limiter).await, before - 45, "lost: {lost}");
        assert_eq!(*told.lock().expect("no panic"), [ErrorKind::Ended], "lost: {lost}");
    }
    // Of an extension, what was charged is known; a lease ends at any cost.
    let (limiter, clock) = slow(WINDOW);
    let mut held = reserve(&limiter, 10).await;
    assert!(held.extend(30).await.expect("fits").allowed());
    clock.advance(Duration::from_secs(3_660));
    held.settle(31).await.expect_err("it is late");
    assert_eq!(remaining(&limiter).await, 100 - 31);
    let (limiter, clock) = slow(LEASES);
    held_for_long(&limiter, &clock).await.settle(90).await.expect_err("it is late");
    assert_eq!(remaining(&limiter).await, 100);
}

/// Limits differ in what was estimated and in what is missing.
#[tokio::test(start_paused = true)]
async fn a_settlement_that_comes_too_late_charges_what_is_missing_of_each_limit() {
    let costs = |[others, own]: [u64; 2]| LimitCosts::from(others).with("own", own);
    let all = [[10, 40], [40, 10], [20, 20]];
    for (estimate, cost) in all.iter().flat_map(|one| all.map(|other| (*one, other))) {
        for order in [["l", "own"], ["own", "l"]] {
            let (limiter, clock) = slow_of(&order.map(|name| (name, WINDOW)));
            let held = reserve(&limiter, costs(estimate)).await;
            clock.advance(Duration::from_secs(3_660));
            held.settle(costs(cost)).await.expect_err("it is late");
            let verdict = limiter.request("alice").cost(0).peek().await.expect("decides");
            let charged = order.map(|name| {
                100 - limiter.named(&verdict).by_name(name).expect("it applies").remaining
            });
            let due = order.map(|name| costs(estimate).get(name).max(costs(cost).get(name)));
            assert_eq!(charged, due, "{order:?}: {estimate:?}, settled at {cost:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_dropped_before_the_answer_or_unanswered_is_done_once_or_undone() {
    let (limiter, _) = slow(BUCKET);
    let lose = || limiter.store().lost.store(1, Ordering::SeqCst);
    let waited = timeout(ANSWER / 2, limiter.reserve("alice", 40)).await;
    assert!(waited.is_err() && remaining(&limiter).await == 60, "charged, and not answered yet");
    assert_eq!(left_at_the_end(&limiter).await, 100);
    lose();
    limiter.reserve("alice", 40).await.expect_err("lost");
    assert_eq!(left_at_the_end(&limiter).await, 100);
    let reservation = reserve(&limiter, 40).await;
    assert!(timeout(ANSWER / 2, reservation.settle(10)).await.is_err());
    assert_eq!(left_at_the_end(&limiter).await, 90);
    let reservation = reserve(&limiter, 40).await;
    lose();
    reservation.settle(10).await.expect_err("lost");
    assert_eq!(left_at_the_end(&limiter).await, 80);
}

/// Several limits, of which one has no room for a reservation: none is recorded.
#[tokio::test]
async fn without_room_for_a_reservation_the_estimate_stands_and_the_commit_says_so() {
    let limits = [limit("l", BUCKET), limit("m", BUCKET)];
    let limiter = Arc::new(limiter(limits, |builder| builder.reservations(3)).0);
    let recorded = reserve(&limiter, 10).await;
    assert!(!recorded.verdict().is_unrecorded());
    let (dropped, reservation) = (reserve(&limiter, 10).await, reserve(&limiter, 10).await);
    assert_eq!((limiter.store().reservations(), limiter.store().unrecorded()), (2, 2));
    let answer = reservation.settle(1).await.expect("no error");
    assert!(answer.is_unrecorded() && answer.allowed());
    drop(dropped);
    yield_now().await;
    assert_eq!(limiter.request("alice").cost(0).peek_now().expect("decides").remaining(), 70);
    let answer = recorded.settle(1).await.expect("settles");
    assert_eq!((answer.is_unrecorded(), answer.remaining()), (false, 79));
}

/// A store on a server that hangs. What is sent meanwhile is done when it goes on, in an order of
/// its own, and its callers have given up by then.
struct Hung {
    store: Arc<Memory>,
    goes_on: Instant,
    /// How much later the first request of all is done, as on another connection.
    late: Duration,
    is_first: AtomicBool,
}

/// How long a caller waits for an answer.
const DEADLINE: Duration = Duration::from_millis(100);

impl Store<AnyAlgorithm> for Hung {
    type Error = DynError;

    async fn apply(&self, batch: &Batch<'_, AnyAlgorithm>) -> Result<Verdict, DynError> {
        if Instant::now() >= self.goes_on && !self.is_first.load(Ordering::SeqCst) {
            return self.store.apply(batch).await.map_err(DynError::new);
        }
        let is_first = self.is_first.swap(false, Ordering::SeqCst);
        let done = self.goes_on + if is_first { self.late } else { Duration::ZERO };
        let [check] = batch.checks() else { panic!("one limit") };
        let (store, limit, key) = (self.store.clone(), check.limit.clone(), check.key.to_owned());
        let (cost, op, id) = (check.cost, batch.operation(), batch.reservation_id());
        tokio::spawn(async move {
            sleep_until(done).await;
            let check = Check { limit: &limit, key: &key, cost };
            let batch = Batch::one(&check).op(op).id(id.expect("of a reservation")).settled_once();
            store.apply(&batch).await
        });
        sleep(DEADLINE).await;
        Err(DynError::new(Lost))
    }
}

/// However long the server hangs, within ten seconds, and whichever of the two it does first: the
/// request or what cancels it.
#[tokio::test(start_paused = true)]
async fn what_a_server_that_hangs_does_later_is_cancelled() {
    for words in [BUCKET, LEASES] {
        for hangs_ms in [0, 50, 150, 250, 600, 2_000, 8_000] {
            for late_ms in [0, 5, 60] {
                let (memory, _) = store(|builder| builder);
                let (memory, limit) = (Arc::new(memory), limit("l", words));
                let limits = Limits::new([limit.clone()]).expect("limits");
                let hung = Hung {
                    store: memory.clone(),
                    goes_on: Instant::now() + Duration::from_millis(hangs_ms),
                    late: Duration::from_millis(late_ms),
                    is_first: true.into(),
                };
                let limiter = Arc::new(RateLimiter::new(limits, hung));
                let failed = limiter.reserve("alice", 40).await.expect_err("no answer");
                assert_eq!(failed.kind(), ErrorKind::Indeterminate);
                sleep(Duration::from_secs(30)).await;
                let check = Check { limit: &limit, key: "alice", cost: 0 };
                let peek = Batch::one(&check).op(Op::Peek);
                let left = memory.apply(&peek).await.expect("decides").remaining();
                assert_eq!(left, 100, "{words}: it hangs for {hangs_ms} ms, late by {late_ms} ms");
                // The id is that of the charge, which was settled at 0.
                let settle = Batch::one(&check).op(Op::Settle).id(failed.id).settled_once();
                assert!(memory.apply(&settle).await.is_ok());
            }
        }
    }
}

/// A store that is a way off: a request that is dropped on its way there does not arrive.
struct Far {
    store: Memory,
    /// Whether the next answer is lost.
    loses: AtomicBool,
}

/// Each way.
const WAY: Duration = Duration::from_millis(10);

impl Store<AnyAlgorithm> for Far {
    type Error = DynError;

    async fn apply(&self, batch: &Batch<'_, AnyAlgorithm>) -> Result<Verdict, DynError> {
        sleep(WAY).await;
        let answer = self.store.apply(batch).await.map_err(DynError::new);
        sleep(WAY).await;
        if self.loses.swap(false, Ordering::SeqCst) { Err(DynError::new(Lost)) } else { answer }
    }
}

/// How an operation in flight ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Answered,
    /// Its future is dropped before the message has left the process.
    DroppedUnsent,
    /// Its future is dropped when it has arrived, and before the answer is there.
    DroppedUnanswered,
    Lost,
}

/// Every operation of a reservation of 40 × every way in which it ends × how the value ends then:
/// what is charged in the end is what was said last.
#[tokio::test(start_paused = true)]
async fn however_an_operation_ends_what_was_said_last_is_charged() {
    const FATES: [Fate; 4] =
        [Fate::Answered, Fate::DroppedUnsent, Fate::DroppedUnanswered, Fate::Lost];
    // What is charged if it is dropped then, or settled at 7; `settle` ends it.
    for (op, dropped) in [("reserve", 40), ("commit", 10), ("extend", 60), ("renew", 40)] {
        for fate in FATES {
            for settles in [false, true] {
                let (store, _) = store(|builder| builder);
                let limits = Limits::new([limit("l", BUCKET)]).expect("limits");
                let store = Far { store, loses: false.into() };
                let limiter = Arc::new(RateLimiter::new(limits, store));
                let patience = match fate {
                    Fate::Answered | Fate::Lost => WAY * 4,
                    Fate::DroppedUnsent => WAY / 2,
                    Fate::DroppedUnanswered => WAY * 3 / 2,
                };
                let mut held = None;
                if op != "reserve" {
                    held = Some(reserve(&limiter, 40).await);
                }
                limiter.store().loses.store(fate == Fate::Lost, Ordering::SeqCst);
                match (op, &mut held) {
                    ("commit", held) => {
                        let reservation = held.take().expect("made");
                        let _ = timeout(patience, reservation.settle(10)).await;
                    }
                    ("extend", Some(held)) => _ = timeout(patience, held.extend(60)).await,
                    (_, Some(held)) => _ = timeout(patience, held.renew()).await,
                    (_, held) => {
                        let reserved = timeout(patience, limiter.reserve("alice", 40)).await;
                        if let Ok(Ok(Reserved::Granted(reservation))) = reserved {
                            *held = Some(reservation);
                        }
                    }
                }
                let due = match (&held, op) {
                    (None, "reserve") => 0,
                    (Some(_), _) if settles => 7,
                    // An extension without an answer is not one.
                    (Some(_), "extend") if fate != Fate::Answered => 40,
                    _ => dropped,
                };
                match held {
                    Some(reservation) if settles => _ = reservation.settle(7).await,
                    held => drop(held),
                }
                sleep(Duration::from_secs(30)).await;
                let left =
                    limiter.request("alice").cost(0).peek().await.expect("decides").remaining();
                assert_eq!(100 - left, due, "{op}, {fate:?}, then settles: {settles}");
            }
        }
    }
}

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_time().start_paused(true).build().expect("a runtime")
}

#[test]
fn dropped_outside_of_a_runtime_it_is_settled_on_the_one_that_made_it_or_expires() {
    for has_ended in [false, true] {
        let (limiter, clock) = slow(LEASES);
        let made_on = runtime();
        let lease = made_on.block_on(reserve(&limiter, 1));
        let on = if has_ended { runtime() } else { made_on };
        drop(lease);
        assert_eq!(on.block_on(left_at_the_end(&limiter)), if has_ended { 99 } else { 100 });
        clock.advance(Duration::from_secs(3_600));
        assert_eq!(on.block_on(remaining(&limiter)), 100);
    }
}

#[test]
fn made_and_dropped_without_a_runtime_it_expires() {
    let (limiter, clock) = limiter([limit("l", LEASES)], |builder| builder);
    let limiter = Arc::new(limiter);
    drop(ratelimit_testkit::block_on(reserve(&limiter, 1)));
    let remaining = || limiter.request("alice").cost(0).peek_now().expect("decides").remaining();
    assert_eq!(remaining(), 99);
    clock.advance(Duration::from_secs(3_600));
    assert_eq!(remaining(), 100);
}

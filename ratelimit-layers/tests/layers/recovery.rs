//! What a store learns, when it is back, of what was admitted without it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use ratelimit_core::store::{Batch, Op};
use ratelimit_core::{
    AnyAlgorithm, Clock, ErrorKind, Limit, ManualClock, OnOutage, Source, Store as _, Timestamp,
    Verdict,
};
use ratelimit_layers::{BreakerState, Fallback, OnRecovery};
use tokio::task::yield_now;
use tokio::time::sleep;

use crate::common::{
    Fake, ID, Mode, PAUSE, UNAVAILABLE, ask_all, checks, fallback, limit, operate, paused_runtime,
    run_until_idle,
};
use crate::fallback::{Layered, ask, burst, down, layered_with, up};

/// A fallback that charges on recovery, and its limit.
fn charging() -> (Layered, ManualClock, [Limit<AnyAlgorithm>; 1]) {
    let limits = [burst(OnOutage::Local)];
    let charge = OnRecovery::Charge;
    let (store, clock) = layered_with(&limits, |settings| settings.on_recovery(charge).capacity(2));
    (store, clock, limits)
}

/// How many keys are to be charged, how many charges are forgotten, and what Alice has left in the
/// store, when the task has run that never waits for the clock while the store answers.
async fn recover(store: &Layered, limits: &[Limit<AnyAlgorithm>]) -> (usize, u64, u64) {
    sleep(Duration::from_millis(1)).await;
    let left = store.store().remaining(&limits[0], "alice");
    (store.pending_charges(), store.forgotten_charges(), left)
}

#[tokio::test(start_paused = true)]
async fn what_still_counts_is_charged_without_refunds_and_ids_and_of_so_many_keys() {
    let (store, clock, limits) = charging();
    down(&store, &limits).await;
    assert!(ask(&store, &limits, 20).await.allowed());
    // The share refills at 20 a minute.
    clock.advance(Duration::from_secs(30));
    up(&store, &limits).await;
    assert_eq!(recover(&store, &limits).await, (0, 0, 50));

    let (store, _, limits) = charging();
    down(&store, &limits).await;
    for (key, pending) in [("alice", (1, 0)), ("bob", (2, 0)), ("carol", (2, 1))] {
        assert!(ask_all(&store, &limits, key, 10).await.allowed());
        assert_eq!((store.pending_charges(), store.forgotten_charges()), pending);
    }
    assert!(operate(&store, Op::Refund, &limits[0], "alice", 4).await.allowed());
    let checks = checks(&limits, "alice", 4);
    assert!(store.apply(&Batch::one(&checks[0]).id(ID)).await.expect("reserves").allowed());
    up(&store, &limits).await;
    assert_eq!(recover(&store, &limits).await, (0, 1, 54));
}

#[tokio::test(start_paused = true)]
async fn a_charge_that_may_have_arrived_is_not_sent_again_and_one_that_did_not_is() {
    for (mode, left, forgotten) in [
        (Mode::ChargesAndHangs, 58, 1),
        (UNAVAILABLE, 58, 0),
        (Mode::Fails(ErrorKind::Unsupported), 60, 1),
    ] {
        let (store, _, limits) = charging();
        down(&store, &limits).await;
        assert!(ask(&store, &limits, 2).await.allowed());
        up(&store, &limits).await;
        // The store fails again before the task runs.
        store.store().set(mode);
        sleep(Duration::from_millis(500)).await;
        store.store().set(Mode::Answers);
        sleep(PAUSE * 2).await;
        assert_eq!(recover(&store, &limits).await, (0, forgotten, left), "{mode:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_admitted_locally_while_the_breaker_stays_closed_is_charged_by_the_next_answer() {
    let (store, _, limits) = charging();
    store.store().set(UNAVAILABLE);
    assert!(ask(&store, &limits, 3).await.allowed());
    assert_eq!(recover(&store, &limits).await, (1, 0, 60));
    store.store().set(Mode::Answers);
    assert!(ask_all(&store, &limits, "bob", 1).await.allowed());
    assert_eq!(store.breaker(), BreakerState::Closed);
    assert_eq!(recover(&store, &limits).await, (0, 0, 57));
}

#[tokio::test(start_paused = true)]
async fn a_request_that_the_store_may_have_charged_is_not_charged_once_more() {
    let (store, _, limits) = charging();
    store.store().set(Mode::ChargesAndHangs);
    for _ in 0..8 {
        assert!(ask(&store, &limits, 1).await.allowed());
    }
    // Five calls had no answer, and the store has charged them. The breaker kept three from it.
    assert_eq!(recover(&store, &limits).await, (1, 0, 55));
    up(&store, &limits).await;
    assert_eq!(recover(&store, &limits).await, (0, 0, 52));
}

#[test]
fn a_recovery_whose_runtime_no_thread_drives_holds_up_no_other() {
    let [idle, driven] = [paused_runtime(), paused_runtime()];
    let (store, _, limits) = charging();
    idle.block_on(async {
        down(&store, &limits).await;
        assert!(ask(&store, &limits, 2).await.allowed());
        up(&store, &limits).await;
        // The task begins a charge that is never answered, and is polled no more.
        store.store().set(Mode::Hangs);
        yield_now().await;
    });
    assert_eq!(store.pending_charges(), 0);
    driven.block_on(async {
        tokio::time::advance(PAUSE).await;
        down(&store, &limits).await;
        assert!(ask_all(&store, &limits, "bob", 3).await.allowed());
        up(&store, &limits).await;
        assert_eq!(recover(&store, &limits).await, (0, 0, 60));
    });
    assert_eq!(store.store().remaining(&limits[0], "bob"), 57);
}

/// A clock that panics at one reading, after the test asks for it.
#[derive(Clone, Default)]
struct PanicsOnce(ManualClock, Arc<AtomicBool>);

impl Clock for PanicsOnce {
    fn now(&self) -> Timestamp {
        assert!(!self.1.swap(false, Relaxed), "as it was told");
        self.0.now()
    }
}

/// A fallback with such a clock, that charges on recovery.
fn panicking() -> (Fallback<Fake, AnyAlgorithm, PanicsOnce>, PanicsOnce, [Limit<AnyAlgorithm>; 1]) {
    let (clock, limits) = (PanicsOnce::default(), [burst(OnOutage::Local)]);
    let settings = Fallback::builder().failures(1).on_recovery(OnRecovery::Charge);
    (fallback(settings, Fake::new(&clock.0), &clock, &limits), clock, limits)
}

#[tokio::test(start_paused = true)]
async fn a_request_that_panics_without_the_store_leaves_its_id_to_the_store() {
    let (store, clock, limits) = panicking();
    let reserves = || {
        let (store, limits) = (store.clone(), limits.clone());
        tokio::spawn(async move {
            let asks = checks(&limits, "alice", 1);
            store.apply(&Batch::one(&asks[0]).id(ID)).await.expect("decides").source()
        })
    };
    store.store().set(UNAVAILABLE);
    clock.1.store(true, Relaxed);
    assert!(reserves().await.expect_err("as it was told").is_panic());
    store.store().set(Mode::Answers);
    sleep(PAUSE).await;
    assert_eq!(reserves().await.expect("no panic"), Source::Store);
}

#[tokio::test(start_paused = true)]
async fn a_charge_that_panics_is_counted_and_holds_no_other_back() {
    let (store, clock, limits) = panicking();
    store.store().set(UNAVAILABLE);
    for key in ["alice", "bob"] {
        assert!(ask_all(&store, &limits, key, 3).await.allowed());
    }
    store.store().set(Mode::Answers);
    sleep(PAUSE).await;
    clock.1.store(true, Relaxed);
    for pending in [1, 0] {
        assert!(ask_all(&store, &limits, "carol", 1).await.allowed());
        run_until_idle().await;
        assert_eq!((store.pending_charges(), store.forgotten_charges()), (pending, 1));
    }
}

#[tokio::test(start_paused = true)]
async fn long_keys_take_bounded_memory_and_go_when_they_count_no_more() {
    let limits = [burst(OnOutage::Local)];
    let (store, clock) = layered_with(&limits, |settings| settings.on_recovery(OnRecovery::Charge));
    down(&store, &limits).await;
    let long = "x".repeat(100_000);
    for n in 0..400 {
        assert!(ask_all(&store, &limits, &format!("{n}{long}"), 1).await.allowed());
    }
    let kept = store.pending_charges();
    assert!(kept * long.len() <= 16 << 20 && kept > 100, "{kept}");
    assert_eq!(store.forgotten_charges(), 400 - kept as u64);
    // The share is full again after a minute. Others take the places, and nothing is forgotten.
    clock.advance(Duration::from_secs(60));
    for n in 0..400 {
        assert!(ask_all(&store, &limits, &n.to_string(), 1).await.allowed());
    }
    assert_eq!((store.pending_charges(), store.forgotten_charges()), (400, 400 - kept as u64));
}

/// A fallback that charges on recovery and is down, and what it decides of one request to all of
/// these limits.
async fn decide_while_down(
    limits: &[Limit<AnyAlgorithm>],
    op: Op,
    cost: u64,
) -> (Layered, Verdict) {
    let charge = OnRecovery::Charge;
    let (store, _) = layered_with(limits, |settings| settings.on_recovery(charge));
    down(&store, limits).await;
    let checks = checks(limits, "alice", cost);
    let batch = Batch::new(&checks).expect("distinct").op(op);
    let verdict = store.apply(&batch).await.expect("decides");
    (store, verdict)
}

/// Beside limits of other choices, in every order: what a limit decides, owes and forgives is what
/// it says alone, and what it was charged, by force too, reaches the store.
#[tokio::test(start_paused = true)]
async fn each_of_several_limits_is_decided_and_charged_as_if_alone() {
    let all = [
        limit("open", "fixed-window 90/d debt 9").on_outage(OnOutage::Open),
        limit("owing", "fixed-window 30/d debt 9").on_outage(OnOutage::Local),
        limit("roomy", "fixed-window 900/d debt 9").on_outage(OnOutage::Local),
    ];
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let limits = order.map(|place: usize| all[place].clone());
        for (op, cost) in [(Op::Acquire, 7), (Op::Force, 20)] {
            let case = format!("{op} in {order:?}");
            let (store, together) = decide_while_down(&limits, op, cost).await;
            for (position, limit) in limits.iter().enumerate() {
                let (_, alone) = decide_while_down(std::slice::from_ref(limit), op, cost).await;
                let name = limit.name();
                assert_eq!(together.decisions()[position], alone.decisions()[0], "{name}: {case}");
                assert_eq!(together.account(position), alone.account(0), "{name}: {case}");
            }
            up(&store, &limits).await;
            sleep(Duration::from_millis(1)).await;
            // No more counts than the share of one of three has room for.
            for (limit, left) in all.iter().zip([90, 30 - cost.min(10), 900 - cost]) {
                assert_eq!(
                    store.store().remaining(limit, "alice"),
                    left,
                    "{}: {case}",
                    limit.name()
                );
            }
        }
    }
}

//! What a store learns, when it is back, of what was admitted without it.
#![allow(clippy::expect_used, clippy::panic, missing_docs, reason = "tests")]

mod common;

use std::time::Duration;

use common::{
    ID, Layered, Mode, PAUSE, UNAVAILABLE, ask, ask_as, burst, checks, down, layered_with, up,
};
use ratelimit_core::{
    Batch, ErrorKind, Limit, ManualClock, OnOutage, Op, Policy, Store, SyncStore,
};
use ratelimit_layers::{BreakerState, OnRecovery};
use tokio::time::{advance, sleep, timeout};

fn local() -> [Limit<Policy>; 1] {
    [burst(OnOutage::Local)]
}

/// A fallback that charges on recovery.
fn charging(limits: &[Limit<Policy>]) -> (Layered, ManualClock) {
    layered_with(limits, |settings| settings.on_recovery(OnRecovery::Charge))
}

/// Time for the task, which never waits for the clock while the store answers.
async fn settle() {
    sleep(Duration::from_millis(1)).await;
}

/// How many keys are to be charged, how many charges are forgotten, and what Alice has left in the store.
fn recovered(store: &Layered, limits: &[Limit<Policy>]) -> (usize, u64, u64) {
    let left = store.store().left(&limits[0], "alice");
    (store.pending_charges(), store.forgotten_charges(), left)
}

#[tokio::test(start_paused = true)]
async fn it_is_charged_or_forgotten_by_choice() {
    for (choice, left) in [(OnRecovery::Charge, [48, 57]), (OnRecovery::Forget, [60, 60])] {
        let limits = local();
        let (store, _) = layered_with(&limits, |settings| settings.on_recovery(choice));
        down(&store, &limits).await;
        for _ in 0..4 {
            assert!(ask(&store, &limits, 3).await.allowed());
        }
        assert!(ask_as(&store, &limits, "bob", 3).await.allowed());
        assert!(!ask_as(&store, &limits, "bob", 18).await.allowed());
        up(&store, &limits).await;
        settle().await;
        let told = ["alice", "bob"].map(|key| store.store().left(&limits[0], key));
        assert_eq!(told, left, "{choice:?}");
        assert_eq!((store.pending_charges(), store.forgotten_charges()), (0, 0));
    }
}

#[tokio::test(start_paused = true)]
async fn only_what_still_counts_is_charged() {
    let limits = local();
    let (store, clock) = charging(&limits);
    down(&store, &limits).await;
    assert!(ask(&store, &limits, 20).await.allowed());
    // The share refills at 20 a minute.
    clock.advance(Duration::from_secs(30));
    up(&store, &limits).await;
    settle().await;
    assert_eq!(recovered(&store, &limits), (0, 0, 50));
}

#[tokio::test(start_paused = true)]
async fn refunds_are_taken_off_and_ids_are_left_out() {
    let limits = local();
    let (store, _) = charging(&limits);
    down(&store, &limits).await;
    assert!(ask(&store, &limits, 10).await.allowed());
    let back = checks(&limits, 4);
    let refund = Batch::one(&back[0]).op(Op::Refund);
    assert!(store.apply(&refund).await.expect("refunds").allowed());
    let reserve = Batch::one(&back[0]).id(ID);
    assert!(store.apply(&reserve).await.expect("reserves").allowed());
    up(&store, &limits).await;
    settle().await;
    assert_eq!(recovered(&store, &limits), (0, 0, 54));
}

#[tokio::test(start_paused = true)]
async fn charges_are_bounded_and_those_without_a_place_are_counted() {
    let limits = local();
    let (store, _) =
        layered_with(&limits, |settings| settings.on_recovery(OnRecovery::Charge).capacity(2));
    down(&store, &limits).await;
    for key in ["a", "b", "c"] {
        assert!(ask_as(&store, &limits, key, 1).await.allowed());
    }
    assert_eq!((store.pending_charges(), store.forgotten_charges()), (2, 1));
}

#[tokio::test(start_paused = true)]
async fn a_charge_that_may_have_arrived_is_not_sent_again_and_one_that_did_not_is() {
    for (mode, left, forgotten) in [
        (Mode::ChargesAndHangs, 58, 1),
        (UNAVAILABLE, 58, 0),
        (Mode::Fails(ErrorKind::Unsupported), 60, 1),
    ] {
        let limits = local();
        let (store, _) = charging(&limits);
        down(&store, &limits).await;
        assert!(ask(&store, &limits, 2).await.allowed());
        up(&store, &limits).await;
        // The store fails again before the task runs.
        store.store().set(mode);
        sleep(Duration::from_millis(500)).await;
        store.store().set(Mode::Answers);
        sleep(PAUSE * 2).await;
        assert_eq!(recovered(&store, &limits), (0, forgotten, left), "{mode:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_admitted_locally_while_the_breaker_stays_closed_is_charged_by_the_next_answer() {
    let limits = local();
    let (store, _) = charging(&limits);
    store.store().set(UNAVAILABLE);
    assert!(ask(&store, &limits, 3).await.allowed());
    assert_eq!(recovered(&store, &limits), (1, 0, 60));
    store.store().set(Mode::Answers);
    assert!(ask_as(&store, &limits, "bob", 1).await.allowed());
    assert_eq!(store.breaker(), BreakerState::Closed);
    settle().await;
    assert_eq!(recovered(&store, &limits), (0, 0, 57));
}

#[tokio::test(start_paused = true)]
async fn an_answer_without_waiting_starts_the_recovery() {
    type Ask = fn(&Layered, &Limit<Policy>);
    let one: Ask = |store, limit| {
        let _ = store.acquire_now(limit, "bob", 1).expect("decides");
    };
    let several: Ask = |store, limit| {
        store.acquire_each_now(limit, &["bob", "carol"], 1, |_, said| {
            let _ = said.expect("decides");
        });
    };
    for (nth, ask_now) in [one, several].into_iter().enumerate() {
        for opens in [false, true] {
            let limits = local();
            let (store, _) = charging(&limits);
            if opens {
                down(&store, &limits).await;
            }
            store.store().set(UNAVAILABLE);
            assert!(ask(&store, &limits, 3).await.allowed());
            store.store().set(Mode::Answers);
            advance(PAUSE).await;
            ask_now(&store, &limits[0]);
            settle().await;
            assert_eq!(recovered(&store, &limits), (0, 0, 57), "{nth}, it opens: {opens}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_the_store_may_have_charged_is_not_charged_once_more() {
    let limits = local();
    let (store, _) = charging(&limits);
    store.store().set(Mode::ChargesAndHangs);
    for _ in 0..8 {
        assert!(ask(&store, &limits, 1).await.allowed());
    }
    // Five calls had no answer, and the store has charged them. The breaker kept three from it.
    assert_eq!(recovered(&store, &limits), (1, 0, 55));
    up(&store, &limits).await;
    settle().await;
    assert_eq!(recovered(&store, &limits), (0, 0, 52));
}

#[tokio::test(start_paused = true)]
async fn a_recovery_that_is_kept_and_not_polled_holds_up_no_other() {
    let limits = local();
    let (store, _) = charging(&limits);
    down(&store, &limits).await;
    assert!(ask(&store, &limits, 2).await.allowed());
    up(&store, &limits).await;
    // Polled once, before the task: it waits for a charge that is never answered.
    store.store().set(Mode::Hangs);
    let kept = store.clone();
    let mut kept = Box::pin(kept.charge_pending());
    assert!(timeout(Duration::from_millis(1), &mut kept).await.is_err());
    store.store().set(Mode::Answers);
    assert!(ask_as(&store, &limits, "bob", 1).await.allowed());
    down(&store, &limits).await;
    assert!(ask_as(&store, &limits, "bob", 3).await.allowed());
    up(&store, &limits).await;
    settle().await;
    assert_eq!(store.pending_charges(), 0);
    assert_eq!(store.store().left(&limits[0], "bob"), 56);
    drop(kept);
}

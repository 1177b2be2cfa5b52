//! What a store learns, when it is back, of what was admitted without it.
#![allow(clippy::expect_used, clippy::panic, missing_docs, reason = "tests")]

mod common;

use std::time::Duration;

use common::{ID, Layered, Mode, checks, layered_with, limit};
use ratelimit_core::{Batch, Check, ErrorKind, Limit, OnOutage, Op, Policy, Store};
use ratelimit_layers::{BreakerState, OnRecovery};
use tokio::time::{advance, sleep};

const PAUSE: Duration = Duration::from_secs(1);

fn burst() -> Limit<Policy> {
    limit("burst", "gcra 60/h burst 60", OnOutage::Local)
}

async fn ask(store: &Layered, limit: &Limit<Policy>, key: &str, cost: u64) -> bool {
    store.apply(&Batch::one(&Check { limit, key, cost })).await.expect("decides").allowed()
}

async fn down(store: &Layered, limit: &Limit<Policy>) {
    store.store().set(Mode::Fails(ErrorKind::Unavailable));
    for _ in 0..5 {
        assert!(ask(store, limit, "nobody", 0).await);
    }
    assert_eq!(store.breaker(), BreakerState::Open);
}

async fn up(store: &Layered, limit: &Limit<Policy>) {
    store.store().set(Mode::Answers);
    advance(PAUSE).await;
    assert!(ask(store, limit, "nobody", 0).await);
    assert_eq!(store.breaker(), BreakerState::Closed);
    // Time for the task, which never waits for the clock while the store answers.
    sleep(Duration::from_millis(1)).await;
}

#[tokio::test(start_paused = true)]
async fn it_is_charged_or_forgotten_by_choice() {
    for (choice, left) in [(OnRecovery::Charge, [48, 57]), (OnRecovery::Forget, [60, 60])] {
        let limit = burst();
        let (store, _) =
            layered_with(std::slice::from_ref(&limit), |settings| settings.on_recovery(choice));
        down(&store, &limit).await;
        for _ in 0..4 {
            assert!(ask(&store, &limit, "alice", 3).await);
        }
        assert!(ask(&store, &limit, "bob", 3).await);
        assert!(!ask(&store, &limit, "bob", 18).await);
        up(&store, &limit).await;
        let told = ["alice", "bob"].map(|key| store.store().left(&limit, key));
        assert_eq!(told, left, "{choice:?}");
        assert_eq!((store.pending_charges(), store.forgotten_charges()), (0, 0));
    }
}

#[tokio::test(start_paused = true)]
async fn only_what_still_counts_is_charged() {
    let limit = burst();
    let settings = |settings: ratelimit_layers::Builder| settings.on_recovery(OnRecovery::Charge);
    let (store, clock) = layered_with(std::slice::from_ref(&limit), settings);
    down(&store, &limit).await;
    assert!(ask(&store, &limit, "alice", 20).await);
    // The share refills at 20 an hour.
    clock.advance(Duration::from_secs(1_800));
    up(&store, &limit).await;
    assert_eq!(store.store().left(&limit, "alice"), 50);
}

#[tokio::test(start_paused = true)]
async fn refunds_are_taken_off_and_ids_are_left_out() {
    let limit = burst();
    let settings = |settings: ratelimit_layers::Builder| settings.on_recovery(OnRecovery::Charge);
    let (store, _) = layered_with(std::slice::from_ref(&limit), settings);
    down(&store, &limit).await;
    assert!(ask(&store, &limit, "alice", 10).await);
    let limits = [limit.clone()];
    let back = checks(&limits, 4);
    let refund = Batch::one(&back[0]).op(Op::Refund);
    assert!(store.apply(&refund).await.expect("refunds").allowed());
    let reserve = Batch::one(&back[0]).id(ID);
    assert!(store.apply(&reserve).await.expect("reserves").allowed());
    up(&store, &limit).await;
    assert_eq!(store.store().left(&limit, "alice"), 54);
}

#[tokio::test(start_paused = true)]
async fn charges_are_bounded_and_those_without_a_place_are_counted() {
    let limit = burst();
    let settings =
        |settings: ratelimit_layers::Builder| settings.on_recovery(OnRecovery::Charge).capacity(2);
    let (store, _) = layered_with(std::slice::from_ref(&limit), settings);
    down(&store, &limit).await;
    for key in ["a", "b", "c"] {
        assert!(ask(&store, &limit, key, 1).await);
    }
    assert_eq!((store.pending_charges(), store.forgotten_charges()), (2, 1));
}

#[tokio::test(start_paused = true)]
async fn a_charge_that_may_have_arrived_is_not_sent_again_and_one_that_did_not_is() {
    let limit = burst();
    let settings = |settings: ratelimit_layers::Builder| settings.on_recovery(OnRecovery::Charge);
    for (mode, left, forgotten) in [
        (Mode::ChargesAndHangs, 58, 1),
        (Mode::Fails(ErrorKind::Unavailable), 58, 0),
        (Mode::Fails(ErrorKind::Unsupported), 60, 1),
    ] {
        let (store, _) = layered_with(std::slice::from_ref(&limit), settings);
        down(&store, &limit).await;
        assert!(ask(&store, &limit, "alice", 2).await);
        store.store().set(Mode::Answers);
        advance(PAUSE).await;
        assert!(ask(&store, &limit, "nobody", 0).await);
        // The store fails again before the task runs.
        store.store().set(mode);
        sleep(Duration::from_millis(500)).await;
        store.store().set(Mode::Answers);
        sleep(PAUSE * 2).await;
        assert_eq!(store.store().left(&limit, "alice"), left, "{mode:?}");
        assert_eq!((store.pending_charges(), store.forgotten_charges()), (0, forgotten));
    }
}

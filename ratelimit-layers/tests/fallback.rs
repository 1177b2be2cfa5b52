//! What a fallback decides while its store hangs, fails and comes back, on paused time.
#![allow(clippy::expect_used, clippy::panic, missing_docs, reason = "tests")]

mod common;

use std::time::Duration;

use common::{
    BEGIN, ID, Layered, Mode, PAUSE, Scripted, UNAVAILABLE, ask, burst, checks, down, layered,
    layered_with, limit, nodes, up,
};
use ratelimit_core::{
    Batch, Check, EntryStore, ErrorKind, Limit, Limits, ManualClock, Now, OnOutage, Op, Policy,
    RateLimiter, Reservation, Store, StoreError, SyncStore,
};
use ratelimit_layers::{BreakerState, Fallback, FallbackError, OnRecovery, OutageCount};
use tokio::time::{Instant, advance, timeout};

const DEADLINE: Duration = Duration::from_millis(100);

fn counted(store: &Layered) -> Vec<(OnOutage, u64, u64, u64, u64)> {
    let all = store.outage_counts().into_iter();
    all.map(|OutageCount { choice, allowed, denied, spared, undetermined, .. }| {
        (choice, allowed, denied, spared, undetermined)
    })
    .collect()
}

#[tokio::test(start_paused = true)]
async fn while_the_store_answers_it_decides() {
    let limits = [burst(OnOutage::Closed)];
    let (store, _) = layered(&limits);
    for left in (0..60).rev() {
        assert_eq!(ask(&store, &limits, 1).await.remaining(), left);
    }
    assert!(!ask(&store, &limits, 1).await.allowed());
    assert_eq!((store.store().calls(), counted(&store)), (61, vec![]));
}

#[tokio::test(start_paused = true)]
async fn while_the_store_hangs_a_handful_of_calls_wait_and_no_more() {
    let limits = [burst(OnOutage::Local)];
    let (store, _) = layered(&limits);
    store.store().set(Mode::Hangs);
    let begin = Instant::now();
    for nth in 1..=5 {
        assert!(ask(&store, &limits, 1).await.allowed());
        assert_eq!(begin.elapsed(), DEADLINE * nth);
    }
    assert_eq!(store.breaker(), BreakerState::Open);
    for _ in 0..100 {
        let _ = ask(&store, &limits, 1).await;
    }
    assert_eq!(begin.elapsed(), DEADLINE * 5);
    assert_eq!(store.store().calls(), 5);
    // The share of one node of three.
    assert_eq!(counted(&store), [(OnOutage::Local, 20, 85, 0, 5)]);
}

#[tokio::test(start_paused = true)]
async fn no_setting_is_too_long_for_a_clock() {
    let limits = [burst(OnOutage::Local), burst(OnOutage::Closed)];
    let (store, _) = layered_with(&limits, |settings| {
        settings.deadline(Duration::MAX).probe_after(Duration::MAX).on_recovery(OnRecovery::Charge)
    });
    assert!(ask(&store, &limits[..1], 1).await.allowed());
    down(&store, &limits).await;
    assert!(ask(&store, &limits[..1], 1).await.allowed());
    let wait = ask(&store, &limits, 1).await.retry_after().expect("a probe, some day");
    assert!(wait > Duration::from_secs(86_400), "{wait:?}");
    assert_eq!(store.pending_charges(), 1);
    store.charge_pending().await;
    advance(Duration::from_secs(400 * 86_400)).await;
    store.store().set(Mode::Answers);
    assert!(ask(&store, &limits, 1).await.allowed());
}

#[tokio::test(start_paused = true)]
async fn a_request_waits_once_however_many_shadow_limits_it_has() {
    let (enforced, shadows) = (
        burst(OnOutage::Local),
        ["one", "two"].map(|name| limit(name, "gcra 60/m burst 60", OnOutage::Local).shadow()),
    );
    let [one, two] = shadows;
    for limits in [vec![enforced, one.clone(), two.clone()], vec![one, two]] {
        let (store, _) = layered(&limits);
        let all = Limits::new(limits.clone()).expect("limits");
        let limiter = RateLimiter::new(all.clone(), store);
        limiter.store().store().set(Mode::Hangs);
        let begin = Instant::now();
        let verdict = limiter.check("alice").await.expect("decides");
        assert!(verdict.allowed());
        assert_eq!((begin.elapsed(), limiter.store().store().calls()), (DEADLINE, 1));
        // The shadow limits are decided, too, and counted.
        assert_eq!(verdict.shadow_decisions().len(), 2);
        assert_eq!(limiter.store().outage_counts().len(), limits.len());

        // A store without a fallback fails once.
        let bare = RateLimiter::new(all, Scripted::new(&ManualClock::new(BEGIN)));
        bare.store().set(UNAVAILABLE);
        let _ = bare.check("alice").await;
        assert_eq!(bare.store().calls(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn one_probe_at_a_time_reaches_a_store_that_hangs() {
    let limits = [burst(OnOutage::Local)];
    let (store, _) = layered(&limits);
    down(&store, &limits).await;
    store.store().set(Mode::Hangs);
    for _ in 0..3 {
        advance(PAUSE).await;
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..50 {
            let (store, limits) = (store.clone(), limits.clone());
            tasks.spawn(async move {
                let _ = ask(&store, &limits, 1).await;
            });
        }
        while tasks.join_next().await.is_some() {}
        assert_eq!((store.store().calls(), store.store().most_inside()), (1, 1));
        assert_eq!(store.breaker(), BreakerState::Open);
    }
    up(&store, &limits).await;
    assert_eq!(ask(&store, &limits, 1).await.limit(), 60);
}

#[tokio::test(start_paused = true)]
async fn each_limit_decides_by_its_choice() {
    for (choice, allowed, left) in
        [(OnOutage::Open, true, 59), (OnOutage::Closed, false, 0), (OnOutage::Local, true, 19)]
    {
        let limits = [burst(choice)];
        let (store, _) = layered(&limits);
        down(&store, &limits).await;
        let verdict = ask(&store, &limits, 1).await;
        assert_eq!((verdict.allowed(), verdict.remaining()), (allowed, left), "{choice:?}");
        if choice == OnOutage::Closed {
            assert_eq!(verdict.retry_after(), Some(PAUSE));
        }
        assert_eq!(store.store().calls(), 0);
        let count = (choice, u64::from(allowed), u64::from(!allowed), 0, 0);
        assert_eq!(counted(&store), [count]);
    }
}

#[tokio::test(start_paused = true)]
async fn in_a_batch_closed_limits_refuse_else_local_ones_decide() {
    let all = [burst(OnOutage::Open), burst(OnOutage::Local), burst(OnOutage::Closed)];
    let (store, _) = layered(&all);
    down(&store, &all).await;

    let refused = ask(&store, &all, 1).await;
    let allowed: Vec<_> = refused.decisions().iter().map(|decision| decision.allowed).collect();
    assert_eq!((refused.allowed(), &*allowed), (false, &[true, true, false][..]));
    // A denial charges nothing.
    assert_eq!(refused.decisions()[1].remaining, 20);

    let two = &all[..2];
    let local = ask(&store, two, 20).await;
    assert!(local.allowed());
    assert_eq!(local.decisions().iter().map(|d| d.remaining).collect::<Vec<_>>(), [40, 0]);
    let local = ask(&store, two, 1).await;
    assert_eq!(local.denied_by().collect::<Vec<_>>(), [1]);
    assert_eq!(local.retry_after(), Some(Duration::from_secs(3)));
    let counts = [
        (OnOutage::Closed, 0, 1, 0, 0),
        (OnOutage::Local, 1, 1, 1, 0),
        (OnOutage::Open, 1, 0, 2, 0),
    ];
    assert_eq!(counted(&store), counts);
}

#[tokio::test(start_paused = true)]
async fn attempts_are_charged_locally_when_a_closed_limit_refuses_them() {
    let all = [
        limit("tries", "fixed-window 30/h count attempts", OnOutage::Local),
        burst(OnOutage::Closed),
    ];
    let (store, _) = layered(&all);
    down(&store, &all).await;
    let left: Vec<_> = [ask(&store, &all, 1).await, ask(&store, &all, 1).await]
        .iter()
        .map(|verdict| verdict.decisions()[0].remaining)
        .collect();
    assert_eq!(left, [9, 8]);
}

#[tokio::test(start_paused = true)]
async fn errors_of_a_store_that_is_there_are_returned_and_do_not_open_the_breaker() {
    let limits = [burst(OnOutage::Open)];
    let (store, _) = layered(&limits);
    let checks = checks(&limits, 1);
    for kind in [
        ErrorKind::Contended,
        ErrorKind::CrossSlot,
        ErrorKind::Unsupported,
        ErrorKind::Corrupt,
        ErrorKind::Invalid,
        ErrorKind::Config,
    ] {
        store.store().set(Mode::Fails(kind));
        for _ in 0..10 {
            let error = store.apply(&Batch::one(&checks[0])).await.expect_err("fails");
            assert!(matches!(error, FallbackError::Store(_)) && error.kind() == kind);
        }
        assert_eq!(store.breaker(), BreakerState::Closed, "{kind:?}");
    }
    assert_eq!(counted(&store), []);
    // A request that no store can decide is refused during an outage, too.
    down(&store, &limits).await;
    let settle = Batch::one(&checks[0]).op(Op::Settle);
    let refused = store.apply(&settle).await.expect_err("no id");
    assert_eq!(refused.kind(), ErrorKind::Invalid);
}

#[tokio::test(start_paused = true)]
async fn what_was_sent_without_an_answer_is_counted_as_undetermined() {
    let limits = [burst(OnOutage::Local)];
    let (store, _) = layered(&limits);
    store.store().set(Mode::ChargesAndHangs);
    for _ in 0..8 {
        assert!(ask(&store, &limits, 1).await.allowed());
    }
    assert_eq!(counted(&store), [(OnOutage::Local, 8, 0, 0, 5)]);
    // At most the cost of each of these is charged twice.
    assert_eq!(store.store().left(&limits[0], "alice"), 55);
}

#[tokio::test(start_paused = true)]
async fn an_operation_that_only_the_store_can_do_is_an_error() {
    let limits = [burst(OnOutage::Local)];
    let (store, _) = layered(&limits);
    let checks = checks(&limits, 5);
    let batch = Batch::one(&checks[0]);
    assert!(store.apply(&batch.id(ID)).await.expect("decides").allowed());
    down(&store, &limits).await;
    for op in [Op::Settle, Op::Renew, Op::Reset] {
        let error = store.apply(&batch.id(ID).op(op)).await.expect_err("not here");
        assert!(matches!(error, FallbackError::BreakerOpen { .. }), "{op}: {error}");
    }
    up(&store, &limits).await;
    assert!(store.apply(&batch.id(ID).op(Op::Settle)).await.expect("settles").allowed());

    // What may have been forced is not forced once more, and the caller learns of it.
    store.store().set(Mode::ChargesAndHangs);
    let error = store.apply(&batch.op(Op::Force)).await.expect_err("no answer");
    assert_eq!(error.kind(), ErrorKind::Indeterminate);
}

#[tokio::test(start_paused = true)]
async fn a_reservation_settles_where_it_was_made() {
    for choice in [OnOutage::Local, OnOutage::Open] {
        let limits = [burst(choice)];
        let (store, _) = layered(&limits);
        let (reserved, settled) = (checks(&limits, 10), checks(&limits, 4));
        let reserve = Batch::one(&reserved[0]).id(ID);
        let settle = Batch::one(&settled[0]).id(ID).op(Op::Settle);
        down(&store, &limits).await;
        assert!(store.apply(&reserve).await.expect("decides").allowed());
        up(&store, &limits).await;

        // Repeated, it is done once; the store never hears of it.
        assert!(store.apply(&reserve).await.expect("decides").allowed());
        for _ in 0..2 {
            let verdict = store.apply(&settle).await.expect("settles");
            assert!(verdict.allowed());
            if choice == OnOutage::Local {
                assert_eq!(verdict.remaining(), 16);
            }
        }
        assert_eq!(store.store().calls(), 0);
        assert_eq!(store.store().left(&limits[0], "alice"), 60);
        // The same id of another key is another reservation.
        let other = Check { key: "bob", ..reserved[0] };
        assert!(store.apply(&Batch::one(&other).id(ID)).await.expect("decides").allowed());
        assert_eq!(store.store().left(&limits[0], "bob"), 50);
    }
}

#[tokio::test(start_paused = true)]
async fn a_denied_reservation_leaves_no_id_behind() {
    let limits = [burst(OnOutage::Local)];
    let (store, _) = layered(&limits);
    down(&store, &limits).await;
    let (much, little) = (checks(&limits, 21), checks(&limits, 1));
    let much = store.apply(&Batch::one(&much[0]).id(ID)).await;
    assert!(!much.expect("decides").allowed());
    up(&store, &limits).await;
    assert!(store.apply(&Batch::one(&little[0]).id(ID)).await.expect("decides").allowed());
    assert_eq!(store.store().left(&limits[0], "alice"), 59);
}

#[tokio::test(start_paused = true)]
async fn ids_without_the_store_are_bounded() {
    let limits = [burst(OnOutage::Open)];
    let (store, _) = layered_with(&limits, |settings| settings.capacity(2));
    down(&store, &limits).await;
    let checks = checks(&limits, 1);
    let reserve = |id: u128| Batch::one(&checks[0]).id(ratelimit_core::ReservationId::new(id));
    for id in [1, 2, 1, 2] {
        assert!(store.apply(&reserve(id)).await.expect("decides").allowed());
    }
    let full = store.apply(&reserve(3)).await.expect_err("full");
    assert!(matches!(full, FallbackError::Ids { most: 2 }), "{full}");
    let drawn = store.apply(&reserve(3).settled_once()).await.expect("decides");
    assert!(drawn.allowed() && drawn.is_unrecorded());
    // An hour later both are forgotten.
    advance(Duration::from_secs(3_600)).await;
    down(&store, &limits).await;
    assert!(store.apply(&reserve(3)).await.expect("decides").allowed());
}

#[tokio::test(start_paused = true)]
async fn an_id_that_was_drawn_is_forgotten_soon_after_its_settlement() {
    let limits = [burst(OnOutage::Open)];
    let (store, _) = layered_with(&limits, |settings| settings.capacity(1));
    down(&store, &limits).await;
    let checks = checks(&limits, 1);
    for id in (1..10).map(ratelimit_core::ReservationId::new) {
        let reserve = Batch::one(&checks[0]).id(id).settled_once();
        let reserved = store.apply(&reserve).await.expect("decides");
        assert!(reserved.allowed() && !reserved.is_unrecorded());
        let _ = store.apply(&reserve.op(Op::Settle)).await.expect("settles");
        advance(Duration::from_micros(Reservation::REPEAT_US)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_given_time_decides_locally_as_in_the_store() {
    let limits = [burst(OnOutage::Local)];
    let (store, _) = layered(&limits);
    down(&store, &limits).await;
    let checks = checks(&limits, 20);
    let at = |seconds: u64| {
        let now = Now::At(BEGIN.saturating_add_us(seconds * 1_000_000));
        Batch::one(&checks[0]).now(now)
    };
    let mut allowed = Vec::new();
    for seconds in [0, 59, 60, 61, 120] {
        allowed.push(store.apply(&at(seconds)).await.expect("decides").allowed());
    }
    assert_eq!(allowed, [true, false, true, false, true]);
}

#[tokio::test(start_paused = true)]
async fn without_waiting_the_store_s_errors_count() {
    let limits = [burst(OnOutage::Local)];
    let (store, _) = layered(&limits);
    assert_eq!(store.acquire_now(&limits[0], "alice", 1).expect("decides").limit(), 60);
    store.store().set(UNAVAILABLE);
    for _ in 0..5 {
        assert_eq!(store.acquire_now(&limits[0], "alice", 1).expect("decides").limit(), 20);
    }
    store.store().calls();
    let mut left = Vec::new();
    store.acquire_each_now(&limits[0], &["alice", "bob", "alice"], 1, |place, said| {
        left.push((place, said.expect("decides").remaining()));
    });
    assert_eq!(left, [(0, 14), (1, 19), (2, 13)]);
    let checks = checks(&limits, 1);
    assert_eq!(store.apply_now(&Batch::one(&checks[0])).expect("decides").remaining(), 12);
    assert_eq!(store.store().calls(), 0);
    store.store().set(Mode::Answers);
    advance(PAUSE).await;
    assert_eq!(store.acquire_now(&limits[0], "alice", 1).expect("decides").limit(), 60);
    assert_eq!(store.breaker(), BreakerState::Closed);
}

#[tokio::test(start_paused = true)]
async fn several_keys_at_once_are_decided_one_by_one_while_the_store_fails() {
    let limits = [burst(OnOutage::Local)];
    let (store, _) = layered(&limits);
    store.store().set(UNAVAILABLE);
    let mut left = Vec::new();
    store.acquire_each_now(&limits[0], &["a", "b", "a", "a", "b", "c", "a"], 1, |_, said| {
        left.push(said.expect("decides").remaining());
    });
    assert_eq!(left, [19, 19, 18, 17, 18, 19, 16]);
    assert_eq!(store.breaker(), BreakerState::Open);
}

#[tokio::test(start_paused = true)]
async fn entries_of_several_limits_wait_for_one_deadline() {
    let limits = ["one", "two", "three"].map(|name| limit(name, "window-log 9/m", OnOutage::Local));
    let (store, _) = layered(&limits);
    let limiter = RateLimiter::new(Limits::new(limits).expect("limits"), store);
    let _ = limiter.check("alice").await.expect("decides");
    limiter.store().store().set(Mode::Hangs);
    let begin = Instant::now();
    let entries = limiter.entries("alice").await.expect("lists");
    let names: Vec<_> = entries.iter().map(|(name, _)| *name).collect();
    assert_eq!(names, ["local.one", "local.two", "local.three"]);
    assert_eq!(begin.elapsed(), DEADLINE);
}

#[tokio::test(start_paused = true)]
async fn entries_are_those_of_the_local_limit_while_the_store_is_away() {
    let local = limit("log", "window-log 9/h", OnOutage::Local);
    let open = limit("log", "window-log 9/h", OnOutage::Open);
    let limits = [local.clone()];
    let (store, _) = layered(&[local.clone(), open.clone()]);
    down(&store, &limits).await;
    assert!(ask(&store, &limits, 1).await.allowed());
    let entries = store.entries(&local, "alice", Now::Store).await.expect("lists");
    assert_eq!(entries.len(), 1);
    assert!(store.entries(&open, "alice", Now::Store).await.is_err());
    up(&store, &limits).await;
    assert!(store.entries(&local, "alice", Now::Store).await.expect("lists").is_empty());
}

#[test]
fn limits_without_a_choice_or_a_share_are_refused_by_name() {
    let clock = ManualClock::new(BEGIN);
    let build = |limit: Limit<Policy>, nodes: Option<std::num::NonZeroU64>| {
        let limits = Limits::new([limit]).expect("limits");
        let builder = Fallback::builder();
        let builder = match nodes {
            Some(nodes) => builder.nodes(nodes),
            None => builder,
        };
        let built = builder.build(Scripted::new(&clock), &limits);
        built.err().map(|error| (error.limit().map(str::to_owned), error.to_string()))
    };
    let undecided = Limit::new("undecided", "gcra 60/m burst 60".parse().expect("a policy"));
    let (name, told) = build(undecided.expect("a name"), Some(nodes(3))).expect("no choice");
    assert_eq!(name.as_deref(), Some("undecided"), "{told}");
    let (name, told) = build(burst(OnOutage::Local), None).expect("no nodes");
    assert!(name.is_some() && told.contains("nodes(n)"), "{told}");
    let small = limit("small", "fixed-window 2/m", OnOutage::Local);
    let (name, told) = build(small, Some(nodes(3))).expect("no share");
    assert!(name.is_some(), "{told}");
    assert!(build(burst(OnOutage::Open), None).is_none());
}

#[tokio::test(start_paused = true)]
async fn a_probe_that_is_kept_and_not_polled_holds_up_no_other() {
    let limits = [burst(OnOutage::Local)];
    let (store, _) = layered(&limits);
    down(&store, &limits).await;
    advance(PAUSE).await;
    store.store().set(Mode::Hangs);
    let checks = checks(&limits, 1);
    let batch = Batch::new(&checks).expect("a batch");
    let mut kept = Box::pin(store.apply(&batch));
    assert!(timeout(Duration::from_millis(1), &mut kept).await.is_err());
    assert_eq!(store.breaker(), BreakerState::HalfOpen);
    store.store().set(Mode::Answers);
    advance(DEADLINE).await;
    assert!(ask(&store, &limits, 1).await.allowed());
    assert_eq!(store.breaker(), BreakerState::Closed);
    drop(kept);
    assert_eq!(store.breaker(), BreakerState::Closed);
}

#[tokio::test(start_paused = true)]
async fn a_limiter_whose_limits_say_nothing_of_outages_is_refused_before_there_is_one() {
    let (store, _) = layered(&[burst(OnOutage::Open)]);
    let silent = Limit::new("silent", *burst(OnOutage::Open).algorithm()).expect("a name");
    let check = Check { limit: &silent, key: "alice", cost: 1 };
    let batch = Batch::one(&check);
    let refused = [
        store.apply(&batch).await.expect_err("no choice"),
        store.apply_now(&batch).expect_err("no choice"),
        store.acquire_now(&silent, "alice", 1).expect_err("no choice"),
    ];
    for error in refused {
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains("silent") && error.to_string().contains("on_outage"));
    }
    store.acquire_each_now(&silent, &["alice", "bob"], 1, |_, said| {
        assert_eq!(said.expect_err("no choice").kind(), ErrorKind::Config);
    });
    assert_eq!(store.store().calls(), 0);
}

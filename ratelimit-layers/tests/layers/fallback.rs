//! What a fallback decides while its store hangs, fails and comes back, on paused time.

use std::time::Duration;

use ratelimit_core::store::{Batch, Check, LogStore, Now, Op, Reservation};
use ratelimit_core::{
    AnyAlgorithm, ErrorKind, Limit, ManualClock, OnOutage, RateLimiter, ReservationId, Store,
    StoreError as _, Verdict,
};
use ratelimit_layers::{
    BreakerState, Fallback, FallbackBuilder, FallbackError, OnRecovery, OutageCount,
};
use tokio::time::{Instant, advance, sleep};

use crate::common::{
    BEGIN, Fake, FakeError, ID, Mode, NODES, PAUSE, UNAVAILABLE, ask_all, checks, fallback, limit,
    limits,
};

const DEADLINE: Duration = Duration::from_millis(100);

pub(crate) type Layered = Fallback<Fake, AnyAlgorithm, ManualClock>;

/// A fallback with these settings for these limits, on one of three nodes, and the clock of both
/// its stores.
pub(crate) fn layered_with(
    all: &[Limit<AnyAlgorithm>],
    settings: impl FnOnce(FallbackBuilder) -> FallbackBuilder,
) -> (Layered, ManualClock) {
    let clock = ManualClock::new(BEGIN);
    (fallback(settings(Fallback::builder()), Fake::new(&clock), &clock, all), clock)
}

pub(crate) fn layered_store(limits: &[Limit<AnyAlgorithm>]) -> Layered {
    layered_with(limits, |settings| settings).0
}

/// 60 a minute. The share of one node of three is 20.
pub(crate) fn burst(choice: OnOutage) -> Limit<AnyAlgorithm> {
    limit(choice.name(), "gcra 60/m burst 60").on_outage(choice)
}

/// What the fallback decides about a request of Alice.
pub(crate) async fn ask(store: &Layered, limits: &[Limit<AnyAlgorithm>], cost: u64) -> Verdict {
    ask_all(store, limits, "alice", cost).await
}

async fn peek(store: &Layered, limits: &[Limit<AnyAlgorithm>]) {
    let checks = checks(limits, "alice", 0);
    let peek = Batch::new(&checks).expect("distinct").op(Op::Peek);
    let _ = store.apply(&peek).await.expect("decides");
}

/// Opens the breaker.
pub(crate) async fn down(store: &Layered, limits: &[Limit<AnyAlgorithm>]) {
    store.store().set(UNAVAILABLE);
    for _ in 0..5 {
        peek(store, limits).await;
    }
    assert_eq!(store.breaker(), BreakerState::Open);
    store.store().calls();
}

/// Lets the store answer again, and a probe find out.
pub(crate) async fn up(store: &Layered, limits: &[Limit<AnyAlgorithm>]) {
    store.store().set(Mode::Answers);
    advance(PAUSE).await;
    peek(store, limits).await;
    assert_eq!(store.breaker(), BreakerState::Closed);
    store.store().calls();
}

fn outage_counts(store: &Layered) -> Vec<(OnOutage, [u64; 4])> {
    let all = store.outage_counts().into_iter();
    all.map(|OutageCount { choice, allowed, denied, spared, undetermined, .. }| {
        (choice, [allowed, denied, spared, undetermined])
    })
    .collect()
}

#[tokio::test(start_paused = true)]
async fn while_the_store_hangs_a_handful_of_calls_wait_and_one_probe_at_a_time() {
    let limits = [burst(OnOutage::Local)];
    for mode in [Mode::Hangs, Mode::ChargesAndHangs] {
        let store = layered_store(&limits);
        for left in (40..60).rev() {
            assert_eq!(ask(&store, &limits, 1).await.remaining(), left);
        }
        assert_eq!((store.store().calls(), outage_counts(&store)), (20, vec![]));
        store.store().set(mode);
        let begin = Instant::now();
        for nth in 1..=5 {
            assert!(ask(&store, &limits, 1).await.allowed());
            assert_eq!(begin.elapsed(), DEADLINE * nth);
        }
        for _ in 0..100 {
            let _ = ask(&store, &limits, 1).await;
        }
        assert_eq!((begin.elapsed(), store.breaker()), (DEADLINE * 5, BreakerState::Open));
        assert_eq!(store.store().calls(), 5);
        // The share of one node of three. What was sent and not answered may be charged twice, and
        // nothing else.
        assert_eq!(outage_counts(&store), [(OnOutage::Local, [20, 85, 0, 5])]);
        let charged = if mode == Mode::Hangs { 0 } else { 5 };
        assert_eq!(store.store().remaining(&limits[0], "alice"), 40 - charged);
        for _ in 0..3 {
            advance(PAUSE).await;
            let mut tasks = tokio::task::JoinSet::new();
            for _ in 0..50 {
                let (store, limits) = (store.clone(), limits.clone());
                tasks.spawn(async move { ask(&store, &limits, 1).await.allowed() });
            }
            while tasks.join_next().await.is_some() {}
            assert_eq!(store.store().calls(), 1);
            assert_eq!(store.breaker(), BreakerState::Open);
        }
        up(&store, &limits).await;
        assert_eq!(ask(&store, &limits, 1).await.limit(), 60);
    }
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
    advance(Duration::from_secs(400 * 86_400)).await;
    store.store().set(Mode::Answers);
    assert!(ask(&store, &limits, 1).await.allowed());
}

#[tokio::test(start_paused = true)]
async fn a_request_waits_once_however_many_limits_it_has() {
    let shadow = |name| limit(name, "gcra 60/m burst 60").on_outage(OnOutage::Local).shadow();
    let (enforced, one, two) = (burst(OnOutage::Local), shadow("one"), shadow("two"));
    for all in [vec![enforced, one.clone(), two.clone()], vec![one, two]] {
        let limiter = RateLimiter::new(limits(&all), layered_store(&all));
        limiter.store().store().set(Mode::Hangs);
        let begin = Instant::now();
        let verdict = limiter.check("alice").await.expect("decides");
        assert!(verdict.allowed());
        assert_eq!((begin.elapsed(), limiter.store().store().calls()), (DEADLINE, 1));
        // The shadow limits are decided, too, and counted.
        assert_eq!(verdict.shadow_decisions().len(), 2);
        assert_eq!(limiter.store().outage_counts().len(), all.len());

        // A store without a fallback fails once.
        let bare = RateLimiter::new(limits(&all), Fake::new(&ManualClock::new(BEGIN)));
        bare.store().set(UNAVAILABLE);
        let _ = bare.check("alice").await;
        assert_eq!(bare.store().calls(), 1);
    }
    // Nor does a list of entries wait for each limit.
    let all = ["one", "two", "three"].map(|name| limit(name, "window-log 9/m"));
    let all = all.map(|limit| limit.on_outage(OnOutage::Local));
    let limiter = RateLimiter::new(limits(&all), layered_store(&all));
    limiter.store().store().set(Mode::Hangs);
    let begin = Instant::now();
    assert_eq!(limiter.logged("alice").await.expect("lists").len(), 3);
    assert_eq!(begin.elapsed(), DEADLINE);
}

#[tokio::test(start_paused = true)]
async fn errors_of_a_store_that_is_there_are_returned_and_do_not_open_the_breaker() {
    let limits = [burst(OnOutage::Open)];
    let store = layered_store(&limits);
    let checks = checks(&limits, "alice", 1);
    for kind in [
        ErrorKind::Contended,
        ErrorKind::CrossSlot,
        ErrorKind::Unsupported,
        ErrorKind::Corrupt,
        ErrorKind::Invalid,
        ErrorKind::Ended,
        ErrorKind::Config,
    ] {
        store.store().set(Mode::Fails(kind));
        for _ in 0..10 {
            let error = store.apply(&Batch::one(&checks[0])).await.expect_err("fails");
            assert!(matches!(error, FallbackError::Store(_)) && error.kind() == kind);
        }
        assert_eq!(store.breaker(), BreakerState::Closed, "{kind:?}");
    }
    assert_eq!(outage_counts(&store), []);
    // A request that no store can decide is refused during an outage, too.
    down(&store, &limits).await;
    let settle = Batch::one(&checks[0]).op(Op::Settle);
    assert_eq!(store.apply(&settle).await.expect_err("no id").kind(), ErrorKind::Invalid);
}

#[tokio::test(start_paused = true)]
async fn an_operation_that_only_the_store_can_do_is_an_error() {
    let limits = [burst(OnOutage::Local)];
    let store = layered_store(&limits);
    let checks = checks(&limits, "alice", 5);
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
    for (choice, left) in [(OnOutage::Local, 16), (OnOutage::Open, 60)] {
        let limits = [burst(choice)];
        let store = layered_store(&limits);
        let (reserved, settled) = (checks(&limits, "alice", 10), checks(&limits, "alice", 4));
        let reserve = Batch::one(&reserved[0]).id(ID);
        let settle = Batch::one(&settled[0]).id(ID).op(Op::Settle);
        down(&store, &limits).await;
        assert!(store.apply(&reserve).await.expect("decides").allowed());
        up(&store, &limits).await;

        // Repeated, it is done once; the store never hears of it.
        assert!(store.apply(&reserve).await.expect("decides").allowed());
        for _ in 0..2 {
            let verdict = store.apply(&settle).await.expect("settles");
            assert_eq!((verdict.allowed(), verdict.remaining()), (true, left), "{choice:?}");
        }
        assert_eq!(store.store().calls(), 0);
        assert_eq!(store.store().remaining(&limits[0], "alice"), 60);
        // The same id of another key is another reservation.
        let other = Check { key: "bob", ..reserved[0] };
        assert!(store.apply(&Batch::one(&other).id(ID)).await.expect("decides").allowed());
        assert_eq!(store.store().remaining(&limits[0], "bob"), 50);

        // One that was denied leaves no id behind.
        if choice == OnOutage::Local {
            down(&store, &limits).await;
            let much = Check { key: "carol", cost: 21, ..reserved[0] };
            assert!(!store.apply(&Batch::one(&much).id(ID)).await.expect("decides").allowed());
            up(&store, &limits).await;
            let little = Check { cost: 1, ..much };
            assert!(store.apply(&Batch::one(&little).id(ID)).await.expect("decides").allowed());
            assert_eq!(store.store().remaining(&limits[0], "carol"), 59);
        }
    }
}

/// Whatever the caller was told without the store.
#[tokio::test(start_paused = true)]
async fn an_estimate_whose_answer_was_lost_is_taken_back() {
    for choice in [OnOutage::Closed, OnOutage::Open, OnOutage::Local] {
        for away in [Duration::ZERO, Duration::from_secs(5)] {
            let limits = [burst(choice)];
            let store = layered_store(&limits);
            let checks = checks(&limits, "alice", 10);
            let reserve = Batch::one(&checks[0]).id(ID).settled_once();
            store.store().set(Mode::Hangs);
            store.store().once(Mode::ChargesAndHangs);
            let verdict = store.apply(&reserve).await.expect("decides");
            assert_eq!(verdict.allowed(), choice != OnOutage::Closed);
            assert_eq!(store.store().remaining(&limits[0], "alice"), 50, "{choice:?}");
            sleep(away).await;
            store.store().set(Mode::Answers);
            sleep(Duration::from_secs(4)).await;
            assert_eq!(store.store().remaining(&limits[0], "alice"), 60, "{choice:?}, {away:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn ids_without_the_store_are_bounded() {
    let limits = [burst(OnOutage::Open)];
    let (store, _) = layered_with(&limits, |settings| settings.capacity(2));
    down(&store, &limits).await;
    let checks = checks(&limits, "alice", 1);
    let reserve = |id: u128| Batch::one(&checks[0]).id(ReservationId::new(id));
    for id in [1, 2, 1, 2] {
        assert!(store.apply(&reserve(id)).await.expect("decides").allowed());
    }
    let full = store.apply(&reserve(3)).await.expect_err("full");
    assert!(matches!(full, FallbackError::Ids { most: 2, .. }), "{full}");
    let drawn = store.apply(&reserve(3).settled_once()).await.expect("decides");
    assert!(drawn.allowed() && drawn.is_unrecorded());
    // An hour later both are forgotten; an id that was drawn, soon after its settlement.
    advance(Duration::from_secs(3_600)).await;
    down(&store, &limits).await;
    assert!(store.apply(&reserve(3)).await.expect("decides").allowed());
    for id in 10..20 {
        let reserve = reserve(id).settled_once();
        let reserved = store.apply(&reserve).await.expect("decides");
        assert!(reserved.allowed() && !reserved.is_unrecorded());
        let _ = store.apply(&reserve.op(Op::Settle)).await.expect("settles");
        advance(Duration::from_micros(Reservation::REPEAT_US)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_given_time_decides_locally_as_in_the_store() {
    let limits = [burst(OnOutage::Local)];
    let store = layered_store(&limits);
    down(&store, &limits).await;
    let checks = checks(&limits, "alice", 20);
    for (seconds, allowed) in [(0, true), (59, false), (60, true), (61, false), (120, true)] {
        let now = Now::At(BEGIN.saturating_add_us(seconds * 1_000_000));
        let verdict = store.apply(&Batch::one(&checks[0]).now(now)).await;
        assert_eq!(verdict.expect("decides").allowed(), allowed, "{seconds}");
    }
}

#[tokio::test(start_paused = true)]
async fn entries_are_those_of_the_local_limit_while_the_store_is_away() {
    let [local, open] = [OnOutage::Local, OnOutage::Open]
        .map(|choice| limit(choice.name(), "window-log 9/h").on_outage(choice));
    let limits = [local.clone()];
    let store = layered_store(&[local.clone(), open.clone()]);
    down(&store, &limits).await;
    assert!(ask(&store, &limits, 1).await.allowed());
    let entries = store.logged(&local, "alice", Now::Store).await.expect("lists");
    assert_eq!(entries.len(), 1);
    assert!(store.logged(&open, "alice", Now::Store).await.is_err());
    up(&store, &limits).await;
    assert!(store.logged(&local, "alice", Now::Store).await.expect("lists").is_empty());
}

#[tokio::test]
async fn limits_without_a_choice_or_a_share_are_refused_by_name() {
    let clock = ManualClock::new(BEGIN);
    let silent = limit("silent", "gcra 60/m burst 60");
    let small = limit("small", "fixed-window 2/m").on_outage(OnOutage::Local);
    for (refused, count, told) in [
        (silent.clone(), Some(NODES), "on_outage"),
        (burst(OnOutage::Local), None, "nodes(n)"),
        (small, Some(NODES), "at_least_one"),
    ] {
        let settings = count.into_iter().fold(Fallback::builder(), FallbackBuilder::nodes);
        let built = settings.build(Fake::new(&clock), &limits(std::slice::from_ref(&refused)));
        let error = built.expect_err("refused");
        assert_eq!(error.limit(), Some(refused.name()));
        assert!(error.to_string().contains(told), "{error}");
    }
    // A limiter of other limits over the same store is refused before there is an outage.
    let store = layered_store(&[burst(OnOutage::Open)]);
    let check = Check { limit: &silent, key: "alice", cost: 1 };
    let error: FallbackError<FakeError> =
        store.apply(&Batch::one(&check)).await.expect_err("no choice");
    assert_eq!((error.kind(), store.store().calls()), (ErrorKind::Config, 0));
    assert!(error.to_string().contains("silent") && error.to_string().contains("on_outage"));
}

/// A policy may be replaced during an outage, and two limiters may have limits of one name.
#[tokio::test(start_paused = true)]
async fn a_share_is_that_of_the_limit_which_the_request_has() {
    let numbers = [30, 60, 15, 30].map(|count| {
        let share = limit("l", &format!("fixed-window {count}/h")).on_outage(OnOutage::Local);
        (share, count / 3)
    });
    let store = layered_store(std::slice::from_ref(&numbers[0].0));
    for (limit, due) in &numbers {
        let all = std::slice::from_ref(limit);
        down(&store, all).await;
        assert_eq!(ask_all(&store, all, &due.to_string(), 1).await.limit(), *due);
    }
}

/// Its share is 0 too, among however many nodes, and also where each node would admit at least one.
#[tokio::test(start_paused = true)]
async fn a_limit_at_a_rate_of_0_denies_everything_during_an_outage() {
    for at_least_one in [false, true] {
        let limits = [limit("off", "fixed-window 0/d").on_outage(OnOutage::Local)];
        let settings = |settings: FallbackBuilder| {
            if at_least_one { settings.at_least_one() } else { settings }
        };
        let (store, _clock) = layered_with(&limits, settings);
        let healthy = ask(&store, &limits, 1).await;
        down(&store, &limits).await;
        for verdict in [healthy, ask(&store, &limits, 1).await] {
            assert_eq!((verdict.allowed(), verdict.retry_after()), (false, None));
            assert_eq!((verdict.limit(), verdict.remaining()), (0, 0));
        }
        assert!(ask(&store, &limits, 0).await.allowed());
    }
}

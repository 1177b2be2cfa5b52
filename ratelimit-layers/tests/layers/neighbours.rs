//! Mallory fills what a layer bounds. Alice notices no more than the guide's table of bounds says, and gets no refusal.

use ratelimit_core::store::{Batch, Check};
use ratelimit_core::{Limit, ManualClock, OnOutage, Policy, ReservationId, Source, Store};
use ratelimit_layers::{Allotments, DenialCache, Fallback, Metrics, OnRecovery, TopDenied, Traced};

use crate::common::{BEGIN, Fake, UNAVAILABLE, ask, limit, limits, nodes, recorded, settled};

const ROOM: usize = 16;

fn limit_of_three() -> Limit<Policy> {
    limit("three", "fixed-window 3/d").on_outage(OnOutage::Local)
}

/// Requests of many keys, admitted and denied.
async fn fills<S: Store<Policy>>(store: &S, limit: &Limit<Policy>) {
    for n in 0..20 * ROOM {
        for _ in 0..5 {
            let _ = ask(store, limit, &format!("mallory {n}"), 1).await;
        }
    }
    settled().await;
}

/// Alice is admitted three times and denied then, in so many calls of the store.
async fn admits_three<S: Store<Policy>>(store: &S, fake: &Fake, calls: u64) {
    fake.calls();
    for allowed in [true, true, true, false] {
        assert_eq!(ask(store, &limit_of_three(), "alice", 1).await.allowed(), allowed);
    }
    settled().await;
    assert_eq!(fake.calls(), calls);
}

#[tokio::test(start_paused = true)]
async fn a_denial_that_leaves_a_full_cache_costs_one_more_call() {
    let (clock, limit) = (ManualClock::new(BEGIN), limit_of_three());
    let store = DenialCache::builder().clock(clock.clone()).capacity(ROOM).build(Fake::new(&clock));
    admits_three(&store, store.store(), 4).await;
    assert_eq!(ask(&store, &limit, "alice", 1).await.source(), Source::Cache);
    fills(&store, &limit).await;
    for source in [Source::Store, Source::Cache] {
        let denied = ask(&store, &limit, "alice", 1).await;
        assert!(!denied.allowed() && denied.source() == source);
    }
}

#[tokio::test(start_paused = true)]
async fn an_allotment_that_leaves_a_full_ledger_is_given_back_and_drawn_again() {
    let (clock, daily) = (ManualClock::new(BEGIN), limit("daily", "fixed-window 100/d"));
    let store =
        Allotments::builder().clock(clock.clone()).divisor(1).capacity(1).build(Fake::new(&clock));
    let mut admitted = 0;
    for _ in 0..10 {
        for _ in 0..11 {
            admitted += u64::from(ask(&store, &daily, "alice", 1).await.allowed());
        }
        for n in 0..4 {
            assert!(ask(&store, &daily, &format!("mallory {n}"), 1).await.allowed());
        }
        settled().await;
    }
    assert_eq!((admitted, store.counts().forfeited), (100, 0));
}

#[test]
fn who_fills_what_observers_keep_changes_no_decision_and_no_series() {
    let clock = ManualClock::new(BEGIN);
    let store = Metrics::new(Traced::new(TopDenied::new(Fake::new(&clock), ROOM)));
    let top = store.store().store();
    let series = recorded(|| {
        ratelimit_testkit::block_on(async {
            fills(&store, &limit_of_three()).await;
            admits_three(&store, top.store(), 4).await;
        });
    });
    // The count of a key that replaces another is too high by what it says.
    assert_eq!(top.top(usize::MAX).len(), ROOM);
    let alice = top.top(usize::MAX).into_iter().find(|denied| &*denied.key == "alice");
    let alice = alice.expect("the latest denial is counted");
    assert_eq!(alice.count - alice.over, 1);
    assert!(
        series.keys().all(|(_, labels)| !labels.values().any(|label| label.contains("mallory")))
    );
}

/// Without the store: local keys share a state, an id that a layer drew has no record, and a charge is not made up for.
#[tokio::test(start_paused = true)]
async fn in_an_outage_full_ids_keys_and_charges_refuse_no_request() {
    let (clock, limit) = (ManualClock::new(BEGIN), limit_of_three());
    let settings = Fallback::builder().nodes(nodes(1)).on_recovery(OnRecovery::Charge);
    let settings = settings.capacity(ROOM).clock(clock.clone());
    let store =
        settings.build(Fake::new(&clock), &limits(std::slice::from_ref(&limit))).expect("choices");
    store.store().set(UNAVAILABLE);
    for n in 0..ROOM {
        for id in [n, n + 100] {
            let key = format!("mallory {n}");
            let check = Check { limit: &limit, key: &key, cost: 1 };
            let id = ReservationId::new(id as u128);
            let _ = store.apply(&Batch::one(&check).id(id)).await;
        }
    }
    let check = Check { limit: &limit, key: "alice", cost: 1 };
    let drawn = Batch::one(&check).id(ReservationId::new(7_000)).settled_once();
    let drawn = store.apply(&drawn).await.expect("decides");
    assert!(drawn.allowed() && drawn.is_unrecorded());
    for allowed in [true, true, false] {
        assert_eq!(ask(&store, &limit, "alice", 1).await.allowed(), allowed);
    }
}

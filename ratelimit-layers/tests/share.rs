//! Whatever happens during an outage, a node admits at most its share, and the store at most the limit.
#![allow(clippy::expect_used, clippy::panic, missing_docs, reason = "tests")]

mod common;

use std::time::Duration;

use common::{Layered, Mode, layered_with, limit, nodes};
use proptest::collection::vec;
use proptest::prelude::*;
use ratelimit_core::{Batch, Check, ErrorKind, Limit, ManualClock, OnOutage, Policy, Store};

/// The words of limits, what each admits in an hour, and what a node of three does. None recovers within the test.
const LIMITS: [(&str, u64, u64); 6] = [
    ("gcra 30/d burst 30", 30, 10),
    ("token-bucket 31/d burst 31", 31, 10),
    ("fixed-window 32/d", 32, 10),
    ("sliding-log 30/d", 30, 10),
    ("sliding-counter 30/d", 30, 10),
    ("first-request-window 30/d", 30, 10),
];

#[derive(Clone, Copy, Debug)]
enum Event {
    Ask { key: u8, cost: u64 },
    Mode(Mode),
    Pass(Duration),
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let mode = prop_oneof![
        Just(Mode::Answers),
        Just(Mode::Hangs),
        Just(Mode::ChargesAndHangs),
        Just(Mode::Fails(ErrorKind::Unavailable)),
        Just(Mode::Fails(ErrorKind::Indeterminate)),
    ];
    vec(
        prop_oneof![
            12 => (0..2_u8, 0..4_u64).prop_map(|(key, cost)| Event::Ask { key, cost }),
            1 => mode.prop_map(Event::Mode),
            1 => (0..3_000_u64).prop_map(|ms| Event::Pass(Duration::from_millis(ms))),
        ],
        1..150,
    )
}

/// What each key was admitted: by the store, and without it.
#[derive(Debug, Default)]
struct Admitted([[u64; 2]; 2]);

async fn run(
    (store, clock): (&Layered, &ManualClock),
    limit: &Limit<Policy>,
    events: &[Event],
) -> Admitted {
    let mut admitted = Admitted::default();
    for event in events {
        match *event {
            Event::Mode(mode) => store.store().set(mode),
            Event::Pass(time) => {
                clock.advance(time);
                tokio::time::advance(time).await;
            }
            Event::Ask { key, cost } => {
                let name = ["alice", "bob"][usize::from(key)];
                let check = Check { limit, key: name, cost };
                let before: u64 = decided(store);
                let verdict = store.apply(&Batch::one(&check)).await.expect("decides");
                let without = usize::from(decided(store) > before);
                if verdict.allowed() {
                    admitted.0[usize::from(key)][without] += cost;
                }
            }
        }
    }
    admitted
}

fn decided(store: &Layered) -> u64 {
    store.outage_counts().iter().map(|count| count.allowed + count.denied).sum()
}

/// Runs these events on one of three nodes, or one that thinks that it is alone. Returns what was too much.
fn check(place: usize, count: u64, events: &[Event]) -> Result<(), String> {
    let (words, most, share) = LIMITS[place];
    let limit = limit("l", words, OnOutage::Local);
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_time().start_paused(true).build().expect("a runtime");
    let admitted = runtime.block_on(async {
        let (store, clock) =
            layered_with(std::slice::from_ref(&limit), |settings| settings.nodes(nodes(count)));
        run((&store, &clock), &limit, events).await
    });
    for [by_store, without] in admitted.0 {
        if by_store > most || without > share {
            return Err(format!("{words}: {by_store} by the store, {without} without it"));
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_node_admits_at_most_its_share_without_the_store(
        place in 0..LIMITS.len(),
        events in events(),
    ) {
        prop_assert_eq!(check(place, 3, &events), Ok(()));
    }
}

#[test]
fn a_node_that_takes_the_whole_limit_is_caught() {
    let mut events = vec![Event::Mode(Mode::Hangs)];
    events.extend([Event::Ask { key: 0, cost: 1 }; 40]);
    for (place, limit) in LIMITS.iter().enumerate() {
        assert_eq!(check(place, 3, &events), Ok(()));
        assert!(check(place, 1, &events).is_err(), "{}", limit.0);
    }
}

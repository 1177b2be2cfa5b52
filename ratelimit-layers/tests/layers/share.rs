//! Whatever happens during an outage, a node admits at most its share, and the store at most the limit.

use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;
use ratelimit_core::{ErrorKind, OnOutage};

use crate::common::{Mode, ask, limit, nodes, paused};
use crate::fallback::layered_with;

/// Of each 30 in a time in which none recovers.
const LIMITS: [&str; 6] = [
    "gcra 30/d burst 30",
    "token-bucket 30/d burst 30",
    "fixed-window 30/d",
    "sliding-log 30/d",
    "sliding-counter 30/d",
    "first-request-window 30/d",
];

#[derive(Clone, Copy, Debug)]
enum Event {
    Ask { key: usize, cost: u64 },
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
            12 => (0..2_usize, 0..4_u64).prop_map(|(key, cost)| Event::Ask { key, cost }),
            1 => mode.prop_map(Event::Mode),
            1 => (0..3_000_u64).prop_map(|ms| Event::Pass(Duration::from_millis(ms))),
        ],
        1..150,
    )
}

/// Runs these events on one of so many nodes. Returns what was too much for one of three.
async fn run(position: usize, count: u64, events: &[Event]) -> Result<(), String> {
    let words = LIMITS[position];
    let limit = limit("l", words).on_outage(OnOutage::Local);
    let (store, clock) =
        layered_with(std::slice::from_ref(&limit), |settings| settings.nodes(nodes(count)));
    // By key: by the store, and without it.
    let mut admitted = [[0; 2]; 2];
    let decided =
        || -> u64 { store.outage_counts().iter().map(|count| count.allowed + count.denied).sum() };
    for event in events {
        match *event {
            Event::Mode(mode) => store.store().set(mode),
            Event::Pass(time) => {
                clock.advance(time);
                tokio::time::advance(time).await;
            }
            Event::Ask { key, cost } => {
                let before = decided();
                let verdict = ask(&store, &limit, ["alice", "bob"][key], cost).await;
                let without = usize::from(decided() > before);
                admitted[key][without] += if verdict.allowed() { cost } else { 0 };
            }
        }
    }
    match admitted.iter().find(|[by_store, without]| *by_store > 30 || *without > 10) {
        Some(broken) => Err(format!("{words}: {broken:?} by the store and without it")),
        None => Ok(()),
    }
}

fn check(position: usize, count: u64, events: &[Event]) -> Result<(), String> {
    paused().block_on(run(position, count, events))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_node_admits_at_most_its_share_without_the_store(
        position in 0..LIMITS.len(),
        events in events(),
    ) {
        prop_assert_eq!(check(position, 3, &events), Ok(()));
    }
}

#[test]
fn a_node_that_takes_the_whole_limit_is_caught() {
    let mut events = vec![Event::Mode(Mode::Hangs)];
    events.extend([Event::Ask { key: 0, cost: 1 }; 40]);
    for (position, words) in LIMITS.iter().enumerate() {
        assert_eq!(check(position, 3, &events), Ok(()));
        assert!(check(position, 1, &events).is_err(), "{words}");
    }
}

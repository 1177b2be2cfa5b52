//! Whatever happens during an outage, a node admits at most its share, and the store at most the limit.

use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;
use ratelimit_core::{
    Algorithm, Batch, ErrorKind, Gcra, Limit, Limits, ManualClock, OnOutage, RateLimiter, Stack,
    Store, Verdict,
};
use ratelimit_layers::Fallback;

use crate::common::{BEGIN, FakeError, Mode, ask, limit, nodes};
use crate::fallback::layered_with;

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
async fn run(place: usize, count: u64, events: &[Event]) -> Result<(), String> {
    let (words, most, share) = LIMITS[place];
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
    match admitted.iter().find(|[by_store, without]| *by_store > most || *without > share) {
        Some(broken) => Err(format!("{words}: {broken:?} by the store and without it")),
        None => Ok(()),
    }
}

fn check(place: usize, count: u64, events: &[Event]) -> Result<(), String> {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_time().start_paused(true).build().expect("a runtime");
    runtime.block_on(run(place, count, events))
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

/// A store of any algorithm that is away.
struct Away;

impl<A: Algorithm> Store<A> for Away {
    type Error = FakeError;

    async fn apply(&self, _: &Batch<'_, A>) -> Result<Verdict, FakeError> {
        Err(FakeError::Fails(ErrorKind::Unavailable))
    }
}

#[tokio::test(start_paused = true)]
async fn a_node_admits_its_share_of_each_limit_of_a_stack() {
    let clock = ManualClock::new(BEGIN);
    let stack = Stack::new(["10/s", "12/h"].map(|rate| {
        let rate: ratelimit_core::Rate = rate.parse().expect(rate);
        Gcra::new(rate, rate.count()).expect("a limit")
    }));
    let limit = Limit::new("both", stack.expect("a stack")).expect("a name");
    let limits = Limits::new([limit.on_outage(OnOutage::Local)]).expect("limits");
    let settings = Fallback::builder().nodes(nodes(2)).clock(clock.clone());
    let limiter =
        RateLimiter::new(limits.clone(), settings.build(Away, &limits).expect("a choice"));
    // Five of a second's ten, of an hour's twelve six.
    for due in [5, 1, 0] {
        let mut admitted = 0;
        while limiter.check("alice").await.expect("decides").allowed() {
            admitted += 1;
        }
        assert_eq!(admitted, due);
        clock.advance(Duration::from_secs(1));
    }
}

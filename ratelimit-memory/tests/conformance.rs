//! The conformance laws on the memory store: for built-in algorithms, at given times and by its own
//! clock, and for algorithms of its own types.
#![cfg(not(loom))]
#![allow(clippy::expect_used, clippy::panic, reason = "tests")]

use std::marker::PhantomData;
use std::time::Duration;

use ratelimit_core::algorithm::{FirstRequestState, Step};
use ratelimit_core::store::{Batch, Check, Op};
use ratelimit_core::{
    Algorithm, AnyAlgorithm, FirstRequestWindow, Limit, ManualClock, Stack, SyncStore, Timestamp,
};
use ratelimit_memory::MemoryStore;
use ratelimit_testkit::{
    AlsoSync, ByOwnClock, Calendars, Ends, Harness, Property, StoreClock, algorithm_conformance,
    conformance, failed_once, record_conformance, regression, try_same_algorithm_on,
};

/// How many calls may pass until all expired states are gone. Each sweeps two slots of one of four
/// shards, and three of the smallest table's 512 buckets; no law makes more than a few dozen keys.
const CALLS_TO_SWEEP: usize = 200;

/// The time at which every store is built.
const BEGIN: Timestamp = Timestamp::saturating_from_us(1_795_218_392_123_456);

/// An algorithm of which the harness needs a limit.
trait Any: ratelimit_core::algorithm::InMemory {
    fn any() -> Self;
}

impl Any for AnyAlgorithm {
    fn any() -> Self {
        algorithm("fixed-window 1/s")
    }
}

impl Any for Stack<AnyAlgorithm> {
    fn any() -> Self {
        stack(["fixed-window 1/s"])
    }
}

/// The memory store of limits by any algorithm.
struct InMemory<A>(ManualClock, PhantomData<A>);

impl<A: Any> Harness<A> for InMemory<A> {
    type Store = MemoryStore<A, ManualClock>;

    fn new() -> Self {
        Self(ManualClock::new(BEGIN), PhantomData)
    }

    fn store(&self) -> Self::Store {
        self.0.set(BEGIN);
        MemoryStore::builder().shards(4).clock(self.0.clone()).build()
    }

    fn clock(&self, _: &Self::Store) -> StoreClock {
        StoreClock::from(&self.0)
    }

    async fn state(&self, store: &Self::Store, limit: &Limit<A>, key: &str) -> Option<A::State> {
        store.state(limit, key)
    }

    /// Moves the clock on, and checks that calls sweep up in passing.
    async fn leaks(&self, store: &Self::Store, within: Duration) -> Vec<String> {
        self.0.advance(within);
        let other = Limit::new("other", A::any()).expect("a name");
        for n in 0..CALLS_TO_SWEEP {
            let check = Check { limit: &other, key: &n.to_string(), cost: 1 };
            let peek = Batch::one(&check).op(Op::Peek);
            let _ = store.apply_now(&peek).expect("every algorithm can be peeked at");
        }
        match store.len() + store.reservations() {
            0 => Vec::new(),
            held => vec![format!("{held} keys and reservations after {CALLS_TO_SWEEP} more calls")],
        }
    }
}

conformance!(memory, AlsoSync<InMemory<AnyAlgorithm>>);
// Each request sets the clock, so that compact states lie in buckets.
// Windows of calendars, at the times at which those go wrong.
algorithm_conformance!(calendars, Calendars, on AlsoSync<InMemory<AnyAlgorithm>>);

conformance!(memory_own_clock, ByOwnClock<AlsoSync<InMemory<AnyAlgorithm>>>);
record_conformance!(memory_records, InMemory<AnyAlgorithm>);

#[test]
fn numbers_that_change_from_one_end_to_the_other_are_decided_by_the_pure_step() {
    type Tried = AlsoSync<InMemory<AnyAlgorithm>>;
    let harness = <Tried as Harness<AnyAlgorithm>>::new();
    let outcome = try_same_algorithm_on::<Ends, _>(&harness, Property::AgreesAfterAChange, 128);
    outcome.unwrap_or_else(|failure| panic!("{failure}"));
}

#[test]
fn cases_that_failed_once() {
    for (property, case) in failed_once() {
        regression::<InMemory<AnyAlgorithm>>(property, &case);
        // A clock that goes back finds expired states freed, which the algorithm alone does not
        // know.
        let us = |line: &str| line.strip_prefix("at ")?.split(' ').next()?.parse::<u64>().ok();
        if property == Property::Agrees && case.lines().filter_map(us).is_sorted() {
            regression::<ByOwnClock<InMemory<AnyAlgorithm>>>(property, &case);
        }
    }
}

fn algorithm(words: &str) -> AnyAlgorithm {
    words.parse().expect("an algorithm")
}

fn stack(limits: impl IntoIterator<Item = impl AsRef<str>>) -> Stack<AnyAlgorithm> {
    Stack::new(limits.into_iter().map(|words| algorithm(words.as_ref()))).expect("a stack")
}

algorithm_conformance!(
    stack_of_buckets,
    Stack<AnyAlgorithm>,
    [
        stack(["gcra 10/s", "gcra 120/m burst 12"]),
        stack(["gcra 3/s burst 4", "gcra 1/s burst 9"]),
        stack(["gcra 3/s burst 4", "gcra 1/s burst 9", "gcra 7/5m"]),
        stack(["gcra 1/s"]),
    ],
    on InMemory<Stack<AnyAlgorithm>>
);

algorithm_conformance!(
    stack_of_any,
    Stack<AnyAlgorithm>,
    [
        stack(["gcra 3/s burst 4", "fixed-window 7/5m", "sliding-log 4/8us"]),
        stack(["first-request-window 3/s", "concurrency 3/30s"]),
        // More limits than are stepped without an allocation.
        stack((3..12).map(|count| format!("sliding-counter {count}/s"))),
    ],
    on InMemory<Stack<AnyAlgorithm>>
);

/// An algorithm that says no more than it must, so that all else is as the traits provide it.
#[derive(Clone, Copy, Debug)]
struct Plain(FirstRequestWindow);

impl Algorithm for Plain {
    type State = FirstRequestState;

    fn capacity(&self) -> u64 {
        self.0.capacity()
    }

    fn step(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> Step<Self::State> {
        self.0.step(state, now, cost)
    }
}

impl ratelimit_core::algorithm::InMemory for Plain {}

impl Any for Plain {
    fn any() -> Self {
        Self(FirstRequestWindow::new("3/h".parse().expect("a rate")).expect("a limit"))
    }
}

algorithm_conformance!(plain, Plain, [Plain::any()], on InMemory<Plain>);

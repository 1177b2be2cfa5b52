//! The conformance laws on the memory store for algorithms that are not policies: stacks, and one that is not
//! built in.

use std::marker::PhantomData;
use std::time::Duration;

use ratelimit_core::{
    Algorithm, Attempts, Batch, Check, Decision, FixedWindow, Gcra, Limit, ManualClock, Now, Op,
    Policy, SlidingLog, Stack, Step, SyncStore, Timestamp, Write,
};
use ratelimit_memory::MemoryStore;
use ratelimit_testkit::{AlgorithmHarness, Harness, StoreClock, algorithm_conformance};

/// How many calls may pass until all expired states are gone, as for the policies.
const CALLS_TO_SWEEP: usize = 200;
const BEGIN: Timestamp = Timestamp::saturating_from_us(1_795_218_392_123_456);

/// The memory store of limits by any algorithm.
struct InMemory<T>(ManualClock, PhantomData<T>);

impl<T: AlgorithmHarness + Sync> Harness<T::Algorithm> for InMemory<T> {
    type Store = MemoryStore<T::Algorithm, ManualClock>;

    const CASES: u32 = 64;

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

    async fn state(
        &self,
        store: &Self::Store,
        limit: &Limit<T::Algorithm>,
        key: &str,
    ) -> Option<<T::Algorithm as Algorithm>::State> {
        store.state(limit.name(), key)
    }

    /// Moves the clock on, and checks that calls sweep up in passing.
    async fn leaks(&self, store: &Self::Store, within: Duration) -> Vec<String> {
        self.0.advance(within);
        let other = T::limits().remove(0).algorithm;
        let other = Limit::new("other", other).expect("a name");
        for n in 0..CALLS_TO_SWEEP {
            let check = Check { limit: &other, key: &n.to_string(), cost: 1 };
            let peek = Batch::one(&check).op(Op::Peek).now(Now::Store);
            let _ = store.apply_now(&peek).expect("every algorithm can be peeked at");
        }
        match store.len() {
            0 => Vec::new(),
            held => vec![format!("{held} keys after {CALLS_TO_SWEEP} more calls")],
        }
    }
}

fn gcra(rate: &str, burst: u64) -> Gcra {
    Gcra::new(rate.parse().expect("a rate"), burst).expect("a limit")
}

fn window(rate: &str) -> FixedWindow {
    FixedWindow::new(rate.parse().expect("a rate")).expect("a limit")
}

fn log(rate: &str) -> SlidingLog {
    SlidingLog::new(rate.parse().expect("a rate")).expect("a limit")
}

fn stack<A: ratelimit_core::InMemory>(limits: impl IntoIterator<Item = A>) -> Stack<A> {
    Stack::new(limits).expect("a stack")
}

algorithm_conformance!(
    stack_of_buckets,
    Stack<Gcra>,
    [
        stack([gcra("10/s", 10), gcra("120/m", 12)]),
        stack([gcra("3/s", 4), gcra("1/s", 9), gcra("7/5m", 7)]),
        stack([gcra("1/s", 1)]),
    ],
    on InMemory<Limits>
);

algorithm_conformance!(
    stack_of_policies,
    Stack<Policy>,
    [
        stack([Policy::from(gcra("3/s", 4)), window("7/5m").into(), log("4/8us").into()]),
        stack([Policy::from(window("3/s"))]),
    ],
    on InMemory<Limits>
);

algorithm_conformance!(
    attempts,
    Attempts<FixedWindow>,
    [Attempts::new(window("3/s")), Attempts::new(window("1/s")), Attempts::new(window("40/5m"))],
    on InMemory<Limits>
);

/// Admits so many within an hour of the first. A state has the time of the first and the number since.
#[derive(Clone, Copy, Debug)]
struct Hourly(u64);

const HOUR_US: u64 = 3_600_000_000;

impl Algorithm for Hourly {
    type State = (Timestamp, u64);

    fn capacity(&self) -> u64 {
        self.0
    }

    fn step(
        &self,
        state: Option<&(Timestamp, u64)>,
        now: Timestamp,
        cost: u64,
    ) -> Step<(Timestamp, u64)> {
        let open = state.filter(|(start, _)| now.saturating_us_since(*start) < HOUR_US);
        let (start, used) = open.copied().unwrap_or((now, 0));
        let left = self.0.saturating_sub(used);
        let allowed = cost <= left;
        let charged = if allowed { cost } else { 0 };
        let end_us = (start.as_us() + HOUR_US).saturating_sub(now.as_us());
        let fits_ever = cost <= self.0;
        let reset_after_us = if used + charged == 0 { 0 } else { end_us };
        let decision = Decision {
            allowed,
            cost,
            limit: self.0,
            remaining: left - charged,
            retry_after_us: if allowed { Some(0) } else { fits_ever.then_some(end_us) },
            replenish_after_us: reset_after_us,
            reset_after_us,
        };
        let expires = start.saturating_add_us(HOUR_US);
        let write = match charged {
            0 => Write::Keep,
            _ => Write::Put { state: (start, used + charged), expires },
        };
        Step { decision, write }
    }
}

impl ratelimit_core::InMemory for Hourly {}

algorithm_conformance!(hourly, Hourly, [Hourly(1), Hourly(3), Hourly(1_000)], on InMemory<Limits>);

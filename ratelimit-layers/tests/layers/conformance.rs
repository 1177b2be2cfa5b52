//! The laws of a store, with each layer around a store in memory.

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use ratelimit_core::algorithm::AnyState;
use ratelimit_core::store::{Batch, Op, RecordStore};
use ratelimit_core::{AnyAlgorithm, Limit, ManualClock, OnOutage, Record, Store, Verdict};
use ratelimit_layers::{Allotments, DenialCache, Fallback, Metrics, TopDenied, Traced};
use ratelimit_testkit::{
    AlgorithmKind, ByOwnClock, Harness, Property, Scope, StoreClock, block_on, conformance,
    record_conformance, try_same,
};
use tokio::runtime::{Builder, Runtime};

use crate::common::{
    BEGIN, Fake, Memory, UNAVAILABLE, ask, fallback, limit, limits, memory, operate, paused_runtime,
};

/// More calls than there are states to sweep up.
const CALLS_TO_SWEEP: usize = 200;

/// A layer around memory.
trait Layer: RecordStore<AnyAlgorithm> {
    /// Whether it waits, so that it needs a runtime.
    const WAITS: bool = false;

    fn around(memory: Arc<Memory>, clock: &ManualClock) -> Self;
}

/// While the store within answers, a fallback and those that only observe change nothing.
type Healthy = Metrics<Traced<TopDenied<Fallback<Arc<Memory>, AnyAlgorithm, ManualClock>>>>;

impl Layer for Healthy {
    const WAITS: bool = true;

    fn around(memory: Arc<Memory>, clock: &ManualClock) -> Self {
        // The limits of the laws have no choice; while the store answers, none is asked for.
        let open = limits(&[limit("l", "gcra 1/s").on_outage(OnOutage::Open)]);
        // On a busy machine a call can wait longer than any deadline that suits a service.
        let settings = Fallback::builder().deadline(Duration::from_secs(600)).clock(clock.clone());
        let fallback = settings.build(memory, &open).expect("a choice");
        Metrics::new(Traced::new(TopDenied::new(fallback, 16)))
    }
}

impl Layer for DenialCache<Arc<Memory>, AnyAlgorithm, ManualClock> {
    fn around(memory: Arc<Memory>, clock: &ManualClock) -> Self {
        DenialCache::builder().clock(clock.clone()).max_age(Duration::MAX).capacity(8).build(memory)
    }
}

impl Layer for Allotments<Arc<Memory>, AnyAlgorithm, ManualClock> {
    fn around(memory: Arc<Memory>, clock: &ManualClock) -> Self {
        Allotments::builder().clock(clock.clone()).divisor(1).capacity(8).build(memory)
    }
}

/// It does not tell where its verdicts come from, as the pure step does not.
struct Plain<L> {
    layer: L,
    memory: Arc<Memory>,
}

impl<L: Layer> Store<AnyAlgorithm> for Plain<L> {
    type Error = L::Error;

    async fn apply(&self, batch: &Batch<'_, AnyAlgorithm>) -> Result<Verdict, L::Error> {
        let verdict = self.layer.apply(batch).await?;
        Ok(Verdict::several(verdict.decisions().to_vec()).with_accounts(verdict.accounts()))
    }
}

impl<L: Layer> RecordStore<AnyAlgorithm> for Plain<L> {
    async fn record(
        &self,
        limit: &Limit<AnyAlgorithm>,
        key: &str,
    ) -> Result<Option<Record<AnyAlgorithm>>, L::Error> {
        self.layer.record(limit, key).await
    }

    async fn exchange_record(
        &self,
        limit: &Limit<AnyAlgorithm>,
        key: &str,
        standing: Option<&Record<AnyAlgorithm>>,
        next: Option<&Record<AnyAlgorithm>>,
    ) -> Result<bool, L::Error> {
        self.layer.exchange_record(limit, key, standing, next).await
    }
}

struct Laws<L> {
    clock: ManualClock,
    runtime: Runtime,
    layer: PhantomData<fn() -> L>,
}

impl<L: Layer> Harness for Laws<L> {
    type Store = Plain<L>;

    const CASES: u32 = 32;
    const SMALL_TRACE_REQUESTS: u32 = 2;

    fn new() -> Self {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_time().build();
        let (clock, runtime) = (ManualClock::new(BEGIN), runtime.expect("a runtime"));
        Self { clock, runtime, layer: PhantomData }
    }

    fn block_on<F: Future>(&self, future: F) -> F::Output {
        if L::WAITS { self.runtime.block_on(future) } else { block_on(future) }
    }

    fn store(&self) -> Plain<L> {
        self.clock.set(BEGIN);
        let memory = Arc::new(memory(&self.clock));
        Plain { layer: L::around(memory.clone(), &self.clock), memory }
    }

    fn clock(&self, _: &Plain<L>) -> StoreClock {
        StoreClock::from(&self.clock)
    }

    async fn state(
        &self,
        store: &Plain<L>,
        limit: &Limit<AnyAlgorithm>,
        key: &str,
    ) -> Option<AnyState> {
        store.memory.state(limit, key)
    }

    /// Moves the clock on, and says what memory still keeps after calls.
    async fn leaks(&self, store: &Plain<L>, within: Duration) -> Vec<String> {
        self.clock.advance(within);
        let other = limit("other", "fixed-window 1/s").on_outage(OnOutage::Open);
        for n in 0..CALLS_TO_SWEEP {
            let _ = operate(&store.layer, Op::Peek, &other, &n.to_string(), 1).await;
        }
        match store.memory.len() + store.memory.reservations() {
            0 => Vec::new(),
            held => vec![format!("{held} keys and reservations after {CALLS_TO_SWEEP} more calls")],
        }
    }
}

conformance!(healthy, Laws<Healthy>);
// A cache answers nothing at a given time.
conformance!(cached, ByOwnClock<Laws<DenialCache<Arc<Memory>, AnyAlgorithm, ManualClock>>>);

// Limits that look for records go to the store, so a record is seen at once.
record_conformance!(healthy_records, Laws<Healthy>);
record_conformance!(cached_records, Laws<DenialCache<Arc<Memory>, AnyAlgorithm, ManualClock>>);
record_conformance!(allotted_records, Laws<Allotments<Arc<Memory>, AnyAlgorithm, ManualClock>>);

#[test]
fn in_an_outage_the_policy_decides_whatever_records_there_are() {
    let clock = ManualClock::new(BEGIN);
    let blocked = Record::blocked().forever();
    let own = [limit("l", "fixed-window 10/h").overridable().on_outage(OnOutage::Open)];
    let store = Arc::new(Fake::new(&clock));
    let fallback = fallback(Fallback::builder(), store.clone(), &clock, &own);
    paused_runtime().block_on(async {
        let set = store.memory.exchange_record(&own[0], "alice", None, Some(&blocked)).await;
        assert_eq!(set, Ok(true));
        assert!(!ask(&fallback, &own[0], "alice", 1).await.allowed());
        store.set(UNAVAILABLE);
        assert!(ask(&fallback, &own[0], "alice", 1).await.allowed());
    });
}

/// With allotments, a limit that is not served keeps every law. One that is served keeps those that
/// speak of what is allowed. Those that compare whole decisions do not hold, because `remaining`
/// and the waits of a request that was served are estimates; nor does the law that nothing leaks,
/// because each draw leaves a reservation for an hour. Two more tests stand beside the other tests
/// of allotments: that one node admits what the pure step admits, and that of many tasks at one
/// moment none is admitted beyond it. There it may be fewer, because a request can be denied while
/// a draw in flight holds what is left.
#[test]
fn with_allotments_limits_that_are_served_keep_the_laws_of_what_is_allowed_and_others_all_laws() {
    type Allotted = Laws<Allotments<Arc<Memory>, AnyAlgorithm, ManualClock>>;

    let of_what_is_allowed = [Property::IdentifiersNeverMeet, Property::ItCanDoWhatItClaims];
    let attempts = Scope::Attempts(AlgorithmKind::Gcra);
    for scope in AlgorithmKind::ALL.map(Scope::One).into_iter().chain([attempts]) {
        let laws = match scope {
            Scope::One(AlgorithmKind::Gcra | AlgorithmKind::FixedWindow) => &of_what_is_allowed[..],
            _ => &Property::ALL,
        };
        for law in laws {
            if let Err(failure) = try_same(&Allotted::new(), *law, scope, Allotted::CASES) {
                panic!("{scope:?}: {failure}");
            }
        }
    }
}

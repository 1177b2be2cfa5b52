//! A store whose answers a test sets, and what tests ask of stores.

use std::collections::BTreeMap;
use std::future::pending;
use std::num::NonZeroU64;
use std::pin::Pin;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use metrics_util::debugging::{DebugValue, DebuggingRecorder};
use ratelimit_core::algorithm::{AnyState, LoggedRequest};
use ratelimit_core::store::{Batch, Check, LogStore, Now, Op, SnapshotStore, WithSnapshot};
use ratelimit_core::{
    AnyAlgorithm, Clock, ErrorKind, Limit, Limits, ManualClock, Refusal, ReservationId, Store,
    StoreError, Verdict,
};
use ratelimit_layers::{Allotments, DenialCache, Fallback, FallbackBuilder};
use ratelimit_memory::{MemoryError, MemoryStore};
pub(crate) use ratelimit_testkit::limit_in_words as limit;
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio::task::yield_now;

pub(crate) type Memory = MemoryStore<AnyAlgorithm, ManualClock>;

pub(crate) use ratelimit_simulation::BEGIN;
pub(crate) const ID: ReservationId = ReservationId::new(42);
pub(crate) const NODES: NonZeroU64 = NonZeroU64::new(3).expect("some");
/// How long an open breaker waits before it probes, unless that is set.
pub(crate) const PAUSE: Duration = Duration::from_secs(1);
pub(crate) const UNAVAILABLE: Mode = Mode::Fails(ErrorKind::Unavailable);

/// What happens to a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Answers,
    /// It answers without what it saw.
    Silent,
    /// It decides, and answers after so long.
    Late(Duration),
    /// It decides after so long.
    Delayed(Duration),
    /// It is so far away, there and back, by its clock.
    Far([Duration; 2]),
    Hangs,
    /// It does what it was asked, and never says so.
    ChargesAndHangs,
    Fails(ErrorKind),
    Panics,
    RefusesIds,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum FakeError {
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error("{0:?}")]
    Fails(ErrorKind),
}

impl From<Refusal> for FakeError {
    fn from(refusal: Refusal) -> Self {
        MemoryError::from(refusal).into()
    }
}

impl StoreError for FakeError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Memory(error) => error.kind(),
            Self::Fails(kind) => *kind,
        }
    }
}

/// A store in memory, some way off.
#[derive(Debug)]
pub(crate) struct Fake {
    pub(crate) memory: Memory,
    clock: ManualClock,
    mode: Mutex<Mode>,
    /// What happens to the next call.
    next: Mutex<Option<Mode>>,
    /// Calls begin at once, and go on when it is open.
    is_open: watch::Sender<bool>,
    calls: AtomicU64,
}

impl Fake {
    pub(crate) fn new(clock: &ManualClock) -> Self {
        Self {
            memory: memory(clock),
            clock: clock.clone(),
            mode: Mutex::new(Mode::Answers),
            next: Mutex::default(),
            is_open: watch::Sender::new(true),
            calls: AtomicU64::new(0),
        }
    }

    pub(crate) fn set(&self, mode: Mode) {
        *self.mode.lock().expect("no panic") = mode;
    }

    pub(crate) fn once(&self, mode: Mode) {
        *self.next.lock().expect("no panic") = Some(mode);
    }

    pub(crate) fn open(&self, is_open: bool) {
        self.is_open.send_replace(is_open);
    }

    /// How many calls began since the last look.
    pub(crate) fn calls(&self) -> u64 {
        self.calls.swap(0, SeqCst)
    }

    /// What a key has left in the store itself.
    pub(crate) fn remaining(&self, limit: &Limit<AnyAlgorithm>, key: &str) -> u64 {
        remaining(&self.memory, limit, key)
    }

    fn mode(&self) -> Mode {
        *self.mode.lock().expect("no panic")
    }
}

impl Store<AnyAlgorithm> for Fake {
    type Error = FakeError;

    async fn apply(&self, batch: &Batch<'_, AnyAlgorithm>) -> Result<Verdict, FakeError> {
        Ok(self.apply_with_snapshot(batch).await?.0)
    }
}

impl SnapshotStore<AnyAlgorithm> for Fake {
    async fn apply_with_snapshot(
        &self,
        batch: &Batch<'_, AnyAlgorithm>,
    ) -> Result<WithSnapshot<AnyState>, FakeError> {
        self.calls.fetch_add(1, SeqCst);
        let _ = self.is_open.subscribe().wait_for(|is_open| *is_open).await;
        let next = self.next.lock().expect("no panic").take();
        let mode = next.unwrap_or_else(|| self.mode());
        match mode {
            Mode::Hangs => pending().await,
            Mode::Fails(kind) => return Err(FakeError::Fails(kind)),
            Mode::Panics => panic!("as it was told"),
            Mode::RefusesIds if batch.reservation_id().is_some() => {
                return Err(Refusal::CannotReserve { limit: "daily".to_owned() }.into());
            }
            Mode::Far([there, _]) => self.clock.advance(there),
            Mode::Delayed(by) => tokio::time::sleep(by).await,
            _ => {}
        }
        let (verdict, seen) = self.memory.apply_with_snapshot(batch).await?;
        match mode {
            Mode::Far([_, back]) => self.clock.advance(back),
            Mode::ChargesAndHangs => pending().await,
            Mode::Late(by) if by.is_zero() => yield_now().await,
            Mode::Late(by) => tokio::time::sleep(by).await,
            _ => {}
        }
        Ok((verdict, seen.filter(|_| mode != Mode::Silent)))
    }
}

impl LogStore<AnyAlgorithm> for Fake {
    async fn logged(
        &self,
        limit: &Limit<AnyAlgorithm>,
        key: &str,
        now: Now,
    ) -> Result<Vec<LoggedRequest>, FakeError> {
        match self.mode() {
            Mode::Fails(kind) => Err(FakeError::Fails(kind)),
            Mode::Hangs => pending().await,
            _ => Ok(self.memory.logged(limit, key, now).await?),
        }
    }
}

pub(crate) fn memory(clock: &ManualClock) -> Memory {
    MemoryStore::builder().shards(4).clock(clock.clone()).build()
}

pub(crate) fn limits(all: &[Limit<AnyAlgorithm>]) -> Limits<AnyAlgorithm> {
    Limits::new(all.iter().cloned()).expect("limits")
}

/// A request of a key of each of these limits.
pub(crate) fn checks<'c>(
    limits: &'c [Limit<AnyAlgorithm>],
    key: &'c str,
    cost: u64,
) -> Vec<Check<'c, AnyAlgorithm>> {
    limits.iter().map(|limit| Check { limit, key, cost }).collect()
}

/// What a store says about a request of one key of these limits.
pub(crate) async fn ask_all<S: Store<AnyAlgorithm>>(
    store: &S,
    limits: &[Limit<AnyAlgorithm>],
    key: &str,
    cost: u64,
) -> Verdict {
    store.apply(&Batch::new(&checks(limits, key, cost)).expect("distinct")).await.expect("decides")
}

pub(crate) async fn ask<S: Store<AnyAlgorithm>>(
    store: &S,
    limit: &Limit<AnyAlgorithm>,
    key: &str,
    cost: u64,
) -> Verdict {
    store.apply(&Batch::one(&Check { limit, key, cost })).await.expect("decides")
}

/// Does this of one key.
pub(crate) async fn operate<S: Store<AnyAlgorithm>>(
    store: &S,
    op: Op,
    limit: &Limit<AnyAlgorithm>,
    key: &str,
    cost: u64,
) -> Verdict {
    store.apply(&Batch::one(&Check { limit, key, cost }).op(op)).await.expect("decides")
}

/// What a key has left in a store that answers at once.
pub(crate) fn remaining<S: Store<AnyAlgorithm>>(
    store: &S,
    limit: &Limit<AnyAlgorithm>,
    key: &str,
) -> u64 {
    ratelimit_testkit::block_on(operate(store, Op::Peek, limit, key, 0)).remaining()
}

/// A fallback on one of three nodes.
pub(crate) fn fallback<S, C: Clock + Clone>(
    settings: FallbackBuilder,
    store: S,
    clock: &C,
    all: &[Limit<AnyAlgorithm>],
) -> Fallback<S, AnyAlgorithm, C> {
    let settings = settings.nodes(NODES).clock(clock.clone());
    settings.build(store, &limits(all)).expect("choices")
}

pub(crate) fn cache<S>(store: S, clock: &ManualClock) -> DenialCache<S, AnyAlgorithm, ManualClock> {
    DenialCache::builder().clock(clock.clone()).build(store)
}

/// Allotments that take all that is left.
pub(crate) fn allotments<S>(
    store: S,
    clock: &ManualClock,
) -> Allotments<S, AnyAlgorithm, ManualClock> {
    Allotments::builder().clock(clock.clone()).divisor(1).build(store)
}

/// A runtime whose clock stands still while tasks run.
pub(crate) fn paused_runtime() -> Runtime {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    runtime.enable_time().start_paused(true).build().expect("a runtime")
}

pub(crate) type Labels = BTreeMap<String, String>;

/// Every series by its name and labels, and its value: of a histogram how often it was recorded.
pub(crate) fn record_metrics(run: impl FnOnce()) -> BTreeMap<(String, Labels), u64> {
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    metrics::with_local_recorder(&recorder, run);
    let value = |value| match value {
        DebugValue::Counter(count) => count,
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0, 1 or 2")]
        DebugValue::Gauge(level) => level.into_inner() as u64,
        DebugValue::Histogram(values) => values.len() as u64,
    };
    let all = snapshotter.snapshot().into_vec().into_iter();
    all.map(|(key, _, _, told)| {
        let key = key.key();
        let labels = key.labels().map(|label| (label.key().into(), label.value().into()));
        ((key.name().to_owned(), labels.collect()), value(told))
    })
    .collect()
}

/// Polls once.
pub(crate) fn poll<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

/// Until no task can go on.
pub(crate) async fn run_until_idle() {
    for _ in 0..200 {
        yield_now().await;
    }
}

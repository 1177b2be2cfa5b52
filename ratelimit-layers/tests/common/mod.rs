//! A store that does as it is told: it answers, hangs, or fails.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::fmt;
use std::num::NonZeroU64;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ratelimit_core::{
    Batch, Check, EntryStore, ErrorKind, Limit, Limits, ManualClock, Now, OnOutage, Op, Policy,
    Refusal, ReservationId, Store, StoreError, SyncStore, Timestamp, Verdict, WindowEntry,
};
use ratelimit_layers::{BreakerState, Builder, Fallback};
use ratelimit_memory::{MemoryError, MemoryStore};
use tokio::time::advance;

pub(crate) const BEGIN: Timestamp = Timestamp::saturating_from_us(1_795_218_392_123_456);

pub(crate) const UNAVAILABLE: Mode = Mode::Fails(ErrorKind::Unavailable);

/// How long an open breaker waits before it probes.
pub(crate) const PAUSE: Duration = Duration::from_secs(1);

/// What the store does with a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Answers,
    Hangs,
    /// It does what it was asked, and never says so.
    ChargesAndHangs,
    Fails(ErrorKind),
}

#[derive(Debug)]
pub(crate) struct Scripted {
    pub(crate) store: MemoryStore<Policy, ManualClock>,
    mode: Mutex<Mode>,
    calls: AtomicUsize,
    /// How many calls are inside now, and were at most.
    inside: AtomicUsize,
    most_inside: AtomicUsize,
}

#[derive(Debug)]
pub(crate) enum ScriptedError {
    Memory(MemoryError),
    Fails(ErrorKind),
}

impl fmt::Display for ScriptedError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

impl std::error::Error for ScriptedError {}

impl From<Refusal> for ScriptedError {
    fn from(refusal: Refusal) -> Self {
        Self::Memory(refusal.into())
    }
}

impl StoreError for ScriptedError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Memory(error) => error.kind(),
            Self::Fails(kind) => *kind,
        }
    }
}

/// Counts a call that is inside, until it ends or is dropped.
struct Inside<'s>(&'s Scripted);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.inside.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Scripted {
    pub(crate) fn new(clock: &ManualClock) -> Self {
        Self {
            store: MemoryStore::builder().clock(clock.clone()).build(),
            mode: Mutex::new(Mode::Answers),
            calls: AtomicUsize::new(0),
            inside: AtomicUsize::new(0),
            most_inside: AtomicUsize::new(0),
        }
    }

    pub(crate) fn set(&self, mode: Mode) {
        *self.mode.lock().expect("no panic") = mode;
    }

    fn mode(&self) -> Mode {
        *self.mode.lock().expect("no panic")
    }

    /// How many calls came since the last look.
    pub(crate) fn calls(&self) -> usize {
        self.calls.swap(0, Ordering::SeqCst)
    }

    /// The most calls that were inside at the same time since the last look.
    pub(crate) fn most_inside(&self) -> usize {
        self.most_inside.swap(0, Ordering::SeqCst)
    }

    fn enter(&self) -> Inside<'_> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        let inside = self.inside.fetch_add(1, Ordering::SeqCst) + 1;
        self.most_inside.fetch_max(inside, Ordering::SeqCst);
        Inside(self)
    }

    /// What a key has left in the store itself.
    pub(crate) fn left(&self, limit: &Limit<Policy>, key: &str) -> u64 {
        let check = Check { limit, key, cost: 0 };
        let peek = Batch::one(&check).op(Op::Peek);
        self.store.apply_now(&peek).expect("decides").remaining()
    }

    fn answer(&self, batch: &Batch<'_, Policy>) -> Result<Verdict, ScriptedError> {
        self.store.apply_now(batch).map_err(ScriptedError::Memory)
    }
}

impl Store<Policy> for Scripted {
    type Error = ScriptedError;

    async fn apply(&self, batch: &Batch<'_, Policy>) -> Result<Verdict, ScriptedError> {
        let _inside = self.enter();
        match self.mode() {
            Mode::Answers => self.answer(batch),
            Mode::Hangs => std::future::pending().await,
            Mode::ChargesAndHangs => {
                let _lost = self.answer(batch);
                std::future::pending().await
            }
            Mode::Fails(kind) => Err(ScriptedError::Fails(kind)),
        }
    }
}

impl SyncStore<Policy> for Scripted {
    fn apply_now(&self, batch: &Batch<'_, Policy>) -> Result<Verdict, ScriptedError> {
        let _inside = self.enter();
        match self.mode() {
            Mode::Fails(kind) => Err(ScriptedError::Fails(kind)),
            _ => self.answer(batch),
        }
    }
}

impl EntryStore<Policy> for Scripted {
    async fn entries(
        &self,
        limit: &Limit<Policy>,
        key: &str,
        now: Now,
    ) -> Result<Vec<WindowEntry>, ScriptedError> {
        match self.mode() {
            Mode::Fails(kind) => Err(ScriptedError::Fails(kind)),
            Mode::Hangs | Mode::ChargesAndHangs => std::future::pending().await,
            Mode::Answers => {
                self.store.entries(limit, key, now).await.map_err(ScriptedError::Memory)
            }
        }
    }
}

pub(crate) type Layered = Fallback<Scripted, Policy, ManualClock>;

/// A limit in the words of a policy, with a choice, which its name begins with.
pub(crate) fn limit(name: &str, words: &str, choice: OnOutage) -> Limit<Policy> {
    let limit = Limit::new(&format!("{}.{name}", choice.name()), words.parse().expect(words));
    limit.expect("a name").on_outage(choice)
}

pub(crate) fn nodes(count: u64) -> NonZeroU64 {
    NonZeroU64::new(count).expect("at least one")
}

/// A fallback with these settings for these limits, and the clock of both its stores.
pub(crate) fn layered_with(
    limits: &[Limit<Policy>],
    settings: impl FnOnce(Builder) -> Builder,
) -> (Layered, ManualClock) {
    let clock = ManualClock::new(BEGIN);
    let limits = Limits::new(limits.iter().cloned()).expect("limits");
    let settings = settings(Fallback::builder().nodes(nodes(3))).clock(clock.clone());
    let fallback = settings.build(Scripted::new(&clock), &limits).expect("choices");
    (fallback, clock)
}

pub(crate) fn layered(limits: &[Limit<Policy>]) -> (Layered, ManualClock) {
    layered_with(limits, |settings| settings)
}

pub(crate) fn checks(limits: &[Limit<Policy>], cost: u64) -> Vec<Check<'_, Policy>> {
    limits.iter().map(|limit| Check { limit, key: "alice", cost }).collect()
}

/// 60 a minute. The share of one node of three is 20.
pub(crate) fn burst(choice: OnOutage) -> Limit<Policy> {
    limit("burst", "gcra 60/m burst 60", choice)
}

/// What the fallback decides about a request of this key.
pub(crate) async fn ask_as(
    store: &Layered,
    limits: &[Limit<Policy>],
    key: &str,
    cost: u64,
) -> Verdict {
    let checks: Vec<_> = limits.iter().map(|limit| Check { limit, key, cost }).collect();
    store.apply(&Batch::new(&checks).expect("distinct")).await.expect("decides")
}

/// What the fallback decides about a request of Alice.
pub(crate) async fn ask(store: &Layered, limits: &[Limit<Policy>], cost: u64) -> Verdict {
    ask_as(store, limits, "alice", cost).await
}

async fn peek(store: &Layered, limits: &[Limit<Policy>]) {
    let checks = checks(limits, 0);
    let peek = Batch::new(&checks).expect("distinct").op(Op::Peek);
    let _ = store.apply(&peek).await.expect("decides");
}

/// Opens the breaker.
pub(crate) async fn down(store: &Layered, limits: &[Limit<Policy>]) {
    store.store().set(UNAVAILABLE);
    for _ in 0..5 {
        peek(store, limits).await;
    }
    assert_eq!(store.breaker(), BreakerState::Open);
    store.store().calls();
}

/// Lets the store answer again, and a probe find out.
pub(crate) async fn up(store: &Layered, limits: &[Limit<Policy>]) {
    store.store().set(Mode::Answers);
    advance(PAUSE).await;
    peek(store, limits).await;
    assert_eq!(store.breaker(), BreakerState::Closed);
    store.store().calls();
}

pub(crate) const ID: ReservationId = ReservationId::new(42);

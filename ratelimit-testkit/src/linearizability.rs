//! Linearizability checking: records a concurrent history and searches for a sequential order that
//! explains it.
//!
//! Several threads ask a [`SyncStore`] concurrently. They record each answer, the order in which
//! requests were asked and answered, and what the store's clock showed before and after. The
//! checker then searches for an order of the requests that agrees with the record: no request
//! precedes one that was answered before it was asked, and every answer equals, field by field, the
//! one that [`decide`](ratelimit_core::store::decide) gives in this order, at a time that the clock
//! showed meanwhile. If no order explains the answers, the store has lost a charge or made one up.
//!
//! ```
//! use ratelimit_core::{Algorithm, Gcra, Limit, Timestamp};
//! use ratelimit_core::store::Op;
//! use ratelimit_testkit::{Event, History};
//!
//! let limits = [Limit::new("login", Gcra::new("5/s".parse()?, 3)?)?];
//! let first = limits[0].algorithm().step(None, Timestamp::ZERO, 1).decision;
//! let event = |asked, answered| Event {
//!     op: Op::Acquire, asks: vec![(0, 0, 1)], id: None, asked, answered,
//!     clock: [Timestamp::ZERO; 2], answer: Ok(vec![first]),
//! };
//! // Two concurrent requests both get the first answer: a charge is lost.
//! let history = History { limits: &limits, events: vec![event(0, 2), event(1, 3)], times: vec![Timestamp::ZERO] };
//! assert!(history.explain().is_err());
//! # Ok::<(), ratelimit_core::ConfigError>(())
//! ```
//!
//! [`ConcurrentRun`] records histories of a store and checks them.
//!
//! The search follows Wing and Gong ("Testing and verifying concurrent objects", 1993), with the
//! memoization of Lowe ("Testing for linearizability", 2017). Keys that no batch joins are checked
//! separately.

use std::fmt;
use std::ops::RangeInclusive;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use ratelimit_core::store::{Batch, Check, Now, Op};
use ratelimit_core::{
    Algorithm, Clock, Decision, ErrorKind, Limit, ManualClock, ReservationId, StoreError,
    SyncStore, Timestamp,
};

pub(crate) mod plan;
mod search;

use plan::Lcg;
use search::{SearchOutcome, search};

/// The number of steps after which a search gives up: some seconds.
const STEPS: usize = 200_000;

/// The most requests of a history: the search keeps a set of them in the bits of one integer.
const MOST: usize = 128;

/// A limit and a key, by position.
type LimitKey = (usize, usize);

/// One request of a [`History`]: its question, its answer and its times.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// The operation.
    pub op: Op,
    /// The position of the limit, the number of the key and the cost of each check; no pair of
    /// limit and key occurs twice.
    pub asks: Vec<(usize, usize, u64)>,
    /// The id of the request, if it has one.
    pub id: Option<ReservationId>,
    /// The position of the question in the order of all events.
    pub asked: u64,
    /// The position of the answer in the same order.
    pub answered: u64,
    /// The store's clock before and after the request.
    pub clock: [Timestamp; 2],
    /// The decision of each limit, or the kind of error. After [`ErrorKind::Indeterminate`], which
    /// also stands for a request whose future was dropped, the request may take effect at any point
    /// of the order after the question, or never; `answered` means nothing, and the second clock is
    /// the last at which it can.
    pub answer: Result<Vec<Decision>, ErrorKind>,
}

impl Event {
    fn is_indeterminate(&self) -> bool {
        self.answer == Err(ErrorKind::Indeterminate)
    }

    fn is_admitted(&self) -> bool {
        self.answer.as_ref().is_ok_and(|decisions| decisions.iter().all(|each| each.allowed))
    }

    /// What the request asks of a limit for a key.
    fn cost(&self, limit_key: LimitKey) -> u64 {
        let asks = self.asks.iter().filter(|(limit, key, _)| (*limit, *key) == limit_key);
        asks.map(|(.., cost)| cost).sum()
    }
}

/// The requests of several threads to a store, about keys that were new before.
#[derive(Clone, Debug)]
pub struct History<'a, A> {
    /// The limits.
    pub limits: &'a [Limit<A>],
    /// The requests, in any order; at most 128.
    pub events: Vec<Event>,
    /// All times that the store's clock showed meanwhile, in ascending order.
    pub times: Vec<Timestamp>,
}

impl<'a, A> History<'a, A> {
    /// The history of requests whose answers tell the time: the clock showed no others.
    #[must_use]
    pub fn at_their_times(limits: &'a [Limit<A>], events: Vec<Event>) -> Self {
        let mut times: Vec<_> = events.iter().flat_map(|event| event.clock).collect();
        times.sort_unstable();
        times.dedup();
        Self { limits, events, times }
    }
}

/// What these acquires may have charged a limit for a key, both by position: at least what was
/// admitted, and at most that and what has no answer.
#[must_use]
pub fn charges(acquires: &[Event], limit_key: (usize, usize)) -> RangeInclusive<u64> {
    let cost = |is_counted: fn(&Event) -> bool| -> u64 {
        acquires.iter().filter(|event| is_counted(event)).map(|event| event.cost(limit_key)).sum()
    };
    let admitted = cost(Event::is_admitted);
    admitted..=admitted + cost(Event::is_indeterminate)
}

impl<A: Algorithm<State: PartialEq>> History<'_, A> {
    /// Searches for an order that explains the history. Returns `Ok(false)` if the search exceeds
    /// its step limit, which happens to histories with too much concurrency.
    ///
    /// # Errors
    /// No order explains the history.
    ///
    /// # Panics
    /// The history has more than 128 requests.
    pub fn explain(&self) -> Result<bool, Unexplained> {
        self.explain_within(STEPS)
    }

    /// [`explain`](Self::explain) with a step limit of your own, for many histories in a short
    /// time.
    ///
    /// # Errors
    /// No order explains the history.
    ///
    /// # Panics
    /// The history has more than 128 requests.
    pub fn explain_within(&self, steps: usize) -> Result<bool, Unexplained> {
        assert!(self.events.len() <= MOST, "{} requests are more than {MOST}", self.events.len());
        let mut decided = true;
        for part in self.parts() {
            match search(self.limits, &self.times, &part, steps) {
                SearchOutcome::Order => {}
                SearchOutcome::OutOfSteps => decided = false,
                SearchOutcome::None(longest) => return Err(self.unexplained(&part, longest)),
            }
        }
        Ok(decided)
    }

    /// The requests, grouped by the keys that batches join, each group in the order of asking.
    fn parts(&self) -> Vec<Vec<&Event>> {
        let mut parts: Vec<(Vec<LimitKey>, Vec<&Event>)> = Vec::new();
        for event in &self.events {
            let state_of = |limit: usize| search::state_of(self.limits, limit);
            let limit_keys = || event.asks.iter().map(|(limit, key, _)| (state_of(*limit), *key));
            let mut joined = (limit_keys().collect::<Vec<_>>(), vec![event]);
            parts.retain_mut(|(known, events)| {
                let meets = limit_keys().any(|limit_key| known.contains(&limit_key));
                if meets {
                    joined.0.append(known);
                    joined.1.append(events);
                }
                !meets
            });
            parts.push(joined);
        }
        let mut parts: Vec<_> = parts.into_iter().map(|(_, events)| events).collect();
        for events in &mut parts {
            events.sort_unstable_by_key(|event| event.asked);
        }
        parts
    }

    fn unexplained(&self, part: &[&Event], longest: u128) -> Unexplained {
        let is_in_order = |position: usize| longest & (1 << position) != 0;
        let lines = part.iter().enumerate().map(|(position, event)| {
            let mark = if is_in_order(position) { ' ' } else { '?' };
            format!("{mark} {}\n", self.line(event))
        });
        Unexplained { message: lines.collect() }
    }

    fn line(&self, event: &Event) -> String {
        let asks = event.asks.iter().map(|(limit, key, cost)| {
            format!(" {cost} of {} for key {key}", self.limits[*limit].name())
        });
        let id = event.id.map(|id| format!(" under {id}")).unwrap_or_default();
        format!(
            "{}..{} at {}..{} {}{}{id}: {:?}",
            event.asked,
            event.answered,
            event.clock[0],
            event.clock[1],
            event.op,
            asks.collect::<Vec<_>>().join(","),
            event.answer,
        )
    }
}

/// A history that no order explains.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unexplained {
    /// The requests with their times, in the order of asking. A question mark marks those that do
    /// not fit after the longest order found of the others.
    pub message: String,
}

impl fmt::Display for Unexplained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no order explains these answers:\n{}", self.message)
    }
}

impl std::error::Error for Unexplained {}

/// Statistics of a run in which every history was explained or undecided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Linearized {
    /// The number of requests.
    pub requests: usize,
    /// The number of admitted requests.
    pub admitted: usize,
    /// The number of requests that began before an earlier one was answered.
    pub overlapping: usize,
    /// The number of histories that exceeded the step limit.
    pub undecided: usize,
}

/// The parameters of a concurrent run against a store.
#[derive(Debug)]
pub struct ConcurrentRun<'a, A> {
    /// The limits.
    pub limits: &'a [Limit<A>],
    /// The number of threads.
    pub threads: usize,
    /// The number of histories, each on keys of its own.
    pub rounds: usize,
    /// The number of requests per thread and history; at most 128 over all threads.
    pub requests: usize,
    /// The number of keys per history.
    pub keys: usize,
    /// The number of checks in the largest batches.
    pub batch: usize,
    /// Whether requests reserve under ids and settle.
    pub reservations: bool,
    /// The most that the clock advances at once.
    pub step: Duration,
    /// The seed of the random requests.
    pub seed: u64,
}

impl<A> Clone for ConcurrentRun<'_, A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A> Copy for ConcurrentRun<'_, A> {}

impl<'a, A: Algorithm<State: PartialEq>> ConcurrentRun<'a, A> {
    /// Four threads on two keys, with batches of up to three checks, ids, and clock steps of up to
    /// a fifth of a second.
    #[must_use]
    pub const fn new(limits: &'a [Limit<A>]) -> Self {
        Self {
            limits,
            threads: 4,
            rounds: 200,
            requests: 10,
            keys: 2,
            batch: 3,
            reservations: true,
            step: Duration::from_millis(200),
            seed: 1,
        }
    }

    /// Runs the threads against a store and checks every history. The store must read this clock
    /// and have room for all the keys.
    ///
    /// # Errors
    /// A history that no order explains.
    ///
    /// # Panics
    /// The store fails: it is full or unreachable.
    pub fn run<S: SyncStore<A>>(
        &self,
        store: &S,
        clock: &ManualClock,
    ) -> Result<Linearized, Unexplained> {
        let stage = Stage {
            scenario: self,
            store,
            clock,
            times: Mutex::new(vec![clock.now()]),
            order: AtomicU64::new(0),
            arrived: AtomicUsize::new(0),
        };
        let by_thread: Vec<Vec<Vec<Event>>> = std::thread::scope(|scope| {
            let stage = &stage;
            let threads = (0..self.threads).map(|thread| scope.spawn(move || stage.act(thread)));
            let threads: Vec<_> = threads.collect();
            threads.into_iter().map(|thread| thread.join().expect("the store failed")).collect()
        });
        let times = stage.times.into_inner().expect("no thread panicked");
        let mut linearized = Linearized::default();
        for round in 0..self.rounds {
            let events = by_thread.iter().flat_map(|rounds| rounds[round].iter().cloned());
            let history =
                History { limits: self.limits, events: events.collect(), times: times.clone() };
            linearized.add(history.events.iter().collect());
            linearized.undecided += usize::from(!history.explain()?);
        }
        Ok(linearized)
    }
}

impl Linearized {
    fn add(&mut self, mut events: Vec<&Event>) {
        events.sort_unstable_by_key(|event| event.asked);
        let mut answered = 0;
        for event in events {
            self.requests += 1;
            self.admitted += usize::from(event.is_admitted());
            self.overlapping += usize::from(event.asked < answered);
            answered = event.answered.max(answered);
        }
    }
}

/// The state that the threads of a run share.
struct Stage<'a, A, S> {
    scenario: &'a ConcurrentRun<'a, A>,
    store: &'a S,
    clock: &'a ManualClock,
    /// All times that the clock has shown.
    times: Mutex<Vec<Timestamp>>,
    /// The counter that orders all events.
    order: AtomicU64,
    /// How many threads have reached the beginning of a round, summed over all rounds.
    arrived: AtomicUsize,
}

impl<A: Algorithm, S: SyncStore<A>> Stage<'_, A, S> {
    /// Runs one thread's requests, round by round, and returns its events.
    fn act(&self, thread: usize) -> Vec<Vec<Event>> {
        let scenario = self.scenario;
        let mut drawn = Lcg::new(scenario.seed.wrapping_add(thread as u64));
        let requests = scenario.requests.min(MOST / scenario.threads.max(1));
        let round = |round: usize| {
            let names: Vec<_> = (0..scenario.keys).map(|key| format!("{round}: {key}")).collect();
            let planned: Vec<_> = (0..requests).map(|_| drawn.next(scenario)).collect();
            meet(&self.arrived, scenario.threads * (round + 1));
            planned
                .into_iter()
                .map(|(event, step)| {
                    if let Some(step) = step {
                        self.move_on(step);
                    }
                    self.ask(event, &names)
                })
                .collect()
        };
        (0..scenario.rounds).map(round).collect()
    }

    fn move_on(&self, by: Duration) {
        let mut times = self.times.lock().expect("no thread panicked");
        let next = self.clock.now() + by;
        times.push(next);
        self.clock.set(next);
    }

    fn ask(&self, mut event: Event, names: &[String]) -> Event {
        let check = |&(limit, key, cost): &(usize, usize, u64)| {
            let limit = &self.scenario.limits[limit];
            Check { limit, key: &names[key], cost }
        };
        let checks: Vec<_> = event.asks.iter().map(check).collect();
        let batch = Batch::new(&checks).expect("no pair twice").op(event.op).now(Now::Store);
        let batch = event.id.map_or(batch, |id| batch.id(id));
        event.clock[0] = self.clock.now();
        event.asked = self.order.fetch_add(1, Ordering::SeqCst);
        let answer = match (&checks[..], event.op, event.id) {
            // Single acquires use the dedicated method.
            ([check], Op::Acquire, None) => {
                self.store.acquire_now(check.limit, check.key, check.cost)
            }
            _ => self.store.apply_now(&batch),
        };
        event.answered = self.order.fetch_add(1, Ordering::SeqCst);
        event.clock[1] = self.clock.now();
        event.answer = match answer {
            Ok(verdict) => Ok(verdict.decisions().to_vec()),
            Err(error) => match error.kind() {
                kind @ (ErrorKind::Unavailable | ErrorKind::Indeterminate) => {
                    panic!("{error} ({kind:?})")
                }
                kind => Err(kind),
            },
        };
        event
    }
}

/// Spins until so many threads have arrived: a thread that has to be woken would be too late to
/// overlap. Yields soon, as those that have not arrived may wait for a processor.
pub(crate) fn meet(arrived: &AtomicUsize, all: usize) {
    arrived.fetch_add(1, Ordering::SeqCst);
    let mut waited = 0_u32;
    while arrived.load(Ordering::SeqCst) < all {
        waited += 1;
        if waited.is_multiple_of(32) {
            std::thread::yield_now();
        }
        std::hint::spin_loop();
    }
}

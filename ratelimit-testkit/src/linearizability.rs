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

use ratelimit_core::store::{Batch, Check, Now, Op, RecordStore};
use ratelimit_core::{
    Algorithm, Clock, Decision, ErrorKind, Limit, ManualClock, Record, ReservationId, StoreError,
    SyncStore, Timestamp,
};

use crate::block_on;

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

/// A change of a record during a [`History`]: what the store was asked to replace, by what, and
/// whether it did. A position among the records of the history stands for each record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordChange {
    /// The position of the limit.
    pub limit: usize,
    /// The number of the key.
    pub key: usize,
    /// The record that is to be replaced; `None` for none.
    pub before: Option<usize>,
    /// The record in its place; `None` for none.
    pub after: Option<usize>,
    /// The position of the question in the order of all events.
    pub asked: u64,
    /// The position of the answer in the same order.
    pub answered: u64,
    /// The store's clock before and after the change.
    pub clock: [Timestamp; 2],
    /// Whether `before` stood, and so was replaced.
    pub is_done: bool,
}

/// What stands in the order.
#[derive(Clone, Copy)]
enum Entry<'h> {
    Asked(&'h Event),
    Changed(&'h RecordChange),
}

impl Entry<'_> {
    const fn asked(self) -> u64 {
        match self {
            Self::Asked(event) => event.asked,
            Self::Changed(change) => change.asked,
        }
    }

    fn limit_keys(self) -> Vec<LimitKey> {
        match self {
            Self::Asked(event) => event.asks.iter().map(|(limit, key, _)| (*limit, *key)).collect(),
            Self::Changed(change) => vec![(change.limit, change.key)],
        }
    }
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
        self.explain_with_records(&[], &[], steps)
    }

    /// [`explain_within`](Self::explain_within), where records of callers have changed meanwhile:
    /// each request is to be decided by those that stand where it comes in the order.
    ///
    /// # Errors
    /// No order explains the history.
    ///
    /// # Panics
    /// The history has more than 128 requests and changes.
    pub fn explain_with_records(
        &self,
        records: &[Record<A>],
        changes: &[RecordChange],
        steps: usize,
    ) -> Result<bool, Unexplained> {
        let all = self.events.len() + changes.len();
        assert!(all <= MOST, "{all} requests are more than {MOST}");
        let mut decided = true;
        for part in self.parts(changes) {
            match search(self.limits, records, &self.times, &part, steps) {
                SearchOutcome::Order => {}
                SearchOutcome::OutOfSteps => decided = false,
                SearchOutcome::None(longest) => return Err(self.unexplained(&part, longest)),
            }
        }
        Ok(decided)
    }

    /// The requests, grouped by the keys that batches join, each group in the order of asking.
    fn parts<'h>(&'h self, changes: &'h [RecordChange]) -> Vec<Vec<Entry<'h>>> {
        let mut parts: Vec<(Vec<LimitKey>, Vec<Entry<'h>>)> = Vec::new();
        let asked = self.events.iter().map(Entry::Asked);
        for entry in asked.chain(changes.iter().map(Entry::Changed)) {
            let state_of = |limit: usize| search::state_of(self.limits, limit);
            let limit_keys: Vec<_> =
                entry.limit_keys().into_iter().map(|(limit, key)| (state_of(limit), key)).collect();
            let mut joined = (limit_keys.clone(), vec![entry]);
            parts.retain_mut(|(known, events)| {
                let meets = limit_keys.iter().any(|limit_key| known.contains(limit_key));
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
            events.sort_unstable_by_key(|entry| entry.asked());
        }
        parts
    }

    fn unexplained(&self, part: &[Entry<'_>], longest: u128) -> Unexplained {
        let is_in_order = |position: usize| longest & (1 << position) != 0;
        let lines = part.iter().enumerate().map(|(position, entry)| {
            let mark = if is_in_order(position) { ' ' } else { '?' };
            match entry {
                Entry::Asked(event) => format!("{mark} {}\n", self.line(event)),
                Entry::Changed(change) => format!("{mark} {change:?}\n"),
            }
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
        self.run_changing(store, clock, (&[], &|_, change| change))
    }

    /// [`run`](Self::run), while the threads also change the records of the callers: in turn with
    /// their requests, each caller's under a limit to one of these records or to none. No two of
    /// them are alike.
    ///
    /// # Errors
    /// A history that no order explains.
    ///
    /// # Panics
    /// The store fails.
    pub fn run_with_records<S: SyncStore<A> + RecordStore<A>>(
        &self,
        store: &S,
        clock: &ManualClock,
        records: &[Record<A>],
    ) -> Result<Linearized, Unexplained>
    where
        A: PartialEq,
    {
        let change = |key: &str, mut change: RecordChange| {
            let limit = &self.limits[change.limit];
            let stands = block_on(store.record(limit, key)).expect("the store failed");
            change.before = stands.map(|stands| {
                let is_it = |record: &Record<A>| *record == stands;
                records.iter().position(is_it).expect("no other record was set")
            });
            let [before, after] =
                [change.before, change.after].map(|record| record.map(|record| &records[record]));
            let done = block_on(store.exchange_record(limit, key, before, after));
            change.is_done = match done {
                Ok(is_done) => is_done,
                Err(error) if error.kind() == ErrorKind::Invalid => {
                    // It has ended already, and what stood stands.
                    change.after = change.before;
                    true
                }
                Err(error) => panic!("the store failed: {error}"),
            };
            change
        };
        self.run_changing(store, clock, (records, &change))
    }

    fn run_changing<S: SyncStore<A>>(
        &self,
        store: &S,
        clock: &ManualClock,
        (records, change): (&[Record<A>], &Changing<'_>),
    ) -> Result<Linearized, Unexplained> {
        let stage = Stage {
            scenario: self,
            store,
            records: records.len(),
            change,
            clock,
            times: Mutex::new(vec![clock.now()]),
            order: AtomicU64::new(0),
            arrived: AtomicUsize::new(0),
        };
        let by_thread: Vec<Vec<Round>> = std::thread::scope(|scope| {
            let stage = &stage;
            let threads = (0..self.threads).map(|thread| scope.spawn(move || stage.act(thread)));
            let threads: Vec<_> = threads.collect();
            threads.into_iter().map(|thread| thread.join().expect("the store failed")).collect()
        });
        let times = stage.times.into_inner().expect("no thread panicked");
        let mut linearized = Linearized::default();
        for round in 0..self.rounds {
            let of_threads = || by_thread.iter().map(|rounds| &rounds[round]);
            let events = of_threads().flat_map(|(events, _)| events.iter().cloned()).collect();
            let changes: Vec<_> = of_threads().flat_map(|(_, changes)| changes).cloned().collect();
            let history = History { limits: self.limits, events, times: times.clone() };
            linearized.add(history.events.iter().collect());
            let explained = history.explain_with_records(records, &changes, STEPS)?;
            linearized.undecided += usize::from(!explained);
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

/// What a thread did in a round.
type Round = (Vec<Event>, Vec<RecordChange>);

/// Changes the record of a key, and says what stood, and whether it was replaced.
type Changing<'c> = dyn Fn(&str, RecordChange) -> RecordChange + Sync + 'c;

/// The state that the threads of a run share.
struct Stage<'a, A, S> {
    scenario: &'a ConcurrentRun<'a, A>,
    store: &'a S,
    /// How many records there are to choose from.
    records: usize,
    change: &'a Changing<'a>,
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
    fn act(&self, thread: usize) -> Vec<Round> {
        let scenario = self.scenario;
        let mut drawn = Lcg::new(scenario.seed.wrapping_add(thread as u64));
        let requests = scenario.requests.min(MOST / scenario.threads.max(1));
        let round = |round: usize| {
            let names: Vec<_> = (0..scenario.keys).map(|key| format!("{round}: {key}")).collect();
            let mut plan = || {
                let change = (self.records > 0).then(|| drawn.change(scenario, self.records));
                (drawn.next(scenario), change.flatten())
            };
            let planned: Vec<_> = (0..requests).map(|_| plan()).collect();
            meet(&self.arrived, scenario.threads * (round + 1));
            let (mut events, mut changes) = Round::default();
            for ((event, step), change) in planned {
                if let Some(step) = step {
                    self.move_on(step);
                }
                match change {
                    Some(change) => changes.push(self.change(change, &names)),
                    None => events.push(self.ask(event, &names)),
                }
            }
            (events, changes)
        };
        (0..scenario.rounds).map(round).collect()
    }

    fn move_on(&self, by: Duration) {
        let mut times = self.times.lock().expect("no thread panicked");
        let next = self.clock.now() + by;
        times.push(next);
        self.clock.set(next);
    }

    fn change(&self, mut change: RecordChange, names: &[String]) -> RecordChange {
        change.clock[0] = self.clock.now();
        change.asked = self.order.fetch_add(1, Ordering::SeqCst);
        change = (self.change)(&names[change.key], change);
        change.answered = self.order.fetch_add(1, Ordering::SeqCst);
        change.clock[1] = self.clock.now();
        change
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

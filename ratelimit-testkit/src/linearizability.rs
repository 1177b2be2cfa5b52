//! A concurrent history, recorded, and explained after the fact: the witness.
//!
//! Several threads ask a [`SyncStore`] at the same time, and note what they were told, and when: who had
//! been answered before whom asked, and what the store's clock showed before and after. Afterwards an order
//! is looked for, one request after the other, that agrees with all of it: in which nobody comes before
//! somebody who was answered before he asked, and every answer is, field by field, the one that
//! [`decide`](ratelimit_core::decide) gives in this order, at a time that the clock showed meanwhile. A store
//! whose answers no order explains has lost a charge, or made one up.
//!
//! ```
//! use ratelimit_core::{Algorithm, Gcra, Limit, Op, Timestamp};
//! use ratelimit_testkit::{Event, History};
//!
//! let limits = [Limit::new("login", Gcra::new("5/s".parse()?, 3)?)?];
//! let first = limits[0].algorithm().step(None, Timestamp::ZERO, 1).decision;
//! let told = |asked, answered| Event {
//!     op: Op::Acquire, asks: vec![(0, 0, 1)], id: None, asked, answered,
//!     clock: [Timestamp::ZERO; 2], answer: Ok(vec![first]),
//! };
//! // Two at the same time are both told that they were the first: a charge is lost.
//! let history = History { limits: &limits, events: vec![told(0, 2), told(1, 3)], times: vec![Timestamp::ZERO] };
//! assert!(history.explain().is_err());
//! # Ok::<(), ratelimit_core::ConfigError>(())
//! ```
//!
//! [`ConcurrentRun`] asks a store so that there is a history to look at.
//!
//! The order is looked for as Wing and Gong do ("Testing and verifying concurrent objects", 1993), and
//! what has been tried is remembered as Lowe does ("Testing for linearizability", 2017). Keys that no batch
//! joins are looked at apart.

use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use ratelimit_core::{
    Algorithm, Batch, Check, Clock, Decision, ErrorKind, Limit, ManualClock, Now, Op,
    ReservationId, StoreError, SyncStore, Timestamp,
};

mod plan;
mod search;

use plan::Plan;
use search::{Found, search};

/// The most requests that a history can have: what makes an order is one number's bits.
const MOST: usize = 128;

/// A limit and a key, by their numbers.
type Place = (usize, usize);

/// One request of a [`History`]: what was asked and answered, and when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// What was to be done.
    pub op: Op,
    /// Of which limit, by its position, which key, by its number, at which cost: no pair twice.
    pub asks: Vec<(usize, usize, u64)>,
    /// Under which id, if under any.
    pub id: Option<ReservationId>,
    /// When it was asked, as a position in the order of all that happened.
    pub asked: u64,
    /// When it was answered, in the same order.
    pub answered: u64,
    /// What the store's clock showed before and after.
    pub clock: [Timestamp; 2],
    /// What each limit said, or what kind of request it was that cannot be.
    pub answer: Result<Vec<Decision>, ErrorKind>,
}

/// What several threads asked a store about keys that nobody has asked about before.
#[derive(Clone, Debug)]
pub struct History<'a, A> {
    /// The limits.
    pub limits: &'a [Limit<A>],
    /// The requests, in any order: 128 at the most.
    pub events: Vec<Event>,
    /// All that the store's clock showed meanwhile, ascending.
    pub times: Vec<Timestamp>,
}

impl<A: Algorithm<State: PartialEq>> History<'_, A> {
    /// Whether an order explains it. `Ok(false)` if that could not be told in so many steps, which is what
    /// happens to histories with too much at the same time.
    ///
    /// # Errors
    /// There is none.
    ///
    /// # Panics
    /// More than 128 requests.
    pub fn explain(&self) -> Result<bool, Unexplained> {
        assert!(self.events.len() <= MOST, "{} requests are more than {MOST}", self.events.len());
        let mut decided = true;
        for part in self.parts() {
            match search(self.limits, &self.times, &part) {
                Found::Order => {}
                Found::OutOfSteps => decided = false,
                Found::None(longest) => return Err(self.unexplained(&part, longest)),
            }
        }
        Ok(decided)
    }

    /// The requests by the keys that batches join, each part in the order of asking.
    fn parts(&self) -> Vec<Vec<&Event>> {
        let mut parts: Vec<(Vec<Place>, Vec<&Event>)> = Vec::new();
        for event in &self.events {
            let places = || event.asks.iter().map(|(limit, key, _)| (*limit, *key));
            let mut joined = (places().collect::<Vec<_>>(), vec![event]);
            parts.retain_mut(|(known, events)| {
                let meets = places().any(|place| known.contains(&place));
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
        let is_in_order = |place: usize| longest & (1 << place) != 0;
        let lines = part.iter().enumerate().map(|(place, event)| {
            let mark = if is_in_order(place) { ' ' } else { '?' };
            format!("{mark} {}\n", self.told(event))
        });
        Unexplained { told: lines.collect() }
    }

    fn told(&self, event: &Event) -> String {
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

/// That no order explains what a store has told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unexplained {
    /// The requests, from when to when, in the order of asking. Those with a question mark have no place
    /// after the longest order of the others that there is.
    pub told: String,
}

impl fmt::Display for Unexplained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no order explains these answers:\n{}", self.told)
    }
}

impl std::error::Error for Unexplained {}

/// What was looked at without a fault being found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Linearized {
    /// How many requests.
    pub requests: usize,
    /// How many of them were admitted.
    pub admitted: usize,
    /// How many had begun before the one that was answered last had been answered: at the same time as others.
    pub overlapping: usize,
    /// How many histories were too much to tell.
    pub undecided: usize,
}

/// How a store is to be asked.
#[derive(Debug)]
pub struct ConcurrentRun<'a, A> {
    /// By which limits.
    pub limits: &'a [Limit<A>],
    /// By how many threads.
    pub threads: usize,
    /// How many histories, each on keys of its own.
    pub rounds: usize,
    /// How many requests each thread makes in each: 128 among them at the most.
    pub requests: usize,
    /// About how many keys in each.
    pub keys: usize,
    /// How many checks the largest batches have.
    pub batch: usize,
    /// Whether things are held under ids, and settled.
    pub reservations: bool,
    /// The most that the clock moves on at a time.
    pub step: Duration,
    /// What the requests are drawn from.
    pub seed: u64,
}

impl<A> Clone for ConcurrentRun<'_, A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A> Copy for ConcurrentRun<'_, A> {}

impl<'a, A: Algorithm<State: PartialEq>> ConcurrentRun<'a, A> {
    /// Four threads on two keys, batches of up to three, ids, and steps of up to a fifth of a second.
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

    /// Asks a store, which lives by this clock, and which has room for all the keys, and looks for orders.
    ///
    /// # Errors
    /// A history that no order explains.
    ///
    /// # Panics
    /// The store fails: it is full, or cannot be reached.
    pub fn run<S: SyncStore<A>>(
        &self,
        store: &S,
        clock: &ManualClock,
    ) -> Result<Linearized, Unexplained> {
        let stage = Stage {
            play: self,
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
        let times = stage.times.into_inner().expect("nobody panicked");
        let mut linearized = Linearized::default();
        for round in 0..self.rounds {
            let events = by_thread.iter().flat_map(|rounds| rounds[round].iter().cloned());
            let history =
                History { limits: self.limits, events: events.collect(), times: times.clone() };
            linearized.add(&history);
            linearized.undecided += usize::from(!history.explain()?);
        }
        Ok(linearized)
    }
}

impl Linearized {
    fn add<A>(&mut self, history: &History<'_, A>) {
        let mut events: Vec<_> = history.events.iter().collect();
        events.sort_unstable_by_key(|event| event.asked);
        let mut answered = 0;
        for event in events {
            self.requests += 1;
            let admits = |decisions: &Vec<Decision>| decisions.iter().all(|each| each.allowed);
            self.admitted += usize::from(event.answer.as_ref().is_ok_and(admits));
            self.overlapping += usize::from(event.asked < answered);
            answered = event.answered.max(answered);
        }
    }
}

/// What the threads of a play share.
struct Stage<'a, A, S> {
    play: &'a ConcurrentRun<'a, A>,
    store: &'a S,
    clock: &'a ManualClock,
    /// All that the clock has shown.
    times: Mutex<Vec<Timestamp>>,
    /// The order of all that happens.
    order: AtomicU64,
    /// How many threads have come to the beginning of a round, counted over all rounds.
    arrived: AtomicUsize,
}

impl<A: Algorithm, S: SyncStore<A>> Stage<'_, A, S> {
    /// What one thread does and is told, round by round.
    fn act(&self, thread: usize) -> Vec<Vec<Event>> {
        let play = self.play;
        let mut drawn = Plan::new(play.seed.wrapping_add(thread as u64));
        let requests = play.requests.min(MOST / play.threads.max(1));
        let round = |round: usize| {
            let names: Vec<_> = (0..play.keys).map(|key| format!("{round}: {key}")).collect();
            let planned: Vec<_> = (0..requests).map(|_| drawn.next(play)).collect();
            self.meet(round);
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
        (0..play.rounds).map(round).collect()
    }

    /// Waits for the others, awake: whoever is woken comes too late to meet them.
    fn meet(&self, round: usize) {
        self.arrived.fetch_add(1, Ordering::SeqCst);
        let all = self.play.threads * (round + 1);
        let mut waited = 0_u32;
        while self.arrived.load(Ordering::SeqCst) < all {
            waited += 1;
            if waited.is_multiple_of(256) {
                std::thread::yield_now();
            }
            std::hint::spin_loop();
        }
    }

    fn move_on(&self, by: Duration) {
        let mut times = self.times.lock().expect("nobody panicked");
        let next = self.clock.now() + by;
        times.push(next);
        self.clock.set(next);
    }

    fn ask(&self, mut event: Event, names: &[String]) -> Event {
        let check = |&(limit, key, cost): &(usize, usize, u64)| {
            let limit = &self.play.limits[limit];
            Check { limit, key: &names[key], cost }
        };
        let checks: Vec<_> = event.asks.iter().map(check).collect();
        let batch = Batch::new(&checks).expect("no pair twice").op(event.op).now(Now::Store);
        let batch = event.id.map_or(batch, |id| batch.id(id));
        event.clock[0] = self.clock.now();
        event.asked = self.order.fetch_add(1, Ordering::SeqCst);
        let answer = match (&checks[..], event.op, event.id) {
            // Through the door that is for these.
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

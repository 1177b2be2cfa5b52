//! [`Queue`]: in which flight a request goes, and who sends it.

use std::collections::VecDeque;
use std::sync::PoisonError;
use std::task::Waker;
use std::time::Duration;

use tokio::runtime;
use tokio::time::Instant;

use super::flight::{Flight, Seat};
// Those of loom in tests/store/flights_loom.rs.
use super::sync::{Arc, AtomicUsize, Mutex, MutexGuard, Ordering};
use crate::deadline::Deadline;

/// The most flights at once. With two, the server decides one while the client prepares the other.
pub(crate) const MOST_FLIGHTS: usize = 2;
/// The most requests that wait. Any more go alone, so that a caller that fills the queue turns no other away.
const MOST_WAITING: usize = 65_536;

/// The requests that wait, and the flights that have departed.
///
/// The invariant: a request waits only while [`MOST_FLIGHTS`] are in flight. The sender that ends a flight either sends the
/// next one or finds none.
///
/// A flight has a number, and only its sender or one that overtakes it ends it. A sender may stop for good: its caller may
/// keep a future and no longer poll it, and no thread may drive its runtime. So a flight has a time: when a quarter of a
/// deadline is over, the next request overtakes it. Half of a deadline may pass after that, until another runtime takes over
/// the connection.
#[derive(Debug)]
pub(crate) struct Queue<L, O> {
    waiting: Mutex<Waiting<L, O>>,
    /// How many requests wait. Each flight knows it, so that a dropped request frees its place at once.
    requests: Arc<AtomicUsize>,
    /// After how long a flight is overtaken.
    patience: Duration,
    /// 1 while the sender of a flight that has landed makes the next one ready.
    turning: AtomicUsize,
    /// The runtimes on which a task watches the clock for the requests that wait there.
    watched_on: Mutex<Vec<runtime::Id>>,
}

#[derive(Debug)]
struct Waiting<L, O> {
    in_flight: [Option<InFlight<L, O>>; MOST_FLIGHTS],
    /// The number of the last flight that departed.
    last: u64,
    flights: VecDeque<Arc<Flight<L, O>>>,
    /// Flights that were overtaken and not warned yet.
    overtaken: Vec<Arc<Flight<L, O>>>,
}

#[derive(Debug)]
struct InFlight<L, O> {
    number: u64,
    overtaken_at: Instant,
    /// Whether its sender has begun.
    has_begun: bool,
    /// `None` for a request that went alone.
    flight: Option<Arc<Flight<L, O>>>,
}

/// A flight whose turn it is, for its sender.
#[derive(Debug)]
pub(crate) struct Departure<L, O> {
    pub(crate) number: u64,
    pub(crate) flight: Arc<Flight<L, O>>,
}

/// How a request goes.
#[derive(Debug)]
pub(crate) enum Joined<L, O> {
    /// At once and alone, as the flight of this number, which its sender [ends](Queue::next).
    Goes(u64),
    /// With others. The caller sends the flight that departs now, if there is one.
    Waits(Seat<L, O>, Option<Departure<L, O>>),
    /// At once and alone, beside the flights: too many requests wait.
    Alone,
}

impl<L: Default, O> Queue<L, O> {
    /// A queue of requests that may take this long.
    pub(crate) fn new(deadline: Duration) -> Self {
        Self {
            waiting: Mutex::new(Waiting {
                in_flight: [const { None }; MOST_FLIGHTS],
                last: 0,
                flights: VecDeque::new(),
                overtaken: Vec::new(),
            }),
            requests: Arc::new(AtomicUsize::new(0)),
            patience: deadline / 4,
            turning: AtomicUsize::new(0),
            watched_on: Mutex::new(Vec::new()),
        }
    }

    /// Takes a request of this caller, who is woken when there is news. `board` adds it to the load of a flight, under the number of its
    /// seat, unless the flight has no room for it. An empty flight has room for every request.
    pub(crate) fn join(
        &self,
        deadline: Deadline,
        now: Instant,
        caller: Waker,
        mut board: impl FnMut(&mut L, usize) -> bool,
    ) -> Joined<L, O> {
        let mut caller = Some(caller);
        self.with(|waiting| {
            waiting.overtake(now);
            if waiting.flights.is_empty()
                && let Some(number) = waiting.begin(now + self.patience, None)
            {
                return Joined::Goes(number);
            }
            if self.requests.load(Ordering::Relaxed) >= MOST_WAITING {
                return Joined::Alone;
            }
            let last = waiting.flights.back();
            let seat = last
                .and_then(|last| Flight::board(last, deadline, &mut caller, &mut board))
                .or_else(|| {
                    // A full flight whose requests were all dropped makes room at once.
                    if waiting.flights.back().is_some_and(|last| last.is_empty()) {
                        waiting.flights.pop_back();
                    }
                    let flight = Arc::new(Flight::new(Arc::clone(&self.requests), deadline));
                    waiting.flights.push_back(Arc::clone(&flight));
                    Flight::board(&flight, deadline, &mut caller, &mut board)
                });
            match seat {
                Some(seat) => Joined::Waits(seat, waiting.begin_next(now + self.patience)),
                None => Joined::Alone,
            }
        })
    }

    /// A flight has landed. Returns whether the sender of another one is between its landing and the next departure.
    pub(crate) fn turns_with_another(&self) -> bool {
        self.turning.swap(1, Ordering::Relaxed) == 1
    }

    /// Ends the flight of this number. Returns the next one, which its sender sends, unless none waits or another sender
    /// has ended it.
    pub(crate) fn next(&self, number: u64, now: Instant) -> Option<Departure<L, O>> {
        self.turning.store(0, Ordering::Relaxed);
        self.with(|waiting| {
            waiting.place_of(number)?.take();
            waiting.begin_next(now + self.patience)
        })
    }

    /// Begins a departure: of the flights whose senders have not begun, its flight becomes the one that came first. The tasks
    /// of two senders may begin in another order than their flights came.
    pub(crate) fn begin(&self, departure: &mut Departure<L, O>) {
        self.with(|waiting| {
            let Some(Some(own)) = waiting.place_of(departure.number) else { return };
            own.has_begun = true;
            let own = own.flight.take();
            // Numbers grow in the order in which flights came.
            let came_before = |trip: &&mut InFlight<L, O>| {
                !trip.has_begun && trip.flight.is_some() && trip.number < departure.number
            };
            let waits = waiting.in_flight.iter_mut().flatten().filter(came_before);
            let flight = match waits.min_by_key(|trip| trip.number) {
                Some(first) => std::mem::replace(&mut first.flight, own),
                None => own,
            };
            if let Some(flight) = &flight {
                departure.flight = Arc::clone(flight);
            }
            if let Some(Some(own)) = waiting.place_of(departure.number) {
                own.flight = flight;
            }
        });
    }

    /// Ends the flight of this number. Returns it, and all flights that wait.
    pub(crate) fn abandon(&self, number: u64) -> Vec<Arc<Flight<L, O>>> {
        self.with(|waiting| {
            let Some(ended) = waiting.place_of(number).and_then(Option::take) else {
                return Vec::new();
            };
            ended.flight.into_iter().chain(waiting.flights.drain(..)).collect()
        })
    }

    /// Warns the flights whose time is half over. Returns the flight that departs in place of one that stands still.
    pub(crate) fn watch(&self, now: Instant) -> Option<Departure<L, O>> {
        self.with(|waiting| {
            let in_flight = waiting.in_flight.iter().flatten();
            let all = in_flight.filter_map(|trip| trip.flight.as_ref()).chain(&waiting.flights);
            let late: Vec<_> = all.filter(|f| f.half_time <= now).map(Arc::clone).collect();
            waiting.overtaken.extend(late);
            waiting.overtake(now);
            waiting.begin_next(now + self.patience)
        })
    }

    /// Whether the caller is the first on this runtime that needs a task to watch the clock.
    pub(crate) fn begins_to_watch(&self, runtime: runtime::Id) -> bool {
        let mut watched_on = self.watched_on();
        let begins = !watched_on.contains(&runtime);
        if begins {
            watched_on.push(runtime);
        }
        begins
    }

    /// Whether no request waits or flies with others, so that the watch on this runtime ends.
    pub(crate) fn ends_to_watch(&self, runtime: runtime::Id) -> bool {
        let mut watched_on = self.watched_on();
        let is_idle = self.with(|waiting| {
            let mut in_flight = waiting.in_flight.iter().flatten();
            waiting.flights.is_empty() && in_flight.all(|trip| trip.flight.is_none())
        });
        if is_idle {
            watched_on.retain(|watched| *watched != runtime);
        }
        is_idle
    }

    /// Warns no flight while the lock is held: a waker is code of others.
    fn with<T>(&self, run: impl FnOnce(&mut Waiting<L, O>) -> T) -> T {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let result = run(&mut waiting);
        let overtaken = std::mem::take(&mut waiting.overtaken);
        drop(waiting);
        for flight in overtaken {
            flight.warn();
        }
        result
    }

    fn watched_on(&self) -> MutexGuard<'_, Vec<runtime::Id>> {
        self.watched_on.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<L, O> Waiting<L, O> {
    fn place_of(&mut self, number: u64) -> Option<&mut Option<InFlight<L, O>>> {
        let is_it = |place: &&mut Option<InFlight<L, O>>| {
            place.as_ref().is_some_and(|trip| trip.number == number)
        };
        self.in_flight.iter_mut().find(is_it)
    }

    /// Begins a flight, or a request alone, if a place is free.
    fn begin(&mut self, overtaken_at: Instant, flight: Option<Arc<Flight<L, O>>>) -> Option<u64> {
        let place = self.in_flight.iter_mut().find(|place| place.is_none())?;
        self.last += 1;
        *place = Some(InFlight { number: self.last, overtaken_at, has_begun: false, flight });
        Some(self.last)
    }

    /// Ends flights whose time is over. One that has not departed, because no thread drives its sender's runtime, waits again.
    fn overtake(&mut self, now: Instant) {
        for place in &mut self.in_flight {
            if let Some(late) = place.take_if(|trip| trip.overtaken_at <= now)
                && let Some(flight) = late.flight
            {
                if !flight.has_departed() {
                    self.flights.push_front(Arc::clone(&flight));
                }
                self.overtaken.push(flight);
            }
        }
    }

    /// Begins the first flight that waits.
    fn begin_next(&mut self, overtaken_at: Instant) -> Option<Departure<L, O>> {
        let flight = Arc::clone(self.flights.front()?);
        let number = self.begin(overtaken_at, Some(Arc::clone(&flight)))?;
        self.flights.pop_front();
        Some(Departure { number, flight })
    }
}

//! [`Queue`]: requests that wait for the call under way.

use std::collections::VecDeque;
use std::sync::PoisonError;

use hashbrown::HashTable;

// Those of loom in tests/store/merge_loom.rs.
use super::sync::{Mutex, MutexGuard};

/// The most requests in one call, but for those of groups that have only one in it. If each had another cost, a server
/// would be busy for half a millisecond.
pub(crate) const MOST_REQUESTS: usize = 1_024;
/// The most states in one call: each takes a server some 3 microseconds.
pub(crate) const MOST_STATES: usize = 256;
/// The most requests that wait, but for those whose states no other request waits for.
pub(crate) const MOST_WAITING: usize = 65_536;

/// The requests that wait, and whether a call is under way.
///
/// The invariant: if no call is under way, no request waits. The sender that ends a call either sends the next
/// flight or finds none.
///
/// Each call has a number, and only its sender or one that overtakes it can end it. A sender may stop for good: its
/// caller may keep the future and no longer poll it. Then a request that waits overtakes that call by its number.
#[derive(Debug)]
pub(crate) struct Queue<G> {
    waiting: Mutex<Waiting<G>>,
    /// The most requests that wait.
    bound: usize,
}

#[derive(Debug)]
struct Waiting<G> {
    /// The number of the call under way.
    under_way: Option<u64>,
    /// The number of the last call.
    last: u64,
    flights: VecDeque<Flight<G>>,
}

/// The groups that go to the server together. No two of them share a state.
#[derive(Debug)]
pub(crate) struct Flight<G> {
    pub(crate) groups: Vec<G>,
    /// The states, each with its group.
    states: HashTable<State>,
    requests: usize,
}

/// A state, by its hash, and the place of the group that reads and writes it.
#[derive(Clone, Copy, Debug)]
struct State {
    hash: u64,
    group: usize,
}

/// What becomes of a request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Joined<T> {
    /// No call was under way: the request goes at once, as the call of this number, which its sender
    /// [ends](Queue::end).
    Goes(u64),
    /// It waits in a group for the call of this number.
    Waits(T, u64),
    /// Too many requests wait already.
    Full,
}

impl<G> Default for Queue<G> {
    fn default() -> Self {
        Self::bounded(MOST_WAITING)
    }
}

impl<G> Default for Flight<G> {
    fn default() -> Self {
        Self { groups: Vec::new(), states: HashTable::new(), requests: 0 }
    }
}

impl<G> Waiting<G> {
    /// Begins a call, and returns its number.
    fn begin(&mut self) -> u64 {
        self.last += 1;
        self.under_way = Some(self.last);
        self.last
    }

    /// The last flight that reads and writes one of these states, and a group of it that does.
    fn shared(&self, states: &[u64]) -> Option<(usize, usize)> {
        let of = |flight: &Flight<G>| states.iter().find_map(|state| flight.group_of(*state));
        let mut flights = self.flights.iter().enumerate().rev();
        flights.find_map(|(place, flight)| Some((place, of(flight)?)))
    }

    /// How many requests wait.
    fn requests(&self) -> usize {
        self.flights.iter().map(|flight| flight.requests).sum()
    }
}

impl<G> Flight<G> {
    /// The place of the group that reads and writes this state.
    fn group_of(&self, hash: u64) -> Option<usize> {
        self.states.find(hash, |state| state.hash == hash).map(|state| state.group)
    }
}

impl<G> Queue<G> {
    /// A queue in which at most so many requests wait.
    pub(crate) fn bounded(bound: usize) -> Self {
        let waiting = Waiting { under_way: None, last: 0, flights: VecDeque::new() };
        Self { waiting: Mutex::new(waiting), bound }
    }

    /// Takes a request that reads and writes these states, by their hashes. `is_of` says whether it belongs to a
    /// group; `open` makes a group for it; `add` adds it to one.
    ///
    /// Requests that share a state go in the order in which they came: in the same group, or in a later flight. A busy
    /// state delays no other: the first request of another state goes in the next flight, however many requests are in
    /// it, and is not refused because too many wait.
    pub(crate) fn join<T>(
        &self,
        states: &[u64],
        is_of: impl Fn(&G) -> bool,
        open: impl FnOnce() -> G,
        add: impl FnOnce(&G) -> T,
    ) -> Joined<T> {
        let mut waiting = self.lock();
        let Some(call) = waiting.under_way else {
            return Joined::Goes(waiting.begin());
        };
        let is_full = waiting.requests() >= self.bound;
        // The first flight after all requests that share a state with this one.
        let mut first = 0;
        if let Some((last, group)) = waiting.shared(states) {
            if is_full {
                return Joined::Full;
            }
            let flight = &mut waiting.flights[last];
            let group = &flight.groups[group];
            if is_of(group) && flight.requests < MOST_REQUESTS {
                flight.requests += 1;
                return Joined::Waits(add(group), call);
            }
            first = last + 1;
        }
        let has_room = |flight: &Flight<G>| flight.states.len() + states.len() <= MOST_STATES;
        let place = match waiting.flights.iter().skip(first).position(has_room) {
            Some(place) => first + place,
            None if is_full => return Joined::Full,
            None => {
                waiting.flights.push_back(Flight::default());
                waiting.flights.len() - 1
            }
        };
        let flight = &mut waiting.flights[place];
        let group = open();
        let joined = add(&group);
        flight.requests += 1;
        let group_place = flight.groups.len();
        for hash in states {
            let state = State { hash: *hash, group: group_place };
            flight.states.insert_unique(*hash, state, |state| state.hash);
        }
        flight.groups.push(group);
        Joined::Waits(joined, call)
    }

    /// Ends the call of this number if no request waits. Returns whether some do: then the call lasts until the
    /// [next](Self::next) one.
    pub(crate) fn end(&self, call: u64) -> bool {
        let mut waiting = self.lock();
        if waiting.under_way != Some(call) {
            return false;
        }
        if waiting.flights.is_empty() {
            waiting.under_way = None;
        }
        waiting.under_way.is_some()
    }

    /// Ends the call of this number, and begins the next one with the flight that is returned. `None` if another
    /// sender has ended it, or if no request waits: then no call is under way.
    pub(crate) fn next(&self, call: u64) -> Option<(Flight<G>, u64)> {
        let mut waiting = self.lock();
        if waiting.under_way != Some(call) {
            return None;
        }
        waiting.under_way = None;
        let flight = waiting.flights.pop_front()?;
        Some((flight, waiting.begin()))
    }

    /// Ends the call of this number without a next one, and returns the groups of all requests that wait. None if
    /// another sender has ended it.
    pub(crate) fn abandon(&self, call: u64) -> Vec<G> {
        let mut waiting = self.lock();
        if waiting.under_way != Some(call) {
            return Vec::new();
        }
        waiting.under_way = None;
        waiting.flights.drain(..).flat_map(|flight| flight.groups).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Waiting<G>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

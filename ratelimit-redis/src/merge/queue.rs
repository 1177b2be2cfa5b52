//! [`Queue`]: requests that wait for the call under way.

use std::collections::VecDeque;
use std::sync::PoisonError;

use hashbrown::HashTable;

// Those of loom in tests/merge_loom.rs.
use super::sync::{Mutex, MutexGuard};

/// The most requests in one call. If each had another cost, a server would be busy for half a millisecond.
pub(crate) const MOST_REQUESTS: usize = 1_024;
/// The most states in one call: each takes a server some 3 microseconds.
pub(crate) const MOST_STATES: usize = 256;
/// The most requests that wait.
pub(crate) const MOST_WAITING: usize = 65_536;

/// The requests that wait, and whether a call is under way.
///
/// The invariant: if no call is under way, no request waits. Whoever ends a call either sends the next flight or
/// finds none.
#[derive(Debug)]
pub(crate) struct Queue<G> {
    waiting: Mutex<Waiting<G>>,
}

#[derive(Debug)]
struct Waiting<G> {
    is_busy: bool,
    flights: VecDeque<Flight<G>>,
    requests: usize,
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
    /// No call is under way: the request goes at once, and its sender [lands](Queue::next) it.
    Goes,
    /// It waits in a group.
    Waits(T),
    /// Too many requests wait already.
    Full,
}

impl<G> Default for Queue<G> {
    fn default() -> Self {
        let waiting = Waiting { is_busy: false, flights: VecDeque::new(), requests: 0 };
        Self { waiting: Mutex::new(waiting) }
    }
}

impl<G> Default for Flight<G> {
    fn default() -> Self {
        Self { groups: Vec::new(), states: HashTable::new(), requests: 0 }
    }
}

impl<G> Flight<G> {
    /// The place of the group that reads and writes this state.
    fn group_of(&self, hash: u64) -> Option<usize> {
        self.states.find(hash, |state| state.hash == hash).map(|state| state.group)
    }
}

impl<G> Queue<G> {
    /// Takes a request that reads and writes these states, by their hashes. `is_of` says whether it belongs to a
    /// group; `open` makes a group for it; `add` adds it to one.
    ///
    /// Requests that share a state go in the order in which they came: in the same group, or in a later flight.
    pub(crate) fn join<T>(
        &self,
        states: &[u64],
        is_of: impl Fn(&G) -> bool,
        open: impl FnOnce() -> G,
        add: impl FnOnce(&G) -> T,
    ) -> Joined<T> {
        let mut waiting = self.lock();
        if !waiting.is_busy {
            waiting.is_busy = true;
            return Joined::Goes;
        }
        if waiting.requests >= MOST_WAITING {
            return Joined::Full;
        }
        waiting.requests += 1;
        let overlaps =
            |flight: &Flight<G>| states.iter().any(|state| flight.group_of(*state).is_some());
        // The first flight after all requests that share a state with this one.
        let mut first = 0;
        if let Some(last) = waiting.flights.iter().rposition(overlaps) {
            let flight = &mut waiting.flights[last];
            let group = states.first().and_then(|state| flight.group_of(*state));
            let group = group.map(|place| &flight.groups[place]).filter(|group| is_of(group));
            if let Some(group) = group
                && flight.requests < MOST_REQUESTS
            {
                flight.requests += 1;
                return Joined::Waits(add(group));
            }
            first = last + 1;
        }
        let has_room = |flight: &Flight<G>| {
            flight.requests < MOST_REQUESTS && flight.states.len() + states.len() <= MOST_STATES
        };
        let place = waiting.flights.iter().skip(first).position(has_room).map(|n| first + n);
        let place = place.unwrap_or_else(|| {
            waiting.flights.push_back(Flight::default());
            waiting.flights.len() - 1
        });
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
        Joined::Waits(joined)
    }

    /// Ends the call under way, and begins the next one with the flight that is returned. `None` if no request
    /// waits: then no call is under way.
    pub(crate) fn next(&self) -> Option<Flight<G>> {
        let mut waiting = self.lock();
        let flight = waiting.flights.pop_front();
        waiting.is_busy = flight.is_some();
        waiting.requests -= flight.as_ref().map_or(0, |flight| flight.requests);
        flight
    }

    /// Ends the call under way without a next one, and returns the groups of all requests that wait.
    pub(crate) fn abandon(&self) -> Vec<G> {
        let mut waiting = self.lock();
        waiting.is_busy = false;
        waiting.requests = 0;
        waiting.flights.drain(..).flat_map(|flight| flight.groups).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Waiting<G>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

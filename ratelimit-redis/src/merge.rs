//! Merging: requests that come while a call is under way wait for it, and go together in the next one.
//!
//! This is flat combining (Hendler, Incze, Shavit and Tzafrir, SPAA 2010) with a server in place of a lock: one
//! task sends what all others wait for. A request that finds no call under way goes at once and alone, so no
//! request waits for company.
//!
//! - [`Queue`]: who waits, in which call each request goes, and who sends it.
//! - [`Group`]: the requests of the same limits for the same keys, which the script charges in order.
//!
//! `lua_mode/merged_call.rs` puts a request into a queue and derives its verdict; `lua_mode/flight.rs` sends the
//! calls.

use std::hash::BuildHasher;
use std::sync::Arc;

use dashmap::DashMap;
use hashbrown::DefaultHashBuilder;

mod group;
mod queue;
mod sync {
    pub(crate) use std::sync::{Mutex, MutexGuard};
}

pub(crate) use group::{Answers, Charged, Group, GroupCheck, Outcome, Place, Requests, Run};
pub(crate) use queue::{Flight, Joined, MOST_WAITING, Queue};

use crate::connection::slot;

/// The queues of a store, each made when it is first needed. Requests of one key meet in one queue: on a cluster in
/// that of their slot, because a call cannot span slots. On a single server those of different keys rarely meet: a
/// call for many keys costs it little less per key than a call for one, and waiting for it costs more.
#[derive(Debug)]
pub(crate) struct Queues {
    by: By,
    queues: DashMap<u16, Arc<Queue<Arc<Group>>>, DefaultHashBuilder>,
}

/// What decides the queue of a key.
#[derive(Debug)]
enum By {
    Slot,
    Hash(DefaultHashBuilder),
    /// One queue for all keys.
    #[cfg(test)]
    Store,
}

/// The queues of a single server: with some hundred requests under way, few find another key's call in theirs.
const QUEUES: u64 = 1_024;

impl Queues {
    pub(crate) fn new(is_cluster: bool) -> Self {
        let by = if is_cluster { By::Slot } else { By::Hash(DefaultHashBuilder::default()) };
        Self { by, queues: DashMap::default() }
    }

    /// One queue for all keys.
    #[cfg(test)]
    pub(crate) fn one(queue: Queue<Arc<Group>>) -> Self {
        Self { by: By::Store, queues: [(0, Arc::new(queue))].into_iter().collect() }
    }

    /// The queue for calls with this key.
    pub(crate) fn of(&self, key: &str) -> Arc<Queue<Arc<Group>>> {
        let number = match &self.by {
            By::Slot => slot::of(key),
            By::Hash(hasher) => u16::try_from(hasher.hash_one(key) % QUEUES).unwrap_or_default(),
            #[cfg(test)]
            By::Store => 0,
        };
        if let Some(queue) = self.queues.get(&number) {
            return Arc::clone(&queue);
        }
        Arc::clone(&self.queues.entry(number).or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::queue::{MOST_REQUESTS, MOST_STATES, SPREAD};
    use super::*;

    /// A group is its state; all requests of a state are alike.
    fn join(queue: &Queue<u64>, state: u64) -> Joined<()> {
        queue.join(&[state], |group| *group == state, || state, |_| ())
    }

    /// The states of each flight, in order.
    fn flights(queue: &Queue<u64>, mut call: u64) -> Vec<Vec<u64>> {
        let mut flights = Vec::new();
        while let Some((flight, next)) = queue.next(call) {
            flights.push(flight.groups);
            call = next;
        }
        flights
    }

    #[test]
    fn a_busy_state_delays_no_other() {
        let queue = Queue::default();
        let Joined::Goes(call) = join(&queue, 0) else { panic!("no call is under way") };
        let (hot, cold) = (1, 2);
        for _ in 0..10 * MOST_REQUESTS {
            assert!(matches!(join(&queue, hot), Joined::Waits(..)));
        }
        for state in cold..cold + 3 {
            assert!(matches!(join(&queue, state), Joined::Waits(..)));
        }
        let flights = flights(&queue, call);
        assert_eq!(flights[0], [hot, 2, 3, 4]);
        assert!(flights[1..].iter().all(|flight| *flight == [hot]), "{flights:?}");
        assert!(flights.len() > 10, "a call is bounded");
    }

    #[test]
    fn many_requests_of_one_state_are_spread_over_calls_and_few_are_not() {
        for (requests, sizes) in [
            (SPREAD, vec![SPREAD]),
            (2 * SPREAD, vec![SPREAD; 2]),
            (8 * SPREAD, vec![SPREAD, SPREAD, SPREAD, SPREAD, 170, 227, 115]),
        ] {
            let queue = Queue::default();
            let Joined::Goes(mut call) = join(&queue, 1) else { panic!("no call is under way") };
            for _ in 0..requests {
                assert!(matches!(join(&queue, 1), Joined::Waits(..)));
            }
            let mut flights = Vec::new();
            while let Some((flight, next)) = queue.next(call) {
                flights.push(flight.requests);
                call = next;
            }
            assert_eq!(flights, sizes);
        }
    }

    #[test]
    fn requests_of_one_state_do_not_use_up_the_places_of_others() {
        let queue = Queue::bounded(3);
        let Joined::Goes(call) = join(&queue, 0) else { panic!("no call is under way") };
        for _ in 0..3 {
            assert!(matches!(join(&queue, 1), Joined::Waits(..)));
        }
        assert!(matches!(join(&queue, 1), Joined::Full));
        // Each other state has a place, as many as there are in the flights.
        let most = MOST_STATES as u64;
        for state in 2..=most {
            assert!(matches!(join(&queue, state), Joined::Waits(..)), "{state}");
            assert!(matches!(join(&queue, state), Joined::Full), "{state}");
        }
        assert!(matches!(join(&queue, most + 1), Joined::Full));
        assert_eq!(flights(&queue, call).len(), 1);
    }
}

#[cfg(test)]
mod tests;

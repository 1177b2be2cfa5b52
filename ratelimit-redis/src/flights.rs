//! Flights: requests that wait for a connection go together in its next flight, whatever their keys.
//!
//! This is flat combining (Hendler, Incze, Shavit and Tzafrir, SPAA 2010) with a server in place of a lock: one task sends
//! what all others wait for. A request that finds fewer than [`MOST_FLIGHTS`] in flight goes at once and alone, so no
//! request waits for company.
//!
//! - [`Queue`] decides in which flight a request goes, and who sends it.
//! - [`Flight`] has a [`Seat`] per request: who wants to be woken, and what became of all of them.
//! - [`Load`] is what a flight carries: groups of requests, which a script charges in order.
//!
//! `lua_mode/rider.rs` puts a request into a queue and derives its verdict; `lua_mode/sender.rs` sends flights.

use std::sync::Arc;
use std::time::Duration;

use dashmap::DashMap;
use hashbrown::DefaultHashBuilder;

mod flight;
mod load;
mod queue;
mod sync {
    pub(crate) use std::sync::atomic::{AtomicUsize, Ordering};
    pub(crate) use std::sync::{Arc, Mutex, MutexGuard};
}

pub(crate) use flight::{Flight, News, Seat};
pub(crate) use load::{
    Charged, FlightOutcome, Group, GroupOutcome, LimitSet, Load, RiderVerdict, RiderVerdicts,
};
pub(crate) use queue::{Departure, Joined, Queue};

use crate::connection::slot;

/// A queue of requests that a script charges.
pub(crate) type Queued = Queue<Load, FlightOutcome>;

/// The queues of a store.
#[derive(Debug)]
pub(crate) enum Queues {
    /// All requests to one server meet in one queue.
    One(Arc<Queued>),
    /// On a cluster those of one slot do, since a script cannot span slots. Each queue is made when it is first needed.
    PerSlot(DashMap<u16, Arc<Queued>, DefaultHashBuilder>, Duration),
}

impl Queues {
    /// `deadline` is how long a request may take.
    pub(crate) fn new(is_cluster: bool, deadline: Duration) -> Self {
        if is_cluster {
            Self::PerSlot(DashMap::default(), deadline)
        } else {
            Self::One(Arc::new(Queue::new(deadline)))
        }
    }

    /// The queue for requests with this key.
    pub(crate) fn of(&self, key: &str) -> Arc<Queued> {
        match self {
            Self::One(queue) => Arc::clone(queue),
            Self::PerSlot(queues, deadline) => {
                let slot = slot::of(key);
                if let Some(queue) = queues.get(&slot) {
                    return Arc::clone(&queue);
                }
                Arc::clone(&queues.entry(slot).or_insert_with(|| Arc::new(Queue::new(*deadline))))
            }
        }
    }
}

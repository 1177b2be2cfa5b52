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
    /// On a single server: with some hundred requests under way, fewer than one in a hundred finds another key's call in
    /// its queue.
    Hash(DefaultHashBuilder),
}

impl Queues {
    pub(crate) fn new(is_cluster: bool) -> Self {
        let by = if is_cluster { By::Slot } else { By::Hash(DefaultHashBuilder::default()) };
        Self { by, queues: DashMap::default() }
    }

    /// The queue for calls with this key.
    pub(crate) fn of(&self, key: &str) -> Arc<Queue<Arc<Group>>> {
        let number = match &self.by {
            By::Slot => slot::of(key),
            By::Hash(hasher) => u16::try_from(hasher.hash_one(key) >> 48).unwrap_or_default(),
        };
        if let Some(queue) = self.queues.get(&number) {
            return Arc::clone(&queue);
        }
        Arc::clone(&self.queues.entry(number).or_default())
    }
}

#[cfg(test)]
mod tests;

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

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use dashmap::DashMap;

mod group;
mod queue;
mod sync {
    pub(crate) use std::sync::{Mutex, MutexGuard};
}

pub(crate) use group::{Answers, Charged, Group, GroupCheck, Outcome, Place, Requests, Run};
pub(crate) use queue::{Flight, Joined, MOST_WAITING, Queue};

use crate::connection::slot;

/// The queues of a store. Requests of one key meet in one queue. Those of different keys rarely do: a call for many
/// keys costs the server little less per key than a call for one, and waiting for it costs more.
#[derive(Debug)]
pub(crate) enum Queues {
    ByHash {
        hasher: RandomState,
        queues: Box<[Arc<Queue<Arc<Group>>>]>,
    },
    /// On a cluster one per slot, because a call cannot span slots.
    BySlot(DashMap<u16, Arc<Queue<Arc<Group>>>>),
}

/// The queues of a single server: with some hundred requests under way, few find another key's call in theirs.
const QUEUES: usize = 1_024;

impl Queues {
    pub(crate) fn new(is_cluster: bool) -> Self {
        if is_cluster {
            return Self::BySlot(DashMap::new());
        }
        let queues = (0..QUEUES).map(|_| Arc::default()).collect();
        Self::ByHash { hasher: RandomState::new(), queues }
    }

    /// One queue for all keys.
    #[cfg(test)]
    pub(crate) fn one(queue: Queue<Arc<Group>>) -> Self {
        Self::ByHash { hasher: RandomState::new(), queues: [Arc::new(queue)].into() }
    }

    /// The queue for calls with this key.
    pub(crate) fn of(&self, key: &str) -> Arc<Queue<Arc<Group>>> {
        match self {
            Self::ByHash { hasher, queues } => {
                #[allow(clippy::cast_possible_truncation, reason = "a few bits suffice")]
                let place = hasher.hash_one(key) as usize % queues.len();
                Arc::clone(&queues[place])
            }
            Self::BySlot(queues) => {
                let slot = slot::of(key);
                if let Some(queue) = queues.get(&slot) {
                    return Arc::clone(&queue);
                }
                Arc::clone(&queues.entry(slot).or_default())
            }
        }
    }
}

#[cfg(test)]
mod tests;

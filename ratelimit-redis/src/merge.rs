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

/// The queues of a store: one, or on a cluster one per slot, because a call cannot span slots.
#[derive(Debug)]
pub(crate) enum Queues {
    One(Arc<Queue<Arc<Group>>>),
    PerSlot(DashMap<u16, Arc<Queue<Arc<Group>>>>),
}

impl Queues {
    pub(crate) fn new(is_cluster: bool) -> Self {
        if is_cluster { Self::PerSlot(DashMap::new()) } else { Self::One(Arc::default()) }
    }

    /// The queue for calls with this key.
    pub(crate) fn of(&self, key: &str) -> Arc<Queue<Arc<Group>>> {
        match self {
            Self::One(queue) => Arc::clone(queue),
            Self::PerSlot(queues) => {
                let slot = slot::of(key);
                if let Some(queue) = queues.get(&slot) {
                    return Arc::clone(&queue);
                }
                Arc::clone(&queues.entry(slot).or_default())
            }
        }
    }
}

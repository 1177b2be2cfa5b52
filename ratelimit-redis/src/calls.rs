//! Calls that several requests share.
//!
//! A request that finds fewer calls out than may be is sent at once and alone. Any other waits in a
//! channel. One task per channel takes all that wait and sends them in one call as soon as another
//! call has ended ([`CallLimit`]). So no request waits for company.
//!
//! - [`Calls`] has the channel and the limit, on a cluster one of each per slot: a script cannot
//!   span slots.
//! - [`Load`] is what a call carries: groups of requests, which a script charges in order.
//!
//! `lua_mode/merge.rs` puts requests into the channel and derives their verdicts;
//! `lua_mode/sender.rs` is the task.

use std::sync::{Arc, OnceLock};

use dashmap::DashMap;
use hashbrown::DefaultHashBuilder;
use tokio::sync::mpsc;

use crate::connection::slot;
use crate::deadline::Deadline;
use crate::runtime::Home;

mod limit;
mod load;

pub(crate) use limit::{CallLimit, Permit};
pub(crate) use load::{
    Answer, Charged, Costs, Group, GroupOutcome, LimitSet, Load, Outcome, RequestVerdict, Verdicts,
    Waiting,
};

/// The most requests that wait. Any more are sent alone, so that a caller that fills the channel
/// turns no other away.
const MOST_WAITING: usize = 65_536;

/// The requests to one server, or for one slot of a cluster, that wait, and how many calls may be
/// out.
#[derive(Debug, Default)]
pub(crate) struct Calls {
    pub(crate) limit: Arc<CallLimit>,
    /// Made when the first request waits.
    waiting: OnceLock<mpsc::Sender<Box<Waiting>>>,
}

impl Calls {
    /// A call of one request, unless it has to wait.
    pub(crate) fn begin_alone(&self, deadline: Deadline) -> Option<Permit> {
        let none_waits = self.waiting.get().is_none_or(|all| all.capacity() == MOST_WAITING);
        if none_waits { self.limit.try_acquire(deadline) } else { None }
    }

    /// Puts a request among those that wait; `start` starts the task that sends them. Returns
    /// whether it waits: it does not if there is no room, or if the task has ended.
    pub(crate) fn wait(
        &self,
        request: Box<Waiting>,
        start: impl FnOnce(mpsc::Receiver<Box<Waiting>>),
    ) -> bool {
        let waiting = self.waiting.get_or_init(|| {
            let (sender, receiver) = mpsc::channel(MOST_WAITING);
            start(receiver);
            sender
        });
        waiting.try_send(request).is_ok()
    }
}

/// The calls of a store, before and after it has moved to a thread of its own.
#[derive(Debug)]
pub(crate) struct SharedCalls([Slots; 2]);

#[derive(Debug)]
enum Slots {
    One(Arc<Calls>),
    /// Each is made when it is first needed.
    Each(DashMap<u16, Arc<Calls>, DefaultHashBuilder>),
}

impl SharedCalls {
    pub(crate) fn new(is_cluster: bool) -> Self {
        let slots = || {
            if is_cluster { Slots::Each(DashMap::default()) } else { Slots::One(Arc::default()) }
        };
        Self([slots(), slots()])
    }

    /// Those of requests with this key.
    pub(crate) fn of(&self, home: &Home, key: &str) -> Arc<Calls> {
        match &self.0[usize::from(home.is_own_thread())] {
            Slots::One(calls) => Arc::clone(calls),
            Slots::Each(slots) => {
                let slot = slot::of(key);
                if let Some(calls) = slots.get(&slot) {
                    return Arc::clone(&calls);
                }
                Arc::clone(&slots.entry(slot).or_default())
            }
        }
    }
}

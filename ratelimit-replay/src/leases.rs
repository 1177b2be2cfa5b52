//! [`Leases`]: ends the leases of requests when these are over, where the input tells how long each
//! took.
//!
//! A lease is ended without an id, because the record of an id would stay in the store, and not
//! every limit of a policy has such records. A refund ends the newest leases of a key; those among
//! them that go on are granted again at their own times.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use ratelimit_core::store::Op;
use ratelimit_core::{Algorithm, AnyAlgorithm, Decision, Limit, Timestamp};

use crate::input::InputEntry;

/// The leases of a policy's limits, as the store has them.
#[derive(Default)]
pub(crate) struct Leases {
    /// By the position of the limit and the key, in the order in which they were granted.
    granted: HashMap<(usize, Box<str>), Vec<ReplayLease>>,
    /// The ends of requests that hold a lease.
    ends: BinaryHeap<Reverse<(Timestamp, usize, Box<str>)>>,
}

#[derive(Clone, Copy, Debug)]
struct ReplayLease {
    since: Timestamp,
    cost: u64,
    /// The numbers by which it was granted.
    by: AnyAlgorithm,
    /// When its request is over; `None` if the input does not tell.
    ends: Option<Timestamp>,
}

/// A change of a caller's leases, which was accepted before.
pub(crate) struct LeaseChange {
    /// The place of the limit.
    pub(crate) place: usize,
    /// The limit, by the numbers by which the lease was granted.
    pub(crate) limit: Limit<AnyAlgorithm>,
    pub(crate) key: Box<str>,
    pub(crate) op: Op,
    pub(crate) at: Timestamp,
    pub(crate) cost: u64,
}

impl Leases {
    /// Records what a request did to the leases of one limit.
    pub(crate) fn count(
        &mut self,
        (place, limit): (usize, &Limit<AnyAlgorithm>),
        decision: &Decision,
        entry: &InputEntry,
        allowed: bool,
    ) {
        let Some(lease_us) = lease_us(limit) else { return };
        let Some(key) = limit.key_for(&entry.caller).map(Box::<str>::from) else { return };
        let leases = self.granted.entry((place, key.clone())).or_default();
        let at = forget_ended(leases, entry.at, lease_us);
        let held = || leases.iter().fold(0_u64, |sum, lease| sum.saturating_add(lease.cost));
        let told = entry.costs.get(limit.name());
        let cost = match entry.op {
            Op::Acquire if allowed && decision.allowed => told,
            // The capacity is that of a record, if one stands.
            Op::Force => told.min(decision.limit.saturating_sub(held())),
            Op::Refund => return end_newest(leases, told),
            Op::Reset => return leases.clear(),
            _ => return,
        };
        if cost == 0 {
            return;
        }
        let ends = entry.duration_us.filter(|us| *us < lease_us && entry.op == Op::Acquire);
        let ends = ends.map(|us| entry.at.saturating_add_us(us));
        leases.push(ReplayLease { since: at, cost, by: *limit.algorithm(), ends });
        self.ends.extend(ends.map(|ends| Reverse((ends, place, key))));
    }

    /// What ends the leases of all requests that are over at this time, one after the other.
    pub(crate) fn end_until<'l>(
        &mut self,
        limit_at: impl Fn(usize) -> Option<&'l Limit<AnyAlgorithm>>,
        now: Timestamp,
    ) -> Vec<LeaseChange> {
        let mut changes = Vec::new();
        while self.ends.peek().is_some_and(|Reverse((ends, ..))| *ends <= now) {
            let Some(Reverse((at, place, key))) = self.ends.pop() else { break };
            let Some(limit) = limit_at(place) else { continue };
            let name = (place, key);
            let Some(leases) = self.granted.get_mut(&name) else { continue };
            forget_ended(leases, at, lease_us(limit).unwrap_or(0));
            if let Some(first) = leases.iter().position(|lease| lease.ends == Some(at)) {
                let ended = leases.remove(first);
                let later = leases.get(first..).unwrap_or_default();
                let cost = later.iter().fold(ended.cost, |sum, l| sum.saturating_add(l.cost));
                let change = |op, at, cost, by| {
                    let limit = limit.with_numbers(by).unwrap_or_else(|_| limit.clone());
                    LeaseChange { place, limit, key: name.1.clone(), op, at, cost }
                };
                changes.push(change(Op::Refund, at, cost, ended.by));
                let again = later.iter().map(|l| change(Op::Force, l.since, l.cost, l.by));
                changes.extend(again);
            }
            if leases.is_empty() {
                self.granted.remove(&name);
            }
        }
        changes
    }
}

/// How long a lease of this limit lasts; `None` if it has none.
fn lease_us(limit: &Limit<AnyAlgorithm>) -> Option<u64> {
    limit.reservation_us().filter(|_| limit.algorithm().has_leases())
}

/// Drops ended leases. Returns `at`, or the newest lease's time if the clock went back.
fn forget_ended(leases: &mut Vec<ReplayLease>, at: Timestamp, lease_us: u64) -> Timestamp {
    let at = leases.last().map_or(at, |newest| at.max(newest.since));
    leases.retain(|lease| at.saturating_us_since(lease.since) < lease_us);
    at
}

fn end_newest(leases: &mut Vec<ReplayLease>, mut cost: u64) {
    while let Some(newest) = leases.last_mut() {
        if newest.cost > cost {
            newest.cost -= cost;
            return;
        }
        cost -= newest.cost;
        leases.pop();
    }
}

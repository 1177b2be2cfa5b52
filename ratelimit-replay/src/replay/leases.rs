//! [`Leases`]: ends the leases of requests when these are over, where the input tells how long each
//! took.
//!
//! A lease is ended without an id, because the record of an id would stay in the store, and not
//! every limit of a policy has such records. A refund ends the newest leases of a key; those among
//! them that go on are granted again at their own times.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use ratelimit_core::store::{Batch, Check, Now, Op};
use ratelimit_core::{Algorithm, AnyAlgorithm, Limit, RateLimiter, Store, Timestamp};

use crate::input::InputEntry;
use crate::tally::Placed;

/// The leases of a policy's limits, as the store has them.
#[derive(Default)]
pub(super) struct Leases {
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

impl Leases {
    /// Records what a request did to the leases of one limit.
    pub(super) fn count(&mut self, (place, one): Placed<'_>, entry: &InputEntry, allowed: bool) {
        let limit = one.configured();
        let Some(lease_us) = lease_us(limit) else { return };
        let Some(key) = limit.key_for(&entry.caller).map(Box::<str>::from) else { return };
        let leases = self.granted.entry((place, key.clone())).or_default();
        let at = forget_ended(leases, entry.at, lease_us);
        let held = || leases.iter().fold(0_u64, |sum, lease| sum.saturating_add(lease.cost));
        let told = entry.costs.get(limit.name());
        let cost = match entry.op {
            Op::Acquire if allowed && one.allowed => told,
            // The capacity is that of a record, if one stands.
            Op::Force => told.min(one.limit.saturating_sub(held())),
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

    /// Ends the leases of all requests that are over at this time.
    pub(super) async fn end_until<S: Store<AnyAlgorithm>>(
        &mut self,
        limiter: &RateLimiter<S>,
        now: Timestamp,
    ) -> Result<(), S::Error> {
        while self.ends.peek().is_some_and(|Reverse((ends, ..))| *ends <= now) {
            let Some(Reverse((at, place, key))) = self.ends.pop() else { break };
            let Some(limit) = limiter.limits().as_slice().get(place) else { continue };
            let name = (place, key);
            let Some(leases) = self.granted.get_mut(&name) else { continue };
            forget_ended(leases, at, lease_us(limit).unwrap_or(0));
            if let Some(first) = leases.iter().position(|lease| lease.ends == Some(at)) {
                let ended = leases.remove(first);
                let later = leases.get(first..).unwrap_or_default();
                let cost = later.iter().fold(ended.cost, |sum, l| sum.saturating_add(l.cost));
                let again =
                    later.iter().map(|lease| (Op::Force, lease.since, lease.cost, lease.by));
                let all = std::iter::once((Op::Refund, at, cost, ended.by)).chain(again);
                for (op, at, cost, by) in all {
                    // They were accepted before.
                    let own = limit.with_numbers(by);
                    let check = Check { limit: own.as_ref().unwrap_or(limit), key: &name.1, cost };
                    let _ =
                        limiter.store().apply(&Batch::one(&check).op(op).now(Now::At(at))).await?;
                }
            }
            if leases.is_empty() {
                self.granted.remove(&name);
            }
        }
        Ok(())
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

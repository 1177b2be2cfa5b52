//! [`Observed`]: what the callers of limits need, seen by the same limits without a bound.
//!
//! No such limit denies, so each is decided alone, and its states are forgotten once they stop
//! mattering: the memory is that of the callers of a while.

use ratelimit_core::algorithm::{AnyState, Step, Write};
use ratelimit_core::store::{Batch, Check, Now, Op, Reservation, States, decide};
use ratelimit_core::{
    Algorithm as _, AnyAlgorithm, ConfigError, Decision, Limit, Limits, Timestamp,
};

use crate::by_hash::{ByHash, hash_of};
use crate::input::InputEntry;
use crate::leases::{LeaseChange, Leases};
use crate::nearness::KeyHashes;
use crate::suggest::{unbounded, windows};
use crate::tally::Tally;

#[cfg(test)]
mod tests;

/// How long a state is kept beyond its end, for lines that come late.
const LATE_US: u64 = 10 * 60 * 1_000_000;
/// The number of states at which those that have ended are first looked for.
const FEW_STATES: usize = 1_024;

/// Observes what the callers of limits need.
pub(crate) struct Observed {
    windows: Vec<Window>,
    /// The leases, if a limit has any; by the place of the window.
    leases: Option<Leases>,
    /// The latest time of a request.
    latest: Timestamp,
    /// Whether the limits also decide the requests.
    is_beside: bool,
}

/// One window of a limit, without a bound.
struct Window {
    /// The place of the limit in the policy.
    place: usize,
    /// The capacities of the limit's algorithm and of this window of it.
    capacities: [u128; 2],
    limit: Limit<AnyAlgorithm>,
    /// By the hash of the key.
    states: ByHash<Slot>,
    /// The number of states at which those that have ended are looked for.
    enough: usize,
}

/// The state of a caller.
#[derive(Default)]
struct Slot {
    state: Option<AnyState>,
    expires: Timestamp,
}

impl Observed {
    /// `is_beside`: whether the limits also decide the requests.
    pub(crate) fn new(limits: &Limits<AnyAlgorithm>, is_beside: bool) -> Result<Self, ConfigError> {
        let unbounded = unbounded(limits)?;
        let of = limits.iter().enumerate().flat_map(|(place, limit)| {
            let window = move |window: AnyAlgorithm| {
                let capacities = [limit.algorithm().capacity(), window.capacity()];
                (place, capacities.map(|n| u128::from(n.max(1))))
            };
            windows(limit.algorithm()).into_iter().map(window)
        });
        let windows = of.zip(&unbounded).map(|((place, capacities), limit)| Window {
            place,
            capacities,
            limit: limit.clone(),
            states: ByHash::new(usize::MAX),
            enough: FEW_STATES,
        });
        let has_leases = unbounded.iter().any(|limit| limit.algorithm().has_leases());
        Ok(Self {
            windows: windows.collect(),
            leases: has_leases.then(Leases::default),
            latest: Timestamp::ZERO,
            is_beside,
        })
    }

    /// Observes a request of a caller with these keys.
    pub(crate) fn count(&mut self, entry: &InputEntry, keys: &KeyHashes, tally: &mut Tally) {
        self.latest = entry.at.max(self.latest);
        self.end_leases(entry.at);
        let mut applied = None;
        for (nth, window) in self.windows.iter_mut().enumerate() {
            let Some(Some(hash)) = keys.get(window.place).copied() else { continue };
            let counts = &mut tally.limits[window.place];
            let cost = entry.costs.get(counts.limit.name());
            let mut most = None;
            if entry.op == Op::Acquire {
                let is_first = applied.replace(window.place) != Some(window.place);
                counts.applied += u64::from(is_first && !self.is_beside);
                let nearness = counts.nearness.as_mut();
                most = nearness.and_then(|of| of.need_of(hash, self.is_beside || !is_first));
                if most.is_none() {
                    continue;
                }
            }
            let Some(decision) = window.decide(hash, (entry.op, entry.at, cost)) else { continue };
            if let Some(leases) = &mut self.leases {
                leases.count((nth, &window.limit), &decision, entry, decision.allowed);
            }
            if let Some(most) = most {
                *most = window.need(&decision).max(*most);
                window.forget(self.latest);
            }
        }
    }

    /// Ends the leases of requests that are over.
    fn end_leases(&mut self, now: Timestamp) {
        let Self { windows, leases, .. } = self;
        let Some(leases) = leases else { return };
        let limit_at = |place: usize| windows.get(place).map(|window| &window.limit);
        for LeaseChange { place, key, op, at, cost, .. } in leases.end_until(limit_at, now) {
            if let Some(window) = windows.get_mut(place) {
                let _ = window.decide(hash_of(&*key), (op, at, cost));
            }
        }
    }
}

impl Window {
    /// Decides an operation. `None` if the algorithm lacks it: then it has no effect.
    fn decide(&mut self, hash: u64, (op, at, cost): (Op, Timestamp, u64)) -> Option<Decision> {
        let slot = self.states.of(hash, Slot::default)?;
        if let (Op::Acquire, Some(state)) = (op, &mut slot.state) {
            // In place, because a state may be as long as a window has requests.
            let Step { decision, write } = self.limit.step_in_place(state, at, cost);
            match write {
                Write::Keep => {}
                Write::Put { expires, .. } => slot.expires = expires,
                Write::Remove => slot.state = None,
            }
            return Some(decision);
        }
        let check = Check { limit: &self.limit, key: "", cost };
        let verdict = decide(&Batch::one(&check).op(op).now(Now::At(at)), at, slot);
        verdict.ok().map(|verdict| *verdict.summary())
    }

    /// The smallest capacity of the limit's algorithm that has room for what a caller has now used
    /// of this window. That of a lockout is larger than the count, which locks out when it is
    /// reached.
    fn need(&self, decision: &Decision) -> u64 {
        let used = if decision.allowed { decision.limit - decision.remaining } else { u64::MAX };
        let [capacity, of_window] = self.capacities;
        let locks_out = matches!(self.limit.algorithm(), AnyAlgorithm::Lockout(_));
        let below = used.saturating_sub(u64::from(!locks_out));
        let need = u128::from(below) * capacity / of_window + 1;
        u64::try_from(need).unwrap_or(u64::MAX)
    }

    /// Forgets the states that have ended, once there are many.
    fn forget(&mut self, latest: Timestamp) {
        if self.states.len() >= self.enough {
            self.states.retain(|slot| {
                slot.state.is_some() && latest.saturating_us_since(slot.expires) <= LATE_US
            });
            self.enough = FEW_STATES.max(2 * self.states.len());
        }
    }
}

impl States<AnyState> for Slot {
    fn get(&self, _: usize) -> Option<&AnyState> {
        self.state.as_ref()
    }

    fn put(&mut self, _: usize, write: Write<AnyState>) {
        match write {
            Write::Keep => {}
            Write::Put { state, expires } => {
                (self.state, self.expires) = (Some(state), expires);
            }
            Write::Remove => self.state = None,
        }
    }

    fn reservation(&self, _: usize) -> Option<Reservation> {
        None
    }

    fn fingerprint(&self) -> u64 {
        0
    }

    fn put_reservation(&mut self, _: usize, _: Reservation, _: Timestamp) {}
}

//! [`Judge`]: one policy, its store, and what was counted of its decisions.

use std::collections::HashSet;

use ratelimit_core::{
    Algorithm, Batch, Check, Decision, ErrorKind, Op, Policy, RateLimiter, Store, StoreError,
    Verdict,
};

use super::decider::{Refused, Skipped};
use super::leases::Leases;
use crate::decision_line::parts;
use crate::input::{BadLine, Entry};
use crate::tally::{Decided, Tally};

/// The number of keys that one call resets.
const FORGOTTEN_AT_ONCE: usize = 32;

/// Limits by position, each with a key for which it may have a state.
pub(crate) type Touched = HashSet<(usize, Box<str>)>;

/// Decides requests by one policy, and reuses its buffers from request to request.
pub(super) struct Judge<'r, S> {
    pub(super) limiter: &'r RateLimiter<S>,
    pub(super) tally: Tally,
    /// The keys used so far, if they are to be reset at the end.
    pub(super) touched: Option<Touched>,
    /// The leases, if a limit has any.
    leases: Option<Leases>,
    /// What the enforced limits decided that applied to the last request, by position.
    enforced: Vec<(usize, Decision)>,
    /// What the shadow limits decided.
    shadow: Vec<(usize, Decision)>,
}

impl<'r, S: Store<Policy>> Judge<'r, S> {
    pub(super) fn new(limiter: &'r RateLimiter<S>, nearness: bool, forgets: bool) -> Self {
        let has_leases = limiter.limits().iter().any(|limit| limit.algorithm().has_leases());
        Self {
            limiter,
            tally: Tally::new(limiter.limits(), nearness),
            touched: forgets.then(Touched::new),
            leases: has_leases.then(Leases::default),
            enforced: Vec::new(),
            shadow: Vec::new(),
        }
    }

    /// Refuses a request that no store can decide.
    pub(super) fn validate(&self, entry: &Entry) -> Result<(), BadLine> {
        let request = self.limiter.request(&entry.caller);
        request.validate().map_err(|refusal| BadLine(refusal.to_string()))
    }

    /// Decides a request and counts it.
    pub(super) async fn decide(&mut self, entry: &Entry) -> Result<Verdict, Refused<S::Error>> {
        let limits = self.limiter.limits().as_slice();
        let request = self.limiter.request(&entry.caller).cost(entry.cost).at(entry.at);
        if let Some(leases) = &mut self.leases {
            leases.end_until(self.limiter, entry.at).await.map_err(Refused::ByStore)?;
        }
        if let Some(touched) = &mut self.touched {
            for (place, limit) in limits.iter().enumerate() {
                if let Some(key) = limit.key_for(&entry.caller) {
                    touched.insert((place, key.into()));
                }
            }
        }
        let verdict = request.apply(entry.op).await.map_err(|error| match entry.op {
            Op::Refund | Op::Force if error.kind() == ErrorKind::Unsupported => {
                Refused::Line(Skipped::Refused(BadLine(error.to_string())))
            }
            _ => Refused::ByStore(error),
        })?;
        (self.enforced, self.shadow) = parts(self.limiter, &entry.caller, &verdict);
        if let Some(leases) = &mut self.leases {
            for (place, decision) in self.enforced.iter().chain(&self.shadow) {
                let limit = (*place, &limits[*place]);
                leases.count(limit, entry, decision, verdict.allowed());
            }
        }
        let (allowed, enforced, shadow) = (verdict.allowed(), &self.enforced, &self.shadow);
        self.tally.count(self.limiter.limits(), Decided { entry, allowed, enforced, shadow });
        Ok(verdict)
    }

    /// The last decision.
    pub(super) fn decided<'d>(&'d self, entry: &'d Entry, allowed: bool) -> Decided<'d> {
        Decided { entry, allowed, enforced: &self.enforced, shadow: &self.shadow }
    }
}

/// Resets every key that a replay used.
pub(crate) async fn forget<S: Store<Policy>>(
    limiter: &RateLimiter<S>,
    touched: &Touched,
) -> Result<(), S::Error> {
    let limits = limiter.limits().as_slice();
    let checks: Vec<Check<'_, Policy>> = touched
        .iter()
        .filter_map(|(place, key)| Some(Check { limit: limits.get(*place)?, key, cost: 0 }))
        .collect();
    for checks in checks.chunks(FORGOTTEN_AT_ONCE) {
        // A set contains no key twice.
        let Ok(batch) = Batch::new(checks) else { continue };
        match limiter.store().apply(&batch.op(Op::Reset)).await {
            Ok(_) => {}
            // The keys are on different servers of a cluster: reset them one by one.
            Err(error) if error.kind() == ErrorKind::CrossSlot => {
                for check in checks {
                    let _ = limiter.store().apply(&Batch::one(check).op(Op::Reset)).await?;
                }
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

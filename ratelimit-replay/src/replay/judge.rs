//! [`Judge`]: one policy, its store, and what was counted of its decisions.

use std::collections::HashSet;

use ratelimit_core::store::{Batch, Check, Now, Op};
use ratelimit_core::{
    Algorithm, AnyAlgorithm, ConfigError, ErrorKind, Numbers, RateLimiter, Store, StoreError,
    Verdict,
};

use crate::input::{BadLine, InputEntry};
use crate::leases::Leases;
use crate::nearness::KeyHashes;
use crate::observed::Observed;
use crate::records::GivenRecord;
use crate::tally::{Decided, Tally};

/// The number of keys that one call resets.
const FORGOTTEN_AT_ONCE: usize = 32;

/// Decides requests by one policy.
pub struct Judge<'r, S> {
    pub(super) limiter: &'r RateLimiter<S>,
    pub(super) tally: Tally,
    /// The keys used so far, if they are to be reset at the end: limits by position, each with a
    /// key for which it may have a state.
    touched: Option<HashSet<(usize, Box<str>)>>,
    /// The leases, if a limit has any.
    leases: Option<Leases>,
    /// What callers need, if that is observed.
    observed: Option<Observed>,
    /// Whether requests are decided.
    decides: bool,
}

impl<'r, S: Store<AnyAlgorithm>> Judge<'r, S> {
    /// `nearness`: whether to count how near callers came to each limit. `forgets`: whether the
    /// keys are to be reset at the end.
    pub fn new(limiter: &'r RateLimiter<S>, nearness: bool, forgets: bool) -> Self {
        let has_leases = limiter.limits().iter().any(|limit| limit.algorithm().has_leases());
        Self {
            limiter,
            tally: Tally::new(limiter.limits(), nearness),
            touched: forgets.then(HashSet::new),
            leases: has_leases.then(Leases::default),
            observed: None,
            decides: true,
        }
    }

    /// Counts who is decided by these records, which the store has.
    #[must_use]
    pub fn by_records(mut self, records: &[GivenRecord]) -> Self {
        self.tally.count_records(records);
        self
    }

    /// Observes, too, what callers need of the limits.
    pub fn observing(mut self) -> Result<Self, ConfigError> {
        self.tally = Tally::new(self.limiter.limits(), true);
        self.observed = Some(Observed::new(self.limiter.limits(), true)?);
        Ok(self)
    }

    /// Observes what callers need of the limits, and decides nothing.
    pub fn only_observing(limiter: &'r RateLimiter<S>) -> Result<Self, ConfigError> {
        let observed = Some(Observed::new(limiter.limits(), false)?);
        Ok(Self { observed, decides: false, leases: None, ..Self::new(limiter, true, false) })
    }

    /// What was counted.
    pub(super) fn into_tally(mut self) -> Tally {
        if self.observed.is_some() {
            self.tally.sum_up_needs();
        }
        self.tally
    }

    /// The numbers that the request has of its own under this policy. What callers need is observed
    /// without.
    pub(super) fn numbers(&self, entry: &InputEntry) -> Result<Option<Numbers>, BadLine> {
        if entry.numbers.is_empty() || !self.decides {
            return Ok(None);
        }
        let given = entry.numbers.iter().map(|(limit, numbers)| (limit, numbers));
        let numbers = self.limiter.limits().parse_numbers(given);
        numbers.map(Some).map_err(|error| error.to_string())
    }

    /// Refuses a request that no store can decide.
    pub(super) fn validate(&self, entry: &InputEntry) -> Result<Option<Numbers>, BadLine> {
        let request = self.limiter.request(&entry.caller).costs(&entry.costs);
        request.validate().map_err(|refusal| refusal.to_string())?;
        self.numbers(entry)
    }

    /// Decides a request and counts it. The inner error says that the store does not support the
    /// operation.
    pub(crate) async fn decide(
        &mut self,
        entry: &InputEntry,
        numbers: Option<&Numbers>,
    ) -> Result<Result<Verdict, BadLine>, S::Error> {
        if let Some(leases) = &mut self.leases {
            let limits = self.limiter.limits().as_slice();
            for change in leases.end_until(|place| limits.get(place), entry.at) {
                let check = Check { limit: &change.limit, key: &change.key, cost: change.cost };
                let batch = Batch::one(&check).op(change.op).now(Now::At(change.at));
                let _ = self.limiter.store().apply(&batch).await?;
            }
        }
        let keys = self.tally.key_hashes(&entry.caller);
        if !self.decides {
            self.tally.count_undecided(entry);
            self.observe(entry, &keys);
            return Ok(Ok(Verdict::several(Vec::new())));
        }
        let request = self.limiter.request(&entry.caller).costs(&entry.costs).at(entry.at);
        let request = numbers.map_or(request, |numbers| request.numbers(numbers));
        if let Some(touched) = &mut self.touched {
            for (place, limit) in self.limiter.limits().iter().enumerate() {
                touched.extend(limit.key_for(&entry.caller).map(|key| (place, key.into())));
            }
        }
        let verdict = match request.apply(entry.op).await {
            Err(error)
                if matches!(entry.op, Op::Refund | Op::Force)
                    && error.kind() == ErrorKind::Unsupported =>
            {
                return Ok(Err(error.to_string()));
            }
            applied => applied?,
        };
        let decided = Decided::new((self.limiter, numbers), entry, &verdict);
        if let Some(leases) = &mut self.leases {
            // An exempt caller is granted no lease.
            let tally = &self.tally;
            let charged = decided.each().filter(|(place, _)| !tally.is_exempt(*place, entry));
            charged.for_each(|(place, one)| {
                let limit = (place, one.configured());
                leases.count(limit, one.decision(), entry, verdict.allowed());
            });
        }
        self.tally.count(&decided, &keys);
        self.observe(entry, &keys);
        Ok(Ok(verdict))
    }

    /// Counts what the caller of a request needs.
    fn observe(&mut self, entry: &InputEntry, keys: &KeyHashes) {
        if let Some(observed) = &mut self.observed {
            observed.count(entry, keys, &mut self.tally);
        }
    }

    /// Whether keys were used that are to be reset at the end.
    pub(super) fn has_touched(&self) -> bool {
        self.touched.as_ref().is_some_and(|touched| !touched.is_empty())
    }

    /// Resets every key that was used, if that is to be done.
    pub(super) async fn forget(&self) -> Result<(), S::Error> {
        let (store, limits) = (self.limiter.store(), self.limiter.limits().as_slice());
        let checks: Vec<Check<'_, AnyAlgorithm>> = self
            .touched
            .iter()
            .flatten()
            .filter_map(|(place, key)| Some(Check { limit: limits.get(*place)?, key, cost: 0 }))
            .collect();
        for checks in checks.chunks(FORGOTTEN_AT_ONCE) {
            // A set contains no key twice.
            let Ok(batch) = Batch::new(checks) else { continue };
            match store.apply(&batch.op(Op::Reset)).await {
                // The keys are on different servers of a cluster: reset them one by one.
                Err(error) if error.kind() == ErrorKind::CrossSlot => {
                    for check in checks {
                        let _ = store.apply(&Batch::one(check).op(Op::Reset)).await?;
                    }
                }
                done => drop(done?),
            }
        }
        Ok(())
    }
}

//! A partial reservation: what is left of an estimate, down to a minimum.
//!
//! It is a sequence of at most [`ATTEMPTS`] requests under one id, each all or nothing. A denial
//! charges nothing and leaves no record, so the next attempt may take the id again.

use alloc::vec::Vec;

use super::{LimitCosts, Request};
use crate::algorithms::Algorithm;
use crate::decision::{Decision, Verdict};
use crate::identifiers::Identifiers;
use crate::op::Op;
use crate::refusal::Refusal;
use crate::store_traits::{Store, SyncStore};

/// The estimate, twice what the denial before says is left, and the minimum.
const ATTEMPTS: u32 = 4;

/// The estimate and the minimum under one limit. Limits that have the same are charged the same.
type Range = (u64, u64);

/// The costs of the attempts, one after the other.
struct Attempts<'l> {
    most: &'l LimitCosts,
    least: &'l LimitCosts,
    made: u32,
}

impl<'l> Attempts<'l> {
    /// Refuses a request that is no reservation, or that gives the cost of a limit that the policy
    /// lacks.
    fn new<S, A: Algorithm, C: Identifiers + ?Sized>(
        request: &Request<'l, S, A, C>,
        most: &'l LimitCosts,
        least: &'l LimitCosts,
    ) -> Result<Self, Refusal> {
        if request.id.is_none() {
            return Err(Refusal::NoId { op: Op::Acquire });
        }
        request.costs(least).validate()?;
        Ok(Self { most, least, made: 0 })
    }

    fn range(&self, limit: &str) -> Range {
        Self::range_of(self.most.get(limit), self.least.get(limit))
    }

    /// A minimum of 0 would reserve nothing, and one above the estimate is the estimate.
    fn range_of(most: u64, least: u64) -> Range {
        (most, least.max(1).min(most))
    }

    /// The costs of which each is made of the estimate and the minimum under its limit.
    fn costs(&self, cost: impl Fn(Range) -> u64) -> LimitCosts {
        let ((most, most_of_others), (least, least_of_others)) =
            (self.most.parts(), self.least.parts());
        let mut costs = LimitCosts::from(cost(Self::range_of(most_of_others, least_of_others)));
        for (limit, _) in most.chain(least) {
            costs.set(limit, cost(self.range(limit)));
        }
        costs
    }

    /// The costs of the next attempt, after this verdict on one at `costs`. `None` if the verdict
    /// stands: the costs are charged, or the minimum is denied.
    fn next<S, A: Algorithm, C: Identifiers + ?Sized>(
        &mut self,
        request: &Request<'_, S, A, C>,
        verdict: &Verdict,
        costs: &LimitCosts,
    ) -> Option<LimitCosts> {
        self.made += 1;
        let least = self.costs(|(_, least)| least);
        if verdict.allowed() || *costs == least || self.made >= ATTEMPTS {
            return None;
        }
        let decisions = request.limiter.named(verdict);
        // What a limit allows fits, whatever it shows: an exempt caller's has its state.
        let left = |range: Range, one: &Decision| if one.allowed { range.0 } else { one.remaining };
        let ranges = decisions.map(|one| (self.range(one.name()), one));
        let left: Vec<(Range, u64)> =
            ranges.map(|(range, one)| (range, left(range, &one))).collect();
        let fitting = |range: Range| {
            let same = left.iter().filter(|(of, _)| *of == range);
            same.map(|(_, remaining)| *remaining).chain([range.0]).min().unwrap_or_default()
        };
        let fits = left.iter().all(|(range, _)| fitting(*range) >= range.1);
        let is_last = self.made + 1 == ATTEMPTS;
        Some(if fits && !is_last { self.costs(fitting) } else { least })
    }
}

impl<S: Store<A>, A: Algorithm, C: Identifiers + Sync + ?Sized> Request<'_, S, A, C> {
    /// Reserves the [costs](Self::costs) under the [`id`](Self::id) if they fit; else what is left,
    /// if that is no less than `least`. Returns the verdict, and the costs that it is about: what
    /// is reserved if it is allowed, and otherwise the minimum, which is denied.
    ///
    /// Limits of the same estimate and the same minimum count the same thing, and are charged the
    /// same, as far as all of them have left. A limit that must have its whole cost has a minimum
    /// that is its estimate. A minimum of 0 counts as 1, and one above the estimate as the
    /// estimate.
    ///
    /// ```
    /// use ratelimit_core::{FixedWindow, LimitCosts, Limits, RateLimiter, ReservationId};
    /// use ratelimit_memory::MemoryStore;
    ///
    /// let limits = Limits::builder()
    ///     .limit("tokens", FixedWindow::per_day(1_000))
    ///     .limit("requests", FixedWindow::per_day(50));
    /// let limiter = RateLimiter::new(limits.build()?, MemoryStore::new());
    /// let costs = |tokens| LimitCosts::from(1).with("tokens", tokens);
    /// assert!(limiter.request("alice").costs(&costs(964)).check_now()?.allowed());
    ///
    /// let (id, estimate) = (ReservationId::random(), costs(100));
    /// let request = limiter.request("alice").id(id).costs(&estimate);
    /// let (verdict, reserved) = request.reserve_up_to_now(&costs(10))?;
    /// assert!(verdict.allowed());
    /// assert_eq!(reserved, costs(36)); // to settle at what is used of them
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// It asks the store once if the estimate fits, and at most four times: others may charge in
    /// between. Each attempt is charged in all limits or in none. The last one is for the minimum,
    /// so its denial says when the same call [succeeds](Verdict::retry_after). The same call again
    /// after it has reserved a part is an error that names the part.
    ///
    /// # Errors
    /// The store's error; after [`Indeterminate`](crate::ErrorKind::Indeterminate), settle the id
    /// at 0. No id; a limit without reservations; the cost of a name that no limit has. A denial is
    /// not an error.
    pub async fn reserve_up_to(
        self,
        least: &LimitCosts,
    ) -> Result<(Verdict, LimitCosts), S::Error> {
        let most = self.all_costs();
        let mut attempts = Attempts::new(&self, &most, least)?;
        let mut costs = most.clone();
        loop {
            let verdict = self.costs(&costs).check().await?;
            match attempts.next(&self, &verdict, &costs) {
                Some(next) => costs = next,
                None => return Ok((verdict, costs)),
            }
        }
    }
}

impl<S: SyncStore<A>, A: Algorithm, C: Identifiers + ?Sized> Request<'_, S, A, C> {
    /// [`reserve_up_to`](Self::reserve_up_to) without waiting.
    ///
    /// # Errors
    /// As [`reserve_up_to`](Self::reserve_up_to).
    pub fn reserve_up_to_now(self, least: &LimitCosts) -> Result<(Verdict, LimitCosts), S::Error> {
        let most = self.all_costs();
        let mut attempts = Attempts::new(&self, &most, least)?;
        let mut costs = most.clone();
        loop {
            let verdict = self.costs(&costs).check_now()?;
            match attempts.next(&self, &verdict, &costs) {
                Some(next) => costs = next,
                None => return Ok((verdict, costs)),
            }
        }
    }
}

impl<S, A, C: ?Sized> Request<'_, S, A, C> {
    /// What it costs under each limit.
    fn all_costs(&self) -> LimitCosts {
        self.costs.cloned().unwrap_or_else(|| self.cost.into())
    }
}

//! The answer: one [`Decision`] per limit, one [`Verdict`] per batch.
//!
//! `replenish_after_us` is the wait of a cost of `remaining + 1`. Every step and every Lua twin
//! computes that wait already, and one law checks it everywhere. It is what `t` of the `RateLimit`
//! header field reports.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::time::Duration;

/// The answer of one limit to one request.
///
/// ```
/// use ratelimit_core::{Algorithm, Gcra, Timestamp};
/// let gcra = Gcra::new("1/s".parse()?, 5)?;
/// let decision = gcra.step(None, Timestamp::ZERO, 2).decision;
/// assert!(decision.allowed);
/// assert_eq!((decision.limit, decision.remaining, decision.reset_after_us), (5, 3, 2_000_000));
/// # Ok::<(), ratelimit_core::ConfigError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Decision {
    /// Whether the request fits.
    pub allowed: bool,
    /// The cost of the request.
    pub cost: u64,
    /// The capacity: the burst of a bucket, the limit of a window.
    pub limit: u64,
    /// What is left after this decision, in whole units of cost; of a peek, what such a request
    /// would leave. After a denial it is what would fit now.
    pub remaining: u64,
    /// How long until the same request is admitted, in microseconds, if no other request comes. 0
    /// if it is admitted now, `None` if it never can be (its cost is above the capacity). The
    /// charge of a denied request, if there is one, counts (see
    /// [`Limit::count_attempts`](crate::Limit::count_attempts)).
    pub retry_after_us: Option<u64>,
    /// How long until `remaining` grows, in microseconds, if no other request comes: the wait of a
    /// request that costs `remaining + 1`. 0 if it does not grow, because nothing is missing.
    pub replenish_after_us: u64,
    /// How long until the limit has fully recovered, in microseconds, if no other request comes.
    pub reset_after_us: u64,
}

impl Decision {
    /// [`retry_after_us`](Self::retry_after_us) as a duration.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        self.retry_after_us.map(Duration::from_micros)
    }

    /// [`replenish_after_us`](Self::replenish_after_us) as a duration. `None` if nothing is
    /// missing.
    #[must_use]
    pub fn replenish_after(&self) -> Option<Duration> {
        (self.replenish_after_us > 0).then(|| Duration::from_micros(self.replenish_after_us))
    }

    /// [`reset_after_us`](Self::reset_after_us) as a duration.
    #[must_use]
    pub fn reset_after(&self) -> Duration {
        Duration::from_micros(self.reset_after_us)
    }
}

/// The answer of all limits of a batch together.
///
/// A verdict limits nothing by itself: the caller must read [`allowed`](Self::allowed).
///
/// It is allowed when every limit allows it. It shows the `limit` and `remaining` of the limit with
/// the least remaining (the first on a tie), as `replenish_after` the moment when the least
/// remaining grows, the longest `reset_after`, and as `retry_after` the moment when all of them
/// would admit. A batch of one answers inline, without an allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a verdict limits nothing by itself: look at `allowed()`"]
pub struct Verdict {
    summary: Decision,
    decisions: DecisionList,
}

// Two variants of 24 bytes, and no field beside them. A third variant costs a check in memory two
// hundredths of its instructions, to drop it, and a field in the verdict as much of several checks
// at once (measured).
#[derive(Clone, Debug, PartialEq, Eq)]
enum DecisionList {
    One,
    Several { decisions: Box<[Decision]>, extras: Option<Box<VerdictExtras>> },
}

/// The parts most verdicts lack, boxed to keep [`Verdict`] small.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct VerdictExtras {
    /// Whether there is one decision, which is the summary.
    is_one: bool,
    /// The limits that have decided, unless they are the first ones of the policy, in their
    /// positions.
    positions: Option<Box<[usize]>>,
    /// The decisions of shadow limits, with their positions in the policy.
    shadow: Vec<(usize, Decision, Account)>,
    source: Source,
    is_unrecorded: bool,
    /// What is not 0, with the position of its decision.
    accounts: Vec<(usize, Account)>,
}

/// What a limit leaves beside its [`Decision`], in units of cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Account {
    /// What the key owes after this decision, rounded up. 0 for a limit without a
    /// [debt](crate::Algorithm::debt).
    pub owed: u64,
    /// What a forced charge or a settlement used and the limit did not charge, because it passes
    /// capacity and debt. Rounded up.
    pub forgiven: u64,
    /// What the request was to charge, if that is not the decision's cost: the difference to what
    /// was reserved, or nothing of a refund or a request that is repeated under its id. Only told
    /// of a limit that [warns](crate::Limit::warn_at_percent).
    pub charged: Option<u64>,
}

/// Where a [`Verdict`] comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Source {
    /// The store decided.
    #[default]
    Store,
    /// The store was unreachable, and a fallback decided by each limit's [outage
    /// behaviour](crate::OnOutage).
    Fallback,
    /// A cache decided by what it knows of the store's states.
    Cache,
    /// The request was served from an allotment: budget that the store had charged in advance. All
    /// values of the decisions but `allowed` are as of that charge, without what other processes
    /// have charged since.
    Allotment,
}

impl Source {
    /// The name in metrics and traces.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Store => "store",
            Self::Fallback => "fallback",
            Self::Cache => "cache",
            Self::Allotment => "allotment",
        }
    }
}

impl Verdict {
    /// The verdict of a single limit.
    #[inline]
    pub const fn one(decision: Decision) -> Self {
        Self { summary: decision, decisions: DecisionList::One }
    }

    /// The verdict of several limits, in the order of the batch. Without any, the request is
    /// unlimited: see [`Verdict::is_unlimited`].
    #[inline]
    pub fn several(decisions: Vec<Decision>) -> Self {
        if let [decision] = *decisions {
            return Self::one(decision);
        }
        let summary = summarise(decisions.iter().copied());
        let decisions = decisions.into_boxed_slice();
        Self { summary, decisions: DecisionList::Several { decisions, extras: None } }
    }

    /// The same verdict with a change of its extras.
    fn with_extras(mut self, set: impl FnOnce(&mut VerdictExtras)) -> Self {
        let (decisions, mut extras) = match self.decisions {
            DecisionList::One => (
                Box::default(),
                Box::new(VerdictExtras { is_one: true, ..VerdictExtras::default() }),
            ),
            DecisionList::Several { decisions, extras } => (decisions, extras.unwrap_or_default()),
        };
        set(&mut extras);
        self.decisions = DecisionList::Several { decisions, extras: Some(extras) };
        self
    }

    /// The same verdict, from this source.
    pub fn with_source(self, source: Source) -> Self {
        if source == self.source() {
            self
        } else {
            self.with_extras(|extras| extras.source = source)
        }
    }

    /// The same verdict, of a charge [without a record](Self::is_unrecorded).
    pub fn unrecorded(self) -> Self {
        self.with_extras(|extras| extras.is_unrecorded = true)
    }

    /// The same verdict beside the decisions of shadow limits, each with its position in the
    /// policy.
    pub(crate) fn with_shadow(self, shadow: Vec<(usize, Decision, Account)>) -> Self {
        if shadow.is_empty() { self } else { self.with_extras(|extras| extras.shadow = shadow) }
    }

    /// The same verdict, decided by the limits at these positions of a policy, in ascending order.
    /// By default a verdict was decided by the first limits, each in its position.
    pub(crate) fn at_positions(self, positions: impl Iterator<Item = usize> + Clone) -> Self {
        if positions.clone().enumerate().all(|(position, limit)| position == limit) {
            return self;
        }
        self.with_extras(|extras| extras.positions = Some(positions.collect()))
    }

    /// The position, in the policy, of the limit that made this decision.
    pub(crate) fn position_of(&self, nth: usize) -> usize {
        let positions = self.extras().and_then(|extras| extras.positions.as_ref());
        positions.and_then(|positions| positions.get(nth)).copied().unwrap_or(nth)
    }

    /// The decisions of shadow limits, with their positions in the policy.
    pub(crate) fn shadow(&self) -> &[(usize, Decision, Account)] {
        self.extras().map_or(&[], |extras| &extras.shadow)
    }

    fn extras(&self) -> Option<&VerdictExtras> {
        match &self.decisions {
            DecisionList::Several { extras, .. } => extras.as_deref(),
            DecisionList::One => None,
        }
    }

    /// What decided: the store, a fallback during an outage, a cache, or an allotment.
    #[must_use]
    pub fn source(&self) -> Source {
        self.extras().map_or(Source::Store, |extras| extras.source)
    }

    /// Whether the store charged the request without a record of its reservation, for which it had
    /// no room. The charge is final: settling it changes nothing, and a lease ends when it expires.
    #[must_use]
    pub fn is_unrecorded(&self) -> bool {
        self.extras().is_some_and(|extras| extras.is_unrecorded)
    }

    /// What each [shadow limit](crate::Limit::shadow) would have decided. They affect nothing else
    /// in the verdict.
    #[must_use]
    pub fn shadow_decisions(&self) -> impl ExactSizeIterator<Item = &Decision> {
        self.shadow().iter().map(|(_, decision, _)| decision)
    }

    /// Adds each limit's account (owed, forgiven), by the position of its decision. Zero accounts
    /// are dropped.
    pub fn with_accounts(self, accounts: impl IntoIterator<Item = (usize, Account)>) -> Self {
        let accounts = accounts.into_iter().filter(|(_, account)| *account != Account::default());
        let accounts: Vec<_> = accounts.collect();
        if accounts.is_empty() {
            self
        } else {
            self.with_extras(|extras| extras.accounts = accounts)
        }
    }

    /// What the [decision](Self::decisions) at this position leaves beside itself.
    #[must_use]
    pub fn account(&self, position: usize) -> Account {
        let mut own = self.accounts().filter(|(of, _)| *of == position);
        own.next().map_or_else(Account::default, |(_, account)| account)
    }

    /// All that is not 0, with the positions of their [decisions](Self::decisions).
    pub fn accounts(&self) -> impl Iterator<Item = (usize, Account)> + '_ {
        self.extras().into_iter().flat_map(|extras| extras.accounts.iter().copied())
    }

    /// What is owed to the limit that is owed the most, in units of cost. See
    /// [`Algorithm::debt`](crate::Algorithm::debt).
    ///
    /// ```
    /// use ratelimit_core::{Gcra, Limits, RateLimiter};
    /// use ratelimit_memory::MemoryStore;
    ///
    /// let tokens = Gcra::per_second(10).burst(100).debt(50);
    /// let limiter = RateLimiter::new(Limits::builder().limit("tokens", tokens).build()?, MemoryStore::new());
    /// let forced = limiter.request("alice").cost(170).force_now()?;
    /// assert_eq!((forced.remaining(), forced.owed(), forced.forgiven()), (0, 50, 20));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn owed(&self) -> u64 {
        self.accounts().map(|(_, account)| account.owed).max().unwrap_or_default()
    }

    /// What the limit that forgives the most has not charged of this request, in units of cost: it
    /// passes capacity and debt.
    #[must_use]
    pub fn forgiven(&self) -> u64 {
        self.accounts().map(|(_, account)| account.forgiven).max().unwrap_or_default()
    }

    /// Whether the request is allowed.
    #[inline]
    #[must_use]
    pub const fn allowed(&self) -> bool {
        self.summary.allowed
    }

    /// The capacity of the limit with the least remaining.
    #[inline]
    #[must_use]
    pub const fn limit(&self) -> u64 {
        self.summary.limit
    }

    /// The least remaining of all limits, in whole units of cost. Of a peek it is what such a
    /// request would leave: peek at cost 0 for what is there. After a denial it is the largest cost
    /// that would fit now under all limits, such as
    /// [`reserve_up_to`](crate::Request::reserve_up_to) reserves.
    #[inline]
    #[must_use]
    pub const fn remaining(&self) -> u64 {
        self.summary.remaining
    }

    /// How long until all limits admit the same request: zero if they do now, `None` if one of them
    /// never can.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        self.summary.retry_after()
    }

    /// How long until [`remaining`](Self::remaining) grows, if no other request comes. `None` if
    /// nothing is missing.
    #[must_use]
    pub fn replenish_after(&self) -> Option<Duration> {
        self.summary.replenish_after()
    }

    /// How long until all limits have fully recovered.
    #[must_use]
    pub fn reset_after(&self) -> Duration {
        self.summary.reset_after()
    }

    /// All of the above as one [`Decision`]; its cost is that of the limit that it shows.
    #[inline]
    #[must_use]
    pub const fn summary(&self) -> &Decision {
        &self.summary
    }

    /// The decision of each limit, in the order of the batch. In a denied batch a limit that would
    /// have admitted is `allowed` and shows what it has, uncharged. One that counts attempts is
    /// charged all the same: it shows what it has left, and its wait until the same request fits
    /// again.
    #[must_use]
    pub fn decisions(&self) -> &[Decision] {
        match &self.decisions {
            DecisionList::One => core::slice::from_ref(&self.summary),
            DecisionList::Several { extras: Some(extras), .. } if extras.is_one => {
                core::slice::from_ref(&self.summary)
            }
            DecisionList::Several { decisions, .. } => decisions,
        }
    }

    /// The limits that denied, by their position in [`decisions`](Self::decisions).
    pub fn denied_by(&self) -> impl Iterator<Item = usize> + '_ {
        let decisions = self.decisions().iter().enumerate();
        decisions.filter(|(_, decision)| !decision.allowed).map(|(position, _)| position)
    }

    /// Whether no limit applied to the request. Then it is allowed, with `u64::MAX` remaining.
    #[must_use]
    pub fn is_unlimited(&self) -> bool {
        self.decisions().is_empty()
    }
}

/// What a [`Verdict`] over these shows.
pub(crate) fn summarise(decisions: impl IntoIterator<Item = Decision>) -> Decision {
    let mut summary = Decision::OF_NONE;
    for (position, decision) in decisions.into_iter().enumerate() {
        summary.add(position, &decision);
    }
    summary
}

impl Decision {
    /// What a [`Verdict`] over no decision shows.
    pub(crate) const OF_NONE: Self = Self {
        allowed: true,
        cost: 0,
        limit: u64::MAX,
        remaining: u64::MAX,
        retry_after_us: Some(0),
        replenish_after_us: 0,
        reset_after_us: 0,
    };

    /// Makes what a [`Verdict`] over those before this position shows into what it shows with this
    /// one.
    #[inline]
    pub(crate) fn add(&mut self, position: usize, decision: &Self) {
        if position == 0 || decision.remaining < self.remaining {
            self.cost = decision.cost;
            self.limit = decision.limit;
            self.remaining = decision.remaining;
            self.replenish_after_us = decision.replenish_after_us;
        } else if decision.remaining == self.remaining {
            // The least remaining grows once all limits that share it have grown, and never if one
            // of them is full.
            self.replenish_after_us = match (self.replenish_after_us, decision.replenish_after_us) {
                (0, _) | (_, 0) => 0,
                (a, b) => a.max(b),
            };
        }
        self.allowed &= decision.allowed;
        self.reset_after_us = self.reset_after_us.max(decision.reset_after_us);
        // `None` is never, and never wins.
        self.retry_after_us =
            self.retry_after_us.zip(decision.retry_after_us).map(|(a, b)| a.max(b));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    const ADMITTED: Decision = Decision {
        allowed: true,
        cost: 1,
        limit: 10,
        remaining: 3,
        retry_after_us: Some(0),
        replenish_after_us: 5,
        reset_after_us: 70,
    };
    const DENIED: Decision = Decision { allowed: false, retry_after_us: Some(40), ..ADMITTED };

    #[test]
    fn a_verdict_tells_which_limits_of_a_policy_have_decided() {
        for positions in [&[0][..], &[0, 1, 2], &[2], &[0, 2], &[1, 63], &[64], &[3, 99]] {
            let verdict = Verdict::several(vec![ADMITTED; positions.len()])
                .at_positions(positions.iter().copied());
            assert_eq!(verdict.decisions(), vec![ADMITTED; positions.len()]);
            let found: Vec<_> = (0..positions.len()).map(|nth| verdict.position_of(nth)).collect();
            assert_eq!(found, positions);
        }
    }

    #[test]
    fn shadow_decisions_and_a_source_change_nothing_else_of_a_verdict() {
        for decisions in [vec![], vec![ADMITTED], vec![ADMITTED, ADMITTED]] {
            let plain = Verdict::several(decisions.clone())
                .at_positions([3, 4].into_iter().take(decisions.len()));
            let more = plain
                .clone()
                .with_shadow(vec![(1, DENIED, Account::default())])
                .with_source(Source::Fallback);
            assert_eq!(more.shadow_decisions().collect::<Vec<_>>(), [&DENIED]);
            assert_eq!((plain.source(), more.source()), (Source::Store, Source::Fallback));
            assert_eq!((more.decisions(), more.summary()), (plain.decisions(), plain.summary()));
            assert_eq!(more.position_of(0), plain.position_of(0));
            assert!(more.allowed() && more.denied_by().next().is_none());
        }
    }

    #[test]
    fn without_a_limit_everything_is_allowed() {
        let verdict = Verdict::several(vec![]);
        assert!(verdict.allowed() && verdict.is_unlimited());
        assert_eq!((verdict.remaining(), verdict.replenish_after()), (u64::MAX, None));
    }
}

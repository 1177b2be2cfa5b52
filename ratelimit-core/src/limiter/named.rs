//! [`NamedDecisions`]: whose decision is whose.

use core::ops::Deref;
use core::time::Duration;

use derive_where::derive_where;

use super::RateLimiter;
use crate::algorithms::Algorithm;
use crate::decision::{Account, Decision, Verdict};
use crate::limit::Limit;
use crate::numbers::Numbers;
use crate::quota::Quota;
use crate::rate::Rate;

impl<S, A: Algorithm> RateLimiter<S, A> {
    /// The decisions of a verdict of this limiter, each with its limit: by name, or one after the
    /// other.
    ///
    /// Naming allocates nothing. A verdict of another limiter would get the wrong names.
    ///
    /// ```
    /// # use ratelimit_core::*;
    /// # fn example<S: SyncStore<AnyAlgorithm>>(store: S) -> Result<(), Box<dyn std::error::Error>> {
    /// let limits = Limits::builder()
    ///     .limit("burst", Gcra::per_second(10).burst(20)).by(["ip"])
    ///     .limit("daily", FixedWindow::per_day(5_000)).by(["user"])
    ///     .build()?;
    /// let limiter = RateLimiter::new(limits, store);
    ///
    /// let verdict = limiter.check_now(&[("user", "alice")])?;
    /// let decisions = limiter.named(&verdict);
    /// assert!(decisions.by_name("burst").is_none()); // no `ip`: it did not apply
    /// assert_eq!(decisions.by_name("daily").map(|daily| daily.remaining), Some(4_999));
    ///
    /// for decision in decisions {
    ///     let seconds = decision.window().unwrap_or_default().as_secs();
    ///     println!("{:?};q={};w={seconds};r={}", decision.name(), decision.limit, decision.remaining);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn named<'a>(&'a self, verdict: &'a Verdict) -> NamedDecisions<'a, A> {
        NamedDecisions { limits: self.limits.as_slice(), numbers: None, verdict, position: 0 }
    }
}

/// The decisions of a [`Verdict`], each with its limit, in the order of the policy: what
/// [`RateLimiter::named`] answers.
#[must_use = "an iterator does nothing until it is asked"]
#[derive(Debug)]
#[derive_where(Clone)]
pub struct NamedDecisions<'a, A> {
    limits: &'a [Limit<A>],
    numbers: Option<&'a Numbers<A>>,
    verdict: &'a Verdict,
    position: usize,
}

impl<'a, A: Algorithm> NamedDecisions<'a, A> {
    /// The same of a request that had these [numbers](Numbers): each decision with the limit at the
    /// numbers that decided.
    pub const fn numbers(mut self, numbers: &'a Numbers<A>) -> Self {
        self.numbers = Some(numbers);
        self
    }

    /// The decisions of the [shadow limits](Limit::shadow) that apply, in the order of the policy.
    pub fn shadow(&self) -> impl Iterator<Item = NamedDecision<'a, A>> + use<'a, A> {
        let (limits, numbers) = (self.limits, self.numbers);
        let shadow = self.verdict.shadow().iter();
        shadow.filter_map(move |(position, decision, account)| {
            let limit = deciding(numbers, limits.get(*position)?);
            let (is_allowed, account) = (decision.allowed, *account);
            Some(NamedDecision { limit, decision, account, is_allowed })
        })
    }

    /// Those of these decisions that [warn](NamedDecision::is_warned).
    pub fn warned(&self) -> impl Iterator<Item = NamedDecision<'a, A>> + use<'a, A> {
        self.clone().filter(NamedDecision::is_warned)
    }

    /// The decision of the limit of this name; `None` if that did not apply to the request.
    #[must_use]
    pub fn by_name(&self, name: &str) -> Option<NamedDecision<'a, A>> {
        Self { position: 0, ..*self }.find(|decision| decision.name() == name)
    }
}

/// The limit that decided in place of one of the policy.
fn deciding<'a, A: Algorithm>(
    numbers: Option<&'a Numbers<A>>,
    limit: &'a Limit<A>,
) -> &'a Limit<A> {
    numbers.map_or(limit, |numbers| numbers.limit_of(limit))
}

impl<'a, A: Algorithm> Iterator for NamedDecisions<'a, A> {
    type Item = NamedDecision<'a, A>;

    fn next(&mut self) -> Option<Self::Item> {
        let decision = self.verdict.decisions().get(self.position)?;
        let limit = self.limits.get(self.verdict.position_of(self.position))?;
        let (limit, account) = (deciding(self.numbers, limit), self.verdict.account(self.position));
        self.position += 1;
        let is_allowed = self.verdict.allowed();
        Some(NamedDecision { limit, decision, account, is_allowed })
    }
}

/// One [`Decision`] of a verdict, with the limit that made it. It dereferences to the decision.
#[derive(Debug)]
#[derive_where(Clone, Copy)]
pub struct NamedDecision<'a, A> {
    limit: &'a Limit<A>,
    decision: &'a Decision,
    account: Account,
    /// Whether all limits that are charged with this one allow the request.
    is_allowed: bool,
}

impl<'a, A: Algorithm> NamedDecision<'a, A> {
    /// The name of the limit.
    #[must_use]
    pub fn name(&self) -> &'a str {
        self.limit.name()
    }

    /// The limit as it was configured, or at the [numbers](NamedDecisions::numbers) that decided:
    /// its algorithm and the identifiers that it counts by. Not at those of a
    /// [record](crate::Record), which a verdict does not tell.
    #[must_use]
    pub const fn configured(&self) -> &'a Limit<A> {
        self.limit
    }

    /// The decision.
    #[must_use]
    pub const fn decision(&self) -> &'a Decision {
        self.decision
    }

    /// What is owed to the limit, and what it has forgiven.
    #[must_use]
    pub const fn account(&self) -> Account {
        self.account
    }

    /// Whether the request crosses the threshold at which its limit
    /// [warns](Limit::warn_at_percent). Of a peek, whether such a request would.
    #[must_use]
    pub fn is_warned(&self) -> bool {
        self.limit.is_crossed(self.decision, || self.account, self.is_allowed)
    }
}

impl<A: Quota> NamedDecision<'_, A> {
    /// The time in which [`Decision::limit`] is admitted, for headers: the window, or for a bucket
    /// the time from empty to full. `None` for a limit on concurrency.
    ///
    /// Where the numbers of a [record](crate::Record) decided, it is that of the limit's own
    /// numbers: the same for a window, and another for most buckets.
    #[must_use]
    pub fn window(&self) -> Option<Duration> {
        self.limit.algorithm().window_us(self.decision).map(Duration::from_micros)
    }

    /// What the limit admits in the long run: see [`Quota::rate`]. It is the limit's own also where
    /// the numbers of a [record](crate::Record) decided.
    #[must_use]
    pub fn rate(&self) -> Option<Rate> {
        self.limit.algorithm().rate()
    }
}

impl<A> Deref for NamedDecision<'_, A> {
    type Target = Decision;

    fn deref(&self) -> &Decision {
        self.decision
    }
}

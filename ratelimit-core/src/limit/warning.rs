//! A warning before a limit denies: by the numbers of the decision that crosses a threshold, and
//! without a state.

use alloc::format;
use core::num::NonZeroU8;

use super::Limit;
use crate::algorithms::Algorithm;
use crate::decision::{Account, Decision};
use crate::error::ConfigError;

impl<A: Algorithm> Limit<A> {
    /// The same limit, which warns when so many percent of it are used, 1 to 100: the decision that
    /// crosses this threshold [says so](crate::NamedDecision::is_warned), once.
    ///
    /// ```
    /// use ratelimit_core::{FixedWindow, Limits, RateLimiter};
    /// use ratelimit_memory::MemoryStore;
    ///
    /// let limits = Limits::builder().limit("daily", FixedWindow::per_day(10)).warn_at_percent(80);
    /// let limiter = RateLimiter::new(limits.build()?, MemoryStore::new());
    /// for nth in 1..=10 {
    ///     let verdict = limiter.check_now("alice")?;
    ///     assert_eq!(limiter.named(&verdict).warned().next().is_some(), nth == 8);
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # What crosses
    ///
    /// A request crosses the threshold if less was used before it, and as much or more is used
    /// after it, in whole units and what is [owed](Account::owed) included. Both follow from the
    /// numbers of the decision, so that nothing is stored. In particular:
    ///
    /// - A window warns once per window and caller, unless something is given back. A window that
    ///   begins above the threshold, because the one before left a [debt](Algorithm::debt), does
    ///   not warn.
    /// - A bucket recovers, so it warns each time that it fills that far. So do sliding windows and
    ///   leases.
    /// - After a refund or a settlement below its estimate, the next request may cross the
    ///   threshold again. A settlement or an extension above the estimate crosses it as a charge of
    ///   the difference.
    /// - A denial warns of nothing, and neither does a request that is repeated under its id. Where
    ///   another limit denies, a limit that [counts attempts](Self::count_attempts) is charged, and
    ///   warns.
    /// - A peek says what such a request would be told.
    /// - Of several windows in one state, the one that the decision shows counts.
    /// - A limit in [shadow mode](Self::shadow) warns in [its own
    ///   decision](crate::NamedDecisions::shadow).
    ///
    /// # Errors
    /// 0, which is crossed by every request; more than 100, which none crosses.
    pub fn warn_at_percent(mut self, percent: u8) -> Result<Self, ConfigError> {
        self.warn_percent = NonZeroU8::new(percent).filter(|percent| percent.get() <= 100);
        if self.warn_percent.is_none() {
            let refused =
                format!("a warning at {percent} % has no meaning; write 1 to 100 percent");
            return Err(ConfigError::new(refused).in_limit(&*self.name));
        }
        Ok(self)
    }

    /// At how many percent it warns, if it does.
    #[inline]
    #[must_use]
    pub const fn warns_at_percent(&self) -> Option<NonZeroU8> {
        self.warn_percent
    }

    /// Whether this decision of the limit, in a verdict that `is_allowed` or not, crosses its
    /// threshold.
    #[inline]
    pub(crate) fn is_crossed(
        &self,
        decision: &Decision,
        account: impl FnOnce() -> Account,
        is_allowed: bool,
    ) -> bool {
        let Some(percent) = self.warn_percent else { return false };
        // In a denied batch, only attempts are charged.
        if !decision.allowed || !(is_allowed || self.counts_attempts) {
            return false;
        }
        let Account { owed, forgiven, charged } = account();
        let charged = charged.unwrap_or(decision.cost).saturating_sub(forgiven);
        let after = decision.limit.saturating_sub(decision.remaining).saturating_add(owed);
        let before = after.saturating_sub(charged);
        let reaches = |used: u64| {
            u128::from(used) * 100 >= u128::from(percent.get()) * u128::from(decision.limit)
        };
        charged > 0 && !reaches(before) && reaches(after)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Gcra;
    use alloc::string::ToString;

    #[test]
    fn a_threshold_is_exact_at_its_ends() {
        let limit = |percent| {
            let gcra = Gcra::per_second(1).build().expect("a limit");
            Limit::new("a", gcra).expect("a name").warn_at_percent(percent)
        };
        let crosses = |percent, limit_is: u64, before: u64, cost: u64| {
            let decision = Decision {
                cost,
                limit: limit_is,
                remaining: limit_is - before - cost,
                ..Decision::OF_NONE
            };
            limit(percent).expect("a percentage").is_crossed(&decision, Account::default, true)
        };
        for (percent, capacity, before, cost, due) in [
            (80, 10, 7, 1, true),
            (80, 10, 6, 1, false),
            (80, 10, 8, 1, false),
            (80, 10, 7, 0, false),
            (80, 10, 0, 10, true),
            // A threshold between two whole units is reached by the second.
            (75, 10, 7, 1, true),
            (75, 10, 6, 1, false),
            (100, 10, 9, 1, true),
            (100, 10, 8, 1, false),
            (1, 10, 0, 1, true),
            (1, 1, 0, 1, true),
            (99, 1 << 52, (1 << 52) / 100 * 99, 1, false),
            (99, 1 << 52, (1 << 52) / 100 * 99, 100, true),
        ] {
            let told = crosses(percent, capacity, before, cost);
            assert_eq!(told, due, "{percent} % of {capacity}: {before} and {cost}");
        }
        for percent in [0, 101, 255] {
            let refused = limit(percent).expect_err("no threshold").to_string();
            assert!(refused.contains("limit \"a\": ") && refused.contains("1 to 100"), "{refused}");
        }
    }
}

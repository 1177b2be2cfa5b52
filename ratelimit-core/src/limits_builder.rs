//! [`LimitsBuilder`]: limits of different kinds in one expression.

use alloc::vec::Vec;

use crate::algorithms::Algorithm;
use crate::any_algorithm::AnyAlgorithm;
use crate::error::ConfigError;
use crate::limit::{ConditionValues, Limit, Limits, OnOutage};

/// Builds limits one after the other. Each converts its algorithm to the same type `A`. See
/// [`Limits::builder`].
///
/// [`build`](Self::build) returns the first mistake, with the name of its limit.
#[derive(Clone, Debug)]
#[must_use = "a builder limits nothing: finish with `build()`"]
pub struct LimitsBuilder<A = AnyAlgorithm> {
    limits: Result<Vec<Limit<A>>, ConfigError>,
}

impl Limits<AnyAlgorithm> {
    /// Limits of different built-in algorithms, each given as an algorithm, as a builder of one or
    /// in words.
    ///
    /// ```
    /// use ratelimit_core::{FixedWindow, Gcra, Limits};
    ///
    /// let limits = Limits::builder()
    ///     .limit("burst", Gcra::per_second(10).burst(20)).by(["ip"])
    ///     .limit("daily", FixedWindow::per_day(5_000)).by(["user"]).required()
    ///     .limit("hourly", "sliding-counter 1000/h").by(["ip", "user"])
    ///     .limit("logins", FixedWindow::per_minute(9)).by(["ip"]).when("path", "/login").count_attempts()
    ///     .build()?;
    /// assert_eq!(limits.iter().map(|limit| limit.name()).collect::<Vec<_>>(), ["burst", "daily", "hourly", "logins"]);
    ///
    /// let mistaken = Limits::builder().limit("burst", Gcra::per_second(1).burst(0)).build();
    /// assert_eq!(mistaken.unwrap_err().limit(), Some("burst"));
    /// # Ok::<(), ratelimit_core::ConfigError>(())
    /// ```
    ///
    /// For algorithms that are not all built in, see [`LimitsBuilder::new`].
    pub const fn builder() -> LimitsBuilder<AnyAlgorithm> {
        LimitsBuilder { limits: Ok(Vec::new()) }
    }
}

impl<A: Algorithm> LimitsBuilder<A> {
    /// No limits yet, of this type of algorithm: `LimitsBuilder::<Gcra>::new()`.
    pub const fn new() -> Self {
        Self { limits: Ok(Vec::new()) }
    }

    /// One more limit, which counts by the bare key unless [`by`](Self::by) follows.
    pub fn limit<T: TryInto<A>>(mut self, name: &str, algorithm: T) -> Self
    where
        T::Error: Into<ConfigError>,
    {
        self.limits = self.limits.and_then(|mut limits| {
            let algorithm = algorithm.try_into().map_err(|error| error.into().in_limit(name))?;
            limits.push(Limit::new(name, algorithm)?);
            Ok(limits)
        });
        self
    }

    /// The limit before this call counts by these identifiers: see [`Limit::by`].
    pub fn by<K: AsRef<str>>(self, identifier_names: impl IntoIterator<Item = K>) -> Self {
        self.change_last("by", |limit| limit.by(identifier_names))
    }

    /// The limit before this call applies only to callers whose identifier has one of these values:
    /// see [`Limit::when`].
    pub fn when(self, identifier: &str, values: impl Into<ConditionValues>) -> Self {
        self.change_last("when", |limit| limit.when(identifier, values))
    }

    /// The limit before this call does not apply to callers whose identifier has one of these
    /// values: see [`Limit::when_not`].
    pub fn when_not(self, identifier: &str, values: impl Into<ConditionValues>) -> Self {
        self.change_last("when_not", |limit| limit.when_not(identifier, values))
    }

    /// A request without the identifiers of the limit before this call is an error: see
    /// [`Limit::required`].
    pub fn required(self) -> Self {
        self.change_last("required", |limit| Ok(limit.required()))
    }

    /// The limit before this call decides and never denies: see [`Limit::shadow`].
    pub fn shadow(self) -> Self {
        self.change_last("shadow", |limit| Ok(limit.shadow()))
    }

    /// What to answer while the store of the limit before this call is unreachable: see
    /// [`Limit::on_outage`].
    pub fn on_outage(self, on_outage: OnOutage) -> Self {
        self.change_last("on_outage", |limit| Ok(limit.on_outage(on_outage)))
    }

    /// The limit before this call charges denied requests, too: see [`Limit::count_attempts`].
    pub fn count_attempts(self) -> Self {
        self.change_last("count_attempts", Limit::count_attempts)
    }

    /// The limit before this call warns when so many percent of it are used: see
    /// [`Limit::warn_at_percent`].
    pub fn warn_at_percent(self, percent: u8) -> Self {
        self.change_last("warn_at_percent", |limit| limit.warn_at_percent(percent))
    }

    /// A request may bring other numbers to the limit before this call, up to these: see
    /// [`Limit::accepts_up_to`].
    pub fn accepts_up_to<T: TryInto<A>>(self, max: T) -> Self
    where
        T::Error: Into<ConfigError>,
    {
        self.change_last("accepts_up_to", |limit| {
            let max = max.try_into().map_err(|error| error.into().in_limit(limit.name()))?;
            limit.accepts_up_to(max)
        })
    }

    /// The limit before this call looks for a record of its caller: see [`Limit::overridable`].
    pub fn overridable(self) -> Self {
        self.change_last("overridable", |limit| Ok(limit.overridable()))
    }

    fn change_last(
        mut self,
        method: &str,
        change: impl FnOnce(Limit<A>) -> Result<Limit<A>, ConfigError>,
    ) -> Self {
        self.limits = self.limits.and_then(|mut limits| {
            let last = limits.pop().ok_or_else(|| {
                ConfigError::new(alloc::format!(
                    "{method}() is said of the limit before it; call limit() first"
                ))
            })?;
            limits.push(change(last)?);
            Ok(limits)
        });
        self
    }

    /// The limits.
    ///
    /// # Errors
    /// The first mistake in a limit; no limit at all, or two of one name.
    pub fn build(self) -> Result<Limits<A>, ConfigError> {
        Limits::new(self.limits?)
    }
}

impl<A: Algorithm> Default for LimitsBuilder<A> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Gcra, SlidingLog};
    use alloc::string::{String, ToString};

    #[test]
    fn the_builder_makes_the_limits_that_are_built_one_by_one() {
        let built = Limits::builder()
            .limit("burst", "gcra 10/s burst 20")
            .by(["ip"])
            .limit("log", SlidingLog::per_minute(3))
            .required()
            .build();
        let gcra: Gcra = "10/s burst 20".parse().expect("a limit");
        let log: SlidingLog = "3/m".parse().expect("a limit");
        let burst =
            Limit::new("burst", AnyAlgorithm::from(gcra)).and_then(|limit| limit.by(["ip"]));
        let log = Limit::new("log", AnyAlgorithm::from(log)).expect("a limit").required();
        assert_eq!(built, Limits::new([burst.expect("a limit"), log]));
    }

    #[test]
    fn the_first_mistake_is_told_with_the_name_of_its_limit() {
        let error = |builder: LimitsBuilder| {
            let error = builder.build().expect_err("mistaken");
            (error.limit().map(String::from), error.to_string())
        };
        let (limit, says) =
            error(Limits::builder().limit("a", "gcra 1/s").limit("b", "gcra").limit("c", ""));
        assert!(limit.as_deref() == Some("b") && says.contains("\"10/s\""), "{says}");
        let (limit, says) = error(Limits::builder().limit("a", "gcra 1/s").by(["ip", "ip"]));
        assert!(limit.as_deref() == Some("a") && says.contains("twice"), "{says}");
        assert!(error(Limits::builder().by(["ip"])).1.contains("call limit() first"));
        assert!(error(Limits::builder().required()).1.contains("call limit() first"));
        let (limit, says) = error(Limits::builder().limit("a", "gcra 1/s").when("path", "a*b"));
        assert!(limit.as_deref() == Some("a") && says.contains("before its end"), "{says}");
        assert!(error(Limits::builder().when_not("path", "/")).1.contains("when_not() is said"));
        let leases = Limits::builder().limit("jobs", "concurrency 2/s").count_attempts();
        let (limit, says) = error(leases);
        assert!(limit.as_deref() == Some("jobs") && says.contains("no meaning for concurrency"));
        assert!(error(Limits::builder()).1.contains("at least one limit"));
        assert!(error(Limits::builder().limit("a b", "gcra 1/s")).1.contains("a b"));
    }
}

//! [`Numbers`]: the numbers of one customer, for the requests of which they decide.

use alloc::boxed::Box;
use alloc::format;
use alloc::vec::Vec;

use crate::algorithms::Algorithm;
use crate::any_algorithm::AnyAlgorithm;
use crate::error::{ConfigError, did_you_mean};
use crate::limit::{Limit, Limits};
use crate::refusal::Refusal;

/// Other numbers of some limits, such as those of a plan or of one customer: rate, burst, count and
/// debt. A request that [has](crate::Request::numbers) them is decided by them; all other limits
/// decide by their own.
///
/// Build them once, from the limits of the policy ([`Limits::numbers`]), and keep them as long as
/// the plan is the same: a request only borrows them. A limit accepts no other numbers, unless it
/// says [up to which](Limit::accepts_up_to).
///
/// The state of a key is the limit's, whatever the numbers: they may change with each request, as
/// those of a limit may ([`state_name`](Limit::state_name)). So give the same numbers with every
/// request of a customer, also where it peeks and settles. When they change, until the next check a
/// forced charge or a settlement above its estimate counts in the state as the old numbers wrote
/// it: after an upgrade from a slow bucket, it can use up the new one.
///
/// Numbers belong to the limits that they were built from, and to copies of these. Where the policy
/// is replaced, a request checks them against the limits in force, by name: one whose numbers these
/// do not accept is refused, until its numbers are built anew.
///
/// ```
/// use ratelimit_core::{Gcra, Limits, RateLimiter};
/// use ratelimit_memory::MemoryStore;
///
/// let limits = Limits::builder()
///     .limit("api", Gcra::per_second(10).burst(20))
///     .accepts_up_to(Gcra::per_second(1_000).burst(2_000))
///     .build()?;
/// let limiter = RateLimiter::new(limits, MemoryStore::new());
///
/// let gold = limiter.limits().numbers([("api", Gcra::per_second(100).burst(200))])?;
/// let verdict = limiter.request("alice").numbers(&gold).check_now()?;
/// assert_eq!((verdict.limit(), verdict.remaining()), (200, 199));
/// assert_eq!(limiter.check_now("bob")?.limit(), 20);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Numbers<A = AnyAlgorithm> {
    /// Each a limit of the policy at other numbers.
    limits: Box<[Limit<A>]>,
    /// The policy, which has accepted them.
    accepted_by: Limits<A>,
}

impl<A: Algorithm> Limits<A> {
    /// Other numbers for the limits of these names: an algorithm, or a builder of one.
    ///
    /// # Errors
    /// A name that no limit has, or one that is given twice; numbers that the limit does not
    /// [accept](Limit::accepts_up_to).
    pub fn numbers<N: AsRef<str>, T: TryInto<A>>(
        &self,
        numbers: impl IntoIterator<Item = (N, T)>,
    ) -> Result<Numbers<A>, ConfigError>
    where
        T::Error: Into<ConfigError>,
    {
        self.numbers_by(numbers, |_, numbers| numbers.try_into().map_err(Into::into))
    }

    fn numbers_by<N: AsRef<str>, T>(
        &self,
        numbers: impl IntoIterator<Item = (N, T)>,
        algorithm: impl Fn(&A, T) -> Result<A, ConfigError>,
    ) -> Result<Numbers<A>, ConfigError> {
        let mut limits: Vec<Limit<A>> = Vec::new();
        for (name, numbers) in numbers {
            let name = name.as_ref();
            let Some(limit) = self.iter().find(|limit| limit.name() == name) else {
                let meant = did_you_mean(name, self.iter().map(Limit::name));
                let unknown = format!(
                    "there are numbers for {name:?}, which is no limit of the policy{meant}"
                );
                return Err(ConfigError::new(unknown));
            };
            if limits.iter().any(|known| known.name() == name) {
                let twice = "its other numbers are given twice; give them once";
                return Err(ConfigError::new(twice).in_limit(name));
            }
            let algorithm = algorithm(limit.algorithm(), numbers);
            limits.push(limit.with_numbers(algorithm.map_err(|error| error.in_limit(name))?)?);
        }
        Ok(Numbers { limits: limits.into(), accepted_by: self.clone() })
    }

    /// Refuses numbers that these limits do not accept: they were built from others.
    #[inline]
    pub(crate) fn accept(&self, numbers: &Numbers<A>) -> Result<(), Refusal> {
        if self.is_copy_of(&numbers.accepted_by) { Ok(()) } else { self.accept_by_name(numbers) }
    }

    #[inline(never)]
    fn accept_by_name(&self, numbers: &Numbers<A>) -> Result<(), Refusal> {
        numbers.limits.iter().try_for_each(|own| {
            let limit = self.iter().find(|limit| limit.name() == own.name());
            let gone = "no limit of the policy has this name; build them from the limits in force";
            let accepted = limit.map_or(Err(gone), |limit| limit.accepts(own));
            accepted.map_err(|why| Refusal::Numbers { limit: own.name().into(), why })
        })
    }
}

impl Limits<AnyAlgorithm> {
    /// Other numbers for the limits of these names, each as text such as `100/s burst 200`. The
    /// name of the limit's algorithm may stand before them.
    ///
    /// ```
    /// use ratelimit_core::{Gcra, Limits};
    ///
    /// let limits = Limits::builder()
    ///     .limit("api", Gcra::per_second(10).burst(20)).accepts_up_to(Gcra::per_second(1_000))
    ///     .limit("tokens", "fixed-window 50000/d").accepts_up_to("fixed-window 9000000/d")
    ///     .build()?;
    /// let gold = limits.parse_numbers([("api", "100/s burst 200"), ("tokens", "1000000/d")])?;
    /// assert_eq!(gold.get("tokens").map(|tokens| tokens.algorithm().to_string()).as_deref(), Some("fixed-window 1000000/d"));
    ///
    /// let refused = limits.parse_numbers([("api", "5000/s")]).unwrap_err();
    /// assert!(refused.to_string().contains("stay within its max"));
    /// # Ok::<(), ratelimit_core::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// As for [`numbers`](Self::numbers), and a text without such numbers.
    pub fn parse_numbers<N: AsRef<str>, T: AsRef<str>>(
        &self,
        numbers: impl IntoIterator<Item = (N, T)>,
    ) -> Result<Numbers<AnyAlgorithm>, ConfigError> {
        self.numbers_by(numbers, |of: &AnyAlgorithm, text: T| of.at_numbers(text.as_ref()))
    }
}

impl<A: Algorithm> Numbers<A> {
    /// The limits with other numbers, at those.
    pub fn iter(&self) -> core::slice::Iter<'_, Limit<A>> {
        self.limits.iter()
    }

    /// The limit of this name at its other numbers, if it has some.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Limit<A>> {
        self.iter().find(|own| own.name() == name)
    }

    /// The limit that decides in place of this one of the policy: itself, if it has no other
    /// numbers.
    #[inline]
    #[must_use]
    pub fn limit_of<'l>(&'l self, limit: &'l Limit<A>) -> &'l Limit<A> {
        let own = self.iter().find(|own| own.fingerprint() == limit.fingerprint());
        own.unwrap_or(limit)
    }
}

impl<'n, A: Algorithm> IntoIterator for &'n Numbers<A> {
    type Item = &'n Limit<A>;
    type IntoIter = core::slice::Iter<'n, Limit<A>>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Gcra, LimitsBuilder, OnOutage};
    use alloc::string::ToString;

    fn api(words: &str, max: Option<&str>) -> LimitsBuilder {
        let builder = Limits::builder().limit("api", words);
        match max {
            Some(max) => builder.accepts_up_to(max),
            None => builder,
        }
    }

    #[test]
    fn numbers_are_within_those_that_are_nowhere_smaller() {
        for (words, within, beyond) in [
            (
                "gcra 10/s burst 20 debt 3",
                &["10/s burst 20 debt 3", "600/m burst 20", "1/h burst 20", "9999/1000s burst 1"][..],
                &["10001/1000s burst 20", "10/s burst 21", "1/s burst 1 debt 4", "11/s"][..],
            ),
            ("gcra 10/d", &["0/s", "0/h", "10/d"], &["1/h"]),
            ("token-bucket 7/5m", &["1/m", "7/5m burst 7"], &["7/5m debt 1", "8/5m"]),
            ("fixed-window 9/d debt 2", &["9/d", "1/d debt 2"], &["10/d", "9/d debt 3"]),
            ("first-request-window 9/h", &["9/h", "1/60m"], &["10/h"]),
            ("window-log 9/h", &["1/h"], &["10/h"]),
            ("sliding-counter 9/h", &["9/h"], &["10/h"]),
            ("sliding-log 9/h", &["9/h"], &["10/h"]),
            ("concurrency 9/30s", &["9/30s"], &["10/30s"]),
            (
                "bucketed-window bucket 1s rates 10/1s, 50/10s",
                &[
                    "bucket 1s rates 10/1s, 50/10s",
                    "bucket 1s rates 9/10s",
                    "bucket 1s rates 50/10s, 3/2s",
                ],
                &["bucket 1s rates 50/10s", "bucket 1s rates 10/1s, 51/10s"],
            ),
        ] {
            let limits = api(words, Some(words)).build().expect(words);
            for numbers in within {
                let built = limits.parse_numbers([("api", numbers)]);
                assert!(built.is_ok(), "{numbers} of {words}: {built:?}");
            }
            for numbers in beyond {
                let refused = limits.parse_numbers([("api", numbers)]).expect_err(numbers);
                assert_eq!(refused.limit(), Some("api"));
                let said = refused.to_string();
                assert!(said.contains("larger than the limit accepts"), "{numbers}: {said}");
            }
        }
    }

    #[test]
    fn the_name_of_the_limits_algorithm_may_stand_before_its_numbers() {
        for (words, named) in [
            ("gcra 1/s", "gcra 1/s burst 2"),
            ("gcra 1/s", "token-bucket 1/s burst 2"),
            ("token-bucket 1/s", "gcra 1/s burst 2"),
        ] {
            let limits = api(words, Some("gcra 9/s burst 9")).build().expect(words);
            let read = |numbers| limits.parse_numbers([("api", numbers)]).expect(numbers);
            assert_eq!(read(named), read("1/s burst 2"), "{words}");
        }
    }

    #[test]
    fn numbers_that_a_limit_does_not_accept_are_refused_where_they_are_built() {
        let says = |limits: LimitsBuilder, (name, numbers): (&str, &str), due: &str| {
            let refused = limits.build().and_then(|limits| limits.parse_numbers([(name, numbers)]));
            let said = refused.expect_err(due).to_string();
            assert!(said.contains(due), "{said:?} lacks {due:?}");
        };
        let gcra = || api("gcra 1/s", Some("gcra 9/s"));
        says(gcra(), ("apy", "1/s"), "did you mean \"api\"?");
        says(gcra(), ("api", "gcra 1 a second"), "is not a rate");
        says(
            gcra(),
            ("api", "fixed-window 1/s"),
            "of fixed-window, and the limit's algorithm is gcra",
        );
        says(api("gcra 1/s", None), ("api", "1/s"), "accepts_up_to()");
        says(
            api("fixed-window 1/h", Some("fixed-window 9/h")),
            ("api", "1/m"),
            "another algorithm or window",
        );
        says(
            api("gcra 1/s", Some("fixed-window 9/h")),
            ("api", "1/s"),
            "max is of another algorithm",
        );
        let attempts = api("gcra 1/s", Some("gcra 9/s debt 5")).count_attempts();
        says(attempts, ("api", "1/s debt 1"), "counts attempts");
        let limits = gcra().build().expect("limits");
        let twice = limits.numbers([("api", Gcra::per_second(1)), ("api", Gcra::per_second(2))]);
        assert!(twice.expect_err("twice").to_string().contains("given twice"));
        let other = limits.numbers([("api", crate::FixedWindow::per_second(1))]);
        assert!(other.expect_err("another").to_string().contains("another algorithm"));
    }

    #[test]
    fn numbers_are_refused_by_limits_that_have_changed_since() {
        let gcra = || api("gcra 1/s", Some("gcra 9/s"));
        let numbers = gcra().build().and_then(|limits| limits.parse_numbers([("api", "9/s")]));
        let numbers = numbers.expect("numbers");
        let accepted = |limits: LimitsBuilder| limits.build().expect("limits").accept(&numbers);
        assert_eq!(accepted(gcra()), Ok(()));
        assert_eq!(accepted(api("gcra 7/s", Some("gcra 10/s")).required()), Ok(()));
        assert_eq!(accepted(gcra().when("method", "POST").warn_at_percent(80)), Ok(()));
        for (limits, due) in [
            (Limits::builder().limit("apis", "gcra 1/s"), "no limit of the policy has this name"),
            (api("gcra 1/s", None), "accepts no numbers"),
            (api("gcra 1/s", Some("gcra 8/s")), "larger than the limit accepts"),
            (api("fixed-window 1/s", Some("fixed-window 9/s")), "another algorithm or window"),
            (gcra().by(["user"]), "has changed"),
            (gcra().shadow(), "has changed"),
            (gcra().overridable(), "has changed"),
            (gcra().on_outage(OnOutage::Open), "has changed"),
            (gcra().count_attempts(), "has changed"),
        ] {
            let refusal = accepted(limits).expect_err(due);
            assert_eq!(refusal.limit(), Some("api"));
            let said = refusal.to_string();
            assert!(said.contains("limit \"api\"") && said.contains(due), "{said:?} lacks {due:?}");
        }
    }
}

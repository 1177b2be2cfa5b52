//! [`Quota`]: what an algorithm allows, as numbers for messages and HTTP headers.

use crate::algorithms::Algorithm;
use crate::builder::FromRate;
use crate::decision::Decision;
use crate::rate::Rate;

/// An algorithm that reports its rate and its window, as every built-in one does.
///
/// No store needs it. Implement it for your own algorithm if headers or messages should show its
/// window: see [`NamedDecision::window`](crate::NamedDecision::window).
///
/// ```
/// use ratelimit_core::{Algorithm, FixedWindow, Gcra, Timestamp};
/// use ratelimit_core::algorithm::Quota;
///
/// let gcra = Gcra::per_second(10).burst(20).build()?;
/// assert_eq!(gcra.rate(), Some("10/s".parse()?));
/// // A full bucket of 20 takes two seconds to refill.
/// let decision = gcra.step(None, Timestamp::ZERO, 1).decision;
/// assert_eq!(gcra.window_us(&decision), Some(2_000_000));
///
/// let daily = FixedWindow::per_day(5_000).build()?;
/// assert_eq!(daily.rate(), Some("5000/d".parse()?));
/// # Ok::<(), ratelimit_core::ConfigError>(())
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not tell its rate and window",
    note = "implement `Quota` for it; both methods may return `None`"
)]
pub trait Quota: Algorithm {
    /// What is admitted in the long run: of several windows the slowest. `None` where no rate
    /// describes the limit, as for [`Concurrency`](crate::Concurrency). A bucket knows its rate in
    /// lowest terms: `120/m` is `2/s`.
    fn rate(&self) -> Option<Rate>;

    /// The time, in microseconds, in which [`Decision::limit`] of this decision is admitted: the
    /// window, or for a bucket the time from empty to full. Of several windows with that limit, the
    /// longest; of a calendar, whose present window a decision does not tell, the mean. `None`
    /// where the limit has none.
    fn window_us(&self, decision: &Decision) -> Option<u64>;
}

/// No rate and no window where charges are leases: how often places become free depends on their
/// holders.
impl<A: FromRate> Quota for A {
    fn rate(&self) -> Option<Rate> {
        (!self.has_leases()).then(|| self.to_rate())
    }

    fn window_us(&self, _decision: &Decision) -> Option<u64> {
        (!self.has_leases()).then(|| self.span_us())
    }
}

/// The slower of two rates; the first of equal ones.
pub(crate) fn slower(a: Rate, b: Rate) -> Rate {
    let per_time =
        |rate: Rate, other: Rate| u128::from(rate.count()) * u128::from(other.period_us());
    if per_time(b, a) < per_time(a, b) { b } else { a }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AnyAlgorithm, Gcra, Stack, Timestamp};
    use core::time::Duration;

    fn decision(limit: u64) -> Decision {
        Decision { limit, ..Decision::OF_NONE }
    }

    fn rate(text: &str) -> Rate {
        text.parse().expect(text)
    }

    #[test]
    fn an_algorithm_tells_the_rate_that_it_was_built_with() {
        for (words, expected) in [
            ("gcra 10/s burst 20", "10/s"),
            ("sliding-log 2/m", "2/m"),
            ("bucketed-window bucket 1s rates 1000/1s, 5000/10s, 7000/15s", "7000/15s"),
            // The mean month of 400 years, after which the calendar repeats.
            #[cfg(feature = "calendar")]
            ("fixed-window 12/month zone Europe/Berlin", "12/2629746s"),
        ] {
            let algorithm: AnyAlgorithm = words.parse().expect(words);
            assert_eq!(algorithm.rate(), Some(rate(expected)), "{words}");
        }
        let busy: AnyAlgorithm = "concurrency 20/30s".parse().expect("an algorithm");
        assert_eq!(busy.rate(), None);
    }

    #[test]
    fn the_window_is_that_of_the_limit_that_the_decision_shows() {
        let steps: AnyAlgorithm =
            "bucketed-window bucket 1s rates 10/1s, 50/10s".parse().expect("an algorithm");
        assert_eq!(steps.window_us(&decision(10)), Some(1_000_000));
        assert_eq!(steps.window_us(&decision(50)), Some(10_000_000));
        assert_eq!(steps.window_us(&decision(7)), None);

        let day = Duration::from_secs(86_400);
        let stack = Stack::new([
            Gcra::per_second(10).build().expect("a limit"),
            Gcra::per(240, day).build().expect("a limit"),
        ]);
        let stack = stack.expect("a stack");
        let first = stack.step(None, Timestamp::ZERO, 1).decision;
        assert_eq!((first.limit, stack.window_us(&first)), (10, Some(1_000_000)));
        assert_eq!(stack.window_us(&decision(240)), Some(86_400_000_000));
        assert_eq!(stack.rate(), Some(rate("1/6m")));
    }
}

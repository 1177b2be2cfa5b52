//! A policy in the words of a policy document: `gcra 10/s burst 20`.

use core::fmt;

use super::Policy;
use crate::algorithm::Algorithm;
use crate::rate::{Period, Rate, Refill};

/// The name, the numbers and, where attempts are counted, that they are.
///
/// The words stand for the same decisions as the document that the policy was read from, and are not always the
/// same words: a bucket knows its rate in lowest terms only, so `120/m` is told as `2/s`.
///
/// ```
/// use ratelimit_core::{Attempts, FixedWindow, Gcra, Policy};
/// let burst = Policy::from(Gcra::new("10/s".parse()?, 20)?);
/// assert_eq!(burst.to_string(), "gcra 10/s burst 20");
/// let tries = Policy::from(Attempts::new(FixedWindow::new("2/m".parse()?)?));
/// assert_eq!(tries.to_string(), "fixed-window 2/m count attempts");
/// # Ok::<(), ratelimit_core::ConfigError>(())
/// ```
impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        match self {
            Self::Gcra(gcra) => bucket(f, gcra.refill())?,
            Self::GcraAttempts(gcra) => bucket(f, gcra.algorithm().refill())?,
            Self::TokenBucket(tokens) => bucket(f, tokens.refill())?,
            Self::TokenBucketAttempts(tokens) => bucket(f, tokens.algorithm().refill())?,
            Self::FixedWindow(fixed) => window(f, self, fixed.window_us())?,
            Self::FixedWindowAttempts(fixed) => window(f, self, fixed.algorithm().window_us())?,
            Self::FirstRequestWindow(first) => window(f, self, first.window_us())?,
            Self::FirstRequestWindowAttempts(first) => {
                window(f, self, first.algorithm().window_us())?;
            }
            Self::WindowLog(log) => window(f, self, log.window_us())?,
            Self::WindowLogAttempts(log) => window(f, self, log.algorithm().window_us())?,
            Self::SlidingCounter(counter) => window(f, self, counter.window_us())?,
            Self::SlidingCounterAttempts(counter) => {
                window(f, self, counter.algorithm().window_us())?;
            }
            Self::SlidingLog(log) => window(f, self, log.window_us())?,
            Self::SlidingLogAttempts(log) => window(f, self, log.algorithm().window_us())?,
            Self::Concurrency(leases) => window(f, self, leases.lease_us())?,
            Self::BucketedWindow(bucketed) => windows(f, bucketed)?,
            Self::BucketedWindowAttempts(bucketed) => windows(f, bucketed.algorithm())?,
        }
        f.write_str(if self.charges_denials() { " count attempts" } else { "" })
    }
}

/// A rate in lowest terms, in the shortest words that mean it, and the burst.
fn bucket(f: &mut fmt::Formatter<'_>, refill: &Refill) -> fmt::Result {
    write!(f, " ")?;
    match Rate::new(refill.tick_units, refill.token_units * refill.tick_us) {
        Ok(rate) => rate.in_short(f)?,
        // Unreachable: it is a rate in lower terms than one that was accepted.
        Err(_) => write!(f, "{refill:?}")?,
    }
    write!(f, " burst {}", refill.burst)
}

fn window(f: &mut fmt::Formatter<'_>, policy: &Policy, us: u64) -> fmt::Result {
    write!(f, " {}/{}", policy.capacity(), Period { us, times_one: false })
}

fn windows(f: &mut fmt::Formatter<'_>, bucketed: &super::BucketedWindow) -> fmt::Result {
    let length = |us| Period { us, times_one: true };
    write!(f, " bucket {} rates ", length(bucketed.bucket_us()))?;
    for (place, window) in bucketed.windows().iter().enumerate() {
        let comma = if place > 0 { ", " } else { "" };
        write!(f, "{comma}{}/{}", window.limit, length(window.span_us))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::{
        BucketedWindow, Concurrency, FirstRequestWindow, FixedWindow, Gcra, SlidingCounter,
        SlidingLog, TokenBucket, WindowLog,
    };
    use alloc::string::ToString;

    fn rate(text: &str) -> Rate {
        text.parse().expect(text)
    }

    #[test]
    fn a_policy_is_told_in_the_words_of_a_document() {
        let counted = |policy: Policy| policy.by_attempts().expect("counts attempts").to_string();
        let gcra = |text, burst| Policy::from(Gcra::new(rate(text), burst).expect("a limit"));
        assert_eq!(gcra("10/s", 20).to_string(), "gcra 10/s burst 20");
        assert_eq!(counted(gcra("10/s", 20)), "gcra 10/s burst 20 count attempts");
        let tokens = TokenBucket::new(rate("7/5m"), 7).expect("a limit");
        assert_eq!(Policy::from(tokens).to_string(), "token-bucket 7/5m burst 7");
        let policies: [(Policy, &str); 6] = [
            (FixedWindow::new(rate("2/m")).expect("a limit").into(), "fixed-window 2/m"),
            (
                FirstRequestWindow::new(rate("60/1h")).expect("a limit").into(),
                "first-request-window 60/h",
            ),
            (WindowLog::new(rate("3/1500ms")).expect("a limit").into(), "window-log 3/1500ms"),
            (SlidingCounter::new(rate("9/2us")).expect("a limit").into(), "sliding-counter 9/2us"),
            (SlidingLog::new(rate("5/30d")).expect("a limit").into(), "sliding-log 5/30d"),
            (Concurrency::new(rate("20/30s")).expect("a limit").into(), "concurrency 20/30s"),
        ];
        for (policy, words) in policies {
            assert_eq!(policy.to_string(), words);
            if policy.by_attempts().is_some() {
                assert_eq!(counted(policy), [words, " count attempts"].concat());
            }
        }
        let rates = ["1000/1s", "5000/10s"].map(rate);
        let steps = Policy::from(BucketedWindow::new(1_000_000, &rates).expect("a limit"));
        let words = "bucketed-window bucket 1s rates 1000/1s, 5000/10s";
        assert_eq!(steps.to_string(), words);
        assert_eq!(counted(steps), [words, " count attempts"].concat());
    }

    #[test]
    fn a_rate_in_lowest_terms_is_told_in_the_shortest_words() {
        for (given, told) in [
            ("10/s", "10/s"),
            ("120/m", "2/s"),
            ("240/h", "4/m"),
            ("5000/d", "5000/d"),
            ("1000/250ms", "4000/s"),
            ("600/s", "600/s"),
            ("2/3us", "2/3us"),
            ("1/d", "1/d"),
            ("1000003/30d", "1000003/30d"),
            ("10000000/s", "10/us"),
        ] {
            let policy = Policy::from(Gcra::new(rate(given), 1).expect("a limit"));
            assert_eq!(policy.to_string(), ["gcra ", told, " burst 1"].concat(), "{given}");
            assert_eq!(Gcra::new(rate(told), 1).map(Policy::from), Ok(policy), "{given}");
        }
    }
}

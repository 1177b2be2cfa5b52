//! [`CostEstimates`]: what requests will cost, learnt from what such requests did cost.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use derive_where::derive_where;
use ratelimit_core::ConfigError;

/// The most classes that learn. All others keep the first estimate: with one that they share, a
/// client that invents classes would set the estimates of its neighbours.
const MOST_CLASSES: usize = 1_024;
/// The least weight of a new cost: about so many of the last costs count, so the estimate follows
/// costs that change.
const LEAST_WEIGHT: f64 = 1.0 / 50.0;

/// Estimates of costs that are known late, by the class of a request, such as its model and user
/// group: the cost that a share of such requests has not exceeded.
///
/// A high share, such as 0.9, makes extensions rare and reserves more than most requests need.
/// Clones learn together.
///
/// # The formula
///
/// An estimate moves with the logarithm `l` of each cost: `q ← q + w·(share − [l ≤ q])`, and is
/// `e^q`. It rests where costs stay below it for the share of requests. The weight `w` of the nth
/// cost is `1/n`, and at least 1/50. The source is Robbins and Monro, [*A Stochastic Approximation
/// Method*](https://doi.org/10.1214/aoms/1177729586), 1951; Tierney, [*A Space-Efficient Recursive
/// Procedure for Estimating a Quantile*](https://doi.org/10.1137/0904048), 1983, shows that it
/// finds quantiles.
///
/// # Bounds
///
/// A class takes its name and 16 bytes. Of more than 1,024 classes, the later ones keep the first
/// estimate. So take a class that callers cannot invent.
///
/// ```
/// use ratelimit_tower::CostEstimates;
///
/// let estimates = CostEstimates::new(0.9, 256)?;
/// assert_eq!(estimates.estimate("large"), 256); // nothing is known yet
/// for cost in (0..1_000).map(|nth| 1_000 + nth % 100) {
///     estimates.learn("large", cost);
/// }
/// assert!((1_050..1_150).contains(&estimates.estimate("large")));
/// assert_eq!(estimates.estimate("small"), 256);
/// # Ok::<(), ratelimit_core::ConfigError>(())
/// ```
#[derive(Clone)]
#[derive_where(Debug)]
pub struct CostEstimates {
    share: f64,
    first: u64,
    #[derive_where(skip)]
    classes: Arc<Mutex<Classes>>,
}

type Classes = HashMap<Box<str>, Estimate>;

#[derive(Clone, Copy)]
struct Estimate {
    log: f64,
    learnt: f64,
}

impl CostEstimates {
    /// Estimates that this share of requests does not exceed, and `first` while nothing is known of
    /// a class.
    ///
    /// # Errors
    /// The share is not between 0 and 1.
    pub fn new(share: f64, first: u64) -> Result<Self, ConfigError> {
        if share > 0.0 && share < 1.0 {
            return Ok(Self { share, first, classes: Arc::default() });
        }
        Err(ConfigError::new(format!(
            "the share of requests that stay below their estimate is {share}; write one between 0 and 1, such as 0.9"
        )))
    }

    /// The estimate for a request of this class.
    #[must_use]
    pub fn estimate(&self, class: &str) -> u64 {
        self.classes().get(class).map_or(self.first, |estimate| cost(estimate.log))
    }

    /// Learns what a request of this class did cost.
    pub fn learn(&self, class: &str, cost: u64) {
        let first = Estimate { log: log(self.first), learnt: 0.0 };
        let mut classes = self.classes();
        if classes.len() >= MOST_CLASSES && !classes.contains_key(class) {
            return;
        }
        let estimate = classes.entry(class.into()).or_insert(first);
        estimate.learnt += 1.0;
        let weight = (1.0 / estimate.learnt).max(LEAST_WEIGHT);
        let is_below = f64::from(u8::from(log(cost) <= estimate.log));
        estimate.log += weight * (self.share - is_below);
    }

    fn classes(&self) -> MutexGuard<'_, Classes> {
        self.classes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[allow(clippy::cast_precision_loss, reason = "an estimate")]
fn log(cost: u64) -> f64 {
    (cost.max(1) as f64).ln()
}

#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "it is between 1 and u64::MAX"
)]
fn cost(log: f64) -> u64 {
    log.exp().round().max(1.0) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_estimate_is_exceeded_as_rarely_as_it_says_and_follows_costs_that_change() {
        for (share, most) in [(0.5, 60), (0.9, 15)] {
            let estimates = CostEstimates::new(share, 1).unwrap();
            for scale in [1, 100, 1] {
                let mut exceeded = 0;
                for nth in 0..4_000_u64 {
                    let cost = (500 + nth * 7_919 % 1_000) * scale;
                    exceeded += u64::from(nth >= 2_000 && cost > estimates.estimate("c"));
                    estimates.learn("c", cost);
                }
                assert!((20 * most / 2..=20 * most).contains(&exceeded), "{share}: {exceeded}");
            }
        }
    }

    #[test]
    fn classes_are_bounded_and_any_cost_is_learnt() {
        let estimates = CostEstimates::new(0.5, u64::MAX).unwrap();
        for nth in 0..3_000 {
            estimates.learn(&nth.to_string(), u64::MAX * (nth % 2));
        }
        assert_eq!(estimates.classes().len(), MOST_CLASSES);
        // One that came late keeps the first estimate.
        assert!(estimates.estimate("0") < u64::MAX && estimates.estimate("2000") == u64::MAX);
        let estimates = CostEstimates::new(0.1, 1).unwrap();
        estimates.learn("", 0);
        assert_eq!((estimates.estimate(""), estimates.estimate("another")), (1, 1));
        for share in [0.0, 1.0, f64::NAN, f64::INFINITY] {
            assert!(CostEstimates::new(share, 1).is_err());
        }
    }
}

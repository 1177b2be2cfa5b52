//! The keys of a run and their order: the same for every limiter.

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use rand_distr::Zipf;

use crate::measure::Fallible;

/// A caller, 20 bytes long. A type of its own because governor wants its key by its own type.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CallerKey(String);

impl CallerKey {
    /// The key with this number.
    pub(crate) fn new(number: usize) -> Self {
        Self(format!("caller-{number:013}"))
    }

    /// The key as a `RateLimiter` takes it.
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

/// The distribution of the keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Spread {
    /// Every key is equally likely.
    Uniform,
    /// The second key is half as likely as the first, the third a third as likely, and so on.
    Zipf,
    /// Every second draw is one of the first ten keys, the others are of all.
    TenHot,
}

/// Draws keys in a fixed pseudo-random order, so that a run can be repeated.
pub(crate) struct KeyDraw {
    spread: Spread,
    key_count: usize,
    random: SmallRng,
}

impl KeyDraw {
    /// Draws from this many keys; another seed gives another order.
    pub(crate) fn new(spread: Spread, key_count: usize, seed: u64) -> Self {
        Self { spread, key_count, random: SmallRng::seed_from_u64(seed) }
    }

    /// The next keys, this many. They lie in memory in the order of the decisions, so that a run
    /// measures the limiter and not the reading of keys.
    pub(crate) fn keys(&mut self, count: usize) -> Fallible<Vec<CallerKey>> {
        let random = &mut self.random;
        Ok(match self.spread {
            Spread::Uniform => {
                (0..count).map(|_| CallerKey::new(random.random_range(0..self.key_count))).collect()
            }
            Spread::TenHot => {
                let most = [10, self.key_count];
                let key = |draw: usize| CallerKey::new(random.random_range(0..most[draw % 2]));
                (0..count).map(key).collect()
            }
            Spread::Zipf => {
                let ranks = Zipf::new(f64::from(u32::try_from(self.key_count)?), 1.0)?;
                #[allow(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "a rank"
                )]
                let key = |rank: f64| CallerKey::new(rank as usize - 1);
                random.sample_iter(ranks).map(key).take(count).collect()
            }
        })
    }
}

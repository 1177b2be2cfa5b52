//! The keys of a run and their order: the same for every limiter.

/// A caller, 20 bytes long. A type of its own because governor wants its key by its own type.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key(String);

impl Key {
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
}

/// Draws keys in a fixed pseudo-random order, so that a run can be repeated.
pub(crate) struct Draw {
    state: u64,
    /// By key: the last draw that selects it; see [`Spread`].
    bounds: Vec<u64>,
    key_count: usize,
}

/// The weight of the first key in [`Spread::Zipf`]: large, so that the millionth has a weight, too.
const FIRST_WEIGHT: u64 = 1 << 40;

impl Draw {
    /// Draws from this many keys; another seed gives another order.
    pub(crate) fn new(spread: Spread, key_count: usize, seed: u64) -> Self {
        let bounds = match spread {
            Spread::Uniform => Vec::new(),
            Spread::Zipf => (1..)
                .take(key_count)
                .scan(0, |sum, rank| {
                    *sum += FIRST_WEIGHT / rank;
                    Some(*sum)
                })
                .collect(),
        };
        Self { state: seed, bounds, key_count }
    }

    /// The next keys, this many. They lie in memory in the order of the decisions, so that a run measures the
    /// limiter and not the reading of keys.
    pub(crate) fn keys(&mut self, count: usize) -> Vec<Key> {
        (0..count).map(|_| Key::new(self.number())).collect()
    }

    fn number(&mut self) -> usize {
        match self.bounds.last() {
            None => usize::try_from(self.below(self.key_count as u64)).unwrap_or(0),
            Some(&total) => {
                let drawn = self.below(total);
                self.bounds.partition_point(|bound| *bound <= drawn)
            }
        }
    }

    /// A number below `end`: `SplitMix64`, with a bias too small to measure.
    fn below(&mut self, end: u64) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_has_twenty_bytes() {
        assert_eq!(Key::new(0).as_str().len(), 20);
        assert_eq!(Key::new(999_999).as_str().len(), 20);
    }

    #[test]
    fn uniform_draws_every_key_and_no_other() {
        let mut draw = Draw::new(Spread::Uniform, 10, 1);
        let mut counts = [0; 10];
        (0..10_000).for_each(|_| counts[draw.number()] += 1);
        assert!(counts.iter().all(|count| (800..1_200).contains(count)), "{counts:?}");
    }

    #[test]
    fn zipf_draws_the_second_half_as_often_as_the_first() {
        let mut draw = Draw::new(Spread::Zipf, 1_000, 1);
        let mut counts = vec![0; 1_000];
        (0..100_000).for_each(|_| counts[draw.number()] += 1);
        // The first thousand terms of the harmonic series make 7.49: the first key is 13.4 %.
        assert!((12_800..13_900).contains(&counts[0]), "{}", counts[0]);
        assert!((6_300..7_100).contains(&counts[1]), "{}", counts[1]);
    }
}

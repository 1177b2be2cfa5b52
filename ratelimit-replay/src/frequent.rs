//! [`Frequent`]: the texts that come most often, in bounded memory.
//!
//! *Space-Saving* (Metwally, Agrawal, El Abbadi: *Efficient Computation of Frequent and Top-k
//! Elements in Data Streams*, 2005): a text that is not counted replaces the one that came least
//! often, and inherits its count. So no frequent text is missed, and each count is too high by a
//! known number at most.

use std::cmp::Reverse;
use std::collections::HashMap;

/// How often texts came, of the most frequent.
#[derive(Clone, Debug, Default)]
pub(crate) struct Frequent {
    /// Each beside the number of texts that had been counted when it came.
    counts: HashMap<Box<str>, (Count, u64)>,
    /// How many texts were counted one by one.
    begun: u64,
    /// How many texts came before any was counted.
    before: u64,
}

/// How often a text came at most, and of these, how many may have been others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Count {
    pub(crate) most: u64,
    pub(crate) others: u64,
}

impl Frequent {
    /// Counts texts after so many that are not counted.
    pub(crate) fn after(before: u64) -> Self {
        Self { before, ..Self::default() }
    }

    /// Counts a text; `places`: how many are counted.
    pub(crate) fn count(&mut self, text: &str, places: usize) {
        if let Some((count, _)) = self.counts.get_mut(text) {
            count.most += 1;
            return;
        }
        let mut others = self.before;
        if self.counts.len() >= places {
            // Of several, the one that has been counted longest.
            let least = self.counts.iter().min_by_key(|(_, (count, since))| (count.most, *since));
            let Some((least, count)) = least.map(|(text, (count, _))| (text.clone(), count.most))
            else {
                return;
            };
            others = count;
            self.counts.remove(&least);
        }
        self.begun += 1;
        self.counts.insert(text.into(), (Count { most: others + 1, others }, self.begun));
    }

    /// The texts that came most often, and how often each did.
    pub(crate) fn top(&self, most: usize) -> Vec<(&str, Count)> {
        let mut all: Vec<_> =
            self.counts.iter().map(|(text, (count, _))| (&**text, *count)).collect();
        all.sort_unstable_by_key(|(text, count)| (Reverse(count.most), count.others, *text));
        all.truncate(most);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Each count is right within its bound, and whatever came more often than all fits
        /// together leaves room for is there.
        #[test]
        fn no_frequent_text_is_missed(texts in prop::collection::vec(0..40_u8, 1..400), places in 1..12_usize) {
            let (mut frequent, mut exact) = (Frequent::default(), HashMap::<String, u64>::new());
            for text in texts.iter().map(|text| (text / (1 + text % 7)).to_string()) {
                frequent.count(&text, places);
                *exact.entry(text).or_default() += 1;
            }
            let top = frequent.top(places);
            prop_assert!(top.len() <= places);
            for (text, count) in &top {
                let is = exact[*text];
                prop_assert!(is <= count.most && is >= count.most - count.others, "{text}: {count:?}, {is}");
            }
            let all = texts.len() as u64;
            for (text, is) in &exact {
                let is_there = top.iter().any(|(known, _)| known == text);
                prop_assert!(is_there || *is <= all / places as u64, "{text} came {is} times of {all}");
            }
        }
    }
}

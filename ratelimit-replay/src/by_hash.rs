//! [`ByHash`]: a value per caller, of a bounded number of callers.
//!
//! The hash of a key stands for the key. Of 2^20 keys, two have the same hash with a chance of
//! 2^-25.

use std::hash::{BuildHasher, Hash, RandomState};
use std::sync::LazyLock;

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

/// The most callers that a replay tells apart, under one identifier or one limit: as many as a
/// table of 2^21 places takes.
pub(crate) const MAX_CALLERS: usize = (1 << 21) / 8 * 7;

/// A hash whose key is drawn at random, so that no client can choose callers that collide.
pub(crate) fn hash_of(key: &(impl Hash + ?Sized)) -> u64 {
    static HASHER: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    HASHER.hash_one(key)
}

/// A value per caller: of the first that come, up to a number of them.
pub(crate) struct ByHash<T> {
    values: HashTable<(u64, T)>,
    most: usize,
}

impl<T> ByHash<T> {
    /// `most`: how many callers have a value.
    pub(crate) const fn new(most: usize) -> Self {
        Self { values: HashTable::new(), most }
    }

    /// The value of a caller. `None` if it comes after too many others.
    pub(crate) fn of(&mut self, hash: u64, new: impl FnOnce() -> T) -> Option<&mut T> {
        if self.values.len() >= self.most {
            return self.get_mut(hash);
        }
        Some(&mut self.entry(hash).or_insert_with(|| (hash, new())).into_mut().1)
    }

    fn entry(&mut self, hash: u64) -> Entry<'_, (u64, T)> {
        self.values.entry(hash, |(known, _)| *known == hash, |(known, _)| *known)
    }

    pub(crate) fn get(&self, hash: u64) -> Option<&T> {
        self.values.find(hash, |(known, _)| *known == hash).map(|(_, value)| value)
    }

    pub(crate) fn get_mut(&mut self, hash: u64) -> Option<&mut T> {
        self.values.find_mut(hash, |(known, _)| *known == hash).map(|(_, value)| value)
    }

    pub(crate) fn values(&self) -> impl Iterator<Item = &T> {
        self.values.iter().map(|(_, value)| value)
    }

    pub(crate) fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.values.iter_mut().map(|(_, value)| value)
    }

    /// Drops the values that are not wanted.
    pub(crate) fn retain(&mut self, mut is_wanted: impl FnMut(&T) -> bool) {
        self.values.retain(|(_, value)| is_wanted(value));
    }

    /// The number of callers.
    pub(crate) fn len(&self) -> usize {
        self.values.len()
    }
}

impl<T> Default for ByHash<T> {
    fn default() -> Self {
        Self::new(MAX_CALLERS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn callers_after_too_many_others_have_no_value() {
        let mut requests = ByHash::new(2);
        for key in ["a", "b", "c", "a", "c", "d"] {
            if let Some(requests) = requests.of(hash_of(key), || 0) {
                *requests += 1;
            }
        }
        let of = |key| requests.get(hash_of(key)).copied();
        assert_eq!([of("a"), of("b"), of("c"), of("d")], [Some(2), Some(1), None, None]);
        assert_eq!(requests.len(), 2);
    }
}

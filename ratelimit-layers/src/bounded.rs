//! [`BoundedMap`]: at most so many values by a hash of a limit and a key, and [`WideKeyHasher`],
//! which makes the hashes.

use std::collections::VecDeque;
use std::hash::{BuildHasher, Hash, RandomState};
use std::sync::Mutex;

use dashmap::DashMap;

use crate::lock;

/// Hashes of 128 bits: two keyed hashes, so that two keys of `n` meet with a chance of n² / 2¹²⁹.
#[derive(Debug, Default)]
pub(crate) struct WideKeyHasher([RandomState; 2]);

impl WideKeyHasher {
    pub(crate) fn hash(&self, of: impl Hash) -> u128 {
        let [high, low] = self.0.each_ref().map(|hasher| hasher.hash_one(&of));
        u128::from(high) << 64 | u128::from(low)
    }
}

/// A concurrent map of at most so many values. Above that, the value that came first goes.
#[derive(Debug)]
pub(crate) struct BoundedMap<V> {
    /// A caller that fills a vacant place calls [`make_room`](Self::make_room) afterwards, without
    /// holding it. Nothing else removes a value.
    pub(crate) values: DashMap<u128, V>,
    /// Each key once, in the order in which they came. Locked before a value, never while one is
    /// held.
    order: Mutex<VecDeque<u128>>,
    capacity: usize,
}

impl<V> BoundedMap<V> {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { values: DashMap::new(), order: Mutex::default(), capacity }
    }

    /// Notes that a key came, and drops another one if there are too many. For each key that comes,
    /// it looks at two, so that stale values go faster than new ones come. Returns what went.
    pub(crate) fn make_room(
        &self,
        came: u128,
        is_stale: impl Fn(&V) -> bool,
    ) -> [Option<(u128, V)>; 2] {
        let mut order = lock(&self.order);
        order.push_back(came);
        [(); 2].map(|()| {
            let is_full = order.len() > self.capacity;
            let oldest = order.pop_front()?;
            let removed = self.values.remove_if(&oldest, |_, value| is_full || is_stale(value));
            if removed.is_none() {
                order.push_back(oldest);
            }
            removed
        })
    }
}

//! New ids, from the only source of randomness in the standard library.

use core::hash::BuildHasher;
use core::sync::atomic::{AtomicU64, Ordering};
use std::collections::hash_map::RandomState;
use std::sync::OnceLock;

use crate::reservation::ReservationId;

impl ReservationId {
    /// A new id from the standard library's randomly seeded hasher. Ids do not repeat, but a client
    /// that has seen many may predict others.
    #[must_use]
    pub fn random() -> Self {
        static SEED: OnceLock<RandomState> = OnceLock::new();
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let seed = SEED.get_or_init(RandomState::new);
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        let half = |which: u8| u128::from(seed.hash_one((next, which)));
        Self(half(0) << 64 | half(1))
    }
}

//! [`AllotmentsBuilder`]: the settings of [`Allotments`].

use std::sync::Arc;
use std::time::Duration;

use ratelimit_core::store::Reservation;
use ratelimit_core::{Algorithm, Clock};
use ratelimit_memory::PreciseClock;

use super::ledger::Ledger;
use super::slot::Terms;
use super::{AllotmentTally, Allotments, Returns, SharedAllotments};

/// The settings of [`Allotments`] that are to be built: what [`Allotments::builder`] returns.
#[derive(Clone, Debug)]
pub struct AllotmentsBuilder<C = PreciseClock> {
    terms: Terms,
    capacity: usize,
    clock: C,
}

impl Allotments<()> {
    /// The settings of allotments of a store.
    #[must_use]
    pub fn builder() -> AllotmentsBuilder {
        let terms = Terms { lifetime_us: 100_000, divisor: 8 };
        AllotmentsBuilder { terms, capacity: 1 << 16, clock: PreciseClock::new() }
    }
}

impl<C: Clock> AllotmentsBuilder<C> {
    /// How long an allotment is spent, counted from before its draw is sent: 100 ms unless it is
    /// set, at most half an hour. It is the `L` of [the
    /// bound](Allotments#how-far-it-exceeds-a-limit). A process sends about one draw and one
    /// settlement per busy key and lifetime.
    #[must_use]
    pub fn lifetime(mut self, lifetime: Duration) -> Self {
        // A store forgets a reservation after this time: what is left must be back before.
        let longest_us = Reservation::LIFE_US / 2;
        let lifetime_us = u64::try_from(lifetime.as_micros()).unwrap_or(u64::MAX);
        self.terms.lifetime_us = lifetime_us.min(longest_us);
        self
    }

    /// A draw takes at most one part of so many of what a limit had left, and at most 10,000 units:
    /// 8 unless it is set, at least 1. More parts leave more for other processes and make more
    /// calls.
    #[must_use]
    pub const fn divisor(mut self, parts: u64) -> Self {
        self.terms.divisor = parts;
        self
    }

    /// The most slots: 65,536 unless it is set, at least 1. Each combination of limits and keys
    /// that requests ask about has one, and keeps its keys, of at most 1,024 bytes together. Above
    /// that, an older one is dropped. What it has left is given back; a draw in flight is
    /// forfeited.
    #[must_use]
    pub fn capacity(self, slots: usize) -> Self {
        Self { capacity: slots.max(1), ..self }
    }

    /// Sets the clock that counts how old an allotment is, such as a
    /// [`ManualClock`](ratelimit_core::ManualClock) in a test. Only differences between its times
    /// matter.
    #[must_use]
    pub fn clock<D: Clock>(self, clock: D) -> AllotmentsBuilder<D> {
        AllotmentsBuilder { terms: self.terms, capacity: self.capacity, clock }
    }

    /// Allotments of this store.
    #[must_use]
    pub fn build<S, A: Algorithm>(self, store: S) -> Allotments<S, A, C> {
        let Self { terms, capacity, clock } = self;
        let (ledger, tally) = (Ledger::new(capacity), AllotmentTally::default());
        let returns = Returns::default();
        Allotments {
            inner: Arc::new(SharedAllotments { store, ledger, terms, clock, tally, returns }),
        }
    }
}

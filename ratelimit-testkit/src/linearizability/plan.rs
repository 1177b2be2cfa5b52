//! The pseudo-random requests of a thread, the same for every run with one seed.

use std::time::Duration;

use ratelimit_core::store::Op;
use ratelimit_core::{Algorithm, ReservationId, Timestamp};

use super::{ConcurrentRun, Event, RecordChange};

/// A linear congruential generator.
pub(crate) struct Lcg(u64);

impl Lcg {
    pub(crate) fn new(seed: u64) -> Self {
        let mut plan = Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        plan.below(1);
        plan
    }

    fn below(&mut self, bound: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from((self.0 >> 33) % bound.max(1) as u64).unwrap_or_default()
    }

    /// The next request, without its answer, and by how much the clock advances before it.
    pub(crate) fn next<A: Algorithm>(
        &mut self,
        scenario: &ConcurrentRun<'_, A>,
    ) -> (Event, Option<Duration>) {
        let op = match self.below(32) {
            0..=3 => Op::Peek,
            4..=6 => Op::Refund,
            7 | 8 => Op::Force,
            9 => Op::Reset,
            17 => Op::Adopt,
            10..=13 if scenario.reservations => Op::Settle,
            14 if scenario.reservations => Op::Renew,
            15 | 16 | 18 | 19 if scenario.reservations => Op::Extend,
            _ => Op::Acquire,
        };
        let with_id = scenario.reservations && (op.needs_id() || self.below(3) == 0);
        let checks = if self.below(4) == 0 { 1 + self.below(scenario.batch) } else { 1 };
        let mut asks: Vec<(usize, usize, u64)> = Vec::new();
        for _ in 0..checks {
            let (limit, key) = (self.below(scenario.limits.len()), self.below(scenario.keys));
            if !asks.iter().any(|(l, k, _)| (*l, *k) == (limit, key)) {
                // To settle or extend a reservation at what it is changes nothing.
                let cost = match op {
                    Op::Settle | Op::Extend => self.below(4) as u64,
                    _ => self.cost(scenario.limits[limit].algorithm()),
                };
                asks.push((limit, key, cost));
            }
        }
        let event = Event {
            op,
            asks,
            // Few ids, so that requests collide.
            id: with_id.then(|| ReservationId::new(1 + self.below(3) as u128)),
            asked: 0,
            answered: 0,
            clock: [Timestamp::ZERO; 2],
            answer: Ok(Vec::new()),
        };
        let step = (self.below(5) == 0).then(|| {
            let most_us = usize::try_from(scenario.step.as_micros()).unwrap_or(usize::MAX);
            Duration::from_micros(1 + self.below(most_us) as u64)
        });
        (event, step)
    }

    /// In one of four cases, a change of a record in place of a request: which stands after it, of
    /// so many.
    pub(crate) fn change<A: Algorithm>(
        &mut self,
        scenario: &ConcurrentRun<'_, A>,
        records: usize,
    ) -> Option<RecordChange> {
        let change = RecordChange {
            limit: self.below(scenario.limits.len()),
            key: self.below(scenario.keys),
            before: None,
            after: self.below(records + 1).checked_sub(1),
            asked: 0,
            answered: 0,
            clock: [Timestamp::ZERO; 2],
            is_done: false,
        };
        (self.below(4) == 0).then_some(change)
    }

    fn cost<A: Algorithm>(&mut self, algorithm: &A) -> u64 {
        match self.below(16) {
            0 => 0,
            1 => algorithm.capacity(),
            2 => algorithm.capacity() + 1,
            3 | 4 => 2.min(algorithm.capacity()),
            _ => 1,
        }
    }
}

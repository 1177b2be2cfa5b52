//! [`Charges`]: what limits charge callers between two scans, by the states that these find.
//!
//! A store keeps no count of denials, and a denial changes no state, unless the limit counts
//! attempts. What two states tell is how much was charged in between. For a limited caller that is
//! whether it still tries: a bucket charges it as fast as it refills.

use std::collections::HashMap;
use std::time::Instant;

use ratelimit_core::algorithm::AnyState;
use ratelimit_core::{Algorithm as _, AnyAlgorithm, Timestamp};

use super::scan::{ScanResult, Subject};
use crate::commands::record::now;

/// What a limit charged a caller, and within which time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Charged {
    pub(super) units: u64,
    pub(super) within_us: u64,
}

impl Charged {
    pub(super) fn tenths_per_second(self) -> u64 {
        let (units, within_us) = (u128::from(self.units), u128::from(self.within_us.max(1)));
        u64::try_from((units * 10_000_000 + within_us / 2) / within_us).unwrap_or(u64::MAX)
    }
}

/// The states of the scan before, by the position of the limit and its caller.
#[derive(Default)]
pub(super) struct Charges(HashMap<(usize, String), (Option<AnyState>, Instant)>);

impl Charges {
    /// Tells each limited caller's charges since the scan before, and remembers its state.
    pub(super) fn follow(&mut self, subject: &Subject<'_>, found: &mut ScanResult) {
        let mut states = HashMap::with_capacity(found.limited.len());
        for limited in &mut found.limited {
            let key = (limited.place, limited.caller.clone());
            let record = found.records.get(&key);
            let own = record.map(|record| record.algorithm());
            // A caller that a record blocks is charged nothing.
            let algorithm = own.unwrap_or_else(|| Some(subject.limit(limited.place).algorithm()));
            if let (Some(algorithm), Some((before, then))) = (algorithm, self.0.get(&key)) {
                let units = charged(algorithm, before.as_ref(), limited.state.as_ref(), now());
                let within_us = limited.at.saturating_duration_since(*then).as_micros();
                let within_us = u64::try_from(within_us).unwrap_or(u64::MAX);
                limited.charged = Some(Charged { units, within_us });
            }
            states.insert(key, (limited.state.take(), limited.at));
        }
        self.0 = states;
    }
}

/// By how much more of the limit is used in the state `after` than would be in the state `before`
/// at the same time. If a window has ended in between, that leaves out what it was charged last.
fn charged(
    limit: &AnyAlgorithm,
    before: Option<&AnyState>,
    after: Option<&AnyState>,
    now: Timestamp,
) -> u64 {
    let now = limit.charged_at(after, now);
    let used = |state| {
        let left = limit.step(state, now, 0).decision.remaining;
        limit.capacity().saturating_sub(left).saturating_add(limit.owed(state, now))
    };
    used(after).saturating_sub(used(before))
}

#[cfg(test)]
mod tests {
    use ratelimit_core::algorithm::Write;

    use super::*;

    /// The state after a charge at this second.
    fn charge(
        limit: &AnyAlgorithm,
        state: Option<&AnyState>,
        at: u64,
        cost: u64,
    ) -> Option<AnyState> {
        match limit.step(state, Timestamp::saturating_from_us(at * 1_000_000), cost).write {
            Write::Put { state, .. } => Some(state),
            _ => state.cloned(),
        }
    }

    #[test]
    fn what_was_charged_between_two_scans_is_the_difference_of_their_states_at_one_time() {
        const START: u64 = 1_000_000;
        for words in [
            "token-bucket 1/s burst 10",
            "gcra 1/s burst 10",
            "fixed-window 10/h",
            "first-request-window 10/h",
            "sliding-counter 10/h",
            "sliding-log 10/h",
            "window-log 10/h",
            "bucketed-window bucket 1m rates 10/h",
        ] {
            let limit: AnyAlgorithm = words.parse().expect(words);
            let before = charge(&limit, None, START, 4);
            let told = |after: Option<&AnyState>| {
                let now = Timestamp::saturating_from_us((START + 4) * 1_000_000);
                charged(&limit, before.as_ref(), after, now)
            };
            assert_eq!(told(before.as_ref()), 0, "{words}");
            let mut after = before.clone();
            for (nth, cost) in [(1, 2), (2, 1), (3, 3)] {
                after = charge(&limit, after.as_ref(), START + nth, cost);
            }
            assert_eq!(told(after.as_ref()), 6, "{words}");
        }
    }

    #[test]
    fn a_rate_is_told_in_tenths_and_rounded() {
        for (units, within_us, tenths) in [
            (0, 2_000_000, 0),
            (3, 2_000_000, 15),
            (1, 3_000_000, 3),
            (2, 3_000_000, 7),
            (1, 0, 10_000_000),
        ] {
            assert_eq!(Charged { units, within_us }.tenths_per_second(), tenths);
        }
    }
}

//! What was admitted, and what the definition of the algorithm allows on top of it.

use std::collections::HashMap;

use ratelimit_core::{Policy, Refill, Tick};

use crate::seeds::{Scale, refill};
use crate::trace::Ask;

/// What was admitted of every key.
#[derive(Default)]
pub(crate) struct Books(HashMap<(usize, String), Vec<Admitted>>);

/// One admitted request.
#[derive(Clone, Copy)]
pub(crate) struct Admitted {
    at_us: u64,
    cost: u64,
}

impl Books {
    pub(crate) fn of(&self, ask: &Ask) -> &[Admitted] {
        self.0.get(&(ask.limit, ask.key.clone())).map_or(&[], |admitted| admitted)
    }

    /// Notes that a request was admitted. A request from before the last one counts as made with it.
    pub(crate) fn admit(&mut self, ask: &Ask, at: Tick) {
        if ask.cost > 0 {
            let admitted = self.0.entry((ask.limit, ask.key.clone())).or_default();
            let at_us = admitted.last().map_or(at.as_us(), |last| last.at_us.max(at.as_us()));
            admitted.push(Admitted { at_us, cost: ask.cost });
        }
    }
}

/// How a request would break the bound, if it does: what the bound is, and what there would be.
///
/// For a bucket the bound is `burst + rate · time` over every stretch of time that ends now, in
/// fractions; for a window it is the limit over every stretch that the algorithm calls a window.
pub(crate) fn excess(
    policy: &Policy,
    admitted: &[Admitted],
    at: Tick,
    cost: u64,
) -> Option<String> {
    let at_us = admitted.last().map_or(at.as_us(), |last| last.at_us.max(at.as_us()));
    let too_much = |since_us: u64, total: u128, bound: u128, per_unit: u128| {
        (total > bound).then(|| {
            format!(
                "{} since {since_us} µs, when the bound is {} and {}/{per_unit}",
                total / per_unit,
                bound / per_unit,
                bound % per_unit
            )
        })
    };
    if let Policy::Gcra(_) | Policy::TokenBucket(_) = policy {
        let Refill { burst, token_units, tick_units, tick_us } = *refill(policy);
        // In fractions of a unit, so that a part of a refill tick brings a whole number of them.
        let per_unit = u128::from(token_units) * u128::from(tick_us);
        let mut total = u128::from(cost) * per_unit;
        let alone = too_much(at_us, total, u128::from(burst) * per_unit, per_unit);
        return alone.or_else(|| {
            admitted.iter().rev().find_map(|earlier| {
                total += u128::from(earlier.cost) * per_unit;
                let flow = u128::from(at_us - earlier.at_us) * u128::from(tick_units);
                too_much(earlier.at_us, total, u128::from(burst) * per_unit + flow, per_unit)
            })
        });
    }
    let (since_us, in_window) = window_total(policy, admitted, at_us);
    let capacity = Scale::of(policy).capacity.into();
    too_much(since_us, in_window + u128::from(cost), capacity, 1)
}

/// Whether a denial of this cost is justified by what was admitted.
///
/// As [`excess`], but a bucket with coarse refill ticks hands over what flows within a tick when that
/// ends, and may have begun its tick anew once, while it was nearly full.
pub(crate) fn is_full(policy: &Policy, admitted: &[Admitted], at: Tick, cost: u64) -> bool {
    let at_us = admitted.last().map_or(at.as_us(), |last| last.at_us.max(at.as_us()));
    if let Policy::Gcra(_) | Policy::TokenBucket(_) = policy {
        let Refill { burst, token_units, tick_units, tick_us } = *refill(policy);
        let mut total = u128::from(cost);
        return total > u128::from(burst)
            || admitted.iter().rev().any(|earlier| {
                total += u128::from(earlier.cost);
                let ticks = (at_us - earlier.at_us) / tick_us;
                let flow = u128::from(ticks) * u128::from(tick_units);
                let late = if tick_us == 1 { 0 } else { 2 * u128::from(tick_units) };
                let bound = u128::from(burst) * u128::from(token_units) + flow;
                total * u128::from(token_units) + late > bound
            });
    }
    excess(policy, admitted, at, cost).is_some()
}

/// Since when the current window counts, and what was admitted in it.
fn window_total(policy: &Policy, admitted: &[Admitted], at_us: u64) -> (u64, u128) {
    let sum_since = |since_us: u64| -> u128 {
        admitted.iter().filter(|a| a.at_us >= since_us).map(|a| u128::from(a.cost)).sum()
    };
    match policy {
        Policy::FixedWindow(fixed) => {
            let since_us = at_us - at_us % fixed.window_us();
            (since_us, sum_since(since_us))
        }
        Policy::FirstRequestWindow(first) => {
            let opens = |begin: u64, a: &Admitted| {
                if a.at_us >= begin + first.window_us() { a.at_us } else { begin }
            };
            let Some(begin) = admitted.first().map(|a| a.at_us) else { return (at_us, 0) };
            let begin = admitted.iter().fold(begin, opens);
            if at_us >= begin + first.window_us() { (at_us, 0) } else { (begin, sum_since(begin)) }
        }
        Policy::SlidingLog(log) => {
            let since_us = (at_us + 1).saturating_sub(log.window_us());
            (since_us, sum_since(since_us))
        }
        other => panic!("the testkit does not know {other:?}"),
    }
}

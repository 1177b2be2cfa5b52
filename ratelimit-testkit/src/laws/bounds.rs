//! What was admitted, and what the definition of the algorithm still allows.

use std::collections::HashMap;

use ratelimit_core::{Policy, Refill, Timestamp};

use crate::seeds::{Scale, refill};
use crate::trace::Ask;

/// The requests admitted for every key.
#[derive(Default)]
pub(crate) struct Bounds(HashMap<(usize, String), Vec<Admitted>>);

/// One admitted request.
#[derive(Clone, Copy)]
pub(crate) struct Admitted {
    at_us: u64,
    cost: u64,
}

impl Bounds {
    pub(crate) fn of(&self, ask: &Ask) -> &[Admitted] {
        self.0.get(&(ask.limit, ask.key.clone())).map_or(&[], |admitted| admitted)
    }

    /// Records an admitted request. A request with a time before the last one counts as made with it.
    pub(crate) fn admit(&mut self, ask: &Ask, at: Timestamp) {
        if ask.cost > 0 {
            self.note(ask, at, ask.cost);
        }
    }

    /// Records that this cost of a request counts: 0 for a request that was charged but not admitted. Such a
    /// request still moves the key's clock and may open a window.
    pub(crate) fn note(&mut self, ask: &Ask, at: Timestamp, cost: u64) {
        let noted = self.0.entry((ask.limit, ask.key.clone())).or_default();
        let at_us = noted.last().map_or(at.as_us(), |last| last.at_us.max(at.as_us()));
        noted.push(Admitted { at_us, cost });
    }
}

/// Says how a request would break the bound, if it does: the bound, and the total with the request.
///
/// A bucket's bound is `burst + rate · time` over every stretch of time that ends now, computed in fractions of
/// a unit. A window's bound is its limit.
pub(crate) fn excess(
    policy: &Policy,
    admitted: &[Admitted],
    at: Timestamp,
    cost: u64,
) -> Option<String> {
    let policy = &policy.by_admissions();
    let at_us = effective_us(policy, admitted, at);
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
        // Counted in fractions of a unit, so that a part of a refill tick adds a whole number of them.
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
    windows(policy, admitted, at_us).into_iter().find_map(|window| {
        too_much(window.since_us, window.used + u128::from(cost), window.limit.into(), 1)
    })
}

/// The time of a request as the key sees it: never before the last admission. The sliding counter only
/// remembers when its current window began.
fn effective_us(policy: &Policy, admitted: &[Admitted], at: Timestamp) -> u64 {
    let last_us = admitted.last().map_or(0, |last| last.at_us);
    let last_us = match policy {
        Policy::SlidingCounter(counter) => last_us - last_us % counter.window_us(),
        _ => last_us,
    };
    at.as_us().max(last_us)
}

/// Whether the admitted requests justify a denial of this cost.
///
/// As [`excess`], except that a bucket with coarse refill ticks adds a tick's flow only when the tick ends, and
/// may have restarted its tick once, while it was nearly full.
pub(crate) fn is_full(policy: &Policy, admitted: &[Admitted], at: Timestamp, cost: u64) -> bool {
    let policy = &policy.by_admissions();
    let at_us = effective_us(policy, admitted, at);
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

/// A window of a limit, and what was admitted in it.
struct Window {
    since_us: u64,
    used: u128,
    limit: u64,
}

/// The windows that contain a request at this time.
fn windows(policy: &Policy, admitted: &[Admitted], at_us: u64) -> Vec<Window> {
    let sum = |from_us: u64, to_us: u64| -> u128 {
        let within = admitted.iter().filter(|a| (from_us..to_us).contains(&a.at_us));
        within.map(|a| u128::from(a.cost)).sum()
    };
    let limit = Scale::of(policy).capacity;
    let since = |since_us| Window { since_us, used: sum(since_us, u64::MAX), limit };
    vec![match policy {
        Policy::Gcra(_) | Policy::TokenBucket(_) => return Vec::new(),
        Policy::FixedWindow(fixed) => since(at_us - at_us % fixed.window_us()),
        Policy::FirstRequestWindow(first) => since(begun_us(admitted, at_us, first.window_us())),
        Policy::BucketedWindow(bucketed) => {
            let bucket_end_us = at_us - at_us % bucketed.bucket_us() + bucketed.bucket_us();
            let windows = bucketed.windows().iter();
            return windows
                .map(|w| Window {
                    limit: w.limit,
                    ..since(bucket_end_us.saturating_sub(w.span_us))
                })
                .collect();
        }
        Policy::SlidingCounter(counter) => {
            let start_us = at_us - at_us % counter.window_us();
            let before_us = start_us.saturating_sub(counter.window_us());
            let overlap_us = u128::from(start_us + counter.window_us() - at_us);
            let weighed = sum(before_us, start_us) * overlap_us / u128::from(counter.window_us());
            Window { since_us: before_us, used: weighed + sum(start_us, u64::MAX), limit }
        }
        Policy::WindowLog(log) => since(begun_us(admitted, at_us, log.window_us())),
        Policy::SlidingLog(log) => since((at_us + 1).saturating_sub(log.window_us())),
        Policy::Concurrency(leases) => since((at_us + 1).saturating_sub(leases.lease_us())),
        counting => unreachable!("{counting} is judged by what it admits"),
    }]
}

/// The beginning of the window that contains a request, for windows that begin with an admitted request.
fn begun_us(admitted: &[Admitted], at_us: u64, window_us: u64) -> u64 {
    let opens = |begin: u64, a: &Admitted| {
        if a.at_us >= begin + window_us { a.at_us } else { begin }
    };
    let begin = admitted.first().map_or(at_us, |a| a.at_us);
    let begin = admitted.iter().fold(begin, opens);
    if at_us >= begin + window_us { at_us + 1 } else { begin }
}

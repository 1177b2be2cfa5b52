//! What each algorithm may admit, from what was admitted alone.

use ratelimit_core::{Algorithm, Policy, Refill, Timestamp};

/// Says how a request would break the bound of its algorithm, if it does: the bound, and the total with the request.
///
/// A bucket's bound is `burst + rate · time` over every stretch of time that ends now, computed in fractions of
/// a unit. A window's bound is its limit.
pub(crate) fn excess(
    policy: &Policy,
    admitted: &[(Timestamp, u64)],
    at: Timestamp,
    cost: u64,
) -> Option<String> {
    let policy = policy.by_admissions();
    let admitted: Vec<(u64, u64)> = admitted.iter().map(|(at, cost)| (at.as_us(), *cost)).collect();
    // The sliding counter remembers of the last request only when its window began.
    let last_us = admitted.last().map_or(0, |(last_us, _)| *last_us);
    let at_us = match &policy {
        Policy::SlidingCounter(of) => at.as_us().max(last_us - last_us % of.window_us()),
        _ => at.as_us().max(last_us),
    };
    let sum = |from_us: u64, to_us: u64| -> u128 {
        let within = admitted.iter().filter(|(at_us, _)| (from_us..to_us).contains(at_us));
        within.map(|(_, cost)| u128::from(*cost)).sum()
    };
    let capacity = policy.capacity();
    let window = |since_us: u64, used: u128, limit: u64| {
        let total = used + u128::from(cost);
        (total > limit.into()).then(|| format!("{total} since {since_us} µs, of {limit}"))
    };
    let since = |since_us: u64, limit: u64| window(since_us, sum(since_us, u64::MAX), limit);
    match &policy {
        Policy::Gcra(gcra) => bucket(gcra.refill(), &admitted, at_us, cost),
        Policy::TokenBucket(tokens) => bucket(tokens.refill(), &admitted, at_us, cost),
        Policy::FixedWindow(fixed) => since(at_us - at_us % fixed.window_us(), capacity),
        Policy::FirstRequestWindow(of) => {
            since(begun_us(&admitted, at_us, of.window_us()), capacity)
        }
        Policy::WindowLog(log) => since(begun_us(&admitted, at_us, log.window_us()), capacity),
        Policy::SlidingLog(log) => since((at_us + 1).saturating_sub(log.window_us()), capacity),
        Policy::Concurrency(of) => since((at_us + 1).saturating_sub(of.lease_us()), capacity),
        Policy::BucketedWindow(of) => {
            let end_us = at_us - at_us % of.bucket_us() + of.bucket_us();
            of.windows().iter().find_map(|of| since(end_us.saturating_sub(of.span_us), of.limit))
        }
        Policy::SlidingCounter(of) => {
            let start_us = at_us - at_us % of.window_us();
            let before_us = start_us.saturating_sub(of.window_us());
            let overlap_us = u128::from(start_us + of.window_us() - at_us);
            let weighed = sum(before_us, start_us) * overlap_us / u128::from(of.window_us());
            window(before_us, weighed + sum(start_us, u64::MAX), capacity)
        }
        counting => unreachable!("{counting} is judged by what it admits"),
    }
}

fn bucket(refill: &Refill, admitted: &[(u64, u64)], at_us: u64, cost: u64) -> Option<String> {
    // In fractions of a unit, so that a part of a refill tick adds a whole number of them.
    let per_unit = u128::from(refill.token_units) * u128::from(refill.tick_us);
    let burst = u128::from(refill.burst) * per_unit;
    let mut total = u128::from(cost) * per_unit;
    let over = |since_us: u64, total: u128, bound: u128| {
        (total > bound).then(|| {
            format!(
                "{} since {since_us} µs, and the bound is {}",
                total / per_unit,
                bound / per_unit
            )
        })
    };
    over(at_us, total, burst).or_else(|| {
        admitted.iter().rev().find_map(|(earlier_us, cost)| {
            total += u128::from(*cost) * per_unit;
            let flow = u128::from(at_us - earlier_us) * u128::from(refill.tick_units);
            over(*earlier_us, total, burst + flow)
        })
    })
}

/// The beginning of the window that contains a request, for windows that begin with an admitted request.
fn begun_us(admitted: &[(u64, u64)], at_us: u64, window_us: u64) -> u64 {
    let first_us = admitted.first().map_or(at_us, |(first_us, _)| *first_us);
    let opens = |begin: u64, (at_us, _): &(u64, u64)| {
        if *at_us >= begin + window_us { *at_us } else { begin }
    };
    let begin = admitted.iter().fold(first_us, opens);
    if at_us >= begin + window_us { at_us + 1 } else { begin }
}

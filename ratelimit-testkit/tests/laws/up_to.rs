//! A partial reservation takes the largest cost that fits, down to its minimum.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use ratelimit_core::{AnyAlgorithm, Limits, RateLimiter, ReservationId, Timestamp, Verdict};
use ratelimit_testkit::{PureStore, block_on, limit_in_words as limit};

/// Limits that can be reserved, of which a rate may be 0.
const LIMITS: [&str; 8] = [
    "gcra 3/s burst 9",
    "gcra 1/7s burst 6 debt 4",
    "token-bucket 2/s burst 8",
    "gcra 0/s",
    "fixed-window 9/2s",
    "fixed-window 7/day zone Europe/Berlin debt 3",
    "concurrency 8/3s",
    "fixed-window 0/s",
];

type Limiter = RateLimiter<PureStore>;

fn ask(limiter: &Limiter, at: Timestamp, id: u128, most: u64) -> Verdict {
    let request = limiter.request("a").id(ReservationId::new(id)).cost(most).at(at);
    block_on(request.check()).expect("decides")
}

fn limiter(limits: &[&str], store: PureStore) -> Limiter {
    let named = limits.iter().enumerate().map(|(n, words)| limit(&format!("l{n}"), words));
    let limits: Limits<AnyAlgorithm> = Limits::new(named).expect("names of their own");
    RateLimiter::new(limits, store)
}

proptest! {
    #[test]
    fn the_largest_cost_that_fits_is_reserved_or_nothing(
        limits in vec(select(&LIMITS[..]), 1..4),
        requests in vec((select(vec![0_u64, 1, 300_000, 1_000_000, 7_000_000]), 1..14_u64, 0..9_u64), 1..16),
    ) {
        let (mut store, mut at_us) = (PureStore::new(), 1_795_218_390_000_000_u64);
        for (nth, (later_us, most, least)) in (0..).zip(requests) {
            at_us += later_us;
            let at = Timestamp::saturating_from_us(at_us);
            // A minimum of 0 counts as 1, and one above the estimate as the estimate.
            let lowest = least.max(1).min(most);
            let fits = |cost: &u64| ask(&limiter(&limits, store.clone()), at, nth, *cost).allowed();
            let due = (lowest..=most).rev().find(fits);
            let limiter = limiter(&limits, store.clone());
            let request = limiter.request("a").id(ReservationId::new(nth)).cost(most).at(at);
            let (verdict, costs) = block_on(request.reserve_up_to(&least.into())).expect("decides");
            let got = verdict.allowed().then(|| costs.uniform());
            prop_assert_eq!(got, due.map(Some), "{} down to {} of {:?}", most, least, limits);
            prop_assert_eq!(verdict.summary().cost, due.unwrap_or(lowest));
            // Nothing else is charged, and a denial is that of the minimum.
            let alike = RateLimiter::new(limiter.limits().clone(), store.clone());
            let due = ask(&alike, at, nth, due.unwrap_or(lowest));
            prop_assert_eq!(&verdict, &due);
            for limit in limiter.limits() {
                let states = [limiter.store(), alike.store()].map(|store| store.state(limit, "a"));
                prop_assert_eq!(&states[0], &states[1]);
            }
            store = limiter.store().clone();
        }
    }
}

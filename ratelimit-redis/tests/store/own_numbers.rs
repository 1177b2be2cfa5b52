//! Customers with numbers of their own share scripts and calls.

use std::collections::HashSet;

use ratelimit_core::{Numbers, RateLimiter};

use crate::common::prelude::*;

/// Customers, each with another burst.
const CUSTOMERS: u64 = 1_000;

fn limits() -> Limits<AnyAlgorithm> {
    let limits = Limits::builder()
        .limit("api", "gcra 1/d burst 9")
        .accepts_up_to("gcra 1000/s burst 100000")
        .limit("daily", "fixed-window 9/3650d")
        .accepts_up_to("fixed-window 100000/3650d");
    limits.build().expect("limits")
}

fn numbers(limits: &Limits<AnyAlgorithm>, customer: u64) -> Numbers {
    // Units and ticks of microseconds, and of seconds.
    let rate = if customer.is_multiple_of(2) { "1/h" } else { "1000003/30d" };
    let api = format!("{rate} burst {}", 1 + customer);
    let daily = format!("{}/3650d", 2 + customer % 5);
    limits.parse_numbers([("api", &api), ("daily", &daily)]).expect("numbers")
}

#[tokio::test]
async fn a_thousand_customers_with_other_numbers_share_calls_and_texts() {
    let server = server();
    let limiter = RateLimiter::new(limits(), plain(&server).await);
    let customers: Vec<_> = (0..CUSTOMERS).map(|nth| numbers(limiter.limits(), nth)).collect();
    for round in 0..3 {
        let before = server.calls("evalsha").expect("it is up");
        let asked = customers.iter().enumerate().map(|(nth, numbers)| {
            let (limiter, key) = (&limiter, format!("customer {nth}"));
            async move { limiter.request(&*key).numbers(numbers).check().await.expect("decides") }
        });
        let verdicts = futures_util::future::join_all(asked).await;
        for (nth, verdict) in (0..).zip(&verdicts) {
            let (burst, daily) = (1 + nth, 2 + nth % 5);
            // A denial charges nothing.
            let admitted = round.min(burst).min(daily);
            let named = limiter.named(verdict);
            let of = |name: &str| named.by_name(name).map(|one| (one.allowed, one.limit));
            assert_eq!(of("api"), Some((admitted < burst, burst)), "{nth} in round {round}");
            assert_eq!(of("daily"), Some((admitted < daily, daily)), "{nth} in round {round}");
            assert_eq!(verdict.allowed(), admitted == round && round < burst.min(daily));
        }
        let calls = server.calls("evalsha").expect("it is up") - before;
        assert!(calls <= CUSTOMERS / 20, "{calls} calls");
    }
    let info = tell(&server, &["INFO", "MEMORY"]).to_string();
    let texts = info.lines().find_map(|line| line.strip_prefix("number_of_cached_scripts:"));
    let texts = texts.and_then(|number| number.trim().parse::<u64>().ok());
    assert!(texts.is_none_or(|texts| texts <= 4), "{texts:?} texts");
}

#[tokio::test]
async fn customers_of_one_key_are_decided_in_order_each_by_its_numbers() {
    let server = server();
    let limiter = RateLimiter::new(limits(), plain(&server).await);
    let plans = [3, 40, 7, 500].map(|nth| numbers(limiter.limits(), nth));
    let pure = RateLimiter::new(limits(), ratelimit_testkit::PureStore::new());
    // At given times, so that the store in Rust decides at the same.
    let begin = Timestamp::saturating_from_us(now_us());
    for nth in 0..60_usize {
        let (numbers, at) = (&plans[nth % 4], begin.saturating_add_us(nth as u64));
        let cost = 1 + nth as u64 % 3;
        let got = limiter.request("shared").numbers(numbers).cost(cost).at(at).check().await;
        let due = pure.request("shared").numbers(numbers).cost(cost).at(at).check().await;
        assert_eq!(got.expect("decides"), due.expect("decides"), "{nth}");
    }
    let keys: HashSet<_> = plans.iter().flat_map(Numbers::iter).map(Limit::state_name).collect();
    assert_eq!(keys.len(), 2, "other numbers have the same states");
}

#[tokio::test]
async fn a_slower_customer_is_no_state_from_the_future() {
    let server = server();
    let store = plain(&server).await;
    let limiter = RateLimiter::new(limits(), store.clone());
    let fast = limiter.limits().parse_numbers([("api", "1000/s burst 1000")]).expect("numbers");
    let policy = Limits::builder().limit("api", "gcra 1000/s burst 1000");
    let policy = policy.accepts_up_to("gcra 1000/s burst 100000").build().expect("limits");
    // Full for years under its own numbers, and for a second under those of the policy.
    let slow = policy.parse_numbers([("api", "1/365d burst 9")]).expect("numbers");
    let policy = RateLimiter::new(policy, store.clone());
    assert!(
        policy.request("slow").numbers(&slow).cost(9).check().await.expect("decides").allowed()
    );
    assert!(
        limiter.request("fast").numbers(&fast).cost(9).check().await.expect("decides").allowed()
    );
    let healed = store.heal(policy.limits(), ratelimit_redis::HealOptions::default()).await;
    assert!(healed.expect("it answers").states.is_empty());
    assert!(!policy.request("slow").numbers(&slow).check().await.expect("decides").allowed());
}

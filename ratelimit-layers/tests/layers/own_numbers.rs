//! Customers with numbers of their own under one limit: each layer decides by those of the request.

use std::sync::Arc;
use std::time::Duration;

use ratelimit_core::{
    Algorithm as _, AnyAlgorithm, Limit, Limits, ManualClock, Numbers, OnOutage, RateLimiter,
    Source, Store, Timestamp, Verdict,
};
use ratelimit_layers::{DenialCache, FallbackError, Metrics, OnRecovery, TopDenied, Traced};
use ratelimit_memory::MemoryError;
use ratelimit_testkit::{AskedRequest, RequestHarness, try_requests};
use tokio::runtime::Runtime;
use tokio::time::sleep;

use crate::common::{
    BEGIN, Fake, FakeError, Memory, allotments, cache, limit, memory, paused_runtime, remaining,
    run_until_idle,
};
use crate::fallback::{Layered, down, layered_with, up};

/// Whole requests, at the store's own time, through a cache and what observes.
struct Cached(ManualClock, Runtime);

impl RequestHarness for Cached {
    type Store = Metrics<Traced<TopDenied<DenialCache<Memory, AnyAlgorithm, ManualClock>>>>;

    const CASES: u32 = 256;

    fn store(&self) -> Self::Store {
        let cache = DenialCache::builder().clock(self.0.clone()).max_age(Duration::MAX);
        Metrics::new(Traced::new(TopDenied::new(cache.build(memory(&self.0)), 16)))
    }

    async fn ask(
        &self,
        limiter: &RateLimiter<Arc<Self::Store>>,
        asked: &AskedRequest,
    ) -> Result<Verdict, MemoryError> {
        self.0.set(asked.at);
        asked.to(limiter).apply(asked.op).await
    }

    fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        self.1.block_on(future)
    }
}

#[test]
fn a_cache_answers_each_request_by_its_own_numbers() {
    let begin = Timestamp::saturating_from_us(1_795_218_389_000_000);
    let cached = Cached(ManualClock::new(begin), paused_runtime());
    try_requests(&cached).unwrap_or_else(|failure| panic!("{failure}"));
}

/// 60 a minute, and up to a hundred times as much.
fn api(choice: OnOutage) -> Limit<AnyAlgorithm> {
    let max = "gcra 6000/m burst 6000".parse().expect("numbers");
    let api = limit("api", "gcra 60/m burst 60").on_outage(choice);
    api.accepts_up_to(max).expect("a max")
}

fn plan(limits: &Limits<AnyAlgorithm>, words: &str) -> Numbers {
    limits.parse_numbers([("api", words)]).expect("numbers")
}

async fn ask<S: Store<AnyAlgorithm>>(
    limiter: &RateLimiter<S>,
    key: &str,
    numbers: &Numbers,
    cost: u64,
) -> Verdict {
    let verdict = limiter.request(key).numbers(numbers).cost(cost).check().await;
    verdict.expect("decides")
}

#[tokio::test(start_paused = true)]
async fn a_denial_of_one_customer_denies_no_other_of_the_same_key() {
    let clock = ManualClock::new(BEGIN);
    let limits = Limits::new([api(OnOutage::Open)]).expect("limits");
    let limiter = RateLimiter::new(limits, cache(Fake::new(&clock), &clock));
    let [small, large] = ["60/m burst 1", "600/m burst 600"].map(|of| plan(limiter.limits(), of));
    assert!(ask(&limiter, "shared", &small, 1).await.allowed());
    assert!(!ask(&limiter, "shared", &small, 1).await.allowed());
    assert_eq!(ask(&limiter, "shared", &small, 1).await.source(), Source::Cache);
    let verdict = ask(&limiter, "shared", &large, 100).await;
    assert!(verdict.allowed() && verdict.source() == Source::Store, "{verdict:?}");
}

#[tokio::test(start_paused = true)]
async fn allotments_are_drawn_and_given_back_by_each_customers_numbers() {
    let clock = ManualClock::new(BEGIN);
    let store = Arc::new(memory(&clock));
    let limits = Limits::new([api(OnOutage::Open)]).expect("limits");
    let limiter = RateLimiter::new(limits, allotments(store.clone(), &clock));
    let plans = ["6/m burst 6", "60/m burst 60", "600/m burst 600"];
    for (nth, words) in plans.into_iter().enumerate() {
        let (key, numbers) = (format!("customer {nth}"), plan(limiter.limits(), words));
        let most = numbers.get("api").map_or(0, |own| own.algorithm().capacity());
        let mut admitted = 0;
        for _ in 0..most + 9 {
            admitted += u64::from(ask(&limiter, &key, &numbers, 1).await.allowed());
            run_until_idle().await;
        }
        assert_eq!(admitted, most, "{words}");
    }
    // Numbers of one key that change end what was drawn under others.
    let [large, small] = [plans[2], plans[0]].map(|words| plan(limiter.limits(), words));
    for _ in 0..40 {
        assert!(ask(&limiter, "changed", &large, 1).await.allowed());
        run_until_idle().await;
    }
    let mut admitted = 0;
    for _ in 0..20 {
        admitted += u64::from(ask(&limiter, "changed", &small, 1).await.allowed());
        run_until_idle().await;
    }
    assert!(admitted <= 6, "{admitted}");
    assert_eq!(limiter.store().give_back().await, 0);
}

fn outage(limits: &Limits<AnyAlgorithm>) -> (Layered, ManualClock) {
    layered_with(limits.as_slice(), |settings| settings.on_recovery(OnRecovery::Charge))
}

#[tokio::test(start_paused = true)]
async fn in_an_outage_each_customer_has_this_nodes_share_of_its_own_numbers() {
    let limits = Limits::new([api(OnOutage::Local)]).expect("limits");
    let (store, _clock) = outage(&limits);
    let limiter = RateLimiter::new(limits, store);
    let all = ["6/m burst 6", "60/m burst 60", "600/m burst 600", "6000/m burst 600"];
    let all = all.map(|words| plan(limiter.limits(), words));
    down(limiter.store(), limiter.limits().as_slice()).await;
    // In turn, so that a share that is kept by the limit alone would be another customer's.
    for round in 1..=2 {
        for (nth, numbers) in all.iter().enumerate() {
            let own = numbers.get("api").expect("its limit").algorithm();
            let verdict = ask(&limiter, &format!("customer {nth}"), numbers, 1).await;
            let left = own.capacity() / 3 - round;
            assert_eq!((verdict.limit(), verdict.remaining()), (own.capacity() / 3, left));
            assert_eq!(verdict.source(), Source::Fallback);
        }
    }
    // Charged on recovery by the numbers of each.
    up(limiter.store(), limiter.limits().as_slice()).await;
    sleep(Duration::from_millis(1)).await;
    assert_eq!((limiter.store().pending_charges(), limiter.store().forgotten_charges()), (0, 0));
    for (nth, numbers) in all.iter().enumerate() {
        let own = numbers.get("api").expect("its limit");
        let left = limiter.store().store().remaining(own, &format!("customer {nth}"));
        assert_eq!(left, own.algorithm().capacity() - 2, "{own:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn numbers_that_so_many_nodes_cannot_share_are_an_error_that_names_the_remedy() {
    let limits = Limits::new([api(OnOutage::Local)]).expect("limits");
    for at_least_one in [false, true] {
        let (store, _clock) = layered_with(limits.as_slice(), |settings| {
            if at_least_one { settings.at_least_one() } else { settings }
        });
        let limiter = RateLimiter::new(limits.clone(), store);
        let numbers = plan(&limits, "2/m burst 2");
        down(limiter.store(), limits.as_slice()).await;
        let decided = limiter.request("alice").numbers(&numbers).check().await;
        match decided {
            Ok(verdict) => assert!(at_least_one && verdict.limit() == 1, "{verdict:?}"),
            Err(error) => {
                assert!(!at_least_one && error.to_string().contains("at_least_one()"), "{error}");
                assert!(matches!(error, FallbackError::<FakeError>::Config(_)), "{error:?}");
            }
        }
    }
    // While the store answers, nothing is shared.
    let (store, _clock) = outage(&limits);
    let limiter = RateLimiter::new(limits.clone(), store);
    let numbers = plan(&limits, "2/m burst 2");
    assert!(ask(&limiter, "alice", &numbers, 2).await.allowed());
    assert_eq!(
        remaining(&limiter.store().store().memory, numbers.get("api").expect("own"), "alice"),
        0
    );
}

//! A partial reservation on a server: many at once never get more than there is, none less than its
//! minimum, and a denied attempt leaves nothing behind.

use ratelimit_core::{RateLimiter, Reserved};

use crate::common::prelude::*;
use crate::ends::{Any, in_mode};

const TASKS: usize = 8;
const LIMIT: u64 = 1_000;
const LEAST: u64 = 10;

fn limits() -> Limits<AnyAlgorithm> {
    let by = |name, words, by: &str| limit(name, words).by([by]).expect("a name");
    let limits =
        [by("address", "gcra 1000/3650d", "ip"), by("customer", "fixed-window 1000/3650d", "user")];
    Limits::new(limits).expect("limits")
}

const CALLER: [(&str, &str); 2] = [("ip", "192.0.2.7"), ("user", "alice")];

async fn remaining(limiter: &RateLimiter<Any>) -> Vec<u64> {
    let shown = limiter.request(&CALLER).cost(0).peek().await.expect("decides");
    limiter.named(&shown).map(|one| one.remaining).collect()
}

#[tokio::test]
async fn many_at_once_get_no_more_than_there_is_and_none_less_than_its_minimum() {
    let server = server();
    for mode in ["lua", "cas", "lua across slots"] {
        let store = if mode.ends_with("slots") {
            let connection = meddling_connection(&server).await.clustered();
            let builder = RedisStore::builder().deadline(PATIENCE).prefix(&prefix());
            Arc::new(over(builder, connection)) as Any
        } else {
            let builder = RedisStore::builder().deadline(PATIENCE).prefix(&prefix());
            in_mode(builder.connect(&server.url()).await.expect("it is up"), mode == "cas")
        };
        let limiter = Arc::new(RateLimiter::new(limits(), store));
        let mut tasks = JoinSet::new();
        for _ in 0..TASKS {
            let limiter = Arc::clone(&limiter);
            tasks.spawn(async move {
                let mut all = Vec::new();
                loop {
                    let reserving = limiter.reserve_up_to(CALLER, 73, LEAST).await;
                    match reserving.expect("decides") {
                        Reserved::Granted(reservation) => all.push(reservation),
                        Reserved::Denied(denied) => {
                            assert_eq!(denied.summary().cost, LEAST);
                            return all;
                        }
                    }
                }
            });
        }
        let mut all = Vec::new();
        while let Some(done) = tasks.join_next().await {
            all.extend(done.expect("no panic"));
        }
        let costs = all.iter().map(|reservation| reservation.costs().uniform().expect("one cost"));
        let costs: Vec<_> = costs.collect();
        let sum: u64 = costs.iter().sum();
        assert!(costs.iter().all(|cost| (LEAST..=73).contains(cost)), "{mode}: {costs:?}");
        assert_eq!(remaining(&limiter).await, [LIMIT - sum; 2], "{mode}");
        // Across slots, what another attempt gives back may be missing for a moment.
        let is_exact = !mode.ends_with("slots");
        assert!(sum > LIMIT - LEAST || !is_exact, "{mode}: the minimum is left: {costs:?}");
        for reservation in all {
            let _ = reservation.settle(0).await.expect("it is there");
        }
        // A bucket has recovered a little in the meantime, and keeps no more than its capacity.
        let left = remaining(&limiter).await;
        assert!(left[0] >= LIMIT - 1 && left[1] == LIMIT, "{mode}: {left:?}");
    }
}

#[tokio::test]
async fn a_denied_attempt_leaves_no_record_of_its_id() {
    let server = server();
    for is_cas in [false, true] {
        let builder = RedisStore::builder().deadline(PATIENCE).prefix(&prefix());
        let store = in_mode(builder.connect(&server.url()).await.expect("it is up"), is_cas);
        let limiter = RateLimiter::new(limits(), store);
        let used = limiter.request(&CALLER).cost(964).check().await.expect("decides");
        assert!(used.allowed());
        let request = limiter.request(&CALLER).id(ReservationId::new(7));
        let (verdict, costs) = request.cost(100).reserve_up_to(&LEAST.into()).await.expect("fits");
        assert_eq!((verdict.allowed(), costs.uniform()), (true, Some(36)));
        let settled = request.cost(6).settle().await.expect("it is reserved at 36");
        assert_eq!(settled.remaining(), 30);
        let (verdict, _) = limiter
            .request(&CALLER)
            .id(ReservationId::new(8))
            .cost(100)
            .reserve_up_to(&31.into())
            .await
            .expect("decides");
        assert!(!verdict.allowed());
        let unknown = limiter.request(&CALLER).id(ReservationId::new(8)).cost(0).settle().await;
        fails(unknown, ErrorKind::Ended, "limit \"address\": ");
    }
}

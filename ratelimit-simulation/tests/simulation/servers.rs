//! A server of a cluster that nothing reaches takes away its own keys, behind a fallback. A server
//! removes what has ended, and nothing else.

use std::time::Duration;

use ratelimit_core::store::{Batch, Check, Op};
use ratelimit_core::{AnyAlgorithm, Gcra, Limit, Limits, OnOutage, RateLimiter, Source, Store};
use ratelimit_layers::Fallback;
use ratelimit_redis::RedisStore;
use ratelimit_simulation::{BEGIN, ModelConnection, ModelServer, Network};

use crate::simulate;

/// Asks about many keys: those of an unreachable server are decided by the fallback, and no others.
/// Returns how many were its keys, and how many were not.
pub(crate) async fn run(network: &std::sync::Arc<Network>, away: usize) -> [usize; 2] {
    let limit = Limits::builder().limit("hourly", Gcra::per_hour(100));
    let limits = limit.on_outage(OnOutage::Closed).build().expect("limits");
    let redis = RedisStore::builder().deadline(Duration::from_millis(50));
    let redis = redis.over(ModelConnection::new(network)).expect("a prefix");
    let key_of = {
        let (redis, limits) = (redis.clone(), limits.clone());
        move |caller: &str| redis.key(&limits.as_slice()[0], caller)
    };
    let store = Fallback::builder().build(redis, &limits).expect("choices");
    let limiter = RateLimiter::new(limits, store);
    network.set_reachable(away, false);
    let mut counts = [0; 2];
    for n in 0..300 {
        let caller = n.to_string();
        let is_away = network.server_of(&key_of(&caller)) == away;
        let source = limiter.check(&*caller).await.expect("decides").source();
        assert_eq!(source == Source::Fallback, is_away, "{caller}");
        counts[usize::from(!is_away)] += 1;
    }
    assert_eq!(limiter.store().open_breakers(), 1);
    counts
}

/// A day's charge makes the shared key live for longer, so the script looks for fields that have
/// ended.
#[test]
fn a_window_counts_until_its_end_beside_a_charge_that_sweeps_its_key() {
    let limit = |name, words: &str| -> Limit<AnyAlgorithm> {
        Limit::new(name, words.parse().expect("a policy")).expect("a name")
    };
    let (minutely, daily) =
        (limit("minutely", "fixed-window 10/m"), limit("daily", "gcra 10/d burst 10"));
    let end_us = BEGIN.as_us().next_multiple_of(60_000_000) + 60_000_000;
    // A forced charge goes by another script than a plain one.
    for (op, before_us) in [Op::Force, Op::Acquire]
        .into_iter()
        .flat_map(|op| [20_000, 10_500, 9_999, 5_000, 1].map(move |before_us| (op, before_us)))
    {
        let allowed = simulate(before_us, async {
            let network = Network::new(vec![ModelServer::new(end_us - 40_000_123, 0)], 7);
            let store = RedisStore::builder().over(ModelConnection::new(&network));
            let store = store.expect("a prefix");
            let charge = async |limit: &Limit<AnyAlgorithm>, op, cost| {
                let check = Check { limit, key: "alice", cost };
                store.apply(&Batch::one(&check).op(op)).await.expect("decides").allowed()
            };
            assert!(charge(&minutely, op, 10).await);
            network.servers()[0].set(end_us - before_us);
            assert!(charge(&daily, Op::Acquire, 10).await);
            let early = charge(&minutely, Op::Acquire, 1).await;
            network.servers()[0].set(end_us);
            [early, charge(&minutely, Op::Acquire, 1).await]
        });
        assert_eq!(allowed, [false, true], "{op:?}, {before_us} µs before the end");
    }
}

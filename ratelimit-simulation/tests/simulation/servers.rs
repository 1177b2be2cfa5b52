//! A server of a cluster that nothing reaches takes away its own keys, behind a fallback.

use std::time::Duration;

use ratelimit_core::{Gcra, Limits, OnOutage, RateLimiter, Source};
use ratelimit_layers::Fallback;
use ratelimit_redis::RedisStore;
use ratelimit_simulation::{ModelConnection, Network};

/// Asks about many keys: those of a server that is away are decided by the fallback, and no others. Returns how many were
/// its keys, and how many were not.
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
    assert_eq!(limiter.store().servers_away(), 1);
    counts
}

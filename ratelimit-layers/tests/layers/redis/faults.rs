//! A network that fails under a cache.

use std::time::Duration;

use ratelimit_layers::DenialCache;
use ratelimit_redis::{Client, RedisStore};
use ratelimit_servers::{FaultProxy, RedisServer};
use ratelimit_simulation::FaultyRounds;

use super::PATIENCE;

#[tokio::test]
async fn an_order_explains_all_answers_of_a_cache() {
    let server = RedisServer::start().expect("redis-server");
    for client in Client::ALL {
        let proxy = FaultProxy::start(server.port()).expect("a proxy");
        let url = format!("{}?client={client}", proxy.url());
        let redis = RedisStore::builder().prefix(client.name()).deadline(PATIENCE);
        let redis = redis.connect(&url).await.expect("it is up");
        let store = DenialCache::builder().max_age(Duration::MAX).build(redis);
        let rounds = FaultyRounds::new(store, proxy);
        rounds.are_explained().await;
        let answered = rounds.store.counts().answered;
        assert!(answered > 0, "{client}: no answer of the cache");
    }
}

//! The snippets of the chapter on Redis.

use std::time::Duration;

use ratelimit_core::{ErrorKind, Gcra, Limits, Policy, RateLimiter, Store, StoreError};
use ratelimit_redis::{RedisError, RedisStore, Tag};
use ratelimit_testkit::{RedisCluster, RedisSentinels, RedisServer};

use crate::Error;

async fn open(url: &str) -> Result<RedisStore, Error> {
    let store = RedisStore::builder()
        .prefix("shop") // of the keys
        .deadline(Duration::from_millis(200)) // for one decision
        .connect_lazy(url)?; // also while Redis is away

    let health = store.health().await;
    for finding in health.findings() {
        eprintln!("{finding}");
    }
    assert!(health.is_ready());
    Ok(store)
}

async fn status<S: Store<Policy>>(limiter: &RateLimiter<S>, caller: &str) -> u16 {
    match limiter.check(caller).await {
        Ok(verdict) if verdict.allowed() => 200,
        Ok(_) => 429,
        Err(error) if error.kind() == ErrorKind::Unavailable => 503, // nothing was charged
        Err(error) if error.kind() == ErrorKind::Indeterminate => 503, // it may have been charged
        Err(_) => 500, // of the request or the configuration
    }
}

async fn of_tenants(url: &str) -> Result<RedisStore, RedisError> {
    let store = RedisStore::builder().tag(Tag::UpTo('/')).connect(url).await?;
    Ok(store)
}

fn limits() -> Result<Limits<Policy>, Error> {
    Ok(Limits::builder().limit("orders", Gcra::per_hour(2)).build()?)
}

#[tokio::test]
async fn one_server() -> Result<(), Error> {
    let server = RedisServer::shared()?;
    let limiter = RateLimiter::new(limits()?, open(&server.url()).await?);
    let _ = limiter.reset("guide").await?;
    assert_eq!(status(&limiter, "guide").await, 200);
    assert_eq!(status(&limiter, "guide").await, 200);
    assert_eq!(status(&limiter, "guide").await, 429);
    let keys = server.command(&["EXISTS", "shop:1::{guide}"])?;
    assert_eq!(keys.as_integer(), Some(1), "the key that the chapter shows");
    Ok(())
}

#[tokio::test]
async fn sentinels() -> Result<(), Error> {
    let sentinels = RedisSentinels::start()?;
    let url = sentinels.url();
    assert!(url.starts_with("redis-sentinel://"));
    let limiter = RateLimiter::new(limits()?, RedisStore::connect(&url).await?);
    assert_eq!(status(&limiter, "guide").await, 200);
    Ok(())
}

#[tokio::test]
async fn a_cluster_keeps_a_tenant_in_one_slot() -> Result<(), Error> {
    let cluster = RedisCluster::shared()?;
    assert!(cluster.url().starts_with("redis-cluster://"));
    let limiter = RateLimiter::new(limits()?, of_tenants(&cluster.url()).await?);
    for caller in ["acme/alice", "acme/192.0.2.7"] {
        assert_eq!(status(&limiter, caller).await, 200);
    }
    let mut keys = Vec::new();
    for node in cluster.nodes() {
        let found = node.command(&["KEYS", "rl:*acme*"])?.ok()?;
        keys.extend(found.as_array().iter().filter_map(|key| key.as_text().map(str::to_owned)));
    }
    assert_eq!(keys.len(), 2, "{keys:?}");
    assert_eq!(cluster.slot_of(&keys[0]), cluster.slot_of(&keys[1]), "{keys:?}");
    Ok(())
}

#[tokio::test]
async fn an_outage_has_its_own_status() -> Result<(), Error> {
    let mut server = RedisServer::start()?;
    let limiter = RateLimiter::new(limits()?, RedisStore::connect(&server.url()).await?);
    server.stop();
    assert_eq!(status(&limiter, "guide").await, 503);
    Ok(())
}

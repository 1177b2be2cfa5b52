//! The snippets of the chapter on Redis.

use std::time::Duration;

use ratelimit_core::{AnyAlgorithm, ErrorKind, Gcra, Limits, RateLimiter, Store, StoreError};
use ratelimit_redis::{RedisError, RedisStore, Tag};
use ratelimit_servers::RedisServer;

use crate::Error;

async fn open(url: &str) -> Result<RedisStore, Error> {
    let store = RedisStore::builder()
        .prefix("shop") // of the keys
        .deadline(Duration::from_millis(200)) // for one decision
        .connect_lazy(url)?; // also while Redis is unreachable

    let health = store.health().await;
    for finding in health.findings() {
        eprintln!("{finding}");
    }
    assert!(health.is_ready());
    Ok(store)
}

async fn status<S: Store<AnyAlgorithm>>(limiter: &RateLimiter<S>, caller: &str) -> u16 {
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

fn limits() -> Result<Limits<AnyAlgorithm>, Error> {
    Ok(Limits::builder().limit("orders", Gcra::per_hour(2)).build()?)
}

#[tokio::test]
async fn one_server() -> Result<(), Error> {
    let server = RedisServer::shared()?;
    assert!(of_tenants(&server.url()).await.is_ok());
    let limiter = RateLimiter::new(limits()?, open(&server.url()).await?);
    let _ = limiter.request("guide").reset().await?;
    assert_eq!(status(&limiter, "guide").await, 200);
    assert_eq!(status(&limiter, "guide").await, 200);
    assert_eq!(status(&limiter, "guide").await, 429);
    let keys = server.command(&["EXISTS", "shop:1::{guide}"])?;
    assert_eq!(keys.as_integer(), Some(1), "the key that the chapter shows");
    Ok(())
}

#[tokio::test]
async fn an_outage_has_its_own_status() -> Result<(), Error> {
    let server = RedisServer::start()?;
    let limiter = RateLimiter::new(limits()?, RedisStore::connect(&server.url()).await?);
    server.stop();
    assert_eq!(status(&limiter, "guide").await, 503);
    Ok(())
}

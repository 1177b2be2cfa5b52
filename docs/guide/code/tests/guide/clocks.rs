//! The snippets of the chapters on clocks and for users of other crates.

use std::time::Duration;

use ratelimit_core::{Gcra, Limits, ManualClock, RateLimiter, Timestamp, TokioClock};
use ratelimit_memory::{CoarseClock, MemoryStore};

use crate::Error;

#[test]
fn a_test_moves_the_clock() -> Result<(), Error> {
    let limits = Limits::builder().limit("login", Gcra::per_minute(5)).build()?;
    let clock = ManualClock::default();
    let store = MemoryStore::builder().clock(clock.clone()).build();
    let limiter = RateLimiter::new(limits, store);

    assert!(limiter.check_n_now("alice", 5)?.allowed());
    assert!(!limiter.check_now("alice")?.allowed());
    clock.advance(Duration::from_secs(12)); // five per minute: one in 12 s
    assert!(limiter.check_now("alice")?.allowed());

    clock.set(Timestamp::ZERO); // back to the beginning
    assert!(!limiter.check_now("alice")?.allowed());
    Ok(())
}

#[tokio::test(start_paused = true)] // sleeping takes no time
async fn a_token_comes_back_after_twelve_seconds() -> Result<(), Error> {
    let limits = Limits::builder().limit("login", Gcra::per_minute(5)).build()?;
    let store = MemoryStore::builder().clock(TokioClock::default()).build();
    let limiter = RateLimiter::new(limits, store);
    assert!(limiter.check_n("alice", 5).await?.allowed());
    assert!(!limiter.check("alice").await?.allowed());

    tokio::time::sleep(Duration::from_secs(12)).await;
    assert!(limiter.check("alice").await?.allowed());
    Ok(())
}

#[test]
fn a_request_brings_its_time() -> Result<(), Error> {
    let limits = Limits::builder().limit("login", Gcra::per_minute(5)).build()?;
    let limiter =
        RateLimiter::new(limits, MemoryStore::builder().clock(CoarseClock::new()).build());

    let from_the_log = Timestamp::from_us(1_795_392_000_000_000).ok_or("after the year 2112")?;
    let verdict = limiter.request("alice").cost(5).at(from_the_log).check_now()?;
    assert!(verdict.allowed());

    let a_second_later = from_the_log + Duration::from_secs(1);
    let verdict = limiter.request("alice").at(a_second_later).check_now()?;
    assert_eq!(verdict.retry_after(), Some(Duration::from_secs(11)));
    Ok(())
}

/// What the table says of `per_second(2)` and `burst_size(5)` in the other crate.
#[test]
fn from_tower_governor() -> Result<(), Error> {
    let per_address = Gcra::per(1, Duration::from_secs(2)).burst(5); // one every two seconds
    let limits = Limits::builder().limit("address", per_address).build()?;
    let store = MemoryStore::builder().clock(ManualClock::default()).build();
    let limiter = RateLimiter::new(limits, store);
    assert!(limiter.check_n_now("192.0.2.7", 5)?.allowed());
    let denied = limiter.check_now("192.0.2.7")?;
    assert_eq!(denied.retry_after(), Some(Duration::from_secs(2)));
    Ok(())
}

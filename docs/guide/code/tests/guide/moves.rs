//! The snippets of the chapters for users of other crates: our side of each table.

use std::time::Duration;

use ratelimit_core::{
    FirstRequestWindow, Gcra, Limits, ManualClock, Policy, RateLimiter, Timestamp,
};
use ratelimit_memory::MemoryStore;

use crate::Error;

#[test]
fn from_governor() -> Result<(), Error> {
    let limits = Limits::builder().limit("api", Gcra::per_second(50)).build()?;
    let limiter = RateLimiter::new(limits, MemoryStore::new());

    let verdict = limiter.check_now("cus_1")?;
    if !verdict.allowed() {
        println!("come back in {:.1?}", verdict.retry_after().unwrap_or_default());
    }
    assert_eq!((verdict.limit(), verdict.remaining()), (50, 49));

    let too_much = limiter.check_n_now("cus_1", 51)?;
    assert_eq!((too_much.allowed(), too_much.retry_after()), (false, None));
    Ok(())
}

/// What the table says of `per_second(2)` and `burst_size(5)` in the other crate.
#[test]
fn from_tower_governor() -> Result<(), Error> {
    let per_address = Gcra::per(1, Duration::from_secs(2)).burst(5); // one every two seconds
    let limits: Limits<Policy> = Limits::builder().limit("address", per_address).build()?;

    let clock = ManualClock::default();
    let store = MemoryStore::builder().clock(clock.clone()).build();
    let limiter = RateLimiter::new(limits, store);
    assert!(limiter.check_n_now("192.0.2.7", 5)?.allowed());
    let denied = limiter.check_now("192.0.2.7")?;
    assert_eq!(denied.retry_after(), Some(Duration::from_secs(2)));
    Ok(())
}

#[test]
fn from_limitador() -> Result<(), Error> {
    let limits = Limits::builder()
        .limit("reads", FirstRequestWindow::per_minute(10))
        .by(["user_id"])
        .build()?;
    let clock = ManualClock::new(Timestamp::ZERO + Duration::from_secs(30));
    let store = MemoryStore::builder().capacity(1_000).clock(clock.clone()).build();
    let limiter = RateLimiter::new(limits, store);

    let caller = [("user_id", "1")];
    let admitted = (0..11).filter(|_| limiter.check_now(&caller).is_ok_and(|v| v.allowed()));
    assert_eq!(admitted.count(), 10);
    clock.advance(Duration::from_secs(59));
    assert!(!limiter.check_now(&caller)?.allowed(), "the window began with the first request");
    clock.advance(Duration::from_secs(1));
    assert!(limiter.check_now(&caller)?.allowed());
    Ok(())
}

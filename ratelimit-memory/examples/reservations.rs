//! A charge under an id: an estimate that is settled at the true cost, and a lease that ends with
//! the work.
//!
//! `cargo run -p ratelimit-memory --example reservations`

use ratelimit_core::{
    Concurrency, FixedWindow, Gcra, Leased, Limit, LimitCosts, Limits, RateLimiter, ReservationId,
};
use ratelimit_memory::MemoryStore;

fn settle_an_estimate() -> Result<(), Box<dyn std::error::Error>> {
    let tokens = Limits::new([Limit::new("tokens", Gcra::new("10000/m".parse()?, 10_000)?)?])?;
    let limiter = RateLimiter::new(tokens, MemoryStore::new());

    let id = ReservationId::random();
    assert!(limiter.request("alice").id(id).cost(4_000).check_now()?.allowed()); // the most that the call can cost
    let _ = limiter.request("alice").id(id).cost(1_234).settle_now()?; // what it did cost

    // The difference is back. Without the commit, the 4,000 would stand as charged.
    assert!(limiter.request("alice").cost(0).peek_now()?.remaining() >= 10_000 - 1_234 - 1);
    // The commit can be repeated, as after a lost answer, and changes nothing then.
    let _ = limiter.request("alice").id(id).cost(1_234).settle_now()?;
    Ok(())
}

fn take_what_is_left() -> Result<(), Box<dyn std::error::Error>> {
    let daily = Limits::builder().limit("tokens", FixedWindow::per_day(1_000)).build()?;
    let limiter = RateLimiter::new(daily, MemoryStore::new());
    assert!(limiter.check_n_now("alice", 964)?.allowed());

    let request = limiter.request("alice").id(ReservationId::random()).cost(100);
    let (verdict, reserved) = request.reserve_up_to_now(&LimitCosts::from(10))?; // no less than 10
    assert!(verdict.allowed());
    assert_eq!(reserved.uniform(), Some(36)); // of the 100
    let _ = request.cost(30).settle_now()?;
    Ok(())
}

fn owe() -> Result<(), Box<dyn std::error::Error>> {
    let tokens = Gcra::per_second(100).burst(1_000).debt(4_000);
    let limits = Limits::builder().limit("tokens", tokens).build()?;
    let limiter = RateLimiter::new(limits, MemoryStore::new());

    let forced = limiter.request("alice").cost(1_500).force_now()?;
    assert_eq!((forced.remaining(), forced.owed(), forced.forgiven()), (0, 500, 0));
    assert!(!limiter.check_now("alice")?.allowed()); // until the 500 are paid back
    Ok(())
}

fn lease_a_place() -> Result<(), Box<dyn std::error::Error>> {
    let downloads = Limits::new([Limit::new("downloads", Concurrency::new("2/30s".parse()?)?)?])?;
    let limiter = RateLimiter::new(downloads, MemoryStore::new());

    let first = limiter.request("alice").lease_now()?;
    let second = limiter.request("alice").lease_now()?;
    assert!(matches!((&first, &second), (Leased::Granted(_), Leased::Granted(_))));
    assert!(matches!(limiter.request("alice").lease_now()?, Leased::Denied(_)));

    drop(first); // Releases the lease. A lease that is never dropped ends after 30 s.
    assert!(matches!(limiter.request("alice").lease_now()?, Leased::Granted(_)));
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    settle_an_estimate()?;
    take_what_is_left()?;
    owe()?;
    lease_a_place()
}

#[test]
fn it_runs() -> Result<(), Box<dyn std::error::Error>> {
    main()
}

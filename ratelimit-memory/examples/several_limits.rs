//! Several limits for several identifiers in one call: all of them are charged, or none.
//!
//! `cargo run -p ratelimit-memory --example several_limits`

use std::net::IpAddr;

use ratelimit_core::{AnyAlgorithm, FixedWindow, Gcra, Limits, RateLimiter, Verdict};
use ratelimit_memory::MemoryStore;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let limits = Limits::builder()
        .limit("burst", Gcra::per_second(10).burst(20))
        .by(["ip"])
        .limit("daily", FixedWindow::per_day(5_000))
        .by(["user"])
        .limit("hourly", "sliding-counter 1000/h") // an algorithm and its parameters as text
        .by(["ip", "user"])
        .build()?;
    let limiter = RateLimiter::new(limits, MemoryStore::new());

    let ip: IpAddr = "192.0.2.7".parse()?;
    let verdict = limiter.check_now(&(("ip", ip), ("user", "alice")))?;
    assert!(verdict.allowed());
    assert_eq!(verdict.remaining(), 19); // of the limit with the least left

    for line in headers(&limiter, &verdict) {
        println!("{line}");
    }
    denied_requests_charge_nothing(&limiter)?;
    a_misspelt_identifier_is_an_error()?;
    the_request_that_crosses_a_threshold_warns()?;
    a_shadow_limit_never_denies()
}

/// One line per limit that applied, and how long to wait.
fn headers(limiter: &RateLimiter<MemoryStore<AnyAlgorithm>>, verdict: &Verdict) -> Vec<String> {
    let mut lines = Vec::new();
    for decision in limiter.named(verdict) {
        let (name, window) = (decision.name(), decision.window().unwrap_or_default());
        let (left, limit) = (decision.remaining, decision.limit);
        lines.push(format!("{name}: {left} of {limit} left in {window:?}"));
    }
    if let (false, Some(wait)) = (verdict.allowed(), verdict.retry_after()) {
        let seconds = wait.as_micros().div_ceil(1_000_000); // rounded up: earlier is too early
        lines.push(format!("Retry-After: {seconds}"));
    }
    lines
}

fn denied_requests_charge_nothing(
    limiter: &RateLimiter<MemoryStore<AnyAlgorithm>>,
) -> Result<(), Box<dyn std::error::Error>> {
    let caller = [("ip", "192.0.2.8"), ("user", "bob")];
    // More than the burst of 20 at once: "burst" denies, and the others are not charged either.
    let verdict = limiter.check_n_now(&caller, 21)?;
    let decisions = limiter.named(&verdict);
    assert!(decisions.by_name("burst").is_some_and(|burst| !burst.allowed));
    let daily = limiter.named(&verdict).by_name("daily").map(|daily| daily.remaining);
    assert_eq!(daily, Some(5_000));
    Ok(())
}

fn a_misspelt_identifier_is_an_error() -> Result<(), Box<dyn std::error::Error>> {
    let limits = Limits::builder().limit("user", Gcra::per_second(10)).by(["user"]).required();
    let limiter = RateLimiter::new(limits.build()?, MemoryStore::new());

    let answer = limiter.check_now(&[("User", "alice")]); // not "user"
    assert!(answer.is_err_and(|error| error.to_string().contains("\"User\"")));
    Ok(())
}

fn the_request_that_crosses_a_threshold_warns() -> Result<(), Box<dyn std::error::Error>> {
    let limits = Limits::builder().limit("daily", FixedWindow::per_day(10)).warn_at_percent(80);
    let limiter = RateLimiter::new(limits.build()?, MemoryStore::new());

    let mut warnings = Vec::new();
    for _ in 0..10 {
        let verdict = limiter.check_now("alice")?;
        warnings.extend(limiter.named(&verdict).warned().map(|limit| limit.remaining));
    }
    assert_eq!(warnings, [2]); // the eighth of ten
    Ok(())
}

fn a_shadow_limit_never_denies() -> Result<(), Box<dyn std::error::Error>> {
    let limits = Limits::builder()
        .limit("api", Gcra::per_second(10).burst(20))
        .limit("stricter", Gcra::per_minute(1))
        .shadow()
        .build()?;
    let limiter = RateLimiter::new(limits, MemoryStore::new());

    let _first = limiter.check_now("alice")?;
    let second = limiter.check_now("alice")?;
    assert!(second.allowed());
    let would_deny = limiter.named(&second).shadow().find(|decision| !decision.allowed);
    assert_eq!(would_deny.map(|decision| decision.name()), Some("stricter"));
    Ok(())
}

#[test]
fn it_runs() -> Result<(), Box<dyn std::error::Error>> {
    main()
}

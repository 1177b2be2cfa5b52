//! Several limits for several identifiers in one call: all of them are charged, or none.
//!
//! `cargo run -p ratelimit-memory --example several_limits`

use ratelimit_core::{FixedWindow, Gcra, Limit, Limits, Policy, RateLimiter};
use ratelimit_memory::MemoryStore;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let limits = Limits::<Policy>::new([
        Limit::new("burst", Gcra::new("10/s".parse()?, 20)?.into())?.by(["ip"])?,
        Limit::new("daily", FixedWindow::new("5000/d".parse()?)?.into())?.by(["user"])?,
    ])?;
    let limiter = RateLimiter::new(limits, MemoryStore::new());

    let caller = [("ip", "192.0.2.7"), ("user", "alice")];
    let verdict = limiter.check_now(&caller)?;
    assert!(verdict.allowed());
    assert_eq!(verdict.remaining(), 19); // of the limit with the least left

    denied_requests_charge_nothing(&limiter)?;
    a_misspelt_identifier_is_an_error()
}

fn denied_requests_charge_nothing(
    limiter: &RateLimiter<MemoryStore<Policy>>,
) -> Result<(), Box<dyn std::error::Error>> {
    let caller = [("ip", "192.0.2.8"), ("user", "bob")];
    // More than the burst of 20 at once: "burst" denies, and "daily" is not charged either.
    let verdict = limiter.check_n_now(&caller, 21)?;
    let denied_by: Vec<_> = verdict.denied_by().collect();
    assert_eq!(denied_by, [0]); // the position of "burst" among the limits
    assert_eq!(limiter.peek_now(&caller, 0)?.decisions()[1].remaining, 5_000);
    Ok(())
}

fn a_misspelt_identifier_is_an_error() -> Result<(), Box<dyn std::error::Error>> {
    let per_user = Limit::new("user", Gcra::new("10/s".parse()?, 20)?)?.by(["user"])?.required();
    let limiter = RateLimiter::new(Limits::new([per_user])?, MemoryStore::new());

    let answer = limiter.check_now(&[("User", "alice")]); // not "user"
    assert!(answer.is_err_and(|error| error.to_string().contains("\"User\"")));
    Ok(())
}

#[test]
fn it_runs() -> Result<(), Box<dyn std::error::Error>> {
    main()
}

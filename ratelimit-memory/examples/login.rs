//! A login: failed passwords lock the account out, and the address that they come from, for longer
//! each time.
//!
//! `cargo run -p ratelimit-memory --example login`

use std::error::Error;
use std::net::IpAddr;
use std::time::Duration;

use ratelimit_core::{AnyAlgorithm, Limits, Lockout, ManualClock, RateLimiter};
use ratelimit_memory::MemoryStore;

type Limiter = RateLimiter<MemoryStore<AnyAlgorithm, ManualClock>>;

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3_600);

/// What a login form answers.
#[derive(Debug, PartialEq, Eq)]
enum Answer {
    Welcome,
    WrongPassword,
    /// Try again later: in HTTP a 429, with this as `Retry-After`.
    LockedOut(Duration),
}

fn log_in(
    limiter: &Limiter,
    (account, ip): (&str, IpAddr),
    password_is_right: impl FnOnce() -> bool,
) -> Result<Answer, Box<dyn Error>> {
    let caller = (("account", account), ("ip", ip));
    let open = limiter.request(&caller).peek_now()?; // charges nothing
    if !open.allowed() {
        return Ok(Answer::LockedOut(open.retry_after().unwrap_or_default()));
    }
    if password_is_right() {
        let _ = limiter.request(&[("account", account)]).reset_now()?; // forgets the failures of the account
        return Ok(Answer::Welcome);
    }
    let _ = limiter.request(&caller).force_now()?; // both count the failure, whichever is locked out by now
    Ok(Answer::WrongPassword)
}

fn main() -> Result<(), Box<dyn Error>> {
    let limits = Limits::builder()
        .limit("account", Lockout::new("3/15m".parse()?, 15 * MINUTE).factor(2).longest(24 * HOUR))
        .by(["account"])
        .limit("address", "lockout 20/h block 1h factor 2 longest 7d forget 30d")
        .by(["ip"])
        .build()?;
    let clock = ManualClock::default();
    let limiter = RateLimiter::new(limits, MemoryStore::builder().clock(clock.clone()).build());

    let ip: IpAddr = "192.0.2.7".parse()?;
    let alice = ("alice", ip);
    let wrong = |n: usize| {
        let tries = (0..n).map(|_| log_in(&limiter, alice, || false));
        tries.collect::<Result<Vec<_>, _>>()
    };
    // The third failure locks the account out. The service reads no fourth password.
    assert!(wrong(3)?.iter().all(|answer| *answer == Answer::WrongPassword));
    assert_eq!(log_in(&limiter, alice, || true)?, Answer::LockedOut(15 * MINUTE));
    // A caller that retries waits no longer for that.
    clock.advance(10 * MINUTE);
    assert_eq!(wrong(1)?, [Answer::LockedOut(5 * MINUTE)]);
    clock.advance(5 * MINUTE);
    // The second lockout lasts twice as long. A success forgets both.
    wrong(3)?;
    assert_eq!(wrong(1)?, [Answer::LockedOut(30 * MINUTE)]);
    clock.advance(30 * MINUTE);
    assert_eq!(log_in(&limiter, alice, || true)?, Answer::Welcome);
    wrong(3)?;
    assert_eq!(wrong(1)?, [Answer::LockedOut(15 * MINUTE)]);

    // The address has failed nine times. Eleven more accounts lock it out of all of them.
    for n in 0..11 {
        let account = format!("guess-{n}");
        assert_eq!(log_in(&limiter, (&account, ip), || false)?, Answer::WrongPassword);
    }
    assert_eq!(log_in(&limiter, ("bob", ip), || true)?, Answer::LockedOut(HOUR));
    assert_eq!(log_in(&limiter, ("bob", "198.51.100.4".parse()?), || true)?, Answer::Welcome);
    Ok(())
}

#[test]
fn it_runs() -> Result<(), Box<dyn Error>> {
    main()
}

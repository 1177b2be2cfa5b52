use std::net::IpAddr;
use std::time::Duration;

use ratelimit_core::{AnyAlgorithm, RateLimiter, Store};

#[derive(Debug, PartialEq)]
enum Answer {
    Welcome,
    WrongPassword,
    LockedOut(Duration),
}

async fn log_in<S: Store<AnyAlgorithm>>(
    limiter: &RateLimiter<S>,
    (account, ip): (&str, IpAddr),
    password_is_right: impl AsyncFnOnce() -> bool,
) -> Result<Answer, S::Error> {
    let caller = (("account", account), ("ip", ip));
    let open = limiter.request(&caller).peek().await?; // charges nothing
    if !open.allowed() {
        return Ok(Answer::LockedOut(open.retry_after().unwrap_or_default()));
    }
    if password_is_right().await {
        let _ = limiter.request(&[("account", account)]).reset().await?; // not the address
        return Ok(Answer::Welcome);
    }
    let _ = limiter.request(&caller).force().await?; // counts for both
    Ok(Answer::WrongPassword)
}

mod tests {
    use ratelimit_core::ManualClock;
    use ratelimit_memory::MemoryStore;

    use super::*;
    use crate::Error;
    use crate::cookbook::policy;

    #[tokio::test]
    async fn five_failures_lock_an_account_and_twenty_an_address() -> Result<(), Error> {
        let clock = ManualClock::default();
        let store = MemoryStore::builder().clock(clock.clone()).build();
        let limiter = RateLimiter::new(policy("cookbook/services.md", "Login"), store);
        let (home, away) = (IpAddr::from([192, 0, 2, 7]), IpAddr::from([198, 51, 100, 4]));
        let minutes = |n: u64| Duration::from_secs(60 * n);

        for _ in 0..5 {
            let answer = log_in(&limiter, ("alice", home), async || false).await?;
            assert_eq!(answer, Answer::WrongPassword);
        }
        let locked = log_in(&limiter, ("alice", away), async || true).await?;
        assert_eq!(locked, Answer::LockedOut(minutes(15)));
        clock.advance(minutes(15));
        assert_eq!(log_in(&limiter, ("alice", away), async || true).await?, Answer::Welcome);

        for guess in 5..20 {
            let account = format!("guess-{guess}");
            let answer = log_in(&limiter, (&account, home), async || false).await?;
            assert_eq!(answer, Answer::WrongPassword);
        }
        let locked = log_in(&limiter, ("bob", home), async || true).await?;
        assert_eq!(locked, Answer::LockedOut(minutes(60)));
        assert_eq!(log_in(&limiter, ("bob", away), async || true).await?, Answer::Welcome);
        Ok(())
    }
}

use ratelimit_core::{AnyAlgorithm, RateLimiter, Store, Verdict};

async fn check<S: Store<AnyAlgorithm>>(
    limiter: &RateLimiter<S>,
    user: &str,
    report: impl Fn(String),
) -> Result<Verdict, S::Error> {
    let verdict = limiter.check(user).await?; // of the enforced limits alone
    for denial in limiter.named(&verdict).shadow().filter(|decision| !decision.allowed) {
        let wait = denial.retry_after().unwrap_or_default();
        report(format!("{} would deny {user} for {wait:?}", denial.name()));
    }
    Ok(verdict)
}

mod tests {
    use std::cell::RefCell;

    use ratelimit_core::ManualClock;
    use ratelimit_memory::MemoryStore;

    use super::*;
    use crate::Error;
    use crate::cookbook::policy;

    #[tokio::test]
    async fn a_shadow_limit_reports_and_denies_nothing() -> Result<(), Error> {
        let store = MemoryStore::builder().clock(ManualClock::default()).build();
        let limiter = RateLimiter::new(policy("cookbook/rollout.md", "Shadow first"), store);
        let reports = RefCell::new(Vec::new());
        for nth in 0..21 {
            let report = |line| reports.borrow_mut().push(line);
            let verdict = check(&limiter, "alice", report).await?;
            assert_eq!(verdict.allowed(), nth < 20);
        }
        // Of the twenty that were admitted, the new limit admits five.
        assert_eq!(reports.borrow().len(), 15);
        assert_eq!(reports.borrow()[0], "api-next would deny alice for 200ms");
        Ok(())
    }
}

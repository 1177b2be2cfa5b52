use std::time::Duration;

use http::Response;
use ratelimit_core::{AnyAlgorithm, ConfigError, Limits, RateLimiter, Store};
use ratelimit_tower::{Advice, WaitError, Waiter};

fn waiter<S: Store<AnyAlgorithm>>(
    limits: Limits<AnyAlgorithm>,
    store: S,
) -> Result<Waiter<S>, ConfigError> {
    Waiter::new(RateLimiter::new(limits, store)).shared_holds("endpoint-holds")
}

/// Sends an event. After an error it was not sent: put it back into its queue.
async fn deliver<S: Store<AnyAlgorithm>, B>(
    waiter: &Waiter<S>,
    endpoint: &str,
    send: impl AsyncFnOnce() -> Response<B>,
) -> Result<Response<B>, WaitError<S::Error>> {
    let caller = [("endpoint", endpoint), ("sender", "webhooks")];
    waiter.until_allowed(&caller, Duration::from_secs(30)).await?;
    let response = send().await;
    if let Some(wait) = Advice::from_headers(response.headers()).wait()
        && let Err(error) = waiter.hold_back_all(&caller, wait).await
    {
        eprintln!("{error}"); // this process holds back nevertheless
    }
    Ok(response)
}

mod tests {
    use ratelimit_core::TokioClock;
    use ratelimit_memory::MemoryStore;
    use tokio::time::Instant;

    use super::*;
    use crate::Error;
    use crate::cookbook::policy;

    #[tokio::test(start_paused = true)]
    async fn an_endpoint_gets_no_more_than_it_asked_for() -> Result<(), Error> {
        let store = MemoryStore::builder().clock(TokioClock::default()).build();
        let waiter = waiter(policy("cookbook/outgoing.md", "Webhook sender"), store)?;
        let begin = Instant::now();
        for _ in 0..25 {
            let response = deliver(&waiter, "a.example", async || Response::new(())).await?;
            assert!(response.status().is_success());
        }
        assert_eq!(begin.elapsed().as_secs(), 2); // 5, and 10 per second
        let busy = Response::builder().status(429).header("retry-after", "20").body(())?;
        deliver(&waiter, "a.example", async || busy).await?;
        // The others are not held back, and what would wait for too long goes back.
        deliver(&waiter, "b.example", async || Response::new(())).await?;
        assert_eq!(begin.elapsed().as_secs(), 2);
        deliver(&waiter, "a.example", async || Response::new(())).await?;
        assert_eq!(begin.elapsed().as_secs(), 22);
        let busy = Response::builder().status(503).header("retry-after", "31").body(())?;
        deliver(&waiter, "a.example", async || busy).await?;
        let late = deliver(&waiter, "a.example", async || Response::new(())).await;
        assert!(matches!(late, Err(WaitError::HeldBack { .. })));
        Ok(())
    }
}

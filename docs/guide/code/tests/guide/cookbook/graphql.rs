use std::sync::Arc;
use std::time::Duration;

use ratelimit_core::{AnyAlgorithm, RateLimiter, ReserveError, Reserved, Store};

/// A query that has been parsed.
trait Query {
    /// The most nodes that it can return, by its depth and its page sizes.
    fn most_nodes(&self) -> u64;
    /// Its answer, and how many nodes that has.
    async fn execute(self) -> (String, u64);
}

/// Answers a query, or says how long to wait; `None` if it can never be answered.
async fn answer<S: Store<AnyAlgorithm> + 'static>(
    limiter: &Arc<RateLimiter<S>>,
    user: String,
    query: impl Query,
) -> Result<Result<String, Option<Duration>>, ReserveError<S::Error>> {
    match limiter.reserve(user, query.most_nodes()).await? {
        Reserved::Denied(verdict) => Ok(Err(verdict.retry_after())),
        Reserved::Granted(reservation) => {
            let (data, nodes) = query.execute().await;
            if let Err(error) = reservation.settle(nodes).await {
                eprintln!("{error}"); // sent again in the background
            }
            Ok(Ok(data))
        }
    }
}

mod tests {
    use ratelimit_core::ManualClock;
    use ratelimit_memory::MemoryStore;

    use super::*;
    use crate::Error;
    use crate::cookbook::policy;

    /// What it can cost, and what it does.
    struct Nodes(u64, u64);

    impl Query for Nodes {
        fn most_nodes(&self) -> u64 {
            self.0
        }

        async fn execute(self) -> (String, u64) {
            ("{}".to_owned(), self.1)
        }
    }

    #[tokio::test]
    async fn a_query_costs_what_it_returned() -> Result<(), Error> {
        let store = MemoryStore::builder().clock(ManualClock::default()).build();
        let limits = policy("cookbook/services.md", "GraphQL by cost");
        let limiter = Arc::new(RateLimiter::new(limits, store));
        let ask = async |query| answer(&limiter, "alice".to_owned(), query).await;
        for (query, left) in [(Nodes(900, 10), 990), (Nodes(900, 400), 590)] {
            assert_eq!(ask(query).await?, Ok("{}".to_owned()));
            let told = limiter.request("alice").cost(0).peek_now()?;
            assert_eq!(told.remaining(), left);
        }
        // 310 come back in 18.6 s, at a thousand per minute.
        assert_eq!(ask(Nodes(900, 1)).await?, Err(Some(Duration::from_millis(18_600))));
        assert_eq!(ask(Nodes(1_001, 1)).await?, Err(None));
        Ok(())
    }
}

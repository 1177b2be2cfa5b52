//! The laws for a user's own algorithm on Redis, in the compare-and-set mode, without a Lua twin. It is
//! the one of the example.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ratelimit_core::Limit;
use ratelimit_redis::{Cas, RedisStore};
use ratelimit_testkit::{Harness, RedisServer, algorithm_conformance};
use tokio::runtime::Runtime;

use crate::weekend_budget::{Spent, WeekendBudget};

/// No two stores of this process share a prefix, and no other process uses the server.
static NEXT_PREFIX: AtomicU64 = AtomicU64::new(0);

struct OnRedis(Runtime);

impl Harness<WeekendBudget> for OnRedis {
    type Store = RedisStore<Cas>;

    const CASES: u32 = 8;

    fn new() -> Self {
        Self(Runtime::new().expect("a runtime"))
    }

    fn store(&self) -> Self::Store {
        let server = RedisServer::shared().expect("a server to test on");
        let prefix = format!("own{}", NEXT_PREFIX.fetch_add(1, Ordering::Relaxed));
        let builder = RedisStore::builder()
            .cas()
            .deadline(std::time::Duration::from_secs(20))
            .prefix(&prefix);
        self.0.block_on(builder.connect(&server.url())).expect("the server is up")
    }

    fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.0.block_on(future)
    }

    async fn state(
        &self,
        store: &Self::Store,
        limit: &Limit<WeekendBudget>,
        key: &str,
    ) -> Option<Spent> {
        store.state(limit, key).await.expect("a state, or none")
    }

    /// The laws of the policies check the time to live of every key.
    async fn leaks(&self, _: &Self::Store, _: Duration) -> Vec<String> {
        Vec::new()
    }
}

algorithm_conformance!(
    weekend_budget_on_redis,
    WeekendBudget,
    [WeekendBudget(1), WeekendBudget(7), WeekendBudget(100)],
    on OnRedis
);

//! A user-defined algorithm with its own Lua twin: each decision is one short script on the server.
//!
//! A lifetime budget, as for a trial account: a fixed amount, never refilled. `src/lua/README.md`
//! specifies what each section of the twin receives and leaves. The tests below hold the twin to
//! the laws.
//!
//! `cargo run -p ratelimit-redis --example own_twin -- redis://127.0.0.1:6379`

use ratelimit_core::algorithm::{InMemory, Step, Write};
use ratelimit_core::{Algorithm, Decision, Limit, Limits, RateLimiter, Timestamp};
use ratelimit_redis::{LuaProgram, Program, RecordText, RedisStore, Stored, Twin};

/// This much, and never again.
#[derive(Clone, Copy, Debug)]
pub struct Trial(pub u64);

impl Algorithm for Trial {
    /// The spent amount.
    type State = u64;

    fn capacity(&self) -> u64 {
        self.0
    }

    fn step(&self, state: Option<&u64>, _now: Timestamp, cost: u64) -> Step<u64> {
        let spent = state.copied().unwrap_or_default();
        let left = self.0.saturating_sub(spent);
        let allowed = cost <= left;
        let charged = if allowed { cost } else { 0 };
        let state = spent + charged;
        let decision = Decision {
            allowed,
            cost,
            limit: self.0,
            remaining: left - charged,
            retry_after_us: allowed.then_some(0),
            replenish_after_us: 0,
            reset_after_us: 0,
        };
        let write =
            if charged == 0 { Write::Keep } else { Write::Put { state, expires: Timestamp::MAX } };
        Step { decision, write }
    }
}

impl InMemory for Trial {}

/// The twin. Its state is one number, and the limit has no parameter besides its capacity.
static TRIAL: Program = Program::of_numbers(
    "trial",
    &["spent"],
    &[],
    "
--- fresh
spent = 0

--- level
local used = spent

--- move
spent = after
expires = 2^52 - 1
",
);

impl RecordText for Trial {}

impl LuaProgram for Trial {
    fn twins(&self) -> impl IntoIterator<Item = Twin> {
        [Twin::new(&TRIAL, self.0, [])]
    }

    fn decode(&self, stored: &[Option<Stored>]) -> Option<u64> {
        match stored.first()?.as_ref()?.numbers(&TRIAL)? {
            [spent] => Some(*spent),
            _ => None,
        }
    }
}

async fn spend(url: &str) -> Result<(), Box<dyn std::error::Error>> {
    let limits = Limits::new([Limit::new("trial", Trial(100))?])?;
    let limiter = RateLimiter::new(limits, RedisStore::connect(url).await?);
    for (cost, admitted) in [(40, true), (40, true), (40, false)] {
        let verdict = limiter.check_n("alice", cost).await?;
        assert_eq!(verdict.allowed(), admitted);
        println!(
            "{cost}: {}, {} left",
            if admitted { "admitted" } else { "denied" },
            verdict.remaining()
        );
    }
    let _ = limiter.request("alice").reset().await?;
    Ok(())
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    match std::env::args().nth(1) {
        Some(url) => spend(&url).await,
        None => Err("give the URL of a Redis, such as redis://127.0.0.1:6379".into()),
    }
}

#[cfg(test)]
#[allow(clippy::expect_used, reason = "tests")]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;

    use ratelimit_servers::RedisServer;
    use ratelimit_testkit::{Capability, Harness, algorithm_conformance};
    use tokio::runtime::Runtime;

    use super::*;

    // The laws: by the step itself, and by the twin on a server, which must decide as the step
    // does.
    algorithm_conformance!(laws, Trial, [Trial(1), Trial(7), Trial(1 << 40)], on OnRedis);

    /// A server that all tests share.
    struct OnRedis(Runtime, &'static RedisServer);

    impl Harness<Trial> for OnRedis {
        type Store = RedisStore;
        const CASES: u32 = 16;
        /// A trial has neither refunds nor forced charges, and nothing that could be settled.
        const LACKS: &'static [Capability] =
            &[Capability::Refund, Capability::Force, Capability::Reservations];

        fn new() -> Self {
            Self(Runtime::new().expect("a runtime"), RedisServer::shared().expect("a server"))
        }

        /// Each store has a prefix of its own.
        fn store(&self) -> RedisStore {
            static STORES: AtomicU64 = AtomicU64::new(0);
            let prefix = format!("own-twin-{}", STORES.fetch_add(1, Ordering::Relaxed));
            // A slow machine is no fault of the twin.
            let builder = RedisStore::builder().prefix(&prefix).deadline(Duration::from_secs(60));
            self.0.block_on(builder.connect(&self.1.url())).expect("it is up")
        }

        fn block_on<F: Future>(&self, future: F) -> F::Output {
            self.0.block_on(future)
        }

        async fn state(&self, store: &RedisStore, limit: &Limit<Trial>, key: &str) -> Option<u64> {
            store.state(limit, key).await.expect("it answers")
        }

        /// A trial is kept for ever. A twin whose states expire lists the keys that live for longer
        /// than `within`.
        async fn leaks(&self, _: &RedisStore, _within: Duration) -> Vec<String> {
            Vec::new()
        }
    }

    #[tokio::test]
    async fn it_runs() -> Result<(), Box<dyn std::error::Error>> {
        spend(&RedisServer::shared()?.url()).await
    }
}

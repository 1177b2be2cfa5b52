//! A user-defined algorithm with its own Lua twin: each decision is one short script on the server.
//!
//! A lifetime budget, as for a trial account: a fixed amount, never refilled. `src/lua/README.md`
//! specifies what each section of the twin receives and leaves.
//!
//! `cargo run -p ratelimit-redis --example own_twin -- redis://127.0.0.1:6379`

use ratelimit_core::algorithm::{InMemory, Step, Write};
use ratelimit_core::{Algorithm, Decision, Limit, Limits, RateLimiter, Timestamp};
use ratelimit_redis::{LuaProgram, Program, RedisStore, Stored, Twin};

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

impl LuaProgram for Trial {
    fn twins(&self) -> Vec<Twin> {
        vec![Twin::new(&TRIAL, self.0, [])]
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
    let _ = limiter.reset("alice").await?;
    Ok(())
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    match std::env::args().nth(1) {
        Some(url) => spend(&url).await,
        None => Err("give the URL of a Redis, such as redis://127.0.0.1:6379".into()),
    }
}

#[tokio::test]
async fn it_runs() -> Result<(), Box<dyn std::error::Error>> {
    spend(&ratelimit_servers::RedisServer::shared()?.url()).await
}

//! A user-defined algorithm, written once for memory and Redis, without Lua.
//!
//! A budget per day (UTC) that is half as large on weekends; alone, and beside a built-in
//! algorithm.
//!
//! `cargo run -p ratelimit-redis --example weekend_budget -- redis://127.0.0.1:6379`

use ratelimit_core::algorithm::{AnyState, InMemory, Step, Write};
use ratelimit_core::{
    Algorithm, ConfigError, Decision, Gcra, Limit, Limits, LimitsBuilder, RateLimiter, Store,
    Timestamp, beside_built_in,
};
use ratelimit_memory::MemoryStore;
use ratelimit_redis::{Cas, Codec, RecordText, RedisError, RedisStore};

const DAY_US: u64 = 86_400_000_000;

/// This much per day, half of it on Saturdays and Sundays.
#[derive(Clone, Copy, Debug)]
pub struct WeekendBudget(pub u64);

/// A day (since the epoch), and how much was spent on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spent {
    day: u64,
    amount: u64,
}

impl WeekendBudget {
    fn on(self, day: u64) -> u64 {
        // The epoch was a Thursday.
        if matches!(day % 7, 2 | 3) { self.0 / 2 } else { self.0 }
    }

    /// The first day from `from` on whose budget is at least `cost`.
    fn first_day_for(self, cost: u64, from: u64) -> Option<u64> {
        (from..from + 7).find(|day| self.on(*day) >= cost)
    }
}

impl Algorithm for WeekendBudget {
    type State = Spent;

    fn capacity(&self) -> u64 {
        self.0
    }

    fn step(&self, state: Option<&Spent>, now: Timestamp, cost: u64) -> Step<Spent> {
        let today = now.as_us() / DAY_US;
        // A past day does not count; a future one, written before the clock went back, does.
        let spent = state.filter(|spent| spent.day >= today);
        let (day, amount) = spent.map_or((today, 0), |spent| (spent.day, spent.amount));
        let left = self.on(day).saturating_sub(amount);
        let (end_us, allowed) = ((day + 1) * DAY_US - now.as_us(), cost <= left);
        let charged = if allowed { cost } else { 0 };
        let fits_us =
            |cost| self.first_day_for(cost, day + 1).map(|day| day * DAY_US - now.as_us());
        let remaining = left - charged;
        let decision = Decision {
            allowed,
            cost,
            limit: self.on(day),
            remaining,
            retry_after_us: if allowed { Some(0) } else { fits_us(cost) },
            replenish_after_us: fits_us(remaining + 1).unwrap_or(0),
            reset_after_us: if amount + charged == 0 { 0 } else { end_us },
        };
        let state = Spent { day, amount: amount + charged };
        let expires = now.saturating_add_us(end_us);
        let write = if charged == 0 { Write::Keep } else { Write::Put { state, expires } };
        Step { decision, write }
    }
}

impl InMemory for WeekendBudget {}

impl Codec for Spent {
    fn encode(&self) -> Vec<u8> {
        format!("{} {}", self.day, self.amount).into_bytes()
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (day, amount) = std::str::from_utf8(bytes).ok()?.split_once(' ')?;
        Some(Self { day: day.parse().ok()?, amount: amount.parse().ok()? })
    }
}

impl RecordText for WeekendBudget {}

beside_built_in! {
    /// The algorithms of this program: the built-in ones and its own.
    #[derive(Clone, Copy, Debug)]
    pub enum Plan {
        /// An algorithm of your own.
        Budget(WeekendBudget),
    }

    /// Their states.
    #[derive(Clone, Debug)]
    pub enum PlanState;
}

impl RecordText for Plan {}

impl Codec for PlanState {
    fn encode(&self) -> Vec<u8> {
        match self {
            Self::BuiltIn(state) => [&b"built-in "[..], &state.encode()].concat(),
            Self::Budget(state) => [&b"budget "[..], &state.encode()].concat(),
        }
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        match bytes.strip_prefix(b"built-in ") {
            Some(bytes) => AnyState::decode(bytes).map(Self::BuiltIn),
            None => Spent::decode(bytes.strip_prefix(b"budget ")?).map(Self::Budget),
        }
    }
}

/// Both in one set of limits, charged together.
async fn spend_by_plan<S: Store<Plan>>(store: S) -> Result<(), Box<dyn std::error::Error>> {
    let limits = LimitsBuilder::<Plan>::new()
        .limit("burst", Gcra::per_second(10).burst(20))
        .by(["ip"])
        .limit("budget", WeekendBudget(100))
        .by(["user"])
        .build()?;
    let limiter = RateLimiter::new(limits, store);

    let verdict = limiter.check(&[("ip", "192.0.2.7"), ("user", "alice")]).await?;
    println!("{} left, in the smaller of both", verdict.remaining());
    Ok(())
}

/// The same requests to any store.
async fn spend<S: Store<WeekendBudget>>(store: S) -> Result<(), Box<dyn std::error::Error>> {
    let limiter = RateLimiter::new(limits(100)?, store);
    for cost in [40, 40, 40] {
        let verdict = limiter.check_n("alice", cost).await?;
        println!(
            "{cost}: {}, {} left, again in {:?}",
            if verdict.allowed() { "admitted" } else { "denied" },
            verdict.remaining(),
            verdict.retry_after()
        );
    }
    Ok(())
}

fn limits(budget: u64) -> Result<Limits<WeekendBudget>, ConfigError> {
    Limits::new([Limit::new("budget", WeekendBudget(budget))?])
}

/// A store whose keys are its own: both programs have a limit `budget`, and each writes its states
/// in its own way.
async fn apart(url: &str) -> Result<RedisStore<Cas>, RedisError> {
    RedisStore::builder().cas().prefix("plan").connect(url).await
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("in memory");
    spend(MemoryStore::<WeekendBudget>::new()).await?;
    spend_by_plan(MemoryStore::<Plan>::new()).await?;
    if let Some(url) = std::env::args().nth(1) {
        println!("on Redis");
        spend(RedisStore::builder().cas().connect(&url).await?).await?;
        spend_by_plan(apart(&url).await?).await?;
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::expect_used, reason = "tests")]
mod tests {
    use ratelimit_servers::RedisServer;
    use ratelimit_testkit::{AlgorithmHarness, Instance, algorithm_conformance};

    use super::*;

    // The laws, by the step itself and in memory.
    algorithm_conformance!(alone, WeekendBudget, [WeekendBudget(1), WeekendBudget(100)]);
    algorithm_conformance!(around_weekends, AroundWeekends);
    algorithm_conformance!(plan, Plan, [WeekendBudget(3).into(), gcra().into()]);

    struct AroundWeekends;

    impl AlgorithmHarness for AroundWeekends {
        type Algorithm = WeekendBudget;

        fn limits() -> Vec<Instance<WeekendBudget>> {
            [1, 100].map(|budget| Instance::new(budget.to_string(), WeekendBudget(budget))).into()
        }

        /// The budget is another one from a Saturday on, and from the Monday after it.
        fn unkind_times() -> Vec<Timestamp> {
            [20_533, 20_535].map(|day| Timestamp::saturating_from_us(day * DAY_US)).into()
        }
    }

    fn gcra() -> Gcra {
        Gcra::per_second(10).burst(20).build().expect("a limit")
    }

    #[tokio::test]
    async fn it_runs_in_memory_and_on_redis() -> Result<(), Box<dyn std::error::Error>> {
        spend(MemoryStore::<WeekendBudget>::new()).await?;
        spend_by_plan(MemoryStore::<Plan>::new()).await?;
        let server = RedisServer::shared()?;
        spend(RedisStore::builder().cas().connect(&server.url()).await?).await?;
        spend_by_plan(apart(&server.url()).await?).await
    }
}

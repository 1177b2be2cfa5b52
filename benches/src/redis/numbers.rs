//! Ten thousand customers with numbers of their own, on one server: in one limiter, beside one
//! limit for all of them and beside a limiter for each. A service looks its customer up in either
//! case.

use std::collections::HashMap;
use std::sync::Arc;

use ratelimit_core::{Gcra, Limit, Limits, Numbers, Rate, RateLimiter};
use ratelimit_redis::RedisStore;

use crate::keys::{CallerKey, KeyDraw, Spread};
use crate::measure::Fallible;

use super::lab::Lab;
use super::plain::{Decides, WIDE};
use super::throughput::{DRAWN, Workload, charge};

const CUSTOMERS: usize = 10_000;
const TASKS: [usize; 3] = [16, 256, 1_024];

type Limiter = RateLimiter<Arc<RedisStore>, Gcra>;

/// The numbers of each customer: no two have one rate.
fn customers() -> impl Iterator<Item = Fallible<(String, Gcra)>> {
    (0..CUSTOMERS).zip(0..).map(|(place, slower)| {
        let own = Gcra::new(Rate::per_us(1, WIDE.interval_us + slower)?, WIDE.burst)?;
        Ok((CallerKey::new(place).as_str().to_owned(), own))
    })
}

fn limiter(store: &Arc<RedisStore>, numbers: Gcra) -> Fallible<Limiter> {
    let limit = Limit::new("limit", numbers)?.accepts_up_to(numbers)?;
    Ok(RateLimiter::new(Limits::new([limit])?, Arc::clone(store)))
}

fn widest() -> Fallible<Gcra> {
    Ok(Gcra::new(Rate::per_us(1, WIDE.interval_us)?, WIDE.burst)?)
}

/// Decides each customer by its numbers.
struct OwnNumbers(Limiter, HashMap<String, Numbers<Gcra>>);

impl Decides for OwnNumbers {
    async fn charge(&self, caller: &str, cost: u64) -> Fallible<bool> {
        let numbers = self.1.get(caller).ok_or("no customer")?;
        Ok(self.0.request(caller).numbers(numbers).cost(cost).check().await?.allowed())
    }
}

/// Decides all customers by one limit.
struct OneLimit(Limiter, HashMap<String, Gcra>);

impl Decides for OneLimit {
    async fn charge(&self, caller: &str, cost: u64) -> Fallible<bool> {
        std::hint::black_box(self.1.get(caller).ok_or("no customer")?);
        Ok(self.0.check_n(caller, cost).await?.allowed())
    }
}

/// Decides each customer by a limiter of its own.
struct LimiterEach(HashMap<String, Limiter>);

impl Decides for LimiterEach {
    async fn charge(&self, caller: &str, cost: u64) -> Fallible<bool> {
        let limiter = self.0.get(caller).ok_or("no customer")?;
        Ok(limiter.check_n(caller, cost).await?.allowed())
    }
}

/// Measures all of them, each over a store of its own.
pub(super) async fn run(lab: &mut Lab) -> Fallible {
    lab.flush()?;
    let url = lab.server.url();
    let store = async || RedisStore::connect(&url).await.map(Arc::new);
    let own = limiter(&store().await?, widest()?)?;
    let numbers = customers().map(|customer| {
        let (caller, own_numbers) = customer?;
        Ok((caller, own.limits().numbers([("limit", own_numbers)])?))
    });
    let numbers = numbers.collect::<Fallible<_>>()?;
    let own = Arc::new(OwnNumbers(own, numbers));
    let all = customers().collect::<Fallible<_>>()?;
    let one = Arc::new(OneLimit(limiter(&store().await?, widest()?)?, all));
    let shared = store().await?;
    let each = customers().map(|customer| {
        let (caller, own_numbers) = customer?;
        Ok((caller, limiter(&shared, own_numbers)?))
    });
    let each = Arc::new(LimiterEach(each.collect::<Fallible<_>>()?));
    let callers: Vec<_> = (0..CUSTOMERS).map(CallerKey::new).collect();
    // They share their states.
    charge(&one, &callers).await?;
    for tasks in TASKS {
        let callers = Arc::new(KeyDraw::new(Spread::Uniform, CUSTOMERS, 1).keys(DRAWN)?);
        let load = |peer| Workload {
            part: "numbers",
            client: "redis",
            peer,
            servers: std::slice::from_ref(&lab.server),
            nodes: 1,
            tasks,
            keys: CUSTOMERS,
            callers: [&callers, &callers],
        };
        let (quick, report) = (lab.quick, &mut lab.report);
        load("one limit").measure(quick, report, &own, &one).await?;
        load("limiter each").measure(quick, report, &own, &each).await?;
    }
    Ok(())
}

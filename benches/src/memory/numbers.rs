//! Ten thousand customers with numbers of their own: in one limiter, beside one limit for all of
//! them and beside a limiter for each. A service looks its customer up in either case.

use std::collections::HashMap;
use std::hint::black_box;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use ratelimit_core::{Gcra, Limit, Limits, Numbers, RateLimiter, Verdict};
use ratelimit_memory::MemoryStore;

use crate::keys::CallerKey;
use crate::measure::Fallible;
use crate::peers::{Allowance, ByFunction, MeasuredLimiter, gcra, limits};
use crate::report::BenchReport;

use super::PRECISE;
use super::scenario::{
    ALLOWED, CUSTOMERS, DENIED, LimiterTurn, ScenarioEffort, ScenarioOutcome, take_turns,
};

/// The allowance of each customer: no two have one rate.
fn customers(allowance: Allowance) -> impl Iterator<Item = (CallerKey, Allowance)> {
    (0..CUSTOMERS.key_count).zip(0..).map(move |(place, slower)| {
        let period = allowance.period + Duration::from_micros(slower);
        (CallerKey::new(place), Allowance { period, ..allowance })
    })
}

/// One limiter, which decides each customer by its numbers.
fn own_numbers(allowance: Allowance) -> Fallible<Box<dyn MeasuredLimiter>> {
    let most = gcra(allowance)?;
    let limit = Limit::new("limit", most)?.accepts_up_to(most)?;
    let limiter = RateLimiter::new(Limits::new([limit])?, MemoryStore::new());
    let mut all: HashMap<CallerKey, Numbers<Gcra>> = HashMap::new();
    for (key, own) in customers(allowance) {
        all.insert(key, limiter.limits().numbers([("limit", gcra(own)?)])?);
    }
    Ok(Box::new(ByFunction(move |key: &CallerKey| {
        let Some(numbers) = all.get(key) else { return false };
        let said = limiter.request(key.as_str()).numbers(numbers).check_now();
        black_box(&said).as_ref().is_ok_and(Verdict::allowed)
    })))
}

/// One limit for all customers.
fn one_limit(allowance: Allowance) -> Fallible<Box<dyn MeasuredLimiter>> {
    let limiter = RateLimiter::new(limits([gcra(allowance)?])?, MemoryStore::new());
    let all: HashMap<CallerKey, Allowance> = customers(allowance).collect();
    Ok(Box::new(ByFunction(move |key: &CallerKey| {
        let Some(_known) = black_box(all.get(key)) else { return false };
        let said = limiter.check_now(key.as_str());
        black_box(&said).as_ref().is_ok_and(Verdict::allowed)
    })))
}

/// A limiter for each customer, over one store.
fn limiter_each(allowance: Allowance) -> Fallible<Box<dyn MeasuredLimiter>> {
    let store = Arc::new(MemoryStore::new());
    let mut all = HashMap::new();
    for (key, own) in customers(allowance) {
        all.insert(key, RateLimiter::new(limits([gcra(own)?])?, Arc::clone(&store)));
    }
    Ok(Box::new(ByFunction(move |key: &CallerKey| {
        let Some(limiter) = all.get(key) else { return false };
        let said = limiter.check_now(key.as_str());
        black_box(&said).as_ref().is_ok_and(Verdict::allowed)
    })))
}

/// How much is measured where every key is a customer.
pub(super) const fn effort(quick: bool) -> ScenarioEffort {
    if quick {
        ScenarioEffort { rounds: 5, decisions: 1 << 14 }
    } else {
        ScenarioEffort { rounds: 31, decisions: 1 << 17 }
    }
}

/// Measures allowed and denied decisions, on one thread and on two.
pub(super) fn run(quick: bool, report: &mut BenchReport) -> Fallible {
    println!("\n{} customers, each with a rate of its own", CUSTOMERS.key_count);
    let allowed = ScenarioOutcome { first_cost: NonZeroU32::MIN, ..ALLOWED };
    for outcome in [allowed, DENIED] {
        let all = [own_numbers, one_limit, limiter_each].map(|of| of(outcome.allowance));
        let all = all.into_iter().collect::<Fallible<Vec<_>>>()?;
        for subject in &all {
            outcome.charge(&**subject, CUSTOMERS.key_count)?;
        }
        let turns: Vec<_> = all.iter().map(|subject| LimiterTurn::single(&**subject)).collect();
        for threads in [1, 2] {
            let measured = take_turns(&CUSTOMERS, &outcome, threads, effort(quick), &turns)?;
            for peer in [("one-limit", 1), ("limiter-each", 2)] {
                measured.tell(report, (PRECISE, 1, 0), peer)?;
            }
        }
    }
    Ok(())
}

//! A limit that looks for records of its callers, beside the same limit that looks for none.

use std::hint::black_box;
use std::num::NonZeroU32;
use std::ops::Range;

use futures_util::FutureExt as _;
use ratelimit_core::{Limit, Limits, RateLimiter, Record, Verdict};
use ratelimit_memory::MemoryStore;

use crate::keys::CallerKey;
use crate::measure::Fallible;
use crate::peers::{Allowance, ByFunction, MeasuredLimiter, gcra};
use crate::report::BenchReport;

use super::PRECISE;
use super::numbers::effort;
use super::scenario::{ALLOWED, CUSTOMERS, DENIED, LimiterTurn, ScenarioOutcome, take_turns};

/// The rows, and the callers that have a record: none if the limit looks for none.
const ROWS: [(&str, Option<Range<usize>>); 4] = [
    ("not-overridable", None),
    ("records-none", Some(0..0)),
    ("records-others", Some(CUSTOMERS.key_count..CUSTOMERS.key_count + 1)),
    ("records-each", Some(0..CUSTOMERS.key_count)),
];

/// A limiter in which these callers have a record each, of the limit's own numbers.
fn limiter(
    allowance: Allowance,
    recorded: Option<Range<usize>>,
) -> Fallible<Box<dyn MeasuredLimiter>> {
    let numbers = gcra(allowance)?;
    let limit = Limit::new("limit", numbers)?;
    let limit = if recorded.is_some() { limit.overridable() } else { limit };
    let limiter = RateLimiter::new(Limits::new([limit])?, MemoryStore::new());
    for place in recorded.into_iter().flatten() {
        let (key, record) = (CallerKey::new(place), Record::numbers(numbers).forever());
        let set = limiter.set_record(key.as_str(), "limit", record).now_or_never();
        let _before = set.ok_or("the store in memory waits")??;
    }
    Ok(Box::new(ByFunction(move |key: &CallerKey| {
        let said = limiter.check_now(key.as_str());
        black_box(&said).as_ref().is_ok_and(Verdict::allowed)
    })))
}

/// Measures allowed and denied decisions, on one thread and on two.
pub(super) fn run(quick: bool, report: &mut BenchReport) -> Fallible {
    println!("\n{} callers of a limit that looks for records", CUSTOMERS.key_count);
    let allowed = ScenarioOutcome { first_cost: NonZeroU32::MIN, ..ALLOWED };
    for outcome in [allowed, DENIED] {
        let all = ROWS.map(|(_, recorded)| limiter(outcome.allowance, recorded));
        let all = all.into_iter().collect::<Fallible<Vec<_>>>()?;
        for subject in &all {
            outcome.charge(&**subject, CUSTOMERS.key_count)?;
        }
        let turns: Vec<_> = all.iter().map(|subject| LimiterTurn::single(&**subject)).collect();
        for threads in [1, 2] {
            let mut measured = take_turns(&CUSTOMERS, &outcome, threads, effort(quick), &turns)?;
            for (place, (row, _)) in ROWS.iter().enumerate().skip(1) {
                measured.named(row).tell(report, (PRECISE, 1, place), (ROWS[0].0, 0))?;
            }
        }
    }
    Ok(())
}

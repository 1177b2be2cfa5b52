//! A limit that looks for records of its callers, beside the same limit that looks for none, alone
//! and behind a look-up of the caller in a map: the floor of any numbers of its own.

use std::collections::HashSet;
use std::hint::black_box;
use std::num::NonZeroU32;
use std::ops::Range;

use futures_util::FutureExt as _;
use ratelimit_core::{Limit, Limits, RateLimiter, Record, Verdict};
use ratelimit_memory::MemoryStore;

use crate::keys::CallerKey;
use crate::measure::Fallible;
use crate::peers::{Allowance, ByFunction, MeasuredLimiter, gcra, limits};
use crate::report::BenchReport;

use super::PRECISE;
use super::numbers::effort;
use super::scenario::{ALLOWED, CUSTOMERS, DENIED, LimiterTurn, ScenarioOutcome, take_turns};

/// The peers, of which the second looks each caller up.
const PEERS: [&str; 2] = ["not-overridable", "looked-up"];

/// The rows, and the callers that have a record.
const ROWS: [(&str, Range<usize>); 3] = [
    ("records-none", 0..0),
    ("records-others", CUSTOMERS.key_count..CUSTOMERS.key_count + 1),
    ("records-each", 0..CUSTOMERS.key_count),
];

/// A limiter that looks for no records, behind a look-up of the caller if there are `known` ones.
fn plain(allowance: Allowance, known: Range<usize>) -> Fallible<Box<dyn MeasuredLimiter>> {
    let limiter = RateLimiter::new(limits([gcra(allowance)?])?, MemoryStore::new());
    let all: HashSet<CallerKey> = known.map(CallerKey::new).collect();
    Ok(Box::new(ByFunction(move |key: &CallerKey| {
        if !all.is_empty() && !black_box(all.contains(key)) {
            return false;
        }
        let said = limiter.check_now(key.as_str());
        black_box(&said).as_ref().is_ok_and(Verdict::allowed)
    })))
}

/// A limiter in which these callers have a record each, of the limit's own numbers.
fn limiter(allowance: Allowance, recorded: Range<usize>) -> Fallible<Box<dyn MeasuredLimiter>> {
    let numbers = gcra(allowance)?;
    let limit = Limit::new("limit", numbers)?.overridable();
    let limiter = RateLimiter::new(Limits::new([limit])?, MemoryStore::new());
    for place in recorded {
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
        let callers = 0..CUSTOMERS.key_count;
        let peers = [0..0, callers].map(|known| plain(outcome.allowance, known));
        let rows = ROWS.map(|(_, recorded)| limiter(outcome.allowance, recorded));
        let all = peers.into_iter().chain(rows).collect::<Fallible<Vec<_>>>()?;
        for subject in &all {
            outcome.charge(&**subject, CUSTOMERS.key_count)?;
        }
        let turns: Vec<_> = all.iter().map(|subject| LimiterTurn::single(&**subject)).collect();
        for threads in [1, 2] {
            let mut measured = take_turns(&CUSTOMERS, &outcome, threads, effort(quick), &turns)?;
            for (ours, (row, _)) in ROWS.iter().enumerate() {
                for (place, peer) in PEERS.into_iter().enumerate() {
                    let ours = PEERS.len() + ours;
                    measured.named(row).tell(report, (PRECISE, 1, ours), (peer, place))?;
                }
            }
        }
    }
    Ok(())
}

//! `ratelimit check`: one decision, now.

use std::fmt::Write as _;

use ratelimit_core::{Decision, Limit, Limits, Op, Policy, RateLimiter, Store, Timestamp};
use ratelimit_memory::MemoryStore;

use crate::args::CheckArgs;
use crate::caller::{Caller, joined_names};
use crate::decision_line::{DecisionLine, parts, push_json};
use crate::failure::Failure;
use crate::input::Entry;
use crate::policy;
#[cfg(feature = "_servers")]
use crate::store;
use crate::store::StoreUrl;
use crate::tally::Decided;
use crate::text::{count, duration, plural};

/// The exit code of a denial.
const DENIED: u8 = 1;

pub(super) fn run(args: &CheckArgs) -> Result<u8, Failure> {
    let limits = policy::read(&args.caller.policy)?;
    let url = StoreUrl::parse(&args.caller.store)?;
    let caller = Caller::from_args(&args.caller.keys, &limits)?;
    let op = if args.peek { Op::Peek } else { Op::Acquire };
    match &url {
        StoreUrl::Memory => {
            pollster::block_on(check(args, &caller, limits, MemoryStore::new(), op, &url))
        }
        #[cfg(feature = "_servers")]
        StoreUrl::Redis(_) => store::block_on(async {
            let (store, _) = store::of_caller(&args.caller, "check", &limits).await?;
            check(args, &caller, limits, store, op, &url).await
        }),
    }
}

async fn check<S: Store<Policy>>(
    args: &CheckArgs,
    caller: &Caller,
    limits: Limits<Policy>,
    store: S,
    op: Op,
    url: &StoreUrl,
) -> Result<u8, Failure> {
    let limiter = RateLimiter::new(limits, store);
    let request = limiter.request(caller).cost(args.cost).metadata(args.metadata.as_bytes());
    let what = format!("--store {}", url.display());
    let verdict = request.apply(op).await.map_err(|error| Failure::store(&what, &error))?;
    let limits = limiter.limits().as_slice();
    let (enforced, shadow) = parts(&limiter, caller, &verdict);
    let mut out = Vec::new();
    if args.caller.json {
        let (caller, allowed) = (caller.clone(), verdict.allowed());
        let entry = Entry { at: Timestamp::ZERO, caller, cost: args.cost, op, duration_us: None };
        let parts = Decided { entry: &entry, allowed, enforced: &enforced, shadow: &shadow };
        let mut line = DecisionLine::new(limits, &verdict, parts);
        line.at_us = None;
        push_json(&mut out, &line);
    } else {
        let answer = match (verdict.allowed(), args.peek) {
            (true, false) => "admitted",
            (true, true) => "would be admitted",
            (false, false) => "denied",
            (false, true) => "would be denied",
        };
        let mut lines = format!("{} at cost {}: {answer}\n", caller.display(), count(args.cost));
        for (place, decision) in enforced.iter().chain(&shadow) {
            let mark = if limits[*place].is_shadow() { "in shadow: " } else { "" };
            let _ = writeln!(lines, "  {mark}{}", sentence(&limits[*place], decision));
        }
        out = lines.into_bytes();
    }
    super::print(&out)?;
    Ok(if verdict.allowed() { 0 } else { DENIED })
}

/// One limit's decision, as a sentence.
pub(super) fn sentence(limit: &Limit<Policy>, decision: &Decision) -> String {
    let recovered = match decision.reset_after_us {
        0 => "nothing is used".to_owned(),
        us => format!("all of it again in {}", duration(us)),
    };
    let left =
        format!("{} of {} left, {recovered}", count(decision.remaining), count(decision.limit));
    let answer = match (decision.allowed, decision.retry_after_us) {
        (true, _) => format!("admits, {left}"),
        (false, Some(us)) => format!("denies, {left}; try again in {}", duration(us)),
        (false, None) => format!(
            "denies, and always will: a cost of {} is above the most there can be, {}",
            count(decision.cost),
            plural(decision.limit, "unit", "units")
        ),
    };
    format!("{} (for each {}) {answer}", limit.name(), joined_names(limit.identifier_names()))
}

//! `ratelimit check`: one decision, now.

use std::fmt::Write as _;

use ratelimit_core::store::Op;
use ratelimit_core::{
    Algorithm, AnyAlgorithm, Decision, Limit, LimitCosts, Limits, RateLimiter, Refusal,
};
use ratelimit_replay::caller::{joined_names, list_identifiers};
use ratelimit_replay::decision_line::{DecisionLine, json_line};
use ratelimit_replay::failure::Failure;
use ratelimit_replay::input::InputEntry;
use ratelimit_replay::policy;
use ratelimit_replay::tally::Decided;
use ratelimit_replay::text::{count, duration, plural};

use crate::args::CheckArgs;
use crate::inputs;
use crate::store::{self, StoreUrl};

/// The exit code of a denial.
const DENIED: u8 = 1;

pub(super) fn run(args: &CheckArgs) -> Result<u8, Failure> {
    let limits = inputs::policy(&args.caller.policy)?;
    let url = StoreUrl::parse(&args.caller.store)?;
    let caller = args.caller.caller(&limits)?;
    let op = if args.peek { Op::Peek } else { Op::Acquire };
    for (place, (limit, _)) in args.cost.iter().enumerate() {
        if args.cost[..place].iter().any(|(known, _)| known == limit) {
            let of = limit.as_ref().map_or_else(String::new, |limit| format!(" for {limit}"));
            return Err(Failure::input(format!("--cost: two costs are given{of}; give one")));
        }
    }
    let costs = args.cost.iter().fold(LimitCosts::from(1), |costs, (limit, cost)| match limit {
        Some(limit) => costs.with(limit, *cost),
        None => costs.with_others(*cost),
    });
    let entry = InputEntry { caller, costs, op, ..InputEntry::default() };
    validate(args, &entry, &limits)?;
    let numbers = policy::numbers(&args.own.numbers, &limits)?;
    let (limiter, verdict) = store::block_on(async {
        let secret = || store::secret(args.caller.secret_file.as_deref());
        let store = url.open(&args.caller.prefix, secret, &limits).await?;
        let limiter = RateLimiter::new(limits, store);
        let request = limiter.request(&entry.caller).costs(&entry.costs);
        let request = numbers.as_ref().map_or(request, |numbers| request.numbers(numbers));
        let verdict = request.metadata(args.metadata.as_bytes()).apply(op).await;
        let failed = |error| Failure::store(&format!("--store {}", url.display()), &error);
        verdict.map(|verdict| (limiter, verdict)).map_err(failed)
    })?;
    let decided = Decided::new((&limiter, numbers.as_ref()), &entry, &verdict);
    let out = if args.caller.json {
        let mut line = DecisionLine::new(&decided);
        line.at_us = None;
        json_line(&line)
    } else {
        let answer = match (verdict.allowed(), args.peek) {
            (true, false) => "admitted",
            (true, true) => "would be admitted",
            (false, false) => "denied",
            (false, true) => "would be denied",
        };
        let caller = entry.caller.display();
        let mut lines = format!("{caller} at cost {}: {answer}\n", costs_of(&entry.costs));
        for (_, one) in decided.each() {
            let told = sentence(one.configured(), one.decision(), one.account().owed);
            let warns = one.configured().warns_at_percent().filter(|_| one.is_warned());
            let warned =
                warns.map_or_else(String::new, |percent| format!("; warns at {percent} %"));
            let _ = writeln!(lines, "  {told}{warned}");
        }
        lines
    };
    super::print(out)?;
    Ok(if verdict.allowed() { 0 } else { DENIED })
}

/// Refuses what no store can decide, and names the argument.
fn validate(
    args: &CheckArgs,
    entry: &InputEntry,
    limits: &Limits<AnyAlgorithm>,
) -> Result<(), Failure> {
    let limiter = RateLimiter::new(limits.clone(), store::memory());
    let request = limiter.request(&entry.caller).costs(&entry.costs);
    request.validate().map_err(|refusal| {
        Failure::input(match refusal {
            Refusal::UnknownLimit { .. } => format!("--cost: {refusal}"),
            Refusal::NoLimitApplies { .. } => {
                let caller = entry.caller.display();
                format!("KEY: to {caller} only shadow limits apply. {}", list_identifiers(limits))
            }
            refusal => format!("KEY: {refusal}"),
        })
    })?;
    let keeps = limits.iter().filter(|limit| limit.key_for(&entry.caller).is_some());
    let bytes = args.metadata.len();
    match keeps.filter_map(|limit| limit.algorithm().metadata_bytes()).min() {
        Some(most) if bytes > most => Err(Failure::input(format!(
            "--metadata: {bytes} bytes are more than the {most} that a limit keeps; shorten them"
        ))),
        _ => Ok(()),
    }
}

/// Costs, for people: `1`, or `812 for input, 1 for others`.
fn costs_of(costs: &LimitCosts) -> String {
    let (of_limits, others) = costs.parts();
    let mut told: Vec<_> =
        of_limits.map(|(limit, cost)| format!("{} for {limit}", count(cost))).collect();
    let all = if told.is_empty() { "" } else { " for others" };
    told.push(count(others) + all);
    told.join(", ")
}

/// One limit's decision, as a sentence.
pub(super) fn sentence(limit: &Limit<AnyAlgorithm>, decision: &Decision, owed: u64) -> String {
    let recovered = match decision.reset_after_us {
        0 => "nothing is used".to_owned(),
        us => format!("full again in {}", duration(us)),
    };
    let left = match owed {
        0 => format!("{} of {} left", count(decision.remaining), count(decision.limit)),
        _ => format!("{} owed beyond {}", count(owed), count(decision.limit)),
    };
    let answer = match (decision.allowed, decision.retry_after_us) {
        (true, _) => format!("admits: {left}, {recovered}"),
        (false, Some(us)) => format!("denies: {left}; retry in {}, {recovered}", duration(us)),
        // Only a record denies for ever what would fit.
        (false, None) if decision.cost <= decision.limit => {
            format!("denies for ever: a record blocks the caller; {left}, {recovered}")
        }
        (false, None) => format!(
            "denies always: a cost of {} is above the capacity of {}",
            count(decision.cost),
            plural(decision.limit, "unit", "units")
        ),
    };
    let mark = if limit.is_shadow() { "in shadow: " } else { "" };
    format!("{mark}{} (for each {}) {answer}", limit.name(), joined_names(limit))
}

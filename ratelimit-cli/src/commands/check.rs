//! `ratelimit check`: one decision, now.

use std::fmt::Write as _;

use ratelimit_core::{Decision, Limit, Limits, Op, Policy, RateLimiter, Store, Verdict};
use ratelimit_memory::MemoryStore;

use crate::args::CheckArgs;
use crate::caller::{Caller, joined_names};
use crate::decision_line::DecisionLine;
use crate::failure::Failure;
use crate::policy;
use crate::store::{self, Keys, Secret, StoreUrl};
use crate::text::{count, duration, plural};

/// The exit code of a denial.
const DENIED: u8 = 1;

pub(super) fn run(args: &CheckArgs) -> Result<u8, Failure> {
    let limits = policy::read(&args.caller.policy)?;
    let url = StoreUrl::parse(&args.store)?;
    let caller = Caller::from_args(&args.caller.keys, &limits)?;
    let secret = Secret::find(args.caller.secret_file.as_deref())?;
    let keys = Keys { prefix: &args.caller.prefix, secret: secret.as_ref() };
    let op = if args.peek { Op::Peek } else { Op::Acquire };
    super::block_on(async {
        match &url {
            StoreUrl::Memory => check(args, &caller, limits, MemoryStore::new(), op, &url).await,
            StoreUrl::Redis(address) => {
                let store = store::connect(address, keys, &limits).await?;
                check(args, &caller, limits, store, op, &url).await
            }
        }
    })
}

async fn check<S: Store<Policy>>(
    args: &CheckArgs,
    caller: &Caller<'_>,
    limits: Limits<Policy>,
    store: S,
    op: Op,
    url: &StoreUrl,
) -> Result<u8, Failure> {
    let limiter = RateLimiter::new(limits, store);
    let request = limiter.request(caller).cost(args.cost).metadata(args.metadata.as_bytes());
    let applied: Vec<usize> = request.applicable().collect();
    let what = format!("--store {}", url.display());
    let verdict = request.apply(op).await.map_err(|error| Failure::store(&what, &error))?;

    let limits = limiter.limits().as_slice();
    let mut out = Vec::new();
    if args.caller.json {
        let place = |name: &str| limits.iter().position(|limit| limit.name() == name);
        let named = limiter.named(&verdict);
        let shadow: Vec<_> =
            named.shadow().filter_map(|d| Some((place(d.name())?, *d.decision()))).collect();
        let writer = DecisionLine::new(limits).shadow(&shadow);
        writer.write(&mut out, None, caller, args.cost, &verdict, &applied);
    } else {
        let mut lines = sentences(limits, caller, args, &verdict, &applied);
        for decision in limiter.named(&verdict).shadow() {
            let told = sentence(decision.configured(), decision.decision());
            let _ = writeln!(lines, "  in shadow: {told}");
        }
        out = lines.into_bytes();
    }
    super::print(&out)?;
    Ok(if verdict.allowed() { 0 } else { DENIED })
}

fn sentences(
    limits: &[Limit<Policy>],
    caller: &Caller<'_>,
    args: &CheckArgs,
    verdict: &Verdict,
    applied: &[usize],
) -> String {
    let answer = match (verdict.allowed(), args.peek) {
        (true, false) => "admitted",
        (true, true) => "would be admitted",
        (false, false) => "denied",
        (false, true) => "would be denied",
    };
    let mut lines = format!("{} at cost {}: {answer}\n", caller.display(), count(args.cost));
    for (limit, decision) in applied.iter().filter_map(|&p| limits.get(p)).zip(verdict.decisions())
    {
        lines.push_str("  ");
        lines.push_str(&sentence(limit, decision));
        lines.push('\n');
    }
    lines
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

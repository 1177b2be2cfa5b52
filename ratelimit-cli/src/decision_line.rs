//! The decision line: one JSON object per request, integers only, the same bytes from every store.

use ratelimit_core::{Decision, Limit, Policy, RateLimiter, Store, Verdict};
use serde::Serialize;
use serde_json::Value;

use crate::caller::Caller;
use crate::tally::Decided;

/// The fields of a decision line, in their order.
#[derive(Serialize)]
pub(crate) struct DecisionLine<'d> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) at_us: Option<u64>,
    #[serde(flatten)]
    caller: &'d Caller,
    cost: u64,
    #[serde(flatten)]
    verdict: Told,
    #[serde(skip_serializing_if = "Option::is_none")]
    limits: Option<Vec<OfLimit<'d>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    shadow: Option<Vec<OfLimit<'d>>>,
}

/// A decision; `limit` and `remaining` are null where no limit applies.
#[derive(Serialize)]
pub(crate) struct Told {
    allowed: bool,
    limit: Option<u64>,
    remaining: Option<u64>,
    retry_after_us: Option<u64>,
    reset_after_us: u64,
}

/// The decision of one limit.
#[derive(Serialize)]
struct OfLimit<'d> {
    name: &'d str,
    #[serde(flatten)]
    told: Told,
}

impl From<&Decision> for Told {
    fn from(decision: &Decision) -> Self {
        Self {
            allowed: decision.allowed,
            limit: Some(decision.limit),
            remaining: Some(decision.remaining),
            retry_after_us: decision.retry_after_us,
            reset_after_us: decision.reset_after_us,
        }
    }
}

impl<'d> DecisionLine<'d> {
    /// The line of a verdict, of which these are the parts.
    pub(crate) fn new(limits: &'d [Limit<Policy>], verdict: &Verdict, parts: Decided<'d>) -> Self {
        let unlimited = Told {
            allowed: true,
            limit: None,
            remaining: None,
            retry_after_us: Some(0),
            reset_after_us: 0,
        };
        let named = |decisions: &[(usize, Decision)]| -> Vec<OfLimit<'d>> {
            let of_limit = |(place, decision): &(usize, Decision)| {
                Some(OfLimit { name: limits.get(*place)?.name(), told: decision.into() })
            };
            decisions.iter().filter_map(of_limit).collect()
        };
        Self {
            at_us: Some(parts.entry.at.as_us()),
            caller: &parts.entry.caller,
            cost: parts.entry.cost,
            verdict: if verdict.is_unlimited() { unlimited } else { verdict.summary().into() },
            limits: (limits.len() > 1).then(|| named(parts.enforced)),
            shadow: limits.iter().any(Limit::is_shadow).then(|| named(parts.shadow)),
        }
    }
}

/// Decisions, each with the position of its limit in the policy.
pub(crate) type Placed = Vec<(usize, Decision)>;

/// What the enforced limits that apply decided, and the shadow limits, each by its position in the policy.
pub(crate) fn parts<S: Store<Policy>>(
    limiter: &RateLimiter<S>,
    caller: &Caller,
    verdict: &Verdict,
) -> (Placed, Placed) {
    let request = limiter.request(caller);
    let enforced = request.applicable().zip(verdict.decisions().iter().copied());
    let place = |name: &str| limiter.limits().iter().position(|limit| limit.name() == name);
    let named = limiter.named(verdict);
    let shadow = named.shadow().filter_map(|d| Some((place(d.name())?, *d.decision())));
    (enforced.collect(), shadow.collect())
}

/// Appends a value as a line of JSON.
pub(crate) fn push_json(out: &mut Vec<u8>, value: &impl Serialize) {
    // Into memory nothing fails.
    let _ = serde_json::to_writer(&mut *out, value);
    out.push(b'\n');
}

/// Values as lines of JSON.
pub(crate) fn json_lines(values: impl IntoIterator<Item = Value>) -> String {
    values.into_iter().map(|value| value.to_string() + "\n").collect()
}

//! The decision line: one JSON object per request, integers only, the same bytes from every store.

use std::collections::BTreeMap;
use std::num::NonZeroU64;

use ratelimit_core::{
    Account, Algorithm, AnyAlgorithm, Decision, Limit, LimitCosts, NamedDecision,
};
use serde::{Serialize, Serializer};
use serde_json::Value;

use crate::caller::Caller;
use crate::input::OTHERS;
use crate::tally::Decided;

/// The fields of a decision line, in their order.
#[derive(Serialize)]
pub struct DecisionLine<'d> {
    /// When the request was decided.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at_us: Option<u64>,
    #[serde(flatten)]
    caller: &'d Caller,
    #[serde(serialize_with = "costs", rename = "cost")]
    costs: &'d LimitCosts,
    #[serde(flatten)]
    verdict: Told,
    #[serde(skip_serializing_if = "Option::is_none")]
    limits: Option<Vec<OfLimit<'d>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    shadow: Option<Vec<OfLimit<'d>>>,
}

/// A decision; `limit` and `remaining` are null where no limit applies.
#[derive(Serialize)]
pub struct Told {
    allowed: bool,
    limit: Option<u64>,
    remaining: Option<u64>,
    retry_after_us: Option<u64>,
    reset_after_us: u64,
    /// Only told where it is so: the request crosses the threshold at which the limit warns.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    warned: bool,
    /// Only told of a limit with a debt.
    #[serde(skip_serializing_if = "Option::is_none")]
    owed: Option<NonZeroU64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    forgiven: Option<NonZeroU64>,
}

/// A number if it is the cost under all limits, and otherwise an object, as a trace line has it.
fn costs<S: Serializer>(costs: &LimitCosts, serializer: S) -> Result<S::Ok, S::Error> {
    if let Some(cost) = costs.uniform() {
        return serializer.serialize_u64(cost);
    }
    let (of_limits, others) = costs.parts();
    serializer.collect_map(of_limits.chain([(OTHERS, others)]))
}

/// The decision of one limit.
#[derive(Serialize)]
struct OfLimit<'d> {
    name: &'d str,
    #[serde(flatten)]
    told: Told,
}

impl Told {
    /// What a decision says.
    pub fn new(decision: &Decision, account: Account, warned: bool) -> Self {
        let Account { owed, forgiven, .. } = account;
        Self {
            allowed: decision.allowed,
            limit: Some(decision.limit),
            remaining: Some(decision.remaining),
            retry_after_us: decision.retry_after_us,
            reset_after_us: decision.reset_after_us,
            warned,
            owed: NonZeroU64::new(owed),
            forgiven: NonZeroU64::new(forgiven),
        }
    }
}

/// What a limit with a debt owes and forgives. Lines of other limits, and those of shadow limits,
/// have the fields that every line has.
fn account_of_debt(one: NamedDecision<'_, AnyAlgorithm>) -> Account {
    let limit = one.configured();
    let is_told = limit.algorithm().debt() > 0 && !limit.is_shadow();
    if is_told { one.account() } else { Account::default() }
}

impl<'d> DecisionLine<'d> {
    /// The line of a decided request.
    pub fn new(decided: &Decided<'d>) -> Self {
        let Decided { entry, limits, verdict, .. } = decided;
        let of_all = decided.named.clone().map(account_of_debt);
        let account = of_all.fold(Account::default(), |most, one| Account {
            owed: most.owed.max(one.owed),
            forgiven: most.forgiven.max(one.forgiven),
            charged: None,
        });
        let warned = decided.named.warned().next().is_some();
        let mut summary = Told::new(verdict.summary(), account, warned);
        if verdict.is_unlimited() {
            (summary.limit, summary.remaining) = (None, None);
        }
        let has_shadow = limits.iter().any(Limit::is_shadow);
        let of_limit = |one: NamedDecision<'d, AnyAlgorithm>| OfLimit {
            name: one.name(),
            told: Told::new(one.decision(), account_of_debt(one), one.is_warned()),
        };
        Self {
            at_us: Some(entry.at.as_us()),
            caller: &entry.caller,
            costs: &entry.costs,
            verdict: summary,
            limits: (limits.iter().len() > 1)
                .then(|| decided.named.clone().map(of_limit).collect()),
            shadow: has_shadow.then(|| decided.named.shadow().map(of_limit).collect()),
        }
    }
}

/// What a command tells of a caller: a list of this name.
#[derive(Serialize)]
struct OfCaller<'c, T> {
    #[serde(flatten)]
    caller: &'c Caller,
    #[serde(flatten)]
    list: BTreeMap<&'static str, T>,
}

/// A caller and a list of this name, as a line of JSON.
pub fn caller_json(caller: &Caller, name: &'static str, list: &[impl Serialize]) -> String {
    json_line(&OfCaller { caller, list: BTreeMap::from([(name, list)]) })
}

/// A value as a line of JSON.
pub fn json_line(value: &impl Serialize) -> String {
    // Into memory nothing fails.
    serde_json::to_string(value).unwrap_or_default() + "\n"
}

/// Values as lines of JSON.
pub fn json_lines(values: impl IntoIterator<Item = Value>) -> String {
    values.into_iter().map(|value| json_line(&value)).collect()
}

//! A replay by the plain limits, and what a report says of it.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use crate::limits::{Answer, Charge, Limit};
use crate::logs::Request;

/// What each limit charged to each key.
type Histories = BTreeMap<(String, String), Vec<Charge>>;

/// What the limits of a policy answered to a request.
#[derive(Clone, Debug)]
pub(crate) struct Decided {
    pub(crate) request: Request,
    pub(crate) allowed: bool,
    /// By the name of the limit, in the order of the policy: those that are enforced, then those in shadow.
    pub(crate) enforced: Vec<(String, Answer)>,
    pub(crate) shadow: Vec<(String, Answer)>,
}

impl Decided {
    pub(crate) fn each(&self) -> impl Iterator<Item = &(String, Answer)> {
        self.enforced.iter().chain(&self.shadow)
    }

    /// The enforced limits that denied.
    pub(crate) fn denying(&self) -> impl Iterator<Item = &str> {
        self.enforced.iter().filter(|(_, answer)| !answer.allowed).map(|(name, _)| name.as_str())
    }
}

/// Decides all requests, one after the other.
pub(crate) fn replayed(limits: &[Limit], requests: &[Request]) -> Vec<Decided> {
    let mut histories = Histories::new();
    requests.iter().map(|request| decided(limits, request, &mut histories)).collect()
}

fn decided(limits: &[Limit], request: &Request, histories: &mut Histories) -> Decided {
    let applies = |limit: &&Limit| request.key(&limit.identifiers).is_some();
    let at =
        |limit: &Limit| (limit.name.clone(), request.key(&limit.identifiers).expect("it applies"));
    let enforced: Vec<_> = limits.iter().filter(|limit| !limit.shadow).filter(applies).collect();
    let shadow: Vec<_> = limits.iter().filter(|limit| limit.shadow).filter(applies).collect();
    let mut fits = |limit: &&&Limit| {
        let history = histories.entry(at(limit)).or_default();
        limit.fits(history, request.at, request.cost(&limit.name))
    };
    let is_reset = request.op == "reset";
    let denied = !is_reset && enforced.iter().filter(|limit| !fits(limit)).count() > 0;
    let mut answer = |limit: &Limit, denied: bool| {
        let history = histories.entry(at(limit)).or_default();
        let cost = request.cost(&limit.name);
        if is_reset {
            history.clear();
            return (limit.name.clone(), limit.decide(history, (request.at, 0, None), false));
        }
        let before = history.clone();
        let answer = limit.decide(history, (request.at, cost, request.ends), denied);
        if request.op == "peek" {
            *history = before;
        }
        (limit.name.clone(), answer)
    };
    let enforced: Vec<_> = enforced.into_iter().map(|limit| answer(limit, denied)).collect();
    // A shadow limit is asked alone, of what the others admit.
    let asked = shadow.into_iter().filter(|_| !denied);
    let shadow = asked.map(|limit| {
        let (name, mut decided) = answer(limit, false);
        decided.allowed |= is_reset;
        (name, decided)
    });
    Decided { request: request.clone(), allowed: !denied, shadow: shadow.collect(), enforced }
}

/// The line of the decisions file, without the caller and the cost.
pub(crate) fn line(decided: &Decided, limits: &[Limit]) -> Value {
    let told = |answer: &Answer| {
        json!({
            "allowed": answer.allowed, "limit": answer.limit, "remaining": answer.remaining,
            "retry_after_us": answer.retry_after, "reset_after_us": answer.reset_after,
        })
    };
    let named = |(name, answer): &(String, Answer)| {
        let mut told = told(answer);
        told["name"] = json!(name);
        told
    };
    let answers = || decided.enforced.iter().map(|(_, answer)| answer);
    let mut line = match answers().min_by_key(|answer| answer.remaining) {
        Some(least) => told(least),
        None => json!({ "limit": null, "remaining": null }),
    };
    line["at_us"] = json!(decided.request.at);
    line["allowed"] = json!(decided.allowed);
    let retries: Option<Vec<_>> = answers().map(|answer| answer.retry_after).collect();
    line["retry_after_us"] = json!(retries.map(|retries| retries.into_iter().max().unwrap_or(0)));
    line["reset_after_us"] = json!(answers().map(|answer| answer.reset_after).max().unwrap_or(0));
    if limits.len() > 1 {
        line["limits"] = decided.enforced.iter().map(named).collect();
    }
    if limits.iter().any(|limit| limit.shadow) {
        line["shadow"] = decided.shadow.iter().map(named).collect();
    }
    line
}

/// Of each caller of a limit the smallest capacity with which the limit alone denies it nothing, the largest first.
pub(crate) fn needs(limit: &Limit, requests: &[Request]) -> Vec<u64> {
    let mut by_key: BTreeMap<String, Vec<Request>> = BTreeMap::new();
    for request in requests {
        let Some(key) = request.key(&limit.identifiers) else { continue };
        by_key.entry(key).or_default().push(request.clone());
    }
    by_key.retain(|_, of_key| of_key.iter().any(|request| request.op == "acquire"));
    let mut needs: Vec<_> = by_key
        .values()
        .map(|of_key| {
            let denies = |capacity: u64| {
                let alone = Limit { shadow: false, ..limit.with_capacity(capacity) };
                let is_denied = |one: &Decided| !one.allowed && one.request.op == "acquire";
                replayed(&[alone], of_key).iter().any(is_denied)
            };
            // What a capacity admits, a larger one admits.
            let (mut no, mut yes) =
                (0, of_key.iter().map(|request| request.cost(&limit.name)).sum::<u64>().max(1));
            while yes - no > 1 {
                let middle = no.midpoint(yes);
                if denies(middle) { no = middle } else { yes = middle }
            }
            yes
        })
        .collect();
    needs.sort_unstable_by(|a, b| b.cmp(a));
    needs
}

/// The answers of a limit to requests, each with its time.
pub(crate) fn answers(limit: &Limit, decided: &[Decided]) -> Vec<(u64, Answer)> {
    let requests = decided.iter().filter(|one| one.request.op == "acquire");
    let each =
        requests.flat_map(|one| one.each().map(|(name, answer)| (name, one.request.at, *answer)));
    each.filter(|(name, ..)| **name == limit.name).map(|(_, at, answer)| (at, answer)).collect()
}

/// How many requests a limit was asked about, and how many of these it denied.
pub(crate) fn counts(limit: &Limit, decided: &[Decided]) -> [usize; 2] {
    let answers = answers(limit, decided);
    [answers.len(), answers.iter().filter(|(_, answer)| !answer.allowed).count()]
}

/// The callers of a limit that it denied at least once, and all.
pub(crate) fn callers(limit: &Limit, decided: &[Decided]) -> [usize; 2] {
    let mut callers = [BTreeSet::new(), BTreeSet::new()];
    for one in decided.iter().filter(|one| one.request.op == "acquire") {
        let Some((_, answer)) = one.each().find(|(name, _)| *name == limit.name) else { continue };
        let key = one.request.key(&limit.identifiers).expect("it applied");
        callers[1].insert(key.clone());
        if !answer.allowed {
            callers[0].insert(key);
        }
    }
    callers.map(|callers| callers.len())
}

/// Whom a denied request is blamed on: the first identifiers of the limits that denied it, each with its value.
pub(crate) fn blamed(limits: &[Limit], one: &Decided) -> BTreeSet<(String, String)> {
    let first = |name: &str| {
        let limit = limits.iter().find(|limit| limit.name == name).expect("a limit");
        let name = *limit.identifiers.first().unwrap_or(&"key");
        (name.to_owned(), one.request.caller[name].clone())
    };
    one.denying().map(first).collect()
}

/// The rows of "who is hurt", by caller: requests, denials, and denials by limit.
pub(crate) fn hurt(limits: &[Limit], decided: &[Decided]) -> BTreeMap<(String, String), Value> {
    let requests = || decided.iter().filter(|one| one.request.op == "acquire");
    let mut rows = BTreeMap::new();
    for caller in requests().flat_map(|one| blamed(limits, one)).collect::<BTreeSet<_>>() {
        let (name, value) = &caller;
        let is_its = |one: &&Decided| one.request.caller.get(name) == Some(value);
        let denials: Vec<_> =
            requests().filter(|one| blamed(limits, one).contains(&caller)).collect();
        let mut by_limit: BTreeMap<String, u64> = BTreeMap::new();
        for denying in denials.iter().flat_map(|one| one.denying()) {
            let limit = limits.iter().find(|limit| limit.name == denying).expect("a limit");
            if limit.identifiers.first().unwrap_or(&"key") == name {
                *by_limit.entry(denying.to_owned()).or_default() += 1;
            }
        }
        let row = json!({
            "identifier": name, "value": value, "requests": requests().filter(is_its).count(),
            "denied": denials.len(), "by_limit": by_limit,
        });
        rows.insert(caller, row);
    }
    rows
}

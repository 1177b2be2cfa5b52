//! A replay by the plain limits, and what a report says of it.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use crate::limits::{Answer, Asked, Charge, Limit};
use crate::logs::Request;

/// What each limit charged to each key.
type Histories = BTreeMap<(String, String), History>;

/// What a limit charged to a key, and the limit that did so last.
type History = (Vec<Charge>, Option<Limit>);

/// A history as this limit sees it.
fn seen(limit: &Limit, (history, by): &History) -> Vec<Charge> {
    by.as_ref().map_or_else(|| history.clone(), |by| limit.taken_over(by, history))
}

/// What the limits of a policy answered to a request.
#[derive(Clone, Debug)]
pub(crate) struct Decided {
    pub(crate) request: Request,
    pub(crate) allowed: bool,
    /// By the name of the limit, in the order of the policy: those that are enforced, then those in
    /// shadow.
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
pub(crate) fn replay_all(limits: &[Limit], requests: &[Request]) -> Vec<Decided> {
    let mut histories = Histories::new();
    let mut decide = |request: &Request| {
        for limit in limits.iter().filter(|limit| limit.algorithm == "concurrency") {
            let of_it = histories.iter_mut().filter(|((name, _), _)| *name == limit.name);
            of_it.for_each(|(_, (history, _))| limit.end(history, request.line));
        }
        decide(limits, request, &mut histories)
    };
    requests.iter().map(&mut decide).collect()
}

fn decide(limits: &[Limit], request: &Request, histories: &mut Histories) -> Decided {
    // Each at the number that the request brings.
    let own = |limit: &Limit| match request.numbers.get(&limit.name) {
        Some(number) => limit.at_number(*number),
        None => limit.clone(),
    };
    let limits: Vec<_> = limits.iter().map(own).collect();
    let applies = |limit: &&Limit| request.key(limit).is_some();
    let at = |limit: &Limit| (limit.name.clone(), request.key(limit).expect("it applies"));
    let enforced: Vec<_> = limits.iter().filter(|limit| !limit.shadow).filter(applies).collect();
    let shadow: Vec<_> = limits.iter().filter(|limit| limit.shadow).filter(applies).collect();
    let mut fits = |limit: &&&Limit| {
        let history = seen(limit, histories.entry(at(limit)).or_default());
        limit.fits(&history, request.at, request.cost(&limit.name))
    };
    let is_asked = ["acquire", "peek"].contains(&&*request.op);
    let denied = is_asked && enforced.iter().filter(|limit| !fits(limit)).count() > 0;
    let mut answer = |limit: &Limit, denied: bool| {
        let known = histories.entry(at(limit)).or_default();
        let (op, cost, over) = (&*request.op, request.cost(&limit.name), request.over);
        let mut history = seen(limit, known);
        let before = history.len();
        let answer = limit.decide(&mut history, Asked { op, at: request.at, cost, over }, denied);
        // A limit that writes nothing takes nothing over.
        let writes = !["acquire", "peek"].contains(&op) || history.len() > before;
        if op != "peek" && writes {
            *known = (history, Some(limit.clone()));
        }
        (limit.name.clone(), answer)
    };
    let enforced: Vec<_> = enforced.into_iter().map(|limit| answer(limit, denied)).collect();
    // A shadow limit is asked alone, of what the others admit.
    let asked = shadow.into_iter().filter(|_| !denied);
    let shadow = asked.map(|limit| answer(limit, false));
    Decided { request: request.clone(), allowed: !denied, shadow: shadow.collect(), enforced }
}

/// The line of the decisions file, without the caller and the cost.
pub(crate) fn line(decided: &Decided, limits: &[Limit]) -> Value {
    let account = |line: &mut Value, [owed, forgiven]: [u64; 2]| {
        for (name, number) in [("owed", owed), ("forgiven", forgiven)] {
            if number > 0 {
                line[name] = json!(number);
            }
        }
    };
    let told = |answer: &Answer| {
        json!({
            "allowed": answer.allowed, "limit": answer.limit, "remaining": answer.remaining,
            "retry_after_us": answer.retry_after, "reset_after_us": answer.reset_after,
        })
    };
    let named = |(name, answer): &(String, Answer)| {
        let mut told = told(answer);
        told["name"] = json!(name);
        account(&mut told, [answer.owed, answer.forgiven]);
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
    let most = |of: fn(&Answer) -> u64| answers().map(of).max().unwrap_or(0);
    account(&mut line, [most(|answer| answer.owed), most(|answer| answer.forgiven)]);
    if limits.len() > 1 {
        line["limits"] = decided.enforced.iter().map(named).collect();
    }
    if limits.iter().any(|limit| limit.shadow) {
        line["shadow"] = decided.shadow.iter().map(named).collect();
    }
    line
}

/// Of each caller of a limit the smallest capacity with which the limit alone denies it nothing,
/// the largest first.
pub(crate) fn needs(limit: &Limit, requests: &[Request]) -> Vec<u64> {
    let mut by_key: BTreeMap<String, Vec<Request>> = BTreeMap::new();
    for request in requests {
        let Some(key) = request.key(limit) else { continue };
        by_key.entry(key).or_default().push(request.clone());
    }
    by_key.retain(|_, of_key| of_key.iter().any(|request| request.op == "acquire"));
    let mut needs: Vec<_> = by_key.values().map(|of_key| need(limit, of_key)).collect();
    needs.sort_unstable_by(|a, b| b.cmp(a));
    needs
}

/// The smallest capacity with which the limit alone denies the requests of this caller nothing.
fn need(limit: &Limit, requests: &[Request]) -> u64 {
    let is_enough: Box<dyn Fn(u64) -> bool> = if requests.iter().any(|one| one.op == "force") {
        // Forced charges count in full: what was used at most of each window without a bound must
        // fit.
        let used = |wide: Limit| alone(&wide, requests).map(|(_, used)| used).max().unwrap_or(1);
        let used: Vec<_> = limit.unbounded().into_iter().map(used).collect();
        Box::new(move |capacity| {
            let larger = limit.with_capacity(capacity);
            let room = if limit.is_bucket() { vec![capacity] } else { larger.counts() };
            room.iter().zip(&used).all(|(room, used)| used <= room)
        })
    } else {
        Box::new(|capacity| {
            alone(&limit.with_capacity(capacity), requests).all(|(is_admitted, _)| is_admitted)
        })
    };
    // What a capacity admits, a larger one admits.
    let costs: u64 = requests.iter().map(|request| request.cost(&limit.name)).sum();
    let (mut no, mut yes) = (0, costs.max(1) * limit.capacity());
    while yes - no > 1 {
        let middle = no.midpoint(yes);
        if is_enough(middle) { yes = middle } else { no = middle }
    }
    yes
}

/// Of each request to be admitted that one caller makes of one limit: whether it is, and what is
/// used then.
fn alone(limit: &Limit, requests: &[Request]) -> impl Iterator<Item = (bool, u64)> {
    let mut history = Vec::new();
    requests.iter().filter_map(move |request| {
        limit.end(&mut history, request.line);
        let (op, cost, over) = (&*request.op, request.cost(&limit.name), request.over);
        if op == "peek" {
            return None;
        }
        let (fits, _) = limit.charge(&mut history, Asked { op, at: request.at, cost, over }, false);
        (op == "acquire").then(|| (fits, limit.used_at(&history, request.at)))
    })
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
        let key = one.request.key(limit).expect("it applied");
        callers[1].insert(key.clone());
        if !answer.allowed {
            callers[0].insert(key);
        }
    }
    callers.map(|callers| callers.len())
}

/// Whom a denied request is blamed on: the first identifiers of the limits that denied it, each
/// with its value.
pub(crate) fn callers_to_blame(limits: &[Limit], one: &Decided) -> BTreeSet<(String, String)> {
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
    for caller in requests().flat_map(|one| callers_to_blame(limits, one)).collect::<BTreeSet<_>>()
    {
        let (name, value) = &caller;
        let is_its = |one: &&Decided| one.request.caller.get(name) == Some(value);
        let denials: Vec<_> =
            requests().filter(|one| callers_to_blame(limits, one).contains(&caller)).collect();
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

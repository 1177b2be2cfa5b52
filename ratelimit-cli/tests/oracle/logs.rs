//! Plain readers of what the tool reads: each takes a line apart by its fixed parts.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::limits::{Limit, Over};

/// A request of a log.
#[derive(Clone, Debug, Default)]
pub(crate) struct Request {
    pub(crate) at: u64,
    /// The identifiers, `key` for a bare one.
    pub(crate) caller: BTreeMap<String, String>,
    /// By limit, `*` for the others.
    pub(crate) costs: BTreeMap<String, u64>,
    /// The numbers that it brings, each by the name of its limit.
    pub(crate) numbers: BTreeMap<String, u64>,
    pub(crate) op: String,
    /// How long it took.
    pub(crate) took: Option<u64>,
    /// The place of its line in the file, from 1.
    pub(crate) line: usize,
    pub(crate) over: Option<Over>,
}

/// What a log has.
#[derive(Debug, Default)]
pub(crate) struct Log {
    /// In the order in which they are decided.
    pub(crate) requests: Vec<Request>,
    /// The places of lines that are no requests.
    pub(crate) bad: Vec<usize>,
    /// How many lines came after a later one, and how many others too late to be sorted in.
    pub(crate) behind: usize,
    pub(crate) late: usize,
    pub(crate) is_trace: bool,
}

impl Log {
    /// Leaves out the requests that these limits cannot decide.
    pub(crate) fn without_undecidable(mut self, limits: &[Limit]) -> Self {
        let is_known = |name: &String| name == "*" || limits.iter().any(|one| one.name == *name);
        let is_whole = |request: &Request| {
            let required = limits.iter().filter(|limit| limit.required && !limit.shadow);
            let accepts = |(name, number): (&String, &u64)| {
                limits
                    .iter()
                    .any(|one| one.name == *name && one.max.is_some_and(|max| *number <= max))
            };
            request.costs.keys().all(is_known)
                && request.numbers.iter().all(accepts)
                && required
                    .clone()
                    .all(|limit| !request.meets(limit) || request.key(limit).is_some())
        };
        let (whole, bad): (Vec<_>, Vec<_>) = self.requests.into_iter().partition(is_whole);
        self.bad.extend(bad.iter().map(|request| request.line));
        self.bad.sort_unstable();
        self.requests = whole;
        for (place, request) in self.requests.iter_mut().enumerate() {
            request.line = place;
        }
        for place in 0..self.requests.len() {
            let (at, took) = (self.requests[place].at, self.requests[place].took);
            let later = self.requests.iter().skip(place + 1);
            let over = took.and_then(|took| later.clone().find(|later| later.at >= at + took));
            let over = over.zip(took).map(|(later, took)| Over { line: later.line, at: at + took });
            self.requests[place].over = over;
        }
        self
    }
}

impl Request {
    pub(crate) fn cost(&self, limit: &str) -> u64 {
        self.costs.get(limit).or(self.costs.get("*")).copied().unwrap_or(1)
    }

    /// Whether it meets the condition of a limit.
    pub(crate) fn meets(&self, limit: &Limit) -> bool {
        let Some((name, values, excludes)) = limit.when else { return true };
        let has = self.caller.get(name).is_some_and(|own| {
            values.iter().any(|value| match value.split_once('*') {
                Some((start, _)) => own.starts_with(start),
                None => own == value,
            })
        });
        has != excludes
    }

    /// The key under a limit; `None` if that does not apply.
    pub(crate) fn key(&self, limit: &Limit) -> Option<String> {
        let names = match &limit.identifiers[..] {
            [] => &["key"][..],
            names => names,
        };
        let values: Option<Vec<_>> =
            names.iter().map(|name| self.caller.get(*name).cloned()).collect();
        values.filter(|_| self.meets(limit)).map(|values| values.join("\n"))
    }
}

/// What stands between two texts.
fn between<'t>(text: &'t str, from: &str, to: &str) -> &'t str {
    let rest = &text[text.find(from).expect(from) + from.len()..];
    &rest[..rest.find(to).expect(to)]
}

/// An access log, in the order of its times. A line waits until one comes that is more than five
/// minutes later, and is decided before the later ones that wait.
pub(crate) fn access_log(text: &str) -> Log {
    let (mut log, mut waiting, mut latest) = (Log::default(), Vec::<Request>::new(), 0);
    for (place, line) in text.lines().enumerate() {
        let request = Request { line: place + 1, ..access_line(line) };
        let is_late = log.requests.iter().any(|decided| decided.at > request.at);
        log.late += usize::from(is_late);
        log.behind += usize::from(request.at < latest && !is_late);
        latest = latest.max(request.at);
        waiting.push(request);
        waiting.sort_by_key(|request| request.at);
        let due = waiting.iter().take_while(|request| latest - request.at > 300_000_000).count();
        log.requests.extend(waiting.drain(..due));
    }
    log.requests.extend(waiting);
    log
}

/// A trace, in the order of its lines, of which those without a request are bad.
fn trace(requests: impl Iterator<Item = (usize, Option<Request>)>) -> Log {
    let (mut log, mut latest) = (Log { is_trace: true, ..Log::default() }, 0);
    for (line, request) in requests {
        match request {
            Some(request) => {
                log.behind += usize::from(request.at < latest);
                latest = latest.max(request.at);
                log.requests.push(Request { line, ..request });
            }
            None => log.bad.push(line),
        }
    }
    log
}

fn is_op(op: &str) -> bool {
    ["acquire", "peek", "refund", "force", "reset"].contains(&op)
}

fn access_line(line: &str) -> Request {
    let at = moment(between(line, "[", "]"));
    let ip = line.split(' ').next().expect("an address");
    let mut caller =
        BTreeMap::from([("ip".to_owned(), ip.to_owned()), ("key".to_owned(), ip.to_owned())]);
    let user = between(line, " - ", " [");
    if user != "-" {
        caller.insert("user".to_owned(), user.to_owned());
    }
    let mut request = between(line, "\"", "\"").split(' ');
    caller.insert("method".to_owned(), request.next().expect("a method").to_owned());
    let target = request.next().expect("a target");
    caller.insert("path".to_owned(), target.split('?').next().expect("a path").to_owned());
    let took = line.rsplit(' ').next().filter(|last| last.contains('.') && !last.contains('"'));
    let took = took.map(|took| took.replace('.', "").parse::<u64>().expect("milliseconds") * 1_000);
    // nginx writes a line's time when the request has ended.
    let at = at - took.unwrap_or(0);
    Request { at, caller, op: "acquire".to_owned(), took, ..Request::default() }
}

/// The microseconds of `29/Mar/2026:02:30:00 +0200`, by counting days.
fn moment(text: &str) -> u64 {
    const MONTHS: &str = "JanFebMarAprMayJunJulAugSepOctNovDec";
    let number = |range: std::ops::Range<usize>| text[range].parse::<i64>().expect("a number");
    let (day, year) = (number(0..2), number(7..11));
    let month = MONTHS.find(&text[3..6]).expect("a month") / 3;
    let leap = |year: i64| year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let mut days: i64 = (1970..year).map(|year| 365 + i64::from(leap(year))).sum();
    let lengths = [31, 28 + i64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    days += lengths[..month].iter().sum::<i64>() + day - 1;
    let seconds = (days * 24 + number(12..14)) * 3_600 + number(15..17) * 60 + number(18..20);
    let zone = (number(22..24) * 60 + number(24..26)) * 60;
    let utc = if &text[21..22] == "-" { seconds + zone } else { seconds - zone };
    u64::try_from(utc).expect("after 1970") * 1_000_000
}

/// A trace of JSON lines.
pub(crate) fn jsonl(text: &str) -> Log {
    let request = |line: &str| {
        let line: Value = serde_json::from_str(line).expect("JSON");
        let text = |value: &Value| value.as_str().expect("a text").to_owned();
        let number = |value: &Value| value.as_u64().expect("a number");
        let named = line["keys"].as_object().into_iter().flatten();
        let mut caller: BTreeMap<_, _> =
            named.map(|(name, value)| (name.clone(), text(value))).collect();
        caller.extend(line["key"].as_str().map(|key| ("key".to_owned(), key.to_owned())));
        let costs = match &line["cost"] {
            Value::Object(costs) => {
                costs.iter().map(|(name, cost)| (name.clone(), number(cost))).collect()
            }
            Value::Null => BTreeMap::new(),
            cost => BTreeMap::from([("*".to_owned(), number(cost))]),
        };
        let numbers = line["numbers"].as_object().into_iter().flatten();
        let numbers = numbers.map(|(limit, own)| (limit.clone(), own_number(&text(own)))).collect();
        let at = number(&line["at_us"]);
        let op = line["op"].as_str().unwrap_or("acquire").to_owned();
        let took = line["duration_us"].as_u64();
        is_op(&op).then(|| Request { at, caller, costs, numbers, op, took, ..Request::default() })
    };
    trace((1..).zip(text.lines().map(request)))
}

/// The number that numbers are drawn at: of a bucket its burst, else its first count.
fn own_number(text: &str) -> u64 {
    let count = || text.split(' ').find_map(|word| Some(word.split_once('/')?.0.to_owned()));
    let burst = text.split_once("burst ").map(|(_, rest)| rest.to_owned());
    burst.or_else(count).expect("a number").parse().expect("a number")
}

/// The cells of a line, of which some are quoted.
fn cells(line: &str) -> impl Iterator<Item = &str> {
    let mut is_quoted = false;
    let ends = move |sign| {
        is_quoted ^= sign == '"';
        sign == ',' && !is_quoted
    };
    line.split(ends).map(|cell| cell.trim_matches('"'))
}

/// A trace of cells under a header.
pub(crate) fn csv(text: &str) -> Log {
    let mut lines = text.lines();
    let header: Vec<_> = lines.next().expect("a header").split(',').collect();
    let request = |line: &str| {
        let mut request = Request { op: "acquire".to_owned(), ..Request::default() };
        for (column, cell) in header.iter().zip(cells(line)).filter(|(_, cell)| !cell.is_empty()) {
            let number = || cell.parse::<u64>().expect("a number");
            match *column {
                "at_us" => request.at = number(),
                "op" => request.op = cell.to_owned(),
                "duration_us" => request.took = Some(number()),
                "cost" => drop(request.costs.insert("*".to_owned(), number())),
                column => match column.split_once(':') {
                    Some(("cost", limit)) => _ = request.costs.insert(limit.to_owned(), number()),
                    Some((_, limit)) => {
                        _ = request.numbers.insert(limit.to_owned(), own_number(cell));
                    }
                    None => drop(request.caller.insert(column.to_owned(), cell.to_owned())),
                },
            }
        }
        is_op(&request.op).then_some(request)
    };
    trace((2..).zip(lines.map(request)))
}

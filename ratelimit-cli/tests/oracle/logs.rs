//! Plain readers of what the tool reads: each takes a line apart by its fixed parts.

use std::collections::BTreeMap;

use serde_json::Value;

/// A request of a log.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) at: u64,
    /// The identifiers, `key` for a bare one.
    pub(crate) caller: BTreeMap<String, String>,
    /// By limit, `*` for the others.
    pub(crate) costs: BTreeMap<String, u64>,
    pub(crate) op: String,
    pub(crate) ends: Option<u64>,
}

impl Request {
    pub(crate) fn cost(&self, limit: &str) -> u64 {
        self.costs.get(limit).or(self.costs.get("*")).copied().unwrap_or(1)
    }

    /// The key under these identifiers.
    pub(crate) fn key(&self, identifiers: &[&str]) -> Option<String> {
        let names = if identifiers.is_empty() { &["key"][..] } else { identifiers };
        let values: Option<Vec<_>> =
            names.iter().map(|name| self.caller.get(*name).cloned()).collect();
        values.map(|values| values.join("\n"))
    }
}

/// What stands between two texts.
fn between<'t>(text: &'t str, from: &str, to: &str) -> &'t str {
    let rest = &text[text.find(from).expect(from) + from.len()..];
    &rest[..rest.find(to).expect(to)]
}

/// An access log, in the order of its times.
pub(crate) fn access_log(text: &str) -> Vec<Request> {
    let mut requests: Vec<_> = text.lines().map(access_line).collect();
    requests.sort_by_key(|request| request.at);
    requests
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
    let target = between(line, "\"", "\"").split(' ').nth(1).expect("a target");
    caller.insert("path".to_owned(), target.split('?').next().expect("a path").to_owned());
    let took = line.rsplit(' ').next().filter(|last| last.contains('.') && !last.contains('"'));
    let ends =
        took.map(|took| at + took.replace('.', "").parse::<u64>().expect("milliseconds") * 1_000);
    Request { at, caller, costs: BTreeMap::new(), op: "acquire".to_owned(), ends }
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

/// A trace of JSON lines, in their order.
pub(crate) fn jsonl(text: &str) -> Vec<Request> {
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
        let at = number(&line["at_us"]);
        let op = line["op"].as_str().unwrap_or("acquire").to_owned();
        Request { at, caller, costs, op, ends: line["duration_us"].as_u64().map(|us| at + us) }
    };
    text.lines().map(request).collect()
}

/// A trace of plain cells under a header, in the order of its lines.
pub(crate) fn csv(text: &str) -> Vec<Request> {
    let mut lines = text.lines();
    let header: Vec<_> = lines.next().expect("a header").split(',').collect();
    let request = |line: &str| {
        let mut request = Request {
            at: 0,
            caller: BTreeMap::new(),
            costs: BTreeMap::new(),
            op: "acquire".to_owned(),
            ends: None,
        };
        let mut took = None;
        for (column, cell) in
            header.iter().zip(line.split(',')).filter(|(_, cell)| !cell.is_empty())
        {
            let number = || cell.parse::<u64>().expect("a number");
            match *column {
                "at_us" => request.at = number(),
                "op" => request.op = cell.to_owned(),
                "duration_us" => took = Some(number()),
                "cost" => drop(request.costs.insert("*".to_owned(), number())),
                column => match column.strip_prefix("cost:") {
                    Some(limit) => drop(request.costs.insert(limit.to_owned(), number())),
                    None => drop(request.caller.insert(column.to_owned(), cell.to_owned())),
                },
            }
        }
        request.ends = took.map(|took| request.at + took);
        request
    };
    lines.map(request).collect()
}

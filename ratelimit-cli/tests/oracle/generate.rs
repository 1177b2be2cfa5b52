//! Logs, traces and policies, drawn from a seed. Times repeat, local times repeat an hour later in
//! another zone, a lease ends when the next request comes, and lines are out of order, some by more
//! than a log is sorted.

use std::fmt::Write as _;

use crate::limits::Limit;

/// A generator of numbers (Knuth's MMIX).
pub(crate) struct Draw(pub(crate) u64);

impl Draw {
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }

    fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[usize::try_from(self.below(all.len() as u64)).expect("few")]
    }

    /// The smaller come more often.
    fn mostly_small(&mut self, n: u64) -> u64 {
        let most = self.below(n) + 1;
        self.below(most)
    }
}

const ALGORITHMS: [&str; 9] = [
    "gcra",
    "token-bucket",
    "fixed-window",
    "first-request-window",
    "sliding-log",
    "window-log",
    "sliding-counter",
    "bucketed-window",
    "concurrency",
];
const PERIODS: [(&str, u64); 4] =
    [("s", 1_000_000), ("10s", 10_000_000), ("m", 60_000_000), ("h", 3_600_000_000)];
const IDENTIFIERS: [&[&str]; 7] =
    [&["ip"], &["user"], &["path"], &["ip", "path"], &["user", "ip"], &[], &["ip"]];

/// Those of access logs and of traces.
const CONDITIONS: [(&str, [&str; 2], bool); 6] = [
    ("path", ["/login", "1"], false),
    ("path", ["/*", "2*"], false),
    ("path", ["/a*", "1"], true),
    ("user", ["b*", "1"], false),
    ("user", ["bob", "*"], true),
    ("method", ["POST", "PUT"], false),
];

/// Two to five limits that differ in all that limits differ in, in any order.
pub(crate) fn limits(draw: &mut Draw) -> Vec<Limit> {
    let mut names = vec!["alpha", "beta", "gamma", "delta", "omega"];
    let mut limits = Vec::new();
    for _ in 0..2 + draw.below(4) {
        let place = usize::try_from(draw.below(names.len() as u64)).expect("few");
        let algorithm = draw.one_of(&ALGORITHMS);
        let identifiers = draw.one_of(&IDENTIFIERS).to_vec();
        let when = (draw.below(4) == 0).then(|| draw.one_of(&CONDITIONS));
        let may_attempt = !["bucketed-window", "concurrency"].contains(&algorithm);
        let may_owe = ["gcra", "token-bucket", "fixed-window"].contains(&algorithm);
        let attempts = may_attempt && draw.below(4) == 0;
        let first = draw.below(4);
        let periods = PERIODS.iter().cycle().skip(usize::try_from(first).expect("few"));
        let further = if algorithm == "bucketed-window" { draw.below(3) } else { 0 };
        let further: Vec<_> =
            periods.skip(1).take(usize::try_from(further).expect("few")).collect();
        let period = PERIODS[usize::try_from(first).expect("few")];
        let shortest = further.iter().map(|period| **period).chain([period]);
        limits.push(Limit {
            name: names.swap_remove(place).to_owned(),
            // One that counts by what it excludes is refused.
            when: when.filter(|(name, ..)| *name != "user" || !identifiers.contains(name)),
            identifiers,
            algorithm,
            count: 1 + draw.below(9),
            windows: further.iter().map(|period| (1 + draw.below(15), **period)).collect(),
            bucket: match shortest.min_by_key(|(_, us)| *us).expect("one") {
                ("10s", _) => ("2s", 2_000_000),
                shortest => shortest,
            },
            period,
            burst: 1 + draw.below(9),
            debt: if may_owe && !attempts && draw.below(2) == 0 { 1 + draw.below(15) } else { 0 },
            attempts,
            required: draw.below(12) == 0,
            shadow: draw.below(4) == 0,
            max: None,
        });
    }
    limits
}

/// Limits that accept the numbers of requests, lockouts among them. Some admit nothing.
pub(crate) fn limits_with_numbers(draw: &mut Draw) -> Vec<Limit> {
    let mut limits = limits(draw);
    for limit in &mut limits {
        (limit.debt, limit.attempts) = (0, false);
        if draw.below(4) == 0 {
            (limit.algorithm, limit.windows) = ("lockout", Vec::new());
        }
        limit.max = (draw.below(5) > 0).then_some(15);
        if limit.algorithm != "lockout" && draw.below(6) == 0 {
            (limit.count, limit.burst) = (0, 0);
        }
    }
    limits
}

/// The same names with other numbers, in another order.
pub(crate) fn change_limits(limits: &[Limit], draw: &mut Draw) -> Vec<Limit> {
    let change = |limit: &Limit| Limit {
        count: 1 + draw.below(9),
        burst: 1 + draw.below(9),
        period: match limit.algorithm {
            "bucketed-window" => limit.period,
            _ => draw.one_of(&PERIODS),
        },
        debt: if limit.debt > 0 { 1 + draw.below(15) } else { 0 },
        ..limit.clone()
    };
    limits.iter().rev().map(change).collect()
}

pub(crate) fn toml(limits: &[Limit]) -> String {
    limits.iter().map(Limit::toml).collect()
}

/// An access log around the end of daylight saving, in several zones.
pub(crate) fn access_log(draw: &mut Draw) -> String {
    // 2026-10-24T22:00:00Z.
    let (mut at, mut lines) = (1_792_879_200_u64, Vec::new());
    let is_combined = draw.below(2) == 0;
    for _ in 0..220 {
        at += match draw.below(40) {
            // An hour later, clocks in the zone that follows show the same.
            0 => 3_600,
            1..=12 => 0,
            13..=30 => 1,
            _ => draw.below(40),
        };
        let zone = match draw.below(8) {
            0 => ("-0530", -19_800),
            1 => ("+0000", 0),
            // Berlin, until and from 01:00 UTC.
            _ if at < 1_792_890_000 => ("+0200", 7_200),
            _ => ("+0100", 3_600),
        };
        // Since midnight of the 23rd.
        let local = at.checked_add_signed(zone.1).expect("after 1970") - 1_792_713_600;
        let (day, second) = (23 + local / 86_400, local % 86_400);
        let time = format!(
            "{day:02}/Oct/2026:{:02}:{:02}:{:02} {}",
            second / 3_600,
            second / 60 % 60,
            second % 60,
            zone.0
        );
        let user = draw.one_of(&["-", "bob", "carol", "-"]);
        let path = draw.one_of(&["/", "/a", "/login", "/a?x=1"]);
        let method = draw.one_of(&["GET", "GET", "POST"]);
        let more = if is_combined { " \"-\" \"agent 1.0\"" } else { "" };
        let mut line = format!(
            "192.0.2.{} - {user} [{time}] \"{method} {path} HTTP/1.1\" 200 5{more}",
            draw.mostly_small(6)
        );
        write!(line, " {}.000", draw.below(4)).expect("a text");
        lines.push((at, line));
    }
    // A server writes a line when it has answered: some come later, and few more than five minutes
    // later.
    for place in 0..lines.len() - 4 {
        let other = place + usize::try_from(draw.below(4)).expect("few");
        if draw.below(3) == 0 && lines[other].0.abs_diff(lines[place].0) < 200 {
            lines.swap(place, other);
        }
        if draw.below(20) == 0 {
            let wait = draw.one_of(&[299, 300, 301, 900]);
            let (at, line) = lines.remove(place);
            let later = lines[place..].iter().take_while(|(later, _)| *later < at + wait).count();
            lines.insert(place + later, (at, line));
        }
    }
    lines.into_iter().map(|(_, line)| line + "\n").collect()
}

/// One request of a trace, as its parts.
struct Traced {
    at: u64,
    key: Option<u64>,
    named: Vec<(&'static str, u64)>,
    cost: Option<u64>,
    under: Option<(String, u64)>,
    /// The name of a limit, and numbers for it.
    numbers: Option<(String, String)>,
    op: &'static str,
    took: Option<u64>,
}

/// Requests at repeated times, of which some lie before the one that they follow.
fn draw_requests(limits: &[Limit], draw: &mut Draw) -> Vec<Traced> {
    let mut at = 1_792_893_600_000_000_u64;
    let mut traced = Vec::new();
    let with_numbers = limits.iter().any(|limit| limit.max.is_some());
    // What these do to a state that other numbers have left is another law's.
    let has_others = draw.below(3) > 0 && !with_numbers;
    for _ in 0..220 {
        at += match draw.below(10) {
            0..=2 => 0,
            3..=7 => draw.below(10) * 100_000,
            8 => draw.below(40) * 500_000,
            _ => 1_000_000,
        };
        let mut named = Vec::new();
        for (name, of) in [("ip", 5), ("user", 3), ("path", 3)] {
            if draw.below(5) > 0 {
                named.push((name, draw.mostly_small(of)));
            }
        }
        let key = (named.is_empty() || draw.below(2) == 0).then(|| draw.mostly_small(3));
        let limit = &limits[usize::try_from(draw.below(limits.len() as u64)).expect("few")];
        let own = &limits[usize::try_from(draw.below(limits.len() as u64)).expect("few")];
        // Few bring more than is accepted, or numbers where none are. Of several windows, a longer
        // one may hold what a shorter one is too large for.
        let is_larger = draw.below(30) == 0 && own.windows.is_empty();
        let number = if is_larger { 16 } else { draw.below(10) };
        let number = if own.algorithm == "lockout" { number.max(1) } else { number };
        let is_accepted = own.max.is_some_and(|max| number <= max) || draw.below(8) == 0;
        let brings = with_numbers && draw.below(2) == 0 && is_accepted;
        traced.push(Traced {
            numbers: brings.then(|| (own.name.clone(), own.at_number(number).numbers())),
            at: if draw.below(12) == 0 { at - draw.below(2_000_000) } else { at },
            key,
            named,
            cost: (draw.below(3) == 0).then(|| draw.below(5)),
            under: (draw.below(4) == 0).then(|| (limit.name.clone(), draw.below(6))),
            op: match draw.below(40) {
                0..=1 => "peek",
                2..=3 => "reset",
                4..=7 if has_others => "refund",
                8..=10 if has_others => "force",
                11 if has_others => "steal",
                _ => "acquire",
            },
            // The next request may come when it is over.
            took: (draw.below(3) > 0).then(|| draw.below(20) * 100_000),
        });
    }
    traced
}

pub(crate) fn jsonl(limits: &[Limit], draw: &mut Draw) -> String {
    let line = |request: Traced| {
        let mut line = format!("{{\"at_us\":{}", request.at);
        line += &request.key.map_or(String::new(), |key| format!(",\"key\":\"k{key}\""));
        let named = request.named.iter().map(|(name, value)| format!("\"{name}\":\"{value}\""));
        line += &format!(",\"keys\":{{{}}}", named.collect::<Vec<_>>().join(","));
        line += &match (request.cost, request.under) {
            (None, None) => String::new(),
            (Some(cost), None) => format!(",\"cost\":{cost}"),
            (cost, Some((limit, under))) => {
                format!(",\"cost\":{{\"{limit}\":{under},\"*\":{}}}", cost.unwrap_or(1))
            }
        };
        line += &request.numbers.map_or(String::new(), |(limit, numbers)| {
            format!(",\"numbers\":{{\"{limit}\":\"{numbers}\"}}")
        });
        line += &request.took.map_or(String::new(), |took| format!(",\"duration_us\":{took}"));
        line + &format!(",\"op\":\"{}\"}}\n", request.op)
    };
    draw_requests(limits, draw).into_iter().map(line).collect()
}

pub(crate) fn csv(limits: &[Limit], draw: &mut Draw) -> String {
    // The columns of costs stand on both sides of the plain one.
    let (first, others) = limits.split_first().expect("limits");
    let of_cost = others.iter().map(|limit| format!(",cost:{}", limit.name));
    let of_numbers = limits.iter().filter(|limit| limit.max.is_some());
    let of_numbers = of_numbers.map(|limit| format!(",numbers:{}", limit.name));
    let others: String = of_cost.chain(of_numbers).collect();
    let header =
        format!("op,cost:{},ip,path,at_us,user,cost,duration_us,key{others}\n", first.name);
    let text = |number: Option<u64>| number.map_or(String::new(), |number| number.to_string());
    let line = |request: Traced| {
        let of = |name: &str| {
            text(request.named.iter().find(|(of, _)| *of == name).map(|(_, value)| *value))
        };
        let under = |limit: &Limit| match &request.under {
            Some((name, cost)) if *name == limit.name => cost.to_string(),
            _ => String::new(),
        };
        let own = |limit: &Limit| match &request.numbers {
            // Several windows are one cell.
            Some((name, numbers)) if *name == limit.name => format!("\"{numbers}\""),
            _ => String::new(),
        };
        let numbers = limits.iter().filter(|limit| limit.max.is_some());
        let numbers = numbers.map(|limit| format!(",{}", own(limit)));
        let costs = limits[1..].iter().map(|limit| format!(",{}", under(limit)));
        let costs: String = costs.chain(numbers).collect();
        let op = if request.op == "acquire" { "" } else { request.op };
        let key = request.key.map_or(String::new(), |key| format!("k{key}"));
        format!(
            "{op},{},{},{},{},{},{},{},{key}{costs}\n",
            under(first),
            of("ip"),
            of("path"),
            request.at,
            of("user"),
            text(request.cost),
            text(request.took)
        )
    };
    header + &draw_requests(limits, draw).into_iter().map(line).collect::<String>()
}

//! The text form of a case: shown when a law fails, and parsed again as a regression.
//!
//! ```text
//! limit l0: gcra 10/s burst 20
//! limit l1: fixed-window 2/m count attempts
//! at 1795218392123456 acquire 3 of "a" in l0, 1 of "b" in l1
//! at 1795218392123459 settle 2 of "a" in l0 under 0000000000000000000000000000002a
//! ```

use std::fmt::{self, Write as _};
use std::str::FromStr;

use ratelimit_core::{Limit, OnOutage, Op, Policy, ReservationId, Timestamp};

use crate::trace::{Ask, Request, Trace};

/// A case that has a text form.
pub(crate) trait Case: fmt::Debug + Sized {
    /// The text form of the case.
    fn text(&self) -> String;

    /// Parses the text form.
    fn read(text: &str) -> Result<Self, Unreadable>;
}

/// A text that is not a case, and where it is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unreadable {
    line: String,
    message: String,
}

impl Unreadable {
    pub(crate) fn new(line: &str, message: impl Into<String>) -> Self {
        Self { line: line.to_owned(), message: message.into() }
    }
}

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the line {:?} of the case cannot be read: {}", self.line, self.message)
    }
}

impl std::error::Error for Unreadable {}

impl Case for Trace {
    fn text(&self) -> String {
        self.to_string()
    }

    fn read(text: &str) -> Result<Self, Unreadable> {
        text.parse()
    }
}

/// The separator between two traces.
const THEN: &str = "then";

impl Case for (Trace, Trace) {
    fn text(&self) -> String {
        format!("{}{THEN}\n{}", self.0, self.1)
    }

    fn read(text: &str) -> Result<Self, Unreadable> {
        let lines: Vec<&str> = text.lines().collect();
        let Some(place) = lines.iter().position(|line| line.trim() == THEN) else {
            let message = format!("two traces are needed, with a line `{THEN}` between them");
            return Err(Unreadable::new(text.trim(), message));
        };
        Ok((lines[..place].join("\n").parse()?, lines[place + 1..].join("\n").parse()?))
    }
}

/// The limits and the requests, one line each.
impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for limit in &self.limits {
            writeln!(f, "{}", limit_line(limit))?;
        }
        for request in &self.requests {
            request.fmt_with(f, |limit| {
                (self.limits.len() > 1).then(|| self.limits[limit].name().to_owned())
            })?;
            writeln!(f)?;
        }
        Ok(())
    }
}

impl fmt::Debug for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Request {
    /// Writes this request's line, with these names for the limits.
    fn fmt_with(
        &self,
        f: &mut fmt::Formatter<'_>,
        name: impl Fn(usize) -> Option<String>,
    ) -> fmt::Result {
        write!(f, "at {} {} ", self.at.as_us(), self.op)?;
        for (place, Ask { limit, key, cost }) in self.asks.iter().enumerate() {
            let comma = if place > 0 { ", " } else { "" };
            write!(f, "{comma}{cost} of {key:?}")?;
            if let Some(name) = name(*limit) {
                write!(f, " in {name}")?;
            }
        }
        self.id.map_or(Ok(()), |id| write!(f, " under {id}"))
    }
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let only_first = self.asks.iter().all(|ask| ask.limit == 0);
        self.fmt_with(f, |limit| (!only_first).then(|| format!("l{limit}")))
    }
}

impl fmt::Debug for Ask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {:?} in l{}", self.cost, self.key, self.limit)
    }
}

/// The line of a limit.
pub(crate) fn limit_line(limit: &Limit<Policy>) -> String {
    format!("limit {}: {}", limit.name(), limit.algorithm())
}

/// The significant lines of a text: neither blank nor starting with `#`.
pub(crate) fn lines(text: &str) -> impl Iterator<Item = &str> {
    text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'))
}

/// Parses the line of a limit; `None` if it is another line.
pub(crate) fn read_limit(line: &str) -> Result<Option<Limit<Policy>>, Unreadable> {
    let Some(rest) = line.strip_prefix("limit ") else { return Ok(None) };
    let wrong = |message: String| Unreadable::new(line, message);
    let (name, text) = rest.split_once(':').ok_or_else(|| {
        wrong("write `limit NAME: POLICY`, such as `limit l0: gcra 10/s burst 20`".into())
    })?;
    let policy = text.parse::<Policy>().map_err(|error| wrong(error.to_string()))?;
    // As of every limit of the testkit.
    let limit = Limit::new(name.trim(), policy).map(|limit| limit.on_outage(OnOutage::Open));
    limit.map(Some).map_err(|error| wrong(error.to_string()))
}

impl FromStr for Trace {
    type Err = Unreadable;

    fn from_str(text: &str) -> Result<Self, Unreadable> {
        let mut trace = Self { limits: Vec::new(), requests: Vec::new() };
        for line in lines(text) {
            match read_limit(line)? {
                Some(limit) => trace.limits.push(limit),
                None => trace.requests.push(read_request(line, &trace.limits)?),
            }
        }
        Ok(trace)
    }
}

/// Parses the line of a request.
fn read_request(line: &str, limits: &[Limit<Policy>]) -> Result<Request, Unreadable> {
    let wrong = |message: &str| Unreadable::new(line, message);
    let mut rest = Rest(line);
    let such_as = "write `at MICROSECONDS OP COST of \"KEY\" in LIMIT, … under ID`";
    let at = rest.after("at ").and_then(|()| rest.word()).and_then(|us| us.parse().ok());
    let at = at.and_then(Timestamp::from_us).ok_or_else(|| wrong(such_as))?;
    let op = rest.word().and_then(read_op).ok_or_else(|| wrong("there is no such operation"))?;
    let mut request = Request { at, op, asks: Vec::new(), id: None };
    loop {
        let cost = rest.word().and_then(|cost| cost.parse().ok()).ok_or_else(|| wrong(such_as))?;
        let key = rest.after("of ").and_then(|()| rest.quoted()).ok_or_else(|| wrong(such_as))?;
        let limit = if rest.after("in ").is_some() {
            let name = rest.word().unwrap_or_default();
            let named = limits.iter().position(|limit| limit.name() == name);
            named.ok_or_else(|| wrong("it names a limit that no line before it does"))?
        } else {
            0
        };
        request.asks.push(Ask { limit, key, cost });
        if rest.after(",").is_none() {
            break;
        }
    }
    if rest.after("under ").is_some() {
        let id = rest.word().and_then(|id| id.parse::<ReservationId>().ok());
        request.id = Some(id.ok_or_else(|| wrong("an id is up to 32 hexadecimal digits"))?);
    }
    if limits.is_empty() {
        return Err(wrong("no line before it names a limit"));
    }
    if rest.0.trim().is_empty() { Ok(request) } else { Err(wrong(such_as)) }
}

fn read_op(word: &str) -> Option<Op> {
    let ops = [Op::Acquire, Op::Peek, Op::Force, Op::Refund, Op::Reset, Op::Settle, Op::Renew];
    ops.into_iter().find(|op| op.to_string() == word)
}

/// The rest of a line.
struct Rest<'l>(&'l str);

impl<'l> Rest<'l> {
    /// Consumes `next`, if it comes next.
    fn after(&mut self, next: &str) -> Option<()> {
        self.0 = self.0.trim_start().strip_prefix(next)?;
        Some(())
    }

    /// Consumes the next token, up to a space or a comma.
    fn word(&mut self) -> Option<&'l str> {
        let rest = self.0.trim_start();
        let end = rest.find([' ', ',']).unwrap_or(rest.len());
        self.0 = &rest[end..];
        (end > 0).then(|| &rest[..end])
    }

    /// Consumes a quoted text, as `Debug` writes it.
    fn quoted(&mut self) -> Option<String> {
        let mut chars = self.0.trim_start().strip_prefix('"')?.chars();
        let mut text = String::new();
        loop {
            let plain = match chars.next()? {
                '"' => break,
                '\\' => match chars.next()? {
                    'n' => '\n',
                    'r' => '\r',
                    't' => '\t',
                    '0' => '\0',
                    'u' => {
                        let (hex, rest) = chars.as_str().strip_prefix('{')?.split_once('}')?;
                        chars = rest.chars();
                        char::from_u32(u32::from_str_radix(hex, 16).ok()?)?
                    }
                    other => other,
                },
                other => other,
            };
            text.push(plain);
        }
        self.0 = chars.as_str();
        Some(text)
    }
}

/// Parses a quoted text that has nothing after it.
pub(crate) fn read_quoted(text: &str) -> Option<String> {
    let mut rest = Rest(text);
    let text = rest.quoted()?;
    rest.0.trim().is_empty().then_some(text)
}

/// A text as a raw Rust string literal.
pub(crate) fn raw(text: &str) -> String {
    let mut signs = 0;
    while text.contains(&format!("\"{}", "#".repeat(signs))) {
        signs += 1;
    }
    let signs = "#".repeat(signs);
    let mut raw = String::new();
    // Writing to a string cannot fail.
    let _ = write!(raw, "r{signs}\"\n{text}\"{signs}");
    raw
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capability::Able;
    use crate::harness::Harness;
    use crate::trace::Scope;
    use crate::trace::made::{Makes, Shape};
    use crate::wrong::WrongHarness;
    use proptest::prelude::*;
    use proptest::test_runner::{Config, TestRunner};

    #[test]
    fn every_policy_is_read_from_its_own_text() {
        for scope in [Scope::Mixed, Scope::MixedAttempts] {
            for policy in scope.seeds().into_iter().chain(scope.tiny()) {
                let text = policy.to_string();
                assert_eq!(text.parse(), Ok(policy), "{text}");
            }
        }
    }

    #[test]
    fn any_trace_is_read_from_its_own_text() {
        let able = Able::of::<Policy, WrongHarness>();
        let makes = Makes { scope: Scope::Mixed, able };
        let traces = prop_oneof![makes.traces(Shape::TO_THE_END), makes.reservations(Shape::ANY)];
        let config = Config { failure_persistence: None, ..Config::with_cases(256) };
        let _ = WrongHarness::new();
        let outcome = TestRunner::new(config).run(&traces, |trace| {
            let text = trace.text();
            prop_assert_eq!(Trace::read(&text), Ok(trace.clone()));
            let twice = (trace.clone(), trace);
            prop_assert_eq!(<(Trace, Trace)>::read(&twice.text()), Ok(twice));
            Ok(())
        });
        outcome.expect("reads");
    }

    #[test]
    fn keys_of_any_characters_are_read_from_their_quotes() {
        for key in ["", "a\"b", "\\", "é, 1 of \"b\"", "\0\n\r\t\u{7f}\u{200b}\u{301}", "🦀\"#"]
        {
            let text = format!("limit l0: gcra 1/s burst 1\nat 7 peek 1 of {key:?}, 2 of \"z\"");
            let trace: Trace = text.parse().expect("reads");
            assert_eq!(trace.requests[0].asks[0].key, key);
            assert_eq!(trace.requests[0].asks[1], Ask { limit: 0, key: "z".into(), cost: 2 });
        }
    }

    #[test]
    fn a_line_that_cannot_be_read_is_named_with_what_is_accepted() {
        for (text, says) in [
            ("limit l0 gcra 1/s burst 1", "limit NAME: POLICY"),
            ("limit l0: leaky 1/s", "accepted are gcra"),
            ("limit l0: gcra 1/s burst x", "burst is"),
            ("limit l0: concurrency 1/s count attempts", "no meaning for concurrency"),
            ("limit l0: bucketed-window 1/s", "bucket 1s rates"),
            ("at 7 acquire 1 of \"a\"", "names a limit"),
            ("limit l: gcra 1/s burst 1\nat 7 take 1 of \"a\"", "no such operation"),
            ("limit l: gcra 1/s burst 1\nat 7 acquire 1 of \"a\" in m", "no line before it"),
            ("limit l: gcra 1/s burst 1\nat 7 acquire one of \"a\"", "at MICROSECONDS"),
            ("limit l: gcra 1/s burst 1\nat 7 acquire 1 of \"a\" under me", "hexadecimal"),
        ] {
            let error = text.parse::<Trace>().expect_err(text).to_string();
            assert!(error.contains(says), "{text}: {error}");
        }
    }

    #[test]
    fn a_case_is_shown_as_a_text_that_rust_reads() {
        assert_eq!(raw("a\n"), "r\"\na\n\"");
        assert_eq!(raw("\"a\"\n"), "r#\"\n\"a\"\n\"#");
        assert_eq!(raw("\"a\\\"#\"\n"), "r##\"\n\"a\\\"#\"\n\"##");
    }
}

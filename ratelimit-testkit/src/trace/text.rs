//! The text form of a case: shown when a law fails, and parsed again as a regression.
//!
//! ```text
//! limit l0: gcra 10/s burst 20
//! limit l1: fixed-window 2/m count attempts
//! at 1795218392123456 acquire 3 of "a" in l0, 1 of "b" in l1
//! at 1795218392123459 settle 2 of "a" in l0 under 0000000000000000000000000000002a
//! ```

use std::fmt::{self, Write as _};

use ratelimit_core::store::Op;
use ratelimit_core::{Algorithm, Limit, ReservationId, Timestamp};

use crate::trace::made::{Instance, limit};
use crate::trace::{Ask, Trace, TraceRequest};

/// Says where a text is not a case, and why.
fn unreadable(line: &str, message: &str) -> String {
    format!("the line {line:?} of the case cannot be read: {message}")
}

/// The limits and the requests, one line each. A limit's line stands before the first request to
/// it, and again where a limit has been changed.
impl<A: Algorithm> fmt::Display for Trace<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |limit: usize| self.limits[limit].name();
        let several = self.limits.iter().any(|limit| limit.name() != name(0));
        let line = |f: &mut fmt::Formatter<'_>, limit: usize| {
            writeln!(f, "limit {}: {}", name(limit), self.texts[limit])
        };
        let mut current: Vec<usize> = Vec::new();
        for request in &self.requests {
            for Ask { limit, .. } in &request.asks {
                if !current.contains(limit) {
                    current.retain(|known| name(*known) != name(*limit));
                    current.push(*limit);
                    line(f, *limit)?;
                }
            }
            request.fmt_with(f, |limit| several.then(|| name(limit).to_owned()))?;
            writeln!(f)?;
        }
        let asked = |limit: &usize| {
            self.requests.iter().flat_map(|request| &request.asks).any(|ask| ask.limit == *limit)
        };
        (0..self.limits.len()).filter(|limit| !asked(limit)).try_for_each(|limit| line(f, limit))
    }
}

impl<A: Algorithm> fmt::Debug for Trace<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl TraceRequest {
    /// Writes this request's line, with these names for the limits.
    fn fmt_with(
        &self,
        f: &mut fmt::Formatter<'_>,
        name: impl Fn(usize) -> Option<String>,
    ) -> fmt::Result {
        write!(f, "at {} {} ", self.at.as_us(), self.op)?;
        for (position, Ask { limit, key, cost }) in self.asks.iter().enumerate() {
            let comma = if position > 0 { ", " } else { "" };
            write!(f, "{comma}{cost} of {key:?}")?;
            if let Some(name) = name(*limit) {
                write!(f, " in {name}")?;
            }
        }
        self.id.map_or(Ok(()), |id| write!(f, " under {id}"))
    }
}

impl fmt::Debug for TraceRequest {
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

impl<A: Algorithm> Trace<A> {
    /// Parses the text form, with the limits as `named` reads them.
    pub(crate) fn read(
        text: &str,
        named: impl Fn(&str) -> Result<Instance<A>, String>,
    ) -> Result<Self, String> {
        let mut trace = Self { limits: Vec::new(), texts: Vec::new(), requests: Vec::new() };
        let lines = text.lines().map(str::trim);
        for line in lines.filter(|line| !line.is_empty() && !line.starts_with('#')) {
            let Some(rest) = line.strip_prefix("limit ") else {
                trace.requests.push(read_request(line, &trace.limits)?);
                continue;
            };
            let (name, text) = rest.split_once(':').ok_or_else(|| {
                unreadable(
                    line,
                    "write `limit NAME: POLICY`, such as `limit l0: gcra 10/s burst 20`",
                )
            })?;
            let instance = named(text.trim()).map_err(|error| unreadable(line, &error))?;
            trace.limits.push(limit(name.trim(), instance));
            trace.texts.push(text.trim().to_owned());
        }
        Ok(trace)
    }
}

/// Parses the line of a request.
fn read_request<A: Algorithm>(line: &str, limits: &[Limit<A>]) -> Result<TraceRequest, String> {
    let wrong = |message: &str| unreadable(line, message);
    let mut rest = Rest(line);
    let such_as = "write `at MICROSECONDS OP COST of \"KEY\" in LIMIT, … under ID`";
    let at = rest.after("at ").and_then(|()| rest.word()).and_then(|us| us.parse().ok());
    let at = at.and_then(Timestamp::from_us).ok_or_else(|| wrong(such_as))?;
    let op = rest.word().and_then(read_op).ok_or_else(|| wrong("there is no such operation"))?;
    let mut request = TraceRequest { at, op, asks: Vec::new(), id: None };
    loop {
        let cost = rest.word().and_then(|cost| cost.parse().ok()).ok_or_else(|| wrong(such_as))?;
        let key =
            rest.after("of ").and_then(|()| rest.parse_quoted()).ok_or_else(|| wrong(such_as))?;
        let first = limits.first().ok_or_else(|| wrong("no line before it names a limit"))?;
        let name = rest.after("in ").map_or(Some(first.name()), |()| rest.word());
        let named = limits.iter().rposition(|limit| Some(limit.name()) == name);
        let limit = named.ok_or_else(|| wrong("it names a limit that no line before it does"))?;
        request.asks.push(Ask { limit, key, cost });
        if rest.after(",").is_none() {
            break;
        }
    }
    if rest.after("under ").is_some() {
        let id = rest.word().and_then(|id| id.parse::<ReservationId>().ok());
        request.id = Some(id.ok_or_else(|| wrong("an id is up to 32 hexadecimal digits"))?);
    }
    if rest.0.trim().is_empty() { Ok(request) } else { Err(wrong(such_as)) }
}

fn read_op(word: &str) -> Option<Op> {
    Op::ALL.iter().copied().find(|op| op.to_string() == word)
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
    fn parse_quoted(&mut self) -> Option<String> {
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
    use proptest::prelude::*;
    use proptest::test_runner::{Config, TestRunner};
    use ratelimit_core::AnyAlgorithm;

    use super::*;
    use crate::capability::Able;
    use crate::seeds::Scope;
    use crate::trace::made::TraceShape;

    fn read(text: &str) -> Result<Trace<AnyAlgorithm>, String> {
        Trace::read(text, |text| text.parse().map_err(|error| format!("{error}")))
    }

    #[test]
    fn any_trace_is_read_from_its_own_text() {
        let pool = |scope: Scope| scope.pool(Able::ALL);
        for pool in
            [pool(Scope::Mixed), pool(Scope::Reservations), pool(Scope::Mixed).with_changed_limit()]
        {
            let traces = pool.traces(TraceShape::ANY);
            let config = Config { failure_persistence: None, ..Config::with_cases(128) };
            let outcome = TestRunner::new(config).run(&traces, |trace| {
                let text = trace.to_string();
                prop_assert_eq!(read(&text).map(|trace| trace.to_string()), Ok(text));
                Ok(())
            });
            outcome.expect("reads");
        }
    }

    #[test]
    fn keys_of_any_characters_are_read_from_their_quotes() {
        for key in ["", "a\"b", "\\", "é, 1 of \"b\"", "\0\n\r\t\u{7f}\u{200b}\u{301}", "🦀\"#"]
        {
            let text = format!("limit l0: gcra 1/s burst 1\nat 7 peek 1 of {key:?}, 2 of \"z\"");
            let trace = read(&text).expect("reads");
            assert_eq!(trace.requests[0].asks[0].key, key);
            assert_eq!(trace.requests[0].asks[1], Ask { limit: 0, key: "z".into(), cost: 2 });
        }
    }

    #[test]
    fn a_line_that_cannot_be_read_is_named_with_what_is_accepted() {
        for (text, says) in [
            ("limit l0 gcra 1/s burst 1", "limit NAME: POLICY"),
            ("limit l0: leaky 1/s", "accepted are gcra"),
            ("at 7 acquire 1 of \"a\"", "names a limit"),
            ("limit l: gcra 1/s burst 1\nat 7 take 1 of \"a\"", "no such operation"),
            ("limit l: gcra 1/s burst 1\nat 7 acquire 1 of \"a\" in m", "no line before it"),
            ("limit l: gcra 1/s burst 1\nat 7 acquire one of \"a\"", "at MICROSECONDS"),
            ("limit l: gcra 1/s burst 1\nat 7 acquire 1 of \"a\" under me", "hexadecimal"),
        ] {
            let error = read(text).expect_err(text);
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

//! The decision line: one JSON object per request, integers only, the same bytes from every store.

use ratelimit_core::{Decision, Limit, Policy, Verdict};

use crate::caller::Caller;

/// Writes decision lines for the limits of a policy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DecisionLine<'p> {
    limits: &'p [Limit<Policy>],
    shadow: &'p [(usize, Decision)],
}

impl<'p> DecisionLine<'p> {
    pub(crate) const fn new(limits: &'p [Limit<Policy>]) -> Self {
        Self { limits, shadow: &[] }
    }

    /// The same with what the shadow limits decided, each by its position in the policy.
    pub(crate) const fn shadow(mut self, shadow: &'p [(usize, Decision)]) -> Self {
        self.shadow = shadow;
        self
    }

    /// Appends one line. `applied` lists the positions of the limits in `verdict`.
    pub(crate) fn write(
        self,
        out: &mut Vec<u8>,
        at_us: Option<u64>,
        caller: &Caller<'_>,
        cost: u64,
        verdict: &Verdict,
        applied: &[usize],
    ) {
        out.push(b'{');
        if let Some(at_us) = at_us {
            field(out, "at_us");
            integer(out, at_us);
            out.push(b',');
        }
        write_caller(out, caller);
        field(out, "cost");
        integer(out, cost);
        out.push(b',');
        if verdict.is_unlimited() {
            out.extend_from_slice(
                br#""allowed":true,"limit":null,"remaining":null,"retry_after_us":0,"reset_after_us":0"#,
            );
        } else {
            write_decision(out, verdict.summary());
        }
        if self.limits.len() > 1 {
            self.write_named(out, "limits", applied.iter().copied().zip(verdict.decisions()));
        }
        if self.limits.iter().any(Limit::is_shadow) {
            let shadow = self.shadow.iter().map(|(place, decision)| (*place, decision));
            self.write_named(out, "shadow", shadow);
        }
        out.extend_from_slice(b"}\n");
    }

    /// Writes `,"limits":[…]`, the decisions with the names of their limits.
    fn write_named<'d>(
        self,
        out: &mut Vec<u8>,
        name: &str,
        decisions: impl Iterator<Item = (usize, &'d Decision)>,
    ) {
        out.push(b',');
        field(out, name);
        out.push(b'[');
        let named = decisions.filter_map(|(place, d)| Some((self.limits.get(place)?, d)));
        for (nth, (limit, decision)) in named.enumerate() {
            if nth > 0 {
                out.push(b',');
            }
            out.push(b'{');
            field(out, "name");
            string(out, limit.name());
            out.push(b',');
            write_decision(out, decision);
            out.push(b'}');
        }
        out.push(b']');
    }
}

/// Writes `"key":"k",` and `"keys":{…},`, in the order of the input.
pub(crate) fn write_caller(out: &mut Vec<u8>, caller: &Caller<'_>) {
    if let Some(key) = &caller.bare {
        field(out, "key");
        string(out, key);
        out.push(b',');
    }
    if !caller.bare_only && !caller.named.is_empty() {
        field(out, "keys");
        out.push(b'{');
        for (place, (name, value)) in caller.named.iter().enumerate() {
            if place > 0 {
                out.push(b',');
            }
            string(out, name);
            out.push(b':');
            string(out, value);
        }
        out.extend_from_slice(b"},");
    }
}

/// Writes the fields from `"allowed":…` to `"reset_after_us":…`.
pub(crate) fn write_decision(out: &mut Vec<u8>, decision: &Decision) {
    field(out, "allowed");
    out.extend_from_slice(if decision.allowed { b"true" } else { b"false" });
    for (name, value) in [
        ("limit", Some(decision.limit)),
        ("remaining", Some(decision.remaining)),
        ("retry_after_us", decision.retry_after_us),
        ("reset_after_us", Some(decision.reset_after_us)),
    ] {
        out.push(b',');
        field(out, name);
        match value {
            Some(value) => integer(out, value),
            None => out.extend_from_slice(b"null"),
        }
    }
}

/// Writes a field's name, which needs no escapes.
fn field(out: &mut Vec<u8>, name: &str) {
    out.push(b'"');
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(b"\":");
}

/// Writes a text in quotes, with its escapes.
pub(crate) fn string(out: &mut Vec<u8>, text: &str) {
    // Serializing text into memory cannot fail.
    let _ = serde_json::to_writer(out, text);
}

fn integer(out: &mut Vec<u8>, n: u64) {
    let mut digits = [0; 20];
    let mut start = digits.len();
    let mut rest = n;
    loop {
        start -= 1;
        // The remainder is below 10.
        digits[start] = b'0' + u8::try_from(rest % 10).unwrap_or_default();
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    out.extend_from_slice(&digits[start..]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratelimit_core::Limits;

    const DENIED: Decision = Decision {
        allowed: false,
        cost: 5,
        limit: 5,
        remaining: 3,
        retry_after_us: Some(3_000_000),
        replenish_after_us: 1_000_000,
        reset_after_us: 2_000_000,
    };
    const NEVER: Decision = Decision { retry_after_us: None, ..DENIED };

    fn limits(names: &[&str]) -> Limits<Policy> {
        let text: Vec<_> = names
            .iter()
            .map(|n| format!("[[limit]]\nname = {n:?}\nalgorithm = \"gcra\"\nrate = \"1/s\"\n"))
            .collect();
        toml::from_str(&text.concat()).expect("a policy")
    }

    fn line(names: &[&str], caller: &Caller<'_>, verdict: &Verdict, applied: &[usize]) -> String {
        let limits = limits(names);
        let mut out = Vec::new();
        let writer = DecisionLine::new(limits.as_slice());
        writer.write(&mut out, Some(9_500_000), caller, 5, verdict, applied);
        String::from_utf8(out).expect("text")
    }

    fn bare(key: &str) -> Caller<'_> {
        Caller { bare: Some(key.into()), ..Caller::default() }
    }

    #[test]
    fn the_line_of_one_limit_matches_the_contract() {
        assert_eq!(
            line(&["a"], &bare("k"), &Verdict::one(DENIED), &[0]),
            concat!(
                r#"{"at_us":9500000,"key":"k","cost":5,"allowed":false,"limit":5,"remaining":3,"#,
                r#""retry_after_us":3000000,"reset_after_us":2000000}"#,
                "\n"
            )
        );
        let never = line(&["a"], &bare("\"\n"), &Verdict::one(NEVER), &[0]);
        assert!(never.contains(r#""key":"\"\n","#), "{never}");
        assert!(never.contains(r#""retry_after_us":null"#), "{never}");
    }

    #[test]
    fn the_line_of_several_limits_names_those_that_applied() {
        let verdict = Verdict::several(vec![DENIED, NEVER]);
        let written = line(&["a", "b", "c"], &bare("k"), &verdict, &[0, 2]);
        let one = r#""allowed":false,"limit":5,"remaining":3,"retry_after_us":"#;
        assert_eq!(
            written,
            format!(
                "{{\"at_us\":9500000,\"key\":\"k\",\"cost\":5,{one}null,\"reset_after_us\":2000000,\
                 \"limits\":[{{\"name\":\"a\",{one}3000000,\"reset_after_us\":2000000}},\
                 {{\"name\":\"c\",{one}null,\"reset_after_us\":2000000}}]}}\n"
            )
        );
    }

    #[test]
    fn a_request_that_no_limit_applies_to_is_unlimited() {
        let unlimited = Verdict::several(vec![]);
        let caller = Caller {
            bare: None,
            named: vec![("user".into(), "b".into()), ("ip".into(), "a".into())],
            bare_only: false,
        };
        let start = r#"{"at_us":9500000,"keys":{"user":"b","ip":"a"},"cost":5,"allowed":true,"limit":null,"remaining":null,"retry_after_us":0,"reset_after_us":0"#;
        assert_eq!(line(&["a"], &caller, &unlimited, &[]), format!("{start}}}\n"));
        assert_eq!(
            line(&["a", "b"], &caller, &unlimited, &[]),
            format!("{start},\"limits\":[]}}\n")
        );
    }

    #[test]
    fn integers_are_written_in_full() {
        for n in [0, 9, 10, 4_503_599_627_370_495, u64::MAX] {
            let mut out = Vec::new();
            integer(&mut out, n);
            assert_eq!(out, n.to_string().into_bytes());
        }
    }
}

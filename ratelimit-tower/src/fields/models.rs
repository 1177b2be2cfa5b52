//! [`ModelFields`]: the fields in which providers of language models describe their limits.

use std::fmt::Write as _;
use std::time::{Duration, SystemTime};

use http::HeaderMap;
use http::header::{HeaderName, HeaderValue};

use super::{FieldEntry, Older, Unit, saturated};

/// The fields in which providers of language models describe their limits. Their clients read them.
///
/// They tell of limits of the names `requests`, `tokens`, `input-tokens` and `output-tokens`: the limit, what remains, and when
/// nothing is missing any more. [`Advice`](crate::Advice) reads them all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ModelFields {
    /// `anthropic-ratelimit-input-tokens-remaining` and the like, with the time as of RFC 3339.
    Anthropic,
    /// `x-ratelimit-remaining-tokens` and the like, of `requests` and `tokens`, with a duration such as `6m0s` or `820ms`.
    OpenAi,
}

/// What the fields say of a limit.
pub(super) struct ModelLimit {
    pub(super) name: &'static str,
    pub(super) limit: Option<u64>,
    pub(super) remaining: Option<u64>,
    pub(super) reset_after: Option<Duration>,
}

impl ModelLimit {
    /// What the limit counts.
    pub(super) fn unit(&self) -> Unit {
        if self.name == "requests" { Unit::Requests } else { Unit::Other("tokens".into()) }
    }
}

impl ModelFields {
    /// The limits that have fields.
    const fn limits(self) -> &'static [&'static str] {
        match self {
            Self::Anthropic => &["requests", "tokens", "input-tokens", "output-tokens"],
            Self::OpenAi => &["requests", "tokens"],
        }
    }

    fn field(self, limit: &str, what: &str) -> String {
        match self {
            Self::Anthropic => format!("anthropic-ratelimit-{limit}-{what}"),
            Self::OpenAi => format!("x-ratelimit-{what}-{limit}"),
        }
    }

    /// The limits of which these fields tell.
    pub(super) fn read(headers: &HeaderMap, now: SystemTime) -> Vec<ModelLimit> {
        let mut told = Vec::new();
        for dialect in [Self::Anthropic, Self::OpenAi] {
            for name in dialect.limits().iter().copied() {
                let text =
                    |what| headers.get(dialect.field(name, what))?.to_str().ok().map(str::trim);
                let number = |what| text(what).and_then(|digits| digits.parse().ok());
                let (limit, remaining) = (number("limit"), number("remaining"));
                let reset_after = text("reset").and_then(|reset| dialect.reset_after(reset, now));
                told.push(ModelLimit { name, limit, remaining, reset_after });
            }
        }
        told
    }

    /// The time until a reset; zero if it is past.
    fn reset_after(self, reset: &str, now: SystemTime) -> Option<Duration> {
        match self {
            Self::Anthropic => {
                let date = humantime::parse_rfc3339(reset).ok()?;
                Some(date.duration_since(now).unwrap_or_default())
            }
            Self::OpenAi => {
                // The parser panics at the end of the range.
                let is_short = |digits: &str| digits.len() <= 10;
                let is_tame =
                    reset.len() <= 32 && reset.split(|c: char| !c.is_ascii_digit()).all(is_short);
                if is_tame { humantime::parse_duration(reset).ok() } else { None }
            }
        }
    }

    /// The fields about a limit; `None` if there are none of its name.
    pub(super) fn tell(self, entry: &FieldEntry<'_>, now: SystemTime) -> Option<Older> {
        let limit = self.limits().iter().find(|limit| **limit == entry.name)?;
        let name = |what| HeaderName::try_from(self.field(limit, what)).ok();
        let number = |count| Some(HeaderValue::from(saturated(count)));
        let reset = entry.reset_after_us.and_then(|us| self.reset(us, now));
        Some(Older {
            names: [name("limit")?, name("remaining")?, name("reset")?],
            values: [number(entry.limit), number(entry.remaining), reset],
            remaining: entry.remaining,
        })
    }

    /// A reset, rounded up to what the field can say: a second, or a millisecond.
    fn reset(self, after_us: u64, now: SystemTime) -> Option<HeaderValue> {
        let mut text = String::new();
        match self {
            Self::Anthropic => {
                let at = now.checked_add(Duration::from_micros(after_us))?;
                let at = at.checked_add(Duration::from_nanos(999_999_999))?;
                // The format ends with the year 9999.
                write!(text, "{}", humantime::format_rfc3339_seconds(at)).ok()?;
            }
            Self::OpenAi => write_duration(&mut text, after_us.div_ceil(1_000)),
        }
        HeaderValue::try_from(text).ok()
    }
}

/// Writes a duration as Go does: `820ms`, `6m0s`, `1m26.4s`.
fn write_duration(text: &mut String, ms: u64) {
    let (seconds, rest_ms) = (ms / 1_000, ms % 1_000);
    let (hours, minutes, seconds) = (seconds / 3_600, seconds / 60 % 60, seconds % 60);
    // A `String` takes everything.
    let _ = match (hours, minutes, seconds) {
        (0, 0, 0) if rest_ms > 0 => {
            let _ = write!(text, "{rest_ms}ms");
            return;
        }
        (0, 0, _) => write!(text, "{seconds}"),
        (0, ..) => write!(text, "{minutes}m{seconds}"),
        _ => write!(text, "{hours}h{minutes}m{seconds}"),
    };
    if rest_ms > 0 {
        let fraction = format!(".{rest_ms:03}");
        text.push_str(fraction.trim_end_matches('0'));
    }
    text.push('s');
}

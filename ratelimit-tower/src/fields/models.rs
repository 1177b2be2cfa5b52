//! [`ModelFields`]: the fields in which providers of language models describe their limits.

use std::fmt::Write as _;
use std::time::{Duration, SystemTime};

use http::HeaderMap;
use http::header::{HeaderName, HeaderValue};

use super::advice::{Advice, AdvisedLimit, AdvisedPolicy};
use super::{FieldEntry, LimitFields, MAX_FIELD_INTEGER, Unit};

/// The fields in which providers of language models describe their limits. Their clients read them.
///
/// They tell of limits of the names `requests`, `tokens`, `input-tokens` and `output-tokens`: the
/// limit, what remains, and when nothing is missing any more. [`Advice`](crate::Advice) reads them
/// all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ModelFields {
    /// `anthropic-ratelimit-input-tokens-remaining` and the like, with the time as of RFC 3339.
    Anthropic,
    /// `x-ratelimit-remaining-tokens` and the like, of `requests` and `tokens`, with a duration
    /// such as `6m0s` or `820ms`.
    OpenAi,
}

/// A limit, and the fields that tell its number, what remains, and the reset.
type NamedFields = (&'static str, [HeaderName; 3]);

static ANTHROPIC: [NamedFields; 4] = [
    ("requests", three_fields!("anthropic-ratelimit-requests-", "")),
    ("tokens", three_fields!("anthropic-ratelimit-tokens-", "")),
    ("input-tokens", three_fields!("anthropic-ratelimit-input-tokens-", "")),
    ("output-tokens", three_fields!("anthropic-ratelimit-output-tokens-", "")),
];
static OPEN_AI: [NamedFields; 2] = [
    ("requests", three_fields!("x-ratelimit-", "-requests")),
    ("tokens", three_fields!("x-ratelimit-", "-tokens")),
];

impl ModelFields {
    fn fields(self) -> &'static [NamedFields] {
        match self {
            Self::Anthropic => &ANTHROPIC,
            Self::OpenAi => &OPEN_AI,
        }
    }

    /// Adds the limits of which these fields tell.
    pub(super) fn read(headers: &HeaderMap, now: SystemTime, advice: &mut Advice) {
        let text = |field| headers.get(field)?.to_str().ok().map(str::trim);
        let number = |field| text(field).and_then(|digits| digits.parse().ok());
        for dialect in [Self::Anthropic, Self::OpenAi] {
            for (name, [limit, remaining, reset]) in dialect.fields() {
                let (name, partition_key) = ((*name).to_owned(), None);
                if let Some(remaining) = number(remaining) {
                    let more_after = text(reset).and_then(|reset| dialect.reset_after(reset, now));
                    let name = name.clone();
                    let limit = AdvisedLimit { name, remaining, more_after, partition_key: None };
                    advice.limits.push(limit);
                }
                if let Some(quota) = number(limit) {
                    let tokens = || Unit::Other("tokens".into());
                    let unit = if name == "requests" { Unit::Requests } else { tokens() };
                    let window = None;
                    let policy = AdvisedPolicy { name, quota, window, unit, partition_key };
                    advice.policies.push(policy);
                }
            }
        }
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
    pub(super) fn tell(self, entry: &FieldEntry<'_>, now: SystemTime) -> Option<LimitFields> {
        let (_, names) = self.fields().iter().find(|(name, _)| *name == entry.name)?;
        let number = |count: u64| Some(HeaderValue::from(count.min(MAX_FIELD_INTEGER)));
        let reset = entry.reset_after_us.and_then(|us| self.reset(us, now));
        let values = [number(entry.limit), number(entry.remaining), reset];
        Some(LimitFields { names: names.clone(), values, remaining: entry.remaining })
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
    let (hours, minutes) = (ms / 3_600_000, ms / 60_000 % 60);
    let seconds = f64::from(u16::try_from(ms % 60_000).unwrap_or_default()) / 1_000.0;
    // A `String` takes everything.
    let _ = match (hours, minutes) {
        _ if (1..1_000).contains(&ms) => write!(text, "{ms}ms"),
        (0, 0) => write!(text, "{seconds}s"),
        (0, _) => write!(text, "{minutes}m{seconds}s"),
        _ => write!(text, "{hours}h{minutes}m{seconds}s"),
    };
}

//! [`ModelFields`]: the fields in which providers of language models describe their limits.

use std::fmt::Write as _;
use std::time::{Duration, SystemTime};

use http::HeaderMap;
use http::header::{HeaderName, HeaderValue};

use super::{FieldEntry, LimitFields, Unit, saturated};

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

/// A limit, and the fields that tell its number, what remains, and the reset.
type NamedFields = (&'static str, [HeaderName; 3]);

static ANTHROPIC: [NamedFields; 4] = [
    (
        "requests",
        [
            HeaderName::from_static("anthropic-ratelimit-requests-limit"),
            HeaderName::from_static("anthropic-ratelimit-requests-remaining"),
            HeaderName::from_static("anthropic-ratelimit-requests-reset"),
        ],
    ),
    (
        "tokens",
        [
            HeaderName::from_static("anthropic-ratelimit-tokens-limit"),
            HeaderName::from_static("anthropic-ratelimit-tokens-remaining"),
            HeaderName::from_static("anthropic-ratelimit-tokens-reset"),
        ],
    ),
    (
        "input-tokens",
        [
            HeaderName::from_static("anthropic-ratelimit-input-tokens-limit"),
            HeaderName::from_static("anthropic-ratelimit-input-tokens-remaining"),
            HeaderName::from_static("anthropic-ratelimit-input-tokens-reset"),
        ],
    ),
    (
        "output-tokens",
        [
            HeaderName::from_static("anthropic-ratelimit-output-tokens-limit"),
            HeaderName::from_static("anthropic-ratelimit-output-tokens-remaining"),
            HeaderName::from_static("anthropic-ratelimit-output-tokens-reset"),
        ],
    ),
];
static OPEN_AI: [NamedFields; 2] = [
    (
        "requests",
        [
            HeaderName::from_static("x-ratelimit-limit-requests"),
            HeaderName::from_static("x-ratelimit-remaining-requests"),
            HeaderName::from_static("x-ratelimit-reset-requests"),
        ],
    ),
    (
        "tokens",
        [
            HeaderName::from_static("x-ratelimit-limit-tokens"),
            HeaderName::from_static("x-ratelimit-remaining-tokens"),
            HeaderName::from_static("x-ratelimit-reset-tokens"),
        ],
    ),
];

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
    fn fields(self) -> &'static [NamedFields] {
        match self {
            Self::Anthropic => &ANTHROPIC,
            Self::OpenAi => &OPEN_AI,
        }
    }

    /// The limits of which these fields tell.
    pub(super) fn read(headers: &HeaderMap, now: SystemTime) -> impl Iterator<Item = ModelLimit> {
        let all = [Self::Anthropic, Self::OpenAi].into_iter();
        all.flat_map(|dialect| dialect.fields().iter().map(move |fields| (dialect, fields))).map(
            move |(dialect, (name, [limit, remaining, reset]))| {
                let text = |field| headers.get(field)?.to_str().ok().map(str::trim);
                let number = |field| text(field).and_then(|digits| digits.parse().ok());
                let reset_after = text(reset).and_then(|reset| dialect.reset_after(reset, now));
                ModelLimit { name, limit: number(limit), remaining: number(remaining), reset_after }
            },
        )
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
        let number = |count| Some(HeaderValue::from(saturated(count)));
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

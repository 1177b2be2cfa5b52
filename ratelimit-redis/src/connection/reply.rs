//! [`Reply`]: what a server answers.

use ratelimit_core::Timestamp;

/// A server's reply.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Reply {
    /// No value.
    Nil,
    /// An integer.
    Integer(i64),
    /// A string.
    Text(Vec<u8>),
    /// Several replies.
    Array(Vec<Reply>),
    /// A reply that no command of the store expects, by its kind.
    Other(String),
}

impl Reply {
    /// The kind of the reply without its content, which may quote the request.
    pub(crate) fn shape(&self) -> String {
        const SHOWN: usize = 8;
        match self {
            Self::Nil => "nothing".into(),
            Self::Integer(number) => number.to_string(),
            Self::Text(text) => format!("a text of {} bytes", text.len()),
            Self::Array(items) => {
                let shapes = items.iter().take(SHOWN).map(Self::shape);
                let more = (items.len() > SHOWN).then(|| format!("{} in all", items.len()));
                format!("[{}]", shapes.chain(more).collect::<Vec<_>>().join(", "))
            }
            Self::Other(kind) => kind.clone(),
        }
    }

    /// The strings in an array, and in arrays in it; `None` if there is anything else.
    pub(crate) fn strings(&self) -> Option<Vec<&[u8]>> {
        match self {
            Self::Text(bytes) => Some(vec![bytes]),
            Self::Array(items) => {
                let strings = items.iter().map(Self::strings).collect::<Option<Vec<_>>>()?;
                Some(strings.concat())
            }
            _ => None,
        }
    }

    /// A string that is text.
    pub(crate) fn as_text(&self) -> Option<&str> {
        let Self::Text(text) = self else { return None };
        std::str::from_utf8(text).ok()
    }

    /// Parses the reply of TIME: seconds and microseconds.
    pub(crate) fn as_time(&self) -> Option<Timestamp> {
        let number = |reply: &Self| match reply {
            Self::Integer(number) => u64::try_from(*number).ok(),
            digits => digits.as_text()?.parse::<u64>().ok(),
        };
        let Self::Array(parts) = self else { return None };
        let [seconds, us] = &parts[..] else { return None };
        let (seconds, us) = (number(seconds)?, number(us)?);
        Some(Timestamp::saturating_from_us(seconds.saturating_mul(1_000_000).saturating_add(us)))
    }
}

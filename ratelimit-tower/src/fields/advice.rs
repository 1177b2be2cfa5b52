//! [`Advice`]: a server's limits, read from the header fields of a response.

use std::time::{Duration, SystemTime};

use http::HeaderMap;
use http::header::{HeaderName, HeaderValue};
use sfv::{BareItem, Item, List, ListEntry, Parameters, Parser};

use super::Unit;
use super::draft::{RATELIMIT, RATELIMIT_POLICY};
use super::models::ModelFields;
use super::older;

/// The limits that a response describes, for its client: `Retry-After`, `RateLimit` and
/// `RateLimit-Policy` of draft 11, their older forms, and what providers of language models send.
///
/// A malformed field is ignored whole, as the draft demands.
///
/// # Older forms
///
/// - `Retry-After` may have a fraction. `retry-after-ms` and `x-ms-retry-after-ms` are more exact,
///   and count where they are sent.
/// - Without a `RateLimit` of the current form, that of draft 07 is read (`limit=100, remaining=50,
///   reset=30`), or else `RateLimit-Limit`, `-Remaining` and `-Reset`, or else `X-RateLimit-Limit`,
///   `-Remaining` and `-Reset`. A reset is in seconds, or from 1,000,000,000 on at a Unix time, as
///   GitHub writes it, or at a date.
/// - Such a limit has the name in `X-RateLimit-Resource`, or else `default`.
///
/// # Providers of language models
///
/// The fields of [`ModelFields`](crate::ModelFields) are limits and policies of the names
/// `requests`, `tokens`, `input-tokens` and `output-tokens`. They tell when all is back:
/// [`AdvisedLimit::more_after`] is that time, so a client that waits for it is on the safe side.
///
/// ```
/// use std::time::Duration;
/// use http::HeaderMap;
/// use ratelimit_tower::Advice;
///
/// let mut headers = HeaderMap::new();
/// headers.insert("ratelimit-policy", r#""burst";q=100;w=60"#.parse()?);
/// headers.insert("ratelimit", r#""burst";r=0;t=30"#.parse()?);
/// let advice = Advice::from_headers(&headers);
/// assert_eq!(advice.policies[0].quota, 100);
/// assert_eq!(advice.limits[0].remaining, 0);
/// assert_eq!(advice.wait(), Some(Duration::from_secs(30)));
/// # Ok::<(), http::header::InvalidHeaderValue>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Advice {
    /// The time until which `Retry-After` asks the client to wait.
    pub retry_after: Option<Duration>,
    /// The items of `RateLimit`.
    pub limits: Vec<AdvisedLimit>,
    /// The items of `RateLimit-Policy`.
    pub policies: Vec<AdvisedPolicy>,
}

/// An item of `RateLimit`: what is left.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AdvisedLimit {
    /// The name of the policy.
    pub name: String,
    /// `r`: what remains, in the unit of the policy.
    pub remaining: u64,
    /// `t`: how long until there is more.
    pub more_after: Option<Duration>,
    /// `pk`: the partition that the quota belongs to.
    pub partition_key: Option<Vec<u8>>,
}

/// An item of `RateLimit-Policy`: what is allowed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AdvisedPolicy {
    /// The name of the policy.
    pub name: String,
    /// `q`: how much is allowed.
    pub quota: u64,
    /// `w`: the time in which it is allowed.
    pub window: Option<Duration>,
    /// `qu`: the unit.
    pub unit: Unit,
    /// `pk`: the partition that the quota belongs to.
    pub partition_key: Option<Vec<u8>>,
}

impl Advice {
    /// Reads the fields of a response. A `Retry-After` that is a date is compared with the clock of
    /// this machine.
    #[must_use]
    pub fn from_headers(headers: &HeaderMap) -> Self {
        Self::from_headers_at(headers, SystemTime::now())
    }

    /// [`from_headers`](Self::from_headers) at this time.
    #[must_use]
    pub fn from_headers_at(headers: &HeaderMap, now: SystemTime) -> Self {
        let mut advice = Self {
            retry_after: older::retry_after(headers, now),
            limits: items(headers, &RATELIMIT, AdvisedLimit::read),
            policies: items(headers, &RATELIMIT_POLICY, AdvisedPolicy::read),
        };
        older::read(headers, now, &mut advice);
        ModelFields::read(headers, now, &mut advice);
        advice
    }

    /// How long to wait before the next request: `Retry-After` if it is there, and otherwise the
    /// longest wait of the limits that have nothing left. `None` if there is no reason to wait, or
    /// none of known length.
    #[must_use]
    pub fn wait(&self) -> Option<Duration> {
        let exhausted = self.limits.iter().filter(|limit| limit.remaining == 0);
        self.retry_after.or_else(|| exhausted.filter_map(|limit| limit.more_after).max())
    }
}

impl AdvisedLimit {
    fn read(name: String, parameters: &Parameters) -> Option<Self> {
        Some(Self {
            name,
            remaining: integer(parameters.get("r")?)?,
            more_after: optional(parameters, "t", |t| integer(t).map(Duration::from_secs))?,
            partition_key: optional(parameters, "pk", bytes)?,
        })
    }
}

impl AdvisedPolicy {
    fn read(name: String, parameters: &Parameters) -> Option<Self> {
        let unit = match parameters.get("qu") {
            None => Unit::Requests,
            Some(unit) => match unit.as_string()?.as_str() {
                "requests" => Unit::Requests,
                "content-bytes" => Unit::ContentBytes,
                "concurrent-requests" => Unit::ConcurrentRequests,
                other => Unit::Other(other.into()),
            },
        };
        let seconds = |w: &_| integer(w).filter(|w| *w > 0).map(Duration::from_secs);
        Some(Self {
            name,
            quota: integer(parameters.get("q")?)?,
            window: optional(parameters, "w", seconds)?,
            unit,
            partition_key: optional(parameters, "pk", bytes)?,
        })
    }
}

/// The items of a list field, or none if one of them is malformed.
fn items<T>(
    headers: &HeaderMap,
    field: &HeaderName,
    read: impl Fn(String, &Parameters) -> Option<T>,
) -> Vec<T> {
    let list: List = Parser::new(&join_lines(headers, field)).parse().unwrap_or_default();
    let read = |entry: &ListEntry| match entry {
        ListEntry::Item(Item { bare_item: BareItem::String(name), params }) => {
            read(name.as_str().to_owned(), params)
        }
        _ => None,
    };
    list.iter().map(read).collect::<Option<_>>().unwrap_or_default()
}

/// RFC 9651, section 4.2: several lines of a list are one, joined by commas.
pub(super) fn join_lines(headers: &HeaderMap, field: &HeaderName) -> Vec<u8> {
    let lines: Vec<_> = headers.get_all(field).iter().map(HeaderValue::as_bytes).collect();
    lines.join(&b", "[..])
}

/// An integer of 0 or more.
pub(super) fn integer(value: &BareItem) -> Option<u64> {
    u64::try_from(i64::from(value.as_integer()?)).ok()
}

fn bytes(value: &BareItem) -> Option<Vec<u8>> {
    Some(value.as_byte_sequence()?.to_vec())
}

/// An optional parameter. The outer `None` is a malformed one.
#[allow(clippy::option_option, reason = "malformed, absent and there are three things")]
fn optional<T>(
    parameters: &Parameters,
    key: &str,
    read: impl Fn(&BareItem) -> Option<T>,
) -> Option<Option<T>> {
    parameters.get(key).map_or(Some(None), |value| read(value).map(Some))
}

#[cfg(test)]
mod tests;

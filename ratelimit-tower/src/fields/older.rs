//! Reads fields that are older than the current draft: `RateLimit` as of draft 07,
//! `RateLimit-Limit` and its siblings as of drafts up to 06, and `X-RateLimit-Limit` and its
//! siblings, as GitHub writes them. None of them names its limit.

use std::time::{Duration, SystemTime};

use http::HeaderMap;
use http::header::{HeaderName, HeaderValue};
use sfv::{BareItem, Dictionary, Item, List, ListEntry, Parser};

use super::advice::{Advice, AdvisedLimit, AdvisedPolicy, integer, join_lines};
use super::draft::{RATELIMIT, RATELIMIT_POLICY};
use super::{PREFIXED, UNPREFIXED, Unit};

/// The name of a limit that has none.
const UNNAMED: &str = "default";

/// Numbers from here on are no seconds from now, which would be 31 years, but a Unix time; and from
/// a thousand times as many on, one in milliseconds.
const LEAST_UNIX_S: u64 = 1_000_000_000;

/// Adds what the older fields say, if the current one says nothing: a service that sends both
/// describes the same limits.
pub(super) fn read(headers: &HeaderMap, now: SystemTime, advice: &mut Advice) {
    if advice.policies.is_empty() {
        advice.policies = unnamed_policies(headers).unwrap_or_default();
    }
    if !advice.limits.is_empty() {
        return;
    }
    if read_draft_07(headers, advice).is_none() {
        // The first that is there; services that send both say the same.
        let _read = read_three(headers, &UNPREFIXED, now, advice)
            .or_else(|| read_three(headers, &PREFIXED, now, advice));
    }
}

/// `RateLimit: limit=100, remaining=50, reset=30`.
fn read_draft_07(headers: &HeaderMap, advice: &mut Advice) -> Option<()> {
    let fields: Dictionary = Parser::new(&join_lines(headers, &RATELIMIT)).parse().ok()?;
    let number = |key: &str| match fields.get(key)? {
        ListEntry::Item(Item { bare_item, .. }) => integer(bare_item),
        ListEntry::InnerList(_) => None,
    };
    let reset = number("reset").map(Duration::from_secs);
    add(advice, UNNAMED, number("limit"), number("remaining")?, reset);
    Some(())
}

/// `RateLimit-Policy: 100;w=60, 1000;w=3600`, as of drafts 02 to 07.
fn unnamed_policies(headers: &HeaderMap) -> Option<Vec<AdvisedPolicy>> {
    let list: List = Parser::new(&join_lines(headers, &RATELIMIT_POLICY)).parse().ok()?;
    let policies = list.iter().map(|entry| match entry {
        ListEntry::Item(Item { bare_item: quota @ BareItem::Integer(_), params }) => {
            let window = params.get("w").map(|w| integer(w).map(Duration::from_secs));
            Some(policy(UNNAMED, integer(quota)?, window.map_or(Some(None), |w| w.map(Some))?))
        }
        _ => None,
    });
    policies.collect()
}

/// `RateLimit-Remaining: 50` and its siblings of the same prefix.
fn read_three(
    headers: &HeaderMap,
    [limit, remaining, reset]: &[HeaderName; 3],
    now: SystemTime,
    advice: &mut Advice,
) -> Option<()> {
    let text = |name: &str| headers.get(name)?.to_str().ok().map(str::trim);
    // Drafts up to 06 have the policies behind the limit: `100, 100;w=60`.
    let first = text(limit.as_str()).and_then(|text| text.split([',', ';']).next());
    let quota = first.and_then(|digits| digits.trim().parse().ok());
    let reset = text(reset.as_str()).and_then(|reset| until(reset, now));
    // GitHub names the resource, such as `core` or `search`.
    let name = text("x-ratelimit-resource").filter(|name| !name.is_empty());
    add(advice, name.unwrap_or(UNNAMED), quota, text(remaining.as_str())?.parse().ok()?, reset);
    Some(())
}

fn add(
    advice: &mut Advice,
    name: &str,
    quota: Option<u64>,
    remaining: u64,
    more_after: Option<Duration>,
) {
    let name = name.to_owned();
    if let (Some(quota), true) = (quota, advice.policies.is_empty()) {
        advice.policies.push(policy(&name, quota, None));
    }
    advice.limits.push(AdvisedLimit { name, remaining, more_after, partition_key: None });
}

fn policy(name: &str, quota: u64, window: Option<Duration>) -> AdvisedPolicy {
    let name = name.to_owned();
    AdvisedPolicy { name, quota, window, unit: Unit::Requests, partition_key: None }
}

/// The time until a reset: in seconds, at a Unix time in seconds or milliseconds, or at a date.
fn until(reset: &str, now: SystemTime) -> Option<Duration> {
    let date =
        || httpdate::parse_http_date(reset).or_else(|_| humantime::parse_rfc3339(reset)).ok();
    let at = match seconds(reset) {
        Some(wait) if wait.as_secs() < LEAST_UNIX_S => return Some(wait),
        Some(unix) if unix.as_secs() < 1_000 * LEAST_UNIX_S => {
            SystemTime::UNIX_EPOCH.checked_add(unix)?
        }
        Some(unix_ms) => SystemTime::UNIX_EPOCH.checked_add(unix_ms / 1_000)?,
        None => date()?,
    };
    Some(at.duration_since(now).unwrap_or_default())
}

/// A number of seconds, which may have a fraction; one that is finer than a nanosecond is rounded
/// up.
fn seconds(text: &str) -> Option<Duration> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let is_number = |digits: &str| !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
    if !is_number(whole) || !is_number(fraction) {
        return None;
    }
    let (digits, finer) = fraction.split_at(fraction.len().min(9));
    let nanos = format!("{digits:0<9}").parse().ok()?;
    let wait = Duration::new(whole.parse().unwrap_or(u64::MAX), nanos);
    let is_finer = finer.bytes().any(|digit| digit != b'0');
    Some(wait.saturating_add(Duration::from_nanos(u64::from(is_finer))))
}

/// `Retry-After`: whole seconds, or a date (RFC 9110, section 10.2.3); some services write a
/// fraction, or milliseconds in a field of their own, which is the more exact one. Several lines
/// are malformed.
pub(super) fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let text = |name: &str| {
        let mut lines = headers.get_all(name).iter();
        let line = lines.next().filter(|_| lines.next().is_none())?;
        HeaderValue::to_str(line).ok().map(str::trim)
    };
    let in_ms = ["retry-after-ms", "x-ms-retry-after-ms"].into_iter().find_map(|name| {
        let ms = seconds(text(name)?)?;
        let nanos = ms.as_nanos().div_ceil(1_000);
        Some(Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)))
    });
    in_ms.or_else(|| {
        let text = text("retry-after")?;
        let date =
            || Some(httpdate::parse_http_date(text).ok()?.duration_since(now).unwrap_or_default());
        seconds(text).or_else(date)
    })
}

//! The `RateLimit` fields of draft-ietf-httpapi-ratelimit-headers-10, as structured lists (RFC 9651).

use http::HeaderMap;
use http::header::{HeaderName, HeaderValue};
use sfv::{Integer, KeyRef, ListSerializer, StringRef};

use super::{Entry, saturated, whole_seconds};

pub(super) const RATELIMIT: HeaderName = HeaderName::from_static("ratelimit");
pub(super) const RATELIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");

const QUOTA: &KeyRef = KeyRef::constant("q");
const UNIT: &KeyRef = KeyRef::constant("qu");
const WINDOW: &KeyRef = KeyRef::constant("w");
const REMAINING: &KeyRef = KeyRef::constant("r");
const TIME: &KeyRef = KeyRef::constant("t");
const PARTITION_KEY: &KeyRef = KeyRef::constant("pk");

/// Appends both fields. The fields of an inner layer stay: they are lists, and a list may have several lines.
pub(super) fn write_v10(entries: &[Entry<'_>], headers: &mut HeaderMap) {
    let mut policies = ListSerializer::new();
    let mut limits = ListSerializer::new();
    for entry in entries {
        // A limit's name is plain ASCII; a name that is none is left out rather than sent malformed.
        let Ok(name) = StringRef::from_str(entry.name) else { continue };
        let mut policy = policies.bare_item(name).parameter(QUOTA, integer(entry.limit));
        if let Some(unit) = entry.unit.as_str().and_then(|unit| StringRef::from_str(unit).ok()) {
            policy = policy.parameter(UNIT, unit);
        }
        if let Some(window) = entry.window_s {
            policy = policy.parameter(WINDOW, integer(window));
        }
        let mut limit = limits.bare_item(name).parameter(REMAINING, integer(entry.remaining));
        if let Some(more_after_us) = entry.more_after_us {
            limit = limit.parameter(TIME, integer(whole_seconds(more_after_us)));
        }
        if let Some(key) = &entry.partition_key {
            policy = policy.parameter(PARTITION_KEY, key.as_slice());
            limit = limit.parameter(PARTITION_KEY, key.as_slice());
        }
        // Both have written what they were given.
        let _written = (policy.finish(), limit.finish());
    }
    for (name, list) in [(RATELIMIT_POLICY, policies.finish()), (RATELIMIT, limits.finish())] {
        if let Some(value) = list.and_then(|list| HeaderValue::try_from(list).ok()) {
            headers.append(name, value);
        }
    }
}

/// The integer, or the largest that a structured field can hold.
fn integer(value: u64) -> Integer {
    Integer::try_from(saturated(value)).unwrap_or(Integer::MAX)
}

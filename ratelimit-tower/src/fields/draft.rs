//! The `RateLimit` fields of draft-ietf-httpapi-ratelimit-headers-11, as structured lists (RFC
//! 9651).

use std::fmt::Write;

use arrayvec::ArrayString;
use http::header::{HeaderName, HeaderValue};
use sfv::{ItemSerializer, RefBareItem, StringRef};

use super::{FieldEntry, MAX_FIELD_INTEGER, whole_seconds};

pub(super) const RATELIMIT: HeaderName = HeaderName::from_static("ratelimit");
pub(super) const RATELIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");

/// The values of `RateLimit-Policy` and `RateLimit` for these limits.
pub(super) fn lists(entries: &[FieldEntry<'_>]) -> Option<[HeaderValue; 2]> {
    // All of it is visible ASCII.
    if let [entry] = entries {
        let policy = entry.policy.cloned().or_else(|| policy(entry))?;
        let limit = HeaderValue::from_bytes(limit_item(entry).as_bytes()).ok()?;
        return Some([policy, limit]);
    }
    let (mut policies, mut limits) = (Vec::new(), Vec::new());
    for entry in entries {
        for list in [&mut policies, &mut limits] {
            if !list.is_empty() {
                list.extend_from_slice(b", ");
            }
        }
        match entry.policy {
            Some(policy) => policies.extend_from_slice(policy.as_bytes()),
            None => policies.extend_from_slice(policy_item(entry).as_bytes()),
        }
        limits.extend_from_slice(limit_item(entry).as_bytes());
    }
    Some([HeaderValue::try_from(policies).ok()?, HeaderValue::try_from(limits).ok()?])
}

/// The `RateLimit-Policy` of one limit.
pub(crate) fn policy(entry: &FieldEntry<'_>) -> Option<HeaderValue> {
    HeaderValue::try_from(policy_item(entry)).ok()
}

fn policy_item(entry: &FieldEntry<'_>) -> String {
    let mut item = String::with_capacity(64);
    write_name(&mut item, entry.name);
    write_integer(&mut item, ";q=", entry.limit);
    if let Some(unit) = entry.unit.as_str().and_then(|unit| StringRef::from_str(unit).ok()) {
        write_item(&mut item, ";qu=", unit);
    }
    if let Some(window) = entry.window_s {
        write_integer(&mut item, ";w=", window);
    }
    if let Some(key) = &entry.partition_key {
        write_item(&mut item, ";pk=", key.as_slice());
    }
    item
}

/// A name has up to 64 bytes, each integer 15, and a partition key 18: 124 with what is around
/// them.
fn limit_item(entry: &FieldEntry<'_>) -> ArrayString<128> {
    let mut item = ArrayString::new();
    write_name(&mut item, entry.name);
    write_integer(&mut item, ";r=", entry.remaining);
    if let Some(more_after_us) = entry.more_after_us {
        write_integer(&mut item, ";t=", whole_seconds(more_after_us));
    }
    if let Some(key) = &entry.partition_key {
        write_item(&mut item, ";pk=", key.as_slice());
    }
    item
}

/// Strings take everything, and an item has room for what is written to it.
fn write(item: &mut impl Write, text: &str) {
    let _written = item.write_str(text);
}

/// A limit's name has only characters that a string need not escape.
fn write_name(item: &mut impl Write, name: &str) {
    write(item, "\"");
    write(item, name);
    write(item, "\"");
}

/// The integer, or the largest that a structured field can hold. `sfv` writes integers through the
/// formatter, which takes longer than all else here.
fn write_integer(item: &mut impl Write, parameter: &str, value: u64) {
    write(item, parameter);
    write(item, itoa::Buffer::new().format(value.min(MAX_FIELD_INTEGER)));
}

/// What `sfv` serializes: a string, or bytes.
fn write_item<'a>(item: &mut impl Write, parameter: &str, value: impl Into<RefBareItem<'a>>) {
    write(item, parameter);
    write(item, &ItemSerializer::new().bare_item(value).finish());
}

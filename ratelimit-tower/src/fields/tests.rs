use std::time::Duration;

use proptest::prelude::*;
use sfv::{FieldType, List, Parser};

use super::advice::Advice;
use super::*;

const REQUESTS: &Unit = &Unit::Requests;

fn entry(name: &str) -> FieldEntry<'_> {
    FieldEntry {
        name,
        limit: 100,
        remaining: 50,
        window_s: Some(60),
        more_after_us: Some(29_000_001),
        reset_after_us: Some(31_000_000),
        unit: REQUESTS,
        partition_key: None,
        policy: None,
    }
}

fn write_fields(fields: &Fields, entries: &[FieldEntry<'_>]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    add(fields, entries, &mut headers);
    headers
}

fn add(fields: &Fields, entries: &[FieldEntry<'_>], headers: &mut HeaderMap) {
    fields.tell(entries).unwrap().write_to(headers);
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> &'a str {
    headers.get(name).map_or("", |value| value.to_str().unwrap())
}

#[test]
fn the_older_fields_tell_the_limit_with_the_least_remaining() {
    let least = FieldEntry { remaining: 3, limit: 7, reset_after_us: Some(1), ..entry("least") };
    for (form, prefix) in [(XRateLimit::Seconds, "x-"), (XRateLimit::Unprefixed, "")] {
        let fields = Fields::new().without_draft().x_ratelimit(form);
        let mut headers = write_fields(&fields, &[entry("burst"), least.clone()]);
        let told = ["limit", "remaining", "reset"]
            .map(|field| text(&headers, &format!("{prefix}ratelimit-{field}")).to_owned());
        assert_eq!(told, ["7", "3", "1"]);
        assert_eq!(headers.len(), 3);
        // An outer layer with more remaining does not hide the inner one's; one with less does.
        let remaining = format!("{prefix}ratelimit-remaining");
        add(&fields, &[entry("burst")], &mut headers);
        assert_eq!(text(&headers, &remaining), "3");
        add(&fields, &[FieldEntry { remaining: 1, ..entry("burst") }], &mut headers);
        assert_eq!(text(&headers, &remaining), "1");
    }

    let fields = Fields::new().without_draft();
    let unix_s = || SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs();
    let before = unix_s();
    let headers = write_fields(&fields.x_ratelimit(XRateLimit::UnixTime), &[least]);
    let told: u64 = text(&headers, "x-ratelimit-reset").parse().unwrap();
    assert!((before..=unix_s() + 1).contains(&told));
}

#[test]
fn retry_after_is_rounded_up_and_at_least_a_second() {
    for (wait_us, seconds) in
        [(1, "1"), (0, "1"), (1_000_000, "1"), (1_000_001, "2"), (59_999_999, "60")]
    {
        let mut headers = HeaderMap::new();
        write_retry_after(wait_us, &mut headers);
        assert_eq!(text(&headers, "retry-after"), seconds);
    }
}

#[test]
fn providers_fields_tell_of_limits_of_their_names_and_are_read_again() {
    let entries = ["requests", "tokens", "input-tokens", "burst"].map(entry);
    for (fields, names, prefix) in [
        (ModelFields::Anthropic, 3, "anthropic-ratelimit-tokens-reset"),
        (ModelFields::OpenAi, 2, "x-ratelimit-reset-tokens"),
    ] {
        let fields = Fields::new().without_draft().model_fields(fields);
        let headers = write_fields(&fields, &entries);
        assert_eq!(headers.len(), 3 * names);
        assert_ne!(text(&headers, prefix), "");
        let Advice { limits, policies, .. } = Advice::from_headers(&headers);
        let told: Vec<_> = limits.iter().map(|limit| (&*limit.name, limit.remaining)).collect();
        assert_eq!(told, [("requests", 50), ("tokens", 50), ("input-tokens", 50)][..names]);
        assert!(policies.iter().all(|policy| policy.quota == 100));
        for wait in limits.iter().filter_map(|limit| limit.more_after) {
            assert!((Duration::from_secs(30)..=Duration::from_secs(32)).contains(&wait));
        }
    }
    for (us, due) in [
        (0, "0s"),
        (1, "1ms"),
        (820_000, "820ms"),
        (1_000_001, "1.001s"),
        (86_400_000, "1m26.4s"),
        (360_000_000, "6m0s"),
        (7_205_000_000, "2h0m5s"),
    ] {
        let entry = FieldEntry { reset_after_us: Some(us), ..entry("requests") };
        let headers = write_fields(&Fields::new().model_fields(ModelFields::OpenAi), &[entry]);
        assert_eq!(text(&headers, "x-ratelimit-reset-requests"), due);
    }
    let far = FieldEntry { reset_after_us: Some(u64::MAX), ..entry("requests") };
    let headers = write_fields(&Fields::new().model_fields(ModelFields::Anthropic), &[far]);
    assert_eq!(text(&headers, "anthropic-ratelimit-requests-reset"), "");
}

#[cfg(feature = "partition-key")]
#[test]
fn a_partition_key_depends_on_the_secret_the_limit_and_the_caller() {
    let fields = Fields::new().partition_key([1; 32]);
    let key = fields.partition_key_of("burst", "192.0.2.7");
    assert_eq!(key, fields.partition_key_of("burst", "192.0.2.7"));
    assert_ne!(key, fields.partition_key_of("burst", "192.0.2.8"));
    assert_ne!(key, fields.partition_key_of("daily", "192.0.2.7"));
    assert_ne!(key, Fields::new().partition_key([2; 32]).partition_key_of("burst", "192.0.2.7"));
    assert_eq!(Fields::new().partition_key_of("burst", "192.0.2.7"), None);
}

/// Often one that is too long for a field.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![any::<u64>(), Just(u64::MAX), 0..1_000_u64]
}

proptest! {
    #[test]
    fn what_is_written_is_read_and_is_as_the_standard_writes_it(
        name in prop_oneof!["[A-Za-z0-9._-]{1,64}", "[a-z]{64}"],
        limit in number(),
        remaining in number(),
        window_s in prop::option::of(number().prop_map(|s| s.max(1))),
        more_after_us in prop::option::of(number()),
        unit in prop_oneof![
            Just(Unit::Requests),
            Just(Unit::ContentBytes),
            Just(Unit::ConcurrentRequests),
            "[ -~]{1,20}".prop_map(|unit| Unit::Other(format!("{unit}x").into())),
        ],
        partition_key in prop::option::of(any::<[u8; 12]>()),
    ) {
        let one = FieldEntry {
            name: &name, limit, remaining, window_s, more_after_us, unit: &unit, partition_key, reset_after_us: Some(0), policy: None,
        };
        let headers = write_fields(&Fields::new(), &[one.clone(), entry("other")]);
        for field in ["ratelimit-policy", "ratelimit"] {
            let list: List = Parser::new(text(&headers, field)).parse().unwrap();
            prop_assert_eq!(list.serialize(), Some(text(&headers, field).to_owned()));
        }
        let advice = Advice::from_headers(&headers);
        let (policy, told) = (&advice.policies[0], &advice.limits[0]);
        let cap = |value: u64| value.min(MAX_FIELD_INTEGER);
        let seconds = |s| Duration::from_secs(cap(s));
        prop_assert_eq!((&*policy.name, policy.quota), (&*name, cap(limit)));
        prop_assert_eq!((&policy.unit, policy.window), (&unit, window_s.map(seconds)));
        prop_assert_eq!((&*told.name, told.remaining), (&*name, cap(remaining)));
        prop_assert_eq!(told.more_after, more_after_us.map(|us| seconds(us.div_ceil(1_000_000))));
        let key = partition_key.as_ref().map(|key| &key[..]);
        prop_assert_eq!((policy.partition_key.as_deref(), told.partition_key.as_deref()), (key, key));
        prop_assert_eq!((&*advice.policies[1].name, &*advice.limits[1].name), ("other", "other"));
    }
}

use std::time::Duration;

use proptest::prelude::*;

use super::advice::Advice;
use super::*;
use rfc9651::{Bare, parse_list};

#[path = "../../tests/rfc9651/mod.rs"]
mod rfc9651;

const REQUESTS: &Unit = &Unit::Requests;

fn entry(name: &str) -> Entry<'_> {
    Entry {
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

fn written(fields: &Fields, entries: &[Entry<'_>]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    add(fields, entries, &mut headers);
    headers
}

fn add(fields: &Fields, entries: &[Entry<'_>], headers: &mut HeaderMap) {
    fields.tell(entries).unwrap().write_to(headers);
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> &'a str {
    headers.get(name).map_or("", |value| value.to_str().unwrap())
}

#[test]
fn the_fields_of_the_draft_are_its_own_examples() {
    let daily =
        Entry { limit: 1_000, window_s: Some(86_400), more_after_us: None, ..entry("daily") };
    let headers = written(&Fields::new(), &[entry("burst"), daily]);
    assert_eq!(text(&headers, "ratelimit-policy"), r#""burst";q=100;w=60, "daily";q=1000;w=86400"#);
    assert_eq!(text(&headers, "ratelimit"), r#""burst";r=50;t=30, "daily";r=50"#);
    assert_eq!(headers.len(), 2);
}

#[test]
fn units_and_partition_keys_are_written_and_absent_windows_left_out() {
    let bytes = Unit::ContentBytes;
    let entries = [
        Entry { unit: &bytes, partition_key: Some(*b"twelve bytes"), ..entry("bytes") },
        Entry { unit: &Unit::ConcurrentRequests, window_s: None, ..entry("busy") },
    ];
    let headers = written(&Fields::new(), &entries);
    let policy = r#""bytes";q=100;qu="content-bytes";w=60;pk=:dHdlbHZlIGJ5dGVz:, "busy";q=100;qu="concurrent-requests""#;
    assert_eq!(text(&headers, "ratelimit-policy"), policy);
    assert!(text(&headers, "ratelimit").contains("pk=:dHdlbHZlIGJ5dGVz:"));
}

#[test]
fn the_longest_item_is_written_whole() {
    let name = "n".repeat(64);
    let longest = Entry {
        limit: u64::MAX,
        remaining: u64::MAX,
        window_s: Some(u64::MAX),
        more_after_us: Some(u64::MAX),
        partition_key: Some([255; 12]),
        ..entry(&name)
    };
    let headers = written(&Fields::new(), &[longest]);
    let told = format!(r#""{name}";r=999999999999999;t=18446744073710;pk=:////////////////:"#);
    assert_eq!(text(&headers, "ratelimit"), told);
}

#[test]
fn an_inner_layers_fields_stay_and_all_lines_are_one_list() {
    let mut headers = written(&Fields::new(), &[entry("inner")]);
    add(&Fields::new(), &[entry("outer")], &mut headers);
    let advice = Advice::from_headers(&headers);
    let names: Vec<_> = advice.limits.iter().map(|limit| limit.name.as_str()).collect();
    assert_eq!(names, ["inner", "outer"]);
}

#[test]
fn older_fields_tell_the_limit_with_the_least_remaining() {
    let least = Entry { remaining: 3, limit: 7, reset_after_us: Some(1), ..entry("least") };
    let fields = Fields::new().draft(Draft::V06).x_ratelimit(XRateLimit::Seconds);
    let mut headers = written(&fields, &[entry("burst"), least]);
    for prefix in ["", "x-"] {
        let told = ["limit", "remaining", "reset"]
            .map(|field| text(&headers, &format!("{prefix}ratelimit-{field}")).to_owned());
        assert_eq!(told, ["7", "3", "1"]);
    }
    assert!(!headers.contains_key("ratelimit"));
    // An outer layer with more remaining does not hide the inner one's; one with less does.
    add(&fields, &[entry("burst")], &mut headers);
    assert_eq!(text(&headers, "x-ratelimit-remaining"), "3");
    add(&fields, &[Entry { remaining: 1, ..entry("burst") }], &mut headers);
    assert_eq!(text(&headers, "x-ratelimit-remaining"), "1");
}

#[test]
fn a_unix_time_is_now_and_the_wait() {
    let now_s = || unix_us() / 1_000_000;
    let before = now_s();
    let headers =
        written(&Fields::new().without_draft().x_ratelimit(XRateLimit::UnixTime), &[entry("a")]);
    let told: u64 = text(&headers, "x-ratelimit-reset").parse().unwrap();
    assert!((before + 31..=now_s() + 32).contains(&told));
    assert!(!headers.contains_key("ratelimit"));
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
fn a_unit_that_is_set_again_is_the_last_one() {
    let fields =
        Fields::new().unit("a", Unit::ContentBytes).unit("a", Unit::Other("tokens".into()));
    assert_eq!(fields.unit_of("a").and_then(Unit::as_str), Some("tokens"));
    assert_eq!(fields.unit_of("b"), None);
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

proptest! {
    #[test]
    fn two_other_parsers_read_what_is_written(
        name in "[A-Za-z0-9._-]{1,64}",
        limit: u64,
        remaining: u64,
        window_s in prop::option::of(1_u64..),
        more_after_us in prop::option::of(any::<u64>()),
        unit in prop_oneof![
            Just(Unit::Requests),
            Just(Unit::ContentBytes),
            Just(Unit::ConcurrentRequests),
            "[ -~]{1,20}".prop_map(|unit| Unit::Other(format!("{unit}x").into())),
        ],
        partition_key in prop::option::of(any::<[u8; 12]>()),
    ) {
        let one = Entry {
            name: &name, limit, remaining, window_s, more_after_us, unit: &unit, partition_key, reset_after_us: Some(0), policy: None,
        };
        let headers = written(&Fields::new(), &[one.clone(), entry("other")]);
        let policies = parse_list(text(&headers, "ratelimit-policy")).unwrap();
        let limits = parse_list(text(&headers, "ratelimit")).unwrap();
        let cap = |value: u64| i64::try_from(value.min(MAX_FIELD_INTEGER)).unwrap();
        prop_assert_eq!(policies[0].name(), &name);
        prop_assert_eq!(policies[0].integer("q"), Some(cap(limit)));
        prop_assert_eq!(policies[0].integer("w"), window_s.map(cap));
        prop_assert_eq!(limits[0].integer("r"), Some(cap(remaining)));
        prop_assert_eq!(limits[0].integer("t"), more_after_us.map(|us| cap(us.div_ceil(1_000_000))));
        let said = policies[0].parameter("qu").cloned();
        prop_assert_eq!(said, unit.as_str().map(|unit| Bare::String(unit.to_owned())));
        prop_assert_eq!((policies[1].name(), limits[1].name()), ("other", "other"));

        let advice = Advice::from_headers(&headers);
        prop_assert_eq!(advice.policies.len(), 2);
        prop_assert_eq!(advice.limits[0].remaining, remaining.min(MAX_FIELD_INTEGER));
        prop_assert_eq!(&advice.policies[0].unit, &unit);
        prop_assert_eq!(advice.limits[0].partition_key.as_deref(), partition_key.as_ref().map(|key| &key[..]));
        let window = window_s.map(|s| Duration::from_secs(s.min(MAX_FIELD_INTEGER)));
        prop_assert_eq!(advice.policies[0].window, window);
    }
}

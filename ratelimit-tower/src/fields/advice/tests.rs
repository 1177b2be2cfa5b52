use super::*;

fn advice(fields: &[(&'static str, &str)]) -> Advice {
    let mut headers = HeaderMap::new();
    for (name, value) in fields {
        headers.append(*name, value.parse().unwrap());
    }
    let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
    Advice::from_headers_at(&headers, now)
}

#[test]
fn a_malformed_field_is_ignored_whole_and_the_other_is_not() {
    for (field, malformed) in [
        ("ratelimit", r#""good";r=1, "bad""#),
        ("ratelimit", r#""good";r=1, "bad";r=-1"#),
        ("ratelimit", r#""good";r=1, "bad";r=1.5"#),
        ("ratelimit", r#""good";r=1, "bad";r="1""#),
        ("ratelimit", r#""good";r=1, "bad";r=1;t=soon"#),
        ("ratelimit", r#""good";r=1, "bad";r=1;pk="text""#),
        ("ratelimit", r#""good";r=1, token;r=1"#),
        ("ratelimit", r#""good";r=1, ("list");r=1"#),
        ("ratelimit", r#""good";r=1,"#),
        ("ratelimit", r#""good";r=1 "bad";r=1"#),
        ("ratelimit", r#""good";r=1, "bad;r=1"#),
        ("ratelimit", "limit=100, remaining=50, reset=5"),
        ("ratelimit-policy", r#""a";w=60"#),
        ("ratelimit-policy", r#""a";q=1;w=0"#),
        ("ratelimit-policy", r#""a";q=1;w=1.5"#),
        ("ratelimit-policy", r#""a";q=1;qu=requests"#),
    ] {
        let good = [("ratelimit", r#""a";r=1;unknown=1.5"#), ("ratelimit-policy", r#""a";q=1"#)];
        let told =
            advice(&good.map(|(name, text)| (name, if name == field { malformed } else { text })));
        let read = (told.limits.len(), told.policies.len());
        assert_eq!(read, if field == "ratelimit" { (0, 1) } else { (1, 0) }, "{malformed}");
    }
}

#[test]
fn retry_after_is_seconds_or_a_date_and_goes_before_the_limits() {
    let wait = |retry_after| {
        advice(&[("retry-after", retry_after), ("ratelimit", r#""a";r=0;t=7, "b";r=1;t=90"#)])
            .wait()
    };
    assert_eq!(wait("30"), Some(Duration::from_secs(30)));
    assert_eq!(wait("Sun, 09 Sep 2001 01:47:40 GMT"), Some(Duration::from_secs(60)));
    assert_eq!(wait("Sun, 09 Sep 2001 01:00:00 GMT"), Some(Duration::ZERO));
    assert_eq!(wait("99999999999999999999999"), Some(Duration::from_secs(u64::MAX)));
    // Malformed: the exhausted limit's own time counts.
    for malformed in ["-1", "1.5", "soon", ""] {
        assert_eq!(wait(malformed), Some(Duration::from_secs(7)), "{malformed}");
    }
    assert_eq!(advice(&[("ratelimit", r#""b";r=1;t=90"#)]).wait(), None);
}

#[test]
fn what_providers_of_language_models_send_is_read() {
    let told = advice(&[
        ("anthropic-ratelimit-input-tokens-limit", "40000"),
        ("anthropic-ratelimit-input-tokens-remaining", "0"),
        ("anthropic-ratelimit-input-tokens-reset", "2001-09-09T01:46:52Z"),
        ("anthropic-ratelimit-tokens-remaining", "many"),
        ("x-ratelimit-limit-requests", "60"),
        ("x-ratelimit-remaining-requests", "59"),
        ("x-ratelimit-reset-requests", "1m26.4s"),
        ("x-ratelimit-remaining-tokens", "149984"),
        ("x-ratelimit-reset-tokens", "6m0s"),
        // What is malformed, or past the range of a duration, is not read.
        ("anthropic-ratelimit-output-tokens-remaining", "7"),
        ("anthropic-ratelimit-output-tokens-reset", "18446744073709551615"),
        ("anthropic-ratelimit-requests-reset", "9999-99-99T99:99:99Z"),
    ]);
    let limits: Vec<_> = told
        .limits
        .iter()
        .map(|limit| (&*limit.name, limit.remaining, limit.more_after.map(|us| us.as_millis())))
        .collect();
    let due = [
        ("input-tokens", 0, Some(12_000)),
        ("output-tokens", 7, None),
        ("requests", 59, Some(86_400)),
        ("tokens", 149_984, Some(360_000)),
    ];
    assert_eq!(limits, due);
    let policies: Vec<_> = told.policies.iter().map(|one| (&*one.name, one.quota)).collect();
    assert_eq!(policies, [("input-tokens", 40_000), ("requests", 60)]);
    assert_eq!(told.wait(), Some(Duration::from_secs(12)));
    for reset in ["18446744073709551615s 999999999ns 1ns", "18446744073709551615s", "much"] {
        let fields = [("x-ratelimit-remaining-tokens", "1"), ("x-ratelimit-reset-tokens", reset)];
        assert_eq!(advice(&fields).limits[0].more_after, None, "{reset}");
    }
}

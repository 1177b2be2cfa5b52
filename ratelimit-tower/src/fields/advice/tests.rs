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
fn items_of_all_lines_are_read_with_their_parameters() {
    let told = advice(&[
        ("ratelimit-policy", r#""burst";q=100;w=60,"bytes";q=5;qu="content-bytes";pk=:AQI=:"#),
        ("ratelimit-policy", r#""tokens";q=7;qu="tokens";unknown=1.5"#),
        ("ratelimit", r#""burst";r=50;t=30, "bytes";r=0;pk=:AQI=:"#),
    ]);
    let policy = &told.policies[1];
    assert_eq!(
        (policy.name.as_str(), policy.quota, &policy.unit),
        ("bytes", 5, &Unit::ContentBytes)
    );
    assert_eq!(policy.partition_key.as_deref(), Some(&[1, 2][..]));
    assert_eq!(told.policies[0].window, Some(Duration::from_secs(60)));
    assert_eq!(told.policies[2].unit, Unit::Other("tokens".into()));
    assert_eq!(told.limits[0].more_after, Some(Duration::from_secs(30)));
    assert_eq!((told.limits[1].remaining, told.limits[1].more_after), (0, None));
}

#[test]
fn a_malformed_field_is_ignored_whole_and_the_others_are_not() {
    for malformed in [
        r#""good";r=1, "bad""#,
        r#""good";r=1, "bad";r=-1"#,
        r#""good";r=1, "bad";r=1.5"#,
        r#""good";r=1, "bad";r="1""#,
        r#""good";r=1, "bad";r=1;t=soon"#,
        r#""good";r=1, "bad";r=1;pk="text""#,
        r#""good";r=1, token;r=1"#,
        r#""good";r=1, ("list");r=1"#,
        r#""good";r=1,"#,
        r#""good";r=1 "bad";r=1"#,
        r#""good";r=1, "bad;r=1"#,
        "limit=100, remaining=50, reset=5",
    ] {
        let told = advice(&[("ratelimit", malformed), ("ratelimit-policy", r#""good";q=1"#)]);
        assert_eq!(told.limits, [], "{malformed}");
        assert_eq!(told.policies.len(), 1);
    }
    for malformed in [r#""a";w=60"#, r#""a";q=1;w=0"#, r#""a";q=1;w=1.5"#, r#""a";q=1;qu=requests"#]
    {
        let told = advice(&[("ratelimit-policy", malformed), ("ratelimit", r#""a";r=1"#)]);
        assert_eq!(told.policies, [], "{malformed}");
        assert_eq!(told.limits.len(), 1);
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

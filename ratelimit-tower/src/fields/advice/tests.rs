use sfv::FieldType;

use super::*;
use crate::fields::{FieldEntry, Fields};

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
    for malformed in ["-1", "1,5", "1.5.5", ".5", "5.", "1e3", "soon", ""] {
        assert_eq!(wait(malformed), Some(Duration::from_secs(7)), "{malformed}");
    }
    assert_eq!(advice(&[("ratelimit", r#""b";r=1;t=90"#)]).wait(), None);
    // Of several that are exhausted the longest counts, wherever it stands.
    let items = [r#""a";r=0;t=5"#, r#""b";r=0;t=8"#, r#""c";r=1;t=90"#, r#""d";r=0"#];
    for nth in 0..items.len() {
        let mut items = items;
        items.rotate_left(nth);
        let told = advice(&[("ratelimit", &items.join(", "))]);
        assert_eq!(told.wait(), Some(Duration::from_secs(8)), "{items:?}");
    }
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

#[test]
fn retry_hints_with_fractions_and_in_milliseconds_are_rounded_up() {
    let ns = |ns| Some(Duration::from_nanos(ns));
    for (field, hint, wait) in [
        ("retry-after", "1.5", ns(1_500_000_000)),
        ("retry-after", "0.0000000001", ns(1)),
        ("retry-after", "2.0000000000", ns(2_000_000_000)),
        ("retry-after-ms", "1500", ns(1_500_000_000)),
        ("retry-after-ms", "0.25", ns(250_000)),
        ("retry-after-ms", "0.0000001", ns(1)),
        ("x-ms-retry-after-ms", "20", ns(20_000_000)),
        ("retry-after-ms", "soon", None),
    ] {
        assert_eq!(advice(&[(field, hint)]).wait(), wait, "{field}: {hint}");
    }
    // The more exact one counts where it can be read.
    let both = |ms| advice(&[("retry-after", "2"), ("retry-after-ms", ms)]).wait();
    assert_eq!([both("1200"), both("-1")], [ns(1_200_000_000), ns(2_000_000_000)]);
}

/// Each limit in words, and each policy.
fn words(told: &Advice) -> String {
    let s = |time: Option<Duration>| time.map_or("-".to_owned(), |t| t.as_secs().to_string());
    let limits = told
        .limits
        .iter()
        .map(|limit| format!("{} r{} t{}", limit.name, limit.remaining, s(limit.more_after)));
    let policies =
        told.policies.iter().map(|one| format!("{} q{} w{}", one.name, one.quota, s(one.window)));
    limits.chain(policies).collect::<Vec<_>>().join(", ")
}

#[test]
fn older_fields_are_read_where_the_current_ones_are_missing() {
    const LIMIT: &str = "ratelimit-limit";
    const REMAINING: &str = "ratelimit-remaining";
    const RESET: &str = "ratelimit-reset";
    const POLICY: &str = "ratelimit-policy";
    let x = ["x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset"];
    let resource = "x-ratelimit-resource";
    let rows: &[(&[(&'static str, &str)], &str)] = &[
        // GitHub: a Unix time.
        (
            &[(x[0], "60"), (x[1], "0"), (x[2], "1000000030"), (resource, "core")],
            "core r0 t30, core q60 w-",
        ),
        (
            &[(x[0], "60"), (x[1], "0"), (x[2], "999999999")],
            "default r0 t999999999, default q60 w-",
        ),
        // In seconds, in milliseconds, at dates, in the past.
        (&[(x[1], "3"), (x[2], "30")], "default r3 t30"),
        (&[(x[1], "3"), (x[2], "1000000030000")], "default r3 t30"),
        (&[(x[1], "3"), (x[2], "2001-09-09T01:47:10Z")], "default r3 t30"),
        (&[(x[1], "3"), (x[2], "Sun, 09 Sep 2001 01:47:10 GMT")], "default r3 t30"),
        (&[(x[1], "3"), (x[2], "1000000000")], "default r3 t0"),
        (&[(x[1], "3"), (x[2], "soon")], "default r3 t-"),
        (&[(x[1], "many"), (x[0], "60")], ""),
        // Drafts up to 06.
        (
            &[(LIMIT, "100, 100;w=60"), (REMAINING, "50"), (RESET, "30")],
            "default r50 t30, default q100 w-",
        ),
        (
            &[(LIMIT, "10"), (POLICY, "10;w=1, 50;w=60"), (REMAINING, "0"), (RESET, "1")],
            "default r0 t1, default q10 w1, default q50 w60",
        ),
        // Draft 07.
        (
            &[("ratelimit", "limit=100, remaining=50, reset=5"), (POLICY, "100;w=60;comment=1")],
            "default r50 t5, default q100 w60",
        ),
        (&[("ratelimit", "limit=100, remaining=0")], "default r0 t-, default q100 w-"),
        (&[("ratelimit", "limit=100, reset=5"), (x[1], "3")], "default r3 t-"),
        // The current form goes before all, and the unprefixed one before the other.
        (&[("ratelimit", r#""a";r=1;t=2"#), (REMAINING, "50"), (x[1], "3")], "a r1 t2"),
        (&[(REMAINING, "50"), (x[1], "3")], "default r50 t-"),
    ];
    for (fields, due) in rows {
        assert_eq!(words(&advice(fields)), *due, "{fields:?}");
    }
}

/// The field lines of the examples of draft-ietf-httpapi-ratelimit-headers-11, in its order, and
/// what they say.
#[test]
fn the_examples_of_the_draft_are_read_as_it_means_them() {
    const POLICY: &str = "ratelimit-policy";
    const LIMIT: &str = "ratelimit";
    const RETRY: &str = "retry-after";
    let lines = [
        (
            POLICY,
            r#""burst";q=100;w=60,"daily";q=1000;w=86400"#,
            "burst q100 w60, daily q1000 w86400",
        ),
        (POLICY, r#""default";q=100;w=10"#, "default q100 w10"),
        (
            POLICY,
            r#""permin";q=50;w=60,"perhr";q=1000;w=3600"#,
            "permin q50 w60, perhr q1000 w3600",
        ),
        (POLICY, r#""peruser";q=100;w=60;pk=:cHsdsRa894==:"#, "peruser q100 w60"),
        (
            POLICY,
            r#""peruser";q=65535;qu="content-bytes";w=10;pk=:sdfjLJUOUH==:"#,
            "peruser q65535 w10",
        ),
        (LIMIT, r#""default";r=50;t=30"#, "default r50 t30"),
        (LIMIT, r#""default";r=50;t=30"#, "default r50 t30"),
        (LIMIT, r#""default";r=999;pk=:dHJpYWwxMjEzMjM=:"#, "default r999 t-"),
        (LIMIT, r#""default";r=300000000;t=60;pk=:QXBwLTk5OQ==:"#, "default r300000000 t60"),
        (LIMIT, r#""problemPolicy";r=0;t=10"#, "problemPolicy r0 t10"),
        (LIMIT, r#""default";r=1;t=7"#, "default r1 t7"),
        (LIMIT, r#""daily";r=1;t=86400"#, "daily r1 t86400"),
        (POLICY, r#""somepolicy";q=10000;w=1000"#, "somepolicy q10000 w1000"),
        (LIMIT, r#""somepolicy";r=10000;t=10"#, "somepolicy r10000 t10"),
        (RETRY, "1000000", "wait 1000000"),
        (LIMIT, r#""default";r=0;t=50"#, "default r0 t50"),
        (LIMIT, r#""default";r=0;t=48"#, "default r0 t48"),
        (LIMIT, r#""dayLimit";r=100;t=36000"#, "dayLimit r100 t36000"),
        (POLICY, r#""basic";q=100;w=60"#, "basic q100 w60"),
        (LIMIT, r#""basic";r=60;t=58"#, "basic r60 t58"),
        (POLICY, r#""basic";q=100;w=60"#, "basic q100 w60"),
        (LIMIT, r#""basic";r=20;t=56"#, "basic r20 t56"),
        (RETRY, "Mon, 05 Aug 2019 09:27:05 GMT", "wait 5"),
        (LIMIT, r#""default";r=0;t=5"#, "default r0 t5"),
        (LIMIT, r#""fixedwindow";r=99;t=50"#, "fixedwindow r99 t50"),
        (POLICY, r#""fixedwindow";q=100;w=60"#, "fixedwindow q100 w60"),
        (POLICY, r#""dynamic";q=100;w=60"#, "dynamic q100 w60"),
        (LIMIT, r#""dynamic";r=9;t=50"#, "dynamic r9 t50"),
        (POLICY, r#""dynamic";q=15;w=20"#, "dynamic q15 w20"),
        (LIMIT, r#""dynamic";r=0;t=20"#, "dynamic r0 t20"),
        (RETRY, "20", "wait 20"),
        (POLICY, r#""dynamic";q=100;w=60"#, "dynamic q100 w60"),
        (LIMIT, r#""dynamic";r=15;t=40"#, "dynamic r15 t40"),
        (
            POLICY,
            r#""hour";q=1000;w=3600, "day";q=5000;w=86400"#,
            "hour q1000 w3600, day q5000 w86400",
        ),
        (LIMIT, r#""day";r=100;t=36000"#, "day r100 t36000"),
        (LIMIT, r#""default";r=50;t=60"#, "default r50 t60"),
        (POLICY, r#""sliding";q=100;w=60;burst=1000"#, "sliding q100 w60"),
        (POLICY, r#""fixed";q=5000;w=3600;burst=0"#, "fixed q5000 w3600"),
        (LIMIT, r#""sliding";r=50;t=44"#, "sliding r50 t44"),
        (POLICY, r#""sliding";q=12;w=1"#, "sliding q12 w1"),
        (LIMIT, r#""sliding";q=12;r=6;t=1"#, "sliding r6 t1"),
        (POLICY, r#""sliding";q=12;w=1"#, "sliding q12 w1"),
        (LIMIT, r#""sliding";q=12;r=1;t=1"#, "sliding r1 t1"),
    ];
    let at = httpdate::parse_http_date("Mon, 05 Aug 2019 09:27:00 GMT").unwrap();
    for (field, line, due) in lines {
        let mut headers = HeaderMap::new();
        headers.insert(field, line.parse().unwrap());
        let told = Advice::from_headers_at(&headers, at);
        let wait = told.retry_after.map(|wait| format!("wait {}", wait.as_secs()));
        assert_eq!(wait.unwrap_or_else(|| words(&told)), due, "{line}");
        // What the writer can say, it says in the same words.
        let can_say = |comment| !line.contains(comment);
        if field != RETRY && ["pk=", "burst=", ";q=12;r"].into_iter().all(can_say) {
            let list: List = Parser::new(line).parse().unwrap();
            assert_eq!(Some(written_again(&told, field)), list.serialize(), "{line}");
        }
    }
    let keys = [r#""a";r=1;pk=:cHsdsRa894==:"#, r#""a";r=1;pk=:QXBwLTk5OQ==:"#]
        .map(|line| advice(&[("ratelimit", line)]).limits[0].partition_key.as_ref().map(Vec::len));
    assert_eq!(keys, [Some(7), Some(7)]);
}

/// What the layer would write of these limits, or these policies.
fn written_again(told: &Advice, field: &str) -> String {
    let entry = |name| FieldEntry {
        name,
        limit: 0,
        remaining: 0,
        window_s: None,
        more_after_us: None,
        reset_after_us: None,
        unit: &Unit::Requests,
        partition_key: None,
        policy: None,
    };
    let limits = told.limits.iter().map(|limit| FieldEntry {
        remaining: limit.remaining,
        more_after_us: limit.more_after.map(|after| after.as_micros().try_into().unwrap()),
        ..entry(&limit.name)
    });
    let policies = told.policies.iter().map(|policy| FieldEntry {
        limit: policy.quota,
        window_s: policy.window.map(|window| window.as_secs()),
        unit: &policy.unit,
        ..entry(&policy.name)
    });
    let entries: Vec<_> = limits.chain(policies).collect();
    let mut headers = HeaderMap::new();
    Fields::new().tell(&entries).unwrap().write_to(&mut headers);
    headers[field].to_str().unwrap().to_owned()
}

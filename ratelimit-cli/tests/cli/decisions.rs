//! The decision lines, byte for byte.

use crate::common::{BUCKET, Scene, TWO, gzip};

#[test]
fn a_trace_of_every_operation_gives_exactly_these_lines() {
    let scene = Scene::new(BUCKET);
    let decisions = scene.decisions(concat!(
        "{\"at_us\": 0, \"key\": \"k\", \"cost\": 2}\n",
        "{\"at_us\": 0, \"key\": \"k\", \"cost\": 3, \"op\": \"peek\"}\n",
        "{\"at_us\": 500000, \"key\": \"k\", \"cost\": 5}\n",
        "{\"at_us\": 500000, \"key\": \"k\", \"cost\": 6}\n",
        "{\"at_us\": 500000, \"key\": \"k\", \"cost\": 1, \"op\": \"refund\"}\n",
        "{\"at_us\": 500000, \"key\": \"k\", \"cost\": 9, \"op\": \"force\"}\n",
        "{\"at_us\": 400000, \"key\": \"k\"}\n",
        "\n",
        "{\"at_us\": 400000, \"key\": \"k\", \"op\": \"reset\"}\n",
        "{\"at_us\": 300000, \"key\": \"k\", \"cost\": 0}",
    ));
    let line = |at, cost, allowed, remaining, retry: &str, reset| {
        format!(
            "{{\"at_us\":{at},\"key\":\"k\",\"cost\":{cost},\"allowed\":{allowed},\"limit\":5,\
             \"remaining\":{remaining},\"retry_after_us\":{retry},\"reset_after_us\":{reset}}}\n"
        )
    };
    let expected = [
        line(0, 2, true, 3, "0", 2_000_000),
        line(0, 3, true, 0, "0", 5_000_000),
        line(500_000, 5, false, 3, "1500000", 1_500_000),
        line(500_000, 6, false, 3, "null", 1_500_000),
        line(500_000, 1, true, 4, "0", 500_000),
        line(500_000, 9, true, 0, "0", 5_000_000),
        line(400_000, 1, false, 0, "1100000", 5_100_000),
        line(400_000, 1, true, 5, "0", 0),
        line(300_000, 0, true, 5, "0", 0),
    ];
    assert_eq!(decisions, expected.concat());
}

#[test]
fn with_several_limits_the_line_carries_those_that_apply() {
    let scene = Scene::new(&TWO);
    let decisions = scene.decisions(concat!(
        "{\"at_us\": 60000000, \"keys\": {\"user\": \"u\", \"ip\": \"a\"}, \"cost\": 2}\n",
        "{\"at_us\": 60000000, \"key\": \"k\", \"keys\": {\"ip\": \"a\"}, \"cost\": 2}\n",
        "{\"at_us\": 60000000, \"key\": \"k\"}\n",
        "{\"at_us\": 60000000, \"keys\": {\"user\": \"v\", \"ip\": \"b\"}, \"cost\": {\"per-ip\": 3}}\n",
    ));
    let expected = concat!(
        r#"{"at_us":60000000,"keys":{"user":"u","ip":"a"},"cost":2,"allowed":true,"limit":2,"remaining":0,"retry_after_us":0,"reset_after_us":60000000,"limits":[{"name":"per-ip","allowed":true,"limit":3,"remaining":1,"retry_after_us":0,"reset_after_us":2000000},{"name":"per-user","allowed":true,"limit":2,"remaining":0,"retry_after_us":0,"reset_after_us":60000000}]}"#,
        "\n",
        r#"{"at_us":60000000,"key":"k","keys":{"ip":"a"},"cost":2,"allowed":false,"limit":3,"remaining":1,"retry_after_us":1000000,"reset_after_us":2000000,"limits":[{"name":"per-ip","allowed":false,"limit":3,"remaining":1,"retry_after_us":1000000,"reset_after_us":2000000}]}"#,
        "\n",
        r#"{"at_us":60000000,"key":"k","cost":1,"allowed":true,"limit":null,"remaining":null,"retry_after_us":0,"reset_after_us":0,"limits":[]}"#,
        "\n",
        r#"{"at_us":60000000,"keys":{"user":"v","ip":"b"},"cost":{"per-ip":3,"*":1},"allowed":true,"limit":3,"remaining":0,"retry_after_us":0,"reset_after_us":60000000,"limits":[{"name":"per-ip","allowed":true,"limit":3,"remaining":0,"retry_after_us":0,"reset_after_us":3000000},{"name":"per-user","allowed":true,"limit":2,"remaining":1,"retry_after_us":0,"reset_after_us":60000000}]}"#,
        "\n",
    );
    assert_eq!(decisions, expected);
}

#[test]
fn plain_gzipped_and_standard_input_give_the_same_bytes() {
    let scene = Scene::new(BUCKET);
    let lines: Vec<String> =
        (0..3_000).map(|n| format!("{{\"at_us\":{},\"key\":\"k{}\"}}\n", n * 70, n % 7)).collect();
    let plain = lines.concat();
    let expected = scene.decisions(&plain);
    assert_eq!(expected.lines().count(), 3_000);

    // Two gzip members in sequence, as concatenated rotated logs have.
    let (a, b) = plain.split_at(10_000);
    let gzipped = [gzip(a.as_bytes()), gzip(b.as_bytes())].concat();
    scene.write("input", &gzipped);
    assert_eq!(scene.decision_lines(&["input"]), expected);

    for input in [plain.as_bytes(), &gzipped] {
        let arguments = ["replay", "--policy", "policy.toml", "--decisions", "-", "-"];
        let ran = scene.run_with_input(&arguments, input);
        assert_eq!((ran.code, &ran.out), (0, &expected));
        assert!(ran.err.contains("requests"), "{}", ran.err);
    }
}

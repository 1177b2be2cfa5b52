//! Customers with numbers of their own: in traces, and by `--numbers`.

use crate::common::{BUCKET, Scene};

/// A bucket of five that accepts up to a hundred, and a window that accepts nothing.
fn policy() -> String {
    let window = "[[limit]]\nname = \"window\"\nalgorithm = \"fixed-window\"\nrate = \"1000/h\"\n";
    format!("{BUCKET}max = \"100/s burst 100\"\n{window}")
}

#[test]
fn a_trace_brings_the_numbers_of_its_customers_in_either_format() {
    let scene = Scene::new(&policy());
    let jsonl = concat!(
        "{\"at_us\":0,\"key\":\"gold\",\"cost\":20,\"numbers\":{\"bucket\":\"10/s burst 50\"}}\n",
        "{\"at_us\":0,\"key\":\"free\",\"cost\":4}\n",
        "{\"at_us\":0,\"key\":\"slow\",\"numbers\":{\"bucket\":\"1/m burst 1\"}}\n",
        "{\"at_us\":0,\"key\":\"slow\",\"numbers\":{\"bucket\":\"1/m burst 1\"}}\n",
        "{\"at_us\":0,\"key\":\"gold\",\"cost\":30,\"numbers\":{\"bucket\":\"10/s burst 50\"}}\n",
    );
    let csv = concat!(
        "at_us,key,cost,numbers:bucket\n",
        "0,gold,20,10/s burst 50\n0,free,4,\n0,slow,,1/m burst 1\n0,slow,,1/m burst 1\n0,gold,30,10/s burst 50\n",
    );
    let decisions = scene.decisions(jsonl);
    let of_bucket = |allowed, limit, remaining, retry, reset| {
        format!(
            "{{\"name\":\"bucket\",\"allowed\":{allowed},\"limit\":{limit},\"remaining\":{remaining},\
             \"retry_after_us\":{retry},\"reset_after_us\":{reset}}}"
        )
    };
    let due = [
        of_bucket(true, 50, 30, 0, 2_000_000),
        of_bucket(true, 5, 1, 0, 4_000_000),
        of_bucket(true, 1, 0, 0, 60_000_000),
        of_bucket(false, 1, 0, 60_000_000, 60_000_000),
        of_bucket(true, 50, 0, 0, 5_000_000),
    ];
    assert_eq!(decisions.lines().count(), due.len());
    for (line, due) in decisions.lines().zip(&due) {
        assert!(line.contains(due), "{line}\nlacks {due}");
    }
    assert_eq!(scene.decisions(csv), decisions);
}

#[test]
fn numbers_that_the_policy_does_not_accept_are_bad_lines_by_name() {
    let line = |numbers: &str| format!("{{\"at_us\":0,\"key\":\"k\",\"numbers\":{numbers}}}\n");
    for (numbers, says) in [
        ("{\"bucket\":\"101/s\"}", "limit \"bucket\": its other numbers: they are larger"),
        ("{\"window\":\"1/h\"}", "limit \"window\": its other numbers: it accepts no numbers"),
        ("{\"bukcet\":\"1/s\"}", "did you mean \"bucket\"?"),
        ("{\"bucket\":\"1 a second\"}", "limit \"bucket\": "),
        ("{\"bucket\":5}", "numbers is or has 5"),
    ] {
        let input = "{\"at_us\":0,\"key\":\"k\"}\n".to_owned() + &line(numbers);
        let scene = Scene::with(&policy(), input);
        let ran = scene.command("replay", &["input"]).exits(0);
        assert!(
            ran.err.contains(&format!("line 2: {says}")) || ran.err.contains(says),
            "{}",
            ran.err
        );
        scene.command("replay", &["--strict", "input"]).exits(2);
    }
    // The other policy of a comparison accepts what it accepts.
    let scene = Scene::with(&policy(), line("{\"bucket\":\"7/s\"}"));
    scene.write("other.toml", BUCKET);
    let ran = scene.command("replay", &["--compare", "other.toml", "--strict", "input"]).exits(2);
    assert!(ran.err.contains("--compare: limit \"bucket\""), "{}", ran.err);
}

#[test]
fn a_check_is_decided_by_given_numbers() {
    let scene = Scene::new(&policy());
    let check =
        |more: &[&str]| scene.command("check", &[&["alice", "--store", "memory"], more].concat());
    let gold = ["--numbers", "bucket=10/s burst 50"];
    check(&[&gold[..], &["--cost", "20"]].concat()).exits(0).says(&["admits: 30 of 50 left"]);
    check(&["--cost", "20"]).exits(1).says(&["denies always: a cost of 20"]);
    for (numbers, says) in [
        ("bucket=101/s", "--numbers: limit \"bucket\": its other numbers: they are larger"),
        ("window=1/h", "max in a document"),
        ("bukcet=1/s", "did you mean \"bucket\"?"),
        ("1/s", "names no limit"),
    ] {
        check(&["--numbers", numbers]).exits(2).says(&[says]);
    }
}

#[cfg(any(feature = "redis", feature = "fred"))]
#[test]
fn callers_on_a_server_are_looked_at_by_given_numbers() {
    let server = ratelimit_servers::RedisServer::start().expect("a server");
    let url = server.url();
    // One token per hour, so that the test's own time changes nothing.
    let scene = Scene::new(&policy().replace("\"1/s\"", "\"1/h\""));
    let gold = ["--numbers", "bucket=1/h burst 50"];
    let check =
        |more: &[&str]| scene.command("check", &[&["gold", "--store", &url], more].concat());
    check(&[&gold[..], &["--cost", "20"]].concat()).exits(0);
    let inspect = |more: &[&str]| {
        scene.command("inspect", &[&["gold", "--store", &url], more].concat()).exits(0)
    };
    inspect(&gold).says(&["30 of 50 left"]);
    inspect(&[]).says(&["0 of 5 left"]);
    let top = |more: &[&str]| scene.command("top", &[&["--store", &url], more].concat()).exits(0);
    let by_policy = top(&[]);
    by_policy.says(&["1 limited now", "numbers of their own under bucket", "--numbers"]);
    assert!(top(&gold).out.contains("0 limited now"));
    top(&["--numbers", "bucket=1/h burst 2", "--cost", "3"]).says(&["1 limited now", "never"]);
}

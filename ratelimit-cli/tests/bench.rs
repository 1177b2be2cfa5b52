//! `bench`: its figures add up, and it leaves no key behind.
#![allow(missing_docs, clippy::expect_used)]

mod common;

use common::{Ran, Scene, TWO, keys};
use ratelimit_testkit::{RedisCluster, RedisServer, RespValue};
use serde_json::Value;

const ATTEMPTS: &str = "fixed-window 7/d count attempts";

fn send(server: &RedisServer, words: &[&str]) {
    server.command(words).and_then(RespValue::ok).expect("the server obeys");
}

/// A short benchmark with additional arguments.
fn bench(scene: &Scene, store: &str, more: &[&str]) -> Ran {
    let first = ["bench", "--store", store, "--duration", "200ms"];
    scene.run(&[&first, more].concat())
}

/// The lines that a benchmark wrote, each of which must add up.
fn lines(scene: &Scene, name: &str) -> Vec<Value> {
    let lines: Vec<Value> =
        scene.read(name).lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    for line in &lines {
        let number = |field: &str| line[field].as_f64().expect(field);
        let decisions = number("decisions");
        assert!(decisions > 0.0, "{line}");
        assert!((number("admitted") + number("denied") - decisions).abs() < 0.5, "{line}");
        let per_second = number("decisions_per_second");
        assert!((per_second * number("seconds") / decisions - 1.0).abs() < 0.01, "{line}");
        let times = ["p50_us", "p99_us", "p999_us", "max_us"].map(number);
        assert!(times.is_sorted() && times[0] > 0.0, "{line}");
        assert_eq!(line["complete"], true, "{line}");
    }
    lines
}

#[test]
fn every_mode_counts_what_it_decides_and_leaves_no_key() {
    let server = RedisServer::start().expect("a server");
    // A key of another program.
    send(&server, &["SET", "rl:1::{alice}", "kept"]);
    send(&server, &["SET", "rl:bench", "kept"]);
    let scene = Scene::new(TWO);
    for client in ["redis", "fred"] {
        for mode in ["lua", "cas", "multi"] {
            let url = format!("{}?client={client}", server.url());
            let limit = ["--limit", ATTEMPTS, "--mode", mode];
            let more = ["--tasks", "2,5", "--keys", "3", "--json", "out.jsonl"];
            let ran = bench(&scene, &url, &[limit.as_slice(), more.as_slice()].concat());
            assert_eq!(ran.code, 0, "{ran:?}");
            let lines = lines(&scene, "out.jsonl");
            let field = |name: &str| -> Vec<_> {
                lines.iter().map(|line| line[name].as_u64().expect("a number")).collect()
            };
            assert_eq!((field("tasks"), field("keys")), (vec![2, 5], vec![3, 3]));
            // Seven for each of three callers, and as many again if midnight passes during the test.
            let admitted: u64 = field("admitted").iter().sum();
            let doubtful = field("unanswered").iter().sum::<u64>();
            assert!((21..=42).contains(&admitted) || doubtful > 0, "{lines:?}");
            for line in &lines {
                assert_eq!((&line["mode"], &line["limits"][0]), (&mode.into(), &ATTEMPTS.into()));
                assert!(line["server_cpu_us"].as_f64().is_some_and(|us| us > 0.0), "{line}");
            }
            assert!(ran.out.contains(&format!("mode {mode}: {ATTEMPTS}")), "{ran:?}");
            assert!(ran.out.contains("p99.9 µs") && ran.out.contains("server µs"), "{ran:?}");
            assert_eq!(keys(&server), 2, "{url} {mode}");
        }
    }
}

#[test]
fn every_node_of_a_cluster_is_cleaned() {
    let cluster = RedisCluster::start().expect("a cluster");
    let scene = Scene::new(TWO);
    for mode in ["lua", "cas"] {
        let more =
            ["--policy", "policy.toml", "--tasks", "8", "--keys", "500", "--json", "out.jsonl"];
        let ran = bench(&scene, &cluster.url(), &[&more[..], &["--mode", mode]].concat());
        assert_eq!(ran.code, 0, "{ran:?}");
        let lines = lines(&scene, "out.jsonl");
        assert_eq!(lines[0]["limits"].as_array().map(Vec::len), Some(2), "{lines:?}");
        assert!(!ran.out.contains("note:"), "{ran:?}");
        for node in cluster.nodes() {
            // The masters decided: each has some of the callers.
            assert_eq!(keys(node), 0, "{mode}");
        }
    }
}

#[test]
fn a_memory_store_can_be_measured() {
    let scene = Scene::new(TWO);
    let ran = bench(&scene, "memory", &["--tasks", "1,3", "--keys", "1,50", "--json", "-"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    scene.write("out.jsonl", &ran.out);
    let lines = lines(&scene, "out.jsonl");
    assert_eq!(lines.len(), 4);
    assert!(lines.iter().all(|line| line["mode"].is_null() && line["server_cpu_us"].is_null()));
    // The table goes to the stream that does not carry the JSON lines.
    assert!(ran.err.starts_with("memory: gcra 100/s burst 1000000\n"), "{ran:?}");
    assert!(!ran.err.contains("server µs"), "{ran:?}");
}

#[cfg(unix)]
#[test]
fn an_interrupted_benchmark_reports_its_results_and_leaves_no_key() {
    let server = RedisServer::start().expect("a server");
    let scene = Scene::new(TWO);
    let url = server.url();
    let arguments =
        ["bench", "--store", &url, "--tasks", "4,8", "--duration", "1h", "--json", "out.jsonl"];
    let output = scene.interrupted(&arguments, &server);
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("interrupted"), "{output:?}");
    let lines = scene.read("out.jsonl");
    let line: Value = serde_json::from_str(&lines).expect("one line of JSON");
    assert_eq!((&line["complete"], &line["tasks"]), (&false.into(), &4.into()));
    assert_eq!(keys(&server), 0);
}

#[test]
fn a_benchmark_that_fails_leaves_no_key_either() {
    let server = RedisServer::start().expect("a server");
    let info = server.command(&["INFO", "memory"]).expect("the server answers").to_string();
    let used = info.lines().find_map(|line| line.strip_prefix("used_memory:"));
    let used: u64 = used.expect("INFO has it").trim().parse().expect("a number");
    // Full after some thousand keys.
    send(&server, &["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
    send(&server, &["CONFIG", "SET", "maxmemory", &(used + (1 << 20)).to_string()]);
    let scene = Scene::new(TWO);
    // Long-lived states fill the memory.
    let more =
        ["--limit", "gcra 1/d burst 5", "--tasks", "16", "--keys", "1000000", "--duration", "90s"];
    let ran = scene.run(&[&["bench", "--store", &server.url()][..], &more].concat());
    assert!(ran.code == 2 || ran.code == 3, "{ran:?}");
    assert!(ran.err.contains("OOM") && ran.err.contains("--store redis://"), "{ran:?}");
    assert!(!ran.out.contains("not all keys"), "{ran:?}");
    assert_eq!(keys(&server), 0);
}

#[test]
fn without_the_right_to_remove_keys_none_is_written_and_without_info_the_rest_is_reported() {
    let server = RedisServer::start().expect("a server");
    let scene = Scene::new(TWO);
    for (user, rights, refused) in [
        ("noscan", ["+@all", "-scan"], Some("scan")),
        ("nounlink", ["+@all", "-unlink"], Some("unlink")),
        ("noinfo", ["+@all", "-info"], None),
    ] {
        let set = ["ACL", "SETUSER", user, "on", ">s3cret", "~rl:*", rights[0], rights[1]];
        send(&server, &set);
        let url = server.url().replace("://", &format!("://{user}:s3cret@"));
        let ran = bench(&scene, &url, &["--tasks", "2", "--keys", "10"]);
        if let Some(command) = refused {
            assert_eq!(ran.code, 2, "{ran:?}");
            assert!(ran.err.contains(&format!("+{command}")), "{ran:?}");
            assert_eq!(ran.out, "", "{ran:?}");
        } else {
            assert_eq!(ran.code, 0, "{ran:?}");
            assert!(ran.out.contains("processor time is left out"), "{ran:?}");
            assert!(!ran.out.contains("server µs"), "{ran:?}");
        }
        assert!(!(ran.out + &ran.err).contains("s3cret"));
        assert_eq!(keys(&server), 0);
    }
}

#[test]
fn wrong_arguments_are_refused_with_the_remedy() {
    let scene = Scene::new(TWO);
    // The port is closed: each argument is refused before a request is sent.
    let redis = "redis://127.0.0.1:1";
    for (arguments, says) in [
        (&["--store", "memory", "--mode", "cas"][..], "leave it out"),
        (&["--store", "redis://127.0.0.1:1?mode=lua", "--mode", "cas"], "contradict"),
        (&["--store", "nowhere"], "redis://"),
        (&["--store", redis, "--tasks", "0"], "--tasks"),
        (&["--store", redis, "--tasks", "1,x"], "--tasks"),
        (&["--store", redis, "--keys", "1000001"], "--keys"),
        (&["--store", redis, "--duration", "5"], "500ms, 5s or 2m"),
        (&["--store", redis, "--duration", "2h"], "an hour is the most"),
        (&["--store", redis, "--limit", "gcra 5"], "gcra 10/s burst 20"),
        (&["--store", redis, "--limit", "gcra 5/s", "--policy", "policy.toml"], "--policy"),
        (&["--store", redis, "--policy", "missing.toml"], "name a TOML file"),
        (&["--store", redis, "--mode", "multi"], "count = \"attempts\""),
        (&["--store", redis, "--policy", "policy.toml", "--json", "./policy.toml"], "overwrite"),
        (&["--store", redis, "--json", "no/such/folder"], "no/such/folder"),
        (&["--tasks", "1"], "--store"),
    ] {
        let ran = scene.run(&[&["bench"], arguments].concat());
        assert_eq!(ran.code, 2, "{arguments:?}: {ran:?}");
        assert!(ran.err.contains(says), "{arguments:?}: {ran:?}");
    }
    assert_eq!(scene.read("policy.toml"), TWO);
    let ran = scene.run(&["bench", "--store", redis]);
    assert_eq!(ran.code, 3, "{ran:?}");
    assert!(ran.err.contains("127.0.0.1:1"), "{ran:?}");
}

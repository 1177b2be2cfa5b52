//! On a real Redis: the same bytes as in memory, and no key left behind.

use std::time::{Duration, Instant};

use crate::common::{BUCKET, Ran, Scene, example, interrupt, keys, limit};
use ratelimit_servers::{RedisCluster, RedisSentinels, RedisServer};
use serde_json::json;

/// The server's URLs in both modes.
fn modes(server: &RedisServer) -> [String; 2] {
    ["lua", "cas"].map(|mode| format!("{}?mode={mode}", server.url()))
}

/// The requests of a [`trace`]. A replay waits for the server at least once per request, so there
/// are no more than needed.
const REQUESTS: usize = 66;

/// Requests of three keys and two addresses, back and forth in time. Each takes up to 1.5 s, the
/// lease of a second and more.
fn trace() -> String {
    let ops = ["acquire", "peek", "refund", "force", "acquire", "reset"];
    let line = |n: usize| {
        let at = 5_000_000 + n * 77_777 - n % 3 * 400_000;
        // Each operation comes eleven times, and so with each cost, key and address. A prime mixes
        // these.
        let (op, nth) = (ops[n % ops.len()], n * 7 % REQUESTS / ops.len());
        let (cost, key, ip, took) = (nth % 5, nth % 3, nth % 2, n * 262_144 % 1_500_001);
        format!(
            "{{\"at_us\":{at},\"key\":\"k{key}\",\"keys\":{{\"ip\":\"{ip}\"}},\
             \"cost\":{cost},\"op\":\"{op}\",\"duration_us\":{took}}}\n"
        )
    };
    (0..REQUESTS).map(line).collect()
}

/// A replay leaves the choice of client, mode and place to the store, on which all of these agree:
/// they are tried together, on the bundled log, and on a real one if the environment names one.
#[test]
fn a_log_gives_the_same_bytes_on_a_server_and_on_a_cluster_and_leaves_no_key() {
    let one = [RedisServer::start().expect("a server")];
    let cluster = RedisCluster::start().expect("a cluster");
    let places = [
        (one[0].url() + "?client=redis&mode=lua", &one[..]),
        (cluster.url() + "?client=fred&mode=cas", cluster.nodes()),
    ];
    let (policy, bundled) = example();
    // So few that some of a real log are denied, too.
    let scene = Scene::new(&policy.replace("650/d", "65/d"));
    let real = std::env::var("RATELIMIT_REAL_LOG").ok().filter(|log| !log.is_empty());
    for log in [Some(bundled), real].into_iter().flatten() {
        let due = scene.decision_lines(&[&log]);
        assert!(due.contains(r#""allowed":false"#) && due.contains(r#""allowed":true"#));
        for (url, nodes) in &places {
            assert!(
                scene.decision_lines(&["--store", url, &log]) == due,
                "the files differ: {url}"
            );
            assert_eq!(nodes.iter().map(keys).sum::<i64>(), 0, "{url}");
        }
    }
}

#[test]
fn every_operation_gives_the_same_bytes_by_sentinels_and_tls_with_either_client() {
    let sentinels = RedisSentinels::start().expect("sentinels");
    let secret = RedisServer::start_tls().expect("a server with TLS");
    let scene = Scene::new(&[BUCKET, &limit("jobs", "ip", "concurrency 3/s", "")].concat());
    scene.write("input", trace());
    let due = scene.decision_lines(&["input"]);
    assert_eq!(due.lines().count(), REQUESTS);
    assert!(due.lines().any(|line| line.contains(r#""allowed":false"#)), "{due}");
    let in_secret = format!("{}?tls-ca={}", secret.url(), secret.ca_path().display());
    for url in [sentinels.url(), in_secret] {
        let mark = if url.contains('?') { '&' } else { '?' };
        for more in ["client=redis", "client=fred&mode=cas", "client=fred&protocol=resp3"] {
            let url = format!("{url}{mark}{more}");
            assert_eq!(due, scene.decision_lines(&["--store", &url, "input"]), "{url}");
        }
    }
    assert_eq!(keys(&secret), 0);
    // The tool does not trust this certificate.
    let ran = scene.replay(&["--store", &secret.url(), "input"]).exits(2);
    assert!(ran.err.contains("tls-ca") || ran.err.contains("ca-certificates"), "{ran:?}");
}

#[test]
fn limits_that_a_transaction_cannot_decide_are_refused_before_the_first_request() {
    let scene = Scene::with(BUCKET, "{\"at_us\":1,\"key\":\"k\"}\n");
    // The port is closed.
    let ran = scene.replay(&["--store", "redis://127.0.0.1:1?mode=multi", "input"]).exits(2);
    ran.says(&["limit \"", "a transaction charges whatever", "count = \"attempts\"", "Lua mode"]);
}

#[test]
fn an_operation_that_the_mode_refuses_is_not_a_bad_line() {
    let server = RedisServer::start().expect("a server");
    let scene = Scene::new(
        "[[limit]]\nname = \"tries\"\nalgorithm = \"fixed-window\"\nrate = \"3/h\"\ncount = \"attempts\"\n",
    );
    let url = format!("{}?mode=multi", server.url());
    let refund = "{\"at_us\":1,\"key\":\"k\",\"op\":\"refund\"}\n";
    scene.write("input", format!("{refund}{{\"at_us\":1,\"key\":\"k\"}}\n"));
    let ran = scene.replay(&["--store", &url, "input"]).exits(0);
    let ran = ran.says(&["bad lines           0", "refused operations  1"]);
    assert!(ran.err.starts_with("line 1: limit \"tries\""), "{}", ran.err);
    scene.write("input", refund);
    let ran = scene.replay(&["--store", &url, "input"]).exits(2);
    ran.says(&["the store refused 1 operation; choose a store"]).lacks("--format");
    scene.replay(&["--strict", "--store", &url, "input"]).exits(2);
}

#[test]
fn inspect_shows_which_callers_used_a_window_up() {
    let server = RedisServer::start().expect("a server");
    let scene = Scene::new(&limit("who", "ip", "window-log 3/h", ""));
    let url = server.url();
    for (user, code) in [("alice", 0), ("bob \u{1b}[31m", 0), ("alice", 0), ("carol", 1)] {
        let arguments = ["ip=192.0.2.7", "--store", &url, "--metadata", user];
        scene.command("check", &arguments).exits(code);
    }
    let ran = scene.command("inspect", &["ip=192.0.2.7", "--store", &url]);
    let by: Vec<_> = ran.out.lines().filter(|line| line.contains("cost 1, ")).collect();
    assert_eq!(by.len(), 3, "{ran:?}");
    assert!(by[0].contains("\"alice\"") && by[1].contains("\"bob "), "{ran:?}");
    ran.lacks("\u{1b}").lacks("carol");
    let ran = scene.command("inspect", &["ip=192.0.2.7", "--store", &url, "--json"]);
    ran.says(&["\"metadata\":\"alice\""]);
}

#[cfg(unix)]
#[test]
fn an_interrupted_replay_leaves_no_key_either() {
    let server = RedisServer::start().expect("a server");
    let scene = Scene::new(BUCKET);
    let line = |n| format!("{{\"at_us\":5,\"key\":\"k{n}\"}}\n");
    scene.write("input", (0..500_000).map(line).collect::<String>());
    for url in modes(&server) {
        let arguments = ["replay", "--policy", "policy.toml", "--store", &url, "input"];
        interrupt(scene.start(&arguments), || keys(&server) > 0).exits(130);
        assert_eq!(keys(&server), 0);
    }
}

#[test]
fn inspect_and_reset_reach_shadow_limits_and_callers_without_a_required_identifier() {
    let server = RedisServer::start().expect("a server");
    let limits = [
        ("trial", "ip", "shadow = true"),
        ("per-ip", "ip", ""),
        ("per-user", "user", "required = true"),
        ("trial-path", "path", "shadow = true"),
    ];
    let scene =
        Scene::new(&limits.map(|(name, key, more)| limit(name, key, "gcra 2/h", more)).concat());
    for url in modes(&server) {
        let run = |command: &str, more: &[&str]| {
            scene.command(command, &[&["--store", &url], more].concat()).exits(0)
        };
        run("check", &["ip=a", "user=b", "path=c", "--cost", "2"]);
        let told = run("inspect", &["ip=a", "user=b"]).out;
        let lines: Vec<_> =
            told.lines().filter(|line| line.contains("denies: 0 of 2 left")).collect();
        assert_eq!(lines.len(), 3, "{told}");
        assert!(lines[0].starts_with("  in shadow: trial (for each ip)"), "{told}");
        assert!(lines[1].starts_with("  per-ip (for each ip)"), "{told}");
        assert_eq!(told.matches("stored: surplus 0, tat ").count(), 3, "{told}");

        let inspect = |key: &str| {
            let line = &run("inspect", &[key, "--json"]).json()[0];
            let limits = line["limits"].as_array().expect("limits").iter();
            limits
                .map(|l| (l["name"].to_string(), l["shadow"].clone(), l["remaining"].clone()))
                .collect::<Vec<_>>()
        };
        let of = |name: &str, shadow: bool, left: u64| {
            (json!(name).to_string(), json!(shadow), json!(left))
        };
        assert_eq!(inspect("ip=a"), [of("trial", true, 0), of("per-ip", false, 0)]);
        assert_eq!(inspect("path=c"), [of("trial-path", true, 0)]);
        for (key, names) in [("ip=a", "trial, per-ip"), ("path=c", "trial-path")] {
            let done = format!("{key}: full capacity again in {names}\n");
            assert_eq!(run("reset", &[key]).out, done);
            // There is nothing to reset.
            run("reset", &[key]).says(&["nothing was reset", names]).lacks("capacity");
        }
        assert_eq!(inspect("ip=a"), [of("trial", true, 2), of("per-ip", false, 2)]);
        assert_eq!(inspect("path=c"), [of("trial-path", true, 2)]);
        assert_eq!(inspect("user=b"), [of("per-user", false, 0)]);
        run("reset", &["user=b"]);
    }
}

#[test]
fn summary_and_report_show_neither_user_nor_password_nor_options() {
    let server = RedisServer::start().expect("a server");
    let scene = Scene::with(BUCKET, "{\"at_us\":5,\"key\":\"k\"}\n");
    let user = ["ACL", "SETUSER", "bob", "on", ">s3cret", "~*", "+@all"];
    server.command(&user).expect("the server obeys");
    let plain = server.url().trim_end_matches('/').to_owned();
    let url = format!("{}/0?mode=cas", plain.replace("://", "://bob:s3cret@"));
    let ran = scene.replay(&["--store", &url, "--report", "out.html", "input"]).exits(0);
    for text in [&ran.out, &scene.read("out.html")] {
        assert!(text.contains(&format!("store {plain}/0")), "{text}");
        assert!(!text.contains("s3cret") && !text.contains("bob") && !text.contains("mode=cas"));
    }
}

#[test]
fn an_unreachable_redis_is_reported_within_two_seconds_without_the_password_and_keeps_earlier_outputs()
 {
    let scene = Scene::with(BUCKET, "{\"at_us\": 5, \"key\": \"k\"}\n");
    let outputs = ["out.jsonl", "out.html"].map(|name| scene.write(name, "earlier"));
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address").to_string();
    drop(listener);
    let url = format!("redis://user:secret@{address}/0");
    let to = ["--decisions", "out.jsonl", "--report", "out.html", "--store", &url];
    let started = Instant::now();
    let runs = [
        scene.replay(&[&to[..], &["input"]].concat()),
        scene.command("check", &["k", "--store", &url]),
        scene.command("inspect", &["k", "--store", &url]),
        scene.command("reset", &["k", "--store", &url]),
    ];
    assert!(started.elapsed() < Duration::from_secs(8), "{:?}", started.elapsed());
    for ran in runs {
        ran.exits(3).says(&[&address]).lacks("secret");
    }
    for output in outputs {
        assert_eq!(std::fs::read_to_string(output).expect("reads"), "earlier");
    }
    let ran = scene.replay(&["--store", "rediss://:secret@h:1?tls-ca=none.pem", "input"]).exits(2);
    ran.says(&["--store rediss://h:1: ", "cannot read none.pem"]).lacks("secret");
}

#[test]
fn records_of_a_caller_are_set_shown_listed_and_cleared_with_a_line_for_the_log() {
    let server = RedisServer::start().expect("a server");
    let scene = Scene::new(&limit("api", "user", "gcra 10/s", "burst = 20\noverridable = true"));
    let url = server.url();
    let run = |command: &[&str]| {
        let policy = ["--policy", "policy.toml", "--store", &url];
        scene.run(&[&["record"], command, &policy].concat())
    };
    let alice = ["user=alice", "--limit", "api", "--by", "ops"];
    let set = |change: &[&str]| run(&[&["set"], &alice[..], change].concat());
    set(&["--numbers", "100/s burst 200", "--for", "2h"])
        .exits(0)
        .says(&["user=alice under api: gcra 100/s burst 200 until ", "by ops (before: none)"]);
    // It is all that is stored.
    let inspect = || scene.command("inspect", &["user=alice", "--store", &url]);
    inspect().says(&["stored: nothing", "record: gcra 100/s burst 200"]).lacks("under the prefix");
    let check = |code| scene.command("check", &["user=alice", "--store", &url]).exits(code);
    check(0).says(&["199"]);
    set(&["--blocked", "--forever"]).exits(2).says(&["--replace", "api"]);
    set(&["--blocked", "--forever", "--replace"]).exits(0).says(&["blocked for ever"]);
    check(1);
    inspect().says(&["record: blocked for ever"]);
    run(&["get", "user=alice"]).says(&["1 record", "api: blocked for ever"]);
    run(&["get", "user=bob"]).says(&["0 records"]);
    run(&["list"]).says(&["\"alice\" under api: blocked for ever", "1 record"]);
    let line = &run(&["list", "--json"]).exits(0).json()[0];
    let record = json!({ "numbers": null, "blocked": true, "exempt": false, "until_us": null });
    assert_eq!((&line["value"], &line["record"]), (&json!("alice"), &record));
    // A replay reads what is listed.
    scene.write("records.jsonl", run(&["list", "--json"]).out);
    scene.write("input", "{\"at_us\":5,\"keys\":{\"user\":\"alice\"}}\n");
    let replay = ["--records", "records.jsonl", "input"];
    scene.replay(&replay).exits(0).says(&["user=alice", "blocked for ever", "never"]);
    // The port is closed: nothing is asked of a server.
    let on_server = ["--store", "redis://127.0.0.1:1", "--records", "records.jsonl", "input"];
    scene.replay(&on_server).exits(2).says(&["--records: ", "in memory only; leave --store out"]);
    scene.command("reset", &["user=alice", "--store", &url]).exits(0);
    check(1);
    run(&[&["clear"], &alice[..]].concat()).says(&["none by ops (before: blocked for ever)"]);
    check(0);
    for (change, due) in [
        (&["--blocked"][..], "--forever"),
        (&["--numbers", "fast", "--forever"], "--numbers"),
        (
            &["--exempt", "--until", "2020-01-01T00:00:00Z"],
            "--until: the record would have ended already",
        ),
        (&["--exempt", "--blocked", "--forever"], "cannot be used"),
    ] {
        set(change).exits(2).says(&[due]);
    }
    for (mode, code, due) in
        [("cas", 0, &["exempt for ever"][..]), ("multi", 2, &["api", "modes lua and cas"])]
    {
        let store = format!("{url}?mode={mode}");
        let command = |words: &[&str]| {
            scene.run(
                &[&["record"], words, &["--policy", "policy.toml", "--store", &store]].concat(),
            )
        };
        let change = [&["set"], &alice[..], &["--exempt", "--forever"]].concat();
        command(&change).exits(code).says(due);
        if code == 0 {
            command(&["list"]).says(&["\"alice\" under api: exempt for ever", "1 record"]);
        }
    }
}

#[test]
fn a_record_of_an_address_is_that_of_its_network_as_the_http_layer_counts_it() {
    let server = RedisServer::start().expect("a server");
    let scene = Scene::new(&limit("api", "ip", "gcra 10/s", "overridable = true"));
    let on_server = ["--policy", "policy.toml", "--store", &server.url()];
    let run = |command: &[&str]| scene.run(&[&["record"], command, &on_server].concat()).exits(0);
    let blocked = ["--limit", "api", "--by", "ops", "--blocked", "--forever"];
    run(&[&["set", "ip=2001:db8::1"], &blocked[..]].concat()).says(&["ip=2001:db8::/64 under api"]);
    run(&["list"]).says(&["\"2001:db8::/64\" under api", "1 record"]);
    for (caller, prefix, records) in [
        ("ip=2001:db8::2", "64", "1 record"),
        ("ip=2001:db8::/64", "48", "1 record"),
        ("ip=2001:db8::2", "48", "0 records"),
        ("ip=2001:db8::1", "128", "0 records"),
    ] {
        run(&["get", caller, "--ipv6-prefix", prefix]).says(&[records]);
    }
    scene.command("check", &["ip=2001:db8::3", "--store", &server.url()]).exits(1);
}

#[test]
fn a_record_is_listed_until_it_ends_and_its_line_tells_who_set_it() {
    let server = RedisServer::start().expect("a server");
    let scene = Scene::new(&limit("api", "user", "gcra 10/s", "overridable = true"));
    let on_server = ["--policy", "policy.toml", "--store", &server.url()];
    let set = |end: &[&str], user: Option<(&str, &str)>| {
        let words = ["record", "set", "user=bob", "--limit", "api", "--blocked", "--replace"];
        let mut command = scene.ratelimit(&[&words, end, &on_server].concat());
        for name in ["USER", "LOGNAME", "USERNAME"] {
            command.env_remove(name);
        }
        Ran::from(command.envs(user).output().expect("runs")).exits(0)
    };
    set(&["--forever"], None).says(&["note: the line does not tell who", "--by NAME"]);
    assert_eq!(set(&["--forever"], Some(("LOGNAME", "eve"))).says(&["by eve"]).err, "");
    let list = || scene.run(&[&["record", "list"], &on_server[..]].concat()).exits(0).out;
    assert_eq!(list(), "\"bob\" under api: blocked for ever\n1 record\n");
    // A server removes a record a moment after its end: one that ended in 1970.
    let end = "local key = redis.call('KEYS', '*')[1] \
               redis.call('HSET', key, redis.call('HKEYS', key)[1], '1 1000000 blocked')";
    server.command(&["EVAL", end, "0"]).expect("it answers").ok().expect("written");
    assert_eq!(list(), "0 records\n");
    assert_eq!(keys(&server), 1);
}

#[test]
fn a_server_that_forbids_a_look_through_its_keys_is_told_from_one_that_is_gone() {
    let server = RedisServer::start().expect("a server");
    let scene = Scene::new(BUCKET);
    let user = ["ACL", "SETUSER", "bob", "on", ">s3cret", "~*", "+@all", "-scan"];
    server.command(&user).expect("the server obeys");
    let forbidden = server.url().replace("://", "://bob:s3cret@");
    let hint = "the user needs SCAN on rl:*";
    scene.command("top", &["--store", &forbidden]).exits(2).says(&[hint]);
    scene.command("top", &["--store", "redis://127.0.0.1:1"]).exits(3).lacks(hint);
}

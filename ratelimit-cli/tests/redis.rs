//! On a real Redis: the same bytes as in memory, and no key left behind.
#![allow(missing_docs, clippy::expect_used)]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use common::{BUCKET, Scene, example, interrupted, json_lines, keys};
use ratelimit_core::Policy;
use ratelimit_servers::{RedisCluster, RedisSentinels, RedisServer};
use serde_json::json;

/// A server and a cluster of three masters that belong to one test.
struct Servers {
    one: RedisServer,
    cluster: RedisCluster,
}

impl Servers {
    fn start() -> Self {
        let one = RedisServer::start().expect("a server");
        Self { one, cluster: RedisCluster::start().expect("a cluster") }
    }

    /// The URLs of both, for either client, in these modes.
    fn urls(&self, modes: &[&str]) -> Vec<String> {
        let mut urls = Vec::new();
        for servers in [self.one.url(), self.cluster.url()] {
            for client in ["redis", "fred"] {
                for mode in modes {
                    urls.push(format!("{servers}?client={client}&mode={mode}"));
                }
            }
        }
        urls
    }

    /// The number of keys on all of them.
    fn keys(&self) -> i64 {
        self.cluster.nodes().iter().map(keys).sum::<i64>() + keys(&self.one)
    }
}

/// Replays the input on each of these, a few at a time, and checks the decisions and that no key is left.
fn same_bytes_on(servers: &Servers, urls: &[String], scene: &Scene, input: &str, due: &str) {
    for (n, some) in urls.chunks(4).enumerate() {
        std::thread::scope(|scope| {
            for (m, url) in some.iter().enumerate() {
                scope.spawn(move || {
                    let out = format!("redis-{n}-{m}.jsonl");
                    scene.replay(&["--decisions", &out, "--store", url, input]).exits(0);
                    let policy = scene.read("policy.toml");
                    assert!(scene.read(&out) == due, "the files differ: {url}, {policy}");
                });
            }
        });
    }
    assert_eq!(servers.keys(), 0);
}

/// The server's URLs in both modes.
fn modes(server: &RedisServer) -> [String; 2] {
    ["lua", "cas"].map(|mode| format!("{}?mode={mode}", server.url()))
}

/// The requests of a [`trace`]. A replay waits for the server at least once per request, so there are no more than needed.
const REQUESTS: usize = 66;

/// Requests of three keys and two addresses, back and forth in time, in which each operation meets each cost, key and
/// address; `mix`, a prime, selects how the operations are mixed. Each takes up to 1.5 s, the lease of a second and more.
fn trace(ops: [&str; 6], mix: usize) -> String {
    let request = |n: usize| (ops[n * 3 % mix % ops.len()], n % 5, n % 3, n % 2);
    for op in ops {
        let of_op = || (0..REQUESTS).map(request).filter(|request| request.0 == op);
        let costs: BTreeSet<_> = of_op().map(|(_, cost, ..)| cost).collect();
        let callers: BTreeSet<_> = of_op().map(|(.., key, ip)| (key, ip)).collect();
        assert_eq!((costs.len(), callers.len()), (5, 6), "{op}: {costs:?}, {callers:?}");
    }
    let line = |n: usize| {
        let (at, (op, cost, key, ip)) = (5_000_000 + n * 77_777 - n % 3 * 400_000, request(n));
        let took = n * 262_144 % 1_500_001;
        format!(
            "{{\"at_us\":{at},\"key\":\"k{key}\",\"keys\":{{\"ip\":\"{ip}\"}},\
             \"cost\":{cost},\"op\":\"{op}\",\"duration_us\":{took}}}\n"
        )
    };
    (0..REQUESTS).map(line).collect()
}

/// The decisions of a trace in memory, of which some are denials.
fn in_memory(scene: &Scene) -> String {
    let due = scene.decided(&["input"]);
    assert_eq!(due.lines().count(), REQUESTS);
    assert!(due.lines().any(|line| line.contains(r#""allowed":false"#)), "{due}");
    due
}

/// The bundled log, and a real one if the environment names one: each client and each place decides the whole log once, and
/// in every combination a part of it. MULTI mode decides limits that count attempts.
#[test]
fn a_log_gives_the_same_bytes_everywhere_and_leaves_no_key() {
    let servers = Servers::start();
    let (policy, bundled) = example();
    let mut runs = vec![(bundled.clone(), policy, ["lua", "cas"].as_slice())];
    if let Some(real) = std::env::var("RATELIMIT_REAL_LOG").ok().filter(|log| !log.is_empty()) {
        // Its lines are not in the order of time, and these limits deny some of them in either order.
        let limit = |name: &str, key: &str, more: &str| {
            format!("[[limit]]\nname = \"{name}\"\nkey = [{key}]\n{more}\n")
        };
        let path = |count: &str| {
            limit(
                "path",
                "\"path\"",
                &format!("algorithm = \"sliding-log\"\nrate = \"5/m\"\n{count}"),
            )
        };
        let admissions =
            limit("burst", "\"ip\"", "algorithm = \"gcra\"\nrate = \"2/s\"\nburst = 3")
                + &path("")
                + &limit(
                    "both",
                    "\"ip\", \"path\"",
                    "algorithm = \"fixed-window\"\nrate = \"30/h\"",
                );
        let count = "count = \"attempts\"";
        let hourly = format!("algorithm = \"fixed-window\"\nrate = \"9/h\"\n{count}");
        let attempts = limit("ip", "\"ip\"", &hourly) + &path(count);
        runs.push((real.clone(), admissions, &["lua", "cas"]));
        runs.push((real, attempts, &["multi"]));
    }
    for (log, policy, modes) in runs {
        let scene = Scene::new(&policy);
        let decided = |input: &str| {
            let due = scene.decided(&[input]);
            assert!(due.contains("\"allowed\":false") && due.contains("\"allowed\":true"));
            due
        };
        let whole = decided(&log);
        let part = if log == bundled {
            excerpt(&lines(&log), &whole)
        } else {
            lines(&log)[..600].iter().flat_map(|line| [&**line, "\n"]).collect()
        };
        scene.write("part", part);
        let part = decided("part");
        let is_whole = |url: &String| {
            let on_cluster = url.starts_with("redis-cluster:");
            url.ends_with(if on_cluster { "client=fred&mode=cas" } else { "client=redis&mode=lua" })
        };
        let (on_whole, on_part): (Vec<_>, Vec<_>) =
            servers.urls(modes).into_iter().partition(is_whole);
        assert_eq!((on_whole.len(), on_part.len()), if modes.len() == 2 { (2, 6) } else { (0, 4) });
        same_bytes_on(&servers, &on_whole, &scene, &log, &whole);
        same_bytes_on(&servers, &on_part, &scene, "part", &part);
    }
}

/// The lines of a log, plain or gzipped.
fn lines(log: &str) -> Vec<String> {
    use std::io::Read;
    let mut bytes = std::fs::read(log).expect("a log");
    if bytes.starts_with(&[0x1f, 0x8b]) {
        let gzipped = std::mem::take(&mut bytes);
        flate2::read::GzDecoder::new(&*gzipped).read_to_end(&mut bytes).expect("decompresses");
    }
    String::from_utf8_lossy(&bytes).lines().map(str::to_owned).collect()
}

/// Of each address that is denied in these decisions, up to 120 lines, of which 60 lead to the first denial.
fn excerpt(log: &[String], decisions: &str) -> String {
    let decided = json_lines(decisions);
    assert_eq!(log.len(), decided.len());
    let mut by_address: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (number, line) in decided.iter().enumerate() {
        by_address.entry(line["key"].to_string()).or_default().push(number);
    }
    let mut chosen: BTreeSet<usize> = BTreeSet::new();
    for of_it in by_address.values() {
        let first = of_it.iter().position(|number| decided[*number]["allowed"] == false);
        let from = first.map_or(usize::MAX, |first| first.saturating_sub(60));
        chosen.extend(of_it.iter().skip(from).take(120));
    }
    chosen.into_iter().flat_map(|number| [&*log[number], "\n"]).collect()
}

#[test]
fn every_operation_gives_the_same_bytes_in_every_mode_and_place() {
    let servers = Servers::start();
    let admissions = ["acquire", "peek", "refund", "force", "acquire", "reset"];
    let attempts = ["acquire", "peek", "acquire", "acquire", "reset", "acquire"];
    for &algorithm in Policy::NAMES {
        let rate = match algorithm {
            "bucketed-window" => "bucket = \"1s\"\nrates = [\"3/s\", \"5/3s\"]",
            _ => "rate = \"3/s\"",
        };
        let limit = format!("[[limit]]\nname = \"one\"\nalgorithm = \"{algorithm}\"\n{rate}\n");
        let other = |algorithm: &str| {
            format!(
                "[[limit]]\nname = \"two\"\nkey = [\"ip\"]\nalgorithm = \"{algorithm}\"\nrate = \"7/m\"\n"
            )
        };
        let check = |policy: &str, trace: &str, modes: &[&str]| {
            let scene = Scene::new(policy);
            scene.write("input", trace);
            let due = in_memory(&scene);
            same_bytes_on(&servers, &servers.urls(modes), &scene, "input", &due);
        };
        check(&(limit.clone() + &other("gcra")), &trace(admissions, 11), &["lua", "cas"]);
        if algorithm.contains("window") || algorithm == "sliding-log" {
            let count = "count = \"attempts\"\n";
            let policy = limit + count + &other("sliding-log") + count;
            check(&policy, &trace(attempts, 13), &["lua", "cas", "multi"]);
        }
    }
}

#[test]
fn sentinels_and_tls_give_the_same_bytes_with_either_client() {
    let sentinels = RedisSentinels::start().expect("sentinels");
    let secret = RedisServer::start_tls().expect("a server with TLS");
    let scene = Scene::new(BUCKET);
    scene.write("input", trace(["acquire", "peek", "acquire", "refund", "reset", "acquire"], 13));
    let due = in_memory(&scene);
    let in_secret = format!("{}?tls-ca={}", secret.url(), secret.ca_path().display());
    for url in [sentinels.url(), in_secret] {
        let mark = if url.contains('?') { '&' } else { '?' };
        for more in ["client=redis", "client=fred&mode=cas", "client=fred&protocol=resp3"] {
            let url = format!("{url}{mark}{more}");
            assert_eq!(due, scene.decided(&["--store", &url, "input"]), "{url}");
        }
    }
    // The tool does not trust this certificate.
    let ran = scene.replay(&["--store", &secret.url(), "input"]).exits(2);
    assert!(ran.err.contains("tls-ca") || ran.err.contains("ca-certificates"), "{ran:?}");
}

#[test]
fn limits_that_a_transaction_cannot_decide_are_refused_before_the_first_request() {
    let scene = Scene::new(BUCKET);
    scene.write("input", "{\"at_us\":1,\"key\":\"k\"}\n");
    // The port is closed.
    let ran = scene.replay(&["--store", "redis://127.0.0.1:1?mode=multi", "input"]).exits(2);
    ran.says(&["limit \"", "a transaction charges first", "count = \"attempts\"", "Lua mode"]);
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
    let scene = Scene::new(
        "[[limit]]\nname = \"who\"\nkey = [\"ip\"]\nalgorithm = \"window-log\"\nrate = \"3/h\"\n",
    );
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
        interrupted(scene.start(&arguments), || keys(&server) > 0).exits(130);
        assert_eq!(keys(&server), 0);
    }
}

#[test]
fn inspect_and_reset_reach_shadow_limits_and_callers_without_a_required_identifier() {
    let server = RedisServer::start().expect("a server");
    let limit = |name: &str, key: &str, more: &str| {
        format!(
            "[[limit]]\nname = \"{name}\"\nkey = [\"{key}\"]\nalgorithm = \"gcra\"\nrate = \"2/h\"\n{more}\n"
        )
    };
    let scene = Scene::new(
        &[
            limit("trial", "ip", "shadow = true"),
            limit("per-ip", "ip", ""),
            limit("per-user", "user", "required = true"),
            limit("trial-path", "path", "shadow = true"),
        ]
        .concat(),
    );
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
    let scene = Scene::new(BUCKET);
    scene.write("input", "{\"at_us\":5,\"key\":\"k\"}\n");
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
    let scene = Scene::new(BUCKET);
    scene.write("input", "{\"at_us\": 5, \"key\": \"k\"}\n");
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

//! On a real Redis: the same bytes as in memory, and no key left behind.
#![allow(missing_docs, clippy::expect_used)]

mod common;

use std::collections::{BTreeMap, BTreeSet};

use common::{BUCKET, Scene, TWO, keys, workspace};
use ratelimit_testkit::{RedisCluster, RedisSentinels, RedisServer};
use serde_json::{Value, json};

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
                    let ran = scene.replay(&["--decisions", &out, "--store", url, input]);
                    assert_eq!(ran.code, 0, "{url}: {ran:?}");
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
    assert_eq!(scene.replay(&["--decisions", "memory.jsonl", "input"]).code, 0);
    let due = scene.read("memory.jsonl");
    assert_eq!(due.lines().count(), REQUESTS);
    assert!(due.lines().any(|line| line.contains(r#""allowed":false"#)), "{due}");
    due
}

#[test]
fn the_example_gives_the_same_bytes_and_leaves_no_key() {
    let servers = Servers::start();
    let policy = std::fs::read_to_string(workspace("examples/policy.toml")).expect("reads");
    let scene = Scene::new(&policy);
    let log = workspace("examples/access.log");
    let decided = |input: &str| {
        assert_eq!(scene.replay(&["--decisions", "memory.jsonl", input]).code, 0);
        scene.read("memory.jsonl")
    };
    let whole = decided(log.to_str().expect("text"));
    scene.write("excerpt", excerpt(&std::fs::read_to_string(&log).expect("reads"), &whole));
    let part = decided("excerpt");
    for limit in ["burst", "same-page", "per-user"] {
        let denied = format!("{{\"name\":\"{limit}\",\"allowed\":false");
        assert!(part.contains(&denied), "{limit} denies nothing in the excerpt");
    }
    // Each mode, each client and each place decides the whole log once, and in every combination the excerpt.
    let urls = servers.urls(&["lua", "cas"]);
    let is_whole = |url: &String| {
        let on_cluster = url.starts_with("redis-cluster:");
        url.ends_with(if on_cluster { "client=fred&mode=cas" } else { "client=redis&mode=lua" })
    };
    let (on_whole, on_part): (Vec<_>, Vec<_>) = urls.into_iter().partition(is_whole);
    assert_eq!((on_whole.len(), on_part.len()), (2, 6));
    same_bytes_on(&servers, &on_whole, &scene, log.to_str().expect("text"), &whole);
    same_bytes_on(&servers, &on_part, &scene, "excerpt", &part);
}

/// Of each address that is denied in these decisions, up to 120 lines, of which 60 lead to the first denial.
fn excerpt(log: &str, decisions: &str) -> String {
    let lines: Vec<Value> =
        decisions.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(log.lines().count(), lines.len());
    let mut by_address: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (number, line) in lines.iter().enumerate() {
        by_address.entry(line["key"].to_string()).or_default().push(number);
    }
    let chosen: BTreeSet<usize> = by_address
        .values()
        .filter_map(|of_it| {
            let first = of_it.iter().position(|number| lines[*number]["allowed"] == false)?;
            Some(of_it.iter().skip(first.saturating_sub(60)).take(120).copied())
        })
        .flatten()
        .collect();
    let log = log.lines().enumerate().filter(|(number, _)| chosen.contains(number));
    log.flat_map(|(_, line)| [line, "\n"]).collect()
}

#[test]
fn every_operation_gives_the_same_bytes() {
    let servers = Servers::start();
    let rate = "rate = \"3/s\"";
    for (algorithm, rate) in [
        ("gcra", rate),
        ("token-bucket", rate),
        ("fixed-window", rate),
        ("first-request-window", rate),
        ("bucketed-window", "bucket = \"1s\"\nrates = [\"3/s\", \"5/3s\"]"),
        ("sliding-counter", rate),
        ("sliding-log", rate),
        ("window-log", rate),
        ("concurrency", rate),
    ] {
        let scene = Scene::new(&format!(
            "[[limit]]\nname = \"one\"\nalgorithm = \"{algorithm}\"\n{rate}\n\
             [[limit]]\nname = \"two\"\nkey = [\"ip\"]\nalgorithm = \"gcra\"\nrate = \"7/m\"\n"
        ));
        let ops = ["acquire", "peek", "refund", "force", "acquire", "reset"];
        scene.write("input", trace(ops, 11));
        let due = in_memory(&scene);
        same_bytes_on(&servers, &servers.urls(&["lua", "cas"]), &scene, "input", &due);
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
            let ran = scene.replay(&["--decisions", "redis.jsonl", "--store", &url, "input"]);
            assert_eq!(ran.code, 0, "{url}: {ran:?}");
            assert_eq!(due, scene.read("redis.jsonl"), "{url}");
        }
    }
    // The tool does not trust this certificate.
    let ran = scene.replay(&["--store", &secret.url(), "input"]);
    assert_eq!(ran.code, 2, "{ran:?}");
    assert!(ran.err.contains("tls-ca") || ran.err.contains("ca-certificates"), "{ran:?}");
}

#[test]
fn attempts_give_the_same_bytes_in_every_mode() {
    let servers = Servers::start();
    let urls = servers.urls(&["lua", "cas", "multi"]);
    let rate = "rate = \"3/s\"";
    for (algorithm, rate) in [
        ("fixed-window", rate),
        ("first-request-window", rate),
        ("window-log", rate),
        ("bucketed-window", "bucket = \"1s\"\nrates = [\"3/s\", \"5/3s\"]"),
        ("sliding-log", rate),
    ] {
        let scene = Scene::new(&format!(
            "[[limit]]\nname = \"one\"\nalgorithm = \"{algorithm}\"\n{rate}\ncount = \"attempts\"\n\
             [[limit]]\nname = \"two\"\nkey = [\"ip\"]\nalgorithm = \"sliding-log\"\n\
             rate = \"7/m\"\ncount = \"attempts\"\n"
        ));
        let ops = ["acquire", "peek", "acquire", "acquire", "reset", "acquire"];
        scene.write("input", trace(ops, 13));
        let due = in_memory(&scene);
        same_bytes_on(&servers, &urls, &scene, "input", &due);
    }
}

#[test]
fn limits_that_a_transaction_cannot_decide_are_refused_before_the_first_request() {
    let scene = Scene::new(BUCKET);
    scene.write("input", "{\"at_us\":1,\"key\":\"k\"}\n");
    // The port is closed.
    let ran = scene.replay(&["--store", "redis://127.0.0.1:1?mode=multi", "input"]);
    assert_eq!(ran.code, 2, "{ran:?}");
    for part in ["limit \"", "a transaction charges first", "count = \"attempts\"", "Lua mode"] {
        assert!(ran.err.contains(part), "{part}: {ran:?}");
    }
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
    let ran = scene.replay(&["--store", &url, "input"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(ran.err.starts_with("line 1: limit \"tries\""), "{}", ran.err);
    assert!(ran.out.contains("bad lines           0"), "{}", ran.out);
    assert!(ran.out.contains("refused operations  1"), "{}", ran.out);
    scene.write("input", refund);
    let ran = scene.replay(&["--store", &url, "input"]);
    assert_eq!(ran.code, 2, "{ran:?}");
    assert!(ran.err.contains("the store refused 1 operation; choose a store"), "{}", ran.err);
    assert!(!ran.err.contains("--format"), "{}", ran.err);
    assert_eq!(scene.replay(&["--strict", "--store", &url, "input"]).code, 2);
}

#[test]
fn inspect_shows_which_callers_used_a_window_up() {
    let server = RedisServer::start().expect("a server");
    let scene = Scene::new(
        "[[limit]]\nname = \"who\"\nkey = [\"ip\"]\nalgorithm = \"window-log\"\nrate = \"3/h\"\n",
    );
    let url = server.url();
    for (user, code) in [("alice", 0), ("bob \u{1b}[31m", 0), ("alice", 0), ("carol", 1)] {
        let args = ["check", "ip=192.0.2.7", "--policy", "policy.toml", "--store", &url];
        let ran = scene.run(&[&args[..], &["--metadata", user]].concat());
        assert_eq!(ran.code, code, "{ran:?}");
    }
    let args = ["inspect", "ip=192.0.2.7", "--policy", "policy.toml", "--store", &url];
    let ran = scene.run(&args);
    let by: Vec<_> = ran.out.lines().filter(|line| line.contains("at cost 1")).collect();
    assert_eq!(by.len(), 3, "{ran:?}");
    assert!(by[0].contains("\"alice\"") && by[1].contains("\"bob "), "{ran:?}");
    assert!(!ran.out.contains('\u{1b}') && !ran.out.contains("carol"), "{ran:?}");
    let ran = scene.run(&[&args[..], &["--json"]].concat());
    assert!(ran.out.contains("\"metadata\":\"alice\""), "{ran:?}");
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
        let output = scene.interrupted(&arguments, &server);
        assert_eq!(output.status.code(), Some(130), "{output:?}");
        assert_eq!(keys(&server), 0);
    }
}

#[test]
fn check_charges_inspect_shows_and_reset_forgets() {
    let server = RedisServer::start().expect("a server");
    let scene = Scene::new(TWO);
    for url in modes(&server) {
        let run = |command: &str, more: &[&str]| {
            let first = [command, "user=bob", "--policy", "policy.toml", "--store", &url];
            scene.run(&[&first, more].concat())
        };
        let nothing = run("inspect", &["--json"]);
        assert!(nothing.out.contains("\"remaining\":2,"), "{nothing:?}");
        assert!(nothing.out.contains("\"state\":null"), "{nothing:?}");
        assert_eq!(run("check", &["--peek", "--cost", "2"]).code, 0);
        assert_eq!(run("check", &["--cost", "2"]).code, 0);
        assert_eq!(run("check", &[]).code, 1);
        let used = run("inspect", &[]);
        assert!(used.out.contains("2 used in the window that began 20"), "{used:?}");
        assert!(used.out.contains("denies, 0 of 2 left"), "{used:?}");
        assert_eq!(run("reset", &[]).code, 0);
        assert!(run("inspect", &[]).out.contains("stored: nothing"));
        assert_eq!(run("check", &[]).code, 0);
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
            let first = [command, "--policy", "policy.toml", "--store", &url];
            scene.run(&[&first, more].concat())
        };
        assert_eq!(run("check", &["ip=a", "user=b", "path=c", "--cost", "2"]).code, 0);
        let told = run("inspect", &["ip=a", "user=b"]).out;
        let lines: Vec<_> =
            told.lines().filter(|line| line.contains("denies, 0 of 2 left")).collect();
        assert_eq!(lines.len(), 3, "{told}");
        assert!(lines[0].starts_with("  in shadow: trial (for each ip)"), "{told}");
        assert!(lines[1].starts_with("  per-ip (for each ip)"), "{told}");
        assert_eq!(told.matches("stored: theoretical arrival time").count(), 3, "{told}");

        let inspect = |key: &str| {
            let ran = run("inspect", &[key, "--json"]);
            assert_eq!(ran.code, 0, "{ran:?}");
            let line: Value = serde_json::from_str(&ran.out).expect("JSON");
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
            let ran = run("reset", &[key]);
            assert_eq!(
                (ran.code, ran.out),
                (0, format!("{key}: full capacity again in {names}\n"))
            );
        }
        assert_eq!(inspect("ip=a"), [of("trial", true, 2), of("per-ip", false, 2)]);
        assert_eq!(inspect("path=c"), [of("trial-path", true, 2)]);
        assert_eq!(inspect("user=b"), [of("per-user", false, 0)]);
        assert_eq!(run("reset", &["user=b"]).code, 0);
    }
}

#[test]
fn summary_and_report_show_neither_user_nor_password_nor_options() {
    let server = RedisServer::start().expect("a server");
    let scene = Scene::new(BUCKET);
    scene.write("input", "{\"at_us\":5,\"key\":\"k\"}\n");
    let client = redis::Client::open(server.url()).expect("a URL");
    let mut connection = client.get_connection().expect("the server is up");
    redis::cmd("ACL")
        .arg(&["SETUSER", "bob", "on", ">s3cret", "~*", "+@all"])
        .exec(&mut connection)
        .expect("the server obeys");
    let plain = server.url().trim_end_matches('/').to_owned();
    let url = format!("{}/0?mode=cas", plain.replace("://", "://bob:s3cret@"));
    let ran = scene.replay(&["--store", &url, "--report", "out.html", "input"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    for text in [&ran.out, &scene.read("out.html")] {
        assert!(text.contains(&format!("store {plain}/0")), "{text}");
        assert!(!text.contains("s3cret") && !text.contains("bob") && !text.contains("mode=cas"));
    }
}

/// Replays a real access log, if the environment names one, and expects the same bytes everywhere: all of it on
/// a cluster, with one client in scripts and with the other in transactions, and its beginning in every mode
/// and place.
#[test]
fn a_real_log_gives_the_same_bytes_everywhere() {
    let log = std::env::var_os("RATELIMIT_REAL_LOG").filter(|log| !log.is_empty());
    let Some(log) = log else { return };
    let log = log.to_str().expect("text");
    let servers = Servers::start();
    let limit = |name: &str, key: &str, more: &str| {
        format!("[[limit]]\nname = \"{name}\"\nkey = [{key}]\n{more}\n")
    };
    let admissions = limit("burst", "\"ip\"", "algorithm = \"gcra\"\nrate = \"2/s\"\nburst = 3")
        + &limit("path", "\"path\"", "algorithm = \"sliding-log\"\nrate = \"5/m\"")
        + &limit("both", "\"ip\", \"path\"", "algorithm = \"fixed-window\"\nrate = \"30/h\"");
    let attempts = "count = \"attempts\"";
    let attempts =
        limit("ip", "\"ip\"", &format!("algorithm = \"fixed-window\"\nrate = \"9/h\"\n{attempts}"))
            + &limit(
                "path",
                "\"path\"",
                &format!("algorithm = \"sliding-log\"\nrate = \"5/m\"\n{attempts}"),
            );
    let runs = [(&admissions, ["lua", "cas"].as_slice(), "redis"), (&attempts, &["multi"], "fred")];
    for (policy, modes, client) in runs {
        let scene = Scene::new(policy);
        scene.write("beginning", beginning(log, 600));
        let expected = |input: &str| {
            assert_eq!(scene.replay(&["--decisions", "memory.jsonl", input]).code, 0);
            let due = scene.read("memory.jsonl");
            assert!(due.contains("\"allowed\":false") && due.contains("\"allowed\":true"));
            due
        };
        let urls = servers.urls(modes);
        same_bytes_on(&servers, &urls, &scene, "beginning", &expected("beginning"));
        let is_whole = |url: &&String| {
            let by_client = url.contains(&format!("client={client}"));
            url.starts_with("redis-cluster:") && by_client && !url.contains("cas")
        };
        let whole: Vec<_> = urls.iter().filter(is_whole).cloned().collect();
        assert_eq!(whole.len(), 1);
        same_bytes_on(&servers, &whole, &scene, log, &expected(log));
    }
}

/// The first lines of a log.
fn beginning(log: &str, lines: usize) -> String {
    use std::io::{BufRead, BufReader, Read};
    let file = std::fs::File::open(log).expect("a log");
    let reader: Box<dyn Read> = match log.strip_suffix(".gz") {
        Some(_) => Box::new(flate2::read::GzDecoder::new(file)),
        None => Box::new(file),
    };
    let lines = BufReader::new(reader).split(b'\n').take(lines).map(|line| line.expect("reads"));
    lines.map(|line| String::from_utf8_lossy(&line).into_owned() + "\n").collect()
}

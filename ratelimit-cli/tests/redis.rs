//! On a real Redis: the same bytes as in memory, and no key left behind.
#![allow(missing_docs, clippy::expect_used)]

mod common;

use common::{BUCKET, Scene, TWO, keys, workspace};
use ratelimit_testkit::{RedisCluster, RedisSentinels, RedisServer};

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
                    assert!(scene.read(&out) == due, "the files differ: {url}");
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

/// 300 requests of three keys and two addresses, back and forth in time; `mix` selects how the operations are
/// mixed.
fn trace(ops: [&str; 6], mix: usize) -> String {
    let line = |n: usize| {
        let (at, op) = (5_000_000 + n * 77_777 - n % 3 * 400_000, ops[n * n % mix % ops.len()]);
        let (key, ip, cost) = (n % 3, n % 2, n % 5);
        format!(
            "{{\"at_us\":{at},\"key\":\"k{key}\",\"keys\":{{\"ip\":\"{ip}\"}},\
             \"cost\":{cost},\"op\":\"{op}\"}}\n"
        )
    };
    (0..300).map(line).collect()
}

#[test]
fn the_example_gives_the_same_bytes_and_leaves_no_key() {
    let servers = Servers::start();
    let policy = std::fs::read_to_string(workspace("examples/policy.toml")).expect("reads");
    let scene = Scene::new(&policy);
    let log = workspace("examples/access.log");
    let log = log.to_str().expect("text");
    assert_eq!(scene.replay(&["--decisions", "memory.jsonl", log]).code, 0);
    let due = scene.read("memory.jsonl");
    same_bytes_on(&servers, &servers.urls(&["lua", "cas"]), &scene, log, &due);
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
        assert_eq!(scene.replay(&["--decisions", "memory.jsonl", "input"]).code, 0);
        for url in servers.urls(&["lua", "cas"]) {
            let ran = scene.replay(&["--decisions", "redis.jsonl", "--store", &url, "input"]);
            assert_eq!(ran.code, 0, "{ran:?}");
            assert_eq!(scene.read("memory.jsonl"), scene.read("redis.jsonl"), "{algorithm} {url}");
            assert_eq!(scene.read("redis.jsonl").lines().count(), 300);
            assert_eq!(servers.keys(), 0, "{algorithm} {url}");
        }
    }
}

#[test]
fn sentinels_and_tls_give_the_same_bytes_with_either_client() {
    let sentinels = RedisSentinels::start().expect("sentinels");
    let secret = RedisServer::start_tls().expect("a server with TLS");
    let scene = Scene::new(BUCKET);
    scene.write("input", trace(["acquire", "peek", "acquire", "refund", "reset", "acquire"], 13));
    assert_eq!(scene.replay(&["--decisions", "memory.jsonl", "input"]).code, 0);
    let in_secret = format!("{}?tls-ca={}", secret.url(), secret.ca_path().display());
    for url in [sentinels.url(), in_secret] {
        let mark = if url.contains('?') { '&' } else { '?' };
        for more in ["client=redis", "client=fred&mode=cas", "client=fred&protocol=resp3"] {
            let url = format!("{url}{mark}{more}");
            let ran = scene.replay(&["--decisions", "redis.jsonl", "--store", &url, "input"]);
            assert_eq!(ran.code, 0, "{url}: {ran:?}");
            assert_eq!(scene.read("memory.jsonl"), scene.read("redis.jsonl"), "{url}");
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
        assert_eq!(scene.replay(&["--decisions", "memory.jsonl", "input"]).code, 0);
        for url in &urls {
            let ran = scene.replay(&["--decisions", "redis.jsonl", "--store", url, "input"]);
            assert_eq!(ran.code, 0, "{ran:?}");
            assert_eq!(scene.read("memory.jsonl"), scene.read("redis.jsonl"), "{algorithm} {url}");
            assert_eq!(servers.keys(), 0, "{algorithm} {url}");
        }
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
    let admissions = limit("burst", "\"ip\"", "algorithm = \"gcra\"\nrate = \"2/s\"\nburst = 5")
        + &limit("path", "\"path\"", "algorithm = \"sliding-log\"\nrate = \"20/m\"")
        + &limit("both", "\"ip\", \"path\"", "algorithm = \"fixed-window\"\nrate = \"30/h\"");
    let attempts = "count = \"attempts\"";
    let attempts = limit(
        "ip",
        "\"ip\"",
        &format!("algorithm = \"fixed-window\"\nrate = \"20/h\"\n{attempts}"),
    ) + &limit(
        "path",
        "\"path\"",
        &format!("algorithm = \"sliding-log\"\nrate = \"20/m\"\n{attempts}"),
    );
    let runs = [(&admissions, ["lua", "cas"].as_slice(), "redis"), (&attempts, &["multi"], "fred")];
    for (policy, modes, client) in runs {
        let scene = Scene::new(policy);
        scene.write("beginning", beginning(log, 1_500));
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

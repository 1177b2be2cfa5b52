//! On a real Redis: the same bytes as in memory, and nothing left behind.
#![allow(missing_docs, clippy::expect_used)]

mod common;

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{BUCKET, Scene, TWO, workspace};
use ratelimit_testkit::RedisServer;

/// How many keys the server holds.
fn keys(server: &RedisServer) -> usize {
    let client = redis::Client::open(server.url()).expect("a URL");
    let mut connection = client.get_connection().expect("the server is up");
    redis::cmd("DBSIZE").query(&mut connection).expect("the server answers")
}

#[test]
fn the_example_gives_the_same_bytes_and_leaves_no_key() {
    let server = RedisServer::start().expect("a server");
    let policy = std::fs::read_to_string(workspace("examples/policy.toml")).expect("reads");
    let scene = Scene::new(&policy);
    let log = workspace("examples/access.log");
    let log = log.to_str().expect("text");
    assert_eq!(scene.replay(&["--decisions", "memory.jsonl", log]).code, 0);
    let ran = scene.replay(&["--decisions", "redis.jsonl", "--store", &server.url(), log]);
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(scene.read("memory.jsonl") == scene.read("redis.jsonl"), "the files differ");
    assert_eq!(keys(&server), 0);
}

#[test]
fn every_operation_gives_the_same_bytes() {
    let server = RedisServer::start().expect("a server");
    for algorithm in ["gcra", "token-bucket", "fixed-window", "first-request-window", "sliding-log"]
    {
        let scene = Scene::new(&format!(
            "[[limit]]\nname = \"one\"\nalgorithm = \"{algorithm}\"\nrate = \"3/s\"\n\
             [[limit]]\nname = \"two\"\nkey = [\"ip\"]\nalgorithm = \"gcra\"\nrate = \"7/m\"\n"
        ));
        let ops = ["acquire", "peek", "refund", "force", "acquire", "reset"];
        let line = |n: usize| {
            let (at, op) = (5_000_000 + n * 77_777 - n % 3 * 400_000, ops[n * n % 11 % ops.len()]);
            let (key, ip, cost) = (n % 3, n % 2, n % 5);
            format!(
                "{{\"at_us\":{at},\"key\":\"k{key}\",\"keys\":{{\"ip\":\"{ip}\"}},\
                 \"cost\":{cost},\"op\":\"{op}\"}}\n"
            )
        };
        scene.write("input", (0..300).map(line).collect::<String>());
        assert_eq!(scene.replay(&["--decisions", "memory.jsonl", "input"]).code, 0);
        let ran = scene.replay(&["--decisions", "redis.jsonl", "--store", &server.url(), "input"]);
        assert_eq!(ran.code, 0, "{ran:?}");
        assert_eq!(scene.read("memory.jsonl"), scene.read("redis.jsonl"), "{algorithm}");
        assert_eq!(scene.read("redis.jsonl").lines().count(), 300);
    }
    assert_eq!(keys(&server), 0);
}

#[cfg(unix)]
#[test]
fn an_interrupted_replay_leaves_no_key_either() {
    let server = RedisServer::start().expect("a server");
    let scene = Scene::new(BUCKET);
    let line = |n| format!("{{\"at_us\":5,\"key\":\"k{n}\"}}\n");
    scene.write("input", (0..500_000).map(line).collect::<String>());
    let url = server.url();
    let child = scene
        .ratelimit(&["replay", "--policy", "policy.toml", "--store", &url, "input"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("runs");
    let started = Instant::now();
    while keys(&server) == 0 {
        assert!(started.elapsed() < Duration::from_secs(30), "no key was ever written");
        std::thread::sleep(Duration::from_millis(5));
    }
    let killed = Command::new("kill").args(["-INT", &child.id().to_string()]).status();
    assert!(killed.expect("kill runs").success());
    let output = child.wait_with_output().expect("ends");
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    assert_eq!(keys(&server), 0);
}

#[test]
fn check_charges_inspect_shows_and_reset_forgets() {
    let server = RedisServer::start().expect("a server");
    let scene = Scene::new(TWO);
    let url = server.url();
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
    assert_eq!(run("check", &[]).code, 0);
}

//! However a test ends, no process and no file that it started remains.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use ratelimit_servers::{RedisCluster, RedisSentinels, RedisServer};

use super::DEADLINE;

/// Set in the child processes that the tests start of this binary: how they end.
const CHILD_VARIABLE: &str = "RATELIMIT_TESTKIT_CHILD";

fn runs(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

/// Starts this test binary as a child process, lets it end once its servers run, and waits until
/// nothing remains of it.
fn leaves_nothing(end: &str) {
    let name = format!("ratelimit-testkit-ends-{end}-{}", std::process::id());
    let directory = std::env::temp_dir().join(name);
    fs::create_dir(&directory).expect("a directory");
    let left = || fs::read_dir(&directory).expect("the directory").count();
    let mut child = Command::new(std::env::current_exe().expect("a test binary"))
        .args(["--exact", "--nocapture", "ends::the_child"])
        .env(CHILD_VARIABLE, end)
        .env("TMPDIR", &directory)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the same binary");
    let mut stderr = BufReader::new(child.stderr.take().expect("piped")).lines();
    let pids = stderr.find_map(|line| line.expect("text").strip_prefix("pids ").map(str::to_owned));
    let pids = pids.expect("it starts servers");
    let pids: Vec<u32> = pids.split(' ').map(|pid| pid.parse().expect("a number")).collect();
    assert!(pids.iter().all(|pid| runs(*pid)), "{pids:?}");
    assert_eq!(left(), pids.len(), "a directory for each");
    if end == "is killed" {
        child.kill().expect("killed, with no time to clean up");
    }
    drop(child.stdin.take());
    // Drain the rest of its output, so that it never blocks on the pipe.
    stderr.for_each(drop);
    child.wait().expect("it has ended");
    let deadline = Instant::now() + DEADLINE;
    while left() > 0 || pids.iter().any(|pid| runs(*pid)) {
        assert!(Instant::now() < deadline, "still there: {} directories, or {pids:?}", left());
        std::thread::sleep(Duration::from_millis(5));
    }
    fs::remove_dir(&directory).expect("it is empty");
}

/// The body of the child: starts servers, then ends as the environment says.
#[test]
fn the_child() {
    let Ok(end) = std::env::var(CHILD_VARIABLE) else { return };
    let shared = RedisServer::shared().expect("a server");
    let cluster = RedisCluster::start_behind_proxies().expect("a cluster");
    let sentinels = RedisSentinels::start().expect("sentinels");
    let paused = RedisServer::start().expect("a server");
    paused.pause().expect("paused");
    let many = [cluster.nodes(), sentinels.servers(), sentinels.sentinels()].into_iter().flatten();
    let pids = many.chain([shared, &paused]).map(|server| server.pid().expect("it runs"));
    eprintln!("pids {}", pids.map(|pid| pid.to_string()).collect::<Vec<_>>().join(" "));
    // The parent inspects the child before it ends or is killed.
    std::io::stdin().read_line(&mut String::new()).expect("the end of the input");
    match end.as_str() {
        "panics" => panic!("as a test does that fails"),
        "exits" => std::process::exit(3),
        _ => (),
    }
}

#[test]
fn a_process_leaves_nothing_behind_however_it_ends() {
    std::thread::scope(|scope| {
        for end in ["returns", "panics", "exits", "is killed"] {
            scope.spawn(move || leaves_nothing(end));
        }
    });
}

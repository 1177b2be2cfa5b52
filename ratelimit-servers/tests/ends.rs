//! However a test ends, no process and no file that it started remains.
#![cfg(target_os = "linux")]
#![allow(clippy::expect_used, clippy::panic, reason = "tests")]

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::{Duration, Instant};

use ratelimit_servers::{RedisCluster, RedisSentinels, RedisServer};

/// Set in the child processes that the tests start of this binary: how they end.
const CHILD_VARIABLE: &str = "RATELIMIT_TESTKIT_CHILD";
const DEADLINE: Duration = Duration::from_secs(10);

/// This test binary as a child process, with a temporary directory of its own.
struct Run {
    child: Child,
    stderr: BufReader<ChildStderr>,
    directory: PathBuf,
    pids: Vec<u32>,
}

impl Run {
    /// Starts the child, and returns when its servers run.
    fn start(end: &str) -> Self {
        let name = format!("ratelimit-testkit-ends-{end}-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        fs::create_dir(&directory).expect("a directory");
        let mut child = Command::new(std::env::current_exe().expect("a test binary"))
            .args(["--exact", "--nocapture", "the_child"])
            .env(CHILD_VARIABLE, end)
            .env("TMPDIR", &directory)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the same binary");
        let mut stderr = BufReader::new(child.stderr.take().expect("piped"));
        let mut line = String::new();
        while !line.starts_with("pids ") {
            line.clear();
            assert_ne!(stderr.read_line(&mut line).expect("lines"), 0, "it has not started");
        }
        let pids = line.split_whitespace().skip(1).map(|pid| pid.parse().expect("a number"));
        let run = Self { pids: pids.collect(), child, stderr, directory };
        assert!(run.pids.iter().all(|pid| runs(*pid)), "{:?}", run.pids);
        assert_eq!(run.left().len(), run.pids.len(), "a directory for each: {:?}", run.left());
        run
    }

    fn left(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(&self.directory).expect("the directory");
        entries.map(|entry| entry.expect("a file").path()).collect()
    }

    /// Lets the child end, and waits until nothing remains of it.
    fn leaves_nothing(mut self) {
        drop(self.child.stdin.take());
        // Drain the rest of its output, so that it never blocks on the pipe.
        std::io::copy(&mut self.stderr, &mut std::io::sink()).expect("the rest");
        self.child.wait().expect("it has ended");
        let deadline = Instant::now() + DEADLINE;
        loop {
            let running: Vec<_> = self.pids.iter().filter(|pid| runs(**pid)).collect();
            let left = self.left();
            if running.is_empty() && left.is_empty() {
                return fs::remove_dir(&self.directory).expect("it is empty");
            }
            assert!(Instant::now() < deadline, "still there: {running:?}, {left:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn runs(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
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
fn a_passing_test_leaves_nothing_behind() {
    Run::start("returns").leaves_nothing();
}

#[test]
fn a_failing_test_leaves_nothing_behind() {
    Run::start("panics").leaves_nothing();
}

#[test]
fn an_exiting_process_leaves_nothing_behind() {
    Run::start("exits").leaves_nothing();
}

#[test]
fn a_killed_process_leaves_nothing_behind() {
    let mut run = Run::start("is killed");
    run.child.kill().expect("killed, with no time to clean up");
    run.leaves_nothing();
}

#[test]
fn a_dropped_server_is_gone_at_once() {
    let mut server = RedisServer::start().expect("a server");
    let pid = server.pid().expect("it runs");
    server.restart().expect("again");
    assert!(!runs(pid), "the one before");
    let pid = server.pid().expect("it runs");
    drop(server);
    assert!(!runs(pid));
}

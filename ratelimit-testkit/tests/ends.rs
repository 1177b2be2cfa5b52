//! Whatever becomes of a test, of all that it started no process and no file is left.
#![cfg(target_os = "linux")]
#![allow(clippy::expect_used, clippy::panic, reason = "tests")]

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::{Duration, Instant};

use ratelimit_testkit::{RedisCluster, RedisSentinels, RedisServer};

/// Set in the processes that the tests start of themselves: how they end.
const CHILD_VARIABLE: &str = "RATELIMIT_TESTKIT_CHILD";
const DEADLINE: Duration = Duration::from_secs(10);

/// This very binary again, as a test run of its own, with a directory of its own for temporary files.
struct Run {
    child: Child,
    stderr: BufReader<ChildStderr>,
    directory: PathBuf,
    pids: Vec<u32>,
}

impl Run {
    /// Starts it, and returns when its servers run.
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

    /// Lets it end, and that nothing is left of it, soon.
    fn leaves_nothing(mut self) {
        drop(self.child.stdin.take());
        // What it still says must not make it wait.
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

/// What the other tests start: it ends as it is told by the environment, once its servers run.
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
    // It ends, or is killed, when it has been looked at.
    std::io::stdin().read_line(&mut String::new()).expect("the end of the input");
    match end.as_str() {
        "panics" => panic!("as a test does that fails"),
        "exits" => std::process::exit(3),
        _ => (),
    }
}

#[test]
fn nothing_is_left_of_a_test_that_passes() {
    Run::start("returns").leaves_nothing();
}

#[test]
fn nothing_is_left_of_a_test_that_fails() {
    Run::start("panics").leaves_nothing();
}

#[test]
fn nothing_is_left_of_a_process_that_exits() {
    Run::start("exits").leaves_nothing();
}

#[test]
fn nothing_is_left_of_a_process_that_is_killed() {
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

//! Runs the tool, and prepares its inputs.

#![allow(dead_code)] // without a client, some have no user

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use ratelimit_servers::RedisServer;
use serde_json::Value;
use tempfile::TempDir;

/// One token per second and a burst of five for each bare key.
pub(crate) const BUCKET: &str =
    "[[limit]]\nname = \"bucket\"\nalgorithm = \"token-bucket\"\nrate = \"1/s\"\nburst = 5\n";

/// Two limits on different identifiers.
pub(crate) static TWO: LazyLock<String> = LazyLock::new(|| {
    limit("per-ip", "ip", "gcra 1/s", "burst = 3")
        + &limit("per-user", "user", "fixed-window 2/m", "")
});

/// A limit in a document: its name, its identifiers, its algorithm and rate, and its other fields
/// as they are written there.
pub(crate) fn limit(name: &str, key: &str, how: &str, more: &str) -> String {
    let key: Vec<_> = key.split(' ').collect();
    let (algorithm, rate) = how.split_once(' ').expect("an algorithm and a rate");
    let how = format!("algorithm = \"{algorithm}\"\nrate = \"{rate}\"");
    format!("[[limit]]\nname = \"{name}\"\nkey = {key:?}\n{how}\n{more}\n")
}

/// Files that are deleted after the test.
pub(crate) struct Scene(TempDir);

impl Scene {
    pub(crate) fn new(policy: &str) -> Self {
        let scene = Self(TempDir::new().expect("a directory"));
        scene.write("policy.toml", policy);
        scene
    }

    /// With this `input` beside the policy.
    pub(crate) fn with(policy: &str, input: impl AsRef<[u8]>) -> Self {
        let scene = Self::new(policy);
        scene.write("input", input);
        scene
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, contents: impl AsRef<[u8]>) -> PathBuf {
        fs::write(self.path(name), contents).expect("writes");
        self.path(name)
    }

    pub(crate) fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).expect("reads")
    }

    /// The tool, in the directory of the scene.
    pub(crate) fn ratelimit(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ratelimit"));
        command.current_dir(self.0.path()).args(arguments);
        command
    }

    /// Runs the tool to its end.
    pub(crate) fn run(&self, arguments: &[&str]) -> Ran {
        Ran::from(self.ratelimit(arguments).output().expect("runs"))
    }

    /// Runs a command on the policy of the scene.
    pub(crate) fn command(&self, command: &str, arguments: &[&str]) -> Ran {
        self.run(&[&[command, "--policy", "policy.toml"], arguments].concat())
    }

    pub(crate) fn replay(&self, arguments: &[&str]) -> Ran {
        self.command("replay", arguments)
    }

    /// The decision lines of a replay with these arguments, which must succeed.
    pub(crate) fn decision_lines(&self, arguments: &[&str]) -> String {
        self.replay(&[&["--decisions", "out.jsonl"], arguments].concat()).exits(0);
        self.read("out.jsonl")
    }

    /// The decision lines of this input.
    pub(crate) fn decisions(&self, input: &str) -> String {
        self.write("input", input);
        self.decision_lines(&["input"])
    }

    /// Starts the tool, with pipes in the place of a terminal.
    pub(crate) fn start(&self, arguments: &[&str]) -> Child {
        let mut command = self.ratelimit(arguments);
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("runs")
    }

    /// Runs the tool with these bytes on its standard input.
    pub(crate) fn run_with_input(&self, arguments: &[&str], input: &[u8]) -> Ran {
        let mut child = self.start(arguments);
        child.stdin.take().expect("a pipe").write_all(input).expect("writes");
        Ran::from(child.wait_with_output().expect("ends"))
    }
}

/// Interrupts the tool once it has begun, and waits for its end.
pub(crate) fn interrupt(child: Child, has_begun: impl Fn() -> bool) -> Ran {
    send("-INT", &child, has_begun);
    Ran::from(child.wait_with_output().expect("ends"))
}

/// Sends the tool a signal once it has begun.
pub(crate) fn send(signal: &str, child: &Child, has_begun: impl Fn() -> bool) {
    let started = Instant::now();
    while !has_begun() {
        assert!(started.elapsed() < Duration::from_secs(30), "it never began");
        std::thread::sleep(Duration::from_millis(5));
    }
    let killed = Command::new("kill").args([signal, &child.id().to_string()]).status();
    assert!(killed.expect("kill runs").success());
}

pub(crate) fn make_pipe(path: &Path) {
    let made = Command::new("mkfifo").arg(path).status();
    assert!(made.expect("mkfifo runs").success());
}

/// The output of the tool.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Ran {
    #[track_caller]
    pub(crate) fn exits(self, code: i32) -> Self {
        assert_eq!(self.code, code, "{self:?}");
        self
    }

    /// Checks that each of these parts is printed.
    #[track_caller]
    pub(crate) fn says(self, parts: &[&str]) -> Self {
        for part in parts {
            assert!(self.out.contains(part) || self.err.contains(part), "{self:?}\nlacks {part}");
        }
        self
    }

    /// Checks that this is not printed.
    #[track_caller]
    pub(crate) fn lacks(self, part: &str) -> Self {
        assert!(!self.out.contains(part) && !self.err.contains(part), "{self:?}\nhas {part}");
        self
    }

    /// The lines of JSON on standard output.
    pub(crate) fn json(&self) -> Vec<Value> {
        json_lines(&self.out)
    }
}

pub(crate) fn json_lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

impl From<Output> for Ran {
    fn from(output: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).expect("text");
        Self {
            code: output.status.code().expect("no signal"),
            out: text(output.stdout),
            err: text(output.stderr),
        }
    }
}

/// The number of keys on the server. A key that the mode CAS removes alone lives for another
/// millisecond, without a value, and is counted by `DBSIZE` until the server looks for it.
pub(crate) fn keys(server: &RedisServer) -> i64 {
    const LASTING: &str = "local lasting = 0 for _, key in ipairs(redis.call('KEYS', '*')) do \
        local ttl = redis.call('PTTL', key) if ttl < 0 or ttl > 1 then lasting = lasting + 1 end end return lasting";
    let keys = server.command(&["EVAL", LASTING, "0"]).expect("the server answers").as_integer();
    keys.expect("a number")
}

/// The policy and the log of `examples`.
pub(crate) fn example() -> (String, String) {
    let log = workspace("examples/access.log").to_str().expect("a name").to_owned();
    (fs::read_to_string(workspace("examples/policy.toml")).expect("reads"), log)
}

/// A file of the workspace.
pub(crate) fn workspace(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name)
}

/// Compressed with gzip.
pub(crate) fn gzip(plain: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(plain).expect("compresses");
    encoder.finish().expect("compresses")
}

/// Writes a state of GCRA beside the store, packed as the store packs it.
pub(crate) fn write_gcra(server: &RedisServer, key: &str, limit: &str, numbers: [u64; 3]) {
    let script = "return redis.call('HSET', KEYS[1], ARGV[1], \
                  struct.pack('<c5I7I7I7I7', 'gcra ', ARGV[2], ARGV[3], ARGV[4], 0))";
    let [tat_us, surplus, timestamp] = numbers.map(|number| number.to_string());
    let field = format!("{limit}/gcra");
    let words = ["EVAL", script, "1", key, &field, &tat_us, &surplus, &timestamp];
    server.command(&words).expect("it answers").ok().expect("written");
}

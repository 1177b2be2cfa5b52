//! [`RedisServer`]: a server of a test's own, that ends with it whatever happens.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

/// A standalone Redis, or a server that speaks its protocol, on a port of its own.
///
/// It keeps nothing on disk. It ends when it is dropped, and also when the test process is killed: a
/// small shell stands between the two, and kills the server when its input ends.
#[derive(Debug)]
pub struct RedisServer {
    binary: String,
    args: Vec<String>,
    port: u16,
    running: Option<Running>,
}

/// The shell, and the server under it.
#[derive(Debug)]
struct Running {
    keeper: Child,
    /// Ends the server when it is closed.
    input: Option<ChildStdin>,
    pid: u32,
}

/// Starts "$@", says its process number, and waits for the end of its input to kill it. Its output is
/// the server's, so that the end of that is the end of the server.
const KEEPER: &str = r#"
trap '' INT
dir=$(mktemp -d) || exit 1
"$@" --dir "$dir" 2>&1 </dev/null &
server=$!
echo "$server"
exec >/dev/null 2>&1
cat
kill -9 "$server"
wait "$server"
rm -rf "$dir"
"#;

/// The environment variable that names the servers to test on.
pub const SERVERS_VARIABLE: &str = "RATELIMIT_TEST_SERVERS";

/// How long a server may take to answer.
const DEADLINE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(2);
/// How often another port is tried when somebody else was quicker.
const ATTEMPTS: usize = 5;

impl RedisServer {
    /// The binaries to test on: those named in `RATELIMIT_TEST_SERVERS`, with a colon or a comma in
    /// between, or else `redis-server`.
    #[must_use]
    pub fn binaries() -> Vec<String> {
        let named = std::env::var(SERVERS_VARIABLE).unwrap_or_default();
        let binaries = named.split([':', ',']).map(str::trim).filter(|name| !name.is_empty());
        let mut binaries: Vec<String> = binaries.map(str::to_owned).collect();
        if binaries.is_empty() {
            binaries.push("redis-server".to_owned());
        }
        binaries
    }

    /// Starts the first of the [`binaries`](Self::binaries).
    ///
    /// # Errors
    /// Why it did not start, and what to do about it.
    pub fn start() -> Result<Self, String> {
        Self::start_with(&Self::binaries()[0], &[])
    }

    /// Starts a server with more arguments, such as `["--maxmemory", "1mb"]`.
    ///
    /// # Errors
    /// Why it did not start, and what to do about it.
    pub fn start_with(binary: &str, args: &[&str]) -> Result<Self, String> {
        let args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
        let mut last = String::new();
        for _ in 0..ATTEMPTS {
            let port = free_port()?;
            match Running::start(binary, &args, port) {
                Ok(running) => {
                    let binary = binary.to_owned();
                    return Ok(Self { binary, args, port, running: Some(running) });
                }
                Err(told) if told.contains("in use") => last = told,
                Err(told) => return Err(told),
            }
        }
        Err(last)
    }

    /// One server for all tests of a binary, started by the first that asks.
    ///
    /// # Errors
    /// As [`RedisServer::start`].
    pub fn shared() -> Result<&'static Self, String> {
        static SHARED: OnceLock<Result<RedisServer, String>> = OnceLock::new();
        SHARED.get_or_init(Self::start).as_ref().map_err(Clone::clone)
    }

    /// Where it listens, for a client.
    #[must_use]
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// The port that it listens on, also after a restart.
    #[must_use]
    pub const fn port(&self) -> u16 {
        self.port
    }

    /// The number of its process, for signals; `None` while it is stopped.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.running.as_ref().map(|running| running.pid)
    }

    /// Kills it, as a crash would. What it held is lost.
    pub fn stop(&mut self) {
        self.running = None;
    }

    /// Starts it again, empty, on the same port.
    ///
    /// # Errors
    /// Why it did not start.
    pub fn restart(&mut self) -> Result<(), String> {
        self.stop();
        self.running = Some(Running::start(&self.binary, &self.args, self.port)?);
        Ok(())
    }
}

impl Running {
    fn start(binary: &str, args: &[String], port: u16) -> Result<Self, String> {
        if let Err(error) = Command::new(binary).arg("--version").output() {
            return Err(format!(
                "the server {binary:?} could not be started: {error}. Install one (apt-get install \
                 redis-server, dnf install redis, brew install redis), or name it in {SERVERS_VARIABLE}"
            ));
        }
        let port_text = port.to_string();
        let mut keeper = Command::new("sh")
            .args(["-c", KEEPER, "sh", binary, "--port", &port_text, "--bind", "127.0.0.1"])
            .args(["--save", "", "--appendonly", "no"])
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| format!("sh could not be started: {error}"))?;
        let input = keeper.stdin.take();
        let output = keeper.stdout.take().ok_or("sh has no output")?;
        let mut running = Self { keeper, input, pid: 0 };
        let mut output = BufReader::new(output);
        running.pid = first_line(&mut output)?;
        let log = thread::spawn(move || drain(output));
        let deadline = Instant::now() + DEADLINE;
        loop {
            // Somebody else's server may answer on the same port: it has another process number.
            if answers(port, running.pid) {
                return Ok(running);
            }
            if log.is_finished() || Instant::now() > deadline {
                drop(running);
                let log = log.join().unwrap_or_default();
                return Err(format!("{binary} did not answer on port {port}. It said: {log}"));
            }
            thread::sleep(PAUSE);
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.input.take());
        // Without the wait the port would not be free yet.
        let _ = self.keeper.wait();
    }
}

fn free_port() -> Result<u16, String> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
    let address = listener.and_then(|listener| listener.local_addr());
    address.map(|address| address.port()).map_err(|error| format!("no port is free: {error}"))
}

fn first_line(output: &mut BufReader<ChildStdout>) -> Result<u32, String> {
    let mut line = String::new();
    output.read_line(&mut line).map_err(|error| error.to_string())?;
    line.trim().parse().map_err(|_| format!("sh said {line:?} instead of a process number"))
}

/// Reads all that the server says, so that it never waits for a reader, and returns the beginning.
fn drain(output: BufReader<ChildStdout>) -> String {
    let mut beginning = String::new();
    for line in output.lines().map_while(Result::ok) {
        if beginning.len() < 4_000 {
            beginning.push_str(&line);
            beginning.push('\n');
        }
    }
    beginning
}

/// Whether the server of this process answers on this port.
fn answers(port: u16, pid: u32) -> bool {
    let ask = || -> std::io::Result<bool> {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
        stream.set_read_timeout(Some(DEADLINE))?;
        stream.write_all(b"PING\r\nINFO server\r\n")?;
        let due = format!("process_id:{pid}\r\n");
        let mut reply = Vec::new();
        let mut chunk = [0; 4096];
        loop {
            let read = stream.read(&mut chunk)?;
            reply.extend_from_slice(&chunk[..read]);
            let text = String::from_utf8_lossy(&reply);
            if text.contains(&due) {
                return Ok(text.starts_with("+PONG"));
            }
            // One that asks for a password does not say which it is.
            if text.starts_with("-NOAUTH") {
                return Ok(true);
            }
            // Lines that come after the process number.
            if read == 0 || text.contains("executable:") || text.starts_with('-') {
                return Ok(false);
            }
        }
    };
    ask().unwrap_or(false)
}

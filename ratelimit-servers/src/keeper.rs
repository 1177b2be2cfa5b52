//! The shell between a test and its server, which outlives the test just long enough to clean up.

use std::hash::{BuildHasher, RandomState};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, Stdio};
use std::thread::{self, JoinHandle};

/// Creates the directory "$1" unless it exists, and in it the files whose names and contents follow
/// until "--", starts the rest of "$@" and prints its process id. Then `stop` kills the server;
/// `leave` also ends the shell. At the end of its input, which comes with the end of the test, the
/// shell also removes the directory. The shell's stdout is the server's, so it closes when the
/// server ends; the shell's own messages go to stderr.
const KEEPER: &str = r#"
trap '' HUP INT TERM
dir=$1
shift
[ -d "$dir" ] || mkdir -m 700 "$dir" || exit 1
while [ "$1" != -- ]; do
  [ -e "$dir/$1" ] || printf %s "$2" >"$dir/$1"
  shift 2
done
shift
"$@" 2>&1 </dev/null &
server=$!
echo "$server" >&2
exec >/dev/null
end() {
  [ -z "$server" ] && return
  kill -9 "$server" 2>/dev/null
  wait "$server" 2>/dev/null
  server=
}
while read -r word; do
  end
  [ "$word" = leave ] && exit
  echo gone >&2
done
end
rm -rf "$dir"
"#;

/// What to start: a command, and the files that its directory contains.
#[derive(Debug)]
pub(super) struct Recipe {
    pub(super) binary: String,
    pub(super) words: Vec<String>,
    pub(super) directory: PathBuf,
    /// Existing files are kept: a server may have written its own state into them.
    pub(super) files: Vec<(&'static str, String)>,
}

impl Recipe {
    /// A server on this port of this machine that persists nothing.
    pub(super) fn of_a_server(port: u16, binary: &str, args: &[&str]) -> Self {
        let directory = new_directory();
        let port = port.to_string();
        let mut words = vec!["--port", &port, "--bind", "127.0.0.1", "--save", ""];
        // By default a replica would wait 5 seconds for others to join it.
        words.extend(["--appendonly", "no", "--repl-diskless-sync-delay", "0"]);
        words.extend(args);
        let named = directory.to_string_lossy().into_owned();
        words.extend(["--dir", &named]);
        let words = words.into_iter().map(str::to_owned).collect();
        Self { binary: binary.to_owned(), words, directory, files: Vec::new() }
    }
}

/// The name of a directory that does not exist yet.
pub(super) fn new_directory() -> PathBuf {
    let random = RandomState::new().hash_one(std::process::id());
    std::env::temp_dir().join(format!("ratelimit-testkit-{random:016x}"))
}

/// The shell, and the server under it.
#[derive(Debug)]
pub(super) struct Keeper {
    shell: Child,
    /// Closing it ends the server and removes the directory.
    input: Option<ChildStdin>,
    said: BufReader<ChildStderr>,
    log: Option<JoinHandle<String>>,
    pid: Option<u32>,
}

impl Keeper {
    /// Starts the server, which may not answer yet when this returns.
    pub(super) fn start(recipe: &Recipe) -> Result<Self, String> {
        let mut shell = Command::new("sh")
            .args(["-c", KEEPER, "sh"])
            .arg(&recipe.directory)
            .args(recipe.files.iter().flat_map(|(name, content)| [*name, content]))
            .args(["--", &recipe.binary])
            .args(&recipe.words)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| format!("sh could not be started: {error}"))?;
        let input = shell.stdin.take();
        let output = shell.stdout.take().ok_or("sh has no output")?;
        let said = BufReader::new(shell.stderr.take().ok_or("sh has no second output")?);
        let mut keeper = Self { shell, input, said, log: None, pid: None };
        let line = keeper.line()?;
        let pid = line.parse().map_err(|_| format!("sh said {line:?}, not a process number"))?;
        keeper.pid = Some(pid);
        keeper.log = Some(thread::spawn(move || drain(output)));
        Ok(keeper)
    }

    /// The server's process id while it is not stopped.
    pub(super) const fn pid(&self) -> Option<u32> {
        self.pid
    }

    /// Whether the server has ended by itself.
    pub(super) fn has_ended(&self) -> bool {
        self.log.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Kills the server, and returns when its port is free. The directory stays.
    pub(super) fn stop(&mut self) {
        if self.pid.take().is_some() && self.tell("stop").is_ok() {
            // An error means that the shell, and with it the server, has ended.
            let _ = self.line();
        }
    }

    /// Kills the server, leaves the directory to another keeper, and returns the server's output.
    pub(super) fn leave(mut self) -> String {
        let _ = self.tell("leave");
        self.end()
    }

    /// Kills the server, removes the directory, and returns the server's output.
    pub(super) fn end(mut self) -> String {
        let log = self.log.take();
        drop(self);
        log.and_then(|log| log.join().ok()).unwrap_or_default()
    }

    fn tell(&mut self, word: &str) -> Result<(), String> {
        let input = self.input.as_mut().ok_or("sh has ended")?;
        writeln!(input, "{word}").map_err(|error| format!("sh does not listen: {error}"))
    }

    fn line(&mut self) -> Result<String, String> {
        let mut line = String::new();
        self.said.read_line(&mut line).map_err(|error| error.to_string())?;
        Ok(line.trim().to_owned())
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        drop(self.input.take());
        // Without the wait the port may not be free yet.
        let _ = self.shell.wait();
    }
}

/// Reads the server's output to its end, so that the server never blocks on the pipe, and returns
/// the beginning.
fn drain(mut output: ChildStdout) -> String {
    let mut beginning = Vec::new();
    // An error ends the output.
    let _ = output.by_ref().take(4_000).read_to_end(&mut beginning);
    let _ = io::copy(&mut output, &mut io::sink());
    String::from_utf8_lossy(&beginning).into_owned()
}

//! `top --watch`: as lists through a pipe, and as a live table in a pseudo-terminal.

use std::fs::File;
use std::io::{BufRead, BufReader, Read as _, Write as _};
use std::process::{Child, ChildStdout, ExitStatus};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use ratelimit_servers::RedisServer;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use serde_json::{Value, json};

use crate::common::{BUCKET, Scene, interrupt};

/// Waits until this is so, within a bound that only a failure reaches.
fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let started = Instant::now();
    while !is_so() {
        assert!(started.elapsed() < Duration::from_secs(60), "never: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// A server with two callers that are limited for hours, and the arguments that watch it.
fn watched(more: &[&'static str]) -> (Scene, RedisServer, Vec<String>) {
    let (server, scene) =
        (RedisServer::start().expect("a server"), Scene::new(&BUCKET.replace("1/s", "1/h")));
    for caller in ["alice", "bob"] {
        let charge = [caller, "--cost", "5", "--store", &server.url()];
        scene.command("check", &charge).exits(0);
    }
    let url = server.url();
    let arguments = ["top", "--policy", "policy.toml", "--store", &url, "--watch=100ms"];
    let arguments = arguments.into_iter().chain(more.iter().copied()).map(str::to_owned);
    let arguments = arguments.collect();
    (scene, server, arguments)
}

fn start(scene: &Scene, arguments: &[String]) -> (Child, BufReader<ChildStdout>) {
    let mut child = scene.start(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    let out = child.stdout.take().expect("a pipe");
    (child, BufReader::new(out))
}

/// The lines of JSON of one scan, of which the last has the totals.
fn next_scan(out: &mut impl BufRead) -> (Vec<Value>, Value) {
    let mut limited = Vec::new();
    loop {
        let mut line = String::new();
        assert!(out.read_line(&mut line).expect("reads") > 0, "the tool has ended");
        let line: Value = serde_json::from_str(&line).expect("JSON");
        if line.get("keys").is_some() {
            return (limited, line);
        }
        limited.push(line);
    }
}

#[test]
fn without_a_terminal_each_scan_is_a_list_with_what_was_charged_since_the_one_before() {
    let (scene, server, arguments) = watched(&["--json"]);
    let (child, mut out) = start(&scene, &arguments);
    let (first, totals) = next_scan(&mut out);
    let told = first.iter().map(|line| (line["value"].as_str(), &line["charged"]));
    let mut told: Vec<_> = told.collect();
    told.sort_by_key(|(caller, _)| *caller);
    assert_eq!(told, [(Some("alice"), &Value::Null), (Some("bob"), &Value::Null)]);
    assert!(totals["at_us"].as_u64() > Some(1_700_000_000_000_000), "{totals}");
    // A reset frees a caller. The list shows charges only of callers that both scans have found.
    scene.command("reset", &["bob", "--store", &server.url()]).exits(0);
    let mut scans = 0;
    while {
        let (limited, totals) = next_scan(&mut out);
        let alice = limited.iter().find(|line| line["value"] == "alice").expect("limited");
        assert_eq!(alice["charged"], json!(0));
        assert!(alice["charged_within_us"].as_u64() > Some(0), "{alice}");
        scans += 1;
        totals["limited"] == 2
    } {
        assert!(scans < 600, "bob is listed for ever");
    }
    server.stop();
    wait_until("an error is told", || next_scan(&mut out).1["error"].is_string());
    let ran = interrupt(child, || true).exits(130);
    assert_eq!(ran.err, "");
}

#[test]
fn a_store_that_fails_is_asked_again_and_the_reader_may_close_the_output() {
    let (scene, server, arguments) = watched(&[]);
    let (mut child, mut out) = start(&scene, &arguments);
    let mut errors = BufReader::new(child.stderr.take().expect("a pipe"));
    let mut until = |part: &str| {
        let mut all = String::new();
        while !all.ends_with(part) {
            assert!(out.read_line(&mut all).expect("reads") > 0, "{all}");
        }
        all
    };
    let all = until("2 limited now, of 2 callers in 2 keys\n");
    let lines: Vec<_> = all.lines().collect();
    assert!(lines[0].ends_with('Z') && lines[0].len() == 20, "{all}");
    assert_eq!(
        lines[1].split_whitespace().collect::<Vec<_>>().join(" "),
        "caller limit left of retry in charged/s"
    );
    server.stop();
    let mut said = String::new();
    errors.read_line(&mut said).expect("reads");
    assert!(said.starts_with("error: --store ") && !said.contains("SCAN"), "{said}");
    assert!(said.ends_with("the next scan begins in 100 ms\n"), "{said}");
    server.restart().expect("starts");
    until("0 limited now, of 0 callers in 0 keys\n");
    drop(out);
    let status = ended(&mut child);
    assert!(status.success(), "{status}");
}

fn ended(child: &mut Child) -> ExitStatus {
    let mut status = None;
    wait_until("the tool ends", || {
        status = child.try_wait().expect("a child");
        status.is_some()
    });
    status.expect("ended")
}

/// The tool in a pseudo-terminal of 80 columns and 24 rows.
struct InTerminal {
    child: Child,
    keyboard: File,
    written: Arc<Mutex<String>>,
}

impl InTerminal {
    fn start(scene: &Scene, arguments: &[String]) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a pseudo-terminal");
        grantpt(&master).and_then(|()| unlockpt(&master)).expect("is granted");
        let name = ptsname(&master, Vec::new()).expect("a name").into_string().expect("text");
        let size = Winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&master, size).expect("sets");
        let terminal = File::options().read(true).write(true).open(name).expect("opens");
        let mut command =
            scene.ratelimit(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
        command.env("TERM", "xterm-256color");
        command.stdin(terminal.try_clone().expect("a handle"));
        command.stderr(terminal.try_clone().expect("a handle"));
        let child = command.stdout(terminal).spawn().expect("runs");
        let keyboard = File::from(master);
        let written = Arc::<Mutex<String>>::default();
        let (mut screen, shared) = (keyboard.try_clone().expect("a handle"), Arc::clone(&written));
        // It ends with an error once no process has the terminal open.
        thread::spawn(move || {
            let mut bytes = [0; 4_096];
            while let Ok(length @ 1..) = screen.read(&mut bytes) {
                let text = String::from_utf8_lossy(&bytes[..length]);
                shared.lock().expect("no panic").push_str(&text);
            }
        });
        Self { child, keyboard, written }
    }

    /// Waits until the tool has written this.
    fn shows(&self, part: &str) {
        let written = || self.written.lock().expect("no panic").clone();
        let started = Instant::now();
        while !written().contains(part) {
            let is_late = started.elapsed() > Duration::from_secs(60);
            assert!(!is_late, "no {part:?} in the end of {:?}", last(&written(), 2_000));
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn press(&mut self, keys: &[u8]) {
        self.written.lock().expect("no panic").clear();
        self.keyboard.write_all(keys).expect("writes");
    }
}

fn last(text: &str, bytes: usize) -> String {
    let begin = text.len().saturating_sub(bytes);
    String::from_utf8_lossy(&text.as_bytes()[begin..]).into_owned()
}

/// What a terminal reads when the other screen is left, and the cursor is shown again.
const LEFT: [&str; 2] = ["\x1b[?1049l", "\x1b[?25h"];

#[test]
fn a_terminal_shows_a_live_table_that_keys_change_and_is_given_back_at_the_end() {
    let (scene, server, arguments) = watched(&[]);
    for (keys, code, is_lost) in [(&b"q"[..], 0, false), (b"\x03", 130, false), (b"q", 0, true)] {
        let mut tool = InTerminal::start(&scene, &arguments);
        // Words: a blank that is on the screen already is not written again.
        for part in ["\x1b[?1049h", "alice", "bob", "bucket", "quit"] {
            tool.shows(part);
        }
        tool.press(b"/bo");
        tool.shows("filter:");
        tool.shows("keeps");
        tool.press(b"\r");
        tool.shows("\"bo\";");
        tool.press(b"\x1b");
        tool.shows("alice");
        tool.press(b"p");
        tool.shows("PAUSED");
        tool.press(b"p/x");
        tool.shows("filter:");
        tool.press(b"\x1b");
        tool.shows("alice");
        if is_lost {
            server.stop();
            tool.shows("error:");
        }
        tool.press(keys);
        for part in LEFT {
            tool.shows(part);
        }
        assert_eq!(ended(&mut tool.child).code(), Some(code));
    }
}

#[test]
fn an_error_of_the_arguments_ends_it_at_once() {
    let scene = Scene::new(BUCKET);
    let watch =
        |more: &str| scene.command("top", &["--store", "redis://127.0.0.1:1?mode=nope", more]);
    watch("--watch").exits(2).says(&["error: --store "]);
    watch("--watch=5").exits(2).says(&["--watch", "time unit needed"]);
    watch("--watch=1ms").exits(2).says(&["--watch", "at least 100ms, such as 2s"]);
}

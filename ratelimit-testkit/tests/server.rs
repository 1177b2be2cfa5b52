//! Servers start in no time, start again on the same port, and end with the test whatever happens.
#![cfg(unix)]
#![allow(clippy::expect_used, reason = "tests")]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use ratelimit_testkit::RedisServer;

fn ping(port: u16) -> bool {
    let ask = || -> std::io::Result<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.write_all(b"PING\r\n")?;
        let mut reply = [0; 7];
        stream.read_exact(&mut reply)?;
        Ok(String::from_utf8_lossy(&reply).into_owned())
    };
    ask().is_ok_and(|reply| reply == "+PONG\r\n")
}

#[test]
fn a_server_answers_stops_and_starts_again_on_its_port() {
    let mut server = RedisServer::start().expect("a server");
    let port = server.port();
    assert!(ping(port) && server.url().ends_with(&port.to_string()));
    server.stop();
    assert!(!ping(port) && server.pid().is_none());
    server.restart().expect("again");
    assert!(ping(port));
    drop(server);
    assert!(!ping(port));
}

#[test]
fn a_server_that_asks_for_a_password_has_started_too() {
    let binary = &RedisServer::binaries()[0];
    let server = RedisServer::start_with(binary, &["--requirepass", "secret"]).expect("a server");
    assert!(!ping(server.port()), "it does not say PONG to everybody");
}

#[test]
fn the_shared_server_is_one() {
    let port = || RedisServer::shared().expect("a server").port();
    assert_eq!(port(), port());
}

#[test]
fn a_missing_binary_is_told_with_the_remedy() {
    let told = RedisServer::start_with("no-such-redis-server", &[]).expect_err("no such binary");
    assert!(told.contains("apt-get install redis-server"), "{told}");
}

#[test]
fn an_argument_that_the_server_refuses_is_told_in_its_own_words() {
    let told = RedisServer::start_with(&RedisServer::binaries()[0], &["--no-such-option", "1"])
        .expect_err("no such option");
    assert!(told.contains("no-such-option"), "{told}");
}

/// Set in the process that the next test starts of itself.
#[cfg(target_os = "linux")]
const CHILD_VARIABLE: &str = "RATELIMIT_TESTKIT_CHILD";

#[test]
#[cfg(target_os = "linux")]
fn a_server_ends_when_the_test_process_is_killed() {
    if std::env::var_os(CHILD_VARIABLE).is_some() {
        let server = RedisServer::start().expect("a server");
        eprintln!("pid {}", server.pid().expect("it runs"));
        loop {
            std::thread::park(); // until it is killed
        }
    }
    let this = std::env::current_exe().expect("a test binary");
    let mut child = Command::new(this)
        .args(["--exact", "--nocapture", "a_server_ends_when_the_test_process_is_killed"])
        .env(CHILD_VARIABLE, "1")
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .expect("the same binary");
    let mut told = String::new();
    let mut stderr = child.stderr.take().expect("piped");
    while !told.ends_with('\n') {
        let mut byte = [0];
        stderr.read_exact(&mut byte).expect("a process number");
        told.push(char::from(byte[0]));
    }
    let process = format!("/proc/{}", told.trim().trim_start_matches("pid "));
    assert!(Path::new(&process).exists());
    child.kill().expect("killed, with no time to clean up");
    child.wait().expect("gone");
    let deadline = Instant::now() + Duration::from_secs(5);
    while Path::new(&process).exists() {
        assert!(Instant::now() < deadline, "{process} is still there");
        std::thread::sleep(Duration::from_millis(5));
    }
}

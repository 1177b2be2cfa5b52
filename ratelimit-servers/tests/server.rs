//! Servers start quickly, restart on the same port, and answer unless they are paused.
#![cfg(unix)]
#![allow(clippy::expect_used, reason = "tests")]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use ratelimit_servers::{RedisServer, RespClient, RespValue};

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
fn a_server_that_demands_a_password_counts_as_started() {
    let binary = &RedisServer::binaries()[0];
    let server = RedisServer::start_with(binary, &["--requirepass", "secret"]).expect("a server");
    assert!(!ping(server.port()), "it does not say PONG to everybody");
}

#[test]
fn the_shared_server_is_started_once() {
    let port = || RedisServer::shared().expect("a server").port();
    assert_eq!(port(), port());
}

#[test]
fn a_missing_binary_is_reported_with_the_remedy() {
    let message = RedisServer::start_with("no-such-redis-server", &[]).expect_err("no such binary");
    assert!(message.contains("apt-get install redis-server"), "{message}");
}

#[test]
fn a_refused_argument_is_reported_in_the_servers_own_words() {
    let message = RedisServer::start_with(&RedisServer::binaries()[0], &["--no-such-option", "1"])
        .expect_err("no such option");
    assert!(message.contains("no-such-option"), "{message}");
}

#[test]
fn a_command_is_answered_whatever_the_reply() {
    let server = RedisServer::shared().expect("a server");
    let reply = |words: &[&str]| server.command(words).expect("a reply");
    assert_eq!(server.binary(), RedisServer::binaries()[0]);
    assert_eq!(reply(&["SET", "command", "1"]), RespValue::text("OK"));
    assert_eq!(reply(&["INCR", "command"]).as_integer(), Some(2));
    assert_eq!(reply(&["GET", "no such key"]), RespValue::Nil);
    let listed = reply(&["MGET", "command", "no such key"]);
    assert_eq!(listed.as_array(), [RespValue::text("2"), RespValue::Nil]);
    let refused = reply(&["GET"]);
    assert!(refused.as_error().is_some_and(|message| message.contains("number of arguments")));
    assert_eq!(refused.clone().ok(), Err(refused.as_error().expect("an error").to_owned()));
}

#[test]
fn a_stopped_server_differs_from_one_that_replies_an_error() {
    let mut server = RedisServer::start().expect("a server");
    server.stop();
    let port = server.port().to_string();
    let message = server.command(&["PING"]).expect_err("stopped");
    assert!(message.contains(&port), "{message}");
    assert!(server.pause().is_err() && server.resume().is_err());
}

#[test]
fn a_replica_has_what_its_master_wrote_before() {
    let binary = &RedisServer::binaries()[0];
    let master = RedisServer::start_with(binary, &["--requirepass", "secret"]).expect("a server");
    assert_eq!(master.command(&["SET", "a", "1"]), Ok(RespValue::text("OK")));
    let replica = RedisServer::replica_of(&master).expect("a replica");
    assert_eq!(replica.command(&["GET", "a"]), Ok(RespValue::text("1")));
    let refused = replica.command(&["SET", "a", "2"]).expect("a reply");
    assert!(refused.as_error().is_some_and(|message| message.starts_with("READONLY")), "{refused}");
    let mut client = master.client().expect("it listens");
    assert_eq!(client.command(&["SET", "a", "2"]), Ok(RespValue::text("OK")));
    assert_eq!(client.command(&["WAIT", "1", "5000"]), Ok(RespValue::Integer(1)));
    assert_eq!(replica.command(&["GET", "a"]), Ok(RespValue::text("2")));
}

#[test]
fn a_paused_server_accepts_connections_and_answers_after_it_resumes() {
    let server = RedisServer::start().expect("a server");
    let mut before = server.client().expect("it listens");
    server.pause().expect("paused");
    let mut new = RespClient::connect(server.port()).expect("the system accepts");
    for client in [&mut before, &mut new] {
        client.send(&["PING"]).expect("sent");
        assert!(client.receive_within(Duration::from_millis(50)).is_err());
    }
    server.resume().expect("it goes on");
    for client in [&mut before, &mut new] {
        assert_eq!(client.receive(), Ok(RespValue::text("PONG")));
    }
    server.pause().expect("paused: it can be killed all the same");
}

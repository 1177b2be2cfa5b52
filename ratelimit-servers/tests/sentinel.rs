//! Sentinels name a master, and another one when it dies or on command.
#![cfg(unix)]
#![allow(clippy::expect_used, reason = "tests")]

use std::thread;
use std::time::{Duration, Instant};

use ratelimit_servers::{RedisSentinels, RedisServer, RespClient, RespValue};

const DEADLINE: Duration = Duration::from_secs(30);

/// The answer of the server on this port to a write.
fn write(sentinels: &RedisSentinels, port: u16) -> RespValue {
    let mut servers = sentinels.servers().iter();
    let server = servers.find(|server| server.port() == port).expect("one of ours");
    server.command(&["SET", "a", "kept"]).expect("a reply")
}

#[test]
fn three_sentinels_name_one_master_with_a_replica() {
    let sentinels = RedisSentinels::start().expect("sentinels");
    let ports = sentinels.ports();
    let addresses: Vec<String> = ports.iter().map(|port| format!("127.0.0.1:{port}")).collect();
    assert_eq!(sentinels.url(), format!("redis-sentinel://{}/mymaster", addresses.join(",")));
    assert_eq!((ports.len(), sentinels.service()), (3, "mymaster"));
    let master = sentinels.servers()[0].port();
    assert_eq!((sentinels.master_port(), sentinels.master()), (Ok(master), Ok(0)));
    for port in ports {
        let mut sentinel = RespClient::connect(port).expect("it listens");
        let words = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", "mymaster"];
        let named = sentinel.command(&words).expect("a reply").to_string();
        assert_eq!(named, format!("[127.0.0.1, {master}]"));
    }
    assert_eq!(write(&sentinels, master), RespValue::text("OK"));
    let refused = write(&sentinels, sentinels.servers()[1].port());
    assert!(refused.as_error().is_some_and(|message| message.starts_with("READONLY")), "{refused}");
}

#[test]
fn a_killed_master_is_replaced_and_comes_back_as_a_replica() {
    let sentinels = RedisSentinels::start().expect("sentinels");
    let mut client = sentinels.servers()[0].client().expect("it listens");
    assert_eq!(client.command(&["SET", "a", "kept"]), Ok(RespValue::text("OK")));
    assert_eq!(client.command(&["WAIT", "1", "5000"]), Ok(RespValue::Integer(1)));
    let new = sentinels.kill_master().expect("replaced");
    assert_eq!(new, sentinels.servers()[1].port());
    assert_eq!(sentinels.master(), Ok(1));
    assert_eq!(sentinels.servers()[1].command(&["GET", "a"]), Ok(RespValue::text("kept")));
    sentinels.kill_sentinel(0);
    assert_eq!(sentinels.master(), Ok(1), "the others know as well");
    sentinels.restart_dead().expect("all are there again");
    let role = sentinels.servers()[0].command(&["ROLE"]).expect("a reply").to_string();
    assert!(role.starts_with(&format!("[slave, 127.0.0.1, {new}, connected")), "{role}");
    assert_eq!(sentinels.kill_master(), Ok(sentinels.servers()[0].port()), "back to the first");
    assert_eq!(write(&sentinels, sentinels.servers()[0].port()), RespValue::text("OK"));
}

#[test]
fn a_master_that_hangs_is_replaced_and_follows_when_it_goes_on() {
    let sentinels = RedisSentinels::start().expect("sentinels");
    sentinels.servers()[0].pause().expect("paused");
    sentinels.wait_until_healthy(DEADLINE).expect("replaced");
    assert_eq!(sentinels.master(), Ok(1));
    sentinels.servers()[0].resume().expect("it goes on");
    sentinels.wait_until_healthy(DEADLINE).expect("it has learnt");
    assert_eq!(sentinels.master(), Ok(1));
}

#[test]
fn a_failover_on_command_works_in_both_directions() {
    let binary = &RedisServer::binaries()[0];
    let sentinels =
        RedisSentinels::start_with(binary, &["--requirepass", "secret"]).expect("sentinels");
    for server in [1, 0] {
        let new = sentinels.fail_over().expect("failed over");
        assert_eq!((new, sentinels.master()), (sentinels.servers()[server].port(), Ok(server)));
        assert_eq!(write(&sentinels, new), RespValue::text("OK"));
        let demoted = write(&sentinels, sentinels.servers()[1 - server].port());
        assert!(
            demoted.as_error().is_some_and(|message| message.starts_with("READONLY")),
            "{demoted}"
        );
    }
}

/// Waits until the reply to these words fits.
fn await_reply(sentinel: &RedisServer, words: &[&str], fits: impl Fn(&str) -> bool) {
    let deadline = Instant::now() + DEADLINE;
    loop {
        let reply = sentinel.command(words).expect("a reply").to_string();
        if fits(&reply) {
            return;
        }
        assert!(Instant::now() < deadline, "{words:?}: {reply}");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_failover_that_a_sentinel_abandons_is_repeated() {
    let sentinels = RedisSentinels::start().expect("sentinels");
    let sentinel = &sentinels.sentinels()[0];
    let in_progress = |reply: &str| reply.contains("failover_in_progress");
    let watched = ["SENTINEL", "MASTER", sentinels.service()];
    // It cannot be promoted within the failover timeout.
    sentinels.servers()[1].pause().expect("paused");
    let new = thread::scope(|scope| {
        let failover = scope.spawn(|| sentinels.fail_over());
        await_reply(sentinel, &watched, in_progress);
        await_reply(sentinel, &watched, |reply| !in_progress(reply));
        sentinels.servers()[1].resume().expect("it goes on");
        failover.join().expect("no panic").expect("failed over")
    });
    assert_eq!(new, sentinels.servers()[1].port());
}

#[test]
fn a_sentinel_whose_process_stalled_fails_over() {
    let sentinels = RedisSentinels::start().expect("sentinels");
    let sentinel = &sentinels.sentinels()[0];
    let debug = |trigger| sentinel.command(&["SENTINEL", "DEBUG", "TILT-TRIGGER", trigger]);
    let information = ["INFO", "sentinel"];
    // Each of its turns, ten per second, seems to come late.
    debug("1").expect("a reply").ok().expect("set");
    await_reply(sentinel, &information, |reply| reply.contains("sentinel_tilt:1"));
    debug("2000").expect("a reply").ok().expect("set");
    assert_eq!(sentinels.fail_over(), Ok(sentinels.servers()[1].port()));
}

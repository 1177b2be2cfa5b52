//! Sentinels name a master, and another one when it dies or on command.

use std::thread;
use std::time::{Duration, Instant};

use ratelimit_servers::{RedisSentinels, RedisServer, RespValue};

use super::{DEADLINE, ok, refused};

/// This server is the master: it alone takes writes.
fn is_master(sentinels: &RedisSentinels, master: usize) {
    assert_eq!(sentinels.master(), Ok(master));
    let write = |server: usize| sentinels.servers()[server].command(&["SET", "a", "kept"]);
    assert_eq!(write(master), Ok(ok()));
    assert!(refused(write(1 - master)).starts_with("READONLY"));
}

#[test]
fn a_master_that_is_killed_or_hangs_is_replaced_and_comes_back_as_a_replica() {
    let sentinels = RedisSentinels::start().expect("sentinels");
    let ports = sentinels.ports();
    let addresses: Vec<String> = ports.iter().map(|port| format!("127.0.0.1:{port}")).collect();
    assert_eq!(sentinels.url(), format!("redis-sentinel://{}/mymaster", addresses.join(",")));
    assert_eq!((ports.len(), sentinels.service()), (3, "mymaster"));
    let [first, second] = [0, 1].map(|server: usize| sentinels.servers()[server].port());
    is_master(&sentinels, 0);
    let mut client = sentinels.servers()[0].client().expect("it listens");
    assert_eq!(client.command(&["SET", "b", "kept"]), Ok(ok()));
    assert_eq!(client.command(&["WAIT", "1", "5000"]), Ok(RespValue::Integer(1)));
    assert_eq!((sentinels.kill_master(), sentinels.master()), (Ok(second), Ok(1)));
    assert_eq!(sentinels.servers()[1].command(&["GET", "b"]), Ok(RespValue::text("kept")));
    sentinels.restart_dead().expect("all are there again");
    let role = sentinels.servers()[0].command(&["ROLE"]).expect("a reply").to_string();
    assert!(role.starts_with(&format!("[slave, 127.0.0.1, {second}, connected")), "{role}");
    assert_eq!(sentinels.kill_master(), Ok(first), "back to the first");
    sentinels.restart_dead().expect("all are there again");
    sentinels.servers()[0].pause().expect("paused");
    sentinels.wait_until_healthy(DEADLINE).expect("replaced");
    assert_eq!(sentinels.master(), Ok(1));
    sentinels.servers()[0].resume().expect("it goes on");
    sentinels.wait_until_healthy(DEADLINE).expect("it has learnt");
    is_master(&sentinels, 1);
}

#[test]
fn a_failover_on_command_works_in_both_directions() {
    let binary = &RedisServer::binaries()[0];
    let sentinels =
        RedisSentinels::start_with(binary, &["--requirepass", "secret"]).expect("sentinels");
    for server in [1, 0] {
        assert_eq!(sentinels.fail_over(), Ok(sentinels.servers()[server].port()));
        is_master(&sentinels, server);
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
    // Each of its turns, ten per second, seems to come late.
    assert_eq!(debug("1"), Ok(ok()));
    await_reply(sentinel, &["INFO", "sentinel"], |reply| reply.contains("sentinel_tilt:1"));
    assert_eq!(debug("2000"), Ok(ok()));
    assert_eq!(sentinels.fail_over(), Ok(sentinels.servers()[1].port()));
}

//! Sentinels fail over on command, whatever keeps them from it at first. That they name a master,
//! and another one when it dies or hangs, `topology::faults` in the tests of `ratelimit-redis`
//! relies on.

use std::thread;
use std::time::{Duration, Instant};

use ratelimit_servers::{RedisSentinels, RedisServer};

use super::{DEADLINE, ok};

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
    let args = ["--requirepass", "secret"];
    let sentinels = RedisSentinels::start_with(&RedisServer::binaries()[0], &args);
    let sentinels = sentinels.expect("sentinels");
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

//! The scripts that people have, run on a server at the times of the guide's tables, beside the policies that replace
//! them, on a given clock.
//!
//! A server's clock cannot be set. Where a table lets time pass between two commands, the tests shorten the key's time to
//! live by as much; where a script reads `TIME`, they put the time of the table in its place. Where real time could end a
//! short window, a second of the table is a thousand seconds on the server.

use std::time::Duration;

use ratelimit_core::{ManualClock, Policy, RateLimiter, Timestamp};
use ratelimit_memory::MemoryStore;
use ratelimit_testkit::{RedisCluster, RedisServer, RespValue};

use crate::{blocks, chapter, policies};

/// A key on a server that no other test uses.
struct Key {
    server: &'static RedisServer,
    name: &'static str,
}

impl Key {
    fn new(name: &'static str) -> Self {
        let key = Self { server: RedisServer::shared().expect("redis-server is installed"), name };
        key.run(&["DEL"], &[]);
        key
    }

    /// A command on the key: the words before it, and those after it.
    fn run(&self, before: &[&str], after: &[&str]) -> RespValue {
        let words = [before, &[self.name], after].concat();
        self.server.command(&words).and_then(RespValue::ok).expect("an answer")
    }

    /// The same of a command whose answer is a number.
    fn number(&self, before: &[&str], after: &[&str]) -> i64 {
        self.run(before, after).as_integer().expect("a number")
    }

    /// What a script answers.
    fn eval(&self, script: &str, arguments: &[&str]) -> i64 {
        self.number(&["EVAL", script, "1"], arguments)
    }

    /// Lets this much time pass, as far as the key's expiry tells.
    fn pass(&self, ms: i64) {
        let left = self.number(&["PTTL"], &[]);
        if left >= 0 && left <= ms {
            self.run(&["DEL"], &[]);
        } else if left > ms {
            self.run(&["PEXPIRE"], &[&(left - ms).to_string()]);
        }
    }
}

/// The policy of a chapter at given times.
struct Ours {
    limiter: RateLimiter<MemoryStore<Policy, ManualClock>>,
    clock: ManualClock,
}

impl Ours {
    fn of(chapter: &str) -> Self {
        Self::new(policies::of(chapter))
    }

    fn words(words: &str) -> Self {
        let limits = ratelimit_core::Limits::builder().limit("l", words).build();
        Self::new(limits.expect("a policy"))
    }

    fn new(limits: ratelimit_core::Limits<Policy>) -> Self {
        let clock = ManualClock::default();
        let store = MemoryStore::builder().clock(clock.clone()).build();
        Self { limiter: RateLimiter::new(limits, store), clock }
    }

    fn at(&self, ms: u64) -> &Self {
        self.clock.set(Timestamp::ZERO + Duration::from_millis(ms));
        self
    }

    /// How many of `n` requests are admitted at this time.
    fn admitted(&self, ms: u64, n: usize) -> usize {
        let limiter = &self.at(ms).limiter;
        (0..n).filter(|_| limiter.check_now("alice").expect("a decision").allowed()).count()
    }

    fn admits(&self, ms: u64) -> bool {
        self.admitted(ms, 1) == 1
    }
}

#[test]
fn incr_and_expire_in_multi_never_end_a_window() {
    let (key, ours) = (Key::new("multi:alice"), Ours::of("scripts/incr-expire.md"));
    for request in 0..14 {
        let time_s = 30 * request;
        let count = key.number(&["INCR"], &[]);
        key.run(&["EXPIRE"], &["60"]);
        assert_eq!(count <= 10, time_s < 300, "at {time_s} s the count is {count}");
        assert!(ours.admits(time_s * 1_000), "at {time_s} s");
        key.pass(30_000);
    }
}

#[test]
fn incr_without_its_expire_never_expires() {
    let key = Key::new("steps:alice");
    assert_eq!(key.number(&["INCR"], &[]), 1); // and the program stops
    assert_eq!(key.number(&["TTL"], &[]), -1);
    for count in 2..=11 {
        assert_eq!(key.number(&["INCR"], &[]), count);
    }
    key.run(&["DEL"], &[]);
}

#[test]
fn incr_and_expire_in_lua_admit_twice_the_limit_where_windows_meet() {
    let script = &blocks(&chapter("scripts/incr-expire.md"), "lua")[0];
    let key = Key::new("lua:alice");
    let ours = Ours::of("scripts/incr-expire.md");
    let (gcra, log) = (Ours::words("gcra 10/m burst 10"), Ours::words("sliding-log 10/m"));
    let mut before_ms = 0;
    for (time_ms, requests, by_script, by_gcra, by_log) in
        [(0, 1, 1, 1, 1), (59_900, 9, 9, 9, 9), (60_000, 10, 10, 1, 1)]
    {
        key.pass(1_000 * (time_ms - before_ms));
        before_ms = time_ms;
        let admitted = (0..requests).filter(|_| key.eval(script, &["10", "60000"]) == 1).count();
        let time_ms = time_ms.unsigned_abs();
        assert_eq!(admitted, by_script, "at {time_ms} ms");
        assert_eq!(ours.admitted(time_ms, requests), by_script, "at {time_ms} ms");
        assert_eq!(gcra.admitted(time_ms, requests), by_gcra, "at {time_ms} ms");
        assert_eq!(log.admitted(time_ms, requests), by_log, "at {time_ms} ms");
    }
}

#[test]
fn a_list_admits_one_too_many() {
    let (key, ours) = (Key::new("list:alice"), Ours::of("scripts/list.md"));
    let admitted: Vec<bool> = (0..12)
        .map(|_| {
            let fits = key.number(&["LLEN"], &[]) <= 10;
            let is_new = key.number(&["EXISTS"], &[]) == 0;
            if fits && is_new {
                key.run(&["RPUSH"], &["192.0.2.7"]);
                key.run(&["EXPIRE"], &["60"]);
            } else if fits {
                key.run(&["RPUSHX"], &["192.0.2.7"]);
            }
            fits
        })
        .collect();
    assert_eq!(admitted.iter().filter(|fits| **fits).count(), 11);
    assert_eq!((admitted[10], admitted[11]), (true, false));
    assert_eq!(ours.admitted(0, 12), 10);
}

#[test]
fn a_list_that_is_read_then_written_admits_what_two_clients_read() {
    let key = Key::new("race:alice");
    for _ in 0..9 {
        key.run(&["RPUSH"], &["192.0.2.7"]);
    }
    let mut clients = [(); 2].map(|()| key.server.client().expect("a connection"));
    let read = clients.each_mut().map(|client| client.command(&["LLEN", key.name]));
    assert_eq!(read.map(|length| length.unwrap().as_integer()), [Some(9), Some(9)]);
    for client in &mut clients {
        client.command(&["RPUSHX", key.name, "192.0.2.7"]).unwrap();
    }
    assert_eq!(key.number(&["LLEN"], &[]), 11);
}

#[test]
fn a_list_loses_a_request_at_the_end_of_its_window() {
    let key = Key::new("end:alice");
    key.run(&["RPUSH"], &["192.0.2.7"]);
    key.run(&["PEXPIRE"], &["60000"]);
    assert_eq!(key.number(&["EXISTS"], &[]), 1);
    key.pass(60_000);
    assert_eq!(key.number(&["RPUSHX"], &["192.0.2.7"]), 0);
}

/// The transaction of the chapter at the client's time: whether it admits.
fn by_sorted_set(key: &Key, now_ms: i64) -> (i64, bool) {
    let now = now_ms.to_string();
    key.run(&["ZREMRANGEBYSCORE"], &["0", &(now_ms - 60_000).to_string()]);
    key.run(&["ZADD"], &[&now, &now]);
    let count = key.number(&["ZCARD"], &[]);
    key.run(&["PEXPIRE"], &["60000"]);
    (count, count <= 10)
}

#[test]
fn a_sorted_set_counts_denied_requests() {
    let (key, ours) = (Key::new("denied:alice"), Ours::of("scripts/sorted-set.md"));
    let mut admitted_by_ours = Vec::new();
    for time_s in (0..300).step_by(5) {
        let (count, admitted) = by_sorted_set(&key, time_s * 1_000);
        assert_eq!((count, admitted), ((time_s / 5 + 1).min(12), time_s <= 45), "at {time_s} s");
        if ours.admits(time_s.unsigned_abs() * 1_000) {
            admitted_by_ours.push(time_s);
        }
    }
    for minute in 0..5 {
        let in_minute = admitted_by_ours.iter().filter(|time_s| *time_s / 60 == minute);
        assert_eq!(in_minute.count(), 10);
    }
    assert!(admitted_by_ours.contains(&60));
}

#[test]
fn a_sorted_set_counts_the_requests_of_a_millisecond_once() {
    let (key, ours) = (Key::new("same:alice"), Ours::of("scripts/sorted-set.md"));
    let decided: Vec<_> = (0..25).map(|_| by_sorted_set(&key, 1_000)).collect();
    assert_eq!(decided, [(1, true); 25]);
    assert_eq!(ours.admitted(1_000, 25), 10);
}

#[test]
fn a_sorted_set_believes_each_clients_clock() {
    let (key, ours) = (Key::new("clock:alice"), Ours::of("scripts/sorted-set.md"));
    for second in 0..10 {
        assert_eq!(by_sorted_set(&key, second * 1_000), (second + 1, true));
        assert!(ours.admits(second.unsigned_abs() * 1_000));
    }
    for nth in 0..10 {
        assert_eq!(by_sorted_set(&key, 70_000 + nth), (nth + 1, true));
        assert!(!ours.admits(10_000 + nth.unsigned_abs()));
    }
}

#[test]
fn per_second_keys_admit_what_two_clients_read_and_overshoot_by_a_cost() {
    let key = Key::new("api:alice:1000");
    key.run(&["SET"], &["999"]);
    let mut clients = [(); 2].map(|()| key.server.client().expect("a connection"));
    let read = clients.each_mut().map(|client| client.command(&["MGET", key.name]));
    assert!(
        read.iter().all(|counts| counts.as_ref().unwrap().as_array()[0].as_text() == Some("999"))
    );
    let counts = clients.each_mut().map(|client| client.command(&["INCR", key.name]));
    assert_eq!(counts.map(|count| count.unwrap().as_integer()), [Some(1_000), Some(1_001)]);

    key.run(&["SET"], &["999"]);
    assert_eq!(key.number(&["INCRBY"], &["500"]), 1_499);
    let ours = Ours::of("scripts/per-second-keys.md");
    let cost = |ms, cost| ours.at(ms).limiter.check_n_now("alice", cost).unwrap().allowed();
    assert!(cost(1_000_000, 999));
    assert!(!cost(1_000_100, 500));
}

#[test]
fn per_second_keys_lie_in_several_slots() {
    let cluster = RedisCluster::shared().expect("a cluster");
    let refused = cluster.nodes()[0].command(&["MGET", "api:alice:1000", "api:alice:999"]);
    let refused = refused.expect("an answer");
    assert!(refused.as_error().is_some_and(|error| error.starts_with("CROSSSLOT")), "{refused:?}");
    let (one, other) = ("api:{alice}:1000", "api:{alice}:999");
    assert_eq!(cluster.slot_of(one), cluster.slot_of(other));
}

#[test]
fn several_limits_in_one_script_charge_denied_requests() {
    let script = &blocks(&chapter("scripts/several-limits.md"), "lua")[0];
    let (daily, burst) = (Key::new("daily:alice"), Key::new("burst:alice"));
    let ours = Ours::of("scripts/several-limits.md");
    let words = ["EVAL", script, "2", daily.name, burst.name, "100", "86400000", "2", "1000"];
    let mut counted_by_ours = 0;
    for second in 0..50 {
        let decided = (0..10).map(|_| daily.server.command(&words).unwrap().as_integer());
        let admitted = decided.filter(|denied_by| *denied_by == Some(0)).count();
        assert_eq!(admitted, if second < 10 { 2 } else { 0 }, "at {second} s");
        let counted = daily.run(&["GET"], &[]).as_text().unwrap().parse::<u64>().unwrap();
        assert_eq!(counted, 10 * (second + 1));
        assert_eq!(ours.admitted(second * 1_000, 10), 2, "at {second} s");
        counted_by_ours += 2;
        let left = ours.limiter.peek_now("alice", 0).unwrap().decisions()[0].remaining;
        assert_eq!(left, 100 - counted_by_ours);
        daily.pass(1_000_000);
        burst.pass(1_000_000);
    }
    assert_eq!(ours.admitted(50_000, 10), 0); // the day's hundred
}

/// The chapter's script at a given time.
fn by_token_bucket(key: &Key, now_s: u64, arguments: [&str; 4]) -> bool {
    let script = &blocks(&chapter("scripts/token-bucket.md"), "lua")[0];
    let time = "tonumber(redis.call('TIME')[1])";
    assert!(script.contains(time));
    key.eval(&script.replace(time, &now_s.to_string()), &arguments) == 1
}

const QUARTER: [&str; 4] = ["0.25", "5", "1", ""];

#[test]
fn a_token_bucket_that_is_asked_each_second_never_refills() {
    let (key, ours) = (Key::new("asked:alice"), Ours::of("scripts/token-bucket.md"));
    for _ in 0..5 {
        assert!(by_token_bucket(&key, 0, QUARTER));
    }
    assert_eq!(ours.admitted(0, 5), 5);
    for second in 1..=120 {
        assert!(!by_token_bucket(&key, second, QUARTER), "at {second} s");
        assert_eq!(ours.admits(second * 1_000), second % 4 == 0, "at {second} s");
        key.pass(1_000);
    }
}

#[test]
fn a_token_bucket_of_whole_seconds_refills_within_ten_milliseconds() {
    let (key, ours) = (Key::new("whole:alice"), Ours::words("token-bucket 10/s burst 10"));
    for (time_ms, by_ours) in [(990, 10), (1_000, 0)] {
        let ask = |_: &i32| by_token_bucket(&key, time_ms / 1_000, ["10", "10", "1", ""]);
        assert_eq!((0..10).filter(ask).count(), 10, "at {time_ms} ms");
        assert_eq!(ours.admitted(time_ms, 10), by_ours, "at {time_ms} ms");
    }
}

#[test]
fn a_forced_charge_of_a_token_bucket_is_unbounded_or_forgotten() {
    let force = |key: &Key, ours: &Ours| {
        assert!(by_token_bucket(key, 0, ["0.25", "5", "100", "force"]));
        assert_eq!(key.run(&["HGET"], &["tokens"]).as_text(), Some("-95"));
        let forced = ours.at(0).limiter.force_now("alice", 100).unwrap();
        assert_eq!(forced.remaining(), 0);
    };
    let (key, ours) = (Key::new("forgotten:alice"), Ours::of("scripts/token-bucket.md"));
    force(&key, &ours);
    key.pass(20_000);
    assert!((0..5).all(|_| by_token_bucket(&key, 20, QUARTER)));
    assert_eq!(ours.admitted(20_000, 5), 5);

    let (key, ours) = (Key::new("forced:alice"), Ours::of("scripts/token-bucket.md"));
    force(&key, &ours);
    for second in (4..=384).step_by(4) {
        key.pass(4_000);
        assert_eq!(by_token_bucket(&key, second, QUARTER), second == 384, "at {second} s");
        assert!(ours.admits(second * 1_000));
    }
}

//! The scripts that people have, run on a server at the times of the guide's tables, beside the
//! policies that replace them, on a given clock.
//!
//! A server's clock cannot be set. Where a table lets time pass between two commands, the tests
//! shorten the key's time to live by as much; where a script reads `TIME`, they put the time of the
//! table in its place. Where real time could end a short window, a second of the table is a
//! thousand seconds on the server.

use std::time::Duration;

use ratelimit_core::{AnyAlgorithm, Limits, ManualClock, RateLimiter, Timestamp};
use ratelimit_memory::MemoryStore;
use ratelimit_servers::{RedisServer, RespValue};

use crate::{blocks, chapter, policies};

/// A key on a server that no other test uses.
struct Key {
    server: &'static RedisServer,
    name: &'static str,
    /// How many times longer the server takes than the table.
    slower: i64,
}

impl Key {
    fn new(name: &'static str) -> Self {
        let server = RedisServer::shared().expect("redis-server is installed");
        let key = Self { server, name, slower: 1 };
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
pub(crate) struct Ours {
    pub(crate) limiter: RateLimiter<MemoryStore<AnyAlgorithm, ManualClock>>,
    clock: ManualClock,
}

impl Ours {
    pub(crate) fn from_chapter(chapter: &str) -> Self {
        Self::new(policies::limits_of_chapter(chapter))
    }

    pub(crate) fn words(words: &str) -> Self {
        Self::new(Limits::builder().limit("l", words).build().expect("a policy"))
    }

    pub(crate) fn new(limits: Limits<AnyAlgorithm>) -> Self {
        let clock = ManualClock::default();
        let store = MemoryStore::builder().clock(clock.clone()).build();
        Self { limiter: RateLimiter::new(limits, store), clock }
    }

    pub(crate) fn at(&self, ms: u64) -> &Self {
        self.clock.set(Timestamp::ZERO + Duration::from_millis(ms));
        self
    }

    /// How many of `n` requests are admitted at this time.
    pub(crate) fn count_admitted(&self, ms: u64, n: usize) -> usize {
        let limiter = &self.at(ms).limiter;
        (0..n).filter(|_| limiter.check_now("alice").expect("a decision").allowed()).count()
    }
}

/// A table of a chapter: at each time, in milliseconds, so many requests, of which the script
/// admits so many, and ours so many.
fn compare(
    key: &Key,
    mut script: impl FnMut(i64) -> bool,
    ours: &Ours,
    rows: impl IntoIterator<Item = (i64, usize, usize, usize)>,
) {
    let mut before_ms = 0;
    for (time_ms, requests, by_script, by_ours) in rows {
        key.pass(key.slower * (time_ms - before_ms));
        before_ms = time_ms;
        let admitted = (0..requests).filter(|_| script(time_ms)).count();
        let by_both = (admitted, ours.count_admitted(time_ms.unsigned_abs(), requests));
        assert_eq!(by_both, (by_script, by_ours), "at {time_ms} ms");
    }
}

#[test]
fn incr_and_expire_in_multi_never_end_a_window() {
    let (key, ours) = (Key::new("multi:alice"), Ours::from_chapter("scripts/incr-expire.md"));
    let script = |_| {
        let count = key.number(&["INCR"], &[]);
        key.run(&["EXPIRE"], &["60"]);
        count <= 10
    };
    compare(&key, script, &ours, (0..14).map(|n| (30_000 * n, 1, usize::from(n < 10), 1)));
}

#[test]
fn incr_and_expire_in_lua_admit_twice_the_limit_where_windows_meet() {
    let script = &blocks(&chapter("scripts/incr-expire.md"), "lua")[0];
    for (ours, at_the_end) in [
        (Ours::from_chapter("scripts/incr-expire.md"), 10),
        (Ours::words("gcra 10/m burst 10"), 1),
        (Ours::words("sliding-log 10/m"), 1),
    ] {
        let key = Key { slower: 1_000, ..Key::new("lua:alice") };
        let rows = [(0, 1, 1, 1), (59_900, 9, 9, 9), (60_000, 10, 10, at_the_end)];
        compare(&key, |_| key.eval(script, &["10", "60000"]) == 1, &ours, rows);
    }
}

#[test]
fn a_list_admits_one_too_many_and_loses_a_request_at_the_end_of_its_window() {
    let (key, ours) = (Key::new("list:alice"), Ours::from_chapter("scripts/list.md"));
    let script = |_| {
        let fits = key.number(&["LLEN"], &[]) <= 10;
        let is_new = key.number(&["EXISTS"], &[]) == 0;
        if fits && is_new {
            key.run(&["RPUSH"], &["192.0.2.7"]);
            key.run(&["EXPIRE"], &["60"]);
        } else if fits {
            key.run(&["RPUSHX"], &["192.0.2.7"]);
        }
        fits
    };
    compare(&key, script, &ours, [(0, 12, 11, 10)]);
    assert_eq!(key.number(&["EXISTS"], &[]), 1);
    key.pass(60_000);
    assert_eq!(key.number(&["RPUSHX"], &["192.0.2.7"]), 0);
}

/// The transaction of the chapter at the client's time: whether it admits.
fn by_sorted_set(key: &Key, now_ms: i64) -> bool {
    let now = now_ms.to_string();
    key.run(&["ZREMRANGEBYSCORE"], &["0", &(now_ms - 60_000).to_string()]);
    key.run(&["ZADD"], &[&now, &now]);
    let count = key.number(&["ZCARD"], &[]);
    key.run(&["PEXPIRE"], &["60000"]);
    count <= 10
}

#[test]
fn a_sorted_set_counts_denied_requests_and_those_of_a_millisecond_once() {
    let (key, ours) = (Key::new("denied:alice"), Ours::from_chapter("scripts/sorted-set.md"));
    let rows = (0..60).map(|n| (5_000 * n, 1, usize::from(n < 10), usize::from(n % 12 < 10)));
    compare(&key, |now_ms| by_sorted_set(&key, now_ms), &ours, rows);
    let (key, ours) = (Key::new("same:alice"), Ours::from_chapter("scripts/sorted-set.md"));
    compare(&key, |now_ms| by_sorted_set(&key, now_ms), &ours, [(1_000, 25, 25, 10)]);
}

#[test]
fn a_sorted_set_believes_each_clients_clock() {
    let (key, ours) = (Key::new("clock:alice"), Ours::from_chapter("scripts/sorted-set.md"));
    let one_that_is_fast = |now_ms| if now_ms < 10_000 { now_ms } else { now_ms + 60_000 };
    let rows = (0..10).map(|second| (second * 1_000, 1, 1, 1));
    let rows = rows.chain((0..10).map(|nth| (10_000 + nth, 1, 1, 0)));
    compare(&key, |now_ms| by_sorted_set(&key, one_that_is_fast(now_ms)), &ours, rows);
}

#[test]
fn several_limits_in_one_script_charge_denied_requests() {
    let script = &blocks(&chapter("scripts/several-limits.md"), "lua")[0];
    let (daily, burst) = (Key::new("daily:alice"), Key::new("burst:alice"));
    let ours = Ours::from_chapter("scripts/several-limits.md");
    let words = ["EVAL", script, "2", daily.name, burst.name, "100", "86400000", "2", "1000"];
    for second in 0..50 {
        let decided = (0..10).map(|_| daily.server.command(&words).unwrap().as_integer());
        let admitted = decided.filter(|denied_by| *denied_by == Some(0)).count();
        assert_eq!(admitted, if second < 10 { 2 } else { 0 }, "at {second} s");
        assert_eq!(ours.count_admitted(second * 1_000, 10), 2, "at {second} s");
        daily.pass(1_000_000);
        burst.pass(1_000_000);
    }
    assert_eq!(ours.count_admitted(50_000, 10), 0); // the day's hundred
}

/// The chapter's script at a given time.
fn by_token_bucket(key: &Key, now_ms: i64, arguments: [&str; 4]) -> bool {
    let script = &blocks(&chapter("scripts/token-bucket.md"), "lua")[0];
    let time = "tonumber(redis.call('TIME')[1])";
    assert!(script.contains(time));
    key.eval(&script.replace(time, &(now_ms / 1_000).to_string()), &arguments) == 1
}

const QUARTER: [&str; 4] = ["0.25", "5", "1", ""];

#[test]
fn a_token_bucket_that_is_asked_each_second_never_refills() {
    let (key, ours) = (Key::new("asked:alice"), Ours::from_chapter("scripts/token-bucket.md"));
    let rows = (1..=120).map(|second| (1_000 * second, 1, 0, usize::from(second % 4 == 0)));
    let rows = [(0, 5, 5, 5)].into_iter().chain(rows);
    compare(&key, |now_ms| by_token_bucket(&key, now_ms, QUARTER), &ours, rows);
}

#[test]
fn a_token_bucket_of_whole_seconds_refills_within_ten_milliseconds() {
    let (key, ours) = (Key::new("whole:alice"), Ours::words("token-bucket 10/s burst 10"));
    let script = |now_ms| by_token_bucket(&key, now_ms, ["10", "10", "1", ""]);
    compare(&key, script, &ours, [(990, 10, 10, 10), (1_000, 10, 10, 0)]);
}

#[test]
fn a_forced_charge_of_a_token_bucket_is_unbounded_or_forgotten() {
    let unbounded =
        (4..=384).step_by(4).map(|second| (1_000 * second, 1, usize::from(second == 384), 1));
    for rows in [vec![(20_000, 5, 5, 5)], unbounded.collect()] {
        let (key, ours) = (Key::new("forced:alice"), Ours::from_chapter("scripts/token-bucket.md"));
        assert!(by_token_bucket(&key, 0, ["0.25", "5", "100", "force"]));
        assert_eq!(key.run(&["HGET"], &["tokens"]).as_text(), Some("-95"));
        assert_eq!(
            ours.at(0).limiter.request("alice").cost(100).force_now().unwrap().remaining(),
            0
        );
        compare(&key, |now_ms| by_token_bucket(&key, now_ms, QUARTER), &ours, rows);
    }
}

//! What a decision sends to the server and leaves there. Almost all requests take one script with
//! few arguments, not the driver: observed on the wire.

use std::collections::HashSet;

use ratelimit_core::RateLimiter;
use ratelimit_core::store::{LogStore, Reservation};
use ratelimit_memory::MemoryStore;
use ratelimit_redis::LuaProgram;

use crate::common::prelude::*;

/// A store, and each command that it has sent.
struct Wire {
    server: RedisServer,
    store: RedisStore<ratelimit_redis::Lua, MeddlingConnection>,
    sent: Arc<Mutex<Vec<Words>>>,
}

impl Wire {
    async fn new() -> Self {
        let (server, sent) = (server(), Arc::<Mutex<Vec<Words>>>::default());
        let log = Arc::clone(&sent);
        let connection = meddling_connection(&server).await.decided(move |words| {
            log.lock().expect("no panic").push(words.clone());
            Fate::Sent
        });
        Self { server, store: over(RedisStore::builder(), connection), sent }
    }

    /// The verdict, and what was sent for it.
    async fn apply<A: LuaProgram>(
        &self,
        checks: &[(&Limit<A>, &str, u64)],
        op: Op,
    ) -> (Verdict, Vec<Words>) {
        let verdict = apply(&self.store, checks, op, None).await.expect("decides");
        (verdict, std::mem::take(&mut *self.sent.lock().expect("no panic")))
    }
}

/// Three per hour, by algorithms that one script decides.
fn flat() -> Vec<Limit<AnyAlgorithm>> {
    let texts = [
        "gcra 3/h",
        "fixed-window 3/h",
        "first-request-window 3/h",
        "sliding-counter 3/h",
        "sliding-log 3/h",
        "concurrency 3/h",
        "gcra 3/h count attempts",
        "lockout 3/h block 1h",
    ];
    (0..).zip(texts).map(|(n, text)| limit(&format!("l{n}"), text)).collect()
}

/// The driver gets every operation by its name.
fn by_driver(sent: &[Words]) -> bool {
    sent.last().expect("sent").has_any(&["acquire", "peek"])
}

#[tokio::test]
async fn one_check_is_one_script_with_few_arguments() {
    let wire = Wire::new().await;
    for limit in flat() {
        // The server learns two scripts, each with the first limit that needs it.
        let learns = ["l0", "l4"].contains(&limit.name());
        let (verdict, sent) = wire.apply(&[(&limit, "alice", 1)], Op::Acquire).await;
        let commands = 1 + usize::from(learns);
        assert_eq!((verdict.remaining(), sent.len()), (2, commands), "{limit:?}: {sent:?}");
        for left in [1, 0, 0] {
            let (verdict, sent) = wire.apply(&[(&limit, "alice", 1)], Op::Acquire).await;
            assert_eq!((verdict.remaining(), sent.len()), (left, 1), "{limit:?}");
            let is_long = ["sliding-log", "concurrency"].contains(&limit.algorithm().name());
            let most = match limit.algorithm().name() {
                _ if is_long => 19,
                "lockout" => 14,
                _ => 12,
            };
            assert!(sent[0].0.len() <= most && by_driver(&sent) == is_long, "{limit:?}: {sent:?}");
        }
    }
}

/// A server keeps every text that it has seen. Clients may choose which checks cost nothing or
/// share a caller, and each process meets requests in an order of its own.
#[tokio::test]
async fn all_requests_of_all_processes_take_three_texts() {
    let mut texts = HashSet::new();
    for process in 0..2 {
        let (wire, mut limits) = (Wire::new().await, flat());
        limits.rotate_left(process);
        for kind in 0..1_u64 << limits.len() {
            let kind = if process == 0 { kind } else { !kind };
            let key = |n: u64| ["alice", "bob"][usize::from(kind >> n & 3 == 1)];
            let checks: Vec<_> =
                (0..).zip(&limits).map(|(n, limit)| (limit, key(n), kind >> n & 1)).collect();
            let count = if kind & 2 == 0 { 4 } else { checks.len() };
            for (op, time) in
                [(Op::Acquire, Now::Store), (Op::Acquire, at(now_us())), (Op::Peek, Now::Store)]
            {
                let decided = apply_at(&wire.store, &checks[..count], op, None, time).await;
                let _ = decided.expect("decides");
            }
        }
        let sent = std::mem::take(&mut *wire.sent.lock().expect("no panic"));
        texts.extend(sent.iter().filter(|words| words.0[0] == "EVALSHA").map(|w| w.0[1].clone()));
    }
    assert_eq!(texts.len(), 3, "{texts:?}");
}

/// A peek, a check that costs nothing, and a cost that never fits leave nothing behind.
#[tokio::test]
async fn a_read_only_request_runs_a_read_only_script() {
    let wire = Wire::new().await;
    for limit in &flat()[..4] {
        for (op, cost, allowed) in [
            (Op::Peek, 1, true),
            (Op::Acquire, 0, true),
            (Op::Acquire, 4, false),
            (Op::Peek, 4, false),
        ] {
            let (verdict, sent) = wire.apply(&[(limit, "alice", cost)], op).await;
            assert_eq!(verdict.allowed(), allowed, "{limit:?} {op} {cost}");
            assert_eq!(sent.last().expect("sent").0.len(), 5, "{sent:?}");
        }
    }
    assert_eq!(keys(&wire.server), [""; 0]);
}

#[tokio::test]
async fn limits_of_one_name_have_a_field_each_and_need_no_driver() {
    let wire = Wire::new().await;
    let algorithms = ["gcra 3/h", "fixed-window 3/h", "fixed-window 3/d"];
    let limits = algorithms.map(|algorithm| limit("login", algorithm));
    for limit in &limits {
        let (verdict, sent) = wire.apply(&[(limit, "alice", 1)], Op::Acquire).await;
        assert_eq!((verdict.remaining(), by_driver(&sent)), (2, false), "{sent:?}");
    }
    assert_eq!(keys(&wire.server), ["rl:1::{alice}"]);
    for limit in &limits {
        let there = tell(&wire.server, &["HEXISTS", "rl:1::{alice}", limit.state_name()]);
        assert_eq!(there, RespValue::Integer(1), "{}", limit.state_name());
    }
    // As a change from attempts to admissions does.
    let attempts = limit("login", "fixed-window 3/d count attempts");
    let (verdict, _) = wire.apply(&[(&attempts, "alice", 1)], Op::Acquire).await;
    assert_eq!(verdict.remaining(), 1);
}

/// What limits left that no one uses any more, such as windows of another length.
#[tokio::test]
async fn fields_that_have_ended_go_when_the_key_lives_longer() {
    const BUCKETS: &str = "bucketed-window bucket 365d rates 3/3650d";
    let server = server();
    let store = plain(&server).await;
    let mut client = server.client().expect("it is up");
    let kept = |text: &str, kept_ms: u64| [text.as_bytes(), &kept_ms.to_le_bytes()[..7]].concat();
    let (past, future) = (now_us() / 1_000 - 1, now_us() / 1_000 + 60_000);
    let numbers = "gcra 123456712345671234567";
    let fields = [
        ("ended/gcra", kept(numbers, past)),
        ("ended/concurrency/1s", kept("concurrency 5 1", past)),
        ("live/gcra", kept(numbers, future)),
        ("written/at/a/given/time", kept(numbers, 0)),
        ("foreign", b"anything else".to_vec()),
        ("short", b"6 byte".to_vec()),
    ];
    for algorithm in ["gcra 3/3650d", "sliding-counter 3/3650d", BUCKETS] {
        for (given, goes) in [(false, true), (true, false)] {
            let limit = limit("used", algorithm);
            let key = store.key(&limit, algorithm);
            for (field, value) in &fields {
                let words = [b"HSET", key.as_bytes(), field.as_bytes(), value];
                client.command(&words).expect("it answers").ok().expect("done");
            }
            tell(&server, &["PEXPIRE", &key, "60000"]);
            let now = if given { Now::At(Timestamp::saturating_from_us(1)) } else { Now::Store };
            let verdict = apply_at(&store, &[(&limit, algorithm, 1)], Op::Acquire, None, now).await;
            assert_eq!(verdict.expect("decides").remaining(), 2);
            let left = number(&server, &["HLEN", &key]);
            assert_eq!(left, if goes { 5 } else { 7 }, "{algorithm}");
            for (field, _) in &fields {
                let there = number(&server, &["HEXISTS", &key, field]) == 1;
                assert_eq!(there, !goes || !field.starts_with("ended"), "{algorithm}: {field}");
            }
            tell(&server, &["DEL", &key]);
        }
    }
}

/// Looking for fields that have ended would cost a tenth of a short script.
#[tokio::test]
async fn a_busy_caller_is_seldom_looked_through() {
    let (server, limit) = (server(), limit("api", "gcra 1000/s burst 1000"));
    let store = plain(&server).await;
    for caller in 0..9 {
        for _ in 0..9 {
            let _ = apply_admitted(&store, &[(&limit, &format!("{caller}"), 9)], Op::Acquire, None)
                .await;
        }
    }
    // At most once in 70 minutes for each.
    assert!(server.calls("hlen").expect("it is up") <= 9);
    assert_eq!(server.calls("hgetall").expect("it is up"), 0);
}

/// Of one caller, and of as many callers.
#[tokio::test]
async fn a_request_of_many_limits_needs_no_driver() {
    let wire = Wire::new().await;
    let plain: Vec<_> = flat()[..4].iter().map(|limit| *limit.algorithm()).collect();
    // Whether each counts attempts.
    let attempts = plain.iter().map(|algorithm| (*algorithm, true)).collect();
    let mixed = vec![(plain[0], false), (plain[0], true), (plain[3], false), (plain[1], false)];
    for (name, algorithms) in [("attempts", attempts), ("mixed", mixed)] {
        for count in [6, 40] {
            for callers in [1, count] {
                let limit = |n| {
                    let (algorithm, attempts) = algorithms[n % algorithms.len()];
                    let limit = named(&format!("{name}{callers}-{n}"), algorithm);
                    if attempts { limit.count_attempts().expect("it can") } else { limit }
                };
                let limits: Vec<_> = (0..count).map(limit).collect();
                let keys: Vec<_> =
                    (0..count).map(|n| format!("{count}of{}", n % callers)).collect();
                let checks: Vec<_> =
                    limits.iter().zip(&keys).map(|(limit, key)| (limit, &**key, 1)).collect();
                for (left, allowed) in [(2, true), (1, true), (0, true), (0, false)] {
                    let _ = wire.apply(&checks, Op::Peek).await;
                    let (verdict, sent) = wire.apply(&checks, Op::Acquire).await;
                    let decided = (verdict.remaining(), verdict.allowed(), !by_driver(&sent));
                    assert_eq!(decided, (left, allowed, true), "{name} {count} {callers}");
                }
            }
        }
    }
}

#[tokio::test]
async fn a_batch_of_every_algorithm_is_one_call_and_one_key_per_form_of_state() {
    let server = server();
    let limiter = RateLimiter::new(Limits::new(every(3)).expect("limits"), plain(&server).await);
    let _ = limiter.check("1.2.3.4").await.expect("loads the script");
    let before = server.calls("evalsha").expect("it is up");
    let _ = limiter.check("1.2.3.4").await.expect("decides");
    assert_eq!(server.calls("evalsha").expect("it is up") - before, 1);
    let own = [
        "concurrency/concurrency/3650d",
        "sliding-log/sliding-log/3650d",
        "window-log/window-log/3650d+",
    ];
    let [leases, log, list] = own.map(|own| format!("rl:1:{own}:{{1.2.3.4}}"));
    assert_eq!(keys(&server), ["rl:1::{1.2.3.4}", &leases, &log, &list]);
    let _ = limiter.request("1.2.3.4").reset().await.expect("forgets");
    assert_eq!(keys(&server), [""; 0]);
}

#[tokio::test]
async fn a_short_limit_does_not_shorten_the_life_of_its_neighbour() {
    let server = server();
    let store = plain(&server).await;
    let hourly = limit("hourly", "first-request-window 3/h");
    for limit in [&hourly, &limit("quick", "gcra 100/s burst 1")] {
        let _ = acquire(&store, limit, "a").await.expect("decides");
    }
    let ttl_ms = number(&server, &["PTTL", "rl:1::{a}"]);
    // The second more spares a busy key a new time to live at each charge, and both times are
    // rounded to milliseconds.
    assert!((3_591_000..=3_601_001).contains(&ttl_ms), "{ttl_ms}");
}

/// A log of 5,000 entries is read a few at a time, and those that have expired are removed, not
/// carried along.
#[tokio::test]
async fn a_long_log_is_read_a_few_entries_at_a_time() {
    let server = server();
    let store = plain(&server).await;
    for (name, reads, length) in
        [("sliding-log", "zrange", "ZCARD"), ("window-log", "lindex", "LLEN")]
    {
        let log = limit("log", &format!("{name} 5000/h"));
        let apply = async |op, cost, us| {
            apply_at(&store, &[(&log, "a", cost)], op, None, at(us)).await.expect("decides")
        };
        for us in 0..1_000 {
            let _ = apply(Op::Acquire, 5, us).await;
        }
        let calls = || server.calls(reads).expect("it is up");
        let before = calls();
        assert!(!apply(Op::Acquire, 1, 1_000).await.allowed());
        assert!((1..=16).contains(&(calls() - before)), "{name}: {} reads", calls() - before);
        if name == "window-log" {
            let before = calls();
            assert_eq!(apply(Op::Refund, 1_000, 1_000).await.remaining(), 1_000);
            assert!(calls() - before <= 16, "{} reads", calls() - before);
        }
        // An hour later.
        assert_eq!(apply(Op::Acquire, 1, 3_600_001_000).await.remaining(), 4_999);
        assert_eq!(number(&server, &[length, &store.key(&log, "a")]), 1);
    }
}

/// Of a thousand leases, a request reads a few, whichever it ends or renews.
#[tokio::test]
async fn of_many_leases_a_request_reads_a_few() {
    const COUNT: u64 = 1_000;
    let (server, pure) = (server(), MemoryStore::new());
    let (store, leases) = (plain(&server).await, limit("leases", "concurrency 1000/h"));
    let apply = async |op, id: u64, us| {
        let check = Check { limit: &leases, key: "a", cost: 1 };
        let batch = Batch::one(&check).op(op).now(at(us)).id(ReservationId::new(id.into()));
        let decided = store.apply(&batch).await.expect("decides");
        let due = pure.apply(&batch).await.expect("decides");
        assert_eq!(decided.summary(), due.summary(), "{op} {id}");
    };
    for id in 0..COUNT {
        apply(Op::Acquire, id, id).await;
    }
    // How many bytes the server has sent, and how many more with this answer.
    let sent = || {
        let info = tell(&server, &["INFO", "stats"]);
        let info = info.as_text().expect("a text");
        let sent = info.lines().find_map(|line| line.strip_prefix("total_net_output_bytes:"));
        (sent.expect("a count").parse::<usize>().expect("a number"), info.len())
    };
    for (op, id) in [
        (Op::Acquire, 5_000),
        (Op::Peek, 5_001),
        (Op::Settle, 500),
        (Op::Renew, 700),
        (Op::Settle, 0),
        (Op::Settle, COUNT - 1),
        (Op::Renew, 1),
        (Op::Acquire, 6_000),
    ] {
        let (before, info) = sent();
        apply(op, id, COUNT).await;
        let told = sent().0 - before - info;
        assert!((1..500).contains(&told), "{op} {id}: {told} bytes");
    }
}

#[tokio::test]
async fn settled_reservations_under_drawn_ids_leave_keys_that_expire_soon() {
    let server = server();
    let store = plain(&server).await;
    let limits = [limit("gcra", "gcra 9/3650d"), limit("leases", "concurrency 3/h")];
    for (_, store) in &in_every_mode(&store)[..2] {
        for id in (0..20).map(ReservationId::new) {
            let checks = limits.each_ref().map(|limit| Check { limit, key: "a", cost: 1 });
            let batch = Batch::new(&checks).expect("distinct").id(id).settled_once();
            assert!(store.apply(&batch).await.expect("decides").allowed());
            let back = checks.map(|check| Check { cost: 0, ..check });
            let _ = store.apply(&batch.with_checks(&back).op(Op::Settle)).await.expect("settles");
        }
    }
    let reserved: Vec<_> = keys(&server).into_iter().filter(|key| key.contains('#')).collect();
    // Two limits, in two modes.
    assert_eq!(reserved.len(), 20 * 2 * 2, "{reserved:?}");
    for key in reserved {
        let ttl_ms = number(&server, &["PTTL", &key]);
        let mut longest = Duration::from_micros(Reservation::REPEAT_US);
        if key.contains("!#") {
            // A request that saw no record may be in flight.
            longest += PATIENCE;
        }
        let longest_ms = i64::try_from(longest.as_millis()).expect("half a minute");
        assert!((0..=longest_ms).contains(&ttl_ms) || ttl_ms == -2, "{key}: {ttl_ms} ms");
    }
}

#[tokio::test]
async fn the_entries_of_a_log_have_their_metadata_until_its_window_is_over() {
    let server = server();
    let lua = plain(&server).await;
    let (cas, multi) = (lua.in_mode::<Cas>(), lua.in_mode::<Multi>());
    let every: Vec<u8> = (0..=255).collect();
    for algorithm in ["window-log 3/5ms", "window-log 3/5ms count attempts"] {
        // Two in one request, of which the first denies the fourth.
        let logs = [limit("log", algorithm), limit("wide", &algorithm.replace("3/", "9/"))];
        let (memory, is_native) = (MemoryStore::new(), logs[0].counts_attempts());
        for (us, metadata) in [(1, &every[..]), (1, b""), (2, b"mine"), (3, b"late")] {
            let checks = logs.each_ref().map(|limit| Check { limit, key: "a", cost: 1 });
            let batch = Batch::new(&checks).expect("distinct").now(at(us)).metadata(metadata);
            let due = memory.apply(&batch).await.expect("decides");
            for (_, store) in &in_every_mode(&lua)[..if is_native { 3 } else { 2 }] {
                assert_eq!(store.apply(&batch).await.expect("decides"), due);
            }
        }
        for (log, us) in logs.iter().flat_map(|log| [4, 5_000, 5_001, 10_000].map(|us| (log, us))) {
            let due = memory.logged(log, "a", at(us)).await.expect("reads");
            // An attempt is charged where it was not denied, too.
            let charged = 3 + usize::from(is_native && log.name() == "wide");
            assert_eq!(due.len(), if us < 5_001 { charged } else { 0 }, "{us}");
            let mut read =
                vec![lua.logged(log, "a", at(us)).await, cas.logged(log, "a", at(us)).await];
            if is_native {
                read.push(multi.logged(log, "a", at(us)).await);
            }
            assert!(read.into_iter().all(|entries| entries.expect("reads") == due), "{us}");
        }
        tell(&server, &["FLUSHALL"]);
    }
}

/// In every mode alike: there is nothing to ask a server.
#[tokio::test]
async fn a_batch_without_checks_needs_no_server() {
    let store = RedisStore::builder().connect_lazy("redis://127.0.0.1:1").expect("a URL");
    for (mode, store) in in_every_mode(&store) {
        assert!(apply(&store, &[], Op::Acquire, None).await.expect("no server").allowed());
        let settled = apply(&store, &[], Op::Settle, Some(1)).await.map(drop);
        let said = settled.err().map_or_else(String::new, |error| error.to_string());
        assert!(mode == "multi" || said.contains("no reservation"), "{mode}: {said}");
    }
}

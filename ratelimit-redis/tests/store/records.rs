//! Records of callers on real servers: seen by all processes at once, in one round trip, stored in
//! a form that later releases read, and refused by the mode that cannot compare them.

use futures_util::future::join_all;
use ratelimit_core::store::RecordStore;
use ratelimit_core::{Record, Refusal};
use ratelimit_redis::HealOptions;
use ratelimit_servers::RespClient;

use crate::common::prelude::*;

const ALICE: &str = "alice";

fn api() -> Limit<AnyAlgorithm> {
    limit("api", "gcra 1000000/s burst 1000000").overridable()
}

fn numbers(words: &str) -> Record<AnyAlgorithm> {
    Record::numbers(words.parse().expect(words)).forever()
}

/// A store that keeps records.
trait Keeps: RecordStore<AnyAlgorithm, Error = RedisError> {}

impl<S: RecordStore<AnyAlgorithm, Error = RedisError>> Keeps for S {}

async fn allows(store: &impl Keeps, limit: &Limit<AnyAlgorithm>) -> bool {
    let check = Check { limit, key: ALICE, cost: 1 };
    store.apply(&Batch::one(&check)).await.expect("decides").allowed()
}

async fn set(store: &impl Keeps, limit: &Limit<AnyAlgorithm>, next: Option<Record<AnyAlgorithm>>) {
    let before = store.record(limit, ALICE).await.expect("told");
    let set = store.exchange_record(limit, ALICE, before.as_ref(), next.as_ref()).await;
    assert!(set.expect("set"));
}

async fn connect(server: &RedisServer) -> RedisStore {
    RedisStore::builder().deadline(PATIENCE).connect(&server.url()).await.expect("it is up")
}

#[tokio::test(flavor = "multi_thread")]
async fn all_processes_see_a_change_with_their_next_decision() {
    let server = server();
    let (one, other) = (connect(&server).await, connect(&server).await);
    see_each_change(&one, &other).await;
    see_each_change(&one.in_mode::<Cas>(), &other.in_mode::<Cas>()).await;
    // The record of a caller is the same in both.
    see_each_change(&one, &other.in_mode::<Cas>()).await;
}

async fn see_each_change(one: &impl Keeps, other: &impl Keeps) {
    let api = &api();
    for round in 0..6 {
        set(one, api, Some(Record::blocked().forever())).await;
        // Many at once share calls.
        let many = if round % 2 == 0 { 1 } else { 100 };
        let all = join_all((0..many).map(|_| allows(other, api))).await;
        assert!(all.iter().all(|allowed| !allowed), "round {round}: {all:?}");
        set(one, api, [None, Some(Record::exempt().forever())][round % 3 % 2].clone()).await;
        let all = join_all((0..many).map(|_| allows(other, api))).await;
        assert!(all.iter().all(|allowed| *allowed), "round {round}: {all:?}");
    }
}

fn scripts_called(server: &RedisServer) -> u64 {
    let told = tell(server, &["INFO", "commandstats"]);
    let text = told.as_text().expect("text").to_owned();
    let calls = text.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
    calls.and_then(|calls| calls.split(',').next()?.parse().ok()).unwrap_or(0)
}

#[tokio::test]
async fn a_decision_takes_one_call_once_the_record_is_known() {
    let server = server();
    let (store, api) = (connect(&server).await, api());
    for record in [
        None,
        Some(numbers("gcra 5/s burst 1000")),
        Some(Record::exempt().forever()),
        Some(Record::blocked().until(Timestamp::saturating_from_us(now_us() + 3_600_000_000))),
    ] {
        set(&store, &api, record).await;
        let _ = allows(&store, &api).await;
        let before = scripts_called(&server);
        for _ in 0..10 {
            let _ = allows(&store, &api).await;
        }
        assert_eq!(scripts_called(&server) - before, 10);
    }
}

#[tokio::test]
async fn a_record_ends_by_the_servers_clock() {
    let server = server();
    let (store, api) = (connect(&server).await, api());
    let cas = store.in_mode::<Cas>();
    let end = Timestamp::saturating_from_us(now_us() + 300_000);
    set(&store, &api, Some(Record::blocked().until(end))).await;
    assert!(!allows(&store, &api).await && !allows(&cas, &api).await);
    tokio::time::sleep(Duration::from_millis(320)).await;
    assert!(allows(&store, &api).await && allows(&store, &api).await && allows(&cas, &api).await);
    assert_eq!(store.record(&api, ALICE).await.expect("told"), None);
}

#[tokio::test]
async fn records_live_as_long_as_the_longest_of_a_caller() {
    let server = server();
    let (store, api) = (connect(&server).await, api());
    let daily = limit("daily", "fixed-window 9/d").overridable();
    let ttl = || tell(&server, &["PTTL", "rl:1:#records:{alice}"]).as_integer().expect("a number");
    let within = |seconds: u64| Timestamp::saturating_from_us(now_us() + seconds * 1_000_000);
    set(&store, &api, Some(Record::exempt().until(within(100)))).await;
    assert!((99_000..=102_000).contains(&ttl()), "{}", ttl());
    set(&store, &daily, Some(Record::blocked().forever())).await;
    assert_eq!(ttl(), -1);
    set(&store, &api, Some(Record::exempt().until(within(200)))).await;
    assert_eq!(ttl(), -1);
    set(&store, &daily, Some(Record::blocked().until(within(50)))).await;
    assert!((199_000..=202_000).contains(&ttl()), "{}", ttl());
    set(&store, &api, None).await;
    assert!((49_000..=52_000).contains(&ttl()), "{}", ttl());
    set(&store, &daily, None).await;
    assert_eq!(ttl(), -2);
}

/// What release 0.1 has stored. A later release reads all of it, and adds what it writes.
const STORED: &[(&str, &str)] = &[
    ("1 - gcra 100/s burst 200", "gcra 100/s burst 200"),
    ("1 - gcra 2/s burst 9 debt 3", "gcra 2/s burst 9 debt 3"),
    ("1 - blocked", "blocked"),
    ("1 4102444800000000 blocked", "blocked until 4102444800000000"),
    ("1 4102444800000000 exempt", "exempt until 4102444800000000"),
    ("1 4102444800000000 gcra 1/s burst 1", "gcra 1/s until 4102444800000000"),
];

#[tokio::test]
async fn what_a_release_has_stored_is_read_and_written_alike() {
    let server = server();
    let (store, api) = (connect(&server).await, api());
    let key = "rl:1:#records:{alice}";
    for (text, due) in STORED {
        let (words, until) = due.split_once(" until ").unwrap_or((due, ""));
        let record = match words {
            "blocked" => Record::blocked(),
            "exempt" => Record::exempt(),
            words => Record::numbers(words.parse().expect(words)),
        };
        let record = match until.parse() {
            Ok(us) => record.until(Timestamp::saturating_from_us(us)),
            Err(_) => record.forever(),
        };
        tell(&server, &["HSET", key, "api/gcra", text]);
        assert_eq!(store.record(&api, ALICE).await.expect("told"), Some(record.clone()), "{text}");
        tell(&server, &["DEL", key]);
        set(&store, &api, Some(record)).await;
        assert_eq!(tell(&server, &["HGET", key, "api/gcra"]).as_text(), Some(*text));
    }
    // The same record in other words is replaced as well.
    tell(&server, &["HSET", key, "api/gcra", "1 - gcra 60/m"]);
    assert!(store.record(&api, ALICE).await.expect("told") == Some(numbers("gcra 1/s burst 60")));
    set(&store, &api, None).await;
    // A later version may mean a block: nothing is decided without it.
    for text in ["2 - blocked", "1 - locked", "1 x blocked", "blocked"] {
        tell(&server, &["HSET", key, "api/gcra", text]);
        let check = Check { limit: &api, key: ALICE, cost: 1 };
        let cas = store.in_mode::<Cas>();
        let refused =
            [store.apply(&Batch::one(&check)).await, cas.apply(&Batch::one(&check)).await];
        for refused in refused {
            let refused = refused.expect_err(text);
            assert_eq!(refused.kind(), ErrorKind::Corrupt, "{text}: {refused}");
            assert!(refused.to_string().contains("HDEL"), "{refused}");
        }
        tell(&server, &["DEL", key]);
        assert!(allows(&store, &api).await, "{text}: it is mended");
    }
    // A key of another type, for its caller alone.
    tell(&server, &["SET", key, "no hash"]);
    fails(acquire(&store, &api, ALICE).await, ErrorKind::Corrupt, "DEL");
    assert!(acquire(&store, &api, "bob").await.expect("decided").allowed());
}

/// Requests share a call with one whose caller has a record that this process does not know.
#[tokio::test]
async fn a_record_that_is_new_to_a_process_fails_no_request_of_a_shared_call() {
    let server = server();
    let (store, api) = (connect(&server).await, api());
    let addresses = limit("addresses", "gcra 9/h");
    set(&connect(&server).await, &api, Some(Record::exempt().forever())).await;
    let asks = (0..64).map(async |n: u32| match n {
        40 => acquire(&store, &api, ALICE).await,
        n => acquire(&store, &addresses, &n.to_string()).await,
    });
    for decided in join_all(asks).await {
        assert!(decided.expect("decided").allowed());
    }
}

/// A store that compares and sets. Between the first read and the first write of a decision, this
/// happens.
async fn meanwhile(
    server: &RedisServer,
    is_cluster: bool,
    happens: impl Fn() + Send + Sync + 'static,
) -> RedisStore<Cas, MeddlingConnection> {
    let writes = AtomicU64::new(0);
    let connection = meddling_connection(server).await.decided(move |words| {
        let is_write = ["EVAL", "EVALSHA", "SET"].contains(&words.name());
        if is_write && words.about(ALICE) && writes.fetch_add(1, Ordering::Relaxed) == 0 {
            happens();
        }
        Fate::Sent
    });
    let connection = if is_cluster { connection.clustered() } else { connection };
    over(RedisStore::builder().cas().deadline(PATIENCE), connection)
}

#[tokio::test]
async fn compare_and_set_decides_again_if_a_record_has_changed_between_its_read_and_its_write() {
    for (before, after, allowed, left, used) in [
        ("", "1 - blocked", false, 0, 0),
        ("", "1 - exempt", true, 9, 0),
        ("", "1 - gcra 9/h burst 2", true, 1, 1),
        ("1 - gcra 9/h burst 2", "", true, 8, 1),
        ("1 - gcra 9/h burst 9", "1 4102444800000000 gcra 9/h burst 5", true, 4, 1),
    ] {
        for others in [&[][..], &["bob"], &["bob", "carol"]] {
            let server = server();
            let hourly = limit("api", "gcra 9/h").overridable();
            let put = |port: u16, text: &'static str| {
                let mut client = RespClient::connect(port).expect("it is up");
                let words = match text {
                    "" => vec!["DEL", "rl:1:#records:{alice}"],
                    text => vec!["HSET", "rl:1:#records:{alice}", "api/gcra", text],
                };
                client.command(&words).expect("it answers").ok().expect("done");
            };
            let port = server.port();
            put(port, before);
            let store = meanwhile(&server, others.len() > 1, move || put(port, after)).await;
            let checks: Vec<_> =
                [ALICE].iter().chain(others).map(|key| (&hourly, *key, 1)).collect();
            let verdict = apply(&store, &checks, Op::Acquire, None).await.expect("decided");
            let decision = verdict.decisions()[0];
            let told = (verdict.allowed(), decision.remaining);
            assert_eq!(told, (allowed, left), "{before:?} to {after:?} beside {others:?}");
            put(port, "");
            assert_eq!(peek(&store, &hourly, ALICE).await, 9 - used, "{after:?}");
            for other in others {
                let due = if allowed { 8 } else { 9 };
                assert_eq!(peek(&store, &hourly, other).await, due, "{after:?} {other}");
            }
        }
    }
}

/// A record that stands as it was read, and has ended, is no longer the record.
#[tokio::test]
async fn compare_and_set_decides_again_if_a_record_has_ended_between_its_read_and_its_write() {
    let (server, clock) = RedisServer::start_with_clock().expect("a server and cc");
    let hourly = limit("api", "gcra 9/h").overridable();
    let store = meanwhile(&server, false, move || clock.set_ahead(20).expect("set")).await;
    let end = Timestamp::saturating_from_us(now_us() + 10_000_000);
    let record = format!("1 {} gcra 9/h burst 2", end.as_us());
    tell(&server, &["HSET", "rl:1:#records:{alice}", "api/gcra", &record]);
    let verdict = acquire(&store, &hourly, ALICE).await.expect("decided");
    assert_eq!((verdict.limit(), verdict.remaining()), (9, 8));
}

/// The record lies with the states, so one transaction reads all.
#[tokio::test]
async fn compare_and_set_reads_a_record_with_the_state() {
    let (server, api) = (server(), api());
    let commands = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&commands);
    let connection = meddling_connection(&server).await.decided(move |_| {
        counted.fetch_add(1, Ordering::Relaxed);
        Fate::Sent
    });
    let store = over(RedisStore::builder().cas().deadline(PATIENCE), connection);
    let calls = async || {
        let before = commands.load(Ordering::Relaxed);
        let allowed = allows(&store, &api).await;
        (allowed, commands.load(Ordering::Relaxed) - before)
    };
    // The server sees the script for the first time.
    assert_eq!((calls().await, calls().await), ((true, 3), (true, 2)));
    set(&store, &api, Some(Record::blocked().forever())).await;
    let before = commands.load(Ordering::Relaxed);
    assert!(!allows(&store, &api).await);
    assert_eq!(commands.load(Ordering::Relaxed) - before, 1);
    tell(&server, &["DEL", "rl:1:#records:{alice}"]);
    tell(&server, &["SET", "rl:1:#records:{alice}", "no hash"]);
    let failed = acquire(&store, &api, ALICE).await;
    fails(failed, ErrorKind::Corrupt, "");
}

#[tokio::test]
async fn a_mode_that_cannot_compare_records_refuses_a_limit_that_looks_for_them() {
    let server = server();
    let store = connect(&server).await;
    let tries = attempts().overridable();
    let check = Check { limit: &tries, key: ALICE, cost: 1 };
    let refused = store.in_mode::<Multi>().apply(&Batch::one(&check)).await;
    let Err(RedisError::Refused(Refusal::NoRecords { limit })) = refused else {
        panic!("{refused:?}");
    };
    assert_eq!(limit, "attempts");
    let limits = Limits::new([tries]).expect("one");
    let refused = store.in_mode::<Multi>().limiter(limits).map(drop);
    let Err(RedisError::Refused(Refusal::NoRecords { limit })) = refused else {
        panic!("{refused:?}");
    };
    assert_eq!(limit, "attempts");
    assert_eq!(tell(&server, &["DBSIZE"]).as_integer(), Some(0));
}

#[tokio::test]
async fn a_scan_finds_records_and_no_states_in_their_keys() {
    let server = server();
    let (store, api) = (connect(&server).await.in_mode::<Cas>(), api());
    set(&store, &api, Some(Record::blocked().forever())).await;
    let limits = Limits::new([api]).expect("one");
    let mut scan = store.scan(100, 100, Duration::ZERO).await.expect("a scan");
    let mut found = Vec::new();
    while let Some(keys) = scan.next().await.expect("keys") {
        for key in keys {
            assert_eq!(store.read_key(&key), ratelimit_redis::StoredKey::Other, "{key}");
            assert!(store.unknown_states(&limits, &key).await.expect("names").is_empty());
            found.extend(store.records_in(&limits, &key).await.expect("records"));
        }
    }
    let [(caller, records)] = &found[..] else { panic!("{found:?}") };
    assert_eq!(*caller, ratelimit_redis::StoredKey::Identifier(ALICE.to_owned()));
    assert!(
        matches!(&records[..], [(limit, record)] if limit.name() == "api" && record.is_blocked())
    );
}

#[tokio::test]
async fn healing_leaves_the_states_of_callers_with_a_record() {
    let server = server();
    let (store, api) = (connect(&server).await, limit("api", "gcra 10/s").overridable());
    let cas = store.in_mode::<Cas>();
    set(&store, &api, Some(numbers("gcra 1/h burst 5"))).await;
    for _ in 0..5 {
        assert!(allows(&store, &api).await && allows(&cas, &api).await);
    }
    let limits = Limits::new([api.clone()]).expect("one");
    for healed in [
        store.heal(&limits, HealOptions::default()).await,
        cas.heal(&limits, HealOptions::default()).await,
    ] {
        let healed = healed.expect("healed");
        assert!(healed.states.is_empty(), "{:?}", healed.states);
    }
    assert!(!allows(&store, &api).await && !allows(&cas, &api).await);
}

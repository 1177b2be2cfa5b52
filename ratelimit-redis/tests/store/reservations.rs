//! Reservations, metadata and stacks: the exact refusals and errors on every backend, and what happens
//! to keys with values that no limit wrote.

use std::time::Duration;

use crate::common::{aside, query};
use ratelimit_core::{
    Attempts, Batch, Check, Concurrency, DynError, DynStore, EntryStore, ErrorKind, FixedWindow,
    Gcra, Limit, Now, Op, Policy, Rate, Refusal, Reservation, ReservationId, SlidingLog, Store,
    StoreError, Timestamp, TokenBucket, Verdict, WindowEntry, WindowLog,
};
use ratelimit_memory::MemoryStore;
use ratelimit_redis::{Cas, RedisStore};
use ratelimit_testkit::RedisServer;

const ID: ReservationId = ReservationId::new(0x2a);

fn limit(name: &str, policy: impl Into<Policy>) -> Limit<Policy> {
    Limit::new(name, policy.into()).expect("a name")
}

fn rate(text: &str) -> Rate {
    text.parse().expect("a rate")
}

/// The algorithms that reserve, 9 in ten years, so no test reaches the end of a window.
fn reserving() -> [Limit<Policy>; 3] {
    let seldom = rate("9/3650d");
    [
        limit("gcra", Gcra::new(seldom, 9).unwrap()),
        limit("token-bucket", TokenBucket::new(seldom, 9).unwrap()),
        limit("fixed-window", FixedWindow::new(seldom).unwrap()),
    ]
}

fn leases() -> Limit<Policy> {
    limit("leases", Concurrency::new(rate("3/h")).unwrap())
}

fn log() -> Limit<Policy> {
    limit("log", WindowLog::new(rate("3/h")).unwrap())
}

/// The same store in both modes, and one in memory.
struct Backends {
    server: RedisServer,
    lua: RedisStore,
    cas: RedisStore<Cas>,
    memory: MemoryStore,
}

impl Backends {
    async fn start() -> Self {
        let server = RedisServer::start().expect("redis-server");
        let lua = RedisStore::connect(&server.url()).await.expect("the server is up");
        let cas = lua.in_mode();
        Self { server, lua, cas, memory: MemoryStore::new() }
    }

    fn all(&self) -> [(&'static str, &dyn DynStore<Policy>); 3] {
        [("lua", &self.lua), ("cas", &self.cas), ("memory", &self.memory)]
    }

    /// Checks that every backend refuses a batch with exactly this refusal.
    async fn refuse(&self, batch: &Batch<'_, Policy>, refusal: &Refusal) {
        for (name, store) in self.all() {
            let error: DynError = store.apply(batch).await.expect_err(name);
            assert_eq!(error.to_string(), refusal.to_string(), "{name}");
            assert_eq!(error.kind(), refusal.kind(), "{name}");
        }
    }

    /// Checks that every backend decides a batch alike, except for the microseconds that pass in
    /// between.
    async fn decide(&self, batch: &Batch<'_, Policy>) -> Verdict {
        let mut verdicts = Vec::new();
        for (name, store) in self.all() {
            verdicts.push((name, store.apply(batch).await.expect(name)));
        }
        let summary = |verdict: &Verdict| (verdict.allowed(), verdict.limit(), verdict.remaining());
        for (name, verdict) in &verdicts {
            assert_eq!(summary(verdict), summary(&verdicts[0].1), "{name}: {batch:?}");
        }
        verdicts.remove(0).1
    }

    /// Every key; none may live forever. A key that was removed by emptying it has a millisecond left,
    /// and does not count.
    fn keys(&self) -> Vec<String> {
        let mut aside = aside(&self.server);
        let mut keys: Vec<String> = query(&mut aside, &["KEYS", "*"]);
        keys.retain(|key| {
            let ttl_ms: i64 = query(&mut aside, &["PTTL", key]);
            assert_ne!(ttl_ms, -1, "{key} lives for ever");
            ttl_ms > 1
        });
        keys.sort();
        keys
    }
}

fn check(limit: &Limit<Policy>, cost: u64) -> Check<'_, Policy> {
    Check { limit, key: "a", cost }
}

#[tokio::test]
async fn a_reservation_is_committed_or_cancelled_once() {
    let backends = Backends::start().await;
    for limit in &reserving() {
        let remaining = async |op: Op, id: u128, cost: u64| {
            let check = check(limit, cost);
            let at = Now::At(Timestamp::from_us(3_000_000_000).expect("a time"));
            let batch = Batch::one(&check).op(op).id(ReservationId::new(id)).now(at);
            backends.decide(&batch).await.remaining()
        };
        assert_eq!(remaining(Op::Acquire, 1, 4).await, 5);
        assert_eq!(remaining(Op::Acquire, 1, 4).await, 5); // repeated
        assert_eq!(remaining(Op::Acquire, 2, 3).await, 2);
        assert_eq!(remaining(Op::Settle, 1, 1).await, 5); // settled below the estimate
        assert_eq!(remaining(Op::Settle, 1, 1).await, 5); // repeated
        assert_eq!(remaining(Op::Settle, 2, 0).await, 8); // cancelled
        assert_eq!(remaining(Op::Acquire, 3, 2).await, 6);
        assert_eq!(remaining(Op::Renew, 3, 0).await, 6);
        assert_eq!(remaining(Op::Settle, 3, 7).await, 1); // settled above the estimate
        assert_eq!(remaining(Op::Refund, 4, 2).await, 3);
        assert_eq!(remaining(Op::Refund, 4, 2).await, 3); // repeated
        for id in 1..=4 {
            let id = ReservationId::new(id);
            let there =
                backends.lua.reservation(limit, "a", id).await.expect("reads").expect("reserved");
            let other =
                backends.cas.reservation(limit, "a", id).await.expect("reads").expect("reserved");
            assert_eq!((there.cost, there.settled), (other.cost, other.settled));
            assert!(there.settled.is_some());
        }
    }
    let keys = backends.keys();
    assert_eq!(keys[0], "rl:1::{a}");
    assert!(keys.contains(&format!("rl:1:gcra#{:032x}:{{a}}", 1)), "{keys:?}");
    // Three compare-and-set states, one hash for the three Lua states, and four reservations of each in
    // both modes.
    assert_eq!(keys.len(), 3 + 1 + 2 * 3 * 4, "{keys:?}");
}

#[tokio::test]
async fn settled_reservations_under_drawn_ids_leave_keys_that_expire_soon() {
    let backends = Backends::start().await;
    let [gcra, ..] = reserving();
    let leases = leases();
    let checks = [check(&gcra, 1), check(&leases, 1)];
    for id in (0..20).map(ReservationId::new) {
        let batch = Batch::new(&checks).expect("distinct").id(id).settled_once();
        assert!(backends.decide(&batch).await.allowed());
        let back = [check(&gcra, 0), check(&leases, 0)];
        let _ = backends.decide(&batch.with_checks(&back).op(Op::Settle)).await;
    }
    let longest_ms = i64::try_from(Reservation::REPEAT_US / 1_000).expect("ten seconds");
    let mut aside = aside(&backends.server);
    let reservations: Vec<_> =
        backends.keys().into_iter().filter(|key| key.contains('#')).collect();
    // Two limits, in two modes.
    assert_eq!(reservations.len(), 20 * 2 * 2, "{reservations:?}");
    for key in reservations {
        let ttl_ms: i64 = query(&mut aside, &["PTTL", &key]);
        assert!(ttl_ms <= longest_ms, "{key} lives for {ttl_ms} ms");
    }
}

#[tokio::test]
async fn an_expired_charge_is_not_returned() {
    let backends = Backends::start().await;
    // Five have refilled after this time; the window ends with the third second.
    let flowed = [(1_000_000, true), (1_666_666, true), (1_666_667, false), (3_000_000, false)];
    let ended = [(1, true), (2_999_998, true), (2_999_999, true), (3_000_000, false)];
    let gcra = Policy::from(Gcra::new(rate("3/s"), 9).unwrap());
    let bucket = TokenBucket::new(rate("3/s"), 9).unwrap().into();
    let fixed = FixedWindow::new(rate("9/3s")).unwrap().into();
    for (policy, waits) in [(gcra, flowed), (bucket, flowed), (fixed, ended)] {
        let name = policy.name();
        let limit = limit(name, policy);
        let mut key = 0;
        for (wait_us, given_back) in waits {
            key += 1;
            let key = key.to_string();
            let remaining = async |op: Op, id: Option<ReservationId>, cost: u64, us: u64| {
                let check = Check { limit: &limit, key: &key, cost };
                let at = Timestamp::from_us(3_000_000_000 + us).expect("a time");
                let batch = Batch::one(&check).op(op).now(Now::At(at));
                backends.decide(&id.map_or(batch, |id| batch.id(id))).await.remaining()
            };
            assert_eq!(remaining(Op::Acquire, Some(ID), 5, 0).await, 4, "{name}");
            let before = remaining(Op::Acquire, None, 2, wait_us).await;
            let settled = remaining(Op::Settle, Some(ID), 0, wait_us).await;
            assert_eq!(settled > before, given_back, "{name} after {wait_us} µs");
        }
    }
}

#[tokio::test]
async fn an_unknown_lease_is_neither_renewed_nor_released() {
    let backends = Backends::start().await;
    let leases = leases();
    let check = check(&leases, 0);
    for op in [Op::Renew, Op::Settle] {
        let batch = Batch::one(&check).op(op).id(ID);
        backends.refuse(&batch, &Refusal::UnknownReservation { id: ID }).await;
        backends.refuse(&Batch::one(&check).op(op), &Refusal::NoId { op }).await;
    }
    let none: [Check<'_, Policy>; 0] = [];
    let nothing = Batch::new(&none).expect("distinct").op(Op::Settle).id(ID);
    backends.refuse(&nothing, &Refusal::UnknownReservation { id: ID }).await;
    assert_eq!(backends.keys(), [""; 0]);
}

#[tokio::test]
async fn an_ended_lease_is_unknown_even_if_its_key_exists() {
    let backends = Backends::start().await;
    let leases = leases();
    let check = check(&leases, 2);
    let at = |us: u64| Now::At(Timestamp::from_us(us).expect("a time"));
    let grant = Batch::one(&check).id(ID).now(at(7));
    assert_eq!(backends.decide(&grant).await.remaining(), 1);
    let renew = Batch::one(&check).id(ID).op(Op::Renew);
    assert_eq!(backends.decide(&renew.now(at(3_600_000_006))).await.remaining(), 1);
    // Once renewed it lives for another hour, and no longer.
    backends.refuse(&renew.now(at(7_200_000_006)), &Refusal::UnknownReservation { id: ID }).await;
    assert_eq!(backends.decide(&grant.now(at(7_200_000_006))).await.remaining(), 1);
    assert_eq!(backends.keys().len(), 4);
}

#[tokio::test]
async fn a_settled_reservation_stays_settled() {
    let backends = Backends::start().await;
    for limit in reserving().iter().chain([&leases()]) {
        let batch = |op: Op, cost: u64| (op, check(limit, cost));
        let name = limit.name().to_owned();
        for (op, check) in [batch(Op::Acquire, 3), batch(Op::Settle, 1), batch(Op::Settle, 1)] {
            let _ = backends.decide(&Batch::one(&check).op(op).id(ID)).await;
        }
        let settled = Refusal::Settled { limit: name.clone(), id: ID, at: 1 };
        for (op, cost) in [
            (Op::Settle, 2),
            (Op::Settle, u64::MAX),
            (Op::Acquire, 1),
            (Op::Renew, 1),
            (Op::Refund, 3),
            (Op::Peek, 3),
        ] {
            let check = check(limit, cost);
            backends.refuse(&Batch::one(&check).op(op).id(ID), &settled).await;
        }
        let waiting = ReservationId::new(7);
        let check = check(limit, 1);
        let _ = backends.decide(&Batch::one(&check).id(waiting)).await;
        for op in [Op::Refund, Op::Force, Op::Reset] {
            let pending = Refusal::Pending { limit: name.clone(), id: waiting };
            backends.refuse(&Batch::one(&check).op(op).id(waiting), &pending).await;
        }
        // The largest costs are distinguished, too.
        let check = |cost| Check { limit, key: "a", cost };
        let (most, less) = (check(u64::MAX), check(u64::MAX - 1));
        let id = ReservationId::new(8);
        let _ = backends.decide(&Batch::one(&most).op(Op::Refund).id(id)).await;
        let _ = backends.decide(&Batch::one(&most).op(Op::Refund).id(id)).await;
        let settled = Refusal::Settled { limit: name, id, at: u64::MAX };
        backends.refuse(&Batch::one(&less).op(Op::Refund).id(id), &settled).await;
    }
}

#[tokio::test]
async fn a_limit_without_reservations_refuses_an_id_before_sending() {
    let backends = Backends::start().await;
    let sliding = limit("sliding", SlidingLog::new(rate("3/h")).unwrap());
    let attempts = limit("attempts", Attempts::new(Gcra::new(rate("3/h"), 3).unwrap()));
    for limit in [&log(), &sliding, &attempts] {
        let check = check(limit, 1);
        let refusal = Refusal::CannotReserve { limit: limit.name().into() };
        backends.refuse(&Batch::one(&check).id(ID), &refusal).await;
        backends.refuse(&Batch::one(&check).id(ID).op(Op::Renew), &refusal).await;
    }
    let leases = leases();
    let nothing = check(&leases, 0);
    let refusal = Refusal::ReservesNothing { limit: "leases".into() };
    backends.refuse(&Batch::one(&nothing).id(ID), &refusal).await;
    let log = log();
    let check = check(&log, 1);
    let refusal = Refusal::Metadata { limit: "log".into(), bytes: 257, most: 256 };
    backends.refuse(&Batch::one(&check).metadata(&[b'x'; 257]), &refusal).await;
    assert_eq!(backends.keys(), [""; 0]);
}

#[tokio::test]
async fn an_excessive_refund_stops_at_the_capacity() {
    let backends = Backends::start().await;
    for limit in reserving().iter().chain([&leases(), &log()]) {
        let capacity = backends.decide(&Batch::one(&check(limit, 0))).await.remaining();
        let _ = backends.decide(&Batch::one(&check(limit, 2))).await;
        for cost in [capacity, u64::MAX] {
            let check = check(limit, cost);
            let verdict = backends.decide(&Batch::one(&check).op(Op::Refund)).await;
            assert_eq!(verdict.remaining(), capacity, "{}", limit.name());
        }
    }
    assert_eq!(backends.keys(), [""; 0]);
}

#[tokio::test]
async fn metadata_of_any_bytes_survives() {
    let backends = Backends::start().await;
    let log = log();
    let every: Vec<u8> = (0..=255).collect();
    let backwards: Vec<u8> = every.iter().rev().copied().collect();
    let given = [&every[..], &backwards, b""];
    for metadata in given {
        let check = check(&log, 1);
        let _ = backends.decide(&Batch::one(&check).metadata(metadata)).await;
    }
    // Denied, so the log does not keep it.
    let _ = backends.decide(&Batch::one(&check(&log, 1)).metadata(b"late")).await;
    let entries = [
        backends.lua.entries(&log, "a", Now::Store).await.expect("reads"),
        backends.cas.entries(&log, "a", Now::Store).await.expect("reads"),
        backends.memory.entries(&log, "a", Now::Store).await.expect("reads"),
    ];
    for entries in entries {
        let found: Vec<&[u8]> = entries.iter().map(|entry| &*entry.metadata).collect();
        assert_eq!(found, given);
        assert!(entries.iter().all(|entry| entry.cost == 1));
    }
    // A partial refund leaves the metadata of its newest entry.
    let at = |us: u64| Now::At(Timestamp::from_us(us).expect("a time"));
    let (two, one) = (check(&log, 2), check(&log, 1));
    let key = |check| Check { key: "b", ..check };
    let _ = backends.decide(&Batch::one(&key(two)).metadata(&every).now(at(5))).await;
    let _ = backends.decide(&Batch::one(&key(one)).op(Op::Refund).now(at(6))).await;
    let left =
        WindowEntry { timestamp: Timestamp::from_us(5).unwrap(), cost: 1, metadata: every.into() };
    let entries = backends.lua.entries(&log, "b", at(6)).await.expect("reads");
    assert_eq!(entries, backends.cas.entries(&log, "b", at(6)).await.expect("reads"));
    assert_eq!(entries, [left]);
    // The window is over: no entry counts, whatever is still stored.
    assert_eq!(backends.lua.entries(&log, "b", at(3_600_000_005)).await.expect("reads"), []);
    assert_eq!(backends.cas.entries(&log, "b", at(3_600_000_005)).await.expect("reads"), []);
    assert_eq!(
        backends.keys(),
        ["rl:1:log!:{a}", "rl:1:log!:{b}", "rl:1:log+:{a}", "rl:1:log+:{b}"]
    );
}

#[tokio::test]
async fn a_denied_batch_names_the_limit_and_when_all_would_admit() {
    let backends = Backends::start().await;
    let at = Now::At(Timestamp::from_us(1_795_218_392_123_456).expect("a time"));
    let [burst, minute] = [("burst", "1/s", 9), ("minute", "2/m", 2)]
        .map(|(name, text, burst)| limit(name, Gcra::new(rate(text), burst).unwrap()));
    let leases = leases();
    let checks = [&burst, &minute, &leases].map(|limit| check(limit, 1));
    let batch = Batch::new(&checks).expect("distinct").now(at);
    for id in 1..=2 {
        assert!(backends.decide(&batch.id(ReservationId::new(id))).await.allowed());
    }
    let verdict = backends.decide(&batch.id(ReservationId::new(3))).await;
    assert_eq!(verdict.denied_by().collect::<Vec<_>>(), [1]);
    assert_eq!(verdict.retry_after(), Some(Duration::from_secs(30)));
    let has: Vec<_> = verdict.decisions().iter().map(|d| (d.allowed, d.remaining)).collect();
    assert_eq!(has, [(true, 7), (false, 0), (true, 1)]);
    // A denied batch has no reservation and can be requested again.
    let release = batch.op(Op::Settle);
    backends
        .refuse(
            &release.id(ReservationId::new(3)),
            &Refusal::UnknownReservation { id: ReservationId::new(3) },
        )
        .await;
    let all = backends.decide(&release.id(ReservationId::new(2))).await;
    assert_eq!(all.decisions().iter().map(|d| d.remaining).collect::<Vec<_>>(), [7, 0, 2]);
}

#[tokio::test]
async fn attempts_are_charged_in_a_batch_that_another_limit_denies() {
    let backends = Backends::start().await;
    let at = Now::At(Timestamp::from_us(1_795_218_392_123_456).expect("a time"));
    let tries = limit("tries", Attempts::new(WindowLog::new(rate("3/h")).unwrap()));
    let full = limit("full", Gcra::new(rate("1/h"), 1).unwrap());
    let checks = [check(&tries, 1), check(&full, 1)];
    let batch = Batch::new(&checks).expect("distinct").now(at).metadata(b"me");
    for remaining in [2, 1, 0, 0] {
        let verdict = backends.decide(&batch).await;
        assert_eq!(verdict.decisions()[0].remaining, remaining);
    }
    for entries in [
        backends.lua.entries(&tries, "a", at).await.expect("reads"),
        backends.cas.entries(&tries, "a", at).await.expect("reads"),
    ] {
        assert!(entries.len() == 3 && entries.iter().all(|entry| &*entry.metadata == b"me"));
    }
}

#[tokio::test]
async fn a_foreign_value_is_reported_once_and_removed() {
    let backends = Backends::start().await;
    let mut aside = aside(&backends.server);
    let (log, leases) = (log(), leases());
    let (listed, reserved) =
        (backends.lua.key(&log, "a"), backends.lua.reservation_key(&leases, "a", ID));
    let of_cas = backends.cas.reservation_key(&leases, "a", ID);
    let one = check(&log, 1);
    for garbage in ["nonsense", "1 2 3", "1 2 3 99999999999999999999 x", "-1 1 1 1 "] {
        query::<()>(&mut aside, &["RPUSH", &listed, garbage]);
        let error = backends.lua.apply(&Batch::one(&one)).await.expect_err(garbage);
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        assert!(error.to_string().contains(&listed), "{error}");
        let verdict = backends.lua.apply(&Batch::one(&one)).await.expect("healed");
        assert_eq!(verdict.remaining(), 2, "{garbage}");
        query::<()>(&mut aside, &["DEL", &listed]);
    }
    // Further down in the list, where only a refund looks.
    query::<()>(&mut aside, &["RPUSH", &listed, "nonsense"]);
    let (seconds, _): (u64, u64) = query(&mut aside, &["TIME"]);
    let element = format!("{seconds}000000 1 2 {seconds}000000 ");
    query::<()>(&mut aside, &["RPUSH", &listed, &element]);
    let refund = Batch::one(&one).op(Op::Refund);
    let error = backends.lua.apply(&refund).await.expect_err("nonsense");
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    assert_eq!(backends.lua.apply(&refund).await.expect("healed").remaining(), 3);

    let lease = check(&leases, 2);
    let grant = Batch::one(&lease).id(ID);
    for garbage in ["nonsense", "1 2", "1 2 3 4 5", "1 99999999999999999999 1", "1 2 -3"] {
        for (key, store) in [(&reserved, 0), (&of_cas, 1)] {
            let store: &dyn DynStore<Policy> = backends.all()[store].1;
            query::<()>(&mut aside, &["SET", key, garbage]);
            let error = store.apply(&grant).await.expect_err(garbage);
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
            assert!(error.to_string().contains(&**key), "{error}");
            assert_eq!(store.apply(&grant).await.expect("healed").remaining(), 1, "{garbage}");
            let release = Batch::one(&lease).op(Op::Settle).id(ID);
            assert_eq!(store.apply(&release).await.expect("released").remaining(), 3);
            query::<()>(&mut aside, &["DEL", key]);
        }
    }
}

#[tokio::test]
async fn a_key_of_another_type_is_reported_every_time_and_left_alone() {
    let backends = Backends::start().await;
    let mut aside = aside(&backends.server);
    let (log, leases) = (log(), leases());
    let (one, lease) = (check(&log, 1), check(&leases, 1));
    let grant = Batch::one(&lease).id(ID);
    let listed = backends.lua.key(&log, "a");
    query::<()>(&mut aside, &["SET", &listed, "another program's"]);
    for op in [Op::Acquire, Op::Refund, Op::Reset] {
        let error = backends.lua.apply(&Batch::one(&one).op(op)).await.expect_err("a string");
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        assert!(error.to_string().contains(&listed), "{error}");
    }
    let error = backends.lua.entries(&log, "a", Now::Store).await.expect_err("a string");
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    assert_eq!(query::<String>(&mut aside, &["GET", &listed]), "another program's");
    for (key, store) in [
        (backends.lua.reservation_key(&leases, "a", ID), 0),
        (backends.cas.reservation_key(&leases, "a", ID), 1),
    ] {
        query::<()>(&mut aside, &["RPUSH", &key, "another program's"]);
        for _ in 0..2 {
            let error = backends.all()[store].1.apply(&grant).await.expect_err("a list");
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
            assert!(error.to_string().contains(&key), "{error}");
        }
        assert_eq!(query::<u64>(&mut aside, &["LLEN", &key]), 1);
    }
    // A batch with several checks charges nothing, whichever of them has the wrong type.
    let three = limit("three", Gcra::new(rate("3/h"), 3).unwrap());
    let checks = [check(&three, 1), one];
    let batch = Batch::new(&checks).expect("distinct");
    for op in [Op::Acquire, Op::Reset] {
        let error = backends.lua.apply(&batch.op(op)).await.expect_err("a string");
        assert!(error.to_string().contains(&listed), "{error}");
    }
    assert_eq!(backends.lua.state(&three, "a").await.expect("reads"), None);
}

#[tokio::test]
async fn a_long_window_log_is_read_one_element_at_a_time() {
    let backends = Backends::start().await;
    let mut aside = aside(&backends.server);
    let log = limit("log", WindowLog::new(rate("5000/h")).unwrap());
    let one = check(&log, 1);
    let at = |us: u64| Now::At(Timestamp::from_us(us).expect("a time"));
    for us in 0..2_000 {
        let _ = backends.lua.apply(&Batch::one(&one).now(at(us))).await.expect("decides");
    }
    let reads = || backends.server.calls("lindex").expect("it is up");
    let before = reads();
    assert!(before > 0, "lists were read");
    let _ = backends.lua.apply(&Batch::one(&one).now(at(2_000))).await.expect("decides");
    assert_eq!(reads() - before, 1);
    let back = check(&log, 1_000);
    let refund = Batch::one(&back).op(Op::Refund).now(at(2_000));
    assert_eq!(backends.lua.apply(&refund).await.expect("decides").remaining(), 3_999);
    assert!(reads() - before <= 16);
    assert_eq!(query::<u64>(&mut aside, &["LLEN", "rl:1:log+:{a}"]), 1_001);
    // An hour later all entries have expired.
    let _ = backends.lua.apply(&Batch::one(&one).now(at(3_600_000_000))).await.expect("decides");
    assert_eq!(query::<u64>(&mut aside, &["LLEN", "rl:1:log+:{a}"]), 1);
}

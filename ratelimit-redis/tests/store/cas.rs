//! The compare-and-set mode against other clients: what is contention and what is not, and what it
//! sends.

use ratelimit_servers::RespClient;
use tokio::sync::Barrier;

use crate::common::prelude::*;

/// The key of an identifier's state under the limit that never refills.
fn key(identifier: &str) -> String {
    format!("rl:1:seldom/gcra!:{{{identifier}}}")
}

/// Writes a state as another client: another one for each number.
fn write(client: &mut RespClient, key: &str, n: u64) {
    let set = ["SET", key, &format!("gcra {n} 0 0"), "PX", "60000"];
    client.command(&set).expect("it answers").ok().expect("OK");
}

/// Makes keys expire, and returns when they have.
fn expire(client: &mut RespClient, keys: &[String]) {
    for key in keys {
        client.command(&["PEXPIRE", key, "1"]).expect("it answers").ok().expect("done");
        while client.command(&["EXISTS", key]) == Ok(RespValue::Integer(1)) {}
    }
}

/// A store with this deadline, before each of whose writes another client does this.
async fn store(
    server: &RedisServer,
    deadline: Duration,
    is_cluster: bool,
    before_writes: impl Fn(&mut RespClient) + Send + Sync + 'static,
) -> RedisStore<Cas, MeddlingConnection> {
    let port = server.port();
    let connection = meddling_connection(server).await.decided(move |words| {
        if ["EVAL", "EVALSHA", "SET"].contains(&words.name()) {
            before_writes(&mut RespClient::connect(port).expect("it is up"));
        }
        Fate::Sent
    });
    let connection = if is_cluster { connection.clustered() } else { connection };
    over(RedisStore::builder().cas().deadline(deadline), connection)
}

#[tokio::test]
async fn a_key_that_others_always_change_first_is_contended_and_uncharged() {
    let (server, limit) = (server(), seldom());
    let written = AtomicU64::new(1);
    let change = move |client: &mut RespClient| {
        write(client, &key("a"), written.fetch_add(1, Ordering::Relaxed));
    };
    let changed = store(&server, PATIENCE, false, change).await;
    let both = [(&limit, "a", 1), (&limit, "b", 1)];
    for checks in [&both[..1], &both] {
        fails(apply(&changed, checks, Op::Acquire, None).await, ErrorKind::Contended, "");
    }
    assert_eq!(changed.state(&limit, "b").await.expect("reads"), None);
    // A peek writes nothing and disturbs no other caller.
    let _ = peek(&changed, &limit, "a").await;
    // A removal by another client looks like an expiry. Together with its writes it is contention.
    let written = AtomicU64::new(1);
    let in_turn = store(&server, PATIENCE, false, move |client| {
        if client.command(&["DEL", &key("c")]) == Ok(RespValue::Integer(0)) {
            write(client, &key("c"), written.fetch_add(1, Ordering::Relaxed));
        }
    });
    fails(acquire(&in_turn.await, &limit, "c").await, ErrorKind::Contended, "");
}

/// No other client is there, so it is no contention: however long it takes, in however many slots,
/// and if each of many states expires at another time.
#[tokio::test]
async fn a_state_that_expires_between_read_and_write_is_read_again() {
    let (server, limit) = (server(), seldom());
    let mut aside = server.client().expect("it is up");
    let names: Vec<_> = (0..50).map(|n| n.to_string()).collect();
    for (some, is_cluster, in_turn) in
        [(1, false, false), (2, false, false), (2, true, false), (50, false, true)]
    {
        let keys: Vec<_> = names[..some].iter().map(|name| key(name)).collect();
        let to_expire = keys.clone();
        let expiring = store(&server, Duration::from_millis(1), is_cluster, move |client| {
            if in_turn {
                let there =
                    |key: &&String| client.command(&["EXISTS", key]) == Ok(RespValue::Integer(1));
                let first = to_expire.iter().find(there).cloned();
                expire(client, first.as_slice());
            } else {
                expire(client, &to_expire);
            }
        });
        let expiring = expiring.await;
        for _ in 0..2 {
            for key in &keys {
                write(&mut aside, key, 1);
            }
            let checks: Vec<_> = names[..some].iter().map(|name| (&limit, &**name, 1)).collect();
            let verdict = apply(&expiring, &checks, Op::Acquire, None).await;
            assert_eq!(verdict.expect("no other caller is there").remaining(), 2);
        }
    }
}

/// A removal without scripting leaves an empty value for a millisecond.
#[tokio::test]
async fn an_empty_value_is_none() {
    let (server, limit) = (server(), seldom());
    let store = plain(&server).await.in_mode::<Cas>();
    for names in [&["a"][..], &["b", "c"]] {
        for name in names {
            tell(&server, &["SET", &key(name), ""]);
        }
        let checks: Vec<_> = names.iter().map(|name| (&limit, *name, 1)).collect();
        assert_eq!(apply_admitted(&store, &checks, Op::Acquire, None).await.remaining(), 2);
    }
}

/// Two requests read no state. If the state of the first had expired when the second writes, late,
/// the key would look as it was read, and a window that has ended would admit both.
#[tokio::test]
async fn a_state_that_came_and_went_does_not_look_unchanged() {
    let (server, window) = (server(), limit("short", "fixed-window 1/1ms"));
    let first = plain(&server).await.in_mode::<Cas>();
    let writes = Arc::new(AtomicU64::new(0));
    let needed = (Arc::clone(&writes), window.clone(), first);
    let held = meddling_connection(&server).await;
    let held = held.before_with(needed, |(writes, window, first), words| async move {
        if words.name() == "SET" && writes.fetch_add(1, Ordering::Relaxed) == 0 {
            let _ = apply_admitted(&first, &[(&window, "a", 1)], Op::Acquire, None).await;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Fate::Sent
    });
    let second = over(RedisStore::builder().cas().deadline(PATIENCE), held);
    // A window has begun since, so it admits the second as well; but not before it has read again.
    let _ = apply_admitted(&second, &[(&window, "a", 1)], Op::Acquire, None).await;
    assert!(writes.load(Ordering::Relaxed) > 1 || server.calls("evalsha").expect("it is up") > 0);
}

#[tokio::test]
async fn a_batch_reads_everything_in_one_round_trip() {
    let (server, limit) = (server(), seldom());
    let both = [(&limit, "a", 1), (&limit, "b", 1)];
    // A state and the time. Several keys, with the reservations under an id, are one transaction.
    for (checks, id, reads) in [(&both[..1], None, 2), (&both, None, 1), (&both, Some(7), 1)] {
        let all_at_once = meddling_connection(&server).await;
        let all = Arc::new(Barrier::new(reads));
        let all_at_once = all_at_once.before_with(all, move |all, words| async move {
            if ["GET", "TIME"].contains(&words.name()) {
                timeout(PATIENCE, all.wait()).await.expect("all are sent at once");
            }
            Fate::Sent
        });
        let store = over(RedisStore::builder().cas().deadline(PATIENCE), all_at_once);
        let _ = apply_admitted(&store, checks, Op::Acquire, id).await;
    }
}

/// Callers of one process take turns, and processes back off from each other.
#[tokio::test]
async fn many_callers_of_one_key_are_rarely_contended() {
    const TIMES: u64 = 10;
    let (server, many) = (server(), limit("many", "gcra 1/h burst 1000"));
    for (stores, tasks) in [(1, 64), (4, 16)] {
        let (mut asking, prefix) = (JoinSet::new(), prefix());
        let builder = RedisStore::builder().cas().deadline(PATIENCE).prefix(&prefix);
        let url = server.url();
        let connect = || builder.clone().connect(&url);
        for _ in 0..stores {
            let store = connect().await.expect("it is up");
            for _ in 0..tasks {
                let (store, many) = (store.clone(), many.clone());
                asking.spawn(async move {
                    let mut contended = 0;
                    for _ in 0..TIMES {
                        match acquire(&store, &many, "one").await {
                            Ok(verdict) => assert!(verdict.allowed()),
                            error => {
                                fails(error, ErrorKind::Contended, "");
                                contended += 1;
                            }
                        }
                    }
                    contended
                });
            }
        }
        let contended: u64 = asking.join_all().await.into_iter().sum();
        let requests = stores * tasks * TIMES;
        assert!(contended * 100 < requests, "{contended} of {requests} with {stores} stores");
        let store = connect().await.expect("it is up");
        assert_eq!(peek(&store, &many, "one").await, 1_000 - (requests - contended), "once each");
    }
}

/// On every configured server. Those without `SET … IFEQ` need the script, and support it.
#[tokio::test]
async fn a_single_check_needs_no_scripting_if_the_server_has_ifeq() {
    for binary in RedisServer::binaries() {
        let server = RedisServer::start_with(&binary, &[]).expect("a server");
        let store = RedisStore::builder().cas().deadline(PATIENCE).connect(&server.url()).await;
        let (store, limit) = (store.expect("it is up"), seldom());
        tell(&server, &["SET", "probe", "old"]);
        let known = server.command(&["SET", "probe", "new", "IFEQ", "old"]);
        let known = known.expect("it is up").ok().is_ok();
        three_and_no_more(&store, &limit, "a").await;
        let refund = apply(&store, &[(&limit, "a", 3)], Op::Refund, None).await;
        assert_eq!(refund.expect("decides").remaining(), 3);
        assert_eq!(store.state(&limit, "a").await.expect("reads"), None);
        assert_eq!(remaining_after_acquire(&store, &limit, "a").await, 2);
        let calls = |command| server.calls(command).expect("it is up");
        let scripted = calls("evalsha") + calls("eval") > 0;
        assert_eq!(scripted, !known, "{binary}: IFEQ is known: {known}");
    }
}

/// A check that costs nothing is never written, whatever the server can compare and set.
#[tokio::test]
async fn a_check_that_costs_nothing_is_not_written() {
    let (server, limit) = (server(), seldom());
    let store = over(RedisStore::builder().cas(), meddling_connection(&server).await.clustered());
    for cost in [0, 1, 0] {
        let before = server.calls("set").expect("it is up");
        let both = [(&limit, "alice", 1), (&limit, "bob", cost)];
        let _ = apply_admitted(&store, &both, Op::Acquire, None).await;
        // A server that does not know IFEQ is asked once.
        let written = server.calls("set").expect("it is up") - before;
        assert!(cost > 0 || written == 1, "{written}");
    }
    assert_eq!(peek(&store, &limit, "bob").await, 2);
}

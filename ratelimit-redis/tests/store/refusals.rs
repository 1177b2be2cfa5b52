//! A store's and a server's refusals: the kind of error, and a message that an operator can act on.
//! The same with each client, and nothing is charged.

use ratelimit_core::RateLimiter;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpListener;

use crate::common::prelude::*;

/// Repeats a request until it is refused with this code and these words.
async fn until_refused(store: &RedisStore, code: &str, words: &str) {
    until(async || match acquire(store, &seldom(), "a").await {
        Err(RedisError::Server { code: said, message, .. }) if said == code => Ok(message),
        other => Err(format!("{other:?}")),
    })
    .await;
    fails(acquire(store, &seldom(), "a").await, ErrorKind::Unavailable, words);
}

async fn until_decided(store: &RedisStore) -> u64 {
    until(async || acquire(store, &seldom(), "a").await).await.remaining()
}

async fn a_server_that_cannot_save_is_unavailable(client: Client) {
    let server = server_with(&["--enable-protected-configs", "yes"]);
    let store = store(&server.url(), client).await;
    assert_eq!(until_decided(&store).await, 2);
    // The folder no longer exists, so the server cannot save.
    let folder = std::env::temp_dir().join(format!("{client}-{}", server.port()));
    std::fs::create_dir(&folder).expect("a folder");
    tell(&server, &["CONFIG", "SET", "dir", folder.to_str().unwrap()]);
    std::fs::remove_dir(&folder).expect("it was empty");
    tell(&server, &["CONFIG", "SET", "save", "3600 1000000"]);
    tell(&server, &["BGSAVE"]);
    until(async || {
        let info = tell(&server, &["INFO", "persistence"]).to_string();
        info.contains("rdb_last_bgsave_status:err").then_some(()).ok_or("it saves")
    })
    .await;
    until_refused(&store, "MISCONF", "see to its disk").await;
    tell(&server, &["CONFIG", "SET", "save", ""]);
    assert_eq!(until_decided(&store).await, 1, "nothing was charged meanwhile");
}

async fn a_replica_refuses_with_or_without_its_master(client: Client) {
    let master = server();
    let replica = RedisServer::replica_of(&master).expect("a replica");
    let store = store(&replica.url(), client).await;
    until_refused(&store, "READONLY", "the server is a replica").await;
    tell(&replica, &["CONFIG", "SET", "replica-serve-stale-data", "no"]);
    master.stop();
    until_refused(&store, "MASTERDOWN", "has lost its master").await;
    tell(&replica, &["REPLICAOF", "NO", "ONE"]);
    assert_eq!(until_decided(&store).await, 2, "it is a master now");
}

async fn a_loading_server_is_unavailable_until_it_has_loaded(client: Client) {
    let events = "--loading-process-events-interval-bytes";
    let server = server_with(&["--enable-debug-command", "yes", events, "1024"]);
    let store = store(&server.url(), client).await;
    assert_eq!(until_decided(&store).await, 2);
    for n in 0..100 {
        tell(&server, &["SET", &format!("other:{n}"), &format!("{n}").repeat(2_000)]);
    }
    tell(&server, &["CONFIG", "SET", "rdbcompression", "no"]);
    tell(&server, &["CONFIG", "SET", "key-load-delay", "2000"]);
    let mut debug = server.client().expect("it is up");
    debug.send(&["DEBUG", "RELOAD"]).expect("sent");
    until_refused(&store, "LOADING", "it has just started").await;
    debug.receive().expect("loaded").ok().expect("loaded");
    let left = until_decided(&store).await;
    assert!(left <= 1, "what was admitted before it loaded is charged: {left}");
}

async fn a_server_of_another_kind_is_reported_in_one_line(client: Client) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("redis://{}", listener.local_addr().expect("bound"));
    // Again and again: the store may have tried it twice before the caller looks.
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
        }
    });
    let error = RedisStore::connect(&with_client(&url, client)).await;
    let said = fails(error, ErrorKind::Unavailable, "does not speak the Redis protocol");
    assert_eq!(said.lines().count(), 1, "{said}");
}

with_each_client! {
    a_server_of_another_kind_is_reported_in_one_line,
    a_server_that_cannot_save_is_unavailable,
    a_replica_refuses_with_or_without_its_master,
    a_loading_server_is_unavailable_until_it_has_loaded,
}

#[tokio::test]
async fn a_full_server_charges_nothing_in_any_algorithm() {
    let server = server();
    let store = store(&server.url(), Client::default()).await;
    tell(&server, &["CONFIG", "SET", "maxmemory", "1"]);
    for limit in every(3) {
        fails(acquire(&store, &limit, "b").await, ErrorKind::Unavailable, "");
    }
    tell(&server, &["CONFIG", "SET", "maxmemory", "0"]);
    for limit in every(3) {
        assert_eq!(remaining_after_acquire(&store, &limit, "b").await, 2);
    }
}

/// A store for a user who may do anything but this.
async fn forbidden(server: &RedisServer, command: &str) -> RedisStore {
    let rights = format!("~* +@all -{command}");
    let url = login(std::slice::from_ref(server), &server.url(), &rights);
    RedisStore::builder().deadline(PATIENCE).connect(&url).await.expect("it is up")
}

/// The server rejects the whole transaction.
#[tokio::test]
async fn a_forbidden_command_of_a_transaction_charges_nothing() {
    let server = server();
    let store = forbidden(&server, "pexpire").await.in_mode::<Multi>();
    for limit in native(3) {
        fails(acquire(&store, &limit, "a").await, ErrorKind::Config, "pexpire");
    }
    assert_eq!(keys(&server), [""; 0]);
}

/// A server that forbids the look is no record that cannot be read.
#[tokio::test]
async fn a_forbidden_look_for_a_record_is_an_error_of_the_configuration() {
    let server = server();
    let store = forbidden(&server, "hget").await;
    let acquired = acquire(&store, &limit("gcra", "gcra 9/h").overridable(), "a").await;
    fails(acquired, ErrorKind::Config, "ACL SETUSER");
}

/// The driver has written the first limit's state before the server rejects a command of the second
/// one.
#[tokio::test]
async fn a_forbidden_command_of_a_script_leaves_the_charge_in_doubt() {
    let server = server();
    let (gcra, log) = (limit("gcra", "gcra 9/h"), limit("log", "sliding-log 5/h"));
    let store = forbidden(&server, "zadd").await;
    let said = apply(&store, &[(&gcra, "c", 1), (&log, "c", 1)], Op::Acquire, None).await;
    let said = fails(said, ErrorKind::Indeterminate, "done in part");
    assert!(said.contains("ACL SETUSER"), "{said}");
    assert_eq!(keys(&server), [store.key(&gcra, "c")]);
    // If nothing was written before, it is a configuration error.
    fails(acquire(&store, &log, "c").await, ErrorKind::Config, "ACL SETUSER");
}

#[tokio::test]
async fn a_servers_clock_at_the_end_of_time_is_refused_by_name_in_every_mode() {
    /// Past the end by half the time that is left.
    const AHEAD_S: i64 = 3_000_000_000;
    let (server, clock) = RedisServer::start_with_clock().expect("a server and cc");
    clock.set_ahead(AHEAD_S).expect("its directory is there");
    let store = plain(&server).await;
    for words in
        ["gcra 3/s", "fixed-window 3/s", "sliding-log 3/s", "fixed-window 3/s count attempts"]
    {
        let limit = limit("l", words);
        let modes = if words.contains("attempts") { 3 } else { 2 };
        for (_, store) in &in_every_mode(&store)[..modes] {
            fails(acquire(store, &limit, "k").await, ErrorKind::Config, "set the clock");
        }
    }
}

#[tokio::test]
async fn a_limit_that_no_transaction_can_decide_is_refused_by_name() {
    let server = server();
    let store = store(&server.url(), Client::default()).await.in_mode::<Multi>();
    // The one cannot be decided so, and the other would be if it counted attempts.
    for words in
        ["gcra 3/h count attempts", "fixed-window 3/h", "fixed-window 3/month count attempts"]
    {
        let limits = Limits::new([limit("login", words)]).expect("limits");
        let message = "limit \"login\": a transaction charges whatever it reads, and cannot decide this; use \
                    the Lua mode, or count = \"attempts\" (in code: count_attempts()) with one of fixed-window \
                    (whose windows are a length, and none of a calendar), first-request-window, window-log and \
                    sliding-log";
        let built = store.clone().limiter(limits.clone()).map(drop);
        fails(built, ErrorKind::Unsupported, message);
        let error = RateLimiter::new(limits, store.clone()).check("a").await.expect_err(words);
        assert_eq!(error.to_string(), message);
    }

    let limits = Limits::new(native(3)).expect("limits");
    let limiter = store.limiter(limits).expect("all of these");
    let error = limiter.request("a").refund().await.expect_err("charged");
    let message = "there is no refund in the mode of transactions; use the Lua mode";
    assert!(error.to_string().contains(message), "{error}");
}

//! A master that Sentinels name, and its successor.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ratelimit_core::{ErrorKind, StoreError};
use ratelimit_redis::{Argument, Client, Connection, Deadline, RedisConnection, Reply};
use ratelimit_testkit::{FaultProxy, RedisSentinels, RedisServer};
use tokio::sync::{Mutex, MutexGuard};

use super::{
    PATIENCE, acquire, aside, left, replicated, seldom, store, store_within, three_and_no_more,
    until, with_client,
};

/// How long a call may take while servers are down.
const DEADLINE: Duration = Duration::from_millis(500);

/// A master, a replica and three Sentinels, for one test at a time, which finds them healthy.
async fn sentinels() -> Exclusive {
    static SENTINELS: OnceLock<RedisSentinels> = OnceLock::new();
    static ALONE: Mutex<()> = Mutex::const_new(());
    let alone = ALONE.lock().await;
    let sentinels = SENTINELS.get_or_init(|| RedisSentinels::start().expect("sentinels"));
    // A failed test has not tidied up.
    for server in sentinels.servers().iter().chain(sentinels.sentinels()) {
        if server.pid().is_some() {
            server.resume().expect("it runs");
        }
    }
    sentinels.restart_dead().expect("well");
    Exclusive { sentinels, _alone: alone }
}

struct Exclusive {
    sentinels: &'static RedisSentinels,
    _alone: MutexGuard<'static, ()>,
}

impl Exclusive {
    /// Waits until the replica has caught up with the master.
    fn replicate(&self) {
        let master = &self.sentinels.servers()[self.sentinels.master().expect("a master")];
        replicated(master, "any");
    }
}

async fn the_master_that_sentinels_name_decides(client: Client) {
    let all = sentinels().await;
    let store = store(&all.sentinels.url(), client).await;
    three_and_no_more(&store, &seldom(), "named").await;
    let url = with_client(&all.sentinels.url(), client);
    let connection = RedisConnection::open(&url, PATIENCE).await.expect("there is a master");
    assert!(!connection.is_cluster());
    let answers =
        connection.send_to_each(&[Argument::Text("ROLE")], Deadline::within(PATIENCE)).await;
    let [(address, Ok(Reply::Array(role)))] = &answers[..] else { panic!("{answers:?}") };
    assert_eq!(role[0], Reply::Text(b"master".to_vec()));
    let master = all.sentinels.master_port().expect("a master");
    assert_eq!(**address, *format!("127.0.0.1:{master}"));
}

async fn a_killed_master_is_followed_to_the_new_one(client: Client) {
    let all = sentinels().await;
    let store = store_within(DEADLINE, &all.sentinels.url(), client).await.expect("a master");
    assert_eq!(left(&store, &seldom(), "killed").await, 2);
    all.replicate();
    let sentinels = all.sentinels;
    let failover = tokio::task::spawn_blocking(move || sentinels.kill_master());
    let lost = AtomicUsize::new(0);
    let verdict = until(|| {
        let begin = Instant::now();
        let finished = failover.is_finished();
        let (store, lost) = (&store, &lost);
        async move {
            let verdict = acquire(store, &seldom(), "other").await;
            assert!(begin.elapsed() < DEADLINE * 2, "{:?}", begin.elapsed());
            match verdict {
                Ok(_) if !finished => Err("the old one serves still".to_owned()),
                Ok(verdict) => Ok(verdict),
                Err(error) => {
                    let kind = error.kind();
                    lost.fetch_add(
                        usize::from(kind == ErrorKind::Indeterminate),
                        Ordering::Relaxed,
                    );
                    assert!(
                        matches!(kind, ErrorKind::Unavailable | ErrorKind::Indeterminate),
                        "{error}"
                    );
                    Err(error.to_string())
                }
            }
        }
    });
    let _ = verdict.await;
    failover.await.expect("no panic").expect("another master");
    assert!(lost.into_inner() <= 1, "one at a time was on the wire");
    assert_eq!(left(&store, &seldom(), "killed").await, 1, "the new one knows");
    aside(move || sentinels.restart_dead()).await.expect("well");
}

async fn a_demoted_master_is_replaced_by_the_new_one(client: Client) {
    let all = sentinels().await;
    let store = store(&all.sentinels.url(), client).await;
    assert_eq!(left(&store, &seldom(), "demoted").await, 2);
    all.replicate();
    let sentinels = all.sentinels;
    aside(move || sentinels.fail_over()).await.expect("another master");
    let error = match acquire(&store, &seldom(), "demoted").await {
        Ok(verdict) => return assert_eq!(verdict.remaining(), 1),
        Err(error) => error,
    };
    // The Sentinels close the connections of a master that they demote.
    assert_eq!(error.kind(), ErrorKind::Indeterminate, "{error}");
    assert!(left(&store, &seldom(), "demoted").await <= 1);
}

async fn a_master_that_hangs_costs_the_deadline_until_it_is_replaced(client: Client) {
    let all = sentinels().await;
    let store = store_within(DEADLINE, &all.sentinels.url(), client).await.expect("a master");
    assert_eq!(left(&store, &seldom(), "hangs").await, 2);
    all.replicate();
    let master = &all.sentinels.servers()[all.sentinels.master().expect("a master")];
    master.pause().expect("it runs");
    let error = acquire(&store, &seldom(), "hangs").await.expect_err("it hangs");
    assert_eq!(error.kind(), ErrorKind::Indeterminate, "{error}");
    let verdict = until(|| {
        let begin = Instant::now();
        let store = &store;
        async move {
            let verdict = acquire(store, &seldom(), "hangs").await;
            assert!(begin.elapsed() < DEADLINE * 2, "{:?}", begin.elapsed());
            verdict
        }
    });
    assert_eq!(verdict.await.remaining(), 1);
    master.resume().expect("it runs");
    let sentinels = all.sentinels;
    aside(move || sentinels.wait_until_healthy(PATIENCE)).await.expect("well");
    assert_eq!(left(&store, &seldom(), "hangs").await, 0);
}

async fn a_sentinel_that_hangs_or_is_down_does_no_harm(client: Client) {
    let all = sentinels().await;
    let [first, second, _] = all.sentinels.ports()[..] else { panic!("three sentinels") };
    let hangs = FaultProxy::start(first).expect("a proxy");
    hangs.hang(true);
    let away = FaultProxy::start(first).expect("a proxy");
    away.refuse(true);
    let places = [hangs.port(), away.port(), second].map(|port| format!("127.0.0.1:{port}"));
    let begin = Instant::now();
    let store = store(&format!("redis-sentinel://{}", places.join(",")), client).await;
    assert_eq!(left(&store, &seldom(), "some-away").await, 2);
    assert!(begin.elapsed() < PATIENCE / 2, "{:?}", begin.elapsed());
    for url in [hangs.url(), away.url()] {
        let url = url.replace("redis://", "redis-sentinel://");
        let begin = Instant::now();
        let error = store_within(DEADLINE, &url, client).await.expect_err("no sentinel answers");
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(begin.elapsed() < DEADLINE * 2, "{:?}", begin.elapsed());
    }
}

async fn an_unknown_service_or_a_server_that_is_no_sentinel_is_refused_with_the_remedy(
    client: Client,
) {
    let all = sentinels().await;
    let unknown = all.sentinels.url().replace("/mymaster", "/cache");
    let error = store_within(PATIENCE, &unknown, client).await.expect_err("no sentinel knows it");
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    // In a URL without a password, the name may be one.
    assert!(!error.to_string().contains("cache"), "{error}");
    assert!(error.to_string().contains("watches no service of the name in the URL"), "{error}");
    assert!(error.to_string().contains("SENTINEL MASTERS"), "{error}");
    let server = RedisServer::start().expect("redis-server");
    let url = format!("redis-sentinel://127.0.0.1:{}", server.port());
    let error = store_within(PATIENCE, &url, client).await.expect_err("no sentinel");
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(error.to_string().contains("is no sentinel"), "{error}");
}

async fn servers_and_sentinels_have_logins_of_their_own(client: Client) {
    let binary = &RedisServer::binaries()[0];
    let sentinels = RedisSentinels::start_with(binary, &["--requirepass", "s3cret"]);
    let sentinels = sentinels.expect("sentinels");
    let url = sentinels.url().replace("//", "//:s3cret@");
    let open = store(&url, client).await;
    assert_eq!(left(&open, &seldom(), "a").await, 2);
    let error = store_within(PATIENCE, &sentinels.url(), client).await.expect_err("no password");
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");

    for sentinel in sentinels.sentinels() {
        let rules = ["ACL", "SETUSER", "asks", "on", ">wh3re", "+@all"];
        sentinel.command(&rules).expect("it is up").ok().expect("a user");
    }
    let locked = format!("{url}?sentinel-user=asks&sentinel-password=wh3re");
    assert_eq!(left(&store(&locked, client).await, &seldom(), "a").await, 1);
    let error = store_within(PATIENCE, &locked.replace("wh3re", "n0where"), client).await;
    let error = error.expect_err("a wrong password");
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(error.to_string().contains("sentinel-password="), "{error}");
    assert!(!error.to_string().contains("n0where"), "{error}");
}

async fn a_request_with_a_lost_reply_was_executed_once(client: Client) {
    let all = sentinels().await;
    let master = &all.sentinels.servers()[all.sentinels.master().expect("a master")];
    let proxy = FaultProxy::start(master.port()).expect("a proxy");
    let service = format!("proxied-{client}");
    let port = proxy.port().to_string();
    for sentinel in all.sentinels.sentinels() {
        let monitor = ["SENTINEL", "MONITOR", &service, "127.0.0.1", &port, "2"];
        sentinel.command(&monitor).expect("it is up").ok().expect("watched");
    }
    let store = store(&all.sentinels.url().replace("mymaster", &service), client).await;
    let key = format!("swallowed-{client}");
    assert_eq!(left(&store, &seldom(), &key).await, 2);
    proxy.swallow_matching("EVALSHA", 1);
    let error = acquire(&store, &seldom(), &key).await.expect_err("no answer");
    assert_eq!((error.kind(), proxy.swallowed()), (ErrorKind::Indeterminate, 1), "{error}");
    assert_eq!(left(&store, &seldom(), &key).await, 0, "charged, and once");
    for sentinel in all.sentinels.sentinels() {
        sentinel.command(&["SENTINEL", "REMOVE", &service]).expect("it is up").ok().expect("OK");
    }
}

with_each_client! {
    the_master_that_sentinels_name_decides,
    a_killed_master_is_followed_to_the_new_one,
    a_demoted_master_is_replaced_by_the_new_one,
    a_master_that_hangs_costs_the_deadline_until_it_is_replaced,
    a_sentinel_that_hangs_or_is_down_does_no_harm,
    an_unknown_service_or_a_server_that_is_no_sentinel_is_refused_with_the_remedy,
    servers_and_sentinels_have_logins_of_their_own,
    a_request_with_a_lost_reply_was_executed_once,
}

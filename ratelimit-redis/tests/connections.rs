//! What callers cost a server that hangs, refuses, or comes and goes, and what it costs them: one
//! connector per server, one deadline per decision, and a connection that is replaced when it has gone
//! silent, not before.

#![cfg(unix)]
#![allow(clippy::expect_used, clippy::panic, missing_docs, reason = "tests")]

#[macro_use]
mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::{url, with_client};
use ratelimit_core::{
    Batch, Check, ErrorKind, Gcra, Limit, Op, Policy, Refusal, ReservationId, Store, StoreError,
    Verdict,
};
use ratelimit_redis::{
    Argument, Cas, Client, Connection, Deadline, RedisConnection, RedisError, RedisStore, Reply,
};
use ratelimit_testkit::{FaultProxy, RedisCluster, RedisSentinels, RedisServer};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

/// Longer than any step here takes, unless it hangs.
const PATIENCE: Duration = Duration::from_secs(20);
/// Of a decision while a runtime stands still, which a caller of another notices after half of it.
const DEADLINE: Duration = Duration::from_secs(4);

fn limit(name: &str) -> Limit<Policy> {
    let gcra = Gcra::new("3/3650d".parse().expect("a rate"), 3).expect("a limit");
    Limit::new(name, gcra.into()).expect("a name")
}

async fn acquire<S>(store: &S, key: &str) -> Result<Verdict, RedisError>
where
    S: Store<Policy, Error = RedisError>,
{
    let limit = limit("seldom");
    store.apply(&Batch::one(&Check { limit: &limit, key, cost: 1 })).await
}

/// A server that accepts connections and never completes a login.
struct NoServer {
    port: u16,
    connects: Arc<AtomicUsize>,
}

impl NoServer {
    /// Says nothing, or closes at once, as a balancer without a server behind it does.
    async fn start(says_nothing: bool) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let port = listener.local_addr().expect("bound").port();
        let connects = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&connects);
        tokio::spawn(async move {
            let mut open = Vec::new();
            while let Ok((stream, _)) = listener.accept().await {
                count.fetch_add(1, Ordering::SeqCst);
                open.extend(says_nothing.then_some(stream));
            }
        });
        Self { port, connects }
    }

    fn lazy_store(&self, client: Client, deadline: Duration) -> RedisStore {
        let url = with_client(&format!("redis://127.0.0.1:{}", self.port), client);
        RedisStore::builder().deadline(deadline).connect_lazy(&url).expect("a URL")
    }

    /// Sends this many requests in a row from each of this many callers, and waits for all.
    async fn asked_by(store: RedisStore, callers: usize, times: usize) {
        let mut tasks = JoinSet::new();
        for _ in 0..callers {
            let store = store.clone();
            tasks.spawn(async move {
                for _ in 0..times {
                    let error = acquire(&store, "a").await.expect_err("no server is there");
                    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
                    tokio::task::yield_now().await;
                }
            });
        }
        tasks.join_all().await;
    }
}

async fn a_thousand_callers_of_a_silent_server_connect_a_few_times(client: Client) {
    let server = NoServer::start(true).await;
    let store = server.lazy_store(client, Duration::from_millis(200));
    tokio::time::pause();
    // It would take five seconds if every call waited for its deadline.
    NoServer::asked_by(store.clone(), 1_000, 25).await;
    assert!(server.connects.load(Ordering::SeqCst) <= 3, "{:?}", server.connects);
    // A known failure is returned at once.
    let begun = Instant::now();
    acquire(&store, "a").await.expect_err("no server is there");
    assert_eq!(begun.elapsed(), Duration::ZERO);
}

async fn callers_do_not_each_connect_to_a_balancer_that_closes(client: Client) {
    let server = NoServer::start(false).await;
    let store = server.lazy_store(client, PATIENCE);
    NoServer::asked_by(store, 1_000, 20).await;
    // A few in the first second, and one or two in each later one.
    assert!(server.connects.load(Ordering::SeqCst) <= 60, "{:?}", server.connects);
}

async fn short_deadlines_do_not_prevent_a_connection(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let proxy = FaultProxy::start(server.port()).expect("a proxy");
    proxy.hang(true);
    let builder = RedisStore::builder().deadline(Duration::from_millis(50));
    let store = builder.connect_lazy(&with_client(&proxy.url(), client)).expect("a URL");
    for _ in 0..5 {
        let error = acquire(&store, "a").await.expect_err("it takes longer");
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    }
    proxy.hang(false);
    let again = async { while acquire(&store, "a").await.is_err() {} };
    timeout(PATIENCE, again).await.expect("connected");
    assert!(proxy.connections() <= 2, "the attempt went on: {}", proxy.connections());
}

async fn a_lazy_store_is_built_while_redis_is_down_and_health_says_so(client: Client) {
    let mut server = RedisServer::start().expect("redis-server");
    let url = url(&server, client);
    server.stop();
    RedisStore::connect(&url).await.expect_err("to connect is to fail, with the reason");
    let store = RedisStore::builder().connect_lazy(&url).expect("a URL");
    let error = acquire(&store, "a").await.expect_err("it is away");
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    let health = store.health().await;
    assert!(!health.is_ready());
    let message = health.findings()[0].to_string();
    assert!(message.contains(&format!("127.0.0.1:{}", server.port())), "{message}");
    server.restart().expect("redis-server");
    let again = async { while acquire(&store, "a").await.is_err() {} };
    timeout(PATIENCE, again).await.expect("it is there");
    assert!(store.health().await.is_ready());
    // A cluster and Sentinels get no request either.
    for kind in ["redis-cluster", "redis-sentinel"] {
        let url = with_client(&format!("{kind}://127.0.0.1:1"), client);
        let store = RedisStore::builder().connect_lazy(&url).expect("a URL");
        let error = acquire(&store, "a").await.expect_err("no server is there");
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(!store.health().await.is_ready(), "{kind}");
    }
}

/// In every mode alike: there is nothing to ask a server.
#[tokio::test]
async fn a_batch_without_checks_needs_no_server() {
    let url = "redis://127.0.0.1:1";
    let none: [Check<'_, Policy>; 0] = [];
    let batch = Batch::new(&none).expect("no key stands twice");
    let settling = batch.op(Op::Settle).id(ReservationId::new(1));
    let builder = RedisStore::builder();
    let lua = builder.clone().connect_lazy(url).expect("a URL");
    let cas = builder.clone().cas().connect_lazy(url).expect("a URL");
    let multi = builder.multi().connect_lazy(url).expect("a URL");
    assert!(lua.apply(&batch).await.expect("no server is needed").allowed());
    assert!(cas.apply(&batch).await.expect("no server is needed").allowed());
    assert!(multi.apply(&batch).await.expect("no server is needed").allowed());
    for error in [
        lua.apply(&settling).await.expect_err("no such reservation"),
        cas.apply(&settling).await.expect_err("no such reservation"),
    ] {
        assert!(
            matches!(error, RedisError::Refused(Refusal::UnknownReservation { .. })),
            "{error}"
        );
    }
}

/// A connection to a proxy, which sends PINGs.
struct Pinging(RedisConnection);

impl Pinging {
    fn to(proxy: &FaultProxy, client: Client, limit: Duration) -> Self {
        let url = with_client(&proxy.url(), client);
        Self(RedisConnection::lazy(&url, limit).expect("a URL"))
    }

    async fn ping(&self, deadline: Duration) -> Result<Reply, RedisError> {
        self.0.send("", &[Argument::Text("PING")], Deadline::within(deadline)).await
    }
}

async fn one_timeout_does_not_end_the_shared_connection(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let proxy = FaultProxy::start(server.port()).expect("a proxy");
    let connection = Pinging::to(&proxy, client, PATIENCE);
    connection.ping(PATIENCE).await.expect("it is up");
    proxy.hang(true);
    for _ in 0..5 {
        let error = connection.ping(Duration::from_millis(20)).await.expect_err("it hangs");
        assert!(matches!(error, RedisError::TimedOut { .. }), "{error}");
    }
    proxy.hang(false);
    connection.ping(PATIENCE).await.expect("it goes on");
    assert_eq!(proxy.connections(), 1);
}

async fn a_silent_connection_is_replaced(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    for waits in [true, false] {
        let proxy = FaultProxy::start(server.port()).expect("a proxy");
        let limit = Duration::from_millis(200);
        let connection = Pinging::to(&proxy, client, limit);
        connection.ping(PATIENCE).await.expect("it is up");
        proxy.hang(true);
        let left = async {
            while proxy.connections() == 1 {
                if waits {
                    connection.ping(limit).await.expect_err("it hangs");
                } else {
                    // No caller ever waits until the deadline.
                    let asked = timeout(limit / 10, connection.ping(PATIENCE));
                    assert!(!asked.await.is_ok_and(|answer| answer.is_ok()), "it hangs");
                }
            }
        };
        timeout(PATIENCE, left).await.expect("another connection");
        proxy.hang(false);
        connection.ping(PATIENCE).await.expect("the next one serves");
    }
}

async fn an_expired_request_is_not_sent(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let proxy = FaultProxy::start(server.port()).expect("a proxy");
    let connection = Pinging::to(&proxy, client, PATIENCE);
    connection.ping(PATIENCE).await.expect("it is up");
    let words = ["SET", "a", "1"].map(Argument::Text);
    let error = connection.0.send("a", &words, Deadline::within(Duration::ZERO)).await;
    assert_eq!(error.expect_err("too late").kind(), ErrorKind::Unavailable);
    connection.ping(PATIENCE).await.expect("it is up");
    let stored = server.command(&["EXISTS", "a"]).expect("it is up");
    assert_eq!(stored, ratelimit_testkit::RespValue::Integer(0));
}

/// A thousand callers wait for a shard that hangs, and two hundred use the others.
async fn a_hanging_shard_does_not_delay_the_others(client: Client) {
    let cluster = RedisCluster::start_behind_proxies().expect("a cluster");
    let builder = RedisStore::builder().deadline(PATIENCE);
    let store = builder.connect(&with_client(&cluster.url(), client)).await.expect("a cluster");
    let owner = |key: &str| cluster.master_of(cluster.slot_of(key));
    let hangs = owner("a").expect("an owner");
    let keys = (0..1_000).map(|n| format!("k{n}")).collect::<Vec<_>>();
    let (hung, healthy): (Vec<_>, Vec<_>) =
        keys.into_iter().partition(|key| owner(key) == Ok(hangs));
    // Every shard has had a request.
    for key in hung.iter().take(1).chain(healthy.iter().take(50)) {
        let _ = acquire(&store, key).await.expect("decides");
    }
    cluster.proxies()[hangs].hang(true);
    let mut waiting = JoinSet::new();
    for n in 0..1_000 {
        let (store, key) = (store.clone(), hung[n % hung.len()].clone());
        waiting.spawn(async move { acquire(&store, &key).await.is_ok() });
    }
    tokio::task::yield_now().await;
    let mut deciding = JoinSet::new();
    for key in healthy.into_iter().skip(50).take(200) {
        let store = store.clone();
        deciding.spawn(async move { acquire(&store, &key).await.is_ok() });
    }
    assert!(deciding.join_all().await.into_iter().all(|decided| decided));
    assert!(waiting.try_join_next().is_none(), "it hangs for all of its callers");
    cluster.proxies()[hangs].hang(false);
    // No request had to be given up.
    assert!(waiting.join_all().await.into_iter().all(|decided| decided));
}

with_each_client! {
    a_hanging_shard_does_not_delay_the_others,
    a_thousand_callers_of_a_silent_server_connect_a_few_times,
    callers_do_not_each_connect_to_a_balancer_that_closes,
    short_deadlines_do_not_prevent_a_connection,
    a_lazy_store_is_built_while_redis_is_down_and_health_says_so,
    one_timeout_does_not_end_the_shared_connection,
    a_silent_connection_is_replaced,
    an_expired_request_is_not_sent,
    a_runtime_that_stands_still_holds_up_no_other,
    a_look_up_on_a_runtime_that_stands_still_begins_anew,
    the_given_runtime_connects,
}

/// A runtime of one thread, which runs its tasks only while a thread drives it.
fn runtime() -> Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}

/// Runs this on a thread of its own: the caller's runtime may not block.
async fn on_its_own<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(work).await.expect("no panic")
}

/// A runtime that is kept and not driven, a driven one that uses the same store meanwhile, and the first one again.
async fn a_runtime_that_stands_still_holds_up_no_other(client: Client) {
    on_its_own(move || {
        let server = RedisServer::start().expect("redis-server");
        let proxy = FaultProxy::start(server.port()).expect("a proxy");
        let url = with_client(&proxy.url(), client);
        let builder = RedisStore::builder().deadline(DEADLINE);
        let left = |verdict: Result<Verdict, RedisError>| verdict.expect("decided").remaining();

        // Its connection stays on the first caller's runtime.
        let (idle, driven) = (runtime(), runtime());
        let store = idle.block_on(builder.clone().connect(&url)).expect("it is up");
        assert_eq!(left(idle.block_on(acquire(&store, "connected"))), 2);
        assert_eq!(left(driven.block_on(acquire(&store, "connected"))), 1);
        assert_eq!(left(idle.block_on(acquire(&store, "connected"))), 0);

        // The attempt to connect began there.
        let (idle, driven) = (runtime(), runtime());
        let store = builder.connect_lazy(&url).expect("a URL");
        proxy.hang(true);
        let brief = Duration::from_millis(10);
        idle.block_on(async { timeout(brief, acquire(&store, "lazy")).await })
            .expect_err("it hangs");
        proxy.hang(false);
        assert_eq!(left(driven.block_on(acquire(&store, "lazy"))), 2);
        drop(idle);
        // That runtime ends, and another caller's takes over.
        assert_eq!(left(driven.block_on(acquire(&store, "lazy"))), 1);
        drop(driven);
        assert_eq!(left(runtime().block_on(acquire(&store, "lazy"))), 0);
    })
    .await;
}

/// The same for the look-up of a master and of a cluster's slots.
async fn a_look_up_on_a_runtime_that_stands_still_begins_anew(client: Client) {
    on_its_own(move || {
        let binary = &RedisServer::binaries()[0];
        let node = RedisServer::start_with(binary, &["--cluster-enabled", "yes"]);
        let node = node.expect("redis-server");
        let given = node.command(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
        given.expect("it is up").ok().expect("all slots");
        let sentinels = RedisSentinels::start().expect("sentinels");
        let service = format!("/{}", sentinels.service());
        for (kind, port, service) in [
            ("redis-cluster", node.port(), ""),
            ("redis-sentinel", sentinels.ports()[0], &*service),
        ] {
            let proxy = FaultProxy::start(port).expect("a proxy");
            let url = proxy.url().replace("redis:", &format!("{kind}:")) + service;
            let store = RedisStore::builder().deadline(DEADLINE);
            let store = store.connect_lazy(&with_client(&url, client)).expect("a URL");
            let (idle, driven) = (runtime(), runtime());
            proxy.hang(true);
            let brief = Duration::from_millis(10);
            idle.block_on(async { timeout(brief, acquire(&store, "a")).await })
                .expect_err("it hangs");
            proxy.hang(false);
            let verdict = driven.block_on(acquire(&store, "a"));
            assert_eq!(verdict.expect("decided").remaining(), 2, "{url}");
        }
    })
    .await;
}

/// Shared work starts on the runtime that the builder was given, whoever calls first.
async fn the_given_runtime_connects(client: Client) {
    on_its_own(move || {
        let server = RedisServer::start().expect("redis-server");
        let proxy = FaultProxy::start(server.port()).expect("a proxy");
        let mut given = tokio::runtime::Builder::new_multi_thread();
        let given = given.worker_threads(1).enable_all().build().expect("a runtime");
        let builder = RedisStore::builder().deadline(DEADLINE).runtime(given.handle().clone());
        let url = with_client(&proxy.url(), client);
        let store = runtime().block_on(builder.connect(&url)).expect("it is up");
        // The runtimes of the callers end, and the connection does not.
        for due in [2, 1, 0] {
            let verdict = runtime().block_on(acquire(&store, "a")).expect("decided");
            assert_eq!((verdict.remaining(), proxy.connections()), (due, 1));
        }
        drop(given);
        let verdict = runtime().block_on(acquire(&store, "a")).expect("decided");
        assert!(!verdict.allowed());
    })
    .await;
}

/// A server that takes a fixed time per command, and knows no script.
struct Slow {
    address: Arc<str>,
    takes: Duration,
    sent: AtomicUsize,
}

impl Slow {
    fn new(takes: Duration) -> Arc<Self> {
        Arc::new(Self { address: "slow:1".into(), takes, sent: AtomicUsize::new(0) })
    }

    async fn answer(
        &self,
        words: &[Argument<'_>],
        deadline: Deadline,
    ) -> Result<Reply, RedisError> {
        let address = || Arc::clone(&self.address);
        if deadline.is_over() {
            return Err(RedisError::Unreachable { address: address(), reason: "too late".into() });
        }
        self.sent.fetch_add(1, Ordering::SeqCst);
        if tokio::time::timeout_at(deadline.at(), sleep(self.takes)).await.is_err() {
            return Err(RedisError::TimedOut { address: address(), deadline: deadline.given() });
        }
        match words {
            [Argument::Text("TIME"), ..] => {
                Ok(Reply::Array(vec![Reply::Integer(1), Reply::Integer(0)]))
            }
            [Argument::Text("EVALSHA"), ..] => Err(RedisError::Server {
                address: address(),
                code: "NOSCRIPT".into(),
                message: "No matching script.".into(),
            }),
            _ => Ok(Reply::Nil),
        }
    }
}

impl Connection for Slow {
    async fn send(
        &self,
        _: &str,
        words: &[Argument<'_>],
        deadline: Deadline,
    ) -> Result<Reply, RedisError> {
        self.answer(words, deadline).await
    }

    async fn transaction(
        &self,
        _: &str,
        commands: &[Vec<Argument<'_>>],
        deadline: Deadline,
    ) -> Result<Vec<Reply>, RedisError> {
        let answer = self.answer(&[], deadline).await?;
        Ok(commands.iter().map(|_| answer.clone()).collect())
    }

    async fn send_to_each(
        &self,
        words: &[Argument<'_>],
        deadline: Deadline,
    ) -> Vec<(Arc<str>, Result<Reply, RedisError>)> {
        vec![(Arc::clone(&self.address), self.answer(words, deadline).await)]
    }

    fn is_cluster(&self) -> bool {
        false
    }

    fn address(&self) -> &Arc<str> {
        &self.address
    }
}

#[tokio::test(start_paused = true)]
async fn a_decision_has_one_deadline_however_many_commands_it_takes() {
    const DEADLINE: Duration = Duration::from_millis(100);
    let limits: Vec<_> = ["a", "b", "c", "d", "e"].map(limit).into();
    let checks: Vec<_> =
        limits.iter().map(|limit| Check { limit, key: "alice", cost: 1 }).collect();
    let batch = Batch::new(&checks).expect("different limits");
    let takes = Duration::from_millis(60);

    let connection = Slow::new(takes);
    let store = RedisStore::builder().deadline(DEADLINE).over(Arc::clone(&connection));
    let store = store.expect("a prefix");
    let begun = Instant::now();
    let error = store.apply(&batch).await.expect_err("the script has to be sent anew");
    assert_eq!((error.kind(), begun.elapsed()), (ErrorKind::Indeterminate, DEADLINE), "{error}");
    assert_eq!(connection.sent.load(Ordering::SeqCst), 2);

    // The reads of five states and the time are concurrent; then the script that writes is pending.
    connection.sent.store(0, Ordering::SeqCst);
    let begun = Instant::now();
    let error = store.in_mode::<Cas>().apply(&batch).await.expect_err("it takes longer");
    assert_eq!((error.kind(), begun.elapsed()), (ErrorKind::Indeterminate, DEADLINE), "{error}");
    assert_eq!(connection.sent.load(Ordering::SeqCst), 7);

    let exactly = Slow::new(DEADLINE / 2);
    let store = RedisStore::builder().deadline(DEADLINE).over(Arc::clone(&exactly));
    let cas = store.expect("a prefix").in_mode::<Cas>();
    let begun = Instant::now();
    let error = cas.apply(&batch).await.expect_err("no time is left to send the script anew");
    // Nothing has been written yet.
    assert_eq!((error.kind(), begun.elapsed()), (ErrorKind::Unavailable, DEADLINE), "{error}");
    assert_eq!(exactly.sent.load(Ordering::SeqCst), 7);
}

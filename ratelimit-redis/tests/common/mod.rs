//! What the tests on servers share: servers and stores on them, the words in which tests ask, and
//! connections that interfere.

#![allow(dead_code, unused_macros, unused_imports, reason = "not every program needs all of it")]

mod meddling;

pub(crate) use meddling::{Fate, MeddlingConnection, Slow, Words};

/// All of it, and the types that most tests name.
pub(crate) mod prelude {
    pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
    pub(crate) use std::sync::{Arc, Mutex};
    pub(crate) use std::time::{Duration, Instant};

    pub(crate) use ratelimit_core::store::{Batch, Check, Now, Op};
    pub(crate) use ratelimit_core::{
        Algorithm, AnyAlgorithm, DynStore, ErrorKind, Limit, Limits, ReservationId, Store,
        StoreError, Timestamp, Verdict,
    };
    pub(crate) use ratelimit_redis::{
        Argument, Builder, Cas, Client, Connection, Deadline, Lua, Mode, Multi, RedisConnection,
        RedisError, RedisStore, Reply,
    };
    pub(crate) use ratelimit_servers::{
        FaultProxy, RedisCluster, RedisSentinels, RedisServer, RespValue,
    };
    pub(crate) use tokio::runtime::Runtime;
    pub(crate) use tokio::task::{JoinHandle, JoinSet, yield_now};
    pub(crate) use tokio::time::timeout;

    pub(crate) use super::*;
}

use std::fmt::Display;
use std::future::Future;
use std::time::SystemTime;

use ratelimit_redis::Health;
pub(crate) use ratelimit_testkit::limit_in_words as limit;

use prelude::*;

/// Longer than any step takes, unless it hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// The algorithms that a transaction can decide, if they count attempts.
pub(crate) const NATIVE: [&str; 4] =
    ["fixed-window", "first-request-window", "window-log", "sliding-log"];

/// The text of a policy of so many in ten years: nothing refills while a test runs, and no window
/// ends.
fn slow(name: &str, count: u64) -> String {
    match name {
        "bucketed-window" => format!("{name} bucket 10d rates {count}/3650d, {}/7300d", 3 * count),
        "lockout" => format!("{name} {count}/3650d block 3650d"),
        _ => format!("{name} {count}/3650d"),
    }
}

/// Limits of every algorithm, named by it, of so many in ten years.
pub(crate) fn every(count: u64) -> Vec<Limit<AnyAlgorithm>> {
    AnyAlgorithm::NAMES.iter().map(|name| limit(name, &slow(name, count))).collect()
}

/// Those that every mode can decide.
pub(crate) fn native(count: u64) -> Vec<Limit<AnyAlgorithm>> {
    let attempts = |name: &&str| limit(name, &format!("{} count attempts", slow(name, count)));
    NATIVE.iter().map(attempts).collect()
}

/// The time in microseconds. The servers run on this machine and have the same clock.
pub(crate) fn now_us() -> u64 {
    let since = SystemTime::UNIX_EPOCH.elapsed().expect("after 1970");
    u64::try_from(since.as_micros()).expect("before the year 500,000")
}

/// A time in microseconds, given with a request.
pub(crate) fn at(us: u64) -> Now {
    Now::At(Timestamp::from_us(us).expect("a time"))
}

/// What a store says of its servers, a line per finding.
pub(crate) fn findings_in_words(health: &Health) -> String {
    health.findings().iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

pub(crate) fn named<A: Algorithm>(name: &str, algorithm: A) -> Limit<A> {
    Limit::new(name, algorithm).expect("a name")
}

/// Three in ten years.
pub(crate) fn seldom() -> Limit<AnyAlgorithm> {
    limit("seldom", &slow("gcra", 3))
}

/// A limit whose state has its own key.
pub(crate) fn logged() -> Limit<AnyAlgorithm> {
    limit("logged", &slow("sliding-log", 3))
}

/// A limit that every mode can decide.
pub(crate) fn attempts() -> Limit<AnyAlgorithm> {
    limit("attempts", "fixed-window 3/3650d count attempts")
}

/// A prefix that no other test has, for the servers that all share.
pub(crate) fn prefix() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("test{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

pub(crate) fn server() -> RedisServer {
    server_with(&[])
}

pub(crate) fn server_with(args: &[&str]) -> RedisServer {
    RedisServer::start_with(&RedisServer::binaries()[0], args).expect("redis-server")
}

/// A proxy before what listens on a port.
pub(crate) fn proxy_of(port: u16) -> FaultProxy {
    FaultProxy::start(port).expect("a proxy")
}

/// A server, and a proxy before it.
pub(crate) fn server_behind_proxy() -> (RedisServer, FaultProxy) {
    let server = server();
    let proxy = proxy_of(server.port());
    (server, proxy)
}

/// A runtime of one thread, which runs its tasks only while a thread drives it.
pub(crate) fn runtime() -> Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}

/// A runtime that runs its tasks by itself.
pub(crate) fn driven_runtime() -> Runtime {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(1).enable_all().build().expect("a runtime")
}

/// Gives a user these permissions on some servers.
pub(crate) fn permit(servers: &[RedisServer], user: &str, password: &str, rights: &str) {
    let password = format!(">{password}");
    let mut words = vec!["ACL", "SETUSER", user, "reset", "on", &password];
    words.extend(rights.split_whitespace());
    for server in servers {
        tell(server, &words);
    }
}

/// The URL by which a user with these permissions comes in.
pub(crate) fn login(servers: &[RedisServer], url: &str, rights: &str) -> String {
    permit(servers, "limiter", "s3cret", rights);
    url.replace("://", "://limiter:s3cret@")
}

/// Sends a command beside the store, which succeeds.
pub(crate) fn tell(server: &RedisServer, words: &[&str]) -> RespValue {
    let answer = server.command(words).expect("it is up");
    answer.ok().unwrap_or_else(|error| panic!("{words:?}: {error}"))
}

/// The number that the server answers.
pub(crate) fn number(server: &RedisServer, words: &[&str]) -> i64 {
    tell(server, words).as_integer().unwrap_or_else(|| panic!("{words:?}: a number"))
}

/// All keys, in order.
pub(crate) fn keys(server: &RedisServer) -> Vec<String> {
    let keys = tell(server, &["KEYS", "*"]);
    let mut keys: Vec<_> =
        keys.as_array().iter().map(|key| key.as_text().expect("text").to_owned()).collect();
    keys.sort();
    keys
}

/// The keys of a prefix that live for longer than so many milliseconds, each with its time to live.
pub(crate) const OUTLIVING: &str = "local kept = {} \
    for _, key in ipairs(redis.call('KEYS', ARGV[1] .. ':*')) do \
    local ttl = redis.call('PTTL', key) if ttl == -1 or ttl > tonumber(ARGV[2]) then \
    kept[#kept + 1] = key .. ' lives for ' .. ttl .. ' ms' end end return kept";

/// How much longer than its state a key of a patient store lives: where it is compared before it is
/// written, as long as a request may take.
pub(crate) fn kept_longer<M: Mode>() -> Duration {
    if M::NAME == Cas::NAME { PATIENCE } else { Duration::ZERO }
}

/// The keys of a store that live for longer than this.
pub(crate) fn outliving(server: &RedisServer, prefix: &str, within_ms: u128) -> Vec<String> {
    let kept = tell(server, &["EVAL", OUTLIVING, "0", prefix, &within_ms.to_string()]);
    kept.as_array().iter().map(ToString::to_string).collect()
}

/// This URL with one option more.
pub(crate) fn with_option(url: &str, option: &str) -> String {
    format!("{url}{}{option}", if url.contains('?') { '&' } else { '?' })
}

/// This URL, for a store with this client.
pub(crate) fn with_client(url: &str, client: Client) -> String {
    with_option(url, &format!("client={client}"))
}

/// A store with this client, whose keys differ from the other client's.
pub(crate) async fn store(url: &str, client: Client) -> RedisStore {
    store_within(PATIENCE, url, client).await.expect("the servers are up")
}

pub(crate) async fn store_within(
    deadline: Duration,
    url: &str,
    client: Client,
) -> Result<RedisStore, RedisError> {
    let builder = RedisStore::builder().prefix(client.name()).deadline(deadline);
    builder.connect(&with_client(url, client)).await
}

/// A patient store of the default client and prefix.
pub(crate) async fn plain(server: &RedisServer) -> RedisStore {
    RedisStore::builder().deadline(PATIENCE).connect(&server.url()).await.expect("it is up")
}

/// A connection to interfere with.
pub(crate) async fn meddling_connection(server: &RedisServer) -> MeddlingConnection {
    MeddlingConnection::new(RedisConnection::open(&server.url(), PATIENCE).await.expect("it is up"))
}

/// A store over a connection that interferes.
pub(crate) fn over<M: Mode>(
    builder: Builder<M>,
    connection: MeddlingConnection,
) -> RedisStore<M, MeddlingConnection> {
    builder.over(connection).expect("a prefix")
}

/// A store in every mode, by the mode's name.
pub(crate) fn in_every_mode<C: Connection>(
    store: &RedisStore<Lua, C>,
) -> [(&'static str, Arc<dyn DynStore<AnyAlgorithm>>); 3] {
    let (cas, multi) = (store.in_mode::<Cas>(), store.in_mode::<Multi>());
    [
        (Lua::NAME, Arc::new(store.clone())),
        (Cas::NAME, Arc::new(cas)),
        (Multi::NAME, Arc::new(multi)),
    ]
}

/// Applies an operation to each limit and key at a cost.
pub(crate) async fn apply<A: Algorithm, S: Store<A>>(
    store: &S,
    checks: &[(&Limit<A>, &str, u64)],
    op: Op,
    id: Option<u128>,
) -> Result<Verdict, S::Error> {
    apply_at(store, checks, op, id, Now::Store).await
}

/// The same, at a time.
pub(crate) async fn apply_at<A: Algorithm, S: Store<A>>(
    store: &S,
    checks: &[(&Limit<A>, &str, u64)],
    op: Op,
    id: Option<u128>,
    now: Now,
) -> Result<Verdict, S::Error> {
    let checks: Vec<_> =
        checks.iter().map(|(limit, key, cost)| Check { limit, key, cost: *cost }).collect();
    let batch = Batch::new(&checks).expect("distinct").op(op).now(now);
    store.apply(&id.map_or(batch, |id| batch.id(ReservationId::new(id)))).await
}

/// Applies an operation that has to be admitted.
pub(crate) async fn apply_admitted<A: Algorithm, S: Store<A>>(
    store: &S,
    checks: &[(&Limit<A>, &str, u64)],
    op: Op,
    id: Option<u128>,
) -> Verdict {
    let verdict = apply(store, checks, op, id).await;
    let verdict = verdict.unwrap_or_else(|error| panic!("{op} {}: {error}", checks[0].1));
    assert!(verdict.allowed(), "{op} {}", checks[0].1);
    verdict
}

pub(crate) async fn acquire<A: Algorithm, S: Store<A>>(
    store: &S,
    limit: &Limit<A>,
    key: &str,
) -> Result<Verdict, S::Error> {
    apply(store, &[(limit, key, 1)], Op::Acquire, None).await
}

/// What remains after a request that has to be decided.
pub(crate) async fn remaining_after_acquire<A: Algorithm, S: Store<A>>(
    store: &S,
    limit: &Limit<A>,
    key: &str,
) -> u64 {
    acquire(store, limit, key).await.unwrap_or_else(|error| panic!("{key}: {error}")).remaining()
}

/// What remains without one.
pub(crate) async fn peek<A: Algorithm, S: Store<A>>(store: &S, limit: &Limit<A>, key: &str) -> u64 {
    apply(store, &[(limit, key, 0)], Op::Peek, None).await.expect("it answers").remaining()
}

/// Three requests are admitted and a fourth is denied.
pub(crate) async fn three_and_no_more<A: Algorithm, S: Store<A>>(
    store: &S,
    limit: &Limit<A>,
    key: &str,
) {
    for due in [2, 1, 0] {
        assert_eq!(
            remaining_after_acquire(store, limit, key).await,
            due,
            "{} of {key}",
            limit.name()
        );
    }
    assert!(!acquire(store, limit, key).await.expect("decided").allowed(), "{key}");
}

/// The error is of this kind and says this.
#[track_caller]
pub(crate) fn fails<T>(answer: Result<T, impl StoreError>, kind: ErrorKind, says: &str) -> String {
    let error = answer.err().unwrap_or_else(|| panic!("not refused: {kind:?}, {says}"));
    let said = error.to_string();
    assert!(error.kind() == kind && said.contains(says), "{kind:?}, {says}: {error:?}: {said}");
    said
}

/// Repeats the attempt until it succeeds.
pub(crate) async fn until<T, E: Display>(mut attempt: impl AsyncFnMut() -> Result<T, E>) -> T {
    let begin = Instant::now();
    loop {
        match attempt().await {
            Ok(done) => return done,
            Err(error) => assert!(begin.elapsed() < PATIENCE, "still: {error}"),
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Runs work that blocks on servers without blocking the connections.
pub(crate) async fn aside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(work).await.expect("no panic")
}

/// Runs each of these cases with each available client.
macro_rules! with_each_client {
    ($($case:ident),* $(,)?) => {
        #[cfg(feature = "redis")]
        mod by_redis {
            $(
                #[tokio::test]
                async fn $case() {
                    super::$case(ratelimit_redis::Client::Redis).await;
                }
            )*
        }

        #[cfg(feature = "fred")]
        mod by_fred {
            $(
                #[tokio::test]
                async fn $case() {
                    super::$case(ratelimit_redis::Client::Fred).await;
                }
            )*
        }
    };
}

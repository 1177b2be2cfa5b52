//! What callers cost a server that hangs, refuses, or comes and goes, and what it costs them: one
//! connector per server, one deadline per decision, and a connection that is replaced when it has
//! gone silent, not before.

use futures_util::future::join_all;
use tokio::net::TcpListener;
use tokio::time::Instant;

use crate::common::prelude::*;

fn lazy(url: &str, client: Client, deadline: Duration) -> RedisStore {
    let builder = RedisStore::builder().deadline(deadline);
    builder.connect_lazy(&with_client(url, client)).expect("a URL")
}

async fn is_away(store: &RedisStore) {
    fails(acquire(store, &seldom(), "a").await, ErrorKind::Unavailable, "");
}

/// A server that accepts connections and never completes a login.
struct NoServer {
    url: String,
    connects: Arc<AtomicUsize>,
}

impl NoServer {
    /// Says nothing, or closes at once, as a balancer without a server behind it does.
    async fn start(says_nothing: bool) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("redis://{}", listener.local_addr().expect("bound"));
        let connects = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&connects);
        tokio::spawn(async move {
            let mut open = Vec::new();
            while let Ok((stream, _)) = listener.accept().await {
                count.fetch_add(1, Ordering::SeqCst);
                open.extend(says_nothing.then_some(stream));
            }
        });
        Self { url, connects }
    }

    /// How often a thousand callers connect who send so many requests in a row.
    async fn connects(&self, store: &RedisStore, times: usize) -> usize {
        let mut tasks = JoinSet::new();
        for _ in 0..1_000 {
            let store = store.clone();
            tasks.spawn(async move {
                for _ in 0..times {
                    is_away(&store).await;
                    tokio::task::yield_now().await;
                }
            });
        }
        tasks.join_all().await;
        self.connects.load(Ordering::SeqCst)
    }
}

async fn a_thousand_callers_of_no_server_connect_a_few_times(client: Client) {
    let closes = NoServer::start(false).await;
    let connects = closes.connects(&lazy(&closes.url, client, PATIENCE), 20).await;
    // A few in the first second, and one or two in each later one.
    assert!(connects <= 60, "{connects}");

    let silent = NoServer::start(true).await;
    let store = lazy(&silent.url, client, Duration::from_millis(200));
    tokio::time::pause();
    // It would take five seconds if every call waited for its deadline.
    let connects = silent.connects(&store, 25).await;
    assert!(connects <= 3, "{connects}");
    // A known failure is returned at once.
    let begun = Instant::now();
    is_away(&store).await;
    assert_eq!(begun.elapsed(), Duration::ZERO);
}

async fn short_deadlines_do_not_prevent_a_connection(client: Client) {
    let (_server, proxy) = server_behind_proxy();
    proxy.hang(true);
    let store = lazy(&proxy.url(), client, Duration::from_millis(50));
    for _ in 0..5 {
        is_away(&store).await;
    }
    proxy.hang(false);
    let _ = until(async || acquire(&store, &seldom(), "a").await).await;
    assert!(proxy.connections() <= 2, "the attempt went on: {}", proxy.connections());
}

async fn a_lazy_store_is_built_while_redis_is_down_and_health_says_so(client: Client) {
    let server = server();
    server.stop();
    let (url, begun) = (server.url(), Instant::now());
    let login = with_client(&url.replace("//", "//user:secret@"), client);
    let said = fails(RedisStore::connect(&login).await, ErrorKind::Unavailable, "127.0.0.1:");
    assert!(begun.elapsed() < Duration::from_secs(2) && !said.contains("secret"), "{said}");
    // A cluster and Sentinels get no request either.
    for url in [&*url, "redis-cluster://127.0.0.1:1", "redis-sentinel://127.0.0.1:1"] {
        let store = lazy(url, client, PATIENCE);
        is_away(&store).await;
        let (health, (_, place)) = (store.health().await, url.split_once("//").expect("a URL"));
        assert!(!health.is_ready() && health.findings()[0].to_string().contains(place), "{url}");
    }
    let store = lazy(&url, client, PATIENCE);
    is_away(&store).await;
    server.restart().expect("redis-server");
    let _ = until(async || acquire(&store, &seldom(), "a").await).await;
    assert!(store.health().await.is_ready());
    // It goes once more, and returns.
    server.restart().expect("redis-server");
    let _ = until(async || acquire(&store, &seldom(), "a").await).await;
}

/// A connection to a proxy, which sends PINGs.
struct Pinging(RedisConnection);

impl Pinging {
    async fn to(proxy: &FaultProxy, client: Client, limit: Duration) -> Self {
        let url = with_client(&proxy.url(), client);
        let connection = Self(RedisConnection::lazy(&url, limit).expect("a URL"));
        connection.ping(PATIENCE).await.expect("it is up");
        connection
    }

    async fn ping(&self, deadline: Duration) -> Result<Reply, RedisError> {
        self.0.send("", &[Argument::Text("PING")], Deadline::within(deadline)).await
    }
}

async fn one_timeout_does_not_end_the_shared_connection(client: Client) {
    let (server, proxy) = server_behind_proxy();
    let connection = Pinging::to(&proxy, client, PATIENCE).await;
    // A request that has expired is not even sent.
    let words = ["SET", "a", "1"].map(Argument::Text);
    let late = connection.0.send("a", &words, Deadline::within(Duration::ZERO)).await;
    fails(late, ErrorKind::Unavailable, "");
    proxy.hang(true);
    for _ in 0..5 {
        let error = connection.ping(Duration::from_millis(20)).await.expect_err("it hangs");
        assert!(matches!(error, RedisError::TimedOut { .. }), "{error}");
    }
    proxy.hang(false);
    connection.ping(PATIENCE).await.expect("it goes on");
    assert_eq!((proxy.connections(), number(&server, &["EXISTS", "a"])), (1, 0));
}

async fn a_silent_connection_is_replaced(client: Client) {
    let limit = Duration::from_millis(200);
    for waits in [true, false] {
        let (_server, proxy) = server_behind_proxy();
        let connection = Pinging::to(&proxy, client, limit).await;
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

/// A thousand callers wait for a shard that hangs, and two hundred use the others.
async fn a_hanging_shard_does_not_delay_the_others(client: Client) {
    let cluster = RedisCluster::start_behind_proxies().expect("a cluster");
    let store = crate::common::store(&cluster.url(), client).await;
    let owner = |key: &str| cluster.master_of(cluster.slot_of(key)).expect("an owner");
    let hangs = owner("a");
    let keys = (0..1_000).map(|n| format!("k{n}"));
    let (hung, healthy): (Vec<_>, Vec<_>) = keys.partition(|key| owner(key) == hangs);
    // Every shard has had a request. On a busy machine a connection takes longer than one attempt
    // may.
    for key in hung.iter().take(1).chain(healthy.iter().take(50)) {
        let _ = until(async || acquire(&store, &seldom(), key).await).await;
    }
    cluster.proxies()[hangs].hang(true);
    let all = |keys: &mut dyn Iterator<Item = &String>| {
        let mut tasks = JoinSet::new();
        for key in keys {
            let (store, key) = (store.clone(), key.clone());
            tasks.spawn(async move { remaining_after_acquire(&store, &seldom(), &key).await });
        }
        tasks
    };
    let mut waiting = all(&mut hung.iter().cycle().take(300));
    tokio::task::yield_now().await;
    all(&mut healthy.iter().skip(50).take(60)).join_all().await;
    assert!(waiting.try_join_next().is_none(), "it hangs for all of its callers");
    cluster.proxies()[hangs].hang(false);
    // No request had to be given up.
    waiting.join_all().await;
}

/// By a login in the URL and a database of its own; the connection is made again after it was
/// closed.
async fn a_server_is_reached_at_its_unix_socket(client: Client) {
    let socket = format!("ratelimit-{}-{client}.sock", std::process::id());
    let socket = std::env::temp_dir().join(socket);
    let path = socket.to_str().expect("text");
    let server = server_with(&["--unixsocket", path]);
    let (url, rights) = (format!("redis+unix://{path}?db=2"), "~* +@all");
    let by_login = login(std::slice::from_ref(&server), &url, rights);
    for url in [by_login, format!("{url}&user=limiter&pass=s3cret&protocol=resp3")] {
        let store = store(&url, client).await;
        three_and_no_more(&store, &seldom(), "a").await;
        assert_eq!(
            number(&server, &["EVAL", "redis.call('SELECT', 2) return redis.call('DBSIZE')", "0"]),
            1
        );
        tell(&server, &["CLIENT", "KILL", "TYPE", "normal"]);
        let _ = until(async || acquire(&store, &seldom(), "b").await).await;
        let reset = [(&seldom(), "a", 1), (&seldom(), "b", 1)];
        let _ = apply_admitted(&store, &reset, Op::Reset, None).await;
        let health = store.health().await;
        assert!(health.is_ready() && &*health.servers()[0].address == path, "{health:?}");
    }
    let wrong = url.replace("?db=2", "?user=limiter&pass=other");
    let refused = RedisStore::connect(&with_client(&wrong, client)).await;
    let said = fails(refused, ErrorKind::Config, path);
    assert!(!said.contains("other") && !said.contains("limiter"), "{said}");
    drop(server);
    let away = RedisStore::connect(&with_client(&url, client)).await;
    fails(away, ErrorKind::Unavailable, path);
}

with_each_client! {
    a_server_is_reached_at_its_unix_socket,
    a_hanging_shard_does_not_delay_the_others,
    a_thousand_callers_of_no_server_connect_a_few_times,
    short_deadlines_do_not_prevent_a_connection,
    a_lazy_store_is_built_while_redis_is_down_and_health_says_so,
    one_timeout_does_not_end_the_shared_connection,
    a_silent_connection_is_replaced,
    the_given_runtime_connects,
}

/// What remains for a caller of this runtime.
fn left_on(runtime: &Runtime, store: &RedisStore) -> u64 {
    runtime.block_on(remaining_after_acquire(store, &seldom(), "a"))
}

/// Shared work starts on the runtime that the builder was given, on whichever runtime the first
/// caller is.
async fn the_given_runtime_connects(client: Client) {
    aside(move || {
        let (_server, proxy) = server_behind_proxy();
        let given = driven_runtime();
        let builder = RedisStore::builder().deadline(PATIENCE).runtime(given.handle().clone());
        let url = with_client(&proxy.url(), client);
        let store = runtime().block_on(builder.connect(&url)).expect("it is up");
        // The runtimes of the callers end, and the connection does not.
        for due in [2, 1, 0] {
            assert_eq!((left_on(&runtime(), &store), proxy.connections()), (due, 1));
        }
        drop(given);
        assert_eq!(left_on(&runtime(), &store), 0);
    })
    .await;
}

/// The server refuses each write, as it does when others change the key first; each command takes
/// so long.
#[tokio::test(start_paused = true)]
async fn a_slow_server_is_an_outage_and_no_contention() {
    let limit = seldom();
    for (takes_ms, is_outage) in [(1, false), (40, true)] {
        let slow = Slow::new(Duration::from_millis(takes_ms));
        let builder = RedisStore::builder().cas().deadline(Duration::from_millis(100));
        let store = builder.over(slow).expect("a prefix");
        // The second one waits for the first.
        let both = [acquire(&store, &limit, "alice"), acquire(&store, &limit, "alice")];
        for answer in join_all(both).await {
            let kind = answer.expect_err("it writes nothing").kind();
            assert_eq!((kind == ErrorKind::Contended, kind.is_outage()), (!is_outage, is_outage));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_decision_has_one_deadline_however_many_commands_it_takes() {
    const DEADLINE: Duration = Duration::from_millis(100);
    let limits = every(3);
    // Five states of a few numbers.
    let checks = [0, 1, 2, 3, 6].map(|n| (&limits[n], "alice", 1));
    for (place, some, kind, sent) in [
        // The script has to be sent anew.
        (0, 5, ErrorKind::Indeterminate, 2),
        // The reads of a state and the time are concurrent; then the command that writes is
        // pending.
        (1, 1, ErrorKind::Indeterminate, 3),
        // One transaction reads; then the script that writes is pending.
        (1, 5, ErrorKind::Indeterminate, 2),
    ] {
        let slow = Slow::new(DEADLINE * 3 / 5);
        let builder = RedisStore::builder().deadline(DEADLINE);
        let store = builder.over(slow.clone()).expect("a prefix");
        let begun = Instant::now();
        let (mode, store) = &in_every_mode(&store)[place];
        fails(apply(store, &checks[..some], Op::Acquire, None).await, kind, "");
        assert_eq!(begun.elapsed(), DEADLINE);
        assert_eq!(slow.sent.load(Ordering::SeqCst), sent, "{mode}, {some}");
    }
}

//! Late transactions: the read lies before a window's end and the charge after it. Observed from
//! outside, no period has more admitted than the limit allows.
//!
//! No check depends on timing: the bounds hold whatever the times are, and a machine that is too slow to
//! hit the end of a window only shows less.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::common::{Meddled, Meddling, url, with_client};
use futures_util::future::join_all;
use ratelimit_core::{
    Algorithm, Attempts, Batch, BucketWindow, BucketedWindow, Check, FirstRequestWindow,
    FixedWindow, Limit, Now, Policy, Rate, SlidingLog, Store, Timestamp, Verdict, WindowLog,
};
use ratelimit_redis::{
    Argument, Client, Connection, Deadline, Multi, RedisConnection, RedisError, RedisStore, Reply,
};
use ratelimit_testkit::{FaultProxy, RedisServer};
use tokio::task::JoinHandle;

const DEADLINE: Duration = Duration::from_secs(20);
const WINDOW_US: u64 = 1_000_000;
const BUCKETS: u64 = 5;
const LIMIT: u64 = 20;
const CALLERS: usize = 64;

/// The time in microseconds. The server runs on this machine and has the same clock.
fn now_us() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
    u64::try_from(since.as_micros()).expect("before the year 500,000")
}

/// Waits until a time.
async fn wait_until(us: u64) {
    while now_us() < us {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// A connection that delays charges: until a time, or each for a different time.
struct Late {
    connection: RedisConnection,
    until_us: AtomicU64,
    most_us: AtomicU64,
    charges: AtomicU64,
}

impl Late {
    /// The time until which the next charge is delayed. Each arrives after some that were made later.
    fn next_us(&self) -> u64 {
        let charge = self.charges.fetch_add(1, Ordering::SeqCst);
        let most_us = self.most_us.load(Ordering::SeqCst);
        let while_us = charge.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
        let mixed_us = now_us() + while_us % most_us.max(1);
        mixed_us.max(self.until_us.load(Ordering::SeqCst))
    }
}

/// Whether this is a command that charges.
fn is_charge(word: &Argument<'_>) -> bool {
    matches!(word, Argument::Bytes(b"HINCRBY" | b"ZADD" | b"RPUSH" | b"RPUSHX"))
}

impl Connection for Late {
    async fn send(
        &self,
        to: &str,
        words: &[Argument<'_>],
        deadline: Deadline,
    ) -> Result<Reply, RedisError> {
        self.connection.send(to, words, deadline).await
    }

    async fn transaction(
        &self,
        to: &str,
        commands: &[Vec<Argument<'_>>],
        deadline: Deadline,
    ) -> Result<Vec<Reply>, RedisError> {
        if commands.iter().any(|words| words.first().is_some_and(is_charge)) {
            wait_until(self.next_us()).await;
        }
        self.connection.transaction(to, commands, deadline).await
    }

    async fn send_to_each(
        &self,
        words: &[Argument<'_>],
        deadline: Deadline,
    ) -> Vec<(Arc<str>, Result<Reply, RedisError>)> {
        self.connection.send_to_each(words, deadline).await
    }

    fn is_cluster(&self) -> bool {
        self.connection.is_cluster()
    }

    fn address(&self) -> &Arc<str> {
        self.connection.address()
    }
}

/// An admission, between these times.
#[derive(Clone, Copy, Debug)]
struct Admitted {
    cost: u64,
    asked_us: u64,
    told_us: u64,
}

/// All limits that a transaction can decide.
fn all(window_us: u64) -> Vec<Policy> {
    let rate = || Rate::per_us(LIMIT, window_us).expect("a rate");
    let short = Rate::per_us(LIMIT / 2, 2 * window_us / BUCKETS).expect("a rate");
    let bucketed =
        |rates: &[Rate]| BucketedWindow::new(window_us / BUCKETS, rates).expect("whole buckets");
    vec![
        Attempts::new(FixedWindow::new(rate()).expect("a limit")).into(),
        Attempts::new(FirstRequestWindow::new(rate()).expect("a limit")).into(),
        Attempts::new(WindowLog::new(rate()).expect("a limit")).into(),
        Attempts::new(bucketed(&[rate()])).into(),
        Attempts::new(bucketed(&[short, rate()])).into(),
        Attempts::new(SlidingLog::new(rate()).expect("a limit")).into(),
    ]
}

/// The most that may be admitted to requests that begin and end within a period. `fresh`: no window had
/// begun before it.
fn bound(policy: &Policy, from_us: u64, to_us: u64, fresh: bool) -> u64 {
    let touched = |length_us: u64| to_us / length_us - from_us / length_us + 1;
    match policy {
        Policy::FixedWindowAttempts(_) => LIMIT * touched(WINDOW_US),
        Policy::BucketedWindowAttempts(attempts) => {
            let (bucket_us, windows) =
                (attempts.algorithm().bucket_us(), attempts.algorithm().windows());
            let most = |window: &BucketWindow| {
                window.limit * touched(bucket_us).div_ceil(window.span_us / bucket_us)
            };
            windows.iter().map(most).min().expect("a window")
        }
        Policy::SlidingLogAttempts(_) => LIMIT * ((to_us - from_us) / WINDOW_US + 1),
        // A window of its own begins at most once per window length.
        _ => LIMIT * ((to_us - from_us) / WINDOW_US + 1 + u64::from(!fresh)),
    }
}

/// Checks every period from the start of one request to the end of one.
fn reservations(policy: &Policy, admitted: &[Admitted]) {
    let first_us = admitted.iter().map(|one| one.asked_us).min().expect("some were");
    for from_us in admitted.iter().map(|one| one.asked_us) {
        for to_us in admitted.iter().map(|one| one.told_us).filter(|told_us| *told_us >= from_us) {
            let inside =
                admitted.iter().filter(|one| one.asked_us >= from_us && one.told_us <= to_us);
            let count: u64 = inside.map(|one| one.cost).sum();
            let most = bound(policy, from_us, to_us, from_us == first_us);
            assert!(
                count <= most,
                "{}: {count} admitted within {} µs, and at most {most} may be",
                policy.name(),
                to_us - from_us
            );
        }
    }
}

/// A limit of a test, and what it has admitted.
struct Scene {
    late: Arc<Late>,
    store: RedisStore<Multi, Arc<Late>>,
    limit: Arc<Limit<Policy>>,
    admitted: Vec<Admitted>,
}

impl Scene {
    async fn new(url: &str, n: usize, policy: Policy) -> Self {
        let connection = RedisConnection::open(url, DEADLINE).await.expect("the server is up");
        let [until_us, most_us, charges] = [0, 0, 0].map(AtomicU64::new);
        let late = Arc::new(Late { connection, until_us, most_us, charges });
        let builder = RedisStore::builder().multi().deadline(DEADLINE);
        let store = builder.over(Arc::clone(&late)).expect("a prefix");
        let limit = Arc::new(Limit::new(&format!("late-{n}"), policy).expect("a name"));
        Self { late, store, limit, admitted: Vec::new() }
    }

    /// Starts a request.
    fn caller(&self, cost: u64) -> JoinHandle<Option<Admitted>> {
        let (store, limit) = (self.store.clone(), Arc::clone(&self.limit));
        tokio::spawn(async move {
            let check = Check { limit: &limit, key: "a", cost };
            let asked_us = now_us();
            let verdict = store.apply(&Batch::one(&check)).await.expect("decides");
            let told_us = now_us();
            verdict.allowed().then_some(Admitted { cost, asked_us, told_us })
        })
    }

    /// Starts this many concurrent requests, whose charges are delayed until this time.
    async fn ask(&mut self, callers: usize, until_us: u64) {
        self.late.until_us.store(until_us, Ordering::SeqCst);
        let callers: Vec<_> = (0..callers).map(|_| self.caller(1)).collect();
        for caller in callers {
            self.admitted.extend(caller.await.expect("no panic"));
        }
    }

    /// Sends many requests, at costs that do not always fit, whose charges arrive in a different order.
    async fn mixes(&mut self) {
        self.late.most_us.store(WINDOW_US / 8, Ordering::SeqCst);
        let mut callers = Vec::new();
        for n in 0..400 {
            callers.push(self.caller(1 + n % 3));
            tokio::time::sleep(Duration::from_micros(WINDOW_US / 133)).await;
        }
        for caller in callers {
            self.admitted.extend(caller.await.expect("no panic"));
        }
    }

    /// Almost fills a window at its start. Requests just before its end are charged just after it. Then
    /// more requests follow: at once, or when the late charges would have expired if they counted before
    /// the end.
    async fn plays(&mut self) {
        let begin_us = (now_us() / WINDOW_US + 1) * WINDOW_US;
        wait_until(begin_us).await;
        let nearly = usize::try_from(LIMIT - 1).expect("few");
        self.ask(nearly, 0).await;
        let (first_us, last_us) = self.between();
        let (end_us, gone_us) = match self.limit.algorithm() {
            Policy::FixedWindowAttempts(_) | Policy::BucketedWindowAttempts(_) => {
                (begin_us + WINDOW_US, begin_us + WINDOW_US)
            }
            _ => (first_us + WINDOW_US, last_us + WINDOW_US),
        };
        wait_until(end_us - 200_000).await;
        self.ask(CALLERS, gone_us + 20_000).await;
        // A denied attempt would hide what the later requests have to show.
        if !slides(self.limit.algorithm()) {
            self.ask(CALLERS, 0).await;
        }
        wait_until(end_us + WINDOW_US - 180_000).await;
        self.ask(CALLERS, 0).await;
    }

    /// From the start of the first request to the end of the last.
    fn between(&self) -> (u64, u64) {
        let first_us = self.admitted.iter().map(|one| one.asked_us).min();
        let last_us = self.admitted.iter().map(|one| one.told_us).max();
        (first_us.expect("some were"), last_us.expect("some were"))
    }
}

/// A scene per algorithm, all concurrent, each with its own keys.
async fn scenes(url: &str, window_us: u64) -> Vec<Scene> {
    let scenes =
        all(window_us).into_iter().enumerate().map(|(n, policy)| Scene::new(url, n, policy));
    join_all(scenes).await
}

async fn a_charge_after_the_end_of_its_window_admits_no_more(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let mut scenes = scenes(&url(&server, client), WINDOW_US).await;
    join_all(scenes.iter_mut().map(Scene::plays)).await;
    for Scene { limit, admitted, .. } in &scenes {
        reservations(limit.algorithm(), admitted);
    }
}

/// Many charges that overtake each other admit no more either.
async fn reordered_charges_admit_no_more(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let mut scenes = scenes(&url(&server, client), WINDOW_US).await;
    join_all(scenes.iter_mut().map(Scene::mixes)).await;
    for Scene { limit, admitted, .. } in &scenes {
        reservations(limit.algorithm(), admitted);
    }
}

/// The same when every message is delayed.
async fn delayed_charges_admit_no_more(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let proxy = FaultProxy::start(server.port()).expect("a proxy");
    let mut scenes = scenes(&with_client(&proxy.url(), client), WINDOW_US).await;
    for (before_us, delay_ms) in [(25_000, 10), (40_000, 10), (60_000, 25)] {
        let begin_us = (now_us() / WINDOW_US + 1) * WINDOW_US;
        wait_until(begin_us).await;
        let nearly = usize::try_from(LIMIT - 1).expect("few");
        join_all(scenes.iter_mut().map(|scene| scene.ask(nearly, 0))).await;
        wait_until(begin_us + WINDOW_US - before_us).await;
        proxy.delay(Duration::from_millis(delay_ms));
        join_all(scenes.iter_mut().map(|scene| scene.ask(CALLERS, 0))).await;
        proxy.delay(Duration::ZERO);
        join_all(scenes.iter_mut().map(|scene| scene.ask(CALLERS, 0))).await;
    }
    for Scene { limit, admitted, .. } in &scenes {
        reservations(limit.algorithm(), admitted);
    }
}

/// Whether an attempt that does not fit displaces older ones: then a late charge stays.
fn slides(policy: &Policy) -> bool {
    matches!(policy, Policy::BucketedWindowAttempts(_) | Policy::SlidingLogAttempts(_))
}

/// The entries that counted at the time of such a charge may be gone.
async fn a_charge_more_than_a_second_late_is_made_again(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let mut scenes = scenes(&url(&server, client), 3_600 * WINDOW_US).await;
    let until_us = now_us() + 1_300_000;
    join_all(scenes.iter_mut().map(|scene| scene.ask(1, until_us))).await;
    for Scene { limit, store, late, admitted } in &scenes {
        let (policy, charges) = (limit.algorithm(), late.charges.load(Ordering::SeqCst));
        assert_eq!((admitted.len(), charges), (1, 2), "{policy:?}");
        let check = Check { limit, key: "a", cost: 0 };
        let left = store.apply(&Batch::one(&check)).await.expect("decides").remaining();
        let used = if slides(policy) { 2 } else { 1 };
        assert_eq!(left, policy.capacity() - used, "{policy:?}");
    }
}

/// Later requests that were faster do not make it start again, and it does not count among them.
async fn an_overtaken_charge_is_decided_as_of_its_own_time(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    for policy in all(WINDOW_US) {
        let limit = Limit::new("overtaken", policy).expect("a name");
        let later_us = if slides(&policy) { WINDOW_US / 2 } else { WINDOW_US + 20_000 };
        let (charges, url) = (Arc::new(AtomicU64::new(0)), url(&server, client));
        let (counted, quicker) = (Arc::clone(&charges), (limit.clone(), url.clone()));
        let overtaken = move |words: &[Argument<'_>]| {
            if words.iter().any(is_charge) && counted.fetch_add(1, Ordering::SeqCst) == 0 {
                let (limit, url) = quicker.clone();
                // With a client of its own, and to the end.
                let other = std::thread::spawn(move || {
                    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
                    runtime.block_on(async {
                        let connection = RedisConnection::open(&url, DEADLINE).await;
                        let verdict =
                            acquire(connection.expect("it is up"), &limit, 3, later_us).await;
                        assert!(verdict.allowed(), "{verdict:?}");
                    });
                });
                other.join().expect("no panic");
            }
            Meddling::None
        };
        let connection = RedisConnection::open(&url, DEADLINE).await.expect("it is up");
        let connection = Arc::new(Meddled::new(connection).before(overtaken));
        let verdict = acquire(connection, &limit, 2, 10_000).await;
        assert!(verdict.allowed(), "{policy:?}: {verdict:?}");
        assert_eq!(charges.load(Ordering::SeqCst), 1, "{policy:?}");
        // A sliding window contains both charges; otherwise each has its own window.
        let together = if slides(&policy) { 5 } else { 2 };
        assert_eq!(verdict.remaining(), policy.capacity() - together, "{policy:?}");
        server.command(&["FLUSHALL"]).expect("it is up").ok().expect("done");
    }
}

/// Acquires this cost, at this offset from a time long ago.
async fn acquire(
    connection: impl Connection,
    limit: &Limit<Policy>,
    cost: u64,
    us: u64,
) -> Verdict {
    let builder = RedisStore::builder().multi().deadline(DEADLINE);
    let store = builder.over(connection).expect("a prefix");
    let at = Timestamp::from_us(1_795_218_392 * WINDOW_US + us).expect("a time");
    let check = Check { limit, key: "a", cost };
    store.apply(&Batch::one(&check).now(Now::At(at))).await.expect("decides")
}

with_each_client! {
    a_charge_after_the_end_of_its_window_admits_no_more,
    a_charge_more_than_a_second_late_is_made_again,
    an_overtaken_charge_is_decided_as_of_its_own_time,
    reordered_charges_admit_no_more,
    delayed_charges_admit_no_more,
}

//! Batches over two and three slots of a cluster whose slots move, under contention, by every algorithm,
//! with and without ids, with callers that give up at any moment. No limit admits more than it may, and
//! other callers only lose what was pending when a caller stopped.

#![cfg(unix)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::common::with_client;
use ratelimit_core::{
    Algorithm, Batch, Check, ErrorKind, Limit, Op, Policy, Refusal, ReservationId, Stack, Store,
    StoreError, Verdict,
};
use ratelimit_redis::{Cas, Client, RedisError, RedisStore};
use ratelimit_testkit::{AlgorithmKind, RedisCluster};

const DEADLINE: Duration = Duration::from_secs(20);
const CAPACITY: u64 = 20;
/// Lets the nodes learn of one move before the next.
const BETWEEN_MOVES: Duration = Duration::from_millis(40);
const TASKS: u64 = 12;
const REQUESTS: u64 = 8;

/// The policies of every algorithm, none of which refills while a test runs.
fn every_policy() -> impl Iterator<Item = (String, Policy)> {
    let rate = "20/30d".parse().expect("a rate");
    AlgorithmKind::ALL
        .into_iter()
        .map(move |kind| (format!("{kind:?}"), kind.policy(rate, CAPACITY)))
}

fn limit<A: Algorithm>(name: &str, algorithm: A) -> Limit<A> {
    Limit::new(name, algorithm).expect("a name")
}

/// Three keys of different slots.
fn keys(mode: &str) -> Vec<String> {
    (0..3).map(|n| format!("key-{n}-{mode}")).collect()
}

async fn apply<A: Algorithm, S: Store<A, Error = RedisError>>(
    store: &S,
    limit: &Limit<A>,
    keys: &[String],
    cost: u64,
    (op, id): (Op, Option<ReservationId>),
) -> Result<Verdict, RedisError> {
    let checks: Vec<_> = keys.iter().map(|key| Check { limit, key, cost }).collect();
    let batch = Batch::new(&checks).expect("distinct").op(op);
    store.apply(&id.map_or(batch, |id| batch.id(id))).await
}

/// Another client was faster, or a slot moved faster than the store could follow.
fn is_uncharged(error: &RedisError) -> bool {
    matches!(error.kind(), ErrorKind::Contended | ErrorKind::Unavailable)
}

/// The same, or done in one slot only: a request under an id takes effect once, however often it is
/// repeated.
fn is_to_be_repeated(error: &RedisError) -> bool {
    is_uncharged(error) || matches!(error, RedisError::InPart(_))
}

/// The remaining cost of each key.
async fn left<A: Algorithm, S: Store<A, Error = RedisError>>(
    store: &S,
    limit: &Limit<A>,
    keys: &[String],
) -> Vec<u64> {
    let shown = loop {
        match apply(store, limit, keys, 0, (Op::Peek, None)).await {
            Ok(shown) => break shown,
            Err(error) => assert!(is_uncharged(&error), "{error}"),
        }
    };
    shown.decisions().iter().map(|decision| decision.remaining).collect()
}

/// Per key: how often it was admitted, and how many callers stopped while requesting it.
#[derive(Default)]
struct Seen {
    admitted: [AtomicU64; 3],
    stopped: [AtomicU64; 3],
}

/// How long a caller waits: until the reply, or until an arbitrary moment.
fn patience(patient: bool, n: u64) -> Duration {
    if patient { 3 * DEADLINE } else { Duration::from_micros(200 + 370 * (n % 23)) }
}

/// Requests two of the keys at a time, or all of them.
async fn ask<A: Algorithm, S: Store<A, Error = RedisError>>(
    store: S,
    (limit, keys): (Arc<Limit<A>>, Vec<String>),
    (task, patient): (u64, bool),
    seen: Arc<Seen>,
) {
    for request in 0..REQUESTS {
        let some: Vec<_> = (0..keys.len()).filter(|n| (task + request) % 4 != *n as u64).collect();
        let names: Vec<_> = some.iter().map(|place| keys[*place].clone()).collect();
        let asking = apply(&store, &limit, &names, 1, (Op::Acquire, None));
        let noted = match tokio::time::timeout(patience(patient, task * REQUESTS + request), asking)
            .await
        {
            Ok(Ok(verdict)) if verdict.allowed() => &seen.admitted,
            Ok(Ok(_)) => continue,
            Ok(Err(error)) => {
                assert!(is_uncharged(&error), "{}: {error}", limit.name());
                continue;
            }
            Err(_) => &seen.stopped,
        };
        for place in some {
            noted[place].fetch_add(1, Ordering::SeqCst);
        }
    }
}

async fn contest<A, S>(store: &S, mode: &str, limit: Limit<A>, patient: bool)
where
    A: Algorithm + 'static,
    S: Store<A, Error = RedisError> + Clone + Send + Sync + 'static,
{
    let (limit, keys, seen) = (Arc::new(limit), keys(mode), Arc::new(Seen::default()));
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..TASKS {
        let request = (Arc::clone(&limit), keys.clone());
        tasks.spawn(ask(store.clone(), request, (task, patient), Arc::clone(&seen)));
    }
    tasks.join_all().await;
    until_quiet(store, &limit, &keys).await;
    let left = left(store, &limit, &keys).await;
    for (place, left) in left.into_iter().enumerate() {
        let count = |of: &[AtomicU64; 3]| of[place].load(Ordering::SeqCst);
        let (admitted, stopped, charged) =
            (count(&seen.admitted), count(&seen.stopped), CAPACITY - left);
        let counts = format!("{mode}, {}: {admitted} admitted, {charged} charged", limit.name());
        assert!(admitted <= charged, "{counts}");
        assert!(charged <= admitted + stopped, "{counts}, {stopped} stopped");
    }
}

/// Once nothing changes any more, all requests of callers that gave up have been executed.
async fn until_quiet<A: Algorithm, S: Store<A, Error = RedisError>>(
    store: &S,
    limit: &Limit<A>,
    keys: &[String],
) {
    let (mut before, mut same) = (Vec::new(), 0);
    while same < 10 {
        tokio::time::sleep(Duration::from_millis(5)).await;
        let now = left(store, limit, keys).await;
        same = if now == before { same + 1 } else { 0 };
        before = now;
    }
}

/// Reserves all keys under ids, repeats requests without a reply, and cancels all reservations.
async fn reserve_and_cancel<S: Store<Policy, Error = RedisError>>(
    store: S,
    (limit, keys): (Arc<Limit<Policy>>, Vec<String>),
    task: u64,
    reserved: Arc<AtomicU64>,
) {
    const COST: u64 = 3;
    let mut n = 0;
    for request in 0..REQUESTS {
        let id = ReservationId::new(u128::from(task * REQUESTS + request) + 1);
        let allowed = loop {
            n += 1;
            let asking = apply(&store, &limit, &keys, COST, (Op::Acquire, Some(id)));
            // More patient each time.
            let patience = patience(false, task + 7 * n) * u32::try_from(n).expect("small");
            match tokio::time::timeout(patience, asking).await {
                Ok(Ok(verdict)) => break verdict.allowed(),
                Ok(Err(error)) => assert!(is_to_be_repeated(&error), "{error}"),
                Err(_) => {}
            }
        };
        if allowed {
            let now = reserved.fetch_add(COST, Ordering::SeqCst) + COST;
            assert!(now <= CAPACITY, "{}: {now} are reserved", limit.name());
            tokio::task::yield_now().await;
            reserved.fetch_sub(COST, Ordering::SeqCst);
        }
        cancel(&store, &limit, &keys, id).await;
    }
}

async fn cancel<S: Store<Policy, Error = RedisError>>(
    store: &S,
    limit: &Limit<Policy>,
    keys: &[String],
    id: ReservationId,
) {
    loop {
        match apply(store, limit, keys, 0, (Op::Settle, Some(id))).await {
            Ok(_) | Err(RedisError::Refused(Refusal::UnknownReservation { .. })) => break,
            Err(error) => assert!(is_to_be_repeated(&error), "{error}"),
        }
    }
}

async fn reserved<S>(store: &S, mode: &str, limit: Limit<Policy>)
where
    S: Store<Policy, Error = RedisError> + Clone + Send + Sync + 'static,
{
    let (limit, keys, reserved) = (Arc::new(limit), keys(mode), Arc::new(AtomicU64::new(0)));
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..TASKS {
        let request = (Arc::clone(&limit), keys.clone());
        tasks.spawn(reserve_and_cancel(store.clone(), request, task, Arc::clone(&reserved)));
    }
    tasks.join_all().await;
    until_quiet(store, &limit, &keys).await;
    // Reservations that were executed after their callers gave up, and cancelled here.
    for id in 1..=TASKS * REQUESTS {
        cancel(store, &limit, &keys, ReservationId::new(id.into())).await;
    }
    // A bucket that was charged meanwhile keeps the part that may have refilled.
    let rounded = matches!(limit.algorithm(), Policy::Gcra(_) | Policy::TokenBucket(_));
    let due = CAPACITY - u64::from(rounded)..=CAPACITY;
    let left = left(store, &limit, &keys).await;
    assert!(left.iter().all(|left| due.contains(left)), "{mode}, {}: {left:?}", limit.name());
}

/// Runs work on a cluster whose slots keep moving.
async fn on_the_move(client: Client, work: impl AsyncFnOnce(RedisStore)) {
    let cluster = Arc::new(RedisCluster::start().expect("a cluster"));
    let builder = RedisStore::builder().deadline(DEADLINE);
    let store = builder.connect(&with_client(&cluster.url(), client)).await.expect("it is up");
    let over = Arc::new(AtomicBool::new(false));
    let (is_over, moved) = (Arc::clone(&over), Arc::clone(&cluster));
    let moving = std::thread::spawn(move || {
        let keys = [keys("lua"), keys("cas")].concat();
        for key in keys.iter().cycle().take_while(|_| !is_over.load(Ordering::SeqCst)) {
            let slot = moved.slot_of(&format!("{{{key}}}"));
            let owner = moved.master_of(slot).expect("an owner");
            moved.migrate(slot, (owner + 1) % 3).expect("moved");
            std::thread::sleep(BETWEEN_MOVES);
        }
    });
    work(store).await;
    over.store(true, Ordering::SeqCst);
    moving.join().expect("no panic");
}

async fn no_charge_is_lost_while_every_caller_finishes(client: Client) {
    on_the_move(client, contests(true)).await;
}

async fn a_stopped_caller_loses_at_most_its_own_request(client: Client) {
    on_the_move(client, contests(false)).await;
}

fn contests(patient: bool) -> impl AsyncFnOnce(RedisStore) {
    async move |store| {
        let cas = store.in_mode::<Cas>();
        for (name, policy) in every_policy() {
            contest(&store, "lua", limit(&name, policy), patient).await;
            contest(&cas, "cas", limit(&name, policy), patient).await;
        }
        let stack = || Stack::new(every_policy().map(|(_, policy)| policy)).expect("a stack");
        contest(&store, "lua", limit("stack", stack()), patient).await;
        contest(&cas, "cas", limit("stack", stack()), patient).await;
    }
}

async fn a_reservation_is_made_once_and_returned_once(client: Client) {
    on_the_move(client, async |store| {
        let cas = store.in_mode::<Cas>();
        for (name, policy) in every_policy().filter(|(_, policy)| policy.reservation_us().is_some())
        {
            reserved(&store, "lua", limit(&name, policy)).await;
            reserved(&cas, "cas", limit(&name, policy)).await;
        }
    })
    .await;
}

/// The store waits once for a server that does not answer: nothing has been charged by then.
async fn the_store_waits_once_for_a_hanging_server(client: Client) {
    const PATIENCE: Duration = Duration::from_millis(300);
    let cluster = RedisCluster::start().expect("a cluster");
    let builder = RedisStore::builder().deadline(PATIENCE);
    let store = builder.connect(&with_client(&cluster.url(), client)).await.expect("it is up");
    let (cas, keys) = (store.in_mode::<Cas>(), keys("lua"));
    let (_, policy) = every_policy().next().expect("one");
    let limit = limit("hangs", policy);
    // All keys' servers are known by now.
    let _ = apply(&store, &limit, &keys, 1, (Op::Acquire, None)).await.expect("decides");
    let hung = cluster.master_of(cluster.slot_of(&format!("{{{}}}", keys[0]))).expect("an owner");
    cluster.nodes()[hung].pause().expect("paused");
    for op in [Op::Acquire, Op::Peek] {
        for mode in ["lua", "cas"] {
            let begin = Instant::now();
            let counts = match mode {
                "lua" => apply(&store, &limit, &keys, 1, (op, None)).await,
                _ => apply(&cas, &limit, &keys, 1, (op, None)).await,
            };
            let error = counts.expect_err("it hangs");
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{mode} {op}: {error}");
            assert!(begin.elapsed() < 3 * PATIENCE, "{mode} {op}: {:?}", begin.elapsed());
        }
    }
    cluster.nodes()[hung].resume().expect("resumed");
}

with_each_client!(
    the_store_waits_once_for_a_hanging_server,
    no_charge_is_lost_while_every_caller_finishes,
    a_stopped_caller_loses_at_most_its_own_request,
    a_reservation_is_made_once_and_returned_once,
);

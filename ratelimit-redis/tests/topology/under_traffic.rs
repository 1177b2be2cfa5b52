//! A cluster under traffic: slots move, scripts are flushed, masters die and return, while many tasks
//! send requests in every mode and with every client. A caller only gets a decision or an unavailable
//! error, and no key is admitted more often than the limit and the lost states allow.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ratelimit_core::{ErrorKind, Limit, Policy, Store, StoreError};
use ratelimit_redis::{Cas, Client, Multi, RedisError, RedisStore};
use ratelimit_servers::RedisCluster;

use crate::common::{acquire, aside, limit, until, with_client};

/// Every server answers quickly: one that is down refuses at once.
const DEADLINE: Duration = Duration::from_secs(5);
const PATIENCE: Duration = Duration::from_secs(30);
const KEYS: usize = 12;
/// How many tasks send requests, per client.
const TASKS: usize = 4;
const RATE: u64 = 100;
const BURST: u64 = 20;
/// How long a client may take to notice that a connection has ended.
const NOTICED: Duration = Duration::from_millis(300);

/// What happened, and what the tasks observed.
#[derive(Default)]
struct Events {
    over: AtomicBool,
    /// How often a key's state may have been lost.
    losses: AtomicUsize,
    /// The periods in which masters were dead.
    deaths: Mutex<Vec<(Instant, Instant)>>,
    /// The periods of requests without a decision, and the errors.
    failures: Mutex<Vec<(Instant, Instant, RedisError)>>,
    /// Per key: the first request, the last one, and the number of admissions.
    admitted: Mutex<HashMap<String, (Instant, Instant, u64)>>,
}

/// Sends requests for the keys in turn until all is over.
async fn ask<S: Store<Policy, Error = RedisError>>(
    store: S,
    limit: Limit<Policy>,
    names: Vec<String>,
    events: Arc<Events>,
) {
    let mut names = names.iter().cycle();
    while !events.over.load(Ordering::Relaxed) {
        let name = names.next().expect("endless");
        // Each mode keeps its own state under a name.
        let (_, key) = name.split_once(' ').expect("a mode and a key");
        let begin = Instant::now();
        let told = acquire(&store, &limit, key).await;
        let end = Instant::now();
        match told {
            Ok(verdict) => {
                let mut admitted = events.admitted.lock().unwrap();
                let (_, last, count) = admitted.entry(name.clone()).or_insert((begin, end, 0));
                *last = end;
                *count += u64::from(verdict.allowed());
            }
            Err(error) => {
                events.failures.lock().unwrap().push((begin, end, error));
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
        tokio::time::sleep(Duration::from_micros(500)).await;
    }
}

/// Moves slots to another master and back, and flushes all scripts in between.
fn migrations(cluster: &RedisCluster) {
    for n in 0..4 {
        let slot = cluster.slot_of(&format!("{{key-{n}}}"));
        let owner = cluster.master_of(slot).expect("an owner");
        let is_another =
            |node: &usize| *node != owner && cluster.master_of_replica(*node) == Ok(None);
        let another = (0..cluster.nodes().len()).find(is_another).expect("three masters");
        cluster.migrate(slot, another).expect("moved");
        cluster.flush_scripts().expect("flushed");
        cluster.migrate(slot, owner).expect("back");
    }
}

/// A master dies, and returns at once, empty, or when its replica has taken over.
fn dies(cluster: &RedisCluster, key: &str, is_replaced: bool, events: &Events) {
    let owner = cluster.master_of(cluster.slot_of(key)).expect("an owner");
    let begin = Instant::now();
    events.losses.fetch_add(1, Ordering::Relaxed);
    cluster.kill(owner);
    events.deaths.lock().unwrap().push((begin, Instant::now()));
    if is_replaced {
        cluster.wait_until_healthy(PATIENCE).expect("a failover");
    }
    cluster.restart(owner).expect("again");
    cluster.wait_until_healthy(PATIENCE).expect("well");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disrupted_cluster_never_over_admits_and_reports_failures_truthfully() {
    let cluster = RedisCluster::start_with_replicas().expect("a cluster");
    let events = Arc::new(Events::default());
    let gcra = limit("gcra", &format!("gcra {RATE}/s burst {BURST}"));
    let window = limit("window", &format!("fixed-window {RATE}/s count attempts"));
    let names = |mode: &str, some: &dyn Fn(usize) -> bool| -> Vec<String> {
        (0..KEYS).filter(|n| some(*n)).map(|n| format!("{mode} key-{n}")).collect()
    };
    let mut tasks = tokio::task::JoinSet::new();
    for (place, client) in Client::ALL.iter().enumerate() {
        let builder = RedisStore::builder().deadline(DEADLINE);
        let url = with_client(&cluster.url(), *client);
        let lua = builder.connect(&url).await.expect("the cluster is up");
        let (cas, multi) = (lua.in_mode::<Cas>(), lua.in_mode::<Multi>());
        for _ in 0..TASKS - 2 {
            let names = names("lua", &|_| true);
            tasks.spawn(ask(lua.clone(), gcra.clone(), names, Arc::clone(&events)));
        }
        let multi_names = names("multi", &|_| true);
        tasks.spawn(ask(multi, window.clone(), multi_names, Arc::clone(&events)));
        // One task per key of this mode, so no task waits for another.
        let own = names("cas", &|n| n % Client::ALL.len() == place);
        tasks.spawn(ask(cas, gcra.clone(), own, Arc::clone(&events)));
    }

    let chaos = Arc::clone(&events);
    let (cluster, calm_until) = aside(move || {
        migrations(&cluster);
        let calm_until = Instant::now();
        dies(&cluster, "{key-0}", true, &chaos);
        migrations(&cluster);
        dies(&cluster, "{key-1}", false, &chaos);
        (cluster, calm_until)
    })
    .await;
    let well_again = Instant::now();
    until(async || {
        let admitted = events.admitted.lock().unwrap();
        let is_behind = admitted.values().any(|(_, last, _)| *last <= well_again);
        let all = admitted.len() == 3 * KEYS && !is_behind;
        all.then_some(()).ok_or("some are not decided any more")
    })
    .await;
    events.over.store(true, Ordering::Relaxed);
    tasks.join_all().await;
    drop(cluster);

    check_failures(&events, calm_until, well_again);
    check_admitted(&events);
}

/// No failures except those that a death explains.
fn check_failures(events: &Events, calm_until: Instant, well_again: Instant) {
    let deaths = events.deaths.lock().unwrap();
    let failures = events.failures.lock().unwrap();
    let mut downs = 0;
    for (begin, end, error) in failures.iter() {
        assert!(*end > calm_until, "slots moved, and that is all: {error}");
        assert!(*begin < well_again, "all is well: {error}");
        match error.kind() {
            ErrorKind::Unavailable => {}
            ErrorKind::Indeterminate => {
                let died = |(from, to): &(Instant, Instant)| *begin < *to + NOTICED && end > from;
                // After the first such error, fred fails all pending requests.
                let down = error.to_string().contains("CLUSTERDOWN");
                downs += usize::from(down);
                assert!(down || deaths.iter().any(died), "no master died: {error}");
            }
            _ => panic!("{error}"),
        }
    }
    assert!(downs <= 3 * TASKS, "as often as the cluster went down: {downs}");
}

/// No key was admitted more often than allowed.
fn check_admitted(events: &Events) {
    let admitted = events.admitted.lock().unwrap();
    let losses = events.losses.load(Ordering::Relaxed) as u64;
    for (name, (first, last, count)) in admitted.iter() {
        let elapsed = last.duration_since(*first);
        let (ms, seconds) = (u64::try_from(elapsed.as_millis()).unwrap(), elapsed.as_secs() + 1);
        let by_window = name.starts_with("multi");
        let in_windows = (seconds + 1) * RATE;
        let bound = if by_window { in_windows } else { (ms + 1) * RATE / 1_000 + 1 + BURST };
        let extra = if by_window { RATE } else { BURST };
        assert!(*count <= bound + losses * extra, "{name}: {count} of {bound} in {elapsed:?}");
    }
}

//! States from the future of a server's clock: they are reported, and healed.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crate::common::{Meddled, aside, query, url, with_client};
use ratelimit_core::{
    Algorithm, Batch, Check, Decision, Limit, Limits, Now, Op, Policy, Store, Timestamp,
};
use ratelimit_redis::{
    Cas, Client, HealOptions, Healed, Health, Multi, RedisConnection, RedisError, RedisStore,
};
use ratelimit_testkit::{RedisCluster, RedisServer};

const HOUR_US: u64 = 3_600_000_000;
const DRY: HealOptions =
    HealOptions { dry_run: true, max_keys: 1_000, count: 10, pause: Duration::ZERO };
const CALLERS: [&str; 5] = ["alice", "bob", "carol", "a b}%", ""];

/// A limit of every algorithm. None recovers within the test.
fn limits(counting: &str) -> Limits<Policy> {
    let texts = [
        "gcra 10/h",
        "token-bucket 10/h",
        "fixed-window 10/h",
        "first-request-window 10/h",
        "window-log 10/h",
        "bucketed-window bucket 1m rates 10/1m, 30/1h",
        "sliding-counter 10/h",
        "sliding-log 10/h",
        "concurrency 10/1h",
    ];
    let native = ["fixed", "first", "window", "bucketed", "sliding-log"];
    let all = counting.is_empty();
    let texts = texts.iter().filter(|text| all || native.iter().any(|name| text.starts_with(name)));
    let limit = |(place, text): (usize, &&str)| {
        Limit::new(&format!("l{place}"), format!("{text}{counting}").parse().expect(text))
            .expect("a name")
    };
    Limits::new(texts.enumerate().map(limit)).expect("limits")
}

fn now() -> Timestamp {
    let now = SystemTime::UNIX_EPOCH.elapsed().expect("after 1970").as_micros();
    Timestamp::saturating_from_us(u64::try_from(now).expect("a time"))
}

async fn apply<S: Store<Policy, Error = RedisError>>(
    store: &S,
    limits: &Limits<Policy>,
    key: &str,
    (op, cost, time): (Op, u64, Now),
) -> Vec<Decision> {
    let checks: Vec<_> = limits.iter().map(|limit| Check { limit, key, cost }).collect();
    let batch = Batch::new(&checks).expect("distinct").op(op).now(time);
    store.apply(&batch).await.expect("it answers").decisions().to_vec()
}

/// Whether each key recovers as from empty, and not later.
async fn is_full<S: Store<Policy, Error = RedisError>>(store: &S, limits: &Limits<Policy>) {
    for key in CALLERS {
        let decisions = apply(store, limits, key, (Op::Peek, 0, Now::Store)).await;
        for (limit, decision) in limits.iter().zip(decisions) {
            // A moment may have passed, and with it the end of a window.
            let most_us = limit.algorithm().filled(now()).decision.reset_after_us + 60_000_000;
            assert!(decision.reset_after_us <= most_us, "{limit:?} {decision:?}");
            let is_used = decision.remaining == 0 || limit.algorithm().name() == "fixed-window";
            assert!(is_used, "{limit:?} {decision:?}");
        }
    }
}

/// The states and the findings of a store, and what heals it.
trait Healing: Store<Policy, Error = RedisError> {
    async fn heal(&self, limits: &Limits<Policy>, options: HealOptions) -> Healed;
    async fn health(&self) -> Health;
}

macro_rules! healing {
    ($($mode:ty),*) => { $(
        impl Healing for RedisStore<$mode> {
            async fn heal(&self, limits: &Limits<Policy>, options: HealOptions) -> Healed {
                self.heal(limits, options).await.expect("it answers")
            }

            async fn health(&self) -> Health {
                self.health().await
            }
        }
    )* };
}

healing!(ratelimit_redis::Lua, Cas, Multi);

async fn heals<S: Healing>(store: &S, limits: &Limits<Policy>) {
    assert!(store.health().await.findings().is_empty());
    let later = Now::At(Timestamp::saturating_from_us(now().as_us() + HOUR_US * 24));
    for key in CALLERS {
        let _ = apply(store, limits, key, (Op::Acquire, 7, later)).await;
    }
    let _ = apply(store, limits, "in time", (Op::Acquire, 7, Now::Store)).await;
    let in_time = apply(store, limits, "in time", (Op::Peek, 0, Now::Store)).await;
    let health = store.health().await;
    let told = health.findings().iter().map(ToString::to_string).collect::<String>();
    assert!(health.is_ready() && told.contains("from the future, by up to 8"), "{told}");

    let due = CALLERS.len() * limits.as_slice().len();
    let found = store.heal(limits, DRY).await;
    assert_eq!((found.states.len(), found.skipped, found.is_cut), (due, 0, false), "{found:?}");
    assert!(found.states.iter().all(|state| state.ahead_us > HOUR_US * 22), "{found:?}");
    // The dry run has changed nothing, and a scan that is cut says so.
    let some = store.heal(limits, HealOptions { max_keys: 1, count: 1, ..DRY }).await;
    assert!(some.is_cut && some.keys == 1 && some.states.len() < due, "{some:?}");
    let healed = store.heal(limits, HealOptions { dry_run: false, ..DRY }).await;
    assert_eq!(healed.states.len(), due, "{healed:?}");
    is_full(store, limits).await;
    assert_eq!(store.heal(limits, DRY).await.states, []);
    assert!(store.health().await.findings().is_empty());
    // What holds its key no longer than a full limit is left alone.
    let after = apply(store, limits, "in time", (Op::Peek, 0, Now::Store)).await;
    for (before, after) in in_time.iter().zip(after) {
        assert!(after.remaining >= before.remaining && after.remaining < 10, "{after:?}");
    }
}

async fn states_from_the_future_are_reported_and_cut_to_a_full_limit_in_every_mode(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let cluster = RedisCluster::start().expect("a cluster");
    for (url, secret) in
        [(url(&server, client), ""), (with_client(&cluster.url(), client), "hidden")]
    {
        let builder = RedisStore::builder();
        let builder = if secret.is_empty() { builder } else { builder.hide_identifiers(secret) };
        let store = builder.connect(&url).await.expect("it is up");
        heals(&store, &limits("")).await;
        heals(&store.in_mode::<Cas>(), &limits("")).await;
        heals(&store.in_mode::<Multi>(), &limits(" count attempts")).await;
    }
}

with_each_client!(states_from_the_future_are_reported_and_cut_to_a_full_limit_in_every_mode);

#[tokio::test]
async fn requests_during_the_healing_are_admitted_by_the_old_state_or_by_the_new_one() {
    let server = RedisServer::start().expect("redis-server");
    let store = RedisStore::connect(&url(&server, Client::default())).await.expect("it is up");
    let limits = limits("");
    for round in 1..=3 {
        let later = Now::At(Timestamp::saturating_from_us(now().as_us() + 3 * HOUR_US * round));
        let _ = apply(&store, &limits, "alice", (Op::Force, 10, later)).await;
        let asking = async {
            for _ in 0..50 {
                let decisions = apply(&store, &limits, "alice", (Op::Acquire, 1, Now::Store)).await;
                assert!(decisions.iter().all(|decision| !decision.allowed), "{decisions:?}");
            }
        };
        let healing = store.heal(&limits, HealOptions::default());
        let (healed, ()) = futures_util::join!(healing, asking);
        assert_eq!(healed.expect("it answers").states.len(), limits.as_slice().len());
    }
}

#[tokio::test]
async fn a_value_that_no_limit_wrote_is_skipped_and_left() {
    let server = RedisServer::start().expect("redis-server");
    let store = RedisStore::connect(&url(&server, Client::default())).await.expect("it is up");
    query::<()>(&mut aside(&server), &["SET", "rl:1::{alice}", "7"]);
    query::<()>(&mut aside(&server), &["SET", "rl:1:l7:{alice}", "7"]);
    query::<()>(&mut aside(&server), &["SET", "rl:1:other:{alice}", "7"]);
    let healed = store.heal(&limits(""), HealOptions::default()).await.expect("it answers");
    assert_eq!((healed.keys, healed.skipped, healed.states.len()), (3, 2, 0), "{healed:?}");
    assert_eq!(query::<u64>(&mut aside(&server), &["DBSIZE"]), 3);
}

#[tokio::test]
async fn a_clock_that_differs_from_the_programs_or_cannot_be_is_reported() {
    let server = RedisServer::start().expect("redis-server");
    for (ahead_s, is_ready, says) in [
        (0, true, ""),
        (7_200, true, " s ahead of"),
        (-7_200, true, " s behind"),
        (-1_700_000_000, false, "cannot be"),
    ] {
        let connection =
            RedisConnection::open(&server.url(), Duration::from_secs(20)).await.expect("it is up");
        let meddled = Meddled::new(connection).clock_ahead(ahead_s);
        let health =
            RedisStore::builder().over(Arc::new(meddled)).expect("a prefix").health().await;
        let told = health.findings().iter().map(ToString::to_string).collect::<String>();
        assert_eq!((health.is_ready(), told.contains(says)), (is_ready, true), "{told}");
        assert_eq!(health.findings().len(), usize::from(ahead_s != 0), "{told}");
    }
}

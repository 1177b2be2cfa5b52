//! The model of Redis decides as the pure step does, in the modes of scripts, as the servers do:
//! what the store finds in a simulation it would find on a server.

use std::sync::Arc;
use std::time::Duration;

use ratelimit_core::algorithm::AnyState;
use ratelimit_core::store::{Batch, Check};
use ratelimit_core::{AnyAlgorithm, Limit, Store, Timestamp};
use ratelimit_redis::{Builder as StoreBuilder, Cas, Lua, Mode, RedisStore, Reply};
use ratelimit_simulation::{ModelConnection, ModelServer, Network};
use ratelimit_testkit::{Harness, Property, StoreClock, conformance, regression};
use tokio::runtime::{Builder, Runtime};

/// Longer than any request takes.
const PATIENCE: Duration = Duration::from_secs(60);
const BEGIN_US: u64 = 1_795_218_392_123_456;
/// How much longer than its state matters a key may live.
const SLACK_MS: u128 = 2_000;

/// A key that is compared before it is written stays for as long as a request may take.
fn kept_longer<M: Mode>() -> Duration {
    if M::NAME == Cas::NAME { PATIENCE } else { Duration::ZERO }
}

/// Servers of a test, and their clock.
struct Model {
    runtime: Runtime,
    network: Arc<Network>,
}

impl Model {
    fn new(servers: usize) -> Self {
        // Its clock runs: threads wait for one another where they share a runtime.
        let runtime = Builder::new_current_thread().enable_time().build().expect("a runtime");
        let network = runtime.block_on(async move {
            Network::new((0..servers).map(|_| ModelServer::new(0, 0)).collect(), 0)
        });
        Self { runtime, network }
    }

    fn store<M: Mode>(&self, builder: StoreBuilder<M>) -> RedisStore<M, ModelConnection> {
        for server in self.network.servers() {
            server.restart();
            server.set(BEGIN_US);
        }
        let connection = ModelConnection::new(&self.network);
        builder.deadline(PATIENCE).over(connection).expect("a plain prefix")
    }

    fn clock(&self) -> StoreClock {
        let network = Arc::clone(&self.network);
        let set = move |now: Timestamp| {
            network.servers().iter().for_each(|server| server.set(now.as_us()));
        };
        StoreClock::settable(set)
    }

    /// The keys that live for too long.
    fn leaks(&self, within: Duration) -> Vec<String> {
        let most_ms = i64::try_from(within.as_millis() + SLACK_MS).unwrap_or(i64::MAX);
        let mut kept = Vec::new();
        for server in self.network.servers() {
            let asked = |words: [&[u8]; 2]| server.execute(&words.map(<[u8]>::to_vec));
            let Ok(Reply::Array(keys)) = asked([b"KEYS", b"*"]) else { panic!("no list of keys") };
            for key in keys {
                let Reply::Text(key) = key else { panic!("{key:?}") };
                let ttl = asked([b"PTTL", &key]);
                let Ok(Reply::Integer(ttl_ms)) = ttl else { panic!("{ttl:?}") };
                if ttl_ms < 0 || ttl_ms > most_ms {
                    kept.push(format!("{} lives for {ttl_ms} ms", String::from_utf8_lossy(&key)));
                }
            }
        }
        kept
    }
}

/// Writes the harness of a mode on so many servers, and its tests.
macro_rules! conformance_on {
    ($name:ident, $harness:ident, $servers:literal, $mode:ty, $builder:expr $(, $only:ident)?) => {
        pub(super) struct $harness(Model);

        impl Harness for $harness {
            type Store = RedisStore<$mode, ModelConnection>;
            const CASES: u32 = 16;
            const SMALL_TRACE_REQUESTS: u32 = 2;

            fn new() -> Self {
                Self(Model::new($servers))
            }

            fn store(&self) -> Self::Store {
                self.0.store($builder)
            }

            fn block_on<F: Future>(&self, future: F) -> F::Output {
                self.0.runtime.block_on(future)
            }

            fn clock(&self, _: &Self::Store) -> StoreClock {
                self.0.clock()
            }

            async fn state(&self, store: &Self::Store, limit: &Limit<AnyAlgorithm>, key: &str) -> Option<AnyState> {
                store.state(limit, key).await.expect("a state, or none")
            }

            async fn leaks(&self, _: &Self::Store, within: Duration) -> Vec<String> {
                self.0.leaks(within + kept_longer::<$mode>())
            }
        }

        conformance!($name, $harness $(, $only)?);
    };
}

#[rustfmt::skip]
mod on_one_server {
    use super::*;

    conformance_on!(lua, OneLua, 1, Lua, RedisStore::builder());
    conformance_on!(cas, OneCas, 1, Cas, RedisStore::builder().cas());
}

#[rustfmt::skip]
mod on_a_cluster {
    use super::*;

    conformance_on!(lua, ClusterLua, 3, Lua, RedisStore::builder(), batches);
    conformance_on!(cas, ClusterCas, 3, Cas, RedisStore::builder().cas(), batches);
}

/// The server's clock has whole milliseconds for a key's life. Half a millisecond before the wait
/// is over, the state is still there.
#[test]
fn a_state_is_kept_to_its_last_microsecond() {
    for limit in ["gcra 1/10500us burst 1", "sliding-log 1/10500us", "window-log 1/10500us"] {
        let id = "00000000000000000000000000000001";
        let case = format!(
            "limit l0: {limit}\nat 600 acquire 1 of \"a\" under {id}\nat 11050 acquire 1 of \"a\"",
        );
        regression::<on_one_server::OneLua>(Property::DecidesByItsOwnClock, &case);
    }
}

/// Law 9: a busy caller keeps no state of a window that was changed, long after that has ended.
#[test]
fn what_an_old_window_left_goes_while_the_caller_is_busy() {
    const HOUR_US: u64 = 3_600_000_000;
    let model = Model::new(1);
    let store = model.store(RedisStore::builder());
    let server = &model.network.servers()[0];
    let busy = |algorithm: &str, from_us: u64, hours: u64| {
        let limit =
            Limit::new("api", algorithm.parse::<AnyAlgorithm>().expect(algorithm)).expect("a name");
        let check = Check { limit: &limit, key: "alice", cost: 1 };
        for minutes in 0..hours * 60 {
            server.set(from_us + minutes * 60_000_000);
            let answer = model.runtime.block_on(store.apply(&Batch::one(&check)));
            assert!(answer.expect("it answers").allowed(), "{algorithm}");
        }
    };
    let fields = || {
        let words = [&b"HLEN"[..], b"rl:1::{alice}"].map(<[u8]>::to_vec);
        server.execute(&words).expect("it answers")
    };
    let algorithms = [
        "fixed-window 60/h",
        "sliding-counter 90/h",
        "bucketed-window bucket 1m rates 60/h",
        "gcra 60/h",
        "fixed-window 1440/d",
    ];
    let mut at_us = BEGIN_US;
    for algorithm in algorithms {
        busy(algorithm, at_us, 5);
        at_us += 5 * HOUR_US;
        // Its own, and at most those of the last hours.
        assert!(matches!(fields(), Reply::Integer(1..=2)), "{algorithm}: {:?}", fields());
    }
    busy("gcra 60/h", at_us, 48);
    assert_eq!(fields(), Reply::Integer(1));
}

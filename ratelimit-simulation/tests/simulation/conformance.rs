//! The model of Redis decides as the pure step does, in the modes of scripts, as the servers do:
//! what the store finds in a simulation it would find on a server.

use std::sync::Arc;
use std::time::Duration;

use ratelimit_core::algorithm::AnyState;
use ratelimit_core::store::{Batch, Check};
use ratelimit_core::{
    AnyAlgorithm, ErrorKind, Limit, ManualClock, Store, StoreError as _, Timestamp,
};
use ratelimit_redis::{Builder as StoreBuilder, Cas, Lua, Mode, RedisStore, Reply};
use ratelimit_simulation::{ModelConnection, ModelServer, Network};
use ratelimit_testkit::{
    Calendars, Harness, Property, StoreClock, algorithm_conformance, conformance,
    record_conformance, regression,
};
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
    /// That of the program, which is set as those of the servers are.
    clock: ManualClock,
}

impl Model {
    fn new(servers: usize) -> Self {
        // Its clock runs: threads wait for one another where they share a runtime.
        let runtime = Builder::new_current_thread().enable_time().build().expect("a runtime");
        let network = runtime.block_on(async move {
            Network::new((0..servers).map(|_| ModelServer::new(0, 0)).collect(), 0)
        });
        Self { runtime, network, clock: ManualClock::new(Timestamp::ZERO) }
    }

    fn store<M: Mode>(&self, builder: StoreBuilder<M>) -> RedisStore<M, ModelConnection> {
        for server in self.network.servers() {
            server.restart();
            server.set(BEGIN_US);
        }
        self.clock.set(Timestamp::saturating_from_us(BEGIN_US));
        let connection = ModelConnection::new(&self.network);
        builder
            .deadline(PATIENCE)
            .clock(self.clock.clone())
            .over(connection)
            .expect("a plain prefix")
    }

    fn clock(&self) -> StoreClock {
        let (network, clock) = (Arc::clone(&self.network), self.clock.clone());
        let set = move |now: Timestamp| {
            clock.set(now);
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
    record_conformance!(lua_records, OneLua);
    record_conformance!(cas_records, OneCas);
}

// Windows of calendars, at the times at which those go wrong.
algorithm_conformance!(calendars_by_scripts, Calendars, on on_one_server::OneLua);
algorithm_conformance!(calendars_by_cas, Calendars, on on_one_server::OneCas);

#[rustfmt::skip]
mod on_a_cluster {
    use super::*;

    conformance_on!(lua, ClusterLua, 3, Lua, RedisStore::builder(), batches);
    conformance_on!(cas, ClusterCas, 3, Cas, RedisStore::builder().cas(), batches);
    record_conformance!(lua_records, ClusterLua);
    record_conformance!(cas_records, ClusterCas);
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

/// A month is that of the server's clock, which the program's may be off by a window: then the
/// request fails, and says so.
#[test]
fn the_servers_clock_decides_which_window_of_a_calendar_counts() {
    const DAY_US: u64 = 86_400_000_000;
    let model = Model::new(1);
    let store = model.store(RedisStore::builder());
    let server = &model.network.servers()[0];
    let words = "fixed-window 2/month zone Europe/Berlin";
    let limit = Limit::new("api", words.parse::<AnyAlgorithm>().expect(words)).expect("a name");
    let ask = |[server_us, program_us]: [u64; 2]| {
        server.set(server_us);
        model.clock.set(Timestamp::saturating_from_us(program_us));
        let check = Check { limit: &limit, key: "alice", cost: 1 };
        model.runtime.block_on(store.apply(&Batch::one(&check)))
    };
    let remaining = |times| ask(times).map(|verdict| verdict.remaining()).expect("it answers");
    // In Berlin, December begins at this time.
    let december = 1_796_079_600_000_000;
    assert_eq!(remaining([december - 1, december - 1]), 1);
    assert_eq!(remaining([december - 1, december]), 0);
    assert_eq!(remaining([december, december - 1]), 1);
    assert_eq!(remaining([december + 30 * DAY_US, december - 1]), 0);
    // The wait is that until January by the server's clock.
    let denied = ask([december, december - 1]).expect("it answers");
    assert_eq!(denied.retry_after(), Some(Duration::from_secs(31 * 86_400)));
    for times in [[december + 31 * DAY_US, december - 1], [december - 1, december + 31 * DAY_US]] {
        let error = ask(times).expect_err("a window apart");
        assert_eq!(error.kind(), ErrorKind::Config);
        for says in
            ["limit \"api\"", "model:6379", "NTP", &times[0].to_string(), &times[1].to_string()]
        {
            assert!(error.to_string().contains(says), "{error} lacks {says}");
        }
    }
    // Nothing was charged.
    let january = december + 31 * DAY_US;
    assert_eq!(remaining([january, january]), 1);
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

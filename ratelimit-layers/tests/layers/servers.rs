//! One of several servers of a store is unreachable: its keys are decided without it, all others by
//! their servers.

use std::collections::BTreeSet;
use std::time::Duration;

use ratelimit_core::algorithm::AnyState;
use ratelimit_core::store::{Batch, Check, Op, SnapshotStore, WithSnapshot};
use ratelimit_core::{
    AnyAlgorithm, DynStore, ErrorKind, Limit, ManualClock, OnOutage, ReservationId, Source, Store,
    StoreError as _, Verdict,
};
use ratelimit_layers::{
    Allotments, BreakerState, DenialCache, Fallback, Metrics, OnRecovery, TopDenied, Traced,
};
use ratelimit_redis::RedisStore;
use ratelimit_servers::RedisCluster;
use tokio::time::{advance, sleep, timeout};

use crate::common::{
    BEGIN, Fake, FakeError, Mode, PAUSE, UNAVAILABLE, ask, fallback, limit, limits, run_until_idle,
};

/// Stores that share the keys, each by the digit that they begin with.
struct Several(Vec<Fake>);

impl Several {
    fn new(servers: usize, clock: &ManualClock) -> Self {
        Self((0..servers).map(|_| Fake::new(clock)).collect())
    }

    fn servers(batch: &Batch<'_, AnyAlgorithm>) -> BTreeSet<usize> {
        let digit = |check: &Check<'_, AnyAlgorithm>| usize::from(check.key.as_bytes()[0] - b'0');
        batch.checks().iter().map(digit).collect()
    }
}

impl Store<AnyAlgorithm> for Several {
    type Error = FakeError;

    async fn apply(&self, batch: &Batch<'_, AnyAlgorithm>) -> Result<Verdict, FakeError> {
        Ok(self.apply_with_snapshot(batch).await?.0)
    }

    fn server_of(&self, batch: &Batch<'_, AnyAlgorithm>) -> Option<u64> {
        Some(Self::servers(batch).into_iter().map(|server| 1 << server).sum())
    }
}

impl SnapshotStore<AnyAlgorithm> for Several {
    /// A batch across servers asks all of them, and the first decides.
    async fn apply_with_snapshot(
        &self,
        batch: &Batch<'_, AnyAlgorithm>,
    ) -> Result<WithSnapshot<AnyState>, FakeError> {
        let servers = Self::servers(batch);
        for server in servers.iter().skip(1) {
            let _looked = self.0[*server].apply(&batch.op(Op::Peek)).await?;
        }
        self.0[*servers.first().expect("a check")].apply_with_snapshot(batch).await
    }
}

fn closed_limit() -> Limit<AnyAlgorithm> {
    limit("hourly", "gcra 1000/h burst 1000").on_outage(OnOutage::Closed)
}

/// How many of these requests were decided by the store.
async fn count_decided<S: Store<AnyAlgorithm>>(
    store: &S,
    limit: &Limit<AnyAlgorithm>,
    keys: &[&str],
) -> usize {
    let mut decided = 0;
    for key in keys {
        let check = Check { limit, key, cost: 1 };
        let said = store.apply(&Batch::one(&check)).await.expect("decides");
        decided += usize::from(said.source() == Source::Store && said.allowed());
    }
    decided
}

/// However it fails, with whichever layers between, and however many of its keys are asked about
/// first.
#[tokio::test(start_paused = true)]
async fn a_server_that_is_away_takes_away_its_own_keys_only() {
    for mode in [UNAVAILABLE, Mode::Fails(ErrorKind::Indeterminate), Mode::Hangs] {
        let (clock, limit) = (ManualClock::new(BEGIN), closed_limit());
        let all = [limit.clone()];
        let store = fallback(Fallback::builder(), Several::new(3, &clock), &clock, &all);
        store.store().0[1].set(mode);
        assert_eq!(count_decided(&store, &limit, &["1"; 20]).await, 0);
        assert_eq!((store.breaker(), store.open_breakers()), (BreakerState::Open, 1), "{mode:?}");
        assert_eq!(store.store().0[1].calls(), 5);
        let healthy = ["0", "2", "0a", "2b"].repeat(50);
        assert_eq!(count_decided(&store, &limit, &healthy).await, 200, "{mode:?}");
        // Interleaved with those of the server that is away, and across the healthy ones.
        assert_eq!(count_decided(&store, &limit, &["0", "1", "2", "1"].repeat(50)).await, 100);
        let across = |other: &'static str| [("0", 1), (other, 1)];
        for (other, due) in [("1", 0), ("2", 20)] {
            let mut decided = 0;
            for _ in 0..20 {
                let checks = across(other).map(|(key, cost)| Check { limit: &limit, key, cost });
                let batch = Batch::new(&checks).expect("distinct");
                let said = store.apply(&batch).await.expect("decides");
                decided += usize::from(said.source() == Source::Store);
            }
            assert_eq!(decided, due, "{mode:?} across {other}");
        }
        assert_eq!(store.open_breakers(), 2, "the server, and with another one");

        // Streams of healthy servers settle meanwhile, and those of the other when it is back.
        let settle = async |key: &str, cost: u64, op: Op| {
            let check = Check { limit: &limit, key, cost };
            store.apply(&Batch::one(&check).op(op).id(ReservationId::new(7))).await
        };
        assert!(settle("2", 9, Op::Acquire).await.expect("reserves").allowed());
        assert!(settle("2", 1, Op::Settle).await.is_ok());
        assert!(settle("1", 1, Op::Settle).await.expect_err("away").kind().is_outage());

        store.store().0[1].set(Mode::Answers);
        advance(PAUSE).await;
        assert_eq!(count_decided(&store, &limit, &["1"; 5]).await, 5);
    }
}

#[tokio::test(start_paused = true)]
async fn every_wrapper_tells_the_server_of_the_store_within() {
    let (clock, limit) = (ManualClock::new(BEGIN), closed_limit());
    let all = [limit.clone()];
    let within = std::sync::Arc::new(Several::new(3, &clock));
    let cache = DenialCache::<_, AnyAlgorithm>::new(within.clone());
    let within_all = fallback(Fallback::builder(), Allotments::new(cache), &clock, &all);
    let all_layers = Metrics::new(Traced::new(TopDenied::new(within_all, 16)));
    let erased: std::sync::Arc<dyn DynStore<AnyAlgorithm>> = std::sync::Arc::new(all_layers);
    for key in ["0", "1", "2x"] {
        let check = Check { limit: &limit, key, cost: 1 };
        let batch = Batch::one(&check);
        let due = within.server_of(&batch);
        assert!(due.is_some() && erased.server_of(&batch) == due, "{key}");
        assert_eq!(Store::<AnyAlgorithm>::server_of(&&*within, &batch), due);
    }
    // The layers between do not hide which server fails.
    within.0[1].set(UNAVAILABLE);
    for _ in 0..20 {
        let _refused = ask(&erased, &limit, "1", 1).await;
    }
    let served = ["0", "2"].repeat(20);
    let mut fallbacks = 0;
    for key in served {
        fallbacks += usize::from(ask(&erased, &limit, key, 1).await.source() == Source::Fallback);
    }
    assert_eq!(fallbacks, 0);
}

/// What was admitted without a server is charged when it is back, and waits for no other.
#[tokio::test(start_paused = true)]
async fn a_recovery_waits_for_no_other_server() {
    let clock = ManualClock::new(BEGIN);
    let limit = limit("hourly", "gcra 300/h burst 300").on_outage(OnOutage::Local);
    let all = [limit.clone()];
    let settings = Fallback::builder().on_recovery(OnRecovery::Charge);
    let store = fallback(settings, Several::new(3, &clock), &clock, &all);
    for server in [1, 2] {
        store.store().0[server].set(UNAVAILABLE);
    }
    for n in 0..10 {
        for server in [1, 2] {
            let key = format!("{server}{n}");
            assert_eq!(ask(&store, &limit, &key, 3).await.source(), Source::Fallback);
        }
    }
    assert_eq!((store.open_breakers(), store.pending_charges()), (2, 20));
    // Answers of a healthy server start no end of attempts: what is left waits for servers that are
    // away.
    for server in &store.store().0 {
        server.calls();
    }
    for _ in 0..100 {
        assert_eq!(ask(&store, &limit, "0", 1).await.source(), Source::Store);
        run_until_idle().await;
    }
    assert_eq!([0, 1, 2].map(|server| store.store().0[server].calls()), [100, 0, 0]);

    store.store().0[2].set(Mode::Answers);
    advance(PAUSE).await;
    assert_eq!(ask(&store, &limit, "2", 1).await.source(), Source::Store);
    sleep(Duration::from_millis(1)).await;
    assert_eq!((store.open_breakers(), store.pending_charges()), (1, 10));
    assert_eq!(store.store().0[2].remaining(&limit, "27"), 297);

    store.store().0[1].set(Mode::Answers);
    advance(PAUSE).await;
    assert_eq!(ask(&store, &limit, "1", 1).await.source(), Source::Store);
    sleep(Duration::from_millis(1)).await;
    assert_eq!((store.open_breakers(), store.pending_charges()), (0, 0));
    assert_eq!(store.store().0[1].remaining(&limit, "17"), 297);
}

/// A real cluster loses a master without a replica.
#[tokio::test]
async fn a_cluster_that_loses_a_master_decides_the_keys_of_the_others() {
    let cluster = RedisCluster::start().expect("a cluster");
    for node in cluster.nodes() {
        node.command(&["CONFIG", "SET", "cluster-require-full-coverage", "no"]).expect("a setting");
    }
    let limit = closed_limit();
    let all = limits(std::slice::from_ref(&limit));
    let redis = RedisStore::builder().deadline(Duration::from_millis(500));
    let redis = redis.connect(&cluster.url()).await.expect("a store");
    // No timer takes part: a dead process refuses connections at once.
    let settings = Fallback::builder().deadline(Duration::from_secs(30)).probe_after(Duration::MAX);
    let store = settings.build(redis, &all).expect("choices");
    let keys: Vec<String> = (0..300).map(|n| n.to_string()).collect();
    let dead = 1;
    let is_dead = |key: &String| {
        let slot = cluster.slot_of(&store.store().key(&limit, key));
        cluster.master_of(slot).expect("an owner") == dead
    };
    let (of_dead, healthy): (Vec<_>, Vec<_>) = keys.iter().partition(|key| is_dead(key));
    for key in &keys {
        assert_eq!(ask(&store, &limit, key, 1).await.source(), Source::Store);
    }
    let reserve = |op, cost| {
        let (store, limit, key) = (store.clone(), limit.clone(), healthy[0].clone());
        async move {
            let check = Check { limit: &limit, key: &key, cost };
            store.apply(&Batch::one(&check).op(op).id(ReservationId::new(9))).await
        }
    };
    assert!(reserve(Op::Acquire, 500).await.expect("reserves").allowed());
    cluster.nodes()[dead].stop();
    for key in of_dead.iter().cycle().take(40) {
        let said = timeout(Duration::from_secs(60), ask(&store, &limit, key, 1)).await;
        assert_eq!(said.expect("in time").source(), Source::Fallback);
    }
    assert_eq!((store.breaker(), store.open_breakers()), (BreakerState::Open, 1));
    for key in &healthy {
        assert_eq!(ask(&store, &limit, key, 1).await.source(), Source::Store, "{key}");
    }
    assert_eq!(reserve(Op::Settle, 1).await.expect("settles").remaining(), 1000 - 3);
}

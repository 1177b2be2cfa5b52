//! Batches over several slots, decided in two waves: on one server that poses as a cluster, so batches
//! of several identifiers are split, and every law can be checked on them quickly.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::common::{Meddled, Meddling};
use ratelimit_core::{
    Attempts, Batch, Check, ErrorKind, FixedWindow, Gcra, Limit, Op, Policy, PolicyState, Store,
    StoreError, Verdict,
};
use ratelimit_redis::{
    Argument, Builder, Cas, CrossSlot, Lua, Mode, Multi, RedisConnection, RedisError, RedisStore,
    Tag,
};
use ratelimit_testkit::{
    AlgorithmKind, Capability, Harness, Property, RedisServer, Scope, try_same,
};
use tokio::runtime::Runtime;

const DEADLINE: Duration = Duration::from_secs(20);
const CASES: u32 = 2;

/// What a transaction cannot do.
const NOTHING_BACK: &[Capability] =
    &[Capability::Refund, Capability::Force, Capability::Reservations, Capability::TimesInOrder];

static NEXT_PREFIX: AtomicU64 = AtomicU64::new(0);

/// A store on one server that splits what a cluster would split.
struct Split<M> {
    runtime: Runtime,
    connection: Arc<Meddled>,
    builder: fn() -> Builder<M>,
}

impl<M: Mode> Split<M> {
    fn new(builder: fn() -> Builder<M>, may_repeat: bool) -> Self {
        let server = RedisServer::shared().expect("a server to test on");
        let runtime = Runtime::new().expect("a runtime");
        let connection = runtime.block_on(RedisConnection::open(&server.url(), DEADLINE));
        let connection = Meddled::new(connection.expect("the server is up"));
        let connection = Arc::new(connection.clustered().repeating(may_repeat));
        Self { runtime, connection, builder }
    }

    fn store(&self) -> RedisStore<M, Arc<Meddled>> {
        let prefix = format!("split{}", NEXT_PREFIX.fetch_add(1, Ordering::Relaxed));
        (self.builder)()
            .prefix(&prefix)
            .deadline(DEADLINE)
            .over(Arc::clone(&self.connection))
            .expect("a prefix")
    }
}

macro_rules! harness {
    ($mode:ty, $lacks:expr) => {
        impl Harness for Split<$mode> {
            type Store = RedisStore<$mode, Arc<Meddled>>;
            const LACKS: &'static [Capability] = $lacks;

            fn new() -> Self {
                panic!("made by hand");
            }

            fn store(&self) -> Self::Store {
                self.store()
            }

            fn block_on<F: Future>(&self, future: F) -> F::Output {
                self.runtime.block_on(future)
            }

            async fn state(
                &self,
                store: &Self::Store,
                limit: &Limit<Policy>,
                key: &str,
            ) -> Option<PolicyState> {
                store.state(limit, key).await.expect("a state, or none")
            }

            async fn leaks(&self, _: &Self::Store, _within: Duration) -> Vec<String> {
                Vec::new()
            }
        }
    };
}

harness!(Lua, &[]);
harness!(Cas, &[]);
harness!(Multi, NOTHING_BACK);

/// Checks every law about batches.
fn laws<M>(harness: &Split<M>, scopes: &[Scope])
where
    Split<M>: Harness,
{
    for &scope in scopes {
        for property in Property::ALL.into_iter().filter(|property| property.applies(scope)) {
            // These use one key at a time, or are about keys only.
            if matches!(
                property,
                Property::EverySmallTraceAgreesWithTheOracle
                    | Property::DifferentKeysNeverMeet
                    | Property::SimilarKeysNeverMeet
                    | Property::TwoNamesOneMachine
                    | Property::NothingLeaks
                    | Property::ReservationsLeakNothing
            ) {
                continue;
            }
            if let Err(failure) = try_same(harness, property, scope, CASES) {
                panic!("{scope:?}, {property:?}: {failure}");
            }
        }
    }
}

fn all() -> Vec<Scope> {
    [Scope::Mixed].into_iter().chain(AlgorithmKind::ALL.map(Scope::One)).collect()
}

#[test]
fn lua_keeps_the_laws() {
    laws(&Split::<Lua>::new(RedisStore::builder, false), &all());
}

#[test]
fn cas_keeps_the_laws() {
    laws(&Split::<Cas>::new(|| RedisStore::builder().cas(), false), &all());
}

#[test]
fn multi_keeps_the_laws() {
    let scopes: Vec<_> = [Scope::MixedAttempts]
        .into_iter()
        .chain(AlgorithmKind::INCREMENT_FIRST.map(Scope::Attempts))
        .collect();
    laws(&Split::<Multi>::new(|| RedisStore::builder().multi(), false), &scopes);
}

#[test]
fn lua_keeps_the_laws_with_a_client_that_repeats() {
    laws(&Split::<Lua>::new(RedisStore::builder, true), &[Scope::Mixed]);
}

#[test]
fn cas_keeps_the_laws_with_a_client_that_repeats() {
    laws(&Split::<Cas>::new(|| RedisStore::builder().cas(), true), &[Scope::Mixed]);
}

/// Two limits of 3 per hour, for the address and for the user.
fn address_and_user() -> [Limit<Policy>; 2] {
    ["address", "user"].map(|name| {
        let gcra = Gcra::new("3/h".parse().expect("a rate"), 3).expect("a limit");
        Limit::new(name, Policy::from(gcra)).expect("a name")
    })
}

async fn meddled(
    before: impl Fn(&[Argument<'_>]) -> Meddling + Send + Sync + 'static,
) -> (RedisServer, Arc<Meddled>) {
    let server = RedisServer::start().expect("redis-server");
    let connection = RedisConnection::open(&server.url(), DEADLINE).await.expect("it is up");
    (server, Arc::new(Meddled::new(connection).clustered().before(before)))
}

/// Whether a command asks the script for this operation on this key.
fn says(words: &[Argument<'_>], operation: &str, key: &str) -> bool {
    let any = |is: &dyn Fn(&str) -> bool| {
        words.iter().any(|word| matches!(word, Argument::Text(text) if is(text)))
    };
    any(&|text| text == operation) && any(&|text| text.ends_with(&format!("{{{key}}}")))
}

async fn acquire(
    store: &RedisStore<Lua, Arc<Meddled>>,
    limits: &[Limit<Policy>; 2],
    keys: [&str; 2],
) -> Result<Verdict, RedisError> {
    let checks = [0, 1].map(|n| Check { limit: &limits[n], key: keys[n], cost: 1 });
    store.apply(&Batch::new(&checks).expect("distinct")).await
}

async fn remaining(store: &RedisStore<Lua, Arc<Meddled>>, limit: &Limit<Policy>, key: &str) -> u64 {
    let check = Check { limit, key, cost: 0 };
    store.apply(&Batch::one(&check).op(Op::Peek)).await.expect("it answers").remaining()
}

#[tokio::test]
async fn a_slots_charge_is_returned_when_another_slot_is_unreachable() {
    for (what, kind) in [
        (Meddling::NeverSent, ErrorKind::Unavailable),
        (Meddling::AnswerLost, ErrorKind::Indeterminate),
    ] {
        let (_server, connection) =
            meddled(
                move |words| {
                    if says(words, "reserve", "alice") { what } else { Meddling::None }
                },
            )
            .await;
        let store = RedisStore::builder().over(connection).expect("a prefix");
        let limits = address_and_user();
        let error = acquire(&store, &limits, ["1.2.3.4", "alice"]).await.expect_err("meddled with");
        assert_eq!(error.kind(), kind, "{error}");
        assert_eq!(remaining(&store, &limits[0], "1.2.3.4").await, 3);
        let charged = u64::from(what == Meddling::AnswerLost);
        assert_eq!(remaining(&store, &limits[1], "alice").await, 3 - charged);
    }
}

#[tokio::test]
async fn a_charge_that_cannot_be_returned_is_reported() {
    let (_server, connection) = meddled(|words| {
        let stopped = says(words, "reserve", "alice") || says(words, "undo", "1.2.3.4");
        if stopped { Meddling::NeverSent } else { Meddling::None }
    })
    .await;
    let store = RedisStore::builder().over(connection).expect("a prefix");
    let limits = address_and_user();
    let error = acquire(&store, &limits, ["1.2.3.4", "alice"]).await.expect_err("meddled with");
    assert_eq!(error.kind(), ErrorKind::Indeterminate, "{error}");
    assert!(error.to_string().contains("done in part"), "{error}");
    assert_eq!(remaining(&store, &limits[0], "1.2.3.4").await, 2);
    assert_eq!(remaining(&store, &limits[1], "alice").await, 3);
}

#[tokio::test]
async fn a_denied_batch_writes_nothing_in_any_slot() {
    let writes = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&writes);
    let (_server, connection) = meddled(move |words| {
        if ["1.2.3.4", "alice"].iter().any(|key| says(words, "reserve", key)) {
            counted.fetch_add(1, Ordering::Relaxed);
        }
        Meddling::None
    })
    .await;
    let store = RedisStore::builder().over(connection).expect("a prefix");
    let limits = address_and_user();
    for _ in 0..3 {
        assert!(acquire(&store, &limits, ["5.6.7.8", "alice"]).await.expect("decides").allowed());
    }
    writes.store(0, Ordering::Relaxed);
    let verdict = acquire(&store, &limits, ["1.2.3.4", "alice"]).await.expect("decides");
    assert_eq!(verdict.denied_by().collect::<Vec<_>>(), [1]);
    assert_eq!(verdict.decisions()[0].remaining, 3, "as before the request");
    assert_eq!(writes.load(Ordering::Relaxed), 0);
}

/// Callers that stop anywhere: dropped between any two commands, or cut off from a server.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_stopped_between_the_waves_never_raises_a_limit() {
    let sent = AtomicU64::new(0);
    let (_server, connection) = meddled(move |_| match sent.fetch_add(1, Ordering::Relaxed) % 7 {
        3 => Meddling::NeverSent,
        5 => Meddling::AnswerLost,
        _ => Meddling::None,
    })
    .await;
    let limits = Arc::new(every_limit());
    for keys in 0..limits.len() {
        let store = RedisStore::builder().over(Arc::clone(&connection)).expect("a prefix");
        let mut tasks = tokio::task::JoinSet::new();
        for task in 0..24 {
            let (store, limits) = (store.clone(), Arc::clone(&limits));
            tasks.spawn(async move {
                let mut admitted = 0;
                for request in 0..6 {
                    let names = [format!("a{keys}"), format!("b{keys}")];
                    let checks =
                        [0, 1].map(|n| Check { limit: &limits[keys], key: &names[n], cost: 1 });
                    let batch = Batch::new(&checks).expect("distinct");
                    let asking = store.apply(&batch);
                    // Some callers give up after a time that ends between any two commands.
                    let patience = Duration::from_micros(300 + 150 * (task * 6 + request) % 3_000);
                    if let Ok(Ok(verdict)) = tokio::time::timeout(patience, asking).await {
                        admitted += u64::from(verdict.allowed());
                    }
                }
                admitted
            });
        }
        let mut admitted = 0;
        while let Some(task) = tasks.join_next().await {
            admitted += task.expect("no panic");
        }
        assert!(admitted <= 20, "{}: {admitted} of 20", limits[keys].name());
    }
}

/// A limit of 20 per month for every algorithm.
fn every_limit() -> Vec<Limit<Policy>> {
    let rate = "20/30d".parse().expect("a rate");
    let limit = |kind: AlgorithmKind| {
        Limit::new(&format!("{kind:?}"), kind.policy(rate, 20)).expect("a name")
    };
    AlgorithmKind::ALL.into_iter().map(limit).collect()
}

#[tokio::test]
async fn a_strict_store_refuses_batches_across_slots() {
    let (_server, connection) = meddled(|_| Meddling::None).await;
    let builder = RedisStore::builder().cross_slot(CrossSlot::Refuse);
    let limits = address_and_user();
    let store = builder.clone().over(Arc::clone(&connection)).expect("a prefix");
    let error = acquire(&store, &limits, ["1.2.3.4", "alice"]).await.expect_err("two slots");
    assert_eq!(error.kind(), ErrorKind::CrossSlot);
    assert!(error.to_string().contains("Builder::tag"), "{error}");
    // Two limits of one identifier always share a slot, and so can all identifiers of a tenant.
    let _ = acquire(&store, &limits, ["alice", "alice"]).await.expect("one slot");
    let store = builder.tag(Tag::UpTo('/')).over(connection).expect("a prefix");
    let _ = acquire(&store, &limits, ["acme/1.2.3.4", "acme/alice"]).await.expect("one slot");
}

#[tokio::test]
async fn a_repeating_client_charges_once_or_is_refused() {
    let (server, _) = meddled(|_| Meddling::None).await;
    let connection = RedisConnection::open(&server.url(), DEADLINE).await.expect("it is up");
    let connection = Arc::new(Meddled::new(connection).repeating(true));
    let store = RedisStore::builder().over(connection).expect("a prefix");
    let limits = every_limit();
    for limit in &limits {
        let check = Check { limit, key: "a", cost: 1 };
        for left in (17..20).rev() {
            let lua = store.apply(&Batch::one(&check)).await.expect("decides");
            let cas = store.in_mode::<Cas>().apply(&Batch::one(&check)).await.expect("decides");
            assert_eq!((lua.remaining(), cas.remaining()), (left, left), "{}", limit.name());
        }
        let refund = Batch::one(&check).op(Op::Refund);
        assert_eq!(store.apply(&refund).await.expect("gives back").remaining(), 18);
    }
    let attempts =
        Attempts::new(FixedWindow::new("3/h".parse().expect("a rate")).expect("a limit"));
    let limit = Limit::new("attempts", attempts).expect("a name");
    let check = Check { limit: &limit, key: "a", cost: 1 };
    let error = store.in_mode::<Multi>().apply(&Batch::one(&check)).await.expect_err("no guard");
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
}

/// Charges a key over a separate connection, and waits for it.
fn charge_meanwhile(url: &str, limit: &Limit<Policy>, key: &'static str, cost: u64) {
    let (url, limit) = (url.to_owned(), limit.clone());
    let charging = std::thread::spawn(move || {
        Runtime::new().expect("a runtime").block_on(async {
            let store = RedisStore::connect(&url).await.expect("it is up");
            let check = Check { limit: &limit, key, cost };
            assert!(store.apply(&Batch::one(&check)).await.expect("decides").allowed());
        });
    });
    charging.join().expect("no panic");
}

/// One client takes the user's last place between the question and the charge. Another charges the
/// address between the charge and its return. The address ends up with what they left, in every
/// algorithm.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_returned_charge_leaves_other_clients_charges() {
    let server = RedisServer::start().expect("redis-server");
    let url = server.url();
    for address in every_limit() {
        let user = address_and_user()[1].clone();
        let (charged, filled) = (address.clone(), user.clone());
        let hook_url = url.clone();
        let before = move |words: &[Argument<'_>]| {
            if says(words, "reserve", "alice") {
                charge_meanwhile(&hook_url, &filled, "alice", 3);
            }
            if says(words, "undo", "1.2.3.4") || (says(words, "undo", "alice")) {
                charge_meanwhile(&hook_url, &charged, "1.2.3.4", 2);
            }
            Meddling::None
        };
        let connection = RedisConnection::open(&url, DEADLINE).await.expect("it is up");
        let connection = Arc::new(Meddled::new(connection).clustered().before(before));
        let store = RedisStore::builder().over(connection).expect("a prefix");
        let checks = [
            Check { limit: &address, key: "1.2.3.4", cost: 5 },
            Check { limit: &user, key: "alice", cost: 1 },
        ];
        let verdict = store.apply(&Batch::new(&checks).expect("distinct")).await.expect("decides");
        assert!(!verdict.allowed());
        let (shown, left) =
            (verdict.decisions()[0].remaining, remaining(&store, &address, "1.2.3.4").await);
        assert_eq!((shown, left), (18, 18), "{}", address.name());
        for key in ["1.2.3.4", "alice"] {
            let reset =
                [Check { limit: &address, key, cost: 0 }, Check { limit: &user, key, cost: 0 }];
            let _ = store
                .apply(&Batch::new(&reset).expect("distinct").op(Op::Reset))
                .await
                .expect("resets");
        }
    }
}

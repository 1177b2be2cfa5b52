//! Random traces of everything that a batch can express (ids, metadata, attempts, stacks, changing
//! limits) give the same decisions, refusals, states and reservations as in memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use ratelimit_core::{
    Algorithm, Attempts, Batch, BucketedWindow, Check, Concurrency, FirstRequestWindow,
    FixedWindow, Gcra, Limit, ManualClock, Now, Op, Policy, PolicyState, Rate, Refusal,
    Reservation, ReservationGroup, ReservationId, SlidingCounter, SlidingLog, Stack, StackState,
    Store, SyncStore, Timestamp, TokenBucket, Verdict, WindowLog,
};
use ratelimit_memory::{MemoryError, MemoryStore};
use ratelimit_redis::{
    Argument, Cas, Codec, Connection, Deadline, Lua, RedisConnection, RedisError, RedisStore, Reply,
};
use ratelimit_testkit::{PureStore, RedisServer};
use tokio::runtime::Runtime;

type Shared<M> = RedisStore<M, std::sync::Arc<RedisConnection>>;

/// One server for all tests, one prefix per case.
struct OnServer {
    runtime: Runtime,
    connection: std::sync::Arc<RedisConnection>,
}

static NEXT_PREFIX: AtomicU64 = AtomicU64::new(0);

fn patient() -> Deadline {
    Deadline::within(Duration::from_secs(20))
}

impl OnServer {
    fn new() -> Self {
        let server = RedisServer::shared().expect("a server to test on");
        let runtime = Runtime::new().expect("a runtime");
        let connection = runtime.block_on(async {
            RedisConnection::open(&server.url(), Duration::from_secs(20)).await
        });
        let connection = connection.expect("the server is up");
        Self { runtime, connection: connection.into() }
    }

    /// An empty store in each mode.
    fn stores(&self) -> (Shared<Lua>, Shared<Cas>) {
        let prefix = format!("case{}", NEXT_PREFIX.fetch_add(1, Ordering::Relaxed));
        let lua = RedisStore::builder()
            .deadline(Duration::from_secs(20))
            .prefix(&prefix)
            .over(self.connection.clone());
        let lua = lua.expect("a plain prefix");
        let cas = lua.in_mode();
        (lua, cas)
    }

    /// The keys of a case, and their times to live.
    async fn lifetimes(&self, prefix: &str) -> Vec<(String, i64)> {
        let pattern = format!("{prefix}:*");
        let words = [Argument::Text("KEYS"), Argument::Text(&pattern)];
        let reply = self.connection.send("", &words, patient()).await;
        let Ok(Reply::Array(keys)) = reply else { panic!("keys, not {reply:?}") };
        let mut lifetimes = Vec::new();
        for key in keys {
            let Reply::Text(key) = key else { panic!("a key") };
            let words = [Argument::Text("PTTL"), Argument::Bytes(&key)];
            let ttl = self.connection.send("", &words, patient()).await;
            let Ok(Reply::Integer(ttl_ms)) = ttl else { panic!("a time to live, not {ttl:?}") };
            lifetimes.push((String::from_utf8(key).expect("keys are text"), ttl_ms));
        }
        lifetimes
    }
}

fn rate(text: &str) -> Rate {
    text.parse().expect(text)
}

fn fixed(text: &str) -> FixedWindow {
    FixedWindow::new(rate(text)).expect(text)
}

fn gcra(text: &str, burst: u64) -> Gcra {
    Gcra::new(rate(text), burst).expect(text)
}

/// Algorithms whose states lie in one field of one hash: a limit may change from any of them to any
/// other. They include a coarse bucket, the largest windows, and limits that differ only in their size.
fn in_a_field() -> Vec<Policy> {
    let bucket = |text, burst| TokenBucket::new(rate(text), burst).expect(text);
    let concurrency = |text| Concurrency::new(rate(text)).expect(text);
    let first = FirstRequestWindow::new(rate("4/2s")).expect("a limit");
    let counter = SlidingCounter::new(rate("5/s")).expect("a limit");
    let buckets = BucketedWindow::new(250_000, &[rate("3/s"), rate("7/3s")]).expect("a limit");
    let largest = rate("4503599627370495/h");
    let longest = rate("3/4503599627370495us");
    let long_counter = SlidingCounter::new(rate("3/2251799813685247us")).expect("a limit");
    vec![
        gcra("3/s", 4).into(),
        gcra("3/s", 9).into(),
        gcra("1000000007/30d", 1_000_000_007).into(),
        Attempts::new(gcra("3/s", 4)).into(),
        bucket("3/s", 4).into(),
        bucket("1/2h", 9).into(),
        Attempts::new(bucket("7/5m", 7)).into(),
        fixed("5/s").into(),
        fixed("60/90m").into(),
        Attempts::new(fixed("5/s")).into(),
        first.into(),
        Attempts::new(first).into(),
        counter.into(),
        Attempts::new(counter).into(),
        buckets.into(),
        Attempts::new(buckets).into(),
        Attempts::new(BucketedWindow::new(60_000_000, &[largest]).expect("a limit")).into(),
        Attempts::new(FixedWindow::new(largest).expect("a limit")).into(),
        gcra("1/us", 4_503_599_627_370_494).into(),
        bucket("1/4503599627370494us", 1).into(),
        FixedWindow::new(longest).expect("a limit").into(),
        FirstRequestWindow::new(longest).expect("a limit").into(),
        BucketedWindow::new(longest.period_us(), &[longest]).expect("a limit").into(),
        Concurrency::new(longest).expect("a limit").into(),
        long_counter.into(),
        Attempts::new(long_counter).into(),
        Attempts::new(SlidingCounter::new(largest).expect("a limit")).into(),
        concurrency("3/2s").into(),
        concurrency("9/2h").into(),
    ]
}

fn window_logs() -> Vec<Policy> {
    let log = |text| WindowLog::new(rate(text)).expect(text);
    let longest = log("3/4503599627370495us");
    vec![log("3/s").into(), log("9/90m").into(), longest.into(), Attempts::new(log("3/s")).into()]
}

fn sliding_logs() -> Vec<Policy> {
    let log = |text| SlidingLog::new(rate(text)).expect(text);
    let attempts = |text| Attempts::new(log(text)).into();
    vec![log("5/s").into(), attempts("5/s"), attempts("4503599627370495/s")]
}

/// The limits by name, each with the policies that it may have from one request to the next.
type Choices = Vec<(&'static str, Vec<Policy>)>;

fn all_algorithms() -> Choices {
    vec![
        ("some", in_a_field()),
        ("others", in_a_field()),
        ("logged", window_logs()),
        ("sliding", sliding_logs()),
    ]
}

/// Two limits that do not change, of policies with this property.
fn of_those(has: impl Fn(&Policy) -> bool) -> impl Strategy<Value = Choices> {
    let mut policies = [in_a_field(), window_logs(), sliding_logs()].concat();
    policies.retain(has);
    let one = select(policies);
    (one.clone(), one)
        .prop_map(|(some, others)| vec![("some", vec![some]), ("others", vec![others])])
}

#[derive(Clone, Debug)]
struct Request {
    at_us: u64,
    op: Op,
    id: Option<u128>,
    metadata: Vec<u8>,
    /// The index of the name, of its policy, the key, and the cost.
    asks: Vec<(usize, usize, &'static str, u64)>,
}

fn advances() -> impl Strategy<Value = i64> {
    prop_oneof![
        6 => Just(0),
        4 => 1_i64..400_000,
        3 => 400_000_i64..3_000_000,
        1 => select(vec![1_800_000_000, 3_599_999_999, 3_600_000_000, 7_200_000_000]),
        1 => select(vec![1 << 50, (1 << 51) - 1, 1 << 51]),
        1 => -2_000_000_i64..0,
    ]
}

fn ops() -> impl Strategy<Value = Op> {
    prop_oneof![
        10 => Just(Op::Acquire),
        2 => Just(Op::Peek),
        2 => Just(Op::Force),
        3 => Just(Op::Refund),
        1 => Just(Op::Reset),
        6 => Just(Op::Settle),
        3 => Just(Op::Renew),
    ]
}

fn costs() -> impl Strategy<Value = u64> {
    prop_oneof![
        8 => 0_u64..6,
        2 => 5_u64..70,
        1 => select(vec![1_000_000_000, u64::MAX - 1, u64::MAX]),
    ]
}

fn metadata() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        3 => Just(Vec::new()),
        4 => vec(any::<u8>(), 1..9),
        1 => select(vec![vec![b' '; 256], vec![0; 257]]),
    ]
}

/// Requests to the first `names` limits.
fn requests(names: usize) -> impl Strategy<Value = Vec<Request>> {
    let key = select(vec!["a", "a", "a", "b"]);
    let asks = vec((0..names, 0_usize..99, key, costs()), 1..4);
    let id = prop_oneof![2 => Just(None), 5 => (0_u128..3).prop_map(Some)];
    let request = (advances(), ops(), id, metadata(), asks);
    // The present, and the ends of all times.
    let begin_us = prop_oneof![
        6 => Just(1_795_218_392_123_456),
        1 => Just(0),
        1 => Just(Timestamp::MAX.as_us() - 5_000_000),
    ];
    (begin_us, vec(request, 1..40)).prop_map(|(mut at_us, drafts)| {
        let resolve = |(advance, op, id, metadata, mut asks): (_, _, _, _, Vec<_>)| {
            at_us = u64::saturating_add_signed(at_us, advance).min(Timestamp::MAX.as_us());
            asks.sort_by_key(|(name, _, key, _)| (*name, *key));
            asks.dedup_by_key(|(name, _, key, _)| (*name, *key));
            Request { at_us, op, id, metadata, asks }
        };
        drafts.into_iter().map(resolve).collect()
    })
}

fn config(cases: u32) -> ProptestConfig {
    let more = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok());
    ProptestConfig { cases: more.unwrap_or(cases), failure_persistence: None, ..Default::default() }
}

/// The batch of a request, with its id if it has one.
fn batch<'a, A: Algorithm>(checks: &'a [Check<'a, A>], request: &'a Request) -> Batch<'a, A> {
    let now = Now::At(Timestamp::from_us(request.at_us).expect("a time"));
    let batch = Batch::new(checks).expect("distinct").op(request.op).now(now);
    let batch = batch.metadata(&request.metadata);
    request.id.map_or(batch, |id| batch.id(ReservationId::new(id)))
}

/// The result on Redis, where only a refusal may fail.
fn answered(answer: Result<Verdict, RedisError>) -> Result<Verdict, Refusal> {
    answer.map_err(|error| match error {
        RedisError::Refused(refusal) => refusal,
        error => panic!("{error}"),
    })
}

/// Whether a limit of this algorithm wrote the state.
fn wrote(policy: &Policy, state: &PolicyState) -> bool {
    let name = format!("{} ", policy.name());
    state.encode().starts_with(name.as_bytes())
}

/// A reservation without the number that each store derives itself.
fn without_fingerprint(mut reservation: Reservation) -> Reservation {
    reservation.group = reservation.group.map(|group| {
        Arc::new(ReservationGroup { fingerprint: 0, ..ReservationGroup::clone(&group) })
    });
    reservation
}

async fn follow(server: &OnServer, choices: &Choices, trace: &[Request]) {
    let (pure, (lua, cas)) = (PureStore::new(), server.stores());
    for request in trace {
        let limits: Vec<_> = (request.asks.iter())
            .map(|(name, choice, ..)| {
                let (name, policies) = &choices[*name];
                Limit::new(name, policies[choice % policies.len()]).expect("a name")
            })
            .collect();
        let checks: Vec<_> = (request.asks.iter().zip(&limits))
            .map(|((_, _, key, cost), limit)| Check { limit, key, cost: *cost })
            .collect();
        let batch = batch(&checks, request);
        let due = pure.decide(&batch);
        assert_eq!(answered(lua.apply(&batch).await), due, "in Lua: {request:?} of {limits:?}");
        assert_eq!(answered(cas.apply(&batch).await), due, "by Cas: {request:?} of {limits:?}");
        for Check { limit, key, .. } in checks {
            let state = pure.state(limit, key);
            let there = cas.state(limit, key).await.expect("reads");
            assert_eq!(there, state, "by Cas: after {request:?}");
            let state = state.filter(|state| wrote(limit.algorithm(), state));
            let there = lua.state(limit, key).await.expect("reads");
            assert_eq!(there, state, "in Lua: after {request:?} of {limit:?}");
            if let Some(id) = request.id.map(ReservationId::new) {
                let due = pure.reservation(limit, key, id).map(without_fingerprint);
                let there = lua.reservation(limit, key, id).await.expect("reads");
                assert_eq!(there.map(without_fingerprint), due, "in Lua: after {request:?}");
                let there = cas.reservation(limit, key, id).await.expect("reads");
                assert_eq!(there.map(without_fingerprint), due, "by Cas: after {request:?}");
            }
        }
    }
    for (key, ttl_ms) in server.lifetimes(lua.prefix()).await {
        // An emptied key has a millisecond left, or has expired since: then this is -2.
        let lives = ttl_ms == -2 || (0..1 << 43).contains(&ttl_ms);
        assert!(lives, "{key} lives for {ttl_ms} ms");
    }
}

#[test]
fn every_operation_of_every_algorithm_agrees_with_the_pure_step() {
    let (server, choices) = (OnServer::new(), all_algorithms());
    proptest!(config(128), |(trace in requests(choices.len()))| {
        server.runtime.block_on(follow(&server, &choices, &trace));
    });
}

/// A regression that the property above found. The reserved cost shows whether anything was charged
/// since.
#[test]
fn after_the_clock_went_back_a_reserved_attempt_counts_at_the_states_time() {
    let server = OnServer::new();
    let limit = |algorithm: Policy| vec![("some", vec![algorithm])];
    let request = |at_us: u64, op: Op, id: Option<u128>, cost: u64| Request {
        at_us: 1_795_218_392_123_450 + at_us,
        op,
        id,
        metadata: Vec::new(),
        asks: vec![(0, 0, "a", cost)],
    };
    let trace = [
        request(6, Op::Acquire, None, 1),
        request(4, Op::Force, Some(0), 0),
        request(4, Op::Acquire, Some(1), 1),
        request(3, Op::Refund, Some(2), 1),
    ];
    for policy in in_a_field().into_iter().filter(Policy::charges_denials) {
        server.runtime.block_on(follow(&server, &limit(policy), &trace));
    }
}

/// A regression that the property above found: a charge of nothing waited until as little was used as the smaller limit
/// admits.
#[test]
fn in_a_denied_batch_a_charge_of_nothing_waits_for_nothing_after_the_limit_has_shrunk() {
    let server = OnServer::new();
    let never = vec![gcra("1/s", 1).into()];
    let request = |at_us: u64, limit: usize, cost: u64| Request {
        at_us: 1_795_218_392_123_450 + at_us,
        op: Op::Acquire,
        id: None,
        metadata: Vec::new(),
        asks: vec![(0, 0, "a", 2), (1, limit, "a", cost)],
    };
    let in_a_field = in_a_field().into_iter().filter(Policy::charges_denials);
    let logs = [window_logs(), sliding_logs()].concat();
    let logs = logs.into_iter().filter(Policy::charges_denials);
    let attempts: Vec<_> = in_a_field.chain(logs).collect();
    for larger in 0..attempts.len() {
        for smaller in 0..attempts.len() {
            let choices = vec![("never", never.clone()), ("some", attempts.clone())];
            let trace = [request(0, larger, 4), request(1, larger, 4), request(2, smaller, 0)];
            server.runtime.block_on(follow(&server, &choices, &trace));
        }
    }
}

#[test]
fn reservations_and_leases_agree_with_the_pure_step() {
    let server = OnServer::new();
    let choices = of_those(|policy| policy.reservation_us().is_some());
    proptest!(config(128), |(choices in choices, trace in requests(2))| {
        server.runtime.block_on(follow(&server, &choices, &trace));
    });
}

#[test]
fn attempts_agree_with_the_pure_step() {
    let server = OnServer::new();
    let choices = of_those(Policy::charges_denials);
    proptest!(config(128), |(choices in choices, mut trace in requests(2))| {
        for request in &mut trace {
            request.id = None;
            // Without an id there is nothing to settle, so these become attempts too.
            if matches!(request.op, Op::Settle | Op::Renew) {
                request.op = Op::Acquire;
            }
        }
        server.runtime.block_on(follow(&server, &choices, &trace));
    });
}

/// Stacks: of three buckets, of any that share a field, and of logs with their own keys.
fn stacks() -> Vec<Vec<Policy>> {
    let plain = |mut policies: Vec<Policy>| {
        policies.retain(|policy| !policy.charges_denials());
        policies
    };
    let logs = [plain(window_logs()), plain(sliding_logs()), vec![gcra("3/s", 4).into()]].concat();
    vec![
        vec![gcra("3/s", 4).into(), gcra("9/m", 9).into(), gcra("20/h", 20).into()],
        plain(in_a_field()),
        logs,
    ]
}

/// The result in memory, where only a refusal may fail.
fn answered_in_memory(answer: Result<Verdict, MemoryError>) -> Result<Verdict, Refusal> {
    answer.map_err(|error| match error {
        MemoryError::Refused(refusal) => refusal,
        error => panic!("{error}"),
    })
}

type States = StackState<PolicyState>;

async fn follow_stack(server: &OnServer, policies: &[Policy], trace: &[Request]) {
    let (lua, cas) = server.stores();
    let memory: MemoryStore<Stack<Policy>, _> =
        MemoryStore::builder().clock(ManualClock::default()).build();
    let stack = Stack::new(policies.iter().copied()).expect("a stack");
    let limits = ["some", "others"].map(|name| Limit::new(name, stack.clone()).expect("a name"));
    for request in trace {
        let checks: Vec<_> = (request.asks.iter())
            .map(|(name, _, key, cost)| Check { limit: &limits[*name], key, cost: *cost })
            .collect();
        let batch = batch(&checks, request);
        let due = answered_in_memory(memory.apply_now(&batch));
        assert_eq!(answered(lua.apply(&batch).await), due, "in Lua: {request:?} of {stack:?}");
        assert_eq!(answered(cas.apply(&batch).await), due, "by Cas: {request:?} of {stack:?}");
        for Check { limit, key, .. } in checks {
            let state: Option<States> = memory.state(limit.name(), key);
            let there = lua.state(limit, key).await.expect("reads");
            assert_eq!(there, state, "in Lua: after {request:?} of {stack:?}");
            let there = cas.state(limit, key).await.expect("reads");
            assert_eq!(there, state, "by Cas: after {request:?} of {stack:?}");
        }
    }
}

#[test]
fn a_stack_agrees_with_memory() {
    let server = OnServer::new();
    proptest!(config(128), |(
        policies in select(stacks()).prop_flat_map(|all| vec(select(all), 1..4)),
        trace in requests(2),
    )| {
        server.runtime.block_on(follow_stack(&server, &policies, &trace));
    });
}

/// A regression that the property above found: a stack did not pass on when a charge counts as made.
#[test]
fn after_the_clock_went_back_a_reserved_stack_counts_at_its_latest_limits_time() {
    let server = OnServer::new();
    let request = |at_us: i64, op: Op, id: Option<u128>, cost: u64| Request {
        at_us: 1_795_218_392_123_450_u64.saturating_add_signed(at_us),
        op,
        id,
        metadata: Vec::new(),
        asks: vec![(0, 0, "a", cost)],
    };
    let trace = [
        request(0, Op::Acquire, None, 1),
        request(-1_730_000, Op::Force, Some(0), 0),
        request(-1_730_000 + 3_600_000_000, Op::Peek, Some(0), 0),
    ];
    for policies in [vec![gcra("3/s", 4).into()], vec![fixed("5/s").into(), gcra("3/s", 4).into()]]
    {
        server.runtime.block_on(follow_stack(&server, &policies, &trace));
    }
}

#[test]
fn a_stack_of_three_limits_is_one_key_and_reports_when_all_admit() {
    let server = OnServer::new();
    let (lua, cas) = server.stores();
    let burst = |text, burst| Policy::from(gcra(text, burst));
    let stack = Stack::new([burst("2/s", 2), burst("3/m", 3), burst("9/h", 9)]).expect("a stack");
    let limit = Limit::new("requests", stack).expect("a name");
    let check = Check { limit: &limit, key: "alice", cost: 1 };
    let at = |us: u64| Now::At(Timestamp::from_us(1_795_218_392_123_456 + us).expect("a time"));
    server.runtime.block_on(async {
        for (us, allowed, limit, remaining, retry_us) in [
            (0, true, 2, 1, 0),
            (0, true, 2, 0, 0),
            (0, false, 2, 0, 500_000),
            (500_000, true, 2, 0, 0),
            (500_000, false, 2, 0, 19_500_000), // a second is not enough: the minute is used up
        ] {
            let verdicts = [
                lua.apply(&Batch::one(&check).now(at(us))).await.expect("decides"),
                cas.apply(&Batch::one(&check).now(at(us))).await.expect("decides"),
            ];
            for verdict in verdicts {
                let retry = verdict.retry_after().expect("some time");
                assert_eq!(verdict.decisions().len(), 1);
                assert_eq!((verdict.allowed(), verdict.limit()), (allowed, limit));
                assert_eq!(
                    (verdict.remaining(), retry),
                    (remaining, Duration::from_micros(retry_us))
                );
            }
        }
        let mut keys: Vec<_> =
            server.lifetimes(lua.prefix()).await.into_iter().map(|(key, _)| key).collect();
        keys.sort();
        let due = [lua.key(&limit, "alice"), cas.key(&limit, "alice")];
        assert_eq!(keys, due);
        assert_eq!(keys[0], format!("{}:1::{{alice}}", lua.prefix()));
    });
}

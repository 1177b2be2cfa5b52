//! Random traces of everything that a batch can express (ids, metadata, attempts, stacks, changing limits) give the
//! same decisions, refusals, states and reservations as the pure step, in every mode: on one server, across slots,
//! and by a client that sends everything twice.

use std::fmt::Debug;
use std::future::Future;
use std::mem::discriminant;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use ratelimit_core::algorithm::PolicyState;
use ratelimit_core::store::{Reservation, ReservationGroup};
use ratelimit_core::{Refusal, Stack};
use ratelimit_redis::Codec;
use ratelimit_testkit::PureStore;

use crate::common::prelude::*;

/// How requests come to the server, which changes no decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Plain,
    /// It poses as a cluster: each identifier has a slot of its own.
    Split,
}

const WAYS: [Way; 2] = [Way::Plain, Way::Split];

/// One server for all tests, one connection for each way, and one prefix per store.
struct OnServer {
    runtime: Runtime,
    server: &'static RedisServer,
    connections: [Arc<Meddled>; 2],
}

type Built<M> = RedisStore<M, Arc<Meddled>>;

impl OnServer {
    fn new() -> Self {
        let server = RedisServer::shared().expect("a server to test on");
        Self::by(&server.url())
    }

    /// The server for a user with this URL.
    fn by(url: &str) -> Self {
        let runtime = Runtime::new().expect("a runtime");
        let server = RedisServer::shared().expect("a server to test on");
        let connect = || {
            let opened = runtime.block_on(RedisConnection::open(url, PATIENCE));
            Meddled::new(opened.expect("the server is up"))
        };
        let connections = [connect(), connect().clustered()].map(Arc::new);
        Self { runtime, server, connections }
    }

    fn store<M: Mode>(&self, builder: Builder<M>, way: Way) -> Built<M> {
        let connection = Arc::clone(&self.connections[way as usize]);
        builder.deadline(PATIENCE).prefix(&prefix()).over(connection).expect("a prefix")
    }

    /// Follows the trace in the Lua mode and by comparing and setting.
    fn follow<A>(&self, way: Way, limit: &impl Fn(usize, usize) -> Limit<A>, trace: &[Request])
    where
        A: Algorithm<State: PartialEq + Debug> + Debug,
        Built<Lua>: Readable<A>,
        Built<Cas>: Readable<A>,
    {
        self.follow_by(&self.store(RedisStore::builder(), way), way, limit, trace);
        self.follow_by(&self.store(RedisStore::builder().cas(), way), way, limit, trace);
    }

    fn follow_by<A, M: Mode>(
        &self,
        store: &Built<M>,
        way: Way,
        limit: &impl Fn(usize, usize) -> Limit<A>,
        trace: &[Request],
    ) where
        A: Algorithm<State: PartialEq + Debug> + Debug,
        Built<M>: Readable<A>,
    {
        self.runtime.block_on(follow(store, way, limit, trace));
        assert_eq!(outliving(self.server, store.prefix(), 1 << 43), [""; 0], "{}", M::NAME);
    }
}

/// A store whose states and reservations can be read.
trait Readable<A: Algorithm>: Store<A, Error = RedisError> {
    /// Whether the store reads a state as this algorithm's.
    fn reads(_: &A, _: &A::State) -> bool {
        true
    }

    /// A key's state, and its reservation under this id.
    fn kept(
        &self,
        limit: &Limit<A>,
        key: &str,
        id: ReservationId,
    ) -> impl Future<Output = (Option<A::State>, Option<Reservation>)>;
}

macro_rules! readable {
    ($($mode:ty, $algorithm:ty $(, by $reads:ident)?;)+) => { $(
        impl Readable<$algorithm> for Built<$mode> {
            $(
                fn reads(policy: &$algorithm, state: &PolicyState) -> bool {
                    $reads(policy, state)
                }
            )?

            async fn kept(
                &self,
                limit: &Limit<$algorithm>,
                key: &str,
                id: ReservationId,
            ) -> (Option<<$algorithm as Algorithm>::State>, Option<Reservation>) {
                let reserved = self.reservation(limit, key, id).await;
                (self.state(limit, key).await.expect("reads"), reserved.expect("reads"))
            }
        }
    )+ };
}

readable! {
    Lua, Policy, by is_named_so;
    Cas, Policy;
    Lua, Stack<Policy>;
    Cas, Stack<Policy>;
}

fn is_named_so(policy: &Policy, state: &PolicyState) -> bool {
    // The token bucket is GCRA by its other name.
    let name = if policy.name() == "token-bucket" { "gcra" } else { policy.name() };
    state.encode().starts_with(format!("{name} ").as_bytes())
}

impl Readable<Policy> for Built<Multi> {
    async fn kept(
        &self,
        limit: &Limit<Policy>,
        key: &str,
        _: ReservationId,
    ) -> (Option<PolicyState>, Option<Reservation>) {
        (self.state(limit, key).await.expect("reads"), None)
    }
}

fn policies(texts: &[&str]) -> Vec<Policy> {
    texts.iter().map(|text| text.parse().expect(text)).collect()
}

/// Algorithms whose states lie in one field of one hash: a limit may change from any of them to any
/// other. They include a coarse bucket, the largest windows, and limits that differ only in their size.
fn in_a_field() -> Vec<Policy> {
    policies(&[
        "gcra 3/s burst 4",
        "gcra 3/s burst 9",
        "gcra 3/s burst 4 debt 5",
        "gcra 1000000007/30d burst 1000000007",
        "gcra 3/s burst 4 count attempts",
        "token-bucket 3/s burst 4",
        "token-bucket 1/2h burst 9 debt 1",
        "token-bucket 7/5m burst 7 count attempts",
        "fixed-window 5/s",
        "fixed-window 60/90m debt 70",
        "fixed-window 5/s debt 12",
        "fixed-window 5/s count attempts",
        "first-request-window 4/2s",
        "first-request-window 4/2s count attempts",
        "sliding-counter 5/s",
        "sliding-counter 5/s count attempts",
        "bucketed-window bucket 250ms rates 3/1s, 7/3s",
        "bucketed-window bucket 250ms rates 3/1s, 7/3s count attempts",
        "bucketed-window bucket 1m rates 4503599627370495/1h count attempts",
        "fixed-window 4503599627370495/h count attempts",
        "gcra 1/us burst 4503599627370494",
        "token-bucket 1/4503599627370494us burst 1",
        "fixed-window 3/4503599627370495us",
        "first-request-window 3/4503599627370495us",
        "bucketed-window bucket 4503599627370495us rates 3/4503599627370495us",
        "concurrency 3/4503599627370495us",
        "sliding-counter 3/2251799813685247us",
        "sliding-counter 3/2251799813685247us count attempts",
        "sliding-counter 4503599627370495/h count attempts",
        "concurrency 3/2s",
        "concurrency 9/2h",
    ])
}

fn window_logs() -> Vec<Policy> {
    policies(&[
        "window-log 3/s",
        "window-log 9/90m",
        "window-log 3/4503599627370495us",
        "window-log 3/s count attempts",
    ])
}

fn sliding_logs() -> Vec<Policy> {
    policies(&[
        "sliding-log 5/s",
        "sliding-log 5/s count attempts",
        "sliding-log 4503599627370495/s count attempts",
    ])
}

fn all() -> Vec<Policy> {
    [in_a_field(), window_logs(), sliding_logs()].concat()
}

/// The policies that each limit may have from one request to the next.
type Choices = Vec<Vec<Policy>>;

/// Two limits that do not change, of policies with this property.
fn of_those(has: impl Fn(&Policy) -> bool) -> impl Strategy<Value = Choices> {
    let one = select(all().into_iter().filter(has).collect::<Vec<_>>());
    vec(one.prop_map(|policy| vec![policy]), 2)
}

fn chosen(choices: &Choices) -> impl Fn(usize, usize) -> Limit<Policy> {
    |place, choice| named(&format!("l{place}"), choices[place][choice % choices[place].len()])
}

#[derive(Clone, Debug)]
struct Request {
    at_us: u64,
    op: Op,
    id: Option<u128>,
    metadata: Vec<u8>,
    /// The place of the limit, the choice of its policy, the key, and the cost.
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
        2 => Just(Op::Adopt),
        3 => Just(Op::Refund),
        1 => Just(Op::Reset),
        6 => Just(Op::Settle),
        3 => Just(Op::Renew),
        3 => Just(Op::Extend),
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

const NOW_US: u64 = 1_795_218_392_123_456;

/// Requests to so many limits.
fn requests(limits: usize) -> impl Strategy<Value = Vec<Request>> {
    let key = select(vec!["a", "a", "a", "b"]);
    let asks = vec((0..limits, 0_usize..99, key, costs()), 1..4);
    let id = prop_oneof![2 => Just(None), 5 => (0_u128..3).prop_map(Some)];
    let request = (advances(), ops(), id, metadata(), asks);
    // The present, and the ends of all times.
    let begin_us = prop_oneof![
        6 => Just(NOW_US),
        1 => Just(0),
        1 => Just(Timestamp::MAX.as_us() - 5_000_000),
    ];
    (begin_us, vec(request, 1..40)).prop_map(|(mut at_us, drafts)| {
        let resolve = |(advance, op, id, metadata, mut asks): (_, _, _, _, Vec<_>)| {
            at_us = u64::saturating_add_signed(at_us, advance).min(Timestamp::MAX.as_us());
            asks.sort_by_key(|(place, _, key, _)| (*place, *key));
            asks.dedup_by_key(|(place, _, key, _)| (*place, *key));
            Request { at_us, op, id, metadata, asks }
        };
        drafts.into_iter().map(resolve).collect()
    })
}

/// Each becomes an attempt, if it is not a peek or a reset: without an id there is nothing to settle.
fn only_attempts(mut trace: Vec<Request>, ops: &[Op]) -> Vec<Request> {
    for request in &mut trace {
        request.id = None;
        if !ops.contains(&request.op) {
            request.op = Op::Acquire;
        }
    }
    trace
}

fn config(cases: u32) -> ProptestConfig {
    let more = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok());
    ProptestConfig { cases: more.unwrap_or(cases), failure_persistence: None, ..Default::default() }
}

/// A reservation without the number that each store derives itself.
fn without_fingerprint(mut reservation: Reservation) -> Reservation {
    reservation.group = reservation.group.map(|group| {
        Arc::new(ReservationGroup { fingerprint: 0, ..ReservationGroup::clone(&group) })
    });
    reservation
}

/// The result on Redis, where only a refusal may fail.
fn refused(error: RedisError) -> Refusal {
    match error {
        RedisError::Refused(refusal) => refusal,
        error => panic!("{error}"),
    }
}

async fn follow<A, S: Readable<A>>(
    store: &S,
    way: Way,
    limit: impl Fn(usize, usize) -> Limit<A>,
    trace: &[Request],
) where
    A: Algorithm<State: PartialEq + Debug> + Debug,
{
    let pure = PureStore::new();
    for request in trace {
        let limits: Vec<_> =
            request.asks.iter().map(|(place, choice, ..)| limit(*place, *choice)).collect();
        let checks: Vec<_> = (request.asks.iter().zip(&limits))
            .map(|((_, _, key, cost), limit)| Check { limit, key, cost: *cost })
            .collect();
        let batch = Batch::new(&checks).expect("distinct").op(request.op).now(at(request.at_us));
        let batch = batch.metadata(&request.metadata);
        let id = request.id.map(ReservationId::new);
        let batch = id.map_or(batch, |id| batch.id(id));
        let after = format!("{request:?} of {limits:?}");
        match (store.apply(&batch).await.map_err(refused), pure.decide(&batch)) {
            // Any slot may be the first to refuse.
            (Err(one), Err(due)) if way != Way::Plain => {
                assert_eq!(discriminant(&one), discriminant(&due), "{one}, not {due}: {after}");
            }
            (told, due) => assert_eq!(told, due, "{after}"),
        }
        for Check { limit, key, .. } in &checks {
            let id = id.unwrap_or(ReservationId::new(0));
            let state = pure.state(limit, key).filter(|state| S::reads(limit.algorithm(), state));
            let (there, reserved) = store.kept(limit, key, id).await;
            assert_eq!(there, state, "after {after}");
            let due = pure.reservation(limit, key, id).map(without_fingerprint);
            assert_eq!(reserved.map(without_fingerprint), due, "after {after}");
        }
    }
}

#[test]
fn every_operation_of_every_algorithm_agrees_with_the_pure_step() {
    let server = OnServer::new();
    let choices = vec![in_a_field(), in_a_field(), window_logs(), sliding_logs()];
    proptest!(config(128), |(trace in requests(choices.len()), way in select(&WAYS[..]))| {
        server.follow(way, &chosen(&choices), &trace);
    });
}

#[test]
fn reservations_and_leases_agree_with_the_pure_step() {
    let server = OnServer::new();
    let choices = of_those(|policy| policy.reservation_us().is_some());
    proptest!(config(128), |(choices in choices, trace in requests(2), way in select(&WAYS[..]))| {
        server.follow(way, &chosen(&choices), &trace);
    });
}

#[test]
fn attempts_agree_with_the_pure_step() {
    let server = OnServer::new();
    let choices = of_those(Policy::charges_denials);
    let ops = [Op::Acquire, Op::Peek, Op::Force, Op::Refund, Op::Reset];
    proptest!(config(128), |(choices in choices, trace in requests(2), way in select(&WAYS[..]))| {
        server.follow(way, &chosen(&choices), &only_attempts(trace, &ops));
    });
}

/// Whether a transaction can decide it.
fn is_native(policy: &Policy) -> bool {
    RedisStore::<Multi>::supports(&Limits::new([named("l", *policy)]).expect("one")).is_ok()
}

#[test]
fn transactions_agree_with_the_pure_step() {
    let server = OnServer::new();
    let (choices, ops) = (of_those(is_native), [Op::Peek, Op::Reset]);
    proptest!(config(128), |(choices in choices, trace in requests(2), way in select(&WAYS[..]))| {
        let store = server.store(RedisStore::builder().multi(), way);
        server.follow_by(&store, way, &chosen(&choices), &only_attempts(trace, &ops));
    });
}

/// Stacks: of three buckets, of any that share a field, and of logs with their own keys.
fn stacks() -> Vec<Vec<Policy>> {
    let plain = |mut policies: Vec<Policy>| {
        policies.retain(|policy| !policy.charges_denials());
        policies
    };
    let buckets = policies(&["gcra 3/s burst 4 debt 2", "gcra 9/m", "gcra 20/h"]);
    let logs = [window_logs(), sliding_logs(), buckets[..1].to_vec()].concat();
    vec![buckets, plain(in_a_field()), plain(logs)]
}

#[test]
fn a_stack_agrees_with_the_pure_step() {
    let server = OnServer::new();
    let policies = select(stacks()).prop_flat_map(|all| vec(select(all), 1..4));
    proptest!(config(128), |(policies in policies, trace in requests(2), way in select(&WAYS[..]))| {
        server.follow(way, &|place, _| stack(place, &policies), &trace);
    });
}

fn stack(place: usize, policies: &[Policy]) -> Limit<Stack<Policy>> {
    named(&format!("l{place}"), Stack::new(policies.iter().copied()).expect("a stack"))
}

/// Anything that a mode can do, by a user with no more permissions than it names.
#[test]
fn the_permissions_that_a_mode_names_suffice() {
    let server = RedisServer::shared().expect("a server to test on");
    let user = |name: &str, commands: &str| {
        // The test reads more than the store does, to see what is stored.
        let rights = format!("~* -@all {commands} +hget +zrange +lrange");
        permit(std::slice::from_ref(server), name, "s3cret", &rights);
        OnServer::by(&server.url().replace("://", &format!("://{name}:s3cret@")))
    };
    let (lua, cas) = (user("lua", Lua::COMMANDS), user("cas", Cas::COMMANDS));
    let (multi, ops) = (user("multi", Multi::COMMANDS), [Op::Peek, Op::Reset]);
    let choices = vec![in_a_field(), in_a_field(), window_logs(), sliding_logs()];
    proptest!(config(24), |(trace in requests(4), native in of_those(is_native), few in requests(2))| {
        let store = lua.store(RedisStore::builder(), Way::Plain);
        lua.follow_by(&store, Way::Plain, &chosen(&choices), &trace);
        let store = cas.store(RedisStore::builder().cas(), Way::Plain);
        cas.follow_by(&store, Way::Plain, &chosen(&choices), &trace);
        let store = multi.store(RedisStore::builder().multi(), Way::Plain);
        multi.follow_by(&store, Way::Plain, &chosen(&native), &only_attempts(few, &ops));
    });
}

/// Regressions that the properties above found.
mod found {
    use super::*;

    fn request(at_us: i64, op: Op, id: Option<u128>, cost: u64) -> Request {
        let at_us = NOW_US.saturating_add_signed(at_us);
        Request { at_us, op, id, metadata: Vec::new(), asks: vec![(0, 0, "a", cost)] }
    }

    /// The reserved cost shows whether anything was charged since.
    #[test]
    fn after_the_clock_went_back_a_reserved_attempt_counts_at_the_states_time() {
        let trace = [
            request(0, Op::Acquire, None, 1),
            request(-2, Op::Force, Some(0), 0),
            request(-2, Op::Acquire, Some(1), 1),
            request(-3, Op::Refund, Some(2), 1),
        ];
        for policy in in_a_field().into_iter().filter(Policy::charges_denials) {
            OnServer::new().follow(Way::Plain, &chosen(&vec![vec![policy]]), &trace);
        }
    }

    /// A stack did not pass on when a charge counts as made.
    #[test]
    fn after_the_clock_went_back_a_reserved_stack_counts_at_its_latest_limits_time() {
        let trace = [
            request(0, Op::Acquire, None, 1),
            request(-1_730_000, Op::Force, Some(0), 0),
            request(-1_730_000 + 3_600_000_000, Op::Peek, Some(0), 0),
        ];
        let (bucket, window) = ("gcra 3/s burst 4", "fixed-window 5/s");
        for texts in [&[bucket][..], &[window, bucket], &[bucket, window]] {
            let policies = policies(texts);
            OnServer::new().follow(Way::Plain, &|place, _| stack(place, &policies), &trace);
        }
    }

    /// A charge of nothing waited until as little was used as the smaller limit admits.
    #[test]
    fn in_a_denied_batch_a_charge_of_nothing_waits_for_nothing_after_the_limit_has_shrunk() {
        let both = |at_us, choice, cost| {
            let asks = vec![(0, 0, "a", 2), (1, choice, "a", cost)];
            Request { asks, ..request(at_us, Op::Acquire, None, 0) }
        };
        let trace = [both(0, 0, 4), both(1, 0, 4), both(2, 1, 0)];
        let server = OnServer::new();
        for name in Policy::NAMES.iter().filter(|name| !["concurrency"].contains(name)) {
            let of = |count| match *name {
                "bucketed-window" => format!("{name} bucket 250ms rates {count}/1s count attempts"),
                name => format!("{name} {count}/s count attempts"),
            };
            let shrunk = [9, 3].map(|count| *limit("l", &of(count)).algorithm()).to_vec();
            let choices = vec![policies(&["gcra 1/s"]), shrunk];
            server.follow(Way::Plain, &chosen(&choices), &trace);
        }
    }
}

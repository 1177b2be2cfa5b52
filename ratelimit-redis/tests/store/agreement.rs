//! What the testkit's own limits leave out keeps its laws as well: limits at the ends of the range,
//! stacks of limits, and users with no more permissions than a mode names. On one server, and where
//! each identifier has a slot of its own.

use std::fmt::Debug;
use std::marker::PhantomData;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use ratelimit_core::Stack;
use ratelimit_core::store::Reservation;
use ratelimit_memory::MemoryStore;
use ratelimit_redis::{Codec, LuaProgram, MultiProgram, RecordText};
use ratelimit_testkit::{
    AlgorithmHarness, Calendars, Capability, Ends, Harness, Instance, Property, PureStore, Scope,
    try_same, try_same_algorithm_on,
};

use crate::common::prelude::*;

/// Stores of a mode on a server, each with a prefix of its own.
pub(crate) struct OnServer<'s, M> {
    runtime: Runtime,
    server: &'s RedisServer,
    connection: MeddlingConnection,
    mode: PhantomData<M>,
}

impl<'s, M> OnServer<'s, M> {
    /// By a connection with this URL that interferes so.
    pub(crate) fn by(
        server: &'s RedisServer,
        url: &str,
        meddling: impl FnOnce(MeddlingConnection) -> MeddlingConnection,
    ) -> Self {
        let runtime = Runtime::new().expect("a runtime");
        let opened = runtime.block_on(RedisConnection::open(url, PATIENCE)).expect("it is up");
        let connection = meddling(MeddlingConnection::new(opened));
        Self { runtime, server, connection, mode: PhantomData }
    }

    /// On the server that all tests share.
    pub(crate) fn shared(meddling: impl FnOnce(MeddlingConnection) -> MeddlingConnection) -> Self {
        let server = RedisServer::shared().expect("a server to test on");
        Self::by(server, &server.url(), meddling)
    }
}

macro_rules! harness {
    ($mode:ident, $lacks:expr, $algorithm:ident: $($bound:tt)+) => {
        impl<$algorithm: $($bound)+> Harness<$algorithm> for OnServer<'_, $mode> {
            type Store = RedisStore<$mode, MeddlingConnection>;
            const LACKS: &'static [Capability] = $lacks;

            fn new() -> Self {
                Self::shared(|connection| connection)
            }

            fn store(&self) -> Self::Store {
                let builder = RedisStore::builder().prefix(&prefix()).deadline(PATIENCE);
                builder.over(self.connection.clone()).expect("a prefix").in_mode()
            }

            fn block_on<F: Future>(&self, future: F) -> F::Output {
                self.runtime.block_on(future)
            }

            async fn state(
                &self,
                store: &Self::Store,
                limit: &Limit<$algorithm>,
                key: &str,
            ) -> Option<$algorithm::State> {
                store.state(limit, key).await.expect("a state, or none")
            }

            async fn leaks(&self, store: &Self::Store, within: Duration) -> Vec<String> {
                let within = within + kept_longer::<$mode>();
                outliving(self.server, store.prefix(), within.as_millis())
            }
        }
    };
}

harness!(Lua, &[], A: LuaProgram);
harness!(Cas, &[], A: RecordText<State: Codec>);
harness!(Multi, Capability::INCREMENT_FIRST, A: MultiProgram);

/// What a store of these limits breaks of the law that a property tries.
pub(crate) fn broken<T: AlgorithmHarness, H: Harness<T::Algorithm>>(
    harness: &H,
    property: Property,
) -> Option<String> {
    let outcome = try_same_algorithm_on::<T, H>(harness, property, 64);
    outcome.err().map(|failure| failure.to_string())
}

/// Checks these properties in the modes that decide all limits.
fn are_kept<T: AlgorithmHarness>(properties: &[Property])
where
    for<'s> OnServer<'s, Lua>: Harness<T::Algorithm>,
    for<'s> OnServer<'s, Cas>: Harness<T::Algorithm>,
{
    for meddling in [|connection| connection, MeddlingConnection::clustered] {
        let (lua, cas) = (OnServer::<Lua>::shared(meddling), OnServer::<Cas>::shared(meddling));
        for property in properties {
            assert_eq!(broken::<T, _>(&lua, *property), None);
            assert_eq!(broken::<T, _>(&cas, *property), None);
        }
    }
}

fn instances(texts: &[&str]) -> Vec<Instance<AnyAlgorithm>> {
    texts.iter().map(|text| text.parse().expect(text)).collect()
}

/// The largest limits that each algorithm accepts.
struct Largest;

impl AlgorithmHarness for Largest {
    type Algorithm = AnyAlgorithm;

    fn limits() -> Vec<Instance<AnyAlgorithm>> {
        let mut limits = instances(&[
            "gcra 1/us burst 4503599627370494",
            "bucketed-window bucket 1m rates 4503599627370495/1h count attempts",
            "token-bucket 1/4503599627370494us burst 1",
            "fixed-window 3/4503599627370495us",
            "first-request-window 3/4503599627370495us",
            "bucketed-window bucket 4503599627370495us rates 3/4503599627370495us",
            "sliding-counter 3/2251799813685247us",
            "sliding-counter 3/2251799813685247us count attempts",
            "sliding-counter 4503599627370495/h count attempts",
            "window-log 3/4503599627370495us",
            "concurrency 3/4503599627370495us",
            "lockout 2/4503599627370495us block 1us factor 4503599627370495 longest 26062d forget 26062d",
            "lockout 4503599627370495/h block 4503599627370495us",
        ]);
        limits.extend(LargestNative::limits());
        limits
    }
}

/// Those that a transaction can decide.
struct LargestNative;

impl AlgorithmHarness for LargestNative {
    type Algorithm = AnyAlgorithm;

    fn limits() -> Vec<Instance<AnyAlgorithm>> {
        instances(&[
            "fixed-window 4503599627370495/h count attempts",
            "first-request-window 3/4503599627370495us count attempts",
            "sliding-log 4503599627370495/s count attempts",
        ])
    }
}

#[test]
fn the_largest_limits_keep_the_laws() {
    // After the last moment nothing matters, so it tells nothing how long they are kept.
    are_kept::<Largest>(&[Property::Agrees, Property::AgreesAfterAChange]);
    for meddling in [|connection| connection, MeddlingConnection::clustered] {
        let multi = OnServer::<Multi>::shared(meddling);
        assert_eq!(broken::<LargestNative, _>(&multi, Property::Agrees), None);
    }
}

#[test]
fn numbers_that_change_from_one_end_to_the_other_keep_the_laws() {
    are_kept::<Ends>(&[Property::AgreesAfterAChange]);
}

#[test]
fn limits_by_a_calendar_keep_the_laws() {
    use Property::{
        Agrees, AgreesAfterAChange, KeepsWhatMatters, ManyTasksAreAdmittedExactlyTheLimit,
    };
    are_kept::<Calendars>(&[Agrees, AgreesAfterAChange, KeepsWhatMatters]);
    // By the server's own time, and in shared calls.
    are_kept::<Calendars>(&[ManyTasksAreAdmittedExactlyTheLimit]);
}

/// Of one window, so that each reads what the others have blocked.
struct Lockouts;

impl AlgorithmHarness for Lockouts {
    type Algorithm = AnyAlgorithm;

    fn limits() -> Vec<Instance<AnyAlgorithm>> {
        instances(&[
            "lockout 3/5m block 15m factor 2 longest 1d forget 7d",
            "lockout 5/5m block 1m factor 3 longest 7m forget 2m",
            "lockout 2/5m block 3m",
            "lockout 9/5m block 1s factor 1000 longest 20m forget 20m",
        ])
    }
}

#[test]
fn lockouts_whose_numbers_change_keep_the_laws() {
    use Property::{Agrees, AgreesAfterAChange, KeepsWhatMatters};
    are_kept::<Lockouts>(&[Agrees, AgreesAfterAChange, KeepsWhatMatters]);
}

/// Limits at a rate of 0 beside others whose states they read.
struct Zero;

impl AlgorithmHarness for Zero {
    type Algorithm = AnyAlgorithm;

    fn limits() -> Vec<Instance<AnyAlgorithm>> {
        let mut limits = instances(&[
            "gcra 3/s burst 4 debt 2",
            "gcra 0/s",
            "token-bucket 0/s",
            "gcra 0/s count attempts",
            "fixed-window 3/s debt 9",
            "fixed-window 0/s",
            "first-request-window 3/s",
            "first-request-window 0/s",
            "window-log 3/s",
            "window-log 0/s",
            "sliding-log 3/s",
            "sliding-log 0/s",
            "bucketed-window bucket 250ms rates 3/1s, 7/3s",
            "bucketed-window bucket 250ms rates 0/1s, 7/3s",
            "bucketed-window bucket 250ms rates 3/1s, 0/3s count attempts",
            "sliding-counter 3/s",
            "sliding-counter 0/s",
            "sliding-counter 0/s count attempts",
            "concurrency 3/s",
            "concurrency 0/s",
        ]);
        limits.extend(ZeroNative::limits());
        limits
    }
}

/// Those that a transaction can decide.
struct ZeroNative;

impl AlgorithmHarness for ZeroNative {
    type Algorithm = AnyAlgorithm;

    fn limits() -> Vec<Instance<AnyAlgorithm>> {
        instances(&[
            "fixed-window 0/s count attempts",
            "first-request-window 0/s count attempts",
            "first-request-window 3/s count attempts",
            "window-log 0/s count attempts",
            "window-log 3/s count attempts",
            "sliding-log 0/s count attempts",
            "sliding-log 3/s count attempts",
        ])
    }
}

#[test]
fn limits_at_a_rate_of_0_keep_the_laws() {
    are_kept::<Zero>(&[Property::Agrees, Property::AgreesAfterAChange]);
    for meddling in [|connection| connection, MeddlingConnection::clustered] {
        let multi = OnServer::<Multi>::shared(meddling);
        assert_eq!(broken::<ZeroNative, _>(&multi, Property::Agrees), None);
        assert_eq!(broken::<ZeroNative, _>(&multi, Property::AgreesAfterAChange), None);
    }
}

/// Of buckets, of limits that share a field, and of some with keys of their own.
struct Stacks;

impl AlgorithmHarness for Stacks {
    type Algorithm = Stack<AnyAlgorithm>;

    fn limits() -> Vec<Instance<Stack<AnyAlgorithm>>> {
        [
            &["gcra 3/s burst 4 debt 2", "gcra 9/m", "gcra 20/h"][..],
            &["fixed-window 5/s debt 12", "gcra 3/s burst 4"],
            &["gcra 3/s burst 4", "fixed-window 5/s"],
            &["fixed-window 5/month zone Europe/Berlin debt 2", "fixed-window 3/day", "gcra 9/m"],
            &[
                "sliding-counter 5/s",
                "bucketed-window bucket 250ms rates 3/1s, 7/3s",
                "concurrency 3/2s",
            ],
            &["window-log 3/s", "sliding-log 5/s", "token-bucket 3/s burst 4"],
            &["lockout 3/s block 2s factor 2 longest 9s forget 5s", "gcra 3/s burst 4"],
            &["gcra 3/s burst 4", "fixed-window 0/s", "gcra 0/h"],
        ]
        .map(|texts| {
            let limits = texts.iter().map(|text| text.parse().expect(text));
            Instance::new(texts.join(" + "), Stack::new(limits).expect("a stack"))
        })
        .into()
    }
}

#[test]
fn stacks_keep_the_laws() {
    use Property::{Agrees, AgreesAfterAChange, KeepsWhatMatters};
    are_kept::<Stacks>(&[Agrees, AgreesAfterAChange, KeepsWhatMatters]);
}

/// Anything that a mode can do.
#[test]
fn the_permissions_that_a_mode_names_suffice() {
    fn suffice<M: Mode>()
    where
        for<'s> OnServer<'s, M>: Harness,
    {
        let server = RedisServer::shared().expect("a server to test on");
        // The test reads more than the store does, to see what is stored.
        let rights = format!("~* -@all {} +hget +zrange +lrange", M::COMMANDS);
        permit(std::slice::from_ref(server), M::NAME, "s3cret", &rights);
        let url = server.url().replace("://", &format!("://{}:s3cret@", M::NAME));
        let harness = OnServer::<M>::by(server, &url, |connection| connection);
        for scope in [Scope::Mixed, Scope::Reservations] {
            let kept = try_same(&harness, Property::Agrees, scope, 24);
            kept.unwrap_or_else(|broken| panic!("{}: {broken}", M::NAME));
        }
    }
    suffice::<Lua>();
    suffice::<Cas>();
    suffice::<Multi>();
}

/// What is kept of a reservation.
fn kept(reservation: Result<Option<Reservation>, RedisError>) -> impl PartialEq + Debug {
    let reservation = reservation.expect("reads");
    // The fingerprint of a group is each store's own.
    reservation.map(|kept| {
        (kept.group.map(|group| group.limits.clone()), Reservation { group: None, ..kept })
    })
}

/// No law reads them. Each limit has other numbers in every third request.
#[test]
fn reservations_are_kept_as_the_pure_step_keeps_them() {
    let limits = [
        ("gcra 3/s burst 4 debt 5", "gcra 700/s burst 3 debt 1"),
        ("fixed-window 5/s debt 12", "fixed-window 3/s debt 20"),
        ("token-bucket 1/2h burst 9", "token-bucket 3/s burst 9"),
        ("concurrency 3/2s", "concurrency 2/2s"),
        ("gcra 3/s burst 4 count attempts", "gcra 4/s burst 4 count attempts"),
        ("window-log 3/s", "window-log 3/s"),
        ("lockout 2/s block 1s factor 2", "lockout 3/s block 3s"),
        ("gcra 1000000007/30d burst 1000000007", "gcra 5000000/s burst 2"),
        ("gcra 3/s burst 4 debt 5", "gcra 0/s"),
        ("fixed-window 5/s debt 12", "fixed-window 0/s"),
        ("concurrency 3/2s", "concurrency 0/2s"),
    ];
    let named = |(n, text)| limit(&format!("l{n}"), text);
    let changed: Vec<_> = (0..).zip(limits.map(|(_, after)| after)).map(named).collect();
    let limits: Vec<_> = (0..).zip(limits.map(|(before, _)| before)).map(named).collect();
    let servers =
        [|connection| connection, MeddlingConnection::clustered].map(OnServer::<Lua>::shared);
    let ops = select(vec![
        Op::Acquire,
        Op::Acquire,
        Op::Settle,
        Op::Settle,
        Op::Renew,
        Op::Extend,
        Op::Force,
        Op::Adopt,
        Op::Refund,
    ]);
    let costs = prop_oneof![9 => 0..6_u64, 1 => Just(u64::MAX)];
    let asks = vec((0..limits.len(), select(vec!["a", "b"]), costs), 1..3);
    let advances = prop_oneof![2 => Just(0), 3 => -2_000_000..3_000_000_i64];
    let requests = vec((advances, ops, 0..3_u128, asks, 0..3), 1..40);
    let config =
        ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() };
    proptest!(config, |(requests in requests, is_split in any::<bool>())| {
        let server = &servers[usize::from(is_split)];
        let lua = Harness::<AnyAlgorithm>::store(server);
        let (cas, pure) = (lua.in_mode::<Cas>(), PureStore::new());
        let mut at_us = 1_795_218_392_123_456_u64;
        for (advance_us, op, id, mut asks, which) in requests {
            let limits = if which == 0 { &changed } else { &limits };
            at_us = at_us.saturating_add_signed(advance_us);
            asks.sort_unstable();
            asks.dedup_by_key(|(place, key, _)| (*place, *key));
            let checks: Vec<_> = asks.iter().map(|(place, key, cost)| (&limits[*place], *key, *cost)).collect();
            server.runtime.block_on(async {
                // What one refuses, the others refuse: the laws say so.
                let _ = apply_at(&pure, &checks, op, Some(id), at(at_us)).await;
                let _ = apply_at(&lua, &checks, op, Some(id), at(at_us)).await;
                let _ = apply_at(&cas, &checks, op, Some(id), at(at_us)).await;
                for (limit, key, _) in &checks {
                    let id = ReservationId::new(id);
                    let due = kept(Ok(pure.reservation(limit, key, id)));
                    prop_assert_eq!(&kept(lua.reservation(limit, key, id).await), &due);
                    prop_assert_eq!(&kept(cas.reservation(limit, key, id).await), &due);
                }
                Ok(())
            })?;
        }
    });
}

/// In either order, after one window or two, and with a debt that the windows between have paid.
#[tokio::test]
async fn a_settlement_after_a_change_gives_back_what_no_window_of_either_limit_has_paid() {
    const WINDOW_US: u64 = 600_000_000;
    let server = server();
    let store = plain(&server).await;
    let begin_us = now_us() / WINDOW_US * WINDOW_US;
    let of = |rate: u64| limit("l", &format!("fixed-window {rate}/10m debt 90"));
    for (before, after) in [(10, 4), (4, 10), (7, 7)].map(|(one, other)| (of(one), of(other))) {
        for (mode, store) in &in_every_mode(&store)[..2] {
            for windows in 0..3 {
                let memory = MemoryStore::<AnyAlgorithm>::new();
                let later = at(begin_us + windows * WINDOW_US + 2);
                let requests = [
                    (&before, Op::Acquire, before.algorithm().capacity(), Some(7), at(begin_us)),
                    (&before, Op::Force, 40, None, at(begin_us + 1)),
                    (&after, Op::Force, 1, None, later),
                    (&after, Op::Settle, 0, Some(7), later),
                    (&after, Op::Peek, 1, None, later),
                ];
                for (limit, op, cost, id, now) in requests {
                    let asked = [(limit, "alice", cost)];
                    let due = apply_at(&memory, &asked, op, id, now).await.expect("decides");
                    let told = apply_at(store, &asked, op, id, now).await.expect("decides");
                    assert_eq!(told, due, "{mode}: {op} after {windows} windows of {before:?}");
                }
                tell(&server, &["FLUSHALL"]);
            }
        }
    }
}

/// Whatever is written last, by any path, in a later window, and in a later bucket of the same one.
#[tokio::test]
async fn a_key_lives_as_long_as_what_it_keeps_longest() {
    const TEN_DAYS_US: u64 = 10 * 86_400_000_000;
    let server = server();
    let store = plain(&server).await;
    let [long, short, daily, parted] = [
        ("long", "first-request-window 9/10d"),
        ("short", "first-request-window 9/s"),
        ("daily", "fixed-window 9/10d"),
        // Its older part still counts, so the key stays.
        ("parted", "bucketed-window bucket 5d rates 9/10d"),
    ]
    .map(|(name, words)| limit(name, &format!("{words} count attempts")));
    let end_us = now_us().next_multiple_of(TEN_DAYS_US);
    for (place, (mode, store)) in in_every_mode(&store).iter().enumerate() {
        for op in [Op::Acquire, Op::Force].into_iter().take(if place == 2 { 1 } else { 2 }) {
            let cases = [
                [(&long, Op::Acquire, Now::Store), (&short, op, Now::Store)],
                [(&daily, Op::Acquire, at(end_us - 1_000)), (&daily, op, at(end_us))],
                [(&parted, Op::Acquire, at(end_us - 1_000)), (&parted, op, at(end_us))],
            ];
            // No transaction decides buckets.
            for charges in &cases[..if place == 2 { 2 } else { 3 }] {
                for (limit, op, now) in charges {
                    let asked = [(*limit, "alice", 1)];
                    let decided = apply_at(store, &asked, *op, None, *now).await;
                    assert!(decided.expect("decides").allowed());
                }
                let lives = keys(&server).into_iter().map(|key| number(&server, &["PTTL", &key]));
                let most_ms = lives.max().expect("a key");
                assert!(
                    most_ms > 9 * 86_400_000,
                    "{mode}, {op}: {} {most_ms}",
                    charges[1].0.name()
                );
                tell(&server, &["FLUSHALL"]);
            }
        }
    }
}

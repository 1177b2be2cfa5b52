//! What a request reports that fails between two of its commands: the error says correctly, in every
//! mode, whether something may have been charged, and a request that is repeated under its id is charged
//! once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::common::{Meddled, Meddling};
use ratelimit_core::{
    Algorithm, Attempts, Batch, Check, ErrorKind, FixedWindow, Gcra, Limit, Op, Policy,
    PolicyState, Reservation, ReservationId, Store, StoreError, Timestamp, Verdict, Write,
};
use ratelimit_redis::{
    Argument, Builder, Cas, Lua, Mode, Multi, RedisConnection, RedisError, RedisStore,
};
use ratelimit_testkit::{AlgorithmKind, RedisServer};

const DEADLINE: Duration = Duration::from_secs(20);

type Store_<M> = RedisStore<M, Arc<Meddled>>;

/// A store on its own server that splits what a cluster would split.
async fn store<M: Mode>(
    builder: Builder<M>,
    before: impl Fn(&[Argument<'_>]) -> Meddling + Send + Sync + 'static,
) -> (RedisServer, Store_<M>) {
    let server = RedisServer::start().expect("redis-server");
    let store = over(&server, builder, before).await;
    (server, store)
}

async fn over<M: Mode>(
    server: &RedisServer,
    builder: Builder<M>,
    before: impl Fn(&[Argument<'_>]) -> Meddling + Send + Sync + 'static,
) -> Store_<M> {
    let connection = RedisConnection::open(&server.url(), DEADLINE).await.expect("it is up");
    let connection = Meddled::new(connection).clustered().before(before);
    builder.over(Arc::new(connection)).expect("a prefix")
}

fn lua() -> Builder<Lua> {
    RedisStore::builder()
}

fn cas() -> Builder<Cas> {
    RedisStore::builder().cas()
}

fn multi() -> Builder<Multi> {
    RedisStore::builder().multi()
}

fn gcra(name: &str) -> Limit<Policy> {
    let gcra = Gcra::new("3/h".parse().expect("a rate"), 3).expect("a limit");
    Limit::new(name, Policy::from(gcra)).expect("a name")
}

fn attempts(name: &str) -> Limit<Policy> {
    let window = FixedWindow::new("3/30d".parse().expect("a rate")).expect("a limit");
    Limit::new(name, Policy::from(Attempts::new(window))).expect("a name")
}

/// Whether the command has this argument.
fn has(words: &[Argument<'_>], what: &str) -> bool {
    words.iter().any(|word| match word {
        Argument::Text(text) => *text == what,
        Argument::Bytes(bytes) => *bytes == what.as_bytes(),
        _ => false,
    })
}

/// Whether a command is about this key.
fn about(words: &[Argument<'_>], key: &str) -> bool {
    let tag = format!("{{{key}}}");
    words.iter().any(|word| match word {
        Argument::Text(text) => text.ends_with(&tag),
        Argument::Bytes(bytes) => bytes.ends_with(tag.as_bytes()),
        _ => false,
    })
}

/// Whether a command may write, in the compare-and-set mode.
fn writes(words: &[Argument<'_>]) -> bool {
    !has(words, "GET") && !has(words, "TIME")
}

async fn apply<S: Store<Policy, Error = RedisError>>(
    store: &S,
    checks: &[(&Limit<Policy>, &str, u64)],
    op: Op,
    id: Option<ReservationId>,
) -> Result<Verdict, RedisError> {
    let checks: Vec<_> =
        checks.iter().map(|(limit, key, cost)| Check { limit, key, cost: *cost }).collect();
    let batch = Batch::new(&checks).expect("distinct").op(op);
    store.apply(&id.map_or(batch, |id| batch.id(id))).await
}

async fn remaining<S: Store<Policy, Error = RedisError>>(
    store: &S,
    limit: &Limit<Policy>,
    key: &str,
) -> u64 {
    apply(store, &[(limit, key, 0)], Op::Peek, None).await.expect("it answers").remaining()
}

/// A refund was done in one slot and cannot be done in the other. A caller that repeated it would refund
/// twice.
#[tokio::test]
async fn a_request_done_in_one_slot_is_reported_as_done_in_part() {
    async fn reports<M: Mode>(builder: Builder<M>, op: Op)
    where
        Store_<M>: Store<Policy, Error = RedisError>,
    {
        let cut = Arc::new(AtomicBool::new(false));
        let is_cut = Arc::clone(&cut);
        let (_server, store) = store(builder, move |words| {
            let cut = is_cut.load(Ordering::SeqCst) && about(words, "bob");
            if cut { Meddling::NeverSent } else { Meddling::None }
        })
        .await;
        let limit = gcra("jobs");
        for key in ["alice", "bob"] {
            let _ = apply(&store, &[(&limit, key, 2)], Op::Acquire, None).await.expect("charged");
        }
        cut.store(true, Ordering::SeqCst);
        let both = [(&limit, "alice", 1), (&limit, "bob", 1)];
        let error = apply(&store, &both, op, None).await.expect_err("cut off");
        assert_eq!(error.kind(), ErrorKind::Indeterminate, "{} {op}: {error}", M::NAME);
    }
    for op in [Op::Refund, Op::Force, Op::Reset] {
        reports(lua(), op).await;
        reports(cas(), op).await;
    }
}

#[tokio::test]
async fn a_failure_that_may_have_charged_takes_precedence() {
    async fn reports<M: Mode>(builder: Builder<M>, op: Op)
    where
        Store_<M>: Store<Policy, Error = RedisError>,
    {
        let (_server, store) = store(builder, |words| {
            let is_asked = has(words, "ask") || !writes(words);
            if is_asked && !has(words, "reserve") && !has(words, "force") {
                return Meddling::None;
            }
            match (about(words, "alice"), about(words, "bob")) {
                (true, _) => Meddling::NeverSent,
                (_, true) => Meddling::AnswerLost,
                _ => Meddling::None,
            }
        })
        .await;
        let limit = gcra("jobs");
        let both = [(&limit, "alice", 1), (&limit, "bob", 1)];
        let error = apply(&store, &both, op, None).await.expect_err("cut off");
        assert_eq!(error.kind(), ErrorKind::Indeterminate, "{} {op}: {error}", M::NAME);
    }
    for op in [Op::Acquire, Op::Force] {
        reports(lua(), op).await;
        reports(cas(), op).await;
    }
}

#[tokio::test]
async fn attempts_counted_in_one_slot_are_reported() {
    async fn reports<M: Mode>(builder: Builder<M>, denied: bool)
    where
        Store_<M>: Store<Policy, Error = RedisError>,
    {
        let cut = Arc::new(AtomicBool::new(false));
        let is_cut = Arc::clone(&cut);
        let (_server, store) = store(builder, move |words| {
            let charges = has(words, "reserve")
                || has(words, "acquire")
                || has(words, "attempt")
                || has(words, "HINCRBY")
                || has(words, "SET")
                || has(words, "put");
            let cut = is_cut.load(Ordering::SeqCst) && charges && about(words, "bob");
            if cut { Meddling::NeverSent } else { Meddling::None }
        })
        .await;
        let limit = attempts("tries");
        if denied {
            let _ =
                apply(&store, &[(&limit, "alice", 3)], Op::Acquire, None).await.expect("charged");
        }
        let before = remaining(&store, &limit, "alice").await;
        cut.store(true, Ordering::SeqCst);
        let both = [(&limit, "alice", 1), (&limit, "bob", 1)];
        let error = apply(&store, &both, Op::Acquire, None).await.expect_err("cut off");
        let after = remaining(&store, &limit, "alice").await;
        if after < before {
            assert_eq!(error.kind(), ErrorKind::Indeterminate, "{} {denied}: {error}", M::NAME);
        }
        if denied {
            assert_eq!(error.kind(), ErrorKind::Indeterminate, "{}: {error}", M::NAME);
        }
    }
    for denied in [false, true] {
        reports(lua(), denied).await;
        reports(cas(), denied).await;
        reports(multi(), denied).await;
    }
}

/// A read-only request charges nothing, whatever happens to its reply.
#[tokio::test]
async fn a_lost_reply_to_a_read_only_request_is_no_charge() {
    async fn reports<M: Mode>(builder: Builder<M>, is_question: fn(&[Argument<'_>]) -> bool)
    where
        Store_<M>: Store<Policy, Error = RedisError>,
    {
        let (_server, store) =
            store(
                builder,
                move |words| {
                    if is_question(words) { Meddling::AnswerLost } else { Meddling::None }
                },
            )
            .await;
        let limit = attempts("tries");
        for keys in [&["alice", "bob"][..], &["alice"]] {
            for op in [Op::Acquire, Op::Peek] {
                let checks: Vec<_> = keys.iter().map(|key| (&limit, *key, 1)).collect();
                let Err(error) = apply(&store, &checks, op, None).await else {
                    assert_eq!((M::NAME, op, keys.len()), ("lua", Op::Acquire, 1));
                    continue;
                };
                assert_eq!(error.kind(), ErrorKind::Unavailable, "{} {op}: {error}", M::NAME);
            }
        }
    }
    reports(lua(), |words| {
        // A single peek is a script with a key and a field, and without a charge.
        let reads = words.len() == 5 && has(words, "tries");
        reads || ["ask", "show", "peek"].iter().any(|op| has(words, op))
    })
    .await;
    reports(cas(), |words| has(words, "GET")).await;
    reports(cas(), |words| has(words, "TIME")).await;
    reports(multi(), |words| has(words, "TIME") || !has(words, "PEXPIRE")).await;
}

/// A check that costs nothing is never written, whatever the server can compare and set.
#[tokio::test]
async fn a_check_that_costs_nothing_is_not_written() {
    let touched = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&touched);
    let (_server, store) = store(cas(), move |words| {
        if has(words, "SET") && about(words, "bob") {
            count.fetch_add(1, Ordering::SeqCst);
        }
        Meddling::None
    })
    .await;
    let limit = gcra("jobs");
    let both = |costs: [u64; 2]| [(&limit, "alice", costs[0]), (&limit, "bob", costs[1])];
    for costs in [[1, 0], [1, 1], [1, 0]] {
        touched.store(0, Ordering::SeqCst);
        assert!(apply(&store, &both(costs), Op::Acquire, None).await.expect("decides").allowed());
        if costs[1] == 0 {
            assert_eq!(touched.load(Ordering::SeqCst), 0, "it was written");
        }
    }
    assert_eq!(remaining(&store, &limit, "bob").await, 2);
}

/// The first call charges alice and is denied by bob. Before it returns its charge, the same request is
/// repeated under the same id, and bob has a place again. What the second call returned is charged.
async fn repeated_before_it_was_given_back<M: Mode + 'static>(builder: fn() -> Builder<M>)
where
    Store_<M>: Store<Policy, Error = RedisError>,
{
    let server = RedisServer::start().expect("redis-server");
    let (url, limit, id) = (server.url(), gcra("jobs"), ReservationId::new(7));
    let again = Arc::new(AtomicU64::new(0));
    let (seen, count, hook_limit) = (AtomicBool::new(false), Arc::clone(&again), limit.clone());
    let before = move |words: &[Argument<'_>]| {
        let of_lua = M::NAME == "lua";
        let charges = if of_lua { has(words, "reserve") } else { has(words, "put") };
        let takes_back =
            if of_lua { has(words, "undo") } else { has(words, "remove") || has(words, "IFEQ") };
        if charges && about(words, "bob") && !seen.swap(true, Ordering::SeqCst) {
            on_the_side(&url, builder, &[(&hook_limit, "bob", 3)], Op::Acquire, None);
        } else if takes_back && about(words, "alice") && count.fetch_add(1, Ordering::SeqCst) == 0 {
            on_the_side(&url, builder, &[(&hook_limit, "bob", 3)], Op::Refund, None);
            let both = [(&hook_limit, "alice", 1), (&hook_limit, "bob", 1)];
            on_the_side(&url, builder, &both, Op::Acquire, Some(id));
        } else if count.load(Ordering::SeqCst) > 0 && (has(words, "ask") || has(words, "GET")) {
            // The first call does not get to start again.
            return Meddling::NeverSent;
        }
        Meddling::None
    };
    let store = over(&server, builder(), before).await;
    let both = [(&limit, "alice", 1), (&limit, "bob", 1)];
    apply(&store, &both, Op::Acquire, Some(id)).await.expect_err("cut off");
    let store = over(&server, builder(), |_| Meddling::None).await;
    assert!(again.load(Ordering::SeqCst) > 0, "{}: nothing was given back", M::NAME);
    assert_eq!(remaining(&store, &limit, "alice").await, 2, "{}", M::NAME);
    assert_eq!(remaining(&store, &limit, "bob").await, 2, "{}", M::NAME);
    // The reservation exists under the id, and is returned once.
    for _ in 0..2 {
        let none = [(&limit, "alice", 0), (&limit, "bob", 0)];
        let _ = apply(&store, &none, Op::Settle, Some(id)).await.expect("it is reserved");
        assert_eq!(remaining(&store, &limit, "alice").await, 3, "{}", M::NAME);
    }
}

/// Runs this over a separate connection, and waits for it. It is admitted.
fn on_the_side<M: Mode>(
    url: &str,
    builder: fn() -> Builder<M>,
    checks: &[(&Limit<Policy>, &'static str, u64)],
    op: Op,
    id: Option<ReservationId>,
) where
    Store_<M>: Store<Policy, Error = RedisError>,
{
    std::thread::scope(|scope| {
        let doing = scope.spawn(|| {
            let runtime = tokio::runtime::Runtime::new().expect("a runtime");
            runtime.block_on(async {
                let connection = RedisConnection::open(url, DEADLINE).await.expect("it is up");
                let connection = Arc::new(Meddled::new(connection).clustered());
                let store = builder().over(connection).expect("a prefix");
                let verdict = apply(&store, checks, op, id).await.expect("decides");
                assert!(verdict.allowed(), "{op}");
            });
        });
        doing.join().expect("no panic");
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reservation_confirmed_to_a_later_call_is_not_taken_back() {
    repeated_before_it_was_given_back(lua).await;
    repeated_before_it_was_given_back(cas).await;
}

/// Another client interferes in every round, and every round takes a while.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contention_ends_by_the_deadline() {
    async fn rounds<M: Mode + 'static>(builder: fn() -> Builder<M>) -> u64
    where
        Store_<M>: Store<Policy, Error = RedisError>,
    {
        let server = RedisServer::start().expect("redis-server");
        let (url, limit) = (server.url(), gcra("jobs"));
        let begun = Arc::new(AtomicU64::new(0));
        let (count, hook_limit) = (Arc::clone(&begun), limit.clone());
        let before = move |words: &[Argument<'_>]| {
            if M::NAME != "lua" {
                if has(words, "put") && has(words, "EVALSHA") && about(words, "bob") {
                    count.fetch_add(1, Ordering::SeqCst);
                    std::thread::sleep(Duration::from_millis(30));
                    on_the_side(&url, builder, &[(&hook_limit, "bob", 1)], Op::Acquire, None);
                }
            } else if has(words, "reserve") && has(words, "EVALSHA") && about(words, "bob") {
                count.fetch_add(1, Ordering::SeqCst);
                std::thread::sleep(Duration::from_millis(30));
                on_the_side(&url, builder, &[(&hook_limit, "bob", 3)], Op::Acquire, None);
            } else if has(words, "undo") {
                on_the_side(&url, builder, &[(&hook_limit, "bob", 3)], Op::Refund, None);
            }
            Meddling::None
        };
        let store = over(&server, builder().deadline(Duration::from_millis(50)), before).await;
        let both = [(&limit, "alice", 1), (&limit, "bob", 1)];
        match apply(&store, &both, Op::Acquire, Some(ReservationId::new(7))).await {
            Ok(verdict) => assert!(!verdict.allowed(), "{}", M::NAME),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Contended, "{error}"),
        }
        begun.load(Ordering::SeqCst)
    }
    assert!((1..=2).contains(&rounds(lua).await));
    let of_cas = rounds(cas).await;
    assert!((1..=2).contains(&of_cas), "{of_cas}");
}

/// The first reply, an error that removed the corrupt value, is lost; the second charges.
#[tokio::test]
async fn a_request_repeated_after_an_error_is_charged_once() {
    let server = RedisServer::start().expect("redis-server");
    let connection = RedisConnection::open(&server.url(), DEADLINE).await.expect("it is up");
    let connection = Arc::new(Meddled::new(connection).clustered().repeating(true));
    let store = lua().over(connection).expect("a prefix");
    let limit = gcra("jobs");
    let both = [(&limit, "alice", 1), (&limit, "bob", 1)];
    for checks in [&both[..1], &both] {
        for key in ["alice", "bob"] {
            let garbage = ["HSET", &format!("rl:1::{{{key}}}"), "jobs", "garbage"];
            server.command(&garbage).expect("it answers").ok().expect("done");
            let cas = ["SET", &format!("rl:1:jobs!:{{{key}}}"), "garbage"];
            server.command(&cas).expect("it answers").ok().expect("done");
        }
        let _ = apply(&store, checks, Op::Acquire, None).await.expect("healed and charged");
        assert_eq!(remaining(&store, &limit, "alice").await, 2);
        let cas = store.in_mode::<Cas>();
        // The mode reports it by itself, and only once.
        for _ in checks {
            let error = apply(&cas, checks, Op::Acquire, None).await.expect_err("garbage");
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        }
        let _ = apply(&cas, checks, Op::Acquire, None).await.expect("healed");
        assert_eq!(remaining(&cas, &limit, "alice").await, 2);
    }
}

/// Other callers' charges stay, in the same window and in the next.
#[test]
fn an_undo_returns_at_most_what_was_charged() {
    const HOUR_US: u64 = 3_600_000_000;
    let begin = Timestamp::saturating_from_us(1_000 * HOUR_US);
    for kind in AlgorithmKind::ALL {
        let policy = kind.policy("20/h".parse().expect("a rate"), 20);
        let charged = |state: Option<&PolicyState>, at, cost| {
            let Write::Put { state, .. } = policy.step(state, at, cost).write else {
                panic!("{kind:?}: nothing was charged");
            };
            state
        };
        let left = charged(None, begin, 5);
        let reservation =
            Reservation { since: begin, ..Reservation::new(policy.charged_at(None, begin), 5) };
        for later_us in [0, 1, HOUR_US, 2 * HOUR_US] {
            let now = begin.saturating_add_us(later_us);
            let others = charged(Some(&left), now, 2);
            let undone = policy.undo(Some(&others), now, &reservation, &left);
            let after = undone.map_or_else(
                || Some(others.clone()),
                |step| step.write.after(Some(&others)).cloned(),
            );
            let remaining = policy.step(after.as_ref(), now, 0).decision.remaining;
            assert!(remaining <= 18, "{kind:?}, {later_us} µs later: {remaining}");
            assert!(remaining == 18 || later_us > 0, "{kind:?}: {remaining}");
        }
    }
}

//! Batches over several slots, decided in two waves, on one server that poses as a cluster: what
//! happens to a request that fails between two of its commands. The error says whether something
//! may have been charged, and charges are given back once.

use ratelimit_core::Record;
use ratelimit_core::algorithm::{AnyState, Write};
use ratelimit_core::store::{RecordStore as _, Reservation};
use ratelimit_memory::MemoryStore;
use ratelimit_redis::{CrossSlot, Tag};
use ratelimit_testkit::AlgorithmKind;
use tokio::time::sleep;

use crate::common::prelude::*;

type Split<M = Lua> = RedisStore<M, MeddlingConnection>;
type Modes = [(&'static str, Arc<dyn DynStore<AnyAlgorithm>>); 3];

/// A store that splits what a cluster would split, over a connection that treats commands so.
async fn split(
    server: &RedisServer,
    fate: impl Fn(&Words) -> Fate + Send + Sync + 'static,
) -> Split {
    over(patient(), meddling_connection(server).await.clustered().decided(fate))
}

fn patient() -> Builder {
    RedisStore::builder().deadline(PATIENCE)
}

/// The store in every mode, on a server of its own.
async fn modes(fate: impl Fn(&Words) -> Fate + Send + Sync + 'static) -> (RedisServer, Modes) {
    let server = server();
    let store = split(&server, fate).await;
    (server, in_every_mode(&store))
}

/// Whether a command may charge, in any mode.
fn charges(words: &Words) -> bool {
    words.has_any(&["reserve", "acquire", "attempt", "HINCRBY", "SET", "put"])
}

fn cut(is_cut: bool) -> Fate {
    if is_cut { Fate::NeverSent } else { Fate::Sent }
}

#[tokio::test]
async fn a_slots_charge_is_returned_when_another_slot_is_unreachable_or_the_rest_is_reported() {
    for (alice, undo, kind, left) in [
        (Fate::NeverSent, Fate::Sent, ErrorKind::Unavailable, [3, 3]),
        (Fate::AnswerLost, Fate::Sent, ErrorKind::Indeterminate, [3, 2]),
        (Fate::NeverSent, Fate::NeverSent, ErrorKind::Indeterminate, [2, 3]),
    ] {
        let (server, limit) = (server(), seldom());
        let fate = move |words: &Words| match () {
            () if words.asks("reserve", "alice") => alice,
            () if words.asks("undo", "1.2.3.4") => undo,
            () => Fate::Sent,
        };
        let store = split(&server, fate).await;
        let both = [(&limit, "1.2.3.4", 1), (&limit, "alice", 1)];
        let says = if undo == Fate::NeverSent { "done in part" } else { "" };
        fails(apply(&store, &both, Op::Acquire, None).await, kind, says);
        let shown = [peek(&store, &limit, "1.2.3.4").await, peek(&store, &limit, "alice").await];
        assert_eq!(shown, left, "{alice:?}");
    }
}

/// A server that does not answer uses up the time to charge, but not the time to take back what the
/// other slot charged.
#[tokio::test]
async fn a_charge_is_returned_after_another_slot_has_taken_all_the_time_to_charge() {
    for place in 0..2 {
        let (server, limit) = (server(), seldom());
        let connection =
            meddling_connection(&server).await.clustered().holding().before(|words| async move {
                if words.about("alice") && words.has_any(&["reserve", "put", "SET"]) {
                    std::future::pending::<()>().await;
                }
                // A deadline that is over ends whatever does not go at once.
                tokio::task::yield_now().await;
                Fate::Sent
            });
        let builder = RedisStore::builder().deadline(Duration::from_millis(500));
        let (mode, store) = in_every_mode(&over(builder, connection))[place].clone();
        let both = [(&limit, "1.2.3.4", 1), (&limit, "alice", 1)];
        fails(apply(&store, &both, Op::Acquire, None).await, ErrorKind::Indeterminate, "");
        assert_eq!(peek(&store, &limit, "1.2.3.4").await, 3, "{mode}");
    }
}

#[tokio::test]
async fn a_denied_batch_writes_nothing_in_any_slot() {
    let (server, limit) = (server(), seldom());
    let writes = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&writes);
    let store = split(&server, move |words| {
        counted.fetch_add(u64::from(words.has("reserve")), Ordering::Relaxed);
        Fate::Sent
    });
    let store = store.await;
    let full = [(&limit, "5.6.7.8", 1), (&limit, "alice", 3)];
    let _ = apply_admitted(&store, &full, Op::Acquire, None).await;
    assert_eq!(writes.swap(0, Ordering::Relaxed), 2);
    let both = [(&limit, "1.2.3.4", 1), (&limit, "alice", 1)];
    let verdict = apply(&store, &both, Op::Acquire, None).await.expect("decides");
    assert_eq!(verdict.denied_by().collect::<Vec<_>>(), [1]);
    assert_eq!(verdict.decisions()[0].remaining, 3, "as before the request");
    assert_eq!(writes.load(Ordering::Relaxed), 0);
}

/// A lease has ended in one slot when what was reserved with it is extended in the others.
#[tokio::test]
async fn an_extension_of_what_some_slots_know_is_that_of_one_server() {
    let begin_us = 1_000_000_000;
    let limits = ["concurrency 9/1s", "fixed-window 9/h debt 3", "gcra 9/h"];
    let [busy, window, usual] = limits.map(|text| limit(&text.replace([' ', '/'], "-"), text));
    // What charges nothing warns of nothing.
    let busy = busy.warn_at_percent(1).expect("a percentage");
    for (orders, costs) in
        [[0, 1, 2], [1, 0, 2], [2, 1, 0]].into_iter().zip([[1, 1, 5], [1, 5, 5], [1, 5, 99]])
    {
        let (server, memory) = (server(), MemoryStore::new());
        let store = split(&server, |_| Fate::Sent).await;
        let all = |costs: [u64; 3]| {
            let all = [(&busy, "a", costs[0]), (&window, "b", costs[1]), (&usual, "c", costs[2])];
            orders.map(|place: usize| all[place])
        };
        for (op, costs, us) in [
            (Op::Acquire, [1, 1, 1], 0),
            // Its answer then says what is owed.
            (Op::Force, [1, costs[1] * 2, 1], 0),
            (Op::Extend, costs, 2_000_000),
            (Op::Peek, [1, 1, 1], 2_000_000),
        ] {
            let (id, now) =
                (matches!(op, Op::Acquire | Op::Extend).then_some(7), at(begin_us + us));
            let due = apply_at(&memory, &all(costs), op, id, now).await.expect("decides");
            let told = apply_at(&store, &all(costs), op, id, now).await.expect("decides");
            assert_eq!(told, due, "{op} {costs:?} {orders:?}");
        }
    }
}

/// Whatever mode is chosen after that.
#[tokio::test]
async fn a_strict_store_refuses_batches_across_slots() {
    let (server, limit) = (server(), attempts());
    let connection = meddling_connection(&server).await.clustered();
    let strict = RedisStore::builder().cross_slot(CrossSlot::Refuse);
    let both = [(&limit, "acme/1.2.3.4", 1), (&limit, "acme/alice", 1)];
    let built = |builder: Builder| -> [Arc<dyn DynStore<AnyAlgorithm>>; 3] {
        let (cas, multi) = (builder.clone().cas(), builder.clone().multi());
        [
            Arc::new(over(builder, connection.clone())),
            Arc::new(over(cas, connection.clone())),
            Arc::new(over(multi, connection.clone())),
        ]
    };
    for store in built(strict.clone()) {
        let refused = apply(&store, &both, Op::Acquire, None).await;
        fails(refused, ErrorKind::CrossSlot, "Builder::tag");
    }
    // All identifiers of a tenant can share a slot.
    for store in built(strict.tag(Tag::UpTo('/'))) {
        let _ = apply(&store, &both, Op::Acquire, None).await.expect("one slot");
        tell(&server, &["FLUSHALL"]);
    }
}

/// One client takes the user's last place between the question and the charge. Another charges the
/// address between the charge and its return. The address ends up with what they left, in every
/// algorithm.
#[tokio::test]
async fn a_returned_charge_leaves_other_clients_charges() {
    let (server, user) = (server(), seldom());
    // Without an id and with one by the script, and with one by comparison.
    for (place, id) in [(0, None), (0, Some(7)), (1, Some(7))] {
        let charges_back =
            |limit: &Limit<AnyAlgorithm>| limit.algorithm().reservation_us().is_some();
        for address in every(20).into_iter().filter(|limit| id.is_none() || charges_back(limit)) {
            let aside = in_every_mode(&plain(&server).await)[place].1.clone();
            let needed = (aside, address.clone(), Arc::new(AtomicBool::new(false)));
            let meddles = |(aside, address, meddled): (_, _, Arc<AtomicBool>), words: Words| async move {
                if words.about("alice") && words.has_any(&["reserve", "put"]) {
                    let _ = apply(&aside, &[(&seldom(), "alice", 3)], Op::Acquire, None).await;
                }
                let is_undo = words.about("1.2.3.4") && words.has_any(&["undo", "remove"]);
                if is_undo && !meddled.swap(true, Ordering::SeqCst) {
                    let _ = apply_admitted(&aside, &[(&address, "1.2.3.4", 2)], Op::Acquire, None)
                        .await;
                }
                Fate::Sent
            };
            let connection =
                meddling_connection(&server).await.clustered().before_with(needed, meddles);
            let (mode, store) = in_every_mode(&over(patient(), connection))[place].clone();
            let both = [(&address, "1.2.3.4", 5), (&user, "alice", 1)];
            let verdict = apply(&store, &both, Op::Acquire, id).await.expect("decides");
            assert!(!verdict.allowed());
            let left = [verdict.decisions()[0].remaining, peek(&store, &address, "1.2.3.4").await];
            assert_eq!(left, [18; 2], "{mode}: {}", address.name());
            tell(&server, &["FLUSHALL"]);
        }
    }
}

/// The answer of one slot is lost, and the other slot is unreachable, which alone would be no
/// charge.
#[tokio::test]
async fn a_request_that_one_slot_may_have_done_is_indeterminate() {
    let is_question = |words: &Words| words.has_any(&["ask", "GET", "TIME"]);
    let bobs_answer_is_lost = move |words: &Words| match () {
        () if is_question(words) => Fate::Sent,
        () if words.about("bob") => Fate::AnswerLost,
        () => cut(words.about("alice")),
    };
    let ((server, modes), limit) = (modes(bobs_answer_is_lost).await, seldom());
    for (_, store) in &modes[..2] {
        for op in [Op::Acquire, Op::Force] {
            let both = [(&limit, "alice", 1), (&limit, "bob", 1)];
            fails(apply(store, &both, op, None).await, ErrorKind::Indeterminate, "");
            tell(&server, &["FLUSHALL"]);
        }
    }
}

#[tokio::test]
async fn attempts_counted_in_one_slot_are_reported() {
    let (server, modes) = modes(|words| cut(charges(words) && words.about("bob"))).await;
    let (limit, quiet) = (attempts(), in_every_mode(&plain(&server).await));
    for ((mode, store), (_, quiet)) in modes.iter().zip(&quiet) {
        for used in [1, 3] {
            tell(&server, &["FLUSHALL"]);
            let _ = apply_admitted(quiet, &[(&limit, "alice", used)], Op::Acquire, None).await;
            let both = [(&limit, "alice", 1), (&limit, "bob", 1)];
            let error = apply(store, &both, Op::Acquire, None).await.expect_err("cut off");
            // The third of three is denied, which is an attempt as well.
            let is_charged = used == 3 || peek(quiet, &limit, "alice").await < 3 - used;
            let is_known = error.kind() == ErrorKind::Indeterminate;
            assert!(is_known || !is_charged, "{mode} {used}: {error}");
        }
    }
}

/// A read-only request charges nothing, whatever happens to its reply.
#[tokio::test]
async fn a_lost_reply_to_a_read_only_request_is_no_charge() {
    type IsQuestion = fn(&Words) -> bool;
    let limit = attempts();
    let questions: [(usize, IsQuestion); 4] = [
        // A single peek is a script with a key and a field, and without a charge.
        (0, |words| {
            let reads = words.0.len() == 5 && words.has(attempts().state_name());
            reads || words.has_any(&["ask", "show", "peek"])
        }),
        (1, |words| words.has("GET")),
        (1, |words| words.has("TIME")),
        (2, |words| words.has("TIME") || !words.has("PEXPIRE")),
    ];
    for (place, is_question) in questions {
        let lost = move |words: &Words| {
            if is_question(words) { Fate::AnswerLost } else { Fate::Sent }
        };
        let (_server, modes) = modes(lost).await;
        let (mode, store) = &modes[place];
        let both = [(&limit, "alice", 1), (&limit, "bob", 1)];
        for checks in [&both[..], &both[..1]] {
            for op in [Op::Acquire, Op::Peek] {
                let answer = apply(store, checks, op, None).await;
                if (*mode, op, checks.len()) == ("lua", Op::Acquire, 1) {
                    let _ = answer.expect("the Lua mode asks nothing before it charges one slot");
                } else {
                    fails(answer, ErrorKind::Unavailable, "");
                }
            }
        }
    }
}

/// The charge that reaches alice's count blocks her, and is taken back because bob was blocked
/// between both waves.
#[tokio::test]
async fn a_lockout_whose_charge_is_taken_back_leaves_no_block() {
    let failures = || limit("failures", "lockout 3/h block 1h factor 2");
    for place in 0..2 {
        let (server, limit) = (server(), failures());
        let quiet = in_every_mode(&split(&server, |_| Fate::Sent).await)[place].1.clone();
        let begun = [(&limit, "alice", 2)];
        let _ = apply_admitted(&quiet, &begun, Op::Acquire, None).await;
        let connection = meddling_connection(&server).await.clustered();
        let needed = (Arc::clone(&quiet), Arc::new(AtomicBool::new(false)));
        let connection = connection.before_with(needed, move |(aside, seen), words| async move {
            let charges = words.has_any([&["reserve"][..], &["put", "SET"]][place]);
            if charges && words.about("bob") && !seen.swap(true, Ordering::SeqCst) {
                let limit = failures();
                let _ = apply_admitted(&aside, &[(&limit, "bob", 3)], Op::Acquire, None).await;
            }
            Fate::Sent
        });
        let (mode, store) = in_every_mode(&over(patient(), connection))[place].clone();
        let both = [(&limit, "alice", 1), (&limit, "bob", 1)];
        let verdict = apply(&store, &both, Op::Acquire, None).await.expect("decides");
        assert_eq!(verdict.denied_by().collect::<Vec<_>>(), [1], "{mode}");
        assert_eq!(verdict.decisions()[0].remaining, 1, "{mode}");
        // Her first lockout is still to come.
        let _ = apply_admitted(&quiet, &[(&limit, "alice", 1)], Op::Acquire, None).await;
        let blocked = apply(&quiet, &[(&limit, "alice", 1)], Op::Peek, None).await;
        let wait = blocked.expect("decides").retry_after().expect("it ends");
        let hour = Duration::from_secs(3_600);
        assert!(!wait.is_zero() && wait <= hour, "{mode}: {wait:?}");
    }
}

/// Alice is exempt, so her limit keeps only what the id has reserved. That goes, too, when bob was
/// denied between both waves: the id is free for a smaller request.
#[tokio::test]
async fn what_an_exempt_caller_reserved_is_taken_back() {
    const ID: Option<u128> = Some(7);
    let places = || limit("places", "gcra 3/3650d").overridable();
    for place in 0..2 {
        let (server, limit) = (server(), places());
        tell(&server, &["HSET", "rl:1:#records:{alice}", "places/gcra", "1 - exempt"]);
        let quiet = in_every_mode(&split(&server, |_| Fate::Sent).await)[place].1.clone();
        let connection = meddling_connection(&server).await.clustered();
        let needed = (Arc::clone(&quiet), Arc::new(AtomicBool::new(false)));
        let connection = connection.before_with(needed, move |(aside, seen), words| async move {
            let charges = words.has(["reserve", "put"][place]) && words.about("bob");
            if charges && !seen.swap(true, Ordering::SeqCst) {
                let limit = places();
                let _ = apply_admitted(&aside, &[(&limit, "bob", 2)], Op::Acquire, None).await;
            }
            Fate::Sent
        });
        let (mode, store) = in_every_mode(&over(patient(), connection))[place].clone();
        let asks = |cost| [(&limit, "alice", cost), (&limit, "bob", cost)];
        let verdict = apply(&store, &asks(2), Op::Acquire, ID).await.expect("decides");
        assert_eq!(verdict.denied_by().collect::<Vec<_>>(), [1], "{mode}");
        let verdict = apply(&store, &asks(1), Op::Acquire, ID).await;
        assert!(verdict.unwrap_or_else(|error| panic!("{mode}: {error}")).allowed(), "{mode}");
    }
}

/// Bob's record changes between both waves. What alice was charged has refilled by then, so that it
/// cannot be returned in full.
#[tokio::test]
async fn a_batch_whose_record_changes_between_both_waves_is_decided_by_the_new_one() {
    for (place, alices, is_admitted) in [
        (0, "gcra 1000000/s", true),
        (1, "gcra 1000000/s", true),
        // Her attempt counts once.
        (0, "fixed-window 9/3650d count attempts", false),
    ] {
        let (server, alices) = (server(), limit("alices", alices));
        let bobs = || limit("bobs", "gcra 3/3650d").overridable();
        let needed = (plain(&server).await, Arc::new(AtomicBool::new(false)));
        let connection = meddling_connection(&server).await.clustered();
        let connection = connection.before_with(needed, move |(aside, seen), words| async move {
            let charges = words.has(["reserve", "put"][place]) && words.about("bob");
            if charges && !seen.swap(true, Ordering::SeqCst) {
                let raised = *limit("bobs", "gcra 7/3650d").algorithm();
                let raised = Record::numbers(raised).forever();
                let set = aside.exchange_record(&bobs(), "bob", None, Some(&raised)).await;
                assert!(set.expect("set"));
            }
            Fate::Sent
        });
        let (mode, store) = in_every_mode(&over(patient(), connection))[place].clone();
        let bobs = bobs();
        let both = [(&alices, "alice", 1), (&bobs, "bob", 1)];
        let decided = apply(&store, &both, Op::Acquire, None).await;
        if is_admitted {
            let verdict = decided.unwrap_or_else(|error| panic!("{mode}: {error}"));
            assert!(verdict.allowed(), "{mode}");
            assert_eq!(verdict.decisions()[1].remaining, 6, "{mode}");
        } else {
            fails(decided, ErrorKind::Indeterminate, "in part");
        }
    }
}

/// The first call charges alice and is denied by bob. Before it returns its charge, the same
/// request is repeated under the same id, and bob has a place again. What the second call returned
/// is charged.
#[tokio::test]
async fn a_reservation_confirmed_to_a_later_call_is_not_taken_back() {
    const ID: Option<u128> = Some(7);
    for place in 0..2 {
        let (server, limit) = (server(), seldom());
        let quiet = in_every_mode(&split(&server, |_| Fate::Sent).await)[place].1.clone();
        let (seen, again) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let needed = (Arc::clone(&quiet), seen, Arc::clone(&again));
        let connection = meddling_connection(&server).await.clustered();
        let connection = connection.before_with(needed, move |(aside, seen, count), words| {
            let charges = words.has(["reserve", "put"][place]) && words.about("bob");
            let takes_back = words.has_any([&["undo"][..], &["remove", "IFEQ"]][place]);
            let takes_back = takes_back && words.about("alice");
            async move {
                let limit = seldom();
                let bob = async |op| apply_admitted(&aside, &[(&limit, "bob", 3)], op, None).await;
                if charges && !seen.swap(true, Ordering::SeqCst) {
                    let _ = bob(Op::Acquire).await;
                } else if takes_back && count.fetch_add(1, Ordering::SeqCst) == 0 {
                    let _ = bob(Op::Refund).await;
                    let both = [(&limit, "alice", 1), (&limit, "bob", 1)];
                    let _ = apply_admitted(&aside, &both, Op::Acquire, ID).await;
                } else if count.load(Ordering::SeqCst) > 0 && words.has_any(&["ask", "GET"]) {
                    // The first call does not get to start again.
                    return Fate::NeverSent;
                }
                Fate::Sent
            }
        });
        let (mode, store) = in_every_mode(&over(patient(), connection))[place].clone();
        let both = [(&limit, "alice", 1), (&limit, "bob", 1)];
        apply(&store, &both, Op::Acquire, ID).await.expect_err("cut off");
        assert!(again.load(Ordering::SeqCst) > 0, "{mode}: nothing was given back");
        let left = async |key| peek(&quiet, &limit, key).await;
        assert_eq!((left("alice").await, left("bob").await), (2, 2), "{mode}");
        // The reservation exists under the id, and is returned once.
        for _ in 0..2 {
            let none = [(&limit, "alice", 0), (&limit, "bob", 0)];
            let _ = apply(&quiet, &none, Op::Settle, ID).await.expect("it is reserved");
            assert_eq!(left("alice").await, 3, "{mode}");
        }
    }
}

/// Another client interferes in every round, and every round takes a while.
#[tokio::test]
async fn contention_ends_by_the_deadline() {
    for place in 0..2 {
        let (server, limit, rounds) = (server(), seldom(), Arc::new(AtomicU64::new(0)));
        let quiet = in_every_mode(&split(&server, |_| Fate::Sent).await)[place].1.clone();
        let connection = meddling_connection(&server).await.clustered();
        let needed = (quiet, Arc::clone(&rounds));
        let connection = connection.before_with(needed, move |(aside, count), words| async move {
            let limit = seldom();
            if words.has("EVALSHA") && words.asks(["reserve", "put"][place], "bob") {
                count.fetch_add(1, Ordering::SeqCst);
                sleep(Duration::from_millis(30)).await;
                let cost = [3, 1][place];
                let _ = apply_admitted(&aside, &[(&limit, "bob", cost)], Op::Acquire, None).await;
            } else if words.has("undo") {
                let _ = apply_admitted(&aside, &[(&limit, "bob", 3)], Op::Refund, None).await;
            }
            Fate::Sent
        });
        let builder = RedisStore::builder().deadline(Duration::from_millis(50));
        let (mode, store) = in_every_mode(&over(builder, connection))[place].clone();
        let both = [(&limit, "alice", 1), (&limit, "bob", 1)];
        match apply(&store, &both, Op::Acquire, Some(7)).await {
            Ok(verdict) => assert!(!verdict.allowed(), "{mode}"),
            // A round takes more than half of the time.
            Err(error) => assert!(error.kind().is_outage(), "{mode}: {error}"),
        }
        let rounds = rounds.load(Ordering::SeqCst);
        assert!((1..=2).contains(&rounds), "{mode}: {rounds}");
    }
}

/// Other callers' charges stay, in the same window and in the next.
#[test]
fn an_undo_returns_at_most_what_was_charged() {
    const HOUR_US: u64 = 3_600_000_000;
    let begin = Timestamp::saturating_from_us(1_000 * HOUR_US);
    for algorithm in
        AlgorithmKind::ALL.map(|kind| kind.algorithm("20/h".parse().expect("a rate"), 20))
    {
        let charged = |state: Option<&AnyState>, at, cost| {
            let Write::Put { state, .. } = algorithm.step(state, at, cost).write else {
                panic!("{algorithm}: nothing was charged");
            };
            state
        };
        let left = charged(None, begin, 5);
        let reservation =
            Reservation { since: begin, ..Reservation::new(algorithm.charged_at(None, begin), 5) };
        for later_us in [0, 1, HOUR_US, 2 * HOUR_US] {
            let now = begin.saturating_add_us(later_us);
            let others = charged(Some(&left), now, 2);
            let undone = algorithm.undo(Some(&others), now, &reservation, &left);
            let after = undone.map_or_else(
                || Some(others.clone()),
                |step| step.write.after(Some(&others)).cloned(),
            );
            let remaining = algorithm.step(after.as_ref(), now, 0).decision.remaining;
            assert!(remaining <= 18, "{algorithm}, {later_us} µs later: {remaining}");
            assert!(remaining == 18 || later_us > 0, "{algorithm}: {remaining}");
        }
    }
}

/// The limit that an ended reservation names is the one that it is on one store, wherever it
/// stands.
#[tokio::test]
async fn an_ended_reservation_names_the_limit_that_it_names_within_one_slot() {
    let server = server();
    let begins_us = 1_795_218_392_000_000;
    let limits = ["gcra 9/3650d", "concurrency 9/1s", "concurrency 9/1h", "concurrency 8/1s"];
    let limits: Vec<_> =
        limits.iter().enumerate().map(|(nth, words)| limit(&format!("l{nth}"), words)).collect();
    for order in [[0, 1, 2, 3], [2, 3, 0, 1], [3, 0, 2, 1], [1, 2, 3, 0]] {
        let split =
            over(patient().prefix(&prefix()), meddling_connection(&server).await.clustered());
        let memory = MemoryStore::<AnyAlgorithm>::new();
        let keys = ["a", "b", "c", "d"];
        let checks = order.map(|place: usize| (&limits[place], keys[place], 1));
        let ask = async |op, id, us: u64| {
            let time = at(begins_us + us);
            let alone = apply_at(&memory, &checks, op, Some(id), time).await;
            let found = apply_at(&split, &checks, op, Some(id), time).await;
            let [alone, found] = [
                alone.map(drop).map_err(|error| error.to_string()),
                found.map(drop).map_err(|error| error.to_string()),
            ];
            assert_eq!(found, alone, "{op} in the order {order:?}");
            found.err()
        };
        assert_eq!(ask(Op::Acquire, 7, 0).await, None);
        let first_lease = order.into_iter().find(|place| [1, 3].contains(place));
        let named = |place: Option<usize>| format!("limit \"l{}\": ", place.expect("one"));
        let late = ask(Op::Renew, 7, 2_000_000).await.expect("two leases have ended");
        assert!(late.starts_with(&named(first_lease)), "{late}");
        for op in [Op::Settle, Op::Renew, Op::Extend] {
            let unknown = ask(op, 9, 2_000_000).await.expect("there was none");
            let due = if op == Op::Renew { None } else { Some(order[0]) };
            assert!(due.is_none() || unknown.starts_with(&named(due)), "{unknown}");
        }
    }
}

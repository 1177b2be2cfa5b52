//! States from the future of a server's clock: they are reported, and healed.

use ratelimit_core::{Decision, Stack};
use ratelimit_redis::HealOptions;

use crate::common::prelude::*;

const HOUR_US: u64 = 3_600_000_000;
const DRY: HealOptions =
    HealOptions { dry_run: true, max_keys: 1_000, count: 10, pause: Duration::ZERO };
const CALLERS: [&str; 5] = ["alice", "bob", "carol", "a b}%", ""];

/// A time so many hours from now.
fn later(hours: u64) -> Now {
    at(now_us() + HOUR_US * hours)
}

/// Limits of these algorithms. None recovers within the test.
fn limits(names: &[&str], counting: &str) -> Limits<AnyAlgorithm> {
    let text = |name: &str| match name {
        "bucketed-window" => format!("{name} bucket 6m rates 10/1h, 30/2h{counting}"),
        "lockout" => format!("{name} 10/h block 30m factor 2 longest 1h forget 30m"),
        _ => format!("{name} 10/h{counting}"),
    };
    Limits::new(names.iter().map(|name| limit(name, &text(name)))).expect("limits")
}

fn every() -> Limits<AnyAlgorithm> {
    limits(AnyAlgorithm::NAMES, "")
}

async fn apply<S: Store<AnyAlgorithm, Error = RedisError>>(
    store: &S,
    limits: &Limits<AnyAlgorithm>,
    key: &str,
    (op, cost, time): (Op, u64, Now),
) -> Vec<Decision> {
    let checks: Vec<_> = limits.iter().map(|limit| (limit, key, cost)).collect();
    apply_at(store, &checks, op, None, time).await.expect("it answers").decisions().to_vec()
}

/// Whether each key recovers as from empty, and not later.
async fn is_full<S: Store<AnyAlgorithm, Error = RedisError>>(
    store: &S,
    limits: &Limits<AnyAlgorithm>,
) {
    for key in CALLERS {
        let decisions = apply(store, limits, key, (Op::Peek, 0, Now::Store)).await;
        for (limit, decision) in limits.iter().zip(decisions) {
            // A moment may have passed, and with it the end of a window.
            let most_us = limit
                .algorithm()
                .filled(Timestamp::saturating_from_us(now_us()))
                .decision
                .reset_after_us
                + 60_000_000;
            assert!(decision.reset_after_us <= most_us, "{limit:?} {decision:?}");
            let is_used = decision.remaining == 0 || limit.algorithm().name() == "fixed-window";
            assert!(is_used, "{limit:?} {decision:?}");
        }
    }
}

async fn heals<M: Mode>(store: RedisStore<M>, limits: Limits<AnyAlgorithm>) {
    let heal = async |options| store.heal(&limits, options).await.expect("it answers");
    let peek = async || apply(&store, &limits, "in time", (Op::Peek, 0, Now::Store)).await;
    assert!(store.health().await.findings().is_empty());
    for key in CALLERS {
        let _ = apply(&store, &limits, key, (Op::Acquire, 7, later(24))).await;
    }
    let _ = apply(&store, &limits, "in time", (Op::Acquire, 7, Now::Store)).await;
    let in_time = peek().await;
    let (health, says) = (store.health().await, "from the future, by up to 8");
    assert!(
        health.is_ready() && findings_in_words(&health).contains(says),
        "{}",
        findings_in_words(&health)
    );

    let due = CALLERS.len() * limits.as_slice().len();
    let found = heal(DRY).await;
    assert_eq!((found.states.len(), found.skipped, found.is_cut), (due, 0, false), "{found:?}");
    assert!(found.states.iter().all(|state| state.ahead_us > HOUR_US * 22), "{found:?}");
    // The dry run has changed nothing, and a scan that is cut says so.
    let some = heal(HealOptions { max_keys: 1, count: 1, ..DRY }).await;
    assert!(some.is_cut && some.keys == 1 && some.states.len() < due, "{some:?}");
    let healed = heal(HealOptions { dry_run: false, ..DRY }).await;
    assert_eq!(healed.states.len(), due, "{healed:?}");
    is_full(&store, &limits).await;
    assert_eq!(heal(DRY).await.states, []);
    assert!(store.health().await.findings().is_empty());
    // What holds its key no longer than a full limit is left alone.
    for (before, after) in in_time.iter().zip(peek().await) {
        assert!(after.remaining >= before.remaining && after.remaining < 10, "{after:?}");
    }
}

#[tokio::test]
async fn states_from_the_future_are_reported_and_cut_to_a_full_limit_in_every_mode() {
    let (server, cluster) = (server(), RedisCluster::start().expect("a cluster"));
    let secret = RedisStore::builder().hide_identifiers("hidden");
    for (url, builder) in [(server.url(), RedisStore::builder()), (cluster.url(), secret)] {
        let store = builder.connect(&url).await.expect("it is up");
        heals(store.clone(), every()).await;
        heals(store.in_mode::<Cas>(), every()).await;
        heals(store.in_mode::<Multi>(), limits(&NATIVE, " count attempts")).await;
    }
}

/// Of one limit alone.
async fn heals_one<A: Algorithm + Clone, M: Mode + Mode<A>>(
    store: RedisStore<M>,
    limit: &Limit<A>,
) {
    let heal = async |limits: &Limits<_>| store.heal(limits, HealOptions::default()).await;
    let case = limit.name().to_owned();
    let limits = Limits::new([limit.clone()]).expect("one");
    let charged = apply_at(&store, &[(limit, "alice", 7)], Op::Acquire, None, later(24)).await;
    assert!(charged.expect("it answers").allowed(), "{case}");
    let found = findings_in_words(&store.health().await);
    let says = "states that were sampled are from the future, by up to 8";
    assert!(found.contains(says), "{case}: {found}");
    let state = store.state(limit, "alice").await.expect("it answers").expect("charged");
    let now = Timestamp::saturating_from_us(now_us());
    let locked_us = limit.algorithm().step(Some(&state), now, 10).decision.retry_after_us;
    assert!(locked_us > Some(HOUR_US * 22), "{case}: {locked_us:?}");
    assert!(!heal(&limits).await.expect("it answers").states.is_empty(), "{case}");
    assert!(store.health().await.findings().is_empty(), "{case}");
    let reset = apply_at(&store, &[(limit, "alice", 1)], Op::Reset, None, Now::Store).await;
    assert!(reset.expect("it answers").allowed(), "{case}");
}

/// A state alone: among others, one that is not looked at would not show.
#[tokio::test]
async fn a_state_from_the_future_of_each_algorithm_alone_is_reported_and_cut_in_every_mode() {
    let server = server();
    let store = plain(&server).await;
    for limit in &every() {
        heals_one(store.clone(), limit).await;
        heals_one(store.in_mode::<Cas>(), limit).await;
    }
    for limit in &limits(&NATIVE, " count attempts") {
        heals_one(store.clone(), limit).await;
        heals_one(store.in_mode::<Cas>(), limit).await;
        heals_one(store.in_mode::<Multi>(), limit).await;
    }
    let all = every();
    let parts = all.iter().map(|limit| *limit.algorithm());
    let stack = named("stack", Stack::new(parts).expect("a stack"));
    heals_one(store.clone(), &stack).await;
    heals_one(store.in_mode::<Cas>(), &stack).await;
}

/// Of a limit beside another, whose state was there first or comes last.
async fn reports_the_newest<M: Mode>(store: RedisStore<M>, limit: &Limit<AnyAlgorithm>) {
    let beside = Limit::new("beside", *limit.algorithm()).expect("a name");
    let attempts = limit.counts_attempts();
    let beside = if attempts { beside.count_attempts().expect("it can") } else { beside };
    let (in_time, late) = ((&beside, 1, 0), (limit, 7, HOUR_US / 2));
    for charges in [[in_time, (limit, 1, 0), late], [(limit, 1, 0), late, in_time]] {
        for (charged, cost, ahead_us) in charges {
            let time = if ahead_us == 0 { Now::Store } else { at(now_us() + ahead_us) };
            let charge = [(charged, "alice", cost)];
            let decided = apply_at(&store, &charge, Op::Acquire, None, time).await;
            assert!(decided.expect("it answers").allowed(), "{}", limit.name());
        }
        let found = findings_in_words(&store.health().await);
        let says = "are from the future, by up to 1";
        assert!(found.contains(says), "{}: {found}", limit.name());
        let both = [(limit, "alice", 1), (&beside, "alice", 1)];
        let reset = apply_at(&store, &both, Op::Reset, None, Now::Store).await;
        assert!(reset.expect("it answers").allowed(), "{}", limit.name());
    }
}

/// Of a state that keeps the time of each charge or of the last one, beside a charge in time.
#[tokio::test]
async fn a_charge_from_the_future_is_reported_beside_one_in_time_in_every_mode() {
    let server = server();
    let store = plain(&server).await;
    for limit in &limits(&["gcra", "token-bucket", "bucketed-window", "concurrency"], "") {
        reports_the_newest(store.clone(), limit).await;
        reports_the_newest(store.in_mode::<Cas>(), limit).await;
    }
    for limit in &limits(&["sliding-log"], " count attempts") {
        reports_the_newest(store.clone(), limit).await;
        reports_the_newest(store.in_mode::<Cas>(), limit).await;
        reports_the_newest(store.in_mode::<Multi>(), limit).await;
    }
}

#[tokio::test]
async fn requests_during_the_healing_are_admitted_by_the_old_state_or_by_the_new_one() {
    let server = server();
    let (store, limits) = (plain(&server).await, every());
    for round in 1..=3 {
        let _ = apply(&store, &limits, "alice", (Op::Force, 10, later(3 * round))).await;
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
    let server = server();
    for key in ["rl:1::{alice}", "rl:1:sliding-log/sliding-log/1h:{alice}", "rl:1:other:{alice}"] {
        tell(&server, &["SET", key, "7"]);
    }
    let store = plain(&server).await;
    let healed = store.heal(&every(), HealOptions::default()).await.expect("it answers");
    assert_eq!((healed.keys, healed.skipped, healed.states.len()), (3, 2, 0), "{healed:?}");
    assert_eq!(keys(&server).len(), 3);
}

/// Another client changes one key before each of the healing's writes.
#[tokio::test]
async fn a_key_that_others_always_change_is_skipped() {
    let (server, limits) = (server(), limits(&["gcra"], ""));
    let quiet = plain(&server).await.in_mode::<Cas>();
    for key in ["alice", "bob"] {
        let _ = apply(&quiet, &limits, key, (Op::Acquire, 7, later(24))).await;
    }
    let connection = meddling_connection(&server).await;
    let needed = (quiet, limits.clone());
    let connection = connection.before_with(needed, |(aside, limits), words| async move {
        if words.about("alice") && words.has_any(&["SET", "put"]) {
            let _ = apply(&aside, &limits, "alice", (Op::Force, 10, later(24))).await;
        }
        Fate::Sent
    });
    let store = over(RedisStore::builder().cas().deadline(PATIENCE), connection);
    let healed = store.heal(&limits, HealOptions::default()).await.expect("it answers");
    assert_eq!((healed.skipped, healed.states.len()), (1, 1), "{healed:?}");
}

/// Another client resets the key between the healing's look and its write.
#[tokio::test]
async fn a_state_that_has_changed_meanwhile_is_left() {
    let (server, limits) = (server(), limits(&["gcra"], ""));
    let quiet = plain(&server).await;
    let _ = apply(&quiet, &limits, "alice", (Op::Acquire, 7, later(24))).await;
    let needed = (quiet, limits.clone());
    let connection = meddling_connection(&server).await.before_with(
        needed,
        |(aside, limits), words| async move {
            if words.has_any(&["heal"]) {
                let _ = apply(&aside, &limits, "alice", (Op::Reset, 0, Now::Store)).await;
            }
            Fate::Sent
        },
    );
    let store = over(RedisStore::builder(), connection);
    let _ = store.heal(&limits, HealOptions::default()).await.expect("it answers");
    assert_eq!(keys(&server), [""; 0]);
}

#[tokio::test]
async fn a_clock_that_differs_from_the_programs_or_cannot_be_is_reported() {
    let (server, clock) = RedisServer::start_with_clock().expect("a server and cc");
    for (ahead_s, is_ready, says) in [
        (0, true, ""),
        (7_200, true, " s ahead of"),
        (-7_200, true, " s behind"),
        (-1_700_000_000, false, "cannot be"),
    ] {
        clock.set_ahead(ahead_s).expect("its directory is there");
        let health = plain(&server).await.health().await;
        let told = findings_in_words(&health);
        assert_eq!((health.is_ready(), told.contains(says)), (is_ready, true), "{told}");
        assert_eq!(health.findings().len(), usize::from(ahead_s != 0), "{told}");
    }
}

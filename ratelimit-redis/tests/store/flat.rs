//! Almost all requests take one flat script with few arguments, not the driver: observed on the wire.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::{Meddled, Meddling};
use ratelimit_core::{
    Attempts, Batch, Check, Concurrency, FirstRequestWindow, FixedWindow, Gcra, Limit, Now, Op,
    Policy, ReservationId, SlidingCounter, SlidingLog, Stack, Store, Timestamp, TokenBucket,
    Verdict,
};
use ratelimit_redis::{Argument, LuaProgram, RedisConnection, RedisError, RedisStore};
use ratelimit_testkit::RedisServer;

/// A store, and the arguments of each command that it has sent.
struct Wire {
    server: RedisServer,
    store: RedisStore<ratelimit_redis::Lua, Arc<Meddled>>,
    sent: Arc<Mutex<Vec<Vec<String>>>>,
}

impl Wire {
    async fn new() -> Self {
        let server = RedisServer::start().expect("redis-server");
        let connection = RedisConnection::open(&server.url(), Duration::from_secs(20)).await;
        let sent: Arc<Mutex<Vec<Vec<String>>>> = Arc::default();
        let log = Arc::clone(&sent);
        let before = move |words: &[Argument<'_>]| {
            let word = |word: &Argument<'_>| match word {
                Argument::Text(text) => (*text).to_owned(),
                Argument::Bytes(bytes) => String::from_utf8_lossy(bytes).into_owned(),
                Argument::Number(number) => number.to_string(),
                Argument::Integer(number) => number.to_string(),
            };
            log.lock().expect("no panic").push(words.iter().map(word).collect());
            Meddling::None
        };
        let connection = Meddled::new(connection.expect("it is up")).before(before);
        let store = RedisStore::builder().over(Arc::new(connection)).expect("a prefix");
        Self { server, store, sent }
    }

    async fn apply<A: LuaProgram>(
        &self,
        batch: &Batch<'_, A>,
    ) -> (Result<Verdict, RedisError>, Vec<Vec<String>>) {
        let answer = self.store.apply(batch).await;
        (answer, std::mem::take(&mut *self.sent.lock().expect("no panic")))
    }
}

fn limit<A: ratelimit_core::Algorithm>(name: &str, algorithm: A) -> Limit<A> {
    Limit::new(name, algorithm).expect("a name")
}

/// Three per hour, by each algorithm that a flat script decides.
fn policies() -> Vec<Policy> {
    let rate = || "3/h".parse().expect("a rate");
    vec![
        Gcra::new(rate(), 3).expect("a limit").into(),
        TokenBucket::new(rate(), 3).expect("a limit").into(),
        FixedWindow::new(rate()).expect("a limit").into(),
        FirstRequestWindow::new(rate()).expect("a limit").into(),
        SlidingCounter::new(rate()).expect("a limit").into(),
        SlidingLog::new(rate()).expect("a limit").into(),
        Concurrency::new(rate()).expect("a limit").into(),
        Attempts::new(Gcra::new(rate(), 3).expect("a limit")).into(),
    ]
}

/// The driver gets every operation by its name.
fn asks_the_driver(words: &[String]) -> bool {
    words.iter().any(|word| ["acquire", "peek"].contains(&&**word))
}

#[tokio::test]
async fn one_check_is_one_script_with_few_arguments() {
    let wire = Wire::new().await;
    for (n, policy) in policies().into_iter().enumerate() {
        let limit = limit(&format!("l{n}"), policy);
        let check = Check { limit: &limit, key: "alice", cost: 1 };
        // The server learns the script.
        let (answer, sent) = wire.apply(&Batch::one(&check)).await;
        assert_eq!(answer.expect("decides").remaining(), 2);
        assert_eq!(sent.len(), 2, "{limit:?}: {sent:?}");
        for left in [1, 0, 0] {
            let (answer, sent) = wire.apply(&Batch::one(&check)).await;
            assert_eq!(answer.expect("decides").remaining(), left, "{limit:?}");
            let [words] = &sent[..] else { panic!("{limit:?}: {sent:?}") };
            assert!(words.len() <= 10 && !asks_the_driver(words), "{limit:?}: {words:?}");
        }
    }
}

#[tokio::test]
async fn several_limits_are_one_script_for_one_or_several_callers() {
    let wire = Wire::new().await;
    let mixed: Vec<_> = (0..).zip(policies()).map(|(n, p)| limit(&format!("l{n}"), p)).collect();
    let check = |n: usize, key| Check { limit: &mixed[n], key, cost: 1 };
    let stack = limit("stack", Stack::new(policies().into_iter().take(3)).expect("a stack"));
    let of_stack = Check { limit: &stack, key: "alice", cost: 1 };
    let several = [check(0, "alice"), check(4, "alice"), check(7, "alice"), check(0, "bob")];
    for left in [2, 1, 0, 0] {
        let (answer, sent) = wire.apply(&Batch::new(&several).expect("distinct")).await;
        assert_eq!(answer.expect("decides").remaining(), left);
        assert!(!asks_the_driver(sent.last().expect("sent")), "{sent:?}");
        let (answer, sent) = wire.apply(&Batch::one(&of_stack)).await;
        assert_eq!(answer.expect("decides").remaining(), left);
        assert!(!asks_the_driver(sent.last().expect("sent")), "{sent:?}");
    }
}

/// A server keeps every text that it has seen, and clients may choose which checks cost nothing.
#[tokio::test]
async fn the_number_of_flat_scripts_is_bounded_and_the_driver_decides_the_rest() {
    const CHECKS: usize = 9;
    const MOST: usize = 256;
    let wire = Wire::new().await;
    let gcra = || Gcra::new("3/h".parse().expect("a rate"), 1_000).expect("a limit");
    let limits: Vec<_> = (0..CHECKS).map(|n| limit(&format!("l{n}"), gcra())).collect();
    let (mut texts, mut driven) = (HashSet::new(), 0);
    for costs in 1..1_u64 << CHECKS {
        let cost = |n: usize| costs >> n & 1;
        let checks: Vec<_> = (limits.iter().enumerate())
            .map(|(n, limit)| Check { limit, key: "alice", cost: cost(n) })
            .collect();
        let (answer, sent) = wire.apply(&Batch::new(&checks).expect("distinct")).await;
        assert!(answer.expect("decides").allowed());
        let sent = sent.last().expect("sent");
        if asks_the_driver(sent) {
            driven += 1;
        } else {
            texts.insert(sent[1].clone());
        }
    }
    assert_eq!((texts.len(), driven), (MOST, (1 << CHECKS) - 1 - MOST));
    // A shape that was requested before the store was full still has its script.
    let check = Check { limit: &limits[0], key: "alice", cost: 1 };
    let free = |limit| Check { limit, key: "alice", cost: 0 };
    let first: Vec<_> = [check].into_iter().chain(limits[1..].iter().map(free)).collect();
    let (answer, sent) = wire.apply(&Batch::new(&first).expect("distinct")).await;
    assert!(answer.expect("decides").allowed());
    assert!(!asks_the_driver(sent.last().expect("sent")), "{sent:?}");
}

#[tokio::test]
async fn a_lease_under_an_id_is_one_script_and_repeating_it_charges_nothing() {
    let wire = Wire::new().await;
    let limit = limit("lease", Concurrency::new("3/h".parse().expect("a rate")).expect("a limit"));
    let check = Check { limit: &limit, key: "alice", cost: 1 };
    let under = |id| Batch::one(&check).id(ReservationId::new(id));
    for (id, left, flat) in [(1, 2, true), (2, 1, true), (1, 1, false), (3, 0, true)] {
        let (answer, sent) = wire.apply(&under(id)).await;
        assert_eq!(answer.expect("decides").remaining(), left);
        assert_eq!(!asks_the_driver(sent.last().expect("sent")), flat, "{sent:?}");
    }
    let (answer, _) = wire.apply(&under(2).op(Op::Settle)).await;
    assert_eq!(answer.expect("it is reserved").remaining(), 1);
}

/// A peek, a check that costs nothing, and a cost that never fits leave nothing behind.
#[tokio::test]
async fn a_read_only_request_runs_a_read_only_script() {
    let wire = Wire::new().await;
    for (n, policy) in policies().into_iter().take(5).enumerate() {
        let limit = limit(&format!("l{n}"), policy);
        for (op, cost, allowed) in [
            (Op::Peek, 1, true),
            (Op::Acquire, 0, true),
            (Op::Acquire, 4, false),
            (Op::Peek, 4, false),
        ] {
            let check = Check { limit: &limit, key: "alice", cost };
            let (answer, sent) = wire.apply(&Batch::one(&check).op(op)).await;
            assert_eq!(answer.expect("decides").allowed(), allowed, "{limit:?} {op} {cost}");
            assert_eq!(sent.last().expect("sent").len(), 5, "{sent:?}");
        }
    }
    let keys = wire.server.command(&["DBSIZE"]).expect("it is up");
    assert_eq!(keys, ratelimit_testkit::RespValue::Integer(0));
}

/// Another algorithm's state is ignored and replaced: the driver does so, once.
#[tokio::test]
async fn a_limit_that_changes_its_algorithm_needs_the_driver_once() {
    let wire = Wire::new().await;
    let policies = policies();
    for (n, driver) in [(0, false), (2, true), (2, false)] {
        let limit = limit("login", policies[n]);
        let check = Check { limit: &limit, key: "alice", cost: 1 };
        let (answer, sent) = wire.apply(&Batch::one(&check)).await;
        assert!(answer.expect("decides").allowed());
        assert_eq!(asks_the_driver(sent.last().expect("sent")), driver, "{sent:?}");
    }
}

/// As many checks as a script has room for, and one more, of one caller and of as many callers.
#[tokio::test]
async fn flat_scripts_and_the_driver_decide_many_checks_alike() {
    let wire = Wire::new().await;
    let rate = || "3/h".parse().expect("a rate");
    let plain: Vec<Policy> = policies().into_iter().take(5).collect();
    let attempts: Vec<Policy> = plain.iter().filter_map(|policy| policy.by_attempts()).collect();
    let mixed =
        vec![plain[1], attempts[0], plain[4], FixedWindow::new(rate()).expect("a limit").into()];
    for (name, policies) in [("plain", plain), ("attempts", attempts), ("mixed", mixed)] {
        for (count, flat) in [(24, true), (25, false)] {
            for keys in [1, count] {
                let limits: Vec<_> = (0..count)
                    .map(|n| {
                        limit(&format!("{name}{count}-{keys}-{n}"), policies[n % policies.len()])
                    })
                    .collect();
                let keys: Vec<_> = (0..count).map(|n| format!("caller{}", n % keys)).collect();
                let checks: Vec<_> = (limits.iter().zip(&keys))
                    .map(|(limit, key)| Check { limit, key, cost: 1 })
                    .collect();
                let batch = Batch::new(&checks).expect("distinct");
                for (left, allowed) in [(2, true), (1, true), (0, true), (0, false)] {
                    for now in [Now::Store, Now::At(Timestamp::ZERO)] {
                        let peek = batch.op(Op::Peek).now(now);
                        let (answer, _) = wire.apply(&peek).await;
                        let _ = answer.expect("looks");
                    }
                    let (answer, sent) = wire.apply(&batch).await;
                    let verdict = answer.expect("decides");
                    assert_eq!(
                        (verdict.remaining(), verdict.allowed()),
                        (left, allowed),
                        "{name} {count}"
                    );
                    assert_eq!(
                        !asks_the_driver(sent.last().expect("sent")),
                        flat,
                        "{name} {count}"
                    );
                }
            }
        }
    }
}

//! A replay decides as the recorded decision did: tried on a server, without measuring.

use ratelimit_core::{AnyAlgorithm, Store};
use ratelimit_redis::{Cas, Multi, RedisStore};

use super::lab::Lab;
use super::recorder::command;
use super::replay::{RecordedDecision, Template, incr};
use super::situation::{ALGORITHMS, Situation};
use crate::keys::CallerKey;
use crate::report::Effort;

const CALLERS: usize = 250;

fn run<F: Future<Output = ()>>(test: impl FnOnce(Lab) -> F) {
    let lab = Lab::new(&Effort::default()).expect("a server");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(test(lab));
}

/// Puts callers where the recorded one was, decides about each, and looks at what came of it. And
/// again: the second round has to begin where the first one did.
async fn record_and_replay<S: Store<AnyAlgorithm>>(
    lab: &mut Lab,
    situation: Situation,
    store: S,
) -> RecordedDecision {
    let (name, admits) = (situation.name, situation.admits);
    lab.flush().expect("flushes");
    let decision = lab.record(&situation.in_store(store), admits).await;
    let decision = decision.unwrap_or_else(|error| panic!("{name}, {admits}: {error}"));
    assert!(!decision.commands.is_empty(), "{name}, {admits}");
    let restore = decision.restoring().expect("can be restored");
    incr().expect("names its caller").send(&mut lab.wire, 0..CALLERS).expect("counts");
    let template = decision.replaying().expect("names its caller");
    for _ in 0..2 {
        restore.send(&mut lab.wire, 0..CALLERS).expect("restores");
        template.send(&mut lab.wire, 0..CALLERS).expect("decides");
        for caller in [0, 99, 100, CALLERS - 1] {
            decision.verify(&mut lab.wire, caller).expect("the same decision");
        }
    }
    decision
}

#[test]
fn every_situation_has_its_outcome_and_is_replayed_alike() {
    run(async |mut lab| {
        let lua = RedisStore::connect(&lab.recorded_url()).await.expect("a store");
        let (cas, multi) = (lua.in_mode::<Cas>(), lua.in_mode::<Multi>());
        for admits in [true, false] {
            for algorithm in ALGORITHMS {
                let one = || Situation::one(algorithm, admits).expect("a limit");
                record_and_replay(&mut lab, one(), lua.clone()).await;
                record_and_replay(&mut lab, one(), cas.clone()).await;
                let attempts = Situation::by_attempts(algorithm, admits).expect("a limit");
                let Some(attempts) = attempts else { continue };
                if RedisStore::<Multi>::supports(&attempts.limits).is_ok() {
                    record_and_replay(&mut lab, attempts, multi.clone()).await;
                }
            }
            let algorithms = ["gcra", "fixed-window", "sliding-counter"];
            let three = Situation::three("three", algorithms, admits).expect("limits");
            record_and_replay(&mut lab, three, lua.clone()).await;
        }
        for more in [Situation::lease_by_id(), Situation::buckets(15, 1_000)] {
            record_and_replay(&mut lab, more.expect("a limit"), lua.clone()).await;
        }
    });
}

#[test]
fn a_replay_that_was_decided_otherwise_is_noticed() {
    run(async |mut lab| {
        let store = RedisStore::connect(&lab.recorded_url()).await.expect("a store");
        let situation = |admits| Situation::one("gcra", admits).expect("a limit");
        let admitted = record_and_replay(&mut lab, situation(true), store.clone()).await;
        // Restored, and not decided.
        let restore = admitted.restoring().expect("can be restored");
        restore.send(&mut lab.wire, 0..CALLERS).expect("restores");
        assert!(admitted.verify(&mut lab.wire, 7).is_err());
        // Denied, and yet charged.
        let denied = record_and_replay(&mut lab, situation(false), store.clone()).await;
        denied.verify(&mut lab.wire, 7).expect("nothing has changed");
        lab.flush().expect("flushes");
        let subject = situation(false).in_store(store);
        assert!(subject.decide(&CallerKey::new(7)).await.expect("decides"));
        assert!(denied.verify(&mut lab.wire, 7).is_err());
        // Admitted, where the recorded one was denied.
        let replay = denied.replaying().expect("names its caller");
        let error = replay.send(&mut lab.wire, 8..9).expect_err("is answered otherwise");
        assert!(error.to_string().contains("when it was recorded"), "{error}");
        // It admits, and should not.
        let error = lab.record(&subject, true).await.err().expect("denies");
        assert!(error.to_string().contains("should be admitted"), "{error}");
        // All callers would be one.
        assert!(Template::new(&[command(&["INCR", "counter"])]).is_err());
    });
}

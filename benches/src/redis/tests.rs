//! A replay decides as the recorded decision did: tried on a server, without measuring.

use ratelimit_core::Policy;
use ratelimit_redis::{Multi, RedisStore};
use redis::Value;

use super::lab::{Lab, Subject, script_calls};
use super::replay::{Recorded, Template, incr, recorded};
use super::situation::{ALGORITHMS, Situation};
use super::wire::command;
use crate::keys::Key;

const CALLERS: usize = 250;

fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(test);
}

/// Puts callers where the recorded one was, decides about each, and looks at what came of it. And again: the second
/// round has to begin where the first one did.
fn replay(lab: &mut Lab, decision: &Recorded) {
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
}

async fn record_and_replay<S: ratelimit_core::Store<Policy>>(
    lab: &mut Lab,
    situation: Situation,
    store: S,
) -> Recorded {
    let (name, admits) = (situation.name, situation.admits);
    lab.flush().expect("flushes");
    let decision = lab.record(&situation.in_store(store), admits).await;
    let decision = decision.unwrap_or_else(|error| panic!("{name}, {admits}: {error}"));
    assert!(!decision.commands.is_empty(), "{name}, {admits}");
    replay(lab, &decision);
    decision
}

#[test]
fn every_situation_has_its_outcome_and_is_replayed_alike() {
    run(async {
        let mut lab = Lab::new().expect("a server");
        let url = lab.recorded_url();
        let lua = RedisStore::connect(&url).await.expect("a store");
        let (cas, multi) = (lua.in_mode::<ratelimit_redis::Cas>(), lua.in_mode::<Multi>());
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
        let lease = Situation::lease_by_id().expect("a limit");
        record_and_replay(&mut lab, lease, lua).await;
    });
}

#[test]
fn a_replay_that_was_decided_otherwise_is_noticed() {
    run(async {
        let mut lab = Lab::new().expect("a server");
        let store = RedisStore::connect(&lab.recorded_url()).await.expect("a store");
        let admitted = Situation::one("gcra", true).expect("a limit");
        let admitted = record_and_replay(&mut lab, admitted, store.clone()).await;
        // Restored, and not decided.
        let restore = admitted.restoring().expect("can be restored");
        restore.send(&mut lab.wire, 0..CALLERS).expect("restores");
        assert!(admitted.verify(&mut lab.wire, 7).is_err());
        // Denied, and yet charged.
        let denied = Situation::one("gcra", false).expect("a limit");
        let subject = denied.in_store(store);
        lab.flush().expect("flushes");
        let denied = lab.record(&subject, false).await.expect("records");
        let restore = denied.restoring().expect("can be restored");
        restore.send(&mut lab.wire, 0..CALLERS).expect("restores");
        denied.verify(&mut lab.wire, 7).expect("nothing has changed");
        lab.flush().expect("flushes");
        assert!(subject.decide(&Key::new(7)).await.expect("decides"));
        assert!(denied.verify(&mut lab.wire, 7).is_err());
        // Admitted, where the recorded one was denied.
        let replay = denied.replaying().expect("names its caller");
        let error = replay.send(&mut lab.wire, 8..9).expect_err("is answered otherwise");
        assert!(error.to_string().contains("when it was recorded"), "{error}");
        // The driver decides it: its stored value is no state.
        let key =
            denied.before.first_key().expect("a key").replace("7777777777777", "0000000000009");
        lab.wire.ask(&command(&["HSET", &key, "limit", "nonsense"])).expect("is set");
        let error = replay.send(&mut lab.wire, 9..10).expect_err("is answered otherwise");
        assert!(error.to_string().contains("when it was recorded"), "{error}");
    });
}

#[test]
fn an_unexpected_outcome_and_a_failing_command_are_errors() {
    run(async {
        let mut lab = Lab::new().expect("a server");
        let store = RedisStore::connect(&lab.recorded_url()).await.expect("a store");
        let admitted = Situation::one("gcra", true).expect("a limit").in_store(store);
        let error = lab.record(&admitted, false).await.err().expect("admits");
        assert!(error.to_string().contains("should be denied"), "{error}");

        let refused = Template::new(&[command(&["INCR", "counter"])]).err().expect("no caller");
        assert!(refused.contains("no command names the caller"), "{refused}");
        let key = format!("k:{}", recorded().as_str());
        let unknown = Template::new(&[command(&["EVALSHA", &"0".repeat(40), "1", &key])]);
        let error = unknown.expect("names its caller").send(&mut lab.wire, 0..3);
        let error = error.expect_err("no such script").to_string();
        assert!(error.to_ascii_uppercase().contains("NOSCRIPT"), "{error}");
    });
}

#[test]
fn the_recorder_keeps_decisions_and_drops_keep_alives() {
    let lab = Lab::new().expect("a server");
    let recorder = super::wire::Recorder::start(lab.port()).expect("listens");
    let mut client = super::wire::Wire::connect(recorder.port()).expect("connects");
    for words in [&["PING"][..], &["SET", "a", "1"], &["CLIENT", "ID"], &["GET", "a"]] {
        client.ask(&command(words)).expect("answers");
    }
    let set = (command(&["SET", "a", "1"]), Value::Okay);
    let get = (command(&["GET", "a"]), Value::BulkString(b"1".to_vec()));
    assert_eq!(recorder.take().expect("was replied"), [set, get]);
    assert!(recorder.take().expect("was replied").is_empty());
}

#[test]
fn calls_of_scripts_are_counted_and_no_other_commands() {
    let mut lab = Lab::new().expect("a server");
    let sha = lab.load("return 1").expect("loads");
    for words in [&["EVALSHA", &sha, "0"][..], &["EVAL", "return 2", "0"], &["INCR", "a"]] {
        lab.wire.ask(&command(words)).expect("answers");
    }
    assert_eq!(script_calls(lab.server()).expect("counts"), 2);
}

#[test]
fn a_template_names_each_caller_wherever_the_recorded_one_stood() {
    let mut lab = Lab::new().expect("a server");
    let (one, two) = (format!("{{{}}}", recorded().as_str()), format!("b:{}", recorded().as_str()));
    let template = Template::new(&[command(&["SET", &one, &two]), command(&["INCR", &two])]);
    template.expect("names its caller").send(&mut lab.wire, 5..205).expect("sends");
    for caller in [5, 104, 105, 204] {
        let name = Key::new(caller);
        let value = lab.wire.ask(&command(&["GET", &format!("{{{}}}", name.as_str())]));
        let due = format!("b:{}", name.as_str()).into_bytes();
        assert_eq!(value.expect("answers"), Value::BulkString(due));
    }
    let count = lab.wire.ask(&command(&["DBSIZE"])).expect("answers");
    assert_eq!(count, Value::Int(400));
}

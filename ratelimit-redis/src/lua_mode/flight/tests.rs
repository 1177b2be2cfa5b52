//! A merged script charges as the script of one request does, one request after the other.

use std::sync::LazyLock;

use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use ratelimit_core::{
    FirstRequestWindow, FixedWindow, Gcra, Policy, Rate, SlidingCounter, TokenBucket,
};
use ratelimit_testkit::RedisServer;
use tokio::runtime::{Builder, Runtime};

use super::*;
use crate::deadline::Deadline;
use crate::flat;
use crate::merge::GroupCheck;
use crate::program::{LuaProgram as _, Twin};

/// A check of all requests: whether they pay, and the twin that decides.
#[derive(Clone, Debug)]
struct Limit {
    pays: bool,
    twin: Twin,
}

fn policies(rate: Rate, burst: u64) -> [Policy; 5] {
    [
        Gcra::new(rate, burst).expect("a limit").into(),
        TokenBucket::new(rate, burst).expect("a limit").into(),
        FixedWindow::new(rate).expect("a limit").into(),
        FirstRequestWindow::new(rate).expect("a limit").into(),
        SlidingCounter::new(rate).expect("a limit").into(),
    ]
}

fn limits() -> impl Strategy<Value = Vec<Limit>> {
    let rates = ["3/s", "10/m", "7/h", "1000000/s", "5/d", "12/7s"];
    let rates = rates.map(|rate| rate.parse::<Rate>().expect("a rate"));
    let one =
        (prop::sample::select(rates.to_vec()), 1_u64..20, 0..5_usize, prop::bool::weighted(0.8));
    let one = one.prop_map(|(rate, burst, which, pays)| {
        let policy = &policies(rate, burst)[which];
        Limit { pays, twin: policy.twins().remove(0) }
    });
    let some_pay = |limits: &Vec<Limit>| limits.iter().any(|limit| limit.pays);
    prop::collection::vec(one, 1..=flat::MOST_MERGED).prop_filter("one pays", some_pay)
}

/// A request of the past: how many seconds before the others, a part of a second that is added, and its cost.
type Earlier = (u64, u64, u64);
/// Those of the past, and the costs of the others.
type Requests = (Vec<Earlier>, Vec<u64>);

/// The requests of the past, some of them after the others because the clock went back, and what each of the others
/// costs.
fn requests() -> impl Strategy<Value = Requests> {
    let seconds = prop_oneof![0..3_u64, 0..200_000_u64];
    let earlier = prop::collection::vec((seconds, 0..1_000_000_u64, 1..12_u64), 0..5);
    let cost = || prop_oneof![4 => Just(1), 1 => 1..12_u64];
    let one = prop::collection::vec(cost(), 1..=1);
    (earlier, prop_oneof![1 => one, 2 => prop::collection::vec(cost(), 1..24)])
}

const NOW_S: u64 = 1_795_218_392;
const NOW_US: u64 = 123_456;
/// Added to each time to live: the given time stands still, and the server's passes.
const HOUR_MS: u64 = 3_600_000;

struct Lab {
    _server: RedisServer,
    connection: redis::Connection,
}

impl Lab {
    fn new() -> Self {
        let server = RedisServer::start().expect("redis-server");
        let client = redis::Client::open(server.url()).expect("a URL");
        Self { connection: client.get_connection().expect("it is up"), _server: server }
    }

    fn try_to_send<T: redis::FromRedisValue>(
        &mut self,
        words: &[Argument<'_>],
    ) -> redis::RedisResult<T> {
        let mut command = redis::Cmd::new();
        for word in words {
            command.arg(word.to_bytes());
        }
        command.query(&mut self.connection)
    }

    fn send<T: redis::FromRedisValue>(&mut self, words: &[Argument<'_>]) -> T {
        self.try_to_send(words).expect("it answers")
    }

    /// Runs the script of one request at a time. Returns whether it admits.
    fn alone(&mut self, key: &str, limits: &[Limit], costs: u64, now_us: u64) -> bool {
        let script = flat::acquire(&shapes(limits), true);
        let mut words = evalsha([key].into_iter());
        words[0] = Argument::Text("EVAL");
        words[1] = Argument::Text(&script.text);
        words.extend([Argument::Number(now_us), Argument::Number(HOUR_MS)]);
        let fields: Vec<_> = (0..limits.len()).map(|n| format!("l{n}")).collect();
        for (field, Limit { pays, twin }) in fields.iter().zip(limits) {
            words.push(Argument::Text(field));
            if *pays {
                words.push(Argument::Number(costs.min(twin.capacity) * twin.unit));
                words.push(Argument::Number(twin.capacity * twin.unit));
                words.extend(twin.parameters.as_slice().iter().copied().map(Argument::Number));
            }
        }
        let answer: String = self.send(&words);
        answer.starts_with('+')
    }

    fn states(&mut self, key: &str) -> Vec<String> {
        let mut all: Vec<String> = self.send(&[Argument::Text("HGETALL"), Argument::Text(key)]);
        all.sort_unstable();
        all
    }

    fn ttl_ms(&mut self, key: &str) -> i64 {
        self.send(&[Argument::Text("PTTL"), Argument::Text(key)])
    }
}

fn shapes(limits: &[Limit]) -> Vec<Shape> {
    let role = |pays: bool| if pays { Role::Charge } else { Role::Look };
    limits
        .iter()
        .map(|Limit { pays, twin }| Shape { program: twin.program, role: role(*pays), key: 1 })
        .collect()
}

/// That of all callers. Nothing runs on it.
static RUNTIME: LazyLock<Runtime> =
    LazyLock::new(|| Builder::new_current_thread().build().expect("a runtime"));

/// A group of these requests.
fn group(key: &str, limits: &[Limit], requests: &[u64]) -> Arc<Group> {
    let checks = (0..).zip(limits).zip(shapes(limits)).map(|((position, limit), shape)| {
        GroupCheck { shape, position, field: format!("l{position}"), twin: limit.twin.clone() }
    });
    let group = Arc::new(Group::new(vec![key.to_owned()], checks.collect(), limits.len()));
    for cost in requests {
        let costs =
            limits.iter().map(|limit| u64::from(limit.pays) * (*cost).min(limit.twin.capacity));
        let deadline = Deadline::within(std::time::Duration::from_secs(9));
        std::mem::forget(group.add(costs, deadline, RUNTIME.handle().id()));
    }
    group
}

/// What a merged script may do wrong.
type Wrong = fn(&str) -> String;

/// Whether merged scripts, or those with a fault, charge as the script of one request does.
fn charges_in_order(lab: &mut Lab, wrong: Option<Wrong>) -> Result<(), String> {
    let lab = std::cell::RefCell::new(lab);
    let several = prop::collection::vec((requests(), any::<bool>()), 1..4);
    // The same cases each time. A fault needs not be shrunk.
    let seed = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let config = Config { max_shrink_iters: 0, failure_persistence: None, ..Config::default() };
    let mut runner = match wrong {
        None => TestRunner::default(),
        Some(_) => TestRunner::new_with_rng(config, seed),
    };
    let result = runner.run(&(limits(), several), |(limits, several)| {
        let lab = &mut **lab.borrow_mut();
        let () = lab.send(&[Argument::Text("FLUSHALL")]);
        let script = flat::merged(&shapes(&limits));
        let text = wrong.map_or_else(|| script.text.clone(), |wrong| wrong(&script.text));
        one_call_charges_in_order(lab, &text, &limits, &several)
    });
    result.map_err(|error| error.to_string())
}

/// One call of this text for several groups of requests. Each group may have a past.
fn one_call_charges_in_order(
    lab: &mut Lab,
    text: &str,
    limits: &[Limit],
    several: &[(Requests, bool)],
) -> Result<(), TestCaseError> {
    let time = format!("{{ '{NOW_S}', '{NOW_US}' }}");
    let text = text.replace("call('TIME')", &time);
    let text = text.replace("/ 1000)", &format!("/ 1000) + {HOUR_MS}"));
    let mut groups = Vec::new();
    let mut due = Vec::new();
    for (n, ((earlier, costs), has_past)) in several.iter().enumerate() {
        let (one, all) = (format!("one{n}"), format!("all{n}"));
        for (seconds, us, cost) in earlier.iter().filter(|_| *has_past) {
            let then_us = (NOW_S - seconds) * 1_000_000 + us;
            let admits = [&one, &all].map(|key| lab.alone(key, limits, *cost, then_us));
            prop_assert_eq!(admits[0], admits[1]);
        }
        groups.push(group(&all, limits, costs));
        let now_us = NOW_S * 1_000_000 + NOW_US;
        let admitted = costs.iter().filter(|cost| lab.alone(&one, limits, **cost, now_us)).count();
        due.push((one, all, admitted));
    }
    let mut parts = parts(&groups);
    prop_assert_eq!(parts.len(), 1, "one script decides all of them");
    let sent = parts.remove(0);
    let sent: Vec<&Sent<'_>> = sent.iter().collect();
    let keys: Vec<_> = sent.iter().map(|sent| sent.group.keys[0].as_str()).collect();
    let mut words = evalsha(keys.into_iter());
    words[0] = Argument::Text("EVAL");
    words[1] = Argument::Text(&text);
    // In any order: single requests need not come first.
    for same in sent.chunk_by(|one, next| one.has_limits_of(next)) {
        add(&mut words, same);
    }
    let answers = lab.try_to_send::<Vec<String>>(&words);
    let answers = answers.map_err(|error| TestCaseError::fail(error.to_string()))?;
    prop_assert_eq!(&answers[0], &format!("{NOW_S} {NOW_US}"));
    prop_assert_eq!(answers.len(), due.len() + 1);
    for ((one, all, admitted), answer) in due.iter().zip(&answers[1..]) {
        let told = answer.split('\n').next().unwrap_or_default();
        prop_assert_eq!(told, admitted.to_string(), "{}", answer);
        prop_assert_eq!(lab.states(one), lab.states(all));
        let apart_ms = lab.ttl_ms(one) - lab.ttl_ms(all);
        prop_assert!(apart_ms.abs() < 20_000, "{} ms", apart_ms);
    }
    Ok(())
}

#[test]
fn a_merged_script_charges_as_one_request_after_the_other() {
    charges_in_order(&mut Lab::new(), None).unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn a_merged_script_with_a_fault_is_caught() {
    let faults: [(&str, Wrong); 12] = [
        ("a part of a request fits", |text| text.replace("fit, floor(", "fit, ceil(")),
        ("one request more fits than does", |text| {
            text.replace("fit, floor((", "fit, floor(1 + (")
        }),
        ("a request that fills the limit does not fit", |text| {
            text.replace("+ charge1 <= capacity1", "+ charge1 < capacity1")
        }),
        ("more requests are charged than a run has", |text| text.replace("math.min(fit, ", "(")),
        ("each group charges the first one's key", |text| {
            text.replace("key0 = key0 + 1", "key0 = key0 + 0")
        }),
        ("the first run is forgotten", |text| text.replace("run = first0,", "run = first0 + 2,")),
        ("a run is charged as one request", |text| text.replace("fit * charge", "charge")),
        ("only the last run is counted", |text| text.replace("admitted0 + fit", "fit")),
        ("a run begins from the state that was read, not after the run before it", |text| {
            text.replace("(capacity1 - after1)", "(capacity1 - used1)")
                .replace("after1 = used\n", "after1 = used\nused1 = used\n")
        }),
        ("the first group of runs is taken for a single request", |text| {
            text.replace("group0 > single0", "group0 > single0 + 1")
        }),
        ("what is left over of a part is taken for the next one", |text| {
            text.replace("place0 = last0 + 1", "place0 = last0 + 2")
        }),
        ("a denied group is written", |text| text.replace("admitted0 > 0", "admitted0 > -1")),
    ];
    let mut lab = Lab::new();
    for (fault, wrong) in faults {
        let text = flat::merged(&shapes(&[pays()])).text;
        assert_ne!(wrong(&text), text, "{fault}: the script has no such place");
        let caught = charges_in_order(&mut lab, Some(wrong));
        assert!(caught.is_err(), "{fault}: not caught");
    }
}

/// A limit that every request pays.
fn pays() -> Limit {
    let policy = &policies("3/s".parse().expect("a rate"), 3)[0];
    Limit { pays: true, twin: policy.twins().remove(0) }
}

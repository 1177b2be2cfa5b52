//! A user's own algorithm in the compare-and-set mode, and with a twin of its own: those of the
//! examples keep the laws, a twin that is a little wrong is caught, and names and operations that
//! cannot be are refused.

use ratelimit_core::algorithm::Step;
use ratelimit_redis::{Keeps, LuaProgram, Program, RecordText, Stored, Twin};
use ratelimit_servers::RespClient;
use ratelimit_testkit::{
    AlgorithmHarness, AlgorithmKind, Instance, Property, PureStore, Scope, try_same,
};

use crate::agreement::{OnServer, broken};
use crate::common::prelude::*;
use crate::examples::own_twin::Trial;
use crate::examples::weekend_budget::WeekendBudget;

struct Budgets;

impl AlgorithmHarness for Budgets {
    type Algorithm = WeekendBudget;

    fn limits() -> Vec<Instance<WeekendBudget>> {
        [1, 7, 100].map(|n| Instance::new(n.to_string(), WeekendBudget(n))).into()
    }
}

struct Trials;

impl AlgorithmHarness for Trials {
    type Algorithm = Trial;

    fn limits() -> Vec<Instance<Trial>> {
        [1, 7].map(|n| Instance::new(n.to_string(), Trial(n))).into()
    }
}

#[test]
fn an_own_algorithm_keeps_the_laws_without_a_twin_and_with_one() {
    use Property::{KeepsWhatMatters, ManyTasksAreAdmittedExactlyTheLimit};

    let (lua, cas) = (OnServer::<Lua>::shared(|c| c), OnServer::<Cas>::shared(|c| c));
    // A trial is kept for ever; a store may refuse a refund that neither has for another reason
    // than the step.
    assert_eq!(broken::<Budgets, _>(&cas, KeepsWhatMatters), None);
    assert_eq!(broken::<Budgets, _>(&cas, ManyTasksAreAdmittedExactlyTheLimit), None);
    assert_eq!(broken::<Trials, _>(&lua, ManyTasksAreAdmittedExactlyTheLimit), None);
}

#[tokio::test]
async fn an_own_algorithm_decides_as_its_step_does() {
    let server = server();
    let store = plain(&server).await;
    agrees(&store, named("trial", Trial(100))).await;
    agrees(&store.in_mode::<Cas>(), named("budget", WeekendBudget(100))).await;
}

async fn agrees<A: Algorithm, S: Store<A, Error = RedisError>>(store: &S, limit: Limit<A>) {
    let pure = PureStore::new();
    // From a Friday on, and once the clock goes back.
    for (day, cost) in
        [(0, 60), (0, 60), (0, 0), (1, 60), (1, 50), (1, 1), (0, 1), (3, 100), (3, 101)]
    {
        let check = Check { limit: &limit, key: "alice", cost };
        let batch = Batch::one(&check).now(at(1_773_964_800_000_001 + day * 86_400_000_000));
        let told = store.apply(&batch).await.expect("decides");
        assert_eq!(pure.decide(&batch), Ok(told), "{cost} on day {day}");
    }
}

/// What may be wrong in a script.
type Wrong = fn(&str) -> String;

/// Of the bucket, in whatever script it stands.
#[test]
fn a_twin_that_is_a_little_wrong_is_caught() {
    let faults: [(Property, Wrong, &str); 2] = [
        (
            Property::KeepsWhatMatters,
            |script| {
                script.replace("expires = tat_us", "expires = now + floor((tat_us - now) * 4 / 5)")
            },
            "vanishes too early",
        ),
        (
            Property::Agrees,
            |script| script.replace("tat_us = tat_us + (", "tat_us = 5 + tat_us + ("),
            "",
        ),
    ];
    for (property, wrong, says) in faults {
        let server = server();
        let wrong =
            OnServer::<Lua>::by(&server, &server.url(), |connection| connection.rewriting(wrong));
        let caught =
            try_same(&wrong, property, Scope::One(AlgorithmKind::Gcra), 16).expect_err("wrong");
        assert_eq!(caught.law, property.law(), "{caught}");
        assert!(caught.to_string().contains(says), "{caught}");
    }
}

#[tokio::test]
async fn an_operation_that_an_algorithm_lacks_is_refused_and_charges_nothing() {
    let server = server();
    let lua = plain(&server).await;
    let (trial, budget) = (named("trial", Trial(5)), named("budget", WeekendBudget(100)));
    for op in [Op::Refund, Op::Force] {
        let error = apply(&lua, &[(&trial, "alice", 1)], op, None).await;
        fails(error, ErrorKind::Unsupported, "trial");
        let error = apply(&lua.in_mode::<Cas>(), &[(&budget, "alice", 1)], op, None).await;
        fails(error, ErrorKind::Unsupported, "budget");
    }
    assert_eq!(keys(&server), [""; 0]);
}

/// A charge without refund or settlement stays if another slot denies in between: the caller gets a
/// denial, not an error.
#[tokio::test]
async fn a_charge_without_undo_stays_across_slots() {
    let (server, limit) = (server(), named("once", Trial(3)));
    let port = server.port();
    // Another program takes Bob's place between the question and the charge.
    let connection = meddling_connection(&server).await.clustered().decided(move |words| {
        if words.asks("reserve", "bob") {
            let used = ["HSET", "rl:1::{bob}", "once", "trial \u{3}\0\0\0\0\0\0\0\0\0\0\0\0\0"];
            let mut client = RespClient::connect(port).expect("it is up");
            client.command(&used).expect("it answers").ok().expect("done");
        }
        Fate::Sent
    });
    let store = over(RedisStore::builder(), connection);
    let both = [(&limit, "alice", 1), (&limit, "bob", 1)];
    let verdict = apply(&store, &both, Op::Acquire, None).await.expect("decides");
    assert_eq!(verdict.denied_by().collect::<Vec<_>>(), [1]);
    assert_eq!(store.state(&limit, "alice").await.expect("a state"), Some(1));
}

/// Three once and never again, by any program, with so many parameters as are given.
#[derive(Clone, Copy, Debug)]
struct Called(&'static Program, bool);

impl Algorithm for Called {
    type State = u64;

    fn capacity(&self) -> u64 {
        3
    }

    fn step(&self, state: Option<&u64>, now: Timestamp, cost: u64) -> Step<u64> {
        Trial(3).step(state, now, cost)
    }
}

impl RecordText for Called {}

impl LuaProgram for Called {
    fn twins(&self) -> impl IntoIterator<Item = Twin> {
        [if self.1 { Twin::new(self.0, 3, [1]) } else { Twin::new(self.0, 3, []) }]
    }

    fn decode(&self, stored: &[Option<Stored>]) -> Option<u64> {
        stored.first()?.as_ref().map(|_| 1)
    }
}

fn called(name: &'static str, lua: &'static str) -> &'static Program {
    Box::leak(Box::new(Program::of_numbers(name, &["spent"], &[], lua)))
}

const ONCE: &str = "--- fresh\nspent = 0\n--- level\nlocal used = spent\n\
                    --- move\nspent, expires = after, 2^52 - 1";
/// It charges twice what its algorithm does.
const TWICE: &str = "--- fresh\nspent = 0\n--- level\nlocal used = 2 * spent\n\
                     --- move\nspent, expires = after, 2^52 - 1";

#[tokio::test]
async fn a_script_that_contradicts_the_step_is_an_error_that_names_the_limit() {
    let (server, limit) = (server(), named("wrong", Called(called("doubled", TWICE), false)));
    let store = plain(&server).await;
    let two = [(&limit, "alice", 2)];
    assert!(apply(&store, &two, Op::Acquire, None).await.expect("both admit").allowed());
    let error = apply(&store, &two, Op::Acquire, None).await;
    assert!(matches!(&error, Err(RedisError::Disagrees { limit, .. }) if limit == "wrong"));
    fails(error, ErrorKind::Indeterminate, "");
    // A twin of too many parameters is refused by name.
    let more = named("more", Called(called("doubled", TWICE), true));
    fails(acquire(&store, &more, "alice").await, ErrorKind::Config, "limit \"more\"");
}

/// The name identifies whose state is stored, so no two programs may share one.
#[tokio::test]
async fn a_program_with_anothers_name_is_refused() {
    const DENIES: &str = "--- level\nleft = 0";
    let server = server();
    let refused = |answer, program: &str| {
        let said = fails(answer, ErrorKind::Config, &format!("the program {program:?}"));
        assert!(said.contains("another name"), "{said}");
    };
    // The token bucket is GCRA by its other name.
    for name in ratelimit_core::AnyAlgorithm::NAMES.iter().filter(|name| **name != "token-bucket") {
        let program = Box::leak(Box::new(Program::of_entries(name, &[], DENIES, Keeps::Numbers)));
        let mine = named("mine", Called(program, false));
        // Before the built-in one has been used, and after.
        let store = plain(&server).await;
        refused(acquire(&store, &mine, "alice").await, name);
        let _ = acquire(&store, &limit("theirs", "gcra 1/s"), "alice").await.expect("decides");
        refused(acquire(&store, &mine, "alice").await, name);
    }
    // Two of the user's own programs. The same program twice is one.
    let [one, other, same] = [("one", ONCE), ("other", TWICE), ("same", ONCE)]
        .map(|(name, lua)| named(name, Called(called("once-ever", lua), false)));
    let store = plain(&server).await;
    let both = [(&one, "bob", 1), (&other, "bob", 1)];
    refused(apply(&store, &both, Op::Acquire, None).await, "once-ever");
    assert!(acquire(&store, &one, "alice").await.expect("decides").allowed());
    refused(acquire(&store, &other, "alice").await, "once-ever");
    assert!(acquire(&store, &same, "alice").await.expect("decides").allowed());
}

/// Scripts contain the name in strings, patterns and formats.
#[tokio::test]
async fn a_program_with_an_invalid_name_is_refused() {
    let server = server();
    let store = plain(&server).await;
    for name in
        ["", "once+ever", "once.ever", "once ever", "once%d", "once'ever", "once\never", "(once"]
    {
        let limit = named("mine", Called(called(name, ONCE), false));
        for (op, cost) in [(Op::Acquire, 1), (Op::Peek, 1), (Op::Reset, 0)] {
            let error = apply(&store, &[(&limit, "alice", cost)], op, None).await;
            fails(error, ErrorKind::Config, &format!("the program {name:?}"));
        }
    }
}

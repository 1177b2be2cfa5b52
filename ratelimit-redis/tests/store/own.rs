//! A user's own algorithm in the compare-and-set mode, and with a twin of its own: those of the examples keep the
//! laws, a twin that is a little wrong is caught, and names and operations that cannot be are refused.

use std::marker::PhantomData;
use std::sync::OnceLock;

use ratelimit_core::Gcra;
use ratelimit_core::algorithm::{GcraState, InMemory, Step};
use ratelimit_core::store::Reservation;
use ratelimit_redis::{Codec, Keeps, LuaProgram, Parameters, Program, Stored, Twin};
use ratelimit_servers::RespClient;
use ratelimit_testkit::{
    AlgorithmHarness, Harness, Instance, Property, PureStore, try_same_algorithm_on,
};

use crate::common::prelude::*;
use crate::own_twin::Trial;
use crate::weekend_budget::WeekendBudget;

/// The laws' harness for stores of a mode, each with a prefix of its own on the server that all tests share.
struct OnServer<M>(Runtime, PhantomData<M>);

macro_rules! harness {
    ($mode:ty, $algorithm:ident: $($bound:tt)+) => {
        impl<$algorithm: $($bound)+> Harness<$algorithm> for OnServer<$mode> {
            type Store = RedisStore<$mode>;
            const CASES: u32 = 32;

            fn new() -> Self {
                Self(Runtime::new().expect("a runtime"), PhantomData)
            }

            fn store(&self) -> Self::Store {
                let builder = RedisStore::builder().prefix(&prefix()).deadline(PATIENCE);
                let server = RedisServer::shared().expect("a server to test on");
                self.0.block_on(builder.connect(&server.url())).expect("it is up").in_mode()
            }

            fn block_on<F: Future>(&self, future: F) -> F::Output {
                self.0.block_on(future)
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
                let server = RedisServer::shared().expect("a server to test on");
                outliving(server, store.prefix(), (within + kept_longer::<$mode>()).as_millis())
            }
        }
    };
}

harness!(Lua, A: LuaProgram);
harness!(Cas, A: Algorithm<State: Codec>);

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

const GCRA: &str = include_str!("../../src/lua/gcra.lua");

/// GCRA by a copy of its twin.
#[derive(Clone, Copy, Debug)]
struct By(Gcra, &'static Program);

/// Methods that are those of the algorithm inside.
macro_rules! inner {
    ($($name:ident($($argument:ident: $type:ty),*) -> $returned:ty;)+) => {
        $(fn $name(&self $(, $argument: $type)*) -> $returned {
            self.0.$name($($argument),*)
        })+
    };
}

type State<'s> = Option<&'s GcraState>;

impl Algorithm for By {
    type State = GcraState;

    inner! {
        capacity() -> u64;
        step(state: State<'_>, now: Timestamp, cost: u64) -> Step<GcraState>;
        force(state: State<'_>, now: Timestamp, cost: u64) -> Option<Step<GcraState>>;
        refund(state: State<'_>, now: Timestamp, cost: u64) -> Option<Step<GcraState>>;
        reservation_us() -> Option<u64>;
        charged_at(state: State<'_>, now: Timestamp) -> Timestamp;
        settle(state: State<'_>, now: Timestamp, of: &Reservation, cost: u64) -> Option<Step<GcraState>>;
    }
}

impl InMemory for By {}

impl LuaProgram for By {
    fn twins(&self) -> Vec<Twin> {
        let refill = self.0.refill();
        let parameters = Parameters::new([refill.tick_units, refill.tick_us, refill.most_units()]);
        vec![Twin::new(self.1, self.capacity(), parameters).in_units(refill.token_units)]
    }

    fn decode(&self, stored: &[Option<Stored>]) -> Option<GcraState> {
        let [Some(stored)] = stored else { return None };
        let [tat_us, surplus, timestamp] = *stored.numbers(self.1)? else { return None };
        Some(GcraState { tat_us, surplus, timestamp: Timestamp::from_us(timestamp)? })
    }
}

/// Limits by a copy of the twin in which a line is changed.
macro_rules! copies {
    ($($copy:ident, $name:literal, $line:literal => $wrong:literal;)+) => { $(
        struct $copy;

        impl AlgorithmHarness for $copy {
            type Algorithm = By;

            fn limits() -> Vec<Instance<By>> {
                static PROGRAM: OnceLock<Program> = OnceLock::new();
                let program = PROGRAM.get_or_init(|| {
                    assert!(GCRA.contains($line), "gcra.lua has changed");
                    let (state, parameters) = (
                        &["tat_us", "surplus", "timestamp"],
                        &["tick_units", "tick_us", "most"],
                    );
                    let source = GCRA.replace($line, $wrong).leak();
                    Program::of_numbers($name, state, parameters, source)
                });
                let limit = |(rate, burst): (&str, u64)| {
                    let gcra = Gcra::new(rate.parse().expect("a rate"), burst).expect("a limit");
                    Instance::new(format!("{rate} burst {burst}"), By(gcra, program))
                };
                [("3/s", 5), ("7/5m", 7)].map(limit).into()
            }
        }
    )+ };
}

copies! {
    Right, "right", "expires = tat_us" => "expires = tat_us";
    ExpiresEarly, "early", "expires = tat_us" => "expires = now + floor((tat_us - now) * 4 / 5)";
    ArrivesLater, "later", "tat_us = tat_us + (" => "tat_us = 5 + tat_us + (";
}

/// What the law says that the algorithm breaks in such a store.
fn broken<T: AlgorithmHarness, M>(property: Property) -> Option<String>
where
    OnServer<M>: Harness<T::Algorithm>,
{
    let harness = OnServer::<M>::new();
    let outcome = try_same_algorithm_on::<T, _>(&harness, property, 16);
    outcome.err().map(|failure| {
        assert_eq!(failure.violation.law, property.law(), "{failure}");
        failure.to_string()
    })
}

#[test]
fn an_own_algorithm_keeps_the_laws_without_a_twin_and_with_one() {
    for property in Property::ALL {
        assert_eq!(broken::<Right, Lua>(property), None);
    }
    // A trial is kept for ever; a store may refuse a refund that neither has for another reason than the step.
    assert_eq!(broken::<Budgets, Cas>(Property::KeepsWhatMatters), None);
    assert_eq!(broken::<Budgets, Cas>(Property::ManyTasksAreAdmittedExactlyTheLimit), None);
    assert_eq!(broken::<Trials, Lua>(Property::ManyTasksAreAdmittedExactlyTheLimit), None);
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

#[test]
fn a_twin_that_expires_a_fifth_too_early_is_caught_by_law_9() {
    let said = broken::<ExpiresEarly, Lua>(Property::KeepsWhatMatters);
    assert!(said.as_deref().is_some_and(|said| said.contains("vanishes too early")), "{said:?}");
}

#[test]
fn a_twin_whose_state_is_five_microseconds_off_is_caught_by_law_10() {
    assert!(broken::<ArrivesLater, Lua>(Property::Agrees).is_some());
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
    let connection = meddled(&server).await.clustered().decided(move |words| {
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

impl LuaProgram for Called {
    fn twins(&self) -> Vec<Twin> {
        let parameters = if self.1 { Parameters::new([1]) } else { Parameters::new([]) };
        vec![Twin::new(self.0, 3, parameters)]
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
    const DENIES: &str = "return in_field { parameters = { 'limit' }, read = function() end, \
        change = function() return false end }";
    let server = server();
    let refused = |answer, program: &str| {
        let said = fails(answer, ErrorKind::Config, &format!("the program {program:?}"));
        assert!(said.contains("another name"), "{said}");
    };
    // The token bucket is GCRA by its other name.
    for name in ratelimit_core::Policy::NAMES.iter().filter(|name| **name != "token-bucket") {
        let program = Box::leak(Box::new(Program::of_entries(name, DENIES, Keeps::Numbers)));
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

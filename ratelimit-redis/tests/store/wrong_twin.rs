//! The laws catch a user's twin that is a little wrong.

use std::sync::OnceLock;

use ratelimit_core::{Algorithm, Gcra, GcraState, InMemory, Limit, Reservation, Step, Timestamp};
use ratelimit_redis::{LuaProgram, Parameters, Program, RedisStore, Stored, Twin};
use ratelimit_testkit::{
    AlgorithmHarness, AlgorithmProperty, Instance, OnRedis, RedisBacked, try_same_algorithm_on,
};
use tokio::runtime::Runtime;

const SOURCE: &str = include_str!("../../src/lua/gcra.lua");

/// A way to copy `gcra.lua`.
trait Copied: Send + Sync + 'static {
    fn program() -> &'static Program;
}

macro_rules! copies {
    ($($copy:ident, $name:literal, $line:literal => $wrong:literal;)+) => { $(
        #[derive(Clone, Copy, Debug, Default)]
        struct $copy;

        impl Copied for $copy {
            fn program() -> &'static Program {
                static PROGRAM: OnceLock<Program> = OnceLock::new();
                PROGRAM.get_or_init(|| {
                    assert!(SOURCE.contains($line), "gcra.lua has changed");
                    let source = SOURCE.replace($line, $wrong).leak();
                    let state = &["tat_us", "surplus", "timestamp"];
                    let parameters = &["tick_units", "tick_us", "full_us"];
                    Program::of_numbers($name, state, parameters, source)
                })
            }
        }
    )+ };
}

copies! {
    Right, "right", "expires = tat_us" => "expires = tat_us";
    ExpiresEarly, "early", "expires = tat_us" => "expires = now + floor((tat_us - now) * 4 / 5)";
    WaitsLonger, "longer", "fits_us = tat_us" => "fits_us = 5 + tat_us";
}

/// GCRA by a copy of its twin.
#[derive(Clone, Copy, Debug)]
struct By<T>(Gcra, T);

impl<T: Copied> Algorithm for By<T> {
    type State = GcraState;

    fn capacity(&self) -> u64 {
        self.0.capacity()
    }

    fn step(&self, state: Option<&GcraState>, now: Timestamp, cost: u64) -> Step<GcraState> {
        self.0.step(state, now, cost)
    }

    fn force(
        &self,
        state: Option<&GcraState>,
        now: Timestamp,
        cost: u64,
    ) -> Option<Step<GcraState>> {
        self.0.force(state, now, cost)
    }

    fn reservation_us(&self) -> Option<u64> {
        self.0.reservation_us()
    }

    fn charged_at(&self, state: Option<&GcraState>, now: Timestamp) -> Timestamp {
        self.0.charged_at(state, now)
    }

    fn settle(
        &self,
        state: Option<&GcraState>,
        now: Timestamp,
        reservation: &Reservation,
        cost: u64,
    ) -> Option<Step<GcraState>> {
        self.0.settle(state, now, reservation, cost)
    }

    fn refund(
        &self,
        state: Option<&GcraState>,
        now: Timestamp,
        cost: u64,
    ) -> Option<Step<GcraState>> {
        self.0.refund(state, now, cost)
    }
}

impl<T: Copied> InMemory for By<T> {}

impl<T: Copied> LuaProgram for By<T> {
    fn twins(&self) -> Vec<Twin> {
        let refill = self.0.refill();
        let parameters = Parameters::new([refill.tick_units, refill.tick_us, refill.full_us()]);
        vec![Twin::new(T::program(), self.capacity(), parameters).in_units(refill.token_units)]
    }

    fn decode(&self, stored: &[Option<Stored>]) -> Option<GcraState> {
        let [Some(stored)] = stored else { return None };
        let [tat_us, surplus, timestamp] = *stored.numbers(T::program())? else { return None };
        Some(GcraState { tat_us, surplus, timestamp: Timestamp::from_us(timestamp)? })
    }
}

struct Limits<T>(T);

impl<T: Copied + Copy + Default> AlgorithmHarness for Limits<T> {
    type Algorithm = By<T>;

    fn limits() -> Vec<Instance<By<T>>> {
        let limit = |(rate, burst): (&str, u64)| {
            let gcra = Gcra::new(rate.parse().expect("a rate"), burst).expect("a limit");
            Instance::new(format!("{rate} burst {burst}"), By(gcra, T::default()))
        };
        [("3/s", 5), ("7/5m", 7)].map(limit).into()
    }
}

struct OnLua;

impl<T: Copied> RedisBacked<By<T>> for OnLua {
    type Store = RedisStore;

    fn block_on<F: Future>(future: F) -> F::Output {
        static RUNTIME: OnceLock<Runtime> = OnceLock::new();
        RUNTIME.get_or_init(|| Runtime::new().expect("a runtime")).block_on(future)
    }

    async fn connect(url: &str, prefix: &str) -> RedisStore {
        RedisStore::builder().prefix(prefix).connect(url).await.expect("it is up")
    }

    async fn state(store: &RedisStore, limit: &Limit<By<T>>, key: &str) -> Option<GcraState> {
        store.state(limit, key).await.expect("a state, or none")
    }
}

fn broken<T: Copied + Copy + Default>(property: AlgorithmProperty) -> Option<String> {
    let harness = <OnRedis<OnLua> as ratelimit_testkit::Harness<By<T>>>::new();
    let outcome = try_same_algorithm_on::<Limits<T>, _>(&harness, property, 16);
    outcome.err().map(|failure| {
        assert_eq!(failure.violation.law, property.law(), "{failure}");
        failure.to_string()
    })
}

#[test]
fn a_copied_twin_keeps_the_laws() {
    for property in AlgorithmProperty::KEPT {
        assert_eq!(broken::<Right>(*property), None);
    }
}

#[test]
fn a_twin_that_expires_a_fifth_too_early_is_caught_by_law_14() {
    let said = broken::<ExpiresEarly>(AlgorithmProperty::DecidesByItsOwnClock);
    assert!(said.as_deref().is_some_and(|said| said.contains("vanish too early")), "{said:?}");
}

#[test]
fn a_twin_whose_wait_is_five_microseconds_off_is_caught_by_law_10() {
    assert!(broken::<WaitsLonger>(AlgorithmProperty::OneAnswerEverywhere).is_some());
}

//! A lockout with a flaw is caught by the law that names it, and the sound one passes on the same
//! walks.

use std::time::Duration;

use ratelimit_core::algorithm::{InMemory, LockoutState, MaybeStep, Step, Write};
use ratelimit_core::{Algorithm, Lockout, Rate, Timestamp};
use ratelimit_testkit::AlgorithmProperty as Property;
use ratelimit_testkit::{AlgorithmHarness, Instance, try_same_algorithm};

const CASES: u32 = 256;

/// Of one window, so that each may be changed to the others.
const LIMITS: [&str; 4] = [
    "1/7ms block 9ms",
    "3/7ms block 2ms factor 3 longest 40ms forget 30ms",
    "4/7ms block 20ms factor 2 longest 1s forget 50ms",
    "9/7ms block 1us factor 1000000 longest 3ms forget 1s",
];

/// Writes the flaws, and a harness for each.
macro_rules! flaws {
    ($($(#[$doc:meta])* $flaw:ident,)+) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        enum Flaw {
            $($(#[$doc])* $flaw,)+
        }

        $(
            struct $flaw;

            impl AlgorithmHarness for $flaw {
                type Algorithm = Wrong;

                fn limits() -> Vec<Instance<Wrong>> {
                    let of = |words: &str| words.parse().expect("a lockout");
                    let wrong = |words| Wrong { sound: of(words), flaw: Flaw::$flaw };
                    LIMITS.map(|words| Instance::new(words, wrong(words))).into()
                }

                fn recovers_within_us(limit: &Wrong) -> Option<u64> {
                    let lockout = limit.sound;
                    Some((lockout.longest_us() + lockout.forget_us()).max(lockout.window_us()))
                }
            }
        )+
    };
}

flaws! {
    Nothing,
    /// A denied request begins the block again.
    RestartsOnDenial,
    /// A block lasts as long as the limit says that began it.
    KeepsTheOldBlock,
    /// A block that is over is remembered for a microsecond more.
    OutlivesItself,
    /// It tells when the window ends, and not the block.
    WaitsForTheWindow,
    /// After the clock has gone back, a block begins at that time.
    BlocksInThePast,
    /// The charge that reaches the count begins no block.
    NeverBlocks,
}

struct Wrong {
    sound: Lockout,
    flaw: Flaw,
}

impl Wrong {
    /// As the sound one with this first block, if all are equal.
    fn blocking_for(&self, block_us: u64) -> Lockout {
        let rate = Rate::per_us(self.sound.capacity(), self.sound.window_us()).expect("a rate");
        Lockout::new(rate, Duration::from_micros(block_us)).build().expect("a lockout")
    }
}

impl Algorithm for Wrong {
    type State = LockoutState;

    fn capacity(&self) -> u64 {
        self.sound.capacity()
    }

    fn step(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> Step<Self::State> {
        let mut due = self.sound.step(state, now, cost);
        let Some(before) = state else { return due };
        let block_us = before.until_us.saturating_sub(before.newest.as_us());
        let is_blocked = now.as_us() < before.until_us;
        let is_denied = !due.decision.allowed;
        match self.flaw {
            Flaw::RestartsOnDenial if is_blocked && is_denied => {
                let newest = now.max(before.newest);
                let until_us = newest.as_us() + block_us;
                let ends_us = before.ends_us + (until_us - before.until_us);
                let expires = Timestamp::saturating_from_us(ends_us);
                let state = LockoutState { newest, until_us, ends_us, ..*before };
                Step { write: Write::Put { state, expires }, ..due }
            }
            Flaw::KeepsTheOldBlock if is_blocked => {
                self.blocking_for(block_us).step(state, now, cost)
            }
            Flaw::OutlivesItself if before.ends_us == now.as_us() => {
                self.sound.step(state, Timestamp::saturating_from_us(before.ends_us - 1), cost)
            }
            Flaw::WaitsForTheWindow if is_blocked && is_denied => {
                let end_us = before.start.as_us() + self.sound.window_us();
                let wait_us = end_us.saturating_sub(now.as_us()).max(1);
                due.decision.retry_after_us = due.decision.retry_after_us.map(|_| wait_us);
                due
            }
            Flaw::BlocksInThePast if !is_blocked && now < before.newest => {
                let earlier = LockoutState { newest: now, start: before.start.min(now), ..*before };
                self.sound.step(Some(&earlier), now, cost)
            }
            Flaw::NeverBlocks if due.decision.allowed && due.decision.remaining == 0 => {
                let unblocked = |state| LockoutState { until_us: 0, ..state };
                due.map(unblocked)
            }
            _ => due,
        }
    }

    fn refund(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> MaybeStep<Self> {
        self.sound.refund(state, now, cost)
    }

    fn force(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> MaybeStep<Self> {
        self.sound.force(state, now, cost)
    }

    fn filled(&self, now: Timestamp) -> Step<Self::State> {
        self.sound.filled(now)
    }
}

impl InMemory for Wrong {}

#[test]
fn the_sound_lockout_keeps_every_law_on_the_same_walks() {
    for property in Property::ALL {
        let outcome = try_same_algorithm::<Nothing>(*property, CASES);
        assert!(outcome.is_ok(), "{}", outcome.expect_err("not kept"));
    }
}

fn check_is_caught<T: AlgorithmHarness>(property: Property) {
    let Err(failure) = try_same_algorithm::<T>(property, CASES) else {
        panic!("{property:?} does not catch {}", std::any::type_name::<T>())
    };
    assert_eq!(failure.law, property.law(), "{failure}");
}

#[test]
fn each_flaw_of_a_lockout_is_caught_by_the_property_that_names_its_law() {
    check_is_caught::<RestartsOnDenial>(Property::ADenialChargesNothing);
    check_is_caught::<KeepsTheOldBlock>(Property::ChangingALimitIsSafe);
    check_is_caught::<OutlivesItself>(Property::ExpiredIsAbsent);
    check_is_caught::<WaitsForTheWindow>(Property::RetryAfterIsHonest);
    check_is_caught::<BlocksInThePast>(Property::TimeGoingBackMintsNothing);
    check_is_caught::<NeverBlocks>(Property::RetryAfterIsHonest);
}

//! An algorithm and a clock that panic on demand, at a chosen call.

use std::borrow::Cow;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use ratelimit_core::algorithm::{InMemory, LoggedRequest, Recovery, Step};
use ratelimit_core::for_memory::Compact;
use ratelimit_core::store::Reservation;
use ratelimit_core::{Algorithm, ManualClock, Timestamp};

use crate::common::{BEGIN, Hooked};

/// The parts of foreign code that a store calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// A step, a refund, a forced charge, a settlement or a renewal.
    Step,
    /// The compact form of a state.
    Compact,
    Entries,
    Annotate,
    Clock,
    /// What does not panic: a parameter of the limit.
    Parameter,
}

pub(crate) const PARTS: [Part; 5] =
    [Part::Step, Part::Compact, Part::Entries, Part::Annotate, Part::Clock];

thread_local! {
    /// The part that is to panic, and after how many calls.
    static TRAP: Cell<Option<(Part, usize)>> = const { Cell::new(None) };
}

struct Sprung;

fn passes(part: Part) {
    match TRAP.get() {
        Some((trapped, 0)) if trapped == part => {
            TRAP.set(None);
            // Without a message on standard error.
            resume_unwind(Box::new(Sprung));
        }
        Some((trapped, left)) if trapped == part => TRAP.set(Some((trapped, left - 1))),
        _ => {}
    }
}

/// Runs `call` with a part trapped after so many of its calls. Returns `None` if the trap was
/// sprung.
pub(crate) fn run_trapped<T>(part: Part, after: usize, call: impl FnOnce() -> T) -> Option<T> {
    TRAP.set(Some((part, after)));
    let result = catch_unwind(AssertUnwindSafe(call));
    TRAP.set(None);
    match result {
        Ok(result) => Some(result),
        Err(panic) if panic.is::<Sprung>() => None,
        Err(panic) => resume_unwind(panic),
    }
}

/// Decides as `A` does, unless it is trapped.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Trapped<A>(pub(crate) A);

/// Methods that call the inner algorithm's, once they have passed a part.
macro_rules! passing {
    ($($part:ident $name:ident($($argument:ident: $type:ty),*) $(-> $returned:ty)?;)*) => {
        $(fn $name(&self $(, $argument: $type)*) $(-> $returned)? {
            passes(Part::$part);
            self.0.$name($($argument),*)
        })*
    };
}

type Held<'s, A> = Option<&'s <A as Algorithm>::State>;

#[deny(clippy::missing_trait_methods)]
impl<A: Algorithm> Algorithm for Trapped<A> {
    type State = A::State;

    passing! {
        Parameter capacity() -> u64;
        Parameter state_kind() -> Cow<'static, str>;
        Step step(state: Held<'_, A>, now: Timestamp, cost: u64) -> Step<A::State>;
        Step refund(state: Held<'_, A>, now: Timestamp, cost: u64) -> Option<Step<A::State>>;
        Step force(state: Held<'_, A>, now: Timestamp, cost: u64) -> Option<Step<A::State>>;
        Step fill(state: Held<'_, A>, now: Timestamp, cost: u64) -> Option<Step<A::State>>;
        Parameter debt() -> u64;
        Step owed(state: Held<'_, A>, now: Timestamp) -> u64;
        Step forgiven(state: Held<'_, A>, now: Timestamp, cost: u64) -> u64;
        Parameter reservation_us() -> Option<u64>;
        Step charged_at(state: Held<'_, A>, now: Timestamp) -> Timestamp;
        Step record(state: Held<'_, A>, now: Timestamp, cost: u64, before: Option<&Reservation>) -> Reservation;
        Step settle(state: Held<'_, A>, now: Timestamp, reservation: &Reservation, cost: u64) -> Option<Step<A::State>>;
        Step renew(state: Held<'_, A>, now: Timestamp, reservation: &Reservation) -> Step<A::State>;
        Step undo(state: Held<'_, A>, now: Timestamp, reservation: &Reservation, charged: &A::State) -> Option<Step<A::State>>;
        Step filled(now: Timestamp) -> Step<A::State>;
        Parameter has_leases() -> bool;
        Parameter denies_abnormal_usage() -> bool;
        Parameter recovery() -> Option<Recovery>;
        Parameter metadata_bytes() -> Option<usize>;
        Annotate annotate(state: &mut A::State, metadata: &[u8]);
    }

    fn is_within(&self, max: &Self) -> bool {
        passes(Part::Parameter);
        self.0.is_within(&max.0)
    }

    fn logged<'s>(&self, state: &'s A::State, now: Timestamp) -> &'s [LoggedRequest] {
        passes(Part::Parameter);
        self.0.logged(state, now)
    }
}

#[deny(clippy::missing_trait_methods)]
impl<A: InMemory> InMemory for Trapped<A> {
    passing! {
        Step step_in_place(state: &mut A::State, now: Timestamp, cost: u64) -> Step<()>;
        Parameter entries_per_step() -> usize;
        Parameter is_compact() -> bool;
        Parameter has_fast_step() -> bool;
        Step step_fast(state: Compact, now: Timestamp, cost: u64) -> Option<Step<Compact>>;
    }

    fn entries_in(state: &A::State) -> usize {
        passes(Part::Entries);
        A::entries_in(state)
    }

    fn to_compact(state: &A::State) -> Option<Compact> {
        passes(Part::Compact);
        A::to_compact(state)
    }

    fn from_compact(compact: Compact) -> Option<A::State> {
        passes(Part::Compact);
        A::from_compact(compact)
    }
}

/// A manual clock that panics when it is trapped.
pub(crate) type TrappedClock = Hooked<fn()>;

pub(crate) fn trapped_clock() -> TrappedClock {
    Hooked(ManualClock::new(BEGIN), || passes(Part::Clock))
}

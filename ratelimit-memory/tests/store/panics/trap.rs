//! An algorithm and a clock that panic on demand, at a chosen call.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use ratelimit_core::{
    Algorithm, Clock, Compact, Decision, InMemory, ManualClock, Recovery, Reservation, Step,
    Timestamp,
};

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

/// Runs `call` with a part trapped after so many of its calls. Returns `None` if the trap was sprung.
pub(crate) fn trapped<T>(part: Part, after: usize, call: impl FnOnce() -> T) -> Option<T> {
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

#[deny(clippy::missing_trait_methods)]
impl<A: Algorithm> Algorithm for Trapped<A> {
    type State = A::State;

    fn capacity(&self) -> u64 {
        self.0.capacity()
    }

    fn step(&self, state: Option<&A::State>, now: Timestamp, cost: u64) -> Step<A::State> {
        passes(Part::Step);
        self.0.step(state, now, cost)
    }

    fn refund(
        &self,
        state: Option<&A::State>,
        now: Timestamp,
        cost: u64,
    ) -> Option<Step<A::State>> {
        passes(Part::Step);
        self.0.refund(state, now, cost)
    }

    fn force(&self, state: Option<&A::State>, now: Timestamp, cost: u64) -> Option<Step<A::State>> {
        passes(Part::Step);
        self.0.force(state, now, cost)
    }

    fn reservation_us(&self) -> Option<u64> {
        self.0.reservation_us()
    }

    fn charged_at(&self, state: Option<&A::State>, now: Timestamp) -> Timestamp {
        passes(Part::Step);
        self.0.charged_at(state, now)
    }

    fn settle(
        &self,
        state: Option<&A::State>,
        now: Timestamp,
        reservation: &Reservation,
        cost: u64,
    ) -> Option<Step<A::State>> {
        passes(Part::Step);
        self.0.settle(state, now, reservation, cost)
    }

    fn renew(
        &self,
        state: Option<&A::State>,
        now: Timestamp,
        reservation: &Reservation,
    ) -> Step<A::State> {
        passes(Part::Step);
        self.0.renew(state, now, reservation)
    }

    fn undo(
        &self,
        state: Option<&A::State>,
        now: Timestamp,
        reservation: &Reservation,
        charged: &A::State,
    ) -> Option<Step<A::State>> {
        passes(Part::Step);
        self.0.undo(state, now, reservation, charged)
    }

    fn filled(&self, now: Timestamp) -> Step<A::State> {
        passes(Part::Step);
        self.0.filled(now)
    }

    fn charges_denials(&self) -> bool {
        self.0.charges_denials()
    }

    fn has_leases(&self) -> bool {
        self.0.has_leases()
    }

    fn recovery(&self) -> Option<Recovery> {
        self.0.recovery()
    }

    fn metadata_bytes(&self) -> Option<usize> {
        self.0.metadata_bytes()
    }

    fn wait_us(&self, state: Option<&A::State>, now: Timestamp, cost: u64) -> Option<u64> {
        passes(Part::Step);
        self.0.wait_us(state, now, cost)
    }

    fn annotate(&self, state: &mut A::State, metadata: &[u8]) {
        passes(Part::Annotate);
        self.0.annotate(state, metadata);
    }
}

#[deny(clippy::missing_trait_methods)]
impl<A: InMemory> InMemory for Trapped<A> {
    fn decision(&self, state: Option<&A::State>, now: Timestamp, cost: u64) -> Decision {
        passes(Part::Step);
        self.0.decision(state, now, cost)
    }

    fn step_in_place(&self, state: &mut A::State, now: Timestamp, cost: u64) -> Step<()> {
        passes(Part::Step);
        self.0.step_in_place(state, now, cost)
    }

    fn settle_in_place(
        &self,
        state: &mut A::State,
        now: Timestamp,
        reservation: &Reservation,
        cost: u64,
    ) -> Option<Step<()>> {
        passes(Part::Step);
        self.0.settle_in_place(state, now, reservation, cost)
    }

    fn entries_in(state: &A::State) -> usize {
        passes(Part::Entries);
        A::entries_in(state)
    }

    fn entries_per_step(&self) -> usize {
        self.0.entries_per_step()
    }

    fn is_compact(&self) -> bool {
        self.0.is_compact()
    }

    fn to_compact(state: &A::State) -> Option<Compact> {
        passes(Part::Compact);
        A::to_compact(state)
    }

    fn from_compact(compact: Compact) -> Option<A::State> {
        passes(Part::Compact);
        A::from_compact(compact)
    }

    fn has_fast_step(&self) -> bool {
        self.0.has_fast_step()
    }

    fn step_fast(&self, state: Compact, now: Timestamp, cost: u64) -> Option<Step<Compact>> {
        passes(Part::Step);
        self.0.step_fast(state, now, cost)
    }
}

/// A manual clock that panics when it is trapped.
#[derive(Clone, Debug)]
pub(crate) struct TrappedClock(pub(crate) ManualClock);

impl Clock for TrappedClock {
    fn now(&self) -> Timestamp {
        passes(Part::Clock);
        self.0.now()
    }
}

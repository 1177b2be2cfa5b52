//! The [`Algorithm`] trait: a rate-limiting algorithm as a pure state machine.
//!
//! [`Algorithm::refund`] and [`Algorithm::force`] are separate from [`Algorithm::step`]: a refund
//! is no negative cost, a forced charge is no admission, and each has its own bound. Both are
//! unsupported by default, so your own algorithm needs only a capacity and a step.

use alloc::borrow::Cow;

use crate::decision::Decision;
use crate::reservation::Reservation;
use crate::timestamp::Timestamp;

mod bucketed_window;
mod concurrency;
mod fixed_window;
mod gcra;
mod lockout;
mod sliding_counter;
mod sliding_log;
mod window_log;

pub use bucketed_window::{BucketCount, BucketWindow, BucketedWindow, BucketedWindowState};
pub use concurrency::{Concurrency, ConcurrencyState};
#[cfg(feature = "calendar")]
pub use fixed_window::{Anchor, CalendarBuilder};
pub use fixed_window::{
    CountedWindow, FirstRequestState, FirstRequestWindow, FixedWindow, FixedWindowState,
};
pub use gcra::{Gcra, GcraState, TokenBucket};
pub use lockout::{Lockout, LockoutBuilder, LockoutState};
pub use sliding_counter::{SlidingCounter, SlidingCounterState};
pub use sliding_log::{SlidingLog, SlidingLogState};
pub use window_log::{LoggedRequest, WindowLog, WindowLogState};

/// A rate-limiting algorithm: a pure function from a state, a time and a cost to a decision and the
/// next state.
///
/// It has no other input and no other output, so every backend decides alike.
///
/// # Contract
///
/// `ratelimit-testkit` holds every built-in algorithm to these laws on every backend:
///
/// - `None` is the state of a new key: full capacity. A state past its `expires` decides exactly as
///   `None` does.
/// - A denial writes [`Write::Keep`]. So does a cost of 0, which is always allowed and shows what
///   the next request would find.
/// - `remaining` is the largest cost that fits now, so an admission lowers it by exactly its cost.
/// - `retry_after_us` is exact: if no other request comes, the same cost is admitted at `now + d`
///   and still denied at `now + d − 1`. A cost above the capacity is denied with `None`.
/// - A `now` before the state's own timestamp counts as that timestamp. It creates no capacity, and
///   waits are still counted from `now`.
/// - A state written under other parameters of the same [kind](Self::state_kind) never creates more
///   than [`capacity`](Self::capacity), and never locks a key for longer than these parameters take
///   to recover from empty, or from all that may be owed. A refund or settlement lowers what it
///   holds by no more than it gives back, and a forced charge lowers nothing; only an acquire takes
///   it over.
///
/// # What to implement
///
/// [`State`](Self::State), [`capacity`](Self::capacity) and [`step`](Self::step) make an algorithm.
/// The other methods add operations: refunds, forced charges, reservations, metadata. A store in
/// memory also asks for [`InMemory`](crate::algorithm::InMemory), which `impl InMemory for Mine {}`
/// satisfies.
///
/// # Example
///
/// A limit that never recovers, good for every backend that can keep its state:
///
/// ```
/// use ratelimit_core::{Algorithm, Decision, Timestamp};
/// use ratelimit_core::algorithm::{InMemory, Step, Write};
///
/// struct OnceEver;
/// impl Algorithm for OnceEver {
///     type State = ();
///     fn capacity(&self) -> u64 { 1 }
///     fn step(&self, state: Option<&()>, _now: Timestamp, cost: u64) -> Step<()> {
///         let left = if state.is_some() { 0 } else { 1 };
///         let allowed = cost <= left;
///         let charged = if allowed { cost } else { 0 };
///         Step {
///             decision: Decision {
///                 allowed, cost, limit: 1, remaining: left - charged,
///                 retry_after_us: allowed.then_some(0), replenish_after_us: 0, reset_after_us: 0,
///             },
///             write: if charged == 0 { Write::Keep } else { Write::Put { state: (), expires: Timestamp::MAX } },
///         }
///     }
/// }
/// impl InMemory for OnceEver {}
/// assert!(OnceEver.step(None, Timestamp::ZERO, 1).decision.allowed);
/// ```
pub trait Algorithm: Send + Sync {
    /// What a store keeps for a key between two requests.
    type State: Clone + Send + Sync + 'static;

    /// The most that one key can be admitted at one moment: the burst, or the limit of the window.
    fn capacity(&self) -> u64;

    /// What tells its states from those of other limits of the same name, besides that name: the
    /// algorithm and, where a state says nothing without it, the length of its window, such as
    /// `fixed-window/1d`. Numbers that may change on live states, such as a rate or a burst, are no
    /// part of it. ASCII letters, digits, `-`, `_`, `.`, `/` and parentheses.
    ///
    /// Empty, the default, if the name alone tells: all limits of the name then share a state,
    /// whatever their parameters. An algorithm with another one inside forwards this method, and
    /// one with windows of its own names their length:
    ///
    /// ```
    /// use ratelimit_core::{Algorithm, FixedWindow, Gcra};
    /// assert_eq!(FixedWindow::per_hour(48).build()?.state_kind(), "fixed-window/1h");
    /// assert_eq!(Gcra::per_hour(48).build()?.state_kind(), "gcra");
    /// # Ok::<(), ratelimit_core::ConfigError>(())
    /// ```
    fn state_kind(&self) -> Cow<'static, str> {
        Cow::Borrowed("")
    }

    /// Decides a request of this cost at `now`, and returns what to write if the request is
    /// charged.
    fn step(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> Step<Self::State>;

    /// Gives `cost` back, up to the capacity. Returns `None`, the default, if the algorithm has no
    /// refunds.
    fn refund(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> MaybeStep<Self> {
        let _ = (state, now, cost);
        None
    }

    /// Charges `cost` even if it does not fit, down to nothing left, or into [debt](Self::debt).
    /// Always allowed. Returns `None`, the default, if the algorithm has no forced charges.
    fn force(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> MaybeStep<Self> {
        let _ = (state, now, cost);
        None
    }

    /// The most that a key may owe beyond the [capacity](Self::capacity): forced charges and
    /// settlements above their reservation charge so much more. Requests are denied until it is
    /// paid back. 0, the default, if everything beyond the capacity is [forgiven](Self::forgiven).
    fn debt(&self) -> u64 {
        0
    }

    /// Whether none of its numbers is larger than those of `max`, an algorithm of the same
    /// [kind](Self::state_kind): in no span does it admit more. `false`, the default, if numbers
    /// are not compared: then a limit accepts [no other numbers](crate::Limit::accepts_up_to) of a
    /// request.
    fn is_within(&self, max: &Self) -> bool
    where
        Self: Sized,
    {
        let _ = max;
        false
    }

    /// What a key owes, in units of cost and rounded up: by how much it has used more than its
    /// capacity. 0 by default.
    fn owed(&self, state: Option<&Self::State>, now: Timestamp) -> u64 {
        let _ = (state, now);
        0
    }

    /// What a forced charge of this cost leaves out, because it passes the capacity and the
    /// [debt](Self::debt); rounded up.
    fn forgiven(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> u64 {
        let remaining = self.step(state, now, 0).decision.remaining;
        let room = remaining.saturating_add(self.debt()).saturating_sub(self.owed(state, now));
        cost.saturating_sub(room)
    }

    /// How long a reservation can be settled, or a lease lasts, in microseconds. Returns `None`,
    /// the default, if the algorithm has no reservations.
    fn reservation_us(&self) -> Option<u64> {
        None
    }

    /// The time that a charge made at `now` counts as made, for [`Reservation::timestamp`]. By
    /// default `now`; an algorithm whose state moves `now` forward returns that later time.
    fn charged_at(&self, state: Option<&Self::State>, now: Timestamp) -> Timestamp {
        let _ = state;
        now
    }

    /// The record of a charge of this cost that is about to be made at `now`: what a settlement
    /// needs to give it back, whatever the limit's numbers are by then. `before` is the reservation
    /// that the charge extends.
    ///
    /// A record keeps what was charged in the [terms of the state](Reservation::terms), because a
    /// unit of cost may be worth more once the limit has changed. By default it keeps the cost, and
    /// the time of the first charge: an algorithm with windows overrides it, so that an extension
    /// in another window counts there.
    fn record(
        &self,
        state: Option<&Self::State>,
        now: Timestamp,
        cost: u64,
        before: Option<&Reservation>,
    ) -> Reservation {
        let new = Reservation::new(self.charged_at(state, now), cost);
        let Some(before) = before else { return new };
        let counts = before.counts.saturating_add(cost);
        Reservation { timestamp: before.timestamp, counts, ..new }
    }

    /// Settles a reservation at `cost`, its final cost; a lease ends. Always allowed. A lower cost
    /// returns the part of the difference that still counts; a higher one charges the rest, as
    /// [`force`](Self::force) does. Returns `None`, the default, if the algorithm has no
    /// reservations.
    fn settle(
        &self,
        state: Option<&Self::State>,
        now: Timestamp,
        reservation: &Reservation,
        cost: u64,
    ) -> MaybeStep<Self> {
        let _ = (state, now, reservation, cost);
        None
    }

    /// Renews a reservation: its charge counts as made at `now` if the algorithm moves charges, as
    /// leases do. Always allowed. By default the state stays as it is, and only the reservation
    /// lives longer.
    fn renew(
        &self,
        state: Option<&Self::State>,
        now: Timestamp,
        reservation: &Reservation,
    ) -> Step<Self::State> {
        let _ = reservation;
        Step { decision: self.step(state, now, 0).decision, write: Write::Keep }
    }

    /// Takes back a charge after another part of its batch failed. Always allowed.
    ///
    /// `reservation` holds the charge's cost and time, and `charged` is the state that the charge
    /// left. Later charges stay; so does this one where the state cannot tell it apart from them.
    /// By default the charge is settled at 0.
    fn undo(
        &self,
        state: Option<&Self::State>,
        now: Timestamp,
        reservation: &Reservation,
        charged: &Self::State,
    ) -> MaybeStep<Self> {
        let _ = charged;
        self.settle(state, now, reservation, 0)
    }

    /// Charges a new key all that every part of the limit admits, and all that may be owed: nothing
    /// is left as of `now`, and the wait for full recovery is the longest that a state from before
    /// `now` causes. By default forces a charge of the [`capacity`](Self::capacity) and the
    /// [debt](Self::debt), or steps what remains if there are no forced charges; a limit of several
    /// parts charges each of them.
    fn filled(&self, now: Timestamp) -> Step<Self::State> {
        let capacity = self.capacity();
        let forced = self.force(None, now, capacity.saturating_add(self.debt()));
        // At some times a new key may have less than the capacity.
        let left = || self.step(None, now, 0).decision.remaining;
        forced.unwrap_or_else(|| self.step(None, now, left())).costing(capacity)
    }

    /// Charges a denied request to a limit that [counts attempts](crate::Limit::count_attempts): as
    /// far as there is room, which leaves a full limit as of `now`. `cost` is at most the
    /// [`capacity`](Self::capacity), and only the write matters. Returns `None`, the default, if no
    /// limit of this algorithm can count attempts. An algorithm with forced charges usually forces
    /// the charge.
    fn fill(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> MaybeStep<Self> {
        let _ = (state, now, cost);
        None
    }

    /// Whether charges are leases, which callers release when they are done, so that a denial
    /// usually ends before its wait does. `false`, the default, for all but [`Concurrency`]. Caches
    /// keep no denial of such a limit, and a batch is not renewed once its lease under such a limit
    /// has ended.
    fn has_leases(&self) -> bool {
        false
    }

    /// Whether a denial means that the caller behaves abnormally, as one who has failed to log in
    /// too often, and not that a quota is used up. `false`, the default, for all but [`Lockout`].
    /// HTTP answers name another problem then.
    fn denies_abnormal_usage(&self) -> bool {
        false
    }

    /// How the budget of a key recovers, for stores that draw a part of it in advance. `None`, the
    /// default, if it is not known or a mixture: nothing is drawn in advance then.
    fn recovery(&self) -> Option<Recovery> {
        None
    }

    /// The most bytes of the caller's metadata that a charge keeps. `None`, the default, if it
    /// keeps none; stores then drop the metadata.
    fn metadata_bytes(&self) -> Option<usize> {
        None
    }

    /// Adds the caller's metadata, at most [`metadata_bytes`](Self::metadata_bytes), to the charge
    /// that wrote this state.
    fn annotate(&self, state: &mut Self::State, metadata: &[u8]) {
        let _ = (state, metadata);
    }

    /// The admitted requests that count at `now`, oldest first, for an algorithm that keeps each
    /// with its metadata. None, the default, for any other.
    fn logged<'s>(&self, state: &'s Self::State, now: Timestamp) -> &'s [LoggedRequest] {
        let _ = (state, now);
        &[]
    }
}

/// How the budget of a key [recovers](Algorithm::recovery).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Recovery {
    /// Gradually, as the tokens of a bucket flow back.
    Gradual,
    /// All at once, after [`reset_after_us`](Decision::reset_after_us): a charge counts in the
    /// window that it was made in.
    AtReset,
}

/// One step of an [`Algorithm`]: the decision, and the write that makes it true.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step<S> {
    /// The decision.
    pub decision: Decision,
    /// The change to the state. A store applies it, or drops it if the batch is denied.
    pub write: Write<S>,
}

/// A change to a key's state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Write<S> {
    /// Keep the state; write nothing.
    Keep,
    /// Replace the state.
    Put {
        /// The new state.
        state: S,
        /// When the new state stops mattering: from then on it decides as no state does.
        expires: Timestamp,
    },
    /// Remove the state: the key is new again.
    Remove,
}

/// The step of an operation that not every algorithm has: `None` where it is missing.
pub type MaybeStep<A> = Option<Step<<A as Algorithm>::State>>;

impl<S> Step<S> {
    /// The same step with its state wrapped by `f`.
    pub fn map<T>(self, f: impl FnOnce(S) -> T) -> Step<T> {
        Step { decision: self.decision, write: self.write.map(f) }
    }

    /// The same step with its state converted by `f`, if that can be.
    #[inline]
    pub(crate) fn try_map<T>(self, f: impl FnOnce(S) -> Option<T>) -> Option<Step<T>> {
        let write = match self.write {
            Write::Keep => Write::Keep,
            Write::Put { state, expires } => Write::Put { state: f(state)?, expires },
            Write::Remove => Write::Remove,
        };
        Some(Step { decision: self.decision, write })
    }

    /// The same step for a request of this cost.
    #[must_use]
    pub const fn costing(mut self, cost: u64) -> Self {
        self.decision.cost = cost;
        self
    }
}

impl<S> Write<S> {
    /// Puts a state that stops mattering at this time in microseconds, or at [`Timestamp::MAX`].
    #[inline]
    pub(crate) const fn until(state: S, expires_us: u64) -> Self {
        Self::Put { state, expires: Timestamp::saturating_from_us(expires_us) }
    }

    /// The same write with its state wrapped by `f`.
    pub fn map<T>(self, f: impl FnOnce(S) -> T) -> Write<T> {
        match self {
            Self::Keep => Write::Keep,
            Self::Put { state, expires } => Write::Put { state: f(state), expires },
            Self::Remove => Write::Remove,
        }
    }

    /// The state after this write, from the state `before` it.
    pub const fn after<'s>(&'s self, before: Option<&'s S>) -> Option<&'s S> {
        match self {
            Self::Keep => before,
            Self::Put { state, .. } => Some(state),
            Self::Remove => None,
        }
    }
}

/// Writes [`Algorithm::undo`] for an algorithm that counts a charge in one window, of which
/// `$window` tells the beginning.
macro_rules! undone_by_refund {
    (|$state:ident| $window:expr) => {
        /// Takes the charge off its window, if that is still the current one.
        fn undo(
            &self,
            state: Option<&Self::State>,
            now: Timestamp,
            reservation: &Reservation,
            charged: &Self::State,
        ) -> MaybeStep<Self> {
            let window = |$state: &Self::State| $window;
            let same = state.is_some_and(|state| window(state) == window(charged));
            if same { self.refund(state, now, reservation.cost) } else { None }
        }
    };
}
pub(crate) use undone_by_refund;

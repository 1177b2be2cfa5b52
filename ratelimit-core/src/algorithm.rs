//! The [`Algorithm`] trait: a rate-limiting algorithm as a pure state machine.

use crate::decision::Decision;
use crate::reservation::Reservation;
use crate::timestamp::Timestamp;

mod bucketed_window;
mod concurrency;
mod first_request_window;
mod fixed_window;
mod gcra;
mod sliding_counter;
mod sliding_log;
mod token_bucket;
mod window_log;

pub use bucketed_window::{Bucket, BucketWindow, BucketedWindow, BucketedWindowState};
pub use concurrency::{Concurrency, ConcurrencyState};
pub use first_request_window::{FirstRequestState, FirstRequestWindow};
pub use fixed_window::{FixedWindow, FixedWindowState};
pub use gcra::{Gcra, GcraState};
pub use sliding_counter::{SlidingCounter, SlidingCounterState};
pub use sliding_log::{SlidingLog, SlidingLogState};
pub use token_bucket::{TokenBucket, TokenBucketState};
pub use window_log::{KeepsEntries, WindowEntry, WindowLog, WindowLogState};

/// A rate-limiting algorithm: from a state, a time and a cost to a decision and the next state.
///
/// Nothing else goes in and nothing else comes out, so that every backend decides alike.
///
/// # Contract
///
/// The laws, which `ratelimit-testkit` holds every built-in to on every backend:
///
/// - `None` is the state of a key never seen: full capacity. A state whose `expires` has passed
///   decides exactly as `None` does.
/// - A denial answers [`Write::Keep`]; so does a cost of 0, which is always allowed and shows what
///   the next request would find.
/// - `retry_after_us` is honest: with no other step the same cost is admitted at `now + d` and
///   still denied at `now + d − 1`. A cost above the capacity is denied with `None`.
/// - `now` before the state's own tick counts as the state's tick. It mints nothing and the waits
///   are still counted from `now`.
/// - A state written under other parameters never mints more than [`capacity`](Self::capacity)
///   and never locks a key for longer than these parameters take to recover from empty.
///
/// # Example
///
/// A limit that never recovers, written once and good for every backend that keeps any state:
///
/// ```
/// use ratelimit_core::{Algorithm, Decision, Step, Timestamp, Write};
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
///                 retry_after_us: allowed.then_some(0), reset_after_us: 0,
///             },
///             write: if charged == 0 { Write::Keep } else { Write::Put { state: (), expires: Timestamp::MAX } },
///         }
///     }
/// }
/// assert!(OnceEver.step(None, Timestamp::ZERO, 1).decision.allowed);
/// ```
pub trait Algorithm: Send + Sync {
    /// What is kept for a key between two requests.
    type State: Clone + Send + Sync + 'static;

    /// The most that one key can be admitted at one moment: burst, or the window's limit.
    fn capacity(&self) -> u64;

    /// Decides a request of this cost at `now` and says what to write if it is to be charged.
    fn step(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> Step<Self::State>;

    /// Gives `cost` back, never above the capacity. `None`, as by default, if this algorithm has
    /// no refunds.
    fn refund(
        &self,
        state: Option<&Self::State>,
        now: Timestamp,
        cost: u64,
    ) -> Option<Step<Self::State>> {
        let _ = (state, now, cost);
        None
    }

    /// Charges `cost` whether it fits or not, and everything that is left if it does not: always
    /// allowed, never below zero. `None`, as by default, if this algorithm cannot be forced.
    fn force(
        &self,
        state: Option<&Self::State>,
        now: Timestamp,
        cost: u64,
    ) -> Option<Step<Self::State>> {
        let _ = (state, now, cost);
        None
    }

    /// How long a charge can be held: until a lease ends by itself, or a reservation can no longer
    /// be settled. `None`, as by default, if charges of this algorithm cannot be held.
    fn reservation_us(&self) -> Option<u64> {
        None
    }

    /// When a charge that is made at `now` counts as made, for [`Reservation::timestamp`]: at `now`, as by default, or
    /// at the state's own time if the clock has gone back.
    fn charged_at(&self, state: Option<&Self::State>, now: Timestamp) -> Timestamp {
        let _ = state;
        now
    }

    /// Settles a charge that was held: `cost` is what it turned out to be. What of the difference
    /// still counts is given back, or what is missing is charged, down to nothing left; a lease
    /// ends. Always allowed. `None`, as by default, if charges of this algorithm cannot be held.
    fn settle(
        &self,
        state: Option<&Self::State>,
        now: Timestamp,
        reservation: &Reservation,
        cost: u64,
    ) -> Option<Step<Self::State>> {
        let _ = (state, now, reservation, cost);
        None
    }

    /// Makes a charge that is held count as made at `now`, and says what to write if that changed when it
    /// was. Always allowed. By default, as for every reservation, the state stays as it is, and only the
    /// hold lives longer.
    fn renew(
        &self,
        state: Option<&Self::State>,
        now: Timestamp,
        reservation: &Reservation,
    ) -> Step<Self::State> {
        let _ = reservation;
        unmoved(self, state, now)
    }

    /// Takes back a charge that left the state as `charged`, of a batch that came to nothing elsewhere;
    /// `reservation` is what it cost and when it counts as made. What others were charged since stays: where
    /// that cannot be told apart, so does the charge. Always allowed. By default it is settled at nothing,
    /// and `None` if charges of this algorithm cannot be held.
    fn undo(
        &self,
        state: Option<&Self::State>,
        now: Timestamp,
        reservation: &Reservation,
        charged: &Self::State,
    ) -> Option<Step<Self::State>> {
        let _ = charged;
        self.settle(state, now, reservation, 0)
    }

    /// Whether a request that is denied is charged all the same: only [`Attempts`](crate::Attempts)
    /// says so.
    fn charges_denials(&self) -> bool {
        false
    }

    /// How many bytes about the caller are kept with a charge; `None`, as by default, if none are
    /// kept, and whatever is given is left out.
    fn metadata_bytes(&self) -> Option<usize> {
        None
    }

    /// Whether the states of this algorithm are as a rule [`Compact`]. A hint: a store may look for them
    /// where small states lie first.
    fn is_compact(&self) -> bool {
        false
    }

    /// The state in a few numbers, if it can be told in them: [`from_compact`](Self::from_compact) gives
    /// back the very same. `None`, as by default, leaves a state to the stores' general ways.
    fn to_compact(state: &Self::State) -> Option<Compact>
    where
        Self: Sized,
    {
        let _ = state;
        None
    }

    /// The state that was told in these numbers. `None`, as by default, if no state of this type ever
    /// is. A store may ask for one of numbers that nobody has written, and throw away what came of it: so
    /// neither this nor a step of it may panic.
    #[must_use]
    fn from_compact(compact: Compact) -> Option<Self::State>
    where
        Self: Sized,
    {
        let _ = compact;
        None
    }

    /// [`step`](Self::step) from a small state to a small one, or `None` if one of them cannot be told so.
    /// The same decision, for stores that need never see the state itself.
    fn step_compact(
        &self,
        state: Option<Compact>,
        now: Timestamp,
        cost: u64,
    ) -> Option<Step<Compact>>
    where
        Self: Sized,
    {
        stepped_compact(self, state, now, cost)
    }

    /// Whether this limit has a [quick step](Self::step_fast) of nearly all requests: `false` by default, and
    /// then none is asked for.
    fn has_fast_step(&self) -> bool {
        false
    }

    /// [`step`](Self::step) from a small state there is to a small one, in so few instructions that a store may
    /// have it compiled into whoever asks. The times of the state and of the request may be counted from any
    /// moment, and need not be from the Unix epoch: only how far they are apart may matter. As with
    /// [`from_compact`](Self::from_compact) it may be numbers that nobody has written, or another limit of this
    /// name has. `None`, as by default, of what it is not for.
    fn step_fast(&self, state: Compact, now: Timestamp, cost: u64) -> Option<Step<Compact>>
    where
        Self: Sized,
    {
        let _ = (state, now, cost);
        None
    }

    /// How long until a request of this cost fits, in microseconds, if nothing else comes: 0 if it fits at
    /// `now`, `None` if it never does. As a [`step`](Self::step) tells it by default; an algorithm that
    /// charges the requests it denies leaves its own charge out.
    fn wait_us(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> Option<u64> {
        self.decision(state, now, cost).retry_after_us
    }

    /// What [`step`](Self::step) decides, without what it would write: for a peek.
    fn decision(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> Decision {
        self.step(state, now, cost).decision
    }

    /// [`step`](Self::step) for a store that holds the state alone: what it would write is written over the
    /// state, and nothing is copied that stays. After [`Write::Keep`] the state decides as it did; after
    /// [`Write::Remove`] it is to be forgotten. It decides before it writes, so that nothing is left half
    /// done if it panics.
    fn step_in_place(&self, state: &mut Self::State, now: Timestamp, cost: u64) -> Step<()> {
        stepped_in_place(self, state, now, cost)
    }

    /// [`settle`](Self::settle) as [`step_in_place`](Self::step_in_place) is `step`.
    fn settle_in_place(
        &self,
        state: &mut Self::State,
        now: Timestamp,
        reservation: &Reservation,
        cost: u64,
    ) -> Option<Step<()>> {
        settled_in_place(self, state, now, reservation, cost)
    }

    /// How many entries a state keeps, of what grows with the requests that are admitted: a store can
    /// bound them all together. 0, as by default, for a state of one size.
    fn entries_in(state: &Self::State) -> usize
    where
        Self: Sized,
    {
        let _ = state;
        0
    }

    /// The most [entries](Self::entries_in) that a state has more of after one step, forced or not, or after a
    /// renewal.
    fn entries_a_step(&self) -> usize {
        0
    }

    /// Puts the caller's metadata, of no more than [`metadata_bytes`](Self::metadata_bytes), to the
    /// charge that this state was written for.
    fn annotate(&self, state: &mut Self::State, metadata: &[u8]) {
        let _ = (state, metadata);
    }
}

/// See [`step_in_place`](Algorithm::step_in_place).
pub(crate) fn stepped_in_place<A: Algorithm + ?Sized>(
    algorithm: &A,
    state: &mut A::State,
    now: Timestamp,
    cost: u64,
) -> Step<()> {
    let Step { decision, write } = algorithm.step(Some(state), now, cost);
    Step { decision, write: write.map(|next| *state = next) }
}

/// See [`settle_in_place`](Algorithm::settle_in_place).
pub(crate) fn settled_in_place<A: Algorithm + ?Sized>(
    algorithm: &A,
    state: &mut A::State,
    now: Timestamp,
    reservation: &Reservation,
    cost: u64,
) -> Option<Step<()>> {
    let Step { decision, write } = algorithm.settle(Some(state), now, reservation, cost)?;
    Some(Step { decision, write: write.map(|next| *state = next) })
}

/// What a state shows that a [renewal](Algorithm::renew) leaves as it is.
pub(crate) fn unmoved<A: Algorithm + ?Sized>(
    algorithm: &A,
    state: Option<&A::State>,
    now: Timestamp,
) -> Step<A::State> {
    Step { decision: algorithm.step(state, now, 0).decision, write: Write::Keep }
}

/// The [quick step](Algorithm::step_fast), if there is [one](Algorithm::has_fast_step), and of this.
#[inline]
pub(crate) fn stepped_fast<A: Algorithm>(
    algorithm: &A,
    state: Compact,
    now: Timestamp,
    cost: u64,
) -> Option<Step<Compact>> {
    if algorithm.has_fast_step() { algorithm.step_fast(state, now, cost) } else { None }
}

/// See [`step_compact`](Algorithm::step_compact).
#[inline]
pub(crate) fn stepped_compact<A: Algorithm>(
    algorithm: &A,
    state: Option<Compact>,
    now: Timestamp,
    cost: u64,
) -> Option<Step<Compact>> {
    let state = match state {
        Some(compact) => Some(A::from_compact(compact)?),
        None => None,
    };
    let Step { decision, write } = algorithm.step(state.as_ref(), now, cost);
    let write = match write {
        Write::Put { state, expires } => Write::Put { state: A::to_compact(&state)?, expires },
        Write::Keep => Write::Keep,
        Write::Remove => Write::Remove,
    };
    Some(Step { decision, write })
}

/// An algorithm that can charge what it does not admit: see [`Attempts`](crate::Attempts).
pub trait ChargesAttempts: Algorithm {
    /// Charges a request that does not fit as far as there is room: a full limit as of `now`. `cost` is at most the
    /// [`capacity`](Algorithm::capacity). By default it is forced. See the rule in [`Attempts`](crate::Attempts).
    fn fill(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> Write<Self::State> {
        self.force(state, now, cost).map_or(Write::Keep, |step| step.write)
    }
}

/// A state in a few numbers, which a store can keep in a word or two without knowing what they mean.
///
/// It stops to matter at `at + span_us`: from then on it decides as no state does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compact {
    /// When the state was written.
    pub at: Timestamp,
    /// How long after that it matters, in microseconds.
    pub span_us: u64,
    /// Whatever else there is to it: mostly 0.
    pub extra: u64,
}

/// One step of an [`Algorithm`]: what it decided, and what is to be written for that to be true.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step<S> {
    /// The answer.
    pub decision: Decision,
    /// The change that the answer stands for. A store applies it or, in a denied batch, drops it.
    pub write: Write<S>,
}

/// What becomes of a key's state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Write<S> {
    /// It stays as it is; nothing is written.
    Keep,
    /// It is replaced.
    Put {
        /// The new state.
        state: S,
        /// When the state stops to matter: from then on it decides as no state does.
        expires: Timestamp,
    },
    /// It is removed: the key is as if never seen.
    Remove,
}

impl<S> Step<S> {
    /// The same step with its state wrapped by `f`.
    pub fn map<T>(self, f: impl FnOnce(S) -> T) -> Step<T> {
        Step { decision: self.decision, write: self.write.map(f) }
    }

    /// The same step, said of a request of this cost.
    #[must_use]
    pub const fn costing(mut self, cost: u64) -> Self {
        self.decision.cost = cost;
        self
    }
}

impl<S> Write<S> {
    /// The same write with its state wrapped by `f`.
    pub fn map<T>(self, f: impl FnOnce(S) -> T) -> Write<T> {
        match self {
            Self::Keep => Write::Keep,
            Self::Put { state, expires } => Write::Put { state: f(state), expires },
            Self::Remove => Write::Remove,
        }
    }

    /// The state as it is after this write, if it was `before`.
    pub const fn after<'s>(&'s self, before: Option<&'s S>) -> Option<&'s S> {
        match self {
            Self::Keep => before,
            Self::Put { state, .. } => Some(state),
            Self::Remove => None,
        }
    }
}

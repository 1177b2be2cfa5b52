//! The [`InMemory`] trait: how a store in the same process keeps an algorithm's states small and
//! steps them fast.
//!
//! [`Algorithm`] and [`InMemory`] are two traits, because an algorithm's reader and its author need
//! only the methods that decide. The price is one line per algorithm, `impl InMemory for Mine {}`:
//! stable Rust has neither specialization nor defaults for associated types to save it.

use crate::algorithms::{Algorithm, Step};
use crate::timestamp::Timestamp;

/// An [`Algorithm`] whose states a store keeps in the memory of the process.
///
/// Every method is provided. An algorithm that needs no more than [`step`](Algorithm::step) needs
/// one line: `impl InMemory for Mine {}`. The methods decide nothing of their own; they save
/// copies, allocations and instructions, and they let a store bound the memory that its states
/// take.
///
/// # Contract
///
/// `ratelimit-testkit` checks these laws:
///
/// - [`step_in_place`](Self::step_in_place) decides and writes exactly what
///   [`step`](Algorithm::step) does. It decides before it writes, so that a panic leaves the state
///   as it was.
/// - One step, forced or not, and one renewal add at most
///   [`entries_per_step`](Self::entries_per_step) entries to a state.
///
/// # Example
///
/// ```
/// use ratelimit_core::{Algorithm, Gcra, Timestamp};
/// use ratelimit_core::algorithm::{InMemory, Step};
///
/// struct Logged(Gcra);
/// impl Algorithm for Logged {
///     type State = <Gcra as Algorithm>::State;
///     fn capacity(&self) -> u64 { self.0.capacity() }
///     fn step(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> Step<Self::State> {
///         self.0.step(state, now, cost)
///     }
/// }
/// impl InMemory for Logged {}
/// ```
#[diagnostic::on_unimplemented(
    message = "a store in memory cannot keep the states of `{Self}`",
    label = "needs `InMemory`",
    note = "write `impl InMemory for {Self} {{}}`: every method is provided"
)]
pub trait InMemory: Algorithm {
    /// Steps a state that the store owns and writes the next state over it. [`Write::Keep`] means
    /// that the state decides as before; [`Write::Remove`] means that the store must drop it.
    ///
    /// [`Write::Keep`]: crate::algorithm::Write::Keep
    /// [`Write::Remove`]: crate::algorithm::Write::Remove
    fn step_in_place(&self, state: &mut Self::State, now: Timestamp, cost: u64) -> Step<()> {
        stepped_in_place(self, state, now, cost)
    }

    /// The number of entries in a state whose size grows with the requests that it admits, so that
    /// a store can bound them. 0, the default, for states of one size.
    fn entries_in(state: &Self::State) -> usize
    where
        Self: Sized,
    {
        let _ = state;
        0
    }

    /// The most [entries](Self::entries_in) that one step or renewal adds to a state.
    fn entries_per_step(&self) -> usize {
        0
    }

    /// Whether the states of this limit usually have a [`Compact`] form. A hint: the store looks
    /// for them in its compact table first.
    #[doc(hidden)]
    fn is_compact(&self) -> bool {
        false
    }

    /// Encodes a state. Returns `None`, the default, for a state that has no compact form.
    #[doc(hidden)]
    fn to_compact(state: &Self::State) -> Option<Compact>
    where
        Self: Sized,
    {
        let _ = state;
        None
    }

    /// Decodes a state. Returns `None`, the default, if no state of this type has a compact form.
    #[doc(hidden)]
    #[must_use]
    fn from_compact(compact: Compact) -> Option<Self::State>
    where
        Self: Sized,
    {
        let _ = compact;
        None
    }

    /// Whether this limit has a [fast step](Self::step_fast). `false`, the default, keeps stores
    /// from trying it.
    #[doc(hidden)]
    fn has_fast_step(&self) -> bool {
        false
    }

    /// Steps from one compact state to the next in so few instructions that a store may inline it.
    /// Returns `None`, the default, for requests that it does not handle.
    #[doc(hidden)]
    fn step_fast(&self, state: Compact, now: Timestamp, cost: u64) -> Option<Step<Compact>>
    where
        Self: Sized,
    {
        let _ = (state, now, cost);
        None
    }
}

/// Writes the methods of [`InMemory`] that count entries, for a state that lists them in this
/// field. A step adds at most one.
macro_rules! counts_entries {
    ($entries:ident) => {
        fn entries_in(state: &Self::State) -> usize {
            state.$entries.len()
        }

        fn entries_per_step(&self) -> usize {
            1
        }
    };
}
pub(crate) use counts_entries;

/// A state in three numbers, which a store can pack into a word or two without knowing their
/// meaning.
///
/// From `at + span_us` on, it decides as no state does.
///
/// - [`from_compact`](InMemory::from_compact) returns the state that
///   [`to_compact`](InMemory::to_compact) encoded.
/// - [`step_fast`](InMemory::step_fast) returns either what [`step`](Algorithm::step) does or
///   `None`. Only differences between times matter to it, so a store may count them from any epoch.
/// - A store may read a compact state while another thread writes it, and discard the result. So
///   `from_compact`, and every step of the state that it returns, accept any numbers without a
///   panic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compact {
    /// When the state was written.
    pub at: Timestamp,
    /// How long it matters after that, in microseconds.
    pub span_us: u64,
    /// The rest of the state; usually 0.
    pub extra: u64,
}

/// Steps a compact state: decodes it, [steps](Algorithm::step), and encodes the next state.
///
/// Returns `None` if either state has no compact form.
#[inline]
pub fn step_compact<A: InMemory>(
    algorithm: &A,
    state: Option<Compact>,
    now: Timestamp,
    cost: u64,
) -> Option<Step<Compact>> {
    through_states::<A>(state, |state| algorithm.step(state, now, cost))
}

/// Decodes a compact state for a step, and encodes the next state.
#[inline]
pub(crate) fn through_states<A: InMemory>(
    state: Option<Compact>,
    step: impl FnOnce(Option<&A::State>) -> Step<A::State>,
) -> Option<Step<Compact>> {
    let state = match state {
        Some(compact) => Some(A::from_compact(compact)?),
        None => None,
    };
    step(state.as_ref()).try_map(|state| A::to_compact(&state))
}

/// The provided [`step_in_place`](InMemory::step_in_place), for overrides that fall back on it.
pub(crate) fn stepped_in_place<A: Algorithm + ?Sized>(
    algorithm: &A,
    state: &mut A::State,
    now: Timestamp,
    cost: u64,
) -> Step<()> {
    algorithm.step(Some(state), now, cost).map(|next| *state = next)
}

/// The [fast step](InMemory::step_fast), if the limit [has one](InMemory::has_fast_step) and it
/// handles the request.
#[inline]
pub(crate) fn stepped_fast<A: InMemory>(
    algorithm: &A,
    state: Compact,
    now: Timestamp,
    cost: u64,
) -> Option<Step<Compact>> {
    if algorithm.has_fast_step() { algorithm.step_fast(state, now, cost) } else { None }
}

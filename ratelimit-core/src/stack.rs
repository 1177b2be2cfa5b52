//! [`Stack`]: several limits of one identifier, decided as one limit and kept in one key.

mod in_memory;

use alloc::borrow::Cow;
use alloc::string::String;
use alloc::vec::Vec;
use core::num::NonZeroU64;

use crate::algorithms::{Algorithm, MaybeStep, Step, Write};
use crate::decision::{Decision, summarise};
use crate::error::ConfigError;
use crate::quota::{Quota, slower};
use crate::rate::Rate;
use crate::reservation::Reservation;
use crate::share::Share;
use crate::timestamp::Timestamp;

/// Several limits of the same identifier as one: one state, one look-up, all or nothing.
///
/// A request must fit all of them. The decision is what a [`Verdict`](crate::Verdict) over them
/// shows: the limit with the least remaining (the first on a tie), the longest `reset_after`, and
/// as `retry_after` the time until all of them admit. A [`Batch`](crate::store::Batch) of named
/// limits also returns the decision of each limit.
///
/// A stack is charged as a whole or not at all, so it cannot [count
/// attempts](crate::Limit::count_attempts): keep a limit that does beside it, in the same batch.
///
/// Several named limits do the same and say which of them denied; take them first. A batch looks
/// up a state per limit and allocates its answer, so in memory three named limits take 1.5 to 1.8
/// times as long as a stack of three: that is what a stack is for. A limit that keeps entries is
/// copied at each charge.
///
/// ```
/// use ratelimit_core::{Algorithm, Gcra, Stack, Timestamp};
///
/// let stack = Stack::new([
///     Gcra::new("10/s".parse()?, 10)?,
///     Gcra::new("120/m".parse()?, 120)?,
///     Gcra::new("240/h".parse()?, 240)?,
/// ])?;
/// let decision = stack.step(None, Timestamp::ZERO, 1).decision;
/// assert_eq!((decision.limit, decision.remaining), (10, 9));
/// # Ok::<(), ratelimit_core::ConfigError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stack<A> {
    limits: Vec<A>,
}

/// What a [`Stack`] keeps for a key: a state for each limit, in their order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StackState<S> {
    /// The states; `None` for a limit that is unused.
    pub states: Vec<Option<StackedState<S>>>,
}

/// The state of one limit of a [`Stack`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StackedState<S> {
    /// The state.
    pub state: S,
    /// When it stops mattering.
    pub expires: Timestamp,
}

impl<A: Algorithm> Stack<A> {
    /// A stack of these limits.
    ///
    /// # Errors
    /// No limit.
    pub fn new(limits: impl IntoIterator<Item = A>) -> Result<Self, ConfigError> {
        let limits: Vec<A> = limits.into_iter().collect();
        if limits.is_empty() {
            return Err(ConfigError::new("a stack of no limits; give it at least one"));
        }
        Ok(Self { limits })
    }

    /// The limits.
    #[must_use]
    pub fn limits(&self) -> &[A] {
        &self.limits
    }

    fn state_of(state: Option<&StackState<A::State>>, position: usize) -> Option<&A::State> {
        state?.states.get(position)?.as_ref().map(|stacked| &stacked.state)
    }

    /// The result of `step` for each limit and its state.
    fn each<T>(
        &self,
        state: Option<&StackState<A::State>>,
        step: impl Fn(&A, Option<&A::State>) -> T,
    ) -> impl Iterator<Item = T> {
        let limits = self.limits.iter().enumerate();
        limits.map(move |(position, limit)| step(limit, Self::state_of(state, position)))
    }

    /// The decision when a limit denies: no limit is charged, so a limit that would have admitted
    /// shows what it has.
    fn denial(
        &self,
        state: Option<&StackState<A::State>>,
        now: Timestamp,
        decisions: impl Iterator<Item = Decision>,
    ) -> Decision {
        summarise(decisions.enumerate().map(|(position, decision)| {
            if !decision.allowed {
                return decision;
            }
            let step = self.limits[position].step(Self::state_of(state, position), now, 0);
            step.costing(decision.cost).decision
        }))
    }

    /// One step for all limits: their writes if all of them admit.
    fn join_steps(
        &self,
        state: Option<&StackState<A::State>>,
        now: Timestamp,
        steps: Vec<Step<A::State>>,
    ) -> Step<StackState<A::State>> {
        if steps.iter().any(|step| !step.decision.allowed) {
            let decisions = steps.iter().map(|step| step.decision);
            return Step { decision: self.denial(state, now, decisions), write: Write::Keep };
        }
        let decision = summarise(steps.iter().map(|step| step.decision));
        if steps.iter().all(|step| matches!(step.write, Write::Keep)) {
            return Step { decision, write: Write::Keep };
        }
        let states: Vec<_> = steps
            .into_iter()
            .enumerate()
            .map(|(position, step)| match step.write {
                Write::Keep => state?.states.get(position)?.clone(),
                Write::Put { state, expires } => Some(StackedState { state, expires }),
                Write::Remove => None,
            })
            .collect();
        Step { decision, write: write(states) }
    }
}

/// When the last of these states stops mattering.
fn latest<S>(states: &[Option<StackedState<S>>]) -> Option<Timestamp> {
    states.iter().flatten().map(|stacked| stacked.expires).max()
}

fn write<S>(states: Vec<Option<StackedState<S>>>) -> Write<StackState<S>> {
    match latest(&states) {
        None => Write::Remove,
        Some(expires) => Write::Put { state: StackState { states }, expires },
    }
}

/// Its charges cannot be settled, and it keeps no metadata.
impl<A: Algorithm> Algorithm for Stack<A> {
    type State = StackState<A::State>;

    /// Those of its limits, in their order.
    /// Each of the limits.
    fn is_within(&self, max: &Self) -> bool {
        let mut both = self.limits.iter().zip(&max.limits);
        self.limits.len() == max.limits.len() && both.all(|(own, max)| own.is_within(max))
    }

    fn state_kind(&self) -> Cow<'static, str> {
        let mut kind = String::from("stack");
        for limit in &self.limits {
            kind.extend(["(", &limit.state_kind(), ")"]);
        }
        kind.into()
    }

    /// The least capacity of the limits.
    fn capacity(&self) -> u64 {
        self.limits.iter().map(Algorithm::capacity).min().unwrap_or_default()
    }

    fn step(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> Step<Self::State> {
        let steps = self.each(state, |limit, state| limit.step(state, now, cost));
        self.join_steps(state, now, steps.collect())
    }

    /// The largest debt of the limits.
    fn debt(&self) -> u64 {
        self.limits.iter().map(Algorithm::debt).max().unwrap_or_default()
    }

    /// What is owed to the limit that is owed the most.
    fn owed(&self, state: Option<&Self::State>, now: Timestamp) -> u64 {
        self.each(state, |limit, state| limit.owed(state, now)).max().unwrap_or_default()
    }

    /// What the limit that forgives the most leaves out.
    fn forgiven(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> u64 {
        self.each(state, |limit, state| limit.forgiven(state, now, cost)).max().unwrap_or_default()
    }

    /// Fills each of the limits.
    fn filled(&self, now: Timestamp) -> Step<Self::State> {
        self.join_steps(None, now, self.limits.iter().map(|limit| limit.filled(now)).collect())
    }

    /// Whether one of the limits has.
    fn has_leases(&self) -> bool {
        self.limits.iter().any(Algorithm::has_leases)
    }

    /// Whether all of the limits do: a denial may be of any.
    fn denies_abnormal_usage(&self) -> bool {
        self.limits.iter().all(Algorithm::denies_abnormal_usage)
    }

    /// The latest time of the limits.
    fn charged_at(&self, state: Option<&Self::State>, now: Timestamp) -> Timestamp {
        self.each(state, |limit, state| limit.charged_at(state, now)).max().unwrap_or(now)
    }

    /// `None` if a limit has no refunds.
    fn refund(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> MaybeStep<Self> {
        let steps = self.each(state, |limit, state| limit.refund(state, now, cost));
        Some(self.join_steps(state, now, steps.collect::<Option<_>>()?))
    }

    /// `None` if a limit has no forced charges.
    fn force(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> MaybeStep<Self> {
        let steps = self.each(state, |limit, state| limit.force(state, now, cost));
        Some(self.join_steps(state, now, steps.collect::<Option<_>>()?))
    }

    /// Takes the charge off each limit whose state can tell it apart.
    fn undo(
        &self,
        state: Option<&Self::State>,
        now: Timestamp,
        reservation: &Reservation,
        charged: &Self::State,
    ) -> MaybeStep<Self> {
        let limits = self.limits.iter().enumerate();
        let steps = limits.map(|(position, limit)| {
            let own = Self::state_of(state, position);
            let charged = Self::state_of(Some(charged), position);
            let undone = charged.and_then(|charged| limit.undo(own, now, reservation, charged));
            undone.unwrap_or_else(|| limit.step(own, now, 0))
        });
        Some(self.join_steps(state, now, steps.collect()))
    }
}

/// A stack of the shares of its limits. A request is charged to all of them or to none, so that
/// each limit keeps its contract as if it were alone.
impl<A: Share> Share for Stack<A> {
    fn share(&self, nodes: NonZeroU64) -> Result<Self, ConfigError> {
        let shares = self.limits.iter().map(|limit| limit.share(nodes));
        Self::new(shares.collect::<Result<Vec<_>, _>>()?)
    }
}

/// The slowest of its limits' rates, and the window of the limit that the decision shows.
impl<A: Quota> Quota for Stack<A> {
    fn rate(&self) -> Option<Rate> {
        self.limits().iter().filter_map(Quota::rate).reduce(slower)
    }

    fn window_us(&self, decision: &Decision) -> Option<u64> {
        let shown = self.limits().iter().filter(|limit| limit.capacity() == decision.limit);
        shown.filter_map(|limit| limit.window_us(decision)).max()
    }
}

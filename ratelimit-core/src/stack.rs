//! [`Stack`]: several limits of one identifier as one, in one key.

use alloc::vec::Vec;

use crate::algorithm::{Algorithm, Compact, Step, Write, stepped_fast, stepped_in_place, unmoved};
use crate::decision::{Decision, summarise};
use crate::error::ConfigError;
use crate::reservation::Reservation;
use crate::timestamp::Timestamp;

/// How many limits of a stack are stepped without an allocation.
const FEW: usize = 8;

/// Several limits that are kept for the same identifier: one state, one look-up, all or nothing.
///
/// A request has to fit all of them. The decision is what a [`Verdict`](crate::Verdict) over them shows: the limit
/// with the least remaining (the first on a tie), the longest `reset_after`, and as `retry_after` the
/// moment when all of them would admit. Where each limit's own answer is asked for, take a
/// [`Batch`](crate::Batch) of named limits.
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
    /// The states; `None` for a limit of which nothing is used.
    pub states: Vec<Option<StackedState<S>>>,
}

/// The state of one limit of a [`Stack`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StackedState<S> {
    /// The state.
    pub state: S,
    /// When it stops to matter.
    pub expires: Timestamp,
}

impl<A: Algorithm> Stack<A> {
    /// These limits.
    ///
    /// # Errors
    /// No limit at all, or one that [counts attempts](crate::Attempts): it would charge when the
    /// others do not.
    pub fn new(limits: impl IntoIterator<Item = A>) -> Result<Self, ConfigError> {
        let limits: Vec<A> = limits.into_iter().collect();
        if limits.is_empty() {
            return Err(ConfigError::new("a stack of no limits; give it at least one"));
        }
        if limits.iter().any(Algorithm::charges_denials) {
            return Err(ConfigError::new(
                "a stack is charged as a whole or not at all; keep a limit that counts attempts \
                 beside it, in the same batch",
            ));
        }
        Ok(Self { limits })
    }

    /// The limits.
    #[must_use]
    pub fn limits(&self) -> &[A] {
        &self.limits
    }

    fn state_of(state: Option<&StackState<A::State>>, place: usize) -> Option<&A::State> {
        state?.states.get(place)?.as_ref().map(|stacked| &stacked.state)
    }

    /// What each limit makes of its own state.
    fn each<T>(
        &self,
        state: Option<&StackState<A::State>>,
        step: impl Fn(&A, Option<&A::State>) -> T,
    ) -> impl Iterator<Item = T> {
        let limits = self.limits.iter().enumerate();
        limits.map(move |(place, limit)| step(limit, Self::state_of(state, place)))
    }

    /// What is said when not all limits admit: nobody is charged, so those that would have admitted show
    /// what they have.
    fn denied(
        &self,
        state: Option<&StackState<A::State>>,
        now: Timestamp,
        decisions: impl Iterator<Item = Decision>,
    ) -> Decision {
        summarise(decisions.enumerate().map(|(place, decision)| {
            if !decision.allowed {
                return decision;
            }
            let has = self.limits[place].decision(Self::state_of(state, place), now, 0);
            Decision { cost: decision.cost, ..has }
        }))
    }

    /// [`step_in_place`](Algorithm::step_in_place) of a few limits that have a quick step of what they keep,
    /// all or up to the first that denies. `None`, and nothing is written, where one has not. In two thirds of
    /// the instructions: all that is kept of a step meanwhile is a few numbers.
    #[inline]
    fn fast_in_place(
        &self,
        state: &mut StackState<A::State>,
        now: Timestamp,
        cost: u64,
    ) -> Option<Step<()>> {
        if self.limits.len() > FEW {
            return None;
        }
        let mut next: [Option<StackedState<A::State>>; FEW] = [const { None }; FEW];
        let mut summary = Decision::OF_NONE;
        for (place, (limit, kept)) in self.limits.iter().zip(&state.states).enumerate() {
            let kept = A::to_compact(&kept.as_ref()?.state)?;
            let Step { decision, write } = stepped_fast(limit, kept, now, cost)?;
            if !decision.allowed {
                let asked = self.each(Some(state), |limit, state| limit.decision(state, now, cost));
                let decision = self.denied(Some(state), now, asked);
                return Some(Step { decision, write: Write::Keep });
            }
            let Write::Put { state, .. } = write else { return None };
            let expires = state.at.saturating_add_us(state.span_us);
            next[place] = Some(StackedState { state: A::from_compact(state)?, expires });
            summary.add(place, &decision);
        }
        // From here on no code of the limits runs: what panics before has written nothing.
        let mut latest = Timestamp::ZERO;
        for (kept, next) in state.states.iter_mut().zip(next) {
            latest = latest.max(next.as_ref().map_or(Timestamp::ZERO, |next| next.expires));
            *kept = next;
        }
        Some(Step { decision: summary, write: Write::Put { state: (), expires: latest } })
    }

    /// All the limits' steps as one, if all of them admit.
    fn joined(
        &self,
        state: Option<&StackState<A::State>>,
        now: Timestamp,
        steps: Vec<Step<A::State>>,
    ) -> Step<StackState<A::State>> {
        if steps.iter().any(|step| !step.decision.allowed) {
            let decisions = steps.iter().map(|step| step.decision);
            return Step { decision: self.denied(state, now, decisions), write: Write::Keep };
        }
        let decision = summarise(steps.iter().map(|step| step.decision));
        if steps.iter().all(|step| matches!(step.write, Write::Keep)) {
            return Step { decision, write: Write::Keep };
        }
        let states: Vec<_> = steps
            .into_iter()
            .enumerate()
            .map(|(place, step)| match step.write {
                Write::Keep => state?.states.get(place)?.clone(),
                Write::Put { state, expires } => Some(StackedState { state, expires }),
                Write::Remove => None,
            })
            .collect();
        let expires = states.iter().flatten().map(|stacked| stacked.expires).max();
        let write = match expires {
            None => Write::Remove,
            Some(expires) => Write::Put { state: StackState { states }, expires },
        };
        Step { decision, write }
    }
}

/// Does to the state of one limit what a step of it says, and says whether that is anything.
#[inline]
fn put<S>(kept: &mut Option<StackedState<S>>, write: Write<S>) -> bool {
    match write {
        Write::Keep => return false,
        Write::Put { state, expires } => *kept = Some(StackedState { state, expires }),
        Write::Remove => *kept = None,
    }
    true
}

/// Charges one limit in its place, and says whether anything was written.
fn step_in<A: Algorithm>(
    limit: &A,
    kept: &mut Option<StackedState<A::State>>,
    now: Timestamp,
    cost: u64,
) -> bool {
    let Some(stacked) = kept else { return put(kept, limit.step(None, now, cost).write) };
    match limit.step_in_place(&mut stacked.state, now, cost).write {
        Write::Keep => return false,
        Write::Put { expires, .. } => stacked.expires = expires,
        Write::Remove => *kept = None,
    }
    true
}

#[deny(clippy::missing_trait_methods)]
impl<A: Algorithm> Algorithm for Stack<A> {
    type State = StackState<A::State>;

    /// The least of the limits' capacities.
    fn capacity(&self) -> u64 {
        self.limits.iter().map(Algorithm::capacity).min().unwrap_or_default()
    }

    fn step(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> Step<Self::State> {
        let steps = self.each(state, |limit, state| limit.step(state, now, cost));
        self.joined(state, now, steps.collect())
    }

    fn decision(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> Decision {
        let decisions = || self.each(state, |limit, state| limit.decision(state, now, cost));
        let joined = summarise(decisions());
        if joined.allowed { joined } else { self.denied(state, now, decisions()) }
    }

    /// Steps all the limits first, and then writes. Only one of them steps in its place, the last that keeps entries:
    /// it comes first, so that a limit that panics leaves all of them as they were.
    fn step_in_place(&self, state: &mut Self::State, now: Timestamp, cost: u64) -> Step<()> {
        if state.states.len() != self.limits.len() {
            // A stack of another height has written it, and finds it as it was if nothing is written now.
            return stepped_in_place(self, state, now, cost);
        }
        if let Some(step) = self.fast_in_place(state, now, cost) {
            return step;
        }
        let in_place = self.limits.iter().rposition(|limit| limit.entries_a_step() > 0);
        let mut few: [Option<Step<A::State>>; FEW] = [const { None }; FEW];
        let mut more = Vec::new();
        let asked = self.limits.iter().enumerate().map(|(place, limit)| {
            let own = Self::state_of(Some(state), place);
            let step = match in_place {
                Some(last) if last == place => None,
                _ => Some(limit.step(own, now, cost)),
            };
            // Not read back from where it is kept: what was written there in smaller pieces than it is read in
            // has to be waited for (measured: a sixth of a decision).
            let decision = step.as_ref().map(|step| step.decision);
            match few.get_mut(place) {
                Some(kept) => *kept = step,
                None => more.push(step),
            }
            decision.unwrap_or_else(|| limit.decision(own, now, cost))
        });
        let decision = summarise(asked);
        if !decision.allowed {
            let steps = few.iter().chain(&more);
            let asked = self.limits.iter().zip(steps).enumerate().map(|(place, (limit, step))| {
                let known = step.as_ref().map(|step| step.decision);
                let own = Self::state_of(Some(state), place);
                known.unwrap_or_else(|| limit.decision(own, now, cost))
            });
            let decision = self.denied(Some(state), now, asked);
            return Step { decision, write: Write::Keep };
        }
        let mut written = in_place
            .is_some_and(|place| step_in(&self.limits[place], &mut state.states[place], now, cost));
        for (kept, step) in state.states.iter_mut().zip(few.into_iter().chain(more)) {
            if let Some(step) = step {
                written |= put(kept, step.write);
            }
        }
        let latest = state.states.iter().flatten().map(|stacked| stacked.expires).max();
        let write = match latest {
            _ if !written => Write::Keep,
            None => Write::Remove,
            Some(expires) => Write::Put { state: (), expires },
        };
        Step { decision, write }
    }

    /// Never: a stack charges all the limits or none.
    fn charges_denials(&self) -> bool {
        false
    }

    /// The longest of the limits' waits.
    fn wait_us(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> Option<u64> {
        self.decision(state, now, cost).retry_after_us
    }

    /// Never: a stack's charges cannot be settled later.
    fn reservation_us(&self) -> Option<u64> {
        None
    }

    /// The latest of the limits' times.
    fn charged_at(&self, state: Option<&Self::State>, now: Timestamp) -> Timestamp {
        self.each(state, |limit, state| limit.charged_at(state, now)).max().unwrap_or(now)
    }

    fn settle(
        &self,
        _state: Option<&Self::State>,
        _now: Timestamp,
        _reservation: &Reservation,
        _cost: u64,
    ) -> Option<Step<Self::State>> {
        None
    }

    fn settle_in_place(
        &self,
        _state: &mut Self::State,
        _now: Timestamp,
        _reservation: &Reservation,
        _cost: u64,
    ) -> Option<Step<()>> {
        None
    }

    fn renew(
        &self,
        state: Option<&Self::State>,
        now: Timestamp,
        _reservation: &Reservation,
    ) -> Step<Self::State> {
        unmoved(self, state, now)
    }

    /// None: which of the limits a charge went to is not told.
    fn metadata_bytes(&self) -> Option<usize> {
        None
    }

    fn annotate(&self, _state: &mut Self::State, _metadata: &[u8]) {}

    /// Never: there is a state for each limit.
    fn is_compact(&self) -> bool {
        false
    }

    fn to_compact(_state: &Self::State) -> Option<Compact> {
        None
    }

    fn from_compact(_small: Compact) -> Option<Self::State> {
        None
    }

    fn step_compact(
        &self,
        _state: Option<Compact>,
        _now: Timestamp,
        _cost: u64,
    ) -> Option<Step<Compact>> {
        None
    }

    fn has_fast_step(&self) -> bool {
        false
    }

    fn step_fast(&self, _state: Compact, _now: Timestamp, _cost: u64) -> Option<Step<Compact>> {
        None
    }

    fn entries_in(state: &Self::State) -> usize {
        state.states.iter().flatten().map(|stacked| A::entries_in(&stacked.state)).sum()
    }

    fn entries_a_step(&self) -> usize {
        self.limits.iter().map(Algorithm::entries_a_step).sum()
    }

    /// `None` if one of the limits has no refunds.
    fn refund(
        &self,
        state: Option<&Self::State>,
        now: Timestamp,
        cost: u64,
    ) -> Option<Step<Self::State>> {
        let steps = self.each(state, |limit, state| limit.refund(state, now, cost));
        Some(self.joined(state, now, steps.collect::<Option<_>>()?))
    }

    /// `None` if one of the limits cannot be forced.
    fn force(
        &self,
        state: Option<&Self::State>,
        now: Timestamp,
        cost: u64,
    ) -> Option<Step<Self::State>> {
        let steps = self.each(state, |limit, state| limit.force(state, now, cost));
        Some(self.joined(state, now, steps.collect::<Option<_>>()?))
    }

    /// Takes it off each limit that can tell it apart.
    fn undo(
        &self,
        state: Option<&Self::State>,
        now: Timestamp,
        reservation: &Reservation,
        charged: &Self::State,
    ) -> Option<Step<Self::State>> {
        let limits = self.limits.iter().enumerate();
        let steps = limits.map(|(place, limit)| {
            let own = Self::state_of(state, place);
            let charged = Self::state_of(Some(charged), place);
            let undone = charged.and_then(|charged| limit.undo(own, now, reservation, charged));
            undone.unwrap_or_else(|| limit.step(own, now, 0))
        });
        Some(self.joined(state, now, steps.collect()))
    }
}

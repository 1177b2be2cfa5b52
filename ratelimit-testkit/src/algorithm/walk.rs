//! [`Walk`]: a sequence of steps of one limit, starting from a new key.

use std::slice::Iter;

use ratelimit_core::algorithm::{Step, Write};
use ratelimit_core::store::Op;
use ratelimit_core::{Algorithm, Decision, Limit, Timestamp};

use crate::trace::made::Scale;
use crate::trace::{Trace, TraceRequest};

/// How many of the unkind times that follow a moment a law looks at.
const UNKIND_TIMES: usize = 40;

/// One step of a walk: an acquire, a refund or a forced charge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WalkStep {
    pub(crate) at: Timestamp,
    pub(crate) op: Op,
    pub(crate) cost: u64,
}

/// A limit on a trace: the state that it has reached, and the steps still to take.
pub(crate) struct Walk<'a, A: Algorithm> {
    limit: &'a Limit<A>,
    pub(crate) text: &'a str,
    /// Another limit of the same algorithm, if there is one.
    pub(crate) other: &'a Limit<A>,
    pub(crate) other_text: &'a str,
    pub(crate) scale: Scale,
    pub(crate) state: Option<A::State>,
    /// The latest time of any step.
    pub(crate) latest: Timestamp,
    /// When the state expires.
    pub(crate) expires: Option<Timestamp>,
    /// The harness's unkind times, ascending.
    unkind_us: &'a [u64],
    requests: Iter<'a, TraceRequest>,
}

impl<'a, A: Algorithm> Walk<'a, A> {
    /// A walk of the trace's first limit through the first check of each request.
    pub(crate) fn new(trace: &'a Trace<A>, unkind_us: &'a [u64]) -> Self {
        let (limit, last) = (&trace.limits[0], trace.limits.len() - 1);
        let begin_us = trace.requests.first().map_or(0, |request| request.at.as_us());
        Self {
            limit,
            text: &trace.texts[0],
            other: &trace.limits[last],
            other_text: &trace.texts[last],
            scale: Scale::measure(limit.algorithm(), begin_us),
            state: None,
            latest: Timestamp::ZERO,
            expires: None,
            unkind_us,
            requests: trace.requests.iter(),
        }
    }

    /// The limit.
    pub(crate) const fn limit(&self) -> &'a Limit<A> {
        self.limit
    }

    /// Its algorithm.
    pub(crate) const fn algorithm(&self) -> &'a A {
        self.limit.algorithm()
    }

    /// How many steps are still to take.
    pub(crate) fn steps_left(&self) -> usize {
        self.requests.len()
    }

    /// The next step. An operation that the algorithm does not support is an acquire.
    pub(crate) fn next(&mut self) -> Option<WalkStep> {
        let TraceRequest { at, op, asks, .. } = self.requests.next()?;
        self.latest = self.latest.max(*at);
        let asked = WalkStep { at: *at, op: *op, cost: asks[0].cost };
        let able = self.supported_step(&asked).is_some();
        Some(if able { asked } else { WalkStep { op: Op::Acquire, ..asked } })
    }

    /// The step that the algorithm takes from the current state; `None` for an unsupported
    /// operation.
    fn supported_step(&self, WalkStep { at, op, cost }: &WalkStep) -> Option<Step<A::State>> {
        let (algorithm, state) = (self.algorithm(), self.state.as_ref());
        match op {
            Op::Acquire => Some(self.limit.step(state, *at, *cost)),
            Op::Refund => algorithm.refund(state, *at, *cost),
            Op::Force => algorithm.force(state, *at, *cost),
            _ => None,
        }
    }

    /// The step that the algorithm takes for a supported operation.
    pub(crate) fn step(&self, asked: &WalkStep) -> Step<A::State> {
        let stepped = self.supported_step(asked);
        stepped.unwrap_or_else(|| self.limit.step(self.state.as_ref(), asked.at, asked.cost))
    }

    /// The decision on the current state.
    pub(crate) fn decision(&self, at: Timestamp, cost: u64) -> Decision {
        self.limit.step(self.state.as_ref(), at, cost).decision
    }

    /// Moves on to the state that this step leaves.
    pub(crate) fn take(&mut self, step: Step<A::State>) {
        match step.write {
            Write::Keep => {}
            Write::Put { state, expires } => {
                (self.state, self.expires) = (Some(state), Some(expires));
            }
            Write::Remove => (self.state, self.expires) = (None, None),
        }
    }

    /// Takes the next step, if there is one.
    pub(crate) fn go(&mut self) -> Option<WalkStep> {
        let asked = self.next()?;
        let step = self.step(&asked);
        self.take(step);
        Some(asked)
    }

    /// The next unkind times after this one, and the microsecond before each, as spans from it.
    pub(crate) fn unkind_after(&self, from: Timestamp) -> impl Iterator<Item = u64> + use<'a, A> {
        let from_us = from.as_us();
        let next = self.unkind_us.partition_point(|at_us| *at_us <= from_us);
        let next = self.unkind_us[next..].iter().take(UNKIND_TIMES);
        next.flat_map(move |at_us| [at_us - from_us - 1, at_us - from_us])
    }

    /// The costs at which two states are most likely to decide differently.
    pub(crate) fn costs(&self) -> [u64; 6] {
        let capacity = self.scale.capacity;
        [0, 1, 2, capacity.div_ceil(2), capacity, capacity.saturating_add(1)]
    }

    /// Compares two states from a moment on: says at which time and cost they first decide
    /// differently.
    pub(crate) fn alike(
        &self,
        one: Option<&A::State>,
        other: Option<&A::State>,
        from: Timestamp,
    ) -> Result<(), String> {
        let Scale { unit_us, full_us, .. } = self.scale;
        let by_scale =
            [0, 1, unit_us, full_us / 2, full_us.saturating_sub(1), full_us, full_us * 2];
        for us in by_scale.into_iter().chain(self.unkind_after(from)) {
            let at = from.saturating_add_us(us);
            for cost in self.costs() {
                let one = self.limit.step(one, at, cost).decision;
                let other = self.limit.step(other, at, cost).decision;
                if one != other {
                    return Err(format!("{cost} at {} is {one:?} and {other:?}", at.as_us()));
                }
            }
        }
        Ok(())
    }
}

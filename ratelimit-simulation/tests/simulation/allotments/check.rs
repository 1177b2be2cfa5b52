//! What a run admitted, held against what the algorithm itself admits.

use ratelimit_core::{Algorithm, AnyAlgorithm, Timestamp};
use ratelimit_simulation::widen;

use super::run::Plan;

/// What a run did.
pub(super) struct Outcome {
    pub(super) plan: Plan,
    /// When a request was admitted by the server's clock, and its cost. Those that the store
    /// decided are admitted at the time of its decision.
    pub(super) admitted: Vec<(Timestamp, u64)>,
    pub(super) served: u64,
    pub(super) asked: u64,
    /// What each limit had left in the store at the end, when all allotments had ended.
    pub(super) left: Vec<u64>,
    /// When that was.
    pub(super) end: Timestamp,
    /// What was given back only because the nodes were told to, after all allotments had ended.
    pub(super) late: u64,
}

impl Outcome {
    /// Of a run in which nothing has happened yet.
    pub(super) fn new(plan: Plan) -> Self {
        let (admitted, left, end) = (Vec::new(), Vec::new(), Timestamp::ZERO);
        Self { plan, admitted, served: 0, asked: 0, left, end, late: 0 }
    }

    /// Whether every interval keeps the bound of allotments of this lifetime.
    ///
    /// A bucket admits a history exactly if every interval of a length `x` has at most `burst +
    /// rate · x` of it. So one with `rate · L` more of a burst checks every interval at once; and
    /// what a window admits is checked by the window itself.
    pub(super) fn within(&self, lifetime_us: u64) -> Result<(), String> {
        let mut history = self.admitted.clone();
        history.sort_by_key(|(at, _)| *at);
        for limit in self.plan.limits() {
            let widened = widen(limit.algorithm(), lifetime_us);
            let mut state = None;
            for (at, cost) in &history {
                let step = widened.step(state.as_ref(), *at, *cost);
                if !step.decision.allowed {
                    let name = limit.name();
                    return Err(format!("{name}: {cost} at {at} are above the bound: {widened:?}"));
                }
                state = step.write.after(state.as_ref()).cloned();
            }
        }
        Ok(())
    }

    /// Whether what was drawn and not used is back. Nothing is known of it where messages were
    /// lost.
    pub(super) fn idle(&self) -> Result<(), String> {
        if self.plan.is_disturbed() {
            return Ok(());
        }
        if self.late > 0 {
            return Err(format!("{} units were not given back by themselves", self.late));
        }
        for (limit, left) in self.plan.limits().iter().zip(&self.left) {
            let AnyAlgorithm::FixedWindow(window) = limit.algorithm() else { continue };
            let current = |at: Timestamp| at.as_us() / window.window_us();
            let counts = self.admitted.iter().filter(|(at, _)| current(*at) == current(self.end));
            let admitted: u64 = counts.map(|(_, cost)| cost).sum();
            if admitted + left != window.capacity() {
                return Err(format!("{left} are left of {window:?} after {admitted}"));
            }
        }
        Ok(())
    }

    /// Whether the run tried what it is for.
    pub(super) fn lively(&self) -> Result<(), String> {
        let Self { served, asked, .. } = self;
        if *served > 100 && *asked > 200 && self.admitted.len() > 200 {
            return Ok(());
        }
        let admitted = self.admitted.len();
        Err(format!("{served} served, {asked} asked, {admitted} admitted"))
    }
}

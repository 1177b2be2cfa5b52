//! [`BreakerReport`]: what a [`Fallback`](crate::Fallback) reports to the crates `metrics` and `tracing`, where the features of
//! these names are on.

use ratelimit_core::OnOutage;

use super::breaker::BreakerState;
use super::counts::OutageOutcome;

#[derive(Debug)]
pub(super) struct BreakerReport {
    /// The name of the store, which tells several in one process apart.
    #[allow(dead_code, reason = "nothing is reported without a feature")]
    name: Box<str>,
    /// When a line about each state is due: a store that fails again and again fills no log.
    #[cfg(feature = "tracing")]
    paces: [crate::pace::Pace; 3],
}

#[allow(clippy::unused_self, unused_variables, reason = "nothing is reported without a feature")]
impl BreakerReport {
    pub(super) fn new(name: &str) -> Self {
        Self {
            name: name.into(),
            #[cfg(feature = "tracing")]
            paces: std::array::from_fn(|_| crate::pace::Pace::new()),
        }
    }

    /// The breaker is now in this state.
    pub(super) fn state(&self, state: BreakerState) {
        #[cfg(feature = "metrics")]
        crate::metrics::breaker(&self.name, state);
        #[cfg(feature = "tracing")]
        if self.paces[state as usize].is_due(std::time::Instant::now()) {
            crate::traced::breaker(&self.name, state);
        }
    }

    /// A limit was decided without the store.
    pub(super) fn decided(&self, limit: &str, choice: OnOutage, outcome: OutageOutcome) {
        #[cfg(feature = "metrics")]
        crate::metrics::outage(&self.name, limit, choice, outcome);
    }
}

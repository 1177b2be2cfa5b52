//! [`BreakerReport`]: what a [`Fallback`](crate::Fallback) reports to the crates `metrics` and `tracing`, where the features of
//! these names are on.

use ratelimit_core::OnOutage;

use super::breaker::BreakerState;
use super::counts::OutageOutcome;

#[derive(Clone, Debug)]
pub(super) struct BreakerReport {
    /// The name of the store, which tells several in one process apart.
    #[allow(dead_code, reason = "nothing is reported without a feature")]
    name: Box<str>,
}

#[allow(clippy::unused_self, reason = "nothing is reported without a feature")]
impl BreakerReport {
    pub(super) fn new(name: &str) -> Self {
        Self { name: name.into() }
    }

    /// The breaker is now in this state.
    pub(super) fn state(&self, state: BreakerState) {
        #[cfg(feature = "metrics")]
        crate::metrics::breaker(&self.name, state);
        #[cfg(feature = "tracing")]
        crate::traced::breaker(&self.name, state);
        #[cfg(not(any(feature = "metrics", feature = "tracing")))]
        let _ = state;
    }

    /// A limit was decided without the store.
    pub(super) fn decided(&self, limit: &str, choice: OnOutage, outcome: OutageOutcome) {
        #[cfg(feature = "metrics")]
        crate::metrics::outage(&self.name, limit, choice, outcome);
        #[cfg(not(feature = "metrics"))]
        let _ = (limit, choice, outcome);
    }
}

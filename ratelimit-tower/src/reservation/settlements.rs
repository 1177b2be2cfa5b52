//! [`Settlements`]: which reservations are not settled yet.

use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

/// The reservations of a [`ReservationLayer`](super::ReservationLayer) that are not settled yet. Clones count together.
#[derive(Clone, Debug)]
pub struct Settlements(TaskTracker);

impl Default for Settlements {
    fn default() -> Self {
        let tracker = TaskTracker::new();
        // A closed tracker still counts; an open one would make waiting endless.
        tracker.close();
        Self(tracker)
    }
}

impl Settlements {
    /// Waits until every reservation is settled, or was tried to be.
    pub async fn idle(&self) {
        self.0.wait().await;
    }

    /// How many reservations are not settled: requests that are under way, and settlements.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Counts one until the value is dropped.
    pub(super) fn one(&self) -> TaskTrackerToken {
        self.0.token()
    }
}

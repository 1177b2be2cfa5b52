//! The clocks that our store is measured with: what it has by default, and one that is read for next
//! to nothing.

use std::time::Duration;

pub(crate) use ratelimit_memory::{CoarseClock, PreciseClock};

/// The precise clock, as JSON and tables name it.
pub(crate) const PRECISE: &str = "precise";
/// The coarse one.
pub(crate) const COARSE: &str = "coarse";

/// How far behind a coarse clock may be; governor's is measured with the same.
pub(crate) const COARSE_STEP: Duration = Duration::from_millis(1);

/// The precise clock of our store.
pub(crate) fn precise() -> PreciseClock {
    PreciseClock::new()
}

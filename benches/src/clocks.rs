//! The clocks of the store under measurement: the default, and one that costs next to nothing.

use std::time::Duration;

pub(crate) use ratelimit_memory::{CoarseClock, PreciseClock};

/// The precise clock, as JSON and tables name it.
pub(crate) const PRECISE: &str = "precise";
/// The coarse one.
pub(crate) const COARSE: &str = "coarse";

/// The longest lag of a coarse clock, for governor too.
pub(crate) const COARSE_STEP: Duration = Duration::from_millis(1);

/// The precise clock of our store.
pub(crate) fn precise() -> PreciseClock {
    PreciseClock::new()
}

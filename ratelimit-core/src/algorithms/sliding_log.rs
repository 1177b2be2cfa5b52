//! The sliding window log: an entry per admitted request, which counts until it is one window old.
//!
//! Source: the "rolling rate limiter" of Redis tutorials, a sorted set of timestamps. It is exact:
//! no span of one window's length admits more than the limit. In return a state takes memory for
//! every moment at which it admitted a request.
//!
//! An entry made at `t` counts until just before `t + window`, and no longer at `t + window`.
//!
//! The arithmetic is in `entries.rs`. `sliding_log.lua` in `ratelimit-redis` is the same algorithm
//! in Lua, on a sorted set.

use crate::builder::{per, without_burst};
use crate::entries::{LogState, LoggedWindow};
use crate::error::ConfigError;
use crate::rate::Rate;

/// A count in any span of one window's length.
///
/// A step takes time and memory in proportion to the live entries, at most `limit`.
///
/// ```
/// use ratelimit_core::{Algorithm, SlidingLog, Timestamp};
/// use ratelimit_core::algorithm::Write;
///
/// let log = SlidingLog::new("1/s".parse()?)?;
/// let Write::Put { state, .. } = log.step(None, Timestamp::ZERO, 1).write else { unreachable!() };
/// let at = |us| Timestamp::from_us(us).expect("a time");
/// assert!(!log.step(Some(&state), at(999_999), 1).decision.allowed);
/// assert!(log.step(Some(&state), at(1_000_000), 1).decision.allowed);
/// # Ok::<(), ratelimit_core::ConfigError>(())
/// ```
pub type SlidingLog = LoggedWindow<false>;

/// What [`SlidingLog`] keeps for a key: what it has admitted, oldest first, one entry per moment.
pub type SlidingLogState = LogState<false>;

impl SlidingLog {
    /// The count of the rate in any span of the rate's period.
    ///
    /// # Errors
    /// None today; a `Result` so that all algorithms are built alike.
    pub fn new(rate: Rate) -> Result<Self, ConfigError> {
        Ok(Self { limit: rate.count(), window_us: rate.period_us() })
    }

    /// The length of the window in microseconds.
    #[must_use]
    pub const fn window_us(&self) -> u64 {
        self.window_us
    }
}

per!(SlidingLog);
without_burst!(SlidingLog = "sliding-log" by window_us);

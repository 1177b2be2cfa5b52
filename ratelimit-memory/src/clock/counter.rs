//! [`Counter`]: the processor's counter, as microseconds of the operating system's time.

use std::io;

use ratelimit_core::Timestamp;

/// Where the kernel says by which clock it keeps time.
pub(super) const CLOCKSOURCE: &str =
    "/sys/devices/system/clocksource/clocksource0/current_clocksource";

/// What it calls the counter that is read here.
const COUNTER: &str = if cfg!(target_arch = "x86_64") { "tsc" } else { "arch_sys_counter" };

/// Whether the kernel that answers so keeps time by the counter. One that cannot be asked is not taken to.
pub(super) fn is_trusted(clocksource: io::Result<String>) -> bool {
    clocksource.is_ok_and(|name| name.trim_end() == COUNTER)
}

#[derive(Clone, Debug)]
pub(super) struct Counter {
    steps: quanta::Clock,
    /// Microseconds from one of its steps to the next, in parts of which 2^64 are one.
    step_scaled_us: u64,
    /// What its microseconds were short of the time, or too many, when the clock was made: the time when it began.
    offset_us: i64,
    origin_us: i64,
}

/// So many steps that their nanoseconds tell a step to a few parts in a hundred thousand millions.
pub(super) const MANY_STEPS: u64 = 1 << 40;

impl Counter {
    /// One that agrees with the operating system's time now.
    pub(super) fn new() -> Self {
        let steps = quanta::Clock::new();
        let epoch = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        let begin = steps.raw();
        let step_scaled_us = step_scaled_us(steps.delta_as_nanos(0, MANY_STEPS));
        let origin_us = (Timestamp::ZERO + epoch).as_us().cast_signed();
        let offset_us = origin_us.wrapping_sub(us_of(begin, step_scaled_us));
        Self { steps, step_scaled_us, offset_us, origin_us }
    }

    #[inline]
    pub(super) fn now(&self) -> Timestamp {
        let now_us = us_of(self.steps.raw(), self.step_scaled_us).wrapping_add(self.offset_us);
        // One processor may be a little behind the one that read the beginning.
        Timestamp::saturating_from_us(now_us.max(self.origin_us).cast_unsigned())
    }
}

/// The scaled microseconds of a step of a counter that takes so many nanoseconds for [`MANY_STEPS`]. A step
/// takes a microsecond at the most: no counter that is used counts as slowly, and this one would be slow itself.
pub(super) fn step_scaled_us(many_ns: u64) -> u64 {
    let scaled = (u128::from(many_ns) << u64::BITS) / (u128::from(MANY_STEPS) * 1_000);
    u64::try_from(scaled).unwrap_or(u64::MAX)
}

/// The microseconds that so many steps take.
#[inline]
pub(super) fn us_of(steps: u64, step_scaled_us: u64) -> i64 {
    ((u128::from(steps) * u128::from(step_scaled_us)) >> u64::BITS) as i64
}

//! [`Counter`]: the processor's counter, in microseconds of the operating system's time.

use std::io;

use ratelimit_core::Timestamp;

/// The file in which the kernel names the clock by which it keeps time.
pub(super) const CLOCKSOURCE: &str =
    "/sys/devices/system/clocksource/clocksource0/current_clocksource";

/// The kernel's name of the counter that is read here.
const COUNTER: &str = if cfg!(target_arch = "x86_64") { "tsc" } else { "arch_sys_counter" };

/// Whether the kernel keeps time by the counter, by the content of [`CLOCKSOURCE`]; `false` if that
/// cannot be read.
pub(super) fn is_trusted(clocksource: io::Result<String>) -> bool {
    clocksource.is_ok_and(|name| name.trim_end() == COUNTER)
}

#[derive(Clone, Debug)]
pub(super) struct Counter {
    steps: quanta::Clock,
    /// The microseconds per counter step, in units of 2^-64.
    step_scaled_us: u64,
    /// The operating system's time minus the counter's microseconds when the clock was made.
    offset_us: i64,
    origin_us: i64,
}

/// A number of steps that is large enough for their nanoseconds to give a step to a few parts in
/// 10^11.
pub(super) const MANY_STEPS: u64 = 1 << 40;

impl Counter {
    /// Creates a counter that agrees with the operating system's time at this moment.
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
        // Another processor may be a little behind the one that read the origin.
        Timestamp::saturating_from_us(now_us.max(self.origin_us).cast_unsigned())
    }
}

/// The scaled microseconds per step of a counter that takes `many_ns` nanoseconds for
/// [`MANY_STEPS`]. They are limited to a microsecond per step: no counter in use is slower, and a
/// slower one would only make this clock slow.
pub(super) fn step_scaled_us(many_ns: u64) -> u64 {
    let scaled = (u128::from(many_ns) << u64::BITS) / (u128::from(MANY_STEPS) * 1_000);
    u64::try_from(scaled).unwrap_or(u64::MAX)
}

/// The microseconds that so many steps take.
#[inline]
pub(super) fn us_of(steps: u64, step_scaled_us: u64) -> i64 {
    ((u128::from(steps) * u128::from(step_scaled_us)) >> u64::BITS) as i64
}

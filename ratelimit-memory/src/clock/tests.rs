//! No thread sees a clock go back, and no clock stands still.

use std::sync::atomic::AtomicBool;
use std::time::Instant;

use super::*;

/// Runs threads that pass the latest reading to each other, and returns by how many microseconds at most a
/// reading was less than one passed before it. A `pause` comes between the passing and the reading.
fn went_back_us<C: Clock + Clone>(clock: &C, readings: usize, pause: fn()) -> u64 {
    let (latest, worst) = (AtomicU64::new(0), AtomicU64::new(0));
    thread::scope(|scope| {
        for _ in 0..4 {
            let (clock, latest, worst) = (clock.clone(), &latest, &worst);
            scope.spawn(move || {
                let mut own = 0;
                for _ in 0..readings {
                    let handed_over = latest.load(Ordering::Acquire);
                    pause();
                    let read = clock.now().as_us();
                    assert!(read >= own, "a thread by itself: {own}, then {read}");
                    own = read;
                    worst.fetch_max(handed_over.saturating_sub(read), Ordering::Relaxed);
                    latest.fetch_max(read, Ordering::AcqRel);
                }
            });
        }
    });
    worst.into_inner()
}

fn wait_for(condition: impl Fn() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < Duration::from_secs(60), "never came true");
        thread::yield_now();
    }
}

/// A thread that cannot be started, because its stack is larger than memory can be.
#[cfg(target_pointer_width = "64")]
fn impossible() -> thread::Builder {
    thread::Builder::new().stack_size(1 << 60)
}

fn clock_and_thread(by: SystemClock) -> (CoarseClock, JoinHandle<()>) {
    let (shown, thread) = moved(by, thread::Builder::new()).expect("a thread");
    (CoarseClock(Coarse::Moved(shown)), thread)
}

#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod of_the_counter {
    use super::super::counter::{Counter, MANY_STEPS, is_trusted, step_scaled_us, us_of};
    use super::*;

    #[test]
    fn a_year_of_steps_is_a_year_however_fast_the_counter_counts() {
        const YEAR_US: i64 = 365 * 86_400_000_000;
        for steps_a_second in [1_000_000, 24_000_000, 1_000_000_000, 2_596_123_457_u64] {
            let many_ns = u128::from(MANY_STEPS) * 1_000_000_000 / u128::from(steps_a_second);
            let step = step_scaled_us(u64::try_from(many_ns).expect("fits"));
            let steps = u128::from(YEAR_US.unsigned_abs()) * u128::from(steps_a_second) / 1_000_000;
            let us = us_of(u64::try_from(steps).expect("fits"), step);
            assert!(us.abs_diff(YEAR_US) < 1_000, "{steps_a_second}: {us}");
        }
    }

    #[test]
    fn the_counter_is_read_only_where_the_kernel_keeps_time_by_it() {
        let own = if cfg!(target_arch = "x86_64") { "tsc" } else { "arch_sys_counter" };
        let others =
            ["hpet", "acpi_pm", "kvm-clock", "xen", "hyperv_clocksource_tsc_page", "jiffies"];
        for (name, expected) in others.map(|name| (name, false)).into_iter().chain([(own, true)]) {
            for end in ["", "\n"] {
                assert_eq!(is_trusted(Ok(format!("{name}{end}"))), expected, "{name}");
            }
        }
        for name in ["", "\n", "tsc-early", "TSC", "tsc hpet", "arch_sys_counter_2"] {
            assert!(!is_trusted(Ok(name.into())), "{name}");
        }
        for kind in [io::ErrorKind::NotFound, io::ErrorKind::PermissionDenied] {
            assert!(!is_trusted(Err(kind.into())), "{kind}");
        }
    }

    #[test]
    fn a_precise_clock_reads_the_counter_if_the_kernel_does() {
        let trusted = is_trusted(std::fs::read_to_string(counter::CLOCKSOURCE));
        let reads_counter = matches!(PreciseClock::new().0, Precise::Counter(_));
        assert_eq!(reads_counter, trusted);
    }

    #[test]
    fn the_counter_and_the_systems_clock_tell_the_same_time() {
        let counter = Precise::Counter(Counter::new());
        for clock in [PreciseClock(counter), PreciseClock(Precise::System(SystemClock::new()))] {
            let (begin, system) = (clock.now(), SystemClock::new().now());
            assert!(begin.as_us().abs_diff(system.as_us()) < 1_000_000, "{begin}, {system}");
            wait_for(|| clock.now() > begin + STEP);
        }
    }
}

#[test]
fn a_precise_clock_goes_back_for_no_thread_and_less_than_a_millisecond_between_threads() {
    let clock = PreciseClock::new();
    // A system call in between keeps the processor from reading the counter early.
    assert_eq!(went_back_us(&clock, 50_000, thread::yield_now), 0);
    // Without a system call, a processor may read the counter early, but by no more than this.
    let back_us = went_back_us(&clock, 500_000, || ());
    assert!(back_us < 1_000, "{back_us} us");
}

#[test]
fn a_coarse_clock_never_goes_back_between_threads() {
    assert_eq!(went_back_us(&CoarseClock::new(), 1_000_000, || ()), 0);
    assert_eq!(went_back_us(&CoarseClock::new(), 50_000, thread::yield_now), 0);
}

#[test]
fn a_coarse_clock_is_never_ahead_and_moves_on() {
    let system = SystemClock::new();
    let (clock, _thread) = clock_and_thread(system);
    let begin = clock.now();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..3 {
            let (clock, done) = (clock.clone(), &done);
            scope.spawn(move || {
                while !done.load(Ordering::Relaxed) {
                    let shown = clock.now();
                    let time = system.now();
                    assert!(shown <= time, "{shown} at {time}");
                }
            });
        }
        wait_for(|| clock.now() > begin + 20 * STEP);
        done.store(true, Ordering::Relaxed);
    });
}

#[test]
fn the_thread_of_a_coarse_clock_ends_with_the_last_clone() {
    let (clock, thread) = clock_and_thread(SystemClock::new());
    let last = clock.clone();
    drop(clock);
    let shown = last.now();
    wait_for(|| last.now() > shown);
    assert!(!thread.is_finished());
    drop(last);
    wait_for(|| thread.is_finished());
    thread.join().expect("no panic");
}

#[cfg(target_pointer_width = "64")]
#[test]
fn without_a_thread_a_coarse_clock_does_not_stand_still() {
    let system = SystemClock::new();
    assert!(moved(system, impossible()).is_err());
    let clock = CoarseClock::spawned(system, impossible());
    let before = system.now();
    let shown = clock.clone().now();
    assert!(before <= shown && shown <= system.now());
    wait_for(|| clock.now() > shown);
    assert_eq!(went_back_us(&clock, 100_000, || ()), 0);
}

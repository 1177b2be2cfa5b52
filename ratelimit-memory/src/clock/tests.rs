//! No thread sees a clock go back, and no clock stands still.

use std::sync::atomic::AtomicBool;
use std::time::Instant;

use super::*;

/// Runs threads that pass the latest reading to each other, and returns by how many microseconds at
/// most a reading was less than one passed before it. A `pause` comes between the passing and the
/// reading.
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
        assert!(["", "\n"].iter().all(|end| is_trusted(Ok(format!("{own}{end}")))));
        for name in ["", "\n", "hpet", "kvm-clock", "tsc-early", "TSC\n", "tsc hpet", "jiffies"] {
            assert!(!is_trusted(Ok(name.into())), "{name}");
        }
        assert!(!is_trusted(Err(io::ErrorKind::NotFound.into())));
        let trusted = is_trusted(std::fs::read_to_string(counter::CLOCKSOURCE));
        assert_eq!(matches!(PreciseClock::new().0, Precise::Counter(_)), trusted);
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
fn a_clock_goes_back_for_no_thread_and_a_precise_one_less_than_a_millisecond_between_threads() {
    let (precise, coarse) = (PreciseClock::new(), CoarseClock::new());
    // A system call in between keeps the processor from reading the counter early.
    assert_eq!(went_back_us(&precise, 50_000, thread::yield_now), 0);
    assert_eq!(went_back_us(&coarse, 50_000, thread::yield_now), 0);
    assert_eq!(went_back_us(&coarse, 1_000_000, || ()), 0);
    // Without a system call, a processor may read the counter early, but by no more than this.
    let back_us = went_back_us(&precise, 500_000, || ());
    assert!(back_us < 1_000, "{back_us} us");
}

#[test]
fn a_coarse_clock_is_never_ahead_and_moves_on_until_its_last_clone_is_dropped() {
    let system = SystemClock::new();
    let (shown, moving) = start_thread(system, thread::Builder::new()).expect("a thread");
    let clock = CoarseClock(Coarse::Moved(shown));
    let (begin, done) = (clock.now(), AtomicBool::new(false));
    thread::scope(|scope| {
        for _ in 0..3 {
            let (clock, done) = (clock.clone(), &done);
            scope.spawn(move || {
                while !done.load(Ordering::Relaxed) {
                    let (shown, time) = (clock.now(), system.now());
                    assert!(shown <= time, "{shown} at {time}");
                }
            });
        }
        wait_for(|| clock.now() > begin + 20 * STEP);
        done.store(true, Ordering::Relaxed);
    });
    let last = clock.clone();
    drop(clock);
    let shown = last.now();
    wait_for(|| last.now() > shown);
    assert!(!moving.is_finished());
    drop(last);
    wait_for(|| moving.is_finished());
    moving.join().expect("no panic");
}

/// A thread cannot be started if its stack is larger than memory can be.
#[cfg(target_pointer_width = "64")]
#[test]
fn without_a_thread_a_coarse_clock_does_not_stand_still() {
    let (system, impossible) = (SystemClock::new(), thread::Builder::new().stack_size(1 << 60));
    let clock = CoarseClock::start(system, impossible);
    assert!(matches!(clock.0, Coarse::Read(_)));
    let (before, shown) = (system.now(), clock.clone().now());
    assert!(before <= shown && shown <= system.now());
    wait_for(|| clock.now() > shown);
}

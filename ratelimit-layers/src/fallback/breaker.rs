//! [`Breaker`]: a circuit breaker (Nygard, "Release It!", 2007). It is closed while the store answers, open after some
//! consecutive failures, and half-open while a single probe finds out whether the store answers again.
//!
//! A call that was sent before the breaker opened says nothing about the store now. So each call belongs to a *generation*,
//! and outcomes of earlier generations are ignored. A probe that its caller drops counts as failed; otherwise the breaker
//! would stay half-open.

use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use super::report::Report;
use crate::lock;

/// The state of the circuit breaker of a [`Fallback`](crate::Fallback).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BreakerState {
    /// The store is asked.
    Closed,
    /// One call, the probe, asks the store; all others are decided without it.
    HalfOpen,
    /// The store is not asked.
    Open,
}

impl BreakerState {
    /// 0 for closed, 1 for half-open, 2 for open: the value of the gauge.
    #[cfg(feature = "metrics")]
    pub(crate) const fn level(self) -> u32 {
        match self {
            Self::Closed => 0,
            Self::HalfOpen => 1,
            Self::Open => 2,
        }
    }
}

impl fmt::Display for BreakerState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Closed => "closed",
            Self::HalfOpen => "half-open",
            Self::Open => "open",
        })
    }
}

#[derive(Debug)]
enum State {
    Closed {
        failures: u32,
    },
    /// A probe is under way. From `overdue` on, another call may probe: a caller may keep a future and not poll it.
    HalfOpen {
        probe: u64,
        overdue: Option<Instant>,
    },
    Open {
        until: Option<Instant>,
    },
}

#[derive(Debug)]
pub(super) struct Breaker {
    /// How many consecutive failures open it.
    most_failures: u32,
    /// How long it stays open before a probe.
    pause: Duration,
    /// How long a probe may take.
    probe_time: Duration,
    state: Mutex<State>,
    /// Even while it is closed. It changes, under the lock, when the breaker opens or closes: the outcome of a call from
    /// before says nothing about the store of now.
    generation: AtomicU64,
    /// Whether there are failures to forget, so that a success needs no lock.
    has_failures: AtomicBool,
    report: Report,
}

/// A call that may be sent to the store. It must be told how the call ended; dropping a probe counts as a failure, so that
/// the breaker does not stay half-open.
#[derive(Debug)]
pub(super) struct Call<'b> {
    breaker: &'b Breaker,
    generation: u64,
    /// The number of the probe, if it is one.
    probe: Option<u64>,
}

impl Breaker {
    pub(super) fn new(
        most_failures: u32,
        pause: Duration,
        probe_time: Duration,
        report: Report,
    ) -> Self {
        report.state(BreakerState::Closed);
        Self {
            most_failures,
            pause,
            probe_time,
            state: Mutex::new(State::Closed { failures: 0 }),
            generation: AtomicU64::new(0),
            has_failures: AtomicBool::new(false),
            report,
        }
    }

    pub(super) fn state(&self) -> BreakerState {
        match *lock(&self.state) {
            State::Closed { .. } => BreakerState::Closed,
            State::HalfOpen { .. } => BreakerState::HalfOpen,
            State::Open { .. } => BreakerState::Open,
        }
    }

    pub(super) const fn pause(&self) -> Duration {
        self.pause
    }

    pub(super) const fn report(&self) -> &Report {
        &self.report
    }

    /// Admits a call to the store, or says how long until a call may be admitted.
    pub(super) fn admit(&self) -> Result<Call<'_>, Duration> {
        let generation = self.generation.load(Ordering::Acquire);
        if generation.is_multiple_of(2) {
            return Ok(Call { breaker: self, generation, probe: None });
        }
        let mut state = lock(&self.state);
        let generation = self.generation.load(Ordering::Acquire);
        let now = Instant::now();
        let last = match *state {
            State::Closed { .. } => return Ok(Call { breaker: self, generation, probe: None }),
            State::HalfOpen { probe, overdue } => {
                if overdue.is_none_or(|overdue| now < overdue) {
                    return Err(self.pause);
                }
                probe
            }
            State::Open { until } => {
                let left =
                    until.map_or(Duration::MAX, |until| until.saturating_duration_since(now));
                if !left.is_zero() {
                    return Err(left);
                }
                0
            }
        };
        let probe = last.wrapping_add(1);
        *state = State::HalfOpen { probe, overdue: now.checked_add(self.probe_time) };
        self.report.state(BreakerState::HalfOpen);
        Ok(Call { breaker: self, generation, probe: Some(probe) })
    }

    fn open(&self, state: &mut State) {
        *state = State::Open { until: Instant::now().checked_add(self.pause) };
        self.report.state(BreakerState::Open);
    }

    /// The state that a probe leaves, unless another call has probed since.
    fn after_probe(&self, number: u64, next: impl FnOnce(&Self, &mut State)) {
        let mut state = lock(&self.state);
        if matches!(*state, State::HalfOpen { probe, .. } if probe == number) {
            next(self, &mut state);
        }
    }
}

impl Call<'_> {
    /// The store answered.
    pub(super) fn answered(mut self) {
        let breaker = self.breaker;
        if let Some(probe) = self.probe.take() {
            breaker.after_probe(probe, |breaker, state| {
                *state = State::Closed { failures: 0 };
                breaker.has_failures.store(false, Ordering::Relaxed);
                breaker.generation.fetch_add(1, Ordering::Release);
                breaker.report.state(BreakerState::Closed);
            });
            return;
        }
        if breaker.has_failures.load(Ordering::Relaxed) {
            let mut state = lock(&breaker.state);
            if let State::Closed { failures } = &mut *state
                && breaker.generation.load(Ordering::Acquire) == self.generation
            {
                *failures = 0;
                breaker.has_failures.store(false, Ordering::Relaxed);
            }
        }
    }

    /// The store was not asked after all. The next call probes in place of this one.
    pub(super) fn not_sent(mut self) {
        if let Some(probe) = self.probe.take() {
            self.breaker.after_probe(probe, |breaker, state| {
                *state = State::Open { until: Some(Instant::now()) };
                breaker.report.state(BreakerState::Open);
            });
        }
    }

    /// The store did not answer, or could not decide.
    pub(super) fn failed(mut self) {
        let breaker = self.breaker;
        if let Some(probe) = self.probe.take() {
            return breaker.after_probe(probe, Breaker::open);
        }
        let mut state = lock(&breaker.state);
        if breaker.generation.load(Ordering::Acquire) != self.generation {
            return;
        }
        if let State::Closed { failures } = &mut *state {
            *failures += 1;
            breaker.has_failures.store(true, Ordering::Relaxed);
            if *failures >= breaker.most_failures {
                breaker.generation.fetch_add(1, Ordering::Release);
                breaker.open(&mut state);
            }
        }
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        if let Some(probe) = self.probe {
            self.breaker.after_probe(probe, Breaker::open);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::advance;

    const PAUSE: Duration = Duration::from_secs(1);
    const PROBE_TIME: Duration = Duration::from_millis(100);

    fn breaker(most_failures: u32) -> Breaker {
        Breaker::new(most_failures, PAUSE, PROBE_TIME, Report::new("test"))
    }

    fn fail(breaker: &Breaker) {
        breaker.admit().expect("closed, or time for a probe").failed();
    }

    #[tokio::test(start_paused = true)]
    async fn it_opens_after_consecutive_failures_only() {
        let breaker = breaker(3);
        for _ in 0..5 {
            fail(&breaker);
            fail(&breaker);
            breaker.admit().expect("closed").answered();
        }
        assert_eq!(breaker.state(), BreakerState::Closed);
        for _ in 0..3 {
            fail(&breaker);
        }
        assert_eq!(breaker.state(), BreakerState::Open);
        assert_eq!(breaker.admit().expect_err("open"), PAUSE);
    }

    #[tokio::test(start_paused = true)]
    async fn one_probe_at_a_time_decides_whether_it_closes() {
        let breaker = breaker(1);
        fail(&breaker);
        advance(Duration::from_millis(999)).await;
        assert_eq!(breaker.admit().expect_err("open"), Duration::from_millis(1));
        advance(Duration::from_millis(1)).await;
        let probe = breaker.admit().expect("the probe");
        assert_eq!(breaker.state(), BreakerState::HalfOpen);
        assert!(breaker.admit().is_err(), "a second call beside a probe");
        probe.failed();
        assert_eq!(breaker.state(), BreakerState::Open);
        assert_eq!(breaker.admit().expect_err("open"), PAUSE);
        advance(PAUSE).await;
        breaker.admit().expect("the probe").answered();
        assert_eq!(breaker.state(), BreakerState::Closed);
        assert!(breaker.admit().is_ok() && breaker.admit().is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn a_probe_whose_caller_goes_away_counts_as_failed() {
        let breaker = breaker(1);
        fail(&breaker);
        advance(PAUSE).await;
        drop(breaker.admit().expect("the probe"));
        assert_eq!(
            (breaker.state(), breaker.admit().expect_err("open")),
            (BreakerState::Open, PAUSE)
        );
        advance(PAUSE).await;
        assert!(breaker.admit().is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_sent_before_it_opened_says_nothing_afterwards() {
        let breaker = breaker(1);
        let (early, late) = (breaker.admit().expect("closed"), breaker.admit().expect("closed"));
        fail(&breaker);
        early.answered();
        assert_eq!(breaker.state(), BreakerState::Open);
        advance(PAUSE).await;
        breaker.admit().expect("the probe").answered();
        late.failed();
        assert_eq!(breaker.state(), BreakerState::Closed);
    }
}

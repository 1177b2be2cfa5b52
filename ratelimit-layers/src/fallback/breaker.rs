//! [`Breaker`]: a circuit breaker (Nygard, "Release It!", 2007). It is closed while the store answers, open after some
//! consecutive failures, and half-open while a single probe finds out whether the store answers again.
//!
//! A call that was sent before the breaker opened says nothing about the store now. So each call belongs to a *generation*,
//! and outcomes of earlier generations are ignored. A probe that its caller drops counts as failed; otherwise the breaker
//! would stay half-open.

use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use crate::lock;

/// The state of the circuit breaker of a [`Fallback`](crate::Fallback).
///
/// As a number, it is the value of the gauge `ratelimit_breaker_state`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BreakerState {
    /// The store is asked.
    Closed = 0,
    /// One call, the probe, asks the store; all others are decided without it.
    HalfOpen = 1,
    /// The store is not asked.
    Open = 2,
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
pub(super) struct Breaker {
    /// How many consecutive failures open it.
    most_failures: u32,
    /// How long it stays open before a probe.
    pub(super) pause: Duration,
    /// How long a probe may take.
    probe_time: Duration,
    /// And from when on a call may probe, unless it is closed. So it is beside another probe as well: a caller may keep a
    /// future and not poll it.
    state: Mutex<(BreakerState, Option<Instant>)>,
    /// Grows, under the lock, with each change of the state, and is even while it is closed. The outcome of a call from before
    /// a change says nothing about the store of now.
    generation: AtomicU64,
    /// How many calls in a row have failed while it is closed. A success after a success needs no lock.
    failures: AtomicU32,
    /// The name of the store, which tells several in one process apart.
    #[allow(dead_code, reason = "nothing is reported without a feature")]
    pub(super) name: Box<str>,
    /// When a line about each state is due: a store that fails again and again fills no log.
    #[cfg(feature = "tracing")]
    paces: [crate::pace::Pace; 3],
}

/// A call that may be sent to the store. It must be told how the call ended; dropping a probe counts as a failure, so that
/// the breaker does not stay half-open.
#[derive(Debug)]
pub(super) struct CallPermit<'b> {
    breaker: &'b Breaker,
    generation: u64,
}

impl Breaker {
    /// The breaker of the store of this name.
    pub(super) fn new(failures: u32, pause: Duration, probe_time: Duration, name: &str) -> Self {
        let breaker = Self {
            most_failures: failures,
            pause,
            probe_time,
            state: Mutex::new((BreakerState::Closed, None)),
            generation: AtomicU64::new(0),
            failures: AtomicU32::new(0),
            name: name.into(),
            #[cfg(feature = "tracing")]
            paces: std::array::from_fn(|_| crate::pace::Pace::new()),
        };
        breaker.report_state(BreakerState::Closed);
        breaker
    }

    pub(super) fn state(&self) -> BreakerState {
        lock(&self.state).0
    }

    /// Admits a call to the store, or says how long until a call may be admitted.
    pub(super) fn admit(&self) -> Result<CallPermit<'_>, Duration> {
        let generation = self.generation.load(Ordering::Acquire);
        if generation.is_multiple_of(2) {
            return Ok(CallPermit { breaker: self, generation });
        }
        let mut state = lock(&self.state);
        if let (away @ (BreakerState::Open | BreakerState::HalfOpen), probes) = *state {
            let left = |probes: Instant| probes.saturating_duration_since(Instant::now());
            let left = probes.map_or(Duration::MAX, left);
            if !left.is_zero() {
                return Err(if away == BreakerState::Open { left } else { self.pause });
            }
            self.turn(&mut state, BreakerState::HalfOpen, self.probe_time);
        }
        Ok(CallPermit { breaker: self, generation: self.generation.load(Ordering::Acquire) })
    }

    /// Changes the state. If it is not closed then, a call may probe in so long.
    fn turn(&self, state: &mut (BreakerState, Option<Instant>), to: BreakerState, wait: Duration) {
        *state = (to, Instant::now().checked_add(wait));
        let odd = (self.generation.load(Ordering::Acquire) + 1) | 1;
        self.generation.store(odd + u64::from(to == BreakerState::Closed), Ordering::Release);
        self.report_state(to);
    }

    #[allow(
        clippy::unused_self,
        unused_variables,
        reason = "nothing is reported without a feature"
    )]
    fn report_state(&self, state: BreakerState) {
        #[cfg(feature = "metrics")]
        crate::metrics::breaker(&self.name, state);
        #[cfg(feature = "tracing")]
        if self.paces[state as usize].is_due(std::time::Instant::now()) {
            crate::traced::breaker(&self.name, state);
        }
    }
}

impl CallPermit<'_> {
    const fn is_probe(&self) -> bool {
        !self.generation.is_multiple_of(2)
    }

    /// Changes the state, as [`Breaker::turn`] does, if it is still that in which the call was admitted and `turns` says so.
    fn turn_if(&self, turns: impl FnOnce(&Breaker) -> bool, to: BreakerState, wait: Duration) {
        let mut state = lock(&self.breaker.state);
        let is_current = self.generation == self.breaker.generation.load(Ordering::Acquire);
        if is_current && turns(self.breaker) {
            self.breaker.turn(&mut state, to, wait);
        }
    }

    /// The store answered.
    pub(super) fn answered(self) {
        if self.is_probe() || self.breaker.failures.load(Ordering::Relaxed) > 0 {
            let turns = |breaker: &Breaker| {
                breaker.failures.store(0, Ordering::Relaxed);
                self.is_probe()
            };
            self.turn_if(turns, BreakerState::Closed, Duration::ZERO);
        }
    }

    /// The store was not asked after all. The next call probes in place of this one.
    pub(super) fn not_sent(self) {
        if self.is_probe() {
            self.turn_if(|_| true, BreakerState::Open, Duration::ZERO);
        }
    }

    /// The store did not answer, or could not decide.
    pub(super) fn failed(self) {
        let turns = |breaker: &Breaker| {
            let failures = breaker.failures.fetch_add(1, Ordering::Relaxed) + 1;
            self.is_probe() || failures >= breaker.most_failures
        };
        self.turn_if(turns, BreakerState::Open, self.breaker.pause);
    }
}

impl Drop for CallPermit<'_> {
    fn drop(&mut self) {
        // A probe that was told how it ended has changed the state.
        if self.is_probe() {
            self.turn_if(|_| true, BreakerState::Open, self.breaker.pause);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::advance;

    const PAUSE: Duration = Duration::from_secs(1);
    const PROBE_TIME: Duration = Duration::from_millis(100);

    /// One that opens after one failure.
    fn breaker() -> Breaker {
        Breaker::new(1, PAUSE, PROBE_TIME, "test")
    }

    fn fail(breaker: &Breaker) {
        breaker.admit().expect("closed, or time for a probe").failed();
    }

    #[tokio::test(start_paused = true)]
    async fn one_probe_at_a_time_decides_whether_it_closes() {
        let breaker = breaker();
        fail(&breaker);
        // A probe whose caller goes away counts as failed.
        let endings: [fn(CallPermit<'_>); 2] = [|probe| probe.failed(), |probe| drop(probe)];
        for ends in endings {
            advance(Duration::from_millis(999)).await;
            assert_eq!(breaker.admit().expect_err("open"), Duration::from_millis(1));
            advance(Duration::from_millis(1)).await;
            let probe = breaker.admit().expect("the probe");
            assert_eq!(breaker.state(), BreakerState::HalfOpen);
            assert!(breaker.admit().is_err(), "a second call beside a probe");
            ends(probe);
            assert_eq!(breaker.state(), BreakerState::Open);
            assert_eq!(breaker.admit().expect_err("open"), PAUSE);
        }
        advance(PAUSE).await;
        // A caller may keep a probe and not poll it.
        let kept = breaker.admit().expect("the probe");
        advance(PROBE_TIME).await;
        breaker.admit().expect("another probe").answered();
        drop(kept);
        assert_eq!(breaker.state(), BreakerState::Closed);
        assert!(breaker.admit().is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_sent_before_it_opened_says_nothing_afterwards() {
        let breaker = breaker();
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

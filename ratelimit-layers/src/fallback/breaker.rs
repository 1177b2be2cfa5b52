//! [`Breaker`]: a circuit breaker (Nygard, "Release It!", 2007). It is closed while the store answers, open after some
//! consecutive failures, and half-open while a single probe finds out whether the store answers again.
//!
//! A call that was sent before the breaker opened says nothing about the store now. So each call belongs to a *generation*,
//! and outcomes of earlier generations are ignored. A probe that its caller drops counts as failed; otherwise the breaker
//! would stay half-open.
//!
//! [`Breakers`] has one for each number that the store [gives](ratelimit_core::Store::server_of) its servers, so that a server
//! that is down takes away only its own keys.

use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dashmap::DashMap;
use tokio::time::Instant;

use crate::lock;

/// The most servers, and combinations of them, that have a breaker of their own: a cluster has at most a thousand nodes.
const MOST_SERVERS: usize = 1_024;

/// The state of the circuit breaker of a [`Fallback`](crate::Fallback): where a store has several servers, and so several
/// breakers, the one that is furthest from closed.
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

/// The breakers of a store: one for the whole store, and one per server of a store that has several.
#[derive(Debug)]
pub(super) struct Breakers {
    shared: Arc<SharedBreakers>,
    /// Of a store with one server, of batches whose server is unknown, and of servers beyond the most.
    common: Arc<Breaker>,
    by_server: DashMap<u64, Arc<Breaker>>,
}

/// What the breakers of a store share.
#[derive(Debug)]
struct SharedBreakers {
    /// How many consecutive failures open one.
    most_failures: u32,
    /// How long one stays open before a probe.
    pause: Duration,
    /// How long a probe may take.
    probe_time: Duration,
    /// The name of the store, which tells several in one process apart.
    #[allow(dead_code, reason = "nothing is reported without a feature")]
    name: Box<str>,
    /// How many are half-open, and how many are open. Locked after a breaker's state.
    away: Mutex<[usize; 2]>,
    /// How often one has closed.
    closings: AtomicU64,
    /// When a line about each state is due: a store that fails again and again fills no log.
    #[cfg(feature = "tracing")]
    paces: [crate::pace::Pace; 3],
}

#[derive(Debug)]
pub(super) struct Breaker {
    shared: Arc<SharedBreakers>,
    /// And from when on a call may probe, unless it is closed. So it is beside another probe as well: a caller may keep a
    /// future and not poll it.
    state: Mutex<(BreakerState, Option<Instant>)>,
    /// Grows, under the lock, with each change of the state, and is even while it is closed. The outcome of a call from before
    /// a change says nothing about the store of now.
    generation: AtomicU64,
    /// How many calls in a row have failed while it is closed. A success after a success needs no lock.
    failures: AtomicU32,
}

/// A call that may be sent to the store. It must be told how the call ended; dropping a probe counts as a failure, so that
/// the breaker does not stay half-open.
#[derive(Debug)]
pub(super) struct CallPermit {
    breaker: Arc<Breaker>,
    generation: u64,
}

impl Breakers {
    /// The breakers of the store of this name.
    pub(super) fn new(failures: u32, pause: Duration, probe_time: Duration, name: &str) -> Self {
        let shared = Arc::new(SharedBreakers {
            most_failures: failures,
            pause,
            probe_time,
            name: name.into(),
            away: Mutex::default(),
            closings: AtomicU64::new(0),
            #[cfg(feature = "tracing")]
            paces: std::array::from_fn(|_| crate::pace::Pace::new()),
        });
        shared.report(BreakerState::Closed, BreakerState::Closed);
        let common = Arc::new(Breaker::new(&shared));
        Self { shared, common, by_server: DashMap::new() }
    }

    /// That of a server, or of the whole store.
    pub(super) fn of(&self, server: Option<u64>) -> Arc<Breaker> {
        let Some(server) = server else { return Arc::clone(&self.common) };
        if let Some(known) = self.by_server.get(&server) {
            return Arc::clone(&known);
        }
        if self.by_server.len() >= MOST_SERVERS {
            // A new one knows as much, unless a call in flight is to tell the old one how it ended.
            self.by_server
                .retain(|_, breaker| !breaker.is_idle() || Arc::strong_count(breaker) > 1);
            if self.by_server.len() >= MOST_SERVERS {
                return Arc::clone(&self.common);
            }
        }
        let new = || Arc::new(Breaker::new(&self.shared));
        Arc::clone(&self.by_server.entry(server).or_insert_with(new))
    }

    /// The state that is furthest from closed.
    pub(super) fn state(&self) -> BreakerState {
        furthest(*lock(&self.shared.away))
    }

    /// How many are not closed.
    pub(super) fn away(&self) -> usize {
        lock(&self.shared.away).iter().sum()
    }

    pub(super) fn pause(&self) -> Duration {
        self.shared.pause
    }

    #[cfg(feature = "metrics")]
    pub(super) fn name(&self) -> &str {
        &self.shared.name
    }

    /// How often one of them has closed: as long as this is the same, servers that were away still are.
    pub(super) fn closings(&self) -> u64 {
        self.shared.closings.load(Ordering::SeqCst)
    }
}

const fn furthest([half_open, open]: [usize; 2]) -> BreakerState {
    match (half_open, open) {
        (0, 0) => BreakerState::Closed,
        (_, 0) => BreakerState::HalfOpen,
        _ => BreakerState::Open,
    }
}

impl SharedBreakers {
    /// A breaker turns from one state to another.
    fn report(&self, from: BreakerState, to: BreakerState) {
        let mut away = lock(&self.away);
        for (state, is_new) in [(from, false), (to, true)] {
            if let Some(count) = (state as usize).checked_sub(1).and_then(|at| away.get_mut(at)) {
                *count = if is_new { *count + 1 } else { count.saturating_sub(1) };
            }
        }
        if to == BreakerState::Closed {
            self.closings.fetch_add(1, Ordering::SeqCst);
        }
        // Under the lock, so that what is reported last is the state of now.
        #[cfg(feature = "metrics")]
        crate::metrics::breaker(&self.name, furthest(*away), to);
        #[cfg(feature = "tracing")]
        if self.paces[to as usize].is_due(std::time::Instant::now()) {
            crate::traced::breaker(&self.name, to, away.iter().sum());
        }
    }
}

impl Breaker {
    fn new(shared: &Arc<SharedBreakers>) -> Self {
        Self {
            shared: Arc::clone(shared),
            state: Mutex::new((BreakerState::Closed, None)),
            generation: AtomicU64::new(0),
            failures: AtomicU32::new(0),
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.generation.load(Ordering::Acquire).is_multiple_of(2)
    }

    /// Whether it knows nothing that a new one does not.
    fn is_idle(&self) -> bool {
        self.is_closed() && self.failures.load(Ordering::Relaxed) == 0
    }

    /// Admits a call to the store, or says how long until a call may be admitted.
    pub(super) fn admit(self: Arc<Self>) -> Result<CallPermit, Duration> {
        let generation = self.generation.load(Ordering::Acquire);
        if generation.is_multiple_of(2) {
            return Ok(CallPermit { breaker: self, generation });
        }
        let mut state = lock(&self.state);
        if let (away @ (BreakerState::Open | BreakerState::HalfOpen), probes) = *state {
            let left = |probes: Instant| probes.saturating_duration_since(Instant::now());
            let left = probes.map_or(Duration::MAX, left);
            if !left.is_zero() {
                return Err(if away == BreakerState::Open { left } else { self.shared.pause });
            }
            self.turn(&mut state, BreakerState::HalfOpen, self.shared.probe_time);
        }
        drop(state);
        let generation = self.generation.load(Ordering::Acquire);
        Ok(CallPermit { breaker: self, generation })
    }

    /// Changes the state. If it is not closed then, a call may probe in so long.
    fn turn(&self, state: &mut (BreakerState, Option<Instant>), to: BreakerState, wait: Duration) {
        let from = std::mem::replace(state, (to, Instant::now().checked_add(wait))).0;
        let odd = (self.generation.load(Ordering::Acquire) + 1) | 1;
        self.generation.store(odd + u64::from(to == BreakerState::Closed), Ordering::Release);
        self.shared.report(from, to);
    }
}

impl CallPermit {
    const fn is_probe(&self) -> bool {
        !self.generation.is_multiple_of(2)
    }

    /// Changes the state, as [`Breaker::turn`] does, if it is still that in which the call was admitted and `turns` says so.
    fn turn_if(&self, turns: impl FnOnce(&Breaker) -> bool, to: BreakerState, wait: Duration) {
        let mut state = lock(&self.breaker.state);
        let is_current = self.generation == self.breaker.generation.load(Ordering::Acquire);
        if is_current && turns(&self.breaker) {
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
            self.is_probe() || failures >= breaker.shared.most_failures
        };
        self.turn_if(turns, BreakerState::Open, self.breaker.shared.pause);
    }
}

impl Drop for CallPermit {
    fn drop(&mut self) {
        // A probe that was told how it ended has changed the state.
        if self.is_probe() {
            self.turn_if(|_| true, BreakerState::Open, self.breaker.shared.pause);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::advance;

    const PAUSE: Duration = Duration::from_secs(1);
    const PROBE_TIME: Duration = Duration::from_millis(100);

    /// Those of a store, which open after one failure.
    fn breakers() -> Breakers {
        Breakers::new(1, PAUSE, PROBE_TIME, "test")
    }

    fn fail(breaker: &Arc<Breaker>) {
        breaker.clone().admit().expect("closed, or time for a probe").failed();
    }

    #[tokio::test(start_paused = true)]
    async fn one_probe_at_a_time_decides_whether_it_closes() {
        let breakers = breakers();
        let breaker = breakers.of(None);
        fail(&breaker);
        // A probe whose caller goes away counts as failed.
        let endings: [fn(CallPermit); 2] = [|probe| probe.failed(), |probe| drop(probe)];
        for ends in endings {
            advance(Duration::from_millis(999)).await;
            assert_eq!(breaker.clone().admit().expect_err("open"), Duration::from_millis(1));
            advance(Duration::from_millis(1)).await;
            let probe = breaker.clone().admit().expect("the probe");
            assert_eq!(breakers.state(), BreakerState::HalfOpen);
            assert!(breaker.clone().admit().is_err(), "a second call beside a probe");
            ends(probe);
            assert_eq!(breakers.state(), BreakerState::Open);
            assert_eq!(breaker.clone().admit().expect_err("open"), PAUSE);
        }
        advance(PAUSE).await;
        // A caller may keep a probe and not poll it.
        let kept = breaker.clone().admit().expect("the probe");
        advance(PROBE_TIME).await;
        breaker.clone().admit().expect("another probe").answered();
        drop(kept);
        assert_eq!(breakers.state(), BreakerState::Closed);
        assert!(breaker.clone().admit().is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_sent_before_it_opened_says_nothing_afterwards() {
        let breakers = breakers();
        let breaker = breakers.of(None);
        let (early, late) =
            (breaker.clone().admit().expect("closed"), breaker.clone().admit().expect("closed"));
        fail(&breaker);
        early.answered();
        assert_eq!(breakers.state(), BreakerState::Open);
        advance(PAUSE).await;
        breaker.clone().admit().expect("the probe").answered();
        late.failed();
        assert_eq!(breakers.state(), BreakerState::Closed);
    }

    #[tokio::test(start_paused = true)]
    async fn each_server_has_a_breaker_and_the_worst_state_is_told() {
        let breakers = breakers();
        let told = |due| assert_eq!((breakers.state(), breakers.away()), due);
        fail(&breakers.of(Some(1)));
        assert!(breakers.of(Some(1)).admit().is_err());
        for other in [None, Some(2)] {
            breakers.of(other).admit().expect("another server").answered();
        }
        told((BreakerState::Open, 1));
        fail(&breakers.of(Some(2)));
        advance(PAUSE).await;
        let [one, two] = [1, 2].map(|server| breakers.of(Some(server)).admit().expect("a probe"));
        told((BreakerState::HalfOpen, 2));
        one.answered();
        told((BreakerState::HalfOpen, 1));
        two.failed();
        told((BreakerState::Open, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn a_breaker_with_a_call_in_flight_stays_and_learns_how_the_call_ends() {
        let breakers = breakers();
        let call = breakers.of(Some(0)).admit().expect("closed");
        for server in 1..=MOST_SERVERS as u64 {
            breakers.of(Some(server)).admit().expect("closed").answered();
        }
        call.failed();
        assert_eq!(breakers.away(), 1);
        assert!(breakers.of(Some(0)).admit().is_err(), "it is open");
        advance(PAUSE).await;
        breakers.of(Some(0)).admit().expect("the probe").answered();
        assert_eq!((breakers.state(), breakers.away()), (BreakerState::Closed, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn the_breakers_of_servers_that_are_gone_make_way_and_open_ones_stay() {
        let breakers = breakers();
        fail(&breakers.of(Some(0)));
        for server in 1..10_000 {
            breakers.of(Some(server)).admit().expect("closed").answered();
            assert!(breakers.by_server.len() <= MOST_SERVERS);
        }
        assert!(breakers.of(Some(0)).admit().is_err());
        // Where all are open, the others have one together.
        for server in 0..MOST_SERVERS as u64 {
            let _failed = breakers.of(Some(server)).admit().map(CallPermit::failed);
        }
        assert!(Arc::ptr_eq(&breakers.of(Some(u64::MAX)), &breakers.common));
    }
}

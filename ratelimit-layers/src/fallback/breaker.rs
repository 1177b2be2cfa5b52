//! [`Breaker`]: a circuit breaker (Nygard, "Release It!", 2007). It is closed while the store
//! answers, open after some consecutive failures, and half-open while a single probe finds out
//! whether the store answers again.
//!
//! A call that was sent before the breaker opened says nothing about the store now. So each call
//! belongs to a *generation*, and outcomes of earlier generations are ignored. A probe that its
//! caller drops counts as failed; otherwise the breaker would stay half-open.
//!
//! [`Breakers`] has one for each number that the store [gives](ratelimit_core::Store::server_of)
//! its servers, so that a server that is down takes away only its own keys.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dashmap::DashMap;
use derive_where::derive_where;
use tokio::time::Instant;

use crate::observed::{BreakerState, Observer};
use crate::{OnDrop, lock};

/// The most servers, and combinations of them, that have a breaker of their own: a cluster has at
/// most a thousand nodes.
const MOST_SERVERS: usize = 1_024;
/// The most changes that wait for their report, while an observer takes its time. Above that, the
/// oldest is dropped.
const MOST_UNREPORTED: usize = 1_024;

/// The breakers of a store: one for the whole store, and one per server of a store that has
/// several.
#[derive(Debug)]
pub(super) struct Breakers {
    shared: Arc<SharedBreakers>,
    /// Of a store with one server, of batches whose server is unknown, and of servers beyond the
    /// most.
    common: Arc<Breaker>,
    by_server: DashMap<u64, Arc<Breaker>>,
}

/// What the breakers of a store share.
#[derive_where(Debug)]
struct SharedBreakers {
    /// How many consecutive failures open one.
    most_failures: u32,
    /// How long one stays open before a probe.
    pause: Duration,
    /// How long a probe may take.
    probe_time: Duration,
    /// The name of the store, which tells several in one process apart.
    name: Box<str>,
    #[derive_where(skip)]
    observers: Vec<Box<dyn Observer>>,
    /// Locked after a breaker's state, and never while an observer runs.
    changes: Mutex<Changes>,
    /// How often one has closed.
    closings: AtomicU64,
}

/// How many breakers are half-open, and how many are open.
type NotClosed = [usize; 2];

#[derive(Debug, Default)]
struct Changes {
    not_closed: NotClosed,
    /// In their order, each with the numbers of then.
    unreported: VecDeque<(BreakerState, NotClosed)>,
    /// Whether a thread reports. It reports all that others add meanwhile, so that the last report
    /// is the state of now.
    is_reporting: bool,
}

#[derive(Debug)]
pub(super) struct Breaker {
    shared: Arc<SharedBreakers>,
    /// When open or half-open: the time from which a call may probe. A half-open breaker sets it
    /// too, because the probing caller may stop polling its future.
    state: Mutex<(BreakerState, Option<Instant>)>,
    /// Grows, under the lock, with each change of the state, and is even while it is closed. The
    /// outcome of a call from before a change says nothing about the store of now.
    generation: AtomicU64,
    /// How many calls in a row have failed while it is closed. A success after a success needs no
    /// lock.
    failures: AtomicU32,
}

/// A call that may be sent to the store. It must be told how the call ended; dropping a probe
/// counts as a failure, so that the breaker does not stay half-open.
#[derive(Debug)]
pub(super) struct CallPermit {
    breaker: Arc<Breaker>,
    generation: u64,
}

impl Breakers {
    /// The breakers of the store of this name.
    pub(super) fn new(
        failures: u32,
        [pause, probe_time]: [Duration; 2],
        name: &str,
        observers: Vec<Box<dyn Observer>>,
    ) -> Self {
        let shared = Arc::new(SharedBreakers {
            most_failures: failures,
            pause,
            probe_time,
            name: name.into(),
            observers,
            changes: Mutex::default(),
            closings: AtomicU64::new(0),
        });
        shared.note_change(BreakerState::Closed, BreakerState::Closed);
        shared.report();
        let common = Arc::new(Breaker::new(&shared));
        Self { shared, common, by_server: DashMap::new() }
    }

    /// That of a server, or of the whole store.
    pub(super) fn for_server(&self, server: Option<u64>) -> Arc<Breaker> {
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
        furthest(lock(&self.shared.changes).not_closed)
    }

    /// How many are not closed.
    pub(super) fn not_closed(&self) -> usize {
        lock(&self.shared.changes).not_closed.iter().sum()
    }

    pub(super) fn pause(&self) -> Duration {
        self.shared.pause
    }

    /// Tells each observer what this does, by the name of the store.
    pub(super) fn tell(&self, what: impl Fn(&dyn Observer, &str)) {
        self.shared.observers.iter().for_each(|observer| what(&**observer, &self.shared.name));
    }

    /// How often one of them has closed: as long as this is the same, servers that were away still
    /// are.
    pub(super) fn closings(&self) -> u64 {
        self.shared.closings.load(Ordering::SeqCst)
    }
}

const fn furthest([half_open, open]: NotClosed) -> BreakerState {
    match (half_open, open) {
        (0, 0) => BreakerState::Closed,
        (_, 0) => BreakerState::HalfOpen,
        _ => BreakerState::Open,
    }
}

impl SharedBreakers {
    /// Notes that a breaker changes from one state to another, for the next report.
    fn note_change(&self, from: BreakerState, to: BreakerState) {
        let mut changes = lock(&self.changes);
        let Changes { not_closed, unreported, .. } = &mut *changes;
        for (state, is_new) in [(from, false), (to, true)] {
            if let Some(count) =
                (state as usize).checked_sub(1).and_then(|at| not_closed.get_mut(at))
            {
                *count = if is_new { *count + 1 } else { count.saturating_sub(1) };
            }
        }
        if to == BreakerState::Closed {
            self.closings.fetch_add(1, Ordering::SeqCst);
        }
        if unreported.len() == MOST_UNREPORTED {
            unreported.pop_front();
        }
        unreported.push_back((to, *not_closed));
    }

    /// Reports all changes, unless another thread does. Observers are code of others: no lock is
    /// held while they run, so one may ask the fallback.
    fn report(&self) {
        let next = || {
            let mut changes = lock(&self.changes);
            let change = if changes.is_reporting { None } else { changes.unreported.pop_front() };
            changes.is_reporting |= change.is_some();
            change
        };
        while let Some((to, not_closed)) = next() {
            let _ends = OnDrop(|| lock(&self.changes).is_reporting = false);
            for observer in &self.observers {
                let all = (furthest(not_closed), not_closed.iter().sum());
                observer.breaker_changed(&self.name, to, all);
            }
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
            self.set_state(&mut state, BreakerState::HalfOpen, self.shared.probe_time);
        }
        drop(state);
        self.shared.report();
        let generation = self.generation.load(Ordering::Acquire);
        Ok(CallPermit { breaker: self, generation })
    }

    /// Changes the state. If it is not closed then, a call may probe in so long. The caller reports
    /// it when it has released the lock.
    fn set_state(
        &self,
        state: &mut (BreakerState, Option<Instant>),
        to: BreakerState,
        wait: Duration,
    ) {
        let from = std::mem::replace(state, (to, Instant::now().checked_add(wait))).0;
        let odd = (self.generation.load(Ordering::Acquire) + 1) | 1;
        self.generation.store(odd + u64::from(to == BreakerState::Closed), Ordering::Release);
        self.shared.note_change(from, to);
    }
}

impl CallPermit {
    const fn is_probe(&self) -> bool {
        !self.generation.is_multiple_of(2)
    }

    /// Changes the state, as [`Breaker::set_state`] does, if it is still that in which the call was
    /// admitted and `changes` says so.
    fn set_state_if(
        &self,
        changes: impl FnOnce(&Breaker) -> bool,
        to: BreakerState,
        wait: Duration,
    ) {
        let mut state = lock(&self.breaker.state);
        let is_current = self.generation == self.breaker.generation.load(Ordering::Acquire);
        if is_current && changes(&self.breaker) {
            self.breaker.set_state(&mut state, to, wait);
        }
        drop(state);
        self.breaker.shared.report();
    }

    /// The store answered.
    pub(super) fn note_answer(self) {
        if self.is_probe() || self.breaker.failures.load(Ordering::Relaxed) > 0 {
            let changes = |breaker: &Breaker| {
                breaker.failures.store(0, Ordering::Relaxed);
                self.is_probe()
            };
            self.set_state_if(changes, BreakerState::Closed, Duration::ZERO);
        }
    }

    /// The store was not asked after all. The next call probes in place of this one.
    pub(super) fn not_sent(self) {
        if self.is_probe() {
            self.set_state_if(|_| true, BreakerState::Open, Duration::ZERO);
        }
    }

    /// The store did not answer, or could not decide.
    pub(super) fn note_failure(self) {
        let changes = |breaker: &Breaker| {
            let failures = breaker.failures.fetch_add(1, Ordering::Relaxed) + 1;
            self.is_probe() || failures >= breaker.shared.most_failures
        };
        self.set_state_if(changes, BreakerState::Open, self.breaker.shared.pause);
    }
}

impl Drop for CallPermit {
    fn drop(&mut self) {
        // A probe that was told how it ended has changed the state.
        if self.is_probe() {
            self.set_state_if(|_| true, BreakerState::Open, self.breaker.shared.pause);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;

    use ratelimit_core::store::Batch;
    use ratelimit_core::{Algorithm, Store, Verdict};
    use tokio::time::advance;

    use super::*;

    const PAUSE: Duration = Duration::from_secs(1);
    const PROBE_TIME: Duration = Duration::from_millis(100);

    /// Those of a store, which open after one failure.
    fn breakers() -> Breakers {
        Breakers::new(1, [PAUSE, PROBE_TIME], "test", Vec::new())
    }

    fn fail(breaker: &Arc<Breaker>) {
        breaker.clone().admit().expect("closed, or time for a probe").note_failure();
    }

    #[tokio::test(start_paused = true)]
    async fn one_probe_at_a_time_decides_whether_it_closes() {
        let breakers = breakers();
        let breaker = breakers.for_server(None);
        fail(&breaker);
        // A probe whose caller goes away counts as failed.
        let endings: [fn(CallPermit); 2] = [|probe| probe.note_failure(), |probe| drop(probe)];
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
        breaker.clone().admit().expect("another probe").note_answer();
        drop(kept);
        assert_eq!(breakers.state(), BreakerState::Closed);
        assert!(breaker.clone().admit().is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_sent_before_it_opened_says_nothing_afterwards() {
        let breakers = breakers();
        let breaker = breakers.for_server(None);
        let (early, late) =
            (breaker.clone().admit().expect("closed"), breaker.clone().admit().expect("closed"));
        fail(&breaker);
        early.note_answer();
        assert_eq!(breakers.state(), BreakerState::Open);
        advance(PAUSE).await;
        breaker.clone().admit().expect("the probe").note_answer();
        late.note_failure();
        assert_eq!(breakers.state(), BreakerState::Closed);
    }

    #[tokio::test(start_paused = true)]
    async fn each_server_has_a_breaker_and_the_worst_state_is_told() {
        let breakers = breakers();
        let told = |due| assert_eq!((breakers.state(), breakers.not_closed()), due);
        fail(&breakers.for_server(Some(1)));
        assert!(breakers.for_server(Some(1)).admit().is_err());
        for other in [None, Some(2)] {
            breakers.for_server(other).admit().expect("another server").note_answer();
        }
        told((BreakerState::Open, 1));
        fail(&breakers.for_server(Some(2)));
        advance(PAUSE).await;
        let [one, two] =
            [1, 2].map(|server| breakers.for_server(Some(server)).admit().expect("a probe"));
        told((BreakerState::HalfOpen, 2));
        one.note_answer();
        told((BreakerState::HalfOpen, 1));
        two.note_failure();
        told((BreakerState::Open, 1));
    }

    /// A breaker's new state, the state furthest from closed, and how many are not closed.
    type Change = (BreakerState, BreakerState, usize);

    /// Hears of changes, and meanwhile lets another breaker open.
    #[derive(Default)]
    struct Heard(Arc<(OnceLock<Breakers>, Mutex<Vec<Change>>)>);

    impl Observer for Heard {
        type Begun = ();

        fn begin<A: Algorithm>(&self, _: &Batch<'_, A>) {}

        fn end<A: Algorithm, S: Store<A>>(
            &self,
            _: &S,
            _: &Batch<'_, A>,
            (): &(),
            _: Result<&Verdict, &S::Error>,
        ) {
        }

        fn breaker_changed(&self, _: &str, to: BreakerState, all: (BreakerState, usize)) {
            let (breakers, heard) = &*self.0;
            if to == BreakerState::Open
                && let Some(breakers) = breakers.get()
                && breakers.not_closed() == 1
            {
                fail(&breakers.for_server(Some(2)));
            }
            lock(heard).push((to, all.0, all.1));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_observer_may_use_the_breakers_and_hears_of_each_change_in_order() {
        let heard = Heard::default();
        let both = Arc::clone(&heard.0);
        let new = Breakers::new(1, [PAUSE, PROBE_TIME], "test", vec![Box::new(heard)]);
        let breakers = both.0.get_or_init(|| new);
        fail(&breakers.for_server(Some(1)));
        advance(PAUSE).await;
        breakers.for_server(Some(1)).admit().expect("the probe").note_answer();
        let (closed, open) = (BreakerState::Closed, BreakerState::Open);
        let due = [
            (closed, closed, 0),
            (open, open, 1),
            (open, open, 2),
            (BreakerState::HalfOpen, open, 2),
            (closed, open, 1),
        ];
        assert_eq!(*lock(&both.1), due);
    }

    #[tokio::test(start_paused = true)]
    async fn a_breaker_with_a_call_in_flight_stays_and_learns_how_the_call_ends() {
        let breakers = breakers();
        let call = breakers.for_server(Some(0)).admit().expect("closed");
        for server in 1..=MOST_SERVERS as u64 {
            breakers.for_server(Some(server)).admit().expect("closed").note_answer();
        }
        call.note_failure();
        assert_eq!(breakers.not_closed(), 1);
        assert!(breakers.for_server(Some(0)).admit().is_err(), "it is open");
        advance(PAUSE).await;
        breakers.for_server(Some(0)).admit().expect("the probe").note_answer();
        assert_eq!((breakers.state(), breakers.not_closed()), (BreakerState::Closed, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn the_breakers_of_servers_that_are_gone_make_way_and_open_ones_stay() {
        let breakers = breakers();
        fail(&breakers.for_server(Some(0)));
        for server in 1..10_000 {
            breakers.for_server(Some(server)).admit().expect("closed").note_answer();
            assert!(breakers.by_server.len() <= MOST_SERVERS);
        }
        assert!(breakers.for_server(Some(0)).admit().is_err());
        // Where all are open, the others have one together.
        for server in 0..MOST_SERVERS as u64 {
            let _failed = breakers.for_server(Some(server)).admit().map(CallPermit::note_failure);
        }
        assert!(Arc::ptr_eq(&breakers.for_server(Some(u64::MAX)), &breakers.common));
    }
}

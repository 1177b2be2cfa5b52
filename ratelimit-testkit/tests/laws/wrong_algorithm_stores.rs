//! The laws of a store of any algorithm's limits catch a wrong store, and name the broken law.

use std::future::poll_fn;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use ratelimit_core::{
    Algorithm, Batch, Check, Clock, FixedWindow, Gcra, Limit, ManualClock, Now, Op, Store,
    SystemClock, Timestamp, Verdict,
};
use ratelimit_testkit::AlgorithmProperty as Property;
use ratelimit_testkit::{
    AlgorithmHarness, Harness, Instance, PureStore, Refused, StoreClock, try_same_algorithm_on,
};

/// The flaw of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wrong {
    Nothing,
    /// All keys share one state.
    OneKey,
    /// Each check of a batch is decided separately.
    NotAllOrNothing,
    /// A repeated request with an id is executed again.
    DoneAgain,
    /// GET, decide, SET.
    Races,
    /// Nothing that was written disappears.
    Leaks,
    /// Its clock stands still.
    ClockStands,
    /// It forgets states at its own time.
    Forgets,
}

/// A flawed store over the pure one.
struct Faulty<A: Algorithm> {
    wrong: Wrong,
    pure: Mutex<PureStore<A>>,
    clock: ManualClock,
    real: Option<SystemClock>,
    began: Timestamp,
    wrote: AtomicBool,
}

impl<A: Algorithm + Clone> Faulty<A> {
    fn decide(&self, pure: &PureStore<A>, batch: &Batch<'_, A>) -> Result<Verdict, Refused> {
        let now = match batch.time() {
            Now::At(at) => at,
            Now::Store if self.wrong == Wrong::ClockStands => self.began,
            Now::Store => self.real.map_or(self.clock.now(), |clock| clock.now()),
        };
        let key = |key| if self.wrong == Wrong::OneKey { "one" } else { key };
        let checks: Vec<_> =
            batch.checks().iter().map(|check| Check { key: key(check.key), ..*check }).collect();
        let Ok(folded) = Batch::new(&checks) else { return pure.decide(batch).map_err(Refused) };
        let batch = |of: Batch<'_, A>| {
            let id = batch.reservation_id().filter(|_| self.wrong != Wrong::DoneAgain);
            let of = of.op(batch.operation()).now(Now::At(now));
            match id {
                Some(id) => pure.decide(&of.id(id)).map_err(Refused),
                None => pure.decide(&of).map_err(Refused),
            }
        };
        if self.wrong != Wrong::NotAllOrNothing {
            return batch(folded);
        }
        let decided = checks.iter().map(|check| Ok(*batch(Batch::one(check))?.summary()));
        Ok(Verdict::several(decided.collect::<Result<_, Refused>>()?))
    }
}

impl<A: Algorithm + Clone> Store<A> for Faulty<A> {
    type Error = Refused;

    async fn apply(&self, batch: &Batch<'_, A>) -> Result<Verdict, Refused> {
        if batch.operation() != Op::Peek {
            self.wrote.store(true, Ordering::SeqCst);
        }
        if self.wrong == Wrong::Races {
            let seen = self.pure.lock().expect("no panic").clone();
            let_others_run().await;
            let verdict = self.decide(&seen, batch);
            *self.pure.lock().expect("no panic") = seen;
            return verdict;
        }
        let mut pure = self.pure.lock().expect("no panic");
        if self.wrong == Wrong::Forgets && batch.time() == Now::Store {
            *pure = PureStore::new();
        }
        self.decide(&pure, batch)
    }
}

/// Lets other tasks interleave.
async fn let_others_run() {
    let mut waited = false;
    poll_fn(|context| {
        if std::mem::replace(&mut waited, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// A harness for these stores; in real time if the flag is set.
struct InStore(Wrong, bool);

impl<A: Algorithm + Clone> Harness<A> for InStore {
    type Store = Faulty<A>;

    fn new() -> Self {
        Self(Wrong::Nothing, false)
    }

    fn store(&self) -> Faulty<A> {
        let (pure, wrote) = (Mutex::new(PureStore::new()), AtomicBool::new(false));
        let clock = SystemClock::new();
        let (began, real) = (clock.now(), self.1.then_some(clock));
        Faulty { wrong: self.0, pure, clock: ManualClock::new(began), real, began, wrote }
    }

    fn clock(&self, store: &Faulty<A>) -> StoreClock {
        if self.1 { StoreClock::Real } else { StoreClock::from(&store.clock) }
    }

    async fn state(&self, store: &Faulty<A>, limit: &Limit<A>, key: &str) -> Option<A::State> {
        store.pure.lock().expect("no panic").state(limit, key)
    }

    async fn leaks(&self, store: &Faulty<A>, _: Duration) -> Vec<String> {
        let leaks = self.0 == Wrong::Leaks && store.wrote.load(Ordering::SeqCst);
        leaks.then(|| "a key".to_owned()).into_iter().collect()
    }
}

struct Buckets;

impl AlgorithmHarness for Buckets {
    type Algorithm = Gcra;

    fn limits() -> Vec<Instance<Gcra>> {
        [("1/s", 1), ("3/s", 5), ("7/5m", 7)]
            .map(|(rate, burst)| {
                let gcra = Gcra::new(rate.parse().expect("a rate"), burst).expect("a limit");
                Instance::new(format!("{rate} burst {burst}"), gcra)
            })
            .into()
    }
}

struct Windows;

impl AlgorithmHarness for Windows {
    type Algorithm = FixedWindow;

    fn limits() -> Vec<Instance<FixedWindow>> {
        ["1/s", "3/250ms", "40/5m"]
            .map(|rate| {
                let window = FixedWindow::new(rate.parse().expect("a rate")).expect("a limit");
                Instance::new(rate, window)
            })
            .into()
    }
}

/// Enough cases to catch every flaw, with some margin.
const CASES: u32 = 64;

fn caught<T>(wrong: Wrong, property: Property)
where
    T: AlgorithmHarness<Algorithm: Clone>,
{
    for real in [false, true] {
        let outcome = try_same_algorithm_on::<T, _>(&InStore(wrong, real), property, CASES);
        let Err(failure) = outcome else { panic!("{property:?} does not catch {wrong:?}") };
        assert_eq!(failure.violation.law, property.law(), "{failure}");
    }
}

fn all<T: AlgorithmHarness<Algorithm: Clone>>() {
    for property in Property::KEPT {
        for real in [false, true] {
            let outcome =
                try_same_algorithm_on::<T, _>(&InStore(Wrong::Nothing, real), *property, CASES);
            assert!(outcome.is_ok(), "{}", outcome.expect_err("not kept"));
        }
    }
    caught::<T>(Wrong::OneKey, Property::OneAnswerEverywhere);
    caught::<T>(Wrong::NotAllOrNothing, Property::OneAnswerEverywhere);
    caught::<T>(Wrong::DoneAgain, Property::OneAnswerEverywhere);
    caught::<T>(Wrong::Races, Property::ManyTasksAreAdmittedAsOne);
    caught::<T>(Wrong::Leaks, Property::NothingLeaks);
    caught::<T>(Wrong::ClockStands, Property::DecidesByItsOwnClock);
    caught::<T>(Wrong::Forgets, Property::DecidesByItsOwnClock);
}

#[test]
fn wrong_stores_of_buckets_are_caught_by_the_law_that_names_them() {
    all::<Buckets>();
}

#[test]
fn wrong_stores_of_windows_are_caught_by_the_law_that_names_them() {
    all::<Windows>();
}

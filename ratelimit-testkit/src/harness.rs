//! [`Harness`]: all that a backend has to tell the laws about itself.

use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::Duration;

use ratelimit_core::{Algorithm, Limit, ManualClock, Policy, Store, Timestamp};

use crate::capability::Capability;

/// How the laws get at a store.
///
/// Every test makes one harness, and asks it for a fresh store for every case.
/// [`conformance!`](crate::conformance) writes the tests. A store of limits by an algorithm that is not built in has
/// a harness for that algorithm, for [`algorithm_conformance!`](crate::algorithm_conformance).
///
/// A store in memory needs little more than [`store`](Self::store), and [`clock`](Self::clock) if its clock can be
/// set. A store on a server
///
/// - holds a runtime, and hands [`block_on`](Self::block_on) to it;
/// - connects in `store`, through the runtime, under a prefix that no other store has;
/// - tells in [`leaks`](Self::leaks) every key under that prefix whose time to live is none, or longer
///   than `within`;
/// - runs fewer cases, some 32, and small traces of 3 requests.
pub trait Harness<A: Algorithm = Policy>: Sync {
    /// The store under test.
    type Store: Store<A>;

    /// How many generated cases a law is tried on. Where they are fewer than 64, traces at the store's own time have at
    /// most 30 requests instead of 100.
    const CASES: u32 = 256;

    /// How long the traces are of which every single one is tried: 4 makes some hundred thousand
    /// traces for each algorithm, 3 some five thousand, which is right for a server.
    const SMALL_TRACE_REQUESTS: u32 = 4;

    /// What the store cannot do. The laws do without, and each test that is skipped says so by its name. As a
    /// default the store can do everything.
    const LACKS: &'static [Capability] = &[];

    /// The harness of one test: clocks, runtimes, a server, whatever all its stores share.
    fn new() -> Self;

    /// A store in which nothing has been written yet, apart from all others. Called outside of
    /// [`block_on`](Self::block_on).
    fn store(&self) -> Self::Store;

    /// Runs a future to its end. Called from several threads at the same time.
    fn block_on<F: Future>(&self, future: F) -> F::Output {
        block_on(future)
    }

    /// The clock that the store reads by itself under [`Now::Store`](ratelimit_core::Now::Store). By default it runs
    /// at the speed of real time: then the laws wait some twenty milliseconds now and then, and try traces at the store's
    /// own time on slow limits only. Where it can be set, they set it, and ask for more.
    fn clock(&self, store: &Self::Store) -> StoreClock {
        let _ = store;
        StoreClock::Real
    }

    /// What is stored for a key of a limit, decoded. `None` if nothing is, or if it was written by
    /// another algorithm.
    fn state(
        &self,
        store: &Self::Store,
        limit: &Limit<A>,
        key: &str,
    ) -> impl Future<Output = Option<A::State>>;

    /// What the store would still hold when nothing that was written can matter any longer: a
    /// description of each such thing, none if all is well.
    ///
    /// Everything was written just now, by the store's own clock ([`Now::Store`]) or with the
    /// padding of [`Now::At`] already counted into `within`. A store with a clock of its own moves
    /// it on by `within` and sweeps; a store on a server looks at the time to live of all its keys.
    ///
    /// [`Now::Store`]: ratelimit_core::Now::Store
    /// [`Now::At`]: ratelimit_core::Now::At
    fn leaks(&self, store: &Self::Store, within: Duration) -> impl Future<Output = Vec<String>>;
}

/// The clock that a store reads by itself.
#[derive(Clone)]
pub enum StoreClock {
    /// It runs by itself at the speed of real time, whatever it says: a server's, or the system's.
    Real,
    /// It stands until it is set, and says exactly what it was set to.
    Settable(Arc<dyn Fn(Timestamp) + Send + Sync>),
}

impl StoreClock {
    /// A clock that is set by calling this.
    pub fn settable(set: impl Fn(Timestamp) + Send + Sync + 'static) -> Self {
        Self::Settable(Arc::new(set))
    }
}

impl From<&ManualClock> for StoreClock {
    fn from(clock: &ManualClock) -> Self {
        let clock = clock.clone();
        Self::settable(move |now| clock.set(now))
    }
}

impl fmt::Debug for StoreClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Real => "Real",
            Self::Settable(_) => "Settable",
        })
    }
}

/// Runs a future to its end on this thread, without a runtime.
pub fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(Thread);

    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return output;
        }
        std::thread::park();
    }
}

/// Runs all the futures at the same time, in turns, on whatever polls this one.
pub(crate) async fn join_all<T>(
    futures: impl IntoIterator<Item = impl Future<Output = T>>,
) -> Vec<T> {
    let mut pending: Vec<_> = futures.into_iter().map(Box::pin).map(Some).collect();
    let mut outputs: Vec<Option<T>> = pending.iter().map(|_| None).collect();
    std::future::poll_fn(|context| {
        for (slot, output) in pending.iter_mut().zip(&mut outputs) {
            let Some(future) = slot else { continue };
            if let Poll::Ready(ready) = future.as_mut().poll(context) {
                *output = Some(ready);
                *slot = None;
            }
        }
        if pending.iter().all(Option::is_none) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    outputs.into_iter().flatten().collect()
}

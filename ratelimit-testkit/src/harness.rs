//! [`Harness`]: what the laws need to know about a backend.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::LocalBoxFuture;
use ratelimit_core::store::Batch;
use ratelimit_core::{Algorithm, AnyAlgorithm, Limit, ManualClock, Store, StoreError, Timestamp};

use crate::capability::{Able, Capability};
use crate::laws::Said;

/// Gives the laws access to a store.
///
/// Every test creates one harness and asks it for a fresh store per case.
/// [`conformance!`](crate::conformance) writes the tests. For a custom algorithm, implement
/// `Harness` for that algorithm and pass it to
/// [`algorithm_conformance!`](crate::algorithm_conformance).
///
/// An in-memory store needs little more than [`store`](Self::store), and [`clock`](Self::clock) if
/// its clock can be set. A harness for a store on a server
///
/// - owns a runtime and runs futures on it in [`block_on`](Self::block_on);
/// - connects in `store`, through the runtime, under a prefix that no other store uses;
/// - reports in [`leaks`](Self::leaks) every key under that prefix that has no time to live, or one
///   longer than `within`;
/// - runs fewer cases, about 32, and small traces of 3 requests.
pub trait Harness<A: Algorithm = AnyAlgorithm>: Sync {
    /// The store under test.
    type Store: Store<A>;

    /// The number of generated cases per law. Below 64, traces at the store's own time have at most
    /// 30 requests instead of 100.
    const CASES: u32 = 96;

    /// The length of the small traces that are enumerated exhaustively: 4 gives some hundred
    /// thousand traces per algorithm; 3 gives some five thousand, which suits a server.
    const SMALL_TRACE_REQUESTS: u32 = 4;

    /// The capabilities that the store lacks; none by default. The laws avoid them, and each test
    /// that is skipped for one says so by its name.
    const LACKS: &'static [Capability] = &[];

    /// Creates the harness of one test: clocks, runtimes, a server, and whatever else its stores
    /// share.
    fn new() -> Self;

    /// Creates an empty store, isolated from all others. The laws call this outside of
    /// [`block_on`](Self::block_on).
    fn store(&self) -> Self::Store;

    /// Runs a future to completion. Several threads call this concurrently.
    fn block_on<F: Future>(&self, future: F) -> F::Output {
        block_on(future)
    }

    /// The clock that the store reads under [`Now::Store`](ratelimit_core::store::Now::Store).
    ///
    /// By default it runs in real time: the laws then wait some 20 ms in places, and try traces at
    /// the store's own time on slow limits only. A settable clock lets them check more, without
    /// waiting.
    fn clock(&self, store: &Self::Store) -> StoreClock {
        let _ = store;
        StoreClock::Real
    }

    /// The decoded state of a limit's key. `None` if the key has no state.
    fn state(
        &self,
        store: &Self::Store,
        limit: &Limit<A>,
        key: &str,
    ) -> impl Future<Output = Option<A::State>>;

    /// Describes everything that the store would still keep `within` this time from now, when
    /// nothing that was written can matter any longer; empty if nothing leaks.
    ///
    /// Every write was made just now, either by the store's own clock ([`Now::Store`]) or at a
    /// given time ([`Now::At`]); `within` already includes the padding of the latter. A store with
    /// a clock of its own advances it by `within` and sweeps; a store on a server checks the time
    /// to live of all its keys. A key may expire between the command that lists it and the one that
    /// asks for its time to live (in Redis `KEYS` and `PTTL`, which then says -2): it is gone, and
    /// no leak; -1 says that it never expires.
    ///
    /// A store whose [`clock`](Self::clock) is real time can be moved here, too: give it a
    /// [`Clock`](ratelimit_core::Clock) that adds an offset, kept in an atomic number, to the
    /// system's time, and add `within` to the offset. The laws call this several times per store
    /// and use the store in between, so the offset must only grow.
    ///
    /// [`Now::Store`]: ratelimit_core::store::Now::Store
    /// [`Now::At`]: ratelimit_core::store::Now::At
    fn leaks(&self, store: &Self::Store, within: Duration) -> impl Future<Output = Vec<String>>;
}

/// The clock that a store reads by itself.
#[derive(Clone)]
#[non_exhaustive]
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

/// A harness without its type: each law is compiled once for an algorithm, and not for each
/// harness.
pub(crate) trait AnyHarness<A: Algorithm>: Sync {
    /// [`Harness::CASES`].
    fn cases(&self) -> u32;

    /// [`Harness::SMALL_TRACE_REQUESTS`].
    fn small_trace_requests(&self) -> u32;

    fn able(&self) -> Able;

    /// [`Harness::store`].
    fn open(&self) -> Box<dyn AnyStore<A> + '_>;
}

/// A store of a harness, and what the harness knows of it.
pub(crate) trait AnyStore<A: Algorithm>: Sync {
    fn apply<'a>(&'a self, batch: &'a Batch<'_, A>) -> LocalBoxFuture<'a, Said>;

    fn clock(&self) -> StoreClock;

    fn block_on(&self, future: LocalBoxFuture<'_, ()>);

    fn state<'a>(
        &'a self,
        limit: &'a Limit<A>,
        key: &'a str,
    ) -> LocalBoxFuture<'a, Option<A::State>>;

    fn leaks(&self, within: Duration) -> LocalBoxFuture<'_, Vec<String>>;
}

/// A store, and the harness that opened it.
struct Opened<'h, A: Algorithm, H: Harness<A>> {
    harness: &'h H,
    store: H::Store,
}

impl<A: Algorithm + 'static, H: Harness<A>> AnyHarness<A> for H {
    fn cases(&self) -> u32 {
        H::CASES
    }

    fn small_trace_requests(&self) -> u32 {
        H::SMALL_TRACE_REQUESTS
    }

    fn able(&self) -> Able {
        Able::for_store::<A, H>()
    }

    fn open(&self) -> Box<dyn AnyStore<A> + '_> {
        Box::new(Opened { harness: self, store: self.store() })
    }
}

impl<A: Algorithm, H: Harness<A>> AnyStore<A> for Opened<'_, A, H> {
    fn apply<'a>(&'a self, batch: &'a Batch<'_, A>) -> LocalBoxFuture<'a, Said> {
        let answer = async {
            self.store.apply(batch).await.map_err(|error| (error.kind(), error.to_string()))
        };
        Box::pin(answer)
    }

    fn clock(&self) -> StoreClock {
        self.harness.clock(&self.store)
    }

    fn block_on(&self, future: LocalBoxFuture<'_, ()>) {
        self.harness.block_on(future);
    }

    fn state<'a>(
        &'a self,
        limit: &'a Limit<A>,
        key: &'a str,
    ) -> LocalBoxFuture<'a, Option<A::State>> {
        Box::pin(self.harness.state(&self.store, limit, key))
    }

    fn leaks(&self, within: Duration) -> LocalBoxFuture<'_, Vec<String>> {
        Box::pin(self.harness.leaks(&self.store, within))
    }
}

/// Runs a future to its end on this thread, without a runtime.
pub fn block_on<F: Future>(future: F) -> F::Output {
    pollster::block_on(future)
}

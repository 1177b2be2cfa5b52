//! [`OnRedis`]: a harness for stores on a Redis server.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ratelimit_core::{Algorithm, Limit, Policy, Store};

use crate::capability::Capability;
use crate::harness::Harness;
use crate::server::RedisServer;

/// How a store on a Redis server is made, for [`OnRedis`].
///
/// ```
/// # use std::future::Future;
/// # use std::sync::OnceLock;
/// # use ratelimit_core::{Limit, Policy, PolicyState, Refusal};
/// # use ratelimit_testkit::PureStore as MyStore;
/// use ratelimit_testkit::{OnRedis, RedisBacked, conformance};
///
/// struct Mine;
///
/// impl RedisBacked for Mine {
///     type Store = MyStore;
///
///     fn block_on<F: Future>(future: F) -> F::Output {
///         // With tokio, a `Runtime` in a `OnceLock`.
///         ratelimit_testkit::block_on(future)
///     }
///     async fn connect(url: &str, prefix: &str) -> MyStore {
///         // let store = RedisStore::builder().prefix(prefix).connect(url).await.unwrap()
/// #       let _ = (url, prefix);
/// #       MyStore::new()
///     }
///     async fn state(store: &MyStore, limit: &Limit<Policy>, key: &str) -> Option<PolicyState> {
///         // store.state(limit, key).await.unwrap()
/// #       store.state(limit, key)
///     }
/// }
///
/// conformance!(mine_on_redis, OnRedis<Mine>);
/// # fn main() {}
/// ```
pub trait RedisBacked<A: Algorithm = Policy>: Sync + 'static {
    /// The store under test.
    type Store: Store<A> + Sync;

    /// As [`Harness::CASES`].
    const CASES: u32 = 32;
    /// As [`Harness::SMALL_TRACE_REQUESTS`].
    const SMALL_TRACE_REQUESTS: u32 = 3;
    /// As [`Harness::LACKS`].
    const LACKS: &'static [Capability] = &[];

    /// Runs a future to completion, on the runtime that the stores need. Several threads call this concurrently.
    fn block_on<F: Future>(future: F) -> F::Output;

    /// Connects a store whose keys all begin with this prefix and a colon.
    fn connect(url: &str, prefix: &str) -> impl Future<Output = Self::Store>;

    /// As [`Harness::state`].
    fn state(
        store: &Self::Store,
        limit: &Limit<A>,
        key: &str,
    ) -> impl Future<Output = Option<A::State>>;
}

/// The harness of stores on the server that all tests [share](RedisServer::shared): each under a prefix of its own.
#[derive(Debug)]
pub struct OnRedis<B>(PhantomData<fn() -> B>);

/// A store and the prefix of its keys.
#[derive(Debug)]
pub struct Prefixed<S> {
    store: S,
    prefix: String,
}

impl<A: Algorithm, S: Store<A> + Sync> Store<A> for Prefixed<S> {
    type Error = S::Error;

    async fn apply(
        &self,
        batch: &ratelimit_core::Batch<'_, A>,
    ) -> Result<ratelimit_core::Verdict, S::Error> {
        self.store.apply(batch).await
    }
}

impl<A: Algorithm, B: RedisBacked<A>> Harness<A> for OnRedis<B> {
    type Store = Prefixed<B::Store>;

    const CASES: u32 = B::CASES;
    const SMALL_TRACE_REQUESTS: u32 = B::SMALL_TRACE_REQUESTS;
    const LACKS: &'static [Capability] = B::LACKS;

    fn new() -> Self {
        Self(PhantomData)
    }

    /// # Panics
    /// If no server can be started.
    fn store(&self) -> Self::Store {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let prefix = format!("testkit{}", NEXT.fetch_add(1, Ordering::Relaxed));
        let server = RedisServer::shared().expect("a server to test on");
        let store = B::block_on(B::connect(&server.url(), &prefix));
        Prefixed { store, prefix }
    }

    fn block_on<F: Future>(&self, future: F) -> F::Output {
        B::block_on(future)
    }

    async fn state(&self, store: &Self::Store, limit: &Limit<A>, key: &str) -> Option<A::State> {
        B::state(&store.store, limit, key).await
    }

    /// The keys with the store's prefix that have no time to live, or a longer one.
    async fn leaks(&self, store: &Self::Store, within: Duration) -> Vec<String> {
        let kept = "local kept = {} \
             for _, key in ipairs(redis.call('KEYS', ARGV[1] .. ':*')) do \
             local ttl = redis.call('PTTL', key) \
             if ttl < 0 or ttl > tonumber(ARGV[2]) then \
             kept[#kept + 1] = key .. ' lives for ' .. ttl .. ' ms' end end \
             return kept";
        let within_ms = within.as_millis().to_string();
        let server = RedisServer::shared().expect("a server to test on");
        let kept = server.command(&["EVAL", kept, "0", &store.prefix, &within_ms]);
        let kept = kept.expect("the server answers");
        kept.as_array().iter().filter_map(|key| key.as_text().map(str::to_owned)).collect()
    }
}

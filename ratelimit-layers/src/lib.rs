//! Layers for the stores of `ratelimit-core`: each wraps any store, and is a store itself.
//!
//! ```
//! use std::num::NonZeroU64;
//! use ratelimit_core::{Gcra, Limits, OnOutage, RateLimiter};
//! use ratelimit_layers::Fallback;
//! use ratelimit_memory::MemoryStore;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let limits = Limits::builder()
//!     .limit("burst", Gcra::per_second(12)).on_outage(OnOutage::Local)
//!     .build()?;
//! let shared = MemoryStore::new(); // a store on Redis, in a service
//! let nodes = NonZeroU64::new(3).ok_or("none")?;
//! let store = Fallback::builder().nodes(nodes).build(shared, &limits)?;
//! let limiter = RateLimiter::new(limits, store);
//! assert!(limiter.check("alice").await?.allowed());
//! # Ok(())
//! # }
//! ```
//!
//! | type | feature | for |
//! |---|---|---|
//! | [`Fallback`], [`FallbackBuilder`] | | making decisions while the store is unreachable |
//! | [`Allotments`], [`AllotmentsBuilder`] | | serving busy keys from budget that the store has charged in advance |
//! | [`DenialCache`], [`DenialCacheBuilder`] | | rejecting requests that cannot be admitted, without calling the store |
//! | [`TopDenied`] | | the callers that are denied most often |
//! | `Metrics` | `metrics` | decisions, latency and errors, by the crate `metrics` |
//! | `Traced` | `tracing` | a span per decision, by the crate `tracing` |
//! | `Reload`, `Part` | `reload` | replacing a policy while it is in use |
//!
//! No feature is on by default. [`Fallback`] needs a tokio runtime with the time driver enabled
//! (`enable_time`). Put `Metrics` and `Traced` around it, so that they see its decisions:
//! `Metrics::new(Traced::new(fallback))`.
//!
//! # Fewer calls to Redis
//!
//! A [`DenialCache`] answers a denied caller that retries, and [`Allotments`] serve a busy one.
//! Both can wrap the same store:
//!
//! ```
//! use std::time::Duration;
//! use ratelimit_core::{Gcra, Limits, RateLimiter, Source};
//! use ratelimit_layers::{Allotments, DenialCache};
//! use ratelimit_redis::RedisStore;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let server = ratelimit_servers::RedisServer::start()?;
//! # let url = server.url();
//! let store = RedisStore::connect(&url).await?;
//! let store = DenialCache::builder().max_age(Duration::from_secs(1)).build(store);
//! let store = Allotments::builder().lifetime(Duration::from_millis(200)).build(store);
//! let limits = Limits::builder().limit("login", Gcra::per_minute(1)).build()?;
//! let limiter = RateLimiter::new(limits, store);
//!
//! assert!(limiter.check("mallory").await?.allowed());
//! assert!(!limiter.check("mallory").await?.allowed()); // denied by Redis
//! assert_eq!(limiter.check("mallory").await?.source(), Source::Cache);
//! # Ok(())
//! # }
//! ```
//!
//! # All of them
//!
//! From the outside in: what sees decisions, what decides if all below fails, what saves calls, the
//! store.
#![cfg_attr(all(feature = "metrics", feature = "tracing"), doc = "```standalone_crate")]
#![cfg_attr(not(all(feature = "metrics", feature = "tracing")), doc = "```ignore")]
//! use std::num::NonZeroU64;
//! use ratelimit_core::{Gcra, Limits, OnOutage, RateLimiter};
//! use ratelimit_layers::{Allotments, DenialCache, Fallback, Metrics, TopDenied, Traced};
//! use ratelimit_redis::RedisStore;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let limits = Limits::builder()
//!     .limit("burst", Gcra::per_second(12)).on_outage(OnOutage::Local)
//!     .build()?;
//! let redis = RedisStore::builder().connect_lazy("redis://127.0.0.1:1")?;
//! let saving = Allotments::new(DenialCache::new(redis));
//! let nodes = NonZeroU64::new(3).ok_or("none")?;
//! let safe = Fallback::builder().nodes(nodes).build(saving, &limits)?;
//! let store = Metrics::new(Traced::new(TopDenied::new(safe, 1_000)));
//! let limiter = RateLimiter::new(limits, store);
//! let verdict = tokio::spawn(async move { limiter.check("alice").await }).await??;
//! assert!(verdict.allowed()); // no server is there: this node's share
//! # Ok(())
//! # }
//! ```
//!
//! # The callers denied most often
//!
//! ```
//! use ratelimit_core::{Gcra, Limits, RateLimiter};
//! use ratelimit_layers::TopDenied;
//! use ratelimit_memory::MemoryStore;
//!
//! let limits = Limits::builder().limit("login", Gcra::per_minute(5)).build()?;
//! let limiter = RateLimiter::new(limits, TopDenied::new(MemoryStore::new(), 1_000));
//! for _ in 0..8 {
//!     limiter.check_now("mallory")?;
//! }
//! let top = limiter.store().top(10);
//! assert_eq!((&*top[0].key, top[0].count), ("mallory", 3));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Metrics and traces
#![cfg_attr(all(feature = "metrics", feature = "tracing"), doc = "```")]
#![cfg_attr(not(all(feature = "metrics", feature = "tracing")), doc = "```ignore")]
//! use ratelimit_core::{Gcra, Limits, RateLimiter};
//! use ratelimit_layers::{Metrics, Traced};
//! use ratelimit_memory::MemoryStore;
//!
//! let limits = Limits::builder().limit("login", Gcra::per_minute(5)).build()?;
//! let limiter = RateLimiter::new(limits, Metrics::new(Traced::new(MemoryStore::new())));
//! assert!(limiter.check_now("alice")?.allowed());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # A policy that is replaced
#![cfg_attr(feature = "reload", doc = "```")]
#![cfg_attr(not(feature = "reload"), doc = "```ignore")]
//! use ratelimit_core::{Gcra, Limits};
//! use ratelimit_layers::Reload;
//! use ratelimit_memory::MemoryStore;
//!
//! let limits = Limits::builder().limit("login", Gcra::per_minute(5)).build()?;
//! let reload = Reload::new(limits, MemoryStore::new());
//! assert!(reload.limiter().check_now("alice")?.allowed());
//!
//! reload.replace(Limits::builder().limit("login", Gcra::per_minute(3)).build()?)?;
//! assert_eq!(reload.limiter().check_now("alice")?.limit(), 3);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(test, allow(clippy::expect_used, clippy::unwrap_used, clippy::panic))]

use std::sync::{Mutex, MutexGuard, PoisonError};

/// A layer lists the entries that the store which it wraps lists.
macro_rules! lists_logged {
    ($layer:ty, [$($generics:tt)*], $($store:ident).+) => {
        #[deny(clippy::missing_trait_methods)]
        impl<$($generics)*> LogStore<A> for $layer {
            fn logged(
                &self,
                limit: &ratelimit_core::Limit<A>,
                key: &str,
                now: ratelimit_core::store::Now,
            ) -> impl Future<Output = Result<Vec<ratelimit_core::algorithm::LoggedRequest>, S::Error>> + Send {
                self.$($store).+.logged(limit, key, now)
            }
        }
    };
}

/// A layer keeps the records that the store which it wraps keeps.
macro_rules! keeps_records {
    ($layer:ty, [$($generics:tt)*], $($store:ident).+) => {
        keeps_records!($layer, [$($generics)*], $($store).+, std::convert::identity);
    };
    ($layer:ty, [$($generics:tt)*], $($store:ident).+, $error:expr) => {
        #[deny(clippy::missing_trait_methods)]
        impl<$($generics)*> ratelimit_core::store::RecordStore<A> for $layer {
            async fn record(
                &self,
                limit: &ratelimit_core::Limit<A>,
                key: &str,
            ) -> Result<Option<ratelimit_core::Record<A>>, Self::Error> {
                self.$($store).+.record(limit, key).await.map_err($error)
            }

            async fn exchange_record(
                &self,
                limit: &ratelimit_core::Limit<A>,
                key: &str,
                standing: Option<&ratelimit_core::Record<A>>,
                next: Option<&ratelimit_core::Record<A>>,
            ) -> Result<bool, Self::Error> {
                let exchanged = self.$($store).+.exchange_record(limit, key, standing, next);
                exchanged.await.map_err($error)
            }
        }
    };
}

mod allotments;
mod bounded;
mod denial_cache;
mod fallback;
#[cfg(feature = "metrics")]
mod metrics;
mod observed;
#[cfg(any(feature = "metrics", feature = "tracing"))]
mod pace;
mod plain;
#[cfg(feature = "reload")]
mod reload;
mod top_denied;
#[cfg(feature = "tracing")]
mod traced;

#[cfg(feature = "metrics")]
pub use self::metrics::Metrics;
pub use allotments::{AllotmentCounts, Allotments, AllotmentsBuilder};
pub use denial_cache::{CacheCounts, DenialCache, DenialCacheBuilder};
pub use fallback::{Fallback, FallbackBuilder, FallbackError, OnRecovery, OutageCount};
pub use observed::{BreakerState, LimitOutcome, Observed, Observer};
#[cfg(feature = "reload")]
pub use reload::{Part, PolicyChanges, Reload, ReloadError, Watch};
pub use top_denied::{Denied, TopDenied};
#[cfg(feature = "tracing")]
pub use traced::Traced;

/// Locks, also after a panic of a thread that held the lock: no critical section here leaves a
/// state half changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Acts when it is dropped: also where an operation ends by an error, or because its caller
/// leaves.
struct OnDrop<F: FnMut()>(F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

//! The in-process store for `ratelimit-core`: sync and async, for production and for unit tests.
//!
//! ```
//! use ratelimit_core::{Gcra, Limit, Limits, RateLimiter};
//! use ratelimit_memory::MemoryStore;
//!
//! let limits = Limits::new([Limit::new("login", Gcra::new("5/m".parse()?, 5)?)?])?;
//! let limiter = RateLimiter::new(limits, MemoryStore::new());
//!
//! assert!(limiter.check_now("alice")?.allowed());
//! assert_eq!(limiter.check_n_now("alice", 4)?.remaining(), 0);
//! assert!(!limiter.check_now("alice")?.allowed());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Behaviour
//!
//! - What takes more than a few numbers (logs, windows, leases, stacks) lies in shards, each under a lock of
//!   its own, and is stepped in its place. A batch locks its shards in one order, so that batches never
//!   wait for each other in a circle.
//! - Every call frees a few expired states in passing: there is no sweeper thread, and no pause.
//! - The number of keys has a hard cap. When it is reached, a call that needs a place looks for expired
//!   states in its own and a few other shards; where it finds none, new keys share one bucket a
//!   limit, which is counted in [`MemoryStore::overflowed`]: no live key's limit is ever reset to
//!   make room.
//! - The number of entries that logs keep has a hard cap too, [for all of them
//!   together](Builder::entries). When it is reached and nothing has expired, new keys share a bucket as
//!   well, from a sixteenth of the entries that is kept for that; a held key that would need one more is
//!   answered with [`MemoryError::Entries`], and charged nothing. What is denied or takes something off
//!   needs no entry, and goes on.
//! - Keys are known by hashes of them under a secret: about 64 bits, so that two of ten million share a limit
//!   with a chance of some millionths, and nobody can choose which.
//! - [`TopDenied`] over this or any other store lists who is denied most.
//! - A lease can be held by a value: see [`RateLimiter::lease_now`](ratelimit_core::RateLimiter::lease_now).

#![cfg_attr(test, allow(clippy::expect_used, clippy::unwrap_used, clippy::panic))]

mod blocks;
mod clock;
mod hash;
mod holds;
mod lines;
mod shard;
mod store;
mod sync;
mod top_denied;

#[cfg(all(test, loom))]
mod loom_store;

pub use clock::{CoarseClock, PreciseClock};
pub use store::{Builder, MemoryError, MemoryStore};
pub use top_denied::{Denied, TopDenied};
